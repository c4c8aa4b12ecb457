"""Checks for what looks wrong in a run, made from its own files: `diagnose(Run.read(folder))`.

Each check looks for one problem. It reports the problem in a sentence with the figure and the step, or the figure that
is fine. A check whose metrics the run did not log raises `NoData`, and a check that means nothing for the run raises
`DoesNotApply`, so that "nothing looks wrong" counts only the checks that had data. The thresholds are rules of thumb.
The report draws the constant thresholds into its charts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from grpo_recipes.data.places import NAMED_ROWS
from grpo_recipes.evaluation.accuracy import judging_reward, single_specs
from grpo_recipes.reports.run import Run, RunReward, Series
from grpo_recipes.runs.files import AFTER, BEFORE
from grpo_recipes.tools.metrics import UNKNOWN
from grpo_rewards.registry import RewardSpecError, attribute_name
from grpo_rewards.terminal import Cell, Part, Table, visible

LATEST_TEXTS = 1000
"""Number of the last logged completions that are searched for answers."""

KL_LIMIT = 1.0
"""Largest KL to the reference, in nats per token."""
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
LENGTH_LIMIT = 0.8
"""Largest mean length as a share of `max_completion_length`."""
ENTROPY_LIMIT = 0.1
"""Smallest entropy as a share of the entropy at the start."""
UPDATES_LIMIT = 0.6
"""Smallest share of changed weights among those that would change if no update were lost."""
VARIANCE_LIMIT = 0.95
"""Largest share of the rewards' variance that a format or length reward may have."""

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
NAMED_TOOLS = 5
MIN_ROWS = 8
"""Smallest number of completions whose mean reward is compared."""

PROBLEM, FINE, NOT_CHECKED, NOT_APPLICABLE = "problem", "fine", "not checked", "does not apply"
"""Results of a check, in the order in which they are listed."""

Found = tuple[int, str]
"""Optimizer step and sentence of a problem."""
Check = Callable[[Run], Found | str]
"""Function that returns a problem, or a clause with the figure that is fine."""


@dataclass(frozen=True)
class Finding:
    """Problem in a run: the check that found it, the optimizer step, and a sentence."""

    check: str
    step: int
    sentence: str


class NoData(Exception):
    """Reason why a check could not be made."""


class DoesNotApply(Exception):
    """Reason why a check means nothing for a run, whatever the run logs."""


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
        """True if at least one check had data and none found a problem."""
        return self.checked > 0 and not self.findings

    @property
    def coverage(self) -> str:
        """Clause on the checks that had data."""
        if not self.checked:
            return "nothing could be checked: the run logged none of the metrics that the checks read"
        clauses = [f"{self.checked} of {self.applicable} checks had data"]
        if self.reading:
            clauses.append(self.reading)
        return "; ".join(clauses)

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
    if sampled.read < sampled.count:
        reading = f"of the completions, {sampled.read:,} of {sampled.count:,} steps were read, evenly spread"
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
                diagnosis.findings.append(Finding(name, *result))
    diagnosis.findings.extend(filter(None, (unscorable_golds(run), stopped(run))))
    return diagnosis


def looks_for(check: Check) -> str:
    """Return what a check looks for, as a clause: the first line of its docstring without "Look for"."""
    return (check.__doc__ or "").partition("\n")[0].removeprefix("Look for ").rstrip(".")


