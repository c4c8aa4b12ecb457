"""Make the screenshots of README and the documentation: python -m docs.pictures, from the root of a checkout.

The script reports on the quickstart's run, which it makes if necessary, and photographs the page in Chromium: on a
desktop and a phone, light and dark. It also copies the report's charts for the tutorial.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.browser import Browser, chromium

PICTURES = Path(__file__).parent / "pictures"
RUN = Path("runs/quickstart/grpo-seed0")
OF_THE_REPORT = ("evaluation", "reward-gsm8k-correctness", "entropy", "groups-without-variance")


# Resolves once the page of completions has unpacked them, which it does after its load.
IS_READ = """new Promise(resolve => {
  const ask = () => document.querySelector("#cards:empty") ? setTimeout(ask, 20) : resolve(0);
  ask();
})"""


@dataclass(frozen=True)
class Shot:
    """Screenshot of a page: width of the window and height of the part, in pixels, and True for a dark screen."""

    page: Path
    width: int = 1280
    height: int = 900
    dark: bool = False


def shots(run: Path) -> dict[str, Shot]:
    """Return the screenshots by their names, without suffix."""
    report = run / "report" / "report.html"
    return {
        "report": Shot(report),
        "report-dark": Shot(report, dark=True),
        "report-phone": Shot(report, width=390, height=1200),
        "completions": Shot(report.with_name("completions.html")),
    }


def take(shots: Mapping[str, Shot], folder: Path) -> list[Path]:
    """Write the screenshots as PNG files into a folder, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    # Chromium's helper processes may write to the profile for a moment after their parent has ended.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, Browser(Path(profile)) as browser:
        taken = []
        for name, shot in shots.items():
            tab = browser.open(shot.page.resolve(), shot.width, dark=shot.dark)
            tab.evaluate(IS_READ)
            taken.append(tab.screenshot(folder / f"{name}.png", shot.height))
        return taken


def main() -> int:
    """Make every picture. Return 0, 2 without a browser, or the exit code of a quickstart or report that failed."""
    from grpo_recipes import cli, quickstart

    if chromium() is None:
        print("error: screenshots need Chromium: apt-get install chromium", file=sys.stderr)
        return 2
    status = 0
    if not (RUN.parent / "evaluation.json").is_file():
        status = quickstart.main(["--output_dir", str(RUN.parent)])
    status = status or cli.main(["report", str(RUN)])
    if status:
        return status
    for name in OF_THE_REPORT:
        shutil.copy(RUN / "report" / f"{name}.svg", PICTURES)
    for path in take(shots(RUN), PICTURES):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
