"""Rows in buckets of similar length: the cheapest division, and the context of each label."""

from __future__ import annotations

import itertools
import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from grpo_recipes.generation.rows import HostRows
from grpo_recipes.training.buckets import Arrangement, arrange, launch_tokens, lay_out
from grpo_recipes.training.packing import IGNORED, Layout

LAYOUTS = [Layout.TRIMMED, Layout.SHARED, Layout.SHARED_PADDED]


def rows_of(prompts: list[list[int]], completions: list[list[int]], extra: int = 0) -> HostRows:
    """Return rows in TRL's layout, with columns of padding on the left."""
    left, right = max(map(len, prompts)) + extra, max(1, *map(len, completions))
    ids = np.full((len(prompts), left + right), 99)
    mask = np.zeros_like(ids, dtype=bool)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        for tokens, start in (prompt, left - len(prompt)), (completion, left):
            ids[row, start : start + len(tokens)], mask[row, start : start + len(tokens)] = tokens, True
    return HostRows(ids, mask, right)


@st.composite
def some_rows(draw: Any) -> tuple[list[list[int]], list[list[int]], HostRows]:
    tokens = st.integers(0, 9)
    distinct = draw(st.lists(st.lists(tokens, min_size=1, max_size=5), min_size=1, max_size=3))
    pairs = draw(st.lists(st.tuples(st.sampled_from(distinct), st.lists(tokens, max_size=6)), min_size=1, max_size=6))
    prompts, completions = [prompt for prompt, _ in pairs], [completion for _, completion in pairs]
    return prompts, completions, rows_of(prompts, completions, draw(st.integers(0, 2)))


def contexts(arrangement: Arrangement) -> dict[tuple[int, int], tuple[list[int], int]]:
    """Return what each label's position attends to, its own token included, and the label, by row and column."""
    laid = lay_out(arrangement, torch.device("cpu"))
    prefixes = laid.segments.prefixes
    seen = []
    for segment in laid.segments.buckets:
        before = segment.attention_mask.size(1) - segment.input_ids.size(1)
        for row, (ids, mask) in enumerate(zip(segment.input_ids, segment.attention_mask, strict=True)):
            shared: list[int] = []
            if prefixes is not None:
                assert segment.owners is not None
                owner = segment.owners[row]
                assert torch.equal(prefixes.attention_mask[owner], mask[:before])
                shared = prefixes.input_ids[owner][mask[:before].bool()].tolist()
            for end in range(1, len(ids) + 1):
                seen.append(shared + ids[:end][mask[before:][:end].bool()].tolist())
    found = {}
    where = zip(laid.rows.tolist(), laid.columns.tolist(), laid.segments.positions, laid.labels[0], strict=True)
    for row, column, position, label in where:
        assert (row, column) not in found
        if label != IGNORED:
            found[row, column] = seen[position], int(label)
    return found


@settings(max_examples=25, deadline=None)
@given(some_rows(), st.sampled_from(LAYOUTS), st.sampled_from([0.0, 3.0, math.inf]))
def test_each_label_follows_its_own_prompt_and_completion(
    some: tuple[list[list[int]], list[list[int]], HostRows], layout: Layout, launches: float
) -> None:
    prompts, completions, rows = some
    expected = {}
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        for column, token in enumerate(completion):
            expected[row, column] = prompt + completion[:column], token
    assert contexts(arrange(rows, layout, launches)) == expected


@settings(max_examples=25, deadline=None)
@given(some_rows(), st.sampled_from(LAYOUTS), st.sampled_from([0.0, 1.0, 4.0]))
def test_no_other_division_costs_less(
    some: tuple[list[list[int]], list[list[int]], HostRows], layout: Layout, launches: float
) -> None:
    prompts, completions, rows = some
    lengths = [(len(p), len(c)) for p, c in zip(prompts, completions, strict=True) if c]
    if not lengths:
        return
    # All divisions of the rows, sorted by their completions, into consecutive parts.
    shared = layout is not Layout.TRIMMED
    ordered = sorted(lengths, key=lambda pair: pair[1])
    if not shared and len({c for _, c in ordered}) < len(ordered):
        return  # equal completions may be in any order, which this enumeration does not try
    costs = []
    for cuts in itertools.product([False, True], repeat=len(ordered) - 1):
        parts, start = [], 0
        for end in [place + 1 for place, cut in enumerate(cuts) if cut] + [len(ordered)]:
            parts.append(ordered[start:end])
            start = end
        cost = 0.0
        for part in parts:
            width = max(max(c for _, c in part), 2 if shared else 1) + (0 if shared else max(p for p, _ in part))
            cost += len(part) * width + launches
        costs.append(cost)
    arrangement = arrange(rows, layout, launches)
    before = arrangement.prefixes.tokens + launches if arrangement.prefixes else 0
    assert arrangement.cost(launches) - before == pytest.approx(min(costs))


