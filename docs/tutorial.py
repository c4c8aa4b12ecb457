"""Make what docs/tutorial.md shows: python docs/tutorial.py [--output_dir runs/quickstart].

Runs the quickstart unless its run is there, then the tutorial's own commands, and copies the report's pictures.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from grpo_recipes import cli, quickstart

PICTURES = ("evaluation", "reward-gsm8k-correctness", "entropy", "groups-without-variance")
FAILED = 2  # what a command of grpo-recipes returns if it can't do what was asked


def main() -> int:
    """Run the tutorial. Returns 0, or what the first command that failed returned; findings of `diagnose` are no failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/quickstart"))
    folder: Path = parser.parse_args().output_dir
    run = folder / "grpo-seed0"
    if not (folder / "evaluation.json").is_file() and (status := quickstart.main(["--output_dir", str(folder)])):
        return status
    commands = [
        ["evaluate", "--compare", str(run / "evaluations" / "before"), str(run / "evaluations" / "after")],
        ["diagnose", str(run)],
        ["report", str(run)],
    ]
    for command in commands:
        print(f"\n$ grpo-recipes {' '.join(command)}", flush=True)
        if (status := cli.main(command)) == FAILED:
            return status
    pictures = Path(__file__).parent / "pictures"
    pictures.mkdir(exist_ok=True)
    for name in PICTURES:
        shutil.copy(run / "report" / f"{name}.png", pictures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
