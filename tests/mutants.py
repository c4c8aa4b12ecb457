"""Mutants: single changes of the product that its quick tests should notice.

    make mutants                                          # 300 drawn by a seed; writes docs/mutants.md
    python -m tests.mutants --count 40                    # the first 40 of them
    python -m tests.mutants --paths 'grpo_recipes/runs/*.py' --coverage /tmp/lines.json --seed 7

Coverage of one run of the quick tests says which of them reach a line. A mutant is run against those alone, quickest
first, in a copy of the tree, by a fork of a process that has imported torch, transformers and TRL once. (mutmut 3 replaces
functions by trampolines, which `inspect.signature` and pickling see; cosmic-ray starts a process for each mutant.)

`tests/mutants.txt` holds what is known of survivors, a line each: the file, the line as it is, as the mutant has it, and
`equivalent: ` with the argument why nothing changes, or `slow: ` with the test that notices it, which is then run.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.mutations import Mutant, mutants_of

ROOT = Path(__file__).resolve().parents[1]
KNOWN = ROOT / "tests" / "mutants.txt"
TARGETS = (
    "grpo_recipes/training/*.py",
    "grpo_recipes/runs/*.py",
    *(f"rewards/grpo_rewards/{name}.py" for name in ("answers", "symbolic", "correctness")),
)
IMPORTED_ONCE = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "datasets",
    "accelerate",
    "hypothesis",
    "pandas",
    "math_verify",
)

NOT_TRACED = "tests/grpo_rewards/test_symbolic.py::test_a_long_request_survives_a_signal_whose_handler_returns"
"""A signal every half millisecond, under a tracer, never lets the main thread go on."""

LIMIT = 120.0
"""Seconds of tests, as measured in the coverage run, that a mutant is run against at most."""

Lines = dict[str, dict[str, list[str]]]
"""By file and line number: the tests that reach it. Line 0 holds all tests of the file."""


class _Recorder:
    """A pytest plugin: which lines each test reaches, and how long it takes."""

    def __init__(self, cover: Any) -> None:
        self.cover, self.seconds = cover, {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.cover.switch_context(item.nodeid)
        started = time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = time.perf_counter() - started
        self.cover.switch_context("")
        return result


class _Selected:
    """A pytest plugin: the tests of a list, in its order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.order = {test: place for place, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda item: self.order[item.nodeid])


def enter(tree: Path) -> None:
    """Make this (forked) process import the project from `tree`, and its children too."""
    os.chdir(tree)
    os.environ["TMPDIR"] = tempfile.tempdir = str(tree.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tree), str(tree / "rewards")])
    sys.path[:] = [str(tree), str(tree / "rewards"), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "grpo_recipes", "grpo_rewards")]:
        del sys.modules[name]


def forked(work: Any, seconds: float, log: Path) -> int:
    """Run `work()` in a fork with its output in `log`; its exit code, or -1 after `seconds`."""
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = 70
        try:
            code = int(work())
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -1
        time.sleep(0.02)


def measure(tree: Path, found: Path, tests: Sequence[str]) -> int:
    """Run the quick tests under coverage, and write lines and durations to `found`."""
    from coverage import Coverage

    enter(tree)
    cover = Coverage(data_file=None, source=[str(tree / "grpo_recipes"), str(tree / "rewards")], concurrency=["thread"])
    recorder = _Recorder(cover)
    cover.start()
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", "--deselect", NOT_TRACED]
    code = pytest.main([*options, *tests], plugins=[recorder])
    cover.stop()
    data, lines = cover.get_data(), {}
    for file in data.measured_files():
        reached = {str(n): sorted(filter(None, names)) for n, names in data.contexts_by_lineno(file).items()}
        every = sorted({name for names in reached.values() for name in names})
        lines[str(Path(file).relative_to(tree))] = {"0": every, **reached}
    found.write_text(json.dumps({"lines": lines, "seconds": recorder.seconds}))
    return int(code)


def tests_of(mutant: Mutant, lines: Lines, seconds: dict[str, float]) -> list[str]:
    """The tests that reach the statement of a mutant, quickest first; of one that runs on import, those of the file."""
    reached = lines.get(mutant.path, {})
    numbers = [str(n) for n in range(mutant.lines[0], mutant.lines[1] + 1)]
    found = {test for number in numbers for test in reached.get(number, [])}
    if not found and any(number in reached for number in numbers):
        found = set(reached["0"])
    chosen, total = [], 0.0
    for test in sorted(found, key=lambda test: seconds.get(test, 0.0)):
        total += seconds.get(test, 0.0)
        if total <= LIMIT:
            chosen.append(test)
    return chosen


