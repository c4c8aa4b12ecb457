"""Objectives of the published algorithms, each written from its paper alone, without TRL and without the oracle.

A paper has three parts: the advantages of all completions, from the rewards of their groups; the objective J of the
completions of one update, which is maximized, from their log-probabilities; and its own numbers, which are the defaults
of the functions. Each completion is a row of its own, without padding. Equation numbers are those of the papers.

Two constants that TRL adds to a paper are parameters here, and change nothing at their defaults: `added` to a standard
deviation, and the length `Update.longest`. docs/algorithms.md lists all such constants and shows these functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Rewards = Sequence[Sequence[float]]
"""Rewards of one group, (G, number of reward functions)."""


@dataclass(frozen=True)
class Row:
    """A completion o of T tokens."""

    new: Tensor
    """log π(o_t) under the policy, (T,), with a graph."""
    old: Tensor
    """log π_old(o_t) under the policy that sampled the completion, (T,)."""
    reference: Tensor
    """log π_ref(o_t) under the reference policy, (T,)."""
    advantage: float
    """Advantage A of the completion."""
    is_truncated: bool = False
    """True if the completion was cut off at the length limit."""

    @property
    def ratio(self) -> Tensor:
        """Importance ratio r_t = π(o_t) / π_old(o_t), (T,)."""
        return (self.new - self.old).exp()


@dataclass(frozen=True)
class Update:
    """Completions of one update of the policy, on all ranks."""

    rows: Sequence[Row]
    longest: int
    """Maximum completion length L, which some papers' code divides by."""


@dataclass(frozen=True)
class Paper:
    """A published algorithm."""

    title: str
    advantages: Callable[[Sequence[Rewards], float], list[list[float]]]
    """Function of the rewards of all groups and the constant added to a deviation to the advantages of each group."""
    objective: Callable[[Update], Tensor]
    """Objective J, a scalar."""
    bounded: Callable[[Update], float]
    """Share of terms whose gradient the clip, the bound or the gate changes by more than one in a thousand."""


# Advantages


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean."""
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample, with divisor n - 1."""
    return math.sqrt(math.fsum((value - mean(values)) ** 2 for value in values) / (len(values) - 1))


def z_scores(values: Sequence[float], added: float) -> list[float]:
    """Return (value - mean) / (standard deviation + added), or 0 if all values are equal and nothing is added."""
    divisor = deviation(values) + added
    return [(value - mean(values)) / divisor if divisor else 0.0 for value in values]


def z_score_of_total(groups: Sequence[Rewards], added: float) -> list[list[float]]:
    """Return A_i = (R_i - mean(R)) / std(R) over each group, where R_i is the sum of the rewards of completion i.

    DeepSeekMath, section 4.1.2; the same in DAPO (9), GSPO (6), CISPO and SAPO.
    """
    return [z_scores([math.fsum(rewards) for rewards in group], added) for group in groups]


def centred(groups: Sequence[Rewards], added: float) -> list[list[float]]:
    """Return A_i = R_i - mean(R) over each group. Dr. GRPO, section 3.2: no division by the deviation."""
    totals = [[math.fsum(rewards) for rewards in group] for group in groups]
    return [[total - mean(group) for total in group] for group in totals]


def decoupled(groups: Sequence[Rewards], added: float) -> list[list[float]]:
    """Return A_i = z-score over the batch of S_i = sum over rewards k of the z-score of R_k,i over its group. GDPO."""
    sums = []
    for group in groups:
        by_reward = [z_scores(column, added) for column in zip(*group, strict=True)]
        sums.append([math.fsum(scores) for scores in zip(*by_reward, strict=True)])
    batch = iter(z_scores([total for group in sums for total in group], added))
    return [[next(batch) for _ in group] for group in sums]


def over_the_mean(groups: Sequence[Rewards], added: float) -> list[list[float]]:
    """Return A_i = (R_i - mean(R)) / mean(R) over each group, and 0 in a group without a success. MaxRL."""
    totals = [[math.fsum(rewards) for rewards in group] for group in groups]
    return [[(total - mean(group)) / mean(group) if any(group) else 0.0 for total in group] for group in totals]


# Objectives


def clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """Return min(r A, clip(r, 1 - low, 1 + high) A) for each ratio r (PPO, arXiv 1707.06347, equation 7)."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def grpo(update: Update, epsilon: float = 0.2, beta: float = 0.04) -> Tensor:
    """Return GRPO's objective (DeepSeekMath, arXiv 2402.03300, equation 3).

    J = mean over i of 1/|o_i| sum over t of [min(r_t A_i, clip(r_t, 1 - ε, 1 + ε) A_i) - β D_t], with the divergence
    D_t = π_ref/π - log(π_ref/π) - 1 of token t (equation 4).
    """
    total = torch.zeros(())
    for row in update.rows:
        log_ratio = row.reference - row.new
        divergence = log_ratio.exp() - log_ratio - 1
        total = total + (clipped(row.ratio, row.advantage, epsilon, epsilon) - beta * divergence).sum() / len(row.new)
    return total / len(update.rows)


def dr_grpo(update: Update, epsilon: float = 0.2) -> Tensor:
    """Return Dr. GRPO's objective (arXiv 2503.20783, section 3.2) divided by the length L of the authors' code.

    J = mean over i of 1/L sum over t of min(r_t A_i, clip(r_t, 1 - ε, 1 + ε) A_i)
    """
    total = sum(clipped(row.ratio, row.advantage, epsilon, epsilon).sum() for row in update.rows)
    return total / len(update.rows) / update.longest


def dapo(update: Update, low: float = 0.2, high: float = 0.28) -> Tensor:
    """Return DAPO's objective (arXiv 2503.14476, equation 8), with the tokens of all questions pooled.

    J = 1 / (sum over i of |o_i|) sum over i and t of min(r_t A_i, clip(r_t, 1 - ε_low, 1 + ε_high) A_i)

    The sums are over the completions that were not truncated (section 3.4).
    """
    rows = [row for row in update.rows if not row.is_truncated]
    total = sum((clipped(row.ratio, row.advantage, low, high).sum() for row in rows), torch.zeros(()))
    return total / max(sum(len(row.new) for row in rows), 1)


def gspo(update: Update, left: float = 3e-4, right: float = 4e-4) -> Tensor:
    """Return GSPO's objective (arXiv 2507.18071, equation 5), with one ratio s_i per completion.

    J = mean over i of min(s_i A_i, clip(s_i, 1 - ε_left, 1 + ε_right) A_i)
    """
    terms = [clipped(sequence_ratio(row), row.advantage, left, right) for row in update.rows]
    return torch.stack(terms).mean()


def sequence_ratio(row: Row) -> Tensor:
    """Return s = (π(o) / π_old(o))^(1/|o|), the geometric mean of the token ratios (GSPO, equation 7)."""
    return ((row.new.sum() - row.old.sum()) / len(row.new)).exp()


def cispo(update: Update, bound: float = 5.0) -> Tensor:
    """Return CISPO's objective (MiniMax-M1, arXiv 2506.13585, equations 4 and 5), with all questions' tokens pooled.

    J = 1 / (sum over i of |o_i|) sum over i and t of min(r_t, bound) A_i log π(o_t)

    The weight min(r_t, bound) has no gradient.
    """
    terms = [torch.clamp(row.ratio.detach(), max=bound) * row.advantage * row.new for row in update.rows]
    return torch.cat(terms).mean()


def sapo(update: Update, positive: float = 1.0, negative: float = 1.05) -> Tensor:
    """Return SAPO's objective (arXiv 2511.20347), with a smooth gate f in place of a clip.

    J = mean over i of 1/|o_i| sum over t of f(r_t) A_i, with f(r) = 4/τ sigmoid(τ (r - 1))

    τ depends on the sign of A_i.
    """
    means = []
    for row in update.rows:
        tau = positive if row.advantage > 0 else negative
        gate = 4 / tau / (1 + (-tau * (row.ratio - 1)).exp())
        means.append((gate * row.advantage).mean())
    return torch.stack(means).mean()


def gdpo(update: Update, epsilon: float = 0.2) -> Tensor:
    """Return GDPO's objective (arXiv 2601.05242): GRPO's without the divergence, with the advantages of `decoupled`."""
    return grpo(update, epsilon, beta=0.0)


def maxrl(update: Update) -> Tensor:
    """Return an objective with MaxRL's gradient (arXiv 2602.02710): the mean of A_i grad log π(o_i), divided by L.

    Its value is that of TRL's loss at ratios of 1: each token contributes A_i.
    """
    total = torch.zeros(())
    for row in update.rows:
        score = row.new.sum()
        total = total + row.advantage * (score - score.detach() + len(row.new))
    return total / len(update.rows) / update.longest


# Shares of bounded terms


def _clip_share(low: float, high: float) -> Callable[[Update], float]:
    """Return a function for the share of tokens that the clip removes."""

    def share(update: Update) -> float:
        terms = [
            (row.ratio < 1 - low) if row.advantage < 0 else (row.ratio > 1 + high)
            for row in update.rows
            if row.advantage
        ]
        return torch.cat(terms).double().mean().item() if terms else 0.0

    return share


def _gspo_share(update: Update) -> float:
    """Return the share of completions that GSPO's clip removes."""
    terms = [
        (sequence_ratio(row) < 1 - 3e-4) if row.advantage < 0 else (sequence_ratio(row) > 1 + 4e-4)
        for row in update.rows
        if row.advantage
    ]
    return torch.stack(terms).double().mean().item() if terms else 0.0


def _cispo_share(update: Update) -> float:
    """Return the share of tokens whose weight CISPO bounds."""
    return torch.cat([row.ratio > 5.0 for row in update.rows]).double().mean().item()


def _sapo_share(update: Update) -> float:
    """Return the share of tokens whose gradient SAPO's gate reduces. The gate's slope is 4 σ (1 - σ), 1 at r = 1."""
    slopes = [torch.sigmoid(row.ratio - 1) * torch.sigmoid(1 - row.ratio) * 4 for row in update.rows]
    return (torch.cat(slopes) < 0.999).double().mean().item()


def _none_bounded(update: Update) -> float:
    return 0.0


PAPERS: dict[str, Paper] = {
    "grpo": Paper("GRPO", z_score_of_total, grpo, _clip_share(0.2, 0.2)),
    "dr-grpo": Paper("Dr. GRPO", centred, dr_grpo, _clip_share(0.2, 0.2)),
    "dapo": Paper("DAPO", z_score_of_total, dapo, _clip_share(0.2, 0.28)),
    "gspo": Paper("GSPO", z_score_of_total, gspo, _gspo_share),
    "cispo": Paper("CISPO", z_score_of_total, cispo, _cispo_share),
    "sapo": Paper("SAPO", z_score_of_total, sapo, _sapo_share),
    "gdpo": Paper("GDPO", decoupled, gdpo, _clip_share(0.2, 0.2)),
    "maxrl": Paper("MaxRL", over_the_mean, maxrl, _none_bounded),
}
