"""Kinds of values and columns in the files of runs, shapes, and limits."""

import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from grpo_recipes.runs import files
from grpo_recipes.runs.files import Condition
from tests.support.errors import refused


def interval(low: Any, value: Any, high: Any) -> dict[str, Any]:
    return {"low": low, "value": value, "high": high}


NO_INTERVALS = [
    interval(1, 0, 2), interval(0, 2, 1), interval(math.nan, 0, 1), interval(0, 1, math.inf), interval("0", 0, 1),
    {"low": 0, "value": 0}, {}, "half", 0.5, None, [0, 0, 1], interval(None, 1, 2), interval(0, 1, None),
]  # fmt: skip


HELD: list[tuple[Condition, list[Any], list[Any]]] = [
    (files.TEXT, ["", "a"], [None, 1, []]),
    (files.TEXT_OR_NULL, [None, "", "a"], [1, []]),
    (files.INTEGER, [0, -3, 10**400], [True, 1.0, "1", None]),
    (files.INTEGER_OR_NULL, [None, 0, 5], [False, 1.5, "5"]),
    (files.STEP, [0, 2**63 - 1], [-1, 2**63, True, 1.0, "two", None]),
    (files.NUMBER, [0, -1.5, math.inf, math.nan, 2**63 - 1, 1 - 2**63], [2**63, -(2**63), True, "1", None]),
    (files.NUMBER_OR_NULL, [None, 0.5, 3], [2**63, "1"]),
    (files.ESTIMATE, [interval(-1, 0, 2), interval(3, 3, 3), interval(None, 4, None)], NO_INTERVALS),
    (
        files.SHARE,
        [interval(0, 0.5, 1), interval(0, 0, 0)],
        [interval(-0.1, 0, 1), interval(0, 1, 1.1), interval(None, 0.5, None), *NO_INTERVALS],
    ),
]
COLUMNS: list[tuple[Condition, list[list[Any]], list[list[Any]]]] = [
    (files.INTEGERS, [[1, -2]], [[1.5], ["1"], [True], [None]]),
    (files.NUMBERS, [[1, 2], [0.5], [True], [None, None], [math.nan, 1.0]], [["1"], [1.0, "a"]]),
    (files.BOOLEANS, [[True, False]], [[1], ["True"], [True, None]]),
    (files.TEXTS, [["a", ""]], [["a", None], [1], ["a", 1]]),
    (files.TEXTS_OR_NULL, [["a", None], [None]], [["a", 1]]),
    (
        files.CONVERSATIONS,
        [["a", [{"role": "user", "content": "a"}]], [[]], [[{}, {}]]],
        [[3], [None], [{"role": "user"}], [{}], [b"a"], [b""], [[{}, 3]], [[{}, None]], ["a", ["b"]]],
    ),
]


def test_values_and_columns_are_of_their_kinds() -> None:
    columns = [(kind, *([pd.Series(one) for one in part] for part in parts)) for kind, *parts in COLUMNS]
    for kind, right, wrong in [*HELD, *columns]:
        assert [value for value in right if not kind.holds(value)] == []
        assert [value for value in wrong if kind.holds(value)] == []


SHAPE: files.Shape = {
    "name": files.TEXT,
    "parts?": [{"size": files.INTEGER}],
    "more?": {"*?": files.NUMBER},
    "any?": [],
}


def test_the_first_difference_from_a_shape_is_named() -> None:
    for same in (
        {"name": "a"},
        {"name": "a", "parts": [], "more": {}, "any": [1, {}, None], "unknown": object},
        {"name": "a", "parts": [{"size": 1}, {"size": 2, "x": 3}], "more": {"b": 0.5}},
    ):
        assert files.mismatch(same, SHAPE) is None
    for value, figures in (
        ([], "list object"),
        (None, "null object"),
        ("a" * 99, f"{'a' * 36}..., object"),
        ({}, "`name`"),
        ({"name": {}}, "`name` object text"),
        ({"name": "a", "parts": {}}, "`parts` object list"),
        ({"name": "a", "parts": [{"size": 1}, 7]}, "`parts[1]` 7 object"),
        ({"name": "a", "parts": [{"size": 1}, {}]}, "`parts[1]` `size`"),
        ({"name": "a", "more": {"b": 1, "c": "x"}}, '`more.c` "x" number'),
        ({"name": "a", "any": 3}, "`any` 3 list"),
    ):
        assert re.search(".*".join(map(re.escape, figures.split())), str(files.mismatch(value, SHAPE)))


