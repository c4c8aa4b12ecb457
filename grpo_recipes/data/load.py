"""Datasets: the rows to train on and the held-out rows of a recipe's `dataset` key.

`load_prompts` reads the rows (`sources`), makes prompts of them (`prompts`, with an entry of `presets` where one is
named) and selects the training or the held-out side. Tables are memory-mapped: no table is held as Python objects.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np

from grpo_recipes.data.arithmetic import DEFAULT_SIZE, made_problems
from grpo_recipes.data.places import numbered, selected
from grpo_recipes.data.presets import PRESETS
from grpo_recipes.data.prompts import Prompts, phrased
from grpo_recipes.data.sources import Keys, PlacedRows, check_shared, file_rows, mixed, read, sliced, slices
from grpo_recipes.recipe.dataset import MADE_PROBLEMS, DatasetSpec, PassRateSpec, SourceSpec
from grpo_recipes.recipe.specs import OfflineSpec
from grpo_recipes.runs.files import BOOLEANS, NUMBER, TEXT, TEXTS, Condition, Shape, mismatch, read_table
from grpo_rewards.errors import UserError

if TYPE_CHECKING:  # its import takes seconds, and readers of single datasets do not need it
    from grpo_recipes.recipe.recipe import Recipe

logger = logging.getLogger(__name__)

_PROGRAMS = Path(__file__).with_name("programs.jsonl")  # one task per line: split, question, tests, solution
_TRAINED = Keys("path", "split")
_OTHER_SPLIT = Keys("path", "eval_split")  # held-out rows under the same path as the training rows


def load(spec: DatasetSpec, *, evaluation: bool = False) -> datasets.Dataset:
    """Return the training or the held-out rows of a dataset, as `load_prompts` does."""
    return load_prompts(spec, evaluation=evaluation).dataset


def recipe_prompts(recipe: Recipe, *, evaluation: bool = False) -> Prompts:
    """Return the training or the held-out prompts of a recipe, as `load_prompts` does.

    Raises:
        RecipeError: `load_prompts` raises an error. The message then names the recipe's file first, unless the hub does
            not answer.
    """
    with recipe.naming_this_file():
        return load_prompts(recipe.dataset, evaluation=evaluation)


def load_prompts(spec: DatasetSpec, *, evaluation: bool = False) -> Prompts:
    """Return the training or the held-out rows of a dataset as prompts.

    Returns:
        Prompts whose dataset has the column `prompt` (messages or a string), with a preset also the column `answer`
        (the final answer alone), and the columns from which neither is made. The columns of `scored` are `prompt`,
        `responses`, `rewards` and, if recorded, `logprobs`.

    Raises:
        sources.DatasetUnreachable: the hub does not answer, and the local cache has no copy.
        UserError: nothing is readable, a row is invalid, or no row is left.
    """
    if evaluation:
        sources, keys = _held_out_sources(spec)
    else:
        sources, keys = _sources(spec, spec.path, spec.split), _TRAINED
    rows = _rows(spec, sources, keys)
    if spec.name == "scored":
        prompts = Prompts(rows.table, np.zeros(len(rows.table), np.uint64), rows.places)
    else:
        prompts = phrased(rows, spec)
    key, part = keys.split, repr(sources[0].split)
    if spec.eval_share is not None:
        key, part = "eval_share", f"{spec.eval_share} of the rows"
        # A row's own hash decides its side, so that a row stays on its side when other rows come or go.
        is_held_out = prompts.identities < np.uint64(int(spec.eval_share * 2.0**64))
        prompts = prompts.select(np.flatnonzero(is_held_out == evaluation))
    if spec.pass_rate is not None and not evaluation and len(prompts.dataset):
        prompts = prompts.select(_rows_to_keep(prompts, spec.pass_rate))
    if len(prompts.dataset) == 0:
        described = ", ".join(source.path for source in sources)
        raise UserError(f"`dataset.{key}`", f"{part} of {described} is empty", "choose other rows")
    return prompts


def check_disjoint(trained: Prompts, held_out: Prompts, spec: DatasetSpec) -> None:
    """Raise `UserError` if a held-out row poses the problem of a training row, as compared by 64-bit hashes."""
    shared = np.isin(held_out.identities, trained.identities)
    if not shared.any():
        return
    key = "eval_path" if spec.eval_path is not None else "eval_split"
    (first,) = held_out.places([int(np.argmax(shared))])
    problem = f"{shared.sum()} of {len(shared)} held-out rows are training rows too ({first} is the first)"
    raise UserError(f"`dataset.{key}`", problem, "remove them from one side, or set `dataset.eval_share`")


def _sources(spec: DatasetSpec, path: str | list[SourceSpec] | None, split: str) -> list[SourceSpec]:
    """Return the sources of a path, or the preset's home on the hub if there is no path."""
    if isinstance(path, list):
        return [replace(source, columns=source.columns or spec.columns) for source in path]
    preset = PRESETS.get(spec.name) if spec.name else None
    home = preset.hub_id if preset is not None and preset.hub_id else str(spec.name)
    config = spec.config
    if config is None and preset is not None and (path or home) == preset.hub_id:
        config = preset.hub_config
    source = SourceSpec(path or home, name=config, split=split, columns=spec.columns)
    return [replace(source, delimiter=spec.delimiter, encoding=spec.encoding, decimal=spec.decimal)]


