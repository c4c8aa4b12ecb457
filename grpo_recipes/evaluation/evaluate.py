"""Evaluation of a model on held-out problems: `grpo-recipes evaluate`.

`evaluate_request` makes five things from the options, in this order:

- the model, whose files are checked (`saved_model.py`), and its recipe;
- the problems: held-out rows with their prompts (`problems.py`);
- the policy, which completes them with tools or without (`policy.py`, `tools.py`), on an engine (`engines.py`,
  `vllm_engine.py`) that is loaded for the first batch;
- the settings of sampling, and the rewards that can be measured (`settings.py`, `accuracy.py`);
- the folder of the result (`store.py`).

`evaluate_into` then completes one batch of problems after another, scores it (`scores.py`), stores it, and summarises
all batches (`summary.py`).

Every reward of the recipe is measured. If the rows have golds, so is accuracy: *strict* accuracy requires what the
recipe's rewards require, format and answer together; *lenient* accuracy accepts any recognised final answer. A model
that only learnt the format has a large difference between the two.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from datasets import Dataset
from tqdm.auto import tqdm

from grpo_recipes.data.places import Places, row_numbers
from grpo_recipes.evaluation import accuracy, store
from grpo_recipes.evaluation.accuracy import MeasuredReward
from grpo_recipes.evaluation.policy import ModelPolicy, Policy
from grpo_recipes.evaluation.problems import DATASET_OPTIONS, held_out_spec, load_problems, requested_tags
from grpo_recipes.evaluation.saved_model import SavedModel
from grpo_recipes.evaluation.scores import Scoring
from grpo_recipes.evaluation.settings import DEFAULT_NEW_TOKENS, Settings, chat_template_of, template_kwargs_of
from grpo_recipes.evaluation.summary import summarise
from grpo_recipes.evaluation.tools import RecipeTools, ToolPolicy, tools_of
from grpo_recipes.evaluation.vllm_engine import VLLM
from grpo_recipes.recipe.dataset import DatasetSpec
from grpo_recipes.recipe.trl_keys import stop_strings
from grpo_recipes.runs import files
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.registry import RewardSpecError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of `grpo-recipes evaluate`: a model, and differences from the held-out rows of its recipe."""

    model: str
    recipe: str | None = None
    dataset: str | None = None
    path: str | None = None
    split: str | None = None
    system_prompt: str | None = None
    prompt_format: str | None = None
    tags: tuple[str, str] | None = None
    samples: int = 1
    temperature: float | None = None
    max_new_tokens: int | None = None
    limit: int | None = None
    batch_size: int = 64
    seed: int = 0
    vllm: bool = False
    vllm_server_base_url: str | None = None
    vllm_tensor_parallel_size: int | None = None
    vllm_max_model_length: int | None = None
    vllm_gpu_memory_utilization: float | None = None
    output: Path | None = None

    def engine(self) -> VLLM | None:
        """Return the options of vLLM, or None for transformers. Raises `UserError` if they are given without --vllm."""
        given = {field.name: getattr(self, field.name) for field in fields(VLLM)}
        if self.vllm:
            return VLLM(**given)
        for name, value in given.items():
            if value is not None:
                raise UserError(f"--{name}", "it is an option of vLLM", "add --vllm")
        return None

    def folder(self, table: str = "") -> Path:
        """Return the folder for the result, or for one of several tables."""
        if self.output is not None:
            return self.output / table
        suffix = f"-{table}" if table else ""
        if self.samples > 1:
            suffix += f"-{self.samples}-samples"
        if os.path.isdir(self.model):
            return files.inside(Path(self.model), files.EVALUATIONS, f"{files.AFTER}{suffix}")
        return Path("runs") / files.EVALUATIONS / f"{self.model.replace('/', '--')}{suffix}"

    def on_each(self, paths: Sequence[str]) -> list[Request]:
        """Return one request for each held-out table. Several tables get a folder each."""
        if len(paths) < 2:
            return [replace(self, path=paths[0] if paths else None)]
        names = [Path(path).name.partition(".")[0] or "rows" for path in paths]
        requests = []
        for place, (name, path) in enumerate(zip(names, paths, strict=True)):
            table = name if names.count(name) == 1 else f"{name}-{place}"
            requests.append(replace(self, path=path, output=self.folder(table)))
        return requests


