"""Where rows lie: a path of a recipe as a table of `datasets`, memory-mapped, each row of which knows its place.

A path is a file or a glob of files, a folder written by `save_to_disk`, or a dataset on the Hugging Face Hub. Several sources
make a mixture, with the keys and the meaning of TRL's `DatasetMixtureConfig`.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from grpo_recipes.data import text_files
from grpo_recipes.data.hub import cache_only_if_hub_is_silent, is_missing
from grpo_recipes.data.tables import check_columns, check_fields, listed
from grpo_recipes.recipe.specs import RecipeError, SourceSpec
from grpo_rewards.errors import UserError, one_line

SOURCE = "source"
"""The column that says which source of a mixture a row is from."""

FILES = (*text_files.SUFFIXES, ".parquet")

# A table without splits answers to the name of any.
_ANY_SPLIT = ""


class DatasetUnreachable(RecipeError):
    """A dataset on the hub that does not answer and has no copy in the local cache."""


@dataclass(frozen=True)
class Keys:
    """The keys of `dataset` that name a path and its split, for error messages."""

    path: str
    split: str


@dataclass(frozen=True)
class Rows:
    """A table, and where each of its rows stands: a file and its line, or the row of a table, counted from 1."""

    table: datasets.Dataset
    place: Callable[[int], str]


def read(source: SourceSpec, keys: Keys) -> Rows:
    """The rows of one source, its split and columns applied, `fraction` not.

    Raises:
        DatasetUnreachable: the hub does not answer and the local cache has no copy.
        UserError: nothing to read there.
    """
    if source.data_files is not None or source.data_dir is not None:
        rows = _hub_rows(source, keys)
    else:
        splits = local_splits(source, keys)
        rows = _hub_rows(source, keys) if splits is None else sliced(splits, source.split, keys)
    rows = with_columns(rows, source, keys)
    check_columns(len(rows.table.column_names), source.path)
    check_fields(rows.table.features.arrow_schema.types, source.path)
    return rows


def local_splits(source: SourceSpec, keys: Keys) -> dict[str, Rows] | None:
    """The splits of a file, a glob or a folder; the lone one of a table without splits is named ""; None if it is none."""
    path = Path(source.path).expanduser()
    if path.is_dir():
        return _saved_splits(path, keys)
    paths = _matching(source.path, keys)
    if paths is None and (path.exists() or path.suffix == ".jsonl"):
        paths = [path]
    return None if paths is None else {_ANY_SPLIT: _file_rows(paths, keys)}


def _matching(pattern: str, keys: Keys) -> list[Path] | None:
    """The files that match a glob, by name; None for what is no glob. Raises `UserError` if there are none."""
    path = Path(pattern).expanduser()
    if path.exists() or not glob.has_magic(pattern):
        return None
    paths = [Path(found) for found in sorted(glob.glob(str(path), recursive=True))]
    if not paths:
        raise UserError(f"`dataset.{keys.path}`: no file matches {pattern}: correct the pattern")
    return paths


def file_objects(source: SourceSpec, keys: Keys) -> Iterator[tuple[Callable[[], str], Mapping[str, Any]]]:
    """The rows of a file or a glob one by one, as they are written, each with its place."""
    paths = _matching(source.path, keys) or [Path(source.path).expanduser()]
    if paths[0].suffix in text_files.SUFFIXES:
        yield from text_files.objects(paths, keys.path)
    else:
        rows = _file_rows(paths, keys)
        yield from ((partial(rows.place, index), row) for index, row in enumerate(rows.table))


def has_one_split(path: str) -> bool:
    """Whether what lies there is read whole whatever split is named: files, or one saved `Dataset`."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return not (folder / "dataset_dict.json").is_file()
    return folder.exists() or folder.suffix == ".jsonl" or glob.has_magic(path)


