"""Rewards of a recipe: columns, golds and weights before the run, and the scores of each call during it."""

import asyncio
import inspect
import itertools
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from grpo_recipes import cli, train
from grpo_recipes.checks import rewards
from grpo_recipes.checks.rewards import (
    GoldCheck,
    check_columns,
    check_golds,
    check_weights,
    checked_reward,
    gold_notes,
    prefilled_notes,
)
from grpo_recipes.data.places import row_numbers
from grpo_recipes.data.tables import sample_of_rows
from grpo_recipes.process.faults import FaultyRow, RewardFault
from grpo_rewards.composed import leaves
from grpo_rewards.registry import build_rewards
from tests.support import launching
from tests.support.errors import refused
from tests.support.rows import write

PROSE = "There are 2 short answers and 17 long ones to a question of this kind."


def golds(*answers: object, **columns: list) -> datasets.Dataset:
    return datasets.Dataset.from_dict({"prompt": ["?"] * len(answers), "answer": list(answers), **columns})


def by_level(completions: list, level: list, **columns: object) -> list[float]:
    """Return the level."""
    return [float(value) for value in level]


def by_difficulty(completions: list, level: list, topic: list, **columns: object) -> list[float]:
    """Return the level, whatever the topic."""
    return [float(value) for value in level]


HERE = "tests.grpo_recipes.checks.test_rewards."


def rows_of(found: GoldCheck) -> list[int]:
    return [place.number for place in found.places]


def unscorable(specs: list[Any], dataset: datasets.Dataset) -> GoldCheck:
    """Return what is found about the golds that no reward can score."""
    found = check_golds(build_rewards(specs), dataset)
    assert found is not None
    return found


def test_rows_without_a_scorable_gold_are_counted_from_1() -> None:
    found = unscorable(["gsm8k_correctness"], golds("18", PROSE, "1,000", "", PROSE))
    assert (found.count, found.total, found.missing, rows_of(found)) == (3, 5, 1, [2, 4, 5])
    figures = ("3 of 5 golds", "gsm8k_correctness", "rows 2, 4, 5", "`dataset.drop_missing: true`")
    assert all(figure in found.describe() for figure in figures)
    assert found.as_dict() == {"count": 3, "total": 5, "rows": ["rows 2, 4, 5"]}
    assert "drop_missing" not in unscorable(["gsm8k_correctness"], golds("18", PROSE)).describe()
    # `drop_missing` looks at the column of the answer alone.
    elsewhere = {"name": "gsm8k_correctness", "kwargs": {"gold_column": "solution"}}
    found = unscorable([elsewhere], golds("1", "2", solution=["1", ""]))
    assert (found.missing, rows_of(found)) == (0, [2])


def test_a_row_with_more_than_64_golds_is_reported_by_every_reward() -> None:
    dataset = datasets.Dataset.from_dict({"prompt": ["q"] * 2, "answer": [["18"] * 64, ["18"] * 65]})
    for reward in ("gsm8k_correctness", "math_correctness", "string_match"):
        found = unscorable([reward], dataset)
        assert rows_of(found) == [2]
        assert "64" in found.describe()


def test_of_many_unscorable_rows_the_first_are_named() -> None:
    found = unscorable(["math_correctness"], golds("18", *[PROSE] * 30))
    assert (found.count, rows_of(found)) == (30, list(range(2, 22)))
    assert "20, 21 and 10 more" in found.describe()


def test_a_gold_that_one_of_two_rewards_can_score_is_scorable() -> None:
    dataset = golds(PROSE, "7", PROSE, solution=["7", PROSE, PROSE])
    second = {"name": "math_correctness", "kwargs": {"gold_column": "solution"}}
    assert rows_of(unscorable(["gsm8k_correctness", second], dataset)) == [3]
    # A sum can't score a row that one of its parts can't score.
    both = {"name": "sum", "rewards": ["gsm8k_correctness", second]}
    assert rows_of(unscorable([both, second], dataset)) == [2, 3]
    with refused("`rewards`", "1", "`answer`"):
        check_golds(build_rewards([both]), dataset.select([2]))


