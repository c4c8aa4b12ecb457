"""Growth of the cost of a call with its input.

Two lengths are compared, so the speed of the machine does not matter.
"""

import time

FACTOR = 4


def growth(call, make, length):
    """Return the cost of `call(make(FACTOR * length))` in units of `call(make(length))`: FACTOR for a linear one."""
    return _seconds(call, make(FACTOR * length)) / _seconds(call, make(length))


def _seconds(call, argument, repeats=5):
    """Return the least time of several calls. A call that takes long enough not to be noise is made once."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        call(argument)
        best = min(best, time.process_time() - start)
        if best > 1:
            break
    return max(best, 1e-5)
