"""Tests of a program, split so that the program never meets the expected value.

An assertion such as `assert abs(area(2) - 12.57) < 0.01` has two parts. The call `area(2)` is evaluated beside the
program, in the sandbox. What surrounds it is evaluated here, on the value that comes back as plain data. The items of
`list(primes(9))` are listed beside the program, because `primes` may return a generator. A program can
therefore not find the expected value in a frame, replace `abs`, or return an object that equals everything.

| part | evaluated | forms |
|---|---|---|
| call | beside the program | call, attribute, item or name of the program; lists, tuples and arithmetic of these |
| judgement | here | literals, comparisons, `in`, `is None`, `and`, `or`, `not`, `+`, `-`, functions in `FUNCTIONS` |

Each comparison has a side without a call. An assertion that lets the program judge itself, such as
`assert f(1) == g(1)` or `assert all(f(n) == n for n in range(3))`, is refused with the reason.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_rewards.errors import shortened
from grpo_rewards.strict import parse_json

MAX_CHARS = 100_000
"""Number of characters that the tests of a row may have."""

MAX_VALUE_CHARS = 20_000
"""Number of characters of JSON that the value of a call may take.

Integers with equal hashes make a set quadratic in them. That many characters hold a thousand of these.
"""

_MAX_DEPTH = 64
_MAX_DIGITS = 30

# All are linear in their arguments, which are bounded, or nearly so: no power, no product, no formatting.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "math.isclose": math.isclose,
    **{kind.__name__: kind for kind in (bool, float, frozenset, int, list, set, str, tuple)},
    **{function.__name__: function for function in (abs, all, any, len, max, min, round, sorted, sum)},
}
"""Functions of an assertion that are evaluated outside of the program."""

_KEYWORDS = {"math.isclose": ("rel_tol", "abs_tol"), "sorted": ("reverse",)}
# Functions that take any iterable. A generator or a range is no data: its items are listed beside the program.
_OF_ITEMS = ("all", "any", "frozenset", "list", "max", "min", "set", "sorted", "sum", "tuple")
_TWO_ARGUMENTS = ("math.isclose", "max", "min", "round")
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not},
    **{ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge},
    **{ast.In: lambda part, whole: part in whole, ast.NotIn: lambda part, whole: part not in whole},
}
_OPERATIONS: Mapping[type[ast.AST], Callable[..., Any]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.USub: operator.neg, ast.UAdd: operator.pos},
    ast.Not: operator.not_,
}


class AssertionForm(ValueError):
    """Assertion that can't be split; the message names it and the reason."""


class Unreadable(ValueError):
    """Value of a call that is no data of Python's own types."""


@dataclass(frozen=True)
class Assertion:
    """Assertion with its calls taken out.

    Attributes:
        source: The assertion as written.
        calls: Expressions to evaluate beside the program.
        judgement: The expression around them, in which the name "0" stands for the value of the first call.
    """

    source: str
    calls: tuple[str, ...]
    judgement: ast.expr

    def holds(self, values: Sequence[Any]) -> bool:
        """Return True if the assertion holds for the values of its calls, and False if judging them fails."""
        try:
            return bool(_judged(self.judgement, values))
        except (TypeError, ValueError, ArithmeticError, RecursionError):  # such as the length of a number
            return False


def read_assertions(source: str) -> list[Assertion]:
    """Return the assertions of a text that holds nothing else.

    Raises:
        AssertionForm: the text is no Python, holds something else, or an assertion can't be split.
    """
    shown = shortened(source.strip(), 80)
    try:
        statements = ast.parse(source).body
        return [_split(statement, shown) for statement in statements]
    except AssertionForm:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise AssertionForm(f"`{shown}` is not Python ({type(error).__name__})") from error


