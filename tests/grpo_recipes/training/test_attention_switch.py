"""Packed rows beside the attention implementation that the user set for a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

from grpo_recipes.training.packed_attention import ATTENTION
from grpo_recipes.training.packing import Layout
from tests.support.architectures import trainer as whole_trainer
from tests.support.layouts import RAGGED, check_exact, flat, layout_of, one_by_one, scored, trainer_on
from tests.support.recorded import model

KERNEL = "kernels-community/flash-attn2"


@pytest.fixture
def kernel() -> Iterator[list[int]]:
    """Yield the calls of a stand-in for a kernel of FlashAttention from a hub: 16-bit tensors, masks of two axes."""
    calls: list[int] = []

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        if query.dtype == torch.float32 and not torch.is_autocast_enabled("cpu"):
            raise RuntimeError("FlashAttention only supports fp16 and bf16 data type")
        calls.append(1)
        length = key.shape[2]
        seen = torch.ones(query.shape[2], length).tril(length - query.shape[2]).bool()[None, None]
        if mask is not None:
            seen = seen & mask[:, None, None, -length:].bool()
        # A row of padding alone attends to itself, and its result is never read.
        seen = seen | torch.eye(query.shape[2], length).bool()[None, None]
        return sdpa_attention_forward(module, query, key, value, seen, **kwargs)

    AttentionInterface.register(KERNEL, attention)
    AttentionMaskInterface.register(KERNEL, flash_attention_mask)
    yield calls
    AttentionInterface._global_mapping.pop(KERNEL)
    AttentionMaskInterface._global_mapping.pop(KERNEL)


def test_a_model_with_eager_attention_is_packed(tmp_path: Path) -> None:
    policy = model(attn_implementation="eager")
    expected = one_by_one(policy.eval(), flat(RAGGED))
    trainer = trainer_on(policy, tmp_path)
    check_exact(trainer, flat(RAGGED), expected)
    assert layout_of(trainer) is Layout.PACKED
    policy.save_pretrained(tmp_path)
    assert ATTENTION not in (tmp_path / "config.json").read_text()


def test_a_model_on_a_kernel_of_16_bits_is_packed_under_autocast(tmp_path: Path, kernel: list[int]) -> None:
    """The comparison in float32 runs without the kernel, which takes 16-bit tensors only."""
    policy = model()
    policy.config._attn_implementation = KERNEL
    trainer = trainer_on(policy, tmp_path, bf16=True)
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.PACKED
    assert kernel


def test_generation_and_the_trained_model_have_the_users_implementation(tmp_path: Path) -> None:
    run = whole_trainer(tmp_path, max_steps=2, max_completion_length=4)
    run.model.config._attn_implementation = "eager"
    seen: list[str] = []
    generate = run._generation

    def watched(*args: Any) -> Any:
        seen.append(run.model.config._attn_implementation)
        return generate(*args)

    run._generation = watched  # type: ignore[assignment]
    run._generation.one_batch = generate.one_batch  # type: ignore[attr-defined]
    run.train()
    assert list(run._log_probs._layouts.values()) == [Layout.PACKED]
    assert seen == ["eager", "eager"]
    assert run.model.config._attn_implementation == "eager"


def test_a_row_that_is_not_packed_has_the_users_implementation(tmp_path: Path, kernel: list[int]) -> None:
    policy = model().bfloat16()
    policy.config._attn_implementation = KERNEL
    trainer = trainer_on(policy, tmp_path)
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.PACKED
    kernel.clear()
    rows = flat(RAGGED)
    rows.attention_mask[:, -3] = 0  # a hole, which no packed row has
    scored(trainer, rows)
    assert kernel
