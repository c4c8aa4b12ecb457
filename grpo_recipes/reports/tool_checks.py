"""Checks of runs whose policy has tools: see `diagnostics.py`."""

from __future__ import annotations

import pandas as pd

from grpo_recipes.reports.checking import DoesNotApply, Finding, NoData, judges_correctness, logged, trending
from grpo_recipes.reports.run import Run
from grpo_recipes.tools import UNKNOWN

CALLING_LIMIT = 0.95
"""Share of the last completions from which on every completion counts as one that calls a tool."""
FAULTS_LIMIT = 0.1
"""Largest share of a tool's calls in which the tool itself fails."""
FAILED_CALLS_LIMIT = 0.5
"""Largest share of all calls that fail, those that the policy writes wrongly included."""
TOOL_LIMITS_LIMIT = 0.25
"""Largest share of completions that a limit on turns or tokens ends."""
CALL_COUNT_LIMIT = 0.9
"""Share of a rise of the reward from which on the number of calls explains it."""
MIN_ROWS = 8
"""Smallest number of completions whose mean reward is compared."""


def tools_never_called(run: Run) -> Finding | str:
    """Look for tools that no completion calls, or that the policy has stopped calling by the end of the run."""
    _check_tools(run)
    calls = logged(run, "tools/call_frequency")
    if calls.end > 0:
        unused = [f"`{tool}`" for tool in tools(run) if not any(run.series(f"tools/{tool}/calls").values)]
        never = f"; never called: {', '.join(unused)}" if unused else ""
        return f"a completion makes {calls.end:.2g} calls on average at the end of the run{never}"
    if not any(calls.values):
        return Finding(calls.last_step, 0.0, {"calls": 0.0}).saying(
            "no completion calls a tool up to step {step}: ask for calls in the prompt, or begin with a model that "
            "writes them, because GRPO can't reinforce what is never sampled"
        )
    step = max(step for step, value in zip(calls.steps, calls.values, strict=True) if value > 0)
    return Finding(step, 0.0, {"calls": calls.end}).saying(
        "completions stop calling tools: the last calls are at step {step}: look whether a call lowers the reward, by "
        "its length or by its errors"
    )


def calls_without_gain(run: Run) -> Finding | str:
    """Look for completions that all call a tool, although neither calls nor training raise the reward.

    They are at least 95 % of the completions at the end, and the reward is not near its best.
    """
    _check_tools(run)
    rows = run.rows.dropna(subset="total")
    _, late = _ends(rows)
    if len(late) < MIN_ROWS:
        raise NoData(f"fewer than {MIN_ROWS} scored completions were logged at the end of the run")
    calling = (late["calls"] > 0).mean()
    calls = f"{calling:.0%} of the completions call a tool at the end of the run"
    if calling < CALLING_LIMIT:
        return f"{calls} (limit {CALLING_LIMIT:.0%})"
    reward = trending(run, "reward")
    change, figures = f"the reward goes {reward.change()}", {"calling": float(calling), **reward.ends}
    if reward.trend > 0:
        return f"{calls}, and {change}"
    lowest, highest = rows["total"].min(), rows["total"].max()
    if highest > lowest and late["total"].mean() - lowest >= CALLING_LIMIT * (highest - lowest):
        return f"{calls}, and nearly all earn the best reward"
    without, with_calls = (rows[rows["calls"].gt(0) == has_calls]["total"] for has_calls in (False, True))
    if len(without) >= MIN_ROWS:
        earned = f"those with a call earn {with_calls.mean():.2f} and those without {without.mean():.2f}"
        error = (with_calls.var() / len(with_calls) + without.var() / len(without)) ** 0.5
        if with_calls.mean() - without.mean() > max(2 * error, 1e-9):
            return f"{calls}, and in the whole run {earned}"
        change += f", and in the whole run {earned}"
        figures |= {"with_calls": float(with_calls.mean()), "without": float(without.mean())}
    return Finding(int(late["step"].max()), CALLING_LIMIT, figures).saying(
        f"{calls} (step {{step}}), while {change}: look in the report whether the results help, and whether the answer "
        "uses them"
    )


def failing_tools(run: Run) -> Finding | str:
    """Look for a tool that fails in more than a tenth of its calls, or calls that fail in more than a half."""
    _check_tools(run)
    failed, calls = logged(run, "tools/failure_frequency"), run.series("tools/call_frequency")
    if len(calls) and not any(calls.values):
        raise NoData("no tool was called")
    for tool in tools(run):
        faults = run.series(f"tools/{tool}/failures")
        if faults.mean > FAULTS_LIMIT:
            return Finding(faults.last_step, FAULTS_LIMIT, {"tool": tool, "share": faults.mean}).saying(
                "`{tool}` fails in {share:.0%} of its calls up to step {step}: it raises, or passes "
                "`tool_limits.seconds`; correct the tool, or let it raise `ToolError` for mistakes of the policy"
            )
    if failed.end <= FAILED_CALLS_LIMIT:
        return f"{failed.end:.0%} of the calls fail at the end of the run (limit {FAILED_CALLS_LIMIT:.0%})"
    return Finding(failed.last_step, FAILED_CALLS_LIMIT, {"share": failed.end}).saying(
        "{share:.0%} of the calls fail at the end of the run (step {step}): calls name no tool, have arguments that "
        "don't fit, or a tool raises; describe the arguments in its docstring, and read the results in the report"
    )


