"""The adapters of rewards/README.md, called by the published code of their frameworks. Slow, because they download it.

Each framework's wheel is fetched without its dependencies. Modules that the call does not need (ray, aiohttp, hydra)
are replaced by empty ones, and the package's own `__init__`, which imports all of it, is not run.
"""

import json
import subprocess
import sys
import zipfile

import pytest

from tests.grpo_rewards.test_docs import source_of

pytestmark = pytest.mark.slow

# Completion and gold. The docs' adapter for verl reads `####`, the others the answer tag.
ROWS = [
    ("#### 18", "18"), ("<think>\na\n</think>\n<answer>\n18\n</answer>", "18"), ("So.\n#### $18.00", "18"),
    ("So.\n#### 17", "18"), ("<answer>17</answer>", "18"), ("#### 18\n<answer>18</answer>", ""),  # no gold
]  # fmt: skip
PROLOGUE = """
import asyncio, importlib, json, sys, types
from unittest.mock import MagicMock
folder, adapter, rows = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
sys.path.insert(0, folder)

def bare(*packages):
    for name in packages:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [folder + "/" + name.replace(".", "/")]

def empty(*modules):
    for name in modules:
        sys.modules[name] = MagicMock(__spec__=None, __path__=[])
"""
VERL = """
import torch
base = "verl.experimental.reward_loop"
bare("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "verl.experimental", base, base + ".reward_manager")
empty("omegaconf", "verl.utils.ray_utils", "verl.utils.reward_score")
sys.modules["verl"].DataProto = object
sys.modules["verl.utils.ray_utils"].get_event_loop = asyncio.get_event_loop
registry = importlib.import_module(base + ".reward_manager.registry")
sys.modules[base + ".reward_manager"].register = registry.register
naive = importlib.import_module(base + ".reward_manager.naive")
reward = importlib.import_module("verl.trainer.ppo.reward")

class Rows:
    def __init__(self, text, gold):
        ids = torch.tensor([ord(character) for character in text])
        self.batch = {"responses": ids, "attention_mask": torch.ones(len(ids) + 3, dtype=torch.long)}
        self.non_tensor_batch = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": gold},
                                 "extra_info": {"index": 0}}
    def __getitem__(self, index):
        return self

class Tokenizer:
    def decode(self, ids, skip_special_tokens):
        return "".join(map(chr, ids))

async def main():
    config = types.SimpleNamespace(reward={"custom_reward_function": {"path": adapter, "name": "compute_score"}})
    manager = naive.NaiveRewardManager(config, Tokenizer(), reward.get_custom_reward_fn(config))
    return [(await manager.run_single(Rows(*row)))["reward_score"] for row in rows]

print(json.dumps(asyncio.run(main())))
"""
OPENRLHF = """
bare("openrlhf", "openrlhf.utils")
empty("aiohttp", "openrlhf.utils.logging_utils")
agent = importlib.import_module("openrlhf.utils.agent")

class Tokenizer:
    def __call__(self, text, **kwargs):
        import torch
        return {"input_ids": torch.tensor([[ord(character) for character in text]])}
    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(map(chr, ids))

class Engine:
    def __init__(self, text):
        self.text = text
    async def generate(self, prompt_ids, sampling, multi_modal_data=None):
        output = types.SimpleNamespace(token_ids=[*map(ord, self.text)], finish_reason="stop", logprobs=None)
        return types.SimpleNamespace(outputs=[output])

async def main():
    executor = agent.SingleTurnAgentExecutor(adapter)
    sampling = types.SimpleNamespace(max_tokens=500, logprobs=None)
    scores = []
    for text, gold in rows:
        for prompt in ("What is 3 * 6?", "x" * 990 + "3 * 6 = <answer>18</answer>?"):  # the second is cut from the left
            engine = Engine(text + "<|im_end|>")
            row = await executor.execute(prompt, gold, sampling, 1000, Tokenizer(), engine)
            scores.append([row["reward"].item(), row["scores"].item(), row["extra_logs"]["accuracy"].item()])
    return scores

print(json.dumps(asyncio.run(main())))
"""
VERIFIERS = """
bare("verifiers", "verifiers.rubrics", "verifiers.utils")
empty("tenacity", "verifiers.types", "verifiers.utils.error_utils", "verifiers.utils.logging_utils")
sys.modules["verifiers.types"].TASK_INPUT_FIELDS = set()
sys.modules["verifiers.types"].RolloutScore = dict
sys.modules["verifiers"].Parser = MagicMock
sys.modules["verifiers"].Rubric = None
sys.modules["verifiers"].__getattr__ = lambda name: MagicMock()
sys.modules["verifiers"].Rubric = importlib.import_module("verifiers.rubrics.rubric").Rubric
namespace = {}
exec(open(adapter).read(), namespace)

async def main():
    states = [{"prompt": [{"role": "user", "content": "3 * 6?"}], "answer": gold, "trajectory": [],
               "completion": [{"role": "assistant", "content": text}]} for text, gold in rows]
    for state in states:
        await namespace["rubric"].score_rollout(state)
    alone = [state["reward"] for state in states]
    await namespace["rubric"].score_group(states)
    return [alone, [state["reward"] for state in states]]

print(json.dumps(asyncio.run(main())))
"""


def called(requirement, program, adapter, rows, tmp_path):
    """Return the output of `program`, run on the wheel of `requirement`. Skip if the wheel can't be fetched."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    download = subprocess.run([*pip, requirement, "-d", str(tmp_path)], capture_output=True, text=True)
    if download.returncode:
        pytest.skip(f"{requirement} can't be downloaded: {download.stderr.strip().splitlines()[-1]}")
    (wheel,) = tmp_path.glob("*.whl")
    folder = tmp_path / "package"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    pure = list(folder.glob("*.data/purelib"))  # folder of the Python code in OpenRLHF's wheel
    path = tmp_path / "adapter.py"
    path.write_text(source_of(adapter))
    command = [sys.executable, "-c", PROLOGUE + program, str((pure or [folder])[0]), str(path), json.dumps(rows)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_verl_calls_compute_score(tmp_path):
    assert called("verl==0.9.1", VERL, "verl", ROWS, tmp_path) == [2.0, 0.0, 1.5, 0.0, 0.0, 0.0]


def test_openrlhf_calls_reward_func(tmp_path):
    pytest.importorskip("torch")
    scores = called("openrlhf==0.11.2", OPENRLHF, "openrlhf", ROWS, tmp_path)
    # Each text twice: behind a prompt, and behind a prompt that was cut.
    paid = [0.0, 2.0, 0.0, 0.0, 0.0, 0.0]
    assert scores == [[pay, float(pay > 0), float(pay > 0)] for pay in paid for _ in range(2)]


def test_verifiers_calls_the_function_of_a_rubric(tmp_path):
    alone, in_a_group = called("verifiers==0.1.14", VERIFIERS, "verifiers", ROWS, tmp_path)
    assert alone == in_a_group == [0.0, 2.0, 0.0, 0.0, 0.0, 0.0]
