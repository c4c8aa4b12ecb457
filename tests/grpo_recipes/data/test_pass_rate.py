"""`dataset.pass_rate`: rows are kept by the results of an evaluation as `grpo-recipes evaluate` writes it."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from grpo_recipes.data.load import load, recipe_prompts
from grpo_recipes.evaluation.problems import held_out_spec
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.recipe.recipe import Recipe, RecipeError, parse_recipe
from tests.support import launching
from tests.support.errors import refused
from tests.support.policies import evaluate_by

SAMPLES = 4


def recipe(folder: Path, **dataset: Any) -> Recipe:
    rows = {"name": "gsm8k", "path": str(folder / "rows.jsonl"), **dataset}
    path = launching.write_recipe(folder / "mine.yaml", folder, None, folder / "run", dataset=rows)
    return parse_recipe(["--config", str(path)])


def write_rows(path: Path, count: int) -> None:
    """Write rows whose questions have letters beyond ASCII, which JSON may write as escapes."""
    launching.write_rows(path, count)
    text = path.read_text(encoding="utf-8")
    assert "What is" in text
    path.write_text(text.replace("What is", "Wie groß ist"), encoding="utf-8")


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluate ten rows, where row n is solved in n % 5 of 4 samples, with the prompts of the filtered recipe."""
    folder = tmp_path_factory.mktemp("evaluated")
    write_rows(folder / "rows.jsonl", 10)
    filtered = recipe(folder, pass_rate={"evaluation": str(folder / "evaluation"), "keep": [0, 1]})
    spec = held_out_spec(filtered.as_dict()["dataset"], split="train")
    dataset = load(spec)
    samples: Counter[str] = Counter()

    def complete(prompts: list[Any], settings: Settings) -> list[str]:
        texts = []
        for prompt in prompts:
            number = int(prompt[-1]["content"].rpartition(" + ")[2].strip("?"))
            right = samples[str(number)] < number % 5
            samples[str(number)] += 1
            texts.append(f"<reasoning>\n.\n</reasoning>\n<answer>\n{2 * number if right else -1}\n</answer>")
        return texts

    settings = Settings(tags=("reasoning", "answer"), samples=SAMPLES, temperature=1.0)
    evaluate_by(folder / "evaluation", complete, dataset, settings, {"model": "m"})
    return folder


@pytest.fixture
def copied(evaluated: Path, tmp_path: Path) -> Path:
    """Copy the evaluation for a test that changes its files."""
    return shutil.copytree(evaluated, tmp_path / "copied")


def kept(folder: Path, low: float, high: float) -> list[int]:
    spec = recipe(folder, pass_rate={"evaluation": str(folder / "evaluation"), "keep": [low, high]})
    return [int(answer) // 2 for answer in recipe_prompts(spec).dataset["answer"]]


def test_rows_are_kept_by_their_pass_rate(evaluated: Path) -> None:
    assert kept(evaluated, 0.1, 0.9) == [1, 2, 3, 6, 7, 8]
    assert kept(evaluated, 0.5, 0.75) == [2, 3, 7, 8], "both ends are kept"
    assert kept(evaluated, 0, 0) == [0, 5]
    assert kept(evaluated, 0, 1) == list(range(10))


def test_the_kept_rows_are_counted_once(
    evaluated: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with caplog.at_level("INFO", "grpo_recipes.data.load"):
            kept(evaluated, 0.5, 0.75)
    (message,) = caplog.messages
    assert "4 of 10 rows" in message
    assert "0.5 to 0.75" in message


def test_an_evaluation_without_golds_has_no_pass_rates(copied: Path) -> None:
    file = copied / "evaluation" / "evaluation.json"
    table = copied / "evaluation" / "completions.parquet"
    pd.read_parquet(table).drop(columns="strict").to_parquet(table)
    with refused("", "`strict`", by=RecipeError):
        kept(copied, 0, 1)
    file.unlink()
    place = f"{copied}/mine.yaml: `dataset.pass_rate.evaluation`: {copied}/evaluation"
    with refused(place, f"--output {copied}/evaluation`", by=RecipeError):
        kept(copied, 0, 1)


def test_a_share_of_training_rows_is_filtered_and_may_be_empty(evaluated: Path) -> None:
    rate = {"evaluation": str(evaluated / "evaluation"), "keep": [0, 1]}
    rows = [recipe_prompts(recipe(evaluated, pass_rate=rate, eval_share=0.5), evaluation=side) for side in (0, 1)]
    assert sum(len(prompts.dataset) for prompts in rows) == 10
    with refused("`dataset.split`", "'train[:0]'", by=RecipeError):
        recipe_prompts(recipe(evaluated, pass_rate=rate, split="train[:0]"))


def test_held_out_rows_are_not_filtered(evaluated: Path) -> None:
    """The key also survives a round trip through run.json."""
    rate = {"evaluation": str(evaluated / "evaluation"), "keep": [0.1, 0.9]}
    filtered = recipe(evaluated, pass_rate=rate, eval_path=str(evaluated / "rows.jsonl"), eval_split="train[:3]")
    assert len(recipe_prompts(filtered, evaluation=True).dataset) == 3
    written = json.loads(json.dumps(filtered.as_dict()["dataset"]))
    assert written["pass_rate"] == rate
    assert held_out_spec(written).pass_rate is None


def test_an_invalid_pass_rate_is_reported_with_its_key(evaluated: Path) -> None:
    for key, value, *figures in (
        ("evaluation", "nowhere", "nowhere"),
        ("keep", [0.1, 10], "[0.1, 10.0]"),
        ("keep", [0.6, 0.7], "10 rows", "0.6 to 0.7", "(6 ", " 4 "),
        ("kept", [0.6, 0.7]),
    ):
        rate = {"evaluation": str(evaluated / "evaluation"), "keep": [0.1, 0.9], key: value}
        with refused(f"{evaluated}/mine.yaml: `dataset.pass_rate.{key}`", *figures, by=RecipeError):
            recipe_prompts(recipe(evaluated, pass_rate=rate))


def test_rows_that_were_not_evaluated_are_refused(copied: Path) -> None:
    write_rows(copied / "rows.jsonl", 12)
    with refused("", "2", "12", "rows.jsonl", "line 11", by=RecipeError):
        kept(copied, 0, 1)
    write_rows(copied / "rows.jsonl", 10)
    rate = {"evaluation": str(copied / "evaluation"), "keep": [0, 1]}
    other_prompts = recipe(copied, pass_rate=rate, system_prompt="boxed")
    with refused("", "10", "10", by=RecipeError):
        recipe_prompts(other_prompts)
