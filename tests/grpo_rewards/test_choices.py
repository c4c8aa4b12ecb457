"""Multiple choice: pay, answers that a naive rule would pay for, shapes of golds and choices, and a generator."""

import pickle
import random
import re
import unicodedata

import numpy
import pytest

from grpo_rewards import choice_correctness
from grpo_rewards import choices as choices_module
from grpo_rewards.choices import ChoiceCorrectness, read_choices, read_gold
from tests.support.grids import only
from tests.support.growth import growth

CITIES = ["Paris", "New York", "New York City", "London"]


def score(text, gold="A", choices=CITIES, **arguments):
    columns = {}
    (result,) = ChoiceCorrectness(**arguments)(
        completions=[text], answer=[gold], choices=[choices], log_extra=columns.__setitem__
    )
    return result, columns["extracted"][0], columns["verdict"][0]


RIGHT = """
A | a | (A) | (a) | [A] | {A} | A. | A) | A: | A! | **A** | *A* | __A__ | `A` | "A" | 'A' | $A$ | \\(A\\) | \\text{A}
\\boxed{A} | \\boxed{\\text{A}} | \\boxed{\\textbf{(A)}} | $\\boxed{\\mathrm{A}}$ | \\boxed{A. Paris} | \\boxed{Paris}
Ａ | （Ａ） | Ⓐ | 𝐀 | A\u200b | A. Paris | A) Paris | (A) Paris | A: Paris | A - Paris | A – Paris | A, Paris | A)Paris
**A.** Paris | **A. Paris** | Paris | paris | PARIS. | "Paris" | **Paris** | Paris (A) | Paris, A | (Paris) | A (Paris)
The answer is A. | The answer is Paris. | the correct answer is (a) | Answer: A | Answer: Paris | **Answer:** A
**Answer: A**
**Final Answer**: (A) Paris | Final answer: **A** | The correct option is (A). | The correct answer is option A: Paris.
So the answer is A. Paris is the capital of France. | The answer is A, because B and C are not capitals.
The answer is A. B is wrong, and so is C. | The best answer is A, since the others (B, C, D) are elsewhere.
Option A is correct. | A is correct. | (A) Paris is the correct answer. | Paris is the right answer. | It's Paris!
I think it's A. | I choose A | I'll go with A | not B but A
The answer is not B but A. | A, not B | A, not B or C | A rather than New York
B is wrong. The answer is A. | The answer is B. Wait, no: the answer is A. | The answer is:\\n\\nA
The answer is: **A**
Option B looks good.\\n\\nAnswer: A. Paris\\n\\nB is not the capital. | Let me see.\\n#### A | # Answer\\n#### A) Paris
<answer>A</answer> | <answer>\\nA. Paris\\n</answer> | <answer>The answer is A</answer> | <answer>Option A</answer>
<answer>A because it is the capital</answer> | <answer>A. It is the capital of France</answer>
<answer>choice (a)</answer>
<think>B? C?</think><answer>A</answer> | <think>The answer is B.</think>The answer is A.
<answer>B</answer><answer>A</answer>
### Final Answer\\n\\nA. Paris | The answer is Paris (option A). | The answer's A | I'd say A. | Pick (A) | A.Paris
My answer is A. | A\\n\\nParis is the capital. | **A**\\n\\nExplanation: it is the capital.
Of these, A is correct. | 答案：A | 答案是A。 | A ✅
Since B is not a capital, the answer is A. | \\boxed{\\textbf{(A) } \\text{Paris}} | The answer is A (Paris), not B.
The answer is indeed A. | The answer is, therefore, A. | The answer to the question is A. | Ans: A
The answer is A = Paris
The answer is A. That the answer is so short is no surprise.
Here's the answer: A | So here's my final answer: A | From his statement, the answer is A.
The only possible answer is A.
The answer is A.\\n\\nB. New York is not the capital. | A. Unlikely as it sounds, Paris.
Only A is correct. | A seems to be the best answer. | I am confident that A is right.
The answer is Paris, which is option A.
<answer>\\boxed{A}</answer> | The answer is B. <answer>A</answer> | \\boxed{B} or rather \\boxed{A}
"""
RIGHT = [text.strip().replace("\\n", "\n").replace("\\\\", "\\") for text in RIGHT.replace("\n", " | ").split(" | ")]


@pytest.mark.parametrize("text", filter(None, RIGHT))
def test_a_right_answer_is_paid(text):
    assert score(text) == (1.0, "A", "right")


