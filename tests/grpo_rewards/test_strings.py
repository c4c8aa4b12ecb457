"""String answers: each way of matching, answers that a naive rule would pay for, SQuAD's functions, a generator."""

import collections
import itertools
import pickle
import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_rewards import string_match
from grpo_rewards.built import RewardSpecError
from grpo_rewards.registry import build_rewards
from grpo_rewards.strings import StringMatch, squad_normalised
from tests.support.errors import refused
from tests.support.growth import growth


def score(text, gold, match="squad", **arguments):
    columns = {}
    reward = StringMatch(match=match, **{"extract": "whole", **arguments})
    (result,) = reward(completions=[text], answer=[gold], log_extra=columns.__setitem__)
    return result, columns["verdict"][0]


def test_an_answer_earns_the_pay_of_the_table():
    table = [
        ("exact", "Paris", "Paris", 1.0, "exact"), ("exact", " Paris\n", "Paris ", 1.0, "exact"),
        ("exact", "paris", "Paris", 0.0, "wrong"), ("exact", "New  York", "New York", 0.0, "wrong"),
        ("casefold", "PARIS", "paris", 1.0, "equal"), ("casefold", "New\n York", "new york", 1.0, "equal"),
        ("casefold", "STRASSE", "stra\u00dfe", 1.0, "equal"), ("casefold", "Cafe\u0301", "caf\u00e9", 1.0, "equal"),
        ("casefold", "Paris.", "Paris", 0.0, "wrong"), ("squad", "Paris", "Paris", 1.0, "exact"),
        ("squad", "the  Eiffel-Tower!", "Eiffeltower", 1.0, "equal"), ("squad", "An apple", "apple", 1.0, "equal"),
        ("squad", "apples", "apple", 0.0, "wrong"), ("f1", "Paris", "Paris", 1.0, "exact"),
        ("f1", "the cat sat", "a cat sat", 1.0, "equal"), ("f1", "cat sat here", "the cat sat", 0.8, "partial"),
        ("f1", "dog", "cat", 0.0, "wrong"), ("squad", "", "cat", 0.0, "missing"),
        ("squad", "1000", "1,000", 1.0, "equal"), ("squad", "-3 m", "- 3 m", 1.0, "equal"),
        ("squad", "cat", "", None, "no gold"),
    ]  # fmt: skip
    for match, text, gold, *expected in table:
        assert list(score(text, gold, match)) == expected, (match, text, gold)


def test_partial_pay_scales_between_the_two_pays():
    assert score("cat sat here", "cat sat", "f1", pay=2, pay_wrong=-1) == (pytest.approx(-1 + 0.8 * 3), "partial")


# Answers that a naive rule pays for: a substring, a bag of words, an unanchored or backtracking pattern, an empty gold.
TRAPS = [
    ("squad", "not Paris", "Paris"), ("squad", "Paris", "Paris, Texas"), ("squad", "Paris London", ["Paris", "London"]),
    ("squad", "Paris or London", "Paris"), ("squad", "Parisian", "Paris"), ("squad", "the", "A"), ("squad", "!!!", "+"),
    ("f1", "the", "A"), ("f1", "...", "?"), ("exact", "PARIS", "Paris"), ("exact", "Paris.", "Paris"),
    ("casefold", "Pa-ris", "Paris"), ("squad", "P\u0430ris", "Paris"), ("casefold", "resume", "r\u00e9sum\u00e9"),
    ("squad", "<think>Paris</think>", "Paris"), ("squad", "<think>Paris", "Paris"), ("squad", "", "Paris"),
    ("f1", "", "Paris"), ("casefold", "-5", "5"), ("casefold", "C++", "C"), ("squad", "['Paris']", ["Rome"]),
]  # fmt: skip


def test_a_trap_earns_nothing():
    assert [trap for trap in TRAPS if score(trap[1], trap[2], trap[0])[0] != 0.0] == []


def test_f1_does_not_pay_for_stuffing():
    assert score("paris " * 50, "Paris", "f1")[0] < 0.05
    vocabulary = " ".join(["rome", "berlin", "paris", "london", "oslo"] * 20)
    assert score(vocabulary, "Paris", "f1")[0] < 0.05


def test_a_gold_may_be_a_string_a_list_or_a_mapping():
    table = [
        (["Rome", "Paris"], 1.0), (("Paris",), 1.0), ({"text": ["Rome", "Paris"], "answer_start": [1, 2]}, 1.0),
        ({"text": "Paris"}, 1.0), (["", "Paris", None], 1.0), (["Rome"], 0.0),
        ([], None), ({"text": []}, None), ({}, None), ([""], None), (None, None), (True, None), (float("nan"), None),
        (b"Paris", None), ([["Paris"]], None),
    ]  # fmt: skip
    assert [gold for gold, expected in table if score("Paris", gold)[0] != expected] == []


