"""SGD on the same completions, divided differently over micro-batches and processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOTrainer

from tests.mathematics.harness import EOS, NUM_GENERATIONS, make_trainer, moved
from tests.mathematics.oracle import LOSS_TYPES

ROWS = 8
STEPS = 3

# Settings of TRL by their name in the table. Sequence-level ratios are the setting of LUSPO and GSPO.
INVARIANCE_CELLS: dict[str, dict[str, Any]] = {
    **{loss_type: {"loss_type": loss_type, "beta": 0.04} for loss_type in LOSS_TYPES},
    "grpo + entropy bonus": {"loss_type": "grpo", "beta": 0.04, "entropy_coef": 0.05},
    "grpo + entropy quantile": {"loss_type": "grpo", "beta": 0.04, "top_entropy_quantile": 0.4},
    "grpo + router loss": {"loss_type": "grpo", "beta": 0.04, "experts": True},
}


def completion(prompt: list[int], member: int) -> list[int]:
    """Return a completion whose tokens and length (1 to 8) depend on the prompt and the place in the group."""
    seed = sum((i + 1) * token for i, token in enumerate(prompt)) + 7 * member
    length = 1 + (seed * 5 + member) % 8
    return [2 + (seed * (i + 3) + i * i) % 10 for i in range(length - 1)] + [EOS]


def recorded(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
    """Return the recorded completions of the prompts, the same on every rank, as TRL's rollout function does."""
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    first = trainer.accelerator.process_index * len(prompts)
    members = [(first + i) % NUM_GENERATIONS for i in range(len(prompts))]
    completions = [completion(ids, member) for ids, member in zip(prompt_ids, members, strict=True)]
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}


def final_weights(
    checkpoint: Path, config: dict[str, Any], rows_per_micro_batch: int, accumulation: int
) -> dict[str, list[float]]:
    """Return the policy's weights by name, flattened, after `STEPS` steps of SGD on the recorded completions."""
    config = dict(config)
    experts = config.pop("experts", False)
    trainer = make_trainer(
        checkpoint / "experts" if experts else checkpoint,
        # The experts need torch's grouped matrix product, which has no float64.
        torch.float32 if experts else torch.float64,
        **{
            "per_device_train_batch_size": rows_per_micro_batch,
            "gradient_accumulation_steps": accumulation,
            "max_steps": STEPS,
            "learning_rate": 0.5,
            "lr_scheduler_type": "constant",
            "optim": "sgd",
            "max_grad_norm": 0.0,
            "logging_steps": 1,
            **config,
        },
    )
    assert rows_per_micro_batch * accumulation * trainer.accelerator.num_processes == ROWS
    trainer.rollout_func = recorded
    trainer.train_dataset = Dataset.from_dict({"prompt": ["1 2", "3 4 5", "6", "7 8 9 0", "5 5", "2 4 6"]})
    trainer.ref_model.load_state_dict(moved(trainer.ref_model, seed=99))
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: parameter.detach().flatten().tolist() for name, parameter in model.named_parameters()}


def largest_gap(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> float:
    """Return the largest difference between two sets of weights."""
    return max(abs(a - b) for name in ours for a, b in zip(ours[name], theirs[name], strict=True))
