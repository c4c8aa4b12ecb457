"""HTML page on one run, or on several side by side: `grpo-recipes report RUN [RUN ...]`.

The page begins with the answer: is the policy better, did the checks find a problem, and what was run. It holds its
charts inline, loads nothing and runs no script, so that it can be mailed, archived and read on a phone. Beside it are
all completions as a page of their own (`completions_page`), and the accuracy as an SVG file. The page's text is in
`templates/`.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup, escape

from grpo_recipes.evaluation import accuracy
from grpo_recipes.evaluation.estimates import Estimate, p_text
from grpo_recipes.evaluation.summary import compare_tables
from grpo_recipes.reports import cards
from grpo_recipes.reports.charts import ACCURACY, HUES, duration, number, percent, sections
from grpo_recipes.reports.completions_page import TEMPLATES, policy, write_completions_page
from grpo_recipes.reports.diagnostics import diagnose
from grpo_recipes.reports.run import Run
from grpo_recipes.runs.files import AFTER, BEFORE, EVALUATED, EVALUATIONS, read_table, write_atomically
from grpo_rewards.redaction import redacted
from grpo_rewards.terminal import visible_lines


def write_report(runs: Sequence[Run], folder: Path) -> Path:
    """Write the page and the completions into a folder, and `evaluation.svg`. Return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = sections(runs)
    described = [_described(run, hue) for hue, run in enumerate(runs)]  # reads all files, before anything is written
    style = _css("chart.css") + _css("report.css")
    for place, (run, values) in enumerate(zip(runs, described, strict=True), start=1):
        name = "completions.html" if place == 1 else f"completions-{place}.html"
        values["all_completions"] = write_completions_page(run, folder, name, environment(), style)
    evaluations = [evaluation for run in runs for evaluation in run.evaluations.values()]
    strict = [evaluation["settings"].get("strict") for evaluation in evaluations]
    accuracies = [chart for section in drawn for chart in section.charts if chart.title == ACCURACY]
    template = environment().get_template("report.html")
    text = template.render(
        style=Markup(style),
        policy=policy(style),
        title=" and ".join(run.name for run in runs),
        named=len(runs) > 1,
        runs=described,
        sections=drawn,
        first=accuracies[0] if accuracies and len(runs) == 1 else None,  # the chart beside the answer
        many=any(evaluation.get("pass_at") for evaluation in evaluations),
        has_rewards=any(evaluation.get("rewards") for evaluation in evaluations),
        requirements="; ".join(sorted({accuracy.describe(rewards) for rewards in strict if rewards})),
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )
    for chart in accuracies:
        write_atomically(folder / "evaluation.svg", chart.svg(_css("chart.css")))
    write_atomically(folder / "report.html", text)
    return folder / "report.html"


