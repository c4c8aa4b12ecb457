"""Settings of an evaluation that a recipe sets."""

from __future__ import annotations

from typing import Any

import pytest
from trl import GRPOConfig

from grpo_recipes.evaluation.settings import template_kwargs_of, training_sampling
from tests.support.errors import refused


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ({}, {}),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.2, "min_p": 0.05}, None),
        ({"top_k": -1}, {"top_k": 0}),  # vLLM's "off"
        ({"top_k": None, "min_p": None}, {}),
        ({"temperature": None, "top_p": 0.5, "min_p": 0.0}, {"top_p": 0.5, "min_p": 0.0}),
        ({"temperature": 0.7, "generation_kwargs": {"temperature": 0.5}}, {"temperature": 0.5}),  # TRL's rule
        ({"generation_kwargs": {"min_p": 0.1, "do_sample": True}}, {"min_p": 0.1}),
    ],
)
def test_the_sampling_of_training_is_that_of_its_recipe_with_trls_defaults(
    recipe: dict[str, Any], changes: dict[str, Any] | None
) -> None:
    defaults = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    trl = GRPOConfig("unused", report_to="none", use_cpu=True, bf16=False)
    assert {name: getattr(trl, name) for name in defaults} == defaults
    assert training_sampling(recipe) == {**defaults, **(recipe if changes is None else changes)}


def test_keys_of_sampling_and_of_the_chat_template_are_checked() -> None:
    for recipe in ({"top_p": "high"}, {"generation_kwargs": {"top_p": [1]}}):
        with refused("`top_p`"):
            training_sampling(recipe)
    assert template_kwargs_of({}) is template_kwargs_of({"chat_template_kwargs": {}}) is None
    assert template_kwargs_of({"chat_template_kwargs": {"thinking": False}}) == {"thinking": False}
    with refused("`chat_template_kwargs`", "['thinking']"):
        template_kwargs_of({"chat_template_kwargs": ["thinking"]})
