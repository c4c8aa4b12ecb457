"""Split assertions: the judged form agrees with Python's own `assert`, and the program never gets the verdict."""

from __future__ import annotations

import collections
import enum
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_rewards import assertions
from grpo_rewards.assertions import AssertionForm, Unreadable, read_assertions, read_value
from grpo_rewards.sandbox.harness import encode

VALUES = [
    *(None, True, False, 0, 1, -1, 3, 2**53, -(2**53), 2**64, 10**400, 0.0, -0.0, 1.5, 1e308, float("inf"), 3 + 0j, 2j),
    *("", "abc", "\0\x1b[2J", "\ud800", "é", b"", b"\xff", [], [1, 2, 3], (1, 2, 3), (), {1, 2, 3}, set()),
    *(frozenset({1}), {}, {"a": 1}, {1: {2: [3]}}, {(1, 2): None}, [[1], (2,), {3}], [True, 1.0, "1"]),
]


def told(value: Any) -> Any:
    """Return a value as it arrives from the sandbox."""
    return read_value(json.dumps(encode(value)))


def test_values_arrive_as_they_were() -> None:
    for value in VALUES:
        arrived = told(value)
        assert arrived == value
        assert type(arrived) is type(value)
        assert repr(arrived) == repr(value)  # 0.0 is not -0.0 here


def test_nan_equals_nothing() -> None:
    (assertion,) = read_assertions("assert f() != 1")
    assert assertion.holds([told(float("nan"))])
    (assertion,) = read_assertions("assert f() == float('nan')")
    assert not assertion.holds([told(float("nan"))])


def test_subclasses_arrive_as_the_data_that_they_hold() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

        def __int__(self) -> int:
            return 3

        def __repr__(self) -> str:
            return "3"

    class Color(enum.IntEnum):
        RED = 1

    class Masked(list):
        def __iter__(self):
            return iter([1, 2, 3])

    assert type(told(Liar(4))) is int
    assert told(Liar(4)) == 4
    assert told(Color.RED) == 1
    assert told(Masked([4])) == [4]
    assert told(collections.Counter("aab")) == {"a": 2, "b": 1}
    assert told(collections.namedtuple("Point", "x y")(1, 2)) == (1, 2)


def test_what_is_no_value_equals_nothing() -> None:
    for value in (object(), range(3), iter([]), collections.deque([1]), int, ValueError("x")):
        with pytest.raises(Unreadable, match=type(value).__name__):
            told(value)
    for line in (
        "", "x", "[]", '["q"]', '["d", 1]', '["d", [["l"], 1]]', '["s", ["l"]]', '["i", 5]', '["f", "x"]', "{}", "NaN",
        '["i"]', '[["l"]]', "[" * 100 + "]" * 100, '"' + "x" * 20_001 + '"', '["?", "\\u001b[2J"]', '["b", "x"]',
        '["x", 1]', "1.5", json.dumps("x" * 19_999), '["l",' * 64 + '["l"]' + "]" * 64,
    ):  # fmt: skip
        with pytest.raises(Unreadable) as caught:
            read_value(line)
        assert "\x1b" not in str(caught.value)
    assert read_value(json.dumps("x" * 19_998)) == "x" * 19_998
    assert read_value('["l",' * 63 + '["l"]' + "]" * 63) is not None
    for line, name, other in (
        ('["!", "KeyError"]', "KeyError", "Point"), ('["?", "Point"]', "Point", "KeyError"),
        ('["?", "a b"]', "class", "a b"), ('["!", 3, "KeyError"]', "class", "KeyError"),
    ):  # fmt: skip
        with pytest.raises(Unreadable, match=name) as caught:
            read_value(line)
        assert other not in str(caught.value)


