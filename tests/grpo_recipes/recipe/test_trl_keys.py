"""Rows of TRL's keys: ranges against the defaults of TRL, and the words that describe a range."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
from trl import GRPOConfig, ModelConfig

from grpo_recipes.recipe import trl_keys
from grpo_rewards.errors import UserError

NUMBERS = {field.name: field.default for config in (GRPOConfig, ModelConfig) for field in dataclasses.fields(config)}


@pytest.mark.parametrize("key", [key for key in trl_keys.TRL_KEYS if "*" not in key])
def test_every_row_names_a_key_of_trl_and_allows_its_default(key: str) -> None:
    assert key in NUMBERS
    trl_keys.normalized({key: NUMBERS[key]})


@pytest.mark.parametrize(
    ("allowed", "inside", "outside", "words"),
    [
        (trl_keys.POSITIVE, (1e-9, 5), (0, -1, math.nan, math.inf), "above 0"),
        (trl_keys.NOT_NEGATIVE, (0, 5), (-1e-9, math.nan, math.inf), "of at least 0"),
        (trl_keys.SHARE, (0.1, 1), (0, 1.1, math.nan), "above 0 and at most 1"),
        (trl_keys.Range(0, 1, below=True), (0, 0.99), (1, -0.1), "of at least 0 and below 1"),
        (trl_keys.Range(1, or_=-1), (1, 9, -1), (0, -2, math.inf), "of at least 1, or -1"),
    ],
)
def test_a_range_contains_the_numbers_of_its_description(allowed, inside, outside, words: str) -> None:
    assert all(value in allowed for value in inside)
    assert not any(value in allowed for value in outside)
    assert str(allowed) == words


def test_a_number_without_a_range_must_be_finite() -> None:
    trl_keys.check_numbers({"entropy_target": -3.0, "warmup_steps": None, "bf16": True})
    with pytest.raises(UserError, match="`entropy_target` is nan: set a finite number"):
        trl_keys.check_numbers({"entropy_target": math.nan})


@pytest.mark.parametrize(("rate", "is_warned_of"), [(1e-6, False), (1e-2, False), (0.0101, True)])
def test_a_high_learning_rate_gives_a_warning(rate: float, is_warned_of: bool) -> None:
    assert bool(trl_keys.cautions(SimpleNamespace(learning_rate=rate), {"use_peft": False})) is is_warned_of


@pytest.mark.parametrize(
    ("model", "notes"),
    [
        ({"lora_r": 8}, ["`lora_r` has no effect without `use_peft: true`, which makes a new adapter"]),
        ({"lora_r": 8, "use_peft": True}, []),
        ({"lora_r": None}, []),
    ],
)
def test_lora_keys_without_an_adapter_are_noted(model: dict[str, Any], notes: list[str]) -> None:
    assert trl_keys.cautions(SimpleNamespace(learning_rate=1e-5), model) == notes
