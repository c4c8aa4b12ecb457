"""Presets for tasks without mathematics, and rows without a gold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.data.load import load, load_prompts
from grpo_recipes.recipe.specs import DatasetSpec
from tests.support.errors import refused

MOODS = [
    {"text": "What a day!", "label": "Good"},
    {"text": "Rain again.", "label": "bad "},
    {"text": "Well.", "label": None},
    {"text": "Fine by me.", "label": "GOOD"},
]


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def moods(folder: Path, rows: list[dict[str, Any]] = MOODS, **keys: Any) -> DatasetSpec:
    labels = {"labels": ["good", "bad"], "system_prompt": "none"}
    return DatasetSpec.parse({"name": "classification", "path": write(folder, rows), **labels, **keys})


def test_the_prompt_names_the_labels_and_the_gold_is_the_label_as_the_recipe_spells_it(tmp_path: Path) -> None:
    rows = load(moods(tmp_path, drop_missing=True))
    assert rows["answer"][:] == ["good", "bad", "good"]
    content = "What a day!\n\nAnswer with one of these labels: good, bad."
    assert rows[0]["prompt"] == [{"role": "user", "content": content}]


def test_labels_may_be_numbers_and_booleans(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": "a", "label": 1}, {"text": "b", "label": 0}]
    assert load(moods(tmp_path, rows, labels=[0, 1]))["answer"][:] == ["1", "0"]
    rows = [{"text": "a", "label": True}, {"text": "b", "label": False}]
    assert load(moods(tmp_path, rows, labels=["false", "true"]))["answer"][:] == ["true", "false"]


def test_mistakes_of_a_classification_are_named(tmp_path: Path) -> None:
    with refused("rows.jsonl, line 3", "label None", "`dataset.drop_missing: true`"):
        load(moods(tmp_path))
    with refused("rows.jsonl, line 2", "'bad'", "good, fine"):
        load(moods(tmp_path, labels=["good", "fine"]))


@pytest.mark.parametrize("as_text", [True, False])
def test_the_gold_of_an_extraction_is_the_json_of_its_object(tmp_path: Path, as_text: bool) -> None:
    objects: list[Any] = [{"city": "Köln", "day": 3, "times": ["9:00"]}, {"city": "Rome"}]
    rows = [{"text": "a", "object": objects[0]}, {"text": "b", "object": objects[1]}]
    if as_text:
        rows = [{**row, "object": json.dumps(row["object"], indent=1)} for row in rows]
    spec = DatasetSpec.parse({"name": "extraction", "path": write(tmp_path, rows)})
    golds = [json.loads(answer) for answer in load(spec)["answer"]]
    assert golds == objects


def test_an_empty_object_is_a_gold(tmp_path: Path) -> None:
    rows = [{"text": "a", "object": "{}"}]
    assert load(DatasetSpec.parse({"name": "extraction", "path": write(tmp_path, rows)}))["answer"][:] == ["{}"]


@pytest.mark.parametrize("gold", ["[1]", "Köln", "{'city': 1}"])
def test_a_gold_that_is_no_json_object_is_refused(tmp_path: Path, gold: str) -> None:
    rows = [{"text": "a", "object": '{"a": 1}'}, {"text": "b", "object": gold}]
    with refused("", "line 2"):
        load(DatasetSpec.parse({"name": "extraction", "path": write(tmp_path, rows)}))


# Rows without a prompt or a gold

GAPS: list[dict[str, Any]] = [
    {"question": "1?", "answer": "1", "note": None},
    {"question": "2?", "answer": " ", "note": "x"},
    {"question": None, "answer": "3", "note": "x"},
    {"question": "4?", "answer": None, "note": "x"},
    {"question": "5?", "answer": "5", "note": "x"},
]


@pytest.mark.parametrize("name", [None, "gsm8k"])
def test_rows_without_a_prompt_or_a_gold_are_dropped_on_request(tmp_path: Path, name: str | None) -> None:
    spec = DatasetSpec.parse({"name": name, "path": write(tmp_path, GAPS), "drop_missing": True})
    assert load(spec)["answer"][:] == ["1", "5"]


def test_a_row_after_a_dropped_one_keeps_its_number_in_errors(tmp_path: Path) -> None:
    rows = [*GAPS, {"question": "6?", "answer": "####", "note": "x"}]
    with refused("", "rows.jsonl", "line 6", "'####'"):
        load(DatasetSpec.parse({"name": "gsm8k", "path": write(tmp_path, rows), "drop_missing": True}))


def test_dropped_rows_leave_the_side_of_the_others_unchanged(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1) if n % 3 else ""} for n in range(60)]
    keys = {"path": write(tmp_path, rows), "eval_share": 0.3}
    for evaluation in (False, True):
        every = load_prompts(DatasetSpec.parse(keys), evaluation=evaluation).dataset
        complete = load_prompts(DatasetSpec.parse({**keys, "drop_missing": True}), evaluation=evaluation).dataset
        assert complete["answer"][:] == [answer for answer in every["answer"] if answer]
