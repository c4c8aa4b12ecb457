"""The rewards inside TRL's trainer and TRL's own command."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from grpo_rewards.math import symbolic
from grpo_rewards.math.correctness import MathCorrectness

pytestmark = pytest.mark.slow
trl = pytest.importorskip("trl")

TOWER = "\\boxed{10^{10^{10}}}"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> str:
    """Folder with a random Llama of a few thousand parameters and a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = str(tmp_path_factory.mktemp("tiny"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@dataclass
class Troubled:
    """`math_correctness` on batches that start with a tower of powers, with the server killed once."""

    reward: MathCorrectness = field(default_factory=lambda: MathCorrectness(deadline=0.5))
    calls: int = 0
    scores: list = field(default_factory=list)
    __name__ = "troubled"

    def __call__(self, prompts, completions, **columns):
        self.calls += 1
        if self.calls == 2:
            os.kill(symbolic._server().pid, signal.SIGKILL)
        texts = [TOWER, "\\boxed{1+x}", *completions[2:]]
        self.scores.append(self.reward(prompts=prompts, completions=texts, **columns))
        return self.scores[-1]


def test_a_run_survives_a_runaway_formula_and_a_killed_server(tiny_model, tmp_path):
    from datasets import Dataset

    reward = Troubled()
    config = trl.GRPOConfig(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=4, num_generations=4, logging_steps=1,
        max_completion_length=4, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
    )  # fmt: skip
    dataset = Dataset.from_list([{"prompt": "x plus one?", "answer": "x+1"}] * 8)
    trainer = trl.GRPOTrainer(model=tiny_model, reward_funcs=[reward], args=config, train_dataset=dataset)
    trainer.train()
    assert trainer.state.global_step == 3
    assert reward.scores == [[0.0, 1.0, 0.0, 0.0]] * 3
    logged = [entry for entry in trainer.state.log_history if "rewards/math_correctness/timeouts" in entry]
    assert [entry["rewards/math_correctness/timeouts"] for entry in logged] == [1.0] * 3
    assert all(entry["rewards/math_correctness/symbolic"] == 0.5 for entry in logged)


# Plain text goes through TRL's command in tests/grpo_recipes/test_train.py.
@pytest.mark.parametrize("conversational", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_trls_own_command_takes_the_rewards_by_dotted_path(tiny_model, tmp_path, conversational):
    data = tmp_path / "data"
    data.mkdir()
    prompt = [{"role": "user", "content": "3*6?"}] if conversational else "3*6?"
    (data / "train.jsonl").write_text((json.dumps({"prompt": prompt, "answer": "Six.\n#### 18"}) + "\n") * 8)
    if conversational:
        template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
        (Path(tiny_model) / "chat_template.jinja").write_text(template)
    command = [
        str(Path(sys.executable).with_name("trl")), "grpo",
        "--model_name_or_path", tiny_model, "--dataset_name", str(data),
        "--reward_funcs", "grpo_rewards.gsm8k_correctness", "grpo_rewards.tag_presence",
        "--output_dir", str(tmp_path / "out"), "--max_steps", "1", "--per_device_train_batch_size", "4",
        "--num_generations", "4", "--max_completion_length", "4", "--use_cpu", "true", "--bf16", "false",
        "--report_to", "none", "--log_completions", "true", "--dtype", "float32",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert "rewards/gsm8k_correctness/mean" in run.stdout + run.stderr
    assert "rewards/tag_presence/mean" in run.stdout + run.stderr
