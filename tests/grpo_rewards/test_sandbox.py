"""Programs that try to harm the machine, under each isolation that it offers: each is bounded, and leaves nothing.

While a program runs, this process adopts all orphans. A process that outlived its run would then be a child of it.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import io
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from grpo_rewards.errors import UserError
from grpo_rewards.sandbox import confinement, harness, supervisor
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
        assert supervisor._descendants() <= before
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
    if reason := failure(ISOLATIONS[isolation], monkeypatch):
        pytest.skip(f"{isolation} is missing here: {reason}")


def failure(mechanisms: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Return the reason why no program runs with these mechanisms, or None if one does, perhaps the system's Python."""
    # Whatever hides files must show the interpreter.
    assert any(Path(sandbox.interpreter()).is_relative_to(path) for path in confinement.readable_paths())
    reason = sandbox._failure(mechanisms)
    if reason and "install Python outside of" in reason and os.path.exists(SYSTEM_PYTHON):
        monkeypatch.setattr(sandbox, "interpreter", lambda: os.path.realpath(SYSTEM_PYTHON))
        reason = sandbox._failure(mechanisms)
    return reason


def is_offered(mechanism: str) -> bool:
    """Return True if the kernel itself says that it has a mechanism, and lets this user have it."""
    if mechanism == "namespaces":
        own_user = ["--user", "--map-root-user"] if os.geteuid() else []
        mounts = ["sh", "-c", "mount -t tmpfs none /mnt && mount --bind /usr /mnt"]
        command = ["unshare", *own_user, "--mount", "--uts", "--ipc", "--pid", "--net", "--fork", *mounts]
        return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True).returncode == 0
    if mechanism == "landlock":
        return ctypes.CDLL(None).syscall(ctypes.c_long(444), None, ctypes.c_long(0), ctypes.c_long(1)) >= 3
    return Path("/proc/sys/kernel/seccomp/actions_avail").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
