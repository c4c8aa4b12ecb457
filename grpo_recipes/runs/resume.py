"""One decision for every resume: may this run go on, and from which checkpoint?

`decide` reads names, sizes, manifests and the last launch's branch. `confirmed` then compares the contents with the
manifests. Both serve `train.py` and `GRPOTrainer.train`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from grpo_recipes.runs.branches import last_launch
from grpo_recipes.runs.checkpoints import (
    Rejected,
    abandoned,
    has_state,
    is_of_ours,
    newest_confirmed,
    rejection,
    step_of,
    survey,
    unfit,
)
from grpo_recipes.runs.manifest import CheckpointDamaged


@dataclass(frozen=True)
class Resume:
    """Checkpoints that a run may go on from, and those that it may not."""

    folder: Path
    processes: int
    named: Path | None = None
    """Checkpoint that was asked for by its path, or None if `true` was."""
    checkpoints: Sequence[Path] = ()
    """Checkpoints to go on from, newest first. Names and sizes say that they are whole."""
    rejected: Sequence[Rejected] = ()
    abandoned: Sequence[Path] = ()
    """Checkpoints of higher steps that the last launch does not descend from."""

    @property
    def newest(self) -> Path | None:
        """Checkpoint that the run goes on from, or None if it starts at the beginning."""
        return self.checkpoints[0] if self.checkpoints else None

    def obstacle(self) -> str | None:
        """Return why this launch may not resume, as a clause; None if it may, or if it starts at the beginning."""
        if self.newest is not None:
            return unfit(self.newest, self.processes)
        if self.named is not None:
            (found,) = self.rejected
            if found.cut_off:
                return self._none_complete(self.named)
            return f"{found.reason}: name another checkpoint, or `true` for the newest one that is whole"
        is_others = not is_of_ours(self.folder)
        if is_others and any(has_state(one.path) for one in self.rejected if one.cut_off):
            return self._none_complete(self.folder)
        # To start again would lose a run that had complete checkpoints.
        damaged = [one for one in self.rejected if not one.cut_off]
        if not damaged:
            return None
        folders = " and ".join(str(one.path) for one in damaged)
        return (
            f"{damaged[0].reason}, and no other checkpoint is left to go on from: restore it, or "
            f"remove the folder {folders}, and `--resume_from_checkpoint true` starts from the beginning"
        )

    def _none_complete(self, place: Path) -> str:
        return (
            f"there is no complete checkpoint of {self.processes} process(es) in {place}: launch as many processes as before, "
            "or name another checkpoint"
        )


def decide(folder: Path, asked: str | Literal[True], processes: int) -> Resume:
    """Return where a run resumes: `asked`, a checkpoint, or for True the newest one of the last launch in `folder`.

    Raises:
        CheckpointDamaged: the last launch saved nothing, and the checkpoint that it went on from is gone.
        RunError: the folder's `_launch.json` is damaged.
    """
    if asked is not True:
        named = Path(asked)
        found = rejection(named, processes)
        return Resume(folder, processes, named, [] if found else [named], [found] if found else [])
    whole, rejected = survey(folder, processes)
    unreadable = {one.path for one in rejected}
    left = [path for path in abandoned(folder) if path not in unreadable]
    if not whole and left and all(one.cut_off for one in rejected):
        raise CheckpointDamaged(_no_branch_point(folder, left))
    later = [path for path in left if not whole or step_of(path) > step_of(whole[0])]
    return Resume(folder, processes, None, whole, rejected, later)


def confirmed(point: Resume, *, each_node: bool) -> Resume:
    """Return the newest checkpoint whose contents its manifest confirms, and the newer ones to set aside; collective.

    Raises:
        CheckpointDamaged: the named checkpoint, or every one of the run, is damaged.
    """
    newest, damaged = newest_confirmed(point.checkpoints, each_node=each_node)
    rejected = [*point.rejected, *damaged]
    if newest is None:
        point = replace(point, checkpoints=[], rejected=rejected)
        if (reason := point.obstacle()) is not None:
            raise CheckpointDamaged(reason)
    else:
        rejected = [one for one in rejected if step_of(one.path) > step_of(newest)]
        point = replace(point, checkpoints=[newest])
    # Nothing is set aside in the folder of another run.
    aside = [one for one in rejected if one.path.parent == point.folder]
    return replace(point, rejected=sorted(aside, key=lambda one: step_of(one.path)))


def _no_branch_point(folder: Path, left: Sequence[Path]) -> str:
    """Return why `true` names no checkpoint in a folder that has some, as a sentence."""
    source = last_launch(folder).source
    names = " and ".join(path.name for path in left)
    if source is None:
        begun = f"the last launch into {folder} began anew and saved nothing"
    else:
        place = source.name if source.parent == folder else str(source)
        begun = f"the last launch into {folder} went on from {place} and saved nothing, and that checkpoint is gone"
    return f"{begun}; an earlier launch saved {names}: name the one to go on from"
