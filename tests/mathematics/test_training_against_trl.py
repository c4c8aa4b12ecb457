"""TRL's own training loop compared with the oracle: losses and gradients of each step, on one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.mathematics.oracle import LOSS_TYPES, Geometry, Objective
from tests.mathematics.test_loss_against_trl import GEOMETRIES, check
from tests.mathematics.training import compare_training


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.nightly)], ids=["some", "every"])
@pytest.mark.parametrize(
    "loss_type", [pytest.param(name, marks=() if name == "dapo" else pytest.mark.slow) for name in LOSS_TYPES]
)
def test_a_training_on_one_process_equals_the_oracle(
    loss_type: str, every: int, checkpoint: Path, record_cell: Callable
) -> None:
    for index, geometry in list(enumerate(GEOMETRIES))[LOSS_TYPES.index(loss_type) % every :: every]:
        objective = Objective(loss_type, ("token", "sequence")[index % 2], beta=0.04)
        found = compare_training(checkpoint, objective, geometry, 8 // geometry.steps_per_generation, steps=3)
        check(found, torch.float64, (geometry, objective))
        record_cell("TRL's training loop, 1 process", found)


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
def test_the_policy_moves_off_policy_within_a_generation(checkpoint: Path) -> None:
    found = compare_training(checkpoint, Objective("grpo", epsilon=0.05), Geometry(1, 1, 3), 8, steps=6)
    check(found, torch.float64, "mu = 3")
