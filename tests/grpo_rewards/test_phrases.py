"""Words beside a number in an answer slot: units, plural nouns and sentences are read, and anything else is doubt."""

from grpo_rewards.math.correctness import GSM8KCorrectness, MathCorrectness
from grpo_rewards.math.golds import read_gold
from grpo_rewards.math.numbers import answer_number, parse_number
from grpo_rewards.math.units import stated_units, units_differ
from tests.grpo_rewards.test_claims import listed

SLOTS = ("<answer>{}</answer>", "Steps.\n#### {}", "\\boxed{{{}}}", "The answer is {}.")
REWARDS = (GSM8KCorrectness(extract="auto"), MathCorrectness())
# None of these states 18.
DOUBT = r"""
    18 nope | 18 ruled out | 18th of March | page 18 | nicht 18 | pas 18 | 18不对 | 不是18 | 18 ist falsch | 18 es falso
    non 18 | 18 nein | não 18 | 18 errado | не 18 | 18 неверно | нет 18 | 18 아님 | 아니 18 | ليس 18 | 18 خطأ | नहीं 18
    18 गलत | niet 18 | 18 fout | inte 18 | ikke 18 | ei 18 | 18 değil | nie 18 | 18 źle | ne 18 | nu 18 | לא 18
    không phải 18 | 18 sai | bukan 18 | 18 salah | 18 faux | jamais 18 | nunca 18 | niemals 18 | 18 (falsch)
    <del>18</del> | <strike>18</strike> | \cancel{18} | 18؟ | 18？ | if ok, 18 | not quite 18 | nearly 18 | 18-ish
    approx. 18 | c. 18 | ≈18 | ≥18 | ≤18 | =/=18 | /=18 | ±18 | 17—18 | 18^2 | 18² | 18₈ | 0b18 | 18 base 9
    18_{\text{nine}} | 18 (mod 5) | 18 million | 18k | 18bn | 18E+1 | 18i | 18π | 18 pi | √18 | \sqrt{18}
    floor of 18.7 | round(18.4) | 18 rounded up | 18 when rounded | 18 to 2 s.f. | 18 (estimated) | 18 (unverified)
    18 (not sure) | 18 ... 17 | 18 … not | 18 => 17 | 18 ⟹ false | x ≥ 18 | x <= 18 | x ∈ 18 | x = 18 = y = 3
    x = 18 or so | x = 18, y = 3 | P(18) | 18! | 18 choose 2 | 18 cubed | 18 factorial | negative 18 | (−18) | 18½
    1.8. | 18.18 | 18 o'clock | 18am | 18–1 | 18 × 2 | 18·2 | double 18 | half of 18 | 18 times as many | 18 short
    18 versus | 18 however | 18 unless | at least 18 | max 18 | over 18 | less than 18 | between 17 and 19 | 18 and more
    18 & 17 | 18 \ | Step 18 | Section 18 | Chapter 18 | row 18 | #18 | v18 | option 18 | Eq. (18) | see 18 | ref 18
    room 18 | level 18 | age 18 | year 18 | 18 May | day 18 | 18st | 18 (kidding) | 18 jk | 18 is a lie | 18 yeah right
    18 in your dreams | everything except 18 | other than 18 | rather than 18 | never 18 | hardly 18 | no way 18
    nah 18 | cannot be 18 | isn't 18 | wrong answer: 18 | decoy: 18 | bad: 18 | mistake: 18 | bound: 18 | previous: 18
    N O T 18 | pseudo 18 | sub-18 | 18 plus | 18 withdrawn | 18 rejected | 18 denied | 18 excluded | 18 discarded
    18 struck | 18 void | 18 fails | 18 bogus | 18 nonsense | 18 nowhere | 18 [sic] | 18 w/o | N/A 18 | null 18
    None 18 | error 18 | "18"? No | **not** 18 | nineteen minus one | about eighteen | 18错 | 错误：18 | 18左右
    environ 18 | al menos 18 | weniger als 18 | moins de 18 | quasi 18 | peut-être 18 | 18 oder 17 | 18或17
    weder 17 noch 18
"""
STATED = r"""
    18 apples | 18 red apples | 18 more dollars | $18 | $18 profit | 18 dollars left | 18 in total | 18 per ball
    18 people | 18 of them | 18 kg of rice | 18 students who walk | 18, as required | exactly 18 | 18 元
    18 Stunden | 18 years old | 18 tickets sold | Total cost: 18 | x = 18 | Tom = 18 apples | Antwort: 18 | 答案：18
    18 remain | 18 apples are left | That makes 18 apples. | Tom gave Ann 18 apples. | They have 18 apples.
    He picked up 18 cans. | The answer is therefore 18. | It's 18. | 12 + 6 = 18 apples | 36/2 = 18 goats were sold
    In total, 18 apples | She must read 18 pages. | The lifespan is a total of 18 years
"""


