"""Multiple choice: pay, answers that a naive rule would pay for, shapes of golds and choices, and a generator."""

import pickle
import random
import re
import unicodedata

import numpy
import pytest

from grpo_rewards import choice_correctness
from grpo_rewards.choice_answers import named_choice, read_gold
from grpo_rewards.choice_questions import read_choices
from grpo_rewards.choices import ChoiceCorrectness
from tests.support.growth import growth

CITIES = ["Paris", "New York", "New York City", "London"]


def score(text, gold="A", choices=CITIES, **arguments):
    columns = {}
    (result,) = ChoiceCorrectness(**arguments)(
        completions=[text], answer=[gold], choices=[choices], log_extra=columns.__setitem__
    )
    return result, columns["extracted"][0], columns["verdict"][0]


RIGHT = """
A | (A) | (a) | A. | A) | **A** | (A) Paris | A. Paris | **A.** Paris | Answer: A | <answer>B</answer><answer>A</answer>
[A] | A! | *A* | `A` | "A" | $A$ | \\text{A} | \\boxed{\\textbf{(A)}} | $\\boxed{\\mathrm{A}}$
\\boxed{A. Paris} | Ａ | （Ａ） | A\u200b | A - Paris | A – Paris | "Paris" | Paris (A) | (Paris) | Answer: Paris
The correct option is (A). | The answer is A, because B and C are not capitals.
The answer is A. B is wrong, and so is C. | The best answer is A, since the others (B, C, D) are elsewhere.
Option A is correct. | Paris is the right answer. | It's Paris! | I choose A | I'll go with A | not B but A
The answer is not B but A. | A, not B or C | A rather than New York | B is wrong. The answer is A.
The answer is B. Wait, no: the answer is A. | The answer is:\\n\\nA
Option B looks good.\\n\\nAnswer: A. Paris\\n\\nB is not the capital. | Let me see.\\n#### A
# Answer\\n#### A) Paris | <answer>A</answer> | <answer>The answer is A</answer>
<answer>A because it is the capital</answer> | <answer>A. It is the capital of France</answer>
<answer>choice (a)</answer> | <think>B? C?</think><answer>A</answer>
<think>The answer is B.</think>The answer is A. | ### Final Answer\\n\\nA. Paris | The answer is Paris (option A).
I'd say A. | Pick (A) | A.Paris | My answer is A. | A\\n\\nParis is the capital.
**A**\\n\\nExplanation: it is the capital. | Of these, A is correct. | 答案：A | 答案是A。 | A ✅
Since B is not a capital, the answer is A. | \\boxed{\\textbf{(A) } \\text{Paris}} | The answer is A (Paris), not B.
The answer is indeed A. | The answer is, therefore, A. | The answer to the question is A. | Ans: A
The answer is A = Paris | The answer is A. That the answer is so short is no surprise. | Here's the answer: A
So here's my final answer: A | From his statement, the answer is A. | The only possible answer is A.
The answer is A.\\n\\nB. New York is not the capital. | A. Unlikely as it sounds, Paris. | Only A is correct.
A seems to be the best answer. | I am confident that A is right. | The answer is Paris, which is option A.
<answer>\\boxed{A}</answer> | \\boxed{B} or rather \\boxed{A}
"""
RIGHT = [text.strip().replace("\\n", "\n").replace("\\\\", "\\") for text in RIGHT.replace("\n", " | ").split(" | ")]


def test_a_right_answer_is_paid():
    assert [text for text in filter(None, RIGHT) if score(text) != (1.0, "A", "right")] == []


