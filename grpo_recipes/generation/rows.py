"""Rows of a model call in stock TRL layout: prompts padded on the left, completions on the right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

PerToken = tuple[Tensor, Tensor | None]
"""Log-probabilities and, if they were requested, entropies, each (B, T)."""


@dataclass(frozen=True)
class HostRows:
    """Rows of a model call in the host's memory. Layouts are computed here, where nothing waits for the device."""

    ids: np.ndarray
    """(B, P + T)."""
    mask: np.ndarray
    """(B, P + T), True where there is a token."""
    logits_to_keep: int
    """Number of completion columns, T."""

    def select(self, index: np.ndarray | slice, left: int = 0, width: int | None = None) -> HostRows:
        """Return the rows at `index` without their first `left` columns, completions cut to `width` columns."""
        keep = self.logits_to_keep if width is None else width
        columns = slice(left, self.ids.shape[1] - self.logits_to_keep + keep)
        return HostRows(self.ids[index, columns], self.mask[index, columns], keep)

    def without_labels(self, rows: np.ndarray) -> HostRows:
        """Return the rows with all but the last prompt token masked out in those of `rows`, (B,) bool."""
        mask = self.mask.copy()
        last = self.mask.shape[1] - self.logits_to_keep - 1
        mask[rows, :last] = mask[rows, last + 1 :] = False
        return HostRows(self.ids, mask, self.logits_to_keep)

    @property
    def completion_mask(self) -> np.ndarray:
        """(B, T)."""
        return self.mask[:, -self.logits_to_keep :]

    @property
    def prompt_mask(self) -> np.ndarray:
        """(B, P)."""
        return self.mask[:, : -self.logits_to_keep]

    @property
    def labels(self) -> np.ndarray:
        """Number of labels of each row, (B,)."""
        return self.completion_mask.sum(1)

    def prompts(self) -> list[np.ndarray]:
        """Return the prompt of each row without padding."""
        return _kept(self.ids[:, : -self.logits_to_keep], self.prompt_mask)

    def completions(self) -> list[np.ndarray]:
        """Return the completion of each row without padding."""
        return _kept(self.ids[:, -self.logits_to_keep :], self.completion_mask)

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
        prompts, labels = self.prompt_mask.sum(1), self.labels
        prefixes = {}
        for number, count in zip(self.prompt_numbers(), labels, strict=True):
            if count:
                prefixes[number] = int(prompts[number]) - 1
        # Without any label, one token is still run: every rank calls the model.
        return max(sum(prefixes.values()) + int(labels.sum()), 1)

    def extent(self) -> tuple[int, int]:
        """Return the first used column of the prompts, and the number of used columns of the completions.

        At least one column of each is kept.
        """
        prompts, completions = (np.flatnonzero(mask.any(0)) for mask in (self.prompt_mask, self.completion_mask))
        left = int(prompts[0]) if len(prompts) else self.prompt_mask.shape[1] - 1
        return left, int(completions[-1]) + 1 if len(completions) else 1

    def trimmed(self) -> tuple[np.ndarray, int, int]:
        """Return what `select` takes to keep the rows with labels without their common padding.

        At least one row of one column is kept.
        """
        index = np.flatnonzero(self.labels)
        if not len(index):
            # All ranks must call the model equally often (a collective under ZeRO-3 and FSDP): run one row without
            # labels.
            return np.zeros(1, dtype=np.int64), self.prompt_mask.shape[1] - 1, 1
        return index, *self.select(index).extent()


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
        ids, mask = torch.cat([left, right], 1), torch.cat([left_mask, right_mask], 1)
        return cls(on_device(ids, device), on_device(mask, device), right.shape[1])

    @cached_property
    def host(self) -> HostRows:
        """The rows in the host's memory. They are copied once, and the host waits for the device."""
        ids, mask = torch.stack([self.input_ids, self.attention_mask.to(self.input_ids)]).cpu().numpy()
        return HostRows(ids, mask.astype(bool), self.logits_to_keep)

    def with_host(self, host: HostRows) -> Rows:
        """Return these rows with `host`, a copy of them that was made before."""
        known = Rows(self.input_ids, self.attention_mask, self.logits_to_keep)
        known.__dict__["host"] = host  # where `cached_property` keeps its value
        return known

    def select(self, index: np.ndarray | slice, left: int = 0, width: int | None = None) -> Rows:
        """Return the rows at `index` without their first `left` columns, completions cut to `width` columns."""
        keep = self.logits_to_keep if width is None else width
        columns = slice(left, self.input_ids.size(1) - self.logits_to_keep + keep)
        rows = index if isinstance(index, slice) else on_device(index, self.input_ids.device)
        selected = Rows(self.input_ids[rows, columns], self.attention_mask[rows, columns], keep)
        return selected.with_host(self.host.select(index, left, width)) if "host" in self.__dict__ else selected

    def unlabelled(self) -> Rows:
        """Return the rows with their completions masked out."""
        mask = self.attention_mask.clone()
        mask[:, -self.logits_to_keep :] = 0
        return Rows(self.input_ids, mask, self.logits_to_keep)

    def widen(self, left: int, right: int) -> Rows:
        """Return the rows with columns of padding added on both sides."""
        # Any ID of the rows will do as padding: the pad token is not known here, and the ID must exist in the
        # vocabulary.
        ids = pad(self.input_ids, (left, right), value=int(self.host.ids[0, -1]))
        return Rows(ids, pad(self.attention_mask, (left, right)), self.logits_to_keep + right)

    @property
    def completion_mask(self) -> Tensor:
        """(B, T)."""
        return self.attention_mask[:, -self.logits_to_keep :]

    def trimmed(self) -> tuple[Rows, np.ndarray]:
        """Return the rows with labels without common padding, and their indices; at least one row of one column."""
        index, left, width = self.host.trimmed()
        # A slice is a view, and needs no copy of the indices to the device.
        return self.select(slice(None) if len(index) == len(self.input_ids) else index, left, width), index


def on_device(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return a copy of an array or a tensor of the host on a device, without waiting for it."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    # Memory that is not pinned is copied only after all kernels that were launched before.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _kept(ids: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    """Return the tokens of each row of `ids`, (B, columns), that `mask`, (B, columns), keeps."""
    return [row[kept] for row, kept in zip(ids, mask, strict=True)]


def _padded(rows: Sequence[Sequence[int]], side: str) -> tuple[Tensor, Tensor]:
    """Return the token IDs, padded with 0 on one side, and their mask, each (B, columns)."""
    # 0 is an ID of every vocabulary, and the mask hides it.
    ids = [torch.tensor(list(row), dtype=torch.long) for row in rows]
    mask = [torch.ones_like(row) for row in ids]
    padded = [pad_sequence(tensors, batch_first=True, padding_side=side) for tensors in (ids, mask)]
    return padded[0], padded[1]
