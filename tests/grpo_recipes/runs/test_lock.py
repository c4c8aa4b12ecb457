"""Two launches into one folder: the second is refused. A stale lock is taken over, and its launch stops."""

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import SoftFileLease
from transformers import TrainerControl, TrainerState

from grpo_recipes import train
from grpo_recipes.runs import lock
from grpo_recipes.runs.files import LIVE
from grpo_recipes.runs.identity import Identity
from grpo_recipes.runs.lock import LOCK, FolderLost, only_launch
from grpo_recipes.training.saving import CompleteCheckpoints
from grpo_rewards.errors import UserError
from tests.support import launching

OTHER = "process 17 on other-host"


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LEASE_SECONDS", 0.4)
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "SWAP_SECONDS", 0.2)


def marker(token: str = "theirs") -> str:
    """Return the content of a lock of another machine, as filelock writes it."""
    lines = ["filelock/2", "pid=17", "host=other-host", "mode=lease", f"token={token}"]
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


def test_a_launch_holds_its_folder_and_leaves_nothing_behind(tmp_path: Path, short_lease: None) -> None:
    with only_launch(tmp_path / "new") as held:
        assert SoftFileLease(tmp_path / "new" / LOCK).pid == os.getpid()
        assert held.loss() is None
        with (
            pytest.raises(
                UserError, match=rf"process {os.getpid()} on .*: wait for it or stop it; if it no longer runs"
            ),
            only_launch(tmp_path / "new"),
        ):
            pass
        assert (tmp_path / "new" / LOCK).is_file()
    assert list(tmp_path.iterdir()) == []
    with only_launch(tmp_path / "kept"):
        (tmp_path / "kept" / "run.json").write_text("{}")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["run.json"]
    (tmp_path / "made before").mkdir()
    with only_launch(tmp_path / "made before"):
        pass
    assert (tmp_path / "made before").is_dir()


def test_a_second_launch_of_a_recipe_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], short_lease: None
) -> None:
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    recipe = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, tmp_path / "run", max_steps=1)
    with only_launch(tmp_path / "run"):
        for more in ([], ["--resume_from_checkpoint", "true"]):
            assert train.main(["--config", str(recipe), *more]) == 2
            said = capsys.readouterr().err.splitlines()[-1]
            assert f"another launch writes there just now (process {os.getpid()} on " in said
        assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]
    assert train.main(["--config", str(recipe)]) == 0
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_killed_launch_is_taken_over_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import os, signal, pathlib, sys\n"
        "from grpo_recipes.runs.lock import only_launch\n"
        "with only_launch(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")]).returncode == -9
    assert (tmp_path / "run" / LOCK).is_file()
    with only_launch(tmp_path / "run") as held:
        assert held.loss() is None
    assert "waiting" not in capsys.readouterr().out


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_lock_of_another_machine_is_taken_over_once_it_has_expired(
    exchanges: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    short_lease: None,
) -> None:
    """NFS has no exchange of two names, and filelock does not take over a lock there."""
    if not exchanges:
        monkeypatch.setattr("filelock._soft.exchange_names", lambda source, target: False)
    touched = left(tmp_path / "run", marker()).stat().st_mtime
    with only_launch(tmp_path / "run") as held:
        assert held.loss() is None
        assert time.time() - touched >= lock.LEASE_SECONDS, "until then the other launch may live"
    assert f"waiting up to 0 s for a sign of {OTHER}" in capsys.readouterr().out


