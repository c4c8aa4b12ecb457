"""Rows of TRL's keys: ranges against the defaults of TRL, and the words that describe a range."""

import dataclasses
import math
from fnmatch import fnmatch
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
        (trl_keys.Range(1, or_=0), (1, 0), (-1,), "of at least 1, or 0"),
        (trl_keys.Range(-2_000, 0, below=True), (-2_000, -1), (0, 1), "of at least -2,000 and below 0"),
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
        ({"lora_dropout": 0.0}, ["`lora_dropout` has no effect without `use_peft: true`, which makes a new adapter"]),
        ({"use_peft": False, "load_in_4bit": True}, []),
    ],
)
def test_lora_keys_without_an_adapter_are_noted(model: dict[str, Any], notes: list[str]) -> None:
    assert trl_keys.cautions(SimpleNamespace(learning_rate=1e-5), model) == notes


IN_RANGE: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    **dict.fromkeys(("temperature", "repetition_penalty", "num_train_epochs"), ((0.01, 9), (0, -1))),
    **dict.fromkeys(("sapo_temperature_neg", "sapo_temperature_pos"), ((0.01, 9), (0, -1))),
    **dict.fromkeys(("top_p", "top_entropy_quantile", "vllm_gpu_memory_utilization"), ((0.01, 1), (0, 1.01))),
    **dict.fromkeys(("min_p", "lora_dropout"), ((0, 1), (-0.01, 1.01))),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), ((0, 0.99), (-0.01, 1))),
    **dict.fromkeys(("max_completion_length", "max_tool_calling_iterations", "num_iterations"), ((1,), (0, -1))),
    **dict.fromkeys(("steps_per_generation", "generation_batch_size", "lora_r"), ((1,), (0, -1))),
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), ((1,), (0, -1))),
    **dict.fromkeys(("gradient_accumulation_steps", "vllm_tensor_parallel_size"), ((1,), (0, -1))),
    **dict.fromkeys(("beta", "epsilon", "epsilon_high", "delta", "learning_rate", "weight_decay"), ((0, 9), (-0.01,))),
    **dict.fromkeys(("max_grad_norm", "adam_epsilon", "warmup_steps"), ((0, 9), (-0.01,))),
    **dict.fromkeys(("num_generations_eval", "dataloader_num_workers"), ((0, 9), (-1,))),
    **dict.fromkeys(("seed", "data_seed"), ((0, 2**32 - 1), (-1, 2**32))),  # as numpy takes them
    "top_k": ((-1, 0, 50), (-2,)),
    "max_steps": ((-1, 1), (0, -2)),
    "num_generations": ((2,), (1,)),
    "vllm_server_port": ((1, 65_535), (0, 65_536)),
}
"""Numbers on both sides of the ends of each key's range."""


def test_every_number_of_trl_is_limited_to_its_range() -> None:
    assert {name for name, key in trl_keys.TRL_KEYS.items() if key.numbers is not None} == IN_RANGE.keys()
    for key, (inside, outside) in IN_RANGE.items():
        for value in inside:
            assert trl_keys.normalized({key: value}) == {key: value}
        for value in outside:
            with pytest.raises(UserError, match=f"^`{key}` is {value}: set a number "):
                trl_keys.normalized({key: value})


WORDS = {
    "importance_sampling_level": "token sequence",
    "multi_objective_aggregation": "sum_then_normalize normalize_then_sum",
    "scale_rewards": "group batch none",
    "vllm_mode": "server colocate",
    "vllm_importance_sampling_mode": "token_truncate token_mask sequence_truncate sequence_mask",
    "loss_type": "grpo bnpo dr_grpo dapo cispo sapo luspo vespo",
}


@pytest.mark.parametrize("key", WORDS)
def test_every_word_of_trl_is_accepted_and_no_other(key: str) -> None:
    for word in WORDS[key].split():
        assert trl_keys.normalized({key: word}) == {key: word}
    with pytest.raises(UserError, match=f"^`{key}` can't be `sometimes`: choose {' or '.join(WORDS[key].split())}$"):
        trl_keys.normalized({key: "sometimes"})


