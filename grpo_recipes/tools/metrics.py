"""Metrics of a generation batch whose completions call tools: counts of each rank, and the metrics of all ranks.

Tools are named by the user, and calls by the policy. A metric is made for each tool that a row has. Calls of any other
name are counted together, so that a policy that invents names does not fill the log.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from grpo_recipes.tools import UNKNOWN
from grpo_recipes.tools.loop import Row
from grpo_recipes.tools.run import WINDOW
from grpo_rewards.errors import one_line

PREFIX = "tools/"
# Characters that a tracker may refuse in a metric's name. A slash would look like a further level.
_UNSAFE = re.compile(r"[^\w.\-]")

Counts = Counter[tuple[str, str]]
"""Numbers by a tool and what is counted of it. What is counted of rows and of all calls stands under the tool ""."""


def counts_of(rows: Iterable[Row]) -> Counts:
    """Count the rows of a generation batch of one rank, which have ended."""
    counts: Counts = Counter()
    for row in rows:
        turns = [message for message in row.messages if message.get("role") != "tool"]
        counts["", "rows"] += 1
        counts["", "turns"] += len(turns)
        counts["", "rows_with_calls"] += any(turn.get("tool_calls") for turn in turns)
        counts["", "rows_at_limit"] += row.ending == "iterations"
        counts["", "rows_out_of_budget"] += row.ending in ("no room", "full")
        counts["", "tokens"] += len(row.mask)
        counts["", "tool_tokens"] += len(row.mask) - sum(row.mask)
        for name in row.tools.functions:
            counts[_UNSAFE.sub("_", name), "rows"] += 1
        for result in (result for turn in row.turns for result in turn):
            is_known = result.name in row.tools.functions
            for tool in ("", _UNSAFE.sub("_", result.name) if is_known else UNKNOWN):
                counts[tool, "calls"] += 1
                counts[tool, "faults"] += bool(result.fault)
                counts[tool, "mistakes"] += bool(result.mistake)
                counts[tool, "made"] += result.made
                counts[tool, "seconds"] += result.seconds  # type: ignore[assignment]
    return counts


def last_calls(rows: Iterable[Row]) -> list[tuple[str, str, str]]:
    """Return name, fault and mistake of the last calls of a rank's tools, which a `FailureWindow` adds."""
    calls = []
    for row in rows:
        for result in (result for turn in row.turns for result in turn):
            if result.name in row.tools.functions and (result.made or result.mistake):
                calls.append((result.name, one_line(result.fault), one_line(result.mistake)))
    return calls[-WINDOW:]


def metrics(ranks: Sequence[Counts]) -> dict[str, float]:
    """Return the metrics of all ranks' rows. A mean over no calls is left out."""
    counts: Counts = sum(ranks, Counter())
    rows = max(1, counts["", "rows"])
    names = ("turns", "rows_with_calls", "rows_at_limit", "rows_out_of_budget")
    found = {name: counts["", name] / rows for name in names}
    found["tokens_share"] = counts["", "tool_tokens"] / max(1, counts["", "tokens"])
    found[f"{UNKNOWN}/calls"] = counts[UNKNOWN, "calls"] / rows
    if calls := counts["", "calls"]:
        found["mistakes"] = counts["", "mistakes"] / calls
    for tool in dict.fromkeys(tool for tool, counted in counts if counted == "rows" and tool):
        calls, made = counts[tool, "calls"], counts[tool, "made"]
        found[f"{tool}/calls"] = calls / counts[tool, "rows"]
        if calls:
            found[f"{tool}/failures"] = counts[tool, "faults"] / calls
            found[f"{tool}/mistakes"] = counts[tool, "mistakes"] / calls
        if made:
            found[f"{tool}/seconds"] = counts[tool, "seconds"] / made
    return {PREFIX + name: value for name, value in found.items()}
