"""Rank of this process, and collective calls on plain values.

Every rank must make the same collective call, or the others wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from grpo_rewards.errors import UserError

if TYPE_CHECKING:
    import torch

Value = TypeVar("Value")


def launched_rank() -> int:
    """Return the rank that the launcher gave this process, or 0. It is known before the process group exists."""
    return int(os.environ.get("RANK", "0"))


def is_distributed() -> bool:
    """Return True if this process belongs to a process group."""
    import torch.distributed as dist  # takes seconds, and most readers of a run's files are alone

    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return the rank of this process, 0 if it is alone."""
    import torch.distributed as dist

    return dist.get_rank() if is_distributed() else 0


def gather(value: Any) -> list[Any]:
    """Return `value` of every rank, in the order of the ranks. Collective."""
    import torch.distributed as dist

    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_first_rank(function: Callable[[], Value]) -> Value:
    """Call `function` on the first rank and return its result on every rank. Collective.

    Raises:
        UserError: on every rank, if `function` raises one. Raised on the first rank alone, the others would wait.
    """
    result = raise_alike(lambda: function() if rank() == 0 else None)
    return cast(Value, gather(result)[0])


def raise_alike(function: Callable[[], Value]) -> Value:
    """Call `function` on every rank and return this rank's result. Collective.

    Raises:
        UserError: on every rank, if `function` raises one on any of them.
    """
    result: Value | None = None
    failure: UserError | None = None
    try:
        result = function()
    except UserError as error:
        failure = error
    for one in gather(failure):
        if one is not None:
            raise one
    return cast(Value, result)


def on_any_rank(flag: bool, device: torch.device) -> bool:
    """Return True if `flag` is set on at least one rank. Collective."""
    return bool(largest_of_ranks(int(flag), device))


def largest_of_ranks(number: int, device: torch.device) -> int:
    """Return the largest `number` of any rank. Collective."""
    import torch
    import torch.distributed as dist

    if not is_distributed():
        return number
    reduced = torch.tensor(number, device=device)
    dist.all_reduce(reduced, op=dist.ReduceOp.MAX)
    return int(reduced.item())
