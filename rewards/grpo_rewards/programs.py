"""A reward that runs a program against tests: in a sandbox, with the verdict given outside of it.

| the program | pay |
|---|---|
| passes every test of its row | 1 (`pay`) |
| passes some | their share of `pay`; 0 under `rule: all` |
| passes none, is missing, or can't be loaded | 0 |
| its row has no test, or one that can't be used | None |

The tests of a row are assertions, or pairs of input and output. An assertion is split (`assertions`): only its calls
are evaluated beside the program, and their values are judged here. The output of a pair is compared here. No expected
value enters the sandbox (`sandbox.run`), so that a program can pass a test only by what it returns or prints.

The file is not called unit_tests.py because `grpo_rewards.unit_tests` is the reward itself, which a submodule of that
name would hide.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar

from grpo_rewards.assertions import MAX_CHARS, Assertion, Unreadable, read_assertions, read_value
from grpo_rewards.completions import completion_text, fenced_blocks, needed_column
from grpo_rewards.errors import UserError, shortened
from grpo_rewards.reward import BaseReward, Kind, Scored, TaggedReward, check_choice, check_count
from grpo_rewards.sandbox.run import Limits, Outcome, active_mechanisms, described_isolation, run

logger = logging.getLogger(__name__)

MAX_TESTS = 100
"""Number of tests that a row may have."""

WALL_FACTOR = 3
"""Seconds on the clock that the tests of a program may take for each of its seconds of computing."""

_LABELS = ("python", "python3", "py")
_SHOWN_CHARS = 60


@dataclass(frozen=True)
class Pair:
    """Input of a program, and the output that it must print."""

    given: str
    expected: str

    def holds(self, output: str) -> bool:
        """Return True if the output is the expected one, up to white space at the end of each line and of the text."""
        return _without_trailing_space(output) == _without_trailing_space(self.expected)


Tests = tuple[Assertion, ...] | tuple[Pair, ...]


@dataclass(frozen=True)
class Verdict:
    """Verdict on a program.

    Attributes:
        passed: Number of tests that it passes.
        total: Number of tests.
        reason: Reason why it fails the first test that it fails; "" if it passes all.
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

    A row's tests are a list of assertions, a list of mappings `{"input": …, "output": …}`, or a string of either (JSON,
    or lines of `assert`). Values are compared as Python compares literals: `True == 1`, `-0.0 == 0.0`, `[1] != (1,)`,
    NaN equals nothing, and there is no tolerance but the one that an assertion states. An object of a class of the
    program equals nothing. White space at the end of a line or of the whole output does not count.

    The assertions of a row are evaluated in one process, in their order. A test that ends the process, or its time,
    also ends those after it. Each pair starts a process of its own. The time is that of all tests of a program. At the
    limit, what is left fails, and the metric `timeouts` counts it. One call takes at most the time of its different
    programs, each three times `seconds` and the starts of its sandboxes, divided by the number of processors.

    Args:
        extract: place of the program. `fence` is the last fence, `answer_tag` the last answer block (and its fence).
        rule: `share` or `all`.
        pay: score for passing every test.
        seconds: seconds of computing that a program has for its tests; three times as many on the clock.
        memory_mb: megabytes of address space that each process of a program has.
        isolation: `best` uses what the system offers; `strict` refuses a system without namespaces (docs/security.md).
        gold_column: name of the dataset column with the tests.
        solution_column: name of the optional dataset column with a right program, which `grpo-rewards check` runs.
        tags: names of the reasoning tag and the answer tag.
        prefilled: name of the reasoning tag if the prompt already opens it.
        prefix: prefix of the logged column `verdict`, for runs in which two rewards log it.
        name: name of the reward in logs.
    """

    kind: ClassVar[Kind] = "correctness"
    payments: ClassVar[tuple[str, ...]] = ("pay",)
    gold_forms: ClassVar[str] = (
        "a row's tests are assertions, each of which compares a call with a literal as in `assert f(1) == 2`, or pairs "
        "{input, output}"
    )

    extract: str = "fence"
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
        check_choice(self.extract, "extract", ("fence", "answer_tag"))
        check_choice(self.rule, "rule", ("share", "all"))
        check_choice(self.isolation, "isolation", ("best", "strict"))
        check_count(self.seconds, "seconds")
        check_count(self.memory_mb, "memory_mb", 64)

    @property
    def highest_pay(self) -> float:
        """Pay for passing every test, or 0 if that is negative."""
        return max(self.pay, 0.0)

    @property
    def columns_read(self) -> tuple[str, ...]:
        """Name of the dataset column with the tests."""
        return (self.gold_column,)

    @property
    def looks_at(self) -> str:
        """Clause for messages that says where in a completion the reward looks for a program."""
        return "in the last fence" if self.extract == "fence" else f"in the last <{self.tags[1]}> block"

    def unparsed_note(self, completions: Sequence[Any]) -> str | None:
        """Return a sentence if no completion has a program where this reward looks for one; else None."""
        is_found = any(self._program(completion) is not None for completion in completions)
        return None if is_found else f"no completion has a program {self.looks_at}"

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
        rows = [_tests_text(row) for row in needed_column(self, "gold_column", columns, completions)]
        tests = [_read_tests(row) for row in rows]
        programs = [self._program(completion) for completion in completions]
        jobs: dict[tuple[str, str], Tests] = {}
        for program, row, read in zip(programs, rows, tests, strict=True):
            if program is not None and not isinstance(read, str):
                jobs[program, row] = read
        verdicts = self._run(jobs)
        found: list[Verdict | str] = []  # or the reason why there is none
        for program, row, read in zip(programs, rows, tests, strict=True):
            if isinstance(read, str):
                found.append(read)
            else:
                found.append(_NO_PROGRAM if program is None else verdicts[program, row])
        described = [one if isinstance(one, str) else one.describe() for one in found]
        pay = [None if isinstance(one, str) else self._pay(one) for one in found]
        return Scored(pay, {"verdict": described}, _metrics(found, len(jobs)))

    def _pay(self, verdict: Verdict) -> float:
        if verdict.passed == verdict.total:
            return self.pay
        return self.pay * verdict.passed / verdict.total if self.rule == "share" and verdict.total else 0.0

    def _program(self, completion: Any) -> str | None:
        """Return the program of a completion, or None if it has none."""
        text = self._outside_thinking(completion_text(completion))
        if self.extract == "answer_tag":
            before, end, _ = text.rpartition(f"</{self.tags[1]}>")
            _, start, text = before.rpartition(f"<{self.tags[1]}>")
            if not end or not start:
                return None
        blocks = fenced_blocks(text)
        # An unmarked fence behind the program is mostly what it prints.
        programs = [body for label, body in blocks if label in _LABELS] or [body for label, body in blocks if not label]
        if programs:
            return programs[-1]
        return text if self.extract == "answer_tag" and text.strip() else None

    # --- Runs ---

    def _run(self, jobs: Mapping[tuple[str, str], Tests]) -> dict[tuple[str, str], Verdict]:
        """Return the verdict on each program. As many run at once as this process has processors."""
        if not jobs:
            return {}
        checked_isolation(self.isolation)
        pool = ThreadPoolExecutor(min(len(jobs), _processors()))
        try:
            runs = {key: pool.submit(self._judge, key[0], tests) for key, tests in jobs.items()}
            return {key: running.result() for key, running in runs.items()}
        finally:  # after an error, programs that wait are not started
            pool.shutdown(cancel_futures=True)

    def _judge(self, program: str, tests: Tests) -> Verdict:
        if pairs := [test for test in tests if isinstance(test, Pair)]:
            return self._judge_pairs(program, pairs)
        return self._judge_assertions(program, [test for test in tests if isinstance(test, Assertion)])

    def _outcome(self, program: str, given: str, seconds: float, wall_seconds: float) -> Outcome:
        limits = Limits(
            cpu_seconds=max(1, math.ceil(seconds)), wall_seconds=wall_seconds, memory_bytes=self.memory_mb * 2**20
        )
        return run(program, given, limits)

    def _judge_assertions(self, program: str, tests: Sequence[Assertion]) -> Verdict:
        calls = [call for test in tests for call in test.calls]
        request = json.dumps({"program": program, "calls": calls})
        outcome = self._outcome(_harness(), request, self.seconds, WALL_FACTOR * self.seconds)
        lines = iter(outcome.stdout.decode("utf-8", "replace").split("\n")[:-1])  # the last one may be cut off
        passed, reason = 0, ""
        for test in tests:
            try:
                values = [_next_value(lines, outcome) for _ in test.calls]
                holds, why = test.holds(values), "fails"
            except Unreadable as error:
                holds, why = False, str(error)
            passed += holds
            if not holds:
                reason = reason or f"`{shortened(test.source, _SHOWN_CHARS)}` {why}"
        return Verdict(passed, len(tests), reason, outcome.ended == "timeout")

    def _judge_pairs(self, program: str, tests: Sequence[Pair]) -> Verdict:
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
                return Verdict(passed, len(tests), reason, out_of_time=True)
            if min(seconds, wall_seconds) <= 0 and number < len(tests):
                return Verdict(passed, len(tests), reason or f"pair {number + 1} is out of time", out_of_time=True)
            if reason and self.rule == "all":
                break
        return Verdict(passed, len(tests), reason)


def _metrics(found: Sequence[Verdict | str], programs: int) -> dict[str, float]:
    verdicts = [one for one in found if isinstance(one, Verdict)]
    metrics = {"programs": float(programs), "unscorable": float(len(found) - len(verdicts))}
    if verdicts:
        metrics["passed"] = sum(one.passed == one.total for one in verdicts) / len(verdicts)
        metrics["timeouts"] = float(sum(one.out_of_time for one in verdicts))
    return metrics


def _next_value(lines: Iterator[str], outcome: Outcome) -> Any:
    """Return the value of the next call. Raise `Unreadable` if it has none, or the program ended before it."""
    line = next(lines, None)
    if line is None:
        raise Unreadable("ends its process" if outcome.ended == "exited" else _ended(outcome))
    return read_value(line)


def _ended(outcome: Outcome) -> str:
    """Return a phrase on the end of a program that gave no right answer."""
    if outcome.ended == "timeout":
        return "is out of time"
    if outcome.ended == "output":
        return "prints without end"
    if outcome.ended == "killed" or outcome.code != 0:
        return f"ends with code {outcome.code}"
    return "fails"


_NO_PROGRAM = Verdict(0, 1, "no program")


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
        raise UserError(
            f"isolation strict needs namespaces, and this system offers {described}: allow user namespaces, or set "
            "isolation to best"
        )
    logger.log(logging.INFO if is_strict else logging.WARNING, "programs run under: %s", described)
    return described


@cache
def _harness() -> str:
    return (Path(__file__).parent / "sandbox" / "harness.py").read_text(encoding="utf-8")


def _processors() -> int:
    """Return the number of processors for this process, of which every process of a launch takes its part."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, available // (int(ranks) if ranks.isdigit() and int(ranks) > 0 else 1))


