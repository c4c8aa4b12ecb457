"""Bounded calls of tools: time, length of a result, number of calls, and the share of calls that fail.

A tool runs in a thread of its own, because Python can't stop a function that does not return: past its time limit the
call is abandoned and its result is dropped. Rows run at the same time. The calls of one row run one after the other,
as an environment expects. Async tools run together after them, as in TRL.

A tool that never releases the interpreter can't be bounded by a thread: a regular expression that backtracks or
`9**9**9` must run in a process of its own.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from queue import Empty, SimpleQueue
from threading import Event, Thread
from types import FunctionType, MethodType
from typing import Any

from grpo_recipes.recipe.specs import ToolLimits
from grpo_rewards.errors import one_line, shortened

CALLS_PER_TURN = 32
"""Number of calls that one turn may make. No task needs more at once, and a policy that repeats itself writes hundreds,
each of which may take the whole time limit."""

ROWS_AT_ONCE = 16
"""Number of rows whose tools run at the same time. Calls that wait for a service overlap. Calls that compute share the
processor, so that more of them at once would only pass their time limits."""

ABANDONED_CALLS = 256
"""Number of abandoned calls that may still run. Each holds a thread and its memory, so no further one is begun."""

CHARACTERS_PER_TOKEN = 32
"""Number of characters kept per token of the limit, before a result is tokenized. Text has about four."""

BLOCKS = 64
"""Largest number of content blocks (texts, images) in a result."""

NAME_CHARACTERS = 200
"""Largest length of a tool's name in a message. The policy may write any name."""

WINDOW = 200
"""Number of calls of all ranks over which the share of faults is computed."""
ENOUGH_CALLS = 50
"""Number of calls before which no share of faults is judged."""

# Time after which the threads are checked again. A tool can end its thread in a way that reports nothing.
_POLL_SECONDS = 0.2
# Time in which an event loop answers, unless an async tool blocks it.
_LOOP_SECONDS = 1.0
_ERROR_CHARACTERS = 200

# Control characters except tab and line feed, lone surrogates, line separators, and marks that reverse the direction
# of text. A tokenizer raises for a surrogate, and TRL prints results to the terminal as they are.
_HARMFUL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(frozen=True)
class Call:
    """Call of a tool as the policy wrote it."""

    name: str
    arguments: object
    """Parsed arguments. Anything but a mapping is refused."""
    function: Callable[..., Any] | None
    """Tool of this name, or None if there is none."""
    refusal: str = ""
    """Reason why the call can't be made, if the caller has found one already."""


@dataclass(frozen=True)
class Result:
    """Result of a call, as it goes into a message of the role `tool`."""

    name: str
    content: str | list[Any]
    """Text, or content blocks if the tool returned a list of content blocks."""
    fault: str = ""
    """Reason why the tool itself failed, or "": its time limit, or an exception although the arguments fit."""
    refused: bool = False
    """True if the call was not made: unknown tool, unfit arguments, or too many calls."""
    seconds: float = 0.0
    timed_out: bool = False
    """True if the call passed its time limit. A sync tool may still run, and change its environment."""
    arguments: object = None
    """Arguments of the call, the very object of the policy's message, by which the result is traced to its call."""