def _file_rows(paths: Sequence[Path], keys: Keys) -> Rows:
    """The rows of files of one kind, one file after the other."""
    for path in paths:
        if path.exists() and not path.is_file():  # reading a pipe or a device may never end
            raise UserError(f"`dataset.{keys.path}`: {path} is no ordinary file: name a {', '.join(FILES)} file")
        if path.suffix not in FILES:
            raise UserError(
                f"`dataset.{keys.path}`: {path} is not a {', '.join(FILES[:-1])} or {FILES[-1]} file: convert it, or name "
                "its folder"
            )
        if path.suffix != paths[0].suffix:
            raise UserError(
                f"`dataset.{keys.path}`: {paths[0]} and {path} are of two kinds: read one kind with a pattern"
            )
    if paths[0].suffix == ".parquet":
        table = _parquet_table(paths, keys)
        return Rows(table, lambda index: f"{_first_and_count(paths)}, row {index + 1}")
    return Rows(text_files.read(paths, keys.path), lambda index: text_files.place(paths, keys.path, index))


def _parquet_table(paths: Sequence[Path], keys: Keys) -> datasets.Dataset:
    try:
        return datasets.load_dataset("parquet", data_files=[str(path) for path in paths], split="train")
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        reason = _reason(error.__cause__ or error)
        raise UserError(
            f"`dataset.{keys.path}`: {_first_and_count(paths)} can't be read as Parquet ({reason}): correct the path or the "
            "file"
        ) from error


def _first_and_count(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _saved_splits(path: Path, keys: Keys) -> dict[str, Rows]:
    try:
        saved = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"`dataset.{keys.path}`: the folder {path} was not written by save_to_disk: write it so or name a file"
        ) from error
    if isinstance(saved, datasets.Dataset):
        return {_ANY_SPLIT: Rows(saved, lambda index: f"{path}, row {index + 1}")}
    return {split: Rows(table, _numbered(f"{path}, {split}")) for split, table in saved.items()}


def _numbered(where: str) -> Callable[[int], str]:
    return lambda index: f"{where}, row {index + 1}"


def _hub_rows(source: SourceSpec, keys: Keys) -> Rows:
    if is_missing(source.path):
        raise UserError(f"`dataset.{keys.path}`: there is no file or folder {source.path}: correct the path")
    files = {key: value for key in ("data_dir", "data_files") if (value := getattr(source, key)) is not None}
    try:
        with cache_only_if_hub_is_silent():
            table = datasets.load_dataset(source.path, source.name, split=source.split, **files)
    except ConnectionError as error:
        raise DatasetUnreachable(
            f"`dataset.{keys.path}`: {source.path!r} is no file or folder here, the Hugging Face Hub can't be reached "
            "and its cache has no copy: connect, or give a local .jsonl file or save_to_disk folder"
        ) from error
    except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
        raise UserError(
            f"`dataset.{keys.path}`: {source.path!r} can't be loaded from the Hugging Face Hub ({_reason(error)}): "
            "correct the path, the config or the split"
        ) from error
    return Rows(table, _numbered(f"{source.path}, {source.split}"))


# Splits


def sliced(splits: Mapping[str, Rows], split: str, keys: Keys) -> Rows:
    """The rows that `split` names; a lone split without a name answers to any."""
    if _ANY_SPLIT in splits:
        splits = dict.fromkeys(_split_names(split), splits[_ANY_SPLIT])
    parts = slices({name: len(rows.table) for name, rows in splits.items()}, split, keys)
    return joined([_part(splits[name], start, stop) for name, start, stop in parts])


def _part(rows: Rows, start: int, stop: int) -> Rows:
    if (start, stop) == (0, len(rows.table)):
        return rows
    return Rows(rows.table.select(range(start, stop)), lambda index: rows.place(start + index))


def joined(parts: Sequence[Rows]) -> Rows:
    """The parts one after the other; a column that a part lacks is null there."""
    if len(parts) == 1:
        return parts[0]

    def place(index: int) -> str:
        for part in parts:
            if index < len(part.table):
                return part.place(index)
            index -= len(part.table)
        raise IndexError(index)

    return Rows(datasets.concatenate_datasets([part.table for part in parts]), place)


def slices(lengths: Mapping[str, int], split: str, keys: Keys) -> list[tuple[str, int, int]]:
    """The parts that `split` names, as (name, start, stop). Raises `UserError` for what can't be read."""
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(dict(lengths))
    except (ValueError, AssertionError) as error:
        raise UserError(
            f"`dataset.{keys.split}`: {split!r} can't be read ({_reason(error)}): write for example train or train[:5%]"
        ) from error
    return [(part.splitname, part.from_, part.to) for part in parts]


