"""Settings that decide which distribution tokens are drawn from: a model's published ones, and the user's own.

transformers fills every field that a caller of `generate` leaves at None from `model.generation_config`, and adopts
custom entries of it. A published `sequence_bias` or `min_new_tokens` would steer the sampling, while the loss takes the
policy without it. So `PublishedSettings` puts these settings aside.

A model's class may still bring logits processors of its own, and the log-probabilities of the logits do not show them.
So `ProcessorComparison` passes the logits of a few rows through the processors that the user's settings alone give. The
model runs no more often for it, and no dtype adds noise to the comparison.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import LongTensor, Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import LogitsProcessorList

from grpo_recipes.generation.models import base_model, method_replaced
from grpo_rewards.errors import one_line, shortened

if TYPE_CHECKING:
    from grpo_recipes.generation.models import CausalLM

KEPT = frozenset({
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id",
    "cache_config", "cache_implementation", "max_cache_len", "prefill_chunk_size", "use_cache",
    "compile_config", "disable_compile",
})  # fmt: skip
"""Published fields that stay in force: special tokens, and how (not what) the model computes.

A field that is not listed is neutral, so that a field of a later transformers steers nothing.
"""

WATCHED_TYPES = (bool, int, float, str, list, tuple, dict, Tensor)
"""Types of the attributes that two processors are compared by. Models and random generators are not among them."""
CONSTANT = {"filter_value", "min_tokens_to_keep", "prepared_bias_variables"}
"""Attributes of processors that no setting decides."""

LONGEST_VALUE, LONGEST_PHRASE = 60, 80
"""Number of characters that a message shows of a published value, and of a setting or a processor."""

LOOK_FOR_ENDS = 32
"""Interval in tokens at which finished rows are looked for in transformers' own loop. Each look waits for the
device."""

Change = Callable[["CausalLM", LogitsProcessorList, GenerationConfig, dict[str, Any]], LogitsProcessorList]
"""Function that may replace the processors of a call, from the model, the processors, the complete configuration, and
the other arguments that the processors are built from."""


# ---- the model's published settings


class PublishedSettings:
    """Generation settings that a model is published with. They steer no completion, which is announced once."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.announce = announce
        self.is_announced = False

    @contextmanager
    def aside(self, policy: nn.Module, requested: GenerationConfig) -> Iterator[None]:
        """Give the model a neutral `generation_config` inside this block, and restore the published object afterwards.

        Args:
            policy: the model without accelerate's wrappers, with or without an adapter.
            requested: the settings that `generate` or `generate_batch` is called with.
        """
        # PEFT's `generate` assigns a configuration of the adapter's wrapper, if somebody has set one, to the base
        # model. Without an adapter both are one object, whose configuration may be replaced and restored twice.
        owners = [base_model(policy)]
        if "generation_config" in vars(policy):
            owners.append(cast("CausalLM", policy))
        published = [(owner, getattr(owner, "generation_config", None)) for owner in owners]
        for owner, config in published:
            if config is not None:
                self.announce_ignored(config, requested)
                owner.generation_config = neutral(config, requested)
        try:
            yield
        finally:
            for owner, config in published:
                owner.generation_config = config  # type: ignore[assignment]  # None if it was None

    def announce_ignored(self, published: GenerationConfig, requested: GenerationConfig) -> None:
        """Announce, the first time only, the published settings that completions do not follow."""
        if self.is_announced or not (ignored := ignored_fields(published, requested)):
            return
        self.is_announced = True
        pairs = ", ".join(f"{name}: {shortened(one_line(value), LONGEST_VALUE)}" for name, value in ignored.items())
        self.announce(f"the model's generation_config is not applied to completions ({pairs})")


def neutral(published: GenerationConfig, requested: GenerationConfig) -> GenerationConfig:
    """Return a configuration that adds to `requested` only the `KEPT` fields of the published one."""
    config = GenerationConfig()
    for name in KEPT:
        setattr(config, name, getattr(published, name, None))
    if requested.do_sample:
        config.do_sample = True  # transformers warns that a `top_k` without it may be ignored
        config.top_k = 0  # transformers' own default keeps the 50 likeliest tokens
    return config


