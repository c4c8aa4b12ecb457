"""Tables with very many columns or keys are refused, because the work grows faster than their width."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from grpo_recipes import cli
from grpo_recipes.data import load as data
from grpo_recipes.data import prompts
from grpo_recipes.data.tables import COLUMNS
from grpo_recipes.recipe.specs import DatasetSpec
from tests.support.errors import refused


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def load(path: Path, **keys: Any) -> Any:
    return data.load(DatasetSpec.parse({"path": str(path), **keys}))


def write_csv(path: Path, others: list[str], rows: int = 3) -> Path:
    lines = [",".join(["question", *others]), *(",".join([f"q{row}", *["1"] * len(others)]) for row in range(rows))]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps({"question": f"q{place}", **row}) + "\n" for place, row in enumerate(rows)))
    return path


def names(count: int) -> list[str]:
    return [f"column {number}" for number in range(count)]


@pytest.mark.slow
def test_the_largest_number_of_columns_is_read(tmp_path: Path) -> None:
    dataset = load(write_csv(tmp_path / "rows.csv", names(COLUMNS - 1)))
    assert len(dataset.column_names) == COLUMNS
    assert dataset[2]["column 1998"] == 1


@pytest.mark.parametrize("verb", ["plan", "init"])
def test_more_columns_are_refused(
    tmp_path: Path, verb: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_csv(tmp_path / "rows.csv", names(4_000))
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"model_name_or_path: {tiny_model}\nuse_cpu: true\nbf16: false\ndataset: {{path: {path}}}\nrewards: "
        f"[tag_count]\nnum_generations: 4\noutput_dir: {tmp_path / 'run'}\n"
    )
    line = ["plan", str(recipe)] if verb == "plan" else ["init", str(path), "--output", str(tmp_path / "first.yaml")]
    assert cli.main(line) == 2
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert all(figure in last_line for figure in (f"`dataset`: {path}: ", "4,001", f"{COLUMNS:,}"))
    assert not (tmp_path / "first.yaml").exists()


def test_the_limits_count_the_keys_of_all_rows(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{f"key {row}": 1} for row in range(COLUMNS + 1)])
    with refused(f"`dataset`: {path}", f"{COLUMNS + 2:,} columns", f"{COLUMNS:,}"):
        load(path)


@pytest.mark.slow
def test_a_wide_parquet_file_is_read_if_few_columns_are_selected(tmp_path: Path) -> None:
    columns = {"question": ["a", "b"], **{name: [1, 2] for name in names(COLUMNS)}}
    parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    with refused("", "rows.parquet", "2,001"):
        load(tmp_path / "rows.parquet")
    assert load(tmp_path / "rows.parquet", columns=["question"]).column_names == ["prompt"]


@pytest.mark.parametrize("others", [["again"] * 1_000, ["long" * 1_000_000] * 2])
def test_a_message_names_only_some_of_many_columns(tmp_path: Path, others: list[str]) -> None:
    with refused("", "row 1") as caught:
        load(write_csv(tmp_path / "rows.csv", others))
    assert len(str(caught.value)) < 600 + len(str(tmp_path))


def test_a_message_shows_only_the_beginning_of_a_long_value(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": ["word"] * 10_000}])
    with refused("", "'word'") as caught:
        load(path)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_the_limits_are_those_that_the_pages_state() -> None:
    docs = Path(__file__).parents[3] / "docs"
    data = " ".join((docs / "data.md").read_text(encoding="utf-8").split())
    assert f"may have {COLUMNS:,} columns" in data
    assert f"more than {prompts.SAMPLE:,} rows, golds and prompt lengths are checked on a random sample" in data
