"""Layout of each model type of transformers, as `make models` has found it by computing with a tiny model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from grpo_recipes.training.packing import Layout

RECORDED = Path(__file__).with_name("model_layouts.json")
"""File with the layout of each model type, written by `make models`."""


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
