"""Two launches into one folder: the second is refused. A stale lock is taken over, and its launch stops."""

import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import SoftFileLease, Timeout
from transformers import TrainerControl, TrainerState

from grpo_recipes import train
from grpo_recipes.runs import lock
from grpo_recipes.runs.files import LIVE
from grpo_recipes.runs.identity import Identity
from grpo_recipes.runs.lock import LOCK, FolderLost, only_launch
from grpo_recipes.training.saving import CompleteCheckpoints
from grpo_rewards.errors import UserError
from tests.support import launching
from tests.support.grids import only

OTHER = "process 17 on other-host"


@pytest.fixture
def short_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "LEASE_SECONDS", 0.4)
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(lock, "SWAP_SECONDS", 0.2)


def marker(pid: int = 17, host: str = "other-host", start: int | None = None, token: str = "theirs") -> str:
    """Return the content of a lock as filelock writes it."""
    lines = ["filelock/2", f"pid={pid}", f"host={host}", "mode=lease", f"token={token}"]
    lines += [f"duration={lock.LEASE_SECONDS!r}"] + ([f"start={start}"] if start is not None else [])
    return "".join(f"{line}\n" for line in lines)


def left(folder: Path, content: str, seconds_ago: float = 0.0) -> Path:
    """Write a lock with some content."""
    folder.mkdir(exist_ok=True)
    path = folder / LOCK
    path.write_text(content)
    then = time.time() - seconds_ago
    os.utime(path, (then, then))
    return path


def take_over(folder: Path, content: str | None = None) -> None:
    """Replace the holder in the lock, as a launch elsewhere does once the lease has expired."""
    part = folder / "part"
    part.write_text(marker() if content is None else content)
    part.rename(folder / LOCK)


def an_ended_process() -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def test_a_launch_holds_its_folder_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with only_launch(tmp_path / "new") as held:
        assert SoftFileLease(tmp_path / "new" / LOCK).pid == os.getpid()
        assert held.loss() is None
        with (
            pytest.raises(UserError, match=rf"process {os.getpid()} on .*: wait for it or stop it$"),
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


def test_a_second_launch_of_a_recipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")])
    assert killed.returncode == -9
    # An interpreter that ends in the middle of the block does not wait for the thread that touches the lock.
    leaves = code.partition("with ")[0] + "block = only_launch(pathlib.Path(sys.argv[1])); block.__enter__()\n"
    subprocess.run([sys.executable, "-c", leaves, str(tmp_path / "left")], check=True, timeout=30)
    assert (tmp_path / "run" / LOCK).is_file()
    assert not lock.is_held(tmp_path / "run")
    with only_launch(tmp_path / "run"):
        said = capsys.readouterr().out
        assert "left by a process that was killed (process " in said
        assert "waiting" not in said
    # Another process has the number of the one that was killed.
    left(tmp_path / "run", marker(os.getpid(), lock._own_host(), start=1))
    with only_launch(tmp_path / "run"):
        assert "taken over" in capsys.readouterr().out


@pytest.mark.slow
def test_without_an_exchange_of_names_a_killed_launch_is_taken_over_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], short_lease: None
) -> None:
    """NFS has no such exchange, and filelock does not take over a lock there."""
    monkeypatch.setattr("filelock._soft.exchange_names", lambda source, target: False)
    for host, waits in ((lock._own_host(), False), ("other-host", True)):
        left(tmp_path / "run", marker(an_ended_process(), host))
        with only_launch(tmp_path / "run") as held:
            said = capsys.readouterr().out
            assert ("waiting up to" in said) == waits
            assert "and taken over" in said
            assert held.loss() is None


def test_a_lock_of_another_machine_is_taken_over_once_it_has_expired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], short_lease: None
) -> None:
    path = left(tmp_path / "run", marker())
    touched = path.stat().st_mtime
    with only_launch(tmp_path / "run"):
        assert time.time() - touched >= lock.LEASE_SECONDS, "until then the other launch may live"
        said = capsys.readouterr().out
        assert "waiting up to" in said
        assert f"({OTHER}), and taken over" in said


