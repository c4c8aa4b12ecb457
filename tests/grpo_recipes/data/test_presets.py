"""Presets for tasks without mathematics, and rows without a gold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.support.errors import refused
from tests.support.rows import loaded, user, write

MOODS = [
    {"text": "What a day!", "label": "Good"},
    {"text": "Rain again.", "label": "bad "},
    {"text": "Well.", "label": None},
    {"text": "Fine by me.", "label": "GOOD"},
]


def moods(folder: Path, rows: list[dict[str, Any]] = MOODS, **keys: Any) -> datasets.Dataset:
    given = {"name": "classification", "labels": ["good", "bad"], "system_prompt": "none", **keys}
    return loaded(write(folder / "rows.jsonl", rows), **given)


def test_the_prompt_names_the_labels_and_the_gold_is_the_label_as_the_recipe_spells_it(tmp_path: Path) -> None:
    rows = moods(tmp_path, drop_missing=True)
    assert rows["answer"][:] == ["good", "bad", "good"]
    assert rows[0]["prompt"] == user("What a day!\n\nAnswer with one of these labels: good, bad.")


def test_labels_may_be_numbers_and_booleans(tmp_path: Path) -> None:
    for given, labels, golds in (([1, 0], [0, 1], ["1", "0"]), ([True, False], ["false", "true"], ["true", "false"])):
        rows = [{"text": "a", "label": label} for label in given]
        assert moods(tmp_path, rows, labels=labels)["answer"][:] == golds


def test_mistakes_of_a_classification_are_named(tmp_path: Path) -> None:
    with refused("rows.jsonl, line 3", "label None", "`dataset.drop_missing: true`"):
        moods(tmp_path)
    with refused("rows.jsonl, line 2", "'bad'", "good, fine"):
        moods(tmp_path, labels=["good", "fine"])


@pytest.mark.parametrize("as_text", [True, False])
def test_the_gold_of_an_extraction_is_the_json_of_its_object(tmp_path: Path, as_text: bool) -> None:
    objects: list[Any] = [{"city": "Köln", "day": 3, "times": ["9:00"]}, {"city": "Rome"}, *([{}] if as_text else [])]
    rows = [{"text": "a", "object": json.dumps(value, indent=1) if as_text else value} for value in objects]
    golds = loaded(write(tmp_path / "rows.jsonl", rows), name="extraction")["answer"]
    assert [json.loads(answer) for answer in golds] == objects


def test_a_gold_that_is_no_json_object_is_refused(tmp_path: Path) -> None:
    for gold in ("[1]", "Köln", "{'city': 1}"):
        rows = [{"text": "a", "object": '{"a": 1}'}, {"text": "b", "object": gold}]
        with refused("", "line 2"):
            loaded(write(tmp_path / "rows.jsonl", rows), name="extraction")


# Rows without a prompt or a gold

GAPS: list[dict[str, Any]] = [
    {"question": "1?", "answer": "1", "note": None},
    {"question": "2?", "answer": " ", "note": "x"},
    {"question": None, "answer": "3", "note": "x"},
    {"question": "4?", "answer": None, "note": "x"},
    {"question": "5?", "answer": "5", "note": "x"},
]


def test_rows_without_a_prompt_or_a_gold_are_dropped_on_request(tmp_path: Path) -> None:
    for name in (None, "gsm8k"):
        path = write(tmp_path / "rows.jsonl", GAPS)
        assert loaded(path, name=name, drop_missing=True)["answer"][:] == ["1", "5"]


def test_a_row_after_a_dropped_one_keeps_its_number_in_errors(tmp_path: Path) -> None:
    rows = [*GAPS, {"question": "6?", "answer": "####", "note": "x"}]
    with refused("", "rows.jsonl", "line 6", "'####'"):
        loaded(write(tmp_path / "rows.jsonl", rows), name="gsm8k", drop_missing=True)


def test_dropped_rows_leave_the_side_of_the_others_unchanged(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1) if n % 3 else ""} for n in range(60)]
    path = write(tmp_path / "rows.jsonl", rows)
    for evaluation in (False, True):
        every, complete = (
            loaded(path, evaluation=evaluation, eval_share=0.3, drop_missing=drop)["answer"][:]
            for drop in (False, True)
        )
        assert complete == [answer for answer in every if answer]
