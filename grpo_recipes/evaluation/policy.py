"""Policies of an evaluation: objects that complete the rows of a dataset, with tools or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import Any, Protocol

from datasets import Dataset

from grpo_recipes.checks.tokenizer import ChatTemplate
from grpo_recipes.data.rendering import rendered
from grpo_recipes.evaluation.accuracy import MeasuredReward
from grpo_recipes.evaluation.engines import Engine, load_engine
from grpo_recipes.evaluation.saved_model import SavedModel
from grpo_recipes.evaluation.settings import Settings
from grpo_recipes.evaluation.vllm_engine import VLLM, load_vllm, made_with
from grpo_recipes.tools.loop import Row


@dataclass(frozen=True)
class Completions:
    """Completions of a batch of rows, as rewards get them and as they are stored.

    Attributes:
        prompts: Prompts as the policy saw them.
        given: Completions as rewards get them: texts, or messages if the policy has tools.
        texts: Text that is judged: the completion, or the last message of the policy.
        environments: Environment of each row. Empty without environments.
        columns: Further columns of `completions.parquet`.
        dialogs: Turns of each completion, with their tokens. Empty without tools.
    """

    prompts: Sequence[Any]
    given: Sequence[Any]
    texts: Sequence[str]
    environments: Sequence[Any] = ()
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    dialogs: Sequence[Row] = ()


class Policy(Protocol):
    """A policy to evaluate, with tools or without."""

    def complete(self, rows: Sequence[Mapping[str, Any]], settings: Settings) -> Completions:
        """Return a completion of each row of the dataset, in order."""

    def record(self, settings: Settings) -> dict[str, Any]:
        """Return facts for `evaluation.json` that do not identify the evaluation."""


@dataclass(eq=False, kw_only=True)
class ModelPolicy:
    """Policy that completes each prompt in one turn.

    The model is loaded for the first batch, because a finished evaluation needs none.

    Attributes:
        model: Model or adapter.
        dataset: Rows to complete.
        vllm: Options of vLLM, or None for transformers.
        template_kwargs: TRL's `chat_template_kwargs`.
        chat_template: Chat template that replaces the model's.
    """

    model: SavedModel
    dataset: Dataset
    vllm: VLLM | None = None
    template_kwargs: Mapping[str, Any] | None = None
    chat_template: ChatTemplate | None = None

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the model."""
        return self.model.padding_tokenizer(self.chat_template)

    @cached_property
    def engine(self) -> Engine:
        """Engine of the model."""
        # A chat template that fails is reported before the model is loaded.
        rendered(self.dataset[0]["prompt"], self.tokenizer, self.template_kwargs or {})
        if self.vllm is None:
            return load_engine(self.model, self.tokenizer)
        return load_vllm(self.model, self.vllm, self.tokenizer)

    def complete(self, rows: Sequence[Mapping[str, Any]], settings: Settings) -> Completions:
        """Return a completion of each row of the dataset, in order."""
        prompts = [row["prompt"] for row in rows]
        texts = self.engine(prompts, settings)
        return Completions(prompts, texts, texts)

    def record(self, settings: Settings) -> dict[str, Any]:
        """Return version, precision and sampling settings for `evaluation.json`."""
        if self.vllm is not None:
            made = made_with(self.model, self.vllm)
        else:
            made = {"version": version("transformers"), "dtype": self.model.dtype, **self.model.describe_quantization()}
        return {"made_with": made, "sampling": self.engine.sampling(settings)}

    def trial_row(self) -> dict[str, Any]:
        """Return the columns of a row on which a reward is tried."""
        return self.dataset[0]

    def rewards(self) -> list[MeasuredReward]:
        """Return the rewards that the policy adds to those of the recipe."""
        return []
