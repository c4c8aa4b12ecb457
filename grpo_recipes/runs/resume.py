"""May this run resume, and from which checkpoint? `GRPOTrainer.train` and `run/prepare.py` share every answer.

`decide` reads names, sizes, manifests and the record of the last launch. `confirmed` then compares the contents of the
checkpoint with its manifest. `recipe_changes` and `layout_change` compare the recipes of both launches, and
`runs/identity.py` compares data, weights and rewards.

A launch that resumes from an earlier checkpoint abandons the later ones: it renames them before its first step. The
checkpoints under their own names therefore always lead to the last launch, and the highest step is the newest. The file
`_launch.json` names the checkpoint that the last launch resumed from, because that launch may have been stopped before
it saved anything, and the checkpoint may lie in another folder.
"""

from __future__ import annotations

import filecmp
import fnmatch
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from grpo_recipes.process.ranks import gather
from grpo_recipes.runs.checkpoints import (
    ANOTHER,
    Rejected,
    content_damage,
    has_state,
    is_of_ours,
    numbered,
    read_manifest,
    rejection,
    step_in_name,
    step_of,
)
from grpo_recipes.runs.files import RECORD, TEXT_OR_NULL, RunError, read_object, write_atomically
from grpo_recipes.runs.record import read_record

LAUNCH = "_launch.json"  # transformers pushes no file whose name begins with `_`

ABANDONED = "-abandoned"
"""End of the name of an abandoned checkpoint."""

LAYOUT_KEYS = ("geometry", "train_prompts", "seed", "shuffle_dataset")
"""Entries of `run.json` that determine which prompts an optimizer step reads."""

UNLOGGED_CHANGES = ("resume_from_checkpoint", "output_dir", "hub_token")
"""Keys that name the resume itself."""

IN_GEOMETRY = ("generation_batch_size", "steps_per_generation")
"""Keys that are compared as parts of the batch geometry only."""

NOT_SET = "not set"

START_FROM_IT = "start another run from it as its `model_name_or_path`"
"""End of a fix for a checkpoint that no run can resume from."""


def last_source(folder: Path) -> Path | None:
    """Return the checkpoint that the last launch into a run's folder resumed from, or None without one.

    Raises:
        RunError: `_launch.json` is damaged.
    """
    try:
        name = read_object(folder / LAUNCH, {"resumed_from": TEXT_OR_NULL})["resumed_from"]
    except FileNotFoundError:
        return None
    return None if name is None else folder / name


def begin_launch(folder: Path, source: Path | None) -> list[Path]:
    """Write `_launch.json`, and rename the checkpoints that a launch from `source` abandons.

    An abandoned checkpoint of the same step that was renamed earlier is replaced.

    Args:
        folder: folder of the run.
        source: checkpoint that the launch resumes from, or None if it begins anew.

    Returns:
        The abandoned checkpoints under their former names, lowest step first.
    """
    checkpoints = sorted(numbered(folder), key=step_in_name)
    if source is None and not checkpoints and not (folder / LAUNCH).exists():
        return []
    name, step = None, 0
    if source is not None:
        # A name, so that the folder can be moved together with its checkpoints.
        is_inside = source.resolve().parent == folder.resolve()
        name, step = source.name if is_inside else str(source.resolve()), step_of(source)
    write_atomically(folder / LAUNCH, json.dumps({"resumed_from": name}) + "\n")
    abandoned = [path for path in checkpoints if step_in_name(path) > step]
    for path in abandoned:
        _rename(path, path.with_name(f"{path.name}{ABANDONED}"))
    return abandoned


def oldest_first(folder: Path) -> list[Path]:
    """Return the checkpoints of a run's folder in the order in which rotation removes them, abandoned ones first."""
    return [path for suffix in (ABANDONED, "") for path in sorted(numbered(folder, suffix), key=step_in_name)]


@dataclass(frozen=True)
class Resume:
    """Checkpoints that a run may resume from, and those that it may not."""

    folder: Path
    processes: int
    named: Path | None = None
    """Checkpoint that was given by its path, or None if `true` was given."""
    checkpoints: Sequence[Path] = ()
    """Checkpoints to resume from, newest first. They are complete, judged by the names and sizes of their files."""
    rejected: Sequence[Rejected] = ()

    @property
    def newest(self) -> Path | None:
        """Checkpoint that the run resumes from, or None if it starts at the beginning."""
        return self.checkpoints[0] if self.checkpoints else None

    @property
    def passed_over(self) -> list[Rejected]:
        """Rejected checkpoints of this folder that are newer than `newest`, lowest step first.

        A checkpoint in the folder of another run is skipped, because nothing is renamed there.
        """
        found = []
        for one in self.rejected:
            is_newer = self.newest is None or step_of(one.path) > step_of(self.newest)
            if is_newer and one.path.parent == self.folder:
                found.append(one)
        return sorted(found, key=lambda one: step_of(one.path))

    def obstacle(self) -> RunError | None:
        """Return why this launch may not resume, or None if it may or starts at the beginning."""
        if self.newest is not None:
            return unfit(self.newest, self.processes)
        if self.named is not None:
            (found,) = self.rejected
            if found.cut_off:
                return self._none_complete(self.named)
            fix = "name another checkpoint, or `true` for the newest complete one"
            return RunError(found.damage.place, found.damage.problem, fix)
        if not is_of_ours(self.folder) and any(has_state(one.path) for one in self.rejected if one.cut_off):
            return self._none_complete(self.folder)
        # Starting again would lose a run that had complete checkpoints.
        if not (damaged := [one for one in self.rejected if not one.cut_off]):
            return None
        folders = " and ".join(str(one.path) for one in damaged)
        problem = f"{damaged[0].damage.problem}, and no other checkpoint is left to resume from"
        fix = f"restore it, or remove the folder {folders} to start from the beginning"
        return RunError(damaged[0].damage.place, problem, fix)

    def _none_complete(self, place: Path) -> RunError:
        problem = f"there is no complete checkpoint of {self.processes} process(es)"
        return RunError(place, problem, "launch as many processes as before, or name another checkpoint")


