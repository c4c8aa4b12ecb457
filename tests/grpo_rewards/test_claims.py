"""Denied and retracted claims: what the words around an answer do to it."""

from grpo_rewards.claims import is_denied, is_retraction, is_unclaimed
from grpo_rewards.math.correctness import GSM8KCorrectness, MathCorrectness

# In several languages, with boxes that are only part of a formula.
DENIED = r"""
    It lies between 3 and \boxed{18}. | The wrong answer is 18. | An incorrect answer is 18. | A mistaken answer: 18
    It would be wrong to say the answer is 18. | It is false that the answer is 18.
    It is untrue that the answer is 18. | I doubt that the answer is 18. | Nobody says the answer is 18.
    The answer is 18. Nope. | The answer is 18. Wait, that's not right. | The answer is 18. Just kidding.
    The answer is 18. Scratch that. | Not \boxed{18}! | never \boxed{18} | anything but **\boxed{18}**
    far from \boxed{18} | It cannot equal \boxed{18}. | It isn’t \boxed{18}. | The answer is not 18.
    The answer is definitely not 18. | The answer is 18, they say. | Rumor has it that the answer is 18.
    Allegedly the answer is 18. | Supposedly, the answer is 18. | He thinks the answer is 18.
    A naive reader would say the answer is 18. | You might think the answer is 18.
    A common mistake is to say the answer is 18. | The tempting answer is 18. | The trap answer is 18.
    The old answer is 18. | My first answer is 18. | The answer is 18 if x is prime.
    The answer is 18 only if pigs fly. | Unless I erred, the answer is 18. | Let's say the answer is 18.
    Imagine the answer is 18. | Pretend the answer is 18. | How can the answer is 18 be right?
    The answer is 18. Psych! | The answer is 18. Just joking. | The answer is 18. Hmm, no.
    The answer is 18. Hold on, that can't be right. | The answer is 18. Correction: 17. | The answer is 18. I mean 17.
    The answer is 18. Make that 17. | The answer is 18. Rather, 17. | The answer is 18. On second thought, 17.
    The answer is 18. This answer is wrong. | The answer is 18. The previous sentence is false.
    The answer is 18. Please disregard. | The answer is 18. Disregard the above. | The answer is 18. I withdraw that.
    The answer is 18. Strike that. | The answer is 18. Edit: 17. | The answer is 18. Update: no.
    The answer is 18. However, this is wrong. | The answer is 18 [wrong]. | The answer is ~~18~~.
    "The answer is 18", he lied. | He said "The answer is 18", which is wrong. | "The answer is 18." - wrong.
    The statement that the answer is 18 is false. | Anyone who says the answer is 18 is mistaken.
    To say the answer is 18 would be an error. | I refuse to say the answer is 18. | I won't say the answer is 18.
    There is no way the answer is 18. | Under no circumstances the answer is 18.
    By no means is it true that the answer is 18. | In no world the answer is 18. | It's unlikely that the answer is 18.
    It is improbable that the answer is 18. | It is doubtful the answer is 18. | Perhaps the answer is 18.
    Possibly the answer is 18. | Probably the answer is 18. | I think the answer is 18, but it is not.
    The answer is roughly 18. | The answer is close to 18. | The answer is nearly 18. | The answer is not quite 18.
    The answer is 18 in base 9. | The answer is 18 (in hexadecimal). | Answer: no, 18 is wrong
    Answer: 18 (I made this up) | The answer is n't 18. | The answer was 18, but now it is 17.
    The answer is what you get if you add 1 to 18. | The answer is one more than 18. | The answer is twice 18.
    The answer is hidden on page 18. | The answer is in section 18. | The answer is a number like 18.
    The answer is, contrary to 18, 17. | The answer is 18不对 | The reverse of the right answer is 18.
    The negation of the answer is 18. | Half of the answer is 18. | The number before the answer is 18.
    The digit sum of the answer is 18. | My answer is -18 but the answer is 18 for others.
    An upper bound for the answer is 18. | The answer to another question is 18. | A lower bound on the answer is 18.
    Nothing suggests the answer is 18. | Nobody believes the answer is 18. | Few believe the answer is 18.
    The answer is 18 is what a fool would say. | Your answer is 18. | ChatGPT's answer is 18. | His answer is 18.
    The expected wrong answer is 18. | The approximate answer is 18. | The rounded answer is 18.
    The answer is 18 dollars short. | Why the answer is 18 is wrong: it forgets tax.
    It's a myth that the answer is 18. | It is not the case that the answer is 18. | I deny that the answer is 18.
    Q: the answer is 18? A: no | Hypothesis: the answer is 18. | Claim to refute: the answer is 18.
    Without tax, the answer is 18, but with tax it is 17. | \cancel{\boxed{18}} | <del>\boxed{18}</del>
    \boxed{18} is a lie | \boxed{18} is nonsense. | \boxed{18}. Oops, no. | \boxed{18}. Actually, the answer is 17.
    \boxed{18}. I retract this. | \boxed{18}. Ignore this. | \boxed{18}, I don't think so. | \boxed{18} is ruled out.
    \boxed{18} is excluded. | \boxed{18} is impossible. | \boxed{18} must be rejected. | \boxed{18} does not work.
    \boxed{18} doesn't satisfy the equation. | \boxed{18} fails. | \boxed{18} is too large.
    \boxed{18} is not a solution. | \boxed{18} \text{ is wrong} | \boxed{18} \ne x | x \neq \boxed{18}
    $x \ge \boxed{18}$ | $\approx\boxed{18}$ | $\sqrt{\boxed{18}}$ | $2\cdot\boxed{18}$ | $\boxed{18}+1$
    $\boxed{18}^2$ | $\frac{1}{\boxed{18}}$ | Either \boxed{18} or 17. | 17 or \boxed{18} | about \boxed{18}
    approximately \boxed{18} | almost \boxed{18} | less than \boxed{18} | at least \boxed{18} | maybe \boxed{18}
    Could it be \boxed{18}? | He wrote "\boxed{18}". | The student answered \boxed{18}, which is incorrect.
    Someone claims \boxed{18}. | Do not answer \boxed{18}. | You must not put \boxed{18}.
    It's wrong to write \boxed{18}. | format example: \boxed{18} | e.g. \boxed{18} | Die Antwort ist nicht \boxed{18}.
    La réponse n'est pas \boxed{18}. | La respuesta no es \boxed{18}. | Não é \boxed{18}. | Non è \boxed{18}.
    Het is niet \boxed{18}. | Это не \boxed{18}. | Ответ не \boxed{18}. | 答案不是\boxed{18}。 | 不是 \boxed{18}
    答えは\boxed{18}ではありません。 | \boxed{18} ist falsch. | \boxed{18} est faux. | \boxed{18} es falso.
    \boxed{18} неверно. | \boxed{18} é errado | 답은 \boxed{18}이 아닙니다 | \boxed{18} değil
    \boxed{18} # not the answer | % \boxed{18}
    I considered \boxed{18} but rejected it. | I first got \boxed{18}, but that was a mistake. | We rule out \boxed{18}.
    We exclude \boxed{18}. | Discard \boxed{18}. | Eliminate \boxed{18}. | Reject \boxed{18}. | Other than \boxed{18}.
    All but \boxed{18}. | Everything except \boxed{18}. | neither \boxed{18} nor 17 | no longer \boxed{18}
    hardly \boxed{18} | \boxed{18} — incorrect | \boxed{18} => contradiction | \boxed{18} leads to a contradiction.
    Assume \boxed{18}. | Suppose it were \boxed{18}. | guess: \boxed{18} | I'm not sure: \boxed{18}
    unsure, \boxed{18}? | between \boxed{17} and \boxed{18} | from 17 to \boxed{18} | \boxed{18}-\boxed{19}
    \boxed{18}, \boxed{17} | \boxed{18} \boxed{17} | The opposite of \boxed{18} | the square root of \boxed{18}
    \boxed{18} minus 1 | \boxed{18} plus 1
"""
CLAIMED = r"""
    The answer is 18. No more is needed. | The answer is 18. Not a single one is left.
    The answer is 18. I doubt that the answer is 17. | The number of those who do not play is \boxed{18}.
    If no one leaves it is \boxed{18}. | She could earn \boxed{18}. | \boxed{18}. It can't be \boxed{17}.
    How many are left? \boxed{18} | \boxed{18} is not prime. | Thus the answer is 18 dollars.
    We conclude that the answer is 18. | Hence the correct answer is 18. | ### Answer: 18 | The numerical answer is 18.
    My answer is 18. | Our final answer is 18. | I think the answer is 18. | I believe the answer is 18.
    We find that the answer is 18. | This means the answer is 18. | This gives us the answer: 18
    Adding them up, the answer is 18. | Since none are left, the answer is 18. | Nobody else came, so the answer is 18.
    She could not go. The answer is 18. | I'm confident the answer is 18. | It follows that the answer is 18.
    Here's the answer: 18 | The answer is 18. Let me check: 9 + 9 = 18. Yes.
    The answer is 18. We can verify: 20 - 2 = 18. | The answer is 18. I hope this helps!
    The answer is 18. Note that this does not include tax. | The answer is 18. However, it could be computed faster.
    The answer is 18. Actually, this is a well-known result. | The answer is 18. No other value works.
    The answer is 18. This was a hard problem. | The answer is 18 apples. | The answer is $18. | The answer is **18**.
    The answer is exactly 18. | The answer is therefore 18. | The answer is x = 18. | The answer is equal to 18.
    The answer is 18, as required. | The answer to this question is 18. | If we add them, we see the answer is 18.
    There are 20 birds. If 2 leave, the answer is 18. | The wrong way gives 17. The answer is 18.
    It is false that she has 17. The answer is 18. | First, not all are counted; the answer is 18. | \[\boxed{18}\]
    Thus $9 \cdot 2 = \boxed{18}$. | Answer - \boxed{18} | $\displaystyle \boxed{18}$ | $\boxed{18}^\circ$
    $\boxed{18}\,\text{cm}^2$ | \boxed{18}\% | \boxed{18}, as desired. | \boxed{18} is right because 9+9=18.
    \boxed{18} (eighteen) | \boxed{18} (since 9 + 9 = 18) | \boxed{18} and we are done.
    \boxed{18} - which completes the proof | <answer>\boxed{18}</answer> | <b>\boxed{18}</b> | <p>\boxed{18}</p>
    Not every bird left, so \boxed{18} remain. | Tom can't swim, but he counts \boxed{18}.
    She did not sell any of the \boxed{18}. | They never lost, winning \boxed{18} games.
    Let's not forget the tip: \boxed{18} | The number of invalid votes is \boxed{18}.
    The number of students who failed is \boxed{18}. | The number of incorrect answers is \boxed{18}.
    The maximum is \boxed{18}. | The least possible value is \boxed{18}. | The minimum number is \boxed{18}.
    At least one must be red, so \boxed{18}. | The area is half of 36, i.e. \boxed{18}.
    The probability that it is not red is \boxed{18}. | The remainder is \boxed{18}. | we get \boxed{18}
    for a total of \boxed{18} | a grand total of \boxed{18} points | Tom wrote \boxed{18} letters.
    She answered \boxed{18} questions. | It costs \boxed{18}, and no more. | $\boxed{18}$ square units
    $\boxed{18}$ is even. | \boxed{18} is less than 20, as expected. | \boxed{18} is the number of ways.
    \boxed{18} would be the total. | \boxed{18} can be checked by substitution. | Option C: \boxed{18}
    Step 3: \boxed{18} | Solution: 20 - 2 = \boxed{18} | 20 minus 2 equals \boxed{18} | Twice 9 is \boxed{18}
    The square of 3 times 2 is \boxed{18} | The root of 324 is \boxed{18} | The sum is $17+1=\boxed{18}$
    x=\boxed{18} or equivalently 36/2 | Let me not guess; the answer is \boxed{18} | I am sure it is \boxed{18}
    There can only be \boxed{18} | I really say the answer is 18.
"""


