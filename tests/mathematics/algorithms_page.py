"""docs/algorithms.md: what was held of each recipe of recipes/algorithms, measured, and what is refused.

    python -m tests.mathematics.algorithms_page > docs/algorithms.md

It trains each recipe in every layout and plants every fault: about a minute. The tests measure the same again and
compare with the page.
"""

# A row of a Markdown table is one line.
# ruff: noqa: E501

from __future__ import annotations

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
from tests.mathematics.algorithm_faults import FAULTS
from tests.mathematics.algorithms import LAYOUTS, Held, float64_rewards, hold, layout_of
from tests.mathematics.harness import float64_trl, tiny_checkpoint
from tests.mathematics.papers import PAPERS
from tests.support import launching

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "algorithms.md"

Figures = dict[str, dict[str, str]]
"""Of each algorithm, the cells of its row in the table, by column."""

COLUMNS = ("one update", "accumulation", "auto", "two ranks", "bounded", "without 1e-4", "faults", "smallest")

HEAD = """# Published algorithms

Made by `python -m tests.mathematics.algorithms_page > docs/algorithms.md`; tests hold it against the code and the figures.

Each has a recipe in [recipes/algorithms](../recipes/algorithms), whose head gives the paper's formula, the key that stands for
each part of it, and what TRL can't express. They share one bench, the quickstart's tiny policy on word problems, so that they
differ in the algorithm alone; for a model of your own, copy what stands under `# The algorithm`, or override the rest:

    grpo-recipes train dapo --max_steps 20
    grpo-recipes plan gspo

## What was held

`tests/mathematics/papers.py` derives each objective from its paper: from log-probabilities and rewards, a completion at a time,
with the paper's own numbers, reading neither TRL nor the recipe. Our trainer then trains the recipe with a tiny policy in
float64; each update's loss, and the gradient of every parameter that its optimiser met, on all ranks together, is compared with
the paper's. The bound of every comparison is 1e-10; the table says what was met, rounded up.

- one update: a generation of 16 completions is one update, on one process
- accumulation: it is two updates of two micro-batches each (MaxRL, which is defined for one, has one of two)
- auto: the same with `micro_batching: auto`: packed, regrouped, rows without an advantage left out
- two ranks: the same on two processes, with `micro_batching: auto`
- bounded: the largest share of terms in an update that the clip, the bound or the gate acted on
- without 1e-4: how far the gradient is from a paper that adds nothing to its standard deviations
- faults, smallest: planted faults that were caught (in the recipe's keys and rewards, in TRL's code, in ours), and the smallest
  difference that one of them made, to the loss or the gradient, rounded down

"""

CONSTANTS = """
Equal after these constants, which are TRL's:

| constant | where | size |
|---|---|---|
| 1e-4 is added to every standard deviation, which is the sample's (n − 1) | GRPO, DAPO, GSPO, CISPO, SAPO, GDPO | see the column; relative, 1e-4 / deviation |
| the loss is divided by L = `max_completion_length` | Dr. GRPO, MaxRL | 1/L of the gradient, a factor of the learning rate |
| each of several updates is divided by an average share of its generation's tokens, not by its own | DAPO, CISPO | own tokens / average share; 1 for one update a generation |
| tokens are pooled over all questions of a generation; the equations, read literally, take the mean within each question first | DAPO, CISPO | as in the authors' code |
| rewards are rounded to float32; the comparison lets TRL hold them in float64 | all | 6e-8, relative |

Not expressed, and not faked: DAPO's dynamic sampling (a group without variance has no gradient, and its tokens are divided by;
`sampling: informative`, [docs/sampling.md](sampling.md), seldom generates those that had none before, and does not refill the batch);
a baseline that leaves the completion itself out (RLOO), which is a constant factor G / (G − 1) only while no KL is part of the
reward; GRPO's outer loop, for which see `gsm8k-qwen2.5-1.5b-iterative`.

Two expectations are exact, by summing over every group that a small policy can sample (`test_algorithms.py`): Dr. GRPO's gradient
is (G − 1)/G of the expected reward's; MaxRL's is that of the sum over k < G of pass@k / k, the likelihood of a right answer to
order G − 1. The paper's theorem, order G, is of the estimator without a baseline; taking the baseline off, but not in a group
without a success, is what costs the last order.

## What is refused

Before a model is loaded, with one sentence:

"""

