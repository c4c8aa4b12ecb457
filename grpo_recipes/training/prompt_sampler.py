"""Which prompts of a generation are generated: `sampling: informative`.

A group whose rewards are all equal has no advantage, and so no gradient: what was generated for it is wasted. A prompt whose
last groups were so will probably be so again (GRESO, arXiv 2506.02177, section 4). So each prompt of a generation is generated
with a probability, `exploration` to the power of the number of its last groups in a row without variance, and never below
`floor`. The others of the generation are left out: nothing is generated, scored or trained for them.

The order of the epoch, the number of optimiser steps and the size of a generation stay TRL's. A prompt that is left out counts
as a group without variance, which is what is expected of it: the divisor of the loss stays that of the whole generation. With
`informative: unbiased` the advantages of the others are divided by their probabilities besides (Horvitz and Thompson 1952, "A
generalization of sampling without replacement from a finite universe"), so that the expected gradient over the draws is that of
the whole generation. docs/sampling.md has the proof.

Every rank makes the same draws, from the seed, the epoch and the number of the generation. A prompt is met once an epoch, so
that its probability depends on nothing that happens in the epoch: a resumed epoch is drawn as it would have been.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.trainer.utils import RepeatSampler

from grpo_recipes.recipe.specs import SamplingSpec
from grpo_recipes.runs.files import RunError, read_object, write_atomically
from grpo_recipes.training.data_order import EpochSampler
from grpo_rewards.errors import UserError

MEMORY = "prompts.json"  # in each checkpoint: what is known of each prompt

logger = logging.getLogger(__name__)


def inclusion(unvaried: np.ndarray, spec: SamplingSpec, quantum: int) -> np.ndarray:
    """The probability with which each prompt of a generation is generated, (P,) in (0, 1].

    Their sum is the number of prompts that will be generated, which must be a multiple of `quantum`: the probabilities are
    raised by one factor, up to 1, until it is.

    Args:
        unvaried: how many of a prompt's last groups, in a row, had no variance, (P,).
        spec: its `exploration` and `floor`.
        quantum: divides P.
    """
    wanted = np.maximum(spec.floor, spec.exploration ** unvaried.astype(np.float64))
    # A sum that rounding put above a multiple is not a reason to generate a further quantum.
    size = min(len(wanted), quantum * math.ceil(wanted.sum() / quantum - 1e-9))
    certain = wanted >= 1.0
    while True:
        rest = wanted[~certain].sum()
        factor = (size - certain.sum()) / rest if rest else 1.0
        raised = np.where(certain, 1.0, wanted * factor)
        if (raised <= 1.0).all():
            return raised
        certain = raised >= 1.0


def systematic(probabilities: np.ndarray, start: float) -> np.ndarray:
    """Which units are drawn, (P,) bool: exactly as many as the probabilities sum to, a whole number.

    The probabilities are laid end to end on a line; those units are drawn in which one of the points start, start + 1, ... falls
    (Madow 1949, "On the theory of systematic sampling, II"). With `start` uniform in [0, 1) each is drawn with its probability.
    """
    drawn = probabilities >= 1.0
    if drawn.all():
        return drawn
    ends = np.cumsum(probabilities[~drawn])
    points_before = np.ceil(ends - start)
    points_before[-1] = round(ends[-1])  # of the last point, rounding must not decide
    drawn[~drawn] = np.diff(points_before, prepend=0.0) > 0
    return drawn


def quantum_of(prompts: int, num_generations: int, steps_per_generation: int, processes: int) -> int:
    """The number of prompts, a divisor of those of a generation, whose rows make equal micro-batches on every rank.

    Where no rank has a part of a group in the whole generation, none has one of so many prompts either.
    """
    cells = steps_per_generation * processes
    fills = cells // math.gcd(cells, num_generations)
    return fills if prompts % processes else math.lcm(fills, processes)


@dataclass(frozen=True)
class Draw:
    """The draw of one generation: its P prompts in the order of the epoch, and which of them are generated."""

    prompts: np.ndarray
    """Rows of the dataset, (P,)."""
    probabilities: np.ndarray
    """(P,)."""
    drawn: np.ndarray
    """(P,) bool."""
    at_floor: np.ndarray
    """Of which prompts the probability is `floor`, before it is raised, (P,) bool."""

    @property
    def share(self) -> float:
        """The share of the generation that is generated, in (0, 1]."""
        return float(self.drawn.mean())

    def weights(self, *, unbiased: bool) -> np.ndarray:
        """What the advantages of each drawn prompt are multiplied by, in their order, (K,) float64.

        TRL divides by what was generated, K of P prompts: K / P makes that the divisor of the whole generation.
        """
        weights = np.full(int(self.drawn.sum()), self.share)
        return weights / self.probabilities[self.drawn] if unbiased else weights

    def rows(self, num_generations: int, processes: int) -> list[int]:
        """The rows of the whole generation, of each rank first those that are generated, then those left out."""
        parts = [np.repeat(self.prompts[which], num_generations) for which in (self.drawn, ~self.drawn)]
        ranks = zip(*(np.split(part, processes) for part in parts), strict=True)
        return [int(row) for both in ranks for part in both for row in part]


class InformativeSampler(EpochSampler):
    """TRL's order of prompts, in which each generation is drawn just before its rows are read.

    With every probability 1 its rows are those of `EpochSampler`.
    """

    def __init__(self, plain: RepeatSampler, spec: SamplingSpec, quantum: int, processes: int) -> None:
        settings = (plain.mini_repeat_count, plain.batch_size, plain.repeat_count, plain.shuffle, plain.seed)
        super().__init__(plain.data_source, *settings)
        self.spec = spec
        self.quantum = quantum
        self.processes = processes
        self.unvaried = np.zeros(self.num_samples, np.int64)
        """Of each row of the dataset, how many of its last groups in a row had no variance."""
        self.draws: list[Draw] = []
        """Of the epoch's generations so far; a resumed epoch makes those before it anew, and nobody reads them."""

    def __iter__(self) -> Any:
        """Yield the row indices of epoch `epoch`."""
        once = EpochSampler(self.data_source, 1, self.batch_size, 1, self.shuffle, self.seed)
        once.epoch = self.epoch
        self.draws = []
        order = np.array(list(once), np.int64).reshape(-1, self.batch_size)
        for number, prompts in enumerate(order):
            self.draws.append(self._draw(prompts, number))
            rows = self.draws[-1].rows(self.mini_repeat_count, self.processes)
            for _ in range(self.repeat_count):
                yield from rows

    def _draw(self, prompts: np.ndarray, number: int) -> Draw:
        unvaried = self.unvaried[prompts]
        probabilities = inclusion(unvaried, self.spec, self.quantum)
        start = np.random.default_rng([self.seed or 0, self.epoch, number]).random()
        at_floor = self.spec.exploration ** unvaried.astype(np.float64) < self.spec.floor
        return Draw(prompts, probabilities, systematic(probabilities, start), at_floor)

    def learn(self, draw: Draw, varied: np.ndarray) -> None:
        """Note of each drawn prompt whether its group had variance, (K,) bool."""
        drawn = draw.prompts[draw.drawn]
        self.unvaried[drawn] = np.where(varied, 0, self.unvaried[drawn] + 1)


