"""A policy on held-out problems: what is evaluated, its files, its accuracy and pay; `grpo-recipes evaluate`.

Every reward of the recipe is measured (`results/paid.py`). Where the rows have golds, accuracy is too: *strict* accuracy asks
for what the recipe's own rewards ask for (`results/strict.py`), layout and answer together; *lenient* accuracy accepts any
recognised final answer. Their difference tells a model that learnt to calculate from one that learnt a layout.

`evaluate_into` writes `completions.parquet`, every completion with its verdict, and `evaluation.json`, the shares with
their 95 % intervals. Until then `request.json` says what is evaluated, and `parts/` holds the finished batches, so that a
killed evaluation continues where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from datasets import Dataset
from tqdm.auto import tqdm

from grpo_recipes.checks.model_sizes import check_model_sizes
from grpo_recipes.checks.rehearsal import chosen
from grpo_recipes.data.hub import hub_commit, is_missing
from grpo_recipes.data.load import load
from grpo_recipes.data.sources import has_one_split
from grpo_recipes.evaluation import accuracy as strict
from grpo_recipes.evaluation import paid, vllm_engine
from grpo_recipes.evaluation.engines import Complete, Engine, checkpoint_dtype, load_engine
from grpo_recipes.evaluation.estimates import Estimate, mcnemar, mean_share, paired_difference, pass_at_k
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.evaluation.vllm_engine import VLLM, load_vllm
from grpo_recipes.recipe.specs import DatasetSpec
from grpo_recipes.recipe.trl_keys import stop_strings
from grpo_recipes.runs import files
from grpo_recipes.runs.lock import EVALUATION, LOCK, Held, only_writer
from grpo_recipes.runs.record import read_record
from grpo_recipes.runs.weights import (
    ADAPTER_CONFIG,
    adapter_config,
    check_descriptions,
    check_weight_files,
    identify_weights,
    weight_files,
)
from grpo_rewards.errors import UserError
from grpo_rewards.files import read_text
from grpo_rewards.math.answers import Judge, read_gold
from grpo_rewards.redaction import redacted
from grpo_rewards.registry import RewardSpecError
from grpo_rewards.terminal import Cell, Part, Table

DEFAULT_NEW_TOKENS = 512
REQUEST = "request.json"

_RIGHT = frozenset({"exact", "equal", "symbolic"})


def evaluate_into(
    folder: Path,
    complete: Complete,
    dataset: Dataset,
    settings: Settings,
    described: dict[str, Any],
    rewards: Sequence[paid.OwnReward] = (),
    made_with: Callable[[], dict[str, Any]] = dict,
    sampling: Callable[[Settings], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Evaluate into a folder, or continue the same evaluation there; one that is finished is only read.

    Args:
        folder: receives `evaluation.json` and `completions.parquet`.
        complete: the policy; called once for each batch, whose seed is `settings.seed` and the batch's number.
        dataset: a column `prompt`, and the columns that the rewards read.
        settings: how to sample and judge.
        described: what else identifies the evaluation (the model, its weights, the dataset, its rewards), ready for JSON.
        rewards: the recipe's own, which are measured too.
        made_with: of what generates, ready for JSON: recorded, and no part of what the evaluation is.
        sampling: the sampling settings in force under the engine's names, ready for JSON; recorded likewise.

    Returns:
        What `evaluation.json` holds.

    Raises:
        UserError: the folder holds another evaluation, or this process lost the folder meanwhile.
        RunLocked: another evaluation writes to the folder.
        RunError: a file of the folder is damaged.
        ValueError: the dataset is empty, or an answer can't be read as a gold.
    """
    golds = _golds(dataset, settings)
    rows = {"problems": len(dataset), "rows": _rows_fingerprint(dataset, settings)}
    chosen = {key: value for key, value in asdict(settings).items() if value is not None}
    asked = redacted(json.loads(json.dumps({**described, **rows, "settings": chosen})))
    files.inside(folder, "parts")  # raises if a link leads out of the folder
    if _is_finished(folder, asked):  # to read it takes no lock, and no permission to write
        return files.read_object(folder / "evaluation.json", files.EVALUATION)
    with only_writer(folder, EVALUATION) as held:
        if _is_finished(folder, asked):  # by an evaluation that held the folder until now
            return files.read_object(folder / "evaluation.json", files.EVALUATION)
        return _evaluate_held(held, complete, dataset, golds, settings, asked, rewards, made_with(), sampling)


