"""Limits of a process that handles what a model wrote, and a wait for its reply. POSIX only."""

from __future__ import annotations

import os
import select
import time


def limit_memory(additional_bytes: int) -> None:
    """Let this process allocate `additional_bytes` more than it has. Without /proc (macOS) there is no limit."""
    import resource

    if os.path.exists("/proc/self/statm"):
        with open("/proc/self/statm") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + additional_bytes, used + additional_bytes))


def limit_cpu(seconds: float) -> None:
    """End this process by SIGXCPU after `seconds` more of CPU time, rounded up."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 1, hard))


def readable(descriptor: int, seconds: float) -> bool:
    """Return True if a pipe has data, or has ended, within `seconds`."""
    # Not `select`, which fails for descriptors over 1023.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(seconds, 0) * 1000))
