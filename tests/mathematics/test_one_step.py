"""The step on one page, examples/one_step.py, compared with a step of the trainer on the same completions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from examples import one_step
from grpo_recipes import GRPOTrainer
from tests.support.trainers import make_trainer

ROOT = Path(__file__).resolve().parents[2]


class Gradients(TrainerCallback):
    """Copies of all gradients before the optimizer's step, by the name of the weight."""

    def __init__(self) -> None:
        self.found: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, *args: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        self.found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.usefixtures("in_float64")
def test_its_gradient_is_the_trainers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    policy, tokenizer = one_step.tiny_policy()
    policy.train()
    completions = one_step.sample(policy, tokenizer, one_step.PROMPTS)
    texts = tokenizer.batch_decode([one.tokens for one in completions], skip_special_tokens=True)
    one_step.set_advantages(completions, one_step.digits([], texts))
    assert len({one.advantage for one in completions}) > 4
    one_step.grpo_loss(policy, completions).backward()
    ours = {name: weight.grad.clone() for name, weight in policy.named_parameters() if weight.grad is not None}
    policy.zero_grad()

    def rollout(prompts: list[str], trainer: Any) -> dict[str, list]:
        groups = dict(
            zip(one_step.PROMPTS, (completions[: one_step.GROUP], completions[one_step.GROUP :]), strict=True)
        )
        rows = [groups[prompt].pop(0) for prompt in prompts]
        return {
            "prompt_ids": [row.prompt for row in rows],
            "completion_ids": [row.tokens for row in rows],
            "logprobs": None,
        }

    trainer = make_trainer(
        GRPOTrainer,
        policy,
        tmp_path,
        rewards=one_step.digits,
        rows=Dataset.from_dict({"prompt": one_step.PROMPTS}),
        tokenizer=tokenizer,
        rollout_func=rollout,
        num_generations=one_step.GROUP,
        per_device_train_batch_size=one_step.GROUP,
        gradient_accumulation_steps=len(one_step.PROMPTS),
        max_completion_length=12,
        max_steps=1,
        max_grad_norm=0.0,
        loss_type="dapo",
    )
    recorded = Gradients()
    trainer.add_callback(recorded)
    trainer.train()
    assert recorded.found.keys() == ours.keys()
    for name, gradient in ours.items():
        # TRL holds rewards and advantages in float32.
        torch.testing.assert_close(recorded.found[name], gradient, rtol=0, atol=1e-6 * float(gradient.abs().max()))


@pytest.mark.slow
def test_its_thirty_steps_raise_the_reward() -> None:
    done = subprocess.run(
        [sys.executable, "examples/one_step.py"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    shares = [int(line.split(":")[1].split("%")[0]) for line in done.stdout.splitlines()]
    assert len(shares) == 30
    assert sum(shares[-5:]) > 2 * sum(shares[:5])
