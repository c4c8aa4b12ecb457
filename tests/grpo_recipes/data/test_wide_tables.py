"""Tables with very many columns or keys are refused, because the work grows faster than their width."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from grpo_recipes import cli
from grpo_recipes.data import prompts
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
    path = write(tmp_path / "rows.jsonl", [{"question": f"q{row}", f"key {row}": 1} for row in range(COLUMNS + 1)])
    with refused(f"`dataset`: {path}", f"{COLUMNS + 2:,} columns", f"{COLUMNS:,}"):
        loaded(path)


@pytest.mark.parametrize("others", [["again"] * 1_000, ["long" * 1_000_000] * 2])
def test_a_message_names_only_some_of_many_columns(tmp_path: Path, others: list[str]) -> None:
    with refused("", "row 1") as caught:
        loaded(str(write_csv(tmp_path / "rows.csv", others)))
    assert len(str(caught.value)) < 600 + len(str(tmp_path))


def test_a_message_shows_only_the_beginning_of_a_long_value(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": ["word"] * 10_000}])
    with refused("", "'word'") as caught:
        loaded(path)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


def test_the_limits_are_those_that_the_pages_state() -> None:
    docs = Path(__file__).parents[3] / "docs"
    data = " ".join((docs / "data.md").read_text(encoding="utf-8").split())
    assert f"may have {COLUMNS:,} columns" in data
    assert f"more than {prompts.SAMPLE:,} rows, golds and prompt lengths are checked on a random sample" in data
