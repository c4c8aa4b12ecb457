"""Trains three steps in which one rank's completions are long and the other's end with their first token.

accelerate launch ... -m tests.support.train_uneven {auto,off} OUTPUT [--lora]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from grpo_recipes.run.endings import leave
from tests.support.architectures import adapter, trainer
from tests.support.recorded import WORDS


def main(generation: str, output: str, *options: str) -> None:
    """Train, and leave weights, log and what was generated in `output`."""
    torch.set_num_threads(1)
    lora = {"peft_config": adapter()} if "--lora" in options else {}
    made = trainer(Path(output), generation=generation, gradient_accumulation_steps=1, log_completions=True, **lora)
    assert made.accelerator.num_processes == 2
    if made.accelerator.process_index == 1:
        made.generation_config.eos_token_id = made.eos_token_ids = list(range(WORDS))
    made.train()
    made.save_model(output)
    if made.accelerator.is_main_process:
        (Path(output) / "log.json").write_text(json.dumps(made.state.log_history))
    made.accelerator.end_training()
    leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
