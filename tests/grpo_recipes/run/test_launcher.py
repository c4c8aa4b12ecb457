"""`grpo-recipes train`: refusals before a process starts, the launched command, and the end of a run."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from grpo_recipes.recipe.recipe import RecipeError, find_file
from grpo_recipes.run import endings, launcher
from grpo_recipes.run.launcher import ProcessLayout, choose_layout
from tests.support import launching
from tests.support.errors import refused


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Write a recipe of six steps for a tiny policy, and return its path."""
    policy = launching.build_policy(tmp_path / "policy")
    rows = launching.write_rows(tmp_path / "rows.jsonl", 32)
    return launching.write_recipe(tmp_path / "recipe.yaml", policy, rows, tmp_path / "run")


@pytest.mark.parametrize(
    ("gpus", "use_cpu", "config", "count", "chosen"),
    [
        (0, False, None, None, ("cpu", 1)),
        (0, False, None, 2, ("ddp_cpu", 2)),
        (1, False, None, None, ("single_gpu", 1)),
        (4, False, None, None, ("ddp", 4)),
        (4, False, None, 1, ("single_gpu", 1)),
        (4, True, None, None, ("cpu", 1)),
        (0, True, None, 2, ("ddp_cpu", 2)),
        (4, False, None, 2, ("ddp", 2)),
        (4, False, "zero3", None, ("zero3", 8)),
        (0, True, "zero3", None, ("zero3", 8)),
        (4, False, "zero3", 4, ("zero3", 4)),
    ],
)
def test_the_layout_follows_the_options_and_the_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, use_cpu: bool, config: str | None, count: int | None, chosen: tuple
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    layout = choose_layout(config, count, use_cpu=use_cpu)
    assert (layout.config.stem, layout.num_processes) == chosen


