"""Reader of text tables (JSON Lines, JSON, CSV, TSV), compressed or not, and a guess at how one is written.

`datasets` reads text files too, but it guesses the type of a column from the first 10 megabytes or 10,000 rows. A later
row of another type is then changed silently, or fails without its line number. Dates become timestamps, and the CSV
cells `NA` and `None` become nulls. Here all rows decide the type of a column, text stays as it is written, and every
error names its file and line.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar, cast

import datasets
import pyarrow as pa

from grpo_recipes.data.places import Place
from grpo_recipes.data.tables import (
    BATCH,
    Widened,
    check_columns,
    check_fields,
    fingerprint,
    listed,
    reason_of,
    shown,
    stored,
)
from grpo_rewards.errors import UserError
from grpo_rewards.files import LINE_BYTES
from grpo_rewards.math.answers import parse_number
from grpo_rewards.math.decimals import Decimal, decimal_marks, with_point

ARRAY_BYTES = 1 << 30
"""Largest file that holds one JSON array, which is read in one piece."""

DECOMPRESSED_BYTES = 1 << 34
"""Largest size of a compressed table after decompression. A small file may decompress to any size."""

COMPRESSIONS: Mapping[str, str] = {".gz": "gzip", ".zst": "zstd"}
"""Arrow's name of a compression by the suffix that follows the format's suffix, as in `rows.csv.gz`."""

_DELIMITERS: Mapping[str, str] = {".csv": ",", ".tsv": "\t"}  # the default by suffix

DELIMITERS = (",", ";", "\t", "|")
"""Delimiters that are recognized in a CSV file. A recipe may name any other character."""

_VERSION = 1
"""Part of a cached table's name. It must be raised when the same file gives another table."""

_HEAD = 1 << 16  # characters from which delimiter and decimal mark are guessed
_CHUNK = 1 << 20

Text = TypeVar("Text", str, bytes)
# Numbers of rows in their file (lines or entries), with the row itself.
_NumberedRows = Iterator[tuple[int, Any]]
_Batch = Sequence[tuple[int, Mapping[str, Any]]]

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

    @property
    def codec(self) -> str:
        """Name of the codec that decodes the file. UTF-8 is read with and without a byte order mark."""
        codec = codecs.lookup(self.encoding or "utf-8").name
        return "utf-8-sig" if codec == "utf-8" else codec