# Answers that a search for the letter or the text would pay for. The gold is A (Paris).
TRAPS = {
    "two letters with or": "The answer is A or B.",
    "two letters with and": "A and B",
    "two letters with a comma": "A, B",
    "two letters with a slash": "A/B",
    "two bracketed letters": "(A) (B)",
    "letters in one word": "ABCD",
    "a range of letters": "A-D",
    "a range in words": "A to D",
    "every choice, listed": "A. Paris\nB. New York\nC. New York City\nD. London",
    "every choice, in the tag": "<answer>A, B, C and D</answer>",
    "every choice, each as an option": "Option: D\nOption: C\nOption: B\nOption: A",
    "the first option": "We read the choices. The first option is A.",
    "not, but not, but": "not A but " * 50,
    "two texts": "Paris or London",
    "a letter and another's text": "A. London",
    "a letter and another's text, bracketed": "London (A)",
    "a letter, then another's text as a sentence": "The answer is A. London.",
    "an alternative in the next sentence": "The answer is A. Or B.",
    "a correction in the next sentence": "The answer is A. No wait, B.",
    "a correction on the next line": "The answer is A\nActually, B",
    "a negated letter": "The answer is not A",
    "a negated text": "not Paris",
    "a letter said to be wrong": "A is wrong",
    "a letter said not to be right": "A is not correct",
    "a letter said to be false, in brackets": "(A) is false",
    "a text said to be wrong": "I believe Paris is wrong",
    "neither, nor": "Neither A nor B is correct",
    "either, or": "Either A or B is correct.",
    "anything but": "anything but A",
    "not only": "not only A but B",
    "an exception": "all except A",
    "a condition": "If A is correct, then we lose",
    "an answer on a condition": "The answer is A if B fails",
    "a question": "Is A correct?",
    "a claim with a question mark": "A is correct?",
    "a claim that is doubted": "I doubt the answer is A",
    "a claim that is denied": "I don't think the answer is A.",
    "a claim that others might make": "One might say the answer is A.",
    "a claim that is false": "It is false that the answer is A.",
    "a claim that is retracted": "The answer is A. That is wrong.",
    "a claim that is restated": "The answer is A. I mean B.",
    "a letter and a no": "A, no",
    "a grade with a minus": "A-",
    "a prime": "A'",
    "a time of day": "A.M.",
    "two letters on two lines": "A\nB",
    "a set of letters": "\\boxed{A, B}",
    "letters with an or in a box": "\\boxed{A \\text{ or } B}",
    "a comparison": "A is better than B",
    "a formula": "A = 5",
    "a probability": "The answer is P(A)",
    "a letter with a question mark": "A?",
    "a text with a question mark": "Paris?",
    "a text in a question, behind the claim": "The answer is Paris? No.",
    "a fool's choice": "Answer A is what a fool would pick",
    "a tempting choice": "<answer>Option A is tempting</answer>",
    "the opposite": "The opposite of the answer is A",
    "the letter after": "The letter after the answer is A",
    "another one's claim": "Someone claims the answer is A",
    "a supposed claim": "Suppose the answer is A",
    "a second best claim": "The second best answer is A",
    "a claim and a no": "The answer is A. No.",
    "a claim and its opposite": "The answer is A. The opposite is true.",
    "a lie in the tag": "<answer>The answer is A. I lied.</answer>",
    "reported speech": "The answer is A, they say",
    "denied in German": "nicht A",
    "a crossed out box": "\\cancel{\\boxed{A}}",
    "a hedge": "maybe A",
    "the article": "A city in France",
    "the article at the end of a long answer": "<answer>It is a</answer>",
    "the article after the claim": "The answer is a city",
    "the article in capitals": "THIS IS A TEST",
    "the article in a later sentence": "It is hard to say. A man walks in.",
    "a letter inside a word": "Apple",
    "a letter before a hyphen": "A-level",
    "a letter in a name": "Vitamin A",
    "a grade": "A+",
    "an asterisk that is no emphasis": "A*",
    "a Cyrillic letter": "\u0410",
    "an initial": "A.B.",
    "inside the thinking": "<think>A</think>",
    "inside an unclosed thinking": "<think>The answer is A.",
    "an unclosed tag": "<answer>A",
    "an empty tag after an answer": "A <answer></answer>",
    "the last tag counts": "<answer>A</answer><answer>B</answer>",
    "the last box counts": "\\boxed{A} \\boxed{B}",
    "the last claim counts, and names two": "The answer is A. Hmm. The answer is A or B.",
    "the last claim counts": "The answer is A. So the answer is B.",
    "a longer text that starts with the gold's": "Parisian",
    "nothing": "",
    "a refusal": "I don't know",
    "a letter that is ruled out": "<answer>A is ruled out</answer>",
    "a labelled letter that is ruled out": "<answer>A: eliminated</answer>",
    "a letter in brackets that is ruled out": "<answer>A) can be excluded</answer>",
    "an option that fails": "<answer>Option A fails</answer>",
    "a negation sign": "<answer>!A</answer>",
    "an incorrect answer": "The incorrect answer is A",
    "the worst answer": "The worst answer is A",
    "another's answer": "The student's answer is A",
    "another's answer, with an adjective": "His first answer is A",
    "a previous answer": "The previous answer is A",
    "one possible answer": "One possible answer is A",
    "an example's answer": "Example answer: A",
    "a guess": "The answer is A, I guess",
    "a joke": "The answer is A... just kidding",
    "a second thought": "The answer is A.\n\nOn second thought, B.",
    "a reflection": "The answer is A. On reflection it is B.",
    "a second thought without a comma": "The answer is A. Then again London fits better.",
    "an edit": "The answer is A.\n\nEDIT: B",
    "a second letter on the next line": "The answer is A.\nB.\nC.",
    "another choice too": "I choose A\nI also choose B",
}


@pytest.mark.parametrize("kind", TRAPS)
def test_a_trap_earns_nothing(kind):
    result, named, _ = score(TRAPS[kind])
    assert (result, named == "A") == (0.0, False)


SIGNED = ["-19", "-10", "19", "10"]
TRUTHS = ["True, True", "False, False", "True, False", "False, True"]


