"""Calls of tools: arguments against the schema, mistakes and faults, limits, and tools that misbehave."""

from __future__ import annotations

import asyncio
import enum
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import product
from typing import Any, Literal

import pytest

from grpo_recipes import ToolError
from grpo_recipes.recipe.specs import ToolLimits
from grpo_recipes.tools import run
from grpo_recipes.tools.loop import Row, RowTools
from grpo_recipes.tools.metrics import last_calls
from grpo_recipes.tools.run import Call, FailureWindow, Result, ToolRunner
from tests.support.tool_rollouts import add, fetch, repeat

SECONDS = 0.2
TOKENS = 20


def cut(text: str) -> str:
    """Cut to words, as a tokenizer would to tokens."""
    return " ".join(text.split(" ")[:TOKENS])


@pytest.fixture
def runner() -> ToolRunner:
    return ToolRunner(ToolLimits(seconds=SECONDS, result_tokens=TOKENS), cut)


def call(function: Callable[..., Any], **arguments: Any) -> Call:
    return Call(getattr(function, "__name__", "tool"), arguments, function)


def tool(function: Callable[..., Any]) -> Callable[..., Any]:
    """Describe a function and its arguments."""
    names = [name for name in function.__annotations__ if name != "return"]
    function.__doc__ = "A tool.\n\nArgs:\n" + "".join(f"    {name}: Any.\n" for name in names)
    return function


def only(results: list[list[Result]]) -> Result:
    ((result,),) = results
    return result


# ---- arguments


class Color(enum.Enum):
    RED = "red"
    ONE = 1


@tool
def typed(
    number: int = 0,
    share: float = 0.0,
    flag: bool = False,
    text: str = "",
    perhaps: int | None = None,
    choice: Literal["a", "b", 3] | None = None,
    color: Color = Color.RED,
    several: list[int] = [],  # noqa: B006
    table: dict[str, list[float]] = {},  # noqa: B006
    either: int | list[str] = 0,
    pair: tuple[int, str] = (0, ""),
    anything: Any = None,
) -> str:
    return "fits"


FITTING: list[dict[str, Any]] = [
    *({}, {"number": -3}, {"share": 2}, {"share": 0.5}, {"flag": True}, {"text": "x\ud800"}, {"perhaps": None}),
    *({"perhaps": 7}, {"choice": "b"}, {"choice": 3}, {"choice": None}, {"color": "red"}, {"color": 1}),
    *({"several": []}, {"several": [1, 2]}, {"table": {"a": [1, 0.5]}}, {"either": 1}, {"either": ["x"]}),
    *({"pair": [1, "x"]}, {"anything": {"deep": [None, {"x": 1}]}}, {"anything": None}),
]
UNFIT: list[Any] = [
    *({"number": "one"}, {"number": True}, {"number": 3.0}, {"number": None}, {"number": [1]}),
    *({"share": "0.5"}, {"share": False}, {"share": math.nan}, {"share": math.inf}, {"flag": 1}, {"flag": "true"}),
    *({"text": 3}, {"perhaps": "x"}, {"choice": "c"}, {"choice": True}, {"choice": "3"}, {"color": "RED"}),
    *({"color": True}, {"several": [1, "2"]}, {"several": 3}, {"table": {"a": [1, "x"]}}, {"table": {"a": 1}}),
    *({"table": [1]}, {"either": "x"}, {"either": [1]}, {"pair": ["x", 1]}, {"anything": [math.nan]}),
    *({"anything": 10**5000}, {"unknown": 1}, {"self": 1}, [1], "text", None, 3),
]


def test_arguments_that_fit_reach_the_tool(runner: ToolRunner) -> None:
    for arguments in FITTING:
        result = only(runner.run([[call(typed, **arguments)]]))
        assert (result.content, result.fault, result.mistake) == ("fits", "", ""), arguments


def test_arguments_that_do_not_fit_are_a_mistake(runner: ToolRunner) -> None:
    for number, arguments in enumerate(UNFIT):
        result = only(runner.run([[Call("typed", arguments, typed)]]))
        assert result.content.startswith("{'error': "), number
        assert result.mistake
        assert (result.made, result.fault, result.seconds) == (False, "", 0.0)


def test_the_argument_that_does_not_fit_is_named(runner: ToolRunner) -> None:
    calls = [call(add, a="one", b=2), call(add, a=1), call(add, a=1, b=2, c=3), call(typed, perhaps="x")]
    for result, words in zip(runner.run([calls])[0], ("a: 'one'", "'b'", "'c'", "perhaps: 'x'"), strict=True):
        assert words in result.content
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    assert only(runner.run([[call(typed, anything=nested)]])).mistake


