"""Lines of the product that each quick test reaches, measured once by coverage and kept in a file.

A test file is measured again if it or a source file that its tests reach has changed. Failing tests are skipped:
they prove nothing about a mutant.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

NOT_TRACED = (
    "tests/grpo_rewards/test_symbolic.py::test_a_long_request_survives_a_signal_whose_handler_returns",
    "tests/grpo_rewards/test_symbolic.py::test_verdicts_are_those_of_an_undisturbed_run",
)
"""Signals that come faster than a traced handler returns never let the main thread go on."""

AT_ONCE = 10
"""Files of tests that one process measures; what is found is written after each such lot."""


@dataclass
class Reach:
    """Measurements by test file: its hash, the hashes of the sources reached, and each test's seconds and lines."""

    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    """Modules that the tests import. A process that has imported them forks tests that start at once."""

    @classmethod
    def read(cls, path: Path) -> Reach:
        return cls(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else cls()

    def write(self, path: Path) -> None:
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"files": self.files, "modules": self.modules}), encoding="utf-8")
        part.replace(path)

    def stale(self, tree: Path, tests: Sequence[str]) -> list[str]:
        """Return the test files under `tests` that need measuring, and forget those that no longer exist."""
        paths = [tree / test for test in tests]
        found = {p for path in paths for p in ([path] if path.is_file() else path.rglob("test_*.py"))}
        self.files = {name: entry for name, entry in self.files.items() if (tree / name).exists()}
        return sorted(str(p.relative_to(tree)) for p in found if not self._is_fresh(tree, str(p.relative_to(tree))))

    def _is_fresh(self, tree: Path, name: str) -> bool:
        entry = self.files.get(name)
        hashes = {**entry["sources"], name: entry["hash"]} if entry else {name: ""}
        return all((tree / path).exists() and content_hash(tree / path) == known for path, known in hashes.items())

    @property
    def seconds(self) -> dict[str, float]:
        return {test: found["seconds"] for entry in self.files.values() for test, found in entry["tests"].items()}

    def forget(self, tests: Iterable[str]) -> None:
        for test in tests:
            del self.files[test.partition("::")[0]]["tests"][test]

    def by_line(self) -> dict[str, dict[int, list[str]]]:
        """By source file and line: the tests that reach it. Line 0 holds all tests that reach any line of the file."""
        lines: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        for entry in self.files.values():
            for test, found in entry["tests"].items():
                for path, numbers in found["lines"].items():
                    for number in (0, *numbers):
                        lines[path][number].append(test)
        return lines

    def import_modules(self) -> None:
        """Import what the tests import from elsewhere, as far as that can be done."""
        for name in self.modules:
            with suppress(ImportError, AttributeError, RuntimeError):
                importlib.import_module(name)


class _Recorder:
    """Pytest plugin that records which lines each test reaches, how long it takes, and which tests fail.

    Args:
        cover: coverage that has been started.
    """

    def __init__(self, cover: Any) -> None:
        self.cover = cover
        self.tracer = sys.gettrace()
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if sys.gettrace() is not self.tracer:  # a test before this one, or what it runs, has replaced it
            sys.settrace(self.tracer)
        self.cover.switch_context(item.nodeid)
        started = time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = time.perf_counter() - started
        self.cover.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self.failed.add(report.nodeid)


def measure(tree: Path, names: Sequence[str], sources: Iterable[str], found: Path) -> None:
    """Run the quick tests of these files under coverage in this process, and write a `Reach` to `found`."""
    from coverage import Coverage

    before = set(sys.modules)
    cover = Coverage(data_file=None, include=[str(tree / path) for path in sources], concurrency=["thread"])
    cover.start()
    recorder = _Recorder(cover)
    options = ["-q", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += [f"--deselect={test}" for test in NOT_TRACED]
    pytest.main([*options, *names], plugins=[recorder])
    cover.stop()
    data = cover.get_data()
    lines: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for file in sorted(data.measured_files()):
        for number, tests in sorted(data.contexts_by_lineno(file).items()):
            for test in filter(None, tests):
                lines[test][str(Path(file).relative_to(tree))].append(number)
    reach = Reach(modules=sorted(name for name in set(sys.modules) - before if _is_foreign(name)))
    for name in names:
        passed = [t for t in recorder.seconds if t.startswith(f"{name}::") and t not in recorder.failed]
        reached = {path for test in passed for path in lines.get(test, {})}
        reach.files[name] = {
            "hash": content_hash(tree / name),
            "sources": {path: content_hash(tree / path) for path in sorted(reached)},
            "tests": {t: {"seconds": round(recorder.seconds[t], 3), "lines": lines.get(t, {})} for t in passed},
        }
    reach.write(found)


def complete(
    path: Path, tree: Path, tests: Sequence[str], sources: Iterable[str], forked: Callable[[Any], int]
) -> Reach:
    """Return the measurements in `path`, completed by processes that `forked` runs."""
    reach, part = Reach.read(path), tree.parent / "part.json"
    stale = reach.stale(tree, tests)
    for start in range(0, len(stale), AT_ONCE):
        lot = stale[start : start + AT_ONCE]
        forked(partial(measure, tree, lot, sources, part))
        more = Reach.read(part)
        part.unlink(missing_ok=True)
        reach.files.update(more.files)
        reach.modules = sorted({*reach.modules, *more.modules})
        reach.write(path)
        print(f"measured {min(start + AT_ONCE, len(stale))} of {len(stale)} files of tests", flush=True)
    return reach


def _is_foreign(name: str) -> bool:
    module = sys.modules[name]
    return name.partition(".")[0] not in ("tests", "grpo_recipes", "grpo_rewards") and bool(
        getattr(getattr(module, "__spec__", None), "origin", None)
    )


def content_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
