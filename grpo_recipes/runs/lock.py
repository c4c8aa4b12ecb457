"""One writer at a time in the folder of a run or an evaluation: two writers would overwrite each other's files.

The first rank of a launch holds filelock's `SoftFileLease` on `_run.lock`. The file names the process, the host with
its PID namespace, and a token of the claim. A thread touches the file while the process lives. Another process may take
the lease over once the file was not touched for `LEASE_SECONDS`, so a process that was suspended for longer must check
`Held.loss` before it writes. The moment between that check and the write can't be closed: file systems offer no such
operation.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from grpo_rewards.errors import UserError
from grpo_rewards.terminal import say

LOCK = "_run.lock"  # transformers pushes no file whose name begins with `_`
HEARTBEAT_SECONDS = 10.0
LEASE_SECONDS = 60.0

SWAP_SECONDS = 2.5
"""Time during which another process may replace the lock to find out if it is stale. filelock gives up after 2 s."""

NAMESPACE = "?pidns-"
"""filelock's separator between the name of a host and its PID namespace."""


class FolderLost(RuntimeError):
    """The folder no longer belongs to this process: another process took it over, or it was moved or removed."""


@dataclass(frozen=True)
class Writer:
    """A kind of process that writes to a folder, in the words of its messages."""

    name: str
    """Noun for the process."""
    key: str
    """Key of the recipe that names the folder, followed by a space, or empty."""
    again: str
    """Command that continues the work of a process that ended early."""
    elsewhere: str
    """Command that continues the work in another folder, with `{}` for the folder."""


LAUNCH = Writer(
    "launch", "`output_dir` ", "`--resume_from_checkpoint true`", "`--output_dir {} --resume_from_checkpoint true`"
)
EVALUATION = Writer("evaluation", "", "the same command", "the same command with `--output {}`")


@dataclass(frozen=True)
class Loss:
    """Loss of a folder that a process held."""

    reason: str
    """Clause that says why the process no longer holds the folder."""
    fix: str
    """Clause with the user's next step."""


class Held:
    """A folder that this process may write to, as long as `loss` returns None."""

    def __init__(self, folder: Path, writer: Writer, lease: SoftFileLease | None) -> None:
        """Hold a folder with a lease, or without one on ranks other than the first, which never lose the folder."""
        self.folder, self.writer, self._lease = folder, writer, lease
        # The descriptor stays valid if the folder is moved.
        self._descriptor: int | None = None if lease is None else os.open(folder, os.O_RDONLY)

    def loss(self) -> Loss | None:
        """Return why the folder no longer belongs to this process, or None while it does.

        The lock file is read each time, because filelock's heartbeat notices a takeover up to two beats late.
        """
        if self._lease is None or self._descriptor is None:
            return None
        deadline = time.monotonic() + SWAP_SECONDS
        while not _is_named(self._lease):
            if not self._is_in_place(self._descriptor):
                return self._absence(self._descriptor)
            if time.monotonic() > deadline:
                return self._takeover(self._lease)
            time.sleep(0.05)
        if self._lease.compromise is not None:  # the heartbeat ended because the file system failed for a while
            self._lease.release()
            try:
                self._lease.acquire(blocking=False)
            except Timeout:
                return self._takeover(self._lease)
        return None

    def close(self) -> None:
        """Release the folder. The lock of a process that has taken it over stays."""
        if self._lease is None or self._descriptor is None:
            return
        with suppress(OSError):
            if not self._is_in_place(self._descriptor) and (target := _path_of(self._descriptor)) is not None:
                moved = target / LOCK
                owner = SoftFileLease(moved).owner
                if owner is not None and owner.token == self._lease.token:
                    moved.unlink()
        with suppress(OSError):
            self._lease.release()
        os.close(self._descriptor)
        self._descriptor = None

    def _is_in_place(self, descriptor: int) -> bool:
        """Return True if the folder still has its name."""
        try:
            return os.path.samestat(os.stat(self.folder), os.fstat(descriptor))
        except OSError:
            return False

    def _absence(self, descriptor: int) -> Loss:
        """Return the loss of a folder that was moved, with its new path if the system knows it (Linux), or removed."""
        writer = self.writer
        if (target := _path_of(descriptor)) is not None:
            return Loss(
                f"{writer.key}{self.folder} was moved to {target} during the {writer.name}",
                f"{writer.elsewhere.format(target)} continues there",
            )
        return Loss(
            f"{writer.key}{self.folder} is gone: it was removed or moved during the {writer.name}",
            f"move it back, and {writer.again} continues",
        )

    def _takeover(self, lease: SoftFileLease) -> Loss:
        """Return the loss of a folder that another process holds now."""
        name, again, owner = self.writer.name, self.writer.again, lease.owner
        if owner is None:
            return Loss(
                f"{self.writer.key}{self.folder}: its lock {LOCK} was removed, "
                f"or another {name} took it over and has ended",
                f"check whether another {name} wrote there, then {again} continues from what is there",
            )
        return Loss(
            f"{self.writer.key}{self.folder}: another {name} ({_named(owner.pid, owner.hostname)}) has taken it over, "
            f"because this one was suspended for more than {lease.lease_duration:.0f} s or its lock was removed",
            f"leave the folder to that {name}, or stop it, and {again} continues",
        )


@contextmanager
def only_launch(folder: Path) -> Iterator[Held]:
    """Hold the folder of a run inside this block, so that no other launch writes to it. It is created if missing.

    Only the first rank takes the lock. It waits for up to `LEASE_SECONDS` if only time can tell whether the holder of a
    lock still runs.

    Raises:
        UserError: another launch writes to the folder.
    """
    if os.environ.get("RANK", "0") != "0":
        yield Held(folder, LAUNCH, None)
        return
    with only_writer(folder, LAUNCH) as held:
        yield held


