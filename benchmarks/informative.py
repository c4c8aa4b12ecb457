"""Accuracy and generated tokens of `sampling: informative`, against the same run without it.

    python benchmarks/informative.py [--output runs/informative] [--seeds 5]

The quickstart's policy, warm-started on 20,000 sums and differences of 4 to 6 operands, is trained on 128 such problems
of 4 operands for 20 epochs, once with every prompt and once with `sampling: informative`. Both runs have the same
initial weights, seed and number of optimizer steps. Each is evaluated greedily on the same 1,000 held-out problems.
There are five seeds.

The procedure and the criteria of success were fixed before the first pair of runs:
  - The 95 % interval of the difference in strict accuracy lies inside +-0.03. The wider of two intervals counts:
    Student's over the seeds' differences, and the bootstrap over seeds and problems (both resampled, 10,000 times,
    percentiles).
  - At least 30 % fewer completion tokens are generated.
The share of the generated prompts that only the floor kept is reported.

After each run `results.json` in the output folder holds all runs so far, and the same command continues with the next
one. At the end the table is printed as Markdown.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import sys
import time
import zlib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from transformers import set_seed

from grpo_recipes import cli, quickstart
from grpo_recipes.evaluation.estimates import mean_value
from grpo_recipes.recipe.dataset import SYSTEM_PROMPTS
from grpo_recipes.runs.files import write_atomically
from grpo_rewards.terminal import say

TRAINED, HELD_OUT, DEMONSTRATIONS = 128, 1_000, 20_000
SHOWN, POSED = (
    range(4, 7),
    range(4, 5),
)  # number of operands: of the demonstrations, and of the problems for training and evaluation
NAMES = ("Ann", "Ben", "Carla", "Dev", "Emma", "Femi", "Grace", "Hugo")
ITEMS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")
ARMS: dict[str, list[str]] = {"every prompt": [], "informative": ["--sampling", "informative"]}
MARGIN, SAVING, RESAMPLES = 0.03, 0.30, 10_000

RECIPE = """
dtype: float32
bf16: false
use_cpu: true
dataset: {{name: gsm8k, path: {folder}/train.jsonl, eval_path: {folder}/test.jsonl, system_prompt: think}}
rewards:
  - {{name: gsm8k_correctness, kwargs: {{tags: [think, answer]}}}}
  - {{name: well_formed, kwargs: {{tags: [think, answer]}}}}
model_name_or_path: {folder}/policy
num_generations: 8
per_device_train_batch_size: 128  # 16 prompts, 8 optimizer steps an epoch
gradient_accumulation_steps: 1
max_completion_length: 48
num_train_epochs: {epochs}
temperature: 1.0
loss_type: grpo
beta: 0.0
learning_rate: 3.0e-4
lr_scheduler_type: linear
gradient_checkpointing: false
logging_steps: 1
log_completions: false
save_strategy: "no"
"""


def problems(split: str, size: int, operands: range, seed: int = 0) -> list[dict[str, str]]:
    """Return sums and differences in GSM8K's schema. A checksum of the question decides its split."""
    generator = random.Random(f"{split}-{seed}")
    made: dict[str, dict[str, str]] = {}
    while len(made) < size:
        name, item = generator.choice(NAMES), generator.choice(ITEMS)
        total = generator.randint(2, 9)
        clauses, steps = [f"{name} has {total} {item}"], []
        for _ in range(generator.choice(operands) - 1):
            operand = generator.randint(2, 9)
            loses = total > operand and generator.random() < 0.5
            result = total - operand if loses else total + operand
            steps.append(f"{total}{'-' if loses else '+'}{operand}={result}")
            clauses.append(f"{'loses' if loses else 'gets'} {operand}")
            total = result
        question = f"{', '.join(clauses)}. How many {item} does {name} have now?"
        if (zlib.crc32(question.encode()) % 5 == 0) == (split == "test"):
            made.setdefault(question, {"question": question, "answer": "\n".join([*steps, f"#### {total}"])})
    return list(made.values())


def prepare(folder: Path, epochs: int) -> None:
    """Write the problems, the recipe and the warm-started policy, unless an earlier call wrote them."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in (("train", TRAINED), ("test", HELD_OUT)):
        lines = "".join(json.dumps(problem) + "\n" for problem in problems(split, size, POSED))
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, epochs=epochs), encoding="utf-8")
    if (folder / "policy" / "tokenizer_config.json").is_file():  # written last
        return
    settings = quickstart.WarmStart(demonstrations=DEMONSTRATIONS)
    layouts = random.Random(0).choices(list(quickstart.LAYOUTS), settings.shares, k=DEMONSTRATIONS)
    system = {"role": "system", "content": SYSTEM_PROMPTS["think"]}
    conversations = [
        {
            "prompt": [system, {"role": "user", "content": problem["question"]}],
            "completion": [{"role": "assistant", "content": solution(problem["answer"], layout)}],
        }
        for problem, layout in zip(problems("train", DEMONSTRATIONS, SHOWN, seed=1), layouts, strict=True)
    ]
    set_seed(0)
    tokenizer = quickstart.build_tokenizer(conversations, settings.vocab_size)
    policy = quickstart.build_policy(tokenizer, settings)
    quickstart.fine_tune(policy, tokenizer, conversations, settings, folder / "policy")
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")


def solution(answer: str, layout: str) -> str:
    """Return a worked answer in one of the quickstart's layouts."""
    steps, _, number = answer.partition("\n#### ")
    return quickstart.LAYOUTS[layout].format(steps=steps, number=number)