@pytest.mark.parametrize(
    ("choices", "right", "wrong"),
    [
        (SIGNED, "(A) -19 | (A)-19 | A - 19 | (A) −19 | A: -19 is right | The answer is A. -19 | \\text{(A) }-19",
         "(A) 19 | (A) 10 | (C) -19 | (C)-19 | The answer is C. -19"),
        (["7", "x"], "(A) 7 | A - 7", "(A) -7 | (A) -7 because it fits"),
        ([".5", "5!", "5"], "(A) .5 | (B) 5! | (C) 5", "(C) .5 | (C) 5! | (A) 5"),
        (TRUTHS, "The answer is D. False, True | (D) False, True | (D) False, True, since it is so | D\nFalse, True",
         "The answer is D. True, False | The answer is D. False, True. That is wrong. | (D) True, False"),
        (["Yes", "No"], "The answer is B. No. | (B) No, since it rains",
         "The answer is A. No. | The answer is B. No, A."),
        (["Possible", "Impossible"], "The answer is B. Impossible", "The answer is A. Impossible"),
        (["New York", "New York City"], "(B) New York City, the big one", "(A) New York City, the big one"),
        (["3", "4"], "(A)3", "(A)2 | (A)-3 | (A)-(B)"),
    ],
)  # fmt: skip
def test_a_letter_and_a_text_with_a_sign_or_a_denial_must_agree(choices, right, wrong):
    """The separators before a text, a minus sign among them, and words such as "False" are read as the text first."""
    for text in right.split(" | "):
        gold = re.search(r"\b[A-D]\b", text)[0]
        assert score(text, gold=gold, choices=choices)[0] == 1.0, text
    for text in wrong.split(" | "):
        for gold in "ABCD"[: len(choices)]:
            assert score(text, gold=gold, choices=choices)[0] == 0.0, text


CAPITALS = ["Paris", "London", "Oslo", "Rome"]
CLAIMS_BY_LANGUAGE = {
    "ar": "الإجابة: C | الإجابة الصحيحة هي C. | الجواب هو C | لذلك، الإجابة هي C",
    "bn": "উত্তর: C | সঠিক উত্তর হল C। | **উত্তর: C**",
    "de": "Antwort: C | **Antwort:** C | Die richtige Antwort lautet: C) Oslo | Daher ist die richtige Antwort C. | "
    "Die Antwort ist C, weil Oslo die Hauptstadt ist. | ### Antwort\nC",
    "es": "La respuesta es C. | **Respuesta: C** | La opción correcta es la C) Oslo. | La respuesta es Oslo. | "
    "La respuesta es A. No, la respuesta es C. | Respuesta: La respuesta correcta es C. | "
    "La respuesta es A.\nAnswer: C",
    "fr": "Réponse : C | La réponse est C. | La bonne réponse est la C, car A est faux. | La solution est donc C.",
    "hi": "उत्तर: C | सही उत्तर C है। | सही उत्तर है C.",
    "id": "Jawaban: C | Jawaban yang benar adalah C. | Jadi, jawabannya adalah C. Oslo",
    "it": "Risposta: C | La risposta corretta è la C. | L'opzione corretta è l'opzione C.",
    "ja": "正解はC | 正解はCです。 | 答え：C | したがって、答えは(C)です。 | 正しい選択肢はCです。",
    "ko": "정답: C | 정답은 C입니다 | 따라서 정답은 (C) Oslo입니다. | 답은 C이다.",
    "pt": "Resposta: C | A resposta correta é a letra C. | A resposta é a C.",
    "ru": "Ответ: C | ОТВЕТ: C | Правильный ответ — C. | Правильный ответ C | Ответ: вариант C",
    "sw": "Jibu: C | Kwa hiyo, jibu ni C. | Jibu sahihi ni C.",
    "te": "సమాధానం: C | సరైన సమాధానం C.",
    "th": "คำตอบ: C | ดังนั้นคำตอบคือ C | คำตอบที่ถูกต้องคือ ข้อ C",
    "yo": "Ìdáhùn: C | Idahun: C | Ìdáhùn tó tọ́ ni C.",
    "zh": "答案：C | 答案是C。因为别的不对。 | 正确答案是C，因为更好 | 所以答案选C | 故选C | 【答案】C | 答案是C选项。",
    "layouts": "<answer>La respuesta es C</answer> | \\boxed{答案：C} | #### Respuesta: C",
}  # fmt: skip


@pytest.mark.parametrize("language", CLAIMS_BY_LANGUAGE)
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_an_answer_may_be_labelled_in_another_language(language, form):
    for text in unicodedata.normalize(form, CLAIMS_BY_LANGUAGE[language]).split(" | "):
        assert score(text, gold="C", choices=CAPITALS) == (1.0, "C", "right"), text


NO_CLAIMS = r"""
الإجابة ليست C | সঠিক উত্তর C নয় | Die Antwort ist nicht C | Die falsche Antwort ist C
Die Antwort ist C. Das ist falsch.
Die Antwort ist vielleicht C | La respuesta no es C | La respuesta es C o D | La respuesta es C, quizás
La respuesta es C. O D. | La respuesta es C.\nNo, D. | La respuesta es C) Rome | La respuesta es C. Rome
La respuesta es C.\nLa respuesta es D. | La respuesta del alumno es C | ¿La respuesta es C? | Si la respuesta es C
The answer is C. La respuesta es D. | La réponse n'est pas C | La réponse est C, ou D | उत्तर C नहीं है | गलत उत्तर: C
Jawabannya bukan C | Jawaban yang salah adalah C | La risposta non è C | 正解はCではありません | 正解はCかD | 不正解はC
正解はC。いや、D。 | 오답은 C입니다 | 정답은 C가 아닙니다 | 정답은 C 또는 D | A resposta não é C | Sua resposta: C
Ответ не C | Ответ: не C | Неправильный ответ: C | Ответ C или D | Jibu si C | คำตอบไม่ใช่ C | 答案不是C | 错误的答案是C
小明的答案是C | 如果答案是C | 我不认为答案是C | 答案是C？ | 答案是C还是D
答案是C。不对。 | <answer>La respuesta no es C</answer>
<answer>La respuesta es A. La respuesta es C</answer>
"""


@pytest.mark.parametrize("line", NO_CLAIMS.strip().splitlines())
def test_an_answer_that_another_language_denies_or_doubts_earns_nothing(line):
    for text in line.replace("\\n", "\n").split(" | "):
        result, named, _ = score(text, gold="C", choices=CAPITALS)
        assert (result, named == "C") == (0.0, False), text


