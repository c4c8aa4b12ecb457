"""The distribution that tokens are drawn from, compared with the one that the user's own settings ask for.

`generate` passes the logits through its processors before it draws a token. A processor that nobody asked for changes
what is sampled, and the log-probabilities of the logits do not show it. So a few rows of the same logits also go
through the processors that the settings alone give. The model runs no more often for it, and no dtype adds noise to the
comparison.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import LogitsProcessorList

from grpo_rewards.errors import shortened

WATCHED_TYPES = (bool, int, float, str, list, tuple, dict, Tensor)
"""Types of the attributes by which two processors are told apart. Models and random generators are not among them."""
CONSTANT = {"filter_value", "min_tokens_to_keep", "prepared_bias_variables"}
"""Attributes of processors that no setting decides."""

LONGEST_PHRASE = 80
"""Characters of a setting or a processor that a message shows."""

LOOK_FOR_ENDS = 32
"""Tokens after which transformers' own loop, which runs finished rows on, is asked for them again: each time it waits
for the device."""

Change = Callable[[PreTrainedModel, LogitsProcessorList, GenerationConfig, dict[str, Any]], LogitsProcessorList]
"""Function that may replace the processors of a call, from the model, the processors, the complete configuration, and
the other arguments that the processors are built from."""


class ProcessorComparison:
    """Comparison of the processors of one call of `generate` with those of the user's own settings.

    Args:
        settings: all that the user's settings name, and nothing of what the model's generation_config.json has.
        temperature: the one that the loss divides logits by.
        rows: the rows of the batch that are compared.
    """

    def __init__(self, settings: GenerationConfig, temperature: float, rows: Sequence[int]) -> None:
        self.settings, self.rows = settings, list(rows)
        self.plain = GenerationConfig(do_sample=True, temperature=temperature)
        """The settings under which the loss takes the log-probabilities of tokens."""
        self.difference = ""
        """Difference of the processors from those of the settings, as a phrase; empty if they are the same ones."""
        self.other_mode = ""
        """Difference of the generation mode from that of the settings, as a phrase; empty if it is the same one."""
        self._samples = True
        self._filters = False  # True if the settings sample from another distribution than the loss takes
        self._processors: dict[int, LogitsProcessorList] = {}  # of the settings, by row
        self._columns: dict[int, list[Tensor]] = {}  # one for each token, by row
        self._build: Callable[[GenerationConfig, slice], LogitsProcessorList]
        self._unfinished: list[int] = []
        self._width = 0  # of the prompts
        self._ends = torch.zeros(0, dtype=torch.long)

    def start(
        self, model: PreTrainedModel, found: LogitsProcessorList, config: GenerationConfig, inputs: dict[str, Any]
    ) -> LogitsProcessorList:
        """Build the settings' processors for a call of `generate`, and return its own, which are `found`."""

        def build(settings: GenerationConfig, rows: slice) -> LogitsProcessorList:
            settings = copy.copy(settings)
            settings._eos_token_tensor = config._eos_token_tensor
            settings.max_length = config.max_length
            if settings.min_new_tokens is not None:  # as `generate` does
                settings.min_length = settings.min_new_tokens + inputs["input_ids_seq_length"]
            mask = (inputs.get("model_kwargs") or {}).get("attention_mask")
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

        self._build, self._samples = build, bool(config.do_sample)
        self._processors = {row: build(self.settings, slice(row, row + 1)) for row in self.rows}
        self._columns, self._unfinished = {row: [] for row in self.rows}, list(self.rows)
        self._width = inputs["input_ids_seq_length"]
        # Behind the end of a row is padding, whatever has ended it.
        ends = [config._eos_token_tensor, config._pad_token_tensor]
        self._ends = torch.cat([token.flatten() for token in ends if token is not None])
        # Built for all rows, as those of the call: some processors hold padding and prompts.
        asked, plain = (_described(build(settings, slice(None))) for settings in (self.settings, self.plain))
        self._filters = asked != plain or not self.settings.do_sample
        self.difference = _difference(_described(found), asked)
        mode, asked_mode = config.get_generation_mode(), self.settings.get_generation_mode()
        self.other_mode = "" if mode == asked_mode else f"the generation mode is {mode.value}, not {asked_mode.value}"
        return found

    def unfinished(self, ids: Tensor) -> list[int]:
        """Return the compared rows that may still go on after `ids`, (rows, columns), in transformers' own loop."""
        if self._unfinished and (ids.shape[1] - self._width) % LOOK_FOR_ENDS == 0:
            ended = torch.isin(ids[self._unfinished, self._width :], self._ends).any(1).tolist()
            self._unfinished = [row for row, end in zip(self._unfinished, ended, strict=True) if not end]
        return self._unfinished

    def compare(self, rows: Sequence[int], ids: Tensor, logits: Tensor, scores: Tensor, tokens: Tensor) -> None:
        """Compare the distributions of one token of each of `rows`.

        Args:
            rows: the rows, some of `self.rows`.
            ids: the tokens before, with padding on the left as `generate` has them, (rows, columns).
            logits: what the model gave, in float32, (rows, vocabulary).
            scores: what the processors of `generate` made of the logits, (rows, vocabulary).
            tokens: the tokens that were drawn, (rows,).
        """
        drawn = _distribution(scores, self._samples)
        shifts = torch.zeros_like(drawn[:, 0])
        if self._filters:
            expected = (logits / self.plain.temperature).log_softmax(-1)
            shifts = (drawn.gather(1, tokens[:, None]).log() - expected.gather(1, tokens[:, None]))[:, 0].abs()
        # One row at a time: processors may hold what belongs to a row, and rows end at different tokens.
        places = range(len(rows))
        asked = torch.cat([self._processors[rows[n]](ids[n : n + 1], logits[n : n + 1]) for n in places])
        distances = (drawn - _distribution(asked, bool(self.settings.do_sample))).abs().sum(-1) / 2
        for row, column in zip(rows, torch.stack([distances, shifts], 1), strict=True):
            self._columns[row].append(column)

    def measured(self, completions: Sequence[Sequence[int]]) -> Tensor:
        """Return (2, tokens of all compared rows).

        The first line holds, for each token, the probability that one distribution has elsewhere than the other (the
        total variation distance, 0 to 1). The second holds by how much the token's log-probability differs from the
        loss's because of the settings.
        """
        columns: list[Tensor] = []
        for row, found in self._columns.items():
            columns += found[: len(completions[row])]
        return torch.stack(columns, 1) if columns else torch.zeros(2, 0)

    def filters(self) -> list[str]:
        """Return the settings that change what is sampled and that the loss does not take, as `top_k 12`."""
        if not self._filters:
            return []
        every, found = slice(None), []
        complete = _described(self._build(self.settings, every))  # fresh ones: some keep what they prepare
        for name, value in self.settings.to_dict().items():
            neutral = getattr(self.plain, name, None)
            if value in (None, neutral):
                continue
            without = copy.copy(self.settings)
            setattr(without, name, neutral)
            if name == "do_sample" or _described(self._build(without, every)) != complete:
                found.append(shortened(f"{name} {value}", LONGEST_PHRASE))
        return found


