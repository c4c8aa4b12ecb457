"""Completions that a report shows: some of a run, and some held-out problems whose verdict changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import pandas as pd

from grpo_recipes.reports.charts import number
from grpo_recipes.reports.run import PARTS, Run, last_message
from grpo_recipes.reports.transcript import Part, limited
from grpo_rewards.reward import is_passing

EXAMPLES = 4
"""Largest number of problems that are shown as gained, and as lost."""
HEAD, TAIL = 500, 300
"""Characters that are shown of a long text. The answer is usually at the end."""
FIRST_PARTS, LAST_PARTS = 8, 4
"""Parts that are shown of a long transcript."""


@dataclass(frozen=True)
class Card:
    """Completion with the reason why it is shown, and its scores. A plain completion is a transcript of one part."""

    title: str
    why: str
    step: int
    prompt: str
    parts: list[Part]
    is_right: bool | None = None
    figures: dict[str, str] = field(default_factory=dict)
    """Gold, verdict, scores and advantage, as far as they were logged."""


@dataclass(frozen=True)
class Changed:
    """Held-out problem whose verdict changed from before to after training."""

    is_gained: bool
    prompt: str
    gold: str
    before: str
    after: str


def cards(run: Run) -> list[Card]:
    """Return cards of completions from both ends of a run, of the best and of the worst.

    The first card of a run that a reward stopped is the completion that the reward could not score.
    """
    made = []
    if run.fault and "row" in run.fault:
        row = run.fault["row"]
        why, parts = f"{row['reward']} could not score it", [Part("text", 1, row["completion"])]
        made.append(Card("Stopped the run", why, row["step"] or 0, row["prompt"], parts))
    chosen = _chosen(run.rows)
    if chosen:
        table = run.texts(run.rows.loc[[index for _, _, index in chosen]])
        for (title, why, _), (_, row) in zip(chosen, table.iterrows(), strict=True):
            made.append(_card(run, title, why, row))
    return made


def _chosen(rows: pd.DataFrame) -> list[tuple[str, str, int]]:
    """Return title, reason and index of the rows to show, without repeating a text."""
    scored = rows.dropna(subset="total").drop_duplicates(["prompt", "completion"])
    if not len(scored):
        return []
    steps = sorted(scored["step"].unique())
    late = scored[scored["step"] >= steps[-max(1, len(steps) // 4)]].sort_values("total", kind="stable")
    wanted = [
        ("First", "the median reward of the first logged step", _by_median(scored, steps[0])),
        ("Last", "the median reward of the last logged step", _by_median(scored, steps[-1])),
        ("Best", "the highest reward of the last quarter", late[::-1]),
        ("Worst", "the lowest reward of the last quarter", late),
    ]
    chosen: list[tuple[str, str, int]] = []
    for title, why, candidates in wanted:
        taken = {index for _, _, index in chosen}
        free = [int(index) for index in candidates.index if index not in taken]
        if free:
            chosen.append((title, why, free[0]))
    return chosen


def _by_median(scored: pd.DataFrame, step: int) -> pd.DataFrame:
    """Return the rows of a step, those closest to the median reward first."""
    rows = scored[scored["step"] == step]
    distance = (rows["total"] - rows["total"].median()).abs()
    return rows.loc[distance.sort_values(kind="stable").index]


def _card(run: Run, title: str, why: str, row: pd.Series) -> Card:
    verdicts, figures = [], {}
    for name in ("gold", "verdict"):
        if isinstance(row.get(name), str) and row[name]:
            figures[name] = row[name]
    for reward in run.rewards:
        if reward.name in row.index:
            score = row[reward.name]
            figures[reward.name] = "–" if pd.isna(score) else number(float(score))
            if reward.kind == "correctness" and not pd.isna(score):
                verdicts.append(bool(is_passing(score, reward.passes_at)))
    figures["total"] = number(float(row["total"]))
    advantage = row.get("advantage")
    if isinstance(advantage, float) and not pd.isna(advantage):
        figures["advantage"] = f"{advantage:+.2f}"
    parts = limited(row[PARTS] or [Part("text", 1, str(row["completion"]))], FIRST_PARTS, LAST_PARTS)
    return Card(title, why, int(row["step"]), str(row["question"]), parts, all(verdicts) if verdicts else None, figures)


def changes(pairs: tuple[pd.DataFrame, pd.DataFrame] | None) -> tuple[str, list[Changed]]:
    """Return how many verdicts changed from before to after training, as a sentence, and some examples.

    Args:
        pairs: Completions of the same problems before and after training, or None. The first sample of each counts.
    """
    if pairs is None:
        return "", []
    before, after = (table[table["sample"] == 0].set_index("problem") for table in pairs)
    both = before.join(after, rsuffix="_after", how="inner")
    changed = {
        True: both[~both["strict"] & both["strict_after"]],
        False: both[both["strict"] & ~both["strict_after"]],
    }
    examples = []
    for is_gained, rows in changed.items():
        for _, row in rows.head(EXAMPLES).iterrows():
            texts = str(row["completion"]), str(row["completion_after"])
            examples.append(Changed(is_gained, _question(row["prompt"]), str(row["gold"]), *texts))
    return f"{len(changed[True])} of {len(both)} problems gained, {len(changed[False])} lost", examples


def tags_of(run: Run) -> tuple[str, str]:
    """Return the reasoning and answer tag of the recipe's first reward with tags, or the default tags."""
    for spec in run.recipe.get("rewards") or []:
        kwargs = spec.get("kwargs") if isinstance(spec, Mapping) else None
        tags = kwargs.get("tags") if isinstance(kwargs, Mapping) else None
        if isinstance(tags, (list, tuple)) and len(tags) == 2:
            return str(tags[0]), str(tags[1])
    return "think", "answer"


def shortened(text: str, head: int = HEAD, tail: int = TAIL) -> str:
    """Return the beginning and the end of a long text."""
    if len(text) <= head + tail:
        return text
    return f"{text[:head]}\n… {len(text) - head - tail:,} characters …\n{text[-tail:]}"


def _question(prompt: str) -> str:
    """Return the last message of a prompt in an evaluation's `completions.parquet`: messages as JSON, or text."""
    try:
        messages = json.loads(prompt)
    except (ValueError, RecursionError):
        return prompt
    is_conversation = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    return last_message(messages) if is_conversation else prompt