MORE_TRAPS = {
    "the pronoun, and I is a choice": ("I think so", "I", list("abcdefghijk")),
    "the pronoun after a claim": ("The answer is I don't know", "I", [str(n) * 3 for n in range(10)]),
    "a text within another choice's": ("New York City", "B", CITIES),
    "a text that holds another choice's": ("New York", "C", CITIES),
    "a text in another case than the gold's": ("polish", "A", ["Polish", "polish"]),
    "a text that two choices share": ("cat", "A", ["cat", "cat"]),
    "a text that is another choice's letter": ("A", "B", {"A": "B", "B": "A"}),
    "a sign": ("2", "A", ["-2", "2"]),
    "a sign that no choice has": ("-2", "A", ["2", "3"]),
    "a power": ("23", "A", ["2*3", "5"]),
    "a currency": ("£5", "A", ["€5", "$5"]),
    "a superscript": ("x2", "A", ["x²", "x"]),
    "a decimal that starts with a letter that is a number": ("1.5", "1", {"1": "2.5", "2": "1.5"}),
    "a number that holds the gold's": ("12", "A", ["1", "2"]),
    "a factorial": ("5!", "A", ["5", "120"]),
    "a language whose name starts another's": ("C++", "C", {"B": "C++", "C": "C#"}),
    "an inverted text": ("not enough", "A", ["enough", "too much"]),
    "another choice's text that names the letter": ("Both A and B", "A", ["x", "y", "Both A and B"]),
    "its text beside a letter": ("C. Both A and B", "A", ["x", "y", "Both A and B"]),
    "a letter that is none of the choices": ("E", "A", CITIES),
    "yes and no": ("Yes and no", "B", {"A": "Yes", "B": "No"}),
    "another's yes or no": ("A. No", "A", {"A": "Yes", "B": "No"}),
    "the last number of an expression": ("2 + 2 = 4", "B", ["2", "4"]),
    "letters alone: another letter follows": ("A. Vitamin C", "A", None),
    "another row's letters": ("A", "B", {"A": "London", "B": "Paris"}),
}


@pytest.mark.parametrize("kind", MORE_TRAPS)
def test_a_trap_in_the_choices_earns_nothing(kind):
    text, gold, choices = MORE_TRAPS[kind]
    assert score(text, gold, choices)[0] == 0.0


@pytest.mark.parametrize(
    ("text", "gold", "choices"),
    [
        ("Both A and B", "C", ["x", "y", "Both A and B"]),
        ("C. Both A and B", "C", ["x", "y", "Both A and B"]),
        ("The answer is C. Both A and B", "C", ["x", "y", "Both A and B"]),
        ("None of the above", "B", ["x", "None of the above"]),
        ("It is not raining", "A", ["It is not raining", "It is raining"]),
        ("A cat", "B", ["a dog", "a cat"]),
        ("the Eiffel Tower", "A", ["Eiffel Tower", "Louvre"]),
        ("The answer is St. Louis. It lies on a river.", "A", ["St. Louis", "London"]),
        ("(1, 2)", "B", ["(2, 1)", "(1,2)"]),
        ("x+1", "A", ["x + 1", "x - 1"]),
        ("$5", "B", ["€5", "$5"]),
        ("\\$5", "B", ["€5", "$5"]),
        ("1.5", "2", {"1": "2.5", "2": "1.5"}),
        ("2", "2", {"1": "2", "2": "1"}),
        ("2", "B", ["1", "2"]),
        ("C++", "B", {"B": "C++", "C": "C#"}),
        ("I", "I", [str(n) * 3 for n in range(10)]),
        ("Caf\u00e9", "A", ["Cafe\u0301", "Bar"]),
        ("stra\u00dfe", "A", ["STRASSE", "Weg"]),
        ("Z", "Z", None),
        ("A cat, because it purrs", "B", ["a dog", "a cat"]),
        ("New York City, because it is large", "C", CITIES),
        ("A. It is a vowel", "A", {"A": "E", "B": "A"}),
    ],
)
def test_choices_that_look_like_letters_or_words_are_told_apart(text, gold, choices):
    assert score(text, gold, choices)[0] == 1.0


@pytest.mark.parametrize(
    ("gold", "choices", "label"),
    [
        ("B", CITIES, "B"), ("b", CITIES, "B"), ("(B)", CITIES, "B"), ("B. New York", CITIES, "B"),
        ("New York", CITIES, "B"), ("new york", CITIES, "B"), (1, CITIES, "B"), (1.0, CITIES, "B"), ("1", CITIES, "B"),
        ("2", ["3", "2"], "B"), (0, ["3", "2", "0"], "A"), ("0", ["3", "2", "0"], "C"),
        ("1", {"1": "x", "2": "y"}, "1"), (1, {"1": "x", "2": "y"}, "2"),
        ("B", {"D": "x", "B": "y", "C": None}, "B"), ("y", {"D": "x", "B": "y"}, "B"),
        ("B", {"text": ["x", "y"], "label": ["C", "B"]}, "B"),
        ("A", ["B) x", "A) y"], "A"), ("y", ["B) x", "A) y"], "A"), (1, ["A. 5", "B. 7"], "B"),
        ("A. Curie", ["I. Newton", "A. Curie"], "B"), ("8.25", ["2.25", "8.25"], "B"), ("B", ["A)21", "B)21.5"], "B"),
        ("C", None, "C"), (2, None, "C"),
        ("A or B", CITIES, None), ("E", CITIES, None), (4, CITIES, None), (-1, CITIES, None), (0.5, CITIES, None),
        ("", CITIES, None), (None, CITIES, None), (True, CITIES, None), (float("nan"), CITIES, None),
        (10**400, CITIES, None), ("cat", ["cat", "cat"], None), ({"a": 1}, CITIES, None), (["B"], CITIES, None),
    ],
)  # fmt: skip
def test_a_gold_is_read_as_the_expected_letter(gold, choices, label):
    assert read_gold(gold, read_choices(choices)) == label
    assert score(label or "A", gold, choices)[0] == (None if label is None else 1.0)


