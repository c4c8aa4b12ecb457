"""One writer at a time in the folder of a run or an evaluation: two writers would overwrite each other's files.

The first rank of a launch holds filelock's `SoftFileLease` on `_run.lock`, which a thread touches while the process
lives. Another process may take the lease over once the file was not touched for `LEASE_SECONDS`, so a process that was
suspended for longer must check `Held.loss` before it writes. The moment between that check and the write can't be
closed: file systems offer no such operation.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import SoftFileLease, Timeout

from grpo_rewards.errors import UserError
from grpo_rewards.terminal import say

LOCK = "_run.lock"  # transformers pushes no file whose name begins with `_`
HEARTBEAT_SECONDS = 10.0
LEASE_SECONDS = 60.0


class FolderLost(RuntimeError):
    """The folder no longer belongs to this process: another process took it over, or its lock was removed."""


GO_ON = "wait for the other launch or stop it, and `--resume_from_checkpoint true` continues from what is there"
"""Fix for a launch that lost its folder, in error messages."""


@dataclass(frozen=True)
class Held:
    """A folder that this process may write to, as long as `loss` returns None.

    Attributes:
        folder: The folder.
        writer: Noun for this process: launch or evaluation.
        lease: Lease on the folder, or None on ranks other than the first, which never lose it.
    """

    folder: Path
    writer: str
    lease: SoftFileLease | None

    def loss(self) -> str | None:
        """Return why the folder no longer belongs to this process, or None while it does.

        The lock file is read each time, because filelock's heartbeat notices a takeover up to two beats late.
        """
        if self.lease is None:
            return None
        owner, compromise = self.lease.owner, self.lease.compromise
        if owner is not None and owner.token != self.lease.token:
            return f"{self.folder}: another {self.writer} ({_holder(self.lease)}) has taken it over"
        if compromise is not None:  # an unreadable lock may be a passing error of a network's file system
            return f"{self.folder}: its lock {LOCK} is lost ({compromise.reason})"
        return None


@contextmanager
def only_writer(folder: Path, writer: str = "launch") -> Iterator[Held]:
    """Hold a folder inside this block, so that no other process writes to it. It is created if missing.

    Only the first rank takes the lock.

    Raises:
        UserError: another process writes to the folder.
    """
    if os.environ.get("RANK", "0") != "0":
        yield Held(folder, writer, None)
        return
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    # The heartbeat and the checks run on other threads than the one that acquires.
    lease = SoftFileLease(
        folder / LOCK, lease_duration=LEASE_SECONDS, heartbeat_interval=HEARTBEAT_SECONDS, thread_local=False
    )
    _acquire(lease, folder, writer)
    try:
        yield Held(folder, writer, lease)
    finally:
        with suppress(OSError):  # the folder was removed, or is not empty
            lease.release()
            if is_new:
                folder.rmdir()


def is_held(folder: Path) -> bool:
    """Return True if a process seems to be writing to `folder`, or was until `LEASE_SECONDS` ago."""
    touched = _touched(folder)
    return touched is not None and time.time() - touched < LEASE_SECONDS


def _acquire(lease: SoftFileLease, folder: Path, writer: str) -> None:
    """Acquire the lease. Raise `UserError` if another process touches the lock while this one waits."""
    try:
        with suppress(Timeout):
            lease.acquire(blocking=False)
            return
        touched = _touched(folder)
        say(f"{folder / LOCK}: waiting up to {LEASE_SECONDS:.0f} s for a sign of {_holder(lease)}")
        with suppress(Timeout):
            poll = min(1.0, HEARTBEAT_SECONDS / 2)
            lease.acquire(LEASE_SECONDS + 2 * poll, poll, cancel_check=lambda: _touched(folder) != touched)
            return
        if _touched(folder) == touched:
            lease.force_break()  # where names can't be exchanged (NFS), filelock takes no lock over
        lease.acquire(blocking=False)
    except Timeout as error:
        problem = f"another {writer} writes there just now ({_holder(lease)})"
        fix = f"wait for it or stop it; if it no longer runs, remove {folder / LOCK}"
        raise UserError(folder, problem, fix) from error


def _touched(folder: Path) -> float | None:
    """Return the time of the last change of a folder's lock in seconds, or None without a lock."""
    try:
        return os.lstat(folder / LOCK).st_mtime
    except OSError:
        return None


def _holder(lease: SoftFileLease) -> str:
    """Return a noun phrase for the process that holds a lock."""
    owner = lease.owner
    return "an unknown process" if owner is None else f"process {owner.pid} on {owner.hostname.partition('?')[0]}"
