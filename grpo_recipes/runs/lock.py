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

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from grpo_rewards.errors import UserError
from grpo_rewards.terminal import say

LOCK = "_run.lock"  # transformers pushes no file whose name begins with `_`
HEARTBEAT_SECONDS = 10.0
LEASE_SECONDS = 60.0

SWAP_SECONDS = 2.5
"""Time during which another process may replace the lock to find out if it is stale. filelock gives up after 2 s."""


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


LAUNCH = Writer("launch", "`output_dir` ", "`--resume_from_checkpoint true`")
EVALUATION = Writer("evaluation", "", "the same command")


@dataclass(frozen=True)
class Loss:
    """Loss of a folder that a process held."""

    reason: str
    """Clause that says why the process no longer holds the folder."""
    fix: str
    """Clause with the user's next step."""


@dataclass(frozen=True)
class Held:
    """A folder that this process may write to, as long as `loss` returns None."""

    folder: Path
    writer: Writer
    lease: SoftFileLease | None
    """Lease on the folder, or None on ranks other than the first, which never lose it."""

    def loss(self) -> Loss | None:
        """Return why the folder no longer belongs to this process, or None while it does.

        The lock file is read each time, because filelock's heartbeat notices a takeover up to two beats late.
        """
        if self.lease is None:
            return None
        deadline = time.monotonic() + SWAP_SECONDS
        while (owner := self.lease.owner) is None or owner.token != self.lease.token:
            if time.monotonic() > deadline:
                again = f"{self.writer.again} continues from what is there"
                if owner is None:
                    reason = f"its lock {LOCK} is gone: it was removed, or the folder was moved"
                    return Loss(f"{self.writer.key}{self.folder}: {reason}", f"restore the folder, and {again}")
                reason = f"another {self.writer.name} ({_holder(self.lease)}) has taken it over"
                return Loss(f"{self.writer.key}{self.folder}: {reason}", f"wait for it or stop it, and {again}")
            time.sleep(0.05)
        return None


@contextmanager
def only_launch(folder: Path) -> Iterator[Held]:
    """Hold the folder of a run inside this block, so that no other launch writes to it. It is created if missing.

    Only the first rank takes the lock.

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
    try:
        yield Held(folder, writer, lease)
    finally:
        with suppress(OSError):
            lease.release()
        if is_new:
            with suppress(OSError):  # the folder is not empty
                folder.rmdir()


def is_held(folder: Path) -> bool:
    """Return True if a process seems to be writing to `folder`, or was until `LEASE_SECONDS` ago."""
    try:
        return time.time() - os.lstat(folder / LOCK).st_mtime < LEASE_SECONDS
    except OSError:  # there is no lock
        return False


def _acquire(lease: SoftFileLease, writer: Writer) -> None:
    """Acquire the lease. Raise `UserError` if another process touches the lock while this one waits."""
    lock = Path(lease.lock_file)
    try:
        with suppress(Timeout):
            lease.acquire(blocking=False)
            return
        first = _touched(lock)
        say(f"{lock}: waiting up to {LEASE_SECONDS:.0f} s for a sign of {_holder(lease)}")
        poll = min(1.0, HEARTBEAT_SECONDS / 2)
        with suppress(Timeout):
            lease.acquire(LEASE_SECONDS + 2 * poll, poll, cancel_check=lambda: _touched(lock) not in (None, first))
            return
        if _touched(lock) == first:
            # filelock takes a lock over only if the file system can exchange two names in one step, which NFS can't,
            # and never an empty file, which a crash of the machine leaves.
            lease.force_break()
        lease.acquire(blocking=False)
    except (Timeout, LeaseSettingsMismatch, IsADirectoryError, PermissionError) as error:
        if isinstance(error, PermissionError) and not os.path.lexists(lock):  # the folder itself can't be written
            raise
        raise UserError(
            f"{writer.key}{lock.parent}: another {writer.name} writes there just now ({_holder(lease)}): wait for it "
            f"or stop it; if it no longer runs, remove {lock}"
        ) from error


def _touched(lock: Path) -> int | None:
    """Return the time of the last change of a lock in nanoseconds, or None without a lock."""
    try:
        return os.lstat(lock).st_mtime_ns
    except FileNotFoundError:
        return None


def _holder(lease: SoftFileLease) -> str:
    """Return a noun phrase for the process that holds a lock."""
    owner = lease.owner
    return "an unknown process" if owner is None else f"process {owner.pid} on {owner.hostname.partition('?')[0]}"
