r"""Second look at what math-verify calls equal: two equations, and two exact values.

math-verify compares equations by their solutions, so that all equations without a solution are equal, and those between
numbers by their truth. It compares values after rounding, so that $2^{-99}$ equals $2^{-98}$. Here two equations are
equal if their differences of sides are proportional, or side by side where these are numbers or identities. Two values
without a decimal are equal if their difference is 0.

The arguments are objects of sympy, as math-verify reads them.
"""

from __future__ import annotations

from typing import Any

DIGITS = 400
"""Largest number of digits with which a difference is computed, before it counts as 0."""

DECIMAL_TOLERANCE = 1e-9
"""Largest difference of two values of which one is a decimal, relative to the larger one."""


def contradicts(gold: Any, answer: Any) -> bool:
    """Return True if two objects that math-verify calls equal are not."""
    from sympy import Eq, Expr, FiniteSet, Float

    if isinstance(gold, Eq) and isinstance(answer, Eq):
        return not _same_equation(gold, answer)
    if isinstance(gold, Eq) or isinstance(answer, Eq):
        equation = gold if isinstance(gold, Eq) else answer
        return not equation.free_symbols  # an equation between numbers is not its truth
    if isinstance(gold, FiniteSet) and isinstance(answer, FiniteSet):
        equations = [item for item in gold.args if isinstance(item, Eq)]
        others = [item for item in answer.args if isinstance(item, Eq)]
        return any(not any(_same_equation(one, other) for other in others) for one in equations)
    if isinstance(gold, Expr) and isinstance(answer, Expr):
        if gold.has(Float) or answer.has(Float):
            return False
        difference = (gold - answer).doit()
        if difference.free_symbols:
            difference = difference.simplify()
        return not difference.free_symbols and _is_nonzero(difference)
    return False


def _same_equation(first: Any, second: Any) -> bool:
    from sympy import Expr, cancel, expand, fraction, together

    sides = (first.lhs, first.rhs, second.lhs, second.rhs)
    if not all(isinstance(side, Expr) for side in sides):
        return True  # a set or an interval, which math-verify has compared
    differences = [expand(fraction(together((one.lhs - one.rhs).doit()))[0]) for one in (first, second)]
    if not first.free_symbols or not second.free_symbols or 0 in differences:
        straight = _equal(first.lhs, second.lhs) and _equal(first.rhs, second.rhs)
        return straight or (_equal(first.lhs, second.rhs) and _equal(first.rhs, second.lhs))
    ratio = cancel(differences[0] / differences[1])
    return not ratio.free_symbols or not ratio.simplify().free_symbols


def _equal(first: Any, second: Any) -> bool:
    """Return True if two sides are equal, decimals but for rounding."""
    from sympy import Float

    difference = (first - second).doit()
    if difference.free_symbols:
        return bool(difference.simplify() == 0)
    if not difference.has(Float):
        return not _is_nonzero(difference)
    largest = max(abs(side.doit().evalf(15)) for side in (first, second))
    return bool(abs(difference.evalf(15)) <= DECIMAL_TOLERANCE * largest)


def _is_nonzero(number: Any) -> bool:
    """Return True if a number differs from 0 in its first `DIGITS` digits."""
    if number.is_Rational:
        return bool(number != 0)
    # Sympy computes with more and more digits until one of the result is sure.
    return any(part.evalf(2, maxn=DIGITS)._prec > 1 for part in number.as_real_imag() if part != 0)
