"""docs/tutorial.py, its commands replaced: which of their answers end it."""

import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from grpo_recipes import cli

SCRIPT = Path(__file__).resolve().parents[1] / "docs" / "tutorial.py"


@pytest.mark.parametrize(
    ("answer", "commands"), [(1, ["evaluate", "diagnose", "report"]), (2, ["evaluate", "diagnose"])]
)
def test_findings_do_not_end_the_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int, commands: list[str]
) -> None:
    """A run with findings is reported on; a run that can't be read is not."""
    copy = Path(shutil.copy(SCRIPT, tmp_path))  # it writes its pictures beside itself
    spec = importlib.util.spec_from_file_location("tutorial", copy)
    assert spec is not None
    assert spec.loader is not None
    tutorial = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tutorial)
    pictures = tmp_path / "run" / "grpo-seed0" / "report"
    pictures.mkdir(parents=True)
    (tmp_path / "run" / "evaluation.json").write_text("{}")
    for name in tutorial.PICTURES:
        (pictures / f"{name}.png").write_bytes(b"")
    called = []

    def run(command: Sequence[str]) -> int:
        called.append(command[0])
        return answer if command[0] == "diagnose" else 0

    monkeypatch.setattr(cli, "main", run)
    monkeypatch.setattr("sys.argv", ["tutorial.py", "--output_dir", str(tmp_path / "run")])
    assert tutorial.main() == (answer if answer == 2 else 0)
    assert called == commands
    assert (tmp_path / "pictures").is_dir() == (answer == 1)
