"""Tables behind the paths of a recipe, memory-mapped, with the position of each row for error messages.

A path is a file, a glob of files, a folder written by `save_to_disk`, or a dataset on the Hugging Face Hub. Several
sources form a mixture, with the keys and the meaning of TRL's `DatasetMixtureConfig`.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grpo_recipes.data import tables, text_files
from grpo_recipes.data.hub import cache_only_if_hub_is_silent, is_missing
from grpo_recipes.data.places import Place, Places, joined, numbered, selected
from grpo_recipes.data.text_files import COMPRESSIONS, TEXT_SUFFIXES, TextFormat, suffix_of
from grpo_recipes.recipe.dataset import SourceSpec
from grpo_recipes.recipe.specs import RecipeError
from grpo_rewards.errors import UserError, one_line, shortened
from grpo_rewards.files import expanded, relative_to

SOURCE = "source"
"""Column with the source of each row of a mixture."""

SUFFIXES = (*TEXT_SUFFIXES, ".parquet")
"""Suffixes of the files that are read. One of `COMPRESSIONS` may follow the suffix of a text file."""

_A_FILE = f"{', '.join(SUFFIXES)} file ({' or '.join(COMPRESSIONS)} may follow, except for .parquet)"

# Name of the only split of a table without splits, which is read under any name.
_ANY_SPLIT = ""


class DatasetUnreachable(RecipeError):
    """Error for a dataset that is not in the local cache while the hub does not answer."""


@dataclass(frozen=True)
class Keys:
    """Keys of `dataset` that name a path and its split, for error messages."""

    path: str
    split: str


@dataclass(frozen=True)
class PlacedRows:
    """Table with the position of each row in the user's files."""

    table: datasets.Dataset
    places: Places

    def place(self, index: int) -> Place:
        """Return the position of one row."""
        return self.places([index])[0]


def read(source: SourceSpec, keys: Keys, trained_split: str | None = None) -> PlacedRows:
    """Return the rows of one source. `split` and `columns` are applied, and `fraction` is not.

    Args:
        source: source to read.
        keys: keys that name the source, for error messages.
        trained_split: split of the training rows if these are held-out rows of the same path.

    Raises:
        DatasetUnreachable: the hub does not answer, and the local cache has no copy.
        UserError: the source is not readable, or some rows of a table without splits are trained and evaluated on.
    """
    splits = None
    if source.data_files is None and source.data_dir is None:
        splits = _local_splits(source, keys)
    if splits is not None and _ANY_SPLIT in splits and trained_split is not None:
        check_shared(len(splits[_ANY_SPLIT].table), trained_split, source, keys)
    rows = _hub_rows(source, keys) if splits is None else sliced(splits, source.split, keys)
    rows = _with_columns(PlacedRows(_as_written(rows.table), rows.places), source)
    tables.check_columns(len(rows.table.column_names), source.path)
    tables.check_no_images(rows.table, source.path)
    return rows


# Files and folders on this machine


def _local_splits(source: SourceSpec, keys: Keys) -> dict[str, PlacedRows] | None:
    """Return the splits of a file, a glob or a folder by name, or None for a dataset on the hub.

    The only split of a table without splits has the name "".
    """
    path = expanded(source.path)
    if not path.is_dir():
        return {_ANY_SPLIT: file_rows(source, keys)} if _names_files(source.path) else None
    _check_notation(source, vars(TextFormat()))
    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:  # datasets raises any class for files that are damaged or without rows
        problem = f"the folder holds no rows written by save_to_disk ({tables.reason_of(error)})"
        raise UserError(f"`dataset.{keys.path}`: {path}", problem, "write them so, or name a file") from error
    if isinstance(saved, datasets.Dataset):
        return {_ANY_SPLIT: PlacedRows(saved, numbered(path))}
    return {split: PlacedRows(table, numbered(f"{path}, {split}")) for split, table in saved.items()}


def has_one_split(path: str) -> bool:
    """Return True if a path is read under any split name: files, or one saved `Dataset`."""
    folder = expanded(path)
    return not (folder / "dataset_dict.json").is_file() if folder.is_dir() else _names_files(path)


