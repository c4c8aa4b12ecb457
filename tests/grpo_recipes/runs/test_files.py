"""Kinds of values and columns in the files of runs, shapes, and limits."""

import math
import os
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from grpo_recipes.runs import files
from grpo_recipes.runs.files import Kind


def interval(low: Any, value: Any, high: Any) -> dict[str, Any]:
    return {"low": low, "value": value, "high": high}


HALF_INTERVALS = [interval(None, 1, 2), interval(0, 1, None), interval(None, None, None), {"value": 1}]
NO_INTERVALS = [
    interval(1, 0, 2), interval(0, 2, 1), interval(math.nan, 0, 1), interval(0, math.nan, 1), interval(0, 1, math.inf),
    interval(-math.inf, 0, 1), interval("0", 0, 1), {"low": 0, "value": 0}, {}, "half", 0.5, None, [0, 0, 1],
]  # fmt: skip


def confusion(names: int, problems: int = 0, answers: int = 0, columns: int = 0, accuracy: int = 0) -> dict[str, Any]:
    """Return a confusion matrix, with so many entries too many in each of its parts."""
    return {
        "names": [str(name) for name in range(names)],
        "problems": [1] * (names + problems),
        "answers": [[1] * (names + 1 + columns)] * (names + answers),
        "accuracy": [interval(0, 0, 1)] * (names + accuracy),
    }


HELD: list[tuple[Kind, list[Any], list[Any]]] = [
    (files.TEXT, ["", "a"], [None, 1, []]),
    (files.TEXT_OR_NULL, [None, "", "a"], [1, []]),
    (files.INTEGER, [0, -3, 10**400], [True, 1.0, "1", None]),
    (files.INTEGER_OR_NULL, [None, 0, 5], [False, 1.5, "5"]),
    (files.STEP, [0, 2**63 - 1], [-1, 2**63, True, 1.0, "two", None]),
    (files.NUMBER, [0, -1.5, math.inf, math.nan, 2**63 - 1, 1 - 2**63], [2**63, -(2**63), True, "1", None]),
    (files.NUMBER_OR_NULL, [None, 0.5, 3], [2**63, "1"]),
    (
        files.ESTIMATE,
        [interval(-1, 0, 2), interval(3, 3, 3), interval(0.5, 1, 9.5), interval(None, 4, None)],
        [*NO_INTERVALS, *HALF_INTERVALS],
    ),
    (
        files.SHARE,
        [interval(0, 0.5, 1), interval(0, 0, 0)],
        [interval(-0.1, 0, 1), interval(0, 1, 1.1), interval(None, 0.5, None), *NO_INTERVALS],
    ),
    (
        files.CONFUSION,
        [confusion(2), confusion(20)],
        [
            confusion(1),
            confusion(21),
            confusion(2, problems=1),
            confusion(2, answers=-1),
            confusion(2, columns=-1),
            confusion(2, accuracy=1),
            {**confusion(2), "names": ["a", 3]},
            {},
            [],
        ],
    ),
]
COLUMNS: list[tuple[Kind, list[list[Any]], list[list[Any]]]] = [
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


@pytest.mark.parametrize(("kind", "right", "wrong"), HELD)
def test_values(kind: Kind, right: list[Any], wrong: list[Any]) -> None:
    assert [value for value in right if not kind.holds(value)] == []
    assert [value for value in wrong if kind.holds(value)] == []


@pytest.mark.parametrize(("kind", "right", "wrong"), COLUMNS)
def test_columns(kind: Kind, right: list[list[Any]], wrong: list[list[Any]]) -> None:
    assert [values for values in right if not kind.holds(pd.Series(values))] == []
    assert [values for values in wrong if kind.holds(pd.Series(values))] == []


SHAPE: files.Shape = {
    "name": files.TEXT,
    "parts?": [{"size": files.INTEGER}],
    "more?": {"*?": files.NUMBER},
    "any?": [],
}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"name": "a"}, None),
        ({"name": "a", "parts": [], "more": {}, "any": [1, {}, None], "unknown": object}, None),
        ({"name": "a", "parts": [{"size": 1}, {"size": 2, "x": 3}], "more": {"b": 0.5}}, None),
        ([], "it is a list, not an object"),
        (None, "it is null, not an object"),
        ("a" * 99, f'it is "{"a" * 36}..., not an object'),
        ({}, "it has no `name`"),
        ({"name": {}}, "`name` is an object, not a text"),
        ({"name": "a", "parts": {}}, "`parts` is an object, not a list"),
        ({"name": "a", "parts": [{"size": 1}, 7]}, "`parts[1]` is 7, not an object"),
        ({"name": "a", "parts": [{"size": 1}, {}]}, "`parts[1]` has no `size`"),
        ({"name": "a", "more": {"b": 1, "c": "x"}}, '`more.c` is "x", not a number'),
        ({"name": "a", "any": 3}, "`any` is 3, not a list"),
    ],
)
def test_the_first_difference_from_a_shape_is_named(value: Any, says: str | None) -> None:
    assert files.mismatch(value, SHAPE) == says