def test_methods_of_an_environment_are_checked(runner: ToolRunner) -> None:
    class Game:
        def guess(self, number: int) -> str:
            """Guess.

            Args:
                number: Number.
            """
            return f"{number} is wrong"

    results = runner.run([[call(Game().guess, number=given)] for given in (4, "4")])
    assert results[0][0].content == "4 is wrong"
    assert "number: '4'" in results[1][0].content


def test_a_tool_that_changes_its_arguments_changes_no_other_call(runner: ToolRunner) -> None:
    @tool
    def append(several: list[int]) -> str:
        several.append(1)
        return str(several)

    given = {"several": [0]}
    results = runner.run([[Call("append", given, append)] * 2])[0]
    assert [result.content for result in results] == ["[0, 1]"] * 2
    assert given == {"several": [0]}
    assert all(result.arguments is given for result in results)


# ---- results, mistakes and faults


@tool
def fails(kind: str) -> Any:
    errors = {"text": ValueError("no\nluck"), "empty": ValueError(), "blank": OSError(" "), "key": KeyError("k")}
    errors |= {"mistake": ToolError("write digits"), "bare": ToolError()}
    if kind in errors:
        raise errors[kind]
    if kind == "exit":
        raise SystemExit(3)
    return {"coroutine": fetch("x"), "generator": (one for one in "ab"), "async_generator": ticks()}[kind]


@tool
async def fails_later(kind: str) -> Any:
    await asyncio.sleep(0)
    return fails(kind)


async def ticks() -> Any:
    yield 1


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_what_a_tool_raises_is_a_fault_unless_it_is_a_tool_error(runner: ToolRunner) -> None:
    table = [
        *(("text", "no\\nluck", "ValueError: no\nluck", ""), ("empty", "ValueError", "ValueError", "")),
        *(("blank", "OSError", "OSError", ""), ("key", "'k'", "KeyError: 'k'", ""), ("exit", "3", "SystemExit: 3", "")),
        *(("mistake", "write digits", "", "ToolError: write digits"), ("bare", "ToolError", "", "ToolError")),
        *((kind, kind, kind, "") for kind in ("coroutine", "generator", "async_generator")),
    ]
    for function, (kind, shown, fault, mistake) in product((fails, fails_later), table):
        result = only(runner.run([[call(function, kind=kind)]]))
        assert result.content.startswith("{'error': ")
        assert shown in result.content
        assert (fault in result.fault, mistake) == (True, result.mistake)
        assert bool(result.fault) != bool(result.mistake)
        assert result.made


@tool
def give(value: Any) -> Any:
    given: dict[str, Any] = {"set": {1}, "cycle": []}
    given["cycle"].append(given["cycle"])
    return given.get(value, value) if isinstance(value, str) else value


def test_a_result_is_harmless_text_within_the_limit(runner: ToolRunner) -> None:
    table: list[tuple[Any, str]] = [
        *(("two\n\tlines", "two\n\tlines"), (None, "None"), ([1.5, None, True], "[1.5, None, True]")),
        *(({"a": ["'"]}, str({"a": ["'"]})), ("set", "{1}"), ("cycle", "[[...]]")),
        ("a\r\nb\rc\x1b[0m\x00\ud800\u202e", "a\nb\nc\\x1b[0m\\x00\\ud800\\u202e"),
        ([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], "one two"),
        ("x" * 10**7, "x" * TOKENS * run.CHARACTERS_PER_TOKEN),
        ("a " * 50, "a " * (TOKENS - 1) + "a"),
    ]
    for value, content in table:
        assert only(runner.run([[call(give, value=value)]])).content == content


def test_results_and_their_order_are_trls(runner: ToolRunner) -> None:
    """Sync and refused calls come first, then async calls."""
    calls = [
        *(call(fetch, text="a"), call(add, a=1, b=2), Call("nothing", {}, None), call(fetch, text="lost")),
        *(call(repeat, text="b", times=2), Call("x", {}, None, "refused by the loop")),
    ]
    results = runner.run([calls])[0]
    assert [result.content for result in results] == [
        *("3", "{'error': 'Tool nothing not found.'}", "bb", "{'error': 'refused by the loop'}", "A"),
        "{'error': 'no answer'}",
    ]
    assert [result.made for result in results] == [True, False, True, False, True, True]
    name = "n" * 300 + "\x1b"
    assert len(only(runner.run([[Call(name, {}, None)]])).name) <= run.NAME_CHARACTERS


