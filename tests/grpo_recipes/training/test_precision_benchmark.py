"""The comparison of `benchmarks/precision.py`, on few weights and steps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "precision.py"
    spec = importlib.util.spec_from_file_location("precision_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "precision_benchmark", module)
    spec.loader.exec_module(module)
    return module


def test_the_cure_goes_where_float32_goes_and_plain_bfloat16_does_not(benchmark: ModuleType) -> None:
    optimizers = benchmark.contestants()
    weights = [0.02 * torch.randn(2000, generator=torch.Generator().manual_seed(0)), torch.ones(100)]
    results = benchmark.run([weight.bfloat16() for weight in weights], 100, optimizers)
    ours, plain = results["adamw_bf16 (ours)"], results["torch AdamW on bfloat16"]
    assert 0.99 < ours.projection < 1.01
    assert ours.error < 0.03
    assert ours.second_moment == pytest.approx(1, abs=1e-6)
    assert plain.projection < 0.2
    assert plain.second_moment > 1.03  # in bfloat16 it can't decay as it should
    floor = results["float32, its last weights rounded to bfloat16"]
    assert ours.stored_error == pytest.approx(floor.stored_error, rel=1e-3)