def test_a_live_process_of_this_machine_is_refused_without_waiting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left(tmp_path / "run", marker(os.getppid(), lock._own_host()))
    with (
        pytest.raises(UserError, match=rf"process {os.getppid()} on .*: wait for it or stop it$"),
        only_launch(tmp_path / "run"),
    ):
        pass
    assert "waiting" not in capsys.readouterr().out


def test_a_lock_that_replaces_a_left_one_is_respected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch reads the lock of an ended process. Another launch takes the lock over before the first one does."""
    monkeypatch.setattr("filelock._soft.exchange_names", lambda source, target: False)
    ended, own = an_ended_process(), lock._own_host()
    path = left(tmp_path / "run", marker(ended, own))
    reads: list[int] = []
    read = SoftFileLease.owner.fget  # type: ignore[attr-defined]

    def owner(lease: SoftFileLease) -> Any:
        found = read(lease)
        if found is not None and found.pid == ended:
            reads.append(found.pid)
            if len(reads) == replaced_after:
                take_over(tmp_path / "run", marker(os.getppid(), own, token="live"))
        return found

    monkeypatch.setattr(SoftFileLease, "owner", property(owner))
    for replaced_after in (1, 2):
        left(tmp_path / "run", marker(ended, own))
        reads.clear()
        with pytest.raises(UserError, match=f"process {os.getppid()} "), only_launch(tmp_path / "run"):
            pass
        assert len(reads) == replaced_after
        assert "token=live" in path.read_text()


def test_a_folder_that_can_not_be_written_is_not_called_another_launchs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*given: object, **more: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(SoftFileLease, "acquire", denied)
    with pytest.raises(PermissionError), only_launch(tmp_path / "run"):
        pass
    left(tmp_path / "locked", marker())
    with pytest.raises(UserError, match=rf"\({OTHER}; it can't be taken over"), only_launch(tmp_path / "locked"):
        pass


def test_any_thread_may_ask_whether_the_folder_is_lost(tmp_path: Path, short_lease: None) -> None:
    with only_launch(tmp_path / "run") as held, ThreadPoolExecutor(1) as pool:
        assert pool.submit(held.loss).result() is None
        take_over(tmp_path / "run")
        assert pool.submit(held.loss).result() is not None


@pytest.mark.parametrize("sign", ["touched", "replaced"])
def test_the_first_sign_of_another_machine_ends_the_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    """The lease of 30 s is far from its end. A lock of another claim with the same time is a sign too."""
    monkeypatch.setattr(lock, "LEASE_SECONDS", 30.0)
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.02)
    path = left(tmp_path / "run", marker(), seconds_ago=20)
    began = time.monotonic()

    def shows() -> None:
        if sign == "touched":
            os.utime(path)
        else:
            then = path.stat().st_mtime_ns
            take_over(tmp_path / "run", marker(token="another"))
            os.utime(path, ns=(then, then))

    timer = threading.Timer(0.2, shows)
    timer.start()
    with pytest.raises(UserError, match=OTHER), only_launch(tmp_path / "run"):
        pass
    timer.join()
    assert time.monotonic() - began < 15


def test_a_lock_of_another_machine_that_is_touched_is_respected(tmp_path: Path, short_lease: None) -> None:
    path, ended = left(tmp_path / "run", marker()), threading.Event()

    def touch() -> None:
        while not ended.wait(0.05):
            os.utime(path)

    toucher = threading.Thread(target=touch)
    toucher.start()
    try:
        with (
            pytest.raises(UserError, match=rf"\({OTHER}\): .*if it no longer runs, remove .*_run\.lock"),
            only_launch(tmp_path / "run"),
        ):
            pass
    finally:
        ended.set()
        toucher.join()
    assert path.read_text() == marker()


DAMAGED = {
    "empty": "",
    "cut off": "filelock/2\npid=1",
    "nested": "[" * 200_000,
    "another format": '{"host": "h", "processes": "p", "pid": 17, "began": "1"}',
    "no process": marker(pid=10**30),
}


@pytest.mark.parametrize("what", only(["pipe"], [*DAMAGED, "pipe", "link", "sparse"]))
def test_a_damaged_lock_is_taken_over(tmp_path: Path, short_lease: None, what: str) -> None:
    path = left(tmp_path / "run", DAMAGED.get(what, ""))
    if what == "sparse":
        os.truncate(path, 12 << 30)
    elif what in ("pipe", "link"):
        path.unlink()
        os.mkfifo(path) if what == "pipe" else path.symlink_to(tmp_path / "elsewhere")
    lock.is_held(tmp_path / "run")
    with only_launch(tmp_path / "run") as held:
        assert held.loss() is None
    assert not os.path.lexists(path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_lock_that_is_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "run" / LOCK).mkdir(parents=True)
    assert not lock.is_held(tmp_path / "run")
    with pytest.raises(UserError, match=r"Is a directory.*remove .*_run\.lock$"), only_launch(tmp_path / "run"):
        pass


def test_a_lock_with_another_lease_is_respected(tmp_path: Path) -> None:
    left(tmp_path / "run", marker().replace("duration=60.0", "duration=5.0"))
    with pytest.raises(UserError, match=OTHER), only_launch(tmp_path / "run"):
        pass


def test_this_host_is_named_as_in_the_locks_of_this_process(tmp_path: Path) -> None:
    lock._own_host.cache_clear()
    with only_launch(tmp_path / "run"):
        owner = SoftFileLease(tmp_path / "run" / LOCK).owner
        assert owner is not None
        assert lock._own_host() == owner.hostname
        assert platform.node() in owner.hostname


def test_a_full_temporary_folder_does_not_prevent_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with only_launch(tmp_path / "run"):
        lock._own_host.cache_clear()
        monkeypatch.setattr(lock.tempfile, "TemporaryDirectory", full)
        assert lock.is_held(tmp_path / "run")
    lock._own_host.cache_clear()


def test_a_reader_relies_on_the_time_of_a_lock_of_another_machine(tmp_path: Path) -> None:
    assert not lock.is_held(tmp_path / "run")
    for content in (marker(), "{", marker(os.getpid(), lock._own_host())):
        for seconds_ago, is_held in ((0, True), (3600, False)):
            left(tmp_path / "run", content, seconds_ago)
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
    """The launch that took the lock over may have ended since."""
    with only_launch(tmp_path / "run") as held:
        (tmp_path / "run" / LOCK).unlink()
        loss = held.loss()
        assert loss is not None
        assert "was removed, or another launch took it over and has ended" in loss.reason


def test_a_lock_that_another_launch_is_checking_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`filelock` replaces a lock by its own while it checks whether the lock is stale."""
    with only_launch(tmp_path / "run") as held:
        path, aside = tmp_path / "run" / LOCK, tmp_path / "run" / "aside"
        path.rename(aside)
        back = threading.Timer(0.3, lambda: aside.rename(path))
        back.start()
        assert held.loss() is None
        back.join()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