def _names_files(path: str) -> bool:
    """Return True if a path is that of a file or a glob, and not of a dataset on the hub."""
    file = expanded(path)
    return file.exists() or suffix_of(file) == ".jsonl" or glob.has_magic(path)


def guess_source(path: str) -> SourceSpec:
    """Return the source of a path, with `delimiter`, `encoding` and `decimal` where a text table needs them.

    The first file of a glob decides.

    Raises:
        UserError: the file can't be read, or a glob matches none.
    """
    paths = _files(path, Keys("path", "split"))
    if not paths[0].is_file() or suffix_of(paths[0]) not in TEXT_SUFFIXES:
        return SourceSpec(path)
    return SourceSpec(path, **vars(text_files.guess_format(paths[0])))


def _files(pattern: str, keys: Keys) -> list[Path]:
    """Return the files that match a glob, sorted by name, or the one path if `pattern` is not a glob."""
    path = expanded(pattern)
    if path.exists() or not glob.has_magic(pattern):
        return [path]
    paths = [Path(found) for found in sorted(glob.glob(str(path), recursive=True))]
    if not paths:
        problem = f"no file matches {pattern}{relative_to(pattern)}"
        raise UserError(f"`dataset.{keys.path}`", problem, "correct the pattern")
    return paths


def unread_notation(path: str) -> set[str]:
    """Return the keys of `TextFormat` that have no effect on a path with this suffix."""
    if text_files.has_cells(Path(path)):
        return set()
    return set(vars(TextFormat())) - ({"encoding"} if suffix_of(Path(path)) in TEXT_SUFFIXES else set())


def _check_notation(source: SourceSpec, unread: Iterable[str]) -> None:
    """Raise `UserError` if a source has one of the keys in `unread`, which have no effect on it."""
    for key in sorted(unread):
        if getattr(source, key) is not None:
            files = "text files" if key == "encoding" else ".csv and .tsv files"
            problem = f"it describes {files}, and {source.path} is none"
            raise UserError(f"`dataset.{key}`", problem, "remove it, or give each source of a list keys of its own")


def file_rows(source: SourceSpec, keys: Keys) -> PlacedRows:
    """Return all rows of a file, or of the files of a glob, which have one format."""
    paths = _files(source.path, keys)
    for path in paths:
        if path.exists() and not path.is_file():  # reading a pipe or a device may never end
            raise UserError(f"`dataset.{keys.path}`: {path}", "it is not a regular file", f"name a {_A_FILE}")
        if suffix_of(path) not in SUFFIXES:
            raise UserError(f"`dataset.{keys.path}`: {path}", f"it is not a {_A_FILE}", "convert it")
        if suffix_of(path) != suffix_of(paths[0]):
            problem = f"{paths[0]} and {path} are of two kinds"
            raise UserError(f"`dataset.{keys.path}`", problem, "name files of one kind")
    _check_notation(source, unread_notation(str(paths[0])))
    if paths[0].suffix != ".parquet":
        notation = TextFormat(source.delimiter, source.encoding, source.decimal)
        places = partial(text_files.text_places, paths, keys.path, notation)
        return PlacedRows(text_files.read_text_files(paths, keys.path, notation), places)
    name = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    try:
        table = datasets.load_dataset("parquet", data_files=[str(path) for path in paths], split="train")
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        problem = f"it can't be read as Parquet ({tables.reason_of(error.__cause__ or error)})"
        raise UserError(f"`dataset.{keys.path}`: {name}", problem, "replace it") from error
    return PlacedRows(table, numbered(name))


# The hub


