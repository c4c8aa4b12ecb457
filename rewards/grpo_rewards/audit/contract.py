"""Contract of a reward: one finite number or None per completion, the same whenever and beside whatever it is scored.

Each check is a function that returns the sentence of a broken contract, or None.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_rewards.audit.calls import Caller, Failure, Item, Outcome
from grpo_rewards.errors import one_line, shortened

SLOW = 0.05
"""Seconds per completion from which a reward counts as slow."""

_REPEATS = 3
_ALONE = 8

Known = Sequence[tuple[Item, Outcome]]


@dataclass(frozen=True)
class Broken:
    """Broken contract.

    Attributes:
        reward: name of the reward.
        check: name of the check.
        reason: clause that describes the fault, and the fix.
        is_serious: False if training works nevertheless.
        example: completion that shows it; None if none does.
    """

    reward: str
    check: str
    reason: str
    is_serious: bool = True
    example: str | None = None


def contract(caller: Caller, items: Sequence[Item]) -> tuple[list[Broken], int]:
    """Return the broken contracts of a reward, and the number of checks.

    Args:
        caller: reward to call, with the completions that it has scored so far.
        items: right and wrong completions of different questions, which it has not scored yet.
    """
    name = caller.reward.name
    broken = [*_failures(name, caller.known())]
    unit = caller.group
    items = [item for item in items for _ in range(unit)]
    for check, sentence in _CHECKS.items():
        reason, example = sentence(caller, items)
        # A reward that gives another score each time depends on everything else too.
        if reason and not (check in _REPEATED and any(one.check == "deterministic" for one in broken)):
            broken.append(Broken(name, check, reason, check not in _HARMLESS, example))
    return broken, len(_CHECKS) + len(_FAILURES)


_FAILURES = {
    "raises": "raises",
    "count": "returns something else than one score per completion",
    "finite": "returns scores that are no finite numbers",
    "none": "returns None for a wrong completion of a question that it can score",
}
_FIXES = {
    "raises": "a completion may be any text: pay it as a wrong one",
    "count": "return a list with one number for each completion",
    "finite": "return a finite number, or None for a row that can't be scored",
    "none": "pay it as a wrong one, because None drops the completion instead",
}


def _failures(name: str, known: Known) -> list[Broken]:
    """Return one broken contract for each way in which a reward failed, with its first example."""
    scored = {question.number for (question, _), outcome in known if isinstance(outcome, float)}
    found: dict[str, tuple[list[str], str]] = {}
    for (question, text), outcome in known:
        if isinstance(outcome, Failure):
            found.setdefault(outcome.check, ([], outcome.reason))[0].append(text)
        elif outcome is None and question.number in scored:
            found.setdefault("none", ([], ""))[0].append(text)
    broken = []
    for check, (texts, reason) in found.items():
        what = f"{_FAILURES[check]} for {len(texts)} of {len(known)} completions{f' ({reason})' if reason else ''}"
        broken.append(Broken(name, check, f"{what}: {_FIXES[check]}", True, min(texts, key=len)))
    return broken


_Result = tuple[str | None, str | None]
_FINE: _Result = (None, None)


def _takes_columns(caller: Caller, items: Sequence[Item]) -> _Result:
    if caller.takes is None:
        return _FINE
    missing = sorted(set(caller.passed()) - caller.takes)
    if not missing:
        return _FINE
    return f"takes no `{missing[0]}`, and a trainer passes it: add `**columns` to its parameters", None


def _first_difference(
    items: Sequence[Item], one: Sequence[Outcome] | Failure, other: Sequence[Outcome] | Failure
) -> tuple[str, str] | None:
    """Return the completion, and both scores as text, where two calls differ."""
    if isinstance(one, Failure) or isinstance(other, Failure):
        return None
    for (_, text), first, second in zip(items, one, other, strict=True):
        are_numbers = isinstance(first, float) and isinstance(second, float)
        # A sum in another order may differ in the last digit.
        if abs(first - second) > 1e-6 if are_numbers else first != second:  # type: ignore[operator]
            return text, f"{_shown(first)}, then {_shown(second)}"
    return None


def _shown(outcome: Outcome) -> str:
    return outcome.reason if isinstance(outcome, Failure) else "None" if outcome is None else f"{outcome:g}"


def _deterministic(caller: Caller, items: Sequence[Item]) -> _Result:
    first = caller.call(caller.batch(items), len(items))
    for _ in range(_REPEATS):
        again = caller.call(caller.batch(items), len(items))
        if difference := _first_difference(items, first, again):
            fix = "remove randomness and state"
            return f"gives the same completion another score ({difference[1]}): {fix}", difference[0]
    return _FINE


def _alone(caller: Caller, items: Sequence[Item]) -> _Result:
    together = caller.call(caller.batch(items), len(items))
    if isinstance(together, Failure):
        return _FINE
    unit = caller.group
    for start in range(0, min(len(items), _ALONE * unit), unit):
        group = items[start : start + unit]
        alone = caller.call(caller.batch(group), len(group))
        if difference := _first_difference(group, together[start : start + unit], alone):
            fix = "score each completion by itself, or declare `needs_whole_groups`"
            return f"gives a completion another score without the other rows ({difference[1]}): {fix}", difference[0]
    return _FINE


def _order(caller: Caller, items: Sequence[Item]) -> _Result:
    forward = caller.call(caller.batch(items), len(items))
    backward = caller.call(caller.batch(items[::-1]), len(items))
    if isinstance(backward, Failure):
        return _FINE
    if difference := _first_difference(items, forward, backward[::-1]):
        reason = f"gives a completion another score in another order of the rows ({difference[1]})"
        return f"{reason}: score each completion by itself", difference[0]
    return _FINE


def _mutates(caller: Caller, items: Sequence[Item]) -> _Result:
    batch = caller.batch(items)
    shared = {key: batch[key] for key in batch if key not in ("log_extra", "log_metric", "trainer_state")}
    kept = copy.deepcopy(shared)
    caller.call({**batch, **shared}, len(items))
    changed = [key for key in kept if not _is_same(kept[key], shared[key])]
    if changed:
        return f"changes its argument `{changed[0]}`, which the next reward reads: change a copy", None
    return _FINE


def _is_same(one: object, other: object) -> bool:
    return repr(one) == repr(other)


def _prints(caller: Caller, items: Sequence[Item]) -> _Result:
    if not caller.printed:
        return _FINE
    return f"prints ({shortened(one_line(caller.printed), 60)}): use `log_extra`", None


def _slow(caller: Caller, items: Sequence[Item]) -> _Result:
    if caller.seconds < SLOW:
        return _FINE
    return f"takes {caller.seconds:.2g} s per completion, during which the trainer waits", None


def _returns_list(caller: Caller, items: Sequence[Item]) -> _Result:
    if not caller.returned or caller.returned in ("NoneType", "str", "float", "int", "dict"):  # `count` names these
        return _FINE
    return f"returns a {caller.returned}: a list is what every trainer takes", None


_CHECKS: dict[str, Callable[[Caller, Sequence[Item]], _Result]] = {
    "columns": _takes_columns,
    "deterministic": _deterministic,
    "other rows": _alone,
    "order": _order,
    "arguments": _mutates,
    "prints": _prints,
    "slow": _slow,
    "list": _returns_list,
}
_HARMLESS = ("prints", "slow", "list")
_REPEATED = ("other rows", "order")