def test_gold_form_decides_between_readings_of_a_gold():
    choices = read_choices({"1": "2", "2": "1", "3": "0"})
    assert [read_gold("1", choices, form) for form in ("auto", "letter", "text", "index")] == ["1", "1", "2", "2"]
    assert read_gold(1, choices, "letter") is None
    assert read_gold("x", choices, "letter") is None


@pytest.mark.parametrize(
    "choices",
    [[], {}, "ABCD", 3, ["x"] * 27, [None, "x"], {"Paris": "A"}, {"A": ["x"]}, {"a": "x", "A": "y"},
     {"text": ["x"], "label": ["A", "B"]}, {"text": 5, "label": ["A"]}, {"text": ["x"], "label": 5}],
)  # fmt: skip
def test_unreadable_choices_make_the_row_none(choices):
    assert score("A", "A", choices) == (None, None, "no gold")


def test_arrays_are_read_as_lists():
    assert score("y", numpy.int64(1), numpy.array(["x", "y"]))[0] == 1.0
    assert score("y", "B", {"text": numpy.array(["x", "y"]), "label": numpy.array(["A", "B"])})[0] == 1.0


@pytest.mark.parametrize("columns", [{"answer": ["A"]}, {"answer": "AB"}, {"answer": ["A", "B"], "choices": [CITIES]}])
def test_columns_of_another_length_are_refused(columns):
    with pytest.raises(ValueError, match="`choice_correctness`: "):
        choice_correctness(completions=["A", "B"], **columns)


def test_a_missing_gold_column_is_named_and_choices_may_be_missing():
    assert choice_correctness(completions=["B", "C"], answer=["B", "B"]) == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"needs the dataset column `answer`"):
        choice_correctness(completions=["B"], choices=[CITIES])
    with pytest.raises(ValueError, match=r"`options` \(its kwarg choices_column\)"):
        ChoiceCorrectness(choices_column="options")(completions=["B"], answer=["B"])
    assert ChoiceCorrectness(choices_column=None)(completions=["London"], answer=["D"], choices=[CITIES]) == [0.0]


@pytest.mark.parametrize(
    ("extract", "text", "named"),
    [
        ("answer_tag", "The answer is A.", None), ("answer_tag", "<answer>A</answer>", "A"),
        ("hashes", "#### A", "A"), ("hashes", "A", None), ("boxed", "\\boxed{A}", "A"), ("boxed", "A", None),
        ("a_line", "x\nA: B", "B"), ("sentence", "The answer is A.", "A"), ("sentence", "A", None),
        ("sentence", "<answer>A</answer>", None), ("whole", "A", "A"), ("whole", "The answer is A.", "A"),
        ("whole", "Long ago. The answer is A.", None), ("auto", "A: Paris\nB: 15\nThe answer is B.", "B"),
        ("auto", "#### Discussion\nThe answer is A.", "A"),
    ],
)  # fmt: skip
def test_extract_decides_where_the_answer_is_read(extract, text, named):
    assert score(text, extract=extract)[1] == named


def test_pay_tags_and_logs_follow_the_arguments():
    reward = ChoiceCorrectness(pay=2, pay_wrong="-0.5", tags=["reasoning", "choice"], prefix="mc/", name="mc")
    columns, metrics = {}, {}
    texts = ["<reasoning>B</reasoning><choice>A</choice>", "<choice>B</choice>", "<choice>A or B</choice>", "", "A"]
    assert reward(
        completions=texts, answer=["A", "A", "A", "A", "?"], choices=[CITIES] * 5,
        log_extra=columns.__setitem__, log_metric=metrics.__setitem__,
    ) == [2.0, -0.5, -0.5, -0.5, None]  # fmt: skip
    assert columns == {
        "mc/extracted": ["A", "B", None, None, None],
        "mc/gold": ["A", "A", "A", "A", None],
        "mc/verdict": ["right", "wrong", "unclear", "missing", "no gold"],
    }
    assert metrics == {"rewards/mc/parsed": 2 / 5}
    assert (reward.kind, reward.highest_pay, reward.__name__) == ("correctness", 2.0, "mc")
    assert pickle.loads(pickle.dumps(reward)) == reward
    assert ChoiceCorrectness(prefilled="think")(completions=["A"], answer=["A"]) == [0.0]
    assert ChoiceCorrectness(prefilled="think")(completions=["B</think>A"], answer=["A"]) == [1.0]
    assert choice_correctness(completions=[[{"role": "assistant", "content": "A"}]], answer=["A"]) == [1.0]


@pytest.mark.parametrize("kwargs", [{"extract": "all"}, {"gold_form": "number"}, {"pay": 0}, {"tags": ["a"]},
                                    {"prefilled": "answer"}, {"pay_wrong": float("nan")}])  # fmt: skip
def test_a_bad_argument_names_its_key(kwargs):
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        ChoiceCorrectness(**kwargs)