def _held_out_sources(spec: DatasetSpec) -> tuple[list[SourceSpec], Keys]:
    if spec.eval_share is not None:
        return _sources(spec, spec.path, spec.split), _TRAINED
    if spec.eval_path is None and spec.eval_split is None:
        problem = "it is missing, so there is nothing to evaluate on"
        raise UserError("`dataset.eval_split`", problem, "name a split, or turn eval_strategy off")
    path, path_key = (spec.path, "path") if spec.eval_path is None else (spec.eval_path, "eval_path")
    split, split_key = (spec.split, "split") if spec.eval_split is None else (spec.eval_split, "eval_split")
    return _sources(spec, path, split), Keys(path_key, split_key)


def _rows(spec: DatasetSpec, sources: list[SourceSpec], keys: Keys) -> PlacedRows:
    if spec.name in MADE_PROBLEMS:
        return _made(spec, sources[0], keys)
    if spec.name == "programs":
        return _programs(sources[0], keys)
    if isinstance(getattr(spec, keys.path), list):
        return mixed(sources, keys)
    trained_split = spec.split if keys == _OTHER_SPLIT else None
    if spec.name != "scored":
        return read(sources[0], keys, trained_split)
    rows = _grouped(file_rows(sources[0], keys), sources[0].path)
    if trained_split is not None:
        check_shared(len(rows.table), trained_split, sources[0], keys)
    return sliced({"": rows}, sources[0].split, keys)  # a split counts prompts, not the lines with their responses


def _made(spec: DatasetSpec, source: SourceSpec, keys: Keys) -> PlacedRows:
    """Return the rows of a preset that makes its problems."""
    name, size = str(spec.name), DEFAULT_SIZE if spec.size is None else spec.size
    problems = []
    for split, start, stop in slices({"train": size, "test": size}, source.split, keys):
        problems += made_problems(name, split, stop, spec.seed)[start:]
    return PlacedRows(datasets.Dataset.from_list(problems), numbered(name))


def _programs(source: SourceSpec, keys: Keys) -> PlacedRows:
    tables: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for line in _PROGRAMS.read_text("utf-8").splitlines():
        task = json.loads(line)
        tables[task.pop("split")].append(task)
    tasks = []
    for split, start, stop in slices({split: len(table) for split, table in tables.items()}, source.split, keys):
        tasks += tables[split][start:stop]
    return PlacedRows(datasets.Dataset.from_list(tasks), numbered("programs"))


# Pass rates


def _rows_to_keep(prompts: Prompts, spec: PassRateSpec) -> np.ndarray:
    """Return the indices (N,) of the rows whose pass rate lies in `spec.keep`, ends included.

    The pass rate of a row is the share of strictly right samples of its prompt. Rows with the same prompt have one
    rate.

    Raises:
        UserError: the folder has no finished evaluation with golds, a row is not in it, or no row is left.
    """
    rates = _pass_rates(spec.evaluation)
    found = np.array([rates.get(_as_evaluated(prompt), np.nan) for prompt in prompts.dataset["prompt"]])
    is_missing = np.isnan(found)
    if is_missing.any():
        (first,) = prompts.places([int(np.argmax(is_missing))])
        problem = f"{is_missing.sum()} of {len(found)} training prompts are not in it ({first} is the first)"
        place = f"`dataset.pass_rate.evaluation`: {spec.evaluation}"
        raise UserError(place, problem, _evaluate_command(spec.evaluation))
    low, high = spec.keep
    kept = np.flatnonzero((low <= found) & (found <= high))
    others = f"{(found < low).sum()} were solved less often, {(found > high).sum()} more often"
    if not len(kept):
        problem = f"none of {len(found)} rows is solved {low:g} to {high:g} of the time ({others})"
        raise UserError("`dataset.pass_rate.keep`", problem, "widen it, or evaluate with more `--samples`")
    if os.environ.get("RANK", "0") == "0":
        logger.info(
            "pass rate: %d of %d rows kept, solved %g to %g of the time; %s", len(kept), len(found), *spec.keep, others
        )
    return kept


