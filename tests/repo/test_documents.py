"""README and the pages that it leads to: their figures, and how many clicks away an answer is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from grpo_recipes import cli
from grpo_recipes.checks.geometry import geometry_of
from grpo_recipes.recipe.recipe import parse_recipe
from tests.repo.test_site import build_site

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
    ("figures", "source"),
    [
        (["4.09", "9.53", "3.27"], "benchmarks/results/step.md"),
        (["0.0366", "1.0000"], "benchmarks/results/precision.md"),
        (["182.9"], "benchmarks/results/rewards.md"),
        (["60 kills"], "benchmarks/results/torture.md"),
        (["before | 0.263", "full-ours-2 | 0.458", "full-ours-1 | 0.520"], "benchmarks/results/real_model.md"),
        (["warm start | 0.600", "seed 0 | 0.785", "seed 1 | 0.985"], "benchmarks/results/real_model_tools.md"),
        (["1920"], "docs/mathematics.md"),
        (["0.403", "0.873", "0.627", "0.882"], "docs/tutorial.md"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_figure_of_the_readme_is_a_measured_one(figures: list[str], source: str) -> None:
    """As the README rounds it, and as the file holds it."""
    rounded = {
        "4.09": "4.1 times",
        "9.53": "9.5 times",
        "3.27": "3.3 times",
        "1920": "1,920",
        "60 kills": "60 places",
        "182.9": "183 times",
        "1.0000": "all of it",
        "before | 0.263": "from 26 %",
        "full-ours-2 | 0.458": "to 46",
        "full-ours-1 | 0.520": "to 52 %",
        "warm start | 0.600": "60 %",
        "seed 0 | 0.785": "78.5 %",
        "seed 1 | 0.985": "98.5 %",
    }
    shares = {"0.403": "40.3 %", "0.873": "87.3 %", "0.627": "62.7 %", "0.882": "88.2 %", "0.0366": "3.7 %"}
    page = (ROOT / source).read_text(encoding="utf-8")
    readme = " ".join(README.split())
    for figure in figures:
        assert figure in page
        assert {**rounded, **shares}.get(figure, figure) in readme


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


# The reader's test


@pytest.mark.parametrize(
    ("task", "needed", "clicks"),
    [
        ("own data", "grpo-recipes init problems.csv", 0),
        ("own data, its columns", "columns: {question: problem, answer: solution}", 1),
        (
            "LoRA on 24 GB",
            "grpo-recipes plan gsm8k-qwen2.5-1.5b-lora --accelerate_config single_gpu --gpu_memory 24GB",
            0,
        ),
        ("LoRA on 24 GB, its recipe", "lora_target_modules: all-linear", 2),
        ("own reward", "--rewards my_package.rewards.brevity", 0),
        ("own reward, its code", "def brevity(prompts, completions, **columns):", 1),
        ("is it better", "grpo-recipes compare A B", 0),
        ("is it better, what it says", "McNemar: A alone right on", 1),
    ],
)
def test_an_answer_is_found_within_two_clicks(task: str, needed: str, clicks: int) -> None:
    """From README along links: how many clicks away the nearest page is that holds what is needed."""
    seen: set[str] = set()
    pages = ["README.md"]
    for distance in range(3):
        texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in pages}
        if any(needed in text for text in texts.values()):
            assert distance == clicks, task
            return
        seen |= set(pages)
        pages = [
            found
            for page, text in texts.items()
            for path, _ in build_site.LINK.findall(text)
            if (found := linked(page, path)) not in seen
            and (ROOT / found).is_file()
            and found.endswith((".md", ".yaml"))
        ]
    pytest.fail(f"{task}: more than two clicks away")


def linked(page: str, path: str) -> str:
    """Return the file that a link of a page leads to, relative to the repository's root."""
    return str((ROOT / page).parent.joinpath(path).resolve().relative_to(ROOT))
