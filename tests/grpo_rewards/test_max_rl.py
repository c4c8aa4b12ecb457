"""`max_rl`: a reward divided by its mean over the group of a prompt."""

import pickle
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_rewards.registry import BuiltReward, MaxRLReward, RewardSpecError, build_rewards, leaves

SPEC = {"name": "max_rl", "reward": "gsm8k_correctness"}


def paid(completions, **columns):
    """A reward that pays what the completion says."""
    return [None if text == "?" else float(text) for text in completions]


def over_mean(completions, size, prompts=None, **columns):
    reward = MaxRLReward(BuiltReward(paid, 1.0, "paid"), size)
    return reward(prompts or ["p"] * len(completions), completions, **columns)


def test_the_pay_table():
    assert over_mean(["1", "0", "0", "1"], 4) == [2.0, 0.0, 0.0, 2.0]
    assert over_mean(["1", "0", "0", "0"], 4) == [4.0, 0.0, 0.0, 0.0]
    assert over_mean(["0", "0", "1", "1"], 2, prompts=["p", "p", "q", "q"]) == [0.0, 0.0, 1.0, 1.0]
    assert over_mean(["?", "1", "0", "?"], 4) == [None, 2.0, 0.0, None]
    assert over_mean(["?", "?"], 2) == [None, None]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=12))
def test_the_mean_of_a_group_is_1_unless_nothing_was_paid(rewards):
    found = over_mean([str(reward) for reward in rewards], len(rewards))
    assert sum(found) / len(found) == pytest.approx(1.0 if any(rewards) else 0.0)
    mean = Fraction(sum(rewards), len(rewards))
    assert found == pytest.approx([float(reward / mean) if mean else 0.0 for reward in rewards])


def test_what_cannot_be_divided():
    with pytest.raises(ValueError, match=r"max_rl.*paid paid -1, and a quotient.*never negative"):
        over_mean(["-1", "2"], 2)
    with pytest.raises(ValueError, match="needs num_generations"):
        over_mean(["1"], None)
    with pytest.raises(ValueError, match="different prompts"):
        over_mean(["1", "1"], 2, prompts=["p", "q"])
    with pytest.raises(ValueError, match="not a whole number of groups"):
        over_mean(["1", "1", "1"], 2)


def test_the_reward_inside_is_logged():
    columns, metrics = {}, {}
    over_mean(["1", "0"], 2, log_extra=columns.__setitem__, log_metric=metrics.__setitem__)
    assert columns == {"max_rl/paid": [1.0, 0.0]}
    assert metrics == {"rewards/max_rl/paid": 0.5}


def test_a_recipe_builds_it():
    (built,) = build_rewards([{**SPEC, "alias": "relative"}], num_generations=8)
    assert (built.name, built.kind, built.highest_pay) == ("relative", "correctness", 8.0)
    assert built.needs_whole_groups
    assert built.normalises_groups
    assert [leaf.name for leaf in leaves([built])] == ["gsm8k_correctness"]
    copy = pickle.loads(pickle.dumps(built.function))
    assert copy(["p"] * 8, ["<answer>3</answer>"] + [""] * 7, answer=["3"] * 8) == [8.0] + [0.0] * 7


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"name": "max_rl"}, "key `reward` is missing"),
        ({"name": "max_rl", "reward": {"name": "tag_count", "weight": 2}}, "weight of its `reward` has no effect"),
        ({"name": "max_rl", "reward": SPEC}, "name it once"),
        ({"name": "sum", "rewards": [SPEC, "tag_count"]}, "put the sum inside the max_rl"),
        ({"name": "gate", "reward": SPEC, "only_if": "tag_count"}, "put the gate inside the max_rl"),
        ({**SPEC, "kwargs": {}}, "unknown key `kwargs`"),
    ],
)
def test_what_is_refused(spec, says):
    with pytest.raises(RewardSpecError, match=says):
        build_rewards([spec], num_generations=4)
