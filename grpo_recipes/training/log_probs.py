"""Per-token log-probabilities in the cheapest layout that is exact for the model: packed, shared, trimmed or padded.

`LogProbs` computes them. `layout_check` decides which layout is exact. The result is always in TRL's layout, (B, T).
See docs/efficiency.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import pad

from grpo_recipes.generation.rows import HostRows, PerToken, Rows, on_device
from grpo_recipes.training.adapters import adapter_state
from grpo_recipes.training.buckets import Laid, arrange, launch_tokens, lay_out
from grpo_recipes.training.layout_check import LayoutCheck
from grpo_recipes.training.layout_rules import LayoutRules, is_sharded, text_config
from grpo_recipes.training.packed_attention import AttentionSwitch, GroupSpans
from grpo_recipes.training.packing import Layout, ModelCall, PackedRow, SpansIgnored, order, pack
from grpo_recipes.training.segments import SegmentedModels
from grpo_recipes.training.step_plan import MicroBatchPlan, decide
from grpo_recipes.training.varlen import VarlenKernel

if TYPE_CHECKING:
    from grpo_recipes.generation.models import FilledConfig


@dataclass
class LogProbs:
    """Per-token log-probabilities and entropies of a trainer's models."""

    accelerator: Accelerator
    args: FilledConfig
    stock: Callable[[nn.Module, Rows, bool], PerToken]
    """TRL's own computation: (model, rows, compute_entropy) -> (log-probabilities, entropies), each (B, T)."""
    wanted: Layout
    """Most preferred layout that the user allows."""
    router_loss: bool = False
    """True if the loss has the auxiliary loss of a mixture of experts."""
    padded_because: str = ""
    """Reason for which rows must stay padded, because something else reads them in the forward, or ""."""
    _layouts: WeakKeyDictionary[nn.Module, Layout] = field(default_factory=WeakKeyDictionary)
    _checked: WeakKeyDictionary[nn.Module, set[tuple[str, ...]]] = field(default_factory=WeakKeyDictionary)
    """Active adapters with which the layout of a model was verified."""
    _sharded: WeakKeyDictionary[nn.Module, bool] = field(default_factory=WeakKeyDictionary)
    _bare: WeakKeyDictionary[nn.Module, ReferenceType[nn.Module]] = field(default_factory=WeakKeyDictionary)
    """Weak references, because an unwrapped model is its own value, and a strong one would keep its key alive."""

    def __post_init__(self) -> None:
        self.launches = launch_tokens(self.accelerator.device)
        self._attention, self._segmented = AttentionSwitch(), SegmentedModels()
        rules = LayoutRules(self.args, self.router_loss, self.padded_because)
        self._check = LayoutCheck(self.accelerator, self.args, self._run_trial, self._attention, self._segmented, rules)
        self._kernel = VarlenKernel(self._check.announcer.once)

    def __call__(
        self, model: nn.Module, rows: Rows, batch_size: int | None, compute_entropy: bool, plan: MicroBatchPlan | None
    ) -> PerToken:
        """Return the log-probabilities and entropies of `rows`, in ceil(B / batch_size) model calls on every rank.

        Args:
            model: policy or reference, inside accelerate's wrappers.
            rows: B rows.
            batch_size: largest number of rows per model call, or None for one call.
            compute_entropy: True to compute entropies as well.
            plan: plan of a micro-batch with these rows, or None to decide on each call here.

        Returns:
            Log-probabilities, and entropies or None, each (B, T), 0 where there is no label.
        """
        if plan is not None:
            rows, bare = rows.with_host(plan.rows), self.bare(model)
            if plan.model is bare and self._is_verified(bare):
                return self._run(model, rows, plan, compute_entropy)
        size = len(rows.input_ids)
        chunk = batch_size or size
        layout = self.layout(model, rows, chunk)
        sequence = None
        if layout is not Layout.PADDED and size > chunk:
            sequence = order(rows.host, layout)
        parts = []
        for start in range(0, size, chunk):
            part = slice(start, start + chunk)
            some = rows.select(part if sequence is None else sequence[part])
            # The padded layout needs no copy of the rows on the host.
            decided = None if layout is Layout.PADDED else self.plan(model, some.host, layout)
            parts.append(self._run(model, some, decided, compute_entropy))
        log_probs, entropies = zip(*parts, strict=True)
        # The loss multiplies by advantages and masks in the order of the rows given.
        back = slice(None) if sequence is None else on_device(np.argsort(sequence), rows.input_ids.device)
        return torch.cat(log_probs)[back], torch.cat(entropies)[back] if compute_entropy else None

    def layout(self, model: nn.Module, rows: Rows, chunk: int) -> Layout:
        """Return the layout of a model, the same on all ranks, chosen on the first `chunk` rows that it computes."""
        bare = self.bare(model)
        if self._check.exceeds_kept_scores(bare, rows.input_ids.size(1)):
            return Layout.PADDED  # for this generation batch only
        if not self._is_verified(bare):
            # All adapters of a model must agree on one layout.
            checked, wanted = self._checked.setdefault(bare, set()), self._layouts.get(bare, self.wanted)
            chosen = self._check.choose(model, bare, rows.select(slice(chunk)), wanted, in_columns=not checked)
            if chosen is None:
                return Layout.PADDED  # for these rows only: without a label there was nothing to compare
            checked.add(adapter_state(bare))
            self._layouts[bare] = chosen
        return self._layouts[bare]

    def _is_verified(self, bare: nn.Module) -> bool:
        """Return True if the layout of a model was verified with the adapters that are active now."""
        # A different active adapter changes the function: a reference is often scored by the policy's model with its
        # adapter switched off.
        return adapter_state(bare) in self._checked.get(bare, ())

    def plan(self, model: nn.Module, rows: HostRows, layout: Layout) -> MicroBatchPlan:
        """Return the plan of a call of `model` with `rows`, where `layout` is the layout of the model."""
        bare = self.bare(model)
        # Cached: it reads all parameters, and they are sharded before the first call.
        if bare not in self._sharded:
            self._sharded[bare] = is_sharded(bare)
        segmented, launches = self._segmented.of(bare), self.launches
        # Each segment gathers the embedding's weights under ZeRO-3, which ranks must do equally often.
        if self._sharded[bare] or not segmented.buckets.is_verified:
            launches = math.inf
        decided = decide(rows, layout, launches, partial(self._check.fits, bare), segmented.shared.is_verified)
        return replace(decided, model=bare if self._is_verified(bare) else None)

    def restore_attention(self, model: nn.Module) -> None:
        """Give the model the attention implementation that the user set, which packed rows replace."""
        self._attention.restore(self.bare(model))

    def bare(self, model: nn.Module) -> nn.Module:
        """Return the model inside accelerate's wrappers."""
        # Cached: unwrapping takes 0.7 ms, and a step unwraps many times.
        known = self._bare.get(model)
        found = known() if known is not None else None
        if found is None:
            found = self.accelerator.unwrap_model(model)
            self._bare[model] = ref(found)
        return found

    def _run_trial(self, call: ModelCall, model: nn.Module, compute_entropy: bool) -> PerToken:
        """Make a model call whose results are compared with those of another layout."""
        if call.layout is Layout.PADDED:
            return self._run(model, call.rows, None, compute_entropy)
        buckets = None if call.layout is Layout.PACKED else arrange(call.rows.host, call.layout, call.launches)
        return self._run(model, call.rows, MicroBatchPlan(call.rows.host, call.layout, buckets), compute_entropy)

    def _run(self, model: nn.Module, rows: Rows, plan: MicroBatchPlan | None, compute_entropy: bool) -> PerToken:
        """Compute rows by their plan, or in the padded layout without one, and return results (B, T)."""
        if plan is not None and plan.layout is Layout.PACKED:
            self._attention.pack(self.bare(model))
            return self._run_packed(model, pack(rows), rows, compute_entropy)
        self.restore_attention(model)
        if plan is None or plan.arrangement is None:
            return self.stock(model, rows, compute_entropy)
        if plan.arrangement.segments > 1:
            laid = lay_out(plan.arrangement, rows.input_ids.device)
            return self._run_segments(model, laid, rows, compute_entropy)
        trimmed, index = rows.trimmed()
        log_probs, entropies = self.stock(model, trimmed, compute_entropy)
        back = partial(_untrimmed, rows=rows, index=index)
        return back(log_probs), back(entropies) if entropies is not None else None

    def _run_segments(self, model: nn.Module, laid: Laid, rows: Rows, compute_entropy: bool) -> PerToken:
        # The arguments of a segment replace these ids and this mask, which wrappers of the model may look at.
        first = laid.segments.in_order()[0]
        with self.accelerator.autocast(), self._segmented.of(self.bare(model)).taking_segments():
            outputs = model(
                input_ids=first.input_ids,
                attention_mask=first.attention_mask,
                shift_labels=laid.labels,
                fused_lm_head=True,
                segments=laid.segments,
            )
        return _in_rows(outputs, laid, rows, compute_entropy)

    def _run_packed(self, model: nn.Module, packed: PackedRow, rows: Rows, compute_entropy: bool) -> PerToken:
        bare = self.bare(model)
        spans = GroupSpans(packed.groups, self._kernel, recomputed=self.args.gradient_checkpointing)
        with self.accelerator.autocast():
            outputs = model(
                input_ids=packed.input_ids,
                position_ids=packed.position_ids,
                # All ones. Without a mask, transformers would read position ids that restart as several sequences.
                attention_mask=torch.ones_like(packed.input_ids),
                shift_labels=packed.labels,
                fused_lm_head=True,
                group_spans=spans,
            )
        layers, attended = text_config(bare).num_hidden_layers, spans.attended
        # Checked in each forward: a layer that ignores the spans gives wrong log-probabilities without any other sign.
        if attended != layers:
            raise SpansIgnored(f"{attended} of its {layers} layers keep the completions of a packed row apart")
        return _in_rows(outputs, packed, rows, compute_entropy, packed.positions)


