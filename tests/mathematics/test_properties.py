"""Expectations of the estimators, by summing over every completion that a small policy can produce.

The policy is a table of logits, one row per prefix, over five tokens of which the last ends a completion. The reference
is another table. Expectations are sums over all completions, weighted by their probability, without sampling.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.mathematics import oracle
from tests.mathematics.conftest import SummaryLines
from tests.mathematics.oracle import Completion, Geometry, Objective

VOCABULARY = 5
END = 4
EXACT = 1e-10

pytestmark = pytest.mark.slow  # the oracle alone


class Table:
    """Policy over completions of at most `length` tokens: logits of shape (number of prefixes, 5)."""

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        prefixes = itertools.chain.from_iterable(itertools.product(range(END), repeat=n) for n in range(length))
        self.rows = {prefix: index for index, prefix in enumerate(prefixes)}
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(len(self.rows), VOCABULARY, generator=generator, dtype=torch.float64)
        self.logits = logits.requires_grad_()

    def distribution(self, prefix: tuple[int, ...]) -> Tensor:
        """Return the log-probabilities of the next token, (5,)."""
        return torch.log_softmax(self.logits[self.rows[prefix]], dim=-1)

    def completions(self) -> Iterator[tuple[int, ...]]:
        """Yield every completion, which ends with END or at the length limit."""
        for length in range(1, self.length + 1):
            for head in itertools.product(range(END), repeat=length - 1):
                last = range(VOCABULARY) if length == self.length else (END,)
                yield from ((*head, token) for token in last)

    def log_probs(self, completion: tuple[int, ...]) -> Tensor:
        """Return the log-probability of each token of a completion, (T,)."""
        return torch.stack([self.distribution(completion[:t])[token] for t, token in enumerate(completion)])

    def probability(self, completion: tuple[int, ...]) -> Tensor:
        """Return the probability of a completion."""
        return self.log_probs(completion).sum().exp()

    def gradient(self, value: Tensor) -> Tensor:
        """Return the gradient of a scalar with respect to the logits."""
        return torch.autograd.grad(value, self.logits)[0]


def kl_of_sequences(p: Table, q: Table) -> Tensor:
    """Return KL(p || q) between the two distributions over completions, from its definition."""
    return sum(p.probability(c) * (p.log_probs(c).sum() - q.log_probs(c).sum()) for c in p.completions())


def as_row(p: Table, q: Table, completion: tuple[int, ...], advantage: float = 0.0) -> Completion:
    """Return an on-policy completion in the form of the oracle's loss."""
    log_probs = p.log_probs(completion)
    row = Completion([], list(completion), advantage, log_probs, torch.zeros_like(log_probs))
    row.reference = q.log_probs(completion).detach()
    return row


def expected_gradient(p: Table, q: Table, objective: Objective) -> Tensor:
    """Return the expectation over on-policy completions of the gradient of the summed KL term."""
    return p.gradient(
        sum(p.probability(c).detach() * oracle.kl_term(as_row(p, q, c), objective).sum() for c in p.completions())
    )


PLAIN = Objective(beta=1.0, use_bias_correction_kl=False)
CORRECTED = Objective(beta=1.0, use_bias_correction_kl=True)


def test_the_table_is_a_distribution() -> None:
    p = Table(3, seed=0)
    assert sum(p.probability(c) for c in p.completions()).item() == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize("seed", range(5))
def test_k1_and_k3_are_unbiased_and_k3_is_never_negative(seed: int) -> None:
    p, q = Table(3, seed), Table(3, seed + 100)
    kl = kl_of_sequences(p, q).item()
    for estimator in (oracle.kl_k1, oracle.kl_k3):
        expected = sum(
            p.probability(c) * estimator(p.log_probs(c), q.log_probs(c)).sum() for c in p.completions()
        ).item()
        assert expected == pytest.approx(kl, abs=EXACT)
    assert min(oracle.kl_k3(p.log_probs(c), q.log_probs(c)).min().item() for c in p.completions()) >= 0
    assert min(oracle.kl_k1(p.log_probs(c), q.log_probs(c)).min().item() for c in p.completions()) < 0


@pytest.mark.parametrize("seed", range(5))
def test_k2_is_biased(seed: int) -> None:
    p, q = Table(3, seed), Table(3, seed + 100)
    expected = sum(p.probability(c) * oracle.kl_k2(p.log_probs(c), q.log_probs(c)).sum() for c in p.completions())
    assert abs(expected.item() - kl_of_sequences(p, q).item()) > 1e-3


