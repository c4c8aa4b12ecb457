"""Keys of TRL in a recipe: one row per key in `TRL_KEYS`, and the checks that need no other table.

TRL checks most numbers and words only after the model is loaded, or never. Some keys have no effect together with
others, and TRL does not say so. The functions here raise `UserError` before a model is loaded.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.training_args import OptimizerNames

from grpo_recipes.recipe.losses import LOSS_TYPES
from grpo_recipes.recipe.specs import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Range,
    check_number,
    check_setting,
    not_a_choice,
)
from grpo_rewards.errors import UserError

if TYPE_CHECKING:
    from grpo_recipes.recipe.specs import TrainingConfig

ADAMW_BF16 = "adamw_bf16"
"""Value of `optim` for this project's optimizer (`training/adamw_bf16.py`), which transformers does not have."""

# Full fine-tuning takes about 1e-6, an adapter 1e-5 and the quickstart's tiny model 1e-4.
HIGH_LEARNING_RATE = 1e-2

NUMPY_SEED = Range(0, 2**32, below=True)


@dataclass(frozen=True)
class Key:
    """Properties of one key of TRL, or of all keys that match a pattern such as `logging_*`."""

    numbers: Range | None = None
    """Numbers that the key may have, or None if the type is the only limit."""
    choices: tuple[str, ...] = ()
    """Words that the key may have, or nothing if the type is the only limit."""
    default: Any = None
    """Value in a recipe that does not set the key, or None for TRL's default."""
    read_by: tuple[str, ...] = tuple(LOSS_TYPES)
    """Loss types that read the key. TRL accepts the key with every loss type, and the others ignore it."""
    may_change: bool = False
    """True if a resumed run may change the key, because the key does not change what an optimizer step computes."""


CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""Loss types that clip the importance ratio as PPO does."""

MAY_CHANGE = Key(may_change=True)

TRL_KEYS: Mapping[str, Key] = {
    # Sampling.
    "temperature": Key(POSITIVE),
    "top_p": Key(SHARE),
    "top_k": Key(Range(0, or_=-1)),  # transformers writes 0 for "off", and vLLM writes -1
    "min_p": Key(Range(0, 1)),
    "repetition_penalty": Key(POSITIVE),
    "max_completion_length": Key(COUNT),
    "max_tool_calling_iterations": Key(COUNT),
    # Batches. A group of one completion has nothing to compare.
    "num_generations": Key(Range(2)),
    "num_iterations": Key(COUNT),
    "steps_per_generation": Key(COUNT),
    "generation_batch_size": Key(COUNT),
    "per_device_train_batch_size": Key(COUNT),
    "gradient_accumulation_steps": Key(COUNT),
    # Loss.
    "loss_type": Key(choices=tuple(LOSS_TYPES)),
    "importance_sampling_level": Key(choices=("token", "sequence")),
    "scale_rewards": Key(choices=("group", "batch", "none")),
    "multi_objective_aggregation": Key(choices=("sum_then_normalize", "normalize_then_sum")),
    "beta": Key(NOT_NEGATIVE),
    "epsilon": Key(NOT_NEGATIVE, read_by=CLIPPED),
    "epsilon_high": Key(NOT_NEGATIVE, read_by=(*CLIPPED, "cispo")),
    "delta": Key(NOT_NEGATIVE, read_by=CLIPPED),
    "sapo_temperature_neg": Key(POSITIVE, read_by=("sapo",)),
    "sapo_temperature_pos": Key(POSITIVE, read_by=("sapo",)),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), Key(read_by=("vespo",))),
    "top_entropy_quantile": Key(SHARE),
    # With dropout, the policy differs from itself, and the logged KL is not 0 at step 0.
    "disable_dropout": Key(default=True),
    # Optimizer and schedule.
    "optim": Key(choices=(*(name.value for name in OptimizerNames), ADAMW_BF16)),
    "learning_rate": Key(NOT_NEGATIVE),
    "weight_decay": Key(NOT_NEGATIVE),
    "max_grad_norm": Key(NOT_NEGATIVE),  # 0 disables clipping
    "adam_beta1": Key(Range(0, 1, below=True)),
    "adam_beta2": Key(Range(0, 1, below=True)),
    "adam_epsilon": Key(NOT_NEGATIVE),
    "warmup_steps": Key(NOT_NEGATIVE),
    "max_steps": Key(Range(1, or_=-1), may_change=True),  # the schedule is recomputed for the new length
    "num_train_epochs": Key(POSITIVE),
    "seed": Key(NUMPY_SEED),
    "data_seed": Key(NUMPY_SEED),
    # Adapter.
    "lora_r": Key(COUNT),
    "lora_dropout": Key(Range(0, 1)),
    # Logging and tracking. Completions go to Parquet files, so the terminal does not repeat them.
    "log_completions": Key(default=True),
    "num_completions_to_print": Key(default=0, may_change=True),
    **dict.fromkeys(("logging_*", "log_*", "disable_tqdm", "include_num_input_tokens_seen"), MAY_CHANGE),
    **dict.fromkeys(("report_to", "run_name", "project", "trackio_*"), MAY_CHANGE),
    # Saving, and the hub.
    **dict.fromkeys(("output_dir", "resume_from_checkpoint", "save_*", "push_to_hub", "hub_*"), MAY_CHANGE),
    **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"), MAY_CHANGE),
    # Evaluation.
    **dict.fromkeys(("eval_*", "bf16_full_eval", "fp16_full_eval"), MAY_CHANGE),
    "per_device_eval_batch_size": Key(COUNT, may_change=True),
    "num_generations_eval": Key(NOT_NEGATIVE, may_change=True),  # 0 stands for `num_generations`
    # Computation of a step.
    "dataloader_num_workers": Key(NOT_NEGATIVE, may_change=True),
    **dict.fromkeys(("dataloader_pin_memory", "dataloader_persistent_workers"), MAY_CHANGE),
    **dict.fromkeys(("dataloader_prefetch_factor", "gradient_checkpointing"), MAY_CHANGE),
    "gradient_checkpointing_kwargs": MAY_CHANGE,
    # vLLM.
    **dict.fromkeys(("use_vllm", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_server_*"), MAY_CHANGE),
    **dict.fromkeys(("vllm_group_port", "vllm_max_model_length"), MAY_CHANGE),
    "vllm_mode": Key(choices=("server", "colocate"), may_change=True),
    "vllm_importance_sampling_mode": Key(
        choices=("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    ),
    "vllm_server_port": Key(Range(1, 65535)),
    "vllm_gpu_memory_utilization": Key(SHARE, may_change=True),
    "vllm_tensor_parallel_size": Key(COUNT, may_change=True),
}

DEFAULTS: Mapping[str, Any] = {name: key.default for name, key in TRL_KEYS.items() if key.default is not None}
"""Our defaults that differ from TRL's."""

OBJECTIVE_KEYS = tuple(name for name, key in TRL_KEYS.items() if key.read_by != tuple(LOSS_TYPES))
"""Keys that some loss types read and others ignore."""

RESUME_MAY_CHANGE = (
    "dataset.eval_*",
    "early_stopping_patience",
    "generation_check",
    "micro_batching.*",
    "tool_limits.seconds",
    "tool_limits.failures",
    *(name for name, key in TRL_KEYS.items() if key.may_change),
)
"""Patterns of all keys that a resumed run may change: ours, then TRL's. docs/recipes.md lists them."""


def ignored_keys(loss_type: str) -> list[str]:
    """Return the keys of `OBJECTIVE_KEYS` that have no effect with a loss type."""
    return [name for name in OBJECTIVE_KEYS if loss_type not in TRL_KEYS[name].read_by]