def as_table(diagnosis: Diagnosis) -> list[Part]:
    """Return every check for the terminal as a table, with a summary."""
    styles = {PROBLEM: ("bad", ""), FINE: ("good", "dim"), NOT_CHECKED: ("dim", "dim"), NOT_APPLICABLE: ("dim", "dim")}
    rows = []
    for result, name, text in diagnosis.rows():
        style, text_style = styles[result]
        rows.append((Cell(result, style), name, Cell(text, text_style)))
    head = Cell("diagnosis: nothing looks wrong", "good") if diagnosis.looks_fine else Cell("diagnosis:", "head")
    return [head, Table(rows), f"  {diagnosis.coverage}"]


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis for `--json`."""
    counts = {"looks_fine": diagnosis.looks_fine, "checks": len(CHECKS), "checked": diagnosis.checked}
    return {**counts, **asdict(diagnosis)}


def describe(diagnosis: Diagnosis) -> str:
    """Return the findings, and how many checks had data, as lines of text."""
    head = "diagnosis: nothing looks wrong" if diagnosis.looks_fine else "diagnosis:"
    findings = [f"  - {visible(finding.sentence)}" for finding in diagnosis.findings]
    coverage = diagnosis.coverage
    if diagnosis.checked and diagnosis.unchecked:
        # A short run has data for few checks, and a reason for each of the others would be a paragraph.
        coverage += f"; `grpo-recipes diagnose` says why {len(diagnosis.unchecked)} had none"
    return "\n".join([head, *findings, f"  {visible(coverage)}"])


# Checks


def format_without_correctness(run: Run) -> Found | str:
    """Look for a format reward that rises while correctness does not: the policy may be learning a layout only.

    If no reward is known to judge correctness, any reward that does not judge format or length may do so.
    """
    parts = list(run.parts())
    formats = [(reward, means) for reward, means in parts if reward.kind == "format"]
    if not any(len(means) for _, means in parts):
        raise NoData("no reward was logged")
    if not formats:
        raise DoesNotApply("no reward judges the format alone")
    if not any(means.has_trend for _, means in formats):
        raise _too_few(formats[0][0].name)
    rising = [(reward, means) for reward, means in formats if means.trend > 0]
    if not rising:
        reward, means = next((reward, means) for reward, means in formats if means.has_trend)
        return f"no format reward rises: `{reward.name}` goes from {means.start:.2f} to {means.end:.2f}"
    reward, means = rising[0]
    rises = f"`{reward.name}` rises from {means.start:.2f} to {means.end:.2f}"
    others = [(reward, means) for reward, means in parts if reward.kind != "format"]
    correctness = [(reward, means) for reward, means in others if reward.kind == "correctness"]
    judges = correctness or [(reward, means) for reward, means in others if reward.kind != "length"] or others
    for judge, risen in judges:
        if risen.trend > 0:
            return f"{rises}, and so does `{judge.name}`, from {risen.start:.2f} to {risen.end:.2f}"
    if not correctness and _strict_accuracy_rises(run):
        return f"{rises}, and so does strict accuracy"
    for judge, risen in judges:
        # Correctness of a few completions is noisy. A rise of half the format's size does not show that it stays flat.
        if risen.has_trend and _rise(judge, risen) >= _rise(reward, means) / 2:
            return f"{rises}, and `{judge.name}` goes from {risen.start:.2f} to {risen.end:.2f}, which may be noise"
    return _last_step(means), f"{rises} by step {_last_step(means)}, while {_flat(judges)}"


def _rise(reward: RunReward, means: Series) -> float:
    """Return the change from the first to the last quarter as a share of the reward's highest pay.

    If the highest pay is unknown, the largest mean is taken for it.
    """
    highest = reward.highest_pay or max(abs(value) for value in means.values)
    return (means.end - means.start) / max(highest, 1e-9)


def _flat(judges: Sequence[tuple[RunReward, Series]]) -> str:
    """Return a clause on the first reward with a trend, none of which rises. Raises `NoData` if none has a trend."""
    if not judges:
        return "no reward pays a correct answer: the format can be earned without solving anything"
    for judge, means in judges:
        if means.has_trend:
            return f"`{judge.name}` goes from {means.start:.2f} to {means.end:.2f}"
    raise _too_few(judges[0][0].name)


def length_into_cap(run: Run) -> Found | str:
    """Look for completions that grow by a quarter or more, to beyond 80 % of `max_completion_length`."""
    lengths, cap = _trending(run, "completions/mean_length"), run.config.get("max_completion_length")
    if not run.config:
        raise NoData("no `run.json` holds `max_completion_length`")
    if cap is None:
        raise DoesNotApply("`max_completion_length` is not set")
    if lengths.trend <= 0 or lengths.end < 1.25 * lengths.start or lengths.end < LENGTH_LIMIT * cap:
        return f"completions go from {lengths.start:.0f} to {lengths.end:.0f} tokens on average, where the cap is {cap}"
    step = _first_step(lengths, lambda value: value >= LENGTH_LIMIT * cap)
    return step, (
        f"completions grow from {lengths.start:.0f} to {lengths.end:.0f} tokens, into the cap of {cap} "
        f"(`max_completion_length`) from step {step}"
    )


def truncated(run: Run) -> Found | str:
    """Look for more than a quarter of the completions cut off at the cap at the end of the run."""
    share = _logged(run, "completions/clipped_ratio")
    if share.end <= TRUNCATED_LIMIT:
        return f"{share.end:.0%} of the completions are cut off at the end of the run (limit {TRUNCATED_LIMIT:.0%})"
    step = _last_step(share)
    return step, (
        f"{share.end:.0%} of the completions are cut off at `max_completion_length` by step {step}, and an answer "
        "behind the cut is lost: raise it, or set `mask_truncated_completions: true`"
    )


def identical_completions(run: Run) -> Found | str:
    """Look for groups that repeat one text, in more than half of the groups that could still earn more."""
    groups = _groups(run)
    scored = groups[groups["reward"].notna() & (groups["size"] > 1)] if len(groups) else groups
    if len(scored) < 4:
        raise NoData("fewer than four groups of completions were logged")
    improvable = scored[scored["reward"] < run.rows["total"].max() - 1e-6]
    if len(improvable) < 4:
        return f"{len(scored) - len(improvable):,} of {len(scored):,} groups earn the best reward"
    repeats = (
        f"{improvable['identical'].mean():.0%} of the groups that don't earn the best reward repeat one completion"
    )
    if improvable["identical"].mean() <= IDENTICAL_LIMIT:
        return f"{repeats} (limit {IDENTICAL_LIMIT:.0%})"
    step = int(improvable.loc[improvable["identical"], "step"].min())
    return step, f"{repeats} throughout, from step {step}: there is nothing to compare; raise `temperature`"


def entropy_collapse(run: Run) -> Found | str:
    """Look for a policy whose entropy falls below a tenth of its start."""
    entropy = _trending(run, "entropy")
    if entropy.trend >= 0 or entropy.end >= ENTROPY_LIMIT * entropy.start:
        return f"entropy goes from {entropy.start:.3f} to {entropy.end:.3f} nats per token"
    step = _first_step(entropy, lambda value: value < ENTROPY_LIMIT * entropy.start)
    return step, (
        f"entropy falls from {entropy.start:.3f} to {entropy.end:.3f} nats per token, below a tenth from step {step}: "
        "the policy has stopped exploring"
    )


def zero_variance(run: Run) -> Found | str:
    """Look for zero-variance groups, in more than half of the groups, or in more than 80 % at the end of the run.

    The completions of such a group all have one reward, so that their advantages are zero.
    """
    share = _logged(run, "frac_reward_zero_std")
    advice = "" if run.recipe.get("sampling") else "; `sampling: informative` generates fewer such prompts"
    if share.mean > FLAT_GROUPS_LIMIT:
        step = _first_step(share, lambda value: value > FLAT_GROUPS_LIMIT)
        return step, (
            f"{share.mean:.0%} of the groups have no variance in their rewards, more than half first at step {step}"
            f"{_easy_or_hard(run)}{advice}"
        )
    shares = f"{share.mean:.0%} of the groups have no variance in their rewards (limit {FLAT_GROUPS_LIMIT:.0%})"
    if not share.has_trend or share.end <= SATURATED_LIMIT:
        return shares
    step = _first_step(share, lambda value: value > SATURATED_LIMIT)
    return step, (
        f"{share.end:.0%} of the groups have no variance in their rewards at the end of the run, more than "
        f"{SATURATED_LIMIT:.0%} first at step {step}{_easy_or_hard(run)}. The policy gradient ignores their tokens: "
        f"end the run earlier, or use prompts of another difficulty{advice}"
    )


def kl_blow_up(run: Run) -> Found | str:
    """Look for a KL to the reference above 1 nat per token."""
    if run.config.get("beta") == 0 and not len(run.series("kl")):
        raise DoesNotApply("`beta` is 0, so that no KL is computed")
    kl = _logged(run, "kl")
    if max(kl.values) <= KL_LIMIT:
        return f"KL to the reference is at most {max(kl.values):.2g} nats per token (limit {KL_LIMIT:g})"
    step = _first_step(kl, lambda value: value > KL_LIMIT)
    return step, (
        f"KL to the reference reaches {max(kl.values):.1f} nats per token, above 1 from step {step}: lower "
        "`learning_rate` or raise `beta`"
    )


def dominant_reward(run: Run) -> Found | str:
    """Look for a format or length reward with more than 95 % of the variance of the weighted rewards."""
    if not run.record.get("rewards"):
        raise NoData("no `run.json` holds the rewards' weights")
    if len(run.rewards) < 2 or not any(reward.kind in ("format", "length") for reward in run.rewards):
        raise DoesNotApply("no format or length reward is beside another reward")
    variances = {reward: _weighted_variance(run, reward) for reward in run.rewards}
    total = sum(variances.values())
    if not total > 0:  # also if it is NaN
        return "the rewards have no variance"
    reward = max(variances, key=lambda one: variances[one])
    if reward.kind not in ("format", "length") or variances[reward] <= VARIANCE_LIMIT * total:
        return f"the largest part of the rewards' variance is {variances[reward] / total:.0%}, that of `{reward.name}`"
    step = _last_step(run.series(f"rewards/{reward.name}/std"))
    return step, (
        f"`{reward.name}` carries {variances[reward] / total:.0%} of the rewards' variance up to step {step}: the "
        "others have hardly any effect; lower its `weight`"
    )


def overfitting(run: Run) -> Found | str:
    """Look for a training reward that rises while the held-out reward or strict accuracy falls or stays flat."""
    trained, held_out, strict = _trending(run, "reward"), run.series("eval_reward"), _strict_shares(run)
    if not held_out.has_trend and len(strict) < 2:
        raise NoData("neither four evaluations during training nor one before and one after")
    if trained.trend <= 0:
        return f"the training reward does not rise: it goes from {trained.start:.2f} to {trained.end:.2f}"
    sentence = f"the training reward rises from {trained.start:.2f} to {trained.end:.2f}, while "
    if held_out.trend < 0:
        best = held_out.steps[held_out.values.index(max(held_out.values))]
        step = _last_step(held_out)
        fall = f"the held-out reward falls from {held_out.start:.2f} to {held_out.end:.2f} by step {step}"
        return step, f"{sentence}{fall}; it was best at step {best}"
    if len(strict) == 2 and strict[1]["high"] < strict[0]["low"]:
        step = _last_step(trained)
        fall = f"strict accuracy on held-out problems falls from {strict[0]['value']:.3f} to {strict[1]['value']:.3f}"
        return step, f"{sentence}{fall} by step {step}"
    if flat := _flat_held_out(trained, held_out) or _flat_accuracy(trained, held_out, strict):
        step, clause = flat
        return step, f"{sentence}{clause}: {_share_after(run, step)}; train on more prompts, or end the run earlier"
    if held_out.has_trend:
        return f"{sentence}the held-out reward goes from {held_out.start:.2f} to {held_out.end:.2f}"
    change = f"from {strict[0]['value']:.3f} to {strict[1]['value']:.3f}"
    return f"{sentence}strict accuracy on held-out problems goes {change}"


def _flat_held_out(trained: Series, held_out: Series) -> Found | None:
    """Return the first evaluation and a clause if the held-out reward does not follow the training reward.

    The training reward counts from the first evaluation on. If the evaluations are too noisy to show a rise of that
    size, None is returned.
    """
    if not held_out.has_trend or held_out.trend > 0:
        return None
    since = _after(trained, held_out.steps[0] - 1)
    rise = since.end - since.start
    if since.trend <= 0 or held_out.margin >= rise or held_out.end - held_out.start >= HELD_OUT_LIMIT * rise:
        return None
    return held_out.steps[0], f"the held-out reward stays at {held_out.end:.2f} from step {held_out.steps[0]} on"


def _flat_accuracy(trained: Series, held_out: Series, strict: list[Mapping[str, float]]) -> Found | None:
    """Return the first step and a clause if the intervals of strict accuracy exclude a gain.

    A held-out reward that rises, or an accuracy that can't gain as much, is no sign of overfitting.
    """
    if len(strict) < 2 or held_out.trend > 0 or strict[0]["high"] > 1 - ACCURACY_GAIN:
        return None
    if strict[1]["high"] - strict[0]["low"] > ACCURACY_GAIN:
        return None
    change = f"from {strict[0]['value']:.3f} to {strict[1]['value']:.3f}"
    return trained.steps[0], f"strict accuracy on held-out problems stays flat, {change}"


def no_answer_found(run: Run) -> Found | str:
    """Look for a correctness reward that finds no answer in any completion of the run, so that it can't pay."""
    found = {}
    for key in run.logged("rewards/"):
        if key.endswith("/parsed") and len(shares := run.series(key)):
            found[key.removeprefix("rewards/").removesuffix("/parsed")] = shares
    if not found:
        if run.rewards and not any(reward.kind == "correctness" for reward in _leaves(run.rewards)):
            raise DoesNotApply("no reward compares answers")
        raise NoData("no reward logs how many answers it finds (`rewards/*/parsed`)")
    for name, shares in found.items():
        if max(shares.values) == 0:
            step = _last_step(shares)
            return step, (
                f"`{name}` has paid nothing up to step {step}: {_where_answers_are(run, name)}: ask for one in the "
                "prompt, or set another `extract`"
            )
    name, shares = min(found.items(), key=lambda item: item[1].mean)
    return f"`{name}` finds an answer in {shares.mean:.0%} of the completions"


