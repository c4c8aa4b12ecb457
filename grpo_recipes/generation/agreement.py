"""Comparison of two computations of the same log-probabilities, with the table of all tolerances.

Fast ways are compared with stock ways before they are used (`verified.py`). Every generator is compared with the policy
during training (`generator_check.py`), where the difference must also be explained:

With d the differences generator - policy of some tokens, and e the differences hypothesis - policy on the same tokens,
the hypothesis explains the share 1 - sum((d - e)^2) / sum(d^2). The share is 1 if the hypothesis generated the tokens.
It is below 0 if the policy did, because the noise of the dtypes does not follow e.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ByPrecision:
    """Limit for computations in float32, and limit where at least one side computes in bfloat16 or float16."""

    float32: float
    sixteen_bit: float

    def of(self, is_float32: bool) -> float:
        """Return the limit for one precision."""
        return self.float32 if is_float32 else self.sixteen_bit


# ---- Tolerances, each with the benchmark or the test that its value rests on

LOG_PROBS = ByPrecision(float32=1e-4, sixteen_bit=5e-2)
"""Largest difference of a log-probability in float32, and mean difference in 16 bits.

In 16 bits the largest difference does not measure correctness: over thousands of tokens, two correct kernels differ by
more than this on some. Evidence: float32 rounding reaches 1e-5 and weights of another model 0.1 to 6 (docs/vllm.md).
In bfloat16 two correct layouts differ by more than 1e-4 and less than 0.1 on any token (`test_packed_attention.py`).
1,100 healthy steps stay below both limits, and every planted fault exceeds them (`test_generator_check.py`).
"""
GRADIENTS = ByPrecision(float32=1e-2, sixteen_bit=0.2)
"""Difference of a gradient: relative to its tensor's largest entry in float32, to the norm of all tensors in 16 bits.

Evidence: a wrong attention mask gives 0.1 to 5 (`test_layout_check.py`, `tests/tools/models.py` on all architectures).
"""
REPEATED = 1e-5
"""Largest difference in float32 between two runs of the same rows. A model that differs by more draws random numbers.

Evidence: a router jitter of 3e-5 is found, and no model without random numbers is (`test_layout_check.py`).
"""
ATTENTION = 0.05
"""Largest difference between two kernels of attention in 16 bits, relative to the largest entry.

Evidence: 16-bit rounding stays below 0.02, and a wrong mask or a wrong key-value head is above 0.3 (`test_varlen.py`).
"""
MIN_TOKENS = 64
"""Number of tokens of a rank that 16-bit log-probabilities are judged on: on fewer, a few rounding outliers decide.

Evidence: noise on 64 tokens is never attributed to a hypothesis (`test_rows.py`, 1,000 draws).
"""
EXPLAINED = 0.5
"""Share of the difference that a hypothesis must explain to be named. Evidence: the same 1,000 draws of noise."""
TIE = 0.01
"""Largest distance between the shares of two hypotheses that are named together.

Evidence: after one update, a new adapter one step ago equals no adapter (planted faults of `test_generator_check.py`).
"""
BEYOND_BASELINE = ByPrecision(float32=20.0, sixteen_bit=5.0)
"""Multiple of the baseline difference above which the run is stopped without any explanation.

Evidence: engines that are one update late exceed it, 1,100 healthy steps do not (`test_generator_check.py`).
"""
CEILING = 0.5
"""Mean difference above which the run is stopped with any baseline. No dtype explains it.

Evidence: see `BEYOND_BASELINE`. Healthy bfloat16 engines stay below a tenth of it.
"""
BFLOAT16_FACTOR = 3.0
"""Multiple of the difference that bfloat16 makes to the policy, up to which an engine's dtype explains a difference.

Evidence: healthy bfloat16 engines under a float32 policy (`test_generator_check.py`).
"""

# ---- Hypotheses: what else may have generated the tokens

OFF, TWICE, EARLIER = "off", "twice", "earlier"
OTHER_WEIGHTS = {
    OFF: "the model with its adapter switched off",
    TWICE: "the model with its adapter applied twice",
    EARLIER: "the model with its adapter as it was a step ago",
}
"""Hypotheses of other weights, with their names in messages. If one of them holds, the policy did not generate."""
UNPROCESSED, UNPADDED, NO_AUTOCAST = "unprocessed", "unpadded", "no autocast"
OTHER_COMPUTATIONS = {UNPROCESSED, UNPADDED, NO_AUTOCAST}
"""Hypotheses of another computation with the policy's weights. If one of them holds, the policy did generate."""
BFLOAT16, UNEXPLAINED = "bfloat16", "unexplained"
EXCUSES = {
    UNPROCESSED: "the generator's log-probabilities are those before its filters",
    UNPADDED: "the policy's log-probabilities depend on padding: the loss, which pads prompts as TRL does, does not "
    "score tokens as they were sampled",
    NO_AUTOCAST: "tokens are sampled from the policy without autocast, and the loss computes it with autocast "
    "(`bf16: false` or `fp16: false` makes them alike)",
    BFLOAT16: "the generator computes in 16 bits and the policy in 32",
    UNEXPLAINED: "generator and policy differ by more than their dtypes explain, and no hypothesis that can be "
    "computed here explains it",
}
"""Causes that do not stop a run, with the beginning of their announcement."""


