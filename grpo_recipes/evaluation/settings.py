"""Settings of an evaluation: how completions are sampled, what makes one right, and what a recipe sets of this."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_recipes.checks.tokenizer import CHAT_TEMPLATE_PATH, ChatTemplate
from grpo_recipes.evaluation import accuracy
from grpo_recipes.recipe.trl_keys import check_numbers, mapping_of
from grpo_recipes.runs import files
from grpo_rewards.errors import UserError, shortened
from grpo_rewards.reward import BaseReward

DEFAULT_NEW_TOKENS = 512


@dataclass(frozen=True)
class Settings:
    """Settings of sampling and scoring in an evaluation.

    Attributes:
        tags: Names of the reasoning tag and the answer tag.
        samples: Completions per problem.
        temperature: Divisor of the logits, with no other filter, or 0 for greedy decoding.
        max_new_tokens: Maximum length of a completion in tokens, the results of tools included.
        batch_size: Completions generated together. With sampling, a seed reproduces only the same batch size.
        seed: Random seed for sampling. The global random state is restored afterwards.
        strict: Rewards that a strictly right completion must earn in full. Empty for the default with `tags`, or None
            if the rows have no golds, so that no accuracy is measured.
        stop: Strings that end a completion, as in training (`generation_kwargs.stop` of the recipe).
        tools: Facts about tools and their limits that identify the evaluation, for JSON, or None without tools.
        chat_template_kwargs: TRL's, with which prompts of messages are rendered, or None.

    Raises:
        UserError: A number is below 1, the temperature is below 0, or several greedy samples are requested.
    """

    tags: tuple[str, str] = ("think", "answer")
    samples: int = 1
    temperature: float = 0.0
    max_new_tokens: int = 256
    batch_size: int = 64
    seed: int = 0
    strict: tuple[BaseReward, ...] | None = ()
    stop: tuple[str, ...] = ()
    chat_template_kwargs: Mapping[str, Any] | None = None
    tools: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.strict == ():
            object.__setattr__(self, "strict", accuracy.strict_rewards((), self.tags))
        for name in ("samples", "batch_size", "max_new_tokens"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"--{name}", f"it is {value}", "set it to at least 1")
        if not 0 <= self.temperature < math.inf:
            fix = "set it to 0 for greedy decoding, or above 0"
            raise UserError("--temperature", f"it is {self.temperature:g}", fix)
        if self.samples > 1 and self.temperature <= 0:
            raise UserError("--samples", f"{self.samples} greedy samples are identical", "set --temperature above 0")


# Values of a recipe


def training_sampling(recipe: Mapping[str, Any]) -> dict[str, float]:
    """Return how a recipe's training samples, by the names of `GenerationConfig`: temperature, filters, penalty.

    Args:
        recipe: Keys of the recipe, or of the record of its run. TRL's defaults stand for missing keys.

    Raises:
        UserError: A value is not a number, or is out of range.
    """
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    given = {**recipe, **mapping_of("generation_kwargs", recipe.get("generation_kwargs"))}  # TRL lets the latter win
    for name in (*sampling, "min_p"):
        if (value := given.get(name)) is None:
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
