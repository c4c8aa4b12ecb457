"""Rows that this project makes or reads by a preset: single values, and the problems of each seed."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest

from grpo_recipes.data import presets, tables
from grpo_recipes.data.arithmetic import made_problems
from grpo_recipes.data.load import check_responses, load
from grpo_recipes.data.sources import Keys, rows_in_common
from grpo_recipes.recipe.dataset import MADE_PROBLEMS, DatasetSpec
from grpo_recipes.recipe.specs import OfflineSpec
from grpo_rewards.choices import read_choices
from tests.support.errors import refused
from tests.support.rows import loaded, write


@pytest.mark.parametrize(
    ("name", "digest", "first"),
    [
        ("arithmetic", "c292", "Maya had 7 cards and gave away 5. How many cards are left?"),
        ("products", "9d96", "A hall has 865 rows of 923 seats. How many seats are in the hall?"),
        ("secret_number", "9454", "I am thinking of a whole number from 443 to 480. Find it."),
    ],
)
def test_a_seed_stands_for_the_same_problems_in_every_version(name: str, digest: str, first: str) -> None:
    """A record names its seed, and a later version must train and evaluate on the same rows."""
    problems = made_problems(name, "train", 600, 7)
    assert problems[0]["question"] == first
    assert hashlib.sha256(repr(problems).encode()).hexdigest()[:4] == digest


def test_a_size_is_refused_above_twenty_thousand() -> None:
    for name in MADE_PROBLEMS:
        with refused("`dataset.size`", 20001, 20000, f"`{name}`"):
            made_problems(name, "test", 20_001)


def test_a_product_is_of_three_digits_and_its_answer_is_worked_out() -> None:
    kinds: Counter[int] = Counter()
    for problem in made_problems("products", "train", 300):
        numbers = [int(number) for number in re.findall(r"\d+", problem["question"])]
        worked, _, result = problem["answer"].partition("\n#### ")
        product = numbers[0] * numbers[1] + sum(numbers[2:])
        assert worked == "+".join(["*".join(map(str, numbers[:2])), *map(str, numbers[2:])]) + f"={product}"
        assert result == str(product)
        assert all(101 <= number <= 999 for number in numbers[:2])
        assert all(10 <= number <= 99 for number in numbers[2:])
        kinds[len(numbers)] += 1
    assert kinds.keys() == {2, 3}


def test_a_secret_number_lies_in_its_range() -> None:
    for problem in made_problems("secret_number", "test", 300):
        low, high = map(int, re.findall(r"\d+", problem["question"]))
        assert low >= 1
        assert 20 <= high - low <= 99
        assert low <= int(problem["answer"].removeprefix("#### ")) <= high


def test_a_turn_may_be_written_as_in_sharegpt() -> None:
    for turn, expected in (
        ({"role": "user", "content": "a", "from": "gpt", "value": "b"}, ("user", "a")),
        ({"role": None, "from": "human", "value": "a"}, ("user", "a")),
        ({"from": "gpt", "value": "a"}, ("assistant", "a")),
        ({"from": "model", "value": "a"}, ("assistant", "a")),
        ({"from": "system", "value": "a"}, ("system", "a")),
        ({"from": 3, "value": "a"}, (None, None)),
        ("text", (None, None)),
    ):
        assert presets.role_and_content(turn) == expected


def test_a_message_has_one_of_three_roles_and_text() -> None:
    for role in ("system", "user", "assistant"):
        assert presets.message({"role": role, "content": "a", "name": "b"}, "x") == {"role": role, "content": "a"}
    for turn in ({"role": "tool", "content": "a"}, {"role": "user", "content": None}, "user"):
        with refused("`dataset`", "line 3"):
            presets.message(turn, "line 3")


def test_choices_are_read_from_text() -> None:
    for written, choices in (
        (" ['a', \"b\"]", ["a", "b"]),
        (r'["1\/2", "1"]', ["1/2", "1"]),  # JSON, which Python reads otherwise
        ('{"text": ["a"], "label": ["A"]}', {"text": ["a"], "label": ["A"]}),
        ("a | b|c", ["a", "b", "c"]),
        ("[a|b]", ["[a", "b]"]),
        ("a || b", None),
        ("'a', 'b'", None),
        ("['a' 'b']", None),
        (["a"], ["a"]),
        (None, None),
    ):
        assert presets.choices_of(written) == choices


def test_the_right_choice_is_a_label_a_position_or_a_text() -> None:
    for answer, labels, texts, expected in (
        (1, "AB", ["x", "y"], "B"),  # a position from 0
        (1, "12", ["x", "y"], "1"),  # a label
        ("1", "12", ["2", "1"], "1"),  # a label before a text
        ("7", "12", ["5", "7"], "2"),  # no label, and so a text
        ("y", "AB", ["x", "y"], "B"),
        (2, "AB", ["x", "y"], None),
    ):
        choices = read_choices({"text": texts, "label": list(labels)})
        assert choices is not None
        assert presets.gold_label(answer, choices) == expected


def test_nulls_of_missing_keys_are_not_in_an_object() -> None:
    assert presets.gold_object({"a": None, "b": [{"c": None, "d": 0}, None], "e": {"f": None}}) == {
        "b": [{"d": 0}, None],
        "e": {},
    }
    assert presets.gold_object('{"a": 1}') == {"a": 1}
    for value in ("[1]", "", None, 3, {1: object()}):
        assert presets.gold_object(value) is None


def read(name: Any, **row: Any) -> tuple[Any, dict[str, Any]]:
    return presets.PRESETS[name].read(row, "line 3")


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("#### 1 #### 4 ", "4"), ("five", "five"), (5, "5"), (1.5, 1.5), (2.0, 2.0), (["1", 2, 2.5], ["1", "2", 2.5])],
)
def test_the_gold_of_a_worked_answer_is_its_end(answer: Any, gold: Any) -> None:
    turns, made = read("gsm8k", question=" 1+1? ", answer=answer)
    assert turns == [{"role": "user", "content": "1+1?"}]
    assert made == {"answer": gold}
    assert type(made["answer"]) is type(gold)


def test_an_answer_without_a_gold_is_named() -> None:
    missing, wrong = ("", [], None, math.nan), (True, math.inf, ["1", ""])
    for answer in (*missing, *wrong):
        with refused("`dataset`: line 3", f"answer {answer!r}") as caught:
            read("gsm8k", question="1+1?", answer=answer)
        assert ("`dataset.drop_missing: true`" in caught.value.fix) is (answer in missing)


def test_a_boxed_answer_is_the_content_of_its_last_box() -> None:
    assert read("math", question="q", answer=r"\boxed{1} or \boxed{\frac{1}{2}}.")[1] == {"answer": r"\frac{1}{2}"}
    assert read("math", question="q", answer="7")[1] == {"answer": "7"}


USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": " a "}


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ([USER, ASSISTANT], ([USER], {"answer": "a"})),
        ([USER], ([USER], {"answer": ""})),
        ([USER, {"role": "assistant", "content": "空"}], ([USER], {"answer": ""})),
        ([USER, ASSISTANT, USER, ASSISTANT], ([USER, ASSISTANT, USER], {"answer": "a"})),
    ],
)
def test_the_last_turn_of_the_assistant_is_left_to_the_policy(turns: Any, expected: Any) -> None:
    assert read("rlaif", conversations=turns) == expected


def test_a_conversation_without_a_question_is_named() -> None:
    for turns in ([], "text", [ASSISTANT], [USER, ASSISTANT, ASSISTANT], [{**USER, "content": " "}, ASSISTANT]):
        with refused("`dataset`: line 3"):
            read("rlaif", conversations=turns)


def rows(folder: Path, text: str, **keys: Any) -> DatasetSpec:
    (folder / "rows.csv").write_text(text)
    return DatasetSpec.parse({"path": str(folder / "rows.csv"), **keys})


def test_a_template_may_name_no_column(tmp_path: Path) -> None:
    """An environment poses the task, and each row is one try."""
    table = load(rows(tmp_path, "level\n1\n2\n", prompt_template="Play."))
    assert table.to_list() == [{"prompt": [{"role": "user", "content": "Play."}], "level": level} for level in (1, 2)]


def test_dropped_rows_are_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank counts them. A table without gaps has nothing to count."""
    gaps, complete = "question,answer\na,1\n,2\nc,\n", "question,answer\na,1\nb,2\n"
    with caplog.at_level(logging.INFO, "grpo_recipes.data.prompts"):
        for rank, text in (("1", gaps), ("0", complete), ("0", gaps)):
            monkeypatch.setenv("RANK", rank)
            load(rows(tmp_path, text, drop_missing=True))
    (message,) = caplog.messages
    assert "2 of 3 rows" in message


