"""One writer at a time in the folder of a run or an evaluation: two would overwrite and remove each other's files.

The first rank of a launch holds filelock's `SoftFileLease` on `_run.lock`. The file names the process, the host with its PID
namespace, and a token of the claim. A thread touches the file as long as the process lives, and another process may take the
lease over once the file was not touched for `LEASE_SECONDS`. A process that stood still for longer must therefore look before
it writes (`Held.loss`). Nothing can close the moment between that look and the write: a file system has no such operation.
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

LOCK = "_run.lock"  # transformers pushes no file whose name begins so
HEARTBEAT_SECONDS = 10.0
LEASE_SECONDS = 60.0

# A process that looks whether a lock is stale swaps the file for its own meanwhile; filelock gives up after 2 seconds.
SWAP_SECONDS = 2.5

_NAMESPACE = "?pidns-"  # filelock's separator between the name of a host and its PID namespace


class RunLocked(UserError):
    """Another process writes to the folder; names the process and how to remove a lock that is left behind."""


class FolderLost(RuntimeError):
    """The folder no longer belongs to this process: another one has taken it over, or it was moved or removed."""


@dataclass(frozen=True)
class Writer:
    """A kind of process that writes to a folder, in the words of its messages.

    Attributes:
        name: the process.
        key: the recipe's key that names the folder, with a space, or empty.
        again: what goes on with the work of a process that ended early.
        elsewhere: the same in another folder, `{}`.
    """

    name: str
    key: str
    again: str
    elsewhere: str


LAUNCH = Writer(
    "launch", "`output_dir` ", "`--resume_from_checkpoint true`", "`--output_dir {} --resume_from_checkpoint true`"
)
EVALUATION = Writer("evaluation", "", "the same command", "the same command with `--output {}`")


@dataclass(frozen=True)
class Loss:
    """Reason why a process no longer holds its folder, and the user's next step. Both are clauses."""

    reason: str
    fix: str


class Held:
    """A folder that this process may write to, as long as `loss` returns None."""

    def __init__(self, folder: Path, writer: Writer, lease: SoftFileLease | None) -> None:
        """`lease` is None on the ranks that do not hold the folder themselves: those never lose it."""
        self.folder, self.writer, self._lease = folder, writer, lease
        # Leads to the folder wherever it is moved.
        self._descriptor: int | None = None if lease is None else os.open(folder, os.O_RDONLY)

    def loss(self) -> Loss | None:
        """Return why the folder no longer belongs to this process, or None while it does.

        Reads the lock file: filelock's heartbeat notices a takeover only up to two beats later.
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
        if self._lease.compromise is not None:  # the heartbeat has ended, after a file system failed for a while
            self._lease.release()
            try:
                self._lease.acquire(blocking=False)
            except Timeout:
                return self._takeover(self._lease)
        return None

    def close(self) -> None:
        """Give the folder back. The lock of a process that has taken it over stays."""
        if self._lease is None or self._descriptor is None:
            return
        with suppress(OSError):
            if not self._is_in_place(self._descriptor) and (target := _path_of(self._descriptor)) is not None:
                moved = target / LOCK
                owner = SoftFileLease(moved, lease_duration=LEASE_SECONDS).owner
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
        """Return where the folder was moved to, as far as the system says so (Linux), or that it is gone."""
        writer = self.writer
        if (target := _path_of(descriptor)) is not None:
            return Loss(
                f"{writer.key}{self.folder} was moved to {target} during the {writer.name}",
                f"{writer.elsewhere.format(target)} goes on there",
            )
        return Loss(
            f"{writer.key}{self.folder} is gone: it was removed or moved during the {writer.name}",
            f"move it back, and {writer.again} goes on",
        )

    def _takeover(self, lease: SoftFileLease) -> Loss:
        """Return who holds the folder now."""
        name, again, owner = self.writer.name, self.writer.again, lease.owner
        if owner is None:
            return Loss(
                f"{self.writer.key}{self.folder}: its lock {LOCK} was removed, or another {name} took it over and has ended",
                f"see whether another {name} wrote there, then {again} goes on from what is there",
            )
        return Loss(
            f"{self.writer.key}{self.folder}: another {name} ({_named(owner.pid, owner.hostname)}) has taken it over, because "
            f"this one stood still for more than {lease.lease_duration:.0f} s or its lock was removed",
            f"leave the folder to that {name}, or stop it, and {again} goes on",
        )


@contextmanager
def only_launch(folder: Path) -> Iterator[Held]:
    """Inside this block no other launch may write to `folder`, which is made if need be. Only the first rank asks.

    Raises:
        RunLocked: another launch writes there. Waits for up to `LEASE_SECONDS` where only time can tell.
    """
    if os.environ.get("RANK", "0") != "0":
        yield Held(folder, LAUNCH, None)
        return
    with only_writer(folder, LAUNCH) as held:
        yield held


@contextmanager
def only_writer(folder: Path, writer: Writer) -> Iterator[Held]:
    """Inside this block this process alone may write to `folder`. Raises `RunLocked` as `only_launch` does."""
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
            with suppress(OSError):  # stays if anything was left there
                folder.rmdir()


def is_held(folder: Path) -> bool:
    """Return True if a process seems to write to `folder` just now. Does not wait, and writes nothing."""
    lock = folder / LOCK
    try:
        if not lock.is_file():
            return False
        owner = SoftFileLease(lock, lease_duration=LEASE_SECONDS).owner
        is_fresh = time.time() - lock.stat().st_mtime < LEASE_SECONDS
    except OSError:  # released meanwhile
        return False
    return is_fresh and not (owner is not None and _is_gone(owner.pid, owner.hostname))


def _acquire(lease: SoftFileLease, writer: Writer) -> None:
    """Acquire the lease, from a process that is gone if need be. Raises `RunLocked` if another process holds it."""
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
        RunLocked, Timeout: its process lives, or another one was quicker.
    """
    lock = Path(lease.lock_file)
    first = _stamp(lock)  # before the owner: a lock that replaces this one afterwards must not be taken for it
    owner = lease.owner
    is_gone = owner is not None and _is_gone(owner.pid, owner.hostname)
    if owner is not None and owner.hostname == _own_host() and not is_gone:
        raise _locked(lease, writer)
    if not is_gone:
        poll = min(1.0, HEARTBEAT_SECONDS / 2)
        say(f"{lock}: waiting up to {LEASE_SECONDS:.0f} s for a sign of the process that holds it")
        with suppress(Timeout):
            lease.acquire(LEASE_SECONDS + 2 * poll, poll, cancel_check=lambda: _stamp(lock) not in (None, first))
            return
    if _stamp(lock) not in (None, first):
        raise _locked(lease, writer)
    # filelock takes over only where two names can be exchanged in one step, which NFS, for one, can't, and it never takes over
    # an empty file, which a crash of the machine leaves. If two processes come here at once, the first one's lock may be
    # removed: it finds that out before it writes.
    lease.force_break()
    lease.acquire(blocking=False)