def listed(text: str) -> list[str]:
    return [item.strip() for line in text.strip().splitlines() for item in line.split("|")]


def misjudged(texts: list[str], pay: float) -> list[str]:
    """Return the texts that some reward does not pay as expected."""
    found = []
    for text in texts:
        layout = "boxed" if "boxed" in text else "sentence"
        judges = [MathCorrectness(), MathCorrectness(extract=layout)]
        if layout == "sentence":
            judges.append(GSM8KCorrectness(extract="sentence", pay_exact=1, pay_equal=1))
        if {judge(completions=[text], answer=["18"])[0] for judge in judges} != {pay}:
            found.append(text)
    return found


def test_a_denied_or_retracted_claim_earns_nothing():
    assert misjudged(listed(DENIED), 0.0) == []


def test_a_negation_elsewhere_leaves_a_claim_paid():
    assert misjudged(listed(CLAIMED), 1.0) == []


def test_the_box_of_a_gold_is_read_whatever_stands_around_it():
    assert MathCorrectness()(completions=["\\boxed{18}"], answer=["It is not \\boxed{18}?"]) == [1.0]


def test_200_characters_on_each_side_of_a_claim_are_read():
    assert is_unclaimed("doubt " + "x " * 97)
    assert not is_unclaimed("doubt " + "x " * 97 + " ")
    assert [is_denied("not " + "the " * 49 + more, "") for more in ("", " ")] == [True, False]
    assert [is_denied("", " is " + "the " * 47 + more + "wrong") for more in ("   ", "    ")] == [True, False]


def test_adjectives_belong_to_a_claim_that_names_the_answer():
    before = ("the red ", "twice ", "I doubt ")
    assert [is_unclaimed(words, names_answer=False) for words in before] == [False, False, True]
    assert [is_unclaimed(f"the red green {more}") for more in ("blue ", "blue big ")] == [True, False]


def test_a_sentence_takes_the_claim_before_it_back_or_not():
    back = """
        That is wrong. | I lied. | Scratch that. | Never mind | That does not add up. | The opposite is true.
        On second thought, 7. | Actually 7 | I don't think so.
    """
    assert [text for text in listed(back) if not is_retraction(f" {text}")] == []
    assert [
        text for text in ("", " That is right.", " It adds up.", " I don't think 7 is better.") if is_retraction(text)
    ] == []
