"""Accuracy of a policy on held-out problems: what is evaluated, its files, its shares; `grpo-recipes evaluate`.

*Strict* accuracy asks for what the recipe's own rewards ask for (`results/strict.py`), layout and answer together; *lenient*
accuracy accepts any recognised final answer. Their difference tells a model that learnt to calculate from one that learnt a
layout.

`evaluate_into` writes `completions.parquet`, every completion with its verdict, and `evaluation.json`, the shares with
their 95 % intervals. Until then `request.json` says what is evaluated, and `parts/` holds the finished batches, so that a
killed evaluation continues where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
from datasets import Dataset
from tqdm.auto import tqdm

from grpo_recipes.recipe.data import load
from grpo_recipes.recipe.generation import stop_strings
from grpo_recipes.recipe.hub import hub_answers, is_missing
from grpo_recipes.recipe.sources import has_one_split
from grpo_recipes.recipe.specs import DatasetSpec
from grpo_recipes.results import strict
from grpo_recipes.results.engines import Complete, EvaluationError, load_engine
from grpo_recipes.results.estimates import Estimate, mcnemar, mean_share, paired_difference, pass_at_k
from grpo_recipes.runs import checkpoints, files
from grpo_recipes.runs.record import read_record
from grpo_rewards.answers import Judge, answer_number, read_gold
from grpo_rewards.registry import RewardSpecError

DEFAULT_NEW_TOKENS = 512
REQUEST = "request.json"

# Read beside the weights; loading a model with one of them cut off raises an error that names no file.
_READ_WHOLE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")

_RIGHT = frozenset({"exact", "equal", "symbolic"})


@dataclass(frozen=True)
class Settings:
    """How completions are made and judged.

    Attributes:
        tags: the names of the reasoning tag and the answer tag.
        samples: completions a problem.
        temperature: what the logits are divided by before sampling, with no other filter; 0 for greedy decoding.
        max_new_tokens: the longest completion, in tokens.
        batch_size: how many completions are made at once; with sampling, part of what a seed reproduces.
        seed: of the sampling. The global random state is left as it was.
        strict: the rewards that a strictly right completion must earn in full; empty for the default with `tags`.
        stop: strings that end a completion, as in training; the recipe's `generation_kwargs.stop`.

    Raises:
        EvaluationError: a number below 1, a temperature below 0, or several samples of greedy decoding.
    """

    tags: tuple[str, str] = ("think", "answer")
    samples: int = 1
    temperature: float = 0.0
    max_new_tokens: int = 256
    batch_size: int = 64
    seed: int = 0
    strict: tuple[strict.Asked, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.strict:
            object.__setattr__(self, "strict", strict.asked_by((), self.tags))
        for name in ("samples", "batch_size", "max_new_tokens"):
            if (value := getattr(self, name)) < 1:
                raise EvaluationError(f"--{name} is {value}: set it to at least 1")
        if not 0 <= self.temperature < math.inf:
            raise EvaluationError(f"--temperature is {self.temperature:g}: set it to 0 for greedy decoding, or above 0")
        if self.samples > 1 and self.temperature <= 0:
            raise EvaluationError(f"{self.samples} greedy samples are one and the same: set --temperature above 0")


def evaluate_into(
    folder: Path, complete: Complete, dataset: Dataset, settings: Settings, described: dict[str, Any]
) -> dict[str, Any]:
    """Evaluate into a folder, or continue the same evaluation there; one that is finished is only read.

    Args:
        folder: receives `evaluation.json` and `completions.parquet`.
        complete: the policy; called once for each batch, whose seed is `settings.seed` and the batch's number.
        dataset: columns `prompt` and `answer`.
        settings: how to sample and judge.
        described: what else identifies the evaluation (the model, its weights, the dataset), ready for JSON.

    Returns:
        What `evaluation.json` holds.

    Raises:
        EvaluationError: the folder holds another evaluation.
        RunError: a file of the folder is damaged.
        ValueError: the dataset is empty, or an answer can't be read as a gold.
    """
    answers = _answers(dataset, settings)
    rows = {"problems": len(answers), "rows": _rows_fingerprint(dataset, settings)}
    asked = json.loads(json.dumps({**described, **rows, "settings": asdict(settings)}))
    parts = files.inside(folder, "parts")
    if _is_finished(folder, asked):
        return files.read_object(folder / "evaluation.json", files.EVALUATION)
    parts.mkdir(parents=True, exist_ok=True)
    files.write_atomically(folder / REQUEST, json.dumps(asked))
    size = max(1, settings.batch_size // settings.samples)
    batches = [range(start, min(start + size, len(answers))) for start in range(0, len(answers), size)]
    for number, problems in enumerate(tqdm(batches, desc="evaluating", unit="batch")):
        part = parts / f"{number:06d}.parquet"
        if not part.is_file():
            batch_settings = replace(settings, seed=settings.seed * 1_000_003 + number)
            table = _completed(problems, complete, dataset, answers, batch_settings)
            _write_table(part, table)
    again = "remove the file: the same command makes it again"
    made = (files.read_table(parts / f"{number:06d}.parquet", files.EVALUATED, again) for number in range(len(batches)))
    table = pd.concat(made, ignore_index=True)
    summary = {**asked, **summarise(table)}
    _write_table(folder / "completions.parquet", table)
    files.write_atomically(folder / "evaluation.json", json.dumps(summary, indent=2) + "\n")
    shutil.rmtree(parts)
    (folder / REQUEST).unlink()
    return summary


def summarise(table: pd.DataFrame) -> dict[str, Any]:
    """The shares of an evaluation, each with its 95 % interval, from its completions (columns of `completions.parquet`).

    `strict` and `lenient` are mean shares over problems; `pass_at` the chance that one of k completions is strictly right;
    `majority` the share of problems whose commonest stated answer is right, the first stated winning a tie.
    """
    problems = [rows for _, rows in table.groupby("problem", sort=True)]
    samples = len(problems[0])
    shares = {name: mean_share([rows[name].mean() for rows in problems]) for name in ("strict", "lenient")}
    summary: dict[str, Any] = {name: share.as_dict() for name, share in shares.items()}
    if samples > 1:
        sizes = sorted({2**power for power in range(samples.bit_length())} | {samples})
        summary["pass_at"] = {
            str(k): mean_share([pass_at_k(samples, int(rows["strict"].sum()), k) for rows in problems]).as_dict()
            for k in sizes
        }
        summary["majority"] = mean_share([float(_majority(rows)) for rows in problems]).as_dict()
    return summary


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Two finished evaluations of the same problems: the paired difference second - first, and McNemar's test.

    With several samples a problem the difference is of shares, and the test of majority votes.

    Raises:
        EvaluationError: a folder has no finished evaluation, or they are not on the same problems, or not judged alike.
        RunError: a file of theirs is damaged.
    """
    records = [_read_record(folder) for folder in (first, second)]
    if records[0]["settings"].get("strict") != records[1]["settings"].get("strict"):
        raise EvaluationError(
            f"{first} and {second} mean different things by strict (`settings.strict` of their evaluation.json): evaluate both "
            "with the same --recipe"
        )
    tables = [_read_completions(folder) for folder in (first, second)]
    prompts = [table.groupby("problem")["prompt"].first() for table in tables]
    if not prompts[0].equals(prompts[1]):
        raise EvaluationError(f"{first} and {second} are not on the same problems: evaluate both with the same options")
    groups = [[rows for _, rows in table.groupby("problem", sort=True)] for table in tables]
    result: dict[str, Any] = {"problems": len(prompts[0])}
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


