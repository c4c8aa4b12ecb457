"""Positions of rows in messages: those of the user's file, after every selection."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets

from grpo_recipes.checks.rewards import check_golds, gold_notes
from grpo_recipes.data.load import load_prompts
from grpo_recipes.data.places import Place, listed_places
from grpo_recipes.recipe.dataset import DatasetSpec
from grpo_rewards.registry import build_rewards
from tests.support.rows import write

# No reward can score it, as it has no mark and is longer than a few words.
PROSE = "She sold 48/2 = 24 clips in May and 48 in April."
REWARDS = ["math_correctness"]


def rows_with_prose(*numbers: int, count: int = 40) -> list[dict[str, str]]:
    """Return rows whose question is their number, counted from 1. Those of `numbers` have a gold in prose."""
    return [
        {"question": f"question {row}", "answer": PROSE if row in numbers else str(row)} for row in range(1, count + 1)
    ]


def named(keys: dict[str, Any], *, evaluation: bool = False) -> str:
    """Return what the check of the golds says of the rows that a dataset selects."""
    prompts = load_prompts(DatasetSpec.parse(keys), evaluation=evaluation)
    found = check_golds(build_rewards(REWARDS), prompts.dataset, prompts.places)
    return "" if found is None else found.describe()


def test_rows_keep_their_lines_on_both_sides_of_a_held_out_share(tmp_path: Path) -> None:
    bad = range(3, 41, 4)
    path = write(tmp_path / "rows.jsonl", rows_with_prose(*bad))
    sentences = [named({"path": path, "eval_share": 0.4}, evaluation=side) for side in (False, True)]
    numbers: list[int] = []
    for sentence in sentences:
        listed = sentence.partition("rows.jsonl, line")[2].removeprefix("s").partition(":")[0]
        numbers += map(int, listed.split(","))
        assert f"{path}, line" in sentence
    assert sorted(numbers) == list(bad)
    assert all(sentences)


def test_rows_keep_their_lines_in_slices_and_after_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps(row) for row in rows_with_prose(30, 38)]
    path.write_text("\n\n".join(rows) + "\n", encoding="utf-8")
    assert f"on {path}, lines 59, 75: a gold" in named({"path": str(path), "split": "train[20:35]+train[36:]"})


def test_the_files_of_a_glob_and_the_sources_of_a_mixture_are_named(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", rows_with_prose(2, count=5))
    second = write(tmp_path / "b.jsonl", rows_with_prose(1, 4, count=5))
    saved = tmp_path / "saved"
    datasets.Dataset.from_list(rows_with_prose(3, count=5)).save_to_disk(str(saved))
    expected = f"{first}, line 2; {second}, lines 1, 4"
    assert f"on {expected}: a gold" in named({"path": str(tmp_path / "*.jsonl")})
    mixture = {"path": [first, second, str(saved)]}
    assert f"on {expected}; {saved}, row 3 (counted from 1): a gold" in named(mixture)


def test_a_note_about_golds_names_their_lines(tmp_path: Path) -> None:
    rows = rows_with_prose(count=10)
    rows[7]["answer"] = "6,50"
    path = write(tmp_path / "rows.jsonl", rows)
    prompts = load_prompts(DatasetSpec.parse({"path": path, "split": "train[5:]"}))
    (note,) = gold_notes(build_rewards(REWARDS), prompts.dataset, prompts.places)
    assert f"({path}, line 8: `6,50`)" in note


def test_the_entries_of_an_array_are_counted() -> None:
    places = [Place("a.json", "entry", 1), Place("a.json", "entry", 4), Place("b", "row", 2)]
    assert listed_places(places, 7) == "a.json, entries 1, 4; b, row 2 and 7 more (counted from 1)"


def test_a_recorded_prompt_is_named_by_its_first_line(tmp_path: Path) -> None:
    lines = [{"prompt": prompt, "response": "r", "reward": 1.0} for prompt in ("a", "a", "b", "a", "c")]
    path = write(tmp_path / "scored.jsonl", lines)
    prompts = load_prompts(DatasetSpec.parse({"name": "scored", "path": path}))
    assert list(map(str, prompts.places([0, 1, 2]))) == [f"{path}, line {line}" for line in (1, 3, 5)]
