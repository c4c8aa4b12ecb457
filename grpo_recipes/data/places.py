"""Positions of rows where the user finds them, for messages: a file and its line or entry, or a table and a row number.

A split, a held-out share or a filter changes the index of a row. Its position stays that of the user's file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np

NAMED_ROWS = 20
"""Largest number of rows that a message names. It gives only the number of the others."""


class Place(NamedTuple):
    """Position of a row.

    Attributes:
        table: File, folder or dataset on the hub, or "" if there is only one table.
        word: `line` or `entry` of a file, or `row` of any other table.
        number: Number of the line, entry or row, counted from 1.
    """

    table: str
    word: str
    number: int

    def __str__(self) -> str:
        """Return the position as in `rows.csv, line 3`."""
        place = f"{self.word} {self.number}"
        return f"{self.table}, {place}" if self.table else place


Places = Callable[[Sequence[int]], list[Place]]
"""Function from row numbers, counted from 0, to positions. One call may read a file again."""


@dataclass(frozen=True)
class RowName:
    """Row whose position is found only if a message names it."""

    index: int
    places: Places

    def __str__(self) -> str:
        """Return the position."""
        (place,) = self.places([self.index])
        return str(place)


def row_numbers(indices: Sequence[int], table: str = "") -> list[Place]:
    """Return the positions of rows of a table without line numbers (Parquet, a saved folder, the hub)."""
    return [Place(table, "row", int(index) + 1) for index in indices]


def numbered(table: object) -> Places:
    """Return a function from row numbers to positions, for a table without line numbers (`row_numbers`)."""
    return partial(row_numbers, table=str(table))


def selected(places: Places, indices: Sequence[int] | np.ndarray) -> Places:
    """Return a function from row numbers to positions, for a table that keeps only the rows with these indices."""
    return lambda rows: places([int(indices[row]) for row in rows])


def joined(tables: Sequence[tuple[int, Places]]) -> Places:
    """Return a function from row numbers to positions, for several tables in a row.

    Args:
        tables: number of rows and positions of each table.
    """

    def places(indices: Sequence[int]) -> list[Place]:
        found: dict[int, Place] = {}
        start = 0
        for length, inner in tables:
            inside = [index for index in indices if start <= index < start + length]
            if inside:
                found |= zip(inside, inner([index - start for index in inside]), strict=True)
            start += length
        return [found[index] for index in indices]

    return places


def by_table(places: Sequence[Place]) -> list[str]:
    """Return the positions as one text for each table, as in `rows.csv, lines 3, 7`."""
    parts = []
    for (table, word), group in groupby(places, key=lambda place: place[:2]):
        numbers = [str(place.number) for place in group]
        plural = {"entry": "entries"}.get(word, f"{word}s") if len(numbers) > 1 else word
        parts.append(f"{table}, {plural} {', '.join(numbers)}".removeprefix(", "))
    return parts


def listed_places(places: Sequence[Place], more: int = 0) -> str:
    """Return the positions as in `rows.csv, lines 3, 7; more.csv, line 5 and 2 more`."""
    text = "; ".join(by_table(places)) + (f" and {more:,} more" if more else "")
    return f"{text} (counted from 1)" if any(place.word == "row" for place in places) else text
