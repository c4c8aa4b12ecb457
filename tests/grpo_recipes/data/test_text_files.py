"""Text tables as they come: delimiters, encodings, decimal commas, compression, and the guess at them."""

from __future__ import annotations

import codecs
import gzip
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from grpo_recipes.data import text_files
from grpo_recipes.data.load import load
from grpo_recipes.data.sources import guess_source
from grpo_recipes.recipe.specs import DatasetSpec, SourceSpec
from grpo_rewards.errors import UserError

TABLES = Path(__file__).parents[2] / "data" / "tables"
NOTATION = ("delimiter", "encoding", "decimal")


def dataset(path: Path, **keys: Any) -> DatasetSpec:
    return DatasetSpec.parse({"path": str(path), **keys})


def compressed(path: Path, content: bytes) -> Path:
    """Write a file with other libraries than the reader's, where Python has one."""
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    else:
        path.write_bytes(pa.Codec("zstd").compress(content, asbytes=True))
    return path


# Notations


@pytest.mark.parametrize("header", ["question,answer,,", "question,answer"])
def test_empty_columns_at_the_end_are_ignored(tmp_path: Path, header: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"{header}\n1+1?,2,,\n2+2?,4,,\n")
    rows = load(dataset(path))
    assert rows["answer"][:] == [2, 4]
    assert rows.column_names == ["prompt", "answer"]
    path.write_text(f"{header}\n1+1?,2,,\n2+2?,4,,x\n")
    with pytest.raises(UserError, match="line 3 has 4 cells, and the first line names 2 columns"):
        load(dataset(path))


@pytest.mark.parametrize("empty", [0, 1, 2, 3])
def test_any_number_of_empty_columns_is_ignored(tmp_path: Path, empty: int) -> None:
    end = "," * empty
    (tmp_path / "rows.csv").write_text(f"question,answer{end}\n1+1?,2{end}\n")
    assert load(dataset(tmp_path / "rows.csv")).column_names == ["prompt", "answer"]


def test_a_semicolon_table_with_decimal_commas_is_read(tmp_path: Path) -> None:
    path = tmp_path / "preise.csv"
    path.write_text("question;answer;menge;code\nA, B?;6403,64;1.200;1.2.3\nC?;-0,5;1.234.567;7\nD?;3;;8\n")
    table = load(dataset(path, delimiter=";", decimal="comma"))
    assert table["answer"][:] == [6403.64, -0.5, 3.0]
    assert table["menge"][:] == [1200, 1234567, None]
    assert table["code"][:] == ["1.2.3", "7", "8"]


def test_a_decimal_comma_does_not_make_numbers_of_other_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("question;price;point;date;padded\na;1.200 €;3.5;01.02.2024;007,5\nb;2 €;1;02.02.2024;1,5\n")
    table = load(dataset(path, delimiter=";", decimal="comma"))
    assert table["price"][:] == ["1.200 €", "2 €"]
    assert table["point"][:] == ["3.5", "1"]
    assert table["date"][:] == ["01.02.2024", "02.02.2024"]
    assert table["padded"][:] == ["007,5", "1,5"]


def test_another_notation_of_the_same_file_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("question;price\na;1.200\n")
    assert load(dataset(path, delimiter=";"))["price"][:] == [1.2]
    assert load(dataset(path, delimiter=";", decimal="comma"))["price"][:] == [1200]


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "shift_jis"])
@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl", "rows.json"])
def test_a_table_is_read_in_its_encoding(tmp_path: Path, name: str, encoding: str) -> None:
    question = "カッコ" if encoding == "shift_jis" else "Größe – 5 €?"
    row = json.dumps({"question": question}, ensure_ascii=False)
    text = {".csv": f"question\n{question}\n", ".jsonl": row, ".json": f"[{row}]"}[Path(name).suffix]
    (tmp_path / name).write_text(text, encoding=encoding)
    (prompt,) = load(dataset(tmp_path / name, encoding=encoding))["prompt"][:]
    assert prompt == [{"role": "user", "content": question}]


def test_a_tsv_file_has_tabs() -> None:
    table = load(dataset(TABLES / "numbers.tsv", columns={"question": "text"}))
    assert table.column_names == ["prompt", "id", "value", "source_text"]
    assert table["value"][0] == "5,628"


