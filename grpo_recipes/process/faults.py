"""What went wrong in a run, printed as one sentence at the end, by every rank, whichever of them failed.

When one rank fails, the others lose their connection to it, and their errors about that hide the one that matters. Each
failing rank writes its sentence into the run's folder, where the others find it, and into the error file of torch's
launcher, which prints it at the end of its own report.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback
from trl.trainer.utils import is_async_callable

from grpo_recipes.process.exit_message import say_last
from grpo_recipes.runs.files import FAULT_FILES, NUMBER, TEXT, RunError, read_object, write_atomically
from grpo_rewards.completions import completion_text, listed_scores
from grpo_rewards.errors import UserError
from grpo_rewards.redaction import scrubbed
from grpo_rewards.terminal import say

Reward = Callable[..., Any]

# How long a rank that lost its connection waits for the sentence of the rank that failed. The sentence is written before
# the connection closes, so only a network file system can delay it.
SENTENCE_SECONDS = 3.0

# How long a build lock may exist without a compiler: torch takes the lock a moment before it starts the compiler.
LOCK_SECONDS = 30.0

# If a run fails and its disk has less room than this, the full disk is taken for the cause.
FULL_BYTES = 1 << 20
# Free entries (inodes). A save makes about 20 files, and those of a failed save may have been removed again.
FULL_ENTRIES = 32

# torch's backends raise RuntimeErrors for a lost rank; a server or tracker that went away raises an OSError.
LOST_CONTACT = re.compile(r"closed by peer|reset by peer|broken pipe|\b(gloo|nccl)\b", re.IGNORECASE)


class RewardFault(RuntimeError):
    """A reward raised, or returned something else than a finite number or None for each completion; the message names it."""


class NothingTrained(RuntimeError):
    """A run that ended without an optimiser step, so that its model is unchanged."""


class NotThePolicy(RuntimeError):
    """Completions were sampled from another distribution than the policy's, so that training on them is training on nothing."""


class BuildLocked(UserError):
    """A lock of torch's extension builder that no process holds: DeepSpeed would wait for it without end."""


