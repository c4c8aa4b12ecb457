"""Weight files of a model or an adapter on disk: which files they are, whether they are complete, and their identity.

No tensor is loaded, except to look for NaN. safetensors compares the size of a file with the offsets in its header.
`torch.save` writes a zip file, which has its directory at the end with a checksum of each tensor, so a file that was
cut off has no directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from grpo_recipes.runs.files import ADAPTER, Condition, RunError, mismatch, read_object
from grpo_rewards.errors import one_line
from grpo_rewards.files import UnreadableFile, check_model_files, open_ordinary, parse_json, read_json

if TYPE_CHECKING:
    from peft import PeftConfig

# Names in the order in which `from_pretrained` looks for them: single files, then indices, which name shards.
SINGLE = ("model.safetensors", "pytorch_model.bin")
INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
ADAPTER_CONFIG = "adapter_config.json"

LFS_POINTER = b"version https://git-lfs"
PICKLE = b"\x80"
"""First byte of a file that torch saved before it wrote zip files."""

END_BYTES = 1 << 20
"""Bytes at either end of a weight file that are a part of its identity."""
TENSOR_BYTES = 1 << 12
"""Bytes at the start of each tensor in a safetensors file that are a part of the file's identity."""

EXPONENTS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000), "F64": ("<u8", 0x7FF << 52)}
"""Integer type and exponent bits of each dtype of safetensors. Only NaN and infinity have all exponent bits set."""
CHUNK = 1 << 18
"""Values that are looked at together."""

AGAIN = "copy or download the folder again"
"""Fix for damaged files of a model, in error messages."""

SHARD = Condition("the name of a file in the same folder", lambda value: isinstance(value, str) and _is_name(value))


def check_weight_files(folder: Path) -> None:
    """Raise `RunError` unless `folder` holds the complete weight files of a model or an adapter."""
    for file in weight_files(folder):
        check_weight_file(file)