RETURNS = [
    None, True, False, 0, 1, 2, 3, 3.0, 2.9999999, -3, "3", "abc", "cba", [3], [1, 2, 3], (1, 2, 3), {1, 2, 3}, {},
]  # fmt: skip
FORMS = [
    *("f(1) == 3", "3 == f(1)", "f(1) != 3", "f(1) < 3", "f(1) >= 3", "1 < f(1) <= 3", "f(1) in (1, 3)"),
    *("f(1) not in [1, 3]", "3 in f(1)", "f(1) is None", "f(1) is not True", "f(1)", "not f(1)", "-f(1) == 3"),
    *("abs(f(1) - 3) < 1e-6", "abs(3.0 - f(1)) <= 0.1", "math.isclose(f(1), 3.0)", "round(f(1), 2) == 3.0"),
    *("math.isclose(f(1), 3, rel_tol=1e-3, abs_tol=0.0)", "len(f(1)) == 3", "sorted(f(1)) == [1, 2, 3]"),
    *("sorted(f(1), reverse=True) == [3, 2, 1]", "set(f(1)) == set([1, 2, 3])", "list(f(1)) == [1, 2, 3]"),
    *("tuple(f(1)) == (1, 2, 3)", "sum(f(1)) == 6", "max(f(1)) == 3", "min(f(1)) == 1", "str(f(1)) == '3'"),
    *("int(f(1)) == 3", "float(f(1)) == 3.0", "f(1) == 3 and f(1) > 2", "f(1) == 2 or f(1) == 3", "f(1) == {}"),
    *("f(1)[0] == 3", "f(1)[::-1] == 'cba'", "f(1) * 2 == 6", "[f(1), f(1)] == [3, 3]", "f(1).upper() == 'ABC'"),
    *("all(f(1))", "any(f(1))", "f(1) == float('inf')", "len(set(f(1))) == 3", "[f(n) for n in range(2)] == [3, 3]"),
    *("f(1) + f(1) == 6", "round(f(1)) == 3", "max(f(1), 3) == 3", "f(1) > 2", "frozenset(f(1)) == {1, 2, 3}"),
    *("f(1) is not None", "None is f(1)", "f(1) - 1 == 2", "f(1) == 3 and f(2) == 3 and f(3) == 3"),
]


def test_the_judged_form_agrees_with_pythons_own_assert() -> None:
    for form in FORMS:
        (assertion,) = read_assertions(f"assert {form}, 'message'")
        assert "==" not in "".join(assertion.calls)
        agreed = set()
        for value in RETURNS:
            names = {"math": math, "f": lambda n, value=value: value}
            try:
                expected = bool(eval(form, names))
            except Exception:
                expected = False
            try:
                values = [told(eval(call, names)) for call in assertion.calls]
            except Exception:
                values = None
            agreed.add(expected)
            assert (values is not None and assertion.holds(values)) == expected, (form, value)
        assert agreed == {True, False} or form == "f(1) == float('inf')"


REFUSED = [
    "assert f(1) == g(1)", "assert 0 < f(1) == f(2)", "assert f(1) is f(1)", "assert f(1) is 3",
    "assert None is f(1) is 2", "assert all(f(n) == n for n in range(3))", "assert [f(1) == 3][0]",
    "assert (f(1) == 3,) == (True,)", "assert isinstance(f(1), int)", "assert (lambda x: x == 3)(f(1))",
    "assert (True if f(1) == 3 else False)", "assert eval('f(1) == 3')", "assert f(1) == 10 ** 10_000",
    "assert f(1) == ([0] * 999) * 999", "assert round(f(1), 10**9) == 3", "assert round(f(1), 31) == 2",
    "assert max(f(1), key=len) == 3", "assert sum(f(1), []) == []", "assert round(f(1), 2, 3) == 2",
    "assert len(f(1), 2) == 2", "assert max(f(1), 2, 3) == 2", "assert sorted(f(1), key=len) == 2",
    "assert sorted(f(1), reverse=x) == 2", "for n in range(3):\n    assert f(n) == n",
    "def check(candidate):\n    assert candidate(1) == 3", "import numpy\nassert f(numpy.zeros(1)) == 3",
    "assert f(1) ==", "assert " + "-" * 100_000 + "1", "assert " + "(" * 10_000 + "1", "assert f('\0') == 1",
    "  assert f(1) == 1\n",
    # A value that the tests compute beside the program is no verdict.
    "gap = abs(f(3) - 5)\nassert gap < 1e-6", "gap = f(3) - 5\nassert abs(gap) < 1e-6",
    "gap, x = f(3) - 5, 1\nassert abs(gap) < 1e-6", "same = f(3) == 5\nassert same",
    "same = []\nsame.append(f(3) == 5)\nassert all(same)", "same = math.isclose(f(3), 5)\nassert same",
    "from math import isclose as near\nassert near(f(3), 5)",
    "from math import isclose as near\nassert near(f(3), 5) == True", "import operator\nassert operator.eq(f(3), 5)",
    "def same(x): return x == 5\nassert same(f(3))",
    "class Same:\n  def __call__(self, x): return x == 5\nassert Same()(f(3))",
    "wanted = [5]\nassert f(3) == wanted\ng(wanted)\nassert f(2) == wanted",
]  # fmt: skip