def test_a_folder_that_was_moved_is_named(tmp_path: Path) -> None:
    with only_launch(tmp_path / "run") as held:
        (tmp_path / "run" / "checkpoint-2").mkdir()
        (tmp_path / "run").rename(tmp_path / "there")
        for _ in range(2):
            loss = held.loss()
            assert loss is not None
            assert loss.reason == f"`output_dir` {tmp_path}/run was moved to {tmp_path}/there during the launch"
            assert f"`--output_dir {tmp_path}/there --resume_from_checkpoint true`" in loss.fix
            (tmp_path / "run").mkdir(exist_ok=True)  # another folder of its name
    with only_launch(tmp_path / "gone") as held:
        (tmp_path / "gone" / LOCK).unlink()
        (tmp_path / "gone").rmdir()
        loss = held.loss()
        assert loss is not None
        assert f"{tmp_path}/gone is gone" in loss.reason
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["checkpoint-2"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
def test_the_lock_of_another_launch_in_a_moved_folder_stays(tmp_path: Path) -> None:
    there = tmp_path / "there"
    with only_launch(tmp_path / "run"):
        (tmp_path / "run").rename(there)
        (there / LOCK).unlink()
        other = SoftFileLease(there / LOCK, lease_duration=lock.LEASE_SECONDS)
        other.acquire(blocking=False)
    assert (there / LOCK).exists()
    other.release()


def test_a_lock_is_touched_again_after_the_file_system_failed_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_lease: None
) -> None:
    """`filelock`'s heartbeat ends then."""
    path = tmp_path / "run" / LOCK
    with only_launch(tmp_path / "run") as held:
        with monkeypatch.context() as patch:

            def fails(*given: object, **more: object) -> None:
                raise OSError(5, "Input/output error")

            patch.setattr(os, "utime", fails)
            while held._lease.compromise is None:
                time.sleep(0.05)
        assert held.loss() is None
        touched = path.stat().st_mtime_ns
        deadline = time.monotonic() + 30
        while path.stat().st_mtime_ns == touched:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_of_many_launches_one_takes_over(tmp_path: Path) -> None:
    left(tmp_path / "run", marker(an_ended_process(), lock._own_host()))
    everyone, tried = threading.Barrier(8), threading.Barrier(8)

    def takes() -> bool:
        everyone.wait()
        try:
            with only_launch(tmp_path / "run") as held:
                tried.wait()
                return held.loss() is None
        except UserError:
            tried.wait()
            return False

    with ThreadPoolExecutor(8) as pool:
        took = [pool.submit(takes) for _ in range(8)]
    assert sum(future.result() for future in took) == 1


