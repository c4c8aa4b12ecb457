"""A YAML recipe and `accelerate launch` become a GRPO fine-tune: a thin layer on TRL's `GRPOTrainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_recipes.training.trainer import GRPOTrainer

__all__ = ["GRPOTrainer"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if (
        name == "GRPOTrainer"
    ):  # imported on first use: torch takes seconds, and a misspelt recipe should not wait for it
        from grpo_recipes.training.trainer import GRPOTrainer

        return GRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
