"""Keys under other trainers' names: each hint leads to a key, and comes before a name that is only similar."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from trl import GRPOConfig, ModelConfig

from grpo_recipes.recipe.other_names import OTHER_NAMES
from grpo_recipes.recipe.recipe import OUR_KEYS, RecipeError, parse_recipe
from grpo_recipes.recipe.specs import DatasetSpec, hints

KEYS = {*OUR_KEYS, *hints(ModelConfig), *hints(GRPOConfig)}


@pytest.mark.parametrize("advice", sorted(set(OTHER_NAMES.values())))
def test_every_hint_names_only_keys(advice: str) -> None:
    keys = re.findall(r"`(.+?)`", advice)
    assert keys or advice == "remove it"
    for key in keys:
        first, _, inner = key.partition(":")[0].partition(".")
        assert first in KEYS or key == "kwargs.tags"
        assert first != "dataset" or inner in DatasetSpec.hints()


def test_no_key_of_ours_or_of_trl_is_called_another_trainers() -> None:
    assert KEYS.isdisjoint(OTHER_NAMES)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("max_prompt_length", "dataset.max_prompt_tokens"),
        ("base_model", "model_name_or_path"),
        ("lr", "learning_rate"),
        ("micro_batch_size", "per_device_train_batch_size"),
        ("lora_rank", "lora_r"),
        ("datasets", "dataset.path"),
        ("kl_coef", "beta"),
        ("lora_target_linear", "lora_target_modules: all-linear"),
        ("fast_inference", "use_vllm"),
        ("max_lora_rank", "lora_r"),
        ("loss_agg_mode", "loss_type"),
        ("truncation", "dataset.overlong_prompts"),
        ("peft_config", "use_peft"),
    ],
)
def test_a_key_of_another_trainer_is_translated(tmp_path: Path, name: str, key: str) -> None:
    """In a file and on the command line, with hyphens too."""
    file = tmp_path / "theirs.yaml"
    file.write_text(f"model_name_or_path: m\ndataset: gsm8k\nrewards: [gsm8k_correctness]\n{name}: 1\n")
    with pytest.raises(RecipeError) as refused:
        parse_recipe(["--config", str(file)])
    assert str(refused.value) == f"{file}: unknown key `{name}`: here it is `{key}`"
    for option in (f"--{name}", f"--{name.replace('_', '-')}"):
        with pytest.raises(RecipeError, match=f"here it is `{key}`"):
            parse_recipe(["--config", "quickstart", option, "1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trl: {beta: 0.1}", "unknown key `trl.beta`: here it is `beta`, without `trl`"),
        ("lora: {r: 8}", "unknown key `lora.r`: here it is `lora_r`"),
        (
            "actor_rollout_ref: {rollout: {n: 8}}",
            "unknown key `actor_rollout_ref.rollout.n`: here it is `num_generations`",
        ),
        ("optimizer: {_component_: torch.optim.AdamW}", "unknown key `optimizer._component_`: here it is `optim`"),
        ("trainer: {}", "unknown key `trainer`: remove it"),
        ("dataset: {path: a.csv, answer: gold}", "unknown key `dataset.answer`: here it is `dataset.columns`"),
        ("sampling: {temperature: 0.7}", "unknown key `sampling.temperature`: here it is `temperature`"),
    ],
)
def test_a_nested_key_of_another_trainer_is_translated(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "theirs.yaml"
    ours = {"dataset": "gsm8k", "rewards": ["gsm8k_correctness"], "model_name_or_path": "m"}
    file.write_text(yaml.safe_dump({**ours, **yaml.safe_load(text)}, sort_keys=False))
    with pytest.raises(RecipeError) as refused:
        parse_recipe(["--config", str(file)])
    assert str(refused.value) == f"{file}: {message}"


@pytest.mark.parametrize(
    "name", ["model_type", "save_safetensors", "overwrite_output_dir", "chat_template", "sample_packing"]
)
def test_a_key_without_a_counterpart_is_to_be_removed(name: str) -> None:
    """A key with a similar name, such as `save_steps`, would set something else."""
    with pytest.raises(RecipeError, match=f"unknown argument `--{name}`: remove it"):
        parse_recipe(["--config", "quickstart", f"--{name}", "1"])


def test_a_limit_of_prompt_and_completion_names_both_limits() -> None:
    with pytest.raises(RecipeError, match="`dataset.max_prompt_tokens` limits .*`max_completion_length`"):
        parse_recipe(["--config", "quickstart", "--max_seq_length", "2048"])


def test_a_misspelt_key_is_still_a_question() -> None:
    with pytest.raises(RecipeError, match="did you mean `max_completion_length`"):
        parse_recipe(["--config", "quickstart", "--max_completion_lenght", "1"])
