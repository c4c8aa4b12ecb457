"""Tables with very many columns or keys are refused, because the work grows faster than their width."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from grpo_recipes import cli
from grpo_recipes.data.tables import COLUMNS
from tests.support.errors import refused
from tests.support.rows import loaded, write


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write_csv(path: Path, others: list[str]) -> Path:
    rows = [",".join([f"q{row}", *["1"] * len(others)]) for row in range(3)]
    path.write_text("\n".join([",".join(["question", *others]), *rows]) + "\n")
    return path


def names(count: int) -> list[str]:
    return [f"column {number}" for number in range(count)]


@pytest.mark.slow
def test_the_largest_number_of_columns_is_read(tmp_path: Path) -> None:
    dataset = loaded(str(write_csv(tmp_path / "rows.csv", names(COLUMNS - 1))))
    assert len(dataset.column_names) == COLUMNS
    assert dataset[2]["column 1998"] == 1
    columns = {"question": ["a", "b"], **{name: [1, 2] for name in names(COLUMNS)}}
    parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    with refused("", "rows.parquet", "2,001"):
        loaded(str(tmp_path / "rows.parquet"))
    assert loaded(str(tmp_path / "rows.parquet"), columns=["question"]).column_names == ["prompt"]


def test_more_columns_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_csv(tmp_path / "rows.csv", names(COLUMNS))
    with refused(f"`dataset`: {path}", f"{COLUMNS + 1:,}", f"{COLUMNS:,}"):
        loaded(str(path))
    assert cli.main(["init", str(path), "--output", str(tmp_path / "first.yaml")]) == 2
    assert f"`dataset`: {path}: " in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "first.yaml").exists()


def test_the_limits_count_the_keys_of_all_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": f"q{row}", f"key {row}": 1} for row in range(COLUMNS + 1)])
    with refused(f"`dataset`: {path}", f"{COLUMNS + 2:,} columns", f"{COLUMNS:,}"):
        loaded(path)
