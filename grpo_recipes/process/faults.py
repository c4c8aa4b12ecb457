"""Error messages of a run: one line, printed last by every rank and by the command that started the ranks.

When one rank fails, the other ranks lose their connection to it, and their errors about the connection hide its error.
Each failing rank therefore writes its message into the run's folder, where the other ranks read it, and into the error
file of torch's launcher, which prints it at the end of its own report.

A launcher also prints its report after the last line of its processes. `grpo-recipes train` therefore names a file in
the environment variable `LAST_LINE_VARIABLE`. The first process that ends leaves its last line there, and the command
prints the line after the launcher has ended.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_rewards.errors import one_line, shortened
from grpo_rewards.files import UnreadableFile, read_json, write_atomically
from grpo_rewards.redaction import scrubbed
from grpo_rewards.terminal import say, visible

LAST_LINE_VARIABLE = "GRPO_RECIPES_LAST_LINE"
"""Name of the environment variable that holds the path of the file for the last line."""

FAULT_FILES = "fault-rank*.json"
"""Pattern of the files in a run's folder that hold the messages of failed ranks."""

# Seconds that a rank which lost its connection waits for the message of the rank that failed. The message is written
# before the connection closes, so only a network file system can delay it.
MESSAGE_SECONDS = 3.0

# If a run fails and its disk has less room than this, the full disk is assumed to be the cause.
FULL_BYTES = 1 << 20

# torch's backends raise RuntimeErrors for a lost rank. A server or tracker that went away raises an OSError.
LOST_CONTACT = re.compile(r"closed by peer|reset by peer|broken pipe|\b(gloo|nccl)\b", re.IGNORECASE)


RECORDED_CHARS = 20_000
"""Largest number of characters of a completion in a fault file."""


class RunFault(RuntimeError):
    """Error of a run whose message needs no class name in front."""


@dataclass(frozen=True)
class FaultyRow:
    """Completion for which a reward raised, or did not return a finite number or None.

    Attributes:
        reward: Name of the reward.
        row: Place in this rank's generation, counted from 0.
        prompt: Last message of the prompt, or the prompt itself if it is a text.
        completion: Text of the completion.
        step: Number of optimizer steps made before, or None outside of a training.
    """

    reward: str
    row: int
    prompt: str
    completion: str
    step: int | None = None

    def as_dict(self, secrets: Iterable[str]) -> dict[str, Any]:
        """Return the entry of a fault file, with long texts cut and without the secrets."""
        entry: dict[str, Any] = asdict(self)
        for key in ("reward", "prompt", "completion"):
            # A secret that the cut would divide could not be found any more.
            entry[key] = shortened(scrubbed(entry[key], secrets), RECORDED_CHARS)
        return entry


class RewardFault(RunFault):
    """Error of a reward that raised, or did not return a finite number or None for each completion."""

    def __init__(self, message: str, row: FaultyRow | None = None) -> None:
        super().__init__(message)
        self.row = row
        """Completion that the reward could not score, or None if it is unknown."""


class NothingTrained(RunFault):
    """Error of a run that ended without an optimizer step, so that its model is unchanged."""


class NotThePolicy(RunFault):
    """Error for completions that were sampled from another distribution than the policy's."""


class NotFinite(RunFault):
    """Error for a loss, a gradient, advantages or weights that are NaN or infinite."""


@contextmanager
def no_exit() -> Iterator[None]:
    """Turn a `SystemExit` of user code inside this block into a `RunFault` that names its place.

    `sys.exit(0)` in a callback would otherwise end the run as if it had finished.
    """
    try:
        yield
    except SystemExit as error:
        # A script may end its run from a signal handler, and its launcher may read the exit code.
        handlers = [getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()]
        if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise
        # `exit()` is a function of the module `_sitebuiltins`.
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "_sitebuiltins" not in frame.filename]
        frame = frames[-1]
        place = f"{frame.filename}, line {frame.lineno}, in {frame.name}"
        raise RunFault(f"sys.exit({error.code!r}) was called in {place}: raise an exception or return there") from error


def report(
    error: Exception, folder: Path, checkpoint: Path | None, *, resumable: bool = True, secrets: Iterable[str] = ()
) -> None:
    """Print the traceback of a failed run on the rank that failed, then the same error line on every rank.

    Args:
        error: Error of this rank.
        folder: Folder of the run. Each failing rank writes its message there (`fault-rank*.json`). Where that fails, as
            on a full disk, the message is only printed.
        checkpoint: Last complete checkpoint, which the error line names.
        resumable: True if a resume could succeed. Only then does the error line tell how to resume.
        secrets: Texts removed from all that is printed and written, since the error of a service may quote its key.
    """
    rank = int(os.environ.get("RANK", "0"))
    has_lost_contact = _is_lost_contact(error)
    message = _message_of_another_rank(folder) if has_lost_contact else None
    if message is None:
        # Scrubbed before it is split into lines, because a secret may span several lines.
        trace = scrubbed("".join(traceback.format_exception(error)), secrets)
        say(trace, to_stderr=True)
        message = scrubbed(error_message(error, rank, checkpoint, resumable=resumable), secrets)
        with suppress(OSError):
            # torch and safetensors report a failed write without its reason.
            if shutil.disk_usage(folder).free < FULL_BYTES:
                message += f"; the disk of {folder} is full: make room first"
        record: dict[str, Any] = {"sentence": message, "rank": rank, "traceback": trace.splitlines(keepends=True)}
        if isinstance(error, RewardFault) and error.row is not None:
            record["row"] = error.row.as_dict(secrets)
        if not has_lost_contact:  # lost contact is not the cause that the other ranks look for
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                _write_fault_file(folder, rank, record)
    end_with_error(message)


