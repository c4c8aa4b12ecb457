"""Rules for docstrings and comments that ruff does not know: how they may not begin.

A docstring that begins with "Of", "What", "Whether", "Which" or "Under" leaves its subject to another text. A reader
has to find that text first. Attribute docstrings (a string after an assignment) and entries of `Args:` and
`Attributes:` sections count as docstrings.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = re.compile(r"(Of|What|Whether|Which|Under|How|In what|In which|From what|From which)\b", re.IGNORECASE)
ENTRY = re.compile(r"^ +`?\w+`?(?: \(.*\))?: (.*)", re.MULTILINE)
# A forbidden word where a string, a comment or an entry of a docstring may begin. A source without one is not parsed,
# because parsing and tokenizing every file of the project takes seconds.
CANDIDATE = re.compile(rf"(?:[\"'#][\"'#\s\\]*|: ){FORBIDDEN.pattern}", re.IGNORECASE)


def python_files() -> list[str]:
    """Return the paths of all Python files of the project, relative to its root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for path in listed.stdout.split() if (ROOT / path).exists()]


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every string that stands alone as a statement."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every comment, without those that continue the comment of the line before."""
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield token.start[0], token.string.lstrip("# ")
            last = token.start[0] if token.line.lstrip().startswith("#") else -1


def forbidden(source: str) -> list[tuple[int, str]]:
    """Return the line and the text of every docstring, entry of a docstring and comment that begins as it may not."""
    if not CANDIDATE.search(source):
        return []
    found = []
    for line, text in docstrings(ast.parse(source)):
        openings = [text.strip(), *ENTRY.findall(text)]
        found += [(line, opening[:80]) for opening in openings if FORBIDDEN.match(opening)]
    return found + [(line, text[:80]) for line, text in comments(source) if FORBIDDEN.match(text)]


@pytest.mark.slow
def test_no_docstring_or_comment_begins_in_the_middle_of_a_sentence() -> None:
    found = []
    for path in python_files():
        source = (ROOT / path).read_text(encoding="utf-8")
        found += [f"{path}:{line}: {text}" for line, text in forbidden(source)]
    assert not found, "\n".join(found)
