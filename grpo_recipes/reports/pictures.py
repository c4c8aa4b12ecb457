"""Charts of a report on one run or several, in four groups: `groups(runs)`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from grpo_recipes.evaluation.estimates import Estimate
from grpo_recipes.reports import charts, diagnostics, tool_checks, update_checks
from grpo_recipes.reports.charts import Band, Chart, Interval, Limit, Line, number
from grpo_recipes.reports.run import Run, RunReward, Series, spread
from grpo_recipes.runs.files import AFTER, BEFORE
from grpo_recipes.tools.metrics import UNKNOWN
from grpo_rewards.errors import shortened

MAX_NAME = 100
MAX_BARS = 8
MAX_LIMITS = 4
MAX_TOOLS = MAX_PASSES = 4
"""Largest number of tools, and of passes, in a chart: one for each kind of dashes."""
BANDS = 24
"""Number of windows of steps in which a band has a value."""
MIN_SCORES = 8
"""Smallest number of completions in such a window."""
LAST_QUARTER = "check of the last quarter:"
"""Label of a threshold that a check compares with the mean of the last quarter, which the legend shows."""
FLAT = 0.002
"""Largest range of a metric that counts as constant, as a share of its largest value: a third of a pixel."""


@dataclass(frozen=True)
class Metric:
    """Chart of one or several logged metrics."""

    title: str
    unit: str
    keys: tuple[tuple[str, str], ...]
    """Keys of the log, each with its label."""
    note: str = ""
    limits: Callable[[Run], Iterable[Limit]] = lambda run: ()
    """Function that returns the thresholds to draw."""


def _length_limits(run: Run) -> Iterator[Limit]:
    if cap := run.config.get("max_completion_length"):
        yield Limit(diagnostics.LENGTH_LIMIT * cap, "check of the last quarter, after growth:")
        yield Limit(cap, "cap:")


def _entropy_limits(run: Run) -> Iterator[Limit]:
    if (entropy := run.series("entropy")).has_trend:
        yield Limit(diagnostics.ENTROPY_LIMIT * entropy.start, LAST_QUARTER)


LEARNT = (Metric("Total reward", "weighted sum", (("reward", "in training"), ("eval_reward", "held out"))),)
TRUSTED = (
    Metric(
        "KL to the reference",
        "nats per token",
        (("kl", "sampled"), ("kl/full", "over the vocabulary")),
        "Distance of the policy from the reference policy.",
        lambda run: [Limit(update_checks.KL_LIMIT, "check of the median of 5:")],
    ),
    Metric(
        "Entropy",
        "nats per token",
        (("entropy", ""),),
        "Uncertainty of the policy about the next token. Near 0 it no longer explores.",
        _entropy_limits,
    ),
    Metric(
        "Completion length",
        "tokens",
        (("completions/mean_length", "mean"), ("completions/max_length", "longest")),
        "",
        _length_limits,
    ),
    Metric(
        "Truncated completions",
        "share of completions",
        (("completions/clipped_ratio", ""),),
        "Cut off at `max_completion_length`. An answer behind the cut is lost.",
        lambda run: [Limit(diagnostics.TRUNCATED_LIMIT, LAST_QUARTER)],
    ),
    Metric(
        "Groups without variance",
        "share of groups",
        (("frac_reward_zero_std", ""),),
        "All completions of the prompt have one reward, so the group has no gradient.",
        lambda run: [
            Limit(diagnostics.FLAT_GROUPS_LIMIT, "check of the mean:"),
            Limit(diagnostics.SATURATED_LIMIT, LAST_QUARTER),
        ],
    ),
    Metric(
        "Clipped tokens",
        "share of tokens",
        (("clip_ratio/region_mean", ""), ("cispo_clip_ratio", "CISPO")),
        "Tokens whose probability has changed too much for the update to count.",
        lambda run: [Limit(update_checks.clipped_limit(run), "check of the mean and the last quarter:")],
    ),
    Metric(
        "Weights that a step changes",
        "share of those sampled",
        (("updates/changed", "changed"), ("updates/expected", "if no update were lost")),
        "In a sample of the trained weights. A gap between the lines is lost to rounding.",
    ),
    Metric(
        "Probabilities in sampling and training",
        "nats per token",
        (("sampling/sampling_logp_difference/mean", "mean"), ("sampling/sampling_logp_difference/max", "largest")),
        "Difference between the log-probabilities of a token in sampling and in training.",
    ),
)
RAN = (
    Metric("Time of a step", "seconds", (("step_time", ""),)),
    Metric("Tokens a second", "prompts and completions", (("tokens per second", ""),)),
    Metric(
        "Efficiency",
        "tokens of a step",
        (("efficiency/tokens_computed", "computed"), ("efficiency/tokens_needed", "needed")),
        "Tokens that the micro-batches computed, padding included, and tokens that the loss needed.",
    ),
    Metric(
        "Prompts generated",
        "share of a generation",
        (("prompts/generated", "generated"), ("prompts/kept_by_floor", "of these, by the floor alone")),
        "With `sampling: informative`. The other prompts had no variance the last times.",
    ),
    Metric("Gradient norm", "before clipping", (("grad_norm", ""),)),
    Metric("Learning rate", "", (("learning_rate", ""),)),
)


TOOLS = (
    Metric("Turns", "per completion", (("tools/turns", ""),)),
    Metric(
        "Calls of tools",
        "per completion",
        (("tools/call_frequency", "all"), (f"tools/{UNKNOWN}/calls", "of unknown names")),
    ),
    Metric("Completions that call a tool", "share of completions", (("tools/rows_with_calls", ""),)),
    Metric(
        "Failed calls",
        "share of calls",
        (("tools/failure_frequency", ""),),
        "Faults of the tools, unknown names, and arguments that don't fit.",
        lambda run: [Limit(tool_checks.FAILED_CALLS_LIMIT, LAST_QUARTER)],
    ),
    Metric(
        "Completions that a limit ended",
        "share of completions",
        (
            ("tools/rows_at_limit", "no turns left"),
            ("tools/rows_out_of_budget", "no tokens left"),
            ("tools/rows_results_dropped", "results dropped"),
        ),
        "`max_tool_calling_iterations` limits the turns, and `max_completion_length` the tokens.",
        lambda run: [Limit(tool_checks.TOOL_LIMITS_LIMIT, "check of the last quarter, summed:")],
    ),
    Metric(
        "Tokens of results",
        "share of completion tokens",
        (("tools/tokens_share", ""),),
        "Results of tools and the template around them are masked and not trained on.",
    ),
)


@dataclass(frozen=True)
class Group:
    """Charts that answer one question."""

    id: str
    title: str
    charts: list[Chart]
    flat: list[str]
    """Metrics that never changed, as text."""

    def __bool__(self) -> bool:
        return bool(self.charts or self.flat)


def groups(runs: Sequence[Run]) -> list[Group]:
    """Return the groups of charts of some runs. All charts have the same horizontal axis and different names."""
    last = max([run.log.last_step for run in runs], default=0)
    names: set[str] = set()
    made = []
    for place, title, parts in (
        (
            "learnt",
            "What was learnt",
            [*_evaluations(runs), *_held_out(runs), *_metrics(runs, LEARNT), *_rewards(runs)],
        ),
        ("trust", "Can I trust it?", [*_metrics(runs, TRUSTED), *_metrics(runs, _by_pass(runs))]),
        ("tools", "How tools were used", [*_metrics(runs, TOOLS), *_metrics(runs, _by_tool(runs))]),
        ("ran", "How it ran", [*_metrics(runs, RAN)]),
    ):
        group = Group(place, title, [], [])
        for part in parts:
            if isinstance(part, str):
                group.flat.append(part)
                continue
            name, copies = part.name, 1
            while name in names:  # titles that differ only in characters that a file name can't have
                copies += 1
                name = f"{part.name}-{copies}"
            names.add(name)
            group.charts.append(replace(part, name=name, steps=(0, max(1, last))))
        made.append(group)
    return made


def _metrics(runs: Sequence[Run], metrics: Iterable[Metric]) -> Iterator[Chart | str]:
    """Yield a chart for each logged metric, or a text if it never changed."""
    for metric in metrics:
        lines: list[Line] = []
        series: list[Series] = []
        for hue, run in enumerate(runs):
            for dash, (key, label) in enumerate(metric.keys):
                found = tokens_per_second(run) if key == "tokens per second" else run.series(key)
                if len(found):
                    lines.append(Line(found.steps, found.values, label, hue, dash))
                    series.append(found)
        if not lines:
            continue
        is_labelled = len({line.dash for line in lines}) > 1
        lines = [replace(line, label=_label(runs, line.hue, line.label if is_labelled else "")) for line in lines]
        limits = dict.fromkeys(limit for run in runs for limit in metric.limits(run))
        chart = Chart(
            _file_name(metric.title),
            metric.title,
            metric.unit,
            metric.note,
            lines,
            limits=list(limits)[:MAX_LIMITS],
        )
        yield _with_legend(chart, series)


def _by_pass(runs: Sequence[Run]) -> Iterator[Metric]:
    """Yield the effective sample size of each pass over a generation, of at most `MAX_PASSES` passes."""
    numbers = sorted({number for run in runs for number in update_checks.passes(run, "effective_sample_size")})
    keys = [(f"passes/{number}/effective_sample_size", f"pass {number}") for number in spread(numbers, MAX_PASSES)]
    yield Metric(
        "Effective sample size",
        "share of tokens",
        tuple(keys),
        "Of the importance weights in each pass over a generation. It falls as the tokens become stale.",
        lambda run: [Limit(update_checks.SAMPLE_SIZE_LIMIT, LAST_QUARTER)],
    )


def _by_tool(runs: Sequence[Run]) -> Iterator[Metric]:
    """Yield the metrics that are logged for each tool, with a line for each of the tools called most."""
    calls = dict.fromkeys((tool for run in runs for tool in tool_checks.tools(run)), 0.0)
    for run in runs:
        for tool in tool_checks.tools(run):
            calls[tool] += math.fsum(run.series(f"tools/{tool}/calls").values)
    names = sorted(calls, key=lambda tool: -calls[tool])[:MAX_TOOLS]
    note = f"The {MAX_TOOLS} tools called most, of {len(calls)}." if len(calls) > MAX_TOOLS else ""
    for title, unit, key in (
        ("Calls", "per completion that has the tool", "calls"),
        ("Faults", "share of its calls", "failures"),
        ("Calls that don't fit", "share of its calls", "refused"),
        ("Time of a call", "seconds", "seconds"),
    ):
        keys = [(f"tools/{tool}/{key}", tool) for tool in names]
        logged = [(key, tool) for key, tool in keys if any(len(run.series(key)) for run in runs)]
        # A chart with one line has no label.
        of = f"of {shortened(logged[0][1])}" if len(logged) == 1 else "by tool"
        yield Metric(f"{title} {of}", unit, tuple(logged), note)


def _rewards(runs: Sequence[Run]) -> Iterator[Chart | str]:
    """Yield a chart for each reward with its mean, the middle half of its scores, and its highest score."""
    by_name: dict[str, list[tuple[int, RunReward, Series]]] = {}
    for hue, run in enumerate(runs):
        for reward, means in run.parts():
            if len(means):
                by_name.setdefault(reward.name, []).append((hue, reward, means))
    for name, logged in by_name.items():
        lines, bands, highest = [], [], []
        for hue, reward, means in logged:
            lines.append(Line(means.steps, means.values, _label(runs, hue), hue))
            if reward.highest_pay is not None:
                highest.append(reward.highest_pay)
            band = _band(runs[hue], reward, hue) if len(runs) <= 2 else None
            if band is not None:
                bands.append(band)
        chart = Chart(
            _file_name(f"reward {name}"),
            f"Reward {name}",
            f"of at most {number(max(highest))}" if highest else "",
            "Shaded: the middle half of the completions." if bands else "",
            lines,
            bands,
            range=(0.0, max(highest)) if highest else None,
        )
        yield _with_legend(chart, [means for _, _, means in logged])


def _band(run: Run, reward: RunReward, hue: int) -> Band | None:
    """Return the quartiles of a reward's scores in windows of steps, or None if it has only two different scores."""
    column = f"pay/{reward.name}"
    if column not in run.rows:
        return None
    scores = run.rows[["step", column]].dropna()
    if scores[column].nunique() <= 2:
        return None
    band = Band([], [], [], hue)
    for window in np.array_split(np.unique(scores["step"]), min(BANDS, scores["step"].nunique())):
        part = scores[scores["step"].between(window[0], window[-1])]
        if len(part) >= MIN_SCORES:
            band.steps.append(float(part["step"].mean()))
            band.low.append(float(part[column].quantile(0.25)))
            band.high.append(float(part[column].quantile(0.75)))
    return band if len(band.steps) >= 2 else None


