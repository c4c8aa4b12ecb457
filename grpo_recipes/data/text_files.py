"""Reader of text tables (JSON Lines, JSON, CSV, TSV), compressed or not, and guesses of their encoding and delimiter.

`datasets` and pandas guess the type of a column from its first rows. A later row of another type is then changed
silently, or fails without its line number. Dates become timestamps, and the CSV cells `NA` and `None` become nulls.
Here all rows decide the type of a column, text stays as it is written, and every error names its file and its line or
row.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from grpo_recipes.data.places import Place
from grpo_recipes.data.tables import BATCH, COLUMNS, check_columns, fingerprint, listed, reason_of, shown, stored
from grpo_rewards.errors import UserError
from grpo_rewards.math.decimals import Decimal

COMPRESSIONS: Mapping[str, str] = {".gz": "gzip", ".zst": "zstd"}
"""Arrow's names of compressions by suffix. The suffix follows that of the format, as in `rows.csv.gz`."""

TEXT_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")
"""Suffixes of the text files that are read here."""

_DELIMITERS: Mapping[str, str] = {".csv": ",", ".tsv": "\t"}  # the default by suffix
_GUESSED_DELIMITERS = ",;\t|"

_VERSION = 2
"""Part of a cached table's name. It must be raised when the same file gives another table."""

_HEAD = 1 << 16  # bytes from which the delimiter is guessed

# Errors of Arrow for values that do not fit one column.
_NO_COLUMN = (pa.ArrowException, OverflowError, TypeError, ValueError)


@dataclass(frozen=True)
class TextFormat:
    """Notation of a text table, with the keys of `dataset`. None stands for the default.

    Attributes:
        delimiter: Character between the cells of a CSV file. Default: a comma, or a tab in a .tsv file.
        encoding: Python's name of the encoding. Default: UTF-8.
        decimal: Decimal mark of the cells of a CSV file that are numbers. Default: a point.
    """

    delimiter: str | None = None
    encoding: str | None = None
    decimal: Decimal | None = None


def suffix_of(path: Path) -> str:
    """Return the suffix of a file's format, as in `.csv` for `rows.csv.gz`."""
    inner = path.with_suffix("").suffix
    return inner if path.suffix in COMPRESSIONS and inner in TEXT_SUFFIXES else path.suffix


def has_cells(path: Path) -> bool:
    """Return True if a file is CSV, with any delimiter."""
    return suffix_of(path) in _DELIMITERS


def read_text_files(paths: Sequence[Path], key: str, notation: TextFormat) -> datasets.Dataset:
    """Return the rows of text files of one format, one file after the other. A column that a row lacks is null there.

    Args:
        paths: files of one of `TEXT_SUFFIXES`, or of `TEXT_SUFFIXES` with one of `COMPRESSIONS`.
        key: key of `dataset` that names the files, for error messages.
        notation: notation of every file.

    Raises:
        UserError: a file, a line or a row is not readable.
    """
    parts: list[object] = ["text", _VERSION, suffix_of(paths[0]), notation]
    for path in paths:
        try:
            stat = path.stat()
        except (OSError, ValueError) as error:  # ValueError: a name that no file system takes
            raise _unreadable(path, key, error) from error
        parts += [path.resolve(), stat.st_size, stat.st_mtime_ns]
    read = _csv_table if has_cells(paths[0]) else _json_table
    return stored(fingerprint(*parts), lambda: iter([read(paths, key, notation)]))


def text_places(paths: Sequence[Path], key: str, notation: TextFormat, indices: Sequence[int]) -> list[Place]:
    """Return the positions of rows in the files of `read_text_files`, which are read again.

    The header of a CSV file is its row 1, as in a spreadsheet.
    """
    places: list[Place] = []
    for path in paths:
        if has_cells(path):
            count = len(_cells(path, key, notation))
            places += [Place(str(path), "row", number) for number in range(2, count + 2)]
        else:
            places += [place for place, _ in _json_rows(path, key, notation)]
    return [places[index] for index in indices]


# Content of one file


def _content(path: Path, key: str) -> bytes:
    """Return the content of a file, which is decompressed if its suffix names a compression."""
    compression = COMPRESSIONS.get(path.suffix)
    try:
        with path.open("rb") as file:
            return (file if compression is None else pa.CompressedInputStream(file, compression)).read()
    except OSError as error:
        raise _unreadable(path, key, error) from error


def _unreadable(path: Path, key: str, error: OSError | ValueError) -> UserError:
    reason = getattr(error, "strerror", None) or reason_of(error)  # Arrow's errors have none
    return UserError(f"`dataset.{key}`: {path}", f"it can't be read ({reason})", "correct the path or the file")