def checked_reward(reward: Reward) -> Reward:
    """`reward` with a `RewardFault` where it raises or returns an infinity or NaN; same `__name__`, same arguments.

    TRL 1.16 does not check: with an infinite reward the gradients are NaN, or zero, while the logged loss is 0.0. A row
    that can't be scored is `None`. Models and names of models are returned unchanged: TRL calls those itself.
    """
    if isinstance(reward, (str, torch.nn.Module)):
        return reward
    name = getattr(reward, "__name__", type(reward).__name__)

    def call(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        with _faults_of(name):
            values = reward(prompts=prompts, completions=completions, **columns)
        return _finite(name, values, completions)

    async def call_async(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        with _faults_of(name):
            values = await reward(prompts=prompts, completions=completions, **columns)
        return _finite(name, values, completions)

    checked: Reward = call_async if is_async_callable(reward) else call
    checked.__name__ = name
    return checked


def report(
    error: Exception, folder: Path, checkpoint: Path | None, *, curable: bool = True, secrets: Iterable[str] = ()
) -> None:
    """Print the traceback of a failed run on the rank that failed, then one sentence on every rank.

    Args:
        error: the error of this rank.
        folder: the run's folder, where the ranks write their sentences (`fault-rank*.json`). If that fails, as on a full
            disk, the sentence is only printed.
        checkpoint: the last complete checkpoint, which the sentence names.
        curable: whether a resume could succeed: only then the sentence says how to resume.
        secrets: what is left out of all that is printed and written, as the error of a service may quote its key.
    """
    rank = int(os.environ.get("RANK", "0"))
    found = _earlier_fault(folder) if _is_lost_contact(error) else None
    if found is None:
        trace = scrubbed("".join(traceback.format_exception(error)), secrets)  # whole, as a secret may have many lines
        say(trace, to_stderr=True)
        found = scrubbed(sentence(error, rank, checkpoint, curable=curable), secrets)
        with suppress(OSError):
            if is_full(folder):  # torch and safetensors only report a failed write
                found += f"; the disk of {folder} is full: make room first"
        with suppress(OSError):
            _leave(found, trace.splitlines(keepends=True), error, folder, rank)
    end(found)


def end(found: str) -> int:
    """Print the sentence that a failed run ends with, and write nothing into its folder. Returns the exit code."""
    with suppress(OSError):
        _tell_launcher(found)
    return say_last(f"error: {found}", 1)


def is_full(folder: Path) -> bool:
    """Return True if the disk of `folder` has no room for another file, be it bytes or entries (inodes) that are used
    up."""
    disk = os.statvfs(folder)
    # A file system without a fixed number of entries, such as btrfs, says 0.
    has_no_entries = disk.f_files > 0 and disk.f_favail < FULL_ENTRIES
    return disk.f_bavail * disk.f_frsize < FULL_BYTES or has_no_entries


def is_curable(error: Exception, *, began: bool) -> bool:
    """Whether a resume could succeed: after any error once training began; before that, only after a lost connection."""
    return began or _is_lost_contact(error) or isinstance(error, (ConnectionError, TimeoutError))


def close_progress_bars(callbacks: Iterable[TrainerCallback]) -> None:
    """Close the progress bars of an interrupted run, which would otherwise be drawn again after the last sentence."""
    for callback in callbacks:
        for name in ("training_bar", "prediction_bar"):
            if (bar := getattr(callback, name, None)) is not None:
                bar.close()


def sentence(error: Exception, rank: int, checkpoint: Path | None, *, curable: bool = True) -> str:
    """One line: which rank, what happened, and, if it could help, how to resume."""
    where = f"rank {rank}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    if _is_lost_contact(error):
        what = "another rank ended without an error of its own; it was probably killed (out of memory, or its machine failed)"
    elif isinstance(error, (RewardFault, NothingTrained, NotThePolicy)):
        what = str(error)
    else:
        what = f"{type(error).__name__}: {error}"
    if not curable:
        rest = f"; it was to go on from {checkpoint}: if that is damaged, remove it" if checkpoint else ""
    elif checkpoint:
        rest = f"; `--resume_from_checkpoint true` goes on from {checkpoint.name}"
    else:
        rest = "; no checkpoint had been saved: `--resume_from_checkpoint true` starts again"
    return where + " ".join(what.split()).rstrip(".") + rest


def forget(folder: Path) -> None:
    """Remove the sentence that this rank wrote in an earlier attempt of the same run."""
    _fault_file(folder, int(os.environ.get("RANK", "0"))).unlink(missing_ok=True)


def check_build_locks(patience: float = LOCK_SECONDS) -> None:
    """Raise `BuildLocked` if a build of a torch extension was killed and left its lock.

    torch takes the lock (`torch.utils.file_baton`) before it starts a compiler in the same folder, and waits for another
    process's lock without end. A lock without a compiler for `patience` seconds counts as left behind. Only Linux says where
    processes work; elsewhere every lock that exists for so long does.
    """
    deadline = time.monotonic() + patience
    while stale := [lock for lock in extensions_folder().glob("*/lock") if not _is_building(lock.parent)]:
        if time.monotonic() >= deadline:
            with suppress(FileNotFoundError):  # it has just been removed
                age = time.time() - stale[0].stat().st_mtime
                raise BuildLocked(
                    f"{stale[0]}: a build of DeepSpeed's extensions was killed and left this lock, {age:.0f} s old, on which "
                    "every later run waits for ever: remove that file (unless another machine that shares the folder is "
                    "building just now)"
                )
        time.sleep(min(1.0, patience))


def extensions_folder() -> Path:
    """Where torch builds extensions: `TORCH_EXTENSIONS_DIR`, or its own default."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("deepspeed_shm_comm", verbose=False)).parent


@contextmanager
def _faults_of(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RewardFault(f"reward `{name}` raised {type(error).__name__}: {error}") from error


def _finite(name: str, values: Any, completions: Sequence[Any]) -> list[float | None]:
    """`values` as a list. Raises `RewardFault` unless there is one for each completion, None or a finite number.

    TRL writes them into a tensor of its own: one value too few, or one alone, would be spread over rows without a word.
    """
    try:
        values = listed_scores(name, values, len(completions))
    except ValueError as error:
        raise RewardFault(str(error)) from error
    for row, (value, completion) in enumerate(zip(values, completions, strict=True)):
        if value is not None and not _is_finite(value):
            text = " ".join(completion_text(completion).split())[:60]
            raise RewardFault(
                f"reward `{name}` returned {value!r} for row {row} of this rank's generation (completion {text!r}): return a "
                "finite number, or None for a row that can't be scored"
            )
    return values


def _is_finite(value: Any) -> bool:
    try:
        # TRL converts rewards to float32.
        return math.isfinite(value) and abs(float(value)) <= torch.finfo(torch.float32).max
    except (TypeError, OverflowError):
        return False


def _is_lost_contact(error: Exception) -> bool:
    """Whether a rank's error only says that it lost another rank."""
    says_so = isinstance(error, RuntimeError) and bool(LOST_CONTACT.search(str(error)))
    has_others = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return has_others and not isinstance(error, RewardFault) and (says_so or isinstance(error, dist.DistError))


def _fault_file(folder: Path, rank: int) -> Path:
    return folder / f"fault-rank{rank}.json"


def _leave(found: str, trace: list[str], error: Exception, folder: Path, rank: int) -> None:
    """Write this rank's sentence where the others look for it, unless it only says that another rank is lost."""
    if _is_lost_contact(error):
        return
    record = {"sentence": found, "rank": rank, "traceback": trace, "time": time.time()}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(_fault_file(folder, rank), json.dumps(record, indent=2) + "\n")


def _earlier_fault(folder: Path) -> str | None:
    """The sentence of the rank that failed first, if any wrote one."""
    deadline = time.monotonic() + SENTENCE_SECONDS
    while not (files := list(folder.glob(FAULT_FILES))) and time.monotonic() < deadline:
        time.sleep(0.1)
    records = []
    for path in files:
        with suppress(FileNotFoundError, RunError):  # a fault file that can't be read says nothing
            records.append(read_object(path, {"sentence": TEXT, "time": NUMBER}))
    return min(records, key=lambda record: record["time"])["sentence"] if records else None


def _tell_launcher(found: str) -> None:
    """Write the sentence where torch's launcher looks for it, to print it at the end of its report."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        write_atomically(Path(path), json.dumps({"message": f"error: {found}", "timestamp": int(time.time())}))


def _is_building(folder: Path) -> bool:
    """Whether a process of this machine works in `folder`, as the compiler of an extension does."""
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):  # the process has ended, or is another user's
            if os.readlink(link) == str(folder):
                return True
    return False
