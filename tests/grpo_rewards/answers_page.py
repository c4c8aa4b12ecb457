"""Generator of docs/answers.md: borderline answers, and how the correctness rewards read them.

python -m tests.grpo_rewards.answers_page > docs/answers.md
"""

from __future__ import annotations

from typing import Any

import yaml

from grpo_rewards import choice_correctness, math_correctness
from grpo_rewards.math.correctness import GSM8KCorrectness

HEAD = """# Borderline answers

Made by `python -m tests.grpo_rewards.answers_page > docs/answers.md`. Tests score every row again.

## A number or a formula

Where two readings of an answer are defensible, this table decides: the verdicts of `gsm8k_correctness`.

| question | arguments | gold | completion | verdict |
|---|---|---|---|---|
"""
FORMULAS_HEAD = """
## A formula

A gold that is not one formula is compared with an answer of its kind only, and many forms are read as others: the
verdicts of `math_correctness`. `symbolic` is equal by math-verify.

| question | gold | boxed answer | verdict |
|---|---|---|---|
"""
CHOICES_HEAD = """
## A choice

The choices that `choice_correctness` reads.

| question | choices | gold | completion | names |
|---|---|---|---|---|
"""
# One row per line: the cells of the table but for the last one, which the reward gives.
ANSWERS = r"""
A percent sign is a unit. | – | `18` | `<answer>18%</answer>`
A percent sign does not divide by 100. | – | `0.18` | `<answer>18%</answer>`
A hedged number is not an answer. | – | `18` | `<answer>about 18</answer>`
A number with an approximation sign is not an answer. | – | `18` | `<answer>≈ 18</answer>`
A guess is not an answer, wherever the hedge is. | – | `18` | `<answer>She has 18 apples, I think.</answer>`
A sentence with one number states that number. | – | `18` | `<answer>She has 18 apples left.</answer>`
A number in words is read too. | – | `18` | `<answer>There are eighteen birds on the wire.</answer>`
A sentence with two numbers states none. | – | `18` | `<answer>In 3 days she has 18 apples</answer>`
A number in words counts as a number. | – | `18` | `<answer>In two days she has 18 apples</answer>`
An ordinal counts as a number. | – | `18` | `<answer>On the third day she has 18 apples</answer>`
Of several numbers, one in bold is the answer. | – | `18` | `<answer>After 3 days she has **18** apples.</answer>`
Of several numbers, one between `__` is the answer. | – | `18` | `<answer>She sold __18__ of 30 apples.</answer>`
Of several numbers, one in a box is the answer. | – | `18` | `<answer>For 3 days they need \boxed{18 dollars} in all.</answer>`
Of several numbers, one between `\(…\)` is the answer. | – | `18` | `<answer>In 3 days she earns \(18\) dollars.</answer>`
A number that is set off must be the answer, not its circumstance. | – | `3` | `<answer>In **3** days she has 18 apples.</answer>`
Two numbers that are set off state none. | – | `18` | `<answer>In **3** days she has **18** apples.</answer>`
A comparison is not an answer. | – | `18` | `<answer>She has more than 18 apples.</answer>`
A bound is not an answer. | – | `18` | `<answer>She has 18 apples at most.</answer>`
A difference is an answer. | – | `18` | `<answer>She needs 18 more dollars.</answer>`
A negation is not an answer. | – | `18` | `<answer>She doesn't have 18 apples.</answer>`
An alternative is not an answer. | – | `18` | `<answer>She has 18 apples or so.</answer>`
A condition is not an answer. | – | `18` | `<answer>If she has 18 apples, she wins.</answer>`
A question is not an answer. | – | `18` | `<answer>Does she have 18 apples?</answer>`
A part or a multiple of a number is another number. | – | `18` | `<answer>She has half of 18 apples.</answer>`
A date is not an answer. | – | `18` | `<answer>She leaves on March 18.</answer>`
A time is not an answer. | – | `18` | `<answer>She leaves at 18:00.</answer>`
A range is not an answer. | – | `18` | `<answer>She has 17-18 apples.</answer>`
A label is not prose. | – | `18` | `<answer>The answer is 18.</answer>`
A unit may be wrong or invented. | – | `18` | `<answer>18 frobs</answer>`
A word that is neither a unit nor a plural is doubt. | – | `18` | `<answer>18 nope</answer>`
A label that names no quantity is doubt. | – | `18` | `<answer>page 18</answer>`
A denial in another language is one. | – | `18` | `<answer>nicht 18</answer>`
A scale word multiplies the number. | – | `18000` | `<answer>18 thousand dollars</answer>`
A dozen is a unit. | – | `2` | `<answer>2 dozen eggs</answer>`
Two alternatives are not an answer. | – | `18` | `<answer>17 or 18</answer>`
Two numbers are not an answer, in either order. | – | `18` | `<answer>18, 17</answer>`
An equation between numbers states two numbers. | – | `18` | `<answer>17 = 18</answer>`
An equation between numbers states two, set off or not. | – | `18` | `<answer>So she has 17 + 1 = **18** apples.</answer>`
An equation for a name states one number. | – | `18` | `<answer>x = 18</answer>`
A true equation states its right side. | – | `13` | `<answer>12 + 1 = 13</answer>`
A false equation states nothing. | – | `13` | `<answer>12 + 2 = 13</answer>`
A number may equal a formula gold. | – | `2^{10}` | `<answer>1024</answer>`
Another known unit is another answer. | – | `5 meters` | `<answer>5 feet</answer>`
An expression is not evaluated. | – | `18` | `<answer>17 + 1</answer>`
A power is an expression. | – | `1000` | `<answer>10^3</answer>`
Scientific notation is a number. | – | `1800` | `<answer>1.8 \times 10^3</answer>`
An exponent is not a unit. | – | `18` | `<answer>18e2</answer>`
A formula is not a number, even if it equals one. | `extract: boxed` | `18` | `\boxed{\sqrt{324}}`
Decimals are compared exactly. | – | `33.333` | `<answer>33.33</answer>`
A fraction equals a decimal only exactly. | – | `0.5` | `<answer>1/2</answer>`
A rounded third is not a third. | – | `1/3` | `<answer>0.333333</answer>`
A point is a decimal point. | – | `18000` | `<answer>18.000</answer>`
A comma groups digits by three or not at all. | – | `18` | `<answer>18,00</answer>`
With `decimal: comma`, a comma is the decimal mark. | `decimal: comma` | `18` | `<answer>18,00</answer>`
With `decimal: comma`, a point before three digits groups them. | `decimal: comma` | `18000` | `<answer>18.000 €</answer>`
A number that cannot have a decimal comma keeps its point. | `decimal: comma` | `18,5` | `<answer>18.50</answer>`
An exclamation mark is a factorial. | – | `18` | `<answer>18!</answer>`
An exclamation mark in a sentence is a factorial. | – | `18` | `<answer>The number of ways is 18!</answer>`
An exclamation mark behind a unit is punctuation. | – | `18` | `<answer>The total comes to **18 miles**!</answer>`
Parentheses are not a minus sign. | – | `18` | `<answer>(18)</answer>`
Parentheses around a comma make a pair. | – | `2100` | `<answer>(2,100)</answer>`
Of two answer blocks the last counts. | – | `18` | `<answer>17</answer><answer>18</answer>`
Of two answer blocks only the last counts. | – | `18` | `<answer>18</answer><answer>17</answer>`
Of two boxes the last counts. | `extract: boxed` | `18` | `\boxed{17} or \boxed{18}`
An unclosed tag is not an answer. | – | `18` | `<answer>18`
An unclosed tag after a closed one is not an answer. | – | `18` | `<answer>18</answer><answer>`
An unclosed box is not an answer. | `extract: boxed` | `18` | `\boxed{18`
An answer inside the thinking does not count. | – | `18` | `<think><answer>18</answer></think>`
An answer in a thinking block that never closes does not count. | – | `18` | `<think>so <answer>18</answer>`
All text up to the last `</think>` is thinking. | – | `18` | `so</think><answer>18</answer>`
A completion may start inside the thinking. | `prefilled: think` | `18` | `so <answer>18</answer>`
An empty answer is a missing answer. | – | `18` | `<answer> </answer>`
`...` is an answer, and wrong. | – | `18` | `<answer>...</answer>`
Text after the answer block is ignored. | – | `18` | `<answer>18</answer> or 17`
Case matters in formulas only. | – | `Tuesday` | `<answer>tuesday</answer>`
An empty gold can't be scored. | – | ` ` | `<answer>18</answer>`
A solution without a final answer can't be scored. | – | `She sold 24 clips in May and 48 in April.` | `<answer>72</answer>`
"""  # noqa: E501
FORMULAS = r"""
An equation between numbers equals itself, side by side. | `2^{10}=1024` | `2^{10} = 1024`
… or its right side. | `2^{10}=1024` | `1024`
… and not another true equation. | `2^{10}=1024` | `1=1`
An equation equals one whose difference of sides is the same up to a factor. | `y = 2x + 1` | `2y = 4x + 2`
A value must differ by 0, however small it is. | `\frac{1}{2^{99}}` | `\frac{1}{2^{98}}`
A ratio of three or more is compared number by number. | `1:2:3` | `1:3:2`
So are a range, | `5-7` | `5-8`
a date, | `2020-05-07` | `2020-05-08`
and sizes. | `2 \times 3, 4 \times 2` | `2 \times 3, 2 \times 4`
A time has a half of the day. | `5:30 \text{ p.m.}` | `5:30 \text{ a.m.}`
Several quantities have as many names, in any order. | `3 hours 20 minutes` | `20 minutes 3 hours`
Parts with names are quantities too. | `(a) 5 (b) 4` | `(b) 4 (a) 5`
A list with equal items is compared item by item. | `-1, -1, 1, 1` | `-1, 1, 1`
A permutation equals the same text but for spaces, | `(1 2)(3 4)` | `(3 4)(1 2)`
as do a transpose or an inverse, | `A^T` | `A`
a modulus, | `n \equiv 1 \mod 4` | `n \equiv 1 \mod 3`
and a partial derivative, an angle or a chain of letters. | `\angle ABC` | `\angle ACB`
A name and its value state the value, | `f(2) = 5` | `5`
a probability, | `P(X=2) = \frac{3}{8}` | `\frac{3}{8}`
an angle, | `\angle A = 60^\circ` | `60^\circ`
a name with an index, | `k_{\max} = 5` | `5`
and a ratio of sides. | `\frac{NO}{BO} = 2` | `2`
Names before a tuple state the tuple, | `(p,q) = (3,2)` | `(3,2)`
and names in a list the list. | `x = 1, x = 2` | `1, 2`
A double sign states both values, | `1 \pm \sqrt{19}` | `1 - \sqrt{19}, 1 + \sqrt{19}`
in a set too. | `\{\pm 1, 3\}` | `\{-1, 1, 3\}`
Inequalities state an interval, | `-2 \le x \le 7` | `[-2,7]`
as does membership. | `x \in [-2,7]` | `[-2,7]`
Alternatives state a union. | `x < 1 \text{ or } x > 2` | `(-\infty,1) \cup (2,\infty)`
`\mathbb{R}` is an interval. | `\mathbb{R}` | `(-\infty,\infty)`
A repeating decimal is a number, | `0.\overline{36}` | `\frac{4}{11}`
in parentheses too. | `0.(36)` | `\frac{4}{11}`
Number words are numbers, | `three quarters` | `\frac{3}{4}`
also beside the number. | `7 (seven)` | `7`
A formula may be written as in Python. | `x**2 + sqrt(2)` | `x^2 + \sqrt{2}`
A product may lack its sign. | `2pi` | `2\pi`
Infinity may be a word in a formula. | `(0, infinity)` | `(0,\infty)`
A complex number may have decimals. | `14.0 + -1.0i` | `14 - i`
An approximation behind a value is dropped. | `\sqrt{2} \approx 1.414` | `\sqrt{2}`
A letter may be set as text. | `\text{(C)}` | `C`
A letter behind the number of a formula is a variable. | `$2s$` | `2`
Behind a bare number it is a unit. | `4s` | `4`
"""
CHOICES = r"""
A letter may be formatted. | Paris, London | A | `**(a)**`
A letter may be followed by its text. | Paris, London | A | `A) Paris`
A text alone is read without case, article and final period. | the Nile, the Rhine | A | `Nile.`
A reason may follow. | Paris, London | A | `The answer is A, because B is not in France.`
Another choice may be ruled out. | Paris, London | A | `not B but A`
The last claim counts. | Paris, London | A | `The answer is B. Wait, no: the answer is A.`
Two choices are none. | Paris, London | A | `A or B`
Two choices in two sentences are none. | Paris, London | A | `The answer is A. Or B.`
A letter and another choice's text are none. | Paris, London | A | `A. London`
A minus sign belongs to the text behind a letter. | -5, 5 | A | `(A) -5`
A label may be in another language. | Paris, London | A | `Die richtige Antwort lautet A.`
A negation names no choice. | Paris, London | A | `not B`
A hedged choice is not an answer. | Paris, London | A | `maybe A`
An article is not a letter. | Paris, London | A | `A city in France`
The longer text is named, not the text within it. | York, New York | B | `New York`
Letters in a choice's text belong to the text. | x, Both A and C, y | B | `Both A and C`
A text that looks like a letter is read as the letter. | B, A | A | `A`
A sign belongs to its number. | 2, -2 | B | `-2`
"""


