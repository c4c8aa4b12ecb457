"""Completions that end with a string: `generation_kwargs: {stop: ["</answer>"]}`, as vLLM spells it.

TRL 1.16 knows one end of a completion, a token. A row that ended with a string holds padding behind it, which TRL takes for
a part of the completion (or, where padding is the end-of-sequence token, for an end that was never sampled), and TRL counts
it as cut off at `max_completion_length`. So rows are cut here after the token that completes the string, and asked here
whether they ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StopStringCriteria

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
    def of(cls, generation_kwargs: Mapping[str, Any] | None, tokenizer: Any) -> StopStrings | None:
        """Those that TRL's `generation_kwargs` name, None without any.

        Raises `UserError` for what is no string or list of them, and for transformers' own key, which TRL can't serve.
        """
        asked = generation_kwargs or {}
        if asked.get("stop_strings") is not None:
            raise UserError("`generation_kwargs.stop_strings`: write `stop` instead, which vLLM understands as well")
        stop = asked.get("stop")
        if not stop:
            return None
        strings = [stop] if isinstance(stop, str) else stop
        if not isinstance(strings, list | tuple) or not all(isinstance(text, str) and text for text in strings):
            raise UserError(f"`generation_kwargs.stop` must be a string or a list of strings, not {stop!r}")
        return cls(strings, tokenizer)

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


def take_over_mask(trainer: Any) -> bool:
    """Whether TRL was to mask truncated completions; from now on `corrected` does, which knows what ended with a string."""
    asked, trainer.mask_truncated_completions = trainer.mask_truncated_completions, False
    return asked


def corrected(trainer: Any, output: tuple[Any, ...], stop: StopStrings, masks_truncated: bool) -> tuple[Any, ...]:
    """What TRL's `_generate` returned, the truncated completions masked where asked; its metrics of them logged anew."""
    prompt_ids, completion_ids, tool_mask, *rest = output
    masks = tool_mask or [[1] * len(ids) for ids in completion_ids]
    ends = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
    truncated = [ids[-1] not in ends and not stop.end(ids) for ids in completion_ids]
    local = torch.tensor([truncated, [sum(mask) for mask in masks]], device=trainer.accelerator.device)
    cut, lengths = trainer.accelerator.gather(local.T.contiguous()).T
    ended = lengths[cut == 0].float() if not cut.all() else torch.zeros(1)
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, value in {
        "clipped_ratio": cut.float().mean(),
        "mean_terminated_length": ended.mean(),
        "min_terminated_length": ended.min(),
        "max_terminated_length": ended.max(),
    }.items():
        metrics[f"completions/{name}"][-1] = value.item()
    if masks_truncated:  # as the mask of tool results, which the loss leaves out
        tool_mask = [[0] * len(mask) if gone else mask for mask, gone in zip(masks, truncated, strict=True)]
    return prompt_ids, completion_ids, tool_mask, *rest
