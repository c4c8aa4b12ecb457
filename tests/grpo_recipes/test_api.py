"""A recipe from Python, without a command line: read, trained, stopped early, evaluated."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import grpo_recipes
from grpo_recipes import cli
from grpo_recipes.recipe.recipe import RecipeError
from tests.support import launching
from tests.support.errors import refused


def falls_with_every_step(completions: list, trainer_state: Any, **columns: Any) -> list[float]:
    """Return rewards whose first evaluation is the best. They differ inside a group, so that there is a gradient."""
    return [-float(trainer_state.global_step) + 0.01 * len(set(completion)) for completion in completions]


EVALUATING = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_reward",
    "early_stopping_patience": 2,
    "per_device_eval_batch_size": 4,
    "eval_on_start": False,
    "rewards": ["tests.grpo_recipes.test_api.falls_with_every_step"],
}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    policy = launching.build_policy(tmp_path / "policy")
    rows = launching.write_rows(tmp_path / "rows.jsonl", 40)
    held_out = {"dataset": {"name": "gsm8k", "path": str(rows), "prompt_format": "text", "eval_share": 0.2}}
    return launching.write_recipe(tmp_path / "r.yaml", policy, None, tmp_path / "run", **held_out)


def test_a_recipe_is_read_trained_and_evaluated(recipe: Path, tmp_path: Path) -> None:
    read = grpo_recipes.Recipe.load(recipe, max_steps=1, **{"dataset.max_prompt_tokens": 256})
    assert (read.config.max_steps, read.dataset.max_prompt_tokens) == (1, 256)
    assert grpo_recipes.run_recipe(read) == 0
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert state["global_step"] == 1
    found = grpo_recipes.evaluate_model(tmp_path / "run", limit=4, max_new_tokens=4, output=tmp_path / "e")
    assert found["problems"] == 4
    assert found == json.loads((tmp_path / "e" / "evaluation.json").read_text())


def test_a_wrong_recipe_raises(recipe: Path) -> None:
    with refused("lerning_rate", "`learning_rate`", by=RecipeError):
        grpo_recipes.Recipe.load(recipe, lerning_rate=1e-5)
    with refused("", "num_generations", by=RecipeError):
        grpo_recipes.run_recipe(grpo_recipes.Recipe.load(recipe, num_generations=7))


@pytest.mark.slow
def test_training_stops_early_and_ends_with_the_best_checkpoint(recipe: Path, tmp_path: Path) -> None:
    assert grpo_recipes.run_recipe(grpo_recipes.Recipe.load(recipe, max_steps=6, learning_rate=0.01, **EVALUATING)) == 0
    run = tmp_path / "run"
    state = json.loads((run / "trainer_state.json").read_text())
    assert state["global_step"] == 3, "the first evaluation was the best, and two more were not better"
    assert state["best_model_checkpoint"] == str(run / "checkpoint-1")
    folders = (run, run / "checkpoint-1", run / "checkpoint-3")
    final, best, last = (load_file(folder / "model.safetensors") for folder in folders)
    assert all(torch.equal(final[name], best[name]) for name in best)
    assert any(not torch.equal(final[name], last[name]) for name in last)


def test_several_held_out_sets_in_one_call(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"easy": 3, "hard": 4}
    paths = [str(launching.write_rows(tmp_path / f"{name}.jsonl", count)) for name, count in sizes.items()]
    options = ["--prompt_format", "text", "--max_new_tokens", "2", "--output", str(tmp_path / "out")]
    capsys.readouterr()
    assert cli.main(["evaluate", str(tmp_path / "policy"), *options, "--json", "--path", *paths]) == 0
    printed = json.loads(capsys.readouterr().out)
    for path, (name, count) in zip(paths, sizes.items(), strict=True):
        assert json.loads((tmp_path / "out" / name / "evaluation.json").read_text())["problems"] == count
        assert printed[path]["problems"] == count


def test_the_package_exports_what_a_script_needs() -> None:
    for name in grpo_recipes.__all__:
        assert getattr(grpo_recipes, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Recipes'"):
        grpo_recipes.Recipes  # noqa: B018
