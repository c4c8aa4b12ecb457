"""Charts, read back: the ticks of an axis say which value a place in the picture has."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from grpo_recipes.evaluation.estimates import Estimate
from grpo_recipes.reports.charts import (
    COLOURS,
    MAX_POINTS,
    Band,
    Chart,
    Interval,
    Limit,
    Line,
    envelope,
    moving_mean,
    number,
    palette,
    percent,
    ticks,
)

STEPS = [1, 2, 5, 10]
UNITS = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def elements(chart: Chart, tag: str, style: str | None = None) -> list[ElementTree.Element]:
    """Return the elements of a chart on a page, with a class if one is named."""
    root = ElementTree.fromstring(chart.svg())
    return [one for one in root.iter(tag) if style is None or style in one.get("class", "").split()]


def texts(chart: Chart) -> list[tuple[float, float, str, str]]:
    """Return place, alignment and content of each text."""
    found = []
    for one in elements(chart, "text"):
        found.append((float(one.get("x", "")), float(one.get("y", "")), one.get("text-anchor", ""), one.text or ""))
    return found


def read_label(label: str) -> float:
    """Return the number that the label of a tick stands for."""
    if label.endswith(" %"):
        return float(label[:-2].replace(",", "")) / 100
    unit = UNITS.get(label[-1], 1.0)
    return float(label.replace(",", "").rstrip("".join(UNITS))) * unit


def axis(pairs: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """Return the function from places to values that goes through (place, value) of the first and the last tick."""
    (first, low), *_, (last, high) = sorted(pairs)
    return lambda place: low + (place - first) / (last - first) * (high - low)


def vertical(chart: Chart) -> Callable[[float], float]:
    """Return the function from heights to values. A tick's label lies 4 pixels below its line, at the left edge."""
    labels = [(y - 4, read_label(text)) for x, y, _, text in texts(chart) if x < 44 and text != "step"]
    lines = sorted(float(one.get("y1", "")) for one in elements(chart, "line", "grid"))
    assert lines == pytest.approx(sorted(y for y, _ in labels), abs=0.06)
    return axis(labels)


def horizontal(chart: Chart) -> Callable[[float], float]:
    bottom = max(y for _, y, _, text in texts(chart) if text == "step")
    return axis([(x, read_label(text)) for x, y, _, text in texts(chart) if y == bottom and text != "step"])


def places(points: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in points.split())]


@pytest.mark.parametrize(
    ("values", "unit"),
    [
        ([0.1, 0.4, 0.35, 0.8], "share"),
        ([0.0001, 0.0004, 0.0002, 0.0003], "share"),
        ([-3.0, 2.0, 0.5, 7.0], "reward"),
        ([1200.0, 56000.0, 31000.0, 8000.0], "tokens"),
        ([0.5, 0.5, 0.5, 0.5], ""),
        ([-2.0, -2.0, -2.0, -2.0], ""),
        ([0.0, 0.0, 0.0, 0.0], ""),
    ],
    ids=str,
)
def test_a_line_goes_through_its_values(values: list[float], unit: str) -> None:
    chart = Chart("name", "Title", unit, lines=[Line(STEPS, values, "label", 1, 2)], steps=(0, 10))
    (line,) = elements(chart, "polyline")
    assert line.get("class") == "c1 d2"
    across, up = horizontal(chart), vertical(chart)
    size = max(1e-12, max(values) - min(0.0, *values))
    drawn = places(line.get("points", ""))
    assert [round(across(x), 1) for x, _ in drawn] == pytest.approx(STEPS, abs=0.11)
    assert [up(y) for _, y in drawn] == pytest.approx(values, abs=0.01 * size)
    assert all(10 <= y <= 160 for _, y in drawn)
    dots = [(float(one.get("cx", "")), float(one.get("cy", ""))) for one in elements(chart, "circle")]
    assert dots == drawn
    shown = percent if unit == "share" else number
    titles = [one.text for one in elements(chart, "title")]
    assert titles == [f"step {step}: {shown(value)}" for step, value in zip(STEPS, values, strict=True)]
    lowest = min(read_label(text) for x, _, _, text in texts(chart) if x < 44 and text != "step")
    assert lowest == 0 if min(values) >= 0 else lowest <= min(values)


