"""`grpo-recipes train`: refusals before a process starts, the launched command, and the end of a run."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from grpo_recipes import cli
from grpo_recipes.checks.checks import choose_layout
from grpo_recipes.process import launcher
from grpo_recipes.process.launcher import Layout
from grpo_recipes.recipe.recipe import RecipeError, find_file
from tests.support import launching


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Write a recipe of six steps for a tiny policy, and return its path."""
    policy = launching.build_policy(tmp_path / "policy")
    rows = launching.write_rows(tmp_path / "rows.jsonl", 32)
    return launching.write_recipe(tmp_path / "recipe.yaml", policy, rows, tmp_path / "run")


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lerning_rate", "1e-5"], "did you mean `learning_rate`?"),
        (["--accelerate_confg", "cpu"], "did you mean `--accelerate_config`?"),
        (["--accelerate_config", "nowhere"], "nowhere: there is no such file"),
        (["--num_processes", "0"], "`num_processes` is 0"),
        (["--num_processes", "3", "--num_generations", "16"], "num_generations"),
        (["--dataset.path", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--bf16", "true", "--use_cpu", "false"], "`bf16` needs a GPU"),
        (["--rewards", "[nothing_such]"], "nothing_such"),
    ],
)
def test_mistakes_are_reported_before_a_process_starts(
    capsys: pytest.CaptureFixture[str], recipe: Path, arguments: list[str], message: str
) -> None:
    capsys.readouterr()
    assert cli.main(["train", str(recipe), *arguments]) == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1


@pytest.mark.parametrize(
    ("gpus", "use_cpu", "config", "count", "chosen"),
    [
        (0, False, None, None, ("cpu", 1)),
        (1, False, None, None, ("single_gpu", 1)),
        (4, False, None, None, ("ddp", 4)),
        (4, True, None, None, ("cpu", 1)),
        (0, True, None, 2, ("ddp_cpu", 2)),
        (4, False, None, 2, ("ddp", 2)),
        (4, False, "zero3", None, ("zero3", 8)),
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

    command = Layout(find_file("accelerate_configs", "ddp_cpu"), 2).command(["--config", "r.yaml", "--max_steps", "3"])
    assert command[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    options = launch_command_parser().parse_args(command[3:])
    assert (options.num_processes, options.main_process_port, options.module) == (2, 0, True)
    assert options.training_script == "grpo_recipes.train"
    assert options.training_script_args == ["--config", "r.yaml", "--max_steps", "3"]


def test_a_file_that_is_no_accelerate_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: 1\n")
    with pytest.raises(RecipeError, match="as an accelerate configuration: `num_processes` must be a whole number"):
        choose_layout(str(tmp_path / "x.yaml"), None, use_cpu=True)


# ---- launches


def start(recipe: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "grpo_recipes.cli", "train", str(recipe), *arguments],
        cwd=launching.ROOT,
        env={
            **os.environ,
            "PYTHONPATH": f"{launching.ROOT}{os.pathsep}{launching.ROOT / 'rewards'}",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def last_line(output: str) -> str:
    return output.rstrip("\n").splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, 0, marks=pytest.mark.nightly), (signal.SIGINT, 130)]
)
def test_a_signal_to_the_command_leaves_a_checkpoint_and_no_process(recipe: Path, number: int, code: int) -> None:
    process = start(recipe, "--max_steps", "400", "--save_steps", "400")
    try:
        assert launching.wait_for(lambda: list(recipe.parent.glob("run/completions/*.parquet")), process)
        tree = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        output = launching.finish(process, timeout=120)
    finally:
        launching.kill_tree(process.pid)
    assert process.returncode == code, output
    assert last_line(output).startswith(f"stopped by {'SIGTERM' if code == 0 else 'Ctrl-C'} after step ")
    assert list((recipe.parent / "run").glob("checkpoint-*"))
    assert not [child for child in tree if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_sighup_is_ignored_under_nohup(handler: signal.Handlers) -> None:
    previous = signal.signal(signal.SIGHUP, handler)
    try:
        with launcher._passing_signals_to(SimpleNamespace(pid=os.getpid())):
            is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert is_ignored == (handler == signal.SIG_IGN)
        assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.slow
def test_the_error_of_the_rank_that_failed_is_the_last_line(recipe: Path) -> None:
    failing = ["--rewards", "[tests.support.launching.raises_on_rank_1]"]
    process = start(recipe, "--accelerate_config", "ddp_cpu", *failing)
    output = launching.finish(process)
    assert process.returncode == 1, output
    assert last_line(output).startswith(
        "error: rank 1: reward `raises_on_rank_1` raised ValueError: the judge did not answer"
    )


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
    assert "probably killed" in last_line(output)
    assert "`--resume_from_checkpoint true` goes on from checkpoint-" in last_line(output)


@pytest.mark.slow
def test_a_signal_before_the_training_processes_exist_ends_the_launch(recipe: Path) -> None:
    process = start(recipe)
    try:
        assert launching.wait_for(lambda: psutil.Process(process.pid).children(), process)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output = launching.finish(process, timeout=60)
    finally:
        launching.kill_tree(process.pid)
    assert process.returncode == 130, output
    assert last_line(output).startswith("stopped by Ctrl-C: ")
    assert not (recipe.parent / "run" / "run.json").exists()
