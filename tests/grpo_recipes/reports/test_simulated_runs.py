"""Problems are found in runs with the noise of real ones, and none in healthy runs, simulated and real."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.reports.diagnostics import Diagnosis, Finding, diagnose
from grpo_recipes.reports.run import Run
from tests.support.simulated import BASE, HEALTHY, PLANTED, Simulation

REAL = json.loads((Path(__file__).parents[2] / "data" / "quickstart_runs.json").read_text(encoding="utf-8"))
"""Logs of the quickstart's recipe with its warm-started policy, 60 or 120 steps."""


def diagnosed(simulation: Simulation, folder: Path, seed: int = 0) -> Diagnosis:
    return diagnose(Run.read(simulation.write(folder / str(seed), seed)))


def wrong(name: str, folder: Path, seed: int) -> list[Any]:
    """Return the findings that a simulated run should not have, and the check that should have found something."""
    if name in HEALTHY:
        return diagnosed(HEALTHY[name], folder, seed).findings
    check, simulation = PLANTED[name]
    allowed = {check, "plateau"} if check == "length_without_gain" else {check}
    findings = {finding.check: finding for finding in diagnosed(simulation, folder, seed).findings}
    if check not in findings:
        return [f"no {check}"]
    is_priced = {"lost", "growth", "wasted", "where"} & findings[check].figures.keys() or check == "tool_limits_hit"
    is_within = 0 < findings[check].step <= simulation.steps
    return [*(findings.keys() - allowed), *([] if is_priced and is_within else [findings[check]])]


def test_a_planted_problem_is_found_and_a_healthy_run_has_none(tmp_path: Path) -> None:
    quick = ("rising", "small batches", "two passes", "held-out reward stays flat", "twice as long for nothing")
    assert {name: wrong(name, tmp_path / name, 0) for name in quick} == {name: [] for name in quick}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seeds", [2, pytest.param(27, marks=pytest.mark.nightly)])
def test_every_planted_problem_is_found_and_hardly_any_healthy_run_has_one(tmp_path: Path, seeds: int) -> None:
    missed = [(name, seed) for name in PLANTED for seed in range(1, 3) if wrong(name, tmp_path / name, seed)]
    assert missed == []
    found = [(name, seed) for name in HEALTHY for seed in range(seeds) if wrong(name, tmp_path / name, seed)]
    assert len(found) <= 3, found  # among 729 runs
    assert not [one for one in found if one[1] < 3]


def written(folder: Path, history: list[dict[str, Any]]) -> Path:
    """Write a simulated run with another log."""
    BASE.write(folder, 0)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history, "global_step": BASE.steps}))
    return folder


def test_holes_and_values_that_are_no_numbers_are_no_findings(tmp_path: Path) -> None:
    """A resumed run whose log lacks steps, single NaN and None, and columns that begin late."""
    history = [entry for entry in BASE.history(0) if not 40 <= entry["step"] < 70]
    for number, entry in enumerate(history):
        for place, key in enumerate([key for key in entry if key != "step"]):
            if (number + place) % 7 == 0:
                entry[key] = (math.nan, None, math.inf)[number % 3]
            if number < 10 and key in ("grad_norm", "kl"):
                del entry[key]
    assert diagnose(Run.read(written(tmp_path / "run", history))).findings == []


def test_norms_that_are_lost_until_the_end_are_found(tmp_path: Path) -> None:
    history = BASE.history(0)
    for entry in history:
        if "grad_norm" in entry and entry["step"] > 90:
            entry["grad_norm"] = math.nan
    (finding,) = diagnose(Run.read(written(tmp_path / "run", history))).findings
    assert (finding.check, finding.step) == ("gradient_spikes", 91)
    assert (finding.figures["lost"], finding.figures["since"]) == (pytest.approx(0.25), 90)


def real(name: str, folder: Path) -> list[Finding]:
    """Return the findings of a real log."""
    entry = REAL[name]
    columns = entry["log"]
    history = []
    for values in zip(*columns.values(), strict=True):
        history.append({key: value for key, value in zip(columns, values, strict=True) if value is not None})
    rewards = [
        {"name": "gsm8k_correctness", "source": "x", "weight": 1.0, "kind": "correctness", "highest_pay": 2.0},
        {"name": "well_formed", "source": "y", "weight": 1.0, "kind": "format", "highest_pay": 1.0},
    ]
    folder.mkdir()
    last = history[-1]["step"]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history, "global_step": last}))
    record = {"recipe": entry["recipe"], "config": entry["config"], "rewards": rewards}
    (folder / "run.json").write_text(json.dumps(record))
    diagnosis = diagnose(Run.read(folder))
    assert diagnosis.checked >= 11
    return diagnosis.findings


def test_real_healthy_runs_have_no_findings(tmp_path: Path) -> None:
    for name in ("seed 1", "seed 2", "seed 3", "three iterations", "informative prompts, KL"):
        assert real(name, tmp_path / name) == []


def test_a_real_run_with_stale_tokens_is_found(tmp_path: Path) -> None:
    (finding,) = real("four iterations, ten times the learning rate", tmp_path / "run")
    assert finding.check == "stale_tokens"
    assert (finding.figures["number"], finding.figures["size"]) == (4, pytest.approx(0.57, abs=0.005))