@pytest.mark.parametrize("match", ["squad", "f1"])
def test_signs_decimal_points_and_operators_are_compared(match):
    pairs = [
        ("1.5", "15"), ("-5", "5"), ("1/2", "12"), (".5", "5"), ("18:30", "1830"), ("2^10", "210"), ("1,5", "15"),
        ("- 3 m", "3 m"), ("5!", "5"), (-5, "5"), ("(-2, 3)", "2 3"), ("1.5 million", "15 million"), ("1.2.3", "1.23"),
        ("+", "-"), ("<=", ">="), ("<", "="), ("x+y", "xy"), ("C++", "C"), ("C#", "C"), ("A-", "A"), ("a - b", "a b"),
    ]  # fmt: skip
    for gold, other in pairs:
        assert score(str(gold), gold, match)[0] == score(f"the {gold}.", gold, match)[0] == 1.0, gold
        assert score(other, gold, match)[0] < 1.0, gold
        assert score(str(gold), other, match)[0] < 1.0 or gold in ("5!", "x+y", "a - b"), gold


def test_numbers_and_arrays_are_golds():
    numpy = pytest.importorskip("numpy")
    assert score("18", 18)[0] == score("0.5", 0.5)[0] == score("18", numpy.int64(18))[0] == 1.0
    assert score("b", numpy.array(["a", "b"]))[0] == 1.0


def test_the_nearest_gold_is_logged():
    columns = {}
    reward = StringMatch(match="f1", extract="whole", prefix="qa/")
    golds = [["dog", "red fox cat"], ["Rome", "Oslo"]]
    reward(completions=["red cat", ""], answer=golds, log_extra=columns.__setitem__)
    assert columns["qa/gold"] == ["red fox cat", "Rome"]
    assert (columns["qa/extracted"][0], columns["qa/verdict"]) == ("red cat", ["partial", "missing"])


def test_extract_decides_where_the_answer_is_read():
    table = [
        ("answer_tag", "<answer>Paris</answer>", True), ("answer_tag", "Paris", False),
        ("answer_tag", "<think><answer>Paris</answer></think>", False), ("boxed", "\\boxed{Paris}", True),
        ("hashes", "#### Paris", True), ("a_line", "A: Paris", True), ("sentence", "The answer is Paris.", True),
        ("auto", "<answer>Paris</answer>", True), ("whole", "<think>Rome?</think>\nParis\n", True),
        ("whole", "It is Paris", False),
    ]  # fmt: skip
    assert [row for row in table if score(row[1], "Paris", extract=row[0])[0] != float(row[2])] == []
    assert string_match(completions=["<answer>Paris</answer>"], answer=["paris"]) == [1.0]


def test_a_missing_column_kind_and_pickling():
    metrics = {}
    reward = StringMatch(name="qa", pay=3)
    texts = ["x", "<answer>c d</answer>"]
    assert reward(completions=texts, answer=["b", "b"], log_metric=metrics.__setitem__) == [0, 0]
    assert metrics == {"rewards/qa/parsed": 0.5}
    assert (reward.kind, reward.highest_pay) == ("correctness", 3.0)
    assert pickle.loads(pickle.dumps(reward)) == reward
    with pytest.raises(ValueError, match="`answer`"):
        reward(completions=["x"], question=["y"])


def test_a_bad_argument_names_its_key():
    for kwargs in ({"match": "fuzzy"}, {"extract": "end"}, {"pay_wrong": 1, "pay": 0}):
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            StringMatch(**kwargs)


def test_a_pattern_without_effect_and_one_that_is_no_string_are_refused():
    for pattern in ("a", ""):
        with refused("`pattern`", "squad"):
            StringMatch(pattern=pattern)
    for pattern in (3, 0):
        with refused("`pattern`", pattern):
            StringMatch(match="pattern", pattern=pattern)


# SQuAD 1.1's evaluation script, from its description: lower case, no punctuation, no articles, single spaces.
def official(text):
    text = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def official_f1(prediction, truth):
    words, wanted = official(prediction).split(), official(truth).split()
    same = sum((collections.Counter(words) & collections.Counter(wanted)).values())
    if same == 0:
        return 0.0
    precision, recall = same / len(words), same / len(wanted)
    return 2 * precision * recall / (precision + recall)