def _utf8(path: Path, key: str, notation: TextFormat) -> bytes:
    """Return the content of a file, encoded as UTF-8. Raise `UserError` if it is not in the notation's encoding."""
    content = _content(path, key)
    codec = codecs.lookup(notation.encoding or "utf-8").name
    try:
        if codec == "utf-8":
            content.decode()
            return content.removeprefix(codecs.BOM_UTF8)
        # Unlike `decode`, a stream refuses UTF-16 without its byte order mark, which any text of even length could be.
        return io.TextIOWrapper(io.BytesIO(content), codec, newline="").read().encode()
    except UnicodeError as error:
        if notation.encoding is not None:
            problem = f"{path} is not {notation.encoding} text"
            raise UserError("`dataset.encoding`", problem, "correct the key") from error
        found = _guess_encoding(content)
        fix = "correct the path or the file" if found is None else f"set `dataset.encoding: {found}`"
        line = content.count(b"\n", 0, getattr(error, "start", 0)) + 1
        raise UserError(f"`dataset.{key}`: {path}, line {line}", "it is not UTF-8 text", fix) from error


# JSON


def _json_table(paths: Sequence[Path], key: str, notation: TextFormat) -> pa.Table:
    schema, parts = pa.schema([]), [pa.table({})]
    for path in paths:
        rows = _json_rows(path, key, notation)
        while batch := list(islice(rows, BATCH)):
            names = dict.fromkeys(name for _, row in batch for name in row)
            check_columns(len({*schema.names, *names}), path)
            try:
                part = pa.table({name: [row.get(name) for _, row in batch] for name in names})
                wider = _common(schema, part.schema)
            except _NO_COLUMN as error:
                raise _misfit(batch, schema, error) from error
            schema = wider
            parts.append(part)
    return pa.concat_tables(parts, promote_options="permissive")


def _common(first: pa.Schema, second: pa.Schema) -> pa.Schema:
    """Return the columns of both, with types that hold both: a float for integers and floats."""
    return pa.unify_schemas([first, second], promote_options="permissive")


def _misfit(batch: Sequence[tuple[Place, Mapping[str, Any]]], schema: pa.Schema, cause: Exception) -> UserError:
    """Return the error for a batch whose types do not fit. It names the first value that does not fit earlier ones."""
    for place, row in batch:
        for name, value in row.items():
            try:
                schema = _common(schema, pa.schema([(name, pa.array([value]).type)]))
            except _NO_COLUMN as error:
                problem = f"the column {name!r} has {shown(value)}, which does not fit the values before"
                fix = "give all one type, or leave it out"
                return UserError(f"`dataset`: {place}", f"{problem} ({reason_of(error)})", fix)
    problem = f"it, or a later one, does not fit ({reason_of(cause)})"
    return UserError(f"`dataset`: {batch[0][0]}", problem, "correct it")


def _json_rows(path: Path, key: str, notation: TextFormat) -> Iterator[tuple[Place, Mapping[str, Any]]]:
    """Yield the objects of a file that holds one object per line, or one array. Blank lines are skipped."""
    content = _utf8(path, key, notation)
    values: Iterator[tuple[Place, Any]]
    if suffix_of(path) == ".json" and content.lstrip().startswith(b"["):
        entries = enumerate(_parsed(content, path), start=1)
        values = ((Place(str(path), "entry", number), value) for number, value in entries)
    else:
        lines = enumerate(io.BytesIO(content), start=1)
        places = ((Place(str(path), "line", number), line) for number, line in lines if line.strip())
        values = ((place, _parsed(line, place)) for place, line in places)
    for place, value in values:
        if not isinstance(value, dict) or not value:  # Arrow does not count rows without columns
            problem = "it is not a JSON object with columns"
            raise UserError(f"`dataset`: {place}", problem, "write the row's columns in one")
        yield place, value


def _parsed(text: bytes, where: object) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"`dataset`: {where}", f"it is not JSON ({error})", "correct or remove it") from error


# CSV

# Blank lines that are read after each file. Arrow skips them, unless a quote that is never closed takes them into its
# cell.
_END = "\r\r\n\r\r\n"

_WHOLE = r"-?(0|[1-9]\d{0,17}"  # 64 bits hold 18 digits
_NUMBER: Mapping[Decimal, str] = {
    "point": rf"^{_WHOLE})(\.(0|\d*[1-9]))?$",  # 1.10 may be a version
    "comma": rf"^{_WHOLE}|[1-9]\d{{0,2}}(\.\d{{3}}){{1,5}})(,\d+)?$",
}


def _csv_table(paths: Sequence[Path], key: str, notation: TextFormat) -> pa.Table:
    table = pa.concat_tables([_cells(path, key, notation) for path in paths], promote_options="default")
    columns = [_with_numbers(column, notation.decimal or "point") for column in table.columns]
    return pa.table(columns, table.column_names)


def _with_numbers(column: pa.ChunkedArray, decimal: Decimal) -> pa.ChunkedArray:
    """Return a column of text as numbers if all cells are numbers that lose no digit (as `007` and `1.10` would)."""
    if column.null_count == len(column):
        return pa.chunked_array([pa.nulls(len(column))])
    if not pc.all(pc.match_substring_regex(column, _NUMBER[decimal])).as_py():
        return column
    if decimal == "comma":
        column = pc.replace_substring(pc.replace_substring(column, ".", ""), ",", ".")
    is_fraction = pc.any(pc.match_substring(column, ".")).as_py()
    return column.cast(pa.float64() if is_fraction else pa.int64())