def ignored_fields(published: GenerationConfig, requested: GenerationConfig) -> dict[str, Any]:
    """Return the published settings, by name, whose values are not in force in a call with `requested`."""
    in_force = {**GenerationConfig._get_default_generation_params(), **_set_fields(neutral(published, requested))}
    in_force |= _set_fields(requested)
    given = _set_fields(published)
    # A field without a default is off: False means the same.
    return {name: given[name] for name in sorted(given.keys() - KEPT) if given[name] != in_force.get(name, False)}


def _set_fields(config: GenerationConfig) -> dict[str, Any]:
    """Return the fields of a configuration that are not None, without private ones and metadata."""
    return {
        name: value
        for name, value in vars(config).items()
        if value is not None and not name.startswith("_") and name != "transformers_version"
    }


# ---- the processors of a call of `generate`


class ProcessorComparison:
    """Comparison of the processors of one call of `generate` with those of the user's own settings.

    Args:
        settings: all that the user's settings name, and nothing of the model's generation_config.json.
        temperature: divisor of the logits in the loss.
        rows: indices of the rows of the batch that are compared.
    """

    def __init__(self, settings: GenerationConfig, temperature: float, rows: Sequence[int]) -> None:
        self.settings, self.rows = settings, list(rows)
        self.loss_settings = GenerationConfig(do_sample=True, temperature=temperature)
        """Settings that the loss computes log-probabilities under."""
        self.difference = ""
        """Difference of the processors from those of the settings, as a phrase, or ""."""
        self.other_mode = ""
        """Difference of the generation mode from that of the settings, as a phrase, or ""."""
        self._samples: bool
        self._filters: bool  # True if the settings sample from another distribution than the loss takes
        self._processors: dict[int, LogitsProcessorList]  # processors of the settings, by row
        self._columns: dict[int, list[Tensor]] = {}  # one for each token, by row
        self._call: tuple[CausalLM, GenerationConfig, dict[str, Any]]

    def start(
        self, model: CausalLM, found: LogitsProcessorList, config: GenerationConfig, inputs: dict[str, Any]
    ) -> LogitsProcessorList:
        """Build the settings' processors for a call of `generate`, and return its own, which are `found`."""
        self._call, self._samples = (model, config, inputs), bool(config.do_sample)
        self._processors = {row: self._built(self.settings, slice(row, row + 1)) for row in self.rows}
        self._columns = {row: [] for row in self.rows}
        # Built for all rows, as those of the call: some processors hold padding and prompts.
        expected, of_loss = _described(self._built(self.settings)), _described(self._built(self.loss_settings))
        self._filters = expected != of_loss or not self.settings.do_sample
        self.difference = _difference(_described(found), expected)
        mode, expected_mode = config.get_generation_mode(), self.settings.get_generation_mode()
        if mode != expected_mode:
            self.other_mode = f"the generation mode is {mode.value}, not {expected_mode.value}"
        return found

    def _built(self, settings: GenerationConfig, rows: slice = slice(None)) -> LogitsProcessorList:
        """Return new processors for some rows of the call, as transformers builds them from these settings alone."""
        model, config, inputs = self._call
        settings = copy.copy(settings)
        settings._eos_token_tensor = config._eos_token_tensor
        settings.max_length = config.max_length
        if settings.min_new_tokens is not None:  # as `generate` does
            settings.min_length = settings.min_new_tokens + inputs["input_ids_seq_length"]
        mask = inputs["model_kwargs"].get("attention_mask")
        # Transformers' own method: a model may have replaced it by one with more processors.
        return GenerationMixin._get_logits_processor(
            model,
            generation_config=settings,
            input_ids_seq_length=inputs["input_ids_seq_length"],
            encoder_input_ids=inputs["encoder_input_ids"][rows],
            logits_processor=LogitsProcessorList(),
            device=inputs["device"],
            model_kwargs={"attention_mask": None if mask is None else mask[rows]},
        )

    def unfinished(self, rows: list[int], ids: Tensor) -> list[int]:
        """Return those of `rows` that may still go on after `ids`, (rows of the batch, columns)."""
        _, config, inputs = self._call
        width = inputs["input_ids_seq_length"]
        if not rows or (ids.shape[1] - width) % LOOK_FOR_ENDS:
            return rows
        # Padding follows the end of a row, whatever has ended it: an end token, a stop string or a criterion.
        ends = [token for token in (config._eos_token_tensor, config._pad_token_tensor) if token is not None]
        ended = [any(torch.isin(ids[row, width:], token).any() for token in ends) for row in rows]
        return [row for row, end in zip(rows, ended, strict=True) if not end]

    def compare(self, rows: Sequence[int], ids: Tensor, logits: Tensor, scores: Tensor, tokens: Tensor) -> None:
        """Compare the distributions of one token of each of `rows`.

        Args:
            rows: the rows, some of `self.rows`.
            ids: the tokens before, with padding on the left as in `generate`, (rows, columns).
            logits: the model's output in float32, (rows, vocabulary).
            scores: the logits after the processors of `generate`, (rows, vocabulary).
            tokens: the tokens that were drawn, (rows,).
        """
        drawn = _distribution(scores, self._samples)
        shifts = torch.zeros_like(drawn[:, 0])
        if self._filters:
            expected = (logits / self.loss_settings.temperature).log_softmax(-1)
            shifts = (drawn.gather(1, tokens[:, None]).log() - expected.gather(1, tokens[:, None]))[:, 0].abs()
        # One row at a time: processors may hold what belongs to a row, and rows end at different tokens.
        processed = []
        for n, row in enumerate(rows):
            before = cast(LongTensor, ids[n : n + 1])  # transformers' annotation of token IDs
            processed.append(self._processors[row](before, logits[n : n + 1]))
        own = _distribution(torch.cat(processed), bool(self.settings.do_sample))
        distances = (drawn - own).abs().sum(-1) / 2
        for row, column in zip(rows, torch.stack([distances, shifts], 1), strict=True):
            self._columns[row].append(column)

    def measured(self, completions: Sequence[Sequence[int]]) -> Tensor:
        """Return (2, tokens of all compared rows).

        The first line holds the total variation distance of the two distributions of each token (0 to 1): the
        probability that lies elsewhere. The second holds by how much the token's log-probability differs from the
        loss's because of the settings.
        """
        columns: list[Tensor] = []
        for row, found in self._columns.items():  # transformers' own loop runs finished rows on
            columns += found[: len(completions[row])]
        return torch.stack(columns, 1) if columns else torch.zeros(2, 0)

    def filters(self) -> list[str]:
        """Return the settings that change what is sampled and that the loss does not take, as `top_k 12`."""
        if not self._filters:
            return []
        found = []
        # Built anew: some processors keep what they prepare, and would differ from fresh ones.
        complete = _described(self._built(self.settings))
        for name, value in self.settings.to_dict().items():
            unset = getattr(self.loss_settings, name, None)
            if value in (None, unset):
                continue
            without = copy.copy(self.settings)
            setattr(without, name, unset)
            if name == "do_sample" or _described(self._built(without)) != complete:
                found.append(shortened(f"{name} {value}", LONGEST_PHRASE))
        return found


