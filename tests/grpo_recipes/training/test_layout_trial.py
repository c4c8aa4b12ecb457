"""Rows that the comparisons of layouts choose, and the state of a model during them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from grpo_recipes.training import layout_trial
from tests.support.layouts import padded, tokens_of


def test_the_sample_prefers_prompts_with_several_completions_and_then_more_tokens() -> None:
    prompts = [[5] * 9, [6], [6], [7, 7], [7, 7], [8], [8]]
    rows = padded(prompts, [[1] * 9, [1], [1], [1, 2], [1], [1, 2, 3, 4, 5], [1]])
    few = layout_trial.sample(rows, np.arange(7))
    assert tokens_of(few) == [([8], [1, 2, 3, 4, 5]), ([8], [1]), ([7, 7], [1, 2]), ([7, 7], [1])]
    assert (few.input_ids.shape[1], few.logits_to_keep) == (18, 9)
    alone = layout_trial.sample(rows, np.array([0, 2]), longest=3)
    assert tokens_of(alone) == [([5] * 3, [1] * 3)] * 2 + [([6], [1])] * 2
    none = layout_trial.sample(rows, np.arange(0))
    assert none.input_ids.tolist() == rows.input_ids[:1].tolist()
    assert not none.completion_mask.any()


# ---- The state of a model during the check


def test_tensors_of_one_value_get_noise_by_their_size_and_their_bits_back() -> None:
    policy, late = nn.Module(), torch.zeros(70)
    late[69] = 1.0
    start = {
        "zeros": torch.zeros(4000), "twos": torch.full((4000,), -2.0), "others": torch.arange(70.0), "late": late,
        "single": torch.zeros(1), "empty": torch.zeros(0), "minus": torch.tensor([-0.0, 0.0]),
    }  # fmt: skip
    for name, values in start.items():
        policy.register_parameter(name, nn.Parameter(values.clone()))
    policy.register_parameter("frozen", nn.Parameter(torch.zeros(4), requires_grad=False))
    state = torch.get_rng_state()
    with layout_trial.perturbed(policy):
        first = policy.zeros.detach().clone()
        assert first.std().item() == pytest.approx(0.05, rel=0.05)
        assert (policy.twos + 2).std().item() == pytest.approx(0.2, rel=0.05)
        assert torch.equal(policy.others, start["others"])
        assert torch.equal(policy.late, late)
        assert policy.single.any()
        assert not policy.frozen.any()
    for name, values in start.items():
        assert torch.equal(getattr(policy, name).view(torch.int32), values.view(torch.int32)), name
    assert torch.equal(torch.get_rng_state(), state)
    with layout_trial.perturbed(policy):
        assert torch.equal(policy.zeros, first), "every rank holds the same weights"
    policy.zeros.ds_id = 1  # type: ignore[attr-defined]
    with layout_trial.perturbed(policy):
        assert not policy.zeros.any(), "gathering each weight of a full model would take longer than a step"


def test_gradients_are_those_of_a_fixed_combination_of_all_log_probabilities() -> None:
    weight, unused = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(1))
    first, none = layout_trial.gradients(weight * 2, [weight, unused])
    assert none is None
    assert first is not None
    assert len(first.unique()) == 6, "each token has a weight of its own, so that errors don't cancel"
    assert weight.grad is None
    reentrant, _ = layout_trial.gradients(weight * 2, [weight, unused], reentrant=True)
    assert torch.equal(reentrant, first)  # type: ignore[arg-type]