def _css(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


@cache
def environment() -> jinja2.Environment:
    """Return the templates. They escape every value, and make characters visible that show nothing."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, (Markup, int)) else visible_lines(value),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {"coded": _coded, "estimate": _estimate, "shortened": cards.shortened}
    return environment


def _coded(text: str) -> Markup:
    """Return a sentence with its parts in backquotes set as code. Everything is escaped first."""
    return Markup(re.sub(r"`([^`]{1,200})`", r"<code>\1</code>", str(escape(visible_lines(text)))))


def _estimate(found: Mapping[str, float] | None) -> str:
    """Return a share or a mean with its interval, or a dash if it was not measured."""
    return "–" if found is None else str(Estimate.from_dict(found))


def _described(run: Run, hue: int) -> dict[str, Any]:
    """Return the template's values for a run."""
    return {
        "name": run.name,
        "hue": hue % HUES,
        "verdict": verdict(run),
        "diagnosis": diagnose(run),
        "facts": _facts(run),
        "state": _state(run),
        "evaluations": sorted(run.evaluations.items(), key=lambda item: item[0] != BEFORE),
        "cards": cards.cards(run),
        "recipe": yaml.safe_dump(redacted(run.recipe), sort_keys=False, allow_unicode=True) if run.recipe else "",
    }


# The answer


@dataclass(frozen=True)
class Headline:
    """Sentence on whether the policy is better, and a clause on how sure that is."""

    sentence: str
    sure: str
    tone: str = "neutral"
    """`better`, `worse` or `neutral`."""


def _compared(run: Run) -> dict[str, Any]:
    """Return the comparison of the completions before and after training, or {} if the problems are not the same."""
    paths = [run.folder / EVALUATIONS / label / "completions.parquet" for label in (BEFORE, AFTER)]
    if not all(path.is_file() for path in paths):
        return {}
    before, after = (read_table(path, EVALUATED) for path in paths)
    prompts = [table.groupby("problem")["prompt"].first() for table in (before, after)]
    return compare_tables(before, after) if prompts[0].equals(prompts[1]) else {}


def verdict(run: Run) -> Headline:
    """Return the verdict by the accuracy before and after training, or by the closest measurement that there is."""
    first, second = (run.evaluations.get(label, {}) for label in (BEFORE, AFTER))
    if "strict" not in second:
        return _verdict_by_reward(run)
    after, problems = Estimate.from_dict(second["strict"]), f"on {second['problems']:,} held-out problems"
    if "strict" not in first:
        return Headline(
            f"Accuracy {percent(after.value)} {problems}",
            f"{_interval(after)}; accuracy before training was not measured: run `grpo-recipes evaluate` on the model "
            f"that the run began with, with `--output {run.folder / EVALUATIONS / BEFORE}`",
        )
    before = Estimate.from_dict(first["strict"])
    change = f"Accuracy {percent(before.value)} → {percent(after.value)} {problems}"
    if first["settings"].get("strict") != second["settings"].get("strict"):
        return Headline(change, "Judged by different rewards before and after, so that the two can't be compared")
    compared = _compared(run)
    if "strict" not in compared:
        return Headline(
            change,
            f"Before {_interval(before)}, after {_interval(after)}; not compared, since the problems are not the same",
        )
    found = compared["strict"]["difference"]
    difference = Estimate.from_dict(found)
    counts = compared.get("mcnemar")
    test = f"{counts['only_second']} gained, {counts['only_first']} lost; McNemar's test: " if counts else ""
    sure = (
        f"{_points(difference.value)} points (95 %: {_points(difference.low)} to {_points(difference.high)}; "
        f"{test}p = {p_text(found['p'], digits=1)})"
    )
    if not difference.sign:
        return Headline(change, f"{sure}: no clear difference")
    return Headline(change, sure, "better" if difference.sign > 0 else "worse")


def _verdict_by_reward(run: Run) -> Headline:
    """Return the verdict on a run without an evaluation."""
    reward = run.series("reward")
    if not len(reward):
        return Headline("Nothing was measured", "The log has no reward, and no evaluation is in the run's folder")
    steps = reward.quarters.capitalize() if len(reward) > 1 else f"Step {reward.steps[0]:,}"
    return Headline(
        f"Training reward {number(reward.start)} → {number(reward.end)} over {run.log.last_step:,} optimizer steps",
        f"{steps} on the training prompts, which the policy was trained for. Accuracy on held-out problems was not "
        f"measured: run `grpo-recipes evaluate {run.folder}`",
    )


def _points(share: float) -> str:
    return f"{100 * share:+z.1f}"  # z: no -0


def _interval(share: Estimate) -> str:
    return f"95 %: {100 * share.low:.0f} to {percent(share.high)}"


# Facts


def _facts(run: Run) -> dict[str, str]:
    """Return what was run, as far as it is known."""
    record, spec = run.record, run.recipe.get("dataset")
    data = _last_part(spec.get("name") or spec.get("path") or "") if isinstance(spec, Mapping) else ""
    prompts = f"{record['train_prompts']:,} prompts" if isinstance(record.get("train_prompts"), int) else ""
    versions = record.get("versions") or {}
    names = [name for name in ("grpo-recipes", "trl", "transformers", "torch") if name in versions]
    tokens, times = run.series("num_tokens"), run.series("step_time")
    # Each entry of the log has the mean time of the steps since the one before.
    spans = [step - before for before, step in zip([0, *times.steps], times.steps, strict=False)]
    seconds = math.fsum(span * time for span, time in zip(spans, times.values, strict=True) if span > 0)
    facts = {
        "Model": _last_part(run.recipe.get("model_name_or_path", "")),
        "Data": ", ".join(filter(None, [data, prompts])),
        "Optimizer steps": f"{run.log.last_step:,}",
        "Time in steps": duration(seconds) if seconds else "",
        "Tokens": f"{number(tokens.values[-1])} in prompts and completions" if len(tokens) else "",
        "Hardware": str(record.get("hardware") or ""),
        "Processes": str(record.get("world_size") or ""),
        "Recipe": _last_part(record.get("source", "")),
        "Versions": ", ".join(f"{name} {versions[name]}" for name in names),
    }
    return {name: value for name, value in facts.items() if value}


def _state(run: Run) -> str:
    """Return how far an unfinished run is, or an empty text for a finished one."""
    done, planned = run.log.last_step, run.log.max_steps
    progress = f"step {done:,} of {planned:,}" if planned > done else f"step {done:,}"
    if run.is_running:
        return f"This run is still in progress: {progress}."
    if run.fault is not None or planned > done:
        unknown = "" if run.fault or run.log.has_ended else " No cause was recorded: its process was probably killed."
        return f"This run was stopped at {progress}.{unknown}"
    return ""


def _last_part(path: Any) -> str:
    """Return a name on the hub unchanged, the last part of a path, or the number of several sources."""
    if isinstance(path, list):
        return f"{len(path)} sources mixed"
    text = str(path)
    return text if text.count("/") == 1 and not text.startswith(("/", ".", "~")) else Path(text).name