def describe(summary: dict[str, Any]) -> str:
    """The shares of an evaluation, a line each."""
    rows = {"strict": summary["strict"], "lenient": summary["lenient"]}
    rows |= {f"pass@{k}": share for k, share in summary.get("pass_at", {}).items()}
    if "majority" in summary:
        rows["majority"] = summary["majority"]
    samples = summary["settings"]["samples"]
    head = f"{summary['problems']} problems, {samples} completion{'s' * (samples > 1)} each; 95 % intervals"
    lines = [f"  {name:10} {Estimate.from_dict(share)}" for name, share in rows.items()]
    return "\n".join([head, *lines, f"  strict: {strict.describe(summary['settings']['strict'])}"])


def describe_comparison(result: dict[str, Any]) -> str:
    """Two evaluations side by side, their paired difference, and McNemar's test."""
    lines = [f"{result['problems']} problems, the same for both; 95 % intervals"]
    for name in ("strict", "lenient"):
        first, second, difference = (Estimate.from_dict(result[name][key]) for key in ("first", "second", "difference"))
        lines.append(f"  {name:8} A {first}   B {second}   B - A {difference}")
    test = result["mcnemar"]
    lines.append(
        f"  McNemar: A alone right on {test['only_first']}, B alone on {test['only_second']}; exact p = {test['p']:.3g}"
    )
    return "\n".join(lines)


