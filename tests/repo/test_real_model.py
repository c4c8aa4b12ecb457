"""benchmarks/real_model.py with a tiny model: its problems, its choice of tasks and its table."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from types import ModuleType

import pandas
import pytest

from grpo_recipes.generation.groups import Turn
from tests.support import tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def real_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import real_model

    return real_model


def solved(text: str) -> int:
    """Compute the answer of a problem from its words."""
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    if "is the largest" in text:
        return max(numbers)
    if "Which number is second" in text:
        return sorted(numbers)[1]
    if "How many days" in text:
        first, second = (date(2026, int(m), int(d)) for m, d in re.findall(r"(\d+)/(\d+)", months(text)))
        return (second - first).days
    return int(eval(re.fullmatch(r"What is ([-+*\d ]+)\?", text)[1]))  # digits and signs alone


def months(text: str) -> str:
    """Convert a date in words to month/day."""
    names = ["January", "March", "May", "July", "August", "October", "December"]
    for name, number in zip(names, (1, 3, 5, 7, 8, 10, 12), strict=True):
        text = re.sub(rf"{name} (\d+)", rf"{number}/\1", text)
    return text


def test_problems_have_their_answers_and_held_out_ones_are_not_trained_on(real_model: ModuleType) -> None:
    families = list(real_model.FAMILIES)
    held_out = real_model.problems(families, 400, seed=1)
    known = frozenset(row["question"] for row in held_out)
    trained = real_model.problems(families, 400, seed=2, without=known)
    assert not known & {row["question"] for row in trained}
    for row in [*held_out, *trained]:
        *shots, (last,) = [part.split("\nA: ") for part in row["question"].strip().split("\n\n")]
        assert len(shots) == 3
        for text, answer in [*shots, (last, row["answer"])]:
            assert solved(text.removeprefix("Q: ")) == int(answer), text
    assert real_model.problems(families, 400, seed=1) == held_out


@pytest.mark.slow
def test_two_trainers_on_a_tiny_model(real_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page has the figures of the files."""
    tiny.policy(vocab_size=258, max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "model")
    for name, value in {"PROBED": 4, "TRAINED": 32, "HELD_OUT": 6, "TRANSFERRED": 3, "LOW": 0.0, "AIM": 0.0}.items():
        monkeypatch.setattr(real_model, name, value)
    monkeypatch.setattr(real_model, "RESULTS", tmp_path / "page.md")
    # In this process: another one would have the module's own sizes.
    monkeypatch.setattr(real_model, "start", real_model.run)
    monkeypatch.setattr(real_model, "ThreadPoolExecutor", OneAfterTheOther)
    run = ["--steps", "2", "--runs", "full-trl-0", "full-ours-0"]
    for options in (run, ["--record"]):
        monkeypatch.setattr("sys.argv", ["real_model.py", "--output", str(tmp_path), *options])
        assert real_model.main() == 0
    rows = (tmp_path / "page.md").read_text().split("intervals\n\n")[1].splitlines()[2:5]
    before, ours, theirs = [row.split(" | ") for row in rows]
    assert [ours[0], theirs[0]] == ["| full-ours-0", "| full-trl-0"]
    strict = {
        name: pandas.read_parquet(tmp_path / "evaluated" / name / "completions.parquet")["strict"]
        for name in ("base", "full-ours-0")
    }
    assert float(before[1].split()[0]) == pytest.approx(strict["base"].mean(), abs=1e-3)
    gain = strict["full-ours-0"].mean() - strict["base"].mean()
    assert float(ours[3].split()[0]) == pytest.approx(gain, abs=1e-3)
    questions = [
        {json.loads(line)["question"].split("?")[0] for line in (tmp_path / f"{name}.jsonl").open()}
        for name in ("transfer", "train")
    ]
    assert not questions[0] & questions[1]


class OneAfterTheOther:
    """A pool of threads that runs each call in the calling thread."""

    def __init__(self, **ignored: object) -> None: ...

    def __enter__(self) -> OneAfterTheOther:
        return self

    def __exit__(self, *ignored: object) -> None: ...

    map = staticmethod(map)


@pytest.mark.slow
def test_coupled_trainers_sample_the_same_completions(
    real_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import real_model_coupled

    tiny.policy(vocab_size=258, max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "model")
    real_model.write_rows(tmp_path / "train.jsonl", real_model.problems(["largest of five"], 64, seed=2))
    real_model.write_rows(tmp_path / "test.jsonl", real_model.problems(["largest of five"], 8, seed=1))
    recipe = real_model.RECIPE.format(folder=tmp_path, steps=2)
    # This model solves nothing, so that no group would have a gradient.
    recipe = re.sub(r"rewards:\n.*", f"rewards: [{{name: '{tmp_path}/letters.py:letters'}}]", recipe)
    (tmp_path / "recipe.yaml").write_text(recipe)
    (tmp_path / "letters.py").write_text(LETTERS)
    monkeypatch.setattr(Turn, "same_stream", False)
    for trainer in real_model_coupled.TRAINERS:
        real_model_coupled.run(tmp_path, f"coupled-{trainer}-0", 2)
    rows = [row.split(" | ") for row in real_model_coupled.table(tmp_path, 0).splitlines()[2:]]
    assert [row[1] for row in rows] == ["64 of 64", "64 of 64"]
    assert all(row[2] == row[3] for row in rows)
    assert all(float(row[4]) == pytest.approx(float(row[5]), rel=1e-3) and float(row[4]) > 0 for row in rows)
    assert float(rows[1][6]) < 2


LETTERS = """
def letters(completions, **columns):
    return [float(sum(map(ord, completion)) % 7) for completion in completions]
"""
