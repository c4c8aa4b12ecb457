"""Which pictures a report shows of one run or of several, in three groups: `groups(runs)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from grpo_recipes.evaluation.estimates import Estimate
from grpo_recipes.reports import charts, diagnostics
from grpo_recipes.reports.charts import Band, Chart, Interval, Limit, Line, number, percent
from grpo_recipes.reports.run import Run, RunReward, Series
from grpo_recipes.runs.files import AFTER, BEFORE
from grpo_rewards.errors import shortened

MAX_NAME = 100
BANDS = 24  # windows of steps that a band has a value for
LEAST_PAID = 8  # completions in such a window
FLAT = 0.002  # of the largest value


@dataclass(frozen=True)
class Metric:
    """A row of the table below: a picture's title and unit, and the logged keys that share it, each with its label."""

    title: str
    unit: str
    keys: tuple[tuple[str, str], ...]
    note: str = ""
    limits: Callable[[Run], Iterable[Limit]] = lambda run: ()


def _length_limits(run: Run) -> Iterator[Limit]:
    if cap := run.config.get("max_completion_length"):
        yield Limit(diagnostics.LENGTH_LIMIT * cap, "check:")
        yield Limit(cap, "cap:")


def _entropy_limits(run: Run) -> Iterator[Limit]:
    if (entropy := run.series("entropy")).has_trend:
        yield Limit(diagnostics.ENTROPY_LIMIT * entropy.start, "check:")


LEARNT = (Metric("Total reward", "weighted sum", (("reward", "in training"), ("eval_reward", "held out"))),)
TRUSTED = (
    Metric(
        "KL to the reference",
        "nats per token",
        (("kl", "sampled"), ("kl/full", "over the vocabulary")),
        "How far the policy has moved from the reference policy.",
        lambda run: [Limit(diagnostics.KL_LIMIT, "check:")],
    ),
    Metric(
        "Entropy",
        "nats per token",
        (("entropy", ""),),
        "How undecided the policy is about the next token; near 0 it explores no more.",
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
        "Cut off at `max_completion_length`: an answer further on is lost.",
        lambda run: [Limit(diagnostics.TRUNCATED_LIMIT, "check:")],
    ),
    Metric(
        "Groups without variance",
        "share of groups",
        (("frac_reward_zero_std", ""),),
        "All completions of the prompt earn the same: nothing to learn from.",
        lambda run: [Limit(diagnostics.FLAT_GROUPS_LIMIT, "check:")],
    ),
    Metric(
        "Clipped tokens",
        "share of tokens",
        (("clip_ratio/region_mean", ""), ("cispo_clip_ratio", "CISPO")),
        "Whose probability had moved too far for the update to count.",
    ),
    Metric(
        "Weights that a step changes",
        "share of those sampled",
        (("updates/changed", "changed"), ("updates/expected", "if no update were lost")),
        "Of a sample of the trained weights: a gap between the lines is lost to rounding.",
    ),
    Metric(
        "Probabilities in sampling and training",
        "nats per token",
        (("sampling/sampling_logp_difference/mean", "mean"), ("sampling/sampling_logp_difference/max", "largest")),
        "Difference of the log-probabilities by which a token was sampled and trained on.",
    ),
)
RAN = (
    Metric("Time of a step", "seconds", (("step_time", ""),)),
    Metric("Tokens a second", "prompts and completions", (("tokens per second", ""),)),
    Metric(
        "Efficiency",
        "tokens of a step",
        (("efficiency/tokens_computed", "computed"), ("efficiency/tokens_needed", "needed")),
        "What the micro-batches computed, padding included, and what the loss needed.",
    ),
    Metric(
        "Prompts generated",
        "share of a generation",
        (("prompts/generated", "generated"), ("prompts/kept_by_floor", "of these, by the floor alone")),
        "With `sampling: informative`: the others had no variance the last times.",
    ),
    Metric("Gradient norm", "before clipping", (("grad_norm", ""),)),
    Metric("Learning rate", "", (("learning_rate", ""),)),
)


@dataclass(frozen=True)
class Group:
    """Pictures that answer one question, and in a line of text those metrics that never changed."""

    id: str
    title: str
    charts: list[Chart]
    flat: list[str]

    def __bool__(self) -> bool:
        return bool(self.charts or self.flat)


