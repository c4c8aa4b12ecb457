"""Accuracy of a pretrained instruct model that learns to call a calculator, by a warm start and then by GRPO.

    make real-model                                     # after real_model.py; another hour, resumable
    python benchmarks/real_model_tools.py               # the same without `pip install gguf` and `--record`
    python benchmarks/real_model_tools.py --seeds 0     # one of the seeds
    python benchmarks/real_model_tools.py --record      # write benchmarks/results/real_model_tools.md

The model is that of real_model.py, SmolLM2-135M-Instruct. The recipe is recipes/tools/calculator-smollm2.yaml: products
of three-digit numbers in five wordings, and a chat template with tools, which the model was never trained on.

The base model has never seen a call in this template, and GRPO learns only from what is sampled. A short warm start
comes first: 16 steps of supervised fine-tuning on 8 rendered conversations each (question, call, result, answer), of
which only what the policy writes has a loss. All of them have the same wording (`WORDING`), so that the warm start
teaches the form of a call, and the other four wordings are left to GRPO. The warm start is a row of its own. Both seeds
of GRPO begin with it, and train on all wordings with the steps of the recipe.

All models answer the same held-out problems of the test split, greedily, in the turns of training. `--output` holds the
model, the runs and their evaluations. The seeds go side by side, each a process with one thread, and time is CPU time.
The same command continues with what is missing, and an interrupted run from its last checkpoint. The time of such a run
is not known and is written as nan.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas
from datasets import Dataset
from real_model import PACKAGE, check_finished, make_model, start
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from grpo_recipes import Recipe, evaluate_model, run_recipe
from grpo_recipes.checks.tokenizer import load_tokenizer
from grpo_recipes.checks.tools import load_toolset
from grpo_recipes.data.load import load
from grpo_recipes.evaluation.estimates import Estimate
from grpo_recipes.evaluation.summary import compare
from grpo_recipes.runs.files import write_atomically

RECIPE = Path(__file__).parents[1] / "recipes" / "tools" / "calculator-smollm2.yaml"
RESULTS = Path(__file__).parent / "results" / "real_model_tools.md"
HELD_OUT = 200
DEMONSTRATIONS, WARM_STEPS = 192, 16
SEEDS = (0, 1)
WARM_START = "warm-start"
MODELS = {"model": "base model", WARM_START: "warm start", **{f"grpo-{seed}": f"GRPO, seed {seed}" for seed in SEEDS}}
"""Names of the models in the tables, by their folders."""

WORDING = r"What is (\d+) \* (\d+)\?"
WORDINGS = {
    "What is a * b?": WORDING,
    "Multiply a by b.": r"Multiply.*",
    "What is a * b + c?": r"What is .* \+ .*",
    "hall": r"A hall.*",
    "shop": r"A shop.*",
}
"""Wordings of the preset `products`. Only the first is demonstrated."""


# ---- warm start


def demonstrations(recipe: Recipe) -> list[dict[str, Any]]:
    """Return conversations of training problems of one wording, in which the tool computes the answer."""
    toolset = load_toolset(recipe)
    assert toolset is not None, "the recipe has a tool"
    (tool,) = toolset.tools
    # Another draw than the recipe's, whose problems GRPO trains on. A fifth of it has the wording.
    problems = load(replace(recipe.dataset, size=8 * DEMONSTRATIONS, seed=1_000))
    rows = []
    for prompt, answer in zip(problems["prompt"], problems["answer"], strict=True):
        factors = re.fullmatch(WORDING, prompt[-1]["content"])
        if factors is None:
            continue
        expression = f"{factors[1]}*{factors[2]}"
        result = tool.function(expression)
        assert result == answer, expression
        call = {"type": "function", "function": {"name": tool.name, "arguments": {"expression": expression}}}
        turns = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": tool.name, "content": result},
            {"role": "assistant", "content": f"The result is \\boxed{{{result}}}."},
        ]
        rows.append({"messages": [*prompt, *turns], "tools": json.dumps([tool.schema])})
    return rows[:DEMONSTRATIONS]


def warm_start(folder: Path, output: Path) -> None:
    """Fine-tune the model on demonstrations, and save it with the recipe's chat template."""
    recipe = Recipe.load(RECIPE, model_name_or_path=str(folder / "model"))
    tokenizer = load_tokenizer(recipe)
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype="float32")
    config = SFTConfig(
        output_dir=str(output),
        max_steps=WARM_STEPS,
        per_device_train_batch_size=8,
        learning_rate=1e-5,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        assistant_only_loss=True,  # results are not learnt; the template marks what the policy writes
        max_length=None,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=0,
    )
    rows = Dataset.from_list(demonstrations(recipe))
    SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer).train()
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


# ---- runs


def run(folder: Path, name: str) -> None:
    """Train and evaluate a model in this process, as far as either is missing."""
    output, time = folder / "runs" / name, folder / "runs" / f"{name}.cpu"
    if not time.is_file():
        resumed = any(output.glob("checkpoint-*"))
        if name == WARM_START:
            warm_start(folder, output)
        else:
            changes = {"seed": int(name.rpartition("-")[2]), "resume_from_checkpoint": resumed}
            warm = str(folder / "runs" / WARM_START)
            recipe = Recipe.load(RECIPE, model_name_or_path=warm, output_dir=str(output), **changes)
            run_recipe(recipe)
            check_finished(output)
        usage = resource.getrusage(resource.RUSAGE_SELF)
        # The CPU time before an interruption is not known.
        write_atomically(time, str(math.nan if resumed else usage.ru_utime + usage.ru_stime))
    evaluate(folder, output)
    write_atomically(folder / "runs" / f"{name}.json", json.dumps({"cpu_seconds": float(time.read_text())}))