# Answers that a search for the letter or the text would pay for. The gold is A (Paris); one A is Cyrillic.
TRAPS = r"""
The answer is A or B. | A and B | A, B | A/B | (A) (B) | ABCD | A-D | A to D
A. Paris¶B. New York¶C. New York City¶D. London | <answer>A, B, C and D</answer>
Option: D¶Option: C¶Option: B¶Option: A | We read the choices. The first option is A. | Paris or London | A. London
London (A) | The answer is A. London. | The answer is A. Or B. | The answer is A. No wait, B.
The answer is A¶Actually, B | The answer is not A | not Paris | A is wrong | A is not correct | (A) is false
I believe Paris is wrong | Neither A nor B is correct | Either A or B is correct. | anything but A
not only A but B | all except A | If A is correct, then we lose | The answer is A if B fails | Is A correct?
A is correct? | I doubt the answer is A | I don't think the answer is A. | One might say the answer is A.
It is false that the answer is A. | The answer is A. That is wrong. | The answer is A. I mean B. | A, no | A- | A'
A.M. | A¶B | \boxed{A, B} | \boxed{A \text{ or } B} | A is better than B | A = 5 | The answer is P(A) | A? | Paris?
The answer is Paris? No. | Answer A is what a fool would pick | <answer>Option A is tempting</answer>
The opposite of the answer is A | The letter after the answer is A | Someone claims the answer is A
Suppose the answer is A | The second best answer is A | The answer is A. No.
The answer is A. The opposite is true. | <answer>The answer is A. I lied.</answer> | The answer is A, they say
nicht A | \cancel{\boxed{A}} | maybe A | A city in France | <answer>It is a</answer> | The answer is a city
THIS IS A TEST | It is hard to say. A man walks in. | Apple | A-level | Vitamin A | A+ | A* | А | A.B.
<think>A</think> | <think>The answer is A. | <answer>A | A <answer></answer> | <answer>A</answer><answer>B</answer>
\boxed{A} \boxed{B} | The answer is A. Hmm. The answer is A or B. | The answer is A. So the answer is B. | Parisian
I don't know | <answer>A is ruled out</answer> | <answer>A: eliminated</answer>
<answer>A) can be excluded</answer> | <answer>Option A fails</answer> | <answer>!A</answer>
The incorrect answer is A | The worst answer is A | The student's answer is A | His first answer is A
The previous answer is A | One possible answer is A | Example answer: A | The answer is A, I guess
The answer is A... just kidding | The answer is A.¶¶On second thought, B. | The answer is A. On reflection it is B.
The answer is A. Then again London fits better. | The answer is A.¶¶EDIT: B | The answer is A.¶B.¶C.
I choose A¶I also choose B
"""


def test_a_trap_earns_nothing():
    texts = ["", "not A but " * 50, *TRAPS.strip().replace("\n", " | ").replace("¶", "\n").split(" | ")]
    assert [text for text in texts if score(text)[0] != 0.0 or score(text)[1] == "A"] == []


SIGNED = ["-19", "-10", "19", "10"]
TRUTHS = ["True, True", "False, False", "True, False", "False, True"]


def test_a_letter_and_a_text_with_a_sign_or_a_denial_must_agree():
    """The separators before a text, a minus sign among them, and words such as "False" are read as the text first."""
    for choices, right, wrong in (
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
    ):  # fmt: skip
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
    "La respuesta es C.\nD. no es correcta | "
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


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_an_answer_may_be_labelled_in_another_language(form):
    texts = unicodedata.normalize(form, " | ".join(CLAIMS_BY_LANGUAGE.values())).split(" | ")
    assert [text for text in texts if score(text, "C", CAPITALS) != (1.0, "C", "right")] == []


NO_CLAIMS = r"""
الإجابة ليست C | সঠিক উত্তর C নয় | Die Antwort ist nicht C | Die falsche Antwort ist C
Die Antwort ist C. Das ist falsch. | La respuesta es C o D | La respuesta es C, quizás | La respuesta es C.\nNo, D.
La respuesta es C) Rome | La respuesta es C. Rome | La respuesta del alumno es C | ¿La respuesta es C?
Si la respuesta es C | The answer is C. La respuesta es D. | La réponse n'est pas C | उत्तर C नहीं है | गलत उत्तर: C
Jawabannya bukan C | Jawaban yang salah adalah C | La risposta non è C | 正解はCかD | 正解はC。いや、D。
A resposta não é C | Ответ не C | คำตอบไม่ใช่ C | 答案是C？
答案是C。不对。 | <answer>La respuesta es A. La respuesta es C</answer>
"""


