"""Checks of the optimizer's updates and of the importance ratios that they are weighted by: see `diagnostics.py`."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

from grpo_recipes.reports.checking import DoesNotApply, Finding, NoData, cost, cost_after, logged, too_few
from grpo_recipes.reports.run import Run, Series

KL_LIMIT = 1.0
"""Largest KL to the reference, in nats per token, as a running median of five points."""
UPDATES_LIMIT = 0.6
"""Smallest share of changed weights among those that would change if no update were lost."""
CLIPPED_LIMIT = 0.2
"""Largest share of tokens that the loss clips, in the whole run or at its end.

Implementations of PPO see 0.1 to 0.2 with the usual epsilon of 0.2.
"""
CLIPPED_SEQUENCES_LIMIT = 0.5
"""The same with `importance_sampling_level: sequence`: GSPO clips 15 % of all tokens by design (arXiv:2507.18071)."""
SPIKE = 10.0
"""Multiple of the median gradient norm from which on a norm is a spike."""
SPIKE_DEVIATIONS = 6.0
"""Robust standard deviations of the logarithms by which a spike exceeds the median as well.

The norms of healthy runs may spread over factors of 10 too. Then their logarithms have a large deviation.
"""
SPIKE_POINTS = 12
"""Smallest number of gradient norms among which spikes are looked for."""
SETTLING = 0.1
"""Share of the run at its start whose gradient norms are no spikes: the first updates of a new policy may be large."""
LARGEST_EXPONENT = 700.0
"""Logarithm of about the largest float."""
NOT_FINITE_POINTS = 3
"""Number of last gradient norms that all are NaN or infinite in a run whose weights are lost."""
SAMPLE_SIZE_LIMIT = 0.8
"""Smallest effective sample size of a pass over a generation, as a share of its tokens.

The logarithms of the importance weights then have a standard deviation of 0.47. Clipping at an epsilon of 0.2 begins at
0.18, and engines in bfloat16 have 0.01 to 0.1.
"""


def kl_blow_up(run: Run) -> Finding | str:
    """Look for a KL to the reference that stays above 1 nat per token, as a median of five points."""
    if run.config.get("beta") == 0 and not len(run.series("kl")):
        raise DoesNotApply("`beta` is 0, so that no KL is computed")
    # The sampled KL has a heavy tail: one token can make the mean of a batch exceed any limit.
    kl = logged(run, "kl").smoothed
    if max(kl.values) <= KL_LIMIT:
        return f"KL to the reference is at most {max(kl.values):.2g} nats per token (limit {KL_LIMIT:g})"
    step = kl.first_step(lambda value: value > KL_LIMIT)
    return Finding(step, KL_LIMIT, {"highest": max(kl.values), **cost_after(run, step)}).saying(
        "KL to the reference reaches {highest:.1f} nats per token, above {threshold:g} from step {step}: {lost:.0%} of "
        "the run's {unit} come after step {since}; lower `learning_rate` or raise `beta`"
    )


def lost_updates(run: Run) -> Finding | str:
    """Look for updates lost to rounding: after 20 steps, fewer than 60 % of the expected weights change.

    In simulations with weights of N(0, 0.02) and learning rates from 1e-6 to 2e-5, plain AdamW on bfloat16 changes 20
    to 50 % of them. Weights that keep the rounded-off part change 80 % and more. In the first steps they have kept
    little.
    """
    shares = logged(run, "updates/changed")
    if not len(run.series("updates/expected")):
        raise DoesNotApply("`updates/expected` is logged only for optimizers with the moments of AdamW")
    changed, expected = shares.after(20), run.series("updates/expected").after(20)
    if not len(changed) or not len(expected):
        raise NoData("the run has no more than 20 steps")
    found = Finding(changed.last_step, UPDATES_LIMIT, {"changed": changed.mean, "expected": expected.mean})
    words = (
        "a step changes {changed:.1%} of the trained weights up to step {step}, where {expected:.1%} would change if "
        "no update were lost to rounding"
    )
    if changed.mean >= UPDATES_LIMIT * expected.mean:
        return found.saying(words).sentence
    wasted = {**found.figures, "wasted": 1 - changed.mean / expected.mean}
    return replace(found, figures=wasted).saying(
        f"{words}, so that {{wasted:.0%}} of the changes are wasted: set `dtype: float32` or `optim: adamw_bf16` "
        "(docs/precision.md)"
    )


def clipped_tokens(run: Run) -> Finding | str:
    """Look for more than 20 % of the tokens clipped by the loss, in the whole run or at its end (GSPO: 50 %)."""
    clipped = max(run.series("clip_ratio/region_mean"), run.series("cispo_clip_ratio"), key=len)
    if not len(clipped):
        if run.config.get("loss_type") in ("sapo", "vespo"):
            raise DoesNotApply(f"the loss `{run.config['loss_type']}` clips no tokens")
        raise NoData("`clip_ratio/region_mean` was not logged")
    if not clipped.has_trend:
        raise too_few("clip_ratio/region_mean")
    limit = clipped_limit(run)
    # At the end alone a rise counts that the mean of the run hides.
    place, share = ("of the run", clipped.mean) if clipped.mean > limit else ("at the end of the run", clipped.end)
    if share <= limit:
        return f"the loss clips {share:.0%} of the tokens {place} (limit {limit:.0%})"
    step = clipped.first_step(lambda value: value > limit)
    by_pass = {number: shares.end for number, shares in passes(run, "clip_share").items()}
    advice = (
        "the tokens are stale: lower `learning_rate`, `num_iterations` or `steps_per_generation`, or raise `epsilon` "
        "and `epsilon_high`"
    )
    if by_pass.get(1, 0.0) > limit / 2:
        advice = (
            "pass 1 comes before any update, so that sampling or the log-probabilities of the loss differ from the "
            "policy that generated (docs/generation-check.md)"
        )
    return Finding(step, limit, {"share": share, "passes": by_pass, **cost(run, clipped)}).saying(
        f"the loss clips {{share:.0%}} of the tokens {place}, more than {{threshold:.0%}} first at step {{step}}"
        f"{_by_pass(by_pass)}: {{lost:.0%}} of the run's {{unit}} have no gradient; {advice}"
    )


def clipped_limit(run: Run) -> float:
    """Return the largest share of clipped tokens for the run's level of importance sampling."""
    is_sequence = run.config.get("importance_sampling_level") == "sequence"
    return CLIPPED_SEQUENCES_LIMIT if is_sequence else CLIPPED_LIMIT


