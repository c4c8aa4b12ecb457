"""Assertions about an error that a user can fix: its class, its place and its figures, not its words."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from grpo_rewards.errors import UserError


@contextmanager
def refused(
    place: object, *figures: object, by: type[UserError] = UserError
) -> Iterator[pytest.ExceptionInfo[UserError]]:
    """Expect an error about `place` that has a fix.

    Args:
        place: Part of the place, as a file or a key.
        figures: Values, names or numbers that the message must show.
        by: Class of the error.
    """
    with pytest.raises(by) as caught:
        yield caught
    error = caught.value
    assert str(place) in error.place
    assert error.problem
    assert error.fix
    missing = [figure for figure in map(str, figures) if figure not in str(error)]
    assert not missing, f"{missing} not in: {error}"
