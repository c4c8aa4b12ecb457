"""Report in a browser, on a desktop and on a phone, with its network requests recorded."""

from __future__ import annotations

import html.parser
import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest

from grpo_recipes import cli
from grpo_recipes.reports import cards as examples
from grpo_recipes.reports.diagnostics import diagnose
from grpo_recipes.reports.report import verdict, write_report
from grpo_recipes.reports.run import Run
from grpo_recipes.reports.transcript import TurnPart
from tests.support.browser import CONTRAST, OUTSIDE, Browser
from tests.support.logged_runs import logged
from tests.support.synthetic import TOOL_METRICS, healthy_completions, ramp, tool_completions, write_run

SHARE = {"value": 0.4, "low": 0.35, "high": 0.45}
BETTER = {"value": 0.8, "low": 0.75, "high": 0.84}


def evaluation(folder: Path, label: str, share: dict, right: list[bool]) -> None:
    summary = {"problems": len(right), "strict": share, "lenient": share, "settings": {"samples": 1}}
    path = folder / "evaluations" / label
    path.mkdir(parents=True)
    (path / "evaluation.json").write_text(json.dumps(summary))
    prompts = [json.dumps([{"role": "user", "content": f"held-out question {n}"}]) for n in range(len(right))]
    rows = {"problem": range(len(right)), "sample": 0, "prompt": prompts, "gold": "7", "answer": "7", "strict": right}
    rows["lenient"] = right
    rows["completion"] = [f"{label} says {n}" for n in range(len(right))]
    pd.DataFrame(rows).to_parquet(path / "completions.parquet")


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(
        tmp_path_factory.mktemp("runs") / "run-a", {"efficiency/tokens_needed": ramp(3000, 4000), "kl": ramp(2, 3)}
    )
    evaluation(folder, "before", SHARE, [False, True, False, True])
    evaluation(folder, "after", BETTER, [True, True, True, False])
    return folder


