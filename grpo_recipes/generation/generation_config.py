"""A model's published generation settings, put aside while completions are sampled from it.

transformers fills every field that a caller of `generate` leaves at None from `model.generation_config`, and adopts custom
entries of it. A published `sequence_bias` or `min_new_tokens` would steer the sampling, while the loss takes the plain policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import GenerationConfig

from grpo_recipes.generation.models import base_model
from grpo_rewards.errors import one_line, shortened

KEPT = frozenset({
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id",
    "cache_config", "cache_implementation", "max_cache_len", "prefill_chunk_size", "use_cache",
    "compile_config", "disable_compile",
})  # fmt: skip
"""Fields of the published configuration that stay in force: special tokens, and how (not what) the model computes.

A field that is not listed is neutral, so that a field of a later transformers steers nothing.
"""

LONGEST_VALUE = 60
"""Characters of a published value that an announcement shows."""


class PublishedSettings:
    """The generation settings that a model is published with. They steer no completion, which is announced once."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.announce = announce
        self.is_announced = False

    @contextmanager
    def aside(self, policy: nn.Module, asked: GenerationConfig) -> Iterator[None]:
        """Give the model a neutral `generation_config` inside this block, and the published object back afterwards.

        Args:
            policy: the model without accelerate's wrappers, with or without an adapter.
            asked: the settings that `generate` or `generate_batch` is called with.
        """
        # PEFT's `generate` assigns a configuration of the adapter's wrapper, if somebody has set one, to the base model.
        base = base_model(policy)
        owners = [base] if base is policy or "generation_config" not in vars(policy) else [base, policy]
        published = [(owner, getattr(owner, "generation_config", None)) for owner in owners]
        for owner, config in published:
            if config is not None:
                self.announce_ignored(config, asked)
                owner.generation_config = neutral(config, asked)
        try:
            yield
        finally:
            for owner, config in published:
                owner.generation_config = config

    def announce_ignored(self, published: Any, asked: GenerationConfig) -> None:
        """Announce, the first time only, the published settings that completions asked for with `asked` do not follow."""
        if not self.is_announced and (ignored := ignored_fields(published, asked)):
            self.is_announced = True
            self.announce(described(ignored))


def neutral(published: Any, asked: GenerationConfig) -> GenerationConfig:
    """Return a configuration that adds to `asked` only the `KEPT` fields of the published one."""
    config = GenerationConfig()
    for name in KEPT:
        setattr(config, name, getattr(published, name, None))
    if asked.do_sample:
        config.do_sample = True  # transformers warns that a `top_k` without it may be ignored
        config.top_k = 0  # transformers' own default keeps the 50 likeliest tokens
    return config


def ignored_fields(published: Any, asked: GenerationConfig) -> dict[str, Any]:
    """Return the published settings, by name, whose values are not in force in a call with `asked`."""
    in_force = {**GenerationConfig._get_default_generation_params(), **_set_fields(neutral(published, asked))}
    in_force |= _set_fields(asked)
    given = _set_fields(published)
    # A field without a default is off: False says the same.
    return {name: given[name] for name in sorted(given.keys() - KEPT) if given[name] != in_force.get(name, False)}


def described(ignored: dict[str, Any]) -> str:
    """Return one line that names ignored settings and their values."""
    pairs = ", ".join(f"{name}: {shortened(one_line(value), LONGEST_VALUE)}" for name, value in ignored.items())
    return f"the model's generation_config is not applied to completions ({pairs})"


def _set_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a configuration that are not None, without private ones and metadata."""
    return {
        name: value
        for name, value in vars(config).items()
        if value is not None and not name.startswith("_") and name != "transformers_version"
    }
