"""Evaluation of a model on held-out problems: `grpo-recipes evaluate` and `compare`.

Every reward of the recipe is measured. If the rows have golds, so is accuracy: *strict* accuracy requires what the
recipe's rewards require (`accuracy.py`), format and answer together; *lenient* accuracy accepts any recognised final
answer. A model that only learnt the format has a large difference between the two.

`evaluate_into` writes `completions.parquet`, with the verdict on each completion, and `evaluation.json`, the shares
with their 95 % intervals. Until then `request.json` describes the evaluation and `parts/` holds the finished batches,
so that an interrupted evaluation can continue.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from datasets import Dataset
from tqdm.auto import tqdm

from grpo_recipes.checks.tokenizer import ChatTemplate
from grpo_recipes.checks.tools import FACTORY, check_rows
from grpo_recipes.data.hub import hub_commit
from grpo_recipes.data.load import load_prompts
from grpo_recipes.data.places import Places, row_numbers
from grpo_recipes.data.prompts import Prompts, rendered
from grpo_recipes.data.sources import has_one_split, unread_notation
from grpo_recipes.evaluation import accuracy, vllm_engine
from grpo_recipes.evaluation.accuracy import MeasuredReward
from grpo_recipes.evaluation.engines import (
    Complete,
    Engine,
    chat_template_of,
    check_model,
    checkpoint_dtype,
    load_engine,
    load_tokenizer,
    quantization_of,
    template_kwargs_of,
)
from grpo_recipes.evaluation.estimates import summarise
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.evaluation.tools import RecipeTools, Rollouts, Turns, tools_of
from grpo_recipes.evaluation.vllm_engine import VLLM, load_vllm
from grpo_recipes.recipe.specs import DatasetSpec
from grpo_recipes.recipe.trl_keys import stop_strings
from grpo_recipes.runs import files
from grpo_recipes.runs.identity import Source, column_digests, weights_of
from grpo_recipes.runs.lock import LOCK, Held, only_writer
from grpo_recipes.runs.record import record_of_model
from grpo_recipes.runs.weights import ADAPTER_CONFIG, adapter_config
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.math.answers import RIGHT_VERDICTS, Judge, accepted_golds, read_golds
from grpo_rewards.redaction import redacted
from grpo_rewards.registry import RewardSpecError

DEFAULT_NEW_TOKENS = 512
REQUEST = "request.json"
DATASET_OPTIONS = ("path", "split", "system_prompt", "prompt_format")

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
        KeyboardInterrupt: Ctrl-C was pressed. The message says what is saved and how to continue.
    """
    check_model(options.model)
    vllm = options.engine()
    recipe = recipe_of(options.model, options.recipe)
    tools = tools_of(recipe, is_trusted=options.recipe is not None)
    specs = recipe.get("rewards") or []
    spec = held_out_spec(recipe.get("dataset", {}), options)
    problems = _problems(spec, options.limit)
    dataset = problems.dataset
    chat_template = chat_template_of(recipe, is_named=options.recipe is not None)
    engine = LazyEngine(options.model, vllm, dataset, template_kwargs_of(recipe), tools, chat_template)
    try:
        settings = _settings(recipe, spec, options, dataset, tools)
        trial_row = dataset[0]
        if engine.rollouts is not None:
            check_rows(engine.rollouts.tools.toolset, [dataset])
            trial_row |= engine.rollouts.trial_columns(trial_row)
        rewards, skipped = accuracy.measurable_rewards(
            specs, trial_row, settings.samples, is_trusted=options.recipe is not None
        )
    except RewardSpecError as error:
        raise error.within("the recipe's `rewards`") from error
    if skipped:
        logger.warning("not evaluated: %s", "; ".join(skipped))
    if engine.rollouts is not None:
        rewards += engine.rollouts.rewards()
    if settings.strict is None and not rewards:
        problem = "they have no `answer`, and no reward of the recipe can score them"
        raise UserError("the held-out rows", problem, "name the recipe with --recipe")
    described: dict[str, Any] = {"model": options.model, "dataset": spec.as_dict()}
    described["engine"] = "transformers" if vllm is None else vllm.name
    if weights := weights_fingerprint(options.model):
        described["weights"] = weights
    if chat_template is not None:
        described["chat_template"] = chat_template.digest
    if rewards:
        described["paid_by"] = [reward.spec for reward in rewards]
    folder = options.folder()
    complete = engine.rollouts or engine
    try:
        return evaluate_into(folder, complete, dataset, settings, described, rewards, engine.record, problems.places)
    except KeyboardInterrupt as error:
        saved = "no batch was finished, so nothing is saved; the same command starts again"
        if any((folder / "parts").glob("[0-9]*.parquet")):
            saved = f"the finished batches are saved in {folder / 'parts'}; the same command continues from there"
        raise KeyboardInterrupt(f"stopped by Ctrl-C: {saved}") from error
    except OSError as error:
        raise UserError(folder, f"the result can't be written there ({error})", "give another --output") from error
    except UserError:
        raise
    except ValueError as error:  # a reward needs a column that the rows lack
        raise UserError("the held-out rows", one_line(error), "add it, or name other rows with --path") from error


