"""Checks for what looks wrong in a run, made from its own files: `diagnose(Run.read(folder))`.

Each check looks for one problem. It reports the problem in a sentence with the figure, the step, what the problem costs
and what to change, or the figure that is fine. A check whose metrics the run did not log raises `NoData`, and a check
that means nothing for the run raises `DoesNotApply`, so that "nothing looks wrong" counts only the checks that had
data, at least half of those that apply. The thresholds are rules of thumb. The report draws the constant thresholds
into its charts.

Rewards are means of few completions, so each check of a trend asks whether the change exceeds the noise of the points
(`Series.margin`). A check for a reward that does *not* rise asks in addition whether the noise could hide a rise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd

from grpo_recipes.data.places import NAMED_ROWS
from grpo_recipes.evaluation.accuracy import judging_reward, single_specs
from grpo_recipes.reports import tool_checks, update_checks
from grpo_recipes.reports.checking import (
    MOVING_PROMPTS,
    NEAR_BEST,
    Check,
    DoesNotApply,
    Finding,
    NoData,
    cost,
    cost_after,
    highest_total,
    is_near_best,
    is_solved,
    judges_correctness,
    logged,
    too_few,
    trending,
)
from grpo_recipes.reports.run import Run, RunReward, Series
from grpo_recipes.runs.files import AFTER, BEFORE
from grpo_rewards.registry import BuiltReward, RewardSpecError, attribute_name
from grpo_rewards.reward import is_passing
from grpo_rewards.terminal import Cell, Part, Table, visible

LATEST_TEXTS = 1000
"""Number of the last logged completions that are searched for answers."""

TRUNCATED_LIMIT = 0.25
"""Largest share of truncated completions."""
IDENTICAL_LIMIT = 0.5
"""Largest share of groups that repeat one completion, among those that could earn more."""
FLAT_GROUPS_LIMIT = 0.5
"""Largest share of zero-variance groups."""
SATURATED_LIMIT = 0.8
"""Largest share of zero-variance groups in the last quarter of the run."""
HELD_OUT_LIMIT = 0.25
"""Smallest change of the held-out reward as a share of the training reward's rise in the same steps."""
ACCURACY_GAIN = 0.05
"""Gain in strict accuracy below which the accuracy is flat. Both intervals must exclude it."""
FORMAT_SHARE = 0.5
"""Share of the format's rise from which on a rise of correctness explains it."""
FORMAT_POINTS = 8
"""Smallest number of logged means of a format reward that are compared with correctness."""
LENGTH_LIMIT = 0.8
"""Largest mean length as a share of `max_completion_length`."""
GROWTH_LIMIT = 1.25
"""Factor from the first to the last quarter of the run from which on completions count as growing."""
GAIN_LIMIT = 0.1
"""Rise of the reward as a share of its highest value below which it does not rise. The noise must exclude more."""
PLATEAU_NEAR_BEST = 0.8
"""Share of the highest pay from which on a reward that does not rise is no plateau."""
SOLVED_LIMIT = 0.5
"""Share of zero-variance groups in the last quarter of the run from which on they explain a plateau."""
PLATEAU_SHARE = 0.5
"""Share of the run at its end in which a reward on a plateau does not rise."""
LATE_RISE_LIMIT = 0.2
"""Share of the whole rise in the second half of the run from which on a slow rise is no plateau."""
PLATEAU_POINTS = 16
"""Smallest number of logged rewards in which a plateau is looked for."""
PLATEAU_STEPS = 30
"""Smallest number of optimizer steps after which a reward may be on a plateau."""
ENTROPY_LIMIT = 0.1
"""Smallest entropy as a share of the entropy at the start."""
VARIANCE_LIMIT = 0.95
"""Largest share of the rewards' variance that a reward may have beside one that it must not dominate."""

PROBLEM, FINE, NOT_CHECKED, NOT_APPLICABLE = "problem", "fine", "not checked", "does not apply"
"""Results of a check, in the order in which they are listed."""


