"""Facts about the micro-batches of a run that are known before its model is loaded: all that `plan` asks of training.

Settings, configuration and modules rule layouts out, by the rules that the run applies too (`LayoutRules`). Only a
computation shows that the results of a layout are TRL's. `make models` makes it for each model type, and records the
layout of the type (`model_layouts.json`). The run repeats it for its own model before the first step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from torch import nn
from trl import GRPOConfig

from grpo_recipes.generation.models import base_model, kept_scores
from grpo_recipes.recipe.specs import MicroBatching
from grpo_recipes.training.activations import Activations, Measured, MicroBatchShape, NotMeasured
from grpo_recipes.training.full_kl import READS_PADDED_ROWS
from grpo_recipes.training.layout_rules import FSDP2, ZERO3, Choice, LayoutRules, attention_window, text_config
from grpo_recipes.training.layout_trial import COMPARED_ROWS, EXTRA_PADDING
from grpo_recipes.training.micro_batches import asked_layout
from grpo_recipes.training.packing import Layout
from grpo_recipes.training.step_plan import MAX_PACKED_SHARE

__all__ = ["LayoutFacts", "MicroBatchShape", "NotMeasured", "describe"]

RECORDED = Path(__file__).with_name("model_layouts.json")
"""File with the layout of each model type, written by `make models`."""

_RUNS = {
    Layout.PACKED: "one row without padding, with each prompt once",
    Layout.SHARED: "each prompt once, and its completions behind a cache of it in buckets of similar length",
    Layout.TRIMMED: "rows with their own prompts, in buckets of similar length",
    Layout.SHARED_PADDED: "each prompt once with TRL's padding, and its completions behind a cache of it in buckets",
    Layout.PADDED: "TRL's rows",
}


@dataclass(frozen=True)
class Records:
    """Layouts recorded by `make models`.

    Attributes:
        transformers: Version of transformers that made the results.
        layouts: Layout by model type.
    """

    transformers: str
    layouts: Mapping[str, Layout]


@cache
def recorded() -> Records:
    """Return the recorded layouts."""
    content = json.loads(RECORDED.read_text(encoding="utf-8"))
    layouts = {kind: Layout[name.upper()] for name, kinds in content["layouts"].items() for kind in kinds}
    return Records(content["transformers"], layouts)


@dataclass(frozen=True)
class LayoutFacts:
    """Layout that the micro-batches of a run are expected to get, and the memory that they take in it.

    Attributes:
        model_type: Model type, as its configuration names it.
        layout: The layout, or None for a type whose layout is not recorded.
        reason: Reason for which no more preferred layout is expected, or "".
        activations: Measurement of the memory of a micro-batch.
    """

    model_type: str
    layout: Layout | None
    reason: str
    activations: Activations

    def describe(self) -> str:
        """Return the layout as one sentence."""
        if self.layout is None:
            return f"unknown: {self.reason}; tokens and memory are those of TRL's rows"
        because = f": {self.reason}" if self.reason else ""
        return f"{self.layout.described} ({_RUNS[self.layout]}){because}"

    def notes(self) -> list[str]:
        """Return a note on the source of the layout, unless it is TRL's."""
        if self.layout in (None, Layout.PADDED):
            return []
        return [
            f"the layout is the one recorded for {self.model_type} with transformers {recorded().transformers}; the "
            "run verifies it before its first step, and a warning names the layout if it is another one"
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the entry for `plan --json`."""
        name = None if self.layout is None else self.layout.name.lower()
        return {"name": name, "model_type": self.model_type, "reason": self.reason}

    def arranged(self, batch: MicroBatchShape, group: int) -> MicroBatchShape:
        """Return a micro-batch in the expected layout, or in TRL's where the layout is unknown or saves nothing.

        Args:
            batch: Micro-batch in TRL's layout, of rows that may move between micro-batches.
            group: Number of completions of a prompt.
        """
        if self.layout is None or not self.layout.shares_prompts:
            return batch
        # Rows are sorted by prompt, and each micro-batch takes the next ones. It may begin and end inside a group.
        prompts = math.ceil((batch.rows - math.gcd(batch.rows, group)) / group) + 1
        shared = replace(batch, prompts=prompts, layout=self.layout)
        # Training packs no row that is hardly shorter for it.
        return shared if shared.tokens <= MAX_PACKED_SHARE * batch.tokens else batch

    def compared(self, batch: MicroBatchShape) -> MicroBatchShape:
        """Return the forward pass of padded rows with which the run compares the layout of its first micro-batch."""
        return batch.forward(min(batch.rows, COMPARED_ROWS), batch.prompt + 2 * EXTRA_PADDING, batch.completion)

    def measure(self, batch: MicroBatchShape) -> Measured:
        """Return the bytes of a micro-batch.

        Raises:
            NotMeasured: The model can't run on tensors without data.
        """
        return self.activations.measure(batch)


def describe(
    config: GRPOConfig,
    model: nn.Module,
    tokens: int,
    micro_batching: MicroBatching,
    *,
    full_kl: bool = False,
    sharding: str = "none",
) -> LayoutFacts:
    """Return the layout that a run is expected to get.

    Args:
        config: TRL's training arguments of the run.
        model: Policy on the meta device, with its adapter.
        tokens: Tokens of the longest prompt and completion together.
        micro_batching: Settings of the micro-batches.
        full_kl: True if the KL term is that over the vocabulary.
        sharding: Name of what is split over GPUs: `none`, `zero2`, `zero3` or `fsdp2`.
    """
    because = READS_PADDED_ROWS if full_kl else ""
    # Dropout that the run switches off still counts in its memory, as an upper limit.
    rules = LayoutRules(config, has_router_loss(config, model), because, dropout_ends=config.disable_dropout)
    split = sharding if sharding in (ZERO3, FSDP2) else ""
    kind = cast(str, base_model(model).config.model_type)
    layout, reason = _expected(model, rules, asked_layout(micro_batching), split, tokens)
    return LayoutFacts(kind, layout, reason, Activations(model))


def _expected(
    model: nn.Module, rules: LayoutRules, wanted: Layout, sharding: str, tokens: int
) -> Choice | tuple[None, str]:
    """Return the expected layout, or None if none is recorded, and the reason why no faster one is expected."""
    text, kind = text_config(model), base_model(model).config.model_type
    layout, reason = rules.allowed(model, wanted, sharding)
    name, scores = kept_scores(text)
    if layout is Layout.PADDED:
        return layout, reason
    if tokens > scores:
        return Layout.PADDED, f"attention keeps the `{name}` {scores:,} highest scores of up to {tokens:,}"
    record = recorded().layouts.get(kind)
    if record is None:
        return None, f"the layout of {kind} is not recorded"
    if record in (Layout.PADDED, Layout.SHARED_PADDED):
        return min(record, rules.in_columns(model, wanted, sharding)), "its results depend on padding"
    if record < layout:
        layout, reason = record, "its results with shared prompts are not TRL's"
    window = attention_window(text)
    if layout is Layout.PACKED and window is not None and tokens > window:
        reason = f"rows of more than {window:,} tokens leave the model's attention window"
        return (Layout.TRIMMED if sharding else Layout.SHARED), reason
    return layout, reason


def has_router_loss(config: GRPOConfig, model: nn.Module) -> bool:
    """Return True if TRL adds the auxiliary loss of a mixture of experts (`GRPOTrainer.aux_loss_enabled`)."""
    text, coefficient = text_config(model), config.router_aux_loss_coef
    if coefficient is None:
        coefficient = getattr(text, "router_aux_loss_coef", 0.0)
    return hasattr(text, "output_router_logits") and coefficient != 0.0
