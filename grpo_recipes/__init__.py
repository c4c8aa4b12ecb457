"""A YAML recipe and `accelerate launch` become a GRPO fine-tune: a thin layer on TRL's `GRPOTrainer`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_recipes.evaluation.evaluate import evaluate_model
    from grpo_recipes.recipe.recipe import Recipe
    from grpo_recipes.train import run_recipe
    from grpo_recipes.training.trainer import GRPOTrainer

__all__ = ["GRPOTrainer", "Recipe", "evaluate_model", "run_recipe"]
__version__ = "0.1.0"

_HOMES = {
    "GRPOTrainer": "grpo_recipes.training.trainer",
    "Recipe": "grpo_recipes.recipe.recipe",
    "evaluate_model": "grpo_recipes.evaluation.evaluate",
    "run_recipe": "grpo_recipes.train",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:  # on first use: torch takes seconds, and a misspelt recipe should not wait for it
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
