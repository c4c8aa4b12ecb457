"""Checkpoints of a run: the manifest that completes one, and the reasons why no run can resume from one.

`manifest.json` holds the size and the checksum of every file of a checkpoint. It is written last, so a checkpoint that
has a manifest was written to its end by every rank. Sizes are compared at once. Checksums need every byte, so each rank
reads a share of the files. With `save_on_each_node` every node has a disk and a manifest of its own.

A checkpoint without a manifest is one of ours that was cut off, or was written by another trainer. The files of another
trainer are compared with their own headers.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import xxhash

from grpo_recipes.process.ranks import gather, rank
from grpo_recipes.runs import files
from grpo_recipes.runs.files import INTEGER, INTEGER_OR_NULL, RECORD, TEXT, RunError, Shape, read_object
from grpo_recipes.runs.weights import ADAPTER_CONFIG, INDICES, check_weight_file, check_weight_files, nonfinite_tensor
from grpo_rewards.errors import UserError, sentence
from grpo_rewards.files import MODEL_JSON, UnreadableFile, parse_json, read_text

MANIFEST = "manifest.json"
ANOTHER = "name another checkpoint"
"""Fix for a damaged checkpoint, in error messages."""
CHECKSUM = "xxh3_128"
SAFETENSORS = ".safetensors"
SHAPE: Shape = {
    "step": INTEGER,
    "num_processes": INTEGER,
    "model_only": files.FLAG,
    "files": {"*?": {"bytes": INTEGER, CHECKSUM: TEXT}},
    "identity?": {
        "rows": INTEGER_OR_NULL,
        "columns": {"*?": TEXT},
        "weights": {"*?": {"*?": TEXT}},
        "rewards": {"*?": TEXT},
        "tools?": {"*?": TEXT},
        "versions": {"*?": TEXT},
    },
    CHECKSUM: TEXT,
}

RESUMED_JSON = (*MODEL_JSON, *INDICES, ADAPTER_CONFIG, "logged.json", "prompts.json")
"""JSON files of a checkpoint that a resume reads, those of `training/saving.py` and `prompt_sampler.py` included."""

Listing = tuple[str, Mapping[str, int]]
"""Name of the disk that a rank sees, and the size of each file of the checkpoint on that disk."""


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint."""

    step: int
    num_processes: int
    model_only: bool
    """True if saved with `save_only_model`: without optimizer and random state, so that no run can resume from it."""
    files: Mapping[str, Mapping[str, Any]]
    """Size and checksum of each file, by its path inside the checkpoint."""
    identity: Mapping[str, Any] | None = None
    """Data, weights and rewards that the steps read (`identity.identify`), or None if they are not identified."""

    def text(self) -> str:
        """Return the text of the file, which ends with a checksum of itself, so that damage to it is noticed too."""
        content = {**vars(self), "files": dict(sorted(self.files.items()))}
        if self.identity is None:
            del content["identity"]
        content[CHECKSUM] = xxhash.xxh3_128(json.dumps(content).encode()).hexdigest()
        return json.dumps(content, indent=1) + "\n"


def write_manifest(checkpoint: Path, manifest: Manifest, *, each_node: bool, writes: bool) -> None:
    """Flush the files of a checkpoint to the disk and write the manifest that lists them. Collective.

    Args:
        checkpoint: folder into which every rank has written its files.
        manifest: manifest without its files.
        each_node: True if each node has a disk of its own.
        writes: True on the first of the ranks that share a disk, which writes the manifest.
    """
    gather(None)  # every rank has closed its files
    disk = _disk(each_node)
    listings = gather((disk, files_in(checkpoint)))
    entries = {}
    for name in share(listings, rank()):
        files.flush(checkpoint / name)
        entries[name] = {"bytes": (checkpoint / name).stat().st_size, CHECKSUM: checksum(checkpoint / name)}
    parts = gather(entries)
    if writes:
        all_entries: dict[str, Mapping[str, Any]] = {}
        for (where, _), part in zip(listings, parts, strict=True):
            if where == disk:
                all_entries.update(part)
        files.write_atomically(checkpoint / MANIFEST, replace(manifest, files=all_entries).text())
        files.flush(checkpoint / MANIFEST)
        files.flush(checkpoint)
    gather(None)  # nothing is removed before every disk has its manifest


