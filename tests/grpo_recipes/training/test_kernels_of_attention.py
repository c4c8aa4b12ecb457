"""Rows of varying shapes never meet cuDNN's attention, which would build a plan for each shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from grpo_recipes import GRPOTrainer
from grpo_recipes.evaluation.engines import Transformers
from grpo_recipes.evaluation.settings import Settings
from grpo_rewards.reward_model import RewardModelScore
from tests.support import short_runs, tiny


class Attention(TorchFunctionMode):
    """Settings of cuDNN at each call of SDPA inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.enabled: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def attention() -> Attention:
    return Attention()


@pytest.mark.parametrize("layout", ["packed", pytest.param("shared", marks=pytest.mark.slow)])
def test_a_run_with_checkpointing_and_an_evaluation(layout: str, attention: Attention, tmp_path: Path) -> None:
    """The layers that the backward pass runs again must choose the kernel of the first time."""
    arguments = {"gradient_checkpointing": True, "eval_strategy": "steps", "eval_steps": 1, "beta": 0.0}
    trainer = short_runs.trainer(
        GRPOTrainer,
        tiny.policy(num_hidden_layers=1, vocab_size=258),
        short_runs.arguments(tmp_path, max_completion_length=4, **arguments),
        micro_batching={"layout": layout},
        eval_dataset=short_runs.PROMPTS.select(range(4)),
    )
    with attention:
        trainer.train()
    assert len(attention.enabled) > 20
    assert not any(attention.enabled)
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_the_engine_of_an_evaluation(attention: Attention) -> None:
    with attention:
        Transformers(tiny.policy(num_hidden_layers=1), tiny.byte_tokenizer())(["2 + 2 ="], Settings(max_new_tokens=4))
    assert len(attention.enabled) >= 4
    assert not any(attention.enabled)


def test_a_reward_model(attention: Attention, tmp_path: Path) -> None:
    tiny.save_reward_model(tmp_path)
    with attention:
        RewardModelScore(str(tmp_path), device="cpu")(prompts=["1"] * 2, completions=["2", "three"])
    assert attention.enabled
    assert not any(attention.enabled)
