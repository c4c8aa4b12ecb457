"""Mutants: single changes of the product that its quick tests should notice.

    make mutants                                                # 300 drawn by a new seed; writes docs/mutants.md
    python -m tests.tools.mutants --seed 7 --count 40           # the first 40 that seed 7 draws
    python -m tests.tools.mutants --coverage /tmp/reach.json --results /tmp/mutants.jsonl    # goes on where it was cut
    python -m tests.tools.mutants --coverage ... --results ... --again survived              # after new tests

The product is divided into wings (`WINGS`). Any number of mutants holds equally many of each wing, because a bug of a
small wing misleads a user as much as a bug of a large one. A rate says something about the tests only if no test was
written for the mutants drawn: without `--seed` the seed is new, and the table says so.

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
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tools.mutations import Mutant, mutants_of
from tests.tools.reach import Reach, complete

ROOT = Path(__file__).resolve().parents[2]
KNOWN = ROOT / "tests" / "tools" / "mutants.txt"
TARGETS = ("grpo_recipes/**/*.py", "rewards/grpo_rewards/**/*.py")
WINGS = {
    "training": ("grpo_recipes/training",),
    "generation": ("grpo_recipes/generation",),
    "tools": ("grpo_recipes/tools",),
    "rewards": ("rewards/grpo_rewards",),
    "recipe and data": ("grpo_recipes/recipe", "grpo_recipes/data"),
    "checks": ("grpo_recipes/checks",),
    "plan": ("grpo_recipes/plan",),
    "evaluation": ("grpo_recipes/evaluation",),
    "reports": ("grpo_recipes/reports",),
    "runs": ("grpo_recipes/runs",),
    "processes and commands": ("grpo_recipes/process", "grpo_recipes"),
}
"""Folders of each wing. A file belongs to the wing of the innermost of these folders that holds it."""

EACH_WING, OVERALL = 0.85, 0.9
"""Lowest shares of killed mutants, of one wing and of all."""

ENOUGH = 20
"""Mutants of a wing from which its share is judged. One survivor of five says little."""

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

LOOK = 1.0
"""Seconds of wall time between two looks at the CPU time of a fork."""

IDLE = 120.0
"""Seconds of wall time without progress after which processes are taken to wait for ever."""

TIME_OUT = -1000
"""Exit code of a fork that was ended. No signal has this number."""

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
    """Pytest plugin that runs the tests of a list in its order, and writes the names of those that fail.

    Each test has a limit in CPU time, after which SIGPROF ends the process: a busy machine ends no test. Limits in wall
    time are off. `forked` ends a test that waits for ever.
    """

    def __init__(self, tests: Sequence[str], seconds: dict[str, float], failed: Path) -> None:
        self.order = {test: place for place, test in enumerate(tests)}
        self.seconds, self.failed = seconds, failed

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda item: self.order[item.nodeid])
        for item in items:
            item.add_marker(pytest.mark.timeout(0), append=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        signal.setitimer(signal.ITIMER_PROF, 10 + 3 * self.seconds.get(item.nodeid, 60.0))
        result = yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        return result

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
    """Run `work()` in a fork with its output in `log`.

    Returns:
        Exit code of the fork, or `TIME_OUT` if it was ended: its processes took more than `seconds` of CPU time, or
        nearly none for `IDLE` seconds.
    """
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
    looked = progressed = time.monotonic()
    used = before = 0.0
    done, status = 0, 0
    while not done and used <= seconds and time.monotonic() < progressed + IDLE:
        time.sleep(0.02)
        done, status = os.waitpid(child, os.WNOHANG)
        if not done and time.monotonic() > looked + LOOK:
            looked, used = time.monotonic(), max(used, cpu_seconds(child))
            if used > before + 0.1:
                progressed, before = looked, used
    with suppress(ProcessLookupError):  # processes of a test may outlive it
        os.killpg(child, signal.SIGKILL)
    if not done:
        os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) if done else TIME_OUT


def cpu_seconds(process: int) -> float:
    """Return the CPU time of a process and its descendants, as far as they exist or were waited for."""
    total = 0.0
    with suppress(psutil.NoSuchProcess):
        for one in (parent := psutil.Process(process), *parent.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += sum(one.cpu_times()[:4])  # its own and its children's, in user and system mode
    return total


def tests_of(mutant: Mutant, lines: dict[str, dict[int, list[str]]], seconds: dict[str, float]) -> list[str]:
    """Return the tests that reach a mutant's statement: the cheap ones, then the first case of each other function.

    Those of its file, where none does, or where the statement runs on import: what it sets is used by tests other than
    the one in which the file happened to be imported. A test in the file of the same name may read a constant and reach
    no line. Those of its folder, where none reaches the file.
    """
    path = Path(mutant.path.removeprefix("rewards/"))
    reached = lines.get(mutant.path) or _of_folder(str(Path(mutant.path).parent), lines)
    if mutant.on_import:
        own = f"tests/{path.parent}/test_{path.stem}.py::"
        found = {*reached.get(0, []), *(test for test in seconds if test.startswith(own))}
    else:
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


def _of_folder(folder: str, lines: dict[str, dict[int, list[str]]]) -> dict[int, list[str]]:
    return {
        0: sorted({test for path, reached in lines.items() if Path(path).parent == Path(folder) for test in reached[0]})
    }


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

    limit = 60 + 3 * sum(seconds.get(test, 60.0) for test in tests)
    if change is None:
        code = forked(work, limit, tree.parent / "mutant.log")
    else:
        with changed(tree / change[0], change[1]):
            code = forked(work, limit, tree.parent / "mutant.log")
    none: list[str] = []
    ended = {0: none, NOT_FOUND: none, TIME_OUT: ["time-out"], -signal.SIGPROF: ["time-out"]}
    return failed.read_text().split("\n")[:-1] or ended.get(code, [""])


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
    """Draw mutants, run each, print a line each, and write the table if asked to; 1 if too few are killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, help="seed of the draw; a new one by default, kept beside --results")
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
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree, kept = Path(folder, "tree"), asked.results or Path(folder, "results.jsonl")
        seed = asked.seed if asked.seed is not None else new_seed(kept.with_suffix(".seed"))
        every = draw(sources, seed)
        drawn = dict(list(every.items())[: asked.count])
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
    text = table(results, len(every), seed, is_new=asked.seed is None and asked.again == "none")
    print(text)
    if asked.record:
        asked.record.write_text(text, encoding="utf-8")
    return int(bool(too_low(results)))


