"""Parts of the forward in segments: lists of layers, caches of prompts, and what is switched off for a while."""

from __future__ import annotations

import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig
from transformers.cache_utils import LinearAttentionLayer

from grpo_recipes.training import segments
from tests.support.recorded import model


def cache(*columns: int, rows: int = 2) -> DynamicCache:
    """Return a cache whose layers hold so many columns, each row with numbers of its own."""
    found = DynamicCache(config=LlamaConfig(num_hidden_layers=len(columns)))
    for index, count in enumerate(columns):
        if count:
            keys = torch.arange(rows * count, dtype=torch.float32).reshape(rows, 1, count, 1)
            found.update(keys, keys + 100, index)
    return found


def with_index(*indices: Any) -> nn.Module:
    """Return a decoder layer with a part for each index."""
    parts: Any = nn.ModuleList(nn.Identity() for _ in indices)
    for part, index in zip(parts, indices, strict=True):
        part.layer_idx = index
    return parts


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        (with_index(2), [2]),
        (with_index(2, 2, 0), [0, 2]),
        (with_index(2, 4), [2]),  # the cache ends before
        (with_index(3), [3]),
        (with_index("3"), [0, 1, 2, 3]),
        (with_index(), [0, 1, 2, 3]),
    ],
)
def test_a_layer_writes_to_its_own_layers_of_the_cache(layer: nn.Module, found: list[int]) -> None:
    """Where it does not tell, it may write to all of them."""
    assert sorted(segments._cache_indices(layer, 4)) == found


def test_a_comparison_that_failed_once_counts_for_the_rest_of_the_run() -> None:
    found = object.__new__(segments.SegmentedModel)
    found._agrees = found._shares = None
    assert (found.verified, found.shares_prompts) == (False, False)
    for agrees, now in ((True, True), (True, True), (False, False), (True, False)):
        found.record(agrees=agrees)
        assert (found.verified, found.shares_prompts) == (now, False)
    for agrees, now in ((True, True), (False, False), (True, False)):
        found.record_shared(agrees=agrees)
        assert found.shares_prompts is now


@pytest.mark.parametrize(
    ("rule", "has_it"),
    [(None, False), (lambda query, chunk_size=64: query, True), (lambda query: query, False)],
    ids=["no rule", "with chunks", "without chunks"],
)
def test_a_delta_rule_is_found_in_the_file_of_the_layer(
    rule: Any, has_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "modeling_made_up", SimpleNamespace(torch_chunk_gated_delta_rule=rule))
    layer = type("Layer", (nn.Module,), {"__module__": "modeling_made_up"})()
    assert segments._has_delta_rule(layer) is has_it
    assert not segments._has_delta_rule(nn.Linear(1, 1))


def test_a_model_is_as_before_after_it_took_segments() -> None:
    policy = model()
    backbone, found = policy.model, segments.SegmentedModel(policy)
    with pytest.raises(segments.NotSegmented, match="no list of decoder layers"), found.taking_segments():
        pass
    with found.observed():
        policy(input_ids=torch.tensor([[5, 6, 7]]))
    layers = backbone.layers
    assert found.layers == list(layers)
    assert not any(layer._forward_hooks for layer in layers)
    own = backbone.forward
    for is_set in (False, True):
        if is_set:
            backbone.forward = own
        with suppress(RuntimeError), found.taking_segments():
            assert backbone.forward != own
            raise RuntimeError
        assert ("forward" in vars(backbone)) is is_set
        assert backbone.forward == own
    with suppress(RuntimeError), found.replaced_layers([nn.Identity()] * 2):
        assert backbone.layers is not layers
        raise RuntimeError
    assert backbone.layers is layers


@pytest.mark.parametrize("returned", [lambda hidden: hidden, lambda hidden: (hidden,), lambda hidden: (hidden, "more")])
def test_a_layer_gets_its_own_cache_in_the_place_of_the_backbones(returned: Any) -> None:
    given, other, own = cache(0), cache(0), cache(0)
    call = segments._LayerCall(torch.zeros(1), (given, other, 3), {"past_key_values": given, "mask": None})
    assert call.takes(given)
    assert call.takes(other)
    assert not call.takes(own)
    assert segments._LayerCall(torch.zeros(1), (), {"past": given}).takes(given)
    seen: list[Any] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return returned(args[0])

    states = torch.ones(1)
    assert call.run(forward, states, given, own) is states
    assert call.run(forward, states, None, None) is states
    (hidden, first, second, number), kwargs = seen[0]
    assert (hidden is states, first is own, second is other, number) == (True, True, True, 3)
    assert (kwargs["past_key_values"] is own, kwargs["mask"]) == (True, None)
    assert seen[1][0][1] is given, "a backbone without a cache"


