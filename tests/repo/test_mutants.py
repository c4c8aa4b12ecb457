"""The mutants that `make mutants` draws from, and what is known of survivors."""

from __future__ import annotations

from pathlib import Path

from tests.tools import mutants
from tests.tools.mutations import mutants_of
from tests.tools.reach import Reach, content_hash

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


def test_a_mutant_runs_against_the_tests_that_reach_its_statement() -> None:
    (mutant,) = mutants_of("file.py", "LIMIT = 1\n")
    seconds = {"costly": 100.0, "case[1]": 0.3, "case[2]": 0.4, "other": 5.0, "cheap[1]": 0.01, "cheap[2]": 0.02}
    tests = list(seconds)
    chosen = ["cheap[1]", "cheap[2]", "case[1]", "other", "case[2]"]  # a second case after the first of each
    assert mutants.tests_of(mutant, {"file.py": {0: tests, 1: tests}}, seconds) == chosen
    assert mutants.tests_of(mutant, {"file.py": {0: ["other"], 1: []}}, seconds) == ["other"]  # at import
    assert mutants.tests_of(mutant, {}, seconds) == []


def test_a_draw_does_not_depend_on_other_files_and_tells_equal_lines_apart() -> None:
    drawn = mutants.draw({"file.py": SOURCE, "other.py": "x = 1\nx = 1\n"}, 0)
    alone = mutants.draw({"file.py": SOURCE}, 0)
    assert [key for key in drawn if key[0] == "file.py"] == list(alone)
    assert {key for key in drawn if key[0] == "other.py"} == {("other.py", "x = 1", "x = 2", n) for n in (1, 2)}
    assert list(mutants.draw({"file.py": SOURCE}, 1)) != list(alone)


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


def test_what_is_known_of_survivors_is_of_the_source_as_it_is() -> None:
    paths = {path for path, _, _ in mutants.known()}
    assert paths <= {str(path.relative_to(mutants.ROOT)) for t in mutants.TARGETS for path in mutants.ROOT.glob(t)}
    real = set()
    for path in paths:
        source = (mutants.ROOT / path).read_text(encoding="utf-8")
        real |= {(path, *mutant.lines_of(source)) for mutant in mutants_of(path, source)}
    assert not mutants.known().keys() - real
    assert all(verdict.startswith(("equivalent: ", "slow: ", "survived: ")) for verdict in mutants.known().values())
