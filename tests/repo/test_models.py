"""Whole models against TRL: a sample of `make models`, and the table that it wrote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

from tests.tools import models

TABLE = Path(__file__).resolve().parents[2] / "docs" / "model-layouts.md"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", models.SAMPLE)
def test_the_gradient_of_a_model_is_that_of_trl(model_type: str) -> None:
    torch.set_num_threads(1)
    row = models.measure(model_type)
    assert row.layout != models.NONE, row.reason
    assert row.gap <= models.FAR, row
    assert (row.layout == "packed") == (not row.reason), row
    assert row.decoding == models.GROUPS or row.decoding.startswith("stock: "), row


def test_the_table_has_every_model() -> None:
    text = TABLE.read_text(encoding="utf-8")
    recorded = re.search(r"transformers ([0-9.]+),", text)
    assert recorded is not None
    if recorded[1] != transformers.__version__:
        pytest.skip(f"the table is of transformers {recorded[1]}: run `make models`")
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if re.match(r"\| [a-z0-9]", line)
    ]
    listed = [row[0] for row in rows if row[0] != "model type"]
    assert listed[: len(models.MOST_TRAINED)] == list(models.MOST_TRAINED)
    assert sorted(listed) == models.model_types()