def evaluate(model: Path, folder: Path, recipe: Path) -> list[bool]:
    """Return, for each held-out problem, True if its greedy completion is strictly right."""
    arguments = ["evaluate", str(model), "--recipe", str(recipe), "--batch_size", "250", "--output", str(folder)]
    if status := cli.main(arguments):
        raise SystemExit(status)
    return [bool(right) for right in pd.read_parquet(folder / "completions.parquet").sort_values("problem")["strict"]]


def run(folder: Path, seed: int, arm: str) -> dict[str, Any]:
    """Train and evaluate one arm."""
    output, recipe = folder / f"seed{seed}-{arm.replace(' ', '-')}", folder / "recipe.yaml"
    shutil.rmtree(output, ignore_errors=True)
    started = time.process_time()
    if status := quickstart.train(
        ["--config", str(recipe), "--output_dir", str(output), "--seed", str(seed), *ARMS[arm]]
    ):
        raise SystemExit(status)
    seconds = time.process_time() - started
    log = [
        entry for entry in json.loads((output / "trainer_state.json").read_text())["log_history"] if "reward" in entry
    ]
    shares = [entry.get("prompts/generated", 1.0) for entry in log]
    return {
        "right": evaluate(output, output / "evaluation", recipe),
        "steps": len(log),
        "tokens": sum(
            entry["completions/mean_length"] * TRAINED * share for entry, share in zip(log, shares, strict=True)
        ),
        "completions": sum(TRAINED * share for share in shares),
        "kept_by_floor": sum(e.get("prompts/kept_by_floor", 0.0) * s for e, s in zip(log, shares, strict=True))
        / sum(shares),
        "without_variance": [entry["frac_reward_zero_std"] for entry in log],
        "cpu_seconds": seconds,
    }


def bootstrap(differences: np.ndarray) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean of (seeds, problems), with both resampled."""
    generator = np.random.default_rng(0)
    seeds, problems_ = differences.shape
    means = []
    for _ in range(RESAMPLES):
        rows = differences[generator.integers(seeds, size=seeds)].mean(0)
        means.append(rows[generator.integers(problems_, size=problems_)].mean())
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def table(results: dict[str, dict[str, Any]], before: Sequence[bool]) -> str:
    """Return the results as Markdown, with the criteria and whether they were met."""
    right = {arm: np.array([seed[arm]["right"] for seed in results.values()], float) for arm in ARMS}
    tokens = {arm: np.array([seed[arm]["tokens"] for seed in results.values()]) for arm in ARMS}
    differences = right["informative"] - right["every prompt"]
    student, resampled = mean_value(list(differences.mean(1))), bootstrap(differences)
    widest = max((student.low, student.high), resampled, key=lambda ends: ends[1] - ends[0])
    saved = 1 - tokens["informative"].sum() / tokens["every prompt"].sum()
    lines = [
        "| seed | accuracy, every prompt | accuracy, informative | tokens, every prompt | tokens, informative | fewer |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for place, seed in enumerate(results):
        both = [f"{right[arm][place].mean():.3f}" for arm in ARMS] + [f"{tokens[arm][place]:,.0f}" for arm in ARMS]
        lines.append(
            f"| {seed} | {' | '.join(both)} | {1 - tokens['informative'][place] / tokens['every prompt'][place]:.1%} |"
        )
    floor = np.mean([seed["informative"]["kept_by_floor"] for seed in results.values()])
    steps = {seed[arm]["steps"] for seed in results.values() for arm in ARMS}
    cpu = {arm: sum(seed[arm]["cpu_seconds"] for seed in results.values()) for arm in ARMS}
    inside = widest[0] > -MARGIN and widest[1] < MARGIN
    return "\n".join(
        [
            *lines,
            "",
            f"Accuracy before training {np.mean(before):.3f}; {', '.join(map(str, steps))} optimizer steps in every "
            f"run; {len(results)} seeds.",
            f"Difference in accuracy, informative - every prompt: {differences.mean():+.4f}; "
            f"Student's interval over seeds [{student.low:+.4f}, {student.high:+.4f}], bootstrap over seeds and "
            f"problems [{resampled[0]:+.4f}, {resampled[1]:+.4f}].",
            f"Criterion: the wider one inside +-{MARGIN}: {'met' if inside else 'MISSED'}.",
            f"Generated completion tokens: {saved:.1%} fewer. Criterion: at least {SAVING:.0%}: "
            f"{'met' if saved >= SAVING else 'MISSED'}.",
            f"Prompts that the floor alone kept: {floor:.1%} of those generated.",
            f"CPU seconds of training: {cpu['every prompt']:.0f} and {cpu['informative']:.0f}.",
        ]
    )


def main() -> int:
    """Run the missing runs, then print the table."""
    parser = argparse.ArgumentParser(
        description="Accuracy and generated tokens with and without `sampling: informative`."
    )
    parser.add_argument("--output", type=Path, default=Path("runs/informative"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--epochs", type=int, default=20, help="number of epochs; a smaller one is a trial for another --output"
    )
    options = parser.parse_args()
    folder: Path = options.output.resolve()
    prepare(folder, options.epochs)
    file = folder / "results.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    if "before" not in found:
        found = {"before": evaluate(folder / "policy", folder / "before", folder / "recipe.yaml"), "seeds": {}}
    for seed in map(str, range(options.seeds)):
        for arm in ARMS:
            done = found["seeds"].setdefault(seed, {})
            if arm not in done:
                done[arm] = run(folder, int(seed), arm)
                write_atomically(file, json.dumps(found) + "\n")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl"))
    say(
        f"{platform.machine()}, Python {platform.python_version()}, {versions}\n\n"
        f"{table(found['seeds'], found['before'])}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