def _evaluate_held(
    held: Held,
    complete: Complete,
    dataset: Dataset,
    golds: list[str] | None,
    settings: Settings,
    asked: dict[str, Any],
    rewards: Sequence[paid.OwnReward],
    made_by: dict[str, Any],
    sampling: Callable[[Settings], dict[str, Any]] | None,
) -> dict[str, Any]:
    """Make the batches of an evaluation that are missing, then its result, in a folder that this process holds."""
    folder = held.folder
    parts = files.inside(folder, "parts")
    parts.mkdir(parents=True, exist_ok=True)
    files.write_atomically(folder / REQUEST, json.dumps(asked))
    size = max(1, settings.batch_size // settings.samples)
    batches = [range(start, min(start + size, len(dataset))) for start in range(0, len(dataset), size)]
    for number, problems in enumerate(tqdm(batches, desc="evaluating", unit="batch")):
        part = parts / f"{number:06d}.parquet"
        if not part.is_file():
            batch_settings = replace(settings, seed=settings.seed * 1_000_003 + number)
            table = _completed(problems, complete, dataset, golds, batch_settings, rewards)
            _check_held(held)
            _write_table(part, table)
    again = "remove the file: the same command makes it again"
    columns = {**files.EVALUATED, **paid.columns_of(rewards)}
    made = (files.read_table(parts / f"{number:06d}.parquet", columns, again) for number in range(len(batches)))
    table = pd.concat(made, ignore_index=True)
    recorded: dict[str, Any] = {"made_with": made_by} if made_by else {}
    if sampling is not None:
        recorded["sampling"] = sampling(settings)
    summary = {**asked, **recorded, **summarise(table)}
    _check_held(held)
    _write_table(folder / "completions.parquet", table)
    files.write_atomically(folder / "evaluation.json", json.dumps(summary, indent=2) + "\n")
    shutil.rmtree(parts)
    (folder / REQUEST).unlink()
    return summary


def _check_held(held: Held) -> None:
    """Raise `UserError` if another evaluation has taken the folder over, or if the folder was moved or removed."""
    if loss := held.loss():
        raise UserError(f"{loss.reason}; this evaluation stops and writes nothing more there: {loss.fix}")


def summarise(table: pd.DataFrame) -> dict[str, Any]:
    """The shares of an evaluation, each with its 95 % interval, from its completions (columns of `completions.parquet`).

    `strict` and `lenient` are mean shares over problems; `pass_at` the chance that one of k completions is strictly right;
    `majority` the share of problems whose commonest stated answer is right, the first stated winning a tie; all of them only
    where there are golds. `rewards` is what `paid.summarised` says of the recipe's own.
    """
    rewards = {"rewards": paid.summarised(table)} if paid.names_in(table) else {}
    return {**(_accuracy(table) if "strict" in table else {}), **rewards}


def _accuracy(table: pd.DataFrame) -> dict[str, Any]:
    problems = [rows for _, rows in table.groupby("problem", sort=True)]
    samples = len(problems[0])
    shares = {name: mean_share([rows[name].mean() for rows in problems]) for name in ("strict", "lenient")}
    summary: dict[str, Any] = {name: share.as_dict() for name, share in shares.items()}
    if samples > 1:
        summary["pass_at"] = {
            str(k): mean_share([pass_at_k(samples, int(rows["strict"].sum()), k) for rows in problems]).as_dict()
            for k in paid.powers(samples)
        }
        summary["majority"] = mean_share([float(_majority(rows)) for rows in problems]).as_dict()
    return summary


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Two finished evaluations of the same problems: the paired differences second - first, and McNemar's test.

    With several samples a problem the difference is of shares, and the test of majority votes. Of rewards those are compared
    that both recipes have alike.

    Raises:
        UserError: a folder has no finished evaluation, or they are not on the same problems, or not judged alike.
        RunError: a file of theirs is damaged.
    """
    records = [_read_record(folder) for folder in (first, second)]
    if records[0]["settings"].get("strict") != records[1]["settings"].get("strict"):
        raise UserError(
            f"{first} and {second} mean different things by strict (`settings.strict` of their evaluation.json): evaluate both "
            "with the same --recipe"
        )
    alike = [spec for spec in records[0].get("paid_by", []) if spec in records[1].get("paid_by", [])]
    tables = [_read_completions(folder, alike) for folder in (first, second)]
    prompts = [table.groupby("problem")["prompt"].first() for table in tables]
    if not prompts[0].equals(prompts[1]):
        raise UserError(f"{first} and {second} are not on the same problems: evaluate both with the same options")
    result: dict[str, Any] = {"problems": len(prompts[0]), "warnings": _unlike(*records)}
    if rewards := paid.compared(*tables):
        result["rewards"] = rewards
    if not all("strict" in table for table in tables):
        return result
    groups = [[rows for _, rows in table.groupby("problem", sort=True)] for table in tables]
    for name in ("strict", "lenient"):
        shares = [[float(rows[name].mean()) for rows in problems] for problems in groups]
        result[name] = {
            "first": mean_share(shares[0]).as_dict(),
            "second": mean_share(shares[1]).as_dict(),
            "difference": paired_difference(*shares).as_dict(),
        }
    votes = [[_vote(rows) for rows in problems] for problems in groups]
    only = [sum(one and not other for one, other in zip(*pair, strict=True)) for pair in (votes, votes[::-1])]
    result["mcnemar"] = {"only_first": only[0], "only_second": only[1], "p": mcnemar(*only)}
    return result


def _unlike(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """A sentence if two evaluations were generated by different engines, versions or dtypes."""
    made = [{"engine": record.get("engine"), **record.get("made_with", {})} for record in (first, second)]
    if made[0] == made[1]:
        return []
    keys = [key for key in {**made[0], **made[1]} if made[0].get(key) != made[1].get(key)]
    differing = "; ".join(f"{key} {_or_unknown(made[0].get(key))} and {_or_unknown(made[1].get(key))}" for key in keys)
    return [f"A and B were not generated alike ({differing}): a part of the difference may be that"]


def _or_unknown(value: Any) -> str:
    return "not recorded" if value is None else str(value)


def describe(summary: dict[str, Any]) -> list[Part]:
    """An evaluation for the terminal: its shares in a table, and in another what each reward pays."""
    rows: dict[str, Any] = {name: summary[name] for name in ("strict", "lenient") if name in summary}
    rows |= {f"pass@{k}": share for k, share in summary.get("pass_at", {}).items()}
    if "majority" in summary:
        rows["majority"] = summary["majority"]
    samples = summary["settings"]["samples"]
    head = f"{summary['problems']} problems, {samples} completion{'s' * (samples > 1)} each; 95 % intervals"
    parts: list[Part] = [Cell(head, "head")]
    if rows:
        parts.append(Table([(name, Estimate.from_dict(share)) for name, share in rows.items()], ("accuracy", "share")))
    if sampling := summary.get("sampling"):  # evaluations of earlier versions have none
        parts.append(Cell(f"  sampling: {', '.join(f'{key} {value}' for key, value in sampling.items())}", "dim"))
    if "strict" in summary:
        parts.append(Cell(f"  strict: {strict.describe(summary['settings']['strict'])}", "dim"))
    if rewards := summary.get("rewards", {}):
        parts += ["", _described_rewards(rewards)]
    return parts


def _described_rewards(rewards: dict[str, Any]) -> Table:
    """What each of the recipe's rewards pays: a column for each thing that one of them has."""
    columns = {
        "mean": lambda entry: (
            Estimate.from_dict(entry["mean"]) if "mean" in entry else "fewer than two problems scored"
        ),
        "passed": lambda entry: Estimate.from_dict(entry["passed"]) if "passed" in entry else "",
        "majority": lambda entry: Estimate.from_dict(entry["majority"]) if "majority" in entry else "",
        "pass": lambda entry: ", ".join(
            f"@{k} {Estimate.from_dict(share)}" for k, share in entry.get("pass_at", {}).items()
        ),
        "not scored": lambda entry: entry["unscored"] or "",
    }
    table = {head: [str(read(entry)) for entry in rewards.values()] for head, read in columns.items()}
    table = {head: cells for head, cells in table.items() if any(cells)}
    return Table(list(zip(rewards, *table.values(), strict=True)), ("reward", *table))


def describe_comparison(result: dict[str, Any]) -> list[Part]:
    """Two evaluations side by side for the terminal, their paired differences, and McNemar's test."""
    compared: dict[str, Any] = {name: result[name] for name in ("strict", "lenient") if name in result}
    compared |= {
        f"{name}, {what}": values for name, entry in result.get("rewards", {}).items() for what, values in entry.items()
    }
    rows: list[tuple[object, ...]] = []
    for name, values in compared.items():
        first, second, difference = (Estimate.from_dict(values[key]) for key in ("first", "second", "difference"))
        style = "good" if difference.low > 0 else "bad" if difference.high < 0 else ""
        rows.append((name, first, second, Cell(difference, style)))
    parts: list[Part] = [
        Cell(f"{result['problems']} problems, the same for both; 95 % intervals", "head"),
        *(f"  warning: {warning}" for warning in result["warnings"]),
        Table(rows, ("", "A", "B", "B - A")),
    ]
    if "mcnemar" in result:
        test = result["mcnemar"]
        alone = f"A alone right on {test['only_first']}, B alone on {test['only_second']}"
        parts.append(f"  McNemar: {alone}; exact p = {test['p']:.3g}")
    return parts


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is evaluated: a model, and how that differs from its recipe's own held-out rows. As the options of the command."""

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
        """How vLLM generates, if it does. Raises `UserError` for options of vLLM's without it."""
        given = {field.name: getattr(self, field.name) for field in fields(VLLM)}
        if self.vllm:
            return VLLM(**given)
        for name, value in given.items():
            if value is not None:
                raise UserError(f"--{name} says how vLLM generates: add --vllm")
        return None

    def on_each(self, paths: Sequence[str]) -> list[Request]:
        """The same for several held-out sets, each with a folder of its own: in `output`, or else beside the default one."""
        if len(paths) < 2:
            return [replace(self, path=paths[0] if paths else None)]
        names = [Path(path).name.partition(".")[0] or "rows" for path in paths]
        names = [name if names.count(name) == 1 else f"{name}-{place}" for place, name in enumerate(names)]
        folders = [self.output / name if self.output else _output(self.model, self.samples, name) for name in names]
        return [replace(self, path=path, output=folder) for path, folder in zip(paths, folders, strict=True)]


def evaluate_model(model: str | Path, **options: Any) -> dict[str, Any]:
    """Evaluate a model on held-out rows, or continue to; `options` are the fields of `Request`.

    Returns what `evaluation.json` holds. Raises as `evaluate_request`.
    """
    return evaluate_request(Request(model=str(model), **options))


def evaluate_request(options: Request) -> dict[str, Any]:
    """Evaluate what is asked for, or continue its evaluation, and return what `evaluation.json` holds.

    Raises:
        UserError: it can't be made as asked.
        EvaluationInterrupted: Ctrl-C.
        RunError: a file of the model, or of its run, is damaged or missing.
        RecipeError, UserError: the recipe or the dataset can't be read.
    """
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit is {options.limit}: set it to at least 1, or leave it out for all problems")
    if is_missing(options.model):
        raise UserError(f"{options.model}: the model can't be loaded: there is no such folder")
    if Path(options.model).is_dir():
        check_model_folder(Path(options.model))
    vllm = options.engine()
    recipe = _recipe(options)
    spec = held_out_spec(recipe.get("dataset", {}), options)
    dataset = load(spec, evaluation=spec.eval_share is not None)
    if options.limit is not None:
        dataset = dataset.select(range(min(options.limit, len(dataset))))
    settings = _settings(recipe, spec, options, dataset)
    specs = recipe.get("rewards") or []
    try:
        rewards, left_out = paid.own_rewards(specs, dataset[0], settings.samples, is_trusted=options.recipe is not None)
    except RewardSpecError as error:
        raise UserError(f"the recipe's `rewards`: {str(error).rstrip('.')}") from error
    paid.say_left_out(left_out)
    if settings.strict is None and not rewards:
        raise UserError(
            "nothing to measure: the held-out rows have no `answer`, and no reward of a recipe can score them: give --recipe"
        )
    weights = weights_fingerprint(options.model)
    described = {
        "model": options.model,
        **({} if weights is None else {"weights": weights}),
        "engine": "transformers" if vllm is None else vllm.name,
        "dataset": spec.as_dict(),
        **({"paid_by": _measured(specs, rewards)} if rewards else {}),
    }
    folder = options.output or _output(options.model, options.samples)
    try:
        engine = LoadedWhenCalled(options.model, vllm, dataset)
        made_with = partial(_made_with, options.model, vllm)
        return evaluate_into(folder, engine, dataset, settings, described, rewards, made_with, engine.sampling)
    except KeyboardInterrupt as error:
        raise EvaluationInterrupted(_what_is_saved(folder)) from error
    except OSError as error:
        raise UserError(f"{folder}: the result can't be written there ({error}): give another --output") from error
    except ValueError as error:
        raise UserError(str(error)) from error


def _measured(specs: Sequence[Any], rewards: Sequence[paid.OwnReward]) -> list[dict[str, Any]]:
    """The specs of the rewards that are measured, without their weights, which make no difference."""
    names = {reward.name for reward in rewards}
    mappings = [{"name": spec} if isinstance(spec, str) else dict(spec) for spec in specs]
    return [
        {key: value for key, value in spec.items() if key != "weight"}
        for spec in mappings
        if (spec.get("alias") or str(spec["name"]).rpartition(".")[2]) in names
    ]


class EvaluationInterrupted(KeyboardInterrupt):
    """Ctrl-C in an evaluation; the message says what is saved and how to go on."""


def _what_is_saved(folder: Path) -> str:
    """How far an interrupted evaluation has come."""
    parts = len(list((folder / "parts").glob("[0-9]*.parquet")))
    if not parts:
        return "stopped by Ctrl-C: no batch was finished, so nothing is saved; the same command starts again"
    batches = "1 batch is" if parts == 1 else f"{parts} batches are"
    return f"stopped by Ctrl-C: {batches} saved in {folder / 'parts'}; the same command goes on from there"


def _made_with(model: str, vllm: VLLM | None) -> dict[str, Any]:
    """The version of what generates, and the dtype that it computes in."""
    if vllm is not None:
        return vllm_engine.made_with(model, vllm)
    return {"version": version("transformers"), "dtype": checkpoint_dtype(model)}


class LoadedWhenCalled:
    """An engine that loads its model for the first batch: a finished evaluation needs none."""

    def __init__(self, model: str, vllm: VLLM | None, dataset: Dataset) -> None:
        self.model, self.vllm, self.dataset = model, vllm, dataset

    @cached_property
    def engine(self) -> Engine:
        """Engine, loaded at the first use."""
        tried = chosen(self.dataset)
        return load_engine(self.model, tried) if self.vllm is None else load_vllm(self.model, self.vllm, tried)

    def __call__(self, prompts: list[Any], settings: Settings) -> list[str]:
        """Complete each prompt once, in order."""
        return self.engine(prompts, settings)

    def sampling(self, settings: Settings) -> dict[str, Any]:
        """Return the sampling settings in force."""
        return self.engine.sampling(settings)


def check_model_folder(folder: Path) -> None:
    """Raise one sentence, naming the file and the fix, if no model or adapter can be loaded from a local folder.

    No model is loaded: only the headers of weight files and the JSON files are read, also those of an adapter's local base.

    Raises:
        UserError: the folder holds no model, or a weight file is missing or damaged.
        RunError: a JSON file is damaged.
    """
    adapter = folder / ADAPTER_CONFIG
    check_descriptions(folder)
    if not adapter.is_file() and not (folder / "config.json").is_file():
        from transformers.trainer_utils import get_last_checkpoint  # takes seconds

        newest = get_last_checkpoint(folder)  # of a run that has not finished, the only models are its checkpoints
        hint = f": its newest checkpoint is {newest}" if newest else ""
        raise UserError(f"{folder} holds no model (no config.json, no adapter_config.json){hint}")
    restore = "copy or download the folder again"
    try:
        check_weight_files(folder)
    except files.RunError as error:
        raise UserError(f"{error}: {restore}, or name another checkpoint") from error
    check_model_sizes(str(folder))  # compared with the weights, which are whole
    if adapter.is_file() and (base := files.read_object(adapter, files.ADAPTER, restore)["base_model_name_or_path"]):
        if Path(base).is_dir():
            check_model_folder(Path(base))
        elif Path(base).is_absolute():
            raise UserError(
                f"{folder} is an adapter, and its base {base} is missing: set "
                "`base_model_name_or_path` in its adapter_config.json"
            )


def weights_fingerprint(model: str) -> str | None:
    """What tells a model's weights from others of the same name, wherever they are copied; None if it isn't known.

    Of a folder it is a hash over its weight files' names and `identify_weights`, and over an adapter's configuration and
    base; of a hub repository, the revision that will be loaded.
    """
    folder = Path(model)
    if not folder.is_dir():
        commit = hub_commit(model)
        return None if commit is None else f"revision {commit}"
    try:
        lines = [f"{file.name} {identify_weights(file)}" for file in weight_files(folder)]
    except files.RunError:
        return None
    if (folder / ADAPTER_CONFIG).is_file():  # its scale is part of what the policy computes
        lines.append(read_text(folder / ADAPTER_CONFIG))
        config = adapter_config(folder)
        base = config.base_model_name_or_path if config is not None else None
        lines.append(f"base {weights_fingerprint(base) if base else None}")
    return "sha256 " + hashlib.sha256("\n".join(lines).encode()).hexdigest()


def held_out_spec(trained: dict[str, Any], options: Request) -> DatasetSpec:
    """The problems to evaluate on: the recipe's held-out rows, with the command line's keys in their place.

    With `--path` the recipe's `eval_path` and `eval_split` are left out: they belong to the file that it trained on.

    Raises `UserError` if only the rows trained on are known, or rows without a gold, and `UserError` for a
    wrong key.
    """
    raw = dict(trained) if options.dataset in (None, trained.get("name")) else {"name": options.dataset}
    raw.pop("pass_rate", None)  # of rows to train on
    if raw.get("eval_share") is not None and not (options.path or options.split):
        return DatasetSpec.parse({**raw, **_given(options)})
    raw.pop("eval_share", None)
    if raw.get("name") == "scored":
        raise UserError(
            "the dataset scored holds recorded responses and no final answers to evaluate on: name problems that have them, "
            "as in `--dataset gsm8k --path PROBLEMS.jsonl --prompt_format text`"
        )
    held_out = {"path": raw.pop("eval_path", None), "split": raw.pop("eval_split", None)}
    if options.path is not None:
        held_out = dict.fromkeys(held_out)
    trained_path = raw.get("path")
    is_known = options.split or any(held_out.values()) or options.path not in (None, trained_path)
    if not is_known and trained_path is not None and (isinstance(trained_path, list) or has_one_split(trained_path)):
        raise UserError(
            f"the run trained on {trained_path}: name the held-out problems with --path, or a --split of it"
        )
    known = [field.name for field in fields(DatasetSpec)]
    default = {} if raw else {"name": "gsm8k"}
    test = {} if isinstance(held_out["path"] or trained_path, list) else {"split": "test"}
    layers = (default, raw, test, held_out, _given(options))  # a later one prevails
    return DatasetSpec.parse({key: layer[key] for layer in layers for key in known if layer.get(key) is not None})


def _given(options: Request) -> dict[str, Any]:
    """The keys of the dataset that the command line gives."""
    given = {key: getattr(options, key) for key in ("path", "split", "system_prompt", "prompt_format")}
    return {key: value for key, value in given.items() if value is not None}


def _recipe(options: Request) -> dict[str, Any]:
    """The keys of the recipe that is named, or of the run that made the model or checkpoint; {} if there is none."""
    if options.recipe is not None:
        from grpo_recipes.recipe.recipe import parse_recipe

        recipe = parse_recipe(["--config", options.recipe])
        return {**vars(recipe.config), **recipe.as_dict()}
    for folder in (Path(options.model), Path(options.model).parent):
        if record := read_record(folder):
            return {**record.get("config", {}), **record["recipe"]}
    return {}


def _settings(recipe: dict[str, Any], spec: DatasetSpec, options: Request, dataset: Dataset) -> Settings:
    tags = options.tags or _tags(recipe, spec)
    values = {key: getattr(options, key) for key in ("samples", "temperature", "max_new_tokens", "batch_size", "seed")}
    if values["temperature"] is None:
        values["temperature"] = 0.0 if options.samples == 1 else 1.0
    if values["max_new_tokens"] is None:
        values["max_new_tokens"] = recipe.get("max_completion_length") or DEFAULT_NEW_TOKENS
    try:
        asked = strict.asked_by(recipe.get("rewards") or [], tags, override_tags=bool(options.tags))
    except RewardSpecError as error:
        raise UserError(f"the recipe's `rewards`: {str(error).rstrip('.')}") from error
    except ValueError as error:
        raise UserError(f"--tags: {error}") from error
    # A recipe that judges no correctness is held to golds by default, where there are any.
    has_golds = (
        strict.judges_correctness(recipe.get("rewards") or [])
        or not recipe.get("rewards")
        or "answer" in dataset.column_names
    )
    stop = stop_strings(recipe.get("generation_kwargs"))
    return Settings(tags=tags, strict=asked if has_golds else None, stop=stop, **values)


def _tags(recipe: dict[str, Any], spec: DatasetSpec) -> tuple[str, str]:
    """The tags that the recipe's rewards look for, or those that the prompt asks for."""
    for reward in strict.single_specs(recipe.get("rewards") or []):
        if tags := (reward.get("kwargs") or {}).get("tags"):
            return tags[0], tags[1]
    return ("reasoning", "answer") if spec.system_prompt in (None, "reasoning") else ("think", "answer")


def _output(model: str, samples: int, table: str = "") -> Path:
    """Where an evaluation goes by default; one with several samples a problem, or of one of several tables, beside it."""
    suffix = (f"-{table}" if table else "") + (f"-{samples}-samples" if samples > 1 else "")
    if os.path.isdir(model):
        return files.inside(Path(model), files.EVALUATIONS, f"{files.AFTER}{suffix}")
    return Path("runs") / files.EVALUATIONS / f"{model.replace('/', '--')}{suffix}"


def _completed(
    problems: range,
    complete: Complete,
    dataset: Dataset,
    golds: list[str] | None,
    settings: Settings,
    rewards: Sequence[paid.OwnReward],
) -> pd.DataFrame:
    """One row for each completion of some problems, with its verdict and what the recipe's rewards pay."""
    places = [problem for problem in problems for _ in range(settings.samples)]
    rows = [dataset[place] for place in places]
    prompts = [row["prompt"] for row in rows]
    columns = {name: [row[name] for row in rows] for name in dataset.column_names if name != "prompt"}
    completions = complete(prompts, settings)
    table = {
        "problem": places,
        "sample": [sample for _ in problems for sample in range(settings.samples)],
        "prompt": [prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False) for prompt in prompts],
        "completion": completions,
        **paid.judged(rewards, prompts, completions, columns),
    }
    if golds is not None:
        table |= _verdicts(completions, [golds[place] for place in places], columns, settings)
        return pd.DataFrame(table).astype({"answer": "string"})
    return pd.DataFrame(table)


