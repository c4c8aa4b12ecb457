"""Plan of each micro-batch, made once and read by the loss and the metrics, and the tokens that it saves."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from grpo_recipes import GRPOTrainer
from grpo_recipes.generation.rows import HostRows, Rows
from grpo_recipes.training.buckets import arrange
from grpo_recipes.training.log_probs import LogProbs
from grpo_recipes.training.packing import Layout
from grpo_recipes.training.step_plan import EMPTY, PLAN, Efficiency, MicroBatchPlan, decide, measure
from tests.support.layouts import RAGGED, flat, layout_of, trainer_on
from tests.support.recorded import Recording, gradients, make_trainer, model
from tests.tools.models import build

UNEVEN = Recording.random(seed=1, zero=(2,))
SIZES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
small = partial(model, num_hidden_layers=1)


# ---- Made once


class Planned(GRPOTrainer):
    """A trainer that keeps the plan of each micro-batch in the loss."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *rest: Any, **more: Any) -> Any:
        self.plans = [*getattr(self, "plans", []), inputs[PLAN]]
        return super().compute_loss(model, inputs, *rest, **more)


def calls_in(train: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """Return the number of calls of each function that decides on layouts, by the names of function and caller."""
    counted = {function.__code__ for function in (arrange, decide, LogProbs.layout)}
    found: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in counted and frame.f_back is not None:
            found[frame.f_code.co_name, frame.f_back.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        train()
    finally:
        sys.setprofile(before)
    return found


@pytest.mark.parametrize("layout", [Layout.PACKED, Layout.SHARED, Layout.TRIMMED])
def test_a_micro_batch_is_arranged_once_for_all_that_read_it(layout: Layout, tmp_path: Path) -> None:
    """Two generation batches serve two passes each. The old and the reference policy score them in four calls each."""
    policy = build("qwen3_5_text") if layout is Layout.SHARED else model(transformers.LlamaConfig)
    options = {"num_iterations": 2, "beta": 0.04, "max_steps": 4, "micro_batching": {"layout": layout.name.lower()}}
    recording = Recording.random(prompts=4, group=4, seed=4, longest=40)
    trainer = make_trainer(Planned, recording, policy, tmp_path, **SIZES, **options)
    trainer._log_probs.launches = 1.0
    calls = calls_in(trainer.train)
    assert set(trainer._log_probs._layouts.values()) == {layout}
    assert len(trainer.plans) == 4 * 4
    assert Counter(map(id, trainer.plans)) == dict.fromkeys(map(id, trainer.plans), 2)
    assert layout in {plan.layout for plan in trainer.plans}
    decisions = {caller: number for (name, caller), number in calls.items() if name == "decide"}
    assert decisions == {"plan": 2 * (4 + 4 + 4)}
    assert sum(number for (name, _), number in calls.items() if name == "layout") == 2 * (1 + 1 + 1)
    arranged = {caller: number for (name, caller), number in calls.items() if name == "arrange"}
    assert arranged.keys() <= {"decide", "_run_trial"}, "and the check of a layout, before it is used"
    if layout is not Layout.PACKED:
        assert arranged["decide"] == decisions["plan"]
    else:
        assert arranged.get("decide", 0) < decisions["plan"], "a packed row has no buckets"


def test_a_plan_holds_for_the_model_that_it_was_made_for(tmp_path: Path) -> None:
    """Without a verified layout, and with another model, the rows are decided on again."""
    rows = flat(RAGGED)
    trainer, other = (trainer_on(model(transformers.LlamaConfig), tmp_path) for _ in range(2))
    early = trainer._log_probs.plan(trainer.model, rows.host, Layout.PADDED)
    assert (early.model, early.tokens) == (None, rows.input_ids.numel())
    trainer._log_probs(trainer.model, rows, None, False, early)
    assert layout_of(trainer) is Layout.PACKED
    plan = trainer._log_probs.plan(trainer.model, rows.host, Layout.PACKED)
    assert (plan.model, plan.layout) == (trainer.model, Layout.PACKED)
    assert calls_in(lambda: trainer._log_probs(trainer.model, rows, None, False, plan)) == {}
    assert ("layout", "__call__") in calls_in(lambda: other._log_probs(other.model, rows, None, False, plan))


# ---- Logged metrics


def test_efficiency_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three steps with `logging_steps: 2` give two lines, whose tokens sum to those of all steps."""
    caplog.set_level(logging.INFO, "grpo_recipes")
    trainer = make_trainer(GRPOTrainer, UNEVEN, small(), tmp_path, **SIZES, max_steps=3, logging_steps=2)
    trainer.train()
    kept = [group for index, group in enumerate(UNEVEN.completions) if len(set(UNEVEN.rewards[index])) > 1]
    prompts = [prompt for index, prompt in enumerate(UNEVEN.prompts) if len(set(UNEVEN.rewards[index])) > 1]
    zero = sum(reward == sum(group) / 4 for group in UNEVEN.rewards for reward in group)
    assert zero == 4, "only complete groups have zero advantage here"
    needed = sum(map(len, prompts)) - len(prompts) + sum(len(c) for group in kept for c in group)
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entry["efficiency/tokens_needed"] == needed
    assert needed <= entry["efficiency/tokens_computed"] <= needed + 1  # one token for the empty micro-batch
    assert entry["efficiency/rows_skipped"] == 4
    assert entry["efficiency/padding"] == pytest.approx(1 - needed / entry["efficiency/tokens_computed"])
    lines = [record.getMessage() for record in caplog.records if "tokens computed" in record.getMessage()]
    assert [line.partition(":")[0] for line in lines] == ["step 2", "step 3"]
    for line, steps in zip(lines, (2, 1), strict=True):
        assert f"{steps * needed:,} needed" in line
        assert f"{4 * steps} of {16 * steps} rows" in line


def entropies(recording: Recording, folder: Path, batch_size: int) -> list[float]:
    """Return the entropies that are logged for one generation batch, in order of their size."""
    steps = len(recording.prompts) * recording.group // batch_size
    sizes = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": steps}
    trainer = make_trainer(GRPOTrainer, recording, small(), folder, **sizes)
    gradients(trainer, recording.rows())
    return sorted(trainer._metrics["train"]["entropy"])


def test_the_entropy_is_the_mean_over_the_rows_that_run(tmp_path: Path) -> None:
    """An empty micro-batch does not lower it. TRL takes values of one column for those of a sequence."""
    kept, both = (Recording(UNEVEN.prompts[:n], UNEVEN.completions[:n], UNEVEN.rewards[:n]) for n in (2, 3))
    assert entropies(kept, tmp_path, 4) == pytest.approx(entropies(both, tmp_path, 4), abs=1e-5)
    one = Recording([[5, 6, 7]], [[[1], [1], [9, 8, 7, 1], [3, 4, 1]]], [[1.0, 0.0, 0.5, 0.5]])
    kept = Recording(one.prompts, [[[1], [1]]], [[1.0, 0.0]])
    assert entropies(one, tmp_path, 4) == pytest.approx(entropies(kept, tmp_path, 2), abs=1e-5)


def host(*rows: tuple[list[int], list[int]]) -> HostRows:
    """Return the rows of these prompts and completions."""
    prompts, completions = zip(*rows, strict=True)
    return Rows.of_tokens(prompts, completions, torch.device("cpu")).host


def test_the_counts_of_all_ranks_mark_what_is_empty_everywhere() -> None:
    none = host(([9], [1]), ([9], [1])).without_labels(np.ones(2, dtype=bool))
    rows = [host(([5, 6, 7], [1, 2]), ([8, 8], [])), none, none, host(([5, 6, 7], [1]), ([5], [2]))]
    padded = [{"prompt_ids": torch.zeros(2, 4), "completion_ids": torch.zeros(2, 3)}] * 4

    def measured(window: int, layout: Layout) -> tuple[Efficiency, list[bool]]:
        """Return the result for two ranks, and which micro-batches are marked. The other rank adds to all counts."""
        ours = [{PLAN: MicroBatchPlan(part, Layout.PADDED)} for part in rows]
        # Computed, needed, TRL's, rows, skipped, and the rows with labels of each micro-batch.
        others = torch.tensor([100, 200, 300, 400, 500, 1, 1, 0, 0])
        ranks: Any = SimpleNamespace(device=torch.device("cpu"), reduce=lambda counts: counts + others)
        return measure(padded, ours, window, layout, ranks), [EMPTY in batch for batch in ours]

    computed, needed = 10 + 4 + 4 + 8, 5 + 0 + 0 + 4 + 2
    expected = Efficiency(100 + computed, 200 + needed, 300 + 4 * 2 * 7, 400 + 8, 500 + 5)
    assert measured(2, Layout.TRIMMED) == (expected, [False, False, True, False])
    assert measured(2, Layout.PADDED)[0].skipped == 500
    # Prompts count once in each window: two windows of two, and one of all.
    assert measured(2, Layout.PACKED)[0].needed == 200 + (2 + 2) + (2 + 0 + 2)
    assert measured(4, Layout.PACKED)[0].needed == 200 + 2 + 0 + 4


def test_the_efficiency_of_two_generation_batches() -> None:
    both = Efficiency(1500, 900, 4000, 10, 2) + Efficiency(500, 600, 1000, 6, 0)
    assert both == Efficiency(2000, 1500, 5000, 16, 2)
    values = {"tokens_computed": 2000.0, "tokens_needed": 1500.0, "padding": 0.25, "rows_skipped": 2.0}
    assert both.metrics() == {f"efficiency/{name}": value for name, value in values.items()}
    assert all(figure in str(both) for figure in ("2,000", "5,000", "1,500", "25.0%", "2 of 16"))
    assert (Efficiency(5, 6, 9, 1, 0).padding, Efficiency(0, 0, 0, 0, 0).padding) == (0.0, 0.0)
