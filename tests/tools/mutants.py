"""Mutants: single changes of the product that its quick tests should notice.

    make mutants                                          # 300 drawn by a seed; writes docs/mutants.md
    python -m tests.tools.mutants --count 40                    # the first 40 of them
    python -m tests.tools.mutants --coverage /tmp/reach.json --results /tmp/mutants.jsonl    # goes on where it was cut
    off python -m tests.tools.mutants --coverage ... --results ... --again survived              # after new tests

Coverage of one run of the quick tests says which of them reach a line (`tests/tools/reach.py`). A mutant is run against
those alone, quickest first, in a copy of the tree, by a fork of a process that has imported what they need. (mutmut 3
replaces functions by trampolines, which `inspect.signature` and pickling see; cosmic-ray starts a process for each
mutant.) At the end the tests that noticed a mutant run on the product as it is, where each must pass.

`tests/tools/mutants.txt` holds what is known of survivors, a line each: the file, the line as it is, as the mutant has
it, and `equivalent: ` with the argument why nothing changes, `slow: ` with the test that notices it, which is then run,
or `survived: ` with the reason why no test is worth it.
"""

from __future__ import annotations

import argparse
import gc
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.tools.mutations import Mutant, mutants_of
from tests.tools.reach import Reach, complete

ROOT = Path(__file__).resolve().parents[2]
KNOWN = ROOT / "tests" / "tools" / "mutants.txt"
TARGETS = (
    "grpo_recipes/training/*.py",
    "grpo_recipes/generation/*.py",
    "grpo_recipes/runs/*.py",
    "grpo_recipes/process/*.py",
    *(f"rewards/grpo_rewards/math/{name}.py" for name in ("answers", "symbolic", "correctness")),
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

LIMIT = 30.0
"""Seconds of tests, as measured in the coverage run, that a mutant is run against at most."""

NOT_FOUND = int(pytest.ExitCode.NO_TESTS_COLLECTED)

EACH = 0.01
"""Seconds that a test costs beyond what is measured."""

CHEAP = 0.1
"""Seconds up to which every case of a test function runs before the second case of any other."""


@dataclass(frozen=True)
class Result:
    """Result of one mutant, a line of the file of results."""

    path: str
    was: str
    becomes: str
    nth: int
    """Number of this mutant among those of the file with the same two lines."""
    line: int
    outcome: str
    """`killed`, or a verdict of `tests/tools/mutants.txt`, or `survived: ` and how many tests reach it."""
    by: str = ""
    """The test that failed; `time-out`; or empty: none failed, or none came so far."""
    tests: tuple[str, ...] = ()
    """A few of those that reach it."""

    @property
    def key(self) -> tuple[str, str, str, int]:
        return self.path, self.was, self.becomes, self.nth


class _Selected:
    """A pytest plugin: the tests of a list in its order, each with a limit of its own; writes which one failed."""

    def __init__(self, tests: Sequence[str], seconds: dict[str, float], failed: Path) -> None:
        self.order = {test: place for place, test in enumerate(tests)}
        self.seconds, self.failed = seconds, failed

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda item: self.order[item.nodeid])
        for item in items:
            item.add_marker(pytest.mark.timeout(20 + 10 * self.seconds.get(item.nodeid, 60.0)), append=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            with self.failed.open("a", encoding="utf-8") as file:
                file.write(report.nodeid + "\n")


def enter(tree: Path) -> None:
    """Make this (forked) process import the project from `tree`, and its children too."""
    os.chdir(tree)
    os.environ["TMPDIR"] = tempfile.tempdir = str(tree.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tree), str(tree / "rewards")])
    sys.path[:] = [str(tree), str(tree / "rewards"), *(p for p in sys.path if Path(p or ".").resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "grpo_recipes", "grpo_rewards")]:
        del sys.modules[name]


