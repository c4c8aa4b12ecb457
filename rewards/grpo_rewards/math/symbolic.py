"""math-verify with a hard deadline and a memory limit, callable from any thread of any process.

math-verify limits its time with SIGALRM, which works in the main thread only and clears the caller's own timer. Here a
server process (`python -m grpo_rewards.math.symbolic`) imports math-verify once and forks a child to compare. A child
past its deadline is killed, and the next child starts from the same warm state. The server inherits nothing from the
trainer: it is a fresh interpreter that reads and writes JSON lines over pipes. Every process has its own server,
started on first use, restarted when it dies, and ended with its process.

A verdict must never reach a different comparison. Requests and replies are numbered, and anything that interrupts a
caller between the two (Ctrl-C, an alarm of its own) ends the server together with the reply that is still in its pipe.

No lock guards the server. Python may raise a signal handler's exception between taking a lock and the block under it
(3.14 does), and the lock would stay taken. Threads pass the connection to the server through a queue instead. If an
interrupted thread has lost the connection, the next comparison opens another.

POSIX only: the server needs `fork`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import IO, Any

from grpo_rewards.limits import limit_cpu, limit_memory, readable
from grpo_rewards.math.exact import contradicts

MEMORY_BYTES = 160 * 2**20
"""Number of bytes that a child may allocate on top of the imported libraries. Its caches count."""

COMPARISONS_PER_CHILD = 500
"""Number of comparisons after which a child is replaced, because its caches grow towards the memory limit."""

STARTUP_SECONDS = 120.0
"""Seconds that the server has to import math-verify."""

_GRACE_SECONDS = 1.0

_POLL_SECONDS = 0.1
"""Interval at which a waiting thread checks if any thread still uses the connection."""

_NO_START = "the symbolic comparison server did not start: `python -m grpo_rewards.math.symbolic` shows why."


def equivalent(gold: str, answer: str, deadline: float = 2.0) -> bool | None:
    """Return True if two answers are equal by math-verify, or None if it ran out of time or memory.

    Args:
        gold: gold answer, LaTeX or plain text, without math delimiters.
        answer: answer to compare with the gold. math-verify is not symmetric.
        deadline: seconds for the comparison. Starting the server (about a second) counts, but for at most half of them.

    Raises:
        RuntimeError: the server can't be started, for example because math-verify is not installed.
    """
    return _server().compare(gold, answer, deadline)


def shut_down() -> None:
    """End this process's server if it runs. The next comparison starts another."""
    _server().close()


_servers: dict[int, SymbolicServer] = {}


def _server() -> SymbolicServer:
    """Return this process's server. One inherited through a fork is the parent's, and its pipe must not be shared."""
    pid = os.getpid()
    for other in list(_servers):
        # With a default: another thread may have removed the entry meanwhile.
        if other != pid and (inherited := _servers.pop(other, None)) is not None:
            inherited.abandon()
    if pid not in _servers:
        atexit.register(_servers.setdefault(pid, SymbolicServer()).close)
    return _servers[pid]


class _ServerDied(Exception):
    """End of the server, or output of it that is not a reply."""


