"""The mutants that `make mutants` draws from, and what is known of survivors."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tools import mutants, reach
from tests.tools.mutations import mutants_of
from tests.tools.reach import Reach, content_hash

PRODUCT = ("grpo_recipes", "rewards/grpo_rewards")
SOURCE = '''def é(x, *, low=0):
    """A docstring."""
    if x < 1 and x not in {2, 3}:
        raise ValueError(f"{x + 1} is wrong")
    return max(
        x,
        int(low) + 1,
    )
'''


def test_each_mutant_is_one_change_that_still_compiles() -> None:
    found = mutants_of("file.py", SOURCE)
    texts = [SOURCE[: mutant.start] + mutant.text + SOURCE[mutant.stop :] for mutant in found]
    for text in texts:
        compile(text, "file.py", "exec")
    assert len({*texts, SOURCE}) == len(texts) + 1
    lines = dict(mutant.lines_of(SOURCE)[::-1] for mutant in found)
    assert {
        "if (x <= 1) and x not in {2, 3}:",
        "if (x < 1 or x not in {2, 3}):",
        "if x < 1 and (x in {2, 3}):",
    } <= lines.keys()
    assert {"return (min(x, int(low) + 1))", "(round(low)) + 1,", "def é(x, *, low=1):", "pass"} <= lines.keys()
    assert not any("wrong" in line or "docstring" in line for line in lines)
    inner = next(mutant for mutant in found if mutant.text == "(round(low))")
    assert inner.lines == (5, 8)  # a test that reaches any line of the statement may notice


@pytest.mark.parametrize(
    ("source", "becomes"),
    [
        ("y = x is None", "y = (not x)"),
        ("y = x is not None", "y = (x)"),
        ("y = isinstance(x, (Apple, Pear))", "y = isinstance(x, ((Apple,)))"),
        ("y = [x for x in xs if x.ok]", "y = ([x for x in xs])"),
        ("y = {x: 1 for x in xs if x.ok if x}", "y = ({x: 1 for x in xs if x.ok})"),
        ("y = xs[0]", "y = (xs[-1])"),
        ("y = len(set(xs))", "y = len((list(xs)))"),
        ("y = sqrt(x)", "y = (x)"),
        ("y = pair(before, after)", "y = (pair(after, before))"),
        ("x = x.strip()", "pass"),
    ],
)
def test_plausible_wrong_refactorings_are_among_the_mutants(source: str, becomes: str) -> None:
    text = source + "\n"
    assert (source, becomes) in {mutant.lines_of(text) for mutant in mutants_of("file.py", text)}


def test_types_are_not_changed() -> None:
    assert mutants_of("file.py", 'Kind = Literal["text", "call"]\nx: Callable[[int], bool]\n') == []


@pytest.mark.parametrize("source", ["min(a, b)", "isinstance(a, b)", "f(a, 'text')", "f(A.x, b)", "f(a, a)"])
def test_arguments_are_not_swapped_where_nothing_or_everything_breaks(source: str) -> None:
    first, second = source.partition("(")[2][:-1].split(", ")
    assert not any(f"{second}, {first}" in mutant.text for mutant in mutants_of("file.py", source))


def test_a_mutant_runs_against_the_tests_that_reach_its_statement() -> None:
    (mutant,) = mutants_of("file.py", "LIMIT = 1\n")
    seconds = {"costly": 100.0, "case[1]": 0.3, "case[2]": 0.4, "other": 5.0, "cheap[1]": 0.01, "cheap[2]": 0.02}
    tests = list(seconds)
    chosen = ["cheap[1]", "cheap[2]", "case[1]", "other", "case[2]"]  # a second case after the first of each
    assert mutants.tests_of(mutant, {"file.py": {0: tests, 1: tests}}, seconds) == chosen
    assert mutants.tests_of(mutant, {"file.py": {0: ["other"], 1: []}}, seconds) == ["other"]  # at import
    assert mutants.tests_of(mutant, {}, seconds) == []


@pytest.mark.parametrize(
    ("source", "at_import"),
    [("LIMIT = 1\n", True), ("class A:\n    limit: int = 1\n", True), ("def f(a=1):\n    return a\n", True),
     ("def f():\n    return 1\n", False), ("class A:\n    def f(self):\n        return 1\n", False)],
)  # fmt: skip
def test_a_statement_that_runs_on_import_is_reached_by_all_tests_of_the_file(source: str, at_import: bool) -> None:
    """The test in which a file happens to be imported need not use what the statement sets."""
    line = next(n for n, text in enumerate(source.splitlines(), start=1) if "1" in text)
    mutant = next(mutant for mutant in mutants_of("a.py", source) if mutant.lines[0] == line)
    reached = {"a.py": {0: ["importing", "using"], line: ["importing"]}}
    chosen = mutants.tests_of(mutant, reached, {"importing": 0.1, "using": 0.2})
    assert chosen == (["importing", "using"] if at_import else ["importing"])


def test_a_constant_is_also_left_to_the_tests_in_the_file_of_the_same_name() -> None:
    (mutant,) = mutants_of("rewards/pack/file.py", "LIMIT = 1\n")
    seconds = {"other": 1.0, "tests/pack/test_file.py::test_limit": 2.0, "tests/pack/test_files.py::test_limit": 2.0}
    reached = {"rewards/pack/file.py": {0: ["other"], 1: ["other"]}}
    assert mutants.tests_of(mutant, reached, seconds) == ["other", "tests/pack/test_file.py::test_limit"]


def test_a_file_that_runs_in_other_processes_is_left_to_the_tests_of_its_folder() -> None:
    (mutant,) = mutants_of("pack/child.py", "LIMIT = 1\n")
    seconds = {"near": 1.0, "far": 1.0}
    assert mutants.tests_of(mutant, {"pack/a.py": {0: ["near"]}, "b.py": {0: ["far"]}}, seconds) == ["near"]


def test_a_draw_does_not_depend_on_other_files_and_tells_equal_lines_apart() -> None:
    one, other, far = "grpo_recipes/runs/one.py", "grpo_recipes/runs/other.py", "rewards/grpo_rewards/far.py"
    drawn = mutants.draw({one: SOURCE, other: "x = 1\nx = 1\n", far: SOURCE}, 0)
    alone = mutants.draw({one: SOURCE}, 0)
    assert [key for key in drawn if key[0] == one] == list(alone)
    assert {key for key in drawn if key[0] == other} == {(other, "x = 1", "x = 2", n) for n in (1, 2)}
    assert list(mutants.draw({one: SOURCE}, 1)) != list(alone)


def test_every_file_of_the_product_is_drawn_from_and_belongs_to_one_wing() -> None:
    product = {str(path.relative_to(mutants.ROOT)) for name in PRODUCT for path in (mutants.ROOT / name).rglob("*.py")}
    assert product == {str(path.relative_to(mutants.ROOT)) for t in mutants.TARGETS for path in mutants.ROOT.glob(t)}
    assert {mutants.wing_of(path) for path in product} == mutants.WINGS.keys()
    folders = [folder for folders in mutants.WINGS.values() for folder in folders]
    assert len(folders) == len(set(folders))
    assert mutants.wing_of("rewards/grpo_rewards/math/answers.py") == "rewards"
    assert mutants.wing_of("grpo_recipes/data/load.py") == mutants.wing_of("grpo_recipes/recipe/recipe.py")
    assert mutants.wing_of("grpo_recipes/cli.py") != mutants.wing_of("grpo_recipes/plan/plan.py")
    with pytest.raises(KeyError, match="benchmarks"):
        mutants.wing_of("benchmarks/step.py")


def test_the_first_of_a_draw_hold_equally_many_of_each_wing() -> None:
    folders = [folders[0] for folders in mutants.WINGS.values()]
    sources = {f"{folder}/file.py": SOURCE * (number + 1) for number, folder in enumerate(folders)}
    drawn = list(mutants.draw(sources, 3))
    for count in (1, 3):
        first = Counter(mutants.wing_of(path) for path, *_ in drawn[: count * len(folders)])
        assert first == dict.fromkeys(mutants.WINGS, count)
    assert len(drawn) == len(set(drawn)) == sum(len(mutants_of("file.py", source)) for source in sources.values())


def test_a_new_seed_is_kept_for_a_run_that_goes_on(tmp_path: Path) -> None:
    seed = mutants.new_seed(tmp_path / "results.seed")
    assert mutants.new_seed(tmp_path / "results.seed") == seed
    assert len({mutants.new_seed(tmp_path / f"{n}.seed") for n in range(5)}) > 1


def results_of(wing: str, **counts: int) -> list[mutants.Result]:
    path = f"{mutants.WINGS[wing][0]}/file.py"
    return [
        mutants.Result(path, f"x = {n}", "x = 0", 1, n, f"{outcome}: because")
        for outcome, count in counts.items()
        for n in range(count)
    ]


def test_a_draw_fails_on_the_share_of_any_wing_and_of_all() -> None:
    runs = results_of("runs", killed=15, slow=2, equivalent=5, survived=3)  # 17 of 20: 85 %
    plan = results_of("plan", killed=30)
    assert mutants.share(runs) == 0.85
    assert mutants.too_low(runs + plan) == []
    assert mutants.too_low(runs) == ["all"]
    assert mutants.too_low(results_of("runs", killed=16, survived=3) + plan) == []  # 19 are too few to judge
    assert mutants.too_low(results_of("runs", killed=16, survived=4) + 9 * plan) == ["runs"]


def test_the_table_names_wings_seed_and_survivors() -> None:
    results = results_of("runs", killed=15, slow=2, equivalent=5, survived=3) + results_of("plan", killed=30)
    text = mutants.table(results, 900, 47, is_new=True)
    assert "| runs | 25 | 15 | 2 | 5 | 3 | 85.0 % |" in text
    assert "| all | 55 | 45 | 2 | 5 | 3 | 94.0 % |" in text
    assert "| tools | 0 | 0 | 0 | 0 | 0 | none drawn |" in text
    assert "55 of 900 mutants, drawn by seed 47. The seed was drawn after the tests were written" in text
    assert text.count("`grpo_recipes/runs/file.py`, line ") == 10
    assert "tests may have been written for these" in mutants.table(results, 900, 47, is_new=False)


def test_a_test_that_ends_the_tracing_hides_no_lines_of_those_behind_it() -> None:
    previous, contexts = sys.gettrace(), []
    sys.settrace(lambda *_: None)
    try:
        tracer = sys.gettrace()
        recorder = reach._Recorder(SimpleNamespace(switch_context=contexts.append))
        for name in ("first", "second"):
            measured = recorder.pytest_runtest_protocol(SimpleNamespace(nodeid=name))
            next(measured)
            found = sys.gettrace()
            sys.settrace(None)  # as the test does
            with pytest.raises(StopIteration):
                next(measured)
            assert found is tracer, name
    finally:
        sys.settrace(previous)
    assert contexts == ["first", "", "second", ""]
    assert list(recorder.seconds) == ["first", "second"]


def test_tests_are_measured_anew_where_they_or_the_source_they_reach_changed(tmp_path: Path) -> None:
    for name in ("product.py", "other.py", "test_one.py", "test_two.py", "test_new.py"):
        (tmp_path / name).write_text("1")
    known = Reach()
    for name, source in (("test_one.py", "product.py"), ("test_two.py", "other.py"), ("test_gone.py", "other.py")):
        hashes = {"hash": content_hash(tmp_path / "other.py"), "sources": {source: content_hash(tmp_path / source)}}
        known.files[name] = {**hashes, "tests": {f"{name}::test": {"seconds": 1.0, "lines": {source: [3]}}}}
    assert known.stale(tmp_path, ["."]) == ["test_new.py"]
    assert known.by_line() == {
        "product.py": {0: ["test_one.py::test"], 3: ["test_one.py::test"]},
        "other.py": {0: ["test_two.py::test"], 3: ["test_two.py::test"]},
    }
    (tmp_path / "product.py").write_text("2")
    assert known.stale(tmp_path, ["."]) == ["test_new.py", "test_one.py"]


def test_a_result_holds_while_its_test_is_quick_and_its_verdict_the_same() -> None:
    killed = mutants.Result("file.py", "x = 1", "x = 2", 1, 1, "killed", by="test")
    assert not mutants.is_void(killed, "", {"test": 1.0})
    assert mutants.is_void(killed, "", {})
    survived = mutants.Result("file.py", "x = 1", "x = 2", 1, 1, "survived: 3 tests reach it")
    assert not mutants.is_void(survived, "", {})
    assert mutants.is_void(survived, "equivalent: x is not read", {})


@pytest.mark.slow
def test_what_is_known_of_survivors_is_of_the_source_as_it_is() -> None:
    paths = {path for path, _, _ in mutants.known()}
    assert paths <= {str(path.relative_to(mutants.ROOT)) for t in mutants.TARGETS for path in mutants.ROOT.glob(t)}
    real = set()
    for path in paths:
        source = (mutants.ROOT / path).read_text(encoding="utf-8")
        real |= {(path, *mutant.lines_of(source)) for mutant in mutants_of(path, source)}
    assert not mutants.known().keys() - real
    assert all(verdict.startswith(("equivalent: ", "slow: ", "survived: ")) for verdict in mutants.known().values())


def spin() -> int:
    while True:
        pass


@pytest.mark.slow
def test_a_fork_is_ended_by_its_cpu_time_or_by_waiting_and_not_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "LOOK", 0.02)
    log = tmp_path / "log"
    assert mutants.forked(lambda: 3, 1, log) == 3
    assert mutants.forked(lambda: time.sleep(0.5), 0.1, log) == 0
    assert mutants.forked(spin, 0.2, log) == mutants.TIME_OUT
    monkeypatch.setattr(mutants, "IDLE", 0.3)
    assert mutants.forked(lambda: time.sleep(60), 100, log) == mutants.TIME_OUT
