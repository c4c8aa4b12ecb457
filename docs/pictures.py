"""Make the screenshots that README and the documentation show: python -m docs.pictures, from the root of a checkout.

Reports on the quickstart's run, which is made unless it is there, and photographs the page in Chromium: on a desktop, on a
phone, light and dark. The tutorial's SVG pictures are the report's own, copied by docs/tutorial.py.
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


@dataclass(frozen=True)
class Shot:
    """A screenshot of a page: the window's width, how much of the page, and whether the screen is dark."""

    page: Path
    width: int = 1280
    height: int = 900
    dark: bool = False


def shots(run: Path) -> dict[str, Shot]:
    """The screenshots by their names, without suffix."""
    report = run / "report" / "report.html"
    return {
        "report": Shot(report),
        "report-dark": Shot(report, dark=True),
        "report-phone": Shot(report, width=390, height=1200),
    }


def take(shots: Mapping[str, Shot], folder: Path) -> list[Path]:
    """Write the screenshots as PNGs into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    # Chromium's helper processes may write to the profile for a moment after their parent has ended.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, Browser(Path(profile)) as browser:
        return [
            browser.open(shot.page.resolve(), shot.width, dark=shot.dark).screenshot(
                folder / f"{name}.png", shot.height
            )
            for name, shot in shots.items()
        ]


def main() -> int:
    """Make every picture. Returns 0, 2 without a browser, or what the quickstart or the report returned if it failed."""
    from grpo_recipes import cli, quickstart

    if chromium() is None:
        print("error: screenshots need Chromium: apt-get install chromium", file=sys.stderr)
        return 2
    if not (RUN.parent / "evaluation.json").is_file() and (
        status := quickstart.main(["--output_dir", str(RUN.parent)])
    ):
        return status
    if status := cli.main(["report", str(RUN)]):
        return status
    for name in OF_THE_REPORT:
        shutil.copy(RUN / "report" / f"{name}.svg", PICTURES)
    for path in take(shots(RUN), PICTURES):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