def lost_updates(run: Run) -> Found | str:
    """Look for updates lost to rounding: after 20 steps, fewer than 60 % of the expected weights change.

    In simulations with weights of N(0, 0.02) and learning rates from 1e-6 to 2e-5, plain AdamW on bfloat16 changes 20
    to 50 % of them. Weights that keep the rounded-off part change 80 % and more. In the first steps they have kept
    little.
    """
    logged = _logged(run, "updates/changed")
    if not len(run.series("updates/expected")):
        raise DoesNotApply("`updates/expected` is logged only for optimizers with the moments of AdamW")
    changed, expected = _after(logged, 20), _after(run.series("updates/expected"), 20)
    if not len(changed) or not len(expected):
        raise NoData("the run has no more than 20 steps")
    step = _last_step(changed)
    shares = (
        f"a step changes {changed.mean:.1%} of the trained weights up to step {step}, where {expected.mean:.1%} would "
        "change if no update were lost to rounding"
    )
    if changed.mean >= UPDATES_LIMIT * expected.mean:
        return shares
    return step, f"{shares}: set `dtype: float32` or `optim: adamw_bf16` (docs/precision.md)"


def tools_never_called(run: Run) -> Found | str:
    """Look for tools that no completion calls, or that the policy has stopped calling by the end of the run."""
    _check_tools(run)
    calls = _logged(run, "tools/call_frequency")
    if calls.end > 0:
        unused = [tool for tool in tools(run) if not any(run.series(f"tools/{tool}/calls").values)]
        never = f"; never called: {_quoted(unused)}" if unused else ""
        return f"a completion makes {calls.end:.2g} calls on average at the end of the run{never}"
    if not any(calls.values):
        step = _last_step(calls)
        return step, (
            f"no completion calls a tool up to step {step}: ask for calls in the prompt, or begin with a model that "
            "writes them, because GRPO can't reinforce what is never sampled"
        )
    step = max(step for step, value in zip(calls.steps, calls.values, strict=True) if value > 0)
    return step, (
        f"completions stop calling tools: the last calls are at step {step}: look whether a call lowers the reward, by "
        "its length or by its errors"
    )


