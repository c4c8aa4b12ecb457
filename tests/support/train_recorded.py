"""Trains three steps on a recording in which the ranks of a launch have very different amounts of work, once per job.

A job is the type of a tiny model that `make models` builds, or "tiny" for that of `support/recorded.py`, and options
behind it: "lfm2+reversed+checkpointing". "reversed" has the kinds of its layers in the opposite order, "twice" trains
four steps, two on each generation batch, and "lora" trains an adapter.

python -m tests.support.train_recorded {ours,trl} RANKS OUTPUT JOB..., alone or under `accelerate launch`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import PreTrainedModel
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.run.endings import leave
from tests.support.recorded import Recording, make_trainer, model
from tests.tools import models


def uneven() -> Recording:
    """Four groups: without advantage on the first of two ranks, with on the second."""
    return Recording.random(prompts=4, group=4, seed=5, zero=(0, 1))


def policy_of(job: str) -> PreTrainedModel:
    """Return the model of a job, as it is before training."""
    model_type, *options = job.split("+")
    return model() if model_type == "tiny" else models.build(model_type, reversed_layers="reversed" in options)


def train(kind: str, ranks: int, output: Path, options: Sequence[str], policy: PreTrainedModel) -> None:
    """Train, and leave the weights and what was logged in `output`."""
    twice = "twice" in options
    trainer = make_trainer(
        {"ours": GRPOTrainer, "trl": TRLGRPOTrainer}[kind],
        uneven(),
        policy,
        output,
        peft_config=LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0) if "lora" in options else None,
        loss_type="grpo",
        gradient_checkpointing="checkpointing" in options,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4 // ranks,
        num_iterations=2 if twice else 1,
        max_steps=4 if twice else 3,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        adam_epsilon=0.1,  # small gradients then move a weight in proportion, and rounding stays rounding
        shuffle_dataset=False,
    )
    assert trainer.accelerator.num_processes == ranks
    trainer.train()
    trainer.save_model(str(output))
    if trainer.accelerator.is_main_process:
        (output / "log.json").write_text(json.dumps(trainer.state.log_history))
    if kind == "ours":
        layouts = [layout.described for layout in trainer._log_probs._layouts.values()]
        (output / f"layout-{trainer.accelerator.process_index}").write_text(", ".join(layouts))


def main(kind: str, ranks: str, output: str, *jobs: str) -> None:
    """Train each job in a folder of its own."""
    torch.set_num_threads(1)
    # DeepSpeed partitions what is built after the first trainer.
    policies = [policy_of(job) for job in jobs]
    for job, policy in zip(jobs, policies, strict=True):
        train(kind, int(ranks), Path(output) / job, job.split("+"), policy)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
