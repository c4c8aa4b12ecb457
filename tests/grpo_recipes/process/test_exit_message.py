"""The sentence that a launch ends with: printed by the process that has it, or by the command that launched it."""

import json
from pathlib import Path

import pytest

from grpo_recipes.process import exit_message as last_sentence


def test_without_a_launcher_it_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(last_sentence.VARIABLE, raising=False)
    assert last_sentence.say_last("error: no room", 1) == 1
    assert capsys.readouterr().err == "error: no room\n"


def test_the_first_of_several_processes_is_heard(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(last_sentence.VARIABLE, str(tmp_path / "last"))
    last_sentence.say_last("error: the first", 2)
    last_sentence.say_last("error: lost the first", 1)
    assert last_sentence.read(tmp_path / "last") == ("error: the first", 2)
    assert capsys.readouterr().err == ""
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_where_it_cannot_be_left_it_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(last_sentence.VARIABLE, str(tmp_path / "nowhere" / "last"))
    last_sentence.say_last("error: no room", 1)
    assert capsys.readouterr().err == "error: no room\n"


@pytest.mark.parametrize("content", [None, "", '{"sent'])
def test_a_process_that_left_none(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "last").write_text(content)
    assert last_sentence.read(tmp_path / "last") is None


def test_it_may_hold_any_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(last_sentence.VARIABLE, str(tmp_path / "last"))
    last_sentence.say_last('error: ü "\n', 1)
    assert json.loads((tmp_path / "last").read_text())["sentence"] == 'error: ü "\n'
