"""Replacements inside TRL and transformers at run time. Overrides of the trainer's methods are in `trainer.py`.

In this order: weights, seed and settings of vLLM; continuous batching; arguments of rewards; durations; malformed
calls; counts of completions that end with a stop string; files of an evaluation's completions; tables of completions;
training arguments that hide their secrets.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from peft import PeftModel
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    TrainingArguments,
    set_seed,
)
from transformers import trainer as transformers_trainer
from trl import GRPOConfig
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer
from trl.trainer.utils import is_async_callable

from grpo_recipes.generation.models import run_folder
from grpo_recipes.generation.sampling_settings import PublishedSettings
from grpo_recipes.generation.stop_strings import StopStrings
from grpo_recipes.process.faults import no_exit
from grpo_recipes.runs.completions import storable
from grpo_recipes.tools.loop import read_turn
from grpo_rewards.completions import copied
from grpo_rewards.errors import UserError
from grpo_rewards.redaction import HIDDEN, hidden_places, is_secret, redacted
from grpo_rewards.reward import callable_name

if TYPE_CHECKING:
    from grpo_recipes.generation.models import TRLTrainer

NOT_SENT_BY_TRL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0}
"""Sampling settings of vLLM that TRL leaves to the engine, with their neutral values."""

CPU_BATCH_TOKENS = 512
"""Number of tokens of a forward of continuous batching on a CPU, unless more rows are decoded at once. Longer prompts
go through the model in parts."""


# ---- vLLM


@contextmanager
def sampling_by_seed(args: GRPOConfig | None) -> Iterator[None]:
    """Build a trainer inside this block to let `args.seed` decide what a colocated vLLM samples.

    The engine draws from this process's random state, which it seeds when it is built. TRL passes it the rank as seed,
    so every run would sample with the same noise.
    """
    yield
    if args is not None and args.use_vllm and args.vllm_mode == "colocate":
        # Ranks that share an engine (tensor parallel) must draw alike, other ranks must not.
        set_seed(args.seed + PartialState().process_index // args.vllm_tensor_parallel_size)


@contextmanager
def neutral_engine() -> Iterator[None]:
    """Build a trainer inside this block to keep a colocated vLLM from reading the model's generation_config.json."""
    # TRL has no argument for it. It builds the engine as `vllm_generation.LLM`, which exists if vLLM is installed.
    engine = getattr(vllm_generation, "LLM", None)
    if engine is None:
        yield
        return
    vllm_generation.LLM = partial(engine, generation_config="vllm")
    try:
        yield
    finally:
        vllm_generation.LLM = engine


def send_settings(trainer: TRLTrainer, published: PublishedSettings) -> None:
    """Send vLLM every sampling setting explicitly, and announce which settings of the model it does not follow.

    An engine or server takes what a request leaves out from the model's generation_config.json.

    Raises:
        UserError: a server cuts every completion at the model's `max_new_tokens`, whatever a request contains.
    """
    vllm, config = trainer.vllm_generation, trainer.model.generation_config
    settings = GenerationConfig(
        do_sample=True,
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k,
        min_p=trainer.min_p,
        repetition_penalty=trainer.repetition_penalty,
        max_new_tokens=trainer.max_completion_length,
    )
    published.announce_ignored(config, settings)
    _check_server_limit(trainer, config.max_new_tokens)
    given = dict(trainer.args.generation_kwargs or {})
    if not given.get("ignore_eos"):
        # With `generation_config="vllm"` an engine ends completions at the tokenizer's own end token only.
        own = given.get("stop_token_ids") or []
        given["stop_token_ids"] = sorted({*own, *trainer.eos_token_ids})
    vllm.generation_kwargs = {**NOT_SENT_BY_TRL, **given}


def _check_server_limit(trainer: TRLTrainer, published: int | None) -> None:
    """Raise `UserError` if a server limits completions to fewer tokens than `max_completion_length`."""
    if trainer.args.vllm_mode != "server" or not trainer.accelerator.is_main_process:
        return
    if published is None or published >= trainer.max_completion_length:
        return
    server = trainer.vllm_generation.vllm_client.get_server_info()
    if server["model_config"].get("generation_config") != "vllm":
        problem = (
            f"it is {trainer.max_completion_length}, and the vLLM server cuts every completion at {published} tokens, "
            "the `max_new_tokens` of the model's generation_config.json"
        )
        raise UserError("`max_completion_length`", problem, "start the server with `--generation-config vllm`")


