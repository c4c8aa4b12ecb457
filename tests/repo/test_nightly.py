"""The parts of `.ci/nightly`, their rows, and the page that joins the rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.tools import nightly
from tests.tools.nightly import Part

FAILING = """
echo 'FAILED tests/test_a.py::test_b[`|`] - assert 1 == 2'
echo '=================== 1 failed, 2 passed in 3.21s ==================='
echo 'make: *** [Makefile:33: test-nightly] Error 1' >&2
echo '/usr/lib/resource_tracker.py:254: UserWarning: 119 leaked semaphores' >&2
echo '  warnings.warn(leaked)' >&2
exit 2
"""


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for the rows of three parts, the first of which fails. The third one never runs."""
    parts = {
        "bad": Part("This fails.", FAILING, python="nowhere/python"),
        "good": Part("This passes.", "echo '== 3 passed in 1.00s (0:00:01) =='", python="", page="good.md"),
        "idle": Part("This does not run.", "false", python=""),
    }
    monkeypatch.setattr(nightly, "PARTS", parts)
    monkeypatch.setattr(nightly, "ROWS", tmp_path / "rows")
    monkeypatch.setattr(nightly, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # `main` changes those of the test's process
    return tmp_path / "rows"


def test_the_workflow_and_the_page_have_every_part() -> None:
    workflow = yaml.safe_load((nightly.ROOT / ".github" / "workflows" / "nightly.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["part"]
    assert job["strategy"]["matrix"]["part"] == list(nightly.PARTS)
    assert job["timeout-minutes"] * 60 > nightly.LIMIT  # a part that takes too long still writes its row
    listed = subprocess.run([nightly.ROOT / ".ci" / "nightly", "--list"], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == list(nightly.PARTS)
    page = nightly.PAGE.read_text(encoding="utf-8")
    assert all(f"\n| {name} | " in page for name in nightly.PARTS)


def test_the_page_is_joined_from_the_rows() -> None:
    assert nightly.PAGE.read_text(encoding="utf-8") == nightly.page(nightly.rows()), "run `.ci/nightly --join`"
    assert {file.stem for file in nightly.ROWS.glob("*")} <= set(nightly.PARTS)


def test_a_failing_part_leaves_its_row_and_does_not_stop_the_others(
    rows: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert nightly.main(["bad", "good"]) == 1
    assert "failed: bad" in capfd.readouterr().err
    assert sorted(file.name for file in rows.iterdir()) == ["bad.json", "good.json"]
    bad, good = (json.loads((rows / f"{name}.json").read_text()) for name in ("bad", "good"))
    assert (bad["exit_code"], bad["result"]) == (2, "1 failed, 2 passed in 3.21s")
    assert bad["failed"] == ["FAILED tests/test_a.py::test_b[`|`] - assert 1 == 2"]
    assert bad["versions"] == {}
    assert (good["result"], good["exit_code"]) == ("3 passed in 1.00s (0:00:01)", 0)
    assert nightly.main(["good"]) == 0
    assert nightly.main(["--join"]) == 0
    page = nightly.PAGE.read_text(encoding="utf-8")
    table = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| ")}
    assert "**failed** (exit code 2): `1 failed, 2 passed in 3.21s`" in table["bad"]
    assert "never" in table["idle"]


@pytest.mark.slow
def test_a_part_that_is_interrupted_ends_with_its_processes_and_leaves_no_row(tmp_path: Path) -> None:
    """The shell that starts it ignores Ctrl-C, as for a background job. The part takes half a second to end."""
    (tmp_path / "slow.json").write_text("an earlier row")
    script = f"""
import pathlib, sys
from tests.tools import nightly
slow = "trap 'sleep 0.5; exit 1' INT; echo $$; sleep 60"
nightly.PARTS = {{"slow": nightly.Part("", slow), "next": nightly.Part("", "true")}}
nightly.ROWS = pathlib.Path({str(tmp_path)!r})
sys.exit(nightly.main([]))
"""
    command = ["bash", "-c", 'trap "" INT; exec "$@"', "bash", sys.executable, "-c", script]
    with subprocess.Popen(
        command, cwd=nightly.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        child = int(process.stdout.readline())
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=300)
    assert time.monotonic() - sent > 0.5  # the end of the part was waited for
    assert process.returncode == 130
    assert said == "interrupted in slow, which leaves no row\n"
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"slow.json": "an earlier row"}
    deadline = time.monotonic() + 5  # the kernel may remove it a moment later
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
