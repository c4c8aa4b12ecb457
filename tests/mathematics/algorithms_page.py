"""Generator of docs/algorithms.md: objectives, measured differences of recipes/algorithms, and refused keys.

    python -m tests.mathematics.algorithms_page > docs/algorithms.md

It trains each recipe in every layout and plants every fault, in about a minute. The tests measure the figures again and
compare them with the page. `--keep-figures` rewrites the text around the present figures without measuring them.
"""

# A row of a Markdown table is one line.
# ruff: noqa: E501

from __future__ import annotations

import inspect
import json
import math
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from grpo_recipes.recipe.recipe import Recipe, RecipeError, find_file
from tests.mathematics import papers
from tests.mathematics.algorithm_faults import FAULTS
from tests.mathematics.algorithms import LAYOUTS, Held, float64_rewards, hold, layout_of
from tests.mathematics.harness import float64_trl, tiny_checkpoint
from tests.mathematics.papers import PAPERS
from tests.support import launching

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "algorithms.md"

Figures = dict[str, dict[str, str]]
"""Cells of each algorithm's row in the table, by column."""

COLUMNS = ("one update", "accumulation", "auto", "two ranks", "bounded", "without 1e-4", "faults", "smallest")

HEAD = """# Published algorithms

Made by `python -m tests.mathematics.algorithms_page > docs/algorithms.md`. Tests compare the page with the code and
measure its figures again.

Each algorithm has a recipe in [recipes/algorithms](../recipes/algorithms). The head of the recipe gives the paper's
formula, the key that stands for each part of it, and the parts that TRL cannot express. All recipes train the
quickstart's tiny policy on word problems, so they differ in the algorithm alone. For a model of your own, copy the keys
below `# The algorithm`, or override the others:

    grpo-recipes train dapo --max_steps 20
    grpo-recipes plan gspo

## The objectives

These functions are the objectives as `tests/mathematics/papers.py` writes them from the papers, one completion at a
time, without TRL. The figures below compare our trainer with them. J is maximized, and the loss is -J.

"""

COMPARISON = """## The comparison

Our trainer trains each recipe with a tiny policy in float64. Each update's loss, and the gradient of every parameter
that the optimizer used, over all ranks, is compared with the paper's. The limit of every comparison is 1e-10. The table
gives the largest difference found, rounded up.

- one update: a generation of 16 completions is one update, on one process
- accumulation: the generation is two updates of two micro-batches each (one update of two micro-batches for MaxRL,
  which is defined for one)
- auto: as accumulation, with `micro_batching: auto`: packed, regrouped, without zero-advantage rows
- two ranks: as auto, on two processes
- bounded: largest share of terms in an update that the clip, the bound or the gate changed
- without 1e-4: difference of the gradient from a paper that adds nothing to its standard deviations
- faults, smallest: number of planted faults that were caught (in the recipe's keys and rewards, in TRL's code and in
  ours), and the smallest difference of a loss or gradient that one of them made, rounded down

"""

CONSTANTS = """
The comparison includes these constants of TRL:

| constant | where | size |
|---|---|---|
| 1e-4 is added to every standard deviation, which is the sample's (n − 1) | GRPO, DAPO, GSPO, CISPO, SAPO, GDPO | see the column; relative, 1e-4 / deviation |
| the loss is divided by L = `max_completion_length` | Dr. GRPO, MaxRL | 1/L of the gradient, a factor of the learning rate |
| each of several updates is divided by an average share of its generation's tokens, not by its own | DAPO, CISPO | own tokens / average share; 1 for one update per generation |
| tokens are pooled over all questions of a generation; the equations, read literally, take the mean within each question first | DAPO, CISPO | as in the authors' code |
| rewards are rounded to float32; the comparison lets TRL keep them in float64 | all | 6e-8, relative |

Three parts of papers are not expressed:

- DAPO's dynamic sampling. A zero-variance group has no gradient, and TRL's divisor counts its tokens. `sampling:
  informative` ([docs/sampling.md](sampling.md)) seldom generates prompts whose last groups had zero variance, and does
  not refill the batch.
- A baseline without the completion itself (RLOO). It is a constant factor G / (G − 1) only while no KL is part of the
  reward.
- GRPO's outer loop. See `gsm8k-qwen2.5-1.5b-iterative`.

Two expectations are exact, by a sum over every group that a small policy can sample (`test_algorithms.py`). Dr. GRPO's
gradient is (G − 1)/G of the gradient of the expected reward. MaxRL's is the gradient of the sum over k < G of pass@k /
k, which is the likelihood of a correct answer to order G − 1. The paper's theorem, to order G, is about the estimator
without a baseline. Subtracting the baseline, except in groups without a success, costs the last order.

## What is refused

These combinations raise an error before a model is loaded:

"""