def gradient_spikes(run: Run) -> Finding | str:
    """Look for gradient norms of 10 times the median and more, or norms that are NaN or infinite until the end.

    A spike must also lie six robust standard deviations above the median of the logarithms. The first tenth of the run,
    and steps in which every group has zero variance, do not count.
    """
    last_finite = run.series("grad_norm").last_step
    lost = [step for step in run.log.not_finite.get("grad_norm", ()) if step > last_finite]
    if len(lost) >= NOT_FINITE_POINTS:  # float16 skips single ones
        return Finding(lost[0], NOT_FINITE_POINTS, {"count": len(lost), **cost_after(run, lost[0] - 1)}).saying(
            "the gradient norm is NaN or infinite from step {step} to the end: {lost:.0%} of the run's {unit} come "
            "after step {since} and train nothing; resume from an earlier checkpoint with a lower `learning_rate`, or "
            "with `dtype: float32`"
        )
    norms = logged(run, "grad_norm")
    flat_groups = run.series("frac_reward_zero_std")
    flat = {step for step, share in zip(flat_groups.steps, flat_groups.values, strict=True) if share >= 1}
    points = [(at, norm) for at, norm in zip(norms.steps, norms.values, strict=True) if norm > 0 and at not in flat]
    if len(points) < SPIKE_POINTS:
        raise too_few("grad_norm", str(SPIKE_POINTS))
    logarithms = [math.log(norm) for _, norm in points]
    middle = median(logarithms)
    # 1.4826 times the median deviation is the standard deviation of a normal distribution.
    deviation = 1.4826 * median(abs(value - middle) for value in logarithms)
    limit = middle + max(math.log(SPIKE), SPIKE_DEVIATIONS * deviation)
    settled = SETTLING * run.log.last_step
    spikes = [(at, norm) for at, norm in points if math.log(norm) >= limit and at > settled]
    usual, spike = median(norm for _, norm in points), math.exp(min(limit, LARGEST_EXPONENT))
    if not spikes:
        largest = max(norm for _, norm in points)
        return f"the gradient norm has a median of {usual:.2g} and is at most {largest:.2g} (a spike has {spike:.2g})"
    at_largest, largest = max(spikes, key=lambda spike: spike[1])
    shares = Series(norms.steps, [float(at in dict(spikes)) for at in norms.steps])
    figures = {"median": usual, "spikes": len(spikes), "norms": len(points), "largest": largest, "at": at_largest}
    return Finding(spikes[0][0], spike, {**figures, **cost(run, shares)}).saying(
        "the gradient norm has a median of {median:.2g}, and {spikes} of {norms} norms are spikes, the largest "
        "{largest:.2g} at step {at}: {lost:.0%} of the run's {unit} are in updates that few rows decide; look at the "
        "completions of these steps, and lower `learning_rate` or `max_grad_norm`"
    )