def test_an_answer_that_another_language_denies_or_doubts_earns_nothing():
    texts = NO_CLAIMS.strip().replace("\n", " | ").replace("\\n", "\n").split(" | ")
    paid = [text for text in texts if score(text, "C", CAPITALS)[0] != 0.0 or score(text, "C", CAPITALS)[1] == "C"]
    assert paid == []


# Letters, texts and signs of choices that a naive rule takes for others.
MORE_TRAPS = [
    ("I think so", "I", list("abcdefghijk")), ("The answer is I don't know", "I", [str(n) * 3 for n in range(10)]),
    ("New York City", "B", CITIES), ("New York", "C", CITIES), ("polish", "A", ["Polish", "polish"]),
    ("cat", "A", ["cat", "cat"]), ("A", "B", {"A": "B", "B": "A"}), ("2", "A", ["-2", "2"]), ("-2", "A", ["2", "3"]),
    ("23", "A", ["2*3", "5"]), ("£5", "A", ["€5", "$5"]), ("x2", "A", ["x²", "x"]),
    ("1.5", "1", {"1": "2.5", "2": "1.5"}), ("12", "A", ["1", "2"]), ("5!", "A", ["5", "120"]),
    ("C++", "C", {"B": "C++", "C": "C#"}), ("not enough", "A", ["enough", "too much"]),
    ("Both A and B", "A", ["x", "y", "Both A and B"]), ("C. Both A and B", "A", ["x", "y", "Both A and B"]),
    ("E", "A", CITIES), ("Yes and no", "B", {"A": "Yes", "B": "No"}), ("A. No", "A", {"A": "Yes", "B": "No"}),
    ("So 2 + 2 = 4", "B", ["2", "4"]), ("A. Vitamin C", "A", None), ("A", "B", {"A": "London", "B": "Paris"}),
]  # fmt: skip


def test_a_trap_in_the_choices_earns_nothing():
    assert [row for row in MORE_TRAPS if score(*row)[0] != 0.0] == []


def test_choices_that_look_like_letters_or_words_are_told_apart():
    table = [
        ("Both A and B", "C", ["x", "y", "Both A and B"]), ("C. Both A and B", "C", ["x", "y", "Both A and B"]),
        ("The answer is C. Both A and B", "C", ["x", "y", "Both A and B"]),
        ("None of the above", "B", ["x", "None of the above"]),
        ("It is not raining", "A", ["It is not raining", "It is raining"]), ("A cat", "B", ["a dog", "a cat"]),
        ("the Eiffel Tower", "A", ["Eiffel Tower", "Louvre"]),
        ("The answer is St. Louis. It lies on a river.", "A", ["St. Louis", "London"]),
        ("(1, 2)", "B", ["(2, 1)", "(1,2)"]), ("x+1", "A", ["x + 1", "x - 1"]), ("$5", "B", ["€5", "$5"]),
        ("\\$5", "B", ["€5", "$5"]), ("1.5", "2", {"1": "2.5", "2": "1.5"}), ("2", "2", {"1": "2", "2": "1"}),
        ("2", "B", ["1", "2"]), ("C++", "B", {"B": "C++", "C": "C#"}), ("I", "I", [str(n) * 3 for n in range(10)]),
        ("Caf\u00e9", "A", ["Cafe\u0301", "Bar"]), ("stra\u00dfe", "A", ["STRASSE", "Weg"]), ("Z", "Z", None),
        ("A cat, because it purrs", "B", ["a dog", "a cat"]), ("New York City, because it is large", "C", CITIES),
        ("A. It is a vowel", "A", {"A": "E", "B": "A"}),
    ]  # fmt: skip
    assert [row for row in table if score(*row)[0] != 1.0] == []


def test_a_gold_is_read_as_the_expected_letter():
    table = [
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
    ]  # fmt: skip
    for gold, choices, label in table:
        assert read_gold(gold, read_choices(choices)) == label, (gold, choices)
        assert score(label or "A", gold, choices)[0] == (None if label is None else 1.0), (gold, choices)


