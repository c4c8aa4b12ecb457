"""Plans are made without the hub."""

import pytest

from grpo_recipes.data import hub


@pytest.fixture(autouse=True)
def without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "hub_answers", lambda: False)
    monkeypatch.setattr("grpo_recipes.plan.model_shape.hub_answers", lambda: False)
