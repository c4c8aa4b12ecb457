"""Datasets: which rows a recipe's `dataset` key stands for, to train on and to hold out.

`load` reads the rows (`sources`), makes prompts of them (`prompts`, with a preset of `presets` where one is named) and takes
the training or the held-out side. Every table is memory-mapped by `datasets`; no row is held as a Python object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import datasets
import numpy as np

from grpo_recipes.data.arithmetic import DEFAULT_ARITHMETIC_SIZE, arithmetic_problems
from grpo_recipes.data.pass_rate import rows_to_keep
from grpo_recipes.data.presets import PRESETS
from grpo_recipes.data.prompts import Prompts, phrased
from grpo_recipes.data.recorded import grouped
from grpo_recipes.data.sources import (
    Keys,
    Rows,
    file_objects,
    local_splits,
    mixed,
    read,
    rows_in_common,
    sliced,
    slices,
)
from grpo_recipes.recipe.specs import DatasetSpec, SourceSpec
from grpo_rewards.errors import UserError

if TYPE_CHECKING:  # takes seconds to import, and readers of single datasets need none
    from grpo_recipes.recipe.recipe import Recipe

_TRAINED = Keys("path", "split")


def load(spec: DatasetSpec, *, evaluation: bool = False) -> datasets.Dataset:
    """The rows of a spec: those to train on, or the held-out ones; see `load_prompts`."""
    return load_prompts(spec, evaluation=evaluation).dataset


def load_prompts(spec: DatasetSpec, *, evaluation: bool = False) -> Prompts:
    """Read the rows of a spec: those to train on, or the held-out ones.

    Returns:
        A dataset with the columns `prompt` (a list of messages, or a string), with a preset `answer` (the final answer
        alone), and those of the rows that neither was made of; for `scored` the columns `prompt`, `responses`, `rewards`
        and, where recorded, `logprobs`.

    Raises:
        sources.DatasetUnreachable: the hub does not answer and the local cache has no copy.
        UserError: nothing to read, a row that can't be used, or no row left.
    """
    sources, keys = _held_out(spec) if evaluation else (_sources(spec), _TRAINED)
    if spec.name == "scored":
        dataset = _recorded(spec, sources[0], keys)
        prompts = Prompts(dataset, np.zeros(len(dataset), np.uint64))
    else:
        prompts = phrased(_rows(spec, sources, keys), spec)
    if spec.eval_share is not None:
        prompts = prompts.select(np.flatnonzero(_is_held_out(prompts.identities, spec.eval_share) == evaluation))
        keys = Keys("path", "eval_share")
    if spec.pass_rate is not None and not evaluation and len(prompts.dataset):
        prompts = prompts.select(rows_to_keep(prompts.dataset, spec.pass_rate))
    if len(prompts.dataset) == 0:
        what = f"{spec.eval_share} of the rows" if keys.split == "eval_share" else repr(sources[0].split)
        raise UserError(f"`dataset.{keys.split}`: {what} of {_described(sources)} is empty: choose other rows")
    return prompts


def recipe_prompts(recipe: Recipe, *, evaluation: bool = False) -> Prompts:
    """Return the training or the held-out prompts of a recipe, as `load_prompts` does.

    Raises:
        RecipeError: `load_prompts` raises an error. The message then names the recipe's file first, unless the hub does
            not answer.
    """
    with recipe.naming_this_file():
        return load_prompts(recipe.dataset, evaluation=evaluation)


def check_disjoint(trained: Prompts, held_out: Prompts, spec: DatasetSpec) -> None:
    """Raise `UserError` for held-out rows that pose the problem of a training row, compared by 64-bit hashes."""
    shared = np.isin(held_out.identities, trained.identities)
    if not shared.any():
        return
    key = "eval_path" if spec.eval_path is not None else "eval_split"
    raise UserError(
        f"`dataset.{key}`: {shared.sum()} of {len(shared)} held-out rows are training rows too (row "
        f"{int(np.argmax(shared)) + 1} is the first): remove them from one side, or let `dataset.eval_share` divide the rows"
    )


def _is_held_out(identities: np.ndarray, share: float) -> np.ndarray:
    """Which rows are held out, (N,) bool: a row's own hash says so, whatever rows lie beside it."""
    return identities < np.uint64(int(share * 2.0**64))


