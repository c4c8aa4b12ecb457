"""User tables as datasets: formats, columns, prompts, mixtures, held-out shares, and messages for mistakes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import xxhash
from pyarrow import parquet
from trl.scripts.utils import DatasetConfig, DatasetMixtureConfig, get_dataset

from grpo_recipes.data import prompts, sources, tables
from grpo_recipes.data.load import load, load_prompts
from grpo_recipes.data.sources import Keys
from grpo_recipes.recipe.dataset import SYSTEM_PROMPTS, DatasetSpec, SourceSpec
from grpo_rewards import choice_correctness, gsm8k_correctness
from grpo_rewards.math.golds import read_gold
from tests.support.errors import refused
from tests.support.rows import loaded, user, write

ROWS = [{"problem": f"What is {n} + {n}?", "solution": f"So \\boxed{{{2 * n}}}", "level": n % 5} for n in range(30)]


def spec(path: Any, **keys: Any) -> DatasetSpec:
    return DatasetSpec.parse({"path": path, "columns": {"question": "problem", "answer": "solution"}, **keys})


EXPECTED = [{"prompt": user(row["problem"]), "answer": row["solution"], "level": row["level"]} for row in ROWS]


# Formats


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "saved"])
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    assert load(spec(write(tmp_path / name, ROWS))).to_list() == EXPECTED


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
def test_a_glob_reads_its_files_sorted_by_name(tmp_path: Path, ending: str) -> None:
    for part in (2, 0, 1):
        write(tmp_path / f"part-{part}{ending}", ROWS[10 * part : 10 * part + 10])
    assert load(spec(str(tmp_path / f"part-*{ending}"))).to_list() == EXPECTED
    assert load(spec(str(tmp_path / f"part-*{ending}"), split="train[5:12]")).to_list() == EXPECTED[5:12]


def test_a_table_is_written_once_and_memory_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def written() -> int:
        return len(list((tmp_path / "cache" / "grpo_recipes").glob("*.arrow")))

    path = write(tmp_path / "rows.jsonl", ROWS)
    first = load(spec(path))
    assert written() == 2  # the file and its prompts
    assert load(spec(path)).to_list() == first.to_list()
    assert {Path(file["filename"]).suffix for file in first.cache_files} == {".arrow"}
    assert written() == 2
    load(spec(path, system_prompt="think"))
    assert written() == 3
    write(tmp_path / "rows.jsonl", ROWS[:5])
    assert len(load(spec(path))) == 5
    assert written() == 5


def test_a_name_with_brackets_may_be_a_file(tmp_path: Path) -> None:
    """A file of exactly that name comes before the files that match it as a glob."""
    write(tmp_path / "rows1.jsonl", ROWS[:1])
    assert len(load(spec(str(tmp_path / "rows[1].jsonl")))) == 1
    write(tmp_path / "rows[1].jsonl", ROWS[:2])
    assert len(load(spec(str(tmp_path / "rows[1].jsonl")))) == 2


def test_paths_begin_at_the_home_of_a_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep" / "rows.jsonl", ROWS[:3])
    write(tmp_path / "saved", ROWS[:4])
    for path, count in (("~/deep/rows.jsonl", 3), ("~/**/*.jsonl", 3), ("~/saved", 4)):
        assert len(load(spec(path))) == count
    write(tmp_path / "scored.jsonl", [{"prompt": "p", "response": "r", "reward": 1.0}])
    assert len(loaded("~/score[d].jsonl", name="scored")) == 1
    (tmp_path / "semicolons.csv").write_text("question;answer\na;1\n")
    for path in ("~/semicolons.csv", "~/semi*.csv"):
        assert sources.guess_source(path) == SourceSpec(path, delimiter=";")


def test_a_path_that_no_file_has_is_named() -> None:
    for path in ("~nobody-here/*.csv", "rows\0.jsonl", "org/na\0me", "rows\ud800.jsonl", "a.jsonl", "no/such/folder"):
        with refused("`dataset.path`", path):
            loaded(path)


def test_a_saved_folder_and_the_hub_have_no_notation(tmp_path: Path) -> None:
    saved = write(tmp_path / "saved", ROWS)
    for path in (saved, "openai/gsm8k"):
        with refused("`dataset.encoding`", path):
            loaded(path, encoding="cp1252")


def test_files_that_are_damaged_none_or_of_two_kinds_are_named(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl", "c.json"):
        write(tmp_path / name, ROWS)
    (tmp_path / "d.txt").write_text("x")
    (tmp_path / "e.csv").mkdir()
    for name in ("f.parquet.gz", "g.parquet", "h.parquet"):
        (tmp_path / name).write_bytes(b"PAR1")
    for pattern, figures in (
        ("*.json*", [f"{tmp_path}/a.jsonl", f"{tmp_path}/c.json"]),
        ("*.txt", [f"{tmp_path}/d.txt", ".parquet"]),
        ("*.csv", [f"{tmp_path}/e.csv", ".parquet"]),
        ("*.gz", [f"{tmp_path}/f.parquet.gz", ".parquet"]),
        ("none-*.csv", [f"{tmp_path}/none-*.csv"]),
        ("h.parquet", [f"{tmp_path}/h.parquet: "]),
        ("*.parquet", [f"{tmp_path}/g.parquet and 1 more"]),
    ):
        with refused("`dataset.path`", *figures):
            load(spec(str(tmp_path / pattern)))


@pytest.mark.usefixtures("silent_hub")
def test_what_a_library_does_not_read_is_named_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*args: Any, **kwargs: Any) -> None:
        raise datasets.exceptions.DatasetGenerationError("no rows.")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    for path in (f"{tmp_path}/rows.parquet", "org/rows"):
        with refused(f"`dataset.path`: {path}", "(no rows)"):
            load(spec(path))


# Columns and prompts


def test_answers_may_be_numbers_and_other_columns_stay_in_the_row(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "answer": n, "tests": [{"input": str(n)}], "meta": {"page": n}} for n in range(3)]
    path = write(tmp_path / "rows.jsonl", rows)
    assert loaded(path)["answer"][:] == [0, 1, 2]
    table = loaded(path, name="gsm8k")
    assert table["answer"][:] == ["0", "1", "2"]
    assert table[2]["tests"] == [{"input": "2"}]
    assert table[2]["meta"] == {"page": 2}


def test_columns_renames_by_a_mapping_and_selects_by_a_list(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", ROWS)
    both = {"question": "problem", "answer": "solution", "solution": "solution"}
    assert load(spec(path, columns=both))[1] == {**EXPECTED[1], "solution": ROWS[1]["solution"]}
    write(tmp_path / "named.jsonl", [{"question": "a", "answer": 1, "other": 2}])
    named = loaded(str(tmp_path / "named.jsonl"), columns=["question", "answer"])
    assert named.column_names == ["prompt", "answer"]


def test_a_column_prompt_is_the_prompt(tmp_path: Path) -> None:
    texts = write(tmp_path / "texts.jsonl", [{"prompt": " 1 + 1 = ", "answer": 2}])
    assert loaded(texts).to_list() == [{"prompt": " 1 + 1 = ", "answer": 2}]
    system = {"role": "system", "content": "Be brief."}
    made = loaded(texts, system_prompt="Be brief.", prompt_format="conversational")
    assert made[0]["prompt"] == [system, *user(" 1 + 1 = ")]
    with refused("`dataset.system_prompt`", "`prompt`"):
        loaded(texts, system_prompt="Be brief.")
    turns = [*user("hi"), {"role": "assistant", "content": "yes?"}, *user("1 + 1?")]
    messages = write(tmp_path / "messages.jsonl", [{"prompt": turns, "name": "x"}])
    assert loaded(messages).to_list() == [{"prompt": turns, "name": "x"}]
    named = write(tmp_path / "named.jsonl", [{"prompt": [{**turns[0], "name": "Ann"}]}])
    assert loaded(named).to_list() == [{"prompt": [{**turns[0], "name": "Ann"}]}]
    assert loaded(messages, system_prompt="Be brief.")[0]["prompt"] == [system, *turns]
    assert loaded(messages, prompt_format="text")[0]["prompt"] == "hi\nyes?\n1 + 1?"


def test_a_template_can_use_any_column(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    template = "{{ problem }}{% if level > 2 %} (hard){% endif %}"
    table = loaded(path, prompt_template=template, system_prompt="Be brief.")
    assert table.column_names == ["prompt", "problem", "solution", "level"]
    assert [row["prompt"][1]["content"] for row in table] == [
        row["problem"] + (" (hard)" if row["level"] > 2 else "") for row in ROWS
    ]
    text = loaded(path, prompt_template="Q: {{ problem }}\nA:", prompt_format="text")
    assert text[3]["prompt"] == f"Q: {ROWS[3]['problem']}\nA:"
    worked = write(tmp_path / "worked.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}])
    made = loaded(worked, name="gsm8k", prompt_template="{{ question }} Think.", system_prompt="none")
    assert made.to_list() == [{"prompt": user("1 + 1? Think."), "answer": "2"}]


def test_what_fails_in_a_template_is_named_with_its_row(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    for template, reason in (
        ("{{ level|wordwrap }}", "'splitlines'"),
        ("{{ problem.x }}", "'x'"),
        ("{{ problem.__class__.__mro__ }}", "unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        (r"{{ '\ud800' }}", "surrogates"),
    ):
        with refused(f"`dataset.prompt_template`: {path}, line 1", reason):
            load(spec(path, columns=None, prompt_template=template))
    for template in ("{{ a", "{% for x in a %}" * 30 + "{% endfor %}" * 30, "{{ " + "(" * 3000 + " }}"):
        with refused("`dataset.prompt_template`"):
            loaded(path, prompt_template=template)


def test_a_template_takes_the_values_that_json_lacks(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"day": [date(2024, 1, 2), date(2024, 1, 3), date(2024, 1, 2)]})
    table.to_parquet(tmp_path / "rows.parquet")
    made = load_prompts(
        DatasetSpec.parse({"path": str(tmp_path / "rows.parquet"), "prompt_template": "What day is {{ day }}?"})
    )
    assert made.dataset["prompt"][0] == user("What day is 2024-01-02?")
    assert made.identities[0] == made.identities[2] != made.identities[1]


def test_boxed_golds_are_extracted(tmp_path: Path) -> None:
    """MATH has a problem and a solution, and MATH-500 has a column for the answer too."""
    system = {"role": "system", "content": SYSTEM_PROMPTS["boxed"]}
    row = {"problem": " 1/2 + 1/3? ", "solution": "It is $\\boxed{\\frac{5}{6}}$.", "level": "Level 1"}
    expected = {"prompt": [system, *user("1/2 + 1/3?")], "answer": "\\frac{5}{6}", "solution": row["solution"]}
    for given in (row, {**row, "answer": "\\frac{5}{6}"}):
        path = write(tmp_path / f"{len(given)}.jsonl", [given])
        assert loaded(path, name="math").to_list() == [{**expected, "level": "Level 1"}]


def test_the_first_name_of_a_part_is_read(tmp_path: Path) -> None:
    row = {"problem": "p", "question": "q", "answer": "1", "solution": "2"}
    made = loaded(write(tmp_path / "a.jsonl", [row]), name="math", system_prompt="none")
    assert made.to_list() == [{"prompt": user("p"), "answer": "1", "question": "q", "solution": "2"}]


def test_multiple_choice_reads_the_forms_of_mmlu_and_arc(tmp_path: Path) -> None:
    mmlu = {"question": "The capital of Italy?", "choices": ["Paris", "Rome"], "answer": 1, "subject": "geography"}
    arc = {"question": mmlu["question"], "choices": {"text": ["Paris", "Rome"], "label": ["A", "B"]}, "answerKey": "B"}
    label = {"question": mmlu["question"], "choices": ["Paris", "Rome"], "label": "B"}
    for number, row in enumerate((mmlu, arc, label)):
        path = write(tmp_path / f"{number}.jsonl", [row])
        (made,) = loaded(path, name="multiple_choice").to_list()
        assert made["prompt"][1]["content"] == "The capital of Italy?\nA. Paris\nB. Rome"
        assert made["answer"] == "B"
        assert made["choices"] == row["choices"]


ROME = {"question": "The capital of Italy?", "answer": "B"}


def test_choices_may_be_columns_or_text(tmp_path: Path) -> None:
    for choices in (
        {"A": "Paris", "B": "Rome", "C": None},
        {"choices": '["Paris", "Rome"]'},
        {"choices": "Paris | Rome"},
        {"choices": '{"A": "Paris", "B": "Rome"}'},
    ):
        full = dict.fromkeys("ABC", "x") if "A" in choices else choices  # the column C exists
        path = write(tmp_path / "rows.jsonl", [{**ROME, **choices}, {**ROME, **full, "question": "And of Spain?"}])
        made = loaded(path, name="multiple_choice")[0]
        assert made["prompt"][1]["content"] == "The capital of Italy?\nA. Paris\nB. Rome"
        assert made["choices"] == {"text": ["Paris", "Rome"], "label": ["A", "B"]}
        columns = {name: [made[name]] * 3 for name in ("answer", "choices")}
        answers = ["<answer>B</answer>", "<answer>Rome</answer>", "<answer>Paris</answer>"]
        assert choice_correctness(completions=answers, **columns) == [1.0, 1.0, 0.0]


def test_text_that_is_no_list_of_choices_is_refused(tmp_path: Path) -> None:
    for choices in ("Paris", '["Paris"]', "[" * 5_000):
        path = write(tmp_path / "rows.jsonl", [{**ROME, "choices": choices}])
        with refused("", "line 1"):
            loaded(path, name="multiple_choice")


def test_rows_with_fewer_choices_than_others_are_not_dropped(tmp_path: Path) -> None:
    rows = [{**ROME, "A": "Paris", "B": "Rome", "C": "Oslo"}, {"question": "Which?", "answer": "A", "A": "x", "B": "y"}]
    path = write(tmp_path / "rows.jsonl", [*rows, {**rows[0], "answer": None}])
    made = loaded(path, name="multiple_choice", drop_missing=True)
    assert made["answer"][:] == ["B", "A"]


def test_a_float_of_32_bits_is_the_number_that_was_written(tmp_path: Path) -> None:
    """Other numbers and the order of the columns stay."""
    written, answers = [0.1, 2.3, 1.234], np.array([0.1, 2.3, 1.234], np.float32)
    table = {"x": answers, "question": ["a", "b", "c"], "n": [1, 2, 3], "d": [0.1, 0.2, None], "y": answers}
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_dict(table).to_parquet(path)
    assert loaded(str(path), columns={"answer": "x", "question": "question"})["answer"][:] == written
    keys = Keys("path", "split")
    every = sources.read(SourceSpec(str(path)), keys).table
    assert every.to_dict() == {**table, "x": written, "y": written}
    assert every.column_names == [*table]
    for count in (0, 2):
        part = sources.read(SourceSpec(str(path), split=f"train[:{count}]", columns=["x", "y"]), keys).table
        assert part.to_dict() == {"x": written[:count], "y": written[:count]}


# Conversations in ShareGPT's notation


def shared(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"from": speaker, "value": text} for speaker, text in turns]


@pytest.mark.parametrize("column", ["conversations", "messages", "prompt"])
def test_turns_in_the_notation_of_sharegpt_are_messages(tmp_path: Path, column: str) -> None:
    turns = shared(("system", "Be brief."), ("human", "2+2?"), ("gpt", "4"), ("human", "And 3+3?"))
    for answer, gold in ((shared(("gpt", "6")), "6"), ([], None)):
        (row,) = loaded(write(tmp_path / "rows.jsonl", [{column: [*turns, *answer]}])).to_list()
        roles = [(turn["role"], turn["content"]) for turn in row["prompt"]]
        assert roles == [("system", "Be brief."), ("user", "2+2?"), ("assistant", "4"), ("user", "And 3+3?")]
        assert row.get("answer") == gold
    path = write(tmp_path / "rows.jsonl", [{column: shared(("human", "q"), ("observation", "x"))}])
    with refused("", "line 1"):
        loaded(path)


# Mixtures


def three_sources(folder: Path) -> list[dict[str, Any]]:
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(60)]
    return [
        {"path": write(folder / "a.jsonl", rows[:20]), "fraction": 0.5},
        {"path": write(folder / "b.parquet", rows[20:50]), "fraction": 1.0},
        {"path": write(folder / "saved", rows[50:]), "fraction": 0.25},
    ]


def rows_of_trl(sources: Sequence[dict[str, Any]]) -> datasets.Dataset:
    """Return the rows of a mixture of files as TRL reads them, which has a name for each format."""
    kinds = {".jsonl": "json", ".parquet": "parquet"}
    parts = [
        DatasetConfig(kinds[Path(source["path"]).suffix], data_files=source["path"], fraction=source.get("fraction"))
        for source in sources
    ]
    return get_dataset(DatasetMixtureConfig(datasets=parts))["train"]


def test_a_mixture_has_the_same_rows_as_in_trl(tmp_path: Path) -> None:
    sources = three_sources(tmp_path)
    datasets.load_from_disk(sources[2]["path"]).to_parquet(tmp_path / "c.parquet")
    theirs = rows_of_trl([*sources[:2], {**sources[2], "path": str(tmp_path / "c.parquet")}])
    ours = loaded(sources)
    assert [row["prompt"][0]["content"] for row in ours] == theirs["question"][:]
    assert ours["answer"][:] == theirs["answer"][:]
    assert [ours["source"][:].count(source["path"]) for source in sources] == [15, 30, 8]


@pytest.mark.usefixtures("silent_hub")
def test_a_mixture_accepts_the_keys_of_trl(tmp_path: Path) -> None:
    """`path` is a format, `data_files` are the files, `columns` is a list, and one source has its own columns."""
    first = write(tmp_path / "a.jsonl", [{"question": "a", "answer": "1", "junk": 1}])
    second = write(tmp_path / "b.csv", [{"problem": "b", "answer": "x2"}])
    sources = [
        {"path": "json", "data_files": first, "split": "train", "columns": ["question", "answer"]},
        {"path": second, "columns": {"question": "problem"}},
    ]
    assert loaded(sources).to_list() == [
        {"prompt": user("a"), "answer": "1", "source": "json"},
        {"prompt": user("b"), "answer": "x2", "source": second},
    ]


def test_the_columns_of_a_source_win_over_those_of_the_mixture(tmp_path: Path) -> None:
    first, second = (
        write(tmp_path / f"{name}.jsonl", [{"asked": f"asked {name}", "problem": f"problem {name}"}]) for name in "ab"
    )
    paths = [{"path": first, "columns": {"question": "asked"}}, {"path": second}]
    rows = loaded(paths, columns={"question": "problem"}, prompt_format="text")
    assert rows["prompt"][:] == ["asked a", "problem b"]


def test_halves_of_rows_are_rounded_as_in_trl(tmp_path: Path) -> None:
    """The shares are 3/7 and 4/7 of a mixture of 3.5 rows: 1.5 rows, which floats make a little more, and 2."""
    rows = [{"question": f"{n}?"} for n in range(4)]
    sources = [
        {"path": write(tmp_path / "a.jsonl", rows[:2]), "fraction": 0.6},
        {"path": write(tmp_path / "b.jsonl", rows[2:]), "fraction": 0.8},
    ]
    assert [row["prompt"][0]["content"] for row in loaded(sources)] == rows_of_trl(sources)["question"][:]


@pytest.mark.usefixtures("silent_hub")
def test_a_source_with_a_configuration_is_called_by_both_names(tmp_path: Path) -> None:
    files = {name: write(tmp_path / f"{name}.jsonl", [{"question": name}]) for name in ("easy", "hard")}
    sources = [{"path": "json", "name": name, "data_files": file} for name, file in files.items()]
    sources.append({"path": "json", "data_dir": str(tmp_path), "data_files": "hard.jsonl"})
    made = loaded(sources)
    assert made["source"][:] == ["json/easy", "json/hard", "json"]
    assert [row["prompt"][0]["content"] for row in made] == ["easy", "hard", "hard"]


def test_a_column_has_one_type_in_all_sources_that_have_values(tmp_path: Path) -> None:
    first, second = str(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", [{"question": "b", "level": 3}])
    write(tmp_path / "a.jsonl", [{"question": "a", "level": None}])
    for order, levels in (([first, second], [None, 3]), ([second, first], [3, None])):
        assert loaded(order)["level"][:] == levels
    for level in ("hard", [1], 2.5, True):
        write(tmp_path / "a.jsonl", [{"question": "a", "level": level}])
        with refused(f"`dataset.path`: {first} and {second}", "level"):
            loaded([first, second])


def test_a_mixture_survives_a_round_trip_through_json(tmp_path: Path) -> None:
    made = DatasetSpec.parse({"path": three_sources(tmp_path), "eval_share": 0.2})
    written = json.loads(json.dumps(made.as_dict()))
    assert DatasetSpec.parse(written) == made
    assert written["path"][0]["fraction"] == 0.5


# Held-out rows


def sides(made: DatasetSpec) -> tuple[set[str], set[str]]:
    both = [load(made, evaluation=held_out) for held_out in (False, True)]
    train, held_out = ({row["prompt"][-1]["content"] for row in table} for table in both)
    return train, held_out


def test_a_row_stays_training_or_held_out_when_the_table_changes(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + {n}?", "id": n} for n in range(400)]
    path = write(tmp_path / "rows.jsonl", rows)
    train, held_out = sides(DatasetSpec.parse({"path": path, "eval_share": 0.25}))
    assert not train & held_out
    assert len(train) + len(held_out) == 400
    assert 60 <= len(held_out) <= 140  # 100 ± 4.6 standard deviations
    # Rows keep their side with other rows, another order, other columns, another file format and another prompt.
    changed = [{"text": row["question"], "id": -row["id"]} for row in reversed(rows[:200])]
    changed += [{"text": f"And {n}?", "id": 0} for n in range(50)] + [{"text": rows[0]["question"], "id": 7}]
    more = {"columns": {"question": "text"}, "system_prompt": "think", "eval_share": 0.25}
    train_2, held_out_2 = sides(DatasetSpec.parse({"path": write(tmp_path / "other.csv", changed), **more}))
    assert not train & held_out_2
    assert not held_out & train_2
    # A larger share keeps all rows of a smaller one.
    _, half = sides(DatasetSpec.parse({"path": path, "eval_share": 0.5}))
    assert held_out < half


def test_a_row_is_on_the_same_side_in_every_version(tmp_path: Path) -> None:
    """A side is decided by the XXH64 of what the prompt is made from, as JSON."""
    path = write(tmp_path / "rows.jsonl", [{"question": "Größe?", "n": 1}])
    for keys, content in (
        ({}, '[{"content": "Größe?", "role": "user"}]'),
        ({"system_prompt": "think"}, '[{"content": "Größe?", "role": "user"}]'),
        ({"prompt_template": "{{ question }} {{ n }}"}, '[1, "Größe?"]'),
        ({"prompt_template": "Solve: {{ n }} {{ question }}"}, '[1, "Größe?"]'),
        ({"columns": {"prompt": "question"}}, '"Größe?"'),
    ):
        (identity,) = load_prompts(DatasetSpec.parse({"path": path, **keys})).identities
        assert identity == xxhash.xxh64_intdigest(content.encode())
    # The held-out share holds the smallest hashes.
    share = float(identity) / 2.0**64
    for factor, evaluation in ((0.99, False), (1.01, True)):
        made = DatasetSpec.parse({"path": path, "eval_share": share * factor, **keys})
        assert len(load(made, evaluation=evaluation)) == 1
        with refused("`dataset.eval_share`", "rows.jsonl"):
            load(made, evaluation=not evaluation)


# Prompts of many rows, and single prompts


@pytest.mark.parametrize("drop_missing", [False, True])
def test_rows_of_later_batches_keep_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drop_missing: bool
) -> None:
    monkeypatch.setattr(prompts, "BATCH", 2)
    rows: list[dict[str, Any]] = [{"question": f"{n}?", "answer": n, "level": 1} for n in range(7)]
    if drop_missing:
        rows[1]["question"] = rows[4]["answer"] = None
    left = [row["answer"] for row in rows if row["question"] is not None and row["answer"] is not None]
    keys = {"path": write(tmp_path / "rows.jsonl", rows), "drop_missing": drop_missing}
    made = load_prompts(DatasetSpec.parse(keys))
    assert made.dataset["answer"][:] == left
    assert [row["prompt"][0]["content"] for row in made.dataset] == [f"{n}?" for n in left]
    assert [place.number for place in made.places(range(len(left)))] == [n + 1 for n in left]
    rows[6]["level"] = 0
    write(tmp_path / "rows.jsonl", rows)
    with refused("", "rows.jsonl", "line 7"):
        loaded(**keys, prompt_template="{{ 1 // level }}")


S = {"role": "system", "content": "s"}
A = {"role": "assistant", "content": "a"}


def test_a_system_prompt_comes_first_unless_the_turns_bring_one() -> None:
    for turns, system, is_text, expected in (
        ("q", None, True, "q"),
        ("q", "t", True, "t\nq"),
        ("q", None, False, user("q")),
        ("q", "t", False, [{"role": "system", "content": "t"}, *user("q")]),
        ([S, *user("q")], "t", False, [S, *user("q")]),
        ([S, *user("q")], None, True, "s\nq"),
        ([*user("q"), A, *user("r")], "t", True, "t\nq\na\nr"),
        ([*user("q"), S], "t", False, [{"role": "system", "content": "t"}, *user("q"), S]),
    ):
        before = list(turns)
        assert prompts.prompt_of(turns, system, is_text) == expected
        assert list(turns) == before


def test_a_text_is_asked_as_a_row_with_one_column_would_be() -> None:
    for keys, columns, message in (
        ({"name": "gsm8k"}, ("question",), "a {{ b"),
        ({"name": "multiple_choice"}, ("question", "choices"), " a {{ b "),
        (
            {"name": "classification", "labels": ["x", "y"]},
            ("text",),
            "a {{ b\n\nAnswer with one of these labels: x, y.",
        ),
        ({"name": "rlaif"}, (), " a {{ b "),
        ({}, None, " a {{ b "),
        ({"prompt_template": "Q: {{ q }}!"}, ("q",), "Q:  a {{ b !"),
        ({"prompt_template": "{{ q }}{{ a }}"}, ("a", "q"), " a {{ b "),
        ({"prompt_template": "Play."}, (), " a {{ b "),
        ({"name": "gsm8k", "prompt_template": "{{ x }}"}, ("x",), " a {{ b "),
    ):
        made = DatasetSpec.parse({"path": "a", **keys})
        assert prompts.columns_of_prompt(made) == columns
        assert prompts.phrased_text(made, " a {{ b ") == message


def test_a_missing_column_is_named_with_the_key_that_maps_one(tmp_path: Path) -> None:
    for name, row, figures in (
        ("gsm8k", {"question": "q", "gold": 1}, ["'answer'", "`columns: {answer: ...}`"]),
        ("math", {"problem": "q", "x": 1}, ["'answer' or 'solution'", "`columns: {answer: ...}`"]),
        ("multiple_choice", {"question": "q", "A": "x", "answer": "A"}, ["'choices'", "`columns: {A: ..., B: ...}`"]),
        (None, {"problem": "q"}, ["'conversations'", "`columns: {question: ...}`", "`prompt_template`"]),
    ):
        path = write(tmp_path / "rows.jsonl", [row])
        with refused(f"`dataset`: {path}, line 1", ", ".join(row), *figures):
            loaded(path, name=name)


def test_a_name_that_the_trainer_fills_is_refused(tmp_path: Path) -> None:
    names = ("prompts", "completion", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
    for name in (*names, "environments", "image", "images"):
        path = write(tmp_path / "rows.jsonl", [{"question": "q", name: 1}])
        with refused(f"`dataset`: {path}, line 1", repr(name), f"`columns: {{other_{name}: {name}}}`"):
            loaded(path)
    path = write(tmp_path / "rows.jsonl", [{"conversations": [*user("1 + 1?"), A], "answer": "3"}])
    with refused(f"{path}, line 1", "'answer'"):
        loaded(path, name="rlaif")


def test_golds_have_the_type_of_the_answers(tmp_path: Path) -> None:
    path = str(tmp_path / "rows.parquet")
    for answers, kind, golds in (
        ([1.5, 2.0], pa.float64(), [1.5, 2.0]),
        ([1, 20], pa.int64(), ["1", "20"]),
        (["#### 1", "b"], pa.large_string(), ["1", "b"]),
        ([[1.5], [2.0, 3.0]], pa.large_list(pa.float64()), [[1.5], [2.0, 3.0]]),
    ):
        parquet.write_table(pa.table({"question": ["q", "r"], "answer": pa.array(answers, kind)}), path)
        assert loaded(path, name="gsm8k")["answer"][:] == golds


def test_choices_of_text_become_lists_and_lists_stay(tmp_path: Path) -> None:
    kind = pa.large_string()
    for number, choices in enumerate((pa.array(["x | y"], kind), pa.array([["x", "y"]], pa.large_list(kind)))):
        path = str(tmp_path / f"{number}.parquet")
        parquet.write_table(pa.table({"question": ["q"], "choices": choices, "answer": ["B"]}), path)
        made = loaded(path, name="multiple_choice")
        assert made["answer"][:] == ["B"]
        assert made["choices"][0] == (["x", "y"] if number else {"text": ["x", "y"], "label": ["A", "B"]})


def test_messages_of_a_large_list_are_kept(tmp_path: Path) -> None:
    for turn in ({"role": "user", "content": "q"}, {"from": "human", "value": "q"}):
        kind = pa.large_list(pa.struct([(key, pa.string()) for key in turn]))
        parquet.write_table(pa.table({"prompt": pa.array([[turn]], kind)}), tmp_path / "rows.parquet")
        assert loaded(str(tmp_path / "rows.parquet"))["prompt"][:] == [user("q")]


PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)
STORED = {"bytes": PNG, "path": None}
MIXED_PARTS = [{"role": "user", "content": [{"type": "image_url", "text": None}, {"type": "text", "text": "q"}]}]


def test_images_are_refused_unless_other_columns_are_selected(tmp_path: Path) -> None:
    for column, value, feature in (
        ("picture", STORED, datasets.Image()),
        ("page", {"scan": STORED}, {"scan": datasets.Image()}),
        ("picture", STORED, None),
        ("raw", PNG, None),
        ("prompt", MIXED_PARTS, None),
    ):
        features = datasets.Dataset.from_list([{"question": "q", column: value}]).features
        if feature is not None:
            features[column] = feature
        path = tmp_path / "rows.parquet"
        rows = [{"question": "q", column: value}, {"question": "q", column: None}]
        datasets.Dataset.from_list(rows[:: 1 if column == "prompt" else -1], features).to_parquet(path)
        with refused(""):
            loaded(str(path))
        assert len(loaded(str(path), columns=["question"])) == 2


def test_a_table_with_names_of_images_or_an_empty_column_of_images_is_read(tmp_path: Path) -> None:
    row = {"question": "Is data:image/png a path?", "file": "1.png", "scan": None}
    text = datasets.Value("string")
    features = datasets.Features({"question": text, "file": text, "scan": datasets.Image()})
    datasets.Dataset.from_list([row], features).to_parquet(tmp_path / "rows.parquet")
    assert len(loaded(str(tmp_path / "rows.parquet"))) == 1


def test_a_template_replaces_a_column_prompt_and_keeps_what_else_it_names(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "p", "question": "q", "answer": 1}])
    for template, content in (("{{ prompt }} {{ answer }}", "p 1"), ("{{ question }}", "q")):
        made = loaded(path, prompt_template=template)
        assert made.to_list() == [{"prompt": user(content), "question": "q", "answer": 1}]
    worked = write(tmp_path / "worked.jsonl", [{"question": "q", "answer": "#### 1", "hint": "h"}])
    made = loaded(worked, name="gsm8k", prompt_template="{{ answer }} {{ hint }}", system_prompt="none")
    assert made.to_list() == [{"prompt": user("#### 1 h"), "answer": "1", "hint": "h"}]


def test_prompts_without_another_column_are_a_table_too(tmp_path: Path) -> None:
    for row in ({"question": "q"}, {"prompt": "q"}, {"prompt": user("q")}):
        made = loaded(write(tmp_path / "rows.jsonl", [row]))
        assert made.to_list() == [{"prompt": "q" if row.get("prompt") == "q" else user("q")}]


# The sample of a large table


def test_a_large_table_is_sampled() -> None:
    assert tables.sample_of_rows(tables.SAMPLE).tolist() == list(range(tables.SAMPLE))
    sample = tables.sample_of_rows(1_000_000)
    assert len(np.unique(sample)) == len(sample) == tables.SAMPLE
    assert (sample == tables.sample_of_rows(1_000_000)).all()
    assert (sample == np.sort(sample)).all()
    # Each tenth of the rows has a tenth of the sample, up to 5 standard deviations.
    counts = np.bincount(sample // 100_000, minlength=10)
    assert abs(counts - 2_000).max() < 5 * 2_000**0.5


# Nested columns, conversations, and several golds

TABLES = Path(__file__).parents[2] / "data" / "tables"


def test_a_dotted_path_names_a_nested_column() -> None:
    nested = TABLES / "extraction_nested.jsonl"
    records = [json.loads(line)["record"] for line in nested.read_text(encoding="utf-8").splitlines()]
    table = loaded(str(nested), columns={"question": "record.text", "fields": "record.target"})
    assert table["prompt"][:] == [user(record["text"]) for record in records]
    assert table["fields"][:] == [record["target"] for record in records]
    assert table["record"][0] == records[0]
    replaced = loaded(str(nested), columns={"question": "record.text", "record": "record.target.day"})
    assert replaced["record"][:] == [record["target"]["day"] for record in records]


def test_a_dotted_path_reads_the_rows_of_a_slice_and_of_parquet(tmp_path: Path) -> None:
    rows = [{"a": {"b": {"c": f"q{n}"}}, "a.b": n} for n in range(9)]
    for name in ("rows.jsonl", "rows.parquet"):
        path = write(tmp_path / name, rows)
        table = loaded(path, split="train[3:5]+train[8:]", columns={"question": "a.b.c"})
        assert table["prompt"][:] == [user(f"q{n}") for n in (3, 4, 8)]
        table = loaded(path, columns={"question": "a.b.c", "n": "a.b"})
        assert table["n"][:] == list(range(9)), "a column of exactly this name comes first"


def test_a_missing_object_has_no_nested_value(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"question": "a", "meta": {"level": 1}}, {"question": "b", "meta": None}])
    assert loaded(path, columns={"level": "meta.level"})["level"][:] == [1, None]
    later = loaded(path, columns={"the_level": "meta.level"})
    assert later.column_names == ["prompt", "the_level", "meta"]


@pytest.mark.parametrize("name", ["messages", "prompt"])
def test_the_last_assistant_turn_of_a_conversation_is_the_gold(name: str) -> None:
    nested = TABLES / "nested.jsonl"
    turns = [json.loads(line)["conversation"]["messages"] for line in nested.read_text(encoding="utf-8").splitlines()]
    table = loaded(str(nested), columns={name: "conversation.messages"})
    assert table["prompt"][:] == [conversation[:-1] for conversation in turns]
    assert table["answer"][:] == [conversation[-1]["content"] for conversation in turns]


def test_a_conversation_without_an_answer_is_a_prompt(tmp_path: Path) -> None:
    """A blank last turn is no gold, a conversation may end with the user's turn, and a column `answer` is the gold."""
    answered, blank = [*user("q"), {**A, "content": "a "}], [*user("q"), {**A, "content": " "}]
    made = loaded(write(tmp_path / "rows.jsonl", [{"messages": turns} for turns in (answered, blank, user("q"))]))
    assert made["answer"][:] == ["a", None, None]
    assert made["prompt"][:] == [user("q")] * 3
    longer = [S, *answered, *user("r")]
    for turns, gold, prompt in ((longer, "1", longer), (answered, 1, user("q"))):
        path = write(tmp_path / "rows.jsonl", [{"messages": turns, "answer": gold}])
        assert loaded(path).to_list() == [{"prompt": prompt, "answer": gold}]
    path = write(tmp_path / "rows.jsonl", [{"messages": answered}, {"messages": [A]}])
    with refused("", "line 2"):
        loaded(path)


