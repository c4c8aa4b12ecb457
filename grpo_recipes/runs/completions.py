"""Logged completions in a run's folder: one file per step as TRL writes them, and compacted files of up to 1,000 steps.

    completions/completions_01001.parquet          one step, TRL's name
    completions/completions_00001-01000.parquet    compacted: the logged steps from 1 to 1,000, one row group per step
    completions/eval_completions_...               the same for evaluations during training
    completions/eval_NAME_completions_...          the same for an evaluation dataset with a name

Step files are removed only after the compacted file is on the disk under its name. A run that is killed therefore
leaves a step in the step file, in the compacted file, or in both. `logged` lists every step once. Nothing here imports
torch.

A column of Arrow has one type, and a policy may call a tool with a number once and with a text the next time.
`storable` therefore writes the arguments of calls as JSON text. Tables of TRL itself hold them as structs.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from grpo_recipes.runs import files
from grpo_rewards.errors import one_line

FOLDER = "completions"
TRAINING, EVALUATION = "completions", "eval_completions"

STEPS = 1000
"""Largest number of steps in a compacted file."""
BYTES = files.FILE_BYTES // 4
"""Largest size of a compacted file in memory. A reader accepts four times as much."""
SECONDS = 60.0
"""Time after which no further compacted file is begun at a save, because the other ranks wait in a collective call."""

NO_MAPPING = ""
"""Key under which arguments that are no mapping are stored. TRL prints only mappings."""
MOST_LEVELS = 100
"""Depth of nested arguments that is stored. Python's JSON reader and writer fail at about 1,000."""

# Keys of a call and of its function beside those two. A policy may write any others, and each would be a column.
_CALL_KEYS = frozenset({"type", "id", "index", "name"})

_STEP_FILE = re.compile(r"(.*completions)_(\d+)\.parquet")
_COMPACTED = re.compile(r"(.*completions)_(\d+)-(\d+)\.parquet")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Logged:
    """Completions of one step: a step file, or a row group of a compacted file."""

    step: int
    path: Path
    row_group: int | None = None


@dataclass(frozen=True)
class Source:
    """Completions in one file: the entire file, or some of its row groups."""

    path: Path
    row_groups: tuple[int, ...] | None = None


def logged(folder: Path, kind: str) -> list[Logged]:
    """Return the logged steps of a kind (`TRAINING`, `EVALUATION`) in order, each step once.

    A step that is in a compacted file and in a step file is read from the compacted file.

    Raises:
        RunError: a compacted file can't be read.
    """
    # Step files are listed first: a run under way removes them only after it has written the compacted file.
    single = _step_files(folder).get(kind, [])
    found = []
    for path in _compacted_files(folder):
        if _kind(path) == kind:
            found += _row_groups(path)
    compacted = {one.step for one in found}
    found += [one for one in single if one.step not in compacted]
    return sorted(found, key=lambda one: one.step)


def sources(steps: Iterable[Logged]) -> list[Source]:
    """Group steps by file, so that each file is opened once. Files are ordered by their first step."""
    row_groups: dict[Path, list[int]] = {}
    for one in steps:
        groups = row_groups.setdefault(one.path, [])
        if one.row_group is not None:
            groups.append(one.row_group)
    return [Source(path, tuple(groups) or None) for path, groups in row_groups.items()]


def read_batches(source: Source, columns: Mapping[str, files.Kind]) -> Iterator[pd.DataFrame]:
    """Yield the rows of a source as `files.read_batches` does, also if a run has compacted it in the meantime."""
    if source.row_groups is None and not source.path.exists() and (match := _STEP_FILE.fullmatch(source.path.name)):
        steps = [one for one in logged(source.path.parent, match[1]) if one.step == int(match[2])]
        source = next(iter(sources(steps)), source)
    yield from files.read_batches(source.path, columns, row_groups=source.row_groups)


def drop_after(folder: Path, step: int) -> int:
    """Remove the completions after a step, and step files whose rows are in a compacted file.

    A compacted file that can't be read stays, with a warning.

    Returns:
        Number of steps removed.

    Raises:
        RunError: something can't be removed. Rows of a compacted file would hide the rows that the run will log.
    """
    try:
        for part in folder.glob(".*completions.part"):
            part.unlink()
        return _drop_after(folder, step)
    except (OSError, pa.ArrowException) as error:
        raise files.RunError(
            f"{folder}: the completions after step {step} can't be removed ({one_line(error)}); free space on the "
            "disk, or move the folder away"
        ) from error


