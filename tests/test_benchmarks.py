"""Benchmarks run to their end, on sizes at which their figures mean nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/step.py with a model of one layer and completions of a few tokens."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.delitem(sys.modules, "step", raising=False)
    import step

    monkeypatch.setattr(step, "cap", lambda _: 6)
    draw = step.Batch.draw
    monkeypatch.setattr(step.Batch, "draw", lambda _, seed: draw("a", seed))  # (d) is 128 tokens long
    monkeypatch.setitem(step.MODELS, "small", (32, 1, 4))
    torch.set_num_threads(1)
    return step


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads /proc")
def test_whole_steps_of_all_contestants(step: ModuleType) -> None:
    """Each is measured, and all of them end with the same parameters."""
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in step.whole_step("small", "a", 0.04, 2, 0)]
    names = ["TRL", "TRL, continuous batching", "from scratch", "ours, generation off", "ours"]
    assert [row[3] for row in rows] == names
    for row in rows:
        generation, *_, whole, ratio, memory = map(float, row[4:11])
        assert 0 < generation < whole
        assert ratio > 0
        assert memory >= 0
        gap, moved = (float(figure) for figure in row[11].split(" of "))
        assert gap < 1e-4 * moved
