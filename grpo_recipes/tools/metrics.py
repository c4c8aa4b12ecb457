"""Metrics of a generation batch whose completions call tools: counts of each rank, and the metrics of all ranks.

Tools are named by the user, and calls by the policy. A metric is made for each tool that a row has. Calls of any other
name are counted together, so that a policy that invents names does not fill the log.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_recipes.tools.bounded import Result
    from grpo_recipes.tools.loop import Row

PREFIX = "tools/"
UNKNOWN = "unknown"
"""Name in the metrics of all names that no tool has."""
NAME_CHARACTERS = 64
"""Largest number of characters of a tool's name in a metric."""

# Characters that a tracker may refuse in a metric's name. A slash would look like a further level.
_UNSAFE = re.compile(r"[^\w.\-]")


@dataclass
class ToolCounts:
    """Calls of one tool."""

    rows: int = 0
    """Number of rows that have the tool."""
    calls: int = 0
    faults: int = 0
    """Number of calls in which the tool itself failed."""
    refused: int = 0
    """Number of calls that were not made, because their arguments do not fit or a turn has too many calls."""
    seconds: float = 0.0

    def add(self, result: Result) -> None:
        """Count a call."""
        self.calls += 1
        self.faults += bool(result.fault)
        self.refused += result.refused
        self.seconds += result.seconds

    def __iadd__(self, other: ToolCounts) -> ToolCounts:
        for entry in fields(self):
            setattr(self, entry.name, getattr(self, entry.name) + getattr(other, entry.name))
        return self


@dataclass
class Counts:
    """Counts of the rows of one rank. Ranks gather them."""

    rows: int = 0
    turns: int = 0
    """Number of turns of the policy."""
    calling: int = 0
    """Number of rows with a call, also one that was not run."""
    at_limit: int = 0
    """Number of rows with a call after the last allowed turn."""
    out_of_budget: int = 0
    """Number of rows whose results, or the turn behind them, have no room in the completion."""
    dropped: int = 0
    """Number of rows whose last calls were run, although the policy never saw the results."""
    tokens: int = 0
    tool_tokens: int = 0
    """Number of tokens of results, with the template around them."""
    unknown: int = 0
    """Number of calls of a name that no tool of the row has."""
    tools: dict[str, ToolCounts] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Counts:
        """Count the rows of a generation batch that have ended."""
        counts = cls()
        for row in rows:
            counts._add(row)
        return counts

    def _add(self, row: Row) -> None:
        self.rows += 1
        turns = [message for message in row.messages if message.get("role") != "tool"]
        self.turns += len(turns)
        self.calling += any(turn.get("tool_calls") for turn in turns)
        self.at_limit += row.ending == "iterations"
        self.out_of_budget += row.ending in ("no room", "full")
        self.dropped += row.ending == "dropped"
        self.tokens += len(row.mask)
        self.tool_tokens += len(row.mask) - sum(row.mask)
        for name in row.tools.functions:
            self.tools.setdefault(name, ToolCounts()).rows += 1
        for results in row.turns:
            for result in results:
                if result.name in row.tools.functions:
                    self.tools[result.name].add(result)
                else:
                    self.unknown += 1


def metrics(ranks: Sequence[Counts]) -> dict[str, float]:
    """Return the metrics of all ranks' rows. A mean over no calls is left out."""

    def total(name: str) -> int:
        return sum(getattr(rank, name) for rank in ranks)

    rows = max(1, total("rows"))
    found = {
        "turns": total("turns") / rows,
        "rows_with_calls": total("calling") / rows,
        "rows_at_limit": total("at_limit") / rows,
        "rows_out_of_budget": total("out_of_budget") / rows,
        "rows_results_dropped": total("dropped") / rows,
        "tokens_share": total("tool_tokens") / max(1, total("tokens")),
        f"{UNKNOWN}/calls": total("unknown") / rows,
    }
    tools: dict[str, ToolCounts] = {}
    for rank in ranks:
        for name, counts in rank.tools.items():
            merged = tools.setdefault(metric_name(name), ToolCounts())
            merged += counts
    for name, counts in tools.items():
        found[f"{name}/calls"] = counts.calls / counts.rows
        if counts.calls:
            found[f"{name}/failures"] = counts.faults / counts.calls
            found[f"{name}/refused"] = counts.refused / counts.calls
        if counts.calls > counts.refused:
            found[f"{name}/seconds"] = counts.seconds / (counts.calls - counts.refused)
    return {PREFIX + name: value for name, value in found.items()}


def metric_name(tool: str) -> str:
    """Return the name of a tool in metrics. A name that has to be changed gets a checksum, so that none is shared."""
    safe = _UNSAFE.sub("_", tool)[:NAME_CHARACTERS]
    if safe == tool and safe not in ("", UNKNOWN):
        return safe
    return f"{safe}-{zlib.crc32(tool.encode('utf-8', 'backslashreplace')):08x}"
