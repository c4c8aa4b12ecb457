"""Settings that decide which distribution tokens are drawn from: a model's published ones, and the user's own.

transformers fills every field that a caller of `generate` leaves at None from `model.generation_config`, and adopts
custom entries of it. A published `sequence_bias` or `min_new_tokens` would steer the sampling, while the loss takes the
policy without it. So `PublishedSettings` puts these settings aside.

A model's class may still bring logits processors of its own, and the log-probabilities of the logits do not show them.
So `ProcessorCheck` compares the processors of each call of `generate` with those that the user's settings alone give.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerationMode, LogitsProcessorList

from grpo_recipes.generation.models import base_model, method_replaced
from grpo_rewards.errors import one_line, shortened

if TYPE_CHECKING:
    from grpo_recipes.generation.models import CausalLM

KEPT = frozenset({
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id",
    "cache_config", "cache_implementation", "max_cache_len", "prefill_chunk_size", "use_cache",
    "compile_config", "disable_compile",
})  # fmt: skip
"""Published fields that stay in force: special tokens, and how (not what) the model computes.

A field that is not listed is neutral, so that a field of a later transformers steers nothing.
"""

WATCHED_TYPES = (bool, int, float, str, list, tuple, dict, Tensor)
"""Types of the attributes that two processors are compared by. Models and random generators are not among them."""
CONSTANT = {"filter_value", "min_tokens_to_keep", "prepared_bias_variables", "unconditional_context"}
"""Attributes of processors that no setting decides."""

LONGEST_VALUE, LONGEST_PHRASE = 60, 80
"""Number of characters that a message shows of a published value, and of a processor."""


# ---- the model's published settings


class PublishedSettings:
    """Generation settings that a model is published with. They steer no completion, which is announced once."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.announce = announce
        self.is_announced = False

    @contextmanager
    def aside(self, policy: nn.Module, requested: GenerationConfig) -> Iterator[None]:
        """Give the model a neutral `generation_config` inside this block, and restore the published object afterwards.

        Args:
            policy: the model without accelerate's wrappers, with or without an adapter.
            requested: the settings that `generate` or `generate_batch` is called with.
        """
        # PEFT's `generate` assigns a configuration of the adapter's wrapper, if somebody has set one, to the base
        # model. Without an adapter both are one object, whose configuration may be replaced and restored twice.
        owners = [base_model(policy)]
        if "generation_config" in vars(policy):
            owners.append(cast("CausalLM", policy))
        published = [(owner, getattr(owner, "generation_config", None)) for owner in owners]
        for owner, config in published:
            if config is not None:
                self.announce_ignored(config, requested)
                owner.generation_config = neutral(config, requested)
        try:
            yield
        finally:
            for owner, config in published:
                owner.generation_config = config  # type: ignore[assignment]  # None if it was None

    def announce_ignored(self, published: GenerationConfig, requested: GenerationConfig) -> None:
        """Announce, the first time only, the published settings that completions do not follow."""
        if self.is_announced or not (ignored := ignored_fields(published, requested)):
            return
        self.is_announced = True
        pairs = ", ".join(f"{name}: {shortened(one_line(value), LONGEST_VALUE)}" for name, value in ignored.items())
        self.announce(f"the model's generation_config is not applied to completions ({pairs})")


def neutral(published: GenerationConfig, requested: GenerationConfig) -> GenerationConfig:
    """Return a configuration that adds to `requested` only the `KEPT` fields of the published one."""
    config = GenerationConfig()
    for name in KEPT:
        setattr(config, name, getattr(published, name, None))
    if requested.do_sample:
        config.do_sample = True  # transformers warns that a `top_k` without it may be ignored
        config.top_k = 0  # transformers' own default keeps the 50 likeliest tokens
    return config


def ignored_fields(published: GenerationConfig, requested: GenerationConfig) -> dict[str, Any]:
    """Return the published settings, by name, whose values are not in force in a call with `requested`."""
    in_force = {**GenerationConfig._get_default_generation_params(), **_set_fields(neutral(published, requested))}
    in_force |= _set_fields(requested)
    given = _set_fields(published)
    # A field without a default is off: False means the same.
    return {name: given[name] for name in sorted(given.keys() - KEPT) if given[name] != in_force.get(name, False)}


