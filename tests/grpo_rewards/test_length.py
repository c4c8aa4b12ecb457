"""The length reward of one group."""

import pytest

from grpo_rewards.built import RewardSpecError
from grpo_rewards.length import GroupLength
from grpo_rewards.registry import build_rewards
from tests.support.errors import refused

RIGHT, WRONG = "<answer>18</answer>", "<answer>17</answer>"


def score(completions, num_generations, prompts=None, lengths=None, **columns):
    rows = len(completions)
    ids = None if lengths is None else [[0] * length for length in lengths]
    columns.setdefault("answer", ["18"] * rows)
    reward = GroupLength(num_generations=num_generations)
    return reward(prompts or ["p"] * rows, completions, completion_ids=ids, **columns)


def test_the_pay_is_the_formula_of_kimi():
    # lambda = 0.5 - (length - min) / (max - min); a wrong completion gets min(0, lambda).
    scores = score([RIGHT, RIGHT, WRONG, WRONG, RIGHT], 5, lengths=[10, 20, 10, 20, 15])
    assert scores == [0.5, -0.5, 0.0, -0.5, 0.0]


def test_groups_come_from_the_layout_also_for_a_prompt_drawn_twice():
    scores = score([RIGHT] * 4, 2, lengths=[10, 20, 100, 200])
    assert scores == [0.5, -0.5, 0.5, -0.5]
    assert score([RIGHT] * 4, 4, lengths=[10, 20, 100, 200])[1] > 0


def test_equal_lengths_and_groups_of_one_earn_nothing():
    assert score([RIGHT, WRONG], 2, lengths=[7, 7]) == [0.0, 0.0]
    assert score([RIGHT], 1, lengths=[7]) == [0.0]


def test_the_length_is_in_characters_without_token_ids():
    assert score([RIGHT, RIGHT + "  "], 2) == [0.5, -0.5]


def test_an_unscorable_gold_is_none():
    assert score([RIGHT, RIGHT], 2, answer=["", ""]) == [None, None]


def test_a_layout_that_splits_groups_is_refused_with_the_fix():
    with pytest.raises(ValueError, match="num_generations"):
        score([RIGHT] * 3, 2)
    with pytest.raises(ValueError, match=r"different prompts.*num_generations_eval"):
        score([RIGHT] * 4, 4, prompts=["p", "p", "q", "q"])
    with pytest.raises(ValueError, match="2 in `prompts`, 4 in `completions`"):
        score([RIGHT] * 4, 2, prompts=["p", "p"])
    with pytest.raises(ValueError, match="num_generations"):
        GroupLength()(["p"], [RIGHT], answer=["18"])


def test_a_recipe_fills_in_the_group_size_and_the_correctness_reward():
    spec = {
        "name": "group_length",
        "kwargs": {"correctness": {"name": "gsm8k_correctness", "kwargs": {"extract": "hashes"}}},
    }
    (built,) = build_rewards([spec], num_generations=2)
    assert built.function.needs_whole_groups
    assert built.function(["p", "p"], ["#### 18", "#### 18   "], answer=["18"] * 2) == [0.5, -0.5]
    with refused("group_length", "num_generations", by=RewardSpecError):
        build_rewards([{"name": "group_length", "kwargs": {"num_generations": 0}}])


def test_reasons_are_logged_and_token_ids_passed_on():
    reasons, seen = {}, []

    def right(completions, completion_ids, **columns):
        seen.append(completion_ids)
        return [1.0, 0.0, None]

    reward = GroupLength(num_generations=3, correctness=right)
    ids = [[0] * 10, [0] * 20, [0] * 30]
    assert reward(["p"] * 3, ["a", "b", "c"], completion_ids=ids, log_reason=reasons.__setitem__) == [0.5, 0.0, None]
    assert seen == [ids]
    assert len(set(reasons["reason"])) == 3
    assert all(figure in reasons["reason"][1] for figure in ("20", "10", "30"))