def _evaluations(runs: Sequence[Run]) -> Iterator[Chart]:
    """Yield a chart of the accuracy on held-out problems, if it was measured."""
    bars = []
    for hue, run in enumerate(runs):
        for label, evaluation in labelled(run):
            for name in ("strict", "lenient"):
                if name in evaluation:
                    words = f"{_label(runs, hue)} {label}, {name}".strip()
                    bars.append(Interval(words, Estimate.from_dict(evaluation[name]), hue, name == "strict"))
    if len(bars) > MAX_BARS:
        bars = [bar for bar in bars if bar.is_filled]
    if bars:
        note = "Filled: right and in the required format. Outlined: right in any format. Whiskers: 95 % intervals."
        yield Chart("evaluation", "Accuracy on held-out problems", "share right", note, bars=bars)


def _held_out(runs: Sequence[Run]) -> Iterator[Chart | str]:
    """Yield a chart of the accuracy in evaluations during training, if there were any."""
    series, lines, points = [], [], []
    for hue, run in enumerate(runs):
        if accuracy := run.held_out_accuracy():
            shares = Series([step for step, _ in accuracy], [share.value for _, share in accuracy])
            series.append(shares)
            lines.append(Line(shares.steps, shares.values, _label(runs, hue), hue))
            points += [(hue, step, share) for step, share in accuracy]
    if lines:
        chart = Chart(
            "held-out-accuracy",
            "Accuracy on the held-out split while training",
            "share right",
            "Completions that pass a correctness reward. Whiskers: 95 % intervals.",
            lines,
            points=points,
        )
        yield _with_legend(chart, series)


