"""What makes the completions of an evaluation: transformers' `generate` or its continuous batching; vLLM is `vllm_engine`'s."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import GenerationConfig

from grpo_recipes.checks.model_sizes import check_model_sizes
from grpo_recipes.checks.tokenizer import load_after_trial
from grpo_recipes.data.hub import hub_answers
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.generation.agreement import differences, disagreement
from grpo_recipes.generation.generation_config import PublishedSettings
from grpo_recipes.generation.groups import Turn, decoding
from grpo_recipes.generation.models import base_model, is_float32, unfit
from grpo_recipes.generation.stop_strings import Ends, StopStrings
from grpo_recipes.runs.weights import ADAPTER_CONFIG, adapter_config, tokenizer_source
from grpo_rewards.errors import UserError, one_line

CHECKED = 32
"""Rows of the first batch whose log-probabilities are held against the model."""

logger = logging.getLogger(__name__)


Complete = Callable[[list[Any], Settings], list[str]]
"""Completes each prompt once, in order, by the temperature, length and seed of the settings."""


class Engine(Protocol):
    """A `Complete` that names the sampling settings in force."""

    def __call__(self, prompts: list[Any], settings: Settings) -> list[str]:
        """Complete each prompt once, in order."""

    def sampling(self, settings: Settings) -> dict[str, Any]:
        """Return the sampling settings of every completion, ready for JSON, under the engine's own names."""


def load_engine(name: str, prompts: Sequence[Any] = ()) -> Engine:
    """Return the engine of a model or adapter, its tokenizer tried on some prompts first.

    Raises `UserError` if it can't be loaded, or its weights are incomplete, `UserError` for a hostile tokenizer.
    """
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    adapter = Path(name) / ADAPTER_CONFIG
    tokenizer = load_tokenizer(name, prompts)
    try:
        if adapter.is_file():
            with warnings.catch_warnings():
                # PEFT only warns where it fills what is missing with the values of a new adapter.
                warnings.filterwarnings("error", message="Found missing adapter keys")
                model = AutoPeftModelForCausalLM.from_pretrained(
                    name, dtype="auto", use_safetensors=True, trust_remote_code=False
                )
            missing = []
        else:
            model, loading = AutoModelForCausalLM.from_pretrained(
                name, dtype="auto", use_safetensors=True, trust_remote_code=False, output_loading_info=True
            )
            missing = sorted(loading["missing_keys"])
    except Exception as error:  # transformers raises whatever the values of a stranger's files lead to
        reason = one_line(error) or type(error).__name__
        raise UserError(f"{name}: the model can't be loaded: {reason}") from error
    if missing:  # transformers fills them with random numbers
        raise UserError(
            f"{name}: its weights lack {len(missing)} of the model's tensors (such as {missing[0]}): copy or download it again"
        )
    return transformers_engine(model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer)


def load_tokenizer(name: str, prompts: Sequence[Any] = ()) -> Any:
    """Return the tokenizer of a model or adapter, which pads with its end token if it has no other.

    A bounded child tries it on `prompts` first. Raises `UserError` if it can't be loaded, or if
    it is too slow or too large, or fails on a prompt.
    """
    from transformers import AutoTokenizer

    source = tokenizer_source(name)

    def load() -> Any:
        try:
            return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        except Exception as error:  # transformers and tokenizers raise whatever a stranger's values lead to
            reason = one_line(error) or type(error).__name__
            raise UserError(f"{name}: its tokenizer can't be loaded: {reason}") from error

    check_model_sizes(source, local_only=False)  # transformers reads them to find the tokenizer's class
    tokenizer = load_after_trial(source, load, prompts)
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise UserError(
            f"{name}: its tokenizer has neither a `pad_token` nor an `eos_token`: set one in its tokenizer_config.json"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def checkpoint_dtype(name: str) -> str | None:
    """The dtype that transformers loads a model, or an adapter's base, in: `float32`; None where its configuration has none."""
    from transformers import AutoConfig

    model = _whole_model(name)
    here_only = Path(model).exists() or not hub_answers()
    try:
        config = AutoConfig.from_pretrained(model, local_files_only=here_only, trust_remote_code=False)
    except Exception:  # whatever it is, loading it says what is wrong
        return None
    dtype = config.get_text_config().dtype or config.dtype
    return str(dtype).removeprefix("torch.") if dtype is not None else None


def published_config(name: str) -> GenerationConfig:
    """Return the generation_config of a model, or of an adapter's base, that is not loaded."""
    from transformers import AutoConfig

    model = _whole_model(name)
    try:
        return GenerationConfig.from_pretrained(model)
    except OSError:  # it has none: transformers makes one of its configuration
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(model, trust_remote_code=False))


