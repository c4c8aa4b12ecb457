"""Memory-mapped tables: the cache on disk, and limits on size.

No row stays in memory as a Python object after its batch. A table may therefore be larger than memory, and several
processes share its pages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from filelock import FileLock

from grpo_rewards.errors import UserError, one_line, shortened

BATCH = 10_000
"""Number of rows that are read, changed and written at once."""

COLUMNS = 2_000
"""Largest number of columns of a table. `datasets` joins tables in time that is quadratic in it."""

FIELDS = 10_000
"""Largest number of columns and of keys in their objects, all rows together."""

SHOWN = 200
"""Largest number of characters that an error message shows of a row's value."""

IMAGE_COLUMNS = ("image", "images")
"""Columns that TRL takes for images."""

_NAMES, _NAME_CHARACTERS = 20, 60
_MEDIA = ("image", "audio", "video")  # types of content parts, `image_url` and `input_image` among them
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_IMAGE_BYTES = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"RIFF")
_IMAGE_BASE64 = ("iVBORw0KGgo", "/9j/4", "R0lGODlh", "R0lGODdh")  # PNG, JPEG and GIF


def check_columns(count: int, where: object) -> None:
    """Raise `UserError` if a table has more than `COLUMNS` columns. `where` is the table or its file."""
    if count > COLUMNS:
        raise UserError(
            f"`dataset`: {where} has {count:,} columns, and at most {COLUMNS:,} are read: select some of them"
        )


def check_fields(kinds: Iterable[pa.DataType], where: object) -> None:
    """Raise `UserError` if columns of these types, and the objects in them, have more than `FIELDS` keys together."""
    count, waiting = 0, list(kinds)
    while waiting:
        kind = waiting.pop()
        count += 1
        waiting += [kind.field(number).type for number in range(kind.num_fields)]
    if count > FIELDS:
        raise UserError(
            f"`dataset`: the objects in {where} have more than {FIELDS:,} different keys: write them as text (JSON)"
        )


def check_no_images(table: datasets.Dataset, where: object) -> None:
    """Raise `UserError` if a column holds images, as `datasets.Image` stores them, as bytes, base64 or file names.

    `datasets` stores sounds and videos alike. Without the check, a policy of text would be asked about a picture.
    """
    for name in table.column_names:
        if _holds_images(table.data.column(name), is_named=name in IMAGE_COLUMNS):
            raise UserError(
                f"`dataset`: {where} has images or sounds in the column {name!r}, which are not supported: name a "
                "table of text, or columns that need no picture (`columns: [question, answer]`)"
            )


def check_no_image_columns(table: datasets.Dataset | datasets.IterableDataset) -> None:
    """Raise `UserError` if a table for a policy of text has a column that TRL takes for images."""
    for name in table.column_names or ():  # a streamed table may not know its columns
        if name in IMAGE_COLUMNS:
            raise UserError(
                f"`train_dataset` has a column {name!r}, and the policy reads text alone: remove the column, or load a "
                "policy that reads images"
            )


def is_image_part(part: object) -> bool:
    """Return True for a part of a message's content that is an image, a sound or a video."""
    return isinstance(part, Mapping) and str(part.get("type", "")).removeprefix("input_").startswith(_MEDIA)


def _holds_images(column: pa.ChunkedArray, *, is_named: bool) -> bool:
    """Return True if values of a column are images, the values in its lists and objects included."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _holds_images(pc.list_flatten(column), is_named=is_named)
    if pa.types.is_struct(kind):
        keys = [kind.field(number).name for number in range(kind.num_fields)]
        inner = [pc.struct_field(column, number) for number in range(kind.num_fields)]
        if set(keys) == {"bytes", "path"}:
            return any(values.null_count < len(values) for values in inner)
        return any(_holds_images(values, is_named=is_named) for values in inner)
    value = _first_value(column)
    if isinstance(value, bytes):
        return value.startswith(_IMAGE_BYTES)
    if not isinstance(value, str):
        return False
    is_file = is_named and value.lower().endswith(_IMAGE_SUFFIXES)
    return is_file or value.startswith(("data:image/", *_IMAGE_BASE64))


def _first_value(column: pa.ChunkedArray) -> object:
    """Return the first value of a column that is not null, or None."""
    for chunk in column.chunks:
        if chunk.null_count < len(chunk):
            return chunk[pc.index(chunk.is_valid(), True).as_py()].as_py()
    return None


def shown(value: object) -> str:
    """Return a value of a row for an error message, shortened to `SHOWN` characters."""
    return shortened(repr(value), SHOWN)


def reason_of(error: BaseException) -> str:
    """Return the message of a library's error as a clause for ours."""
    return one_line(error).rstrip(".") or type(error).__name__


def listed(names: Iterable[str]) -> str:
    """Return the first names of columns and the number of the others, for an error message."""
    all_names = list(names)
    text = ", ".join(shortened(name, _NAME_CHARACTERS) for name in all_names[:_NAMES])
    more = len(all_names) - _NAMES
    return f"{text} and {more:,} more" if more > 0 else text


# Tables on disk


def fingerprint(*parts: object) -> str:
    """Return the name of the cached table that is made from `parts`. Parts with the same text give the same name."""
    return xxhash.xxh3_128_hexdigest("\0".join(map(str, parts)).encode(errors="surrogatepass"))


def stored(name: str, batches: Callable[[], Iterator[pa.Table]]) -> datasets.Dataset:
    """Return the cached table `name`, written from `batches` (all of one schema) if it does not exist yet.

    One of several processes writes the table, and the others wait for it. Raises `UserError` if the cache is not
    writable.
    """
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "grpo_recipes"
    path = folder / f"{name}.arrow"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                _write(path, batches())
    except OSError as error:
        raise UserError(
            f"`dataset`: {folder} is not writable ({error.strerror or error}): make room, or set HF_DATASETS_CACHE"
        ) from error
    try:
        return datasets.Dataset.from_file(str(path))
    except ValueError as error:  # Arrow cuts a column's name at a NUL, so the table and its schema have different names
        path.unlink(missing_ok=True)
        raise UserError("`dataset`: names of columns have control characters: rename the columns") from error


def _write(path: Path, batches: Iterator[pa.Table]) -> None:
    """Write the batches beside `path` and move the file there, so that `path` never holds half a table."""
    partial_path = path.with_suffix(f".{os.getpid()}")
    try:
        with pa.OSFile(str(partial_path), "wb") as sink:
            first = next(batches, pa.table({}))
            with pa.ipc.new_stream(sink, first.schema) as writer:
                for table in chain([first], batches):
                    writer.write_table(table, max_chunksize=BATCH)
        partial_path.replace(path)
    finally:
        partial_path.unlink(missing_ok=True)
