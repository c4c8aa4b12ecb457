"""Prompts in a plan: the first one as the model will see it, and the lengths of all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np

from grpo_recipes.checks.tokenizer import TokenizerUnavailable, check_chat_template, load_tokenizer
from grpo_recipes.checks.tools import Toolset, check_template
from grpo_recipes.data.hub import hub_answers
from grpo_recipes.data.rendering import check_one_fits, first_prompt, token_lengths
from grpo_recipes.data.tables import sample_of_rows
from grpo_recipes.recipe.dataset import DatasetSpec
from grpo_recipes.recipe.recipe import Recipe
from grpo_recipes.runs.weights import tokenizer_source
from grpo_rewards.errors import sentence

_INDENT = "  | "


@dataclass(frozen=True)
class Lengths:
    """Lengths of prompts in tokens.

    Attributes:
        measured: Number of prompts that were measured: all, or a random sample of a large dataset
            (`tables.sample_of_rows`).
        rows: Number of rows of the dataset.
        shortest: Length of the shortest prompt.
        median: Median length.
        percentile_95: Length that 95 % of the prompts do not exceed.
        longest: Length of the longest prompt.
        longest_kept: Length of the longest prompt within `max_prompt_tokens`, or None if all are longer.
        over_limit: Number of measured prompts longer than `max_prompt_tokens`, or None without a limit.
    """

    measured: int
    rows: int
    shortest: int
    median: int
    percentile_95: int
    longest: int
    longest_kept: int | None
    over_limit: int | None

    @property
    def is_sample(self) -> bool:
        """True if not all prompts were measured."""
        return self.measured < self.rows

    @classmethod
    def of(cls, lengths: np.ndarray, rows: int, limit: int | None) -> Lengths:
        """Return the summary of measured `lengths`, (N,), from a dataset of `rows` rows."""
        low, middle, high, top = np.quantile(lengths, [0, 0.5, 0.95, 1], method="higher").tolist()
        over = None if limit is None else int((lengths > limit).sum())
        kept = lengths if limit is None else lengths[lengths <= limit]
        return cls(len(lengths), rows, low, middle, high, top, int(kept.max()) if len(kept) else None, over)

    def longest_trained(self, spec: DatasetSpec) -> int | None:
        """Return the length of the longest measured prompt that is trained on, or None if all are dropped."""
        return spec.max_prompt_tokens if self.over_limit and spec.overlong_prompts == "cut_left" else self.longest_kept

    def describe(self, spec: DatasetSpec) -> str:
        """Return the summary as one sentence."""
        text = f"{self.shortest} to {self.longest} tokens, median {self.median}, 95 % at most {self.percentile_95}"
        if self.is_sample:
            text += f", of a random sample of {self.measured:,} of {self.rows:,}"
        if self.over_limit is None:
            return f"{text}; `max_prompt_tokens` sets no limit"
        done = "dropped" if spec.overlong_prompts == "drop" else "cut from the left"
        return f"{text}; {self.over_limit:,} over `max_prompt_tokens` {spec.max_prompt_tokens} are {done}"


@dataclass(frozen=True)
class PromptReport:
    """First prompt and lengths of all.

    Attributes:
        text: First prompt, rendered if there is a tokenizer, else its messages.
        tokens: Number of tokens of the first prompt, or None without a tokenizer.
        lengths: Lengths of all prompts, or None without a tokenizer.
        unknown: Reason why there is no tokenizer, or None.
    """

    text: str
    tokens: int | None
    lengths: Lengths | None
    unknown: str | None

    def describe(self, spec: DatasetSpec) -> tuple[list[str], list[str]]:
        """Return the labelled lines, which may be wrapped, and the lines of the prompt, which must not be."""
        lengths, first = f"unknown: {self.unknown}", "its messages, before the chat template:"
        if self.lengths is not None:
            lengths, first = self.lengths.describe(spec), f"{self.tokens} tokens, exactly as the model sees it:"
        head = [f"  prompt lengths  {lengths}", f"  first prompt    {first}"]
        return head, [_INDENT + line for line in self.text.split("\n")]


def prompt_report(recipe: Recipe, dataset: datasets.Dataset, toolset: Toolset | None = None) -> PromptReport:
    """Return the report on a dataset.

    Raises:
        RecipeError: the tokenizer or its chat template can't be used, or every prompt is longer than the limit.
    """
    first, template_kwargs = dataset[0]["prompt"], recipe.config.chat_template_kwargs or {}
    name = tokenizer_source(recipe.model["model_name_or_path"])
    try:
        tokenizer = load_tokenizer(recipe, local_only=Path(name).exists() or not hub_answers())
    except TokenizerUnavailable as error:
        if Path(name).exists():
            raise
        place = error.place.removeprefix(f"{recipe.source}: ")
        text = first if isinstance(first, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in first)
        return PromptReport(text, None, None, sentence(place, error.problem, error.fix))
    check_chat_template(recipe, tokenizer, first)
    tools = toolset.in_prompts(check_template(recipe, toolset, tokenizer)) if toolset is not None else None
    with recipe.naming_this_file():
        sample = sample_of_rows(len(dataset))
        measured = dataset.select(sample) if len(sample) < len(dataset) else dataset
        lengths = token_lengths(measured, tokenizer, template_kwargs, tools)
        limit = recipe.dataset.max_prompt_tokens
        if limit is not None and len(measured) == len(dataset) and recipe.dataset.overlong_prompts == "drop":
            check_one_fits(lengths, limit)
        tokens = int(token_lengths(dataset.select([0]), tokenizer, template_kwargs, tools)[0])
        text = first_prompt(dataset, tokenizer, template_kwargs, tools)
    return PromptReport(text, tokens, Lengths.of(lengths, len(dataset), limit), None)
