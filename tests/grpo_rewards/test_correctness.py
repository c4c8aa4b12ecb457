"""Correctness rewards: pay, logs and refused arguments."""

import numpy as np
import pytest

from grpo_rewards import gsm8k_correctness, math_correctness
from grpo_rewards.math import answers, correctness
from grpo_rewards.math.correctness import GSM8KCorrectness


def test_the_pay_is_settable():
    texts = ["<answer>65,960</answer>", "<answer>65960</answer>", "<answer>1</answer>", "none"]
    assert gsm8k_correctness(completions=texts, answer=["#### 65,960"] * 4) == [2.0, 1.5, 0.0, 0.0]
    own = GSM8KCorrectness(pay_exact=1, pay_equal="0.9", pay_wrong=-1)
    assert own(completions=texts, answer=["#### 65,960"] * 4) == [1.0, 0.9, -1.0, -1.0]


def test_math_correctness_pays_for_an_equal_answer():
    texts = ["\\boxed{0.5}", "\\boxed{\\frac{1}{2}}", "\\boxed{1/2 m}", "\\boxed{1}"]
    assert math_correctness(completions=texts, answer=["0.5"] * 4) == [1.0, 1.0, 1.0, 0.0]
    assert GSM8KCorrectness(pay_exact=1, pay_equal=1.5).highest_pay == 1.5


def test_a_symbolic_comparison_pays_like_an_equal_number_or_counts_as_a_timeout(monkeypatch):
    verdicts = {"1+x": True, "x+2": False, "x^{10}": None}
    monkeypatch.setattr(answers, "equivalent", lambda gold, answer, deadline: verdicts[answer])
    metrics = {}
    texts = [f"<answer>{answer}</answer>" for answer in (*verdicts, "x+1")]
    pays = gsm8k_correctness(completions=texts, answer=["x+1"] * 4, log_metric=metrics.__setitem__)
    assert pays == [1.5, 0.0, 0.0, 2.0]
    assert metrics["rewards/gsm8k_correctness/timeouts"] == 1.0
    assert metrics["rewards/gsm8k_correctness/symbolic"] == 0.75


@pytest.mark.parametrize(
    ("golds", "answer", "expected"),
    [
        (["18", "eighteen"], "eighteen", (2.0, "eighteen", "exact")),
        (["nineteen", "18"], "18.0", (1.5, "18", "equal")),
        (["17", "18"], "18", (2.0, "18", "exact")),
        (["so #### 17", "so #### 18"], "18", (2.0, "18", "exact")),
        (["17", "18"], "19", (0.0, "17", "wrong")),
        (["17", None, ""], "17", (2.0, "17", "exact")),
        ([17, 18], "18", (2.0, "18", "exact")),
        ({"text": ["17", "18"]}, "18", (2.0, "18", "exact")),
        (np.array(["17", "18"]), "18", (2.0, "18", "exact")),
        ([], "18", (None, None, "no gold")),
        ([None], "18", (None, None, "no gold")),
        ([True], "1", (None, None, "no gold")),
        (["18"] * 65, "18", (None, None, "no gold")),
    ],
)
def test_a_list_of_golds_accepts_each(golds, answer, expected):
    logged = {}
    (pay,) = gsm8k_correctness(completions=[f"<answer>{answer}</answer>"], answer=[golds], log_extra=logged.__setitem__)
    assert (pay, logged["gold"][0], logged["verdict"][0]) == expected


