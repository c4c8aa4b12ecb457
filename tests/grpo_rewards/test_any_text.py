"""Any text gives a finite number or None, repeatably and from any thread, also texts that hang or crash peers."""

import asyncio
import math
import multiprocessing
import threading
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_rewards import tag_count, tag_presence, tag_structure, well_formed
from grpo_rewards.choices import ChoiceCorrectness
from grpo_rewards.length import GroupLength
from grpo_rewards.math.correctness import GSM8KCorrectness, MathCorrectness
from grpo_rewards.ngrams import Repetition
from grpo_rewards.registry import build_rewards
from grpo_rewards.strings import StringMatch

FORMAT = [tag_structure, tag_count, tag_presence, well_formed]
LAYOUTS = ("answer_tag", "hashes", "boxed", "a_line", "sentence", "auto")
REWARDS = [
    *FORMAT,
    *(GSM8KCorrectness(extract=layout, name=layout) for layout in LAYOUTS),
    MathCorrectness(deadline=1.0),
    GroupLength(num_generations=1),
    *(
        built.function
        for built in build_rewards(
            [
                {"name": "sum", "rewards": ["tag_count", "gsm8k_correctness"]},
                {"name": "gate", "reward": "gsm8k_correctness", "only_if": "tag_count"},
            ]
        )
    ),
    *(
        ChoiceCorrectness(extract=layout, name=f"choice {layout}")
        for layout in ("answer_tag", "sentence", "whole", "auto")
    ),
    *(StringMatch(match=match, extract="whole", name=match) for match in ("exact", "casefold", "squad", "f1")),
    *(
        [StringMatch(match="pattern", extract="whole", pattern="(1|8|18)*x?", name="pattern")]
        if find_spec("re2")
        else []
    ),
    Repetition(),
    Repetition(ngram=20, pay=1, pay_repeated=0, name="variety"),
]
CHOICES = {"A": "18", "B": "1,234", "C": "Tuesday", "D": "x+1"}


def score(reward, text, gold):
    (result,) = reward(prompts=["p"], completions=[text], completion_ids=[[0]], answer=[gold], choices=[CHOICES])
    assert result is None or (isinstance(result, float) and math.isfinite(result)), (reward, text, result)
    return result


PIECES = r"""
    <think> </think> <answer> </answer> <answer </ #### \boxed{ \frac{ \text{ { } $ \( \) A: answer is : = ** `
    A (A) B) C. \text{A} Tuesday not or because correct
    18 17 1,234 1.5e3 ½ − / , . or % 10^{10} \sqrt{2} x+1 \times ^ _ 🙂
"""
SOUP = st.lists(st.sampled_from([*PIECES.split(), "\n", "\r", " ", "\x00", "\u200b", "\ud800"]), max_size=25).map(
    "".join
)
TEXTS = st.one_of(SOUP, st.text(st.characters()), SOUP.map("<think>\na\n</think>\n<answer>\n{}\n</answer>".format))
GOLDS = st.sampled_from(["18", "18", "1,234", "Steps.\n#### 5", "1/2", "", "Tuesday", "x+1", "A", "B"])


def check_any_text(text, gold):
    for reward in REWARDS:
        assert score(reward, text, gold) == score(reward, text, gold)


test_any_text = settings(max_examples=150, deadline=None)(given(TEXTS, GOLDS)(check_any_text))
test_any_text_at_length = pytest.mark.nightly(
    pytest.mark.timeout(1800)(settings(max_examples=20_000, deadline=None)(given(TEXTS, GOLDS)(check_any_text)))
)

ADVERSARIAL = {
    "tower of ten": "10^{10^{10}}", "tower of nine": "9^{9^{9^9}}", "power": "7^{100000000}",
    "scientific": "1\\times10^{999999999}", "scientific, e": "1e999999999", "factorial": "100000000!",
    "binomial": "\\binom{20000}{10000}", "gcd of powers": "\\gcd(7^{100000000}, 3^{100000000})",
    "sum": "\\sum_{k=1}^{1000000000000} k^{k}", "integral": "\\int_0^{10^{10}} x^{x^x} dx",
    "opening braces": "{" * 5000, "balanced braces": "{" * 5000 + "}" * 5000,
    "nested fractions": "\\frac{1}{" * 300 + "2" + "}" * 300, "nested roots": "\\sqrt{" * 150 + "2" + "}" * 150,
    "nested parentheses": "(" * 499 + "1" + ")" * 499, "spaces": "1" + " " * 8000 + "x",
    "short spaces": "18" + " " * 990 + "x", "digits": "9" * 1_000_000, "short digits": "9" * 999,
    "number groups": "1" + ",000" * 240 + "x", "number words": "one " * 240, "megabyte": "18 " * 350_000,
    "NUL": "\x00" * 500, "lone surrogates": "\ud800" * 500, "zero width": "\u200b" * 999,
    "tag repeats": "\n</think>\n<answer>\n" * 16_000, "openings": "<answer>" * 50_000, "thoughts": "<think>" * 50_000,
    "boxes": "\\boxed{" * 50_000, "hashes": "####\n" * 50_000, "answers": "answer is\n\n" * 50_000,
    "A lines": "\nA:" * 100_000,
}  # fmt: skip
PLACES = ["{}", "<answer>{}</answer>", "<think>a</think><answer>{}</answer>", "\\boxed{{{}}}", "<think>{}</think>"]


def record_everywhere(kind):
    texts = [place.format(ADVERSARIAL[kind]) for place in PLACES]
    return [[score(reward, text, "18") for text in texts] for reward in REWARDS]


def check_everywhere(kind):
    """Score a text in threads and coroutines: every reward, in five places."""
    expected = record_everywhere(kind)
    assert all(not value for row in expected[4:10] for value in row)  # the exact rule pays nothing in any layout

    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(record_everywhere(kind)))
    thread.start()
    thread.join()

    async def in_a_coroutine():
        return record_everywhere(kind)

    assert [*outcomes, asyncio.run(in_a_coroutine())] == [expected, expected], kind


@pytest.mark.parametrize("kind", ["tower of ten", "nested fractions", "number words", "lone surrogates"])
def test_an_adversarial_text_scores_the_same_in_threads_and_coroutines(kind):
    check_everywhere(kind)


@pytest.mark.slow
def test_every_adversarial_text_scores_the_same_in_threads_and_coroutines():
    for kind in ADVERSARIAL:
        check_everywhere(kind)


@pytest.mark.slow
def test_another_process_gives_the_same_scores():
    kinds = ["short digits", "lone surrogates", "opening braces"]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        assert list(executor.map(record_everywhere, kinds)) == list(map(record_everywhere, kinds))


@pytest.mark.slow
def test_an_adversarial_formula_is_not_equal():
    reward = MathCorrectness(deadline=0.5)
    for kind in list(ADVERSARIAL)[::3]:
        for text in (f"<answer>{ADVERSARIAL[kind]}</answer>", f"\\boxed{{{ADVERSARIAL[kind]}}}"):
            assert score(reward, text, "x+1") == 0.0, kind
