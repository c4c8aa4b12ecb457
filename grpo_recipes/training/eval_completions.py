"""Evaluation during training (`eval_strategy`): its completions are kept beside the training ones.

TRL 1.16 logs both through one table (`GRPOTrainer._logs`) and writes both to `completions_<step>.parquet`, so that an
evaluation takes the place of the training completions of its step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ASIDE = ".training"


@contextmanager
def kept_apart(trainer: Any, dataset: Any, prefix: str) -> Iterator[None]:
    """While it lasts, `trainer` (TRL's) logs into a table of its own, and writes it to `<prefix>_completions_<step>.parquet`.

    The table takes every row of the evaluation, not only as many as a generation batch has. The training completions of
    the step, on disk and still to be logged, are as they were afterwards. Of several datasets, a dict as `dataset` or, if
    that is None, as the trainer's own, each has its evaluation, with a prefix of its own: around them all nothing is done.
    """
    if isinstance(trainer.eval_dataset if dataset is None else dataset, dict):
        yield
        return
    table = Path(trainer.args.output_dir, "completions", f"completions_{trainer.state.global_step:05d}.parquet")
    aside = table.with_suffix(ASIDE)
    training, trainer._logs = trainer._logs, _empty(trainer._logs)
    first = trainer.accelerator.is_main_process
    if first and table.is_file():
        table.rename(aside)
    try:
        yield
    finally:
        trainer._logs = training
        if first and table.is_file():
            table.rename(table.with_name(f"{_file_name(prefix)}_{table.name}"))
        if first and aside.is_file():
            aside.rename(table)


def _file_name(prefix: str) -> str:
    """The prefix with the name of a dataset in it, which may be a hub id, `owner/name`."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in prefix)


def _empty(logs: dict[str, Any]) -> dict[str, Any]:
    return {name: deque() if isinstance(column, deque) else defaultdict(deque) for name, column in logs.items()}
