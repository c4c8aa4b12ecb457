"""Two launches into one folder: the second is refused; a lock that a killed launch left is taken over."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from grpo_recipes import train
from grpo_recipes.runs import lock
from grpo_recipes.runs.lock import LOCK, Holder, RunLocked, only_launch
from tests.grpo_recipes import launching

ELSEWHERE = Holder("other-host", "another boot", 17, "12345")


def left_by(holder: Holder, folder: Path, seconds_ago: float = 0.0) -> Path:
    """The lock that a process leaves when it is killed, or holds."""
    folder.mkdir(exist_ok=True)
    path = folder / LOCK
    path.write_text(json.dumps(asdict(holder)))
    then = time.time() - seconds_ago
    os.utime(path, (then, then))
    return path


def test_a_launch_holds_its_folder_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with only_launch(tmp_path / "new"):
        assert Holder.read(tmp_path / "new" / LOCK) == Holder.here()
        with (
            pytest.raises(RunLocked, match=rf"process {os.getpid()} on .*: wait for it or stop it$"),
            only_launch(tmp_path / "new"),
        ):
            pass
        assert (tmp_path / "new" / LOCK).is_file()
    assert list(tmp_path.iterdir()) == []
    with only_launch(tmp_path / "kept"):
        (tmp_path / "kept" / "run.json").write_text("{}")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["run.json"]


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


def test_a_killed_launch_is_taken_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import os, signal, pathlib, sys\n"
        "from grpo_recipes.runs.lock import only_launch\n"
        "with only_launch(pathlib.Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")])
    assert killed.returncode == -9
    # An interpreter that ends in the middle of the block does not wait for the thread that touches the lock.
    left = code.partition("with ")[0] + "block = only_launch(pathlib.Path(sys.argv[1])); block.__enter__()\n"
    subprocess.run([sys.executable, "-c", left, str(tmp_path / "left")], check=True, timeout=30)
    assert (tmp_path / "run" / LOCK).is_file()
    with only_launch(tmp_path / "run"):
        assert "left by a launch that was killed (process " in capsys.readouterr().out
    # Another process has the number of the one that was killed.
    left_by(replace(Holder.here(), began="1"), tmp_path / "run")
    with only_launch(tmp_path / "run"):
        assert "taken over" in capsys.readouterr().out


def test_a_reader_goes_by_the_time_of_a_lock_of_another_machine(tmp_path: Path) -> None:
    assert not lock.is_held(tmp_path / "run")
    for content in (None, "{"):
        for seconds_ago, is_held in ((0, True), (3600, False)):
            path = left_by(ELSEWHERE, tmp_path / "run", seconds_ago)
            if content is not None:
                touched = path.stat().st_mtime
                path.write_text(content)
                os.utime(path, (touched, touched))
            assert lock.is_held(tmp_path / "run") == is_held
    left_by(Holder.here(), tmp_path / "run", seconds_ago=3600)
    assert lock.is_held(tmp_path / "run"), "it runs here"
    left_by(replace(Holder.here(), began="1"), tmp_path / "run")
    assert not lock.is_held(tmp_path / "run")


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"pid": 3}'])
def test_on_another_machine_a_lock_that_is_not_touched_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    """As is one whose contents can't be read, which a full disk leaves."""
    path = left_by(ELSEWHERE, tmp_path / "run", seconds_ago=3600)
    if content is not None:
        path.write_text(content)
        os.utime(path, (1, 1))
    with only_launch(tmp_path / "run"):
        assert "waiting" not in capsys.readouterr().out
    monkeypatch.setattr(lock, "STALE_SECONDS", 0.2)
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    left_by(ELSEWHERE, tmp_path / "run")
    with only_launch(tmp_path / "run"):
        said = capsys.readouterr().out
        assert "waiting up to" in said
        assert "(process 17 on other-host), and taken over" in said


def test_on_another_machine_a_lock_that_is_touched_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(lock, "STALE_SECONDS", 30.0)
    monkeypatch.setattr(lock, "_processes", lambda: "another boot")
    with only_launch(tmp_path / "run"):  # touches the lock as long as it runs
        monkeypatch.setattr(lock, "_processes", lambda: "this one")
        with (
            pytest.raises(RunLocked, match=r"if it does not run any more, remove .*_run\.lock"),
            only_launch(tmp_path / "run"),
        ):
            pass


@pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="reads /proc")
def test_a_process_is_known_by_its_number_in_one_table_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another container on this machine, or this machine before it was started again, has another table."""
    here = Holder.here()
    assert here.processes
    assert here.runs()
    with monkeypatch.context() as patch:
        patch.setattr(os, "readlink", lambda path: "pid:[17]")
        container = Holder.here()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *given, **more: "another boot")
        patch.setattr(lock, "_began", lambda pid: here.began)
        restarted = Holder.here()
    assert len({one.processes for one in (here, container, restarted)}) == 3
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    age = uptime - int(here.began) / os.sysconf("SC_CLK_TCK")
    assert age == pytest.approx(time.time() - psutil.Process().create_time(), abs=5)
    ended = os.fork()
    if ended == 0:
        os._exit(0)
    os.waitpid(ended, 0)
    with monkeypatch.context() as patch:
        patch.setattr(lock, "_began", lambda pid: "")  # as where the system does not say
        assert replace(here, began="").runs()
        assert not replace(here, began="", pid=ended).runs()
    assert Holder.here() == here


@pytest.mark.parametrize("links", [True, False])
def test_of_many_launches_one_gets_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:

        def no_links(*given: object) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr(os, "link", no_links)
    barrier = threading.Barrier(16)

    def take(number: int) -> bool:
        barrier.wait()
        return lock._taken(tmp_path / LOCK, replace(ELSEWHERE, pid=number))

    with ThreadPoolExecutor(16) as pool:
        took = list(pool.map(take, range(16)))
    assert sum(took) == 1
    assert Holder.read(tmp_path / LOCK) == replace(ELSEWHERE, pid=took.index(True))
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]


def test_only_the_first_rank_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    left_by(Holder.here(), tmp_path / "run")
    with only_launch(tmp_path / "run"):
        pass
    assert (tmp_path / "run" / LOCK).is_file()