def test_a_share_that_reaches_1_has_an_axis_that_ends_there() -> None:
    top = Chart("name", "Title", "share", lines=[Line(STEPS, [0.2, 0.97, 0.5, 0.99])], steps=(0, 10))
    assert max(read_label(text) for x, _, _, text in texts(top) if x < 44 and text != "step") == 1
    more = Chart("name", "Title", "share", lines=[Line(STEPS, [0.2, 1.3, 0.5, 0.99])], steps=(0, 10))
    assert max(read_label(text) for x, _, _, text in texts(more) if x < 44 and text != "step") > 1


def test_no_fraction_of_a_step_has_a_label() -> None:
    chart = Chart("name", "Title", lines=[Line([0, 1, 2], [1.0, 2.0, 3.0])], steps=(0, 2))
    bottom = max(y for _, y, _, text in texts(chart) if text == "step")
    labels = [(anchor, text) for _, y, anchor, text in texts(chart) if y == bottom and text != "step"]
    assert labels == [("start", "0"), ("middle", "1"), ("middle", "2")]


def test_a_band_lies_between_its_edges() -> None:
    band = Band([0, 5, 10], [1.0, 2.0, 3.0], [4.0, 8.0, 6.0], hue=7)
    chart = Chart("name", "Title", bands=[band], steps=(0, 10))
    across, up = horizontal(chart), vertical(chart)
    (polygon,) = elements(chart, "polygon", "band")
    found = [(across(x), up(y)) for x, y in places(polygon.get("points", ""))]
    expected = [(0, 4.0), (5, 8.0), (10, 6.0), (10, 3.0), (5, 2.0), (0, 1.0)]
    assert np.array(found) == pytest.approx(np.array(expected, dtype=float), abs=0.08)
    assert "c1" in [one.get("class") for one in elements(chart, "g")]  # six hues


def test_whiskers_span_their_interval() -> None:
    share = Estimate(0.5, 0.25, 0.8)
    chart = Chart("name", "Title", "share", points=[(2, 5, share)], range=(0.0, 1.0), steps=(0, 10))
    across, up = horizontal(chart), vertical(chart)
    (rule,) = elements(chart, "line", "whisker")
    ends = [up(float(rule.get(end, ""))) for end in ("y1", "y2")]
    assert sorted(ends) == pytest.approx([0.25, 0.8], abs=0.01)
    assert across(float(rule.get("x1", ""))) == across(float(rule.get("x2", ""))) == pytest.approx(5, abs=0.05)
    (dot,) = elements(chart, "circle")
    assert up(float(dot.get("cy", ""))) == pytest.approx(0.5, abs=0.01)
    assert [one.text for one in elements(chart, "title")] == [f"step 5: {share}"]


@pytest.mark.parametrize(("value", "mark"), [(0.5, ""), (1.9, ""), (2.5, "↑ "), (-1.0, "↓ ")])
def test_a_threshold_is_a_line_or_a_note_at_the_edge(value: float, mark: str) -> None:
    """A threshold up to twice as high as all values stretches the axis."""
    chart = Chart(
        "name", "Title", lines=[Line(STEPS, [1.0, 0.2, 0.3, 0.4])], limits=[Limit(value, "stop")], steps=(0, 10)
    )
    up = vertical(chart)
    (note,) = elements(chart, "text", "limit")
    assert note.text == f"{mark}stop {number(value)}"
    rules = elements(chart, "line", "limit")
    assert len(rules) == (not mark)
    for rule in rules:
        assert rule.get("y1") == rule.get("y2")
        assert up(float(rule.get("y1", ""))) == pytest.approx(value, abs=0.02)
        assert 0 < abs(float(note.get("y", "")) - float(rule.get("y1", ""))) < 15
        assert float(note.get("y", "")) > 14


