"""Memory-mapped tables: the cache on disk, and limits on size.

No row stays in memory as a Python object after its batch. A table may therefore be larger than memory, and several
processes share its pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import xxhash
from datasets.table import MemoryMappedTable
from filelock import FileLock

from grpo_rewards.errors import UserError, one_line, shortened
from grpo_rewards.files import replacing

BATCH = 10_000
"""Number of rows that are read, changed and written at once."""

COLUMNS = 2_000
"""Largest number of columns of a table. `datasets` joins tables in time that is quadratic in it."""

SAMPLE = 20_000
"""Number of rows above which golds and lengths are checked on a sample of this size."""

SHOWN = 200
"""Largest number of characters that an error message shows of a row's value."""

IMAGE_COLUMNS = ("image", "images")
"""Columns that TRL takes for images."""

_MEDIA = ("image", "audio", "video")  # types of content parts, `image_url` and `input_image` among them


def check_columns(count: int, where: object) -> None:
    """Raise `UserError` if a table has more than `COLUMNS` columns. `where` is the table or its file."""
    if count > COLUMNS:
        problem = f"it has {count:,} columns, and at most {COLUMNS:,} are read"
        raise UserError(f"`dataset`: {where}", problem, "select some of them")


def check_no_images(table: datasets.Dataset, where: object) -> None:
    """Raise `UserError` if a column holds bytes, as `datasets` stores images, sounds and videos.

    Without the check, a policy of text would be asked about a picture.
    """
    for name in table.column_names:
        column = table.data.column(name)
        if _has_bytes(column.type) and column.null_count < len(column):
            problem = f"it has bytes, such as images or sounds, in the column {name!r}, which are not supported"
            fix = "name a table of text, or columns that need no picture (`columns: [question, answer]`)"
            raise UserError(f"`dataset`: {where}", problem, fix)


def _has_bytes(kind: pa.DataType) -> bool:
    """Return True if values of a type, or values in its lists and objects, are bytes."""
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or any(map(_has_bytes, inner))


def check_no_image_columns(table: datasets.Dataset | datasets.IterableDataset) -> None:
    """Raise `UserError` if a table for a policy of text has a column that TRL takes for images."""
    for name in table.column_names or ():  # a streamed table may not know its columns
        if name in IMAGE_COLUMNS:
            problem = f"it has a column {name!r}, and the policy reads text alone"
            raise UserError("`train_dataset`", problem, "remove the column, or load a policy that reads images")


def is_image_part(part: object) -> bool:
    """Return True for a part of a message's content that is an image, a sound or a video."""
    return isinstance(part, Mapping) and str(part.get("type", "")).removeprefix("input_").startswith(_MEDIA)


def shown(value: object) -> str:
    """Return a value of a row for an error message, shortened to `SHOWN` characters."""
    return shortened(repr(value), SHOWN)


def reason_of(error: BaseException) -> str:
    """Return the message of a library's error as a clause of a message of ours."""
    return one_line(error).rstrip(".") or type(error).__name__


def listed(names: Iterable[str]) -> str:
    """Return names of columns for an error message, shortened to twice `SHOWN` characters."""
    return shortened(", ".join(names), 2 * SHOWN)


def sample_of_rows(count: int) -> np.ndarray:
    """Return the indices of the rows to check, ascending: all rows, or `SAMPLE` random rows, the same in every call."""
    if count <= SAMPLE:
        return np.arange(count)
    return np.sort(np.random.default_rng(0).choice(count, SAMPLE, replace=False))


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
        problem, fix = f"it is not writable ({error.strerror or error})", "make room, or set HF_DATASETS_CACHE"
        raise UserError(f"`dataset`: {folder}", problem, fix) from error
    # `Dataset.from_file` would pickle what it knows of the table for a fingerprint, which takes longer than all else.
    return datasets.Dataset(MemoryMappedTable.from_file(str(path)), fingerprint=name)


def _write(path: Path, batches: Iterator[pa.Table]) -> None:
    """Write the batches to `path`, which never holds half a table."""
    first = next(batches, pa.table({}))
    for name in first.schema.names:
        if "\0" in name:  # Arrow would cut the name there
            raise UserError("`dataset`", f"the name of the column {name!r} has a NUL", "rename the column")
    with replacing(path) as part, pa.OSFile(str(part), "wb") as sink, pa.ipc.new_stream(sink, first.schema) as writer:
        for table in chain([first], batches):
            writer.write_table(table, max_chunksize=BATCH)
