"""What the values and columns in the files of runs may be."""

import math
from typing import Any

import pandas as pd
import pytest

from grpo_recipes.runs import files
from grpo_recipes.runs.files import Kind


def interval(low: Any, value: Any, high: Any) -> dict[str, Any]:
    return {"low": low, "value": value, "high": high}


NO_INTERVALS = [
    interval(1, 0, 2), interval(0, 2, 1), interval(math.nan, 0, 1), interval(0, math.nan, 1), interval(0, 1, math.inf),
    interval(-math.inf, 0, 1), interval("0", 0, 1), {"low": 0, "value": 0}, {}, "half", 0.5, None, [0, 0, 1],
]  # fmt: skip
HELD: list[tuple[Kind, list[Any], list[Any]]] = [
    (files.TEXT, ["", "a"], [None, 1, []]),
    (files.TEXT_OR_NULL, [None, "", "a"], [1, []]),
    (files.INTEGER, [0, -3, 10**400], [True, 1.0, "1", None]),
    (files.INTEGER_OR_NULL, [None, 0, 5], [False, 1.5, "5"]),
    (files.STEP, [0, 2**63 - 1], [-1, 2**63, True, 1.0, "two", None]),
    (files.NUMBER, [0, -1.5, math.inf, math.nan, 2**63 - 1, 1 - 2**63], [2**63, -(2**63), True, "1", None]),
    (files.NUMBER_OR_NULL, [None, 0.5, 3], [2**63, "1"]),
    (files.ESTIMATE, [interval(-1, 0, 2), interval(3, 3, 3), interval(0.5, 1, 9.5)], NO_INTERVALS),
    (files.SHARE, [interval(0, 0.5, 1), interval(0, 0, 0)], [interval(-0.1, 0, 1), interval(0, 1, 1.1), *NO_INTERVALS]),
]
COLUMNS: list[tuple[Kind, list[list[Any]], list[list[Any]]]] = [
    (files.INTEGERS, [[1, -2]], [[1.5], ["1"], [True], [None]]),
    (files.NUMBERS, [[1, 2], [0.5], [True], [None, None], [math.nan, 1.0]], [["1"], [1.0, "a"]]),
    (files.BOOLEANS, [[True, False]], [[1], ["True"], [True, None]]),
    (files.TEXTS, [["a", ""]], [["a", None], [1], ["a", 1]]),
    (files.TEXTS_OR_NULL, [["a", None], [None]], [["a", 1]]),
    (
        files.CONVERSATIONS,
        [["a", [{"role": "user", "content": "a"}]], [[]], [[{}, {}]]],
        [[3], [None], [{"role": "user"}], [b"a"], [[{}, 3]], [[{}, None]], ["a", ["b"]]],
    ),
]


@pytest.mark.parametrize(("kind", "right", "wrong"), HELD)
def test_values(kind: Kind, right: list[Any], wrong: list[Any]) -> None:
    assert [value for value in right if not kind.holds(value)] == []
    assert [value for value in wrong if kind.holds(value)] == []


@pytest.mark.parametrize(("kind", "right", "wrong"), COLUMNS)
def test_columns(kind: Kind, right: list[list[Any]], wrong: list[list[Any]]) -> None:
    assert [values for values in right if not kind.holds(pd.Series(values))] == []
    assert [values for values in wrong if kind.holds(pd.Series(values))] == []
