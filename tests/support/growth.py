"""How the cost of a call grows with its input: two lengths compared, so that the machine's speed does not matter."""

import time

FACTOR = 4


def growth(call, make, length):
    """Return the cost of `call(make(FACTOR * length))` in units of `call(make(length))`: FACTOR for a linear one."""
    return _seconds(call, make(FACTOR * length)) / _seconds(call, make(length))


def _seconds(call, argument, repeats=5):
    """The least of several times; a call that takes long enough not to be noise is made once."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        call(argument)
        best = min(best, time.process_time() - start)
        if best > 1:
            break
    return max(best, 1e-5)