_Reader = Callable[[Path, str, TextFormat], _NumberedRows]


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
        UserError: a file or a line is not readable.
    """
    parts: list[object] = ["text", _VERSION, suffix_of(paths[0]), notation]
    for path in paths:
        try:
            stat = path.stat()
        except (OSError, ValueError) as error:  # ValueError: a name that no file system takes
            raise _unreadable(path, key, error) from error
        parts += [path.resolve(), stat.st_size, stat.st_mtime_ns]
    return stored(fingerprint(*parts), _TextTables(paths, key, notation))


def text_places(paths: Sequence[Path], key: str, notation: TextFormat, indices: Sequence[int]) -> list[Place]:
    """Return the files and the lines or entries of rows of the table from `read_text_files`.

    The files are read again, up to the last of the rows.

    Raises:
        KeyError: there is no such row.
    """
    found: dict[int, Place] = {}
    index, last = 0, max(indices, default=-1)
    for path in paths:
        word = "entry" if suffix_of(path) == ".json" and _is_array(path, notation) else "line"
        for number, _ in _READERS[suffix_of(path)](path, key, notation):
            if index in indices:
                found[index] = Place(str(path), word, number)
            index += 1
            if index > last:
                return [found[index] for index in indices]
    return [found[index] for index in indices]


class _TextTables:
    """Callable that yields the rows of text files as tables with one schema.

    The schema is that of the first batch. If a later batch needs a wider one, the remaining rows are read only for
    their types, and `Widened` is raised at the end. The next call then yields all rows in the wider schema.
    """

    def __init__(self, paths: Sequence[Path], key: str, notation: TextFormat) -> None:
        self.paths, self.key, self.notation = paths, key, notation
        self.schema: pa.Schema | None = None

    def __call__(self) -> Iterator[pa.Table]:
        """Yield the tables. Raise `Widened` if some rows do not fit the schema of the first table."""
        needed = self.schema or pa.schema([])
        for path, batch in self._batches():
            needed = self._wider(needed, path, batch)
            self.schema = self.schema or needed
            if needed == self.schema:
                columns = {kind.name: self._column(path, batch, kind.name, kind.type) for kind in needed}
                yield pa.table(columns, needed)
        if self.schema is not None and needed != self.schema:
            self.schema = needed
            raise Widened

    def _batches(self) -> Iterator[tuple[Path, _Batch]]:
        for path in self.paths:
            rows = _READERS[suffix_of(path)](path, self.key, self.notation)
            while batch := list(islice(rows, BATCH)):
                yield path, batch

    def _wider(self, schema: pa.Schema, path: Path, batch: _Batch) -> pa.Schema:
        """Return `schema` extended by the columns and types of a batch. Raise `UserError` if types do not fit."""
        types = dict(zip(schema.names, schema.types, strict=True))
        names = dict.fromkeys(name for _, row in batch for name in row)
        check_columns(len(types.keys() | names), path)
        for name in names:
            before = types.get(name, pa.null())
            common = _common_type(before, self._column(path, batch, name, None).type, as_text=has_cells(path))
            if common is None:
                raise _several_types(path, batch, name, before)
            types[name] = common
        check_fields(types.values(), path)
        return pa.schema(list(types.items()))

    def _column(self, path: Path, batch: _Batch, name: str, kind: pa.DataType | None) -> pa.Array:
        """Return a column of a batch with type `kind`, or with its own type. Raise `UserError` for several types."""
        values = [row.get(name) for _, row in batch]
        if has_cells(path):
            return _cells(values, kind, self.notation.decimal or "point")
        try:
            return pa.array(values, kind)
        except _NO_COLUMN:
            raise _several_types(path, batch, name, pa.null() if kind is None else kind) from None


def _common_type(first: pa.DataType, second: pa.DataType, as_text: bool) -> pa.DataType | None:
    """Return the type that holds both: a float for integers and floats, text for any CSV cells, or None."""
    if first == second:
        return first
    try:
        schemas = [pa.schema([("", first)]), pa.schema([("", second)])]
        return pa.unify_schemas(schemas, promote_options="permissive").types[0]
    except pa.ArrowException:
        return pa.string() if as_text else None


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


# Cells

_WHOLE = r"-?(?:0|[1-9]\d{0,17}"
# At most 18 digits, which fit into 64 bits.
_INTEGERS: Mapping[Decimal, re.Pattern[str]] = {
    "point": re.compile(rf"{_WHOLE})", re.ASCII),
    "comma": re.compile(rf"{_WHOLE}|[1-9]\d{{0,2}}(?:\.\d{{3}}){{1,5}})", re.ASCII),
}
_NUMBERS: Mapping[Decimal, re.Pattern[str]] = {
    "point": re.compile(rf"{_INTEGERS['point'].pattern}(\.\d+)?", re.ASCII),
    "comma": re.compile(rf"{_INTEGERS['comma'].pattern}(,\d+)?", re.ASCII),
}


def _cells(values: Sequence[str | None], kind: pa.DataType | None, decimal: Decimal) -> pa.Array:
    """Return CSV cells as numbers if all of them are numbers, otherwise as text (`007`, `NA`, `1,000`)."""
    if kind is None:
        kind = _cell_type([value for value in values if value is not None], decimal)
    convert: Callable[[str], Any] = str
    if kind == pa.int64():
        convert = int
    elif kind == pa.float64():
        convert = float
    is_comma = decimal == "comma" and convert is not str
    cells: list[Any] = []
    for value in values:
        if value is not None and is_comma:
            value = value.replace(".", "").replace(",", ".")
        cells.append(None if value is None else convert(value))
    return pa.array(cells, kind)


def _cell_type(cells: Sequence[str], decimal: Decimal) -> pa.DataType:
    if not cells:
        return pa.null()
    if all(map(_INTEGERS[decimal].fullmatch, cells)):
        return pa.int64()
    return pa.float64() if all(map(_NUMBERS[decimal].fullmatch, cells)) else pa.string()


# Content of one text file


def _opened(path: Path) -> BinaryIO:
    """Open a file for reading, and decompress it on the way if its suffix names a compression."""
    compression = COMPRESSIONS.get(path.suffix)
    if compression is None:
        return path.open("rb")
    return cast(BinaryIO, io.BufferedReader(_Decompressed(path, compression), _CHUNK))


class _Decompressed(io.RawIOBase):
    """Decompressed content of a file, of at most `DECOMPRESSED_BYTES`."""

    def __init__(self, path: Path, compression: str) -> None:
        super().__init__()
        self._path, self._left = path, DECOMPRESSED_BYTES
        self._file = path.open("rb")
        self._stream = pa.CompressedInputStream(pa.PythonFile(self._file), compression)

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with the next bytes, and return their number.

        Raises:
            UserError: more than `DECOMPRESSED_BYTES` have been read.
        """
        content = self._stream.read(len(buffer))
        self._left -= len(content)
        if self._left < 0:
            raise UserError(
                f"`dataset`: {self._path} has more than {DECOMPRESSED_BYTES:,} bytes when decompressed, the limit for "
                "compressed tables: decompress it, or convert it to Parquet"
            )
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._stream.close()
            self._file.close()
        super().close()


