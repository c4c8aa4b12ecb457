"""Random choice of the prompts of a generation batch that are generated: `sampling: informative`.

A zero-variance group has no advantage and so no gradient: its generation is wasted. A prompt whose last groups had zero
variance will probably have another such group (GRESO, arXiv 2506.02177, section 4). So each prompt is generated with
probability max(`floor`, `exploration`^z), where z is the number of its last groups in a row without variance. The other
prompts of the generation batch are skipped: nothing is generated, scored or trained for them.

The order of the epoch, the number of optimizer steps and the size of a generation batch stay TRL's. A skipped prompt
counts as a zero-variance group, which is the prediction, so the divisor of the loss stays that of all prompts. With
`informative: unbiased` the advantages of the drawn prompts are also divided by their probabilities (Horvitz and
Thompson 1952, "A generalization of sampling without replacement from a finite universe"), so that the expected gradient
over the draws is the gradient of the full generation batch. docs/sampling.md has the proof.

Every rank makes the same draws, from the seed, the epoch and the number of the generation. A prompt occurs once per
epoch, so its probability does not depend on anything that happens in the epoch, and a resumed epoch makes the same
draws.

Shapes: P prompts of a generation batch, K of them drawn, G completions per prompt, F reward functions.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerState, TrainingArguments
from trl.trainer.utils import RepeatSampler

from grpo_recipes.generation.models import run_folder
from grpo_recipes.recipe.specs import SamplingSpec
from grpo_recipes.runs.files import STEP, RunError, read_object, write_atomically
from grpo_recipes.training.data_order import EpochSampler
from grpo_rewards.errors import UserError

MEMORY = "prompts.json"
"""File of each checkpoint with the number of zero-variance groups of each prompt."""

DatasetRow = Mapping[str, Any]
"""Row of the training dataset, by column."""

logger = logging.getLogger(__name__)


def inclusion(unvaried: np.ndarray, spec: SamplingSpec, quantum: int) -> np.ndarray:
    """Return the sampling probability of each prompt, (P,) in (0, 1].

    The probabilities sum to the number of prompts that will be generated, which must be a multiple of `quantum`. They
    are raised by one factor, up to 1, until the sum is one.

    Args:
        unvaried: number of each prompt's last groups in a row without variance, (P,).
        spec: settings with `exploration` and `floor`.
        quantum: a divisor of P.
    """
    wanted = np.maximum(spec.floor, spec.exploration ** unvaried.astype(np.float64))
    # Without the margin, a sum that rounding put just above a multiple would generate a further quantum.
    size = min(len(wanted), quantum * math.ceil(wanted.sum() / quantum - 1e-9))
    certain = wanted >= 1.0
    # A probability that reaches 1 is fixed there, and the others need a larger factor: repeated until none exceeds 1.
    while True:
        rest = wanted[~certain].sum()
        factor = (size - certain.sum()) / rest if rest else 1.0
        raised = np.where(certain, 1.0, wanted * factor)
        if (raised <= 1.0).all():
            return raised
        certain = raised >= 1.0


def systematic(probabilities: np.ndarray, start: float) -> np.ndarray:
    """Return which units are drawn, (P,) bool: exactly as many as the probabilities sum to, an integer.

    The probabilities are laid end to end on a line. A unit is drawn if one of the points start, start + 1, ... falls on
    it (Madow 1949, "On the theory of systematic sampling, II"). With `start` uniform in [0, 1), each unit is drawn with
    its probability. Independent draws would also have these probabilities, but a number of prompts that varies.
    """
    drawn = probabilities >= 1.0
    if drawn.all():
        return drawn
    ends = np.cumsum(probabilities[~drawn])
    points_before = np.ceil(ends - start)
    points_before[-1] = round(ends[-1])  # rounding errors of the sum must not decide about the last point
    drawn[~drawn] = np.diff(points_before, prepend=0.0) > 0
    return drawn


def quantum_of(prompts: int, num_generations: int, steps_per_generation: int, processes: int) -> int:
    """Return the smallest number of prompts, a divisor of `prompts`, whose rows make equal micro-batches on every rank.

    Args:
        prompts: number of prompts of a generation batch.
        num_generations: completions per prompt.
        steps_per_generation: micro-batches per generation batch and rank.
        processes: number of ranks.
    """
    cells = steps_per_generation * processes
    fills = cells // math.gcd(cells, num_generations)
    # If the full generation batch splits no group over ranks, a draw from it must not split one either.
    return fills if prompts % processes else math.lcm(fills, processes)


@dataclass(frozen=True)
class Draw:
    """Draw of one generation batch: its P prompts in the order of the epoch, and which of them are generated."""

    prompts: np.ndarray
    """Rows of the dataset, (P,)."""
    probabilities: np.ndarray
    """Sampling probabilities, (P,)."""
    drawn: np.ndarray
    """Boolean mask of the prompts that are generated, (P,)."""
    at_floor: np.ndarray
    """Boolean mask (P,) of the prompts whose sampling probability would be below `floor`."""

    @property
    def share(self) -> float:
        """Share of the prompts that is generated, in (0, 1]."""
        return float(self.drawn.mean())

    def weights(self, *, unbiased: bool) -> np.ndarray:
        """Return the factors of the advantages of the drawn prompts, in their order, (K,) float64.

        TRL divides by the K generated prompts. The factor K / P makes P the divisor.
        """
        weights = np.full(int(self.drawn.sum()), self.share)
        return weights / self.probabilities[self.drawn] if unbiased else weights

    def rows(self, num_generations: int, processes: int) -> list[int]:
        """Return the dataset rows of the generation batch, for each rank the drawn ones before the skipped ones."""
        # TRL's sampler and batch sizes are fixed, so skipped rows are yielded as well, and `PromptSampling` cuts them
        # off.
        drawn = np.split(np.repeat(self.prompts[self.drawn], num_generations), processes)
        skipped = np.split(np.repeat(self.prompts[~self.drawn], num_generations), processes)
        rows: list[int] = []
        for rank in range(processes):
            rows += drawn[rank].tolist() + skipped[rank].tolist()
        return rows


class InformativeSampler(EpochSampler):
    """TRL's order of prompts, with each generation batch drawn just before its rows are read.

    If every probability is 1, the rows are those of `EpochSampler`.
    """

    def __init__(self, stock: RepeatSampler, spec: SamplingSpec, quantum: int, processes: int) -> None:
        super().__init__(stock)
        self.spec = spec
        self.quantum = quantum
        self.processes = processes
        self.unvaried = np.zeros(self.num_samples, np.int64)
        """Number of the last groups in a row without variance, for each row of the dataset."""
        self.draws: list[Draw] = []
        """Generations drawn so far in this epoch. A resumed epoch redraws the earlier ones and discards them."""

    def __iter__(self) -> Iterator[int]:
        """Yield the row indices of epoch `epoch`."""
        # Drawn lazily: the probabilities of a generation depend on the groups of the epoch before, which are known only
        # then.
        once = EpochSampler(RepeatSampler(self.data_source, 1, self.batch_size, 1, self.shuffle, self.seed))
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
        # A generator of its own: the state of the global one depends on what was sampled before, and differs between
        # ranks.
        start = np.random.default_rng([self.seed or 0, self.epoch, number]).random()
        at_floor = self.spec.exploration ** unvaried.astype(np.float64) < self.spec.floor
        return Draw(prompts, probabilities, systematic(probabilities, start), at_floor)

    def learn(self, draw: Draw, varied: np.ndarray) -> None:
        """Record for each drawn prompt whether its group had variance, (K,) bool."""
        drawn = draw.prompts[draw.drawn]
        self.unvaried[drawn] = np.where(varied, 0, self.unvaried[drawn] + 1)


class PromptSampling(TrainerCallback):
    """Callback that draws the prompts of each generation batch and stores `InformativeSampler.unvaried` in checkpoints.

    Raises:
        UserError: the loss is not a sum over prompts, two rewards have one name, or the dataset has no length.
    """

    def __init__(self, trainer: Any, spec: SamplingSpec) -> None:
        spec.check(trainer.args, router_loss=trainer.aux_loss_enabled)
        if len(set(trainer.reward_func_names)) < len(trainer.reward_func_names):
            problem = "it reads each reward by its name, and two have the same"
            raise UserError("`sampling`", problem, "give one another `__name__`")
        if not hasattr(trainer.train_dataset, "__len__"):
            problem = "it remembers each prompt, and a streamed dataset has no numbered rows"
            raise UserError("`sampling`", problem, "load the dataset whole")
        self.trainer = trainer
        self.spec = spec
        self.sampler: InformativeSampler | None = None
        self.position = 0
        """Number of the next generation in its epoch."""

    @classmethod
    def added_to(cls, trainer: Any, sampling: str | Mapping[str, Any] | SamplingSpec | None) -> PromptSampling | None:
        """Add the callback for a value of the recipe key `sampling` to a trainer. Return None if the value is None."""
        if sampling is None:
            return None
        added = cls(trainer, SamplingSpec.parse(sampling))
        trainer.add_callback(added)
        return added

    def sampler_like(self, stock: RepeatSampler) -> InformativeSampler:
        """Return the sampler for a training, in the order of TRL's `stock` sampler, without any recorded group."""
        args = self.trainer.args
        quantum = quantum_of(stock.batch_size, stock.mini_repeat_count, args.steps_per_generation, args.world_size)
        self.sampler = InformativeSampler(stock, self.spec, quantum, args.world_size)
        return self.sampler

    def generate(
        self, rows: list[DatasetRow], generate: Callable[[list[DatasetRow]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Generate and score the drawn rows of this rank, record which groups had variance, and weight the advantages.

        Args:
            rows: rows of this rank, drawn ones first.
            generate: TRL's generation and scoring.

        Returns:
            TRL's generation batch of the drawn rows.
        """
        assert self.sampler is not None, "training asks for a sampler first"
        draw, trainer = self.sampler.draws[self.position], self.trainer
        self.position += 1
        group, processes = self.sampler.mini_repeat_count, self.sampler.processes
        rank = trainer.accelerator.process_index
        drawn = np.repeat(draw.prompts[draw.drawn], group)  # rows of all ranks, (K G,)
        here = slice(rank * len(drawn) // processes, (rank + 1) * len(drawn) // processes)
        if rows[0].get("prompt") != trainer.train_dataset[int(drawn[here][0])].get("prompt"):
            # Other prompts would be recorded without an error.
            raise RuntimeError(
                f"generation {self.position} of the epoch has other prompts than were drawn for it: `sampling` does "
                "not go with `ignore_data_skip`, or with a checkpoint inside a generation"
            )
        # TRL's table of completions is a queue as long as a full generation batch. Rows of an earlier batch would stay
        # in it after a smaller one.
        for column in trainer._logs.values():
            for queue in column.values() if isinstance(column, dict) else [column]:
                queue.clear()
        output = generate(rows[: len(drawn[here])])
        # TRL's log has the rewards of all ranks, so every rank records the same groups and makes the same next draw.
        self.sampler.learn(draw, self._varied(group))
        weights = np.repeat(draw.weights(unbiased=self.spec.is_unbiased), group)[here]
        advantages = output["advantages"]  # (rows,) or (rows, T)
        by_row = torch.as_tensor(weights, dtype=advantages.dtype, device=advantages.device)
        output["advantages"] = advantages * by_row.reshape(-1, *[1] * (advantages.ndim - 1))
        metrics = trainer._metrics["train"]
        metrics["prompts/generated"].append(draw.share)
        metrics["prompts/kept_by_floor"].append(float((draw.at_floor & draw.drawn).sum() / draw.drawn.sum()))
        return output

    def _varied(self, group: int) -> np.ndarray:
        """Return which groups of the last generation, over all ranks, have a nonzero advantage, (K,) bool.

        TRL's log is read because its rewards are gathered: a rank alone may hold only a part of a group.
        """
        trainer = self.trainer
        logged = [list(trainer._logs["rewards"][name]) for name in trainer.reward_func_names]
        rewards = np.array(logged, np.float64).T.reshape(-1, group, len(logged))  # (K, G, F), NaN where unscored
        weights = trainer.reward_weights.double().cpu().numpy()
        if trainer.multi_objective_aggregation == "normalize_then_sum":
            varied: np.ndarray = np.any(varies(rewards)[:, weights != 0], axis=1)
            return varied
        total = np.where(np.isnan(rewards).all(2), np.nan, np.nansum(rewards * weights, axis=2))
        return varies(total[..., None])[:, 0]

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Restore the numbers of zero-variance groups from the checkpoint of a resumed run."""
        checkpoint = self.trainer.checkpoints.resumed_from
        if checkpoint is None or self.sampler is None:
            return
        if not (checkpoint / MEMORY).is_file():
            logger.warning("%s has no %s: `sampling` begins without a memory of the prompts", checkpoint, MEMORY)
            return
        self.sampler.unvaried[:] = read_memory(checkpoint / MEMORY, len(self.sampler.unvaried))

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Set `position` to the first generation of the epoch that this launch will make."""
        if self.sampler is None:
            return
        # transformers counts optimizer steps, and a resumed epoch is read from its start with the first rows skipped.
        # So the position follows from the steps made in this epoch.
        rounds = self.sampler.repeat_count  # micro-batches per generation batch
        generations = len(self.sampler) // (rounds * self.sampler.batch_size * self.sampler.mini_repeat_count)
        steps_per_epoch = math.ceil(generations * rounds / args.gradient_accumulation_steps)
        done = state.global_step - int(state.epoch or 0) * steps_per_epoch
        self.position = done * args.gradient_accumulation_steps // rounds

    def on_save(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        """Write the numbers of zero-variance groups into the checkpoint."""
        if args.should_save and self.sampler is not None:
            content = {"groups_without_variance": self.sampler.unvaried.tolist()}
            write_atomically(run_folder(args) / f"checkpoint-{state.global_step}" / MEMORY, json.dumps(content) + "\n")


def varies(rewards: np.ndarray) -> np.ndarray:
    """Return True where the scored rewards of a group differ, (K, F), given rewards (K, G, F), NaN where unscored."""
    low, high = np.nan_to_num(rewards, nan=np.inf).min(1), np.nan_to_num(rewards, nan=-np.inf).max(1)
    # Not `high > low`: TRL sums in float32, so sums that differ by rounding count as equal. A group without any score
    # has low = inf above high = -inf, and False.
    return high - low > 1e-6 * np.maximum(abs(low), abs(high))


def read_memory(path: Path, prompts: int) -> np.ndarray:
    """Return the numbers of zero-variance groups in a checkpoint, (prompts,).

    Raises:
        RunError: the file cannot be read or has another number of prompts.
    """
    content = read_object(path, {"groups_without_variance": [STEP]}, "resume from another checkpoint")
    counts = np.array(content["groups_without_variance"], np.int64)
    if len(counts) != prompts:
        problem = f"it is of {len(counts)} prompts, and the dataset has {prompts}"
        raise RunError(path, problem, "train on the same rows")
    return counts
