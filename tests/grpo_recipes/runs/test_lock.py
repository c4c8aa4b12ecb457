"""Two launches into one folder: the second is refused. A stale lock is taken over, and its launch stops."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from grpo_recipes.run import prepare, train
from grpo_recipes.runs import lock
from grpo_recipes.runs.files import LIVE
from grpo_recipes.runs.lock import LOCK, only_writer
from tests.support import launching
from tests.support.errors import refused

OTHER = "process 17 on other-host"


@pytest.fixture(autouse=True)
def lease(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Return a function that sets the lease and the time between two heartbeats, in seconds. Both are short before."""

    def shorten(seconds: float, beat: float) -> None:
        monkeypatch.setattr(lock, "LEASE_SECONDS", seconds)
        monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", beat)

    shorten(0.4, 0.05)
    return shorten


def marker() -> str:
    """Return the content of a lock of another machine, as filelock writes it."""
    lines = ["filelock/2", "pid=17", "host=other-host", "mode=lease", "token=theirs"]
    return "".join(f"{line}\n" for line in [*lines, f"duration={lock.LEASE_SECONDS!r}"])


def left(folder: Path, content: str, seconds_ago: float = 0.0) -> Path:
    """Write a lock with some content."""
    folder.mkdir(exist_ok=True)
    path = folder / LOCK
    path.write_text(content)
    then = time.time() - seconds_ago
    os.utime(path, (then, then))
    return path


def take_over(folder: Path) -> None:
    """Replace the holder in the lock, as a launch elsewhere does once the lease has expired."""
    part = folder / "part"
    part.write_text(marker())
    part.rename(folder / LOCK)


def test_a_launch_holds_its_folder_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with only_writer(tmp_path / "new") as held:
        assert held.loss() is None
        with refused(tmp_path / "new", os.getpid(), LOCK), only_writer(tmp_path / "new"):
            pass
        assert (tmp_path / "new" / LOCK).is_file()
    assert list(tmp_path.iterdir()) == []


def test_a_second_launch_of_a_recipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    recipe = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, tmp_path / "run", max_steps=1)
    with only_writer(tmp_path / "run"):
        assert train.main(["--config", str(recipe), "--resume_from_checkpoint", "true"]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert f"process {os.getpid()} on " in said
        assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]
    assert train.main(["--config", str(recipe)]) == 0
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_lock_of_another_machine_is_taken_over_once_it_has_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease: Callable[[float, float], None]
) -> None:
    """NFS has no exchange of two names, and a crash of the machine leaves an empty lock."""
    lease(0.15, 0.02)
    for exchanges, content in ((True, marker()), (True, '{"host": "h", "pid": 17}'), (False, "")):
        if not exchanges:
            monkeypatch.setattr("filelock._soft.exchange_names", lambda source, target: False)
        touched = left(tmp_path / "run", content).stat().st_mtime
        with only_writer(tmp_path / "run") as held:
            assert held.loss() is None
            assert time.time() - touched >= lock.LEASE_SECONDS, "until then the other launch may live"


def test_the_first_sign_of_another_machine_ends_the_waiting(
    tmp_path: Path, lease: Callable[[float, float], None]
) -> None:
    """The lease of 30 s is far from its end."""
    lease(30.0, 0.02)
    path = left(tmp_path / "run", marker(), seconds_ago=20)
    began, timer = time.monotonic(), threading.Timer(0.2, os.utime, (path,))
    timer.start()
    with refused(tmp_path / "run", OTHER, LOCK), only_writer(tmp_path / "run"):
        pass
    timer.join()
    assert time.monotonic() - began < 15
    assert path.read_text() == marker()


def test_a_reader_relies_on_the_time_of_a_lock(tmp_path: Path) -> None:
    assert not lock.is_held(tmp_path / "run")
    for seconds_ago, is_held in ((0, True), (3600, False)):
        left(tmp_path / "run", marker(), seconds_ago)
        assert lock.is_held(tmp_path / "run") == is_held