def test_the_tokens_are_those_of_the_formula() -> None:
    """A completion of one token takes one column of trimmed rows."""
    rows = rows_of([[1, 2, 3, 4]] * 3 + [[7, 8]] * 3, [[5] * 3, [5] * 3, [5] * 8, [5] * 8, [5] * 3, []])
    arrangement = arrange(rows, Layout.SHARED, 1.0)
    assert arrangement.tokens == 2 * (4 - 1) + 3 * 3 + 2 * 8
    assert arrange(rows, Layout.TRIMMED, math.inf).tokens == 5 * (4 + 8)
    rows = rows_of([[5, 6], [7]], [[1], [2]], extra=3)
    assert arrange(rows, Layout.TRIMMED, math.inf).tokens == 2 * (2 + 1)
    assert sorted(bucket.tokens for bucket in arrange(rows, Layout.TRIMMED, 0.0).buckets) == [1 + 1, 2 + 1]
    assert arrange(rows_of([[5, 6]] * 2, [[], []]), Layout.TRIMMED, math.inf).tokens == 2 + 1, "one row runs"


def test_a_prefix_has_two_columns_at_least() -> None:
    """One column would be taken for a step of decoding."""
    for longest, columns, is_kept in ((1, 3, False), (2, 3, False), (3, 3, True), (5, 5, True)):
        rows = rows_of([[5] * longest, [6] * longest], [[1, 2], [3]])
        for layout in (Layout.SHARED, Layout.SHARED_PADDED):
            arrangement = arrange(rows, layout, math.inf)
            assert (arrangement.host is rows) is is_kept
            assert arrangement.host.prompt_mask.shape[1] == columns
            assert arrangement.host.prompt_mask.sum() == rows.prompt_mask.sum()
            assert set(arrangement.host.ids[:, 0].tolist()) <= {5, 6}, "the added columns hold tokens of the vocabulary"
            assert span(arrangement) == (0, columns - 1)
        assert arrange(rows, Layout.TRIMMED, math.inf).host is rows


def span(arrangement: Arrangement) -> tuple[int, int]:
    """Return the columns of the prefixes."""
    assert arrangement.prefixes is not None
    return arrangement.prefixes.left, arrangement.prefixes.stop


def test_columns_that_only_padding_uses_are_kept_where_positions_count_them() -> None:
    rows = rows_of([[5, 6, 7], [8]], [[1, 2, 3], [4]], extra=4)
    for layout, left in ((Layout.SHARED, 4), (Layout.SHARED_PADDED, 0)):
        assert span(arrange(rows, layout, math.inf)) == (left, 6)
    assert span(arrange(rows_of([[5], [6]], [[1, 2], [3]], extra=4), Layout.SHARED, math.inf)) == (2, 4)


def test_a_segment_costs_as_much_as_its_launches() -> None:
    rows = rows_of([[1, 2, 3]] * 2 + [[4, 5, 6]] * 2, [[1, 2], [3, 4, 5], [6, 7], [8]])
    for layout, segments in ((Layout.TRIMMED, 1), (Layout.SHARED, 2)):
        arrangement = arrange(rows, layout, math.inf)
        assert arrangement.segments == segments
        assert arrangement.cost(7.0) == arrangement.tokens + 7.0 * segments
    assert launch_tokens(torch.device("cpu")) < launch_tokens(torch.device("cuda"))


def test_the_padding_of_a_single_prefix_is_masked() -> None:
    """Recurrent layers of transformers do not mask the padding of a batch of one row."""
    for prompt, rows in (([5], 2), ([5, 6, 7], 1)):
        prefixes = arrange(rows_of([prompt] * 2, [[1, 2], [3]]), Layout.SHARED, 0.0).prefixes
        assert prefixes is not None
        assert len(prefixes.index) == rows


def test_rows_without_a_label_run_one_position_that_predicts_nothing() -> None:
    for layout in LAYOUTS:
        arrangement = arrange(rows_of([[1, 2, 3]] * 3, [[], [], []]), layout, 0.0)
        laid = lay_out(arrangement, torch.device("cpu"))
        assert laid.labels.tolist() == [[IGNORED]]
        assert len(arrangement.buckets) == 1
