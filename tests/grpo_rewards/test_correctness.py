"""Correctness rewards: pay, logs, what math-verify is asked for and how long, and refused arguments."""

import time

import numpy as np
import pytest

from grpo_rewards import gsm8k_correctness, math_correctness
from grpo_rewards.math import comparison
from grpo_rewards.math.comparison import compare
from grpo_rewards.math.correctness import GSM8KCorrectness, MathCorrectness


@pytest.fixture
def math_verify(monkeypatch):
    """Return a function that puts verdicts by answer in the place of math-verify's, and returns the list of calls."""

    def replaced(verdict):
        asked = []

        def equivalent(gold, answer, deadline):
            asked.append((gold, answer, deadline))
            return verdict(answer)

        monkeypatch.setattr(comparison, "equivalent", equivalent)
        return asked

    return replaced


def test_the_pay_is_settable():
    texts = ["<answer>65,960</answer>", "<answer>65960</answer>", "<answer>1</answer>", "none"]
    assert gsm8k_correctness(completions=texts, answer=["#### 65,960"] * 4) == [2.0, 1.5, 0.0, 0.0]
    own = GSM8KCorrectness(pay_exact=1, pay_equal="0.9", pay_wrong=-1)
    assert own(completions=texts, answer=["#### 65,960"] * 4) == [1.0, 0.9, -1.0, -1.0]


def test_math_correctness_pays_for_an_equal_answer():
    texts = ["\\boxed{0.5}", "\\boxed{\\frac{1}{2}}", "\\boxed{1/2 m}", "\\boxed{1}"]
    assert math_correctness(completions=texts, answer=["0.5"] * 4) == [1.0, 1.0, 1.0, 0.0]
    assert GSM8KCorrectness(pay_exact=1, pay_equal=1.5).highest_pay == 1.5


def test_a_symbolic_comparison_pays_like_an_equal_number_or_counts_as_a_timeout(math_verify):
    verdicts = {"1+x": True, "x+2": False, "x^{10}": None}
    math_verify(verdicts.get)
    metrics = {}
    texts = [f"<answer>{answer}</answer>" for answer in (*verdicts, "x+1")]
    pays = gsm8k_correctness(completions=texts, answer=["x+1"] * 4, log_metric=metrics.__setitem__)
    assert pays == [1.5, 0.0, 0.0, 2.0]
    assert metrics["rewards/gsm8k_correctness/timeouts"] == 1.0
    assert metrics["rewards/gsm8k_correctness/symbolic"] == 0.75


def test_a_list_of_golds_accepts_each():
    table = [
        (["18", "eighteen"], "eighteen", (2.0, "eighteen", "exact")),
        (["nineteen", "18"], "18.0", (1.5, "18", "equal")), (["17", "18"], "18", (2.0, "18", "exact")),
        (["so #### 17", "so #### 18"], "18", (2.0, "18", "exact")), (["17", "18"], "19", (0.0, "17", "wrong")),
        (["17", None, ""], "17", (2.0, "17", "exact")), ([17, 18], "18", (2.0, "18", "exact")),
        ({"text": ["17", "18"]}, "18", (2.0, "18", "exact")), (np.array(["17", "18"]), "18", (2.0, "18", "exact")),
        ([], "18", (None, None, "no gold")), ([None], "18", (None, None, "no gold")),
        ([True], "1", (None, None, "no gold")), (["18"] * 65, "18", (None, None, "no gold")),
    ]  # fmt: skip
    for golds, answer, expected in table:
        logged, texts = {}, [f"<answer>{answer}</answer>"]
        (pay,) = gsm8k_correctness(completions=texts, answer=[golds], log_extra=logged.__setitem__)
        assert (pay, logged["gold"][0], logged["verdict"][0]) == expected, golds


def test_a_formula_is_compared_with_each_accepted_gold_once(math_verify):
    asked, metrics = math_verify(lambda answer: asked[-1][0] == "2x"), {}
    texts = ["<answer>x+x</answer>", "<answer>She has 7 left.</answer>"]
    pays = gsm8k_correctness(completions=texts, answer=[["y", "2x", "z", "7"]] * 2, log_metric=metrics.__setitem__)
    assert pays == [1.5, 1.5]
    # Numbers are compared before, and nothing after a right answer.
    assert asked == [("y", "x+x", 2.0), ("2x", "x+x", 2.0)]
    assert metrics["rewards/gsm8k_correctness/symbolic"] == 0.5


