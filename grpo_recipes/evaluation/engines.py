"""Engine of an evaluation that runs in transformers.

vLLM is in `vllm_engine.py`. It uses the tokenizer, prompts and options defined here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import BitsAndBytesConfig, GenerationConfig
from trl import ModelConfig, get_quantization_config

from grpo_recipes.checks.packages import missing_quantization
from grpo_recipes.checks.tokenizer import CHAT_TEMPLATE_PATH, ChatTemplate, read_tokenizer
from grpo_recipes.data.hub import hub_answers, is_missing
from grpo_recipes.data.prompts import rendered
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.generation.agreement import differences, disagreement
from grpo_recipes.generation.groups import STOCK_LOOP, Turn, decoding
from grpo_recipes.generation.loading import complete_weights
from grpo_recipes.generation.models import base_model, computes_in_float32, describe_nonfinite, keep_4bit_layout, unfit
from grpo_recipes.generation.sampling_settings import PublishedSettings
from grpo_recipes.generation.stop_strings import Ends, StopStrings
from grpo_recipes.generation.verified import FastWay
from grpo_recipes.recipe.trl_keys import check_numbers, generation_mapping
from grpo_recipes.runs import files
from grpo_recipes.runs.files import RECORD
from grpo_recipes.runs.record import record_of_model
from grpo_recipes.runs.weights import (
    ADAPTER_CONFIG,
    adapter_config,
    check_descriptions,
    check_weight_files,
    tokenizer_source,
)
from grpo_rewards.attention import without_cudnn_attention
from grpo_rewards.errors import UserError, one_line, shortened
from grpo_rewards.files import relative_to

CHECKED = 32
"""Number of rows of the first batch whose log-probabilities are compared with the model's."""

Ids = list[int]
Complete = Callable[[list[Any], Settings], list[str]]
"""Function that completes each prompt once, in order."""

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """Callable that completes prompts and names its sampling settings."""

    @property
    def positions(self) -> float:
        """Number of tokens of prompt and completion that the model can read."""

    def __call__(self, prompts: list[Any], settings: Settings) -> list[str]:
        """Complete each prompt once, in order."""

    def generate(self, prompts: list[Ids], settings: Settings, room: Sequence[int] | None = None) -> list[Ids]:
        """Return the token IDs of one completion of each prompt, in order, up to their end token.

        Args:
            prompts: Token IDs of each prompt.
            settings: Settings of sampling.
            room: Largest length of each completion in tokens, if it is not `settings.max_new_tokens`.
        """

    def sampling(self, settings: Settings) -> dict[str, Any]:
        """Return the sampling settings in force, for JSON, under the engine's own names."""


def check_model(name: str) -> None:
    """Raise `UserError` if `name` is the path of no folder, or of a folder that `check_model_folder` refuses."""
    if is_missing(name) or Path(name).is_dir():
        check_model_folder(Path(name))


def check_model_folder(folder: Path) -> None:
    """Raise an error if a local folder holds no model or adapter that can be loaded.

    No model is loaded: only headers of weight files and JSON files are read, also those of an adapter's local base.

    Raises:
        UserError: There is no such folder, it holds no model, or one of its files is missing or damaged.
    """
    if not folder.is_dir():
        problem = f"the model can't be loaded: there is no such folder{relative_to(folder)}"
        raise UserError(folder, problem, "name the folder of a model or a run")
    adapter = folder / ADAPTER_CONFIG
    check_descriptions(folder)
    if not adapter.is_file() and not (folder / "config.json").is_file():
        from transformers.trainer_utils import get_last_checkpoint  # takes seconds

        newest = get_last_checkpoint(folder)  # an unfinished run has models only in its checkpoints
        fix = "name the folder of a model, an adapter or a finished run"
        if newest:
            fix = f"its newest checkpoint is {newest}; name that folder"
        raise UserError(folder, "it holds no model (no config.json, no adapter_config.json)", fix)
    restore = "copy or download the folder again"
    try:
        check_weight_files(folder)
    except files.RunError as error:
        raise UserError(error.place, error.problem, f"{restore}, or name another checkpoint") from error
    if not adapter.is_file():
        return
    base = files.read_object(adapter, files.ADAPTER, restore)["base_model_name_or_path"]
    if base and Path(base).is_dir():
        check_model_folder(Path(base))
    elif base and Path(base).is_absolute():
        fix = "set `base_model_name_or_path` in its adapter_config.json"
        raise UserError(folder, f"it is an adapter, and its base {base} is missing", fix)


