"""Accuracy of known completions, and how a model's completions are sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest
import torch

from grpo_recipes.evaluation.accuracy import is_right, strict_rewards
from grpo_recipes.evaluation.engines import Transformers
from grpo_recipes.evaluation.settings import Settings
from tests.support import tiny
from tests.support.errors import refused
from tests.support.policies import evaluate_by

TAGS = ("think", "answer")


def judged(folder: Path, completions: list[str], columns: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Evaluate these completions of as many problems, by default with the gold 18, and return the table."""
    rows = {"prompt": [f"p{n}" for n in range(len(completions))], "answer": ["18"] * len(completions)}
    dataset = datasets.Dataset.from_dict({**rows, **(columns or {})})
    evaluate_by(folder, lambda prompts, given: completions, dataset, Settings(**settings), {})
    return pd.read_parquet(folder / "completions.parquet")


def repeated(row: dict[str, Any], count: int) -> dict[str, list[Any]]:
    return {name: [value] * count for name, value in row.items()}


COMPLETIONS = {  # completion: (strict, lenient) against the gold 18
    "<think>9 + 9</think><answer>18</answer>": [True, True],
    "<think>\n9 + 9\n</think>\n<answer>\n18.0\n</answer>": [True, True],
    "<think>9 + 9</think><answer>17</answer>": [False, False],
    "9 + 9 = 18\nThe answer is 18.": [False, True],
    "<think>9 + 9</think><answer>18</answer> So 18.": [False, True],
    "#### 18": [False, True],
    "The answer is 81.": [False, False],
    "<think>18</think>": [False, False],
    "": [False, False],
}


def test_strict_and_lenient_on_known_completions(tmp_path: Path) -> None:
    table = judged(tmp_path / "e", list(COMPLETIONS))
    assert table[["strict", "lenient"]].values.tolist() == list(COMPLETIONS.values())


TAGGED = "<think>9 + 9</think><answer>18</answer>"
ON_LINES = "<think>\n9 + 9\n</think>\n<answer>\n18\n</answer>"
BOXED, HASHES = r"9 + 9 = \boxed{18}", "9 + 9 = 18\n#### 18"
BOXES = {"name": "gsm8k_correctness", "kwargs": {"extract": "boxed"}}
TO_THE_CHARACTER = {"name": "gsm8k_correctness", "kwargs": {"pay_exact": 1.0, "pay_equal": 0.0}}

STRICT = [  # rewards of a recipe; strictly right completions; others
    ([BOXES], [BOXED, rf"<think>x</think>{BOXED}"], [TAGGED, HASHES, r"\boxed{17}"]),
    (["math_correctness"], [TAGGED, BOXED, HASHES], ["<answer>17</answer>"]),
    (["gsm8k_correctness"], [TAGGED, "<answer>18</answer>", "<answer>18.0</answer> Done."], [BOXED]),
    ([TO_THE_CHARACTER], ["<answer>18</answer>"], ["<answer>18.0</answer>"]),
    (["gsm8k_correctness", "well_formed"], [TAGGED, ON_LINES], ["<answer>18</answer>", f"{TAGGED} Done."]),
    (["gsm8k_correctness", "tag_structure"], [ON_LINES], [TAGGED]),
    (["gsm8k_correctness", "tag_count"], [TAGGED], [f"{TAGGED} {TAGGED}"]),
    ([{"name": "sum", "rewards": [BOXES, "tag_count"]}], [TAGGED + BOXED], [BOXED, TAGGED]),
    ([{"name": "gate", "reward": BOXES, "only_if": "tag_count"}], [TAGGED + BOXED], [BOXED, TAGGED]),
    (["my_pkg.correct", "group_length"], [TAGGED], [BOXED, f"{TAGGED} Done."]),
    ([{"name": name, "kwargs": {"prefilled": "think"}} for name in ("gsm8k_correctness", "well_formed")],
     ["9 + 9</think><answer>18</answer>"], [TAGGED, "<answer>18</answer>"]),
    (["trl.rewards.accuracy_reward", "trl.rewards.think_format_reward"], [f"<think>x</think>{BOXED}"], [BOXED]),
    ([{"name": "gsm8k_correctness", "kwargs": {"tags": ["r", "a"]}}], ["<a>18</a>"], [TAGGED]),
]  # fmt: skip


