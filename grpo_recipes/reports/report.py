"""HTML page on one run, or on several side by side: `grpo-recipes report RUN [RUN ...]`.

The page begins with the answer: is the policy better, did the checks find a problem, and what was run. It holds its
charts inline, loads nothing and runs no script, so that it can be mailed, archived and read on a phone. Beside it are
all completions as a page of their own (`completions_page`), and the accuracy as an SVG file. The page's text is in
`templates/`.
"""

from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import yaml
from markupsafe import Markup, escape

from grpo_recipes.evaluation import accuracy
from grpo_recipes.evaluation.estimates import Estimate, compare_tables, p_text
from grpo_recipes.reports import cards
from grpo_recipes.reports.charts import HUES, Section, duration, labelled, number, percent, sections
from grpo_recipes.reports.completions_page import TEMPLATES, policy, write_completions_page
from grpo_recipes.reports.diagnostics import CHECKS, NOT_CHECKED, Diagnosis, diagnose, looks_for
from grpo_recipes.reports.run import Run
from grpo_recipes.runs.files import AFTER, BEFORE, EVALUATED, EVALUATIONS, read_table, write_atomically
from grpo_rewards.redaction import redacted, redacted_arguments
from grpo_rewards.terminal import visible_lines

Pairs = tuple[pd.DataFrame, pd.DataFrame]
"""Completions of the same held-out problems before and after training."""


def write_report(runs: Sequence[Run], folder: Path) -> Path:
    """Write the page and the completions into a folder, and `evaluation.svg`. Return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = sections(runs)
    described = [_described(run, hue) for hue, run in enumerate(runs)]  # reads all files, before anything is written
    for place, (run, values) in enumerate(zip(runs, described, strict=True), start=1):
        name = "completions.html" if place == 1 else f"completions-{place}.html"
        values["all_completions"] = write_completions_page(run, folder, name, _environment(), _style())
    text = page(runs, drawn, described)
    for chart in [chart for section in drawn for chart in section.charts if chart.bars]:
        write_atomically(folder / "evaluation.svg", chart.svg(_css("chart.css")))
    path = folder / "report.html"
    write_atomically(path, text)
    return path


def page(runs: Sequence[Run], drawn: Sequence[Section], described: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML of the page.

    Args:
        runs: One or more runs.
        drawn: Their charts.
        described: Values of the template for each run.
    """
    evaluations = [evaluation for run in runs for evaluation in run.evaluations.values()]
    strict = [evaluation["settings"].get("strict") for evaluation in evaluations]
    bars = [chart for section in drawn for chart in section.charts if chart.bars]
    return (
        _environment()
        .get_template("report.html")
        .render(
            style=Markup(_style()),
            policy=policy(_style()),
            title=" and ".join(run.name for run in runs),
            named=len(runs) > 1,
            runs=described,
            sections=drawn,
            first=bars[0] if bars and len(runs) == 1 else None,  # the chart beside the answer
            many=any(evaluation.get("pass_at") for evaluation in evaluations),
            has_rewards=any(evaluation.get("rewards") for evaluation in evaluations),
            requirements="; ".join(sorted({accuracy.describe(rewards) for rewards in strict if rewards})),
            made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        )
    )


