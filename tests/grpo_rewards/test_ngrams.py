"""The repetition penalty: its formula, TRL's on tokens, loops that a naive rule would miss, and bounds."""

import pickle
import random

import pytest

from grpo_rewards import repetition
from grpo_rewards.ngrams import Repetition, repeated_share, without_counters, words
from tests.support.growth import growth


def score(text, **arguments):
    (result,) = Repetition(**arguments)(completions=[text])
    return result


def test_a_completion_earns_the_pay_of_the_table():
    assert score("one two three and four") == 0.0
    assert score("one two three one two three") == pytest.approx(-1 / 4)  # the last of 4 trigrams occurred before
    assert score("x " * 102) == pytest.approx(-0.99)
    assert score("two words") == score("") == 0.0
    assert score("x " * 102, pay_repeated=-0.5) == pytest.approx(-0.495)
    assert score("a a b a a", ngram=2) == pytest.approx(-1 / 4)
    assert score("a b a", ngram=1) == pytest.approx(-1 / 3)


def test_variety_can_be_paid_for_and_an_empty_completion_earns_nothing():
    variety = {"pay": 1, "pay_repeated": 0}
    assert score("one two three and four", **variety) == 1.0
    assert score("x " * 102, **variety) == pytest.approx(0.01)
    assert score("", **variety) == score("one two", **variety) == 0.0


def test_plain_words_are_counted_as_open_r1_counts_them():
    def open_r1(text, size=3):  # open-r1's rule from its description: lower-cased words between white space
        split = text.lower().split()
        ngrams = [tuple(split[start : start + size]) for start in range(len(split) - size + 1)]
        return -(1 - len(set(ngrams)) / len(ngrams)) if ngrams else 0.0

    rng = random.Random(0)
    for _ in range(300):
        text = " ".join(rng.choice(["The", "cat", "sat", "on", "a", "MAT"]) for _ in range(rng.randrange(30)))
        assert score(text) == pytest.approx(open_r1(text))


LOOP = "the cat sat on the mat "
# Loops that words between white space would miss: the penalty would be zero or nearly zero.
EVASIONS = {
    "no spaces": "hahaha" * 50, "one letter": "a" * 1000, "a word without spaces": "abcdefgh" * 40,
    "marks": "!" * 1000, "marks with spaces": "! " * 100, "underscores": "_" * 80,
    "marks behind a word": "wow" + "!" * 500, "emoji": "\U0001f642" * 100, "Chinese": "\u6211\u662f" * 50,
    "Thai": "\u0e01\u0e32" * 50, "other case each time": (LOOP + LOOP.upper() + LOOP.title()) * 5,
    "other punctuation each time": "".join(LOOP.replace(" ", mark + " ") for mark in ".,;:!?") * 3,
    "brackets and quotes": f"{LOOP} ({LOOP}) '{LOOP}' **{LOOP}**" * 3,
    "invisible characters": "".join(LOOP.replace("a", "a" + mark) for mark in "\u200b\u200c\u2060\ufeff\u00ad") * 3,
    "fillers and joiners": "".join(LOOP.replace("a", "a" + mark) for mark in "\u034f\u115f\u180e\u2800\uffa0") * 3,
    "tag characters": "".join(LOOP.replace("a", "a" + chr(0xE0041 + number)) for number in range(20)),
    "other widths and styles": "".join(
        "".join(chr(ord(letter) + shift) if letter.isalpha() else letter for letter in LOOP)
        for shift in (0, 0xFF41 - 97, 0x1D41A - 97, 0x1D5BA - 97)),
    "an accent apart and on its letter": (LOOP.replace("a", "e\u0301") + LOOP.replace("a", "\u00e9")) * 3,
    "a counted loop": "".join(f"{number}. {LOOP}" for number in range(40)),
    "in the thinking": f"<think>{LOOP * 20}</think> Done.",
}  # fmt: skip


def test_an_evasion_is_penalised():
    assert [kind for kind, text in EVASIONS.items() if score(text) >= -0.5] == []


# Loops that differ in a number that goes up or down, and the same loops without it.
COUNTED = {
    "attached": (" ".join(f"wait{number}" for number in range(200)), "wait " * 200),
    "attached, from above": (" ".join(f"hmm{number}" for number in range(900, 700, -1)), "hmm " * 200),
    "one letter": (" ".join(f"w{number}" for number in range(200)), "w " * 200),
    "Chinese": ("".join(f"\u7b49{number}" for number in range(200)), "\u7b49w" * 200),
    "apart": (" ".join(f"wait {number}" for number in range(200)), "wait w " * 200),
    "in brackets": (" ".join(f"({number}) {LOOP}" for number in range(50)), ("w " + LOOP) * 50),
    "named lines": ("\n".join(f"Step {number}: {LOOP}" for number in range(1, 51)), ("step w " + LOOP) * 50),
    "two words in turn": (" ".join(f"{'wait' if n % 2 else 'hmm'} {n}" for n in range(200)), "wait w hmm w " * 100),
}


def test_a_counter_does_not_hide_a_loop():
    assert [kind for kind, (counted, plain) in COUNTED.items() if score(counted) > score(plain) + 0.05] == []


COUNTING = {
    "numbers": " ".join(map(str, range(1, 2001))),
    "even numbers": ", ".join(map(str, range(0, 4000, 2))),
    "a numbered list": "\n".join(f"{number}. {random.Random(number).getrandbits(60):x}" for number in range(1, 500)),
    "a table of products": "\n".join(f"7 x {number} = {7 * number}" for number in range(1, 30)),
}