@contextmanager
def each_built(model: CausalLM, change: Change) -> Iterator[None]:
    """Let `generate` of `model` inside this block use what `change` makes of the processors that it has built."""
    stock = model._get_logits_processor

    def build(generation_config: GenerationConfig, **inputs: Any) -> LogitsProcessorList:
        found = stock(generation_config=generation_config, **inputs)
        return change(model, found, generation_config, inputs)

    with method_replaced(model, "_get_logits_processor", build):
        yield


def _distribution(scores: Tensor, samples: bool) -> Tensor:
    """Return the probabilities under which a token is picked, (rows, vocabulary)."""
    if samples:
        return scores.softmax(-1)
    return torch.zeros_like(scores).scatter(1, scores.argmax(-1, keepdim=True), 1.0)


def _described(processors: LogitsProcessorList) -> list[str]:
    """Return a description of each processor that two processors share only if they do the same."""
    found = []
    for processor in processors:
        values = []
        for name, value in vars(processor).items():
            if isinstance(value, WATCHED_TYPES) and name not in CONSTANT and not name.startswith("_"):
                values.append(f"{name}={value.tolist() if isinstance(value, Tensor) else value}")
        found.append(f"{type(processor).__name__}({', '.join(values)})")
    return found


def _difference(found: list[str], expected: list[str]) -> str:
    """Return how two descriptions differ, as a phrase, or ""."""
    if found == expected:
        return ""
    more = [shortened(text, LONGEST_PHRASE) for text in found if text not in expected]
    less = [shortened(text, LONGEST_PHRASE) for text in expected if text not in found]
    if not more and not less:
        return "`generate` applies the processors of the settings in another order"
    return f"`generate` applies {', '.join(more) or 'nothing'} where the settings give {', '.join(less) or 'nothing'}"
