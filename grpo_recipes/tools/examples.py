"""Tools and an environment that the recipes in recipes/tools use, and that any recipe may use.

    tools: [grpo_recipes.tools.examples.calculator]

They show what a tool of your own needs: a type for each argument, and a docstring with a line for each under `Args:`.
What the policy does wrong is raised as a `ToolError`, whose text becomes the result that it reads.
"""

from __future__ import annotations

import ast
import operator
import threading
from collections.abc import Callable, Mapping
from typing import Any

from grpo_recipes.tools import ToolError
from grpo_rewards.sandbox.run import Limits, run

MAX_EXPRESSION = 200
"""Number of characters of an expression. Without powers, the result can't be longer than the expression."""

_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_UNARY: Mapping[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}

# CPython 3.11 counts the depth of all threads' trees together, and raises a SystemError if two are made at once.
_PARSING = threading.Lock()

SANDBOX = Limits(cpu_seconds=4, output_bytes=4096)


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Numbers, parentheses and the operators + - * /, as in "(483 + 12) * 927".

    Returns:
        The value of the expression.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ToolError(f"the expression has more than {MAX_EXPRESSION} characters")
    try:
        with _PARSING:
            tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolError("this is not an arithmetic expression") from error
    try:
        value = _value(tree.body)
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except OverflowError:
        value = float("inf")
    if not abs(value) < float("inf"):  # also if it is NaN
        raise ToolError("the result is too large")
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)


def _value(node: ast.expr) -> int | float:
    """Return the value of a node. Raise `ToolError` for anything but numbers and the four operators."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left), _value(node.right))
    raise ToolError("only numbers, parentheses and + - * / are allowed: write a power as a product")


def python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: Source of the program. It has the standard library, an empty folder, and no network.

    Returns:
        The standard output, and the last line of an error if the program failed.
    """
    outcome = run(code, limits=SANDBOX)
    output = outcome.stdout.decode(errors="replace")
    if outcome.ended == "timeout":
        return f"{output}[stopped: out of time]"
    if outcome.ended == "output":
        return f"{output}[stopped: too much output]"
    if outcome.code != 0:
        lines = outcome.stderr.decode(errors="replace").strip().splitlines()
        return f"{output}[failed: {lines[-1] if lines else f'exit code {outcome.code}'}]"
    return output or "[no output: print the result]"


class GuessNumber:
    """Environment that holds a number, which the policy finds by guesses: each is answered "higher" or "lower".

    The reward is 1 for the number at the first guess, and less for each guess more. A number that was never guessed
    earns a part of 0.2 for the closest guess, so that a group differs before the first success.
    """

    def reset(self, answer: str, **columns: Any) -> None:
        """Begin an episode with the number of a row."""
        self.number = int(answer)
        self.guesses: list[int] = []

    def guess(self, number: int) -> str:
        """Guess the hidden number.

        Args:
            number: The guess.

        Returns:
            "right", "higher" if the hidden number is higher than the guess, or "lower".
        """
        self.guesses.append(number)
        if number < self.number:
            return "higher"
        return "lower" if number > self.number else "right"

    def get_reward(self) -> float:
        """Return 1 / (1 + 0.1 × wrong guesses before the right one), or at most 0.2 without the right one."""
        if self.number in self.guesses:
            return 1.0 / (1.0 + 0.1 * self.guesses.index(self.number))
        if not self.guesses:
            return 0.0
        return 0.2 / (1.0 + min(abs(guess - self.number) for guess in self.guesses))
