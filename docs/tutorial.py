"""Run the commands of docs/tutorial.md and make its pictures: python -m docs.tutorial, from the root of a checkout.

The quickstart runs first unless its run exists. Then every command of sections 2 to 4 runs as written. The chart is the
report's. The screenshots need Chromium, and stay as they are without it.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from grpo_recipes import cli, quickstart, train
from tests.support.browser import Browser, chromium

RUN = Path("runs/quickstart/grpo-seed0")
LAST_SECTION = "## 5."
"""First section that is not run, because it needs a GPU and a model from the hub."""
PROGRAMS = {"grpo-recipes ": cli.main, "python -m grpo_recipes.train ": train.main}
FAILED = 2
"""Exit code of a command that failed. `diagnose` returns 1 for findings."""


def main() -> int:
    """Run the tutorial and return 0, or the exit code of the first command that failed."""
    folder = RUN.parent
    if not (folder / "evaluation.json").is_file():
        status = quickstart.main(["--output_dir", str(folder)])
        if status:
            return status
    for command in commands(Path(__file__).with_name("tutorial.md").read_text(encoding="utf-8")):
        print(f"\n$ {command}", flush=True)
        program = next(start for start in PROGRAMS if command.startswith(start))
        if "--output_dir" in command:  # the folder may be there from an earlier tutorial
            shutil.rmtree(Path(command.partition("--output_dir ")[2].split()[0]), ignore_errors=True)
        status = PROGRAMS[program](shlex.split(command.removeprefix(program)))
        if status == FAILED or (status and program != "grpo-recipes "):
            return status
    pictures = Path(__file__).parent / "pictures"
    pictures.mkdir(exist_ok=True)
    shutil.copy(RUN / "report" / "evaluation.svg", pictures)
    if chromium() is not None:
        take_screenshots(RUN / "report", pictures)
    return 0


# Resolves once the page of completions has unpacked them, which it does after its load.
IS_READ = """new Promise(resolve => {
  const ask = () => document.querySelector("#cards:empty") ? setTimeout(ask, 20) : resolve(0);
  ask();
})"""


def take_screenshots(report: Path, folder: Path) -> None:
    """Write the first screen of each page of a report as a PNG file into a folder."""
    # Chromium's helper processes may write to the profile for a moment after their parent has ended.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, Browser(Path(profile)) as browser:
        for name in ("report", "completions"):
            tab = browser.open((report / f"{name}.html").resolve(), 1280)
            tab.evaluate(IS_READ)
            tab.screenshot(folder / f"{name}.png", 900)


def commands(tutorial: str) -> list[str]:
    """Return the commands in the tutorial's indented blocks before `LAST_SECTION`, each on one line."""
    lines = tutorial.partition(LAST_SECTION)[0].replace("\\\n", " ").splitlines()
    typed = [" ".join(line.split()) for line in lines if line.startswith("    ")]
    return [line for line in typed if line.startswith(tuple(PROGRAMS))]


if __name__ == "__main__":
    sys.exit(main())
