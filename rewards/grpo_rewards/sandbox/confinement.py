"""Mechanisms of Linux that confine a process: namespaces, Landlock, seccomp, an unprivileged user, resource limits.

Each function confines the calling process for good, or raises OSError. The supervisor calls them, in a process with one
thread. Python wraps few of these calls (`os.unshare` came with 3.12), so the C library is called through ctypes.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterator, Mapping

DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSTEM_FOLDERS = ("/usr", "/lib", "/lib32", "/lib64", "/nix/store")
_SYSTEM_FILES = ("/etc/ld.so.cache",)

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(what: str, number: int, *arguments: object) -> int:
    # As C longs: ctypes passes a Python integer as 32 bits.
    wide = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return _checked(_LIBC.syscall(ctypes.c_long(number), *wide), what)


def _prctl(option: int, value: int) -> None:
    _checked(_LIBC.prctl(option, ctypes.c_ulong(value), *(ctypes.c_ulong(0) for _ in range(3))), f"prctl {option}")


def readable_paths() -> Iterator[str]:
    """Yield the folders and files that an interpreter needs: its own, shared libraries, and their index."""
    prefix = os.path.realpath(sys.base_prefix)
    for path in (*_SYSTEM_FOLDERS, *_SYSTEM_FILES):
        if os.path.exists(path):
            yield path
    if not prefix.startswith("/usr/") and prefix not in ("/usr", "/"):
        yield prefix


# --- Life of processes ---

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none is lost by a double fork."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. A change of the user undoes it."""
    _prctl(_PR_SET_PDEATHSIG, 9)


# --- Namespaces ---

_NEW_MOUNTS, _NEW_UTS, _NEW_IPC = 0x00020000, 0x04000000, 0x08000000
_NEW_USER, _NEW_PID, _NEW_NET = 0x10000000, 0x20000000, 0x40000000
NOBODY = 65534
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 1 << 12, 1 << 14, 1 << 18
_MNT_DETACH = 2
_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_RDONLY, _ATTR_NOSUID = 1, 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_INODES = 4096


def enter_namespaces() -> None:
    """Move this process into new namespaces of IPC, host name and network, and its children into one of PIDs.

    Root needs no namespace of users. Any other user gets a namespace without other users.
    """
    flags = _NEW_UTS | _NEW_IPC | _NEW_PID | _NEW_NET
    uid, gid = os.geteuid(), os.getegid()
    if uid != 0:
        flags |= _NEW_USER
    _checked(_LIBC.unshare(flags), "unshare")
    if uid != 0:
        maps = {"setgroups": "deny", "uid_map": f"{NOBODY} {uid} 1", "gid_map": f"{NOBODY} {gid} 1"}
        for name, content in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(content)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str = "") -> None:
    names = [None if name is None else os.fsencode(name) for name in (source, target, kind)]
    _checked(_LIBC.mount(*names, ctypes.c_ulong(flags), os.fsencode(data)), f"mount of {target}")


def enter_small_root(folder: str, disk_bytes: int) -> None:
    """Make `folder` the root of a new mount namespace, with the interpreter, read-only, and an empty /tmp.

    Nothing else of the machine's files has a name in it, /proc included. All that is written into it counts against
    `disk_bytes`, and is gone with the namespace.
    """
    _checked(_LIBC.unshare(_NEW_MOUNTS), "unshare of mounts")
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={disk_bytes},nr_inodes={_INODES},mode=755")
    for path in readable_paths():
        _show(path, folder)
    for path in DEVICES:
        if os.path.exists(path):
            _show(path, folder)
    os.mkdir(f"{folder}/tmp", 0o755)
    os.chdir(folder)
    # Over itself: the old root then lies on top of the new one, and is taken away.
    _syscall("pivot_root", _PIVOT_ROOT[platform.machine()], b".", b".")
    _checked(_LIBC.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/tmp")


def _show(path: str, root: str) -> None:
    """Show a folder or file of the machine under the same name in `root`, read-only."""
    target = root + path
    os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, 0o755, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, target, None, _MS_BIND | _MS_REC)
    attributes = ctypes.create_string_buffer(struct.pack("=4Q", _ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0))
    name = ctypes.c_char_p(os.fsencode(target))
    _syscall(f"mount_setattr of {target}", _MOUNT_SETATTR, _AT_FDCWD, name, _AT_RECURSIVE, attributes, 32)


# --- Landlock ---

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_ABI_WITH_TRUNCATE, _ABI_WITH_TCP, _ABI_WITH_IOCTL, _ABI_WITH_SIGNALS = 3, 4, 5, 6
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _IOCTL = 1, 2, 4, 8, 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_TCP, _SCOPES = 3, 3  # bind and connect; abstract sockets and signals


def restrict_files(folder: str) -> None:
    """Allow reading what the interpreter needs, and everything below `folder`. Newer kernels also stop TCP and signals.

    Raises:
        OSError: the kernel has no Landlock, or one that does not know of truncation.
    """
    abi = _syscall("landlock", _LANDLOCK_CREATE, None, 0, 1)
    if abi < _ABI_WITH_TRUNCATE:
        raise OSError(f"landlock of version {abi} lets a process truncate files")
    everything = _TRUNCATE * 2 - 1 if abi < _ABI_WITH_IOCTL else _IOCTL * 2 - 1
    fields = [everything]
    if abi >= _ABI_WITH_TCP:
        fields.append(_TCP)
    if abi >= _ABI_WITH_SIGNALS:
        fields.append(_SCOPES)
    handled = ctypes.create_string_buffer(struct.pack(f"={len(fields)}Q", *fields))
    ruleset = _syscall("landlock_create_ruleset", _LANDLOCK_CREATE, handled, 8 * len(fields), 0)
    try:
        for path in readable_paths():
            _allow(ruleset, path, _READ if os.path.isdir(path) else _READ_FILE)
        for path in DEVICES:
            if os.path.exists(path):
                _allow(ruleset, path, _READ_FILE | _WRITE_FILE | _TRUNCATE)
        _allow(ruleset, folder, everything)
        _syscall("landlock_restrict_self", _LANDLOCK_RESTRICT, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, descriptor))
        _syscall("landlock_add_rule", _LANDLOCK_ADD, ruleset, 1, rule, 0)
    finally:
        os.close(descriptor)


