"""Verified speed: a faster way of computing something is used only once it has agreed with the stock way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from grpo_recipes.process.ranks import on_any_rank

Computed = TypeVar("Computed")
Errors = tuple[type[Exception], ...]


class FastWay:
    """A faster way of computing something that TRL, transformers or torch compute too, in the stock way.

    A fast way can be wrong for one model, one GPU or one version of a library: an attention mask that a layer ignores,
    a cache that another family of models fills in another order. A wrong result raises no error. The run goes on, and
    learns something else. So nothing fast runs unproven:

    1. Before anything is trained on or scored by its results, they are compared with those of the stock way on the same
       rows. Generated tokens are compared with a forward of the model, because two samples differ.
    2. The ranks agree: if the results differ on one of them, no rank uses the fast way.
    3. The conclusion is remembered. A fast way that was refused once stays refused.
    4. A refusal is logged in one sentence with its reason, and the stock way is used.

    A user of this class supplies the comparison, the sentence, and the errors that count as a refusal:

        way = FastWay(announcer.once, "rows are computed one by one: {}")
        if way.doubt is None:
            way.check(lambda: disagreement(fast(rows), stock(rows)), refusals=(NotSupported,))
        results = fast(rows) if way.is_verified else stock(rows)

    Group decoding and its reuse of keys and values (`training/generation.py`, `evaluation/engines.py`), the layouts of
    micro-batches (`training/layout_check.py`), segments (`training/segments.py`) and the kernel of packed rows
    (`training/varlen.py`) are fast ways. How far two results may differ is written in `agreement.py`.

    Args:
        announce: function that logs a sentence once, or None if another message says which way is used.
        sentence: the sentence of a refusal, with `{}` in the place of the reason.
        device: device on which the ranks agree. None if the comparison has the same result on every rank, or if ranks
            may use different ways.
    """

    def __init__(
        self, announce: Callable[[str], object] | None = None, sentence: str = "{}", device: torch.device | None = None
    ) -> None:
        self.announce, self.sentence, self.device = announce, sentence, device
        self.doubt: str | None = None
        """Why the stock way is used, "" if the fast way is verified, or None before the first comparison."""

    @property
    def is_verified(self) -> bool:
        """True if the fast way has agreed with the stock way in each comparison."""
        return self.doubt == ""

    def check(self, compare: Callable[[], str], *, refusals: Errors = (), failures: Errors = ()) -> str:
        """Compare the fast way with the stock way, and remember the conclusion. Collective if there is a `device`.

        Args:
            compare: function that computes both ways, and returns how they differ, or "" within the tolerance.
            refusals: errors by which the fast way refuses its input. Their message is the reason.
            failures: errors that are faults of the fast way. Their type and message are the reason.

        Returns:
            The reason not to use the fast way, or "" if it agrees on every rank.
        """
        found, error = _caught(compare, refusals, failures)
        doubt = found or error
        if self.device is not None:
            doubt = (doubt or "on another rank") if on_any_rank(bool(doubt), self.device) else ""
        self.record(doubt)
        return doubt

    def use(self, compute: Callable[[], Computed], *, refusals: Errors) -> Computed | None:
        """Return the result of the verified fast way, or None if it refuses, from now on, what was not compared."""
        found, error = _caught(compute, refusals, ())
        if error:
            self.record(error)
        return found

    def record(self, doubt: str) -> None:
        """Remember the conclusion of a comparison: a reason not to use the fast way, or "". A doubt is never lifted."""
        self.doubt = self.doubt or doubt
        if doubt:
            self.skip(doubt)

    def skip(self, reason: str) -> None:
        """Log why the stock way is used this time."""
        if self.announce is not None:
            self.announce(self.sentence.format(reason))


def _caught(function: Callable[[], Computed], refusals: Errors, failures: Errors) -> tuple[Computed | None, str]:
    """Return the result of a function and "", or None and the first line of its error."""
    try:
        return function(), ""
    except torch.OutOfMemoryError:  # a RuntimeError that proves nothing about the fast way
        raise
    except (*refusals, *failures) as error:
        name, line = type(error).__name__, str(error).partition("\n")[0]
        return None, (line or name) if isinstance(error, refusals) else f"{name}: {line}"
