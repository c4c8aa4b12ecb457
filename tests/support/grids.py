"""Grids of parameters of which a part is quick and the rest slow, or a part slow and the rest left to the night."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def only(quick: Iterable[Any], values: Iterable[Any], slow: Iterable[Any] | None = None) -> list[ParameterSet]:
    """Return the values as parameters.

    Those outside `quick` are marked slow. With `slow` given, those outside `slow` are marked nightly instead.
    """
    kept, sample = list(quick), slow if slow is None else list(slow)

    def marks(value: Any) -> Any:
        if value in kept:
            return ()
        return pytest.mark.slow if sample is None or value in sample else pytest.mark.nightly

    return [pytest.param(value, marks=marks(value)) for value in values]


def covering(
    *axes: Iterable[Any], strength: int = 1, rest: pytest.MarkDecorator = pytest.mark.slow
) -> list[ParameterSet]:
    """Return every combination of the axes' values. Those outside a covering set are marked slow, or with `rest`.

    In the covering set every value occurs (with strength 2: every pair of values), chosen greedily, so it is always the
    same one.
    """
    values = [list(axis) for axis in axes]
    cells = list(product(*(range(len(axis)) for axis in values)))
    covers = {cell: set(combinations(enumerate(cell), strength)) for cell in cells}
    missing, quick = set().union(*covers.values()), set()
    while missing:
        best = max(cells, key=lambda cell: len(covers[cell] & missing))
        quick.add(best)
        missing -= covers[best]
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(values, cell, strict=True)),
            marks=() if cell in quick else rest,
        )
        for cell in cells
    ]
