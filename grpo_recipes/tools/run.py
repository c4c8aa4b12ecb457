"""Calls of tools: arguments that fit the schema, a time limit, a bounded result, and the share of calls that fail.

A sync tool runs in a daemon thread of its own, because Python can't stop a function that does not return: past its time
limit the call is abandoned and its result is dropped. A pool of threads would queue calls behind those that hang, and
delay the end of the program. Only the threads that wait for the calls of a row are a pool's, because each wait is
bounded. The calls of one row run one after the other, as an environment expects. Async tools run together after them,
as in TRL.

A tool that never releases the interpreter can't be bounded by a thread: a regular expression that backtracks or
`9**9**9` must run in a process of its own.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import zip_longest
from threading import Thread
from typing import Any

from jsonschema import Draft4Validator, Draft202012Validator, validators
from jsonschema.exceptions import best_match
from transformers.utils import get_json_schema

from grpo_recipes.recipe.specs import ToolLimits
from grpo_recipes.tools import ToolError
from grpo_rewards.errors import shortened

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
ENOUGH_MISTAKES = 20
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
        loop: running event loop for async tools. Default: a loop of this process. A tool that shares a connection with
            other async functions needs theirs.
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
        self._loop = loop or _own_loop()
        self._loop.set_default_executor(_THREADS)  # for `asyncio.to_thread` in async tools
        self._is_stopping, self._stop_by = is_stopping, float("inf")
        self._is_interrupted = False
        self._validators: dict[int, tuple[object, Any]] = {}
        self._stuck: set[Future[_Answer]] = set()
        """Calls that passed their limit and still run."""

    def run(self, calls: Sequence[Sequence[Call]]) -> list[list[Result]]:
        """Return the results of each row's calls, in TRL's order: sync and refused calls, then async calls.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed, or another signal's handler raised. Calls that run are abandoned.
        """
        self._is_interrupted = False
        with ThreadPoolExecutor(ROWS_AT_ONCE, "rows of tools") as pool:
            try:
                rows = list(pool.map(self._row, calls))
            except BaseException:
                self._is_interrupted = True  # or the pool would wait for the limits of its calls
                raise
        return [[replace(result, content=self._cut(result.content)) for result in row] for row in rows]

    def _row(self, calls: Sequence[Call]) -> list[Result]:
        """Run the calls of a row."""
        results: list[Result] = []
        later = []
        for number, call in enumerate(calls):
            arguments, mistake = None, f"Not called: a turn may make {CALLS_PER_TURN} calls."
            if number < CALLS_PER_TURN:
                arguments, mistake = self._fitting(call)
            if mistake:
                results.append(self._result(call, _error(mistake), mistake=mistake, made=False))
            elif inspect.iscoroutinefunction(call.function):
                later.append((call, arguments))
            else:
                results += self._answers([(call, arguments)], results)
        return results + self._answers(later, results)

    def _fitting(self, call: Call) -> tuple[Any, str]:
        """Return a copy of the arguments, and the reason why the call can't be made, or ""."""
        if call.refusal or call.function is None:
            return None, call.refusal or f"Tool {call.name} not found."
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

    def _answers(self, calls: Sequence[tuple[Call, Any]], before: Sequence[Result]) -> list[Result]:
        """Make calls at the same time, after those of the same row whose results are `before`."""
        begun = time.monotonic()
        reason = fault = ""
        if any(result.timed_out for result in before):
            # The abandoned call may still change the environment that these calls would read.
            reason = "Not called: an earlier call of this turn passed its time limit."
        elif begun >= self._deadline(begun):
            reason = "Not called: the run stops."
        elif len(self._stuck) >= ABANDONED_CALLS:
            reason = fault = (
                f"not called, because {len(self._stuck)} earlier calls passed their time limit and still run"
            )
        if reason:
            return [self._result(call, _error(reason), fault=fault, made=False) for call, _ in calls]
        futures: list[Future[_Answer]] = []
        for call, arguments in calls:
            assert call.function is not None
            if inspect.iscoroutinefunction(call.function):
                futures.append(asyncio.run_coroutine_threadsafe(_awaited(call.function, arguments), self._loop))
            else:
                futures.append(_THREADS.submit(_called, call.function, arguments))
        return [self._answer(call, future, begun) for (call, _), future in zip(calls, futures, strict=True)]

    def _answer(self, call: Call, future: Future[_Answer], begun: float) -> Result:
        """Wait for a call until its limit, or until the run stops, and return its result."""
        # A call that has ended is taken before its limit is judged: the process may have been suspended.
        while not future.done():
            now = time.monotonic()
            if now >= (deadline := self._deadline(begun)):
                return self._abandon(call, future, now - begun)
            wait([future], min(deadline - now, _POLL_SECONDS))
        text, error, ended = future.result()
        seconds = ended - begun
        if error is None:
            return self._result(call, text, seconds=seconds)
        kind, text = type(error).__name__, str(error)
        described = f"{kind}: {text}" if text.strip() else kind
        mistake, fault = (described, "") if isinstance(error, ToolError) else ("", described)
        content = _error(text if text.strip() else kind)
        return self._result(call, content, mistake=mistake, fault=fault, seconds=seconds)

    def _abandon(self, call: Call, future: Future[_Answer], seconds: float) -> Result:
        if not future.cancel():  # an async call is cancelled
            self._stuck.add(future)
            future.add_done_callback(self._stuck.discard)
        limit = self._limits.seconds
        fault = f"no result within {limit:g} s" if seconds >= limit else ""
        return self._result(call, _error(fault or "The run stops."), fault=fault, seconds=seconds, timed_out=True)

    def _deadline(self, begun: float) -> float:
        """Return the time at which a call is abandoned."""
        if self._is_interrupted:
            return 0.0
        self._stop_by = min(self._stop_by, time.monotonic() + STOP_SECONDS) if self._is_stopping() else float("inf")
        return min(begun + self._limits.seconds, self._stop_by)

    def _result(self, call: Call, content: str, *, mistake: str = "", fault: str = "", **fields: Any) -> Result:
        """Return a result whose texts are harmless and bounded, before its content is cut to tokens."""
        most = self._limits.result_tokens * CHARACTERS_PER_TOKEN
        return Result(
            name=shortened(_harmless(call.name), NAME_CHARACTERS),
            content=_harmless(content[:most])[:most],
            fault=_harmless(shortened(fault, _ERROR_CHARACTERS)),
            mistake=_harmless(shortened(mistake, _ERROR_CHARACTERS)),
            arguments=call.arguments,
            **fields,
        )


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

    def add(self, ranks: Sequence[Sequence[tuple[str, str, str]]]) -> None:
        """Add the calls of one generation batch, the last calls of every rank last."""
        # With whole ranks one after the other, a busy last rank would push the others out of the window.
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
        return (
            f"{len(faults) / len(self._calls):.1%} of the last {len(self._calls)} calls of tools failed, most of them "
            f"of `{worst}` (last error: {dict(faults)[worst]}): correct the tool, let it raise "
            "`grpo_recipes.ToolError` for mistakes of the policy, or raise `tool_limits.failures`, which is "
            f"{self._most:g}"
        )

    def without_success(self) -> Iterator[str]:
        """Yield a sentence for each tool whose calls in the window were all mistakes, once for each tool."""
        calls = Counter(name for name, _ in self._all)
        right = {name for name, mistake in self._all if not mistake}
        for name, last in dict(self._all).items():
            if calls[name] >= ENOUGH_MISTAKES and name not in right | self._named:
                self._named.add(name)
                yield (
                    f"all of the last {calls[name]} calls of `{name}` were mistakes of the policy (last: {last}): "
                    "describe the arguments in its docstring, and look at its results in the report"
                )