class Page(html.parser.HTMLParser):
    """Text of a page, and its elements that load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[tuple[str, str]] = []
        self.tags: list[str] = []
        self.pictures = 0
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.tags.append(tag)
        self.pictures += tag == "svg" and ("class", "chart") in attributes
        self.loads += [(tag, value) for key, value in attributes if key in ("src", "href", "srcset", "data")]

    def handle_data(self, data: str) -> None:
        self.text += data


def report(*arguments: Path | str, code: int = 0) -> Page:
    assert cli.main(["report", *map(str, arguments)]) == code
    return Page((Path(arguments[0]) / "report" / "report.html").read_text(encoding="utf-8"))


def test_the_page_begins_with_the_answer_is_self_contained_and_has_all_facts(run_folder: Path) -> None:
    page = report(run_folder)
    assert all(tag == "a" and (value.startswith("#") or value == "completions.html") for tag, value in page.loads)
    assert not {"script", "link", "iframe"} & set(page.tags)
    for figure in ("0.400 [0.350, 0.450]", "max_completion_length: 256", "question 40.0", "1 min 20 s", "trl 1.16.0"):
        assert figure in page.text, figure
    assert diagnose(Run.read(run_folder)).findings[0].sentence.replace("`", "") in page.text
    # Text of the model is shown as text.
    assert "<answer>0</answer> <b>40</b>" in page.text
    assert "b" not in page.tags
    assert page.pictures == 16
    assert sorted(os.listdir(run_folder / "report")) == ["completions.html", "evaluation.svg", "report.html"]
    ElementTree.fromstring((run_folder / "report" / "evaluation.svg").read_text())
    first = page.text[: page.text.index("What was learnt")]
    assert "40 % → 80 %" in first
    # By hand: 2 of 4 gained and 1 lost is 1/4, and every split of 3 is at least as uneven as 2 : 1.
    for figure in ("+25.0", "2 gained, 1 lost", "p = 1)", "16 of 16", "tiny", "1 min 20 s", "trl 1.16.0"):
        assert figure in first, figure
    for group in ("What was learnt", "Can I trust it?", "How it ran"):
        assert page.text.count(group) == 2, "in the contents, and over the charts"


def test_no_text_of_a_run_becomes_markup(tmp_path: Path) -> None:
    """All texts of a run are shown literally, control characters as escapes."""
    evil = "</pre></style><script>alert(1)</script><img src=x onerror=y>&amp;\x1b[2J\u202e"
    safe = evil.replace("/", "")
    rewards = [{"name": evil, "source": "x", "weight": 1.0, "kind": "correctness", "highest_pay": 2.0}]
    rows = tool_completions(lambda step, member: member % 2)
    for number, row in enumerate(rows):
        for message in row["completion"]:
            message |= {"name": evil, "content": f"<answer>{evil}{number}</answer>"}
            if "tool_calls" in message:
                message["tool_calls"][0]["function"] = {"name": evil, "arguments": json.dumps({evil: evil})}
        row |= {"prompt": evil, evil: number % 3, "gold": evil, "verdict": evil}
    means = {f"rewards/{evil}/mean": ramp(0, 1), f"tools/{safe}/calls": ramp(0, 1)}
    folder = write_run(tmp_path / "<i>run<", {**TOOL_METRICS, **means}, rewards=rewards, completions=rows)
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "source": evil, "hardware": evil, "arguments": [evil]}))
    for label in (safe, "after"):
        evaluation(folder, label, SHARE, [True, False])
    page = report(folder)
    assert not {"script", "img", "i"} & set(page.tags)
    assert page.text.count("alert(1)") >= 10
    assert not [one for one in page.text if not one.isprintable() and one != "\n"]
    assert not [value for tag, value in page.loads if tag != "a"]
    picture = Page((folder / "report" / "evaluation.svg").read_text())
    assert not {"script", "img"} & set(picture.tags)


def test_several_samples_are_compared_problem_by_problem(tmp_path: Path) -> None:
    """One sample before and eight after. Each problem is solved in 3 of 8 samples, the first of which is right."""
    folder = write_run(tmp_path / "run")
    right = {"before": [[n % 2 == 0] for n in range(40)], "after": [[sample < 3 for sample in range(8)]] * 40}
    for label, verdicts in right.items():
        flat = [verdict for row in verdicts for verdict in row]
        value = sum(flat) / len(flat)
        evaluation(folder, label, {"value": value, "low": value - 0.1, "high": value + 0.1}, flat)
        path, samples = folder / "evaluations" / label, len(verdicts[0])
        table = pd.read_parquet(path / "completions.parquet")
        problems = table.index // samples
        prompts = [f"question {problem}" for problem in problems]
        table = table.assign(problem=problems, sample=table.index % samples, prompt=prompts)
        table.to_parquet(path / "completions.parquet")
        summary = json.loads((path / "evaluation.json").read_text())
        summary |= {"problems": 40, "settings": {"samples": samples}}
        (path / "evaluation.json").write_text(json.dumps(summary))
    answer = verdict(Run.read(folder))
    assert "50 % → 38 %" in answer.sentence
    assert answer.sure.startswith("-12.5 "), "and not +50, the first samples alone"
    assert "McNemar" not in answer.sure
    assert "p = " in answer.sure


def test_the_verdict_agrees_with_the_p_value(tmp_path: Path) -> None:
    """Four problems of ten are gained and none is lost: p = 0.125, beside an interval that once excluded 0."""
    for gained, tone in ((4, "neutral"), (5, "neutral"), (6, "better")):
        folder = write_run(tmp_path / f"run-{gained}")
        evaluation(folder, "before", SHARE, [False] * 10)
        evaluation(folder, "after", BETTER, [True] * gained + [False] * (10 - gained))
        answer = verdict(Run.read(folder))
        assert answer.tone == tone
        assert f"p = {2 * 0.5**gained:.1g})" in answer.sure


def test_evaluations_of_other_problems_are_not_compared(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    evaluation(folder, "before", SHARE, [False] * 10)
    evaluation(folder, "after", BETTER, [True] * 10)
    path = folder / "evaluations" / "after" / "completions.parquet"
    table = pd.read_parquet(path)
    table.loc[3, "prompt"] = "another question"
    for other in (table, table.head(8)):
        other.to_parquet(path)
        answer = verdict(Run.read(folder))
        assert (answer.tone, "p = " in answer.sure) == ("neutral", False)


def test_the_verdict_names_what_was_not_measured(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    answer = verdict(Run.read(folder))
    assert "0.99" in answer.sentence
    assert "grpo-recipes evaluate" in report(folder).text
    evaluation(folder, "after", BETTER, [True, True, True, False])
    answer = verdict(Run.read(folder))
    assert ("80 %" in answer.sentence, "→" in answer.sentence, answer.tone) == (True, False, "neutral")
    assert "7" in verdict(logged({"reward": [0.5]}, steps=[7])).sure


def test_the_cards_are_of_both_ends_and_the_extremes(run_folder: Path) -> None:
    rows = Run.read(run_folder).rows
    first, last, best = examples.cards(Run.read(run_folder))  # the last is the worst too
    assert [card.title.split()[0] for card in (first, last, best)] == ["First", "Last", "Best"]
    assert (first.step, last.step) == (10, 40)
    assert best.figures["total"] == f"{rows[rows['step'] == 40]['total'].max():.3g}"
    assert (best.is_right, last.is_right) == (True, False)
    assert best.figures["advantage"] == "+1.50"
    assert [part.text for part in best.parts] == ["<answer>0</answer> <b>40</b>"]


def tool_run(folder: Path, completions: list[dict] | None = None, **metrics: Any) -> Path:
    """Write a run with two tools."""
    rows = tool_completions() if completions is None else completions
    return write_run(folder, {**TOOL_METRICS, **metrics}, completions=rows)


def test_a_card_shows_the_turns_of_a_completion(tmp_path: Path) -> None:
    rows = tool_completions(lambda step, member: 40)[:4]
    for row in rows:
        row["completion"][1]["content"] = "r" * 10_000
    folder = tool_run(tmp_path / "run", rows)
    card = examples.cards(Run.read(folder))[0]
    assert [part.label for part in card.parts[:3]] == ["Turn 1", "Turn 1 calls add", "Result of add, not trained on"]
    page = report(folder).text
    for shown_text in ('{"a": 1, "b": 0}', "Turn 2 calls add", "… 9,200 ", "… 109 "):  # a long transcript is shortened
        assert shown_text in page, shown_text
    assert page.count("How tools were used") == 2, "in the contents, and over the charts"


def test_a_run_with_hardly_any_metric_has_a_report(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "loss": 0.0, "reward": None}]}))
    report(folder, code=2)
    log = [{"step": step, "entropy": 1.0} for step in range(1, 5)]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    assert "1 of " in report(folder).text
    assert not diagnose(Run.read(folder)).looks_fine
    assert cli.main(["report", str(tmp_path / "missing")]) == 2


def test_a_stopped_run_shows_its_cause_and_the_completion(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    state = folder / "trainer_state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "max_steps": 100}))
    row = {"reward": "judge", "row": 3, "prompt": "What is it?", "completion": "<answer>no</answer> number", "step": 40}
    first = {"sentence": "reward `judge` raised ValueError: no.", "rank": 0, "time": 5.0, "row": row}
    for fault in (first, {"sentence": "lost contact", "rank": 1, "time": 6.0}):
        (folder / f"fault-rank{fault['rank']}.json").write_text(json.dumps(fault))
    page = report(folder)
    assert "step 40 of 100" in page.text
    assert "reward judge raised ValueError: no." in page.text
    card = examples.cards(Run.read(folder))[0]
    assert (card.prompt, card.step) == ("What is it?", 40)
    assert card.parts == [TurnPart("text", 1, "<answer>no</answer> number")]
    (finding,) = diagnose(Run.read(folder)).findings
    assert (finding.check, finding.figures["cause"]) == ("stopped", "reward `judge` raised ValueError: no")
    state.write_text(json.dumps({**json.loads(state.read_text()), "max_steps": 40}))
    assert Run.read(folder).fault is None, "it is of an earlier launch"
    shutil.rmtree(folder / "completions")
    state.unlink()  # it failed in its first step
    page = report(folder, code=2)
    assert "no</answer> number" in page.text
    assert "reward judge raised ValueError" in page.text


# In a browser

VIEWS: dict[str, dict[str, Any]] = {
    "desktop": {},
    "dark phone": {"width": 390, "dark": True},
    "print from a dark screen": {"width": 794, "media": "print", "dark": True},
}


def pages(folder: Path) -> dict[str, Path]:
    """Write the page of each kind of run."""
    long = "<think>" + "step by step " * 200 + "</think> " + "wwwww" * 60
    runs = []
    for number, name in enumerate(("run-a", "b" * 90, "<b>e<b>")):
        completions = [{**row, "completion": long} for row in healthy_completions()] if number == 1 else None
        metrics = {"kl": ramp(0, 0.8 * number), "efficiency/tokens_computed": ramp(3e4, 2e4)}
        runs.append(write_run(folder / str(number) / name, metrics, completions=completions, seed=number))
        evaluation(runs[-1], "before", SHARE, [False, True, False, True])
        evaluation(runs[-1], "after", BETTER, [True, True, True, False])
    bare = folder / "bare"
    bare.mkdir()
    (bare / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "loss": 0.0}]}))
    tools = tool_run(folder / "tools", tool_completions(lambda step, member: 5 * member))
    chosen = {"one": runs[:1], "three": runs, "tools": [tools], "empty": [bare]}
    return {kind: write_report([Run.read(run) for run in some], folder / kind) for kind, some in chosen.items()}


CHARTS = "[...document.querySelectorAll('svg.chart')]"
NAMED_CHARTS = f"{CHARTS}.every(chart => chart.getAttribute('aria-label').length > 20)"
SIZES = f"{CHARTS}.map(chart => chart.getBoundingClientRect()).map(box => [box.width, box.height])"
HEADINGS = "[...document.querySelectorAll('h1, h2, h3, h4')].map(h => Number(h.tagName[1]))"
LINKS = "[...document.querySelectorAll('a[href^=\"#\"]')].every(a => document.getElementById(a.hash.slice(1)))"


@pytest.mark.slow
def test_every_page_fits_its_screen_and_can_be_read(tmp_path: Path, browser: Browser) -> None:
    for kind, page in pages(tmp_path).items():
        assert page.stat().st_size < 2_000_000
        for view, how in VIEWS.items():
            tab = browser.open(page, **how)
            width = tab.evaluate("document.documentElement.clientWidth")
            assert tab.evaluate("document.documentElement.scrollWidth") == width, (kind, view)
            assert tab.evaluate(OUTSIDE) == [], (kind, view)
            ratio, text = tab.evaluate(CONTRAST)
            assert ratio >= 4.5, (kind, view, text)
            assert tab.requests == [page.as_uri()], (kind, view)
            assert all(min(size) > 70 for size in tab.evaluate(SIZES)), (kind, view)
        levels = tab.evaluate(HEADINGS)
        assert (levels[0], levels.count(1)) == (1, 1)
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
        assert tab.evaluate(LINKS)
        assert tab.evaluate(NAMED_CHARTS)


# Sentences and facts, from runs in memory


def test_evaluations_by_different_rewards_are_not_compared() -> None:
    measured = {"problems": 9, "settings": {"strict": "a"}, "strict": SHARE}
    run = logged({}, evaluations={"before": measured, "after": {**measured, "settings": {}, "strict": BETTER}})
    answer = verdict(run)
    assert ("40 % → 80 %" in answer.sentence, answer.tone) == (True, "neutral")


def test_what_was_run_is_named_shortly(tmp_path: Path) -> None:
    dataset = {"name": "gsm8k", "path": "a.jsonl"}
    record = {"recipe": {"dataset": dataset}, "train_prompts": 7473, "source": "/home/me/recipes/gsm8k.yaml"}
    metrics = {"step_time": [2.0, 2.0, 2.0], "num_tokens": [100.0, 200.0, 12_345.0]}
    text = shown(logged(metrics, **record), tmp_path)
    for figure in ("gsm8k, 7,473", "6 s", "12.3k", ">gsm8k.yaml<"):
        assert figure in text, figure
    # With `logging_steps: 5` an entry holds the mean time of its five steps. The last entry is of three.
    assert "33 s" in shown(logged({"step_time": [2.0, 4.0, 1.0]}, steps=[5, 10, 13]), tmp_path)
    for path, name in {"Qwen/Qwen3-0.6B": "Qwen/Qwen3-0.6B", "models/base/tiny": "tiny"}.items():
        assert f">{name}<" in shown(logged({}, recipe={"model_name_or_path": path}), tmp_path)


def shown(run: Run, folder: Path) -> str:
    """Return the page of a run in memory."""
    return write_report([replace(run, folder=folder / "run")], folder / "report").read_text()


def test_an_unfinished_run_shows_how_far_it_is(tmp_path: Path) -> None:
    for planned, is_running, figure in ((10, True, "step 4 of 10"), (10, False, "step 4 of 10"), (0, True, "step 4")):
        run = replace(logged({"step_time": [2.0] * 4}), is_running=is_running)
        run.log.max_steps, run.log.has_ended = planned, not is_running
        assert figure in shown(run, tmp_path)
    run = logged({"step_time": [2.0] * 4})
    run.log.max_steps = 4
    assert "step 4" not in shown(run, tmp_path)


def test_the_verdict_distinguishes_gain_and_loss(tmp_path: Path) -> None:
    """McNemar's p of 20 : 0 and of 0 : 20 is 2 / 2^20."""
    none, half = [False] * 40, [True] * 20 + [False] * 20
    cases = (
        (none, half, "better", ("+50.0", "+31.1", "+64.1", "20 gained, 0 lost", "p = 2e-06")),
        (half, none, "worse", ("-50.0", "-64.1", "-31.1", "0 gained, 20 lost", "p = 2e-06")),
        ([True, False] * 20, [False, True] * 20, "neutral", ("+0.0",)),
    )
    for place, (before, after, tone, figures) in enumerate(cases):
        folder = write_run(tmp_path / str(place))
        for label, right in (("before", before), ("after", after)):
            value = sum(right) / len(right)
            evaluation(folder, label, {"value": value, "low": max(0, value - 0.1), "high": value + 0.1}, right)
        answer = verdict(Run.read(folder))
        assert (answer.tone, [figure for figure in figures if figure not in answer.sure]) == (tone, [])
    (folder / "evaluations" / "before" / "completions.parquet").unlink()
    assert (verdict(Run.read(folder)).tone, "p = " in verdict(Run.read(folder)).sure) == ("neutral", False)