@dataclass(frozen=True)
class Diagnosis:
    """Result of all checks of a run."""

    findings: list[Finding]
    """Problems, in the order of `CHECKS`."""
    fine: dict[str, str]
    """Names of the checks that found no problem, with the figures."""
    unchecked: dict[str, str]
    """Names of the checks that could not be made, with the reasons."""
    not_applicable: dict[str, str]
    """Names of the checks that do not apply to the run, with the reasons. They are not counted."""
    reading: str = ""
    """Clause on logged completions that were not read because there are too many."""

    @property
    def applicable(self) -> int:
        """Number of checks that apply to the run."""
        return len(CHECKS) - len(self.not_applicable)

    @property
    def checked(self) -> int:
        """Number of checks that had data."""
        return self.applicable - len(self.unchecked)

    @property
    def looks_fine(self) -> bool:
        """True if at least half of the checks that apply had data and none found a problem."""
        return not self.findings and 0 < self.applicable <= 2 * self.checked

    @property
    def verdict(self) -> str:
        """Result in a few words, or "" if no check had data."""
        if self.findings:
            return f"{len(self.findings)} problem{'s' * (len(self.findings) > 1)}"
        if not self.checked:
            return ""
        return "nothing looks wrong" if self.looks_fine else "too short to judge"

    @property
    def coverage(self) -> str:
        """Clause on the checks that had data."""
        if not self.checked:
            return "nothing could be checked: the run has too few steps, or logged no metric that the checks read"
        return "; ".join(filter(None, [f"{self.checked} of {self.applicable} checks had data", self.reading]))

    @property
    def headline(self) -> str:
        """Line with the verdict and the number of checks that it rests on."""
        return f"diagnosis: {', '.join(filter(None, [self.verdict, self.coverage]))}"

    def rows(self) -> list[tuple[str, str, str]]:
        """Return result, name and text of every check: problems first, and checks that do not apply last."""
        rows = [(PROBLEM, finding.check, finding.sentence) for finding in self.findings]
        results = ((FINE, self.fine), (NOT_CHECKED, self.unchecked), (NOT_APPLICABLE, self.not_applicable))
        for result, texts in results:
            rows += [(result, name, text) for name, text in texts.items()]
        return rows


def diagnose(run: Run) -> Diagnosis:
    """Make every check on a run."""
    sampled, reading = run.completion_files, ""
    if len(sampled.kept) < sampled.count:
        reading = f"of the completions, {len(sampled.kept):,} of {sampled.count:,} steps were read, evenly spread"
    diagnosis = Diagnosis([], {}, {}, {}, reading)
    for check in CHECKS:
        run.check_time()
        name = check.__name__
        try:
            result = check(run)
        except NoData as reason:
            diagnosis.unchecked[name] = str(reason)
        except DoesNotApply as reason:
            diagnosis.not_applicable[name] = str(reason)
        else:
            if isinstance(result, str):
                diagnosis.fine[name] = result
            else:
                diagnosis.findings.append(replace(result, check=name))
    diagnosis.findings.extend(filter(None, (unscorable_golds(run), unscored(run), stopped(run))))
    return diagnosis


