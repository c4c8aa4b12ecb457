"""Random choice of tokens that depends on the seed, the row and the position, and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from grpo_recipes.generation.rows import on_device

BLOCK = 64
"""Number of tokens per row whose random numbers are drawn at once."""

WEIGHT = 2.0**60
"""Whole number that stands for a probability of 1. Probabilities below its inverse count as 0."""


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the state of torch's random numbers after this block of user code, from which generation draws.

    A tool or reward that calls `torch.manual_seed` would otherwise make every generation draw the same numbers.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        yield


class Uniforms:
    """Random numbers in [0, 1) of one call of `generate`: one for each row and each token.

    A row's numbers do not depend on how many rows still generate, nor on how long the others are. They are drawn on the
    CPU, so every device gets the same.

    Args:
        rows: number of rows.
        device: where the numbers are needed.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        # Each call takes one number of the global generator, so the next call does not depend on this one's tokens.
        self._generator = torch.Generator().manual_seed(int(torch.randint(2**63 - 1, ())))
        self.block = torch.empty(BLOCK, rows, dtype=torch.float64, device=device)
        """Numbers of the current block of tokens, (tokens, rows)."""

    def show(self, token: int) -> None:
        """Let `block` hold the numbers of a token. Tokens are shown one after the other, beginning with 0."""
        if token % BLOCK == 0:
            drawn = torch.rand(self.block.shape, dtype=torch.float64, generator=self._generator)
            self.block.copy_(on_device(drawn, self.block.device))

    def of(self, token: int) -> Tensor:
        """Return the numbers of all rows for the token that `show` has shown, (rows,)."""
        return self.block[token % BLOCK]


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token of each row, (rows,), with its probability, (rows, vocabulary).

    Args:
        probabilities: probabilities of float32, which sum to 1 but for rounding.
        uniforms: a random number in [0, 1) for each row, float64.
    """
    # `multinomial` draws a random number for every token of the vocabulary: on a CPU as much time as a layer. Here one
    # number per row is looked up in the sums. Sums of integers do not depend on the order in which a device adds.
    sums = (probabilities * WEIGHT).to(torch.int64).cumsum(-1)
    total = sums[:, -1:]
    # Above 0 and, in spite of rounding, at most the last sum: no token of probability 0 is drawn.
    places = ((1 - uniforms)[:, None] * total).ceil().to(torch.int64)
    return torch.searchsorted(sums, torch.minimum(places, total))[:, 0]