def _verdicts(
    completions: list[str], golds: list[str], columns: dict[str, list[Any]], settings: Settings
) -> dict[str, list[Any]]:
    """The columns that hold completions against golds."""
    assert settings.strict is not None, "there are golds"
    stated = strict.stated_answers(settings.strict, completions, columns, settings.tags)
    strictly = strict.is_right(settings.strict, completions, columns)
    judge = Judge()
    verdicts = [judge.verdict(read_gold(gold), answer) for gold, answer in zip(golds, stated, strict=True)]
    lenient = [right or verdict in _RIGHT for right, verdict in zip(strictly, verdicts, strict=True)]
    return {"gold": golds, "answer": stated, "strict": strictly, "lenient": lenient}


def _golds(dataset: Dataset, settings: Settings) -> list[str] | None:
    """The golds as text, each of which strict can judge; None where no accuracy is measured."""
    if len(dataset) == 0:
        raise ValueError("nothing to evaluate on: the dataset is empty")
    if settings.strict is None:
        return None
    columns = {name: list(dataset[name]) for name in dataset.column_names if name != "prompt"}
    judged = strict.can_judge(settings.strict, len(dataset), columns)
    if not all(judged):
        asked = strict.describe([vars(reward) for reward in settings.strict])
        raise ValueError(f"row {judged.index(False) + 1} can't be scored by what strict asks for, {asked}")
    golds = columns.get(strict.gold_column(settings.strict), [None] * len(dataset))
    return ["" if gold is None else str(gold) for gold in golds]


