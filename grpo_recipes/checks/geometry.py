"""Batch geometry of a GRPO run: the completions of a generation batch, a micro-batch and an optimizer step, per rank.

Every count follows TRL 1.16: `GRPOConfig.__post_init__` for the generation batch, `RepeatSampler` for the epoch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from grpo_recipes.recipe.recipe import Recipe
from grpo_rewards.errors import UserError


@dataclass(frozen=True)
class Geometry:
    """Numbers of completions that are generated, compared and trained on together.

    Attributes:
        num_processes: Number of ranks.
        per_device_train_batch_size: Completions in one micro-batch on one rank.
        gradient_accumulation_steps: Micro-batches per optimizer step.
        steps_per_generation: Micro-batches into which a generation batch is split.
        num_generations: Completions of one prompt, which form a group.
        num_iterations: Number of times that each generation batch is trained on (mu).
    """

    num_processes: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    num_generations: int
    num_iterations: int

    @classmethod
    def from_config(cls, config: Any, num_processes: int, *, compares_whole_batch: bool = False) -> Geometry:
        """Return the geometry of a configuration.

        Args:
            config: `GRPOConfig`, or an object with the same attributes, each in the range of its key (`TRL_KEYS`).
            num_processes: Number of ranks.
            compares_whole_batch: True if each prompt has one completion and the whole generation batch is one group.

        Raises:
            UserError: A batch does not hold whole groups, the only group has one completion, or both
                `generation_batch_size` and `steps_per_generation` are set.
        """
        geometry = cls(
            num_processes=num_processes,
            per_device_train_batch_size=config.per_device_train_batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            steps_per_generation=_steps_per_generation(config, num_processes),
            num_generations=1 if compares_whole_batch else config.num_generations,
            num_iterations=config.num_iterations,
        )
        if compares_whole_batch and geometry.generation_batch_size < 2:
            problem = "a generation of 1 completion has nothing to compare it with"
            raise UserError("`per_device_train_batch_size`", problem, "raise it")
        _check_multiple(
            "per_device_train_batch_size",
            geometry.per_device_train_batch_size,
            num_processes * geometry.steps_per_generation,
            geometry.num_generations,
            f"the generation batch ({geometry._sizes()}) must be a multiple of `num_generations`",
        )
        if str(config.eval_strategy) not in ("no", "IntervalStrategy.NO"):
            _check_multiple(
                "per_device_eval_batch_size",
                config.per_device_eval_batch_size,
                num_processes,
                config.num_generations_eval or config.num_generations,
                "the evaluation batch (per_device_eval_batch_size × processes) must hold whole groups of completions",
            )
        return geometry

    @property
    def generation_batch_size(self) -> int:
        """Number of completions in one generation batch, over all ranks."""
        return self.num_processes * self.completions_per_rank

    @property
    def completions_per_rank(self) -> int:
        """Number of completions of one generation batch on one rank."""
        return self.per_device_train_batch_size * self.steps_per_generation

    @property
    def prompts_per_generation(self) -> int:
        """Number of distinct prompts in one generation batch, over all ranks."""
        return self.generation_batch_size // self.num_generations

    @property
    def completions_per_optimizer_step(self) -> int:
        """Number of completions behind one optimizer step, over all ranks."""
        return self.num_processes * self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def splits_groups(self) -> bool:
        """True if the completions of some prompt lie on more than one rank.

        Advantages stay correct, because TRL gathers rewards first. A reward that compares the completions of a group
        does not, because it is called with one rank's completions.
        """
        return self.num_processes > 1 and self.completions_per_rank % self.num_generations != 0

    def generations_per_epoch(self, num_prompts: int) -> int:
        """Return the number of generation batches in an epoch. `RepeatSampler` drops an incomplete one."""
        return num_prompts // self.prompts_per_generation

    def optimizer_steps_per_epoch(self, num_prompts: int) -> int:
        """Return the number of optimizer steps in an epoch of `num_prompts` prompts."""
        micro_batches = self.generations_per_epoch(num_prompts) * self.steps_per_generation * self.num_iterations
        # transformers counts the last, incomplete accumulation as a step.
        return math.ceil(micro_batches / self.gradient_accumulation_steps)

    def optimizer_steps(self, config: Any, num_prompts: int) -> int:
        """Return the number of optimizer steps in a run: `max_steps`, or those of `num_train_epochs` epochs."""
        if config.max_steps > 0:
            return config.max_steps
        return math.ceil(config.num_train_epochs * self.optimizer_steps_per_epoch(num_prompts))

    def ends_generation(self, step: int, num_prompts: int) -> bool:
        """Return True if optimizer step `step`, counted from 1, is the last one of its generation batch."""
        micro_batches = self.steps_per_generation * self.num_iterations
        # Counted within the epoch, whose last optimizer step may hold fewer micro-batches than the others.
        step_in_epoch = step % self.optimizer_steps_per_epoch(num_prompts)
        return step_in_epoch * self.gradient_accumulation_steps % micro_batches == 0

    def check_saves(self, config: Any, num_prompts: int) -> None:
        """Raise `UserError` if a checkpoint would be saved before a generation batch is fully trained on.

        TRL does not save generated completions, so a run resumed from such a checkpoint trains on other completions
        than the uninterrupted run.
        """
        key = {"steps": "save_steps", "best": "eval_steps"}.get(str(config.save_strategy))
        if key is None or config.save_only_model:
            return
        # An epoch always ends with its last generation batch.
        if key == "eval_steps" and config.eval_strategy == "epoch":
            return
        total = self.optimizer_steps(config, num_prompts)
        interval = getattr(config, key) or config.logging_steps
        interval = math.ceil(interval * total) if interval < 1 else int(interval)
        if (fix := self._next_interval_that_fits(interval, total, num_prompts)) == interval:
            return
        suggestion = f"`{key}` to {fix}" if fix else "`save_strategy: epoch`"
        problem = (
            f"{getattr(config, key)} saves inside a generation, which is trained on in {self.steps_per_generation} × "
            f"{self.num_iterations} micro-batches, {self.gradient_accumulation_steps} an optimizer step; its "
            "completions would be lost on a restart"
        )
        raise UserError(f"`{key}`", problem, f"set {suggestion}")

    def _next_interval_that_fits(self, interval: int, total: int, num_prompts: int) -> int | None:
        """Return the smallest interval of saves, from `interval` on, that always ends a generation batch, or None."""
        for candidate in range(interval, max(total, interval + 1)):
            if all(self.ends_generation(step, num_prompts) for step in range(candidate, total, candidate)):
                return candidate
        return None

    def check_dataset(self, num_prompts: int) -> None:
        """Raise `UserError` if the prompts fill no generation batch: TRL would train 0 steps and report success."""
        if num_prompts < self.prompts_per_generation:
            problem = (
                f"it has {num_prompts} prompts and one generation needs {self.prompts_per_generation} "
                f"({self._sizes()}, {self.num_generations} completions a prompt)"
            )
            raise UserError("`dataset`", problem, "add prompts or lower `per_device_train_batch_size`")

    def describe(self) -> str:
        """Return three lines of text: a generation batch, an optimizer step, and where groups lie."""
        groups = "split over processes" if self.splits_groups else "whole on each process"
        if self.num_generations == 1:
            groups = "one: the whole generation"
        return (
            f"  generation      {self.prompts_per_generation} prompts × {self.num_generations} completions = "
            f"{self.generation_batch_size} completions on {_plural(self.num_processes, 'process', 'es')}, in "
            f"{_plural(self.steps_per_generation, 'micro-batch', 'es')} of {self.per_device_train_batch_size} per "
            "process\n"
            f"  optimizer step  {self.completions_per_optimizer_step} completions "
            f"({self.completions_per_optimizer_step / self.num_generations:g} prompts); "
            f"each generation is trained on {_plural(self.num_iterations, 'time')}\n"
            f"  groups          {groups}"
        )

    def epoch(self, num_prompts: int, max_completion_length: int) -> dict[str, int]:
        """Return the counts of an epoch, with the most tokens that it may generate."""
        generations = self.generations_per_epoch(num_prompts)
        completions = generations * self.generation_batch_size
        return {
            "prompts": num_prompts,
            "generations": generations,
            "optimizer_steps": self.optimizer_steps_per_epoch(num_prompts),
            "completions": completions,
            "max_tokens": completions * max_completion_length,
        }

    def describe_epoch(self, num_prompts: int, max_completion_length: int) -> str:
        """Return the counts of an epoch as one line of text."""
        counts = self.epoch(num_prompts, max_completion_length)
        return (
            f"  epoch           {num_prompts} prompts = {_plural(counts['generations'], 'generation')} = "
            f"{_plural(counts['optimizer_steps'], 'optimizer step')} ({counts['completions']:,} completions, at most "
            f"{counts['max_tokens']:,} tokens)"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the derived counts, for `run.json`."""
        return {
            **asdict(self),
            "generation_batch_size": self.generation_batch_size,
            "prompts_per_generation": self.prompts_per_generation,
            "completions_per_optimizer_step": self.completions_per_optimizer_step,
            "splits_groups": self.splits_groups,
        }

    def _sizes(self) -> str:
        return (
            f"per_device_train_batch_size {self.per_device_train_batch_size} × steps_per_generation "
            f"{self.steps_per_generation} × {_plural(self.num_processes, 'process', 'es')}"
        )


