"""Calls of tools: arguments that fit the schema, a time limit, a bounded result, and the share of calls that fail.

A sync tool runs in a daemon thread of its own, because Python can't stop a function that does not return: past its time
limit the call is abandoned and its result is dropped. Pools of threads are no alternative: they queue calls behind
those that hang, and delay the end of the program. Rows run at the same time. The calls of one row run one after the
other, as an environment expects. Async tools run together after them, as in TRL.

A tool that never releases the interpreter can't be bounded by a thread: a regular expression that backtracks or
`9**9**9` must run in a process of its own.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from jsonschema import Draft4Validator, Draft202012Validator, validators
from jsonschema.exceptions import best_match
from transformers.utils import get_json_schema

from grpo_recipes.recipe.specs import ToolLimits
from grpo_recipes.tools import ToolError
from grpo_rewards.errors import one_line, shortened

if TYPE_CHECKING:
    from grpo_recipes.tools.loop import Row

CALLS_PER_TURN = 32
"""Number of calls that one turn may make. No task needs more at once, and a policy that repeats itself writes hundreds,
each of which may take the whole time limit."""

ROWS_AT_ONCE = 16
"""Number of rows whose tools run at the same time. Calls that wait for a service overlap. Calls that compute share the
processor, so that more of them at once would only pass their time limits."""

ABANDONED_CALLS = 256
"""Number of abandoned calls that may still run. Each holds a thread and its memory, so no further one is begun."""

STOP_SECONDS = 3.0
"""Time that all calls have once the run is asked to stop."""

CHARACTERS_PER_TOKEN = 32
"""Number of characters kept per token of the limit, before a result is tokenized. Text has about four."""

NAME_CHARACTERS = 200
"""Largest length of a tool's name in a message. The policy may write any name."""

WINDOW = 200
"""Number of calls of all ranks over which the share of faults is computed."""
ENOUGH_CALLS = 50
"""Number of calls before which no share of faults is judged."""
FEW_CALLS = 10
"""Number of calls of one tool before which it is not named because all were mistakes."""

# Time after which a request to stop is noticed.
_POLL_SECONDS = 0.2
_ERROR_CHARACTERS = 200

# Control characters except tab and line feed, lone surrogates, line separators, and marks that reverse the direction
# of text. A tokenizer raises for a surrogate, and TRL prints results to the terminal as they are.
_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True)
class Call:
    """Call of a tool as the policy wrote it."""

    name: str
    arguments: object
    """Parsed arguments."""
    function: Callable[..., Any] | None
    """Tool of this name, or None if there is none."""
    refusal: str = ""
    """Reason why the call can't be made, if the caller has found one already."""


@dataclass(frozen=True)
class Result:
    """Result of a call, as it goes into a message of the role `tool`."""

    name: str
    content: str
    fault: str = ""
    """Reason why the tool itself failed, or "": its time limit, or an exception that is not a `ToolError`."""
    mistake: str = ""
    """Mistake of the policy, or "": a call that can't be made, or a `ToolError`."""
    made: bool = True
    """True if the tool was called."""
    seconds: float = 0.0
    timed_out: bool = False
    """True if the call was abandoned. A sync tool may still run, and change its environment."""
    arguments: object = None
    """Arguments of the call, the very object of the policy's message, by which the result is traced to its call."""


