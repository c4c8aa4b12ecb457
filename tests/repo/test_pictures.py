"""Screenshots of README and the documentation, made by `make pictures`."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from docs import pictures
from grpo_recipes.reports.report import write_report
from grpo_recipes.reports.run import Run
from tests.support.browser import chromium
from tests.support.synthetic import write_run


@pytest.mark.slow
def test_every_screenshot_is_taken_at_its_size(tmp_path: Path) -> None:
    if chromium() is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    folder = write_run(tmp_path / "run")
    write_report([Run.read(folder)], folder / "report")
    wanted = pictures.shots(folder)
    taken = pictures.take(wanted, tmp_path / "pictures")
    assert {path.stem for path in taken} == set(wanted)
    for path in taken:
        size = struct.unpack(">II", path.read_bytes()[16:24])
        assert size == (wanted[path.stem].width, wanted[path.stem].height)
        assert path.stat().st_size > 30_000, "not blank"


def test_every_picture_of_the_documentation_exists() -> None:
    root = Path(__file__).parents[2]
    made = {f"{name}.svg" for name in pictures.OF_THE_REPORT} | {f"{name}.png" for name in pictures.shots(root)}
    assert {path.name for path in (root / "docs" / "pictures").iterdir()} >= made


def test_a_missing_browser_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(pictures, "chromium", lambda: None)
    assert pictures.main() == 2
    assert "apt-get install chromium" in capsys.readouterr().err
