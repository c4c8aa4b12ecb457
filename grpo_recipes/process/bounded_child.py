"""Call of a function in a forked child process, with limits on time and memory.

The limits also stop work that neither a signal nor an exception can stop, such as a tokenizer's regular expression,
which runs in native code and holds the interpreter. A fork starts in milliseconds with all modules of its parent, while
a fresh interpreter would import transformers for more than a second. The child has one thread, so the function must not
use what other threads of the parent may hold during the fork: no GPU, no process group, no thread pool. POSIX only.
"""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from grpo_rewards.errors import UserError, one_line, shortened
from grpo_rewards.limits import limit_cpu, limit_memory

Announce = Callable[[str], None]
"""Function that announces the stage a bounded call begins. The error of a stopped call names it."""

_ERROR_CHARACTERS = 200


@dataclass(frozen=True)
class Limits:
    """Limits of one call: seconds of computing, seconds on the clock, and bytes on top of the parent's memory."""

    cpu_seconds: float
    wall_seconds: float
    memory_bytes: int


class CallStopped(Exception):
    """Error of a bounded call that failed or was stopped. The function may raise it too, with an empty stage.

    Attributes:
        stage: Last stage that the call announced, or "" before the first.
        reason: Clause that follows the name of the stage, such as "takes more than 10 s".
    """

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(f"{stage} {reason}".strip())
        self.stage, self.reason = stage, reason


def bounded_call(function: Callable[[Announce], Any], limits: Limits) -> Any:
    """Return the result of `function`, called in a child process that is gone afterwards.

    Args:
        function: Function whose result can be written as JSON.
        limits: Limits of the child.

    Raises:
        CallStopped: The function raised, reached a limit, or its process ended.
        UserError: No process can be started.
    """
    receiving, sending = Pipe(duplex=False)
    try:
        # Python 3.12 warns about a fork beside other threads. The head of this file tells what the function must not
        # use.
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            pid = os.fork()
    except OSError as error:
        receiving.close()
        sending.close()
        raise UserError(f"no process can be started ({error.strerror}): end some, or free memory") from error
    if pid == 0:
        receiving.close()
        _run_child(function, limits, sending)
    sending.close()
    try:
        stage, kind, content = _answer(receiving, time.monotonic() + limits.wall_seconds)
    finally:  # Ctrl-C must not leave a child behind
        receiving.close()
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if kind == "value":
        return content
    if kind == "late":
        content = f"takes more than {limits.wall_seconds:g} s"
    elif kind == "ended":
        content = _reason_of_end(status, limits)
    raise CallStopped(stage, content)


def _answer(receiving: Connection, end: float) -> tuple[str, str, Any]:
    """Return the last stage of a child, and kind and content of its last message.

    The kind is "value", "failure", "late" for no answer until `end` (monotonic seconds), or "ended" for none at all.
    """
    stage = ""
    try:
        while receiving.poll(max(0.0, end - time.monotonic())):
            kind, content = json.loads(receiving.recv_bytes())
            if kind != "stage":
                return stage, kind, content
            stage = content
    except (EOFError, OSError):  # the latter if the child was killed inside a message
        return stage, "ended", None
    return stage, "late", None


def _reason_of_end(status: int, limits: Limits) -> str:
    """Return why a child ended without an answer, from its exit status."""
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    if ended_by == signal.SIGXCPU:
        return f"takes more than {limits.cpu_seconds:g} s"
    how = signal.Signals(ended_by).name if ended_by is not None else f"code {os.waitstatus_to_exitcode(status)}"
    return f"ends its process ({how}), as for want of memory"


def _run_child(function: Callable[[Announce], Any], limits: Limits, sending: Connection) -> None:
    """Call the function, write its stages and its value, and end the process."""

    def write(kind: str, value: Any) -> None:
        sending.send_bytes(json.dumps([kind, value]).encode())  # no pickle, which a child could abuse

    try:
        _detach()
        limit_cpu(limits.cpu_seconds)  # this also ends a child whose parent was killed
        limit_memory(limits.memory_bytes)
        write("value", function(lambda stage: write("stage", stage)))
    except CallStopped as stopped:
        write("failure", stopped.reason)
    except MemoryError:
        write("failure", f"needs more than {limits.memory_bytes / 2**30:.2g} GiB of memory")
    except BaseException as error:  # the panic of a native library is not an Exception
        reason = shortened(f"{type(error).__name__}: {one_line(error)}", _ERROR_CHARACTERS)
        write("failure", f"fails ({reason})")
    finally:
        os._exit(0)


def _detach() -> None:
    """Silence a child, leave Ctrl-C to its parent, and disable memory dumps for the case that a limit ends it."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
