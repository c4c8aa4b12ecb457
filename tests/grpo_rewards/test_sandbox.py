"""Programs that try to harm the machine, under each isolation that it offers: each is bounded, and leaves nothing.

While a program runs, this process adopts all orphans. A process that outlived its run would then be a child of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from grpo_rewards.errors import UserError
from grpo_rewards.sandbox import run as sandbox
from grpo_rewards.sandbox.run import Limits, Outcome, SandboxError, run
from tests.support.grids import only

ISOLATIONS: dict[str, tuple[str, ...]] = {
    "namespaces": ("namespaces", "seccomp"),
    "landlock": ("landlock", "seccomp"),
    "limits": (),
}
SMALL = Limits(cpu_seconds=1, wall_seconds=10, memory_bytes=256 * 2**20, output_bytes=2**16, disk_bytes=2**20)
# Python of the system, for isolations that an interpreter in root's home can't be used with.
SYSTEM_PYTHON = "/usr/bin/python3"
_SUBREAPER = 36


@pytest.fixture
def no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if the test leaves a process or a file."""
    folders = tmp_path / "folders"
    folders.mkdir(mode=0o755)
    os.chmod(tmp_path, 0o755)
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(folders))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    libc = ctypes.CDLL(None)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
        assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
        assert list(folders.iterdir()) == []
    finally:
        libc.prctl(_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture(params=only(["namespaces"], ISOLATIONS))
def isolation(request: pytest.FixtureRequest, no_trace: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of an isolation that works here, for `hostile`."""
    usable(request.param, monkeypatch)
    return request.param


def usable(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip unless an isolation works here, perhaps with the system's Python."""
    if sys.platform != "linux":
        pytest.skip("the sandbox needs Linux")
    reason = sandbox._failure(ISOLATIONS[isolation])
    if reason and "install Python outside of" in reason and os.path.exists(SYSTEM_PYTHON):
        monkeypatch.setattr(sandbox, "interpreter", lambda: os.path.realpath(SYSTEM_PYTHON))
        reason = sandbox._failure(ISOLATIONS[isolation])
    if reason:
        pytest.skip(f"{isolation} is missing here: {reason}")


def hostile(program: str, isolation: str, stdin: str = "", limits: Limits = SMALL) -> Outcome:
    return run(textwrap.dedent(program), stdin, limits, ISOLATIONS[isolation])


def test_a_program_reads_its_input_and_prints(isolation: str) -> None:
    text = "x" * 300_000  # more than a pipe holds
    outcome = hostile("import sys; print(len(input())); sys.stderr.write('done')", isolation, text)
    assert (outcome.ended, outcome.code, outcome.stdout, outcome.stderr) == ("exited", 0, b"300000\n", b"done")


@pytest.mark.parametrize("isolation", only(["namespaces"], ISOLATIONS), indirect=True)
@pytest.mark.parametrize(
    ("program", "ended", "code"),
    [
        ("exit(3)", "exited", 3),
        ("import os; os._exit(0)", "exited", 0),
        ("import os; os.abort()", "killed", -signal.SIGABRT),
        ("import os; os.kill(os.getpid(), 9)", "killed", -signal.SIGKILL),
        ("x = '\0'", "exited", 1),
        ("'\ud800'", "exited", 1),
        ("x = bytearray(10 * 2**30)", "exited", 1),
        ("open('big', 'wb').write(bytes(2**24))", "exited", 1),
        pytest.param("while True: pass", "timeout", None, marks=pytest.mark.slow),
        ("while True: print('x' * 1000)", "output", None),
        ("import os\nwhile True: os.write(2, b'x' * 1000)", "output", None),
        pytest.param("def f(): f()\nimport sys; sys.setrecursionlimit(10**9); f()", None, None, marks=pytest.mark.slow),
    ],
    ids=lambda value: value[:24].replace("\n", " ") if isinstance(value, str) else None,
)
def test_every_end_is_told_apart(program: str, ended: str | None, code: int | None, isolation: str) -> None:
    outcome = hostile(program, isolation)
    assert ended in (None, outcome.ended)
    assert code in (None, outcome.code)
    assert len(outcome.stdout) <= SMALL.output_bytes
    assert len(outcome.stderr) <= SMALL.output_bytes


def test_sleep_counts(isolation: str) -> None:
    outcome = hostile("import time; time.sleep(60)", isolation, limits=replace(SMALL, wall_seconds=1))
    assert (outcome.ended, outcome.cpu_seconds < 1) == ("timeout", True)
    assert outcome.wall_seconds >= 1


FORKS = {
    "fork bomb": "while True:\n  try: os.fork()\n  except OSError: pass",
    "bomb of sessions": "while True:\n  try:\n    if not os.fork(): os.setsid()\n  except OSError: pass",
    "daemon": "if not os.fork():\n  os.setsid()\n  if not os.fork(): time.sleep(1000)",
    "daemon without pipes": "if not os.fork():\n  os.setsid(); os.closerange(0, 64); time.sleep(1000)",
    "deaf daemon": "for n in (1, 2, 15, 24): signal.signal(n, signal.SIG_IGN)\nif not os.fork():\n  while True: pass",
    "orphans that fork": "while True:\n  try:\n    if os.fork(): os._exit(0)\n  except OSError: pass",
    "threads": "import threading\nfor n in range(100000): threading.Thread(target=time.sleep, args=(1000,)).start()",
}


QUICK_FORKS = ("deaf daemon",)


@pytest.mark.parametrize(
    "program", [name if name in QUICK_FORKS else pytest.param(name, marks=pytest.mark.slow) for name in FORKS]
)
def test_no_process_outlives_its_run(program: str, isolation: str) -> None:
    outcome = hostile("import os, signal, time\n" + FORKS[program], isolation, limits=replace(SMALL, wall_seconds=1.5))
    assert outcome.ended in ("exited", "timeout", "killed", "output")


def test_the_number_of_processes_is_limited(isolation: str) -> None:
    program = """
        import os, time
        started = 0
        try:
            for number in range(100):
                if not os.fork(): time.sleep(1000)
                started += 1
        finally:
            print(started)
    """
    if isolation != "namespaces" and os.geteuid() != 0:
        pytest.skip("without a user or namespaces of its own, a program shares its limit with this user's processes")
    assert 0 < int(hostile(program, isolation).stdout) < SMALL.processes


@pytest.mark.slow
def test_a_tree_of_folders_too_deep_for_python_is_removed(isolation: str) -> None:
    program = """
        import os
        os.symlink("/", "0")
        os.mkdir("closed", 0)
        while True:
            open("0" * 200, "w")
            os.mkdir("x" * 200)
            os.chdir("x" * 200)
    """
    hostile(program, isolation)


def test_the_folder_is_small_in_namespaces(no_trace: None, monkeypatch: pytest.MonkeyPatch) -> None:
    usable("namespaces", monkeypatch)
    outcome = hostile("for n in range(99999): open(str(n), 'wb').write(bytes(2**19))", "namespaces")
    assert outcome.ended == "exited"
    assert b"No space left" in outcome.stderr


@pytest.mark.parametrize("name", ["namespaces", "landlock"])
def test_other_files_can_neither_be_read_nor_written(
    name: str, no_trace: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable(name, monkeypatch)
    os.chmod(tmp_path, 0o777)  # so that only the sandbox is in the way
    secret = tmp_path / "secret"
    secret.write_text("4711")
    os.chmod(secret, 0o666)
    program = f"""
        import os
        for attempt in (
            lambda: open({str(secret)!r}).read(),
            lambda: open({str(secret)!r}, "w"),
            lambda: os.truncate({str(secret)!r}, 0),
            lambda: os.chmod({str(secret)!r}, 0),
            lambda: os.unlink({str(secret)!r}),
            lambda: open({str(tmp_path / "new")!r}, "w"),
            lambda: os.mkdir({str(tmp_path / "new")!r}),
            lambda: os.symlink("/", {str(tmp_path / "new")!r}),
            lambda: os.listdir({str(tmp_path)!r}),
            lambda: open("/etc/passwd").read(),
            lambda: open("/proc/self/environ").read(),
            lambda: open("/usr/lib/new", "w"),
        ):
            try:
                attempt()
                print("succeeded")
            except OSError:
                print("failed")
    """
    assert hostile(program, name).stdout.split() == [b"failed"] * 12
    assert secret.read_text() == "4711"
    assert secret.stat().st_mode & 0o777 == 0o666
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["namespaces", "landlock"])
def test_no_socket_reaches_anything(name: str, no_trace: None, monkeypatch: pytest.MonkeyPatch) -> None:
    usable(name, monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"""
            import socket
            for family, kind, address in (
                (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", {port})),
                (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 53)),
                (socket.AF_UNIX, socket.SOCK_STREAM, "/run/docker.sock"),
            ):
                try:
                    socket.socket(family, kind).connect(address)
                    print("connected")
                except OSError as error:
                    print("failed")
        """
        outcome = hostile(program, name)
    assert outcome.stdout.split() == [b"failed"] * 3


def test_namespaces_alone_stop_the_network(no_trace: None, monkeypatch: pytest.MonkeyPatch) -> None:
    usable("namespaces", monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        assert b"OSError" in run(program, "", SMALL, ["namespaces"]).stderr


@pytest.mark.parametrize("name", ["namespaces", "landlock"])
def test_no_other_process_can_be_killed(name: str, no_trace: None, monkeypatch: pytest.MonkeyPatch) -> None:
    usable(name, monkeypatch)
    bystander = subprocess.Popen(["sleep", "60"], user=None if os.geteuid() else 65534)
    try:
        # In its own PID namespace, -1 means all of it.
        targets = [bystander.pid, os.getpid(), "os.getppid()", *([-1] if name == "namespaces" else [])]
        program = "import os\n" + "".join(f"try: os.kill({pid}, 9)\nexcept OSError: pass\n" for pid in targets)
        hostile(program + "print('alive')", name)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_new_namespaces_and_unbounded_memory_are_refused(no_trace: None, monkeypatch: pytest.MonkeyPatch) -> None:
    usable("namespaces", monkeypatch)
    if "seccomp" not in sandbox.active_mechanisms():
        pytest.skip("seccomp is missing here")
    program = """
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        for attempt in (
            lambda: libc.unshare(0x10000000),
            lambda: libc.ptrace(0, 0, 0, 0),
            lambda: libc.memfd_create(b"x", 0),
        ):
            print(attempt(), ctypes.get_errno())
    """
    assert hostile(program, "namespaces").stdout.split(b"\n")[:3] == [b"-1 1"] * 3


def test_no_secret_is_inherited(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_4711")
    with open(__file__) as inherited:
        os.set_inheritable(inherited.fileno(), True)
        program = """
            import os, sys
            print(dict(os.environ), sys.argv, sys.path)
            for number in range(64):
                try: print(number, os.fstat(number).st_size)
                except OSError: pass
        """
        lines = hostile(program, isolation).stdout.decode().splitlines()
    assert "4711" not in lines[0]
    assert str(Path.home()) not in lines[0].replace(os.path.realpath(sys.base_prefix), "")
    assert [int(line.split()[0]) for line in lines[1:]] == [0, 1, 2]


def test_hashes_and_folders_are_the_same_in_every_run(isolation: str) -> None:
    program = "import os; print(hash('x'), {'a', 'b', 'c'}, os.listdir('.'), os.environ['TZ'])"
    assert hostile(program, isolation).stdout == hostile(program, isolation).stdout


def test_no_setuid_program_gives_privileges(isolation: str) -> None:
    assert hostile("import ctypes; print(ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))", isolation).stdout == b"1\n"


def test_ordinary_programs_work(isolation: str) -> None:
    program = """
        import asyncio, dataclasses, decimal, functools, itertools, json, math, random, re, tempfile, threading
        @dataclasses.dataclass
        class Point:
            x: int
        async def main():
            await asyncio.sleep(0)
            return Point(1)
        @functools.cache
        def fibonacci(n):
            return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
        thread = threading.Thread(target=lambda: print("thread"))
        thread.start()
        thread.join()
        with tempfile.TemporaryFile(dir=".") as file:
            file.write(b"x" * 1000)
        with open("own.txt", "w") as file:
            file.write("ä")
        print(asyncio.run(main()), fibonacci(30), math.factorial(50), len(open("own.txt").read()), __name__)
        random.seed(0)
        print(random.random(), re.findall("a+", "aabaa"), decimal.Decimal(1) / 3)
    """
    outcome = hostile(program, isolation)
    assert outcome.stderr == b""
    assert outcome.stdout.decode().split("\n")[:2] == ["thread", f"Point(x=1) 832040 {math.factorial(50)} 1 __main__"]


def test_installed_packages_are_not_there(isolation: str) -> None:
    assert b"ModuleNotFoundError" in hostile("import psutil", isolation).stderr


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(ChildProcessError):  # orphans become children of this process, a subreaper
        os.waitpid(process.pid, os.WNOHANG)
    return process.is_running()


def test_a_program_ends_with_the_process_that_started_it(isolation: str) -> None:
    script = f"""if True:
        from grpo_rewards.sandbox import run as sandbox
        sandbox.interpreter = lambda: {sandbox.interpreter()!r}
        sandbox.tempfile.tempdir = {sandbox.tempfile.tempdir!r}
        sandbox.run("import time; print('started', flush=True); time.sleep(1000)",
            limits=sandbox.Limits(wall_seconds=300), mechanisms={ISOLATIONS[isolation]!r})
    """
    trainer = subprocess.Popen([sys.executable, "-c", script])
    # Its own descendants only: this process may have other children.
    while len(started := psutil.Process(trainer.pid).children(recursive=True)) < 3:  # supervisor, init and the program
        assert trainer.poll() is None
        time.sleep(0.01)
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 60
    while any(map(is_alive, started)):
        assert time.monotonic() < deadline, "the program goes on without its trainer"
        time.sleep(0.01)
    for folder in Path(sandbox.tempfile.gettempdir()).iterdir():  # the one file that a killed trainer leaves
        subprocess.run(["rm", "-rf", folder], check=True)


def test_a_program_that_cannot_be_confined_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("the sandbox needs Linux")
    monkeypatch.setattr(sandbox, "interpreter", lambda: "/bin/false")
    with pytest.raises(SandboxError, match="the sandbox ended without a reply"):
        run("print(1)", mechanisms=[])


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_refused_in_one_sentence(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    sandbox.active_mechanisms.cache_clear()
    with pytest.raises(UserError, match="programs of a model run on Linux only"):
        sandbox.active_mechanisms()
