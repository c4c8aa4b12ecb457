"""Progress of a run: its log, and the line on the terminal."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import pytest
import torch

from grpo_recipes import cli
from grpo_recipes.process.messages import progress
from grpo_recipes.reports.run import Run
from grpo_recipes.run.live_line import LiveLine, LiveLog, ProgressLine, close_progress_bars
from grpo_recipes.runs.files import LIVE, RunError
from grpo_recipes.runs.lock import only_writer
from tests.support.errors import refused
from tests.support.synthetic import write_run


def state(step: int, steps: int = 40, *, first: bool = True, history: list[dict] | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        global_step=step, max_steps=steps, is_world_process_zero=first, log_history=list(history or [])
    )


def log(folder: Path, steps: range, began: int = 0, history: list[dict] | None = None) -> LiveLog:
    """Return the callback of a launch that began at a step and has logged some steps."""
    callback = LiveLog(folder / LIVE)
    callback.on_train_begin(None, state(began, history=history), None)
    if steps and not history:
        callback.on_log(None, state(steps[0]), None)  # an entry without a value
    for step in steps:
        callback.on_log(None, state(step), None, {"reward": step / 10, "kl": float("nan"), "step_time": 2.0})
    return callback


def save(folder: Path, step: int, reward: float, name: str = "") -> list[dict]:
    """Write a `trainer_state.json` with one entry per step, and return its entries."""
    history = [{"step": number, "reward": reward} for number in range(1, step + 1)]
    (folder / name).mkdir(exist_ok=True)
    content = {"global_step": step, "max_steps": 40, "log_history": history}
    (folder / name / "trainer_state.json").write_text(json.dumps(content))
    return history


# The log


def test_a_run_without_a_checkpoint_is_read_from_its_log(tmp_path: Path) -> None:
    with refused(tmp_path, "`trainer_state.json`", by=RunError):
        Run.read(tmp_path)
    log(tmp_path, range(1, 8))
    run = Run.read(tmp_path)
    assert run.series("reward").steps == list(range(1, 8))
    assert run.series("reward").values[-1] == 0.7
    assert not run.series("kl")
    assert (run.log.last_step, run.log.max_steps) == (7, 40)


def test_a_resumed_launch_begins_its_log_with_the_entries_of_the_checkpoint(tmp_path: Path) -> None:
    """The first launch was killed at step 7, in the middle of a line, after it had saved step 5."""
    first = log(tmp_path, range(1, 8))
    with (tmp_path / LIVE).open("a") as file:
        file.write('{"reward": 0.8, "st')
    history = save(tmp_path, 5, -1.0, "checkpoint-5")
    assert Run.read(tmp_path).series("reward").values == [step / 10 for step in range(1, 8)]
    second = log(tmp_path, range(6, 7), began=5, history=history)
    assert Run.read(tmp_path).series("reward").values == [-1.0] * 5 + [0.6]
    third = log(tmp_path, range(6, 9), began=5, history=history)
    third.end(8)
    save(tmp_path, 8, -3.0)
    assert Run.read(tmp_path).series("reward").values == [-1.0] * 5 + [0.6, 0.7, 0.8]
    with warnings.catch_warnings(record=True) as left_open:
        warnings.simplefilter("always", ResourceWarning)
        for callback in (first, second):
            callback.end(8)
    assert left_open == []
    assert (tmp_path / LIVE).exists()


def test_a_run_that_has_logged_nothing_says_so(tmp_path: Path) -> None:
    log(tmp_path, range(0))
    with refused(tmp_path, by=RunError):
        Run.read(tmp_path)
    with only_writer(tmp_path), refused(tmp_path, "yet", by=RunError):
        Run.read(tmp_path)


def test_other_ranks_write_nothing_and_a_link_is_not_followed(tmp_path: Path) -> None:
    LiveLog(tmp_path / LIVE).on_train_begin(None, state(0, first=False), None)
    assert not (tmp_path / LIVE).exists()
    (tmp_path / "outside").write_text("as it was")
    (tmp_path / LIVE).symlink_to(tmp_path / "outside")
    log(tmp_path, range(1, 2))
    assert not (tmp_path / LIVE).is_symlink()
    assert (tmp_path / "outside").read_text() == "as it was"


def test_a_log_that_cannot_be_written_gives_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        log(tmp_path / "missing", range(1, 4))
        assert len(caplog.records) == 1
        callback = log(tmp_path, range(1, 2))
        for _ in range(2):
            callback.on_log(None, state(2), None, {"reward": object()})
    assert len(caplog.records) == 2
    assert not (tmp_path / LIVE).exists()  # it would be taken for the whole log


def test_a_number_of_any_kind_is_logged_as_a_number(tmp_path: Path) -> None:
    callback = log(tmp_path, range(0), history=[{"step": 1, "reward": torch.tensor(0.5)}])
    callback.on_log(None, state(2), None, {"reward": torch.tensor(0.25)})
    assert Run.read(tmp_path).series("reward").values == [0.5, 0.25]


def test_the_report_of_a_running_run_names_its_progress(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "trainer_state.json").unlink()
    log(folder, range(1, 11))
    page = folder / "report" / "report.html"
    with only_writer(folder):
        assert Run.read(folder).is_running
        assert cli.main(["report", str(folder)]) == 0
        assert "in progress: step 10 of 40" in page.read_text()
    assert not Run.read(folder).is_running


# The line


class Clock:
    """Clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def trained(line: LiveLine, clock: Clock, steps: int) -> None:
    for step in range(1, steps + 1):
        clock.now += 30
        line.on_step_end(None, state(step), None)
        entry = {"reward": 1.5, "rewards/right/mean": 1.0, "rewards/tags/mean": 0.5, "kl": 0.0123}
        entry |= {"num_tokens": step * 6e4, "completions/mean_length": 87.4, "completions/clipped_ratio": 0.02}
        line.on_log(None, state(step), None, entry)


