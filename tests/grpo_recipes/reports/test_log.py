"""Logs of a run, with and without a saved state, and runs with values that no trainer writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from grpo_recipes import cli
from grpo_recipes.reports.run import read_log
from grpo_recipes.runs import files
from tests.support.errors import refused
from tests.support.stored import HISTORY, RECORD, run_files
from tests.support.synthetic import REWARDS, healthy_completions


def state(*entries: Any, **more: Any) -> dict[str, Any]:
    return {"log_history": list(entries), "global_step": 40, **more}


def renamed(name: str) -> dict[str, Any]:
    """Return the files of a healthy run whose correctness reward has another name."""

    def changed(value: Any) -> Any:
        return json.loads(json.dumps(value).replace("gsm8k_correctness", name))

    sink = pa.BufferOutputStream()
    parquet.write_table(pa.Table.from_pylist(changed(healthy_completions())), sink)
    return {
        "state": state(*changed(HISTORY)),
        "record": {**RECORD, "rewards": changed(REWARDS)},
        "completions": sink.getvalue().to_pybytes(),
    }


ODD = {"rewards": [3, None, [], {"name": {}}, {"name": "gate", "reward": 3}]}


@pytest.mark.parametrize("contents", [renamed("../../evil.x"), {"record": {**RECORD, "recipe": ODD}}])
def test_odd_values_are_reported_within_the_folder(contents: dict[str, Any], tmp_path: Path) -> None:
    for path, content in run_files("run", **contents).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert cli.main(["diagnose", str(tmp_path / "run")]) in (0, 1)
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# The log


def live(folder: Path, *lines: dict[str, Any]) -> Path:
    """Write a `_log.jsonl`."""
    (folder / files.LIVE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize("layout", [{}, {"indent": 2}, {"indent": 2, "sort_keys": True}, {"separators": (",", ":")}])
@pytest.mark.parametrize("is_live", [False, True])
def test_a_log_holds_the_numbers_of_its_entries(tmp_path: Path, is_live: bool, layout: dict[str, Any]) -> None:
    nested = {"deep": [{"log_history": [1, "]"]}, '\\" {[,'], "é\u2028": None, "n": -1.5e-7}
    entries = [
        {"step": 1, "a": 1.25, "text": 'x"]}', **nested},
        {"step": 20, "a": 3, "b": True},
        {"step": 3, "a": float("inf")},
    ]
    if is_live:
        live(tmp_path, {"step": 0, "max_steps": 7}, *entries)
    else:
        content = {"epoch": 0.5, "global_step": 20, **nested, "log_history": entries, "max_steps": 7}
        (tmp_path / "trainer_state.json").write_text(json.dumps(content, **layout))
    log = read_log(tmp_path)
    assert {key: (list(steps), list(values)) for key, (steps, values) in log.metrics.items()} == {
        "step": ([1, 20, 3], [1, 20, 3]), "a": ([1, 20], [1.25, 3]), "text": ([], []), "deep": ([], []),
        "é\u2028": ([], []), "n": ([1], [-1.5e-7]), "b": ([], [])}  # fmt: skip
    assert (log.last_step, log.max_steps) == (20, 7)


@pytest.mark.parametrize("layout", [{}, {"indent": 2, "sort_keys": True}])
def test_a_state_that_is_cut_off_is_refused(tmp_path: Path, layout: dict[str, Any]) -> None:
    file = tmp_path / "trainer_state.json"
    text = json.dumps({"global_step": 40, "log_history": HISTORY[:3], "max_steps": 7}, **layout)
    for cut in range(1, len(text), 111):
        file.write_text(text[:cut])
        with refused(file, by=files.RunError):
            read_log(tmp_path)


def test_a_damaged_line_of_a_log_is_named(tmp_path: Path) -> None:
    for line in (b'{"reward": 1.0}', b"[" * 100_000, b"{"):
        (tmp_path / "_log.jsonl").write_bytes(b'{"step": 1}\n' + line + b"\n")
        with refused(tmp_path / "_log.jsonl", "line 2", by=files.RunError):
            read_log(tmp_path)


def test_bad_letters_and_a_line_under_way_do_not_hide_the_numbers_of_a_log(tmp_path: Path) -> None:
    (tmp_path / "_log.jsonl").write_bytes(b'{"step": 3, "note": "\xff", "a": 0.5}\n{"step": 4, "a"')
    log = read_log(tmp_path)
    assert list(log.metrics["a"][1]) == [0.5]
    assert (log.last_step, log.max_steps, log.has_ended) == (3, 0, False)


def test_the_newest_state_is_read(tmp_path: Path) -> None:
    """The checkpoints are in the order neither of their names nor of the times of their files."""

    def save(folder: Path, step: int) -> int:
        folder.mkdir(exist_ok=True)
        (folder / "trainer_state.json").write_text(json.dumps(state({"step": step})))
        return read_log(tmp_path).last_step

    assert [save(tmp_path / f"checkpoint-{step}", step) for step in (80, 9, 60)] == [80, 80, 80]
    assert [save(tmp_path, step) for step in (40, 100)] == [80, 100]  # 40 was left by an earlier launch
    (tmp_path / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-80" / "trainer_state.json").write_text("null")
    with refused(tmp_path / "checkpoint-80", by=files.RunError):
        read_log(tmp_path)
    (tmp_path / "checkpoint-80" / "trainer_state.json").unlink()
    assert read_log(tmp_path).last_step == 60


def test_a_log_that_ends_before_the_newest_checkpoint_is_not_used(tmp_path: Path) -> None:
    def last(checkpoint: int) -> float:
        folder = tmp_path / f"checkpoint-{checkpoint}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps(state({"step": checkpoint, "a": 2.0})))
        return read_log(tmp_path).metrics["a"][1][-1]

    live(tmp_path, {"step": 0, "max_steps": 40}, {"step": 9, "a": 3.0})
    (tmp_path / "trainer_state.json").write_text(json.dumps(state({"step": 40, "a": 1.0})))  # Older.
    assert [last(9), last(10)] == [3.0, 2.0]
