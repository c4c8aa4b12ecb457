"""What a run that is under way has logged: `_log.jsonl` in its folder, an entry a line, until the run is over.

`trainer_state.json` is written with a checkpoint, perhaps hours apart. This file holds what one launch has logged; what lies
before it stands in the checkpoint that the launch went on from.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from transformers import TrainerCallback

from grpo_recipes.runs.files import LIVE

logger = logging.getLogger(__name__)


class LiveLog(TrainerCallback):
    """Writes each entry of the log as it is made. Where that fails, training goes on, and a warning says so once."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LIVE
        self._file: TextIO | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the file anew; the first line says how long the run will be."""
        if state.is_world_process_zero:
            try:
                self.path.unlink(missing_ok=True)  # a link too, which is not followed
                self._file = self.path.open("x", encoding="utf-8", buffering=1)
            except OSError as error:
                self._give_up(error)
            self._write({"step": state.global_step, "max_steps": state.max_steps})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write what is logged."""
        self._write({**(logs or {}), "step": state.global_step})

    def forget(self) -> None:
        """Remove the file: the run is over, and its `trainer_state.json` holds everything."""
        if self._file is not None:
            self._file.close()
            self._file = None
            with suppress(OSError):
                self.path.unlink()

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(entry, default=float) + "\n")
            except (OSError, TypeError, ValueError) as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._file = None
        logger.warning(
            "%s can't be written (%s): until a checkpoint, `report` knows nothing of this run", self.path, error
        )