def test_a_table_is_stored_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "a" / "cache"))
    folder = tmp_path / "a" / "cache" / "grpo_recipes"

    def batches(good: int, error: Exception | None) -> Iterator[pa.Table]:
        for number in range(good):
            yield pa.table({"a": [number]})
        if error is not None:
            raise error

    with pytest.raises(KeyError):
        tables.stored("one", lambda: batches(2, KeyError()))
    assert [path.name for path in folder.iterdir() if path.suffix != ".lock"] == []
    assert tables.stored("one", lambda: batches(3, None))["a"][:] == [0, 1, 2]
    assert tables.stored("one", lambda: batches(9, None))["a"][:] == [0, 1, 2], "it is not written again"
    assert len(tables.stored("none", lambda: batches(0, None))) == 0
    assert sorted(path.name for path in folder.iterdir() if path.suffix != ".lock") == ["none.arrow", "one.arrow"]


def test_a_cache_that_can_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    with refused(f"`dataset`: {tmp_path}/file/grpo_recipes", "Not a directory", "HF_DATASETS_CACHE"):
        load(rows(tmp_path, "question\na\n"))


def test_rows_of_a_table_without_splits_have_any_split() -> None:
    keys = Keys("path", "split")
    for split, count in (("train", 4), ("train[:2]+test[2:]", 4), ("train[:50%]", 2), ("train[1:3]", 2)):
        for splits in ([split], [split, "other"]):
            assert rows_in_common(4, splits, keys) == count
    assert rows_in_common(4, ["train[:2]", "test[2:]"], keys) == 0
    assert rows_in_common(4, ["train[:3]", "test[2:]"], keys) == 1


