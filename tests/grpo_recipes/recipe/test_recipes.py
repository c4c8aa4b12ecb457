"""Every recipe trains two steps, with only its model, its data and its devices replaced by tiny ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_recipes import train
from tests.support.rows import write
from tests.support.tiny import save_reward_model

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*.yaml"))
# Recipes that train on a CPU as another one does, whose devices and sizes they change.
ALIKE = ("7b-full-zero3", "7b-lora-zero3", "72b-lora-zero3-2node", "1.5b-8xa100", "1.5b-lora")
TRAINED = [
    pytest.param(path, id=path.stem, marks=pytest.mark.nightly if path.stem.endswith(ALIKE) else pytest.mark.slow)
    for path in RECIPES
]
TOOL_RECIPES = sorted(path for path in (ROOT / "recipes" / "tools").glob("*.yaml"))


def triples(folder: Path) -> str:
    return write(
        folder / "scored.jsonl",
        [{"prompt": f"{n} + 1 = ?", "response": f" {n + 1}", "reward": n % 3} for n in range(64)],
    )


def stand_ins(recipe: Path, model: Path, gsm8k: Path, folder: Path) -> list[str]:
    """Return the arguments that replace everything that a CPU and an empty cache do not have."""
    raw = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    data = {
        "gsm8k": f"--dataset.path={gsm8k}",
        "rlaif": f"--dataset.path={ROOT / 'tests' / 'data' / 'rlaif.jsonl'}",
        "scored": f"--dataset.path={triples(folder)}",
        "arithmetic": "--dataset.size=64",
        "programs": "--dataset.split=train",
        **dict.fromkeys(("products", "secret_number"), "--dataset.size=64"),
    }
    spec = raw["dataset"] if isinstance(raw["dataset"], dict) else {"name": raw["dataset"]}
    given = [f"--model_name_or_path={model}", data[spec["name"]], f"--output_dir={folder / 'run'}"]
    if spec["name"] == "gsm8k" and "split" in spec:
        given.append("--dataset.split=train")  # a slice of 40 rows would be too few for one generation
    given += ["--use_cpu=true", "--bf16=false", "--dtype=float32", "--use_vllm=false", "--report_to=none"]
    given += ["--max_steps=2", "--max_completion_length=8", "--logging_steps=1", "--save_strategy=no"]
    if "tool_limits" in raw:  # a token is a byte, so that a call of the template alone takes a hundred
        given += ["--max_tool_calling_iterations=1", "--max_completion_length=260", "--num_generations=4"]
        given += ["--per_device_train_batch_size=4", "--gradient_accumulation_steps=1"]
    return given


def adapter(model: Path, folder: Path) -> Path:
    """Save a LoRA adapter of the tiny policy with its tokenizer, as a first stage does, and return its folder."""
    policy = AutoModelForCausalLM.from_pretrained(model)
    get_peft_model(policy, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def reward_model_stand_in(recipe: Path, folder: Path) -> list[str]:
    """Return the argument that replaces a reward model from the hub by a tiny one."""
    rewards = yaml.safe_load(recipe.read_text(encoding="utf-8"))["rewards"]
    places = {f"--rewards.{place}": reward for place, reward in enumerate(rewards)}
    for place, reward in enumerate(rewards):
        parts = reward.get("rewards", []) if isinstance(reward, dict) else []
        places |= {f"--rewards.{place}.rewards.{inner}": part for inner, part in enumerate(parts)}
    for place, reward in places.items():
        if isinstance(reward, dict) and reward.get("name") == "reward_model":
            return [f"{place}.kwargs.model={save_reward_model(folder / 'reward-model')}"]
    assert "reward_model" not in json.dumps(rewards)
    return []


@pytest.mark.parametrize("recipe", TRAINED)
def test_two_steps(recipe: Path, tiny_model: Path, gsm8k_file: Path, tmp_path: Path) -> None:
    if "load_in_4bit" in recipe.read_text():
        pytest.importorskip("bitsandbytes", reason="a base in 4 bits needs bitsandbytes")
    model = adapter(tiny_model, tmp_path / "adapter") if recipe.stem.endswith("lora-continue") else tiny_model
    arguments = stand_ins(recipe, model, gsm8k_file, tmp_path) + reward_model_stand_in(recipe, tmp_path)
    assert train.main(["--config", str(recipe), *arguments]) == 0
    assert json.loads((tmp_path / "run" / "trainer_state.json").read_text())["global_step"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", TOOL_RECIPES, ids=lambda path: path.stem)
def test_two_steps_with_tools(recipe: Path, tool_model: Path, gsm8k_file: Path, tmp_path: Path) -> None:
    assert train.main(["--config", str(recipe), *stand_ins(recipe, tool_model, gsm8k_file, tmp_path)]) == 0
    state = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert "tools/call_frequency" in state["log_history"][0]


def test_the_tables_of_recipes_have_a_row_for_each_with_the_command() -> None:
    table = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    for recipe in RECIPES:
        (row,) = [line for line in table.splitlines() if line.startswith(f"| [{recipe.stem}]({recipe.name})")]
        assert len([cell for cell in row.split("|")[1:-1] if cell.strip()]) == 6
        commands = (f"--config {recipe.stem}`", f"`grpo-recipes train {recipe.stem} ", "`make quickstart`")
        assert any(command in row for command in commands)
    for recipe in TOOL_RECIPES:
        assert f"| [{recipe.stem}](tools/{recipe.name}) |" in table


def test_every_path_in_the_seeds_table_exists() -> None:
    text = (ROOT / "docs" / "seeds.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:tests|grpo_recipes|rewards|recipes|docs)/[\w./-]+\.\w+)`", text))
    assert len(paths) > 20
    missing = sorted(path for path in paths if not (ROOT / path).exists())
    assert not missing
