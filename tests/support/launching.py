"""Runs through `accelerate launch` as users start them: a tiny policy, its recipe, rewards, and a run's files."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import torch
import yaml
from safetensors.torch import load_file

from grpo_recipes.recipe.recipe import find_file
from tests.support import forking, tiny

ROOT = Path(__file__).resolve().parents[2]


def build_policy(folder: Path, *, tied: bool = True) -> Path:
    """Save a two-layer byte-level Llama of about 12,000 parameters in `folder`."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 4096, "initializer_range": 0.02}
    return tiny.save_policy(folder, **heads, **sizes, tie_word_embeddings=tied)


def write_recipe(path: Path, policy: Path, rows: Path | None, output: Path, **changes: Any) -> Path:
    """Write a recipe for two processes: 4 prompts × 4 completions per generation, a checkpoint after every step.

    `rows` is a file in GSM8K's schema, or None if `changes` has another dataset.
    """
    values = {
        "model_name_or_path": str(policy),
        "dtype": "float32",
        "bf16": False,
        "use_cpu": True,
        "dataset": {"name": "gsm8k", "path": str(rows), "prompt_format": "text"},
        "rewards": ["tests.support.launching.variety"],
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 6,
        "save_steps": 1,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "gradient_checkpointing": False,
        "output_dir": str(output),
        **changes,
    }
    path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}))
    return path


def write_rows(path: Path, count: int) -> Path:
    """`count` different rows in GSM8K's schema."""
    rows = ({"question": f"What is {n} + {n}?", "answer": f"{n}+{n}={2 * n}\n#### {2 * n}"} for n in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


Started = subprocess.Popen | forking.Launch


def start(
    layout: str, recipe: Path, *arguments: str, module: str = "grpo_recipes.train", fresh: bool = False, **options: Any
) -> Started:
    """Start a recipe on the processes of `layout`, with the options of `start_module`."""
    return start_module(layout, module, "--config", str(recipe), *arguments, fresh=fresh, **options)


def start_module(
    layout: str, module: str, *arguments: str, launcher: Sequence[str] = (), fresh: bool = False, **env: str
) -> Started:
    """Start a module on the processes of `layout` (a shipped configuration or a path), stderr merged into stdout.

    Each is an interpreter of its own if `fresh`, and otherwise a fork of one that has imported what a run needs.
    """
    port = ["--main_process_port", "0"] if layout != "cpu" else []
    config = str(find_file("accelerate_configs", layout))
    command = ["--config_file", config, *launcher, *port, "-m", module, *arguments]
    paths = f"{ROOT}{os.pathsep}{ROOT / 'rewards'}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **env}
    if not fresh:
        return forking.Launch(command, ROOT, environment)
    return subprocess.Popen(
        [sys.executable, "-m", "accelerate.commands.launch", *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: Started, timeout: float = 550) -> str:
    """Return the output of a started run once the run has ended."""
    try:
        return process.communicate(timeout=timeout)[0]
    finally:
        kill_tree(process.pid)


def launch(layout: str, recipe: Path, *arguments: str, **options: Any) -> str:
    """Run a recipe to its end, with the options of `start`, and return what it printed; fails if it did."""
    return _to_its_end(start(layout, recipe, *arguments, **options))


def launch_module(layout: str, module: str, *arguments: str, **options: Any) -> str:
    """Run a module to its end, with the options of `start_module`, and return what it printed; fails if it did."""
    return _to_its_end(start_module(layout, module, *arguments, **options))


def _to_its_end(process: Started) -> str:
    said = finish(process)
    assert process.returncode == 0, said[-10_000:]
    return said


def kill_tree(pid: int) -> None:
    """SIGKILL for a process and everything that it started."""
    try:
        parent = psutil.Process(pid)
        tree = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(tree, timeout=10)


def wait_for(condition: Any, process: Started, poll: float = 0.002) -> bool:
    """Wait until `condition()` holds; False if the process ends first."""
    while not condition():
        if process.poll() is not None:
            return False
        time.sleep(poll)
    return True


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    """Return the saved model or adapter of a run."""
    (file,) = [path for path in folder.glob("*.safetensors") if path.stem in ("model", "adapter_model")]
    return load_file(file)


def completions(folder: Path) -> pd.DataFrame:
    """Every logged completion of a run, by step."""
    frames = [pd.read_parquet(path) for path in sorted((folder / "completions").glob("*.parquet"))]
    return pd.concat(frames, ignore_index=True)


def log_history(folder: Path) -> list[dict[str, Any]]:
    """Return the log of a run, without times and rates."""
    state = json.loads((folder / "trainer_state.json").read_text())
    times = ("runtime", "per_second", "step_time")
    return [{key: value for key, value in entry.items() if not key.endswith(times)} for entry in state["log_history"]]


def assert_same_run(one: Path, other: Path) -> None:
    """Assert that parameters, prompts, completions and log entries are equal to the bit."""
    expected, actual = parameters(one), parameters(other)
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert torch.equal(value, actual[name]), name
    columns = ["step", "prompt", "completion"]
    left, right = (completions(folder)[columns].sort_values(columns, ignore_index=True) for folder in (one, other))
    pd.testing.assert_frame_equal(left, right)
    assert log_history(one) == log_history(other)


# Rewards that recipes name by dotted path.


def variety(completions: Sequence[str], **columns: Any) -> list[float]:
    """Pay the number of distinct characters, which differs inside every group of random text."""
    return [float(len(set(text))) for text in completions]


def varies_for_odd_numbers(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """`variety` for every other prompt of `write_rows`; the groups of the others never have any variance."""
    odd = [int(prompt.rpartition(" + ")[2].strip("?")) % 2 for prompt in prompts]
    return [value * is_odd for value, is_odd in zip(variety(completions), odd, strict=True)]


def raises_on_rank_1(completions: Sequence[str], trainer_state: Any, **columns: Any) -> list[float]:
    if os.environ["RANK"] == "1" and trainer_state.global_step == 2:
        raise ValueError("the judge did not answer")
    return variety(completions)


def infinite_on_rank_1(completions: Sequence[str], trainer_state: Any, **columns: Any) -> list[float]:
    values = variety(completions)
    if os.environ["RANK"] == "1" and trainer_state.global_step == 2:
        values[3] = float("inf")
    return values


def one_on_rank_1(completions: Sequence[str], trainer_state: Any, **columns: Any) -> list[float]:
    return [1.0] if os.environ["RANK"] == "1" and trainer_state.global_step == 2 else variety(completions)


def continues_its_prompt(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """1.0 where a completion is what `StubServer` writes for this very prompt."""
    return [float(prompt.endswith(text[:-1])) for prompt, text in zip(prompts, completions, strict=True)]


def kills_rank_1(completions: Sequence[str], trainer_state: Any, **columns: Any) -> list[float]:
    if os.environ["RANK"] == "1" and trainer_state.global_step == 2:
        psutil.Process().kill()
    return variety(completions)