def test_the_booleans_of_scale_rewards_are_words() -> None:
    """TRL's earlier versions had True for the group's deviation and False for none."""
    given = (True, False, "True", "false", "batch")
    words = [trl_keys.normalized({"scale_rewards": value})["scale_rewards"] for value in given]
    assert words == ["group", "none", "group", "none", "batch"]


READ_BY = {
    "epsilon": "grpo bnpo dr_grpo dapo luspo",
    "epsilon_high": "grpo bnpo dr_grpo dapo luspo cispo",
    "delta": "grpo bnpo dr_grpo dapo luspo",
    "sapo_temperature_neg": "sapo",
    "sapo_temperature_pos": "sapo",
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), "vespo"),
}
"""Loss types whose branch of TRL's `_compute_loss` reads each key."""


def test_a_key_is_ignored_by_the_loss_types_that_do_not_read_it() -> None:
    for loss_type in WORDS["loss_type"].split():
        ignored = [key for key, readers in READ_BY.items() if loss_type not in readers.split()]
        assert trl_keys.ignored_keys(loss_type) == ignored


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"epsilon": 0.2, "epsilon_high": 5.0}, None),
        ({"epsilon": 1.0, "epsilon_high": None}, None),
        ({"epsilon": 0.2, "epsilon_high": None}, "`epsilon_high` is 0.2, and `loss_type: cispo` bounds the ratio"),
        ({"epsilon": 5.0, "epsilon_high": 0.0}, "`epsilon_high` is 0.0, and `loss_type: cispo` bounds the ratio"),
    ],
)
def test_the_bound_of_cispo_is_a_ratio(bounds: dict[str, Any], message: str | None) -> None:
    config = SimpleNamespace(
        **{"loss_type": "cispo", "importance_sampling_level": "token", "multi_objective_aggregation": "", **bounds}
    )
    if message is None:
        trl_keys.check_objective({}, config, sampled_kl=False)
        return
    with pytest.raises(UserError, match=message):
        trl_keys.check_objective({}, config, sampled_kl=False)


def test_a_zero_is_a_value_that_a_loss_may_ignore() -> None:
    config = SimpleNamespace(loss_type="sapo", importance_sampling_level="token", multi_objective_aggregation="")
    trl_keys.check_objective({"epsilon": None, "beta": 0.0}, config, sampled_kl=True)
    with pytest.raises(UserError, match="^`epsilon` has no effect with `loss_type: sapo`: remove it$"):
        trl_keys.check_objective({"epsilon": 0.0}, config, sampled_kl=True)


@pytest.mark.parametrize(("given", "mapping"), [("", {}), ("{}", {}), ({}, {}), ('{"a": 1}', {"a": 1}), (None, None)])
def test_an_empty_text_is_an_empty_mapping(given: Any, mapping: Any) -> None:
    for key in ("chat_template_kwargs", "model_init_kwargs"):
        assert trl_keys.normalized({key: given}) == {key: mapping}


def test_our_defaults_differ_from_trls_in_three_keys() -> None:
    ours = {"disable_dropout": True, "log_completions": True, "num_completions_to_print": 0}
    assert ours == trl_keys.DEFAULTS
    assert not any(NUMBERS[key] == value for key, value in ours.items())


MAY_CHANGE = (
    *("max_steps", "per_device_eval_batch_size", "num_generations_eval", "dataloader_num_workers", "vllm_mode"),
    *("vllm_server_port", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size"),
)
"""Keys of the tables above that change how fast a run is, how long, or what it logs, and no gradient."""


def test_a_resumed_run_keeps_every_key_that_a_step_depends_on() -> None:
    for key in {*IN_RANGE, *WORDS, *READ_BY, "disable_dropout", "optim"}:
        matches = any(fnmatch(key, pattern) for pattern in trl_keys.RESUME_MAY_CHANGE)
        assert matches is (key in MAY_CHANGE), key
