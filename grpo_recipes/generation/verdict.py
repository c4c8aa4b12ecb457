"""What differences of log-probabilities say about who sampled the tokens: the policy, something else, or not yet.

With d the differences generator - policy of some tokens, and e those of alternative - policy on the same tokens, the
alternative explains the share 1 - sum((d - e)^2) / sum(d^2) of what is seen: 1 if it generated, below 0 if the policy did.
Every rank sees the sums of all ranks and judges them alike, one rank at a time: each may have an engine of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_recipes.generation.agreement import TOLERANCE_16BIT, TOLERANCE_FP32
from grpo_recipes.generation.alternatives import HALF, READINGS, WEIGHTS, WHOLE

EXPLAINED = 0.5
"""The share of the difference that an alternative must explain to be named."""
ALL = 0.99
"""The share that is no coincidence of rounding."""
APART = 4.0
"""How many times nearer, in squares, the policy must be than an alternative to say that it is not the alternative."""
ENOUGH = 64
"""Tokens of a rank on which 16-bit log-probabilities are judged: on fewer, a few odd ones decide."""
BEYOND = {True: 20.0, False: 5.0}
"""How many times the usual difference is no longer the policy, in whole precision or not, whatever else explains it."""
GROSS = 0.5
"""A mean difference that is no longer the policy, before any is usual."""
HALF_FACTOR = 3.0
"""How many times the difference that bfloat16 makes here an engine's dtype explains."""


@dataclass(frozen=True)
class Alternative:
    """What the tokens of one rank say of one alternative: with e its log-probabilities less the policy's."""

    square: float
    """The sum of e^2."""
    left: float
    """The sum of (d - e)^2."""
    total: float
    """The sum of |e|."""


@dataclass(frozen=True)
class Evidence:
    """What the tokens of one rank say: with d the generator's log-probabilities less the policy's."""

    tokens: float
    total: float
    """The sum of |d|."""
    largest: float
    """The largest |d|."""
    square: float
    """The sum of d^2."""
    others: Mapping[str, Alternative] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """The mean of |d|."""
        return self.total / max(self.tokens, 1.0)

    def differs(self, whole: bool) -> bool:
        """Whether this is more than the dtypes explain, both float32 or not; over few 16-bit tokens it may be chance."""
        return self.largest > TOLERANCE_FP32 if whole else self.mean > TOLERANCE_16BIT

    def share(self, name: str) -> float:
        """The share of the difference that an alternative explains, at most 1."""
        return 1 - self.others[name].left / self.square if self.square else -math.inf

    def __add__(self, other: Evidence) -> Evidence:
        """Of the tokens of both; alternatives that only one of them has are left out."""
        both = {
            name: Alternative(*(getattr(mine, key) + getattr(theirs, key) for key in vars(mine)))
            for name, mine in self.others.items()
            if (theirs := other.others.get(name)) is not None
        }
        return Evidence(
            self.tokens + other.tokens,
            self.total + other.total,
            max(self.largest, other.largest),
            self.square + other.square,
            both,
        )


@dataclass(frozen=True)
class Verdict:
    """What one rank's evidence comes to."""

    wrong: bool = False
    """Whether the generator is not the policy, by more than the dtypes explain."""
    names: tuple[str, ...] = ()
    """The alternatives that explain the difference; several if these are alike."""
    unclear: tuple[str, ...] = ()
    """The alternatives that can't be told from the policy yet."""
    explained: float = 0.0
    """The share of the difference that the first of `names` explains."""


def judge(evidence: Evidence, *, whole: bool, usual: float | None) -> Verdict:
    """Whether this is the policy.

    Args:
        evidence: of the tokens of one rank.
        whole: whether generator and policy both compute in float32.
        usual: the mean difference so far, None if none is known.
    """
    unclear = tuple(
        name
        for name, other in evidence.others.items()
        if name in WEIGHTS and not other.left > APART * max(evidence.square, 1e-12)
    )
    differs = evidence.differs(whole)
    if WHOLE in evidence.others and evidence.share(WHOLE) >= (EXPLAINED if differs else ALL):
        # Whatever else explains it may do so by what autocast swallows: judged again without.
        return Verdict(False, (WHOLE,), unclear, evidence.share(WHOLE))
    if whole and not differs:
        return Verdict(unclear=unclear)
    shares = {name: evidence.share(name) for name in evidence.others if name != HALF}
    best = max(shares.values(), default=-math.inf)
    if best >= EXPLAINED:
        names = tuple(name for name, share in shares.items() if share > best - 0.01)
        weights = tuple(name for name in names if name in WEIGHTS)
        readings = tuple(name for name in names if name in READINGS)
        if readings and not differs:  # 16-bit rounding, which another reading may happen to repeat
            return Verdict(unclear=unclear)
        # Where another reading of the same weights explains as much, they are the same weights.
        return Verdict(differs and not readings, readings or weights, unclear, best)
    half = evidence.others.get(HALF)
    if half is not None and evidence.total <= HALF_FACTOR * half.total:
        return Verdict(False, (HALF,), unclear)
    limit = GROSS
    if usual is not None:
        limit = max(TOLERANCE_FP32 if whole else TOLERANCE_16BIT, BEYOND[whole] * usual)
    return Verdict(differs and evidence.mean > limit, (), unclear)