def test_unreadable_choices_make_the_row_none():
    unreadable = [
        [], {}, "ABCD", 3, ["x"] * 27, [None, "x"], {"Paris": "A"}, {"A": ["x"]}, {"a": "x", "A": "y"}, {1: "x"},
        {"text": ["x"], "label": ["A", "B"]}, {"text": 5, "label": ["A"]},
    ]  # fmt: skip
    assert [choices for choices in unreadable if score("A", "A", choices) != (None, None, "no gold")] == []
    assert choice_correctness(completions=["B", "B"], answer=["B", "B"], choices=[None, CITIES]) == [None, 1.0]


def test_arrays_are_read_as_lists():
    assert score("y", numpy.int64(1), numpy.array(["x", "y"]))[0] == 1.0
    assert score("y", "B", {"text": numpy.array(["x", "y"]), "label": numpy.array(["A", "B"])})[0] == 1.0


def test_a_missing_gold_column_is_named_and_choices_may_be_missing():
    assert choice_correctness(completions=["B", "C"], answer=["B", "B"]) == [1.0, 0.0]
    with pytest.raises(ValueError, match="`choice_correctness`"):
        choice_correctness(completions=["A", "B"], answer=["A", "B"], choices=[CITIES])
    with pytest.raises(ValueError, match="`answer`"):
        choice_correctness(completions=["B"], choices=[CITIES])
    with pytest.raises(ValueError, match="`options`.*choices_column"):
        ChoiceCorrectness(choices_column="options")(completions=["B"], answer=["B"])
    assert ChoiceCorrectness(choices_column=None)(completions=["London"], answer=["D"], choices=[CITIES]) == [0.0]


def test_extract_decides_where_the_answer_is_read():
    table = [
        ("answer_tag", "The answer is A.", None), ("answer_tag", "<answer>A</answer>", "A"),
        ("hashes", "#### A", "A"), ("hashes", "A", None), ("boxed", "\\boxed{A}", "A"), ("boxed", "A", None),
        ("a_line", "x\nA: B", "B"), ("sentence", "The answer is A.", "A"), ("sentence", "A", None),
        ("sentence", "<answer>A</answer>", None), ("whole", "A", "A"), ("whole", "The answer is A.", "A"),
        ("whole", "Long ago. The answer is A.", None), ("auto", "A: Paris\nB: 15\nThe answer is B.", "B"),
        ("auto", "#### Discussion\nThe answer is A.", "A"),
    ]  # fmt: skip
    assert [row for row in table if score(row[1], extract=row[0])[1] != row[2]] == []


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


def test_a_bad_argument_names_its_key():
    for kwargs in (
        {"extract": "all"}, {"gold_form": "number"}, {"pay": 0}, {"tags": ["a"]}, {"prefilled": "answer"},
        {"pay_wrong": float("nan")},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(kwargs))):
            ChoiceCorrectness(**kwargs)


# An independent generator of questions of several kinds, with shuffled letters, and of models' ways to answer.
POOLS = [
    ["Paris", "London", "Rome", "Berlin", "Madrid", "Vienna", "Oslo", "Athens", "Cairo", "Lima"],
    [str(number) for number in range(2, 60)],
    ["It increases", "It decreases", "It stays the same", "It doubles", "It is halved", "It can not be determined"],
    ["the mitochondria", "the nucleus", "a ribosome", "the cell wall", "an enzyme", "the Golgi apparatus"],
    ["x + 1", "x - 1", "2x", "x^2", "-x", "1/x", "(x+1)^2"],
    ["$5", "$15", "$25", "$50", "$100", "$2.50"],
    ["All of the above", "None of the above", "Only the first", "Only the second"],
]
LETTER_FORMS = ["{l}", "({l})", "{l}.", "**{l}**", "\\text{{{l}}}", "{l}. {t}", "({l}) {t}", "**{l}. {t}**", "{t}",
                "{t} ({l})", "{low}"]  # fmt: skip
FRAMES = ["{a}", "The correct answer is {a}.", "Answer: {a}", "**Answer:** {a}", "The correct option is {a}.",
          "Therefore, the correct answer is: {a}", "The answer is {a} because of what was said above.", "#### {a}",
          "The final answer is $\\boxed{{{a}}}$.", "<answer>\n{a}\n</answer>", "<answer>The answer is {a}.</answer>",
          "<think>\nIs it {w}? No.\n</think>\n<answer>{a}</answer>"]  # fmt: skip
