"""The reproductions in docs/upstream show what the reports say, as long as upstream has not mended it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "upstream"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("report", "shows"),
    [
        ("trl-lora-server-weights", r"True 0\.\d*[1-9]"),
        ("trl-continuous-batching-cast", r"torch\.float32\n(.*\n)*torch\.bfloat16"),
    ],
)
def test_a_reproduction_shows_what_its_report_says(report: str, shows: str, tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (FOLDER / f"{report}.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(shows, done.stdout), done.stdout


def test_every_report_is_listed() -> None:
    listed = set(re.findall(r"\(([\w-]+\.md)\)", (FOLDER / "README.md").read_text()))
    assert listed == {path.name for path in FOLDER.glob("*.md")} - {"README.md"}
