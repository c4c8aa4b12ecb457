"""Rows of TRL's keys: ranges against the defaults of TRL, and the words that describe a range."""

import dataclasses
import math
from fnmatch import fnmatch
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.generation import logits_process
from trl import GRPOConfig, ModelConfig

from grpo_recipes.recipe import trl_keys
from tests.support.errors import refused

NUMBERS = {field.name: field.default for config in (GRPOConfig, ModelConfig) for field in dataclasses.fields(config)}


def test_every_row_names_a_key_of_trl_and_allows_its_default() -> None:
    for key in trl_keys.TRL_KEYS:
        if "*" not in key:
            trl_keys.normalized({key: NUMBERS[key]})


def test_a_number_without_a_range_must_be_finite() -> None:
    trl_keys.check_numbers({"entropy_target": -3.0, "warmup_steps": None, "bf16": True})
    with refused("`entropy_target`", "nan"):
        trl_keys.check_numbers({"entropy_target": math.nan})


@pytest.mark.parametrize(
    ("rate", "model", "keys"),
    [
        (1e-2, {"use_peft": False, "load_in_4bit": True}, []),
        (0.0101, {"use_peft": False}, ["`learning_rate`"]),
        (1e-6, {"lora_r": 8}, ["`lora_r`"]),
        (1e-6, {"lora_r": 8, "use_peft": True}, []),
        (1e-6, {"lora_r": None}, []),
        (1e-6, {"lora_dropout": 0.0}, ["`lora_dropout`"]),
    ],
)
def test_a_high_learning_rate_and_lora_keys_without_an_adapter_are_noted(
    rate: float, model: dict[str, Any], keys: list[str]
) -> None:
    notes = trl_keys.cautions(SimpleNamespace(learning_rate=rate), model)
    assert len(notes) == len(keys)
    assert all(key in note for key, note in zip(keys, notes, strict=True))


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
            with refused(f"`{key}`", value):
                trl_keys.normalized({key: value})


WORDS = {
    "importance_sampling_level": "token sequence",
    "multi_objective_aggregation": "sum_then_normalize normalize_then_sum",
    "scale_rewards": "group batch none",
    "vllm_mode": "server colocate",
    "vllm_importance_sampling_mode": "token_truncate token_mask sequence_truncate sequence_mask",
    "loss_type": "grpo bnpo dr_grpo dapo cispo sapo luspo vespo",
}


def test_every_word_of_trl_is_accepted_and_no_other() -> None:
    for key, words in WORDS.items():
        for word in words.split():
            assert trl_keys.normalized({key: word}) == {key: word}
        with refused(f"`{key}`", "`sometimes`", *words.split()):
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


def check_objective(given: dict[str, Any], sampled_kl: bool = True, **changes: Any) -> None:
    """Check an objective that is GSPO's apart from the changes."""
    fine = {
        **{"loss_type": "grpo", "importance_sampling_level": "sequence", "top_entropy_quantile": 1.0, "beta": 0.1},
        **{"use_bias_correction_kl": False, "multi_objective_aggregation": "sum_then_normalize"},
        **{"scale_rewards": "batch"},
    }
    trl_keys.check_objective(given, SimpleNamespace(**{**fine, **changes}), sampled_kl=sampled_kl)


def test_the_bound_of_cispo_is_a_ratio() -> None:
    for epsilon, high, wrong in ((0.2, 5.0, None), (1.0, None, None), (0.2, None, 0.2), (5.0, 0.0, 0.0)):
        bounds = {"epsilon": epsilon, "epsilon_high": high}
        cispo = {"loss_type": "cispo", "importance_sampling_level": "token", **bounds}
        if wrong is None:
            check_objective({}, **cispo)
            continue
        with refused("`epsilon_high`", wrong, "`loss_type: cispo`"):
            check_objective({}, **cispo)


def test_a_zero_is_a_value_that_a_loss_may_ignore() -> None:
    sapo = {"loss_type": "sapo", "importance_sampling_level": "token"}
    check_objective({"epsilon": None, "beta": 0.0}, **sapo)
    with refused("`epsilon`", "`loss_type: sapo`"):
        check_objective({"epsilon": 0.0}, **sapo)


def test_stop_strings_are_read_from_generation_kwargs() -> None:
    for given, strings in (
        (None, ()),
        ({"top_k": 3, "stop": None}, ()),
        ({"stop": ["</a>", "\n"]}, ("</a>", "\n")),
        ('{"stop": "</a>"}', ("</a>",)),
    ):
        assert trl_keys.stop_strings(given) == strings
    for names in ([], ["a"]):
        with refused("`generation_kwargs.stop_strings`", "`stop`"):
            trl_keys.stop_strings({"stop_strings": names})


def test_a_turn_with_tools_is_not_cut_by_a_stop_string() -> None:
    config = SimpleNamespace(max_tool_calling_iterations=2, generation_kwargs={"top_k": 3})
    trl_keys.check_tools(config, "tools")
    config.generation_kwargs = {"stop": ["</x>"]}
    with refused("`generation_kwargs.stop`", "'</x>'", "`tools`"):
        trl_keys.check_tools(config, "tools")


def test_options_that_continuous_batching_drops_are_refused() -> None:
    for penalty, kwargs, lost in (
        (1.2, None, ["repetition_penalty"]),
        (1.2, {"repetition_penalty": 1.0}, []),
        (1.0, {"min_new_tokens": 3, "min_length": 2}, ["min_length", "min_new_tokens"]),
        (1.0, {"min_length": 0, "min_new_tokens": None}, []),
        (1.0, {"stop": ["5"]}, ["stop"]),
    ):
        config = SimpleNamespace(repetition_penalty=penalty, generation_kwargs=kwargs)
        config.use_transformers_continuous_batching = False
        trl_keys.check_generation(config)
        config.use_transformers_continuous_batching = True
        if not lost:
            trl_keys.check_generation(config)
            continue
        with refused("`use_transformers_continuous_batching`", *lost):
            trl_keys.check_generation(config)


def test_transformers_still_drops_the_same_processors() -> None:
    dropped = {
        name
        for name, processor in vars(logits_process).items()
        if getattr(processor, "supports_continuous_batching", None) is False
    }
    kinds = ("EncoderRepetitionPenalty", "MinLength", "MinNewTokensLength", "RepetitionPenalty")
    assert dropped == {f"{kind}LogitsProcessor" for kind in kinds}


def test_an_objective_of_no_paper_is_refused() -> None:
    check_objective({})
    check_objective({}, use_bias_correction_kl=True, beta=0.0)
    check_objective({}, use_bias_correction_kl=True, sampled_kl=False)
    check_objective({}, multi_objective_aggregation="normalize_then_sum", scale_rewards="group")
    for key, value, more in (
        ("importance_sampling_level", "sequence", {"loss_type": "dapo"}),
        ("importance_sampling_level", "token", {"loss_type": "luspo"}),
        ("top_entropy_quantile", 0.5, {}),
        ("use_bias_correction_kl", True, {}),
        ("scale_rewards", "batch", {"multi_objective_aggregation": "normalize_then_sum"}),
    ):
        with refused(f"`{key}`", f"`{value}`"):
            check_objective({}, **{**more, key: value})


def test_an_empty_text_is_an_empty_mapping() -> None:
    for key in ("chat_template_kwargs", "model_init_kwargs"):
        for given, mapping in (("", {}), ("{}", {}), ({}, {}), ('{"a": 1}', {"a": 1}), (None, None)):
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
