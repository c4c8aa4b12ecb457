"""Buffers of keys and values, compared with concatenated tensors, and the layers that are supported."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import DummyLayer, DynamicLayer, LinearAttentionLayer, StaticLayer

from grpo_recipes.generation.kv_cache import FullBuffer, StateBuffer, is_supported, is_unused


def filled(columns: int, rows: int = 3) -> tuple[DynamicLayer, Tensor, Tensor]:
    """Return a layer with random keys and values of different sizes."""
    layer, keys, values = DynamicLayer(), torch.rand(rows, 2, columns, 3), torch.rand(rows, 2, columns, 5)
    layer.update(keys, values)
    return layer, keys, values


def assert_holds(buffer: FullBuffer, keys: Tensor, values: Tensor) -> None:
    assert torch.equal(buffer.keys, keys)
    assert torch.equal(buffer.values, values)
    assert buffer.get_seq_length() == keys.shape[2]


def test_columns_are_appended_in_place_until_the_room_is_used_up() -> None:
    layer, keys, values = filled(4)
    order = torch.tensor([2, 0, 2, 1])
    buffer = FullBuffer(layer, order, 2)
    keys, values = keys[order], values[order]
    assert_holds(buffer, keys, values)
    first = buffer.buffers
    more = filled(2, 4)[1:]
    keys, values = torch.cat([keys, more[0]], 2), torch.cat([values, more[1]], 2)
    buffer.update(*more)
    assert_holds(buffer, keys, values)
    assert buffer.buffers is first, "the room is filled to the last column"
    buffer.cut(3)
    more = filled(1, 4)[1:]
    buffer.update(*more)
    assert_holds(buffer, torch.cat([keys, more[0]], 2)[:, :, 3:], torch.cat([values, more[1]], 2)[:, :, 3:])
    assert [one.shape[2] for one in buffer.buffers] == [3 + 256] * 2, "the cut columns are left behind"


def test_rows_move_to_the_places_of_others() -> None:
    layer, keys, values = filled(5)
    buffer = FullBuffer(layer, torch.arange(3), 4)
    buffer.cut(2)
    buffer.keep([0], [2], 2)
    assert_holds(buffer, keys[[2, 1], :, 2:], values[[2, 1], :, 2:])
    assert {len(one) for one in buffer.buffers} == {2}


def states(convolution: Tensor | None, recurrent: Tensor | None) -> LinearAttentionLayer:
    layer = LinearAttentionLayer()
    layer.conv_states, layer.recurrent_states = {0: convolution, 1: None}, {0: recurrent}
    return layer


def test_states_are_copied_and_moved_by_row() -> None:
    convolution, recurrent = torch.rand(3, 2), torch.rand(3, 4)
    buffer = StateBuffer(states(convolution, recurrent), torch.tensor([2, 1, 0, 0]), 9)
    buffer.keep_states([1], [3], 2)
    assert buffer.conv_states[1] is None
    assert torch.equal(buffer.conv_states[0], convolution[[2, 0]])
    assert torch.equal(buffer.recurrent_states[0], recurrent[[2, 0]])
    buffer.recurrent_states[0].zero_()
    assert recurrent.all(), "a copy"


def test_layers_that_hold_something_and_layers_that_are_supported() -> None:
    layer = LinearAttentionLayer()
    assert is_unused(layer)
    layer.has_previous_state = {0: False, 1: True}
    assert not is_unused(layer)
    assert is_unused(DynamicLayer())
    assert not is_unused(filled(1)[0])
    assert [is_supported(one) for one in (DynamicLayer(), layer, DummyLayer(), StaticLayer(4))] == [True] * 3 + [False]
