"""Single changes of a source file that `make mutants` draws from, each with its place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

COMPARED: dict[type, list[type[ast.cmpop]]] = {
    ast.Lt: [ast.LtE, ast.GtE], ast.LtE: [ast.Lt, ast.Gt], ast.Gt: [ast.GtE, ast.LtE], ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq, ast.Lt], ast.Is: [ast.IsNot], ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn], ast.NotIn: [ast.In],
}  # fmt: skip
OPERATED: dict[type, type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Div, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
RENAMED = {
    "min": "max", "max": "min", "any": "all", "all": "any", "mean": "max", "find": "rfind", "rfind": "find",
    "startswith": "endswith", "endswith": "startswith", "partition": "rpartition", "rpartition": "partition",
    "search": "match", "fullmatch": "match", "floor": "ceil", "ceil": "floor", "int": "round", "round": "int",
    "sorted": "list", "append": "count", "lstrip": "rstrip", "rstrip": "lstrip", "update": "get", "add": "discard",
    "set": "list", "median": "mean", "sum": "max",
}  # fmt: skip
UNWRAPPED = {
    "strip",
    "clamp",
    "abs",
    "detach",
    "lower",
    "casefold",
    "float",
    "double",
    "masked_fill",
    "contiguous",
    "sum",
}
BARED = {"sqrt", "log", "exp", "tuple", "reversed"}
"""Functions of one argument that a mutant drops."""

NOT_SWAPPED = {
    "isinstance",
    "issubclass",
    "getattr",
    "hasattr",
    "setattr",
    "min",
    "max",
    "lcm",
    "range",
    "zip",
    "super",
}
"""Functions whose first two arguments are not exchanged: the exchange changes nothing, or always raises."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: str
    start: int
    """The change lies in source[start:stop], in characters."""
    stop: int
    text: str
    lines: tuple[int, int]
    """First and last line of its statement, or of the head of a compound one."""
    on_import: bool = False
    """True if the statement runs when the file is imported: outside of functions, or the head of one."""

    def lines_of(self, source: str) -> tuple[str, str]:
        """Return the line that changes and the changed line, both without indentation."""
        first, last = source.rfind("\n", 0, self.start) + 1, source.find("\n", self.stop)
        return _flat(source[first:last]), _flat(source[first : self.start] + self.text + source[self.stop : last])


def _flat(text: str) -> str:
    return " ".join(text.split())


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its text."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:  # ast counts columns in bytes
        text = source[starts[line - 1] : starts[line]]
        return starts[line - 1] + len(text.encode()[:column].decode())

    found = []
    tree = ast.parse(source)
    inside = _inside_functions(tree)
    for node, statement in _nodes(tree):
        body = getattr(statement, "body", None)
        last = body[0].lineno - 1 if isinstance(body, list) else statement.end_lineno
        for change in _changes(node):
            text = change if isinstance(change, str) else ast.unparse(ast.fix_missing_locations(change))
            bracketed = isinstance(node, ast.expr) and not isinstance(node, (ast.Constant, ast.Slice))
            text = f"({text})" if bracketed else text
            start = place(node.lineno, node.col_offset)  # type: ignore[attr-defined]
            stop = place(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
            lines = (statement.lineno, max(statement.lineno, last or 0))
            found.append(Mutant(path, start, stop, text, lines, statement not in inside))
    return sorted(found, key=lambda mutant: (mutant.start, mutant.stop, mutant.text))


def _inside_functions(tree: ast.AST) -> set[ast.AST]:
    inside: set[ast.AST] = set()
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in function.body:
                inside.update(ast.walk(statement))
    return inside


def _nodes(tree: ast.AST) -> Iterator[tuple[Any, ast.stmt]]:
    """Yield every node that can change, with its statement.

    Types, annotations, imports, texts of errors and logs, and f-strings stay.
    """

    def walk(node: ast.AST, statement: ast.stmt | None) -> Iterator[tuple[Any, ast.stmt]]:
        if isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom)) or _is_docstring(node) or _is_literal(node):
            return
        if isinstance(node, ast.stmt):
            statement = node
        if statement is not None and hasattr(node, "lineno"):
            yield node, statement
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "targets", "type_comment"):
                continue
            if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _is_log(node)):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, statement)

    return walk(tree, None)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_literal(node: ast.AST) -> bool:
    return isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Literal"


def _is_log(node: ast.Call) -> bool:
    name = ast.unparse(node.func)
    return name.startswith(("logger.", "warnings.")) or name == "print" or name.endswith("Error")