def forked(work: Callable[[], Any], seconds: float, log: Path) -> int:
    """Run `work()` in a fork with its output in `log`; its exit code, or -1 after `seconds`."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = 70
        try:
            code = int(work() or 0)
        finally:
            os._exit(code)
    deadline = time.monotonic() + seconds
    done, status = 0, 0
    while not done and time.monotonic() < deadline:
        time.sleep(0.02)
        done, status = os.waitpid(child, os.WNOHANG)
    with suppress(ProcessLookupError):  # processes of a test may outlive it
        os.killpg(child, signal.SIGKILL)
    if not done:
        os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if done else -1


def tests_of(mutant: Mutant, lines: dict[str, dict[int, list[str]]], seconds: dict[str, float]) -> list[str]:
    """Return the tests that reach a mutant's statement: the cheap ones, then the first case of each other function.

    Those of its file, where none does: a line may run on import, or in a process that a test starts.
    """
    reached = lines.get(mutant.path, {})
    found = {test for n in range(mutant.lines[0], mutant.lines[1] + 1) for test in reached.get(n, [])}
    cases: Counter[str] = Counter()
    ranked = []
    for test in sorted(found or reached.get(0, []), key=lambda test: (seconds[test], test)):
        function = test.partition("[")[0]
        ranked.append((cases[function] if seconds[test] > CHEAP else 0, seconds[test] + EACH, test))
        cases[function] += 1
    chosen, total = [], 0.0
    for _, cost, test in sorted(ranked):
        if total + cost <= LIMIT:
            total += cost
            chosen.append(test)
    return chosen


def run(change: tuple[str, str] | None, tree: Path, tests: Sequence[str], seconds: dict[str, float]) -> list[str]:
    """Run tests with the text of one file changed. Return the first that fails, or all that fail if nothing is changed.

    Returns:
        Names of failed tests. `["time-out"]` if the tests took much longer than they should. `[""]` if they could not
        be collected or ended their process.
    """
    failed = tree.parent / "failed"
    failed.write_text("")

    def work() -> int:
        enter(tree)
        files = sorted({test.partition("::")[0] for test in tests})
        options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", *(["-x"] if change else [])]
        return pytest.main([*options, *files], plugins=[_Selected(tests, seconds, failed)])

    limit = 60 + 5 * sum(seconds.get(test, 60.0) for test in tests)
    if change is None:
        code = forked(work, limit, tree.parent / "mutant.log")
    else:
        with changed(tree / change[0], change[1]):
            code = forked(work, limit, tree.parent / "mutant.log")
    none: list[str] = []
    return failed.read_text().split("\n")[:-1] or {0: none, NOT_FOUND: none, -1: ["time-out"]}.get(code, [""])


@contextmanager
def changed(file: Path, text: str) -> Iterator[None]:
    """Give the file another text, with its own modification time: compiled files are told apart by size and second."""
    before = file.read_text(encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    os.utime(file, (stamp := next(_stamps), stamp))
    try:
        yield
    finally:
        file.write_text(before, encoding="utf-8")
        os.utime(file, (stamp := next(_stamps), stamp))


_stamps = count(1_000_000_000)


@cache
def known() -> dict[tuple[str, str, str], str]:
    """Return the verdicts of `tests/tools/mutants.txt`, by file, line and changed line."""
    rows = (line.split("\t") for line in KNOWN.read_text(encoding="utf-8").splitlines() if line and line[0] != "#")
    return {(path, was, becomes): verdict for path, was, becomes, verdict in rows}


def main() -> int:
    """Draw mutants, run each, print a line each, and write the table if asked to; 1 if fewer than 90 % are killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--paths", nargs="*", default=TARGETS, help="patterns of files to change")
    parser.add_argument("--tests", nargs="*", default=["tests"], help="tests to measure, all quick ones by default")
    parser.add_argument("--coverage", type=Path, help="a file that keeps what the tests reach from run to run")
    parser.add_argument("--results", type=Path, help="a file that keeps what became of each mutant from run to run")
    parser.add_argument("--again", default="none", help="results to judge anew: those that begin so, such as survived")
    parser.add_argument("--record", type=Path, help="a file for the table")
    asked = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", PYTHONHASHSEED="0")
    sources = {
        str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for t in asked.paths for p in sorted(ROOT.glob(t))
    }
    every = draw(sources, asked.seed)
    drawn = dict(list(every.items())[: asked.count])
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree, kept = Path(folder, "tree"), asked.results or Path(folder, "results.jsonl")
        copy_tree(tree)

        def measured(work: Callable[[], Any]) -> int:
            def inside() -> None:
                enter(tree)
                work()

            return forked(inside, 3600, tree.parent / "coverage.log")

        reach = complete(asked.coverage or Path(folder, "reach.json"), tree, asked.tests, sources, measured)
        reach.import_modules()
        gc.freeze()  # a collection in a fork need not walk, and so copy, what is imported
        results = judge(drawn, sources, tree, reach, kept, asked.again)
        while failed := control(results, tree, reach.seconds):
            print(f"fail on the product as it is, alone, and count no more: {', '.join(failed)}", flush=True)
            reach.forget(failed)
            results = judge(drawn, sources, tree, reach, kept, again="none")
    counts = Counter(result.outcome.partition(":")[0] for result in results)
    summary = f"{len(results)} of {len(every)} mutants, seed {asked.seed}: " + ", ".join(
        f"{counts[outcome]} {outcome}" for outcome in OUTCOMES
    )
    print(summary)
    if asked.record:
        asked.record.write_text(table(summary, results), encoding="utf-8")
    return int(counts["killed"] + counts["slow"] < 0.9 * (len(results) - counts["equivalent"]))


