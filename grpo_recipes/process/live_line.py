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
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from transformers import TrainerCallback

from grpo_recipes.runs.files import LIVE
from grpo_rewards.files import replacing
from grpo_rewards.terminal import say, visible

logger = logging.getLogger(__name__)


class LiveLog(TrainerCallback):
    """Writes every log entry of a run to `_log.jsonl`. If that fails, training goes on and a warning is logged once."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LIVE
        self._file: TextIO | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
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

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
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
            self.path.unlink(missing_ok=True)  # readers would take an incomplete file for the whole log
        logger.warning("%s can't be written (%s): `report` sees only what checkpoints hold", self.path, error)


class LiveLine(TrainerCallback):
    """Shows how a training is doing in one line at the foot of a terminal, in place of transformers' bar and dictionaries.

    On a terminal the loggers in `quiet` say nothing below a warning meanwhile. Elsewhere the same line is printed once a minute
    at most, so that a log says that it lives.
    """

    def __init__(
        self,
        rewards: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
        quiet: Sequence[logging.Logger] = (),
    ) -> None:
        self.rewards = rewards
        self._quiet = quiet
        self.training_bar: Line | None = None  # as transformers' callback calls it: a run that fails closes it
        self._clock = clock
        self._logged: dict[str, float] = {}
        self._speed: float | None = None
        self._tokens: tuple[float, float] | None = None  # the time and the tokens of the last entry
        self._began, self._first = 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the line."""
        if state.is_world_process_zero:
            self._began, self._first = self._clock(), state.global_step
            self.training_bar = Line(self._clock, self._quiet)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move on."""
        if self.training_bar is not None:
            self.training_bar.show(self.text(state.global_step, state.max_steps))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Take over what is logged."""
        if self.training_bar is None:
            return
        self._logged |= {key: float(value) for key, value in (logs or {}).items() if isinstance(value, (int, float))}
        if logs and (tokens := logs.get("num_tokens")) is not None:
            now = self._clock()
            before, self._tokens = self._tokens, (now, tokens)
            if before is not None and now > before[0]:
                self._speed = (tokens - before[1]) / (now - before[0])
        self.training_bar.show(self.text(state.global_step, state.max_steps), keeps=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the line."""
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    def text(self, step: int, steps: int) -> str:
        """The line: step, reward and its parts, KL, length, truncated share, speed, time left, as far as they are known."""
        logged = self._logged
        parts = [f"step {step:,}/{steps:,}"]
        if "reward" in logged:
            means = {name: logged.get(f"rewards/{name}/mean") for name in self.rewards}
            of = ", ".join(f"{name} {mean:.3g}" for name, mean in means.items() if mean is not None)
            parts.append(f"reward {logged['reward']:.3g}" + (f" ({of})" if of and len(self.rewards) > 1 else ""))
        if "kl" in logged:
            parts.append(f"KL {logged['kl']:.2g}")
        if "completions/mean_length" in logged:
            parts.append(f"length {logged['completions/mean_length']:.0f}")
        if "completions/clipped_ratio" in logged:
            parts.append(f"truncated {logged['completions/clipped_ratio']:.0%}")
        if self._speed is not None:
            parts.append(f"{self._speed:,.0f} tokens/s")
        if (done := step - self._first) > 0 and steps > step:
            parts.append(f"{_time((self._clock() - self._began) / done * (steps - step))} left")
        return "  ".join(parts)


class Line:
    """A line that is drawn again in place on a terminal, below what is printed meanwhile; elsewhere one a minute."""

    SECONDS = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic, quiet: Sequence[logging.Logger] = ()) -> None:
        self._clock, self._printed = clock, clock()
        self._quiet: list[tuple[logging.Logger, int]] = []
        self._live: Any = None
        self._handlers: list[tuple[Any, Any]] = []
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True, highlight=False)
            redirects = sys.stdout.isatty()  # what is piped away stays in its pipe
            self._live = Live(console=console, transient=True, redirect_stdout=redirects, refresh_per_second=4)
            self._live.start()
            self._quiet = [(logger, logger.level) for logger in quiet]
            for logger in quiet:
                logger.setLevel(logging.WARNING)
            # Handlers have kept the stream from before, and would write over the line.
            roots = [handler for handler in logging.getLogger().handlers if type(handler) is logging.StreamHandler]
            self._handlers = [(handler, handler.setStream(sys.stderr)) for handler in roots]

    def show(self, text: str, *, keeps: bool = False) -> None:
        """Draw the line; off a terminal, print it if it `keeps` and the last one is a minute old."""
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(visible(text), no_wrap=True, overflow="ellipsis"))
        elif keeps and self._clock() - self._printed >= self.SECONDS:
            self._printed = self._clock()
            say(text)

    def close(self) -> None:
        """Remove the line from the terminal."""
        if self._live is not None:
            for handler, stream in self._handlers:
                handler.setStream(stream or sys.__stderr__)
            for logger, level in self._quiet:
                logger.setLevel(level)
            self._live.stop()
            self._live = None


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
