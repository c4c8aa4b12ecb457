"""Programs that try to harm the machine, under each isolation that it offers: each is bounded, and leaves nothing.

While a program runs, this process adopts all orphans. A process that outlived its run would then be a child of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import io
import json
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from grpo_rewards.sandbox import confinement, harness, supervisor
from grpo_rewards.sandbox import run as sandbox
from grpo_rewards.sandbox.run import Limits, Outcome, SandboxError, run
from tests.support.errors import refused
from tests.support.grids import only

ISOLATIONS: dict[str, tuple[str, ...]] = {
    "namespaces": ("namespaces", "seccomp"),
    "landlock": ("landlock", "seccomp"),
    "limits": (),
}
SMALL = Limits(cpu_seconds=1, wall_seconds=10, memory_bytes=256 * 2**20, output_bytes=2**16, disk_bytes=2**20)
# Python of the system, for isolations that an interpreter in root's home can't be used with.
PYTHON, SYSTEM_PYTHON = sys.executable, "/usr/bin/python3"
_SUBREAPER = 36

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


@pytest.fixture
def no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if the test leaves a process or a file."""
    folders = tmp_path / "folders"
    folders.mkdir(mode=0o755)
    os.chmod(tmp_path, 0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
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


@pytest.fixture(params=only(["namespaces"], ["namespaces", "limits"]))
def isolation(request: pytest.FixtureRequest, no_trace: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of an isolation that works here, perhaps with the system's Python, for `hostile`."""
    reason, executable = failure(ISOLATIONS[request.param])
    if reason:
        pytest.skip(f"{request.param} is missing here: {reason}")
    monkeypatch.setattr(sys, "executable", executable)
    return request.param


confines = pytest.mark.parametrize("isolation", ["namespaces", "landlock"], indirect=True)
in_namespaces = pytest.mark.parametrize("isolation", ["namespaces"], indirect=True)


@functools.cache
def failure(mechanisms: tuple[str, ...]) -> tuple[str | None, str]:
    """Return the reason why no program runs with these mechanisms, or None, and the Python that was tried last."""
    # Whatever hides files must show the interpreter.
    assert any(Path(sandbox.interpreter()).is_relative_to(path) for path in confinement.readable_paths())
    reason = sandbox._failure(mechanisms)
    if not reason or "/root" not in reason or not os.path.exists(SYSTEM_PYTHON):
        return reason, sys.executable
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", SYSTEM_PYTHON)
        return sandbox._failure(mechanisms), SYSTEM_PYTHON


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


def test_a_mechanism_that_the_kernel_offers_works(no_trace: None) -> None:
    """A test that skips where a mechanism fails would notice no mistake in the mechanism."""
    for mechanisms in ISOLATIONS.values():
        offered = tuple(filter(is_offered, mechanisms))
        assert failure(offered)[0] is None, offered


def hostile(program: str, isolation: str, stdin: str = "", limits: Limits = SMALL) -> Outcome:
    return run(textwrap.dedent(program), stdin, limits, ISOLATIONS[isolation])


FORKS = {
    "fork bomb": "while True:\n  try: os.fork()\n  except OSError: pass",
    "bomb of sessions": "while True:\n  try:\n    if not os.fork(): os.setsid()\n  except OSError: pass",
    "daemon": "if not os.fork():\n  os.setsid()\n  if not os.fork(): time.sleep(1000)",
    "daemon without pipes": "if not os.fork():\n  os.setsid(); os.closerange(0, 64); time.sleep(1000)",
    "deaf daemon": "for n in (1, 2, 15, 24): signal.signal(n, signal.SIG_IGN)\nif not os.fork():\n  while True: pass",
    "orphans that fork": "while True:\n  try:\n    if os.fork(): os._exit(0)\n  except OSError: pass",
    "threads": "import threading\nfor n in range(100000): threading.Thread(target=time.sleep, args=(1000,)).start()",
}


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
@pytest.mark.parametrize("isolation", ["limits"], indirect=True)
def test_a_tree_of_folders_too_deep_for_python_is_removed(isolation: str) -> None:
    program = """
        import os
        os.symlink("/", "0")
        os.mkdir("closed", 0)
        for _ in range(1500):
            open("0" * 200, "w")
            os.mkdir("x" * 200)
            os.chdir("x" * 200)
    """
    hostile(program, isolation)


@confines
def test_other_files_can_neither_be_read_nor_written(isolation: str, tmp_path: Path) -> None:
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
    assert hostile(program, isolation).stdout.split() == [b"failed"] * 13
    assert secret.read_text() == "4711"
    assert secret.stat().st_mode & 0o777 == 0o666
    assert not (tmp_path / "new").exists()


@confines
def test_no_socket_reaches_anything(isolation: str) -> None:
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
        assert hostile(program, isolation).stdout.split() == [b"failed"] * 3
        if isolation == "namespaces":  # alone, too
            program = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
            assert b"OSError" in run(program, "", SMALL, ["namespaces"]).stderr


@confines
def test_no_other_process_can_be_killed(isolation: str) -> None:
    bystander = subprocess.Popen(["sleep", "60"], user=None if os.geteuid() else 65534)
    try:
        # In its own PID namespace, -1 means all of it.
        targets = [bystander.pid, os.getpid(), "os.getppid()", *([-1] if isolation == "namespaces" else [])]
        program = "import os\n" + "".join(f"try: os.kill({pid}, 9)\nexcept OSError: pass\n" for pid in targets)
        hostile(program + "print('alive')", isolation)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@in_namespaces
def test_new_namespaces_and_unbounded_memory_are_refused(isolation: str) -> None:
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
    assert hostile(program, isolation).stdout.split(b"\n")[:3] == [b"-1 1"] * 3


def test_landlock_alone_keeps_from_files_sockets_and_processes(no_trace: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says itself whether it has Landlock, and in which version."""
    version = ctypes.CDLL(None).syscall(ctypes.c_long(444), None, ctypes.c_long(0), ctypes.c_long(1))
    if version < 6 or not os.path.exists(SYSTEM_PYTHON) or os.geteuid() != 0:
        pytest.skip("Landlock with sockets and signals, a Python for everybody, or root is missing here")
    monkeypatch.setattr(sys, "executable", SYSTEM_PYTHON)
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
    program = """
        import ctypes, os
        print(hash("x"), {"a", "b", "c"}, os.listdir("."), os.environ["TZ"])
        print(ctypes.CDLL(None).prctl(39, 0, 0, 0, 0), flush=True)
        import psutil
    """
    first, second = hostile(program, isolation), hostile(program, isolation)
    assert first.stdout == second.stdout
    assert first.stdout.endswith(b"\n1\n"), "a setuid program would give privileges"
    assert b"ModuleNotFoundError" in first.stderr


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(ChildProcessError):  # orphans become children of this process, a subreaper
        os.waitpid(process.pid, os.WNOHANG)
    return process.is_running()


def test_a_program_ends_with_the_process_that_started_it(isolation: str) -> None:
    script = f"""if True:
        import sys
        from grpo_rewards.sandbox import run as sandbox
        sys.executable = {sys.executable!r}
        sandbox.tempfile.tempdir = {sandbox.tempfile.tempdir!r}
        sandbox.run("import time; print('started', flush=True); time.sleep(1000)",
            limits=sandbox.Limits(wall_seconds=300), mechanisms={ISOLATIONS[isolation]!r})
    """
    trainer = subprocess.Popen([PYTHON, "-c", script])
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


@in_namespaces
def test_a_program_in_namespaces_has_these_limits_and_sees_these_files(isolation: str) -> None:
    limits = Limits(3, 10.0, 300 * 2**20, 5, 2**16, 3 * 2**20)
    found = json.loads(hostile(STATE, isolation, limits=limits).stdout)
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
    refused = {numbers[name] for name in REFUSED.split() if name in numbers}
    refused |= {447, 452}  # older headers lack them
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


def test_the_user_of_the_programs_is_this_processs_own_if_the_system_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = 2_000_000_000 + os.getpid()
    for maps, uid in (
        ("0 0 4294967295", own), ("0 100000 65536", 65534), (f"{own} 5 1", own), (f"{own - 1} 5 1", 65534),
        (f"{own - 1} 5 2", own), (f"{own + 1} 5 9", 65534), (f"0 0 10\n{own - 3} 0 10", own),
    ):  # fmt: skip
        monkeypatch.setattr("builtins.open", lambda path, maps=maps: io.StringIO(maps))
        assert confinement.own_uid() == uid, maps


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


def test_a_program_reads_its_input_and_prints(isolation: str) -> None:
    program = """
        import os, sys
        text = sys.stdin.buffer.read()
        print(len(text), text[-4:])
        sys.stderr.write("done")
        os.write(0, b"x")
    """
    outcome = hostile(program, isolation, "x" * 300_000 + "a\ud800")  # more than a pipe holds
    assert (outcome.ended, outcome.code) == ("exited", 1), "the input can't be written"
    assert outcome.stdout == b"300004 b'a\\xed\\xa0\\x80'\n"
    assert outcome.stderr.startswith(b"done")
    assert b"Bad file descriptor" in outcome.stderr


# The system sends SIGXCPU at the limit of CPU seconds.
ENDS = [
    ("exit(3)", "exited", 3), ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", "timeout", None),
    ("import os; os.kill(os.getpid(), 9)", "killed", -9), ("'\ud800'", "exited", 1),
    ("x = bytearray(10 * 2**30)", "exited", 1), ("open('big', 'wb').write(bytes(2**24))", "exited", 1),
    ("import os\nos.write(2, b'x' * 1001)", "output", None), ("print('x' * 999)", "exited", 0),
    ("print('x' * 1000)", "output", None), ("import os; os._exit(0)", "exited", 0),
    ("import os; os.abort()", "killed", -6), ("x = '\0'", "exited", 1),
    ("while True: print('x' * 1000)", "output", None), ("while True: pass", "timeout", None),
]  # fmt: skip


FEW_ENDS = ENDS[:9]


@pytest.mark.parametrize("ends", [FEW_ENDS, pytest.param(ENDS[9:], marks=pytest.mark.slow)], ids=["few", "others"])
def test_every_end_is_told_apart(ends: list[tuple[str, str, int | None]], isolation: str) -> None:
    few = replace(SMALL, output_bytes=1000)
    for program, ended, code in ends:
        limits = few if "'x' * " in program else SMALL
        outcome = hostile(program, isolation, limits=limits)
        assert outcome.ended == ended, program
        assert code in (None, outcome.code), program
        assert max(len(outcome.stdout), len(outcome.stderr)) <= limits.output_bytes
    sleep = hostile("import time; time.sleep(60)", isolation, limits=replace(SMALL, wall_seconds=0.3))
    assert (sleep.ended, sleep.cpu_seconds < 0.3, sleep.wall_seconds >= 0.3) == ("timeout", True, True)


def check_forks(names: Iterable[str], isolation: str) -> None:
    """Run programs that fork, beside each other. `no_trace` sees whether a process is left."""
    programs = ["import os, signal, time\n" + FORKS[name] for name in names]
    limits = replace(SMALL, wall_seconds=1.5)
    with ThreadPoolExecutor(4) as pool:
        for outcome in pool.map(lambda program: run(program, "", limits, ISOLATIONS[isolation]), programs):
            assert outcome.ended in ("exited", "timeout", "killed", "output")


@pytest.mark.parametrize("isolation", ["namespaces", "limits"], indirect=True)
def test_no_process_outlives_its_run(isolation: str) -> None:
    check_forks(["deaf daemon"], isolation)


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ISOLATIONS, indirect=True)
def test_no_process_of_any_kind_outlives_its_run(isolation: str) -> None:
    check_forks(FORKS, isolation)


# --- The harness


def harnessed(program: str, *calls: str) -> tuple[list[object], int]:
    """Return what the harness writes about calls of a program, and its exit code."""
    request = json.dumps({"program": program, "calls": [["", call] for call in calls]})
    ended = subprocess.run([PYTHON, "-S", harness.__file__], input=request, capture_output=True, text=True)
    assert ended.stderr == ""
    return [json.loads(line) for line in ended.stdout.splitlines()], ended.returncode


def test_the_harness_writes_values_down_as_data_of_pythons_own_types() -> None:
    program = """
import sys
print("to nobody"); print("to nobody", file=sys.stderr)
def f(x: int): return x * 2
def g(): raise KeyError("x")
def h(): sys.exit(0)
assert __name__ == "program" and sys.modules[__name__].f is f and f.__annotations__ == {"x": int}
assert sys.stdin.read() == ""
"""
    lines, code = harnessed(program, "f(21)", "f((1,))", "g()", "h()", "missing", "f", "'\\ud800'")
    assert lines == [
        42, ["t", 1, 1], ["!", "KeyError"], ["!", "SystemExit"], ["!", "NameError"], ["?", "function"], "\ud800",
    ]  # fmt: skip
    assert code == 0
    assert harnessed("raise SystemExit(0)", "1") == ([["!", "SystemExit"]], 1)


# --- What the system offers


@in_namespaces
def test_a_lower_limit_of_the_user_holds(isolation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = tmp_path / "python"
    limited.write_text(f'#!/bin/bash\nulimit -n 50 -c 0; exec {sandbox.interpreter()} "$@"')
    limited.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(limited))
    program = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(4))"
    assert hostile(program, isolation).stdout == b"(50, 50) (0, 0)\n"


def test_a_program_that_cannot_be_confined_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SandboxError, match="reply"):
        run("print(1)", mechanisms=[])


@pytest.mark.parametrize(("version", "fields"), [(3, 1), (4, 2), (5, 2), (6, 3), (9, 3)])
def test_landlock_handles_what_the_kernels_version_knows(
    version: int, fields: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files up to truncation; TCP from version 4 on, ioctl from 5, sockets and signals from 6."""
    calls: list[tuple[int, tuple[object, ...]]] = []
    allowed: dict[str, int] = {}

    def syscall(what: str, number: int, *arguments: object) -> int:
        if number == 445:
            rights, descriptor = struct.unpack("=Qi", bytes(arguments[2])[:12])  # type: ignore[arg-type]
            allowed[os.readlink(f"/proc/self/fd/{descriptor}")] = rights
        calls.append((number, arguments))
        return version if arguments[0] is None else os.open(os.devnull, os.O_RDONLY)

    monkeypatch.setattr(confinement, "_syscall", syscall)
    confinement.restrict_files(os.getcwd())
    everything = (1 << (16 if version >= 5 else 15)) - 1
    execute, write, read, listing, truncate = 1, 2, 4, 8, 1 << 14
    assert allowed.pop(os.getcwd()) == everything
    assert allowed.pop("/dev/null") == read | write | truncate
    assert allowed.pop(os.path.realpath("/usr")) == execute | read | listing
    assert set(allowed.values()) <= {read, read | write | truncate, execute | read | listing}
    made, restricted = calls[1], calls[-1]
    assert made[1][1] == 8 * fields
    assert bytes(made[1][0])[: 8 * fields] == struct.pack(f"={fields}Q", everything, *[3] * (fields - 1))  # type: ignore[call-overload]
    assert restricted[0] == 446
    version = 2  # lets a process truncate files
    with pytest.raises(OSError, match="2"):
        confinement.restrict_files(os.getcwd())


def test_an_interpreter_outside_of_the_systems_folders_is_shown_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    for prefix in ("/opt/python", "/usr", "/usr/local", "/", "/usrs"):
        monkeypatch.setattr(sys, "base_prefix", prefix)
        shown.append(prefix in confinement.readable_paths() and prefix != "/usr")
    assert shown == [True, False, False, False, True]
    assert "/usr" in confinement.readable_paths()


def test_other_systems_and_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "riscv64")
        with pytest.raises(OSError, match="riscv64"):
            confinement.refuse_system_calls()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "maxsize", 2**31 - 1)
        with pytest.raises(OSError, match=platform.machine()):
            confinement.refuse_system_calls()
    monkeypatch.setattr(sys, "platform", "darwin")
    sandbox.active_mechanisms.cache_clear()
    with refused("programs of a model", "Linux"):
        sandbox.active_mechanisms()
