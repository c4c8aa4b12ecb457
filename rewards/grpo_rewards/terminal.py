"""Terminal output and command lines: printing, tables, and the argument parser of both commands.

Text of models, datasets and other people's files must not control the terminal that shows it: an escape sequence can
clear the screen, rename the window or write to the clipboard, and a bidirectional override displays text in another
order. Both commands print through `say`, `say_error` or `show`. These also hide text that looks like a secret, because
an error may quote a URL with a password.
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
import unicodedata
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from grpo_rewards.errors import did_you_mean
from grpo_rewards.redaction import redacted

if TYPE_CHECKING:  # importing rich takes a tenth of a second, which a reward should not cost
    from rich.table import Table as Grid
    from rich.text import Text

# Unicode categories of characters that are escaped: controls, formats (bidirectional overrides among them), lone
# surrogates, unassigned and private characters, and the two separators that some programs read as the end of a line.
_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"})
_JOINERS = "\u200c\u200d"  # formats too, but Persian spelling needs one and emoji sequences need the other

WIDTH = 100
"""Width of text in a file or a pipe, in columns. The cells of tables are not wrapped there."""

_UNWRAPPED = 10_000
_LABEL = 16
_STYLES = {"": "", "good": "green", "bad": "red", "dim": "dim", "head": "bold"}


@dataclass(frozen=True)
class Cell:
    """Cell of a table, or a line, that stands out on a terminal. The style is `good`, `bad`, `dim` or `head`."""

    text: object
    style: str = ""


@dataclass(frozen=True)
class Labelled:
    """Short label and a text that is wrapped beside it."""

    label: str
    text: str


@dataclass(frozen=True)
class Table:
    """Rows of cells of any type under an optional head. `numbers` are the indices of the right-aligned columns."""

    rows: Sequence[Sequence[object]]
    head: Sequence[str] = ()
    numbers: frozenset[int] = frozenset()


Part = str | Cell | Labelled | Table
"""Unit of output of `show`. A string is printed as it is."""


def visible(text: object) -> str:
    r"""Return `str(text)` on one line, with an escape (`\x1b`) for each character that is invisible or a control."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(_escaped(character) for character in text)


def visible_lines(text: object) -> str:
    """Return `str(text)` like `visible`, with its line feeds kept: for text whose layout is ours."""
    return "\n".join(map(visible, str(text).split("\n")))


def _escaped(character: str) -> str:
    if character.isprintable() or character in _JOINERS or unicodedata.category(character) not in _CATEGORIES:
        return character
    return character.encode("unicode_escape").decode("ascii")


def say(text: object = "", *, end: str = "\n", to_stderr: bool = False) -> None:
    """Print text without secrets, then `end`. Line feeds are kept, every other control character is escaped."""
    print(_safe(text), end=end, file=sys.stderr if to_stderr else sys.stdout, flush=True)


def say_error(sentence: object, kind: str = "error") -> None:
    """Print one sentence to standard error, on one line and without secrets."""
    print(f"{kind}: {visible(redacted(str(sentence)))}", file=sys.stderr, flush=True)


def _safe(text: object) -> str:
    return visible_lines(redacted(str(text)))


def show(*parts: Part) -> None:
    """Print text and tables, aligned. On a terminal they are wrapped to its width and coloured."""
    from rich.console import Console

    terminal = Console()
    width = terminal.width if terminal.is_terminal else None
    print(rendered(parts, width, terminal.color_system), flush=True)


def rendered(parts: Iterable[Part], width: int | None = None, colours: str | None = None) -> str:
    """Return the text that `show` prints on a terminal of `width` columns, or into a file if `width` is None.

    `colours` is rich's name of a colour system. Every control character is escaped.
    """
    from rich.console import Console

    file = io.StringIO()  # every text is a `Text`, in which rich reads neither markup nor names of emoji
    console = Console(file=file, force_terminal=bool(colours), color_system=colours)  # type: ignore[arg-type]
    for part in parts:
        console.width = width or (WIDTH if isinstance(part, Labelled) else _UNWRAPPED)
        if isinstance(part, Labelled):
            console.print(_labelled_grid(part))
        elif isinstance(part, Table):
            console.print(_grid(part))
        else:
            console.print(_text(part), soft_wrap=width is None)
    return "\n".join(line.rstrip() for line in file.getvalue().split("\n")).rstrip("\n")


def _text(part: object) -> Text:
    from rich.text import Text

    cell = part if isinstance(part, Cell) else Cell(part)
    return Text(_safe(cell.text), style=_STYLES[cell.style])