def evaluate_model(options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate `options.model`, or continue its evaluation, and return what `evaluation.json` holds.

    Raises:
        EvaluationError: it can't be made as asked.
        EvaluationInterrupted: Ctrl-C.
        RunError: a file of the model, or of its run, is damaged or missing.
        RecipeError, UserError: the recipe or the dataset can't be read.
    """
    if options.limit is not None and options.limit < 1:
        raise EvaluationError(f"--limit is {options.limit}: set it to at least 1, or leave it out for all problems")
    if is_missing(options.model):
        raise EvaluationError(f"{options.model}: the model can't be loaded: there is no such folder")
    if Path(options.model).is_dir():
        check_model_folder(Path(options.model))
    recipe = _recipe(options)
    spec = held_out_spec(recipe.get("dataset", {}), options)
    settings = _settings(recipe, spec, options)
    dataset = load(spec, evaluation=spec.eval_share is not None)
    if options.limit is not None:
        dataset = dataset.select(range(min(options.limit, len(dataset))))
    weights = weights_fingerprint(options.model)
    described = {
        "model": options.model,
        **({} if weights is None else {"weights": weights}),
        "engine": "vllm" if options.vllm else "transformers",
        "dataset": spec.as_dict(),
    }
    folder = options.output or _output(options.model, options.samples)
    try:
        return evaluate_into(folder, _loaded_when_called(options), dataset, settings, described)
    except KeyboardInterrupt as error:
        raise EvaluationInterrupted(_what_is_saved(folder)) from error
    except OSError as error:
        raise EvaluationError(
            f"{folder}: the result can't be written there ({error}): give another --output"
        ) from error
    except ValueError as error:
        raise EvaluationError(str(error)) from error


class EvaluationInterrupted(KeyboardInterrupt):
    """Ctrl-C in an evaluation; the message says what is saved and how to go on."""


def _what_is_saved(folder: Path) -> str:
    """How far an interrupted evaluation has come."""
    parts = len(list((folder / "parts").glob("[0-9]*.parquet")))
    if not parts:
        return "stopped by Ctrl-C: no batch was finished, so nothing is saved; the same command starts again"
    batches = "1 batch is" if parts == 1 else f"{parts} batches are"
    return f"stopped by Ctrl-C: {batches} saved in {folder / 'parts'}; the same command goes on from there"


def _loaded_when_called(options: argparse.Namespace) -> Complete:
    """An engine that loads its model for the first batch: a finished evaluation needs none."""
    engine = cache(lambda: load_engine(options.model, options.vllm))
    return lambda prompts, settings: engine()(prompts, settings)


def check_model_folder(folder: Path) -> None:
    """Raise one sentence, naming the file and the fix, if no model or adapter can be loaded from a local folder.

    No model is loaded: only the headers of weight files and the JSON files are read, also those of an adapter's local base.

    Raises:
        EvaluationError: the folder holds no model, or a weight file is missing or damaged.
        RunError: a JSON file is damaged.
    """
    adapter = folder / checkpoints.ADAPTER_CONFIG
    if not adapter.is_file() and not (folder / "config.json").is_file():
        from transformers.trainer_utils import get_last_checkpoint  # takes seconds

        newest = get_last_checkpoint(folder)  # of a run that has not finished, the only models are its checkpoints
        hint = f": its newest checkpoint is {newest}" if newest else ""
        raise EvaluationError(f"{folder} holds no model (no config.json, no adapter_config.json){hint}")
    restore = "copy or download the folder again"
    for name in _READ_WHOLE:
        if (folder / name).is_file():
            files.read_object(folder / name, {}, restore)
    try:
        checkpoints.check_weight_files(folder)
    except checkpoints.WeightFileError as error:
        raise EvaluationError(f"{error}: {restore}, or name another checkpoint") from error
    if adapter.is_file() and (base := files.read_object(adapter, files.ADAPTER, restore)["base_model_name_or_path"]):
        if Path(base).is_dir():
            check_model_folder(Path(base))
        elif Path(base).is_absolute():
            raise EvaluationError(
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
        return _hub_revision(model)
    try:
        lines = [f"{file.name} {checkpoints.identify_weights(file)}" for file in checkpoints.weight_files(folder)]
    except checkpoints.WeightFileError:
        return None
    if (folder / checkpoints.ADAPTER_CONFIG).is_file():  # its scale is part of what the policy computes
        lines.append((folder / checkpoints.ADAPTER_CONFIG).read_text(encoding="utf-8"))
        config = checkpoints.adapter_config(folder)
        base = config.base_model_name_or_path if config is not None else None
        lines.append(f"base {weights_fingerprint(base) if base else None}")
    return "sha256 " + hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _hub_revision(name: str) -> str | None:
    """The commit of a hub repository that loading it takes: the newest if the hub answers, else the cache's."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    cached_only = not hub_answers()
    for file in ("config.json", "adapter_config.json"):
        try:
            return f"revision {Path(hf_hub_download(name, file, local_files_only=cached_only)).parent.name}"
        except (EntryNotFoundError, OSError, ValueError):  # loading the model reports what is wrong with the name
            continue
    return None


def held_out_spec(trained: dict[str, Any], options: argparse.Namespace) -> DatasetSpec:
    """The problems to evaluate on: the recipe's held-out rows, with the command line's keys in their place.

    With `--path` the recipe's `eval_path` and `eval_split` are left out: they belong to the file that it trained on.

    Raises `EvaluationError` if only the rows trained on are known, or rows without a gold, and `UserError` for a
    wrong key.
    """
    raw = dict(trained) if options.dataset in (None, trained.get("name")) else {"name": options.dataset}
    if raw.get("eval_share") is not None and not (options.path or options.split):
        return DatasetSpec.parse({**raw, **_given(options)})
    raw.pop("eval_share", None)
    if raw.get("name") == "scored":
        raise EvaluationError(
            "the dataset scored holds recorded responses and no final answers to evaluate on: name problems that have them, "
            "as in `--dataset gsm8k --path PROBLEMS.jsonl --prompt_format text`"
        )
    held_out = {"path": raw.pop("eval_path", None), "split": raw.pop("eval_split", None)}
    if options.path is not None:
        held_out = dict.fromkeys(held_out)
    trained_path = raw.get("path")
    is_known = options.split or any(held_out.values()) or options.path not in (None, trained_path)
    if not is_known and trained_path is not None and (isinstance(trained_path, list) or has_one_split(trained_path)):
        raise EvaluationError(
            f"the run trained on {trained_path}: name the held-out problems with --path, or a --split of it"
        )
    known = [field.name for field in fields(DatasetSpec)]
    default = {} if raw else {"name": "gsm8k"}
    test = {} if isinstance(held_out["path"] or trained_path, list) else {"split": "test"}
    layers = (default, raw, test, held_out, _given(options))  # a later one prevails
    return DatasetSpec.parse({key: layer[key] for layer in layers for key in known if layer.get(key) is not None})


def _given(options: argparse.Namespace) -> dict[str, Any]:
    """The keys of the dataset that the command line gives."""
    given = {key: getattr(options, key) for key in ("path", "split", "system_prompt", "prompt_format")}
    return {key: value for key, value in given.items() if value is not None}


def _recipe(options: argparse.Namespace) -> dict[str, Any]:
    """The keys of the recipe that is named, or of the run that made the model or checkpoint; {} if there is none."""
    if options.recipe is not None:
        from grpo_recipes.recipe.recipe import parse_recipe

        recipe = parse_recipe(["--config", options.recipe])
        return {**vars(recipe.config), **recipe.as_dict()}
    for folder in (Path(options.model), Path(options.model).parent):
        if record := read_record(folder):
            return {**record.get("config", {}), **record["recipe"]}
    return {}


def _settings(recipe: dict[str, Any], spec: DatasetSpec, options: argparse.Namespace) -> Settings:
    tags = tuple(options.tags) if options.tags else _tags(recipe, spec)
    values = {key: getattr(options, key) for key in ("samples", "temperature", "max_new_tokens", "batch_size", "seed")}
    if values["temperature"] is None:
        values["temperature"] = 0.0 if options.samples == 1 else 1.0
    if values["max_new_tokens"] is None:
        values["max_new_tokens"] = recipe.get("max_completion_length") or DEFAULT_NEW_TOKENS
    try:
        asked = strict.asked_by(recipe.get("rewards") or [], tags, override_tags=bool(options.tags))
    except RewardSpecError as error:
        raise EvaluationError(f"the recipe's `rewards`: {str(error).rstrip('.')}") from error
    except ValueError as error:
        raise EvaluationError(f"--tags: {error}") from error
    return Settings(tags=tags, strict=asked, stop=stop_strings(recipe.get("generation_kwargs")), **values)


def _tags(recipe: dict[str, Any], spec: DatasetSpec) -> tuple[str, str]:
    """The tags that the recipe's rewards look for, or those that the prompt asks for."""
    for reward in strict.single_specs(recipe.get("rewards") or []):
        if tags := (reward.get("kwargs") or {}).get("tags"):
            return tags[0], tags[1]
    return ("reasoning", "answer") if spec.system_prompt in (None, "reasoning") else ("think", "answer")


def _output(model: str, samples: int) -> Path:
    """Where an evaluation goes by default; one with several samples a problem has a folder of its own."""
    several = f"-{samples}-samples" if samples > 1 else ""
    if os.path.isdir(model):
        return files.inside(Path(model), files.EVALUATIONS, f"{files.AFTER}{several}")
    return Path("runs") / files.EVALUATIONS / f"{model.replace('/', '--')}{several}"


def _completed(
    problems: range, complete: Complete, dataset: Dataset, answers: list[str], settings: Settings
) -> pd.DataFrame:
    """One row for each completion of some problems, with its verdict."""
    places = [problem for problem in problems for _ in range(settings.samples)]
    rows = [dataset[place] for place in places]
    prompts, golds = [row["prompt"] for row in rows], [answers[place] for place in places]
    columns = {name: [row[name] for row in rows] for name in dataset.column_names if name != "prompt"}
    completions = complete(prompts, settings)
    stated = strict.stated_answers(settings.strict, completions, columns, settings.tags)
    strictly = strict.is_right(settings.strict, completions, columns)
    judge = Judge()
    verdicts = [judge.verdict(read_gold(gold), answer) for gold, answer in zip(golds, stated, strict=True)]
    table = {
        "problem": places,
        "sample": [sample for _ in problems for sample in range(settings.samples)],
        "prompt": [prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False) for prompt in prompts],
        "gold": golds,
        "completion": completions,
        "answer": stated,
        "strict": strictly,
        "lenient": [right or verdict in _RIGHT for right, verdict in zip(strictly, verdicts, strict=True)],
    }
    return pd.DataFrame(table).astype({"answer": "string"})


