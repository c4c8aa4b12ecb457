"""Fewer messages from the libraries: those that a user can do nothing about are left out."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# transformers renamed these; TRL 1.16 and PEFT still read and set the old names, whatever a recipe says.
_RENAMED = r"`(is_)?gradient_checkpointing(_\w+)?` is deprecated"

_MISSING = "There were missing keys in the checkpoint"
_WEIGHTS = ("Loading weights", "Writing model shards")


@contextmanager
def libraries() -> Iterator[None]:
    """Inside this block: no warnings about calls of TRL and PEFT themselves, no bars for loading or saving weights.

    Warnings about deprecated keys in a recipe, and the bars of downloads, are still shown.
    """
    from transformers.utils import logging as theirs  # takes seconds, which `--help` should not

    before = theirs.set_tqdm_hook(_without_weights)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_RENAMED, category=FutureWarning)
            yield
    finally:
        theirs.set_tqdm_hook(before)


@contextmanager
def tied_weights(model: Any) -> Iterator[None]:
    """Inside this block a checkpoint may lack a second name of a weight of `model` without a warning.

    A checkpoint holds a tied weight once. transformers 5.23 loads it, and calls the other name a missing key.
    """

    def is_about_others(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        missing = set(re.findall("'([^']*)'", message)) if message.startswith(_MISSING) else set()
        names: dict[int, set[str]] = {}
        for name, weight in model.named_parameters(remove_duplicate=False) if missing else ():
            names.setdefault(id(weight), set()).add(name)
        loaded_elsewhere = set().union(*(group for group in names.values() if group - missing))
        return not missing or not missing <= loaded_elsewhere

    logger = logging.getLogger("transformers.trainer")
    logger.addFilter(is_about_others)
    try:
        yield
    finally:
        logger.removeFilter(is_about_others)


def _without_weights(bar: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return bar(*args, **{**kwargs, "disable": kwargs.get("desc") in _WEIGHTS or kwargs.get("disable", False)})
