"""Commands of docs/tutorial.md, run as written, and the exit codes that stop the tutorial."""

import importlib.util
import shutil
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from grpo_recipes import cli, quickstart

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the script with a copy of its page, so that its picture and runs go to a folder of the test."""
    for name in ("tutorial.py", "tutorial.md"):
        shutil.copy(DOCS / name, tmp_path)
    spec = importlib.util.spec_from_file_location("tutorial", tmp_path / "tutorial.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    return module


def test_every_command_of_the_tutorial_is_found(tutorial: ModuleType) -> None:
    """Only the commands up to section 5 count, without the three lines that install."""
    text = (DOCS / "tutorial.md").read_text(encoding="utf-8").partition("## 5.")[0]
    typed = [line.split()[0] for line in text.splitlines() if line.startswith(("    grpo-recipes", "    python"))]
    found = tutorial.commands(text)
    assert [command.split()[0] for command in found] == typed
    assert not any("\\" in command for command in found)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_command_of_the_tutorial_runs_as_written(
    tutorial: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The quickstart is short here. Its own output is short too, and ends with commands."""
    monkeypatch.setattr(quickstart, "WarmStart", partial(quickstart.WarmStart, demonstrations=2_000))
    assert quickstart.main([]) == 0
    started = capsys.readouterr()
    assert started.out.count("\n") + started.err.count("\n") <= 60
    last = [line.split() for line in started.out.splitlines()[-3:]]
    assert [words[1] for words in last] == ["report", "diagnose", "plan"]
    for program, *arguments in last:
        assert shutil.which(program), "as typed: by its name, or by its path"
        # A policy after so short a warm start learns the format before the answers, which `diagnose` reports.
        assert cli.main(arguments) in ((0, 1) if arguments[0] == "diagnose" else (0,))
    assert tutorial.main() == 0
    said = capsys.readouterr().out
    for words in ("B - A", "pass@8", "majority", "report.html"):
        assert words in said
    assert (Path("pictures") / "evaluation.svg").stat().st_size > 1_000
