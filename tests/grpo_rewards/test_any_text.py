"""Any text gives a finite score or None: no exception, the same in each thread, and a cost linear in the length.

Each completion consists of pieces that mean something to one of the rewards: tags, marks of an answer, formulas, JSON,
YAML-like text, code, prose, other scripts, control characters. Rewards that need a model or an endpoint are skipped.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from grpo_rewards.math.correctness import MathCorrectness
from grpo_rewards.registry import REGISTERED, build_rewards
from tests.support.growth import FACTOR, growth

COMPLETIONS, BATCH = 200_000, 500
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer", "minimum": 0}},
    "required": ["n"],
}
INSTRUCTIONS = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words", "keywords:existence",
                            "detectable_format:json_format"],
    "kwargs": [{}, {"num_words": 5, "relation": "at least"}, {"keywords": ["apples"]}, {}],
}  # fmt: skip
CHOICES = {"A": "18", "B": "1,234", "C": "Tuesday", "D": "x+1"}
LAYOUTS = ("answer_tag", "hashes", "boxed", "a_line", "sentence", "auto")
MODELS, PROGRAMS = {"reward_model", "judge"}, {"unit_tests"}  # these have tests of their own
SPECS: dict[str, list[dict[str, Any]]] = {
    "gsm8k_correctness": [{"extract": layout} for layout in LAYOUTS] + [{"prefilled": "think"}],
    "math_correctness": [{"deadline": 0.5}], "tag_structure": [{}], "tag_count": [{}],
    "tag_presence": [{}, {"tags": ["reasoning", "answer"]}], "well_formed": [{}, {"prefilled": "think"}],
    "group_length": [{"num_generations": 4}],
    "choice_correctness": [{"extract": layout} for layout in ("answer_tag", "sentence", "whole", "auto")],
    "string_match": [{"match": match, "extract": "whole"} for match in ("exact", "casefold", "squad", "f1")],
    "repetition": [{}, {"ngram": 20, "pay": 1, "pay_repeated": 0}],
    "json_schema": [{"schema": SCHEMA, "extract": layout} for layout in ("auto", "fence", "whole")],
    "instructions": [{}],
}  # fmt: skip
CHEAP = [name for name in SPECS if name != "math_correctness"]
PIECES = r"""
    <think> </think> <answer> </answer> <answer </ #### \boxed{ \frac{ \text{ { } $ \( \) A: answer is : = ** `
    A (A) B) C. \text{A} Tuesday not or because correct
    18 17 1,234 1.5e3 ½ − / , . or % 10^{10} \sqrt{2} x+1 \times ^ _ 🙂
    {"n": 1} {"n": [}, "name": "x\u0000" } ```json ``` ```python ``` [[[ ]]] null true -0 1e400 NaN Infinity
    apples, dollars. P.S. * - 1. <<title>> [x] "quoted" 第一 答案是 ответ الجواب उत्तर ١٨ １８ Ⅷ ²
    \sqrt[3]{ \pmatrix \begin{pmatrix} \end{pmatrix} \pi \infty \pm \left( \right) & \\ x^2+1 \sin \int_0^1 !
    __class__ %s %n {0} ${x} ; DROP ' \x1b[2J
"""
SOUP = [*PIECES.split(), "\n", "\n\n", " ", "\t", "\r", "\x00", "\u200b", "\u202e", "\ud800", "\U0010ffff", "e\u0301"]
GOLDS = ["18", "1,234", "Steps.\n#### 5", "1/2", "", "Tuesday", "x+1", "\\frac{\\sqrt{3}}{2}", "(1,2)", "A", None]
NUMBERS = ["18", "1,234", "Steps.\n#### 5", "1/2", "", None]
"""Golds that are compared without math-verify."""


def rewards(names: Sequence[str]) -> list[Any]:
    specs = [
        {"name": name, "alias": f"{name} {place}", "kwargs": kwargs}
        for name in names
        for place, kwargs in enumerate(SPECS[name])
    ]
    return [built.function for built in build_rewards(specs)]


def scored(function: Any, completions: Sequence[Any], golds: Sequence[Any]) -> list[float | None]:
    """Return the scores of completions, each of which is a finite number up to the highest pay, or None."""
    size = len(completions)
    columns = {"choices": [CHOICES] * size, **{key: [value] * size for key, value in INSTRUCTIONS.items()}}
    ids = [[0] * len(str(completion)) for completion in completions]
    scores = function(
        prompts=["p"] * size, completions=completions, completion_ids=ids, answer=list(golds), **columns
    )  # fmt: skip
    assert len(scores) == size
    for completion, score in zip(completions, scores, strict=True):
        assert score is None or (math.isfinite(score) and score <= function.highest_pay), (function, completion, score)
    return scores


def test_every_registered_reward_is_fuzzed() -> None:
    assert set(SPECS) | MODELS | PROGRAMS == set(REGISTERED)


def a_completion(draw: random.Random) -> Any:
    """Return a text of up to 60 pieces, sometimes of random characters, sometimes as messages."""
    kind = draw.random()
    if kind < 0.05:
        text = "".join(chr(draw.randrange(0x110000)) for _ in range(draw.randrange(40)))
    else:
        text = draw.choice(["", " "]).join(draw.choices(SOUP, k=draw.randrange(1 + draw.choice([3, 15, 60]))))
    if kind > 0.5:
        text = f"<think>\n{draw.choice(SOUP)}\n</think>\n<answer>\n{text}\n</answer>"
    if kind > 0.95:
        messages = [[{"role": "assistant", "content": text}], [{"content": [{"text": text}]}], [], None, [{}], 7]
        return draw.choice(messages)
    return text


def test_a_sample_of_completions_is_scored_alike_each_time() -> None:
    draw = random.Random(0)
    completions = [a_completion(draw) for _ in range(40)]
    golds = [draw.choice(NUMBERS) for _ in completions]
    for function in rewards(CHEAP):
        assert scored(function, completions, golds) == scored(function, completions, golds)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SPECS)
def test_200_000_completions_are_scored(name: str) -> None:
    functions, draw = rewards([name]), random.Random(name)
    known = GOLDS if name == "math_correctness" else NUMBERS
    for _ in range(COMPLETIONS // BATCH):
        completions, golds = [a_completion(draw) for _ in range(BATCH)], draw.choices(known, k=BATCH)
        for function in functions:
            scored(function, completions, golds)


ADVERSARIAL = {
    "tower of ten": "10^{10^{10}}", "tower of nine": "9^{9^{9^9}}", "power": "7^{100000000}",
    "scientific": "1\\times10^{999999999}", "scientific, e": "1e999999999", "factorial": "100000000!",
    "binomial": "\\binom{20000}{10000}", "gcd of powers": "\\gcd(7^{100000000}, 3^{100000000})",
    "sum": "\\sum_{k=1}^{1000000000000} k^{k}", "integral": "\\int_0^{10^{10}} x^{x^x} dx",
    "opening braces": "{" * 5000, "balanced braces": "{" * 5000 + "}" * 5000,
    "nested fractions": "\\frac{1}{" * 300 + "2" + "}" * 300, "nested roots": "\\sqrt{" * 150 + "2" + "}" * 150,
    "nested parentheses": "(" * 499 + "1" + ")" * 499, "spaces": "1" + " " * 8000 + "x",
    "short spaces": "18" + " " * 990 + "x", "digits": "9" * 100_000, "short digits": "9" * 999,
    "number groups": "1" + ",000" * 240 + "x", "number words": "one " * 240, "many numbers": "18 " * 30_000,
    "NUL": "\x00" * 500, "lone surrogates": "\ud800" * 500, "zero width": "\u200b" * 999,
    "tag repeats": "\n</think>\n<answer>\n" * 2000, "openings": "<answer>" * 5000, "thoughts": "<think>" * 5000,
    "boxes": "\\boxed{" * 5000, "hashes": "####\n" * 5000, "answers": "answer is\n\n" * 5000,
    "A lines": "\nA:" * 10_000,
}  # fmt: skip


FEW = ["tower of ten", "number words", "lone surrogates"]


@pytest.mark.parametrize("kinds", [FEW, pytest.param(list(ADVERSARIAL), marks=pytest.mark.slow)], ids=["few", "all"])
def test_an_adversarial_text_scores_the_same_in_threads(kinds: list[str]) -> None:
    """Score texts in the main thread and in another one: alike, and a wrong number is not paid in any layout."""
    places = ("{}", "<think>a</think><answer>{}</answer>", "\\boxed{{{}}}", "<think>{}</think>")  # a group of four
    texts = [place.format(ADVERSARIAL[kind]) for kind in kinds for place in places]
    golds = ["18"] * len(texts)
    with ThreadPoolExecutor(1) as thread:
        for function in rewards(list(SPECS)):
            scores = scored(function, texts, golds)
            assert thread.submit(scored, function, texts, golds).result() == scores
            assert not function.__name__.startswith("gsm8k") or set(scores) == {0.0}


@pytest.mark.slow
def test_an_adversarial_formula_is_not_equal() -> None:
    texts = [f"\\boxed{{{text}}}" for text in list(ADVERSARIAL.values())[::4]]
    for text in texts:
        assert MathCorrectness(deadline=0.5)(completions=[text], answer=["x+1"]) == [0.0]


# Unfinished and repeated pieces make a backtracking matcher read a text again and again.
REPEATED = [*SOUP, *(text[:40] for text in ADVERSARIAL.values()), "a,b", "1 ", "(", '{"n":', "x" * 9 + " "]


def growth_of(function: Any, piece: str, shape: str) -> float:
    """Return the smallest growth of the CPU time from one length to FACTOR times that length.

    Three measurements are made if the first is large, because noise can only raise one.
    """
    size = getattr(function, "num_generations", 1) or 1
    call: Callable[[str], Any] = lambda text: scored(function, [text] * size, ["18"] * size)  # noqa: E731
    make: Callable[[int], str] = lambda length: shape.format(piece * (length // len(piece)))  # noqa: E731
    found = math.inf
    for _ in range(3):
        found = min(found, growth(call, make, 4000))
        if found <= 2 * FACTOR:
            break
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "every", [pytest.param(15, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("name", CHEAP)
def test_no_repeated_piece_costs_more_than_its_length(name: str, every: int) -> None:
    """Measure rewards whose work is done in this process, so without symbolic comparisons."""
    too_fast = []
    for function in rewards([name]):
        for piece in REPEATED[CHEAP.index(name) % every :: every]:
            for shape in ("{}", "<answer>{}</answer>", "<think>{}"):
                found = growth_of(function, piece, shape)
                if found > 2 * FACTOR:
                    too_fast.append((function.name, piece, shape, round(found, 1)))
    assert not too_fast
