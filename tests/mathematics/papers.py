"""The objectives of the published algorithms, each written from its paper: neither TRL nor the oracle is read here.

A paper has three parts: what a completion's advantage is, from the rewards of whole groups; the objective J of the
completions of one update, to be maximised, from their log-probabilities; and its own numbers, as defaults. A completion
is a row of its own, without padding. Equations are numbered where the paper numbers them.

What TRL adds to a paper is a parameter here, 0 or 1 unless given (`added`, `Update.divisor`): the constants that
docs/algorithms.md lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Rewards = Sequence[Sequence[float]]
"""The rewards of one group: (G, number of reward functions)."""


@dataclass(frozen=True)
class Row:
    """A completion o of T tokens: log π, log π_old and log π_ref of each, (T,); its advantage; whether it was cut off."""

    new: Tensor
    old: Tensor
    reference: Tensor
    advantage: float
    is_truncated: bool = False

    @property
    def ratio(self) -> Tensor:
        """r_t = π(o_t) / π_old(o_t), (T,)."""
        return (self.new - self.old).exp()


@dataclass(frozen=True)
class Update:
    """The completions of one update of the policy, on all ranks, and the length L that a paper's code divides by."""

    rows: Sequence[Row]
    longest: int


@dataclass(frozen=True)
class Paper:
    """An algorithm: its advantages of a batch of groups, its objective, and the share of terms that it bounds."""

    title: str
    advantages: Callable[[Sequence[Rewards], float], list[list[float]]]
    objective: Callable[[Update], Tensor]
    bounded: Callable[[Update], float]
    """The share of terms whose gradient the clip, the bound or the gate changes by more than one in a thousand."""


# Advantages


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """The sample's standard deviation."""
    return math.sqrt(math.fsum((value - mean(values)) ** 2 for value in values) / (len(values) - 1))


def z_scores(values: Sequence[float], added: float) -> list[float]:
    """(value - mean) / (standard deviation + added); 0 where all values are equal and nothing is added."""
    spread = deviation(values) + added
    return [(value - mean(values)) / spread if spread else 0.0 for value in values]


def of_the_total(groups: Sequence[Rewards], added: float) -> list[list[float]]:
    """DeepSeekMath, section 4.1.2 (DAPO 9, GSPO 6): the z-score of the summed reward in its group."""
    return [z_scores([math.fsum(rewards) for rewards in group], added) for group in groups]


def centred(groups: Sequence[Rewards], added: float) -> list[list[float]]:
    """Dr. GRPO: R - mean(R)."""
    totals = [[math.fsum(rewards) for rewards in group] for group in groups]
    return [[total - mean(group) for total in group] for group in totals]


def decoupled(groups: Sequence[Rewards], added: float) -> list[list[float]]:
    """GDPO: the z-score of each reward in its group, summed, and the z-score of the sum in the batch."""
    sums = []
    for group in groups:
        by_reward = [z_scores(column, added) for column in zip(*group, strict=True)]
        sums.append([math.fsum(scores) for scores in zip(*by_reward, strict=True)])
    batch = iter(z_scores([total for group in sums for total in group], added))
    return [[next(batch) for _ in group] for group in sums]


def over_the_mean(groups: Sequence[Rewards], added: float) -> list[list[float]]:
    """MaxRL: (R - m) / m with the group's mean m, and 0 in a group that earned nothing."""
    totals = [[math.fsum(rewards) for rewards in group] for group in groups]
    return [[(total - mean(group)) / mean(group) if any(group) else 0.0 for total in group] for group in totals]


# Objectives


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """min(r A, clip(r, 1 - low, 1 + high) A)."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def grpo(update: Update, epsilon: float = 0.2, beta: float = 0.04) -> Tensor:
    """DeepSeekMath (3), with the divergence (4)."""
    total = torch.zeros(())
    for row in update.rows:
        log_ratio = row.reference - row.new
        divergence = log_ratio.exp() - log_ratio - 1
        total = total + (clipped(row.ratio, row.advantage, epsilon, epsilon) - beta * divergence).sum() / len(row.new)
    return total / len(update.rows)


def dr_grpo(update: Update, epsilon: float = 0.2) -> Tensor:
    """Dr. GRPO, section 3.2, over the authors' constant length."""
    total = sum(clipped(row.ratio, row.advantage, epsilon, epsilon).sum() for row in update.rows)
    return total / len(update.rows) / update.longest


