"""Bounded reading of files, and atomic writing.

A file must be a regular one, because reading a pipe or a device may never end, and JSON has a largest size. Every other
fault of a JSON file also ends in one sentence.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from grpo_rewards.errors import UserError

JSON_BYTES = 1 << 26
"""Size of the largest JSON file that is read. run.json takes 20 kB a launch, a large tokenizer.json 35 MB."""

MODEL_JSON = (
    "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "processor_config.json", "preprocessor_config.json", "tokenizer.json",
)  # fmt: skip
"""Files with a JSON object that are read with the weights when a model or its tokenizer is loaded."""


class UnreadableFile(UserError):
    """File that is not regular, is too large, or has the wrong content. The place is its path."""


def open_ordinary(path: Path, most: int | None = None) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: path of the file; links are followed.
        most: largest size in bytes; None for any size.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableFile: the path is a folder, a pipe or a device, the file is too large, or it can't be opened.
    """
    try:
        status = path.stat()
        file = path.open("rb") if stat.S_ISREG(status.st_mode) else None
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        reason = getattr(error, "strerror", None) or error
        raise UnreadableFile(path, f"it can't be opened ({reason})", "correct the path or its permissions") from error
    if file is None:
        raise UnreadableFile(path, "it is not a regular file", "name a regular file")
    if most is not None and status.st_size > most:
        file.close()
        problem = f"it has {status.st_size:,} bytes, and at most {most:,} are read"
        raise UnreadableFile(path, problem, "name a smaller file")
    return file


def read_text(path: Path, most: int = JSON_BYTES) -> str:
    """Return the UTF-8 text of a regular file of at most `most` bytes. Raises as `open_ordinary` does."""
    with open_ordinary(path, most) as file:
        try:
            return file.read().decode("utf-8")
        except OSError as error:
            raise UnreadableFile(path, f"it can't be read ({error.strerror or error})", "restore it") from error
        except UnicodeDecodeError as error:
            raise UnreadableFile(path, f"it is not UTF-8 text (byte {error.start + 1})", "save it as UTF-8") from error


def read_json(path: Path, most: int = JSON_BYTES) -> Any:
    """Return the value in a JSON file of at most `most` bytes. Raises as `read_text` and `parse_json` do."""
    return parse_json(path, read_text(path, most))


def parse_json(path: Path, text: str) -> Any:
    """Return the JSON value of a file's text. Raise `UnreadableFile` if the text is not JSON."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UnreadableFile(path, "it can't be read as JSON (it is nested too deeply)", "flatten it") from error
    except ValueError as error:  # a JSONDecodeError, or a number with too many digits
        raise UnreadableFile(path, f"it can't be read as JSON ({error})", "correct it") from error


def check_model_files(folder: Path) -> None:
    """Raise `UnreadableFile` if a file in `MODEL_JSON` exists and is not a JSON object."""
    for name in MODEL_JSON:
        with suppress(FileNotFoundError):
            if not isinstance(read_json(folder / name), dict):
                raise UnreadableFile(folder / name, "it is not a JSON object", "download it again")


def expanded(path: str | Path) -> Path:
    """Return `path` with the home of a user in place of a leading `~` or `~user`, or unchanged without such a user."""
    try:
        return Path(os.path.expanduser(path))  # `Path.expanduser` raises `RuntimeError` for an unknown user
    except ValueError:  # no user's name has a NUL or half of a surrogate pair
        return Path(path)


def relative_to(path: str | Path) -> str:
    """Return a clause for messages on a missing file: the folder in which a relative path begins, or ""."""
    return "" if expanded(path).is_absolute() else f" (relative to {Path.cwd()})"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file to write. It replaces `path` if the block succeeds and is removed if the block fails.

    A symbolic link at `path` is replaced, not followed. A link at the temporary file's name is removed first. The
    caller is responsible for the folder. The file gets the mode of a new file, also if the block replaces it by one
    that only its owner may read, as safetensors does.
    """
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    try:
        mode = _create(part)
        yield part
        if stat.S_IMODE(part.stat().st_mode) != mode:
            part.chmod(mode)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _create(path: Path) -> int:
    """Create an empty file, and return the mode that umask and folder give it. Raises `FileExistsError`."""
    # O_EXCL fails if something appeared at this name meanwhile. A plain open for writing would follow a dangling link
    # to a file of somebody else's choice.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        return stat.S_IMODE(os.fstat(descriptor).st_mode)
    finally:
        os.close(descriptor)


def give_default_mode(folder: Path, pattern: str = "*") -> None:
    """Give the files in a folder whose names match `pattern` the mode of a new file.

    safetensors 0.8 and `tempfile` make files that only their owner may read. The umask is taken from a new file,
    because reading it from the process would change it for all threads.
    """
    probe = folder / f".{os.getpid()}.mode"
    try:
        mode = _create(probe)
    finally:
        probe.unlink(missing_ok=True)
    for file in folder.glob(pattern):
        if file.is_file() and not file.is_symlink():
            with suppress(PermissionError):  # a file of another user
                file.chmod(mode)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the former content or all of the new one."""
    with replacing(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