def test_a_turn_makes_32_calls(runner: ToolRunner) -> None:
    results = runner.run([[call(add, a=n, b=0) for n in range(500)]])[0]
    assert [result.content for result in results[:32]] == [str(n) for n in range(32)]
    assert all(result.mistake and not result.made for result in results[32:])


# ---- rows at the same time


def test_rows_run_at_the_same_time_and_calls_of_a_row_one_after_the_other(runner: ToolRunner) -> None:
    order: list[str] = []
    meeting = threading.Barrier(3, timeout=10)

    @tool
    def step(row: str, number: int) -> str:
        if number == 0:
            meeting.wait()  # passes only if all rows are here
        order.append(f"{row}{number}")
        return f"{row}{number}"

    rows = [[call(step, row=row, number=number) for number in range(3)] for row in "abc"]
    results = runner.run(rows)
    assert [[result.content for result in row] for row in results] == [[f"{r}{n}" for n in range(3)] for r in "abc"]
    for row in "abc":
        assert [entry for entry in order if entry[0] == row] == [f"{row}{n}" for n in range(3)]


def test_16_rows_run_at_once_and_all_rows_run() -> None:
    at_once: list[int] = []
    running: list[int] = []

    @tool
    def meet(number: int) -> str:
        running.append(number)
        at_once.append(len(running))
        time.sleep(0.01)
        running.remove(number)
        return str(number)

    runner = ToolRunner(ToolLimits(seconds=20, result_tokens=TOKENS), cut)
    rows = [[call(meet, number=n), call(fetch, text="a")] for n in range(60)] + [[]]
    assert [[one.content for one in row] for row in runner.run(rows)] == [[str(n), "A"] for n in range(60)] + [[]]
    assert 2 <= max(at_once) <= run.ROWS_AT_ONCE


# ---- calls that do not return


@tool
def hang() -> None:
    time.sleep(30)


@tool
async def hang_async() -> None:
    await asyncio.sleep(30)


@tool
async def block_the_loop() -> None:
    time.sleep(3)


@pytest.mark.parametrize("function", [hang, hang_async, block_the_loop])
def test_a_call_that_does_not_return_is_abandoned(runner: ToolRunner, function: Callable[..., Any]) -> None:
    begun = time.monotonic()
    stuck, fine, mixed = runner.run([[call(function)], [call(add, a=1, b=2)], [call(function), call(add, a=1, b=1)]])
    assert time.monotonic() - begun < 20 * SECONDS
    assert f"{SECONDS} s" in stuck[0].content
    assert (f"{SECONDS} s" in stuck[0].fault, stuck[0].mistake, stuck[0].timed_out) == (True, "", True)
    assert stuck[0].seconds == pytest.approx(SECONDS, abs=4 * SECONDS)
    assert fine[0].content == "3"
    if function is hang:  # the abandoned call may still change the row's environment
        assert (mixed[1].made, mixed[1].fault, mixed[1].mistake) == (False, "", "")
        assert mixed[1].content
    assert only(runner.run([[call(add, a=1, b=2)]])).content == "3"


def test_abandoned_calls_are_capped_until_they_end(runner: ToolRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ABANDONED_CALLS", 2)
    go_on = threading.Event()

    @tool
    def wait() -> str:
        return str(go_on.wait(30))

    runner.run([[call(wait)], [call(wait)]])
    refused = only(runner.run([[call(add, a=1, b=2)]]))
    assert (refused.made, bool(refused.fault)) == (False, True)
    go_on.set()
    deadline = time.monotonic() + 10
    while runner._stuck and time.monotonic() < deadline:
        time.sleep(0.01)
    assert only(runner.run([[call(add, a=1, b=2)]])).content == "3"


def test_calls_have_a_few_seconds_once_the_run_is_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "STOP_SECONDS", 0.1)
    stop = threading.Event()
    runner = ToolRunner(ToolLimits(seconds=600), cut, is_stopping=stop.is_set)
    threading.Timer(0.05, stop.set).start()
    begun = time.monotonic()
    first, *others = runner.run([[call(hang), call(add, a=1, b=2)]] + [[call(hang_async)]] * 30)
    assert time.monotonic() - begun < 5
    assert (first[0].timed_out, first[0].fault, first[0].mistake) == (True, "", "")
    assert {result.made for result in (first[1], *others[-1])} == {False}
    assert {(result.fault, result.mistake) for row in (first, *others) for result in row} == {("", "")}
    stop.clear()
    assert only(runner.run([[call(add, a=1, b=2)]])).content == "3", "a later training runs calls again"


