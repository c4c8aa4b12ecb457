"""Two ranks, of which the second generates without its adapter, or with a bias: what the check says on each, as a file.

accelerate launch ... -m tests.support.train_one_rank_wrong OUTPUT (adapter | bias)
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationMixin

from grpo_recipes.process.faults import NotThePolicy
from grpo_recipes.run.endings import leave
from tests.support.architectures import adapter, trainer


def main(output: str, fault: str) -> None:
    """Train until the check stops it."""
    torch.set_num_threads(1)
    made = trainer(Path(output), gradient_accumulation_steps=1, peft_config=adapter())
    rank, stock = made.accelerator.process_index, GenerationMixin.generate
    prepare = GenerationMixin._prepare_generation_config

    def without(self: Any, *args: Any, **kwargs: Any) -> Any:
        with made.model.disable_adapter():
            return stock(self, *args, **kwargs)

    def biased(self: Any, *args: Any, **kwargs: Any) -> Any:
        config, rest = prepare(self, *args, **kwargs)
        config.sequence_bias = [[[5], 50.0]]
        return config, rest

    if rank == 1 and fault == "adapter":
        GenerationMixin.generate = without
    elif rank == 1:
        GenerationMixin._prepare_generation_config = biased
    try:
        made.train()
    except NotThePolicy as error:
        Path(output, f"said-{rank}.txt").write_text(str(error))
    made.accelerator.end_training()
    leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
