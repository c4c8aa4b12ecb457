"""Error line of a failed run: the same on every rank, with a resume only where it could succeed, and printed last."""

import json
import os
import re
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_recipes.checks.rewards import checked_reward
from grpo_recipes.process.faults import RECORDED_CHARS, FaultyRow, NotThePolicy, RewardFault, fault_file
from grpo_recipes.run import endings
from grpo_rewards.files import write_atomically
from tests.support import launching


def test_the_error_line_names_the_reward_that_raised(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def judge(prompts: list, completions: list, **columns: object) -> list:
        raise KeyError("gold")

    with pytest.raises(RewardFault) as fault:
        checked_reward(judge)(prompts=["one"], completions=["two"])
    endings.report(fault.value, tmp_path, None)
    printed = capsys.readouterr().err.splitlines()
    assert printed[-1].startswith("error: reward `judge` raised KeyError: 'gold'")
    for figure in ("row 0", "'two'", "--resume_from_checkpoint"):
        assert figure in printed[-1]
    assert any("Traceback" in line for line in printed)


def test_the_fault_file_holds_the_completion_without_secrets(tmp_path: Path) -> None:
    row = FaultyRow("judge", 2, "the prompt", "hunter2 " * 9999, 11)
    endings.report(RewardFault("reward `judge` raised", row), tmp_path, None, secrets=["hunter2"])
    written = json.loads((tmp_path / "fault-rank0.json").read_text())["row"]
    assert (written["reward"], written["row"], written["prompt"], written["step"]) == ("judge", 2, "the prompt", 11)
    assert len(written["completion"]) == RECORDED_CHARS
    assert "hunter2" not in written["completion"]


def test_the_error_line_is_printed_if_its_file_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/proc/run/error.json")
    endings.report(OSError(28, "No space left on device"), Path("/proc/run"), None)
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: OSError: [Errno 28] No space left on device;")


def test_a_full_disk_leaves_no_partial_fault_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        write(path, content[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    endings.report(RuntimeError("the disk is full"), tmp_path, None)
    assert "the disk is full" in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("free", [(1 << 20) - 1, 1 << 20])
def test_a_full_disk_is_named_as_the_cause(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """`torch` reports a full disk as "unexpected pos 64832 vs 64724"."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    endings.report(RuntimeError("unexpected pos 64832 vs 64724"), tmp_path, tmp_path / "checkpoint-5")
    last = capsys.readouterr().err.splitlines()[-1]
    assert "checkpoint-5" in last
    assert (str(tmp_path) in last) == (free < 1 << 20)


@pytest.mark.parametrize(
    ("error", "began", "resumable"),
    [
        (ValueError("a combination that TRL refuses"), False, False),
        (RuntimeError("size mismatch in the checkpoint"), False, False),
        (ConnectionError("the vLLM server"), False, True),
        (TimeoutError("of a judge"), False, True),
        (OSError("a full disk"), False, False),
        (ValueError("of a step"), True, True),
        (RuntimeError("CUDA out of memory"), True, True),
    ],
)
def test_a_resume_is_recommended_only_if_it_could_succeed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, error: Exception, began: bool, resumable: bool
) -> None:
    assert endings.report(error, tmp_path, tmp_path / "checkpoint-4", began=began) == 1
    assert ("--resume_from_checkpoint" in capsys.readouterr().err.splitlines()[-1]) == resumable


def test_a_rank_that_lost_another_prints_the_message_of_that_rank(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    endings.report(RewardFault("reward `judge` raised ValueError: no"), tmp_path, tmp_path / "checkpoint-4")
    capsys.readouterr()
    monkeypatch.setenv("RANK", "0")
    endings.report(RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer"), tmp_path, None)
    (printed,) = capsys.readouterr().err.splitlines()
    assert printed.startswith("error: rank 1: reward `judge` raised ValueError: no; ")
    assert "checkpoint-4" in printed
    assert json.loads((tmp_path / "error.json").read_text())["message"] == printed
    # A message of an earlier attempt is not reused.
    monkeypatch.setenv("RANK", "1")
    fault_file(tmp_path).unlink()
    monkeypatch.setattr(endings, "MESSAGE_SECONDS", 0)
    endings.report(RuntimeError("Connection reset by peer"), tmp_path, None)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: rank 1: ")
    assert "reset by peer" not in last
    assert "judge" not in last
    assert not (tmp_path / "fault-rank1.json").exists(), "a lost contact is no cause that other ranks look for"


def test_the_rank_that_failed_first_is_quoted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that another program left, or that are incomplete, are passed over."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    files = {0: {"sentence": "rank 0: a", "time": 2.5}, 1: {"sentence": "rank 1: b", "time": 2}}
    files |= {2: {"sentence": "rank 2: c", "time": "1"}, 3: {"sentence": 3, "time": 1}}
    for number, content in files.items():
        (tmp_path / f"fault-rank{number}.json").write_text(json.dumps(content))
    (tmp_path / "fault-rank4.json").write_text('{"sent')
    endings.report(torch.distributed.DistBackendError("NCCL error"), tmp_path, None)
    assert capsys.readouterr().err == "error: rank 1: b\n"


def test_a_stop_is_recorded_as_the_first_rank_s(tmp_path: Path) -> None:
    assert endings.end_with_stop("stopped by SIGTERM", 0, tmp_path) == 0
    written = json.loads((tmp_path / "fault-rank0.json").read_text())
    assert (written["sentence"], written["rank"]) == ("stopped by SIGTERM", 0)
    assert time.time() - 60 < written["time"] <= time.time()
    assert endings.end_with_stop("stopped by SIGTERM", 0, tmp_path / "missing") == 0


def test_an_error_without_a_resume_names_the_checkpoint_that_is_damaged() -> None:
    damaged = endings.error_message(ValueError("no"), Path("run/checkpoint-3"), resumable=False)
    assert "run/checkpoint-3" in damaged
    assert "--resume_from_checkpoint" not in damaged
    mismatch = endings.error_message(NotThePolicy("the generator"), Path("run/checkpoint-4"))
    assert mismatch.startswith("the generator; "), "without the name of the class"
    assert mismatch.endswith(" checkpoint-4")
    assert endings.error_message(ValueError("no"), None, resumable=False) == "ValueError: no"


def test_a_rank_waits_for_the_message_of_the_rank_that_failed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network file system, a file may become visible after the connection to its writer is lost."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(endings, "MESSAGE_SECONDS", 60)
    record = json.dumps({"sentence": "rank 1: no room", "rank": 1, "time": 1.0})
    late = threading.Timer(0.2, write_atomically, (tmp_path / "fault-rank1.json", record))
    late.start()
    endings.report(RuntimeError("Connection reset by peer"), tmp_path, None)
    late.join()
    assert capsys.readouterr().err.splitlines() == ["error: rank 1: no room"]


@pytest.mark.parametrize(
    ("error", "ranks", "is_lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer"), "2", True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer"), "1", False),
        (torch.distributed.DistNetworkError("no route"), "2", True),
        (torch.distributed.DistNetworkError("no route"), "1", False),
        (RewardFault("reward `judge` raised RuntimeError: NCCL error"), "2", False),
    ],
)
def test_a_connection_error_names_a_lost_rank_only_among_several(
    monkeypatch: pytest.MonkeyPatch, error: Exception, ranks: str, is_lost: bool
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    printed = endings.error_message(error, None)
    assert (str(error) in printed) != is_lost


@pytest.mark.parametrize(
    "error", [ConnectionError("Connection refused: http://localhost:8000"), FileNotFoundError("/home/igloo/x")]
)
def test_other_errors_are_not_taken_for_a_lost_rank(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    endings.report(error, tmp_path, None)
    assert type(error).__name__ in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "fault-rank0.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "reward", "says"),
    [
        ("zero3_cpu", "raises_on_rank_1", "rank 1: reward `raises_on_rank_1` raised ValueError"),
        ("ddp_cpu", "kills_rank_1", "another rank"),
    ],
)
def test_every_rank_ends_with_the_error_of_the_rank_that_failed(
    tmp_path: Path, extensions: str, layout: str, reward: str, says: str
) -> None:
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    rewards = [f"tests.support.launching.{reward}"]
    recipe = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, tmp_path / "run", rewards=rewards)
    process = launching.start(layout, recipe, TORCH_EXTENSIONS_DIR=extensions)
    assert launching.wait_for((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").exists, process)
    printed = launching.finish(process, timeout=60)
    assert process.returncode == 1
    ranks, _, launcher = printed.partition("] failed (exitcode")
    *_, last = [line for line in ranks.splitlines() if not re.match(r"[WE]\d{4} ", line)]  # torch's own log
    assert last.startswith("error: "), printed
    assert says in last
    assert "goes on from checkpoint-2" in last
    survivors = 1 if reward == "kills_rank_1" else 2
    assert sum(line.startswith("error: ") and says in line for line in ranks.splitlines()) == survivors
    # The launcher's own report follows, and ends with the error line or with the signal.
    assert f"error: {'rank 0: ' if survivors == 1 else ''}{says}" in launcher
    assert (tmp_path / "run" / "checkpoint-2" / "model.safetensors").is_file()
    assert os.path.exists(tmp_path / "run" / "completions" / "completions_00002.parquet")


# The last line of a launch


def test_the_launcher_gets_the_last_line_of_the_first_process_that_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(endings.LAST_LINE_VARIABLE, str(tmp_path / "last"))
    assert endings.print_last_line('error: ü "\n', 2) == 2
    endings.print_last_line("error: lost the first", 1)
    assert endings.read_last_line(tmp_path / "last") == ('error: ü "\n', 2)
    assert capsys.readouterr().err == ""
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_the_last_line_is_printed_if_its_file_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(endings.LAST_LINE_VARIABLE, str(tmp_path / "nowhere" / "last"))
    endings.print_last_line("error: no\x1b[2Jroom", 1)
    assert capsys.readouterr().err == "error: no\\x1b[2Jroom\n"


@pytest.mark.parametrize("content", [None, "", '{"line'])
def test_a_process_may_leave_no_last_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "last").write_text(content)
    assert endings.read_last_line(tmp_path / "last") is None