def evaluate_model(model: str | Path, **options: Any) -> dict[str, Any]:
    """Evaluate a model on held-out rows, or continue its evaluation.

    Args:
        model: Folder of a model, adapter or run, or a name on the hub.
        **options: Fields of `Request`.

    Returns:
        Contents of `evaluation.json`.

    Raises:
        UserError: See `evaluate_request`.
    """
    return evaluate_request(Request(model=str(model), **options))


def evaluate_request(options: Request) -> dict[str, Any]:
    """Run or continue the evaluation that is requested, and return the contents of `evaluation.json`.

    Raises:
        UserError: An option, the recipe, the dataset or a file of the model is wrong.
        KeyboardInterrupt: Ctrl-C was pressed. The message names what is saved and how to continue.
    """
    model = SavedModel.checked(options.model)
    vllm = options.engine()
    recipe, is_trusted = model.recipe(options.recipe), options.recipe is not None
    tools = tools_of(recipe, is_trusted=is_trusted)
    spec = held_out_spec(recipe.get("dataset", {}), **{key: getattr(options, key) for key in DATASET_OPTIONS})
    problems = load_problems(spec, options.limit)
    kind: Callable[..., ModelPolicy] = ModelPolicy if tools is None else partial(ToolPolicy, tools=tools)
    policy = kind(
        model=model,
        dataset=problems.dataset,
        vllm=vllm,
        chat_template=chat_template_of(recipe, is_named=is_trusted),
        template_kwargs=template_kwargs_of(recipe),
    )
    try:
        settings = _settings(options, recipe, spec, policy, tools)
        specs, trial = recipe.get("rewards") or [], policy.trial_row()
        rewards, skipped = accuracy.measurable_rewards(specs, trial, settings.samples, is_trusted=is_trusted)
    except RewardSpecError as error:
        raise error.within("the recipe's `rewards`") from error
    if skipped:
        logger.warning("not evaluated: %s", "; ".join(skipped))
    rewards += policy.rewards()
    if settings.strict is None and not rewards:
        problem = "they have no `answer`, and no reward of the recipe can score them"
        raise UserError("the held-out rows", problem, "name the recipe with --recipe")
    described = _described(policy, spec, rewards)
    folder = options.folder()
    try:
        return evaluate_into(folder, policy, problems.dataset, settings, described, rewards, problems.places)
    except KeyboardInterrupt as error:
        saved = "no batch was finished, so nothing is saved; the same command starts again"
        if store.has_batches(folder):
            saved = f"the finished batches are saved in {folder / store.PARTS}; the same command continues from there"
        raise KeyboardInterrupt(f"stopped by Ctrl-C: {saved}") from error
    except OSError as error:
        raise UserError(folder, f"the result can't be written there ({error})", "give another --output") from error
    except UserError:
        raise
    except ValueError as error:  # a reward needs a column that the rows lack
        raise UserError("the held-out rows", one_line(error), "add it, or name other rows with --path") from error


def _described(policy: ModelPolicy, spec: DatasetSpec, rewards: Sequence[MeasuredReward]) -> dict[str, Any]:
    """Return the facts that identify an evaluation, except its rows and its settings, for JSON."""
    engine = "transformers" if policy.vllm is None else policy.vllm.name
    described: dict[str, Any] = {"model": policy.model.name, "dataset": spec.as_dict(), "engine": engine}
    if weights := policy.model.fingerprint():
        described["weights"] = weights
    if policy.chat_template is not None:
        described["chat_template"] = policy.chat_template.digest
    if rewards:
        described["paid_by"] = [reward.spec for reward in rewards]
    return described


