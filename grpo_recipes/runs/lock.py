"""One launch at a time in a run's folder: two would overwrite each other's checkpoints and remove them.

The first rank of a launch holds `_run.lock`, which says which process on which machine it is, and touches it as long as it
lives. A launch that was killed leaves it behind. Whether its process still runs is certain on the same machine; on a file
system that several machines share, a lock that is no longer touched counts as left behind.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from grpo_rewards.errors import UserError
from grpo_rewards.terminal import say

LOCK = "_run.lock"  # transformers pushes no file whose name begins so
BEAT_SECONDS = 10.0
STALE_SECONDS = 60.0


class RunLocked(UserError):
    """Another launch writes to the run's folder; names the process and how to remove a lock that is left behind."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock."""

    host: str
    processes: str
    """Which table of processes `pid` counts in: a machine since its start, a container on it."""
    pid: int
    began: str
    """When the process began, as its machine counts: another one may have its number later."""

    @classmethod
    def here(cls) -> Holder:
        """This process."""
        return cls(platform.node(), _processes(), os.getpid(), _began(os.getpid()))

    @classmethod
    def read(cls, lock: Path) -> Holder | None:
        """Who a lock names; None if that can't be read. Raises `FileNotFoundError`."""
        try:
            return cls(**json.loads(lock.read_bytes()))
        except FileNotFoundError:
            raise
        except (ValueError, TypeError, OSError):
            return None

    def runs(self) -> bool:
        """Whether the process still runs, on this machine."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        return _began(self.pid) == self.began


@contextmanager
def only_launch(folder: Path) -> Iterator[None]:
    """Inside this block no other launch may write to `folder`, which is made if need be. Only the first rank asks.

    Raises `RunLocked` if another launch does. Waits for up to `STALE_SECONDS` where only time can tell.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    lock, is_new = folder / LOCK, not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    me = Holder.here()
    while not _taken(lock, me):
        _remove_left_behind(lock)
    ended = threading.Event()
    threading.Thread(target=_beat, args=(lock, me, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        with suppress(OSError):
            if Holder.read(lock) == me:
                lock.unlink()
            if is_new:
                folder.rmdir()  # stays if the run left anything there


def is_held(folder: Path) -> bool:
    """Whether a launch seems to write to `folder` just now; asked at once, by the lock's time where only time can tell."""
    lock = folder / LOCK
    try:
        if not lock.is_file():
            return False
        holder = Holder.read(lock)
        if holder is not None and holder.processes == _processes():
            return holder.runs()
        return time.time() - _touched(lock) < STALE_SECONDS
    except (OSError, OverflowError, TypeError):  # released meanwhile, or no lock of ours
        return False


def _taken(lock: Path, me: Holder) -> bool:
    """Write the lock unless there is one. A link appears whole or not at all, on network file systems too."""
    part = lock.with_name(f".{lock.name}.{me.host}.{me.pid}")
    part.write_text(json.dumps(asdict(me)) + "\n", encoding="utf-8")
    try:
        os.link(part, lock)
        return True
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        with suppress(FileExistsError), lock.open("x", encoding="utf-8") as file:
            file.write(json.dumps(asdict(me)) + "\n")
            return True
        return False
    finally:
        part.unlink(missing_ok=True)


def _remove_left_behind(lock: Path) -> None:
    """Remove a lock whose process is gone. Raises `RunLocked` if it is not."""
    with suppress(FileNotFoundError):  # released meanwhile
        holder = Holder.read(lock)
        is_here = holder is not None and holder.processes == _processes()
        if holder.runs() if holder is not None and is_here else _is_touched(lock):
            raise RunLocked(_sentence(lock, holder, is_here=is_here))
        aside = lock.with_name(f".{lock.name}.stale.{os.getpid()}")
        os.rename(lock, aside)  # only one of several launches that wait can do so
        if Holder.read(aside) != holder:  # it had been taken over in between
            with suppress(FileExistsError):
                os.link(aside, lock)
        aside.unlink()
        say(f"{lock}: left by a launch that was killed ({_named(holder)}), and taken over")


def _is_touched(lock: Path) -> bool:
    """Whether a lock's time moves on, or is recent and moves on within `STALE_SECONDS`."""
    first = _touched(lock)
    probe = lock.with_name(f".{lock.name}.probe.{os.getpid()}")
    probe.touch()  # its time is from the same clock as the lock's
    age = probe.stat().st_mtime - first
    probe.unlink()
    if age < STALE_SECONDS:
        say(f"{lock}: waiting up to {STALE_SECONDS:.0f} s for a sign of the launch that holds it")
    deadline = time.monotonic() + max(0.0, STALE_SECONDS - max(0.0, age))
    while time.monotonic() < deadline:
        if _touched(lock) != first:
            return True
        time.sleep(min(1.0, BEAT_SECONDS))
    return False


def _touched(lock: Path) -> float:
    with lock.open("rb") as file:  # opening, a network file system asks its server for the file's time anew
        return os.fstat(file.fileno()).st_mtime


def _beat(lock: Path, me: Holder, ended: threading.Event) -> None:
    while not ended.wait(BEAT_SECONDS):
        with suppress(OSError):
            if Holder.read(lock) == me:
                os.utime(lock)


def _sentence(lock: Path, holder: Holder | None, *, is_here: bool) -> str:
    fix = "wait for it or stop it" if is_here else f"wait for it or stop it; if it does not run any more, remove {lock}"
    return f"`output_dir` {lock.parent}: another launch writes there just now ({_named(holder)}): {fix}"


def _named(holder: Holder | None) -> str:
    return f"process {holder.pid} on {holder.host}" if holder else "unknown process"


def _processes() -> str:
    """What tells this machine's table of processes, since its start, from every other; on Linux a container has its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return platform.node()


def _began(pid: int) -> str:
    """When a process began, in ticks since its machine did; empty where the system does not say."""
    try:
        # The second field, the command's name in brackets, may hold spaces.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except OSError:
        return ""