def _problems(spec: DatasetSpec, limit: int | None) -> Prompts:
    """Return the rows of a dataset, or the first `limit` rows."""
    if limit is not None and limit < 1:
        raise UserError("--limit", f"it is {limit}", "set it to at least 1, or leave it out for all problems")
    prompts = load_prompts(spec, evaluation=spec.eval_share is not None)
    return prompts if limit is None else prompts.select(np.arange(min(limit, len(prompts.dataset))))


class LazyEngine:
    """Engine that loads its model for the first batch, because a finished evaluation needs none.

    Args:
        model: Folder, or name on the hub.
        vllm: Options of vLLM, or None for transformers.
        dataset: Rows to complete.
        template_kwargs: TRL's `chat_template_kwargs`.
        tools: Tools of the recipe, or None without any.
        chat_template: Chat template that replaces the model's.
    """

    def __init__(
        self,
        model: str,
        vllm: VLLM | None,
        dataset: Dataset,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: RecipeTools | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self.model, self.vllm, self.dataset, self.template_kwargs = model, vllm, dataset, template_kwargs
        self.chat_template = chat_template
        self.rollouts: Rollouts | None = None
        """Completions with tools, or None without any."""
        if tools is not None:
            self.rollouts = Rollouts(tools, partial(self._turns, tools), lambda: self._loaded)

    @cached_property
    def _loaded(self) -> Engine:
        tokenizer = load_tokenizer(self.model, self.chat_template)
        # A chat template that fails is reported before the model is loaded.
        rendered(self.dataset[0]["prompt"], tokenizer, self.template_kwargs or {})
        if self.vllm is None:
            return load_engine(self.model, tokenizer)
        return load_vllm(self.model, self.vllm, tokenizer)

    def _turns(self, tools: RecipeTools) -> Turns:
        tokenizer = load_tokenizer(self.model, self.chat_template)
        return Turns(tools, self.model, tokenizer, self.template_kwargs)

    def __call__(self, prompts: list[Any], settings: Settings) -> list[str]:
        """Complete each prompt once, in order."""
        return self._loaded(prompts, settings)

    def record(self, settings: Settings) -> dict[str, Any]:
        """Return version, precision and sampling settings for `evaluation.json`.

        They do not identify the evaluation.
        """
        if self.vllm is not None:
            made_with = vllm_engine.made_with(self.model, self.vllm)
        else:
            made_with = {"version": version("transformers"), "dtype": checkpoint_dtype(self.model)}
            made_with |= quantization_of(self.model)
        return {"made_with": made_with, "sampling": self._loaded.sampling(settings)}


# Models


def weights_fingerprint(model: str) -> dict[str, Any]:
    """Return checksums of a model's files and of an adapter's base, or the commit on the hub, or {} if unknown."""
    found: dict[str, Any] = {**weights_of(Source(model, hub_commit(model)))}
    config = adapter_config(model) if (Path(model) / ADAPTER_CONFIG).is_file() else None
    if found and config is not None and config.base_model_name_or_path:
        found["base"] = weights_fingerprint(config.base_model_name_or_path)
    return found


# Problems and settings


def held_out_spec(trained: dict[str, Any], options: Request) -> DatasetSpec:
    """Return the dataset to evaluate on: the recipe's held-out rows, changed by the options.

    With `--path` the recipe's `eval_path` and `eval_split` are ignored, because they belong to the file of its
    training.

    Raises:
        UserError: Only the rows of the training are known, the rows have no gold, or a key is wrong.
    """
    given = {key: getattr(options, key) for key in DATASET_OPTIONS if getattr(options, key) is not None}
    raw = dict(trained) if options.dataset in (None, trained.get("name")) else {"name": options.dataset}
    raw.pop("pass_rate", None)  # it selects rows to train on
    if raw.get("eval_share") is not None and not (options.path or options.split):
        return DatasetSpec.parse({**raw, **given})
    raw.pop("eval_share", None)
    if raw.get("name") == "scored":
        fix = "name problems that have them, as in `--dataset gsm8k --path PROBLEMS.jsonl --prompt_format text`"
        raise UserError("the dataset scored", "it holds recorded responses and no final answers", fix)
    held_out = {"path": raw.pop("eval_path", None), "split": raw.pop("eval_split", None)}
    if options.path is not None:
        held_out = {}
        for key in unread_notation(options.path):  # the keys describe the recipe's own files
            raw.pop(key, None)
    trained_path = raw.get("path")
    is_known = options.split or any(held_out.values()) or options.path not in (None, trained_path)
    if not is_known and trained_path is not None and (isinstance(trained_path, list) or has_one_split(trained_path)):
        fix = "name the held-out problems with --path, or a --split of it"
        raise UserError("the held-out rows", f"the run trained on {trained_path}", fix)
    keys: dict[str, Any] = {} if raw else {"name": "gsm8k"}
    test = {} if isinstance(held_out.get("path") or trained_path, list) else {"split": "test"}
    for layer in (raw, test, held_out, given):  # later ones win
        keys |= {key: value for key, value in layer.items() if value is not None}
    known = {field.name for field in fields(DatasetSpec)}
    return DatasetSpec.parse({key: value for key, value in keys.items() if key in known})


def recipe_of(model: str, named: str | None = None) -> dict[str, Any]:
    """Return the keys of the named recipe, or of the run that made the model or checkpoint, or {}."""
    if named is not None:
        from grpo_recipes.recipe.recipe import parse_recipe

        recipe = parse_recipe(["--config", named])
        return {**vars(recipe.config), **recipe.as_dict()}
    record = record_of_model(Path(model))
    return {} if record is None else {**record.get("config", {}), **record["recipe"]}


def _settings(
    recipe: dict[str, Any], spec: DatasetSpec, options: Request, dataset: Dataset, tools: RecipeTools | None
) -> Settings:
    specs = recipe.get("rewards") or []
    tags = options.tags or _tags(recipe, spec)
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
    is_scored = tools is not None and any(one.scores for one in tools.toolset.environments)
    has_golds = not is_scored and (not specs or "answer" in dataset.column_names)
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
        chat_template_kwargs=template_kwargs_of(recipe),
        tools=None if tools is None else tools.identity,
    )


