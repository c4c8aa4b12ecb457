"""Surface forms of right and wrong answers, texts made to earn an undeserved reward, and golds."""

import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_rewards.math.answers import extract_answer
from grpo_rewards.math.comparison import Judge
from grpo_rewards.math.correctness import GSM8KCorrectness, MathCorrectness
from grpo_rewards.math.golds import MAX_GOLDS, Gold, accepted_golds, gold_answer, read_golds
from grpo_rewards.math.numbers import answer_number, parse_number

SMALL_WORDS = """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
"""
ONES, TENS = SMALL_WORDS.split()[:20], ["", "", *SMALL_WORDS.split()[20:]]


def words(n: int) -> str:
    """Return the English words of a number, by a speller independent of the parser."""
    if n < 0:
        return "minus " + words(-n)
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + (f"-{ONES[n % 10]}" if n % 10 else "")
    if n < 1000:
        return f"{ONES[n // 100]} hundred" + (f" and {words(n % 100)}" if n % 100 else "")
    for scale, name in ((10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if n >= scale:
            rest = n % scale
            return f"{words(n // scale)} {name}" + (f" {'and ' if rest < 100 else ''}{words(rest)}" if rest else "")
    raise AssertionError


def translated(text: str, digits: str) -> str:
    return text.translate({ord(ascii_digit): digit for ascii_digit, digit in zip("0123456789", digits, strict=True)})


def signed(n: int, dress: str) -> str:
    return ("-" if n < 0 else "") + dress.format(abs(n))


SEPARATORS = {",": ",", "space": " ", "nbsp": "\xa0", "narrow nbsp": "\u202f", "thin space": "\u2009", "_": "_",
              "\\,": "\\,", "{,}": "{,}", ",\\!": ",\\!", "'": "'", "’": "’"}  # fmt: skip
DRESSES = [
    "**{}**", "({})", "${}$", "\\({}\\)", "\\[{}\\]", "\\boxed{{{}}}", "$\\boxed{{{}}}$.", "\\text{{{}}}", "{} dollars",
    "${}", "\\${}", "{} cm", "{}\\%", "x = {}", "= {}", "Answer: {}", "{}.0", " {}\n", "$\\${}$", "\u200b{}",
    "{}", "{}.", "{}.00", "*{}*", "__{}__", "`{}`", '"{}"', "'{}'", "“{}”", "‘{}’", "[{}]", "\\mathbf{{{}}}",
    "\\textbf{{{}}}", "\\left({}\\right)", "USD {}", "{} eggs per day", "{} cm²", "{} km/h", "{}~m",
    "{} square feet", "{}°", "{}%", "{} percent", "{} (dollars)", "{} sq. ft.", "{}€", "£{}", "₹{}", "US${}", "x={}",
    "The final answer is {}", "Total: ${}", "#### {}", "A: {}", "So the answer is **{}**.", "{} times",
    "\\boxed{{{}}} apples", "Answer: **{}** dollars", "{} \\mathrm{{~cm}}", "{} kg·m²", "{}¢", "{}th", "{}-year-old",
    "{}^\\circ\\text{{C}}", "{} per cent", "{} 元", "{},", "{};",
]  # fmt: skip
SPELLED = {
    **{f"sign {sign!r}": (lambda n, sign=sign: sign.format(abs(n)) if n < 0 else str(n))
       for sign in ("−{}", "–{}", "－{}", "- {}", "-${}", "$-{}", "−${}", "-\\${}", "(-{})", "-£{}", "minus {}",
                    "negative {}")},
    **{f"plus {sign!r}": (lambda n, sign=sign: sign.format(n) if n >= 0 else str(n))
       for sign in ("+{}", "+ {}", "+${}")},
    **{f"thousands {name!r}": (lambda n, mark=mark: f"{n:,}".replace(",", mark)) for name, mark in SEPARATORS.items()},
    **{f"thousands {name!r} and cents": (lambda n, mark=mark: f"${n:,}.00".replace(",", mark).replace("$-", "-$"))
       for name, mark in SEPARATORS.items()},
    "full width": lambda n: translated(str(n), "０１２３４５６７８９").replace("-", "－"),
    "full width, separated": lambda n: translated(f"{n:,}", "０１２３４５６７８９").replace(",", "，"),
    "mathematical bold": lambda n: translated(str(n), "𝟎𝟏𝟐𝟑𝟒𝟓𝟔𝟕𝟖𝟗"),
    "Arabic-Indic": lambda n: translated(str(n), "٠١٢٣٤٥٦٧٨٩"),
    "zero width inside": lambda n: "\u200b".join(str(n)),
    "scientific": lambda n: f"{n / 10}e1",
    "scientific, capital": lambda n: f"{n / 100}E+02",
    "scientific, LaTeX": lambda n: f"{n / 10} \\times 10^{{1}}",
    "scientific, unit": lambda n: f"{n / 10} × 10^1 dollars",
    "scientific, superscript": lambda n: f"{n / 100} × 10²",
    "scientific, negative": lambda n: f"{n}0e-1",
    "fraction": lambda n: f"{3 * n}/3",
    "fraction, LaTeX": lambda n: signed(n, "\\frac{{{}}}{{1}}"),
    "fraction, display": lambda n: f"$\\dfrac{{{2 * n}}}{{2}}$",
    "words": words,
    "leading zero": lambda n: signed(n, "0{}"),
    "Words": lambda n: words(n).capitalize() + ".",
    "words, unit": lambda n: f"{words(n)} dollars",
    "words, no hyphen": lambda n: words(n).replace("-", " "),
    "thousand": lambda n: f"{n / 1000} thousand" if n % 1000 == 0 else str(n),
}  # fmt: skip
FORMS = {**{dress: dress.format for dress in DRESSES}, **SPELLED}
VALUES = [
    0, 1, 5, 18, 20, 72, 100, 101, 110, 540, 999, 1000, 1024, 5600, 65960, 114200, 276000, 1450000, -3, -10, -2500
]  # fmt: skip


def near_misses(value: int) -> set[int]:
    """Return wrong values that a sloppy reader takes for `value`."""
    shown = str(abs(value))
    others = {value + 1, value - 1, -value, value * 10, value * 100, value * 1000, value + 1000, value // 10}
    return (others | {int(shown + shown[-1]), int(shown[::-1]), int(shown[:3])}) - {value}


def check_forms(cells):
    """Check that each form of a value is accepted for its gold, and no form of a near miss is."""
    reward, mistakes = GSM8KCorrectness(), []
    for form, value in cells:
        spell = FORMS[form]
        golds = [str(value), f"{value:,}", f"Some steps.\n#### {value:,}"]
        right = reward(completions=[f"<answer>{spell(value)}</answer>"] * 3, answer=golds)
        wrong = [f"<answer>{spell(other)}</answer>" for other in near_misses(value)]
        paid = set(reward(completions=wrong, answer=[str(value)] * len(wrong)))
        if not set(right) <= {1.5, 2.0} or paid != {0.0}:
            mistakes.append((form, value, right, paid))
    assert mistakes == []


def test_a_form_is_accepted_for_the_right_value_and_no_wrong_one():
    """Check each form with two values, so that each value occurs in many forms."""
    check_forms([(form, VALUES[(number + 5 * k) % len(VALUES)]) for number, form in enumerate(FORMS) for k in range(2)])


@pytest.mark.slow
def test_every_form_of_every_value_is_accepted():
    check_forms([(form, value) for form in FORMS for value in VALUES])


NUMBERS = [
    ("1 1/2", Fraction(3, 2)), ("1\\frac{1}{2}", Fraction(3, 2)), ("1½", Fraction(3, 2)), ("½", Fraction(1, 2)),
    ("-\\frac12", Fraction(-1, 2)), ("0.5", Fraction(1, 2)), ("3/4 cups", Fraction(3, 4)), ("1.5 million", 1500000),
    ("$18k", 18000), ("five thousand a year", None), ("a k", None), ("1.5 Million dollars", 1500000),
    ("18 maybe", None), ("18 roughly", None), ("negative 3", -3), ("minus two hundred", -200), ("--18", None),
    ("-$-18", None), ("+-3", None), ("1" * 1000, int("1" * 1000)), ("1" * 1001, None), ("1 4/4", None),
    ("1,200 1/2", Fraction(2401, 2)), ("1/0", None), ("1 3/2", None), ("1" * 400, int("1" * 400)),
    ("1" * 2000, None), ("five twenty", None), ("twenty zero", None), ("five thousand two thousand", None),
    ("ten eight", None), ("an apple", None), ("two million thousand", None), ("1e1000", 10**1000), ("1e1001", None),
    ("1e-1000", Fraction(1, 10**1000)), ("18 km/", None), ("18 eggs per day for each hen", 18),
    ("18 eggs per day for each old hen", None), ("eggs: 18", 18), ("perhaps: 18", None), ("twelve eggs: 18", None),
    ("half eggs: 18", None), ("18 dozen", 18), ("18 dozens", 18), ("18 quarter", None), ("18 thousand maybe", None),
    ("$18 saved", 18), ("18 saved", None), ("18% saved", 18), ("nineteen hundred", 1900), ("twenty fifteen", None),
    ("ninety nine", 99), ("one hundred and five", 105), ("one hundred hundred", None), ("zero", 0),
    ("one thousand five hundred", 1500), ("one thousand thousand", None), ("one trillion", 10**12),
    ("one trillion two billion", 1_002_000_000_000), ("two billion trillion", None),
    ("two thousand and twelve apples", 2012), ("an hundred", 100), ("USD 18 saved", 18), ("-$18 saved", -18),
    ("+ 18 saved", None), ("1.5 × 10^3", 1500), ("2*10^{-2}", Fraction(1, 50)), ("1 x 10^1000", 10**1000),
    ("1 x 10^1001", None), ("1e-1001", None), ("2/4 cups", Fraction(1, 2)), ("18km", 18), ("18ab", None),
    ("18 x", None), ("18 m", 18), ("18 α", None), ("18 元", 18), ("18th", 18), ("18 cm^2", 18),
    ("Negative 1/2", Fraction(-1, 2)), ("(18)", 18), ("(1,800)", None), ("** minus 18** apples", -18),
    ("1/2 saved", None), ("18 α m", None), ("18 eggs per day for each old", 18), ("18 sT", None), ("18rd", None),
    ("18 dozen eggs", 18), ("perhaps = 18", None), ("Tom = 18", 18), ("Tom: 18", None), ("one = 18", None),
    ("half = 18", None), ("about = 18", None), ("0.0", 0), ("5.", 5), ("nine hundred ninety nine thousand", 999_000),
    ("twenty nine ten", None), ("third = 18", None), ("TOTAL: 18", 18), ("1~800", 1800),
]  # fmt: skip
# Numbers of golds, whose words are trusted: any word is a unit unless it is a number or a doubt.
NUMBERS_OF_GOLDS = [
    ("18 Äpfel rot", 18), ("Tom: 18", 18), ("perhaps: 18", None), ("about: 18", None), ("twelve: 18", None),
    ("half: 18", None), ("18 maybe", None), ("18 eggs thousand", None), ("18 eggs five", None),
    ("18 and more", None), ("18 half", None), ("18 dozen", 18), ("18 x", None), ("18 m", 18), ("18 eggs hex", 18),
    ("18 eggs 三", None), ("18 eggs MAYBE", None), ("18 eggs FIVE", None), ("dozen: 18", None),
    ("fifteen Äpfel", 15), ("fifteen x", None),
]  # fmt: skip
# Equations and sentences: an equation states its right side if every side has its value.
STATEMENTS = [
    ("17 = 18", None), ("5 - 5 = 0", 0), ("12 eggs + 6 eggs = 18 eggs", 18), ("12 thousand + 6 = 18", None),
    ("12 Äpfel + 6 Äpfel = 18", 18), ("12 foo + 6 = 18", 18), ("2" + " = 2" * 5, 2), ("2" + " = 2" * 6, None),
    ("9*2 = 17 + 1 = 18", 18), ("9*2 = 17 = 18", None), ("17 + 1 = She has 18 apples left.", 18),
    ("x + 1 = 18", None), ("17 + 1 = y", None), ("She has 18." + " " * 989, 18), ("She has 18." + " " * 990, None),
    ("She has 5 cm^2 left.", 5),
]  # fmt: skip


def test_a_text_is_read_as_the_expected_number():
    assert [(text, parse_number(text)) for text, value in NUMBERS if parse_number(text) != value] == []
    read = [(text, parse_number(text, trusted=True), value) for text, value in NUMBERS_OF_GOLDS]
    assert [row for row in read if row[1] != row[2]] == []
    assert [(text, answer_number(text)) for text, value in STATEMENTS if answer_number(text) != value] == []


# Answers that some peer rewards, or nearly rewards. The gold is 18.
TRAPS = [
    "17, 18", "18 or 17", "17 and 18", "17/18", "17;18", "17 18", "17 = 18", "18 = 17", "18 (or 19)", "16–18",
    "18 to 20", "either 17 or 18", "18?17", "18e2", "18E-1", "18,00", "18:00", "1.8.0", "18^2", "18²", "18x", "18i",
    "18\\pi", "18π", "18!", "18+", ">18", "≤18", "±18", "--18", "18 thousand", "18k", "18 hundred", "18万", "18 + 0",
    "9 * 2", "2*9", "3^2*2", "18 and a half", "1 8", "0.18", "-18", "18 minutes 30 seconds",
    "In 3 days she has 18 apples", "She has 3 boxes, so 18", "not 18", "18 is wrong", "not equal to 18",
    "less than 18", "eighteen or nineteen", "eighteen hundred", "eighteen nineteen", "one eight", "twenty eighteen",
    "√18", "\\sqrt{324}", "\\boxed{17}\\boxed{18}", "\\boxed{17} or \\boxed{18}", "**17** **18**", "18₈",
    "18 mod 20", "0x12", "about 18", "~18", "≈ 18", "18 ± 1", "$17$ $18$", "17</b>18", "<answer>17</answer",
    "18 / 0", "1/18", "18,000",
]  # fmt: skip


@pytest.mark.parametrize("reward", [GSM8KCorrectness(), MathCorrectness()], ids=lambda reward: reward.name)
def test_a_trap_earns_nothing(reward):
    texts = [f"<think>18</think><answer>{answer}</answer>" for answer in TRAPS]
    if reward.extract == "auto":
        for layout in ("The answer is {}.", "Steps.\n#### {}", "So \\boxed{{{}}}."):
            # Outside a tag these are different texts: two lines, or two boxes of which the last counts.
            texts += [layout.format(answer) for answer in TRAPS if "\n" not in answer and "boxed" not in answer]
    scores = reward(completions=texts, answer=["18"] * len(texts))
    assert [text for text, score in zip(texts, scores, strict=True) if score != 0.0] == []


MISPLACED = [
    "<think>\\boxed{18}</think><answer>17</answer>", "<answer>17</answer> No, 18.", "<answer>17</answer>\n#### 18",
    "<think><answer>18</answer></think>", "<think><answer>18</answer>", "<think>a</think><think><answer>18</answer>",
    "<think><answer>18</answer></think><answer>17</answer>", "<answer>18</answer><answer>17</answer>", "<answer>18",
    "<answer>18<answer>", "<think>#### 18</think> #### 17", "<think>The answer is 18.</think> I am not sure.",
    "#### 18\n#### 17", "\\boxed{18} \\boxed{17}", "\\boxed{18", "The answer is 18. The answer is 17.", "A: 18\nA: 17",
    "18", "",
]  # fmt: skip


@pytest.mark.parametrize("extract", ["answer_tag", "auto"])
def test_a_misplaced_gold_earns_nothing(extract):
    scores = GSM8KCorrectness(extract=extract)(completions=MISPLACED, answer=["18"] * len(MISPLACED))
    assert [text for text, score in zip(MISPLACED, scores, strict=True) if score != 0.0] == []


LAYOUTS = [
    ("answer_tag", "<answer>17</answer> then <answer> 18 </answer> done", "18"),
    ("answer_tag", "no thinking opened </think><answer>18</answer>", "18"),
    ("answer_tag", "a </think><answer>17</answer> b </think>", None),
    ("hashes", "#### 17\nmore\n####18 \nend", "18"),
    ("boxed", "\\boxed{17} and \\boxed{\\frac{1}{2}} so", "17, \\frac{1}{2}"),
    ("boxed", "\\boxed{1 + \\boxed{2} + 3}, {so} it is", "1 + \\boxed{2} + 3"),
    ("a_line", "Because.\nA: 18\nThanks", "18"), ("a_line", "A:18", "18"),
    ("boxed", "<answer>17</answer> \\boxed{18}", "18"),
    ("sentence", "The answer is 3.5 dollars. Done.", "3.5 dollars"), ("sentence", "THE ANSWER IS: 18!", "18"),
    ("sentence", "Answer: $1,234.50.", "$1,234.50"), ("sentence", "The answer isn't 18", None),
    ("sentence", "She answered 18", None), ("auto", "#### Step 4: add\nSo \\boxed{18}.", "18"),
    ("auto", "A: Let me see. The answer is 18.", "18"), ("auto", "The answer is 17.\n#### 18", "18"),
    ("auto", "#### \\sqrt{2}", "\\sqrt{2}"), ("auto", "nothing", None),
    ("auto", "#### A heading\nA: Let me see.", "A heading"),
    ("boxed", "\\boxed{18} " + "It is not \\boxed{17}. " * 19, "18"),
    ("boxed", "\\boxed{18} " + "It is not \\boxed{17}. " * 20, None),
    ("sentence", "The answer is 18. " + "I doubt the answer is 17. " * 20, "18"),
    ("sentence", "The answer is 18. " + "I doubt the answer is 17. " * 21, None),
    ("sentence", "\u0130. The answer is 18.", "18"),
    ("sentence", "Our answers: the answer to the problem is: **18** eggs. Good.", "**18** eggs"),
    ("sentence", "The answer is 18?", None), ("auto", "So \\boxed{x+1}. The answer is 18.", "x+1"),
    ("auto", "#### Steps\nThe answer is a tree.", "a tree"), ("auto", "#### Steps\n\\boxed{}", None),
    ("sentence", "The answer is 3. No, it is 4.", None),
]  # fmt: skip


def test_a_layout_extracts_the_expected_answer():
    for layout, text, answer in LAYOUTS:
        assert extract_answer(text, layout) == answer, (layout, text)
        if layout != "answer_tag":
            assert extract_answer(f"<think>{text}</think> done", layout) is None
            assert text.startswith("A:") or extract_answer(f"<think>hm</think> {text}", layout) == answer


def test_an_answer_in_a_prefilled_block_is_not_extracted():
    text = "The <answer>17</answer> is wrong.</think><answer>18</answer>"
    assert extract_answer(text, prefilled=True) == "18"
    assert extract_answer("<answer>18</answer>", prefilled=True) is None
    assert extract_answer("<reasoning>x</reasoning><answer>18</answer>", tags=("reasoning", "answer")) == "18"


def test_a_gold_has_the_expected_final_answer():
    rewards = (GSM8KCorrectness(), GSM8KCorrectness(extract="hashes"), MathCorrectness())
    table = [
        ("She has 5.\n#### 65,960", "65,960"), ("18", "18"), (" 18 ", "18"), (18, "18"), (2.5, "2.5"), (18.0, "18"),
        (1.234, "1.234"), (0.1, "0.1"), (-3.0, "-3"), (-0.0, "0"), (1e-05, "0.00001"), (1e15, "1000000000000000"),
        (1e16, "1e+16"), ("\\frac{1}{2}", "\\frac{1}{2}"), ("So \\boxed{x^2}.", "x^2"), ("\\boxed{ 5 }", "5"),
        ("Steps.\nA: 18", "18"), ("\\boxed{17}\n#### 18", "18"),
        ("no solution", "no solution"), ("a red house near the hill", "a red house near the hill"),
        ("a red house near the old hill", "a red house near the old hill"),
        ("a red house near the hill of 2 towns and 3 rivers", None),
        ("", None), ("  ", None), (None, None), (float("nan"), None), ([["18"]], None), ("Steps.\n####", None),
        ("#### ", None), ("She sold 48/2 = <<48/2=24>>24 clips in May and 48 in April.", None),
        ({}, None), (True, None), ("Oslo" + " Oslo" * 14, "Oslo" + " Oslo" * 14), ("Oslo" + " Oslo" * 15, None),
    ]  # fmt: skip
    for gold, answer in table:
        assert gold_answer(gold) == answer, gold
        for reward in rewards:
            assert reward(completions=["no answer"], answer=[gold]) == [None if answer is None else 0.0], gold


@settings(max_examples=40, deadline=None)
@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_two_integers_are_equal_only_if_their_values_are(left, right):
    for text in (f"{left:,}", f"{left}.0", words(left) if abs(left) < 10**12 else str(left)):
        assert parse_number(text) == left
    (score,) = GSM8KCorrectness()(completions=[f"<answer>{left:,}</answer>"], answer=[str(right)])
    assert (score > 0) == (left == right)


@settings(max_examples=40, deadline=None)
@given(st.fractions())
def test_a_fraction_is_read_exactly(value):
    assert parse_number(f"{value.numerator}/{value.denominator}") == value
    assert parse_number(f"$\\frac{{{value.numerator}}}{{{value.denominator}}}$") == value


def test_the_best_verdict_among_the_golds_of_a_row():
    """The last figure counts the answers that neither strings nor numbers could decide: one for a row at most."""
    table = [
        (["x^2", "7"], "7.0", "equal", "7", 0), (["x^2", "7"], "x^2", "exact", "x^2", 0),
        (["7", "7.0"], "7.0", "exact", "7.0", 0), (["x^2", "7"], "x*x", "symbolic", "x^2", 1),
        (["x^2", "x+x"], "2x", "symbolic", "x+x", 1), (["x^2", "x+x"], "5x", "wrong", "x^2", 1),
        (["x^2", "7"], "9", "wrong", "x^2", 0), (["x^2", "7"], None, "missing", "7", 0),
        (["2^{10}"], "1024", "equal", "2^{10}", 0), (["red", "blue"], "Blue", "equal", "blue", 1),
        (["dear"], "read", "wrong", "dear", 1), (["1 or 2"], "1 or 2 or 3", "wrong", "1 or 2", 1),
        (["5 m"], "5 ft", "wrong", "5 m", 0), (["5 m"], "5", "equal", "5 m", 0),
        (["x" * 1001], "y", "wrong", "x" * 1001, 1), (["(1,2)"], "(1,2,3)", "wrong", "(1,2)", 1),
        (["6-2*3"], "0", "equal", "6-2*3", 0), (["x+1"], "(" * 25 + "z" + ")" * 25, "timeout", "x+1", 1),
        (["y", "(" * 25 + "x" + ")" * 25, "2x"], "(" * 25 + "z" + ")" * 25, "timeout", "y", 1),
    ]  # fmt: skip
    for golds, answer, verdict, best, rows in table:
        judge = Judge()
        read = tuple(Gold(gold, parse_number(gold, trusted=True)) for gold in golds)
        found, gold = judge.best_verdict(read, answer)
        assert (found, judge.symbolic_rows) == (verdict, rows), (golds, answer)
        assert verdict == "missing" or gold.text == best, (golds, answer)


def test_the_golds_that_a_row_accepts():
    for value, golds in (
        ("a", ["a"]), (["a", "b"], ["a", "b"]), ({"text": ["a"]}, ["a"]), ({"x": 1}, [None]), (("a",), ["a"]),
        (7, [7]), (np.array(["a"]), ["a"]), (["a"] * MAX_GOLDS, ["a"] * MAX_GOLDS), (["a"] * (MAX_GOLDS + 1), []),
    ):  # fmt: skip
        assert accepted_golds(value) == golds


STATED = r"""
    **Answer: 12** | **The final answer is 12.** | __Answer: 12__ | > **Answer: $12$** | **Answer: 12** apples
    <b>Answer: 12</b> | <strong>Answer:</strong> 12 | The answer is <b>12</b>. | ### Answer: 12 🎉 | The answer is 12 ✅
    Answer:¶$$¶12¶$$ | The answer is:¶```¶12¶``` | The answer is \[12\] | The answer is:¶¶$$12$$ apples
    The answer is 12, which is the total. | The answer is 12 because the box is full. | The answer equals 12.
    The answer is 12; she has enough. | The answer is 12, in total, so he earns that much.
    So $\boxed 12$. | So $\fbox{12}$. | \boxed {12} | \boxed{\textbf{12 cm}} | Answer: She pays $12!
    Answer: \boxed{12} | The answer to this problem is 12.
    La respuesta es 12. | **Respuesta: 12** | Die Antwort lautet 12 Äpfel. | Ответ: 12 яблок | 答案是12。 | 答：12页
    정답: 12개 | La réponse finale est $12$. | 正解は12です。 | উত্তর: 12 টাকা | คำตอบคือ 12 บาท | Jibu ni 12.
"""
NOT_STATED = r"""
    Is the answer 12? | Wrong answer: 12 | The answer is 12? I don't know. | Could the answer be: 12? No.
    The answer is 12, which is wrong. | The answer is 12, or 13. | The answer is 12 because I guessed
    The answer is:¶```python¶print(12)¶``` | \boxed{12} and \boxed{13} | La respuesta no es 12.
    Die Antwort ist 12 oder 13.
    Die falsche Antwort ist 12. | 答案不是12。 | Ответ: 12 или 13 | 答：12万 | 答案是12左右。 | La respuesta es 12. No.
"""


def test_the_layouts_of_instruction_tuned_models_are_read():
    for table, pay in ((STATED, 1.0), (NOT_STATED, 0.0)):
        texts = [text.strip().replace("¶", "\n") for text in re.split(r"[|\n]", table) if text.strip()]
        pays = MathCorrectness()(completions=texts, answer=["12"] * len(texts))
        assert [text for text, paid in zip(texts, pays, strict=True) if paid != pay] == []


def test_a_row_with_a_json_list_or_a_choice_and_its_value_accepts_each():
    assert [gold.text for gold in read_golds('["\\\\frac{1}{2}", "0.5"]')] == ["\\frac{1}{2}", "0.5"]
    assert [gold.text for gold in read_golds("\\textbf{(C)}\\ 5")] == ["\\textbf{(C)}\\ 5", "C", "5"]
    assert [gold.text for gold in read_golds('["1"')] == ['["1"']
    assert gold_answer("So $x=\\boxed{2}$, and the sum is $\\boxed{3}$.") == "3"
    assert gold_answer("They are $\\boxed{2}$ and $\\boxed{3}$.") == "2, 3"
