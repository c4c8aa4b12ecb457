"""Completions that end with a string: `generation_kwargs: {stop: ["</answer>"]}`, as vLLM spells it.

`generate` drops the tokenizer if its loop is replaced, and `stop_strings` with it. So the criterion is passed to it. A
row that ended with a string is padded behind it, and is cut here after the token that completes the string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StopStringCriteria

from grpo_recipes.recipe.trl_keys import stop_strings
from grpo_rewards.errors import UserError


class StopStrings:
    """Strings that end a completion, and transformers' criterion for them."""

    def __init__(self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self.strings = tuple(strings)
        try:
            self.criterion = StopStringCriteria(tokenizer, list(strings))
        except ValueError as error:
            # The criterion finds the text of every token by way of a text of known letters, which some tokenizers
            # change.
            problem = f"transformers can't read the tokens of {type(tokenizer).__name__} as text ({error})"
            raise UserError("`generation_kwargs.stop`", problem, "leave `stop` out") from error

    @classmethod
    def of(
        cls, generation_kwargs: Mapping[str, Any] | str | None, tokenizer: PreTrainedTokenizerBase
    ) -> StopStrings | None:
        """Return the strings that TRL's `generation_kwargs` name, or None if they name none.

        Raises:
            UserError: the strings are not valid, or transformers cannot read the tokenizer's tokens.
        """
        strings = stop_strings(generation_kwargs)
        return cls(strings, tokenizer) if strings else None

    def end(self, ids: Sequence[int]) -> bool:
        """Return True if the last token of a completion completes one of the strings."""
        return bool(self.criterion(torch.tensor([list(ids)]), None)[0])


class Ends(StoppingCriteria):
    """Criterion that ends the rows of one call of `generate` at a stop string, and keeps the place of each end."""

    def __init__(self, stop: StopStrings) -> None:
        self.stop = stop
        self.width: int
        """Number of columns of the prompts, known from the first call on."""
        self.lengths: Tensor | None = None
        """Number of tokens of each completion up to its stop string, or 0 without one, (rows,)."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return a mask (rows,) of the rows that end with a string."""
        if self.lengths is None:
            self.width = input_ids.shape[1] - 1
            self.lengths = input_ids.new_zeros(len(input_ids))
        # Without the prompt: the policy did not write a string that begins in it.
        completions = input_ids[:, self.width :]
        done = self.stop.criterion(completions, scores)
        # The first end counts: the stock loop runs finished rows on.
        self.lengths[done & (self.lengths == 0)] = completions.shape[1]
        return done

    def cut(self, completions: list[list[int]]) -> list[list[int]]:
        """Return completions as TRL reads them, cut after the token that completes a stop string."""
        if self.lengths is None:
            return completions
        cut = []
        for ids, length in zip(completions, self.lengths.tolist(), strict=True):
            cut.append(ids[:length] if length else ids)
        return cut