def _pass_rates(evaluation: str) -> dict[str, float]:
    """Return the share of strictly right samples by prompt."""
    folder = Path(evaluation)
    if not (folder / "evaluation.json").is_file():
        place = f"`dataset.pass_rate.evaluation`: {folder}"
        raise UserError(place, "it has no finished evaluation", _evaluate_command(evaluation))
    fix = f"name an evaluation of rows with golds, or {_evaluate_command(evaluation)}"
    table = read_table(folder / "completions.parquet", {"prompt": TEXTS, "strict": BOOLEANS}, fix)
    return table.groupby("prompt")["strict"].mean().to_dict()


def _as_evaluated(prompt: Any) -> str:
    """Return a prompt in the form of an evaluation's table."""
    return prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)


def _evaluate_command(evaluation: str) -> str:
    return f"run `grpo-recipes evaluate MODEL --recipe RECIPE --split train --samples 8 --output {evaluation}`"


# Recorded responses (`scored`)

_RECORDED = ("responses", "rewards", "logprobs")

_PROMPT = Condition("text that is not empty", lambda value: isinstance(value, str) and value != "")
_REWARD = Condition("a finite number", lambda value: NUMBER.holds(value) and math.isfinite(value))
_LOG_PROB = Condition("a finite number of at most 0", lambda value: _REWARD.holds(value) and value <= 0)
_SCORED: Shape = {"prompt": _PROMPT, "responses": [TEXT], "rewards": [_REWARD], "logprobs?": [[_LOG_PROB]]}


def check_responses(dataset: datasets.Dataset, spec: OfflineSpec, num_generations: int) -> None:
    """Raise `UserError` if a prompt has fewer recorded responses than a group has completions."""
    if spec.compares_whole_batch:
        return
    if short := sum(len(responses) < num_generations for responses in dataset["responses"]):
        problem = f"`group` compares {num_generations} responses, and {short} of {len(dataset)} prompts have fewer"
        raise UserError("`offline.baseline`", problem, "lower `num_generations`, or set `offline.baseline: batch`")


def _grouped(lines: PlacedRows, path: str) -> PlacedRows:
    """Return one row per distinct prompt, in the order of the lines. The position of a row is its first line.

    The columns are `prompt` (text), `responses` (texts), `rewards` (finite numbers) and, if the lines have them,
    `logprobs`: one log-probability per token of each response, including the end-of-sequence token.
    """
    by_prompt: dict[str, dict[str, Any]] = {}
    first_lines: list[int] = []
    for index, line in enumerate(lines.table):
        recorded = _scored_line({key: value for key, value in line.items() if value is not None})
        if isinstance(recorded, str):
            raise UserError(f"`dataset`: {lines.place(index)}", recorded, "correct or remove the line")
        prompt = recorded["prompt"]
        if prompt not in by_prompt:
            first_lines.append(index)
        row = by_prompt.setdefault(prompt, {"prompt": prompt, "responses": [], "rewards": [], "logprobs": []})
        for key in _RECORDED:
            row[key] += recorded.get(key, [])
    rows = list(by_prompt.values())
    if any(row["logprobs"] for row in rows):
        if any(len(row["logprobs"]) < len(row["responses"]) for row in rows):
            raise UserError(f"`dataset`: {path}", "some responses have logprobs and some have none", "give all or none")
    else:
        for row in rows:
            del row["logprobs"]
    return PlacedRows(datasets.Dataset.from_list(rows), selected(lines.places, first_lines))


def _scored_line(line: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return a line with lists of responses, rewards and log-probabilities, or a clause that describes its mistake."""
    if ("response" in line) == ("responses" in line):
        return "it must have either response and reward, or responses and rewards"
    recorded = dict(line)
    if "response" in line:
        for key, single in (("responses", "response"), ("rewards", "reward"), ("logprobs", "logprobs")):
            if single in line:
                recorded[key] = [line[single]]
    if problem := mismatch(recorded, _SCORED):
        return problem
    sizes = {key: len(recorded[key]) for key in _RECORDED if key in recorded}
    if 0 in sizes.values() or len(set(sizes.values())) > 1:
        counts = ", ".join(f"{size} {key}" for key, size in sizes.items())
        return f"it has {counts}, and one or more responses need as many of the others"
    return {**recorded, "rewards": [float(reward) for reward in recorded["rewards"]]}