def as_table(diagnosis: Diagnosis) -> list[Part]:
    """Return every check for the terminal as a table below the headline."""
    styles = {PROBLEM: "bad", FINE: "good"}
    rows = []
    for result, name, text in diagnosis.rows():
        rows.append((Cell(result, styles.get(result, "dim")), name, Cell(text, "" if result == PROBLEM else "dim")))
    return [Cell(diagnosis.headline, "good" if diagnosis.looks_fine else "head"), Table(rows)]


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis for `--json`.

    Each of `findings` has `check`, `step`, `threshold`, `figures` (numbers and names, by name) and `sentence`.
    """
    counts = {"checks": len(CHECKS), "checked": diagnosis.checked}
    return {"looks_fine": diagnosis.looks_fine, "verdict": diagnosis.verdict, **counts, **asdict(diagnosis)}


def describe(diagnosis: Diagnosis) -> str:
    """Return the headline and the findings as lines of text."""
    head = diagnosis.headline
    if diagnosis.checked and diagnosis.unchecked:
        # A short run has data for few checks, and a reason for each of the others would be a paragraph.
        head += f"; `grpo-recipes diagnose` says why {len(diagnosis.unchecked)} had none"
    return "\n".join([visible(head), *(f"  - {visible(finding.sentence)}" for finding in diagnosis.findings)])


# Checks


def format_without_correctness(run: Run) -> Finding | str:
    """Look for a format reward that rises while correctness does not: the policy may be learning a layout only.

    If no reward is known to judge correctness, any reward that does not judge format or length may do so.
    """
    parts = list(run.parts())
    formats = [(reward, means) for reward, means in parts if reward.kind == "format"]
    if not any(len(means) for _, means in parts):
        raise NoData("no reward was logged")
    if not formats:
        raise DoesNotApply("no reward judges the format alone")
    long = [(reward, means) for reward, means in formats if len(means) >= FORMAT_POINTS]
    if not long:
        raise too_few(formats[0][0].name, str(FORMAT_POINTS))
    reward, means = next((one for one in long if one[1].trend > 0), long[0])
    if means.trend <= 0:
        return f"no format reward rises: `{reward.name}` goes {means.change()}"
    rises, figures = f"`{reward.name}` rises {means.change()}", {"reward": reward.name, **means.ends}
    others = [(judge, risen) for judge, risen in parts if judge.kind != "format"]
    correctness = [(judge, risen) for judge, risen in others if judge.kind == "correctness"]
    judges = correctness or [(judge, risen) for judge, risen in others if judge.kind != "length"] or others
    for judge, risen in judges:
        if risen.trend > 0:
            return f"{rises}, and so does `{judge.name}`, {risen.change()}"
    if is_solved(run):
        return f"{rises}, and correctness has little room to rise"
    if not correctness and _strict_accuracy_rises(run):
        return f"{rises}, and so does strict accuracy"
    if run.recipe.get("sampling"):
        if run.series("eval_reward").trend > 0:
            return f"{rises}, and so does the held-out reward"
        raise NoData(MOVING_PROMPTS)
    flat = "no reward pays a correct answer: the format can be earned without solving anything"
    if judges:
        known = [(judge, risen) for judge, risen in judges if risen.has_trend]
        if not known:
            raise too_few(judges[0][0].name)
        for judge, risen in known:
            # Correctness of a few completions is noisy. A rise of half the format's size does not show that it stays
            # flat, nor does one that is smaller by less than a standard error.
            if _rise(judge, risen, risen.margin / 3) >= FORMAT_SHARE * _rise(reward, means):
                return f"{rises}, and `{judge.name}` goes {risen.change()}, which may be noise"
        flat = "`{judge}` goes from {judge_start:.2f} to {judge_end:.2f}"
        figures |= {"judge": known[0][0].name, "judge_start": known[0][1].start, "judge_end": known[0][1].end}
    half = means.first_step(lambda value: value >= (means.start + means.end) / 2)
    return Finding(means.last_step, FORMAT_SHARE, {**figures, **cost_after(run, half)}).saying(
        "`{reward}` rises from {start:.2f} to {end:.2f} by step {step}, while " + flat + ": {lost:.0%} of the run's "
        "{unit} come after step {since}, where half of the format is learnt; lower its `weight`, or pay it only with a "
        "right answer (`gate`)"
    )


def _rise(reward: RunReward, means: Series, error: float = 0.0) -> float:
    """Return the change from the first to the last quarter, and an error, as a share of the reward's highest pay.

    If the highest pay is unknown, the largest mean is taken for it.
    """
    highest = reward.highest_pay or max(abs(value) for value in means.values)
    return (means.end - means.start + error) / max(highest, 1e-9)


def length_into_cap(run: Run) -> Finding | str:
    """Look for completions that grow by a quarter or more, to beyond 80 % of `max_completion_length`."""
    lengths, cap = trending(run, "completions/mean_length"), run.config.get("max_completion_length")
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
    lengths, reward = trending(run, "completions/mean_length"), trending(run, "reward")
    grow, change = f"completions go {lengths.change(0)} tokens", f"the reward goes {reward.change()}"
    if not _grow(lengths):
        return grow
    if better := _better(run, -1):
        return f"{grow}, and {better}"
    if run.recipe.get("sampling"):
        raise NoData(MOVING_PROMPTS)
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


def plateau(run: Run) -> Finding | str:
    """Look for a reward that does not rise in the second half of the run, below 80 % of its highest value.

    The reward must be known well enough to exclude a rise of 10 % of its highest value. Neither another reward nor a
    held-out one may rise in the same steps, and no more than half of the groups may be without variance at the end.
    """
    reward = logged(run, "reward")
    if len(reward) < PLATEAU_POINTS:
        raise too_few("reward", str(PLATEAU_POINTS))
    if run.log.last_step < PLATEAU_STEPS:
        raise NoData(f"the run has fewer than {PLATEAU_STEPS} steps")
    late = reward.after(reward.steps[int(len(reward) * (1 - PLATEAU_SHARE)) - 1])
    change = f"in the second half of the run the reward goes {late.change()}"
    if better := _better(run, late.steps[0] - 1):
        return f"in the second half of the run {better}"
    if is_near_best(run, PLATEAU_NEAR_BEST):
        return f"{change}, and has little room to rise"
    # If the highest pay is unknown, the best of the logged completions may be it: NaN, if none was logged.
    if highest_total(run.rewards) is None and reward.end >= PLATEAU_NEAR_BEST * run.rows["total"].max() > 0:
        return f"{change}, which is near the best that any logged completion earned"
    if run.series("frac_reward_zero_std").end >= SOLVED_LIMIT:
        return f"{change}, because most groups have no variance"
    if run.recipe.get("sampling"):
        raise NoData(MOVING_PROMPTS)
    is_slow_rise = reward.trend > 0 and late.end - late.start >= LATE_RISE_LIMIT * (reward.end - reward.start)
    if is_slow_rise or not _excludes_gain(run, late):
        return f"{change}, which may be a rise within its noise"
    step = _plateau_begins(reward, late)
    return Finding(step, GAIN_LIMIT, {**late.ends, **cost_after(run, step)}).saying(
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


def _excludes_gain(run: Run, reward: Series) -> bool:
    """Return True if a series of rewards excludes a rise of 10 % of the highest value."""
    highest = highest_total(run.rewards) or max(abs(value) for value in reward.values)
    return reward.end - reward.start + reward.margin < GAIN_LIMIT * highest


def _better(run: Run, step: int) -> str:
    """Return a clause on a measure of the policy that rises after a step, or ""."""
    measures = [("the reward", run.series("reward")), ("the held-out reward", run.series("eval_reward"))]
    measures += [(f"`{part.name}`", means) for part, means in run.parts() if part.kind not in ("format", "length")]
    for name, series in measures:
        late = series.after(step)
        if late.trend > 0:
            return f"{name} rises {late.change()}"
    return "strict accuracy rises" if _strict_accuracy_rises(run) else ""


def truncated(run: Run) -> Finding | str:
    """Look for more than a quarter of the completions cut off at the cap at the end of the run."""
    share = trending(run, "completions/clipped_ratio")
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
    return Finding(share.last_step, TRUNCATED_LIMIT, {"share": share.end, **cost(run, tokens)}).saying(
        "{share:.0%} of the completions are cut off at `max_completion_length` by step {step}, and an answer behind "
        f"the cut is lost: {{lost:.0%}} of the run's {{unit}} are in such completions; raise it, or {masked}"
    )


def identical_completions(run: Run) -> Finding | str:
    """Look for groups that repeat one text, in more than half of the groups that could still earn more."""
    groups = run.rows.groupby(["step", "prompt"], sort=False).agg(
        reward=("total", "mean"),
        texts=("completion", "nunique"),
        characters=("characters", "sum"),
        size=("completion", "size"),
    )
    scored = groups[groups["reward"].notna() & (groups["size"] > 1)].reset_index()
    if len(scored) < 4:
        raise NoData("fewer than four groups of completions were logged")
    identical = scored["texts"] == 1
    improvable = scored["reward"] < run.rows["total"].max() - 1e-6
    if improvable.sum() < 4:
        return f"{(~improvable).sum():,} of {len(scored):,} groups earn the best reward"
    share = float(identical[improvable].mean())
    if share <= IDENTICAL_LIMIT:
        repeats = f"{share:.0%} of the groups that don't earn the best reward repeat one completion"
        return f"{repeats} (limit {IDENTICAL_LIMIT:.0%})"
    step = int(scored.loc[improvable & identical, "step"].min())
    wasted = float(scored.loc[identical, "characters"].sum() / max(scored["characters"].sum(), 1))
    return Finding(step, IDENTICAL_LIMIT, {"share": share, "wasted": wasted}).saying(
        "{share:.0%} of the groups that don't earn the best reward repeat one completion throughout, from step {step}: "
        "there is nothing to compare in {wasted:.0%} of the logged text; raise `temperature`"
    )


def entropy_collapse(run: Run) -> Finding | str:
    """Look for a policy whose entropy falls below a tenth of its start."""
    entropy = trending(run, "entropy")
    change = f"{entropy.change(3)} nats per token"
    if entropy.trend >= 0 or entropy.end >= ENTROPY_LIMIT * entropy.start:
        return f"entropy goes {change}"
    if is_near_best(run):
        return f"entropy goes {change}, and nearly all is solved"
    step = entropy.first_step(lambda value: value < ENTROPY_LIMIT * entropy.start)
    return Finding(step, ENTROPY_LIMIT * entropy.start, {**entropy.ends, **cost_after(run, step)}).saying(
        "entropy falls from {start:.3f} to {end:.3f} nats per token, below a tenth from step {step}: the policy has "
        "stopped exploring, and {lost:.0%} of the run's {unit} come after step {since}; lower `learning_rate`, raise "
        "`temperature` or `epsilon_high`, or add a KL term (`beta`)"
    )


def zero_variance(run: Run) -> Finding | str:
    """Look for zero-variance groups, in more than half of the groups, or in more than 80 % at the end of the run.

    The completions of such a group all have one reward, so that their advantages are zero.
    """
    share = trending(run, "frac_reward_zero_std")
    most, place, limit = share.mean, "", FLAT_GROUPS_LIMIT
    if most <= limit and share.end <= SATURATED_LIMIT:
        return (
            f"{most:.0%} of the groups have no variance in their rewards (limit {limit:.0%}), and {share.end:.0%} at "
            f"the end of the run (limit {SATURATED_LIMIT:.0%})"
        )
    if most <= limit:
        most, place, limit = share.end, " at the end of the run", SATURATED_LIMIT
    step = share.first_step(lambda value: value > limit)
    advice = "" if run.recipe.get("sampling") else ", or fewer such prompts (`sampling: informative`)"
    easy, logged_groups = _easy(run), ""
    if easy is not None:
        logged_groups = (
            f" (of those logged, {easy:.0%} are too easy: all earn much; {1 - easy:.0%} too hard: all earn little)"
        )
    return Finding(step, limit, {"share": most, "easy": easy, **cost(run, share)}).saying(
        f"{{share:.0%}} of the groups have no variance in their rewards{place}, more than {{threshold:.0%}} first at "
        f"step {{step}}{logged_groups}: the policy gradient ignores {{lost:.0%}} of the run's {{unit}}; end the run "
        f"earlier, or use prompts of another difficulty{advice}"
    )


def dominant_reward(run: Run) -> Finding | str:
    """Look for a reward with more than 95 % of the variance of the weighted rewards that should not have it.

    A format or length reward must not dominate the others, and no reward those that judge correctness.
    """
    if not run.record.get("rewards"):
        raise NoData("no `run.json` holds the rewards' weights")
    kinds = {reward.kind for reward in run.rewards}
    if len(run.rewards) < 2 or not (kinds & {"format", "length"} or (len(kinds) > 1 and "correctness" in kinds)):
        raise DoesNotApply("no reward is beside one of another kind that it must not dominate")
    columns = []
    for reward in run.rewards:
        spread = trending(run, f"rewards/{reward.name}/std")
        columns.append(pd.Series(dict(zip(spread.steps, spread.values, strict=True))) * reward.weight)
    variances = pd.concat(columns, axis=1).fillna(0.0) ** 2
    sums = variances.sum()
    if not sums.sum() > 0:  # also if it is NaN
        return "the rewards have no variance"
    place = int(sums.idxmax())
    reward, share = run.rewards[place], float(sums[place]) / float(sums.sum())
    is_unwanted = reward.kind in ("format", "length") or (reward.kind != "correctness" and "correctness" in kinds)
    if not is_unwanted or share <= VARIANCE_LIMIT:
        return f"the largest part of the rewards' variance is {share:.0%}, that of `{reward.name}`"
    is_dominated = (variances[place] > VARIANCE_LIMIT * variances.sum(axis=1)).astype(float)
    wasted = cost(run, Series(is_dominated.index.tolist(), is_dominated.tolist()))
    advice = "lower its `weight`"
    if sums.drop(place).sum() == 0:  # no weight helps
        advice = "use prompts of which the policy solves some, because the other rewards are constant"
    step = run.series(f"rewards/{reward.name}/std").last_step
    return Finding(step, VARIANCE_LIMIT, {"reward": reward.name, "share": share, **wasted}).saying(
        "`{reward}` carries {share:.0%} of the rewards' variance up to step {step}: the others have hardly any effect "
        f"on {{lost:.0%}} of the run's {{unit}}; {advice}"
    )


def overfitting(run: Run) -> Finding | str:
    """Look for a training reward that rises while the held-out reward or strict accuracy falls or stays flat."""
    trained, held_out, strict = trending(run, "reward"), run.series("eval_reward"), _strict_shares(run)
    if not held_out.has_trend and len(strict) < 2:
        raise NoData("neither four evaluations during training nor one before and one after")
    if trained.trend <= 0:
        return f"the training reward does not rise: it goes {trained.change()}"
    rises, accuracy = f"the training reward rises {trained.change()}, while", "strict accuracy on held-out problems"
    figures = {"start": trained.start, "end": trained.end, "held_out_start": None, "held_out_end": None}
    if held_out.has_trend:
        figures |= {"held_out_start": held_out.start, "held_out_end": held_out.end}
    change = " to ".join(f"{share['value']:.3f}" for share in strict)
    accuracies = {"accuracies": [share["value"] for share in strict]}
    if held_out.trend < 0:
        best = held_out.steps[held_out.values.index(max(held_out.values))]
        return Finding(held_out.last_step, None, {**figures, **cost_after(run, best)}).saying(
            f"{rises} the held-out reward falls {held_out.change()} by step {{step}}: it was best at step {{since}}, "
            "and {lost:.0%} of the run's {unit} come after step {since}; use a checkpoint near it, and train on more "
            "prompts"
        )
    if len(strict) == 2 and strict[1]["high"] < strict[0]["low"]:
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
        return Finding(step, limit, {**figures, **accuracies, **cost_after(run, step)}).saying(
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
    highest = highest_total(run.rewards)
    if not held_out.has_trend or held_out.trend > 0 or (highest and held_out.end >= NEAR_BEST * highest):
        return False
    since = trained.after(held_out.steps[0] - 1)
    rise = since.end - since.start
    return since.trend > 0 and held_out.margin < rise and held_out.end - held_out.start < HELD_OUT_LIMIT * rise


def _is_flat_accuracy(held_out: Series, strict: Sequence[Mapping[str, float]]) -> bool:
    """Return True if the intervals of strict accuracy exclude a gain.

    A held-out reward that rises, or an accuracy that can't gain as much, is no sign of overfitting.
    """
    if len(strict) < 2 or held_out.trend > 0:
        return False
    return strict[0]["high"] <= 1 - ACCURACY_GAIN and strict[1]["high"] - strict[0]["low"] <= ACCURACY_GAIN


def no_answer_found(run: Run) -> Finding | str:
    """Look for a correctness reward that finds no answer in any completion of the run, so that it can't pay."""
    keys = [key for key in run.logged("rewards/") if key.endswith("/parsed") and len(run.series(key))]
    found = {key.removeprefix("rewards/").removesuffix("/parsed"): run.series(key) for key in keys}
    if not found:
        if run.rewards and not judges_correctness(run.rewards):
            raise DoesNotApply("no reward compares answers")
        raise NoData("no reward logs how many answers it finds (`rewards/*/parsed`)")
    name, shares = min(found.items(), key=lambda item: item[1].mean)
    if max(shares.values) > 0:
        return f"`{name}` finds an answer in {shares.mean:.0%} of the completions"
    return Finding(shares.last_step, 0.0, {"reward": name, "where": _where_answers_are(run, name)}).saying(
        "`{reward}` has paid nothing up to step {step}, on all of the run's tokens: {where}: ask for one in the "
        "prompt, or set another `extract`"
    )