def rows_in_common(length: int, splits: Sequence[str], keys: Keys) -> int:
    """How many of the `length` rows of a table without splits both of two splits name."""

    named = np.zeros((len(splits), length), bool)
    for taken, split in zip(named, splits, strict=True):
        for _, start, stop in slices(dict.fromkeys(_split_names(split), length), split, keys):
            taken[start:stop] = True
    return int(named.all(0).sum())


def _split_names(split: str) -> list[str]:
    return [part.partition("[")[0].partition("(")[0].strip() for part in split.split("+")]


# Columns and mixtures


def with_columns(rows: Rows, source: SourceSpec, keys: Keys) -> Rows:
    """Apply `columns`: a list takes those alone, a mapping gives columns new names and keeps the others as they are."""
    columns, table = source.columns, rows.table
    if not columns:
        return rows
    wanted = list(columns.values()) if isinstance(columns, dict) else columns
    there, taken = set(table.column_names), set(wanted)
    if missing := [name for name in wanted if name not in there]:
        raise UserError(
            f"`dataset.columns`: {source.path} has no column {missing[0]!r} (it has {listed(table.column_names)}): "
            "correct the name"
        )
    if not isinstance(columns, dict):
        return Rows(table.select_columns(list(columns)), rows.place)
    others = [name for name in table.column_names if name not in taken]
    if clash := [name for name in columns if name in there - taken]:
        raise UserError(
            f"`dataset.columns`: `{clash[0]}: {columns[clash[0]]}` meets a column {clash[0]!r} that {source.path} has "
            f"already: give that one a new name too, as in `other_{clash[0]}: {clash[0]}`"
        )
    # One column may get two names, so they are renamed one by one and put beside each other.
    parts = [table.select_columns([old]).rename_columns({old: new}) for new, old in columns.items()]
    parts += [table.select_columns(others)] if others else []
    return Rows(datasets.concatenate_datasets(parts, axis=1) if len(parts) > 1 else parts[0], rows.place)


def mixed(sources: Sequence[SourceSpec], keys: Keys) -> Rows:
    """The rows of several sources, one source after the other, with the column `source`.

    With fractions, source i gives its first round(w_i N) rows, where w_i is its fraction over the sum of them and N the
    largest number for which no source is short: `trl.scripts.utils.get_dataset`.

    Raises `UserError` for sources whose columns have the same name and different types.
    """
    parts = [read(source, keys) for source in sources]
    total = sum(source.fraction or 0.0 for source in sources)
    if total:
        weights = [(source.fraction or 0.0) / total for source in sources]
        size = min(len(part.table) / weight for part, weight in zip(parts, weights, strict=True))
        parts = [_part(part, 0, round(weight * size)) for part, weight in zip(parts, weights, strict=True)]
    _check_types(parts, sources, keys)
    return joined([_with_source(part, source) for part, source in zip(parts, sources, strict=True)])


def _check_types(parts: Sequence[Rows], sources: Sequence[SourceSpec], keys: Keys) -> None:
    known: dict[str, tuple[Any, str]] = {}
    for part, source in zip(parts, sources, strict=True):
        if SOURCE in part.table.column_names:
            raise UserError(
                f"`dataset.{keys.path}`: {source.path} has a column {SOURCE!r}, which a mixture adds: give it another name in "
                "its `columns`, as in `origin: source`"
            )
        for name, feature in part.table.features.items():
            before, path = known.setdefault(name, (feature, source.path))
            if before != feature and datasets.Value("null") not in (before, feature):
                raise UserError(
                    f"`dataset.{keys.path}`: the column {name!r} is {_type_name(before)} in {path} and {_type_name(feature)} "
                    f"in {source.path}: give both one type, or one of them another name in its `columns`"
                )


def _type_name(feature: Any) -> str:
    return feature.dtype if isinstance(feature, datasets.Value) else type(feature).__name__.lower()


def _with_source(part: Rows, source: SourceSpec) -> Rows:
    name = source.path if source.name is None else f"{source.path}/{source.name}"
    return Rows(part.table.add_column(SOURCE, [name] * len(part.table)), part.place)


def _reason(error: BaseException) -> str:
    """What an error says, on one line."""
    return one_line(error).rstrip(".") or type(error).__name__
