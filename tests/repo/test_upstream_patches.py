"""docs/upstream: each patch applies to the installed TRL, and each reproduction shows what its report describes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import trl

from tests.support.quantized import needs_bitsandbytes

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "upstream"
PATCHES = sorted(path.stem for path in FOLDER.glob("*.patch"))


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patch_has_a_page_and_applies(patch: str, tmp_path: Path) -> None:
    assert (FOLDER / f"{patch}.md").is_file()
    for name in re.findall(r"^\+\+\+ b/(\S+)", (FOLDER / f"{patch}.patch").read_text(), re.MULTILINE):
        copied = tmp_path / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(trl.__file__).parent.parent / name, copied)
    command = ["git", "apply", "-p1", "--check", str(FOLDER / f"{patch}.patch")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("report", "shows"),
    [
        ("trl-lora-server-weights", r"True 0\.\d*[1-9]"),
        ("trl-continuous-batching-cast", r"torch\.float32\n(.*\n)*torch\.bfloat16"),
        (
            "transformers-caches-behind-a-prefix",
            r"bamba (0\.[1-9]|[1-9])\S*\njamba (0\.[1-9]|[1-9])\S*\nqwen2 (0\.[1-9]|[1-9])",
        ),
        ("math-verify-equal-answers", r"(.* True\n){7}"),
        ("transformers-time-step-limit", r"0\.001 0\.0[1-9]\d*\n1e-09 \d\.\d*e-0[5-9]"),
        pytest.param("bitsandbytes-cpu-repacking", r"MatMul4BitBackward.*\n(?!.*MatMul4Bit)", marks=needs_bitsandbytes),
    ],
)
def test_a_reproduction_shows_what_its_report_says(report: str, shows: str, tmp_path: Path) -> None:
    script = FOLDER / f"{report.replace('-', '_')}.py"
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(shows, done.stdout), done.stdout


def test_every_report_is_listed() -> None:
    listed = set(re.findall(r"\(([\w-]+\.md)\)", (FOLDER / "README.md").read_text()))
    assert listed == {path.name for path in FOLDER.glob("*.md")} - {"README.md"}