def test_each_distinct_answer_is_compared_once(math_verify):
    asked = math_verify(lambda answer: False)
    texts = ["\\boxed{x+2}", "\\boxed{x+3}", "\\boxed{x+2}", "\\boxed{x+2}"]
    MathCorrectness(deadline=5)(completions=texts * 2, answer=["x+1"] * 4 + ["y+1"] * 4)
    pairs = [("x+1", "x+2"), ("x+1", "x+3"), ("y+1", "x+2"), ("y+1", "x+3")]
    assert asked == [(*pair, 5.0) for pair in pairs]


def test_an_answer_gets_the_expected_verdict(math_verify):
    asked = math_verify(lambda answer: None)
    table = [
        ("18", "18", "exact"), ("18", "18.0", "equal"), ("18", "19", "wrong"), ("18", "x", "wrong"),
        ("18", None, "missing"), ("", "18", "no gold"), ("x", "18", "wrong"), ("Tuesday", "tuesday", "equal"),
        ("Tuesday", "Tuesyad", "wrong"), ("x+1", "x+1 or x+2", "wrong"), ("not", "ton", "wrong"),
        (f"${'x' * 998}$", "x" * 998, "equal"), (f"${'x' * 999}$", "x" * 999, "wrong"),
        ("x" * 999, f"${'x' * 999}$", "wrong"), ("5", "", "wrong"), ("5%", "5 m", "wrong"), ("\\$5", "5 m", "wrong"),
        ("5%", "5 percent", "equal"), ("x+1", "x+1" + "+0" * 499, "wrong"), ("x+1" + "+0" * 499, "x+1", "wrong"),
        ("18", "\\sqrt{324}", "wrong"), ("18", "17 + 1", "wrong"), ("\\sqrt{324}", "18", "equal"),
        ("\\sqrt{18}", "18", "wrong"),
    ]  # fmt: skip
    assert [row for row in table if compare(*row[:2]) != row[2]] == []
    assert asked == [], "strings and numbers need no symbolic comparison"
    formulas = [("x", "X"), ("x+1", "X+1"), ("1 or 2", "2 or 1"), ("no", "on")]
    assert [pair for pair in formulas if compare(*pair) != "timeout"] == []
    assert asked == [(*pair, 2.0) for pair in formulas]


def test_a_call_has_a_budget_and_simple_answers_come_first(math_verify, monkeypatch):
    now = [0.0]

    def slow(answer):
        now[0] += 3.0 if "^" in answer else 0.001
        return None if "^" in answer else True

    asked = math_verify(slow)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    columns = {}
    texts = [f"\\boxed{{x^{{{n}}}+y}}" for n in range(100, 200)] + ["\\boxed{y+x}"] * 5 + ["\\boxed{x + y}"]
    reward = MathCorrectness(deadline=3)
    assert reward(completions=texts, answer=["x+y"] * 106, log_extra=columns.__setitem__) == [0.0] * 100 + [1.0] * 6
    assert columns["verdict"][:100] == ["timeout"] * 100
    # 4 deadlines, and 0.03 seconds for each of 106 rows. The comparison that exceeds the budget is the last.
    assert 4 * 3 + 0.03 * 106 <= now[0] < 4 * 3 + 0.03 * 106 + 3
    assert "y+x" in asked[0]


HOSTILE = {
    "open brackets": lambda n: "(" * (40 + n),
    "nested brackets": lambda n: "(" * (30 + n) + "x" + ")" * (30 + n),
    "a tower": lambda n: "^".join(["x"] * (4 + n)),
    "a tower in braces": lambda n: "x^{" * (3 + n) + "x" + "}" * (3 + n),
    "a large power": lambda n: f"7^{{{10**8 + n}}}",
    "a large factorial": lambda n: f"{10**5 + n}!",
    "nested roots": lambda n: "\\sqrt{" * (30 + n) + "x" + "}" * (30 + n),
}


def test_hostile_formulas_never_reach_math_verify(math_verify):
    asked, columns = math_verify(lambda answer: True), {}
    texts = [f"\\boxed{{{make(n)}}}" for make in HOSTILE.values() for n in range(16)]
    scores = math_correctness(completions=texts, answer=["x+1"] * len(texts), log_extra=columns.__setitem__)
    assert (set(scores), asked) == ({0.0}, [])
    closed = [text for text in columns["extracted"] if text is not None]
    assert columns["verdict"].count("timeout") == len(closed)


def test_a_truth_value_among_golds_is_not_taken_for_a_number():
    """A truth value equals 0 or 1, so that one row's golds could be taken for another's."""
    texts = ["<answer>1</answer>"] * 3
    assert gsm8k_correctness(completions=texts, answer=[[True], [1], [True, "1"]]) == [None, 2.0, 2.0]
    assert gsm8k_correctness(completions=texts, answer=[[1], [True], [["1"], "1"]]) == [2.0, None, 2.0]