def test_a_formula_is_compared_with_each_accepted_gold_and_counted_once(monkeypatch):
    compared = []
    monkeypatch.setattr(answers, "equivalent", lambda gold, answer, deadline: compared.append(gold) or gold == "2x")
    metrics = {}
    texts = ["<answer>x+x</answer>", "<answer>She has 7 left.</answer>"]
    pays = gsm8k_correctness(completions=texts, answer=[["y", "2x", "z", "7"]] * 2, log_metric=metrics.__setitem__)
    assert pays == [1.5, 1.5]
    assert compared == ["y", "2x"]  # numbers are compared before, and nothing after a right answer
    assert metrics["rewards/gsm8k_correctness/symbolic"] == 0.5


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        ("18", "18", "exact"), ("18", "18.0", "equal"), ("18", "19", "wrong"), ("18", "x", "wrong"),
        ("18", None, "missing"),
        ("", "18", "no gold"), ("x", "18", "wrong"), ("Tuesday", "tuesday", "equal"), ("Tuesday", "Tuesyad", "wrong"),
        ("x+1", "x+1 or x+2", "wrong"), ("not", "ton", "wrong"),
        (f"${'x' * 998}$", "x" * 998, "equal"), (f"${'x' * 999}$", "x" * 999, "wrong"),
        ("x" * 999, f"${'x' * 999}$", "wrong"),
        # Only these reach math-verify.
        ("x", "X", "timeout"), ("x+1", "X+1", "timeout"), ("1 or 2", "2 or 1", "timeout"),
        ("no", "on", "timeout"),
    ],
)  # fmt: skip
def test_an_answer_gets_the_expected_verdict(monkeypatch, gold, answer, verdict):
    asked = []
    monkeypatch.setattr(answers, "equivalent", lambda *given: asked.append(given))
    assert answers.compare(gold, answer) == verdict
    assert asked == ([(gold, answer, 2.0)] if verdict == "timeout" else [])
    assert answers.Judge().deadline == GSM8KCorrectness().deadline == 2.0


def test_a_truth_value_among_golds_is_not_taken_for_a_number():
    """A truth value equals 0 or 1, so that one row's golds could be taken for another's."""
    texts = ["<answer>1</answer>"] * 3
    assert gsm8k_correctness(completions=texts, answer=[[True], [1], [True, "1"]]) == [None, 2.0, 2.0]
    assert gsm8k_correctness(completions=texts, answer=[[1], [True], [["1"], "1"]]) == [2.0, None, 2.0]


def test_the_comparisons_of_a_call_get_four_deadlines_and_a_share_for_each_row(monkeypatch):
    given = []
    monkeypatch.setattr(correctness, "Judge", lambda *asked: given.append(asked) or answers.Judge(*asked))
    GSM8KCorrectness(deadline=5, decimal="comma")(completions=["18"] * 10, answer=["18"] * 10)
    gsm8k_correctness(completions=["18"] * 2, answer=["18"] * 2)
    assert given == [(5.0, "comma", pytest.approx(20.3)), (2.0, "point", pytest.approx(8.06))]


@pytest.mark.parametrize(
    ("pays", "unit"),
    [((3, 2, 1), (1.0, 1.0, 0.0)), ((3, 1, 1), (1.0, 0.0, 0.0)), ((3, 0, 1), (1.0, 0.0, 0.0)), ((1, 2, 1), None),
     ((0, 2, 1), None)],
)  # fmt: skip
def test_a_reward_with_unit_pay_pays_for_what_earns_more_than_a_wrong_answer(pays, unit):
    exact, equal, wrong = pays
    own = GSM8KCorrectness(pay_exact=exact, pay_equal=equal, pay_wrong=wrong, prefix="a/", name="b", extract="boxed")
    standard = own.with_unit_pay()
    if unit is None:
        assert standard is None
    else:
        assert standard == GSM8KCorrectness(
            pay_exact=unit[0],
            pay_equal=unit[1],
            pay_wrong=unit[2],
            prefix="",
            name="gsm8k_correctness",
            extract="boxed",
        )


def test_the_note_names_no_layout_that_would_not_find_the_answer_inside_the_thinking():
    reward = GSM8KCorrectness(prefilled="think", extract="boxed")
    note = "no completion states an answer where `extract: boxed` looks"
    assert reward.unparsed_note(["<answer>18</answer>"]) == note
    assert reward.unparsed_note(["</think><answer>18</answer>"]) == f"{note}; `extract: answer_tag` finds one in 1 of 1"


def test_the_note_uses_the_rewards_own_tags():
    reward = GSM8KCorrectness(extract="boxed", tags=["reasoning", "solution"])
    note = reward.unparsed_note(["<solution>18</solution>"])
    assert note is not None
    assert note.endswith("`extract: answer_tag` finds one in 1 of 1")


def test_other_tags_and_a_prefilled_block_are_read():
    text = "<reasoning>3 * 6</reasoning><answer>18</answer>"
    assert GSM8KCorrectness(tags=["reasoning", "answer"])(completions=[text], answer=["18"]) == [2.0]
    assert GSM8KCorrectness(prefilled="think")(completions=["<answer>18</answer>"], answer=["18"]) == [0.0]
    assert GSM8KCorrectness(prefilled="think")(completions=["a</think><answer>18</answer>"], answer=["18"]) == [2.0]