def disagreement(mean: float, largest: float, *, is_float32: bool, where: str) -> str:
    """Return by how much log-probabilities differ on the tokens of `where`, as a phrase, or "" within the tolerance."""
    value = largest if is_float32 else mean
    limit = LOG_PROBS.of(is_float32)
    # A comparison with NaN is False, so a difference that is not a number counts as a disagreement.
    return "" if value <= limit else f"by {value:.1e} on {where}, {limit:.0e} allowed"


@torch.no_grad()
def differences(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    log_probs: Sequence[Tensor] | Tensor,
    temperature: float,
) -> Tensor:
    """Compare recorded log-probabilities with a forward of the model on each row alone, without padding.

    Args:
        model: the model that should have generated.
        prompts: token IDs of each row's prompt.
        completions: token IDs of each row's completion.
        log_probs: recorded log-probabilities (T,) of each row, T at least its completion.
        temperature: divisor of the logits.

    Returns:
        Absolute differences of all rows, one after the other, (tokens,).
    """
    gaps = []
    for prompt, completion, recorded in zip(prompts, completions, log_probs, strict=True):
        ids = torch.tensor([*prompt, *completion], device=recorded.device)
        keep = len(completion) + 1
        # A cache would reproduce a mistake that the generator's own cache has made.
        logits = model(input_ids=ids[None], use_cache=False, logits_to_keep=keep).logits[0, -keep:-1].float()
        expected = (logits / temperature).log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
        gaps.append((recorded[: len(completion)] - expected).abs())
    return torch.cat(gaps)


def gradient_disagreement(got: Sequence[Tensor | None], expected: Sequence[Tensor | None], *, is_float32: bool) -> str:
    """Return by how much two gradients differ, as a phrase, or "" within the tolerance.

    Gradients need a rule of their own: their scale differs from tensor to tensor, so the difference is relative.

    Args:
        got: gradient of each parameter, None where the result does not depend on the parameter.
        expected: the same of the other computation.
        is_float32: True if both were computed in float32.
    """
    pairs = []
    for one, other in zip(got, expected, strict=True):
        # A parameter that is not used has the gradient None, or zeros if another layout multiplies it by zero.
        like = one if one is not None else other
        if like is not None:
            pairs.append((_or_zeros(one, like), _or_zeros(other, like)))
    if not pairs:
        return ""
    if not all(one.isfinite().all() and other.isfinite().all() for one, other in pairs):
        return "gradients that are not finite"
    value = _largest_relative_entry(pairs) if is_float32 else _relative_norm(pairs)
    limit = GRADIENTS.of(is_float32)
    return "" if value <= limit else f"gradients by {value:.1e} of their size on a few short rows, {limit:.0e} allowed"


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    """Return a gradient in float32, or zeros of the same shape if there is none."""
    return torch.zeros_like(like, dtype=torch.float32) if gradient is None else gradient.float()


