"""Digests of the rows of every shipped recipe: a change of the readers must not change the training rows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import yaml
from datasets import Dataset

from grpo_recipes.data.load import recipe_prompts
from grpo_recipes.recipe.recipe import Recipe, parse_recipe
from tests.support import launching

ROOT = Path(__file__).resolve().parents[3]
DIGESTS = ROOT / "tests" / "data" / "recipe_rows.json"
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def stand_in(name: str, folder: Path) -> list[str]:
    """Return arguments that replace a dataset from elsewhere by fixed rows."""
    if name in ("arithmetic", "programs"):
        return []
    if name == "rlaif":
        return ["--dataset.path", str(ROOT / "tests" / "data" / "rlaif.jsonl")]
    if name == "gsm8k":
        return ["--dataset.path", str(launching.write_rows(folder / "rows.jsonl", 600))]
    assert name == "scored"
    lines = [{"prompt": f"{n % 40} + 1 = ?", "response": f" {n}", "reward": n % 3} for n in range(60)]
    several = {"prompt": "0 + 1 = ?", "responses": [" 2", " 1"], "rewards": [0, 2.5]}
    path = folder / "scored.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, several]))
    return ["--dataset.path", str(path)]


def digest(dataset: Dataset) -> str:
    """Return the SHA-256 of all columns of the rows, in their order."""
    lines = (json.dumps(row, sort_keys=True) + "\n" for row in dataset)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def digests(recipe: Recipe) -> dict[str, str]:
    """Return the digests of the training rows and, if the recipe has them, of the held-out rows."""
    has_held_out = recipe.dataset.eval_split is not None
    held_out = {"held out": digest(recipe_prompts(recipe, evaluation=True).dataset)} if has_held_out else {}
    return {"trained on": digest(recipe_prompts(recipe).dataset), **held_out}


def test_the_rows_equal_the_recorded_digests(tmp_path: Path) -> None:
    """Recipes of the same dataset have the same rows."""
    known: dict[str, dict[str, str]] = {}
    found = {}
    for path in RECIPES:
        name = yaml.safe_load(path.read_text(encoding="utf-8"))["dataset"]["name"]
        recipe = parse_recipe(["--config", str(path), *stand_in(name, tmp_path)])
        dataset = json.dumps(recipe.dataset.as_dict())
        if dataset not in known:
            known[dataset] = digests(recipe)
        found[path.stem] = known[dataset]
    assert found == json.loads(DIGESTS.read_text())
