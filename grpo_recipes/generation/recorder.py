"""Recorder of the log-probabilities under which transformers' own loop picks its tokens.

`generate` returns them with `output_logits` only, for every row and the whole vocabulary. The recorder reads the logits
of a few rows as they pass, and keeps one number per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import LongTensor, Tensor
from transformers import GenerationConfig, StoppingCriteria
from transformers.generation import LogitsProcessor, LogitsProcessorList

from grpo_recipes.generation.sampling_settings import ProcessorComparison, each_built

if TYPE_CHECKING:
    from grpo_recipes.generation.models import CausalLM


class Recorder(StoppingCriteria):
    """Recorder of one call of `generate`: a stopping criterion, which is called once per token, and stops nothing.

    Log-probabilities are those of the logits over `temperature`, before any processor, as in the loss.

    Args:
        places: indices of the rows that are recorded.
        temperature: divisor of the logits.
        comparison: comparison of the processors, which gets what they make of the same logits, or None.
    """

    def __init__(
        self, places: Sequence[int], temperature: float, comparison: ProcessorComparison | None = None
    ) -> None:
        self.places, self.temperature, self.comparison = list(places), temperature, comparison
        self._compared = [] if comparison is None else comparison.rows
        self._logits: Tensor | None = None  # logits of the newest forward, (rows, vocabulary)
        # Logits of the compared rows before and after the processors, or None until these run.
        self._before: Tensor | None = None
        self._after: Tensor | None = None
        self._columns: list[Tensor] = []  # log-probabilities of one token each, (places,)
        self._width: int  # number of columns at the newest token
        self._lost = False

    @contextmanager
    def reading(self, model: CausalLM) -> Iterator[None]:
        """Read the logits of each forward of `model` inside this block, and what its processors make of them."""
        # A hook on the forward, because a decoding loop of the model's own may skip the processors.
        hook = model.register_forward_hook(self._read_forward)
        try:
            with each_built(model, self._observed):
                yield
        finally:
            hook.remove()

    def _observed(
        self, model: CausalLM, found: LogitsProcessorList, config: GenerationConfig, inputs: dict[str, Any]
    ) -> LogitsProcessorList:
        """Return the processors of a call of `generate`, which are `found`, between two that read the scores."""
        if self.comparison is not None:
            self.comparison.start(model, found, config, inputs)
        return LogitsProcessorList([_Reader(self._read_before), *found, _Reader(self._read_after)])

    def _read_forward(self, module: Any, args: Any, output: Any) -> None:
        if self._before is None:  # not inside the processors, where guidance runs the model again
            self._logits = output.logits[:, -1]

    def _read_before(self, logits: Tensor) -> None:
        self._before = logits[self._compared]  # a copy, because processors may write to the logits

    def _read_after(self, scores: Tensor) -> None:
        self._after = scores[self._compared]

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Record the tokens that have just been appended to `input_ids`, (rows, columns). Return False for all rows."""
        logits, width = self._logits, input_ids.shape[1]
        # Beams have rows of their own, and assisted decoding appends several tokens at once.
        if logits is None or len(logits) != len(input_ids) or (self._columns and width != self._width + 1):
            self._lost = True
        if not self._lost:
            assert logits is not None
            log_probs = (logits[self.places].float() / self.temperature).log_softmax(-1)
            self._columns.append(log_probs.gather(1, input_ids[self.places, -1:])[:, 0])
            if self._compared and self.comparison and self._before is not None and self._after is not None:
                ids = input_ids[self._compared]
                self.comparison.compare(self._compared, ids[:, :-1], self._before, self._after, ids[:, -1])
                self._compared = self.comparison.unfinished(self._compared, input_ids)
        self._width, self._logits, self._before, self._after = width, None, None, None
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    @property
    def log_probs(self) -> Tensor | None:
        """Log-probabilities (places, tokens), or None if tokens and forwards do not go together.

        Behind the end of a row they are those of padding, and mean nothing.
        """
        return None if self._lost or not self._columns else torch.stack(self._columns, 1)


class _Reader(LogitsProcessor):
    """Processor that changes nothing, and shows the scores to a function."""

    def __init__(self, read: Callable[[Tensor], None]) -> None:
        self.read = read

    def __call__(self, input_ids: LongTensor, scores: Tensor) -> Tensor:
        """Return the scores."""
        self.read(scores)
        return scores
