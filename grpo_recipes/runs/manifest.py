"""A checkpoint's manifest: the size and the checksum of every file in it, written last.

A checkpoint with a manifest was written to its end by every rank. Sizes are compared at once; the checksums, which need every
byte, by all ranks together, each reading a share of the files. Where each node has a disk of its own (`save_on_each_node`),
each node has a manifest of its own, of what lies there.

`write_manifest` and `content_damage` are collective calls.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from grpo_recipes.runs.files import INTEGER, INTEGER_OR_NULL, TEXT, Kind, Shape, mismatch, write_atomically
from grpo_rewards.errors import UserError
from grpo_rewards.files import UnreadableFile, parse_json, read_text

MANIFEST = "manifest.json"
CHECKSUM = "xxh3_128"
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
BRANCH_SHAPE: Shape = [{"id": TEXT, "number": INTEGER, "after": INTEGER}]
IDENTITY_SHAPE: Shape = {
    "rows": INTEGER_OR_NULL,
    "columns": {"*?": TEXT},
    "weights": {"*?": {"*?": TEXT}},
    "rewards": {"*?": TEXT},
    "versions": {"*?": TEXT},
}
SHAPE: Shape = {
    "step": INTEGER,
    "num_processes": INTEGER,
    "model_only": FLAG,
    "files": {"*?": {"bytes": INTEGER, CHECKSUM: TEXT}},
    "branch?": BRANCH_SHAPE,
    "identity?": IDENTITY_SHAPE,
    CHECKSUM: TEXT,
}

ADDED_KEYS = ("branch", "identity")

Listing = tuple[str, Mapping[str, int]]
"""Which disk a rank sees, and the size of each file of the checkpoint there."""


class CheckpointDamaged(UserError):
    """A checkpoint that is not as its manifest says, or whose manifest can't be read; names the file."""


@dataclass(frozen=True)
class Launch:
    """One launch of a run, as the checkpoints that descend from it remember it."""

    id: str
    """Random identifier: launches into two folders may have the same number."""
    number: int
    """Position among the launches into one folder, counted from 1."""
    after: int
    """Optimizer step that the launch began after."""


Branch = tuple[Launch, ...]
"""The launches that the steps of a checkpoint were made by, oldest first."""


def as_branch(content: list[dict[str, Any]]) -> Branch:
    """Return a branch from its JSON, which has the shape `BRANCH_SHAPE`."""
    return tuple(Launch(one["id"], one["number"], one["after"]) for one in content)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of. `files` has the size and the checksum of each, by its path inside the checkpoint."""

    step: int
    num_processes: int
    model_only: bool
    """Whether it was saved with `save_only_model`: without optimiser and random state, so that no run can go on from it."""
    files: Mapping[str, Mapping[str, Any]]
    branch: Branch = ()
    """Launches that the checkpoint's steps were made by. Empty in a manifest written before there were branches."""
    identity: Mapping[str, Any] | None = None
    """Identity of the data, weights and rewards that the steps read (`identity.identify`). None in an older manifest."""

    def text(self) -> str:
        """The file's text: with a checksum over itself, so that a damaged manifest is noticed too."""
        content = {**vars(self), "files": dict(sorted(self.files.items()))}
        content["branch"] = [vars(launch) for launch in self.branch]
        # An older manifest lacks these keys, and its checksum is that of the other ones.
        content = {key: value for key, value in content.items() if value or key not in ADDED_KEYS}
        return (
            json.dumps({**content, CHECKSUM: xxhash.xxh3_128(json.dumps(content).encode()).hexdigest()}, indent=1)
            + "\n"
        )


def write_manifest(checkpoint: Path, manifest: Manifest, *, each_node: bool, writes: bool) -> None:
    """List the files of a checkpoint once every rank has written its own, flush them to the disk, and write the manifest.

    Args:
        manifest: what it will say, without its files.
        each_node: whether each node has a disk of its own.
        writes: whether this rank writes the manifest: the first one of those that share a disk.
    """
    gathered(None)  # every rank has closed its files
    disk = _disk(each_node)
    listings = gathered((disk, files_in(checkpoint)))
    entries = {name: _entry(checkpoint / name) for name in share(listings, rank())}
    parts = gathered(entries)
    if writes:
        whole = {
            name: entry
            for (where, _), part in zip(listings, parts, strict=True)
            if where == disk
            for name, entry in part.items()
        }
        write_atomically(checkpoint / MANIFEST, replace(manifest, files=whole).text())
        _flush(checkpoint / MANIFEST)
        _flush(checkpoint)
    gathered(None)  # nothing is removed before every disk has its manifest


