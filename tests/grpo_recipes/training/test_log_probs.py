"""Decisions on the layout of a model call, with the checks and the model replaced by their results."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from grpo_recipes.generation.rows import HostRows, Rows
from grpo_recipes.training import log_probs
from grpo_recipes.training.buckets import arrange
from grpo_recipes.training.log_probs import LogProbs
from grpo_recipes.training.packing import Layout, ModelCall

GROUP = [([5, 6, 7, 8, 9], [1, 2, 3])] * 4
"""Four completions of one prompt: 32 tokens, and 4 + 4 * 3 where the prompt is shared."""


def rows_of(pairs: list[tuple[list[int], list[int]]]) -> Rows:
    prompts, completions = zip(*pairs, strict=True)
    return Rows.of_tokens(prompts, completions, torch.device("cpu"))


def made(**changes: Any) -> Any:
    """Return an object whose checks have passed, with the parts of a test."""
    found: Any = object.__new__(LogProbs)
    for name in ("_layouts", "_checked", "_sharded", "_bare"):
        setattr(found, name, WeakKeyDictionary())
    found.wanted, found.launches = Layout.PACKED, 1.0
    found.accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    found._check = SimpleNamespace(
        exceeds_kept_scores=lambda bare, columns: False, fits=lambda bare, rows: np.ones(len(rows.ids), dtype=bool)
    )
    found._segmented = SimpleNamespace(of=lambda bare: SimpleNamespace(verified=True, shares_prompts=True))
    vars(found).update(changes)
    return found


# ---- calls


@pytest.mark.parametrize(
    ("layout", "chunk", "calls"),
    [
        (Layout.PADDED, 2, [[10, 20], [30, 40]]),
        (Layout.PACKED, 2, [[10, 30], [20, 40]]),  # rows of one prompt run together
        (Layout.PACKED, 3, [[10, 30, 20], [40]]),
        (Layout.PACKED, 4, [[10, 20, 30, 40]]),
        (Layout.PACKED, None, [[10, 20, 30, 40]]),
    ],
)
@pytest.mark.parametrize("compute_entropy", [True, False])
def test_rows_run_in_calls_and_come_back_in_their_order(
    layout: Layout, chunk: int | None, calls: list[list[int]], compute_entropy: bool
) -> None:
    rows = rows_of([([5, 6], [10]), ([7, 7], [20]), ([5, 6], [30]), ([7, 7], [40])])
    seen: list[Any] = []

    def run(call: ModelCall, model: Any, entropy: bool) -> tuple[Tensor, Tensor | None]:
        values = call.rows.input_ids[:, -1:].float()
        seen.append((call.layout, values[:, 0].tolist()))
        assert entropy is compute_entropy
        return values, -values if entropy else None

    def of_call(model: Any, host: HostRows, wanted: Layout) -> tuple[Layout, float]:
        assert wanted is layout
        return Layout.TRIMMED, 3.0

    asked: list[int] = []
    object_of = made(_run=run, _layout_of_call=of_call, layout=lambda model, rows, size: asked.append(size) or layout)
    found, entropies = object_of("model", rows, chunk, compute_entropy)
    assert asked == [chunk or 4]
    assert seen == [(Layout.TRIMMED if layout else Layout.PADDED, numbers) for numbers in calls]
    assert found.tolist() == [[10], [20], [30], [40]]
    expected = [[-10], [-20], [-30], [-40]] if compute_entropy else None
    assert (None if entropies is None else entropies.tolist()) == expected
    assert ("host" in vars(rows)) is (layout is not Layout.PADDED and chunk in (2, 3)), "copied only to be ordered"


# ---- the layout of a model


def test_a_layout_is_chosen_once_for_each_set_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    answers = [None, Layout.PADDED, Layout.PADDED]

    def choose(model: Any, bare: Any, rows: Rows, wanted: Layout, *, in_columns: bool) -> Layout | None:
        asked.append((model is policy, bare is inner, len(rows.input_ids), wanted, in_columns))
        return answers.pop(0)

    policy, inner, rows = nn.Linear(1, 1), nn.Linear(1, 1), rows_of(GROUP)
    active = [("one",)]
    monkeypatch.setattr(log_probs, "adapter_state", lambda bare: active[0])
    found = made(accelerator=SimpleNamespace(unwrap_model=lambda model: inner))
    found._check.choose = choose
    assert found.layout(policy, rows, 3) is Layout.PADDED, "nothing was compared"
    assert [found.layout(policy, rows, 3) for _ in range(2)] == [Layout.PADDED] * 2
    active[0] = ("other",)
    assert [found.layout(policy, rows, 3) for _ in range(2)] == [Layout.PADDED] * 2
    assert asked == [(True, True, 3, Layout.PACKED, True)] * 2 + [(True, True, 3, Layout.PADDED, False)]


def test_rows_longer_than_the_kept_scores_are_padded_for_their_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probs, "adapter_state", lambda bare: ())
    found, policy = made(), nn.Linear(1, 1)
    found._check = SimpleNamespace(
        exceeds_kept_scores=lambda bare, columns: columns > 7, choose=lambda *_, **__: Layout.SHARED
    )
    short = rows_of([([5, 6, 7, 8, 9], [1, 2])])
    layouts = [found.layout(policy, rows, 4) for rows in (rows_of(GROUP), short, rows_of(GROUP))]
    assert layouts == [Layout.PADDED, Layout.SHARED, Layout.PADDED]


def test_a_model_is_unwrapped_once_and_shards_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inner: dict[int, nn.Module] = {}
    unwrapped: list[int] = []
    looked: list[int] = []

    def unwrap(model: nn.Module) -> nn.Module:
        unwrapped.append(id(model))
        return inner.setdefault(id(model), nn.Linear(1, 1))

    monkeypatch.setattr(log_probs, "is_sharded", lambda bare: looked.append(1) or len(looked) > 1)
    found = made(accelerator=SimpleNamespace(unwrap_model=unwrap))
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    assert [found.bare(model) for model in (one, other, one)] == [inner[id(one)], inner[id(other)], inner[id(one)]]
    assert unwrapped == [id(one), id(other)]
    assert [found._is_sharded(model) for model in (one, other, one, other)] == [False, True, False, True]
    assert len(looked) == 2


# ---- the layout of a call


def of_call(pairs: list[Any], layout: Layout, **changes: Any) -> tuple[Layout, float]:
    """Return the layout of a call and the cost of a bucket.

    Args:
        pairs: prompts and completions.
        layout: layout of the model.
        changes: `launches`, `sharded`, `verified`, `shares`, and `fits`, the rows that may be packed.
    """
    host = rows_of(pairs).host
    shared = SimpleNamespace(verified=changes.get("verified", True), shares_prompts=changes.get("shares", True))
    found = made(
        launches=changes.get("launches", 1.0),
        _is_sharded=lambda bare: changes.get("sharded", False),
        _segmented=SimpleNamespace(of=lambda bare: shared),
        _check=SimpleNamespace(fits=lambda bare, rows: np.array(changes.get("fits", [True] * len(rows.ids)))),
    )
    return found._layout_of_call(nn.Linear(1, 1), host, layout)


def test_a_packed_row_must_fit_and_save_a_twentieth() -> None:
    assert of_call(GROUP, Layout.PACKED) == (Layout.PACKED, 1.0)
    one_in_four = {"fits": [True, True, False, True]}
    assert of_call(GROUP, Layout.PACKED, **one_in_four) == (Layout.SHARED, 1.0)
    assert of_call(GROUP, Layout.PACKED, **one_in_four, shares=False) == (Layout.TRIMMED, 1.0)
    assert of_call(GROUP, Layout.PACKED, **one_in_four, launches=99.0) == (Layout.TRIMMED, 99.0), "not worth a launch"
    # One token of 20, and one of 21.
    assert of_call([([5] * 10, [1] * 10)], Layout.PACKED)[0] is Layout.PACKED
    assert of_call([([5] * 10, [1] * 11)], Layout.PACKED)[0] is Layout.TRIMMED


def test_prompts_are_shared_where_that_costs_no_more_than_trimmed_rows() -> None:
    """16 tokens and a launch more, in place of 32."""
    assert arrange(rows_of(GROUP).host, Layout.SHARED, 16.0).tokens == 16
    for launches, layout in ((1.0, Layout.SHARED), (16.0, Layout.SHARED), (17.0, Layout.TRIMMED)):
        assert of_call(GROUP, Layout.SHARED, launches=launches) == (layout, launches)
    assert of_call(GROUP, Layout.SHARED, launches=17.0, sharded=True) == (Layout.SHARED, math.inf)
    assert of_call(GROUP, Layout.TRIMMED, launches=17.0) == (Layout.TRIMMED, 17.0)
    assert of_call(GROUP, Layout.TRIMMED, verified=False) == (Layout.TRIMMED, math.inf), "one bucket for all rows"


def test_prompts_are_shared_in_trls_columns_where_that_costs_no_more_than_padded_rows() -> None:
    """16 tokens and two launches in place of 32, and never if a column would have to be added."""
    for launches, layout in ((1.0, Layout.SHARED_PADDED), (8.0, Layout.SHARED_PADDED), (8.5, Layout.PADDED)):
        assert of_call(GROUP, Layout.SHARED_PADDED, launches=launches) == (layout, launches)
    short = [([5, 6], [1, 2, 3])] * 9
    assert of_call(short, Layout.SHARED_PADDED, launches=0.0)[0] is Layout.PADDED
    assert arrange(rows_of(short).host, Layout.SHARED_PADDED, 0.0).tokens < 9 * 5


def test_the_tokens_of_a_call_are_those_of_its_layout() -> None:
    host = rows_of([*GROUP, ([7], [])]).host
    found = made(_is_sharded=lambda bare: False)
    policy = nn.Linear(1, 1)
    assert found.tokens(policy, host, Layout.PADDED) == 5 * 8
    assert found.tokens(policy, host, Layout.PACKED) == 4 + 4 * 3
    assert found.tokens(policy, host, Layout.SHARED) == 4 + 4 * 3
    assert found.tokens(policy, host, Layout.TRIMMED) == 4 * 8
    found._layout_of_call = lambda model, rows, layout: (Layout.PADDED, 1.0)
    assert found.tokens(policy, host, Layout.SHARED_PADDED) == 5 * 8


def test_values_of_trimmed_rows_go_back_to_their_places() -> None:
    rows = rows_of([([5], [1, 2, 3]), ([5], []), ([5], [4])])
    values = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
    assert log_probs._untrimmed(values, rows, np.array([0, 2])).tolist() == [[1, 2, 0], [0, 0, 0], [3, 0, 0]]
    assert log_probs._untrimmed(values, rows.select(slice(2)), np.array([0, 1])).tolist() == [[1, 2, 0], [3, 0, 0]]
    found = log_probs._in_rows(torch.tensor([7.0, 8.0]), torch.tensor([1, 0]), torch.tensor([2, 0]), (2, 3))
    assert found.tolist() == [[8, 0, 0], [0, 0, 7]]