class SymbolicServer:
    """Client of one server process. Threads take turns.

    Args:
        command: command of the server, which must answer as `serve` does; None for this module.
    """

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self._command = command
        self._owner = os.getpid()
        self._connection = _Connection(command)
        self._free = SimpleQueue[_Connection]()
        self._free.put(self._connection)
        self._users: set[threading.Thread] = set()
        """Threads that use the connection, and those that were interrupted in it."""
        self._turns_ended = 0

    @property
    def pid(self) -> int | None:
        """Process ID of the server, or None before its first use."""
        return self._connection.pid

    def compare(self, gold: str, answer: str, deadline: float) -> bool | None:
        """Return the verdict of one comparison; see `equivalent`. A server that died is replaced.

        Raises:
            RuntimeError: the server can't be started.
        """
        connection = self._take_turn(deadline + _GRACE_SECONDS)
        try:
            verdict = connection.compared(gold, answer, deadline)
        except BaseException:  # an interrupt between request and reply leaves the reply in the pipe
            connection.stop()
            self._end_turn(connection)
            raise
        self._end_turn(connection)
        return verdict

    def close(self) -> None:
        """End the server and reap it. In a fork of the process that started it, do nothing.

        A server that another thread uses for longer than a second ends after the comparison of that thread.
        """
        if os.getpid() == self._owner:
            connection = self._take_turn(_GRACE_SECONDS)
            connection.stop(patience=1.0)
            self._end_turn(connection)

    def abandon(self) -> None:
        """Forget a server that belongs to the parent process, without ending it."""
        self._connection.abandon()

    def _take_turn(self, seconds: float) -> _Connection:
        """Return the connection once no other thread uses it, or another if it is lost or no turn ends in `seconds`.

        It is lost if a thread was interrupted while it took the connection or gave it back.
        """
        own = threading.current_thread()
        ended, limit = self._turns_ended, time.monotonic() + seconds
        while True:
            try:
                connection = self._free.get(timeout=_POLL_SECONDS)
            except Empty:
                if any(thread is not own and thread.is_alive() for thread in self._users.copy()):
                    if self._turns_ended != ended:
                        ended, limit = self._turns_ended, time.monotonic() + seconds
                    if time.monotonic() < limit:
                        continue
                connection = self._connection = _Connection(self._command)
            self._users.add(own)
            return connection

    def _end_turn(self, connection: _Connection) -> None:
        if connection is self._connection:
            self._free.put(connection)
        else:  # it was replaced meanwhile
            connection.stop()
        self._turns_ended += 1
        self._users.discard(threading.current_thread())


