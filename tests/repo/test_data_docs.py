"""The examples of docs/data.md (in docs/data) are planned with a tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from grpo_recipes.cli import main
from grpo_recipes.data.load import recipe_prompts
from grpo_recipes.data.presets import PRESETS
from grpo_recipes.recipe.recipe import parse_recipe

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
FOLDER = Path(__file__).resolve().parents[2] / "docs" / "data"
FILES = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
FIRST = {
    "boxed.yaml": ("What is 2 + 3?", {"answer": "So it is \\boxed{5}.", "level": 1, "source": "school"}),
    "choice.yaml": ("Which is the capital of Italy?\nA. Paris\nB. Rome\nC. Oslo", {"answer": "B"}),
    "reviews.yaml": (
        "The parcel came on time.\n\nAnswer with one of these labels: bad, good.",
        {"answer": "good", "stars": 5},
    ),
    "invoices.yaml": ("Eva Ruiz ordered 56 chairs.", {"answer": '{"name": "Eva Ruiz", "quantity": 56}'}),
    "tasks.yaml": ("Write a Python function add(a, b) that returns the sum.", {"tests": ["assert add(1, 2) == 3"]}),
    "mbpp.yaml": (
        "Write a function to find the largest item.\nYour program is called like this: top([1, 3, 2]) ",
        {"tests": ["assert top([1, 3, 2]) == 3", "assert top([-1]) == -1"], "test_setup_code": ""},
    ),
    "news.yaml": (
        "The council met for three hours. It will plant 72 trees in spring.",
        {"answer": "The city plants 72 trees."},
    ),
    "quiz.yaml": (
        "Which is the capital of Italy?\nA. Paris\nB. Rome\nC. Oslo",
        {"answer": "B", "choices": {"text": ["Paris", "Rome", "Oslo"], "label": ["A", "B", "C"]}},
    ),
    "stories.yaml": ("Write a story of about 40 words about the sea.", {"topic": "the sea", "words": 40}),
    "rechnungen.yaml": ("Wie viel sind 1.000 + 200?", {"answer": 1200.0}),
    "mixture.yaml": (None, {"source": "problems.csv", "origin": "school"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FIRST)
def test_every_example_can_be_planned(
    recipe: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {name for name in FILES if name.endswith(".yaml")} == set(FIRST)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    here = ["--model_name_or_path", str(tiny_model), "--use_cpu", "true", "--bf16", "false"]
    assert main(["plan", recipe, *here]) == 0
    output = capsys.readouterr().out
    rows = recipe_prompts(parse_recipe(["--config", recipe, *here])).dataset
    prompt, columns = FIRST[recipe]
    assert columns.items() <= rows[0].items()
    assert prompt in (None, rows[0]["prompt"][-1]["content"])
    assert "exactly as the model sees it" in output
    assert "can't be scored" not in output


def test_the_page_shows_or_links_every_example() -> None:
    shown = dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)```$", PAGE, re.MULTILINE | re.DOTALL))
    assert set(shown) | set(re.findall(r"\(data/([\w.]+)\)", PAGE)) == set(FILES)
    assert shown.items() <= FILES.items()


def test_every_preset_is_in_the_table() -> None:
    table = PAGE.partition("## Presets")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {"name", *PRESETS, "scored"}
    for preset in PRESETS.values():
        assert preset.hub_id is None or f"`{preset.hub_id}`" in PAGE