def _rows_fingerprint(dataset: Dataset, settings: Settings) -> str:
    """A hash of the rows, as far as they count, in order: a path and a split don't say which rows they name today."""
    read = {name for reward in settings.strict or () for name in strict.columns_read(reward)} - {"answer"}
    counting = [name for name in ("prompt", "answer", *sorted(read)) if name in dataset.column_names]
    digest = hashlib.sha256()
    for row in dataset.select_columns(counting):
        digest.update(json.dumps([row[name] for name in counting], sort_keys=True, default=str).encode() + b"\n")
    return f"sha256 {digest.hexdigest()}"


def _majority(rows: pd.DataFrame) -> bool:
    return paid.majority(rows["answer"], rows["lenient"])


def _vote(rows: pd.DataFrame) -> bool:
    return bool(rows["strict"].iloc[0]) if len(rows) == 1 else _majority(rows)


def _is_finished(folder: Path, asked: dict[str, Any]) -> bool:
    """Whether a folder holds this very evaluation, finished. Raises `UserError` if it holds another."""
    fix = "remove the folder, or give another --output"
    for name, shape in (("evaluation.json", files.EVALUATION), (REQUEST, {})):
        try:
            found = files.read_object(folder / name, shape, fix)
        except FileNotFoundError:
            continue
        if difference := _difference(found, asked):
            raise UserError(f"{folder} holds another evaluation: {difference}; {fix}")
        return name == "evaluation.json"
    if folder.exists() and any(not path.name.startswith(LOCK) for path in folder.iterdir()):
        raise UserError(f"{folder} holds files that are no evaluation: give another --output")
    return False