class ToolRunner:
    """Runs the calls of a generation batch's rows within limits.

    Args:
        limits: time limit and length of a result.
        cut: function that shortens a text to `limits.result_tokens` tokens. It runs on the thread of `run`.
        loop: running event loop for async tools. Default: a loop of the runner's own, in a thread. A tool that shares
            a connection with other async functions needs theirs.
        is_stopping: function that returns True once the run is asked to stop, so that calls have a few seconds only.
    """

    def __init__(
        self,
        limits: ToolLimits,
        cut: Callable[[str], str],
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self._limits, self._cut = limits, cut
        self._loop, self._has_own_loop = loop, False
        self._is_stopping, self._stop_by = is_stopping, float("inf")
        self._validators: dict[int, tuple[object, Any]] = {}
        self._stuck: list[_Job] = []

    @property
    def abandoned(self) -> int:
        """Number of calls that passed their limit and still run."""
        self._stuck = [job for job in self._stuck if not job.is_over]
        return len(self._stuck)

    def run(self, calls: Sequence[Sequence[Call]]) -> list[list[Result]]:
        """Return the results of each row's calls, in TRL's order: sync and refused calls, then async calls.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, or another signal's handler raised. Calls that run are abandoned.
        """
        rows = [self._planned(row) for row in calls]
        waiting = deque(row for row in rows if row.groups)
        running: list[_Job] = []
        answers: _Answers = SimpleQueue()
        try:
            while waiting or running:
                stop_by = min(self._stop_by, time.monotonic() + STOP_SECONDS)
                self._stop_by = stop_by if self._is_stopping() else float("inf")
                while waiting and len({id(job.row) for job in running}) < ROWS_AT_ONCE:
                    running += self._begin_next(waiting.popleft(), answers)
                for job, result in self._ended(running, answers):
                    running.remove(job)
                    job.row.results[job.place] = self._finished(job, result)
                    if job.row.groups and not any(other.row is job.row for other in running):
                        running += self._begin_next(job.row, answers)
        finally:
            for job in running:
                self._abandon(job)
        return [[row.results[place] for place in sorted(row.results)] for row in rows]

    def close(self) -> None:
        """End the runner's own event loop. Abandoned calls are left alone."""
        if self._loop is not None and self._has_own_loop:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _planned(self, calls: Sequence[Call]) -> _Row:
        """Return the row of some calls with the results of those that can't be made."""
        row = _Row()
        later: list[_Job] = []
        for number, call in enumerate(calls):
            job = _Job(row, call, number)
            mistake = call.refusal
            if number >= CALLS_PER_TURN:
                mistake = f"Not called: a turn may make {CALLS_PER_TURN} calls."
            elif not mistake and call.function is None:
                mistake = f"Tool {call.name} not found."
            elif not mistake:
                job.arguments, mistake = self._fitting(call)
            if mistake:
                row.results[number] = self._finished(job, job.result(_error(mistake), mistake=mistake, made=False))
            elif inspect.iscoroutinefunction(call.function):
                job.place += len(calls)
                later.append(job)
            else:
                row.groups.append([job])
        if later:
            row.groups.append(later)
        return row

    def _fitting(self, call: Call) -> tuple[Any, str]:
        """Return a copy of the arguments, and the reason why they do not fit the tool's schema, or ""."""
        # The methods of all instances of an environment share a validator.
        function = getattr(call.function, "__func__", call.function)
        if id(function) not in self._validators:
            self._validators[id(function)] = function, arguments_validator(call.function)
        try:
            # The tool may change its arguments, which the transcript and other rows share.
            arguments = json.loads(json.dumps(call.arguments, allow_nan=False))
            error = best_match(self._validators[id(function)][1].iter_errors(arguments))
        except ValueError as fault:  # NaN and infinities, which JSON does not have, and numbers of 4,300 digits
            return None, str(fault)
        except RecursionError:
            return None, "The arguments are nested too deeply."
        if error is None:
            return arguments, ""
        where = error.json_path.removeprefix("$").removeprefix(".")
        return None, f"{where}: {error.message}" if where else error.message

    def _begin_next(self, row: _Row, answers: _Answers) -> list[_Job]:
        """Begin the next sync call of a row, or all its async calls. Return the calls that were begun."""
        jobs = row.groups.popleft()
        for job in jobs:
            job.begun = time.monotonic()
            reason, fault = "", ""
            if row.timed_out:
                # The abandoned call may still change the environment that this call would read.
                reason = "Not called: an earlier call of this turn passed its time limit."
            elif job.begun >= self._stop_by:
                reason = "Not called: the run stops."
            elif (count := self.abandoned) >= ABANDONED_CALLS:
                reason = fault = f"not called, because {count} earlier calls passed their time limit and still run"
            if reason:
                answers.put((job, job.result(_error(reason), fault=fault, made=False)))
                continue
            try:
                if inspect.iscoroutinefunction(job.call.function):
                    job.task = asyncio.run_coroutine_threadsafe(job.run_async(answers), self._running_loop())
                else:
                    Thread(target=job.run, args=(answers,), name="tool", daemon=True).start()
            except RuntimeError as error:  # the system gives no further thread
                answers.put((job, job.failure(error)))
        return jobs

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop, self._has_own_loop = asyncio.new_event_loop(), True
            Thread(target=_serve, args=(self._loop,), name="async tools", daemon=True).start()
        self._loop.set_default_executor(_THREADS)
        return self._loop

    def _ended(self, running: Sequence[_Job], answers: _Answers) -> list[tuple[_Job, Result]]:
        """Wait until a call ends, passes its limit, or the run stops. Return such calls, in the order of ending."""
        limit = self._limits.seconds
        next_limit = min(job.begun for job in running) + limit
        ended: list[tuple[_Job, Result]] = []
        # A signal interrupts this wait, so that its handler runs at once. Calls that have ended are taken before any
        # limit is judged: the process may have been suspended.
        with suppress(Empty):
            ended.append(answers.get(timeout=max(0.0, min(next_limit - time.monotonic(), _POLL_SECONDS))))
            while True:
                ended.append(answers.get_nowait())
        now = time.monotonic()
        answered = {job for job, _ in ended}
        for job in running:
            if job not in answered and now >= min(job.begun + limit, self._stop_by):
                fault = f"no result within {limit:g} s" if now >= job.begun + limit else ""
                content = _error(fault or "The run stops.")
                ended.append((job, job.result(content, fault=fault, seconds=now - job.begun, timed_out=True)))
        # A call that was abandoned earlier may still answer.
        return [(job, result) for job, result in ended if job in running]

    def _finished(self, job: _Job, result: Result) -> Result:
        """Return a result whose text is harmless and within the limit."""
        if result.timed_out:
            job.row.timed_out = True
            self._abandon(job)
        # A subclass of `str` may define slices of its own.
        beginning = slice(self._limits.result_tokens * CHARACTERS_PER_TOKEN)
        text = str.__getitem__(_harmless(str.__getitem__(result.content, beginning)), beginning)
        mistake, fault = (_harmless(shortened(text, _ERROR_CHARACTERS)) for text in (result.mistake, result.fault))
        return replace(result, content=self._cut(text), mistake=mistake, fault=fault)

    def _abandon(self, job: _Job) -> None:
        if job.task is not None:
            job.task.cancel()
        self._stuck.append(job)


class FailureWindow:
    """Faults and mistakes among the last calls of all ranks.

    Every rank feeds the same gathered calls, so that all ranks decide alike.

    Args:
        most: share of the calls that may fail by a fault of the tool.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._calls: deque[tuple[str, str]] = deque(maxlen=WINDOW)
        """Name and fault of each call that was not a mistake."""
        self._all: deque[tuple[str, str]] = deque(maxlen=WINDOW)
        """Name and mistake of each call."""
        self._named: set[str] = set()

    @staticmethod
    def of_rank(rows: Iterable[Row]) -> list[tuple[str, str, str]]:
        """Return name, fault and mistake of the calls of a rank's tools, the last ones only. Ranks gather them."""
        calls: deque[tuple[str, str, str]] = deque(maxlen=WINDOW)
        for row in rows:
            for result in (result for turn in row.turns for result in turn):
                if result.name in row.tools.functions and (result.made or result.mistake):
                    fault, mistake = (
                        shortened(one_line(text), _ERROR_CHARACTERS) for text in (result.fault, result.mistake)
                    )
                    calls.append((result.name, fault, mistake))
        return list(calls)

    def add(self, ranks: Sequence[Sequence[tuple[str, str, str]]]) -> None:
        """Add the calls of one generation batch.

        The last calls of every rank come last, rank by rank: with whole ranks one after the other, a busy last rank
        would push the calls of the others out of the window.
        """
        from_the_end = list(zip_longest(*(reversed(calls) for calls in ranks)))
        for calls in reversed(from_the_end):
            for name, fault, mistake in filter(None, calls):
                self._all.append((name, mistake))
                if not mistake:
                    self._calls.append((name, fault))

    def reason_to_stop(self) -> str:
        """Return why the run must stop, with the tool that failed most and its last error, or ""."""
        faults = [(name, fault) for name, fault in self._calls if fault]
        if len(self._calls) < ENOUGH_CALLS or len(faults) <= self._most * len(self._calls):
            return ""
        ((worst, _),) = Counter(name for name, _ in faults).most_common(1)
        last = next(fault for name, fault in reversed(faults) if name == worst)
        return (
            f"{len(faults) / len(self._calls):.1%} of the last {len(self._calls)} calls of tools failed, most of them "
            f"of `{worst}` (last error: {last}): correct the tool, let it raise `grpo_recipes.ToolError` for mistakes "
            f"of the policy, or raise `tool_limits.failures`, which is {self._most:g}"
        )

    def without_success(self) -> Iterator[str]:
        """Yield a sentence for each tool whose calls in the window were all mistakes, once for each tool."""
        last: dict[str, str] = {}
        calls: Counter[str] = Counter()
        if len(self._all) >= ENOUGH_CALLS:
            last, calls = dict(self._all), Counter(name for name, _ in self._all)
        right = {name for name, mistake in self._all if not mistake}
        for name in last.keys() - right - self._named:
            if calls[name] >= FEW_CALLS:
                self._named.add(name)
                yield (
                    f"all of the last {calls[name]} calls of `{name}` were mistakes of the policy (last: "
                    f"{last[name]}): describe the arguments in its docstring, and look at its results in the report"
                )


# Arguments


def _or_null(keyword: str) -> Callable[..., Iterator[Any]]:
    """Return jsonschema's check of a keyword, passed by None where `get_json_schema` has marked an `Optional`."""
    stock = Draft202012Validator.VALIDATORS[keyword]

    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if not (instance is None and schema.get("nullable")):
            yield from stock(validator, value, instance, schema) or ()

    return check


# An integer is not written `3.0`, which would reach the tool as a float. No call holds an image or a sound.
_Validator = validators.extend(
    Draft202012Validator,
    {keyword: _or_null(keyword) for keyword in ("type", "enum", "anyOf")},
    type_checker=Draft4Validator.TYPE_CHECKER.redefine_many(dict.fromkeys(("image", "audio"), lambda *_: False)),
)


def arguments_validator(function: Any) -> Any:
    """Return jsonschema's validator of a tool's arguments, by the schema that the policy is shown."""
    schema = get_json_schema(function)["function"]["parameters"]
    return _Validator({**schema, "additionalProperties": False})


# Calls


_Answers = SimpleQueue[tuple["_Job", Result]]


@dataclass(eq=False)
class _Row:
    """Calls of a row that are to be made, and its results by their places."""

    results: dict[int, Result] = field(default_factory=dict)
    groups: deque[list[_Job]] = field(default_factory=deque)
    """Calls that begin together: each sync call alone, then all async calls."""
    timed_out: bool = False


@dataclass(eq=False)
class _Job:
    """Call of a row, and its run."""

    row: _Row
    call: Call
    place: int
    """Place of its result among those of the row. Async calls come behind the others."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments that the tool may change."""
    begun: float = 0.0
    is_over: bool = False
    """True once the tool has returned."""
    task: Future[None] | None = None
    """Handle of an async call."""

    def run(self, answers: _Answers) -> None:
        """Call a sync tool, on a thread of its own."""
        assert self.call.function is not None
        try:
            result = self.success(self.call.function(**self.arguments))
        # SystemExit and KeyboardInterrupt too: those of a user reach the main thread only, never this one.
        except BaseException as error:
            result = self.failure(error)
        self._answer(result, answers)

    async def run_async(self, answers: _Answers) -> None:
        """Call an async tool."""
        assert self.call.function is not None
        try:
            result = self.success(await self.call.function(**self.arguments))
        except BaseException as error:  # a SystemExit would end the loop of all tools
            result = self.failure(error)
        self._answer(result, answers)

    def _answer(self, result: Result, answers: _Answers) -> None:
        self.is_over = True
        answers.put((self, replace(result, seconds=time.monotonic() - self.begun)))

    def result(self, content: str, **fields: Any) -> Result:
        """Return the result of the call, with a content that is not cut yet."""
        name = self.call.name if isinstance(self.call.name, str) else "unknown"
        return Result(shortened(_harmless(name), NAME_CHARACTERS), content, arguments=self.call.arguments, **fields)

    def success(self, value: Any) -> Result:
        """Return the result of a call that returned."""
        if inspect.iscoroutine(value):
            value.close()  # Python would warn that it was never awaited
        if inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value):
            kind = type(value).__name__
            raise TypeError(f"the tool returned an object of the type {kind}: write `async def`, or return a value")
        # Content blocks, which only a policy that reads images takes as they are.
        blocks = value if isinstance(value, list) and all(isinstance(block, dict) for block in value) else []
        texts = [str(block.get("text")) for block in blocks if block.get("type") == "text"]
        if texts and len(texts) == len(value):
            value = "".join(texts)
        return self.result(str(value))

    def failure(self, error: BaseException) -> Result:
        """Return the result of a call that raised. An exception without a readable text is named by its type."""
        kind = type(error).__name__
        try:
            text = str(error)
        except BaseException:
            text = ""
        described = f"{kind}: {text}" if text.strip() else kind
        # TRL shows the text alone. A tool that exits ends TRL's run.
        content = _error(text if text.strip() and isinstance(error, Exception) else described)
        if isinstance(error, ToolError):
            return self.result(content, mistake=described)
        return self.result(content, fault=described)


class _DaemonThreads(ThreadPoolExecutor):
    """Threads of `asyncio.to_thread` in async tools. The end of the program would wait for those of another pool."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function in a new thread."""
        future: Future[Any] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        Thread(target=run, name="tool", daemon=True).start()
        return future


_THREADS = _DaemonThreads()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _error(text: str) -> str:
    return str({"error": text})


def _harmless(text: str) -> str:
    """Return a text with an escape for each character that a tokenizer or a terminal does not bear."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _HARMFUL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