def verdict(arguments: str, gold: str, completion: str) -> str:
    """Return the verdict of `gsm8k_correctness` for the cells of a row."""
    columns: dict[str, Any] = {}
    reward = GSM8KCorrectness(**({} if arguments == "–" else yaml.safe_load(arguments.strip("`"))))
    reward(completions=[code(completion)], answer=[code(gold)], log_extra=columns.__setitem__)
    return columns["verdict"][0]


def formula_verdict(gold: str, answer: str) -> str:
    """Return the verdict of `math_correctness` on a boxed answer."""
    columns: dict[str, Any] = {}
    boxed = rf"The answer is \boxed{{{code(answer)}}}."
    math_correctness(completions=[boxed], answer=[code(gold)], log_extra=columns.__setitem__)
    return columns["verdict"][0]


def choice(choices: str, gold: str, completion: str) -> str:
    """Return the letter that `choice_correctness` reads, or `none`, for the cells of a row."""
    columns: dict[str, Any] = {}
    choice_correctness(
        completions=[code(completion)], answer=[gold], choices=[choices.split(", ")], log_extra=columns.__setitem__
    )
    return columns["extracted"][0] or "none"


def code(cell: str) -> str:
    """Return the text of a cell without its backquotes."""
    return cell.removeprefix("`").removesuffix("`")


def page() -> str:
    """Return the page with the verdict of each row."""
    lines = [HEAD]
    for line in ANSWERS.strip().splitlines():
        _, *cells = line.split(" | ")
        lines.append(f"| {line} | {verdict(*cells)} |\n")
    lines.append(FORMULAS_HEAD)
    for line in FORMULAS.strip().splitlines():
        _, *cells = line.split(" | ")
        lines.append(f"| {line} | {formula_verdict(*cells)} |\n")
    lines.append(CHOICES_HEAD)
    for line in CHOICES.strip().splitlines():
        _, *cells = line.split(" | ")
        lines.append(f"| {line} | {choice(*cells)} |\n")
    return "".join(lines)


if __name__ == "__main__":
    print(page(), end="")