# An independent generator of questions of several kinds, with shuffled letters, and of models' ways to answer.
POOLS = [
    ["Paris", "London", "Rome", "Berlin", "Madrid", "Vienna", "Oslo", "Athens", "Cairo", "Lima"],
    [str(number) for number in range(2, 60)],
    [f"{number / 4}" for number in range(3, 60, 2)],
    ["It increases", "It decreases", "It stays the same", "It doubles", "It is halved", "It can not be determined"],
    ["the mitochondria", "the nucleus", "a ribosome", "the cell wall", "an enzyme", "the Golgi apparatus"],
    ["Isaac Newton", "Albert Einstein", "Marie Curie", "Niels Bohr", "Charles Darwin", "Ada Lovelace"],
    ["x + 1", "x - 1", "2x", "x^2", "-x", "1/x", "(x+1)^2"],
    ["$5", "$15", "$25", "$50", "$100", "$2.50"],
    ["Because it rains", "Because of the wind", "To save energy", "For no reason at all"],
    ["All of the above", "None of the above", "Only the first", "Only the second"],
]
LETTER_FORMS = ["{l}", "({l})", "{l}.", "{l})", "**{l}**", "**({l})**", "\\text{{{l}}}", "[{l}]", "{l}. {t}",
                "{l}) {t}", "({l}) {t}", "{l}: {t}", "**{l}. {t}**", "{t}", "{t} ({l})", "**{l}**: {t}", "{low}",
                "({low})"]  # fmt: skip
FRAMES = ["{a}", "The answer is {a}.", "The correct answer is {a}.", "Answer: {a}", "**Answer:** {a}",
          "**Answer: {a}**",
          "Final answer: {a}", "The correct option is {a}.", "So, the answer is {a}.", "The best choice is {a}.",
          "Therefore, the correct answer is: {a}", "Therefore the answer must be {a}.", "I would choose {a}.",
          "The answer is {a} because of what was said above.", "#### {a}", "\\boxed{{{a}}}",
          "The final answer is $\\boxed{{{a}}}$.",
          "<answer>{a}</answer>", "<answer>\n{a}\n</answer>", "<answer>The answer is {a}.</answer>",
          "<think>\nIs it {w}? No.\n</think>\n<answer>{a}</answer>",
          "<think>It could be {w}.</think>\nThe answer is {a}."]  # fmt: skip
BODIES = ["", "Let us go through the options. Option {w} does not fit.\n\n", "We look at each choice in turn.\n",
          "{w} is wrong since it contradicts the text. "]  # fmt: skip


def made_up_rows(count, seed=0):
    """Return rows of (completion, gold in some form, choices, True if the completion is right)."""
    rng = random.Random(seed)
    for _ in range(count):
        texts = rng.sample(pool := rng.choice(POOLS), min(len(pool), rng.choice([4, 4, 4, 5, 6])))
        letters = list("ABCDEFGHIJ"[: len(texts)])
        if rng.random() < 0.5:
            rng.shuffle(letters)
        by_letter = dict(zip(letters, texts, strict=True))
        ordered = letters == sorted(letters)
        choices = texts if ordered and rng.random() < 0.5 else by_letter
        gold = rng.choice(letters)
        is_right = rng.random() < 0.6
        said = gold if is_right else rng.choice([letter for letter in letters if letter != gold])
        other = rng.choice([letter for letter in letters if letter != said])
        answer = rng.choice(LETTER_FORMS).format(l=said, low=said.lower(), t=by_letter[said])
        frame = rng.choice(FRAMES)
        body = rng.choice(BODIES) if frame[0] not in "<{" and "####" not in frame else ""
        text = (body + frame).replace("{w}", f"({other})").replace("{a}", answer).replace("{{", "{").replace("}}", "}")
        form = rng.choice(["letter", "text", "index"])
        written = {"letter": gold, "text": by_letter[gold], "index": letters.index(gold)}[form]
        yield text, written, choices, is_right


@pytest.mark.parametrize("count", only([1000], [1000, 5000]))
def test_right_answers_are_accepted_and_wrong_ones_are_not(count):
    rows = list(made_up_rows(count))
    texts, golds, choices, right = map(list, zip(*rows, strict=True))
    scores = choice_correctness(completions=texts, answer=golds, choices=choices)
    assert [row for row, paid in zip(rows, scores, strict=True) if paid is None] == []
    assert [row for row, paid in zip(rows, scores, strict=True) if paid > 0 and not row[-1]] == []
    missed = [row for row, paid in zip(rows, scores, strict=True) if paid == 0 and row[-1]]
    assert len(missed) <= 0.01 * sum(right), missed[:10]


