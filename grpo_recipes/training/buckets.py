"""Rows of a micro-batch in buckets of similar length, with their own prompts or behind shared ones.

Trimmed rows that run together are as wide as the longest prompt and the longest completion among them. Buckets of rows
of similar length have less padding, and each bucket launches the kernels of a forward once more. `arrange` divides rows
so that tokens and launches together cost the least.

In the shared layout a prompt runs once for all of its completions. With prefix = prompt[:-1] and, for each completion,
suffix = [last prompt token] + completion[:-1], the distinct prefixes run as rows padded on the left, and the suffixes
run behind them (`segments.py`), padded on the right. n distinct prompts and buckets of B rows have n (max P - 1) +
sum(B max L) tokens, where TRL's padded rows have B (max P + max L). Columns, and with them positions, are TRL's.

Shapes: B rows, P prompt columns, T completion columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grpo_recipes.generation.rows import HostRows, on_device
from grpo_recipes.training.packing import IGNORED, Layout
from grpo_recipes.training.segments import Segment, Segments

LAUNCH_TOKENS = {"cpu": 16.0}
"""Tokens that take as long as the launches of one more segment, by the type of device."""

LAUNCH_TOKENS_ELSEWHERE = 512.0
"""The same on a GPU, where a decoder layer of 50 million weights computes a token in 1 µs and launches for 0.5 ms."""

MIN_COLUMNS = 2
"""Smallest number of columns of a segment with a cache. One column would be taken for a step of decoding, whose kernels
may have no gradient, and whose padding is not masked in recurrent layers."""


def launch_tokens(device: torch.device) -> float:
    """Return the number of tokens that take as long as the launches of one more segment."""
    return LAUNCH_TOKENS.get(device.type, LAUNCH_TOKENS_ELSEWHERE)


@dataclass(frozen=True)
class Bucket:
    """Rows that run together, and their columns."""

    index: np.ndarray
    """Rows of the micro-batch, (rows,)."""
    left: int
    """First column."""
    stop: int
    """Column behind the last one."""

    @property
    def tokens(self) -> int:
        """Number of tokens, padding included."""
        return len(self.index) * (self.stop - self.left)


@dataclass(frozen=True)
class Arrangement:
    """Division of a micro-batch into buckets."""

    host: HostRows
    """Rows of the micro-batch, with columns of padding before them if the prompts have too few for a prefix."""
    buckets: list[Bucket]
    """Buckets of the rows with labels."""
    prefixes: Bucket | None = None
    """One row for each distinct prompt, or None for buckets with their own prompts."""

    @property
    def tokens(self) -> int:
        """Number of tokens that run through the model, padding included."""
        return sum(bucket.tokens for bucket in self.buckets) + (self.prefixes.tokens if self.prefixes else 0)

    @property
    def segments(self) -> int:
        """Number of segments."""
        return len(self.buckets) + (self.prefixes is not None)

    def cost(self, launches: float) -> float:
        """Return the cost in tokens, if each segment costs as much as `launches` tokens more."""
        return self.tokens + launches * self.segments


def arrange(rows: HostRows, layout: Layout, launches: float, other: Layout | None = None) -> Arrangement:
    """Divide rows into the buckets of the least cost.

    Args:
        rows: rows of a micro-batch.
        layout: trimmed, or one of the shared layouts.
        launches: number of tokens that cost as much as one more bucket. Infinity makes one bucket.
        other: layout that is taken in place of `layout` where it costs less.

    Returns:
        Buckets of the rows with labels. If no row has a label, one row of the fewest columns.
    """
    candidates = [_arranged(rows, each, launches) for each in (layout, other) if each is not None]
    return min(candidates, key=lambda arrangement: arrangement.cost(launches))  # the first one of equal costs


def _arranged(rows: HostRows, layout: Layout, launches: float) -> Arrangement:
    """Return the cheapest division in one layout."""
    index, left, _ = rows.trimmed()
    shared = layout is not Layout.TRIMMED
    missing = MIN_COLUMNS + 1 - rows.prompt_mask.shape[1]
    if shared and missing > 0:
        before = (0, 0), (missing, 0)
        ids, mask = np.pad(rows.ids, before, mode="edge"), np.pad(rows.mask, before)
        rows = HostRows(ids, mask, rows.logits_to_keep)
        left += missing
    prompt = rows.prompt_mask.shape[1]
    if shared:
        # TRL's columns are all kept where positions depend on them.
        left = 0 if layout is Layout.SHARED_PADDED else min(left, prompt - 1 - MIN_COLUMNS)
    # Columns up to the last token of each completion, (rows,).
    ends = (rows.completion_mask[index] * np.arange(1, rows.logits_to_keep + 1)).max(1)
    completions = np.maximum(ends, MIN_COLUMNS if shared else 1)
    own_prompts = np.zeros(len(index), dtype=np.int64) if shared else prompt - rows.prompt_mask[index].argmax(1)
    sequence = np.argsort(completions, kind="stable")
    buckets = []
    for part in _cheapest_parts(completions[sequence], own_prompts[sequence], launches):
        some = sequence[part]
        first, stop = prompt - int(own_prompts[some].max()), prompt + int(completions[some].max())
        if shared:  # a suffix begins with the last prompt token, and the last completion token predicts nothing
            first, stop = first - 1, stop - 1
        buckets.append(Bucket(index[some], first, stop))
    if not shared:
        return Arrangement(rows, buckets)
    numbers = np.array(rows.prompt_numbers())
    first_rows = np.unique(numbers[index])
    if len(first_rows) == 1 and not rows.prompt_mask[first_rows[0], left : prompt - 1].all():
        # Recurrent layers of transformers ignore the padding of a single row.
        first_rows = first_rows.repeat(2)
    return Arrangement(rows, buckets, Bucket(first_rows, left, prompt - 1))


def _cheapest_parts(completions: np.ndarray, prompts: np.ndarray, launches: float) -> list[slice]:
    """Divide rows, sorted by the lengths of their completions, into consecutive parts of the least cost.

    Args:
        completions: lengths, ascending, (B,).
        prompts: lengths, (B,).
        launches: cost of a part in tokens.
    """
    size = len(completions)
    if math.isinf(launches):
        return [slice(0, size)]
    best, begins = np.zeros(size + 1), np.zeros(size + 1, dtype=np.int64)
    for stop in range(1, size + 1):
        # For each place at which the last part may begin: all rows of a part are as wide as its longest lengths.
        longest_prompts = np.maximum.accumulate(prompts[:stop][::-1])[::-1]
        widths = completions[stop - 1] + longest_prompts
        costs = best[:stop] + np.arange(stop, 0, -1) * widths + launches
        begins[stop] = costs.argmin()
        best[stop] = costs[begins[stop]]
    parts, stop = [], size
    while stop:
        parts.append(slice(int(begins[stop]), stop))
        stop = int(begins[stop])
    return parts[::-1]


@dataclass(frozen=True)
class Laid:
    """Tensors of an arrangement, with n labels, and the places of its results in TRL's layout."""

    segments: Segments
    labels: Tensor
    """Token that each position predicts, (1, n)."""
    rows: Tensor
    """Row in TRL's layout of each label, (n,)."""
    columns: Tensor
    """Column in TRL's completions of each label, (n,)."""