def test_each_row_is_scored_by_itself_in_any_grouping():
    golds = ["18", "17", "18", "18", "", "17", "17"]
    texts = ["<answer>18</answer>"] * len(golds)
    together = gsm8k_correctness(completions=texts, answer=golds)
    alone = [gsm8k_correctness(completions=[text], answer=[gold])[0] for text, gold in zip(texts, golds, strict=True)]
    assert together == alone == [2.0, 0.0, 2.0, 2.0, None, 0.0, 0.0]


def test_logged_columns_have_one_entry_per_row():
    columns, metrics = {}, {}
    GSM8KCorrectness(prefix="strict/", name="strict")(
        completions=["<answer>18.0</answer>", "no", "<answer>1</answer>"],
        answer=["x\n#### 18", "18", ""],
        log_extra=columns.__setitem__,
        log_metric=metrics.__setitem__,
    )
    assert columns == {
        "strict/extracted": ["18.0", None, "1"],
        "strict/gold": ["18", "18", None],
        "strict/verdict": ["equal", "missing", "no gold"],
    }
    assert metrics == {
        "rewards/strict/parsed": pytest.approx(2 / 3),
        "rewards/strict/symbolic": 0.0,
        "rewards/strict/timeouts": 0.0,
    }


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match=r"`gsm8k_correctness` needs the dataset column `answer`.*question"):
        gsm8k_correctness(completions=["a"], question=["q"])


@pytest.mark.parametrize(
    ("reward", "texts", "note"),
    [
        ({"extract": "boxed"}, ["<answer>18</answer>", "#### 18"],
         "no completion states an answer where `extract: boxed` looks; `extract: auto` finds one in 2 of 2"),
        ({"extract": "boxed"}, ["<answer>18</answer>", "18"],
         "no completion states an answer where `extract: boxed` looks; `extract: answer_tag` finds one in 1 of 2"),
        ({"extract": "answer_tag"}, ["so \\boxed{18}"],
         "no completion states an answer where `extract: answer_tag` looks; `extract: boxed` finds one in 1 of 1"),
        ({"extract": "boxed"}, ["18"], "no completion states an answer where `extract: boxed` looks"),
        ({"extract": "boxed"}, ["<answer>18</answer>", "\\boxed{17}"], None),
    ],
)  # fmt: skip
def test_completions_without_an_answer_get_a_note_on_where_to_look(reward, texts, note):
    chat = [[{"role": "assistant", "content": text}] for text in texts]
    assert GSM8KCorrectness(**reward).unparsed_note(texts) == note
    assert GSM8KCorrectness(**reward).unparsed_note(chat) == note


def test_a_sentence_counts_as_parsed_and_pays_as_an_equal_number():
    columns, metrics = {}, {}
    texts = ["<answer>She has 18 left.</answer>", "<answer>She has about 18 left.</answer>"]
    scores = gsm8k_correctness(
        completions=texts, answer=["18"] * 2, log_extra=columns.__setitem__, log_metric=metrics.__setitem__
    )
    assert scores == [1.5, 0.0]
    assert columns["extracted"] == ["She has 18 left.", "She has about 18 left."]
    assert columns["verdict"] == ["equal", "wrong"]
    assert metrics["rewards/gsm8k_correctness/parsed"] == 1.0
    assert metrics["rewards/gsm8k_correctness/symbolic"] == 0.0


def test_an_empty_call_scores_nothing():
    metrics = {}
    assert math_correctness(completions=[], answer=[], log_metric=metrics.__setitem__) == []
    assert metrics == {}


@pytest.mark.parametrize(
    "kwargs",
    [{"extract": "tags"}, {"deadline": 0}, {"deadline": "soon"}, {"prefilled": "answer"},
     {"pay_wrong": float("inf")}, {"tags": ["think"]}],
)  # fmt: skip
def test_a_bad_argument_names_its_key(kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        GSM8KCorrectness(**kwargs)


def test_golds_that_are_prose_are_counted():
    golds = ["5", "The vectors are linearly dependent, as $w=3u$ shows.", "The steady state current is 2 amps."]
    note = gsm8k_correctness.gold_note([(f"row {row}", gold) for row, gold in enumerate(golds)])
    assert note is not None
    assert note.startswith("2 golds are prose, which only its text or its one number equals (row 1: `The vectors")
    assert gsm8k_correctness.gold_note([("row 0", "5")]) is None