def calls_without_gain(run: Run) -> Found | str:
    """Look for completions that all call a tool, although neither calls nor training raise the reward."""
    _check_tools(run)
    rows = _scored(run)
    late = _last_rows(rows)
    if len(late) < MIN_ROWS:
        raise NoData(f"fewer than {MIN_ROWS} scored completions were logged at the end of the run")
    calling = (late["calls"] > 0).mean()
    calls = f"{calling:.0%} of the completions call a tool at the end of the run"
    if calling < CALLING_LIMIT:
        return f"{calls} (limit {CALLING_LIMIT:.0%})"
    reward = _trending(run, "reward")
    change = f"the reward goes from {reward.start:.2f} to {reward.end:.2f}"
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
    step = int(late["step"].max())
    return step, (
        f"{calls} (step {step}), while {change}: look in the report whether the results help, and whether the answer "
        "uses them"
    )


def failing_tools(run: Run) -> Found | str:
    """Look for a tool that fails in more than a tenth of its calls, or calls that fail in more than a half."""
    _check_tools(run)
    failed, calls = _logged(run, "tools/failure_frequency"), run.series("tools/call_frequency")
    if len(calls) and not any(calls.values):
        raise NoData("no tool was called")
    for tool in tools(run):
        faults = run.series(f"tools/{tool}/failures")
        if len(faults) and faults.mean > FAULTS_LIMIT:
            step = _last_step(faults)
            return step, (
                f"`{tool}` fails in {faults.mean:.0%} of its calls up to step {step}: it raises, or passes "
                "`tool_limits.seconds`; correct the tool"
            )
    shares = f"{failed.end:.0%} of the calls fail at the end of the run"
    if failed.end <= FAILED_CALLS_LIMIT:
        return f"{shares} (limit {FAILED_CALLS_LIMIT:.0%})"
    step = _last_step(failed)
    return step, (
        f"{shares} (step {step}): calls name no tool, have arguments that don't fit, or a tool raises; describe the "
        "arguments in its docstring, and read the results in the report"
    )


