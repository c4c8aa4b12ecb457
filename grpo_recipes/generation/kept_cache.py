"""Keys and values kept between the turns of a generation batch, so that a later turn runs its new tokens only.

The prompt of a later turn is the earlier prompt, its completion, and new tokens, for example a tool's result. Keys and
values depend only on the tokens before them and on the weights. So they are found by their tokens, also where a row has
another number in the later turn. They are right until the weights change, so a cache serves one generation batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import psutil
import torch
from torch import Tensor

MEMORY_SHARE = 1 / 8
"""Largest share of the memory of a GPU, or of the machine, that a process keeps keys and values in."""

LEAST_SAVING = 1 / 4
"""Smallest share of tokens for which prompts run in two forwards in place of one."""

Layers = list[tuple[Tensor, Tensor]]
"""Keys and values of one row by layer, each (heads, tokens, size)."""


@dataclass(frozen=True)
class Prefix:
    """First tokens of a prompt whose keys and values are kept."""

    tokens: int
    """Number of tokens that need not run."""
    layers: Layers
    """Keys and values of at least these tokens."""


def memory_limit(device: torch.device) -> int:
    """Return the number of bytes that keys and values may be kept in."""
    # A share of all memory: the free memory changes from run to run, and what is kept changes rounding errors.
    if device.type == "cuda":
        return int(MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return int(MEMORY_SHARE * psutil.virtual_memory().total)


@dataclass
class KeptCache:
    """Keys and values of finished rows of one generation batch, by their tokens."""

    may_go_on: Callable[[list[int], list[int]], bool]
    """Predicate of a prompt and its completion: True if a later turn may begin with both."""
    limit: int
    """Largest number of bytes."""
    size: int = 0
    """Number of bytes that are kept."""
    _rows: dict[bytes, Layers] = field(default_factory=dict)

    def keep(self, tokens: Sequence[int], layers: Layers) -> None:
        """Keep copies of the keys and values of `tokens`. The rows that were kept first make room."""
        key, size = _key(tokens), _size(layers)
        if size > self.limit or key in self._rows:
            return
        while self.size + size > self.limit:
            self._drop(next(iter(self._rows)))
        self._rows[key] = [(keys.clone(), values.clone()) for keys, values in layers]
        self.size += size

    def holds_start_of(self, prompts: Sequence[Sequence[int]]) -> bool:
        """Return True if the first tokens of any prompt are kept."""
        return any(self._longest(_key(prompt)) for prompt in prompts)

    def take(self, prompts: Mapping[int, Sequence[int]]) -> dict[int, Prefix]:
        """Return the longest kept prefix of each prompt that has one, by the number of the prompt.

        These are kept no longer: a row is kept anew, with more tokens, when its next turn ends.
        """
        keys = {number: self._longest(_key(prompt)) for number, prompt in prompts.items()}
        found = {}
        for number, key in keys.items():
            if key:
                # The last token always runs, because its logits are needed.
                tokens = min(len(key) // _ITEM, len(prompts[number]) - 1)
                found[number] = Prefix(tokens, self._rows[key])
        for key in self._rows.keys() & keys.values():  # several prompts may have one prefix
            self._drop(key)
        return found

    def _longest(self, prompt: bytes) -> bytes:
        """Return the longest key that `prompt` begins with, or an empty one."""
        # Among beginnings of one text, the longest is the largest.
        return max((key for key in self._rows if prompt.startswith(key)), default=b"")

    def _drop(self, key: bytes) -> None:
        self.size -= _size(self._rows.pop(key))


def aligned(prefixes: Sequence[Prefix | None], starts: Sequence[int], columns: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the keys and values (rows, heads, columns, size) of each layer, padded on the left.

    Args:
        prefixes: kept prefix of each row, at least one. A row without one begins behind the columns.
        starts: column of each row's first token.
        columns: number of columns.
    """
    kept = {row: prefix.layers for row, prefix in enumerate(prefixes) if prefix is not None}
    for index, pair in enumerate(next(iter(kept.values()))):
        # Zeros, because attention multiplies masked values by 0, and 0 times an uninitialized number may be NaN.
        wide = [old.new_zeros(len(prefixes), old.shape[0], columns, old.shape[2]) for old in pair]
        for row, layers in kept.items():
            count = max(columns - starts[row], 0)
            for target, source in zip(wide, layers[index], strict=True):
                target[row, :, columns - count :] = source[:, :count]
        yield wide[0], wide[1]


def split_by_width(widths: Mapping[int, int]) -> list[list[int]]:
    """Return the rows, by their widths, as two rectangles, or as one if two save less than `LEAST_SAVING`."""
    rows = sorted(widths, key=widths.__getitem__)
    widest = widths[rows[-1]]
    areas = [count * widths[rows[count - 1]] + (len(rows) - count) * widest for count in range(1, len(rows) + 1)]
    smallest = min(areas)
    if smallest > (1 - LEAST_SAVING) * areas[-1]:
        return [rows]
    count = areas.index(smallest) + 1  # number of rows in the narrower rectangle
    return [rows[:count], rows[count:]]


_ITEM = array("q").itemsize
"""Number of bytes of a token in a key. Keys are compared as bytes: lists of long prompts would take milliseconds."""


def _key(tokens: Sequence[int]) -> bytes:
    return array("q", tokens).tobytes()


def _size(layers: Layers) -> int:
    return sum(tensor.nbytes for pair in layers for tensor in pair)