def _cells(path: Path, key: str, notation: TextFormat) -> pa.Table:
    """Return the rows of a CSV file as text under the names in its first row. An empty cell is null."""
    content = _utf8(path, key, notation)
    if not content.strip():
        return pa.table({})
    table = _all_cells(content, path, notation)
    width = table.num_columns
    while width and table.column(width - 1).null_count == len(table):  # spreadsheets write empty columns at the end
        width -= 1
    table = table.select(range(width))
    names = [column[0].as_py() for column in table.columns]
    if not names or None in names or len(set(names)) < len(names):
        found = listed(name or "" for name in names) or "nothing"
        problem = f"it must name every column once, and it has {found}"
        raise UserError(f"`dataset`: {path}, row 1", problem, "rename or remove columns")
    if len(names) == 1 and (proposal := _other_delimiter(content, path, notation)):
        raise UserError(f"`dataset`: {path}", f"it has one column, {shown(names[0])}", proposal)
    last = table.columns[-1][-1].as_py()
    if last is not None and last.endswith(_END):
        place = f"`dataset`: {path}, row {len(table)}"
        raise UserError(place, "it has a double quote that is never closed", "close or double it")
    return table.slice(1).rename_columns(names)


def _all_cells(content: bytes, path: Path, notation: TextFormat) -> pa.Table:
    """Return the rows of a CSV file, the first row included. Raise `UserError` if one has more or fewer cells."""
    wrong: list[pyarrow.csv.InvalidRow] = []

    def refuse(row: pyarrow.csv.InvalidRow) -> str:
        wrong.append(row)
        return "error"

    delimiter = notation.delimiter or _DELIMITERS[suffix_of(path)]
    kinds = {f"f{number}": pa.string() for number in range(COLUMNS)}  # Arrow's own names of columns
    try:
        table = pyarrow.csv.read_csv(
            pa.BufferReader(content + _END.encode()),
            # Rows are numbered by one thread only, and a row must not be larger than a block.
            pyarrow.csv.ReadOptions(use_threads=False, block_size=1 << 30, autogenerate_column_names=True),
            pyarrow.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=refuse),
            pyarrow.csv.ConvertOptions(column_types=kinds, strings_can_be_null=True, null_values=[""]),
        )
    except pa.ArrowInvalid as error:
        if not wrong:
            problem = f"it is not CSV ({reason_of(error)})"
            raise UserError(f"`dataset`: {path}", problem, "correct its quotes") from error
        number, expected, count = wrong[0].number, wrong[0].expected_columns, wrong[0].actual_columns
        fix = _other_delimiter(content, path, notation) or "put cells with the delimiter in double quotes"
        problem = f"it has {count} cells, and the first row names {expected} columns"
        raise UserError(f"`dataset`: {path}, row {number}", problem, fix) from error
    check_columns(table.num_columns, path)
    return table


def _other_delimiter(content: bytes, path: Path, notation: TextFormat) -> str | None:
    """Return a fix that proposes another delimiter, or None if the recipe names one or no other fits better."""
    found = _guess_delimiter(content, path) if notation.delimiter is None else None
    return None if found is None else f"set `dataset.delimiter: {json.dumps(found)}`"


# Guesses


def guess_format(path: Path) -> TextFormat:
    """Return the delimiter and the encoding of a text table, each None if the default reads it.

    Raises:
        UserError: the file can't be read.
    """
    content = _content(path, "path")
    if (encoding := _guess_encoding(content)) is None:
        return TextFormat()
    delimiter = _guess_delimiter(content.decode(encoding).encode(), path) if has_cells(path) else None
    return TextFormat(delimiter, None if encoding == "utf-8" else encoding)


def _guess_encoding(content: bytes) -> str | None:
    """Return `utf-8`, `utf-16` (with a byte order mark) or `cp1252`, the first that decodes the content, or None."""
    is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    for encoding in ("utf-16",) if is_utf16 else ("utf-8", "cp1252"):
        with suppress(UnicodeError):
            text = content.decode(encoding)
            # cp1252 decodes nearly all bytes, and a text file has no NUL.
            return encoding if encoding == "utf-8" or "\0" not in text else None
    return None


def _guess_delimiter(content: bytes, path: Path) -> str | None:
    """Return the delimiter that the first row has most often, outside of quotes, or None if it is the default."""
    default = _DELIMITERS[suffix_of(path)]
    header = re.sub(rb'"[^"]*"', b"", content[:_HEAD]).partition(b"\n")[0].decode(errors="replace")
    found = max((default, *_GUESSED_DELIMITERS), key=header.count)
    return found if header.count(found) > header.count(default) else None
