"""Text tables as they come: what each file gives, or the sentence that refuses it, and the guess at its notation."""

from __future__ import annotations

import codecs
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from grpo_recipes.data import text_files
from grpo_recipes.data.load import load
from grpo_recipes.data.sources import Keys, guess_source, read
from grpo_recipes.recipe.dataset import DatasetSpec, SourceSpec
from tests.support.errors import refused

TABLES = Path(__file__).parents[2] / "data" / "tables"
NOTATION = ("delimiter", "encoding", "decimal")
GERMAN = {"delimiter": ";", "decimal": "comma"}


def rows(path: Path, **keys: Any) -> list[dict[str, Any]]:
    return read(SourceSpec(str(path), **keys), Keys("path", "split")).table.to_list()


def written(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def zstd(content: bytes) -> bytes:
    return pa.Codec("zstd").compress(content, asbytes=True)


QA = [{"q": "x", "a": 1}, {"q": "y", "a": 2}]
LINES = '{"q": "x", "a": 1}\n{"q": "y", "a": 2}\n'
LONG = "word " * 40_000

READ: list[tuple[str, bytes | str, dict[str, Any], list[dict[str, Any]]]] = [
    # Notations
    ("a.csv", "q,a\nx,1\ny,2\n", {}, QA),
    ("a.csv", "\ufeffq,a\r\nx,1\r\n\r\ny,2", {}, QA),
    ("a.tsv", "q\ta\nx\t1\ny\t2\n", {}, QA),
    ("a.tsv", "q|a\nx|1\ny|2\n", {"delimiter": "|"}, QA),
    ("a.csv", "who; what\nyou; walk\n", {"delimiter": ","}, [{"who; what": "you; walk"}]),
    ("a.csv", "q,a\nGröße – 5 €,1\n".encode("cp1252"), {"encoding": "cp1252"}, [{"q": "Größe – 5 €", "a": 1}]),
    ("a.csv", "q,a\nカッコ,1\n".encode("utf-16"), {"encoding": "utf-16"}, [{"q": "カッコ", "a": 1}]),
    ("a.json", '[{"q": "カッコ"}]'.encode("shift_jis"), {"encoding": "shift_jis"}, [{"q": "カッコ"}]),
    ("a.jsonl", LINES.encode("utf-16"), {"encoding": "utf-16"}, QA),
    ("a.csv.gz", gzip.compress(b"q,a\nx,1\ny,2\n", mtime=0), {}, QA),
    ("a.tsv.zst", zstd(b"q\ta\nx\t1\ny\t2\n"), {}, QA),
    ("a.jsonl.gz", b"".join(gzip.compress(line.encode(), mtime=0) for line in LINES.splitlines(keepends=True)), {}, QA),
    # Cells
    ("a.csv", 'q,a\n"a, ""b""\n\nc",1\n', {}, [{"q": 'a, "b"\n\nc', "a": 1}]),
    ("a.csv", f"q,a\n{LONG},\n", {}, [{"q": LONG, "a": None}]),
    ("a.csv", "q,a,,\n1+1?,2,,\n2+2?,4,,\n", {}, [{"q": "1+1?", "a": 2}, {"q": "2+2?", "a": 4}]),
    ("a.csv", "q,a\nNA,None\nnull,true\n", {}, [{"q": "NA", "a": "None"}, {"q": "null", "a": "true"}]),
    ("a.csv", "q,a\nx,1\ny,2.5\n", {}, [{"q": "x", "a": 1.0}, {"q": "y", "a": 2.5}]),
    ("a.csv", "q,a\nx,007\ny,2\n", {}, [{"q": "x", "a": "007"}, {"q": "y", "a": "2"}]),
    (
        *("a.csv", "q;a;n;code\nA, B?;6403,64;1.200;1.2.3\nC?;-0,5;1.234.567;7\nD?;3;;8\n", GERMAN),
        [
            {"q": "A, B?", "a": 6403.64, "n": 1200, "code": "1.2.3"},
            {"q": "C?", "a": -0.5, "n": 1234567, "code": "7"},
            {"q": "D?", "a": 3.0, "n": None, "code": "8"},
        ],
    ),
    ("a.csv", "q;a;day\n2 €;3.5;01.02.2024\n", GERMAN, [{"q": "2 €", "a": "3.5", "day": "01.02.2024"}]),
    # JSON
    ("a.jsonl", LINES.replace("\n", "\r\n\n"), {}, QA),
    ("a.jsonl", '{"q":\r"x"}\n{"q": "y\u2028"}', {}, [{"q": "x"}, {"q": "y\u2028"}]),
    ("a.json", " \n\t" + json.dumps(QA, indent=1), {}, QA),
    ("a.json", "\ufeff" + LINES, {}, QA),
    ("a.jsonl", '{"q": "\\ud83d\\ude00"}', {}, [{"q": "\U0001f600"}]),
    ("a.jsonl", '{"q": "2024-01-02"}\n{"a": null}', {}, [{"q": "2024-01-02", "a": None}, {"q": None, "a": None}]),
    (os.fsdecode(b"a\xff.jsonl"), LINES, {}, QA),
]


@pytest.mark.parametrize(("name", "content", "keys", "expected"), READ)
def test_a_file_gives_its_rows(tmp_path: Path, name: str, content: bytes | str, keys: Any, expected: Any) -> None:
    found = rows(written(tmp_path, name, content), **keys)
    assert found == expected
    assert [list(map(type, row.values())) for row in found] == [list(map(type, row.values())) for row in expected]


REFUSED: list[tuple[str, bytes | str, dict[str, Any], str, tuple[str, ...]]] = [
    # CSV
    ("a.csv", "q,a\nx,1\ny\n", {}, "a.csv, row 3", ("1 cells", "2 columns")),
    ("a.csv", "q,a\nx,1,5\n", {}, "a.csv, row 2", ("3 cells", "2 columns")),
    ("a.csv", 'q;"a, b"\nx;1\n', {}, "a.csv, row 2", ('`dataset.delimiter: ";"`',)),
    ("a.csv", "q;a\nx;1\n", {}, "a.csv", ("'q;a'", '`dataset.delimiter: ";"`')),
    ("a.tsv", "q,a\nx,1\n", {}, "a.tsv", ('`dataset.delimiter: ","`',)),
    ("a.csv", "q,,b\na,1,2\n", {}, "a.csv, row 1", ("q, , b",)),
    ("a.csv", "b,q,b\na,1,2\n", {}, "a.csv, row 1", ("b, q, b",)),
    ("a.csv", 'q,a\nx,1\ny,"2\nz,3\n', {}, "a.csv, row 3", ("quote",)),
    ("a.csv", '"q\nx\n', {}, "a.csv", ("quotes",)),
    # JSON
    ("a.jsonl", '{"q": 1}\n\n{"q": \n', {}, "a.jsonl, line 3", ("JSON",)),
    ("a.jsonl", '{"q": 1}\n[1]\n', {}, "a.jsonl, line 2", ("object",)),
    ("a.jsonl", '{"q": 1}\n{}\n', {}, "a.jsonl, line 2", ("object",)),
    ("a.json", '[{"q": 1}, "x"]', {}, "a.json, entry 2", ("object",)),
    ("a.jsonl", '{"q": 1}\n\n{"q": 2}\n{"q": "x"}\n', {}, "a.jsonl, line 4", ("'q'", "'x'")),
    ("a.jsonl", '{"m": {"k": 1}}\n{"m": 3}\n', {}, "a.jsonl, line 2", ("'m'", "3")),
    ("a.json", '[{"q": "x"}, {"q": "\\ud83d"}]', {}, "a.json, entry 2", ("'q'", r"'\ud83d'")),
    ("a.jsonl", '{"q\\u0000": 1}\n', {}, "`dataset`", (r"'q\x00'", "NUL")),
    ("a.jsonl.zst", zstd(b'{"q": 1}\n\n[]\n'), {}, "a.jsonl.zst, line 3", ("object",)),
    # Encodings
    ("a.csv", "q\na\ngroß\n".encode("cp1252"), {}, "a.csv, line 3", ("`dataset.encoding: cp1252`",)),
    ("a.jsonl", LINES.encode("utf-16"), {}, "a.jsonl, line 1", ("`dataset.encoding: utf-16`",)),
    ("a.csv", "q,x\na,b\n", {"encoding": "utf-16"}, "`dataset.encoding`", ("a.csv", "utf-16")),
    # Damage
    ("a.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:-9], {}, "a.jsonl.gz", ()),
    ("a.jsonl.zst", zstd(LINES.encode() * 9)[:-9], {}, "a.jsonl.zst", ()),
]


@pytest.mark.parametrize(("name", "content", "keys", "place", "figures"), REFUSED)
def test_a_mistake_is_reported_with_its_place(
    tmp_path: Path, name: str, content: bytes | str, keys: Any, place: str, figures: tuple[str, ...]
) -> None:
    with refused(place, *figures):
        rows(written(tmp_path, name, content), **keys)


@pytest.mark.parametrize(
    ("path", "keys", "place"),
    [
        ("a.csv", {"encoding": "hex"}, "`dataset.encoding`"),
        ("a.csv", {"decimal": "dot"}, "`dataset.decimal`"),
        ("a.jsonl", {"delimiter": ";"}, "`dataset.delimiter`"),
        ("a.parquet", {"decimal": "comma"}, "`dataset.decimal`"),
        ("absent.csv", GERMAN, "absent.csv"),
    ],
)
def test_keys_that_describe_no_file_are_refused(tmp_path: Path, path: str, keys: Any, place: str) -> None:
    for name in ("a.csv", "a.jsonl", "a.parquet"):
        written(tmp_path, name, b"")
    with refused(place):
        load(DatasetSpec.parse({"path": str(tmp_path / path), **keys}))


@pytest.mark.parametrize(
    ("decimal", "cell", "value"),
    [
        ("point", "0", 0),
        ("point", "+5", "+5"),
        ("point", "9" * 18, 10**18 - 1),
        ("point", "9" * 19, "9" * 19),  # 64 bits hold only some of 19 digits
        ("point", "1.0", 1.0),
        ("point", "1.10", "1.10"),
        ("point", ".5", ".5"),
        ("point", "1,5", "1,5"),
        ("point", "1e5", "1e5"),
        ("point", "\u0663", "\u0663"),  # a digit of another script
        ("comma", "-1.234", -1234),
        ("comma", "999.999.999.999.999.999", 10**18 - 1),
        ("comma", "0.123", "0.123"),
        ("comma", "1234.567", "1234.567"),
        ("comma", "12.345,5", 12345.5),
        ("comma", "0,50", 0.5),
        ("comma", "007,5", "007,5"),
    ],
)
def test_a_cell_is_a_number_only_if_it_is_written_as_one(tmp_path: Path, decimal: str, cell: str, value: Any) -> None:
    path = written(tmp_path, "rows.csv", f"q;x\na;{cell}\n")
    found = rows(path, delimiter=";", decimal=decimal)[0]["x"]
    assert (found, type(found)) == (value, type(value))


def test_another_notation_of_the_same_file_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    path = written(tmp_path, "rows.csv", "q;x\na;1.234\n")
    assert [rows(path, delimiter=";", decimal=decimal)[0]["x"] for decimal in ("point", "comma")] == [1.234, 1234]


def test_all_rows_of_all_files_decide_the_type_of_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "BATCH", 2)
    for number, cell in enumerate(("1", "2", "3.5")):
        written(tmp_path, f"{number}.csv", f"q,a,b\nx,{cell},{cell}\n" + ("y,,x9\n" if number == 2 else ""))
        written(tmp_path, f"{number}.jsonl", f'{{"a": 1}}\n{{"a": 2}}\n{{"a": {cell}, "late{number}": {{}}}}\n')
    assert [row["a"] for row in rows(tmp_path / "*.csv")] == [1.0, 2.0, 3.5, None]
    assert [row["b"] for row in rows(tmp_path / "*.csv")] == ["1", "2", "3.5", "x9"]
    found = rows(tmp_path / "*.jsonl")
    assert [row["a"] for row in found] == [1, 2, 1, 1, 2, 2, 1, 2, 3.5]
    assert found[5] == {"a": 2, "late0": None, "late1": {}, "late2": None}
    assert len(rows(tmp_path / "[12].jsonl")) == 6  # a cached table of other files is not taken


def test_a_row_is_named_by_its_file_and_number(tmp_path: Path) -> None:
    written(tmp_path, "a.jsonl", '{"q": 1}\n\n{"q": 2}\n')
    written(tmp_path, "b.jsonl", '{"q": 3}\n')
    written(tmp_path, "a.csv", 'q\n"1\n2"\n\n3\n')
    written(tmp_path, "b.csv", "q\n4\n")
    written(tmp_path, "a.json", '[{"q": 1}, {"q": 2}]')
    for pattern, expected in (
        ("*.jsonl", ["b.jsonl, line 1", "a.jsonl, line 1", "a.jsonl, line 3"]),
        ("*.csv", ["b.csv, row 2", "a.csv, row 2", "a.csv, row 3"]),
        ("*.json", ["a.json, entry 1", "a.json, entry 2"]),
    ):
        places = read(SourceSpec(str(tmp_path / pattern)), Keys("path", "split")).places
        indices = [2, 0, 1] if len(expected) == 3 else [0, 1]
        assert [str(place) for place in places(indices)] == [f"{tmp_path}/{place}" for place in expected]


# Guesses


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("q;a\nx;1.200\ny;2,5\n", (";", None, None)),
        ("q|a\nx|1\n", ("|", None, None)),
        ("q,list\nx,A;B;C\ny,D;E;F\n", (None, None, None)),
        ('"q;x","a;b;c"\nx,1\n', (None, None, None)),  # only delimiters outside of quotes count
        ("q,a\nx,1\ny\n", (None, None, None)),
        (("text;note\n" + "gut;1,5\n" * 20_000 + "Größe;2,5\n").encode("cp1252"), (";", "cp1252", None)),
        ("q;a\nGröße;2,5\n".encode("utf-16"), (";", "utf-16", None)),
        (codecs.BOM_UTF16_BE + "q;a".encode("utf-16-be"), (";", "utf-16", None)),
        ("Größe".encode("utf-8-sig"), (None, None, None)),
        (b"Gr\xf6\xdfe\x00", (None, None, None)),  # not text in any encoding
        (b"", (None, None, None)),
    ],
)
def test_only_what_is_certain_is_guessed(
    tmp_path: Path, content: bytes | str, expected: tuple[str | None, ...]
) -> None:
    source = guess_source(str(written(tmp_path, "rows.csv", content)))
    assert tuple(getattr(source, key) for key in NOTATION) == expected


def test_the_notation_of_a_path_is_guessed_from_its_first_file(tmp_path: Path) -> None:
    written(tmp_path, "a.csv", "q;a\nx;1\n")
    written(tmp_path, "b.parquet", b"PAR1")
    written(tmp_path, "c.csv", "q|a\nx|1\n")
    assert guess_source(str(tmp_path / "*")) == SourceSpec(str(tmp_path / "*"), delimiter=";")
    for path in (str(tmp_path / "[bc]*"), str(tmp_path), str(tmp_path / "absent.csv"), "openai/gsm8k"):
        assert guess_source(path) == SourceSpec(path)
    assert guess_source(str(TABLES / "labels_cp1252.csv")).encoding == "cp1252"
    with refused("`dataset.path`", "d.csv.gz"):
        guess_source(str(written(tmp_path, "d.csv.gz", b"damaged")))