@contextmanager
def each_built(model: PreTrainedModel, change: Change) -> Iterator[None]:
    """While it lasts, `generate` of `model` runs with what `change` makes of the processors that it has built."""
    stock, own = model._get_logits_processor, "_get_logits_processor" in vars(model)

    def build(generation_config: GenerationConfig, **inputs: Any) -> LogitsProcessorList:
        found = stock(generation_config=generation_config, **inputs)
        return change(model, found, generation_config, inputs)

    model._get_logits_processor = build
    try:
        yield
    finally:
        if own:
            model._get_logits_processor = stock
        else:
            del model._get_logits_processor


class Observed(LogitsProcessorList):
    """The processors of a call of `generate`, each run of which goes through `see`."""

    def __init__(self, processors: LogitsProcessorList, see: Callable[[Callable[[], Tensor]], Tensor]) -> None:
        super().__init__(processors)
        self.see = see

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Return the processed scores, (rows, vocabulary)."""
        run = super().__call__
        return self.see(lambda: run(input_ids, scores, **kwargs))


def _distribution(scores: Tensor, samples: bool) -> Tensor:
    """Return the probabilities under which a token is picked, (rows, vocabulary)."""
    if samples:
        return scores.softmax(-1)
    return torch.zeros_like(scores).scatter(1, scores.argmax(-1, keepdim=True), 1.0)


def _described(processors: LogitsProcessorList) -> list[str]:
    """Return a description of each processor that two processors share only if they do the same."""
    found = []
    for processor in processors:
        values = {name: value for name, value in vars(processor).items() if isinstance(value, WATCHED_TYPES)}
        shown = ", ".join(
            f"{name}={value.tolist() if isinstance(value, Tensor) else value}"
            for name, value in values.items()
            if name not in CONSTANT and not name.startswith("_")
        )
        found.append(f"{type(processor).__name__}({shown})")
    return found


def _difference(found: list[str], asked: list[str]) -> str:
    """Return how two descriptions differ, as a phrase; empty if they don't."""
    if found == asked:
        return ""
    more = [shortened(text, LONGEST_PHRASE) for text in found if text not in asked]
    less = [shortened(text, LONGEST_PHRASE) for text in asked if text not in found]
    if not more and not less:
        return "`generate` applies the processors of the settings in another order"
    return f"`generate` applies {', '.join(more) or 'nothing'} where the settings give {', '.join(less) or 'nothing'}"