def dapo(update: Update, low: float = 0.2, high: float = 0.28) -> Tensor:
    """DAPO (8), the tokens of all questions pooled; truncated completions are filtered (section 3.4)."""
    rows = [row for row in update.rows if not row.is_truncated]
    total = sum((clipped(row.ratio, row.advantage, low, high).sum() for row in rows), torch.zeros(()))
    return total / max(sum(len(row.new) for row in rows), 1)


def gspo(update: Update, left: float = 3e-4, right: float = 4e-4) -> Tensor:
    """GSPO (5), with the ratio (7): the |o|-th root of π(o) / π_old(o)."""
    terms = [clipped(sequence_ratio(row), row.advantage, left, right) for row in update.rows]
    return torch.stack(terms).mean()


def sequence_ratio(row: Row) -> Tensor:
    """GSPO (7)."""
    return ((row.new.sum() - row.old.sum()) / len(row.new)).exp()


def cispo(update: Update, bound: float = 5.0) -> Tensor:
    """MiniMax-M1 (4), with the weight (5): no gradient passes through it; tokens pooled as in `dapo`."""
    terms = [torch.clamp(row.ratio.detach(), max=bound) * row.advantage * row.new for row in update.rows]
    return torch.cat(terms).mean()


def sapo(update: Update, positive: float = 1.0, negative: float = 1.05) -> Tensor:
    """SAPO: f(r) A with the gate f(r) = 4 / tau * sigmoid(tau (r - 1))."""
    means = []
    for row in update.rows:
        tau = positive if row.advantage > 0 else negative
        gate = 4 / tau / (1 + (-tau * (row.ratio - 1)).exp())
        means.append((gate * row.advantage).mean())
    return torch.stack(means).mean()


def gdpo(update: Update, epsilon: float = 0.2) -> Tensor:
    """GDPO: GRPO's objective without its divergence."""
    return grpo(update, epsilon, beta=0.0)


def maxrl(update: Update) -> Tensor:
    """MaxRL: its gradient is the mean of A times that of log π(o). As a value, A times the expected ratio of each token."""
    total = torch.zeros(())
    for row in update.rows:
        score = row.new.sum()
        total = total + row.advantage * (score - score.detach() + len(row.new))
    return total / len(update.rows) / update.longest


# What a bound bounds


def _clip_share(low: float, high: float) -> Callable[[Update], float]:
    def share(update: Update) -> float:
        terms = [
            (row.ratio < 1 - low) if row.advantage < 0 else (row.ratio > 1 + high)
            for row in update.rows
            if row.advantage
        ]
        return torch.cat(terms).double().mean().item() if terms else 0.0

    return share


def _gspo_share(update: Update) -> float:
    terms = [
        (sequence_ratio(row) < 1 - 3e-4) if row.advantage < 0 else (sequence_ratio(row) > 1 + 4e-4)
        for row in update.rows
        if row.advantage
    ]
    return torch.stack(terms).double().mean().item() if terms else 0.0


def _cispo_share(update: Update) -> float:
    return torch.cat([row.ratio > 5.0 for row in update.rows]).double().mean().item()


def _sapo_share(update: Update) -> float:
    # The gate's slope is 4 sigma (1 - sigma), 1 at r = 1.
    slopes = [torch.sigmoid(row.ratio - 1) * torch.sigmoid(1 - row.ratio) * 4 for row in update.rows]
    return (torch.cat(slopes) < 0.999).double().mean().item()


def _nothing(update: Update) -> float:
    return 0.0


PAPERS: dict[str, Paper] = {
    "grpo": Paper("GRPO", of_the_total, grpo, _clip_share(0.2, 0.2)),
    "dr-grpo": Paper("Dr. GRPO", centred, dr_grpo, _clip_share(0.2, 0.2)),
    "dapo": Paper("DAPO", of_the_total, dapo, _clip_share(0.2, 0.28)),
    "gspo": Paper("GSPO", of_the_total, gspo, _gspo_share),
    "cispo": Paper("CISPO", of_the_total, cispo, _cispo_share),
    "sapo": Paper("SAPO", of_the_total, sapo, _sapo_share),
    "gdpo": Paper("GDPO", decoupled, gdpo, _clip_share(0.2, 0.2)),
    "maxrl": Paper("MaxRL", over_the_mean, maxrl, _nothing),
}