def test_the_first_sign_of_another_machine_ends_the_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease of 30 s is far from its end."""
    monkeypatch.setattr(lock, "LEASE_SECONDS", 30.0)
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.02)
    path = left(tmp_path / "run", marker(), seconds_ago=20)
    began, timer = time.monotonic(), threading.Timer(0.2, os.utime, (path,))
    timer.start()
    with (
        pytest.raises(UserError, match=rf"\({OTHER}\): .*if it no longer runs, remove .*_run\.lock"),
        only_launch(tmp_path / "run"),
    ):
        pass
    timer.join()
    assert time.monotonic() - began < 15
    assert path.read_text() == marker()


@pytest.mark.parametrize("what", ["empty", "another format", "pipe", "link"])
def test_a_damaged_lock_is_taken_over(tmp_path: Path, short_lease: None, what: str) -> None:
    path = left(tmp_path / "run", '{"host": "h", "pid": 17}' if what == "another format" else "")
    if what in ("pipe", "link"):
        path.unlink()
        os.mkfifo(path) if what == "pipe" else path.symlink_to(tmp_path / "elsewhere")
    with only_launch(tmp_path / "run") as held:
        assert held.loss() is None
    assert not os.path.lexists(path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_lock_that_is_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "run" / LOCK).mkdir(parents=True)
    with pytest.raises(UserError, match=r"remove .*_run\.lock$"), only_launch(tmp_path / "run"):
        pass


def test_a_lock_with_another_lease_is_respected(tmp_path: Path) -> None:
    left(tmp_path / "run", marker().replace("duration=60.0", "duration=5.0"))
    with pytest.raises(UserError, match=OTHER), only_launch(tmp_path / "run"):
        pass


def test_a_reader_relies_on_the_time_of_a_lock(tmp_path: Path) -> None:
    assert not lock.is_held(tmp_path / "run")
    for seconds_ago, is_held in ((0, True), (3600, False)):
        left(tmp_path / "run", marker(), seconds_ago)
        assert lock.is_held(tmp_path / "run") == is_held


def test_the_loser_of_a_takeover_notices_it_and_keeps_the_other_lock(tmp_path: Path, short_lease: None) -> None:
    with only_launch(tmp_path / "run") as held:
        take_over(tmp_path / "run")
        loss = held.loss()
        assert loss is not None
        assert f"another launch ({OTHER}) has taken it over" in loss.reason
        assert "`--resume_from_checkpoint true`" in loss.fix
    assert (tmp_path / "run" / LOCK).read_text() == marker()


def test_a_lock_that_was_removed_is_a_loss(tmp_path: Path, short_lease: None) -> None:
    with only_launch(tmp_path / "run") as held:
        (tmp_path / "run" / LOCK).unlink()
        loss = held.loss()
        assert loss is not None
        assert "it was removed, or the folder was moved" in loss.reason


def test_a_lock_that_another_launch_is_checking_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`filelock` replaces a lock by its own while it checks whether the lock is stale."""
    with only_launch(tmp_path / "run") as held:
        path, aside = tmp_path / "run" / LOCK, tmp_path / "run" / "aside"
        path.rename(aside)
        back = threading.Timer(0.3, lambda: aside.rename(path))
        back.start()
        assert held.loss() is None
        back.join()


def test_the_lock_is_touched_at_each_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.02)
    with only_launch(tmp_path / "run"):
        before, deadline = (tmp_path / "run" / LOCK).stat().st_mtime_ns, time.monotonic() + 15
        while (tmp_path / "run" / LOCK).stat().st_mtime_ns == before:
            assert time.monotonic() < deadline, "a lease of 60 s would be touched every 20 s by default"
            time.sleep(0.01)


def test_only_the_first_rank_takes_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    left(tmp_path / "run", marker())
    with only_launch(tmp_path / "run") as held:
        assert held.loss() is None
    assert (tmp_path / "run" / LOCK).is_file()


def loses_its_folder(completions: Sequence[str], trainer_state: Any, **columns: Any) -> list[float]:
    """Return rewards. In the third step another launch takes over the run's folder."""
    folder = Path(os.environ["FOLDER_TO_LOSE"])
    if os.environ.get("RANK", "0") == "0" and trainer_state.global_step == 2:
        take_over(folder)
    return launching.variety(completions)


LOSES = {"rewards": ["tests.grpo_recipes.runs.test_lock.loses_its_folder"], "max_steps": 4}