@pytest.mark.parametrize("mechanism", ["namespaces", "landlock", "seccomp"])
def test_a_mechanism_that_the_kernel_offers_works(
    mechanism: str, no_trace: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that skips where a mechanism fails would notice no mistake in the mechanism."""
    if not is_offered(mechanism):
        pytest.skip(f"this kernel offers no {mechanism}")
    assert failure((mechanism,), monkeypatch) is None


def hostile(program: str, isolation: str, stdin: str = "", limits: Limits = SMALL) -> Outcome:
    return run(textwrap.dedent(program), stdin, limits, ISOLATIONS[isolation])


def test_a_program_reads_its_input_and_prints(isolation: str) -> None:
    text = "x" * 300_000  # more than a pipe holds
    outcome = hostile("import sys; print(len(input())); sys.stderr.write('done')", isolation, text)
    assert (outcome.ended, outcome.code, outcome.stdout, outcome.stderr) == ("exited", 0, b"300000\n", b"done")


@pytest.mark.one_case_in(4)
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


@pytest.mark.slow
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
            lambda: open("/../etc/passwd").read(),
            lambda: open("/proc/self/environ").read(),
            lambda: open("/usr/lib/new", "w"),
        ):
            try:
                attempt()
                print("succeeded")
            except OSError:
                print("failed")
    """
    assert hostile(program, name).stdout.split() == [b"failed"] * 13
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


def test_landlock_alone_keeps_from_files_sockets_and_processes(no_trace: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says itself whether it has Landlock, and in which version."""
    version = ctypes.CDLL(None).syscall(ctypes.c_long(444), None, ctypes.c_long(0), ctypes.c_long(1))
    if version < 6 or not os.path.exists(SYSTEM_PYTHON) or os.geteuid() != 0:
        pytest.skip("Landlock with sockets and signals, a Python for everybody, or root is missing here")
    monkeypatch.setattr(sandbox, "interpreter", lambda: os.path.realpath(SYSTEM_PYTHON))
    bystander = subprocess.Popen(["sleep", "60"], user=65534)
    program = f"""
        import os, socket
        def connect(): socket.create_connection(("127.0.0.1", 9))
        def bind(): socket.socket().bind(("127.0.0.1", 0))
        def signal(): os.kill({bystander.pid}, 0)
        def read(): open("/etc/passwd").read()
        def list_root(): os.listdir("/")
        def write(): open("/usr/lib/new", "w")
        def own(): open("own", "w"); os.mkdir("inner"); os.rename("own", "inner/own"); os.truncate("inner/own", 0)
        def null(): open("/dev/null", "w").write("x"); open("/dev/urandom", "rb").read(1)
        for attempt in (connect, bind, signal, read, list_root, write, own, null):
            try:
                attempt()
                print(attempt.__name__, "succeeds")
            except OSError as error:
                print(attempt.__name__, type(error).__name__)
    """
    try:
        outcome = run(textwrap.dedent(program), "", SMALL, ["landlock"])
    finally:
        bystander.kill()
        bystander.wait()
    refused = ("connect", "bind", "signal", "read", "list_root", "write")
    assert outcome.stdout.decode().splitlines() == [
        *(f"{name} PermissionError" for name in refused), "own succeeds", "null succeeds",
    ]  # fmt: skip


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


STATE = """
    import json, os, resource, sys
    kinds = ("CPU", "AS", "FSIZE", "NPROC", "NOFILE", "CORE", "MEMLOCK")
    print(json.dumps({
        "limits": [resource.getrlimit(getattr(resource, "RLIMIT_" + kind)) for kind in kinds],
        "user": [len(set(os.getresuid())), os.getuid() in (0, 1000), os.getresgid(), os.getgroups()],
        "processes": [os.getpid(), os.getppid()],
        "files": [os.getcwd(), os.listdir("."), os.listdir("/etc"), sorted(os.listdir("/dev")), os.listdir("/tmp")],
        "old root": os.path.exists("/../etc/passwd"),
        "umask": os.umask(0),
        "variables": sorted(set(os.environ) - {"LC_CTYPE"}),
        "mounts": [[os.statvfs(path).f_flag & flag for flag in (1, 2, 4)] for path in ("/tmp", "/usr", "/dev/null")],
        "disk": [os.statvfs("/tmp").f_blocks * os.statvfs("/tmp").f_frsize, os.statvfs("/tmp").f_files],
        "modules": [sys.flags.no_site, sys.flags.no_user_site, sys.flags.dont_write_bytecode],
    }))
"""


def test_a_program_in_namespaces_has_these_limits_and_sees_these_files(
    no_trace: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable("namespaces", monkeypatch)
    limits = Limits(3, 10.0, 300 * 2**20, 5, 2**16, 3 * 2**20)
    found = json.loads(hostile(STATE, "namespaces", limits=limits).stdout)
    assert found["limits"] == [[bound, bound + (kind == 0)] for kind, bound in enumerate(
        (3, 300 * 2**20, 3 * 2**20, 5 + (2 if os.geteuid() else 0), 64, 0, 0)
    )]  # fmt: skip
    assert found["umask"] == 0o077
    if os.geteuid() == 0:
        assert found["user"] == [1, False, [65534] * 3, []]
    assert found["processes"] == [2, 1]
    assert found["files"] == ["/tmp", ["main.py"], ["ld.so.cache"], ["null", "random", "urandom", "zero"], ["main.py"]]
    assert not found["old root"]
    assert found["variables"] == ["HOME", "PATH", "PYTHONHASHSEED", "PYTHONUTF8", "TZ"]
    # Not to be written to, without the rights of setuid programs, without devices.
    assert found["mounts"] == [[0, 2, 4], [1, 2, 0], [1, 2, 0]]
    assert found["disk"] == [3 * 2**20, 4096]
    assert found["modules"] == [1, 1, 1]


def test_a_run_without_limits_has_those_of_the_documentation() -> None:
    assert vars(Limits()) == {
        "cpu_seconds": 5, "wall_seconds": 10.0, "memory_bytes": 512 << 20, "processes": 8, "output_bytes": 1 << 20,
        "disk_bytes": 16 << 20,
    }  # fmt: skip


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
"""The kernel's own lists of system calls."""

REFUSED = """
    socket ptrace process_vm_readv process_vm_writev memfd_create mount umount2 pivot_root chroot unshare setns bpf
    perf_event_open userfaultfd open_by_handle_at add_key request_key keyctl shmget semget msgget mq_open chmod fchmodat
    chown lchown fchownat utime utimes futimesat utimensat setxattr lsetxattr
    io_uring_setup open_tree move_mount fsopen pidfd_getfd mount_setattr memfd_secret fchmodat2
"""


def verdict(code: bytes, number: int, argument: int = 0, architecture: int = 0) -> int:
    """Return what a seccomp filter says about a system call, by running its classic BPF."""
    data = {0: number, 4: architecture, 16: argument}
    value, place = 0, 0
    while True:
        operation, is_true, is_false, constant = struct.unpack_from("=HBBI", code, 8 * place)
        place += 1
        if operation == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            value = data[constant]
        elif operation == 0x06:  # BPF_RET | BPF_K
            return constant
        else:  # BPF_JMP with BPF_JEQ, BPF_JGE or BPF_JSET
            holds = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[operation]
            place += is_true if holds else is_false


@pytest.mark.parametrize(
    ("machine", "architecture", "clone"), [("x86_64", 0xC000003E, 56), ("aarch64", 0xC00000B7, 220)]
)
def test_the_filter_refuses_the_system_calls_of_the_kernels_own_list(
    machine: str, architecture: int, clone: int
) -> None:
    if not HEADERS[machine].exists():
        pytest.skip("the headers of the kernel are missing here")
    numbers: dict[str, int] = {}
    for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text()):
        numbers[name] = int(number)
    refused = {numbers[name] for name in REFUSED.split() if name in numbers} | {
        447,
        452,
    }  # older headers lack the last two
    code = confinement._filter(machine)
    allow, eperm, enosys, kill = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000
    found = {number: verdict(code, number, architecture=architecture) for number in range(600)}
    assert {number for number, said in found.items() if said == eperm} == refused
    assert {number for number, said in found.items() if said == enosys} == {435}, "clone3"
    assert set(found.values()) == {allow, eperm, enosys}
    # CLONE_NEWTIME is 0x80, which `clone` can't take: NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET.
    for bit in range(32):
        is_namespace = bit in (17, 25, 26, 27, 28, 29, 30)
        assert verdict(code, clone, 1 << bit, architecture) == (eperm if is_namespace else allow), bit
    assert verdict(code, 0, architecture=architecture ^ 1) == kill
    x32 = verdict(code, 0x40000000, architecture=architecture)
    assert x32 == (eperm if machine == "x86_64" else allow)
    assert verdict(code, 0x3FFFFFFF, architecture=architecture) == allow


@pytest.mark.parametrize(
    ("report", "ended", "expected"),
    [
        ({"code": 0, "cpu_seconds": 0.5}, "exited", ("exited", 0, 0.5)),
        ({"code": 3, "cpu_seconds": 5.0}, "exited", ("exited", 3, 5.0)),
        ({"code": -signal.SIGXCPU, "cpu_seconds": 1.0}, "exited", ("timeout", -signal.SIGXCPU, 1.0)),
        ({"code": -signal.SIGKILL, "cpu_seconds": 5.0}, "exited", ("timeout", -9, 5.0)),
        ({"code": -signal.SIGKILL, "cpu_seconds": 4.9}, "exited", ("killed", -9, 4.9)),
        ({"code": -signal.SIGSEGV, "cpu_seconds": 5.0}, "exited", ("killed", -11, 5.0)),
        ({"code": -signal.SIGKILL, "cpu_seconds": 5.0}, "output", ("output", -9, 5.0)),
        (None, "timeout", ("timeout", -9, 0.0)),
        (None, "exited", ("killed", -9, 0.0)),
    ],
)
def test_how_a_program_ended_follows_from_its_signal_and_its_seconds(
    report: dict[str, float] | None, ended: str, expected: tuple[str, int, float]
) -> None:
    said = b"" if report is None else json.dumps(report).encode() + b"\nlater"
    streams = SimpleNamespace(report=said, output=b"out", errors=b"\xff")
    reply = supervisor._reply(streams, ended, 5)
    assert (reply["ended"], reply["code"], reply["cpu_seconds"]) == expected
    assert (base64.b64decode(reply["stdout"]), base64.b64decode(reply["stderr"])) == (b"out", b"\xff")


def test_an_error_before_the_program_is_the_reply() -> None:
    streams = SimpleNamespace(report=b'{"error": "no room"}\n{"code": 0, "cpu_seconds": 1}\n', output=b"", errors=b"")
    assert supervisor._reply(streams, "exited", 5) == {"error": "no room"}


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (None, None), (True, True), (False, False), ("a", "a"), (7, 7), (1.5, ["f", "1.5"]), (math.nan, ["f", "nan"]),
        (2**53 - 1, 2**53 - 1), (2**53, ["i", hex(2**53)]), (1 - 2**53, 1 - 2**53), (-(2**53), ["i", hex(-(2**53))]),
        (1j, ["c", "1j"]), (b"\x01", ["b", "01"]), (bytearray(b"\x02"), ["b", "02"]), ([1, [2]], ["l", 1, ["l", 2]]),
        ((1,), ["t", 1]), ({1}, ["s", 1]), (frozenset({1}), ["z", 1]), ({"a": (1,)}, ["d", ["a", ["t", 1]]]),
        (Counter("aa"), ["d", ["a", 2]]), (signal.SIGINT, 2), (SimpleNamespace(), ["?", "SimpleNamespace"]),
        (len, ["?", "builtin_function_or_method"]),
    ],
    ids=repr,
)  # fmt: skip
def test_a_value_is_written_down_as_data_of_pythons_own_types(value: object, written: object) -> None:
    assert harness.encode(value) == written


