"""`accelerate launch` whose launcher and ranks are forks of one process that has imported torch, transformers and TRL.

A launch on two ranks starts three interpreters, and the imports of each take longer than it trains tiny steps. The fork
server of multiprocessing imports once for all launches of a test process. Arguments, environment, accelerate's
launcher, torch's agent and signals are those of the command.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

IMPORTED = ["accelerate.commands.launch", "torch.distributed.run", "tests.support.imported"]


def context() -> multiprocessing.context.ForkServerContext:
    """Where processes are forked, with everything imported."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(IMPORTED)
    return server


class Launch:
    """As `subprocess.Popen` of `accelerate launch`, stderr merged into stdout."""

    def __init__(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]):
        """`arguments` follow `accelerate launch`; `folder` is where it is started."""
        server = context()
        self._said, writing = server.Pipe(duplex=False)
        self._process = server.Process(target=_launch, args=(list(arguments), folder, dict(environment), writing))
        self._process.start()
        writing.close()
        self._read = bytearray()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, negative that of a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, None]:
        """Return the output of all processes once the last has ended.

        Raises:
            subprocess.TimeoutExpired: After `timeout` seconds.
        """
        end = time.monotonic() + timeout
        while True:
            if not self._said.poll(max(0.0, end - time.monotonic())):
                raise subprocess.TimeoutExpired("accelerate launch", timeout, bytes(self._read))
            piece = os.read(self._said.fileno(), 1 << 16)
            if not piece:
                break
            self._read += piece
        self._process.join(max(0.0, end - time.monotonic()))
        return self._read.decode(errors="replace"), None


class Fork:
    """As `subprocess.Popen` of `python -m MODULE ...`, in a fork of this process."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], start_new_session: bool = False):
        self.args = args
        self.returncode: int | None = None
        _, _, (module, *arguments) = _partition(list(args), "-m")
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(module, arguments, env, start_new_session)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int | None:
        if timeout is None:
            return self._wait(0)
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(list(self.args), timeout)
            time.sleep(0.01)
        return self.returncode

    def _wait(self, how: int) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, how)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _partition(words: list[str], word: str) -> tuple[list[str], str, list[str]]:
    place = words.index(word)
    return words[:place], word, words[place + 1 :]


def _launch(arguments: list[str], folder: Path, environment: dict[str, str], said: Any) -> None:
    """Run the launcher's process, whose children are forks, whichever of accelerate's launchers starts them."""
    for descriptor in (1, 2):
        os.dup2(said.fileno(), descriptor)
    said.close()
    sys.stdout.reconfigure(write_through=True)  # as under `python -u`: the order in the pipe is that of the writing
    os.chdir(folder)
    _take(environment)
    from accelerate.commands import launch
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    launch.subprocess = SimpleNamespace(Popen=Fork, CalledProcessError=subprocess.CalledProcessError)
    SubprocessHandler._popen = lambda self, args, env: Fork(args, env, start_new_session=True)
    launch.launch_command(launch.launch_command_parser().parse_args(arguments))


def _take(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _become(module: str, arguments: list[str], environment: Mapping[str, str], own_session: bool) -> NoReturn:
    """Run a module as `python -m` does, and end the process; nothing of the launcher's own is left but its imports."""
    code = 1
    try:
        if own_session:
            os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        _take(environment)
        from datasets import fingerprint

        fingerprint.fingerprint_rng.seed()  # names of cache files, which no two processes may share
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
