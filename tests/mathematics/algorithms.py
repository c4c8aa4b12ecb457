"""Comparison of a shipped recipe's training with the objective of its paper.

`hold` reads a recipe of recipes/algorithms, scales its sizes down to the tiny policy and trains with our trainer. From
the recorded token IDs, weights and rewards it computes the paper's objective (`papers`) for each update, and returns
the differences of the loss and the gradient. It reads neither the oracle nor TRL's options: only the trainer gets the
recipe's keys, and only the paper has the paper's numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl import GRPOTrainer as TRLGRPOTrainer

import grpo_recipes
from grpo_recipes.recipe.recipe import Recipe, find_file
from grpo_rewards.registry import build_rewards
from tests.mathematics.harness import (
    EOS,
    MAX_COMPLETION_LENGTH,
    NUM_GENERATIONS,
    edited,
    float64_model,
    make_trainer,
    token_lists,
)
from tests.mathematics.papers import PAPERS, Paper, Row, Update
from tests.mathematics.training import _Recording, load, moved

Tokens = tuple[list[int], list[int]]
HERE = "tests.mathematics.algorithms"

# Rewards in place of those of the recipes, which read text: the tiny policy writes random digits.
STAND_INS = {"gsm8k_correctness": f"{HERE}.odd_length", "well_formed": f"{HERE}.digit_sum"}
GENERATION = 16
"""Number of completions of a generation: those of every prompt, on all ranks together."""
LEARNING_RATES = {"gspo": 2e-3, "cispo": 2.0}
"""Learning rates of SGD where 0.5 would move the ratio of every completion out of the bounds, or of none."""
POOLED = ("dapo", "cispo")
"""Papers whose mean is over all tokens of a batch."""


def odd_length(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Return 1 for a completion with an odd number of tokens, else 0."""
    return [float(len(ids) % 2) for ids in completion_ids]


