"""Page of all error messages that refuse something, read from the code that raises them (docs/build_site.py)."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (ROOT / "grpo_recipes", ROOT / "rewards" / "grpo_rewards")
BASES = frozenset({"UserError", "ValueError"})  # a ValueError about a reward's arguments refuses the recipe
GAP = "…"
"""Placeholder for each value that a message names."""

VALIDATORS = {
    "check_number": "`…`: it is …{}: set a number …",
    "check_setting": "`…`: `…` {}: set `…` to …",
    "_check_unset": "`dataset.…`: it does not go with {}: remove it",
    "_check_multiple": "`…`: {}, and … is not a multiple of …: set it to …",
}
"""Functions that raise for many keys, with the message around the reason that a caller gives as the last argument."""

HEAD = """# What an error says

Every error message with which a command, a training run or a reward refuses something, grouped by what you were doing.
`…` stands for your own values. Each message names what to change. Search for a few words of your message.
The mark beside a message links to it.

This page is generated from the code that raises the errors.
"""

ACTIVITIES: Mapping[str, tuple[str, ...]] = {
    "Writing a recipe": ("grpo_recipes/recipe/", "grpo_recipes/plan/init"),
    "Reading a dataset": ("grpo_recipes/data/",),
    "Naming rewards and giving them arguments": ("grpo_rewards/",),
    "Using a judge, a reward model or a schema": (
        *("grpo_rewards/judge", "grpo_rewards/chat_endpoint", "grpo_rewards/reward_model", "grpo_rewards/internlm2"),
        "grpo_rewards/schema",
    ),
    "Scoring and checking with `grpo-rewards`": ("grpo_rewards/cli",),
    "Planning, and the checks before a model is loaded": (
        "grpo_recipes/checks/",
        "grpo_recipes/plan/",
        "grpo_recipes/run/preview",
    ),
    "Training": (
        *("grpo_recipes/run/", "grpo_recipes/training/", "grpo_recipes/generation/", "grpo_recipes/process/"),
        *("grpo_recipes/tools/", "grpo_recipes/quickstart"),
    ),
    "Saving and resuming": ("grpo_recipes/runs/", "grpo_recipes/training/saving", "grpo_recipes/training/data_order"),
    "Evaluating and comparing": ("grpo_recipes/evaluation/",),
    "Merging and exporting": ("grpo_recipes/evaluation/merge",),
    "Reading reports and diagnoses": ("grpo_recipes/reports/",),
    "Any command": ("grpo_recipes/cli", "grpo_rewards/terminal", "grpo_rewards/files"),
}
"""Parts of the paths of the modules that raise errors, by what their user was doing, in the order of the page."""


@dataclass(frozen=True)
class Refusal:
    """Error message with `GAP` for each value, and the place in the repository that raises it."""

    sentence: str
    file: str
    """Path from the root of the repository."""
    line: int

    @property
    def pattern(self) -> re.Pattern[str]:
        """Pattern that matches a printed message of this kind."""
        return re.compile(".*?".join(map(re.escape, self.sentence.split(GAP))), re.DOTALL)


@cache
def refusals() -> list[Refusal]:
    """Return every refusal of both packages by file and line, equal messages only once."""
    modules = parsed_modules()
    reader = reader_of(modules)
    found: dict[str, Refusal] = {}
    for file, tree in modules.items():
        for line, sentence in reader.sentences(tree):
            found.setdefault(sentence, Refusal(sentence, file, line))
    return sorted(found.values(), key=lambda one: (one.file, one.line))


@cache
def parsed_modules() -> dict[str, ast.Module]:
    """Return every module of both packages, by its path from the root of the repository."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in sorted(package.rglob("*.py"))
    }


def reader_of(modules: Mapping[str, ast.Module]) -> Reader:
    """Return a reader that knows the errors and functions of these modules."""
    return Reader(_error_classes(modules.values()), _functions(modules.values()))


def anchors(found: Iterable[Refusal]) -> dict[str, Refusal]:
    """Return the refusals by anchor: the first words, and a number if two messages begin alike."""
    named: dict[str, Refusal] = {}
    for one in found:
        words = re.findall(r"[a-z0-9_]+", one.sentence.lower().replace("'", ""))
        slug = first = "-".join(words[:8]) or "refused"
        number = 2
        while slug in named:
            slug, number = f"{first}-{number}", number + 1
        named[slug] = one
    return named


def page(source_url: str) -> str:
    """Return the page as Markdown, with links to the files of the repository under `source_url`."""
    sections: dict[str, list[str]] = {activity: [] for activity in ACTIVITIES}
    for anchor, one in anchors(refusals()).items():
        where = f"{source_url}/{one.file}#L{one.line}"
        sections[activity_of(one.file)].append(
            f'- <a id="{anchor}" href="#{anchor}">¶</a> {_marked_up(one.sentence)} ([code]({where}))'
        )
    parts = [HEAD, *(f"\n## {title}\n\n" + "\n".join(lines) + "\n" for title, lines in sections.items())]
    return "".join(parts)


def activity_of(file: str) -> str:
    """Return the heading for the messages of a module. The longest path in `ACTIVITIES` decides."""
    matches = [(len(path), activity) for activity, paths in ACTIVITIES.items() for path in paths if path in file]
    if not matches:
        raise ValueError(f"{file} has messages and no heading: add its folder to ACTIVITIES in docs/error_pages.py")
    return max(matches)[1]


