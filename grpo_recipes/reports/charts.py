"""Charts as SVG: lines over optimizer steps, bands, thresholds of the checks, and shares with their intervals.

A chart is about as wide as a phone, so that its text is never scaled down too far. On the page it uses the page's
colours. `standalone` adds a title, a legend and colours, light and dark, for a file of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

from grpo_recipes.evaluation.estimates import Estimate
from grpo_rewards.errors import shortened
from grpo_rewards.terminal import visible

WIDTH, HEIGHT = 360.0, 184.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 10.0, 10.0, 24.0
LINE = 15.0
"""Height of a line of text in the header of a file."""
BAR = 34.0
"""Height of a bar with its label."""
MAX_LABEL, MIN_LABEL = 60, 12
"""Largest number of characters of a label, and of a label before the means of its line."""
MARKED = 25
"""Smallest number of points for which a line does not mark each point."""
SMOOTHED = 60
"""Number of points above which a line is drawn thin, with its moving mean."""
MAX_POINTS = 600
TICKS = 4
"""Number of ticks of an axis, about."""
LARGEST_DRAWN = 1e100
HUES = 6

COLOURS = {
    "ink": ("#1b1f24", "#e6e9ee"),
    "faint": ("#57606a", "#9aa4b1"),
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
"""Light and dark colours of text, faint text, background, rules and lines.

