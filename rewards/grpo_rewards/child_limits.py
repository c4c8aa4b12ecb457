"""Limits that a forked child sets on itself, and the parent's wait for its answer: POSIX only."""

from __future__ import annotations

import os
import select
import time


def limit_memory(additional_bytes: int) -> None:
    """Let this process allocate `additional_bytes` on top of its address space of now; no limit without /proc (macOS)."""
    import resource

    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + additional_bytes, used + additional_bytes))


def limit_cpu(seconds: float) -> None:
    """Let this process compute for `seconds` from now, rounded up; then SIGXCPU ends it."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 1, hard))


def readable(descriptor: int, seconds: float) -> bool:
    """Return True if a pipe can be read, or has ended, within `seconds`."""
    # poll, since select refuses descriptors over 1023.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(seconds, 0) * 1000))
