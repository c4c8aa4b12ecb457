"""Settings of an evaluation: how completions are sampled, and what makes one right."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_recipes.evaluation import accuracy
from grpo_rewards.errors import UserError
from grpo_rewards.reward import BaseReward


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
            value = getattr(self, name)
            if value < 1:
                raise UserError(f"--{name}", f"it is {value}", "set it to at least 1")
        if not 0 <= self.temperature < math.inf:
            fix = "set it to 0 for greedy decoding, or above 0"
            raise UserError("--temperature", f"it is {self.temperature:g}", fix)
        if self.samples > 1 and self.temperature <= 0:
            problem = f"{self.samples} greedy samples are identical"
            raise UserError("--samples", problem, "set --temperature above 0")