def geometry_of(recipe: Recipe, num_processes: int) -> Geometry:
    """Return the batch geometry of a recipe on `num_processes` ranks, or raise `RecipeError` if sizes do not divide."""
    with recipe.naming_this_file():
        return Geometry.from_config(recipe.config, num_processes, compares_whole_batch=recipe.compares_whole_batch)


def _steps_per_generation(config: Any, num_processes: int) -> int:
    batch, steps = config.generation_batch_size, config.steps_per_generation
    if batch is not None and steps is not None:
        raise UserError("`generation_batch_size`", "`steps_per_generation` sets the same thing", "keep one of the two")
    if batch is None:
        return config.gradient_accumulation_steps if steps is None else steps
    step = config.per_device_train_batch_size * num_processes
    reason = "it must be a multiple of per_device_train_batch_size × processes"
    _check_multiple("generation_batch_size", batch, 1, step, reason)
    return batch // step


def _check_multiple(key: str, size: int, factor: int, divisor: int, reason: str) -> None:
    """Raise `UserError` with the next `size` that fits unless `size` × `factor` is a multiple of `divisor`."""
    if size * factor % divisor:
        step = divisor // math.gcd(divisor, factor)
        fits = math.ceil(size / step) * step
        problem = f"{reason}, and {size * factor} is not a multiple of {divisor}"
        raise UserError(f"`{key}`", problem, f"set it to {fits}")


def _plural(count: int, noun: str, suffix: str = "s") -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{suffix}"
