"""Start of accelerate's launcher on a recipe: signals are passed on to its processes, and one line ends the output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from grpo_recipes.checks.checks import Machine
from grpo_recipes.process.signals import drop_closed_outputs, heeds_hangup
from grpo_recipes.recipe.recipe import find_file
from grpo_recipes.recipe.specs import COUNT, check_number
from grpo_recipes.run.endings import LAST_LINE_VARIABLE, read_last_line
from grpo_rewards.strict import load_yaml
from grpo_rewards.terminal import say, visible

MODULE = "grpo_recipes.train"

# Signals passed on to the training processes. A closed terminal sends SIGHUP, which would end them within a step.
SIGNALS = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}

# The first signal requests a checkpoint, and the second an end without one. Whoever sends a third wants no process
# left.
SIGNALS_BEFORE_KILL = 2


@dataclass(frozen=True)
class ProcessLayout:
    """Path of an accelerate configuration, and the number of processes to launch it on."""

    config: Path
    num_processes: int

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return the command that launches training with these arguments."""
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file", str(self.config)]
        launcher += ["--num_processes", str(self.num_processes)]
        is_one_machine = load_yaml(self.config.read_text(encoding="utf-8")).get("num_machines", 1) == 1
        if self.num_processes > 1 and is_one_machine:
            # accelerate's own port is always the same, so two runs on one machine would connect to each other.
            launcher += ["--main_process_port", "0"]
        return [*launcher, "-m", MODULE, *arguments]


def choose_layout(accelerate_config: str | None, num_processes: int | None, *, use_cpu: bool) -> ProcessLayout:
    """Return the layout that the command line names, or one process for each GPU of this machine.

    Raises:
        UserError: The file can't be found or is not an accelerate configuration, or `num_processes` is below 1.
    """
    check_number("num_processes", num_processes, COUNT)
    if accelerate_config is not None:
        path = find_file("accelerate_configs", accelerate_config)
        return ProcessLayout(path, num_processes or Machine.described(path).num_processes)
    import torch

    gpus = 0 if use_cpu else torch.cuda.device_count()
    processes = num_processes or max(gpus, 1)
    one, several = ("cpu", "ddp_cpu") if gpus == 0 else ("single_gpu", "ddp")
    return ProcessLayout(find_file("accelerate_configs", several if processes > 1 else one), processes)


def launch(layout: ProcessLayout, arguments: Sequence[str], resume_hint: Callable[[], str]) -> int:
    """Train in the processes of `layout`, and end with one line about how the run ended.

    Args:
        layout: Number of processes, and their accelerate configuration.
        arguments: Arguments of `python -m grpo_recipes.train`.
        resume_hint: Returns how the run can be resumed. Called only if the processes ended early and left no line.

    Returns:
        The exit code of the training: 0, 1 if it failed, 2 if the recipe was refused, 130 after Ctrl-C.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "last_line.json"
        code, received = _run(layout.command(arguments), {**os.environ, LAST_LINE_VARIABLE: str(file)})
        last_line = read_last_line(file)
    drop_closed_outputs()
    if last_line is not None:
        line, code = last_line
    elif code == 0:
        return 0
    elif received is not None:
        name = "Ctrl-C" if received == signal.SIGINT else received.name
        line, code = f"stopped by {name}: {resume_hint()}", 128 + received
    else:
        cause = "they were probably killed (out of memory, or by hand)"
        line = f"error: the training processes ended with code {code} and without an error of their own; {cause}: "
        line, code = line + resume_hint(), 1
    say(visible(line), to_stderr=True)  # it may quote a file with line breaks
    return code


def _run(command: Sequence[str], environment: dict[str, str]) -> tuple[int, signal.Signals | None]:
    """Run the launcher to its end. Return its exit code, and the first signal that was passed on, or None."""
    # A process group of its own: the terminal sends Ctrl-C to this process only, so the training processes get it once.
    process = subprocess.Popen(command, env=environment, process_group=0)
    try:
        with _passing_signals_to(process) as received:
            code = process.wait()
    finally:
        with suppress(ProcessLookupError):  # raised unless a training process outlived its launcher
            os.killpg(process.pid, signal.SIGKILL)
    return code, received[0] if received else None


@contextmanager
def _passing_signals_to(launcher: subprocess.Popen) -> Iterator[list[signal.Signals]]:
    """Pass SIGINT, SIGTERM and SIGHUP to the training processes instead of the launcher. Yield the received signals.

    accelerate's launcher of one process ends at SIGTERM and leaves its process running. torch's launcher of several
    kills its processes 30 seconds after the signal, which is too early to save a large model.
    """
    received: list[signal.Signals] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if len(received) > SIGNALS_BEFORE_KILL:
                os.killpg(launcher.pid, signal.SIGKILL)
                return
            trainers = [child for child in psutil.Process(launcher.pid).children() if MODULE in child.cmdline()]
            for trainer in trainers:
                trainer.send_signal(SIGNALS[received[-1]])
            if not trainers:  # the launcher has not started them yet, so there is nothing to save
                os.killpg(launcher.pid, signal.SIGKILL)

    numbers = [number for number in SIGNALS if number != signal.SIGHUP or heeds_hangup()]
    previous = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
