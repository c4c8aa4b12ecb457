"""Checks of a run's progress: reward, held-out reward, entropy and lengths. See `diagnostics.py`."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_recipes.evaluation.estimates import Estimate
from grpo_recipes.reports import checking
from grpo_recipes.reports.checking import DoesNotApply, Finding, NoData
from grpo_recipes.reports.run import Run, Series

TRUNCATED_LIMIT = 0.25
"""Largest share of truncated completions."""
HELD_OUT_LIMIT = 0.25
"""Smallest change of the held-out reward as a share of the training reward's rise in the same steps."""
ACCURACY_GAIN = 0.05
"""Gain in strict accuracy below which the accuracy is flat. Both intervals must exclude it."""
LENGTH_LIMIT = 0.8
"""Largest mean length as a share of `max_completion_length`."""
GROWTH_LIMIT = 1.25
"""Factor from the first to the last quarter of the run from which on completions count as growing."""
GAIN_LIMIT = 0.1
"""Rise of the reward as a share of its highest value below which it does not rise. The noise must exclude more."""
PLATEAU_NEAR_BEST = 0.8
"""Share of the highest pay from which on a reward that does not rise is not a plateau."""
SOLVED_LIMIT = 0.5
"""Share of zero-variance groups in the last quarter of the run from which on they explain a plateau."""
PLATEAU_SHARE = 0.5
"""Share of the run at its end in which a reward on a plateau does not rise."""
LATE_RISE_LIMIT = 0.2
"""Share of the whole rise in the second half of the run from which on a slow rise is not a plateau."""
PLATEAU_POINTS = 16
"""Smallest number of logged rewards in which a plateau is looked for."""
PLATEAU_STEPS = 30
"""Smallest number of optimizer steps after which a reward may be on a plateau."""
ENTROPY_LIMIT = 0.1
"""Smallest entropy as a share of the entropy at the start."""


def plateau(run: Run) -> Finding | str:
    """Look for a reward that does not rise in the second half of the run, below 80 % of its highest value.

    The reward must be known well enough to exclude a rise of 10 % of its highest value. Neither another reward nor a
    held-out one may rise in the same steps, and no more than half of the groups may be without variance at the end.
    """
    reward = checking.logged(run, "reward")
    if len(reward) < PLATEAU_POINTS:
        raise checking.too_few("reward", str(PLATEAU_POINTS))
    if run.log.last_step < PLATEAU_STEPS:
        raise NoData(f"the run has fewer than {PLATEAU_STEPS} steps")
    late = reward.after(reward.steps[int(len(reward) * (1 - PLATEAU_SHARE)) - 1])
    change = f"in the second half of the run the reward goes {late.change()}"
    if better := _better(run, late.steps[0] - 1):
        return f"in the second half of the run {better}"
    if checking.is_near_best(run, PLATEAU_NEAR_BEST):
        return f"{change}, and has little room to rise"
    # If the highest pay is unknown, the best of the logged completions may be it: NaN, if none was logged.
    if checking.highest_total(run.rewards) is None and reward.end >= PLATEAU_NEAR_BEST * run.rows["total"].max() > 0:
        return f"{change}, which is near the best that any logged completion earned"
    if run.series("frac_reward_zero_std").end >= SOLVED_LIMIT:
        return f"{change}, because most groups have no variance"
    if run.recipe.get("sampling"):
        raise NoData(checking.MOVING_PROMPTS)
    is_slow_rise = reward.trend > 0 and late.end - late.start >= LATE_RISE_LIMIT * (reward.end - reward.start)
    if is_slow_rise or not _excludes_gain(run, late):
        return f"{change}, which may be a rise within its noise"
    step = _plateau_begins(reward, late)
    return Finding(step, GAIN_LIMIT, {**late.ends, **checking.cost_after(run, step)}).saying(
        "the reward has not risen since step {step}, and goes from {start:.2f} to {end:.2f} in the second half of the "
        "run: {lost:.0%} of the run's {unit} come after step {since}; end the run there, or change what may limit it "
        "(the prompts' difficulty, `learning_rate`, `beta`)"
    )


def _plateau_begins(reward: Series, late: Series) -> int:
    """Return the first step from which on the mean of as many points as a quarter of `late` is that of the plateau."""
    level, size = late.mean - late.margin, late.quarter
    for place, step in enumerate(reward.steps):
        window = reward.values[place : place + size]
        if sum(window) / len(window) >= level:
            return min(step, late.steps[0])
    return late.steps[0]