def tool_limits_hit(run: Run) -> Finding | str:
    """Look for more than a quarter of the completions ended by a limit on turns or tokens at the end of the run."""
    _check_tools(run)
    advice = {
        "tools/rows_at_limit": "still call a tool after `max_tool_calling_iterations` turns: raise it",
        "tools/rows_out_of_budget": "have no room for a result in `max_completion_length`: raise it, or lower "
        "`tool_limits.result_tokens`",
    }
    shares = {key: run.series(key) for key in advice if len(run.series(key))}
    if not shares:
        raise NoData("`tools/rows_at_limit` was not logged")
    total = sum(share.end for share in shares.values())
    if total <= TOOL_LIMITS_LIMIT:
        return f"limits end {total:.0%} of the completions at the end of the run (limit {TOOL_LIMITS_LIMIT:.0%})"
    key, worst = max(shares.items(), key=lambda item: item[1].end)
    return Finding(worst.last_step, TOOL_LIMITS_LIMIT, {"share": total, "metric": key, "of_metric": worst.end}).saying(
        f"limits end {{share:.0%}} of the completions by step {{step}}, and {{of_metric:.0%}} {advice[key]}"
    )


def reward_by_calls_alone(run: Run) -> Finding | str:
    """Look for a reward that rises with the number of calls alone, and not among completions with equally many calls.

    The number of calls explains 90 % of the rise. Answers that become right explain a rise, where a reward judges them.
    Where none does, only completions with a call are compared, and 90 % of the rewards' variance must follow from the
    number of calls, because a policy that learns to call its tool at all is meant to earn more.
    """
    _check_tools(run)
    rows = run.rows.dropna(subset="total")
    reward = trending(run, "reward")
    if reward.trend <= 0:
        return f"the reward does not rise: it goes {reward.change()}"
    for judge, means in run.parts():
        if judge.kind == "correctness" and means.trend > 0:
            return f"`{judge.name}` rises too, {means.change()}"
    is_judged = judges_correctness(run.rewards)
    if not is_judged:
        rows = rows[rows["calls"] > 0]
    first, last = _ends(rows)
    if min(len(first), len(last)) < MIN_ROWS or rows["step"].nunique() < 4:
        raise NoData("too few scored completions with calls were logged")
    counts = f"calls per completion go from {first['calls'].mean():.2g} to {last['calls'].mean():.2g}"
    rise, alike = last["total"].mean() - first["total"].mean(), _rise_at_equal_calls(first, last)
    if last["calls"].mean() <= first["calls"].mean() or rise <= 0:
        return counts
    if alike > (1 - CALL_COUNT_LIMIT) * rise:
        return f"{counts}; at equal numbers of calls the reward rises by {alike:.2f} of {rise:.2f}"
    if not is_judged and (explained := _explained_by_calls(rows)) < CALL_COUNT_LIMIT:
        return f"{counts}, which explain {explained:.0%} of the differences between rewards"
    figures = {"start": float(first["calls"].mean()), "end": float(last["calls"].mean()), "rise": float(rise)}
    return Finding(int(last["step"].max()), CALL_COUNT_LIMIT, {**figures, "at_equal_calls": alike}).saying(
        f"{counts} by step {{step}}, and the reward rises by {{rise:.2f}}, but by {{at_equal_calls:.2f}} among "
        "completions with equally many calls: look whether a reward pays for calls instead of what they achieve"
    )


CHECKS = (tools_never_called, calls_without_gain, failing_tools, tool_limits_hit, reward_by_calls_alone)


def tools(run: Run) -> list[str]:
    """Return the names of the tools in the log, in order of appearance."""
    logged = [key.split("/") for key in run.logged("tools/") if key.endswith("/calls")]
    return [key[1] for key in logged if len(key) == 3 and key[1] != UNKNOWN]


def _check_tools(run: Run) -> None:
    """Raise `DoesNotApply` if the run offers no tools."""
    if not (run.logged("tools/") or run.recipe.get("tools") or run.recipe.get("environment_factory")):
        raise DoesNotApply("the policy has no tools")


def _ends(rows: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the rows of the first quarter of the logged steps, and those of the last quarter."""
    steps = sorted(rows["step"].unique())
    quarter = max(1, len(steps) // 4)
    return rows[rows["step"].isin(steps[:quarter])], rows[rows["step"].isin(steps[-quarter:])]


def _rise_at_equal_calls(first: pd.DataFrame, last: pd.DataFrame) -> float:
    """Return how far the mean reward rises among completions with equally many calls, by their shares.

    A number of calls that only one of the two tables has adds nothing.
    """
    before, after = (rows.groupby("calls")["total"].agg(["mean", "size"]) for rows in (first, last))
    both = before.join(after, how="inner", rsuffix="_after")
    share = (both["size"] / len(first) + both["size_after"] / len(last)) / 2
    return float((share * (both["mean_after"] - both["mean"])).sum())


def _explained_by_calls(rows: pd.DataFrame) -> float:
    """Return the share of the rewards' variance that the number of calls explains."""
    totals = rows["total"]
    unexplained = totals - rows.groupby("calls")["total"].transform("mean")
    variance = totals.var(ddof=0)
    return 1 - unexplained.var(ddof=0) / variance if variance > 0 else 0.0
