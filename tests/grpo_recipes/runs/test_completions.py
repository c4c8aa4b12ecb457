"""Compacted completions hold every row once, also after kills and on full disks, and no row after a resume's step."""

import errno
import itertools
import json
import logging
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet
from trl import GRPOConfig
from trl.trainer.utils import print_prompt_completions_sample

from grpo_recipes import GRPOTrainer
from grpo_recipes.reports import run as run_module
from grpo_recipes.reports.run import Run
from grpo_recipes.runs import completions, files
from grpo_recipes.runs.completions import (
    EVALUATION,
    TRAINING,
    Compaction,
    arguments_of,
    drop_after,
    logged,
    storable,
)
from grpo_recipes.runs.lock import FolderLost
from grpo_recipes.training import callbacks
from grpo_recipes.training.callbacks import CompactCompletions
from tests.support.probe_rewards import distinct_characters
from tests.support.synthetic import write_run

Rows = list[tuple[int, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "completions").mkdir()
    return tmp_path / "completions"


@pytest.fixture
def threes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make three steps a full compacted file."""
    monkeypatch.setattr(completions, "STEPS", 3)


def write(folder: Path, *steps: int, kind: str = TRAINING, **columns: Any) -> None:
    """Write two rows for each step, as TRL does."""
    for step in steps:
        texts = {"prompt": ["p", "p"], "completion": [f"{step}a", f"{step}b"], "reward": [0.0, 1.0]}
        table = pd.DataFrame({"step": [step] * 2, **texts, **columns})
        table.to_parquet(folder / f"{kind}_{step:05d}.parquet")


def rows_of(*steps: int) -> Rows:
    return [(step, f"{step}{which}") for step in steps for which in "ab"]


def read(folder: Path, kind: str = TRAINING) -> Rows:
    """Return the rows as our readers find them."""
    columns = {"step": files.INTEGERS, "completion": files.TEXTS}
    tables = [
        batch
        for source in completions.sources(logged(folder, kind))
        for batch in completions.read_batches(source, columns)
    ]
    return sorted(row for table in tables for row in zip(table["step"].tolist(), table["completion"], strict=True))


def read_with_pandas(folder: Path, pattern: str = "*.parquet") -> Rows:
    """Return the rows as a reader finds them who does not know of compacted files."""
    tables = [pd.read_parquet(path) for path in folder.glob(pattern)]
    return sorted(row for table in tables for row in zip(table["step"].tolist(), table["completion"], strict=True))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# Merging


def test_full_groups_are_merged_at_saves_and_the_remaining_steps_at_the_end(
    folder: Path, threes: None, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, *range(1, 9))
    write(folder, 0, 4, 8, kind=EVALUATION)
    write(folder, 2, 4, kind="eval_owner-name_completions")
    (folder / "mine.parquet").write_bytes(b"")
    compaction = Compaction(folder)
    compaction.compact(8)
    assert not caplog.records
    merged = ["completions_00001-00003.parquet", "completions_00004-00006.parquet"]
    last = ["completions_00007.parquet", "completions_00008.parquet"]
    assert [name for name in names(folder) if name.startswith(TRAINING)] == [*merged, *last]
    write(folder, 9)
    write(folder, 9, kind=EVALUATION)
    compaction.compact(9, rest=True)
    assert names(folder) == [
        *merged,
        "completions_00007-00008.parquet",
        "completions_00009.parquet",  # the current step: TRL writes it once more at the end of a training
        "eval_completions_00000.parquet",  # an evaluation before the training, which may be made again
        "eval_completions_00004-00008.parquet",
        "eval_completions_00009.parquet",
        "eval_owner-name_completions_00002-00004.parquet",
        "mine.parquet",
    ]
    (folder / "mine.parquet").unlink()
    assert read(folder) == read_with_pandas(folder, "completions_*") == rows_of(*range(1, 10))
    assert read(folder, EVALUATION) == read_with_pandas(folder, "eval_completions_*") == rows_of(0, 4, 8, 9)
    assert [one.step for one in logged(folder, TRAINING)] == list(range(1, 10))


def test_a_thousand_steps_make_a_compacted_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names say how many steps wait, and no file of fewer is opened."""
    merged: list[list[int]] = []
    monkeypatch.setattr(Compaction, "_merge", lambda self, kind, steps, _: merged.append([one.step for one in steps]))
    for step in range(1, 1000):
        (folder / f"completions_{step:05d}.parquet").touch()
    Compaction(folder).compact(2000)
    assert merged == []
    (folder / "completions_01500.parquet").touch()
    Compaction(folder).compact(2000)
    assert merged == [[*range(1, 1000), 1500]]


def test_columns_of_bytes_are_merged(folder: Path) -> None:
    write(folder, 1, 2, extra=[b"a", b"b"])
    Compaction(folder).compact(3, rest=True)
    assert names(folder) == ["completions_00001-00002.parquet"]
    assert pd.read_parquet(folder / "completions_00001-00002.parquet")["extra"].tolist() == [b"a", b"b"] * 2


@pytest.mark.parametrize("wrong", ["no step", "two steps", "in memory", "on the disk"])
def test_a_table_that_no_reader_would_accept_stays(
    folder: Path, wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(completions, "BYTES", 20_000)
    write(folder, 1, 2, 3)
    path = folder / "completions_00002.parquet"
    table = pa.parquet.read_table(path)
    if wrong == "no step":
        pa.parquet.write_table(table.drop_columns("step"), path)
    elif wrong == "two steps":
        pa.parquet.write_table(table.append_column("step", table["step"]), path)
    elif wrong == "in memory":
        write(folder, 2, extra=["x" * 15_000] * 2)
    else:  # two row groups, which are too large together
        write(folder, 2, extra=["x" * 15_000, "y" * 15_000])
        pa.parquet.write_table(pa.parquet.read_table(path), path, row_group_size=1)
        table_of = completions._table

        def readable(one: completions.Logged, schema: pa.Schema) -> pa.Table:
            assert one.path != path, "its metadata tell its size"
            return table_of(one, schema)

        monkeypatch.setattr(completions, "_table", readable)
    Compaction(folder).compact(4, rest=True)
    assert names(folder) == ["completions_00001-00003.parquet", path.name]
    (said,) = caplog.messages
    reason = {"no step": "no column `step`", "two steps": "two columns of one name"}.get(wrong, "it is larger than")
    assert said.startswith(f"{path} is not compacted and stays as it is (")
    assert reason in said


def test_a_table_of_the_largest_size_is_merged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In memory repeated text is larger than on the disk, and other text is smaller."""
    write(folder, 1, 2, extra=["x" * 15_000] * 2)
    size = pa.parquet.read_table(folder / "completions_00001.parquet").nbytes
    monkeypatch.setattr(completions, "BYTES", 2 * size)
    Compaction(folder).compact(3, rest=True)
    assert names(folder) == ["completions_00001-00002.parquet"], "both fill one file"
    write(folder, 3, 4, extra=["x" * 15_000] * 2)
    monkeypatch.setattr(completions, "BYTES", size)
    Compaction(folder).compact(5, rest=True)
    assert read(folder) == rows_of(1, 2, 3, 4)
    write(folder, 5, 6, extra=["x" * 15_000, "y" * 15_000])
    on_disk = parquet.read_metadata(folder / "completions_00005.parquet").row_group(0).total_byte_size
    monkeypatch.setattr(completions, "BYTES", on_disk)
    Compaction(folder).compact(7, rest=True)
    assert caplog.messages == []


def test_one_warning_says_how_many_files_stay(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder, 1, 2, 3, 4)
    for step in (2, 4):
        (folder / f"completions_{step:05d}.parquet").write_bytes(b"")
    Compaction(folder).compact(5, rest=True)
    (said,) = caplog.messages
    assert said.startswith(f"{folder / 'completions_00002.parquet'} is not compacted")
    assert said.endswith(", and 1 more files")


def test_columns_that_differ_between_steps_are_kept(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`log_extra` adds columns, a column without values has no type, and messages with tool calls have more fields."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}
    write(folder, 1, extra=[None, None], messages=[[{"role": "user", "content": "x"}]] * 2)
    write(folder, 2, extra=["seven", None], messages=[[call]] * 2)
    write(folder, 3, level=[1, 2], messages=[[{"role": "user", "content": "x"}]] * 2)
    write(folder, 4, level=[0.5, None], extra=["eight", "nine"])
    write(folder, 5, 6, extra=[1, 2])  # no text: another compacted file
    write(folder, 7, extra=[b"a", b"b"])  # neither: stays
    write(folder, 8, extra=["ten", "eleven"])  # text, which bytes must not swallow: waits for the next step
    before = pd.concat(map(pd.read_parquet, sorted(folder.iterdir())), ignore_index=True)
    with caplog.at_level(logging.WARNING):
        Compaction(folder).compact(9, rest=True)
    assert names(folder) == [
        "completions_00001-00004.parquet",
        "completions_00005-00006.parquet",
        "completions_00007.parquet",
        "completions_00008.parquet",
    ]
    assert [record.message.partition(" is not")[0] for record in caplog.records] == [
        str(folder / "completions_00007.parquet")
    ]
    after = pd.concat(map(pd.read_parquet, sorted(folder.iterdir())), ignore_index=True)
    plain = ["step", "prompt", "completion", "reward"]
    pd.testing.assert_frame_equal(after[plain], before[plain])
    assert after["level"].dropna().tolist() == before["level"].dropna().tolist() == [1, 2, 0.5]
    shown = [
        [None if value is None or value != value else value for value in table["extra"][:12]]
        for table in (before, after)
    ]
    assert shown[0] == shown[1] == [None, None, "seven", None, None, None, "eight", "nine", 1, 2, 1, 2]
    message = after["messages"][2][0]
    assert (message["role"], message["tool_calls"][0]["arguments"]) == ("assistant", {"a": 1})
    assert after["messages"][0][0]["tool_calls"] is None


@pytest.mark.parametrize("wrong", ["damaged", "cut off", "another step", "no rows", "a pipe", "large integers"])
def test_a_file_that_can_not_be_merged_stays_with_one_warning(
    folder: Path, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, 1, 3, 4, count=[0.5, 1.0])
    path = folder / "completions_00002.parquet"
    write(folder, 2, count=[2**60 + 1, 1] if wrong == "large integers" else [1, 2])
    if wrong == "damaged":
        content = path.read_bytes()
        path.write_bytes(content[:10] + bytes(300) + content[310:])
    elif wrong == "cut off":
        path.write_bytes(path.read_bytes()[:-20])
    elif wrong == "another step":
        pd.read_parquet(path).assign(step=[2, 3]).to_parquet(path)
    elif wrong == "no rows":
        pd.read_parquet(path)[:0].to_parquet(path)
    elif wrong == "a pipe":
        path.unlink()
        os.mkfifo(path)
    left = None if wrong == "a pipe" else path.read_bytes()
    compaction = Compaction(folder)
    with caplog.at_level(logging.WARNING):
        compaction.compact(5, rest=True)
        write(folder, 5, 6)
        compaction.compact(7, rest=True)
    (said,) = caplog.messages
    assert said.startswith(f"{path} is not compacted and stays as it is (")
    assert names(folder) == ["completions_00001-00004.parquet", path.name, "completions_00005-00006.parquet"]
    assert left is None or path.read_bytes() == left
    path.unlink()
    assert read(folder) == rows_of(1, 3, 4, 5, 6)


def test_a_table_with_two_columns_of_one_name_stays(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder, 1, 2, 3)
    path = folder / "completions_00002.parquet"
    columns = [pa.array([2, 2]), pa.array(["2a", "2b"]), pa.array([0, 1]), pa.array([1, 0])]
    pa.parquet.write_table(pa.Table.from_arrays(columns, names=["step", "completion", "reward", "reward"]), path)
    Compaction(folder).compact(4, rest=True)
    assert names(folder) == ["completions_00001-00003.parquet", path.name]
    (said,) = caplog.messages
    assert said.startswith(f"{path} is not compacted and stays as it is (")


def test_a_file_that_has_the_name_of_the_merged_one_is_not_replaced(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, 1, 2)
    path = folder / "completions_00001-00002.parquet"
    path.write_bytes(b"mine")
    Compaction(folder).compact(3, rest=True)
    assert path.read_bytes() == b"mine"
    assert read_with_pandas(folder, "completions_0000?.parquet") == rows_of(1, 2)
    assert f"{path} exists already" in caplog.messages[0]


def test_a_link_at_the_path_of_an_unfinished_file_is_not_written_through(folder: Path, tmp_path: Path) -> None:
    """Who may write into the folder could else have another file of the user overwritten."""
    outside = tmp_path / "outside"
    outside.write_text("as it was")
    (folder / f".{TRAINING}.part").symlink_to(outside)
    write(folder, 1, 2)
    Compaction(folder).compact(3, rest=True)
    assert outside.read_text() == "as it was"
    assert names(folder) == ["completions_00001-00002.parquet"]
    assert not (folder / "completions_00001-00002.parquet").is_symlink()


def test_a_compacted_file_stays_below_what_a_reader_accepts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, *range(1, 7), completion=["a" * 1000, "b" * 1000])
    monkeypatch.setattr(completions, "BYTES", 5000)
    Compaction(folder).compact(7, rest=True)
    assert names(folder) == [f"completions_{first:05d}-{first + 1:05d}.parquet" for first in (1, 3, 5)]


def test_one_step_is_in_memory_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, *range(1, 9))
    alive: list[weakref.ref[pa.Table]] = []
    most = []
    table_of = completions._table

    def counted(*arguments: Any) -> pa.Table:
        most.append(sum(reference() is not None for reference in alive))
        table = table_of(*arguments)
        alive.append(weakref.ref(table))
        return table

    monkeypatch.setattr(completions, "_table", counted)
    Compaction(folder).compact(9, rest=True)
    assert len(most) == 8
    assert max(most) <= 1  # the one before, until its name is given to the next


def test_the_merged_file_is_on_the_disk_before_a_step_file_is_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, 1, 2)
    calls: list[str] = []
    sizes: list[int] = []

    def noting(call: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(what: Any, *rest: Any, **more: Any) -> Any:
            if call == "fsync":
                sizes.append(os.fstat(what).st_size)
                calls.append(f"fsync {'folder' if os.path.samestat(os.fstat(what), folder.stat()) else 'file'}")
            elif call == "replace" or what.name.endswith(".parquet"):
                calls.append(f"{call} {what.name}")
            return function(what, *rest, **more)

        return noted

    for owner, call in ((os, "fsync"), (os, "replace"), (Path, "unlink")):
        monkeypatch.setattr(owner, call, noting(call, getattr(owner, call)))
    Compaction(folder).compact(3, rest=True)
    flushed = ["fsync file", "replace .completions.part", "fsync folder"]
    assert calls == [*flushed, "unlink completions_00001.parquet", "unlink completions_00002.parquet"]
    assert sizes[0] == (folder / "completions_00001-00002.parquet").stat().st_size, "all of it was flushed"


def test_merging_stops_in_time_and_continues_after_the_next_save(
    folder: Path, threes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait for the first one."""
    write(folder, *range(1, 7))
    compaction = Compaction(folder)
    with monkeypatch.context() as patch:
        patch.setattr(completions, "SECONDS", -1.0)
        compaction.compact(8)
    assert len(names(folder)) == 6
    compaction.compact(8)
    assert len(names(folder)) == 2


# Crashes and full disks


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Call `work` in a process that is killed at the `number`th call that changes a file or a name.

    Returns False if there are fewer such calls.
    """
    calls = 0

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os._exit(9)
            return function(*arguments, **more)

        return counted

    pid = os.fork()
    if pid == 0:
        try:
            for name in ("replace", "rename", "unlink", "fsync"):
                setattr(os, name, counting(getattr(os, name)))
            for name in ("open", "rename", "unlink"):
                setattr(Path, name, counting(getattr(Path, name)))
            pa.parquet.ParquetWriter.write_table = counting(pa.parquet.ParquetWriter.write_table)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, 9)
    return status == 9


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_point_loses_no_row_and_duplicates_none(tmp_path: Path, threes: None, every: int) -> None:
    expected, expected_eval = rows_of(*range(1, 8)), rows_of(2, 4, 6)
    intact = tmp_path / "intact"
    intact.mkdir()
    write(intact, *range(1, 8))
    write(intact, 2, 4, 6, kind=EVALUATION)
    kills = 0
    for number in itertools.count(1, every):
        folder = shutil.copytree(intact, tmp_path / str(number))
        if not killed_at(number, lambda folder=folder: Compaction(folder).compact(7, rest=True)):  # type: ignore[misc]
            break
        kills += 1
        assert (read(folder), read(folder, EVALUATION)) == (expected, expected_eval)
        # The next launch goes on.
        assert drop_after(folder, 7) == 0
        assert read_with_pandas(folder, "completions_*") == expected
        assert read_with_pandas(folder, "eval_*") == expected_eval
        Compaction(folder).compact(7, rest=True)
        assert (read(folder), read(folder, EVALUATION)) == (expected, expected_eval)
        assert len(names(folder)) <= 5
        shutil.rmtree(folder)
    assert kills > 20 / every


@pytest.mark.parametrize("call", ["write_table", "fsync", "replace"])
def test_on_a_full_disk_the_step_files_stay(
    folder: Path, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, 1, 2, 3)
    before = names(folder)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(pa.parquet.ParquetWriter if call == "write_table" else os, call, full)
        compaction = Compaction(folder)
        compaction.compact(4, rest=True)
    (said,) = caplog.messages
    assert "completions can't be compacted ([Errno 28] No space left on device)" in said
    assert names(folder) == before
    compaction.compact(4, rest=True)
    assert names(folder) == ["completions_00001-00003.parquet"]


def test_step_files_that_can_not_be_removed_are_not_merged_twice(
    folder: Path, threes: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, *range(1, 7))
    unlink = Path.unlink
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):

        def denied(path: Path, missing_ok: bool = False) -> None:
            if "00002" in path.name:
                raise PermissionError(errno.EACCES, "Permission denied")
            unlink(path, missing_ok)

        patch.setattr(Path, "unlink", denied)
        compaction = Compaction(folder)
        compaction.compact(4)
    assert names(folder)[:2] == ["completions_00001-00003.parquet", "completions_00002.parquet"]
    compaction.compact(7)
    assert len(caplog.messages) == 1
    assert read(folder) == rows_of(*range(1, 7))
    assert len(list(folder.glob("*-*.parquet"))) == 2
    drop_after(folder, 6)
    assert names(folder) == ["completions_00001-00003.parquet", "completions_00004-00006.parquet"]


# Resumes


def test_a_resume_drops_the_rows_after_its_step(folder: Path, threes: None) -> None:
    for kind in (TRAINING, EVALUATION):
        write(folder, *range(1, 9), kind=kind)
    write(folder, 0, kind=EVALUATION)
    Compaction(folder).compact(8)
    (folder / ".eval_easy_completions.part").write_bytes(b"left by a launch that was killed")
    assert drop_after(folder, 5) == 6
    assert names(folder) == [
        "completions_00001-00003.parquet",
        "completions_00004-00005.parquet",
        "eval_completions_00000.parquet",
        "eval_completions_00001-00003.parquet",
        "eval_completions_00004-00005.parquet",
    ]
    assert read(folder) == read_with_pandas(folder, "completions_*") == rows_of(*range(1, 6))
    assert drop_after(folder, 5) == 0
    assert drop_after(folder, 0) == 10
    assert names(folder) == ["eval_completions_00000.parquet"]  # made before the training that now begins


@pytest.mark.slow
def test_a_kill_while_rows_are_dropped_leaves_each_row_once(tmp_path: Path) -> None:
    intact = tmp_path / "intact"
    intact.mkdir()
    write(intact, *range(1, 7))
    Compaction(intact).compact(7, rest=True)
    write(intact, 7)
    kills = 0
    for number in itertools.count(1):
        folder = shutil.copytree(intact, tmp_path / str(number))
        if not killed_at(number, lambda folder=folder: drop_after(folder, 4)):  # type: ignore[misc]
            break
        kills += 1
        found = read(folder)
        assert found == read_with_pandas(folder)
        assert found[:8] == rows_of(*range(1, 5))
        drop_after(folder, 4)
        assert names(folder) == ["completions_00001-00004.parquet"]
        assert read(folder) == rows_of(*range(1, 5))
    assert kills > 5


def test_a_damaged_compacted_file_does_not_stop_a_resume(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder, 1, 2)
    path = folder / "completions_00003-00004.parquet"
    path.write_bytes(b"PAR1")
    write(folder, 1, 2, kind=EVALUATION)
    for step in (1, 2):  # compacted files of one step each
        (folder / f"{EVALUATION}_{step:05d}.parquet").rename(folder / f"{EVALUATION}_{step:05d}-{step:05d}.parquet")
    with caplog.at_level(logging.WARNING):
        assert drop_after(folder, 1) == 2
    assert caplog.messages[0].startswith(f"{path}: can't be read as compacted completions")
    assert names(folder) == ["completions_00001.parquet", path.name, "eval_completions_00001-00001.parquet"]
    with pytest.raises(files.RunError, match="restore or remove the file"):
        logged(folder, TRAINING)


def test_rows_that_can_not_be_dropped_stop_the_resume(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would hide the rows that the run logs from now on."""
    write(folder, 1, 2, 3)
    Compaction(folder).compact(4, rest=True)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pa.parquet.ParquetWriter, "write_table", full)
    with pytest.raises(files.RunError, match=r"the completions after step 2 can't be removed .*free space"):
        drop_after(folder, 2)
    assert read(folder) == rows_of(1, 2, 3)


# Readers


def test_a_run_reads_the_same_before_and_after_compaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run")
    before = Run.read(folder).rows
    Compaction(folder / "completions").compact(40, rest=True)
    assert names(folder / "completions") == ["completions_00010-00030.parquet", "completions_00040.parquet"]
    run = Run.read(folder)
    same = ["step", "prompt", "completion", "total", "pay/gsm8k_correctness"]
    pd.testing.assert_frame_equal(run.rows[same], before[same])
    chosen = run.rows.iloc[[20, 3, 31]]
    assert run.texts(chosen)["question"].tolist() == ["question 30.1", "question 10.0", "question 40.1"]
    # Steps are drawn, not files.
    monkeypatch.setattr(run_module, "MAX_STEPS", 2)
    run = Run.read(folder)
    assert (run.completion_files.read, run.completion_files.count) == (2, 4)
    assert sorted(set(run.rows["step"])) == [10, 40]
    assert run.texts(run.rows.iloc[[9]])["question"].tolist() == ["question 40.0"]


def test_a_report_on_a_run_under_way_finds_rows_compacted_in_the_meantime(folder: Path) -> None:
    write(folder, 1, 2, 3)
    sources = completions.sources(logged(folder, TRAINING))
    Compaction(folder).compact(4, rest=True)
    tables = [batch for source in sources for batch in completions.read_batches(source, {"step": files.INTEGERS})]
    assert pd.concat(tables)["step"].tolist() == [1, 1, 2, 2, 3, 3]


def test_steps_are_in_order_and_a_compacted_step_is_not_read_from_its_step_file(folder: Path) -> None:
    write(folder, 1, 3, 4, count=[0.5, 1.0])
    write(folder, 2, count=[2**60 + 1, 1])  # stays, because a float can't hold the integer
    left = (folder / "completions_00003.parquet").read_bytes()
    Compaction(folder).compact(5, rest=True)
    assert names(folder) == ["completions_00001-00004.parquet", "completions_00002.parquet"]
    assert [one.step for one in logged(folder, TRAINING)] == [1, 2, 3, 4]
    # A launch was killed before it had removed a step file, which the disk then lost.
    (folder / "completions_00003.parquet").write_bytes(left[:-20])
    assert read(folder) == rows_of(1, 2, 3, 4)


def test_a_compaction_between_two_looks_at_the_folder_hides_no_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder, 1, 2, 3)
    compaction, glob = Compaction(folder), Path.glob
    looks: list[str] = []

    def looked(path: Path, pattern: str) -> list[Path]:
        found = list(glob(path, pattern))
        looks.append(pattern)
        if len(looks) == 1:
            compaction.compact(4, rest=True)
        return found

    monkeypatch.setattr(Path, "glob", looked)
    assert sorted({one.step for one in logged(folder, TRAINING)}) == [1, 2, 3]


