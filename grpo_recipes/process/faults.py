"""Errors of a run whose message is complete without the name of their class, and the exit of user code as one of them.

`run/endings.py` prints them, and writes them into the run's folder.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.process.ranks import launched_rank
from grpo_rewards.errors import shortened
from grpo_rewards.redaction import scrubbed

FAULT_FILES = "fault-rank*.json"
"""Pattern of the files in a run's folder that hold the messages of failed ranks."""

RECORDED_CHARS = 20_000
"""Largest number of characters of a completion in a fault file."""


class RunFault(RuntimeError):
    """Error of a run whose message needs no class name in front."""


@dataclass(frozen=True)
class FaultyRow:
    """Completion for which a reward raised, or did not return a finite number or None.

    Attributes:
        reward: Name of the reward.
        row: Place in this rank's generation, counted from 0.
        prompt: Last message of the prompt, or the prompt itself if it is a text.
        completion: Text of the completion.
        step: Number of optimizer steps made before, or None outside of a training.
    """

    reward: str
    row: int
    prompt: str
    completion: str
    step: int | None = None

    def as_dict(self, secrets: Iterable[str]) -> dict[str, Any]:
        """Return the entry of a fault file, with long texts cut and without the secrets."""
        entry: dict[str, Any] = asdict(self)
        for key in ("reward", "prompt", "completion"):
            # A secret that the cut would divide could not be found any more.
            entry[key] = shortened(scrubbed(entry[key], secrets), RECORDED_CHARS)
        return entry


class RewardFault(RunFault):
    """Error of a reward that raised, or did not return a finite number or None for each completion."""

    def __init__(self, message: str, row: FaultyRow | None = None) -> None:
        super().__init__(message)
        self.row = row
        """Completion that the reward could not score, or None if it is unknown."""


class NotThePolicy(RunFault):
    """Error for completions that were sampled from another distribution than the policy's."""


class NotFinite(RunFault):
    """Error for a loss, a gradient, advantages or weights that are NaN or infinite."""


def fault_file(folder: Path) -> Path:
    """Return the path of the file in a run's folder that holds the message of this rank if it failed."""
    return folder / f"fault-rank{launched_rank()}.json"


@contextmanager
def no_exit() -> Iterator[None]:
    """Turn a `SystemExit` of user code inside this block into a `RunFault` that names its place.

    `sys.exit(0)` in a callback would otherwise end the run as if it had finished.
    """
    try:
        yield
    except SystemExit as error:
        # A script may end its run from a signal handler, and its launcher may read the exit code.
        handlers = [getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()]
        if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise
        # `exit()` is a function of the module `_sitebuiltins`.
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "_sitebuiltins" not in frame.filename]
        frame = frames[-1]
        place = f"{frame.filename}, line {frame.lineno}, in {frame.name}"
        raise RunFault(f"sys.exit({error.code!r}) was called in {place}: raise an exception or return there") from error
