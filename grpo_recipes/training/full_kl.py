"""The KL term over the full vocabulary, in place of TRL's estimate from the sampled tokens.

    KL(policy || reference) = sum over v of p(v) log(p(v) / q(v))

at each completion token, where p and q are the policy's and the reference's distributions at the trainer's temperature.
It costs one forward of the reference per micro-batch. TRL's kernel projects hidden states to logits in tiles, so no
logits are stored, and memory does not grow with completion length x vocabulary.

Shapes: B rows, L tokens per row, T completion columns, H hidden dimensions, V tokens of the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

from grpo_recipes.recipe.losses import LOSS_TYPES

# Configuration keys by which a model scales or caps its logits behind the head, each with the value without an effect.
# The kernel computes logits as hidden states times head. It would ignore these keys without an error.
_LOGIT_TRANSFORMS = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "output_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "logits_scaling": 1.0,
}


@dataclass(frozen=True)
class Projection:
    """Last hidden states and the head that projects them to logits."""

    hidden: Tensor
    """(B, T, H). Position t predicts completion token t."""
    weight: Tensor
    """(V, H)."""
    bias: Tensor | None
    """(V,)."""

    @classmethod
    def of(cls, model: PreTrainedModel, states: Tensor, length: int) -> Projection:
        """Return the projection of the last `length` tokens from hidden states, (B, L, H), with the active head."""
        # The head is read here and not stored: an adapter may replace it, and ZeRO-3 gathers it only during a forward.
        head = model.get_output_embeddings()
        return cls(states[:, -length - 1 : -1], head.weight, head.bias)


READS_PADDED_ROWS = "the full-vocabulary KL reads the hidden states of TRL's rows"
"""Reason for which rows stay padded with the full KL."""


def check_full_kl(beta: float, loss_type: str, *, images: bool, fsdp: bool) -> None:
    """Raise `ValueError` if a trainer with these settings cannot have the full KL.

    Args:
        beta: weight of the KL term.
        loss_type: TRL's `loss_type`.
        images: True if the model takes images.
        fsdp: True if the model is sharded by FSDP.
    """
    if beta == 0.0:
        raise ValueError("`kl_estimator: full` needs a reference: set `beta` above 0")
    if images:
        raise ValueError("`kl_estimator: full` does not support models with images: use `sampled`")
    if fsdp:
        raise ValueError("`kl_estimator: full` does not support FSDP: use DDP or DeepSpeed")
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"`kl_estimator: full` does not know how `loss_type: {loss_type}` weighs tokens")


def token_kl(policy: Projection, reference: Projection, mask: Tensor, temperature: float) -> Tensor:
    """Return KL(policy || reference) at each completion token, (B, T), float32, 0 where `mask`, (B, T), is 0.

    The gradient flows to the policy's hidden states and head.
    """
    counted = mask.bool()
    # beta = 1 selects KL(first || second). TRL's distillation uses the values between, a mixture of both directions.
    divergence, _ = ChunkedDivergenceFunction.apply(
        policy.hidden[counted],
        policy.weight,
        policy.bias,
        reference.hidden[counted],
        reference.weight,
        reference.bias,
        1.0,
        temperature,
    )
    return divergence.new_zeros(mask.shape).masked_scatter(counted, divergence)


@contextmanager
def last_hidden_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collect the last hidden states, (B, L, H), of each forward of a causal language model inside the block."""
    states: list[Tensor] = []
    # A hook, because `output_hidden_states` would keep the states of every layer in memory.
    handle = model.base_model.register_forward_hook(lambda _, __, output: states.append(output.last_hidden_state))
    try:
        yield states
    finally:
        handle.remove()


class FullKL:
    """Computation of the KL of each token inside the policy's own forward.

    The policy's forward is wrapped once. A forward inside `against` leaves the result in `tokens`. Any other is
    unchanged.

    Raises:
        ValueError: the model transforms its logits behind the head.
    """

    def __init__(self, policy: PreTrainedModel, temperature: float) -> None:
        config = policy.config.get_text_config()
        for key, neutral in _LOGIT_TRANSFORMS.items():
            if getattr(config, key, None) not in (None, neutral):
                raise ValueError(f"`kl_estimator: full` does not support models with `{key}`: use `sampled`")
        self.tokens: Tensor | None = None
        self._task: tuple[Projection, Tensor] | None = None
        forward = policy.forward

        # Inside the forward, and not after it: ZeRO-3 has gathered the head only there.
        @functools.wraps(forward)  # generation checks its arguments against the signature
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._task is None:
                return forward(*args, **kwargs)
            if self.tokens is not None:  # a second forward would overwrite the KL of the first rows
                raise RuntimeError("`kl_estimator: full` needs a micro-batch to be one forward of the policy")
            reference, mask = self._task
            with last_hidden_states(policy) as states:
                outputs = forward(*args, **kwargs)
            ours = Projection.of(policy, states[0], mask.shape[1])
            self.tokens = token_kl(ours, reference, mask, temperature)
            return outputs

        policy.forward = wrapped

    @contextmanager
    def against(self, reference: Projection, mask: Tensor) -> Iterator[None]:
        """Let the one forward of the policy inside the block compute the KL at the tokens of `mask`, (B, T)."""
        self.tokens, self._task = None, (reference, mask)
        try:
            yield
        finally:
            self._task = None
