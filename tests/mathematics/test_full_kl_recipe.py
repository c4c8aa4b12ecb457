"""`kl_estimator: full` in a recipe: its values, and the recipe of full-vocabulary KL training on a tiny policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from grpo_recipes import train
from grpo_recipes.checks.geometry import geometry_of
from grpo_recipes.recipe.recipe import RecipeError, find_file, parse_recipe
from tests.mathematics.harness import build_policy
from tests.support.errors import refused
from tests.support.grids import only

NAME = "gsm8k-qwen2-0.5b-full-kl"

TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="session")
def chat_model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny policy with room for a GSM8K prompt and with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    build_policy(folder, max_position_embeddings=512)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gsm8k_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of eighty rows in GSM8K's schema, of which 5 % are the four prompts of a step."""
    path = tmp_path_factory.mktemp("rows") / "train.jsonl"
    rows = ({"question": f"{n} 1 2 3 ?", "answer": f"#### {n}"} for n in range(80))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_recipe_has_the_settings_of_full_vocabulary_kl() -> None:
    recipe = parse_recipe(["--config", NAME])
    values = vars(recipe.config)
    assert recipe.model["model_name_or_path"] == "Qwen/Qwen2-0.5B-Instruct"
    assert (recipe.dataset.split, recipe.dataset.system_prompt) == ("train[:5%]", "think")
    assert recipe.kl_estimator == "full"
    expected = {
        "beta": 0.1,
        "learning_rate": 1e-5,
        "num_generations": 4,
        "num_train_epochs": 3,
        "max_completion_length": 50,
    }
    assert {key: values[key] for key in expected} == expected
    assert geometry_of(recipe, 1).prompts_per_generation == 4
    (reward,) = recipe.build_rewards()
    tagged = ["<think>x</think><answer>18</answer>", "<think>x</think><answer>18.0</answer>", "18"]
    assert reward.function(prompts=[""] * 3, completions=tagged, answer=["#### 18"] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "peft", only([[]], [[], ["--use_peft", "--lora_target_modules=all-linear"]]), ids=["full", "lora"]
)
def test_the_recipe_trains(peft: list[str], chat_model: Path, gsm8k_rows: Path, tmp_path: Path) -> None:
    arguments = ["--config", NAME, f"--model_name_or_path={chat_model}", f"--dataset.path={gsm8k_rows}", *peft]
    arguments += [
        "--use_cpu",
        "--bf16=false",
        "--dtype=float32",
        f"--output_dir={tmp_path / 'run'}",
        "--learning_rate=0.02",
        "--rewards=tests.support.probe_rewards.distinct_characters",
    ]
    assert train.main(arguments) == 0
    log = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    steps = [entry for entry in log if "loss" in entry]
    assert len(steps) == 3
    assert abs(steps[0]["kl/full"]) < 1e-6
    assert steps[-1]["kl/full"] > 1e-3
    assert all("kl" in step for step in steps)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["recipe"]["kl_estimator"] == "full"


@pytest.fixture
def recipe_with(tmp_path: Path):
    def write(**changes: object) -> list[str]:
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(find_file("recipes", NAME).read_text()), **changes}))
        return ["--config", str(path)]

    return write


def test_the_file_and_the_command_line_name_the_estimator(recipe_with) -> None:
    assert parse_recipe(recipe_with(kl_estimator="full")).kl_estimator == "full"
    assert parse_recipe([*recipe_with(), "--kl_estimator", "sampled"]).kl_estimator == "sampled"
    assert parse_recipe([*recipe_with(), "--kl-estimator=sampled"]).kl_estimator == "sampled"


@pytest.mark.parametrize(
    ("changes", "key", "shown"),
    [
        ({"beta": 0.0}, "`beta`", "0.0"),
        ({"kl_estimator": "k3"}, "`kl_estimator`", "k3"),
        ({"kl_estimator": "ful"}, "`kl_estimator`", "ful"),
        ({"kl_estimator": {"estimator": "full"}}, "`kl_estimator`", ""),
        ({"kl_estimater": "full"}, "`kl_estimater`", "`kl_estimator`"),
    ],
)
def test_unsupported_recipes_are_refused(changes: dict[str, object], key: str, shown: str, recipe_with) -> None:
    with refused(f"mine.yaml: {key}", shown, by=RecipeError):
        parse_recipe(recipe_with(**changes))


def test_the_estimator_is_kept_in_a_round_trip() -> None:
    recipe = parse_recipe(["--config", NAME])
    assert recipe.as_dict()["kl_estimator"] == "full"
