"""GRPO training from a recipe: a thin layer on TRL's `GRPOTrainer`, and a workbench around it.

The layer (`grpo_recipes.training`) is `GRPOTrainer`, a drop-in for TRL's trainer of the same name. The workbench checks
and plans a recipe, a YAML file, before it is trained, and evaluates and reports the run afterwards.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_recipes.evaluation.evaluate import evaluate_model
    from grpo_recipes.recipe.recipe import Recipe
    from grpo_recipes.run.train import run_recipe
    from grpo_recipes.tools import ToolError
    from grpo_recipes.training.reference import set_reference
    from grpo_recipes.training.trainer import GRPOTrainer

__all__ = ["GRPOTrainer", "Recipe", "ToolError", "evaluate_model", "run_recipe", "set_reference"]
__version__ = "0.1.0"

_MODULES = {
    "GRPOTrainer": "grpo_recipes.training.trainer",
    "Recipe": "grpo_recipes.recipe.recipe",
    "ToolError": "grpo_recipes.tools",
    "evaluate_model": "grpo_recipes.evaluation.evaluate",
    "run_recipe": "grpo_recipes.run.train",
    "set_reference": "grpo_recipes.training.reference",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because torch takes seconds and a misspelt recipe should fail before that."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
