"""Mutants: single changes of a file of the product, for whoever works on it and asks what its tests would notice.

    python -m tests.tools.mutants grpo_recipes/runs/resume.py --tests tests/grpo_recipes/runs
    make mutants FILE=grpo_recipes/runs/resume.py TESTS=tests/grpo_recipes/runs

Each mutant drawn is run against the quick tests named, in a copy of the tree, and those that no test notices are
printed. Most of them are no reason for a test: ask first whether the change would hurt a user.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.tools.mutations import mutants_of

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Draw mutants of a file, run each, and print the survivors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="file to change, from the root of the repository")
    parser.add_argument("--tests", nargs="+", required=True, help="files or folders of tests to run")
    parser.add_argument("--count", type=int, default=20, help="number of mutants (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: 0)")
    parser.add_argument("--seconds", type=float, default=600, help="time after which a mutant counts as noticed")
    asked = parser.parse_args()
    source = (ROOT / asked.file).read_text(encoding="utf-8")
    every = mutants_of(asked.file, source)
    drawn = random.Random(asked.seed).sample(every, min(asked.count, len(every)))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder, "tree")
        copy_tree(tree)
        if not passes(tree, asked.tests, asked.seconds):
            raise SystemExit("the tests fail on the file as it is, or take too long")
        survived = 0
        for number, mutant in enumerate(drawn, 1):
            text = source[: mutant.start] + mutant.text + source[mutant.stop :]
            (tree / asked.file).write_text(text, encoding="utf-8")
            was, becomes = mutant.lines_of(source)
            noticed = not passes(tree, asked.tests, asked.seconds)
            survived += not noticed
            print(f"{number} {asked.file}:{mutant.lines[0]} {'noticed' if noticed else 'SURVIVED'}", flush=True)
            if not noticed:
                print(f"    {was}\n    {becomes}", flush=True)
    print(f"{survived} of {len(drawn)} mutants survived")


def passes(tree: Path, tests: list[str], seconds: float) -> bool:
    """Return True if all quick tests pass in time."""
    path = os.pathsep.join([str(tree), str(tree / "rewards")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def copy_tree(tree: Path) -> None:
    """Copy what git tracks or would track."""
    listed = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


if __name__ == "__main__":
    main()
