"""Checks of what the rewards pay, and of the groups that they compare. See `diagnostics.py`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pandas as pd

from grpo_recipes.evaluation.accuracy import judging_reward, single_specs
from grpo_recipes.reports import checking
from grpo_recipes.reports.checking import DoesNotApply, Finding, NoData
from grpo_recipes.reports.run import Run, RunReward, Series
from grpo_rewards.registry import BuiltReward, RewardSpecError, attribute_name
from grpo_rewards.reward import is_passing

LATEST_TEXTS = 1000
"""Number of the last logged completions that are searched for answers."""
IDENTICAL_LIMIT = 0.5
"""Largest share of groups that repeat one completion, among those that could earn more."""
FLAT_GROUPS_LIMIT = 0.5
"""Largest share of zero-variance groups."""
SATURATED_LIMIT = 0.8
"""Largest share of zero-variance groups in the last quarter of the run."""
FORMAT_SHARE = 0.5
"""Share of the format's rise from which on a rise of correctness explains it."""
FORMAT_POINTS = 8
"""Smallest number of logged means of a format reward that are compared with correctness."""
VARIANCE_LIMIT = 0.95
"""Largest share of the rewards' variance that a reward may have beside one that it must not dominate."""


def format_without_correctness(run: Run) -> Finding | str:
    """Look for a format reward that rises while correctness does not: the policy may be learning a layout only.

    Correctness rises by less than half of the format's rise. If no reward is known to judge correctness, any reward
    that does not judge format or length may do so.
    """
    parts = list(run.parts())
    formats = [(reward, means) for reward, means in parts if reward.kind == "format"]
    if not any(len(means) for _, means in parts):
        raise NoData("no reward was logged")
    if not formats:
        raise DoesNotApply("no reward judges the format alone")
    long = [(reward, means) for reward, means in formats if len(means) >= FORMAT_POINTS]
    if not long:
        raise checking.too_few(formats[0][0].name, str(FORMAT_POINTS))
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
    if checking.is_solved(run):
        return f"{rises}, and correctness has little room to rise"
    if not correctness and checking.strict_accuracy_rises(run):
        return f"{rises}, and so does strict accuracy"
    if run.recipe.get("sampling"):
        if run.series("eval_reward").trend > 0:
            return f"{rises}, and so does the held-out reward"
        raise NoData(checking.MOVING_PROMPTS)
    flat = "no reward pays a correct answer: the format can be earned without solving anything"
    if judges:
        known = [(judge, risen) for judge, risen in judges if risen.has_trend]
        if not known:
            raise checking.too_few(judges[0][0].name)
        for judge, risen in known:
            # Correctness of a few completions is noisy. A rise of half the format's size does not show that it stays
            # flat, nor does one that is smaller by less than a standard error.
            if _rise(judge, risen, risen.margin / 3) >= FORMAT_SHARE * _rise(reward, means):
                return f"{rises}, and `{judge.name}` goes {risen.change()}, which may be noise"
        flat = "`{judge}` goes from {judge_start:.2f} to {judge_end:.2f}"
        figures |= {"judge": known[0][0].name, "judge_start": known[0][1].start, "judge_end": known[0][1].end}
    half = means.first_step(lambda value: value >= (means.start + means.end) / 2)
    return Finding(means.last_step, FORMAT_SHARE, {**figures, **checking.cost_after(run, half)}).saying(
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


def zero_variance(run: Run) -> Finding | str:
    """Look for zero-variance groups, in more than half of the groups, or in more than 80 % at the end of the run.

    The completions of such a group all have one reward, so that their advantages are zero.
    """
    share = checking.trending(run, "frac_reward_zero_std")
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
    return Finding(step, limit, {"share": most, "easy": easy, **checking.cost(run, share)}).saying(
        f"{{share:.0%}} of the groups have no variance in their rewards{place}, more than {{threshold:.0%}} first at "
        f"step {{step}}{logged_groups}: the policy gradient ignores {{lost:.0%}} of the run's {{unit}}; end the run "
        f"earlier, or use prompts of another difficulty{advice}"
    )


def _easy(run: Run) -> float | None:
    """Return the share of the logged zero-variance groups that are easy, or None if it is unknown what earns much."""
    much = earns_much(run.rows, run.rewards)
    if much is None:
        return None
    grouped = run.rows.assign(much=much).groupby(["step", "prompt"])
    groups = grouped.agg(highest=("total", "max"), lowest=("total", "min"), easy=("much", "all"))
    flat = groups[groups["highest"] - groups["lowest"] < 1e-9]
    return float(flat["easy"].mean()) if len(flat) else None


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
        spread = checking.trending(run, f"rewards/{reward.name}/std")
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
    wasted = checking.cost(run, Series(is_dominated.index.tolist(), is_dominated.tolist()))
    advice = "lower its `weight`"
    if sums.drop(place).sum() == 0:  # no weight helps
        advice = "use prompts of which the policy solves some, because the other rewards are constant"
    step = run.series(f"rewards/{reward.name}/std").last_step
    return Finding(step, VARIANCE_LIMIT, {"reward": reward.name, "share": share, **wasted}).saying(
        "`{reward}` carries {share:.0%} of the rewards' variance up to step {step}: the others have hardly any effect "
        f"on {{lost:.0%}} of the run's {{unit}}; {advice}"
    )


def no_answer_found(run: Run) -> Finding | str:
    """Look for a correctness reward that finds no answer in any completion of the run, so that it can't pay."""
    keys = [key for key in run.logged("rewards/") if key.endswith("/parsed") and len(run.series(key))]
    found = {key.removeprefix("rewards/").removesuffix("/parsed"): run.series(key) for key in keys}
    if not found:
        if run.rewards and not checking.judges_correctness(run.rewards):
            raise DoesNotApply("no reward compares answers")
        raise NoData("no reward logs how many answers it finds (`rewards/*/parsed`)")
    name, shares = min(found.items(), key=lambda item: item[1].mean)
    if max(shares.values) > 0:
        return f"`{name}` finds an answer in {shares.mean:.0%} of the completions"
    return Finding(shares.last_step, 0.0, {"reward": name, "where": _where_answers_are(run, name)}).saying(
        "`{reward}` has paid nothing up to step {step}, on all of the run's tokens: {where}: ask for one in the "
        "prompt, or set another `extract`"
    )


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
    highest = checking.highest_total(rewards)
    if highest is None:
        return None
    low, high = min(0.0, rows["total"].min()), max(highest, rows["total"].max())
    return rows["total"] > (low + high) / 2
