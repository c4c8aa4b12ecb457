"""Problems that are made for tools and need no network: large products, and numbers to guess.

The splits are disjoint for all sizes and seeds, because a checksum of the question's text decides its split. No
question occurs twice in a draw. A shorter draw with the same seed is the beginning of a longer one.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping

from grpo_rewards.errors import UserError

MAX_SIZE = 20_000
_TEST_SHARE = 5  # one problem in five belongs to the test split
_FACTORS = range(101, 1000)
_SUMMANDS = range(10, 100)
# Each wording with the expression that answers it.
_PRODUCTS = (
    ("What is {a} * {b}?", "{a}*{b}"),
    ("Multiply {a} by {b}.", "{a}*{b}"),
    ("A hall has {a} rows of {b} seats. How many seats are in the hall?", "{a}*{b}"),
    ("What is {a} * {b} + {c}?", "{a}*{b}+{c}"),
    ("A shop sells {a} boxes of {b} pens, and {c} single pens. How many pens is that in all?", "{a}*{b}+{c}"),
)
_LOWEST, _SPANS = range(1, 1000), range(20, 100)
_SECRETS = (
    "I am thinking of a whole number from {low} to {high}. Find it.",
    "Guess my number. It is a whole number between {low} and {high}, both included.",
    "Which whole number from {low} to {high} did I write down?",
)

Problem = dict[str, str]


def product_problems(split: str, size: int, seed: int = 0) -> list[Problem]:
    """Draw products of three-digit numbers in GSM8K's form: `question`, and `answer`, which ends in `#### N`.

    Args:
        split: `train` or `test`.
        size: number of problems, at most `MAX_SIZE`.
        seed: random seed of the draw.

    Raises:
        UserError: `size` is too large.
    """
    return _drawn("products", _product, split, size, seed)


def secret_numbers(split: str, size: int, seed: int = 0) -> list[Problem]:
    """Draw tasks to find a number by guesses: `question`, which names only its range, and `answer`, the number.

    Args:
        split: `train` or `test`.
        size: number of tasks, at most `MAX_SIZE`.
        seed: random seed of the draw.

    Raises:
        UserError: `size` is too large.
    """
    return _drawn("secret_number", _secret, split, size, seed)


MADE: Mapping[str, Callable[[str, int, int], list[Problem]]] = {
    "products": product_problems,
    "secret_number": secret_numbers,
}
"""Functions that make the problems of a preset, by its name."""


def _drawn(name: str, draw: Callable[[random.Random], Problem], split: str, size: int, seed: int) -> list[Problem]:
    if size > MAX_SIZE:
        raise UserError("`dataset.size`", f"it is {size}", f"set at most {MAX_SIZE}, as many as `{name}` makes")
    generator = random.Random(f"{name}-{split}-{seed}")  # a string is hashed the same way in every process
    problems: dict[str, Problem] = {}
    while len(problems) < size:
        problem = draw(generator)
        question = problem["question"]
        is_test = zlib.crc32(question.encode()) % _TEST_SHARE == 0
        if is_test == (split == "test"):
            problems.setdefault(question, problem)
    return list(problems.values())


def _product(generator: random.Random) -> Problem:
    question, expression = generator.choice(_PRODUCTS)
    a, b, c = generator.choice(_FACTORS), generator.choice(_FACTORS), generator.choice(_SUMMANDS)
    worked = expression.format(a=a, b=b, c=c)
    result = a * b + c if "+" in worked else a * b
    return {"question": question.format(a=a, b=b, c=c), "answer": f"{worked}={result}\n#### {result}"}


def _secret(generator: random.Random) -> Problem:
    low = generator.choice(_LOWEST)
    high = low + generator.choice(_SPANS)
    question = generator.choice(_SECRETS).format(low=low, high=high)
    return {"question": question, "answer": f"#### {generator.randint(low, high)}"}