@pytest.mark.parametrize("seed", range(5))
def test_the_full_kl_is_the_expectation_of_k3_at_each_position(seed: int) -> None:
    p, q = Table(1, seed), Table(1, seed + 100)
    expected = sum(p.probability(c) * oracle.kl_k3(p.log_probs(c), q.log_probs(c)).sum() for c in p.completions())
    assert oracle.full_kl(p.logits[0], q.logits[0]).item() == pytest.approx(expected.item(), abs=EXACT)


@pytest.mark.parametrize("seed", range(5))
def test_one_token_gradients(seed: int) -> None:
    p, q = Table(1, seed), Table(1, seed + 100)
    forward, backward = p.gradient(kl_of_sequences(p, q)), p.gradient(kl_of_sequences(q, p))
    assert torch.allclose(expected_gradient(p, q, CORRECTED), forward, rtol=0, atol=EXACT)
    assert torch.allclose(expected_gradient(p, q, PLAIN), backward, rtol=0, atol=EXACT)
    assert (forward - backward).abs().max() > 1e-2


@pytest.mark.parametrize("seed", range(5))
def test_two_token_gradient(seed: int, summary: SummaryLines) -> None:
    """The corrected estimator ignores that an early token changes the later KL terms."""
    p, q = Table(2, seed), Table(2, seed + 100)
    per_token = sum(
        math.exp(sum(p.log_probs(prefix).tolist()) if prefix else 0.0)
        * oracle.full_kl(p.logits[p.rows[prefix]], q.logits[q.rows[prefix]].detach())
        for prefix in p.rows
    )
    corrected = expected_gradient(p, q, CORRECTED)
    held_constant = p.gradient(per_token)
    assert (corrected - held_constant).abs().max() <= EXACT
    full = sum(
        p.probability(c).detach()
        * sum(oracle.full_kl(p.logits[p.rows[c[:t]]], q.logits[q.rows[c[:t]]].detach()) for t in range(len(c)))
        for c in p.completions()
    )
    assert (p.gradient(full) - held_constant).abs().max() <= EXACT
    of_sequences = p.gradient(kl_of_sequences(p, q))
    gap = ((corrected - of_sequences).abs().max() / of_sequences.abs().max()).item()
    summary(
        f"two tokens, seed {seed}: corrected KL gradient is off the sequence KL's by {gap:.0%} of its largest entry"
    )
    assert gap > 1e-3


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("seed", range(3))
def test_the_on_policy_gradient_is_the_score_function_gradient(seed: int, level: str) -> None:
    p, q = Table(3, seed), Table(3, seed + 100)
    rewards = {c: math.sin(1.0 + sum((t + 2) * token for t, token in enumerate(c))) for c in p.completions()}
    expected_reward = sum(p.probability(c) * rewards[c] for c in p.completions())
    objective = Objective("dr_grpo", level, beta=0.0, max_completion_length=1)
    loss = sum(
        p.probability(c).detach() * oracle.micro_batch_loss([as_row(p, q, c, rewards[c])], objective, Geometry(), 1)
        for c in p.completions()
    )
    assert torch.allclose(p.gradient(loss), -p.gradient(expected_reward), rtol=0, atol=EXACT)


@pytest.mark.parametrize("seed", range(3))
def test_the_group_mean_scales_the_gradient_by_one_minus_one_over_the_group(seed: int) -> None:
    """A completion is part of its own baseline, so with groups of 2 half the policy gradient is left."""
    p, q = Table(2, seed), Table(2, seed + 100)
    rewards = {c: math.cos(sum((t + 1) * token for t, token in enumerate(c))) for c in p.completions()}
    objective = Objective("dr_grpo", beta=0.0, max_completion_length=1)
    losses = []
    for pair in itertools.product(p.completions(), repeat=2):
        values = oracle.advantages([[rewards[c]] for c in pair], [1.0], 2, "none")
        rows = [as_row(p, q, c, a) for c, a in zip(pair, values, strict=True)]
        weight = (p.probability(pair[0]) * p.probability(pair[1])).detach()
        losses.append(weight * oracle.micro_batch_loss(rows, objective, Geometry(), 1))
    expected_reward = sum(p.probability(c) * rewards[c] for c in p.completions())
    assert torch.allclose(p.gradient(sum(losses)), -0.5 * p.gradient(expected_reward), rtol=0, atol=EXACT)


def test_group_relative_advantages_sum_to_zero_for_every_reward_pattern() -> None:
    for rewards in itertools.product([0.0, 0.5, 1.0, None], repeat=4):
        for scale in ("group", "batch", "none"):
            values = oracle.advantages([[reward] for reward in rewards], [1.0], 4, scale)
            assert sum(values) == pytest.approx(0.0, abs=1e-12)
            if len({r for r in rewards if r is not None}) <= 1:
                assert values == [0.0] * 4
