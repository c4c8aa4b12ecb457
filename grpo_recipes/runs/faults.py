"""What goes wrong in a run, said in one sentence and said last: on every rank, whichever rank it went wrong on.

When one rank fails, the others lose their connection to it, and their errors about that bury the one that matters. Each
failing rank leaves its sentence in the run's folder, where the others find it, and in the error file of torch's launcher,
which ends its own report with it.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import TrainerCallback
from trl.trainer.utils import is_async_callable

from grpo_recipes.runs.files import FAULT_FILES
from grpo_rewards.completions import completion_text
from grpo_rewards.errors import UserError

Reward = Callable[..., Any]

# How long a rank that lost its connection looks for the sentence of the rank that failed: the sentence is written before
# the connection closes, and may be late only on a network file system.
SENTENCE_SECONDS = 3.0

# How long a build lock may be without a compiler: the lock is taken a moment before the compiler starts.
LOCK_SECONDS = 30.0

# A disk with less room than this is why a run that was writing failed.
FULL_BYTES = 1 << 20

# torch's own backends raise RuntimeErrors for a lost rank; a server or tracker that went away is an OSError.
LOST_CONTACT = re.compile(r"closed by peer|reset by peer|broken pipe|\b(gloo|nccl)\b", re.IGNORECASE)


class RewardFault(RuntimeError):
    """A reward raised, or returned something that is no finite number; the message names the reward and the row."""


class NothingTrained(RuntimeError):
    """A run that ended without an optimiser step: its model is the one that it began with."""


class BuildLocked(UserError):
    """A lock of torch's extension builder that no process holds: DeepSpeed would wait for it for ever, silently."""


