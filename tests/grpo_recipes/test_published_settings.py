"""A model's published generation_config steers neither training nor evaluation: every field, one at a time."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, CompileConfig, GenerationConfig, PreTrainedModel

from grpo_recipes.evaluation.engines import Transformers
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.generation.sampling_settings import KEPT, PublishedSettings, ignored_fields
from tests.support.architectures import ENDS, adapter, trainer
from tests.support.exact_generation import exact_generation
from tests.support.recorded import EOS, model, tokenizer

BIAS = [[[5], 50.0]]
"""Value of `sequence_bias` that makes every completion one repeated word."""

SWITCHES = (
    "disable_compile early_stopping is_assistant low_memory output_attentions output_hidden_states output_logits "
    "output_scores remove_invalid_values renormalize_logits return_dict_in_generate token_healing use_mtp"
)
NUMBERS = (
    "assistant_lookbehind max_length max_matching_ngram_size max_new_tokens num_assistant_tokens num_beams "
    "num_beam_groups num_return_sequences prefill_chunk_size prompt_lookup_num_tokens target_lookbehind"
)
VALUES: dict[str, Any] = {
    "assistant_confidence_threshold": 0.9,
    "min_p": 0.9,
    **dict.fromkeys(("assistant_early_exit", "encoder_no_repeat_ngram_size", "no_repeat_ngram_size", "top_k"), 1),
    "assistant_ensemble_weight": 0.5,
    "diversity_penalty": 0.5,
    **dict.fromkeys(NUMBERS.split(), 3),
    "bad_words_ids": [[word] for word in range(5, 20)],
    "begin_suppress_tokens": list(range(5, 40)),
    "suppress_tokens": list(range(5, 40)),
    **dict.fromkeys(("bos_token_id", "decoder_start_token_id", "pad_token_id"), 7),
    "cache_config": {"max_cache_len": 64},
    "cache_implementation": "static",
    "compile_config": CompileConfig(),
    "constraints": ["a constraint"],
    "continuous_batching_config": {"page_size": 16},
    **dict.fromkeys(SWITCHES.split(), True),
    "do_sample": False,
    "use_cache": False,
    "dola_layers": "low",
    "encoder_repetition_penalty": 5.0,
    "repetition_penalty": 5.0,
    "epsilon_cutoff": 0.2,
    "eta_cutoff": 0.2,
    "exponential_decay_length_penalty": (1, 5.0),
    "force_words_ids": [[5]],
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 5,
    "guidance_scale": 3.0,
    "length_penalty": 2.0,
    "max_cache_len": 64,
    "max_time": 1e-09,
    "min_length": 24,
    "min_new_tokens": 20,
    "num_assistant_tokens_schedule": "heuristic",
    "penalty_alpha": 0.6,
    "sequence_bias": BIAS,
    "speculation_type": "a type",
    "stop_strings": ["t5"],
    **dict.fromkeys(("temperature", "top_h", "top_p", "typical_p"), 0.1),
    "watermarking_config": {"greenlist_ratio": 0.5, "bias": 5.0},
}
"""Value other than the neutral one for every field but `eos_token_id`, which has a test of its own."""

TOGETHER = {name: value for name, value in VALUES.items() if name not in KEPT}
"""Fields that are put aside. Those that stay in force exclude one another."""

CUSTOM = {"defaults_only": False, "a_custom_entry": 3}
"""Entries that `transformers` passes to the call of `generate`, where one may be the name of an argument."""

METADATA = {"transformers_version", "_from_model_config"}
FIELDS = sorted(vars(GenerationConfig()).keys() - METADATA - {"eos_token_id"})


@pytest.fixture(autouse=True)
def same_stream() -> Iterator[None]:
    """Draw the random numbers of transformers' own loop, so that a field may decide which of the two loops runs."""
    with exact_generation():
        yield


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING)
    return lambda: [text for text in caplog.messages if "generation_config" in text]


def publish(policy: PreTrainedModel, **fields: Any) -> PreTrainedModel:
    for name, value in fields.items():
        setattr(policy.generation_config, name, copy.deepcopy(value))
    return policy


@dataclass
class Run:
    """Completions, metrics and parameters after a step of training."""

    completions: list[str]
    metrics: list[dict[str, Any]]
    parameters: list[Tensor]


def trained(folder: Path, policy: PreTrainedModel | None = None, **changes: Any) -> Run:
    seen: list[str] = []

    def reward(completions: list[str], **columns: Any) -> list[float]:
        seen.extend(completions)
        return [float(sum(map(ord, completion)) % 97) for completion in completions]

    sizes = {"max_steps": 1, "gradient_accumulation_steps": 1, "max_completion_length": 12, "micro_batching": "off"}
    run = trainer(folder, policy=policy, **{**sizes, **changes})
    run.reward_funcs = [reward]
    run.train()
    timed = ("runtime", "per_second", "time", "difference")
    metrics = [
        {name: value for name, value in entry.items() if not any(part in name for part in timed)}
        for entry in run.state.log_history
    ]
    return Run(seen, metrics, [parameter.detach().clone() for parameter in run.model.parameters()])


