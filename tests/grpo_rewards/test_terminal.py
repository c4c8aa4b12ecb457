"""Text and tables as a terminal, a narrow one, and a file get them."""

import os
import subprocess
import sys

import pytest

from grpo_rewards import terminal
from grpo_rewards.terminal import Cell, Labelled, Table, rendered, show

TABLE = Table([["strict", 0.5, "right by the answer tag and in full pay of another reward"], ["x", 12.25, Cell("no", "bad")]],
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


def test_labels_stand_in_a_column() -> None:
    text = rendered([Labelled("generation", "long " * 30), Labelled("note", "short"), "after"])
    lines = text.splitlines()
    assert lines[0].startswith("  generation      long")
    assert all(line.startswith(" " * 18 + "long") for line in lines[1:-2])
    assert lines[-2:] == ["  note            short", "after"]
    assert max(map(len, lines)) <= 100


def test_colours_are_for_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    show(TABLE)
    assert "\x1b" not in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    show(TABLE)
    assert "\x1b[31mno" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    show(TABLE)
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize("width", [None, 60])
def test_what_is_shown_can_steer_no_terminal(width: int | None) -> None:
    """Neither by control characters nor by the markup, the emoji names and the links that rich knows."""
    evil = "\x1b[2J\x07\u202e[red]x[/red] :boom: [link=http://x]y[/link] \x9b31m"
    parts = [Table([[evil, Cell(evil, "bad")]], (evil, "b")), Labelled("label", evil), evil, Cell(evil, "good")]
    said = rendered(parts, width)
    assert all(character.isprintable() or character == "\n" for character in said)
    assert "[red]x[/red]" in said
    assert ":boom:" in said
    coloured = rendered(parts, 200, has_colours=True)
    assert "\x1b[2J" not in coloured
    assert "\x1b]8" not in coloured


def test_a_reward_is_imported_without_rich() -> None:
    code = "import sys, grpo_rewards.cli, grpo_rewards; print('rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert done.stdout.strip() == "False", done.stderr
    assert terminal.WIDTH == 100