CHECKS: tuple[Check, ...] = (
    format_without_correctness,
    length_into_cap,
    length_without_gain,
    truncated,
    identical_completions,
    entropy_collapse,
    zero_variance,
    update_checks.kl_blow_up,
    dominant_reward,
    overfitting,
    plateau,
    no_answer_found,
    update_checks.lost_updates,
    update_checks.clipped_tokens,
    update_checks.stale_tokens,
    update_checks.gradient_spikes,
    *tool_checks.CHECKS,
)


def unscorable_golds(run: Run) -> Finding | None:
    """Return a finding for golds that no correctness reward can score, counted when the run began.

    It is not among `CHECKS`, because no metric shows it.
    """
    golds = run.record.get("unscorable_golds")
    if not golds:
        return None
    rows = "; ".join([*map(str, golds["rows"]), *["…"] * (golds["count"] > NAMED_ROWS)])
    return Finding(
        0, None, {"count": golds["count"], "total": golds["total"], "rows": rows}, "", "unscorable_golds"
    ).saying("{count} of {total} golds can't be scored by a correctness reward ({rows}): correct or remove them")


def unscored(run: Run) -> Finding | None:
    """Return a finding for rewards that returned None for every completion. TRL logs NaN as the mean of such a reward.

    It is not among `CHECKS`, because it would be fine in nearly every run.
    """
    keys = {reward.name: f"rewards/{reward.name}/mean" for reward in run.rewards}
    names = [f"`{name}`" for name, key in keys.items() if key in run.log.metrics and not len(run.series(key))]
    if not names:
        return None
    return Finding(run.log.last_step, None, {"rewards": " and ".join(names)}, "", "unscored").saying(
        "{rewards} returned None for every completion, so nothing was learned from it: correct the reward, or the "
        "columns that it reads"
    )


