"""Layers of a cache that grow, lose rows and lose padding in place.

Transformers' own layers copy all keys and values for each token that is appended.

Layers of linear attention and convolutions hold states instead of keys and values. The size of a state does not depend
on the length of its row. Rows are copied and dropped as in other layers. Padding cannot be cut from a state. It need
not be, because transformers sets the inputs of padding to 0, which leaves the state unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

ROOM = 256
"""Number of spare columns of a buffer. When they are used up, keys and values are copied to a larger buffer."""


class Buffer:
    """Keys and values (rows, heads, columns, size) as views of tensors with spare columns on the right."""

    keys: Tensor
    values: Tensor
    buffers: list[Tensor]
    """Keys and values with their spare columns, and with the columns that were cut."""
    start: int
    """First column in use."""
    stop: int
    """Column behind the last one in use."""

    def take(self, layer: DynamicLayer, rows: Tensor, room: int) -> None:
        """Begin with copies of the `rows` of a layer, with `room` spare columns."""
        assert layer.keys is not None
        assert layer.values is not None
        self.dtype, self.device, self.is_initialized = layer.keys.dtype, layer.keys.device, True
        self._fill(layer.keys, layer.values, rows, room)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append columns, in place if there is room."""
        more = keys.shape[2]
        if self.stop + more > self.buffers[0].shape[2]:
            # Columns that were cut stay behind: the copy holds only those in use.
            self._fill(self.keys, self.values, torch.arange(len(keys), device=keys.device), max(ROOM, more))
        for buffer, new in zip(self.buffers, (keys, values), strict=True):
            buffer[:, :, self.stop : self.stop + more] = new
        self.show(self.start, self.stop + more)

    def keep(self, holes: list[int], movers: list[int], count: int) -> None:
        """Keep the first `count` rows, after the rows `movers` have taken the places `holes`."""
        # To select the kept rows would copy all of them. Only those behind `count` must move.
        for buffer in self.buffers:
            for hole, mover in zip(holes, movers, strict=True):
                buffer[hole, :, self.start : self.stop] = buffer[mover, :, self.start : self.stop]
        self.buffers = [buffer[:count] for buffer in self.buffers]
        self.show(self.start, self.stop)

    def cut(self, columns: int) -> None:
        """Drop the first columns."""
        self.show(self.start + columns, self.stop)

    def show(self, start: int, stop: int) -> None:
        """Let `keys` and `values` be the columns from `start` to `stop`."""
        self.start, self.stop = start, stop
        self.keys, self.values = (buffer[:, :, start:stop] for buffer in self.buffers)

    def _fill(self, keys: Tensor, values: Tensor, rows: Tensor, room: int) -> None:
        """Copy the `rows` of keys and values to new buffers with `room` spare columns."""
        _, heads, columns, _ = keys.shape
        self.buffers = [old.new_empty(len(rows), heads, columns + room, old.shape[3]) for old in (keys, values)]
        for buffer, old in zip(self.buffers, (keys, values), strict=True):
            # `buffer[...] = old[rows]` would hold a second copy of all keys at the moment that memory is highest.
            torch.index_select(old, 0, rows, out=buffer[:, :, :columns])
        self.show(0, columns)


