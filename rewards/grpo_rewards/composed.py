"""Rewards made of others: weighted sums and gates.

| reward | pay |
|---|---|
| `sum` | the sum of weight * part over its parts |
| `gate` | weight * reward if its condition pays enough, else 0, or weight * reward where that is negative |

Both return None for a row that any of their parts can't score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from grpo_rewards.built import BuiltReward, with_declarations
from grpo_rewards.completions import check_rows, copied
from grpo_rewards.reward import BaseReward, Kind, LogColumn, LogMetric


def _log_under(log: Callable[[str, list], None], prefix: str, column: str, values: list) -> None:
    log(prefix + column, values)


class ComposedReward(BaseReward):
    """Base class of rewards made of others, which calls each part, logs it, and combines the scores of a row."""

    parts: tuple[BuiltReward, ...]

    @property
    def needs_whole_groups(self) -> bool:  # type: ignore[override]
        """True if any part compares the completions of a group."""
        return any(part.needs_whole_groups for part in self.parts)

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """Kind of the parts with a weight; "other" for a mixture."""
        kinds = {part.kind for part in self.parts if part.weight != 0}
        return kinds.pop() if len(kinds) == 1 else "other"

    @property
    def highest_pay(self) -> float | None:
        """Largest score of one completion; None if it is not known, as with a negative weight."""
        total = 0.0
        for part in self.parts:
            if part.weight == 0:
                continue
            if part.highest_pay is None or part.weight < 0:
                return None
            total += part.weight * part.highest_pay
        return total

    def __call__(
        self,
        prompts: Any = None,
        completions: Sequence[Any] = (),
        *,
        log_extra: LogColumn = None,
        log_metric: LogMetric = None,
        log_reason: LogColumn = None,
        **columns: Any,
    ) -> list[float | None]:
        """Score every completion by every part. `columns` and the logging callables are passed to each part."""
        check_rows(self.name, completions=completions)
        columns.update(prompts=prompts, completions=completions)
        if log_metric is not None:
            columns["log_metric"] = log_metric
        scores = []
        for part in self.parts:
            label = f"{self.name}/{part.name}"
            for key, log in (("log_extra", log_extra), ("log_reason", log_reason)):
                if log is not None:
                    columns[key] = partial(_log_under, log, f"{label}/")
            column = part.function(**copied(columns))
            check_rows(part.name, completions=completions, scores=column)
            scores.append(column)
            scored = [score for score in column if score is not None]
            if log_extra is not None:
                log_extra(label, list(column))
            if log_metric is not None and scored:
                log_metric(f"rewards/{label}", sum(scored) / len(scored))
        rows = list(zip(*scores, strict=True))
        if log_reason is not None:
            log_reason(f"{self.name}/reason", [self._reason(row) for row in rows])
        return [None if None in row else self._combined(row) for row in rows]

    def _combined(self, row: Sequence[float]) -> float:
        raise NotImplementedError

    def _reason(self, row: Sequence[float | None]) -> str:
        for part, score in zip(self.parts, row, strict=True):
            if score is None:
                return f"{part.name} has no score"
        return " + ".join(f"{part.weight:g} * {part.name}" for part in self.parts if part.weight != 0)


@dataclass(frozen=True)
class SumReward(ComposedReward):
    """Weighted sum of several rewards.

    | row | pay |
    |---|---|
    | every part scores it | the sum of weight * part |
    | any part returns None | None |

    Each part is logged as a column `<name>/<part>` and as its mean over the rows that it scores.
    """

    parts: tuple[BuiltReward, ...]
    name: str = "sum"

    def _combined(self, row: Sequence[float]) -> float:
        return sum(part.weight * score for part, score in zip(self.parts, row, strict=True))


@dataclass(frozen=True)
class GateReward(ComposedReward):
    """Reward that counts only if another one does: a right answer earns nothing in the wrong format.

    | row | pay |
    |---|---|
    | `only_if` pays at least `at_least` (without that key: more than 0) | weight * reward |
    | `only_if` pays less | 0, or weight * reward where that is negative: a closed gate spares no penalty |
    | `only_if` or `reward` returns None, whether the gate is open or not | None |

    The last rule keeps groups together. Otherwise a row with an unreadable gold would earn 0 if its completion is in
    the wrong format and would be dropped if it is in the right one.

    Both parts are logged as columns `<name>/<part>` and as their means over the rows that they score. `only_if` has the
    weight 0, because its score is not part of the sum.
    """

    reward: BuiltReward
    only_if: BuiltReward
    at_least: float | None = None
    name: str = "gate"

    @property
    def parts(self) -> tuple[BuiltReward, ...]:  # type: ignore[override]
        """Reward and condition."""
        return self.reward, self.only_if

    def _combined(self, row: Sequence[float]) -> float:
        score, condition = row
        weighted = self.reward.weight * score
        return weighted if self._opens(condition) else min(0.0, weighted)

    def _opens(self, condition: float) -> bool:
        return condition > 0 if self.at_least is None else condition >= self.at_least

    def _reason(self, row: Sequence[float | None]) -> str:
        condition = row[1]
        if None in row or condition is None:
            return super()._reason(row)
        return f"{'open' if self._opens(condition) else 'closed'}: {self.only_if.name} pays {condition:g}"


def leaves(rewards: Iterable[BuiltReward], weight: float = 1.0) -> Iterator[BuiltReward]:
    """Yield the single rewards that `rewards` are made of, each with its weight in the total (times `weight`).

    A sum or a gate yields its parts. `group_length` yields itself and the reward that it consults. A reward
    whose score is not part of the total, such as the condition of a gate, has the weight 0.
    """
    for reward in rewards:
        reward = replace(reward, weight=weight * reward.weight)
        if reward.parts:
            yield from leaves(reward.parts, reward.weight)
            continue
        yield reward
        yield from leaves(with_declarations(function, 0.0) for function in reward.declared.consulted)