def test_each_source_of_a_mixture_has_its_own_notation(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question;x\ngroß?;1,5\n", encoding="cp1252")
    (tmp_path / "b.csv").write_text("question,x\nbig?,2.5\n")
    first = {"path": str(tmp_path / "a.csv"), "delimiter": ";", "encoding": "cp1252", "decimal": "comma"}
    table = load(DatasetSpec.parse({"path": [first, str(tmp_path / "b.csv")]}))
    assert table["x"][:] == [1.5, 2.5]
    assert table["prompt"][0] == [{"role": "user", "content": "groß?"}]


def test_objects_without_any_key_are_a_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a", "meta": {}}\n{"question": "b", "meta": {}}\n')
    assert load(dataset(path))["meta"][:] == [{}, {}]


@pytest.mark.parametrize(
    ("decimal", "cell", "value"),
    [
        (None, "0", 0),
        (None, "-5", -5),
        (None, "007", "007"),
        (None, "+5", "+5"),
        (None, "9" * 18, 10**18 - 1),
        (None, "9" * 19, "9" * 19),  # 64 bits hold only some of 19 digits
        (None, "1.50", 1.5),
        (None, "1.", "1."),
        (None, ".5", ".5"),
        (None, "1,5", "1,5"),
        (None, "1e5", "1e5"),
        (None, "\u0663", "\u0663"),  # a digit of another script
        ("comma", "0", 0),
        ("comma", "-1.234", -1234),
        ("comma", "999.999.999.999.999.999", 10**18 - 1),
        ("comma", "1.000.000.000.000.000.000", "1.000.000.000.000.000.000"),
        ("comma", "0.123", "0.123"),
        ("comma", "1.23", "1.23"),
        ("comma", "1.2345", "1.2345"),
        ("comma", "1234.567", "1234.567"),
        ("comma", "12.345,5", 12345.5),
        ("comma", "0,50", 0.5),
        ("comma", "1,", "1,"),
        ("comma", "1,2,3", "1,2,3"),
    ],
)
def test_a_cell_is_a_number_only_if_it_is_written_as_one(
    tmp_path: Path, decimal: str | None, cell: str, value: Any
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"question;x\na;{cell}\n", encoding="utf-8")
    found = load(dataset(path, delimiter=";", decimal=decimal))["x"][0]
    assert (found, type(found)) == (value, type(value))


def test_a_blank_line_and_a_long_cell_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    long = "word " * 40_000  # Python's own limit is 128 KiB
    path.write_text(f"question,answer\n\n{long}.,1\n\nb,\n")
    assert load(dataset(path))["answer"][:] == [1, None]
    assert load(dataset(path))["prompt"][0] == [{"role": "user", "content": f"{long}."}]


@pytest.mark.parametrize("start", ["", "\ufeff", " \n\t", " " * 1_000])
def test_a_json_file_holds_an_array_or_one_object_per_line(tmp_path: Path, start: str) -> None:
    path = tmp_path / "rows.json"
    rows = [{"question": "a"}, {"question": "[b"}]
    path.write_text(start + json.dumps(rows), encoding="utf-8")
    assert load(dataset(path)).num_rows == 2
    path.write_text(start + "\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert load(dataset(path)).num_rows == 2


def test_only_a_newline_ends_a_line_in_any_encoding(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for encoding in ("utf-8", "utf-16"):
        path.write_bytes('{"question":\r"a"}\r\n{"question": "b\u2028"}\n'.encode(encoding))
        assert load(dataset(path, encoding=encoding)).num_rows == 2


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("a.csv", ".csv"),
        ("a.csv.gz", ".csv"),
        ("a.json.zst", ".json"),
        ("a.json.csv", ".csv"),
        ("a.parquet.gz", ".gz"),
        ("a.b.zst", ".zst"),
        ("a.gz", ".gz"),
        ("a", ""),
    ],
)
def test_the_suffix_of_a_format_comes_before_that_of_a_compression(name: str, suffix: str) -> None:
    assert text_files.suffix_of(Path(name)) == suffix


def test_each_selection_of_files_is_a_table_of_its_own(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": name}) + "\n  \n")
    for pattern, names in (("*.jsonl", "ab"), ("[b].jsonl", "b"), ("b.jsonl", "b")):
        prompts = load(dataset(tmp_path / pattern))["prompt"][:]
        assert prompts == [[{"role": "user", "content": name}] for name in names]


def test_a_mistake_in_a_json_array_names_its_entry(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"question": "a"}\n{"question": null}\n')
    with pytest.raises(UserError, match=r"rows\.json, line 2 has the question None"):
        load(dataset(path))
    path.write_text('[{"question": "a"}, {"question": null}]')
    with pytest.raises(UserError, match=r"rows\.json, entry 2 has the question None"):
        load(dataset(path))
    for entry, problem in (('"b"', "is not a JSON object"), ('{"q": "\\udc00"}', "has half of a surrogate pair")):
        path.write_text('[{"question": "a"}, ' + entry + "]")
        with pytest.raises(UserError, match=rf"rows\.json, entry 2 {problem}"):
            load(dataset(path))


@pytest.mark.parametrize(("text", "is_whole"), [("\\ud83d\\ude00", True), ("\\uD83D", False), ("\\ude00", False)])
def test_only_half_of_a_surrogate_pair_is_refused(tmp_path: Path, text: str, is_whole: bool) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a"}\n{"question": "' + text + '"}\n')
    if is_whole:
        assert load(dataset(path))["prompt"][1] == [{"role": "user", "content": "\U0001f600"}]
        return
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2 has half of a surrogate pair: correct or remove"):
        load(dataset(path))


def test_a_file_name_that_is_not_utf8_is_read(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"rows\xff.jsonl")
    path.write_text('{"question": "a"}\n')
    assert load(dataset(path)).num_rows == 1


# Bounds


def test_a_line_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LINE_BYTES", 40)
    for name, start, end in (("rows.jsonl", '{"question": "', '"}'), ("rows.csv", "question\n", "")):
        path = tmp_path / name
        last = start.rpartition("\n")[2]
        within = "a" * (38 - len(last + end))
        path.write_text(f"{start}{within}{end}\n")
        assert load(dataset(path)).num_rows == 1
        path.write_text(f"{start}{within}a{end}\n")
        with pytest.raises(
            UserError, match=rf"`dataset\.path`: .*{name} has a line of 40 bytes or more: correct the file"
        ):
            load(dataset(path))


def test_an_array_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "ARRAY_BYTES", 40)
    monkeypatch.setattr(text_files, "_CHUNK", 16)
    path = tmp_path / "rows.json"
    path.write_text('[{"question": "a"}]'.ljust(40))
    assert load(dataset(path)).num_rows == 1
    path.write_text('[{"question": "a"}]'.ljust(41))
    with pytest.raises(UserError, match=r"rows\.json holds an array of more than 40 bytes: write one object a line"):
        load(dataset(path))


def test_content_of_exactly_the_limit_is_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b'{"question": "a"}\n' * 10
    path = compressed(tmp_path / "rows.jsonl.gz", content)
    monkeypatch.setattr(text_files, "DECOMPRESSED_BYTES", len(content))
    assert load(dataset(path)).num_rows == 10


# Compression


@pytest.mark.parametrize("compression", [".gz", ".zst"])
@pytest.mark.parametrize("name", ["labels.jsonl", "extraction.csv", "numbers.tsv"])
def test_a_compressed_table_has_the_same_rows(tmp_path: Path, name: str, compression: str) -> None:
    question = {"labels.jsonl": "body", "extraction.csv": "document", "numbers.tsv": "text"}[name]
    keys = {"columns": {"question": question}}
    path = compressed(tmp_path / f"{name}{compression}", (TABLES / name).read_bytes())
    assert load(dataset(path, **keys)).to_list() == load(dataset(TABLES / name, **keys)).to_list()


def test_a_compressed_json_array_and_joined_gzip_files_are_read(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}"} for n in range(3)]
    array = compressed(tmp_path / "rows.json.gz", json.dumps(rows).encode())
    assert load(dataset(array)).num_rows == 3
    joined = tmp_path / "rows.jsonl.gz"
    joined.write_bytes(b"".join(gzip.compress(json.dumps(row).encode() + b"\n") for row in rows))
    assert load(dataset(joined)).num_rows == 3


def test_a_table_that_decompresses_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "DECOMPRESSED_BYTES", 50_000)
    within = compressed(tmp_path / "within.jsonl.gz", b'{"question": "a"}\n' * 2_000)
    assert load(dataset(within)).num_rows == 2_000
    bomb = compressed(tmp_path / "bomb.jsonl.gz", b'{"question": "a"}\n' * 5_000)
    with pytest.raises(
        UserError, match=r"bomb\.jsonl\.gz has more than 50,000 bytes when decompressed.*: decompress it"
    ):
        load(dataset(bomb))