Colour-blind readers can tell lines apart.
"""

MARKS = """
svg.chart { display: block; width: 100%; height: auto; overflow: visible; }
.chart text { font: 11px system-ui, sans-serif; fill: var(--faint); }
.chart .title { font-size: 13px; font-weight: 600; fill: var(--ink); }
.chart .grid { stroke: var(--rule); stroke-width: 1; }
.chart polyline { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.chart .raw { stroke-width: 1; opacity: .35; }
.chart circle { fill: currentColor; }
.chart .band { fill: currentColor; opacity: .16; }
.chart .limit { stroke: var(--warn); stroke-width: 1; stroke-dasharray: 4 3; }
.chart text.limit { fill: var(--warn); stroke: var(--paper); stroke-width: 3; }
.chart text.limit { stroke-dasharray: none; paint-order: stroke; }
.chart .filled { fill: currentColor; }
.chart .open { fill: none; stroke: currentColor; stroke-width: 1.5; }
.chart .whisker { stroke: var(--ink); stroke-width: 1.5; }
.d1 { stroke-dasharray: 6 4; } .d2 { stroke-dasharray: 2 4; } .d3 { stroke-dasharray: 8 3 2 3; }
""" + "".join(f".c{hue} {{ color: var(--c{hue}); }}\n" for hue in range(HUES))


def palette() -> str:
    """Return the colours as CSS custom properties: light, dark on a dark screen, and light in print."""
    light, dark = ("; ".join(f"--{name}: {pair[mode]}" for name, pair in COLOURS.items()) for mode in (0, 1))
    return (
        f":root {{ {light}; color-scheme: light dark; }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark}; }} }}\n"
        f"@media print {{ :root {{ {light}; color-scheme: light; }} }}\n"
    )


@dataclass(frozen=True)
class Line:
    """Values of a metric at optimizer steps."""

    steps: Sequence[int]
    values: Sequence[float]
    label: str = ""
    hue: int = 0
    """Number of the run, which sets the colour."""
    dash: int = 0
    """Number of the metric in a chart, which sets the dashes."""

    @property
    def style(self) -> str:
        """CSS classes of the line."""
        return f"c{self.hue % HUES} d{(self.dash + self.hue // HUES) % 4}"


@dataclass(frozen=True)
class Band:
    """Range of the middle half of some values at optimizer steps."""

    steps: list[float]
    low: list[float]
    high: list[float]
    hue: int = 0


@dataclass(frozen=True)
class Limit:
    """Horizontal line at a threshold."""

    value: float
    label: str


@dataclass(frozen=True)
class Interval:
    """Bar of a share, with its interval."""

    label: str
    estimate: Estimate
    hue: int = 0
    is_filled: bool = True


@dataclass(frozen=True)
class Chart:
    """Chart of lines over optimizer steps, or of bars."""

    name: str
    """Name of the file, without its suffix."""
    title: str
    unit: str = ""
    note: str = ""
    lines: Sequence[Line] = ()
    bands: Sequence[Band] = ()
    limits: Sequence[Limit] = ()
    points: Sequence[tuple[int, int, Estimate]] = ()
    """Shares with whiskers, each as hue, step and share."""
    bars: Sequence[Interval] = ()
    range: tuple[float, float] | None = None
    """Smallest range of the vertical axis."""
    legend: Sequence[tuple[str, str, str]] = ()
    """CSS classes, label and text of each line. The text has the means of the first and the last quarter, with their
    steps."""
    steps: tuple[int, int] = (0, 1)
    """Range of the horizontal axis."""

    @property
    def is_share(self) -> bool:
        """True if the values are shares of 1."""
        return self.unit.startswith("share")

    @property
    def format(self) -> Callable[[float], str]:
        """Function that writes a value as text."""
        return percent if self.is_share else number

    @property
    def reading(self) -> str:
        """Text for readers who do not see the chart."""
        parts = [": ".join(filter(None, (label, value))) for _, label, value in self.legend]
        parts += [f"{limit.label} at {self.format(limit.value)}" for limit in self.limits]
        parts += [f"{bar.label}: {bar.estimate}" for bar in self.bars]
        unit = f" ({self.unit})" if self.unit else ""
        return f"{self.title}{unit}: {'; '.join(parts)}"

    @property
    def height(self) -> float:
        """Height without the header of a file."""
        return BAR * len(self.bars) + 26.0 if self.bars else HEIGHT

    def svg(self) -> Markup:
        """Return the chart for a page whose style has `MARKS` and `palette`."""
        head = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">')
        size = number(WIDTH), number(self.height)
        return head.format(*size, escape(visible(self.reading))) + self._drawn() + Markup("</svg>")

    def standalone(self) -> str:
        """Return the chart as the text of a file, with title, legend and colours."""
        entries = [entry for entry in self.legend if entry[1]] if len(self.legend) > 1 else []
        top = 24.0 + LINE * len(entries)
        size = number(WIDTH), number(self.height + top)
        title = f"{self.title}, {self.unit}" if self.unit else self.title
        head = Markup(
            '<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" width="{}" height="{}">'
        )
        parts = [
            head.format(*size, *size),
            Markup("<style>{}svg {{ background: var(--paper); }}{}</style>").format(Markup(palette()), Markup(MARKS)),
            Markup("<title>{}</title>").format(visible(self.reading)),
            Markup('<text class="title" x="8" y="18">{}</text>').format(_label(title)),
        ]
        row = Markup('<g class="{}"><polyline class="{}" points="8,{} 28,{}"/></g><text x="34" y="{}">{}</text>')
        for place, (style, label, value) in enumerate(entries):
            y = 18 + LINE * (place + 1)
            name = shortened(label, max(MIN_LABEL, MAX_LABEL - len(value) - 1))
            parts.append(row.format(style, style, y - 4, y - 4, y, visible(f"{name} {value}")))
        parts += [Markup('<g transform="translate(0 {})">').format(number(top)), self._drawn(), Markup("</g></svg>\n")]
        return str(Markup("").join(parts))

    def _drawn(self) -> Markup:
        return Markup("").join(self._bars() if self.bars else self._axes_and_lines())

    def _axes_and_lines(self) -> Iterable[Markup]:
        low, high = self._vertical()
        across, up = _scale(*self.steps, LEFT + 4, WIDTH - RIGHT - 4), _scale(low, high, HEIGHT - BOTTOM, TOP)
        for tick in ticks(low, high):
            yield _rule(LEFT, up(tick), WIDTH - RIGHT, up(tick), "grid")
            # `percent` rounds more coarsely than the distance of ticks below 0.1 %.
            label = f"{number(100 * tick)} %" if self.is_share else number(tick)
            yield _text(LEFT - 6, up(tick) + 4, label, "end")
        for tick in ticks(*self.steps):
            if tick.is_integer():  # there are no fractions of a step
                yield _text(across(tick), HEIGHT - 8, f"{tick:,.0f}", "middle" if tick > self.steps[0] else "start")
        yield _text(LEFT - 6, HEIGHT - 8, "step", "end")
        for band in self.bands:
            # Along the upper edge and back along the lower one.
            points = _points([*band.steps, *band.steps[::-1]], [*band.high, *band.low[::-1]], across, up)
            yield Markup('<g class="c{}"><polygon class="band" points="{}"/></g>').format(band.hue % HUES, points)
        for line in self.lines:
            yield self._line(line, across, up)
        for hue, step, share in self.points:
            x = across(step)
            yield Markup('<g class="c{}">').format(hue % HUES)
            yield _rule(x, up(share.low), x, up(share.high), "whisker")
            yield _dot(x, up(share.value), 3.5, f"step {step}: {share}") + Markup("</g>")
        for limit in self.limits:
            yield from self._limit(limit, low, high, up)

    def _limit(self, limit: Limit, low: float, high: float, up: Callable[[float], float]) -> Iterable[Markup]:
        """Yield a threshold as a line, or as a note at the edge beyond which it lies."""
        label = f"{limit.label} {self.format(limit.value)}"
        right = WIDTH - RIGHT
        if limit.value > high:
            yield _text(right, TOP + 2, f"↑ {label}", "end", "limit")
        elif limit.value < low:
            yield _text(right, HEIGHT - BOTTOM - 4, f"↓ {label}", "end", "limit")
        else:
            y = up(limit.value)
            yield _rule(LEFT, y, right, y, "limit")
            yield _text(right, y - 4 if y > TOP + 14 else y + 12, label, "end", "limit")

    def _line(self, line: Line, across: Callable[[float], float], up: Callable[[float], float]) -> Markup:
        all_steps, all_values = np.array(line.steps), np.array(line.values, dtype=float)
        kept = envelope(all_values)
        steps, values = all_steps[kept], drawable(all_values[kept])
        is_smoothed = len(all_steps) > SMOOTHED
        polyline = Markup('<polyline class="{}" points="{}"/>')
        drawn = polyline.format("raw" if is_smoothed else line.style, _points(steps, values, across, up))
        if is_smoothed:
            window, smooth = moving_mean(all_values)
            kept = envelope(smooth, MAX_POINTS // 2)
            middle = all_steps[window // 2 : window // 2 + len(smooth)]
            drawn += polyline.format(line.style, _points(middle[kept], drawable(smooth[kept]), across, up))
        if len(steps) < MARKED:
            for step, value in zip(steps, values, strict=True):
                drawn += _dot(across(step), up(value), 2.5, f"step {step}: {self.format(value)}")
        return Markup('<g class="c{}">{}</g>').format(line.hue % HUES, drawn)

    def _bars(self) -> Iterable[Markup]:
        across = _scale(0, 1, 8, WIDTH - RIGHT - 8)
        bottom = self.height - 22
        for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
            yield _rule(across(tick), 4, across(tick), bottom, "grid")
            yield _text(across(tick), bottom + 14, percent(tick), {0.0: "start", 1.0: "end"}.get(tick, "middle"))
        box = Markup('<g class="c{}"><rect class="{}" x="8" y="{:.1f}" width="{:.1f}" height="9" rx="2"/></g>')
        for place, bar in enumerate(self.bars):
            y, share = BAR * place + 14, bar.estimate
            yield _text(12, y, _label(f"{bar.label}  {percent(share.value)}"), "start")
            style = "filled" if bar.is_filled else "open"
            yield box.format(bar.hue % HUES, style, y + 5, max(1.0, across(share.value) - 8))
            yield _rule(across(share.low), y + 9.5, across(share.high), y + 9.5, "whisker")
            for end in (share.low, share.high):
                yield _rule(across(end), y + 6, across(end), y + 13, "whisker")

    def _vertical(self) -> tuple[float, float]:
        """Return the ends of the vertical axis: everything drawn, `range`, and thresholds up to twice as far away."""
        values = list(self.range or ())
        for line in self.lines:
            values += line.values
        for band in self.bands:
            values += [*band.low, *band.high]
        for _, _, share in self.points:
            values += [share.low, share.high]
        low, high = (float(end) for end in drawable(np.array([min(values), max(values)])))
        if low >= 0:  # a value that halves should look so
            low = 0.0
        for limit in self.limits:
            if high < limit.value <= 2 * high:
                high = limit.value * 1.02
        if high - low < 1e-12 * max(1e-300, abs(high)):
            high = low + (abs(low) or 1.0)
        # Outwards to the next ticks.
        step = _step(low, high)
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
        return low, min(high, 1.0) if self.is_share and max(values) <= 1 else high


def envelope(values: Sequence[float] | np.ndarray, most: int = MAX_POINTS) -> np.ndarray:
    """Return the indices of the points to draw, in order.

    These are all points, or the lowest and the highest of each of `most / 2` equal parts. A chart is a few hundred
    pixels wide, so a line through these points covers the same pixels as one through all points.
    """
    points = np.asarray(values, dtype=float)
    if len(points) <= most:
        return np.arange(len(points))
    kept = [0, len(points) - 1]
    for part in np.array_split(np.arange(len(points)), most // 2):
        kept += [part[points[part].argmin()], part[points[part].argmax()]]
    return np.unique(kept)


def moving_mean(values: Sequence[float] | np.ndarray) -> tuple[int, np.ndarray]:
    """Return the number of points in each mean, a twentieth of the series, and the means."""
    window = max(2, len(values) // 20)
    sums = np.cumsum(np.concatenate([[0.0], drawable(np.asarray(values, dtype=float))]))
    return window, (sums[window:] - sums[:-window]) / window


def drawable(values: np.ndarray) -> np.ndarray:
    """Return values that can be scaled. The largest floats would overflow in a product."""
    return np.clip(values, -LARGEST_DRAWN, LARGEST_DRAWN)


def ticks(low: float, high: float) -> list[float]:
    """Return about `TICKS` round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    step = _step(low, high)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [place * step for place in range(first, last + 1)]


def _step(low: float, high: float) -> float:
    rough = max(high - low, 1e-300) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def number(value: float) -> str:
    """Return a number in few characters: 1,250; 3.4M; 0.013; 1e-05."""
    size = abs(value)
    if 1e4 <= size < 1e15:
        for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= unit:
                return f"{value / unit:.3g}{name}"
    if 1e3 <= size < 1e4:
        return f"{value:,.0f}"
    return f"{0.0 if size < 1e-300 else value:.3g}"


def percent(value: float) -> str:
    """Return a share in percent, with a decimal only if it is small."""
    points = 100 * value
    if abs(points) >= 1e6:
        return number(value)
    decimals = 0 if abs(points) >= 10 or abs(points - round(points)) < 0.005 else 1
    return f"{points:z.{decimals}f} %"  # z: no -0


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return a function that maps values in [low, high] to pixels in [start, end], clipped near the ends."""
    span = (high - low) or 1.0
    return lambda value: start + (end - start) * float(np.clip((value - low) / span, -0.05, 1.05))


def _points(
    steps: Iterable[float], values: Iterable[float], across: Callable[[float], float], up: Callable[[float], float]
) -> str:
    return " ".join(f"{across(step):.1f},{up(value):.1f}" for step, value in zip(steps, values, strict=True))


def _rule(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    return Markup('<line class="{}" x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(style, x1, y1, x2, y2)


def _dot(x: float, y: float, radius: float, title: str) -> Markup:
    circle = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{}"><title>{}</title></circle>')
    return circle.format(x, y, radius, title)


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> Markup:
    marked = Markup(' class="{}"').format(style) if style else Markup("")
    return Markup('<text{} x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>').format(marked, x, y, anchor, text)


def _label(text: str) -> str:
    return visible(shortened(text, MAX_LABEL))