def tool_limits_hit(run: Run) -> Found | str:
    """Look for more than a quarter of the completions ended by a limit on turns or tokens at the end of the run."""
    _check_tools(run)
    advice = {
        "tools/rows_at_limit": "still call a tool after `max_tool_calling_iterations` turns: raise it",
        "tools/rows_out_of_budget": "have no room for a result in `max_completion_length`: raise it, or lower "
        "`tool_limits.result_tokens`",
        "tools/rows_results_dropped": "lose a result that can't be cut to `max_completion_length`: raise it, or let "
        "the tool return a text",
    }
    shares = {key: run.series(key) for key in advice if len(run.series(key))}
    if not shares:
        raise NoData("`tools/rows_at_limit` was not logged")
    total = sum(share.end for share in shares.values())
    if total <= TOOL_LIMITS_LIMIT:
        return f"limits end {total:.0%} of the completions at the end of the run (limit {TOOL_LIMITS_LIMIT:.0%})"
    worst = max(shares, key=lambda key: shares[key].end)
    step = _last_step(shares[worst])
    return step, (
        f"limits end {total:.0%} of the completions by step {step}, and {shares[worst].end:.0%} {advice[worst]}"
    )


def reward_by_calls_alone(run: Run) -> Found | str:
    """Look for a reward that rises with the number of calls alone, and not among completions with equally many calls.

    Answers that become right explain a rise, where a reward judges them. Where none does, only completions with a call
    are compared, because a policy that learns to call its tool at all is meant to earn more.
    """
    _check_tools(run)
    rows = _scored(run)
    reward = _trending(run, "reward")
    if reward.trend <= 0:
        return f"the reward does not rise: it goes from {reward.start:.2f} to {reward.end:.2f}"
    for judge, means in run.parts():
        if judge.kind == "correctness" and means.trend > 0:
            return f"`{judge.name}` rises too, from {means.start:.2f} to {means.end:.2f}"
    is_judged = any(reward.kind == "correctness" for reward in _leaves(run.rewards))
    if not is_judged:
        rows = rows[rows["calls"] > 0]
    first, last = _first_rows(rows), _last_rows(rows)
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
    step = int(last["step"].max())
    return step, (
        f"{counts} by step {step}, and the reward rises by {rise:.2f}, but by {alike:.2f} among completions with "
        "equally many calls: look whether a reward pays for calls instead of what they achieve"
    )