def lay_out(arrangement: Arrangement, device: torch.device) -> Laid:
    """Return the tensors of an arrangement, in one copy to the device."""
    host, prefixes = arrangement.host, arrangement.prefixes
    prompt = host.prompt_mask.shape[1]
    arrays, positions, rows, columns, before = [], [], [], [], 0
    numbers = np.array(host.prompt_numbers())
    for bucket in arrangement.buckets:
        window = host.completion_mask[bucket.index][:, : bucket.stop - (prompt - 1 if prefixes else prompt)]
        row, column = np.nonzero(window)
        width = bucket.stop - bucket.left
        positions.append(before + row * width + column + (prompt - 1 - bucket.left))
        rows.append(bucket.index[row])
        columns.append(column)
        before += len(bucket.index) * width
        arrays += [
            host.ids[bucket.index, bucket.left : bucket.stop],
            host.mask[bucket.index, (prefixes or bucket).left : bucket.stop],
        ]
        if prefixes is not None:
            arrays.append(np.searchsorted(prefixes.index, numbers[bucket.index]))
    if prefixes is not None:
        columns_of_prefixes = slice(prefixes.left, prefixes.stop)
        arrays += [source[prefixes.index, columns_of_prefixes] for source in (host.ids, host.mask)]
    row, column, position = np.concatenate(rows), np.concatenate(columns), np.concatenate(positions)
    labels = host.ids[row, prompt + column]
    if not len(labels):
        # Without any label, one position still runs, and predicts nothing: every rank calls the model.
        row = column = position = np.zeros(1, dtype=np.int64)
        labels = np.full(1, IGNORED)
    arrays += [position, labels, row, column]
    joined = on_device(np.concatenate([array.reshape(-1) for array in arrays]).astype(np.int64), device)
    parts = joined.split([array.size for array in arrays])
    tensors = iter([part.view(array.shape) for part, array in zip(parts, arrays, strict=True)])

    buckets = []
    for _ in arrangement.buckets:
        ids, mask = next(tensors), next(tensors)
        buckets.append(Segment(ids, mask, next(tensors) if prefixes is not None else None))
    before_all = Segment(next(tensors), next(tensors)) if prefixes is not None else None
    places, predicted, of_rows, of_columns = tensors
    return Laid(Segments(buckets, places, before_all), predicted[None], of_rows, of_columns)
