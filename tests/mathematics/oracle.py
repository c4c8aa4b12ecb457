"""Independent copy of the mathematics of GRPO training, which the tests compare TRL with.

It is written from the papers, one completion at a time and without padding, so it cannot repeat a mistake in a mask, a
broadcast or a normalizer of the batched code. Nothing is imported from TRL. Everything runs in the dtype of the given
model. The tests use float64.

Sources, by the tags used below, with the papers' equation numbers:
    GRPO    DeepSeekMath, arXiv 2402.03300: objective (3), KL estimate (4), group advantage (section 4.1.2)
    k1-k3   J. Schulman, "Approximating KL divergence", 2020
    DSv3.2  DeepSeek-V3.2, arXiv 2512.02556: unbiased KL estimate, off-policy sequence mask
    DAPO    arXiv 2503.14476: objective (8), clip-higher, token-level policy gradient loss
    BNPO    the token mean over the micro-batch at hand, as TRL's `bnpo` documents it
    DrGRPO  "Understanding R1-Zero-like training", arXiv 2503.20783: no std, constant length normalizer
    GSPO    arXiv 2507.18071: the sequence-level ratio s_i
    CISPO   MiniMax-M1, arXiv 2506.13585: objective (4), clipped weight (5)
    SAPO    "Soft adaptive policy optimization", arXiv 2511.20347: the soft gate f
    VESPO   arXiv 2602.10693: the gamma weight phi
    LUSPO   "Length-unbiased sequence policy optimization", arXiv 2602.05261
    INTEL2  INTELLECT-2, arXiv 2505.07291: two-sided clipping, `delta`
    80/20   "Beyond the 80/20 rule", arXiv 2506.01939: policy gradient on high-entropy tokens only
    GDPO    arXiv 2601.05242: each reward normalised on its own, then summed, then normalised over the batch
    TIS     F. Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025
    Switch  Switch Transformers, arXiv 2101.03961: auxiliary loss (4), f (5), P (6)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")
CLIPPED_LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


@dataclass(frozen=True)
class Objective:
    """Settings of the loss, with the names of TRL's `GRPOConfig`."""

    loss_type: str = "dapo"
    importance_sampling_level: str = "token"
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    temperature: float = 1.0
    max_completion_length: int = 8
    top_entropy_quantile: float = 1.0
    entropy_coef: float = 0.0
    off_policy_mask_threshold: float | None = None
    sapo_temperature_neg: float = 1.05
    sapo_temperature_pos: float = 1.0
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    @property
    def upper(self) -> float:
        """Upper clip width: `epsilon_high`, or `epsilon` if it is not given."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


@dataclass(frozen=True)
class Geometry:
    """Division of a generation batch: micro-batches per optimizer step and per generation, iterations, processes."""

    accumulation: int = 1
    steps_per_generation: int = 1
    iterations: int = 1
    ranks: int = 1

    @property
    def needs_old_log_probs(self) -> bool:
        """True if the policy moves while a generation batch is in use.

        A generation batch serves `steps_per_generation * iterations` micro-batches in a row. The policy moves after
        every `accumulation` micro-batches. No move falls inside a batch exactly if complete batches fit between moves.
        """
        return self.accumulation % (self.steps_per_generation * self.iterations) != 0


@dataclass
class Completion:
    """One sampled completion of T tokens, without padding."""

    prompt: list[int]
    tokens: list[int]
    advantage: float
    log_probs: Tensor
    """Log-probability of each token under the policy, (T,), with a graph."""
    entropies: Tensor
    """Entropy of the distribution of each token, (T,), with a graph."""
    old: Tensor | None = None
    """Log-probabilities under the old policy, (T,), or None if the policy has not moved since generation."""
    reference: Tensor | None = None
    """Log-probabilities under the reference policy, (T,)."""
    sampler: Tensor | None = None
    """Log-probabilities that the sampling engine reported, (T,)."""
    sampler_weight: Tensor | None = None
    """Weight that corrects for the sampling engine, (T,), or (1,) for the completion."""
    full_kl: Tensor | None = None
    """KL over the full vocabulary, (T,), with a graph, in place of the estimate from the sampled tokens."""
    counted: list[bool] = field(default_factory=list)
    """True for each token in the loss: none of a masked truncated completion, none written by a tool."""

    def __post_init__(self) -> None:
        self.counted = self.counted or [True] * len(self.tokens)

    @property
    def mask(self) -> Tensor:
        """`counted` as a tensor of zeros and ones, (T,)."""
        return torch.tensor(self.counted, dtype=self.log_probs.dtype)

    @property
    def length(self) -> int:
        """Number of tokens in the loss."""
        return sum(self.counted)

    @property
    def log_ratio(self) -> Tensor:
        """Return log(policy / old policy) of each token, (T,). On-policy its value is 0 and its gradient is not."""
        return self.log_probs - (self.log_probs.detach() if self.old is None else self.old)


def until_end(tokens: Sequence[int], eos: Sequence[int]) -> list[int]:
    """Return the tokens up to and including the first end-of-sequence token, or all tokens if there is none."""
    kept = []
    for token in tokens:
        kept.append(int(token))
        if kept[-1] in eos:
            break
    return kept


def token_statistics(
    model: torch.nn.Module, prompt: Sequence[int], tokens: Sequence[int], temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each completion token and the entropy of its distribution, both (T,).

    The distribution is softmax(logits / temperature), from which the token was sampled (GRPO: pi(o_t | q, o_<t)).
    """
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(input_ids=ids).logits[0] / temperature
    log_probs, entropies = [], []
    for t, token in enumerate(tokens):
        row = logits[len(prompt) + t - 1]
        distribution = row - torch.logsumexp(row, dim=0)
        log_probs.append(distribution[token])
        entropies.append(-(distribution.exp() * distribution).sum())
    return torch.stack(log_probs), torch.stack(entropies)


