"""The log of a run in its `trainer_state.json`, read one entry at a time: `read_log(file)`.

The log of 100,000 steps is a file of 150 MB, which as a list of dictionaries takes ten times the memory of its numbers. Here
each entry becomes a number in the column of its metric before the next one is read.
"""

from __future__ import annotations

import io
import json
import math
import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from grpo_recipes.runs.files import NUMBER, STATE_BYTES, STEP, RunError, Shape, mismatch
from grpo_rewards.errors import one_line
from grpo_rewards.files import UnreadableFile, open_ordinary

_CHARACTERS = 1 << 18
_VALUE_CHARACTERS = 1 << 23  # of one entry of a log: the largest real ones have some thousand
_METRICS = 20_000  # each has a column: as many names as entries would take many times the file
_SPACE = re.compile(r"[ \t\r\n]*")
_ENTRY: Shape = {"step": STEP}
_KEYS: Mapping[Any, Shape] = {"log_history": [_ENTRY], "global_step": STEP}
_IN_NUMBERS = "0123456789+-.eE"  # a number that is followed by one of these has not been read to its end
_FIX = "restore or remove the file"


@dataclass
class Log:
    """The numbers that a run logged, by metric in order of appearance: at which step, and what; NaN and infinities left out.

    `last_step` is the highest step of an entry, 0 without any; `max_steps` how long the run is to be, 0 if it does not say.
    """

    metrics: dict[str, tuple[array[int], array[float]]] = field(default_factory=dict)
    last_step: int = 0
    max_steps: int = 0

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add an entry, which has a `step`."""
        step = entry["step"]
        self.last_step = max(self.last_step, step)
        for key, value in entry.items():
            column = self.metrics.get(key)
            if column is None:
                if len(self.metrics) == _METRICS:
                    raise ValueError(f"its entries have more than {_METRICS:,} names")
                column = self.metrics[key] = (array("q"), array("d"))
            if (type(value) is float or NUMBER.holds(value)) and math.isfinite(value):
                column[0].append(step)
                column[1].append(value)


def read_log(path: Path, tick: Callable[[], None] = lambda: None) -> Log:
    """The log in a `trainer_state.json`.

    Args:
        path: the file.
        tick: called after each entry, where a caller may raise to stop.

    Raises:
        FileNotFoundError: there is no such file.
        RunError: it is damaged, or holds something else.
    """
    log = Log()
    found = False
    with _reader(path) as reader:
        for key, value in reader.members():
            if isinstance(value, _Items):
                found = True
                for number, entry in enumerate(value):
                    if problem := mismatch(entry, _ENTRY, f"log_history[{number}]"):
                        raise RunError(f"{path}: {problem}; {_FIX}")
                    log.add(entry)
                    tick()
            elif problem := mismatch(value, _KEYS[key], key) if key in _KEYS else None:
                raise RunError(f"{path}: {problem}; {_FIX}")
            elif key == "max_steps" and STEP.holds(value):
                log.max_steps = value
    if not found:
        raise RunError(f"{path}: it has no `log_history`; {_FIX}")
    return log


def add_live(log: Log, path: Path, tick: Callable[[], None] = lambda: None) -> bool:
    """Add to a log what a run has logged since, from its `_log.jsonl`. Returns whether there is such a file.

    A last line that is still being written is left for the next reader. Raises `RunError` if the file is damaged.
    """
    with suppress(FileNotFoundError):
        known = log.last_step
        for entry in _live_entries(path):
            if STEP.holds(most := entry.pop("max_steps", None)):
                log.max_steps = most
            elif entry["step"] > known:
                log.add(entry)
            tick()
        return True
    return False


def first_step(path: Path) -> int | None:
    """Return the step that a launch began after, which the first line of its `_log.jsonl` holds; None if it says
    nothing.

    Raises `RunError` if the line is damaged.
    """
    with suppress(FileNotFoundError):
        entry = next(_live_entries(path), {})
        return entry["step"] if "max_steps" in entry else None
    return None


def _live_entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a `_log.jsonl`. Raises FileNotFoundError, or `RunError` if the file is damaged."""
    with _opened(path, errors="replace") as file:
        for number, line in enumerate(iter(lambda: file.readline(_VALUE_CHARACTERS), ""), start=1):
            if not line.endswith("\n"):
                if len(line) == _VALUE_CHARACTERS:
                    raise RunError(f"{path}: line {number} has more than {len(line):,} characters; {_FIX}")
                break
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RunError(f"{path}: line {number} can't be read as JSON ({one_line(error)}); {_FIX}") from error
            if problem := mismatch(entry, _ENTRY, f"line {number}"):
                raise RunError(f"{path}: {problem}; {_FIX}")
            yield entry