CHECKS: tuple[Check, ...] = (
    format_without_correctness,
    length_into_cap,
    truncated,
    identical_completions,
    entropy_collapse,
    zero_variance,
    kl_blow_up,
    dominant_reward,
    overfitting,
    no_answer_found,
    lost_updates,
    tools_never_called,
    calls_without_gain,
    failing_tools,
    tool_limits_hit,
    reward_by_calls_alone,
)


def unscorable_golds(run: Run) -> Finding | None:
    """Return a finding for golds that no correctness reward can score, counted when the run began.

    It is not among `CHECKS`, because no metric shows it.
    """
    golds = run.record.get("unscorable_golds")
    if not golds:
        return None
    rows = "; ".join(map(str, golds["rows"]))
    if golds["count"] > NAMED_ROWS:
        rows += "; …"
    return Finding(
        "unscorable_golds",
        0,
        f"{golds['count']} of {golds['total']} golds can't be scored by a correctness reward ({rows}): correct "
        "or remove them",
    )


def stopped(run: Run) -> Finding | None:
    """Return a finding with the cause for which the run stopped before its last step, if it was recorded."""
    if run.fault is None:
        return None
    return Finding("stopped", run.log.last_step, f"the run stopped: {run.fault['sentence'].rstrip('.')}")


def tools(run: Run) -> list[str]:
    """Return the names of the tools in the log, in order of appearance."""
    logged = [key.split("/") for key in run.logged("tools/") if key.endswith("/calls")]
    return [key[1] for key in logged if len(key) == 3 and key[1] != UNKNOWN]