def groups(runs: Sequence[Run]) -> list[Group]:
    """The groups of pictures for which one of the runs logged something; all have one horizontal axis and other names."""
    last = max([run.log.last_step for run in runs], default=0)
    steps = (0, max(1, last))
    names: set[str] = set()
    made = []
    for place, title, parts in (
        (
            "learnt",
            "What was learnt",
            [*_evaluations(runs), *_held_out(runs), *_metrics(runs, LEARNT), *_rewards(runs)],
        ),
        ("trust", "Can I trust it?", [*_metrics(runs, TRUSTED)]),
        ("ran", "How it ran", [*_metrics(runs, RAN)]),
    ):
        drawn = []
        for chart in (part for part in parts if isinstance(part, Chart)):
            name = next(name for name in _numbered(chart.name) if name not in names)
            names.add(name)
            drawn.append(replace(chart, name=name, steps=steps))
        made.append(Group(place, title, drawn, [part for part in parts if isinstance(part, str)]))
    return made


def _metrics(runs: Sequence[Run], table: Iterable[Metric]) -> Iterator[Chart | str]:
    """A picture for each metric, or a few words if it never changed."""
    for metric in table:
        drawn = [
            (hue, dash, label, series)
            for hue, run in enumerate(runs)
            for dash, (key, label) in enumerate(metric.keys)
            if len(series := _series(run, key))
        ]
        if not drawn:
            continue
        if all(_is_flat(series) for *_, series in drawn):
            yield _flat(metric.title, metric.unit, [series for *_, series in drawn])
            continue
        several = len({dash for _, dash, *_ in drawn}) > 1
        limits = [limit for run in runs for limit in metric.limits(run)]
        share = metric.unit.startswith("share")
        lines = [
            Line(series.steps, series.values, _named(runs, hue, label if several else ""), hue, dash)
            for hue, dash, label, series in drawn
        ]
        yield Chart(
            _file_name(metric.title),
            metric.title,
            metric.unit,
            metric.note,
            lines,
            limits=list(dict.fromkeys(limits))[:4],
            legend=[
                (line.style, line.label, _change(series, share))
                for line, (*_, series) in zip(lines, drawn, strict=True)
            ],
        )


def _rewards(runs: Sequence[Run]) -> Iterator[Chart | str]:
    """A picture for each reward: its mean, the middle half of what single completions earned, and the most that it pays."""
    means = [
        (hue, run, reward, series) for hue, run in enumerate(runs) for reward, series in run.parts() if len(series)
    ]
    for name in dict.fromkeys(reward.name for _, _, reward, _ in means):
        here = [(hue, run, reward, series) for hue, run, reward, series in means if reward.name == name]
        title = f"Reward {name}"
        if all(_is_flat(series) for *_, series in here):
            yield _flat(title, "", [series for *_, series in here])
            continue
        lines = [Line(series.steps, series.values, _named(runs, hue), hue) for hue, _, _, series in here]
        most = {reward.highest_pay for _, _, reward, _ in here if reward.highest_pay is not None}
        bands = [band for hue, run, reward, _ in here if len(runs) <= 2 and (band := _band(run, reward, hue))]
        ends = (0.0, max(most)) if most else None
        yield Chart(
            _file_name(f"reward {name}"),
            title,
            f"of at most {number(max(most))}" if most else "",
            "Shaded: the middle half of the completions." if bands else "",
            lines,
            bands,
            range=ends,
            legend=[(line.style, line.label, _change(series)) for line, (*_, series) in zip(lines, here, strict=True)],
        )


def _band(run: Run, reward: RunReward, hue: int) -> Band | None:
    """The quartiles of what completions earned, in windows of steps; none for a reward that pays one of two amounts."""
    column = f"pay/{reward.name}"
    if column not in run.rows:
        return None
    paid = run.rows[["step", column]].dropna()
    if paid[column].nunique() <= 2:
        return None
    windows = np.array_split(np.unique(paid["step"]), min(BANDS, paid["step"].nunique()))
    parts = [paid[paid["step"].between(window[0], window[-1])] for window in windows if len(window)]
    parts = [part for part in parts if len(part) >= LEAST_PAID]
    if len(parts) < 2:
        return None
    low, high = ([float(part[column].quantile(share)) for part in parts] for share in (0.25, 0.75))
    return Band([float(part["step"].mean()) for part in parts], low, high, hue)