def _tags(recipe: dict[str, Any], spec: DatasetSpec) -> tuple[str, str]:
    """Return the tags of the recipe's rewards, or else those that the system prompt requests."""
    for reward in accuracy.single_specs(recipe.get("rewards") or []):
        if tags := (reward.get("kwargs") or {}).get("tags"):
            return tags[0], tags[1]
    return ("reasoning", "answer") if spec.system_prompt in (None, "reasoning") else ("think", "answer")


# An evaluation in its folder


def evaluate_into(
    folder: Path,
    complete: Complete | Rollouts,
    dataset: Dataset,
    settings: Settings,
    described: dict[str, Any],
    rewards: Sequence[MeasuredReward] = (),
    record: Callable[[Settings], dict[str, Any]] = lambda settings: {},
    places: Places = row_numbers,
) -> dict[str, Any]:
    """Evaluate into a folder, or continue the same evaluation there. A finished evaluation is only read.

    Args:
        folder: Receives `evaluation.json` and `completions.parquet`.
        complete: Policy, or its completions with tools, called once for each batch with a seed made from
            `settings.seed` and the batch's number.
        dataset: Rows with a column `prompt` and the columns that the rewards read.
        settings: Settings of sampling and of the rewards.
        described: Other facts that identify the evaluation (model, weights, dataset, rewards), for JSON.
        rewards: Rewards of the recipe to measure.
        record: Function that returns facts for `evaluation.json` that do not identify the evaluation.
        places: Positions of the rows in the user's files.

    Returns:
        Contents of `evaluation.json`.

    Raises:
        UserError: The folder holds another evaluation, this process lost the folder, or the dataset is empty or has an
            answer that can't be read as a gold.
        UserError: Another process evaluates into the folder.
        RunError: A file of the folder is damaged.
    """
    golds = _golds(dataset, settings, places)
    identity = _identity(dataset, settings, described)
    files.inside(folder, "parts")  # raises if a link leads out of the folder
    # Before the lock is taken: reading a finished evaluation needs no permission to write.
    finished = _finished(folder, identity)
    if finished is not None:
        return finished
    with only_writer(folder, "evaluation") as held:
        finished = _finished(folder, identity)  # by the process that held the folder until now
        if finished is not None:
            return finished
        parts = files.inside(folder, "parts")
        parts.mkdir(exist_ok=True)
        files.write_atomically(folder / REQUEST, json.dumps(identity))
        tables = []
        columns = {**files.EVALUATED, **accuracy.reward_columns(rewards)}
        for number, problems in enumerate(tqdm(_batches(len(dataset), settings), desc="evaluating", unit="batch")):
            part = parts / f"{number:06d}.parquet"
            if not part.is_file():
                batch_settings = replace(settings, seed=settings.seed * 1_000_003 + number)
                table = _completed(problems, complete, dataset, golds, batch_settings, rewards)
                _check_held(held)
                _write_table(part, table)
            tables.append(files.read_table(part, columns, "remove the file: the same command makes it again"))
        table = pd.concat(tables, ignore_index=True)
        highest = {reward.name: reward.highest_pay for reward in rewards}
        summary = {**identity, **record(settings), **summarise(table, highest)}
        _check_held(held)
        _write_table(folder / files.RESULT_TABLE, table)
        files.write_atomically(folder / files.RESULT, json.dumps(summary, indent=2) + "\n")
        # Only now, so that an evaluation that is killed before can continue.
        shutil.rmtree(parts)
        (folder / REQUEST).unlink()
        return summary


