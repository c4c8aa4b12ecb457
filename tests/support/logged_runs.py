"""Runs in memory, with logs of a few points whose figures can be worked out by hand."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_recipes.reports.run import Log, Run


def logged(
    metrics: Mapping[str, Sequence[float]],
    steps: Sequence[int] | None = None,
    rows: pd.DataFrame | None = None,
    infinite: Sequence[int] = (),
    evaluations: dict[str, Any] | None = None,
    **record: Any,
) -> Run:
    """Return a run in memory. Each metric is logged at the first of `steps`, by default at 1, 2, ...."""
    most = max(map(len, metrics.values()), default=0)
    steps = steps or range(1, most + 1)
    log = Log(last_step=max(steps, default=0))
    tokens = {"num_tokens": [10.0 * step for step in steps]}
    for key, values in {**tokens, **metrics}.items():
        log.metrics[key] = (array("q", steps[: len(values)]), array("d", values))
    log.not_finite["grad_norm"] = array("q", infinite)
    run = Run(Path("/nowhere"), record, log, evaluations or {})
    vars(run)["rows"] = scored([]) if rows is None else rows
    return run


def scored(rows: Sequence[tuple[int, int, float]]) -> pd.DataFrame:
    """Return logged completions, each as step, number of calls and reward. All of a step are of one prompt."""
    table = pd.DataFrame(rows, columns=["step", "calls", "total"]).astype({"step": int, "calls": int, "total": float})
    return table.assign(prompt=table["step"], completion=range(len(table)), characters=10)
