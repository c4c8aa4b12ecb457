"""Runs of stock TRL and of ours that draw the same random numbers, compared completion by completion.

    python benchmarks/real_model.py --only-base         # the model and its tasks, 6 minutes
    python benchmarks/real_model_coupled.py --steps 10  # both runs, side by side: half an hour on two cores
    python benchmarks/real_model_coupled.py --record    # write benchmarks/results/real_model_coupled.md

Model, tasks, recipe and learning rate are those of full fine-tuning in real_model.py. Both runs compute in float32, and
our group decoding draws the random numbers of finished rows too (`Turn.same_stream`), as transformers' loop does. So
both trainers sample the same tokens, as long as their probabilities differ by less than rounding can decide a draw.

After each optimizer step a run writes its completions, rewards and gradient norm, and every 997th weight. AdamW divides
each gradient by its own size. A weight whose gradient is rounding error therefore moves by up to a whole learning rate,
in a direction that rounding decides. The column of the largest difference counts it in learning rates.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from real_model import PACKAGE, TUNINGS, start
from transformers import TrainerCallback
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer, Recipe
from grpo_recipes.checks.checks import Machine
from grpo_recipes.generation.groups import Turn
from grpo_recipes.run.prepare import prepare
from grpo_recipes.runs.files import write_atomically

RESULTS = Path(__file__).parent / "results" / "real_model_coupled.md"
TRAINERS = {"trl": TRLGRPOTrainer, "ours": GRPOTrainer}
EVERY = 997


class _Record(TrainerCallback):
    """Record of a run: what each step sampled, was paid and changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sampled: dict[str, Any] = {}
        self.steps: list[dict[str, Any]] = []

    def recording(self, reward: Any) -> Any:
        """Return the reward function, which also notes the completions that it is given."""

        def recorded(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **rest: Any) -> Any:
            paid = reward(prompts=prompts, completions=completions, completion_ids=completion_ids, **rest)
            self.sampled = {"completions": [list(map(int, ids)) for ids in completion_ids], "rewards": list(paid)}
            return paid

        recorded.__name__ = reward.__name__
        return recorded

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, model: Any = None, **kwargs: Any) -> None:
        """Write the record of the step that was logged, and a sample of the weights after it."""
        if not logs or "grad_norm" not in logs:
            return
        self.steps.append({**self.sampled, "gradient_norm": logs["grad_norm"], "loss": logs["loss"]})
        weights = [parameter.detach().flatten()[::EVERY].float().numpy() for parameter in model.parameters()]
        np.save(self.folder / f"weights-{len(self.steps)}.npy", np.concatenate(weights))
        write_atomically(self.folder / "steps.json", json.dumps(self.steps))


def run(folder: Path, name: str, steps: int) -> None:
    """Train the run `coupled-TRAINER-SEED` in this process."""
    _, trainer, seed = name.split("-")
    output = folder / "runs" / name
    output.mkdir(parents=True, exist_ok=True)
    learning_rate = TUNINGS["full"]["learning_rate"]
    changes = {"learning_rate": learning_rate, "bf16": False, "seed": int(seed), "max_steps": steps}
    recipe = Recipe.load(folder / "recipe.yaml", **changes, output_dir=str(output / "trainer"), save_strategy="no")
    prepared, record = prepare(recipe, Machine.here()), _Record(output)
    Turn.same_stream = True
    TRAINERS[trainer](
        model=recipe.model["model_name_or_path"],
        reward_funcs=[record.recording(reward.function) for reward in prepared.checked.rewards],
        args=prepared.training_args,
        train_dataset=prepared.checked.train_dataset,
        processing_class=prepared.tokenizer,
        callbacks=[record],
    ).train()
    write_atomically(folder / "runs" / f"{name}.json", json.dumps({"steps": len(record.steps)}))


def table(folder: Path, seed: int) -> str:
    """Return the comparison of the steps that both runs have as Markdown."""
    runs = [folder / "runs" / f"coupled-{trainer}-{seed}" for trainer in TRAINERS]
    records = [json.loads((run / "steps.json").read_text()) for run in runs]
    lines = [
        "| step | equal completions | mean reward, TRL | ours | gradient norm, TRL | ours "
        "| largest difference of a weight, in learning rates | root of the mean square |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, (trl, ours) in enumerate(zip(*records, strict=False), 1):
        equal = sum(a == b for a, b in zip(trl["completions"], ours["completions"], strict=True))
        first, second = (np.load(run / f"weights-{number}.npy").astype(np.float64) for run in runs)
        gap = np.abs(first - second) / TUNINGS["full"]["learning_rate"]
        rewards = " | ".join(f"{np.mean(record['rewards']):.4f}" for record in (trl, ours))
        norms = " | ".join(f"{record['gradient_norm']:.5f}" for record in (trl, ours))
        lines.append(
            f"| {number} | {equal} of {len(trl['completions'])} | {rewards} | {norms} "
            f"| {gap.max():.4f} | {np.sqrt(np.mean(gap**2)):.6f} |"
        )
    return "\n".join(lines)


def page(folder: Path, seed: int) -> str:
    """Return the text of benchmarks/results/real_model_coupled.md."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl"))
    machine = f"one thread for each run on a {os.cpu_count()}-core {platform.machine()} machine"
    return "\n".join(
        [
            "# Coupled runs of a pretrained model",
            "",
            "Made by `python benchmarks/real_model_coupled.py`. The docstring of "
            "[real_model_coupled.py](../real_model_coupled.py) describes the measurement.",
            f"{PACKAGE}, float32, full fine-tuning, seed {seed}, CPU, {machine}, {versions}.",
            "",
            table(folder, seed),
            "",
        ]
    )


def main() -> int:
    """Run the missing runs and print the table, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/real_model"), help="folder of real_model.py")
    parser.add_argument("--steps", type=int, default=30, help="number of optimizer steps (default: 30)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="write the existing runs to the results without training")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    folder: Path = asked.output.resolve()
    torch.set_num_threads(1)
    if asked.run:
        run(folder, asked.run, asked.steps)
        return 0
    if asked.record:
        write_atomically(RESULTS, page(folder, asked.seed))
    else:
        names = [f"coupled-{trainer}-{asked.seed}" for trainer in TRAINERS]
        options = ("--steps", str(asked.steps))
        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(lambda name: start(folder, name, Path(__file__), options), names))
    print(table(folder, asked.seed))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
