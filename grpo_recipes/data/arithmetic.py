"""Word problems in GSM8K's schema, made here: no network."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence

from grpo_rewards.errors import UserError

DEFAULT_ARITHMETIC_SIZE = 2_000
MAX_ARITHMETIC_SIZE = 20_000
_TEST_SHARE = 5
_OPERANDS = range(2, 10)
_NAMES = ("Ann", "Ben", "Carla", "Dev", "Emma", "Femi", "Grace", "Hugo", "Ines", "Jun", "Kofi", "Lena", "Maya", "Noah")
_ITEMS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pens", "shells", "stamps", "stickers")
# A question and the operations that answer it: applied to a, then b, then c, from left to right.
_TEMPLATES = (
    ("{name} has {a} {item} and buys {b} more. How many {item} does {name} have now?", "+"),
    ("{name} finds {a} {item} in the morning and {b} in the afternoon. How many {item} is that in all?", "+"),
    ("{name} had {a} {item} and gave away {b}. How many {item} are left?", "-"),
    ("There are {a} {item} on the table and {name} takes {b}. How many {item} stay there?", "-"),
    ("{name} fills {a} bags with {b} {item} each. How many {item} are in the bags?", "*"),
    ("{name} has {a} {item}, gets {b} more and then loses {c}. How many {item} does {name} have now?", "+-"),
    ("{name} sells {a} {item} on Monday, {b} on Tuesday and {c} on Friday. How many {item} is that in all?", "++"),
)


def arithmetic_problems(split: str, size: int, seed: int = 0) -> list[dict[str, str]]:
    """Draw word problems in GSM8K's schema: `question`, and `answer` with worked steps ending in `#### N`.

    Train and test are disjoint by construction, whatever their sizes and seeds: a checksum of the question's own text
    says which split it belongs to (one in five is a test question). No question occurs twice in a draw, and a shorter
    draw with the same seed is the beginning of a longer one.

    Args:
        split: `train` or `test`.
        size: how many problems, at most `MAX_ARITHMETIC_SIZE`.
        seed: which problems.

    Raises:
        UserError: another split, or more problems than can be made.
    """
    if split not in ("train", "test"):
        raise UserError(f"`dataset.split`: `arithmetic` has no split {split!r}: choose train or test")
    if size > MAX_ARITHMETIC_SIZE:
        raise UserError(f"`dataset.size` is {size}: `arithmetic` makes at most {MAX_ARITHMETIC_SIZE} problems")
    generator = random.Random(f"{split}-{seed}")  # a string seed is hashed the same way in every process
    problems: dict[str, dict[str, str]] = {}
    while len(problems) < size:
        problem = _draw_problem(generator)
        if _arithmetic_split(problem["question"]) == split:
            problems.setdefault(problem["question"], problem)
    return list(problems.values())


def _arithmetic_split(question: str) -> str:
    return "test" if zlib.crc32(question.encode()) % _TEST_SHARE == 0 else "train"


def _draw_problem(generator: random.Random) -> dict[str, str]:
    question, operations = generator.choice(_TEMPLATES)
    operands = [generator.choice(_OPERANDS) for _ in range(len(operations) + 1)]
    if "-" in operations:
        operands.sort(reverse=True)  # nobody gives away more than they have
    words = {"name": generator.choice(_NAMES), "item": generator.choice(_ITEMS)}
    question = question.format(**words, **dict(zip("abc", operands, strict=False)))
    return {"question": question, "answer": _worked_answer(operands, operations)}


def _worked_answer(operands: Sequence[int], operations: str) -> str:
    apply: dict[str, Callable[[int, int], int]] = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    total, steps = operands[0], []
    for operation, operand in zip(operations, operands[1:], strict=True):
        result = apply[operation](total, operand)
        steps.append(f"{total}{operation}{operand}={result}")
        total = result
    return "\n".join([*steps, f"#### {total}"])
