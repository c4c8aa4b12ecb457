"""Ctrl-C while a program still imports its libraries, and closed terminals.

Nothing here imports a library at the top, because Ctrl-C must be handled before the imports that take seconds.
"""

from __future__ import annotations

import os
import select
import signal
from types import FrameType

INTERRUPTED = 130
"""Exit code that a shell reports for a program ended by Ctrl-C."""

NOTHING_DONE = "nothing was trained or saved, and the same command starts again"


def leave_on_interrupt() -> None:
    """Make Ctrl-C end the process at once, with one line."""
    signal.signal(signal.SIGINT, _leave)


def raise_on_interrupt() -> None:
    """Make Ctrl-C raise `KeyboardInterrupt`, which is Python's default."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def drop_closed_outputs() -> None:
    """Point standard output and error to /dev/null if their terminal was closed or the reader of their pipe has ended.

    The next message would otherwise raise `OSError`, perhaps just before a save.
    """
    for descriptor in (1, 2):
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0)):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, descriptor)
            os.close(null)


def heeds_hangup() -> bool:
    """Return True unless SIGHUP is ignored, which is how `nohup` starts a process that is to outlive its terminal."""
    return signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN


def _leave(signum: int, frame: FrameType | None) -> None:
    # Not print or sys.exit: the signal may come in the middle of either, and an import would catch the exception.
    if os.environ.get("RANK", "0") == "0":
        os.write(2, f"\nstopped by Ctrl-C: {NOTHING_DONE}\n".encode())
    os._exit(INTERRUPTED)
