"""A run as it is read from its folder, and the trend of a logged metric: the change that its noise can't make."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from grpo_recipes.reports import run as runs
from grpo_recipes.reports.run import PARTS, Run, RunReward, Series, last_message, prompt_text, spread
from grpo_recipes.runs import files
from tests.support.errors import refused
from tests.support.synthetic import tool_completions, write_run


def series(values: list[float]) -> Series:
    return Series(list(range(1, len(values) + 1)), values)


def test_the_margin_of_a_trend_is_a_multiple_of_its_standard_error() -> None:
    """Neighbours differ by +-2, so that a point has a standard deviation of 2 / sqrt(2), and a quarter has ten."""
    found = series([0.0, 2.0] * 20)
    differences = [2.0, -2.0] * 19 + [2.0]
    mean = sum(differences) / 39
    noise = math.sqrt(sum((value - mean) ** 2 for value in differences) / 39) / math.sqrt(2)
    assert found.margin == pytest.approx(3 * (1 + 3 / 39) * noise * math.sqrt(2 / 10))
    assert found.margin == pytest.approx(2.043, abs=0.002)


@pytest.mark.parametrize(("rise", "trend"), [(2.5, 0), (2.9, 1), (-2.9, -1)])
def test_a_drift_counts_as_a_trend_and_not_as_noise(rise: float, trend: int) -> None:
    """Three quarters of the rise lie between the first and the last quarter: more or less than the margin of 2.04."""
    values = [10 + rise * place / 39 + (place % 2) * 2 for place in range(40)]
    found = series(values)
    assert found.margin == pytest.approx(2.043, abs=0.01)
    assert found.trend == trend


def test_four_points_need_six_standard_errors() -> None:
    """The differences -2, 2, -2 have a standard deviation of √(32 / 9), and a point the noise √(16 / 9)."""
    assert Series([1, 2, 3, 4], [1.0, -1.0, 1.0, -1.0]).margin == pytest.approx(6 * math.sqrt(16 / 9) * math.sqrt(2))
    assert not Series([1, 2, 3], [1.0, 5.0, 9.0]).has_trend
    assert Series([1, 2, 3], [1.0, 5.0, 9.0]).trend == 0


def test_a_running_median_has_five_points_and_fewer_at_both_ends() -> None:
    series = Series([1, 2, 3, 4, 5, 6], [9.0, 1.0, 3.0, 7.0, 5.0, 4.0])
    # Medians, the lower one of two, of 9 1 3, 9 1 3 7, 9 1 3 7 5, 1 3 7 5 4, 3 7 5 4, and 7 5 4.
    assert series.smoothed == Series([1, 2, 3, 4, 5, 6], [3.0, 3.0, 5.0, 4.0, 4.0, 5.0])


def test_a_change_as_large_as_the_margin_is_no_trend() -> None:
    """Even steps have no noise, and the margin is 5 % of 60."""
    for sign in (1.0, -1.0):
        assert series([sign * value for value in (57.0, 58.0, 59.0, 60.0)]).trend == 0
        assert series([sign * value for value in (56.0, 57.5, 59.0, 60.5)]).trend == sign
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert series([1e308, -1e308] * 3).trend == 0


# Rewards


def test_a_reward_counts_once_and_is_of_no_known_kind_unless_the_record_says_more() -> None:
    parts = [{"name": "b", "kind": "format", "highest_pay": 2.0}]
    entry = {"name": "a", "weight": 0.5, "kind": "judge", "parts": parts, "highest_pay": 3.0}
    part = RunReward("b", 1.0, "format", (), 2.0)
    assert RunReward.from_dict(entry) == RunReward("a", 0.5, "judge", (part,), 3.0)
    assert RunReward.from_dict({"name": "a"}) == RunReward("a") == RunReward("a", 1.0, "other", (), None)


def test_rewards_without_a_record_are_known_by_their_names_in_the_log() -> None:
    log = runs.Log()
    names = ("gsm8k_correctness", "think_format_reward", "mine")
    entry = {f"rewards/{name}/{kind}": 1.0 for name in names for kind in ("mean", "std")}
    log.add({"step": 1, **entry, "reward": 3.0, "kl/mean": 1.0})
    run = Run(Path("/nowhere"), {}, log)
    assert run.rewards == [
        RunReward("gsm8k_correctness", 1.0, "correctness"),
        RunReward("think_format_reward", 1.0, "format"),
        RunReward("mine", 1.0, "other"),
    ]
    assert replace(run, record={"rewards": []}).rewards == []


# Completions


def completed(folder: Path, rows: list[dict[str, Any]], rewards: list[dict[str, Any]], name: str = "") -> Run:
    """Return a run with one file of completions."""
    (folder / "completions").mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(folder / "completions" / (name or "completions_00001.parquet"))
    record = {"rewards": [{"source": reward["name"], "weight": 1.0, "kind": "other", **reward} for reward in rewards]}
    (folder / "run.json").write_text(json.dumps({"recipe": {}, **record}))
    return Run.read_evaluations(folder)


def test_a_run_without_completions_has_a_table_of_the_same_columns(tmp_path: Path) -> None:
    logged = Run.read(write_run(tmp_path / "run")).rows
    assert {"pay/gsm8k_correctness", "pay/tag_presence"} < set(logged)
    (tmp_path / "empty").mkdir()
    empty = Run.read_evaluations(tmp_path / "empty").rows
    assert list(empty) == [name for name in logged if not name.startswith("pay/")]
    assert len(empty) == 0
    assert len(Run.read_evaluations(tmp_path / "empty").texts(empty)) == 0


def test_texts_are_read_for_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    """The rows lie in several batches of the table."""
    count = 2 * files.BATCH_ROWS + 5
    more = {"advantage": 0.5, "gold": "7", "verdict": "right", "other": "x"}
    made = [{"step": 1, "prompt": f"p{place}", "completion": f"c{place}", "a": place, **more} for place in range(count)]
    run = completed(tmp_path, made, [{"name": "a"}])
    assert run.rows["row"].tolist() == list(range(count))
    for places in ([count - 1, 0, 3], [files.BATCH_ROWS], [files.BATCH_ROWS, files.BATCH_ROWS - 1]):
        texts = run.texts(run.rows.iloc[places])
        assert texts["completion"].tolist() == [f"c{place}" for place in places]
        assert texts["total"].tolist() == places
        columns = {"step", "prompt", "completion", "question", PARTS, "a", "total", "advantage", "gold", "verdict"}
        assert set(texts) == columns
        batches = list(run.batches(run.rows.iloc[places]))
        assert sorted(place for batch in batches for place in batch.index) == [(0, place) for place in sorted(places)]


def test_a_total_is_the_weighted_sum_of_the_rewards_that_a_completion_has(tmp_path: Path) -> None:
    scores = [(1.0, 2.0), (math.nan, 2.0), (1.0, math.nan), (math.nan, math.nan)]
    made = [{"step": 1, "prompt": "p", "completion": "c", "a": a, "b": b} for a, b in scores]
    run = completed(tmp_path, made, [{"name": "a", "weight": 0.5}, {"name": "b", "weight": 3.0}, {"name": "absent"}])
    assert run.rows["total"].tolist()[:3] == [6.5, 6.0, 0.5]
    assert math.isnan(run.rows["total"][3])
    assert run.rows["pay/b"].tolist()[:2] == [2.0, 2.0]
    assert "pay/absent" not in run.rows
    assert completed(tmp_path, made, []).rows["total"].isna().all()


def test_characters_and_calls_of_a_completion_are_counted(tmp_path: Path) -> None:
    """The characters of a question count, those of a system prompt do not."""
    prompt = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}]
    one = tool_completions()[2]["completion"]  # two calls
    completions = ([{"role": "assistant", "content": "two"}], one)
    made = [{"step": 1, "prompt": prompt, "completion": completion} for completion in completions]
    run = completed(tmp_path, made, [])
    assert run.rows["calls"].tolist() == [0, 2]
    (parts,) = run.texts(run.rows.iloc[[1]])[PARTS]
    assert run.rows["characters"].tolist() == [7, 4 + sum(len(part.text) + len(part.label) for part in parts)]
    texts = run.texts(run.rows)
    assert texts["prompt"].tolist() == ["be brief\n1+1?"] * 2
    assert texts["question"].tolist() == ["1+1?"] * 2
    assert run.rows["prompt"].nunique() == 1


def test_equal_last_messages_differ_by_their_calls(tmp_path: Path) -> None:
    rows = [{"step": 1, "prompt": "p", "completion": tool_completions()[n]["completion"][:-1]} for n in (1, 2, 1)]
    for row in rows:
        row["completion"] = [*row["completion"], {"role": "assistant", "content": "done"}]
    first, second, third = completed(tmp_path, rows, []).rows["completion"]
    assert first == third != second


def test_a_message_is_shown_by_its_texts() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt_text([{"content": blocks}, {"content": None}, {}, {"content": "c"}]) == "ab\n\n\nc"
    assert last_message([{"content": "a"}, {"content": "b"}, {"content": "c"}]) == "c"
    assert (prompt_text("text"), last_message("text"), last_message([])) == ("text", "text", "")


def test_accuracy_is_read_from_every_evaluation_that_has_a_verdict(tmp_path: Path) -> None:
    """The first file lacks the reward, and the second one holds its steps in another order."""
    rows = [{"step": step, "prompt": f"p{place}", "completion": "c"} for place, step in enumerate((3, 3, 3, 2, 2))]
    judged = [{**row, "right": right} for row, right in zip(rows, (1.0, 0.0, math.nan, -1.0, 0.0), strict=True)]
    rewards = [{"name": "right", "kind": "correctness"}, {"name": "tags", "kind": "format"}]
    tags = [{**row, "step": 1, "tags": 1.0} for row in rows]
    completed(tmp_path, tags, rewards, "eval_completions_00001.parquet")
    run = completed(tmp_path, [{**row, "tags": 1.0} for row in judged], rewards, "eval_completions_00002.parquet")
    assert [(step, found.value) for step, found in run.held_out_accuracy()] == [(2, 0.0), (3, 0.5)]
    with_floor = [{**row, "right": row["right"] / 2 + 0.5, "tags": 1.0} for row in judged]
    declared = [{**rewards[0], "highest_pay": 1.0, "passes_at": 0.9}, rewards[1]]
    run = completed(tmp_path, with_floor, declared, "eval_completions_00002.parquet")
    assert [(step, found.value) for step, found in run.held_out_accuracy()] == [(2, 0.0), (3, 0.5)]


def test_items_that_are_kept_are_spread_from_the_first_to_the_last() -> None:
    cases = ((5, 5, [0, 1, 2, 3, 4]), (6, 5, [0, 1, 2, 3, 5]), (9, 2, [0, 8]), (9, 1, [0]), (0, 5, []))
    for count, most, kept in cases:
        assert spread(range(count), most) == kept


# Folders


def test_the_first_fault_of_a_run_that_did_not_finish_is_its_cause(tmp_path: Path) -> None:
    for rank, at in enumerate((3, 1, 2, 1, 1)):
        (tmp_path / f"fault-rank{rank}.json").write_text(json.dumps({"sentence": f"rank {rank}", "time": at}))
    run = Run.read(tmp_path)  # it failed before it logged anything
    assert run.fault is not None
    assert run.fault["sentence"] == "rank 1"

    def fault(**changed: Any) -> Any:
        log = runs.Log(max_steps=changed.pop("max_steps", 0), last_step=changed.pop("last_step", 0))
        return replace(run, log=log, **changed).fault

    assert Run.read_evaluations(tmp_path).fault == run.fault
    assert fault(is_running=True) is None
    assert fault(max_steps=1, last_step=1) is None
    assert fault(max_steps=5, last_step=5) is None
    assert fault(max_steps=5, last_step=4) is not None
    assert fault(max_steps=0, last_step=4) is not None
    for path in tmp_path.glob("fault-rank*.json"):
        path.unlink()
    assert fault() is None
    with refused(tmp_path, "trainer_state.json", by=files.RunError):
        Run.read(tmp_path)