def _changes(node: Any) -> Iterator[ast.AST | str]:
    """Yield the replacements of a node."""
    match node:
        case ast.Compare(ops=[operator]):
            for other in COMPARED[type(operator)]:
                yield ast.Compare(node.left, [other()], node.comparators)
            if isinstance(operator, (ast.Is, ast.IsNot)) and _is_none(node.comparators[0]):  # empty is taken for None
                yield node.left if isinstance(operator, ast.IsNot) else ast.UnaryOp(ast.Not(), node.left)
        case ast.BinOp() if type(node.op) in OPERATED:
            yield ast.BinOp(node.left, OPERATED[type(node.op)](), node.right)
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
            for value in node.values:  # without this one
                yield ast.BoolOp(node.op, [other for other in node.values if other is not value])
        case ast.UnaryOp():
            yield node.operand
        case ast.Constant(value=bool() as value):
            yield repr(not value)
        case ast.Constant(value=int() | float() as value):
            yield repr(value + 1)
        case ast.Set() | ast.Tuple() | ast.List() if len(node.elts) > 1 and all(map(_is_constant, node.elts)):
            for element in node.elts:  # without this one
                rest = [other for other in node.elts if other is not element]
                yield ast.Set(rest) if isinstance(node, ast.Set) else type(node)(rest, ast.Load())
        case ast.Tuple() if len(node.elts) > 1 and all(map(_is_type, node.elts)):  # types for isinstance or except
            for element in node.elts:
                rest = [other for other in node.elts if other is not element]
                yield ast.Tuple(rest, ast.Load())
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            for generator in node.generators:
                for condition in generator.ifs:
                    yield _without_condition(node, generator, condition)
        case ast.Subscript(slice=ast.Constant(value=0)):
            yield ast.Subscript(node.value, ast.UnaryOp(ast.USub(), ast.Constant(1)), ast.Load())
        case ast.IfExp():
            yield ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
        case ast.Slice(lower=lower, upper=upper) if lower or upper:
            yield ast.Slice(None, upper, node.step) if lower else ast.Slice(lower, None, node.step)
        case ast.Call():
            yield from _other_calls(node)
        case ast.Expr(value=ast.Call() as call) if not _is_log(call):
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.Raise():
            yield "pass"
        case ast.AugAssign():
            yield f"{ast.unparse(node.target)} = {ast.unparse(node.value)}"
        case ast.Assign(targets=[ast.Name(id=name)]) if _reads(node.value, name):  # a value that is refined
            yield "pass"
        case ast.Return(value=value) if value is not None and not _is_none(value) and not _is_bool(value):
            yield "return None"  # None for False changes nothing for most callers, and True for False is drawn
        case ast.Break() | ast.Continue():
            yield "continue" if isinstance(node, ast.Break) else "break"


def _other_calls(node: ast.Call) -> Iterator[ast.AST]:
    """Yield the call by another name, its object or argument alone, other arguments, and fewer keywords."""
    func, name = node.func, getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name in RENAMED:
        other = RENAMED[name]
        renamed = (
            ast.Attribute(func.value, other, ast.Load())
            if isinstance(func, ast.Attribute)
            else ast.Name(other, ast.Load())
        )
        yield ast.Call(renamed, node.args, node.keywords)
    if name in UNWRAPPED and isinstance(func, ast.Attribute):
        yield func.value
    if name in BARED and len(node.args) == 1 and not node.keywords:
        yield node.args[0]
    first, second = (*node.args[:2], None, None)[:2]
    if second is not None and name not in NOT_SWAPPED and name[:1].islower() and _can_swap(first, second):
        yield ast.Call(func, [second, first, *node.args[2:]], node.keywords)
    for keyword in node.keywords:
        if keyword.arg not in (None, "strict"):
            yield ast.Call(func, node.args, [other for other in node.keywords if other is not keyword])


def _is_constant(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and not isinstance(value.value, (int, float))


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _is_bool(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, bool)


def _is_type(value: ast.expr) -> bool:
    """Return True for a name that begins as those of classes do."""
    name = getattr(value, "attr", getattr(value, "id", ""))
    return name[:1].isupper() and not name.isupper()


def _reads(value: ast.expr, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(value))


def _can_swap(first: ast.expr, second: ast.expr) -> bool:
    """Return True for two different arguments that may be of one type: two names, or two attributes or elements."""
    alike = isinstance(first, (ast.Name, ast.Attribute, ast.Subscript)) and isinstance(second, type(first))
    return alike and ast.unparse(first) != ast.unparse(second)


def _without_condition(node: Any, generator: ast.comprehension, condition: ast.expr) -> ast.AST:
    kept = [other for other in generator.ifs if other is not condition]
    changed = ast.comprehension(generator.target, generator.iter, kept, generator.is_async)
    generators = [changed if other is generator else other for other in node.generators]
    if isinstance(node, ast.DictComp):
        return ast.DictComp(node.key, node.value, generators)
    return type(node)(node.elt, generators)