def _sources(spec: DatasetSpec) -> list[SourceSpec]:
    return _listed(spec, spec.path, spec.split)


def _listed(spec: DatasetSpec, path: str | list | None, split: str) -> list[SourceSpec]:
    """The sources of a path; without one, the preset's home on the hub."""
    if isinstance(path, list):
        return [source if source.columns or not spec.columns else _renamed(source, spec.columns) for source in path]
    preset = PRESETS.get(spec.name) if spec.name else None
    home = preset.hub_id if preset is not None and preset.hub_id else str(spec.name)
    name = spec.config
    if name is None and preset is not None and (path or home) == preset.hub_id:
        name = preset.hub_config
    return [SourceSpec(path or home, name=name, split=split, columns=spec.columns)]


def _renamed(source: SourceSpec, columns: list[str] | dict) -> SourceSpec:
    return SourceSpec(**{**vars(source), "columns": columns})


def _held_out(spec: DatasetSpec) -> tuple[list[SourceSpec], Keys]:
    if spec.eval_share is not None:
        return _sources(spec), _TRAINED
    if spec.eval_path is None and spec.eval_split is None:
        raise UserError(
            "`dataset.eval_split`: missing, so there is nothing to evaluate on: name a split, or turn eval_strategy off"
        )
    split = spec.split if spec.eval_split is None else spec.eval_split
    path = spec.path if spec.eval_path is None else spec.eval_path
    keys = Keys("path" if spec.eval_path is None else "eval_path", "split" if spec.eval_split is None else "eval_split")
    return _listed(spec, path, split), keys


def _described(sources: list[SourceSpec]) -> str:
    return ", ".join(source.path for source in sources)


def _rows(spec: DatasetSpec, sources: list[SourceSpec], keys: Keys) -> Rows:
    if spec.name == "arithmetic":
        return _arithmetic(spec, sources[0], keys)
    is_mixture = isinstance(spec.path if keys.path == "path" else spec.eval_path, list)
    if is_mixture:
        return mixed(sources, keys)
    _refuse_rows_trained_on(spec, sources[0], keys)
    return read(sources[0], keys)


def _refuse_rows_trained_on(spec: DatasetSpec, source: SourceSpec, keys: Keys) -> None:
    """Keep a file with one split from being both trained and evaluated on, whatever names its split is given."""
    if keys != Keys("path", "eval_split"):
        return
    splits = local_splits(source, keys)
    if splits is not None and "" in splits:
        _refuse_shared(spec, source, len(splits[""].table), keys)


def _refuse_shared(spec: DatasetSpec, source: SourceSpec, length: int, keys: Keys) -> None:
    if shared := rows_in_common(length, (spec.split, source.split), keys):
        raise UserError(
            f"`dataset.eval_split`: {shared} rows of {source.path} would be both trained and evaluated on: it holds "
            "one split: name the held-out file in eval_path, give split and eval_split slices that do not overlap, or "
            "an eval_share"
        )


def _arithmetic(spec: DatasetSpec, source: SourceSpec, keys: Keys) -> Rows:
    size = DEFAULT_ARITHMETIC_SIZE if spec.size is None else spec.size
    problems = [
        problem
        for split, start, stop in slices({"train": size, "test": size}, source.split, keys)
        for problem in arithmetic_problems(split, stop, spec.seed)[start:]
    ]
    return Rows(datasets.Dataset.from_list(problems), lambda index: f"arithmetic, row {index + 1}")


def _recorded(spec: DatasetSpec, source: SourceSpec, keys: Keys) -> datasets.Dataset:
    """The prompts of `scored` that the split names: it counts prompts, which may stand on several lines."""
    table = grouped(file_objects(source, keys), source.path)
    if keys == Keys("path", "eval_split"):
        _refuse_shared(spec, source, len(table), keys)
    return sliced({"": Rows(table, str)}, source.split, keys).table
