"""The recipes in recipes/tools: after a short warm start, the reward of a tiny policy rises by calling the tool.

The policy samples from a few tokens only, each a whole call or answer of one of four tasks, or the end of a turn. The
warm start shows transcripts of which one in three calls the tool and is right, and no right answer without a call.
Rewards, tools, environment and limits are those of the recipe.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl.chat_template_utils import qwen3_template

from grpo_recipes import train
from grpo_recipes.data.load import load
from grpo_recipes.recipe.recipe import Recipe, shipped
from tests.support import tiny
from tests.support.grids import only
from tests.support.tool_rollouts import END, call

pytestmark = pytest.mark.slow

TASKS, GROUP, STEPS = 4, 8, 14
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SETTINGS: dict[str, Any] = {
    "bf16": False,
    "use_cpu": True,
    "per_device_train_batch_size": TASKS * GROUP,
    "num_generations": GROUP,
    "gradient_accumulation_steps": 1,
    "max_steps": STEPS,
    "learning_rate": 2e-3,
    "gradient_checkpointing": False,
    "save_strategy": "no",
}
"""Settings of a run of the tiny policy.

The learning rate of a pretrained model would not move it, and at 3e-3 `guess-number` collapsed with some random
numbers.
"""


class Task(NamedTuple):
    """A task, and what the policy may write in it."""

    prompt: list[dict[str, str]]
    call: str
    result: str
    answer: str
    """Last message after the result."""
    wrong: str
    """Turn that earns less."""


def product(row: dict[str, Any]) -> Task:
    """Return a task of `calculator`."""
    first, second, *added = re.findall(r"\d+", row["prompt"][-1]["content"])
    calculated = call("calculator", expression="+".join([f"{first}*{second}", *added]))
    return Task(row["prompt"], calculated, row["answer"], rf"\boxed{{{row['answer']}}}", rf"\boxed{{{first}}}")


def secret(row: dict[str, Any]) -> Task:
    """Return a task of `guess-number`."""
    number = int(row["answer"])
    return Task(row["prompt"], call("guess", number=number), "right", "done", call("guess", number=number + 9))


def program(row: dict[str, Any]) -> Task:
    """Return a task of `python`."""
    written = f"```python\n{row['solution']}```"
    return Task(row["prompt"], call("python", code="print(6 * 7)"), "42\n", written, "```python\npass\n```")


RECIPES: dict[str, tuple[str, Callable[[dict[str, Any]], Task]]] = {
    "calculator": ("calculator", product),
    "guess-number": ("guess", secret),
    "python": ("python", program),
}
"""Tool and tasks by recipe."""


def four_rows(file: Path, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return four rows of a recipe's dataset, and the key `dataset` of a recipe that has only these."""
    dataset = Recipe.load(file).dataset
    if dataset.name != "programs":
        return list(load(replace(dataset, size=TASKS))), {**yaml.safe_load(file.read_text())["dataset"], "size": TASKS}
    rows = list(load(dataset))[:TASKS]
    table = folder / "tasks.jsonl"
    asked = [{"question": row["prompt"][-1]["content"], "tests": row["tests"], "answer": row["answer"]} for row in rows]
    table.write_text("".join(json.dumps(row) + "\n" for row in asked))
    return rows, {"path": str(table), "system_prompt": "program"}


def tokenizer_of(tasks: list[Task]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes with a token for each call, result, answer and question of the tasks."""
    tokenizer = tiny.chat_tokenizer(TEMPLATE)
    tokenizer.response_template = qwen3_template
    texts = [text for task in tasks for text in (task.prompt[-1]["content"], *task[1:])]
    tokenizer.add_tokens(list(dict.fromkeys(texts)))
    return tokenizer


def warm_start(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tasks: list[Task], tool: str) -> None:
    """Train a policy on transcripts, one in three of which is right."""
    rows = []
    for task in tasks:
        asked = tokenizer.apply_chat_template(task.prompt, tools=[{"function": {"name": tool}}], tokenize=False)
        right = [task.call, f"<|im_start|>tool\n{task.result}{END}\n", task.answer]
        rows += [[asked, *right]] * 2 + [[asked, task.wrong]] * 4
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3)
    batch, labels = encoded(rows, tokenizer)
    for _ in range(150):
        loss = policy(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def encoded(rows: list[list[str]], tokenizer: PreTrainedTokenizerFast) -> tuple[dict[str, Any], torch.Tensor]:
    """Return a batch of transcripts, and its labels: the policy's turns with their ends."""
    ids, labels = [], []
    for prompt, *turns in rows:
        row = tokenizer(prompt)["input_ids"]
        wanted = [-100] * len(row)
        for turn in turns:
            is_result = turn.startswith("<|im_start|>")
            before = tokenizer("\n" if is_result else "<|im_start|>assistant\n")["input_ids"]
            tokens = tokenizer(turn if is_result else f"{turn}{END}")["input_ids"]
            row = [*row, *before, *tokens]
            wanted += [-100] * len(before) + ([-100] * len(tokens) if is_result else tokens)
        ids.append(row)
        labels.append(wanted)
    width = max(map(len, ids))

    def padded(lists: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([row + [value] * (width - len(row)) for row in lists])

    batch = {"input_ids": padded(ids, 0), "attention_mask": padded([[1] * len(row) for row in ids], 0)}
    return batch, padded(labels, -100)


def history(folder: Path, name: str, **changes: Any) -> list[dict[str, float]]:
    """Train with a shipped recipe after a warm start, and return the log of each step."""
    file = shipped("recipes", name)
    rows, dataset = four_rows(file, folder)
    tool, task_of = RECIPES[name]
    tasks = [task_of(row) for row in rows]
    tokenizer = tokenizer_of(tasks)
    end = tokenizer.convert_tokens_to_ids(END)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 4096, "initializer_range": 0.02}
    policy = tiny.policy(**sizes, eos_token_id=end, pad_token_id=end)
    warm_start(policy, tokenizer, tasks, tool)
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    written = {tokenizer.convert_tokens_to_ids(text) for task in tasks for text in (task.call, task.answer, task.wrong)}
    others = [token for token in range(len(tokenizer)) if token not in {end, *written}]
    recipe = {
        **yaml.safe_load(file.read_text()),
        **SETTINGS,
        "dataset": dataset,
        "model_name_or_path": str(folder / "policy"),
        "generation_kwargs": {"suppress_tokens": others},
        "output_dir": str(folder / "run"),
        **changes,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert train.main(["--config", str(folder / "recipe.yaml")]) == 0
    log = json.loads((folder / "run" / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in log if "reward" in entry]
    assert len(steps) == STEPS
    return steps


def ends(values: list[float]) -> tuple[float, float]:
    """Return the means of the first four and of the last four values."""
    return sum(values[:4]) / 4, sum(values[-4:]) / 4


@pytest.mark.parametrize("name", only([], RECIPES, ["calculator"]))
@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_the_reward_rises(name: str, tmp_path: Path) -> None:
    steps = history(tmp_path, name)
    before, after = ends([step["reward"] for step in steps])
    assert after > before + 0.1
    few, many = ends([step["tools/rows_with_calls"] for step in steps])
    # A wrong guess is a call too.
    assert many > few or name == "guess-number"
    assert many > 0.4
