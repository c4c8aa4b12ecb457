"""Output of an audit: a table for people, and JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from grpo_rewards.audit.audit import PAID, Audit, Kind, Verdict
from grpo_rewards.errors import one_line
from grpo_rewards.terminal import Cell, Part, Table, say, show, visible

_EXAMPLE_CHARS = 70
_UNJUDGED_ROWS = 5


def print_audit(audit: Audit, *, as_json: bool = False) -> None:
    """Print the result of an audit."""
    if as_json:
        say(json.dumps(as_dict(audit), indent=2))
        return
    show(*_parts(audit))


def as_dict(audit: Audit) -> dict[str, Any]:
    """Return the result, ready for JSON."""
    rewards = {}
    for verdict in audit.verdicts:
        setting = verdict.setting
        rewards[verdict.name] = {
            "layout": [layout.name for layout in setting.layouts],
            "shape": setting.shape,
            "reduces_golds": setting.reduces_golds,
            "right": setting.right,
            "other": setting.wrong,
            "rows": verdict.rows,
            "unpaid_rows": verdict.unpaid,
            "kinds": {kind.name: _kind_dict(kind) for kind in verdict.kinds if kind.tried},
            "lazy": vars(verdict.lazy) if verdict.lazy else None,
            "total": vars(verdict.total) if verdict.total else None,
        }
    return {
        "found": audit.found,
        "rows": audit.rows,
        "unreadable": audit.unreadable,
        "kinds": audit.kinds,
        "checks": audit.checks,
        "is_judged": audit.is_judged,
        "not_judged": audit.ignored,
        "rewards": rewards,
        "broken": [vars(broken) for broken in audit.broken],
    }


def _kind_dict(kind: Kind) -> dict[str, Any]:
    best = vars(kind.best) if kind.best else None
    return {"tried": kind.tried, "paid": kind.paid, "best": best}


def _parts(audit: Audit) -> Iterator[Part]:
    for verdict in audit.verdicts:
        yield from _verdict_parts(verdict, None if audit.is_judged else _UNJUDGED_ROWS)
    for name, reason in audit.ignored.items():
        yield f"{name} was not judged: it {reason}"
    if audit.ignored and not audit.is_judged:
        yield "no reward judges correctness, so nothing above is a finding: set `kind: correctness` in the spec of one"
    for broken in audit.broken:
        yield Cell(f"{broken.reward} {broken.reason}", "bad" if broken.is_serious else "dim")
        if broken.example is not None:
            yield f"  for {_excerpt(broken.example)}"
    yield ""
    checked = f"{audit.rows} rows, {audit.kinds} kinds of wrong completions, {audit.checks} contract checks"
    if audit.unreadable:
        checked += f"; {audit.unreadable} rows without a gold of the usual form were left out"
    if not audit.is_judged and not audit.found:
        yield f"not judged: {checked}"
        return
    if not audit.found:
        yield Cell(f"nothing found: {checked}", "good")
        return
    kinds = {kind.name for verdict in audit.verdicts for kind in verdict.paid_kinds}
    serious = sum(broken.is_serious for broken in audit.broken)
    yield Cell(f"{len(kinds)} kinds are paid, {serious} contract checks fail: {checked}", "bad")


def _verdict_parts(verdict: Verdict, most: int | None) -> Iterator[Part]:
    setting = verdict.setting
    yield Cell(verdict.name, "head")
    yield (
        f"  the right answer earns {setting.right:.3g} and another one {setting.wrong:.3g} "
        f"(layout: {', '.join(layout.name for layout in setting.layouts[:4])}; completions are {setting.shape})"
    )
    if setting.reduces_golds:
        yield "  golds were reduced to their final answers, as the preset gsm8k does: the reward pays nothing otherwise"
    if verdict.unpaid:
        few = ", ".join(map(str, verdict.unpaid[:5])) + (", …" if len(verdict.unpaid) > 5 else "")
        count = f"{len(verdict.unpaid)} of {verdict.rows} rows ({few})"
        is_all, hint = len(verdict.unpaid) == verdict.rows, ": if the reward reads another layout, name it by --layout"
        if is_all:
            hint = (
                ": name right completions by --right COLUMN if the reward verifies instead of comparing with a gold, "
                "or its layout by --layout"
            )
        yield Cell(f"  the right answer earns no more than a wrong one in {count}{hint}", "bad" if is_all else "")
    rows = []
    for kind in sorted(verdict.kinds, key=lambda one: -one.best.share if one.best else 0.0):
        if kind.best is None or (not kind.paid and kind.best.share <= 0):
            continue
        style = "bad" if kind.paid else ""
        example = f"row {kind.best.row}: {_excerpt(kind.best.completion)}"
        share = f"{min(kind.best.share, 9.99):.0%}"
        rows.append((Cell(kind.name, style), f"{kind.paid} of {kind.tried}", share, example))
    if rows:
        yield Table(rows[:most], ("wrong completion", f"paid {PAID:.0%}", "at most", "example"), frozenset({1, 2}))
    tried = [kind for kind in verdict.kinds if kind.tried]
    yield f"  {len(tried) - len(rows)} of {len(tried)} kinds of wrong completions earn nothing"
    if verdict.total is not None:
        total = verdict.total
        yield (
            f"  all rewards together pay {total.right:.3g} for right answers and at most {total.wrong:.3g} for a wrong "
            f"completion ({total.kind}): {_excerpt(total.completion)}"
        )
    if verdict.lazy is not None:
        lazy = verdict.lazy
        share = f"{lazy.share:.0%} of what right answers earn"
        yield f"  the same completion in all {lazy.rows} rows earns at most {share}: {_excerpt(lazy.completion)}"


def _excerpt(completion: str) -> str:
    text = one_line(completion)
    if not text:
        return repr(completion)
    if len(text) > _EXAMPLE_CHARS:
        half = _EXAMPLE_CHARS // 2
        text = f"{text[:half]} … {text[-half:]}"
    return visible(text)
