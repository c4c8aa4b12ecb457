"""What is printed: text of models, datasets and other people's files can't steer the terminal that shows it.

An escape sequence can clear a screen, rename its window or write to its clipboard; a bidirectional override shows text in
another order than it has. Everything that either command prints goes through `say`, `say_error` or `show`, which also
hide what has the shape of a secret: an error may quote a URL with a password.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import shutil
import sys
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NoReturn

from grpo_rewards.errors import did_you_mean
from grpo_rewards.redaction import redacted

# Controls, formats (bidirectional overrides among them), lone surrogates, unassigned and private characters, and the two
# separators that some programs take for a line's end.
_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"})
_JOINERS = "\u200c\u200d"  # formats too, but Persian is spelled with one and emoji with the other

WIDTH = 100  # of text in a file or a pipe, where a table's cells are not wrapped at all
_UNWRAPPED = 10_000
_LABEL = 16
_STYLES = {"good": "green", "bad": "red", "quiet": "dim", "head": "bold"}


@dataclass(frozen=True)
class Cell:
    """A cell of a table, or a line, that stands out on a terminal: `good`, `bad`, `quiet` or `head`."""

    text: object
    style: str = ""


@dataclass(frozen=True)
class Labelled:
    """A short label and a text that is wrapped beside it."""

    label: str
    text: str


@dataclass(frozen=True)
class Table:
    """Rows of cells, which may be of any type, under a head; `numbers` are the columns that end at one edge."""

    rows: Sequence[Sequence[object]]
    head: Sequence[str] = ()
    numbers: frozenset[int] = frozenset()


Part = str | Cell | Labelled | Table
"""What `show` prints; text stands as it is, one part under the other."""


def visible(text: object) -> str:
    r"""Return `str(text)` on one line, each character that shows nothing or steers a terminal as its escape (`\x1b`)."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(_escaped(character) for character in text)


def visible_lines(text: object) -> str:
    """The same with line feeds left as they are: for text whose layout is ours."""
    return "\n".join(map(visible, str(text).split("\n")))


def say(text: object = "", *, to_stderr: bool = False) -> None:
    """Print text without secrets, its line feeds as they are and every other control character made visible."""
    print(visible_lines(redacted(str(text))), file=sys.stderr if to_stderr else sys.stdout, flush=True)


def show(*parts: Part) -> None:
    """Print text and tables: aligned, wrapped to the terminal's width, in colours only on a terminal."""
    is_terminal = sys.stdout.isatty()
    has_colours = is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    width = shutil.get_terminal_size().columns if is_terminal else None
    print(rendered(parts, width, has_colours=has_colours), flush=True)