def _in_rows(
    outputs: Any, labels: Laid | PackedRow, rows: Rows, compute_entropy: bool, positions: Tensor | slice = slice(None)
) -> PerToken:
    """Return the results of a model call in TRL's layout, each (B, T), 0 where there is no label.

    Args:
        outputs: outputs of the model, log-probabilities and entropies (1, N).
        labels: rows and columns of the n labels.
        rows: B rows in TRL's layout.
        compute_entropy: True to return entropies as well.
        positions: place of each label among the N outputs. By default the outputs are those of the labels.
    """

    def spread(values: Tensor) -> Tensor:
        shape = (len(rows.input_ids), rows.logits_to_keep)
        return values.new_zeros(shape).index_put((labels.rows, labels.columns), values[0, positions])

    return spread(outputs.log_probs), spread(outputs.entropy) if compute_entropy else None


def _untrimmed(values: Tensor, rows: Rows, index: np.ndarray) -> Tensor:
    """Return the values of trimmed rows, (rows, width), in TRL's layout, (B, T), 0 where nothing was computed."""
    wide, size = pad(values, (0, rows.logits_to_keep - values.size(1))), len(rows.input_ids)
    if len(index) == size:
        return wide
    return wide.new_zeros(size, wide.size(1)).index_copy(0, on_device(index, wide.device), wide)
