"""`run.json`: what ran, on what, with which versions. Each launch of a run adds an entry; none is overwritten.

The newest launch's entries stand at the top level, where a reader of one run finds them; `launches` holds all of them,
oldest first.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_recipes import __version__
from grpo_rewards.errors import UserError

if TYPE_CHECKING:
    from grpo_recipes.recipe.checks import Checked
    from grpo_recipes.recipe.recipe import Recipe

RECORD = "run.json"
SECRET = "hub_token"
VERSIONED = ("trl", "transformers", "peft", "accelerate", "datasets", "torch")


class RecordError(UserError):
    """A `run.json` that can't be read, in one sentence that names the file and the fix."""


def read_record(folder: Path) -> dict[str, Any] | None:
    """A run's `run.json`, or None if it has none. Raises `RecordError` if the file is damaged."""
    file = folder / RECORD
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(
            f"{file}: can't be read as JSON ({' '.join(str(error).split())}): restore the file"
        ) from error
    if not isinstance(record, dict) or not isinstance(record.get("recipe"), dict):
        raise RecordError(f"{file}: holds no `recipe`, so it is no record of a run: restore the file")
    return record


def launches(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The launches of a run, oldest first; a record that was written before there was a list is one launch."""
    return record.get("launches") or [{key: value for key, value in record.items() if key != "launches"}]


def add_launch(folder: Path, launch: Mapping[str, Any]) -> None:
    """Add a launch to a run's `run.json`, whole or not at all. Raises `RecordError` if the file is damaged."""
    before = read_record(folder)
    entries = [*(launches(before) if before else []), dict(launch)]
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**launch, "launches": entries}, indent=2, ensure_ascii=False, default=str) + "\n"
    part = folder / f"{RECORD}.part"
    part.write_text(text, encoding="utf-8")
    os.replace(part, folder / RECORD)


def describe_launch(recipe: Recipe, checked: Checked, world_size: int, checkpoint: Path | None) -> dict[str, Any]:
    """What a launch runs, ready for JSON; `checkpoint` is what it goes on from."""
    return {
        "recipe": {key: value for key, value in recipe.as_dict().items() if key != SECRET},
        "source": recipe.source,
        "arguments": _without_secret(recipe.arguments),
        "directory": os.getcwd(),
        "resumed_from": str(checkpoint) if checkpoint else None,
        "rewards": [
            {"name": reward.name, "source": spec if isinstance(spec, str) else spec["name"], "weight": reward.weight}
            for spec, reward in zip(recipe.rewards, checked.rewards, strict=True)
        ],
        "world_size": world_size,
        **data_order(recipe, checked),
        **({"unscorable_golds": checked.golds.as_dict()} if checked.golds else {}),
        "versions": versions(),
        "git_revision": git_revision(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _without_secret(arguments: Sequence[str]) -> list[str]:
    """A command line without the token for the hub: the record may be pushed there."""
    kept: list[str] = []
    for word in arguments:
        follows = bool(kept) and kept[-1].replace("-", "_") == f"__{SECRET}"
        option, equals, _ = word.partition("=")
        is_secret = equals and option.replace("-", "_") == f"__{SECRET}"
        kept.append("..." if follows else f"{option}=..." if is_secret else word)
    return kept


def data_order(recipe: Recipe, checked: Checked) -> dict[str, Any]:
    """What settles which prompts an optimiser step sees."""
    return {
        "geometry": checked.geometry.as_dict(),
        "train_prompts": len(checked.train_dataset),
        "train_prompts_sha256": prompts_digest(checked.train_dataset["prompt"]),
        "seed": recipe.config.seed,
        "shuffle_dataset": recipe.config.shuffle_dataset,
    }


def prompts_digest(prompts: Iterable[Any]) -> str:
    """The SHA-256 of prompts in their order, texts or messages."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(prompt).encode() + b"\n")
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    return {
        "grpo-recipes": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in VERSIONED},
    }


def git_revision() -> str | None:
    """The commit of the working directory, with `-dirty` if it has changes; None outside a repository."""
    try:
        said = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40"], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return said.stdout.strip() or None
