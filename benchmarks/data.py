"""Time and memory of `grpo-recipes plan`, and of the checks before training, on a million rows of JSONL.

    python benchmarks/data.py                     # 1,000,000 rows
    python benchmarks/data.py --rows 100000

Each command runs in a process of its own, first with an empty cache, then with the tables that the first run left
there. The peak is the largest resident memory of the process, with the pages of mapped files. The recipe has boxed
golds to check, columns to map and a share of the rows to hold out.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import datasets
import pyarrow

QUESTION = (
    "{name} has {n} figs, buys {more} more at the market, and gives {less} of them to each of {friends} friends. "
    "How many figs are left in the basket at the end of the day?"
)
CHECKS = """
import sys
from grpo_recipes.checks.checks import Machine
from grpo_recipes.recipe.recipe import parse_recipe
from grpo_recipes.run.prepare import prepare
prepare(parse_recipe(sys.argv[1:]), Machine.here())
"""


def write_rows(path: Path, rows: int) -> None:
    """Write problems of about 350 bytes a line, one in 1,000 without a gold."""
    with path.open("w", encoding="utf-8") as file:
        for n in range(rows):
            more, less, friends = n % 97, n % 13, n % 5
            left = n + more - less * friends
            solution = f"{n} + {more} - {less} * {friends} = {left}, so \\boxed{{{left}}}"
            row = {
                "problem": QUESTION.format(name="Ann", n=n, more=more, less=less, friends=friends),
                "solution": solution if n % 1_000 else "",
                "level": n % 5,
                "book": f"book {n % 100}",
            }
            file.write(json.dumps(row) + "\n")


def write_model(folder: Path) -> None:
    """Save the quickstart's policy, because a recipe names a model: configuration, tokenizer and weights."""
    from grpo_recipes.quickstart import WarmStart, build_policy, build_tokenizer, demonstrations
    from grpo_recipes.recipe.dataset import DatasetSpec

    settings = WarmStart(demonstrations=500)
    tokenizer = build_tokenizer(demonstrations(settings, DatasetSpec("arithmetic")), settings.vocab_size)
    build_policy(tokenizer, settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_recipe(folder: Path, rows: Path, model: Path) -> Path:
    """Write a recipe as JSON, which is valid YAML, and return its path."""
    recipe = {
        "model_name_or_path": str(model),
        "dataset": {
            "path": str(rows),
            "columns": {"question": "problem", "answer": "solution"},
            "system_prompt": "boxed",
            "eval_share": 0.01,
        },
        "rewards": ["math_correctness"],
        "eval_strategy": "steps",
        "use_cpu": True,
        "bf16": False,
        "output_dir": str(folder / "run"),
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def measured(command: list[str], cache: Path) -> tuple[float, float, float]:
    """Run a command and return its wall seconds, CPU seconds and peak resident memory in GB."""
    began = time.perf_counter()
    environment = {**os.environ, "HF_DATASETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, command
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    versions = f"datasets {datasets.__version__}, pyarrow {pyarrow.__version__}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "rows.jsonl"
        write_rows(path, rows)
        write_model(folder / "model")
        recipe = str(write_recipe(folder, path, folder / "model"))
        limited = [recipe, "--dataset.max_prompt_tokens", "512"]
        commands = {
            "plan": [sys.executable, "-m", "grpo_recipes.cli", "plan", recipe],
            "checks before training": [sys.executable, "-c", CHECKS, "--config", recipe],
            "the same, every prompt measured": [sys.executable, "-c", CHECKS, "--config", *limited],
        }
        load, size = os.getloadavg()[0], path.stat().st_size / 1e6
        print(
            f"{platform.machine()}, {os.cpu_count()} cores, load {load:.0f}; {versions}; {rows:,} rows, {size:.0f} MB\n"
        )
        print("| command | cache | wall, s | CPU, s | peak resident, GB |\n|---|---|---|---|---|")
        for label, command in commands.items():
            cache = folder / label.replace(" ", "-")
            for state in ("empty", "filled"):
                wall, cpu, peak = measured(command, cache)
                print(f"| {label} | {state} | {wall:.1f} | {cpu:.1f} | {peak:.2f} |", flush=True)


if __name__ == "__main__":
    main()
