"""Policies of evaluations that complete prompts by a function, in place of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_recipes.evaluation.evaluate import evaluate_into
from grpo_recipes.evaluation.policy import Completions
from grpo_recipes.evaluation.settings import Settings

Complete = Callable[[list[Any], Settings], list[str]]


class FunctionPolicy:
    """Policy that completes prompts by a function."""

    def __init__(self, complete: Complete, record: Callable[[Settings], dict[str, Any]] = lambda settings: {}) -> None:
        self._complete, self.record = complete, record

    def complete(self, rows: Sequence[Mapping[str, Any]], settings: Settings) -> Completions:
        """Return the texts of the function."""
        prompts = [row["prompt"] for row in rows]
        texts = self._complete(prompts, settings)
        return Completions(prompts, texts, texts)


def evaluate_by(folder: Path, complete: Complete, *given: Any, **options: Any) -> dict[str, Any]:
    """Evaluate a function into a folder. Further arguments are those of `evaluate_into`."""
    return evaluate_into(folder, FunctionPolicy(complete), *given, **options)
