"""Logged completions: no row after a resume's step, each step once, and calls of tools in a form that fits a table."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trl.trainer.utils import print_prompt_completions_sample

from grpo_recipes.runs import files
from grpo_recipes.runs.completions import EVALUATION, TRAINING, arguments_of, drop_after, logged, storable
from tests.support.errors import refused


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "completions").mkdir()
    return tmp_path / "completions"


def write(folder: Path, *steps: int, kind: str = TRAINING) -> None:
    """Write a row for each step, as TRL does."""
    for step in steps:
        pd.DataFrame({"step": [step], "completion": [str(step)]}).to_parquet(folder / f"{kind}_{step:05d}.parquet")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_resume_drops_the_rows_after_its_step(folder: Path) -> None:
    for kind in (TRAINING, EVALUATION, "eval_easy_completions"):
        write(folder, 0, 1, 5, 6, 100_001, kind=kind)
    (folder / "mine.parquet").write_bytes(b"")
    assert drop_after(folder, 5) == 6
    assert [one.step for one in logged(folder, EVALUATION)] == [0, 1, 5]
    assert [one.path.name for one in logged(folder, TRAINING)][1:] == [
        "completions_00001.parquet", "completions_00005.parquet"
    ]  # fmt: skip
    assert drop_after(folder, 5) == 0
    assert drop_after(folder, 0) == 6
    assert len(names(folder)) == 4


def test_rows_that_can_not_be_dropped_stop_the_resume(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would stand beside the rows that the run logs from now on."""
    write(folder, 1, 2, 3)

    def denied(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "unlink", denied)
    with refused(folder, "step 2", by=files.RunError):
        drop_after(folder, 2)


# Calls of tools