def test_the_harness_writes_one_line_for_each_call() -> None:
    program = """
import sys
print("to nobody"); print("to nobody", file=sys.stderr)
def f(x: int): return x * 2
def g(): raise KeyError("x")
def h(): sys.exit(0)
assert __name__ == "program" and sys.modules[__name__].f is f and f.__annotations__ == {"x": int}
assert sys.stdin.read() == ""
"""
    calls = ["f(21)", "f((1,))", "g()", "h()", "missing", "f", "'\\ud800'", "2 ** 60"]
    request = json.dumps({"program": program, "calls": [["", call] for call in calls]})
    ended = subprocess.run([sys.executable, "-S", harness.__file__], input=request, capture_output=True, text=True)
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    values = [harness.encode(value) for value in (42, (1, 1))]
    assert lines == [
        *values, ["!", "KeyError"], ["!", "SystemExit"], ["!", "NameError"], ["?", "function"], "\ud800",
        harness.encode(2**60),
    ]  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_program_that_does_not_load_is_one_line_of_the_harness() -> None:
    request = json.dumps({"program": "raise SystemExit(0)", "calls": [["", "1"]]})
    ended = subprocess.run([sys.executable, "-S", harness.__file__], input=request, capture_output=True, text=True)
    assert json.loads(ended.stdout) == ["!", "SystemExit"]
    assert harness.encode("x") == "x"
    assert ended.returncode == 1


