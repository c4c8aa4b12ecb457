"""Parts of the forward in segments: what is recorded of a model, what is restored, and states of a prefix."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn
from transformers.cache_utils import LinearAttentionLayer

from grpo_recipes.training import segments
from tests.support.recorded import model


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
