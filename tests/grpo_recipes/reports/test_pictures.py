"""Charts of a report, from runs in memory: which metrics each shows, with which labels, legends and thresholds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from grpo_recipes.evaluation.estimates import Estimate
from grpo_recipes.reports import diagnostics, pictures
from grpo_recipes.reports.charts import Band, Chart
from grpo_recipes.reports.pictures import groups, labelled, tokens_per_second
from grpo_recipes.reports.run import Run
from tests.support.logged_runs import logged, scored

DRAWN: dict[str, dict[str, tuple[list[str], list[str]]]] = {
    "learnt": {
        "Total reward, weighted sum": (["reward: in training", "eval_reward: held out"], []),
        "Reward right, of at most 4": (["rewards/right/mean"], []),
    },
    "trust": {
        "KL to the reference, nats per token": (
            ["kl: sampled", "kl/full: over the vocabulary"],
            ["check of the median of 5: 1"],
        ),
        "Entropy, nats per token": (["entropy"], ["check of the last quarter: 0.15"]),  # a tenth of the start
        "Completion length, tokens": (
            ["completions/mean_length: mean", "completions/max_length: longest"],
            ["check of the last quarter, after growth: 80", "cap: 100"],
        ),
        "Truncated completions, share of completions": (
            ["completions/clipped_ratio"],
            ["check of the last quarter: 25 %"],
        ),
        "Groups without variance, share of groups": (
            ["frac_reward_zero_std"],
            ["check of the mean: 50 %", "check of the last quarter: 80 %"],
        ),
        "Clipped tokens, share of tokens": (
            ["clip_ratio/region_mean: ", "cispo_clip_ratio: CISPO"],
            ["check of the mean and the last quarter: 20 %"],
        ),
        "Weights that a step changes, share of those sampled": (
            ["updates/changed: changed", "updates/expected: if no update were lost"],
            [],
        ),
        "Probabilities in sampling and training, nats per token": (
            [
                "sampling/sampling_logp_difference/mean: mean",
                "sampling/sampling_logp_difference/max: largest",
            ],
            [],
        ),
        "Effective sample size, share of tokens": (
            ["passes/1/effective_sample_size: pass 1", "passes/2/effective_sample_size: pass 2"],
            ["check of the last quarter: 80 %"],
        ),
    },
    "tools": {
        "Turns, per completion": (["tools/turns"], []),
        "Calls of tools, per completion": (["tools/call_frequency: all", "tools/unknown/calls: of unknown names"], []),
        "Completions that call a tool, share of completions": (["tools/rows_with_calls"], []),
        "Failed calls, share of calls": (["tools/failure_frequency"], ["check of the last quarter: 50 %"]),
        "Completions that a limit ended, share of completions": (
            [
                "tools/rows_at_limit: no turns left",
                "tools/rows_out_of_budget: no tokens left",
                "tools/rows_results_dropped: results dropped",
            ],
            ["check of the last quarter, summed: 25 %"],
        ),
        "Tokens of results, share of completion tokens": (["tools/tokens_share"], []),
        "Calls by tool, per completion that has the tool": (["tools/find/calls: find", "tools/add/calls: add"], []),
        "Faults of add, share of its calls": (["tools/add/failures"], []),
        "Calls that don't fit of add, share of its calls": (["tools/add/refused"], []),
        "Time of a call of add, seconds": (["tools/add/seconds"], []),
    },
    "ran": {
        "Time of a step, seconds": (["step_time"], []),
        "Efficiency, tokens of a step": (
            ["efficiency/tokens_computed: computed", "efficiency/tokens_needed: needed"],
            [],
        ),
        "Prompts generated, share of a generation": (
            ["prompts/generated: generated", "prompts/kept_by_floor: of these, by the floor alone"],
            [],
        ),
        "Gradient norm, before clipping": (["grad_norm"], []),
        "Learning rate": (["learning_rate"], []),
    },
}
"""Logged metrics by chart, with their labels, and the thresholds."""

RIGHT = {"name": "right", "kind": "correctness", "highest_pay": 4.0}


def title(chart: Chart) -> str:
    return ", ".join(filter(None, [chart.title, chart.unit]))


def test_every_metric_is_drawn_once_with_its_label_and_its_threshold() -> None:
    keys = [line.partition(": ")[0] for charts in DRAWN.values() for lines, _ in charts.values() for line in lines]
    # A curve of its own for each metric: n, n + 1, n + 2, n + 3. The first tool has the most calls.
    curves = {key: [float(number + step) for step in range(4)] for number, key in enumerate(keys[::-1], 1)}
    curves["entropy"] = [1.5, 1.6, 1.7, 1.8]
    owners = {tuple(values): key for key, values in curves.items()}
    assert len(owners) == len(keys)
    found: dict[str, dict[str, tuple[list[str], list[str]]]] = {}
    run = logged(curves, config={"max_completion_length": 100}, rewards=[RIGHT])
    for group in groups([run]):
        found[group.id] = {}
        for chart in group.charts:
            if chart.title == "Tokens a second":
                continue
            lines = []
            for line in chart.lines:
                key = owners[tuple(line.values)]
                lines.append(f"{key}: {line.label}" if len(chart.lines) > 1 else key)
                assert list(line.steps) == [1, 2, 3, 4]
            limits = [f"{limit.label} {chart.format(limit.value)}" for limit in chart.limits]
            found[group.id][title(chart)] = (lines, limits)
            assert chart.steps == (0, 4)
    assert found == DRAWN


def only(runs: list[Run], name: str) -> Chart:
    (chart,) = (chart for group in groups(runs) for chart in group.charts if chart.title == name)
    return chart


def test_a_legend_has_the_means_of_both_quarters_and_the_names_of_several_runs() -> None:
    first = replace(logged({"reward": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]}), folder=Path("/a"))
    second = replace(logged({"reward": [2.0], "eval_reward": [3.0, 5.0]}), folder=Path("/b"))
    assert only([first], "Total reward").legend == [("c0 d0", "", "0.5 → 6.5, means of steps 1–2 and 7–8")]
    assert only([second], "Total reward").legend == [
        ("c0 d0", "in training", "2"),
        ("c0 d1", "held out", "3 → 5, steps 1 and 2"),
    ]
    assert only([first, second], "Total reward").legend == [
        ("c0 d0", "a, in training", "0.5 → 6.5, means of steps 1–2 and 7–8"),
        ("c1 d0", "b, in training", "2"),
        ("c1 d1", "b, held out", "3 → 5, steps 1 and 2"),
    ]
    assert only([first, second], "Total reward").steps == (0, 8)


def test_the_chart_of_groups_without_variance_has_the_figures_and_thresholds_of_its_check() -> None:
    run = logged({"frac_reward_zero_std": [0.0, 0.0, 0.1, 0.2, 0.4, 0.5, 0.6, 0.8]})
    chart, sentence = only([run], "Groups without variance"), diagnostics.zero_variance(run)
    assert isinstance(sentence, str), "no finding, although the line crosses one half"
    ((_, _, value),) = chart.legend
    assert value == "0 % → 70 %, means of steps 1–2 and 7–8"
    assert [(limit.label, limit.value) for limit in chart.limits] == [
        ("check of the mean:", 0.5),
        ("check of the last quarter:", 0.8),
    ]
    assert "33% of the groups have no variance in their rewards (limit 50%), and 70% at the end" in sentence
    assert sentence.endswith("(limit 80%)")


def test_a_metric_that_never_changes_is_a_line_of_text() -> None:
    run = logged(
        {
            "kl": [0.5, 0.5],
            "frac_reward_zero_std": [0.25, 0.25],
            "learning_rate": [0.0, 0.0],
            "grad_norm": [500.0, 499.0],  # a range of 0.2 % of the largest
            "entropy": [1.0, 0.99],
        }
    )
    flat = {group.id: group.flat for group in groups([run])}
    assert flat == {
        "learnt": [],
        "trust": ["KL to the reference 0.5 nats per token", "Groups without variance 25 %"],
        "tools": [],
        "ran": ["Gradient norm 500 before clipping", "Learning rate 0"],
    }
    assert only([run], "Entropy").lines
    two = [run, logged({"kl": [0.25, 0.25]})]
    assert groups(two)[1].flat[0] == "KL to the reference 0.5, 0.25 nats per token"
    assert groups([run, run])[1].flat[0] == "KL to the reference 0.5 nats per token"
    assert only([run, logged({"kl": [0.25, 0.5]})], "KL to the reference").lines, "one of two lines changes"


@pytest.mark.parametrize(
    ("values", "is_flat"),
    [
        *(([500.0, 499.0], True), ([500.0, 498.9], False), ([500.0, 498.0], False), ([-500.0, -499.0], True)),
        *(([0.0, 1e-9], False), ([1e308, 1e308], True), ([1.7e308, -1.7e308], False), ([5.0, 5.0, 6.0, 5.0], False)),
    ],
)
def test_a_line_that_moves_by_less_than_a_third_of_a_pixel_is_flat(values: list[float], is_flat: bool) -> None:
    group = groups([logged({"grad_norm": values})])[3]
    assert (len(group.flat), len(group.charts)) == (is_flat, not is_flat)


def test_a_group_counts_if_it_has_a_chart_or_a_line_of_text() -> None:
    chart = Chart("name", "Title")
    found = [bool(pictures.Group("id", "Title", *parts)) for parts in (([], []), ([chart], []), ([], ["flat"]))]
    assert found == [False, True, True]


def test_at_most_four_thresholds_are_drawn_each_once() -> None:
    runs = [logged({"entropy": [start] * 4 + [0.0] * 4}) for start in (1.0, 2.0, 2.0, 3.0, 4.0, 5.0)]
    assert [limit.value for limit in only(runs, "Entropy").limits] == pytest.approx([0.1, 0.2, 0.3, 0.4])


@pytest.mark.parametrize("cap", [None, 0])
def test_a_run_without_a_cap_has_no_threshold_of_length(cap: int | None) -> None:
    run = logged({"completions/mean_length": [5.0, 9.0]}, config={"max_completion_length": cap})
    assert list(only([run], "Completion length").limits) == []


def test_the_axis_of_a_run_of_one_step_has_that_step() -> None:
    assert only([logged({"kl": [0.5, 1.0]}, steps=[0, 1])], "KL to the reference").steps == (0, 1)


def test_passes_are_in_the_order_of_their_numbers() -> None:
    runs = [logged({f"passes/{n}/effective_sample_size": [1.0, 0.5] for n in numbers}) for numbers in ((16, 8), (1, 9))]
    labels = [line.label for line in only(runs, "Effective sample size").lines]
    assert labels == ["nowhere, pass 8", "nowhere, pass 16", "nowhere, pass 1", "nowhere, pass 9"]


def test_the_calls_of_all_runs_decide_which_tools_are_drawn() -> None:
    first = {"tools/a/calls": [6.0, 5.0], "tools/b/calls": [1.0, 2.0], "tools/a/failures": [0.5, 0.25]}
    second = {"tools/a/calls": [1.0, 0.0], "tools/b/calls": [2.0, 4.0], "tools/b/seconds": [1.0, 2.0]}
    runs = [logged(first), logged(second)]
    labels = [line.label for line in only(runs, "Calls by tool").lines]
    assert labels == ["nowhere, a", "nowhere, b", "nowhere, a", "nowhere, b"]
    assert [line.hue for line in only(runs, "Faults of a").lines] == [0], "logged by one run alone"
    assert [line.hue for line in only(runs, "Time of a call of b").lines] == [1]


def test_a_long_name_gives_a_short_title_and_file() -> None:
    charts = groups([logged({f"tools/{'x' * 300}/calls": [1.0, 2.0], f"rewards/{'Ä ' * 300}/mean": [1.0, 2.0]})])
    (reward,), (tool,) = charts[0].charts, charts[2].charts
    assert reward.name.startswith("reward-ä-ä-")
    assert max(len(reward.name), len(tool.name)) <= 100
    assert len(tool.title) < 110


def test_at_most_four_tools_are_drawn_those_called_most() -> None:
    calls = {
        f"tools/{name}/calls": [count, 0.0] for name, count in zip("abcde", (1.0, 5.0, 2.0, 4.0, 3.0), strict=True)
    }
    chart = only([logged(calls)], "Calls by tool")
    assert [line.label for line in chart.lines] == ["b", "d", "e", "c"]
    assert chart.note == "The 4 tools called most, of 5."
    four = {key: values for key, values in calls.items() if "e" not in key.split("/")[1]}
    assert only([logged(four)], "Calls by tool").note == ""


def test_at_most_four_passes_are_drawn_the_ends_included() -> None:
    sizes = {f"passes/{number}/effective_sample_size": [1.0, 0.5] for number in range(1, 8)}
    chart = only([logged(sizes)], "Effective sample size")
    assert [line.label for line in chart.lines] == ["pass 1", "pass 3", "pass 5", "pass 7"]


def test_titles_that_differ_in_signs_alone_give_different_files() -> None:
    metrics = {"rewards/a.b/mean": [0.0, 1.0], "rewards/a-b/mean": [0.0, 2.0], "rewards/a b/mean": [0.0, 3.0]}
    names = [chart.name for chart in groups([logged(metrics)])[0].charts]
    assert names == ["reward-a-b", "reward-a-b-2", "reward-a-b-3"]


def with_scores(*by_step: list[float]) -> pd.DataFrame:
    table = scored([(step, 0, score) for step, scores in enumerate(by_step, 1) for score in scores])
    return table.assign(**{"pay/right": table["total"]})


EIGHT = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
HIGHER = [score + 8 for score in EIGHT]


def test_the_band_of_a_reward_is_the_middle_half_of_its_scores() -> None:
    metrics = {"rewards/right/mean": [3.5, 11.5]}
    run = logged(metrics, rows=with_scores(EIGHT, HIGHER), rewards=[RIGHT])
    chart = only([run], "Reward right")
    assert chart.bands == [Band([1.0, 2.0], [1.75, 9.75], [5.25, 13.25])]
    assert (chart.note, chart.range) == ("Shaded: the middle half of the completions.", (0.0, 4.0))
    assert [band.hue for band in only([run, run], "Reward right").bands] == [0, 1]
    for without in (
        logged(metrics, rows=with_scores(EIGHT, HIGHER[:7]), rewards=[RIGHT]),  # one window of eight
        logged(metrics, rows=with_scores([0.0, 1.0] * 4, [0.0, 1.0] * 4), rewards=[RIGHT]),
        logged(metrics, rows=scored([]), rewards=[RIGHT]),
    ):
        assert (only([without], "Reward right").bands, only([without], "Reward right").note) == ([], "")
    assert only([run] * 3, "Reward right").bands == []


def test_a_band_has_at_most_24_windows_each_at_its_mean_step() -> None:
    run = logged(
        {"rewards/right/mean": [3.5, 11.5]},
        rows=with_scores(*[EIGHT] * 30, HIGHER, HIGHER),
        rewards=[RIGHT],
    )
    (band,) = only([run], "Reward right").bands
    assert band.steps == [1.5, 3.5, 5.5, 7.5, 9.5, 11.5, 13.5, 15.5, *map(float, range(17, 33))]
    assert (band.low[0], band.high[0], band.low[-1]) == (1.75, 5.25, 9.75)


def test_tokens_a_second_are_those_since_the_entry_before() -> None:
    metrics = {"num_tokens": [100.0, 300.0, 300.0, 900.0], "step_time": [1.0, 4.0, 1.0, 2.0]}
    rates = tokens_per_second(logged(metrics, steps=[1, 2, 3, 5]))
    assert (rates.steps, rates.values) == ([2, 5], [50.0, 150.0])
    short = tokens_per_second(logged({"num_tokens": [100.0, 300.0], "step_time": [0.25, 0.5]}))
    assert (short.steps, short.values) == ([2], [400.0])
    slow = tokens_per_second(logged({"num_tokens": [1.0, 2.0], "step_time": [2.0, 2.0]}))
    assert (slow.steps, slow.values) == ([2], [0.5])
    # Steps of no time or of a negative one, counts that fall, and rates that can't be drawn, all of damaged logs.
    times, tokens = [1.0, 0.0, -1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 2.0, 1e300]
    damaged = tokens_per_second(logged({"num_tokens": tokens, "step_time": times}))
    assert (damaged.steps, damaged.values) == ([], [])
    elsewhere = tokens_per_second(logged({"num_tokens": [1.0, 2.0], "step_time": [1.0]}))
    assert (elsewhere.steps, elsewhere.values) == ([], [])


def share(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.125, "high": value + 0.125}


def test_evaluations_are_bars_in_the_order_of_the_training() -> None:
    measured: dict[str, Any] = {
        "after": {"strict": share(0.75), "lenient": share(0.875)},
        "other": {"strict": share(0.5)},
        "before": {"strict": share(0.25)},
        "unjudged": {},
    }
    run = replace(logged({"reward": [1.0, 2.0]}, evaluations=measured), folder=Path("/run"))
    assert [label for label, _ in labelled(run)] == ["before", "other", "unjudged", "after"]
    named = logged({}, evaluations={"another": {}, "after": {}, "before": {}})
    assert [label for label, _ in labelled(named)] == ["before", "another", "after"]
    chart = groups([run])[0].charts[0]
    bars = [(bar.label, bar.estimate.value, bar.is_filled) for bar in chart.bars]
    assert bars == [
        ("before, strict", 0.25, True),
        ("other, strict", 0.5, True),
        ("after, strict", 0.75, True),
        ("after, lenient", 0.875, False),
    ]
    assert len(groups([run, run])[0].charts[0].bars) == 8
    both = {str(place): {"strict": share(0.5), "lenient": share(0.75)} for place in range(4)}
    nine = logged({}, evaluations={**both, "4": {"strict": share(0.5)}})
    assert [bar.label for bar in groups([nine])[0].charts[0].bars] == [f"{place}, strict" for place in range(5)]
    three = groups([run] * 3)[0].charts[0].bars  # more than eight: the strict ones
    assert [(bar.label, bar.hue) for bar in three[-3:]] == [
        ("run before, strict", 2),
        ("run other, strict", 2),
        ("run after, strict", 2),
    ]
    assert len(three) == 9


@pytest.mark.parametrize("count", [0, 1])
def test_a_run_without_metrics_has_empty_groups(count: int) -> None:
    assert [(group.id, bool(group)) for group in groups([logged({})] * count)] == [
        ("learnt", False),
        ("trust", False),
        ("tools", False),
        ("ran", False),
    ]
    assert json.dumps([group.title for group in groups([])]) == (
        '["What was learnt", "Can I trust it?", "How tools were used", "How it ran"]'
    )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_bands_are_drawn_for_one_run_or_two_and_the_axis_reaches_the_highest_score(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "_band", lambda run, reward, hue: hue if reward.name == "right" else None)
    rewards = [{"name": name, "kind": "other"} for name in ("right", "other")]
    runs = []
    for highest in (1.0, 3.0, 2.0)[:count]:
        values = {f"rewards/{name}/mean": [0.5, 0.75] for name in ("right", "other")}
        runs.append(logged(values, rewards=[{**rewards[0], "highest_pay": highest}, rewards[1]]))
    right, other = pictures._rewards(runs)
    assert [line.hue for line in right.lines] == list(range(count))
    assert list(right.bands) == (list(range(count)) if count <= 2 else [])
    assert bool(right.note) == (count <= 2)
    most = 1 if count == 1 else 3
    assert (right.unit, right.range) == (f"of at most {most}", (0.0, float(most)))
    assert (other.unit, other.range, other.note, list(other.bands)) == ("", None, "", [])


def test_a_reward_that_only_takes_away_is_of_at_most_0() -> None:
    penalty = {"name": "right", "kind": "other", "highest_pay": 0.0}
    chart = only([logged({"rewards/right/mean": [-1.0, -0.5]}, rewards=[penalty])], "Reward right")
    assert (chart.unit, chart.range) == ("of at most 0", (0.0, 0.0))


def test_scores_of_three_values_have_a_band() -> None:
    rows = with_scores([0.0, 1.0, 2.0, 2.0] * 2, [0.0, 1.0, 2.0, 2.0] * 2)
    (band,) = only([logged({"rewards/right/mean": [1.0, 1.5]}, rows=rows, rewards=[RIGHT])], "Reward right").bands
    assert (band.low, band.high) == ([0.75, 0.75], [2.0, 2.0])


def test_the_accuracy_of_evaluations_in_training_is_a_line_with_whiskers(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = [(10, Estimate(0.25, 0.2, 0.3)), (20, Estimate(0.5, 0.4, 0.6))]
    runs = [logged({"reward": [0.5]}), logged({"reward": [0.5]})]
    monkeypatch.setattr(Run, "held_out_accuracy", lambda run: shares if run is runs[1] else [])
    (chart,) = pictures._held_out(runs)
    (line,) = chart.lines
    assert (list(line.steps), list(line.values), line.hue) == ([10, 20], [0.25, 0.5], 1)
    assert list(chart.points) == [(1, 10, shares[0][1]), (1, 20, shares[1][1])]
    assert chart.legend == [("c1 d0", "nowhere", "25 % → 50 %, steps 10 and 20")]
    assert list(pictures._held_out(runs[:1])) == []
    (both,) = pictures._held_out([runs[1], runs[1]])
    assert [point[:2] for point in both.points] == [(0, 10), (0, 20), (1, 10), (1, 20)]
