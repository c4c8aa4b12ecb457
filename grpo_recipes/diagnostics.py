"""What looks wrong in a run, from its own files: `diagnose(Run.read(folder))`.

Each check looks for one disease and says what it found in a sentence with the figure and the step, or nothing. A check
stays silent where the run did not log what it needs. The thresholds are rules of thumb; each stands beside its check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from grpo_recipes.runs import AFTER, BEFORE, Run, RunReward, Series


@dataclass(frozen=True)
class Finding:
    """One thing that looks wrong: the check that found it, the optimiser step it shows at, and a sentence."""

    check: str
    step: int
    sentence: str


def diagnose(run: Run) -> list[Finding]:
    """Every finding on a run, in the order of `CHECKS`; empty for a healthy one."""
    return [finding for check in (*CHECKS, unscorable_golds) if (finding := check(run)) is not None]


def describe(findings: list[Finding]) -> str:
    """The findings as lines of text."""
    if not findings:
        return "diagnosis: nothing looks wrong"
    return "\n".join(["diagnosis:", *(f"  - {finding.sentence}" for finding in findings)])


def format_without_correctness(run: Run) -> Finding | None:
    """Format pay rises while correctness does not: the policy may be learning a layout instead of the task.

    Where no reward is known to pay correctness, any may that is not known to pay for format or shape.
    """
    parts = list(run.parts())
    rising = [(reward, means) for reward, means in parts if reward.pays_format and means.trend > 0]
    others = [(reward, means) for reward, means in parts if not reward.pays_format]
    unknown = [(reward, means) for reward, means in others if not reward.pays_shape]
    judges = [(reward, means) for reward, means in others if reward.pays_correctness] or unknown or others
    if not rising or any(means.trend > 0 for _, means in judges):
        return None
    if not any(reward.pays_correctness for reward, _ in judges) and _strict_rises(run):
        return None
    reward, means = rising[0]
    step = _last_step(means)
    sentence = f"`{reward.name}` rises from {means.start:.2f} to {means.end:.2f} by step {step}, while "
    if not judges:
        return Finding(
            "format_without_correctness",
            step,
            sentence + "no reward pays a correct answer: the format can be earned without solving anything",
        )
    measured = [(judge, flat) for judge, flat in judges if flat.has_trend]
    if not measured:
        return None
    judge, flat = measured[0]
    return Finding(
        "format_without_correctness", step, sentence + f"`{judge.name}` goes from {flat.start:.2f} to {flat.end:.2f}"
    )


def length_into_cap(run: Run) -> Finding | None:
    """Completions grow by a quarter or more, to beyond 80 % of `max_completion_length`."""
    lengths, cap = run.series("completions/mean_length"), run.max_completion_length
    if cap is None or lengths.trend <= 0 or lengths.end < 1.25 * lengths.start or lengths.end < 0.8 * cap:
        return None
    step = _first_step(lengths, lambda value: value >= 0.8 * cap)
    return Finding(
        "length_into_cap",
        step,
        f"completions grow from {lengths.start:.0f} to {lengths.end:.0f} tokens, into the cap of {cap} "
        f"(`max_completion_length`) from step {step}",
    )


def truncated(run: Run) -> Finding | None:
    """More than a quarter of the completions, at the end of the run, are cut off at the cap."""
    share = run.series("completions/clipped_ratio")
    if not len(share) or share.end <= 0.25:
        return None
    step = _last_step(share)
    return Finding(
        "truncated",
        step,
        f"{share.end:.0%} of the completions are cut off at `max_completion_length` by step {step}: their answers are lost; "
        "raise it, or set `mask_truncated_completions: true`",
    )


def identical_completions(run: Run) -> Finding | None:
    """Of the groups that could still earn more, more than half hold one text `num_generations` times."""
    groups = _groups(run)
    open_groups = groups[groups["reward"] < run.completions["total"].max() - 1e-6] if len(groups) else groups
    if len(open_groups) < 4 or open_groups["identical"].mean() <= 0.5:
        return None
    step = int(open_groups.loc[open_groups["identical"], "step"].min())
    return Finding(
        "identical_completions",
        step,
        f"{open_groups['identical'].mean():.0%} of the groups that don't earn the best reward repeat one completion "
        f"throughout, from step {step}: there is nothing to compare; raise `temperature`",
    )


def entropy_collapse(run: Run) -> Finding | None:
    """The policy's entropy falls below a tenth of what it was."""
    entropy = run.series("entropy")
    if entropy.trend >= 0 or entropy.end >= 0.1 * entropy.start:
        return None
    step = _first_step(entropy, lambda value: value < 0.1 * entropy.start)
    return Finding(
        "entropy_collapse",
        step,
        f"entropy falls from {entropy.start:.3f} to {entropy.end:.3f} nats a token, below a tenth from step {step}: the policy "
        "has stopped exploring",
    )


def zero_variance(run: Run) -> Finding | None:
    """Over the run, more than half of the groups have one reward for all completions, and so no gradient."""
    share = run.series("frac_reward_zero_std")
    if not len(share) or share.mean <= 0.5:
        return None
    step = _first_step(share, lambda value: value > 0.5)
    return Finding(
        "zero_variance",
        step,
        f"{share.mean:.0%} of the groups have no variance in their rewards, more than half first at step {step}"
        f"{_easy_or_hard(run)}",
    )