def test_of_a_large_dataset_a_sample_of_the_golds_is_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_recipes.data.tables.SAMPLE", 6)
    chosen = sample_of_rows(9).tolist()
    dataset = golds(*("1" if row != chosen[-1] else PROSE for row in range(9)))
    found = unscorable(["gsm8k_correctness"], dataset)
    assert (found.count, found.total, found.dataset_rows) == (1, 6, 9)
    assert found.places == tuple(row_numbers([chosen[-1]]))
    found = unscorable(["gsm8k_correctness"], dataset.select(chosen))
    assert (found.total, found.dataset_rows, rows_of(found)) == (6, None, [6])
    with refused("`rewards`: gsm8k_correctness", "6 golds", "`answer`", f"'{chosen[0] * 'x'}There "):
        check_golds(build_rewards(["gsm8k_correctness"]), golds(*("x" * row + PROSE for row in range(9))))


def test_golds_that_may_have_a_decimal_comma_are_named() -> None:
    dataset = golds("18", "6.403,64 €", "1.200 €")
    (note,) = gold_notes(build_rewards(["gsm8k_correctness", "tag_count"]), dataset)
    for figure in ("gsm8k_correctness: ", "row 2: `6.403,64 €`", "row 3: `1.200 €`", "`decimal` to comma"):
        assert figure in note
    assert gold_notes(build_rewards([{"name": "gsm8k_correctness", "kwargs": {"decimal": "comma"}}]), dataset) == []
    elsewhere = build_rewards([{"name": "gsm8k_correctness", "kwargs": {"gold_column": "solution"}}])
    assert gold_notes(elsewhere, dataset) == [], "another check reports the column that is missing"


def test_a_dataset_without_a_scorable_gold_is_refused() -> None:
    for spec in (
        "gsm8k_correctness",
        {"name": "math_correctness", "alias": "judge"},
        {"name": "sum", "rewards": ["tag_count", "gsm8k_correctness"]},
        "group_length",
    ):
        rewards = build_rewards([spec, "tag_count"], num_generations=2)
        with refused("", "2", "`answer`"):
            check_golds(rewards, golds(" ", ""))
        assert check_golds(rewards, golds("1", "2")) is None


def test_golds_of_multiple_choice_are_checked_with_their_choices_also_in_a_gate() -> None:
    choice = {"name": "choice_correctness", "kwargs": {"choices_column": "options"}}
    gate = {"name": "gate", "reward": choice, "only_if": "tag_count"}
    dataset = golds("B", "Rome", "Oslo", options=[["Paris", "Rome"]] * 3)
    for spec in (choice, gate):
        assert rows_of(unscorable([spec], dataset)) == [3]
        with refused("", "`options`"):
            check_columns(build_rewards([spec]), ["prompt", "answer"])
    with refused("", "'Oslo'"):
        check_golds(build_rewards([choice]), golds("Oslo", options=[["Paris", "Rome"]]))


def test_rows_with_an_unknown_instruction_are_named() -> None:
    names = [["punctuation:no_comma"], ["punctuation:no_coma"]]
    dataset = golds("", "", instruction_id_list=names, kwargs=[[{}], [{}]])
    assert rows_of(unscorable(["instructions"], dataset)) == [2]
    with refused("", "`instruction_id_list`"):
        check_golds(build_rewards(["instructions"]), dataset.select([1]))
    with refused("", "`kwargs`"):
        check_columns(build_rewards(["instructions"]), ["prompt", "instruction_id_list"])


def test_rows_whose_tests_cannot_be_split_are_named_with_the_possible_forms() -> None:
    found = unscorable(["unit_tests"], golds("", "", tests=[["assert f(1) == 2"], ["assert f(1) == g(1)"]]))
    assert rows_of(found) == [2]
    assert "`assert f(1) == 2`, `def check(candidate)`" in found.describe()