def test_an_assertion_that_cannot_be_split_is_refused() -> None:
    for source in REFUSED:
        with pytest.raises(AssertionForm):
            read_assertions(source)
    with pytest.raises(AssertionForm, match="`numpy`"):
        read_assertions("import numpy\nassert f(numpy.zeros(1)) == 3")
    for digits in (30, -30):
        assert read_assertions(f"assert round(f(1), {digits}) == 2")
    for source in ("assert True, 'a message'", "assert 1 ** 2 == 1", "x = [1]\nassert x", "pass", ""):
        assert read_assertions(source) == [], "it calls nothing, and tests nothing"
        assert len(read_assertions(source, "assert f(1) == 2")) == 1


def test_a_verdict_of_the_program_is_refused_in_any_place() -> None:
    places = [
        "[{}, f(2)]", "[f(2), {}]", "({}, f(2))", "{{{}, f(2)}}", "{{1: {}}}", "{{{}: 1}}", "{{1: f(2), **{}}}",
        "[{} for n in [1]]", "{{{} for n in [1]}}", "({}).real", "({})[0]", "({}) * 2", "2 * ({})", "[-({})]",
        "[~({})]", "({})()", "[[({},)]]", "[{}, {{1: f(2)}}]", "[{}, [f(2)]]", "[{}, f(2) * 2]",
    ]  # fmt: skip
    for place in places:
        for verdict in ("f(1) == 3", "isinstance(f(1), int)", "not f(1)"):
            with pytest.raises(AssertionForm):
                read_assertions(f"assert {place.format(f'({verdict})')} != 7")
        value = "g.h(f(1))[0]" if place.startswith("{{") else "f(1)"
        (assertion,) = read_assertions(f"assert {place.format(value)} != 7")
        assert len(assertion.calls) == 1
    for judge in ("all", "any", "bool", "callable", "eval", "hasattr", "isinstance", "issubclass"):
        with pytest.raises(AssertionForm):
            read_assertions(f"assert [f(1), {judge}(f(1), 2)] == [1, True]")


STATEMENTS = [
    ("root = Node(1); \r\nroot.left = Node(2)\nassert height(root) == 2", ["root = Node(1)\nroot.left = Node(2)"],
     ["height(root)"]),
    ("wanted = [1, 2]\nassert f(3) == wanted", [""], ["f(3)"]),
    ("x = [3, 1]\nassert f(x) == x\nassert x == [1, 3]", ["x = [3, 1]", ""], ["f(x)", "x"]),
    ("x = [3, 1]\nsort(x)\nassert x == [1, 3]", ["x = [3, 1]\nsort(x)"], ["x"]),
    ("x = 5\nx += 1\nassert f(x) == 6", ["x = 5\nx += 1"], ["f(x)"]),
    ("s = Stack()\ns.push(1)\nassert s.pop() == 1", ["s = Stack()\ns.push(1)"], ["s.pop()"]),
    ("r = f(3)\nassert abs(r - 5) < 1e-6", ["r = f(3)"], ["r"]),
    ("from math import inf\nassert f(inf) == 0", ["from math import inf"], ["f(inf)"]),
    ("assert f(1) == f(1)\nassert f(2) == 2", [""], ["f(2)"]),
]  # fmt: skip


def test_statements_before_assertions_run_and_expected_literals_stay() -> None:
    for source, setups, calls in STATEMENTS:
        found = read_assertions(source)
        assert [test.setup for test in found] == setups
        assert [call for test in found for call in test.calls] == calls