def _batches(problems: int, settings: Settings) -> list[range]:
    """Return the numbers of the problems of each batch."""
    size = max(1, settings.batch_size // settings.samples)
    return [range(start, min(start + size, problems)) for start in range(0, problems, size)]


def _identity(dataset: Dataset, settings: Settings, described: Mapping[str, Any]) -> dict[str, Any]:
    """Return what identifies an evaluation, as JSON gives it back. Secrets are hidden."""
    chosen_settings = {key: value for key, value in asdict(settings).items() if value is not None}
    rows = {"problems": len(dataset), "rows": _rows_fingerprint(dataset, settings)}
    identity = {**described, **rows, "settings": chosen_settings}
    return redacted(json.loads(json.dumps(identity, default=str)))  # YAML has dates


def _rows_fingerprint(dataset: Dataset, settings: Settings) -> dict[str, str]:
    """Return a checksum of each column that matters. Path and split do not identify the rows, which may change."""
    needed = {"prompt", "answer"}
    if (settings.tools or {}).get(FACTORY):  # `reset` gets every column
        needed |= {*dataset.column_names}
    for reward in settings.strict or ():
        needed |= {*reward.columns_read, *reward.optional_columns}
    return column_digests(dataset.select_columns(sorted(needed & set(dataset.column_names))))


def _golds(dataset: Dataset, settings: Settings, places: Places) -> list[str] | None:
    """Return the golds as text, or None if no accuracy is measured. Raises `UserError` for one that can't be read."""
    if len(dataset) == 0:
        raise UserError("the held-out rows", "there are none", "name others with --path or --split")
    if settings.strict is None:
        return None
    columns = {name: list(dataset[name]) for name in dataset.column_names if name != "prompt"}
    valid = accuracy.can_score(settings.strict, len(dataset), columns)
    if not all(valid):
        required = accuracy.describe([vars(reward) for reward in settings.strict])
        (first,) = places([valid.index(False)])
        problem = f"the rewards of strict accuracy, {required}, can't score it"
        raise UserError(first, problem, "correct the row, or leave it out")
    golds = columns.get(accuracy.gold_column(settings.strict), [None] * len(dataset))
    return [" or ".join(str(entry) for entry in accepted_golds(gold) if entry is not None) for gold in golds]


def _completed(
    problems: Iterable[int],
    complete: Complete | Rollouts,
    dataset: Dataset,
    golds: list[str] | None,
    settings: Settings,
    rewards: Sequence[MeasuredReward],
) -> pd.DataFrame:
    """Return one row for each completion of some problems, with its verdicts and scores."""
    places = [problem for problem in problems for _ in range(settings.samples)]
    rows = [dataset[place] for place in places]
    prompts = [row["prompt"] for row in rows]
    columns = {name: [row[name] for row in rows] for name in dataset.column_names if name != "prompt"}
    seen, texts, more = prompts, [], {}
    completions: Sequence[Any]
    if isinstance(complete, Rollouts):
        played = complete.play(rows, settings)
        seen, completions, texts, more = played.prompts, played.completions, played.texts, played.columns()
        if played.environments:
            columns["environments"] = played.environments
    else:
        completions = texts = complete(prompts, settings)
    table = {
        "problem": places,
        "sample": [number % settings.samples for number in range(len(places))],
        "prompt": [prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False) for prompt in prompts],
        "completion": texts,
        **more,
        **accuracy.reward_values(rewards, seen, completions, columns),
    }
    if golds is None or settings.strict is None:
        return pd.DataFrame(table)
    table["gold"] = [golds[place] for place in places]
    table["answer"] = accuracy.stated_answers(settings.strict, texts, columns, settings.tags)
    table["strict"] = accuracy.is_right(settings.strict, texts, columns)
    decimal = accuracy.decimal(settings.strict)
    judge = Judge(decimal=decimal)
    table["lenient"] = []
    # The golds as the rows have them: a number has a point, whatever the mark of the text.
    written = columns.get(accuracy.gold_column(settings.strict), table["gold"])
    for gold, answer, is_strict in zip(written, table["answer"], table["strict"], strict=True):
        verdict, _ = judge.best_verdict(read_golds(gold, decimal), answer)
        table["lenient"].append(is_strict or verdict in RIGHT_VERDICTS)
    return pd.DataFrame(table).astype({"answer": "string"})