def decide(folder: Path, requested: str | Literal[True], processes: int, *, trusts_others: bool = False) -> Resume:
    """Return where a run resumes, judged by the names and sizes of files.

    Args:
        folder: folder of the run.
        requested: path of a checkpoint, or True for the newest one of the last launch in `folder`.
        processes: number of ranks of this launch.
        trusts_others: True if a named checkpoint of another trainer is accepted unchecked. transformers then checks it.

    Raises:
        RunError: `_launch.json` is damaged. Or the last launch saved nothing, and either it began anew in the folder of
            an earlier run, or the checkpoint that it resumed from is gone.
    """
    if requested is not True:
        named = Path(requested)
        if trusts_others and read_manifest(named) is None and not is_of_ours(named.parent):
            return Resume(folder, processes, named, [named])
        found = rejection(named, processes)
        return Resume(folder, processes, named, [] if found else [named], [found] if found else [])
    complete, rejected = _survey(folder, processes)
    source, left = last_source(folder), sorted(numbered(folder, ABANDONED), key=step_in_name)
    if (source is not None or left) and not complete and all(one.cut_off for one in rejected):
        begun = "began anew and saved nothing"
        if source is not None:
            begun = f"resumed from {source} and saved nothing, and that checkpoint is gone"
        saved = f"; an earlier launch saved {' and '.join(path.name for path in left)}" if left else ""
        raise RunError(folder, f"the last launch {begun}{saved}", "name the checkpoint to resume from")
    return Resume(folder, processes, None, complete, rejected)


def newest_checkpoint(folder: Path, processes: int) -> Path | None:
    """Return the newest complete checkpoint of the last launch in a folder, judged by the names and sizes of files."""
    complete, _ = _survey(folder, processes)
    return complete[0] if complete else None


def _survey(folder: Path, processes: int) -> tuple[list[Path], list[Rejected]]:
    """Return the complete checkpoints of a run and the rejected ones, newest first."""
    checkpoints = list(numbered(folder))
    source = last_source(folder)
    # It may lie in the folder of another run, or be an abandoned one.
    if source is not None and source not in checkpoints and has_state(source):
        checkpoints.insert(0, source)
    complete: list[Path] = []
    rejected: list[Rejected] = []
    for checkpoint in sorted(checkpoints, key=step_of, reverse=True):
        if (one := rejection(checkpoint, processes)) is not None:
            rejected.append(one)
        else:
            complete.append(checkpoint)
    return complete, rejected


def confirmed(point: Resume, *, each_node: bool) -> Resume:
    """Return the decision with only the newest checkpoint that is finite and agrees with its manifest. Collective.

    Only the weights of a checkpoint without a manifest (another trainer's) are checked, because its other contents are
    unknown. Damaged checkpoints are added to `rejected`. If every checkpoint is damaged, `obstacle` returns an error.
    """
    # Ranks that see different disks may propose different checkpoints.
    proposed = gather([path.name for path in point.checkpoints])
    rejected = list(point.rejected)
    for checkpoint in point.checkpoints:
        if all(checkpoint.name in names for names in proposed):
            damage = content_damage(checkpoint, read_manifest(checkpoint), each_node=each_node)
        else:
            damage = RunError(checkpoint, "it is not complete on every machine", ANOTHER)
        if damage is None:
            return replace(point, checkpoints=[checkpoint], rejected=rejected)
        rejected.append(Rejected(checkpoint, damage, cut_off=False))
    return replace(point, checkpoints=[], rejected=rejected)


def unfit(checkpoint: Path, processes: int) -> RunError | None:
    """Return why a complete checkpoint does not fit a launch of `processes` ranks, or None if it does."""
    if (manifest := read_manifest(checkpoint)) is None:
        return None
    if manifest.model_only:
        problem = "it was saved with `save_only_model`, without its optimizer and random state"
        return RunError(checkpoint, problem, f"name an earlier checkpoint, or {START_FROM_IT}")
    if manifest.num_processes != processes:
        problem = f"it is of {manifest.num_processes} process(es), and this launch has {processes}"
        return RunError(checkpoint, problem, f"launch as many processes as before, or {START_FROM_IT}")
    return None


