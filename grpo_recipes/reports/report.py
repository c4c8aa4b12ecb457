"""One page on a run, or on several side by side: `grpo-recipes report RUN [RUN ...]`.

The page answers first, holds its pictures inline, loads nothing and runs no script, so that it can be mailed, archived and
read on a phone. The pictures are also written as SVG files, into the same folder. What the page says is in `templates/`.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml
from markupsafe import Markup, escape

from grpo_recipes.evaluation import accuracy as strict
from grpo_recipes.evaluation.estimates import Estimate
from grpo_recipes.reports import cards as examples
from grpo_recipes.reports import charts
from grpo_recipes.reports.charts import Chart
from grpo_recipes.reports.headline import Answer, duration, seconds
from grpo_recipes.reports.pictures import Group, groups, labelled
from grpo_recipes.reports.run import Run
from grpo_recipes.runs.files import write_atomically
from grpo_rewards.redaction import redacted, redacted_arguments
from grpo_rewards.terminal import visible_lines

TEMPLATES = Path(__file__).parent / "templates"


def write_report(runs: Sequence[Run], folder: Path) -> Path:
    """Write `report.html` and an SVG for each picture of one or more runs into a folder. Returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = groups(runs)
    text = page(runs, drawn)  # before anything is written: a file that can't be read is found here
    for chart in (chart for group in drawn for chart in group.charts):
        write_atomically(folder / f"{chart.name}.svg", chart.standalone())
    path = folder / "report.html"
    write_atomically(path, text)
    return path


def page(runs: Sequence[Run], drawn: Sequence[Group]) -> str:
    """The page's HTML."""
    style = charts.palette() + charts.MARKS + (TEMPLATES / "report.css").read_text(encoding="utf-8")
    described = [_described(run, hue) for hue, run in enumerate(runs)]
    return _template().render(
        style=Markup(style),
        title=" and ".join(run.name for run in runs),
        named=len(runs) > 1,
        runs=described,
        groups=[group for group in drawn if group],
        first=_first(runs, drawn),
        many=any(run.evaluations[label].get("pass_at") for run in runs for label in run.evaluations),
        asks="; ".join(sorted({one["asks"] for run in described for one in run["evaluations"] if one["asks"]})),
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )


def _first(runs: Sequence[Run], drawn: Sequence[Group]) -> Chart | None:
    """The picture beside the answer: accuracy before and after, of one run."""
    charts = [chart for group in drawn for chart in group.charts if chart.bars]
    return charts[0] if charts and len(runs) == 1 else None


@cache
def _template() -> jinja2.Template:
    """The page's template. Everything that is put into it is escaped, and each character that shows nothing made visible."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, (Markup, int)) else visible_lines(value),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["coded"] = _coded
    return environment.get_template("report.html")


def _coded(text: str) -> Markup:
    """A sentence of ours with what stands in backquotes set as code; all of it is escaped first."""
    return Markup(re.sub(r"`([^`]{1,200})`", r"<code>\1</code>", str(escape(visible_lines(text)))))


def _described(run: Run, hue: int) -> dict[str, Any]:
    """What the template says of a run."""
    answer = Answer(run)
    counts, changes = examples.changes(answer.pairs, examples.tags_of(run))
    return {
        "name": run.name,
        "hue": hue % charts.HUES,
        "verdict": answer.verdict,
        "checked": answer.checked,
        "coverage": answer.diagnosis.coverage,
        "looks_fine": answer.diagnosis.looks_fine,
        "has_checks": answer.diagnosis.checked > 0,
        "checks": answer.checks,
        "facts": answer.facts,
        "made_with": answer.made_with,
        "state": _state(run),
        "evaluations": [_evaluation(label, evaluation) for label, evaluation in labelled(run)],
        "paid": [row for label, evaluation in labelled(run) for row in _paid(label, evaluation)],
        "cards": examples.cards(run),
        "counts": counts,
        "changes": changes,
        "recipe": yaml.safe_dump(redacted(run.recipe), sort_keys=False, allow_unicode=True) if run.recipe else "",
        "command": _command(run),
    }


def _state(run: Run) -> str:
    """That a run is not over, and how far it is; nothing of one that is."""
    done, planned = run.log.last_step, run.log.max_steps
    of = f" of {planned:,}" if planned > done else ""
    if run.is_running:
        took = seconds(run)
        left = duration(took / done * (planned - done)) if took and done and planned > done else ""
        return f"This run is still going: step {done:,}{of}{f', about {left} left' if left else ''}."
    return f"This run was stopped at step {done:,}{of}." if of else ""


def _evaluation(label: str, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """An evaluation's shares as text, and what its strict accuracy asks for."""
    names = ("strict", "lenient", "majority")
    shares = {name: str(Estimate.from_dict(evaluation[name])) for name in names if name in evaluation}
    passes = ", ".join(f"@{k} {Estimate.from_dict(share)}" for k, share in evaluation.get("pass_at", {}).items())
    settings = evaluation["settings"]
    asks = strict.describe(settings["strict"]) if settings.get("strict") else ""
    return {
        "label": label,
        "problems": f"{evaluation['problems']:,}",
        "samples": settings["samples"],
        **dict.fromkeys(names, ""),
        **shares,
        "passes": passes,
        "asks": asks,
    }


def _paid(label: str, evaluation: Mapping[str, Any]) -> list[dict[str, str]]:
    """What each reward of the recipe pays in an evaluation."""
    return [
        {"label": label, "name": name}
        | {key: str(Estimate.from_dict(entry[key])) if key in entry else "" for key in ("mean", "passed")}
        for name, entry in evaluation.get("rewards", {}).items()
    ]


def _command(run: Run) -> str:
    """How the run was launched, without secrets."""
    arguments = run.record.get("arguments")
    if not isinstance(arguments, list) or not arguments:
        return ""
    return f"python -m grpo_recipes.train {shlex.join(redacted_arguments(list(map(str, arguments))))}"