PIECES = [
    "A", "A ", "(", "answer is ", "answer is\n", "The answer is A. ", "A is correct ", "<answer>", "\\boxed{",
    "\\text{",
    "**", "not ", "Paris ", "A, ", "because ", "x" * 40 + "\n", "\u0301", "Answer: A\n", ": is correct", "`", "$", '"',
]  # fmt: skip


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("piece", only(PIECES[::8], PIECES))
def test_the_cost_is_linear_in_the_length(piece):
    for place in ("{}", "<answer>{}</answer>", "The answer is {}"):

        def call(length, place=place):
            assert score(place.format(piece * (length // len(piece))))[0] in (0.0, 1.0)

        assert growth(call, int, 50_000) < 12


NESTED = choices_module.read_choices(["York", "New York", "a cat", "5/2"])


@pytest.mark.parametrize(
    ("text", "mentioned"),
    [
        ("New York", "B"), ("York and New York", "AB"), ("New York, then York", "AB"), ("new york city", "B"),
        ("Yorkshire", ""), ("A", "A"), ("a", ""), ("(a) b", "AB"), ("a cat", "C"), ("I said B", "B"), ("A is", "A"),
        ("A dog", ""), ("A must", "A"), ("B's", ""), ("x-B", ""), ("5/2", "D"), ("15/2", ""), ("5/23", ""), ("", ""),
        ("catcat cat", "C"), ("(A dog", "A"), ("A) dog", "A"), ("York, Yorkshire", "A"),
        ("Yorkshire, York, Yorkshire", "A"), ("Yorks fell", ""), ("an old oldYork", ""),
    ],
)  # fmt: skip
def test_the_choices_that_a_text_mentions(text, mentioned):
    """A shorter text inside a longer one is not mentioned, and "A" before a noun is an article."""
    assert choices_module._mentioned(text, NESTED) == set(mentioned)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("New York", "B"), ("York", "A"), ("5/2", "D"), ("5/2!", None), ("5/23", None), ("A", "A"), ("(a)", "A"),
        ("b) New York", "B"), ("b) York", None), ("B. New York, the city", "B"), ("New York (B)", "B"),
        ("New York (A)", None), ("York, not New York", "A"), ("not A but B", "B"), ("not A but A", None),
        ("B rather than A", "B"), ("B rather than B", None), ("A or B", None), ("It is a cat.", "C"), ("It is a", None),
        ("B because A is small", "B"), ("B is correct, A is not", None), ("B is what a fool would pick", None),
        ("B is impossible", None), ("B\nIt is far north.", "B"), ("B\nA is far north.", None),
        ("B\nNo, A.", None), ("B. I lied", None),
        ("B!", "B"), ("B?", None), ("!B", None), ("The answer is B", "B"), ("option B", "B"), ("B - A", None),
        # A letter that is set off may have a remark behind it. A bare letter or a text may not.
        ("option B it lies north", "B"), ("(B it lies north", "B"), ("B) it lies north", "B"),
        ("B it lies north", None), ("York lies north", None), ("B)New York, the city", "B"), ("(B).M.", None),
        ("option A lies south", "A"), ("(A lies south", "A"), ("A) lies south", "A"), ("A lies south", None),
        ("option B is what a fool would pick", None),
        # Reasons, and the words behind which "A" is a letter in any case.
        ("A because, as said, it fits", "A"), ("A BECAUSE it fits", "A"), ("B (because it is big)", "B"),
        ("York (because it is old)", "A"), ("The York because it is old", "A"), ("York?", None),
        ("B. It lies north because A is small", "B"), ("B is correct, it lies north", "B"),
        # Retractions without a word of doubt, and doubts in the middle of a remark.
        ("B. Crossed out", None), ("B. Just kidding", None), ("B. Hard to say, maybe", None),
        # The choice's own text in brackets or with a remark, and another choice's.
        ("B [New York]", "B"), ("B (New York", "B"), ("B (York", None), ("B) New York is far north", "B"),
        ("B (New York, the city)", "B"), ("B (New York) is crossed out", None), ("B. York, the old one", None),
        ("A (York) lies south", "A"), ("A [York] lies south", "A"), ("York [A]", "A"), ("York (A)", "A"),
        ("York; because it is old", "A"), ("York: because it is old", "A"), ("York. Because it is old", "A"),
        # Other choices behind a contrast.
        ("not A , but B", "B"), ("B, not A or xyz", None), ("B rather than A or C", "B"), ("B, not and", None),
        ("not A but not B but C", None),
        # Lines, a cut-off sentence, and nested LaTeX.
        ("\n B\nIt is far north.", "B"), ("B\n\nIt is\nfar north.", "B"), ("It is i", None), ("The answer is a", "A"),
        ("\\boxed{\\textbf{\\mathrm{\\text{\\underline{B}}}}}", "B"),
    ],
)  # fmt: skip
def test_an_answer_names_one_choice(text, label):
    assert choices_module.named_choice(text, NESTED) == label


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("The  (Paris).", "paris"), ("[x]", "x"), ("'y'", "y"), ("a b / c", "b/c"), ("Paris!!", "paris"),
        ("Really?", "really?"), ("the", "the"), ("((x))", "((x))"), ("(a, b)", "(a,b)"), ("x = 3 . 5", "x=3.5"),
        ("\\boxed{\\textbf{(B)}}", "b"), ("**B**", "b"), ("\u201cB\u201d", "b"), ("\uff21\uff22", "ab"),
        ("\u24b7", "b"),        ("a\\,b 50\\%", "b 50%"), ("`B`", "b"), ("x\u2013y", "x-y"),
        ("\u200bB", "b"), ("\u0663", "3"), ("5!", "5!"), ("...", "..."), ("(1,)", "(1,)"), ("(,x)", "(,x)"),
        ("()", "()"), ("x\u00b2", "x\u00b2"), ("\ufb01t", "fit"), ("\u01c6", "\u01c6"),
    ],
)  # fmt: skip
def test_two_spellings_of_a_text_have_one_key(text, key):
    assert choices_module._key(choices_module._cleaned(text)) == key


@pytest.mark.parametrize(
    ("value", "labels", "texts"),
    [
        (None, tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), ()),
        (["x", 2], ("A", "B"), ("x", "2")),
        (["B) x", "A) y"], ("B", "A"), ("x", "y")),
        (["B) x", "C) y"], ("A", "B"), ("B) x", "C) y")),
        ({"a": "x", "b": None, "c": "y"}, ("a", "c"), ("x", "y")),
        ({"text": ["x", "y"], "label": ["1", "2"]}, ("1", "2"), ("x", "y")),
    ],
)
def test_the_choices_of_a_row_have_labels_and_texts(value, labels, texts):
    found = choices_module.read_choices(value)
    assert (found.labels, found.texts) == (labels, texts)


@pytest.mark.parametrize(
    "value", [[], "AB", 3, {}, {"text": ["x"], "label": ["A", "B"]}, ["x"] * 27, {"a": "x", "A": "y"}, [None], {1: "x"}]
)
def test_a_value_that_is_no_list_of_choices(value):
    assert choices_module.read_choices(value) is None


