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
`assert f(1) == g(1)` or `assert all(f(n) == n for n in range(3))`, is dropped with the reason.

Statements around the assertions (imports, `root = Node(1)`) run beside the program, in their order. A name that they
give to a literal stays here, unless a call needs it: `expected = [1, 2]` never reaches the program.
"""

from __future__ import annotations

import ast
import copy
import math
import operator
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
_MAX_BITS = 4096
_MAX_INSERTED = 500_000
"""Number of characters that literals with a name may add to the assertions of a row."""

# All are linear in their arguments, which are bounded, or nearly so: no power, no product, no formatting.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "isclose": math.isclose, "math.fabs": math.fabs, "math.isclose": math.isclose,
    **{kind.__name__: kind for kind in (bool, float, frozenset, int, list, set, str, tuple)},
    **{function.__name__: function for function in (abs, all, any, len, max, min, round, sorted, sum)},
}  # fmt: skip
"""Functions of an assertion that are evaluated outside of the program."""

_KEYWORDS = {**dict.fromkeys(("isclose", "math.isclose"), ("rel_tol", "abs_tol")), "sorted": ("reverse",)}
# Functions that take any iterable. A generator or a range is not data: its items are listed beside the program.
_OF_ITEMS = ("all", "any", "frozenset", "list", "max", "min", "set", "sorted", "sum", "tuple")
_TWO_ARGUMENTS = ("isclose", "math.isclose", "max", "min", "round")
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
    ast.In: lambda part, whole: part in whole, ast.NotIn: lambda part, whole: part not in whole,
}  # fmt: skip
_OPERATIONS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.USub: operator.neg, ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}  # fmt: skip
# Between literals only, and bounded.
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip


class AssertionForm(ValueError):
    """Assertion that can't be split. The message names it and the reason."""


class Unreadable(ValueError):
    """Value of a call that is not data of Python's own types."""


@dataclass(frozen=True)
class Assertion:
    """Assertion with its calls taken out.

    Attributes:
        source: assertion as written.
        calls: expressions to evaluate beside the program.
        judgement: expression around them, in which the name "0" stands for the value of the first call.
        setup: statements to run beside the program before the first call.
    """

    source: str
    calls: tuple[str, ...]
    judgement: ast.expr
    setup: str = ""

    def holds(self, values: Sequence[Any]) -> bool:
        """Return True if the assertion holds for the values of its calls, and False if judging them fails."""
        try:
            return bool(_judged(self.judgement, values))
        except (TypeError, ValueError, ArithmeticError, RecursionError):  # such as the length of a number
            return False


def read_assertions(*sources: str, entry_point: str = "") -> list[Assertion]:
    """Return the assertions of test code that can be split. An assertion without a call of the program is dropped.

    Args:
        sources: texts of Python code, in the order in which they run.
        entry_point: expression for the parameter of `def check(candidate)`, unless the code calls `check` itself.

    Raises:
        AssertionForm: a text is not Python, or no assertion of several can be split.
    """
    tests = read_tests(*sources, entry_point=entry_point)
    assertions = [test for test in tests if isinstance(test, Assertion)]
    if not assertions:
        for reason in tests:
            raise reason  # type: ignore[misc]
    return assertions


def read_tests(*sources: str, entry_point: str = "") -> list[Assertion | AssertionForm]:
    """Return each assertion of test code, or the reason why it can't be split. Arguments as of `read_assertions`."""
    reader, shown = _Reader(), ""
    try:
        for source in sources:
            shown = shortened(source.strip(), 80)
            reader.read(_inlined(ast.parse(source), entry_point))
        return reader.tests()
    except AssertionForm:
        raise
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise AssertionForm(f"`{shown}` is not Python ({type(error).__name__})") from error


