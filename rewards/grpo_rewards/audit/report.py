"""Output of an audit: a table for people, and JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from grpo_rewards.audit.audit import CHECKS, PAID, Audit, JudgedReward
from grpo_rewards.errors import one_line
from grpo_rewards.terminal import Cell, Part, Table, say, show, visible

_HINT = "name the layout by --layout, or name right completions by --right COLUMN if the reward verifies"


def print_audit(audit: Audit, *, as_json: bool = False) -> None:
    """Print the result of an audit."""
    if as_json:
        say(json.dumps({"found": audit.found, **asdict(audit)}, indent=2))
    else:
        show(*_parts(audit))


def _parts(audit: Audit) -> Iterator[Part]:
    for verdict in audit.verdicts:
        yield from _verdict_parts(verdict)
    for broken in audit.broken:
        yield Cell(f"{broken.reward} {broken.reason}", "bad" if broken.is_serious else "dim")
        if broken.example is not None:
            yield f"  for {_excerpt(broken.example)}"
    yield ""
    kinds = {kind.name for verdict in audit.verdicts for kind in verdict.kinds}
    checked = f"{audit.rows} rows, {len(kinds)} kinds of wrong completions, {len(CHECKS)} contract checks"
    if audit.unreadable:
        checked += f"; {audit.unreadable} rows without a gold of the usual form were left out"
    if audit.found:
        paid = {kind.name for verdict in audit.verdicts for kind in verdict.kinds if kind.paid}
        serious = sum(broken.is_serious for broken in audit.broken)
        yield Cell(f"{len(paid)} kinds are paid, {serious} contract checks fail: {checked}", "bad")
    elif audit.verdicts:
        yield Cell(f"nothing found: {checked}", "good")
    else:
        yield f"no reward judges correctness, so set `kind: correctness` in the spec of the one that does: {checked}"


def _verdict_parts(verdict: JudgedReward) -> Iterator[Part]:
    yield Cell(verdict.name, "head")
    yield f"  the right answer earns {verdict.right:.3g} and another one {verdict.wrong:.3g} ({verdict.called})"
    if verdict.unpaid:
        few = ", ".join(map(str, verdict.unpaid[:5])) + (", …" if len(verdict.unpaid) > 5 else "")
        count = f"{len(verdict.unpaid)} of {verdict.rows} rows ({few})"
        yield Cell(f"  the right answer earns no more than a wrong one in {count}: {_HINT}", "bad")
    rows = []
    for kind in sorted(verdict.kinds, key=lambda kind: -kind.share):
        if kind.share > 0:
            example = f"row {kind.row}: {_excerpt(kind.completion)}"
            name = Cell(kind.name, "bad" if kind.paid else "")
            rows.append((name, f"{kind.paid} of {kind.tried}", f"{min(kind.share, 9.99):.0%}", example))
    if rows:
        yield Table(rows, ("wrong completion", f"paid {PAID:.0%}", "at most", "example"), frozenset({1, 2}))
    yield f"  {len(verdict.kinds) - len(rows)} of {len(verdict.kinds)} kinds of wrong completions earn nothing"


def _excerpt(completion: str) -> str:
    text = one_line(completion) or repr(completion)
    return visible(text if len(text) <= 70 else f"{text[:35]} … {text[-35:]}")
