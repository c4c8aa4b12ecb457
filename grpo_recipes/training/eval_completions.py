"""Evaluation during training (`eval_strategy`): its completions go to a file of their own.

TRL 1.16 logs both through one table (`GRPOTrainer._logs`) and writes both to `completions_<step>.parquet`, so that an
evaluation overwrites the training completions of its step.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ASIDE = ".training"


@contextmanager
def separate_eval_completions(trainer: Any, dataset: Any, prefix: str) -> Iterator[None]:
    """Inside this block, `trainer` (TRL's) logs into a new table and writes it to `<prefix>_completions_<step>.parquet`.

    The table takes every row of the evaluation, where TRL's holds one generation batch. Afterwards the training completions
    of the step, on disk and still to be logged, are as they were. With a dict of datasets (`dataset` or, if that is None,
    the trainer's own) nothing is done: TRL evaluates each by itself, with its own prefix, and so comes here again.
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
    """The prefix as part of a file name: it may hold the name of a dataset, and so a hub id, `owner/name`."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in prefix)


def _empty(logs: dict[str, Any]) -> dict[str, Any]:
    return {name: deque() if isinstance(column, deque) else defaultdict(deque) for name, column in logs.items()}