def test_accelerate_parses_the_command() -> None:
    """`accelerate`'s own parser reads the layout, and leaves our arguments to training."""
    from accelerate.commands.launch import launch_command_parser

    command = ProcessLayout(find_file("accelerate_configs", "ddp_cpu"), 2).command(
        ["--config", "r.yaml", "--max_steps", "3"]
    )
    assert command[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    options = launch_command_parser().parse_args(command[3:])
    assert (options.num_processes, options.main_process_port, options.module) == (2, 0, True)
    assert options.training_script == "grpo_recipes.train"
    assert options.training_script_args == ["--config", "r.yaml", "--max_steps", "3"]


def test_a_file_that_is_no_accelerate_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: 1\n")
    with refused("x.yaml", "`num_processes`", by=RecipeError):
        choose_layout(str(tmp_path / "x.yaml"), None, use_cpu=True)


# ---- launches


def start(recipe: Path, *arguments: str) -> subprocess.Popen:
    paths = f"{launching.ROOT}{os.pathsep}{launching.ROOT / 'rewards'}"
    return subprocess.Popen(
        [sys.executable, "-m", "grpo_recipes.cli", "train", str(recipe), *arguments],
        cwd=launching.ROOT,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def last_line(output: str) -> str:
    return output.rstrip("\n").splitlines()[-1]


@pytest.mark.slow
def test_ctrl_c_to_the_command_leaves_a_checkpoint_and_no_process(recipe: Path) -> None:
    process = start(recipe, "--max_steps", "400", "--save_steps", "400")
    try:
        assert launching.wait_for(lambda: list(recipe.parent.glob("run/completions/*.parquet")), process)
        tree = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        output = launching.finish(process, timeout=120)
    finally:
        launching.kill_tree(process.pid)
    assert process.returncode == 130, output
    assert last_line(output).startswith("stopped by Ctrl-C after step ")
    assert list((recipe.parent / "run").glob("checkpoint-*"))
    assert not [child for child in tree if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_sighup_is_ignored_under_nohup(handler: signal.Handlers) -> None:
    previous = signal.signal(signal.SIGHUP, handler)
    try:
        with launcher._passing_signals_to(SimpleNamespace(pid=os.getpid())):
            is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGINT) != signal.SIG_DFL
        assert is_ignored == (handler == signal.SIG_IGN)
        assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.slow
def test_the_last_line_after_a_kill_tells_how_to_resume(recipe: Path) -> None:
    process = start(recipe, "--max_steps", "400")
    try:
        assert launching.wait_for(lambda: len(list((recipe.parent / "run").glob("checkpoint-*"))) > 2, process)
        (launcher,) = psutil.Process(process.pid).children()
        (trainer,) = launcher.children()
        trainer.kill()
        output = launching.finish(process, timeout=60)
    finally:
        launching.kill_tree(process.pid)
    assert process.returncode == 1, output
    assert "checkpoint-" in last_line(output).partition("--resume_from_checkpoint")[2]


# ---- the launcher's processes, without a training

CHILD = """
import os, signal, sys, time
got = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: got.append(number))
open(sys.argv[1], "w").write(str(os.getpid()))
while not got:
    time.sleep(0.01)
os._exit(100 + got[0] if len(sys.argv) == 3 else 0)
"""
PARENT = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.exit(subprocess.call([sys.executable, "-c", *sys.argv[1:]]))
"""


def send_when(is_time: Callable[[], bool], number: signal.Signals) -> None:
    """Send a signal to this process once the launcher handles it and `is_time()` holds."""
    handler = signal.getsignal(number)

    def send() -> None:
        while signal.getsignal(number) == handler or not is_time():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_the_training_processes_as_one_that_lets_them_save(
    sent: signal.Signals, tmp_path: Path
) -> None:
    file = tmp_path / "pid"
    command = [sys.executable, "-c", PARENT, CHILD, str(file), launcher.MODULE]
    previous = {number: signal.getsignal(number) for number in launcher.SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        send_when(lambda: file.exists() and bool(file.read_text()), sent)
        code, received = launcher._run(command, dict(os.environ))
    finally:
        signal.signal(signal.SIGHUP, previous[signal.SIGHUP])
    passed_on = signal.SIGTERM if sent == signal.SIGHUP else sent  # a closed terminal must not end a step
    assert (code, received) == (100 + passed_on, sent)
    assert {number: signal.getsignal(number) for number in launcher.SIGNALS} == previous


def test_a_signal_before_the_training_processes_exist_kills_the_launcher() -> None:
    send_when(lambda: True, signal.SIGTERM)
    code, received = launcher._run([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ))
    assert (code, received) == (-signal.SIGKILL, signal.SIGTERM)


def test_two_signals_are_passed_on_and_the_third_kills(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first asks for a checkpoint and the second for an end without one."""
    got: list[tuple[str, int]] = []
    trainers = []
    for rank in "01":
        send = partial(lambda rank, number: got.append((rank, number)), rank)
        trainers.append(SimpleNamespace(send_signal=send, cmdline=lambda: ["python", "-m", launcher.MODULE]))
    started = [SimpleNamespace(cmdline=lambda: ["tracker"]), *trainers]
    monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(children=lambda: started if pid == 7 else []))
    monkeypatch.setattr(os, "killpg", lambda group, number: got.append((f"group {group}", number)))
    with launcher._passing_signals_to(SimpleNamespace(pid=7)) as received:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
    assert got == [(rank, signal.SIGTERM) for rank in "0101"] + [("group 7", signal.SIGKILL)]
    assert received == [signal.SIGTERM] * 3


def test_a_training_process_that_outlives_its_launcher_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = "import subprocess, sys, time, pathlib\nsubprocess.Popen([sys.executable, '-c', *sys.argv[1:]])\n"
    code += "file = pathlib.Path(sys.argv[2])\nwhile not file.exists() or not file.read_text():\n    time.sleep(0.01)\n"
    code += "sys.exit(5)"
    assert launcher._run([sys.executable, "-c", code, CHILD, str(file)], dict(os.environ)) == (5, None)
    with suppress(psutil.NoSuchProcess):
        child = psutil.Process(int(file.read_text()))
        while child.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("left", "ended", "code", "line"),
    [
        (None, (0, None), 0, None),
        (None, (0, signal.SIGTERM), 0, None),
        (None, (-9, None), 1, "error: "),
        (None, (1, signal.SIGINT), 130, "stopped by Ctrl-C: resume like this"),
        (None, (1, signal.SIGTERM), 143, "stopped by SIGTERM: resume like this"),
        (("error: a reward raised", 1), (1, None), 1, "error: a reward raised"),
        (("error: the recipe is wrong", 2), (1, None), 2, "error: the recipe is wrong"),
        (("stopped by SIGTERM", 0), (0, signal.SIGTERM), 0, "stopped by SIGTERM"),
        (("error: of a file\nwith lines", 1), (1, None), 1, "error: of a file"),
    ],
)
def test_a_launch_ends_with_the_line_and_the_code_of_its_processes(
    left: tuple[str, int] | None,
    ended: tuple[int, signal.Signals | None],
    code: int,
    line: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The processes leave their last line in the file that an environment variable names."""
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str], environment: dict[str, str]) -> tuple[int, signal.Signals | None]:
        commands.append(command)
        if left is not None:
            with monkeypatch.context() as patch:
                patch.setenv(endings.LAST_LINE_VARIABLE, environment[endings.LAST_LINE_VARIABLE])
                assert endings.print_last_line(*left) == left[1]
        return ended

    monkeypatch.setattr(launcher, "_run", run)
    layout = ProcessLayout(find_file("accelerate_configs", "cpu"), 1)
    assert launcher.launch(layout, ["--config", "r.yaml"], lambda: "resume like this") == code
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 0 if line is None else 1)
    assert said.err.startswith(line or "")
    assert left is not None or line is None or said.err.endswith(": resume like this\n")
    assert ("-9" in said.err) == (ended == (-9, None))
    assert commands == [layout.command(["--config", "r.yaml"])]


@pytest.mark.parametrize(
    ("machines", "processes", "has_port"), [(1, 1, False), (1, 2, True), (2, 2, False), (None, 2, True)]
)
def test_runs_on_one_machine_choose_a_free_port(
    machines: int | None, processes: int, has_port: bool, tmp_path: Path
) -> None:
    """Several machines meet at the port of their configuration."""
    file = tmp_path / "own.yaml"
    file.write_text(f"num_processes: {processes}\n" + (f"num_machines: {machines}\n" if machines else ""))
    command = ProcessLayout(file, processes).command([])
    assert command[command.index("--num_processes") + 1] == str(processes)
    assert ("--main_process_port" in command) == has_port