# Arguments


def _or_null(keyword: str) -> Callable[..., Iterator[Any]]:
    """Return jsonschema's check of a keyword, passed by None where `get_json_schema` has marked an `Optional`."""

    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if not (instance is None and schema.get("nullable")):
            yield from Draft202012Validator.VALIDATORS[keyword](validator, value, instance, schema) or ()

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


_Answer = tuple[str, BaseException | None, float]
"""Text that a tool returned, what it raised, and the time at which it ended."""


def _called(function: Callable[..., Any], arguments: dict[str, Any]) -> _Answer:
    try:
        return _text(function(**arguments)), None, time.monotonic()
    # SystemExit and KeyboardInterrupt too: those of a user reach the main thread only, never this one.
    except BaseException as error:
        return "", error, time.monotonic()


async def _awaited(function: Callable[..., Any], arguments: dict[str, Any]) -> _Answer:
    try:
        return _text(await function(**arguments)), None, time.monotonic()
    except BaseException as error:  # a SystemExit would end the loop of all tools
        return "", error, time.monotonic()


def _text(value: Any) -> str:
    """Return what a tool returned as text."""
    if inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value):
        kind = type(value).__name__
        raise TypeError(f"the tool returned an object of the type {kind}: write `async def`, or return a value")
    # Content blocks, which only a policy that reads images takes as they are.
    if isinstance(value, list) and value and all(isinstance(one, dict) and one.get("type") == "text" for one in value):
        return "".join(str(block.get("text")) for block in value)
    return str(value)


class _DaemonThreads(ThreadPoolExecutor):
    """Threads of tools, a new one for each call. The end of the program would wait for those of another pool."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function in a new thread."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        Thread(target=run, name="tool", daemon=True).start()
        return future


_THREADS = _DaemonThreads()


@functools.cache
def _own_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of a process without a trainer, which runs in a thread."""
    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, name="async tools", daemon=True).start()
    return loop


def _error(text: str) -> str:
    return str({"error": text})


def _harmless(text: str) -> str:
    """Return a text with an escape for each character that a tokenizer or a terminal does not bear."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _HARMFUL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
