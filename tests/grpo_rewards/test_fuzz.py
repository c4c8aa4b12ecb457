"""200,000 completions through every reward: no exception, a finite score or None, and a cost linear in the length.

Each completion consists of pieces that mean something to one of the rewards: tags, marks of an answer, formulas, JSON,
YAML-like text, code, prose, other scripts, control characters. Rewards that need a model or an endpoint are skipped.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from grpo_rewards.registry import REGISTERED, build_rewards
from tests.grpo_rewards.test_any_text import ADVERSARIAL, CHOICES, PIECES
from tests.support.growth import FACTOR, growth

COMPLETIONS = 200_000
BATCH = 500
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer", "minimum": 0}},
    "required": ["n"],
}
INSTRUCTIONS = {
    "instruction_id_list": [
        "punctuation:no_comma",
        "length_constraints:number_words",
        "keywords:existence",
        "detectable_format:json_format",
    ],
    "kwargs": [{}, {"num_words": 5, "relation": "at least"}, {"keywords": ["apples"]}, {}],
}
LAYOUTS = ("answer_tag", "hashes", "boxed", "a_line", "sentence", "auto")
MODELS = {"reward_model", "judge"}
PROGRAMS = {"unit_tests"}  # its runs have tests of their own, in test_programs.py
SPECS: dict[str, list[dict[str, Any]]] = {
    "gsm8k_correctness": [{"extract": layout} for layout in LAYOUTS] + [{"prefilled": "think"}],
    "math_correctness": [{"deadline": 0.5}], "tag_structure": [{}], "tag_count": [{}],
    "tag_presence": [{}, {"tags": ["reasoning", "answer"]}], "well_formed": [{}, {"prefilled": "think"}],
    "group_length": [{"num_generations": 4}],
    "choice_correctness": [{"extract": layout} for layout in ("answer_tag", "sentence", "whole", "auto")],
    "string_match": [{"match": match, "extract": "whole"} for match in ("exact", "casefold", "squad", "f1")],
    "repetition": [{}, {"ngram": 20}], "json_schema": [{"schema": SCHEMA}], "instructions": [{}],
}  # fmt: skip
EXTRA = r"""
    {"n": 1} {"n": [}, "name": "x\u0000" } ```json ``` ```python ``` [[[ ]]] null true -0 1e400 NaN Infinity
    apples, dollars. P.S. * - 1. <<title>> [x] "quoted" 第一 答案是 ответ الجواب उत्तर ١٨ １８ Ⅷ ²
    \sqrt[3]{ \pmatrix \begin{pmatrix} \end{pmatrix} \pi \infty \pm \left( \right) & \\ x^2+1 \sin \int_0^1 !
    __class__ %s %n {0} ${x} ; DROP ' \x1b[2J
"""
SOUP = [
    *PIECES.split(),
    *EXTRA.split(),
    *("\n", "\n\n", " ", "\t", "\r", "\x00", "\u200b", "\u202e", "\ud800", "\U0010ffff", "e\u0301"),
]
GOLDS = ["18", "1,234", "Steps.\n#### 5", "1/2", "", "Tuesday", "x+1", "\\frac{\\sqrt{3}}{2}", "(1,2)", "A", None]
# Golds that are compared without math-verify, which the test of `math_correctness` exercises enough.
NUMBERS = [gold for gold in GOLDS if gold not in ("x+1", "\\frac{\\sqrt{3}}{2}", "(1,2)", "Tuesday", "A")]


def rewards(names: Sequence[str]) -> list[Any]:
    specs = [
        {"name": name, "alias": f"{name} {place}", "kwargs": kwargs}
        for name in names
        for place, kwargs in enumerate(SPECS[name])
    ]
    return [built.function for built in build_rewards(specs)]


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
        return draw.choice(
            [[{"role": "assistant", "content": text}], [{"content": [{"text": text}]}], [], None, [{}], 7]
        )
    return text


def check_batch(functions: Sequence[Any], draw: random.Random, size: int = BATCH, golds: Sequence[Any] = GOLDS) -> None:
    completions = [a_completion(draw) for _ in range(size)]
    columns = {
        "prompts": ["p"] * size,
        "completion_ids": [[0]] * size,
        "answer": [draw.choice(golds) for _ in range(size)],
        "choices": [CHOICES] * size,
        **{key: [value] * size for key, value in INSTRUCTIONS.items()},
    }
    for function in functions:
        scores = function(completions=completions, **columns)
        assert len(scores) == size
        for completion, score in zip(completions, scores, strict=True):
            assert score is None or (isinstance(score, (int, float)) and math.isfinite(score)), (
                function,
                completion,
                score,
            )


CHEAP = [name for name in SPECS if name != "math_correctness"]


def test_a_sample_of_completions_is_scored() -> None:
    check_batch(rewards(CHEAP), random.Random(0), 200, NUMBERS)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SPECS)
def test_200_000_completions_are_scored(name: str) -> None:
    functions, draw = rewards([name]), random.Random(name)
    golds = GOLDS if name == "math_correctness" else NUMBERS
    for _ in range(COMPLETIONS // BATCH):
        check_batch(functions, draw, golds=golds)


# Unfinished and repeated pieces make a backtracking matcher read a text again and again.
REPEATED = [*SOUP, *(text[:40] for text in ADVERSARIAL.values()), "a,b", "1 ", "(", '{"n":', "x" * 9 + " "]
LENGTH = 4000


def scored(function: Any) -> Callable[[str], Any]:
    given = {"answer": ["18"], "choices": [CHOICES], **{key: [value] for key, value in INSTRUCTIONS.items()}}
    size = getattr(function, "num_generations", 1) or 1

    def call(text: str) -> Any:
        return function(
            prompts=["p"] * size, completions=[text] * size, completion_ids=[[0] * len(text)] * size,
            **{key: value * size for key, value in given.items()},
        )  # fmt: skip

    return call


def check_repeated(name: str, every: int) -> None:
    """Compare the CPU time at one length and at four times that length, so that the machine makes no difference.

    A symbolic comparison is left out: it runs in another process and has its own deadline.
    """
    too_fast = []
    for function in rewards([name]):
        for piece in REPEATED[CHEAP.index(name) % every :: every]:
            for shape in ("{}", "<answer>{}</answer>", "<think>{}"):
                found = growth_of(function, piece, shape)
                if found > 2 * FACTOR:
                    too_fast.append((function.name, piece, shape, round(found, 1)))
    assert not too_fast


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEAP)
def test_no_repeated_piece_costs_more_than_its_length(name: str) -> None:
    check_repeated(name, 5)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CHEAP)
def test_no_repeated_piece_of_any_kind_costs_more_than_its_length(name: str) -> None:
    check_repeated(name, 1)


def growth_of(function: Any, piece: str, shape: str) -> float:
    """Return the smallest growth of three measurements, because noise can only raise one."""

    def make(length: int) -> str:
        return shape.format(piece * (length // len(piece)))

    call = scored(function)
    found = math.inf
    for _ in range(3):
        found = min(found, growth(call, make, LENGTH))
        if found <= 2 * FACTOR:
            break
    return found