def _drop_after(folder: Path, step: int) -> int:
    dropped = 0
    compacted: dict[str, set[int]] = defaultdict(set)
    for path in _compacted_files(folder):
        try:
            steps = _row_groups(path)
        except files.RunError as error:
            logger.warning("%s", error)
            continue
        kept = [one for one in steps if one.step <= step]
        compacted[_kind(path)].update(one.step for one in kept)
        dropped += len(steps) - len(kept)
        if _span(path)[1] > step:
            _keep_only(path, kept, len(steps))
    for kind, single in _step_files(folder).items():
        for one in single:
            if one.step > step or one.step in compacted[kind]:
                one.path.unlink()
            dropped += one.step > step
    return dropped


def storable(conversations: Iterable[Any]) -> list[Any]:
    """Return the conversations of one column with messages that fit one Arrow type, whatever the policy has written.

    The messages themselves are not changed. Texts, and messages of texts, are returned as they are.

    - Arguments of a call are JSON text of a mapping, which is what TRL prints. Arguments that are no mapping stand
      under the key "".
    - If one message consists of content blocks, all do.
    - Lone surrogates, which UTF-8 does not have, are escaped.
    """
    listed = list(conversations)
    messages = [message for conversation in listed if isinstance(conversation, list) for message in conversation]
    has_blocks = any(isinstance(message.get("content"), list) for message in messages)
    stored = []
    for conversation in listed:
        if isinstance(conversation, list):
            conversation = [_storable_message(message, has_blocks) for message in conversation]
        stored.append(_encodable(conversation) if isinstance(conversation, str) else conversation)
    return stored


def arguments_of(stored: Any) -> Any:
    """Return the arguments of a logged call, from JSON text or from the struct of a table that TRL wrote.

    Arrow gives every struct of a column the fields of all: a field without a value counts as absent.
    """
    if isinstance(stored, str):
        try:
            value = json.loads(stored)
        except (ValueError, RecursionError):
            return stored
        return value[NO_MAPPING] if isinstance(value, dict) and set(value) == {NO_MAPPING} else value
    if isinstance(stored, Mapping):
        return {key: value for key, value in stored.items() if value is not None}
    return {} if stored is None else stored


def _storable_message(message: Mapping[str, Any], has_blocks: bool) -> dict[str, Any]:
    stored: dict[str, Any] = {}
    for key, value in message.items():
        if key == "tool_calls":
            if value is not None:  # TRL's print loops over the calls
                stored[key] = [_storable_call(call) for call in (value if isinstance(value, list) else [value])]
        elif key == "content" and has_blocks:
            stored[key] = None if value is None else [_block(one) for one in _as_blocks(value)]
        else:
            stored[_encodable(key)] = _storable_value(value)
    # Parquet has no struct without fields.
    return stored or {"role": "assistant", "content": [] if has_blocks else ""}


def _storable_call(call: Any) -> dict[str, Any]:
    """Return a call, or the function in it, with the keys of a call only. The others are stored in `other`."""
    if not isinstance(call, Mapping):
        return {"other": _json(call)}
    stored: dict[str, Any] = {}
    for key, value in call.items():
        if key == "arguments":
            stored[key] = _json_arguments(value)
        elif key == "function" and isinstance(value, Mapping):
            stored[key] = _storable_call(value)
        elif key in _CALL_KEYS:
            stored[key] = _storable_value(value)
    other = {key: value for key, value in call.items() if key not in stored}
    if other or not stored:  # parquet has no struct without fields
        stored["other"] = _json(other)
    return stored


def _json_arguments(arguments: Any) -> str:
    """Return arguments as JSON text of a mapping."""
    if isinstance(arguments, str):  # some templates write the arguments as JSON text
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    # TRL prints the names as they are: a lone surrogate would raise, an escape sequence control the terminal.
    is_plain = isinstance(arguments, Mapping) and all(isinstance(key, str) and key.isprintable() for key in arguments)
    if not is_plain or set(arguments) == {NO_MAPPING}:  # a policy may write that key too
        arguments = {NO_MAPPING: arguments}
    return _json(arguments)


def _json(value: Any) -> str:
    try:
        if _levels(value) > MOST_LEVELS:
            raise RecursionError
        return json.dumps(value, default=str)
    except (ValueError, TypeError, RecursionError):
        return json.dumps(
            {NO_MAPPING: f"a {type(value).__name__} that is nested too deeply or that JSON does not have"}
        )


def _levels(value: Any) -> int:
    """Return the depth of a nested value, or one more than `MOST_LEVELS` if it is deeper."""
    level, depth = [value], 0
    while level and depth <= MOST_LEVELS:
        depth += 1
        below: list[Any] = []
        for one in level:
            if isinstance(one, Mapping):
                below.extend(one.values())
            elif isinstance(one, (list, tuple)):
                below.extend(one)
        level = below
    return depth


