"""Tasks other than final answers: the reward of a tiny policy rises in thirty steps."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_recipes import train
from tests.support import tiny
from tests.support.chat_server import completion, serving

pytestmark = pytest.mark.slow

RECIPE: dict[str, Any] = {
    "dtype": "float32",
    "bf16": False,
    "use_cpu": True,
    "num_generations": 16,
    "per_device_train_batch_size": 128,
    "max_steps": 30,
    "temperature": 1.0,
    "beta": 0.0,
    "learning_rate": 2e-2,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "seed": 0,
}


def trained(
    folder: Path, words: list[str], rows: list[dict[str, Any]], rewards: list[Any], tokens: int, **dataset: Any
) -> list[float]:
    """Train a policy with the vocabulary `words`, and return the mean reward of each step."""
    vocabulary = ["<pad>", "<eos>", *words]
    policy = folder / "policy"
    tiny.policy(vocab_size=len(vocabulary), initializer_range=0.02).save_pretrained(policy)
    tiny.word_tokenizer(vocabulary).save_pretrained(policy)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        **RECIPE,
        "model_name_or_path": str(policy),
        "dataset": {"path": str(data), "prompt_format": "text", "prompt_template": "{{ question }}", **dataset},
        "rewards": rewards,
        "max_completion_length": tokens,
        "output_dir": str(folder / "run"),
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert train.main(["--config", str(folder / "recipe.yaml")]) == 0
    history = json.loads((folder / "run" / "trainer_state.json").read_text())["log_history"]
    steps = [entry["reward"] for entry in history if "reward" in entry and "loss" in entry]
    assert len(steps) == 30
    return steps


def rises(steps: list[float], by: float) -> bool:
    """Return True if the mean of the last five steps exceeds that of the first five by more than `by`."""
    return sum(steps[-5:]) / 5 - sum(steps[:5]) / 5 > by


GOLD = '{"age": 7, "name": "x"}'
SCHEMA = {"type": "object", "required": ["age", "name"]}
RIGHT, WRONG = ("```python\ndef f(n): return n + 1\n```", "```python\ndef f(n): return n\n```")

# Words of the policy, columns of every row, reward, keys of the dataset. Each text is a single token.
TASKS: dict[str, tuple[list[str], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "numbers": (
        *(["#### 7", "#### 8", "#### 70", "####", "7 7"], {"answer": "7"}),
        *({"name": "gsm8k_correctness", "kwargs": {"extract": "hashes"}}, {}),
    ),
    "boxed": (
        *([r"\boxed{\frac12}", r"\boxed{\frac13}", r"\boxed{2}", "1/2"], {"answer": r"\frac{2}{4}"}),
        *({"name": "math_correctness", "kwargs": {"extract": "boxed"}}, {}),
    ),
    "classification": (
        *(["spam", "ham", "spam or ham", "eggs"], {"label": "Spam"}),
        {"name": "string_match", "kwargs": {"match": "casefold", "extract": "whole"}},
        {"name": "classification", "labels": ["ham", "spam"], "system_prompt": "none"},
    ),
    "extraction": (
        *([GOLD, '{"age": 8, "name": "x"}', '{"age": 7}', "{}"], {"object": GOLD}),
        {"name": "json_schema", "kwargs": {"schema": SCHEMA, "gold_column": "answer"}},
        {"name": "extraction"},
    ),
    "code": (
        *([RIGHT, WRONG, "def f(n): return n + 1", "f"], {"tests": ["assert f(1) == 2", "assert f(-1) == 0"]}),
        *({"name": "unit_tests", "kwargs": {"rule": "all"}}, {}),
    ),
    "multiple choice": (
        *(
            ["A", "B", "A or B", "maybe"],
            {"answer": "A", "choices": {"A": "Rome", "B": "Oslo"}},
            {"name": "choice_correctness"},
        ),
        {},
    ),
    "text": (
        *(["trees are planted", "the city plants trees", "no", "news"], {"answer": "The city plants trees."}),
        *({"name": "string_match", "kwargs": {"match": "f1", "extract": "whole"}}, {}),
    ),
}


@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_learnt(task: str, tmp_path: Path) -> None:
    words, columns, reward, dataset = TASKS[task]
    # The question has words of the vocabulary, because padding alone teaches nothing.
    rows = [{"question": f"{number} one two", **columns} for number in range(64)]
    steps = trained(tmp_path, [*words, "one", "two", "so", "well"], rows, [reward], 1, **dataset)
    assert rises(steps, by=0.2)


def polite(request: dict[str, Any], handler: Any) -> tuple[int, Any]:
    """Answer as a judge whose score is five points per word of thanks, at most 10."""
    ((_, response),) = re.findall(r"The response:\n(MATERIAL-\w+)\n(.*)\n\1", request["messages"][1]["content"])
    score = min(10, 5 * json.loads(response).count("thanks"))
    return 200, completion(json.dumps({"reason": "counted", "score": score}))


def test_a_judges_score_is_learnt(tmp_path: Path) -> None:
    words = ["thanks", "hello", "no", "why", "so", "well"]
    rows = [{"question": f"{n} hello"} for n in range(64)]
    with serving(polite) as server:
        judge = {"name": "judge", "kwargs": {"base_url": server.url, "model": "stub", "cache": str(tmp_path / "cache")}}
        assert rises(trained(tmp_path, words, rows, [judge], 2), by=0.2)
    assert len(server.requests) < 30 * 128  # equal requests are sent once