def assert_same_run(found: Run, expected: Run) -> None:
    assert found.completions == expected.completions
    assert found.metrics == expected.metrics
    assert all(map(torch.equal, found.parameters, expected.parameters))


def evaluated(policy: PreTrainedModel, temperature: float = 1.0) -> list[str]:
    prompts = [prompt for prompt in ("t5 t6 t7", "t8", "t9 t10 t11 t12 t13") for _ in range(4)]
    return Transformers(policy, tokenizer())(prompts, Settings(temperature=temperature, max_new_tokens=8))


def ending() -> PreTrainedModel:
    """Return a policy that ends its completions at many lengths."""
    return publish(model(), eos_token_id=ENDS)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = trained(tmp_path_factory.mktemp("plain"))
    assert len(set(run.completions)) > 3
    return run


@pytest.fixture(scope="module")
def expected_evaluation() -> list[str]:
    with exact_generation():
        return evaluated(ending())


def test_every_field_has_a_value_here() -> None:
    """A field of a later transformers fails here until somebody has decided whether it is kept."""
    assert sorted(VALUES) == FIELDS
    assert {*FIELDS, "eos_token_id"} > KEPT
    defaults = GenerationConfig._get_default_generation_params()
    # transformers' default is greedy decoding, which is not how a policy is trained.
    assert [name for name, value in VALUES.items() if value in (None, defaults.get(name))] == ["do_sample"]


def test_published_fields_change_neither_training_nor_evaluation(
    tmp_path: Path, expected: Run, expected_evaluation: list[str]
) -> None:
    """All fields that are put aside, and one alone whose effect the others may hide."""
    for number, fields in enumerate(({"sequence_bias": BIAS}, {**TOGETHER, **CUSTOM})):
        assert_same_run(trained(tmp_path / str(number), publish(model(), **fields)), expected)
        assert evaluated(publish(ending(), **fields)) == expected_evaluation


@pytest.mark.slow
def test_no_published_field_changes_training_or_an_evaluation(
    tmp_path: Path, expected: Run, expected_evaluation: list[str]
) -> None:
    for field in FIELDS:
        assert_same_run(trained(tmp_path / field, publish(model(), **{field: VALUES[field]})), expected)
        assert evaluated(publish(ending(), **{field: VALUES[field]})) == expected_evaluation, field


def test_a_greedy_evaluation_stays_greedy() -> None:
    sampling = publish(ending(), do_sample=True, temperature=5.0, repetition_penalty=3.0)
    assert evaluated(sampling, temperature=0.0) == evaluated(ending(), temperature=0.0)


def test_published_end_tokens_end_completions(tmp_path: Path) -> None:
    def last_words(completions: list[str]) -> set[str]:
        return {completion.split()[-1] for completion in completions if 0 < len(completion.split()) < 8}

    ends = [EOS, *range(20, 40)]
    # The model publishes end tokens of its own.
    run = trainer(tmp_path, policy=model(), max_completion_length=8, max_steps=1, gradient_accumulation_steps=1)
    run.model.generation_config.eos_token_id = run.generation_config.eos_token_id = run.eos_token_ids = ends
    seen: list[str] = []
    run.reward_funcs = [lambda completions, **_: seen.extend(completions) or [float(len(text)) for text in completions]]
    run.train()
    named = {f"t{end}" for end in ends}
    for completions in (seen, evaluated(publish(model(), eos_token_id=ends))):
        assert 0 < len(last_words(completions) & named) == len(last_words(completions))


def test_published_fields_do_not_change_other_ways_to_generate(tmp_path: Path) -> None:
    changes = {"generation": "off", "peft_config": adapter(), "beta": 0.04}
    changed = trained(tmp_path / "all", publish(model(), **TOGETHER), **changes)
    assert_same_run(changed, trained(tmp_path / "plain", **changes))


@pytest.mark.slow
@pytest.mark.parametrize("key", ["generation", "peft_config", "use_transformers_continuous_batching"])
def test_published_fields_do_not_change_each_other_way_to_generate(key: str, tmp_path: Path) -> None:
    values = {"generation": "off", "peft_config": adapter(), "use_transformers_continuous_batching": True}
    changes = {key: values[key]}
    expected = trained(tmp_path / "plain", **changes)
    for name, fields in (("one", {"sequence_bias": BIAS}), ("all", TOGETHER)):
        assert_same_run(trained(tmp_path / name, publish(model(), **fields), **changes), expected)


# Settings that stay in force


def test_special_tokens_and_the_cache_stay_in_force() -> None:
    """A call that leaves them at None, such as one in a user's script, gets the published ones."""
    tokens = {name for name in FIELDS if name.endswith("_token_id") and not name.startswith("forced")}
    computed = {name for name in FIELDS if any(part in name for part in ("cache", "compile", "prefill"))}
    assert {"eos_token_id"} | tokens | computed == KEPT
    kept = {name: VALUES[name] for name in KEPT - {"eos_token_id"}} | {"eos_token_id": [1, 7]}
    policy = publish(model(), **kept)
    with PublishedSettings(print).aside(policy, GenerationConfig(max_new_tokens=4)):
        config = policy.generation_config
        assert {name: getattr(config, name) for name in KEPT} == kept