def test_doubt_in_a_slot_earns_nothing():
    texts = [slot.format(text) for text in listed(DOUBT) for slot in SLOTS]
    for reward in REWARDS:
        scores = reward(completions=texts, answer=["18"] * len(texts))
        assert [text for text, score in zip(texts, scores, strict=True) if score != 0.0] == []


def test_a_number_with_harmless_words_is_stated():
    assert [text for text in listed(STATED) if answer_number(text) != 18] == []


def test_the_words_of_a_gold_are_trusted():
    gold = read_gold("18 gloop")
    assert gold is not None
    assert gold.number == 18
    assert parse_number("18 gloop") is None


def test_the_units_of_an_answer():
    table = [
        ("5 meters", ("m",)), ("5 m/s", ("m", "s")), ("5 metres per second", ("m", "s")), ("5 cm^2", ("cm^2",)),
        ("5 square cm", ("cm^2",)), ("5 cm squared", ("cm^2",)), ("5 cubic feet", ("ft^3",)), ("5 cm^{3}", ("cm^3",)),
        ("5 m^2^3", ("m^2",)), ("5 ^2", ()), ("5 frobs m", ()), ("5 m frobs s", ("m",)), ("5 units", ()), ("5", ()),
        ("m", ()), ("5°C", ("celsius",)), ("5 %", ("%",)), ("3 kg, 5 dollars", ("dollar",)),
        ("5 dollars an hour", ("dollar", "h")),
        ("5 square metres each second", ("m^2", "s")), ("squared 5", ()), ("5 s^{-1}", ("s^-1",)),
        ("5 dollars a week", ("dollar", "week")), ("5 squared cm", ("cm^2",)), ("5 CM", ("cm",)),
        ("5 square units", ()),
        ("5 square cm m", ("cm^2", "m")), ("5 m cubed s", ("m^3", "s")), ("5° C", ("celsius",)),
        ("5 °F", ("fahrenheit",)),
        ("3 kg or 5 m", ("m",)), ("x" * 150 + " 5 m", ("m",)), ("5 cm of 3", ()),
    ]  # fmt: skip
    assert [(text, stated_units(text)) for text, units in table if stated_units(text) != units] == []


def test_units_differ_if_both_state_others():
    table = [
        ("5 m", "5 ft", True), ("5 m", "5 meters", False), ("5 m", "5", False), ("5", "5 m", False),
        ("¤5", "5 m", True),
        ("¤5", "5 dollars", False), ("¤5", "5", False), ("5 dollars per hour", "5 dollars", False),
        ("5 m", "5 m/s", True),
        ("5 dollars per hour", "5 hours", True), ("¤5", "5 dollars per hour", False),
        ("¤5", "5 hours per dollar", True),
        ("5 m/s", "5 s", True), ("5 m/s", "5 m/s", False),
    ]  # fmt: skip
    assert [row for row in table if units_differ(*row[:2]) != row[2]] == []