def _marked_up(sentence: str) -> str:
    """Return a message as Markdown that shows it unchanged, with code between backquotes."""
    pieces = []
    for piece in re.split(r"(`[^`]*`)", sentence):
        is_code = piece.startswith("`") and len(piece) > 1
        pieces.append(piece if is_code else re.sub(r"([\\*_\[\]<>`#|])", r"\\\1", piece))
    return "".join(pieces)


def _error_classes(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names of the `BASES` and of every class below them."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    names = set(BASES)
    while more := {name for name, above in bases.items() if above & names} - names:
        names |= more
    return names


def _functions(trees: Iterable[ast.Module]) -> dict[str, list[ast.FunctionDef]]:
    found: dict[str, list[ast.FunctionDef]] = defaultdict(list)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                found[node.name].append(node)
    return found


@dataclass
class Reader:
    """Reader of the messages in calls of error classes, through the variables and functions that build the messages."""

    errors: set[str]
    functions: Mapping[str, list[ast.FunctionDef]]
    unread: list[str] = field(default_factory=list)
    """Expressions in which no text was found."""

    def sentences(self, tree: ast.Module) -> Iterator[tuple[int, str]]:
        """Yield the line and the text of each message in a module."""
        for scope, call in _calls(tree):
            name = ast.unparse(call.func).rpartition(".")[2]
            if name in VALIDATORS:
                for reason in self._texts(call.args[-1], scope, 0):
                    yield call.lineno, VALIDATORS[name].format(reason)
            if not call.args or not (name in self.errors or name == "error"):
                continue
            parts = [self._texts(part, scope, 0) for part in call.args[:3]]
            if not any(parts):
                self.unread.append(f"{call.lineno}: {ast.unparse(call)}")
            for texts in product(*(texts or [GAP] for texts in parts)):
                text = ": ".join(filter(None, texts))
                if len(text.split()) >= 3:
                    yield call.lineno, " ".join(text.split())

    def _texts(self, expression: ast.expr, scope: ast.AST, depth: int) -> list[str]:
        """Return the texts that an expression may evaluate to."""
        if depth > 6:
            return []
        match expression:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=values):
                return ["".join(part.value if isinstance(part, ast.Constant) else GAP for part in values)]
            case ast.BinOp(op=ast.Add(), left=left, right=right):
                ends = self._texts(right, scope, depth + 1) or [GAP]
                return [start + end for start in self._texts(left, scope, depth + 1) or [GAP] for end in ends]
            case ast.IfExp(body=body, orelse=orelse):
                return self._texts(body, scope, depth + 1) + self._texts(orelse, scope, depth + 1)
            case ast.Name(id=name):
                values = _nearest(list(_assigned(name, scope)), scope, expression.lineno)
                return [text for value in values for text in self._texts(value, scope, depth + 1)]
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Dict(keys=parts):
                return [text for part in parts if part for text in self._texts(part, scope, depth + 1)]
            case ast.Starred(value=value) | ast.Call(func=ast.Attribute(value=value, attr="items")):
                return self._texts(value, scope, depth + 1)
            case ast.Call(func=ast.Name(id="str"), args=[value]):
                return self._texts(value, scope, depth + 1)
            case ast.Call(func=func, args=[*given]) if ast.unparse(func).rpartition(".")[2] in self.errors:
                return [text for value in given[:1] for text in self._texts(value, scope, depth + 1)]
            case ast.Call(func=ast.Name(id="did_you_mean"), args=[_, _, otherwise]):
                return ["did you mean `…`?", *self._texts(otherwise, scope, depth + 1)]
            case ast.Call(func=func):
                made = self.functions.get(ast.unparse(func).rpartition(".")[2], [])
                return [text for one in made for value in _returned(one) for text in self._texts(value, one, depth + 1)]
        return []


def _calls(tree: ast.Module) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Yield each call of a module, with the function around it."""
    scopes: list[ast.AST] = [tree]

    def walk(node: ast.AST) -> Iterator[tuple[ast.AST, ast.Call]]:
        inner = isinstance(node, ast.FunctionDef)
        if inner:
            scopes.append(node)
        if isinstance(node, ast.Call):
            yield scopes[-1], node
        for child in ast.iter_child_nodes(node):
            yield from walk(child)
        if inner:
            scopes.pop()

    yield from walk(tree)


def _nearest(values: list[ast.expr], scope: ast.AST, line: int) -> list[ast.expr]:
    """Return the values that are assigned after the last error raised above a line, or all if there are none."""
    raised = [node.end_lineno or 0 for node in ast.walk(scope) if isinstance(node, (ast.Raise, ast.Return))]
    above = max((end for end in raised if end < line), default=0)
    return [value for value in values if above < value.lineno <= line] or values


def _assigned(name: str, scope: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that a function assigns to a name, appends to it, or loops over with it."""
    for node in ast.walk(scope):
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                yield value
            case ast.NamedExpr(target=ast.Name(id=found), value=value) if found == name:
                yield value
            case ast.For(target=ast.Name(id=found), iter=value) if found == name:
                yield value
            case ast.For(target=ast.Tuple(elts=[ast.Name(id=found), *_]), iter=value) if found == name:
                yield value
            case ast.Call(func=ast.Attribute(value=ast.Name(id=found), attr="append"), args=[value]) if found == name:
                yield value


def _returned(function: ast.FunctionDef) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, (ast.Return, ast.Yield)) and node.value is not None:
            yield node.value


if __name__ == "__main__":
    for one in refusals():
        print(f"{one.file}:{one.line}: {one.sentence}")
