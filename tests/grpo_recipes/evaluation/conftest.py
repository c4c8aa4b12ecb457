"""The seam of all evaluations: what completes prompts in place of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from grpo_recipes.evaluation import policy
from grpo_recipes.evaluation.settings import Settings
from tests.support.policies import Complete


class Function:
    """Engine that completes prompts by a function."""

    positions = float("inf")

    def __init__(self, complete: Complete) -> None:
        self.complete = complete

    def __call__(self, prompts: list[Any], settings: Settings) -> list[str]:
        return self.complete(prompts, settings)

    def sampling(self, settings: Settings) -> dict[str, Any]:
        return {}


@pytest.fixture
def generating(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Return a function that lets evaluations generate with an engine or a function in place of the model's engine."""

    def use(engine: Any) -> None:
        loaded = engine if hasattr(engine, "sampling") else Function(engine)
        monkeypatch.setattr(policy, "load_engine", lambda *_: loaded)

    return use
