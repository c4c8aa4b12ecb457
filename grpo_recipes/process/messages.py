"""Log messages of a run: ours once per subject, and those of the libraries only where a user can act on them."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from grpo_recipes.process.ranks import launched_rank
from grpo_rewards.startup import hide_import_messages
from grpo_rewards.terminal import say

if TYPE_CHECKING:
    from torch import nn

progress = logging.getLogger("grpo_recipes.progress")
"""Logger of the lines of `log_progress`."""

# transformers renamed these; TRL 1.16 and PEFT still read and set the old names, whatever a recipe contains.
_RENAMED = r"`(is_)?gradient_checkpointing(_\w+)?` is deprecated"

_MISSING_KEYS = "There were missing keys in the checkpoint"
_WEIGHT_BARS = ("Loading weights", "Writing model shards")


class Announcer:
    """Logger of warnings that appear once.

    accelerate's `warning_once` repeats a sentence whose figures change. It is also shared by the whole process, so a
    second trainer would stay silent.
    """

    def __init__(self, warn: Callable[[str], object]) -> None:
        self._warn = warn
        self.keys: set[str] = set()
        """Keys of the sentences that were logged."""

    def once(self, sentence: str, key: str = "") -> None:
        """Log a sentence, unless it was logged before, or another one with the same key."""
        key = key or sentence
        if key not in self.keys:
            self.keys.add(key)
            self._warn(sentence)


def log_progress(line: str) -> None:
    """Log a line at level INFO, or print it in a program that has not set up logging.

    Such a program still prints the Trainer's metrics, and the line belongs beside them.
    """
    if progress.hasHandlers():
        progress.info(line)
    else:
        tqdm.write(line)


def say_once(text: str) -> None:
    """Print text in the first of the processes that the launcher started, and in no other."""
    if launched_rank() == 0:
        say(text)


@contextmanager
def fewer_library_messages() -> Iterator[None]:
    """Hide warnings about calls that TRL and PEFT make themselves, and the bars for loading and saving weights.

    The lines of DeepSpeed and bitsandbytes about what a CPU lacks are hidden too: other libraries import them in runs
    that don't use them. Warnings about deprecated keys in a recipe, and the bars of downloads, are still shown.
    """
    from transformers.utils import logging as library_logging  # takes seconds to import, which `--help` should not

    previous = library_logging.set_tqdm_hook(_hide_weight_bars)
    hide_import_messages()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_RENAMED, category=FutureWarning)
            yield
    finally:
        library_logging.set_tqdm_hook(previous)


def _hide_weight_bars(bar: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_hidden = kwargs.get("desc") in _WEIGHT_BARS or kwargs.get("disable", False)
    return bar(*args, **{**kwargs, "disable": is_hidden})


@contextmanager
def tied_weights(model: nn.Module) -> Iterator[None]:
    """Hide the warning about a missing key that is a second name of a weight of `model`.

    A checkpoint holds a tied weight once. transformers 5.23 loads it and then reports its other name as missing.
    """
    logger = logging.getLogger("transformers.trainer")

    def is_shown(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if not message.startswith(_MISSING_KEYS):
            return True
        missing = set(re.findall("'([^']*)'", message))
        weights = dict(model.named_parameters(remove_duplicate=False))
        loaded = {id(weight) for name, weight in weights.items() if name not in missing}
        return not missing or any(id(weights.get(name)) not in loaded for name in missing)

    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)
