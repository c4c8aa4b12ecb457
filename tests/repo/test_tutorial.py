"""Commands of docs/tutorial.md, run as written, and the exit codes that stop the tutorial."""

import importlib.util
import shutil
from collections.abc import Sequence
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


@pytest.mark.parametrize(("answer", "goes_on"), [(1, True), (2, False)])
def test_findings_of_diagnose_do_not_stop_the_tutorial(
    tutorial: ModuleType, monkeypatch: pytest.MonkeyPatch, answer: int, goes_on: bool
) -> None:
    """A run with findings gets a report. A run that can't be read gets none."""
    pictures = tutorial.RUN / "report"
    pictures.mkdir(parents=True)
    (tutorial.RUN.parent / "evaluation.json").write_text("{}")
    (pictures / "evaluation.svg").write_bytes(b"")
    called = []

    def run(command: Sequence[str]) -> int:
        called.append(command[0])
        return answer if command[0] == "diagnose" else 0

    monkeypatch.setattr(tutorial, "PROGRAMS", dict.fromkeys(tutorial.PROGRAMS, run))
    assert tutorial.main() == (0 if goes_on else answer)
    assert called[:4] == ["preview", "evaluate", "evaluate", "compare"]
    assert ("report" in called) == goes_on
    assert Path("pictures").is_dir() == goes_on


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
