"""Split assertions: the judged form agrees with Python's own `assert`, and the program never gets the verdict."""

from __future__ import annotations

import builtins
import collections
import enum
import json
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


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_values_arrive_as_they_were(value: Any) -> None:
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


@pytest.mark.parametrize("value", [object(), range(3), iter([]), collections.deque([1]), int, ValueError("x")])
def test_objects_of_other_classes_equal_nothing(value: Any) -> None:
    with pytest.raises(Unreadable, match=f"returns an object of {type(value).__name__}"):
        told(value)


@pytest.mark.parametrize(
    "line",
    ["", "x", "[]", '["q"]', '["d", 1]', '["d", [["l"], 1]]', '["s", ["l"]]', '["i", 5]', '["f", "x"]', "{}", "NaN",
     '["i"]', '[["l"]]', "[" * 100 + "]" * 100, '"' + "x" * 20_001 + '"', '["?", "\\u001b[2J"]', '["b", "x"]'],
)  # fmt: skip
def test_no_line_breaks_the_reader(line: str) -> None:
    with pytest.raises(Unreadable) as caught:
        read_value(line)
    assert "\x1b" not in str(caught.value)


RETURNS = [
    None,
    True,
    False,
    0,
    1,
    2,
    3,
    3.0,
    2.9999999,
    -3,
    "3",
    "abc",
    "cba",
    [3],
    [1, 2, 3],
    (1, 2, 3),
    {1, 2, 3},
    {},
]
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
    "f(1) + f(1) == 6",
]


@pytest.mark.parametrize("form", FORMS)
def test_the_judged_form_agrees_with_pythons_own_assert(form: str) -> None:
    import math

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
        assert (values is not None and assertion.holds(values)) == expected, value
    assert agreed == {True, False} or form == "f(1) == float('inf')"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("assert f(1) == g(1)", "compares two values of the program"),
        ("assert 0 < f(1) == f(2)", "compares two values of the program"),
        ("assert f(1) is f(1)", "compares two values of the program"),
        ("assert f(1) is 3", "asks for identity"),
        ("assert all(f(n) == n for n in range(3))", "lets the program judge itself"),
        ("assert [f(1) == 3][0]", "lets the program judge itself"),
        ("assert (f(1) == 3,) == (True,)", "lets the program judge itself"),
        ("assert isinstance(f(1), int)", "lets the program judge itself"),
        ("assert (lambda x: x == 3)(f(1))", "lets the program judge itself"),
        ("assert (True if f(1) == 3 else False)", "lets the program judge itself"),
        ("assert eval('f(1) == 3')", "lets the program judge itself"),
        ("assert f(1) == 10 ** 10_000", "neither a literal nor a call"),
        ("assert f(1) == ([0] * 999) * 999", "neither a literal nor a call"),
        ("assert round(f(1), 10**9) == 3", "rounds to more than"),
        ("assert max(f(1), key=len) == 3", "arguments that are not supported"),
        ("assert sum(f(1), []) == []", "arguments that are not supported"),
        ("for n in range(3):\n    assert f(n) == n", "has assertions inside another statement"),
        ("def check(candidate):\n    assert candidate(1) == 3", "needs the dataset column `entry_point`"),
        ("import numpy\nassert f(numpy.zeros(1)) == 3", "needs `numpy`, which is not there"),
        ("assert f(1) ==", "is not Python"),
        ("assert " + "-" * 100_000 + "1", "is not Python"),
        ("assert " + "(" * 10_000 + "1", "is not Python"),
        ("assert f('\0') == 1", "is not Python"),
    ],
)
def test_an_assertion_that_cannot_be_split_is_refused(source: str, reason: str) -> None:
    with pytest.raises(AssertionForm, match=reason):
        read_assertions(source)


@pytest.mark.parametrize("source", ["assert True, 'a message'", "assert 1 ** 2 == 1", "x = [1]\nassert x", "pass", ""])
def test_an_assertion_that_calls_nothing_tests_nothing(source: str) -> None:
    assert read_assertions(source) == []
    assert len(read_assertions(source, "assert f(1) == 2")) == 1


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
    assert "assertions inside another statement" in str(loop)
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


@pytest.mark.parametrize(
    ("source", "setups", "calls"),
    [
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
    ],
)  # fmt: skip
def test_statements_before_assertions_run_and_expected_literals_stay(
    source: str, setups: list[str], calls: list[str]
) -> None:
    found = read_assertions(source)
    assert [test.setup for test in found] == setups
    assert [call for test in found for call in test.calls] == calls


