"""Layout that the micro-batches of a run are expected to get, told before the model is loaded.

Settings, configuration and modules rule layouts out, by the rules that the run applies too (`LayoutRules`). Only a
computation shows that the results of a layout are TRL's. `make models` makes it for each model type, and records the
layout of the type in `model_layouts.json`. The run repeats it for its own model before the first step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from torch import nn
from trl import GRPOConfig

from grpo_recipes.generation.models import base_model, dropout_rates, kept_scores
from grpo_recipes.recipe.recipe import Recipe
from grpo_recipes.training.full_kl import READS_PADDED_ROWS
from grpo_recipes.training.layout_rules import FSDP2, ZERO3, LayoutRules, attention_window, text_config
from grpo_recipes.training.micro_batches import asked_layout
from grpo_recipes.training.packing import Layout

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


def as_json(records: Records) -> str:
    """Return recorded layouts as the content of `RECORDED`, one line for each layout."""
    lines = []
    for layout in sorted(Layout, reverse=True):
        kinds = sorted(kind for kind, recorded in records.layouts.items() if recorded is layout)
        lines.append(f'    "{layout.name.lower()}": {json.dumps(kinds)}')
    head = f'{{\n  "transformers": "{records.transformers}",\n  "layouts": {{\n'
    return head + ",\n".join(lines) + "\n  }\n}\n"


@dataclass(frozen=True)
class ExpectedLayout:
    """Layout that a run is expected to get.

    Attributes:
        model_type: Model type, as its configuration names it.
        layout: The layout, or None for a type whose layout is not recorded.
        reason: Reason for which no more preferred layout is expected, or "".
    """

    model_type: str
    layout: Layout | None
    reason: str

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
        return {
            "name": None if self.layout is None else self.layout.name.lower(),
            "model_type": self.model_type,
            "reason": self.reason,
        }


def expected_layout(recipe: Recipe, config: GRPOConfig, model: nn.Module, sharding: str, tokens: int) -> ExpectedLayout:
    """Return the layout that a run is expected to get.

    Args:
        recipe: Recipe of the run.
        config: TRL's training arguments of the run.
        model: Policy on the meta device, with its adapter, with the dropout of the run.
        sharding: Name of what is split over GPUs (`memory.Sharding`).
        tokens: Tokens of the longest prompt and completion together.
    """
    because = READS_PADDED_ROWS if recipe.kl_estimator == "full" else ""
    rules = LayoutRules(config, has_router_loss(config, model), because)
    split = sharding if sharding in (ZERO3, FSDP2) else ""
    kind = cast(str, base_model(model).config.model_type)
    return ExpectedLayout(kind, *_decide(model, rules, asked_layout(recipe.micro_batching), split, tokens))


def _decide(
    model: nn.Module, rules: LayoutRules, wanted: Layout, sharding: str, tokens: int
) -> tuple[Layout | None, str]:
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
        shares = wanted >= Layout.SHARED and not rules.unshared(model) and not sharding
        return (record if shares else Layout.PADDED), "its results depend on padding"
    if record < layout:
        layout, reason = record, "its results with shared prompts are not TRL's"
    window = attention_window(text)
    if layout is Layout.PACKED and window is not None and tokens > window:
        reason = f"rows of more than {window:,} tokens leave the model's attention window"
        return (Layout.TRIMMED if sharding else Layout.SHARED), reason
    return layout, reason


def has_router_loss(config: Any, model: nn.Module) -> bool:
    """Return True if TRL adds the auxiliary loss of a mixture of experts (`GRPOTrainer.aux_loss_enabled`).

    Args:
        config: Object with the attributes of `GRPOConfig`.
        model: Policy.
    """
    text, coefficient = text_config(model), config.router_aux_loss_coef
    if coefficient is None:
        coefficient = getattr(text, "router_aux_loss_coef", 0.0)
    return hasattr(text, "output_router_logits") and coefficient != 0.0


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set all rates of dropout to 0 inside this block."""
    rates = [(module, name, vars(module)[name]) for _, module, name in dropout_rates(model)]
    for module, name, _ in rates:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, rate in rates:
            setattr(module, name, rate)
