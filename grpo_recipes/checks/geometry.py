"""Batch geometry of a GRPO run: what one generation, one micro-batch and one optimiser step hold, and on which rank.

Every count follows TRL 1.16: `GRPOConfig.__post_init__` for the generation batch, `RepeatSampler` for the epoch.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass
from typing import Any

from grpo_recipes.recipe.recipe import Recipe
from grpo_rewards.errors import UserError
from grpo_rewards.terminal import Table


@dataclass(frozen=True)
class Geometry:
    """How many prompts and completions meet where. A group is the `num_generations` completions of one prompt.

    `per_device_train_batch_size` counts completions in one micro-batch on one rank; `steps_per_generation` is how many
    micro-batches one generation is cut into; `num_iterations` is how often each generation is trained on (mu).
    """

    num_processes: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    steps_per_generation: int
    num_generations: int
    num_iterations: int

    @classmethod
    def from_config(cls, config: Any, num_processes: int, *, compares_whole_batch: bool = False) -> Geometry:
        """The geometry of `config` (`GRPOConfig`, or its plain values as attributes) on `num_processes` ranks.

        Raises `UserError` where TRL could not
        lay out whole groups: sizes below one, both `generation_batch_size` and `steps_per_generation`, a generation batch that
        does not divide, fewer than two generations, or an evaluation batch that does not divide. With
        `compares_whole_batch` a prompt has one completion and the generation is the group.
        """
        for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations"):
            if getattr(config, key) < 1:
                raise UserError(f"`{key}` is {getattr(config, key)}: set it to 1 or more")
        if config.num_generations < 2 and not compares_whole_batch:
            raise UserError(
                f"`num_generations` is {config.num_generations}: a group needs at least 2 completions to compare"
            )
        geometry = cls(
            num_processes=num_processes,
            per_device_train_batch_size=config.per_device_train_batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            steps_per_generation=_steps_per_generation(config, num_processes),
            num_generations=1 if compares_whole_batch else config.num_generations,
            num_iterations=config.num_iterations,
        )
        if compares_whole_batch and geometry.generation_batch_size < 2:
            raise UserError("a generation of 1 completion has nothing to compare it with: raise the batch size")
        geometry._check_whole_groups()
        _check_evaluation(config, num_processes)
        return geometry

    @property
    def generation_batch_size(self) -> int:
        """Completions in one generation, over all ranks."""
        return self.num_processes * self.completions_per_rank

    @property
    def completions_per_rank(self) -> int:
        """Completions of one generation on one rank."""
        return self.per_device_train_batch_size * self.steps_per_generation

    @property
    def prompts_per_generation(self) -> int:
        """Distinct prompts in one generation, over all ranks."""
        return self.generation_batch_size // self.num_generations

    @property
    def completions_per_optimizer_step(self) -> int:
        """Completions behind one update of the parameters, over all ranks."""
        return self.num_processes * self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def splits_groups(self) -> bool:
        """Whether the completions of one prompt lie on more than one rank.

        Advantages stay right (TRL gathers rewards first); a reward that compares completions inside a group does not.
        """
        return self.num_processes > 1 and self.completions_per_rank % self.num_generations != 0

    def generations_per_epoch(self, num_prompts: int) -> int:
        """Whole generations in one pass over `num_prompts`; `RepeatSampler` drops an incomplete one."""
        return num_prompts // self.prompts_per_generation

    def optimizer_steps_per_epoch(self, num_prompts: int) -> int:
        """Updates of the parameters in one pass over `num_prompts`."""
        micro_batches = self.generations_per_epoch(num_prompts) * self.steps_per_generation * self.num_iterations
        return math.ceil(micro_batches / self.gradient_accumulation_steps)

    def optimizer_steps(self, config: Any, num_prompts: int) -> int:
        """Updates of the parameters in a whole run: `max_steps`, or `num_train_epochs` passes over `num_prompts`."""
        if config.max_steps > 0:
            return config.max_steps
        return math.ceil(config.num_train_epochs * self.optimizer_steps_per_epoch(num_prompts))

    def ends_generation(self, step: int, num_prompts: int) -> bool:
        """Whether optimiser step `step` (from 1) leaves no generated completions that are still to be trained on."""
        rounds = self.steps_per_generation * self.num_iterations
        step_in_epoch = step % self.optimizer_steps_per_epoch(num_prompts)
        return step_in_epoch * self.gradient_accumulation_steps % rounds == 0

    def check_saves(self, config: Any, num_prompts: int) -> None:
        """Raise `UserError` if a checkpoint would fall inside a generation.

        TRL does not save generated completions: resumed from there, a run trains on others than it would have.
        """
        key = {"steps": "save_steps", "best": "eval_steps"}.get(str(config.save_strategy))
        if key is None or config.save_only_model:
            return
        if key == "eval_steps" and config.eval_strategy == "epoch":  # an epoch holds whole generations
            return
        total = self.optimizer_steps(config, num_prompts)
        every = getattr(config, key) or config.logging_steps
        every = math.ceil(every * total) if every < 1 else int(every)

        def fits(interval: int) -> bool:
            return all(self.ends_generation(step, num_prompts) for step in range(interval, total, interval))

        if fits(every):
            return
        fix = next((interval for interval in range(every, total) if fits(interval)), None)
        raise UserError(
            f"`{key}` {getattr(config, key)} saves inside a generation, which is trained on in {self.steps_per_generation} × "
            f"{self.num_iterations} micro-batches, {self.gradient_accumulation_steps} an optimiser step; its completions would "
            "be lost on a restart: set " + (f"`{key}` to {fix}" if fix else "`save_strategy: epoch`")
        )

    def check_dataset(self, num_prompts: int) -> None:
        """Raise `UserError` if `num_prompts` cannot fill one generation: TRL would train 0 steps and report success."""
        if num_prompts < self.prompts_per_generation:
            raise UserError(
                f"the dataset has {num_prompts} prompts and one generation needs {self.prompts_per_generation} "
                f"({self._sizes()}, {self.num_generations} completions a prompt): add prompts or lower "
                "`per_device_train_batch_size`"
            )

    def check_steps(self, config: Any, num_prompts: int) -> None:
        """Raise `UserError` if the run would end before its first optimiser step."""
        if self.optimizer_steps(config, num_prompts) < 1:
            raise UserError(f"`num_train_epochs` is {config.num_train_epochs}: set it above 0, or set `max_steps`")

    def describe(self) -> str:
        """What one generation and one optimiser step hold, as three lines of text."""
        return "\n".join(
            [
                f"  generation      {self.prompts_per_generation} prompts × {self.num_generations} completions = "
                f"{self.generation_batch_size} completions on {_plural(self.num_processes, 'process', 'es')}, in "
                f"{_plural(self.steps_per_generation, 'micro-batch', 'es')} of {self.per_device_train_batch_size} per process",
                f"  optimiser step  {self.completions_per_optimizer_step} completions "
                f"({self.completions_per_optimizer_step / self.num_generations:g} prompts); "
                f"each generation is trained on {_plural(self.num_iterations, 'time')}",
                f"  groups          {self._describe_groups()}",
            ]
        )

    def describe_epoch(self, num_prompts: int, max_completion_length: int | None = None) -> str:
        """What one pass over `num_prompts` comes to, as one line of text; with its tokens if their limit is given."""
        completions = self.generations_per_epoch(num_prompts) * self.generation_batch_size
        tokens = f", at most {completions * max_completion_length:,} tokens" if max_completion_length else ""
        return (
            f"  epoch           {num_prompts} prompts = {_plural(self.generations_per_epoch(num_prompts), 'generation')} = "
            f"{_plural(self.optimizer_steps_per_epoch(num_prompts), 'optimiser step')} ({completions:,} completions{tokens})"
        )

    def cells(self) -> list[list[list[int]]]:
        """The prompts of the first generation by micro-batch, rank and row, numbered as the sampler draws them.

        Each rank takes a contiguous piece of the generation (`BatchSamplerShard`) and cuts it into micro-batches. TRL
        shuffles a rank's rows over its micro-batches once they are scored, so this is who generates what.
        """
        size = self.per_device_train_batch_size

        def cell(micro_batch: int, rank: int) -> list[int]:
            first = rank * self.completions_per_rank + micro_batch * size
            return [row // self.num_generations for row in range(first, first + size)]

        return [
            [cell(micro_batch, rank) for rank in range(self.num_processes)]
            for micro_batch in range(self.steps_per_generation)
        ]

    def picture(self) -> Table:
        """The first generation as a table: rows are micro-batches, columns ranks, cells prompts × their completions."""
        ranks, rows = _ends(self.num_processes), _ends(self.steps_per_generation)
        cells = self.cells()
        table = []
        for row in rows:
            shown = ["…" if None in (row, rank) else _runs(cells[row or 0][rank or 0]) for rank in ranks]
            table.append([str(row) if row is not None else "…", *shown])
        return Table(table, ("micro-batch", *(f"rank {rank}" if rank is not None else "…" for rank in ranks)))

    def as_dict(self) -> dict[str, Any]:
        """Fields and derived counts, for `run.json`."""
        return {
            **asdict(self),
            "generation_batch_size": self.generation_batch_size,
            "prompts_per_generation": self.prompts_per_generation,
            "completions_per_optimizer_step": self.completions_per_optimizer_step,
            "splits_groups": self.splits_groups,
        }

    def _describe_groups(self) -> str:
        if self.num_generations == 1:
            return "one: the whole generation"
        return "split over processes" if self.splits_groups else "whole on each process"

    def _sizes(self) -> str:
        return (
            f"per_device_train_batch_size {self.per_device_train_batch_size} × steps_per_generation "
            f"{self.steps_per_generation} × {_plural(self.num_processes, 'process', 'es')}"
        )

    def _check_whole_groups(self) -> None:
        if self.generation_batch_size % self.num_generations == 0:
            return
        factor = self.num_processes * self.steps_per_generation
        step = self.num_generations // math.gcd(self.num_generations, factor)
        fits = math.ceil(self.per_device_train_batch_size / step) * step
        raise UserError(
            f"`num_generations` ({self.num_generations}) does not divide the generation batch of "
            f"{self.generation_batch_size} completions ({self._sizes()}): set `per_device_train_batch_size` to {fits}"
        )


def geometry_of(recipe: Recipe, num_processes: int) -> Geometry:
    """Return the batch geometry of a recipe on `num_processes` ranks. Raise `RecipeError` if the sizes do not divide."""
    with recipe.naming_this_file():
        return Geometry.from_config(recipe.config, num_processes, compares_whole_batch=recipe.compares_whole_batch)


def _steps_per_generation(config: Any, num_processes: int) -> int:
    batch, steps = config.generation_batch_size, config.steps_per_generation
    if batch is not None and steps is not None:
        raise UserError("`generation_batch_size` and `steps_per_generation` say the same thing twice: keep one")
    if batch is None:
        steps = config.gradient_accumulation_steps if steps is None else steps
    else:
        step = config.per_device_train_batch_size * num_processes
        if batch % step:
            raise UserError(
                f"`generation_batch_size` ({batch}) is not a multiple of per_device_train_batch_size × processes "
                f"({step}): set it to {math.ceil(batch / step) * step}"
            )
        steps = batch // step
    if steps < 1:
        raise UserError(
            f"a generation of {steps} micro-batches trains nothing: set `steps_per_generation` to 1 or more"
        )
    return steps


def _check_evaluation(config: Any, num_processes: int) -> None:
    if str(config.eval_strategy) in ("no", "IntervalStrategy.NO"):
        return
    batch = config.per_device_eval_batch_size * num_processes
    generations = config.num_generations_eval or config.num_generations
    if batch % generations:
        step = generations // math.gcd(generations, num_processes)
        fits = math.ceil(config.per_device_eval_batch_size / step) * step
        raise UserError(
            f"the evaluation batch of {batch} completions (per_device_eval_batch_size × processes) is not a multiple of "
            f"the {generations} completions a prompt: set `per_device_eval_batch_size` to {fits}"
        )


def _ends(count: int, shown: int = 8) -> list[int | None]:
    """The numbers below `count`, with None for those in the middle that would make a table too wide."""
    if count <= shown:
        return list(range(count))
    return [*range(shown - 2), None, count - 1]


def _runs(prompts: list[int]) -> str:
    """Equal neighbours counted: `0×8 1×8`; a run over many prompts by its ends."""
    runs = [f"{prompt}×{len(list(same))}" for prompt, same in itertools.groupby(prompts)]
    return " ".join(runs if len(runs) <= 3 else [runs[0], "…", runs[-1]])


def _plural(count: int, noun: str, suffix: str = "s") -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{suffix}"