def digit_sum(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Return a binary fraction that depends on the tokens."""
    return [(sum(ids) % 8) / 8 for ids in completion_ids]


@dataclass(frozen=True)
class Layout:
    """Division of a generation into updates, micro-batches and ranks."""

    accumulation: int = 1
    updates: int = 1
    micro_batching: str = "off"
    ranks: int = 1

    @property
    def steps_per_generation(self) -> int:
        """Number of micro-batches per generation and rank."""
        return self.accumulation * self.updates

    @property
    def rows(self) -> int:
        """Number of completions in a micro-batch on one rank."""
        return GENERATION // self.ranks // self.steps_per_generation


LAYOUTS: dict[str, Layout] = {
    "one update": Layout(),
    "accumulation": Layout(2, 2),
    "auto": Layout(2, 2, "auto"),
    "two ranks": Layout(2, 2, "auto", ranks=2),
}


def layout_of(name: str, layout: str) -> Layout:
    """Return the layout for a recipe. MaxRL is defined only for one update per generation."""
    found = LAYOUTS[layout]
    return replace(found, updates=1) if name == "maxrl" else found


class AlgorithmRecorder(_Recording, grpo_recipes.GRPOTrainer):
    """Our trainer with a record of its steps and of TRL's micro-batches before ours replaced them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dealt: list[list[list[Tokens]]] = []

    def _regroup(self, padded: list[dict[str, Any]]) -> None:
        self.dealt.append([token_lists(batch) for batch in padded])
        super()._regroup(padded)


def recipe_of(name: str, layout: Layout, **changes: Any) -> Recipe:
    """Return the shipped recipe with the tiny policy's sizes, the stand-in rewards and `changes`, checked as usual."""
    raw = Recipe.load(find_file("recipes", name))
    sizes = {
        "num_generations": NUM_GENERATIONS,
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "per_device_train_batch_size": layout.rows,
        "gradient_accumulation_steps": layout.accumulation,
        "steps_per_generation": layout.steps_per_generation,
        "micro_batching": layout.micro_batching,
        "rewards": _scaled(raw.rewards),
    }
    return Recipe.load(find_file("recipes", name), **{**sizes, **changes})


def _scaled(spec: Any) -> Any:
    """Return a recipe's reward specs with the stand-ins and with the lengths of the tiny policy."""
    if isinstance(spec, list):
        return [_scaled(entry) for entry in spec]
    name = spec["name"]
    if name in STAND_INS:
        return {**{key: spec[key] for key in spec if key != "kwargs"}, "name": STAND_INS[name]}
    if name.endswith("get_soft_overlong_punishment"):
        return {**spec, "kwargs": {"max_completion_len": MAX_COMPLETION_LENGTH, "soft_punish_cache": 3}}
    return dict(spec)


def rewards_of(name: str, completions: Sequence[Sequence[int]]) -> list[list[float]]:
    """Return the rewards of each completion for the paper's algorithm, (N, number of reward functions)."""
    right = odd_length(completions)
    if name == "maxrl":
        return [[value] for value in right]
    if name == "dapo":  # equation 13, with L = 8 and a cache of 3 tokens
        limit, cache = MAX_COMPLETION_LENGTH, 3
        overlong = [min(0.0, (limit - cache - len(ids)) / cache) for ids in completions]
        return [list(row) for row in zip(right, overlong, strict=True)]
    return [list(row) for row in zip(right, digit_sum(completions), strict=True)]


@contextlib.contextmanager
def float64_rewards() -> Iterator[None]:
    """Let TRL keep rewards in float64 instead of float32. Use it inside `float64_trl`."""
    with edited(TRLGRPOTrainer, "_calculate_rewards", ("torch.float32", "torch.float64"), everywhere=True):
        yield


def train(checkpoint: Path, name: str, layout: Layout, updates: int, recipe: Recipe) -> AlgorithmRecorder:
    """Train with SGD for some updates, with a reference that differs a little from the initial policy."""
    rewards = build_rewards(recipe.rewards, num_generations=NUM_GENERATIONS)
    ours = {
        "logging_steps": 1,
        "max_steps": updates,
        "learning_rate": LEARNING_RATES.get(name, 0.5),
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "reward_weights": [reward.weight for reward in rewards],
        "log_completions": False,
    }
    config = {**{key: value for key, value in recipe.training.items() if key != "output_dir"}, **ours}
    trainer = make_trainer(
        checkpoint,
        torch.float64,
        [reward.function for reward in rewards],
        _with(micro_batching=recipe.micro_batching, kl_estimator=recipe.kl_estimator, advantages=recipe.advantages),
        **config,
    )
    assert trainer.accelerator.num_processes == layout.ranks
    if trainer.ref_model is not None:
        trainer.ref_model.load_state_dict(moved(trainer.ref_model, seed=99))
    trainer.train()
    return trainer


def _with(**ours: Any) -> Callable[..., AlgorithmRecorder]:
    return lambda *args, **kwargs: AlgorithmRecorder(*args, **kwargs, **ours)


@dataclass
class Held:
    """Largest differences over the updates of a training."""

    loss: float = 0.0
    """Relative to the loss, or absolute for losses below 1."""
    gradient: float = 0.0
    """Relative to the largest entry of a tensor."""
    bounded: float = 0.0
    """Largest share of terms that the clip, the bound or the gate changed."""
    zero: int = 0
    """Number of zero-variance groups."""
    truncated: int = 0
    """Number of truncated completions."""
    updates: int = 0
    """Number of updates that were compared."""

    def widen(self, other: Held) -> None:
        """Keep the larger differences and add the counts."""
        for key in ("loss", "gradient", "bounded"):
            value = getattr(other, key)
            # `max` could drop a NaN, so a NaN counts as infinite.
            setattr(self, key, max(getattr(self, key), value if value == value else float("inf")))
        for key in ("zero", "truncated", "updates"):
            setattr(self, key, getattr(self, key) + getattr(other, key))


def hold(
    checkpoint: Path,
    name: str,
    layout: Layout,
    updates: int = 4,
    *,
    added: float = 1e-4,
    paper: Paper | None = None,
    edit: Callable[[Recipe], Recipe] = lambda recipe: recipe,
    **changes: Any,
) -> Held:
    """Train the recipe `name`, and return the differences of each update from its paper.

    Args:
        checkpoint: folder of the tiny policy.
        name: recipe of recipes/algorithms.
        layout: division of a generation.
        updates: number of updates.
        added: constant that TRL adds to each standard deviation.
        paper: paper to compare with, by default the recipe's.
        edit: function that changes the recipe after its checks, to plant a fault that they would refuse.
        **changes: keys of the recipe to replace.
    """
    recipe = edit(recipe_of(name, layout, **changes))
    trainer = train(checkpoint, name, layout, updates, recipe)
    recording = (trainer.generations, trainer.steps, trainer.dealt)
    return compare(checkpoint, name, layout, trainer, gather_object([recording]), added, paper or PAPERS[name])


def compare(
    checkpoint: Path,
    name: str,
    layout: Layout,
    trainer: AlgorithmRecorder,
    by_rank: Sequence[Any],
    added: float,
    paper: Paper,
) -> Held:
    """Compare the recorded updates of all ranks with the paper's objective of the same completions."""
    reference = trainer.accelerator.unwrap_model(trainer.ref_model).state_dict() if trainer.ref_model else None
    held = Held()
    for index, step in enumerate(trainer.steps):
        generation = [row for generations, *_ in by_rank for row in generations[step.generation][1]]
        advantages = _advantages(name, paper, generation, added)
        policy = load(checkpoint, step.policy)
        old = load(checkpoint, trainer.generations[step.generation][0])
        fixed = old if reference is None else load(checkpoint, reference)
        rows = []
        for prompt, tokens in _rows_of(by_rank, index, layout):
            row = Row(*_scored((policy, old, fixed), prompt, tokens), advantages[(*prompt, -1, *tokens)])
            rows.append(replace(row, is_truncated=tokens[-1] != EOS))
        update = Update(rows, MAX_COMPLETION_LENGTH)
        objective = paper.objective(update) * _divisor(name, rows, generation, layout)
        loss = sum(sum(steps[index].losses) for _, steps, _ in by_rank) / layout.ranks
        held.widen(
            Held(
                abs(-objective.item() - loss) / max(1.0, abs(loss)),
                _gradient_difference(policy, -objective, step.gradient),
                paper.bounded(update),
                sum(not any(advantages[(*p, -1, *t)] for p, t in group) for group in _groups(generation)),
                sum(row.is_truncated for row in rows),
                1,
            )
        )
    return held


def _rows_of(by_rank: Sequence[Any], index: int, layout: Layout) -> list[Tokens]:
    """Return the completions of update `index` on all ranks, as TRL divided them."""
    rows: list[Tokens] = []
    for _, steps, dealt in by_rank:
        if dealt:
            start = index % layout.updates * layout.accumulation
            batches = dealt[steps[index].generation][start : start + layout.accumulation]
        else:
            batches = steps[index].micro_batches
        rows += [row for batch in batches for row in batch]
    return rows


def _groups(generation: Sequence[Tokens]) -> list[list[Tokens]]:
    """Return the completions of each prompt. A generation holds no prompt twice."""
    by_prompt: dict[tuple[int, ...], list[Tokens]] = {}
    for prompt, tokens in generation:
        by_prompt.setdefault(tuple(prompt), []).append((prompt, tokens))
    assert all(len(group) == NUM_GENERATIONS for group in by_prompt.values())
    return list(by_prompt.values())


def _advantages(name: str, paper: Paper, generation: Sequence[Tokens], added: float) -> Mapping[tuple[int, ...], float]:
    """Return the paper's advantage of each completion by its tokens. Equal completions have equal rewards."""
    groups = _groups(generation)
    values = paper.advantages([rewards_of(name, [tokens for _, tokens in group]) for group in groups], added)
    return {
        (*prompt, -1, *tokens): value
        for group, advantages in zip(groups, values, strict=True)
        for (prompt, tokens), value in zip(group, advantages, strict=True)
    }


def _divisor(name: str, rows: Sequence[Row], generation: Sequence[Tokens], layout: Layout) -> float:
    """Return the tokens of an update over TRL's divisor, an average share of the generation's, or 1 for one update."""
    if name not in POOLED:
        return 1.0
    counted = [tokens for _, tokens in generation if name != "dapo" or tokens[-1] == EOS]
    share = sum(map(len, counted)) / layout.updates
    return sum(len(row.new) for row in rows if name != "dapo" or not row.is_truncated) / share


def _scored(models: Sequence[torch.nn.Module], prompt: list[int], tokens: list[int]) -> list[Tensor]:
    """Return log p of each token under each model, (T,). Only the first result has a graph."""
    ids = torch.tensor([[*prompt, *tokens]])
    found = []
    for place, model in enumerate(models):
        with float64_model(), contextlib.nullcontext() if place == 0 else torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        found.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0])
    return found


def _gradient_difference(policy: torch.nn.Module, loss: Tensor, recorded: Mapping[str, Tensor]) -> float:
    """Return the largest difference of a gradient's entries, relative to the largest entry of its tensor."""
    names, parameters = zip(*policy.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    gaps = []
    for name, gradient in zip(names, gradients, strict=True):
        scale = gradient.abs().max().item()
        gap = (gradient - recorded[name].double()).abs().max().item()
        gaps.append(gap / scale if scale else gap)
    return float(torch.tensor(gaps).max())