CHILD = """
import asyncio, signal, sys, time
from grpo_recipes.recipe.specs import ToolLimits
from grpo_recipes.tools.run import Call, ToolRunner

def swallow() -> None:
    '''Never return.'''
    while True:
        try:
            print("begun", flush=True)
            time.sleep(600)
        except BaseException:
            continue

async def swallow_async() -> None:
    '''Never return.'''
    await asyncio.to_thread(swallow)

if sys.argv[2] == "stop":
    def stop(*_):
        print("handled", flush=True)
        raise SystemExit(7)
    signal.signal(signal.SIGTERM, stop)
tool = {"sync": swallow, "async": swallow_async}[sys.argv[1]]
runner = ToolRunner(ToolLimits(seconds=600), lambda text: text)
try:
    runner.run([[Call("swallow", {}, tool)]])
except KeyboardInterrupt:
    print("stopped", flush=True)
    raise SystemExit(130)
"""


STOPS = [
    ("async", signal.SIGINT, "", 130, "stopped"),
    ("sync", signal.SIGINT, "", 130, "stopped"),
    ("async", signal.SIGTERM, "stop", 7, "handled"),
    ("sync", signal.SIGTERM, "", -signal.SIGTERM, "begun"),
]


@pytest.mark.slow
def test_a_signal_stops_the_program_during_a_tool() -> None:
    children = []
    for kind, _, handler, _, _ in STOPS:  # all at once, because imports take longest
        command = [sys.executable, "-c", CHILD, kind, handler]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "RANK": "0"}))
    try:
        for child, (_, number, _, code, last) in zip(children, STOPS, strict=True):
            assert child.stdout is not None
            assert child.stdout.readline() == "begun\n"
            begun = time.monotonic()
            child.send_signal(number)
            rest = child.stdout.read()
            assert child.wait(timeout=30) == code
            assert time.monotonic() - begun < 10
            assert ["begun", *rest.split()][-1] == last
    finally:
        for child in children:
            child.kill()


# ---- faults and mistakes among the last calls


def window(*ranks: list[tuple[str, str, str]], most: float = 0.5) -> FailureWindow:
    made = FailureWindow(most)
    made.add(ranks)
    return made


FINE, FAULT, MISTAKE = ("add", "", ""), ("add", "E: 1", ""), ("add", "", "ToolError: no")


def test_a_run_stops_by_the_share_of_faults() -> None:
    for calls, most, stops in (
        ([FAULT] * 49, 0.5, False),
        ([FAULT] * 50, 0.5, True),
        ([FAULT] * 50, 1.0, False),
        ([FAULT] * 49 + [MISTAKE] * 100, 0.5, False),
        ([FAULT] * 26 + [FINE] * 24 + [MISTAKE] * 100, 0.5, True),
        ([FAULT] * 25 + [FINE] * 25, 0.5, False),
        ([FINE] * 49 + [FAULT], 0.0, True),
        ([MISTAKE] * 200, 0.0, False),
        ([FAULT] * 200 + [FINE] * 100, 0.5, False),
    ):
        reason = window(calls, most=most).reason_to_stop()
        assert bool(reason) == stops
        assert not stops or all(word in reason for word in ("`add`", "E: 1", "`tool_limits.failures`", f"{most:g}"))


def test_every_rank_has_its_last_calls_in_the_window() -> None:
    old, busy = [FINE] * 200, [FINE] * 200
    found = window([*old, ("find", "E: 2", "")], busy, most=0.0)
    assert "`find`" in found.reason_to_stop()
    assert "E: 2" in found.reason_to_stop()


def test_a_tool_whose_calls_are_all_mistakes_is_named_once() -> None:
    find = ("find", "", "a: 'x' is not of type 'integer'")
    assert not list(window([find] * 19).without_success())
    found = window([FINE] * 40 + [find] * 20 + [("rare", "", "no")])
    ((sentence),) = found.without_success()
    assert all(figure in sentence for figure in ("20", "`find`", "a: 'x'"))
    found.add([[find] * 100])
    assert not list(found.without_success())
    assert not list(window([MISTAKE] * 100 + [FINE]).without_success())
    assert not list(window([MISTAKE] * 100 + [FAULT]).without_success())


def test_only_calls_of_tools_are_judged() -> None:
    row = Row([], [], [], RowTools({"add": add}))
    row.turns = [[Result("add", "3"), Result("add", "", fault="E:\n1"), Result("none", "", mistake="no", made=False)]]
    row.turns.append([Result("add", "", made=False), Result("add", "", mistake="no", made=False)])
    assert last_calls([row]) == [FINE, ("add", "E: 1", ""), ("add", "", "no")]
