"""`grpo-recipes train`: check a recipe, start accelerate's launcher on it, pass signals on, end with one sentence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import psutil
import torch

from grpo_recipes.checks import checks
from grpo_recipes.checks.checks import Machine
from grpo_recipes.process import exit_message as last_sentence
from grpo_recipes.process.signals import INTERRUPTED, NOTHING_DONE, drop_closed_outputs, hangs_up
from grpo_recipes.recipe.recipe import Recipe, RecipeError, find_file, parse_recipe, read_yaml
from grpo_recipes.runs.checkpoints import last_complete_checkpoint
from grpo_rewards.terminal import say, visible

MODULE = "grpo_recipes.train"

# Passed on to the training processes. A terminal that is closed sends SIGHUP; it would end them in the middle of a step.
SIGNALS: dict[int, signal.Signals] = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,
}

# The first signal asks for a checkpoint, the second for none; whoever sends a third wants the processes gone.
PATIENCE = 2


@dataclass(frozen=True)
class Layout:
    """An accelerate configuration, and on how many processes it is to be launched."""

    config: Path
    num_processes: int

    @classmethod
    def chosen(cls, config: str | None, num_processes: int | None, use_cpu: bool) -> Layout:
        """The layout that is asked for; where no file is named, one process, or one for each GPU of this machine.

        Raises `RecipeError` for a file that can't be found or is no accelerate configuration.
        """
        if num_processes is not None and num_processes < 1:
            raise RecipeError(f"--num_processes is {num_processes}: set it to at least 1")
        if config is not None:
            path = find_file("accelerate_configs", config)
            return cls(path, num_processes or Machine.described(path).num_processes)
        gpus = 0 if use_cpu else torch.cuda.device_count()
        count = num_processes or max(gpus, 1)
        names = ("cpu", "ddp_cpu") if gpus == 0 else ("single_gpu", "ddp")
        return cls(find_file("accelerate_configs", names[count > 1]), count)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command that launches training with these arguments."""
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file", str(self.config)]
        count = ["--num_processes", str(self.num_processes)]
        # Accelerate's own port is always the same: a second run on this machine would meet the first on it.
        port = ["--main_process_port", "0"] if self.num_processes > 1 and self._is_one_machine() else []
        return [*launcher, *count, *port, "-m", MODULE, *arguments]

    def _is_one_machine(self) -> bool:
        return read_yaml(self.config).get("num_machines", 1) == 1


def launch(
    recipe_name: str,
    overrides: Sequence[str],
    *,
    accelerate_config: str | None = None,
    num_processes: int | None = None,
    options: Sequence[str] = (),
) -> int:
    """Check a recipe for the processes that it will run on, then train it on them.

    An unknown override may be meant for one of `options`, the command's own.

    Returns the exit code of the training: 0, 1 if it failed, 2 if it was refused, 130 after Ctrl-C. Raises `UserError` for a
    recipe that can't run as written, before any process is started.
    """
    arguments = ["--config", recipe_name, *overrides]
    recipe = parse_recipe(arguments, options)
    layout = Layout.chosen(accelerate_config, num_processes, recipe.config.use_cpu)
    machine = replace(Machine.here(), num_processes=layout.num_processes)
    checks.check_output_dir(recipe)
    checks.resume_point(recipe, machine)
    checks.check_packages(recipe)
    checks.dry_config(recipe, machine)
    checks.check(recipe, machine)
    say(f"{layout.num_processes} process{'es' * (layout.num_processes > 1)}, laid out by {layout.config}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "last_sentence.json"
        code, signalled = _run(layout.command(arguments), {**os.environ, last_sentence.VARIABLE: str(file)})
        found = last_sentence.read(file)
    drop_closed_outputs()
    if found is None and code == 0:
        return 0
    sentence, code = found or _without_sentence(recipe, machine, code, signalled)
    say(visible(sentence), to_stderr=True)  # it may quote a file: one line
    return code


def interrupted() -> int:
    """What Ctrl-C leaves before a process is started."""
    say(f"stopped by Ctrl-C: {NOTHING_DONE}", to_stderr=True)
    return INTERRUPTED


def _without_sentence(recipe: Recipe, machine: Machine, code: int, signalled: signal.Signals | None) -> tuple[str, int]:
    """What to say of processes that ended early and left no sentence, and the exit code."""
    checkpoint, _ = last_complete_checkpoint(recipe.output_dir, machine.num_processes)
    rest = f"goes on from {checkpoint.name}" if checkpoint else "starts again: no checkpoint had been saved"
    rest = f"`--resume_from_checkpoint true` {rest}"
    if signalled is not None:
        name = "Ctrl-C" if signalled == signal.SIGINT else signalled.name
        return f"stopped by {name}: {rest}", 128 + signalled
    return (
        f"error: the training processes ended with code {code} and without an error of their own; they were probably killed "
        f"(out of memory, or by hand): {rest}"
    ), 1


def _run(command: Sequence[str], environment: dict[str, str]) -> tuple[int, signal.Signals | None]:
    """Run the launcher to its end. Returns its exit code, and the first signal that was passed on to what it started."""
    # In a group of its own: the terminal sends Ctrl-C to this process alone, and the training processes get it once.
    process = subprocess.Popen(command, env=environment, process_group=0)
    try:
        with _passing_signals_to(process) as received:
            code = process.wait()
    finally:
        with suppress(ProcessLookupError):  # a process that outlived its launcher
            os.killpg(process.pid, signal.SIGKILL)
    return code, received[0] if received else None


@contextmanager
def _passing_signals_to(launcher: subprocess.Popen) -> Iterator[list[signal.Signals]]:
    """Inside this block SIGINT, SIGTERM and SIGHUP go to the training processes and not to the launcher; yields them.

    accelerate's launcher of one process ends at SIGTERM and leaves its process running; torch's, of several, kills its
    processes 30 seconds after the signal, in which a large model is not saved.
    """
    received: list[signal.Signals] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if len(received) > PATIENCE:
                os.killpg(launcher.pid, signal.SIGKILL)
            elif trainers := [child for child in psutil.Process(launcher.pid).children() if MODULE in child.cmdline()]:
                for trainer in trainers:
                    trainer.send_signal(SIGNALS[number])
            else:  # it has not started them yet
                os.killpg(launcher.pid, signal.SIGKILL)

    numbers = [number for number in SIGNALS if number != signal.SIGHUP or hangs_up()]
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