def forked(work: Callable[[], object]) -> object:
    """Return what `work` returns, as JSON keeps it, in a process of its own."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writing, json.dumps(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    return json.loads(found)


def test_limits_are_set_but_not_above_those_that_are_in_force() -> None:
    kinds = ("CPU", "AS", "FSIZE", "NPROC", "NOFILE", "CORE", "MEMLOCK")
    limits = {"cpu_seconds": 7, "memory_bytes": 2**40, "disk_bytes": 4096}

    def work() -> object:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 50))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        confinement.set_limits(limits, 3)
        return [resource.getrlimit(getattr(resource, f"RLIMIT_{kind}")) for kind in kinds] + [os.umask(0)]

    wanted = [[7, 8], [2**40] * 2, [4096] * 2, [3] * 2, [50] * 2, [0] * 2, [0] * 2, 0o077]
    assert forked(work) == wanted


def test_a_file_for_the_input_can_be_read_and_not_written() -> None:
    descriptor = supervisor._input_file("a\ud800")
    with open(descriptor, "rb") as file:
        assert file.read() == b"a\xed\xa0\x80"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(descriptor, b"x")


def test_a_program_is_written_into_its_folder(tmp_path: Path) -> None:
    supervisor._write_program(str(tmp_path), "é\ud800", None)
    (file,) = tmp_path.iterdir()
    assert (file.name, file.read_bytes()) == ("main.py", b"\xc3\xa9\xed\xa0\x80")
    if os.geteuid() == 0:
        supervisor._write_program(str(tmp_path), "", 12345)
        for path in (tmp_path, file):
            assert (path.stat().st_uid, path.stat().st_gid) == (12345, 65534)


def test_the_limit_of_processes_leaves_room_for_those_of_the_same_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "tasks_of", {os.geteuid(): 11}.__getitem__)
    assert supervisor._process_limit(5, ["namespaces"], 2_000_000_001) == 5
    assert supervisor._process_limit(5, ["seccomp", "namespaces"], None) == 5 + 2, "the supervisor and `init`"
    assert supervisor._process_limit(5, ["landlock"], None) == 5 + 11


def test_the_folder_of_a_run_is_removed_and_nothing_that_its_links_lead_to(tmp_path: Path) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "run"
    (elsewhere / "inner").mkdir(parents=True)
    (elsewhere / "inner" / "file").write_text("kept")
    (folder / "a" / "b" / "c").mkdir(parents=True)
    for place in (folder, folder / "a", folder / "a" / "b"):
        (place / "file").write_text("")
        (place / "link").symlink_to(elsewhere)
    (folder / "a" / "b" / "c").chmod(0)
    (folder / "a").chmod(0o500)
    sandbox._remove(str(folder))
    assert not folder.exists()
    assert (elsewhere / "inner" / "file").read_text() == "kept"


def test_descendants_are_those_of_the_whole_tree_that_live() -> None:
    script = "import subprocess; subprocess.Popen(['sleep', '60']); print('x', flush=True); input()"
    tree = subprocess.Popen([sys.executable, "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    ended = subprocess.Popen(["true"])
    try:
        assert tree.stdout is not None
        tree.stdout.read(1)
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie
        (sleeping,) = psutil.Process(tree.pid).children()
        found = supervisor._descendants()
        assert {tree.pid, sleeping.pid} <= found
        assert not {ended.pid, os.getpid(), os.getppid(), 1} & found
        supervisor._signal(sleeping.pid, signal.SIGKILL)
        supervisor._signal(tree.pid, signal.SIGKILL)
        assert tree.wait() == -signal.SIGKILL
        supervisor._signal(tree.pid, signal.SIGKILL)  # nobody is left
    finally:
        tree.kill()
        ended.wait()


def streams(output: bytes = b"", errors: bytes = b"", report: bytes = b"", most: int = 4) -> supervisor._Streams:
    """Return the streams of a program that has written these bytes, and lives on."""
    pipes = [os.pipe() for _ in range(3)]
    for (_, writing), written in zip(pipes, (report, output, errors), strict=True):
        os.write(writing, written) if written else None
    STREAMS.append(pipes)
    reports, outputs, complaints = (reading for reading, _ in pipes)
    return supervisor._Streams(reports, outputs, complaints, most)


STREAMS: list[list[tuple[int, int]]] = []


@pytest.fixture
def close_streams() -> Iterator[None]:
    """Close the pipes of `streams`."""
    yield
    for descriptor in {one for pipes in STREAMS for pair in pipes for one in pair}:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    STREAMS.clear()


@pytest.mark.usefixtures("close_streams")
def test_output_is_read_up_to_its_limit() -> None:
    late, soon, caller = time.monotonic() + 60, time.monotonic() + 0.01, os.getppid()
    assert streams(b"12345").watch(late, caller) == "output"
    assert streams(b"", b"12345").watch(late, caller) == "output"
    exact = streams(b"1234", b"1234")
    assert exact.watch(soon, caller) == "timeout"
    assert (exact.output, exact.errors, exact.report) == (b"1234", b"1234", b"")
    assert streams().watch(time.monotonic(), caller) == "timeout"
    with pytest.raises(SystemExit, match="the caller is gone"):
        streams().watch(late, caller + 1)
    ended = streams(b"12", b"34", b"{}")
    os.close(STREAMS[-1][0][1])  # `init` has reported, and closes its pipe
    assert ended.watch(late, caller) == "exited"
    os.write(STREAMS[-1][1][1], b"5")
    ended.read_rest()
    assert (ended.output, ended.errors, ended.report) == (b"125", b"34", b"{}")
    long = streams(b"x" * 40_000, most=30_000)
    long.read_rest()
    assert len(long.output) == 40_000


def test_the_user_of_the_programs_is_this_processs_own_if_the_system_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = 2_000_000_000 + os.getpid()
    for maps, uid in (
        ("0 0 4294967295", own), ("0 100000 65536", 65534), (f"{own} 5 1", own), (f"{own - 1} 5 1", 65534),
        (f"{own - 1} 5 2", own), (f"{own + 1} 5 9", 65534), (f"0 0 10\n{own - 3} 0 10", own),
    ):  # fmt: skip
        monkeypatch.setattr("builtins.open", lambda path, maps=maps: io.StringIO(maps))
        assert confinement.own_uid() == uid, maps


@pytest.mark.parametrize(
    ("version", "handled"),
    [
        # The rights of files up to truncation; TCP from version 4, ioctl from 5, sockets and signals from 6 on.
        (3, [(1 << 15) - 1]),
        (4, [(1 << 15) - 1, 3]),
        (5, [(1 << 16) - 1, 3]),
        (6, [(1 << 16) - 1, 3, 3]),
        (9, [(1 << 16) - 1, 3, 3]),
    ],
)
def test_landlock_handles_what_the_kernels_version_knows(
    version: int, handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, tuple[object, ...]]] = []
    allowed: dict[str, int] = {}
    ruleset = os.open(os.devnull, os.O_RDONLY)

    def syscall(what: str, number: int, *arguments: object) -> int:
        calls.append((number, arguments))
        return version if arguments[0] is None else ruleset

    monkeypatch.setattr(confinement, "_syscall", syscall)
    monkeypatch.setattr(confinement, "_allow", lambda descriptor, path, rights: allowed.update({path: rights}))
    confinement.restrict_files("own")
    asked, made, restricted = calls
    assert asked == (444, (None, 0, 1))
    assert (made[0], made[1][1:]) == (444, (8 * len(handled), 0))
    assert bytes(made[1][0])[: 8 * len(handled)] == struct.pack(f"={len(handled)}Q", *handled)
    assert restricted == (446, (ruleset, 0))
    execute, write, read, listing, truncate = 1, 2, 4, 8, 1 << 14
    assert allowed.pop("own") == handled[0]
    assert allowed.pop("/dev/null") == read | write | truncate
    assert allowed.pop("/usr") == execute | read | listing
    assert all(rights in (read, read | write | truncate, execute | read | listing) for rights in allowed.values())
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(ruleset)


@pytest.mark.parametrize(
    ("prefix", "shown"),
    [("/opt/python", ["/opt/python"]), ("/usr", []), ("/usr/local", []), ("/", []), ("/usrs", ["/usrs"])],
)
def test_an_interpreter_outside_of_the_systems_folders_is_shown_too(
    prefix: str, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confinement.sys, "base_prefix", prefix)
    existing = {"/usr", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache"}
    monkeypatch.setattr(confinement.os.path, "exists", existing.__contains__)
    assert set(confinement.readable_paths()) == {*existing, *shown}
    existing.clear()
    assert list(confinement.readable_paths()) == shown


def test_a_landlock_that_lets_files_be_truncated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "_syscall", lambda what, number, *arguments: 2)
    with pytest.raises(OSError, match="^landlock of version 2 lets a process truncate files$"):
        confinement.restrict_files("own")


def test_the_tasks_of_a_user_are_counted() -> None:
    """Others may start and end meanwhile, so that the count lies between two of psutil's, or near them."""
    uid = os.geteuid()
    before = confinement.tasks_of(uid)
    started = threading.Event()
    threads = [threading.Thread(target=started.wait) for _ in range(40)]
    for thread in threads:
        thread.start()
    after = confinement.tasks_of(uid)
    started.set()
    for thread in threads:
        thread.join()
    assert 20 < after - before < 60
    assert confinement.tasks_of(4_294_967_000) == 0


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_refused_in_one_sentence(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    sandbox.active_mechanisms.cache_clear()
    with pytest.raises(UserError, match="programs of a model run on Linux only"):
        sandbox.active_mechanisms()


@pytest.mark.parametrize(("machine", "most"), [("riscv64", sys.maxsize), ("x86_64", 2**31 - 1)])
def test_a_machine_without_a_list_of_system_calls_is_refused(
    machine: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(confinement.platform, "machine", lambda: machine)
    monkeypatch.setattr(confinement.sys, "maxsize", most)
    monkeypatch.setattr(confinement, "_filter", made.append)
    with pytest.raises(OSError, match=f"no list of system calls for {machine}"):
        confinement.refuse_system_calls()
    assert made == []
