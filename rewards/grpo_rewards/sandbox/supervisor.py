"""Supervisor of one program: a fresh interpreter that confines it, bounds it, and leaves none of its processes.

It reads one JSON request from its standard input and writes one JSON reply. It holds nothing worth stealing: the
request has the program, its input and the limits, and neither expected outputs nor the trainer's environment.

    supervisor ── init ── program ── …

The `init` process is the first of the program's PID namespace, whose end kills all others in it. Without a namespace
the supervisor adopts every orphan (a "child subreaper"), and walks through its descendants until none is left.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Any, NoReturn

from grpo_rewards.sandbox import confinement

_TICK_SECONDS = 0.1
_PIECE_BYTES = 1 << 16
_PROGRAM = "main.py"
# `exit` and `quit` come with `site`, which is not imported, so that no installed package can be.
_BOOTSTRAP = f"""\
import builtins, sys
builtins.exit = builtins.quit = sys.exit
del builtins
exec(compile(open({_PROGRAM!r}, "rb").read(), {_PROGRAM!r}, "exec"))
"""
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "HOME": ".", "TZ": "UTC"}
_OURS = 2  # the supervisor and `init`


def main() -> None:
    """Run the request, and write its reply: an outcome, or `{"error": …}` if the program could not be confined."""
    signal.signal(signal.SIGTERM, _end)
    request = json.loads(sys.stdin.buffer.read())
    try:
        reply = _supervise(request)
    except OSError as error:
        reply = {"error": str(error)}
    sys.stdout.write(json.dumps(reply))


def _end(*_: object) -> NoReturn:
    raise SystemExit("the caller ended this run")


def _supervise(request: dict[str, Any]) -> dict[str, Any]:
    caller = os.getppid()
    request["uid"] = confinement.own_uid() if os.geteuid() == 0 else None
    confinement.adopt_orphans()
    if "namespaces" in request["mechanisms"]:
        confinement.enter_namespaces()
    reports, reporting = os.pipe()
    output, writing_output = os.pipe()
    errors, writing_errors = os.pipe()
    child = os.fork()
    if child == 0:
        _run_init(request, reporting, writing_output, writing_errors)
    for descriptor in (reporting, writing_output, writing_errors):
        os.close(descriptor)
    streams = _Streams(reports, output, errors, request["limits"]["output_bytes"])
    start = time.monotonic()
    try:
        ended = streams.watch(start + request["limits"]["wall_seconds"], caller)
        wall_seconds = time.monotonic() - start
    finally:
        _kill_all(child)
    streams.read_rest()
    return {"wall_seconds": wall_seconds, **_reply(streams, ended, request["limits"]["cpu_seconds"])}


def _reply(streams: _Streams, ended: str, cpu_limit: int) -> dict[str, Any]:
    # A program that can't be confined reports its error before `init` reports its end.
    report = json.loads(streams.report.splitlines()[0]) if streams.report else {}
    if "error" in report:
        return report
    code, seconds = report.get("code", -signal.SIGKILL), report.get("cpu_seconds", 0.0)
    if ended == "exited" and code < 0:
        is_timeout = -code == signal.SIGXCPU or (-code == signal.SIGKILL and seconds >= cpu_limit)
        ended = "timeout" if is_timeout else "killed"
    texts = [base64.b64encode(text).decode() for text in (streams.output, streams.errors)]
    return {"ended": ended, "code": code, "cpu_seconds": seconds, "stdout": texts[0], "stderr": texts[1]}


class _Streams:
    """Pipes from the program, which may write without end, and from `init`, which reports how the program ended."""

    def __init__(self, reports: int, output: int, errors: int, most: int) -> None:
        self.report, self.output, self.errors = bytearray(), bytearray(), bytearray()
        self._kept = {reports: self.report, output: self.output, errors: self.errors}
        self._reports, self._most = reports, most
        self._poll = select.poll()
        for descriptor in self._kept:
            os.set_blocking(descriptor, False)
            self._poll.register(descriptor, select.POLLIN)

    def watch(self, end: float, caller: int) -> str:
        """Read until the program ends, and return how: "exited", "timeout" or "output"."""
        open_pipes = set(self._kept)
        while self._reports in open_pipes:
            left = end - time.monotonic()
            if left <= 0:
                return "timeout"
            if os.getppid() != caller:
                raise SystemExit("the caller is gone")
            for descriptor, _ in self._poll.poll(1000 * min(left, _TICK_SECONDS)):
                if not self._read(descriptor):
                    self._poll.unregister(descriptor)
                    open_pipes.discard(descriptor)
            if self._is_full():
                return "output"
        return "exited"

    def read_rest(self) -> None:
        """Read what is left in the pipes, which nobody writes to any more."""
        for descriptor in self._kept:
            while not self._is_full() and self._read(descriptor):
                pass

    def _is_full(self) -> bool:
        return len(self.output) > self._most or len(self.errors) > self._most

    def _read(self, descriptor: int) -> bool:
        """Read a piece, and return False if nothing is left."""
        try:
            piece = os.read(descriptor, _PIECE_BYTES)
        except BlockingIOError:
            return False
        self._kept[descriptor] += piece
        return bool(piece)


# --- The end of every process ---


def _kill_all(child: int) -> None:
    """Kill and reap `init` and all its descendants.

    Without a PID namespace, all descendants are stopped before any is killed: a stopped process starts no other, and
    keeps its place under the limit of processes, so that a fork bomb has no room left.
    """
    os.kill(child, signal.SIGKILL)
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        stopped: set[int] = set()
        while new := _descendants() - stopped:
            for pid in new:
                _signal(pid, signal.SIGSTOP)
            stopped |= new
        for pid in stopped:
            _signal(pid, signal.SIGKILL)
        time.sleep(0.001)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _descendants() -> set[int]:
    """Return the living processes below this one. In a PID namespace only `init` is seen."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except (OSError, ValueError):  # it ended meanwhile
                continue
            if state not in (b"Z", b"X"):
                parents[int(name)] = int(parent)
    found: set[int] = set()
    grown = {os.getpid()}
    while grown:
        grown = {pid for pid, parent in parents.items() if parent in grown and pid not in found}
        found |= grown
    return found


