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
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text
from transformers import TrainerCallback, TrainerState

from grpo_recipes.process.messages import progress
from grpo_rewards.files import replacing
from grpo_rewards.terminal import say, visible

logger = logging.getLogger(__name__)

SHOWN = {"kl": "KL {:.2g}", "completions/mean_length": "length {:.0f}", "completions/clipped_ratio": "truncated {:.0%}"}
"""Logged values that the line shows behind the reward, and their forms."""


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

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
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

    Without a terminal, the line is printed at most once a minute, so that a log shows progress.
    """

    def __init__(self, rewards: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.rewards = rewards
        self.training_bar: ProgressLine | None = None  # transformers' name for it, by which a failed run closes it
        self._clock = clock
        self._logged: dict[str, float] = {}
        self._tokens_per_second: float | None = None
        self._last_tokens: tuple[float, float] | None = None  # time and token count of the last entry that has one
        self._start_time, self._start_step = 0.0, 0

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Start the line."""
        if state.is_world_process_zero:
            self._start_time, self._start_step = self._clock(), state.global_step
            self.training_bar = ProgressLine(self._clock)

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Show the new step."""
        if self.training_bar is not None:
            self.training_bar.show(self.text(state.global_step, state.max_steps))

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Show what is logged, and print it where there is no terminal."""
        if self.training_bar is None:
            return
        numbers = {key: float(value) for key, value in (logs or {}).items() if isinstance(value, (int, float))}
        self._logged |= numbers
        if "num_tokens" in numbers:
            now, tokens = self._clock(), numbers["num_tokens"]
            if self._last_tokens is not None and now > self._last_tokens[0]:
                self._tokens_per_second = (tokens - self._last_tokens[1]) / (now - self._last_tokens[0])
            self._last_tokens = now, tokens
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
            means = {name: logged.get(f"rewards/{name}/mean") for name in self.rewards}
            shown = [f"{name} {mean:.3g}" for name, mean in means.items() if mean is not None]
            several = f" ({', '.join(shown)})" if shown and len(self.rewards) > 1 else ""
            parts.append(f"reward {logged['reward']:.3g}{several}")
        parts += [form.format(logged[key]) for key, form in SHOWN.items() if key in logged]
        if self._tokens_per_second is not None:
            parts.append(f"{self._tokens_per_second:,.0f} tokens/s")
        done = step - self._start_step
        if done > 0 and steps > step:
            seconds_per_step = (self._clock() - self._start_time) / done
            parts.append(f"{timedelta(seconds=round(seconds_per_step * (steps - step)))} left")
        return "  ".join(parts)


class ProgressLine:
    """Line that is redrawn in place below the other output of a terminal, or printed once a minute elsewhere.

    On a terminal, the logger `progress` is limited to warnings meanwhile, because the line shows what it logs.
    """

    SECONDS = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._printed = clock, clock()
        self._live: Live | None = None
        self._until_closed = ExitStack()
        if not sys.stderr.isatty():
            return
        redirects = sys.stdout.isatty()  # output that goes into a pipe stays there
        live = Live(console=Console(stderr=True, highlight=False), transient=True, redirect_stdout=redirects)
        self._live = self._until_closed.enter_context(live)
        self._until_closed.callback(progress.setLevel, progress.level)
        progress.setLevel(logging.WARNING)
        # Existing handlers hold the stream from before, and would write over the line.
        for handler in logging.getLogger().handlers:
            if type(handler) is logging.StreamHandler:
                stream = handler.setStream(sys.stderr)
                self._until_closed.callback(handler.setStream, stream or sys.__stderr__)

    def show(self, text: str, *, prints: bool = False) -> None:
        """Redraw the line. Without a terminal, print it if `prints` is True and the last one is a minute old."""
        if self._live is not None:
            self._live.update(Text(visible(text), no_wrap=True, overflow="ellipsis"))
        elif prints and self._clock() - self._printed >= self.SECONDS:
            self._printed = self._clock()
            say(text)

    def close(self) -> None:
        """Remove the line from the terminal, and restore the handlers and levels of the loggers."""
        self._live = None
        self._until_closed.close()


def close_progress_bars(callbacks: Iterable[object]) -> None:
    """Close the progress bars of an interrupted run, which would otherwise be drawn again after the last line."""
    for callback in callbacks:
        for name in ("training_bar", "prediction_bar"):
            if (bar := getattr(callback, name, None)) is not None:
                bar.close()