OPTIONS = """
## Effect of each option on the estimator

The estimator is the gradient of an update. It is called unbiased if its expectation is a constant times the gradient of
the expected reward, on-policy, for a reward of complete completions.

| option | effect on the estimator |
|---|---|
| `scale_rewards: none` | unbiased: (G − 1)/G of the gradient, because a completion counts in its own mean |
| `scale_rewards: group` | divides a group by its deviation: nearly decided groups, almost all correct or wrong, get more weight; no longer the gradient of the expected reward |
| `scale_rewards: batch` | divides all groups by one number: the direction of `none`, with a length that does not depend on the reward's scale |
| `normalize_then_sum` | gives each reward the same spread in each group before they are added, so the largest does not dominate; then divides all by one number |
| `advantages: max_rl` | divides a group by its mean: a prompt solved with probability p gets a weight of about 1/p; the gradient of the likelihood to order G − 1 |
| `loss_type: grpo`, `sapo` | each completion has the same weight whatever its length, and its tokens 1/length: long wrong completions are penalized less per token |
| `loss_type: dapo`, `cispo`, `vespo` | each token has the same weight; the divisor is the batch's number of tokens, which is random |
| `loss_type: dr_grpo` | each token has the same constant weight: unbiased |
| `loss_type: luspo` | the sum over a completion's tokens, divided by the number of completions |
| `loss_type: bnpo` | each token of a micro-batch has the same weight, which depends on the rows that share the micro-batch |
| `epsilon`, `epsilon_high` | remove a term once its ratio has left the interval in the direction of its advantage; no effect while the ratio is 1, as in the first update of a generation |
| `epsilon_high` above `epsilon` | lets the probability of rare tokens grow further before their terms are removed |
| `epsilon_high` of `cispo` | bounds a token's weight and keeps its gradient |
| `sapo_temperature_pos`, `_neg` | fade a term out as its ratio leaves 1, on either side |
| `delta` | bounds the ratio where the advantage is negative, which the clip leaves open |
| `importance_sampling_level: sequence` | one ratio per completion, the geometric mean of its tokens' ratios: less variance, biased off-policy |
| `steps_per_generation` above `gradient_accumulation_steps`, `num_iterations` above 1 | several updates per generation: from the second on the ratio is not 1 and the clip acts |
| `beta` with `use_bias_correction_kl: false` | adds the gradient of the estimate k3, in expectation the gradient of KL(reference ‖ policy) of a token |
| `beta` with `use_bias_correction_kl: true` | adds, in expectation, the gradient of KL(policy ‖ reference) of a token |
| `beta` with `kl_estimator: full` | the same without the sampling noise of the token |
| `mask_truncated_completions` | removes a truncated completion from the sum and from the count of tokens; it stays in its group's mean and deviation |
| overlong punishment | changes the reward, and so its baseline and deviation |
| `temperature` | the gradient is that of the policy at this temperature, which is the one sampled from |
| `top_p`, `top_k`, `min_p` | sample from a part of the policy's distribution, while the full distribution is scored: biased |
| `top_entropy_quantile` | keeps the terms of the tokens with the highest entropy: biased |
| `sampling: informative` | skips groups that will probably have zero variance: biased where the prediction is wrong ([docs/sampling.md](sampling.md)) |
| `sampling: {informative: unbiased}` | the same gradient in expectation, with more variance; `grpo`, `dr_grpo`, `luspo`, `sapo` at `beta: 0` |
| `dataset.pass_rate` | another distribution of prompts: the gradient of the expected reward on the rows kept |
| `sampling`, `dataset.pass_rate` | skip prompts whose groups would have zero variance: [docs/sampling.md](sampling.md) says when the expectation stays |
| `num_generations` | G: less variance, (G − 1)/G nearer to 1, and the order of `advantages: max_rl` |
| `micro_batching`, `gradient_accumulation_steps`, ranks | none (except with `bnpo`, an entropy bonus or a router loss: [docs/mathematics.md](mathematics.md)) |

The KL terms, the normalizers and the masks are tested one by one in [docs/mathematics.md](mathematics.md).
"""

# Refused combinations: a recipe, and the keys that are changed in it.
REFUSED: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("quickstart", {"loss_type": "cispo"}),
    ("cispo", {"epsilon_high": 0.28}),
    ("cispo", {"epsilon": 0.2}),
    ("sapo", {"epsilon": 0.1}),
    ("sapo", {"delta": 2.0}),
    ("dapo", {"sapo_temperature_neg": 1.2}),
    ("gspo", {"loss_type": "dapo"}),
    ("sapo", {"importance_sampling_level": "sequence"}),
    ("dr-grpo", {"loss_type": "luspo"}),
    ("gspo", {"beta": 0.04}),
    ("gspo", {"top_entropy_quantile": 0.2}),
    ("gdpo", {"scale_rewards": "none"}),
    ("maxrl", {"scale_rewards": "group"}),
    ("maxrl", {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "group"}),
)