def labelled(run: Run) -> list[tuple[str, Mapping[str, Any]]]:
    """Return a run's evaluations with their names: before training, others by name, after training."""
    order = {BEFORE: 0, AFTER: 2}
    return sorted(run.evaluations.items(), key=lambda item: (order.get(item[0], 1), item[0]))


def tokens_per_second(run: Run) -> Series:
    """Return the tokens of prompts and completions per second of step time, between neighbouring log entries."""
    tokens, times = run.series("num_tokens"), run.series("step_time")
    rates = Series([], [])
    if tokens.steps != times.steps:
        return rates
    for place in range(1, len(tokens)):
        seconds = (tokens.steps[place] - tokens.steps[place - 1]) * times.values[place]
        rate = (tokens.values[place] - tokens.values[place - 1]) / seconds if seconds > 0 else 0.0
        if 0 < rate < charts.LARGEST_DRAWN:
            rates.steps.append(tokens.steps[place])
            rates.values.append(rate)
    return rates


def _is_flat(series: Series) -> bool:
    """Return True if a line looks constant. The vertical axis begins at 0."""
    largest = max(abs(value) for value in series.values)
    # Halves, because the difference of the largest floats overflows.
    return max(series.values) / 2 - min(series.values) / 2 <= FLAT * largest / 2


def _with_legend(chart: Chart, series: Sequence[Series]) -> Chart | str:
    """Return a chart with the means of both ends of each line and their steps, or a text if no line ever changes."""
    if all(map(_is_flat, series)):
        values = ", ".join(dict.fromkeys(chart.format(one.values[0]) for one in series))
        return f"{chart.title} {values}" if chart.is_share else f"{chart.title} {values} {chart.unit}".rstrip()
    legend = []
    for line, one in zip(chart.lines, series, strict=True):
        first, last = chart.format(one.start), chart.format(one.end)
        values = last if len(one) == 1 else f"{first} → {last}, {one.quarters}"
        legend.append((line.style, line.label, values))
    return replace(chart, legend=legend)


def _label(runs: Sequence[Run], hue: int, label: str = "") -> str:
    """Return the label of a line: the run's name if there are several runs, and the metric's label."""
    name = runs[hue].name if len(runs) > 1 else ""
    return ", ".join(filter(None, [name, label]))


def _file_name(title: str) -> str:
    return shortened("".join(character if character.isalnum() else "-" for character in title.lower()), MAX_NAME)
