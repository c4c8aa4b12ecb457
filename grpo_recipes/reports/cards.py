"""Completions that a report shows: which ones of a run, and each as a card with its text divided at its tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from grpo_recipes.reports.charts import number
from grpo_recipes.reports.run import PARTS, Run, last_message
from grpo_recipes.reports.transcript import Part, limited
from grpo_rewards.reward import is_passing

EXAMPLES = 4
HEAD, TAIL = 500, 300
"""Characters that are shown of a long text. The answer is usually at the end."""

FIRST_PARTS, LAST_PARTS = 8, 4
"""Parts that are shown of a long transcript."""

_TAG = re.compile(r"</?([A-Za-z][\w-]{0,30})>")


@dataclass(frozen=True)
class Piece:
    """Part of a text. The kind is `tag`, `reasoning` or `answer` (inside these tags), or empty."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Said:
    """Part of a transcript: its kind, its heading, and its text in pieces."""

    kind: str
    label: str
    pieces: list[Piece]


@dataclass(frozen=True)
class Card:
    """Completion, with the reason why it is shown, and its scores."""

    title: str
    why: str
    step: int
    prompt: str
    pieces: list[Piece]
    characters: int
    gold: str = ""
    verdict: str = ""
    is_right: bool | None = None
    pays: list[tuple[str, str]] = field(default_factory=list)
    total: str = ""
    advantage: str = ""
    said: list[Said] = field(default_factory=list)
    """Transcript of a completion with several messages. `pieces` is then the last one."""
    turns: int = 0
    """Number of the policy's turns in the transcript, or 0 for a completion of one message."""


@dataclass(frozen=True)
class Changed:
    """Held-out problem whose verdict changed from before to after training. The kind is `gained` or `lost`."""

    kind: str
    prompt: str
    gold: str
    before: list[Piece]
    after: list[Piece]


def cards(run: Run) -> list[Card]:
    """Return cards of a run's first, middle and last completion, the best and the worst, and the most surprising.

    The first card of a run that a reward stopped is the completion that the reward could not score.
    """
    made = [_stopping(run, run.fault["row"])] if run.fault and "row" in run.fault else []
    chosen = _chosen(run.rows)
    if not chosen:
        return made
    table = run.texts(run.rows.loc[[index for _, _, index in chosen]])
    tags = tags_of(run)
    for (title, why, _), (_, row) in zip(chosen, table.iterrows(), strict=True):
        made.append(_card(run, title, why, row, tags))
    return made


def _stopping(run: Run, row: Mapping[str, Any]) -> Card:
    """Return the card of the completion that a reward could not score, from the entry of a fault file."""
    text = row["completion"]
    return Card(
        "Stopped the run",
        f"{row['reward']} could not score it",
        row["step"] or 0,
        shortened(row["prompt"]),
        pieces(shortened(text), tags_of(run)),
        len(text),
    )


