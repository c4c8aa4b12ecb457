"""Rows of a model call in stock TRL layout: prompts padded on the left, completions on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from trl.trainer.utils import pad as pad_rows

PerToken = tuple[Tensor, Tensor | None]
"""Log-probabilities and, if they were requested, entropies, each (B, T)."""


@dataclass(frozen=True)
class Rows:
    """Rows of a model call in TRL's layout: prompts padded on the left, completions on the right."""

    input_ids: Tensor
    """(B, P + T)."""
    attention_mask: Tensor
    """(B, P + T), 1 where there is a token."""
    logits_to_keep: int
    """Number of completion columns, T."""

    @classmethod
    def of_tokens(
        cls, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], device: torch.device
    ) -> Rows:
        """Pad lists of token IDs to stock TRL layout."""
        left, left_mask = _padded(prompts, "left")
        right, right_mask = _padded(completions, "right")
        ids = torch.cat([left, right], 1).to(device)
        return cls(ids, torch.cat([left_mask, right_mask], 1).to(device), right.shape[1])

    def select(self, index: Tensor | slice, left: int = 0, width: int | None = None) -> Rows:
        """Return the rows at `index` without their first `left` columns, completions cut to `width` columns."""
        keep = self.logits_to_keep if width is None else width
        columns = slice(left, self.input_ids.size(1) - self.logits_to_keep + keep)
        return Rows(self.input_ids[index, columns], self.attention_mask[index, columns], keep)

    def unlabelled(self) -> Rows:
        """Return the rows with their completions masked out."""
        mask = self.attention_mask.clone()
        mask[:, -self.logits_to_keep :] = 0
        return Rows(self.input_ids, mask, self.logits_to_keep)

    def widen(self, left: int, right: int) -> Rows:
        """Return the rows with columns of padding added on both sides."""
        # Any ID of the rows will do as padding: the pad token is not known here, and the ID must exist in the
        # vocabulary.
        ids = pad(self.input_ids, (left, right), value=int(self.input_ids[0, -1]))
        return Rows(ids, pad(self.attention_mask, (left, right)), self.logits_to_keep + right)

    @property
    def completion_mask(self) -> Tensor:
        """(B, T)."""
        return self.attention_mask[:, -self.logits_to_keep :]

    @property
    def prompt_mask(self) -> Tensor:
        """(B, P)."""
        return self.attention_mask[:, : -self.logits_to_keep]

    def prompts(self) -> list[np.ndarray]:
        """Return the prompt of each row without padding."""
        return unpadded(self.input_ids[:, : -self.logits_to_keep], self.prompt_mask)

    def prompt_numbers(self) -> list[int]:
        """Return, for each row, the index of the first row with the same prompt.

        Prompts are compared by their tokens, because after TRL's shuffle the position of a row says nothing about its
        group.
        """
        first: dict[bytes, int] = {}
        return [first.setdefault(prompt.tobytes(), row) for row, prompt in enumerate(self.prompts())]

    def groups(self) -> dict[int, list[int]]:
        """Return the rows of each prompt, by the index of the first one."""
        members: dict[int, list[int]] = {}
        for row, number in enumerate(self.prompt_numbers()):
            members.setdefault(number, []).append(row)
        return members

    def packed_tokens(self) -> int:
        """Return the length of the packed row: len(prefix) of each prompt that has a label, and one token per label."""
        prompts, labels = self.prompt_mask.sum(1).tolist(), self.completion_mask.sum(1).tolist()
        prefixes = {}
        for number, count in zip(self.prompt_numbers(), labels, strict=True):
            if count:
                prefixes[number] = prompts[number] - 1
        # Without any label, one token is still run: every rank calls the model.
        return max(sum(prefixes.values()) + sum(labels), 1)

    def trimmed(self) -> tuple[Rows, Tensor]:
        """Return the rows with labels without common padding, and their indices; at least one row of one column."""
        index = self.completion_mask.any(1).nonzero().flatten()
        if not len(index):
            # All ranks must call the model equally often (a collective under ZeRO-3 and FSDP): run one row without
            # labels.
            index = index.new_zeros(1)
            return self.select(index, self.input_ids.size(1) - self.logits_to_keep - 1, 1), index
        left, width = extent(self.prompt_mask[index], self.completion_mask[index])
        return self.select(index, left, width), index


def extent(prompt_mask: Tensor, completion_mask: Tensor) -> tuple[int, int]:
    """Return the first used column of prompts (B, P) and the number of used columns of completions (B, T).

    At least one column of each is kept.
    """
    prompts, completions = prompt_mask.any(0).nonzero(), completion_mask.any(0).nonzero()
    left = int(prompts[0]) if len(prompts) else prompt_mask.size(1) - 1
    return left, int(completions[-1]) + 1 if len(completions) else 1


def unpadded(ids: Tensor, mask: Tensor) -> list[np.ndarray]:
    """Return the tokens of each row of `ids`, (B, P), that `mask`, (B, P), keeps."""
    return [row[kept] for row, kept in zip(ids.cpu().numpy(), mask.bool().cpu().numpy(), strict=True)]


def _padded(rows: Sequence[Sequence[int]], side: str) -> tuple[Tensor, Tensor]:
    """Return the token IDs, padded with 0 on one side, and their mask, each (B, columns)."""
    # 0 is an ID of every vocabulary, and the mask hides it.
    ids = [torch.tensor(list(row), dtype=torch.long) for row in rows]
    return pad_rows(ids, 0, side), pad_rows([torch.ones_like(row) for row in ids], 0, side)