def guarded(reward: Reward) -> Reward:
    """`reward`, stopped at the door when it raises or returns an infinity or NaN; same `__name__`, same arguments.

    TRL 1.16 does not look: an infinite reward becomes NaN gradients, or none, while the logged loss is 0.0. A row that
    can't be scored is `None`. Models and names of models are returned as they are: TRL calls those itself.
    """
    if isinstance(reward, (str, torch.nn.Module)):
        return reward
    name = getattr(reward, "__name__", type(reward).__name__)

    def call(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        try:
            values = reward(prompts=prompts, completions=completions, **columns)
        except Exception as error:
            raise _raised(name, error) from error
        return _finite(name, values, completions)

    async def call_async(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        try:
            values = await reward(prompts=prompts, completions=completions, **columns)
        except Exception as error:
            raise _raised(name, error) from error
        return _finite(name, values, completions)

    guard: Reward = call_async if is_async_callable(reward) else call
    guard.__name__ = name
    return guard


def report(error: Exception, folder: Path, checkpoint: Path | None, *, curable: bool = True) -> None:
    """Print the traceback of a failed run on the rank that failed, and on every rank, last, the sentence that matters.

    Args:
        error: what this rank ran into.
        folder: the run's folder, where the ranks leave their sentences (`fault-rank*.json`). Where they can't be written,
            as on a full disk, the sentence is printed all the same.
        checkpoint: the last complete checkpoint, which the sentence names.
        curable: whether the same command could do better when it is given again: only then the sentence says how.
    """
    rank = int(os.environ.get("RANK", "0"))
    found = _earlier_fault(folder) if _is_lost_contact(error) else None
    if found is None:
        print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
        found = sentence(error, rank, checkpoint, curable=curable)
        if _is_full(folder):  # torch and safetensors tell of a stream that broke
            found += f"; the disk of {folder} is full: make room first"
        with suppress(OSError):
            _leave(found, error, folder, rank)
    with suppress(OSError):
        _tell_launcher(found)
    print(f"error: {found}", file=sys.stderr, flush=True)


def is_curable(error: Exception, *, began: bool) -> bool:
    """Whether a restart could cure an error: any once training began (and mended, a reward's too); before, a lost connection."""
    return began or _is_lost_contact(error) or isinstance(error, (ConnectionError, TimeoutError))


def close_progress_bars(callbacks: Iterable[TrainerCallback]) -> None:
    """Close the bars of an interrupted run: left open, they draw themselves once more after everything else."""
    for callback in callbacks:
        for name in ("training_bar", "prediction_bar"):
            if (bar := getattr(callback, name, None)) is not None:
                bar.close()


def sentence(error: Exception, rank: int, checkpoint: Path | None, *, curable: bool = True) -> str:
    """One line: which rank, what happened, and where to go on from, if that could help."""
    where = f"rank {rank}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    if _is_lost_contact(error):
        what = "another rank ended without an error of its own; it was probably killed (out of memory, or its machine failed)"
    elif isinstance(error, (RewardFault, NothingTrained)):
        what = str(error)
    else:
        what = f"{type(error).__name__}: {error}"
    rest = (
        f"; `--resume_from_checkpoint true` goes on from {checkpoint.name}"
        if checkpoint
        else "; no checkpoint had been saved: `--resume_from_checkpoint true` starts again"
    )
    if not curable:
        rest = f"; it was to go on from {checkpoint}: if that is damaged, remove it" if checkpoint else ""
    return where + " ".join(what.split()).rstrip(".") + rest


def forget(folder: Path) -> None:
    """Remove the sentence that this rank left in an earlier attempt of the same run."""
    _fault_file(folder, int(os.environ.get("RANK", "0"))).unlink(missing_ok=True)


def check_build_locks(patience: float = LOCK_SECONDS) -> None:
    """Raise `BuildLocked` if a build of a torch extension was killed and left its lock.

    torch takes the lock (`torch.utils.file_baton`) before it starts a compiler in the same folder, and waits for a lock
    for ever. A lock without such a compiler for `patience` seconds is nobody's.
    """
    deadline = time.monotonic() + patience
    while stale := [lock for lock in extensions_folder().glob("*/lock") if not _is_building(lock.parent)]:
        if time.monotonic() >= deadline:
            raise BuildLocked(
                f"{stale[0]}: a build of DeepSpeed's extensions was killed and left this lock, on which every later run "
                "waits for ever: remove that file (unless another machine that shares the folder is building just now)"
            )
        time.sleep(min(1.0, patience))


def extensions_folder() -> Path:
    """Where torch builds extensions: `TORCH_EXTENSIONS_DIR`, or its own default."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("deepspeed_shm_comm", verbose=False)).parent


def _raised(name: str, error: Exception) -> RewardFault:
    return RewardFault(f"reward `{name}` raised {type(error).__name__}: {error}")


def _finite(name: str, values: Any, completions: Sequence[Any]) -> list[float | None]:
    """`values` as they are. Raises `RewardFault` for the first that is neither None nor a finite number."""
    values = list(values)
    for row, (value, completion) in enumerate(zip(values, completions, strict=False)):
        if value is not None and not _is_finite(value):
            text = " ".join(completion_text(completion).split())[:60]
            raise RewardFault(
                f"reward `{name}` returned {value!r} for row {row} of this rank's generation (completion {text!r}): return a "
                "finite number, or None for a row that can't be scored"
            )
    return values


def _is_finite(value: Any) -> bool:
    try:
        # TRL makes a float32 tensor of it.
        return math.isfinite(value) and abs(float(value)) <= torch.finfo(torch.float32).max
    except (TypeError, OverflowError):
        return False


def _is_lost_contact(error: Exception) -> bool:
    """Whether a rank's error only says that another one is gone."""
    if isinstance(error, RewardFault) or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return False
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and bool(LOST_CONTACT.search(str(error)))
    )


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < FULL_BYTES
    except OSError:
        return False


def _fault_file(folder: Path, rank: int) -> Path:
    return folder / f"fault-rank{rank}.json"


def _leave(found: str, error: Exception, folder: Path, rank: int) -> None:
    """Write this rank's sentence where the others look for it, unless it only says that another one is gone."""
    if _is_lost_contact(error):
        return
    record = {"sentence": found, "rank": rank, "traceback": traceback.format_exception(error), "time": time.time()}
    folder.mkdir(parents=True, exist_ok=True)
    part = _fault_file(folder, rank).with_suffix(".part")
    try:
        part.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        part.rename(_fault_file(folder, rank))
    except OSError:
        part.unlink(missing_ok=True)  # of a full disk, a part that nobody could read
        raise


def _earlier_fault(folder: Path) -> str | None:
    """The sentence of the rank that failed first, if any left one."""
    deadline = time.monotonic() + SENTENCE_SECONDS
    while not (files := list(folder.glob(FAULT_FILES))) and time.monotonic() < deadline:
        time.sleep(0.1)
    records = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    return min(records, key=lambda record: record["time"])["sentence"] if records else None


def _tell_launcher(found: str) -> None:
    """Leave the sentence where torch's launcher looks for it: its report then ends with it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        Path(path).write_text(
            json.dumps({"message": f"error: {found}", "timestamp": int(time.time())}), encoding="utf-8"
        )


def _is_building(folder: Path) -> bool:
    """Whether a process of this machine works in `folder`, as the compiler of an extension does."""
    return any(process.info["cwd"] == str(folder) for process in psutil.process_iter(["cwd"]))