def read_step(path: Path) -> int:
    """The `global_step` of a `trainer_state.json`, as transformers writes it before the log, which is not read; else 0.

    Raises FileNotFoundError, or `RunError` if the file is damaged up to there.
    """
    with _reader(path) as reader:
        for key, value in reader.members():
            if isinstance(value, _Items):
                break
            if key == "global_step":
                if problem := mismatch(value, STEP, key):
                    raise RunError(f"{path}: {problem}; {_FIX}")
                return value
    return 0


@contextmanager
def _reader(path: Path) -> Iterator[_Reader]:
    """A JSON file that is read in this block, in which what is wrong with the file becomes a `RunError`."""
    with _opened(path) as file:
        yield _Reader(file, path)


@contextmanager
def _opened(path: Path, errors: str = "strict") -> Iterator[TextIO]:
    """Open a text file of at most `STATE_BYTES` for a block, in which what is wrong with the file becomes a `RunError`.

    Raises FileNotFoundError if there is no such file.
    """
    try:
        with io.TextIOWrapper(open_ordinary(path, STATE_BYTES), encoding="utf-8", errors=errors) as file:
            yield file
    except (FileNotFoundError, RunError):
        raise
    except UnreadableFile as error:
        raise RunError(f"{error}; {_FIX}") from error
    except (ValueError, RecursionError, OSError) as error:
        raise RunError(f"{path}: can't be read as JSON ({one_line(error)}); {_FIX}") from error


class _Reader:
    """A JSON text that is decoded value by value, with no more than one of them in memory."""

    def __init__(self, file: TextIO, path: Path) -> None:
        self._file, self._path = file, path
        self._text, self._at, self._is_over = "", 0, False
        self._decoder = json.JSONDecoder()

    def members(self) -> Iterator[tuple[Any, Any]]:
        """Yield the members of an object; the log as `_Items`, of which what the caller leaves is skipped."""
        if self._next() != "{":
            value = self.value()
            kind = "a list" if isinstance(value, list) else json.dumps(value)[:40]
            raise RunError(f"{self._path}: it is {kind}, not an object; {_FIX}")
        self._take("{")
        if self._next() == "}":
            return
        while True:
            key = self.value()
            self._take(":")
            if key == "log_history" and self._next() == "[":
                items = _Items(self)
                yield key, items
                for _ in items:
                    pass
            else:
                yield key, self.value()
            if self._next() != ",":
                break
            self._take(",")
        self._take("}")
        if self._next():
            raise ValueError("there is more behind its end")

    def value(self) -> Any:
        """Return the next value, whole. Raises ValueError if it has more than `_VALUE_CHARACTERS`."""
        self._next()
        size = _CHARACTERS
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except ValueError:
                if len(self._text) - self._at > _VALUE_CHARACTERS:
                    raise ValueError(f"one value has more than {_VALUE_CHARACTERS:,} characters") from None
                if not self._fill(size):
                    raise
            else:
                goes_on = end == len(self._text) or self._text[end] in _IN_NUMBERS
                if not goes_on or not self._fill(size):
                    self._at = end
                    return value
            size *= 2  # so that a long value is not decoded over and over

    def _next(self) -> str:
        """The next character that is no space; "" at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None, "it matches nothing at all too"
            self._at = space.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._fill(_CHARACTERS):
                return ""

    def _take(self, expected: str) -> None:
        if (found := self._next()) != expected:
            raise ValueError(f"expected {expected!r}, and it is {'cut off' if not found else repr(found)}")
        self._at += 1

    def _fill(self, size: int) -> bool:
        """Read on; what has been decoded is let go. False at the end of the file."""
        more = "" if self._is_over else self._file.read(size)
        self._is_over = not more
        self._text, self._at = self._text[self._at :] + more, 0
        return bool(more)


class _Items:
    """The items of a list, decoded as they are asked for."""

    def __init__(self, reader: _Reader) -> None:
        self._items = self._read(reader)

    def __iter__(self) -> Iterator[Any]:
        return self._items

    @staticmethod
    def _read(reader: _Reader) -> Iterator[Any]:
        reader._take("[")
        if reader._next() != "]":
            yield reader.value()
            while reader._next() == ",":
                reader._take(",")
                yield reader.value()
        reader._take("]")