def _hub_rows(source: SourceSpec, keys: Keys) -> PlacedRows:
    if is_missing(source.path):
        problem = f"there is no such file or folder{relative_to(source.path)}"
        raise UserError(f"`dataset.{keys.path}`: {source.path}", problem, "correct the path")
    _check_notation(source, vars(TextFormat()))
    given = {"data_dir": source.data_dir, "data_files": source.data_files}
    files = {key: value for key, value in given.items() if value is not None}
    try:
        with cache_only_if_hub_is_silent():
            table = datasets.load_dataset(source.path, source.name, split=source.split, **files)
    except ConnectionError as error:
        problem = "it is not a file or folder here, the Hugging Face Hub can't be reached and its cache has no copy"
        fix = "connect, or give a local .jsonl file or save_to_disk folder"
        raise DatasetUnreachable(f"`dataset.{keys.path}`: {source.path}", problem, fix) from error
    except (datasets.exceptions.DatasetsError, OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        # The last three come from arguments that datasets does not expect.
        problem = f"it can't be loaded from the Hugging Face Hub ({tables.reason_of(error)})"
        fix = "correct the path, the config or the split"
        raise UserError(f"`dataset.{keys.path}`: {source.path}", problem, fix) from error
    return PlacedRows(table, numbered(f"{source.path}, {source.split}"))


# Splits


def sliced(splits: Mapping[str, PlacedRows], split: str, keys: Keys) -> PlacedRows:
    """Return the rows that `split` names. A table without splits is read under any name."""
    if _ANY_SPLIT in splits:
        splits = dict.fromkeys(_split_names(split), splits[_ANY_SPLIT])
    lengths = {name: len(rows.table) for name, rows in splits.items()}
    return _joined([_part(splits[name], start, stop) for name, start, stop in slices(lengths, split, keys)])


def slices(lengths: Mapping[str, int], split: str, keys: Keys) -> list[tuple[str, int, int]]:
    """Return the parts that `split` names, as (name, start, stop). Raise `UserError` for an invalid split."""
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(dict(lengths))
    except (ValueError, AssertionError) as error:
        problem = f"{split!r} can't be read ({tables.reason_of(error)})"
        raise UserError(f"`dataset.{keys.split}`", problem, "write for example train or train[:5%]") from error
    return [(part.splitname, part.from_, part.to) for part in parts]


def rows_in_common(length: int, splits: Sequence[str], keys: Keys) -> int:
    """Return the number of rows that all of `splits` name, in a table of `length` rows without splits."""
    named = np.ones(length, bool)
    for split in splits:
        taken = np.zeros(length, bool)
        for _, start, stop in slices(dict.fromkeys(_split_names(split), length), split, keys):
            taken[start:stop] = True
        named &= taken
    return int(named.sum())


def check_shared(length: int, trained_split: str, source: SourceSpec, keys: Keys) -> None:
    """Raise `UserError` if some of the `length` rows of a table without splits are both trained and evaluated on.

    Without the check, `split: train` and `eval_split: test` of one file would silently name the same rows.
    """
    if shared := rows_in_common(length, (trained_split, source.split), keys):
        problem = f"{shared} rows of {source.path}, which holds one split, would be both trained and evaluated on"
        raise UserError("`dataset.eval_split`", problem, "set eval_path, slices that do not overlap, or eval_share")


def _split_names(split: str) -> list[str]:
    return [part.partition("[")[0].partition("(")[0].strip() for part in split.split("+")]


def _part(rows: PlacedRows, start: int, stop: int) -> PlacedRows:
    if (start, stop) == (0, len(rows.table)):
        return rows
    return PlacedRows(rows.table.select(range(start, stop)), selected(rows.places, range(start, stop)))


def _joined(parts: Sequence[PlacedRows]) -> PlacedRows:
    """Return the parts one after the other. A column that a part lacks is null there."""
    if len(parts) == 1:
        return parts[0]
    places = joined([(len(part.table), part.places) for part in parts])
    return PlacedRows(datasets.concatenate_datasets([part.table for part in parts]), places)


# Columns and mixtures


def _as_written(table: datasets.Dataset) -> datasets.Dataset:
    """Return the table with class labels by name, and 32-bit floats as they are written (0.1, not 0.10000000149)."""
    columns = {}
    for name, kind in table.features.items():
        is_label = isinstance(kind, datasets.ClassLabel) and kind.names
        if len(table) > 0 and (is_label or kind == datasets.Value("float32")):
            read = table.select_columns([name]).with_format("arrow")[:][name]
            if is_label:  # -1 stands for no label
                columns[name] = pc.take(pa.array(kind.names), pc.if_else(pc.less(read, 0), None, read))
            else:
                columns[name] = pc.cast(pc.cast(read, pa.string()), pa.float64())
    if not columns:
        return table
    others = table.select_columns([name for name in table.column_names if name not in columns])
    written = datasets.Dataset(pa.table(columns), fingerprint=f"{table._fingerprint}-written")
    parts = [others, written] if others.column_names else [written]
    return datasets.concatenate_datasets(parts, axis=1).select_columns(table.column_names)


def _with_columns(rows: PlacedRows, source: SourceSpec) -> PlacedRows:
    """Apply `columns`: a list selects columns, a mapping renames columns and keeps the others."""
    columns, table = source.columns, rows.table
    if not columns:
        return rows
    if isinstance(columns, dict):
        for new, old in columns.items():
            table = _with_nested(table, old, keeps_parent=new != old.partition(".")[0])
    names = table.column_names
    wanted = list(columns.values()) if isinstance(columns, dict) else columns
    for name in wanted:
        if name not in names:
            problem = f"{source.path} has no column {name!r} (it has {tables.listed(names)})"
            raise UserError("`dataset.columns`", problem, "correct the name")
    if not isinstance(columns, dict):
        return PlacedRows(table.select_columns(list(columns)), rows.places)
    others = [name for name in names if name not in wanted]
    for new, old in columns.items():
        if new in others:
            problem = f"`{new}: {old}` meets a column {new!r} of {source.path}"
            raise UserError("`dataset.columns`", problem, f"rename it, as `other_{new}: {new}`")
    # `rename_columns` on the whole table can't give one column two names, so each name gets a table of one column.
    parts = [table.select_columns([old]).rename_columns({old: new}) for new, old in columns.items()]
    return PlacedRows(datasets.concatenate_datasets([*parts, table.select_columns(others)], axis=1), rows.places)


def _with_nested(table: datasets.Dataset, path: str, *, keeps_parent: bool) -> datasets.Dataset:
    """Return the table with the column at a dotted path, as in `conversation.messages`.

    Args:
        table: table with the column of the objects.
        path: name of a column, for which the table is returned as it is, or path of a key in the objects of a column.
        keeps_parent: False to drop the column of the objects.
    """
    parent = path.partition(".")[0]
    if path in table.column_names or parent not in table.column_names:
        return table
    depth = path.count(".")
    flat = table.select_columns([parent]).flatten(max_depth=depth + 1)  # `datasets` flattens once less than its limit
    if path not in flat.column_names:
        return table  # the caller names the columns
    if not keeps_parent:
        table = table.remove_columns([parent])
    return datasets.concatenate_datasets([table, flat.select_columns([path])], axis=1)


def mixed(sources: Sequence[SourceSpec], keys: Keys) -> PlacedRows:
    """Return the rows of several sources, one source after the other, with the column `source`.

    With fractions, source i gives its first round(w_i N) rows. w_i is its fraction over the sum of all fractions, and N
    is the largest number for which every source has enough rows, as in `trl.scripts.utils.get_dataset`.

    Raises:
        UserError: two sources have a column of the same name with different types.
    """
    parts = [read(source, keys) for source in sources]
    total = sum(source.fraction or 0.0 for source in sources)
    if total:
        weights = [(source.fraction or 0.0) / total for source in sources]
        size = min(len(part.table) / weight for part, weight in zip(parts, weights, strict=True))
        parts = [_part(part, 0, round(weight * size)) for part, weight in zip(parts, weights, strict=True)]
    named = []
    for part, source in zip(parts, sources, strict=True):
        if SOURCE in part.table.column_names:
            problem = f"it has a column {SOURCE!r}, which a mixture adds"
            fix = "rename it in its `columns`, as in `origin: source`"
            raise UserError(f"`dataset.{keys.path}`: {source.path}", problem, fix)
        name = source.path if source.name is None else f"{source.path}/{source.name}"
        named.append(PlacedRows(part.table.add_column(SOURCE, [name] * len(part.table)), part.places))
    try:
        return _joined(named)
    except ValueError as error:  # the message of `datasets` begins with the column and its two types
        paths, reason = " and ".join(source.path for source in sources), shortened(one_line(error), tables.SHOWN)
        problem, fix = f"a column has different types ({reason})", "give it one type, or rename it in `columns` of one"
        raise UserError(f"`dataset.{keys.path}`: {paths}", problem, fix) from error