def test_strict_accuracy_requires_what_the_recipe_requires() -> None:
    for rewards, right, wrong in STRICT:
        completions = [*right, *wrong]
        found = is_right(strict_rewards(rewards, TAGS), completions, {"answer": ["18"] * len(completions)})
        assert found == [True] * len(right) + [False] * len(wrong), rewards


CITIES = {"choices": ["Rome", "Paris"], "answer": "B"}
AGE = {"schema": '{"required": ["age"], "properties": {"age": {"type": "integer"}}}'}
QUIET = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
TESTS = {"tests": ["assert x == 1", "assert x < 3"]}
DECLARED = [  # rewards of a recipe; columns of a row; strictly right completions; others
    (["choice_correctness"], CITIES, ["The answer is B.", "<answer>Paris</answer>"], ["A", "A or B", ""]),
    (["choice_correctness", "well_formed"], CITIES, ["<think>a</think><answer>B</answer>"], ["B"]),
    ([{"name": "choice_correctness", "kwargs": {"pay_wrong": -1, "gold_column": "key"}, "alias": "c"}],
     {**CITIES, "key": "A"}, ["A"], ["B"]),
    (["choice_correctness"], {**CITIES, "answer": 1}, ["B"], ["A"]),
    (["string_match"], {"answer": "the Danube"}, ["<answer>danube</answer>"], ["danube", "<answer>Rhine</answer>"]),
    ([{"name": "string_match", "kwargs": {"match": "f1"}}], {"answer": "red cat"}, ["<answer>Red cat.</answer>"],
     ["<answer>red cats</answer>", "<answer>the red big cat</answer>"]),
    ([{"name": "json_schema", "kwargs": {"pay": 3}}], AGE, ['{"age": 3}'], ['{"age": "3"}', "{}", "3"]),
    (["instructions", "repetition"], QUIET, ['"a"'], ['"a, b"', "a"]),
    pytest.param(["unit_tests"], TESTS, ["```python\nx = 1\n```", "```\nx = 1.0\n```"],
                 ["x = 1", "```python\nx = 2\n```"], marks=pytest.mark.slow),
    ([{"name": "gate", "reward": "choice_correctness", "only_if": "tag_count"}], CITIES,
     ["<think>a</think><answer>B</answer>"], ["B", "<think>a</think><answer>A</answer>"]),
]  # fmt: skip


@pytest.mark.parametrize(("rewards", "row", "right", "wrong"), DECLARED)
def test_strict_accuracy_uses_the_kind_that_a_reward_declares(
    rewards: list[Any], row: dict[str, Any], right: list[str], wrong: list[str], tmp_path: Path
) -> None:
    strict = strict_rewards(rewards, TAGS)
    assert "GSM8KCorrectness" not in {type(reward).__name__ for reward in strict}
    table = judged(tmp_path / "e", [*right, *wrong], repeated(row, len(right) + len(wrong)), strict=strict)
    assert table["strict"].tolist() == [True] * len(right) + [False] * len(wrong)
    assert (table["lenient"] | ~table["strict"]).all()


def test_every_accepted_gold_is_right(tmp_path: Path) -> None:
    completions = [TAGGED, "The answer is eighteen.", "<think>x</think><answer>eighteen</answer>", "17"]
    table = judged(tmp_path / "e", completions, {"answer": [["18", "eighteen"]] * 4})
    assert table[["strict", "lenient"]].values.tolist() == [[True, True], [False, True], [True, True], [False, False]]
    assert table["gold"].tolist() == ["18 or eighteen"] * 4


