"""HTML page on one run, or on several side by side: `grpo-recipes report RUN [RUN ...]`.

The page begins with the answer: is the policy better, did the checks find a problem, and what was run. It holds its
charts inline, loads nothing and runs no script, so that it can be mailed, archived and read on a phone. The charts are
also written as SVG files into the same folder, and all completions as a page of their own (`completions_page`). The
page's text is in `templates/`.
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
from grpo_recipes.reports import cards, charts
from grpo_recipes.reports.charts import number, percent
from grpo_recipes.reports.completions_page import TEMPLATES, policy, write_completions_page
from grpo_recipes.reports.diagnostics import CHECKS, NOT_CHECKED, Diagnosis, diagnose, looks_for
from grpo_recipes.reports.pictures import Group, groups, labelled
from grpo_recipes.reports.run import Run
from grpo_recipes.runs.files import AFTER, BEFORE, EVALUATED, EVALUATIONS, read_table, write_atomically
from grpo_rewards.redaction import redacted, redacted_arguments
from grpo_rewards.terminal import visible_lines


def write_report(runs: Sequence[Run], folder: Path) -> Path:
    """Write `report.html`, the completions and an SVG file for each chart into a folder. Return the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = groups(runs)
    described = [_described(run, hue) for hue, run in enumerate(runs)]  # reads all files, before anything is written
    for place, (run, values) in enumerate(zip(runs, described, strict=True), start=1):
        name = "completions.html" if place == 1 else f"completions-{place}.html"
        values["all_completions"] = write_completions_page(run, folder, name, _environment(), _style())
    text = page(runs, drawn, described)
    for group in drawn:
        for chart in group.charts:
            write_atomically(folder / f"{chart.name}.svg", chart.standalone())
    path = folder / "report.html"
    write_atomically(path, text)
    return path