def test_a_reward_with_unit_pay_pays_for_what_earns_more_than_a_wrong_answer():
    for pays, unit in (
        ((3, 2, 1), (1.0, 1.0, 0.0)), ((3, 1, 1), (1.0, 0.0, 0.0)), ((3, 0, 1), (1.0, 0.0, 0.0)), ((1, 2, 1), None),
        ((0, 2, 1), None),
    ):  # fmt: skip
        pay = dict(zip(("pay_exact", "pay_equal", "pay_wrong"), pays, strict=True))
        own = GSM8KCorrectness(**pay, prefix="a/", name="b", extract="boxed")
        standard = own.with_unit_pay()
        if unit is None:
            assert standard is None
        else:
            assert standard == GSM8KCorrectness(
                pay_exact=unit[0], pay_equal=unit[1], pay_wrong=unit[2], prefix="", name="gsm8k_correctness",
                extract="boxed",
            )  # fmt: skip


def test_other_tags_and_a_prefilled_block_are_read():
    text = "<reasoning>3 * 6</reasoning><answer>18</answer>"
    assert GSM8KCorrectness(tags=["reasoning", "answer"])(completions=[text], answer=["18"]) == [2.0]
    assert GSM8KCorrectness(prefilled="think")(completions=["<answer>18</answer>"], answer=["18"]) == [0.0]
    assert GSM8KCorrectness(prefilled="think")(completions=["a</think><answer>18</answer>"], answer=["18"]) == [2.0]


def test_logged_columns_have_one_entry_per_row():
    columns, metrics = {}, {}
    GSM8KCorrectness(prefix="strict/", name="strict")(
        completions=["<answer>18.0</answer>", "no", "<answer>1</answer>"],
        answer=["x\n#### 18", "18", ""],
        log_extra=columns.__setitem__,
        log_metric=metrics.__setitem__,
    )
    assert columns == {"strict/extracted": ["18.0", None, "1"], "strict/gold": ["18", "18", None],
                       "strict/verdict": ["equal", "missing", "no gold"]}  # fmt: skip
    assert metrics == {"rewards/strict/parsed": pytest.approx(2 / 3), "rewards/strict/symbolic": 0.0,
                       "rewards/strict/timeouts": 0.0}  # fmt: skip


def test_completions_without_an_answer_get_a_note_on_where_to_look():
    """The note names the layout that finds most answers, with the reward's own tags and outside the thinking."""
    for reward, texts, best in (
        ({"extract": "boxed"}, ["<answer>18</answer>", "#### 18"], ("auto", "2 of 2")),
        ({"extract": "boxed"}, ["<answer>18</answer>", "18"], ("answer_tag", "1 of 2")),
        ({"extract": "answer_tag"}, ["so \\boxed{18}"], ("boxed", "1 of 1")),
        ({"extract": "boxed"}, ["18"], None),
        ({"extract": "boxed", "prefilled": "think"}, ["<answer>18</answer>"], None),
        ({"extract": "boxed", "prefilled": "think"}, ["</think><answer>18</answer>"], ("answer_tag", "1 of 1")),
        ({"extract": "boxed", "tags": ["r", "solution"]}, ["<solution>18</solution>"], ("answer_tag", "1 of 1")),
    ):  # fmt: skip
        for completions in (texts, [[{"role": "assistant", "content": text}] for text in texts]):
            note = GSM8KCorrectness(**reward).unparsed_note(completions)
            assert f"`extract: {reward['extract']}`" in note
            assert note.count("`extract: ") == (1 if best is None else 2)
            assert best is None or (f"`extract: {best[0]}`" in note and best[1] in note)
        assert GSM8KCorrectness(extract="boxed").unparsed_note(["<answer>18</answer>", "\\boxed{17}"]) is None


def test_a_bad_argument_names_its_key():
    for kwargs in (
        {"extract": "tags"}, {"deadline": 0}, {"deadline": "soon"}, {"prefilled": "answer"},
        {"pay_wrong": float("inf")}, {"tags": ["think"]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            GSM8KCorrectness(**kwargs)


def test_golds_that_are_prose_are_counted():
    golds = ["5", "The vectors are linearly dependent, as $w=3u$ shows.", "The steady state current is 2 amps."]
    note = gsm8k_correctness.gold_note([(f"row {row}", gold) for row, gold in enumerate(golds)])
    assert note.startswith("2 ")
    assert "row 1: `The vectors" in note
    assert gsm8k_correctness.gold_note([("row 0", "5")]) is None