def test_a_file_is_read_or_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(FileNotFoundError):
        files.read_object(path, SHAPE)
    path.write_bytes('{"name": "größer"}'.encode())
    assert files.read_object(path, SHAPE) == {"name": "größer"}
    for content, says in (("[]", "it is a list, not an object"), ("{", "can't be read as JSON (")):
        path.write_text(content)
        with pytest.raises(files.RunError) as error:
            files.read_object(path, SHAPE, "make it again")
        assert str(error.value).startswith(f"{path}: {says}")
        assert str(error.value).endswith("; make it again")
    with pytest.raises(files.RunError, match="it is no ordinary file; restore or remove the file"):
        files.read_object(tmp_path, SHAPE)


def test_a_table_is_read_up_to_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is stored once makes three batches: each is small, and together they are too large."""
    table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int32()), ["x" * 100])})
    parquet.write_table(table, tmp_path / "table.parquet")
    assert list(files.read_table(tmp_path / "table.parquet", {"text": files.TEXTS})["text"]) == ["x" * 100] * 3000
    for limit in ("FILE_BYTES", "BATCH_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(files, limit, 200_000 if limit == "FILE_BYTES" else 100_000)
            with pytest.raises(files.RunError, match="decodes to more than"):
                files.read_table(tmp_path / "table.parquet", {"text": files.TEXTS})


def test_a_table_is_decoded_in_batches_of_some_columns(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    parquet.write_table(pa.table({"a": range(2500), "b": ["x"] * 2500}), path, row_group_size=1200)
    batches = list(files.read_batches(path, {"a": files.INTEGERS, "c?": files.TEXTS}))
    assert [len(batch) for batch in batches] == [1024, 176, 1024, 176, 100]
    assert [value for batch in batches for value in batch["a"]] == list(range(2500))
    assert {name for batch in batches for name in batch} == {"a"}


PLAIN = {"use_dictionary": False, "compression": "none"}
MESSAGES = [[{"role": "x" * 90, "content": "y"}] for _ in range(100)]


@pytest.mark.parametrize(
    ("columns", "read", "most", "rows_of_a_group"),
    [
        ({"a": list(range(1000)), "b": list(range(1000))}, "ab", 16_500, 1000),
        ({"a": list(range(2000))}, "a", 16_500, 500),
        ({"a": pa.nulls(9000, pa.string())}, "a", 9_000, 9000),
        ({"a": MESSAGES}, "a", 11_000, 100),
    ],
    ids=["two columns", "four row groups", "no values", "nested"],
)
def test_a_table_that_claims_to_be_too_large_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: dict[str, Any], read: str, most: int, rows_of_a_group: int
) -> None:
    path, kinds = tmp_path / "table.parquet", dict.fromkeys(read, files.ANYTHING)
    other = pa.array(range(len(columns["a"])))
    table = pa.table({**columns, "other": other})
    parquet.write_table(table, path, row_group_size=rows_of_a_group, **PLAIN)
    decoded: list[int] = []
    monkeypatch.setattr(files, "_decoded_bytes", lambda array: decoded.append(len(array)) or 0)
    with monkeypatch.context() as patch:
        patch.setattr(files, "FILE_BYTES", most)
        assert len(files.read_table(path, kinds)) == len(table), "the column that is not read costs nothing"
    decoded.clear()
    monkeypatch.setattr(files, "FILE_BYTES", 8_900)
    with pytest.raises(files.RunError, match="decodes to more than"):
        files.read_table(path, kinds)
    assert decoded == []


def test_a_table_of_too_many_rows_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.parquet"
    parquet.write_table(pa.table({"a": range(30)}), path)
    monkeypatch.setattr(files, "FILE_ROWS", 30)
    assert len(files.read_table(path, {"a": files.INTEGERS})) == 30
    monkeypatch.setattr(files, "FILE_ROWS", 29)
    with pytest.raises(files.RunError, match="decodes to more than"):
        files.read_table(path, {"a": files.INTEGERS})


TEXT = pa.string()


@pytest.mark.parametrize(
    ("kind", "value", "size"),
    [
        (TEXT, "x" * 12, 20),
        (TEXT, "", 8),
        (TEXT, None, 8),
        (pa.list_(TEXT), ["x" * 12] * 2, 48),
        (pa.large_list(TEXT), ["x" * 12] * 2, 48),
        (pa.struct({"role": TEXT, "content": TEXT}), {"role": "x" * 12, "content": "y"}, 29),
        (pa.list_(pa.struct({"role": TEXT})), [{"role": "x" * 12}], 28),
        (pa.bool_(), True, 1),
        (pa.null(), None, 1),
    ],
    ids=str,
)
def test_a_value_counts_with_its_text_and_eight_bytes_for_each_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: pa.DataType, value: Any, size: int
) -> None:
    """Repeated texts are stored once and decoded 100 times."""
    path = tmp_path / "table.parquet"
    parquet.write_table(pa.table({"a": pa.array([value] * 100, kind)}), path)
    monkeypatch.setattr(files, "_stored_bytes", lambda *_: 0)
    monkeypatch.setattr(files, "BATCH_BYTES", 100 * size)
    (batch,) = files.read_batches(path, {"a": files.ANYTHING})
    assert len(batch) == 100
    monkeypatch.setattr(files, "BATCH_BYTES", 100 * size - 1)
    with pytest.raises(files.RunError, match="decodes to more than"):
        list(files.read_batches(path, {"a": files.ANYTHING}))


def test_what_is_wrong_with_a_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    parquet.write_table(pa.Table.from_arrays([pa.array([1])] * 3, names=["a", "b", "b"]), path)
    for name, says in (
        ("c", "it has no column `c` (its columns: a, b, b)"),
        ("b", "it has 2 columns `b`"),
        ("b?", "it has 2 columns `b`"),
    ):
        with pytest.raises(files.RunError) as error:
            files.read_table(path, {name: files.INTEGERS}, "make it again")
        assert str(error.value) == f"{path}: {says}; make it again"
    parquet.write_table(pa.table({}), path)
    with pytest.raises(files.RunError, match=r"no column `a` \(its columns: none\)"):
        files.read_table(path, {"a": files.INTEGERS})
    parquet.write_table(pa.table({"a": pa.array([], pa.string())}), path)
    with pytest.raises(files.RunError, match="its column `a` does not hold integers"):
        files.read_table(path, {"a": files.INTEGERS})  # a type without a value
    path.write_bytes(b"PAR1")
    with pytest.raises(files.RunError, match="can't be read as parquet"):
        files.read_table(path, {"a": files.INTEGERS})


WRITTEN = (
    "training_args.bin", "chat_template.jinja", "trainer_state.json", "_log.jsonl", "README.md", "tokenizer.model",
    "completions.parquet", "curves.png", "model.safetensors",
)  # fmt: skip


@pytest.mark.parametrize("folder", [".", "completions", "completions/images"])
def test_what_stands_in_the_way_of_a_file_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder / "checkpoint-1").mkdir(parents=True)
    (tmp_path / folder / "README.md").touch()
    files.check_names(tmp_path)
    os.mkfifo(tmp_path / folder / "notes")
    with pytest.raises(files.RunError, match="notes: it is no ordinary file, and the run can't write there"):
        files.check_names(tmp_path)
    (tmp_path / folder / "notes").unlink()
    (tmp_path / folder / "README.md").unlink()
    for name in WRITTEN:
        (tmp_path / folder / name).mkdir()
        with pytest.raises(files.RunError, match=f"{name}: it is no ordinary file"):
            files.check_names(tmp_path)
        (tmp_path / folder / name).rmdir()
    files.check_names(tmp_path)


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
        with pytest.raises(files.RunError, match=f"^{place}: a link leads out of {folder}"):
            files.check_names(folder)
        place.unlink()
    files.check_names(folder)


def test_a_file_in_place_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-4").touch()
    with pytest.raises(files.RunError, match="checkpoint-4: it is not a folder, .*: remove it"):
        files.check_names(tmp_path)
