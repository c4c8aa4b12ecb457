"""Memory-mapped tables: the cache on disk, limits on size, and the reader of text files (JSON Lines, JSON, CSV).

`datasets` reads text files too, but it guesses the type of a column from the first 10 megabytes or 10,000 rows. A later
row of another type is then changed silently, or fails without its line number. Dates become timestamps, and the CSV
cells `NA` and `None` become nulls. Here all rows decide the type of a column, text stays as it is written, and every
error names its file and line.

No row stays in memory as a Python object after its batch. A table may therefore be larger than memory, and several
processes share its pages.
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Any, TypeVar

import datasets
import pyarrow as pa
import xxhash
from filelock import FileLock

from grpo_rewards.errors import UserError, one_line, shortened
from grpo_rewards.files import LINE_BYTES, UnreadableFile, read_bytes

BATCH = 10_000
"""Number of rows that are read, changed and written at once."""

COLUMNS = 2_000
"""Largest number of columns of a table. `datasets` joins tables in time that is quadratic in it."""

FIELDS = 10_000
"""Largest number of columns and of keys in their objects, all rows together."""

ARRAY_BYTES = 1 << 30
"""Largest file that holds one JSON array, which is read in one piece."""

SHOWN = 200
"""Largest number of characters that an error message shows of a row's value."""

_NAMES, _NAME_CHARACTERS = 20, 60

_VERSION = 1
"""Part of a cached table's name. It must be raised when the same file gives another table."""

Text = TypeVar("Text", str, bytes)
Place = Callable[[], str]
"""Function that returns the position of a row for an error message. Finding it may take a pass over the file."""

# Numbers of rows in their file (lines or entries), with the row itself.
_NumberedRows = Iterator[tuple[int, Any]]
_Reader = Callable[[Path, str], _NumberedRows]
_Batch = Sequence[tuple[int, Mapping[str, Any]]]

# Errors of Arrow for values that do not fit one column.
_NO_COLUMN = (pa.ArrowException, OverflowError, TypeError, ValueError)


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


class Widened(Exception):
    """Signal that later rows need a wider schema than the written one, so that the table must be written again."""


def fingerprint(*parts: object) -> str:
    """Return the name of the cached table that is made from `parts`. Parts with the same text give the same name."""
    return xxhash.xxh3_128_hexdigest("\0".join(map(str, parts)).encode(errors="surrogateescape"))


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
                _write(path, batches)
    except OSError as error:
        raise UserError(
            f"`dataset`: {folder} is not writable ({error.strerror or error}): make room, or set HF_DATASETS_CACHE"
        ) from error
    try:
        return datasets.Dataset.from_file(str(path))
    except ValueError as error:  # Arrow cuts a column's name at a NUL, so the table and its schema have different names
        path.unlink(missing_ok=True)
        raise UserError("`dataset`: names of columns have control characters: rename the columns") from error


def _write(path: Path, batches: Callable[[], Iterator[pa.Table]]) -> None:
    """Write the batches beside `path` and move the file there, so that `path` never holds half a table."""
    partial_path = path.with_suffix(f".{os.getpid()}")
    try:
        try:
            _write_stream(partial_path, batches())
        except Widened:
            _write_stream(partial_path, batches())
        partial_path.replace(path)
    finally:
        partial_path.unlink(missing_ok=True)


def _write_stream(path: Path, batches: Iterator[pa.Table]) -> None:
    with pa.OSFile(str(path), "wb") as sink:
        first = next(batches, pa.table({}))
        with pa.ipc.new_stream(sink, first.schema) as writer:
            writer.write_table(first)
            for batch in batches:
                writer.write_table(batch)


# Tables from text files


def read_text_files(paths: Sequence[Path], key: str) -> datasets.Dataset:
    """Return the rows of text files of one format, one file after the other. A column that a row lacks is null there.

    Args:
        paths: files of one of `TEXT_SUFFIXES`.
        key: key of `dataset` that names the files, for error messages.

    Raises:
        UserError: a file or a line is not readable.
    """
    parts: list[object] = ["text", _VERSION, paths[0].suffix]
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise _unreadable(path, key, error) from error
        parts += [path.resolve(), stat.st_size, stat.st_mtime_ns]
    return stored(fingerprint(*parts), _TextTables(paths, key))