def _inlined(tree: ast.Module, entry_point: str) -> Iterator[ast.stmt]:
    """Yield the statements of test code: of HumanEval's `def check(candidate)`, its body."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _is_check(node) and len(node.args) == 1:
            entry_point = ast.unparse(node.args[0])
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "check" and len(statement.args.args) == 1:
            name = statement.args.args[0].arg
            if not entry_point:
                raise AssertionForm(f"`def check({name})` needs the dataset column `entry_point`")
            yield from _Replaced({name: ast.parse(entry_point, mode="eval").body}).visit(statement).body
        elif not (isinstance(statement, ast.Expr) and _is_check(statement.value)):
            yield statement


def _is_check(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "check"


class _Replaced(ast.NodeTransformer):
    """Replacement of names by expressions."""

    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the expression for a name that is read."""
        return self._values.get(node.id, node) if isinstance(node.ctx, ast.Load) else node


class _Folded(ast.NodeTransformer):
    """Replacement of arithmetic between literals by its value: `2.0 / 3.0`, `10 ** 9 + 7`, `[0] * 5`."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """Return the value of an operation between literals, or the operation if there are names or it is too large."""
        self.generic_visit(node)
        if type(node.op) in _ARITHMETIC and _is_literal(node.left) and _is_literal(node.right):
            left, right = ast.literal_eval(node.left), ast.literal_eval(node.right)
            if _is_bounded(node.op, left, right):
                try:
                    value = _ARITHMETIC[type(node.op)](left, right)
                except (TypeError, ValueError, ArithmeticError):  # the assertion fails by itself
                    return node
                if not isinstance(value, (complex, float)) or math.isfinite(abs(value)):
                    return ast.copy_location(ast.Constant(value), node)
        return node


def _is_bounded(operation: ast.operator, left: Any, right: Any) -> bool:
    """Return True if an operation between two values takes little time and memory."""
    numbers = [isinstance(value, (int, float)) for value in (left, right)]
    bits = [value.bit_length() if isinstance(value, int) else 64 for value in (left, right)]
    if isinstance(operation, ast.Pow):
        return all(numbers) and bits[1] <= 64 and (bits[0] or 1) * abs(right) <= _MAX_BITS
    if all(numbers):
        return sum(bits) <= _MAX_BITS
    sizes = [
        len(repr(value)) if not number else abs(value) for value, number in zip((left, right), numbers, strict=True)
    ]
    return math.prod(sizes) <= MAX_VALUE_CHARS


class _Reader:
    """Reader of test code, one statement after the other.

    What the code names has one of three meanings. A literal is a value of ours. `result = f(1)` is a value of the
    program, as `f(1)` itself is. Anything else, such as an import, may be an argument of a call, but judges nothing:
    the program could have replaced what it is made of.
    """

    def __init__(self) -> None:
        self._found: list[tuple[Assertion, list[ast.stmt], set[str], set[str]] | AssertionForm] = []
        self._before: list[ast.stmt] = []  # statements since the last assertion
        self._literals: dict[str, ast.expr] = {}
        self._sizes: dict[str, int] = {}
        self._left = _MAX_INSERTED
        self._named: set[str] = set()
        self._others: set[str] = set()  # names with the third meaning
        self._missing: set[str] = set()  # names that statements would define which can't run
        self._shown: set[str] = set()  # literals that the program can read

    def tests(self) -> list[Assertion | AssertionForm]:
        """Return each assertion with the statements that run before it, or the reason why it can't be used."""
        tests: list[Assertion | AssertionForm] = []
        before: list[ast.stmt] = []
        for found in self._found:
            if isinstance(found, AssertionForm):
                tests.append(found)
                continue
            assertion, statements, expected, given = found
            before += statements
            if readable := (expected & self._shown) - given:
                reason = f"`{shortened(assertion.source, 80)}` compares with `{min(readable)}`, which other calls show"
                tests.append(AssertionForm(reason))
                continue
            # A literal that no call needs stays here.
            run = [one for one in before if not _names_literal(one) or _stored(one) & self._shown]
            tests.append(replace(assertion, setup="\n".join(map(ast.unparse, run))))
            before = []
        return tests

    def read(self, statements: Iterable[ast.stmt]) -> None:
        """Read statements that follow those read before."""
        for statement in statements:
            if isinstance(statement, ast.Assert):
                self._read_assertion(statement)
                continue
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not is_text and not isinstance(statement, (ast.Pass, ast.Return)):
                self._read_other(_Folded().visit(statement))

    def _read_assertion(self, statement: ast.Assert) -> None:
        source = ast.unparse(statement)
        test = _Folded().visit(statement.test)
        names = _names(test)
        if missing := names & self._missing:
            self._found.append(AssertionForm(f"`{shortened(source, 80)}` needs `{min(missing)}`, which is not there"))
            return
        # Without any other name, the program itself defines a function of such a name: `assert sum(10, 15) == 6`.
        functions = FUNCTIONS if names - {"math", *FUNCTIONS, *self._literals} else {}
        for node in ast.walk(test):
            if isinstance(node, ast.Name) and node.id in self._literals:
                self._left -= self._sizes[node.id]
        # No literals to compare with if their names occur too often.
        splitter = _Splitter(functions, self._literals if self._left > 0 else {}, self._others)
        try:
            judgement = splitter.split(test)
        except AssertionForm as reason:
            self._found.append(reason)
            return
        if splitter.calls:
            given = set().union(*(_names(ast.parse(call)) for call in splitter.calls))
            assertion = Assertion(source, tuple(splitter.calls), judgement)
            self._found.append((assertion, self._before, splitter.expected, given))
            self._before = []
            self._show(given)

    def _read_other(self, statement: ast.stmt) -> None:
        """Read a statement that runs beside the program, unless it holds assertions or needs what is missing."""
        names, stored = _names(statement), _stored(statement)
        is_inside = any(isinstance(part, ast.Assert) for part in ast.walk(statement))
        if is_inside:
            shown = shortened(ast.unparse(statement), 80)
            self._found.append(AssertionForm(f"`{shown}` has assertions inside another statement: write them apart"))
        is_missing = is_inside or bool(names & self._missing) or not _is_standard(statement)
        if not is_missing:
            self._before.append(statement)
            if not _names_literal(statement):
                self._show(names)
        for name in stored:
            self._literals.pop(name, None)
        self._missing = self._missing | stored if is_missing else self._missing - stored
        if not is_missing and isinstance(statement, ast.Assign) and _names_literal(statement):
            self._literals.update(dict.fromkeys(stored, statement.value))
            self._sizes.update(dict.fromkeys(stored, len(ast.unparse(statement.value))))
        self._others -= stored
        if not self._is_plain(statement):
            self._others |= stored | (names & self._named)
        self._named |= stored

    def _show(self, names: set[str]) -> None:
        """Let the program read the literals of these names. From then on it may change them, so they are its values."""
        for name in names & self._literals.keys():
            self._shown.add(name)
            del self._literals[name]

    def _is_plain(self, statement: ast.stmt) -> bool:
        """Return True for a call of the program, alone or with a name or an attribute for its value."""
        if _names_literal(statement):
            return True
        if not isinstance(statement, (ast.Assign, ast.Expr)):
            return False
        for part in ast.walk(statement.value):
            # An object of the program could take part: `difference = f(1) - 3`.
            is_operation = isinstance(part, (ast.BinOp, ast.BoolOp, ast.Compare))
            if is_operation and any(isinstance(inner, ast.Call) for inner in ast.walk(part)):
                return False
        try:
            _check_call(statement.value, self._others | {"math", *FUNCTIONS})
        except AssertionForm:
            return False
        return True