CHECK = """
import math
METADATA = {'author': 'x', 'dataset': 'test'}

def check(candidate):
    \"\"\"Cases of each kind.\"\"\"
    near = 2.0 / 3.0
    assert abs(candidate(2, 3) - near) < 1e-6, "message"
    assert candidate(6, 2) == 2 + 7 // 7 and True
    assert True
    assert candidate(7 * 10 ** 9, 2) == 35 * 10 ** 8
    numbers = [2, 4]
    assert candidate(*numbers) == 0.5
    half = candidate(1, 2)
    assert math.isclose(half, 0.5, rel_tol=1e-9) and math.fabs(half - 0.5) < 0.1
    for n in range(1, 3):
        assert candidate(n, n) == 1
    return True
"""


def test_a_check_of_humaneval_is_read_as_python_runs_it() -> None:
    """Python itself runs the same text: a right program passes both, and each wrong one fails both."""
    (*tests, loop) = assertions.read_tests(CHECK, entry_point="Solution().share")
    assert isinstance(loop, AssertionForm)
    called = assertions.read_tests(CHECK + "\ncheck(Solution().share)\n")
    assert [getattr(test, "calls", None) for test in called] == [
        getattr(test, "calls", None) for test in (*tests, loop)
    ]
    for share in (lambda a, b: a / b, lambda a, b: a // b, lambda a, b: a / b + 1e-3, lambda a, b: None):
        program = type("Solution", (), {"share": lambda self, a, b, share=share: share(a, b)})
        names: dict[str, Any] = {"Solution": program}
        held = []
        for test in tests:
            exec(test.setup, names)  # type: ignore[union-attr]
            try:
                held.append(test.holds([told(eval(call, names)) for call in test.calls]))  # type: ignore[union-attr]
            except Exception:
                held.append(False)
        python: dict[str, Any] = {}
        exec(CHECK, python)
        try:
            is_right = bool(python["check"](program().share))
        except (AssertionError, TypeError):
            is_right = False
        assert all(held) == is_right


def test_the_expected_value_is_in_no_call() -> None:
    (assertion,) = read_assertions("assert abs(area(2, 'x') - 12.57) < 0.01 and 4711 == len(area(3))")
    assert assertion.calls == ("area(2, 'x')", "area(3)")


def test_the_items_of_an_iterable_are_listed_beside_the_program() -> None:
    (assertion,) = read_assertions("assert sorted(f(1) * 2) == [3, 3]")
    assert assertion.calls == ("[*f(1) * 2]",)
    (assertion,) = read_assertions("assert max(f(1), 2) == 3 and len(f(2)) == 1 and list(set(f(3))) == [1]")
    assert assertion.calls == ("f(1)", "f(2)", "[*f(3)]")
    for value in (range(1, 4), collections.deque([3, 1, 2]), {3: 0, 1: 0, 2: 0}.keys(), {1: 0, 2: 0, 3: 0}):
        for form in ("sorted(f()) == [1, 2, 3]", "set(f()) == {1, 2, 3}", "sum(f()) == 6", "max(f()) == 3", "all(f())"):
            (assertion,) = read_assertions(f"assert {form}")
            assert assertion.holds([told(eval(call, {"f": lambda value=value: value})) for call in assertion.calls])


def test_a_program_may_be_named_like_a_builtin() -> None:
    (assertion,) = read_assertions("assert sum(10, 15) == 6")
    assert assertion.calls == ("sum(10, 15)",)
    assert [assertion.holds([value]) for value in (6, 25)] == [True, False]


def test_the_documentation_lists_the_functions_of_an_assertion() -> None:
    page = Path(__file__).resolve().parents[2].joinpath("docs/rewards.md").read_text(encoding="utf-8")
    (items,) = re.findall(r"^\| items of one call in (.*?) \|", page, re.MULTILINE)
    (rest,) = re.findall(r"^\| rest \| outside \| .*`-`, and (.*?) \|$", page, re.MULTILINE)
    assert set(re.findall(r"`([\w.]+)`", items)) == set(assertions._OF_ITEMS)
    assert set(re.findall(r"`([\w.]+)`", rest)) == set(assertions.FUNCTIONS)
    for name in assertions.FUNCTIONS:
        (assertion,) = read_assertions(f"assert {name}(f(1)) == 3")
        assert assertion.calls[0] == ("[*f(1)]" if name in re.findall(r"`(\w+)`", items) else "f(1)")