@pytest.mark.parametrize(
    ("gold", "form", "label"),
    [
        ("B", "auto", "B"), (" (b). ", "letter", "B"), ("B", "text", None), ("B", "index", None), (1, "auto", "B"),
        (1.0, "index", "B"), (1.5, "index", None), (1, "letter", None), (True, "auto", None), (4, "auto", None),
        (-1, "auto", None), (3, "auto", "D"), (0, "index", "A"), ("1", "index", "B"), ("0004", "index", None),
        ("york", "text", "A"), ("the York", "auto", "A"), ("York", "letter", None), ("B) New York", "auto", "B"),
        ("B) New York", "text", None), ("", "auto", None), (None, "auto", None), ("x" * 5000, "auto", None),
        ("003", "index", "D"), ("0003", "index", None), (numpy.array(1), "auto", "B"),
        ("B".ljust(1008), "letter", "B"), ("B".ljust(1009), "letter", None),
    ],
)  # fmt: skip
def test_each_form_of_a_gold(gold, form, label):
    assert choices_module.read_gold(gold, NESTED, form) == label


def test_an_answer_may_be_1000_characters_longer_than_the_longest_choice():
    longest = len("New York") + 1000
    assert choices_module.named_choice("B".ljust(longest), NESTED) == "B"
    assert choices_module.named_choice("B".ljust(longest + 1), NESTED) is None


def test_letters_alone_have_no_text_to_measure():
    letters = choices_module.read_choices(None)
    assert choices_module.named_choice("B".ljust(1000), letters) == "B"
    assert choices_module.named_choice("B".ljust(1001), letters) is None


@pytest.mark.parametrize(
    ("choices", "text", "label"),
    [
        (["", "x"], "", None), (["Polish", "polish"], "A. polish", None), (["Polish", "polish"], "polish", "B"),
        (["cat", "cat", "dog"], "A. cat", "A"), (["Stra\u00dfe", "Weg"], "Stra\u00dfe because it is long", "A"),
        ({"1": "x", "10": "y"}, "10. y", "10"), ({"1": "x", "10": "y"}, "1. y", None), (["?", "!"], "?", "A"),
        (list("vwxyzabcd"), "It is i", None), (list("vwxyzabcd"), "The answer is i", "I"),
        ([str(n) for n in range(100, 126)], "125", "Z"), (["v"] * 8 + ["rose"], "I rose", None),
        (list("vwxyzabcd"), "B. so say i", "B"),
    ],
)  # fmt: skip
def test_an_answer_among_other_choices(choices, text, label):
    assert choices_module.named_choice(text, choices_module.read_choices(choices)) == label


@pytest.mark.parametrize(("gold", "label"), [("Polish", "A"), ("polish", "B"), ("POLISH", None)])
def test_a_gold_may_be_told_apart_by_its_capitals_alone(gold, label):
    assert choices_module.read_gold(gold, choices_module.read_choices(["Polish", "polish"])) == label


def test_an_empty_gold_is_no_choice_with_an_empty_text():
    assert choices_module.read_gold("", choices_module.read_choices(["", "x"])) is None


CLAIMED = choices_module.read_choices(CITIES)


@pytest.mark.parametrize(
    ("text", "found", "label"),
    [
        ("B is correct.", True, "B"), ("A is correct. B is not.", True, "A"), ("A is correct\nB is not.", True, "A"),
        ("Long ago. B is correct.", True, "B"), ("B because C is small, A is correct", True, "B"),
        # The last four clauses before "is correct" are tried.
        ("Hm. B because a, b, c, C is correct", True, "B"), ("Hm. B because a, b, c, d, C is correct", True, "C"),
        ("The answer is", False, None), ("The answer is unknown", False, None), ("The answer is A or B", True, None),
        ("From the four options I choose A", True, "A"), ("The tempting answer is A", False, None),
        # Twenty claims are read, from the end.
        ("The answer is A. " + "I doubt the answer is B. " * 19, True, "A"),
        ("The answer is A. " + "I doubt the answer is B. " * 20, False, None),
        # The next sentence.
        ("The answer is A. London", True, None), ("The answer is A. Paris", True, "A"),
        ("The answer is A.\nB", True, None), ("The answer is A. B fits less well.", True, "A"),
        ("The answer is A. Also B.", True, None), ("The answer is A. Also nice.", True, "A"),
        ("The answer is A. New York. London", True, None),
        ("The answer is A. Also I doubt the answer is B.", True, "A"),  # read up to the next claim
    ],
)  # fmt: skip
def test_a_sentence_claims_an_answer(text, found, label):
    assert choices_module._claimed(text, CLAIMED) == (found, label)


def test_an_answer_that_is_several_sentences_long_is_read_up_to_four():
    choices = choices_module.read_choices(["w. x. y. z", "v. w. x. y. z"])
    assert choices_module._claimed("The answer is w. x. y. z. It fits.", choices) == (True, "A")
    assert choices_module._claimed("The answer is v. w. x. y. z. It fits.", choices) == (True, None)
    letters = choices_module.read_choices({"A": "E", "B": "A"})
    assert choices_module._claimed("The answer is B. A", letters) == (True, None)


def test_a_row_without_choices_among_rows_with_choices_is_not_scored():
    assert choice_correctness(completions=["B", "B"], answer=["B", "B"], choices=[None, CITIES]) == [None, 1.0]


@pytest.mark.parametrize(
    ("column", "needed", "optional"),
    [
        ("choices", ("gold",), ("choices",)),
        ("options", ("gold", "options"), ("options",)),
        (None, ("gold",), ()),
    ],
)
def test_the_columns_that_the_reward_reads(column, needed, optional):
    reward = ChoiceCorrectness(gold_column="gold", choices_column=column)
    assert (reward.columns_read, reward.optional_columns) == (needed, optional)