def test_the_stated_answer_is_where_the_recipes_reward_looks(tmp_path: Path) -> None:
    choice, number = ["It's Paris.", "The answer is (a)"], [r"<answer>17</answer>, no: \boxed{18}"]
    for place, (reward, completions, row, stated) in enumerate(
        [
            ("choice_correctness", choice, CITIES, ["B", "A"]),
            (BOXES, number, {}, ["18"]),
            ("gsm8k_correctness", number, {}, ["17"]),
        ]
    ):
        strict = strict_rewards([reward], TAGS)
        table = judged(tmp_path / str(place), completions, repeated(row, len(completions)), strict=strict)
        assert table["answer"].tolist() == stated
        assert table["lenient"].tolist() == [answer in ("B", "18") for answer in stated]


def test_a_row_that_cannot_be_scored_is_named(tmp_path: Path) -> None:
    columns = {"answer": ["B", "C"], "choices": [CITIES["choices"]] * 2}
    with refused("row 2", "`choice_correctness`"):
        judged(tmp_path / "e", ["", ""], columns, strict=strict_rewards(["choice_correctness"], TAGS))
    with refused("row 2", "answer_tag"):
        judged(tmp_path / "e", ["", ""], {"answer": ["18", "the first of the 2 said 17 and the other 18"]})
    with refused("rows"):
        judged(tmp_path / "e", [])
    assert not (tmp_path / "e").exists()


def test_amounts_names_and_order_of_rewards_do_not_matter() -> None:
    one = strict_rewards(["gsm8k_correctness", "well_formed"], TAGS)
    renamed = {"name": "gsm8k_correctness", "alias": "right", "weight": 3, "kwargs": {"pay_exact": 1, "pay_equal": 1}}
    for same in ([{"name": "well_formed", "kwargs": {"pay": 5}}, renamed], []):
        assert strict_rewards(same, TAGS) == one
    assert one == Settings().strict
    assert strict_rewards([BOXES], TAGS) != strict_rewards(["gsm8k_correctness"], TAGS)
    overridden = strict_rewards([BOXES, "well_formed"], ("r", "a"), override_tags=True)
    assert {reward.tags for reward in overridden} == {("r", "a")}


# ---- a real model


@pytest.fixture(scope="module")
def engine() -> Transformers:
    """Return the engine of a policy that is published with decoding settings which are not the policy's."""
    model = tiny.policy()
    model.generation_config.update(top_k=1, top_p=0.5, repetition_penalty=1.5, temperature=0.1, do_sample=True)
    return Transformers(model, tiny.byte_tokenizer())


def test_a_seed_reproduces_the_samples_and_leaves_the_global_state_alone(engine: Transformers) -> None:
    def sampled(seed: int) -> list[str]:
        return engine(["one", "three"] * 8, Settings(temperature=1.0, max_new_tokens=6, seed=seed))

    state = torch.get_rng_state()
    first = sampled(3)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert sampled(3) == first != sampled(4)
    assert len(set(first[::2])) > 1, "the published top_k 1 would repeat one completion"


def test_temperature_zero_is_greedy(engine: Transformers) -> None:
    (completion,) = engine(["three"], Settings(temperature=0.0, max_new_tokens=6))
    ids = engine.tokenizer(["three"], return_tensors="pt")["input_ids"]
    for _ in range(6):
        ids = torch.cat([ids, engine.model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert completion == engine.tokenizer.decode(ids[0, len("three") :])


@pytest.mark.parametrize(("declared", "expected"), [(None, [1]), (1, [1]), (7, [1, 7]), ([9, 7], [1, 7, 9])])
def test_a_completion_ends_at_the_end_tokens_of_training(declared: Any, expected: list[int]) -> None:
    model = tiny.policy()
    model.generation_config.eos_token_id = declared
    assert Transformers(model, tiny.byte_tokenizer()).sampling(Settings())["eos_token_id"] == expected
