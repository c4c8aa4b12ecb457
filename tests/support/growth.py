"""Growth of the cost of a call with its input.

Two lengths are compared, so the speed of the machine does not matter.
"""

import sys
import time

FACTOR = 4

_FLOOR = 2e-3
"""CPU seconds that the cheapest call counts as. The times of calls of microseconds are noise, and differ by version."""


def growth(call, make, length):
    """Return the CPU time of `call(make(FACTOR * length))` in units of `call(make(length))`: FACTOR for a linear one.

    The time includes regular expressions and other functions written in C, whose steps can't be counted.
    """
    return _seconds(call, make(FACTOR * length)) / _seconds(call, make(length))


def growth_of_steps(call, make, length):
    """Return the Python lines of `call(make(FACTOR * length))` in units of `call(make(length))`: equal in each run."""
    return _steps(call, make(FACTOR * length)) / _steps(call, make(length))


def _steps(call, argument):
    """Return the number of lines of Python that a call runs, after a first call that fills its caches."""
    steps = 0

    def count(frame, event, _):
        nonlocal steps
        steps += event == "line"
        return count

    call(argument)
    previous = sys.gettrace()
    sys.settrace(count)
    try:
        call(argument)
    finally:
        sys.settrace(previous)
    return steps


def _seconds(call, argument, repeats=3):
    """Return the least time of several calls. A call that takes long enough not to be noise is made once."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        call(argument)
        best = min(best, time.process_time() - start)
        if best > 1:
            break
    return max(best, _FLOOR)