def _bounded_lines(file: IO[Text], path: Path, key: str) -> Iterator[Text]:
    """Yield the lines of a file. Raise `UserError` for a line of `LINE_BYTES` or more."""
    while line := file.readline(LINE_BYTES):
        if len(line) == LINE_BYTES:
            raise UserError(f"`dataset.{key}`: {path} has a line of {LINE_BYTES:,} bytes or more: correct the file")
        yield line


@contextlib.contextmanager
def _naming(path: Path, key: str, notation: TextFormat) -> Iterator[None]:
    """Turn the errors of a file that can't be read or decoded into `UserError`."""
    try:
        yield
    except UnicodeError as error:
        raise _wrong_encoding(path, key, notation) from error
    except OSError as error:
        raise _unreadable(path, key, error) from error


def _unreadable(path: Path, key: str, error: OSError | ValueError) -> UserError:
    reason = getattr(error, "strerror", None) or reason_of(error)  # Arrow's errors have none
    return UserError(f"`dataset.{key}`: {path} can't be read ({reason}): correct the path or the file")


def _wrong_encoding(path: Path, key: str, notation: TextFormat) -> UserError:
    found = guess_encoding(path)
    fix = "correct the path or the file"
    if found == "utf-8":
        fix = "remove `dataset.encoding`, as it is UTF-8"
    elif found is not None:
        fix = f"set `dataset.encoding: {found}`"
    if notation.encoding is not None:
        return UserError(f"`dataset.encoding`: {path} is not {notation.encoding} text: {fix}")
    return UserError(f"`dataset.{key}`: {path}, line {_first_line_not_utf8(path, key)} is not UTF-8 text: {fix}")


def _first_line_not_utf8(path: Path, key: str) -> int:
    with _opened(path) as file:
        for number, line in enumerate(_bounded_lines(file, path, key), start=1):
            try:
                line.decode()
            except UnicodeError:
                return number
    return 1  # the file has changed meanwhile


# Readers of one text file


def _json_rows(path: Path, key: str, notation: TextFormat) -> _NumberedRows:
    """Yield the objects of a JSON file that holds one array, or one object per line."""
    with _naming(path, key, notation):
        is_array = _is_array(path, notation)
    return (_array_entries if is_array else _json_lines)(path, key, notation)


def _is_array(path: Path, notation: TextFormat) -> bool:
    with _opened(path) as file, io.TextIOWrapper(file, notation.codec, "replace") as text:
        return text.read(1024).lstrip().startswith("[")


def _array_entries(path: Path, key: str, notation: TextFormat) -> _NumberedRows:
    with _naming(path, key, notation):
        text = _array_content(path, key).decode(notation.codec)
    for number, entry in enumerate(_parsed(text, str(path)), start=1):
        where = f"{path}, entry {number}"
        _check_surrogates(entry, where)
        yield number, _object(entry, where)


