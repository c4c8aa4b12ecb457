"""Denied and retracted claims: what the words around an answer do to it."""

import pytest

from grpo_rewards.math.correctness import GSM8KCorrectness, MathCorrectness

DENIED = """
    The wrong answer is 18. | An incorrect answer is 18. | A mistaken answer: 18
    It would be wrong to say the answer is 18.
    It is false that the answer is 18. | It is untrue that the answer is 18. | I doubt that the answer is 18.
    I refute that the answer is 18. | Nobody says the answer is 18. | I don't think the answer is 18.
    The answer is 18? No. | The answer is 18? Wrong! | The answer is 18? | The answer is 18. Nope.
    The answer is 18. That is wrong. | The answer is 18. Wait, that's not right. | The answer is 18. Just kidding.
    The answer is 18. No, I was wrong. | The answer is 18. Scratch that.
    Not \\boxed{18}! | It is not $\\boxed{18}$. | never \\boxed{18} | anything but **\\boxed{18}**
    far from \\boxed{18}
    It can't be \\boxed{18}. | It cannot equal \\boxed{18}. | It isn’t \\boxed{18}. | It could not be \\(\\boxed{18}\\).
    The wrong answer is \\boxed{18}. | It is false that the answer is \\boxed{18}. | I do not believe it is \\boxed{18}.
    \\boxed{18}? No. | \\boxed{18} is wrong. | $\\boxed{18}$ isn't the answer. | \\boxed{18}. Wrong. | \\boxed{18} (?)
"""
CLAIMED = """
    The answer is 18. | It is not 17. The answer is 18. | Since 5 does not divide 18, the answer is 18.
    The answer is 18. No more is needed. | The answer is 18! | The answer is 18. Not a single one is left.
    The answer is 18. The wrong answer is 17. | The answer is 18. I doubt that the answer is 17.
    The number of those who do not play is \\boxed{18}. | The number of wrong answers is \\boxed{18}.
    If no one leaves it is \\boxed{18}. | She could earn \\boxed{18}. | \\boxed{18}. It can't be \\boxed{17}.
    Not 17 but more: \\boxed{18}. | \\boxed{18} is the answer. | How many are left? \\boxed{18}
    \\boxed{18} is not prime.
"""


def listed(text: str) -> list[str]:
    return [item.strip() for line in text.strip().splitlines() for item in line.split("|")]


def pays(text: str) -> set[float]:
    rewards = [MathCorrectness()]
    rewards += [MathCorrectness(extract="boxed" if "boxed" in text else "sentence")]
    if "boxed" not in text:
        rewards.append(GSM8KCorrectness(extract="sentence", pay_exact=1, pay_equal=1))
    return {reward(completions=[text], answer=["18"])[0] for reward in rewards}


@pytest.mark.parametrize("text", listed(DENIED))
def test_a_denied_or_retracted_claim_earns_nothing(text):
    assert pays(text) == {0.0}


@pytest.mark.parametrize("text", listed(CLAIMED))
def test_a_negation_elsewhere_leaves_a_claim_paid(text):
    assert pays(text) == {1.0}


def test_the_box_of_a_gold_is_read_whatever_stands_around_it():
    assert MathCorrectness()(completions=["\\boxed{18}"], answer=["It is not \\boxed{18}?"]) == [1.0]