def normalized(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of TRL's keys as words and numbers. Raise `UserError` for a value that its key can't have."""
    result = {name: value.value if isinstance(value, enum.Enum) else value for name, value in values.items()}
    if "scale_rewards" in result:  # TRL accepts booleans too
        word = str(result["scale_rewards"]).lower()
        result["scale_rewards"] = {"true": "group", "false": "none"}.get(word, word)
    for name in ("chat_template_kwargs", "model_init_kwargs"):
        if result.get(name) is not None:
            result[name] = dict(mapping_of(name, result[name]))
    for name, value in result.items():
        choices = TRL_KEYS[name].choices if name in TRL_KEYS else ()
        if choices and value not in choices:
            raise not_a_choice(name, value, choices)
    check_numbers(result)
    return result


def check_numbers(values: Mapping[str, Any]) -> None:
    """Raise `UserError` for a number that is not finite, or is outside the range of its key."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if name in TRL_KEYS and (allowed := TRL_KEYS[name].numbers) is not None:
            check_number(name, value, allowed)
        if not math.isfinite(value):
            raise UserError(f"`{name}`", f"it is {value}", "set a finite number")


def cautions(config: TrainingConfig, model: Mapping[str, Any]) -> list[str]:
    """Return one sentence for each value of `config`, or of the keys of the model, that is probably a mistake."""
    notes = []
    if config.learning_rate > HIGH_LEARNING_RATE:
        rate = f"`learning_rate` is {config.learning_rate:g}, above {HIGH_LEARNING_RATE:g}"
        notes.append(f"{rate}: few models learn at such a rate")
    # This is not an error, because `--use_peft false` turns LoRA off in a recipe that has these keys.
    lora = [key for key, value in model.items() if key.startswith("lora_") and value is not None]
    if lora and not model.get("use_peft"):
        notes.append(f"`{lora[0]}` has no effect without `use_peft: true`, which makes a new adapter")
    return notes


# Objective


def check_objective(given: Mapping[str, Any], config: TrainingConfig, *, sampled_kl: bool) -> None:
    """Raise `UserError` for keys that have no effect, or that together are the objective of no paper.

    Args:
        given: keys that the recipe itself sets.
        config: TRL's training arguments, or the recipe's values under the same names.
        sampled_kl: True if the KL term, if there is one, is TRL's estimate on the sampled tokens.
    """
    loss_type = config.loss_type
    for key in ignored_keys(loss_type):
        if given.get(key) is not None:
            raise UserError(f"`{key}`", f"it has no effect with `loss_type: {loss_type}`", "remove it")
    if loss_type == "cispo":
        bound = config.epsilon if config.epsilon_high is None else config.epsilon_high
        bounds = ", and `loss_type: cispo` bounds the ratio by this number itself (by `epsilon` if it is not set)"
        check_number("epsilon_high", bound, COUNT, bounds)
    level = f"`importance_sampling_level: {config.importance_sampling_level}`"
    other_ratio = f"is not the importance ratio of `loss_type: {loss_type}`"
    check_setting(config, "importance_sampling_level", LOSS_TYPES[loss_type].levels, other_ratio)
    if config.importance_sampling_level == "sequence":
        check_setting(config, "top_entropy_quantile", (1,), f"drops tokens, and {level} needs all of them")
        if config.beta and sampled_kl:
            weighs = f"would weigh the KL of each token by the one ratio of {level}, which is the gradient of no KL"
            check_setting(config, "use_bias_correction_kl", (False,), weighs)
    if config.multi_objective_aggregation == "normalize_then_sum":
        unread = "has no effect with `multi_objective_aggregation: normalize_then_sum`, which divides by deviations"
        check_setting(config, "scale_rewards", ("group",), unread)


def check_advantages(rule: str | None, config: TrainingConfig) -> None:
    """Raise `UserError` for options of TRL that have no effect because `rule` computes the advantages in place of TRL.

    Args:
        rule: the recipe's `advantages`.
        config: TRL's training arguments, or the recipe's values under the same names.
    """
    if rule is None:
        return
    sums = f"has no effect with `advantages: {rule}`, which takes the weighted sum of the rewards"
    check_setting(config, "multi_objective_aggregation", ("sum_then_normalize",), sums)
    divides = f"has no effect with `advantages: {rule}`, which divides by no standard deviation"
    check_setting(config, "scale_rewards", ("none",), divides)


def check_tools(config: TrainingConfig, key: str) -> None:
    """Raise `UserError` for options of generation that do not go with tools.

    Args:
        config: TRL's training arguments, or the recipe's values under the same names.
        key: the recipe's key of the tools, for the message.
    """
    if config.max_tool_calling_iterations is None:
        problem = f"it is missing, and `{key}` without it lets a completion call tools without end"
        fix = "set the largest number of turns with calls, as in `max_tool_calling_iterations: 4`"
        raise UserError("`max_tool_calling_iterations`", problem, fix)
    check_turn_ends(config, key)


def check_turn_ends(config: TrainingConfig, key: str) -> None:
    """Raise `UserError` if a run with tools has stop strings. The arguments are those of `check_tools`."""
    if stop := stop_strings(config.generation_kwargs):
        problem = f"{stop[0]!r} may cut a turn before its end token, and a tool's result would follow an unended turn"
        raise UserError("`generation_kwargs.stop`", problem, f"remove `stop`, which does not go with `{key}`")


# Generation

DROPPED_OPTIONS = {"encoder_repetition_penalty": 1.0, "min_length": 0, "min_new_tokens": 0, "repetition_penalty": 1.0}
"""Generation options that transformers 5.23 drops in continuous batching, each with its neutral value."""


def check_generation(config: TrainingConfig) -> None:
    """Raise `UserError` for invalid stop strings, and for options that continuous batching would silently drop.

    Args:
        config: TRL's training arguments, or the recipe's values under the same names.
    """
    given = mapping_of("generation_kwargs", config.generation_kwargs)
    stop = stop_strings(given)
    if not config.use_transformers_continuous_batching:
        return
    options = {"repetition_penalty": config.repetition_penalty, **given}
    dropped = [name for name, neutral in DROPPED_OPTIONS.items() if options.get(name) not in (None, neutral)]
    if stop:
        dropped.append("stop")
    if dropped:
        place, problem = "`use_transformers_continuous_batching`", f"it drops {', '.join(dropped)}"
        raise UserError(place, problem, "set it to false, or remove the option")


def stop_strings(generation_kwargs: Mapping[str, Any] | str | None) -> tuple[str, ...]:
    """Return the strings that end a completion: `stop` of TRL's `generation_kwargs`, which is vLLM's name for them.

    Raises:
        UserError: `stop` is not a string or a list of strings, or transformers' key `stop_strings` is used, which TRL
            can't pass on.
    """
    given = mapping_of("generation_kwargs", generation_kwargs)
    if given.get("stop_strings") is not None:
        fix = "write `stop` instead, which vLLM understands as well"
        raise UserError("`generation_kwargs.stop_strings`", "TRL can't pass it on", fix)
    if (stop := given.get("stop")) is None:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list | tuple) or not all(isinstance(text, str) and text for text in strings):
        raise UserError("`generation_kwargs.stop`", f"it can't be {stop!r}", "write a string or a list of strings")
    return tuple(strings)


def mapping_of(name: str, value: Mapping[str, Any] | str | None) -> Mapping[str, Any]:
    """Return the value of a key that `GRPOConfig` reads as a mapping, or as a mapping written as JSON.

    Args:
        name: name of the key, for the message.
        value: value of the key. None stands for an empty mapping.

    Raises:
        UserError: it is anything else.
    """
    given: Any = value or {}
    if isinstance(given, str):
        with suppress(json.JSONDecodeError):
            given = json.loads(given)
    if not isinstance(given, Mapping):
        raise UserError(f"`{name}`", f"it can't be {given!r}", "write a mapping, or one in JSON")
    return given
