"""Fixtures of the mathematics tests: one tiny checkpoint, scenarios prepared once, and the count of compared cells."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.mathematics.harness import Difference, Scenario, float64_trl, tiny_checkpoint
from tests.mathematics.oracle import Geometry

REPOSITORY = Path(__file__).resolve().parents[2]

ScenarioFactory = Callable[..., Scenario]
SummaryLines = Callable[[str], None]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the tiny policy and its tokenizer."""
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def in_float64() -> Iterator[None]:
    """Run TRL and the model in float64."""
    with float64_trl():
        yield


@pytest.fixture(scope="session")
def scenario(checkpoint: Path) -> ScenarioFactory:
    """Return a function that gives the scenario of a geometry, temperature and dtype, each prepared once."""
    prepared: dict[tuple[Geometry, float, torch.dtype], Scenario] = {}

    def get(geometry: Geometry, temperature: float = 1.0, dtype: torch.dtype = torch.float64) -> Scenario:
        key = geometry, temperature, dtype
        if key not in prepared:
            prepared[key] = Scenario(checkpoint, geometry, dtype, temperature=temperature)
        return prepared[key]

    return get


@pytest.fixture
def record_cell(record_property: Callable[[str, object], None]) -> Callable[[str, Difference], None]:
    """Count a compared cell under a title. Counts and worst differences are printed after the run."""
    return lambda title, difference: record_property("cell", {"title": title, **asdict(difference)})


@pytest.fixture
def summary(record_property: Callable[[str, object], None]) -> SummaryLines:
    """Keep a measured figure to be printed after the run."""
    return lambda line: record_property("line", line)