def test_bars_and_their_intervals_are_read_at_the_ticks() -> None:
    shares = [Estimate(0.5, 0.4, 0.75), Estimate(0.0, 0.0, 0.1), Estimate(0.25, 0.2, 0.3)]
    bars = [Interval(f"table {place}", share, place, place != 1) for place, share in enumerate(shares)]
    chart = Chart("name", "Title", "share", bars=bars)
    height = float((ElementTree.fromstring(chart.svg()).get("viewBox") or "").split()[3])
    labels = {text: x for x, y, _, text in texts(chart) if y > height - 15}
    assert labels.keys() == {"0 %", "25 %", "50 %", "75 %", "100 %"}
    across = axis([(x, read_label(text)) for text, x in labels.items()])
    boxes = elements(chart, "rect")
    assert [one.get("class") for one in boxes] == ["filled", "open", "filled"]
    whiskers = [one for one in elements(chart, "line", "whisker") if one.get("y1") == one.get("y2")]
    for share, box, whisker in zip(shares, boxes, whiskers, strict=True):
        end = float(box.get("x", "")) + float(box.get("width", ""))
        assert across(end) == pytest.approx(share.value, abs=0.005)
        ends = [across(float(whisker.get(name, ""))) for name in ("x1", "x2")]
        assert ends == pytest.approx([share.low, share.high], abs=0.001)
        middle = float(box.get("y", "")) + float(box.get("height", "")) / 2
        assert float(whisker.get("y1", "")) == pytest.approx(middle)
    names = [text for _, _, anchor, text in texts(chart) if anchor == "start" and text.startswith("table")]
    assert names == ["table 0  50 %", "table 1  0 %", "table 2  25 %"]
    assert all(float(box.get("y", "")) + 9 < height - 22 for box in boxes)


def test_the_text_for_readers_who_do_not_see_the_chart_names_every_value() -> None:
    chart = Chart(
        *("name", "Reward", "share"),
        lines=[Line(STEPS, [0.1, 0.2, 0.3, 0.4])],
        limits=[Limit(0.25, "floor")],
        legend=[("c0", "a", "10 % → 40 %"), ("c1", "", "5 %")],
    )
    assert chart.reading == "Reward (share): a: 10 % → 40 %; 5 %; floor at 25 %"
    assert ElementTree.fromstring(chart.svg()).get("aria-label") == chart.reading


def test_a_file_of_its_own_has_title_colours_and_a_legend_of_several_lines() -> None:
    line = Line(STEPS, [0.1, 0.2, 0.3, 0.4])
    one = Chart("name", "Reward", "share", lines=[line], legend=[("c0 d0", "a", "1 → 2")])
    two = Chart("name", "Reward", lines=[line], legend=[*one.legend, ("c1 d0", "b", "3 → 4"), ("c2 d0", "", "5 → 6")])
    assert "<title>Reward (share): a: 1 → 2</title>" in one.standalone()
    assert ">Reward, share</text>" in one.standalone()
    assert "a 1 → 2</text>" not in one.standalone()
    assert ">Reward</text>" in two.standalone()
    assert "a 1 → 2</text>" in two.standalone()
    assert "b 3 → 4</text>" in two.standalone()
    assert "5 → 6</text>" not in two.standalone()
    pair = Chart("name", "Reward", lines=[line], legend=two.legend[:2])
    assert "a 1 → 2</text>" in pair.standalone()
    found = [re.search(r'height="([\d.]+)"', chart.standalone()) for chart in (one, two)]
    heights = [float(match[1]) for match in found if match]
    assert heights[1] - heights[0] == 30
    for light, dark in COLOURS.values():
        assert light in one.standalone()
        assert dark in one.standalone()


def test_a_long_line_is_thin_under_its_moving_mean_and_has_no_dots() -> None:
    values = [math.sin(step) for step in range(200)]
    chart = Chart("name", "Title", lines=[Line(range(200), values)], steps=(0, 199))
    raw, smooth = elements(chart, "polyline")
    assert raw.get("class") == "raw"
    assert len(places(raw.get("points", ""))) == 200
    assert not elements(chart, "circle")
    across = horizontal(chart)
    first, last = places(smooth.get("points", ""))[0][0], places(smooth.get("points", ""))[-1][0]
    assert across(first) == pytest.approx(5, abs=0.5)  # the middle of the first ten
    assert across(last) == pytest.approx(195, abs=0.5)


@pytest.mark.parametrize(("length", "dots"), [(24, 24), (25, 0)])
def test_a_line_of_25_points_or_more_marks_none(length: int, dots: int) -> None:
    chart = Chart(
        "name", "Title", lines=[Line(range(length), [float(n % 3) for n in range(length)])], steps=(0, length)
    )
    assert len(elements(chart, "circle")) == dots


