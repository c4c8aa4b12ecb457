"""The one kind of error that a user can fix."""

from __future__ import annotations


class UserError(ValueError):
    """What a user can fix; the message is one sentence that names file, key and fix."""