def test_the_line_shows_the_progress_of_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    line = LiveLine(["right", "tags"], clock)
    line.on_train_begin(None, state(0), None)
    assert line.text(0, 40) == "step 0/40"
    trained(line, clock, 4)
    assert line.text(4, 40) == (
        "step 4/40  reward 1.5 (right 1, tags 0.5)  KL 0.012  length 87  truncated 2%  2,000 tokens/s  0:18:00 left"
    )
    line.on_train_end(None, state(4), None)
    clock.now += 600
    line.on_log(None, state(4), None, {"eval_reward": 1.0})  # an evaluation after training
    captured = capsys.readouterr()
    assert captured.err == "", "there is no terminal"
    shown = [text.split("  ")[0] for text in captured.out.splitlines()]
    assert shown == ["step 2/40", "step 4/40"], "one line per minute"


def test_only_the_first_rank_has_the_line() -> None:
    line = LiveLine([], Clock())
    line.on_train_begin(None, state(0, first=False), None)
    assert line.training_bar is None


def test_a_resumed_run_counts_its_own_steps(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    line = LiveLine(["right"], clock)
    line.on_train_begin(None, state(30), None)
    clock.now = 10
    line.on_log(None, state(31), None, {"reward": 0.5, "rewards/right/mean": 0.5})
    line.on_log(None, state(31), None)
    assert line.text(31, 40) == "step 31/40  reward 0.5  0:01:30 left"
    assert line.text(40, 40) == "step 40/40  reward 0.5"
    for clock.now, left in ((45, "0:00:45"), (59.7, "0:01:00"), (3660, "1:01:00"), (90_000, "1 day, 1:00:00")):
        assert line.text(31, 32).endswith(f"  {left} left")
    clock.now = 10
    line.on_train_end(None, state(31), None)
    assert capsys.readouterr().out == ""


def everything_shown(terminal: TextIO, master: int) -> str:
    """Return all text written to a pseudo-terminal. One read may return only a part."""
    terminal.close()
    shown = b""
    with suppress(OSError):  # Linux ends it by an error
        while more := os.read(master, 1 << 16):
            shown += more
    os.close(master)
    return shown.decode()


@pytest.mark.parametrize("piped", [False, True])
def test_output_is_printed_above_the_line(monkeypatch: pytest.MonkeyPatch, piped: bool, tmp_path: Path) -> None:
    """On a terminal. Output into a pipe stays there."""
    master, slave = os.openpty()
    terminal, pipe = os.fdopen(slave, "w"), (tmp_path / "pipe").open("w")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", pipe if piped else terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    handler = logging.StreamHandler(terminal)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    progress.setLevel(logging.INFO)
    line = ProgressLine()
    progress.info("what the line shows too")
    line.show("step 1/2  " + "long " * 30 + "\x1b[2J")
    print("a word of the run 42")
    logging.getLogger("x").warning("a note of a library")
    line._live.refresh()
    line.close()
    assert handler.stream is terminal
    assert progress.level == logging.INFO
    progress.setLevel(logging.NOTSET)
    pipe.flush()
    output = everything_shown(terminal, master)
    assert "step 1/2" in output
    assert "a note of a library" in output
    assert "\x1b[2J" not in output
    assert "what the line shows too" not in output
    assert "…" in output, "a long line is cut, and not wrapped"
    assert ("a word of the run 42" in output) != piped, "without colours"
    assert ("a word of the run 42" in (tmp_path / "pipe").read_text()) == piped


def test_the_line_of_a_failed_run_is_closed() -> None:
    line = LiveLine([])
    line.on_train_begin(None, state(0), None)
    closed: list[bool] = []
    line.training_bar.close = lambda: closed.append(True)  # type: ignore[method-assign, union-attr]
    close_progress_bars([line, SimpleNamespace(prediction_bar=line.training_bar)])
    assert closed == [True, True]