def _largest_relative_entry(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the largest difference of an entry, relative to the largest entry of its tensor in the second gradient."""
    sizes = [float(expected.abs().max()) if expected.numel() else 0.0 for _, expected in pairs]
    # A gradient that is zero but for rounding would differ by its own size: it is compared with the largest of all.
    floor = max(1e-3 * max(sizes), 1e-30)
    worst = 0.0
    for (got, expected), size in zip(pairs, sizes, strict=True):
        if got.numel():
            worst = max(worst, float((got - expected).abs().max()) / max(size, floor))
    return worst


def _relative_norm(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the norm of the difference over all tensors, relative to the norm of the second gradient."""
    # Over all tensors: 16-bit rounding can move the gradient of a single small tensor by its own size.
    difference = math.sqrt(sum(float((got - expected).square().sum()) for got, expected in pairs))
    size = math.sqrt(sum(float(expected.square().sum()) for _, expected in pairs))
    return difference / max(size, 1e-30)


@dataclass(frozen=True)
class Fit:
    """Sums over the tokens of one rank for one hypothesis, with d and e as in the module's docstring."""

    residual: float
    """Sum of (d - e)^2."""
    total: float
    """Sum of |e|."""


@dataclass(frozen=True)
class Evidence:
    """Sums over the tokens of one rank of the differences d, generator - policy, and the fits of hypotheses."""

    tokens: int
    """Number of tokens."""
    total: float
    """Sum of |d|."""
    largest: float
    """Largest |d|."""
    square: float
    """Sum of d^2."""
    fits: Mapping[str, Fit] = field(default_factory=dict)

    @classmethod
    def of(cls, gaps: Tensor, moved: Mapping[str, Tensor]) -> Evidence:
        """Return the sums of the differences d, (tokens,), and of each hypothesis' differences e, (tokens,)."""
        fits = {}
        for name, other in moved.items():
            fits[name] = Fit((gaps - other).square().sum().item(), other.abs().sum().item())
        largest = gaps.abs().max().item() if len(gaps) else 0.0
        return cls(len(gaps), gaps.abs().sum().item(), largest, gaps.square().sum().item(), fits)

    @property
    def mean(self) -> float:
        """Mean of |d|."""
        return self.total / max(self.tokens, 1)  # a rank may have no comparable token

    def differs(self, is_float32: bool) -> bool:
        """Return True if the difference exceeds the tolerance of its precision."""
        return bool(disagreement(self.mean, self.largest, is_float32=is_float32, where=""))

    def share(self, name: str) -> float:
        """Return the share of the difference that a hypothesis explains, at most 1."""
        return 1 - self.fits[name].residual / self.square if self.square else -math.inf

    def __add__(self, other: Evidence) -> Evidence:
        """Return the evidence of both sets of tokens. A hypothesis that one of them lacks is dropped."""
        fits = {}
        for name, fit in self.fits.items():
            if name in other.fits:
                fits[name] = Fit(fit.residual + other.fits[name].residual, fit.total + other.fits[name].total)
        largest = max(self.largest, other.largest)
        return Evidence(self.tokens + other.tokens, self.total + other.total, largest, self.square + other.square, fits)


@dataclass(frozen=True)
class Conclusion:
    """Conclusion from the evidence of one rank."""

    is_wrong: bool = False
    """True if the generator is not the policy, by more than the dtypes explain."""
    names: tuple[str, ...] = ()
    """Hypotheses that explain the difference, several if they are alike."""
    explained: float = 0.0
    """Share of the difference that the best of `names` explains."""


def conclude(evidence: Evidence, *, is_float32: bool, baseline: float | None) -> Conclusion:
    """Decide whether the policy generated the tokens of one rank.

    Args:
        evidence: sums over the tokens of the rank.
        is_float32: True if generator and policy both compute in float32.
        baseline: mean difference of the earlier batches, None before the first.
    """
    if not evidence.differs(is_float32):
        return Conclusion()
    shares = {name: evidence.share(name) for name in evidence.fits if name != BFLOAT16}
    if shares.get(NO_AUTOCAST, 0.0) >= EXPLAINED:
        # This hypothesis comes before all others: they may fit by what autocast rounds away. The caller scores without
        # autocast from now on, and judges the others then.
        return Conclusion(False, (NO_AUTOCAST,), shares[NO_AUTOCAST])
    best = max(shares.values(), default=-math.inf)
    if best >= EXPLAINED:
        names = tuple(name for name, share in shares.items() if share >= best - TIE)
        # If another computation of the same weights explains as much as other weights, the weights are the policy's.
        computations = tuple(name for name in names if name in OTHER_COMPUTATIONS)
        return Conclusion(not computations, computations or names, best)
    # By size and not by fit: an engine's rounding errors are not those of autocast, token by token. A model that
    # bfloat16 moves beyond the ceiling is not an excuse.
    bfloat16 = evidence.fits.get(BFLOAT16)
    if bfloat16 is not None and evidence.mean <= CEILING and evidence.total <= BFLOAT16_FACTOR * bfloat16.total:
        return Conclusion(False, (BFLOAT16,))
    # Nothing explains the difference. Weights of an earlier step are known by the jump from the baseline.
    limit = CEILING
    if baseline is not None:
        limit = min(CEILING, max(LOG_PROBS.of(is_float32), BEYOND_BASELINE.of(is_float32) * baseline))
    # A comparison with NaN is False, so a difference that is not a number is beyond every limit.
    return Conclusion(False, (UNEXPLAINED,)) if evidence.mean <= limit else Conclusion(True)