def refusal(name: str, changes: Mapping[str, Any]) -> str:
    """Return the error that the checks raise for a shipped recipe with these keys, on two processes."""
    from grpo_recipes.checks.checks import Machine, check

    try:
        check(Recipe.load(find_file("recipes", name), **changes), Machine(2, bf16=False))
    except RecipeError as error:
        return str(error).partition(": ")[2]
    raise AssertionError(f"{name} with {dict(changes)} was not refused")


def measure(checkpoint: Path) -> Figures:
    """Train every recipe in every layout, plant every fault, and return the figures."""
    both = on_two_ranks(checkpoint)
    figures: Figures = {}
    with float64_trl(), float64_rewards():
        for name in PAPERS:
            held = {
                layout: hold(checkpoint, name, layout_of(name, layout)) for layout in LAYOUTS if layout != "two ranks"
            }
            held["two ranks"] = both[name]
            row = {layout: rounded_up(found) for layout, found in held.items()}
            row["bounded"] = f"{max(found.bounded for found in held.values()):.0%}"
            row["without 1e-4"] = without_the_constant(checkpoint, name)
            planted = [fault.found(checkpoint) for fault in FAULTS if fault.algorithm == name]
            row["faults"] = str(len(planted))
            row["smallest"] = f"1e{math.floor(math.log10(min(max(f.loss, f.gradient) for f in planted)))}"
            figures[name] = row
    return figures


def on_two_ranks(checkpoint: Path) -> dict[str, Held]:
    """Return each recipe's differences on two processes, under `accelerate launch`."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        launching.launch_module("ddp_cpu", "tests.mathematics.two_processes_algorithms", str(checkpoint), str(output))
        return {name: Held(**held) for name, held in json.loads(output.read_text()).items()}


def without_the_constant(checkpoint: Path, name: str) -> str:
    """Return the difference of a recipe's gradient from its paper without TRL's 1e-4, or – if none is used."""
    gap = hold(checkpoint, name, layout_of(name, "accumulation"), updates=2, added=0.0).gradient
    return "–" if gap < 1e-10 else f"{gap:.0e}"


def rounded_up(held: Held) -> str:
    """Return the power of ten above three times the largest difference, because machines round differently."""
    return f"1e{math.ceil(math.log10(3 * max(held.loss, held.gradient, 1e-17)))}"


def page(figures: Figures) -> str:
    """Return the page as Markdown."""
    lines = [f"| algorithm | {' | '.join(COLUMNS)} |", "|" + "---|" * (len(COLUMNS) + 1)]
    for name, paper in PAPERS.items():
        cells = " | ".join(figures[name][column] for column in COLUMNS)
        lines.append(f"| [{paper.title}](../recipes/algorithms/{name}.yaml) | {cells} |")
    refused = ["| recipe | with | error |", "|---|---|---|"]
    for name, changes in REFUSED:
        keys = ", ".join(f"`{key}: {value}`" for key, value in changes.items())
        refused.append(f"| `{name}` | {keys} | {refusal(name, changes)} |")
    table, errors = "\n".join(lines) + "\n", "\n".join(refused) + "\n"
    names = "".join(
        f"- {paper.title}: {', '.join(fault.name for fault in FAULTS if fault.algorithm == name)}\n"
        for name, paper in PAPERS.items()
    )
    return f"{HEAD}{objectives()}{COMPARISON}{table}\nThe planted faults:\n\n{names}{CONSTANTS}{errors}{OPTIONS}"


def objectives() -> str:
    """Return the source of every advantage and objective function, with the classes that they read."""
    shown: list[Any] = [papers.Row, papers.Update, papers.z_scores, papers.clipped]
    parts = ["```python\n" + "\n\n\n".join(inspect.getsource(part).rstrip() for part in shown) + "\n```\n\n"]
    for name, paper in PAPERS.items():
        functions = [paper.advantages, paper.objective]
        if paper.objective is papers.gspo:
            functions.insert(1, papers.sequence_ratio)
        # An advantage that several papers share is shown with the first of them.
        new = [function for function in functions if function not in shown]
        shown += new
        source = "\n\n\n".join(inspect.getsource(function).rstrip() for function in new)
        parts.append(f"### {paper.title}: [recipe](../recipes/algorithms/{name}.yaml)\n\n```python\n{source}\n```\n\n")
    return "".join(parts)


def read(text: str) -> Figures:
    """Return the figures of a page."""
    figures = {}
    for line in text.splitlines():
        if found := re.match(r"\| \[[^]]+\]\(../recipes/algorithms/([\w-]+)\.yaml\) \| (.*) \|$", line):
            figures[found[1]] = dict(zip(COLUMNS, found[2].split(" | "), strict=True))
    return figures


def main() -> None:
    """Measure unless `--keep-figures` is given, and print the page."""
    torch.set_num_threads(1)
    if "--keep-figures" in sys.argv:
        sys.stdout.write(page(read(PAGE.read_text(encoding="utf-8"))))
        return
    printed, sys.stdout = sys.stdout, sys.stderr  # TRL prints its log
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(tiny_checkpoint(Path(folder)))
    printed.write(page(figures))


if __name__ == "__main__":
    main()
