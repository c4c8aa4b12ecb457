"""Check of the report that transformers makes about the tensors of a model that it has loaded."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from grpo_rewards.errors import UserError

_REPORT, _ERRORS = "LOAD REPORT", "CONVERSION"

logger = logging.getLogger(__name__)


def check_loaded(name: str, report: Mapping[str, Any]) -> None:
    """Raise `UserError` unless every tensor of a loaded model came from its files, and log the tensors without a use.

    Args:
        name: folder or hub id of the model.
        report: `output_loading_info` of transformers, which knows tied weights and buffers.
    """
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    unexpected = sorted(report["unexpected_keys"])
    problems = []
    if missing:  # transformers fills them with random numbers
        problems.append(f"lack {len(missing)} of the model's tensors (such as {missing[0]})")
    if mismatched:
        tensor, stored, expected = mismatched[0]
        shapes = f"{tuple(stored)} in place of {tuple(expected)}"
        problems.append(f"have another shape in {len(mismatched)} tensors (such as {tensor}, {shapes})")
    if not problems:
        log_unexpected(name, unexpected)
        return
    if unexpected:
        problems.append(f"hold {len(unexpected)} that the model does not have (such as {unexpected[0]})")
    fix = "copy or download it again, or name a trained model"
    raise UserError(name, f"its weights {' and '.join(problems)}", fix)


def log_unexpected(name: str, unexpected: Sequence[str]) -> None:
    """Log, on the first rank, how many tensors in the files of a model or adapter have no place in it."""
    if unexpected and os.environ.get("RANK", "0") == "0":
        count = f"{len(unexpected)} tensor{'s' * (len(unexpected) > 1)} in its files"
        logger.warning("%s: not loaded: %s that the model does not have (such as %s)", name, count, unexpected[0])


@contextmanager
def without_load_report() -> Iterator[None]:
    """Hide transformers' table of missing and unexpected tensors, which `check_loaded` replaces."""
    library = logging.getLogger("transformers.modeling_utils")
    library.addFilter(_is_shown)
    try:
        yield
    finally:
        library.removeFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return _REPORT not in message or _ERRORS in message
