"""recipes/algorithms: each recipe loads, plans and trains on the common bench, and ineffective keys are refused."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from trl import GRPOTrainer

from grpo_recipes import train
from grpo_recipes.checks.checks import Checked, Machine, check
from grpo_recipes.cli import main
from grpo_recipes.recipe.recipe import Recipe, RecipeError, find_file, parse_recipe
from grpo_recipes.recipe.trl_keys import OBJECTIVE_KEYS, ignored_keys
from tests.grpo_recipes.recipe.test_recipes import ROOT
from tests.support.errors import refused

FOLDER = ROOT / "recipes" / "algorithms"
RECIPES = sorted(FOLDER.glob("*.yaml"))
ONE = Machine(num_processes=1, bf16=False)

# Keys that an algorithm decides. All other keys belong to the bench.
ALGORITHM = (
    *OBJECTIVE_KEYS,
    *("loss_type", "scale_rewards", "multi_objective_aggregation", "importance_sampling_level"),
    *("beta", "use_bias_correction_kl", "mask_truncated_completions"),
    *("advantages", "rewards", "per_device_train_batch_size", "steps_per_generation", "output_dir"),
)


def checked(name: str, **changes: Any) -> Checked:
    return check(Recipe.load(find_file("recipes", name), **changes), Machine(2, bf16=False))


def test_every_recipe_is_found_by_its_name_and_passes_every_check() -> None:
    for file in RECIPES:
        assert find_file("recipes", file.stem) == file
        made = parse_recipe(["--config", file.stem])
        assert made.training["output_dir"] == f"runs/{file.stem}"
        if file.stem in ("gspo", "maxrl"):
            assert check(made, ONE).geometry.generation_batch_size == 64


def test_the_recipes_differ_only_in_keys_of_the_algorithm() -> None:
    benches = []
    for file in RECIPES:
        keys = yaml.safe_load(file.read_text(encoding="utf-8"))
        benches.append({key: value for key, value in keys.items() if key not in ALGORITHM})
    assert benches == [benches[0]] * 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(file.stem, marks=() if file.stem in ("gdpo", "maxrl") else pytest.mark.nightly) for file in RECIPES],
)
def test_two_steps(name: str, tiny_model: Path, tmp_path: Path) -> None:
    arguments = ["--config", name, "--model_name_or_path", str(tiny_model), "--output_dir", str(tmp_path / "run")]
    assert train.main([*arguments, "--dataset.size=64", "--max_steps=2", "--logging_steps=1", "--report_to=none"]) == 0
    assert json.loads((tmp_path / "run" / "trainer_state.json").read_text())["global_step"] == 2


def test_the_keys_that_a_loss_reads_appear_in_its_branch_of_trl() -> None:
    source = inspect.getsource(GRPOTrainer._compute_loss)
    cispo, rest = source.split('if self.loss_type == "cispo":')[1].split('elif self.loss_type in ["grpo", "bnpo"')
    clipped, rest = rest.split('elif self.loss_type == "sapo":')
    sapo, rest = rest.split('elif self.loss_type == "vespo":')
    branches = {"cispo": cispo, "grpo": clipped, "sapo": sapo, "vespo": rest.partition("else:")[0]}
    spelt = {"epsilon": "self.epsilon_low", "delta": "self.args.delta"}
    for loss_type, branch in branches.items():
        found = {key for key in OBJECTIVE_KEYS if spelt.get(key, key) in branch}
        assert found == set(OBJECTIVE_KEYS) - set(ignored_keys(loss_type)), loss_type


def test_a_resolved_recipe_omits_keys_that_its_loss_ignores(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "sapo", "--resolved"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert {key for key in OBJECTIVE_KEYS if key in shown} == {"sapo_temperature_neg", "sapo_temperature_pos"}
    assert shown["num_iterations"] == 1


def test_maxrl_refuses_options_of_trl_that_it_does_not_read() -> None:
    with refused("`scale_rewards`", "`batch`", "`advantages: max_rl`", by=RecipeError):
        checked("maxrl", scale_rewards="batch")
    with refused("`multi_objective_aggregation`", "sum_then_normalize", by=RecipeError):
        checked("maxrl", multi_objective_aggregation="normalize_then_sum", scale_rewards="group")
    both = ["gsm8k_correctness", "well_formed"]
    assert checked("maxrl", rewards=both, per_device_train_batch_size=12).geometry.splits_groups


@pytest.mark.slow
def test_the_commands_of_the_page(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    commands = [line.split()[1:] for line in page.splitlines() if line.startswith("    grpo-recipes ")]
    assert [command[0] for command in commands] == ["train", "plan"]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, tmp_path / "runs" / "quickstart" / "policy-seed0")
    for command in commands:
        short = ["--max_steps=1", "--report_to=none", "--dataset.size=64", "--max_completion_length=8"]
        assert main([*command, *(short if command[0] == "train" else [])]) == 0
    assert (tmp_path / "runs" / "dapo" / "model.safetensors").is_file()


def test_the_table_of_recipes_names_every_algorithm() -> None:
    table = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    for file in RECIPES:
        assert f"[{file.stem}](algorithms/{file.name})" in table
