"""Problems that need no network: word problems, and for tools large products and numbers to guess.

The splits are disjoint for all sizes and seeds, because a checksum of the question's text decides its split. No
question occurs twice in a draw. A shorter draw with the same seed is the beginning of a longer one.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache

from grpo_rewards.errors import UserError

DEFAULT_SIZE = 2_000
MAX_SIZE = 20_000
_TEST_SHARE = 5  # one problem in five belongs to the test split

_OPERANDS = range(2, 10)
_NAMES = ("Ann", "Ben", "Carla", "Dev", "Emma", "Femi", "Grace", "Hugo", "Ines", "Jun", "Kofi", "Lena", "Maya", "Noah")
_ITEMS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pens", "shells", "stamps", "stickers")
# Questions with the operations that answer them, applied to a, then b, then c, from left to right.
_TEMPLATES = (
    ("{name} has {a} {item} and buys {b} more. How many {item} does {name} have now?", "+"),
    ("{name} finds {a} {item} in the morning and {b} in the afternoon. How many {item} is that in all?", "+"),
    ("{name} had {a} {item} and gave away {b}. How many {item} are left?", "-"),
    ("There are {a} {item} on the table and {name} takes {b}. How many {item} stay there?", "-"),
    ("{name} fills {a} bags with {b} {item} each. How many {item} are in the bags?", "*"),
    ("{name} has {a} {item}, gets {b} more and then loses {c}. How many {item} does {name} have now?", "+-"),
    ("{name} sells {a} {item} on Monday, {b} on Tuesday and {c} on Friday. How many {item} is that in all?", "++"),
)
_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}

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


def _word_problem(generator: random.Random) -> Problem:
    question, operations = generator.choice(_TEMPLATES)
    operands = [generator.choice(_OPERANDS) for _ in range(len(operations) + 1)]
    if "-" in operations:
        operands.sort(reverse=True)  # nobody gives away more than they have
    words = {"name": generator.choice(_NAMES), "item": generator.choice(_ITEMS)}
    question = question.format(**words, **dict(zip("abc", operands, strict=False)))
    total, lines = operands[0], []
    for operation, operand in zip(operations, operands[1:], strict=True):
        result = _OPERATIONS[operation](total, operand)
        lines.append(f"{total}{operation}{operand}={result}")
        total = result
    return {"question": question, "answer": "\n".join([*lines, f"#### {total}"])}


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


_DRAWS: Mapping[str, Callable[[random.Random], Problem]] = {
    "arithmetic": _word_problem,
    "products": _product,
    "secret_number": _secret,
}


@lru_cache(maxsize=12)
def made_problems(name: str, split: str, size: int, seed: int = 0) -> list[Problem]:
    """Draw problems in GSM8K's form: `question`, and `answer`, which ends in `#### N`.

    Args:
        name: `arithmetic` (word problems with worked steps), `products` (of three-digit numbers, with the worked step),
            or `secret_number` (to guess: the question names only its range).
        split: `train` or `test`.
        size: number of problems, at most `MAX_SIZE`.
        seed: random seed of the draw.

    Raises:
        UserError: `size` is too large.
    """
    if size > MAX_SIZE:
        raise UserError("`dataset.size`", f"it is {size}", f"set at most {MAX_SIZE}, as many as `{name}` makes")
    stream = f"{split}-{seed}" if name == "arithmetic" else f"{name}-{split}-{seed}"
    generator = random.Random(stream)  # a string is hashed the same way in every process
    problems: dict[str, Problem] = {}
    while len(problems) < size:
        problem = _DRAWS[name](generator)
        question = problem["question"]
        is_test = zlib.crc32(question.encode()) % _TEST_SHARE == 0
        if is_test == (split == "test"):
            problems.setdefault(question, problem)
    return list(problems.values())