def test_counting_without_a_loop_is_not_penalised():
    assert [kind for kind, text in COUNTING.items() if score(text) <= -0.02] == []


PROSE = """To find how many eggs are left, we first add up what the family uses. At breakfast three are eaten, and
four more go into muffins for friends; that makes 3 + 4 = 7. The ducks lay sixteen a day, so 16 - 7 = 9 remain for the
market. Each one sells for $2, hence she earns 9 * 2 = 18 dollars every day."""
HARMLESS = {
    "prose": PROSE,
    "a list": "\n".join(f"- {word} is a fruit" for word in ("Apple", "Pear", "Plum")),
    "LaTeX": "\\frac{a+b}{c} = \\frac{a}{c} + \\frac{b}{c}, \\sqrt{x^{2}} = |x|",
    "a hash": f"{random.Random(0).getrandbits(1600):x}",
    "Chinese prose": "\u6211\u4eca\u5929\u53bb\u5e02\u573a\u4e70\u4e86\u4e09\u4e2a\u82f9\u679c",
}  # fmt: skip


def test_text_that_does_not_repeat_is_hardly_penalised():
    assert [kind for kind, text in HARMLESS.items() if score(text) <= -0.25] == []


def test_a_text_is_split_into_the_expected_words():
    assert words("The cat's MAT, (the) cat!") == ["the", "cat", "s", "mat", "the", "cat"]
    assert words("3 + 4 = 7") == ["3", "+", "4", "=", "7"]
    assert words("\u6211\u662fAnna") == ["\u6211", "\u662f", "anna"]
    assert words("c\u200ba\u00adt \ufe0f\u6211") == ["cat", "\u6211"]
    assert words("x" * 30) == ["xxxx"] * 7 + ["xx"]
    assert words("") == words(" \n\t") == []
    assert repeated_share([1, 2], 3) is None


def test_metrics_kind_and_either_shape_of_completions():
    metrics = {}
    texts = ["x " * 102, [{"role": "assistant", "content": "x " * 102}], ""]
    assert repetition(completions=texts, log_metric=metrics.__setitem__) == pytest.approx([-0.99, -0.99, 0.0])
    assert metrics == {"rewards/repetition/repeated": pytest.approx(0.66)}
    assert (repetition.kind, repetition.highest_pay) == ("other", 0.0)
    assert [Repetition(pay=pay, pay_repeated=-2).highest_pay for pay in (1, -1)] == [1.0, 0.0]
    assert pickle.loads(pickle.dumps(repetition)) == repetition
    assert repetition(completions=[]) == []


def test_a_bad_argument_names_its_key():
    for key, values in {"ngram": (0, 101, True, 2.0), "pay": ("much",), "pay_repeated": (0,)}.items():
        for value in values:
            with pytest.raises(ValueError, match=key):
                Repetition(**{key: value})


def test_the_cost_is_linear_in_the_length():
    assert growth(score, lambda length: "a!" * (length // 2), 30_000) < 12


def test_a_run_is_a_word_up_to_a_length_and_is_cut_beyond():
    table = [
        ("x" * 24, ["x" * 24]), ("x" * 25, ["xxxx"] * 6 + ["x"]), ("!" * 7, ["!" * 7]), ("!" * 8, ["!!!!"] * 2),
        ("wow" + "!" * 7, ["wow"]), ("wow" + "!" * 9, ["wow", "!!!!", "!!!!", "!"]), ("a - b", ["a", "-", "b"]),
        ("a-b", ["a", "b"]), ("\u00c9T\u00c9", ["\u00e9t\u00e9"]), ("\u00e9" * 25, ["\u00e9" * 4] * 6 + ["\u00e9"]),
    ]  # fmt: skip
    assert [(text, words(text)) for text, expected in table if words(text) != expected] == []


def test_a_number_that_continues_a_progression_is_masked():
    table = [
        ("wait7 wait8 wait9", "wait7 wait8 wait#"), ("w9 w7 w5 w4", "w9 w7 w# w4"), ("w7 w7 w7", "w7 w7 w7"),
        ("w1 hmm1 w2 hmm3 w3 hmm5", "w1 hmm1 w2 hmm3 w# hmm#"), ("w1 w2 w4 w6", "w1 w2 w4 w#"),
        ("go 1 go 2 go 3 go", "go 1 go 2 go # go"), ("a 1 a 2 a 3 a", "a 1 a 2 a 3 a"), ("1 2 3 4", "1 2 3 4"),
        ("wait 40 wait 32 wait 24 wait", "wait 40 wait 32 wait # wait"),
        ("go 1 a 2 go 3", "go 1 a 2 go 3"), ("a 1 go a 2 go a 3 go", "a 1 go a 2 go a # go"), ("", ""),
        (" ".join(f"w{10**18 + n}" for n in range(3)), " ".join(f"w{10**18 + n}" for n in range(3))),
        (" ".join(f"w{10**17 + n}" for n in range(3)), f"w{10**17} w{10**17 + 1} w#"),
    ]  # fmt: skip
    assert [text for text, expected in table if without_counters(text.split()) != expected.split()] == []


def test_the_share_of_repeated_ngrams():
    table = [("aaa", 1, 2 / 3), ("ab", 2, 0), ("abab", 2, 1 / 3), ("abcabc", 3, 1 / 4)]
    assert [repeated_share(units, ngram) for units, ngram, _ in table] == pytest.approx([share for *_, share in table])
    assert repeated_share("", 1) is repeated_share("a", 2) is None