def test_a_pipe_in_place_of_a_compacted_file_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "completions_00001-00002.parquet")
    with pytest.raises(files.RunError, match="it is no ordinary file"):
        logged(folder, TRAINING)


def test_a_drop_is_on_the_disk_before_the_run_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, 1, 2, 3)
    Compaction(folder).compact(4, rest=True)
    flushed: list[list[str]] = []
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.samestat(os.fstat(descriptor), folder.stat()):
            flushed.append(names(folder))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    drop_after(folder, 2)
    assert flushed == [["completions_00001-00002.parquet"]]


@pytest.mark.parametrize(
    ("steps", "options", "says"),
    [
        ({"step": [1.0]}, {}, "its row group 0 does not hold one step"),
        ({"step": [1]}, {"write_statistics": False}, "its row group 0 does not hold one step"),
        ({"other": [1]}, {}, "can't be read as compacted completions"),
    ],
)
def test_a_compacted_file_without_whole_steps_is_refused(
    folder: Path, steps: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    path = folder / "completions_00001-00002.parquet"
    pa.parquet.write_table(pa.table(steps), path, **options)
    with pytest.raises(files.RunError, match=says):
        logged(folder, TRAINING)


def test_a_file_that_only_has_the_name_of_a_compacted_one_is_refused(folder: Path) -> None:
    write(folder, 1)
    pd.DataFrame({"step": [1, 2], "prompt": "p", "completion": "c"}).to_parquet(
        folder / "completions_00001-00002.parquet"
    )
    with pytest.raises(files.RunError, match="its row group 0 does not hold one step"):
        logged(folder, TRAINING)


# The trainer


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({}, None),
        ({"log_completions_hub_repo": "me/logs"}, "`log_completions_hub_repo` has pushed the files already"),
        ({"push_to_hub": True}, "`push_to_hub` has pushed the files already"),
        ({"push_to_hub": True, "hub_strategy": "end"}, None),
    ],
)
def test_files_that_the_hub_has_are_not_compacted(
    folder: Path, threes: None, keys: dict[str, Any], reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    args = GRPOConfig(output_dir=str(folder.parent), use_cpu=True, bf16=False, log_completions=True, **keys)
    saving = SimpleNamespace(pushes=args.push_to_hub, check_folder=lambda: None)
    callback = CompactCompletions(SimpleNamespace(args=args, log_completions=True, checkpoints=saving))
    write(folder, *range(1, 7))
    state, control = SimpleNamespace(global_step=6, is_world_process_zero=True), SimpleNamespace()
    counts = []
    with caplog.at_level(logging.WARNING):
        for event in (
            callback.on_train_begin,
            callback.on_step_begin,
            callback.on_save,
            callback.on_step_begin,
            callback.on_train_end,
        ):
            event(args, state, control)  # type: ignore[arg-type]
            counts.append(len(names(folder)))
    # Full thousands (three here) after a save, the rest but the last step at the end.
    assert counts == ([6, 6, 6, 6, 6] if reason else [6, 6, 6, 4, 3])
    assert [message for message in caplog.messages if reason and reason in message] == caplog.messages
    assert len(caplog.messages) == bool(reason)


def test_only_the_first_rank_touches_the_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "on_first_rank", lambda function: 1)  # another process has called it
    args = GRPOConfig(output_dir=str(folder.parent), use_cpu=True, bf16=False, log_completions=True)
    looked: list[int] = []  # a collective call, which no rank may leave out
    saving = SimpleNamespace(check_folder=lambda: looked.append(1))
    callback = CompactCompletions(SimpleNamespace(args=args, log_completions=True, checkpoints=saving))
    write(folder, 1, 2, 3)
    state, control = SimpleNamespace(global_step=2, is_world_process_zero=False), SimpleNamespace()
    for event in (callback.on_train_begin, callback.on_save, callback.on_step_begin, callback.on_train_end):
        event(args, state, control)  # type: ignore[arg-type]
    assert len(names(folder)) == 3
    assert len(looked) == 3