def _settings(
    options: Request, recipe: Mapping[str, Any], spec: DatasetSpec, policy: ModelPolicy, tools: RecipeTools | None
) -> Settings:
    """Return the settings of the options, and those of the recipe where an option is missing."""
    specs = recipe.get("rewards") or []
    tags = options.tags or requested_tags(recipe, spec)
    try:
        strict = accuracy.strict_rewards(specs, tags, override_tags=bool(options.tags))
    except RewardSpecError:
        raise
    except ValueError as error:
        raise UserError("--tags", str(error), "name two tags, as in --tags think answer") from error
    temperature = options.temperature
    if temperature is None:
        temperature = 0.0 if options.samples == 1 else 1.0
    max_new_tokens = options.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = recipe.get("max_completion_length") or DEFAULT_NEW_TOKENS
    # A recipe without a correctness reward is held to the golds too, if there are any. An environment's own reward is
    # one: its rows may have an `answer` that no completion states.
    has_golds = not policy.rewards() and (not specs or "answer" in policy.dataset.column_names)
    has_golds |= accuracy.has_correctness(specs)
    return Settings(
        tags=tags,
        samples=options.samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        batch_size=options.batch_size,
        seed=options.seed,
        strict=strict if has_golds else None,
        stop=stop_strings(recipe.get("generation_kwargs")),
        chat_template_kwargs=policy.template_kwargs,
        tools=None if tools is None else tools.identity,
    )


def evaluate_into(
    folder: Path,
    policy: Policy,
    dataset: Dataset,
    settings: Settings,
    described: Mapping[str, Any],
    rewards: Sequence[MeasuredReward] = (),
    places: Places = row_numbers,
) -> dict[str, Any]:
    """Evaluate into a folder, or continue the same evaluation there. A finished evaluation is only read.

    Args:
        folder: Receives `evaluation.json` and `completions.parquet`.
        policy: Policy, called once for each batch with a seed made from `settings.seed` and the batch's number.
        dataset: Rows with a column `prompt` and the columns that the rewards read.
        settings: Settings of sampling and of the rewards.
        described: Other facts that identify the evaluation (model, weights, dataset, rewards), for JSON.
        rewards: Rewards of the recipe to measure.
        places: Positions of the rows in the user's files.

    Returns:
        Contents of `evaluation.json`.

    Raises:
        UserError: The folder holds another evaluation, another process evaluates into it or has taken it over, or the
            dataset is empty or has an answer that can't be read as a gold.
        RunError: A file of the folder is damaged.
    """
    scoring = Scoring(dataset, settings, rewards, places)
    stored = store.EvaluationFolder(folder, store.identity_of(dataset, settings, described))
    if (finished := stored.finished()) is not None:
        return finished
    with stored.locked():
        if (finished := stored.finished()) is not None:  # by the process that held the folder until now
            return finished
        stored.begin()
        tables = []
        size = max(1, settings.batch_size // settings.samples)
        for number, start in enumerate(tqdm(range(0, len(dataset), size), desc="evaluating", unit="batch")):
            part = stored.part(number)
            if not part.is_file():
                batch = range(start, min(start + size, len(dataset)))
                problems = [problem for problem in batch for _ in range(settings.samples)]
                rows = [dataset[problem] for problem in problems]
                completions = policy.complete(rows, replace(settings, seed=settings.seed * 1_000_003 + number))
                stored.write_table(part, scoring.table(problems, rows, completions))
            tables.append(files.read_table(part, scoring.columns, "remove the file: the same command makes it again"))
        table = pd.concat(tables, ignore_index=True)
        summary = {**stored.identity, **policy.record(settings), **summarise(table, scoring.highest)}
        stored.finish(table, summary)
        return summary