# --- init and the program ---


def _run_init(request: dict[str, Any], reporting: int, output: int, errors: int) -> NoReturn:
    """Prepare the file system, start the program, reap orphans, and report how the program ended."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        confinement.die_with_parent()
        mechanisms, folder, uid = request["mechanisms"], request["folder"], request["uid"]
        processes = request["limits"]["processes"]
        if uid is None:  # the limit counts the user's other processes too: in a namespace of users, ours alone
            processes += _OURS if "namespaces" in mechanisms else confinement.tasks_of(os.geteuid())
        given = _input_file(request["stdin"])
        if "namespaces" in mechanisms:
            confinement.enter_small_root(folder, request["limits"]["disk_bytes"])
            folder = "/tmp"
        _write_program(folder, request["program"], uid)
        program = os.fork()
        if program == 0:
            _confine(mechanisms, folder, uid, request["limits"], processes)
            for target, descriptor in enumerate((given, output, errors)):
                os.dup2(descriptor, target)
            os.execve(sys.executable, [sys.executable, "-B", "-s", "-S", "-c", _BOOTSTRAP], _ENVIRONMENT)
        os.close(output)
        os.close(errors)
        while True:
            pid, status, usage = os.wait4(-1, 0)
            if pid == program:
                break
        seconds = usage.ru_utime + usage.ru_stime
        _report(reporting, {"code": os.waitstatus_to_exitcode(status), "cpu_seconds": seconds})
    except BaseException as error:
        _report(reporting, {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(0)


def _report(descriptor: int, report: dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(report).encode() + b"\n")


def _input_file(text: str) -> int:
    """Return a descriptor that reads `text`, and can't write."""
    file = os.memfd_create("stdin")
    with open(file, "wb", closefd=False) as content:
        content.write(text.encode("utf-8", "surrogatepass"))
    reading = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    os.close(file)
    return reading


def _write_program(folder: str, program: str, uid: int | None) -> None:
    """Write the program into its folder, and give the folder to its user."""
    path = f"{folder}/{_PROGRAM}"
    with open(path, "wb") as file:
        file.write(program.encode("utf-8", "surrogatepass"))
    if uid is not None:
        for owned in (path, folder):
            os.chown(owned, uid, confinement.NOBODY)


def _confine(mechanisms: list[str], folder: str, uid: int | None, limits: dict[str, int], processes: int) -> None:
    """Confine this process. The order matters: each step may take away what an earlier one needed."""
    os.chdir(folder)
    if uid is not None:
        confinement.become(uid)
    if not os.access(sys.executable, os.X_OK):
        raise PermissionError(f"an unprivileged user can't read {sys.executable}: install Python outside of /root")
    if "namespaces" not in mechanisms:
        confinement.die_with_parent()
    confinement.refuse_privileges()
    if "landlock" in mechanisms:
        confinement.restrict_files(".")  # by its path, another user may not reach it
    confinement.set_limits(limits, processes)
    if "seccomp" in mechanisms:
        confinement.refuse_system_calls()


if __name__ == "__main__":
    main()
