"""Text and tables on a terminal, on a narrow terminal and in a file; streams that fail."""

import errno
import io
import logging
import os
import subprocess
import sys
import warnings
from contextlib import suppress

import pytest

from grpo_rewards import terminal
from grpo_rewards.terminal import (
    Cell,
    CommandParser,
    Labelled,
    Table,
    lasting_output,
    rendered,
    say,
    show,
    visible,
    visible_messages,
)

TABLE = Table([["strict", 0.5, "right by the answer tag and in full pay of another reward"],
               ["x", 12.25, Cell("no", "bad")]],
              ("what", "share", "asks"), frozenset({1}))  # fmt: skip


def test_a_table_in_a_file_is_aligned_and_not_wrapped() -> None:
    assert rendered([Cell("Title", "head"), TABLE]).splitlines() == [
        "Title",
        "  what    share  asks",
        "  strict    0.5  right by the answer tag and in full pay of another reward",
        "  x       12.25  no",
    ]
    assert "word " * 60 in rendered([Table([["word " * 60 + "."]])])


@pytest.mark.parametrize("width", [30, 40, 72])
def test_on_a_terminal_no_line_is_wider(width: int) -> None:
    parts = [TABLE, Labelled("generation", "8 prompts × 8 completions " * 3), "a plain sentence " * 6, "w" * 100]
    lines = rendered(parts, width).splitlines()
    assert max(map(len, lines)) <= width
    assert "".join(line.strip() for line in lines).count("w" * 20) >= 1
    assert rendered(parts, width).count("×") == 3


def test_only_a_terminal_gets_colours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    show(TABLE)
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    show(TABLE)
    assert "\x1b[31mno" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    show(TABLE)
    assert "\x1b[31m" not in capsys.readouterr().out


@pytest.mark.parametrize("width", [None, 60])
def test_shown_text_cannot_control_the_terminal(width: int | None) -> None:
    """Control characters are escaped, and the markup, emoji names and links that rich knows stay text."""
    evil = "\x1b[2J\x07\u202e[red]x[/red] :boom: [link=http://x]y[/link] \x9b31m"
    parts = [Table([[evil, Cell(evil, "bad")]], (evil, "b")), Labelled("label", evil), evil, Cell(evil, "good")]
    shown = rendered(parts, width)
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert "[red]x[/red]" in shown
    assert ":boom:" in shown
    coloured = rendered(parts, 200, "standard")
    assert "\x1b[2J" not in coloured
    assert "\x1b]8" not in coloured


def test_messages_of_libraries_are_as_before_behind_the_command(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogRecordFactory(), warnings.showwarning
    for error in (None, ZeroDivisionError):
        with suppress(ZeroDivisionError), visible_messages():
            logging.getLogger("library").warning("a %s\x1b", "b\n")
            if error:
                raise error
        assert (logging.getLogRecordFactory(), warnings.showwarning) == before
    logging.getLogger("library").warning("a\x1b")
    assert [record.getMessage() for record in caplog.records] == ["a b\n\\x1b"] * 2 + ["a\x1b"]


def test_text_in_the_buffer_of_a_stream_is_written_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [io.BytesIO(), io.BytesIO()]
    streams = [io.TextIOWrapper(file, encoding="utf-8") for file in files]
    for name, stream in zip(("stdout", "stderr"), streams, strict=True):
        monkeypatch.setattr(sys, name, stream)
    with lasting_output():
        print("é", end="")
        print("ü", end="", file=sys.stderr)
    assert [file.getvalue() for file in files] == ["é".encode(), "ü".encode()]


def test_a_stream_without_a_reader_keeps_no_descriptor_open() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", closefd=True) as pipe:
        stream = terminal.LastingStream(pipe)
        before = len(os.listdir("/dev/fd"))
        stream.write("text")
        stream.flush()
        assert len(os.listdir("/dev/fd")) == before
        assert stream.error is None, "a reader that has gone is no failure"


class FullDisk(io.StringIO):
    """Stream to a file on a full disk."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_reported_once_on_the_other_stream(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", FullDisk())
    with lasting_output() as output:
        say("one")
        print("two", flush=True)
        assert output.error is not None
    error = capsys.readouterr().err
    assert ("No space left on device" in error, error.count("\n")) == (True, 1)
    assert type(sys.stdout) is FullDisk


def test_nothing_is_raised_if_neither_stream_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, FullDisk())
    with lasting_output():
        say("one")
        say("two", to_stderr=True)
    for name in ("stdout", "stderr"):  # closed, as by `>&-`
        monkeypatch.setattr(sys, name, None)
    with lasting_output():
        say("one")


def parser() -> CommandParser:
    found = CommandParser(prog="tool")
    found.add_argument("--max_rows", type=int)
    found.add_argument("-o", "--out")
    return found


@pytest.mark.parametrize("name", ["--max-rows", "--max_rows"])
def test_options_are_accepted_with_hyphens_too(name: str) -> None:
    assert parser().parse_args([name, "3"]).max_rows == 3
    assert parser().parse_args([f"{name}=3", "--out=a-b"]).out == "a-b"
    assert parser().parse_known_args(["--some-key", "a-b", "c-d"])[1] == ["--some-key", "a-b", "c-d"]
    assert parser().long_options == ["--help", "--max_rows", "--out"]


def test_a_pipe_closed_by_its_reader_is_no_error() -> None:
    """The pipe is closed before the command prints, as under `| head`. The interpreter's own last flush counts too."""
    command = [sys.executable, "-c", "import sys; from grpo_rewards.cli import main; sys.exit(main())", "--help"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_character_that_is_invisible_or_a_control_is_escaped() -> None:
    # A control, a format, a lone surrogate, unassigned, private, and separators of lines and paragraphs.
    escaped = {"\x07": r"\x07", "\n": r"\n", "\u202e": r"\u202e", "\ud800": r"\ud800", "\u0378": r"\u0378"}
    escaped |= {"\ue000": r"\ue000", "\u2028": r"\u2028", "\u2029": r"\u2029"}
    for character, shown in escaped.items():
        assert visible(f"a{character}b") == f"a{shown}b"
    for character in "\u200c\u200d\u3000é":  # joiners, and a space
        assert visible(f"a{character}b") == f"a{character}b"


def test_a_command_line_names_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    commands = ["score", "check", "list"]
    for words, *figures in (([], *commands), (["--verbose"], *commands), (["scor", "x"], "`scor`", "`score`"),
                            (["-v", "frobnicate"], "`frobnicate`", *commands)):  # fmt: skip
        with pytest.raises(SystemExit) as ended:
            parser().check_command(words, commands)
        error = capsys.readouterr().err
        assert (ended.value.code, error.count("\n")) == (2, 1)
        assert all(figure in error for figure in figures)
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["--max_rows", "x"])
    assert (ended.value.code, "--max_rows" in capsys.readouterr().err) == (2, True)
    for accepted in (["--help"], ["-h"], ["--version"], ["check"], ["-v", "list"]):
        parser().check_command(accepted, commands)
