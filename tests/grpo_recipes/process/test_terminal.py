"""A run whose terminal is closed saves and stops, or continues under nohup."""

import os
import pty
import signal
import sys
import termios
import time
from pathlib import Path

import pytest

from grpo_recipes.process import signals
from tests.support import forking, launching


def train_in(terminal: str, recipe: str, ignores: bool) -> None:
    """Train as `python -m grpo_recipes.train` does in the session of `terminal`."""
    os.setsid()
    descriptor = os.open(terminal, os.O_RDWR)  # the first terminal that a session opens controls it
    for standard in (0, 1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores else signal.SIG_DFL)  # as `nohup` leaves it
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    from grpo_recipes import train

    sys.exit(train.main(["--config", recipe]))


@pytest.mark.slow  # `training/test_callbacks.py` has a quick one, without a terminal
@pytest.mark.parametrize("ignores", [False, True])
def test_a_run_saves_when_its_terminal_is_closed(tmp_path: Path, ignores: bool) -> None:
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 64)
    steps = 40 if ignores else 4000
    changes = {"max_steps": steps, "save_steps": 4000, "rewards": ["tests.support.launching.variety"]}
    recipe = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, tmp_path / "run", **changes)
    ours, theirs = pty.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    process = forking.context().Process(target=train_in, args=(os.ttyname(theirs), str(recipe), ignores))
    process.start()
    try:
        os.set_blocking(ours, False)
        output, deadline = b"", time.monotonic() + 100
        while len(list((tmp_path / "run").glob("completions/*.parquet"))) < 3:
            assert process.is_alive(), output.decode()
            assert time.monotonic() < deadline
            try:
                output += os.read(ours, 1 << 16)
            except BlockingIOError:
                time.sleep(0.02)
        os.close(theirs)
        os.close(ours)  # the terminal is closed
        process.join(100)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == 0
    assert not (tmp_path / "run" / "_run.lock").exists()
    assert (tmp_path / "run" / "model.safetensors").exists() == ignores
    saved = [int(path.name.partition("-")[2]) for path in (tmp_path / "run").glob("checkpoint-*")]
    assert len(saved) == 1
    assert saved[0] == 40 if ignores else 3 <= saved[0] < 4000


@pytest.mark.parametrize(("rank", "said"), [(None, True), ("0", True), ("1", False)])
def test_ctrl_c_while_libraries_are_imported_ends_the_process_with_one_line(
    rank: str | None, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is that of a shell for SIGINT: 128 + 2. Only the first of several ranks prints."""
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 2)
        signals.leave_on_interrupt()
        signal.raise_signal(signal.SIGINT)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        printed = file.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGINT == signals.INTERRUPTED
    assert printed.startswith("\nstopped by Ctrl-C: " if said else "")
    assert printed.count("\n") == 2 * said


def test_ctrl_c_raises_once_the_libraries_are_imported() -> None:
    previous = signal.getsignal(signal.SIGINT)
    try:
        signals.leave_on_interrupt()
        assert signal.getsignal(signal.SIGINT) is not previous
        signals.raise_on_interrupt()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize("dropped", [1, 2])
def test_only_outputs_that_nobody_reads_are_dropped(dropped: int) -> None:
    """One of standard output and error is a pipe whose reader has ended, the other one a pipe that is read."""
    reading, writing = os.pipe()
    gone, closed = os.pipe()
    os.close(gone)
    child = os.fork()
    if child == 0:
        os.dup2(closed, dropped)
        os.dup2(writing, 3 - dropped)
        signals.drop_closed_outputs()
        try:
            os.write(dropped, b"lost")
            os.write(3 - dropped, b"read")
        finally:
            os._exit(0)
    os.close(writing)
    os.close(closed)
    with os.fdopen(reading) as file:
        assert file.read() == "read"
    os.waitpid(child, 0)