def kl_blow_up(run: Run) -> Finding | None:
    """The KL to the reference exceeds 1 nat a token."""
    kl = run.series("kl")
    if not len(kl) or max(kl.values) <= 1:
        return None
    step = _first_step(kl, lambda value: value > 1)
    return Finding(
        "kl_blow_up",
        step,
        f"KL to the reference reaches {max(kl.values):.1f} nats a token, above 1 from step {step}: lower `learning_rate` "
        "or raise `beta`",
    )


def dominant_reward(run: Run) -> Finding | None:
    """A format or shaping reward carries more than 95 % of the variance of the weighted rewards.

    Silent without `run.json`, which holds the weights.
    """
    if not run.knows_weights:
        return None
    variances = {reward: _weighted_variance(run, reward) for reward in run.rewards}
    total = sum(variances.values())
    if len(variances) < 2 or not total > 0:
        return None
    reward, variance = max(variances.items(), key=lambda item: item[1])
    if not (reward.pays_format or reward.pays_shape) or variance <= 0.95 * total:
        return None
    step = _last_step(run.series(f"rewards/{reward.name}/std"))
    return Finding(
        "dominant_reward",
        step,
        f"`{reward.name}` carries {variance / total:.0%} of the rewards' variance up to step {step}: the others hardly steer; "
        "lower its `weight`",
    )


def overfitting(run: Run) -> Finding | None:
    """The training reward rises while the held-out reward, or the strict accuracy before and after, falls."""
    trained, held_out = run.series("reward"), run.series("eval_reward")
    if trained.trend <= 0:
        return None
    sentence = f"the training reward rises from {trained.start:.2f} to {trained.end:.2f}, while "
    if held_out.trend < 0:
        best = held_out.steps[held_out.values.index(max(held_out.values))]
        return Finding(
            "overfitting",
            _last_step(held_out),
            f"{sentence}the held-out reward falls from {held_out.start:.2f} to {held_out.end:.2f} by step "
            f"{_last_step(held_out)}; it was best at step {best}",
        )
    strict = [run.evaluations[label]["strict"] for label in (BEFORE, AFTER) if label in run.evaluations]
    if len(strict) == 2 and strict[1]["high"] < strict[0]["low"]:
        return Finding(
            "overfitting",
            _last_step(trained),
            f"{sentence}strict accuracy on held-out problems falls from {strict[0]['value']:.3f} to {strict[1]['value']:.3f} by "
            f"step {_last_step(trained)}",
        )
    return None


def unscorable_golds(run: Run) -> Finding | None:
    """Golds that no correctness reward can score, as counted when the run began: no metric shows them."""
    golds = run.record.get("unscorable_golds")
    if not golds:
        return None
    rows = ", ".join(map(str, golds["rows"])) + (", …" if golds["count"] > len(golds["rows"]) else "")
    return Finding(
        "unscorable_golds",
        0,
        f"{golds['count']} of {golds['total']} golds can't be scored by a correctness reward (rows {rows} of the dataset, "
        "counted from 1): correct or remove them",
    )


CHECKS: tuple[Callable[[Run], Finding | None], ...] = (
    format_without_correctness,
    length_into_cap,
    truncated,
    identical_completions,
    entropy_collapse,
    zero_variance,
    kl_blow_up,
    dominant_reward,
    overfitting,
)


def _strict_rises(run: Run) -> bool:
    strict = [run.evaluations[label]["strict"] for label in (BEFORE, AFTER) if label in run.evaluations]
    return len(strict) == 2 and strict[1]["low"] > strict[0]["high"]


def _groups(run: Run) -> pd.DataFrame:
    """One row for each logged group: its step, mean reward, whether its completions are one text, and its reward's spread."""
    grouped = run.completions.groupby(["step", "prompt"], sort=False)
    table = grouped.agg(
        reward=("total", "mean"),
        spread=("total", lambda totals: totals.max() - totals.min()),
        texts=("completion", "nunique"),
        size=("completion", "size"),
    ).reset_index()
    table["identical"] = (table["texts"] == 1) & (table["size"] > 1)
    return table


def _easy_or_hard(run: Run) -> str:
    """How the groups without variance divide, by their reward against the middle of what the run ever paid."""
    groups, totals = _groups(run), run.completions["total"]
    flat = groups[groups["spread"] < 1e-9] if len(groups) else groups
    if not len(flat) or totals.max() - totals.min() < 1e-9:
        return ""
    easy = (flat["reward"] > (totals.max() + totals.min()) / 2).mean()
    return f": of those logged, {easy:.0%} are too easy (all earn much) and {1 - easy:.0%} too hard (all earn little)"


def _weighted_variance(run: Run, reward: RunReward) -> float:
    spread = run.series(f"rewards/{reward.name}/std")
    return reward.weight**2 * sum(value**2 for value in spread.values) / max(1, len(spread))


def _first_step(series: Series, is_reached: Callable[[float], bool]) -> int:
    return next(step for step, value in zip(series.steps, series.values, strict=True) if is_reached(value))


def _last_step(series: Series) -> int:
    return series.steps[-1] if len(series) else 0