class ToolRunner:
    """Runs the calls of a generation batch's rows within limits.

    Args:
        limits: time limit and length of a result.
        cut: function that shortens a text to `limits.result_tokens` tokens. It runs on the thread of `run`.
        say: function that logs a sentence.
        loop: running event loop for async tools. Default: a loop of the runner's own, in a thread. A tool that shares
            a connection with other async functions needs theirs.
    """

    def __init__(
        self,
        limits: ToolLimits,
        cut: Callable[[str], str],
        say: Callable[[str], None],
        *,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._limits = limits
        self._cut = cut
        self._say = say
        self._most = limits.result_tokens * CHARACTERS_PER_TOKEN
        self._idle: list[_Worker] = []
        self._loop = None if loop is None else _Loop(loop)
        self._stuck: list[_Attempt] = []
        self._has_reported = False

    @property
    def abandoned(self) -> int:
        """Number of calls that passed their limit and still run."""
        self._stuck = [attempt for attempt in self._stuck if attempt.is_running()]
        return len(self._stuck)

    def run(self, calls: Sequence[Sequence[Call]]) -> list[list[Result]]:
        """Return the results of each row's calls, in TRL's order: sync and refused calls, then async calls.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, or another signal's handler raised. Calls that run are abandoned.
        """
        rows = [self._plan(row) for row in calls]
        waiting = deque(row for row in rows if row.is_open)
        running: list[_Job] = []
        answers: SimpleQueue[tuple[_Job, _Outcome]] = SimpleQueue()
        try:
            while waiting or running:
                rows_at_work = len({id(job.row) for job in running})
                while waiting and rows_at_work < ROWS_AT_ONCE:
                    running += self._advance(waiting.popleft(), answers)
                    rows_at_work += 1
                for job, outcome in self._ended(running, answers):
                    running.remove(job)
                    job.row.results[job.place] = self._result(job, outcome)
                    if not any(other.row is job.row for other in running):
                        running += self._advance(job.row, answers)
        finally:
            for job in running:
                self._abandon(job)
        return [[result for result in row.results if result is not None] for row in rows]

    def close(self) -> None:
        """End the idle threads and the runner's own event loop. Abandoned calls are left alone."""
        for worker in self._idle:
            worker.retire()
        self._idle = []
        if self._loop is not None:
            self._loop.close()
            self._loop = None
        if count := self.abandoned:
            self._say(f"{count} abandoned call{'s' * (count > 1)} of tools still run{'s' * (count == 1)}")

    def _plan(self, calls: Sequence[Call]) -> _Row:
        """Return the row of some calls with its refused results, and the calls that are to be made."""
        row = _Row()
        later: list[tuple[Call, Any]] = []
        for number, call in enumerate(calls):
            arguments: Any = call.arguments
            refusal = call.refusal or _refusal(call, number)
            if not refusal:
                try:
                    # The tool may change its arguments, which the transcript and other rows share.
                    arguments = copy.deepcopy(arguments)
                except RecursionError:
                    refusal = "The arguments are nested too deeply."
            if refusal:
                content = self._cut(_error_text(refusal, self._most))
                row.results.append(Result(_name(call.name), content, refused=True, arguments=call.arguments))
            elif inspect.iscoroutinefunction(call.function):
                later.append((call, arguments))
            else:
                row.sync.append(_Job(row, len(row.results), call, arguments))
                row.results.append(None)
        for call, arguments in later:
            row.later.append(_Job(row, len(row.results), call, arguments))
            row.results.append(None)
        return row

    def _advance(self, row: _Row, answers: SimpleQueue[tuple[_Job, _Outcome]]) -> list[_Job]:
        """Begin the next sync call of a row, or all its async calls. Return the calls that were begun."""
        if row.sync:
            jobs = [row.sync.popleft()]
        else:
            jobs, row.later = row.later, []
        for job in jobs:
            if row.timed_out:
                # The abandoned call may still change the environment that this call would read.
                job.refusal = "Not called: an earlier call of this turn passed its time limit."
                answers.put((job, _Outcome(_error_text(job.refusal, self._most))))
            elif (count := self.abandoned) >= ABANDONED_CALLS:
                reason = f"not called, because {count} earlier calls passed their time limit and still run"
                answers.put((job, _Outcome(_error_text(reason, self._most), reason)))
            else:
                self._begin(job, answers)
        return jobs

    def _begin(self, job: _Job, answers: SimpleQueue[tuple[_Job, _Outcome]]) -> None:
        where: _Worker | _Loop
        try:
            if inspect.iscoroutinefunction(job.call.function):
                if self._loop is None or not self._loop.responds():
                    self._loop = _Loop()
                where = self._loop
            else:
                where = self._idle.pop() if self._idle else _Worker()
            job.begun = time.monotonic()  # a blocked loop has taken time that is not the call's
            job.attempt = _Attempt(job, where, self._most, answers)
            where.begin(job.attempt)
        except RuntimeError as error:  # the system gives no further thread
            answers.put((job, _failed(error, self._most)))

    def _ended(
        self, running: Sequence[_Job], answers: SimpleQueue[tuple[_Job, _Outcome]]
    ) -> Iterator[tuple[_Job, _Outcome]]:
        """Wait until a call ends or passes its limit. Yield such calls with their outcomes, in the order of ending."""
        limit = self._limits.seconds
        deadline = min(job.begun for job in running) + limit
        ended: list[tuple[_Job, _Outcome]] = []
        # A signal interrupts this wait, so that its handler runs at once.
        with suppress(Empty):
            ended.append(answers.get(timeout=max(0.0, min(deadline - time.monotonic(), _POLL_SECONDS))))
        # Calls that have ended are taken first: the process may have been suspended past their limits.
        with suppress(Empty):
            while True:
                ended.append(answers.get_nowait())
        finished = {id(job) for job, _ in ended}
        now = time.monotonic()
        for job in running:
            if id(job) in finished:
                continue
            if now >= job.begun + limit:
                ended.append((job, _timed_out(limit, now - job.begun)))
            elif (attempt := job.attempt) is not None and attempt.is_lost():
                if not attempt.has_begun:  # an earlier call left an exception that ended the thread later
                    self._begin(job, answers)
                    continue
                text = "the tool ended the thread that it ran in"
                ended.append((job, _Outcome(_error_text(text, self._most), text, now - job.begun)))
        # A call that has timed out or died here might still answer: `run` takes one outcome of each call only.
        for job, outcome in ended:
            if job in running:
                yield job, outcome

    def _result(self, job: _Job, outcome: _Outcome) -> Result:
        """Return the cut result of a call that has ended, and release its thread."""
        if outcome.timed_out:
            job.row.timed_out = True
            self._abandon(job)
            if not self._has_reported:
                self._has_reported = True
                self._say(
                    f"tool `{_name(job.call.name)}` did not return within {self._limits.seconds:g} s "
                    "(`tool_limits.seconds`): the call is abandoned, and its thread runs on until it returns; further "
                    "calls of this kind are only counted"
                )
        elif job.attempt is not None and isinstance(job.attempt.where, _Worker) and job.attempt.where.is_alive():
            self._idle.append(job.attempt.where)
        return Result(
            _name(job.call.name),
            self._cut_content(outcome.content),
            outcome.fault,
            bool(job.refusal),
            outcome.seconds,
            outcome.timed_out,
            job.call.arguments,
        )

    def _abandon(self, job: _Job) -> None:
        if job.attempt is not None:
            job.attempt.where.abandon(job.attempt)
            self._stuck.append(job.attempt)

    def _cut_content(self, content: str | list[Any]) -> str | list[Any]:
        """Return content whose texts together are within the limit of tokens."""
        if isinstance(content, str):
            return self._cut(content)
        texts = [block["text"] for block in content if block["type"] == "text"]
        joined = "\n".join(texts)
        short = self._cut(joined)
        if short == joined:
            return content
        # One text in place of the first one, because the tokens of a part are not known.
        kept = [block for block in content if block["type"] != "text"]
        place = next(index for index, block in enumerate(content) if block["type"] == "text")
        return [*kept[:place], {"type": "text", "text": short}, *kept[place:]]


class FailureWindow:
    """Faults among the last calls of all ranks.

    Every rank feeds the same gathered calls, so that all ranks decide alike.

    Args:
        most: share of the calls that may fail.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._calls: deque[tuple[str, str]] = deque(maxlen=WINDOW)

    @staticmethod
    def of_rank(results: Iterable[Result]) -> list[tuple[str, str]]:
        """Return name and fault of the calls that a rank made, the last ones only. It is what ranks gather."""
        made: deque[tuple[str, str]] = deque(maxlen=WINDOW)
        for result in results:
            if not result.refused:
                made.append((result.name, shortened(one_line(result.fault), _ERROR_CHARACTERS)))
        return list(made)

    def add(self, ranks: Sequence[Sequence[tuple[str, str]]]) -> None:
        """Add the calls of one generation batch, a list of name and fault per rank.

        The last calls of every rank come last, rank by rank: with whole ranks one after the other, a busy last rank
        would push the calls of the others out of the window.
        """
        from_the_end = zip_longest(*(reversed(calls) for calls in ranks))
        for calls in reversed(list(from_the_end)):
            self._calls.extend(call for call in calls if call is not None)

    @property
    def share(self) -> float:
        """Share of faults, or 0 while there are too few calls to judge."""
        if len(self._calls) < ENOUGH_CALLS:
            return 0.0
        return sum(bool(fault) for _, fault in self._calls) / len(self._calls)

    def reason_to_stop(self) -> str:
        """Return why the run must stop, with the tool that failed most and its last error, or ""."""
        share = self.share
        if share <= self._most:
            return ""
        faults = [(name, fault) for name, fault in self._calls if fault]
        ((worst, _),) = Counter(name for name, _ in faults).most_common(1)
        last = next(fault for name, fault in reversed(faults) if name == worst)
        return (
            f"{share:.1%} of the last {len(self._calls)} calls of tools failed, most of them of `{worst}` "
            f"(last error: {last}): correct the tool, or raise `tool_limits.failures`, which is {self._most:g}"
        )


# Calls


@dataclass(frozen=True)
class _Outcome:
    """End of a call, with content that is not cut to tokens yet."""

    content: str | list[Any]
    fault: str = ""
    seconds: float = 0.0
    timed_out: bool = False


@dataclass(eq=False)
class _Row:
    """Calls of a row that are to be made, and its results in TRL's order. None stands for a call without a result."""

    results: list[Result | None] = field(default_factory=list)
    sync: deque[_Job] = field(default_factory=deque)
    later: list[_Job] = field(default_factory=list)
    """Async calls, which begin together after the sync ones."""
    timed_out: bool = False

    @property
    def is_open(self) -> bool:
        """True if a call is still to be begun."""
        return bool(self.sync or self.later)


@dataclass(eq=False)
class _Job:
    """Call of a row that fits its tool."""

    row: _Row
    place: int
    """Index of its result in the row."""
    call: Call
    arguments: dict[str, Any]
    begun: float = 0.0
    """Time at which it was begun. A call that is not begun has its outcome at once."""
    refusal: str = ""
    attempt: _Attempt | None = None
    """Run of the call, or None if it was not begun."""


class _Attempt:
    """Run of a call on another thread, which puts its outcome into a queue."""

    def __init__(
        self, job: _Job, where: _Worker | _Loop, most: int, answers: SimpleQueue[tuple[_Job, _Outcome]]
    ) -> None:
        self.job = job
        self.where = where
        self.most = most
        self.answers = answers
        self.has_begun = False
        self.is_over = False
        self.process = os.getpid()
        self.task: Future[None] | None = None
        """Handle of an async call."""

    def is_running(self) -> bool:
        """Return True if the tool has not returned yet."""
        return not self.is_over and self.where.is_alive()

    def is_lost(self) -> bool:
        """Return True if the tool will never return."""
        # In this order: a thread may end between the two looks, after its call.
        return not self.where.is_alive() and not self.is_over

    def run(self) -> None:
        """Call a sync tool."""
        self.has_begun = True
        function = self.job.call.function
        assert function is not None
        try:
            outcome = _returned(function(**self.job.arguments), self.most)
        # SystemExit and KeyboardInterrupt too: those of a user reach the main thread only, never this one.
        except BaseException as error:
            outcome = _failed(error, self.most)
        self._end_child()
        self._answer(outcome)

    async def run_async(self) -> None:
        """Call an async tool. Its result is rendered in another thread, because its methods may block the loop."""
        self.has_begun = True
        function = self.job.call.function
        assert function is not None
        loop = asyncio.get_running_loop()
        try:
            try:
                try:
                    value = await function(**self.job.arguments)
                finally:
                    self._end_child()
                outcome = await loop.run_in_executor(_THREADS, _returned, value, self.most)
            except (asyncio.CancelledError, GeneratorExit) as error:  # the task may end, so that it must not wait
                outcome = _failed(error, self.most)
            except BaseException as error:  # a SystemExit would end the loop of all tools
                outcome = await loop.run_in_executor(_THREADS, _failed, error, self.most)
            self._answer(outcome)
        finally:
            self.is_over = True

    def _end_child(self) -> None:
        """End this process if it is a copy that the tool has forked."""
        # Python's signal handlers and `atexit` are the run's own. A copy that went on would wait for calls for ever.
        if os.getpid() != self.process:
            os._exit(0)

    def _answer(self, outcome: _Outcome) -> None:
        self.is_over = True
        seconds = time.monotonic() - self.job.begun
        self.answers.put((self.job, replace(outcome, seconds=seconds)))


class _Worker:
    """Daemon thread that runs one call after the other. Unlike a pool's thread, it does not delay the program's end."""

    def __init__(self) -> None:
        self._attempts: SimpleQueue[_Attempt | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, name="tool", daemon=True)
        self._thread.start()

    def begin(self, attempt: _Attempt) -> None:
        """Run a call."""
        self._attempts.put(attempt)

    def abandon(self, attempt: _Attempt) -> None:
        """End the thread after its present call."""
        self.retire()

    def retire(self) -> None:
        """End the thread once it is idle."""
        self._attempts.put(None)

    def is_alive(self) -> bool:
        """Return True unless the thread has ended."""
        return self._thread.is_alive()

    def _serve(self) -> None:
        while (attempt := self._attempts.get()) is not None:
            attempt.run()
            del attempt  # its arguments need not stay in memory until the next call


class _Loop:
    """Event loop of async tools, in a daemon thread unless it is the caller's."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._thread: Thread | None = None
        self._loop = loop or asyncio.new_event_loop()
        if loop is None:
            self._loop.set_default_executor(_THREADS)
            self._thread = Thread(target=self._serve, name="async tools", daemon=True)
            self._thread.start()

    def begin(self, attempt: _Attempt) -> None:
        """Run a call."""
        attempt.task = asyncio.run_coroutine_threadsafe(attempt.run_async(), self._loop)

    def abandon(self, attempt: _Attempt) -> None:
        """Cancel a call."""
        if attempt.task is not None:
            attempt.task.cancel()

    def is_alive(self) -> bool:
        """Return True unless the loop has ended."""
        return not self._loop.is_closed() and (self._thread is None or self._thread.is_alive())

    def responds(self) -> bool:
        """Return True unless the loop has ended, or an async tool blocks it."""
        answered = Event()
        try:
            self._loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # closed
            return False
        return answered.wait(_LOOP_SECONDS)

    def close(self) -> None:
        """End the runner's own loop after its present step."""
        if self._thread is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._loop.stop)

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            # An abandoned call is destroyed with the loop, which would otherwise be logged as an error.
            self._loop.set_exception_handler(lambda *_: None)
            self._loop.close()


