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
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from grpo_recipes.checks.checks import Machine, check_model_exists, check_packages, dry_config
from grpo_recipes.checks.geometry import geometry_of
from grpo_recipes.generation.models import method_replaced
from grpo_recipes.process.faults import RunFault, no_exit
from grpo_recipes.recipe.recipe import Recipe, parse_recipe
from grpo_recipes.reports.preview import Preview
from grpo_recipes.reports.transcript import transcript
from grpo_recipes.run.build import bare_trainer
from grpo_recipes.run.endings import known_secrets
from grpo_recipes.run.inputs import Inputs, build_inputs, load_reward_models, training_arguments
from grpo_recipes.run.launcher import choose_layout
from grpo_recipes.training.trainer import GRPOTrainer
from grpo_recipes.training.trl_patches import are_truncated
from grpo_rewards.completions import completion_text
from grpo_rewards.errors import UserError, one_line, shortened
from grpo_rewards.explain import Reasons
from grpo_rewards.redaction import scrubbed
from grpo_rewards.terminal import say

PROCESS_KEYS = ("deepspeed", "fsdp", "fsdp_config", "generation_batch_size")
"""Keys of training about several processes."""

RUN_KEYS = ("eval_on_start", "load_best_model_at_end", "log_completions_hub_repo", "push_to_hub")
"""Keys of training about evaluations and about what a run writes."""


class EnoughSampled(Exception):
    """End of a preview's training before its first update: enough completions are sampled and scored."""