def evaluate(folder: Path, model: Path) -> None:
    """Evaluate the greedy completions of the held-out problems, unless that is done."""
    output = evaluation(folder, model.name)
    evaluate_model(model, recipe=str(RECIPE), output=output, limit=HELD_OUT, batch_size=50)


def evaluation(folder: Path, name: str) -> Path:
    """Return the folder of the evaluation of a model."""
    return folder / "evaluated" / f"tools-{name}"


# ---- the page


def table(folder: Path) -> str:
    """Return the results of the evaluated models as Markdown."""
    lines = ["| model | strict | share that calls | strict, GRPO - warm start | CPU min |", "|---|---|---|---|---|"]
    for name, title in evaluated(folder).items():
        found, gain, minutes = json.loads((evaluation(folder, name) / "evaluation.json").read_text()), "", ""
        strict, called = (str(Estimate.from_dict(one)) for one in (found["strict"], found["tools"]["called"]))
        if name.startswith("grpo"):
            change = compare(evaluation(folder, WARM_START), evaluation(folder, name))
            gain = str(Estimate.from_dict(change["strict"]["difference"]))
        if (time := folder / "runs" / f"{name}.cpu").is_file():
            minutes = f"{float(time.read_text()) / 60:.1f}"
        lines.append(f"| {title} | {strict} | {called} | {gain} | {minutes} |")
    return "\n".join(lines)


def by_wording(folder: Path) -> str:
    """Return the strict accuracy on each wording as Markdown."""
    lines = [f"| model | {' | '.join(WORDINGS)} |", f"|---|{'---|' * len(WORDINGS)}"]
    for name, title in evaluated(folder).items():
        found = pandas.read_parquet(evaluation(folder, name) / "completions.parquet", columns=["prompt", "strict"])
        questions = [json.loads(prompt)[-1]["content"] for prompt in found["prompt"]]
        shares = []
        for pattern in WORDINGS.values():
            has_wording = [re.fullmatch(pattern, question) is not None for question in questions]
            shares.append(f"{found['strict'][has_wording].mean():.2f}")
        lines.append(f"| {title} | {' | '.join(shares)} |")
    return "\n".join(lines)


def rewards(folder: Path) -> str:
    """Return the mean training reward of each five steps of GRPO as Markdown."""
    lines: list[str] = []
    for name in (name for name in evaluated(folder) if name.startswith("grpo")):
        log = json.loads((folder / "runs" / name / "trainer_state.json").read_text())["log_history"]
        steps = [entry["reward"] for entry in log if "reward" in entry]
        blocks = {first + 1: steps[first : first + 5] for first in range(0, len(steps), 5)}
        if not lines:
            heads = [f"{first}-{first + len(block) - 1}" for first, block in blocks.items()]
            lines += [f"| steps | {' | '.join(heads)} |", f"|---|{'---|' * len(heads)}"]
        means = [f"{sum(block) / len(block):.2f}" for block in blocks.values()]
        lines.append(f"| {MODELS[name]} | {' | '.join(means)} |")
    return "\n".join(lines)


def evaluated(folder: Path) -> dict[str, str]:
    """Return the entries of `MODELS` that are evaluated."""
    return {name: MODELS[name] for name in MODELS if (evaluation(folder, name) / "evaluation.json").is_file()}


def page(folder: Path) -> str:
    """Return the text of benchmarks/results/real_model_tools.md."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl"))
    machine = f"one thread for each run on a {os.cpu_count()}-core {platform.machine()} machine"
    return "\n".join(
        [
            "# A pretrained model that learns to call a tool",
            "",
            "Made by `python benchmarks/real_model_tools.py`. "
            "The docstring of [real_model_tools.py](../real_model_tools.py) describes the measurement.",
            f"{PACKAGE}, CPU, {machine}, {versions}.",
            "",
            f"## {HELD_OUT} held-out products of three-digit numbers, greedy, with 95 % intervals",
            "",
            table(folder),
            "",
            "Strict accuracy by wording. Only the first wording is in the warm start:",
            "",
            by_wording(folder),
            "",
            "Mean reward of the sampled completions in the steps of GRPO:",
            "",
            rewards(folder),
            "",
        ]
    )


def main() -> int:
    """Make the missing models, or those that the command line names, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/real_model"))
    parser.add_argument("--seeds", nargs="+", type=int, choices=SEEDS, default=SEEDS)
    parser.add_argument("--record", action="store_true", help="write the existing runs to the results without training")
    parser.add_argument("--run", choices=MODELS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    folder: Path = asked.output.resolve()
    if asked.run:
        run(folder, asked.run)
        return 0
    if asked.record:
        write_atomically(RESULTS, page(folder))
    else:
        make_model(folder)
        evaluate(folder, folder / "model")
        start(folder, WARM_START, Path(__file__))
        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(lambda seed: start(folder, f"grpo-{seed}", Path(__file__)), asked.seeds))
    print(table(folder))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
