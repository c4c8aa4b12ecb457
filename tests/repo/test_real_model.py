"""benchmarks/real_model.py with a tiny model: its problems, its choice of tasks and its table."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from types import ModuleType

import numpy
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
def test_two_trainers_on_a_tiny_model(
    real_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page has the figures of the files, and nothing runs twice."""
    tiny.policy(vocab_size=258, max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "model")
    for name, value in {"PROBED": 4, "TRAINED": 64, "HELD_OUT": 12, "TRANSFERRED": 6, "LOW": 0.0, "AIM": 0.0}.items():
        monkeypatch.setattr(real_model, name, value)
    monkeypatch.setattr(real_model, "RESULTS", tmp_path / "page.md")
    # In this process: another one would have the module's own sizes.
    monkeypatch.setattr(real_model, "start", real_model.run)
    monkeypatch.setattr(real_model, "ThreadPoolExecutor", OneAfterTheOther)
    runs = ["--output", str(tmp_path), "--steps", "2", "--runs"]
    for names in (["full-trl-0", "full-ours-0"], ["lora-ours-0"]):
        monkeypatch.setattr("sys.argv", ["real_model.py", *runs, *names])
        assert real_model.main() == 0
    monkeypatch.setattr("sys.argv", ["real_model.py", "--output", str(tmp_path), "--record"])
    assert real_model.main() == 0
    page = (tmp_path / "page.md").read_text()
    table, families, transfer = page.split("intervals\n\n")[1].split("Strict accuracy by family:")
    assert capsys.readouterr().out.strip().endswith(table.strip())
    named = ["| before", "| full-ours-0", "| full-trl-0", "| lora-ours-0"]
    for section in (families.partition("\n## ")[0], transfer.partition("| run | strict,")[0]):
        assert [row.split(" | ")[0] for row in section.strip().splitlines()[2:]] == named
    assert [row.split(" | ")[0] for row in transfer.strip().splitlines()[-3:]] == named[1:]
    chosen = json.loads((tmp_path / "tasks.json").read_text())
    assert len(chosen["chosen"]) == real_model.MOST_FAMILIES
    assert all(f"| {family} (trained on) |" in page for family in chosen["chosen"])
    before, *others = [row.split(" | ") for row in table.splitlines()[2:] if row.startswith("|")]
    assert [row[0] for row in others] == ["| full-ours-0", "| full-trl-0", "| lora-ours-0"]
    right = {
        name: pandas.read_parquet(folder / "completions.parquet")["strict"]
        for name in ("base", "full-ours-0")
        for folder in [tmp_path / "evaluated" / name]
    }
    assert float(before[1].split()[0]) == pytest.approx(sum(right["base"]) / 12, abs=1e-3)
    gain = (sum(right["full-ours-0"]) - sum(right["base"])) / 12
    assert float(others[0][3].split()[0]) == pytest.approx(gain, abs=1e-3)
    assert "full, seed 0, ours - TRL on the same problems, strict: " in page
    assert "lora, seed 0" not in page
    asked = {json.loads(line)["question"].split("?")[0] for line in (tmp_path / "transfer.jsonl").open()}
    trained = {json.loads(line)["question"].split("?")[0] for line in (tmp_path / "train.jsonl").open()}
    assert not asked & trained


class OneAfterTheOther:
    """A pool of threads that runs each call in the calling thread."""

    def __init__(self, **ignored: object) -> None: ...

    def __enter__(self) -> OneAfterTheOther:
        return self

    def __exit__(self, *ignored: object) -> None: ...

    map = staticmethod(map)


def test_accuracy_by_family(real_model: ModuleType, tmp_path: Path) -> None:
    """Problems take turns: the first of every three is of the first family."""
    right = [True, False, False, True, True, False, True, False, False, True, True, False]
    for name, verdicts in (("base", [False] * 12), ("lora-ours-1", right)):
        (tmp_path / name).mkdir()
        frame = pandas.DataFrame({"problem": range(12), "strict": verdicts}).sample(frac=1, random_state=0)
        frame.to_parquet(tmp_path / name / "completions.parquet")
    *_, before, run = real_model.by_family(tmp_path, ["a", "b", "c"], ["full-trl-0", "lora-ours-1"]).splitlines()
    assert (before, run) == ("| before | 0.00 | 0.00 | 0.00 |", "| lora-ours-1 | 1.00 | 0.50 | 0.00 |")


def test_differences_of_the_trainers_are_paired_by_seed(
    real_model: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    gains = {"ours-0": 0.5, "ours-1": 0.3, "ours-2": 0.9, "trl-1": 0.2, "trl-2": 0.6}
    found = {
        f"full-{name}": {"cpu_seconds": 60.0, "change": {"strict": {"difference": {"value": gain}}}}
        for name, gain in gains.items()
    }
    estimate = {"value": 0.1, "low": 0.0, "high": 0.2, "method": "in a test"}
    monkeypatch.setattr(real_model, "compare", lambda before, after: {"strict": {"difference": estimate}})
    *_, last = real_model.over_seeds(Path(), "full", found)
    assert last.startswith("\nfull, ours - TRL, 2 seeds in pairs, strict: 0.200 ")  # 0.3 - 0.2 and 0.9 - 0.6


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


def test_runs_that_part_are_compared_by_completion(
    real_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import real_model_coupled

    for trainer, tokens, weight in (("trl", [[1, 2], [3]], 1.0), ("ours", [[1, 2], [4]], 1.0 + 3e-5)):
        folder = tmp_path / "runs" / f"coupled-{trainer}-0"
        folder.mkdir(parents=True)
        step = {"completions": tokens, "rewards": [0.0, float(tokens[1] == [3])], "gradient_norm": 0.25, "loss": 0.0}
        (folder / "steps.json").write_text(json.dumps([step]))
        numpy.save(folder / "weights-1.npy", numpy.array([0.0, weight, 0.0, 0.0]))
    row = real_model_coupled.table(tmp_path, 0).splitlines()[-1]
    # A learning rate is 1e-5. The root of (3^2 / 4) is 1.5.
    assert row == "| 1 | 1 of 2 | 0.5000 | 0.0000 | 0.25000 | 0.25000 | 3.0000 | 1.500000 |"


def test_time_to_accuracy(real_model: ModuleType) -> None:
    """The first step at which the last ten rewards have the level in the mean: of 40 steps of a minute, the 25th."""
    run = {"rewards": [0.0] * 20 + [1.0] * 20, "cpu_seconds": 40 * 60}
    assert real_model.cpu_to_level(run, 0.5) == "25.0"
    assert real_model.cpu_to_level(run, 1.01) == "not reached"