def overfitting(run: Run) -> Finding | str:
    """Look for a training reward that rises while the held-out reward or strict accuracy falls or stays flat.

    The held-out reward is flat below a quarter of the training reward's rise, and the accuracy below 5 points.
    """
    trained, held_out = checking.trending(run, "reward"), run.series("eval_reward")
    strict = [share for _, share in run.strict_accuracy()]
    if not held_out.has_trend and len(strict) < 2:
        raise NoData("neither four evaluations during training nor one before and one after")
    if trained.trend <= 0:
        return f"the training reward does not rise: it goes {trained.change()}"
    rises, accuracy = f"the training reward rises {trained.change()}, while", "strict accuracy on held-out problems"
    figures = {"start": trained.start, "end": trained.end, "held_out_start": None, "held_out_end": None}
    if held_out.has_trend:
        figures |= {"held_out_start": held_out.start, "held_out_end": held_out.end}
    change = " to ".join(f"{share.value:.3f}" for share in strict)
    accuracies = {"accuracies": [share.value for share in strict]}
    if held_out.trend < 0:
        best = held_out.steps[held_out.values.index(max(held_out.values))]
        return Finding(held_out.last_step, None, {**figures, **checking.cost_after(run, best)}).saying(
            f"{rises} the held-out reward falls {held_out.change()} by step {{step}}: it was best at step {{since}}, "
            "and {lost:.0%} of the run's {unit} come after step {since}; use a checkpoint near it, and train on more "
            "prompts"
        )
    if len(strict) == 2 and strict[1].high < strict[0].low:
        return Finding(trained.last_step, None, {**figures, **accuracies}).saying(
            f"{rises} {accuracy} falls from {change} by step {{step}}: all of the run's tokens made it worse; train on "
            "more prompts, or with a lower `learning_rate`, and evaluate during training (`eval_strategy: steps`)"
        )
    step, flat, limit = held_out.steps[0] if held_out.has_trend else 0, "", HELD_OUT_LIMIT
    if _is_flat_reward(run, trained, held_out):
        flat = f"the held-out reward stays at {held_out.end:.2f} from step {step} on"
    elif _is_flat_accuracy(held_out, strict):
        step, flat, limit = trained.steps[0], f"{accuracy} stays flat, from {change}", ACCURACY_GAIN
    if flat:
        return Finding(step, limit, {**figures, **accuracies, **checking.cost_after(run, step)}).saying(
            f"{rises} {flat}: {{lost:.0%}} of the run's {{unit}} come after step {{since}}; train on more prompts, or "
            "end the run earlier"
        )
    if held_out.has_trend:
        return f"{rises} the held-out reward goes {held_out.change()}"
    return f"{rises} {accuracy} goes from {change}"


def _is_flat_reward(run: Run, trained: Series, held_out: Series) -> bool:
    """Return True if the held-out reward does not follow the training reward, from the first evaluation on.

    It is not flat if the evaluations are too noisy to show a rise of that size, or have no room to rise.
    """
    highest = checking.highest_total(run.rewards)
    if not held_out.has_trend or held_out.trend > 0 or (highest and held_out.end >= checking.NEAR_BEST * highest):
        return False
    since = trained.after(held_out.steps[0] - 1)
    rise = since.end - since.start
    return since.trend > 0 and held_out.margin < rise and held_out.end - held_out.start < HELD_OUT_LIMIT * rise


def _is_flat_accuracy(held_out: Series, strict: Sequence[Estimate]) -> bool:
    """Return True if the intervals of strict accuracy exclude a gain.

    A held-out reward that rises, or an accuracy that can't gain as much, is not a sign of overfitting.
    """
    if len(strict) < 2 or held_out.trend > 0:
        return False
    return strict[0].high <= 1 - ACCURACY_GAIN and strict[1].high - strict[0].low <= ACCURACY_GAIN


def entropy_collapse(run: Run) -> Finding | str:
    """Look for a policy whose entropy falls below a tenth of its start."""
    entropy = checking.trending(run, "entropy")
    change = f"{entropy.change(3)} nats per token"
    if entropy.trend >= 0 or entropy.end >= ENTROPY_LIMIT * entropy.start:
        return f"entropy goes {change}"
    if checking.is_near_best(run):
        return f"entropy goes {change}, and nearly all is solved"
    step = entropy.first_step(lambda value: value < ENTROPY_LIMIT * entropy.start)
    return Finding(step, ENTROPY_LIMIT * entropy.start, {**entropy.ends, **checking.cost_after(run, step)}).saying(
        "entropy falls from {start:.3f} to {end:.3f} nats per token, below a tenth from step {step}: the policy has "
        "stopped exploring, and {lost:.0%} of the run's {unit} come after step {since}; lower `learning_rate`, raise "
        "`temperature` or `epsilon_high`, or add a KL term (`beta`)"
    )