def read_manifest(checkpoint: Path) -> Manifest | None:
    """A checkpoint's manifest, or None if it has none. Raises `CheckpointDamaged` if it can't be read."""
    path = checkpoint / MANIFEST
    try:
        text = read_text(path)
        content: Any = parse_json(path, text.encode()) if text else None
    except FileNotFoundError:
        return None
    except UnreadableFile as error:
        raise CheckpointDamaged(f"{path} is damaged: {error.problem}") from error
    if not text:
        raise CheckpointDamaged(f"{path} is empty")
    if mismatch(content, SHAPE) is None:
        content.pop(CHECKSUM)
        required = {key: content[key] for key in ("step", "num_processes", "model_only", "files")}
        manifest = Manifest(**required, branch=as_branch(content.get("branch", [])), identity=content.get("identity"))
        if manifest.text() == text:
            return manifest
    raise CheckpointDamaged(f"{path} is damaged: its own checksum differs")


def size_damage(checkpoint: Path, manifest: Manifest) -> str | None:
    """Which file is missing or of another size than the manifest says, as far as this rank sees; None if none is."""
    for name, entry in manifest.files.items():
        path, expected = checkpoint / name, entry["bytes"]
        if not path.is_file():
            return f"{path} is missing"
        size = path.stat().st_size
        if size == 0 and expected:
            return f"{path} is empty"
        if size != expected:
            state = "cut off" if size < expected else "damaged"
            return f"{path} is {state}: it has {size:,} bytes, and the manifest tells of {expected:,}"
    return None


def content_damage(checkpoint: Path, manifest: Manifest, *, each_node: bool) -> str | None:
    """Which file differs from the manifest in its contents, None if none does. All ranks read a share and agree."""
    listings = gathered((_disk(each_node), {name: entry["bytes"] for name, entry in manifest.files.items()}))
    names = share(listings, rank())
    found = (_difference(checkpoint / name, manifest.files[name][CHECKSUM]) for name in names)
    return next(filter(None, gathered(next(filter(None, found), None))), None)


def files_in(checkpoint: Path) -> dict[str, int]:
    """The size of each file of a checkpoint but the manifest, by its path inside the checkpoint."""
    files = (path for path in checkpoint.rglob("*") if path.is_file())
    sizes = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}
    return {name: size for name, size in sizes.items() if name not in (MANIFEST, f".{MANIFEST}.part")}


def share(listings: Sequence[Listing], of_rank: int) -> list[str]:
    """Which files rank `of_rank` reads: on each disk every file has one reader, and the readers have about as much to read.

    A file goes to a rank that has seen it: on a shared file system one may see another's files later than that one.
    """
    disk = listings[of_rank][0]
    seen = {reader: files for reader, (where, files) in enumerate(listings) if where == disk}
    sizes = {name: size for files in seen.values() for name, size in files.items()}
    load, mine = dict.fromkeys(seen, 0), []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        reader = min((reader for reader in seen if name in seen[reader]), key=lambda reader: (load[reader], reader))
        load[reader] += sizes[name]
        if reader == of_rank:
            mine.append(name)
    return mine


def checksum(path: Path) -> str:
    """The XXH3 checksum of a whole file, 128 bits in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def gathered(value: Any) -> list[Any]:
    """`value` of every rank, by rank; a collective call."""
    import torch.distributed as dist  # takes seconds, and most readers of a manifest are alone

    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def rank() -> int:
    """This process's place in `gathered`."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _entry(path: Path) -> dict[str, Any]:
    _flush(path)
    return {"bytes": path.stat().st_size, CHECKSUM: checksum(path)}


def _difference(path: Path, expected: str) -> str | None:
    try:
        return None if checksum(path) == expected else f"{path} is damaged: its checksum is not the manifest's"
    except OSError as error:
        return f"{path} can't be read ({error.strerror})"


def _flush(path: Path) -> None:
    """Have a file's contents, or a folder's names, written to the disk: a machine may fail where a process is not killed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk(each_node: bool) -> str:
    return platform.node() if each_node else "shared"
