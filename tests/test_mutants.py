"""The mutants that `make mutants` draws from, and what is known of survivors."""

from __future__ import annotations

from tests import mutants
from tests.mutations import mutants_of

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
    seconds = {"slow": 100.0, "quick": 0.1, "other": 30.0}
    assert mutants.tests_of(mutant, {"file.py": {"0": ["slow", "quick"], "1": ["slow", "quick"]}}, seconds) == [
        "quick",
        "slow",
    ]
    assert mutants.tests_of(mutant, {"file.py": {"0": ["slow", "other"], "1": []}}, seconds) == ["other"]  # at import
    assert mutants.tests_of(mutant, {}, seconds) == []


def test_what_is_known_of_survivors_is_of_the_source_as_it_is() -> None:
    paths = {path for path, _, _ in mutants.known()}
    assert paths <= {str(path.relative_to(mutants.ROOT)) for t in mutants.TARGETS for path in mutants.ROOT.glob(t)}
    real = set()
    for path in paths:
        source = (mutants.ROOT / path).read_text(encoding="utf-8")
        real |= {(path, *mutant.lines_of(source)) for mutant in mutants_of(path, source)}
    assert not mutants.known().keys() - real
    assert all(verdict.startswith(("equivalent: ", "slow: ")) for verdict in mutants.known().values())