def text_rows(paths: Sequence[Path], key: str) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Yield the rows of text files as they are written, each with its position (a file and its line or entry)."""
    for path in paths:
        word = "entry" if path.suffix == ".json" and _is_array(path) else "line"
        for number, row in _READERS[path.suffix](path, key):
            yield partial("{}, {} {}".format, path, word, number), row


def text_place(paths: Sequence[Path], key: str, index: int) -> str:
    """Return the position of row `index` of the table from `read_text_files`. Reads the files again."""
    place, _ = next(islice(text_rows(paths, key), index, None))
    return place()


class _TextTables:
    """Callable that yields the rows of text files as tables with one schema.

    The schema is that of the first batch. If a later batch needs a wider one, the remaining rows are read only for
    their types, and `Widened` is raised at the end. The next call then yields all rows in the wider schema.
    """

    def __init__(self, paths: Sequence[Path], key: str) -> None:
        self.paths, self.key = paths, key
        self.schema: pa.Schema | None = None

    def __call__(self) -> Iterator[pa.Table]:
        """Yield the tables. Raise `Widened` if some rows do not fit the schema of the first table."""
        needed = self.schema or pa.schema([])
        for path, batch in self._batches():
            needed = _wider(needed, path, batch)
            self.schema = self.schema or needed
            if needed == self.schema:
                columns = {kind.name: _column(path, batch, kind.name, kind.type) for kind in needed}
                yield pa.table(columns, needed)
        if self.schema is not None and needed != self.schema:
            self.schema = needed
            raise Widened

    def _batches(self) -> Iterator[tuple[Path, _Batch]]:
        for path in self.paths:
            rows = _READERS[path.suffix](path, self.key)
            while batch := list(islice(rows, BATCH)):
                yield path, batch


def _wider(schema: pa.Schema, path: Path, batch: _Batch) -> pa.Schema:
    """Return `schema` extended by the columns and types of a batch. Raise `UserError` if types do not fit."""
    types = dict(zip(schema.names, schema.types, strict=True))
    names = dict.fromkeys(name for _, row in batch for name in row)
    check_columns(len(types.keys() | names), path)
    for name in names:
        before = types.get(name, pa.null())
        common = _common_type(before, _column(path, batch, name, None).type, as_text=path.suffix == ".csv")
        if common is None:
            raise _several_types(path, batch, name, before)
        types[name] = common
    check_fields(types.values(), path)
    return pa.schema(list(types.items()))


def _common_type(first: pa.DataType, second: pa.DataType, as_text: bool) -> pa.DataType | None:
    """Return the type that holds both: a float for integers and floats, text for any CSV cells, or None."""
    if first == second:
        return first
    try:
        schemas = [pa.schema([("", first)]), pa.schema([("", second)])]
        return pa.unify_schemas(schemas, promote_options="permissive").types[0]
    except pa.ArrowException:
        return pa.string() if as_text else None


def _column(path: Path, batch: _Batch, name: str, kind: pa.DataType | None) -> pa.Array:
    """Return a column of a batch with type `kind`, or with its own type. Raise `UserError` for several types."""
    values = [row.get(name) for _, row in batch]
    if path.suffix == ".csv":
        return _cells(values, kind)
    try:
        return pa.array(values, kind)
    except _NO_COLUMN:
        raise _several_types(path, batch, name, pa.null() if kind is None else kind) from None


def _several_types(path: Path, batch: _Batch, name: str, kind: pa.DataType) -> UserError:
    """Return the error for a column of several types. It names the first row that does not fit those before."""
    for number, row in batch:
        common = None
        with contextlib.suppress(*_NO_COLUMN):
            common = _common_type(kind, pa.array([row.get(name)]).type, as_text=False)
        if common is None:
            return UserError(
                f"`dataset`: {path}, line {number}: the column {name!r} has values of several types, here "
                f"{shown(row.get(name))}: give all one type, or leave it out"
            )
        kind = common
    return UserError(f"`dataset`: the column {name!r} of {path} has values of several types: give all one type")


_INTEGER = re.compile(r"-?(0|[1-9]\d{0,17})", re.ASCII)
_NUMBER = re.compile(r"-?(0|[1-9]\d{0,17})(\.\d+)?", re.ASCII)


def _cells(values: Sequence[str | None], kind: pa.DataType | None) -> pa.Array:
    """Return CSV cells as numbers if all of them are numbers, otherwise as text (`007`, `NA`, `1,000`)."""
    if kind is None:
        kind = _cell_type([value for value in values if value is not None])
    convert: Callable[[str], Any] = str
    if kind == pa.int64():
        convert = int
    elif kind == pa.float64():
        convert = float
    return pa.array([None if value is None else convert(value) for value in values], kind)


def _cell_type(cells: Sequence[str]) -> pa.DataType:
    if not cells:
        return pa.null()
    if all(map(_INTEGER.fullmatch, cells)):
        return pa.int64()
    return pa.float64() if all(map(_NUMBER.fullmatch, cells)) else pa.string()


# Readers of one text file


def _json_rows(path: Path, key: str) -> _NumberedRows:
    """Yield the objects of a JSON file that holds one array, or one object per line."""
    return _array_entries(path, key) if _is_array(path) else _json_lines(path, key)


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")


def _array_entries(path: Path, key: str) -> _NumberedRows:
    try:
        value = json.loads(read_bytes(path, ARRAY_BYTES))
    except UnreadableFile as error:
        raise UserError(f"`dataset.{key}`: {error}: write one object a line, as JSON Lines") from error
    except UnicodeDecodeError as error:
        raise _not_utf8(path, key) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"`dataset`: {path} is not JSON ({error}): correct the file") from error
    for number, entry in enumerate(value, start=1):
        where = f"{path}, entry {number}"
        _check_surrogates(entry, where)
        yield number, _object(entry, where)


def _json_lines(path: Path, key: str) -> _NumberedRows:
    """Yield the objects of a JSON Lines file. Blank lines are skipped."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_bounded_lines(file, path, key), start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    yield number, _line_object(line, path, number, key)
    except OSError as error:
        raise _unreadable(path, key, error) from error