def rendered(parts: Iterable[Part], width: int | None = None, *, has_colours: bool = False) -> str:
    """What `show` prints on a terminal of `width` columns, or of None into a file; every control character made visible."""
    from rich.console import Console  # takes a tenth of a second, which a reward should not

    file = io.StringIO()
    console = Console(
        file=file,
        force_terminal=has_colours,
        color_system="standard" if has_colours else None,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    for kind, group in groupby(parts, type):
        if kind is Labelled:
            console.width = width or WIDTH
            console.print(_sheet([part for part in group if isinstance(part, Labelled)]))
            continue
        console.width = width or _UNWRAPPED
        for part in group:
            if isinstance(part, Table):
                console.print(_grid(part, wraps=width is not None))
            else:
                console.print(_text(part), soft_wrap=width is None)
    return "\n".join(line.rstrip() for line in file.getvalue().split("\n")).rstrip("\n")


def _text(part: object) -> Any:
    from rich.text import Text

    content, style = (part.text, part.style) if isinstance(part, Cell) else (part, "")
    return Text(visible_lines(redacted(str(content))), style=_STYLES.get(style, ""))


def _sheet(parts: Sequence[Labelled]) -> Any:
    from rich.table import Table as Grid

    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", min_width=_LABEL, no_wrap=True)
    grid.add_column(overflow="fold")
    for part in parts:
        grid.add_row(_text("  " + part.label), _text(part.text))
    return grid


def _grid(table: Table, *, wraps: bool) -> Any:
    from rich import box
    from rich.table import Table as Grid

    style = box.SIMPLE_HEAD if wraps and table.head else None
    grid = Grid(box=style, show_header=bool(table.head), pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    columns = max([len(table.head), *map(len, table.rows)])
    for column in range(columns):
        title = "  " * (not column) + table.head[column] if column < len(table.head) else ""
        grid.add_column(_text(title), justify="right" if column in table.numbers else "left", overflow="fold")
    for row in table.rows:
        cells = [_text(cell) for cell in row]
        cells[0] = _text("  ") + cells[0]
        grid.add_row(*cells)
    return grid


def say_error(sentence: object, kind: str = "error") -> None:
    """Print one sentence to standard error, on one line and without secrets."""
    print(f"{kind}: {visible(redacted(str(sentence)))}", file=sys.stderr, flush=True)


@contextmanager
def visible_messages() -> Iterator[None]:
    """Inside this block treat what libraries log and warn of as `say` treats its text: they quote files and URLs."""
    make_record, show = logging.getLogRecordFactory(), warnings.showwarning

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = make_record(*args, **kwargs)
        made.msg, made.args = visible_lines(redacted(made.getMessage())), None
        return made

    def warning(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        show(visible_lines(redacted(str(message))), category, *args, **kwargs)

    logging.setLogRecordFactory(record)
    warnings.showwarning = warning
    try:
        yield
    finally:
        logging.setLogRecordFactory(make_record)
        warnings.showwarning = show


class Outlet:
    """A standard stream that outlasts its reader and its disk: from the first failure on, its text is dropped."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.error: OSError | None = None
        """The failure, unless the reader of a pipe has simply read enough, as `head` does."""

    def write(self, text: str) -> int:
        """Write text, or drop it."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Write what is buffered, or drop it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: OSError) -> None:
        with suppress(OSError, ValueError):  # without a descriptor there is nothing to replace
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())  # what is buffered goes there too, when the interpreter ends
            os.close(nowhere)
        if isinstance(error, BrokenPipeError) or self.error is not None:
            return
        self.error = error
        if sys.stdout is self:
            say_error(f"standard output can't be written ({error.strerror}): what follows is not shown", "warning")


@contextmanager
def lasting_output() -> Iterator[Outlet]:
    """Inside this block a closed pipe or a full disk behind standard output or standard error raises nothing.

    A command whose output nobody reads any more ends as it would have; one whose output can't be written says so once,
    on standard error. Yields standard output, whose `error` tells the caller.
    """
    before = sys.stdout, sys.stderr
    output, errors = Outlet(sys.stdout or io.StringIO()), Outlet(sys.stderr or io.StringIO())
    sys.stdout, sys.stderr = output, errors
    try:
        yield output
    finally:
        output.flush()
        errors.flush()
        sys.stdout, sys.stderr = before


def _escaped(character: str) -> str:
    if character.isprintable() or character in _JOINERS or unicodedata.category(character) not in _CATEGORIES:
        return character
    return character.encode("unicode_escape").decode("ascii")


class Parser(argparse.ArgumentParser):
    """argparse's parser with one sentence for a mistake, and without abbreviations.

    Abbreviated, `plan x --model m` would set `--model_config` where it means to override the recipe. Options are declared
    with underscores, as the keys of a recipe are, and may be given with hyphens too. In help texts, `%` is written twice.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "allow_abbrev": False})

    @property
    def long_options(self) -> list[str]:
        """What may be given, as `--name`."""
        names = [name for action in self._actions for name in action.option_strings]
        return [name for name in names if name.startswith("--")]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, with options in either spelling."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._underscored(word) for word in words], namespace)

    def error(self, message: str) -> NoReturn:
        """Print one sentence and end with exit code 2."""
        say_error(message)
        raise SystemExit(2)

    def check_command(self, arguments: Sequence[str], commands: Iterable[str]) -> None:
        """End with one sentence unless `arguments` name one of `commands`, or ask for help or the version."""
        word = next((word for word in arguments if not word.startswith("-")), None)
        *others, last = commands
        choices = f"{', '.join(others)} or {last}"
        if word is not None and word not in (*others, last):
            nearest = did_you_mean(word, (*others, last), f": choose {choices}")
            self.error(f"there is no command `{word}`{nearest}")
        if word is None and not {"-h", "--help", "--version"} & set(arguments):
            self.error(f"name a command, {choices}: `{self.prog} --help` says what each does")

    def _underscored(self, word: str) -> str:
        name, equals, value = word.partition("=")
        underscored = "--" + name[2:].replace("-", "_")
        return underscored + equals + value if name.startswith("--") and underscored in self.long_options else word
