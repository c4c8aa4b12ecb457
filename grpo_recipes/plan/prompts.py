"""What `plan` shows of the prompts: one as the model will see it, and how long they are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from grpo_recipes.checks.tokenizer import TokenizerUnavailable, check_chat_template, load_tokenizer
from grpo_recipes.data.hub import hub_answers
from grpo_recipes.data.prompts import hash_sample, rendered, token_lengths
from grpo_recipes.recipe.recipe import Recipe
from grpo_recipes.recipe.specs import DatasetSpec
from grpo_recipes.runs.weights import tokenizer_source

_INDENT = "  | "


@dataclass(frozen=True)
class Lengths:
    """Lengths of prompts in tokens; of many rows a hash sample is measured (`prompts.hash_sample`)."""

    measured: int
    rows: int
    shortest: int
    median: int
    percentile_95: int
    longest: int
    over_limit: int | None
    """How many of the measured ones are longer than `max_prompt_tokens`; None without a limit."""

    @classmethod
    def of(cls, lengths: np.ndarray, rows: int, limit: int | None) -> Lengths:
        """The summary of measured `lengths`, (N,), of `rows` rows."""
        low, middle, high, top = np.quantile(lengths, [0, 0.5, 0.95, 1], method="higher").tolist()
        over = None if limit is None else int((lengths > limit).sum())
        return cls(len(lengths), rows, low, middle, high, top, over)

    def longest_trained(self, spec: DatasetSpec) -> int | None:
        """The longest prompt, none over `max_prompt_tokens`; None where some are dropped, and only training measures the rest."""
        if not self.over_limit:
            return self.longest
        return spec.max_prompt_tokens if spec.overlong_prompts == "cut_left" else None

    def describe(self, spec: DatasetSpec) -> str:
        """The summary as one sentence."""
        sampled = "" if self.measured == self.rows else f", of a hash sample of {self.measured:,} of {self.rows:,}"
        sentence = f"{self.shortest} to {self.longest} tokens, median {self.median}, 95 % at most {self.percentile_95}{sampled}"
        if self.over_limit is None:
            return f"{sentence}; `max_prompt_tokens` sets no limit"
        done = "dropped" if spec.overlong_prompts == "drop" else "cut from the left"
        return f"{sentence}; {self.over_limit:,} over `max_prompt_tokens` {spec.max_prompt_tokens} are {done}"


@dataclass(frozen=True)
class PromptReport:
    """The first prompt, rendered where a tokenizer is at hand, and the lengths of all; else why there is none."""

    text: str
    tokens: int | None
    lengths: Lengths | None
    unknown: str | None

    def describe(self, spec: DatasetSpec) -> tuple[list[str], list[str]]:
        """Lines to wrap, and the prompt's own lines, which are to stay as they are."""
        if self.lengths is None:
            head = [
                f"  prompt lengths  unknown: {self.unknown}",
                "  first prompt    its messages, before the chat template:",
            ]
        else:
            head = [
                f"  prompt lengths  {self.lengths.describe(spec)}",
                f"  first prompt    {self.tokens} tokens, exactly as the model sees it:",
            ]
        return head, [_INDENT + line for line in self.text.split("\n")]

    def as_dict(self) -> dict[str, Any]:
        """What `plan --json` prints."""
        lengths = asdict(self.lengths) if self.lengths else None
        return {"text": self.text, "tokens": self.tokens, "lengths": lengths, "unknown": self.unknown}


def prompt_report(recipe: Recipe, dataset: datasets.Dataset) -> PromptReport:
    """Look at the prompts of a dataset. Raises `RecipeError` for a tokenizer or chat template that can't be used."""
    first, template_kwargs = dataset[0]["prompt"], recipe.config.chat_template_kwargs or {}
    name = tokenizer_source(recipe.model["model_name_or_path"])
    try:
        tokenizer = load_tokenizer(recipe, dataset, local_only=Path(name).exists() or not hub_answers())
    except TokenizerUnavailable as error:
        return PromptReport(_as_messages(first), None, None, str(error).removeprefix(f"{recipe.source}: "))
    check_chat_template(recipe, tokenizer, first)
    with recipe.naming_this_file():
        sample = hash_sample(len(dataset))
        lengths = token_lengths(
            dataset.select(sample) if len(sample) < len(dataset) else dataset, tokenizer, template_kwargs
        )
        tokens = int(token_lengths(dataset.select([0]), tokenizer, template_kwargs)[0])
    summary = Lengths.of(lengths, len(dataset), recipe.dataset.max_prompt_tokens)
    return PromptReport(rendered(first, tokenizer, template_kwargs), tokens, summary, None)


def _as_messages(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)
