"""Exceptions of signal handlers at every place where Python may run one.

A handler runs between two opcodes, between which ones depends on the version of Python. A trace function raises before
each of them in turn, so that no test waits for the right moment.
"""

import itertools
import sys
import threading


class Interrupted(Exception):
    """Exception that a caller's own signal handler raises."""


class _OpcodeInterrupt:
    """Interrupt before opcode number `moment` that the `functions` of a module execute."""

    def __init__(self, moment, module, functions):
        self.moment, self.file, self.functions, self.executed = moment, module.__file__, functions, 0

    def __enter__(self):
        self.previous = sys.gettrace()
        sys.settrace(self._call)

    def __exit__(self, *_):
        sys.settrace(self.previous)

    def _call(self, frame, event, argument):
        if frame.f_code.co_filename == self.file and frame.f_code.co_name in self.functions:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return self._opcode
        return None

    def _opcode(self, frame, event, argument):
        if event == "opcode":
            self.executed += 1
            if self.executed == self.moment + 1:
                raise Interrupted
        return self._opcode


def interrupted_calls(call, module, functions):
    """Interrupt a call before each opcode of a module's functions in turn. Yield the opcode's number after each."""
    for moment in itertools.count():
        with _OpcodeInterrupt(-1, module, functions):
            call()  # Python 3.13 reports the opcodes of a function from its second traced call on
        interrupt = _OpcodeInterrupt(moment, module, functions)
        try:
            with interrupt:
                call()
        except Interrupted:
            yield moment
        else:
            assert interrupt.executed <= moment, "the interrupt was lost"
            return


def ends(function):
    """Return True if a function ends in another thread within a minute."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()