def test_every_rank_raises_if_the_first_one_can_not_remove_old_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks would otherwise wait for the first rank in their next collective call."""

    def fails(function: Callable[[], int]) -> int:
        raise files.RunError("no space")

    monkeypatch.setattr(callbacks, "on_first_rank", fails)
    args = GRPOConfig(output_dir=str(folder.parent), use_cpu=True, bf16=False, log_completions=True)
    saving = SimpleNamespace(check_folder=lambda: None)
    callback = CompactCompletions(SimpleNamespace(args=args, log_completions=True, checkpoints=saving))
    state = SimpleNamespace(global_step=2, is_world_process_zero=False)
    with pytest.raises(files.RunError, match="no space"):
        callback.on_train_begin(args, state, SimpleNamespace())  # type: ignore[arg-type]


def test_nothing_is_removed_from_a_folder_that_another_launch_has_taken_over(folder: Path) -> None:
    def lost() -> None:
        raise FolderLost("another launch has taken it over")

    args = GRPOConfig(output_dir=str(folder.parent), use_cpu=True, bf16=False, log_completions=True)
    saving = SimpleNamespace(pushes=False, check_folder=lost)
    callback = CompactCompletions(SimpleNamespace(args=args, log_completions=True, checkpoints=saving))
    write(folder, 1, 2, 3)
    state, control = SimpleNamespace(global_step=1, is_world_process_zero=True), SimpleNamespace()
    with pytest.raises(FolderLost):
        callback.on_train_begin(args, state, control)  # type: ignore[arg-type]
    assert len(names(folder)) == 3


@pytest.mark.slow
def test_a_script_that_resumes_an_earlier_checkpoint_logs_every_step_once(
    tiny_model: Path, tmp_path: Path, threes: None
) -> None:
    def trained(name: str, steps: int, resume: str | None = None) -> Path:
        args = GRPOConfig(
            output_dir=str(tmp_path / name),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=4,
            num_generations=4,
            num_generations_eval=2,
            per_device_eval_batch_size=2,
            max_completion_length=6,
            max_steps=steps,
            lr_scheduler_type="constant",
            logging_steps=1,
            log_completions=True,
            save_steps=2,
            eval_strategy="steps",
            eval_steps=1,
            report_to="none",
        )
        prompts, held_out = (Dataset.from_dict({"prompt": list(words)}) for words in (["one", "two", "four"], ["five"]))
        trainer = GRPOTrainer(str(tiny_model), distinct_characters, args, prompts, eval_dataset=held_out)
        trainer.train(resume)
        return tmp_path / name / "completions"

    alone = trained("alone", 8)
    assert names(alone) == [
        "completions_00001-00003.parquet",
        "completions_00004-00006.parquet",
        "completions_00007.parquet",
        "completions_00008.parquet",
        "eval_completions_00001-00003.parquet",
        "eval_completions_00004-00006.parquet",
        "eval_completions_00007.parquet",
        "eval_completions_00008.parquet",
    ]
    folder = trained("resumed", 7)
    assert trained("resumed", 8, str(tmp_path / "resumed" / "checkpoint-4")) == folder
    for kind in (TRAINING, EVALUATION):
        assert [one.step for one in logged(folder, kind)] == list(range(1, 9))
        assert read_with_pandas(folder, f"{kind}_*") == read_with_pandas(alone, f"{kind}_*")


# Calls of tools

# Lone surrogates included: JSON has escapes for them.
TEXTS = st.text(st.characters(exclude_categories=()), max_size=8) | st.sampled_from(["x" * 1000, "\x1b[2J", ""])
NUMBERS = st.integers() | st.just(10**4000) | st.floats() | st.booleans() | st.none()
VALUES = st.recursive(
    NUMBERS | TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": TEXTS, "arguments": st.dictionaries(st.sampled_from("abc") | TEXTS, VALUES, max_size=3) | VALUES},
    optional={"id": VALUES, "": VALUES, "parameters": VALUES},
)
CALLS = FUNCTIONS.map(lambda function: {"type": "function", "function": function}) | FUNCTIONS | VALUES
BLOCKS = st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}) | st.just({"type": "image"}) | VALUES
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["assistant", "tool"]),
        "content": TEXTS | st.none() | st.lists(BLOCKS, max_size=3),
        "tool_calls": st.lists(CALLS, max_size=3) | st.none(),
        "name": TEXTS,
        "reasoning_content": TEXTS | st.none(),
    },
)


ROWS = st.lists(st.lists(MESSAGES, max_size=3), min_size=1, max_size=3)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(rows=ROWS)
def test_calls_are_stored_printed_and_read(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    check_stored(tmp_path_factory, rows)


@pytest.mark.slow
@settings(deadline=None, max_examples=1000)
@given(rows=ROWS)
def test_any_call_is_stored_printed_and_read(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    check_stored(tmp_path_factory, rows)


def check_stored(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    """Check that TRL can print messages and write them to a table, that we can read them, and what is in them."""
    before = repr(rows)
    stored = storable(rows)
    assert repr(rows) == before
    folder = tmp_path_factory.mktemp("table")
    path = folder / "completions_00001.parquet"
    pd.DataFrame({"step": [1] * len(stored), "completion": stored}).to_parquet(path)
    (batch,) = files.read_batches(path, {"completion": files.CONVERSATIONS})
    assert [len(messages) for messages in batch["completion"]] == list(map(len, rows))
    print_prompt_completions_sample(["p"] * len(rows), stored, {"r": [0.0] * len(rows)}, None, 1)
    for messages, read_messages in zip(rows, batch["completion"], strict=True):
        for message, read_message in zip(messages, read_messages, strict=True):
            for call, read_call in zip(message.get("tool_calls") or [], _calls(read_message), strict=True):
                match call:
                    case {"function": {"arguments": dict(arguments)}}:
                        assert json.dumps(arguments_of(read_call["function"]["arguments"])) == json.dumps(arguments)


def _calls(message: Any) -> list[Any]:
    calls = message.get("tool_calls")
    return [] if calls is None else list(calls)


@pytest.mark.parametrize(
    ("stored", "arguments"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1.0, "b": None}, {"a": 1.0}),  # TRL's table: another call has the argument `b`
        ({"a": 0.0, "b": "", "c": False}, {"a": 0.0, "b": "", "c": False}),
        ('{"": 1, "a": 2}', {"": 1, "a": 2}),
        ('{"": [1, 2]}', [1, 2]),
        ("{}", {}),
        (None, {}),
        ([], []),
        ("no json", "no json"),
        ("7", 7),
        ('[""]', [""]),
        pytest.param("[" * 100_000, "[" * 100_000, id="nested too deeply"),
    ],
)
def test_arguments_are_read_from_our_tables_and_trls(stored: Any, arguments: Any) -> None:
    assert arguments_of(stored) == arguments


NOT_STORED = "that is nested too deeply or that JSON does not have"


@pytest.mark.parametrize(
    ("arguments", "read_back"),
    [
        ({"a": 0, "b": None}, {"a": 0, "b": None}),
        ('{"a": [1]}', {"a": [1]}),  # some templates write the arguments as JSON text
        ("[1, 2]", [1, 2]),
        ("no json", "no json"),
        ({"": 1}, {"": 1}),
        ({"\x1b[2J": 1}, {"\x1b[2J": 1}),
        ({"a": 1, "\x1b[2J": 1}, {"a": 1, "\x1b[2J": 1}),
        ({1: 2}, {"1": 2}),
        pytest.param("[" * 100_000, "[" * 100_000, id="nested too deeply"),
        pytest.param({"a": 10**5000}, f"a dict {NOT_STORED}", id="too many digits"),
        ({"a": {(1, 2): 3}}, f"a dict {NOT_STORED}"),
        (None, None),
        (7, 7),
    ],
)
def test_arguments_are_stored_as_a_mapping_that_a_terminal_can_print(arguments: Any, read_back: Any) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}, "parameters": {"x": 1}, "id": 5}
    call["index"] = 0
    (messages,) = storable([[{"role": "assistant", "content": "", "tool_calls": call}]])
    (stored,) = messages[0]["tool_calls"]  # a policy may forget the list
    assert all(key.isprintable() for key in json.loads(stored["function"]["arguments"]))
    assert arguments_of(stored["function"]["arguments"]) == read_back
    assert {key: value for key, value in stored.items() if key != "function"} == {
        "type": "function", "id": "5", "index": "0", "other": '{"parameters": {"x": 1}}'
    }  # fmt: skip


def test_nested_arguments_are_stored_up_to_the_depth_that_json_is_read_and_written() -> None:
    def nested(levels: int) -> Any:
        return {"a": nested(levels - 1)} if levels > 1 else {}

    for levels, is_kept in ((100, True), (101, False)):
        (messages,) = storable([[{"role": "assistant", "tool_calls": [{"name": "f", "arguments": nested(levels)}]}]])
        found = arguments_of(messages[0]["tool_calls"][0]["arguments"])
        assert found == (nested(levels) if is_kept else f"a dict {NOT_STORED}")


@pytest.mark.parametrize(
    ("call", "stored"),
    [
        ("add(1)", {"other": '"add(1)"'}),
        ({}, {"other": "{}"}),
        ({"function": 3, "id": None}, {"id": None, "other": '{"function": 3}'}),
        ({"name": "add"}, {"name": "add"}),
        ({"name": ["add"]}, {"name": '["add"]'}),
    ],
)
def test_a_call_of_another_form_is_stored_as_it_is(call: Any, stored: dict[str, Any]) -> None:
    (messages,) = storable([[{"role": "assistant", "tool_calls": [call]}]])
    assert messages[0]["tool_calls"] == [stored]


def test_an_empty_message_has_a_content_of_the_form_of_the_others() -> None:
    """Parquet has no struct without fields."""
    assert storable([[{}]]) == [[{"role": "assistant", "content": ""}]]
    blocks = [{"type": "text", "text": "x"}]
    assert storable([[{}, {"content": blocks}]]) == [[{"role": "assistant", "content": []}, {"content": blocks}]]


def test_one_message_of_blocks_makes_the_contents_of_all_messages_blocks() -> None:
    blocks = [{"type": "image", "image": "object"}, {"type": "text", "text": "x"}, {"type": "audio", "audio": [1]}]
    chats = [[{"role": "user", "content": "a"}, {"role": "user", "content": blocks}], [{"content": None}], "text"]
    stored = storable(chats)
    assert [message["content"] for message in stored[0]] == [
        [{"type": "text", "text": "a"}],
        [*blocks[:2], {"type": "text", "text": '{"type": "audio", "audio": [1]}'}],
    ]
    assert stored[1:] == [[{"content": None}], "text"]
    (messages,) = storable([[{"content": ""}, {"content": []}, {"content": blocks[:1]}]])
    assert [message["content"] for message in messages] == [[{"type": "text", "text": ""}], [], blocks[:1]]


def test_texts_and_messages_of_texts_are_stored_as_trl_stores_them() -> None:
    rows = [[{"role": "user", "content": "x"}], [{"role": "assistant", "content": "y", "reasoning_content": "z"}]]
    assert storable(rows) == rows
    assert storable(["text", "é"]) == ["text", "é"]


def test_steps_with_and_without_calls_are_compacted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def calls(*arguments: Any) -> list[Any]:
        functions = [{"name": "add", "arguments": one} for one in arguments]
        return [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": functions[0]}]}]

    write(folder, 1, completion=storable([[{"role": "assistant", "content": "x"}]] * 2))
    write(folder, 2, completion=storable([calls({"a": 1}), calls({})]))
    write(folder, 3, completion=storable([calls({"a": "x"}), calls([1])]))
    with caplog.at_level(logging.WARNING):
        Compaction(folder).compact(4, rest=True)
    assert names(folder) == ["completions_00001-00003.parquet"]
    assert not caplog.records
    table = pd.read_parquet(folder / "completions_00001-00003.parquet")
    found = [messages[0]["tool_calls"] for messages in table["completion"]]
    assert found[:2] == [None, None]
    assert [arguments_of(one[0]["function"]["arguments"]) for one in found[2:]] == [{"a": 1}, {}, {"a": "x"}, [1]]


def test_an_empty_list_of_calls_stays_and_none_is_left_out() -> None:
    said = {"role": "assistant", "content": "x"}
    given = [[{**said, "tool_calls": []}], [{**said, "tool_calls": None}], [said]]
    assert storable(given) == [[{**said, "tool_calls": []}], [said], [said]]
