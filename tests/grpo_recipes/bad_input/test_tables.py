"""Bad tables of the user's own, as `plan` and `train` refuse them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bad_input import ROWS_JSONL, Case, check

# Tables of one's own. Every sentence about them is in test_own_data.py; these are each kind's way to the screen.
OWN_CSV = "problem,solution,level\nWhat is 1 + 1?,2,1\nWhat is 1 + 2?,3,1\n"


HELD_OUT = {"name": "gsm8k", "path": "train.jsonl", "eval_path": "other.jsonl"}


DATA: list[Case] = [
    Case(
        f"{command} --dataset '{{{spec}}}'",
        ("recipe.yaml: ", *words),
        files={"rows.csv": OWN_CSV, "wide.csv": OWN_CSV + "a,b,c,d\n", "null.csv": OWN_CSV + ",4,1\n"},
    )
    for command in ("grpo-recipes plan {recipe}", "train --config {recipe}")
    for spec, words in {
        "path: rows.csv": ("rows.csv, row 2 has the columns problem, solution, level", "`columns: {question: ...}`"),
        "path: rows.csv, columns: {question: problm}": ("no column 'problm' (it has problem, solution, level)",),
        "path: rows.csv, columns: {question: problem, images: level}": (
            "a column 'images'",
            "`columns: {other_images:",
        ),
        "path: wide.csv, columns: {question: problem}": ("wide.csv, row 4 has 4 cells",),
        "path: null.csv, columns: {question: problem}": ("null.csv, row 4 has the question None",),
        'path: rows.csv, prompt_template: "{{ problem[9:1:0] }}"': (
            "`dataset.prompt_template` fails on rows.csv, row 2",
        ),
        "path: no-*.csv": ("`dataset.path`: no file matches no-*.csv",),
        "path: [{path: rows.csv, fraction: 2}]": (
            "`dataset.path.fraction` of rows.csv is 2.0: set a number above 0 and at most 1",
        ),
        "path: [rows.csv, train.jsonl]": ("rows.csv, row 2 has the question None",),
    }.items()
] + [
    Case(
        "train --config {recipe} --eval_strategy steps --eval_steps 1 --per_device_eval_batch_size 8",
        ("`dataset.eval_path`: 40 of 40 held-out rows are training rows too",),
        files={"other.jsonl": ROWS_JSONL},
        changes={"dataset": HELD_OUT},
    )
]


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("case", DATA, ids=lambda case: case.line[:90])
def test_bad_input_ends_with_one_message(
    case: Case, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case, tmp_path, tiny_model, monkeypatch)