def read_manifest(checkpoint: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, or None if it has none. Raises `RunError` if the manifest is damaged."""
    path = checkpoint / MANIFEST
    try:
        text = read_text(path)
        content: Any = parse_json(path, text) if text else None
    except FileNotFoundError:
        return None
    except UnreadableFile as error:
        raise RunError(path, f"it is damaged: {error.problem}", ANOTHER) from error
    if not text:
        raise RunError(path, "it is empty", ANOTHER)
    if files.mismatch(content, SHAPE) is None:
        manifest = Manifest(**{field.name: content.get(field.name) for field in fields(Manifest)})
        # The text ends with its checksum, so equal texts mean an undamaged manifest.
        if manifest.text() == text:
            return manifest
    raise RunError(path, "it is damaged: its own checksum differs", ANOTHER)


def size_damage(checkpoint: Path, manifest: Manifest) -> RunError | None:
    """Return an error of the first file that is missing or has another size than in the manifest, or None."""
    for name, entry in manifest.files.items():
        path, expected = checkpoint / name, entry["bytes"]
        if not path.is_file():
            return RunError(path, "it is missing", ANOTHER)
        size = path.stat().st_size
        if size == 0 and expected:
            return RunError(path, "it is empty", ANOTHER)
        if size != expected:
            state = "cut off" if size < expected else "damaged"
            return RunError(path, f"it is {state}: it has {size:,} bytes, and the manifest lists {expected:,}", ANOTHER)
    return None


def content_damage(checkpoint: Path, manifest: Manifest | None, *, each_node: bool) -> RunError | None:
    """Return an error of a file whose contents differ from the manifest or are not finite, or None. Collective.

    All ranks agree, and each rank reads a share of the files. Without a manifest only weights are read.
    """
    if manifest is not None:
        sizes = {name: entry["bytes"] for name, entry in manifest.files.items()}
    else:
        sizes = {name: size for name, size in files_in(checkpoint).items() if name.endswith(SAFETENSORS)}
    listings = gather((_disk(each_node), sizes))
    found = None
    for name in share(listings, rank()):
        if found is None and manifest is not None:
            found = _difference(checkpoint / name, manifest.files[name][CHECKSUM])
        if found is None and name.endswith(SAFETENSORS):
            found = _nonfinite(checkpoint / name)
    return next(filter(None, gather(found)), None)


def files_in(checkpoint: Path) -> dict[str, int]:
    """Return the size of each file of a checkpoint except the manifest, by its path inside the checkpoint."""
    sizes = {}
    for path in checkpoint.rglob("*"):
        name = path.relative_to(checkpoint).as_posix()
        if path.is_file() and name not in (MANIFEST, f".{MANIFEST}.part"):
            sizes[name] = path.stat().st_size
    return sizes


def share(listings: Sequence[Listing], reader: int) -> list[str]:
    """Return the files that rank `reader` reads. On each disk every file has one reader, and the loads are about equal.

    A file goes to a rank that lists it: on a shared file system a rank may see another rank's files only later.
    """
    disk = listings[reader][0]
    seen = {number: listed for number, (where, listed) in enumerate(listings) if where == disk}
    sizes: dict[str, int] = {}
    for listed in seen.values():
        sizes.update(listed)
    load: Counter[int] = Counter()
    mine = []
    # Every rank computes the shares of all ranks, so the order may not depend on the order of a listing.
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        candidates = [number for number in seen if name in seen[number]]
        chosen = min(candidates, key=lambda number: (load[number], number))
        load[chosen] += sizes[name]
        if chosen == reader:
            mine.append(name)
    return mine


def checksum(path: Path) -> str:
    """Return the XXH3 checksum of a file, 128 bits in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _difference(path: Path, expected: str) -> RunError | None:
    try:
        if checksum(path) == expected:
            return None
    except OSError as error:
        return RunError(path, f"it can't be read ({error.strerror})", ANOTHER)
    return RunError(path, "it is damaged: its checksum is not the manifest's", ANOTHER)


def _nonfinite(path: Path) -> RunError | None:
    try:
        tensor = nonfinite_tensor(path)
    except RunError:  # a damaged file: the checksum shows it, or transformers does when it loads another trainer's
        return None
    return RunError(path, f"it holds NaN or infinity (in {tensor})", ANOTHER) if tensor is not None else None


def _disk(each_node: bool) -> str:
    return platform.node() if each_node else "shared"


@dataclass(frozen=True)
class Rejected:
    """A checkpoint from which no run can resume."""

    path: Path
    damage: UserError
    """Error of the checkpoint or of one of its files."""
    cut_off: bool
    """True if the checkpoint was never complete, so that nothing is lost with it."""

    @property
    def reason(self) -> str:
        """Clause that names the checkpoint or one of its files."""
        return sentence(self.damage.place, self.damage.problem, "")

    @property
    def aside(self) -> Path:
        """Path to rename the checkpoint to, so that neither a resume nor the rotation counts it.

        transformers pushes no folder whose name begins with `checkpoint-`.
        """
        return self.path.with_name(f"{self.path.name}-{'incomplete' if self.cut_off else 'damaged'}")


def rejection(checkpoint: Path, num_processes: int) -> Rejected | None:
    """Return why no run can resume from a checkpoint, or None if one can. Only names, sizes and headers are read."""
    try:
        manifest = read_manifest(checkpoint)
    except RunError as error:
        return Rejected(checkpoint, error, cut_off=False)
    if manifest is not None:
        damage = size_damage(checkpoint, manifest) or description_damage(checkpoint)
    elif is_of_ours(checkpoint.parent) or not is_complete(checkpoint, num_processes):
        damage = RunError(checkpoint, "it was cut off while it was being saved", ANOTHER)
        return Rejected(checkpoint, damage, cut_off=True)
    else:
        damage = checkpoint_damage(checkpoint) or description_damage(checkpoint)
    return Rejected(checkpoint, damage, cut_off=False) if damage else None


def is_of_ours(folder: Path) -> bool:
    """Return True if the checkpoints in a folder, renamed ones included, are written with manifests."""
    return (folder / RECORD).is_file() or any(folder.glob(f"checkpoint-*/{MANIFEST}"))


def is_complete(checkpoint: Path, num_processes: int) -> bool:
    """Return True if another trainer of `num_processes` ranks wrote a checkpoint without a manifest to its end.

    Each rank writes its random state after its part of the model and the optimizer. The first rank then writes
    `trainer_state.json` (`Trainer._save_checkpoint`). If these files are complete, so are the others.
    """
    names = ["rng_state.pth"]
    if num_processes > 1:
        names = [f"rng_state_{rank}.pth" for rank in range(num_processes)]
    try:
        for name in names:
            check_weight_file(checkpoint / name)
    except RunError:
        return False
    return has_state(checkpoint)


def has_state(checkpoint: Path) -> bool:
    """Return True if a checkpoint has an undamaged `trainer_state.json`, which transformers writes last."""
    try:
        _read_state(checkpoint, {})
    except (FileNotFoundError, RunError):
        return False
    return True


def steps_done(checkpoint: Path) -> int:
    """Return the optimizer step after which a complete checkpoint was saved. Raises `RunError` if no file has it."""
    manifest = read_manifest(checkpoint)
    return _read_state(checkpoint, {"global_step": files.STEP})["global_step"] if manifest is None else manifest.step


def _read_state(checkpoint: Path, shape: Shape) -> dict[str, Any]:
    return read_object(checkpoint / "trainer_state.json", shape, most=files.STATE_BYTES)


def description_damage(checkpoint: Path) -> RunError | None:
    """Return an error of the JSON files that a resume reads (without the log of metrics), or None.

    Other JSON files are ignored: a script may keep its own there, of any form and size.
    """
    for file in sorted([*(checkpoint / name for name in RESUMED_JSON), *checkpoint.glob(f"*/{ADAPTER_CONFIG}")]):
        try:
            read_object(file, {})
        except FileNotFoundError:
            continue
        except RunError as error:
            return error
    return None


def checkpoint_damage(checkpoint: Path) -> RunError | None:
    """Return what is wrong with the files of a complete checkpoint of another trainer, or None.

    Model files that DeepSpeed or FSDP split over ranks are not checked, because they have their own formats.
    """
    patterns = ("*.pt", "*.pth", "*.safetensors", "*.bin")
    try:
        for file in sorted(path for pattern in patterns for path in checkpoint.glob(pattern)):
            if file.name != "training_args.bin":  # not read by a resume
                check_weight_file(file)
        if not any(checkpoint.glob("global_step*")) and not any(checkpoint.glob("*_fsdp*")):
            check_weight_files(checkpoint)
            # Without these files transformers starts a new optimizer and a new schedule, without a warning.
            for name in ("optimizer", "scheduler"):
                if not any((checkpoint / f"{name}{suffix}").is_file() for suffix in (".pt", ".bin")):
                    return RunError(checkpoint / f"{name}.pt", "it is missing", ANOTHER)
    except RunError as error:
        return error
    return None


def numbered(folder: Path, suffix: str = "") -> Iterator[Path]:
    """Yield the checkpoints of a run's folder whose names end in `suffix`, incomplete ones included, in any order."""
    for path in folder.glob("checkpoint-*"):
        if re.fullmatch(rf"checkpoint-\d+{suffix}", path.name):
            yield path


def step_in_name(checkpoint: Path) -> int:
    """Return the optimizer step in the name of one of the `numbered` checkpoints."""
    return int(checkpoint.name.split("-")[1])


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step of a checkpoint: that in its name, or in its state if it was renamed."""
    return step_in_name(checkpoint) if re.fullmatch(r"checkpoint-\d+", checkpoint.name) else steps_done(checkpoint)
