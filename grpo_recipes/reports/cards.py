"""Completions that a report shows: which of a run, and each as a card with its text divided by its tags."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from grpo_recipes.reports.charts import number
from grpo_recipes.reports.run import Run, last_message

EXAMPLES = 4
HEAD, TAIL = 500, 300  # characters of a text that is shown in part: its answer stands at its end

_TAG = re.compile(r"</?([A-Za-z][\w-]{0,30})>")


@dataclass(frozen=True)
class Piece:
    """A stretch of a text: a `tag`, what stands in the `reasoning` or the `answer` tag, or plain."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Card:
    """A completion, why it is shown, and what was said of it."""

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


@dataclass(frozen=True)
class Changed:
    """A held-out problem whose verdict changed."""

    kind: str
    prompt: str
    gold: str
    before: list[Piece]
    after: list[Piece]


def cards(run: Run) -> list[Card]:
    """The first, middle and last completion of a run, the best and worst of its end, and the most surprising."""
    chosen = _chosen(run.rows)
    if not chosen:
        return []
    table = run.texts(run.rows.loc[[place for *_, place in chosen]])
    tags = tags_of(run)
    return [
        _card(run, title, why, row, tags) for (title, why, _), (_, row) in zip(chosen, table.iterrows(), strict=True)
    ]


def _chosen(rows: pd.DataFrame) -> list[tuple[str, str, int]]:
    """Title, reason and index of the rows to show, no text twice."""
    scored = rows.dropna(subset="total").drop_duplicates(["prompt", "completion"])
    if not len(scored):
        return []
    steps = sorted(scored["step"].unique())
    late = scored[scored["step"] >= steps[-max(1, len(steps) // 4)]]
    groups = scored.groupby(["step", "prompt"])["total"]
    advantage = (scored["total"] - groups.transform("mean")) / (groups.transform("std").fillna(0.0) + 1e-4)
    surprise = scored.assign(surprise=advantage).sort_values("surprise", ascending=False, kind="stable")
    wanted = [
        ("First", "the median reward of the first logged step", _by_median(scored[scored["step"] == steps[0]])),
        ("Middle", "the median reward halfway", _by_median(scored[scored["step"] == steps[len(steps) // 2]])),
        ("Last", "the median reward of the last logged step", _by_median(scored[scored["step"] == steps[-1]])),
        ("Best", "the highest reward of the last quarter", late.sort_values("total", ascending=False, kind="stable")),
        ("Worst", "the lowest reward of the last quarter", late.sort_values("total", kind="stable")),
        ("Most surprising", "the highest advantage over its group", surprise),
    ]
    chosen: list[tuple[str, str, int]] = []
    for title, why, candidates in wanted:
        taken = {place for *_, place in chosen}
        place = next((int(place) for place in candidates.index if place not in taken), None)
        if place is not None:
            chosen.append((title, why, place))
    return chosen


def _by_median(rows: pd.DataFrame) -> pd.DataFrame:
    distance = (rows["total"] - rows["total"].median()).abs()
    return rows.assign(distance=distance).sort_values("distance", kind="stable")


def _card(run: Run, title: str, why: str, row: pd.Series, tags: Sequence[str]) -> Card:
    paid = [(reward, row[reward.name]) for reward in run.rewards if reward.name in row.index]
    judged = [pay > 0 for reward, pay in paid if reward.kind == "correctness" and not pd.isna(pay)]
    completion = str(row["completion"])
    return Card(
        title,
        why,
        int(row["step"]),
        shortened(str(row["question"])),
        pieces(shortened(completion), tags),
        len(completion),
        _text(row, "gold"),
        _text(row, "verdict"),
        all(judged) if judged else None,
        [(reward.name, "–" if pd.isna(pay) else number(float(pay))) for reward, pay in paid],
        number(float(row["total"])),
        _number(row, "advantage"),
    )


def changes(pairs: pd.DataFrame | None, tags: Sequence[str]) -> tuple[str, list[Changed]]:
    """How many verdicts changed from before to after, as a sentence, and some of them: gained, then lost."""
    if pairs is None:
        return "", []
    changed = {
        "gained": pairs[~pairs["strict"] & pairs["strict_after"]],
        "lost": pairs[pairs["strict"] & ~pairs["strict_after"]],
    }
    counts = f"{len(changed['gained'])} of {len(pairs)} problems gained, {len(changed['lost'])} lost"
    examples = [
        Changed(
            kind,
            shortened(_question(row["prompt"])),
            str(row["gold"]),
            pieces(shortened(row["completion"]), tags),
            pieces(shortened(row["completion_after"]), tags),
        )
        for kind, chosen in changed.items()
        for _, row in chosen.head(EXAMPLES).iterrows()
    ]
    return counts, examples


def tags_of(run: Run) -> tuple[str, str]:
    """The names of the reasoning and the answer tag: those that the recipe's first reward with tags has, else the usual ones."""
    for spec in run.recipe.get("rewards") or []:
        kwargs = spec.get("kwargs") if isinstance(spec, Mapping) else None
        tags = kwargs.get("tags") if isinstance(kwargs, Mapping) else None
        if isinstance(tags, (list, tuple)) and len(tags) == 2:
            return str(tags[0]), str(tags[1])
    return "think", "answer"


def pieces(text: str, tags: Sequence[str]) -> list[Piece]:
    """A text cut at its tags: joined, the pieces are the text."""
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


def shortened(text: str) -> str:
    """A long text's beginning and end."""
    if len(text) <= HEAD + TAIL:
        return text
    return f"{text[:HEAD]}\n… {len(text) - HEAD - TAIL:,} characters …\n{text[-TAIL:]}"


def _question(prompt: str) -> str:
    """The last message of a prompt as `completions.parquet` of an evaluation holds it: JSON messages, or text."""
    try:
        messages = json.loads(prompt)
    except (ValueError, RecursionError):
        return prompt
    is_listed = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    return last_message(messages) if is_listed else prompt


def _text(row: pd.Series, column: str) -> str:
    value = row.get(column)
    return value if isinstance(value, str) else ""


def _number(row: pd.Series, column: str) -> str:
    value: Any = row.get(column)
    return f"{value:+.2f}" if isinstance(value, float) and not pd.isna(value) else ""
