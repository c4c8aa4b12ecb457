"""Parameters that DeepSpeed's ZeRO-3 has partitioned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


@contextmanager
def gathered(tensors: Sequence[torch.Tensor | None], *, write: bool = False) -> Iterator[None]:
    """Gather tensors that ZeRO-3 has partitioned on every rank; with `write`, what rank 0 writes into them is kept."""
    partitioned = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    if not partitioned:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(partitioned, modifier_rank=0 if write else None):
        yield
