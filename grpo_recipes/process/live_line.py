"""Progress of a run: its log in `_log.jsonl`, and one line at the foot of the terminal.

`trainer_state.json` is written only with a checkpoint, perhaps hours apart. `_log.jsonl` gets every log entry at once,
one JSON object per line, and stays in the run's folder:

    {"step": 5, "max_steps": 8}             first step of the last launch, and planned number of steps
    {"step": 1, "reward": 0.5, ...}         one line per entry, from the beginning of the run
    {"step": 8, "ended": true}              written at the end of the run
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from transformers import TrainerCallback, TrainerState

from grpo_rewards.files import replacing
from grpo_rewards.terminal import say, visible

logger = logging.getLogger(__name__)


class LiveLog(TrainerCallback):
    """Writes every log entry of a run to `_log.jsonl`. If that fails, training goes on and a warning is logged once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Begin the file with the entries of the checkpoint that the launch resumes from, if there is one."""
        if not state.is_world_process_zero:
            return
        try:
            # The file of an earlier launch is not cut in place: its last line may be incomplete, and it may be missing
            # or belong to another branch. The checkpoint's own entries are always the right ones.
            with replacing(self.path) as part, part.open("w", encoding="utf-8") as file:
                for entry in ({"step": state.global_step, "max_steps": state.max_steps}, *state.log_history):
                    file.write(json.dumps(entry, default=float) + "\n")
            self._file = self.path.open("a", encoding="utf-8", buffering=1)
        except (OSError, TypeError, ValueError) as error:
            self._give_up(error)

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Write an entry."""
        self._write({**(logs or {}), "step": state.global_step})

    def end(self, step: int) -> None:
        """Mark the file as complete and close it, once the run's own `trainer_state.json` is written."""
        self._write({"step": step, "ended": True})
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, entry: dict[str, Any]) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(entry, default=float) + "\n")
            except (OSError, TypeError, ValueError) as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._file = None
        with suppress(OSError):
            self.path.unlink(missing_ok=True)  # readers would take an incomplete file for the complete log
        logger.warning("%s can't be written (%s): `report` sees only what checkpoints hold", self.path, error)


class LiveLine(TrainerCallback):
    """Progress of the training in one line, in place of transformers' bar and dictionaries.

    A terminal shows the line at its foot, and the loggers in `replaced` are limited to warnings meanwhile, because the
    line shows what they log. Elsewhere the line is printed at most once a minute, so that a log shows progress.
    """

    def __init__(
        self,
        rewards: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
        replaced: Sequence[logging.Logger] = (),
    ) -> None:
        self.rewards = rewards
        self.training_bar: Line | None = None  # transformers' name for it, by which a failed run closes it
        self._replaced = replaced
        self._clock = clock
        self._logged: dict[str, float] = {}
        self._tokens_per_second: float | None = None
        self._last_tokens: tuple[float, float] | None = None  # time and token count of the last entry that has one
        self._start_time: float
        self._start_step: int

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Start the line."""
        if state.is_world_process_zero:
            self._start_time, self._start_step = self._clock(), state.global_step
            self.training_bar = Line(self._clock, self._replaced)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Show the new step."""
        if self.training_bar is not None:
            self.training_bar.show(self.text(state.global_step, state.max_steps))

    def on_log(
        self, args: Any, state: TrainerState, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Show what is logged, and print it where there is no terminal."""
        if self.training_bar is None:
            return
        for key, value in (logs or {}).items():
            if isinstance(value, (int, float)):
                self._logged[key] = float(value)
        if logs and "num_tokens" in logs:
            self._measure_speed(logs["num_tokens"])
        self.training_bar.show(self.text(state.global_step, state.max_steps), prints=True)

    def on_train_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Remove the line."""
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    def text(self, step: int, steps: int) -> str:
        """Return the line: step, reward with its parts, KL, length, truncated share, speed and time left, as known."""
        logged = self._logged
        parts = [f"step {step:,}/{steps:,}"]
        if "reward" in logged:
            parts.append(f"reward {logged['reward']:.3g}{self._reward_parts()}")
        if "kl" in logged:
            parts.append(f"KL {logged['kl']:.2g}")
        if "completions/mean_length" in logged:
            parts.append(f"length {logged['completions/mean_length']:.0f}")
        if "completions/clipped_ratio" in logged:
            parts.append(f"truncated {logged['completions/clipped_ratio']:.0%}")
        if self._tokens_per_second is not None:
            parts.append(f"{self._tokens_per_second:,.0f} tokens/s")
        done = step - self._start_step
        if done > 0 and steps > step:
            seconds_per_step = (self._clock() - self._start_time) / done
            parts.append(f"{timedelta(seconds=round(seconds_per_step * (steps - step)))} left")
        return "  ".join(parts)

    def _reward_parts(self) -> str:
        """Return the mean of each reward in parentheses, or "" for a single reward."""
        means = []
        for name in self.rewards:
            if (mean := self._logged.get(f"rewards/{name}/mean")) is not None:
                means.append(f"{name} {mean:.3g}")
        return f" ({', '.join(means)})" if means and len(self.rewards) > 1 else ""

    def _measure_speed(self, tokens: float) -> None:
        now = self._clock()
        previous, self._last_tokens = self._last_tokens, (now, tokens)
        if previous is not None and now > previous[0]:
            self._tokens_per_second = (tokens - previous[1]) / (now - previous[0])


class Line:
    """Line that is redrawn in place below the other output of a terminal, or printed once a minute elsewhere."""

    SECONDS = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic, replaced: Sequence[logging.Logger] = ()) -> None:
        self._clock, self._printed = clock, clock()
        self._live: Any = None
        self._until_closed = ExitStack()
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, highlight=False)
            redirects = sys.stdout.isatty()  # output that goes into a pipe stays there
            live = Live(console=console, transient=True, redirect_stdout=redirects)
            self._live = self._until_closed.enter_context(live)
            for replaced_logger in replaced:
                self._until_closed.callback(replaced_logger.setLevel, replaced_logger.level)
                replaced_logger.setLevel(logging.WARNING)
            # Existing handlers hold the stream from before, and would write over the line.
            for handler in logging.getLogger().handlers:
                if type(handler) is logging.StreamHandler:
                    stream = handler.setStream(sys.stderr)
                    self._until_closed.callback(handler.setStream, stream or sys.__stderr__)

    def show(self, text: str, *, prints: bool = False) -> None:
        """Redraw the line. Without a terminal, print it if `prints` is True and the last one is a minute old."""
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(visible(text), no_wrap=True, overflow="ellipsis"))
        elif prints and self._clock() - self._printed >= self.SECONDS:
            self._printed = self._clock()
            say(text)

    def close(self) -> None:
        """Remove the line from the terminal, and restore the handlers and levels of the loggers."""
        self._live = None
        self._until_closed.close()