def preview(arguments: Sequence[str], *, prompts: int, options: Sequence[str] = ()) -> Preview:
    """Sample the untrained policy of a recipe.

    Args:
        arguments: Arguments of the training command, which name the recipe.
        prompts: Number of prompts, each with `num_generations` completions.
        options: Options of the command itself, for which an unknown argument may be a misspelling.

    Raises:
        UserError: The recipe can't run as written, or the policy can't be loaded.
        RunFault: The policy or a reward failed on the sample.
    """
    if prompts < 1:
        raise UserError("--prompts", f"it is {prompts}", "set it to at least 1")
    recipe = parse_recipe(arguments, options)
    inputs = checked_inputs(recipe)
    checked = inputs.checked
    listeners = [Reasons(reward) for reward in checked.rewards]
    explained = replace(checked, rewards=[listener.explained() for listener in listeners], eval_dataset=None)
    together = max(1, min(prompts, checked.geometry.completions_per_rank // checked.geometry.num_generations))
    batches = math.ceil(prompts / together)
    with tempfile.TemporaryDirectory(prefix="grpo-preview-") as folder, _one_line_errors(recipe):
        sampling = sampling_recipe(recipe, together, batches, Path(folder))
        training_args = training_arguments(sampling)
        # Only the first GPU is used. transformers would otherwise split a batch over all of them.
        training_args._n_gpu = min(training_args.n_gpu, 1)
        trainer = bare_trainer(replace(inputs, recipe=sampling, checked=explained), training_args)
        watch = Watch(trainer, listeners, prompts)
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
        seconds_per_completion=watch.seconds / len(rows),
    )


def checked_inputs(recipe: Recipe) -> Inputs:
    """Check the recipe for the processes that `train` would start here, and load all but the policy."""
    if recipe.offline is not None:
        problem = "it trains on recorded responses, so a preview has nothing to generate"
        raise recipe.error("`offline`", problem, "read the responses instead")
    layout = choose_layout(None, None, use_cpu=recipe.config.use_cpu)
    machine = replace(Machine.here(), num_processes=layout.num_processes)
    check_packages(recipe)
    geometry_of(recipe, machine.num_processes)  # names the fix, which TRL's own message lacks
    dry_config(recipe, machine)
    check_model_exists(recipe)
    inputs = build_inputs(recipe, machine)
    load_reward_models(recipe, inputs.checked)
    return inputs


def sampling_recipe(recipe: Recipe, together: int, batches: int, folder: Path) -> Recipe:
    """Return the recipe for one process whose first optimizer step has the generation batches that are needed.

    Args:
        recipe: Recipe to preview.
        together: Prompts of a generation batch.
        batches: Number of generation batches.
        folder: Folder for what a trainer writes.
    """
    rows = together * recipe.config.num_generations
    micro_batch = min(rows, recipe.config.per_device_train_batch_size)
    while rows % micro_batch:
        micro_batch -= 1
    removed = {*PROCESS_KEYS, *RUN_KEYS, "resume_from_checkpoint"}
    training = {key: value for key, value in recipe.training.items() if key not in removed}
    training.update(num_iterations=1, max_steps=1, eval_strategy="no", save_strategy="no", report_to="none")
    training.update(disable_tqdm=True, output_dir=str(folder), per_device_train_batch_size=micro_batch)
    training["steps_per_generation"] = rows // micro_batch
    training["gradient_accumulation_steps"] = batches * (rows // micro_batch)
    return replace(recipe, training=training, sampling=None)


class Watch:
    """Record of what a trainer generates and scores. It ends the training before the first update.

    Args:
        trainer: Trainer of the preview.
        listeners: Listeners to what the rewards log, one per reward.
        needed: Number of prompts to record.
    """

    def __init__(self, trainer: GRPOTrainer, listeners: Sequence[Reasons], needed: int) -> None:
        self.trainer, self.listeners, self.needed = trainer, listeners, needed
        self.prompts: list[str] = []
        self.rows: list[dict[str, Any]] = []
        """Completions, as in the table of a `Preview`, without their totals."""
        self.seconds = 0.0
        """Time of all generations and rewards."""
        self._generate, self._calculate_rewards = trainer._generate, trainer._calculate_rewards
        self._started: float
        self._prompt_ids: list[list[int]]

    def run(self) -> None:
        """Train until enough is recorded."""
        generate = method_replaced(self.trainer, "_generate", self.generate)
        with generate, method_replaced(self.trainer, "_calculate_rewards", self.score), suppress(EnoughSampled):
            self.trainer.train()

    def generate(self, prompts: list[Any]) -> Any:
        """Let the trainer generate."""
        self._started = time.monotonic()
        generated = self._generate(prompts)
        self._prompt_ids = generated[0]
        return generated

    def score(self, rows: list[Any], prompts: list[Any], completions: list[Any], completion_ids: list[Any]) -> Tensor:
        """Let the trainer score, and record the batch."""
        for listener in self.listeners:
            listener.begin(len(prompts))
        scores = self._calculate_rewards(rows, prompts, completions, completion_ids)
        cut = are_truncated(self.trainer, completion_ids, self.trainer._stop)
        for row, values in enumerate(scores.tolist()):
            if row % self.trainer.num_generations == 0:
                self.prompts.append(self.trainer._tokenizer.decode(self._prompt_ids[row]))
            sampled = {
                "prompt": len(self.prompts) - 1,
                "prompt_tokens": len(self._prompt_ids[row]),
                "text": completion_text(completions[row]),
                "turns": tuple(transcript(completions[row])),
                "tokens": len(completion_ids[row]),
                "cut": cut[row],
                "said": {listener.reward.name: listener.rows[row] for listener in self.listeners},
            }
            pays = zip(self.trainer.reward_func_names, values, strict=True)
            self.rows.append(sampled | {f"pay/{name}": value for name, value in pays})
        self.seconds += time.monotonic() - self._started
        if len(self.prompts) >= self.needed:
            raise EnoughSampled
        return scores


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
        secrets = known_secrets(recipe)
        say(scrubbed(traceback.format_exc(), secrets), to_stderr=True)
        sentence = scrubbed(one_line(f"{type(error).__name__}: {error}"), secrets)
        raise RunFault(f"{recipe.source}: the policy can't be sampled ({sentence})") from error
