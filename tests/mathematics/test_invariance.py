"""Effect on the weights of dividing a batch over micro-batches or processes.

Three steps of SGD in float64 with the same eight completions per step: 8 at once, 2 micro-batches of 4, 2 processes
with 4. An accumulated gradient equals that of the large batch for every loss that is a sum over completions or tokens
with one normalizer per step. It differs where the loss has a statistic of a micro-batch: `bnpo` divides by its tokens,
the entropy bonus is a mean over its tokens, the entropy quantile is a quantile over its tokens, and the router loss
multiplies two means over its tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mathematics.conftest import SummaryLines
from tests.mathematics.invariance import INVARIANCE_CELLS, final_weights, largest_gap

NOT_INVARIANT = ("bnpo", "grpo + entropy bonus", "grpo + entropy quantile", "grpo + router loss")
EXACT = 1e-12
VISIBLE = 1e-4


def weights_of(name: str, checkpoint: Path, rows: int, accumulation: int) -> dict[str, list[float]]:
    return final_weights(checkpoint, INVARIANCE_CELLS[name], rows, accumulation)


@pytest.mark.slow  # as all tests of TRL's code alone that take seconds
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", INVARIANCE_CELLS)
def test_accumulation_against_a_large_batch(name: str, checkpoint: Path, summary: SummaryLines) -> None:
    gap = largest_gap(weights_of(name, checkpoint, 8, 1), weights_of(name, checkpoint, 4, 2))
    summary(f"invariance, 8 x 1 against 4 x 2, {name}: weights differ by {gap:.1e}")
    assert gap > VISIBLE if name in NOT_INVARIANT else gap <= EXACT
