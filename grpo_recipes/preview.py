"""Sample the untrained policy of a recipe as training would: `grpo-recipes preview RECIPE`.

The recipe is checked as by `train`. Its trainer then runs the first step of the training up to the update, on some of
the first prompts, so that chat template, sampling, stop strings, adapter and precision are those of training. The
weights stay as they are, and nothing is kept on the disk. `reports.preview` describes the sample.
"""

from __future__ import annotations

import math
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerCallback

from grpo_recipes import train
from grpo_recipes.checks import checks
from grpo_recipes.checks.checks import Checked, Machine, choose_layout
from grpo_recipes.checks.geometry import geometry_of
from grpo_recipes.generation.models import method_replaced
from grpo_recipes.process.faults import RunFault, no_exit
from grpo_recipes.recipe.recipe import Recipe, parse_recipe
from grpo_recipes.reports.preview import Cost, Preview
from grpo_recipes.reports.transcript import transcript
from grpo_recipes.training.trainer import GRPOTrainer
from grpo_recipes.training.trl_patches import are_truncated
from grpo_rewards.completions import completion_text
from grpo_rewards.errors import UserError, one_line, shortened
from grpo_rewards.explain import Reasons
from grpo_rewards.redaction import scrubbed
from grpo_rewards.terminal import say

WARM_UP_SECONDS = 10.0
"""Longest single batch after which another one is timed: the first one also loads kernels and verifies layouts."""

REMOVED_KEYS = (
    *("deepspeed", "fsdp", "fsdp_config", "generation_batch_size", "resume_from_checkpoint", "push_to_hub"),
    *("log_completions_hub_repo", "load_best_model_at_end", "eval_on_start"),
)
"""Keys of training that concern several processes, evaluations, or what a run writes."""

SET_KEYS = {
    "num_iterations": 1,
    "max_steps": 1,
    "eval_strategy": "no",
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "log_completions": False,
    "disable_tqdm": True,
}


@dataclass
class Batch:
    """Completions that were generated together, with the times of their generation, of all rewards, and in all.

    The rest of the time is that of log-probabilities, loss and gradient. Times are in seconds.
    """

    completions: int
    tokens: int
    generation: float
    scoring: float
    total: float | None = None
    """None if the gradient was not computed to its end."""


class Sampled(Exception):
    """End of a preview's training: enough is sampled, and no update is made."""