def run(mutant: Mutant, tree: Path, tests: Sequence[str], seconds: float, stamp: int) -> bool:
    """Whether one of the tests fails, or takes much longer, with the mutant in place."""
    file = tree / mutant.path
    source = file.read_text(encoding="utf-8")
    file.write_text(source[: mutant.start] + mutant.text + source[mutant.stop :], encoding="utf-8")
    os.utime(file, (stamp, stamp))  # compiled files are told apart by size and second

    def work() -> int:
        enter(tree)
        files = sorted({test.partition("::")[0] for test in tests})
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]
        return pytest.main([*options, *files], plugins=[_Selected(tests)])

    try:
        return forked(work, 30 + 5 * seconds, tree / "mutant.log") != 0
    finally:
        file.write_text(source, encoding="utf-8")
        os.utime(file, (stamp - 1, stamp - 1))


def known() -> dict[tuple[str, str, str], str]:
    """What `tests/mutants.txt` says, by file, line and changed line."""
    rows = (line.split("\t") for line in KNOWN.read_text(encoding="utf-8").splitlines() if line and line[0] != "#")
    return {(path, was, becomes): verdict for path, was, becomes, verdict in rows}


def main() -> int:
    """Draw mutants, run each, print a line each, and write the table if asked to; 1 if fewer than 90 % are killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--paths", nargs="*", default=TARGETS, help="patterns of files to change")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="tests to measure, all quick ones by default")
    parser.add_argument("--coverage", type=Path, help="a file that keeps what the tests reach, read if it exists")
    parser.add_argument("--record", type=Path, help="a file for the table")
    asked = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", PYTHONHASHSEED="0")
    sources = {
        str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for t in asked.paths for p in sorted(ROOT.glob(t))
    }
    every = [mutant for path, source in sources.items() for mutant in mutants_of(path, source)]
    drawn = draw(every, sources, asked.seed)[: asked.count]
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree, found = Path(folder, "tree"), asked.coverage or Path(folder, "lines.json")
        copy_tree(tree)
        if not found.exists():
            forked(lambda: measure(tree, found, asked.tests), 3600, tree / "coverage.log")
            print((tree / "coverage.log").read_text().splitlines()[-1], flush=True)
        measured = json.loads(found.read_text())
        rows = [judge(m, n, sources[m.path], tree, measured) for n, m in enumerate(drawn)]
    counts = Counter(outcome.partition(":")[0] for *_, outcome in rows)
    summary = f"{len(rows)} of {len(every)} mutants, seed {asked.seed}: " + ", ".join(
        f"{v} {k}" for k, v in counts.items()
    )
    print(summary)
    if asked.record:
        asked.record.write_text(table(summary, rows), encoding="utf-8")
    return int(counts["killed"] + counts["slow"] < 0.9 * (len(rows) - counts["equivalent"]))


def draw(every: Sequence[Mutant], sources: dict[str, str], seed: int) -> list[Mutant]:
    """All mutants in an order of the seed's, in which a change of the product elsewhere moves none of them."""
    counts: Counter[str] = Counter()
    keys = {}
    for mutant in every:
        text = repr((seed, mutant.path, *mutant.lines_of(sources[mutant.path])))
        counts[text] += 1  # equal lines of a file
        keys[mutant] = hashlib.sha256(f"{text}{counts[text]}".encode()).digest()
    return sorted(every, key=keys.__getitem__)


def judge(mutant: Mutant, number: int, source: str, tree: Path, measured: dict[str, Any]) -> tuple[str, str, str, str]:
    """(place, line, changed line, outcome) of a mutant."""
    was, becomes = mutant.lines_of(source)
    seconds, verdict = measured["seconds"], known().get((mutant.path, was, becomes), "")
    tests = tests_of(mutant, measured["lines"], seconds)
    if verdict.startswith("slow: "):
        tests = [verdict.removeprefix("slow: ")]
    stamp, started = 1_000_000_000 + 2 * number, time.monotonic()
    if verdict.startswith("equivalent: "):
        outcome = verdict
    elif not tests:
        outcome = "survived: no quick test reaches it"
    else:
        killed = run(mutant, tree, tests, sum(seconds.get(test, 60.0) for test in tests), stamp)
        outcome = (verdict or "killed") if killed else f"survived: {len(tests)} tests reach it"
    print(
        f"{number} {time.monotonic() - started:.0f} s {mutant.path}:{mutant.lines[0]} {outcome}\n    {was}\n    {becomes}",
        flush=True,
    )
    return f"{mutant.path}:{mutant.lines[0]}", was, becomes, outcome


def copy_tree(tree: Path) -> None:
    """A copy of what git tracks or would track."""
    listed = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def table(summary: str, rows: Sequence[tuple[str, str, str, str]]) -> str:
    """docs/mutants.md."""
    left = [row for row in rows if not row[-1].startswith("killed")]
    cells = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in left]
    head = [
        "# Mutants",
        "",
        "Made by `make mutants`, not by hand (`tests/mutants.py` says how).",
        "",
        f"{summary}.",
        "",
    ]
    return "\n".join([*head, "| place | line | mutant | outcome |", "|---|---|---|---|", *cells]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