def _answers(dataset: Dataset, settings: Settings) -> list[str]:
    columns = {name: list(dataset[name]) for name in dataset.column_names if name != "prompt"}
    judged = strict.can_judge(settings.strict, len(dataset), columns)
    if not judged:
        raise ValueError("nothing to evaluate on: the dataset is empty")
    if not all(judged):
        asked = strict.describe([asdict(reward) for reward in settings.strict])
        raise ValueError(f"row {judged.index(False) + 1} can't be scored by what strict asks for, {asked}")
    return columns["answer"]


def _rows_fingerprint(dataset: Dataset, settings: Settings) -> str:
    """A hash of the rows, as far as they count, in order: a path and a split don't say which rows they name today."""
    read = {name for reward in settings.strict for name in strict.columns_read(reward)} - {"answer"}
    counting = ["prompt", "answer", *sorted(read & set(dataset.column_names))]
    digest = hashlib.sha256()
    for row in dataset.select_columns(counting):
        digest.update(json.dumps([row[name] for name in counting], sort_keys=True, default=str).encode() + b"\n")
    return f"sha256 {digest.hexdigest()}"


def _majority(rows: pd.DataFrame) -> bool:
    """Whether the commonest stated answer is right; numbers count as equal whatever their form."""
    stated = [(_canonical(answer), right) for answer, right in zip(rows["answer"], rows["lenient"], strict=True)]
    votes = Counter(answer for answer, _ in stated if answer is not None)
    if not votes:
        return False
    winner = votes.most_common(1)[0][0]
    return any(right for answer, right in stated if answer == winner)