def test_a_file_is_read_or_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(FileNotFoundError):
        files.read_object(path, SHAPE)
    path.write_bytes('{"name": "größer"}'.encode())
    assert files.read_object(path, SHAPE) == {"name": "größer"}
    for content in ("[]", "{"):
        path.write_text(content)
        with refused(path, by=files.RunError) as caught:
            files.read_object(path, SHAPE, "make it again")
        assert caught.value.fix == "make it again"
    with refused(tmp_path, by=files.RunError):
        files.read_object(tmp_path, SHAPE)


def test_a_table_is_decoded_in_batches_of_some_columns(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    parquet.write_table(pa.table({"a": range(2500), "b": ["x"] * 2500}), path, row_group_size=1200)
    batches = list(files.read_batches(path, {"a": files.INTEGERS, "c?": files.TEXTS}))
    assert len(batches) > 1
    assert max(map(len, batches)) <= files.BATCH_ROWS
    assert [value for batch in batches for value in batch["a"]] == list(range(2500))
    assert {name for batch in batches for name in batch} == {"a"}


def test_repeated_texts_and_messages_are_read_as_pandas_reads_them(tmp_path: Path) -> None:
    path, messages = tmp_path / "table.parquet", [[{"role": "user", "content": "a"}]] * 3
    texts = pa.DictionaryArray.from_arrays(pa.array([0, 0, 1], pa.int32()), ["x", "y"])
    parquet.write_table(pa.table({"text": texts, "turns": messages}), path, row_group_size=2)
    read = files.read_table(path, {"text": files.TEXTS, "turns": files.CONVERSATIONS})
    assert list(read["text"]) == ["x", "x", "y"]
    assert [list(turns) for turns in read["turns"]] == messages


def test_what_is_wrong_with_a_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    twice = pa.Table.from_arrays([pa.array([1])] * 3, names=["a", "b", "b"])
    for table, column, figures in (
        (twice, "c", ("`c`", "a, b, b")),
        (pa.table({}), "a", ("`a`",)),
        (pa.table({"a": pa.array([], pa.string())}), "a", ("`a`", files.INTEGERS.name)),  # a type without a value
    ):
        parquet.write_table(table, path)
        with refused(path, *figures, by=files.RunError) as caught:
            files.read_table(path, {column: files.INTEGERS}, "make it again")
        assert caught.value.fix == "make it again"
    path.write_bytes(b"PAR1")
    with refused(path, by=files.RunError):
        files.read_table(path, {"a": files.INTEGERS})


def test_a_flush_leaves_no_descriptor_open(tmp_path: Path) -> None:
    def lowest_free_descriptor() -> int:
        with (tmp_path / "a").open("wb") as file:
            return file.fileno()

    before = lowest_free_descriptor()
    for path in (tmp_path, tmp_path / "a"):
        files.flush(path)
    assert lowest_free_descriptor() <= before


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    (folder / "completions").mkdir(parents=True)
    outside.mkdir()
    (folder / "completions" / "images").symlink_to(folder)  # leads nowhere else
    files.check_names(folder)
    assert files.inside(folder, "completions", "a") == folder / "completions" / "a"
    for place in (folder / "model", folder / "completions" / "table"):
        place.symlink_to(outside)
        with refused(place, folder, by=files.RunError):
            files.check_names(folder)
        place.unlink()
    files.check_names(folder)