def new_seed(kept: Path) -> int:
    """Return the seed in the file `kept`, where a run that was cut left it, or write one there that no run has used."""
    if not kept.exists():
        kept.write_text(str(secrets.randbelow(1_000_000)), encoding="utf-8")
    return int(kept.read_text(encoding="utf-8"))


def wing_of(path: str) -> str:
    """Return the wing of a file of the product.

    Raises:
        KeyError: If no folder of `WINGS` holds the file.
    """
    wings = {folder: wing for wing, folders in WINGS.items() for folder in folders}
    parent = next((str(parent) for parent in Path(path).parents if str(parent) in wings), path)
    return wings[parent]


def draw(sources: dict[str, str], seed: int) -> dict[tuple[str, str, str, int], Mutant]:
    """Return all mutants by key, in an order in which the first N hold equally many of each wing.

    The seed alone orders the mutants of a wing. A change of the product elsewhere moves none of them.
    """
    counts: Counter[str] = Counter()
    wings: dict[str, dict[bytes, tuple[tuple[str, str, str, int], Mutant]]] = defaultdict(dict)
    for path, source in sources.items():
        for mutant in mutants_of(path, source):
            lines = mutant.lines_of(source)
            text = repr((seed, path, *lines))
            counts[text] += 1  # equal lines of a file
            digest = hashlib.sha256(f"{text}{counts[text]}".encode()).digest()
            wings[wing_of(path)][digest] = (path, *lines, counts[text]), mutant
    placed = []
    for number, wing in enumerate(WINGS):
        placed += [(place, number, wings[wing][digest]) for place, digest in enumerate(sorted(wings[wing]))]
    return dict(drawn for _, _, drawn in sorted(placed, key=lambda entry: entry[:2]))


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


def table(results: Sequence[Result], total: int, seed: int, is_new: bool) -> str:
    """Return the text of docs/mutants.md."""
    lines = [
        "# Mutants",
        "",
        "Made by `make mutants`, not by hand (`tests/tools/mutants.py` says how). A mutant is one changed line of the",
        "product. It is killed if a quick test fails. All product code is drawn from, equally often in each wing.",
        "",
        f"{len(results)} of {total} mutants, drawn by seed {seed}. "
        + (
            "The seed was drawn after the tests were written: no test was written for these mutants."
            if is_new
            else "The seed was given: tests may have been written for these mutants."
        ),
        f"`python -m tests.tools.mutants --seed {seed} --count {len(results)}` draws them again.",
        "",
        f"| wing | drawn | {' | '.join(OUTCOMES)} | killed or slow, of those not equivalent |",
        "|---|---|" + "---|" * (len(OUTCOMES) + 1),
    ]
    for wing, some in by_wing(results).items():
        counts = outcomes(some)
        rate = f"{100 * share(some):.1f} %" if some else "none drawn"
        cells = [wing, counts.total(), *(counts[outcome] for outcome in OUTCOMES), rate]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    low = too_low(results)
    lines += ["", f"Asked for are {EACH_WING:.0%} in each wing and {OVERALL:.0%} in all. "]
    lines[-1] += f"Too low: {', '.join(low)}." if low else "No share is lower."
    for outcome, meaning in list(OUTCOMES.items())[1:]:
        of = [result for result in results if result.outcome.startswith(outcome)]
        lines += ["", f"## {outcome.capitalize()}: {meaning}", *([] if of else ["", "None."])]
        for result in sorted(of, key=lambda result: (result.path, result.line)):
            reason = result.outcome.partition(": ")[2]
            lines += ["", f"`{result.path}`, line {result.line}: {f'`{reason}`' if outcome == 'slow' else reason}", ""]
            lines += ["```diff", f"- {result.was}", f"+ {result.becomes}", "```"]
    return "\n".join(lines) + "\n"


def outcomes(results: Sequence[Result]) -> Counter[str]:
    return Counter(result.outcome.partition(":")[0] for result in results)


def share(results: Sequence[Result]) -> float:
    """Return the share of mutants that a test notices, equivalent ones aside; 1 if there is none."""
    counts = outcomes(results)
    judged = counts.total() - counts["equivalent"]
    return (counts["killed"] + counts["slow"]) / judged if judged else 1.0


def by_wing(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the results of each wing, and then all."""
    wings = {wing: [result for result in results if wing_of(result.path) == wing] for wing in WINGS}
    return {**wings, "all": list(results)}


def too_low(results: Sequence[Result]) -> list[str]:
    """Return the wings of which too few mutants are killed, and "all" if too few are killed in all."""
    floors = {**dict.fromkeys(WINGS, EACH_WING), "all": OVERALL}
    return [wing for wing, some in by_wing(results).items() if len(some) >= ENOUGH and share(some) < floors[wing]]


if __name__ == "__main__":
    sys.exit(main())
