"""Sentences and facts at the head of a report, from runs in memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import pytest

from grpo_recipes.evaluation.estimates import Estimate
from grpo_recipes.reports import report
from grpo_recipes.reports.diagnostics import Diagnosis, Finding
from grpo_recipes.reports.pictures import groups
from grpo_recipes.reports.run import Run
from tests.support.logged_runs import logged

RECORD: dict[str, Any] = {
    "recipe": {"model_name_or_path": "/models/tiny", "dataset": {"name": "gsm8k", "path": "a.jsonl"}},
    "train_prompts": 7473,
    "world_size": 2,
    "source": "/home/me/recipes/gsm8k.yaml",
    "started": "2026-01-02T03:04:05Z",
    "versions": {"torch": "2.8", "trl": "1.16.0", "numpy": "2", "transformers": "5.23", "grpo-recipes": "0.1"},
    "arguments": ["--config", "a b.yaml", "--hub_token", "hf_abcdefghijklmnop", 3],
}
TIMES = {"step_time": [2.0, 2.0, 2.0], "num_tokens": [100.0, 200.0, 12_345.0]}


def facts(metrics: dict[str, Any] = TIMES, **changed: Any) -> dict[str, str]:
    return dict(report._facts(logged(metrics, **{**RECORD, **changed})))


def test_the_facts_of_a_run_are_named_shortly() -> None:
    assert facts() == {
        "Model": "tiny",
        "Data": "gsm8k, 7,473 prompts",
        "Optimizer steps": "3",
        "Time in steps": "6 s",
        "Tokens": "12.3k in prompts and completions",
        "Hardware": "2 processes",
        "Recipe": "gsm8k.yaml",
    }
    assert list(facts()) == ["Model", "Data", "Optimizer steps", "Time in steps", "Tokens", "Hardware", "Recipe"]
    assert facts(world_size=1)["Hardware"] == "1 process"
    assert facts(hardware="2 × H100")["Hardware"] == "2 × H100"
    assert facts(recipe={"dataset": {"path": "my/data/a.jsonl"}}, train_prompts=None)["Data"] == "a.jsonl"
    assert facts(recipe={"dataset": {"path": ["a", "b"]}})["Data"] == "2 sources mixed, 7,473 prompts"
    assert facts(recipe={"dataset": {}})["Data"] == "7,473 prompts"
    assert facts(recipe={})["Data"] == "7,473 prompts"
    assert facts(recipe={"model_name_or_path": "Qwen/Qwen3-0.6B"})["Model"] == "Qwen/Qwen3-0.6B"
    for local in ("./tiny", "~/tiny", "/tiny", "models/base/tiny"):
        assert facts(recipe={"model_name_or_path": local})["Model"] == "tiny"
    assert report._facts(logged({})) == [("Optimizer steps", "0")]


def test_versions_are_in_the_order_of_their_importance() -> None:
    assert report._made_with(RECORD) == (
        "Started 2026-01-02 03:04:05 UTC; grpo-recipes 0.1; trl 1.16.0; transformers 5.23; torch 2.8"
    )
    assert report._made_with({"versions": {"torch": "2.8"}}) == "torch 2.8"
    assert report._made_with({}) == ""


def test_the_command_is_quoted_and_holds_no_secret() -> None:
    shown = report._command(RECORD)
    assert shown.startswith("python -m grpo_recipes.train --config 'a b.yaml' --hub_token ")
    assert "abcdefghijklmnop" not in shown
    assert shown.endswith(" 3")
    assert (report._command({}), report._command({"arguments": []}), report._command({"arguments": "x"})) == ("",) * 3


def at(
    step: int,
    planned: int,
    *,
    running: bool = False,
    ended: bool = False,
    times: bool = True,
    time: float = 2.0,
    fault: dict[str, Any] | None = None,
) -> Run:
    """Return a run of `planned` steps that has logged `step` of them, of two seconds each."""
    run = replace(logged({"step_time" if times else "reward": [time] * step}), is_running=running)
    run.log.max_steps, run.log.has_ended = planned, ended
    vars(run)["fault"] = fault
    return run


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (at(4, 10, running=True), "This run is still in progress: step 4 of 10, about 12 s left."),
        (at(4, 10, running=True, times=False), "This run is still in progress: step 4 of 10."),
        (at(4, 4, running=True), "This run is still in progress: step 4."),
        (at(0, 4, running=True), "This run is still in progress: step 0 of 4."),
        (
            at(4, 10),
            "This run was stopped at step 4 of 10. No cause was recorded: its process was probably killed.",
        ),
        (at(4, 10, ended=True), "This run was stopped at step 4 of 10."),
        (at(4, 10, fault={"sentence": "no"}), "This run was stopped at step 4 of 10."),
        (at(4, 0, fault={"sentence": "no"}), "This run was stopped at step 4."),
        (at(1_234, 5_000, ended=True), "This run was stopped at step 1,234 of 5,000."),
        (at(3, 5, running=True, time=100.0), "This run is still in progress: step 3 of 5, about 3 min 20 s left."),
        (at(3, 5, running=True, time=1e12), "This run is still in progress: step 3 of 5."),  # a damaged log
        (at(4, 4), ""),
        (at(4, 0), ""),
    ],
)
def test_an_unfinished_run_says_how_far_it_is(run: Run, sentence: str) -> None:
    assert report._state(run) == sentence


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((None, ""), (-1.0, ""), (float("inf"), ""), (1e10, ""), (0.0, "0 s"), (59.4, "59 s"), (60.0, "1 min 0 s")),
        *((3599.0, "59 min 59 s"), (3600.0, "1 h 0 min"), (3725.0, "1 h 2 min"), (47 * 3600.0, "47 h 0 min")),
        *((48 * 3600.0, "2 d 0 h"), (49 * 3600.0 + 60, "2 d 1 h"), (61.6, "1 min 2 s"), (3599.6, "1 h 0 min")),
    ],
)
def test_a_time_has_its_two_largest_units(seconds: float | None, text: str) -> None:
    assert report.duration(seconds) == text


def test_the_time_of_a_step_counts_for_the_steps_that_were_not_logged() -> None:
    assert report.seconds(logged({"step_time": [1.0, 2.0, 3.0]}, steps=[2, 3, 10])) == 2 + 2 + 21
    assert report.seconds(logged({"reward": [1.0]})) is None
    assert report.seconds(logged({"step_time": [1.0, 2.0, 3.0]}, steps=[5, 3, 10])) == 5 + 0 + 21, "a step back"


def evaluated(**shares: dict[str, Any]) -> dict[str, Any]:
    return {label: {"problems": 1200, "settings": {"strict": "s"}, "strict": one} for label, one in shares.items()}


def interval(value: float, low: float, high: float) -> dict[str, float]:
    return {"value": value, "low": low, "high": high}


LOW, HIGH = interval(0.4, 0.35, 0.45), interval(0.525, 0.5, 0.55)


@pytest.mark.parametrize(
    ("run", "sentence", "sure", "tone"),
    [
        (
            logged({}, evaluations=evaluated(before=LOW, after=HIGH)),
            "Accuracy 40 % → 52 % on 1,200 held-out problems",
            "+12 points; before 95 %: 35 to 45 %, after 95 %: 50 to 55 %",
            "better",
        ),
        (
            logged({}, evaluations=evaluated(before=HIGH, after=LOW)),
            "Accuracy 52 % → 40 % on 1,200 held-out problems",
            "-12 points; before 95 %: 50 to 55 %, after 95 %: 35 to 45 %",
            "worse",
        ),
        (
            logged({}, evaluations=evaluated(before=LOW, after=interval(0.475, 0.45, 0.5))),
            "Accuracy 40 % → 48 % on 1,200 held-out problems",
            "+7.5 points; before 95 %: 35 to 45 %, after 95 %: 45 to 50 %: no clear difference",
            "neutral",
        ),
        (
            logged({}, evaluations=evaluated(before=interval(0.475, 0.45, 0.5), after=LOW)),
            "Accuracy 48 % → 40 % on 1,200 held-out problems",
            "-7.5 points; before 95 %: 45 to 50 %, after 95 %: 35 to 45 %: no clear difference",
            "neutral",
        ),
        (
            logged({}, evaluations={**evaluated(before=LOW), "after": {"settings": {}, "problems": 9, "strict": HIGH}}),
            "Accuracy 40 % → 52 % on 9 held-out problems",
            "Judged by different rewards before and after, so that the two can't be compared",
            "neutral",
        ),
        (
            logged({}, evaluations=evaluated(after=HIGH)),
            "Accuracy 52 % on 1,200 held-out problems",
            "95 %: 50 to 55 %; accuracy before training was not measured: run `grpo-recipes evaluate` on the model "
            "that the run began with, with `--output /nowhere/evaluations/before`",
            "neutral",
        ),
        (
            logged({"reward": [0.5, 1.0, 1.5, 2.0] * 300}),
            "Training reward 1.25 → 1.25 over 1,200 optimizer steps",
            "Means of steps 1–300 and 901–1,200 on the training prompts, which the policy was trained for. Accuracy "
            "on held-out problems was not measured: run `grpo-recipes evaluate /nowhere`",
            "neutral",
        ),
        (
            logged({"reward": [0.5]}, steps=[7]),
            "Training reward 0.5 at step 7",
            "Reward on the training prompts, which the policy was trained for. Accuracy on held-out problems was not "
            "measured: run `grpo-recipes evaluate /nowhere`",
            "neutral",
        ),
        (
            logged({}),
            "Nothing was measured",
            "The log has no reward, and no evaluation is in the run's folder",
            "neutral",
        ),
    ],
)
def test_the_verdict_is_the_best_measurement_that_there_is(run: Run, sentence: str, sure: str, tone: str) -> None:
    assert report.verdict(run, None) == report.Verdict(sentence, sure, tone)


@pytest.mark.parametrize(
    ("share", "points"),
    [
        *((0.1, "+10"), (-0.1, "-10"), (0.0996, "+10"), (0.07, "+7"), (0.0704, "+7"), (0.0706, "+7.1")),
        *((-0.013, "-1.3"), (0.0796, "+8"), (-0.0796, "-8"), (0.104, "+10"), (0.0994, "+9.9"), (0.0005, "+0.1")),
        *((0.0, "+0"), (-1e-9, "+0"), (1.0, "+100")),
    ],
)
def test_points_have_a_decimal_if_they_are_few(share: float, points: str) -> None:
    assert report._points(share) == points


def test_missing_estimates_are_dashes() -> None:
    assert report._estimate(None) == "–"
    assert report._estimate(Estimate(0.5, 0.25, 0.75).as_dict()) == "0.500 [0.250, 0.750]"


def test_the_checks_of_a_page_are_counted_and_say_what_they_look_for() -> None:
    found = Finding("kl_blow_up", 3, "the KL is high")
    diagnosis = Diagnosis(
        [found, found], {"truncated": "5% are cut off"}, {"entropy_collapse": "`entropy` was not logged"}, {}
    )
    assert report._checked(diagnosis) == "20 of 21 checks had data, 1 found something"
    assert report._checked(replace(diagnosis, findings=[])) == "20 of 21 checks had data, none found anything"
    assert report._checks(diagnosis)[1:] == [
        {"name": "kl_blow_up", "result": "problem", "text": "The KL is high"},
        {"name": "truncated", "result": "fine", "text": "5% are cut off"},
        {
            "name": "entropy_collapse",
            "result": "not checked",
            "text": "`entropy` was not logged. It looks for a policy whose entropy falls below a tenth of its start",
        },
    ]


def test_code_in_a_sentence_is_marked_and_all_else_escaped() -> None:
    assert str(report._coded("set `a < b`, not <b>")) == "set <code>a &lt; b</code>, not &lt;b&gt;"
    assert str(report._coded(f"`{'x' * 201}`")) == f"`{'x' * 201}`"
    assert str(report._coded(f"`{'x' * 200}`")) == f"<code>{'x' * 200}</code>"


def test_the_recipe_of_a_page_keeps_its_order_and_its_letters(tmp_path: Path) -> None:
    run = replace(logged({}, recipe={"z": "größer", "a": 1}), folder=tmp_path)
    assert report._described(run, 7)["recipe"] == "z: größer\na: 1\n"
    assert report._described(run, 7)["hue"] == 1
    assert report._described(replace(logged({}), folder=tmp_path), 0)["recipe"] == ""


def drawn_page(folder: Path, *runs: Run) -> str:
    """Return the body of the page of some runs, without its pictures."""
    runs = tuple(replace(run, folder=folder / name) for run, name in zip(runs, "abc", strict=False))
    described = [{**report._described(run, hue), "all_completions": None} for hue, run in enumerate(runs)]
    text = report.page(runs, groups(runs), described)
    return re.sub("<svg.*?</svg>", "", text[text.index("<body>") :])


def test_the_columns_of_the_evaluations_are_those_that_one_of_them_has(tmp_path: Path) -> None:
    measured = {"strict": LOW, "problems": 1200, "settings": {"strict": []}}
    more = {"pass_at": {"4": HIGH}, "majority": HIGH, "rewards": {"judge": {"mean": HIGH}}}
    for others in ({}, more):
        page = drawn_page(tmp_path, logged({}, evaluations={"a": measured, "z": {**measured, **others}}))
        has_more = bool(others)
        assert ('<th scope="col">majority</th><th scope="col">pass</th>' in page) == has_more
        assert ("is the probability that at least one of k completions" in page) == has_more
        assert ("Rewards of the recipe on held-out problems" in page) == has_more
        assert page.count("@4 0.525 [0.500, 0.550]") == has_more


def test_the_page_says_what_each_strict_accuracy_requires(tmp_path: Path) -> None:
    rewards: list[list[dict[str, Any]]] = [[{"name": "zeal"}], [{"name": "ardour"}], [{"name": "zeal"}], []]
    measured = {
        str(place): {"strict": LOW, "problems": 9, "settings": {"strict": one}} for place, one in enumerate(rewards)
    }
    assert "require (full pay of <code>ardour</code>; full pay of <code>zeal</code>)." in drawn_page(
        tmp_path, logged({}, evaluations=measured)
    )
    assert "rewards require.</dd>" in drawn_page(tmp_path, logged({}, evaluations={"3": measured["3"]}))


def test_one_run_has_its_bars_beside_the_answer_and_several_are_named(tmp_path: Path) -> None:
    measured = {"after": {"problems": 1200, "settings": {}, "strict": HIGH}}
    run = logged({"reward": [1.0, 2.0]}, evaluations=measured)
    one, two = drawn_page(tmp_path, run), drawn_page(tmp_path, run, run)
    bars = ">Accuracy on held-out problems <span"
    assert (one.count(bars), two.count(bars)) == (1, 1)
    assert one.index(f"<h2{bars}") < one.index("<main")
    assert two.index(f"<h3{bars}") > two.index("<main")
    assert "<h3>Total reward <span" in one
    assert "Report on the run <strong>a</strong>" in one
    assert "Report on 2 runs" in two
    assert "<h1>a and b</h1>" in two
    assert '<th scope="col">run</th>' in two
    assert '<th scope="col">run</th>' not in one
    assert ("How tools were used" in one, "What was learnt" in one) == (False, True)
    without = drawn_page(tmp_path, logged({"reward": [1.0, 2.0]}))
    assert "<figure>" not in without[: without.index("<main")]


def test_a_value_that_a_template_lacks_is_an_error_and_no_empty_text() -> None:
    with pytest.raises(jinja2.UndefinedError):
        report.page([logged({})], [], [{}])


def test_a_report_is_written_into_a_new_folder_and_again_into_the_same(tmp_path: Path) -> None:
    run = replace(logged({"reward": [1.0, 2.0]}), folder=tmp_path)
    folder = tmp_path / "new" / "report"
    for _ in range(2):
        assert report.write_report([run], folder) == folder / "report.html"
        assert {path.name for path in folder.iterdir()} == {"report.html", "total-reward.svg"}


def stored_completions(folder: Path, label: str, problems: list[int], **columns: Any) -> None:
    path = folder / "evaluations" / label
    path.mkdir(parents=True, exist_ok=True)
    rows = {"problem": problems, "sample": 0, "prompt": [f"p{n}" for n in problems], "gold": "7", "completion": label}
    pd.DataFrame({**rows, **columns}).to_parquet(path / "completions.parquet")


def test_problems_are_paired_if_both_evaluations_have_them_and_their_verdicts(tmp_path: Path) -> None:
    run = replace(logged({}), folder=tmp_path)
    assert report.paired_completions(run) is None
    stored_completions(tmp_path, "before", [0, 1, 2, 3], strict=[True, False, True, False])
    assert report.paired_completions(run) is None
    stored_completions(tmp_path, "after", [2, 3, 4])
    assert report.paired_completions(run) is None, "no golds after training"
    stored_completions(tmp_path, "after", [2, 3, 4], strict=[True, True, False])
    pairs = report.paired_completions(run)
    assert pairs is not None
    assert [table["problem"].tolist() for table in pairs] == [[2, 3], [2, 3]]
    first = report._first_completions(pairs)
    assert first is not None
    assert (first["completion"].tolist(), first["completion_after"].tolist()) == (["before"] * 2, ["after"] * 2)


def test_problems_without_a_first_completion_are_not_compared() -> None:
    before = pd.DataFrame({"problem": [0, 1, 1, 2], "sample": [0, 0, 1, 0], "strict": [True, False, True, True]})
    after = pd.DataFrame({"problem": [0, 1, 2, 3], "sample": [0, 0, 1, 0], "strict": [False, True, True, True]})
    found = report._first_completions((before, after))
    assert found is not None
    assert found[["strict", "strict_after"]].values.tolist() == [[True, False], [False, True]]
    assert found.index.tolist() == [0, 1]
    assert report._first_completions(None) is None
