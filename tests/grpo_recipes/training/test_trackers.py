"""Trackers show TRL's metrics, the run's name and the resolved recipe."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers.integrations import integration_utils

from grpo_recipes import Recipe, run_recipe
from grpo_recipes.training.callbacks import RecipeInTrackers
from tests.support.launching import write_recipe


def length(completions: list[Any], **columns: Any) -> list[float]:
    """Return rewards that differ inside a group."""
    return [float(len(str(completion)) % 7) for completion in completions]


@pytest.mark.slow
def test_tensorboard(tiny_model: Path, gsm8k_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard, which the extra `dev` brings")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("HF_TOKEN", "")  # where the run puts the recipe's token
    output = tmp_path / "first-try"
    rewards = ["gsm8k_correctness", {"name": f"{__name__}.length", "weight": 0.5}]
    changes = {"rewards": rewards, "beta": 0.04, "max_steps": 2, "save_strategy": "no", "save_steps": None}
    changes |= {"report_to": "tensorboard", "hub_token": "hf_" + "a" * 30}
    file = write_recipe(tmp_path / "recipe.yaml", tiny_model, gsm8k_file, output, **changes)
    assert run_recipe(Recipe.load(file)) == 0

    (events,) = output.rglob("events.out.tfevents.*")
    shown = EventAccumulator(str(events.parent)).Reload()
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    for name in ("reward", "rewards/length/mean", "kl", "entropy", "completions/mean_length", "efficiency/padding"):
        logged = [entry[name] for entry in history if name in entry]
        assert [scalar.value for scalar in shown.Scalars(f"train/{name}")] == pytest.approx(logged)
        assert len(logged) == 2
    assert text(shown, "args")["run_name"] == "first-try"
    recipe = text(shown, "recipe")
    assert recipe["rewards"][1]["weight"] == 0.5
    assert recipe["dataset"]["name"] == "gsm8k"
    assert recipe["temperature"] == 1.0, "TRL's default, as resolved"
    assert "aaaa" not in str(recipe) + str(text(shown, "args"))


def text(shown: Any, tag: str) -> dict[str, Any]:
    """Parse a text of the run, which is YAML or JSON."""
    (event,) = shown.Tensors(f"{tag}/text_summary")
    return yaml.safe_load(event.tensor_proto.string_val[0].decode())


class Configuration(dict):
    """Stub of wandb's configuration: an existing value changes only if that is allowed."""

    def update(self, values: dict[str, Any], allow_val_change: bool = False) -> None:  # type: ignore[override]
        changed = [key for key, value in values.items() if key in self and self[key] != value]
        assert allow_val_change or not changed, f"wandb.errors.ConfigError: {changed}"
        super().update(values)


@pytest.mark.parametrize(("tracker", "attribute"), [("WandbCallback", "_wandb"), ("TrackioCallback", "_trackio")])
@pytest.mark.parametrize("first", [True, False])
def test_the_recipe_is_in_the_configuration_of_the_run(tracker: str, attribute: str, first: bool) -> None:
    config = Configuration(learning_rate=1e-6)
    module = SimpleNamespace(run=object(), config=config)
    handler = SimpleNamespace(callbacks=[object(), type(tracker, (), {attribute: module})()])
    for recipe in ({"beta": 0.0}, {"beta": 0.04}):  # two trainings of one run
        shown = RecipeInTrackers(recipe, handler)  # type: ignore[arg-type]
        shown.on_train_begin(None, SimpleNamespace(is_world_process_zero=first), None)  # type: ignore[arg-type]
    assert config == ({"learning_rate": 1e-6, "recipe": {"beta": 0.04}} if first else {"learning_rate": 1e-6})


@pytest.mark.parametrize(
    ("tracker", "attribute"),
    [
        ("TensorBoardCallback", "self.tb_writer"),
        ("WandbCallback", "self._wandb"),
        ("TrackioCallback", "self._trackio"),
    ],
)
def test_contract_with_transformers_on_trackers(tracker: str, attribute: str) -> None:
    assert f"{attribute} = " in inspect.getsource(getattr(integration_utils, tracker).__init__)
