"""Transcripts of logged completions: from TRL's structs, from our JSON text, and from damaged tables."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pandas as pd
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_recipes.reports.transcript import TurnPart, limited, transcript
from tests.support.synthetic import tool_messages


def stored(completions: list[Any]) -> list[Any]:
    """Return completions as a table gives them back: arrays of mappings with the keys of all messages."""
    file = io.BytesIO()
    pd.DataFrame({"completion": completions}).to_parquet(file)
    return list(pd.read_parquet(file)["completion"])


def called(arguments: Any, **message: Any) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": arguments}
    return [{"role": "assistant", **message, "tool_calls": [{"type": "function", "function": function}]}]


def test_a_plain_answer_has_no_transcript() -> None:
    for completion in ("text", [], [{"role": "assistant", "content": "text"}], [{"content": "text"}]):
        assert transcript(completion) == []
        assert transcript(stored([completion])[0]) == []


def test_turns_calls_and_results_are_in_order() -> None:
    expected = [
        TurnPart("text", 1, "I add."),
        TurnPart("call", 1, '{"a": 1, "b": 0}', "add"),
        TurnPart("result", 1, "1", "add"),
        TurnPart("text", 2, "I add."),
        TurnPart("call", 2, '{"a": 1, "b": 1}', "add"),
        TurnPart("result", 2, "2", "add"),
        TurnPart("text", 3, "2"),
    ]
    messages = tool_messages(2, "2")
    assert transcript(messages) == expected
    assert transcript(stored([messages])[0]) == expected
    assert [part.label for part in expected[:3]] == ["Turn 1", "Turn 1 calls add", "Result of add, not trained on"]


def test_arguments_may_be_structs_of_trl() -> None:
    one, other = stored([called({"a": "1", "texts": ["x"]}), called({"b": 2.5})])
    assert transcript(one) == [TurnPart("call", 1, '{"a": "1", "texts": ["x"]}', "add")]
    assert transcript(other) == [TurnPart("call", 1, '{"b": 2.5}', "add")]
    assert transcript(called("no JSON")) == [TurnPart("call", 1, '"no JSON"', "add")]
    assert transcript(called('{"": [1]}')) == [TurnPart("call", 1, "[1]", "add")], "arguments that are no mapping"


def test_reasoning_and_blocks_are_shown() -> None:
    result = {"role": "tool", "name": "look", "content": [{"type": "text", "text": "seen"}, {"type": "image"}]}
    messages = [*called({}, reasoning_content="hm", content=""), result]
    assert [(part.kind, part.text) for part in transcript(messages)] == [
        ("reasoning", "hm"),
        ("call", "{}"),
        ("result", "seen [image]"),
    ]


def test_a_long_transcript_is_cut_in_its_middle() -> None:
    parts = [TurnPart("text", number, str(number)) for number in range(1, 20)]
    shown = [(part.text, part.kind, part.turn) for part in limited(parts, 3, 2)]
    ends = [(part.text, "text", part.turn) for part in parts]
    assert shown == [*ends[:3], ("… 14 parts …", "gap", 4), *ends[-2:]]
    assert limited(parts[:6], 3, 2) == parts[:6]
    assert len(limited(parts[:7], 3, 2)) == 6
    long = transcript([{"role": "tool", "name": "x" * 10_000, "content": "y"}])
    assert len(long[0].label) < 120


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
_KEYS = st.sampled_from(["role", "name", "content", "tool_calls", "function", "arguments", "reasoning_content", "x"])
_CALLS = st.lists(st.dictionaries(_KEYS, _JSON, max_size=2), max_size=2)
_MESSAGES = st.lists(st.dictionaries(_KEYS, _JSON | _CALLS, max_size=4), max_size=3)


@given(_MESSAGES)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_message_raises(messages: list[dict[str, Any]]) -> None:
    for part in transcript(messages):
        json.dumps([part.kind, part.label, part.text])


def test_arguments_that_are_too_deep_are_named_by_their_type() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    (part,) = transcript(called(deep))
    assert part.text == "a list that can't be shown"


def test_arguments_of_any_type_have_a_text() -> None:
    for arguments, text in (
        ({(1, 2): "x"}, "a dict that can't be shown"),  # JSON has no such key
        ({"x": "größer"}, '{"x": "größer"}'),
        ({"x": np.array([[1, 2], [3, 4]])}, '{"x": [[1, 2], [3, 4]]}'),
        ({"x": np.int64(3)}, '{"x": 3}'),
        ({"x": 1 + 2j}, '{"x": "(1+2j)"}'),
    ):
        assert transcript(called(arguments)) == [TurnPart("call", 1, text, "add")]


def test_a_call_that_is_no_mapping_is_shown_and_one_without_a_function_is_read_itself() -> None:
    calls = ["add(1)", {"name": "add", "arguments": {"a": 1}}, {"function": {"arguments": {}}}, {"function": None}]
    assert transcript([{"role": "assistant", "tool_calls": calls}]) == [
        TurnPart("call", 1, '"add(1)"', "unknown"),
        TurnPart("call", 1, '{"a": 1}', "add"),
        TurnPart("call", 1, "{}", "unknown"),
        TurnPart("call", 1, "{}", "unknown"),
    ]


def test_a_result_of_any_form_has_a_text() -> None:
    text = {"type": "text", "text": "seen"}
    for content, shown in (
        (None, ""),
        ("seen", "seen"),
        (7, "7"),
        (text, '{"type": "text", "text": "seen"}'),
        ([text, "stray", text], "seenseen"),
        ([{"type": "image"}, {"type": "image"}, {"type": "audio"}], " [image] [image]"),
    ):
        result = {"role": "tool", "name": "look", "content": content}
        assert transcript([result]) == [TurnPart("result", 0, shown, "look")]


def test_a_message_of_another_role_is_named_by_its_tool_or_its_role() -> None:
    names = {"add": "add", "": "unknown", "two\nlines": "two lines"}
    for name, shown in names.items():
        assert transcript([{"role": "tool", "name": name, "content": "x"}]) == [TurnPart("result", 0, "x", shown)]
    for message, shown in (({"role": "tool", "name": 7}, "unknown"), ({"role": "user", "name": "ann"}, "user")):
        assert transcript([{**message, "content": "x"}]) == [TurnPart("result", 0, "x", shown)]


def test_reasoning_is_found_under_the_key_of_any_template() -> None:
    for key in ("reasoning_content", "reasoning", "thinking"):
        thought = {"role": "assistant", "content": "4", key: "2 + 2"}
        assert transcript([thought]) == [TurnPart("reasoning", 1, "2 + 2"), TurnPart("text", 1, "4")]
        for none in ("", None, ["2 + 2"]):
            assert transcript([{**thought, key: none}]) == [], "a plain answer"
