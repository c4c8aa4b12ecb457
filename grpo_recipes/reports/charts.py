"""Pictures as SVG: lines over optimiser steps, bands, the checks' thresholds, and shares with their intervals.

A picture is about as wide as a phone, so that it is never scaled down until its text can't be read. Its colours are the
page's; `standalone` gives it a title, a legend and colours of its own, light and dark, for a file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from markupsafe import Markup, escape

from grpo_recipes.evaluation.estimates import Estimate
from grpo_rewards.errors import shortened
from grpo_rewards.terminal import visible

WIDTH, HEIGHT = 360.0, 184.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 10.0, 10.0, 24.0
LINE = 15.0  # of text in a file's header
MAX_LABEL = 60
MARKED = 25  # a line of fewer points shows each of them
SMOOTHED = 60  # a line of more points is drawn thin, with its moving mean
MOST_POINTS = 600
LARGEST_DRAWN = 1e100
HUES = 6

# Light, then dark: text, quiet text, background, rules, then the lines' colours, told apart by colour-blind readers too.
COLOURS = {
    "ink": ("#1b1f24", "#e6e9ee"),
    "quiet": ("#57606a", "#9aa4b1"),
    "paper": ("#ffffff", "#0f1318"),
    "rule": ("#d8dde3", "#2b333d"),
    "warn": ("#b42318", "#ff8b7e"),
    "c0": ("#1d63c4", "#6aa9ff"),
    "c1": ("#b8500a", "#ff9d4d"),
    "c2": ("#0f766e", "#3fd0bd"),
    "c3": ("#7c3aed", "#b79bff"),
    "c4": ("#be185d", "#ff86b7"),
    "c5": ("#4d6b0f", "#b5d554"),
}
MARKS = """
svg.chart { display: block; width: 100%; height: auto; overflow: visible; }
.chart text { font: 11px system-ui, sans-serif; fill: var(--quiet); }
.chart .title { font-size: 13px; font-weight: 600; fill: var(--ink); }
.chart .grid { stroke: var(--rule); stroke-width: 1; }
.chart polyline { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.chart .raw { stroke-width: 1; opacity: .35; }
.chart circle { fill: currentColor; }
.chart .band { fill: currentColor; opacity: .16; }
.chart .limit { stroke: var(--warn); stroke-width: 1; stroke-dasharray: 4 3; }
.chart text.limit { fill: var(--warn); stroke: var(--paper); stroke-width: 3; stroke-dasharray: none; paint-order: stroke; }
.chart .whole { fill: currentColor; }
.chart .open { fill: none; stroke: currentColor; stroke-width: 1.5; }
.chart .whisker { stroke: var(--ink); stroke-width: 1.5; }
.d1 { stroke-dasharray: 6 4; } .d2 { stroke-dasharray: 2 4; } .d3 { stroke-dasharray: 8 3 2 3; }
""" + "".join(f".c{hue} {{ color: var(--c{hue}); }}\n" for hue in range(HUES))


def palette() -> str:
    """The colours as CSS: custom properties of the root, of a dark screen, and light again on paper."""
    light, dark = ("; ".join(f"--{name}: {pair[mode]}" for name, pair in COLOURS.items()) for mode in (0, 1))
    return (
        f":root {{ {light}; color-scheme: light dark; }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark}; }} }}\n"
        f"@media print {{ :root {{ {light}; color-scheme: light; }} }}\n"
    )


@dataclass(frozen=True)
class Line:
    """A metric of a run: at which steps, which values; `hue` tells runs apart, `dash` the metrics of one picture."""

    steps: Sequence[int]
    values: Sequence[float]
    label: str = ""
    hue: int = 0
    dash: int = 0

    @property
    def style(self) -> str:
        """Its CSS classes."""
        return f"c{self.hue % HUES} d{(self.dash + self.hue // HUES) % 4}"


@dataclass(frozen=True)
class Band:
    """Between which values the middle half of something lies."""

    steps: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    hue: int = 0


@dataclass(frozen=True)
class Limit:
    """A value at which a check finds something, or that nothing exceeds."""

    value: float
    label: str


@dataclass(frozen=True)
class Interval:
    """A share with its interval, as a bar; `whole` bars are filled."""

    label: str
    estimate: Estimate
    hue: int = 0
    whole: bool = True


@dataclass(frozen=True)
class Chart:
    """A picture: `name` is its file's, `key` what the metric is logged as, `reading` says in words what it shows."""

    name: str
    title: str
    unit: str = ""
    note: str = ""
    lines: Sequence[Line] = ()
    bands: Sequence[Band] = ()
    limits: Sequence[Limit] = ()
    points: Sequence[tuple[int, int, Estimate]] = ()
    """Shares with whiskers over steps: hue, step, share."""
    bars: Sequence[Interval] = ()
    range: tuple[float, float] | None = None
    """What the vertical axis shows at least."""
    legend: Sequence[tuple[str, str, str]] = ()
    """CSS classes, label and the value in words of each line."""
    steps: tuple[int, int] = (0, 1)
    """The horizontal axis, the same in every picture of a page."""

    VERTICAL_TICKS: ClassVar[int] = 4

    @property
    def is_share(self) -> bool:
        """Whether its values are shares of 1."""
        return self.unit.startswith("share")

    @property
    def format(self) -> Callable[[float], str]:
        """How its values are written."""
        return percent if self.is_share else number

    @property
    def reading(self) -> str:
        """What a reader who does not see the picture is told."""
        said = [": ".join(filter(None, (label, value))) for _, label, value in self.legend]
        said += [f"{limit.label} at {self.format(limit.value)}" for limit in self.limits]
        said += [f"{bar.label}: {bar.estimate}" for bar in self.bars]
        return f"{self.title}{f' ({self.unit})' if self.unit else ''}: {'; '.join(said)}"

    def svg(self) -> Markup:
        """The picture for a page, which has `MARKS` and `palette` in its style."""
        height = self._bars_height if self.bars else HEIGHT
        label = escape(visible(self.reading))
        head = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">')
        return head.format(number(WIDTH), number(height), label) + self._drawn() + Markup("</svg>")

    def standalone(self) -> str:
        """The picture as a file: with its title, its legend and its own colours."""
        entries = [entry for entry in self.legend if entry[1]] if len(self.legend) > 1 else []
        top = 24.0 + LINE * len(entries)
        height = (self._bars_height if self.bars else HEIGHT) + top
        title = f"{self.title}, {self.unit}" if self.unit else self.title
        parts = [
            Markup(
                '<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" width="{}" height="{}">'
            ).format(number(WIDTH), number(height), number(WIDTH), number(height)),
            Markup("<style>{}svg {{ background: var(--paper); }}{}</style>").format(Markup(palette()), Markup(MARKS)),
            Markup("<title>{}</title>").format(visible(self.reading)),
            Markup('<text class="title" x="8" y="18">{}</text>').format(_label(title)),
        ]
        for place, (style, label, value) in enumerate(entries):
            y = 18 + LINE * (place + 1)
            parts.append(
                Markup(
                    '<g class="{}"><polyline class="{}" points="8,{} 28,{}"/></g><text x="34" y="{}">{}</text>'
                ).format(style, style, y - 4, y - 4, y, _label(f"{label} {value}"))
            )
        parts += [Markup('<g transform="translate(0 {})">').format(number(top)), self._drawn(), Markup("</g></svg>\n")]
        return str(Markup("").join(parts))

    @property
    def _bars_height(self) -> float:
        return 34.0 * len(self.bars) + 26.0

    def _drawn(self) -> Markup:
        return Markup("").join(self._bars() if self.bars else self._axes_and_lines())

    def _axes_and_lines(self) -> Iterable[Markup]:
        low, high = self._vertical()
        across, up = self._across, _scale(low, high, HEIGHT - BOTTOM, TOP)
        marks = ticks(low, high, self.VERTICAL_TICKS)
        for tick, words in zip(marks, self._tick_labels(marks), strict=True):
            yield _rule(LEFT, up(tick), WIDTH - RIGHT, up(tick), "grid")
            yield _text(LEFT - 6, up(tick) + 4, words, "end")
        for tick in _whole(ticks(*self.steps, 4)):
            yield _text(across(tick), HEIGHT - 8, f"{tick:,.0f}", "middle" if tick > self.steps[0] else "start")
        yield _text(LEFT - 6, HEIGHT - 8, "step", "end")
        for band in self.bands:
            edge = [*zip(band.steps, band.high, strict=True), *reversed(list(zip(band.steps, band.low, strict=True)))]
            points = " ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in edge)
            yield Markup('<g class="c{}"><polygon class="band" points="{}"/></g>').format(band.hue % HUES, points)
        for line in self.lines:
            yield self._line(line, across, up)
        for hue, step, share in self.points:
            x = across(step)
            yield Markup('<g class="c{}">').format(hue % HUES)
            yield _rule(x, up(share.low), x, up(share.high), "whisker")
            yield Markup('<circle cx="{:.1f}" cy="{:.1f}" r="3.5"><title>{}</title></circle></g>').format(
                x, up(share.value), f"step {step}: {share}"
            )
        for limit in self.limits:
            yield from self._limit(limit, low, high, up)

    def _tick_labels(self, marks: Sequence[float]) -> list[str]:
        """The numbers at the vertical axis, of shares with as many decimals as tell them apart."""
        if not self.is_share or max(map(abs, marks)) > 100:
            return [number(tick) for tick in marks]
        apart = 100 * min((after - before for before, after in itertools.pairwise(marks)), default=1.0)
        decimals = max(0, math.ceil(-math.log10(apart) - 1e-9)) if apart > 0 else 0
        return [f"{100 * tick:.{min(decimals, 6)}f} %" for tick in marks]

    def _limit(self, limit: Limit, low: float, high: float, up: Callable[[float], float]) -> Iterable[Markup]:
        """A threshold as a line, or as a note at the edge that it lies beyond."""
        words = f"{limit.label} {self.format(limit.value)}"
        if low <= limit.value <= high:
            y = up(limit.value)
            yield _rule(LEFT, y, WIDTH - RIGHT, y, "limit")
            yield _text(WIDTH - RIGHT, y - 4 if y > TOP + 14 else y + 12, words, "end", "limit")
        elif limit.value > high:
            yield _text(WIDTH - RIGHT, TOP + 2, f"↑ {words}", "end", "limit")
        else:
            yield _text(WIDTH - RIGHT, HEIGHT - BOTTOM - 4, f"↓ {words}", "end", "limit")

    def _line(self, line: Line, across: Callable[[float], float], up: Callable[[float], float]) -> Markup:
        kept = envelope(line.values)
        steps, values = np.array(line.steps)[kept], drawable(np.array(line.values, dtype=float)[kept])
        points = _points(steps, values, across, up)
        if len(line.steps) > SMOOTHED:
            window, smooth = moving_mean(line.values)
            kept = envelope(smooth, MOST_POINTS // 2)
            middle = np.array(line.steps)[window // 2 : window // 2 + len(smooth)]
            drawn = Markup('<polyline class="raw" points="{}"/><polyline class="{}" points="{}"/>').format(
                points, line.style, _points(middle[kept], drawable(smooth[kept]), across, up)
            )
        else:
            drawn = Markup('<polyline class="{}" points="{}"/>').format(line.style, points)
        if len(steps) < MARKED:
            drawn += Markup("").join(
                Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2.5"><title>{}</title></circle>').format(
                    across(step), up(value), f"step {step}: {self.format(value)}"
                )
                for step, value in zip(steps, values, strict=True)
            )
        return Markup('<g class="c{}">{}</g>').format(line.hue % HUES, drawn)

    def _bars(self) -> Iterable[Markup]:
        across = _scale(0, 1, 8, WIDTH - RIGHT - 8)
        bottom = self._bars_height - 22
        for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
            yield _rule(across(tick), 4, across(tick), bottom, "grid")
            yield _text(across(tick), bottom + 14, percent(tick), {0.0: "start", 1.0: "end"}.get(tick, "middle"))
        for place, bar in enumerate(self.bars):
            y, share = 34.0 * place + 14, bar.estimate
            yield _text(12, y, _label(f"{bar.label}  {percent(share.value)}"), "start")
            yield Markup(
                '<g class="c{}"><rect class="{}" x="8" y="{:.1f}" width="{:.1f}" height="9" rx="2"/></g>'
            ).format(bar.hue % HUES, "whole" if bar.whole else "open", y + 5, max(1.0, across(share.value) - 8))
            yield _rule(across(share.low), y + 9.5, across(share.high), y + 9.5, "whisker")
            for end in (share.low, share.high):
                yield _rule(across(end), y + 6, across(end), y + 13, "whisker")

    @property
    def _across(self) -> Callable[[float], float]:
        return _scale(*self.steps, LEFT + 4, WIDTH - RIGHT - 4)

    def _vertical(self) -> tuple[float, float]:
        """The ends of the vertical axis: all that is drawn, and `range`; a threshold up to twice as far away too."""
        values = [*(self.range or ())]
        for drawn in (*(line.values for line in self.lines), *(band.high for band in self.bands)):
            if len(drawn):
                values += [min(drawn), max(drawn)]
        values += [end for band in self.bands for end in band.low]
        values += [end for _, _, share in self.points for end in (share.low, share.high)]
        low, high = (float(end) for end in drawable(np.array([min(values), max(values)])))
        if low >= 0:  # of what can't be negative, zero is shown: a line that halves should look so
            low = 0.0
        for limit in self.limits:
            if high < limit.value <= 2 * high:
                high = limit.value * 1.02
        if high - low < 1e-12 * max(1e-300, abs(high)):
            high = low + (abs(low) or 1.0)
        low, high = _round_out(low, high, self.VERTICAL_TICKS)
        return low, min(high, 1.0) if self.is_share and max(values) <= 1 else high


def envelope(values: Sequence[float] | np.ndarray, most: int = MOST_POINTS) -> np.ndarray:
    """Which points of a series to draw, by index in order: all, or of each of `most / 2` equal stretches the lowest and highest.

    A picture is some hundred pixels wide: a line through these points covers the same pixels as one through all.
    """
    points = np.asarray(values, dtype=float)
    if len(points) <= most:
        return np.arange(len(points))
    stretches = np.array_split(np.arange(len(points)), most // 2)
    ends = [stretch[[points[stretch].argmin(), points[stretch].argmax()]] for stretch in stretches]
    return np.unique(np.concatenate([*ends, [0, len(points) - 1]]))


def moving_mean(values: Sequence[float]) -> tuple[int, np.ndarray]:
    """How many points each mean is of, a twentieth of the series, and the means."""
    window = max(2, len(values) // 20)
    sums = np.cumsum(np.concatenate([[0.0], drawable(np.array(values, dtype=float))]))
    return window, (sums[window:] - sums[:-window]) / window


def drawable(values: np.ndarray) -> np.ndarray:
    """Values that can be scaled: the largest floats overflow when they are multiplied."""
    return np.clip(values, -LARGEST_DRAWN, LARGEST_DRAWN)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from `low` to `high`, `about` so many: multiples of 1, 2 or 5 times a power of ten."""
    step = _step(low, high, about)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def _step(low: float, high: float, about: int) -> float:
    rough = max(high - low, 1e-300) / about
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def _round_out(low: float, high: float, about: int) -> tuple[float, float]:
    """The ends moved out to the next ticks."""
    step = _step(low, high, about)
    return math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step


def _whole(values: Iterable[float]) -> list[float]:
    return [value for value in values if abs(value - round(value)) < 1e-9]


def number(value: float) -> str:
    """A number in few characters: 1,250; 3.4M; 0.013; 1e-05."""
    size = abs(value)
    if 1e4 <= size < 1e15:
        for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= unit:
                return f"{value / unit:.3g}{name}"
    if 1e3 <= size < 1e4:
        return f"{value:,.0f}"
    return f"{0.0 if size < 1e-300 else value:.3g}"


def percent(value: float) -> str:
    """A share in percent, with a decimal only where it is small."""
    shown_value = 100 * value
    if abs(shown_value) >= 1e6:
        return number(value)
    decimals = 0 if abs(shown_value) >= 10 or abs(shown_value - round(shown_value)) < 0.005 else 1
    return f"{shown_value:.{decimals}f} %"


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (end - start) * float(np.clip((value - low) / span, -0.05, 1.05))


def _points(
    steps: np.ndarray, values: np.ndarray, across: Callable[[float], float], up: Callable[[float], float]
) -> str:
    return " ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in zip(steps, values, strict=True))


def _rule(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(style, x1, y1, x2, y2)


def _text(x: float, y: float, words: str, anchor: str, style: str = "") -> Markup:
    marked = Markup(' class="{}"').format(style) if style else Markup("")
    return Markup('<text{} x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(marked, x, y, anchor, words)


def _label(text: str) -> str:
    return visible(shortened(text, MAX_LABEL))