def _chosen(rows: pd.DataFrame) -> list[tuple[str, str, int]]:
    """Return title, reason and index of the rows to show, without repeating a text."""
    scored = rows.dropna(subset="total").drop_duplicates(["prompt", "completion"])
    if not len(scored):
        return []
    steps = sorted(scored["step"].unique())
    late = scored[scored["step"] >= steps[-max(1, len(steps) // 4)]].sort_values("total", kind="stable")
    best_first = late.sort_values("total", ascending=False, kind="stable")
    groups = scored.groupby(["step", "prompt"])["total"]
    advantage = (scored["total"] - groups.transform("mean")) / (groups.transform("std").fillna(0.0) + 1e-4)
    surprising = scored.loc[advantage.sort_values(ascending=False, kind="stable").index]
    wanted = [
        ("First", "the median reward of the first logged step", _by_median(scored, steps[0])),
        ("Middle", "the median reward halfway", _by_median(scored, steps[len(steps) // 2])),
        ("Last", "the median reward of the last logged step", _by_median(scored, steps[-1])),
        ("Best", "the highest reward of the last quarter", best_first),
        ("Worst", "the lowest reward of the last quarter", late),
        ("Most surprising", "the highest advantage over its group", surprising),
    ]
    chosen: list[tuple[str, str, int]] = []
    taken: set[int] = set()
    for title, why, candidates in wanted:
        index = next((int(index) for index in candidates.index if index not in taken), None)
        if index is not None:
            taken.add(index)
            chosen.append((title, why, index))
    return chosen


def _by_median(scored: pd.DataFrame, step: int) -> pd.DataFrame:
    """Return the rows of a step, those closest to the median reward first."""
    rows = scored[scored["step"] == step]
    distance = (rows["total"] - rows["total"].median()).abs()
    return rows.loc[distance.sort_values(kind="stable").index]


def _card(run: Run, title: str, why: str, row: pd.Series, tags: Sequence[str]) -> Card:
    verdicts, pays = [], []
    for reward in run.rewards:
        if reward.name in row.index:
            score = row[reward.name]
            pays.append((reward.name, "–" if pd.isna(score) else number(float(score))))
            if reward.kind == "correctness" and not pd.isna(score):
                verdicts.append(bool(is_passing(score, reward.passes_at)))
    completion, advantage = str(row["completion"]), row.get("advantage")
    parts: list[Part] = row[PARTS]
    return Card(
        title,
        why,
        int(row["step"]),
        shortened(str(row["question"])),
        pieces(shortened(completion), tags),
        sum(len(part.text) for part in parts) if parts else len(completion),
        _text(row, "gold"),
        _text(row, "verdict"),
        all(verdicts) if verdicts else None,
        pays,
        number(float(row["total"])),
        f"{advantage:+.2f}" if isinstance(advantage, float) and not pd.isna(advantage) else "",
        said(parts, tags),
        parts[-1].turn if parts else 0,
    )


def said(parts: Sequence[Part], tags: Sequence[str]) -> list[Said]:
    """Return the beginning and the end of a transcript, with long texts shortened."""
    shown = limited(parts, FIRST_PARTS, LAST_PARTS)
    return [Said(part.kind, part.label, pieces(shortened(part.text), tags)) for part in shown]


def changes(pairs: pd.DataFrame | None, tags: Sequence[str]) -> tuple[str, list[Changed]]:
    """Return how many verdicts changed from before to after training, as a sentence, and some examples.

    Args:
        pairs: Completions before and after (`*_after`), or None.
        tags: Reasoning and answer tag.
    """
    if pairs is None:
        return "", []
    gained = pairs[~pairs["strict"] & pairs["strict_after"]]
    lost = pairs[pairs["strict"] & ~pairs["strict_after"]]
    examples = []
    for kind, rows in (("gained", gained), ("lost", lost)):
        for _, row in rows.head(EXAMPLES).iterrows():
            before, after = (pieces(shortened(row[name]), tags) for name in ("completion", "completion_after"))
            examples.append(Changed(kind, shortened(_question(row["prompt"])), str(row["gold"]), before, after))
    return f"{len(gained)} of {len(pairs)} problems gained, {len(lost)} lost", examples


def tags_of(run: Run) -> tuple[str, str]:
    """Return the reasoning and answer tag of the recipe's first reward with tags, or the default tags."""
    for spec in run.recipe.get("rewards") or []:
        kwargs = spec.get("kwargs") if isinstance(spec, Mapping) else None
        tags = kwargs.get("tags") if isinstance(kwargs, Mapping) else None
        if isinstance(tags, (list, tuple)) and len(tags) == 2:
            return str(tags[0]), str(tags[1])
    return "think", "answer"


def pieces(text: str, tags: Sequence[str]) -> list[Piece]:
    """Return a text divided at its tags. The pieces joined are the text."""
    names = dict(zip(tags, ("reasoning", "answer"), strict=False))
    made: list[Piece] = []
    inside, at = "", 0
    for found in _TAG.finditer(text):
        if found[1] not in names:
            continue
        if at < found.start():
            made.append(Piece(text[at : found.start()], names.get(inside, "")))
        made.append(Piece(found[0], "tag"))
        inside = "" if found[0].startswith("</") else found[1]
        at = found.end()
    if at < len(text):
        made.append(Piece(text[at:], names.get(inside, "")))
    return made


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


def _text(row: pd.Series, column: str) -> str:
    value: Any = row.get(column)
    return value if isinstance(value, str) else ""
