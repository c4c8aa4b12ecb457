"""Calls of tools that misbehave: each becomes a result, within its time limit, and no other call is harmed."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_recipes.recipe.specs import ToolLimits
from grpo_recipes.tools import run as bounded
from grpo_recipes.tools.run import CALLS_PER_TURN, Call, FailureWindow, Result, ToolRunner

SECONDS = 0.4
TOKENS = 20


def cut(text: str) -> str:
    """Cut to words, as a tokenizer would to tokens."""
    return " ".join(text.split(" ")[:TOKENS])


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def runner(said: list[str]) -> Iterator[ToolRunner]:
    made = ToolRunner(ToolLimits(seconds=SECONDS, result_tokens=TOKENS), cut, said.append)
    yield made
    made.close()


def call(function: Callable[..., Any], **arguments: Any) -> Call:
    return Call(getattr(function, "__name__", "tool"), arguments, function)


def only(results: list[list[Result]]) -> Result:
    ((result,),) = results
    return result


def add(a: int, b: int) -> int:
    return a + b


async def add_later(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


def fail(text: str) -> str:
    raise ValueError(text)


def hang() -> None:
    time.sleep(30)


async def hang_async() -> None:
    await asyncio.sleep(30)


async def swallow_cancellation() -> None:
    for _ in range(100):
        try:
            await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            continue


async def block_the_loop() -> None:
    time.sleep(3)


def trl_results(calls: list[Call]) -> list[tuple[str, Any]]:
    """Run one row's calls as `GRPOTrainer._tool_call_loop` of TRL 1.16 does (lines 1980 to 2027)."""
    results: list[tuple[str, Any]] = []
    coroutines = []
    for one in calls:
        try:
            if one.function is None:
                raise ValueError(f"Tool {one.name} not found.")
            if asyncio.iscoroutinefunction(one.function):
                coroutines.append((one.name, one.function(**one.arguments)))  # type: ignore[arg-type]
            else:
                results.append((one.name, one.function(**one.arguments)))  # type: ignore[arg-type]
        except Exception as error:
            results.append((one.name, {"error": str(error)}))

    async def gather() -> list[Any]:
        return await asyncio.gather(*(coroutine for _, coroutine in coroutines), return_exceptions=True)

    for (name, _), value in zip(coroutines, asyncio.run(gather()), strict=True):
        results.append((name, {"error": str(value)} if isinstance(value, Exception) else value))
    return [(name, value if isinstance(value, list) else str(value)) for name, value in results]


# Results that TRL would show too


def test_results_and_their_order_are_trls(runner: ToolRunner) -> None:
    async def fail_later(text: str) -> str:
        raise KeyError(text)

    def give(value: Any) -> Any:
        return value

    class Environment:
        def guess(self, number: int) -> str:
            return f"{number} is wrong"

    environment = Environment()
    calls = [
        call(add_later, a=1, b=2),
        call(add, a=1, b=2),
        Call("nothing", {}, None),
        call(add, a=1),
        call(add_later, a=1, c=2),
        call(add, a="x", b=1),
        call(fail, text="no\nluck"),
        call(fail_later, text="k"),
        call(environment.guess, number=4),
        call(environment.guess),
        Call("add", [1, 2], add),
        Call("add", None, add),
        call(give, value="two\n\tlines"),
        call(give, value={"a": [1.5, None, True, ("x",), set(), b"y"], 2: {3: "'"}}),
        call(give, value=(1, {2}, frozenset({3}), frozenset(), (), {})),
        call(give, value=[{"type": "text", "text": "block"}, {"type": "image", "image": "i.png"}]),
        call(give, value=None),
        call(add_later, a=3, b=4),
    ]
    ours = runner.run([calls])[0]
    assert [(result.name, result.content) for result in ours] == trl_results(calls)
    assert sorted(id(result.arguments) for result in ours) == sorted(id(one.arguments) for one in calls), "not copies"
    refused = [index for index, result in enumerate(ours) if result.refused]
    assert refused == [1, 2, 3, 7, 8, 9]
    assert {(ours[index].seconds, ours[index].timed_out) for index in refused} == {(0.0, False)}
    assert all(0 < result.seconds < 30 for result in ours if not result.refused)
    faults = [result.fault for result in ours if result.fault]
    assert faults[1] == "ValueError: no\nluck"
    assert [fault.partition(":")[0] for fault in faults] == ["TypeError", "ValueError", "KeyError"]


def test_random_values_are_rendered_as_python_does() -> None:
    draw = random.Random(0)

    def value(depth: int) -> Any:
        kind = draw.randrange(9 if depth else 4)
        size = draw.randrange(4)
        if kind < 4:
            return draw.choice([draw.random(), draw.randrange(-9, 10**30), "a'\"\n" * size, None, b"\x00'", True])
        if kind in (4, 5):
            return [value(depth - 1) for _ in range(size)]
        if kind == 6:
            return tuple(value(depth - 1) for _ in range(size))
        if kind == 7:
            return {draw.choice([1, "k", (2, 3)]): value(depth - 1) for _ in range(size)}
        return draw.choice([set(), {1, 2}, frozenset({"x"}), bytearray(b"z"), 1j, range(3), SimpleNamespace(a=1)])

    for _ in range(2000):
        one = value(4)
        assert bounded._text(one, 100_000) == str(one)
        assert len(bounded._text([one], 20)) <= 20


def test_a_value_that_contains_itself_is_rendered() -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop, "same": {}, "and": {}})
    assert bounded._text(loop, 1000) == str(loop)
    beginnings = [bounded._text(loop, count) for count in range(len(str(loop)))]
    assert beginnings == [str(loop)[:count] for count in range(len(str(loop)))]