def _whole_model(name: str) -> str:
    """`name` itself, or of an adapter in a folder its base."""
    if not (Path(name) / ADAPTER_CONFIG).is_file():
        return name
    config = adapter_config(name)
    return name if config is None else str(config.base_model_name_or_path)


def transformers_engine(model: Any, tokenizer: Any) -> Engine:
    """Return the engine of a loaded model."""
    return Transformers(model, tokenizer)


class Transformers:
    """Completions by transformers: continuous batching on a GPU, padded batches on a CPU and for stop strings.

    Continuous batching starts prompts as others end; with sampling, two runs may therefore draw differently. It knows no
    stop strings.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.padded = Padded(model, tokenizer)

    def __call__(self, prompts: list[Any], settings: Settings) -> list[str]:
        """One completion of each prompt, in order."""
        if self.model.device.type == "cuda" and not settings.stop:
            return complete_continuously(self.model, self.tokenizer, prompts, settings, self.padded.published)
        return self.padded(prompts, settings)

    def sampling(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of `GenerationConfig` in force; the others are neutral."""
        asked = _generation(self.model, self.tokenizer, settings)
        given = {name: value for name, value in asked.items() if value is not None}
        return {**given, "stop": list(settings.stop)}


class Padded:
    """Completions by transformers' `generate`, in padded batches, each prompt run once and finished rows dropped.

    A few rows of the first batch are held against the model, as in training; if they differ, transformers' own loop
    generates all of them.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer, self.is_checked = model, tokenizer, False
        self.published = PublishedSettings(logger.warning)
        self.stock_because = ""
        """Why transformers' own loop generates, if it does."""

    @torch.no_grad()
    def __call__(self, prompts: list[Any], settings: Settings) -> list[str]:
        """One completion of each prompt, in order."""
        was_training = self.model.training
        self.model.eval()
        if not self.stock_because and (reason := unfit(self.model)):
            self._leave_to_transformers(reason)
        completions: list[str] = []
        stop = _stop_strings(settings, self.tokenizer)
        try:
            with _seeded(self.model, settings.seed):
                for start in range(0, len(prompts), settings.batch_size):
                    batch = prompts[start : start + settings.batch_size]
                    tokens, doubt = self._complete(batch, settings, stop)
                    if doubt:
                        self._leave_to_transformers(doubt)
                        tokens, _ = self._complete(batch, settings, stop)
                    completions += self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        finally:
            self.model.train(was_training)
        return completions

    def _complete(
        self, prompts: list[Any], settings: Settings, stop: StopStrings | None
    ) -> tuple[list[list[int]], str]:
        """The tokens of each completion and what pads them, and why they can't be trusted, if they can't."""
        inputs = _inputs(prompts, self.tokenizer).to(self.model.device)
        turn = None
        if not self.stock_because:
            every = 0 if self.is_checked else max(1, len(prompts) // CHECKED)
            turn = Turn(record_every=every, temperature=settings.temperature or 1.0)
        ends = [] if stop is None else [Ends(stop)]
        asked = _generation(self.model, self.tokenizer, settings)
        published = self.published.aside(self.model, GenerationConfig(**asked))
        with published, decoding(base_model(self.model), turn, ends):
            tokens = self.model.generate(**inputs, **asked)
        completions = tokens[:, inputs["input_ids"].shape[1] :].tolist()
        for end in ends:
            completions = end.cut(completions)
        if turn is not None and turn.declined:
            self._leave_to_transformers(turn.declined)
        return completions, self._doubt(inputs, completions, turn, settings)

    def _doubt(self, inputs: Any, completions: list[list[int]], turn: Turn | None, settings: Settings) -> str:
        """By how much the scored rows differ from the model's own log-probabilities; empty within the tolerance."""
        if turn is None or turn.declined or turn.log_probs is None:
            return ""
        rows = turn.recorded_rows(len(completions))
        prompts = [inputs["input_ids"][row][inputs["attention_mask"][row].bool()].tolist() for row in rows]
        ends = set(end_tokens(self.model.generation_config, self.tokenizer))
        made = [_up_to_end(completions[row], ends) for row in rows]
        gaps = differences(self.model, prompts, made, turn.log_probs, turn.temperature)
        self.is_checked = True
        mean, largest = float(gaps.mean()), float(gaps.max())
        reason = disagreement(mean, largest, is_float32=is_float32(self.model), where="the first batch")
        return reason and f"group decoding picks tokens under other log-probabilities than the model's ({reason})"

    def _leave_to_transformers(self, reason: str) -> None:
        self.stock_because = reason
        logger.warning("completions are generated by transformers' own loop: %s", reason)


@torch.no_grad()
def complete_continuously(
    model: Any, tokenizer: Any, prompts: list[Any], settings: Settings, published: PublishedSettings
) -> list[str]:
    """The same by transformers' continuous batching, which pads nothing and starts a prompt as soon as another ends.

    `generate_batch` returns the completions in the order of the prompts, without those that are missing, which it only logs
    (transformers 5.20 to 5.23). Raises `UserError` if a completion failed or is missing.
    """
    asked = GenerationConfig(**_generation(model, tokenizer, settings))
    with _seeded(model, settings.seed), published.aside(model, asked):
        outputs = model.generate_batch(inputs=token_ids(prompts, tokenizer), generation_config=asked)
    _check_all_completed(list(outputs.values()), len(prompts))
    return tokenizer.batch_decode([output.generated_tokens for output in outputs.values()], skip_special_tokens=True)


@contextmanager
def _seeded(model: Any, seed: int) -> Iterator[None]:
    """Inside this block torch draws from `seed`; afterwards its random state is as before."""
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _generation(model: Any, tokenizer: Any, settings: Settings) -> dict[str, Any]:
    """Return the options of `generate`. `PublishedSettings` keeps the model's own from filling the others."""
    return generation_options(settings, end_tokens(model.generation_config, tokenizer), tokenizer.pad_token_id)


def generation_options(settings: Settings, ends: list[int], pad: int | None) -> dict[str, Any]:
    """Return the fields of `GenerationConfig` that an evaluation asks for."""
    sampled = {"do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0}
    greedy = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    return {
        **(sampled if settings.temperature > 0 else greedy),
        "repetition_penalty": 1.0,
        "max_new_tokens": settings.max_new_tokens,
        "eos_token_id": ends,
        "pad_token_id": pad,
    }


def _check_all_completed(outputs: list[Any], expected: int) -> None:
    errors = [output.error for output in outputs if output.error is not None]
    failed = expected - len(outputs) + len(errors)
    if failed:
        reason = one_line(errors[0]) if errors else "generation stopped before they were made"
        raise UserError(
            f"{failed} of {expected} completions failed ({reason}): run the same command again, which keeps the batches that "
            "are done, or set a smaller --batch_size or --max_new_tokens in another --output"
        )


def end_tokens(generation: Any, tokenizer: Any) -> list[int]:
    """What ends a completion in TRL's training: the tokenizer's end of text, and every one that the model declares."""
    declared = generation.eos_token_id
    ids = [tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])]
    return sorted({token for token in ids if token is not None})


def _up_to_end(tokens: list[int], ends: set[int]) -> list[int]:
    """A completion without the padding behind its end."""
    return tokens[: next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))]


def _stop_strings(settings: Settings, tokenizer: Any) -> StopStrings | None:
    return StopStrings(settings.stop, tokenizer) if settings.stop else None


def _inputs(prompts: list[Any], tokenizer: Any) -> Any:
    """Prompts as tensors, padded on the left."""
    texts, is_text = _texts(prompts, tokenizer)
    return tokenizer(texts, add_special_tokens=is_text, padding=True, padding_side="left", return_tensors="pt")


def token_ids(prompts: list[Any], tokenizer: Any) -> list[list[int]]:
    """The tokens of each prompt, as the policy sees it in training."""
    texts, is_text = _texts(prompts, tokenizer)
    return tokenizer(texts, add_special_tokens=is_text)["input_ids"]


def _texts(prompts: list[Any], tokenizer: Any) -> tuple[list[str], bool]:
    """Prompts as text, and whether the tokenizer should add special tokens: a chat template writes them itself."""
    if isinstance(prompts[0], str):
        return prompts, True
    return tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False), False