def _check_tools(run: Run) -> None:
    """Raise `DoesNotApply` if the run offers no tools."""
    if not (run.logged("tools/") or run.recipe.get("tools") or run.recipe.get("environment_factory")):
        raise DoesNotApply("the policy has no tools")


def _quoted(names: Sequence[str]) -> str:
    listed = ", ".join(f"`{name}`" for name in names[:NAMED_TOOLS])
    return f"{listed}, …" if len(names) > NAMED_TOOLS else listed


def _scored(run: Run) -> pd.DataFrame:
    """Return the logged completions with a reward."""
    return run.rows.dropna(subset="total")


def _first_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the first quarter of the logged steps."""
    return rows[rows["step"].isin(_steps(rows)[: _quarter(rows)])]


def _last_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the last quarter of the logged steps."""
    return rows[rows["step"].isin(_steps(rows)[-_quarter(rows) :])]


def _steps(rows: pd.DataFrame) -> list[int]:
    return sorted(rows["step"].unique())


def _quarter(rows: pd.DataFrame) -> int:
    return max(1, rows["step"].nunique() // 4)


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


def _leaves(rewards: Iterable[RunReward]) -> Iterator[RunReward]:
    """Yield the rewards, with the parts of each reward that has some in its place."""
    for reward in rewards:
        if reward.parts:
            yield from _leaves(reward.parts)
        else:
            yield reward


def _logged(run: Run, key: str) -> Series:
    """Return a logged metric, or raise `NoData`."""
    series = run.series(key)
    if not len(series):
        raise NoData(f"`{key}` was not logged")
    return series


def _trending(run: Run, key: str) -> Series:
    """Return a metric with enough points for a trend, or raise `NoData`."""
    series = run.series(key)
    if not series.has_trend:
        raise _too_few(key)
    return series


def _too_few(metric: str) -> NoData:
    return NoData(f"`{metric}` was logged fewer than four times")


def _after(series: Series, step: int) -> Series:
    """Return the points of a series after a step."""
    first = sum(logged <= step for logged in series.steps)
    return Series(series.steps[first:], series.values[first:])


def _share_after(run: Run, step: int) -> str:
    """Return a clause with the share of the run's tokens, or of its steps if tokens were not logged, after a step."""
    tokens = run.series("num_tokens")
    if len(tokens) and tokens.values[-1] > 0:
        before = [count for at, count in zip(tokens.steps, tokens.values, strict=True) if at <= step]
        share, of = 1 - (before[-1] if before else 0) / tokens.values[-1], "tokens"
    else:
        share, of = 1 - step / max(run.log.last_step, 1), "steps"
    return f"{share:.0%} of the {of} come after step {step}"


def _first_step(series: Series, is_reached: Callable[[float], bool]) -> int:
    return next(step for step, value in zip(series.steps, series.values, strict=True) if is_reached(value))


def _last_step(series: Series) -> int:
    return series.steps[-1] if len(series) else 0


def _where_answers_are(run: Run, name: str) -> str:
    """Return a clause on where a reward looks for an answer, and where the logged completions state one."""
    for spec in single_specs(run.recipe.get("rewards") or []):
        if name not in (spec.get("alias"), attribute_name(str(spec.get("name")))):
            continue
        with suppress(RewardSpecError):
            reward = judging_reward(spec)
            if reward is not None:
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


def _groups(run: Run) -> pd.DataFrame:
    """Return a table of the logged groups: step, mean reward, spread, size, and whether all texts are identical."""
    grouped = run.rows.groupby(["step", "prompt"], sort=False)
    table = grouped.agg(
        reward=("total", "mean"),
        highest=("total", "max"),
        lowest=("total", "min"),
        texts=("completion", "nunique"),
        size=("completion", "size"),
    ).reset_index()
    table["spread"] = table["highest"] - table["lowest"]
    table["identical"] = (table["texts"] == 1) & (table["size"] > 1)
    return table


def _easy_or_hard(run: Run) -> str:
    """Return a clause on the zero-variance groups: those with a reward in the upper half of the range are easy."""
    groups, totals = _groups(run), run.rows["total"]
    flat = groups[groups["spread"] < 1e-9] if len(groups) else groups
    if not len(flat) or totals.max() - totals.min() < 1e-9:
        return ""
    easy = (flat["reward"] > (totals.max() + totals.min()) / 2).mean()
    return f": of those logged, {easy:.0%} are too easy (all earn much) and {1 - easy:.0%} too hard (all earn little)"


def _weighted_variance(run: Run, reward: RunReward) -> float:
    spread = _logged(run, f"rewards/{reward.name}/std")
    return reward.weight * reward.weight * sum(value * value for value in spread.values) / len(spread)