def send_policy(trainer: TRLTrainer) -> None:
    """Send vLLM copies of the merged weights of the active adapter, and no tensor that vLLM has no name for.

    TRL 1.16 merges the adapter, yields views of the parameters one by one, and unmerges after the last one
    (`VLLMGeneration._iter_named_params`). A server's weights are packed 1 GiB at a time, so the last pack, of a small
    model the only one, is read after that: the server would generate with the base
    (docs/upstream/trl-lora-server-weights.md).

    A second call changes nothing. Without vLLM, or without an adapter, there is nothing to do.
    """
    model, vllm = trainer.model, getattr(trainer, "vllm_generation", None)
    if vllm is None or not isinstance(model, PeftModel) or hasattr(vllm, "_named_params_of_trl"):
        return
    vllm._named_params_of_trl = vllm._iter_named_params

    def merged() -> Iterator[tuple[str, torch.Tensor]]:
        for sent, tensor in vllm._named_params_of_trl():
            name = _name_in_model(sent, model.active_adapter)
            if name is not None:
                yield name, tensor.clone()  # vLLM reads it when the adapter is no longer merged

    vllm._iter_named_params = merged


def _name_in_model(sent: str, adapter: str) -> str | None:
    """Return the name of a tensor in the model without adapters, or None for a tensor that is part of an adapter."""
    # TRL skips names with the tuner's prefix (`lora_`) and strips `modules_to_save.default.`. Left are other adapters'
    # copies of `modules_to_save`, those of a policy under another name, and trainable tokens.
    if "trainable_tokens_" in sent:
        return None
    name = sent.replace(f"modules_to_save.{adapter}.", "").replace(".token_adapter", "")
    return None if "modules_to_save." in name else name


# ---- continuous batching of transformers


def refuse_cast(model: torch.nn.Module, args: GRPOConfig) -> None:
    """Raise `UserError` if TRL would cast weights that are trained in place to 16 bits, and Adam's state with them.

    TRL casts with `args.bf16` or `args.fp16`. DeepSpeed keeps its own float32 weights.
    """
    if not (args.bf16 or args.fp16) or args.deepspeed_plugin is not None:
        return
    cast = torch.bfloat16 if args.bf16 else torch.float16
    if any(parameter.requires_grad and parameter.dtype != cast for parameter in model.parameters()):
        problem = f"it casts the trained weights to {cast} in place, and most updates would be lost"
        fix = "set it to false, or `bf16` and `fp16` to false"
        raise UserError("`use_transformers_continuous_batching`", problem, fix)