def _vote(rows: pd.DataFrame) -> bool:
    return bool(rows["strict"].iloc[0]) if len(rows) == 1 else _majority(rows)


def _canonical(answer: Any) -> Any:
    if answer is None or pd.isna(answer):
        return None
    number = answer_number(answer)
    return answer.strip().casefold() if number is None else number


def _is_finished(folder: Path, asked: dict[str, Any]) -> bool:
    """Whether a folder holds this very evaluation, finished. Raises `EvaluationError` if it holds another."""
    fix = "remove the folder, or give another --output"
    for name, shape in (("evaluation.json", files.EVALUATION), (REQUEST, {})):
        if (folder / name).is_file():
            if difference := _difference(files.read_object(folder / name, shape, fix), asked):
                raise EvaluationError(f"{folder} holds another evaluation: {difference}; {fix}")
            return name == "evaluation.json"
    if folder.exists() and any(folder.iterdir()):
        raise EvaluationError(f"{folder} holds files that are no evaluation: give another --output")
    return False


def _difference(found: dict[str, Any], asked: dict[str, Any], prefix: str = "") -> str | None:
    """The first thing in which the evaluation that was found differs from the one asked for; None if nothing does."""
    changed = {
        "weights": "the model's weights have changed since",
        "rows": "the problems have changed since",
        "strict": "what strict asks for (`settings.strict`) has changed since",
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
        raise EvaluationError(
            f"{folder} has no finished evaluation: run `grpo-recipes evaluate` with it as --output"
        ) from error


def _read_completions(folder: Path) -> pd.DataFrame:
    table = files.read_table(folder / "completions.parquet", files.EVALUATED, "evaluate anew, into another --output")
    if not len(table):
        raise EvaluationError(f"{folder / 'completions.parquet'}: it holds no completions; evaluate anew")
    return table


def _write_table(path: Path, table: pd.DataFrame) -> None:
    with files.replacing(path) as part:
        table.to_parquet(part, index=False)