def page(runs: Sequence[Run], drawn: Sequence[Group], described: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML of the page.

    Args:
        runs: One or more runs.
        drawn: Their charts.
        described: Values of the template for each run.
    """
    style = _style()
    evaluations = [evaluation for run in runs for evaluation in run.evaluations.values()]
    strict = [evaluation["settings"].get("strict") for evaluation in evaluations]
    required = {accuracy.describe(rewards) for rewards in strict if rewards}
    bars = [chart for group in drawn for chart in group.charts if chart.bars]
    return (
        _environment()
        .get_template("report.html")
        .render(
            style=Markup(style),
            policy=policy(style),
            title=" and ".join(run.name for run in runs),
            named=len(runs) > 1,
            runs=described,
            groups=[group for group in drawn if group],
            first=bars[0] if bars and len(runs) == 1 else None,  # the chart beside the answer
            many=any(evaluation.get("pass_at") for evaluation in evaluations),
            has_rewards=any(evaluation.get("rewards") for evaluation in evaluations),
            requirements="; ".join(sorted(required)),
            made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        )
    )


def _style() -> str:
    """Return the CSS of every page."""
    return charts.palette() + charts.MARKS + (TEMPLATES / "report.css").read_text(encoding="utf-8")


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
    environment.filters["coded"] = _coded
    environment.filters["estimate"] = _estimate
    return environment


def _coded(text: str) -> Markup:
    """Return a sentence with its parts in backquotes set as code. Everything is escaped first."""
    return Markup(re.sub(r"`([^`]{1,200})`", r"<code>\1</code>", str(escape(visible_lines(text)))))


def _estimate(found: Mapping[str, float] | None) -> str:
    """Return a share or a mean with its interval, or a dash if it was not measured."""
    return "–" if found is None else str(Estimate.from_dict(found))


def _described(run: Run, hue: int) -> dict[str, Any]:
    """Return the template's values for a run."""
    diagnosis, pairs = diagnose(run), paired_completions(run)
    counts, changes = cards.changes(_first_completions(pairs), cards.tags_of(run))
    return {
        "name": run.name,
        "hue": hue % charts.HUES,
        "verdict": verdict(run, pairs),
        "checked": _checked(diagnosis),
        "diagnosis": diagnosis,
        "checks": _checks(diagnosis),
        "facts": _facts(run),
        "made_with": _made_with(run.record),
        "state": _state(run),
        "evaluations": labelled(run),
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


Pairs = tuple[pd.DataFrame, pd.DataFrame]
"""Completions before and after training, of the held-out problems that are in both evaluations."""


def paired_completions(run: Run) -> Pairs | None:
    """Return the completions of the held-out problems before and after training, or None without both or golds."""
    tables = []
    for label in (BEFORE, AFTER):
        path = run.folder / EVALUATIONS / label / "completions.parquet"
        if not path.is_file():
            return None
        tables.append(read_table(path, EVALUATED))
    if not all("strict" in table for table in tables):
        return None
    prompts = [table.groupby("problem")["prompt"].first() for table in tables]
    before, after = prompts[0].align(prompts[1], join="inner")
    shared = before.index[before == after]
    first, second = (table[table["problem"].isin(shared)] for table in tables)
    return first, second


def _first_completions(pairs: Pairs | None) -> pd.DataFrame | None:
    """Return the first completion of each problem before and after. The columns of the latter end in `_after`."""
    if pairs is None:
        return None
    before, after = (table[table["sample"] == 0].set_index("problem") for table in pairs)
    return before.join(after, rsuffix="_after", how="inner")


def verdict(run: Run, pairs: Pairs | None) -> Verdict:
    """Return the verdict by the accuracy before and after training, or by the closest measurement that there is.

    Args:
        run: The run.
        pairs: Result of `paired_completions`.
    """
    evaluations = {label: run.evaluations.get(label, {}) for label in (BEFORE, AFTER)}
    shares = {label: Estimate.from_dict(one["strict"]) for label, one in evaluations.items() if "strict" in one}
    if AFTER not in shares:
        return _verdict_by_reward(run)
    after, problems = shares[AFTER], evaluations[AFTER]["problems"]
    if BEFORE in shares:
        return _verdict_by_change(shares[BEFORE], after, evaluations, pairs)
    return Verdict(
        f"Accuracy {percent(after.value)} on {problems:,} held-out problems",
        f"{_interval(after)}; accuracy before training was not measured: run `grpo-recipes evaluate` on the model that "
        f"the run began with, with `--output {run.folder / EVALUATIONS / BEFORE}`",
    )


def _verdict_by_change(
    before: Estimate, after: Estimate, evaluations: Mapping[str, Any], pairs: Pairs | None
) -> Verdict:
    problems = evaluations[AFTER]["problems"]
    change = f"Accuracy {percent(before.value)} → {percent(after.value)} on {problems:,} held-out problems"
    first, second = (evaluations[label]["settings"] for label in (BEFORE, AFTER))
    if first.get("strict") != second.get("strict"):
        return Verdict(change, "Judged by different rewards before and after, so that the two can't be compared")
    gain = after.value - before.value
    if pairs is None or not _are_all(pairs, evaluations):
        sure = f"{_points(gain)} points; before {_interval(before)}, after {_interval(after)}"
        sign = (after.low > before.high) - (after.high < before.low)
    else:
        compared = compare_tables(*pairs)
        found = compared["strict"]["difference"]
        difference = Estimate.from_dict(found)
        ends = f"{_points(difference.low)} to {_points(difference.high)}"
        test = "McNemar's test: " if "mcnemar" in compared else ""
        sure = f"{_points(difference.value)} points (95 %: {ends}; {test}p = {p_text(found['p'], digits=1)})"
        sign = difference.sign
    if not sign:
        return Verdict(change, f"{sure}: no clear difference")
    return Verdict(change, sure, "better" if sign > 0 else "worse")


def _are_all(pairs: Pairs, evaluations: Mapping[str, Any]) -> bool:
    """Return True if both evaluations are of the paired problems and of no other ones."""
    counts = [table["problem"].nunique() for table in pairs]
    return counts == [evaluations[label]["problems"] for label in (BEFORE, AFTER)]


def _verdict_by_reward(run: Run) -> Verdict:
    """Return the verdict on a run without an evaluation."""
    reward = run.series("reward")
    if not len(reward):
        return Verdict("Nothing was measured", "The log has no reward, and no evaluation is in the run's folder")
    sure = (
        "on the training prompts, which the policy was trained for. Accuracy on held-out problems was not measured: "
        f"run `grpo-recipes evaluate {run.folder}`"
    )
    if len(reward) == 1:
        return Verdict(f"Training reward {number(reward.start)} at step {reward.steps[0]}", f"Reward {sure}")
    ends = f"{number(reward.start)} → {number(reward.end)}"
    steps = reward.quarters[:1].upper() + reward.quarters[1:]
    return Verdict(f"Training reward {ends} over {run.log.last_step:,} optimizer steps", f"{steps} {sure}")


def _points(share: float) -> str:
    points = 100 * share
    decimals = 0 if abs(points) >= 10 or abs(points - round(points)) < 0.05 else 1
    return f"{points:+z.{decimals}f}"  # z: no -0


def _interval(share: Estimate) -> str:
    return f"95 %: {100 * share.low:.0f} to {percent(share.high)}"


# Checks and facts


def _checked(diagnosis: Diagnosis) -> str:
    """Return how many checks had data and how many found a problem, as a sentence without its full stop."""
    if not diagnosis.checked:
        return diagnosis.coverage
    found = len({finding.check for finding in diagnosis.findings})
    result = f"{found} found something" if found else "none found anything"
    return f"{diagnosis.checked} of {diagnosis.applicable} checks had data, {result}"


def _checks(diagnosis: Diagnosis) -> list[dict[str, str]]:
    """Return every check with its result, its sentence, and what a check without data looks for."""
    clauses = {check.__name__: looks_for(check) for check in CHECKS}
    checks = []
    for result, name, text in diagnosis.rows():
        if result == NOT_CHECKED:
            text = f"{text}. It looks for {clauses[name]}"
        checks.append({"name": name, "result": result, "text": text[:1].upper() + text[1:]})
    return checks


def _facts(run: Run) -> list[tuple[str, str]]:
    """Return what was run, as names and values."""
    record = run.record
    spec = run.recipe.get("dataset")
    data = []
    if isinstance(spec, Mapping):
        data.append(_last_part(spec.get("name") or spec.get("path") or ""))
    if isinstance(record.get("train_prompts"), int):
        data.append(f"{record['train_prompts']:,} prompts")
    tokens, processes = run.series("num_tokens"), record.get("world_size")
    hardware = record.get("hardware") or ""
    if not hardware and processes is not None:
        hardware = f"{processes} process{'es' if processes != 1 else ''}"
    facts = {
        "Model": _last_part(run.recipe.get("model_name_or_path", "")),
        "Data": ", ".join(filter(None, data)),
        "Optimizer steps": f"{run.log.last_step:,}",
        "Time in steps": duration(seconds(run)),
        "Tokens": f"{number(tokens.values[-1])} in prompts and completions" if len(tokens) else "",
        "Hardware": str(hardware),
        "Recipe": _last_part(record.get("source", "")),
    }
    return [(name, value) for name, value in facts.items() if value]


def _made_with(record: Mapping[str, Any]) -> str:
    """Return when the run was started, and the versions."""
    versions = record.get("versions") or {}
    parts = []
    if "started" in record:
        parts.append(f"Started {record['started']}".replace("T", " ").replace("Z", " UTC"))
    for name in ("grpo-recipes", "trl", "transformers", "torch"):
        if name in versions:
            parts.append(f"{name} {versions[name]}")
    return "; ".join(parts)


def _state(run: Run) -> str:
    """Return how far an unfinished run is, or an empty text for a finished one."""
    done, planned = run.log.last_step, run.log.max_steps
    progress = f"step {done:,} of {planned:,}" if planned > done else f"step {done:,}"
    if run.is_running:
        took = seconds(run)
        left = duration(took / done * (planned - done)) if took and planned > done else ""
        estimate = f", about {left} left" if left else ""
        return f"This run is still in progress: {progress}{estimate}."
    if run.fault is not None or planned > done:
        unknown = "" if run.fault or run.log.has_ended else " No cause was recorded: its process was probably killed."
        return f"This run was stopped at {progress}.{unknown}"
    return ""


def seconds(run: Run) -> float | None:
    """Return the time of all optimizer steps, from the mean time of a step at each log entry, or None."""
    times = run.series("step_time")
    if not len(times):
        return None
    spans = [step - before for before, step in zip([0, *times.steps], times.steps, strict=False)]
    return math.fsum(span * time for span, time in zip(spans, times.values, strict=True) if span > 0)


def duration(length: float | None) -> str:
    """Return a number of seconds as text, in its two largest units."""
    if length is None or not 0 <= length < 1e10:
        return ""
    if length < 60:
        return f"{length:.0f} s"
    minutes, rest = divmod(round(length), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


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
