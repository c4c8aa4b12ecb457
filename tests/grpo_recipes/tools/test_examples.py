"""The tools and the environment of the shipped recipes, called as a policy calls them."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from grpo_recipes import ToolError
from grpo_recipes.tools import examples
from grpo_recipes.tools.examples import GuessNumber, calculator
from grpo_rewards.sandbox.run import Limits


def expression(generator: random.Random, depth: int) -> tuple[str, Fraction]:
    """Return an expression in brackets, and its exact value."""
    if depth == 0:
        number = generator.randrange(1, 30)
        return str(number), Fraction(number)
    (left, a), (right, b) = expression(generator, depth - 1), expression(generator, depth - 1)
    sign = generator.choice("+-*/" if b else "+-*")
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else Fraction(0)}[sign]
    return (f"({left} {sign} {right})", value) if generator.random() < 0.8 else (f"-({left} {sign} {right})", -value)


def test_the_calculator_computes_what_exact_fractions_do() -> None:
    generator = random.Random(0)
    whole = 0
    for _ in range(300):
        text, value = expression(generator, generator.randrange(1, 4))
        found = calculator(f" {text} ")
        assert float(found) == pytest.approx(float(value), rel=1e-9, abs=1e-9)
        whole += value.denominator == 1 and "." not in found
    assert whole > 50


def test_whole_results_have_no_decimals() -> None:
    table = {"6 / 2": "3", "7 / 2": "3.5", "2 - 5": "-3", "+4": "4", "0.5 * 2": "1", "1e3": "1000"}
    for large in ("9007199254740993", "9007199254740992.0"):
        table[large] = large
    for text, result in table.items():
        assert calculator(text) == result


def test_anything_else_is_refused() -> None:
    refused = ["1 +", "", "1 2", "two plus two", "(" * 200, "12 = 12", "\\frac{1}{2}", "2^10", "2 ** 9", "True", "x"]
    refused += ["abs(1)", "~1", "'a' * 9", "7 // 2", "1j", "1 / 0", "1e308 * 10", "-1e308 * 10"]
    for text in [*refused, "1" + "0" * 190 + ".5e150"]:
        with pytest.raises(ToolError):
            calculator(text)


def test_an_expression_has_at_most_200_characters() -> None:
    assert calculator("+".join(["1"] * 100) + "0") == "109"
    with pytest.raises(ToolError, match="200"):
        calculator("+".join(["1"] * 101))


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("x = 1", "[no output: print the result]"),
        ("print(1); raise ValueError('no')", "1\n[failed: ValueError: no]"),
        ("import sys; sys.exit(3)", "[failed: exit code 3]"),
        (
            "import os; os.write(1, b'a\\xff'); os.write(2, b'x\\nno \\xff\\n'); os._exit(1)",
            "a\ufffd[failed: no \ufffd]",
        ),
        pytest.param(
            "import sys; sys.stderr.write('bad\\n \\n'); sys.exit(1)", "[failed: bad]", marks=pytest.mark.slow
        ),
        ("print('x' * 5000)", "x" * 4096 + "[stopped: too much output]"),
    ],
)
def test_a_program_returns_its_output_and_how_it_failed(code: str, result: str) -> None:
    assert examples.python(code) == result


@pytest.mark.slow
def test_a_program_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (examples.SANDBOX.cpu_seconds, examples.SANDBOX.wall_seconds) == (4, 10.0)
    monkeypatch.setattr(examples, "SANDBOX", Limits(cpu_seconds=1, wall_seconds=1.0, output_bytes=4096))
    code = "import time\nprint('begun', flush=True)\ntime.sleep(60)"
    assert examples.python(code) == "begun\n[stopped: out of time]"


def test_a_hidden_number_is_found_by_answers_and_pays_for_few_guesses() -> None:
    table: list[tuple[list[int], list[str], float]] = [
        ([], [], 0.0),
        ([7], ["right"], 1.0),
        ([9, 5, 7], ["lower", "higher", "right"], 1 / 1.2),
        ([8], ["lower"], 0.1),
        ([1, 9, 4], ["higher", "lower", "higher"], 0.2 / 3),
        ([7, 7], ["right", "right"], 1.0),
    ]
    for guesses, answers, reward in table:
        game = GuessNumber()
        game.reset("7", question="ignored")
        assert [game.guess(number) for number in guesses] == answers
        assert game.get_reward() == pytest.approx(reward)
        game.reset(3)
        assert game.get_reward() == 0