def _storable_value(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return None if value is None else _encodable(value)
    return _json(value)


def _as_blocks(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _block(block: Any) -> dict[str, Any]:
    """Return a content block as TRL prints and strips it: a text, or an image with its object."""
    match block:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": _encodable(text)}
        case {"type": "image"}:
            return dict(block)
        case _:
            return {"type": "text", "text": _json(block)}


def _encodable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class Compaction:
    """Merges the step files of a run's folder into compacted files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: set[Path] = set()
        """Step files that stay as they are: damaged, too large, or unlike every other step file."""

    def compact(self, before: int, *, rest: bool = False) -> None:
        """Merge step files in groups of `STEPS`. If a file can't be written, log a warning and keep the step files.

        Args:
            before: step that ends the range of steps to merge. Its file, and that of an evaluation at step 0, are left
                out because TRL may write them again.
            rest: True to merge the last, incomplete group too.
        """
        deadline = time.monotonic() + SECONDS
        try:
            for kind, single in _step_files(self.folder).items():
                waiting = [one for one in single if 0 < one.step < before and one.path not in self._kept]
                while len(waiting) >= (2 if rest else STEPS):
                    self._merge(kind, waiting[:STEPS], deadline)
                    waiting = waiting[STEPS:]
        except (OSError, pa.ArrowException) as error:
            logger.warning(
                "%s: completions can't be compacted (%s); the remaining files stay as they are",
                self.folder,
                one_line(error),
            )

    def _merge(self, kind: str, steps: Sequence[Logged], deadline: float) -> None:
        """Merge step files into as many compacted files as their columns and sizes require."""
        kept: dict[Path, str] = {}
        while len(steps) > 1 and time.monotonic() < deadline:
            schema, alike = _first_alike(steps, kept)
            if len(alike) < 2:
                break
            merged = _write(self.folder, kind, schema, alike, kept)
            if not merged:
                break
            steps = [one for one in steps if one.step > merged[-1].step]
            self._kept.update(one.path for one in merged)  # if one of them can't be removed, it is not merged again
            for one in merged:
                one.path.unlink()
                self._kept.discard(one.path)
        self._kept.update(kept)
        if kept:
            path, reason = next(iter(kept.items()))
            more = f", and {len(kept) - 1} more files" if len(kept) > 1 else ""
            logger.warning("%s is not compacted and stays as it is (%s)%s", path, reason, more)


def _first_alike(steps: Sequence[Logged], kept: dict[Path, str]) -> tuple[pa.Schema, list[Logged]]:
    """Return the first step files that follow one another and whose columns fit one schema, and the schema.

    Files that can't be merged, or that fit neither the file before nor the one behind, are added to `kept` with the
    reason.
    """
    schema, alike = pa.schema([]), list[Logged]()
    for one in steps:
        try:
            own = _schema(one)
        except (OSError, ValueError, pa.ArrowException) as error:
            kept[one.path] = one_line(error)
            continue
        common = _common(schema, own) if alike else own
        if common is not None:
            schema = common
            alike.append(one)
        elif len(alike) > 1:
            break
        else:
            kept[alike[0].path] = "its columns have other types than those of other steps"
            schema, alike = own, [one]
    return schema, alike


def _schema(one: Logged) -> pa.Schema:
    """Return the schema of a step file. Raises ValueError if the file can't be a part of a compacted file."""
    if not one.path.is_file():
        raise ValueError("it is no ordinary file")
    metadata = parquet.read_metadata(one.path)
    schema = metadata.schema.to_arrow_schema().remove_metadata()  # pandas writes the number of rows into it
    size = sum(metadata.row_group(place).total_byte_size for place in range(metadata.num_row_groups))
    if not metadata.num_rows:
        raise ValueError("it has no rows")
    if size > BYTES:
        raise ValueError(f"it is larger than {BYTES >> 20} MiB")
    if schema.names.count("step") != 1 or len(set(schema.names)) < len(schema.names):
        raise ValueError("it has no column `step`, or two columns of one name")
    return schema


def _common(one: pa.Schema, other: pa.Schema) -> pa.Schema | None:
    """Return a schema that holds the values of both schemas, or None."""
    try:
        both = pa.unify_schemas([one, other], promote_options="permissive")
    except pa.ArrowException:
        return None
    # The permissive option also turns text into bytes.
    return None if "binary" in str(both.types) and not one.equals(other) else both


def _write(folder: Path, kind: str, schema: pa.Schema, steps: Sequence[Logged], kept: dict[Path, str]) -> list[Logged]:
    """Write the rows of the first step files to one compacted file, with one step in memory at a time.

    Files that can't be read are added to `kept`, with the reason.

    Returns:
        The step files whose rows are in the compacted file.
    """
    merged: list[Logged] = []
    size = 0
    with _unfinished(folder / f".{kind}.part") as part:
        with _writer(part, schema) as writer:
            for one in steps:
                try:
                    table = _table(one, schema)
                except (OSError, ValueError, pa.ArrowException) as error:
                    kept[one.path] = one_line(error)
                    continue
                size += table.nbytes
                if merged and size > BYTES:
                    break
                writer.write_table(table, row_group_size=len(table))
                merged.append(one)
        if merged:
            path = folder / _name(kind, merged[0].step, merged[-1].step)
            if path.exists():
                raise FileExistsError(f"{path} exists already")
            os.replace(part, path)
            files.flush(folder)
    return merged


def _table(one: Logged, schema: pa.Schema) -> pa.Table:
    """Return the rows of a step file in a schema. Raises if the file is damaged or does not fit the schema."""
    with parquet.ParquetFile(one.path) as file:
        table = file.read().replace_schema_metadata(None)
    if table["step"].unique().to_pylist() != [one.step]:
        raise ValueError("its column `step` differs from the step in its name")
    for field in schema:
        if field.name not in table.schema.names:
            table = table.append_column(field, pa.nulls(len(table), field.type))
    table = table.select(schema.names).cast(schema)
    if table.nbytes > BYTES:
        raise ValueError(f"it is larger than {BYTES >> 20} MiB")
    return table


def _keep_only(path: Path, kept: Sequence[Logged], count: int) -> None:
    """Remove all but some of the `count` row groups from a compacted file, and rename it after the remaining steps."""
    if not kept:
        path.unlink()
        return
    if len(kept) < count:
        with parquet.ParquetFile(path) as file, _unfinished(path.with_name(f".{_kind(path)}.part")) as part:
            with _writer(part, file.schema_arrow) as writer:
                for one in kept:
                    table = file.read_row_group(one.row_group)
                    writer.write_table(table, row_group_size=len(table))
            # The old name is replaced first: a run killed before the rename would otherwise leave rows in two files.
            os.replace(part, path)
    path.rename(path.with_name(_name(_kind(path), kept[0].step, kept[-1].step)))
    files.flush(path.parent)


@contextmanager
def _unfinished(part: Path) -> Iterator[Path]:
    """Yield the path of an unfinished file, which is removed at the end unless the block has renamed it."""
    part.unlink(missing_ok=True)
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _writer(path: Path, schema: pa.Schema) -> Iterator[parquet.ParquetWriter]:
    """Yield a writer of a new parquet file, which is flushed to the disk at the end of the block."""
    # "x" fails if a link was put in place of the file. Opening the name to write would follow the link.
    with path.open("xb") as file:
        with parquet.ParquetWriter(file, schema) as writer:
            yield writer
        file.flush()
        os.fsync(file.fileno())


def _row_groups(path: Path) -> list[Logged]:
    """Return the steps of a compacted file in order.

    Raises:
        RunError: The file is damaged or not a compacted one.
    """
    files.check_ordinary(path, files.RESTORE)
    try:
        metadata = parquet.read_metadata(path)
        columns = [metadata.schema.column(place).path for place in range(len(metadata.schema))]
        column = columns.index("step")
        steps = []
        for place in range(metadata.num_row_groups):
            bounds = metadata.row_group(place).column(column).statistics
            if bounds is None or bounds.min != bounds.max or not isinstance(bounds.min, int):
                raise ValueError(f"its row group {place} does not hold one step")
            steps.append(Logged(bounds.min, path, place))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise files.RunError(
            f"{path}: can't be read as compacted completions ({one_line(error)}); {files.RESTORE}"
        ) from error
    return steps


def _step_files(folder: Path) -> dict[str, list[Logged]]:
    """Return the step files in a folder by kind, in order."""
    found: dict[str, list[Logged]] = defaultdict(list)
    for path in folder.glob("*.parquet"):
        if match := _STEP_FILE.fullmatch(path.name):
            found[match[1]].append(Logged(int(match[2]), path))
    return {kind: sorted(found[kind], key=lambda one: one.step) for kind in sorted(found)}


def _compacted_files(folder: Path) -> list[Path]:
    """Return the compacted files of every kind in a folder, in order."""
    paths = [path for path in folder.glob("*.parquet") if _COMPACTED.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (_kind(path), *_span(path)))


def _name(kind: str, first: int, last: int) -> str:
    return f"{kind}_{first:05d}-{last:05d}.parquet"


def _kind(path: Path) -> str:
    return path.name.rpartition("_")[0]


def _span(path: Path) -> tuple[int, int]:
    """Return the first and the last step in the name of a compacted file."""
    first, _, last = path.stem.rpartition("_")[2].partition("-")
    return int(first), int(last)
