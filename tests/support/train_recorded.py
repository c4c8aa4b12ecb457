"""Trains three steps on a recording in which the ranks of a launch have very different amounts of work.

With `--twice` it trains four steps, two on each generation batch. With the name of a model type, the policy is the tiny
model of that type that `make models` builds, with `--reversed` with the kinds of its layers in the opposite order.

python -m tests.support.train_recorded {ours,trl} RANKS OUTPUT [TYPE] [--lora] [--twice] [--checkpointing]
[--reversed], alone or under `accelerate launch`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.train import leave
from tests.support.recorded import Recording, make_trainer, model
from tests.tools import models


def uneven() -> Recording:
    """Four groups: without advantage on the first of two ranks, with on the second."""
    return Recording.random(prompts=4, group=4, seed=5, zero=(0, 1))


def main(kind: str, ranks: str, output: str, *options: str) -> None:
    """Train, and leave the weights and what was logged in `output`."""
    torch.set_num_threads(1)
    lora = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
    types = [option for option in options if not option.startswith("--")]
    trainer = make_trainer(
        {"ours": GRPOTrainer, "trl": TRLGRPOTrainer}[kind],
        uneven(),
        models.build(types[0], reversed_layers="--reversed" in options) if types else model(),
        Path(output),
        peft_config=lora if "--lora" in options else None,
        loss_type="grpo",
        gradient_checkpointing="--checkpointing" in options,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4 // int(ranks),
        num_iterations=2 if "--twice" in options else 1,
        max_steps=4 if "--twice" in options else 3,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        adam_epsilon=0.1,  # small gradients then move a weight in proportion, and rounding stays rounding
        shuffle_dataset=False,
    )
    assert trainer.accelerator.num_processes == int(ranks)
    trainer.train()
    trainer.save_model(output)
    if trainer.accelerator.is_main_process:
        (Path(output) / "log.json").write_text(json.dumps(trainer.state.log_history))
    if kind == "ours":
        (Path(output) / f"layout-{trainer.accelerator.process_index}").write_text(
            ", ".join(layout.described for layout in trainer._log_probs._layouts.values())
        )
    trainer.accelerator.end_training()
    leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