# --- seccomp ---

_PR_SET_SECCOMP, _SECCOMP_FILTER = 22, 2
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in `struct seccomp_data`
_X32_BIT = 0x40000000
_NAMESPACE_FLAGS = _NEW_MOUNTS | _NEW_UTS | _NEW_IPC | _NEW_USER | _NEW_PID | _NEW_NET | 0x02000000

_AUDIT_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
# Numbers that all architectures share: io_uring_setup (it opens sockets behind the filter), open_tree, move_mount,
# fsopen, pidfd_getfd, mount_setattr, memfd_secret, fchmodat2.
_REFUSED_EVERYWHERE = (425, 428, 429, 430, 438, 442, 447, 452)
_REFUSED: Mapping[str, Mapping[str, int]] = {
    "x86_64": {
        "socket": 41, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "memfd_create": 319,
        "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308,
        "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "open_by_handle_at": 304,
        "add_key": 248, "request_key": 249, "keyctl": 250,
        # Memory that no process owns.
        "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240,
        # Changes of files that Landlock does not know.
        "chmod": 90, "fchmodat": 268, "chown": 92, "lchown": 94, "fchownat": 260,
        "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280, "setxattr": 188, "lsetxattr": 189,
    },
    "aarch64": {
        "socket": 198, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "memfd_create": 279,
        "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268,
        "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "open_by_handle_at": 265,
        "add_key": 217, "request_key": 218, "keyctl": 219,
        "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180,
        "fchmodat": 53, "fchownat": 54, "utimensat": 88, "setxattr": 5, "lsetxattr": 6,
    },
}  # fmt: skip


def refuse_system_calls() -> None:
    """Refuse system calls that reach the network, other processes, the file system's mounts or unbounded memory.

    A refused call fails with EPERM. `clone3` fails with ENOSYS, because a filter can't read its flags: the C library
    then calls `clone`.

    Raises:
        OSError: the kernel has no filters, or the machine is of another architecture.
    """
    machine = platform.machine()
    if machine not in _REFUSED or sys.maxsize < 2**32:
        raise OSError(f"no list of system calls for {machine}")
    code = _filter(machine)
    instructions = ctypes.create_string_buffer(code)
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(instructions))
    pointer = ctypes.create_string_buffer(program)
    _checked(_LIBC.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_FILTER), pointer, 0, 0), "seccomp")


def _filter(machine: str) -> bytes:
    """Return the filter in classic BPF, eight bytes for each instruction."""
    code = [(_LOAD, 0, 0, _ARCHITECTURE), (_IF_EQUAL, 1, 0, _AUDIT_ARCHITECTURE[machine]), (_RETURN, 0, 0, _KILL)]
    code.append((_LOAD, 0, 0, _NUMBER))
    if machine == "x86_64":  # the x32 interface has the same architecture and other numbers
        code += [(_IF_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _EPERM)]
    for number in (*_REFUSED[machine].values(), *_REFUSED_EVERYWHERE):
        code += [(_IF_EQUAL, 0, 1, number), (_RETURN, 0, 0, _EPERM)]
    code += [(_IF_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ENOSYS)]
    code += [(_IF_EQUAL, 0, 3, _CLONE[machine]), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_IF_BITS, 0, 1, _NAMESPACE_FLAGS)]
    code += [(_RETURN, 0, 0, _EPERM), (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


# --- User and limits ---

_FIRST_OWN_UID = 2_000_000_000


def own_uid() -> int:
    """Return a user ID that only the programs of this process have.

    RLIMIT_NPROC counts the processes of a user, and a user may kill its own processes. A container may not have such
    high numbers: its programs then share the user `nobody`.
    """
    with open("/proc/self/uid_map") as file:
        ranges = [line.split() for line in file]
    uid = _FIRST_OWN_UID + os.getpid()
    known = any(int(first) <= uid < int(first) + int(count) for first, _, count in ranges)
    return uid if known else NOBODY


def refuse_privileges() -> None:
    """Give up the gains of setuid programs such as `sudo`. Landlock and seccomp require that."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def become(uid: int) -> None:
    """Give up root and every group for good."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(uid, uid, uid)


def set_limits(limits: Mapping[str, int], processes: int) -> None:
    """Limit this process, and each process that it starts.

    Args:
        limits: `cpu_seconds`, `memory_bytes` and `disk_bytes`.
        processes: number of processes and threads that its user may have, those of others included.
    """
    # A program may ignore SIGXCPU, at the soft limit. The hard limit kills.
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_seconds"], limits["cpu_seconds"] + 1))
    for kind, bound in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["disk_bytes"]),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        _, hard = resource.getrlimit(kind)
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(kind, (bound, bound))
    os.umask(0o077)


def tasks_of(uid: int) -> int:
    """Return the number of threads that a user has on this machine, as far as /proc shows them."""
    count = 0
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid == uid:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it ended meanwhile
            continue
    return count
