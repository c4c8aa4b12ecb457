"""The log-probabilities under which transformers' own loop picks its tokens.

`generate` returns them with `output_logits` only, for every row and the whole vocabulary. Here they are read off the logits
as they pass, for a few rows, and one number a token is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria
from transformers.generation import LogitsProcessorList

from grpo_recipes.generation.processed import Observed, ProcessorComparison, each_built


class Noted(StoppingCriteria):
    """Notes the log-probabilities of the tokens of the rows at `places`, as one call of `generate` picks them.

    They are those of the logits over `temperature`, before any processor, as the loss scores tokens. As a stopping criterion it
    is called once a token, and stops nothing. With a `comparison`, it also shows the latter what the processors made of
    these logits.
    """

    def __init__(
        self, places: Sequence[int], temperature: float, comparison: ProcessorComparison | None = None
    ) -> None:
        self.places, self.temperature, self.comparison = list(places), temperature, comparison
        self._compared: list[int] = []  # rows that have not ended
        self._scores: Tensor | None = None  # of these rows, after the processors
        self._logits: Tensor | None = None  # of the newest forward, (rows, vocabulary)
        self._columns: list[Tensor] = []  # of one token each, (places,)
        self._width = 0
        self._lost = False

    @contextmanager
    def reading(self, model: PreTrainedModel) -> Iterator[None]:
        """While it lasts, the logits of each forward of `model` are seen."""

        def see(module: Any, args: Any, output: Any) -> None:
            self._logits = output.logits[:, -1]

        with ExitStack() as stack:
            stack.callback(model.register_forward_hook(see).remove)
            stack.enter_context(each_built(model, self._observed))
            try:
                yield
            finally:
                self._logits = self._scores = None

    def _observed(
        self, model: PreTrainedModel, found: LogitsProcessorList, config: GenerationConfig, inputs: dict[str, Any]
    ) -> LogitsProcessorList:
        if self.comparison is not None:
            self.comparison.start(model, found, config, inputs)
            self._compared = self.comparison.rows
        return Observed(found, self._processed)

    def _processed(self, process: Callable[[], Tensor]) -> Tensor:
        """Run the processors, and keep what they make of the rows that are compared."""
        logits = self._logits
        scores = process()
        self._logits = logits  # classifier-free guidance runs the model again, which the hook sees
        if self._compared:
            self._scores = scores[self._compared]
        return scores

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Note the tokens that have just been appended to `input_ids`, (rows, columns); no row ends, (rows,)."""
        logits, width = self._logits, input_ids.shape[1]
        # Beams have rows of their own, and assisted decoding appends several tokens at once.
        if logits is None or len(logits) != len(input_ids) or (self._columns and width != self._width + 1):
            self._lost = True
        if not self._lost:
            assert logits is not None
            log_probs = (logits[self.places].float() / self.temperature).log_softmax(-1)
            self._columns.append(log_probs.gather(1, input_ids[self.places, -1:])[:, 0])
            if self.comparison is not None and self._scores is not None:
                rows, scores = self._compared, self._scores
                self.comparison.compare(rows, input_ids[rows, :-1], logits[rows].float(), scores, input_ids[rows, -1])
                self._compared, self._scores = self.comparison.unfinished(input_ids), None
        self._width = width
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    @property
    def log_probs(self) -> Tensor | None:
        """(places, tokens); behind the end of a row, of padding. None where tokens and forwards do not go together."""
        return None if self._lost or not self._columns else torch.stack(self._columns, 1)
