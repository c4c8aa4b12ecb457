"""Tokens of the efficiency line, compared with those that the decoder layers get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from grpo_recipes import GRPOTrainer
from grpo_recipes.training.packing import Layout
from tests.support.layouts import layout_of
from tests.support.recorded import Recording, make_trainer, model
from tests.tools.models import build

CASES: dict[str, tuple[Layout, float, bool, dict[str, Any]]] = {
    "qwen3_5_text": (Layout.SHARED, 1.0, True, {}),
    "gpt2": (Layout.SHARED_PADDED, 1.0, False, {}),
    "mamba": (Layout.TRIMMED, 1.0, True, {}),
    "gemma3_text": (Layout.PACKED, 1.0, False, {}),
    "gpt_oss": (Layout.SHARED, 16.0, False, {"router_aux_loss_coef": 0.0}),
    "mamba2": (Layout.SHARED, 16.0, True, {}),
    "llama": (Layout.PACKED, 1.0, True, {}),
}
"""Layout of each type, tokens that cost as much as one more bucket, skipped rows, and settings of its trainer."""


def policy_of(kind: str) -> PreTrainedModel:
    if kind == "gemma3_text":
        return model(transformers.Gemma3TextConfig, head_dim=8, sliding_window=34)  # some rows leave it
    return build(kind)


def first_layer(policy: PreTrainedModel) -> Any:
    backbone = policy.base_model
    return next(getattr(backbone, name) for name in ("layers", "h") if hasattr(backbone, name))[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_the_tokens_computed_are_those_of_a_decoder_layer(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The input of the first layer is counted in each forward of the loss, with few and with many buckets."""
    layout, launches, zero, config = CASES[kind]
    recording = Recording.random(prompts=4, group=4, seed=4, zero=(2,) if zero else (), longest=40)
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 2}
    trainer = make_trainer(GRPOTrainer, recording, policy_of(kind), tmp_path, **sizes, **config)
    trainer._log_probs.launches = launches
    ran: list[int] = []
    counts = False

    def count(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        states = [value for value in args if isinstance(value, Tensor) and value.ndim == 3]
        if counts:  # the layer may get its hidden states, one tensor for each segment, by name
            ran.append(sum(state.shape[0] * state.shape[1] for state in states or [given["hidden_states"]]))

    first_layer(trainer.model).register_forward_pre_hook(count, with_kwargs=True)
    loss = trainer.compute_loss

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal counts
        counts = True
        try:
            return loss(*args, **kwargs)
        finally:
            counts = False

    monkeypatch.setattr(trainer, "compute_loss", counted)
    trainer.train()
    assert layout_of(trainer) is layout
    assert len(ran) == 8, "four micro-batches in each of two steps"
    logged = [entry["efficiency/tokens_computed"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == [sum(ran[:4]), sum(ran[4:])]
