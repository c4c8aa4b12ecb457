"""Table of loss types: weights of tokens and bounds of ratios, written out from TRL's formulas."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_recipes.recipe.losses import LOSS_TYPES

MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
"""Three rows of 2, 1 and 0 tokens."""
ACCUMULATION, LENGTH, STEP_TOKENS = 2, 10, 6

WEIGHTS = {
    # One token of the first and of the second row: a mean over rows of means over tokens.
    "grpo": (1 / (3 * 2 * ACCUMULATION), 1 / (3 * 1 * ACCUMULATION)),
    "sapo": (1 / (3 * 2 * ACCUMULATION), 1 / (3 * 1 * ACCUMULATION)),
    # A mean over the tokens of the micro-batch.
    "bnpo": (1 / (3 * ACCUMULATION), 1 / (3 * ACCUMULATION)),
    "dr_grpo": (1 / (3 * LENGTH * ACCUMULATION), 1 / (3 * LENGTH * ACCUMULATION)),
    "luspo": (1 / (3 * ACCUMULATION), 1 / (3 * ACCUMULATION)),
    # A mean over the tokens of the optimizer step, which counts the accumulation already.
    **dict.fromkeys(("dapo", "cispo", "vespo"), (1 / STEP_TOKENS, 1 / STEP_TOKENS)),
}
SUMS_OVER_ROWS = {"grpo", "sapo", "dr_grpo", "luspo"}


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_the_weights_of_tokens(name: str) -> None:
    loss, (first, second) = LOSS_TYPES[name], WEIGHTS[name]
    weights = loss.token_weights(MASK, ACCUMULATION, LENGTH, STEP_TOKENS)
    torch.testing.assert_close(weights, torch.tensor([[first, first, 0.0], [second, 0.0, 0.0], [0.0] * 3]))
    assert loss.is_sum_over_rows is (name in SUMS_OVER_ROWS)


@pytest.mark.parametrize("name", LOSS_TYPES)
def test_the_ratios_that_are_clipped(name: str) -> None:
    """`clamp(ratio, 1 - epsilon, 1 + epsilon_high)`, or `clamp(ratio, max=epsilon_high)` for CISPO, or no clamp."""
    expected = {"cispo": (-math.inf, 0.3), "sapo": (-math.inf, math.inf), "vespo": (-math.inf, math.inf)}
    assert LOSS_TYPES[name].clipped_outside(0.2, 0.3) == pytest.approx(expected.get(name, (0.8, 1.3)))
