"""The processors of `generate` compared with those of the user's settings: differences are found and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import SuppressTokensLogitsProcessor

from grpo_recipes.generation.groups import Turn, decoding
from grpo_recipes.generation.sampling_settings import ProcessorCheck, PublishedSettings, neutral
from tests.support.architectures import SAMPLED, SETTINGS, batch, config, tiny

OWN: dict[str, dict[str, Any]] = {
    **SETTINGS,
    "ends": {**SAMPLED, "forced_eos_token_id": 1, "min_length": 14, "begin_suppress_tokens": [5]},
    "prompt": {**SAMPLED, "encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2},
    "greedy, penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "guidance": {**SAMPLED, "guidance_scale": 1.5},
}
"""Settings of the user, by name."""


def checked(policy: Any, given: GenerationConfig, settings: GenerationConfig, grouped: bool = True) -> ProcessorCheck:
    """Generate with `given` where the user's settings are `settings`."""
    check, given.max_new_tokens = ProcessorCheck(settings, 1.0), 4  # the processors are built once
    with torch.no_grad(), check.watching(policy), decoding(policy, Turn(grouped=grouped)):
        policy.generate(**batch(), generation_config=given)
    assert "_get_logits_processor" not in vars(policy)
    return check


@pytest.mark.parametrize("how", OWN)
def test_the_settings_own_processors_are_no_difference(how: str) -> None:
    assert checked(tiny("Qwen2Config"), config(**OWN[how]), config(**OWN[how]), how == "filters").difference == ""


PUBLISHED: list[dict[str, Any]] = [
    {"min_length": 14, "min_new_tokens": 4, "forced_bos_token_id": 3, "forced_eos_token_id": 1},
    {"encoder_repetition_penalty": 1.3, "encoder_no_repeat_ngram_size": 2, "no_repeat_ngram_size": 3},
    {"renormalize_logits": True, "remove_invalid_values": True, "suppress_tokens": [9], "begin_suppress_tokens": [8]},
    {"sequence_bias": [[[5], 50.0]], "bad_words_ids": [[6]], "exponential_decay_length_penalty": (2, 1.5)},
    {"do_sample": True, "top_k": 20, "top_p": 0.8, "temperature": 0.6, "repetition_penalty": 1.05, "min_p": 0.1},
    {"num_beams": 3, "guidance_scale": 2.0, "use_cache": False, "max_length": 50},
    {"prompt_lookup_num_tokens": 3, "watermarking_config": {"greenlist_ratio": 0.25}},
]
"""Settings that models are published with, in their generation_config.json."""


@pytest.mark.parametrize("published", PUBLISHED)
def test_the_published_settings_of_a_model_stop_no_run(published: dict[str, Any]) -> None:
    policy, asked = tiny("Qwen2Config"), config()
    policy.generation_config = GenerationConfig(**published)
    with PublishedSettings(str).aside(policy, asked):
        assert checked(policy, asked, asked).difference == ""


def test_a_request_without_a_filter_draws_from_all_tokens() -> None:
    published = GenerationConfig(top_k=3, temperature=0.5, eos_token_id=7)
    found = neutral(published, GenerationConfig(do_sample=True))
    assert (found.top_k, found.temperature, found.eos_token_id) == (0, GenerationConfig().temperature, 7)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"sequence_bias": [[[5], 50.0]]}, "SequenceBiasLogitsProcessor(sequence_bias={(5,): 50.0})"),
        ({"suppress_tokens": [9]}, "SuppressTokensLogitsProcessor"),
        ({"min_p": 0.05}, "MinPLogitsWarper(min_p=0.05)"),
        ({"temperature": 0.5}, "TemperatureLogitsWarper(temperature=0.5)"),
        ({"do_sample": False}, "greedy_search"),
        ({"num_beams": 2}, "beam_sample"),
    ],
)
def test_a_processor_or_a_mode_that_the_settings_do_not_name_is_found(more: dict[str, Any], named: str) -> None:
    own = SETTINGS["repetition penalty"]
    check = checked(tiny("Qwen2Config"), config(**{**own, **more}), config(**own))
    assert check.difference is not None
    assert named in check.difference
    assert "RepetitionPenalty" not in check.difference


def test_a_filter_of_the_settings_that_does_not_reach_generate_is_found() -> None:
    check = checked(tiny("Qwen2Config"), config(temperature=0.7), config(**SETTINGS["filters"]), False)
    assert check.difference is not None
    assert "TopKLogitsWarper" in check.difference


def test_a_processor_of_the_models_own_is_found() -> None:
    policy = tiny("Qwen2Config")

    class Own(type(policy)):  # type: ignore[misc]
        def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
            own = SuppressTokensLogitsProcessor([7])
            return LogitsProcessorList([*super()._get_logits_processor(*args, **kwargs), own])

    policy.__class__ = Own
    check = checked(policy, config(), config())
    assert check.difference is not None
    assert "SuppressTokensLogitsProcessor" in check.difference


@pytest.mark.parametrize(
    ("more", "filters"),
    [
        ({}, []),
        ({"temperature": 0.7}, ["TemperatureLogitsWarper(temperature=0.7)"]),
        ({"do_sample": False, "top_k": 12}, ["greedy_search"]),
        ({"min_p": 0.02, "top_k": 12, "top_p": 1.0}, ["TopKLogitsWarper(top_k=12)", "MinPLogitsWarper(min_p=0.02)"]),
    ],
)
def test_the_settings_that_the_loss_does_not_apply_are_named(more: dict[str, Any], filters: list[str]) -> None:
    assert checked(tiny("Qwen2Config"), config(**more), config(**more)).filters == filters