BODIES = ["", "Let us go through the options. Option {w} does not fit.\n\n", "{w} is wrong. "]


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


def test_right_answers_are_accepted_and_wrong_ones_are_not():
    rows = list(made_up_rows(300))
    texts, golds, choices, right = map(list, zip(*rows, strict=True))
    scores = choice_correctness(completions=texts, answer=golds, choices=choices)
    assert [row for row, paid in zip(rows, scores, strict=True) if paid is None] == []
    assert [row for row, paid in zip(rows, scores, strict=True) if paid > 0 and not row[-1]] == []
    missed = [row for row, paid in zip(rows, scores, strict=True) if paid == 0 and row[-1]]
    assert len(missed) <= 0.01 * sum(right), missed[:10]


def test_the_cost_is_linear_in_the_length():
    assert growth(score, lambda length: "The answer is A. " * (length // 17), 50_000) < 12


NESTED = read_choices(["York", "New York", "a cat", "5/2"])


def test_an_answer_names_one_choice():
    table = [
        ("5/2", "D"), ("5/2!", None), ("b) New York", "B"), ("b) York", None), ("B. New York, the city", "B"),
        ("New York (A)", None), ("York, not New York", "A"), ("not A but B", "B"), ("not A but A", None),
        ("B rather than B", None), ("It is a cat.", "C"), ("It is a", None), ("B because A is small", "B"),
        ("B is correct, A is not", None), ("B is what a fool would pick", None), ("B is impossible", None),
        ("B\nIt is far north.", "B"), ("B\nA is far north.", None), ("B\nNo, A.", None), ("B. I lied", None),
        ("B!", "B"), ("B?", None), ("The answer is: B", "B"), ("option B", "B"), ("B - A", None), ("(B).M.", None),
        ("A lies south", None), ("option B is what a fool would pick", None), ("A because, as said, it fits", "A"),
        ("A BECAUSE it fits", "A"), ("York (because it is old)", "A"), ("York?", None),
        ("B. It lies north because A is small", "B"), ("B is correct, it lies north", "B"),
        ("B. Crossed out", None), ("B. Just kidding", None), ("B. Hard to say, maybe", None),
        ("B [New York]", "B"), ("B (New York", "B"), ("B (York", None), ("B (New York) is crossed out", None),
        ("B. York, the old one", None), ("A (York) lies south", "A"), ("York [A]", "A"), ("York (A)", "A"),
        ("York; because it is old", "A"), ("York: because it is old", "A"), ("not A , but B", "B"),
        ("B, not A or xyz", None), ("B rather than A or C", "B"), ("B, not and", None),
        ("not A but not B but C", None), ("B\n\nIt is\nfar north.", "B"), ("It is i", None),
        ("The answer is a", "A"), ("\\boxed{\\textbf{\\mathrm{\\text{\\underline{B}}}}}", "B"),
        ("York and New York", None), ("B's", None), ("x-B", None), ("A dog", None),
        ("B. It is not in York, Yorkshire", None), ("B. A dog lives there", "B"), ("B. Yorkshire is far", "B"),
    ]  # fmt: skip
    assert [(text, named_choice(text, NESTED)) for text, label in table if named_choice(text, NESTED) != label] == []


def test_two_spellings_of_a_text_name_one_choice():
    same = [
        ("The  (Paris).", "paris"), ("[x]", "x"), ("'y'", "y"), ("a b / c", "b/c"), ("Paris!!", "paris"),
        ("x = 3 . 5", "x=3.5"), ("\\boxed{\\textbf{(xy)}}", "xy"), ("\u201cxy\u201d", "xy"), ("\uff38\uff39", "xy"),
        ("x\\,y 50\\%", "x y 50%"), ("x\u2013y", "x-y"), ("\u200bxy", "xy"), ("\u0663", "3"), ("\ufb01t", "fit"),
        ("Really", "Really?"),
    ]  # fmt: skip
    other = [("5", "5!"), ("x\u00b2", "x2"), ("(a, b", "(a,b)"), ("15", "1.5"), ("dz", "\u01c6"), ("...", "?")]
    assert [pair for pair in same if score(pair[0], "A", [pair[1], "something else"])[0] != 1.0] == []
    assert [pair for pair in other if score(pair[0], "A", [pair[1], "something else"])[0] != 0.0] == []


def test_each_form_of_a_gold():
    table = [
        ("B", "auto", "B"), (" (b). ", "letter", "B"), ("B", "text", None), ("B", "index", None), (1, "auto", "B"),
        (1.0, "index", "B"), (1.5, "index", None), (1, "letter", None), (True, "auto", None), (4, "auto", None),
        (-1, "auto", None), (3, "auto", "D"), (0, "index", "A"), ("1", "index", "B"), ("0004", "index", None),
        ("york", "text", "A"), ("the York", "auto", "A"), ("York", "letter", None), ("B) New York", "auto", "B"),
        ("B) New York", "text", None), ("", "auto", None), (None, "auto", None), ("x" * 5000, "auto", None),
        ("003", "index", "D"), ("0003", "index", None), (numpy.array(1), "auto", "B"),
        ("B".ljust(1008), "letter", "B"), ("B".ljust(1009), "letter", None),
    ]  # fmt: skip
    assert [(gold, form) for gold, form, label in table if read_gold(gold, NESTED, form) != label] == []
    capitals = read_choices(["Polish", "polish"])
    assert [read_gold(gold, capitals) for gold in ("Polish", "polish", "POLISH")] == ["A", "B", None]
    assert read_gold("", read_choices(["", "x"])) is None


def test_an_answer_may_be_1000_characters_longer_than_the_longest_choice():
    longest = len("New York") + 1000
    assert named_choice("B".ljust(longest), NESTED) == "B"
    assert named_choice("B".ljust(longest + 1), NESTED) is None
    letters = read_choices(None)
    assert [named_choice("B".ljust(length), letters) for length in (1000, 1001)] == ["B", None]


def test_an_answer_among_other_choices():
    table = [
        (["", "x"], "", None), (["Polish", "polish"], "A. polish", None), (["Polish", "polish"], "polish", "B"),
        (["cat", "cat", "dog"], "A. cat", "A"), (["Stra\u00dfe", "Weg"], "Stra\u00dfe because it is long", "A"),
        ({"1": "x", "10": "y"}, "10. y", "10"), ({"1": "x", "10": "y"}, "1. y", None), (["?", "!"], "?", "A"),
        (list("vwxyzabcd"), "It is i", None), (list("vwxyzabcd"), "The answer is i", "I"),
        ([str(n) for n in range(100, 126)], "125", "Z"), (["v"] * 8 + ["rose"], "I rose", None),
        (list("vwxyzabcd"), "B. so say i", "B"),
    ]  # fmt: skip
    assert [row for row in table if named_choice(row[1], read_choices(row[0])) != row[2]] == []


def claimed(text, choices=CITIES):
    """Return True if a sentence claims an answer, and the choice that it names."""
    _, label, verdict = score(text, choices=choices, extract="sentence")
    return verdict != "missing", label


def test_a_sentence_claims_an_answer():
    table = [
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
    ]  # fmt: skip
    assert [(text, claimed(text)) for text, *expected in table if claimed(text) != tuple(expected)] == []


def test_an_answer_that_is_several_sentences_long_is_read_up_to_four():
    choices = ["w. x. y. z", "v. w. x. y. z"]
    assert claimed("The answer is w. x. y. z. It fits.", choices) == (True, "A")
    assert claimed("The answer is v. w. x. y. z. It fits.", choices) == (True, None)
    assert claimed("The answer is B. A", {"A": "E", "B": "A"}) == (True, None)


def test_the_columns_that_the_reward_reads():
    for column, needed, optional in (
        ("choices", ("gold",), ("choices",)), ("options", ("gold", "options"), ("options",)), (None, ("gold",), ())
    ):  # fmt: skip
        reward = ChoiceCorrectness(gold_column="gold", choices_column=column)
        assert (reward.columns_read, reward.optional_columns) == (needed, optional)
