"""Engines of an evaluation: what every engine does, and the engine that runs in transformers.

The engines that run in vLLM are in `vllm_engine.py`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig

from grpo_recipes.data.rendering import rendered
from grpo_recipes.evaluation.saved_model import SavedModel
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.generation.agreement import differences, disagreement
from grpo_recipes.generation.groups import STOCK_LOOP, Turn, decoding
from grpo_recipes.generation.models import base_model, computes_in_float32, unfit
from grpo_recipes.generation.sampling_settings import PublishedSettings
from grpo_recipes.generation.stop_strings import Ends, StopStrings
from grpo_recipes.generation.verified import FastWay
from grpo_recipes.tools.loop import Ids
from grpo_rewards.attention import without_cudnn_attention
from grpo_rewards.errors import UserError

CHECKED = 32
"""Number of rows of the first batch whose log-probabilities are compared with the model's."""

logger = logging.getLogger(__name__)


class Engine(ABC):
    """Generator of completions: a model in transformers, or in vLLM (`vllm_engine.py`).

    Attributes:
        tokenizer: Tokenizer of the model.
        positions: Number of tokens of prompt and completion that the model can read.
    """

    tokenizer: Any
    positions: float

    @abstractmethod
    def generate(self, prompts: list[Ids], settings: Settings, room: Sequence[int] | None = None) -> list[Ids]:
        """Return the token IDs of one completion of each prompt, in order, up to their end token.

        Args:
            prompts: Token IDs of each prompt.
            settings: Settings of sampling.
            room: Largest length of each completion in tokens, if it is not `settings.max_new_tokens`.
        """

    @abstractmethod
    def sampling(self, settings: Settings) -> dict[str, Any]:
        """Return the sampling settings in force, for JSON, under the engine's own names."""

    def __call__(self, prompts: list[Any], settings: Settings) -> list[str]:
        """Complete each prompt once, in order."""
        completions = self.generate(token_ids(prompts, self.tokenizer, settings), settings)
        # From the tokens: vLLM's own text lacks the bytes of a character that was cut off.
        return self.tokenizer.batch_decode(completions, skip_special_tokens=True)


def load_engine(model: SavedModel, tokenizer: Any) -> Transformers:
    """Return the engine of a model or adapter, on the GPU if there is one.

    Args:
        model: Model or adapter.
        tokenizer: Tokenizer that can pad.

    Raises:
        UserError: The model can't be loaded, or its weights are incomplete.
    """
    return Transformers(model.load().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer)


class Transformers(Engine):
    """Completions in padded batches.

    Batches are decoded in groups as in training. Some rows of the first batch are compared with the model's own
    log-probabilities. If they differ, transformers' own loop generates everything.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.published = PublishedSettings(logger.warning)
        self.groups = FastWay(logger.warning, STOCK_LOOP)
        """Group decoding."""
        # Some architectures have no such limit, as Bloom.
        self.positions = getattr(model.config, "max_position_embeddings", None) or float("inf")

    @torch.no_grad()
    def generate(self, prompts: list[Ids], settings: Settings, room: Sequence[int] | None = None) -> list[Ids]:
        """Return the token IDs of one completion of each prompt, as `Engine.generate` does."""
        most = [settings.max_new_tokens] * len(prompts) if room is None else room
        settings = replace(settings, max_new_tokens=max(most))
        was_training = self.model.training
        self.model.eval()
        if not self.groups.doubt and (reason := unfit(self.model)):
            self.groups.record(reason)
        completions: list[Ids] = []
        stop = StopStrings(settings.stop, self.tokenizer) if settings.stop else None
        try:
            with seeded(self.model, settings.seed):
                for start in range(0, len(prompts), settings.batch_size):
                    completions += self._complete(prompts[start : start + settings.batch_size], settings, stop)
        except torch.OutOfMemoryError as error:
            problem = f"{settings.batch_size} completions at a time take more memory than the GPU has"
            fix = "set a smaller one, or a smaller --max_new_tokens, and another --output"
            raise UserError("--batch_size", problem, fix) from error
        finally:
            self.model.train(was_training)
        return [completion[:length] for completion, length in zip(completions, most, strict=True)]

    def sampling(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of `GenerationConfig` in force. All others are neutral."""
        options = generation_options(settings, self.model.generation_config, self.tokenizer)
        return {**{name: value for name, value in options.items() if value is not None}, "stop": list(settings.stop)}

    def _complete(self, prompts: list[Ids], settings: Settings, stop: StopStrings | None) -> list[Ids]:
        """Return the tokens of one completion of each prompt, generated by transformers in one padded batch."""
        width, pad, device = max(map(len, prompts)), self.tokenizer.pad_token_id, self.model.device
        # Padded on the left.
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        turn = None
        if not self.groups.doubt:
            record_every = 0 if self.groups.is_verified else max(1, len(prompts) // CHECKED)
            turn = Turn(record_every=record_every, temperature=settings.temperature or 1.0)
        ends = [] if stop is None else [Ends(stop)]
        options = generation_options(settings, self.model.generation_config, self.tokenizer)
        published = self.published.aside(self.model, GenerationConfig(**options))
        with published, decoding(base_model(self.model), turn, ends):
            tokens = self.model.generate(input_ids=ids, attention_mask=mask, **options)
        completions = tokens[:, width:].tolist()
        for end in ends:
            completions = end.cut(completions)
        completions = [_without_padding(completion, options["eos_token_id"]) for completion in completions]
        if turn is not None and turn.declined:
            self.groups.record(turn.declined)
        elif turn is not None and turn.log_probs is not None:
            difference = partial(self._difference, prompts, completions, turn, turn.log_probs)
            if self.groups.check(difference):
                return self._complete(prompts, settings, stop)
        return completions

    def _difference(self, prompts: list[Ids], completions: list[Ids], turn: Turn, log_probs: torch.Tensor) -> str:
        """Return how the log-probabilities of the recorded rows differ from the model's, or an empty text."""
        rows = turn.recorded_rows(len(completions))
        given, made = [prompts[row] for row in rows], [completions[row] for row in rows]
        with without_cudnn_attention():
            gaps = differences(self.model, given, made, log_probs, turn.temperature)
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


def generation_options(settings: Settings, published: GenerationConfig, tokenizer: Any) -> dict[str, Any]:
    """Return the fields of `GenerationConfig` that an evaluation sets.

    `PublishedSettings` keeps the published config of the model from filling the others.
    """
    sampled = {"do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0}
    greedy = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    return {
        **(sampled if settings.temperature > 0 else greedy),
        "repetition_penalty": 1.0,
        "max_new_tokens": settings.max_new_tokens,
        "eos_token_id": end_tokens(published, tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
    }


def end_tokens(generation: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a completion in TRL's training, from tokenizer and generation config."""
    declared = generation.eos_token_id
    ids = [tokenizer.eos_token_id, *(declared if isinstance(declared, list) else [declared])]
    return sorted({token for token in ids if token is not None})


def _without_padding(tokens: Ids, ends: Sequence[int]) -> Ids:
    """Return a completion up to its end token."""
    for place, token in enumerate(tokens):
        if token in ends:
            return tokens[: place + 1]
    return tokens


def token_ids(prompts: list[Any], tokenizer: Any, settings: Settings) -> list[Ids]:
    """Return the tokens of each prompt, as the policy gets them in training."""
    if isinstance(prompts[0], str):
        return tokenizer(prompts)["input_ids"]
    texts = [rendered(prompt, tokenizer, settings.chat_template_kwargs or {}) for prompt in prompts]
    # The chat template has already added the special tokens.
    return tokenizer(texts, add_special_tokens=False)["input_ids"]
