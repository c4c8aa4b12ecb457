"""Fewer messages from the libraries: those that a user can do nothing about are left out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# transformers renamed these; TRL 1.16 and PEFT still read and set the old names, whatever a recipe says.
_RENAMED = r"`(is_)?gradient_checkpointing(_\w+)?` is deprecated"

_WEIGHTS = ("Loading weights", "Writing model shards")


@contextmanager
def libraries() -> Iterator[None]:
    """Inside this block: no warnings about calls of TRL and PEFT themselves, no bars for loading or saving weights.

    Warnings about deprecated keys in a recipe, and the bars of downloads, are still shown.
    """
    from transformers.utils import logging  # takes seconds, which `--help` should not

    before = logging.set_tqdm_hook(_without_weights)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_RENAMED, category=FutureWarning)
            yield
    finally:
        logging.set_tqdm_hook(before)


def _without_weights(bar: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return bar(*args, **{**kwargs, "disable": kwargs.get("desc") in _WEIGHTS or kwargs.get("disable", False)})
