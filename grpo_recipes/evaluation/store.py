"""Folder of an evaluation: its identity, its finished batches, and its result.

`completions.parquet` holds the completions and `evaluation.json` the result. Until the evaluation is finished,
`request.json` identifies it and `parts/` holds the finished batches, so that an interrupted evaluation can continue.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from datasets import Dataset

from grpo_recipes.checks.tools import FACTORY
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.runs import files
from grpo_recipes.runs.identity import column_digests
from grpo_recipes.runs.lock import LOCK, Held, only_writer
from grpo_rewards.errors import UserError
from grpo_rewards.redaction import redacted

REQUEST, PARTS = "request.json", "parts"
CHANGED = {
    "weights": "the model's weights or its tokenizer have changed since",
    "rows": "the problems have changed since",
    "chat_template": "the chat template of the recipe has changed since",
    "strict": "the rewards of strict accuracy (`settings.strict`) have changed since",
    "paid_by": "the rewards of the recipe have changed since",
}
"""Clauses on differences whose values say nothing to a reader, by key of `evaluation.json`."""


class EvaluationFolder:
    """Folder of one evaluation: new, unfinished or finished.

    Args:
        folder: Path of the folder, which may not exist.
        identity: Facts that identify the evaluation, from `identity_of`.

    Raises:
        RunError: A link leads out of the folder.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        self.folder, self.identity = folder, identity
        self.parts = files.inside(folder, PARTS)
        self._held: Held | None = None

    def finished(self) -> dict[str, Any] | None:
        """Return the result, or None if the evaluation is not finished. Needs no permission to write.

        Raises:
            UserError: The folder holds another evaluation, or other files.
        """
        fix = "remove the folder, or give another --output"
        shapes: dict[str, files.Shape] = {files.RESULT: files.EVALUATION, REQUEST: {}}
        for name, shape in shapes.items():
            try:
                found = files.read_object(self.folder / name, shape, fix)
            except FileNotFoundError:
                continue
            if difference := _difference(found, self.identity):
                raise UserError(self.folder, f"it holds another evaluation: {difference}", fix)
            return found if name == files.RESULT else None
        if self.folder.exists() and any(not path.name.startswith(LOCK) for path in self.folder.iterdir()):
            raise UserError(self.folder, "it holds files that are not an evaluation", "give another --output")
        return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from the folder. Raises `UserError` if another process evaluates into it."""
        with only_writer(self.folder, "evaluation") as self._held:
            yield

    def begin(self) -> None:
        """Prepare the folder for batches, or for the rest of them."""
        files.inside(self.folder, PARTS).mkdir(exist_ok=True)
        files.write_atomically(self.folder / REQUEST, json.dumps(self.identity))

    def part(self, number: int) -> Path:
        """Return the file of a batch, which exists if the batch is finished."""
        return self.parts / f"{number:06d}.parquet"

    def write_table(self, path: Path, table: pd.DataFrame) -> None:
        """Write completions.

        Raises:
            UserError: Another process has taken the folder over, or the folder was moved or removed.
        """
        if self._held is not None and (loss := self._held.loss()):
            fix = "wait for the other evaluation or stop it, and the same command continues from what is there"
            raise UserError(loss, "this evaluation stops and writes nothing more there", fix)
        with files.replacing(path) as part:
            table.to_parquet(part, index=False)

    def finish(self, table: pd.DataFrame, summary: Mapping[str, Any]) -> None:
        """Write the completions and the result, and remove the batches."""
        self.write_table(self.folder / files.RESULT_TABLE, table)
        files.write_atomically(self.folder / files.RESULT, json.dumps(summary, indent=2) + "\n")
        # Only now, so that an evaluation that is killed before can continue.
        shutil.rmtree(self.parts)
        (self.folder / REQUEST).unlink()


def has_batches(folder: Path) -> bool:
    """Return True if a folder holds finished batches of an unfinished evaluation."""
    return any((folder / PARTS).glob("[0-9]*.parquet"))


def identity_of(dataset: Dataset, settings: Settings, described: Mapping[str, Any]) -> dict[str, Any]:
    """Return what identifies an evaluation, as JSON gives it back. Secrets are hidden.

    Rows are identified by a checksum of each column that matters, and not by path and split, whose rows may change.

    Args:
        dataset: Rows of the evaluation.
        settings: Settings of sampling and of the rewards.
        described: Other facts (model, weights, dataset, rewards), for JSON.
    """
    needed = {"prompt", "answer"}
    if (settings.tools or {}).get(FACTORY):  # `reset` gets every column
        needed |= {*dataset.column_names}
    for reward in settings.strict or ():
        needed |= {*reward.columns_read, *reward.optional_columns}
    rows = column_digests(dataset.select_columns(sorted(needed & set(dataset.column_names))))
    chosen = {key: value for key, value in asdict(settings).items() if value is not None}
    identity = {**described, "problems": len(dataset), "rows": rows, "settings": chosen}
    return redacted(json.loads(json.dumps(identity, default=str)))  # YAML has dates


def _difference(found: dict[str, Any], identity: dict[str, Any], prefix: str = "") -> str | None:
    """Return the first difference between the evaluation in the folder and the requested one, or None."""
    for key, value in identity.items():
        other = found.get(key)
        if other == value or (key in ("model", "path") and _is_one_path(other, value)):
            continue
        if key == "model" and not prefix and found.get("weights") == identity.get("weights") is not None:
            continue  # a copy of the model
        if other is None and not prefix:
            return f"it does not record `{key}`"
        if key not in CHANGED and isinstance(value, dict) and isinstance(other, dict):
            # A key that only the folder's evaluation has is a difference too.
            return _difference(other, {**dict.fromkeys(other), **value}, f"{prefix}{key}.")
        return CHANGED.get(key, f"{prefix}{key} was {other!r} and is now {value!r}")
    return None


def _is_one_path(first: Any, second: Any) -> bool:
    """Return True if two names are paths of the same existing file or folder."""
    paths = [Path(name) for name in (first, second) if isinstance(name, str)]
    return len(paths) == 2 and all(path.exists() for path in paths) and paths[0].samefile(paths[1])