def _path_of(descriptor: int) -> Path | None:
    """Return the present path of an open folder, or None if it was removed or the system does not say (Linux does)."""
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        return Path(target) if os.path.samestat(os.stat(target), os.fstat(descriptor)) else None
    except OSError:
        return None


def _is_named(lease: SoftFileLease) -> bool:
    """Return True if the lock file names this very claim."""
    owner = lease.owner
    return owner is not None and owner.token == lease.token


def _stamp(lock: Path) -> tuple[int, int, int] | None:
    """Return what changes when a lock is touched or replaced, or None if there is no lock."""
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
    """Return True if a process provably no longer runs, which is known of this host and PID namespace only."""
    return host == _own_host() and not psutil.pid_exists(pid)


@cache
def _own_host() -> str:
    """Return the name of this host and PID namespace in a lock, or "" where no temporary file can be written.

    filelock tells them of a lock that it wrote only.
    """
    with (
        suppress(OSError),
        tempfile.TemporaryDirectory() as folder,
        SoftFileLease(Path(folder, LOCK)) as lease,
    ):
        owner = lease.owner
        assert owner is not None, "it has just been written"
        return owner.hostname
    return ""


def _locked(lease: SoftFileLease, writer: Writer, reason: str = "") -> RunLocked:
    """Return the error that names the process which holds a lock, and the fix."""
    lock, owner = Path(lease.lock_file), lease.owner
    fix = "wait for it or stop it"
    if owner is None or owner.hostname != _own_host() or reason:
        fix += f"; if it does not run any more, remove {lock}"
    return RunLocked(
        f"{writer.key}{lock.parent}: another {writer.name} writes there just now ({_holder(lease)}{reason}): {fix}"
    )


def _holder(lease: SoftFileLease) -> str:
    """Return the process that a lock names, for a message."""
    owner = lease.owner
    return "unknown process" if owner is None else _named(owner.pid, owner.hostname)


def _named(pid: int, host: str) -> str:
    name, _, namespace = host.partition(_NAMESPACE)
    return f"process {pid} on {name}" + (f", PID namespace {namespace}" if namespace else "")
