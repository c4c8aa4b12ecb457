"""Ctrl-C while a program still imports its libraries, which takes seconds. Nothing here imports any of them."""

import os
import signal
from types import FrameType

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended
NOTHING_DONE = "nothing was trained or saved, and the same command starts again"


def leave_on_interrupt() -> None:
    """From here on Ctrl-C ends the process at once, with one sentence."""
    signal.signal(signal.SIGINT, _leave)


def raise_on_interrupt() -> None:
    """From here on Ctrl-C raises `KeyboardInterrupt`, as Python has it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(signum: int, frame: FrameType | None) -> None:
    # Not print or sys.exit: the signal may come in the middle of either, and an import would catch the exception.
    if os.environ.get("RANK", "0") == "0":
        os.write(2, f"\nstopped by Ctrl-C: {NOTHING_DONE}\n".encode())
    os._exit(INTERRUPTED)
