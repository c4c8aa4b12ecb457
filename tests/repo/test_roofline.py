"""The operations that benchmarks/roofline.py counts, against formulas."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def roofline(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/roofline.py."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import roofline

    return roofline


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("number", [0, 1], ids=["padded", "varlen"])
def test_operations_of_a_micro_batch_are_those_of_the_formula(
    number: int, checkpointing: bool, roofline: ModuleType
) -> None:
    """Each weight takes 2 operations per token in the forward pass, 4 in the backward, and 2 where it is repeated."""
    if number == 1 and not roofline.takes_grouped_heads():
        pytest.skip(f"torch {torch.__version__} has no varlen_attn for grouped heads, which torch 2.12 brought")
    lengths, size = roofline.Lengths.draw("mean 300"), roofline.SIZES["0.5B"]
    hidden, inner, heads = size["hidden_size"], size["intermediate_size"], size["num_attention_heads"]
    width = hidden // heads
    keys = 2 * size["num_key_value_heads"] * width
    weights = hidden * (2 * hidden + keys + 3 * inner)
    labels = lengths.completions[0].sum()
    if number == 0:
        columns = lengths.prompts.max() + lengths.completions.max()
        tokens, pairs = 8 * columns, 8 * columns**2
    else:
        before = lengths.prompts[0] - 1
        tokens = before + labels
        pairs = sum(range(1, before + 1))
        for length in lengths.completions[0]:
            pairs += sum(range(before + 1, before + length + 1))
    layers, products, attentions = 2, 3 * weights, 3.5
    if checkpointing:  # the second forward pass of a layer ends before its last product, whose result nothing needs
        products += weights - inner * hidden
        attentions += 1
    expected = layers * (2 * tokens * products + 4 * pairs * hidden * attentions)
    expected += 8 * labels * hidden * size["vocab_size"]  # the head runs again in the backward pass
    model = roofline.model_of("0.5B", layers, lora=False, checkpointing=checkpointing)
    _, kernels = roofline.kernels_of(model, lengths, 0, roofline.LAYOUTS[number], checkpointing)
    assert sum(kernel.flops for kernel in kernels) == pytest.approx(expected, rel=1e-4)