def _array_content(path: Path, key: str) -> bytes:
    content = bytearray()
    with _opened(path) as file:
        while chunk := file.read(_CHUNK):
            content += chunk
            if len(content) > ARRAY_BYTES:
                raise UserError(
                    f"`dataset.{key}`: {path} holds an array of more than {ARRAY_BYTES:,} bytes: write one object a "
                    "line, as JSON Lines"
                )
    return bytes(content)


def _json_lines(path: Path, key: str, notation: TextFormat) -> _NumberedRows:
    """Yield the objects of a JSON Lines file. Blank lines are skipped."""
    with _naming(path, key, notation), _opened(path) as file:
        if notation.codec == "utf-8-sig":
            # Single lines are decoded, which is faster than decoding the file.
            decoded: Iterable[str] = (line.decode("utf-8-sig") for line in _bounded_lines(file, path, key))
        else:
            decoded = _bounded_lines(io.TextIOWrapper(file, notation.codec, newline="\n"), path, key)
        for number, line in enumerate(decoded, start=1):
            if line.strip():
                yield number, _line_object(line, f"{path}, line {number}")


def _line_object(line: str, where: str) -> Mapping[str, Any]:
    value = _parsed(line, where)
    if "\\ud" in line or "\\uD" in line:  # the check takes as long as parsing, and few lines need it
        _check_surrogates(value, where)
    return _object(value, where)


