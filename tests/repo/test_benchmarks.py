"""Benchmarks run to their end, on sizes at which their figures mean nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.exact_generation import exact_generation

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


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
def test_the_gpu_benchmark_runs_to_its_end_on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The benchmark's own checks pass here too, and each section names what it could not run, and why."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu

    file = tmp_path / "gpu.json"
    assert gpu.main(["--tiny", "--device", "cpu", "--output", str(file)]) == 0
    found = json.loads(file.read_text())["sections"]
    assert found.keys() == gpu.SECTIONS.keys()
    verdicts = {row["check"]: row["result"] for row in found["correctness"]}
    varlen = {check for check in verdicts if "varlen" in check}
    assert all(verdicts[check] == "not run: the packed row went through SDPA" for check in varlen)
    assert {verdicts[check] for check in verdicts.keys() - varlen} == {"ok"}
    timed = [row for name in ("training", "generation", "whole_step") for row in found[name] if "result" not in row]
    assert len(timed) == 6 + 2 + 1
    assert all(float(row["TRL ÷ ours"]) > 0 for row in timed)
    (said,) = found["pretrained"]
    assert said["result"].startswith("not run: `--policy FOLDER`")


@pytest.mark.slow
def test_right_gradients_and_a_wrong_one_on_the_gpu_benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu

    gradient = gpu.gradient

    def twice(*args: Any, packed: bool, **kwargs: Any) -> Any:
        return [(2 if packed else 1) * grad for grad in gradient(*args, packed=packed, **kwargs)]

    options = ["--tiny", "--device", "cpu", "--sections", "correctness", "--output", str(tmp_path / "gpu.json")]
    assert gpu.main(options) == 0
    monkeypatch.setattr(gpu, "gradient", twice)
    assert gpu.main(options) == 1


@pytest.mark.nightly
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


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "greedy"])
def test_turns_with_tools_give_the_tokens_of_trl(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import tool_turns

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    with exact_generation():
        rows = [row.split("|")[3:-1] for row in tool_turns.rows(3, 60, sampled, 1, **sizes)]
    decoding, names, _, fewer, _, _, same = zip(*[[cell.strip() for cell in row] for row in rows], strict=True)
    assert names == ("TRL", "ours, nothing kept", "ours")
    assert set(decoding) == {"sampled" if sampled else "greedy"}
    assert set(same) == {"yes"}
    stock, grouped, kept = map(float, fewer)
    assert stock == 1 < grouped < kept
    assert kept > 2.5
