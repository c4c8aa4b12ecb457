"""Transformers' continuous batching with packed rows, on a cache of bounded size, and what it may not leave out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation import logits_process

from grpo_recipes.training.packing import ATTENTION, Layout
from grpo_rewards.errors import UserError
from tests.grpo_recipes.training.models import trainer
from tests.tiny import byte_tokenizer, policy

CB = {"use_transformers_continuous_batching": True}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_it_runs_beside_packed_rows_in_a_cache_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(tmp_path, max_steps=2, max_completion_length=8, **CB)
    seen: list[tuple[str, int]] = []
    generate = run.model.generate_batch

    def watched(prompts: Any, **how: Any) -> Any:
        seen.append((run.model.config._attn_implementation, how["continuous_batching_config"].num_blocks))
        return generate(prompts, **how)

    monkeypatch.setattr(run.model, "generate_batch", watched, raising=False)
    run.train()
    assert list(run._log_probs._layouts.values()) == [Layout.PACKED]
    assert run.model.config._attn_implementation == ATTENTION
    assert seen == [("sdpa", 16), ("sdpa", 16)], "one page of 256 tokens for each of 16 rows"


def test_a_cache_that_the_user_sizes_stays_that_large(tmp_path: Path) -> None:
    run = trainer(tmp_path, **CB, transformers_continuous_batching_config={"num_blocks": 7})
    with run._continuous_batching.around(run.model, [[5, 6]], 8):
        assert run.continuous_batching_config.num_blocks == 7


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"generation_kwargs": {"min_new_tokens": 3}}, "min_new_tokens"),
        ({"generation_kwargs": {"stop": ["5"]}}, "stop"),
    ],
)
def test_options_that_it_would_leave_out(changes: dict[str, Any], lost: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"continuous_batching` leaves out {lost}: set it to false, or drop the option"):
        trainer(tmp_path, policy=policy(), processing_class=byte_tokenizer(), **CB, **changes)


def test_contract_with_transformers() -> None:
    """The processors that continuous batching drops."""
    dropped = {
        name
        for name, processor in vars(logits_process).items()
        if getattr(processor, "supports_continuous_batching", None) is False
    }
    assert dropped == {
        "EncoderRepetitionPenaltyLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
    }
