"""The key `dataset`: valid values, the rows that result, and the messages for mistakes."""

import json
import re

import datasets
import huggingface_hub
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_recipes.data.arithmetic import made_problems
from grpo_recipes.data.load import check_disjoint, load, load_prompts
from grpo_recipes.data.sources import DatasetUnreachable
from grpo_recipes.recipe.dataset import DatasetSpec
from tests.support.errors import refused
from tests.support.rows import user, write

ROWS = [{"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in range(20)]


@pytest.fixture
def jsonl(tmp_path):
    return write(tmp_path / "rows.jsonl", ROWS)


def questions(dataset):
    return [prompt[-1]["content"] for prompt in dataset["prompt"]]


# Prompts, derived by hand from the source documents


def test_the_text_prompt_equals_that_of_grpo_from_scratch(tmp_path):
    path = write(tmp_path / "one.jsonl", [{"question": " How many? ", "answer": "So 1+1=2\n#### 2"}])
    row = load(DatasetSpec("gsm8k", path=path, system_prompt="reasoning", prompt_format="text"))[0]
    system = "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>"
    assert row == {"prompt": f"{system}\nHow many?", "answer": "2"}


def test_the_messages_equal_those_of_full_vocabulary_kl_and_minimind(jsonl):
    think = (
        "Solve the math problem step-by-step, providing reasoning in <think> tags and the final answer in <answer> "
        "tags."
    )
    for name, system in (("think", think), ("minimind", "你是 MiniMind，是一个有用的人工智能助手。")):
        row = load(DatasetSpec("gsm8k", path=jsonl, system_prompt=name, split="train[3:4]"))[0]
        assert row == {"prompt": [{"role": "system", "content": system}, *user("What is 3 + 3?")], "answer": "6"}


# Sources


@pytest.mark.slow
def test_gsm8k_has_its_published_rows(gsm8k_dir):
    dataset = load(DatasetSpec("gsm8k", path=str(gsm8k_dir / "train.jsonl")))
    assert dataset.num_rows == 7473
    assert dataset.column_names == ["prompt", "answer"]
    assert all(re.fullmatch(r"-?[\d,]+", answer) for answer in dataset["answer"])
    assert sum("," in answer for answer in dataset["answer"]) == 79


def test_a_file_is_sliced_under_any_name_and_slices_are_concatenated(jsonl):
    for split, rows in (
        ("train[:25%]", ROWS[:5]),
        ("anything[0:5]", ROWS[:5]),
        ("train[:2]+test[-1:]", [*ROWS[:2], ROWS[19]]),
    ):
        dataset = load(DatasetSpec("gsm8k", path=jsonl, split=split))
        assert questions(dataset) == [row["question"] for row in rows]


def test_a_folder_with_splits_is_read_by_split_and_one_table_under_any(tmp_path):
    saved = datasets.DatasetDict(
        train=datasets.Dataset.from_list(ROWS[:15]), test=datasets.Dataset.from_list(ROWS[15:])
    )
    saved.save_to_disk(str(tmp_path / "saved"))
    spec = DatasetSpec("gsm8k", path=str(tmp_path / "saved"), split="train[10:]", eval_split="test")
    assert questions(load(spec)) == [row["question"] for row in ROWS[10:15]]
    assert questions(load(spec, evaluation=True)) == [row["question"] for row in ROWS[15:]]
    one = write(tmp_path / "one", ROWS)
    assert load(DatasetSpec("gsm8k", path=one, split="other")).num_rows == 20


def test_a_damaged_saved_folder_is_named(tmp_path):
    for number, (file, content) in enumerate(
        (("state.json", "{"), ("dataset_info.json", '{"features": {"q": 3}}'), ("data-00000-of-00001.arrow", ""))
    ):
        saved = write(tmp_path / f"saved-{number}", ROWS)
        (tmp_path / f"saved-{number}" / file).write_text(content)
        with refused(f"`dataset.path`: {saved}"):
            load(DatasetSpec("gsm8k", path=saved))


def test_a_hub_id_is_read_with_its_configuration_and_split(monkeypatch, silent_hub):
    calls = []

    def load_dataset(path, config, *, split):
        calls.append((path, config, split))
        return datasets.Dataset.from_list([{"problem": "1?", "solution": r"\boxed{1}", **ROWS[0]}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for keys, expected in (
        ({}, ("openai/gsm8k", "main", "train")),
        ({"config": "socratic", "split": "test"}, ("openai/gsm8k", "socratic", "test")),
        ({"path": "someone/problems"}, ("someone/problems", None, "train")),
        ({"path": "someone/own", "config": "hard", "split": "test[:1%]"}, ("someone/own", "hard", "test[:1%]")),
    ):
        assert load(DatasetSpec("gsm8k", **keys)).num_rows == 1
        assert calls.pop() == expected
    spec = DatasetSpec("math", eval_split="test[:9]")
    assert load_prompts(spec).places([0])[0].table == "DigitalLearningGmbH/MATH-lighteval, train"
    assert load(spec, evaluation=True).num_rows == 1
    assert calls == [("DigitalLearningGmbH/MATH-lighteval", None, split) for split in ("train", "test[:9]")]


def test_an_unreachable_hub_is_reported_without_retries(silent_hub, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    downloads = []  # each download would be retried for half a minute
    monkeypatch.setattr(huggingface_hub.HfApi, "hf_hub_download", lambda *args, **kwargs: downloads.append(kwargs))
    offline_before = datasets.config.HF_HUB_OFFLINE
    with refused("`dataset.path`", "openai/gsm8k", by=DatasetUnreachable):
        load(DatasetSpec("gsm8k"))
    assert not downloads
    assert offline_before == datasets.config.HF_HUB_OFFLINE


def test_a_number_of_more_than_64_bits_is_refused(tmp_path):
    rows = [{**ROWS[0], "level": 3}, {**ROWS[1], "level": 2**80}]
    with refused(f"`dataset`: {tmp_path}/rows.jsonl, line 2", "'level'", 2**80):
        load(DatasetSpec("gsm8k", path=write(tmp_path / "rows.jsonl", rows)))


# Held-out rows


def test_another_file_or_a_disjoint_slice_can_be_held_out(jsonl, tmp_path):
    held_out = write(tmp_path / "held_out.jsonl", ROWS[:3])
    assert load(DatasetSpec("gsm8k", path=jsonl, eval_path=held_out), evaluation=True).num_rows == 3
    spec = DatasetSpec("gsm8k", path=jsonl, split="train[:90%]", eval_split="train[90%:]")
    assert load(spec, evaluation=True).num_rows == 2


@pytest.mark.parametrize(("split", "eval_split"), [("train", "test"), ("train[:90%]", "test[:10%]")])
def test_rows_of_one_file_are_not_both_trained_and_evaluated_on(jsonl, split, eval_split):
    with refused("`dataset.eval_split`"):
        load(DatasetSpec("gsm8k", path=jsonl, split=split, eval_split=eval_split), evaluation=True)


def test_the_key_of_equal_rows_on_both_sides_is_named(jsonl, tmp_path):
    saved = datasets.DatasetDict(
        train=datasets.Dataset.from_list(ROWS[:15]), test=datasets.Dataset.from_list([*ROWS[15:], *ROWS[3:5]])
    )
    saved.save_to_disk(str(tmp_path / "saved"))
    first = f"{tmp_path}/saved, test, row 6"
    for keys, key, place in (
        ({"path": str(tmp_path / "saved"), "eval_split": "test"}, "eval_split", first),
        ({"path": jsonl, "eval_path": str(tmp_path / "saved"), "eval_split": "test[5:]"}, "eval_path", first),
    ):
        spec = DatasetSpec("gsm8k", **keys)
        held_out = load_prompts(spec, evaluation=True)
        with refused(f"`dataset.{key}`", f"2 of {len(held_out.dataset)}", place):
            check_disjoint(load_prompts(spec), held_out, spec)
    disjoint = DatasetSpec("gsm8k", path=str(tmp_path / "saved"), eval_split="test[:5]")
    check_disjoint(load_prompts(disjoint), load_prompts(disjoint, evaluation=True), disjoint)


def test_either_side_may_be_a_mixture(jsonl, tmp_path):
    parts = [write(tmp_path / f"{n}.jsonl", [{"question": f"part {n}?", "answer": "1"}]) for n in range(2)]
    spec = DatasetSpec("gsm8k", path=jsonl, eval_path=parts)
    assert load(spec).column_names == ["prompt", "answer"]
    assert load(spec, evaluation=True)["source"][:] == parts
    spec = DatasetSpec("gsm8k", path=parts, eval_path=jsonl)
    assert load(spec)["source"][:] == parts
    assert load(spec, evaluation=True).column_names == ["prompt", "answer"]


@pytest.mark.parametrize(
    ("keys", "evaluation", "key", "figures"),
    [
        ({"split": "train[5:5]"}, False, "split", ["'train[5:5]'", "{path}"]),
        ({"split": "train[:9]", "eval_split": "test[9:9]"}, True, "eval_split", ["'test[9:9]'", "{path}"]),
        ({"eval_path": "{empty}"}, True, "split", ["'train'", "{empty}"]),
        ({"eval_share": 1e-9}, True, "eval_share", ["1e-09", "{path}"]),
        ({"path": "{empty}", "eval_share": 0.5}, False, "eval_share", ["0.5", "{empty}"]),
        ({"path": [{"path": "{path}", "split": "train[:0]"}, "{empty}"]}, False, "split", ["'train[:0]'", "{empty}"]),
    ],
)
def test_a_side_without_rows_is_named(jsonl, tmp_path, keys, evaluation, key, figures):
    empty = write(tmp_path / "empty.jsonl", [])
    keys, figures = json.loads(json.dumps([keys, figures]).replace("{empty}", empty).replace("{path}", jsonl))
    with refused(f"`dataset.{key}`", *figures):
        load(DatasetSpec(**{"name": "gsm8k", "path": jsonl, **keys}), evaluation=evaluation)


def test_evaluation_needs_held_out_rows(jsonl, tmp_path):
    for keys, key in (({}, "eval_split"), ({"eval_split": ""}, "eval_split"), ({"eval_path": "no.jsonl"}, "eval_path")):
        with refused(f"`dataset.{key}`", keys.get("eval_path", "")):
            load(DatasetSpec("gsm8k", path=jsonl, **keys), evaluation=True)


# Bad input


def test_an_invalid_line_is_reported_with_file_and_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    for line, figure in (
        ('{"question": "q"}', "answer None"),
        ('{"problem": "q", "answer": "1"}', "question None"),
        ('{"question": " ", "answer": "1"}', "question ' '"),
        ('{"question": "q", "answer": "so\\n#### "}', "answer"),
    ):
        path.write_text(json.dumps(ROWS[0]) + "\n\n" + line + "\n", encoding="utf-8")
        with refused("rows.jsonl, line 3", figure):
            load(DatasetSpec("gsm8k", path=str(path)))


# Arithmetic


@given(
    train=st.tuples(st.integers(1, 400), st.integers(-5, 10_000)),
    test=st.tuples(st.integers(1, 400), st.integers(-5, 10_000)),
)
@settings(max_examples=8, deadline=None)
def test_no_question_is_both_trained_and_tested_on(train, test):
    trained = {problem["question"] for problem in made_problems("arithmetic", "train", *train)}
    tested = {problem["question"] for problem in made_problems("arithmetic", "test", *test)}
    assert len(trained) == train[0]
    assert len(tested) == test[0]
    assert not trained & tested


def test_a_larger_size_extends_the_problems_of_a_seed():
    assert made_problems("arithmetic", "train", 50, seed=1) == made_problems("arithmetic", "train", 80, seed=1)[:50]
    assert made_problems("arithmetic", "train", 50, seed=1) != made_problems("arithmetic", "train", 50, seed=2)


@given(st.integers(0, 1_000))
@settings(max_examples=4, deadline=None)
def test_worked_steps_are_correct_and_use_the_numbers_of_the_question(seed):
    for problem in made_problems("arithmetic", "test", 50, seed):
        *steps, last = problem["answer"].split("\n")
        carried = []
        for step in steps:
            left, result = step.split("=")
            assert eval(left, {"__builtins__": {}}) == int(result) >= 0  # our own text, three tokens of arithmetic
            carried.append(int(result))
        assert last == f"#### {carried[-1]}"
        numbers = sorted(map(int, re.findall(r"\d+", problem["question"])))
        used = [int(n) for step in steps for n in re.findall(r"\d+", step.split("=")[0])]
        for result in carried[:-1]:
            used.remove(result)
        assert sorted(used) == numbers


def test_the_preset_arithmetic_gives_the_generated_problems():
    keys = {"size": 9, "seed": 1, "split": "train[2:4]+test[:3]+train[8:]", "eval_split": "test[:50%]"}
    spec = DatasetSpec("arithmetic", **keys, system_prompt="none")
    train, test = (made_problems("arithmetic", split, 9, 1) for split in ("train", "test"))
    assert questions(load(spec)) == [row["question"] for row in (*train[2:4], *test[:3], *train[8:])]
    assert questions(load(spec, evaluation=True)) == [row["question"] for row in test[:4]]
    assert str(load_prompts(spec).places([5])[0]) == "arithmetic, row 6"
    assert load(DatasetSpec("arithmetic", split="train[1995:]")).num_rows == 5  # there are 2,000 by default


def test_an_unknown_split_of_arithmetic_is_refused():
    with refused("`dataset.split`", "'validation'", "train", "test"):
        load(DatasetSpec("arithmetic", split="validation"))