def _evaluations(runs: Sequence[Run]) -> Iterator[Chart]:
    bars = [
        Interval(
            f"{_named(runs, hue)} {label}, {name}".strip(), Estimate.from_dict(evaluation[name]), hue, name == "strict"
        )
        for hue, run in enumerate(runs)
        for label, evaluation in labelled(run)
        for name in ("strict", "lenient")
        if name in evaluation
    ]
    if len(bars) > 8:  # of many runs, what each began and ended with
        bars = [bar for bar in bars if bar.whole]
    if bars:
        note = "Filled: right and in the asked format. Outlined: right in any format. Whiskers: 95 % intervals."
        yield Chart("evaluation", "Accuracy on held-out problems", "share right", note, bars=bars)


def _held_out(runs: Sequence[Run]) -> Iterator[Chart]:
    accuracies = [(hue, run.held_out_accuracy()) for hue, run in enumerate(runs)]
    measured = [(hue, accuracy) for hue, accuracy in accuracies if accuracy]
    if measured:
        lines = [
            Line([step for step, _ in accuracy], [share.value for _, share in accuracy], _named(runs, hue), hue)
            for hue, accuracy in measured
        ]
        yield Chart(
            "held-out-accuracy",
            "Accuracy on the held-out split while training",
            "share right",
            "Completions that a correctness reward paid. Whiskers: 95 % intervals.",
            lines,
            points=[(hue, step, share) for hue, accuracy in measured for step, share in accuracy],
            legend=[
                (line.style, line.label, f"{percent(line.values[0])} → {percent(line.values[-1])}") for line in lines
            ],
        )


def labelled(run: Run) -> list[tuple[str, Mapping[str, Any]]]:
    """A run's evaluations: before, others by name, after."""
    order = {BEFORE: 0, AFTER: 2}
    return sorted(run.evaluations.items(), key=lambda item: (order.get(item[0], 1), item[0]))


def _series(run: Run, key: str) -> Series:
    return tokens_per_second(run) if key == "tokens per second" else run.series(key)


def tokens_per_second(run: Run) -> Series:
    """What was prompted and sampled, over the time of the steps, from one logged point to the next."""
    tokens, times = run.series("num_tokens"), run.series("step_time")
    if tokens.steps != times.steps or len(tokens) < 2:
        return Series([], [])
    rates = [
        (tokens.steps[place], (tokens.values[place] - tokens.values[place - 1]) / (span * times.values[place]))
        for place in range(1, len(tokens))
        if (span := tokens.steps[place] - tokens.steps[place - 1]) > 0 and times.values[place] > 0
    ]
    rates = [(step, rate) for step, rate in rates if 0 < rate < charts.LARGEST_DRAWN]
    return Series([step for step, _ in rates], [rate for _, rate in rates])


def _is_flat(series: Series) -> bool:
    """Whether a line would be flat to the eye: within a third of a pixel, as the axis begins at 0."""
    most = max(abs(value) for value in series.values)
    return max(series.values) / 2 - min(series.values) / 2 <= FLAT * most / 2


def _flat(title: str, unit: str, drawn: Sequence[Series]) -> str:
    share = unit.startswith("share")
    values = dict.fromkeys((percent if share else number)(series.values[0]) for series in drawn)
    return f"{title} {', '.join(values)}" + (f" {unit}" if unit and not share else "")


def _change(series: Series, share: bool = False) -> str:
    """Where a metric began and where it ended: the means of its first and last quarter, or the only value."""
    write = percent if share else number
    return write(series.end) if len(series) == 1 else f"{write(series.start)} → {write(series.end)}"


def _named(runs: Sequence[Run], hue: int, label: str = "") -> str:
    """A line's label: the run's name if there are several, and the metric's if there are several."""
    return ", ".join(filter(None, [runs[hue].name if len(runs) > 1 else "", label]))


def _numbered(name: str) -> Iterator[str]:
    """A name, and others for pictures whose titles differ in no letter."""
    yield name
    yield from (f"{name}-{place}" for place in count(2))


def _file_name(title: str) -> str:
    return shortened("".join(character if character.isalnum() else "-" for character in title.lower()), MAX_NAME)