def _bounded_lines(file: IO[Text], path: Path, key: str) -> Iterator[Text]:
    """Yield the lines of a file. Raise `UserError` for a line of `LINE_BYTES` or more."""
    while line := file.readline(LINE_BYTES):
        if len(line) == LINE_BYTES:
            raise UserError(f"`dataset.{key}`: {path} has a line of {LINE_BYTES:,} bytes or more: correct the file")
        yield line


def _line_object(line: bytes, path: Path, number: int, key: str) -> Mapping[str, Any]:
    where = f"{path}, line {number}"
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _not_utf8(path, key, f" (line {number})") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"`dataset`: {where} is not JSON ({error}): correct or remove the line") from error
    if b"\\ud" in line or b"\\uD" in line:  # the check takes as long as parsing, and few lines need it
        _check_surrogates(value, where)
    return _object(value, where)


def _check_surrogates(value: Any, where: str) -> None:
    """Raise `UserError` for half of a surrogate pair, which Arrow and tokenizers can't encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise UserError(f"`dataset`: {where} has half of a surrogate pair: correct or remove the line") from error


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"`dataset`: {where} is not a JSON object: write one object with the row's columns")
    return value


def _csv_rows(path: Path, key: str) -> _NumberedRows:
    """Yield the records of a CSV file as mappings from the names in its first line. An empty cell is None."""
    csv.field_size_limit(1 << 30)  # the default refuses cells above 128 KiB
    line = 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(_bounded_lines(file, path, key), strict=True)
            names = next(reader, [])
            check_columns(len(names), path)
            if "" in names or len(set(names)) < len(names):
                raise UserError(
                    f"`dataset`: {path}, line 1 must name every column once, and it has {listed(names) or 'nothing'}"
                )
            line = 1
            for cells in reader:
                # A record may take several lines, and its first line is named.
                first, line = line + 1, reader.line_num
                if not cells:
                    continue
                if len(cells) != len(names):
                    raise UserError(
                        f"`dataset`: {path}, line {first} has {len(cells)} cells, and the first line names "
                        f"{len(names)} columns: put cells with commas in double quotes"
                    )
                yield first, {name: cell or None for name, cell in zip(names, cells, strict=True)}
    except UnicodeDecodeError as error:
        raise _not_utf8(path, key) from error
    except csv.Error as error:
        raise UserError(f"`dataset`: {path}, line {line + 1} is not CSV ({error}): correct its quotes") from error
    except OSError as error:
        raise _unreadable(path, key, error) from error


def _unreadable(path: Path, key: str, error: OSError) -> UserError:
    return UserError(f"`dataset.{key}`: {path} can't be read ({error.strerror}): correct the path or the file")


def _not_utf8(path: Path, key: str, place: str = "") -> UserError:
    return UserError(f"`dataset.{key}`: {path} is not UTF-8 text{place}: correct the path or the file")


_READERS: Mapping[str, _Reader] = {".jsonl": _json_lines, ".json": _json_rows, ".csv": _csv_rows}

TEXT_SUFFIXES = tuple(_READERS)
"""Suffixes of the text files that are read here."""
