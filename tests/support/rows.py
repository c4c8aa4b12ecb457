"""Tables of users, written in each format, and the rows that a recipe makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets

from grpo_recipes.data.load import load
from grpo_recipes.recipe.dataset import DatasetSpec


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    """Write the rows in the format of the path's suffix, with other libraries than the readers under test."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif path.suffix == ".csv":
        datasets.Dataset.from_list(list(rows)).to_csv(path)
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(list(rows)).to_parquet(path)
    else:
        datasets.Dataset.from_list(list(rows)).save_to_disk(str(path))
    return str(path)


def loaded(path: Any, *, evaluation: bool = False, **keys: Any) -> datasets.Dataset:
    """Return the rows of a dataset with this path and these keys."""
    return load(DatasetSpec.parse({"path": path, **keys}), evaluation=evaluation)


def user(text: str) -> list[dict[str, str]]:
    """Return the messages of a prompt without a system prompt."""
    return [{"role": "user", "content": text}]
