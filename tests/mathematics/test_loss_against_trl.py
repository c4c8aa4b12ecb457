"""TRL's loss, its gradient in every parameter and its metrics, compared with the oracle, cell by cell.

A cell is one choice of loss type, importance level, geometry, KL term, two-sided clip, upper clip and temperature. It
is compared at every optimizer step of its generation batch, of which the later ones are off-policy. For each choice of
the first three, the slow tests take one of the 24 combinations of the last four, and the nightly ones all: 1920 cells.
None of them is quick, because they call TRL's code and none of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch

from tests.mathematics.conftest import ScenarioFactory
from tests.mathematics.harness import EOS, MAX_COMPLETION_LENGTH, Difference, compare
from tests.mathematics.oracle import CLIPPED_LOSS_TYPES, LOSS_TYPES, Geometry, Objective, importance_ratio

GEOMETRIES = (Geometry(1, 1, 1), Geometry(2, 2, 1), Geometry(2, 4, 1), Geometry(1, 1, 3), Geometry(4, 2, 2))
LEVELS = ("token", "sequence")
KL_TERMS = ({"beta": 0.0}, {"beta": 0.04}, {"beta": 0.04, "use_bias_correction_kl": False})
DELTAS = (None, 1.5)
UPPER_CLIPS = (None, 0.28)
TEMPERATURES = (1.0, 0.8)
COMBINATIONS = tuple(product(KL_TERMS, DELTAS, UPPER_CLIPS, TEMPERATURES))

SAMPLE = 24
"""Number of cells of which the slow tests compare one, in float64."""

LIMIT = {torch.float32: 1e-5, torch.float64: 1e-10}
LOSS_LIMIT = {torch.float32: 1e-6, torch.float64: 1e-10}
METRIC_LIMIT = {torch.float32: 1e-5, torch.float64: 1e-6}


def cells(loss_type: str, every: int) -> Iterator[tuple[Geometry, Objective]]:
    """Yield every n-th cell of a loss type, starting one later in each block so that all choices occur."""
    for block, (level, geometry) in enumerate(product(LEVELS, GEOMETRIES)):
        for kl, delta, upper, temperature in COMBINATIONS[(block * 5 + LOSS_TYPES.index(loss_type)) % every :: every]:
            yield (
                geometry,
                Objective(
                    loss_type,
                    level,
                    epsilon_high=upper,
                    delta=delta,
                    temperature=temperature,
                    max_completion_length=MAX_COMPLETION_LENGTH,
                    **kl,
                ),
            )


def check(difference: Difference, dtype: torch.dtype, cell: object) -> None:
    """Assert that loss, gradient and metrics of a cell are within the limits."""
    assert difference.loss <= LOSS_LIMIT[dtype], (cell, difference)
    assert difference.gradient <= LIMIT[dtype], (cell, difference)
    assert difference.metric <= METRIC_LIMIT[dtype], (cell, difference)


def compare_cells(
    loss_type: str, every: int, dtype: torch.dtype, scenario: ScenarioFactory, record: Callable[[str, Difference], None]
) -> None:
    for geometry, objective in cells(loss_type, every):
        difference = compare(scenario(geometry, objective.temperature, dtype), objective)
        check(difference, dtype, (geometry, objective))
        record(f"TRL's loss in {str(dtype).removeprefix('torch.')}", difference)


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_float64_cells(loss_type: str, scenario: ScenarioFactory, record_cell: Callable) -> None:
    compare_cells(loss_type, SAMPLE, torch.float64, scenario, record_cell)


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_float32_cells(loss_type: str, scenario: ScenarioFactory, record_cell: Callable) -> None:
    compare_cells(loss_type, 2 * SAMPLE, torch.float32, scenario, record_cell)


@pytest.mark.nightly
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_float64_cell(loss_type: str, scenario: ScenarioFactory, record_cell: Callable) -> None:
    compare_cells(loss_type, 1, torch.float64, scenario, record_cell)


@pytest.mark.nightly
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_float32_cell(loss_type: str, scenario: ScenarioFactory, record_cell: Callable) -> None:
    compare_cells(loss_type, 1, torch.float32, scenario, record_cell)


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
def test_the_batches_are_as_uneven_as_real_ones(scenario: ScenarioFactory) -> None:
    pairs = scenario(Geometry(1, 1, 1)).pairs
    lengths = [len(tokens) for _, tokens in pairs]
    assert len({len(prompt) for prompt, _ in pairs}) > 1, "left padding"
    assert 1 in lengths, "a one-token completion"
    assert any(1 < n < MAX_COMPLETION_LENGTH and t[-1] == EOS for (_, t), n in zip(pairs, lengths, strict=True))
    assert any(tokens[-1] != EOS for _, tokens in pairs), "a truncated completion"


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("level", LEVELS)
def test_the_ratios_reach_every_bound(level: str, scenario: ScenarioFactory) -> None:
    case = scenario(Geometry(1, 1, 3))
    rows = [row for batch in case.rows(2)[1] for row in batch]
    signed = [(importance_ratio(row, level).detach(), row.advantage) for row in rows]
    assert any((ratio < 0.8).any() and advantage < 0 for ratio, advantage in signed), "the lower clip binds"
    assert any((ratio > 1.28).any() and advantage > 0 for ratio, advantage in signed), "the upper clip binds"
    assert any((ratio > 1.5).any() and advantage < 0 for ratio, advantage in signed), "the two-sided clip binds"


def test_the_grid_covers_every_choice() -> None:
    assert sum(1 for loss_type in LOSS_TYPES for _ in cells(loss_type, 1)) == 1920
    for loss_type in CLIPPED_LOSS_TYPES:
        sample = [objective for _, objective in cells(loss_type, SAMPLE)]
        assert {(o.beta, o.use_bias_correction_kl) for o in sample} == {(0.0, True), (0.04, True), (0.04, False)}
        assert {o.delta for o in sample} == set(DELTAS)
        assert {o.epsilon_high for o in sample} == set(UPPER_CLIPS)
        assert {o.temperature for o in sample} == set(TEMPERATURES)