def _without_trailing_space(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


# --- Tests of a row ---


def _tests_text(row: Any) -> str:
    """Return the tests of a row as text: as they are, or as JSON."""
    row = row.tolist() if hasattr(row, "tolist") else row  # an array of numpy or pyarrow
    if isinstance(row, str):
        return row
    try:
        return json.dumps(row)
    except (TypeError, ValueError, RecursionError):
        return ""


@lru_cache(maxsize=256)
def _read_tests(text: str) -> Tests | str:
    """Return the tests in a text, or the reason why they can't be used."""
    if len(text) > MAX_CHARS:
        return f"tests of more than {MAX_CHARS:,} characters"
    try:
        tests = _tests(text)
    except ValueError as error:
        return str(error)
    if not tests:
        return "no tests"
    return tests if len(tests) <= MAX_TESTS else f"{len(tests)} tests, more than {MAX_TESTS}"


def _tests(text: str) -> Tests:
    if not text.lstrip().startswith(("[", "{", "null")):
        return tuple(read_assertions(text))
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError("tests that are neither assertions nor JSON") from error
    if entries is None or entries == []:
        return ()
    if isinstance(entries, list) and all(isinstance(entry, str) for entry in entries):
        return tuple(assertion for entry in entries for assertion in read_assertions(entry))
    if isinstance(entries, list) and all(_is_pair(entry) for entry in entries):
        return tuple(Pair(entry["input"], entry["output"]) for entry in entries)
    raise ValueError("tests that are neither all assertions nor all pairs {input, output} of strings")


def _is_pair(entry: Any) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("input", "output"))


unit_tests = UnitTests()
