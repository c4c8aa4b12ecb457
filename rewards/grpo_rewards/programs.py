"""A reward that runs a program against tests: in a sandbox, with the verdict given outside of it.

| the program | pay |
|---|---|
| passes every test of its row | 1 (`pay`) |
| passes some | their share of `pay`; 0 under `rule: all` |
| passes none, is missing, or can't be loaded | 0 |
| its row has no test, or one that can't be used | None |

The tests of a row are assertions, pairs of input and output, or calls with their values. An assertion is split
(`assertions`): only its calls are evaluated beside the program, and their values are judged here. The output of a pair
is compared here. No expected value enters the sandbox (`sandbox.run`), so that a program can pass a test only by what
it returns or prints.

The file is not called unit_tests.py because `grpo_rewards.unit_tests` is the reward itself, which a submodule of that
name would hide.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar

from grpo_rewards.assertions import MAX_CHARS, Assertion, Unreadable, read_assertions, read_tests, read_value
from grpo_rewards.completions import check_rows, completion_text, fenced_blocks, needed_column
from grpo_rewards.errors import UserError, shortened
from grpo_rewards.reward import BaseReward, Kind, Scored, TaggedReward, check_choice, check_count
from grpo_rewards.sandbox.run import Limits, Outcome, active_mechanisms, described_isolation, run

logger = logging.getLogger(__name__)

MAX_TESTS = 100
"""Number of tests of a row that count, from the first."""

MAX_JSON_CHARS = 1_000_000
"""Number of characters that the tests of a row may have as JSON. Code may have fewer (`assertions.MAX_CHARS`)."""

WALL_FACTOR = 3
"""Seconds on the clock that the tests of a program may take for each of its seconds of computing."""

_HARNESS = Path(__file__).parent / "sandbox" / "harness.py"
_LABELS = ("python", "python3", "py")
_SHOWN_CHARS = 60
_SETUP_COLUMNS = ("test_imports", "test_setup_code")  # MBPP's
# A number with this many decimals is rounded.
_ROUNDED = re.compile(r"-?\d{1,20}\.(\d{6,20})", re.ASCII)
_DECIMAL = re.compile(r"-?\d{1,20}(?:\.\d{1,30})?(?:[eE][+-]?\d{1,2})?", re.ASCII)


@dataclass(frozen=True)
class Pair:
    """Input of a program, and the output that it must print."""

    given: str
    expected: str

    def holds(self, output: str) -> bool:
        """Return True if the output is the expected one, line by line.

        White space at the end of a line and of the text does not count, as in the evaluation of APPS. APPS also takes
        numbers within a relative error of 1e-5, which makes 100001 of 100000. Here only a number with six decimals or
        more is rounded: any number within half a unit of its last decimal equals it.
        Source: https://github.com/hendrycks/apps/blob/main/eval/testing_util.py
        """
        printed, expected = _without_trailing_space(output), _without_trailing_space(self.expected)
        return len(printed) == len(expected) and all(map(_is_same_line, printed, expected))


@dataclass(frozen=True)
class Returned:
    """Call of a function of the program, and the values that it may return.

    Attributes:
        source: call as in the tests.
        calls: expression to evaluate beside the program.
        accepted: values of which it must return one. A tuple counts as a list, because JSON has none.
        setup: statements to run before the call.
    """

    source: str
    calls: tuple[str]
    accepted: tuple[Any, ...]
    setup: str = ""

    def holds(self, values: Sequence[Any]) -> bool:
        """Return True if the value of the call is accepted."""
        value = _with_lists(values[0])
        return any(value == accepted for accepted in self.accepted)


_Job = tuple[str, tuple[str, ...]]
"""Program, and the tests of its row as texts."""

Tests = tuple[Assertion, ...] | tuple[Pair, ...] | tuple[Returned, ...]


@dataclass(frozen=True)
class ProgramVerdict:
    """Verdict on a program.

    Attributes:
        passed: number of tests that it passes.
        total: number of tests.
        reason: reason for the first failed test; "" if it passes all.
        out_of_time: True if it was stopped at its limit of time.
    """

    passed: int
    total: int
    reason: str = ""
    out_of_time: bool = False

    def describe(self) -> str:
        """Return a phrase on the verdict."""
        if self.passed == self.total:
            return f"passes all of {self.total}"
        return f"passes {self.passed} of {self.total}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class UnitTests(TaggedReward):
    """Share of its row's tests that a Python program passes, which is run in a sandbox.

    | the program | pay |
    |---|---|
    | passes every test of its row | 1 (`pay`) |
    | passes some | their share of `pay`; 0 under `rule: all` |
    | passes none, is missing, or can't be loaded | 0 |
    | its row has no test, or one that can't be used | None |

    The program is the last closed fence outside the thinking that is marked `python`, or the last unmarked one if none
    is. It has Python's standard library, no network, and an empty folder.

    A row's tests are one of these, also as JSON. Of more than 100, the first 100 count.

    | tests | as in |
    |---|---|
    | code with `assert`, or a list of it; the columns `test_imports` and `test_setup_code` run before it | MBPP |
    | code with `def check(candidate)`; the column `entry_point` names the function | HumanEval |
    | `{"inputs": […], "outputs": […]}` of standard input and output | APPS, TACO |
    | the same with `fn_name`: lists of arguments, and the values to return | APPS, TACO |
    | a list of mappings `{"input": …, "output": …}` of standard input and output | – |

    Values are compared as Python compares literals: `True == 1`, `-0.0 == 0.0`, `[1] != (1,)`, NaN equals nothing, and
    there is no tolerance but the one that an assertion states. An object of a class of the program equals nothing.
    White space at the end of a line or of the whole output does not count. A number that the expected output writes
    with six decimals or more equals any number within half a unit of its last decimal. Of a row's assertions, those
    that can't be judged outside of the program are left out; a row without any other is None.

    The assertions of a row are evaluated in one process, in their order. A test that ends the process, or its time,
    also ends those after it. Each pair starts a process of its own. The time is that of all tests of a program. At the
    limit, what is left fails, and the metric `timeouts` counts it. One call takes at most the time of its different
    programs, each three times `seconds` and the starts of its sandboxes, divided by the number of processors.

    Args:
        rule: `share` or `all`.
        pay: score for passing every test.
        seconds: seconds of computing that a program has for its tests; three times as many on the clock.
        memory_mb: megabytes of address space that each process of a program has.
        isolation: `best` uses what the system offers; `strict` refuses a system without namespaces (docs/security.md).
        gold_column: name of the dataset column with the tests.
        solution_column: name of the optional dataset column with a right program, which `grpo-rewards check` runs.
        tags: names of the reasoning tag and the answer tag; only the first is read.
        prefilled: name of the reasoning tag if the prompt already opens it.
        prefix: prefix of the logged column `verdict`, for runs in which two rewards log it.
        name: name of the reward in logs.
    """

    kind: ClassVar[Kind] = "correctness"
    payments: ClassVar[tuple[str, ...]] = ("pay",)
    gold_forms: ClassVar[str] = (
        "a row's tests are assertions, each of which compares a call with a literal as in `assert f(1) == 2`, "
        "`def check(candidate)` with `entry_point`, pairs {input, output}, or {inputs, outputs}"
    )

    rule: str = "share"
    pay: float = 1.0
    seconds: int = 4
    memory_mb: int = 512
    isolation: str = "best"
    gold_column: str = "tests"
    solution_column: str = "solution"
    prefix: str = ""
    name: str = "unit_tests"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self.rule, "rule", ("share", "all"))
        check_choice(self.isolation, "isolation", ("best", "strict"))
        check_count(self.seconds, "seconds")
        check_count(self.memory_mb, "memory_mb", 64)

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """Names of the columns with code that runs before the tests, and with the function that they check."""
        return (*_SETUP_COLUMNS, "entry_point")

    @property
    def looks_at(self) -> str:
        """Clause for messages: where in a completion the reward looks for a program."""
        return "in the last fence"

    def unparsed_note(self, completions: Sequence[Any]) -> str | None:
        """Return a sentence if no completion has a program where this reward looks for one; else None."""
        is_found = any(self._program(completion) is not None for completion in completions)
        return None if is_found else f"no completion has a program {self.looks_at}"

    def gold_note(self, golds: Iterable[tuple[object, Any]]) -> str | None:
        """Return a sentence if some assertions of a row are dropped and others are used; else None."""
        left_out = [(row, reason) for row, tests in golds for reason in _left_out(_tests_text(tests))]
        if not left_out:
            return None
        row, reason = left_out[0]
        count = f"{len(left_out)} tests are left out"
        return f"{count}, because they can't be judged outside of the program ({row}: {reason})"

    def with_unit_pay(self) -> BaseReward | None:
        """Return this reward paying 1 or 0, without its name and prefix, or None if no completion earns anything."""
        return replace(self, pay=1.0, rule="all", prefix="", name=type(self).name) if self.highest_pay > 0 else None

    def prepare(self) -> str | None:
        """Return one line on the isolation that is active on this system.

        Raises:
            ValueError: the system can't run programs, or lacks what `isolation: strict` asks for.
        """
        return f"{self.name} runs programs under: {checked_isolation(self.isolation)}"

    def _scored(self, prompts: Any, completions: Sequence[Any], columns: Mapping[str, Any]) -> Scored:
        given = needed_column(self, "gold_column", columns, completions)
        others = [columns.get(column, [""] * len(completions)) for column in self.optional_columns]
        check_rows(self.name, completions=completions, **dict(zip(self.optional_columns, others, strict=True)))
        rows = [tuple(map(_tests_text, (tests, *row))) for tests, *row in zip(given, *others, strict=True)]
        tests = [_read_tests(*row) for row in rows]
        programs = [self._program(completion) for completion in completions]
        jobs: dict[_Job, Tests] = {}
        for program, row, read in zip(programs, rows, tests, strict=True):
            if program is not None and not isinstance(read, str):
                jobs[program, row] = read
        verdicts = self._run(jobs)
        found: list[ProgramVerdict | str] = []  # or the reason why there is none
        for program, row, read in zip(programs, rows, tests, strict=True):
            if isinstance(read, str):
                found.append(read)
            else:
                found.append(_NO_PROGRAM if program is None else verdicts[program, row])
        described = [one if isinstance(one, str) else one.describe() for one in found]
        pay = [None if isinstance(one, str) else self._pay(one) for one in found]
        given_verdicts = [one for one in found if isinstance(one, ProgramVerdict)]
        metrics = {"programs": float(len(jobs)), "unscorable": float(pay.count(None))}
        if given_verdicts:
            metrics["passed"] = sum(one.passed == one.total for one in given_verdicts) / len(given_verdicts)
            metrics["timeouts"] = float(sum(one.out_of_time for one in given_verdicts))
        return Scored(pay, {"verdict": described}, metrics)

    def _pay(self, verdict: ProgramVerdict) -> float:
        if verdict.passed == verdict.total:
            return self.pay
        return self.pay * verdict.passed / verdict.total if self.rule == "share" and verdict.total else 0.0

    def _program(self, completion: Any) -> str | None:
        """Return the program of a completion, or None without one."""
        blocks = fenced_blocks(self._outside_thinking(completion_text(completion)))
        # An unmarked fence behind the program is mostly what it prints.
        programs = [body for label, body in blocks if label in _LABELS] or [body for label, body in blocks if not label]
        return programs[-1] if programs else None

    # --- Runs ---

    def _run(self, jobs: Mapping[_Job, Tests]) -> dict[_Job, ProgramVerdict]:
        """Return the verdict on each program. As many run at once as this process has processors."""
        if not jobs:
            return {}
        checked_isolation(self.isolation)
        pool = ThreadPoolExecutor(min(len(jobs), _processors()))
        try:
            runs = {}
            for (program, row), tests in jobs.items():
                judge = self._judge_pairs if isinstance(tests[0], Pair) else self._judge_calls
                runs[program, row] = pool.submit(judge, program, tests)  # type: ignore[arg-type]
            return {key: running.result() for key, running in runs.items()}
        finally:  # after an error, programs that wait are not started
            pool.shutdown(cancel_futures=True)

    def _outcome(self, program: str, given: str, seconds: float, wall_seconds: float) -> Outcome:
        limits = Limits(
            cpu_seconds=max(1, math.ceil(seconds)), wall_seconds=wall_seconds, memory_bytes=self.memory_mb * 2**20
        )
        return run(program, given, limits)

    def _judge_calls(self, program: str, tests: Sequence[Assertion | Returned]) -> ProgramVerdict:
        calls: list[tuple[str, str]] = []
        for test in tests:
            calls += zip((test.setup, *[""] * len(test.calls)), test.calls, strict=False)
        request = json.dumps({"program": program, "calls": calls})
        harness = _HARNESS.read_text(encoding="utf-8")
        outcome = self._outcome(harness, request, self.seconds, WALL_FACTOR * self.seconds)
        lines = iter(outcome.stdout.decode("utf-8", "replace").split("\n")[:-1])  # the last one may be cut off
        passed, reason = 0, ""
        for test in tests:
            try:
                values = []
                for _ in test.calls:
                    if (line := next(lines, None)) is None:
                        raise Unreadable("ends its process" if outcome.ended == "exited" else _ended(outcome))
                    values.append(read_value(line))
                holds, why = test.holds(values), "fails"
            except Unreadable as error:
                holds, why = False, str(error)
            passed += holds
            if not holds:
                reason = reason or f"`{shortened(test.source, _SHOWN_CHARS)}` {why}"
        return ProgramVerdict(passed, len(tests), reason, outcome.ended == "timeout")

    def _judge_pairs(self, program: str, tests: Sequence[Pair]) -> ProgramVerdict:
        passed, reason, seconds, wall_seconds = 0, "", float(self.seconds), float(WALL_FACTOR * self.seconds)
        for number, test in enumerate(tests, 1):
            outcome = self._outcome(program, test.given, seconds, wall_seconds)
            seconds -= outcome.cpu_seconds
            wall_seconds -= outcome.wall_seconds  # starts of the sandbox are ours: they depend on the load
            output = outcome.stdout.decode("utf-8", "replace")
            if outcome.ended == "exited" and outcome.code == 0 and test.holds(output):
                passed += 1
            else:
                reason = reason or f"pair {number} {_ended(outcome)}"
            if outcome.ended == "timeout":
                return ProgramVerdict(passed, len(tests), reason, out_of_time=True)
            if min(seconds, wall_seconds) <= 0 and number < len(tests):
                return ProgramVerdict(
                    passed, len(tests), reason or f"pair {number + 1} is out of time", out_of_time=True
                )
            if reason and self.rule == "all":
                break
        return ProgramVerdict(passed, len(tests), reason)


def _ended(outcome: Outcome) -> str:
    """Return a phrase on the end of a program that gave no right answer."""
    if outcome.ended == "timeout":
        return "is out of time"
    if outcome.ended == "output":
        return "prints without end"
    if outcome.ended == "killed" or outcome.code != 0:
        return f"ends with code {outcome.code}"
    return "fails"


_NO_PROGRAM = ProgramVerdict(0, 1, "no program")


@cache
def checked_isolation(required: str) -> str:
    """Return the isolation that is active on this system, in a few words, and log it once.

    Args:
        required: `best` or `strict`.

    Raises:
        UserError: the system can't run programs, or lacks namespaces, which `strict` requires.
    """
    described, is_strict = described_isolation(), "namespaces" in active_mechanisms()
    if required == "strict" and not is_strict:
        problem = f"it needs namespaces, and this system offers {described}"
        raise UserError("`isolation: strict`", problem, "allow user namespaces, or set `isolation: best`")
    logger.log(logging.INFO if is_strict else logging.WARNING, "programs run under: %s", described)
    return described


def _processors() -> int:
    """Return this process's share of the processors: every process of a launch gets the same."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, available // (int(ranks) if ranks.isdigit() and int(ranks) > 0 else 1))