def stopped(run: Run) -> Finding | None:
    """Return a finding with the cause for which the run stopped before its last step, if it was recorded."""
    if run.fault is None:
        return None
    cause = run.fault["sentence"].rstrip(".")
    return Finding(run.log.last_step, None, {"cause": cause}, f"the run stopped: {cause}", "stopped")


def _where_answers_are(run: Run, name: str) -> str:
    """Return a clause on where a reward looks for an answer, and where the logged completions state one."""
    for spec in single_specs(run.recipe.get("rewards") or []):
        if name not in (spec.get("alias"), attribute_name(str(spec.get("name")))):
            continue
        with suppress(RewardSpecError):
            reward = judging_reward(spec)
            if reward:
                texts = run.texts(run.rows.tail(LATEST_TEXTS))
                note = reward.unparsed_note(texts["completion"].tolist() if len(texts) else [])
                return note or f"no completion states an answer {reward.looks_at}"
    return "no completion states an answer where it looks"


def _strict_shares(run: Run) -> list[Mapping[str, float]]:
    """Return the strict accuracy before and after training, as far as it was measured."""
    evaluations = [run.evaluations[label] for label in (BEFORE, AFTER) if label in run.evaluations]
    return [evaluation["strict"] for evaluation in evaluations if "strict" in evaluation]


