"""Whether the weight files in a folder are all there and whole, told from their headers: nothing is loaded.

A safetensors file begins with its header's length (8 bytes, little endian) and the header, which says where each tensor
ends: a file that is cut off, or that was never downloaded, differs from that in size.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any
from grpo_rewards.errors import UserError

# As `from_pretrained` looks for them: whole files, then indices, which name shards.
WHOLE = ("model.safetensors", "pytorch_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")

LFS_POINTER = b"version https://git-lfs"
PICKLE = b"\x80"  # torch.save before it wrote zip files


class WeightFileError(UserError):
    """Weights that are missing or damaged, in one sentence that names the file and what is wrong with it."""


def check_weight_files(folder: Path) -> None:
    """Raise `WeightFileError` unless `folder` holds a model's or an adapter's weights, every file of them whole."""
    for file in weight_files(folder):
        check_weight_file(file)


def weight_files(folder: Path) -> list[Path]:
    """The files that loading `folder` reads weights from: an adapter's, a model's, or the shards that an index names.

    Raises `WeightFileError` if there are none, or the index can't be read.
    """
    is_adapter = (folder / "adapter_config.json").is_file()
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
    if not file.is_file():
        raise WeightFileError(f"{file} is missing")
    with file.open("rb") as opened:
        start = opened.read(len(LFS_POINTER))
    if not start:
        raise WeightFileError(f"{file} is empty")
    if start == LFS_POINTER:
        raise WeightFileError(f"{file} is a git-lfs pointer, not the weights: run `git lfs pull` there")
    if file.suffix == ".safetensors":
        _check_safetensors(file)
    # torch.save writes a zip file, whose directory comes last: a file cut short is none.
    elif not zipfile.is_zipfile(file) and not start.startswith(PICKLE):
        raise WeightFileError(f"{file} is cut off or damaged ({file.stat().st_size:,} bytes)")


def _check_safetensors(file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > size - 8:
            raise WeightFileError(f"{file} is cut off in its header, or no safetensors file ({size:,} bytes)")
        header = opened.read(length)
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"]
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise WeightFileError(f"{file} is damaged: its header can't be read") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        state = "cut off" if size < expected else "damaged"
        raise WeightFileError(f"{file} is {state}: it has {size:,} bytes, and its header tells of {expected:,}")


def _shards(index: Path) -> list[str]:
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        return sorted(set(content["weight_map"].values()))
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise WeightFileError(f"{index} is damaged: it can't be read as an index of weights") from error