def _without_trailing_space(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _is_same_line(printed: str, expected: str) -> bool:
    if printed == expected:
        return True
    words, wanted = re.split(r"(\s)", printed), re.split(r"(\s)", expected)
    return len(words) == len(wanted) and all(map(_is_same_word, words, wanted))


def _is_same_word(printed: str, expected: str) -> bool:
    rounded = _ROUNDED.fullmatch(expected)
    if printed == expected or rounded is None or not _DECIMAL.fullmatch(printed):
        return printed == expected
    value = Decimal(expected)
    # The last decimals of a number that has all of them are noise.
    noise = abs(value).scaleb(-12)
    return abs(Decimal(printed) - value) <= max(Decimal(5).scaleb(-1 - len(rounded[1])), noise)


def _with_lists(value: Any) -> Any:
    """Return a value with lists for its tuples."""
    if isinstance(value, (list, tuple)):
        return [_with_lists(part) for part in value]
    return {key: _with_lists(part) for key, part in value.items()} if isinstance(value, dict) else value


# --- Tests of a row ---


def _tests_text(row: Any) -> str:
    """Return the tests of a row, or code of another column, as text: as it is, or as JSON. Return "" for none."""
    row = row.tolist() if hasattr(row, "tolist") else row  # an array of numpy or pyarrow
    if isinstance(row, str) or row is None:
        return row or ""
    try:
        return json.dumps(row)
    except (TypeError, ValueError, RecursionError):
        return ""


@lru_cache(maxsize=256)
def _read_tests(text: str, imports: str, setup: str, entry_point: str) -> Tests | str:
    """Return the tests in a text, or the reason why they can't be used. The other texts are those of other columns."""
    try:
        return _tests(text, [*_codes(imports), *_codes(setup)], entry_point)[:MAX_TESTS] or "no tests"
    except (ValueError, RecursionError) as error:
        return str(error)


def _tests(text: str, setup: Sequence[str], entry_point: str) -> Tests:
    entries = _entries(text)
    if isinstance(entries, dict) and {"inputs", "outputs"} <= entries.keys():
        return _of_inputs(entries)
    if _are_codes(entries):
        if sum(map(len, entries)) > MAX_CHARS:
            raise ValueError(f"tests of more than {MAX_CHARS:,} characters")
        return tuple(read_assertions(*setup, *entries, entry_point=entry_point))
    pairs = []
    for entry in entries if isinstance(entries, list) else [None]:
        texts = [entry.get(key) for key in ("input", "output")] if isinstance(entry, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("tests that are neither all assertions nor all pairs {input, output} of strings")
        pairs.append(Pair(*texts))
    return tuple(pairs)


def _entries(text: str) -> Any:
    """Return what a text holds: JSON, or a list of code."""
    if len(text) > MAX_JSON_CHARS:
        raise ValueError(f"tests of more than {MAX_JSON_CHARS:,} characters")
    if not text.lstrip().startswith(("[", "{", "null")):
        return [text]
    try:
        return json.loads(text) or []
    except (ValueError, RecursionError) as error:
        raise ValueError("tests that are neither assertions nor JSON") from error


def _are_codes(entries: Any) -> bool:
    return isinstance(entries, list) and all(isinstance(entry, str) for entry in entries)


def _codes(text: str) -> list[str]:
    """Return the code of a column that is a string or a list of strings."""
    entries = _entries(text)
    if not _are_codes(entries):
        raise ValueError("code before the tests that is neither a string nor a list of strings")
    return entries


def _left_out(text: str) -> list[str]:
    """Return the reasons why some assertions of a row are dropped, if others are not."""
    try:
        entries = _entries(text)
        tests = read_tests(*entries, entry_point="f") if _are_codes(entries) else []
    except ValueError:
        return []
    reasons = [str(test) for test in tests if not isinstance(test, Assertion)]
    return reasons if len(reasons) < len(tests) else []


def _of_inputs(entries: Mapping[str, Any]) -> tuple[Pair, ...] | tuple[Returned, ...]:
    """Return the tests of APPS and TACO: texts, or with `fn_name` the arguments and the values of a function.

    Raises:
        ValueError: there is not one output for each input, or one is of another type.
    """
    inputs, outputs, function = entries["inputs"], entries["outputs"], entries.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("tests without one output for each input")
    if not function:
        return tuple(map(Pair, map(_lines, inputs), map(_lines, outputs)))
    if not isinstance(function, str) or not function.isidentifier() or not all(isinstance(one, list) for one in inputs):
        raise ValueError("tests with `fn_name` that are not lists of arguments of a function")
    returned = []
    for given, expected in zip(_with_whole_keys(inputs), _with_whole_keys(outputs), strict=True):
        # As in the evaluation of APPS, the value may be in a list, and a class Solution may hold the function.
        accepted = (expected, expected[0]) if isinstance(expected, list) and len(expected) == 1 else (expected,)
        found = f"({function} if {function!r} in globals() else Solution().{function})"
        arguments = f"({', '.join(map(repr, given))})"
        returned.append(Returned(function + arguments, (found + arguments,), accepted))
    return tuple(returned)


def _lines(text: Any) -> str:
    """Return the text of an input or output, which may be a list of its lines."""
    if isinstance(text, str):
        return text
    if not _are_codes(text):
        raise ValueError("tests with an input or output that is not text")
    return "\n".join(text)


def _with_whole_keys(value: Any) -> Any:
    """Return a value of JSON with whole numbers for keys, where all keys of a mapping are such numbers as text."""
    if isinstance(value, list):
        return [_with_whole_keys(part) for part in value]
    if not isinstance(value, dict):
        return value
    is_whole = all(re.fullmatch(r"-?\d{1,20}", key, re.ASCII) for key in value)
    return {int(key) if is_whole else key: _with_whole_keys(part) for key, part in value.items()}


unit_tests = UnitTests()
