"""Layers of a cache that grow, lose rows and lose padding in place.

Transformers' own layers copy all keys and values for each token that is appended.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

ROOM = 256
"""Spare columns of a buffer of keys and values; when they are used up, it is copied to a larger one."""


class Buffer:
    """Keys and values, (rows, heads, columns, size), as windows on tensors with spare columns on the right."""

    keys: Tensor
    values: Tensor
    buffers: list[Tensor]
    """Keys and values with their spare columns, and with those that are cut."""
    start: int
    """The first column that counts."""
    last: int
    """The column behind the last that counts."""

    def take(self, layer: Any, rows: Tensor, room: int) -> None:
        """Begin with copies of the `rows` of a layer."""
        self.dtype, self.device, self.is_initialized = layer.dtype, layer.device, True
        self._fill(layer.keys, layer.values, rows, room)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append columns, in place where there is room."""
        more = keys.shape[2]
        if self.last + more > self.buffers[0].shape[2]:
            self._fill(self.keys, self.values, torch.arange(len(keys), device=keys.device), max(ROOM, more))
        for buffer, new in zip(self.buffers, (keys, values), strict=True):
            buffer[:, :, self.last : self.last + more] = new
        self.show(self.start, self.last + more)

    def keep(self, holes: list[int], movers: list[int], count: int) -> None:
        """Keep `count` rows: the first ones, after `movers` have taken the places of `holes`."""
        for buffer in self.buffers:
            for hole, mover in zip(holes, movers, strict=True):
                buffer[hole, :, self.start : self.last] = buffer[mover, :, self.start : self.last]
        self.buffers = [buffer[:count] for buffer in self.buffers]
        self.show(self.start, self.last)

    def cut(self, columns: int) -> None:
        """Forget the first columns."""
        self.show(self.start + columns, self.last)

    def show(self, start: int, last: int) -> None:
        """Let `keys` and `values` be the columns from `start` to `last`."""
        self.start, self.last = start, last
        self.keys, self.values = (buffer[:, :, start:last] for buffer in self.buffers)

    def _fill(self, keys: Tensor, values: Tensor, rows: Tensor, room: int) -> None:
        """Copy the `rows` of keys and values to buffers with `room` behind them, without another copy on the way."""
        _, heads, columns, _ = keys.shape
        self.buffers = [old.new_empty(len(rows), heads, columns + room, old.shape[3]) for old in (keys, values)]
        for buffer, old in zip(self.buffers, (keys, values), strict=True):
            torch.index_select(old, 0, rows, out=buffer[:, :, :columns])
        self.show(0, columns)


class FullBuffer(Buffer, DynamicLayer):
    """The buffer of a layer that attends to everything."""

    def __init__(self, layer: DynamicLayer, rows: Tensor, room: int) -> None:
        DynamicLayer.__init__(self)
        self.take(layer, rows, room)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and return everything."""
        self.append(keys, values)
        return self.keys, self.values


class SlidingBuffer(Buffer, DynamicSlidingWindowLayer):
    """The buffer of a layer with a window, of which it keeps one column less, as transformers' layer does."""

    def __init__(self, layer: DynamicSlidingWindowLayer, rows: Tensor, room: int) -> None:
        DynamicSlidingWindowLayer.__init__(self, layer.sliding_window)
        self.cumulative_length = layer.cumulative_length
        self.take(layer, rows, room)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and return the columns of the window and the new ones."""
        self.append(keys, values)
        self.cumulative_length += keys.shape[2]
        seen = self.keys, self.values
        self.show(max(self.start, self.last - self.sliding_window + 1), self.last)
        return seen

    def cut(self, columns: int) -> None:
        """Forget the first columns of all, of which those before the window are gone already."""
        self.cumulative_length -= columns
        self.show(max(self.start, self.last - self.cumulative_length), self.last)


LAYERS = {DynamicLayer: FullBuffer, DynamicSlidingWindowLayer: SlidingBuffer}
"""The layers of transformers' caches that this loop knows, and the buffers that take their places."""