class FullBuffer(Buffer, DynamicLayer):
    """Buffer of a layer that attends to everything."""

    keys: Tensor
    values: Tensor

    def __init__(self, layer: DynamicLayer, rows: Tensor, room: int) -> None:
        DynamicLayer.__init__(self)
        self.take(layer, rows, room)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and return all keys and values."""
        self.append(key_states, value_states)
        return self.keys, self.values


class SlidingBuffer(Buffer, DynamicSlidingWindowLayer):
    """Buffer of a layer with a window. It keeps one column less than the window, as transformers' layer does."""

    keys: Tensor
    values: Tensor

    def __init__(self, layer: DynamicSlidingWindowLayer, rows: Tensor, room: int) -> None:
        DynamicSlidingWindowLayer.__init__(self, layer.sliding_window)
        self.cumulative_length = layer.cumulative_length
        self.take(layer, rows, room)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and return the columns of the window and the new ones."""
        self.append(key_states, value_states)
        self.cumulative_length += key_states.shape[2]
        # Before the window moves: the first of several new tokens still sees the columns that leave with the last one.
        in_window = self.keys, self.values
        self.show(max(self.start, self.stop - self.sliding_window + 1), self.stop)
        return in_window

    def cut(self, columns: int) -> None:
        """Drop the first columns of the rows."""
        # The columns before the window are gone already: only the count of all columns falls by the full number.
        self.cumulative_length -= columns
        self.show(max(self.start, self.stop - self.cumulative_length), self.stop)


class StateBuffer(LinearAttentionLayer):
    """States of a layer of linear attention or of a convolution, each (rows, ...)."""

    conv_states: dict[int, Tensor | None]
    recurrent_states: dict[int, Tensor | None]

    def __init__(self, layer: LinearAttentionLayer, rows: Tensor, room: int) -> None:
        # Transformers' `__init__` would forget which states exist, and how long the convolutions are.
        vars(self).update(vars(layer))
        # Copies, never views: models write into their states in place.
        self.conv_states = _repeated(layer.conv_states, rows)
        self.recurrent_states = _repeated(layer.recurrent_states, rows)

    def keep_states(self, holes: list[int], movers: list[int], count: int) -> None:
        """Keep the states of the first `count` rows, after the rows `movers` have taken the places `holes`."""
        for states in (self.conv_states, self.recurrent_states):
            for number, state in states.items():
                if state is not None:
                    for hole, mover in zip(holes, movers, strict=True):
                        state[hole] = state[mover]
                    states[number] = state[:count]


class HybridBuffer(Buffer, StateBuffer):
    """Buffer of a layer that has states and also keys and values."""

    dtype: Any
    device: Any

    def __init__(self, layer: Any, rows: Tensor, room: int) -> None:
        StateBuffer.__init__(self, layer, rows, room)
        self.take(layer, rows, room)


# Transformers' own hybrid layers combine the same attribute and property, and are not checked.
class FullHybridBuffer(HybridBuffer, FullBuffer, LinearAttentionAndFullAttentionLayer):  # type: ignore[override]
    """Buffer of a layer that has states, and attends to everything."""


class SlidingHybridBuffer(  # type: ignore[override]
    HybridBuffer, SlidingBuffer, LinearAttentionAndSlidingWindowAttentionLayer
):
    """Buffer of a layer that has states, and attends to a window."""


def _repeated(states: dict[int, Tensor | None], rows: Tensor) -> dict[int, Tensor | None]:
    """Return copies of the `rows` of the states of a layer, by their numbers."""
    return {number: None if state is None else state.index_select(0, rows) for number, state in states.items()}


LAYERS: dict[type[Any], Callable[[Any, Tensor, int], Buffer | StateBuffer]] = {
    DynamicLayer: FullBuffer,
    DynamicSlidingWindowLayer: SlidingBuffer,
    LinearAttentionLayer: StateBuffer,
    LinearAttentionAndFullAttentionLayer: FullHybridBuffer,
    LinearAttentionAndSlidingWindowAttentionLayer: SlidingHybridBuffer,
}
"""Buffer for each layer of transformers' caches that the decoding loop supports, and that holds anything."""


def is_supported(layer: Any) -> bool:
    """Return True if the decoding loop supports a layer of transformers' caches."""
    return type(layer) in LAYERS or type(layer) is DummyLayer


def is_unused(layer: Any) -> bool:
    """Return True if a layer of a cache holds nothing: it has seen no token, or never does."""
    if isinstance(layer, LinearAttentionCacheLayerMixin) and any(layer.has_previous_state.values()):
        return False
    return not isinstance(layer, CacheLayerMixin) or not layer.get_seq_length()
