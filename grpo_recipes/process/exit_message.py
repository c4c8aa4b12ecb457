"""The sentence that a launch ends with, handed from the process that knows it to the command that started the launch.

A launcher prints its own report about processes that failed after their last line. `grpo-recipes train` therefore gives its
processes a file to leave the sentence in, and prints it once the launcher has ended.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from grpo_recipes.runs.files import INTEGER, TEXT, RunError, read_object
from grpo_rewards.terminal import say, visible

VARIABLE = "GRPO_RECIPES_LAST_SENTENCE"
"""The environment variable that names the file."""


def say_last(sentence: str, code: int) -> int:
    """Print the sentence that this process ends with, or leave it for the command that launched it. Returns `code`.

    Of several processes the first is heard: those that follow end because of it.
    """
    left = False
    if path := os.environ.get(VARIABLE):
        with suppress(OSError):  # a full disk, perhaps: it is printed here then
            left = _leave(Path(path), {"sentence": sentence, "code": code})
    if not left:
        say(visible(sentence), to_stderr=True)
    return code


def read(path: Path) -> tuple[str, int] | None:
    """The sentence in the file and the exit code that goes with it; None if no process left one."""
    try:
        found = read_object(path, {"sentence": TEXT, "code": INTEGER})
    except (FileNotFoundError, RunError):
        return None
    return found["sentence"], found["code"]


def _leave(path: Path, found: dict[str, str | int]) -> bool:
    """Write the file unless there is one. Returns whether it is there now."""
    written = path.with_name(f"{path.name}.{os.getpid()}")
    written.write_text(json.dumps(found), encoding="utf-8")
    with suppress(FileExistsError):  # linking refuses to replace, where renaming would
        os.link(written, path)
    written.unlink()
    return True