def _strict_accuracy_rises(run: Run) -> bool:
    strict = _strict_shares(run)
    return len(strict) == 2 and strict[1]["low"] > strict[0]["high"]


def _easy(run: Run) -> float | None:
    """Return the share of the logged zero-variance groups that are easy, or None if it is unknown what earns much."""
    much = earns_much(run.rows, run.rewards)
    if much is None:
        return None
    grouped = run.rows.assign(much=much).groupby(["step", "prompt"])
    groups = grouped.agg(highest=("total", "max"), lowest=("total", "min"), easy=("much", "all"))
    flat = groups[groups["highest"] - groups["lowest"] < 1e-9]
    return float(flat["easy"].mean()) if len(flat) else None


def earns_much(rows: pd.DataFrame, rewards: Sequence[RunReward | BuiltReward]) -> pd.Series | None:
    """Return True for each completion that earns much, or None if it is not known what that is.

    It earns much if it passes, or, without a reward that declares what passes, more than half of the highest total.

    Args:
        rows: Table with the columns `total` and `pay/NAME`, as `Run.rows`.
        rewards: Rewards of the sum.
    """
    judges = [reward for reward in rewards if reward.weight > 0 and reward.passes_at is not None]
    logged = [is_passing(rows[f"pay/{one.name}"], one.passes_at) for one in judges if f"pay/{one.name}" in rows]
    if logged:
        return pd.concat(logged, axis=1).all(axis=1)
    highest = highest_total(rewards)
    if highest is None:
        return None
    low, high = min(0.0, rows["total"].min()), max(highest, rows["total"].max())
    return rows["total"] > (low + high) / 2