def record_stop(message: str, folder: Path) -> None:
    """Write why a run was stopped, by a signal for example, where `report` looks for the cause of a failure."""
    with suppress(OSError):  # the message is printed too
        _write_fault_file(folder, 0, {"sentence": message, "rank": 0})


def end_with_error(message: str) -> int:
    """Print the error line that a failed run ends with, write nothing into its folder, and return the exit code."""
    with suppress(OSError):
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torch's launcher prints it at the end of its report
            content = {"message": f"error: {message}", "timestamp": int(time.time())}
            write_atomically(Path(path), json.dumps(content))
    return print_last_line(f"error: {message}", 1)


def error_message(error: Exception, rank: int, checkpoint: Path | None, *, resumable: bool = True) -> str:
    """Return one line that tells which rank failed, with which error, and, if possible, how to resume."""
    where = f"rank {rank}: " if _has_several_ranks() else ""
    if _is_lost_contact(error):
        what = (
            "another rank ended without an error of its own; it was probably killed (out of memory or a failed machine)"
        )
    elif isinstance(error, RunFault):
        what = str(error)
    else:
        what = f"{type(error).__name__}: {error}"
    if not resumable:
        rest = f"; it was to resume from {checkpoint}: remove it if it is damaged" if checkpoint else ""
    elif checkpoint:
        rest = f"; `--resume_from_checkpoint true` goes on from {checkpoint.name}"
    else:
        rest = "; no checkpoint had been saved: `--resume_from_checkpoint true` starts again"
    return where + one_line(what).rstrip(".") + rest


def is_resumable(error: Exception, *, began: bool) -> bool:
    """Return True if a resume could succeed after `error`.

    Before training began, only a lost connection is likely to be gone at the next launch.
    """
    return began or _is_lost_contact(error) or isinstance(error, (ConnectionError, TimeoutError))


def remove_fault_file(folder: Path) -> None:
    """Remove the message that this rank wrote in an earlier attempt of the same run."""
    _fault_file(folder, int(os.environ.get("RANK", "0"))).unlink(missing_ok=True)


def close_progress_bars(callbacks: Iterable[object]) -> None:
    """Close the progress bars of an interrupted run, which would otherwise be drawn again after the last line."""
    for callback in callbacks:
        for name in ("training_bar", "prediction_bar"):
            if (bar := getattr(callback, name, None)) is not None:
                bar.close()


def print_last_line(line: str, code: int) -> int:
    """Print the line that this process ends with, or leave it for the command that started it. Return `code`.

    Only the first process to end is heard: the others end as a consequence.
    """
    if path := os.environ.get(LAST_LINE_VARIABLE):
        with suppress(OSError):  # on a full disk, for example, the line is printed here instead
            with suppress(FileExistsError), Path(path).open("x", encoding="utf-8") as file:
                json.dump({"line": line, "code": code}, file)
            return code
    say(visible(line), to_stderr=True)
    return code


def read_last_line(path: Path) -> tuple[str, int] | None:
    """Return the line in the file at `path` and its exit code, or None if no process left one."""
    try:
        content = read_json(path)
    except (FileNotFoundError, UnreadableFile):
        return None
    return content["line"], content["code"]


def _has_several_ranks() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _is_lost_contact(error: Exception) -> bool:
    """Return True if a rank's error only tells that it lost another rank."""
    if not _has_several_ranks() or isinstance(error, RewardFault):
        return False
    from torch.distributed import DistError

    is_backend_error = isinstance(error, RuntimeError) and LOST_CONTACT.search(str(error)) is not None
    return is_backend_error or isinstance(error, DistError)


def _fault_file(folder: Path, rank: int) -> Path:
    return folder / f"fault-rank{rank}.json"


def _write_fault_file(folder: Path, rank: int, record: Mapping[str, Any]) -> None:
    """Write a record with the present time where the other ranks look for it."""
    write_atomically(_fault_file(folder, rank), json.dumps({**record, "time": time.time()}, indent=2) + "\n")


def _message_of_another_rank(folder: Path) -> str | None:
    """Return the message of the rank that failed first, or None if no rank wrote one."""
    deadline = time.monotonic() + MESSAGE_SECONDS
    while not (files := list(folder.glob(FAULT_FILES))) and time.monotonic() < deadline:
        time.sleep(0.1)
    messages = []
    for path in files:
        with suppress(FileNotFoundError, UnreadableFile):  # the other files may still hold the message
            match read_json(path):
                case {"sentence": str(message), "time": int(seconds) | float(seconds)}:
                    messages.append((seconds, message))
    return min(messages)[1] if messages else None