def load_balancing_loss(router_logits: Sequence[Tensor], top_k: int) -> Tensor:
    """Return E * sum over experts of (share of choices) * (mean probability) (Switch, generalized to `top_k` experts).

    Args:
        router_logits: one (tokens, E) tensor per layer, for prompt and completion tokens without padding. Shares and
            means are taken over the tokens of all layers together.
        top_k: number of experts chosen per token.
    """
    logits = torch.cat(list(router_logits))
    probabilities = torch.softmax(logits, dim=-1)
    chosen = torch.zeros_like(probabilities)
    for row, experts in zip(chosen, probabilities.topk(top_k, dim=-1).indices, strict=True):
        row[experts] = 1.0
    return logits.shape[1] * (chosen.mean(0) * probabilities.mean(0)).sum()


def kl_k1(log_prob: Tensor, reference: Tensor) -> Tensor:
    """Return k1 = log(p / q) at a token sampled from p: unbiased for KL(p || q), of either sign."""
    return log_prob - reference


def kl_k2(log_prob: Tensor, reference: Tensor) -> Tensor:
    """Return k2 = (log(p / q))^2 / 2: biased, never negative."""
    return (log_prob - reference) ** 2 / 2


def kl_k3(log_prob: Tensor, reference: Tensor) -> Tensor:
    """Return k3 = q / p - log(q / p) - 1 at a token sampled from p (GRPO, equation 4): unbiased, never negative."""
    ratio = torch.exp(reference - log_prob)
    return ratio - torch.log(ratio) - 1


