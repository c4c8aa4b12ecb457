"""Tables of completions with calls of tools: no call that a policy can write ends a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from datasets import Dataset

from grpo_recipes import GRPOTrainer
from grpo_recipes.reports import run
from grpo_recipes.runs.completions import arguments_of
from grpo_rewards.completions import completion_text
from tests.support import tiny
from tests.support.grids import only
from tests.support.trainers import make_trainer, one_batch

ROWS = 4

Message = dict[str, Any]


def calling(*arguments: Any, **more: Any) -> Message:
    """Return the message of an assistant as TRL parses it, with one call per entry of `arguments`."""
    calls = [{"type": "function", "function": {"name": "add", "arguments": one, **more}} for one in arguments]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(content: Any) -> Message:
    return {"role": "tool", "name": "add", "content": content}


ANSWER: Message = {"role": "assistant", "content": "done"}
DEEP: Any = []
for _ in range(900):
    DEEP = [DEEP]

TURNS: dict[str, list[list[Message]]] = {
    "two types of an argument": [[calling({"a": 1}), result("1"), ANSWER], [calling({"a": "x"})]],
    "no arguments": [[calling({})], [calling({}), result("1"), ANSWER]],
    "nested": [[calling({"a": {"b": [1, {"c": None}]}}, {"a": [1, "x", {}]})], [calling({"a": {"b": "x"}})]],
    "no mapping": [[calling([1, "x"])], [calling("text")], [calling(3)], [calling(True)]],
    "big numbers": [[calling({"a": 10**400})], [calling({"a": float("nan"), "b": float("-inf")})]],
    "surrogates": [[calling({"\ud800": "\udfff", "a": ["\ud800"]})], [calling({"a": 1}, name="\ud800")]],
    "deep": [[calling({"a": DEEP})]],
    "huge": [[calling({"a": "x" * 10**6, "b" * 10**5: 1})]],
    "controls": [[calling({"\x1b[2J": 1, "": 2, "a.b": 3, "a\x00": 4})]],
    "other keys": [[calling({}, id=3)], [calling({}, id="x", parameters={"a": 1})], [calling({}, **{"": [1]})]],
    "empty": [[{"role": "assistant", "tool_calls": [{}, {"type": "function", "function": {}}]}]],
    "without a function": [[{"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]}]],
    "blocks in a result": [[calling({}), result([{"type": "text", "text": "t"}]), ANSWER], [ANSWER]],
    "odd blocks": [[calling({}), result([1, {"type": "text"}, {"type": "video", "video": {}}])], [ANSWER]],
    "odd messages": [[{}], [{"role": "assistant"}], [{"role": "assistant", "content": None, "tool_calls": None}]],
    "odd fields": [[{**ANSWER, "reasoning_content": None, "score": 1}], [{**ANSWER, "score": "x"}]],
}


def distinct(completions: list[Any], **columns: Any) -> list[float]:
    return [float(index % 2) for index in range(len(completions))]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "add"}]] * 8})
    settings = {"per_device_train_batch_size": ROWS, "num_generations": ROWS, "max_completion_length": 8}
    settings |= {"log_completions": True, "generation_check": False}
    parts = {"rewards": distinct, "rows": rows, "tokenizer": tiny.chat_tokenizer()}
    return make_trainer(GRPOTrainer, tiny.policy(), tmp_path_factory.mktemp("run"), **parts, **settings)


def table_of(trainer: GRPOTrainer, turns: list[list[Message]], monkeypatch: pytest.MonkeyPatch) -> pd.DataFrame:
    """Score completions with these messages, repeated, and return the table that is logged."""

    def generate(prompts: list[Any]) -> tuple[Any, ...]:
        texts = [turns[index % len(turns)] for index in range(len(prompts))]
        ids = [[5, 6, 7] for _ in prompts]
        return [[1, 2] for _ in prompts], ids, [[1, 0, 1] for _ in prompts], texts, None, {}, None, [[]] * len(prompts)

    monkeypatch.setattr(trainer, "_generate", generate)
    for column in trainer._logs.values():
        column.clear()
    one_batch(trainer, 1)
    trainer.log({"loss": 1.0})
    return pd.read_parquet(Path(trainer.args.output_dir) / "completions" / "completions_00000.parquet")


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("kind", only([kind for kind in TURNS if kind != "huge"], TURNS))
def test_a_run_survives_its_table(trainer: GRPOTrainer, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = TURNS[kind]
    before = repr(turns)
    table = table_of(trainer, turns, monkeypatch)
    assert len(table) == ROWS
    assert [len(messages) for messages in table["completion"]] == [len(turns[i % len(turns)]) for i in range(ROWS)]
    assert repr(turns) == before  # rewards and later turns read the same messages


def test_calls_and_results_can_be_read_from_the_table(trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(trainer, TURNS["two types of an argument"], monkeypatch)
    first, second = table["completion"][0], table["completion"][1]
    assert [message["role"] for message in first] == ["assistant", "tool", "assistant"]
    assert first[1]["content"] == "1"
    stored = [messages[0]["tool_calls"][0]["function"]["arguments"] for messages in (first, second)]
    assert stored == ['{"a": 1}', '{"a": "x"}']
    assert [arguments_of(one) for one in stored] == [{"a": 1}, {"a": "x"}]


def test_a_report_reads_answers_beside_content_blocks(trainer: GRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(trainer, TURNS["blocks in a result"], monkeypatch)
    shown = [completion_text(run._listed(messages)) for messages in table["completion"]]
    assert shown == ["done"] * ROWS
    assert run.prompt_text(table["completion"][0]) == "\nt\ndone"
    assert run.last_message(table["completion"][0]) == "done"
