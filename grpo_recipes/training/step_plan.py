"""Layout of each micro-batch, decided once, and the values that the trainer carries through a step.

What is decided where:

- Layout of a model: `LayoutCheck.choose`, once for each model and set of active adapters, on the first rows that
  `LogProbs.layout` gets. It is the most compact layout that is exact for the model.
- Rows of each micro-batch: `micro_batches.regroup`, once for each generation batch, as soon as TRL has scored it.
- Layout of a micro-batch, and its division into buckets: `decide`, right after `regroup`. The result, a
  `MicroBatchPlan`, travels in the micro-batch under the key `PLAN`. The log-probabilities of the loss read it in each
  pass over the generation batch, and so do the metrics of this module.
- Layout of a call of the old or the reference policy: `decide`, once for each call. TRL asks for their
  log-probabilities in chunks of rows before it scores the generation batch, when no micro-batch exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from grpo_recipes.generation.rows import HostRows, on_device
from grpo_recipes.training.buckets import Arrangement, arrange
from grpo_recipes.training.micro_batches import MicroBatch
from grpo_recipes.training.packing import Layout

PLAN = "plan"
"""Key of the `MicroBatchPlan` of a micro-batch."""

EMPTY = "no_row_contributes"
"""Key that is True in a micro-batch in which no rank has a row that contributes."""

MAX_PACKED_SHARE = 0.95
"""Largest share of the tokens of trimmed rows for which a packed row is used. Padded rows are faster per token."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """Rows of a model call, and how the model computes them."""

    rows: HostRows
    layout: Layout
    arrangement: Arrangement | None = None
    """Buckets of the rows, or None for padded and packed rows."""
    model: nn.Module | None = None
    """Model, inside accelerate's wrappers, whose layout was verified. None if no rank had a label to verify one: the
    rows are then padded, and the loss tries again."""

    @property
    def tokens(self) -> int:
        """Number of tokens that run through the model, padding included."""
        if self.arrangement is not None:
            return self.arrangement.tokens
        return self.rows.packed_tokens() if self.layout is Layout.PACKED else self.rows.ids.size


def decide(
    rows: HostRows, layout: Layout, launches: float, fits: Callable[[HostRows], np.ndarray], shares_prompts: bool
) -> MicroBatchPlan:
    """Return the plan of rows: in the layout of their model, or in a simpler one where that costs less.

    Args:
        rows: rows of a model call.
        layout: layout of the model.
        launches: number of tokens that cost as much as one more bucket, infinite where all rows must run together.
        fits: function that returns which rows can be packed, (B,) bool.
        shares_prompts: True if rows of a packed model that do not fit may share their prompts.
    """
    if layout is Layout.PACKED:
        trimmed = rows.select(*rows.trimmed())
        # One row that does not fit decides for its micro-batch: two calls would put ranks out of step.
        if not fits(trimmed).all():
            layout = Layout.SHARED if shares_prompts else Layout.TRIMMED
        elif rows.packed_tokens() > MAX_PACKED_SHARE * trimmed.ids.size:
            layout = Layout.TRIMMED
    if layout in (Layout.PACKED, Layout.PADDED):
        return MicroBatchPlan(rows, layout)
    # Infinite costs are equal, so no rank leaves the shared layout where calls are collectives.
    arrangement = arrange(rows, layout, launches, Layout.TRIMMED if layout is Layout.SHARED else None)
    if layout is Layout.SHARED_PADDED:
        # A column that was added to short prompts would change the positions.
        if arrangement.host is not rows or arrangement.cost(launches) > rows.ids.size:
            return MicroBatchPlan(rows, Layout.PADDED)
    elif arrangement.prefixes is None:
        layout = Layout.TRIMMED
    return MicroBatchPlan(rows, layout, arrangement)


@dataclass(frozen=True)
class Efficiency:
    """Tokens and rows of generation batches, counted for one forward of each row."""

    computed: int = 0
    """Tokens that run through the model."""
    needed: int = 0
    """Tokens without padding of the rows that contribute. Where prompts are shared, each counts once per window."""
    padded: int = 0
    """Tokens of TRL's own micro-batches."""
    rows: int = 0
    """Number of rows."""
    skipped: int = 0
    """Number of rows that do not contribute."""

    @property
    def padding(self) -> float:
        """Share of the computed tokens that are not needed, in [0, 1]."""
        return max(0.0, 1.0 - self.needed / self.computed) if self.computed else 0.0

    def __add__(self, other: Efficiency) -> Efficiency:
        """Return the totals of two generation batches."""
        return Efficiency(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def metrics(self) -> dict[str, float]:
        """Return the logged metrics by name."""
        return {
            "efficiency/tokens_computed": float(self.computed),
            "efficiency/tokens_needed": float(self.needed),
            "efficiency/padding": self.padding,
            "efficiency/rows_skipped": float(self.skipped),
        }

    def __str__(self) -> str:
        return (
            f"{self.computed:,} tokens computed ({self.padded:,} in TRL's micro-batches), {self.needed:,} needed, "
            f"{self.padding:.1%} padding, {self.skipped} of {self.rows} rows skipped"
        )


def measure(
    padded: Sequence[MicroBatch], ours: Sequence[MicroBatch], window: int, layout: Layout, accelerator: Accelerator
) -> Efficiency:
    """Count what a generation batch takes over all ranks, and mark the micro-batches that are empty on all of them.

    Args:
        padded: TRL's micro-batches.
        ours: regrouped micro-batches with their plans. Empty ones get the key `EMPTY`.
        window: number of micro-batches per window.
        layout: layout of the model.
        accelerator: accelerator that sums over ranks.
    """
    rows = [batch[PLAN].rows for batch in ours]
    computed = sum(batch[PLAN].tokens for batch in ours)
    needed = sum(needed_tokens(rows[start : start + window], layout) for start in range(0, len(rows), window))
    tokens_of_trl = sum(batch[key].numel() for batch in padded for key in ("prompt_ids", "completion_ids"))
    labelled = [int((part.labels > 0).sum()) for part in rows]
    total = sum(len(part.ids) for part in rows)
    skipped = 0 if layout is Layout.PADDED else total - sum(labelled)
    counts = torch.tensor([computed, needed, tokens_of_trl, total, skipped, *labelled])
    totals = accelerator.reduce(on_device(counts, accelerator.device)).tolist()
    for batch, number in zip(ours, totals[-len(ours) :], strict=True):
        if not number:
            batch[EMPTY] = True
    return Efficiency(*totals[: -len(ours)])


def needed_tokens(batches: Sequence[HostRows], layout: Layout) -> int:
    """Return the tokens of the rows with labels, without padding. Where prompts are shared, each counts once."""
    if not layout.shares_prompts:
        return sum(int(rows.mask[rows.labels > 0].sum()) for rows in batches)
    prefixes: dict[bytes, int] = {}
    for rows in batches:
        for prompt, labels in zip(rows.prompts(), rows.labels, strict=True):
            if labels:
                prefixes[prompt.tobytes()] = len(prompt) - 1
    return sum(prefixes.values()) + sum(int(rows.labels.sum()) for rows in batches)


@contextmanager
def empty_unlogged(batch: MicroBatch, metrics: dict[str, list[float]]) -> Iterator[None]:
    """Remove the metrics that TRL appends inside the block if the micro-batch is marked with `EMPTY`.

    TRL's formulas give 0 for the entropy and clip ratios of a micro-batch without tokens, which would lower their
    means.
    """
    before = {name: len(values) for name, values in metrics.items()}
    yield
    if EMPTY in batch:
        for name in list(metrics):
            del metrics[name][before.get(name, 0) :]
            if not metrics[name]:
                del metrics[name]


@dataclass
class StepState:
    """Values that an override of the trainer leaves for another one, where TRL's signatures do not carry them."""

    resets: ExitStack = field(default_factory=ExitStack)
    """Context in which TRL resets the environments of a generation batch. Written by `_generate_with_advantages`, and
    closed by `_generate`. Valid until generation begins."""
    rewards: Tensor = field(default_factory=lambda: torch.empty(0))
    """Rewards of all ranks, (completions, functions). Written by `_calculate_rewards`, and read by
    `_generate_with_advantages` for the rule for advantages. Valid until the next generation batch."""
    plan: MicroBatchPlan | None = None
    """Plan of the micro-batch in the loss, if it has one. Written by `compute_loss`, and read by
    `_get_per_token_logps_and_entropies`. Valid inside `compute_loss`."""
    log_probs: Tensor | None = None
    """Log-probabilities of the policy in the loss, (B, T), detached. Written by `_get_per_token_logps_and_entropies`
    where gradients are computed, and read by `compute_loss` for the metrics of a pass. Valid inside `compute_loss`."""
    efficiency: Efficiency = Efficiency()
    """Tokens and rows of the generation batches since the last log. Written by `_regroup`, and read by `log`, which
    sets it to zero."""

    @contextmanager
    def in_loss(self, batch: MicroBatch) -> Iterator[None]:
        """Let log-probabilities inside this block, which are those of this micro-batch, follow its plan."""
        self.plan = batch.get(PLAN)
        try:
            yield
        finally:
            self.plan = self.log_probs = None
