"""Recorder of the log-probabilities under which transformers' own loop picks its tokens.

`generate` returns them with `output_logits` only, for every row and the whole vocabulary. The recorder reads the logits
of a few rows as they pass, and keeps one number per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

if TYPE_CHECKING:
    from grpo_recipes.generation.models import CausalLM


class Recorder(StoppingCriteria):
    """Recorder of one call of `generate`: a stopping criterion, which is called once per token, and stops nothing.

    Log-probabilities are those of the logits over `temperature`, before any processor, as in the loss.

    Args:
        places: indices of the rows that are recorded.
        temperature: divisor of the logits.
    """

    def __init__(self, places: Sequence[int], temperature: float) -> None:
        self.places, self.temperature = list(places), temperature
        self._logits: Tensor | None = None  # logits of the newest forward since the newest token, (rows, vocabulary)
        self._forwards = 0  # since the newest token
        self._columns: list[Tensor] = []  # log-probabilities of one token each, (places,)
        self._width: int  # number of columns at the newest token
        self._lost = False

    @contextmanager
    def reading(self, model: CausalLM) -> Iterator[None]:
        """Read the logits of each forward of `model` inside this block."""
        hook = model.register_forward_hook(self._read_forward)
        try:
            yield
        finally:
            hook.remove()

    def _read_forward(self, module: Any, args: Any, output: Any) -> None:
        self._forwards += 1
        self._logits = output.logits[:, -1]

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Record the tokens that have just been appended to `input_ids`, (rows, columns). Return False for all rows."""
        logits, width = self._logits, input_ids.shape[1]
        # Beams have rows of their own, and assisted decoding appends several tokens at once. Guidance runs the model
        # again, and prompts in chunks take several forwards. Forwards behind the last token are those that ZeRO-3
        # repeats until all ranks have ended.
        is_next = not self._columns or width == self._width + 1
        if logits is None or self._forwards != 1 or len(logits) != len(input_ids) or not is_next:
            self._lost = True
        elif not self._lost:
            log_probs = (logits[self.places].float() / self.temperature).log_softmax(-1)
            self._columns.append(log_probs.gather(1, input_ids[self.places, -1:])[:, 0])
        self._width, self._logits, self._forwards = width, None, 0
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    @property
    def log_probs(self) -> Tensor | None:
        """Log-probabilities (places, tokens), or None if tokens and forwards do not go together.

        Behind the end of a row they are those of padding, and mean nothing.
        """
        return None if self._lost or not self._columns else torch.stack(self._columns, 1)