class PromptSampling(TrainerCallback):
    """Draws the prompts of each generation of `trainer` (TRL's), and keeps what is known of them in its checkpoints."""

    def __init__(self, trainer: Any, spec: SamplingSpec) -> None:
        spec.check(trainer.args, router_loss=trainer.aux_loss_enabled)
        if len(set(trainer.reward_func_names)) < len(trainer.reward_func_names):
            raise UserError(
                "`sampling` reads each reward by its name, and two have the same: give one another `__name__`"
            )
        if not hasattr(trainer.train_dataset, "__len__"):
            raise UserError(
                "`sampling` remembers each prompt, and a streamed dataset has no numbered rows: load it whole"
            )
        self.trainer = trainer
        self.spec = spec
        self.sampler: InformativeSampler | None = None
        self.position = 0
        """The number of the next generation in its epoch."""

    @classmethod
    def added_to(cls, trainer: Any, sampling: str | Mapping[str, Any] | SamplingSpec | None) -> PromptSampling | None:
        """What `sampling` asks for, added to a trainer's callbacks; None if it asks for nothing. Raises `UserError`."""
        if sampling is None:
            return None
        added = cls(trainer, SamplingSpec.parse(sampling))
        trainer.add_callback(added)
        return added

    def sampler_like(self, plain: RepeatSampler) -> InformativeSampler:
        """The sampler of a training, with nothing known yet, in the order of TRL's."""
        args = self.trainer.args
        quantum = quantum_of(plain.batch_size, plain.mini_repeat_count, args.steps_per_generation, args.world_size)
        self.sampler = InformativeSampler(plain, self.spec, quantum, args.world_size)
        return self.sampler

    def generate(self, rows: Sequence[Any], generate: Callable[[Sequence[Any]], dict[str, Any]]) -> dict[str, Any]:
        """Have the drawn rows of this rank generated and scored by TRL's `generate`, learn from them, and weigh them."""
        assert self.sampler is not None, "training asks for a sampler first"
        draw, trainer = self.sampler.draws[self.position], self.trainer
        self.position += 1
        group, rank = self.sampler.mini_repeat_count, trainer.accelerator.process_index
        drawn = np.repeat(draw.prompts[draw.drawn], group)  # over all ranks
        here = slice(rank * len(drawn) // self.sampler.processes, (rank + 1) * len(drawn) // self.sampler.processes)
        self._check(rows[0], int(drawn[here][0]))
        _forget_rows(trainer._logs)
        output = generate(rows[: len(drawn[here])])
        self.sampler.learn(draw, self._varied(group))
        weights = np.repeat(draw.weights(unbiased=self.spec.is_unbiased), group)[here]
        advantages = output["advantages"]
        by_row = torch.as_tensor(weights, dtype=advantages.dtype, device=advantages.device)
        output["advantages"] = advantages * by_row.reshape(-1, *[1] * (advantages.ndim - 1))
        self._log(draw)
        return output

    def _check(self, row: Any, expected: int) -> None:
        """Raise unless the first row that is to be generated is the one drawn: a wrong one would be learnt from silently."""
        if row.get("prompt") != self.trainer.train_dataset[expected].get("prompt"):
            raise RuntimeError(
                f"generation {self.position} of the epoch has other prompts than were drawn for it: `sampling` does not go "
                "with `ignore_data_skip`, or with a checkpoint inside a generation"
            )

    def _varied(self, group: int) -> np.ndarray:
        """Which groups of the generation just scored, over all ranks, have an advantage other than 0, (K,) bool."""
        trainer = self.trainer
        logged = [list(trainer._logs["rewards"][name]) for name in trainer.reward_func_names]
        # (K, G, functions), NaN where unscored.
        rewards = np.array(logged, np.float64).T.reshape(-1, group, len(logged))
        weights = trainer.reward_weights.double().cpu().numpy()
        if trainer.multi_objective_aggregation == "normalize_then_sum":
            varied: np.ndarray = np.any(spread(rewards)[:, weights != 0], axis=1)
            return varied
        unscored = np.isnan(rewards).all(2)
        return spread(np.where(unscored, np.nan, np.nansum(rewards * weights, axis=2))[..., None])[:, 0]

    def _log(self, draw: Draw) -> None:
        metrics = self.trainer._metrics["train"]
        metrics["prompts/generated"].append(draw.share)
        metrics["prompts/at_floor"].append(float(draw.at_floor.mean()))
        metrics["prompts/kept_by_floor"].append(float((draw.at_floor & draw.drawn).sum() / draw.drawn.sum()))
        if self.spec.is_unbiased:
            metrics["prompts/largest_weight"].append(float(1 / draw.probabilities[draw.drawn].min()))

    # Restarts.

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore what the run that wrote a checkpoint knew of each prompt."""
        checkpoint = self.trainer.checkpoints.resumed_from
        if checkpoint is None or self.sampler is None:
            return
        if not (checkpoint / MEMORY).is_file():
            logger.warning("%s has no %s: `sampling` begins without a memory of the prompts", checkpoint, MEMORY)
            return
        self.sampler.unvaried[:] = read_memory(checkpoint / MEMORY, len(self.sampler.unvaried))

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Find the first generation of the epoch that is still to be made."""
        if self.sampler is None:
            return
        rounds = self.sampler.repeat_count  # micro-batches that a generation serves
        generations = len(self.sampler) // (rounds * self.sampler.batch_size * self.sampler.mini_repeat_count)
        steps_per_epoch = math.ceil(generations * rounds / args.gradient_accumulation_steps)
        done = state.global_step - int(state.epoch or 0) * steps_per_epoch
        self.position = done * args.gradient_accumulation_steps // rounds

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write what is known of each prompt into the checkpoint, which is completed after this."""
        if args.should_save and self.sampler is not None:
            content = {"groups_without_variance": self.sampler.unvaried.tolist()}
            write_atomically(
                Path(args.output_dir) / f"checkpoint-{state.global_step}" / MEMORY, json.dumps(content) + "\n"
            )


def spread(rewards: np.ndarray) -> np.ndarray:
    """Whether the scored rewards of each group differ, (K, F) bool, of rewards (K, G, F) with NaN where unscored."""
    low, high = np.nan_to_num(rewards, nan=np.inf).min(1), np.nan_to_num(rewards, nan=-np.inf).max(1)
    # TRL adds up in float32: sums that differ by rounding alone are equal. A group without a score has low above high.
    return high - low > 1e-6 * np.maximum(abs(low), abs(high))


def read_memory(path: Path, prompts: int) -> np.ndarray:
    """The memory in a checkpoint. Raises `RunError` if it is not of as many prompts."""
    try:
        content = read_object(path, {"groups_without_variance": []})
        counts = np.array(content["groups_without_variance"], np.int64)
    except (OSError, ValueError, TypeError, OverflowError) as error:
        raise RunError(f"{path} is damaged: it can't be read: resume from another checkpoint") from error
    if counts.shape != (prompts,) or (counts < 0).any():
        raise RunError(f"{path} is of {counts.size} prompts, and the dataset has {prompts}: train on the same rows")
    return counts


def _forget_rows(logs: dict[str, Any]) -> None:
    """Empty TRL's table of completions, which keeps the last full generation's worth: this one may be smaller."""
    for column in logs.values():
        for rows in column.values() if isinstance(column, dict) else [column]:
            rows.clear()