def load_engine(name: str, tokenizer: Any) -> Transformers:
    """Return the engine of a model or adapter, on the GPU if there is one.

    Args:
        name: Folder, or name on the hub.
        tokenizer: Tokenizer from `load_tokenizer`.

    Raises:
        UserError: The model can't be loaded, or its weights are incomplete.
    """
    return Transformers(load_model(name).to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer)


def load_model(name: str) -> Any:
    """Return a model, or an adapter on its base, in the dtype of its files and in main memory.

    A base that was quantized for training is quantized again, and bitsandbytes puts it on the GPU if there is one.

    Raises:
        UserError: The model can't be loaded, or its weights are incomplete or not finite.
    """
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    is_adapter = (Path(name) / ADAPTER_CONFIG).is_file()
    quantization = trained_quantization(Path(name)) if is_adapter else None
    try:
        with complete_weights():
            if is_adapter:
                model = AutoPeftModelForCausalLM.from_pretrained(
                    name, dtype="auto", quantization_config=quantization, use_safetensors=True, trust_remote_code=False
                )
                keep_4bit_layout(model)
            else:
                model = AutoModelForCausalLM.from_pretrained(
                    name, dtype="auto", use_safetensors=True, trust_remote_code=False
                )
    except UserError:
        raise
    except Exception as error:  # transformers raises any class for a damaged file
        raise UserError(name, f"the model can't be loaded ({_reason(error)})", "name a model that can") from error
    if clause := describe_nonfinite(model):
        raise UserError(name, clause, "name an earlier checkpoint or another model")
    return model


def trained_quantization(folder: Path) -> BitsAndBytesConfig | None:
    """Return how the run that trained an adapter quantized its base, or None if it did not, or left no record.

    Raises:
        UserError: The base can't be quantized here.
    """
    record = record_of_model(folder)
    if record is None:
        return None
    for error in missing_quantization(record["recipe"]):
        raise UserError(folder, f"its base was quantized by {error.place}, and {error.problem}", error.fix)
    keys = {field.name for field in fields(ModelConfig)}
    try:
        config = ModelConfig(**{key: value for key, value in record["recipe"].items() if key in keys})
        return get_quantization_config(config)
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(folder, f"its {RECORD} describes no model ({one_line(error)})", "restore the file") from error


def quantization_of(name: str) -> dict[str, str]:
    """Return how an adapter's base is quantized, for `made_with` of `evaluation.json`, or {} if it is not."""
    folder = Path(name)
    config = trained_quantization(folder) if (folder / ADAPTER_CONFIG).is_file() else None
    if config is None:
        return {}
    if config.load_in_8bit:
        return {"quantization": "8 bits"}
    return {"quantization": f"4 bits ({config.bnb_4bit_quant_type})"}


def _reason(error: Exception) -> str:
    return one_line(error) or type(error).__name__


def load_tokenizer(name: str, chat_template: ChatTemplate | None = None) -> Any:
    """Return the tokenizer of a model or adapter like `saved_tokenizer`, with the end token to pad with if need be.

    Raises:
        UserError: See `saved_tokenizer`, or the tokenizer has neither token.
    """
    tokenizer = saved_tokenizer(name, chat_template)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        problem = "its tokenizer has neither a `pad_token` nor an `eos_token`"
        raise UserError(name, problem, "set one in its tokenizer_config.json")
    return tokenizer


def saved_tokenizer(name: str, chat_template: ChatTemplate | None = None) -> Any:
    """Return the tokenizer of a model or adapter as it was saved, with a recipe's chat template if there is one.

    Raises:
        UserError: The tokenizer can't be loaded.
    """
    return read_tokenizer(tokenizer_source(name), chat_template, trust_remote_code=False)


def checkpoint_dtype(name: str) -> str | None:
    """Return the dtype in which transformers loads a model or an adapter's base, such as `float32`, or None."""
    from transformers import AutoConfig

    model = _base_name(name)
    is_local = Path(model).exists() or not hub_answers()
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=is_local, trust_remote_code=False)
    except Exception:  # loading the model reports the same error with its fix
        return None
    dtype = config.get_text_config().dtype or config.dtype
    return str(dtype).removeprefix("torch.") if dtype is not None else None


def published_config(name: str) -> GenerationConfig:
    """Return the generation_config of a model, or of an adapter's base, without loading the model."""
    from transformers import AutoConfig

    model = _base_name(name)
    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:  # without the file, transformers makes one from the model's configuration
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(model, trust_remote_code=False))