@pytest.mark.slow
def test_a_launch_that_lost_its_folder_stops_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("FOLDER_TO_LOSE", str(run))
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    recipe = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, run, **LOSES)
    assert train.main(["--config", str(recipe)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ")
    assert "this launch stops after step 3 and writes nothing more there, checkpoint-2 is its last checkpoint" in said
    assert f"another launch ({OTHER}) has taken it over" in said
    assert (run / LOCK).read_text() == marker()
    assert sorted(path.name for path in run.glob("c*")) == ["checkpoint-1", "checkpoint-2", "completions"]
    assert sorted(path.name for path in (run / "completions").iterdir()) == [
        f"completions_{step:05d}.parquet" for step in (1, 2)
    ]
    assert not list(run.glob("fault*"))
    assert not (run / "model.safetensors").exists()


WRITES = [
    ("on_train_begin", {}, True),
    ("on_step_end", {"should_save": True}, True),
    ("on_step_end", {"should_log": True}, True),
    ("on_step_end", {"should_evaluate": True}, True),
    ("on_step_end", {}, False),
    ("on_epoch_end", {"should_save": True}, True),
    ("on_log", {"should_save": True}, True),
    ("on_log", {}, False),
    ("on_evaluate", {}, True),
    ("on_save", {}, True),
]


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize(("event", "flags", "looks"), WRITES)
def test_the_folder_is_checked_before_every_write(
    tmp_path: Path, short_lease: None, event: str, flags: dict[str, bool], looks: bool
) -> None:
    trainer: Any = SimpleNamespace(state=TrainerState(global_step=7))
    checkpoints = CompleteCheckpoints(trainer, lambda: Identity({}))
    arguments = SimpleNamespace(output_dir=str(tmp_path / "run")), TrainerState(), TrainerControl(**flags)
    with only_launch(tmp_path / "run") as checkpoints.held:
        take_over(tmp_path / "run")
        with pytest.raises(FolderLost, match="after step 7 .*, it has no checkpoint: ") if looks else nullcontext():
            getattr(checkpoints, event)(*arguments)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(
    ("after", "written"), [("confirm_checkpoint", []), ("build_trainer", []), ("train", ["run.json"])]
)
def test_a_folder_lost_outside_of_the_steps_gets_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], after: str, written: list[str]
) -> None:
    run, original = tmp_path / "run", getattr(train, after)

    def loses(*given: Any) -> Any:
        done = original(*given)
        take_over(run)
        return done

    monkeypatch.setattr(lock, "SWAP_SECONDS", 0.2)
    monkeypatch.setattr(train, after, loses)
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    changes = {"max_steps": 1, "save_strategy": "no", "save_steps": None, "log_completions": False}
    recipe = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, run, **changes)
    assert train.main(["--config", str(recipe)]) == 1
    assert f"another launch ({OTHER}) has taken it over" in capsys.readouterr().err.splitlines()[-1]
    assert sorted(path.name for path in run.iterdir() if path.name != LIVE) == [LOCK, *written]


@pytest.mark.slow
def test_all_ranks_stop_together(tmp_path: Path) -> None:
    run = tmp_path / "run"
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    recipe = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, run, **LOSES)
    process = launching.start("ddp_cpu", recipe, FOLDER_TO_LOSE=str(run))
    said = launching.finish(process)
    assert process.returncode == 1, said
    assert said.count(f"error: `output_dir` {run}: another launch ({OTHER}) has taken it over") >= 2
    assert "Traceback" not in said.split("error: ")[0]
    assert not list(run.glob("fault*"))
    assert sorted(path.name for path in run.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]
    assert (run / LOCK).read_text() == marker()


HOLDS = """
import os, pathlib, signal, sys
from grpo_recipes.runs import lock
lock.LEASE_SECONDS, lock.HEARTBEAT_SECONDS, lock.SWAP_SECONDS = 1.0, 0.1, 0.2
with lock.only_launch(pathlib.Path(sys.argv[1])) as held:
    print("holds", flush=True)
    sys.stdin.readline()
    print(held.loss(), flush=True)
    sys.stdin.readline()
"""
IN_A_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc")


def can_unshare() -> bool:
    if platform.system() != "Linux":
        return False
    try:
        return subprocess.run([*IN_A_NAMESPACE, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def holding(folder: Path, *prefix: str) -> subprocess.Popen:
    """Start a process that holds a folder, prints its loss after a line of input, and ends after another line."""
    command: Sequence[str] = [*prefix, sys.executable, "-c", HOLDS, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, bufsize=1, **pipes)


def ask(process: subprocess.Popen) -> str:
    process.stdin.write("\n")
    return process.stdout.readline()


@pytest.mark.slow
@pytest.mark.skipif(not can_unshare(), reason="makes a PID namespace")
def test_a_suspended_launch_loses_its_folder_to_another_container(tmp_path: Path) -> None:
    first = holding(tmp_path / "run")
    try:
        assert first.stdout.readline() == "holds\n"
        refused = holding(tmp_path / "run", *IN_A_NAMESPACE)  # where no process has the first one's number
        _, said = refused.communicate(timeout=60)
        assert refused.returncode == 1
        assert f"another launch writes there just now (process {first.pid} on {platform.node()}" in said
        first.send_signal(signal.SIGSTOP)
        second = holding(tmp_path / "run", *IN_A_NAMESPACE)
        try:
            assert "waiting up to" in second.stdout.readline()
            assert second.stdout.readline() == "holds\n"
            held = (tmp_path / "run" / LOCK).read_text()
            first.send_signal(signal.SIGCONT)
            assert "another launch (process 1 on " in ask(first)
            first.communicate("\n", timeout=60)
            assert (tmp_path / "run" / LOCK).read_text() == held
            assert ask(second) == "None\n"
        finally:
            second.communicate("\n", timeout=60)
    finally:
        first.kill()
        first.communicate()
    assert not (tmp_path / "run" / LOCK).exists()
