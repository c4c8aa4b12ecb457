"""Program in the sandbox that evaluates calls of a model's program, and writes down their values.

It is sent to the sandbox as source, and compares nothing: no expected value ever enters the process in which the
model's program runs. A program that takes over this process can only fake what a call returned, as a function can.

The input is `{"program": …, "calls": [[setup, call], …]}`, where a setup is statements to run before the call. The
output is one line of JSON for each call. Values are written down as data of Python's own types. An object of any other
class has no data that its own code would not make up.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

_CONTAINERS: tuple[tuple[Any, str], ...] = ((list, "l"), (tuple, "t"), (set, "s"), (frozenset, "z"))
_EXACT_INTEGERS = 2**53  # JSON readers may keep no more


def encode(value: Any) -> Any:
    """Return JSON that stands for a value of Python's own types, or `["?", class]` for any other.

    An object of a subclass stands for the data that it has from Python's own class: a `Counter` for a dictionary.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__pos__(value)
        return number if -_EXACT_INTEGERS < number < _EXACT_INTEGERS else ["i", hex(number)]
    if isinstance(value, float):
        return ["f", float.__repr__(value)]
    if isinstance(value, complex):
        return ["c", complex.__repr__(value)]
    if isinstance(value, (bytes, bytearray)):
        return ["b", bytes(value).hex()]
    if isinstance(value, dict):
        return ["d", *([encode(key), encode(part)] for key, part in dict.items(value))]
    for kind, mark in _CONTAINERS:
        if isinstance(value, kind):
            return [mark, *map(encode, kind.__iter__(value))]
    return ["?", type(value).__name__]


def main() -> None:
    """Load the program, and evaluate each call in it. What the program prints goes nowhere."""
    request = json.loads(sys.stdin.read())
    results = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    module = types.ModuleType("program")  # not `__main__`, so that the program defines functions and does not start
    sys.modules["program"] = module
    try:
        # Without this file's `annotations` from `__future__`, which would turn the program's annotations into text.
        exec(compile(request["program"], "program.py", "exec", dont_inherit=True), vars(module))
    except BaseException as error:
        os.write(results, json.dumps(["!", type(error).__name__]).encode() + b"\n")
        os._exit(1)
    for setup, call in request["calls"]:
        try:
            exec(setup, vars(module))
            line = encode(eval(call, vars(module)))
        except BaseException as error:
            line = ["!", type(error).__name__]
        os.write(results, json.dumps(line).encode() + b"\n")
    os._exit(0)  # threads of the program do not keep it alive


if __name__ == "__main__":
    main()
