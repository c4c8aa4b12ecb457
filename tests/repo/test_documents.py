"""README and docs/results.md: the recipe, what `plan` prints, and figures that were measured."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from grpo_recipes import cli
from grpo_recipes.checks.geometry import geometry_of
from grpo_recipes.recipe.recipe import parse_recipe

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAM = "grpo-recipes "


def test_the_recipe_in_the_readme_is_one(tmp_path: Path) -> None:
    (yaml,) = re.findall(r"^```yaml\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    (tmp_path / "r.yaml").write_text(yaml)
    recipe = parse_recipe(["--config", str(tmp_path / "r.yaml")])
    assert [reward.weight for reward in recipe.build_rewards()] == [1.0, 0.5]
    assert geometry_of(recipe, 1).prompts_per_generation == 2


def test_what_plan_is_said_to_print(capsys: pytest.CaptureFixture[str]) -> None:
    """Word by word; a terminal may wrap it elsewhere."""
    (block,) = re.findall(r"^```console\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    command, *lines = block.splitlines()
    assert cli.main(shlex.split(command.removeprefix(f"$ {PROGRAM}"))) == 0
    said = " ".join(capsys.readouterr().out.split())
    for line in lines:
        assert " ".join(line.split()) in said


@pytest.mark.parametrize(
    ("source", "measured", "rounded"),
    [
        ("benchmarks/results/step.md", ["4.09", "9.53", "3.27"], ["4.1 times", "9.5 times", "3.3 times"]),
        ("benchmarks/results/precision.md", ["0.0366", "1.0000"], ["3.7 %", "all of it"]),
        ("benchmarks/results/rewards.md", ["182.9"], ["183 times"]),
        ("benchmarks/results/torture.md", ["60 kills"], ["60 places"]),
        ("benchmarks/results/real_model.md", ["before | 0.263"], ["from 26 %"]),
        ("benchmarks/results/real_model.md", ["ours-2 | 0.458", "ours-1 | 0.520"], ["to 46", "to 52 %"]),
        ("benchmarks/results/real_model_tools.md", ["warm start | 0.600"], ["60 %"]),
        ("benchmarks/results/real_model_tools.md", ["seed 0 | 0.785", "seed 1 | 0.985"], ["78.5 %", "98.5 %"]),
        ("docs/mathematics.md", ["1920"], ["1,920"]),
        ("docs/tutorial.md", ["0.403", "0.873", "0.627", "0.882"], ["40.3 %", "87.3 %", "62.7 %", "88.2 %"]),
    ],
)
def test_a_figure_of_the_readme_is_a_measured_one(source: str, measured: list[str], rounded: list[str]) -> None:
    """The file holds each figure, and the README rounds it."""
    page, readme = (ROOT / source).read_text(encoding="utf-8"), " ".join(README.split())
    assert [figure for figure in measured if figure not in page] == []
    assert [figure for figure in rounded if figure not in readme] == []


@pytest.mark.parametrize(
    ("page", "rows"),
    [("real_model.md", r"\| (before|full|lora)"), ("real_model_tools.md", r"\| (base model|warm start|GRPO, seed)")],
)
def test_a_table_of_results_is_the_measured_one(page: str, rows: str) -> None:
    """docs/results.md repeats the first rows of the page that the benchmark wrote, and leaves none out between them."""
    shown, measured = (
        [line for line in (ROOT / path).read_text(encoding="utf-8").splitlines() if re.match(rows, line)]
        for path in ("docs/results.md", f"benchmarks/results/{page}")
    )
    assert len(shown) > 1
    assert shown == measured[: len(shown)]


def test_the_readme_is_two_screens() -> None:
    assert len(README.splitlines()) <= 120
    assert max(map(len, README.splitlines())) <= 250