@contextmanager
def continuous_batching(
    config: ContinuousBatchingConfig, model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> Iterator[None]:
    """Give the cache, on a CPU, the size that it needs inside this block: TRL's call knows no limits of memory."""
    blocks, tokens = config.num_blocks, config.max_batch_tokens
    # Left alone, transformers takes a share of all free memory. It also reserves a mask of 8,192 tokens by the full
    # cache: gigabytes, for which it refuses a cache that is large enough.
    on_cpu = model.device.type == "cpu"
    if on_cpu and blocks is None:
        config.num_blocks = sum(-(-(len(prompt) + max_new_tokens) // config.page_size) for prompt in prompts)
    if on_cpu and tokens is None:
        config.max_batch_tokens = max(CPU_BATCH_TOKENS, len(prompts))
    try:
        yield
    finally:
        config.num_blocks, config.max_batch_tokens = blocks, tokens


# ---- rewards


def on_copies(reward: Any) -> Any:
    """Return a reward function that is called with copies of its arguments. A reward model is returned as it is.

    TRL passes all rewards the lists that it logs, so that a reward which overwrites them would change what later
    rewards and the table of completions hold.
    """
    if isinstance(reward, torch.nn.Module):
        return reward
    name = callable_name(reward)

    def call(**columns: Any) -> Any:
        return _one_dimensional(name, reward(**copied(columns)))

    async def call_async(**columns: Any) -> Any:
        with no_exit():  # an exit that leaves a task ends TRL's event loop, and TRL would wait for ever
            return _one_dimensional(name, await reward(**copied(columns)))

    return call_async if is_async_callable(reward) else call


def _one_dimensional(name: str, scores: Any) -> Any:
    """Return the scores of a reward. Raises `ValueError` for an array with other than one dimension."""
    if isinstance(scores, np.ndarray) and scores.ndim != 1:
        raise ValueError(f"reward `{name}` returned an array of shape {scores.shape}: return one number per completion")
    return scores


# ---- durations


@contextmanager
def steady_clock() -> Iterator[None]:
    """Let transformers measure durations inside this block without the jumps of the system's clock."""
    stock = transformers_trainer.speed_metrics
    ahead = time.time() - time.monotonic()

    def speed_metrics(split: str, start_time: float, *args: Any, **kwargs: Any) -> dict[str, float]:
        jump = time.time() - time.monotonic() - ahead
        return stock(split, start_time + jump, *args, **kwargs)

    transformers_trainer.speed_metrics = speed_metrics
    try:
        yield
    finally:
        transformers_trainer.speed_metrics = stock


# ---- calls: TRL reads a turn with malformed JSON as text, and ends the run at JSON that is nested deeply


@contextmanager
def malformed_calls(trainer: TRLTrainer) -> Iterator[None]:
    """Let TRL read the turns of a policy with tools inside this block as `read_turn` does."""
    stock = grpo_trainer.parse_response
    grpo_trainer.parse_response = read_turn if trainer.tools else stock
    try:
        yield
    finally:
        grpo_trainer.parse_response = stock


# ---- stop strings: TRL knows one end of a completion, a token, and counts others as cut off at `max_completion_length`


def take_over_mask(trainer: TRLTrainer) -> bool:
    """Return True if TRL was to mask truncated completions, and keep it from it: `correct_counts` does so instead."""
    masks, trainer.mask_truncated_completions = trainer.mask_truncated_completions, False
    return masks


def correct_counts(
    trainer: TRLTrainer, output: tuple[Any, ...], stop: StopStrings, masks_truncated: bool
) -> tuple[Any, ...]:
    """Correct the metrics of truncated completions that TRL's `_generate` has logged, and its mask.

    Args:
        trainer: the trainer.
        output: the return value of TRL's `_generate`.
        stop: strings that end a completion.
        masks_truncated: True to mask truncated completions.

    Returns:
        `output` with the corrected mask.
    """
    prompt_ids, completion_ids, tool_mask, *rest = output
    masks = tool_mask or [[1] * len(ids) for ids in completion_ids]
    truncated = are_truncated(trainer, completion_ids, stop)
    local = torch.tensor([truncated, [sum(mask) for mask in masks]], device=trainer.accelerator.device)
    cut, lengths = trainer.accelerator.gather(local.T.contiguous()).T
    ended = lengths[cut == 0].float() if not cut.all() else torch.zeros(1)
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    # TRL has just appended its own values: these take their places.
    metrics["completions/clipped_ratio"][-1] = cut.float().mean().item()
    metrics["completions/mean_terminated_length"][-1] = ended.mean().item()
    metrics["completions/min_terminated_length"][-1] = ended.min().item()
    metrics["completions/max_terminated_length"][-1] = ended.max().item()
    if masks_truncated:
        # TRL's loss multiplies its mask by the mask of tool results, so a masked completion can go there.
        tool_mask = []
        for mask, is_truncated in zip(masks, truncated, strict=True):
            tool_mask.append([0] * len(mask) if is_truncated else mask)
    return prompt_ids, completion_ids, tool_mask, *rest


def are_truncated(trainer: TRLTrainer, completion_ids: Sequence[Sequence[int]], stop: StopStrings | None) -> list[bool]:
    """Return, for each completion, True if neither an end token nor a stop string ends it."""
    ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
    return [ids[-1] not in ends and not (stop and stop.end(ids)) for ids in completion_ids]


# ---- completions of an evaluation during training


@contextmanager
def separate_eval_completions(trainer: TRLTrainer, dataset: Any, prefix: str) -> Iterator[None]:
    """Log completions inside this block to a table of their own, written to `<prefix>_completions_<step>.parquet`.

    TRL 1.16 logs training and evaluation through one table (`GRPOTrainer._logs`) and writes both to
    `completions_<step>.parquet`, so an evaluation overwrites the training completions of its step. TRL's table also
    holds one generation batch, and this one every row of the evaluation. Afterwards the training completions of the
    step, on disk and still to be logged, are as they were.

    Args:
        trainer: the trainer.
        dataset: the dataset of the evaluation, or None for the trainer's own. With a dict of datasets nothing is done:
            TRL evaluates each of them by itself, with its own prefix, and so enters this block again.
        prefix: the prefix of the evaluation's metrics.
    """
    if isinstance(trainer.eval_dataset if dataset is None else dataset, dict):
        yield
        return
    table = run_folder(trainer.args) / "completions" / f"completions_{trainer.state.global_step:05d}.parquet"
    aside = table.with_suffix(".training")
    training, trainer._logs = trainer._logs, _unbounded(trainer._logs)
    writes = trainer.accelerator.is_main_process
    if writes and table.is_file():
        table.rename(aside)
    try:
        yield
    finally:
        trainer._logs = training
        if writes and table.is_file():
            # A prefix may hold the name of a dataset, and so a hub ID, `owner/name`.
            safe = re.sub(r"[^\w.-]", "-", prefix)
            table.rename(table.with_name(f"{safe}_{table.name}"))
        if writes and aside.is_file():
            aside.rename(table)


@contextmanager
def storable_logs(trainer: TRLTrainer) -> Iterator[None]:
    """Log inside this block with conversations that fit a table, whatever the policy has written.

    TRL 1.16 writes the messages as structs of Arrow, so that two calls with different types of an argument, or calls
    without arguments, end the run.
    """
    if not (trainer.log_completions and trainer.accelerator.is_main_process):
        yield
        return
    logs = trainer._logs
    trainer._logs = {**logs, **{name: storable(logs[name]) for name in ("prompt", "completion")}}
    try:
        yield
    finally:
        trainer._logs = logs


def _unbounded(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return an empty table like TRL's `_logs`, without a limit on its rows."""
    empty: dict[str, Any] = {}
    for name, column in logs.items():
        # The columns of rewards and of extra fields are tables of columns themselves.
        empty[name] = deque() if isinstance(column, deque) else defaultdict(deque)
    return empty


# ---- training arguments


def hide_secrets(args: TrainingArguments) -> None:
    """Make `args` hide its secrets when it is pickled, copied or turned into a dictionary.

    transformers pickles its arguments into `training_args.bin` with each save, and passes them to every tracker as
    configuration. Attributes keep their true values, which training needs: the URL of a vLLM server, the hub's token.
    """
    # A copy would lose the attributes that a script sets on its own object later, so the object changes its class. A
    # file pickled from it names the class that it had before, and can be loaded without this package.
    original: Any = type(args)
    if not issubclass(original, _HidesSecrets):
        args.__class__ = _hiding(original)


class _HidesSecrets(TrainingArguments):
    """Methods by which transformers, torch and trackers read all arguments."""

    def to_dict(self) -> dict[str, Any]:
        return redacted(super().to_dict())

    def __reduce_ex__(self, protocol: Any) -> Any:
        original = type(self).__bases__[1]
        shown: Any = object.__new__(original)
        vars(shown).update(without_secrets(vars(self)))
        return shown.__reduce_ex__(0)  # later protocols do not accept another class than the object's


@cache
def _hiding(original: Any) -> Any:
    """Return a subclass of `original`, of the same name, whose instances hide their secrets."""
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    return type(original.__name__, (_HidesSecrets, original), names)


def without_secrets(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of an object with a placeholder for each secret.

    DeepSpeed's configuration is an object with attributes of its own, which may name trackers and their keys.
    """
    shown: dict[str, Any] = {}
    for name, value in attributes.items():
        if isinstance(value, (HfDeepSpeedConfig, DeepSpeedPlugin)):
            duplicate = object.__new__(type(value))
            vars(duplicate).update(without_secrets(vars(value)))
            shown[name] = duplicate
        else:
            hidden = HIDDEN if is_secret(name, value) else redacted(value)
            # Types stay where nothing is hidden: `redacted` makes lists of tuples and dictionaries of other mappings.
            shown[name] = value if next(hidden_places(hidden), None) is None else hidden
    return shown