def test_the_loser_of_a_takeover_notices_it_and_keeps_the_other_lock(tmp_path: Path) -> None:
    with only_writer(tmp_path / "run") as held:
        take_over(tmp_path / "run")
        loss = held.loss()
        assert loss is not None
        assert OTHER in loss
    assert (tmp_path / "run" / LOCK).read_text() == marker()


def test_a_lock_that_was_removed_is_a_loss(tmp_path: Path) -> None:
    with only_writer(tmp_path / "run") as held:
        (tmp_path / "run" / LOCK).unlink()
        deadline = time.monotonic() + 15
        while held.loss() is None:
            assert time.monotonic() < deadline, "the heartbeat misses the lock twice"
            time.sleep(0.01)


HOLDS = """
import pathlib, sys
from grpo_recipes.runs import lock
lock.LEASE_SECONDS, lock.HEARTBEAT_SECONDS = 0.6, 0.1
with lock.only_writer(pathlib.Path(sys.argv[1])) as held:
    print("holds", flush=True)
    sys.stdin.readline()
    print(held.loss(), flush=True)
"""


def test_a_killed_launch_is_taken_over_at_once_and_a_suspended_one_after_the_lease(
    tmp_path: Path, lease: Callable[[float, float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    lease(0.6, 0.1)
    for stop in (signal.SIGKILL, signal.SIGSTOP):
        command: Sequence[str] = [sys.executable, "-c", HOLDS, str(tmp_path / "run")]
        first = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == "holds\n"
            first.send_signal(stop)
            if stop == signal.SIGKILL:
                first.wait()
            with only_writer(tmp_path / "run") as held:
                assert (str(first.pid) in capsys.readouterr().out) == (stop == signal.SIGSTOP)
                first.send_signal(signal.SIGCONT)
                said, _ = first.communicate("\n")
                assert (str(os.getpid()) in said) == (stop == signal.SIGSTOP)
                assert held.loss() is None
        finally:
            first.kill()
            first.communicate()


def loses_its_folder(completions: Sequence[str], trainer_state: Any, **columns: Any) -> list[float]:
    """Return rewards. In the third step another launch takes over the run's folder."""
    folder = Path(os.environ["FOLDER_TO_LOSE"])
    if os.environ.get("RANK", "0") == "0" and trainer_state.global_step == 2:
        take_over(folder)
    return launching.variety(completions)


@pytest.mark.slow
def test_all_ranks_of_a_launch_that_lost_its_folder_stop_before_they_write(tmp_path: Path) -> None:
    run = tmp_path / "run"
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    loses = {"rewards": ["tests.grpo_recipes.runs.test_lock.loses_its_folder"], "max_steps": 4}
    recipe = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, run, **loses)
    process = launching.start("ddp_cpu", recipe, FOLDER_TO_LOSE=str(run))
    said = launching.finish(process)
    assert process.returncode == 1, said
    assert said.count(f"error: {run}: another launch ({OTHER})") >= 2
    assert "step 3" in said
    assert not list(run.glob("fault*"))
    assert not (run / "model.safetensors").exists()
    assert sorted(path.name for path in run.glob("c*")) == ["checkpoint-1", "checkpoint-2", "completions"]
    assert [path.name[-9:] for path in sorted((run / "completions").iterdir())] == ["1.parquet", "2.parquet"]
    assert "host=other-host" in (run / LOCK).read_text()


@pytest.mark.parametrize(
    ("module", "after", "written"), [(prepare, "confirm_checkpoint", []), (train, "train", ["run.json"])]
)
def test_a_folder_lost_outside_of_the_steps_gets_no_files(
    module: ModuleType, after: str, written: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run, original = tmp_path / "run", getattr(module, after)

    def loses(*given: Any) -> Any:
        done = original(*given)
        take_over(run)
        return done

    monkeypatch.setattr(module, after, loses)
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    changes = {"max_steps": 1, "save_strategy": "no", "save_steps": None, "log_completions": False}
    recipe = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, run, **changes)
    assert train.main(["--config", str(recipe)]) == 1
    assert OTHER in capsys.readouterr().err.splitlines()[-1]
    assert sorted(path.name for path in run.iterdir() if path.name != LIVE) == [LOCK, *written]
