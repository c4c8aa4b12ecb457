"""Verification of a layout for a model, before the layout is used.

A wrong attention mask changes log-probabilities without any error. So a layout is used only after three checks:

1. Nothing in the settings, the configuration and the modules of the model rules it out (`layout_rules.py`).
2. A few rows of the first micro-batch agree with TRL's own computation on rows with additional padding.
3. A few short rows agree in log-probabilities and gradients, in training mode, with an adapter that has an effect.

The third check is needed because a new adapter adds nothing, and new norms have one weight in every channel: on them
the rows of the first micro-batch agree in every layout, and prove nothing about later steps. So every trainable tensor
that holds one value is perturbed during the check. 16-bit weights are replaced by float32 copies where memory allows,
because a difference is then a mistake and not rounding. `layout_trial.py` prepares rows and model for both comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import nn
from transformers import PreTrainedModel
from trl.models.utils import disable_gradient_checkpointing

from grpo_recipes.generation.agreement import REPEATED, disagreement, gradient_disagreement
from grpo_recipes.generation.models import base_model, computes_in_float32, eval_no_grad, in_float32, kept_scores
from grpo_recipes.generation.rows import HostRows, PerToken, Rows
from grpo_recipes.generation.verified import FastWay
from grpo_recipes.process.messages import Announcer
from grpo_recipes.process.ranks import on_any_rank
from grpo_recipes.training import layout_trial
from grpo_recipes.training.layout_rules import (
    Choice,
    LayoutRules,
    attention_window,
    is_sharded,
    learns_positions,
    sharding_of,
    text_config,
    unsupported_under_sharding,
)
from grpo_recipes.training.layout_trial import Results, Trial, gradients, without_gradients
from grpo_recipes.training.packed_attention import AttentionSwitch
from grpo_recipes.training.packing import Layout, ModelCall, SpansIgnored
from grpo_recipes.training.segments import NotSegmented, SegmentedModels

if TYPE_CHECKING:
    from grpo_recipes.generation.models import FilledConfig

logger = get_logger(__name__)


@dataclass
class LayoutCheck:
    """Choice of the layout of a model. All ranks choose the same layout, whatever their rows are.

    Under ZeRO-3 and FSDP a model call is a collective, so the ranks take each decision together.
    """

    accelerator: Accelerator
    args: FilledConfig
    run: Callable[[ModelCall, nn.Module, bool], PerToken]
    """Function of a model call, a model and `compute_entropy` to log-probabilities and entropies, each (B, T)."""
    attention: AttentionSwitch
    segmented: SegmentedModels
    rules: LayoutRules
    announcer: Announcer = field(default_factory=lambda: Announcer(logger.warning))

    def choose(
        self, model: nn.Module, bare: nn.Module, rows: Rows, wanted: Layout, *, in_columns: bool = True
    ) -> Layout | None:
        """Return the most preferred exact layout up to `wanted`, or None if no rank has a label to compare.

        Args:
            model: model that training calls.
            bare: the model inside accelerate's wrappers.
            rows: first rows that the model computes.
            wanted: most preferred layout allowed.
            in_columns: False if the layout must not be `SHARED_PADDED`, because other adapters use trimmed rows.
        """
        layout, reason = self.rules.allowed(bare, wanted, sharding_of(bare))  # check 1
        if layout is not Layout.PADDED:
            if not self._any_rank(bool(rows.host.labels.any())):
                return None
            # TRL's annotation leaves out models with an adapter.
            policy, kwargs = cast(PreTrainedModel, bare), self.args.gradient_checkpointing_kwargs
            with eval_no_grad(bare), disable_gradient_checkpointing(policy, kwargs):
                layout, doubt = self._verified(model, bare, rows, layout, in_columns)
                windowed = attention_window(text_config(bare)) is not None
                if layout is Layout.PACKED and windowed and not is_sharded(bare):
                    # Rows that leave the window can't be packed, but may share their prompts.
                    _, doubt_of_shared = self._verified(model, bare, rows, Layout.SHARED, in_columns=False)
                    self.segmented.of(bare).shared.record(doubt_of_shared)
            reason = doubt or reason
        self.attention.restore(bare)
        if layout < wanted:
            self._warn_once(f"micro-batches are {layout.described}, not {wanted.described}: {reason}")
        return layout

    def _verified(self, model: nn.Module, bare: nn.Module, rows: Rows, most: Layout, in_columns: bool) -> Choice:
        """Return the most preferred layout up to `most` that passes the checks 2 and 3."""
        in_columns, reason = in_columns and not self.rules.unshared(bare), ""
        while True:
            found, doubt = self._compare_first_rows(model, bare, rows, most, in_columns)
            reason = reason or doubt
            if found is Layout.PADDED:
                return found, reason
            layout, doubt = self._compare_short_rows(model, bare, rows, found, in_columns)
            reason = doubt or reason
            # Check 3 has compared trimmed rows in any case, and check 2 as well.
            if layout in (found, Layout.PADDED, Layout.TRIMMED):
                return layout, reason
            most = layout

    def exceeds_kept_scores(self, model: nn.Module, width: int) -> bool:
        """Return True if attention keeps fewer scores than the rows of any rank have columns, which are TRL's."""
        name, number = kept_scores(text_config(model))
        if math.isinf(number) or not self._any_rank(width > number):
            return False
        self._warn_once(
            f"micro-batches of rows of more than {number:,} tokens are padded: attention keeps the `{name}` highest "
            "scores, and padding decides between equal ones"
        )
        return True

    def fits(self, model: nn.Module, rows: HostRows) -> np.ndarray:
        """Return which rows can be packed, (B,) bool: those without mask holes, inside the attention window."""
        mask = rows.completion_mask
        fits = np.logical_not(np.any(mask[:, 1:] > mask[:, :-1], axis=1))  # True after False ends a hole
        if not fits.all():
            self._warn_once("rows whose completion mask has holes are not packed")
        window = attention_window(text_config(model))
        if window is not None:
            # The spans know no window, so in longer rows a token would attend to keys outside of it.
            inside = rows.mask.sum(1) <= window
            if not inside.all():
                self._warn_once(f"rows of more than {window} tokens, the model's attention window, are not packed")
            fits = fits & inside
        return fits

    # ---- Check 2: the first micro-batch

    def _compare_first_rows(
        self, model: nn.Module, bare: nn.Module, rows: Rows, wanted: Layout, in_columns: bool
    ) -> Choice:
        """Return the most preferred layout up to `wanted` that agrees with padded rows on every rank.

        Four rows at their full lengths are compared: in TRL's layout, a large micro-batch may have no room in memory.
        """
        usable = rows.host.labels > 0
        if wanted is Layout.PACKED and (fits := usable & self.fits(bare, rows.host)).any():
            usable = fits
        rows = layout_trial.sample(rows, np.flatnonzero(usable))
        in_columns = in_columns and wanted is not Layout.TRIMMED
        is_float32 = self._computes_in_float32(bare)
        trial = Trial(rows, model, bare, is_float32, "the first micro-batch", in_columns=in_columns)
        padded = trial.padded()
        # Positions from the attention mask hide a dependence on padding, a table of positions does not: without room
        # for padding, agreement says nothing about such a model.
        if self._any_rank(padded.rows is rows and learns_positions(base_model(bare))):
            doubt = "its positions are learned, and the rows leave no room to check whether padding matters"
            return self._in_columns(trial, doubt)
        return self._best(trial, wanted, self._observed(trial, padded))

    # ---- Check 3: a few short rows, in training mode, with gradients

    def _compare_short_rows(
        self, model: nn.Module, bare: nn.Module, rows: Rows, found: Layout, in_columns: bool
    ) -> Choice:
        """Return the most preferred layout up to `found` that agrees with padded rows on a few short rows."""
        sharded, device = is_sharded(bare), self.accelerator.device
        widen = False
        if sharded:
            self._warn_once("under ZeRO-3 and FSDP layouts are compared by their log-probabilities, not by gradients")
        else:
            widen = not self._any_rank(not layout_trial.fits_in_float32(bare, device))
            if not widen:
                self._warn_once(
                    "layouts are compared in 16-bit precision: the weights are quantized, or have no room in float32"
                )
        usable = rows.host.labels > 0
        if found is Layout.PACKED:
            usable &= self.fits(bare, rows.host)
        short = layout_trial.sample(rows, np.flatnonzero(usable), layout_trial.SAMPLE_TOKENS)
        if found in (Layout.SHARED, Layout.SHARED_PADDED):
            lengths = layout_trial.sample_lengths(text_config(bare), rows, self.args.max_completion_length or 0)
            short = layout_trial.with_edges(short, *lengths)
        is_float32 = widen or self._computes_in_float32(bare)
        in_columns = in_columns and found is not Layout.TRIMMED
        randomness = "in training the model draws random numbers, which a shared prompt would share"
        float32 = in_float32(bare, self.accelerator) if widen else nullcontext()
        attention = self.attention.in_float32(bare) if widen else nullcontext()
        with float32, attention, layout_trial.perturbed(bare):
            # A sharded model must be called through the wrappers that gather its weights, and no rank has its full
            # gradient. Any other is called without wrappers, because DDP's would wait for a backward pass.
            called, parameters = (model, []) if sharded else (bare, layout_trial.compared(bare))
            when = " once it has trained"
            trial = Trial(short, called, bare, is_float32, "a few short rows", when, parameters, in_columns)
            with layout_trial.in_training(bare, device):
                expected = self._compute(trial, trial.padded())
                if not self._any_rank(self._is_random(trial, expected)):
                    return self._best(trial, found, expected)
            # Results with random numbers cannot be compared, so the comparison is repeated in evaluation mode. No
            # prompt of such a model is shared: its completions would share the random numbers of the prompt.
            if found is Layout.SHARED_PADDED:
                return Layout.PADDED, randomness
            layout, doubt = self._best(trial, Layout.TRIMMED, self._compute(trial, trial.padded()))
        return layout, doubt or (randomness if found.shares_prompts else "")

    def _is_random(self, trial: Trial, expected: Results) -> bool:
        """Return True if a second computation of the padded rows differs from `expected`."""
        device = self.accelerator.device
        before = layout_trial.random_state(device)
        again, _ = self._compute(replace(trial, parameters=()), trial.padded())
        gap = (again - expected[0]).abs().max()
        if trial.is_float32:
            noisy = bool(gap > REPEATED)
        else:  # two 16-bit results may differ by rounding, unless random numbers were drawn
            noisy = bool(gap > 0) and not torch.equal(before, layout_trial.random_state(device))
        return noisy or bool(_difference(trial, trial.rows, (again, expected[1]), expected))

    def _best(self, trial: Trial, most: Layout, expected: Results) -> Choice:
        """Return the most preferred layout up to `most` whose results agree with `expected` on every rank."""
        if most is Layout.SHARED_PADDED:
            return self._in_columns(trial, "")
        doubt = self._doubt(trial, ModelCall(trial.rows, Layout.TRIMMED), expected)
        if doubt:
            return self._in_columns(trial, f"the results of this model depend on padding{trial.when} ({doubt})")
        doubts = []
        if most is Layout.PACKED:
            doubt = self._doubt_of_packed(trial, expected)
            if not doubt:
                return Layout.PACKED, ""
            doubts.append(doubt)
            refused = unsupported_under_sharding(trial.bare, sharding_of(trial.bare))
            most = Layout.TRIMMED if refused else Layout.SHARED
        layout = most
        if most is Layout.SHARED:
            doubt = self._doubt_of_segments(trial, Layout.SHARED, expected)
            if doubt:
                doubts.append(f"shared prompts give other results{trial.when} ({doubt})")
                layout = Layout.TRIMMED
        if layout is Layout.TRIMMED and not is_sharded(trial.bare):
            doubt = self._doubt_of_segments(trial, Layout.TRIMMED, expected)
        self.segmented.of(trial.bare).buckets.record(doubt)
        return layout, "; ".join(doubts)

    def _in_columns(self, trial: Trial, reason: str) -> Choice:
        """Return the shared layout in TRL's columns if it agrees with TRL's rows on every rank, else the padded one."""
        if not trial.in_columns or is_sharded(trial.bare):
            return Layout.PADDED, reason
        # Padding on the right only: on the left it would change the positions. This model's positions count it.
        wide = trial.rows.widen(0, trial.room_for_padding())
        expected = self._observed(trial, ModelCall(wide, Layout.PADDED))
        doubt = self._doubt_of_segments(trial, Layout.SHARED_PADDED, expected)
        self.segmented.of(trial.bare).buckets.record(doubt)
        return (Layout.PADDED if doubt else Layout.SHARED_PADDED), reason

    def _doubt_of_packed(self, trial: Trial, expected: Results) -> str:
        """Return why packed rows can't be used, or "" if their results agree with `expected` on every rank."""
        index = np.flatnonzero(self.fits(trial.bare, trial.rows.host) & (trial.rows.host.labels > 0))
        if not self._any_rank(len(index) > 0):
            return "no row of the first micro-batch can be packed"
        rows, expected = trial.part(index, expected)
        doubt = self._doubt(trial, ModelCall(rows, Layout.PACKED), expected)
        return f"packed rows give other results{trial.when} ({doubt})" if doubt else ""

    def _doubt_of_segments(self, trial: Trial, layout: Layout, expected: Results) -> str:
        """Return how rows in many buckets differ from `expected` on any rank, or "" within the tolerances."""
        rows, expected = trial.part(np.flatnonzero(trial.rows.host.labels), expected)
        launches = math.inf if is_sharded(trial.bare) else 0.0
        return self._doubt(trial, ModelCall(rows, layout, launches), expected)

    def _doubt(self, trial: Trial, call: ModelCall, expected: Results) -> str:
        """Return how the results of a call differ from `expected` on any rank, or "" within the tolerances."""
        return FastWay(device=self.accelerator.device).check(
            lambda: _difference(trial, call.rows, self._compute(trial, call), expected),
            refusals=(SpansIgnored, NotSegmented),  # raised outside of a layer, so the ranks are still in step
            # Behind a cache that it was not written for, the code of a model may fail in any way.
            failures=(Exception,) if _has_segments(call) else (),
        )

    def _observed(self, trial: Trial, call: ModelCall) -> Results:
        """Compute a call of TRL's layout, and learn from it how the model runs its decoder layers."""
        with self.segmented.of(trial.bare).observed():
            return self._compute(trial, call)

    def _compute(self, trial: Trial, call: ModelCall) -> Results:
        """Return the log-probabilities, (B, T), and gradients of a model call."""
        # Checkpointing runs a layer, and with it the cache of its prompts, a second time.
        checkpoints = self.args.gradient_checkpointing and bool(trial.parameters) and _has_segments(call)
        options = self.args.gradient_checkpointing_kwargs
        policy = cast(PreTrainedModel, trial.bare)
        reentrant = checkpoints and bool((options or {}).get("use_reentrant", False))
        own = without_gradients(trial.bare) if reentrant else nullcontext()
        with torch.set_grad_enabled(bool(trial.parameters)), own:
            if checkpoints:
                policy.gradient_checkpointing_enable(options)
            try:
                log_probs = self.run(call, trial.model, False)[0][:, : trial.rows.logits_to_keep]
                return log_probs.detach(), gradients(log_probs, trial.parameters, reentrant=reentrant)
            finally:
                if checkpoints:
                    policy.gradient_checkpointing_disable()

    # ---- What the checks share

    def _computes_in_float32(self, bare: nn.Module) -> bool:
        return self.accelerator.mixed_precision == "no" and computes_in_float32(bare, self.accelerator.device)

    def _any_rank(self, flag: bool) -> bool:
        return on_any_rank(flag, self.accelerator.device)

    def _warn_once(self, sentence: str) -> None:
        self.announcer.once(sentence)


def _has_segments(call: ModelCall) -> bool:
    """Return True if the rows of a call may run in several segments."""
    return call.layout in (Layout.SHARED, Layout.SHARED_PADDED) or (
        call.layout is Layout.TRIMMED and call.launches < math.inf
    )


def _difference(trial: Trial, rows: Rows, got: Results, expected: Results) -> str:
    """Return how two results for `rows` differ, or "" within the tolerances."""
    gap = (got[0] - expected[0]).abs()[rows.completion_mask.bool()].float()
    if gap.numel():
        mean, largest = float(gap.mean()), float(gap.max())
        doubt = disagreement(mean, largest, is_float32=trial.is_float32, where=trial.where)
        if doubt:
            return f"log-probabilities {doubt}"
    return gradient_disagreement(got[1], expected[1], is_float32=trial.is_float32)