def test_one_prompt_of_recorded_responses_is_one_row(tmp_path: Path) -> None:
    lines = [
        {"prompt": "p", "responses": ["a"], "rewards": [1], "logprobs": [[-1.0]]},
        {"prompt": "q", "responses": ["b", "c"], "rewards": [0.5, 2], "logprobs": [[-2.0], [0.0, -3.0]]},
        {"prompt": "p", "responses": ["d"], "rewards": [-1], "logprobs": [[]]},
    ]
    table = recorded(tmp_path, lines)
    assert table.to_list() == [
        {"prompt": "p", "responses": ["a", "d"], "rewards": [1.0, -1.0], "logprobs": [[-1.0], []]},
        {"prompt": "q", "responses": ["b", "c"], "rewards": [0.5, 2.0], "logprobs": [[-2.0], [0.0, -3.0]]},
    ]
    assert "logprobs" not in recorded(tmp_path, [{"prompt": "p", "response": "a", "reward": 1}]).column_names


def recorded(folder: Path, lines: list[dict[str, Any]], **keys: Any) -> datasets.Dataset:
    """Return the prompts of a table of recorded responses."""
    return loaded(write(folder / "rows.jsonl", lines), name="scored", **keys)


@pytest.mark.parametrize(
    ("line", "figure"),
    [
        ({"prompt": "p", "response": "a", "responses": ["a"], "reward": 1}, "responses"),
        ({"prompt": "p", "reward": 1}, "responses"),
        ({"prompt": "p", "responses": ["a", "b"], "rewards": [1]}, "2 responses, 1 rewards"),
        ({"prompt": "p", "responses": [], "rewards": []}, "0 responses"),
        ({"prompt": "p", "responses": ["a"], "rewards": [1], "logprobs": [[-1.0], [-2.0]]}, "2 logprobs"),
        ({"prompt": "", "response": "a", "reward": 1.0}, "`prompt`"),
        ({"prompt": "p", "responses": [3], "rewards": [1.0]}, "`responses[0]`"),
        ({"prompt": "p", "response": "a", "reward": math.inf}, "`rewards[0]`"),
        ({"prompt": "p", "response": "a", "reward": 1.0, "logprobs": [0.5]}, "`logprobs[0][0]`"),
    ],
)
def test_a_recorded_line_that_can_not_be_is_named(tmp_path: Path, line: dict[str, Any], figure: str) -> None:
    fine = {"prompt": "p", "response": "a", "reward": 1} if "responses[" not in figure else {**line, "responses": [4]}
    with refused(f"`dataset`: {tmp_path}/rows.jsonl, line ", figure):
        recorded(tmp_path, [fine, line])


def test_log_probabilities_are_given_for_all_responses_or_none(tmp_path: Path) -> None:
    line = {"prompt": "p", "response": "a", "reward": 1}
    with refused(f"`dataset`: {tmp_path}/rows.jsonl", "logprobs"):
        recorded(tmp_path, [{**line, "logprobs": [-1.0]}, {**line, "response": "b"}])


def test_recorded_prompts_of_one_file_are_not_both_trained_and_evaluated_on(tmp_path: Path) -> None:
    lines = [{"prompt": prompt, "response": "r", "reward": 1.0} for prompt in "aabbc"]
    keys = {"split": "train[:2]", "eval_split": "train[2:]"}
    assert [recorded(tmp_path, lines, evaluation=side, **keys)["prompt"][:] for side in (False, True)] == [
        ["a", "b"],
        ["c"],
    ]
    for split, shared in (("test", 2), ("train[1:]", 1)):
        with refused("`dataset.eval_split`", f"{shared} rows", f"{tmp_path}/rows.jsonl"):
            recorded(tmp_path, lines, evaluation=True, **{**keys, "eval_split": split})


def test_a_missing_cell_of_a_recorded_line_is_no_value(tmp_path: Path) -> None:
    lines = [
        {"prompt": "p", "response": "a", "reward": 1, "responses": None},
        {"prompt": "q", "responses": ["b"], "rewards": [2], "logprobs": None},
        {"prompt": "r", "response": "", "reward": 0},
    ]
    assert recorded(tmp_path, lines).to_list() == [
        {"prompt": "p", "responses": ["a"], "rewards": [1.0]},
        {"prompt": "q", "responses": ["b"], "rewards": [2.0]},
        {"prompt": "r", "responses": [""], "rewards": [0.0]},
    ]


def test_a_group_needs_enough_recorded_responses(tmp_path: Path) -> None:
    lines = [{"prompt": p, "responses": ["a"] * n, "rewards": [1] * n} for p, n in (("p", 2), ("q", 3))]
    table = recorded(tmp_path, lines)
    check_responses(table, OfflineSpec("group"), 2)
    check_responses(table, OfflineSpec("batch"), 9)
    with refused("", "3", "1", "2"):
        check_responses(table, OfflineSpec("group"), 3)