OPTIONS = """
## What each option does to the estimator

The estimator is the gradient of an update. "Unbiased" means: its expectation is a constant times the gradient of the expected
reward, on-policy, for a reward of whole completions.

| option | what it does to the estimator |
|---|---|
| `scale_rewards: none` | unbiased: (G − 1)/G of the gradient, since a completion counts in its own mean |
| `scale_rewards: group` | divides a group by its deviation: nearly decided groups, almost all right or wrong, weigh more; no longer the gradient of the expected reward |
| `scale_rewards: batch` | divides all groups by one number: the direction of `none`, at a length that does not depend on the reward's scale |
| `normalize_then_sum` | gives each reward the same spread in each group before they are added, so that the largest does not drown the others; then one number for all |
| `advantages: max_rl` | divides a group by its mean: a prompt solved with probability p weighs about 1/p; the gradient of the likelihood to order G − 1 |
| `loss_type: grpo`, `sapo` | a completion weighs the same whatever its length, its tokens 1/length: long wrong ones are punished less per token |
| `loss_type: dapo`, `cispo`, `vespo` | every token weighs the same; the divisor is the batch's number of tokens, itself random |
| `loss_type: dr_grpo` | every token weighs the same, by a constant: unbiased |
| `loss_type: luspo` | the sum over a completion's tokens, by the number of completions |
| `loss_type: bnpo` | every token of a micro-batch weighs the same: depends on how rows meet in micro-batches |
| `epsilon`, `epsilon_high` | remove a term once its ratio has left the interval in its advantage's direction; nothing while the ratio is 1, as in the first update of a generation |
| `epsilon_high` above `epsilon` | lets rare tokens grow further before they are removed |
| `epsilon_high` of `cispo` | bounds a token's weight and keeps its gradient |
| `sapo_temperature_pos`, `_neg` | fade a term out as its ratio leaves 1, on either side |
| `delta` | bounds the ratio where the advantage is negative, which the clip leaves open |
| `importance_sampling_level: sequence` | one ratio a completion, the geometric mean of its tokens': less variance, biased off-policy |
| `steps_per_generation` above `gradient_accumulation_steps`, `num_iterations` above 1 | several updates a generation: from the second on the ratio is not 1 and the clip acts |
| `beta` with `use_bias_correction_kl: false` | adds the gradient of the estimate k3, in expectation that of KL(reference ‖ policy) of a token |
| `beta` with `use_bias_correction_kl: true` | adds, in expectation, that of KL(policy ‖ reference) of a token |
| `beta` with `kl_estimator: full` | the same without the sampling noise of the token |
| `mask_truncated_completions` | leaves a truncated completion out of the sum and of the count of tokens; it stays in its group's mean and deviation |
| overlong punishment | changes the reward, so that its baseline and deviation change too |
| `temperature` | the gradient is that of the tempered policy, which is the one sampled from |
| `top_p`, `top_k`, `min_p` | sample from a part of the policy whose whole is scored: biased |
| `top_entropy_quantile` | keeps the terms of the most uncertain tokens: biased |
| `sampling: informative` | leaves out groups that will probably have no variance: biased where the prediction is wrong ([docs/sampling.md](sampling.md)) |
| `sampling: {informative: unbiased}` | the same gradient in expectation, at more variance; `grpo`, `dr_grpo`, `luspo`, `sapo` at `beta: 0` |
| `dataset.pass_rate` | another distribution of prompts: the gradient of the expected reward on the rows kept |
| `sampling`, `dataset.pass_rate` | leave out prompts whose groups would have no variance: [docs/sampling.md](sampling.md) says when the expectation stays |
| `num_generations` | G: less variance, (G − 1)/G nearer 1, and of `advantages: max_rl` the order |
| `micro_batching`, `gradient_accumulation_steps`, ranks | nothing (`bnpo`, an entropy bonus and a router loss excepted: [docs/mathematics.md](mathematics.md)) |

The KL terms, the normalisers and the masks are held one by one in [docs/mathematics.md](mathematics.md).
"""

# What a recipe may not say: the recipe that is changed, and the keys.
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
    """What the checks say of a shipped recipe with these keys, on two processes."""
    from grpo_recipes.checks.checks import Machine, check

    try:
        check(Recipe.load(find_file("recipes", name), **changes), Machine(2, bf16=False))
    except RecipeError as error:
        return str(error).partition(": ")[2]
    raise AssertionError(f"{name} with {dict(changes)} was not refused")


def measure(checkpoint: Path) -> Figures:
    """Train every recipe in every layout, and plant every fault."""
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
    """Each recipe's figures on two processes, under `accelerate launch`."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        launching.launch_module("ddp_cpu", "tests.mathematics.two_processes_algorithms", str(checkpoint), str(output))
        return {name: Held(**held) for name, held in json.loads(output.read_text()).items()}


def without_the_constant(checkpoint: Path, name: str) -> str:
    """How far the gradient of the recipe is from its paper without TRL's 1e-4, to one digit; – where no deviation is."""
    gap = hold(checkpoint, name, layout_of(name, "accumulation"), updates=2, added=0.0).gradient
    return "–" if gap < 1e-10 else f"{gap:.0e}"


def rounded_up(held: Held) -> str:
    """The power of ten above three times the largest difference: another machine rounds a little differently."""
    return f"1e{math.ceil(math.log10(3 * max(held.loss, held.gradient, 1e-17)))}"


def page(figures: Figures) -> str:
    """The whole page, as Markdown."""
    lines = [f"| algorithm | {' | '.join(COLUMNS)} |", "|" + "---|" * (len(COLUMNS) + 1)]
    for name, paper in PAPERS.items():
        cells = " | ".join(figures[name][column] for column in COLUMNS)
        lines.append(f"| [{paper.title}](../recipes/algorithms/{name}.yaml) | {cells} |")
    refused = ["| recipe | with | says |", "|---|---|---|"]
    for name, changes in REFUSED:
        keys = ", ".join(f"`{key}: {value}`" for key, value in changes.items())
        refused.append(f"| `{name}` | {keys} | {refusal(name, changes)} |")
    table, traps = "\n".join(lines) + "\n", "\n".join(refused) + "\n"
    names = "".join(
        f"- {paper.title}: {', '.join(fault.name for fault in FAULTS if fault.algorithm == name)}\n"
        for name, paper in PAPERS.items()
    )
    return f"{HEAD}{table}\nThe faults:\n\n{names}{CONSTANTS}{traps}{OPTIONS}"


def read(text: str) -> Figures:
    """The figures of a page."""
    figures = {}
    for line in text.splitlines():
        if found := re.match(r"\| \[[^]]+\]\(../recipes/algorithms/([\w-]+)\.yaml\) \| (.*) \|$", line):
            figures[found[1]] = dict(zip(COLUMNS, found[2].split(" | "), strict=True))
    return figures


def main() -> None:
    """Measure, and print the page."""
    torch.set_num_threads(1)
    printed, sys.stdout = sys.stdout, sys.stderr  # TRL prints its log
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(tiny_checkpoint(Path(folder)))
    printed.write(page(figures))


if __name__ == "__main__":
    main()