class _DaemonThreads(ThreadPoolExecutor):
    """Executor with a daemon thread per call: Python waits for the threads of any other pool when the program ends."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function in a new thread."""
        future: Future[Any] = Future()
        Thread(target=_fulfil, args=(future, function, args, kwargs), name="tool", daemon=True).start()
        return future


def _fulfil(future: Future[Any], function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function(*args, **kwargs)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


_THREADS = _DaemonThreads()


def _refusal(call: Call, number: int) -> str:
    """Return why the call with this number in its turn can't be made, in TRL's words where TRL has some, or ""."""
    if number >= CALLS_PER_TURN:
        return f"Not called: a turn may make {CALLS_PER_TURN} calls."
    if call.function is None:
        return f"Tool {call.name} not found."
    try:
        inspect.signature(call.function).bind(**call.arguments)  # type: ignore[arg-type]
    except ValueError:  # a function written in C may have no signature
        return "" if isinstance(call.arguments, Mapping) else "The arguments are no mapping."
    except TypeError as error:
        return _python_message(call, str(error))
    return ""


def _python_message(call: Call, described: str) -> str:
    """Return Python's message for arguments that do not fit, as TRL shows it to the policy, or `described`."""
    function = call.function
    code = function.__func__ if isinstance(function, MethodType) else function
    # The body of such a function never runs here. A decorated function might accept what its signature does not.
    if not isinstance(code, FunctionType) or hasattr(code, "__wrapped__") or hasattr(code, "__signature__"):
        return described
    try:
        function(**call.arguments)  # type: ignore[misc, arg-type]
    except TypeError as error:
        described = str(error)
    return described


def _timed_out(limit: float, seconds: float) -> _Outcome:
    text = f"no result within {limit:g} s"
    return _Outcome(_error_text(text, _ERROR_CHARACTERS), text, seconds, timed_out=True)


def _returned(value: object, most: int) -> _Outcome:
    """Return the outcome of a call that returned. Rendering the value runs methods of its class."""
    try:
        return _Outcome(_content(value, most))
    except BaseException as error:
        return _failed(error, most)


def _failed(error: BaseException, most: int) -> _Outcome:
    """Return the outcome of a call that raised. An exception without a text that can be read is named by its type."""
    kind = type(error).__name__
    try:
        text = _first(str(error), most)
    except BaseException:
        text = ""
    fault = f"{kind}: {shortened(text, _ERROR_CHARACTERS)}" if text else kind
    # TRL shows the text alone, also if it is empty. A tool that exits ends TRL's run.
    shown = text if isinstance(error, Exception) else fault
    return _Outcome(_error_text(shown, most), _harmless(fault))


# Content


def _name(name: object) -> str:
    return shortened(_harmless(name), NAME_CHARACTERS) if isinstance(name, str) else "unknown"


def _error_text(text: str, most: int) -> str:
    return _first(_harmless(str({"error": _first(text, most)})), most)


def _content(value: object, most: int) -> str | list[Any]:
    """Return what a tool returned as harmless text of at most `most` characters, or as such content blocks."""
    blocks = _blocks(value, most)
    return _first(_harmless(_text(value, most)), most) if blocks is None else blocks


def _blocks(value: object, most: int) -> list[Any] | None:
    """Return copies of the content blocks in a list, or None if the value is anything else."""
    if type(value) is not list or not 0 < len(value) <= BLOCKS:
        return None
    blocks: list[Any] = []
    room = most
    for block in value:
        match block:
            case {"type": "text", "text": str(text)}:
                clean = _first(_harmless(_first(text, room)), room)
                room -= len(clean)
                blocks.append({"type": "text", "text": clean})
            case {"type": "image", "image": image}:
                blocks.append({"type": "image", "image": image})
            case _:
                return None
    return blocks


def _text(value: object, most: int) -> str:
    """Return the first characters of `str(value)`, without rendering all of a large value."""
    if type(value) is str:
        return value[:most]
    if type(value) in _LARGE:
        parts: list[str] = []
        _write(value, parts, most, set())
        return "".join(parts)[:most]
    return _first(str(value), most)


_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    dict: ("{", "}"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}
_LARGE = (*_BRACKETS, bytes, bytearray)


def _write(value: Any, parts: list[str], room: int, outer: set[int]) -> int:
    """Append the `repr` of a value to `parts` until the room is used up. Return the room that is left, or at most 0."""

    def add(text: str) -> None:
        nonlocal room
        parts.append(text)
        room -= len(text)

    kind = type(value)
    if kind not in _BRACKETS or not value:
        add(repr(value[: max(0, room)]) if kind in (str, bytes, bytearray) else _first(repr(value), room))
        return room
    opening, closing = _BRACKETS[kind]
    if id(value) in outer:  # contains itself
        add(f"{opening}...{closing}")
        return room
    add(opening)
    outer.add(id(value))
    for number, entry in enumerate(value):
        if room <= 0:
            break
        if number:
            add(", ")
        room = _write(entry, parts, room, outer)
        if kind is dict:
            add(": ")
            room = _write(value[entry], parts, room, outer)
    outer.discard(id(value))
    add(",)" if kind is tuple and len(value) == 1 else closing)
    return room


def _first(text: str, most: int) -> str:
    """Return the first characters of a text. A subclass may define slices and lengths of its own."""
    return str.__getitem__(text, slice(max(0, most)))


def _harmless(text: str) -> str:
    """Return a text with an escape for each character that a tokenizer or a terminal does not bear."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _HARMFUL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