def _parsed(text: str, where: str) -> Any:
    """Return the JSON value of a file or a line. Raise `UserError` for text that is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"`dataset`: {where} is not JSON ({error}): correct or remove it") from error


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


def _csv_rows(path: Path, key: str, notation: TextFormat) -> _NumberedRows:
    """Yield the records of a CSV file as mappings from the names in its first line. An empty cell is None."""
    csv.field_size_limit(1 << 30)  # the default refuses cells above 128 KiB
    line = 0
    with _naming(path, key, notation), _opened(path) as file:
        text = io.TextIOWrapper(file, notation.codec, newline="")
        delimiter = notation.delimiter or _DELIMITERS[suffix_of(path)]
        reader = csv.reader(_bounded_lines(text, path, key), delimiter=delimiter, strict=True)
        try:
            header = next(reader, None)
            if header is None:  # an empty file
                return
            names = _without_empty_end(header)
            _check_header(names, path, notation)
            line = 1
            for cells in reader:
                # A record may take several lines, and its first line is named.
                first, line = line + 1, reader.line_num
                if not cells:
                    continue
                if len(cells) > len(names) and not any(cells[len(names) :]):
                    cells = cells[: len(names)]
                if len(cells) != len(names):
                    raise _wrong_width(cells, names, path, first, notation)
                yield first, {name: cell or None for name, cell in zip(names, cells, strict=True)}
        except csv.Error as error:
            raise UserError(f"`dataset`: {path}, line {line + 1} is not CSV ({error}): correct its quotes") from error


def _without_empty_end(names: list[str]) -> list[str]:
    """Return the names without the empty ones at the end, which spreadsheets write for columns that hold nothing."""
    count = len(names)
    while count and not names[count - 1]:
        count -= 1
    return names[:count]


def _check_header(names: Sequence[str], path: Path, notation: TextFormat) -> None:
    """Raise `UserError` unless the first line names every column once."""
    check_columns(len(names), path)
    if not names or "" in names or len(set(names)) < len(names):
        raise UserError(
            f"`dataset`: {path}, line 1 must name every column once, and it has {listed(names) or 'nothing'}: rename "
            "or remove columns"
        )
    if len(names) == 1 and notation.delimiter is None:
        delimiter = guess_format(path).delimiter
        if delimiter is not None:
            raise UserError(
                f"`dataset`: {path} has one column, {shown(names[0])}: set `dataset.delimiter: {json.dumps(delimiter)}`"
            )


def _wrong_width(cells: Sequence[str], names: Sequence[str], path: Path, line: int, notation: TextFormat) -> UserError:
    """Return the error for a record with another number of cells than the first line."""
    delimiter = guess_format(path).delimiter if notation.delimiter is None else None
    fix = "put cells with the delimiter in double quotes"
    if delimiter is not None:
        fix = f"set `dataset.delimiter: {json.dumps(delimiter)}`"
    return UserError(
        f"`dataset`: {path}, line {line} has {len(cells)} cells, and the first line names {len(names)} columns: {fix}"
    )


_READERS: Mapping[str, _Reader] = {
    ".jsonl": _json_lines,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".tsv": _csv_rows,
}

TEXT_SUFFIXES = tuple(_READERS)
"""Suffixes of the text files that are read here."""


# Guesses

# Characters that no text file has, although the encoding decodes them. UTF-8 is itself evidence of text, except for
# zeros: a sparse file of gigabytes must not be decoded to its end.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_ZERO = re.compile("\x00")
_GUESSED_ENCODINGS = ("utf-8", "cp1252")


def guess_format(path: Path) -> TextFormat:
    """Return the delimiter, the encoding and the decimal mark of a text table, each None if the default reads it.

    All of the file is decoded. Delimiter and decimal mark are guessed from its first records, and only if all of these
    records agree.

    Raises:
        UserError: the file can't be read.
    """
    try:
        encoding = guess_encoding(path)
        if not has_cells(path) or encoding is None:
            return TextFormat(encoding=None if encoding == "utf-8" else encoding)
        found = TextFormat(encoding=None if encoding == "utf-8" else encoding)
        with _opened(path) as file, io.TextIOWrapper(file, found.codec, newline="") as text:
            head = text.read(_HEAD)
    except OSError as error:
        raise _unreadable(path, "path", error) from error
    default = _DELIMITERS[suffix_of(path)]
    delimiter = _guess_delimiter(head, default)
    records = _head_records(head, delimiter)
    return TextFormat(None if delimiter == default else delimiter, found.encoding, _guess_decimal(records))


def guess_encoding(path: Path) -> str | None:
    """Return `utf-8`, `utf-16` (with a byte order mark) or `cp1252`, the first that decodes the file, or None."""
    with _opened(path) as file:
        start = file.read(2)
    if start in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return "utf-16" if _decodes(path, "utf-16") else None
    return next((encoding for encoding in _GUESSED_ENCODINGS if _decodes(path, encoding)), None)


def _decodes(path: Path, encoding: str) -> bool:
    """Return True if `encoding` decodes all of a file to a text without control characters (for UTF-8: zeros)."""
    foreign = _ZERO if encoding == "utf-8" else _CONTROL
    try:
        with _opened(path) as file, io.TextIOWrapper(file, encoding, newline="") as text:
            while chunk := text.read(_CHUNK):
                if foreign.search(chunk):
                    return False
    except UnicodeError:
        return False
    return True


def _head_records(head: str, delimiter: str) -> list[list[str]]:
    """Return the complete records of a file's first characters, or [] if they are not CSV."""
    try:
        records = list(csv.reader(io.StringIO(head, newline=""), delimiter=delimiter))
    except csv.Error:
        return []
    if len(head) == _HEAD:
        records = records[:-1]  # the last record goes on behind the head
    return [record for record in records if record]


def _guess_delimiter(head: str, default: str) -> str:
    """Return the delimiter that gives the most columns, all records agreeing; the default if it gives several."""
    best, most = default, _width(head, default)
    for delimiter in DELIMITERS:
        if most < 2 and (width := _width(head, delimiter)) > 1:
            best, most = delimiter, width
    return best


def _width(head: str, delimiter: str) -> int:
    """Return the number of cells of every record, or 0 if the records differ."""
    widths = set(map(len, _head_records(head, delimiter)))
    return widths.pop() if len(widths) == 1 else 0


def _guess_decimal(records: Sequence[Sequence[str]]) -> Decimal | None:
    """Return "comma" if the columns of numbers, with units or without, can only have a decimal comma; else None."""
    cells: list[tuple[int, str]] = []
    for column in zip(*records[1:], strict=False):
        filled = [cell for cell in column if cell]
        if filled and all(parse_number(with_point(cell)) is not None for cell in filled):
            cells += enumerate(filled)
    return "comma" if decimal_marks(cells).certain == "comma" else None