def test_errors_name_the_line_of_a_compressed_file(tmp_path: Path) -> None:
    path = compressed(tmp_path / "rows.jsonl.zst", b'{"question": "a"}\n\n{"question": null}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl\.zst, line 3 has the question None"):
        load(dataset(path))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize("damage", [lambda content: content[:-9], lambda _: b"question\na\n"])
def test_a_damaged_compressed_file_ends_with_one_sentence(tmp_path: Path, suffix: str, damage: Any) -> None:
    path = compressed(tmp_path / f"rows.jsonl{suffix}", b'{"question": "a"}\n' * 100)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"`dataset\.path`: .*rows\.jsonl\.\w+ can't be read \(.+\): correct the path"):
        load(dataset(path))


# Mistakes


@pytest.mark.parametrize(
    ("name", "content", "keys", "message"),
    [
        ("a.csv", b"question;answer\na;1\n", {}, r"has one column, 'question;answer': set `dataset.delimiter: \";\"`"),
        ("a.csv", b"question\tanswer\na\t1,5\n", {}, r'set `dataset.delimiter: "\\t"`'),
        ("a.tsv", b"question,answer\na,1\n", {}, r'set `dataset.delimiter: ","`'),
        ("a.csv", b'question;"a, b"\nx;1\n', {}, r'line 2 has 1 cells.*: set `dataset.delimiter: ";"`'),
        ("a.csv", b"question,,b\na,1,2\n", {}, r"line 1 must name every column once, and it has question, , b: rename"),
        ("a.csv", b"b,question,b\na,1,2\n", {}, r"line 1 must name every column once, and it has b, question, b: ren"),
        ("a.csv", b"", {}, r"a\.csv is empty: choose other rows"),
        ("a.csv", b"\na,1\n", {}, r"line 1 must name every column once, and it has nothing: rename or remove columns"),
        ("a.csv", b"question,answer\nx,1,5\n", {}, r"line 2 has 3 cells.*: put cells with the delimiter in double"),
        ("a.csv", "question\na\ngroß\n".encode("cp1252"), {}, r"line 3 is not UTF-8 text: set `dataset.encoding: cp12"),
        ("a.jsonl", '{"question": "ß"}'.encode("cp1252"), {}, r"line 1 is not UTF-8 text: set `dataset.encoding: cp12"),
        ("a.jsonl", '{"question": "a"}'.encode("utf-16"), {}, r"set `dataset.encoding: utf-16`"),
        ("a.csv", b"question\n\x81\x8d\n", {}, r"line 2 is not UTF-8 text: correct the path or the file"),
        ("a.csv", b"PK\x03\x04\xff\x00question", {}, r"line 1 is not UTF-8 text: correct the path or the file"),
        ("a.csv", b"question\na\n", {"encoding": "utf-16"}, r"is not utf-16 text: remove `dataset.encoding`"),
        ("a.csv", b"question\na\n", {"encoding": "cp99"}, r"`dataset.encoding` is 'cp99', which Python does not know"),
        ("a.csv", b"question\na\n", {"encoding": "hex"}, r"`dataset.encoding` is 'hex'"),
        ("a.csv", b"question\na\n", {"delimiter": ";;"}, r"`dataset.delimiter` is ';;': set one character"),
        ("a.csv", b"question\na\n", {"decimal": "dot"}, r"`dataset.decimal` .*point.*comma"),
        ("a.jsonl", b"{}", {"delimiter": ";"}, r"`dataset.delimiter` describes .csv and .tsv files, and .*a.jsonl is"),
        (
            "a.parquet",
            b"",
            {"decimal": "comma"},
            r"`dataset.decimal` describes .csv and .tsv files, and .*a.parquet is",
        ),
        ("a.parquet", b"", {"encoding": "cp1252"}, r"`dataset.encoding` describes text files, and .*a.parquet is none"),
        ("a.csv", b"question\na\n", {"encoding": ""}, r"`dataset.encoding` is '', which Python does not know"),
        ("a.csv", b"question\na\n", {"encoding": "undefined"}, r"`dataset.encoding` is 'undefined', which Python"),
        ("a.csv", b"question\na\n", {"encoding": "a\0b"}, r"`dataset.encoding` is 'a\\x00b', which Python"),
        ("a.csv", "question\nÄ\n".encode("cp1252"), {"encoding": "ascii"}, r"is not ascii text: set .*: cp1252"),
        ("a.csv", b"question\n\x81\n", {"encoding": "ascii"}, r"is not ascii text: correct the path or the file"),
        ("a.jsonl", b"{}\n" * 3 + b"\xff\xff", {}, r"a.jsonl, line 4 is not UTF-8 text: set `dataset.encoding: cp1252"),
        ("a.csv", b"question\na\n\nb,c\n", {}, r"a.csv, line 4 has 2 cells, and the first line names 1 columns: put"),
        ("a.csv", b'question,x\na,1\n"b\n\nc",2,3\n', {}, r"a.csv, line 3 has 3 cells, and the first line names 2"),
        ("a.csv", b'question,x\na,"1"2\n', {}, r"a.csv, line 2 is not CSV \(.+\): correct its quotes"),
        ("a.csv", b'"question\n', {}, r"a.csv, line 1 is not CSV \(.+\): correct its quotes"),
        (
            "a.jsonl",
            b'{"question": "a", "m": {}}\n{"question": "b", "m": {}}\n{"question": "c", "m": 3}\n',
            {},
            r"a\.jsonl, line 3: the column 'm' has values of several types, here 3: give all one type, or leave it out",
        ),
        ("a.parquet.gz", b"", {}, r"a\.parquet\.gz is not a \.jsonl, \.json, \.csv, \.tsv, \.parquet file"),
    ],
)
def test_a_mistake_is_reported_with_its_fix(
    tmp_path: Path, name: str, content: bytes, keys: dict[str, Any], message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load(dataset(tmp_path / name, **keys))


def test_a_missing_csv_is_reported_as_missing_whatever_describes_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"`dataset.path`: there is no file or folder .*a\.csv"):
        load(dataset(tmp_path / "a.csv", delimiter=";", encoding="cp1252", decimal="comma"))


