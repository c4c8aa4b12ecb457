"""Recorder of the log-probabilities under which transformers' own loop picks its tokens.

`generate` returns them with `output_logits` only, for every row and the whole vocabulary. The recorder reads the logits
of a few rows as they pass, and keeps one number per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import LongTensor, Tensor
from transformers import GenerationConfig, StoppingCriteria
from transformers.generation import LogitsProcessorList

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
        self._compared: list[int] = []  # compared rows that have not ended
        self._scores: Tensor | None = None  # their logits after the processors
        self._logits: Tensor | None = None  # logits of the newest forward, (rows, vocabulary)
        self._columns: list[Tensor] = []  # log-probabilities of one token each, (places,)
        self._width = 0
        self._lost = False

    @contextmanager
    def reading(self, model: CausalLM) -> Iterator[None]:
        """Read the logits of each forward of `model` inside this block."""

        def read(module: Any, args: Any, output: Any) -> None:
            self._logits = output.logits[:, -1]

        with ExitStack() as stack:
            stack.callback(model.register_forward_hook(read).remove)
            stack.enter_context(each_built(model, self._observed))
            try:
                yield
            finally:
                self._logits = self._scores = None

    def _observed(
        self, model: CausalLM, found: LogitsProcessorList, config: GenerationConfig, inputs: dict[str, Any]
    ) -> LogitsProcessorList:
        if self.comparison is not None:
            self.comparison.start(model, found, config, inputs)
            self._compared = self.comparison.rows
        return _Observed(found, self._process)

    def _process(self, process: Callable[[], Tensor]) -> Tensor:
        """Run the processors, and keep what they make of the compared rows."""
        logits = self._logits
        scores = process()
        self._logits = logits  # classifier-free guidance runs the model again, which the hook sees
        if self._compared:
            self._scores = scores[self._compared]
        return scores

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
            if self.comparison is not None and self._scores is not None:
                rows, compared = self._compared, self._scores
                self.comparison.compare(rows, input_ids[rows, :-1], logits[rows].float(), compared, input_ids[rows, -1])
                self._compared, self._scores = self.comparison.unfinished(input_ids), None
        self._width = width
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    @property
    def log_probs(self) -> Tensor | None:
        """Log-probabilities (places, tokens), or None if tokens and forwards do not go together.

        Behind the end of a row they are those of padding, and mean nothing.
        """
        return None if self._lost or not self._columns else torch.stack(self._columns, 1)


class _Observed(LogitsProcessorList):
    """Processors of a call of `generate` whose runs go through a function."""

    def __init__(self, processors: LogitsProcessorList, through: Callable[[Callable[[], Tensor]], Tensor]) -> None:
        super().__init__(processors)
        self.through = through

    def __call__(self, input_ids: LongTensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Return the processed scores, (rows, vocabulary)."""
        run = super().__call__
        return self.through(lambda: run(input_ids, scores, **kwargs))
