"""Files written whole or not at all, and never through a link that somebody else laid."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write in place of `path`: it takes that name if the block succeeds, and is removed if it fails.

    A link at `path` is replaced, not followed; so is one that lies where the unfinished file goes. The folder itself is
    the caller's to choose.
    """
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    try:
        # Fails if something was put there since, a dangling link too, where opening the name to write would follow it.
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all."""
    with replacing(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