def test_schemas_are_read_from_a_column_unless_one_is_given_for_all_rows() -> None:
    pytest.importorskip("jsonschema")
    pytest.importorskip("re2")
    dataset = golds("", "", schema=["{}", "{"])
    assert rows_of(unscorable(["json_schema"], dataset)) == [2]
    one_for_all = {"name": "json_schema", "kwargs": {"schema": {}}}
    assert check_golds(build_rewards([one_for_all]), dataset) is None
    found = unscorable([one_for_all, "gsm8k_correctness"], golds("1", PROSE, schema=["{}", "{}"]))
    assert found.rewards == ("gsm8k_correctness",), "a reward that reads no column says nothing about the golds"
    assert rows_of(found) == [2]
    check_columns(build_rewards([one_for_all]), ["prompt"])


def test_a_missing_extra_is_named_before_the_policy_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with refused("", "'grpo-rewards[json]'"):
        check_golds(build_rewards(["json_schema"]), golds("", schema=['{"title": "never compiled before"}']))


def test_rewards_that_read_no_gold_are_not_checked() -> None:
    assert check_golds(build_rewards(["tag_count", HERE + "by_level"]), golds(PROSE)) is None


def test_a_judge_is_not_called_before_training_and_needs_the_columns_of_its_template() -> None:
    template = "{prompt} {reference} {completion}"
    nobody = {"base_url": "http://127.0.0.1:9/v1", "model": "m", "template": template}
    rewards = build_rewards([{"name": "sum", "rewards": [{"name": "judge", "kwargs": nobody}]}], num_generations=2)
    assert check_golds(rewards, golds("1", reference=["1"])) is None
    check_columns(rewards, ["prompt", "reference"])
    with refused("", "`reference`"):
        check_columns(rewards, ["prompt", "answer"])


def test_a_missing_column_is_named_with_the_reward_and_the_columns() -> None:
    for spec in (HERE + "by_difficulty", {"name": "sum", "rewards": ["tag_count", HERE + "by_difficulty"]}):
        with refused("", "`topic`"):
            check_columns(build_rewards([spec]), ["prompt", "answer", "level"])
        check_columns(build_rewards([spec]), ["prompt", "answer", "level", "topic"])


def by_rank(completions: list, num_generations: int, **columns: object) -> list[float]:
    """Return the place in the group."""
    return [float(place % num_generations) for place in range(len(completions))]


def test_an_alias_and_bound_arguments_are_respected() -> None:
    check_columns(build_rewards([HERE + "by_rank"], num_generations=4), ["prompt"])
    (built,) = build_rewards([{"name": HERE + "by_level", "alias": "levels"}])
    with refused("", "`level`"):
        check_columns([built], ["prompt", "answer"])
    (leaf,) = leaves([built])
    assert (leaf.name, leaf.unbound.__name__) == ("levels", "by_level")


def all_of_trl(
    prompts: list, completions: list, completion_ids: list, trainer_state: Any, log_extra: Any, log_metric: Any,
    **columns: object,
) -> list[float]:  # fmt: skip
    return []


def one_by_name(completions: list, *, level: list, **columns: object) -> list[float]:
    return []


def one_with_a_default(completions: list, level: object = None, **columns: object) -> list[float]:
    return []


def no_other_columns(prompts: list, completions: list) -> list[float]:
    return []


def wants_prompt(completions: list, prompt: list, **columns: object) -> list[float]:
    return []


def test_the_parameters_of_a_reward_are_read_as_a_call_by_name_fills_them() -> None:
    (built,) = build_rewards(["tag_count"])
    for reward in (all_of_trl, one_with_a_default):
        check_columns([replace(built, function=reward)], ["prompt", "answer"])
    for reward, figure in ((one_by_name, "`level`"), (no_other_columns, "`**columns`"), (wants_prompt, "`prompt`")):
        with refused(f"`rewards`: {reward.__name__}", figure):
            check_columns([replace(built, function=reward, name=reward.__name__)], ["prompt", "answer"])


def test_at_least_one_weight_must_not_be_zero() -> None:
    zero = {"name": "tag_count", "weight": 0}
    check_weights(build_rewards([zero, "gsm8k_correctness"]))
    check_weights(build_rewards([{"name": "tag_count", "weight": -1}]))
    for spec in (
        zero,
        {"name": "sum", "rewards": [zero]},
        {"name": "sum", "weight": 0, "rewards": ["tag_count"]},
        {"name": "gate", "reward": zero, "only_if": "well_formed"},
    ):
        with refused("", "0"):
            check_weights(build_rewards([spec]))