def test_a_launch_looks_again_after_the_lease_of_another_has_expired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two looks are at most a second apart, and closer than two signs of the process that holds the lock."""
    asked: list[tuple[float, float]] = []

    def acquire(
        lease: SoftFileLease, timeout: float = -1, poll: float = 0.05, *, blocking: bool = True, **_: Any
    ) -> None:
        if blocking:
            asked.append((timeout, poll))
        raise Timeout(str(lease.lock_file))

    lock._own_host()  # kept for the process, and found out by a lock
    monkeypatch.setattr(SoftFileLease, "acquire", acquire)
    monkeypatch.setattr(SoftFileLease, "force_break", lambda lease: None)
    for heartbeat in (10.0, 0.2):
        monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", heartbeat)
        left(tmp_path / "run", marker())
        with pytest.raises(UserError, match=OTHER), only_launch(tmp_path / "run"):
            pass
        timeout, poll = asked.pop()
        assert asked == []
        assert 0 < poll <= min(1.0, heartbeat / 2)
        assert lock.LEASE_SECONDS + poll < timeout <= lock.LEASE_SECONDS + 2


def test_the_lock_is_touched_at_each_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "HEARTBEAT_SECONDS", 0.02)
    with only_launch(tmp_path / "run"):
        before, deadline = (tmp_path / "run" / LOCK).stat().st_mtime_ns, time.monotonic() + 15
        while (tmp_path / "run" / LOCK).stat().st_mtime_ns == before:
            assert time.monotonic() < deadline, "a lease of 60 s would be touched every 20 s by default"
            time.sleep(0.01)


def lowest_free_descriptor() -> int:
    with open(os.devnull, "rb") as file:
        return file.fileno()


def test_a_folder_that_is_held_no_more_costs_no_descriptor_and_is_not_lost(tmp_path: Path) -> None:
    before = lowest_free_descriptor()
    left(tmp_path / "run", marker(an_ended_process(), lock._own_host()))
    with only_launch(tmp_path / "run" / "of" / "a sweep") as held, only_launch(tmp_path / "run"):
        held.close()
        assert held.loss() is None
        assert not (held.folder / LOCK).exists()
        held.close()
    assert lowest_free_descriptor() <= before


def test_a_folder_is_held_without_standard_input_too(tmp_path: Path, short_lease: None) -> None:
    """Without standard input, the folder's file descriptor has the number 0."""
    kept = os.dup(0)
    try:
        os.close(0)
        with only_launch(tmp_path / "run") as held:
            assert held.loss() is None
        assert not (tmp_path / "run").exists()
        with only_launch(tmp_path / "run") as held:
            take_over(tmp_path / "run")
            assert held.loss() is not None
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_a_claim_that_can_not_be_renewed_is_a_loss(tmp_path: Path) -> None:
    """Another launch takes the lock over between the look at it and the renewal."""
    calls: list[str] = []

    def acquire(*, blocking: bool = True) -> None:
        calls.append("acquire")
        assert not blocking, "the launch would wait for the other one to end"
        lease.owner = SimpleNamespace(pid=17, hostname="other-host", token="theirs")
        raise Timeout("lock")

    ours = SimpleNamespace(pid=1, hostname="here", token="ours")
    lease: Any = SimpleNamespace(owner=ours, token="ours", compromise="failed", acquire=acquire, lease_duration=60.0)
    lease.release = lambda: calls.append("release")
    loss = lock.Held(tmp_path, lock.LAUNCH, lease).loss()
    assert loss is not None
    assert OTHER in loss.reason
    assert calls == ["release", "acquire"]


