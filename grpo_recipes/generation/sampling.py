"""Drawing tokens from their probabilities."""

from __future__ import annotations

import torch
from torch import Tensor


def drawn(probabilities: Tensor) -> Tensor:
    """A token of each row, (rows,), with its probability, (rows, vocabulary).

    `multinomial` draws a random number for every token of the vocabulary: on a CPU as much time as a layer. There one number a
    row is looked up in the sums. It is above 0 and at most the whole sum, so that no token of probability 0 is found.
    """
    if probabilities.device.type != "cpu":  # sums are not deterministic on a GPU
        return probabilities.multinomial(1)[:, 0]
    sums = probabilities.cumsum(-1, dtype=torch.float64)
    places = (1 - torch.rand(len(sums), 1, dtype=torch.float64)) * sums[:, -1:]
    return torch.searchsorted(sums, places)[:, 0]