def check_descriptions(folder: Path) -> None:
    """Raise `RunError` if a JSON file that loading the model in `folder` reads is damaged. It may be missing."""
    try:
        check_model_files(folder)
    except UnreadableFile as error:
        raise RunError(error.place, error.problem, AGAIN) from error
    with contextlib.suppress(FileNotFoundError):
        read_object(folder / ADAPTER_CONFIG, ADAPTER, AGAIN)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that loading `folder` reads: of an adapter, of a model, or the shards in an index.

    Raises:
        RunError: there are none, or the index is damaged.
    """
    is_adapter = (folder / ADAPTER_CONFIG).exists()  # a pipe or a device too: the reader of the file refuses it by name
    for name in ADAPTER_WEIGHTS if is_adapter else SINGLE:
        if (folder / name).is_file():
            return [folder / name]
    if is_adapter:
        raise RunError(folder, f"it has no weights of an adapter: {' or '.join(ADAPTER_WEIGHTS)} is missing", AGAIN)
    for name in INDICES:
        if (folder / name).is_file():
            return [folder / shard for shard in _shards(folder / name)]
    raise RunError(folder, f"it has no weights of a model: {SINGLE[0]} or {INDICES[0]} is missing", AGAIN)


def check_weight_file(file: Path) -> None:
    """Raise `RunError` if a file of weights, or of another state that torch saved, is missing or incomplete."""
    with _opened(file) as opened:
        start = opened.read(len(LFS_POINTER))
        is_zip = zipfile.is_zipfile(opened)
    if not start:
        raise RunError(file, "it is empty", AGAIN)
    if start == LFS_POINTER:
        raise RunError(file, "it is a git-lfs pointer, not the weights", "run `git lfs pull` there")
    if file.suffix == ".safetensors":
        _check_safetensors(file)
    elif is_zip:
        try:
            with _opened(file) as opened, zipfile.ZipFile(opened):
                pass
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise RunError(file, f"it is damaged: its directory can't be read ({error})", AGAIN) from error
    elif not start.startswith(PICKLE):
        raise RunError(file, f"it is cut off or damaged ({file.stat().st_size:,} bytes)", AGAIN)


def _check_safetensors(file: Path) -> None:
    # safe_open maps the file into memory and reads the header only.
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise RunError(file, f"it is cut off or damaged ({file.stat().st_size:,} bytes): {reason}", AGAIN) from error
    except MemoryError as error:  # the process may use less address space than the file has bytes
        problem = f"it can't be mapped into memory ({file.stat().st_size:,} bytes): {error}"
        raise RunError(file, problem, "raise the limit of the process (`ulimit -v`)") from error


def _shards(index: Path) -> list[str]:
    """Return the names of the shards in an index of weights. Every shard lies in the folder of the index."""
    try:
        content = read_json(index)
        problem = mismatch(content, {"weight_map": {"*?": SHARD}})
    except UnreadableFile as error:
        problem = error.problem
    if problem is not None:
        raise RunError(index, f"it can't be read as an index of weights ({problem})", AGAIN)
    if not content["weight_map"]:
        raise RunError(index, "it names no file of weights", AGAIN)
    return sorted(set(content["weight_map"].values()))


def _is_name(name: str) -> bool:
    """Return True if a path leads to a file inside the folder that it is relative to."""
    path = PurePosixPath(name)
    is_inside = path.name != "" and not path.is_absolute() and ".." not in path.parts
    return is_inside and len(name) < 256 and "\0" not in name


def _opened(file: Path) -> BinaryIO:
    """Open a weight file. Raises `RunError` if it is missing, or is a pipe, a device or a folder."""
    try:
        return open_ordinary(file)
    except FileNotFoundError as error:
        raise RunError(file, "it is missing", AGAIN) from error
    except UnreadableFile as error:
        raise RunError(error.place, error.problem, error.fix) from error


def identify_weights(file: Path) -> str:
    """Return a SHA-256 of a weight file's size and of parts of it, which avoids reading the entire file.

    The first MiB is often a part of an embedding, which training may leave unchanged. The header and the start of each
    tensor of a safetensors file are therefore hashed too, and the last MiB of a zip file with its directory.

    Raises:
        RunError: the file is missing or damaged.
    """
    with _opened(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        digest.update(opened.read(END_BYTES))
        if file.suffix == ".safetensors":
            _check_safetensors(file)  # the offsets below are inside the file
            header, data = _header(file, opened)
            digest.update(json.dumps(header).encode())
            for start, end in sorted(entry["data_offsets"] for entry in header.values()):
                opened.seek(data + start)
                digest.update(opened.read(min(TENSOR_BYTES, end - start)))
        else:
            opened.seek(max(0, size - END_BYTES))
            digest.update(opened.read(END_BYTES))
    return digest.hexdigest()


def _header(file: Path, opened: BinaryIO) -> tuple[Mapping[str, Any], int]:
    """Return the entries of a safetensors file by the tensor's name, and the position of its first value.

    The file's metadata is left out.
    """
    opened.seek(0)
    length = int.from_bytes(opened.read(8), "little")
    try:
        header = parse_json(file, opened.read(length).decode())
    except UnreadableFile as error:
        raise RunError(file, f"it is damaged: its header {error.problem}", AGAIN) from error
    header.pop("__metadata__", None)
    return header, 8 + length


def check_finite_files(folder: Path) -> None:
    """Raise `RunError` if a safetensors file of a model or an adapter holds a NaN or an infinity. Reads every value."""
    for file in weight_files(folder):
        if file.suffix == ".safetensors" and (tensor := nonfinite_tensor(file)) is not None:
            problem = f"it holds NaN or infinity (in {tensor})"
            raise RunError(file, problem, "name an earlier checkpoint or another model")


def nonfinite_tensor(file: Path) -> str | None:
    """Return the name of the first tensor of a safetensors file with a NaN or an infinity, or None. Reads every value.

    numpy has no bfloat16, so the bits are compared.

    Raises:
        RunError: the file is missing or damaged.
    """
    with _opened(file) as opened:
        _check_safetensors(file)
        header, data = _header(file, opened)
        for name, entry in header.items():
            if entry["dtype"] not in EXPONENTS:
                continue
            integer, exponent = EXPONENTS[entry["dtype"]]
            start, end = entry["data_offsets"]
            opened.seek(data + start)
            left = (end - start) // np.dtype(integer).itemsize
            while left > 0:
                bits = np.fromfile(opened, integer, min(CHUNK, left))
                if (bits & exponent).max() == exponent:
                    return str(name)
                left -= CHUNK
    return None


def holds_adapter(folder: str | Path) -> bool:
    """Return True if a folder holds an adapter, as far as its files show."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def adapter_config(where: str | Path, revision: str = "main") -> PeftConfig | None:
    """Return the configuration of the adapter in a folder or hub repository, or None if there is no adapter.

    Raises:
        RunError: a folder has an adapter configuration that can't be read.
    """
    file, fix = Path(where) / ADAPTER_CONFIG, "copy or download the adapter again"
    if is_local := Path(where).is_dir():
        try:
            read_object(file, ADAPTER, fix)
        except FileNotFoundError:
            return None
    from peft import PeftConfig  # takes seconds

    try:
        return PeftConfig.from_pretrained(str(where), revision=revision)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if is_local:
            raise RunError(file, f"peft can't read it ({type(error).__name__}: {one_line(error)})", fix) from error
        return None


def adapter_kind(config: PeftConfig) -> str:
    """Return PEFT's name of an adapter's kind, such as LORA."""
    from peft import PeftType  # takes seconds

    return PeftType(config.peft_type).value


def tokenizer_source(name: str) -> str:
    """Return the folder or hub id of the tokenizer for `name`: its base for an adapter folder without a tokenizer."""
    if not holds_adapter(name) or (Path(name) / "tokenizer_config.json").is_file():
        return name
    config = adapter_config(name)
    return name if config is None else config.base_model_name_or_path or name