def _names(tree: ast.AST) -> set[str]:
    """Return the names that code reads."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def _names_literal(statement: ast.stmt) -> bool:
    """Return True for a statement such as `expected = [1, 2]`."""
    if not isinstance(statement, ast.Assign) or not _is_literal(statement.value):
        return False
    return len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name)


def _stored(statement: ast.stmt) -> set[str]:
    """Return the names that a statement defines, those inside a function or class included."""
    stored = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            stored.add(node.id)
        elif isinstance(node, ast.alias):
            stored.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            stored.add(node.name)
    return stored


def _is_standard(statement: ast.stmt) -> bool:
    """Return False for an import of a module that the sandbox lacks, else True."""
    for node in ast.walk(statement):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
        if any(module.partition(".")[0] not in sys.stdlib_module_names for module in modules):
            return False
    return True


class _Splitter:
    """Replacement of the calls in an expression by names "0", "1", …, and the sources of these calls."""

    def __init__(self, functions: Mapping[str, Any], literals: Mapping[str, ast.expr], others: set[str]) -> None:
        self.calls: list[str] = []
        self.expected: set[str] = set()  # names of literals in the judgement
        self._functions, self._literals, self._others = functions, literals, others

    def split(self, node: ast.expr) -> ast.expr:
        """Return the judgement in an expression. Raise `AssertionForm` if the program would judge itself."""
        if _is_literal(node):
            return node
        if (names := _names(node)) and names <= self._literals.keys():
            value = _Folded().visit(_Replaced(self._literals).visit(copy.deepcopy(node)))
            if _is_literal(value):
                self.expected |= names
                return value
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
        _check_call(node, self._others)
        self.calls.append(ast.unparse(node))
        return ast.Name(str(len(self.calls) - 1))

    def _comparison(self, node: ast.Compare) -> ast.Compare:
        sides: list[tuple[ast.expr, bool]] = []  # the judgement in each, and True if it has a call
        for side in (node.left, *node.comparators):
            before = len(self.calls)
            sides.append((self.split(side), len(self.calls) > before))
        for (one, one_calls), (other, other_calls), comparison in zip(sides, sides[1:], node.ops, strict=False):
            if one_calls and other_calls:
                raise AssertionForm(f"`{ast.unparse(node)}` compares two values of the program: write one as a literal")
            is_identity = isinstance(comparison, (ast.Is, ast.IsNot))
            if is_identity and not (_is_singleton(one) or _is_singleton(other)):
                raise AssertionForm(f"`{ast.unparse(node)}` asks for identity: write `==`")
        left, *comparators = [side for side, _ in sides]
        return ast.Compare(left, node.ops, comparators)

    def _function(self, node: ast.Call, name: str) -> ast.Call:
        most = 2 if name in _TWO_ARGUMENTS else 1
        keywords = {keyword.arg for keyword in node.keywords}
        if len(node.args) > most or not keywords <= set(_KEYWORDS.get(name, ())):
            raise AssertionForm(f"`{ast.unparse(node)}` has arguments that are not supported")
        if name == "round" and len(node.args) == 2:
            digits = ast.literal_eval(node.args[1]) if _is_literal(node.args[1]) else None
            if type(digits) is not int or abs(digits) > _MAX_DIGITS:
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


def _check_call(node: ast.expr, others: Collection[str] = ()) -> None:
    """Raise `AssertionForm` if an expression is not a call of the program, or if it judges a value of the program.

    Args:
        node: an expression.
        others: names of the tests that are not values of the program.
    """
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
        elif isinstance(part, ast.Name) and part.id not in _JUDGES and part.id not in others:
            continue
        elif part is not None and not isinstance(part, ast.Constant):
            raise AssertionForm(f"`{ast.unparse(node)}` lets the program judge itself: compare a value with a literal")


# Builtins whose value is a verdict.
_JUDGES = frozenset({"all", "any", "bool", "callable", "eval", "hasattr", "isinstance", "issubclass"})


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
        Unreadable: the line does not stand for a value. The message gives the reason.
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


_CONTAINERS: Mapping[str, Callable[..., Any]] = {"l": list, "t": tuple, "s": set, "z": frozenset}
_NUMBERS: Mapping[str, Callable[..., Any]] = {
    "i": lambda text: int(text, 16), "f": float, "c": complex, "b": bytes.fromhex,
}  # fmt: skip