@pytest.mark.parametrize("length", [2, 39, 40, 100])
def test_a_moving_mean_covers_a_twentieth_and_at_least_two_points(length: int) -> None:
    values = [float(value**2 % 17) for value in range(length)]
    window, means = moving_mean(values)
    assert window == max(2, length // 20)
    assert means == pytest.approx(np.convolve(values, np.ones(window) / window, mode="valid"))


def test_every_point_is_drawn_up_to_a_limit_and_then_the_ends_and_extremes() -> None:
    assert list(envelope([3.0] * 600)) == list(range(600))
    assert len(envelope([3.0] * 601)) < 601
    values = [float(value * 37 % 1009) for value in range(5000)]
    kept = envelope(values, 100)
    assert 100 <= len(kept) <= 102
    assert {0, 4999, values.index(max(values)), values.index(min(values))} <= set(kept)
    assert list(kept) == sorted(set(kept))
    assert {0, 899} <= set(envelope([0.5, 1.0, 0.0, 0.5, 0.5, 0.5] * 150, 10)), "the ends, which are no extremes"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.5, 1]),
        (0, 4, [0, 1, 2, 3, 4]),
        (0, 0.8, [0, 0.2, 0.4, 0.6, 0.8]),
        (-3, 7, [0, 5]),
        (0, 10, [0, 5, 10]),
        (13, 17, [13, 14, 15, 16, 17]),
        (0, 200, [0, 50, 100, 150, 200]),
        (0, 36, [0, 10, 20, 30]),
        (0.1, 0.3, [0.1, 0.15, 0.2, 0.25, 0.3]),
    ],
)
def test_ticks_are_multiples_of_1_2_or_5(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(
            (0.0, "0"),
            (1e-301, "0"),
            (1e-300, "1e-300"),
            (1e-5, "1e-05"),
            (0.0134, "0.0134"),
            (1.2345, "1.23"),
            (-1.2345, "-1.23"),
        ),
        *(
            (999.0, "999"),
            (999.9, "1e+03"),
            (1000.0, "1,000"),
            (1249.6, "1,250"),
            (9999.4, "9,999"),
            (-2500.0, "-2,500"),
        ),
        *(
            (1e4, "10k"),
            (12_345.0, "12.3k"),
            (1e6, "1M"),
            (3.4e6, "3.4M"),
            (-2e9, "-2G"),
            (5e12, "5T"),
            (1e9, "1G"),
            (1e12, "1T"),
            (1e15, "1e+15"),
        ),
    ],
)
def test_a_number_is_written_in_few_characters(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        *((0.0, "0 %"), (1.0, "100 %"), (0.123, "12 %"), (0.0999, "10.0 %"), (0.05, "5 %"), (0.0504, "5.0 %")),
        *((0.051, "5.1 %"), (-0.051, "-5.1 %"), (-0.25, "-25 %"), (1e4, "10k"), (0.10049, "10 %"), (0.07004, "7 %")),
        *((0.06997, "7 %"), (-0.06997, "-7 %"), (5e-5, "0.0 %"), (-1e-9, "0 %"), (0.104, "10 %"), (9999.0, "999900 %")),
    ],
)
def test_a_share_has_a_decimal_only_if_it_is_small(share: float, text: str) -> None:
    assert percent(share) == text


def drawing(chart: Chart) -> list[str]:
    """Return the elements of a chart in order, each as its tag, the values of its attributes, and its text."""
    root = ElementTree.fromstring(chart.svg())
    found = []
    for one in root.iter():
        if one is not root and one.tag != "g":
            found.append(" ".join(filter(None, [one.tag, *one.attrib.values(), one.text])))
    return found