# Lone surrogates included: JSON has escapes for them.
TEXTS = st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from(["x" * 1000, "\x1b[2J", ""])
NUMBERS = st.integers() | st.just(10**4000) | st.floats() | st.booleans() | st.none()
VALUES = st.recursive(
    NUMBERS | TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": TEXTS, "arguments": st.dictionaries(st.sampled_from("abc") | TEXTS, VALUES, max_size=3) | VALUES},
    optional={"id": VALUES, "": VALUES, "parameters": VALUES},
)
CALLS = FUNCTIONS.map(lambda function: {"type": "function", "function": function}) | FUNCTIONS | VALUES
BLOCKS = st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}) | st.just({"type": "image"}) | VALUES
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["assistant", "tool"]),
        "content": TEXTS | st.none() | st.lists(BLOCKS, max_size=3),
        "tool_calls": st.lists(CALLS, max_size=3) | st.none(),
        "name": TEXTS,
        "reasoning_content": TEXTS | st.none(),
    },
)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(rows=st.lists(st.lists(MESSAGES, max_size=3), min_size=1, max_size=3))
def test_calls_are_stored_printed_and_read(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    """TRL can print messages and write them to a table, and we can read them."""
    before = repr(rows)
    stored = storable(rows)
    assert repr(rows) == before
    folder = tmp_path_factory.mktemp("table")
    path = folder / "completions_00001.parquet"
    pd.DataFrame({"step": [1] * len(stored), "completion": stored}).to_parquet(path)
    (batch,) = files.read_batches(path, {"completion": files.CONVERSATIONS})
    assert [len(messages) for messages in batch["completion"]] == list(map(len, rows))
    print_prompt_completions_sample(["p"] * len(rows), stored, {"r": [0.0] * len(rows)}, None, 1)
    for messages, read_messages in zip(rows, batch["completion"], strict=True):
        for message, read_message in zip(messages, read_messages, strict=True):
            read_calls = read_message.get("tool_calls")
            read_calls = [] if read_calls is None else list(read_calls)
            for call, read_call in zip(message.get("tool_calls") or [], read_calls, strict=True):
                match call:
                    case {"function": {"arguments": dict(arguments)}}:
                        assert json.dumps(arguments_of(read_call["function"]["arguments"])) == json.dumps(arguments)


def test_arguments_are_read_from_our_tables_and_trls() -> None:
    for stored, arguments in (
        ('{"a": 1}', {"a": 1}),
        ({"a": 1.0, "b": None}, {"a": 1.0}),  # TRL's table: another call has the argument `b`
        ({"a": 0.0, "b": "", "c": False}, {"a": 0.0, "b": "", "c": False}),
        ('{"": 1, "a": 2}', {"": 1, "a": 2}),
        ('{"": [1, 2]}', [1, 2]),
        (None, {}),
        ([], []),
        ("no json", "no json"),
        ("7", 7),
        ("[" * 100_000, "[" * 100_000),
    ):
        assert arguments_of(stored) == arguments


def test_arguments_are_stored_as_a_mapping_that_a_terminal_can_print() -> None:
    def messages(arguments: Any) -> list[dict[str, Any]]:
        function = {"name": "add", "arguments": arguments}
        call = {"type": "function", "function": function, "parameters": {"x": 1}, "id": 5, "index": 0}
        return [{"role": "assistant", "content": "", "tool_calls": call}]  # a policy may forget the list

    for arguments, read_back in (
        ({"a": 0, "b": None}, {"a": 0, "b": None}),
        ('{"a": [1]}', {"a": [1]}),  # some templates write the arguments as JSON text
        ("[1, 2]", [1, 2]),
        ("no json", "no json"),
        ({"a": 1, "\x1b[2J": 1}, {"a": 1, "\x1b[2J": 1}),
        ({"a": 10**5000}, None),  # too many digits
        ({"a": {(1, 2): 3}}, None),
        (7, 7),
    ):
        (stored,) = storable([messages(arguments)])[0][0]["tool_calls"]
        assert all(key.isprintable() for key in json.loads(stored["function"]["arguments"]))
        found = arguments_of(stored["function"]["arguments"])
        assert found == read_back if read_back is not None else found.startswith("a dict ")
        assert {key: value for key, value in stored.items() if key != "function"} == {
            "type": "function", "id": "5", "index": "0", "other": '{"parameters": {"x": 1}}'
        }  # fmt: skip


def test_nested_arguments_are_stored_up_to_the_depth_that_json_is_read_and_written() -> None:
    def nested(levels: int) -> Any:
        return {"a": nested(levels - 1)} if levels > 1 else {}

    for levels, is_kept in ((100, True), (101, False)):
        (messages,) = storable([[{"role": "assistant", "tool_calls": [{"name": "f", "arguments": nested(levels)}]}]])
        found = arguments_of(messages[0]["tool_calls"][0]["arguments"])
        assert (found == nested(levels)) is is_kept


def test_a_call_of_another_form_is_stored_as_it_is() -> None:
    for call, stored in (
        ("add(1)", {"other": '"add(1)"'}),
        ({"function": 3, "id": None}, {"id": None, "other": '{"function": 3}'}),
        ({"name": ["add"]}, {"name": '["add"]'}),
    ):
        (messages,) = storable([[{"role": "assistant", "tool_calls": [call]}]])
        assert messages[0]["tool_calls"] == [stored]


def test_an_empty_message_has_a_content_of_the_form_of_the_others() -> None:
    """Parquet has no struct without fields."""
    assert storable([[{}]]) == [[{"role": "assistant", "content": ""}]]
    blocks = {"content": [{"type": "text", "text": "x"}]}
    assert storable([[{}, blocks]]) == [[{"role": "assistant", "content": []}, blocks]]


def test_one_message_of_blocks_makes_the_contents_of_all_messages_blocks() -> None:
    blocks = [{"type": "image", "image": "object"}, {"type": "text", "text": "x"}, {"type": "audio", "audio": [1]}]
    chats = [[{"role": "user", "content": "a"}, {"role": "user", "content": blocks}], [{"content": None}], "text"]
    stored = storable(chats)
    assert [message["content"] for message in stored[0]] == [
        [{"type": "text", "text": "a"}],
        [*blocks[:2], {"type": "text", "text": '{"type": "audio", "audio": [1]}'}],
    ]
    assert stored[1:] == [[{"content": None}], "text"]


def test_texts_and_messages_of_texts_are_stored_as_trl_stores_them() -> None:
    rows = [[{"role": "user", "content": "x"}], [{"role": "assistant", "content": "y", "reasoning_content": "z"}]]
    assert storable(rows) == rows
    assert storable(["text", "é"]) == ["text", "é"]
    said = {"role": "assistant", "content": "x"}
    given = [[{**said, "tool_calls": []}], [{**said, "tool_calls": None}], [said]]
    assert storable(given) == [given[0], [said], [said]]