def test_an_explicit_delimiter_allows_one_column_with_semicolons(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("who; what\nyou; walk\n")
    table = load(dataset(tmp_path / "a.csv", delimiter=",", columns={"question": "who; what"}))
    assert table["prompt"][0] == [{"role": "user", "content": "you; walk"}]


# Guesses


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("decimal_comma.csv", {"delimiter": ";", "decimal": "comma"}),
        ("labels_cp1252.csv", {"delimiter": ";", "encoding": "cp1252"}),
        ("numbers.tsv", {}),
        ("boxed.csv", {}),
        ("extraction.csv", {}),
        ("letters.csv", {}),
        ("choices.jsonl.gz", {}),
        ("nested.jsonl", {}),
    ],
)
def test_the_notation_of_a_table_is_guessed(name: str, expected: dict[str, str]) -> None:
    source = guess_source(str(TABLES / name))
    assert {key: getattr(source, key) for key in NOTATION if getattr(source, key) is not None} == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("q;a\nx;1.200\ny;2.500\n", (";", None, None)),  # 1.2 or 1200
        ("q;a\nx;1.200\ny;2,5\n", (";", None, "comma")),
        ("q;a\nx;2,5\ny;\n", (";", None, "comma")),  # an empty cell is no text
        ("q;a\nx;\ny;\n", (";", None, None)),
        ("q;a\nx;0,5\ny;0\n", (";", None, "comma")),
        ("a;q\n2,5;x\n3,5;1,5 or 2\n", (";", None, "comma")),  # one column of numbers
        ("q;a\nx;1.25\ny;2,5\n", (";", None, None)),  # both marks
        ('q,a\nx,"1,5"\n', (None, None, "comma")),
        ('q,a\nx,"1,500"\n', (None, None, None)),  # thousands, as in English
        ("q;a\nabout 1,5 km;7\n", (";", None, None)),  # a mark in prose is no notation of numbers
        ("q|a\nx|1\n", ("|", None, None)),
        ("q,list\nx,A;B;C\ny,D;E;F\n", (None, None, None)),
        ("q\nx;y\nz;w\n", (None, None, None)),  # the header has one column
        ("q\ta\nx\t1\n", ("\t", None, None)),
        ("a|b,c;d\n1|2,3;4\n", (None, None, None)),  # the default splits too
        ("a;b|c\n1;2|3\n", (";", None, None)),  # the first that splits
        ("q;a\n\nx;1\n", (";", None, None)),  # a blank line is no record
        ('q;a\n"x;1\n', (None, None, None)),
        ("q,a\nx,1\ny\n", (None, None, None)),
        ("", (None, None, None)),
    ],
)
def test_only_what_is_certain_is_guessed(tmp_path: Path, content: str, expected: tuple[str | None, ...]) -> None:
    (tmp_path / "rows.csv").write_text(content)
    source = guess_source(str(tmp_path / "rows.csv"))
    assert tuple(getattr(source, key) for key in NOTATION) == expected


