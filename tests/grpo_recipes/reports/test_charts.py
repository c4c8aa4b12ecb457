"""Charts, read back: which metrics are drawn, with which labels and thresholds, and at which places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from grpo_recipes.evaluation.estimates import Estimate
from grpo_recipes.reports.charts import ACCURACY, METRICS, SECTIONS, Chart, Line, duration, number, percent, sections
from grpo_recipes.reports.run import Run, Series
from tests.support.logged_runs import logged

LIMITS = {
    "KL to the reference": [1.0],
    "Entropy": [0.15],  # a tenth of the start
    "Length": [80.0],
    "Truncated completions": [0.25],
    "Groups without variance": [0.5, 0.8],
    "Clipped tokens": [0.2],
    "Effective sample size": [0.8],
    "Failed calls": [0.5],
    "Completions that a limit ended": [0.25],
}
"""Thresholds by the title of the chart."""


def drawn(*runs: Run) -> dict[str, Chart]:
    return {chart.title: chart for section in sections(runs) for chart in section.charts}


def test_every_metric_is_drawn_once_with_the_threshold_of_its_check() -> None:
    keys = {key.replace("*", name) for metric in METRICS for key in metric.keys for name in ("1", "2")}
    curves = {key: [1.5, 1.6, 1.7, 1.8 + place] for place, key in enumerate(sorted(keys))}
    run = logged(curves, config={"max_completion_length": 100})
    found = sections([run])
    assert {section.id: section.title for section in found} == SECTIONS
    charts = [chart for section in found for chart in section.charts]
    assert [chart.title for chart in charts] == [metric.title for metric in METRICS]
    assert sorted(line.series.values for chart in charts for line in chart.lines) == sorted(curves.values())
    limits = {chart.title: [value for _, value in chart.limits] for chart in charts if chart.limits}
    assert limits == {title: pytest.approx(values) for title, values in LIMITS.items()}
    assert {chart.last_step for chart in charts} == {4}, "one axis for all"


def test_several_runs_share_a_chart() -> None:
    first = replace(logged({"reward": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]}), folder=Path("/a"))
    second = replace(logged({"reward": [2.0], "eval_reward": [3.0, 5.0]}), folder=Path("/b"))

    def legend(*runs: Run) -> list[tuple[str, str, str]]:
        shown = drawn(*runs)["Total reward"].legend
        return [(line.style, line.label.partition(",")[0], values.partition(",")[0]) for line, values in shown]

    assert legend(first) == [("c0 d0", "in training", "0.5 → 6.5")]
    assert legend(second) == [("c0 d0", "in training", "2"), ("c0 d1", "held out", "3 → 5")]
    assert legend(first, second) == [("c0 d0", "a", "0.5 → 6.5"), ("c1 d0", "b", "2"), ("c1 d1", "b", "3 → 5")]
    assert "1–2 and 7–8" in drawn(first)["Total reward"].legend[0][1]


def test_a_tool_or_pass_is_named_and_at_most_four_are_drawn() -> None:
    one = drawn(logged({"tools/add/failures": [0.5, 0.25], "tools/unknown/failures": [1.0, 1.0]}))["Faults by tool"]
    assert [line.label for line in one.lines] == ["add"]
    metrics = {f"passes/{place}/effective_sample_size": [1.0, 0.5] for place in range(1, 9)}
    chart = drawn(logged(metrics))["Effective sample size"]
    assert [line.label for line in chart.lines] == ["pass 1", "pass 3", "pass 5", "pass 8"]
    assert "4 of 8" in chart.note


def test_the_accuracy_on_held_out_problems_is_drawn() -> None:
    share, more = Estimate(0.25, 0.2, 0.3), Estimate(0.5, 0.4, 0.6)
    strict = {label: {"strict": one.as_dict()} for label, one in (("after", more), ("before", share), ("other", share))}
    (line,) = drawn(logged({"reward": [0.5, 0.5]}, evaluations=strict))[ACCURACY].lines
    assert (line.series, line.intervals) == (Series([0, 2], [0.25, 0.5]), [share, more])


# Places


def chart_of(*values: float, unit: str = "", limits: Sequence[tuple[str, float]] = ()) -> Chart:
    line = Line(Series(list(range(1, len(values) + 1)), list(values)), "", "c1 d2")
    return Chart("Title", unit, lines=[line], limits=limits, last_step=len(values))


def drawing(chart: Chart) -> list[str]:
    """Return the elements of a chart in order, each as its tag, the values of its attributes, and its text."""
    root = ElementTree.fromstring(chart.svg())
    found = [one for one in root.iter() if one is not root and one.tag != "g"]
    return [" ".join(filter(None, [one.tag, *one.attrib.values(), one.text])) for one in found]


def test_lines_intervals_and_thresholds_lie_at_their_pixels() -> None:
    """The plot spans 306 pixels from 44 and 150 from 10. Lines begin and end 4 pixels inside of it."""
    shares = [Estimate(0.0, 0.0, 0.25), Estimate(1.0, 0.75, 1.0)]
    line = Line(Series([0, 10], [0.0, 1.0]), "", "c2 d1", shares)
    chart = Chart("Title", "share", lines=[line], limits=[("stop", 0.5)], last_step=10)
    assert drawing(chart) == [
        *("line grid 44.0 160.0 350.0 160.0", "text 38.0 164.0 end 0 %"),
        *("line grid 44.0 85.0 350.0 85.0", "text 38.0 89.0 end 50 %"),
        *("line grid 44.0 10.0 350.0 10.0", "text 38.0 14.0 end 100 %"),
        *("text 48.0 176.0 start 0", "text 197.0 176.0 middle 5", "text 346.0 176.0 middle 10"),
        "text 38.0 176.0 end step",
        "polyline c2 d1 48.0,160.0 346.0,10.0",
        *("line whisker 48.0 160.0 48.0 122.5", "line whisker 346.0 47.5 346.0 10.0"),
        *("line limit 44.0 85.0 350.0 85.0", "text limit 350.0 81.0 end stop 50 %"),
    ]


def test_a_threshold_far_away_is_a_note_at_the_edge() -> None:
    expected = {
        0.9: ["line limit 44.0 25.0 350.0 25.0", "text limit 350.0 21.0 end stop 0.9"],
        0.92: ["line limit 44.0 22.0 350.0 22.0", "text limit 350.0 34.0 end stop 0.92"],  # no room above
        2.1: ["text limit 350.0 12.0 end ↑ stop 2.1"],
        -0.1: ["text limit 350.0 156.0 end ↓ stop -0.1"],
    }
    for value, elements in expected.items():
        assert [one for one in drawing(chart_of(0.0, 1.0, limits=[("stop", value)])) if " limit " in one] == elements


def test_the_axis_spans_all_that_is_drawn() -> None:
    for chart, *ends in (
        (chart_of(2.0, 3.0, 1.0, 4.0), "0", "4"),  # a value that halves should look so
        (chart_of(-3.0, -3.0), "-3", "0"),
        (chart_of(-4.0, -2.0, limits=[("stop", -1.0)]), "-4", "-2"),
        (chart_of(0.0, 1.0, limits=[("stop", 2.0)]), "0", "3"),
        (chart_of(0.0, 1.0, limits=[("stop", 2.1)]), "0", "1"),
        (chart_of(0.2, 0.97, unit="share"), "0 %", "100 %"),
        (chart_of(0.0001, 0.0004, unit="share"), "0 %", "0.04 %"),
        (chart_of(0.0, 0.0), "0", "1"),
    ):
        labels = [one.split(" end ")[1] for one in drawing(chart) if one.startswith("text 38.0") and "step" not in one]
        assert [labels[0], labels[-1]] == ends


def test_a_long_line_is_thin_and_has_the_means_of_its_parts() -> None:
    values = [math.sin(step / 300) + (step == 3210) for step in range(6000)]
    marks = [one.split() for one in drawing(chart_of(*values)) if one.startswith(("polyline", "circle"))]
    assert [mark[:2] for mark in marks] == [["polyline", "raw"], ["polyline", "c1"]]
    raw, smooth = (mark[3 if mark[1] == "c1" else 2 :] for mark in marks)
    assert len(raw) <= 602
    assert len(smooth) == 60
    heights = [float(point.split(",")[1]) for point in smooth]
    means = [part.mean() for part in np.array_split(values, 60)]
    assert np.corrcoef(heights, means)[0, 1] == pytest.approx(-1)


def test_a_chart_can_be_a_file_of_its_own_and_shows_a_single_point() -> None:
    root = ElementTree.fromstring(chart_of(0.4).svg(".chart { color: red }"))
    assert (root.tag, root[0].text) == ("{http://www.w3.org/2000/svg}svg", ".chart { color: red }")
    assert "Title" in root.attrib["aria-label"]
    assert [one.split()[0] for one in drawing(chart_of(0.4))].count("circle") == 1


def test_a_figure_is_written_in_few_characters() -> None:
    numbers = {0.0: "0", 1e-5: "1e-05", 0.01342: "0.0134", 12_345.0: "12.3k", -2500.0: "-2.5k", 3.4e6: "3.4M"}
    shares = {0.0: "0 %", 1.0: "100 %", 0.123: "12 %", 0.051: "5.1 %", 0.07004: "7 %", -1e-9: "0 %"}
    times = {0.094: "0.094 s", 9.94: "9.9 s", 60.0: "1 min 0 s", 3599.6: "1 h 0 min", 49 * 3600.0: "49 h 0 min"}
    for write, texts in ((number, numbers), (percent, shares), (duration, times)):
        assert {value: write(value) for value in texts} == texts