def draw(sources: dict[str, str], seed: int) -> dict[tuple[str, str, str, int], Mutant]:
    """All mutants by key, in an order of the seed's, in which a change of the product elsewhere moves none of them."""
    counts: Counter[str] = Counter()
    order = {}
    for path, source in sources.items():
        for mutant in mutants_of(path, source):
            lines = mutant.lines_of(source)
            text = repr((seed, path, *lines))
            counts[text] += 1  # equal lines of a file
            order[hashlib.sha256(f"{text}{counts[text]}".encode()).digest()] = (path, *lines, counts[text]), mutant
    return dict(order[digest] for digest in sorted(order))


def judge(
    drawn: dict[tuple[str, str, str, int], Mutant],
    sources: dict[str, str],
    tree: Path,
    reach: Reach,
    kept: Path,
    again: str,
) -> list[Result]:
    """Return the result of each mutant from `kept`, or try the mutant now and add its result to `kept`."""
    lines, seconds, found = reach.by_line(), reach.seconds, {}
    for row in kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []:
        result = Result(**json.loads(row))
        found[result.key] = result
    for number, (key, mutant) in enumerate(drawn.items()):
        verdict, old = known().get(key[:3], ""), found.get(key)
        if old and not old.outcome.startswith(again) and not is_void(old, verdict, seconds):
            found[key] = replace(old, line=mutant.lines[0])
            continue
        result = tried(key, mutant, sources[mutant.path], verdict, tree, lines, seconds)
        found[key] = result
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        place = f"{number} {mutant.path}:{mutant.lines[0]}"
        print(f"{place} {result.outcome} {result.by}\n    {result.was}\n    {result.becomes}", flush=True)
    return [found[key] for key in drawn]


def control(results: Sequence[Result], tree: Path, seconds: dict[str, float]) -> list[str]:
    """Return the tests that noticed mutants but also fail alone on the unchanged product."""
    tests = sorted({result.by for result in results if result.by in seconds})
    failed = run(None, tree, tests, seconds) if tests else []
    if not set(failed) <= seconds.keys():
        raise SystemExit(
            f"the tests that noticed mutants did not end on the product as it is: {failed[0] or 'no report'}"
        )
    return failed


def is_void(old: Result, verdict: str, seconds: dict[str, float]) -> bool:
    """Return True if a result no longer holds: its verdict changed, or its test is not quick any more."""
    if old.outcome == "killed":
        return verdict.startswith("equivalent") or (bool(old.by) and old.by != "time-out" and old.by not in seconds)
    return old.outcome != verdict if verdict else not old.outcome.startswith("survived")


def tried(
    key: tuple[str, str, str, int],
    mutant: Mutant,
    source: str,
    verdict: str,
    tree: Path,
    lines: dict[str, dict[int, list[str]]],
    seconds: dict[str, float],
) -> Result:
    """Try one mutant."""
    tests = tests_of(mutant, lines, seconds)
    if verdict.startswith("slow: "):
        tests = [verdict.removeprefix("slow: ")]
    result = Result(*key, mutant.lines[0], verdict, tests=tuple(tests[:6]))
    if verdict.startswith("equivalent: "):
        return result
    text = source[: mutant.start] + mutant.text + source[mutant.stop :]
    failed = run((mutant.path, text), tree, tests, seconds) if tests else []
    if failed:
        return replace(result, outcome=verdict if verdict.startswith("slow") else "killed", by=failed[0])
    reason = verdict if verdict.startswith("survived") else f"survived: {len(tests)} tests reach it"
    return replace(result, outcome=reason)


def copy_tree(tree: Path) -> None:
    """Copy what git tracks or would track."""
    listed = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


OUTCOMES = {
    "killed": "a quick test fails",
    "slow": "a slow test fails",
    "equivalent": "nothing that a user sees changes",
    "survived": "no test fails",
}


def table(summary: str, results: Sequence[Result]) -> str:
    """docs/mutants.md."""
    lines = [
        "# Mutants",
        "",
        "Made by `make mutants`, not by hand (`tests/tools/mutants.py` says how).",
        "",
        f"{summary}.",
        "",
    ]
    lines += [f"| file | drawn | {' | '.join(OUTCOMES)} |", "|---|---|" + "---|" * len(OUTCOMES)]
    for path in sorted({result.path for result in results}):
        counts = Counter(result.outcome.partition(":")[0] for result in results if result.path == path)
        lines.append(f"| {path} | {counts.total()} | {' | '.join(str(counts[outcome]) for outcome in OUTCOMES)} |")
    for outcome, meaning in list(OUTCOMES.items())[1:]:
        of = [result for result in results if result.outcome.startswith(outcome)]
        lines += ["", f"## {outcome.capitalize()}: {meaning}", *([] if of else ["", "None."])]
        for result in sorted(of, key=lambda result: (result.path, result.line)):
            reason = result.outcome.partition(": ")[2]
            lines += ["", f"`{result.path}`, line {result.line}: {f'`{reason}`' if outcome == 'slow' else reason}", ""]
            lines += ["```diff", f"- {result.was}", f"+ {result.becomes}", "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