def _check_held(held: Held) -> None:
    """Raise `UserError` if another process has taken the folder over, or if it was moved or removed."""
    if loss := held.loss():
        fix = "wait for the other evaluation or stop it, and the same command continues from what is there"
        raise UserError(loss, "this evaluation stops and writes nothing more there", fix)


def _finished(folder: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result if the folder holds this evaluation, finished. Raises `UserError` if it holds another one."""
    fix = "remove the folder, or give another --output"
    shapes: dict[str, files.Shape] = {files.RESULT: files.EVALUATION, REQUEST: {}}
    for name, shape in shapes.items():
        try:
            found = files.read_object(folder / name, shape, fix)
        except FileNotFoundError:
            continue
        if difference := _difference(found, identity):
            raise UserError(folder, f"it holds another evaluation: {difference}", fix)
        return found if name == files.RESULT else None
    if folder.exists() and any(not path.name.startswith(LOCK) for path in folder.iterdir()):
        raise UserError(folder, "it holds files that are not an evaluation", "give another --output")
    return None


CHANGED = {
    "weights": "the model's weights or its tokenizer have changed since",
    "rows": "the problems have changed since",
    "chat_template": "the chat template of the recipe has changed since",
    "strict": "the rewards of strict accuracy (`settings.strict`) have changed since",
    "paid_by": "the rewards of the recipe have changed since",
}


def _difference(found: dict[str, Any], identity: dict[str, Any], prefix: str = "") -> str | None:
    """Return the first difference between the evaluation in the folder and the requested one, or None."""
    for key, value in identity.items():
        other = found.get(key)
        if other == value or (key in ("model", "path") and _is_one_path(other, value)):
            continue
        if key == "model" and not prefix and found.get("weights") == identity.get("weights") is not None:
            continue  # a copy of the model
        if other is None and not prefix:
            return f"it does not record `{key}`"
        if key not in CHANGED and isinstance(value, dict) and isinstance(other, dict):
            # A key that only the folder's evaluation has is a difference too.
            return _difference(other, {**dict.fromkeys(other), **value}, f"{prefix}{key}.")
        return CHANGED.get(key, f"{prefix}{key} was {other!r} and is now {value!r}")
    return None


def _is_one_path(first: Any, second: Any) -> bool:
    """Return True if two names are paths of the same existing file or folder."""
    paths = [Path(name) for name in (first, second) if isinstance(name, str)]
    return len(paths) == 2 and all(path.exists() for path in paths) and paths[0].samefile(paths[1])


def _write_table(path: Path, table: pd.DataFrame) -> None:
    with files.replacing(path) as part:
        table.to_parquet(part, index=False)
