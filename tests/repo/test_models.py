"""Whole models against TRL: a sample of `make models`, and the table that it wrote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import transformers

from grpo_recipes.plan.layout import RECORDED, as_json, recorded
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


def table() -> tuple[str, dict[str, str]]:
    """Return the version of transformers in the table, and the name of the layout by model type."""
    text = TABLE.read_text(encoding="utf-8")
    found = re.search(r"transformers ([0-9.]+),", text)
    assert found is not None
    cells = [line.split("|")[1:3] for line in text.splitlines() if re.match(r"\| [a-z0-9]", line)]
    rows = {kind.strip(): layout.strip() for kind, layout in cells}
    del rows["model type"]
    return found[1], rows


def test_the_table_has_every_model() -> None:
    version, rows = table()
    if version != transformers.__version__:
        pytest.skip(f"the table is of transformers {version}: run `make models`")
    listed = list(rows)
    assert listed[: len(models.MOST_TRAINED)] == list(models.MOST_TRAINED)
    assert sorted(listed) == models.model_types()


def test_plan_reads_the_layouts_of_the_table() -> None:
    version, rows = table()
    named = {kind: layout.described for kind, layout in recorded().layouts.items()}
    assert named == {kind: layout for kind, layout in rows.items() if layout != models.NONE}
    assert recorded().transformers == version
    assert RECORDED.read_text(encoding="utf-8") == as_json(recorded())