def length_into_cap(run: Run) -> Finding | str:
    """Look for completions that grow by a quarter or more, to beyond 80 % of `max_completion_length`."""
    lengths, cap = checking.trending(run, "completions/mean_length"), run.config.get("max_completion_length")
    if not run.config:
        raise NoData("no `run.json` holds `max_completion_length`")
    if cap is None:
        raise DoesNotApply("`max_completion_length` is not set")
    if not _grow(lengths) or lengths.end < LENGTH_LIMIT * cap:
        return f"completions go {lengths.change(0)} tokens on average, where the cap is {cap}"
    step = lengths.first_step(lambda value: value >= LENGTH_LIMIT * cap)
    return Finding(step, LENGTH_LIMIT * cap, {"cap": cap, **lengths.ends, "growth": _growth(lengths)}).saying(
        "completions grow from {start:.0f} to {end:.0f} tokens, into the cap of {cap} (`max_completion_length`) from "
        "step {step}: {growth:.0%} of the completion tokens are growth; raise the cap, or pay for short answers "
        "(`group_length`)"
    )


def length_without_gain(run: Run) -> Finding | str:
    """Look for completions that grow by a quarter or more while no reward and no accuracy rises.

    The reward must be known well enough to exclude a rise of 10 % of its highest value.
    """
    lengths, reward = checking.trending(run, "completions/mean_length"), checking.trending(run, "reward")
    grow, change = f"completions go {lengths.change(0)} tokens", f"the reward goes {reward.change()}"
    if not _grow(lengths):
        return grow
    if better := _better(run, -1):
        return f"{grow}, and {better}"
    if run.recipe.get("sampling"):
        raise NoData(checking.MOVING_PROMPTS)
    if not _excludes_gain(run, reward):
        return f"{grow}, and {change}, which may be noise"
    step = lengths.first_step(lambda value: value >= GROWTH_LIMIT * lengths.start)
    figures = {**lengths.ends, "growth": _growth(lengths), "reward_start": reward.start, "reward_end": reward.end}
    return Finding(step, GROWTH_LIMIT, figures).saying(
        "completions grow from {start:.0f} to {end:.0f} tokens, by a quarter from step {step}, while the reward goes "
        "from {reward_start:.2f} to {reward_end:.2f}: {growth:.0%} of the completion tokens are growth; pay for short "
        "answers (`group_length`), or lower `max_completion_length`"
    )


def _grow(lengths: Series) -> bool:
    """Return True if completions grow by a quarter or more."""
    return lengths.trend > 0 and lengths.end >= GROWTH_LIMIT * lengths.start


def _growth(lengths: Series) -> float:
    """Return the share of all completion tokens beyond the length at the start."""
    return sum(max(0.0, value - lengths.start) for value in lengths.values) / sum(lengths.values)


def truncated(run: Run) -> Finding | str:
    """Look for more than a quarter of the completions cut off at the cap at the end of the run."""
    share = checking.trending(run, "completions/clipped_ratio")
    if share.end <= TRUNCATED_LIMIT:
        return f"{share.end:.0%} of the completions are cut off at the end of the run (limit {TRUNCATED_LIMIT:.0%})"
    masked = "end the run earlier"
    if not run.config.get("mask_truncated_completions"):
        masked = "set `mask_truncated_completions: true`"
    # A truncated completion has as many tokens as the cap. `cost` clips shares above 1, which means over an interval
    # of logging may give.
    tokens, lengths, cap = share, run.series("completions/mean_length"), run.config.get("max_completion_length")
    if cap and lengths.steps == share.steps:
        pairs = zip(share.values, lengths.values, strict=True)
        tokens = Series(share.steps, [clipped * cap / max(length, 1.0) for clipped, length in pairs])
    return Finding(share.last_step, TRUNCATED_LIMIT, {"share": share.end, **checking.cost(run, tokens)}).saying(
        "{share:.0%} of the completions are cut off at `max_completion_length` by step {step}, and an answer behind "
        f"the cut is lost: {{lost:.0%}} of the run's {{unit}} are in such completions; raise it, or {masked}"
    )


def _excludes_gain(run: Run, reward: Series) -> bool:
    """Return True if a series of rewards excludes a rise of 10 % of the highest value."""
    highest = checking.highest_total(run.rewards) or max(abs(value) for value in reward.values)
    return reward.end - reward.start + reward.margin < GAIN_LIMIT * highest


def _better(run: Run, step: int) -> str:
    """Return a clause on a measure of the policy that rises after a step, or ""."""
    measures = [("the reward", run.series("reward")), ("the held-out reward", run.series("eval_reward"))]
    measures += [(f"`{part.name}`", means) for part, means in run.parts() if part.kind not in ("format", "length")]
    for name, series in measures:
        late = series.after(step)
        if late.trend > 0:
            return f"{name} rises {late.change()}"
    return "strict accuracy rises" if checking.strict_accuracy_rises(run) else ""
