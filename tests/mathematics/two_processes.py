"""Comparisons that need two processes. Started by `accelerate launch`, the script writes their results to a JSON file.

accelerate launch --config_file accelerate_configs/ddp_cpu.yaml -m tests.mathematics.two_processes CHECKPOINT OUT EVERY
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from trl import GRPOTrainer

from grpo_recipes.run.endings import leave
from tests.mathematics.harness import edited, float64_divergence, float64_trl
from tests.mathematics.invariance import INVARIANCE_CELLS, final_weights
from tests.mathematics.oracle import LOSS_TYPES, Geometry, Objective
from tests.mathematics.training import compare_training

# Completions per micro-batch and rank. With 2 x 2 completions per generation batch, one group of 4 spans both ranks.
LAYOUTS = (
    (Geometry(1, 1, 1, ranks=2), 4),
    (Geometry(2, 2, 1, ranks=2), 2),
    (Geometry(2, 4, 1, ranks=2), 2),
    (Geometry(1, 1, 3, ranks=2), 2),
    (Geometry(4, 2, 2, ranks=2), 2),
)


def comparisons(checkpoint: Path, every: int) -> dict[str, dict[str, float]]:
    """Compare every loss type on every n-th layout, and an entropy quantile over both ranks, with the oracle."""
    figures = {}
    for place, loss_type in enumerate(LOSS_TYPES):
        for index, (geometry, rows) in list(enumerate(LAYOUTS))[place % every :: every]:
            objective = Objective(loss_type, ("token", "sequence")[index % 2], beta=0.04)
            found = compare_training(checkpoint, objective, geometry, rows, steps=3)
            figures[f"{loss_type}, {objective.importance_sampling_level}, {geometry}, {rows} rows"] = asdict(found)
    for loss_type in ("grpo", "dapo"):
        with float64_divergence():
            found = compare_training(checkpoint, Objective(loss_type, beta=0.3), *LAYOUTS[2], steps=2, full_kl=True)
        figures[f"full-vocabulary KL, {loss_type}, {LAYOUTS[2]}"] = asdict(found)
    for coefficient in (0.0, 0.01):
        objective = Objective("grpo", beta=0.04, top_entropy_quantile=0.4, entropy_coef=coefficient)
        found = compare_training(checkpoint, objective, *LAYOUTS[0], steps=2)
        figures[f"entropy quantile 0.4, coefficient {coefficient}"] = asdict(found)
    return figures


# Faults that need two processes: function, replaced text, replacement, and the loss type that shows the fault.
DISTRIBUTED_FAULTS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "ranks forgotten in the normalizer": (
        "_compute_loss",
        ".clamp(min=1.0) / self.accelerator.num_processes",
        ".clamp(min=1.0)",
        {"loss_type": "dapo"},
    ),
    "the tokens of one rank for those of all": (
        "_generate_and_score_completions",
        "self.accelerator.gather(loss_mask.sum()).sum()",
        "loss_mask.sum()",
        {"loss_type": "dapo"},
    ),
    "the first rank's advantages on every rank": (
        "_generate_and_score_completions",
        "advantages = advantages[process_slice]",
        "advantages = advantages[: len(prompts)]",
        {"loss_type": "grpo"},
    ),
    "an entropy threshold for each rank": (
        "get_high_entropy_mask",
        "self.accelerator.gather(padded)",
        "padded",
        {"loss_type": "grpo", "top_entropy_quantile": 0.4},
    ),
}


def planted_faults(checkpoint: Path) -> dict[str, dict[str, float]]:
    """Return the difference between the oracle and TRL with each fault planted."""
    figures = {}
    for name, (function, old, new, objective) in DISTRIBUTED_FAULTS.items():
        with edited(GRPOTrainer, function, (old, new)):
            figures[name] = asdict(compare_training(checkpoint, Objective(**objective), *LAYOUTS[0], steps=1))
    return figures


def main(checkpoint: Path, output: Path, every: int) -> None:
    """Run all comparisons on both ranks, and write the results from rank 0."""
    torch.set_num_threads(1)
    gc.freeze()
    with float64_trl():
        figures = {
            "comparisons": comparisons(checkpoint, every),
            "faults": planted_faults(checkpoint),
            "weights": {name: final_weights(checkpoint, cell, 4, 1) for name, cell in INVARIANCE_CELLS.items()},
        }
    if PartialState().is_main_process:
        output.write_text(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    leave(0)