def _set_fields(config: GenerationConfig) -> dict[str, Any]:
    """Return the fields of a configuration that are not None, without private ones and metadata."""
    return {
        name: value
        for name, value in vars(config).items()
        if value is not None and not name.startswith("_") and name != "transformers_version"
    }


# ---- the processors of a call of `generate`


class ProcessorCheck:
    """Comparison of the processors of each call of `generate` with those of the user's own settings.

    Args:
        settings: all that the user's settings name, and nothing of the model's generation_config.json.
        temperature: divisor of the logits in the loss.
    """

    def __init__(self, settings: GenerationConfig, temperature: float) -> None:
        # A copy: transformers and a model's class may fill the trainer's own configuration later.
        self.settings = copy.deepcopy(settings)
        self.loss_settings = GenerationConfig(do_sample=True, temperature=temperature)
        """Settings that the loss computes log-probabilities under."""
        self.difference: str | None = None
        """Difference from the settings in the last call, as a phrase, or "", or None if it built no processors."""
        self.filters: list[str] = []
        """Processors of the settings, and a mode other than sampling, that the loss does not apply."""

    @contextmanager
    def watching(self, model: CausalLM) -> Iterator[None]:
        """Compare the processors that `generate` of `model` builds inside this block."""
        stock = model._get_logits_processor
        self.difference = None

        def build(generation_config: GenerationConfig, **inputs: Any) -> LogitsProcessorList:
            found = stock(generation_config=generation_config, **inputs)
            self._compare(model, found, generation_config, inputs)
            return found

        with method_replaced(model, "_get_logits_processor", build):
            yield

    def _compare(
        self, model: CausalLM, found: LogitsProcessorList, config: GenerationConfig, inputs: dict[str, Any]
    ) -> None:
        """Compare a call's processors and generation mode with those of the settings."""
        expected = _described(_built(model, self.settings, config, inputs))
        self.difference = _difference(_described(found), expected)
        mode, expected_mode = config.get_generation_mode(), self.settings.get_generation_mode()
        if mode != expected_mode:
            self.difference = f"the generation mode is {mode.value}, not {expected_mode.value}"
        of_loss = _described(_built(model, self.loss_settings, config, inputs))
        self.filters = [shortened(text, LONGEST_PHRASE) for text in expected if text not in of_loss]
        if expected_mode != GenerationMode.SAMPLE:
            self.filters.append(expected_mode.value)


def _built(
    model: CausalLM, settings: GenerationConfig, config: GenerationConfig, inputs: dict[str, Any]
) -> LogitsProcessorList:
    """Return the processors that transformers builds from `settings` alone for a call with `config` and `inputs`."""
    settings = copy.copy(settings)
    settings._eos_token_tensor = config._eos_token_tensor
    settings.max_length = config.max_length
    if settings.min_new_tokens is not None:  # as `generate` does
        settings.min_length = settings.min_new_tokens + inputs["input_ids_seq_length"]
    # Transformers' own method: a model may have replaced it by one with more processors.
    return GenerationMixin._get_logits_processor(
        model, generation_config=settings, **{**inputs, "logits_processor": LogitsProcessorList()}
    )


def _described(processors: LogitsProcessorList) -> list[str]:
    """Return a description of each processor that two processors share only if they do the same."""
    found = []
    for processor in processors:
        values = []
        for name, value in vars(processor).items():
            if isinstance(value, WATCHED_TYPES) and name not in CONSTANT and not name.startswith("_"):
                values.append(f"{name}={value.tolist() if isinstance(value, Tensor) else value}")
        found.append(f"{type(processor).__name__}({', '.join(values)})")
    return found


def _difference(found: list[str], expected: list[str]) -> str:
    """Return how two descriptions differ, as a phrase, or ""."""
    if found == expected:
        return ""
    more = [shortened(text, LONGEST_PHRASE) for text in found if text not in expected]
    less = [shortened(text, LONGEST_PHRASE) for text in expected if text not in found]
    if not more and not less:
        return "`generate` applies the processors of the settings in another order"
    return f"`generate` applies {', '.join(more) or 'nothing'} where the settings give {', '.join(less) or 'nothing'}"