@pytest.mark.parametrize(
    "source",
    [
        "gap = abs(f(3) - 5)\nassert gap < 1e-6",
        "gap = f(3) - 5\nassert abs(gap) < 1e-6",
        "gap, x = f(3) - 5, 1\nassert abs(gap) < 1e-6",
        "same = f(3) == 5\nassert same",
        "same = []\nsame.append(f(3) == 5)\nassert all(same)",
        "same = math.isclose(f(3), 5)\nassert same",
        "from math import isclose as near\nassert near(f(3), 5)",
        "from math import isclose as near\nassert near(f(3), 5) == True",
        "import operator\nassert operator.eq(f(3), 5)",
        "def same(x): return x == 5\nassert same(f(3))",
        "class Same:\n  def __call__(self, x): return x == 5\nassert Same()(f(3))",
        "wanted = [5]\nassert f(3) == wanted\ng(wanted)\nassert f(2) == wanted",
    ],
)
def test_what_the_tests_compute_beside_the_program_is_no_verdict(source: str) -> None:
    with pytest.raises(AssertionForm, match=r"judge itself|which other calls show|compares two values"):
        read_assertions(source)


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


@pytest.mark.parametrize("name", ["all", "any", "frozenset", "list", "max", "min", "set", "sorted", "sum", "tuple"])
def test_every_function_of_items_takes_an_iterable_of_the_program(name: str) -> None:
    """A generator is no data, so its items are listed where the program runs."""
    (assertion,) = read_assertions(f"assert {name}(f(3)) == 1")
    assert assertion.calls == ("[*f(3)]",)


@pytest.mark.parametrize(
    ("source", "values", "holds"),
    [
        ("assert len(f(1)) == 2", [[1, 2]], True),
        ("assert abs(f(1)) == 2", [-2], True),
        ("assert bool(f(1))", [0], False),
        ("assert int(f(1)) == 2", ["2"], True),
        ("assert float(f(1)) == 2", ["2"], True),
        ("assert str(f(1)) == '2'", [2], True),
        ("assert round(f(1), 1) == 2.3", [2.26], True),
        ("assert round(f(1)) == 2", [2.26], True),
        ("assert max(f(1), 3) == 3", [2], True),
        ("assert min(f(1), 3) == 3", [2], False),
        ("assert sorted(f(1), reverse=True) == [2, 1]", [[1, 2]], True),
        ("assert sorted(f(1)) == [1, 2]", [[2, 1]], True),
        ("assert sum(f(1)) == 3", [[1, 2]], True),
        ("assert any(f(1))", [[0, 1]], True),
        ("assert all(f(1))", [[0, 1]], False),
        ("assert set(f(1)) == {1}", [[1, 1]], True),
        ("assert tuple(f(1)) == (1,)", [[1]], True),
        ("assert list(f(1)) == [1]", [[1]], True),
        ("assert frozenset(f(1)) == frozenset({1})", [[1]], True),
        ("assert math.isclose(f(1), 2, rel_tol=0.1)", [2.1], True),
        ("assert math.isclose(f(1), 2, abs_tol=0.01)", [2.1], False),
        ("assert f(1) + 1 == 3", [2], True),
        ("assert f(1) - 1 == 1", [2], True),
        ("assert -f(1) == -2", [2], True),
        ("assert not f(1)", [0], True),
        ("assert f(1) and f(2)", [1, 0], False),
        ("assert f(1) or f(2)", [1, 0], True),
        ("assert 1 < f(1) <= 3", [3], True),
        ("assert 1 < f(1) < 3", [3], False),
        ("assert f(1) is None", [None], True),
        ("assert f(1) is not None", [None], False),
        ("assert f(1) in [1, 2]", [2], True),
        ("assert 3 not in f(1)", [[3]], False),
        ("assert f(1) >= 2", [2], True),
        ("assert f(1) > 2", [2], False),
        ("assert f(1) != 2", [2], False),
        ("assert len(f(1)) == 2", [3], False),
        ("assert f(1) + 1 == 3", ["2"], False),
        ("assert math.isclose(f(1), 1.0)", [10**400], False),  # an OverflowError
        ("assert f(1) + 0.5 == 1", [10**400], False),
        ("assert int(f(1)) == 1", ["x"], False),
        ("assert f(1) == 1 and f(2) == 2 and f(3) == 3", [1, 2, 3], True),
        ("assert f(1) == 1 and f(2) == 2 and f(3) == 3", [3, 2, 1], False),
        ("assert None is f(1)", [None], True),
    ],
)
def test_a_judgement_is_evaluated_beside_the_program(source: str, values: list[Any], holds: bool) -> None:
    (assertion,) = read_assertions(source)
    assert assertion.holds(values) == holds


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("assert round(f(1), 31) == 2", "rounds to more than 30 digits"),
        ("assert round(f(1), 2, 3) == 2", "not supported"),
        ("assert len(f(1), 2) == 2", "not supported"),
        ("assert max(f(1), 2, 3) == 2", "not supported"),
        ("assert sorted(f(1), key=len) == 2", "not supported"),
        ("assert sorted(f(1), reverse=x) == 2", "not a literal"),
        ("assert f(1) == g(1)", "compares two values of the program"),
        ("assert f(1) is 2", "asks for identity"),
        ("assert (", "is not Python"),
        ("  assert f(1) == 1\n", r"^`assert f\(1\) == 1` is not Python \(IndentationError\)$"),
        ("assert None is f(1) is 2", "asks for identity"),
        ("assert isinstance(f(1), int)", "lets the program judge itself"),
    ],
)
def test_why_an_assertion_is_refused(source: str, reason: str) -> None:
    with pytest.raises(AssertionForm, match=reason):
        read_assertions(source)


