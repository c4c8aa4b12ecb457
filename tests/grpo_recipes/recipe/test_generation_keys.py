"""Generation keys of a recipe: stop strings, and options that continuous batching would drop, are checked early."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.generation import logits_process
from trl import GRPOConfig

from grpo_recipes import GRPOTrainer
from grpo_recipes.recipe.recipe import RecipeError, parse_recipe
from grpo_recipes.recipe.trl_keys import check_generation, stop_strings
from grpo_rewards.errors import UserError

RECIPE = "model_name_or_path: m\ndataset: {name: arithmetic}\nrewards: gsm8k_correctness\n"


@pytest.mark.parametrize(
    ("given", "strings"),
    [
        (None, ()),
        ({}, ()),
        ({"top_k": 3}, ()),
        ({"stop": None}, ()),
        ({"stop": "</a>"}, ("</a>",)),
        ({"stop": ["</a>", "\n"]}, ("</a>", "\n")),
        ('{"stop": ["</a>"]}', ("</a>",)),
    ],
)
def test_stop_strings_are_read_from_generation_kwargs(given: Any, strings: tuple[str, ...]) -> None:
    assert stop_strings(given) == strings


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an empty string": ({"stop": [""]}, "`generation_kwargs.stop` must be a string or a list of strings"),
    "an empty text": ({"stop": ""}, "`generation_kwargs.stop` must be a string or a list of strings"),
    "a number": ({"stop": [3]}, "`generation_kwargs.stop` must be a string or a list of strings"),
    "a mapping": ({"stop": {"a": 1}}, "`generation_kwargs.stop` must be a string or a list of strings"),
    "transformers' key, empty": ({"stop_strings": []}, "`generation_kwargs.stop_strings`: write `stop` instead"),
    "transformers' key": ({"stop_strings": ["a"]}, "`generation_kwargs.stop_strings`: write `stop` instead"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_stop_strings_are_refused(case: str, tmp_path: Path) -> None:
    given, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        stop_strings(given)
    with pytest.raises(UserError, match=message):  # before the model is looked for
        GRPOTrainer(
            "/no/such/model", print, GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, generation_kwargs=given)
        )
    file = tmp_path / "r.yaml"
    file.write_text(f"{RECIPE}generation_kwargs: {given}\n")
    with pytest.raises(RecipeError, match=f"{file}: {message}"):
        parse_recipe(["--config", str(file)])


def test_stop_strings_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE)
    for words in (["--generation_kwargs.stop", "[</answer>]"], ["--generation_kwargs", '{"stop": "</answer>"}']):
        recipe = parse_recipe(["--config", str(file), *words])
        assert stop_strings(recipe.config.generation_kwargs) == ("</answer>",)
    with pytest.raises(RecipeError, match="`generation_kwargs` must be a mapping, or one written as JSON"):
        parse_recipe(["--config", str(file), "--generation_kwargs", '{"stop": '])


@pytest.mark.parametrize("key", ["chat_template_kwargs", "model_init_kwargs"])
def test_a_mapping_may_be_written_as_json(key: str, tmp_path: Path) -> None:
    """As `GRPOConfig` reads it."""
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE)
    for words in ([f"--{key}.deep", "true"], [f"--{key}", '{"deep": true}'], [f'--{key}={{"deep": true}}']):
        recipe = parse_recipe(["--config", str(file), *words])
        assert recipe.training[key] == {"deep": True} == recipe.as_dict()[key]
    file.write_text(RECIPE + key + ": '{\"deep\": true}'\n")
    assert getattr(parse_recipe(["--config", str(file)]).config, key) == {"deep": True}
    for given in ("7", "{deep", "[1]"):
        with pytest.raises(RecipeError, match=f"`{key}` must be a mapping, or one written as JSON, not "):
            parse_recipe(["--config", str(file), f"--{key}={given}"])


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"repetition_penalty": 1.2, "generation_kwargs": {"repetition_penalty": 1.0}}, ""),
        ({"generation_kwargs": {"min_new_tokens": 3, "encoder_repetition_penalty": 2.0}}, "encoder.*, min_new_tokens"),
        ({"generation_kwargs": {"min_length": 0, "min_new_tokens": None}}, ""),
        ({"generation_kwargs": {"stop": ["5"]}}, "stop"),
    ],
)
def test_options_that_continuous_batching_drops_are_refused(changes: dict[str, Any], lost: str) -> None:
    known: dict[str, Any] = {"repetition_penalty": 1.0, "generation_kwargs": None, **changes}
    check_generation(SimpleNamespace(use_transformers_continuous_batching=False, **known))
    config = SimpleNamespace(use_transformers_continuous_batching=True, **known)
    if not lost:
        return check_generation(config)
    with pytest.raises(UserError, match=f"continuous_batching` drops {lost}: set it to false, or remove the option"):
        check_generation(config)


def test_transformers_still_drops_the_same_processors() -> None:
    dropped = {
        name
        for name, processor in vars(logits_process).items()
        if getattr(processor, "supports_continuous_batching", None) is False
    }
    assert dropped == {
        "EncoderRepetitionPenaltyLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
    }