def _split(statement: ast.stmt, shown: str) -> Assertion:
    if not isinstance(statement, ast.Assert):
        raise AssertionForm(f"`{shown}` has more than assertions")
    names = {node.id for node in ast.walk(statement.test) if isinstance(node, ast.Name)}
    # Without any other name, the program itself defines a function of such a name: `assert sum(10, 15) == 6`.
    splitter = _Splitter(FUNCTIONS if names - {"math", *FUNCTIONS} else {})
    judgement = splitter.split(statement.test)
    if not splitter.calls:
        raise AssertionForm(f"`{shown}` calls nothing of the program")
    return Assertion(ast.unparse(statement), tuple(splitter.calls), judgement)


class _Splitter:
    """Replacement of the calls in an expression by names "0", "1", …, and the sources of these calls."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self.calls: list[str] = []
        self._functions = functions

    def split(self, node: ast.expr) -> ast.expr:
        """Return the judgement in an expression. Raise `AssertionForm` if the program would judge itself."""
        if _is_literal(node):
            return node
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
            return ast.UnaryOp(node.op, self.split(node.operand))
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return ast.BinOp(self.split(node.left), node.op, self.split(node.right))
        if isinstance(node, ast.BoolOp):
            return ast.BoolOp(node.op, list(map(self.split, node.values)))
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in self._functions:
            return self._function(node, ast.unparse(node.func))
        _check_call(node)
        self.calls.append(ast.unparse(node))
        return ast.Name(str(len(self.calls) - 1))

    def _comparison(self, node: ast.Compare) -> ast.Compare:
        left, *comparators = [self._side(side) for side in (node.left, *node.comparators)]
        sides = [left, *comparators]
        for (one, one_calls), (other, other_calls), comparison in zip(sides, comparators, node.ops, strict=False):
            if one_calls and other_calls:
                raise AssertionForm(f"`{ast.unparse(node)}` compares two values of the program: write one as a literal")
            is_identity = isinstance(comparison, (ast.Is, ast.IsNot))
            if is_identity and not (_is_singleton(one) or _is_singleton(other)):
                raise AssertionForm(f"`{ast.unparse(node)}` asks for identity: write `==`")
        return ast.Compare(left[0], node.ops, [side for side, _ in comparators])

    def _side(self, node: ast.expr) -> tuple[ast.expr, bool]:
        """Return the judgement in one side of a comparison, and True if the side has a call."""
        before = len(self.calls)
        return self.split(node), len(self.calls) > before

    def _function(self, node: ast.Call, name: str) -> ast.Call:
        most = 2 if name in _TWO_ARGUMENTS else 1
        keywords = {keyword.arg for keyword in node.keywords}
        if len(node.args) > most or not keywords <= set(_KEYWORDS.get(name, ())):
            raise AssertionForm(f"`{ast.unparse(node)}` has arguments that are not supported")
        if name == "round" and len(node.args) == 2 and not _is_small(node.args[1]):
            raise AssertionForm(f"`{ast.unparse(node)}` rounds to more than {_MAX_DIGITS} digits")
        for keyword in node.keywords:
            if not _is_literal(keyword.value):
                raise AssertionForm(f"`{ast.unparse(node)}` has an argument that is not a literal")
        arguments = list(map(self.split, node.args))
        if name in _OF_ITEMS and len(arguments) == 1 and isinstance(arguments[0], ast.Name):
            self.calls[-1] = f"[*{self.calls[-1]}]"
        return ast.Call(ast.Name(name), arguments, node.keywords)


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError):
        return False
    return True


def _is_singleton(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and any(node.value is singleton for singleton in (None, True, False))


def _is_small(node: ast.expr) -> bool:
    return _is_literal(node) and type(value := ast.literal_eval(node)) is int and abs(value) <= _MAX_DIGITS


def _check_call(node: ast.expr) -> None:
    """Raise `AssertionForm` if an expression is no call of the program, or if it judges a value of the program."""
    if not any(isinstance(part, (ast.Call, ast.Name)) for part in ast.walk(node)):
        raise AssertionForm(f"`{ast.unparse(node)}` is neither a literal nor a call: write its value")
    pending: list[ast.expr | None] = [node]
    while pending:
        part = pending.pop()
        if isinstance(part, (ast.Attribute, ast.Subscript)):
            pending.append(part.value)
        elif isinstance(part, (ast.List, ast.Tuple, ast.Set)):
            pending += part.elts
        elif isinstance(part, ast.Dict):
            pending += [*part.keys, *part.values]
        elif isinstance(part, (ast.ListComp, ast.SetComp)):
            pending.append(part.elt)
        elif isinstance(part, ast.BinOp):
            pending += [part.left, part.right]
        elif isinstance(part, ast.UnaryOp) and not isinstance(part.op, ast.Not):
            pending.append(part.operand)
        elif isinstance(part, ast.Call):
            pending.append(part.func)
        elif not (part is None or isinstance(part, ast.Constant) or _is_name(part)):
            raise AssertionForm(f"`{ast.unparse(node)}` lets the program judge itself: compare a value with a literal")


# Builtins whose value is a verdict.
_JUDGES = frozenset({"all", "any", "bool", "callable", "eval", "hasattr", "isinstance", "issubclass"})


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id not in _JUDGES


def _judged(node: ast.expr, values: Sequence[Any]) -> Any:
    """Return the value of a judgement."""
    if isinstance(node, ast.Name):
        return values[int(node.id)]
    if isinstance(node, ast.UnaryOp) and not _is_literal(node):
        return _OPERATIONS[type(node.op)](_judged(node.operand, values))
    if isinstance(node, ast.BinOp) and not _is_literal(node):
        return _OPERATIONS[type(node.op)](_judged(node.left, values), _judged(node.right, values))
    if isinstance(node, ast.BoolOp):
        verdicts = [bool(_judged(part, values)) for part in node.values]
        return all(verdicts) if isinstance(node.op, ast.And) else any(verdicts)
    if isinstance(node, ast.Compare):
        sides = [_judged(side, values) for side in (node.left, *node.comparators)]
        compared = zip(node.ops, sides, sides[1:], strict=False)
        return all(_COMPARISONS[type(comparison)](one, other) for comparison, one, other in compared)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        arguments = [_judged(argument, values) for argument in node.args]
        keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        return FUNCTIONS[node.func.id](*arguments, **keywords)
    return ast.literal_eval(node)


# --- Values ---


def read_value(line: str) -> Any:
    """Return the value that a line of the sandbox's harness stands for (`sandbox.harness.encode`).

    Raises:
        Unreadable: the line is none of these, or stands for no value; the message says why.
    """
    if len(line) > MAX_VALUE_CHARS:
        raise Unreadable("returns more than can be read")
    try:
        return _decoded(parse_json(line, max_depth=_MAX_DEPTH))
    except Unreadable:
        raise
    except (ValueError, TypeError) as error:  # such as a list as the key of a dictionary
        raise Unreadable("a value that can't be read") from error


def _decoded(read: Any) -> Any:
    if read is None or isinstance(read, (bool, int, str)):
        return read
    if not isinstance(read, list) or not read:
        raise Unreadable("a value that can't be read")
    mark, *parts = read
    if mark in ("?", "!"):
        name = parts[0] if parts and isinstance(parts[0], str) and parts[0].isidentifier() else "class"
        raise Unreadable(f"{'raises' if mark == '!' else 'returns an object of'} {shortened(name)}")
    if mark in _CONTAINERS:
        return _CONTAINERS[mark](map(_decoded, parts))
    if mark == "d":
        return {_decoded(key): _decoded(part) for key, part in parts}
    if mark in _NUMBERS:
        return _NUMBERS[mark](*parts)
    raise Unreadable("a value that can't be read")


def _hexadecimal(text: str) -> int:
    return int(text, 16)


_CONTAINERS: Mapping[str, Callable[..., Any]] = {"l": list, "t": tuple, "s": set, "z": frozenset}
_NUMBERS: Mapping[str, Callable[..., Any]] = {
    **{"i": _hexadecimal, "f": float, "c": complex, "b": bytes.fromhex},
}
