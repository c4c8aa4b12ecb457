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


def test_a_kernel_takes_the_longer_of_its_operations_and_its_bytes(roofline: ModuleType) -> None:
    gpu = roofline.GPU(flops_16bit=100, flops_32bit=10, bandwidth=50)
    assert roofline.Kernel(65, 0, is_16bit=True).seconds(gpu) == pytest.approx(1)
    assert roofline.Kernel(6.5, 0, is_16bit=False).seconds(gpu) == pytest.approx(1)
    assert roofline.Kernel(45, 0, is_16bit=True, is_attention=True).seconds(gpu) == pytest.approx(1)
    assert roofline.Kernel(65, 80, is_16bit=True).seconds(gpu) == pytest.approx(2)
    assert roofline.Kernel(0, 0, is_16bit=True).seconds(gpu) == roofline.SHORTEST


def test_the_bytes_of_a_kernel_are_those_it_reads_and_writes(roofline: ModuleType) -> None:
    left, right = torch.empty(4, 8, device="meta"), torch.empty(8, 2, device="meta")
    with roofline.Recorder() as recorder:
        (left @ right).t().view(2, 4)
        torch.empty_like(left).copy_(left)
    product, copy = recorder.kernels  # views and allocations are none
    assert (product.flops, product.moved) == (2 * 4 * 8 * 2, 4 * (4 * 8 + 8 * 2 + 4 * 2))
    assert copy.moved == 4 * 2 * 4 * 8


def test_the_prediction_of_the_documentation_is_that_of_the_benchmark() -> None:
    predicted = {}
    for model, lengths, layout, _, _, _, *times in _rows(BENCHMARKS / "results" / "roofline.md"):
        predicted[model, lengths, layout] = [time.replace("(", "").rstrip(")").split() for time in times]
    shown = [row for row in _rows(ROOT / "docs" / "gpu.md") if row[1].endswith(" ms")]
    assert len(shown) == 4
    for model, stock, packed, *ratios in shown:
        ours = predicted[model, "mean 300", "packed, varlen_attn"]
        assert ratios == [ratio for _, ratio in ours]
        h100 = 1  # the second GPU of the table
        assert stock == f"{predicted[model, 'mean 300', 'TRL, padded'][h100][0]} ms"
        assert packed == f"{ours[h100][0]} ms"


def _rows(page: Path) -> list[list[str]]:
    """Return the cells of the rows of all tables of a page, without those above their contents."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return [row for row in cells if not row[0].startswith(("model", "layout"))]