def test_a_guess_reads_the_whole_file_for_its_encoding_and_the_head_for_the_rest(tmp_path: Path) -> None:
    rows = "Bewertung gut;1,5\n" * 20_000
    (tmp_path / "rows.csv").write_bytes(f"text;note\n{rows}Größe;2,5\n".encode("cp1252"))
    source = guess_source(str(tmp_path / "rows.csv"))
    assert (source.delimiter, source.encoding, source.decimal) == (";", "cp1252", "comma")


def test_several_files_are_described_by_the_first(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("q;a\nx;1\n")
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    (tmp_path / "c.csv").write_text("q|a\nx|1\n")
    (tmp_path / "d").mkdir()
    assert guess_source(str(tmp_path / "*")) == SourceSpec(str(tmp_path / "*"), delimiter=";")
    assert guess_source(str(tmp_path / "[bc]*")) == SourceSpec(str(tmp_path / "[bc]*"))


def test_what_is_no_text_table_gets_no_guess(tmp_path: Path) -> None:
    for path in ("openai/gsm8k", str(tmp_path), str(tmp_path / "absent.csv")):
        assert guess_source(path) == SourceSpec(path)


@pytest.mark.parametrize(
    ("content", "encoding"),
    [
        ("Größe".encode(), None),
        ("Größe".encode("utf-8-sig"), None),
        (b"\x01\x0b a", None),  # UTF-8 is evidence enough
        (b"a\0b", "?"),
        ("Größe".encode("cp1252"), "cp1252"),
        ("Größe\t\r\n".encode("cp1252"), "cp1252"),
        *((b"Gr\xf6\xdfe" + bytes([control]), "?") for control in (0, 1, 8, 11, 12, 14, 31)),
        (b"\x81", "?"),
        ("Größe".encode("utf-16"), "utf-16"),
        (codecs.BOM_UTF16_BE + "Größe".encode("utf-16-be"), "utf-16"),
        ("Größe".encode("utf-16")[:-1], "?"),
        ("a\x01".encode("utf-16"), "?"),
    ],
)
def test_an_encoding_is_guessed_only_if_it_gives_text(tmp_path: Path, content: bytes, encoding: str | None) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    source = guess_source(str(tmp_path / "rows.jsonl"))
    assert source.encoding == (None if encoding == "?" else encoding)
    (tmp_path / "rows.csv").write_bytes(content)
    assert guess_source(str(tmp_path / "rows.csv")).encoding == source.encoding
    found = text_files.guess_encoding(tmp_path / "rows.jsonl")
    assert found == {None: "utf-8", "?": None}.get(encoding, encoding)


def test_a_guess_from_the_head_leaves_out_the_record_that_the_head_cuts(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("q;a\n" + "x;1,5\n" * 20_000)
    source = guess_source(str(path))
    assert (source.delimiter, source.decimal) == (";", "comma")


def test_a_damaged_file_gets_no_guess(tmp_path: Path) -> None:
    path = compressed(tmp_path / "rows.csv.gz", b"question;answer\n" * 100)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"`dataset\.path`: .*rows\.csv\.gz can't be read \(.+\): correct the path or"):
        guess_source(str(path))


def test_places_are_found_without_reading_the_lines_behind_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": 1}\n\n{"q": 2}\n')
    (tmp_path / "b.jsonl").write_text('{"q": 3}\nno JSON\n')
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    places = partial(text_files.text_places, paths, "path", text_files.TextFormat())
    assert [str(place) for place in places([2, 0, 1])] == [
        f"{tmp_path}/b.jsonl, line 1",
        f"{tmp_path}/a.jsonl, line 1",
        f"{tmp_path}/a.jsonl, line 3",
    ]
    assert places([]) == []
    (tmp_path / "b.jsonl").write_text('{"q": 3}\n')
    with pytest.raises(KeyError):
        places([3])