@pytest.mark.parametrize("generation", ["auto", pytest.param("off", marks=pytest.mark.slow)])
def test_the_settings_of_the_run_stay_in_force(generation: str, tmp_path: Path) -> None:
    policy = publish(model(), suppress_tokens=[9], min_new_tokens=3)
    own = {"suppress_tokens": list(range(10, 40)), "min_new_tokens": 9}
    run = trained(tmp_path, policy, generation=generation, generation_kwargs=own)
    words = {word for completion in run.completions for word in completion.split()}
    assert words <= {f"t{n}" for n in range(10)}
    assert "t9" in words
    assert run.metrics[0]["completions/min_length"] > 9


def test_top_k_null_keeps_all_tokens(tmp_path: Path) -> None:
    """If it stayed None, transformers' own default of 50 would replace it."""
    run = trainer(tmp_path, generation_kwargs={"top_k": None})
    assert run.generation_config.top_k is None
    with run._generation.published.aside(run.model, run.generation_config):
        in_force, _ = run.model._prepare_generation_config(run.generation_config)
    assert in_force.top_k == 0


@pytest.mark.parametrize("config", [None, adapter()], ids=["full", "LoRA"])
def test_the_published_object_is_restored(config: Any, tmp_path: Path) -> None:
    policy = publish(model(), sequence_bias=BIAS)
    published = policy.generation_config
    wrapped = policy if config is None else get_peft_model(policy, config)
    asked = GenerationConfig(max_new_tokens=4, do_sample=True)

    def interrupted() -> None:
        with PublishedSettings(print).aside(wrapped, asked):
            assert wrapped.generation_config is not published
            assert wrapped.generation_config.sequence_bias is None
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert policy.generation_config is published
    assert published.sequence_bias == BIAS


def test_settings_on_the_wrapper_of_an_adapter_are_put_aside_too() -> None:
    """PEFT's `generate` assigns the wrapper's settings to the base model."""
    policy = get_peft_model(model(), adapter(task_type="CAUSAL_LM"))
    base = policy.get_base_model().generation_config
    policy.generation_config = own = GenerationConfig(sequence_bias=BIAS, eos_token_id=1)
    ids = torch.tensor([[5, 6]])
    asked = GenerationConfig(max_new_tokens=4, do_sample=False)
    with PublishedSettings(print).aside(policy, asked):
        tokens = policy.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=asked)
    assert set(tokens[0, 2:].tolist()) != {5}
    assert policy.generation_config is own
    assert policy.get_base_model().generation_config is base


# The announcement


def test_ignored_settings_are_announced_once_and_saved_with_the_model(tmp_path: Path, said: Any) -> None:
    model().save_pretrained(tmp_path / "policy")
    published = {"do_sample": True, "sequence_bias": BIAS, "temperature": 0.6, "eos_token_id": 1, "pad_token_id": 0}
    published |= {"top_p": 1.0, "use_cache": True, "a_custom_entry": 3}
    (tmp_path / "policy" / "generation_config.json").write_text(json.dumps(published))
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    run = trainer(tmp_path / "run", policy=policy, generation_kwargs={"top_k": 7}, max_completion_length=4)
    run.train()
    (sentence,) = said()
    assert sentence.endswith("(a_custom_entry: 3, sequence_bias: [[[5], 50.0]], temperature: 0.6)")
    run.save_model(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved.items() >= {**published, "eos_token_id": ENDS}.items()


def test_an_evaluation_announces_ignored_settings_once(said: Any) -> None:
    policy = publish(ending(), suppress_tokens=list(range(20, 40)))
    engine = Transformers(policy, tokenizer())
    for _ in range(2):
        engine(["t5", "t6"] * 4, Settings(temperature=1.0, max_new_tokens=4, batch_size=4))
    (sentence,) = said()
    assert "suppress_tokens: [20, 21" in sentence


def test_a_published_setting_that_is_off_is_ignored_where_it_is_on() -> None:
    published = GenerationConfig(do_sample=False, use_cache=False, min_length=0, top_p=0.9)
    sampling, greedy = GenerationConfig(do_sample=True), GenerationConfig(do_sample=False, top_p=0.9)
    assert ignored_fields(published, sampling) == {"do_sample": False, "top_p": 0.9}
    assert ignored_fields(published, greedy) == {}


def test_settings_that_are_in_force_are_not_announced(tmp_path: Path, said: Any) -> None:
    policy = publish(model(), do_sample=True, temperature=0.8, top_k=20, num_beams=1, min_length=0)
    run = trainer(tmp_path, policy=policy, temperature=0.8, top_k=20)
    with run._generation.published.aside(run.model, run.generation_config):
        pass
    assert said() == []
