"""Completions that end with a string: `generation_kwargs: {stop: ["</answer>"]}`, as vLLM spells it.

`generate` drops the tokenizer where its loop is another, and with it `stop_strings`; so the criterion is handed in. A row
that ended with a string holds padding behind it: it is cut here after the token that completes the string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StopStringCriteria

from grpo_recipes.recipe.trl_keys import stop_strings
from grpo_rewards.errors import UserError


class StopStrings:
    """The strings that end a completion."""

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self.strings = tuple(strings)
        try:
            self.criterion = StopStringCriteria(tokenizer, list(strings))
        except ValueError as error:  # it takes every token apart, by way of a text of known letters
            raise UserError(
                f"`generation_kwargs.stop`: transformers can't read the tokens of {type(tokenizer).__name__} as text "
                f"({error}): leave `stop` out"
            ) from error

    @classmethod
    def of(cls, generation_kwargs: Mapping[str, Any] | str | None, tokenizer: Any) -> StopStrings | None:
        """Those that TRL's `generation_kwargs` name, None without any. Raises `UserError`."""
        strings = stop_strings(generation_kwargs)
        return cls(strings, tokenizer) if strings else None

    def end(self, ids: Sequence[int]) -> bool:
        """Whether the last token of a completion completes one of the strings."""
        return bool(self.criterion(torch.tensor([list(ids)]), None)[0])


class Ends(StoppingCriteria):
    """Ends each row of one call of `generate` with a stop string in its completion, and remembers where."""

    def __init__(self, stop: StopStrings) -> None:
        self.stop = stop
        self.width = 0
        """Columns of the prompts, known from the first call on."""
        self.lengths: Tensor | None = None
        """The tokens of each completion up to its stop string, 0 without one, (rows,)."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Which rows end with a string, (rows,)."""
        if self.lengths is None:
            self.width = input_ids.shape[1] - 1
            self.lengths = input_ids.new_zeros(len(input_ids))
        completions = input_ids[:, self.width :]  # a string that begins in the prompt is none of the policy's
        done = self.stop.criterion(completions, scores)
        self.lengths[done & (self.lengths == 0)] = completions.shape[1]
        return done

    def cut(self, completions: list[list[int]]) -> list[list[int]]:
        """Completions as TRL reads them, cut after the token that completes a stop string."""
        if self.lengths is None:
            return completions
        lengths = self.lengths.tolist()
        return [ids[:length] if length else ids for ids, length in zip(completions, lengths, strict=True)]