def _difference(found: dict[str, Any], asked: dict[str, Any], prefix: str = "") -> str | None:
    """The first thing in which the evaluation that was found differs from the one asked for; None if nothing does."""
    changed = {
        "weights": "the model's weights have changed since",
        "rows": "the problems have changed since",
        "strict": "what strict asks for (`settings.strict`) has changed since",
        "paid_by": "the rewards of the recipe have changed since",
    }
    for key, value in asked.items():
        other = found.get(key)
        if other == value:
            continue
        if key in ("model", "path") and _is_one_path(other, value):
            continue
        if key == "model" and not prefix and found.get("weights") == asked.get("weights") is not None:
            continue  # a copy of it
        if other is None and not prefix:
            return f"it does not record `{prefix}{key}`"
        if isinstance(value, dict) and isinstance(other, dict):
            # A key that only the folder's has differs as well.
            return _difference(other, {**dict.fromkeys(other), **value}, f"{prefix}{key}.")
        return changed.get(key, f"{prefix}{key} was {other!r} and is now {value!r}")
    return None


def _is_one_path(first: Any, second: Any) -> bool:
    """Whether two names, as typed, are of one file or folder that is there."""
    paths = [Path(name) for name in (first, second) if isinstance(name, str)]
    return len(paths) == 2 and all(path.exists() for path in paths) and paths[0].samefile(paths[1])


def _read_record(folder: Path) -> dict[str, Any]:
    try:
        return files.read_object(folder / "evaluation.json", files.EVALUATION)
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} has no finished evaluation: run `grpo-recipes evaluate` with it as --output"
        ) from error


def _read_completions(folder: Path, specs: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The completions of an evaluation, with the pay of the rewards that some specs describe."""
    names = [spec.get("alias") or str(spec.get("name")).rpartition(".")[2] for spec in specs]
    pays: dict[str, files.Kind] = {f"{paid.PAY.format(name)}?": files.NUMBERS for name in names}
    pays |= {f"{paid.PASSED.format(name)}?": files.BOOLEANS for name in names}
    columns = {**files.EVALUATED, **pays}
    table = files.read_table(folder / "completions.parquet", columns, "evaluate anew, into another --output")
    if not len(table):
        raise UserError(f"{folder / 'completions.parquet'}: it holds no completions; evaluate anew")
    return table


def _write_table(path: Path, table: pd.DataFrame) -> None:
    with files.replacing(path) as part:
        table.to_parquet(part, index=False)