def test_a_preset_keeps_a_list_of_accepted_golds(tmp_path: Path) -> None:
    for preset, question, answer, golds, expected in (
        ("gsm8k", "question", "answer", ["so #### 18", "eighteen"], ["18", "eighteen"]),
        ("math", "problem", "solution", ["\\boxed{18}", "18.0"], ["18", "18.0"]),
    ):
        rows = [{question: "q", answer: golds}, {question: "r", answer: ["7"]}]
        assert loaded(write(tmp_path / "rows.jsonl", rows), name=preset)["answer"][:] == [expected, ["7"]]
        for wrong in ([], ["7", " "]):
            path = write(tmp_path / "wrong.jsonl", [rows[0], {question: "r", answer: wrong}])
            with refused("", "wrong.jsonl", "line 2"):
                loaded(path, name=preset)


@pytest.mark.parametrize("file", ["rows.jsonl", "rows.parquet"])
def test_a_number_stays_a_number_that_no_decimal_mark_misreads(tmp_path: Path, file: str) -> None:
    numbers = [1.234, -12.125, 999.001, 0.125, 1234.567, 2.5, 18.0]
    path = write(tmp_path / file, [{"question": "q", "answer": number} for number in numbers])
    for number, gold in zip(numbers, loaded(path, name="gsm8k")["answer"], strict=True):
        assert gsm8k_correctness(completions=[f"<answer>{number:.10g}</answer>"], answer=[gold]) == [2.0]
        for decimal in ("point", "comma"):
            read = read_gold(gold, decimal)
            assert read is not None
            assert read.number == Fraction(str(number))