def _base_name(name: str) -> str:
    """Return the name of an adapter's base model, or `name` if it is no adapter's folder."""
    config = adapter_config(name) if (Path(name) / ADAPTER_CONFIG).is_file() else None
    return name if config is None else str(config.base_model_name_or_path)


class Transformers:
    """Completions in padded batches.

    Batches are decoded in groups as in training. Some rows of the first batch are compared with the model's own
    log-probabilities. If they differ, transformers' own loop generates everything.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.published = PublishedSettings(logger.warning)
        self.groups = FastWay(logger.warning, STOCK_LOOP)
        """Group decoding."""

    @property
    def positions(self) -> float:
        """Number of tokens that the model can read. Some architectures have no such limit, as Bloom."""
        return getattr(self.model.config, "max_position_embeddings", None) or float("inf")

    def __call__(self, prompts: list[Any], settings: Settings) -> list[str]:
        """Complete each prompt once, in order."""
        completions = self.generate(token_ids(prompts, self.tokenizer, settings), settings)
        return self.tokenizer.batch_decode(completions, skip_special_tokens=True)

    def generate(self, prompts: list[Ids], settings: Settings, room: Sequence[int] | None = None) -> list[Ids]:
        """Return the token IDs of one completion of each prompt, in order, up to their end token.

        Args:
            prompts: Token IDs of each prompt.
            settings: Settings of sampling.
            room: Largest length of each completion in tokens, if it is not `settings.max_new_tokens`.
        """
        if room is not None:
            settings = replace(settings, max_new_tokens=max(room))
        try:
            completions = self.generate_padded(prompts, settings)
        except torch.OutOfMemoryError as error:
            problem = f"{settings.batch_size} completions at a time take more memory than the GPU has"
            fix = "set a smaller one, or a smaller --max_new_tokens, and another --output"
            raise UserError("--batch_size", problem, fix) from error
        if room is None:
            return completions
        return [completion[:most] for completion, most in zip(completions, room, strict=True)]

    def sampling(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of `GenerationConfig` in force. All others are neutral."""
        options = sampling_options(self.model, self.tokenizer, settings)
        return {**{name: value for name, value in options.items() if value is not None}, "stop": list(settings.stop)}

    @torch.no_grad()
    def generate_padded(self, prompts: list[Ids], settings: Settings) -> list[Ids]:
        """Return a completion of each prompt, in order, by transformers' `generate` in padded batches."""
        was_training = self.model.training
        self.model.eval()
        if not self.groups.doubt and (reason := unfit(self.model)):
            self.groups.record(reason)
        completions: list[Ids] = []
        ends = set(end_tokens(self.model.generation_config, self.tokenizer))
        stop = StopStrings(settings.stop, self.tokenizer) if settings.stop else None
        try:
            with seeded(self.model, settings.seed):
                for start in range(0, len(prompts), settings.batch_size):
                    batch = prompts[start : start + settings.batch_size]
                    tokens = self._complete(batch, settings, stop)
                    completions += [_without_padding(completion, ends) for completion in tokens]
        finally:
            self.model.train(was_training)
        return completions

    def _complete(self, prompts: list[Ids], settings: Settings, stop: StopStrings | None) -> list[Ids]:
        """Return the padded tokens of each completion."""
        inputs = _padded(prompts, self.tokenizer.pad_token_id, self.model.device)
        turn = None
        if not self.groups.doubt:
            record_every = 0 if self.groups.is_verified else max(1, len(prompts) // CHECKED)
            turn = Turn(record_every=record_every, temperature=settings.temperature or 1.0)
        ends = [] if stop is None else [Ends(stop)]
        options = sampling_options(self.model, self.tokenizer, settings)
        published = self.published.aside(self.model, GenerationConfig(**options))
        with published, decoding(base_model(self.model), turn, ends):
            tokens = self.model.generate(**inputs, **options)
        completions = tokens[:, inputs["input_ids"].shape[1] :].tolist()
        for end in ends:
            completions = end.cut(completions)
        if turn is not None and turn.declined:
            self.groups.record(turn.declined)
        elif turn is not None and turn.log_probs is not None:
            doubt = self.groups.check(partial(self._difference, inputs, completions, turn, turn.log_probs))
            if doubt:
                return self._complete(prompts, settings, stop)
        return completions

    def _difference(
        self, inputs: Mapping[str, torch.Tensor], completions: list[Ids], turn: Turn, log_probs: torch.Tensor
    ) -> str:
        """Return how the log-probabilities of the recorded rows differ from the model's, or an empty text."""
        rows = turn.recorded_rows(len(completions))
        prompts = [inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist() for row in rows]
        ends = set(end_tokens(self.model.generation_config, self.tokenizer))
        made = [_without_padding(completions[row], ends) for row in rows]
        with without_cudnn_attention():
            gaps = differences(self.model, prompts, made, log_probs, turn.temperature)
        mean, largest = float(gaps.mean()), float(gaps.max())
        full_precision = computes_in_float32(self.model, self.model.device)
        reason = disagreement(mean, largest, is_float32=full_precision, where="the first batch")
        return reason and f"group decoding picks tokens under other log-probabilities than the model's ({reason})"


@contextmanager
def seeded(model: Any, seed: int) -> Iterator[None]:
    """Seed torch for a block, and restore its random state afterwards."""
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def sampling_options(model: Any, tokenizer: Any, settings: Settings) -> dict[str, Any]:
    """Return the arguments of `generate`. `PublishedSettings` keeps the model's own config from filling the others."""
    return generation_options(settings, end_tokens(model.generation_config, tokenizer), tokenizer.pad_token_id)


def generation_options(settings: Settings, ends: list[int], pad: int | None) -> dict[str, Any]:
    """Return the fields of `GenerationConfig` that an evaluation sets."""
    sampled = {"do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0}
    greedy = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    return {
        **(sampled if settings.temperature > 0 else greedy),
        "repetition_penalty": 1.0,
        "max_new_tokens": settings.max_new_tokens,
        "eos_token_id": ends,
        "pad_token_id": pad,
    }


def training_sampling(recipe: Mapping[str, Any]) -> dict[str, float]:
    """Return how a recipe's training samples, by the names of `GenerationConfig`: temperature, filters, penalty.

    Args:
        recipe: Keys of the recipe, or of the record of its run. TRL's defaults stand for missing keys.

    Raises:
        UserError: A value is no number, or is out of range.
    """
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    given = {**recipe, **generation_mapping(recipe.get("generation_kwargs"))}  # TRL lets the latter win
    for name in (*sampling, "min_p"):
        value = given.get(name)
        if value is None:
            continue
        if not files.NUMBER.holds(value):
            raise UserError(f"`{name}`", f"it is {shortened(repr(value))}", "set a number")
        sampling[name] = value
    check_numbers(sampling)
    sampling["top_k"] = max(sampling["top_k"], 0)  # vLLM writes -1 for "off"
    return sampling


def template_kwargs_of(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return TRL's `chat_template_kwargs` of a recipe, or None if it has none. Raises `UserError` for other values."""
    given = recipe.get("chat_template_kwargs") or {}
    if not isinstance(given, Mapping):
        raise UserError("`chat_template_kwargs`", f"it is {shortened(repr(given))}", "write a mapping")
    return dict(given) or None


def chat_template_of(recipe: Mapping[str, Any], *, is_named: bool) -> ChatTemplate | None:
    """Return the chat template that replaces the model's, or None. Raises `UserError` if it can't be read.

    Args:
        recipe: Keys of the recipe, or of the record of a run.
        is_named: True if the user named the recipe. A run's tokenizer was saved with its chat template, and the path in
            a record may be another machine's.
    """
    return ChatTemplate.read(recipe.get(CHAT_TEMPLATE_PATH)) if is_named else None


def end_tokens(generation: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a completion in TRL's training, from tokenizer and generation config."""
    declared = generation.eos_token_id
    ids = [tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])]
    return sorted({token for token in ids if token is not None})


def _without_padding(tokens: Ids, ends: set[int]) -> Ids:
    """Return a completion up to its end token."""
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    return tokens


def _padded(prompts: list[Ids], pad: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return prompts as tensors (N, T), padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def token_ids(prompts: list[Any], tokenizer: Any, settings: Settings) -> list[Ids]:
    """Return the tokens of each prompt, as the policy gets them in training."""
    if isinstance(prompts[0], str):
        return tokenizer(prompts)["input_ids"]
    given = settings.chat_template_kwargs or {}
    texts = [rendered(prompt, tokenizer, given) for prompt in prompts]
    # The chat template has already added the special tokens.
    return tokenizer(texts, add_special_tokens=False)["input_ids"]