def preview(arguments: Sequence[str], *, prompts: int, seed: int | None = None, options: Sequence[str] = ()) -> Preview:
    """Sample the untrained policy of a recipe.

    Args:
        arguments: Arguments of the training command, which name the recipe.
        prompts: Number of prompts, each with `num_generations` completions.
        seed: Random seed of the prompts' order and of the sampling, or None for the recipe's.
        options: Options of the command itself, for which an unknown argument may be a misspelling.

    Raises:
        UserError: The recipe can't run as written, or the policy can't be loaded.
        RunFault: The policy or a reward failed on the sample.
    """
    if prompts < 1:
        raise UserError(f"--prompts is {prompts}: set it to at least 1")
    given = [] if seed is None else ["--seed", str(seed)]
    recipe = parse_recipe([*arguments, *given], options)
    checked, tokenizer, machine = checked_inputs(recipe)
    listeners = [Reasons(reward) for reward in checked.rewards]
    explained = replace(checked, rewards=[listener.explained() for listener in listeners], eval_dataset=None)
    together = max(1, min(prompts, checked.geometry.completions_per_rank // checked.geometry.num_generations))
    batches = math.ceil(prompts / together)
    with tempfile.TemporaryDirectory(prefix="grpo-preview-") as folder, _one_line_errors(recipe):
        sampling = sampling_recipe(recipe, together, batches, Path(folder))
        training_args = train.leave_token_to_environment(checks.grpo_config(sampling))
        # Only the first GPU is used. transformers would otherwise split a batch over all of them.
        training_args._n_gpu = min(training_args.n_gpu, 1)
        trainer = train.bare_trainer(sampling, machine, training_args, explained, tokenizer)
        watch = Watch(trainer, listeners, batches)
        watch.run()
    rows = pd.DataFrame(watch.rows)
    weights = pd.Series({f"pay/{reward.name}": reward.weight for reward in checked.all_rewards})
    rows["total"] = (rows[weights.index].astype(float) * weights).sum(axis=1, min_count=1)
    return Preview(
        source=recipe.source,
        model=str(recipe.model["model_name_or_path"]),
        by_reward=recipe.config.multi_objective_aggregation == "normalize_then_sum",
        rewards=checked.all_rewards,
        prompts=watch.prompts[:prompts],
        rows=rows[rows["prompt"] < prompts],
        cost=cost_of(recipe, checked, train.hardware(training_args), watch.batches[-1]),
    )


def checked_inputs(recipe: Recipe) -> tuple[Checked, PreTrainedTokenizerBase, Machine]:
    """Check the recipe for the processes that `train` would start here, and load all but the policy."""
    if recipe.offline is not None:
        raise recipe.error(
            "`offline` trains on recorded responses, so a preview has nothing to generate: read the responses instead"
        )
    layout = choose_layout(None, None, use_cpu=recipe.config.use_cpu)
    machine = replace(Machine.here(), num_processes=layout.num_processes)
    checks.check_packages(recipe)
    geometry_of(recipe, machine.num_processes)  # names the fix, which TRL's own message lacks
    checks.dry_config(recipe, machine)
    checks.check_model_exists(recipe)
    checked, tokenizer, _ = train.build_inputs(recipe, machine)
    train.load_reward_models(recipe, checked)
    return checked, tokenizer, machine


def sampling_recipe(recipe: Recipe, together: int, batches: int, folder: Path) -> Recipe:
    """Return the recipe for one process whose first optimizer step has one generation batch more than is needed.

    Args:
        recipe: Recipe to preview.
        together: Prompts of a generation batch.
        batches: Generation batches that are needed.
        folder: Folder for what a trainer writes.
    """
    rows = together * recipe.config.num_generations
    micro_batch = min(rows, recipe.config.per_device_train_batch_size)
    while rows % micro_batch:
        micro_batch -= 1
    training = {key: value for key, value in recipe.training.items() if key not in REMOVED_KEYS}
    training |= {**SET_KEYS, "per_device_train_batch_size": micro_batch, "output_dir": str(folder)}
    training["steps_per_generation"] = rows // micro_batch
    training["gradient_accumulation_steps"] = (batches + 1) * (rows // micro_batch)
    return replace(recipe, training=training, sampling=None)


class Watch(TrainerCallback):
    """Record of what a trainer generates and scores, with the times. It ends the training before the first update.

    Args:
        trainer: Trainer of the preview.
        listeners: Listeners to what the rewards log, one per reward.
        needed: Number of generation batches to record.
    """

    def __init__(self, trainer: GRPOTrainer, listeners: Sequence[Reasons], needed: int) -> None:
        self.trainer, self.listeners, self.needed = trainer, listeners, needed
        self.prompts: list[str] = []
        self.rows: list[dict[str, Any]] = []
        """Completions, as in the table of a `Preview`, without their totals."""
        self.batches: list[Batch] = []
        self._generate, self._calculate_rewards = trainer._generate, trainer._calculate_rewards
        self._started: float
        self._generated: Any
        self._generation: float

    def run(self) -> None:
        """Train until enough is recorded. Running out of memory after the first batch has been sampled ends it too."""
        trainer = self.trainer
        trainer.add_callback(self)
        generate = method_replaced(trainer, "_generate", self.generate)
        with generate, method_replaced(trainer, "_calculate_rewards", self.score):
            try:
                trainer.train()
            except Sampled:
                return
            except torch.OutOfMemoryError:
                if not self.batches:
                    raise

    def generate(self, prompts: list[Any]) -> Any:
        """Let the trainer generate, unless enough is recorded."""
        self._end_batch()
        repeats = len(self.batches) == 1 and (self.batches[0].total or 0.0) < WARM_UP_SECONDS
        if len(self.batches) >= self.needed and not repeats:
            raise Sampled
        self._started = time.monotonic()
        self._generated = self._generate(prompts)
        self._generation = self._elapsed()
        return self._generated

    def score(self, rows: list[Any], prompts: list[Any], completions: list[Any], completion_ids: list[Any]) -> Tensor:
        """Let the trainer score, and record the batch."""
        for listener in self.listeners:
            listener.begin(len(prompts))
        before = self._elapsed()
        scores = self._calculate_rewards(rows, prompts, completions, completion_ids)
        lengths = [len(ids) for ids in completion_ids]
        self.batches.append(Batch(len(lengths), sum(lengths), self._generation, self._elapsed() - before))
        cut = are_truncated(self.trainer, completion_ids, self.trainer._stop)
        for row, values in enumerate(scores.tolist()):
            ids = self._generated[0][row]
            if row % self.trainer.num_generations == 0:
                self.prompts.append(self.trainer._tokenizer.decode(ids))
            made = {
                "prompt": len(self.prompts) - 1,
                "prompt_tokens": len(ids),
                "text": completion_text(completions[row]),
                "turns": tuple(transcript(completions[row])),
                "tokens": lengths[row],
                "cut": cut[row],
                "said": {listener.reward.name: listener.rows[row] for listener in self.listeners},
            }
            pays = zip(self.trainer.reward_func_names, values, strict=True)
            self.rows.append({**made, **{f"pay/{name}": value for name, value in pays}})
        return scores

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """End the training: the gradient is complete."""
        self._end_batch()
        raise Sampled

    def _end_batch(self) -> None:
        if self.batches and self.batches[-1].total is None:
            self.batches[-1].total = self._elapsed()

    def _elapsed(self) -> float:
        """Return the seconds since the generation of this batch began."""
        if self.trainer.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - self._started


def cost_of(recipe: Recipe, checked: Checked, device: str, batch: Batch) -> Cost:
    """Return the time of an optimizer step by that of the last batch, which is nearest to training."""
    geometry = checked.geometry
    trained = geometry.completions_per_optimizer_step / geometry.num_processes / batch.completions
    generated = trained / geometry.num_iterations  # a generation batch serves this many times
    step = {"generation": batch.generation * generated, "scoring": batch.scoring * generated}
    if batch.total is not None:
        step["training"] = (batch.total - batch.generation - batch.scoring) * trained
    return Cost(
        device=device,
        tokens_per_second=batch.tokens / batch.generation,
        steps=geometry.optimizer_steps(recipe.config, len(checked.train_dataset)),
        completions=geometry.completions_per_optimizer_step,
        step=step,
    )


@contextmanager
def _one_line_errors(recipe: Recipe) -> Iterator[None]:
    """Turn any error of the block into a `RunFault` of one line. The traceback of an unknown error is printed."""
    try:
        with no_exit():
            yield
    except (UserError, RunFault):
        raise
    except torch.OutOfMemoryError as error:
        raise RunFault(
            f"{recipe.source}: one device has too little memory for the policy and its completions "
            f"({shortened(one_line(error), 120)}): lower `per_device_train_batch_size` or `max_completion_length`"
        ) from error
    except Exception as error:
        secrets = train.known_secrets(recipe)
        say(scrubbed(traceback.format_exc(), secrets), to_stderr=True)
        sentence = scrubbed(one_line(f"{type(error).__name__}: {error}"), secrets)
        raise RunFault(f"{recipe.source}: the policy can't be sampled ({sentence})") from error