def _labelled_grid(part: Labelled) -> Grid:
    from rich.table import Table as Grid

    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", min_width=_LABEL, no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row(_text("  " + part.label), _text(part.text))
    return grid


def _grid(table: Table) -> Grid:
    from rich.table import Table as Grid

    grid = Grid(box=None, show_header=bool(table.head), pad_edge=False, padding=(0, 2, 0, 0))
    columns = max([len(table.head), *map(len, table.rows)])
    head = [*table.head, *[""] * (columns - len(table.head))]
    for column, title in enumerate(_indented(head)):
        grid.add_column(title, justify="right" if column in table.numbers else "left", overflow="fold")
    for row in table.rows:
        grid.add_row(*_indented(row))
    return grid


def _indented(cells: Sequence[object]) -> list[Text]:
    texts = []
    for column, cell in enumerate(cells):
        text = _text(cell)
        texts.append(text if column else _text("  ") + text)
    return texts


@contextmanager
def visible_messages() -> Iterator[None]:
    """Escape and redact what libraries log and warn of within the block, because they quote files and URLs."""
    make_record, show_warning = logging.getLogRecordFactory(), warnings.showwarning

    def safe_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        record.msg, record.args = _safe(record.getMessage()), None
        return record

    def safe_warning(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        show_warning(_safe(message), category, *args, **kwargs)

    logging.setLogRecordFactory(safe_record)
    warnings.showwarning = safe_warning
    try:
        yield
    finally:
        logging.setLogRecordFactory(make_record)
        warnings.showwarning = show_warning


class LastingStream:
    """Standard stream that survives its reader and a full disk: after the first failure its text is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None
        """First failure. A reader that closes its pipe early, as `head` does, is not a failure."""

    def write(self, text: str) -> int:
        """Write text, or drop it after a failure."""
        with self._surviving():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write the buffered text, or drop it after a failure."""
        with self._surviving():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with suppress(OSError, ValueError):  # a stream without a file descriptor needs no replacement
                # The interpreter flushes the buffer once more when it ends. Without this it would fail a second time.
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)
            if isinstance(error, BrokenPipeError) or self.error is not None:
                return
            self.error = error
            if sys.stdout is self:
                say_error(f"standard output can't be written ({error.strerror}): what follows is not shown", "warning")


@contextmanager
def lasting_output() -> Iterator[LastingStream]:
    """Keep a closed pipe or a full disk behind standard output or standard error from raising within the block.

    A command whose reader has gone ends as usual. A command whose output can't be written prints one line about it, on
    standard error.

    Yields:
        Standard output. Its `error` is set after a failure.
    """
    before = sys.stdout, sys.stderr
    output, errors = LastingStream(sys.stdout or io.StringIO()), LastingStream(sys.stderr or io.StringIO())
    sys.stdout, sys.stderr = output, errors
    try:
        yield output
    finally:
        output.flush()
        errors.flush()
        sys.stdout, sys.stderr = before


class CommandParser(argparse.ArgumentParser):
    """argparse's parser with one-sentence errors and without abbreviations.

    Abbreviations are off because `plan x --model m` would set `--model_config` where it means to override the recipe's
    `model_name_or_path`. Options are declared with underscores, like recipe keys, and accepted with hyphens too.
    In help texts, `%` is written twice.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "allow_abbrev": False})

    @property
    def long_options(self) -> list[str]:
        """Names of the options that start with `--`."""
        names = [name for action in self._actions for name in action.option_strings]
        return [name for name in names if name.startswith("--")]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, with hyphens or underscores in the names of options."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args(list(map(self._underscored, words)), namespace)

    def error(self, message: str) -> NoReturn:
        """Print one sentence and exit with code 2."""
        say_error(message)
        raise SystemExit(2)

    def check_command(self, arguments: Sequence[str], commands: Collection[str]) -> None:
        """Exit with one sentence unless `arguments` name one of `commands`, or ask for the help or the version."""
        word = next((word for word in arguments if not word.startswith("-")), None)
        if word in commands or (word is None and not {"-h", "--help", "--version"}.isdisjoint(arguments)):
            return
        problem = "a command is missing" if word is None else f"there is no command `{word}`"
        hint = did_you_mean(word or "", commands, f"choose {', '.join(commands)}")
        self.error(f"{problem}: {hint}")

    def _underscored(self, word: str) -> str:
        if not word.startswith("--"):
            return word
        name, equals, value = word.partition("=")
        underscored = "--" + name[2:].replace("-", "_")
        return underscored + equals + value if underscored in self.long_options else word
