"""Run the commands of docs/tutorial.md and make its picture: python -m docs.tutorial, from the root of a checkout.

The quickstart runs first unless its run exists. Then every command of sections 2 to 4 runs as written.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from grpo_recipes import cli, quickstart, train

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
    return 0


def commands(tutorial: str) -> list[str]:
    """Return the commands in the tutorial's indented blocks before `LAST_SECTION`, each on one line."""
    lines = tutorial.partition(LAST_SECTION)[0].replace("\\\n", " ").splitlines()
    typed = [" ".join(line.split()) for line in lines if line.startswith("    ")]
    return [line for line in typed if line.startswith(tuple(PROGRAMS))]


if __name__ == "__main__":
    sys.exit(main())
