"""Whether splitting a batch over micro-batches or processes changes what is learnt, and by how much where it does.

The same eight completions a step, three steps of SGD, in float64: 8 at once, 2 micro-batches of 4, 2 processes with 4.
An accumulated gradient equals the large batch's for every loss that is a sum over completions or over tokens with one
normaliser for the whole step. It differs where a statistic is taken over a micro-batch: `bnpo` divides by the tokens of
the micro-batch at hand, the entropy bonus is a mean over them, the entropy quantile is a quantile of theirs, and the
router loss multiplies two means over them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mathematics.conftest import SummaryLines
from tests.mathematics.invariance import INVARIANCE_CELLS, final_weights, largest_gap

NOT_INVARIANT = ("bnpo", "grpo + entropy bonus", "grpo + entropy quantile", "grpo + router loss")
EXACT = 1e-12
VISIBLE = 1e-4


@pytest.fixture(scope="module")
def large_batch(checkpoint: Path) -> dict[str, dict[str, list[float]]]:
    """The weights learnt from eight completions at once, filled by the tests that need them."""
    return {}


def weights_of(name: str, checkpoint: Path, rows: int, accumulation: int) -> dict[str, list[float]]:
    return final_weights(checkpoint, INVARIANCE_CELLS[name], rows, accumulation)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", INVARIANCE_CELLS)
def test_accumulation(
    name: str, checkpoint: Path, large_batch: dict[str, dict[str, list[float]]], summary: SummaryLines
) -> None:
    large_batch[name] = weights_of(name, checkpoint, 8, 1)
    gap = largest_gap(large_batch[name], weights_of(name, checkpoint, 4, 2))
    summary(f"invariance, 8 x 1 against 4 x 2, {name}: weights differ by {gap:.1e}")
    assert gap > VISIBLE if name in NOT_INVARIANT else gap <= EXACT
