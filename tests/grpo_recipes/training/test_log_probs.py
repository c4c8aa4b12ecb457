"""Layout of a model call: simpler than the model's own where that saves nothing, and rows that come back in order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch import Tensor, nn

from grpo_recipes.generation.rows import Rows
from grpo_recipes.training.log_probs import LogProbs
from grpo_recipes.training.packing import Layout
from tests.support.recorded import model

CPU = torch.device("cpu")
Pairs = list[tuple[list[int], list[int]]]
GROUP: Pairs = [([5, 6, 7, 8, 9], [1, 2, 3])] * 4
"""Four completions of one prompt: 32 tokens, and 4 + 4 * 3 where the prompt is shared."""


def rows_of(pairs: Pairs) -> Rows:
    prompts, completions = zip(*pairs, strict=True)
    return Rows.of_tokens(prompts, completions, CPU)


def made(stock: Any = None, wanted: Layout = Layout.PACKED) -> LogProbs:
    names = ("pad_to_multiple_of", "neftune_noise_alpha", "torch_compile", "gradient_checkpointing")
    args: Any = SimpleNamespace(**dict.fromkeys((*names, "gradient_checkpointing_kwargs", "max_completion_length")))
    return LogProbs(Accelerator(cpu=True), args, stock, wanted)


def tokens(pairs: Pairs, layout: Layout, *, launches: float = 1.0, **changes: Any) -> int:
    """Return the number of tokens of a call.

    Args:
        pairs: prompts and completions.
        layout: layout of the model.
        launches: tokens that cost as much as one more bucket.
        changes: `sharded`, `verified` and `shares` of the model, and the `window` of its attention.
    """
    policy, found = model(transformers.LlamaConfig), made()
    policy.config.sliding_window, found.launches = changes.get("window"), launches
    if changes.get("sharded"):
        policy.lm_head.weight.ds_id = 1  # type: ignore[attr-defined]
    segmented = found._segmented.of(policy)
    segmented.buckets.record("" if changes.get("verified", True) else "a test")
    segmented.shared.record("" if changes.get("shares", True) else "a test")
    return found.plan(policy, rows_of(pairs).host, layout).tokens


def test_the_tokens_of_a_call_are_those_of_its_layout() -> None:
    rows: Pairs = [*GROUP, ([7], [])]
    assert tokens(rows, Layout.PADDED) == 5 * 8
    assert tokens(rows, Layout.TRIMMED) == 4 * 8
    for layout in (Layout.PACKED, Layout.SHARED):
        assert tokens(rows, layout) == 4 + 4 * 3


def test_a_packed_row_must_fit_and_save_a_twentieth() -> None:
    short: Pairs = [([5] * 5, [1])] * 3 + [([5] * 5, [1, 1])]
    packed, shared, trimmed = 4 + 5, 4 + 4 * 2, 3 * 6 + 7
    assert tokens(short, Layout.PACKED, window=7) == packed
    assert tokens(short, Layout.PACKED, window=6) == shared, "one row in four does not fit"
    assert tokens(short, Layout.PACKED, window=6, shares=False) == trimmed
    assert tokens(short, Layout.PACKED, window=6, launches=99.0) == 4 * 7, "not worth a launch"
    # One token of 20, and one of 21.
    assert tokens([([5] * 10, [1] * 10)], Layout.PACKED) == 19
    assert tokens([([5] * 10, [1] * 11)], Layout.PACKED) == 21


def test_prompts_are_shared_where_that_costs_no_more_than_trimmed_rows() -> None:
    """16 tokens and a launch more, in place of 32."""
    for launches, expected in ((1.0, 16), (16.0, 16), (17.0, 32)):
        assert tokens(GROUP, Layout.SHARED, launches=launches) == expected
    assert tokens(GROUP, Layout.SHARED, launches=17.0, sharded=True) == 16
    uneven: Pairs = [([5], [1]), ([5], [1] * 9)]
    assert tokens(uneven, Layout.TRIMMED) == 2 + 10
    assert tokens(uneven, Layout.TRIMMED, verified=False) == tokens(uneven, Layout.TRIMMED, sharded=True) == 2 * 10


def test_prompts_are_shared_in_trls_columns_where_that_costs_no_more_than_padded_rows() -> None:
    """16 tokens and two launches in place of 32, and never if a column would have to be added."""
    for launches, expected in ((1.0, 16), (8.0, 16), (8.5, 32)):
        assert tokens(GROUP, Layout.SHARED_PADDED, launches=launches) == expected
    assert tokens([([5, 6], [1, 2, 3])] * 9, Layout.SHARED_PADDED, launches=0.0) == 9 * 5


@pytest.mark.parametrize("compute_entropy", [True, False])
def test_rows_run_in_calls_of_similar_length_and_come_back_in_their_order(compute_entropy: bool) -> None:
    widths: list[int] = []
    policy = model(transformers.LlamaConfig).eval()

    def stock(called: nn.Module, rows: Rows, entropy: bool) -> tuple[Tensor, Tensor | None]:
        widths.append(rows.logits_to_keep)
        values = -rows.input_ids[:, -rows.logits_to_keep :] * policy.lm_head.weight.sum() * rows.completion_mask
        return values, 2 * values if entropy else None

    rows = rows_of([([5, 6], [10, 11, 12]), ([7, 7], [20]), ([5, 6], [30, 31, 32]), ([7], [40])])
    expected = stock(policy, rows, compute_entropy)
    for layout, chunk, calls in (
        (Layout.TRIMMED, 2, [1, 3]),
        (Layout.TRIMMED, 3, [3, 3]),
        (Layout.TRIMMED, None, [3]),
        (Layout.PADDED, 2, [3, 3]),
    ):
        found = made(stock, layout)
        for _ in range(2):  # the first time, layouts are compared
            widths.clear()
            got = found(policy, rows, chunk, compute_entropy, None)
            assert torch.equal(got[0], expected[0])
            assert (got[1] is None) is not compute_entropy
            if got[1] is not None:
                assert torch.equal(got[1], expected[1])
        assert (layout, chunk, widths) == (layout, chunk, calls)
