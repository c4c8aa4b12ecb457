"""The full KL outside of a training: the settings and models that it refuses, and the forward that it wraps."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_recipes.training.full_kl import FullKL, Projection, check_full_kl
from tests.support.recorded import model as tiny_model


def test_settings_without_a_full_kl_are_refused() -> None:
    for changes, figure in (
        ({}, None), ({"beta": 1.0}, None), ({"beta": 0.0}, "`beta`"), ({"images": True}, "images"),
        ({"fsdp": True}, "FSDP"), ({"loss_type": "another"}, "another"),
    ):  # fmt: skip
        given: dict[str, Any] = {"beta": 0.04, "loss_type": "grpo", "images": False, "fsdp": False, **changes}
        with pytest.raises(ValueError, match=figure) if figure else nullcontext():
            check_full_kl(**given)


def test_one_block_takes_one_forward_of_the_policy() -> None:
    policy = tiny_model()
    kl = FullKL(policy, 1.0)
    ids, mask = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[1, 1]])
    hidden = torch.randn(1, 2, policy.config.hidden_size)
    reference = Projection(hidden, policy.get_output_embeddings().weight.detach(), None)
    plain = policy(input_ids=ids).logits
    for _ in range(2):
        with kl.against(reference, mask):
            assert torch.equal(policy(input_ids=ids).logits, plain)
            assert kl.tokens is not None
            with pytest.raises(RuntimeError, match="kl_estimator"):
                policy(input_ids=ids)
        policy(input_ids=ids)  # outside of the block


def test_logits_that_are_scaled_by_1_are_not_transformed() -> None:
    keys = ("logit_scale", "output_multiplier", "lm_head_multiplier", "logits_scaling")

    def wrapped(**config: Any) -> Any:
        text = SimpleNamespace(**config)
        policy: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: text), forward=print)
        return FullKL(policy, 1.0) and policy.forward

    assert wrapped(**dict.fromkeys(keys, 1.0), final_logit_softcapping=None) is not print
    for key in (*keys, "final_logit_softcapping"):
        with pytest.raises(ValueError, match=key):
            wrapped(**{key: 2.0})
