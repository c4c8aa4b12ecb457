"""Which checkpoints and models on disk are complete and whole, and what identifies their weights: nothing is loaded.

A safetensors file begins with its header's length (8 bytes, little endian) and the header, which says where each tensor
ends: a file that is cut off, or that was never downloaded, differs from that in size. torch.save writes a zip file, whose
directory comes last: a file that is cut off has none. A checkpoint of ours has a manifest, which says more (`manifest.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from grpo_recipes.runs import manifest as manifests
from grpo_recipes.runs.branches import branch_of, last_launch, numbered
from grpo_recipes.runs.files import ADAPTER as ADAPTER_SHAPE
from grpo_recipes.runs.files import (
    RECORD,
    STATE_BYTES,
    STEP,
    Kind,
    RunError,
    Shape,
    mismatch,
    read_object,
)
from grpo_recipes.runs.manifest import MANIFEST, CheckpointDamaged, read_manifest, size_damage
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.files import (
    LARGE_BYTES,
    SMALL_JSON,
    UnreadableFile,
    check_model_files,
    open_ordinary,
    parse_json,
    read_json,
)

if TYPE_CHECKING:
    from peft import PeftConfig

# As `from_pretrained` looks for them: whole files, then indices, which name shards.
WHOLE = ("model.safetensors", "pytorch_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")

ADAPTER_CONFIG = "adapter_config.json"

# JSON that a resume reads from a checkpoint, with those of `runs/saving.py` and `training/prompt_sampler.py`.
RESUMED_JSON = (*SMALL_JSON, *INDICES, ADAPTER_CONFIG, "logged.json", "prompts.json")

LFS_POINTER = b"version https://git-lfs"
PICKLE = b"\x80"  # torch.save before it wrote zip files

# How much of a weight file, and of each of its tensors, is read to identify it.
HEAD_BYTES, TENSOR_BYTES = 1 << 20, 1 << 12

DIRECTORY_BYTES = 1 << 24
"""Largest directory of a zip file that is read: torch writes some 100 bytes a tensor."""

MOST_BYTES = 1 << 62
"""Bound on a place in a file, above which it is no place in any file."""

SHARD = Kind("the name of a file in the same folder", lambda value: isinstance(value, str) and _is_name(value))


class WeightFileError(UserError):
    """Weights that are missing or damaged, in one sentence that names the file and what is wrong with it."""


def check_weight_files(folder: Path) -> None:
    """Raise `WeightFileError` unless `folder` holds a model's or an adapter's weights, every file of them whole."""
    for file in weight_files(folder):
        check_weight_file(file)


def check_descriptions(folder: Path, fix: str = "copy or download the folder again") -> None:
    """Raise `RunError` if loading `folder` would read a file beside the weights that is damaged, or made to do harm.

    Such a file is no ordinary one, too large, or not a JSON object where one is due. Files that are absent are not
    missed.
    """
    try:
        check_model_files(folder)
    except UnreadableFile as error:
        raise RunError(f"{error}; {fix}") from error
    with contextlib.suppress(FileNotFoundError):
        read_object(folder / ADAPTER_CONFIG, ADAPTER_SHAPE, fix)


def weight_files(folder: Path) -> list[Path]:
    """The files that loading `folder` reads weights from: an adapter's, a model's, or the shards that an index names.

    Raises `WeightFileError` if there are none, or the index can't be read.
    """
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    for name in ADAPTER if is_adapter else WHOLE:
        if (folder / name).is_file():
            return [folder / name]
    for name in () if is_adapter else INDICES:
        if (folder / name).is_file():
            return [folder / shard for shard in _shards(folder / name)]
    kind = "adapter" if is_adapter else "model"
    expected = " or ".join(ADAPTER if is_adapter else (WHOLE[0], INDICES[0]))
    raise WeightFileError(f"{folder} has no weights of a{'n' if is_adapter else ''} {kind}: {expected} is missing")


def check_weight_file(file: Path) -> None:
    """Raise `WeightFileError` if a file of weights, or of another state that torch saved, is missing or not whole."""
    with _opened(file) as opened:
        start = opened.read(len(LFS_POINTER))
    if not start:
        raise WeightFileError(f"{file} is empty")
    if start == LFS_POINTER:
        raise WeightFileError(f"{file} is a git-lfs pointer, not the weights: run `git lfs pull` there")
    if file.suffix == ".safetensors":
        _check_safetensors(file)
    elif _zip_entries(file) is None and not start.startswith(PICKLE):
        raise WeightFileError(f"{file} is cut off or damaged ({file.stat().st_size:,} bytes)")


def _check_safetensors(file: Path) -> None:
    size = file.stat().st_size
    length, header = _header(file)
    expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != expected:
        state = "cut off" if size < expected else "damaged"
        raise WeightFileError(f"{file} is {state}: it has {size:,} bytes, and its header tells of {expected:,}")


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return the length of a safetensors file's header, and its entries, one a tensor."""
    with _opened(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if length > size - 8:
            raise WeightFileError(f"{file} is cut off in its header, or no safetensors file ({size:,} bytes)")
        if length > LARGE_BYTES:
            raise WeightFileError(
                f"{file} is damaged, or no safetensors file: its header tells of {length:,} bytes of header, and at most "
                f"{LARGE_BYTES:,} are read"
            )
        content = opened.read(length)
    try:
        header = {name: entry for name, entry in parse_json(file, content).items() if name != "__metadata__"}
        spans = [(start, end) for start, end in (entry["data_offsets"] for entry in header.values())]
        # To read from a place before the file, or a negative number of bytes, would be to read something else, or all of it.
        readable = all(type(start) is type(end) is int and 0 <= start <= end < MOST_BYTES for start, end in spans)
    except UnreadableFile as error:
        raise WeightFileError(f"{file} is damaged: its header {error.problem}") from error
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise WeightFileError(f"{file} is damaged: its header can't be read") from error
    if not readable:
        raise WeightFileError(
            f"{file} is damaged: its header tells of a tensor that ends before it begins, or beyond any file"
        )
    return length, header


def _shards(index: Path) -> list[str]:
    """Return the names of the files that an index of weights names, each of which lies in its folder."""
    try:
        content = read_json(index)
        problem = mismatch(content, {"weight_map": {"*?": SHARD}})
    except UnreadableFile as error:
        problem = error.problem
    if problem is not None:
        raise WeightFileError(f"{index} is damaged: it can't be read as an index of weights ({problem})")
    if not content["weight_map"]:
        raise WeightFileError(f"{index} is damaged: it names no file of weights")
    return sorted(set(content["weight_map"].values()))


def _is_name(name: str) -> bool:
    """Return True if a path leads to a file inside the folder that it is relative to."""
    path = PurePosixPath(name)
    return (
        path.name != "" and not path.is_absolute() and ".." not in path.parts and len(name) < 256 and "\0" not in name
    )


def _opened(file: Path) -> BinaryIO:
    """Open a file of weights. Raises `WeightFileError` if it is missing, or no ordinary file."""
    try:
        return open_ordinary(file)
    except FileNotFoundError as error:
        raise WeightFileError(f"{file} is missing") from error
    except UnreadableFile as error:
        raise WeightFileError(str(error)) from error


def _zip_entries(file: Path) -> list[tuple[str, int]] | None:
    """Return the name and the checksum of each entry in the directory of a zip file; None if it is no zip file.

    Raises `WeightFileError` if the directory is damaged, or larger than a reader of it should hold.
    """
    with _opened(file) as opened:
        if not zipfile.is_zipfile(opened):
            return None
        try:
            with zipfile.ZipFile(_Directory(opened)) as archive:
                return [(entry.filename, entry.CRC) for entry in archive.infolist()]
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise WeightFileError(f"{file} is damaged: its directory can't be read ({error})") from error


class _Directory:
    """A zip file of which no more than `DIRECTORY_BYTES` are read at once: its end says how long its directory is."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes, or all to the end. Raises ValueError if that is too many."""
        content = self._file.read(min(size, DIRECTORY_BYTES + 1) if size >= 0 else DIRECTORY_BYTES + 1)
        if len(content) > DIRECTORY_BYTES:
            raise ValueError(f"more than {DIRECTORY_BYTES:,} bytes")
        return content


def identify_weights(file: Path) -> str:
    """A hash of a weight file's header, its size and its first MiB: the file is not read whole.

    The first MiB is often part of an embedding, which training may leave as it was. So the start of each tensor in a
    safetensors file is hashed too, and the directory of a zip file, which has a checksum of each tensor.
    """
    with _opened(file) as opened:
        digest = hashlib.sha256(str(os.fstat(opened.fileno()).st_size).encode())
        digest.update(opened.read(HEAD_BYTES))
        if file.suffix == ".safetensors":
            header_length, header = _header(file)
            digest.update(json.dumps(header).encode())
            for start, end in sorted(entry["data_offsets"] for entry in header.values()):
                opened.seek(8 + header_length + start)
                digest.update(opened.read(min(TENSOR_BYTES, end - start)))
    if file.suffix != ".safetensors" and (entries := _zip_entries(file)) is not None:
        digest.update(str(entries).encode())
    return digest.hexdigest()


def adapter_config(where: str | Path, revision: str = "main") -> PeftConfig | None:
    """The configuration of the adapter in folder or hub repository `where`; None if that is no adapter.

    Raises `RunError` if a folder has one that can't be read.
    """
    file, fix = Path(where) / ADAPTER_CONFIG, "copy or download the adapter again"
    is_local = Path(where).is_dir()
    if is_local:
        try:
            read_object(file, ADAPTER_SHAPE, fix)
        except FileNotFoundError:
            return None
    from peft import PeftConfig  # takes seconds

    try:
        return PeftConfig.from_pretrained(str(where), revision=revision)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if is_local:
            raise RunError(f"{file}: peft can't read it ({type(error).__name__}: {one_line(error)}); {fix}") from error
        return None


def tokenizer_source(name: str) -> str:
    """Where the tokenizer of model or adapter `name` lies: an adapter folder without one leaves it to its base."""
    if not (Path(name) / ADAPTER_CONFIG).is_file() or (Path(name) / "tokenizer_config.json").is_file():
        return name
    config = adapter_config(name)
    return name if config is None else config.base_model_name_or_path or name


@dataclass(frozen=True)
class Rejected:
    """A checkpoint that no run can go on from, with the reason as a clause that names it."""

    path: Path
    reason: str
    cut_off: bool
    """Whether it was never complete, so that nothing is lost with it."""

    @property
    def aside(self) -> Path:
        """Where it is set aside, so that neither resuming nor the clean-up of old checkpoints counts it."""
        return self.path.with_name(f"{'incomplete' if self.cut_off else 'damaged'}-{self.path.name}")


def last_complete_checkpoint(folder: Path, num_processes: int) -> tuple[Path | None, list[Rejected]]:
    """The newest complete checkpoint in a run's folder, as far as names and sizes tell, and the newer ones that are not."""
    whole, rejected = survey(folder, num_processes)
    newest = whole[0] if whole else None
    return newest, [one for one in rejected if newest is None or step_of(one.path) > step_of(newest)]


def survey(folder: Path, num_processes: int) -> tuple[list[Path], list[Rejected]]:
    """Return the checkpoints that the last launch of a run can go on from, and those that are not whole; newest first.

    Names and sizes decide what is whole. A whole checkpoint that the last launch abandoned is in neither list.
    """
    last = last_launch(folder)
    checkpoints = set(numbered(folder))
    if last.source is not None and has_state(last.source):  # it may lie in another run's folder
        checkpoints.add(last.source)
    whole, rejected = [], []
    for checkpoint in sorted(checkpoints, key=step_of, reverse=True):
        if (branch := branch_of(checkpoint)) and not last.holds(branch, step_of(checkpoint)):
            continue
        if (one := rejection(checkpoint, num_processes)) is not None:
            rejected.append(one)
        elif last.holds(branch, step_of(checkpoint)):
            whole.append(checkpoint)
    return whole, rejected


def abandoned(folder: Path) -> list[Path]:
    """Return the checkpoints in a run's folder that the last launch does not descend from, lowest step first."""
    last = last_launch(folder)
    written = [path for path in numbered(folder) if (path / "trainer_state.json").is_file()]
    return sorted((path for path in written if not last.holds(branch_of(path), step_of(path))), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the optimizer step of a checkpoint: that in its name, or in its state if it was renamed."""
    numbers = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    return int(numbers[1]) if numbers else steps_done(checkpoint)


def rejection(checkpoint: Path, num_processes: int) -> Rejected | None:
    """Why no run can go on from a checkpoint, as far as names and sizes tell; None if one can.

    A checkpoint with a manifest is held against it. One of a run of ours without a manifest was cut off. Any other is of
    another trainer, and its files are held against their own headers.
    """
    try:
        manifest = read_manifest(checkpoint)
    except CheckpointDamaged as error:
        return Rejected(checkpoint, str(error), cut_off=False)
    if manifest is not None:
        damage = size_damage(checkpoint, manifest) or description_damage(checkpoint)
    elif is_of_ours(checkpoint.parent) or not is_complete(checkpoint, num_processes):
        return Rejected(checkpoint, f"{checkpoint.name} was cut off while it was being saved", cut_off=True)
    else:
        damage = checkpoint_damage(checkpoint) or description_damage(checkpoint)
    return Rejected(checkpoint, damage, cut_off=False) if damage else None


def is_of_ours(folder: Path) -> bool:
    """Whether the checkpoints in a folder are written with manifests."""
    return (folder / RECORD).is_file() or any(folder.glob(f"checkpoint-*/{MANIFEST}"))


def unfit(checkpoint: Path, num_processes: int) -> str | None:
    """Why a checkpoint that is whole does not fit a launch of `num_processes` ranks, as a clause; None if it does."""
    manifest = read_manifest(checkpoint)
    if manifest is None:
        return None
    if manifest.model_only:
        return (
            f"{checkpoint} was saved with `save_only_model`, without its optimiser and random state, so no run can go on from "
            "it: name an earlier checkpoint, or start another run from it as its `model_name_or_path`"
        )
    if manifest.num_processes != num_processes:
        return (
            f"{checkpoint} is of {manifest.num_processes} process(es), and this launch has {num_processes}: launch as many "
            "processes as before, or start another run from it as its `model_name_or_path`"
        )
    return None


def newest_confirmed(checkpoints: Sequence[Path], *, each_node: bool) -> tuple[Path | None, list[Rejected]]:
    """The first of `checkpoints` whose contents its manifest confirms, and those before it; a collective call.

    One without a manifest (another trainer's) counts as confirmed: nothing says what its contents should be.
    """
    # Ranks that see different disks may propose different checkpoints.
    proposed = manifests.gathered([path.name for path in checkpoints])
    rejected: list[Rejected] = []
    for checkpoint in checkpoints:
        if not all(checkpoint.name in names for names in proposed):
            rejected.append(Rejected(checkpoint, f"{checkpoint} is not whole on every machine", cut_off=False))
            continue
        manifest = read_manifest(checkpoint)
        damage = manifest and manifests.content_damage(checkpoint, manifest, each_node=each_node)
        if not damage:
            return checkpoint, rejected
        rejected.append(Rejected(checkpoint, damage, cut_off=False))
    return None, rejected


def is_complete(checkpoint: Path, num_processes: int) -> bool:
    """Whether a checkpoint of `num_processes` ranks without a manifest was written to its end, by another trainer.

    Each rank writes its random state after its part of model and optimiser, and the first rank writes
    `trainer_state.json` after that (`Trainer._save_checkpoint`): if these files are whole, so are the others.
    """
    ranks = [f"rng_state_{rank}.pth" for rank in range(num_processes)] if num_processes > 1 else ["rng_state.pth"]
    return has_state(checkpoint) and all(_is_zip(checkpoint / name) for name in ranks)


def _is_zip(file: Path) -> bool:
    try:
        with open_ordinary(file) as opened:
            return zipfile.is_zipfile(opened)
    except (OSError, UnreadableFile):
        return False


def has_state(checkpoint: Path) -> bool:
    """Whether a checkpoint has the file that transformers writes last, whole."""
    try:
        _read_state(checkpoint, {})
    except (FileNotFoundError, RunError):
        return False
    return True


def steps_done(checkpoint: Path) -> int:
    """The optimiser step that a complete checkpoint was saved after. Raises `RunError` if no file says so."""
    manifest = read_manifest(checkpoint)
    return manifest.step if manifest is not None else _read_state(checkpoint, {"global_step": STEP})["global_step"]


def _read_state(checkpoint: Path, shape: Shape) -> dict[str, Any]:
    """Return a checkpoint's `trainer_state.json`. Raises FileNotFoundError, or `RunError` if it is damaged or too
    large."""
    return read_object(checkpoint / "trainer_state.json", shape, most=STATE_BYTES)


def description_damage(checkpoint: Path) -> str | None:
    """Return what is wrong with the JSON files that going on from a checkpoint reads beside its log, None if nothing
    is.

    A script may keep JSON files of its own there, of any form and size.
    """
    files = [checkpoint / name for name in RESUMED_JSON]
    for file in sorted([*files, *checkpoint.glob(f"*/{ADAPTER_CONFIG}")]):
        try:
            read_object(file, {})
        except FileNotFoundError:
            continue
        except RunError as error:
            return f"{error}"
    return None


def checkpoint_damage(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint without a manifest that was written to its end, or None.

    Model files that DeepSpeed or FSDP split over ranks are not checked: their layout is their own.
    """
    try:
        states = [*checkpoint.glob("*.pt"), *checkpoint.glob("*.pth")]
        for file in sorted([*states, *checkpoint.glob("*.safetensors"), *checkpoint.glob("*.bin")]):
            if file.name != "training_args.bin":
                check_weight_file(file)
        is_split = any(checkpoint.glob("global_step*")) or any(checkpoint.glob("*_fsdp*"))
        if not is_split:
            check_weight_files(checkpoint)
            # Without them transformers starts a new optimiser and a new schedule, without a warning.
            for name in ("optimizer.pt", "scheduler.pt"):
                if not any((checkpoint / name).with_suffix(suffix).is_file() for suffix in (".pt", ".bin")):
                    raise WeightFileError(f"{checkpoint / name} is missing")
    except WeightFileError as error:
        return str(error)
    return None


def set_aside(rejected: Sequence[Rejected]) -> None:
    """Rename checkpoints that no run can go on from; one set aside earlier at the same step is replaced."""
    for one in rejected:
        shutil.rmtree(one.aside, ignore_errors=True)
        one.path.rename(one.aside)