def test_lines_bands_points_and_thresholds_lie_at_their_pixels() -> None:
    """The plot spans 306 pixels from 44 and 150 from 10. Lines begin and end 4 pixels inside of it."""
    chart = Chart(
        *("name", "Title", "share"),
        lines=[Line([0, 10], [0.0, 1.0], hue=8, dash=3)],
        bands=[Band([0.0, 10.0], [0.0, 0.5], [0.5, 1.0])],
        limits=[Limit(0.5, "stop")],
        points=[(1, 5, Estimate(0.5, 0.25, 0.75))],
        range=(0.0, 1.0),
        steps=(0, 10),
    )
    assert drawing(chart) == [
        *("line grid 44.0 160.0 350.0 160.0", "text 38.0 164.0 end 0 %"),
        *("line grid 44.0 85.0 350.0 85.0", "text 38.0 89.0 end 50 %"),
        *("line grid 44.0 10.0 350.0 10.0", "text 38.0 14.0 end 100 %"),
        *("text 48.0 176.0 start 0", "text 197.0 176.0 middle 5", "text 346.0 176.0 middle 10"),
        "text 38.0 176.0 end step",
        "polygon band 48.0,85.0 346.0,10.0 346.0,85.0 48.0,160.0",
        "polyline c2 d0 48.0,160.0 346.0,10.0",  # the ninth run has the third hue and the next dashes
        *("circle 48.0 160.0 2.5", "title step 0: 0 %", "circle 346.0 10.0 2.5", "title step 10: 100 %"),
        "line whisker 197.0 122.5 197.0 47.5",
        *("circle 197.0 85.0 3.5", "title step 5: 0.500 [0.250, 0.750]"),
        *("line limit 44.0 85.0 350.0 85.0", "text limit 350.0 81.0 end stop 50 %"),
    ]
    assert chart.height == 184


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.9, ["line limit 44.0 25.0 350.0 25.0", "text limit 350.0 21.0 end stop 0.9"]),
        (0.92, ["line limit 44.0 22.0 350.0 22.0", "text limit 350.0 34.0 end stop 0.92"]),  # no room above
        (1.0, ["line limit 44.0 10.0 350.0 10.0", "text limit 350.0 22.0 end stop 1"]),
        (0.0, ["line limit 44.0 160.0 350.0 160.0", "text limit 350.0 156.0 end stop 0"]),
        (2.1, ["text limit 350.0 12.0 end ↑ stop 2.1"]),
        (-0.1, ["text limit 350.0 156.0 end ↓ stop -0.1"]),
    ],
)
def test_the_note_of_a_threshold_stays_inside_the_plot(value: float, expected: list[str]) -> None:
    chart = Chart("name", "Title", range=(0.0, 1.0), limits=[Limit(value, "stop")], steps=(0, 10))
    assert [one for one in drawing(chart) if " limit " in one] == expected


def test_a_note_is_below_a_threshold_14_pixels_from_the_top() -> None:
    chart = Chart("name", "Title", range=(0.0, 15.0), limits=[Limit(13.6, "stop")], steps=(0, 10))
    assert drawing(chart)[-2:] == ["line limit 44.0 24.0 350.0 24.0", "text limit 350.0 36.0 end stop 13.6"]


def test_the_seventh_run_has_the_hue_of_the_first_in_every_mark() -> None:
    share = Estimate(0.5, 0.25, 0.75)
    for hue in (1, 7):
        lines = Chart(
            *("name", "Title"),
            lines=[Line([0, 10], [0.0, 1.0], hue=hue)],
            bands=[Band([0.0, 10.0], [0.0, 0.5], [0.5, 1.0], hue)],
            points=[(hue, 5, share)],
            steps=(0, 10),
        )
        assert [one.get("class") for one in elements(lines, "g")] == ["c1"] * 3
        bars = Chart("name", "Title", bars=[Interval("a", share, hue)])
        assert [one.get("class") for one in elements(bars, "g")] == ["c1"]
    default = Chart("name", "Title", bands=[Band([0.0, 1.0], [0.0, 0.5], [0.5, 1.0])], lines=[Line([0, 1], [0.0, 1.0])])
    assert [one.get("class") for one in elements(default, "g")] == ["c0", "c0"]
    assert elements(default, "polyline")[0].get("points") == "48.0,160.0 346.0,10.0"
    assert [one.get("class") for one in elements(Chart("name", "Title", bars=[Interval("a", share)]), "g")] == ["c0"]
    styles = [Line([], [], hue=hue, dash=dash).style for hue, dash in ((0, 0), (5, 3), (6, 0), (6, 3), (13, 1))]
    assert styles == ["c0 d0", "c5 d3", "c0 d1", "c0 d0", "c1 d3"]


def test_a_line_of_thousands_of_points_is_drawn_by_its_extremes_and_those_of_its_mean() -> None:
    values = [math.sin(step / 300) + (step == 3210) for step in range(6000)]
    chart = Chart("name", "Title", lines=[Line(range(6000), values)], steps=(0, 6000))
    across, up = horizontal(chart), vertical(chart)
    raw, smooth = (places(one.get("points", "")) for one in elements(chart, "polyline"))
    assert 500 < len(raw) <= MAX_POINTS + 2
    assert 250 < len(smooth) <= MAX_POINTS // 2 + 2
    assert max(up(y) for _, y in raw) == pytest.approx(max(values), abs=0.02)
    # A mean is drawn at the middle of its 300 points.
    assert [across(x) for x, _ in (smooth[0], smooth[-1])] == pytest.approx([150, 5850], abs=2)
    means = np.convolve(values, np.ones(300) / 300, mode="valid")
    at = [round(across(x)) - 150 for x, _ in smooth]
    assert [up(y) for _, y in smooth] == pytest.approx([means[min(max(0, place), 5700)] for place in at], abs=0.03)


