"""Recipes of recipes/algorithms on two processes. Started by `accelerate launch`, it writes its results to a JSON file.

accelerate launch --config_file accelerate_configs/ddp_cpu.yaml -m tests.mathematics.two_processes_algorithms CHECKPOINT
OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState

from grpo_recipes.run.endings import leave
from tests.mathematics.algorithms import float64_rewards, hold, layout_of
from tests.mathematics.harness import float64_trl
from tests.mathematics.papers import PAPERS


def main(checkpoint: Path, output: Path) -> None:
    """Train each recipe on both ranks, and write the results from rank 0."""
    torch.set_num_threads(1)
    with float64_trl(), float64_rewards():
        figures = {name: vars(hold(checkpoint, name, layout_of(name, "two ranks"))) for name in PAPERS}
    if PartialState().is_main_process:
        output.write_text(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    leave(0)
