"""Runs of many steps: the files grow with the run, the memory of `diagnose` and `report` hardly does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from benchmarks import large_run
from grpo_recipes.reports import diagnostics
from grpo_recipes.reports import run as run_module
from grpo_recipes.reports.charts import envelope
from grpo_recipes.reports.run import OutOfTime, Run, Series
from grpo_recipes.run import describe
from tests.support.growth import FACTOR, growth
from tests.support.synthetic import healthy_completions, ramp, write_run


@pytest.mark.slow
def test_a_report_of_ten_thousand_steps_takes_less_than_200_megabytes(tmp_path: Path) -> None:
    folder = large_run.write_run(tmp_path / "run", steps=10_000)
    _, _, megabytes = large_run.measure("report", str(folder))
    assert megabytes < 200


def test_the_time_of_a_trend_is_linear_in_the_series() -> None:
    def series(points: int) -> Series:
        return Series(list(range(points)), [(point * 7919 % 1000) / 1000 for point in range(points)])

    assert growth(lambda made: made.trend, series, 4000) < 2 * FACTOR


@pytest.mark.parametrize("length", [5, 600, 601, 10_007])
def test_a_thinned_line_covers_the_same_range_as_the_full_line(length: int) -> None:
    values = np.random.default_rng(length).normal(size=length).cumsum()
    kept = envelope(values)
    assert list(kept) == sorted(set(kept))
    assert {0, length - 1} <= set(kept)
    assert len(kept) <= max(length if length <= 600 else 0, 602)
    for stretch in np.array_split(np.arange(length), min(40, length)):  # a few pixels of a chart
        inside = values[kept[(kept >= stretch[0]) & (kept <= stretch[-1])]]
        whole = values[stretch]
        spread = whole.max() - whole.min()
        assert inside.max() >= whole.max() - spread / 4
        assert inside.min() <= whole.min() + spread / 4
    assert values[kept].max() == values.max()
    assert values[kept].min() == values.min()


def test_completions_of_too_many_steps_are_sampled_evenly_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run")
    table = pd.DataFrame(healthy_completions()).query("step == 10")
    for step in range(41, 70):
        table.assign(step=step).to_parquet(folder / "completions" / f"completions_{step:05d}.parquet")
    monkeypatch.setattr(run_module, "MAX_STEPS", 5)
    run = Run.read(folder)
    assert sorted(run.rows["step"].unique()) == [10, 45, 53, 61, 69]
    assert "5 of 33" in diagnostics.diagnose(run).coverage


def test_a_diagnosis_that_takes_too_long_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", {"frac_reward_zero_std": ramp(0.9, 0.9)})
    assert "- 90%" in describe.diagnosis(folder)
    late = Run.read(folder, within=-1)
    for work in (diagnostics.diagnose, lambda run: run.rows):
        with pytest.raises(OutOfTime):
            work(late)
    monkeypatch.setattr(describe, "DIAGNOSIS_SECONDS", -1.0)
    assert describe.diagnosis(folder).count(str(folder)) == 1
    assert "90%" not in describe.diagnosis(folder)