class _Connection:
    """One server process at a time, with its pipes and the number of its last request. One thread uses it at a time.

    A connection without references closes its pipes, and the server then ends itself.
    """

    def __init__(self, command: Sequence[str] | None) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = 0

    @property
    def pid(self) -> int | None:
        """Process ID of the server, or None before it is started."""
        process = self._process
        return None if process is None else process.pid

    def compared(self, gold: str, answer: str, deadline: float) -> bool | None:
        """Return the verdict, or None at the deadline, or if two servers died of this comparison."""
        # A server that died since the last comparison did not die of this one, and is not counted.
        attempts = 2 if self._process is None else 3
        for attempt in range(1, attempts + 1):
            start = time.monotonic()
            try:
                process = self._started()
            except _ServerDied as error:
                if attempt == attempts:
                    raise RuntimeError(_NO_START) from error
                self.stop()
                continue
            seconds = max(deadline - (time.monotonic() - start), deadline / 2)
            try:
                return self._answered(process, {"gold": gold, "answer": answer, "seconds": seconds})
            except _ServerDied:
                self.stop()
            except TimeoutError:
                self.stop()
                return None
        return None

    def _answered(self, process: subprocess.Popen[bytes], request: dict[str, Any]) -> bool | None:
        """Send a request and return the reply with its number. Raises `_ServerDied`, or TimeoutError."""
        self._asked += 1
        end = time.monotonic() + request["seconds"] + _GRACE_SECONDS
        try:
            rest = memoryview(json.dumps({"number": self._asked, **request}).encode() + b"\n")
            while rest:  # a signal whose handler returns may cut a write short
                rest = rest[_pipe(process.stdin).write(rest) :]
            while True:
                number, verdict = json.loads(_read_line(process, end - time.monotonic()))
                if number == self._asked:
                    return verdict
        except (BrokenPipeError, EOFError, ValueError, TypeError) as error:  # a reply cut off in its middle is not JSON
            raise _ServerDied from error

    def _started(self) -> subprocess.Popen[bytes]:
        """Return the running server, started if necessary. Raises `_ServerDied` if it ends while starting."""
        if self._process is None:
            # A session of its own: Ctrl-C is for the trainer, which then closes the pipe.
            self._process = subprocess.Popen(
                self._command or [sys.executable, "-m", "grpo_rewards.math.symbolic"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            try:
                _read_line(self._process, STARTUP_SECONDS)
            except EOFError as error:
                raise _ServerDied from error
            except TimeoutError as error:
                raise RuntimeError(_NO_START) from error
        return self._process

    def stop(self, patience: float = 0.0) -> None:
        """End the server and reap it. It has `patience` seconds to end by itself once its pipes are closed."""
        process, self._process = self._process, None
        if process is not None:
            _close_pipes(process)  # an idle server then ends its child and itself
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
            process.kill()
            process.wait()

    def abandon(self) -> None:
        """Forget a server that belongs to the parent process, without ending it."""
        process, self._process = self._process, None
        if process is not None:
            _close_pipes(process)
            process.returncode = 0  # not our child: nothing to wait for


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            _pipe(pipe).close()


def _read_line(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Read one line of the server's output, or raise TimeoutError, or EOFError if it ended."""
    output = _pipe(process.stdout)
    if not readable(output.fileno(), seconds):
        raise TimeoutError
    line = output.readline()  # whole: the server writes a few bytes at once, which a pipe never splits
    if not line:
        raise EOFError
    return line


_WARM_UP = (("x+1", "1+x"), (r"\sqrt{8}", r"2\sqrt{2}"), ("(1,2)", "(1,3)"), (r"\frac{\sqrt{3}}{2}", r"\frac{1}{3}"))


def serve() -> None:
    """Answer comparisons on stdin until it closes: one JSON line in, one JSON line out, `[number, true|false|null]`.

    The first line has the number 0: the server is ready.
    """
    for warm in _WARM_UP:  # math-verify builds its tables on first use: build them once, before any fork
        verify(*warm)
    _reply(1, [0, True])
    child = None
    for request in sys.stdin.buffer:
        number = json.loads(request)["number"]
        verdict, child = _compare_in_child(request, child)
        _reply(1, [number, verdict])
    if child is not None:
        child.kill()


def _compare_in_child(request: bytes, child: Child | None) -> tuple[bool | None, Child | None]:
    """Return a verdict and the child to use next, or None. A child that fails after some use is replaced once.

    Its failure may be due to earlier comparisons: their caches fill its memory.
    """
    end = time.monotonic() + 0.95 * json.loads(request)["seconds"]  # the rest is for the reply
    if child is not None and child.compared >= COMPARISONS_PER_CHILD:
        child.kill()
        child = None
    while True:
        child = child or Child()
        verdict = child.compare(request, end)
        if verdict is not None:
            return verdict, child
        child.kill()
        if child.compared == 1 or time.monotonic() >= end:
            return None, None
        child = None


def verify(gold: str, answer: str) -> bool:
    r"""Return True if two answers are equal by math-verify and `exact`, as contents of a `\boxed{}`, in any time."""
    from math_verify import LatexExtractionConfig, parse
    from math_verify import verify as math_verify

    standard = LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)
    # Units are compared before. A letter that is left is one of the formula: the h of a volume is not an hour.
    normalization = replace(standard.normalization_config, units=False)
    boxed = [replace(standard, normalization_config=normalization)]
    sides = []
    for side in (gold, answer):
        text = f"\\boxed{{{side}}}"
        sides.append(parse(text, extraction_config=boxed, extraction_mode="first_match", parsing_timeout=None))
    if not math_verify(*sides, float_rounding=15, timeout_seconds=None):
        return False
    return gold == answer or not contradicts(sides[0][0], sides[1][0])


class Child:
    """Forked child, as the server sees it."""

    def __init__(self) -> None:
        requests, self._requests = os.pipe()
        self._verdicts, verdicts = os.pipe()
        self.compared = 0
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._requests)
            os.close(self._verdicts)
            _run_child(requests, verdicts)
        os.close(requests)
        os.close(verdicts)

    def compare(self, request: bytes, end: float) -> bool | None:
        """Return the verdict, or None if there is none by `end` (monotonic seconds) or the child died."""
        self.compared += 1
        with contextlib.suppress(BrokenPipeError):
            os.write(self._requests, request)
        verdict = os.read(self._verdicts, 16) if readable(self._verdicts, end - time.monotonic()) else b""
        return json.loads(verdict) if verdict else None

    def kill(self) -> None:
        """End the child and reap it."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._requests)
        os.close(self._verdicts)


def _run_child(requests: int, verdicts: int) -> None:
    """Answer requests until the pipe closes. Exit without a verdict when out of memory."""
    try:
        # The pipes to the trainer must close with the server, even while a child runs on.
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        limit_memory(MEMORY_BYTES)
        with open(requests, "rb") as lines:
            for request in map(json.loads, lines):
                # If the server is killed during a comparison, nothing else ends its child.
                limit_cpu(request["seconds"])
                try:
                    verdict = verify(request["gold"], request["answer"])
                except MemoryError:
                    raise
                except Exception:  # the parser may raise any; then the answers were not shown to be equal
                    verdict = False
                _reply(verdicts, verdict)
    finally:
        os._exit(0)


def _reply(descriptor: int, reply: Any) -> None:
    os.write(descriptor, json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    import logging

    logging.disable()
    serve()
