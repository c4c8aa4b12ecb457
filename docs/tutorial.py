"""Make what docs/tutorial.md shows: python docs/tutorial.py, from the root of a checkout.

Runs the quickstart unless its run is there, then every command of the tutorial's sections 2 to 4 as written there, and copies
the report's pictures.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from grpo_recipes import cli, quickstart, train

PICTURES = ("evaluation", "reward-gsm8k-correctness", "entropy", "groups-without-variance")
RUN = Path("runs/quickstart/grpo-seed0")
LAST_SECTION = "## 5."  # needs a GPU, and a model from the hub
PROGRAMS = {"grpo-recipes ": cli.main, "python -m grpo_recipes.train ": train.main}
FAILED = 2  # what a command returns if it can't do what was asked


def main() -> int:
    """Run the tutorial. Returns 0, or what the first command that failed returned; findings of `diagnose` are no failure."""
    folder = RUN.parent
    if not (folder / "evaluation.json").is_file() and (status := quickstart.main(["--output_dir", str(folder)])):
        return status
    for command in commands(Path(__file__).with_name("tutorial.md").read_text(encoding="utf-8")):
        print(f"\n$ {command}", flush=True)
        program = next(start for start in PROGRAMS if command.startswith(start))
        if "--output_dir" in command:  # of an earlier tutorial
            shutil.rmtree(Path(command.partition("--output_dir ")[2].split()[0]), ignore_errors=True)
        status = PROGRAMS[program](shlex.split(command.removeprefix(program)))
        if status == FAILED or (status and program != "grpo-recipes "):
            return status
    pictures = Path(__file__).parent / "pictures"
    pictures.mkdir(exist_ok=True)
    for name in PICTURES:
        shutil.copy(RUN / "report" / f"{name}.svg", pictures)
    return 0


def commands(tutorial: str) -> list[str]:
    """The commands in a tutorial's indented blocks up to `LAST_SECTION`, each on one line."""
    lines = tutorial.partition(LAST_SECTION)[0].replace("\\\n", " ").splitlines()
    typed = [" ".join(line.split()) for line in lines if line.startswith("    ")]
    return [line for line in typed if line.startswith(tuple(PROGRAMS))]


if __name__ == "__main__":
    sys.exit(main())