SHARED = [1]
"""List that stands in a value several times, but not in itself."""


@pytest.mark.parametrize(
    "value",
    [
        [[[[1, 2], [3]], 4], 5],
        [{"k": {"l": [(), (6,), {}, set()]}, "m": (7, 8)}, frozenset({9}), b"bytes", "text"],
        {1: {2: {3: {4: "a long text"}}}},
        [SHARED, {"k": SHARED}, SHARED],
        "a text",
    ],
)
def test_a_text_begins_as_python_writes_the_whole_value(value: Any) -> None:
    whole = str(value)
    for count in range(len(whole) + 2):
        assert bounded._text(value, count) == whole[:count]


def test_no_more_of_a_text_is_rendered_than_fits() -> None:
    parts: list[str] = []
    bounded._write({"key": "x" * 10_000}, parts, 9, set())
    assert len("".join(parts)) < 30


@pytest.mark.parametrize("value", [[1] * 1000, dict.fromkeys(range(1000), 1)], ids=["list", "mapping"])
def test_no_more_entries_of_a_value_are_visited_than_fit(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool may return millions, which would take seconds after the text is complete."""
    visited: list[int] = []

    def counted(entries: Any) -> Iterator[Any]:
        for number, entry in enumerate(entries):
            visited.append(number)
            yield number, entry

    monkeypatch.setattr(bounded, "enumerate", counted, raising=False)
    parts: list[str] = []
    bounded._write(value, parts, 30, set())
    assert str(value).startswith("".join(parts)[:30])
    assert 3 < len(visited) < 15


def test_rows_run_at_the_same_time_and_calls_of_a_row_one_after_the_other(runner: ToolRunner) -> None:
    order: list[str] = []
    meeting = threading.Barrier(3, timeout=10)

    def step(row: str, number: int) -> str:
        if number == 0:
            meeting.wait()  # passes only if all rows are here
        order.append(f"{row}{number}")
        return f"{row}{number}"

    calls = [[call(step, row=row, number=number) for number in range(3)] for row in "abc"]
    results = runner.run(calls)
    assert [[result.content for result in row] for row in results] == [[f"{r}{n}" for n in range(3)] for r in "abc"]
    for row in "abc":
        assert [entry for entry in order if entry[0] == row] == [f"{row}{n}" for n in range(3)]


def test_more_rows_than_threads_all_run(runner: ToolRunner) -> None:
    before = threading.active_count()
    rows = [[call(add, a=n, b=0), call(add_later, a=n, b=1)] for n in range(200)] + [[]]
    results = runner.run(rows)
    assert [[result.content for result in row] for row in results[:-1]] == [[str(n), str(n + 1)] for n in range(200)]
    assert results[-1] == []
    assert threading.active_count() - before <= bounded.ROWS_AT_ONCE + 3
    own = [thread for thread in threading.enumerate() if thread.name in ("tool", "async tools")]
    assert {thread.name for thread in own} == {"tool", "async tools"}
    assert all(thread.daemon for thread in own), "the end of the program waits for no other thread"


def test_16_rows_run_at_once() -> None:
    begun: list[int] = []
    at_once: list[int] = []
    go_on = threading.Event()

    def meet() -> str:
        begun.append(1)
        if len(begun) == 16:
            time.sleep(0.02)
            at_once.append(len(begun))
            go_on.set()
        return str(go_on.wait(5))

    runner = ToolRunner(ToolLimits(seconds=20, result_tokens=TOKENS), cut, print)
    assert [result.content for (result,) in runner.run([[call(meet)] for _ in range(18)])] == ["True"] * 18
    assert set(at_once) == {16}
    runner.close()


def test_rows_without_calls_take_the_place_of_no_other(runner: ToolRunner) -> None:
    rows = [[], *([[]] * 16), [call(add, a=1, b=2)]]
    assert [[result.content for result in row] for row in runner.run(rows)] == [[]] * 17 + [["3"]]


# Tools that do not return


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("tool", [hang, hang_async, swallow_cancellation])
def test_a_call_that_does_not_return_is_abandoned(
    runner: ToolRunner, said: list[str], tool: Callable[..., Any]
) -> None:
    begun = time.monotonic()
    results = runner.run([[call(tool)], [call(add, a=1, b=2)], [call(tool), call(add, a=1, b=1)]])
    assert time.monotonic() - begun < 10 * SECONDS
    stuck, fine, mixed = results
    for result in (stuck[0], mixed[0] if tool is hang else mixed[1]):
        assert result.content == "{'error': 'no result within 0.4 s'}"
        assert result.fault == "no result within 0.4 s"
        assert result.timed_out
        assert result.seconds == pytest.approx(SECONDS, abs=2 * SECONDS)
    assert fine[0].content == "3"
    if tool is hang:  # its environment may still change
        assert (mixed[1].content, mixed[1].refused, mixed[1].fault) == (
            "{'error': 'Not called: an earlier call of this turn passed its time limit.'}",
            True,
            "",
        )
        assert (mixed[1].seconds, mixed[1].timed_out) == (0.0, False)
    if tool is hang_async:
        deadline = time.monotonic() + 10
        while runner.abandoned and time.monotonic() < deadline:
            time.sleep(0.005)
    assert runner.abandoned == (0 if tool is hang_async else 2), "an async call is cancelled"
    assert len(said) == 1
    assert said[0].startswith(f"tool `{tool.__name__}` did not return within 0.4 s (`tool_limits.seconds`)")
    assert only(runner.run([[call(tool)]])).timed_out
    assert len(said) == 1  # reported once
    assert only(runner.run([[call(add, a=1, b=2)]])).content == "3"


def test_an_abandoned_call_that_ends_is_no_longer_counted_and_its_result_is_dropped(runner: ToolRunner) -> None:
    go_on = threading.Event()
    began = threading.Event()
    threads: list[threading.Thread] = []

    def late() -> str:
        threads.append(threading.current_thread())
        began.set()
        go_on.wait(20)
        return "late"

    assert only(runner.run([[call(late)]])).timed_out
    assert runner.abandoned == 1
    go_on.set()
    assert began.wait(10)
    threads[0].join(10)
    assert not threads[0].is_alive(), "nobody would give it another call"
    assert runner.abandoned == 0
    assert only(runner.run([[call(add, a=1, b=2)]])).content == "3"


@pytest.mark.parametrize(
    ("count", "sentence"), [(1, "1 abandoned call of tools still runs"), (2, "2 abandoned calls of tools still run")]
)
def test_the_end_of_a_run_tells_how_many_calls_still_run(said: list[str], count: int, sentence: str) -> None:
    go_on = threading.Event()
    runner = ToolRunner(ToolLimits(seconds=0.05, result_tokens=TOKENS), cut, said.append)
    runner.run([[call(go_on.wait)]] * count)
    runner.close()
    go_on.set()
    assert said[1:] == [sentence]


@pytest.mark.slow
def test_an_async_tool_that_blocks_its_loop_harms_no_later_call(runner: ToolRunner) -> None:
    assert only(runner.run([[call(block_the_loop)]])).timed_out
    assert only(runner.run([[call(add_later, a=1, b=2)]])).content == "3"


def test_a_loop_has_a_second_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    class Late:
        def set(self) -> None:
            """Do nothing: nobody waits for the event."""

        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            return False

    loop = bounded._Loop()
    monkeypatch.setattr(bounded, "Event", Late)
    with monkeypatch.context() as patch:
        patch.setattr(loop._loop, "call_soon_threadsafe", lambda *_: None)
        assert loop.responds() is False
    assert waits == [1.0]
    loop.close()


@pytest.mark.parametrize(
    ("is_alive", "is_over", "is_running", "is_lost"),
    [(True, False, True, False), (True, True, False, False), (False, False, False, True), (False, True, False, False)],
)
def test_a_call_is_lost_if_its_thread_has_ended_before_it(
    is_alive: bool, is_over: bool, is_running: bool, is_lost: bool
) -> None:
    where: Any = SimpleNamespace(is_alive=lambda: is_alive)
    nothing: Any = None
    attempt = bounded._Attempt(nothing, where, 100, nothing)
    assert not attempt.has_begun
    attempt.is_over = is_over
    assert (attempt.is_running(), attempt.is_lost()) == (is_running, is_lost)


def test_a_thread_that_has_ended_gets_no_further_call(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The call would wait until the threads are looked at again, here past its time limit."""
    monkeypatch.setattr(bounded, "_POLL_SECONDS", 60.0)
    runner = ToolRunner(ToolLimits(seconds=10, result_tokens=TOKENS), cut, said.append)
    answer = bounded._Attempt._answer

    def answer_and_end(attempt: bounded._Attempt, outcome: Any) -> None:
        worker: Any = attempt.where
        worker.is_alive = lambda: False
        worker.retire()
        answer(attempt, outcome)

    with monkeypatch.context() as patch:
        patch.setattr(bounded._Attempt, "_answer", answer_and_end)
        assert only(runner.run([[call(add, a=1, b=2)]])).content == "3"
    assert only(runner.run([[call(add, a=3, b=4)]])).content == "7"
    runner.close()
    assert only(runner.run([[call(add, a=5, b=6)]])).content == "11", "the threads of a closed runner have ended too"
    runner.close()


def test_many_abandoned_calls_stop_further_ones(runner: ToolRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "ABANDONED_CALLS", 2)
    runner.run([[call(hang)], [call(hang)]])
    result = only(runner.run([[call(add, a=1, b=2)]]))
    assert result.fault == "not called, because 2 earlier calls passed their time limit and still run"
    assert not result.refused


class _Still:
    """Call that passed its time limit and still runs."""

    def is_running(self) -> bool:
        return True


def test_no_call_is_begun_beside_256_that_still_run(runner: ToolRunner) -> None:
    still: Any = _Still()
    runner._stuck += [still] * 255
    assert only(runner.run([[call(add, a=1, b=2)]])).content == "3"
    runner._stuck.append(still)
    result = only(runner.run([[call(add, a=1, b=2)]]))
    reason = "not called, because 256 earlier calls passed their time limit and still run"
    assert (result.content, result.fault, result.seconds) == (str({"error": reason}), reason, 0.0)


def test_an_interrupted_run_abandons_its_calls(runner: ToolRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_ended", interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.run([[call(go_on.wait)], [call(go_on.wait)]])
    assert runner.abandoned == 2
    go_on.set()


class _Answers:
    """Queue of outcomes that come at given times of a clock, and the time limits of the waits for them."""

    def __init__(self, clock: list[float], *outcomes: Any) -> None:
        self.clock, self.outcomes, self.waits = clock, list(outcomes), []

    def get(self, timeout: float) -> Any:
        self.waits.append(timeout)
        self.clock[0] += timeout
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self.outcomes:
            raise Empty
        return self.outcomes.pop(0)


def waited(
    monkeypatch: pytest.MonkeyPatch, now: float, begun: list[float], *answered: int, **lost: bool
) -> tuple[list[tuple[int, str, float]], float, list[int]]:
    """Wait for calls with a limit of 8 s, of which the last has an attempt.

    Returns:
        Number, fault and seconds of each call that ended, the time limit of the wait, and the calls begun anew.
    """
    clock, again = [now], []
    monkeypatch.setattr(bounded, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    runner = ToolRunner(ToolLimits(seconds=8, result_tokens=TOKENS), cut, print)
    row = bounded._Row()
    jobs = [bounded._Job(row, place, call(add), {}, begun=one) for place, one in enumerate(begun)]
    attempt: Any = SimpleNamespace(is_lost=lambda: True, **lost) if lost else None
    jobs[-1].attempt = attempt
    monkeypatch.setattr(runner, "_begin", lambda job, answers: again.append(job.place))
    answers: Any = _Answers(clock, *((jobs[place], bounded._Outcome("x")) for place in answered))
    found = [(job.place, outcome.fault, outcome.seconds) for job, outcome in runner._ended(jobs, answers)]
    return found, answers.waits[0], again


def test_a_wait_ends_at_the_first_limit_and_looks_for_dead_threads_every_fifth_of_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = "no result within 8 s"
    assert waited(monkeypatch, 100.0, [99.0, 98.0]) == ([], 0.2, [])
    assert waited(monkeypatch, 105.875, [99.0, 98.0]) == ([(1, late, 8.0)], 0.125, [])
    assert waited(monkeypatch, 108.0, [99.0, 98.0]) == ([(0, late, 9.0), (1, late, 10.0)], 0.0, [])
    assert waited(monkeypatch, 108.0, [99.0, 98.0, 97.0], 2, 0) == (
        [(2, "", 0.0), (0, "", 0.0), (1, late, 10.0)],
        0,
        [],
    )
    dead = "the tool ended the thread that it ran in"
    assert waited(monkeypatch, 100.0, [99.5], has_begun=True) == ([(0, dead, pytest.approx(0.7))], 0.2, [])
    assert waited(monkeypatch, 100.0, [99.5], has_begun=False) == ([], 0.2, [0])


def test_a_call_that_never_began_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread ended by what an earlier call left there."""
    clock = [100.0]
    monkeypatch.setattr(bounded, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    runner = ToolRunner(ToolLimits(seconds=8, result_tokens=TOKENS), cut, print)
    row, again = bounded._Row(), []
    lost: Any = SimpleNamespace(is_lost=lambda: True, has_begun=False)
    jobs = [bounded._Job(row, 0, call(add), {}, 99.0, attempt=lost), bounded._Job(row, 1, call(add), {}, 90.0)]
    monkeypatch.setattr(runner, "_begin", lambda job, answers: again.append(job.place))
    empty: Any = _Answers(clock)
    assert [job.place for job, _ in runner._ended(jobs, empty)] == [1]
    assert again == [0]


def test_the_end_of_a_run_ends_idle_threads_and_the_loop(said: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """A call that still waits in the loop is destroyed with it, without an error in the log."""
    runner = ToolRunner(ToolLimits(seconds=0.05, result_tokens=TOKENS), cut, said.append)
    before = {*threading.enumerate()}
    runner.run([[call(add, a=1, b=2)], [call(swallow_cancellation)]])
    own = {*threading.enumerate()} - before
    assert {thread.name for thread in own} == {"tool", "async tools"}
    runner.close()
    for thread in own:
        thread.join(10)
    assert not any(thread.is_alive() for thread in own)
    assert runner.abandoned == 0
    runner._stuck.clear()
    gc.collect()
    assert caplog.text == ""
    runner._limits = ToolLimits(seconds=30, result_tokens=TOKENS)
    assert only(runner.run([[call(add, a=1, b=2)]])).content == "3", "a closed runner begins anew"
    runner.close()


def test_helpers_of_async_tools_run_in_threads_that_delay_no_end(runner: ToolRunner) -> None:
    """Python waits for the threads of asyncio's own pool when the program ends."""
    seen: list[threading.Thread] = []

    async def elsewhere() -> None:
        seen.append(await asyncio.to_thread(threading.current_thread))

    async def fail_elsewhere() -> None:
        await asyncio.to_thread(fail, "there")

    assert only(runner.run([[call(elsewhere)]])).content == "None"
    assert [(thread.name, thread.daemon) for thread in seen] == [("tool", True)]
    assert only(runner.run([[call(fail_elsewhere)]])).fault == "ValueError: there"


def test_a_thread_of_a_call_that_was_cancelled_does_not_run_it() -> None:
    future: Future[Any] = Future()
    future.cancel()
    ran: list[int] = []
    bounded._fulfil(future, ran.append, (1,), {})
    assert ran == []


class _Slow(Exception):
    """Exception whose text does not come within a time limit."""

    def __str__(self) -> str:
        time.sleep(0.3)
        return "late"


def test_an_async_call_that_is_cancelled_while_its_error_is_rendered_is_over(said: list[str]) -> None:
    async def raise_slowly() -> None:
        raise _Slow

    runner = ToolRunner(ToolLimits(seconds=0.05, result_tokens=TOKENS), cut, said.append)
    assert only(runner.run([[call(raise_slowly)]])).timed_out
    deadline = time.monotonic() + 10
    while runner.abandoned and time.monotonic() < deadline:
        time.sleep(0.005)
    assert runner.abandoned == 0
    runner.close()


@pytest.mark.parametrize("error", [asyncio.CancelledError, GeneratorExit])
def test_a_call_that_is_destroyed_with_its_loop_ends_at_once(error: type[BaseException]) -> None:
    """It must not wait for another thread then: nobody would go on with it."""
    answers: Any = SimpleQueue()
    nowhere: Any = None
    job = bounded._Job(bounded._Row(), 0, call(hang_async), {})
    attempt = bounded._Attempt(job, nowhere, 100, answers)

    async def destroy() -> None:
        running = attempt.run_async()
        running.send(None)
        with pytest.raises(StopIteration):
            running.throw(error())

    asyncio.run(destroy())
    assert attempt.is_over
    assert answers.get_nowait()[1].fault == error.__name__


def test_a_loop_is_alive_until_it_is_closed_or_its_thread_has_ended() -> None:
    loop = asyncio.new_event_loop()
    callers, own = bounded._Loop(loop), bounded._Loop()
    assert callers.is_alive()
    assert own.is_alive()
    loop.close()
    assert not callers.is_alive()
    thread, ended = own._thread, threading.Thread(target=int)
    own._thread = ended
    assert not own.is_alive()
    own._thread = thread
    own.close()
    assert thread is not None
    thread.join(10)
    assert not own.is_alive()


def test_async_tools_may_run_on_a_loop_of_the_caller(said: list[str]) -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    seen = []

    async def where() -> str:
        seen.append(asyncio.get_running_loop())
        return "here"

    runner = ToolRunner(ToolLimits(seconds=SECONDS), cut, said.append, loop=loop)
    assert only(runner.run([[call(where)]])).content == "here"
    assert only(runner.run([[call(swallow_cancellation)]])).timed_out
    assert runner.abandoned == 1
    runner.close()
    assert seen == [loop]
    assert said[-1] == "1 abandoned call of tools still runs"
    assert loop.is_running()  # it is the caller's
    assert only(runner.run([[call(where)]])).content == "here"
    assert seen[1] is not loop, "a closed runner leaves the caller's loop alone"
    runner.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


# Tools that raise


class _Unreadable(Exception):
    def __str__(self) -> str:
        raise SystemExit(5)


@pytest.mark.parametrize(
    ("error", "content", "fault"),
    [
        (ValueError("no"), "{'error': 'no'}", "ValueError: no"),
        (ValueError(), "{'error': ''}", "ValueError"),
        (SystemExit(3), "{'error': 'SystemExit: 3'}", "SystemExit: 3"),
        (SystemExit(), "{'error': 'SystemExit'}", "SystemExit"),
        (GeneratorExit(), "{'error': 'GeneratorExit'}", "GeneratorExit"),
        (KeyboardInterrupt(), "{'error': 'KeyboardInterrupt'}", "KeyboardInterrupt"),
        (asyncio.CancelledError(), "{'error': 'CancelledError'}", "CancelledError"),
        (_Unreadable(), "{'error': ''}", "_Unreadable"),
        (ValueError("x" * 10**6), "{'error': '" + "x" * (TOKENS * 32 - 11), "ValueError: " + "x" * 197 + "..."),
        (ValueError("\x1b[2J\ud800"), "{'error': '\\x1b[2J\\ud800'}", "ValueError: \\x1b[2J\\ud800"),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_an_exception_is_a_result(
    runner: ToolRunner, error: BaseException, content: str, fault: str, is_async: bool
) -> None:
    def raising() -> None:
        raise error

    async def raising_async() -> None:
        raise error

    row = runner.run([[call(raising_async if is_async else raising)], [call(add, a=1, b=2), call(add_later, a=1, b=1)]])
    assert (row[0][0].content, row[0][0].fault, row[0][0].refused) == (content, fault, False)
    assert [result.content for result in row[1]] == ["3", "2"]
    assert only(runner.run([[call(add_later, a=1, b=2)]])).content == "3"


def test_a_tool_that_ends_its_thread(runner: ToolRunner) -> None:
    def end_later() -> str:
        # Delivered to the thread at some later instruction, perhaps after the tool has returned.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(SystemExit))
        return "done"

    for _ in range(50):
        results = runner.run([[call(end_later)], [call(add, a=1, b=2)], [call(add, a=3, b=4)]])
        assert [row[0].content for row in results[1:]] == ["3", "7"]
        assert results[0][0].content == "done" or results[0][0].fault


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("leaves", [False, True], ids=["returns", "exits"])
def test_the_child_of_a_tool_that_forks_ends(leaves: bool, is_async: bool, runner: ToolRunner) -> None:
    children: list[int] = []

    def fork() -> str:
        child = os.fork()
        children.append(child)
        if leaves and not child:
            sys.exit(3)
        return "forked"

    async def fork_later() -> str:
        return fork()

    assert only(runner.run([[call(fork_later if is_async else fork)]])).content == "forked"
    for _ in range(100):
        ended, status = os.waitpid(children[0], os.WNOHANG)
        if ended:
            break
        time.sleep(0.05)
    else:
        os.kill(children[0], signal.SIGKILL)
        pytest.fail("the child goes on")
    assert status == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_without_an_answer_is_noticed(runner: ToolRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(attempt: bounded._Attempt) -> None:
        attempt.has_begun = True
        raise SystemExit

    monkeypatch.setattr(bounded._Attempt, "run", die)
    begun = time.monotonic()
    result = only(ToolRunner(ToolLimits(seconds=60), cut, print).run([[call(add, a=1, b=2)]]))
    assert result.fault == "the tool ended the thread that it ran in"
    assert time.monotonic() - begun < 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_subtask_that_exits_ends_the_loop_and_the_next_call_has_another(runner: ToolRunner) -> None:
    async def leave() -> None:
        raise SystemExit(1)

    begun = []

    async def spawn() -> str:
        begun.append(1)
        task = asyncio.ensure_future(leave())
        await asyncio.sleep(5)
        return str(task)

    result = only(runner.run([[call(spawn)]]))
    assert result.fault == "the tool ended the thread that it ran in"
    assert (len(begun), result.timed_out) == (1, False)
    assert only(runner.run([[call(add_later, a=1, b=2)]])).content == "3"


def test_a_system_without_threads_gives_faults(runner: ToolRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert only(runner.run([[call(add, a=1, b=2)]])).fault == "RuntimeError: can't start new thread"


# Results of every kind and size


class _Silent:
    def __str__(self) -> str:
        raise ValueError("no text")


class _Endless:
    def __repr__(self) -> str:
        while True:
            time.sleep(0.01)


class _Number(int):
    def __str__(self) -> Any:
        return 3  # TypeError


class _Text(str):
    def __getitem__(self, key: Any) -> Any:
        raise RuntimeError("sliced")

    def __len__(self) -> int:
        raise RuntimeError("measured")


VALUES: list[tuple[Any, str]] = [
    ("a b", "a b"),
    (_Text("text"), "text"),
    (3.0, "3.0"),
    (None, "None"),
    ([], "[]"),
    ([1, "2"], "[1, '2']"),
    ([{"type": "text", "text": 3}], "[{'type': 'text', 'text': 3}]"),
    ([{"type": "video", "video": "v"}], "[{'type': 'video', 'video': 'v'}]"),
    (({"type": "text", "text": "x"},), "({'type': 'text', 'text': 'x'},)"),
    (_Silent(), "{'error': 'no text'}"),
    ([_Endless()], "{'error': 'no result within 0.4 s'}"),
    (_Number(3), "{'error': '__str__ returned non-string (type int)'}"),
    ("\x1b]0;title\x07 a\tb\r\nc\x00", "\\x1b]0;title\\x07 a\tb\nc\\x00"),
    ("\ud83d lone \u202e turned", "\\ud83d lone \\u202e turned"),
    ("é 漢字 \U0001f600", "é 漢字 \U0001f600"),
]


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("number", range(len(VALUES)))  # pytest would call methods of a value in its name
@pytest.mark.parametrize("is_async", [False, True])
def test_any_value_becomes_text(runner: ToolRunner, number: int, is_async: bool) -> None:
    value, content = VALUES[number]

    def give() -> Any:
        return value

    async def give_async() -> Any:
        return value

    result = only(runner.run([[call(give_async if is_async else give)]]))
    assert result.content == content
    result.content.encode("utf-8")
    assert bool(result.fault) == content.startswith("{'error'")


def test_another_type_each_time(runner: ToolRunner) -> None:
    values = iter(["text", 3, None, {"a": 1}, [1], b"x", ValueError("not raised")])

    def vary() -> Any:
        return next(values)

    results = runner.run([[call(vary) for _ in range(7)]])[0]
    assert [result.content for result in results] == ["text", "3", "None", "{'a': 1}", "[1]", "b'x'", "not raised"]


HUGE: dict[str, Callable[[], Any]] = {
    "text": lambda: "word " * (20 << 20),
    "one word": lambda: "x" * (100 << 20),
    "bytes": lambda: b"x" * (100 << 20),
    "list": lambda: [1] * (10 << 20),
    "list of texts": lambda: ["x" * (100 << 20)] * 3,
    "mapping": lambda: dict.fromkeys(range(1 << 20), "v"),
    "block": lambda: [{"type": "text", "text": "word " * (20 << 20)}],
    "escapes": lambda: "\x00" * (100 << 20),
}


@pytest.mark.parametrize("kind", HUGE)
def test_a_huge_result_is_cut_before_it_is_tokenized(kind: str) -> None:
    lengths = []

    def counted_cut(text: str) -> str:
        lengths.append(len(text))
        return cut(text)

    value = HUGE[kind]()

    def give() -> Any:
        return value

    runner = ToolRunner(ToolLimits(seconds=30, result_tokens=TOKENS), counted_cut, print)
    result = only(runner.run([[call(give)]]))
    runner.close()
    text = result.content if isinstance(result.content, str) else result.content[0]["text"]
    assert text
    assert len(text) <= max(lengths) <= TOKENS * bounded.CHARACTERS_PER_TOKEN
    assert len(text.split(" ")) <= TOKENS
    assert result.seconds < 1


def test_texts_of_blocks_are_cut_together_and_images_stay(runner: ToolRunner) -> None:
    image = object()
    words = {"type": "text", "text": "word " * 15}

    def give() -> Any:
        return [{"type": "image", "image": image}, words, {"type": "image", "image": image}, words]

    first, text, last = only(runner.run([[call(give)]])).content
    assert first["image"] is last["image"] is image
    assert len(text["text"].split(" ")) == TOKENS


@pytest.mark.parametrize(
    ("texts", "kept"),
    [
        (["a" * 4, "b" * 5, "c" * 2], ["aaaa", "bbbbb", "c"]),
        (["a" * 12, "b"], ["a" * 10, ""]),
        (["\x00", "b" * 9, "c"], ["\\x00", "b" * 6, ""]),
    ],
)
def test_the_texts_of_blocks_share_one_limit_of_characters(texts: list[str], kept: list[str]) -> None:
    """Escapes count as they are written, so that no block makes room for more."""
    blocks = [{"type": "text", "text": text} for text in texts]
    assert bounded._content(blocks, 10) == [{"type": "text", "text": text} for text in kept]
    assert [block["text"] for block in blocks] == texts, "the tool's own list is left as it was"


def test_a_list_has_at_most_64_blocks() -> None:
    block = {"type": "text", "text": "x"}
    assert bounded._content([block] * 64, 9999) == [block] * 64
    assert bounded._content([block] * 65, 9999) == str([block] * 65)


def test_one_text_stands_in_place_of_the_texts_that_are_cut(runner: ToolRunner) -> None:
    image, other = {"type": "image", "image": 1}, {"type": "image", "image": 2}
    words = {"type": "text", "text": "word " * 15}

    def give() -> Any:
        return [image, words, other, words]

    expected = " ".join(["word"] * 15 + ["\nword"] + ["word"] * 4)
    assert only(runner.run([[call(give)]])).content == [image, {"type": "text", "text": expected}, other]


def test_a_number_with_more_digits_than_python_writes_is_a_fault(runner: ToolRunner) -> None:
    def power() -> int:
        return 10**5000

    assert only(runner.run([[call(power)]])).fault.startswith("ValueError: Exceeds the limit")


# Calls that a policy may write


def test_500_calls_in_a_turn(runner: ToolRunner) -> None:
    made = []

    def count() -> int:
        made.append(1)
        return len(made)

    results = runner.run([[call(count)] * 500])[0]
    assert len(results) == 500
    assert len(made) == CALLS_PER_TURN
    assert [result.refused for result in results] == [False] * CALLS_PER_TURN + [True] * (500 - CALLS_PER_TURN)
    assert results[-1].content == "{'error': 'Not called: a turn may make 32 calls.'}"
    assert not any(result.fault for result in results)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("text", "must be a mapping, not str"),
        ([1, 2], "must be a mapping, not list"),
        (None, "must be a mapping, not NoneType"),
        (7, "must be a mapping, not int"),
        ({"a": 1}, "missing 1 required positional argument: 'b'"),
        ({"a": 1, "b": 2, "c": 3}, "got an unexpected keyword argument 'c'"),
        ({1: 2}, "keywords must be strings"),
        ({"a": 1, "b": 2, "\ud800": 3}, "got an unexpected keyword argument '\\ud800'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(runner: ToolRunner, arguments: Any, reason: str) -> None:
    result = only(runner.run([[Call("add", arguments, add)]]))
    assert result.refused
    assert not result.fault
    assert reason in str(result.content)


def test_the_body_of_a_decorated_tool_does_not_run_with_unfit_arguments(runner: ToolRunner) -> None:
    ran = []

    @functools.wraps(add)
    def decorated(*args: Any, **kwargs: Any) -> int:
        ran.append(kwargs)
        return add(*args, **kwargs)

    result = only(runner.run([[call(decorated, a=1)]]))
    assert result.refused
    assert result.content == str({"error": "missing a required argument: 'b'"})
    assert not ran
    assert only(runner.run([[call(decorated, a=1, b=2)]])).content == "3"
    ran.clear()
    signed: Any = decorated
    signed.__signature__ = inspect.signature(add)
    del signed.__wrapped__
    assert only(runner.run([[call(decorated, a=1)]])).refused
    assert not ran, "a signature of its own says as little about the body"


@pytest.mark.parametrize(
    ("function", "content"),
    [
        (dict, "{'a': 1}"),  # without a signature
        (SimpleNamespace, "namespace(a=1)"),
        (functools.partial(add, b=1), "2"),
        (print, "unexpected keyword argument 'a'"),
        (str.upper, "argument: 'self'"),
    ],
)
def test_callables_of_other_kinds(runner: ToolRunner, function: Callable[..., Any], content: str) -> None:
    result = only(runner.run([[Call("x", {"a": 1}, function)]]))
    assert content in result.content
    assert bool(result.refused or result.fault) == ("argument" in content)
    for arguments in ([1], None):
        result = only(runner.run([[Call("x", arguments, function)]]))
        assert result.refused
        assert "mapping" in result.content


class _Shelf(list[str]):
    """Tool that is also a container, which is false while it is empty."""

    def __call__(self, name: str) -> str:
        return f"{name}: {len(self)}"


class _EmptyPartial(functools.partial[Any]):
    """Async tool that is false."""

    def __len__(self) -> int:
        return 0


def test_an_empty_container_may_be_a_tool(runner: ToolRunner) -> None:
    assert only(runner.run([[call(_Shelf(), name="books")]])).content == "books: 0"
    assert only(runner.run([[call(_EmptyPartial(add_later, b=2), a=1)]])).content == "3"


def test_names_are_bounded_and_harmless(runner: ToolRunner) -> None:
    no_text: Any = {}
    results = runner.run([[Call("\x1b[2J", {}, None), Call("x" * 10**6, {}, None), Call(no_text, {}, None)]])[0]
    assert [result.name for result in results] == ["\\x1b[2J", "x" * 197 + "...", "unknown"]
    assert all(len(str(result.content)) <= TOKENS * bounded.CHARACTERS_PER_TOKEN for result in results)


def test_a_call_that_the_loop_refuses_keeps_its_place(runner: ToolRunner) -> None:
    bad = Call("add", {}, None, refusal="Unsupported tool call type: code")
    results = runner.run([[call(add, a=1, b=2), bad, call(add, a=3, b=4)]])[0]
    assert [result.content for result in results] == ["3", "{'error': 'Unsupported tool call type: code'}", "7"]
    assert results[1].refused


def test_arguments_nested_deeply_are_refused(runner: ToolRunner) -> None:
    def take(value: Any) -> str:
        return "taken"

    deep = json.loads("[" * 900 + "]" * 900)
    result = only(runner.run([[call(take, value=deep)]]))
    assert result.refused
    assert result.content == "{'error': 'The arguments are nested too deeply.'}"


def test_a_tool_that_changes_its_arguments_changes_no_other_call(
    runner: ToolRunner, capsys: pytest.CaptureFixture[str]
) -> None:
    def empty(numbers: list[int], options: dict[str, Any]) -> int:
        print("emptying", numbers)
        count = len(numbers)
        numbers.clear()
        options["inner"].append(count)
        options["own"] = numbers
        return count

    shared = {"numbers": [1, 2, 3], "options": {"inner": []}}
    calls = [[Call("empty", shared, empty), Call("empty", shared, empty)] for _ in range(8)]
    results = runner.run(calls)
    assert {result.content for row in results for result in row} == {"3"}
    assert shared == {"numbers": [1, 2, 3], "options": {"inner": []}}
    assert capsys.readouterr().out.count("emptying [1, 2, 3]") == 16


def test_a_tool_that_returns_the_same_list_each_time_changes_no_earlier_result(runner: ToolRunner) -> None:
    blocks: list[Any] = []

    def grow() -> Any:
        blocks.append({"type": "text", "text": str(len(blocks))})
        return blocks

    results = runner.run([[call(grow)] * 3])[0]
    assert [len(result.content) for result in results] == [1, 2, 3]


# The share of faults


def test_the_run_goes_on_until_enough_calls_are_judged() -> None:
    window = FailureWindow(0.5)
    window.add([[("search", "TimeoutError: x")] * (bounded.ENOUGH_CALLS - 1)])
    assert window.reason_to_stop() == ""
    window.add([[("search", "ValueError: last")]])
    assert window.reason_to_stop() == (
        "100.0% of the last 50 calls of tools failed, most of them of `search` (last error: ValueError: last): correct "
        "the tool, or raise `tool_limits.failures`, which is 0.5"
    )


def test_half_the_calls_may_fail_and_old_calls_are_forgotten() -> None:
    window = FailureWindow(0.5)
    window.add([[("a", "bad")] * 100 + [("a", "")] * 100])
    assert window.reason_to_stop() == ""
    window.add([[("b", "worse")]])  # the oldest call failed too, so that the share stays
    assert window.reason_to_stop() == ""
    window.add([[("a", "")] * 100 + [("b", "worse")] * 101])
    assert window.reason_to_stop().startswith("50.5% of the last 200 calls of tools failed, most of them of `b`")
    window.add([[("a", "")] * 200])
    assert window.share == 0


def test_the_tool_that_failed_most_is_named_with_its_own_last_error() -> None:
    window = FailureWindow(0.25)
    window.add([[("rare", "E: 1"), ("often", "E: 2"), ("often", "E: 3"), ("rare", ""), ("often", "")] * 20])
    window.add([[("rare", "E: 4")]])
    assert window.share == 61 / 101
    assert window.reason_to_stop() == (
        "60.4% of the last 101 calls of tools failed, most of them of `often` (last error: E: 3): correct the tool, or "
        "raise `tool_limits.failures`, which is 0.25"
    )


def test_all_faults_are_allowed_with_a_share_of_1_and_none_with_0() -> None:
    everything, nothing = FailureWindow(1.0), FailureWindow(0.0)
    for window in (everything, nothing):
        window.add([[("a", "bad")] + [("a", "")] * 60])
    assert everything.reason_to_stop() == ""
    assert nothing.reason_to_stop().startswith("1.6% of the last 61 calls")


def test_every_rank_has_its_last_calls_in_the_window() -> None:
    window = FailureWindow(1.0)
    window.add([[("a", "bad")] * 200, [], [("b", "")] * 200, [("c", "")] * 10])
    names = [name for name, _ in window._calls]
    assert (names.count("a"), names.count("b"), names.count("c")) == (95, 95, 10)
    assert names[-3:] == ["a", "b", "c"]


def test_refused_calls_are_not_gathered() -> None:
    results = [Result("a", "x"), Result("b", "x", refused=True), Result("c", "x", fault="E:\n" + "y" * 1000)]
    assert FailureWindow.of_rank(results) == [("a", ""), ("c", "E: " + "y" * 194 + "...")]
    assert len(FailureWindow.of_rank(results * 500)) == bounded.WINDOW


# Signals of the user

CHILD = """
import signal, sys, threading, time
from grpo_recipes.recipe.specs import ToolLimits
from grpo_recipes.tools.run import Call, ToolRunner
import asyncio

def swallow() -> None:
    while True:
        try:
            print("begun", flush=True)
            time.sleep(600)
        except BaseException:
            continue

async def swallow_async() -> None:
    await asyncio.to_thread(swallow)

if sys.argv[2] == "stop":
    def stop(*_):
        print("handled", flush=True)
        raise SystemExit(7)
    signal.signal(signal.SIGTERM, stop)
tool = {"sync": swallow, "async": swallow_async}[sys.argv[1]]
runner = ToolRunner(ToolLimits(seconds=600), lambda text: text, print)
try:
    runner.run([[Call("swallow", {}, tool)]])
except KeyboardInterrupt:
    print("stopped", flush=True)
    raise SystemExit(130)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(
    ("number", "handler", "code", "last"),
    [
        (signal.SIGINT, "", 130, "stopped"),
        (signal.SIGTERM, "stop", 7, "handled"),
        (signal.SIGTERM, "", -signal.SIGTERM, "begun"),
    ],
)
def test_a_signal_stops_the_program_during_a_tool(kind: str, number: int, handler: str, code: int, last: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, kind, handler], stdout=subprocess.PIPE, text=True, env={**os.environ, "RANK": "0"}
    )
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "begun\n"
        begun = time.monotonic()
        child.send_signal(number)
        rest = child.stdout.read()
        assert child.wait(timeout=30) == code
        assert time.monotonic() - begun < 5
    finally:
        child.kill()
    assert (["begun", *rest.split()])[-1] == last
