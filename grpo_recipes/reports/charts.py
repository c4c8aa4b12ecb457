"""Charts of a report: a table of the metrics that are drawn, and a writer of lines over optimizer steps.

Colours and dashes are CSS classes of `templates/chart.css`. A run has a colour, and a metric has dashes. The thresholds
of the checks are drawn as dashed lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from grpo_recipes.evaluation.estimates import Estimate
from grpo_recipes.reports import progress_checks, reward_checks, tool_checks, update_checks
from grpo_recipes.reports.run import Run, Series, spread
from grpo_recipes.tools import UNKNOWN
from grpo_rewards.errors import shortened
from grpo_rewards.terminal import visible

WIDTH, HEIGHT = 360.0, 184.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 350.0, 10.0, 160.0
"""Edges of the area of the lines."""
HUES, DASHES = 6, 4
SMOOTHED = 60
"""Number of points above which a line is thin. A thick one then goes through the means of as many equal parts."""
MAX_POINTS = 600
LARGEST_DRAWN = 1e100


class Metric(NamedTuple):
    """Logged metrics that share a chart.

    `keys` has the keys of the log, each with its label. A `*` in a key stands for the name of each pass or tool, and
    `{}` in the label for the same name.
    """

    section: str
    title: str
    unit: str
    keys: Mapping[str, str]


SECTIONS = {
    "learnt": "What was learnt",
    "trust": "Can I trust it?",
    "tools": "How tools were used",
    "ran": "How it ran",
}
ACCURACY, IN_TRAINING = "Accuracy on held-out problems", "Accuracy on the held-out split while training"
LIMITS = {"tools/rows_at_limit": "no turns left", "tools/rows_out_of_budget": "no tokens left"}
LOGP, EFFICIENCY = "sampling/sampling_logp_difference", "efficiency/tokens_"
METRICS = (
    Metric("learnt", "Total reward", "weighted sum", {"reward": "in training", "eval_reward": "held out"}),
    Metric("trust", "KL to the reference", "nats per token", {"kl": "sampled", "kl/full": "over the vocabulary"}),
    Metric("trust", "Entropy", "nats per token", {"entropy": ""}),
    Metric("trust", "Length", "tokens", {"completions/mean_length": "mean", "completions/max_length": "longest"}),
    Metric("trust", "Truncated completions", "share of completions", {"completions/clipped_ratio": ""}),
    Metric("trust", "Groups without variance", "share of groups", {"frac_reward_zero_std": ""}),
    Metric("trust", "Clipped tokens", "share of tokens", {"clip_ratio/region_mean": "", "cispo_clip_ratio": "CISPO"}),
    Metric("trust", "Weights that a step changes", "share", {"updates/changed": "", "updates/expected": "expected"}),
    Metric("trust", "Generator–trainer mismatch", "nats", {f"{LOGP}/mean": "mean", f"{LOGP}/max": "largest"}),
    Metric("trust", "Effective sample size", "share of tokens", {"passes/*/effective_sample_size": "pass {}"}),
    Metric("tools", "Calls", "per completion", {"tools/call_frequency": "", f"tools/{UNKNOWN}/calls": "unknown names"}),
    Metric("tools", "Failed calls", "share of calls", {"tools/failure_frequency": ""}),
    Metric("tools", "Completions that a limit ended", "share of completions", LIMITS),
    Metric("tools", "Faults by tool", "share of its calls", {"tools/*/failures": "{}"}),
    Metric("tools", "Mistakes of the policy, by tool", "share of its calls", {"tools/*/mistakes": "{}"}),
    Metric("ran", "Time of a step", "seconds", {"step_time": ""}),
    Metric("ran", "Tokens of a step", "", {f"{EFFICIENCY}computed": "computed", f"{EFFICIENCY}needed": "needed"}),
    Metric("ran", "Prompts", "share", {"prompts/generated": "generated", "prompts/kept_by_floor": "by the floor"}),
    Metric("ran", "Gradient norm", "before clipping", {"grad_norm": ""}),
    Metric("ran", "Learning rate", "", {"learning_rate": ""}),
)


def thresholds(run: Run) -> list[tuple[str, str, float]]:
    """Return the thresholds of the checks: the key of the log, the figure that is compared, and the value."""
    last, clipped = "check of the last quarter:", update_checks.clipped_limit(run)
    limits = [
        ("kl", "check of the median of 5:", update_checks.KL_LIMIT),
        ("completions/clipped_ratio", last, progress_checks.TRUNCATED_LIMIT),
        ("frac_reward_zero_std", "check of the mean:", reward_checks.FLAT_GROUPS_LIMIT),
        ("frac_reward_zero_std", last, reward_checks.SATURATED_LIMIT),
        ("clip_ratio/region_mean", "check of the mean and the last quarter:", clipped),
        ("cispo_clip_ratio", "check of the mean and the last quarter:", clipped),
        ("passes/*/effective_sample_size", last, update_checks.SAMPLE_SIZE_LIMIT),
        ("tools/failure_frequency", last, tool_checks.FAILED_CALLS_LIMIT),
        ("tools/rows_at_limit", "check of the last quarter, summed:", tool_checks.TOOL_LIMITS_LIMIT),
    ]
    if (entropy := run.series("entropy")).has_trend:
        limits.append(("entropy", last, progress_checks.ENTROPY_LIMIT * entropy.start))
    if cap := run.config.get("max_completion_length"):
        grown = "check of the last quarter, after growth:"
        limits.append(("completions/mean_length", grown, progress_checks.LENGTH_LIMIT * cap))
    return limits


@dataclass(frozen=True)
class Line:
    """Series in a chart, with CSS classes of its colour and dashes, and perhaps an interval for each point."""

    series: Series
    label: str
    style: str
    intervals: Sequence[Estimate] = ()


@dataclass(frozen=True)
class Chart:
    """Chart of lines over optimizer steps."""

    title: str
    unit: str = ""
    note: str = ""
    lines: Sequence[Line] = ()
    limits: Sequence[tuple[str, float]] = ()
    """Thresholds, each with its label."""
    last_step: int = 1

    @property
    def is_share(self) -> bool:
        """True if the values are shares of 1."""
        return self.unit.startswith("share")

    def shown(self, value: float) -> str:
        """Return a value as text."""
        return percent(value) if self.is_share else number(value)

    @property
    def legend(self) -> list[tuple[Line, str]]:
        """Lines, each with the means of its first and its last quarter and their steps."""
        legend = []
        for line in self.lines:
            first, last = self.shown(line.series.start), self.shown(line.series.end)
            legend.append((line, last if len(line.series) == 1 else f"{first} → {last}, {line.series.quarters}"))
        return legend

    def svg(self, style: str = "") -> Markup:
        """Return the chart for a page that has its CSS, or for a file of its own, into which the CSS is copied."""
        drawn = Markup("").join(_lines(self))
        label = f"Chart over optimizer steps: {self.title} {self.unit}"
        size: dict[str, Any] = {"viewBox": f"0 0 {WIDTH:g} {HEIGHT:g}", "role": "img", "aria_label": label}
        if style:
            size |= {"xmlns": "http://www.w3.org/2000/svg", "width": WIDTH, "height": HEIGHT}
            drawn = element("style", Markup(style)) + drawn
        return element("svg", drawn, class_="chart", **size)


@dataclass(frozen=True)
class Section:
    """Charts that answer one question."""

    id: str
    title: str
    charts: list[Chart]


def sections(runs: Sequence[Run]) -> list[Section]:
    """Return the charts of some runs, by the question that they answer. A page has evaluations under the first one."""
    last_step = max([1, *(run.log.last_step for run in runs)])
    found = []
    for name, title in SECTIONS.items():
        charts = [chart for metric in METRICS if metric.section == name for chart in _metric(runs, metric)]
        if name == "learnt":
            charts = [*_accuracy(runs), *charts, *_rewards(runs)]
        if charts or (name == "learnt" and any(run.evaluations for run in runs)):
            found.append(Section(name, title, [replace(chart, last_step=last_step) for chart in charts]))
    return found


def _metric(runs: Sequence[Run], metric: Metric) -> Iterator[Chart]:
    """Yield the chart of a metric, if it was logged. Of many passes or tools, a few are drawn."""
    keys: dict[str, str] = {}
    note = ""
    for pattern, label in metric.keys.items():
        logged = _logged(runs, pattern)
        keys |= {key: label.format(logged[key]) for key in spread(list(logged), DASHES)}
        if len(logged) > DASHES:
            note = f"{DASHES} of {len(logged)} are drawn."
    lines = []
    for hue, run in enumerate(runs):
        for dash, (key, label) in enumerate(keys.items()):
            if len(series := run.series(key)):
                lines.append(Line(series, _label(runs, hue, label), f"c{hue % HUES} d{dash}"))
    limits = [(label, value) for run in runs for key, label, value in thresholds(run) if key in metric.keys]
    if lines:
        yield Chart(metric.title, metric.unit, note, lines, list(dict.fromkeys(limits)))


def _logged(runs: Sequence[Run], pattern: str) -> dict[str, str]:
    """Return the logged keys of a pattern, each with the pass or tool that its `*` stands for."""
    wanted = re.compile(re.escape(pattern).replace(r"\*", f"(?!{UNKNOWN}/)([^/]+)"))
    found = {}
    for run in runs:
        for key in run.logged(pattern.partition("*")[0]):
            if (match := wanted.fullmatch(key)) and len(run.series(key)):
                found[key] = "".join(match.groups())
    return found


def _rewards(runs: Sequence[Run]) -> Iterator[Chart]:
    """Yield a chart of the mean of each reward."""
    lines: dict[str, list[Line]] = {}
    for hue, run in enumerate(runs):
        for reward, means in run.parts():
            if len(means):
                lines.setdefault(reward.name, []).append(Line(means, _label(runs, hue), f"c{hue % HUES} d0"))
    for name, drawn in lines.items():
        yield Chart(f"Reward {shortened(name)}", lines=drawn)


def _accuracy(runs: Sequence[Run]) -> Iterator[Chart]:
    """Yield a chart of the accuracy before and after training, and one of the accuracy in evaluations during it."""
    strict, passing = "Right and in the required format.", "Completions that pass a correctness reward."
    measured = {(ACCURACY, strict): Run.strict_accuracy, (IN_TRAINING, passing): Run.held_out_accuracy}
    for (title, note), shares_of in measured.items():
        lines = []
        for hue, run in enumerate(runs):
            if shares := shares_of(run):
                series = Series([step for step, _ in shares], [share.value for _, share in shares])
                lines.append(Line(series, _label(runs, hue), f"c{hue % HUES} d0", [share for _, share in shares]))
        if lines:
            yield Chart(title, "share right", f"{note} Whiskers: 95 % intervals.", lines)


def _label(runs: Sequence[Run], hue: int, label: str = "") -> str:
    """Return the label of a line: the run's name if there are several runs, and the metric's label."""
    return ", ".join(filter(None, [runs[hue].name if len(runs) > 1 else "", label]))


# The writer


def element(tag: str, content: object = "", **attributes: object) -> Markup:
    """Return an SVG element. Whatever is not `Markup` is escaped, and coordinates have one decimal."""
    written = Markup("")
    for name, value in attributes.items():
        text = f"{value:.1f}" if isinstance(value, float) else visible(value)
        written += Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), text)
    inner = content if isinstance(content, Markup) else visible(content)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(tag), written, inner)


def _lines(chart: Chart) -> Iterator[Markup]:
    low, high = _vertical(chart)

    def across(step: float) -> float:
        return _scaled(step / chart.last_step, LEFT + 4, RIGHT - 4)

    def up(value: float) -> float:
        return _scaled((value - low) / (high - low), BOTTOM, TOP)

    for tick in ticks(low, high):
        yield _rule(LEFT, up(tick), RIGHT, up(tick), "grid")
        # `percent` rounds more coarsely than the distance of ticks below 0.1 %.
        yield _text(LEFT - 6, up(tick) + 4, f"{number(100 * tick)} %" if chart.is_share else number(tick), "end")
    for tick in ticks(0, chart.last_step):
        if tick.is_integer():
            yield _text(across(tick), HEIGHT - 8, f"{tick:,.0f}", "middle" if tick else "start")
    yield _text(LEFT - 6, HEIGHT - 8, "step", "end")
    for line in chart.lines:
        yield element("g", Markup("").join(_line(line, across, up)), class_=line.style.split()[0])
    for label, value in chart.limits:
        y, note = up(value), f"{label} {chart.shown(value)}"
        if low <= value <= high:
            yield _rule(LEFT, y, RIGHT, y, "limit")
            yield _text(RIGHT, y - 4 if y > TOP + 14 else y + 12, note, "end", "limit")
        else:
            place = (TOP + 2, f"↑ {note}") if value > high else (BOTTOM - 4, f"↓ {note}")
            yield _text(RIGHT, *place, "end", "limit")


def _line(line: Line, across: Callable[[float], float], up: Callable[[float], float]) -> Iterator[Markup]:
    """Yield a line through its points, or a thin one and the means of its parts, and its intervals."""
    steps, values = np.array(line.series.steps), np.array(line.series.values)

    def polyline(steps: Iterable[float], values: Iterable[float], style: str) -> Markup:
        points = " ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in zip(steps, values, strict=True))
        return element("polyline", class_=style, points=points)

    is_smoothed = len(values) > SMOOTHED
    kept = envelope(values)
    yield polyline(steps[kept], values[kept], "raw" if is_smoothed else line.style)
    if is_smoothed:
        middles = [part.mean() for part in np.array_split(steps, SMOOTHED)]
        means = [part.mean() for part in np.array_split(values, SMOOTHED)]
        yield polyline(middles, means, line.style)
    if len(values) == 1:  # a polyline of one point is invisible
        yield element("circle", cx=across(steps[0]), cy=up(values[0]), r=2.5)
    for step, share in zip(line.series.steps, line.intervals, strict=False):
        yield _rule(across(step), up(share.low), across(step), up(share.high), "whisker")


def _rule(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    return element("line", class_=style, x1=x1, y1=y1, x2=x2, y2=y2)


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> Markup:
    return element("text", text, class_=style, x=x, y=y, text_anchor=anchor)


def _vertical(chart: Chart) -> tuple[float, float]:
    """Return the ends of the vertical axis: all values and intervals, and thresholds up to twice as far away."""
    values: list[float] = []
    for line in chart.lines:
        values += line.series.values
        values += [end for share in line.intervals for end in (share.low, share.high)]
    # The largest floats would overflow in a product.
    low, high = max(min(values), -LARGEST_DRAWN), min(max(values), LARGEST_DRAWN)
    if low >= 0:  # a value that halves should look so
        low = 0.0
    for _, limit in chart.limits:
        if high < limit <= 2 * high:
            high = limit * 1.02
    if high - low < 1e-12 * max(1e-300, abs(high)):
        high = low + (abs(low) or 1.0)
    # Outwards to the next ticks.
    step = _step(low, high)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def envelope(values: np.ndarray, most: int = MAX_POINTS) -> np.ndarray:
    """Return the indices of the points to draw, in order.

    These are all points, or the lowest and the highest of each of `most / 2` equal parts. A chart is a few hundred
    pixels wide, so a line through these points covers the same pixels as one through all points.
    """
    if len(values) <= most:
        return np.arange(len(values))
    kept = [0, len(values) - 1]
    for part in np.array_split(np.arange(len(values)), most // 2):
        kept += [part[values[part].argmin()], part[values[part].argmax()]]
    return np.unique(kept)


def ticks(low: float, high: float) -> list[float]:
    """Return about four round values in [low, high]."""
    step = _step(low, high)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def _step(low: float, high: float) -> float:
    rough = max(high - low, 1e-300) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def _scaled(share: float, start: float, end: float) -> float:
    """Return the place at a share of the way from `start` to `end`, at most a little outside."""
    return start + (end - start) * float(np.clip(share, -0.05, 1.05))


def number(value: float) -> str:
    """Return a number in few characters: 1.25k; 3.4M; 0.013; 1e-05."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if unit <= abs(value) < 1e12:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"


def percent(value: float) -> str:
    """Return a share in percent, with a decimal only if it is small."""
    points = 100 * value
    decimals = 0 if abs(points) >= 10 or abs(points - round(points)) < 0.005 else 1
    return f"{points:z.{decimals}f} %"  # z: no -0


def duration(seconds: float) -> str:
    """Return a time in one or two units: 0.094 s; 9.9 s; 3 min 20 s; 49 h 2 min."""
    if seconds < 59.5:
        return f"{seconds:.2g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"
