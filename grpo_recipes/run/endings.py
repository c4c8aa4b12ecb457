"""Ends of a run: refused, stopped by a signal, interrupted or failed, each with an exit code and one last line.

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
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_recipes.process.faults import FAULT_FILES, RewardFault, RunFault, fault_file
from grpo_recipes.process.ranks import launched_rank
from grpo_recipes.process.signals import INTERRUPTED, NOTHING_DONE
from grpo_recipes.recipe.recipe import Recipe
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.files import UnreadableFile, read_json, write_atomically
from grpo_rewards.redaction import scrubbed, secret_values
from grpo_rewards.terminal import say, say_error, visible

if TYPE_CHECKING:  # `launcher` needs neither, and their imports take seconds
    from grpo_recipes.run.prepare import Prepared
    from grpo_recipes.training.trainer import GRPOTrainer

LAST_LINE_VARIABLE = "GRPO_RECIPES_LAST_LINE"
"""Name of the environment variable that holds the path of the file for the last line."""

SILENCE_SECONDS = 30.0
"""Time that the other ranks wait before they print why a recipe is refused.

All ranks usually have the same error, and the launcher ends every rank once one has failed. The first rank must be able
to print the error before that."""

# Seconds that a rank which lost its connection waits for the message of the rank that failed. The message is written
# before the connection closes, so only a network file system can delay it.
MESSAGE_SECONDS = 3.0

# If a run fails and its disk has less room than this, the full disk is assumed to be the cause.
FULL_BYTES = 1 << 20

# torch's backends raise RuntimeErrors for a lost rank. A server or tracker that went away raises an OSError.
LOST_CONTACT = re.compile(r"closed by peer|reset by peer|broken pipe|\b(gloo|nccl)\b", re.IGNORECASE)


def end_refused(error: UserError, recipe: Recipe | None) -> int:
    """Print why a recipe can't run, and return exit code 2. Ranks other than the first wait before they print."""
    if launched_rank() != 0:
        time.sleep(SILENCE_SECONDS)
    secrets = known_secrets(recipe) if recipe is not None else ()
    return print_last_line(f"error: {scrubbed(str(error), secrets)}", 2)


def end_stopped(prepared: Prepared, trainer: GRPOTrainer) -> int:
    """End a run that a signal has stopped, print how to resume it, and return the exit code."""
    trainer.accelerator.wait_for_everyone()  # the end of one rank may end its node, and interrupt the others' saves
    rest = "`--resume_from_checkpoint true` goes on from there"
    if prepared.training_args.save_only_model:
        rest = "without its optimizer (`save_only_model`), so no run can resume from there"
    by, state = prepared.interruption.name, trainer.state
    trainer.end()
    message = f"stopped by {by} after step {state.global_step} of {state.max_steps}, which is saved: {rest}"
    code = INTERRUPTED if prepared.interruption.requested == signal.SIGINT else 0
    return end_with_stop(message, code, prepared.recipe.output_dir)


def end_interrupted(prepared: Prepared | None) -> int:
    """Print what is saved of a run that Ctrl-C ended at once, and return the exit code."""
    if prepared is None or not prepared.recipe.output_dir.exists():
        return end_with_stop(f"stopped by Ctrl-C: {NOTHING_DONE}", INTERRUPTED)
    rest = "nothing is saved yet: `--resume_from_checkpoint true` starts again"
    if (last := prepared.last_checkpoint()) is not None:
        rest = f"{last} is saved: `--resume_from_checkpoint true` goes on from there"
    return end_with_stop(f"stopped by Ctrl-C: {rest}", INTERRUPTED, prepared.recipe.output_dir)


def end_with_stop(message: str, code: int, folder: Path | None = None) -> int:
    """Print why a run was stopped, on the first rank, and write it where `end_failed` looks for a cause. Return `code`.

    Args:
        message: Sentence to print.
        code: Exit code.
        folder: Folder of the run, or None if there is none yet.
    """
    if launched_rank() == 0:
        with suppress(OSError):  # the message is printed too
            if folder is not None:
                _write_fault_file(folder, {"sentence": message, "rank": 0})
        print_last_line(message, code)
    return code


def end_failed(prepared: Prepared, error: Exception) -> int:
    """Print why a run failed and from which checkpoint it can resume, and return exit code 1."""
    began = prepared.interruption.began
    checkpoint = prepared.last_checkpoint() if began else prepared.checkpoint
    return report(error, prepared.recipe.output_dir, checkpoint, began=began, secrets=known_secrets(prepared.recipe))