@contextmanager
def only_writer(folder: Path, writer: Writer) -> Iterator[Held]:
    """Hold a folder inside this block, as `only_launch` does, for any kind of process."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    # The heartbeat and the checks run on other threads than the one that acquires.
    lease = SoftFileLease(
        folder / LOCK, lease_duration=LEASE_SECONDS, heartbeat_interval=HEARTBEAT_SECONDS, thread_local=False
    )
    _acquire(lease, writer)
    held = Held(folder, writer, lease)
    try:
        yield held
    finally:
        held.close()
        if is_new:
            with suppress(OSError):  # the folder is not empty
                folder.rmdir()


def is_held(folder: Path) -> bool:
    """Return True if a process seems to be writing to `folder`. Neither waits nor writes."""
    lock = folder / LOCK
    try:
        if not lock.is_file():
            return False
        owner = SoftFileLease(lock).owner
        is_fresh = time.time() - lock.stat().st_mtime < LEASE_SECONDS
    except OSError:  # just released
        return False
    return is_fresh and not (owner is not None and _is_gone(owner.pid, owner.hostname))


def _acquire(lease: SoftFileLease, writer: Writer) -> None:
    """Acquire the lease, also from a process that is gone. Raises `UserError` if another process holds it."""
    lock = Path(lease.lock_file)
    left_by = _holder(lease) if os.path.lexists(lock) else None
    try:
        try:
            lease.acquire(blocking=False)
        except Timeout:
            _acquire_left_behind(lease, writer)
    except (Timeout, LeaseSettingsMismatch) as error:
        raise _locked(lease, writer) from error
    except (IsADirectoryError, PermissionError) as error:
        if not os.path.lexists(lock):
            raise
        raise _locked(lease, writer, f"; it can't be taken over ({error.strerror})") from error
    if left_by is not None:
        say(f"{lock}: left by a process that was killed ({left_by}), and taken over")


def _acquire_left_behind(lease: SoftFileLease, writer: Writer) -> None:
    """Wait until a lock that filelock could not take over at once is touched or has expired.

    Raises:
        UserError: the process that holds the lock lives.
        Timeout: another process has acquired the lock first.
    """
    lock = Path(lease.lock_file)
    first = _stamp(lock)  # read before the owner, so that a lock that replaces this one is noticed
    owner = lease.owner
    is_gone = owner is not None and _is_gone(owner.pid, owner.hostname)
    if owner and owner.hostname == _own_host() and not is_gone:
        raise _locked(lease, writer)
    if not is_gone:
        poll = min(1.0, HEARTBEAT_SECONDS / 2)
        say(f"{lock}: waiting up to {LEASE_SECONDS:.0f} s for a sign of the process that holds it")
        with suppress(Timeout):
            lease.acquire(LEASE_SECONDS + 2 * poll, poll, cancel_check=lambda: _stamp(lock) not in (None, first))
            return
    if _stamp(lock) not in (None, first):
        raise _locked(lease, writer)
    # filelock takes a lock over only if the file system can exchange two names in one step, which NFS can't, and it
    # never takes over an empty file, which a crash of the machine leaves. If two processes come here at once, the lock
    # of the first may be removed. That process notices the loss before it writes.
    lease.force_break()
    lease.acquire(blocking=False)


def _path_of(descriptor: int) -> Path | None:
    """Return the present path of an open folder, or None if it was removed or the system does not know (Linux does)."""
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        return Path(target) if os.path.samestat(os.stat(target), os.fstat(descriptor)) else None
    except OSError:
        return None


def _is_named(lease: SoftFileLease) -> bool:
    """Return True if the lock file still holds the token of this claim."""
    owner = lease.owner
    return owner is not None and owner.token == lease.token


def _stamp(lock: Path) -> tuple[int, int, int] | None:
    """Return times and inode of a lock, which change when it is touched or replaced, or None if there is no lock."""
    try:
        # Opening makes a network file system ask its server. Without O_NONBLOCK a FIFO would wait for a writer.
        descriptor = os.open(lock, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError:  # a link or a socket
        found = os.lstat(lock)
    else:
        found = os.fstat(descriptor)
        os.close(descriptor)
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _is_gone(pid: int, host: str) -> bool:
    """Return True if a process provably no longer runs. Only processes of this host and PID namespace are known."""
    return host == _own_host() and not psutil.pid_exists(pid)


@cache
def _own_host() -> str:
    """Return the name of this host and PID namespace in a lock, or "" if no temporary file can be written.

    filelock offers no function for the name, so a lock is written and read.
    """
    with (
        suppress(OSError),
        tempfile.TemporaryDirectory() as folder,
        SoftFileLease(Path(folder, LOCK)) as lease,
    ):
        owner = lease.owner
        assert owner is not None, "the lock has just been written"
        return owner.hostname
    return ""


def _locked(lease: SoftFileLease, writer: Writer, reason: str = "") -> UserError:
    """Return the error that names the process which holds a lock, and the fix."""
    lock, owner = Path(lease.lock_file), lease.owner
    fix = "wait for it or stop it"
    if not owner or owner.hostname != _own_host() or reason:
        fix += f"; if it no longer runs, remove {lock}"
    return UserError(
        f"{writer.key}{lock.parent}: another {writer.name} writes there just now ({_holder(lease)}{reason}): {fix}"
    )


def _holder(lease: SoftFileLease) -> str:
    """Return a noun phrase for the process that holds a lock."""
    owner = lease.owner
    return "unknown process" if owner is None else _named(owner.pid, owner.hostname)


def _named(pid: int, host: str) -> str:
    name, _, namespace = host.partition(NAMESPACE)
    return f"process {pid} on {name}" + (f", PID namespace {namespace}" if namespace else "")