def set_aside(rejected: Sequence[Rejected]) -> None:
    """Rename checkpoints that no run can resume from. A checkpoint of the same step renamed earlier is replaced."""
    for one in rejected:
        _rename(one.path, one.aside)


def _rename(checkpoint: Path, aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)


def earlier_launch(folder: Path, checkpoint: Path | None) -> Mapping[str, Any]:
    """Return the newest launch in the `run.json` beside a checkpoint, or in the run's folder if there is no checkpoint.

    The result is empty if there is no `run.json` because another trainer wrote the checkpoint.

    Raises:
        RunError: `run.json` is damaged, or missing beside a checkpoint of ours.
    """
    place = checkpoint.parent if checkpoint else folder
    before = read_record(place)
    if before is None and checkpoint is not None and is_of_ours(place):
        fix = f"restore it, or start another run from {checkpoint} as its `model_name_or_path`"
        raise RunError(place / RECORD, "it is missing, and says what that run trained", fix)
    return before or {}


def layout_change(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the first difference in the data order of two launches as "key was x and is y", or None.

    A checkpoint stores the position in the data as a number of optimizer steps. The number means the same prompts only
    if all of `LAYOUT_KEYS` are unchanged.

    Args:
        before: entry of the earlier launch in `run.json`, which may lack keys.
        now: entry of this launch.
    """
    old, new = _flat(before), _flat(now)
    for key, value in new.items():
        if key in old and old[key] != value:
            return f"{key} was {old[key]} and is {value}"
    return None


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a launch that determine the data order, with the geometry on the same level."""
    entries = {key: record[key] for key in LAYOUT_KEYS if key in record}
    return {**entries.pop("geometry", {}), **entries}


def recipe_changes(
    before: Mapping[str, Any], now: Mapping[str, Any], directory: str, may_change: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Compare the resolved recipes of two launches.

    Args:
        before: recipe of the earlier launch.
        now: recipe of this launch.
        directory: folder in which the relative paths of `before` begin. A path may change if its contents are the same.
        may_change: patterns of the keys that a resumed run may change.

    Returns:
        The changes that a resumed run may not make, and those that it makes, each as "`key` was x and is y". Keys that
        name the resume itself are in neither list.
    """
    old, new = dict(_leaves(_normal(before))), dict(_leaves(_normal(now)))
    refused, applied = [], []
    for key in {**new, **old}:
        was, now_is = old.get(key, NOT_SET), new.get(key, NOT_SET)
        if was == now_is or _are_equal_paths(was, now_is, directory):
            continue
        change = f"`{key}` was {_shown(was)} and is {_shown(now_is)}"
        if not any(fnmatch.fnmatch(key, pattern) for pattern in may_change):
            refused.append(change)
        elif key not in UNLOGGED_CHANGES:
            applied.append(change)
    return refused, applied


def _normal(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved recipe as JSON, with defaults filled in where two spellings mean the same."""
    # `run.json` holds lists where a recipe may hold tuples, and texts where it holds paths.
    values = json.loads(json.dumps(dict(recipe), default=str))
    if values.get("bf16") is None:
        values["bf16"] = not values.get("fp16")
    if values.get("epsilon_high") is None:
        values["epsilon_high"] = values.get("epsilon")
    values["rewards"] = [_normal_reward(reward) for reward in values.get("rewards") or []]
    return {key: value for key, value in values.items() if key not in IN_GEOMETRY}


def _normal_reward(reward: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a reward of a recipe as a mapping with a weight."""
    spec: dict[str, Any] = {"name": reward} if isinstance(reward, str) else dict(reward)
    if "rewards" in spec:
        spec["rewards"] = [_normal_reward(part) for part in spec["rewards"]]
    return {**spec, "weight": spec.get("weight", 1.0)}


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a recipe under dotted keys, as on the command line, without those that are not set."""
    dot = f"{key}." if key else ""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from _leaves(entry, f"{dot}{name}")
    elif isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        for index, entry in enumerate(value):
            yield from _leaves(entry, f"{dot}{index}")
    elif value is not None:
        yield key, value


def _are_equal_paths(was: Any, now: Any, directory: str) -> bool:
    """Return True if two values are paths of one file or folder, or of two with the same contents."""
    if not (isinstance(was, str) and isinstance(now, str)):
        return False
    one, other = Path(directory, was), Path(now)
    if not (one.exists() and other.exists()):
        return False
    if one.samefile(other):
        return True
    if one.is_file() or other.is_file():
        return filecmp.cmp(one, other, shallow=False)  # False for a file and a folder
    names, others = _files_below(one), _files_below(other)
    return names == others and all(filecmp.cmp(one / name, other / name, shallow=False) for name in names)


def _files_below(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