def test_thirty_digits_are_few_enough() -> None:
    for digits in (30, -30):
        assert read_assertions(f"assert round(f(1), {digits}) == 2")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('["!", "KeyError"]', "raises KeyError"),
        ('["?", "Point"]', "returns an object of Point"),
        ('["?", "a b"]', "returns an object of class"),
        ('["!"]', "raises class"),
        ('["!", "KeyError", 3]', "raises KeyError"),
        ('["!", 3, "KeyError"]', "raises class"),
        ('["?", "Point", "a b"]', "returns an object of Point"),
        ("{}", "a value that can't be read"),
        ("[]", "a value that can't be read"),
        ('["x", 1]', "a value that can't be read"),
        ("1.5", "a value that can't be read"),
        ('["d", [["l"], 1]]', "a value that can't be read"),
        ("nonsense", "a value that can't be read"),
    ],
)
def test_why_a_value_is_unreadable(line: str, reason: str) -> None:
    with pytest.raises(Unreadable) as refused:
        read_value(line)
    assert str(refused.value) == reason


@pytest.mark.parametrize(
    "place",
    ["[{}, f(2)]", "[f(2), {}]", "({}, f(2))", "{{{}, f(2)}}", "{{1: {}}}", "{{{}: 1}}", "{{1: f(2), **{}}}",
     "[{} for n in [1]]", "{{{} for n in [1]}}", "({}).real", "({})[0]", "({}) * 2", "2 * ({})", "[-({})]",
     "[~({})]", "({})()", "[[({},)]]", "[{}, {{1: f(2)}}]", "[{}, [f(2)]]", "[{}, f(2) * 2]"],
)  # fmt: skip
@pytest.mark.parametrize("verdict", ["f(1) == 3", "isinstance(f(1), int)", "not f(1)"])
def test_a_verdict_of_the_program_is_refused_in_any_place(place: str, verdict: str) -> None:
    with pytest.raises(AssertionForm, match="lets the program judge itself: compare a value with a literal"):
        read_assertions(f"assert {place.format(f'({verdict})')} != 7")
    value = "g.h(f(1))[0]" if place.startswith("{{") else "f(1)"
    (assertion,) = read_assertions(f"assert {place.format(value)} != 7")
    assert len(assertion.calls) == 1


@pytest.mark.parametrize("judge", ["all", "any", "bool", "callable", "eval", "hasattr", "isinstance", "issubclass"])
def test_a_builtin_with_a_verdict_is_refused_within_a_call(judge: str) -> None:
    assert callable(getattr(builtins, judge))
    with pytest.raises(AssertionForm, match="lets the program judge itself"):
        read_assertions(f"assert [f(1), {judge}(f(1), 2)] == [1, True]")


def test_the_documentation_lists_the_functions_of_an_assertion() -> None:
    page = Path(__file__).resolve().parents[2].joinpath("docs/rewards.md").read_text(encoding="utf-8")
    (items,) = re.findall(r"^\| items of one call in (.*?) \|", page, re.MULTILINE)
    (rest,) = re.findall(r"^\| rest \| outside \| .*`-`, and (.*?) \|$", page, re.MULTILINE)
    assert set(re.findall(r"`([\w.]+)`", items)) == set(assertions._OF_ITEMS)
    assert set(re.findall(r"`([\w.]+)`", rest)) == set(assertions.FUNCTIONS)
    for name in assertions.FUNCTIONS:
        (assertion,) = read_assertions(f"assert {name}(f(1)) == 3")
        assert assertion.calls[0] == ("[*f(1)]" if name in re.findall(r"`(\w+)`", items) else "f(1)")


def test_a_value_may_have_twenty_thousand_characters() -> None:
    assert read_value(json.dumps("x" * 19_998)) == "x" * 19_998
    with pytest.raises(Unreadable, match="^returns more than can be read$"):
        read_value(json.dumps("x" * 19_999))


def test_a_value_may_be_nested_to_a_depth_of_64() -> None:
    assert read_value('["l",' * 63 + '["l"]' + "]" * 63) is not None
    with pytest.raises(Unreadable, match="^a value that can't be read$"):
        read_value('["l",' * 64 + '["l"]' + "]" * 64)