def test_a_run_passes_every_column_to_rewards_and_names_unscorable_golds(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = [{"question": f"{n} + 1?", "answer": str(n + 1), "level": n % 3, "notes": {"page": n}} for n in range(8)]
    table[1]["answer"], table[5]["answer"] = PROSE, "6,50"
    rows, run = write(tmp_path / "rows.jsonl", table), tmp_path / "run"
    recipe = launching.write_recipe(
        *(tmp_path / "mine.yaml", tiny_model, None, run),
        dataset={"name": "gsm8k", "path": rows},
        rewards=["gsm8k_correctness", HERE + "by_level", {"name": "tag_count", "weight": 0}],
        **{"shuffle_dataset": False, "per_device_train_batch_size": 6, "num_generations": 2},
        **{"max_completion_length": 4, "max_steps": 1, "save_strategy": "no", "learning_rate": 0.02},
    )
    assert train.main(["--config", str(recipe)]) == 0
    output = capsys.readouterr().out
    assert "gsm8k_correctness × 1, by_level × 1, tag_count × 0" in output
    assert "`learning_rate` is 0.02" in output
    assert f"({rows}, line 6: `6,50`)" in output
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    assert history[0]["rewards/by_level/mean"] == pytest.approx(1.0)  # the levels of the first three rows: 0, 1, 2
    record = json.loads((run / "run.json").read_text())
    assert record["unscorable_golds"] == {"count": 1, "total": 8, "rows": [f"{rows}, line 2"]}
    cli.main(["diagnose", str(run)])
    assert f"({rows}, line 2)" in " ".join(capsys.readouterr().out.split())


# The scores of a call

TEXTS = ["one", "two", "three"]


def returning(*values: object):
    def judge(prompts: list, completions: list, **columns: object) -> list:
        return list(values)

    return judge


def test_a_score_that_is_no_finite_number_is_reported_with_its_row() -> None:
    numbers = (math.inf, -math.inf, math.nan, torch.tensor(math.inf), 1j, 1e39, -1e39, 10**400)
    rows_of_a_table = (np.ones(1), np.ones(2), torch.ones(2), [1.0])
    for value in (*numbers, *rows_of_a_table, "2", "", []):
        with pytest.raises(RewardFault, match="`judge`") as fault:
            checked_reward(returning(1.0, None, value))(prompts=TEXTS, completions=TEXTS)
        assert fault.value.row == FaultyRow("judge", 2, "three", "three", None)


@pytest.mark.parametrize("completions", [TEXTS, [[{"role": "assistant", "content": text}] for text in TEXTS]])
def test_finite_scores_are_returned_unchanged(completions: list) -> None:
    largest = torch.finfo(torch.float32).max
    for values in ([1, None, torch.tensor(0.5)], [0, largest, -largest]):
        checked = checked_reward(returning(*values))
        assert checked(prompts=TEXTS, completions=completions, answer=TEXTS) == values
    assert checked.__name__ == "judge"


def scored(reward: Callable[..., Any], completions: list, **columns: Any) -> list:
    """Call a checked reward as TRL does, and return the scores."""
    columns |= {"trainer_state": SimpleNamespace(global_step=11), "log_metric": print, "log_extra": print}
    scores = checked_reward(reward)(prompts=completions, completions=completions, **columns)
    return asyncio.run(scores) if inspect.isawaitable(scores) else scores


def number_of(completions: list, answer: list, **columns: Any) -> list[float]:
    assert len(answer) == len(completions), "the columns are cut like the completions"
    return [float(completion) for completion in completions]


async def number_of_async(completions: list, **columns: Any) -> list[float]:
    return number_of(completions, **columns)


def test_a_reward_that_raises_names_step_row_and_completion() -> None:
    completions = ["1", "2", "three", "4", "five"]
    with pytest.raises(RewardFault, match="row 2 .*step 11 ") as fault:
        scored(number_of, completions, answer=TEXTS + TEXTS[:2])
    assert fault.value.row == FaultyRow("number_of", 2, "three", "three", 11)
    with pytest.raises(RewardFault, match="5 completions .*step 11") as fault:
        scored(number_of_async, completions, answer=TEXTS + TEXTS[:2])
    assert fault.value.row is None


def test_the_search_for_the_row_ends_once_a_row_differs_from_another() -> None:
    """Each call may cost a request to a server."""
    calls = []

    def number(completions: list, **columns: Any) -> list[float]:
        calls.append(list(completions))
        return [float(completion) for completion in completions]

    with pytest.raises(RewardFault, match="row 1 "):
        scored(number, ["1", "two", "three", "4"])
    assert calls == [["1", "two", "three", "4"], ["1"], ["two"]]


def test_a_row_is_scored_alone_with_its_own_part_of_each_column() -> None:
    options, seen = ["a", "b", "c", "d"], []

    def judge(prompts: list, completions: list, **columns: Any) -> list[float]:
        seen.append({"prompts": prompts, "completions": completions, **columns})
        raise ValueError("no")

    with pytest.raises(RewardFault):
        checked_reward(judge)(prompts=["p", "q", "r"], completions=TEXTS, level=[1, 2, 3], options=options, word="abc")
    assert seen[1:] == [
        {"prompts": [prompt], "completions": [text], "level": [level], "options": options, "word": "abc"}
        for prompt, text, level in zip("pqr", TEXTS, (1, 2, 3), strict=True)
    ]


def test_a_fault_of_a_conversation_holds_its_last_message_and_no_step_outside_of_a_training() -> None:
    turns = [{"role": role, "content": f"the {role}"} for role in ("system", "assistant", "user")]
    with pytest.raises(RewardFault) as fault:
        checked_reward(returning(1.0, math.nan))(prompts=[turns] * 2, completions=["one", "two"])
    assert fault.value.row == FaultyRow("judge", 1, "the user", "two", None)
    first = SimpleNamespace(global_step=0)
    with pytest.raises(RewardFault, match="step 0"):
        checked_reward(returning(math.nan))(prompts=["one"], completions=["one"], trainer_state=first)


def test_an_error_of_every_row_accuses_no_completion() -> None:
    """A server that is down fails for the first row too, which is not the cause. A single completion may be it."""

    def judge(completions: list, **columns: Any) -> list[float]:
        raise ConnectionError("no server")

    for count, row in ((1, FaultyRow("judge", 0, "one", "one", 11)), (2, None), (3, None)):
        with pytest.raises(RewardFault) as fault:
            scored(judge, TEXTS[:count])
        assert fault.value.row == row


def test_only_the_same_error_accuses_a_row() -> None:
    for other in (ValueError("fewer"), TypeError("many")):

        def judge(completions: list, other: Exception = other, **columns: Any) -> list[float]:
            raise ValueError("many") if len(completions) > 1 else other

        with pytest.raises(RewardFault, match="3 completions") as fault:
            scored(judge, TEXTS)
        assert fault.value.row is None


@pytest.mark.parametrize(("row_seconds", "scored_alone"), [(2, 5), (1.25, 8)])
def test_the_search_for_the_row_takes_ten_seconds(
    row_seconds: float, scored_alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait meanwhile (docs/scaling.md). Rows that were not tried in time are not accused."""
    calls, clock = [], itertools.count(100, row_seconds)

    def judge(completions: list, **columns: Any) -> list[float]:
        calls.append(len(completions))
        raise ValueError("no")

    monkeypatch.setattr(rewards, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(RewardFault, match="8 completions"):
        scored(judge, ["one"] * 8)
    assert calls == [8, *[1] * scored_alone]


def test_rows_that_are_scored_again_log_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def judge(completions: list, log_extra: Any, log_metric: Any, **columns: Any) -> list[float]:
        log_extra("text", completions)
        log_metric("metric", 1.0)
        return [float(completion) for completion in completions]

    with pytest.raises(RewardFault, match="row 1 "):
        scored(judge, ["1", "two", "3"])
    printed = capsys.readouterr().out
    assert (printed.count("metric"), printed.count("text")) == (1, 1)


def test_a_return_value_that_is_no_list_of_scores_is_reported_with_the_reward() -> None:
    """TRL would write a single score into every row, and take the keys of a mapping for scores."""
    one_each = {0: 1.0, 1: 1.0, 2: 1.0}
    for value in (None, 0.5, one_each, set(one_each), "123", torch.tensor(0.5), [1.0], [1.0] * 4, []):

        async def judge_async(completions: list, value: object = value, **columns: object) -> object:
            return value

        def judge(completions: list, value: object = value, **columns: object) -> object:
            return value

        for reward in (judge, judge_async):
            with pytest.raises(RewardFault, match=f"`{reward.__name__}` .*3 completions"):
                scored(reward, TEXTS)


def test_any_iterable_of_scores_is_accepted() -> None:
    for value in ((1.0, 2.0, 3.0), torch.ones(3), iter([1.0, 1.0, 1.0]), {1: 1.0, 2: 2.0, 3: 3.0}.values()):
        assert len(scored(lambda completions, value=value, **columns: value, TEXTS)) == 3


def test_a_fault_in_a_sum_names_the_part() -> None:
    (built,) = build_rewards([{"name": "sum", "rewards": ["tag_count"]}])
    parts = (replace(built.function.parts[0], function=lambda **columns: None, name="part"),)
    with pytest.raises(RewardFault, match="`part`"):
        scored(replace(built.function, parts=parts), TEXTS)


PLAIN = "<|im_start|>user\nThink between <think> and </think>.<|im_end|>\n<|im_start|>assistant\n"
PREFILLED: dict[str, Any] = {"name": "well_formed", "kwargs": {"prefilled": "think"}}
PLANNED: dict[str, Any] = {"name": "well_formed", "kwargs": {"tags": ["plan", "out"]}}


@pytest.mark.parametrize(
    ("specs", "end", "figures"),
    [
        (["math_correctness"], "", None),
        (["math_correctness", "repetition"], "<think>\n", ["`prefilled: think`", "math_correctness"]),
        ([PREFILLED], "<think>\n", None),
        # Qwen3 without thinking, and a template that also writes the first words of the thought.
        (["math_correctness"], "<think>\n\n</think>\n\n", None),
        ([PREFILLED], "<think>\n\n</think>\n\n", ["`prefilled`", "well_formed"]),
        ([PREFILLED, "tag_count"], "", ["`prefilled`", "well_formed"]),
        # Rewards inside others.
        (["group_length", PREFILLED], "<think>", ["`prefilled: think`", "gsm8k_correctness in group_length"]),
        (
            [{"name": "sum", "rewards": ["tag_count", PREFILLED]}, "math_correctness"],
            "<think>",
            ["`prefilled: think`", "tag_count in sum and math_correctness"],
        ),
        ([PLANNED], "<plan>", ["`prefilled: plan`", "well_formed"]),
        ([PLANNED, "tag_count"], "<plan>", ["`tags: [plan, out]`", "`prefilled: plan`", "well_formed and tag_count"]),
        ([HERE + "by_level"], "<think>", None),
    ],
)
def test_rewards_whose_prefilled_is_not_the_tag_that_the_prompt_opens_are_named(
    specs: list[Any], end: str, figures: list[str] | None
) -> None:
    notes = prefilled_notes(build_rewards(specs, num_generations=2), PLAIN + end)
    assert len(notes) == (figures is not None)
    assert all(figure in notes[0] for figure in figures or ())
    assert not figures or notes[0].endswith(figures[-1])


def test_a_reward_that_exits_is_named_with_the_row() -> None:
    def judge(completions: list, **columns: object) -> list[float]:
        if "two" in completions:
            sys.exit(0)
        return [1.0] * len(completions)

    async def judge_async(completions: list, **columns: object) -> list[float]:
        return judge(completions)

    for reward, has_row in ((judge, True), (judge_async, False)):
        with pytest.raises(RewardFault, match=f"`{reward.__name__}` .*SystemExit: 0") as fault:
            scored(reward, TEXTS)
        assert (fault.value.row is not None) is has_row
