"""Whole models against TRL: a sample of `make models`, and the table that it wrote."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import Gemma3TextConfig, PreTrainedConfig

from grpo_recipes.training.layout_facts import RECORDED, recorded
from tests.support.grids import only
from tests.tools import models, released

TABLE = Path(__file__).resolve().parents[2] / "docs" / "model-layouts.md"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", only([], models.SAMPLE, slow=["deepseek_v3", "gemma2", "gpt2", "llama"]))
def test_the_gradient_of_a_model_is_that_of_trl(model_type: str) -> None:
    row = models.measure(model_type)
    assert row.layout != models.NONE, row.reason
    assert not row.is_far, row
    assert (row.layout == "packed") == (not row.reason), row
    assert row.decoding == models.GROUPS or row.decoding.startswith("stock: "), row


def recorded_rows() -> list[list[str]]:
    """Return the cells of each row of the table."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if re.match(r"\| [a-z0-9]", line)]
    return [row for row in rows if row[0] != "model type"]


def test_the_table_has_every_model() -> None:
    text = TABLE.read_text(encoding="utf-8")
    recorded = re.search(r"transformers ([0-9.]+),", text)
    assert recorded is not None
    if recorded[1] != transformers.__version__:
        pytest.skip(f"the table is of transformers {recorded[1]}: run `make models`")
    listed = [row[0] for row in recorded_rows()]
    assert listed[: len(models.MOST_TRAINED)] == list(models.MOST_TRAINED)
    assert sorted(listed) == models.model_types()


def test_plan_reads_the_layouts_of_the_table() -> None:
    rows = {row[0]: row[1] for row in recorded_rows()}
    named = {kind: layout.described for kind, layout in recorded().layouts.items()}
    assert named == {kind: layout for kind, layout in rows.items() if layout != models.NONE}
    version = re.search(r"transformers ([0-9.]+),", TABLE.read_text(encoding="utf-8"))
    assert version is not None
    assert recorded().transformers == version[1]
    assert RECORDED.read_text(encoding="utf-8") == models.as_json(recorded())


@pytest.mark.nightly
def test_a_tiny_model_has_what_its_released_models_have_or_its_row_names_what_it_lacks() -> None:
    rows = {row[0]: row for row in recorded_rows()}
    built = [name for name in models.model_types() if "not built" not in rows[name][-1]]
    assert len(built) >= 180
    unnamed = {
        name: missing
        for name in built
        if (missing := [sentence for sentence in released.all_lacks(name) if sentence not in rows[name][-1]])
    }
    assert not unnamed


def gemma3(**changes: Any) -> PreTrainedConfig:
    """Return the tiny configuration of Gemma 3 with changes, without the keys that depend on them."""
    keys = released.tiny("gemma3_text").to_dict()
    return Gemma3TextConfig(**{**keys, **changes})


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({}, ""),
        ({"layer_types": ["sliding_attention"] * 4}, "layers with layer_types=full_attention"),
        ({"num_key_value_heads": 4}, "num_attention_heads / num_key_value_heads = 2 (1)"),
        ({"head_dim": 16}, "width of attention beside the hidden size"),
        ({"sliding_window": 512}, "rows longer than sliding_window"),
        ({"attention_bias": True}, "attention_bias False (True)"),
        ({"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in
            ("full_attention", "sliding_attention")}}, "rope_parameters.full_attention.rope_type linear (default)"),
    ],
)  # fmt: skip
def test_a_lost_feature_is_named(changes: dict[str, Any], lacking: str) -> None:
    found = released.lacks(released.released("gemma3_text"), gemma3(**changes))
    assert any(lacking in sentence for sentence in found) if lacking else not found


def test_layers_of_other_modules_are_named() -> None:
    full = released.on_meta(released.released("deepseek_v3"))
    small = released.tiny("deepseek_v3")
    assert released.lacks_modules(full, released.on_meta(small)) == []
    small.first_k_dense_replace = 0
    (sentence,) = released.lacks_modules(full, released.on_meta(small))
    assert "mlp.down_proj.weight" in sentence
    assert "experts" not in sentence


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("gemma3_text", ["sliding", "sliding", "sliding", "full"]),
        ("lfm2", ["conv", "conv", "full", "conv"]),
        ("qwen3_5_text", ["linear", "linear", "linear", "full"]),
        ("recurrent_gemma", ["linear", "linear", "sliding", "linear"]),
    ],
)
def test_kept_layers_have_the_released_order(model_type: str, kinds: list[str]) -> None:
    assert [kind.removesuffix("_attention") for kind in released.tiny(model_type).layer_types] == kinds