def test_a_lock_that_is_released_during_the_look_is_held_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = left(tmp_path / "run", marker())
    monkeypatch.setattr(SoftFileLease, "owner", property(lambda lease: path.unlink()))
    assert not lock.is_held(tmp_path / "run")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
def test_a_moved_folder_without_its_lock_is_left_as_it_is(tmp_path: Path) -> None:
    with only_launch(tmp_path / "run"):
        (tmp_path / "run" / "kept").touch()
        (tmp_path / "run" / LOCK).unlink()
        (tmp_path / "run").rename(tmp_path / "there")
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["kept"]


def test_only_the_first_rank_takes_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    left(tmp_path / "run", marker(os.getpid(), lock._own_host()))
    with only_launch(tmp_path / "run") as held:
        assert held.loss() is None
    assert (tmp_path / "run" / LOCK).is_file()


def loses_its_folder(completions: Sequence[str], trainer_state: Any, **columns: Any) -> list[float]:
    """Return rewards. In the third step another launch takes over the run's folder, or the folder is moved."""
    folder = Path(os.environ["FOLDER_TO_LOSE"])
    if os.environ.get("RANK", "0") == "0" and trainer_state.global_step == 2:
        folder.rename(folder.with_name("moved")) if "MOVES" in os.environ else take_over(folder)
    return launching.variety(completions)


LOSES = {"rewards": ["tests.grpo_recipes.runs.test_lock.loses_its_folder"], "max_steps": 4}


@pytest.mark.slow
@pytest.mark.parametrize("moves", only([False], [False, True]))
def test_a_launch_that_lost_its_folder_stops_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], moves: bool
) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("FOLDER_TO_LOSE", str(run))
    if moves:
        monkeypatch.setenv("MOVES", "1")
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    recipe = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, run, **LOSES)
    assert train.main(["--config", str(recipe)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ")
    assert "this launch stops after step 3 and writes nothing more there, checkpoint-2 is its last checkpoint" in said
    if moves:
        assert f"was moved to {tmp_path}/moved" in said
        assert not run.exists()
        run = tmp_path / "moved"
        assert not (run / LOCK).exists()
    else:
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
            assert "and taken over" in second.stdout.readline()
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


@pytest.mark.parametrize(
    ("owner", "reason", "sentence"),
    [
        ("here", "", "(process 17 on this-host): wait for it or stop it"),
        (
            "here",
            "; it can't be taken over (no space)",
            "(process 17 on this-host; it can't be taken over (no space)): wait for it or stop it; if it no longer "
            "runs, remove {lock}",
        ),
        ("there", "", "(process 17 on there): wait for it or stop it; if it no longer runs, remove {lock}"),
        ("", "", "(unknown process): wait for it or stop it; if it no longer runs, remove {lock}"),
    ],
)
def test_a_lock_may_be_removed_by_hand_unless_its_process_is_known_to_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str, reason: str, sentence: str
) -> None:
    monkeypatch.setattr(lock, "_own_host", lambda: "this-host")
    host = "this-host" if owner == "here" else owner
    holder = SimpleNamespace(pid=17, hostname=host) if owner else None
    lease: Any = SimpleNamespace(lock_file=str(tmp_path / LOCK), owner=holder)
    error = lock._locked(lease, lock.EVALUATION, reason)
    assert str(error) == (
        f"{tmp_path}: another evaluation writes there just now {sentence.format(lock=tmp_path / LOCK)}"
    )