def full_kl(policy_logits: Tensor, reference_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return KL(policy || reference) = sum over v of p(v) log(p(v) / q(v)), (...), of logits (..., V)."""
    p = torch.log_softmax(policy_logits / temperature, dim=-1)
    q = torch.log_softmax(reference_logits / temperature, dim=-1)
    return (p.exp() * (p - q)).sum(-1)


def completion_kl(
    policy: torch.nn.Module,
    reference: torch.nn.Module,
    prompt: Sequence[int],
    tokens: Sequence[int],
    temperature: float,
) -> Tensor:
    """Return KL(policy || reference) at each completion token, (T,), from the logits of both models."""
    ids = torch.tensor([[*prompt, *tokens]])
    ours, theirs = (model(input_ids=ids).logits[0, len(prompt) - 1 : -1] for model in (policy, reference))
    return full_kl(ours, theirs.detach(), temperature)


def importance_ratio(row: Completion, level: str) -> Tensor:
    """Return policy / old policy, (T,): per token (GRPO), or the geometric mean over the completion (GSPO's s_i)."""
    if level == "token":
        return torch.exp(row.log_ratio)
    mean = (row.log_ratio * row.mask).sum() / max(row.length, 1)
    return torch.exp(mean).expand(len(row.tokens))


def clipped_loss(ratio: Tensor, advantage: float, objective: Objective) -> Tensor:
    """Return -min(min(ratio, delta) A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A) (GRPO 3, DAPO 8, INTEL2)."""
    bounded = ratio if objective.delta is None else torch.minimum(ratio, torch.full_like(ratio, objective.delta))
    inside = ratio.clamp(1 - objective.epsilon, 1 + objective.upper)
    return -torch.minimum(bounded * advantage, inside * advantage)


def cispo_loss(ratio: Tensor, advantage: float, log_probs: Tensor, objective: Objective) -> Tensor:
    """Return -sg(min(ratio, epsilon_high)) A log p (CISPO 4 and 5). `epsilon_high` is the bound itself, not 1 + it."""
    weight = torch.minimum(ratio, torch.full_like(ratio, objective.upper)).detach()
    return -weight * advantage * log_probs


def sapo_loss(ratio: Tensor, advantage: float, objective: Objective) -> Tensor:
    """Return -(4 / tau) sigmoid(tau (ratio - 1)) A, where tau depends on the sign of A (SAPO's f)."""
    tau = objective.sapo_temperature_pos if advantage > 0 else objective.sapo_temperature_neg
    return -(4 / tau) / (1 + torch.exp(-tau * (ratio - 1))) * advantage


def vespo_weight(row: Completion, objective: Objective) -> float:
    """Return phi(w) = w^k exp(lambda (1 - w)) for the ratio w = prod(policy / sampler), a constant (VESPO)."""
    log_w = (row.log_ratio.detach().clamp(-20, 20) * row.mask).sum().item()
    if row.sampler_weight is not None:
        log_w += sum(min(max(math.log(w), math.log(1e-8)), 20.0) if w > 0 else math.log(1e-8)
                     for w in row.sampler_weight.tolist())  # fmt: skip
    w = math.exp(min(max(log_w, math.log(1e-8)), 20.0))
    positive = row.advantage >= 0
    k = objective.vespo_k_pos if positive else objective.vespo_k_neg
    lam = objective.vespo_lambda_pos if positive else objective.vespo_lambda_neg
    return w**k * math.exp(lam * (1 - w))


def policy_loss(row: Completion, objective: Objective) -> Tensor:
    """Return the policy term of each token, (T,), before masks and the KL term."""
    ratio = importance_ratio(row, objective.importance_sampling_level)
    if objective.loss_type in CLIPPED_LOSS_TYPES:
        return clipped_loss(ratio, row.advantage, objective)
    if objective.loss_type == "cispo":
        return cispo_loss(ratio, row.advantage, row.log_probs, objective)
    if objective.loss_type == "sapo":
        return sapo_loss(ratio, row.advantage, objective)
    return -vespo_weight(row, objective) * row.advantage * row.log_probs


def kl_term(row: Completion, objective: Objective) -> Tensor:
    """Return k3 of each token, (T,), times the importance ratio if it is bias-corrected (DSv3.2)."""
    assert row.reference is not None
    kl = kl_k3(row.log_probs, row.reference)
    if objective.use_bias_correction_kl:
        kl = kl * importance_ratio(row, objective.importance_sampling_level)
    return kl


def is_kept_off_policy(row: Completion, threshold: float) -> bool:
    """Return False for a completion with A < 0 and mean log(sampling policy / policy) above the threshold (DSv3.2)."""
    if row.advantage >= 0:
        return True
    sampling = row.sampler if row.sampler is not None else row.old
    log_ratio = torch.zeros_like(row.log_probs) if sampling is None else sampling - row.log_probs.detach()
    log_ratio = torch.where(torch.isnan(log_ratio), torch.zeros_like(log_ratio), log_ratio)
    return ((log_ratio * row.mask).sum() / max(row.length, 1)).item() <= threshold


def entropy_threshold(rows: Sequence[Completion], quantile: float) -> float:
    """Return the entropy that the top `quantile` share of counted tokens reaches, linearly interpolated (80/20)."""
    values = sorted(
        float(entropy)
        for row in rows
        for entropy, counted in zip(row.entropies.detach(), row.counted, strict=True)
        if counted
    )
    position = (1 - quantile) * (len(values) - 1)
    low = math.floor(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (position - low) * (values[high] - values[low])


def token_losses(row: Completion, objective: Objective, threshold: float | None = None) -> Tensor:
    """Return the loss of each token, (T,): the masked and reweighted policy term, plus beta times the KL term.

    The off-policy mask, the entropy mask and the sampler's weight act only on the policy term.
    """
    loss = policy_loss(row, objective)
    if objective.off_policy_mask_threshold is not None:
        loss = loss * float(is_kept_off_policy(row, objective.off_policy_mask_threshold))
    if threshold is not None:
        loss = loss * (row.entropies.detach() >= threshold)
    if row.sampler_weight is not None and objective.loss_type != "vespo":
        loss = loss * row.sampler_weight
    if objective.beta != 0.0:
        loss = loss + objective.beta * (kl_term(row, objective) if row.full_kl is None else row.full_kl)
    return loss * row.mask


def sampler_weight(
    old: Tensor, sampler: Tensor, mode: str, low: float | None, high: float | None, counted: Sequence[bool]
) -> Tensor:
    """Return old policy / sampling engine, (T,) per token or (1,) per completion (TIS).

    A weight outside [low, high] is truncated to the bound or, in the mask modes, set to 0. A token without a
    log-probability of the sampler, which is NaN, gets no correction.
    """
    difference = torch.nan_to_num((old - sampler) * torch.tensor(counted, dtype=old.dtype), nan=0.0)
    if mode.startswith("sequence"):
        difference = difference.sum(dim=0, keepdim=True)
    floor, ceiling = (-math.inf if low is None else low), (math.inf if high is None else high)
    weights = []
    for value in difference.exp().tolist():
        outside = not floor <= value <= ceiling
        weights.append(min(max(value, floor), ceiling) if mode.endswith("truncate") else 0.0 if outside else value)
    return torch.tensor(weights, dtype=old.dtype)


def micro_batch_loss(
    rows: Sequence[Completion],
    objective: Objective,
    geometry: Geometry,
    generation_tokens: int,
    beside: Sequence[Completion] = (),
) -> Tensor:
    """Return one rank's loss of one micro-batch. Summed over micro-batches and averaged over ranks it is the step's.

    - grpo, sapo: mean over completions of the mean over tokens (GRPO 3)
    - luspo: mean over completions of the sum over tokens
    - dr_grpo: sum over tokens / (completions * max_completion_length)
    - bnpo: mean over the tokens of this micro-batch on this rank
    - dapo, cispo, vespo: sum over tokens / the tokens of an optimizer step on all ranks (DAPO 8), counted over the
      generation batch (`generation_tokens`, all ranks) and scaled to a step's share of it. DDP averages over ranks, so
      each rank's sum counts `ranks` times.

    The entropy threshold also needs `beside`, the rows that the other ranks hold at the same time.
    """
    threshold = None
    if objective.top_entropy_quantile < 1.0:
        threshold = entropy_threshold([*rows, *beside], objective.top_entropy_quantile)
    sums = [token_losses(row, objective, threshold).sum() for row in rows]
    if objective.loss_type in ("grpo", "sapo"):
        loss = sum(s / max(row.length, 1) for s, row in zip(sums, rows, strict=True)) / len(rows)
    elif objective.loss_type == "luspo":
        loss = sum(sums) / len(rows)
    elif objective.loss_type == "dr_grpo":
        loss = sum(sums) / (len(rows) * objective.max_completion_length)
    elif objective.loss_type == "bnpo":
        loss = sum(sums) / max(sum(row.length for row in rows), 1)
    else:
        tokens_per_micro_batch = generation_tokens / geometry.steps_per_generation
        loss = geometry.ranks * sum(sums) / tokens_per_micro_batch
    loss = loss / geometry.accumulation
    if objective.entropy_coef:
        loss = loss - objective.entropy_coef * entropy_bonus(rows, threshold) / geometry.accumulation
    return loss


def entropy_bonus(rows: Sequence[Completion], threshold: float | None) -> Tensor:
    """Return the mean entropy over the tokens of a micro-batch that the policy term acts on."""
    kept = [
        entropy
        for row in rows
        for entropy, counted in zip(row.entropies, row.counted, strict=True)
        if counted and (threshold is None or entropy.item() >= threshold)
    ]
    return torch.stack(kept).mean() if kept else rows[0].entropies.sum() * 0


def loss_metrics(
    rows: Sequence[Completion], objective: Objective, by_rank: Sequence[Sequence[Completion]] | None = None
) -> dict[str, float]:
    """Return the metrics that one micro-batch logs, over the rows of all ranks.

    `kl` and `entropy` are means over tokens. A clip ratio is the share of tokens (of completions at sequence level)
    whose gradient the clip removes: below 1 - epsilon with A < 0, above 1 + epsilon_high with A > 0.
    """
    metrics = {"entropy": _token_mean(rows, [row.entropies for row in rows])}
    if all(row.full_kl is not None for row in rows):
        metrics["kl/full"] = _token_mean(rows, [row.full_kl for row in rows])  # type: ignore[misc]
    if objective.beta != 0.0:
        metrics["kl"] = _token_mean(rows, [kl_term(row, objective) for row in rows])
    if objective.loss_type in CLIPPED_LOSS_TYPES:
        low = [_clipped(row, objective, -1) for row in rows]
        high = [_clipped(row, objective, +1) for row in rows]
        mean = _sequence_share if objective.importance_sampling_level == "sequence" else _token_mean
        metrics["clip_ratio/low_mean"] = mean(rows, low)
        metrics["clip_ratio/high_mean"] = mean(rows, high)
        metrics["clip_ratio/region_mean"] = mean(rows, [a + b for a, b in zip(low, high, strict=True)])
        metrics["clip_ratio/low_min"] = min(_row_means(rows, low))
        metrics["clip_ratio/high_max"] = max(_row_means(rows, high))
    if objective.loss_type == "vespo":
        metrics["vespo/phi_seq_mean"] = sum(vespo_weight(row, objective) for row in rows) / len(rows)
    return metrics


def _clipped(row: Completion, objective: Objective, side: int) -> Tensor:
    ratio = importance_ratio(row, objective.importance_sampling_level).detach()
    if side < 0:
        return ((ratio < 1 - objective.epsilon) & torch.tensor(row.advantage < 0)).to(ratio.dtype)
    return ((ratio > 1 + objective.upper) & torch.tensor(row.advantage > 0)).to(ratio.dtype)


def _token_mean(rows: Sequence[Completion], values: Sequence[Tensor]) -> float:
    total = sum((value.detach() * row.mask).sum().item() for row, value in zip(rows, values, strict=True))
    return total / max(sum(row.length for row in rows), 1)


def _sequence_share(rows: Sequence[Completion], values: Sequence[Tensor]) -> float:
    return sum(value[0].item() for value in values) / len(rows)


def _row_means(rows: Sequence[Completion], values: Sequence[Tensor]) -> list[float]:
    return [(v * r.mask).sum().item() / r.length for r, v in zip(rows, values, strict=True) if r.length]


Reward = float | None
EPSILON = 1e-4


def _known(values: Sequence[Reward]) -> list[float]:
    return [v for v in values if v is not None and not math.isnan(v)]


def _mean(values: Sequence[Reward]) -> float:
    known = _known(values)
    return math.fsum(known) / len(known) if known else math.nan


def _std(values: Sequence[Reward]) -> float:
    """Return the sample standard deviation (n - 1), or NaN for fewer than two values."""
    known = _known(values)
    if len(known) < 2:
        return math.nan
    mean = _mean(known)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in known) / (len(known) - 1))


def _groups(values: Sequence[Reward], size: int) -> list[list[Reward]]:
    return [list(values[i : i + size]) for i in range(0, len(values), size)]


def _z_scores(values: Sequence[Reward], spread: float) -> list[Reward]:
    mean = _mean(values)
    return [None if not _known([v]) else (v - mean) / (spread + EPSILON) for v in values]  # type: ignore[operator]


def weighted_rewards(rewards: Sequence[Sequence[Reward]], weights: Sequence[float]) -> list[Reward]:
    """Return the weighted sum of each completion's known rewards, or None if all are unknown."""
    totals: list[Reward] = []
    for row in rewards:
        known = [(w, r) for w, r in zip(weights, row, strict=True) if _known([r])]
        totals.append(math.fsum(w * r for w, r in known) if known else None)  # type: ignore[operator]
    return totals


def advantages(
    rewards: Sequence[Sequence[Reward]],
    weights: Sequence[float],
    num_generations: int,
    scale_rewards: str = "group",
    aggregation: str = "sum_then_normalize",
) -> list[float]:
    """Return the advantage of each completion: A = (r - mean of its group) / (std + 1e-4) (GRPO, section 4.1.2).

    The standard deviation is that of the group or of the batch, or is not used ("none", DrGRPO), by `scale_rewards`.
    `normalize_then_sum` (GDPO) takes the z-score of each reward within its group, the weighted sum, and the z-score of
    the sum over the batch. A completion without any reward is excluded from every mean and gets 0.

    Args:
        rewards: (N, number of rewards), completions of a prompt next to each other, None where unknown.
        weights: weight of each reward.
        num_generations: completions per prompt.
        scale_rewards: TRL's key.
        aggregation: TRL's `multi_objective_aggregation`.
    """
    totals = _totals(rewards, weights, num_generations, aggregation)
    if aggregation == "normalize_then_sum":
        result = _z_scores(totals, _std(totals))
    else:
        result = []
        for group in _groups(totals, num_generations):
            spread = {"group": _std(group), "batch": _std(totals), "none": 1 - EPSILON}[scale_rewards]
            result += _z_scores(group, spread)
    return [0.0 if a is None or math.isnan(a) else a for a in result]


def _totals(
    rewards: Sequence[Sequence[Reward]], weights: Sequence[float], num_generations: int, aggregation: str
) -> list[Reward]:
    """Return the weighted sum of the rewards of each completion, or (GDPO) of their z-scores within the group."""
    if aggregation == "sum_then_normalize":
        return weighted_rewards(rewards, weights)
    columns = []
    for column in zip(*rewards, strict=True):
        columns.append([z for group in _groups(column, num_generations) for z in _z_scores(group, _std(group))])
    totals = weighted_rewards(list(zip(*columns, strict=True)), weights)
    # A reward that is known for one completion of a group has no z-score. The completion still counts as scored.
    return [(total or 0.0) if _known(row) else None for total, row in zip(totals, rewards, strict=True)]


def reward_metrics(
    rewards: Sequence[Sequence[Reward]],
    weights: Sequence[float],
    num_generations: int,
    scale_rewards: str = "group",
    aggregation: str = "sum_then_normalize",
) -> dict[str, float]:
    """Return `reward`, `reward_std` over the batch, and `frac_reward_zero_std`, the share with zero spread."""
    totals = weighted_rewards(rewards, weights)
    if aggregation == "normalize_then_sum":
        spreads = [_std(_totals(rewards, weights, num_generations, aggregation))]
    elif scale_rewards == "batch":
        spreads = [_std(totals)]
    else:
        spreads = [_std(group) for group in _groups(totals, num_generations)]
    return {
        "reward": _mean(totals),
        "reward_std": _std(totals),
        "frac_reward_zero_std": sum(abs(spread) <= 1e-8 for spread in spreads) / len(spreads),
    }


def column_metrics(values: Sequence[Reward]) -> dict[str, float]:
    """Return the logged mean and sample standard deviation of one reward, over the completions that it scored."""
    return {"mean": _mean(values), "std": _std(values)}
