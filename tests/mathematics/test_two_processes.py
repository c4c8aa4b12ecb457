"""Tests on two processes: TRL's training loop against the oracle, faults across ranks, and ranks as a large batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mathematics.conftest import SummaryLines
from tests.mathematics.harness import Difference
from tests.mathematics.invariance import INVARIANCE_CELLS, largest_gap
from tests.mathematics.test_invariance import EXACT, VISIBLE, weights_of
from tests.mathematics.test_loss_against_trl import check
from tests.mathematics.two_processes import DISTRIBUTED_FAULTS
from tests.support import launching
from tests.support.grids import only

pytestmark = pytest.mark.slow

# TRL takes the entropy quantile over all ranks, so only the normalizers of the processes remain.
NOT_INVARIANT_OVER_RANKS = ("bnpo", "grpo + entropy bonus", "grpo + router loss")


def measured(checkpoint: Path, folder: Path, every: int) -> dict[str, Any]:
    """Return the results of `two_processes.py`, with each loss type on every n-th layout."""
    output = folder / "figures.json"
    launching.launch_module("ddp_cpu", "tests.mathematics.two_processes", str(checkpoint), str(output), str(every))
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def two_processes(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of one launch for all tests."""
    return measured(checkpoint, tmp_path_factory.mktemp("two"), every=5)


@pytest.mark.parametrize("every", only([], [1, 5], slow=[5]))
def test_a_training_on_two_processes_equals_the_oracle(
    every: int, two_processes: dict[str, Any], checkpoint: Path, tmp_path: Path, record_cell: Callable
) -> None:
    found = two_processes if every == 5 else measured(checkpoint, tmp_path, every)
    for cell, figures in found["comparisons"].items():
        check(Difference(**figures), torch.float64, cell)
        record_cell("TRL's training loop, 2 processes", Difference(**figures))


@pytest.mark.parametrize("name", DISTRIBUTED_FAULTS)
def test_fault_across_processes_is_caught(name: str, two_processes: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check(Difference(**two_processes["faults"][name]), torch.float64, name)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", INVARIANCE_CELLS)
def test_two_processes_equal_a_large_batch_or_differ_as_documented(
    name: str, checkpoint: Path, two_processes: dict[str, Any], summary: SummaryLines
) -> None:
    gap = largest_gap(weights_of(name, checkpoint, 8, 1), two_processes["weights"][name])
    summary(f"invariance, 8 x 1 against 2 processes x 4, {name}: weights differ by {gap:.1e}")
    assert gap > VISIBLE if name in NOT_INVARIANT_OVER_RANKS else gap <= EXACT
