"""Group decoding that draws the random numbers of finished rows too: its tokens are those of transformers' loop.

Users do not get this mode: the random numbers of finished rows cost time and change no distribution.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from grpo_recipes.generation.groups import Turn


@contextmanager
def exact_generation() -> Iterator[None]:
    """Switch on `Turn.same_stream` for all generation inside this block."""
    before, Turn.same_stream = Turn.same_stream, True
    try:
        yield
    finally:
        Turn.same_stream = before


def generate_exactly(trainer: Any) -> None:
    """Switch on `Turn.same_stream` for all generation of one trainer."""

    def exactly(*args: Any, **kwargs: Any) -> Any:
        with exact_generation():
            return type(trainer)._generate_single_turn(trainer, *args, **kwargs)

    trainer._generate_single_turn = exactly