WORDS = st.lists(
    st.sampled_from(["the", "a", "An", "cat", "Cat's", "sat-", "(mat)", "\u00e9t\u00e9", "!", "THE", "\n", "x"])
).map(" ".join)


@settings(max_examples=50, deadline=None)
@given(WORDS, WORDS)
def test_normalisation_and_f1_equal_squads_script(answer, gold):
    assert squad_normalised(answer) == official(answer)
    if official(gold) and answer.strip():
        assert score(answer, gold)[0] == float(official(answer) == official(gold))
        assert score(answer, gold, "f1")[0] == pytest.approx(official_f1(answer, gold))


NAMES = ["Marie Curie", "the Danube", "A Tale of Two Cities", "U.S. Senate", "1984", "O'Neill", "S\u00e3o Paulo"]
DRESSES = ["{}", "the {}", "{}.", '"{}"', " {} \n", "({})", "**{}**"]


def test_a_right_name_is_accepted_in_any_dress_and_layout_and_no_other_name_is():
    layouts = {"answer_tag": "<answer>{}</answer>", "whole": "{}", "hashes": "#### {}", "boxed": "So \\boxed{{{}}}"}
    for (extract, layout), dress, name in itertools.product(layouts.items(), DRESSES, NAMES):
        text = layout.format(dress.format(name.upper()))
        assert score(text, ["something else", name], extract=extract)[0] == 1.0, text
        for other in {*NAMES} - {name}:
            assert score(text, other, extract=extract)[0] == 0.0, text


def test_the_cost_is_linear_in_the_length():
    assert growth(lambda text: score(text, "a the cat", "f1"), lambda length: "the " * (length // 4), 20_000) < 12


@pytest.fixture
def re2():
    return pytest.importorskip("re2")


def test_a_pattern_matches_the_whole_answer(re2):
    table = [
        (r"\d{4}-\d{2}-\d{2}", "2024-01-31", 1.0), (r"\d{4}", "in 2024", 0.0), (r"\d{4}", "20245", 0.0),
        (r"\d+", "12\n34", 0.0),
        ("cat|dog", "dog", 1.0), ("cat|dog", "cat dog", 0.0), ("(?i)paris", "PARIS", 1.0), ("(?s)a.b", "a\nb", 1.0),
        ("a.b", "a\nb", 0.0), ("a", "ab", 0.0), ("a$|b", "a\nb", 0.0), ("", "x", 0.0), (".*", "\ud800", 0.0),
        ("caf\u00e9", "caf\u00e9", 1.0),
    ]  # fmt: skip
    for pattern, text, pay in table:
        assert StringMatch(match="pattern", extract="whole", pattern=pattern)(completions=[text]) == [pay], pattern
        assert score(text, pattern, "pattern")[0] == (pay if pattern else None), pattern


def test_a_pattern_that_re2_does_not_support_is_refused_or_makes_its_row_none(re2):
    for pattern in [r"(a)\1", "(?=a)a", "(", "a{2000}", "a)|(b", "\ud800"]:
        with pytest.raises(RewardSpecError, match="`string_match`") as caught:
            build_rewards([{"name": "string_match", "kwargs": {"match": "pattern", "pattern": pattern}}])
        assert "\n" not in str(caught.value)
        assert score("aa", pattern, "pattern") == (None, "no gold")
        assert score("aa", [pattern, "a+"], "pattern") == (1.0, "equal")


def test_a_pattern_that_backtracks_without_end_is_linear(re2):
    for pattern in ("(a*)*b", "(a|aa)+$x", "(x+x+)+y", r"(\w+\s?)*!"):
        reward = StringMatch(match="pattern", extract="whole", pattern=pattern)
        call = lambda length, reward=reward: reward(completions=["a" * length])  # noqa: E731
        assert call(9) == [0.0]
        assert growth(call, int, 50_000) < 12, pattern


def test_one_pattern_needs_no_column_even_if_it_is_empty(re2):
    reward = StringMatch(match="pattern", extract="whole", pattern="")
    assert reward.columns_read == ()
    assert reward(completions=["x"]) == [0.0]
    assert StringMatch(match="pattern", gold_column="gold").columns_read == ("gold",)


def test_without_google_re2_a_pattern_is_refused_with_the_fix(monkeypatch):
    from grpo_rewards.strict import linear_search

    linear_search.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "re2", None)
    with pytest.raises(ValueError, match=r"grpo-rewards\[patterns\]"):
        StringMatch(match="pattern", pattern="a")
    linear_search.cache_clear()