def _css(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _style() -> str:
    """Return the CSS of every page."""
    return _css("chart.css") + _css("report.css")


@cache
def _environment() -> jinja2.Environment:
    """Return the templates. They escape every value, and make characters visible that show nothing."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, (Markup, int)) else visible_lines(value),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    environment.filters |= {"coded": _coded, "estimate": _estimate, "tagged": _tagged, "shortened": cards.shortened}
    return environment


def _coded(text: str) -> Markup:
    """Return a sentence with its parts in backquotes set as code. Everything is escaped first."""
    return Markup(re.sub(r"`([^`]{1,200})`", r"<code>\1</code>", str(escape(visible_lines(text)))))


def _tagged(text: str, tags: Sequence[str]) -> Markup:
    """Return a shortened text with the contents of the reasoning tag and the answer tag marked. It is escaped first."""
    shown = str(escape(visible_lines(cards.shortened(text))))
    for tag, kind in zip(tags, ("reasoning", "answer"), strict=True):
        name = re.escape(str(escape(visible_lines(tag))))
        shown = re.sub(
            rf"(&lt;{name}&gt;)(.*?)(?=&lt;/{name}&gt;|\Z)", rf'\1<span class="{kind}">\2</span>', shown, flags=re.S
        )
    return Markup(shown)


def _estimate(found: Mapping[str, float] | None) -> str:
    """Return a share or a mean with its interval, or a dash if it was not measured."""
    return "–" if found is None else str(Estimate.from_dict(found))


def _described(run: Run, hue: int) -> dict[str, Any]:
    """Return the template's values for a run."""
    diagnosis, pairs = diagnose(run), paired_completions(run)
    counts, changes = cards.changes(pairs)
    return {
        "name": run.name,
        "hue": hue % HUES,
        "verdict": verdict(run, pairs),
        "diagnosis": diagnosis,
        "checks": _checks(diagnosis),
        "facts": _facts(run),
        "made_with": _made_with(run.record),
        "state": _state(run),
        "evaluations": labelled(run),
        "tags": cards.tags_of(run),
        "cards": cards.cards(run),
        "counts": counts,
        "changes": changes,
        "recipe": yaml.safe_dump(redacted(run.recipe), sort_keys=False, allow_unicode=True) if run.recipe else "",
        "command": _command(run.record),
    }


# The answer


@dataclass(frozen=True)
class Verdict:
    """Sentence on whether the policy is better, and a clause on how sure that is."""

    sentence: str
    sure: str
    tone: str = "neutral"
    """`better`, `worse` or `neutral`."""


def paired_completions(run: Run) -> Pairs | None:
    """Return the completions of the held-out problems before and after training.

    The result is None without both, without golds, or if the problems are not the same.
    """
    paths = [run.folder / EVALUATIONS / label / "completions.parquet" for label in (BEFORE, AFTER)]
    if not all(path.is_file() for path in paths):
        return None
    before, after = (read_table(path, EVALUATED) for path in paths)
    if "strict" not in before or "strict" not in after:
        return None
    prompts = [table.groupby("problem")["prompt"].first() for table in (before, after)]
    return (before, after) if prompts[0].equals(prompts[1]) else None


def verdict(run: Run, pairs: Pairs | None) -> Verdict:
    """Return the verdict by the accuracy before and after training, or by the closest measurement that there is.

    Args:
        run: The run.
        pairs: Result of `paired_completions`.
    """
    first, second = (run.evaluations.get(label, {}) for label in (BEFORE, AFTER))
    if "strict" not in second:
        return _verdict_by_reward(run)
    after, problems = Estimate.from_dict(second["strict"]), f"on {second['problems']:,} held-out problems"
    if "strict" not in first:
        return Verdict(
            f"Accuracy {percent(after.value)} {problems}",
            f"{_interval(after)}; accuracy before training was not measured: run `grpo-recipes evaluate` on the model "
            f"that the run began with, with `--output {run.folder / EVALUATIONS / BEFORE}`",
        )
    before = Estimate.from_dict(first["strict"])
    change = f"Accuracy {percent(before.value)} → {percent(after.value)} {problems}"
    if first["settings"].get("strict") != second["settings"].get("strict"):
        return Verdict(change, "Judged by different rewards before and after, so that the two can't be compared")
    if pairs is None:
        sure = f"{_points(after.value - before.value)} points; before {_interval(before)}, after {_interval(after)}"
        sign = (after.low > before.high) - (after.high < before.low)
    else:
        compared = compare_tables(*pairs)
        found = compared["strict"]["difference"]
        difference = Estimate.from_dict(found)
        test = "McNemar's test: " if "mcnemar" in compared else ""
        sure = (
            f"{_points(difference.value)} points (95 %: {_points(difference.low)} to {_points(difference.high)}; "
            f"{test}p = {p_text(found['p'], digits=1)})"
        )
        sign = difference.sign
    if not sign:
        return Verdict(change, f"{sure}: no clear difference")
    return Verdict(change, sure, "better" if sign > 0 else "worse")


def _verdict_by_reward(run: Run) -> Verdict:
    """Return the verdict on a run without an evaluation."""
    reward = run.series("reward")
    if not len(reward):
        return Verdict("Nothing was measured", "The log has no reward, and no evaluation is in the run's folder")
    steps = reward.quarters.capitalize() if len(reward) > 1 else f"Step {reward.steps[0]:,}"
    return Verdict(
        f"Training reward {number(reward.start)} → {number(reward.end)} over {run.log.last_step:,} optimizer steps",
        f"{steps} on the training prompts, which the policy was trained for. Accuracy on held-out problems was not "
        f"measured: run `grpo-recipes evaluate {run.folder}`",
    )


def _points(share: float) -> str:
    return f"{100 * share:+z.1f}"  # z: no -0


def _interval(share: Estimate) -> str:
    return f"95 %: {100 * share.low:.0f} to {percent(share.high)}"


# Checks and facts


def _checks(diagnosis: Diagnosis) -> list[dict[str, str]]:
    """Return every check with its result, its sentence, and what a check without data looks for."""
    clauses = {check.__name__: looks_for(check) for check in CHECKS}
    checks = []
    for result, name, text in diagnosis.rows():
        if result == NOT_CHECKED:
            text = f"{text}. It looks for {clauses[name]}"
        checks.append({"name": name, "result": result, "text": text[:1].upper() + text[1:]})
    return checks


def _facts(run: Run) -> dict[str, str]:
    """Return what was run, as far as it is known."""
    record, spec = run.record, run.recipe.get("dataset")
    data = []
    if isinstance(spec, Mapping):
        data.append(_last_part(spec.get("name") or spec.get("path") or ""))
    if isinstance(record.get("train_prompts"), int):
        data.append(f"{record['train_prompts']:,} prompts")
    tokens, times = run.series("num_tokens"), _seconds(run)
    facts = {
        "Model": _last_part(run.recipe.get("model_name_or_path", "")),
        "Data": ", ".join(filter(None, data)),
        "Optimizer steps": f"{run.log.last_step:,}",
        "Time in steps": duration(times) if times else "",
        "Tokens": f"{number(tokens.values[-1])} in prompts and completions" if len(tokens) else "",
        "Hardware": str(record.get("hardware") or ""),
        "Processes": str(record.get("world_size") or ""),
        "Recipe": _last_part(record.get("source", "")),
    }
    return {name: value for name, value in facts.items() if value}


def _made_with(record: Mapping[str, Any]) -> str:
    """Return when the run was started, and the versions."""
    versions = record.get("versions") or {}
    parts = [f"Started {record['started']}"] if "started" in record else []
    parts += [
        f"{name} {versions[name]}" for name in ("grpo-recipes", "trl", "transformers", "torch") if name in versions
    ]
    return "; ".join(parts)


def _state(run: Run) -> str:
    """Return how far an unfinished run is, or an empty text for a finished one."""
    done, planned = run.log.last_step, run.log.max_steps
    progress = f"step {done:,} of {planned:,}" if planned > done else f"step {done:,}"
    if run.is_running:
        took = _seconds(run)
        left = f", about {duration(took / done * (planned - done))} left" if took and planned > done else ""
        return f"This run is still in progress: {progress}{left}."
    if run.fault is not None or planned > done:
        unknown = "" if run.fault or run.log.has_ended else " No cause was recorded: its process was probably killed."
        return f"This run was stopped at {progress}.{unknown}"
    return ""


def _seconds(run: Run) -> float:
    """Return the time of all optimizer steps, from the mean time of a step at each log entry."""
    times = run.series("step_time")
    spans = [step - before for before, step in zip([0, *times.steps], times.steps, strict=False)]
    return math.fsum(span * time for span, time in zip(spans, times.values, strict=True) if span > 0)


def _last_part(path: Any) -> str:
    """Return a name on the hub unchanged, the last part of a path, or the number of several sources."""
    if isinstance(path, list):
        return f"{len(path)} sources mixed"
    text = str(path)
    return text if text.count("/") == 1 and not text.startswith(("/", ".", "~")) else Path(text).name


def _command(record: Mapping[str, Any]) -> str:
    """Return the command that launched the run, without secrets."""
    arguments = record.get("arguments")
    if not isinstance(arguments, list) or not arguments:
        return ""
    return f"python -m grpo_recipes.train {shlex.join(redacted_arguments(list(map(str, arguments))))}"
