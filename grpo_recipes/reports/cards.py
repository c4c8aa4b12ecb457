"""Completions that a report shows: from both ends of a run, the best and the worst."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from grpo_recipes.reports.charts import number
from grpo_recipes.reports.run import PARTS, Run
from grpo_recipes.reports.transcript import TurnPart, limited
from grpo_rewards.reward import is_passing

HEAD, TAIL = 500, 300
"""Characters that are shown of a long text. The answer is usually at the end."""
FIRST_PARTS, LAST_PARTS = 8, 4
"""Parts that are shown of a long transcript."""


@dataclass(frozen=True)
class Card:
    """Completion with the reason why it is shown, and its scores. A plain completion is a transcript of one part."""

    title: str
    step: int
    prompt: str
    parts: list[TurnPart]
    is_right: bool | None = None
    figures: dict[str, str] = field(default_factory=dict)
    """Gold, verdict, scores and advantage, as far as they were logged."""


def cards(run: Run) -> list[Card]:
    """Return cards of completions from both ends of a run, of the best and of the worst.

    The first card of a run that a reward stopped is the completion that the reward could not score.
    """
    made = []
    if run.fault and "row" in run.fault:
        row = run.fault["row"]
        title, parts = f"Stopped the run: {row['reward']} could not score it", [TurnPart("text", 1, row["completion"])]
        made.append(Card(title, row["step"] or 0, row["prompt"], parts))
    chosen = _chosen(run.rows)
    table = run.texts(run.rows.loc[list(chosen)])
    for title, (_, row) in zip(chosen.values(), table.iterrows(), strict=True):
        made.append(_card(run, title, row))
    return made


def _chosen(rows: pd.DataFrame) -> dict[int, str]:
    """Return the index of each row to show, with the reason."""
    scored = rows[np.isfinite(rows["total"])]
    if not len(scored):
        return {}
    steps = sorted(scored["step"].unique())
    first, last = (scored.loc[scored["step"] == step, "total"] for step in (steps[0], steps[-1]))
    late = scored.loc[scored["step"] >= steps[-max(1, len(steps) // 4)], "total"]
    wanted = [
        ((first - first.median()).abs().idxmin(), "First logged step, median reward"),
        ((last - last.median()).abs().idxmin(), "Last logged step, median reward"),
        (late.idxmax(), "Best of the last quarter"),
        (late.idxmin(), "Worst of the last quarter"),
    ]
    chosen: dict[int, str] = {}
    for index, title in wanted:
        chosen.setdefault(int(index), title)
    return chosen


def _card(run: Run, title: str, row: pd.Series) -> Card:
    figures = {name: row[name] for name in ("gold", "verdict") if isinstance(row.get(name), str) and row[name]}
    verdicts = []
    for reward in run.rewards:
        if reward.name in row.index:
            score = row[reward.name]
            figures[reward.name] = "–" if pd.isna(score) else number(float(score))
            if reward.kind == "correctness" and not pd.isna(score):
                verdicts.append(bool(is_passing(score, reward.passes_at)))
    figures["total"] = number(float(row["total"]))
    if isinstance(row.get("advantage"), float) and not pd.isna(row["advantage"]):
        figures["advantage"] = f"{row['advantage']:+.2f}"
    parts = limited(row[PARTS] or [TurnPart("text", 1, str(row["completion"]))], FIRST_PARTS, LAST_PARTS)
    return Card(title, int(row["step"]), str(row["question"]), parts, all(verdicts) if verdicts else None, figures)


def shortened(text: str, head: int = HEAD, tail: int = TAIL) -> str:
    """Return the beginning and the end of a long text."""
    if len(text) <= head + tail:
        return text
    return f"{text[:head]}\n… {len(text) - head - tail:,} characters …\n{text[-tail:]}"
