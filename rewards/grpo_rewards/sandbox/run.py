r"""Runs of untrusted Python programs: each in processes of its own, with limits, and without a trace.

    outcome = run("print(int(input()) + 1)", "41")
    outcome.stdout  # b"42\n"

Every run starts a supervisor (`supervisor`), which confines the program with what the system offers: `mechanisms`
names it. docs/security.md lists what that does not protect from.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from grpo_rewards.errors import UserError, one_line, shortened

MECHANISMS = ("namespaces", "landlock", "seccomp")
"""Mechanisms that a system may lack. Resource limits and, as root, an unprivileged user are always in force."""

_GRACE_SECONDS = 20.0
# As a package without its `__init__`, which imports all rewards and takes ten times as long as the rest.
_START = """\
import sys, types
package = sys.modules["grpo_rewards"] = types.ModuleType("grpo_rewards")
package.__path__ = [{folder!r}]
from grpo_rewards.sandbox import supervisor
supervisor.main()
"""


@dataclass(frozen=True)
class Limits:
    """Limits of one run.

    Attributes:
        cpu_seconds: Seconds of computing, for each process.
        wall_seconds: Seconds on the clock, for the whole run.
        memory_bytes: Bytes of address space, for each process. An interpreter takes about 30 MB of them.
        processes: Number of processes and threads.
        output_bytes: Bytes of standard output, and of standard error.
        disk_bytes: Bytes of one file; in namespaces, of all files together.
    """

    cpu_seconds: int = 5
    wall_seconds: float = 10.0
    memory_bytes: int = 512 * 2**20
    processes: int = 8
    output_bytes: int = 2**20
    disk_bytes: int = 16 * 2**20


@dataclass(frozen=True)
class Outcome:
    """End of a program and its output.

    Attributes:
        ended: "exited"; "killed" by a signal; "timeout" after its seconds; "output" after too much of it.
        code: Exit code, or the negative number of the signal.
        cpu_seconds: Seconds that the program computed.
        wall_seconds: Seconds on the clock that the program took, without those in which its supervisor started.
        stdout: Standard output, at most `Limits.output_bytes`.
        stderr: Standard error, at most as many.
    """

    ended: Literal["exited", "killed", "timeout", "output"]
    code: int
    cpu_seconds: float
    wall_seconds: float
    stdout: bytes
    stderr: bytes


class SandboxError(RuntimeError):
    """Failure of the sandbox itself, not of the program."""


def run(
    program: str, stdin: str = "", limits: Limits | None = None, mechanisms: Sequence[str] | None = None
) -> Outcome:
    """Return the outcome of a Python program. None of its processes and files is left.

    It has the standard library, an empty folder and an environment that names nothing of this machine.

    Args:
        program: source of the program.
        stdin: text of its standard input.
        limits: limits of the run.
        mechanisms: names in `MECHANISMS` to confine it with; None for all that the system offers.

    Raises:
        SandboxError: the program could not be started, or not with these mechanisms.
        UserError: this system can't run programs in a sandbox.
    """
    mechanisms = active_mechanisms() if mechanisms is None else mechanisms
    limits = limits or Limits()
    folder = tempfile.mkdtemp(prefix="grpo-sandbox-")
    try:
        request = {"program": program, "stdin": stdin, "folder": folder, "mechanisms": list(mechanisms)}
        request_text = json.dumps({**request, "limits": asdict(limits)})
        reply = _ask_supervisor(request_text, limits.wall_seconds + _GRACE_SECONDS)
    finally:
        _remove(folder)
    if "error" in reply:
        raise SandboxError(f"the sandbox can't start a program ({shortened(one_line(reply['error']), 200)})")
    for stream in ("stdout", "stderr"):
        reply[stream] = base64.b64decode(reply[stream])[: limits.output_bytes]
    return Outcome(**reply)


def _ask_supervisor(request: str, seconds: float) -> dict[str, Any]:
    """Return the reply of a supervisor, whose environment is empty: it inherits no secret that it could pass on."""
    start = _START.format(folder=str(Path(__file__).resolve().parents[1]))
    process = subprocess.Popen(
        [interpreter(), "-I", "-S", "-B", "-c", start],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        cwd="/",
        start_new_session=True,  # Ctrl-C is for the trainer
    )
    try:
        output, errors = process.communicate(request.encode(), timeout=seconds)
    except BaseException as error:
        process.terminate()  # it then kills the program
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise SandboxError(f"the sandbox did not end a program within {seconds:g} s") from error
        raise
    try:
        return json.loads(output)
    except ValueError as error:
        reason = shortened(one_line(errors.decode(errors="replace"))[-200:], 200)
        raise SandboxError(f"the sandbox ended without a reply ({reason or process.returncode})") from error


def _remove(folder: str) -> None:
    """Remove the folder of a run, in time linear in its entries.

    A program can nest folders so deep that a recursion fails, and `rm -rf` takes minutes. Inner folders are therefore
    moved up, next to the outermost ones, before their parent is removed.
    """
    mark, moved = secrets.token_hex(), 0
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry)
                continue
            os.chmod(entry, 0o700)
            for inner in list(os.scandir(entry)):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner, 0o700)  # its entry `..` changes
                    os.rename(inner, f"{folder}/{mark}-{moved}")
                    moved += 1
                else:
                    os.unlink(inner)
            os.rmdir(entry)
    os.rmdir(folder)


def interpreter() -> str:
    """Return the path of this Python outside of any virtual environment: a program gets no packages."""
    return os.path.realpath(sys.executable)


@cache
def active_mechanisms() -> tuple[str, ...]:
    """Return the mechanisms that work on this system, each tried on a program that prints a number.

    Raises:
        UserError: the system is not Linux, or runs no program at all.
    """
    if sys.platform != "linux":
        problem = f"they run on Linux only, and this is {platform.system()}"
        raise UserError("programs of a model", problem, "use a container or a machine with Linux")
    active: list[str] = []
    for name in MECHANISMS:
        if name == "landlock" and "namespaces" in active:
            continue  # in its own root, a program has no file to be kept from
        if _failure([*active, name]) is None:
            active.append(name)
    if reason := _failure(active):
        raise UserError("programs of a model", f"none can be run here ({reason})", "use another machine")
    return tuple(active)


def _failure(mechanisms: Sequence[str]) -> str | None:
    """Return the reason why a trivial program does not run, or None if it does."""
    try:
        outcome = run("print(6 * 7)", mechanisms=mechanisms)
    except SandboxError as error:
        return str(error)
    if outcome.stdout == b"42\n":
        return None
    message = one_line(outcome.stderr.decode(errors="replace"))[-200:]
    return f"`{interpreter()}` ends with code {outcome.code}: {message}"


def described_isolation() -> str:
    """Return the isolation that is active here, in a few words."""
    parts = [*active_mechanisms(), "resource limits"]
    if os.geteuid() == 0:
        parts.append("an unprivileged user")
    return ", ".join(parts)