def stale_tokens(run: Run) -> Finding | str:
    """Look for a pass over a generation whose effective sample size is below 80 % of its tokens."""
    stale, mismatched = passes(run, "effective_sample_size"), passes(run, "effective_sample_size_with_mismatch").get(1)
    if not stale:
        if _is_one_pass(run):
            raise DoesNotApply("each generation is trained on in one pass")
        raise NoData("`passes/1/effective_sample_size` was not logged")
    if not all(size.has_trend for size in stale.values()):
        raise too_few(f"passes/{max(stale)}/effective_sample_size")
    number, worst = min(stale.items(), key=lambda item: item[1].end)
    found = "the effective sample size is {size:.0%} of the tokens in pass {number} at the end of the run"
    mismatch = 1.0 if mismatched is None else mismatched.end
    if min(worst.end, mismatch) >= SAMPLE_SIZE_LIMIT:
        found = found.format(size=worst.end, number=number)
        if mismatched is not None:
            found += f", and {mismatch:.0%} in pass 1 with the generator's log-probabilities"
        return f"{found} (limit {SAMPLE_SIZE_LIMIT:.0%})"
    if mismatched is not None and mismatch <= worst.end:
        worst, number = mismatched, 1
        advice = "see docs/generation-check.md, and compute generator and policy in one dtype"
        found = (
            "with the generator's log-probabilities the effective sample size is {size:.0%} of the tokens already in "
            "pass {number}, before any update: the generator is not the policy"
        )
    else:
        mismatched, advice = None, "lower `learning_rate`, `num_iterations` or `steps_per_generation`"
        found += f"{_by_pass({number: size.end for number, size in stale.items()})}: the tokens are stale"
    step = worst.first_step(lambda value: value < SAMPLE_SIZE_LIMIT)
    figures = {"size": worst.end, "number": number, "is_mismatch": mismatched is not None}
    wasted = cost(run, Series(worst.steps, [1 - value for value in worst.values]))
    return Finding(step, SAMPLE_SIZE_LIMIT, {**figures, **wasted}).saying(
        f"{found}. It is below {{threshold:.0%}} first at step {{step}}, which wastes {{lost:.0%}} of the run's "
        f"{{unit}}; {advice}"
    )


def _is_one_pass(run: Run) -> bool:
    """Return True if the run's configuration is known to train on each generation within one optimizer step."""
    accumulation, iterations = run.config.get("gradient_accumulation_steps"), run.config.get("num_iterations")
    if not accumulation or not iterations or run.config.get("generation_batch_size"):
        return False
    micro_batches = run.config.get("steps_per_generation") or accumulation  # TRL's default
    return bool(accumulation % (micro_batches * iterations) == 0)


def passes(run: Run, name: str) -> dict[int, Series]:
    """Return a metric of every pass, by the number of the pass."""
    found = {}
    for key in run.logged("passes/"):
        _, number, *rest = key.split("/")
        # No run has a million passes, and Python refuses to read thousands of digits.
        if rest == [name] and number.isdecimal() and len(number) < 7 and len(series := run.series(key)):
            found[int(number)] = series
    return dict(sorted(found.items()))


def _by_pass(values: dict[int, float]) -> str:
    """Return a clause with the value of each pass, or "" if there is one pass at most."""
    if len(values) < 2:
        return ""
    return " (" + ", ".join(f"pass {number}: {value:.0%}" for number, value in values.items()) + ")"
