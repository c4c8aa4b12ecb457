"""Bounded reading of files that may come from a stranger, and atomic writing.

Opening a pipe waits for a writer, a device never ends, and a sparse file of terabytes takes no disk. So a file is
opened without waiting, its descriptor is checked instead of its name, and no byte beyond the bound is read. Nested
brackets cost the JSON parser its stack, and empty ones many times their size in memory, so brackets are counted before
anything is parsed.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from grpo_rewards.errors import UserError

JSON_BYTES = 1 << 25
"""Size of the largest JSON file that is read. run.json takes 20 kB a launch, ten million small numbers 30 MB."""

LARGE_BYTES = 1 << 26
"""Size of the largest tokenizer file and safetensors header that is read. The worst take 1.5 GB as objects."""

LINE_BYTES = 1 << 28
"""Length of the longest line of a file of rows that is read. A file of zeros is one line."""

MAX_DEPTH = 100
"""Number of arrays and objects of a JSON file that may be open at once."""

MAX_CONTAINERS = 2_000_000
"""Number of arrays and objects that a JSON file may have. A tokenizer of 500,000 merges has one for each."""

# Files beside the weights that loading a model or its tokenizer reads: JSON objects, small and large, and others.
SMALL_JSON = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "processor_config.json",
    "preprocessor_config.json",
    "chat_template.json",
)
LARGE_JSON = ("tokenizer.json", "vocab.json")
OTHERS = ("merges.txt", "vocab.txt", "*.model", "*.tiktoken", "*.jinja", "additional_chat_templates/*.jinja")

_CHUNK = 1 << 20


class UnreadableFile(UserError):
    """A file that is not ordinary, is too large, or does not hold what it should.

    Attributes:
        path: path of the file.
        problem: the error message without the path, for an error that adds the fix.
    """

    def __init__(self, sentence: str, path: Path) -> None:
        super().__init__(sentence)
        self.path = path
        self.problem = sentence.removeprefix(f"{path}: ")

    def __reduce__(self) -> tuple[type[UnreadableFile], tuple[str, Path]]:
        """Return both arguments, so that a rank can send the error to others. The default pickles the message only."""
        return type(self), (str(self), self.path)


def open_ordinary(path: Path, most: int | None = None) -> BinaryIO:
    """Open an ordinary file for reading, without ever waiting for a pipe or a device.

    Args:
        path: path of the file; links are followed.
        most: largest size in bytes; None for any size.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableFile: the path is a folder, a pipe, a device or a socket, the file is too large, or it can't be
            opened.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        if _is_other(path):
            raise UnreadableFile(f"{path}: it is no ordinary file", path) from error
        reason = getattr(error, "strerror", None) or error
        raise UnreadableFile(f"{path}: it can't be opened ({reason})", path) from error
    try:
        # Check the descriptor: by now the name may stand for another file.
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableFile(f"{path}: it is no ordinary file", path)
        if most is not None:
            _check_size(path, status.st_size, most)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _is_other(path: Path) -> bool:
    """Return True if the path exists and is not an ordinary file. A socket, for one, can't be opened at all."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def read_bytes(path: Path, most: int = JSON_BYTES, *, is_json: bool = False) -> bytes:
    """Return the content of an ordinary file.

    Args:
        path: path of the file.
        most: largest size in bytes.
        is_json: True to stop at the first zero byte, which no JSON has. A sparse file then costs one chunk, not its
            size.

    Raises:
        FileNotFoundError: there is no such file.
        UnreadableFile: the file is not ordinary, is too large, or can't be read.
    """
    content = bytearray()
    with open_ordinary(path, most) as file:
        try:
            # Read in chunks: the file may grow, and `most` is too much memory to ask for at once.
            while chunk := file.read(min(_CHUNK, most + 1 - len(content))):
                content += chunk
                _check_size(path, len(content), most)
                if is_json and b"\0" in chunk:  # the parser will reject it
                    break
        except OSError as error:
            raise UnreadableFile(f"{path}: it can't be read ({error.strerror or error})", path) from error
    return bytes(content)


def read_text(path: Path, most: int = JSON_BYTES) -> str:
    """Return the UTF-8 text of an ordinary file of at most `most` bytes. Raises as `read_bytes` does."""
    return _decoded(path, read_bytes(path, most))


def read_json(path: Path, most: int = JSON_BYTES) -> Any:
    """Return the value in a JSON file of at most `most` bytes. Raises as `read_bytes` and `parse_json` do."""
    return parse_json(path, read_bytes(path, most, is_json=True))


def parse_json(path: Path, content: bytes) -> Any:
    """Return the JSON value of a file's content.

    Raises:
        UnreadableFile: `content` is not JSON, or has too many or too deeply nested arrays and objects.
    """
    text = _decoded(path, content)
    try:
        _check_structure(content)
        return json.loads(text)
    except (json.JSONDecodeError, _TooMuch, RecursionError) as error:  # RecursionError: little of the stack was left
        problem = str(error)
    except ValueError:
        problem = f"a number has more than {sys.get_int_max_str_digits()} digits"
    raise UnreadableFile(f"{path}: can't be read as JSON ({problem})", path)


def check_model_files(folder: Path) -> None:
    """Raise `UnreadableFile` if loading a model or tokenizer would read a damaged or harmful file.

    A file is rejected if it is not ordinary, too large, or not a JSON object where one is expected. Missing files and
    files of weights are not checked.
    """
    for name in (*SMALL_JSON, *LARGE_JSON):
        with suppress(FileNotFoundError):
            content = read_json(folder / name, LARGE_BYTES if name in LARGE_JSON else JSON_BYTES)
            is_list = isinstance(content, list)
            # The vocabulary of some tokenizers is a list.
            if not isinstance(content, dict) and not (is_list and name == "vocab.json"):
                kind = "a list" if is_list else json.dumps(content)[:40]
                raise UnreadableFile(f"{folder / name}: it is {kind}, not an object", folder / name)
    for pattern in OTHERS:
        for file in sorted(folder.glob(pattern)):
            with suppress(FileNotFoundError):  # a link to nothing
                open_ordinary(file, LARGE_BYTES).close()


def _decoded(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"{path}: it is not UTF-8 text (byte {error.start + 1})", path) from error


def _check_size(path: Path, size: int, most: int) -> None:
    if size > most:
        raise UnreadableFile(f"{path}: it has {size:,} bytes, and at most {most:,} are read", path)


_ESCAPED = re.compile(rb"\\.", re.DOTALL)
_STRING = re.compile(rb'"[\[\]{}]*"')
_STRUCTURE = b'"[]{}'
_NO_STRUCTURE = bytes(set(range(256)) - set(_STRUCTURE))
_CHANGE = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1, ord('"'): 0}


class _TooMuch(ValueError):
    """JSON text with too many or too deeply nested arrays and objects."""


def _check_structure(content: bytes) -> None:
    brackets = _brackets(content)
    if brackets.count(b"[") + brackets.count(b"{") > MAX_CONTAINERS:
        raise _TooMuch(f"it has more than {MAX_CONTAINERS:,} arrays and objects")
    if _depth(brackets) > MAX_DEPTH:
        raise _TooMuch(f"its brackets are nested more than {MAX_DEPTH} deep")


def _brackets(content: bytes) -> bytes:
    """Return the brackets of a JSON text that are outside strings.

    Brackets behind the first fault may be counted wrongly; the parser stops before it gets there.
    """
    if b"\\" in content:
        content = _ESCAPED.sub(b"", content)
    # Without all other characters, a string is a pair of quotes with the brackets of its text in between.
    return _STRING.sub(b"", content.translate(None, _NO_STRUCTURE))


def _depth(brackets: bytes) -> int:
    return max(accumulate(map(_CHANGE.__getitem__, brackets)), default=0)


def nesting_depth(content: bytes) -> int:
    """Return the number of arrays and objects of a JSON text that are open at once."""
    return _depth(_brackets(content))


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