def report(
    error: Exception, folder: Path, checkpoint: Path | None, *, began: bool = True, secrets: Iterable[str] = ()
) -> int:
    """Print the traceback of a failed run on the rank that failed, then the same error line on every rank.

    Args:
        error: Error of this rank.
        folder: Folder of the run. Each failing rank writes its message there (`fault-rank*.json`). Where that fails, as
            on a full disk, the message is only printed.
        checkpoint: Last complete checkpoint, which the error line names.
        began: True if the training had begun. Before that, only a lost connection is likely to be gone at the next
            launch, so that the error line recommends no resume after another error.
        secrets: Texts removed from all that is printed and written, since the error of a service may quote its key.

    Returns:
        Exit code 1.
    """
    has_lost_contact = _is_lost_contact(error)
    message = _message_of_another_rank(folder) if has_lost_contact else None
    if message is None:
        # Scrubbed before it is split into lines, because a secret may span several lines.
        trace = scrubbed("".join(traceback.format_exception(error)), secrets)
        say(trace, to_stderr=True)
        resumable = began or has_lost_contact or isinstance(error, (ConnectionError, TimeoutError))
        message = scrubbed(error_message(error, checkpoint, resumable=resumable), secrets)
        with suppress(OSError):
            # torch and safetensors report a failed write without its reason.
            if shutil.disk_usage(folder).free < FULL_BYTES:
                message += f"; the disk of {folder} is full: make room first"
        record: dict[str, Any] = {"sentence": message, "rank": launched_rank(), "traceback": trace.splitlines(True)}
        if isinstance(error, RewardFault) and error.row is not None:
            record["row"] = error.row.as_dict(secrets)
        if not has_lost_contact:  # lost contact is not the cause that the other ranks look for
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                _write_fault_file(folder, record)
    return end_with_error(message)


def end_with_error(message: str) -> int:
    """Print the error line that a failed run ends with, write nothing into its folder, and return exit code 1."""
    with suppress(OSError):
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torch's launcher prints it at the end of its report
            write_atomically(Path(path), json.dumps({"message": f"error: {message}", "timestamp": int(time.time())}))
    return print_last_line(f"error: {message}", 1)


def error_message(error: Exception, checkpoint: Path | None, *, resumable: bool = True) -> str:
    """Return one line that tells which rank failed, with which error, and, if possible, how to resume."""
    where = f"rank {launched_rank()}: " if _has_several_ranks() else ""
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


def known_secrets(recipe: Recipe) -> set[str]:
    """Return the secrets in the recipe, and those in the environment, from which a reward may read its key."""
    # A shell's variables of folders have names that look like those of passwords.
    environment = {name: value for name, value in os.environ.items() if name not in ("PWD", "OLDPWD")}
    return secret_values(recipe.as_dict()) | secret_values(environment)


def attempt(recipe: Recipe, loss: str, function: Callable[..., Any], *args: Any) -> None:
    """Call `function`, and turn an error into a warning that says what the run in `output_dir` now lacks."""
    try:
        function(*args)
    except Exception as error:  # an error of the hub, a tracker, a disk or our own: none of them undoes the run
        reason = scrubbed(one_line(f"{type(error).__name__}: {error}"), known_secrets(recipe))
        say_error(f"{recipe.output_dir}: {loss} ({reason})", kind="warning")


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


def leave(code: int) -> None:
    """End this process. One of several ranks skips the interpreter's teardown, in which gloo's threads may abort."""
    if not _has_several_ranks():
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _has_several_ranks() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _is_lost_contact(error: Exception) -> bool:
    """Return True if a rank's error only tells that it lost another rank."""
    if not _has_several_ranks() or isinstance(error, RewardFault):
        return False
    from torch.distributed import DistError

    is_backend_error = isinstance(error, RuntimeError) and LOST_CONTACT.search(str(error)) is not None
    return is_backend_error or isinstance(error, DistError)


def _write_fault_file(folder: Path, record: Mapping[str, Any]) -> None:
    """Write a record with the present time where the other ranks look for it."""
    write_atomically(fault_file(folder), json.dumps({**record, "time": time.time()}, indent=2) + "\n")


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