@pytest.mark.parametrize(
    ("kwargs", "low", "high"),
    [
        ({"points": [(0, 5, Estimate(0.5, 0.25, 2.5))]}, 0, 3),
        ({"points": [(0, 5, Estimate(0.5, -1.5, 0.5))]}, -1.5, 0.5),
        ({"bands": [Band([0.0, 10.0], [-2.0, 1.0], [3.0, 4.0])]}, -2, 4),
        ({"lines": [Line([0, 10], [0.0, 9.0])], "bands": [Band([0.0, 10.0], [1.0, 1.0], [2.0, 2.0])]}, 0, 10),
        ({"lines": [Line([0, 10], [0.0, 1.0])], "range": (0.0, 4.0)}, 0, 4),
        ({"lines": [Line([0, 10], [2.0, 3.0]), Line([0, 10], [1.0, 4.0])]}, 0, 4),
        ({"lines": [Line([0, 10], [-3.0, -3.0])]}, -3, 0),
        ({"lines": [Line([0, 10], [-4.0, -2.0])], "limits": [Limit(-1.0, "stop")]}, -4, -2),
        ({"lines": [Line([0, 10], [0.0, 0.4])], "limits": [Limit(0.8, "stop")], "unit": "share"}, 0, 1),
        ({"lines": [Line([0, 10], [0.0, 0.97])], "limits": [Limit(1.2, "stop")], "unit": "share"}, 0, 1),
        ({"lines": [Line([0, 10], [0.0, 1.0])], "limits": [Limit(1.2, "stop")], "unit": "share"}, 0, 1),
        ({"lines": [Line([0, 10], [0.0, 1e-13])]}, 0, 1e-13),
        ({"lines": [Line([0, 10], [0.0, 1.7e308])]}, 0, 1e100),
        ({"lines": [Line([0, 10], [-1.7e308, 1.7e308])]}, -1e100, 1e100),
    ],
    ids=str,
)
def test_the_axis_spans_all_that_is_drawn(kwargs: dict[str, Any], low: float, high: float) -> None:
    up = vertical(Chart("name", "Title", **kwargs, steps=(0, 10)))
    assert (up(160), up(10)) == pytest.approx((low, high), rel=0.001, abs=0.001 * (high - low))


def test_a_point_outside_of_the_axis_is_drawn_just_beyond_it() -> None:
    """The axis spans 298 pixels from 48. A twentieth of it is 14.9."""
    chart = Chart("name", "Title", lines=[Line([-50, 5, 50], [0.0, 1.0, 0.0])], steps=(0, 10))
    (line,) = elements(chart, "polyline")
    assert line.get("points") == "33.1,160.0 197.0,10.0 360.9,160.0"


def test_a_long_label_is_cut_and_a_hidden_character_shown() -> None:
    bars = [Interval("a\u202eb", Estimate(0.5, 0.4, 0.6)), Interval("x" * 300, Estimate(0.5, 0.4, 0.6))]
    first, second = (text for x, _, _, text in texts(Chart("name", "Title", bars=bars)) if x == 12)
    assert first == "a\\u202eb  50 %"
    assert len(second) <= 60
    chart = Chart("name", "a\u202eb", bars=bars[:1])
    assert chart.svg().count("a\\u202eb: ") == 2
    assert "<title>a\\u202eb: " in chart.standalone()


def test_a_chart_of_no_step_or_value_can_be_drawn() -> None:
    chart = Chart("name", "Title", range=(0.0, 0.0), steps=(3, 3))
    assert drawing(chart)[0] == "line grid 44.0 160.0 350.0 160.0"


def test_bars_count_for_the_height_of_a_file() -> None:
    bars = [Interval("a", Estimate(0.5, 0.4, 0.6))] * 3
    text = Chart("name", "Title", "share", bars=bars).standalone()
    assert 'viewBox="0 0 360 152" width="360" height="152"' in text  # 24 + 3 * 34 + 26
    assert "svg { background: var(--paper); }" in text
    assert text.startswith('<svg class="chart" xmlns="http://www.w3.org/2000/svg"')
    assert text.endswith("</g></svg>\n")
    assert "; ".join(["a: 0.500 [0.400, 0.600]"] * 3) in text


