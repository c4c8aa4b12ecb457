"""Packed rows that share no prompt: each completion with a prompt of its own, as padding-free trainers pack them.

What our packed rows gain over these, they gain by running each prompt once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from grpo_recipes.generation.rows import HostRows, Rows
from grpo_recipes.training.packing import PackedRow, pack


def pack_apart(rows: Rows) -> PackedRow:
    """Lay the rows out as one packed row, in which each is one causal sequence."""
    with patch.object(HostRows, "prompt_numbers", lambda host: [*range(len(host.ids))]):
        row = pack(rows)
    groups = [((start, start), [(start, stop)]) for (start, _), suffixes in row.groups for _, stop in suffixes]
    return replace(row, groups=groups)


def tokens_apart(host: HostRows) -> int:
    """Return the length of the row of `pack_apart`."""
    tokens = host.mask.sum(1) - 1
    return max(int(tokens[host.labels > 0].sum()), 1)


@contextmanager
def prompts_not_shared() -> Iterator[None]:
    """Let packed micro-batches of our trainer share no prompt inside this block."""
    from grpo_recipes.training import log_probs

    with patch.object(log_probs, "pack", pack_apart), patch.object(HostRows, "packed_tokens", tokens_apart):
        yield
