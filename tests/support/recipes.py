"""Small recipes on a model that is not on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.recipe.recipe import Recipe, parse_recipe

MINIMAL: dict[str, Any] = {
    "model_name_or_path": "nowhere/model",
    "dataset": {"name": "arithmetic", "size": 64},
    "rewards": ["gsm8k_correctness"],
}


def read_recipe(folder: Path, *arguments: str, **keys: Any) -> Recipe:
    """Write `MINIMAL` with some keys (`...` removes one) to `mine.yaml`, and read it after some arguments."""
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in {**MINIMAL, **keys}.items() if value is not ...}))
    return parse_recipe(["--config", str(path), *arguments])
