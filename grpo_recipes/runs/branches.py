"""The launches of a run: which checkpoints the last launch descends from, and which ones it has abandoned.

A launch that goes on from an earlier checkpoint begins a branch. The later checkpoints of the launch before are
abandoned then, although their steps are higher. Every manifest holds the branch of its checkpoint. `_launch.json` in
the run's folder holds the branch of the last launch, which may have been stopped before it saved anything.

Launches are ordered by number. Clocks differ between machines, and modification times change when a folder is copied.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_recipes.runs.files import TEXT_OR_NULL, read_object, write_atomically
from grpo_recipes.runs.manifest import BRANCH_SHAPE, Branch, CheckpointDamaged, Launch, as_branch, read_manifest

LAUNCH = "_launch.json"  # transformers pushes no file whose name begins with `_`


@dataclass(frozen=True)
class LastLaunch:
    """The last launch that wrote to a run's folder."""

    branch: Branch = ()
    """Branch of the launch, itself last. Empty if no checkpoint in the folder says which launch wrote it."""
    source: Path | None = None
    """Checkpoint that the launch went on from, or None if the launch began anew or the folder does not say."""

    def holds(self, branch: Branch, step: int) -> bool:
        """Return True if the launch descends from a checkpoint of this branch and step, or wrote the checkpoint."""
        if not self.branch:
            return True
        if not branch:  # written before there were branches, or by another trainer
            return step <= self.branch[0].after
        for launch, following in zip(self.branch, [*self.branch[1:], None], strict=True):
            if launch.id == branch[-1].id:
                return following is None or step <= following.after
        return False


def last_launch(folder: Path) -> LastLaunch:
    """Return the last launch that wrote to a run's folder. Raises `RunError` if `_launch.json` is damaged."""
    found = LastLaunch()
    for checkpoint in numbered(folder):
        branch = branch_of(checkpoint)
        if _number(branch) > _number(found.branch):
            found = LastLaunch(branch)
    try:
        content = read_object(folder / LAUNCH, {"branch": BRANCH_SHAPE, "resumed_from": TEXT_OR_NULL})
    except FileNotFoundError:
        return found
    begun = as_branch(content["branch"])
    if _number(begun) < _number(found.branch):
        return found
    source = content["resumed_from"]
    return LastLaunch(begun, None if source is None else folder / source)


def new_branch(folder: Path, source: Path | None, after: int) -> Branch:
    """Return the branch of a launch that now begins, after `after` steps, from the checkpoint `source` if there is one."""
    before = branch_of(source) if source is not None else ()
    number = 1 + max(_number(before), _number(last_launch(folder).branch))
    return (*before, Launch(uuid.uuid4().hex[:12], number, after))


def write_launch(folder: Path, launch: LastLaunch) -> None:
    """Write `_launch.json`, unless nothing in the folder could be mistaken for what the launch wrote."""
    if launch.source is None and not any(numbered(folder)) and not (folder / LAUNCH).exists():
        return
    source = None
    if launch.source is not None:
        # A name, so that the folder can be moved with its checkpoints.
        is_inside = launch.source.resolve().parent == folder.resolve()
        source = launch.source.name if is_inside else str(launch.source.resolve())
    content = {"branch": [vars(one) for one in launch.branch], "resumed_from": source}
    write_atomically(folder / LAUNCH, json.dumps(content, indent=1) + "\n")


def oldest_first(folder: Path, launch: LastLaunch) -> list[Path]:
    """Return the checkpoints of a run's folder in the order in which rotation removes them: the abandoned ones first."""

    def age(checkpoint: Path) -> tuple[bool, int, int]:
        branch, step = branch_of(checkpoint), int(checkpoint.name.rpartition("-")[2])
        is_held = launch.holds(branch, step)
        return is_held, 0 if is_held else _number(branch), step

    return sorted(numbered(folder), key=age)


def branch_of(checkpoint: Path) -> Branch:
    """Return the branch that a checkpoint's manifest holds; empty if there is no manifest, or none that can be read."""
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointDamaged:  # whoever wants to go on from the checkpoint is told so by `rejection`
        return ()
    return manifest.branch if manifest is not None else ()


def numbered(folder: Path) -> Iterator[Path]:
    """Yield the checkpoints of a run's folder, in no order, complete or not."""
    for path in folder.glob("checkpoint-*"):
        if re.fullmatch(r"checkpoint-\d+", path.name):
            yield path


def _number(branch: Branch) -> int:
    return branch[-1].number if branch else 0