def test_a_completion_is_right_if_every_correctness_reward_that_scored_it_passes(tmp_path: Path) -> None:
    rewards = [{"name": "a", "kind": "correctness", "passes_at": 0.9}, {"name": "b", "kind": "correctness"}]
    rewards = [{**one, "source": "x", "weight": 1.0} for one in [*rewards, {"name": "style", "kind": "format"}]]
    cases = ((1.0, 0.5, True), (1.0, 0.0, False), (1.0, None, True), (0.8, 1.0, False), (None, None, None))
    for place, (a, b, is_right) in enumerate(cases):
        row = {"step": 10, "prompt": "2 + 2", "completion": "4", "a": a, "b": b, "style": 0.0}
        run = write_run(tmp_path / str(place), rewards=rewards, completions=[{**row, "gold": "4", "verdict": "exact"}])
        (card,) = examples.cards(Run.read(run))
        assert card.is_right is is_right
        assert (card.figures["gold"], card.figures["verdict"], card.figures["style"]) == ("4", "exact", "0")


def test_two_runs_share_their_charts(run_folder: Path, tmp_path: Path) -> None:
    page = report(run_folder, write_run(tmp_path / "run-b", {"kl": None}, seed=1))
    assert page.pictures == 16, "as of one run"
    assert all(name in page.text for name in ("run-a", "run-b", "14 of 16"))