@pytest.mark.parametrize(("size", "returned"), [(0, None), (1, 1), (3, 3)])
def test_a_stand_in_returns_what_its_layer_returns(size: int, returned: int | None) -> None:
    layer, calls = nn.Linear(2, 2), []
    one, other = torch.zeros(1), torch.ones(1)
    recorder = segments._Recorder(layer, calls, size, None)
    assert recorder.in_features == 2, "a backbone may read the attributes of its layers"
    for found in (recorder(one, "mask", use_cache=True), recorder(hidden_states=one)):
        assert (found if returned is None else found[0]) is one
        assert returned is None or found[1:] == (None,) * (returned - 1)
    assert [(call.hidden is one, call.args, call.kwargs) for call in calls] == [
        (True, ("mask",), {"use_cache": True}),
        (True, (), {}),
    ]
    with pytest.raises(segments.NotSegmented, match="computes between its layers"):
        recorder(other)
    last = segments._Recorder(layer, [], size, lambda: other)(one)
    assert (last if returned is None else last[0]) is other


def test_lists_of_as_many_modules_as_there_are_layers() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.more = nn.ModuleList([nn.ReLU()] * 2), nn.ModuleList([nn.ReLU()] * 3)
            self.block = nn.Sequential(nn.ReLU(), nn.ReLU())

    backbone: Any = nn.Module()
    backbone.layers, backbone.encoder = nn.ModuleList([nn.Identity(), nn.Identity()]), Encoder()
    found = segments.lists_of_layers(backbone, 2)
    assert [(module is backbone, name) for module, name in found] == [(True, "layers"), (False, "blocks")]
    assert segments.lists_of_layers(backbone, None) == []


def test_a_returned_tuple_is_recorded_by_its_length() -> None:
    sizes: list[int] = []
    for output in (torch.zeros(3), (torch.zeros(3),), (torch.zeros(3), None)):
        segments._record_size(sizes, nn.Identity(), (), output)
    assert sizes == [0, 1, 2]


def test_checkpointing_is_off_inside_and_on_afterwards() -> None:
    on: Any = SimpleNamespace(gradient_checkpointing=True)
    off: Any = SimpleNamespace(gradient_checkpointing=False)
    assert segments._checkpointing(nn.Identity(), off, on) == [on]
    with suppress(RuntimeError), segments._switched_off([on]):
        assert on.gradient_checkpointing is False
        raise RuntimeError
    assert on.gradient_checkpointing is True


def test_a_cache_that_stands_for_others_tells_its_length_and_holds_no_memory() -> None:
    found = segments._cache_of_length(LlamaConfig(num_hidden_layers=2), 3, 7)
    assert [layer.get_seq_length() for layer in found.layers] == [7, 7]
    for layer in found.layers:
        for held in (layer.keys, layer.values):
            assert held.device.type == "meta"
            assert held.shape == (3, 1, 7, 1)


def test_only_the_layers_of_a_decoder_layer_are_copied() -> None:
    given = cache(0, 0, 0)
    found = segments._empty(given, [1])
    assert [one is other for one, other in zip(found.layers, given.layers, strict=True)] == [True, False, True]
    found.update(torch.zeros(1, 1, 4, 1), torch.zeros(1, 1, 4, 1), 1)
    assert (found.get_seq_length(1), given.get_seq_length(1)) == (4, 0)


def test_rows_continue_the_prefixes_that_they_belong_to() -> None:
    """Rows of three completions: two of the second prompt, and one of the first."""
    given, prefixes = cache(0, 0), cache(3, 3)
    before = prefixes.layers[1].keys.clone()
    found = segments._continuing(given, prefixes, [1], torch.tensor([1, 1, 0]))
    assert found.layers[0] is given.layers[0]
    assert torch.equal(found.layers[1].keys, before[[1, 1, 0]])
    assert torch.equal(found.layers[1].values, before[[1, 1, 0]] + 100)
    assert torch.equal(prefixes.layers[1].keys, before), "other buckets continue the same prefixes"
    assert given.get_seq_length(1) == 0


def test_states_of_a_prefix_are_read_and_not_written() -> None:
    layer = LinearAttentionLayer()
    layer.conv_states, layer.recurrent_states = {0: torch.ones(2, 3, 4)}, {0: torch.ones(2, 5)}
    copied = segments._copied(layer)
    assert copied.conv_states is not layer.conv_states
    assert copied.conv_states[0] is layer.conv_states[0]
    segments._keep_unchanged(copied)
    found = copied.update_conv_state(torch.zeros(2, 3, 1))
    assert found.shape == (2, 3, 5)
    assert found[..., :4].all()
    assert not found[..., 4].any()
    assert copied.update_recurrent_state(torch.zeros(2, 5), 0).sum() == 0
    assert layer.conv_states[0].all()
    assert layer.recurrent_states[0].all()