def test_moving_means_of_the_largest_floats_are_finite() -> None:
    window, means = moving_mean([1.7e308, -1.7e308] * 50)
    assert window == 5
    assert np.isfinite(means).all()


def test_bars_and_whiskers_lie_at_their_pixels() -> None:
    bars = [Interval("a", Estimate(0.5, 0.25, 0.75)), Interval("b", Estimate(0.0, 0.0, 0.1), 1, is_filled=False)]
    chart = Chart("name", "Title", bars=bars)
    ends = ("start", "middle", "middle", "middle", "end")
    places = ("8.0", "91.5", "175.0", "258.5", "342.0")
    scale: list[str] = []
    for number_of_tick, (place, end) in enumerate(zip(places, ends, strict=True)):
        scale += [f"line grid {place} 4.0 {place} 72.0", f"text {place} 86.0 {end} {25 * number_of_tick} %"]
    assert drawing(chart) == [
        *scale,
        *("text 12.0 14.0 start a  50 %", "rect filled 8 19.0 167.0 9 2", "line whisker 91.5 23.5 258.5 23.5"),
        *("line whisker 91.5 20.0 91.5 27.0", "line whisker 258.5 20.0 258.5 27.0"),
        *("text 12.0 48.0 start b  0 %", "rect open 8 53.0 1.0 9 2", "line whisker 8.0 57.5 41.4 57.5"),
        *("line whisker 8.0 54.0 8.0 61.0", "line whisker 41.4 54.0 41.4 61.0"),
    ]
    assert chart.height == 94


def test_a_legend_of_a_file_is_above_its_chart() -> None:
    legend = [("c0 d0", "a", "1 → 2"), ("c1 d0", "b", "3 → 4")]
    text = Chart("name", "Title", lines=[Line([0, 1], [1.0, 2.0])], legend=legend).standalone()
    root = ElementTree.fromstring(text)
    assert (root.get("viewBox"), root.get("width"), root.get("height")) == ("0 0 360 238", "360", "238")
    name = "{http://www.w3.org/2000/svg}"
    lines = [(one.get("class"), one.get("points")) for one in root.iter(f"{name}polyline")][:2]
    assert lines == [("c0 d0", "8,29.0 28,29.0"), ("c1 d0", "8,44.0 28,44.0")]
    titles = [(one.get("x"), one.get("y"), one.text) for one in root.iter(f"{name}text")][:3]
    assert titles == [("8", "18", "Title"), ("34", "33.0", "a 1 → 2"), ("34", "48.0", "b 3 → 4")]
    (plot,) = (one for one in root.iter(f"{name}g") if one.get("transform"))
    assert plot.get("transform") == "translate(0 54)"


@pytest.mark.parametrize(
    ("high", "limit", "top"),
    [(1.0, 2.0, 3.0), (1.0, 2.1, 1.0), (4.0, 6.8, 8.0), (3.0, None, 3.0), (0.0, None, 1.0)],
)
def test_the_axis_ends_at_a_tick_above_everything_near(high: float, limit: float | None, top: float) -> None:
    limits = [] if limit is None else [Limit(limit, "stop")]
    chart = Chart("name", "Title", lines=[Line([0, 10], [0.0, high])], limits=limits, steps=(0, 10))
    up = vertical(chart)
    assert up(10) == pytest.approx(top, abs=1e-6)
    assert up(160) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("count", [60, 61])
def test_a_line_is_smoothed_above_60_points(count: int) -> None:
    chart = Chart("name", "Title", lines=[Line(range(count), [0.0, 1.0] * 30 + [0.0] * (count - 60))], steps=(0, count))
    assert len(elements(chart, "polyline")) == 1 + (count > 60)


def test_a_page_has_light_and_dark_colours_and_light_ones_on_paper() -> None:
    light, dark, print_ = palette().splitlines()
    assert light.startswith(":root { --ink: #1b1f24; --faint: #57606a; --paper: #ffffff; ")
    assert dark.startswith("@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; ")
    assert print_.startswith("@media print { :root { --ink: #1b1f24; ")
    assert (light.count("light dark"), print_.count("color-scheme: light;")) == (1, 1)
