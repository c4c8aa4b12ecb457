"""One packed row per micro-batch: each prompt once, followed by its completions, without padding.

TRL pads all rows of a micro-batch to one length and runs every prompt once per completion. Here the completions of a
prompt share the prompt. With prefix = prompt[:-1] and, for each completion, suffix = [last prompt token] +
completion[:-1], a micro-batch becomes one row:

    prefix, suffix, suffix, ...      (first prompt)      prefix, suffix, ...      (second prompt)      ...

Every suffix position predicts exactly one completion token. Position ids restart at len(prefix) in each suffix. A
suffix attends to its own prefix and to itself, causally, and to nothing else. The row has (P - 1) + sum(L) tokens per
group of G completions, where TRL's padded rows have G (max P + max L).

The idea is Prefix Grouper's (arXiv 2506.05433). The row runs through stock transformers models: attention by way of
`AttentionInterface` (`packed_attention.py`), labels by way of `shift_labels` of TRL's fused head. See
docs/efficiency.md.

Shapes: B rows, P prompt columns, T completion columns, N tokens of the packed row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from torch import Tensor

from grpo_recipes.generation.rows import HostRows, Rows, on_device
from grpo_recipes.training.packed_attention import Span

IGNORED = -100
"""Label of a position that predicts nothing."""


class Layout(IntEnum):
    """Layout of the rows of a model call, from the least to the most preferred."""

    PADDED = 0
    """Stock TRL layout: every row is padded to the longest of the generation batch."""
    SHARED_PADDED = 1
    """Shared layout with all prompt columns of the padded layout, for models whose positions count padding."""
    TRIMMED = 2
    """Padded layout without the columns and rows that hold no label or context, in buckets of similar length."""
    SHARED = 3
    """Each prompt once, and its completions in buckets of similar length behind a differentiable cache of it."""
    PACKED = 4
    """One row without padding, in which the completions of a group share their prompt."""

    @property
    def shares_prompts(self) -> bool:
        """True if a prompt runs once for all of its completions in a micro-batch."""
        return self in (Layout.SHARED_PADDED, Layout.SHARED, Layout.PACKED)

    @property
    def described(self) -> str:
        """Name of the layout in messages and documents."""
        return "shared, in TRL's columns" if self is Layout.SHARED_PADDED else self.name.lower()


@dataclass(frozen=True)
class PackedRow:
    """One packed row of N tokens with n labels, and the places of its results in TRL's layout."""

    input_ids: Tensor
    """(1, N)."""
    position_ids: Tensor
    """(1, N)."""
    labels: Tensor
    """Token that each suffix position predicts, and -100 in prefixes, (1, N)."""
    groups: list[tuple[Span, list[Span]]]
    """Spans of the prefix and the suffixes of each group, in the order of the row."""
    rows: Tensor
    """Row in TRL's layout of each label, in packed order, (n,)."""
    columns: Tensor
    """Column in TRL's completions of each label, (n,)."""
    positions: Tensor
    """Position in the packed row that predicts each label, (n,)."""


@dataclass(frozen=True)
class ModelCall:
    """A model call: B rows, and the layout chosen for it."""

    rows: Rows
    layout: Layout
    launches: float = math.inf
    """Number of tokens that cost as much as one more bucket (`buckets.arrange`). Infinity makes one bucket."""


class SpansIgnored(RuntimeError):
    """An attention layer did not use `packed_attention`, or added a float mask."""


def order(rows: HostRows, layout: Layout) -> np.ndarray:
    """Return an order of the rows, (B,), in which rows that should share a micro-batch are neighbours.

    Packed rows and rows with shared prompts are sorted by prompt. Trimmed rows are sorted by completion length, then by
    prompt length.
    """
    if layout.shares_prompts:
        return np.argsort(rows.prompt_numbers(), kind="stable")
    # Not by total length: completions vary more than prompts, and a long prompt beside a long completion pads both
    # sides.
    return np.lexsort([rows.prompt_mask.sum(1), rows.labels])


@dataclass
class _UnfinishedRow:
    """Packed row under construction."""

    ids: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)
    length: int = 0

    def append(self, tokens: np.ndarray, first_position: int, predicted: np.ndarray) -> Span:
        """Add tokens and the labels that they predict, both (length,), and return their span in the row."""
        self.ids.append(tokens)
        self.positions.append(np.arange(first_position, first_position + len(tokens)))
        self.labels.append(predicted)
        start, self.length = self.length, self.length + len(tokens)
        return start, self.length


def pack(rows: Rows) -> PackedRow:
    """Lay the rows out as one packed row.

    Rows without labels are dropped. If no row has a label, the result is one token that predicts nothing.
    """
    host = rows.host
    prompts, completions = host.prompts(), host.completions()
    line = _UnfinishedRow()
    groups: list[tuple[Span, list[Span]]] = []
    owners: list[int] = []  # row in TRL's layout of each suffix
    for number, same_prompt in host.groups().items():
        group = [row for row in same_prompt if len(completions[row])]
        if not group:
            continue
        prompt, context = prompts[number], len(prompts[number]) - 1
        prefix = line.append(prompt[:-1], 0, np.full(context, IGNORED))
        suffixes = []
        for row in group:
            # The last prompt token predicts the first token of every completion. One position has one label, so each
            # suffix gets its own copy of that token, and the shared prefix predicts nothing.
            tokens = np.concatenate([prompt[-1:], completions[row][:-1]])
            suffixes.append(line.append(tokens, context, completions[row]))
        groups.append((prefix, suffixes))
        owners += group
    if not groups:
        groups = [((0, 0), [line.append(host.ids[0, -1:], 0, np.full(1, IGNORED))])]

    labels, lengths = np.concatenate(line.labels), [len(completions[row]) for row in owners]
    columns = np.concatenate([np.zeros(0), *map(np.arange, lengths)])
    parts = {
        "input_ids": np.concatenate(line.ids),
        "position_ids": np.concatenate(line.positions),
        "labels": labels,
        # Labels lie suffix after suffix and, within a suffix, in the order of the completion's columns.
        "rows": np.repeat(owners, lengths),
        "columns": columns,
        "positions": np.flatnonzero(labels != IGNORED),
    }
    # One copy to the device for all.
    joined = on_device(np.concatenate([*parts.values()]).astype(np.int64), rows.input_ids.device)
    made = dict(zip(parts, joined.split([len(part) for part in parts.values()]), strict=True))
    for name in ("input_ids", "position_ids", "labels"):
        made[name] = made[name][None]
    return PackedRow(groups=groups, **made)