# Bad input


def test_a_mistake_is_reported_with_its_fix(tmp_path: Path) -> None:
    fine = write(tmp_path / "rows.jsonl", ROWS)
    clash = write(tmp_path / "clash.jsonl", [{**row, "level": "hard"} for row in ROWS])
    sourced = write(tmp_path / "sourced.jsonl", [{**row, "source": "x"} for row in ROWS])
    blank = write(tmp_path / "blank.jsonl", [ROWS[0], {**ROWS[1], "problem": "  "}])
    for path, keys, place, figures in (
        (fine, {"columns": {"question": "probem"}}, "`dataset.columns`", ["'probem'", "problem, solution, level"]),
        (fine, {"columns": {"question": "problem.text"}}, "`dataset.columns`", ["'problem.text'"]),
        (fine, {"columns": ["problem", "x"]}, "`dataset.columns`", ["'x'"]),
        (fine, {"columns": {"level": "problem"}}, "`dataset.columns`", ["`other_level: level`"]),
        (fine, {"prompt_template": "{{ problm }}"}, "`dataset.prompt_template`", ["'problm'"]),
        (fine, {"prompt_template": "{{ level if level }}"}, f"`dataset.prompt_template`: {fine}, line 1", []),
        ([{"pth": "x"}], {}, "`dataset.path.pth`", ["`path`"]),
        ([fine, clash], {}, "clash.jsonl", ["level"]),
        ([fine, sourced], {}, "sourced.jsonl", ["'source'"]),
        (blank, {}, "blank.jsonl, line 2", ["question '  '"]),
    ):
        with refused(place, *figures):
            load(spec(path, **keys))


def test_an_empty_prompt_is_reported_with_its_row(tmp_path: Path) -> None:
    for right, wrong in (("a?", ("", None)), (user("a?"), ([], [{"role": "user"}], user(" ")))):
        for prompt in wrong:
            path = write(tmp_path / "rows.jsonl", [{"prompt": right}, {"prompt": prompt}])
            with refused("", "rows.jsonl", "line 2"):
                loaded(path)
