"""One page on a run, or on two side by side: `grpo-recipes report RUN [RUN2]`.

The page holds its pictures inline, loads nothing and runs no script, so that it can be mailed, archived and read on a
phone. The pictures are also written as PNGs, into the same folder.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from matplotlib.figure import Figure

from grpo_recipes.results.diagnostics import diagnose
from grpo_recipes.results.estimates import Estimate
from grpo_recipes.results.run import Run, Series, last_message
from grpo_recipes.runs.files import AFTER, BEFORE, EVALUATED, EVALUATIONS, read_table, shown, write_atomically
from grpo_rewards.redaction import redacted
from grpo_rewards.terminal import visible, visible_lines

COLOURS = ("#1f6fb2", "#d1600a")  # told apart by colour-blind readers too
EXAMPLES = 4
MAX_CHARACTERS = 700
MAX_LABEL = 100
BUCKETS = 1000
LARGEST_DRAWN = 1e100

# Title, unit and the logged keys that share a picture; several keys are told apart by their dashes.
PICTURES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Total reward", "reward", ("reward", "eval_reward")),
    ("KL to the reference", "nats a token", ("kl",)),
    ("Entropy", "nats a token", ("entropy",)),
    ("Completion length", "tokens", ("completions/mean_length", "completions/max_length")),
    ("Truncated completions", "share", ("completions/clipped_ratio",)),
    ("Clipped tokens", "share", ("clip_ratio/region_mean", "cispo_clip_ratio")),
    ("Groups without variance", "share of groups", ("frac_reward_zero_std",)),
    ("Time of a step", "seconds", ("step_time",)),
    ("Learning rate", "", ("learning_rate",)),
    ("Gradient norm", "", ("grad_norm",)),
    ("Weights that a step changes", "share of those sampled", ("updates/changed", "updates/expected")),
)
DASHES = ("-", "--", ":", "-.")

STYLE = """
body { margin: 0 auto; max-width: 62rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; border-bottom: 1px solid #ddd; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 28rem), 1fr)); gap: 1rem; }
figure { margin: 0; } img { width: 100%; height: auto; } .wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: .85rem/1.4 ui-monospace, monospace; }
.completion { min-width: 16rem; } .finding { border-left: .3rem solid #d1600a; padding-left: .7rem; }
"""


@dataclass(frozen=True)
class Picture:
    """A drawn picture: its file name without suffix, its title, and its PNG bytes."""

    name: str
    title: str
    png: bytes


def write_report(runs: Sequence[Run], folder: Path) -> Path:
    """Write `report.html` and a PNG for each picture of one or two runs into a folder. Returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = list(draw(runs))
    text = _page(runs, pictures)  # before anything is written: a file that can't be read is found here
    names: set[str] = set()
    for picture in pictures:
        name = next(name for name in _numbered(picture.name) if name not in names)
        names.add(name)
        write_atomically(folder / f"{name}.png", picture.png)
    page = folder / "report.html"
    write_atomically(page, text)
    return page


def _numbered(name: str) -> Iterator[str]:
    """A name, and others for pictures whose titles differ in no letter."""
    yield name
    yield from (f"{name}-{number}" for number in count(2))


def draw(runs: Sequence[Run]) -> Iterator[Picture]:
    """Every picture for which one of the runs logged something."""
    if any("strict" in evaluation for run in runs for evaluation in run.evaluations.values()):
        yield _finish("evaluation", "Accuracy on held-out problems", _evaluation_figure(runs))
    if any(run.held_out_accuracy() for run in runs):
        yield _finish("held-out-accuracy", "Accuracy on the held-out split while training", _held_out_figure(runs))
    names = dict.fromkeys(reward.name for run in runs for reward, means in run.parts() if len(means))
    for name in names:
        yield _finish(_file_name(f"reward {name}"), f"Reward {name}", _reward_figure(runs, name))
    for title, unit, keys in (*PICTURES, *_efficiency(runs)):
        logged = [key for key in keys if any(len(run.series(key)) for run in runs)]
        if logged:
            yield _finish(_file_name(title), title, _line_figure(runs, unit, keys, logged))


def _efficiency(runs: Sequence[Run]) -> list[tuple[str, str, tuple[str, ...]]]:
    """A picture for each metric of how the batches were laid out."""
    keys = dict.fromkeys(key for run in runs for key in run.logged("efficiency/"))
    return [(key.replace("/", ": ").replace("_", " "), "", (key,)) for key in keys]


def _reward_figure(runs: Sequence[Run], name: str) -> Figure:
    figure, axes = _figure("mean, and its spread over completions")
    for run, colour in zip(runs, COLOURS, strict=False):
        for means in (means for reward, means in run.parts() if reward.name == name):
            _plot(axes, means, _run_label(run, runs), colour)
            spread = run.series(f"rewards/{name}/std")
            if means.steps == spread.steps:
                mean, std = np.array(means.values), np.array(spread.values)
                with np.errstate(over="ignore"):  # beyond the largest float it is infinite, and drawn at the edge
                    low, high = _drawable(mean - std), _drawable(mean + std)
                kept = np.union1d(envelope(low), envelope(high))
                steps = np.array(means.steps)[kept]
                axes.fill_between(steps, low[kept], high[kept], color=colour, alpha=0.15, linewidth=0)
    return figure


def _line_figure(runs: Sequence[Run], unit: str, keys: Sequence[str], logged: Sequence[str]) -> Figure:
    figure, axes = _figure(unit)
    for run, colour in zip(runs, COLOURS, strict=False):
        for key, dash in zip(keys, DASHES, strict=False):
            if len(series := run.series(key)):
                names = [_run_label(run, runs), key if len(logged) > 1 else ""]
                _plot(axes, series, ", ".join(filter(None, names)), colour, dash)
    if unit.startswith("share"):
        axes.set_ylim(0, max(0.05, axes.get_ylim()[1]))
    return figure


def _evaluation_figure(runs: Sequence[Run]) -> Figure:
    figure, axes = _figure("share right", across="")
    bars = [(run, label, evaluation) for run in runs for label, evaluation in _labelled(run) if "strict" in evaluation]
    for place, (run, _, evaluation) in enumerate(bars):
        for name, shift, face in (("strict", -0.2, True), ("lenient", 0.2, False)):
            share, colour = Estimate.from_dict(evaluation[name]), COLOURS[list(runs).index(run) % len(COLOURS)]
            label = "" if place else name
            axes.bar(place + shift, share.value, 0.38, color=colour if face else "white", edgecolor=colour, label=label)
            _draw_intervals(axes, [place + shift], [share], color="#1a1a1a", capsize=4)
    names = [f"{run.name}\n{label}" if len(runs) > 1 else label for run, label, _ in bars]
    axes.set_xticks(range(len(bars)), [_verbatim(name) for name in names])
    axes.set_ylim(0, 1)
    return figure


def _held_out_figure(runs: Sequence[Run]) -> Figure:
    figure, axes = _figure("share right, 95 % interval")
    for run, colour in zip(runs, COLOURS, strict=False):
        points = dict(run.held_out_accuracy())
        label = _run_label(run, runs)
        _draw_intervals(axes, points.keys(), points.values(), color=colour, label=label, marker="o", capsize=3)
    axes.set_ylim(0, 1)
    return figure


def _draw_intervals(axes: Any, places: Iterable[float], shares: Iterable[Estimate], **style: Any) -> None:
    value, low, high = np.array([(share.value, share.low, share.high) for share in shares]).reshape(-1, 3).T
    axes.errorbar(list(places), value, yerr=[value - low, high - value], **style)


def _run_label(run: Run, runs: Sequence[Run]) -> str:
    """A run's name in a legend; of one run alone there is no legend."""
    return _verbatim(run.name) if len(runs) > 1 else ""


def _figure(unit: str, across: str = "optimiser step") -> tuple[Figure, Any]:
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_xlabel(across)
    axes.set_ylabel(unit)
    return figure, axes


def _verbatim(label: str) -> str:
    """A label as matplotlib shows it unchanged: text between two dollars is a formula to it."""
    return visible(shown(label, MAX_LABEL)).replace("$", r"\$")


def _plot(axes: Any, series: Series, label: str, colour: str, dash: str = "-") -> None:
    marker = "o" if len(series) < 25 else None
    kept = envelope(series.values)
    steps, values = np.array(series.steps)[kept], _drawable(np.array(series.values)[kept])
    axes.plot(steps, values, dash, color=colour, label=label, marker=marker, markersize=3)


def envelope(values: Sequence[float] | np.ndarray, most: int = 2 * BUCKETS) -> np.ndarray:
    """Which points of a series to draw, by index in order: all, or of each of `most / 2` equal stretches the lowest and highest.

    A picture is some hundred pixels wide: a line through these points covers the same pixels as one through all.
    """
    points = np.asarray(values, dtype=float)
    if len(points) <= most:
        return np.arange(len(points))
    stretches = np.array_split(np.arange(len(points)), most // 2)
    ends = [stretch[[points[stretch].argmin(), points[stretch].argmax()]] for stretch in stretches]
    return np.unique(np.concatenate([*ends, [0, len(points) - 1]]))


def _drawable(values: np.ndarray) -> np.ndarray:
    """Values that matplotlib can scale: it multiplies them, and the largest floats overflow."""
    return np.clip(values, -LARGEST_DRAWN, LARGEST_DRAWN)


def _finish(name: str, title: str, figure: Figure) -> Picture:
    (axes,) = figure.axes
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=110, metadata={"Software": None})
    return Picture(name, title, png.getvalue())


def _file_name(title: str) -> str:
    return shown("".join(character if character.isalnum() else "-" for character in title.lower()), MAX_LABEL)


def _html(text: str) -> str:
    """Text as HTML shows it, each character that shows nothing or turns the line around made visible."""
    return escape(visible_lines(text))


def _page(runs: Sequence[Run], pictures: list[Picture]) -> str:
    title = " and ".join(run.name for run in runs)
    sections = [
        f"<h1>{_html(title)}</h1>",
        *(f"<p>{_html(_headline(run))}</p>" for run in runs),
        _section("Findings", *(_findings(run, len(runs) > 1) for run in runs)),
        _section("Accuracy on held-out problems", *(_evaluations(run) for run in runs if run.evaluations)),
        _section("Pictures", _pictures(pictures)),
        *(_section(f"Completions{_of(run, runs)}", _completions(run)) for run in runs if len(run.rows)),
        *(_section(f"Changed verdicts{_of(run, runs)}", _changes(run)) for run in runs),
        *(_section(f"Recipe{_of(run, runs)}", _recipe(run)) for run in runs if run.recipe),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_html(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _of(run: Run, runs: Sequence[Run]) -> str:
    return f" of {run.name}" if len(runs) > 1 else ""


def _section(title: str, *parts: str) -> str:
    return f"<h2>{_html(title)}</h2>\n" + "\n".join(parts) if any(parts) else ""


def _headline(run: Run) -> str:
    """What ran, on what, in one line."""
    versions = run.record.get("versions", {})
    parts = [
        f"{run.name}: {run.recipe.get('model_name_or_path', 'a model')}, {run.log.last_step} optimiser steps",
        f"on {run.record['world_size']} process(es)" if "world_size" in run.record else "",
        f"{run.record['train_prompts']} prompts" if "train_prompts" in run.record else "",
        f"started {run.record['started']}" if "started" in run.record else "",
        ", ".join(f"{name} {versions[name]}" for name in ("trl", "transformers", "torch") if name in versions),
    ]
    return "; ".join(part for part in parts if part)


def _findings(run: Run, named: bool) -> str:
    diagnosis = diagnose(run)
    name = f"{run.name}: " if named else ""
    lines = [f'<p class="finding">{_html(name + finding.sentence)}.</p>' for finding in diagnosis.findings]
    if diagnosis.looks_fine:
        lines.append(f"<p>{_html(name)}nothing looks wrong.</p>")
    return "\n".join([*lines, f"<p>{_html(name + diagnosis.coverage)}.</p>"])


def _labelled(run: Run) -> list[tuple[str, Any]]:
    """A run's evaluations: before, others by name, after."""
    order = {BEFORE: 0, AFTER: 2}
    return sorted(run.evaluations.items(), key=lambda item: (order.get(item[0], 1), item[0]))


def _evaluations(run: Run) -> str:
    columns = ["strict", "lenient", "majority"]
    rows = []
    for label, evaluation in _labelled(run):
        shares = [str(Estimate.from_dict(evaluation[name])) if name in evaluation else "" for name in columns]
        passes = ", ".join(f"@{k} {Estimate.from_dict(share)}" for k, share in evaluation.get("pass_at", {}).items())
        rows.append([f"{run.name}, {label}", str(evaluation["problems"]), *shares, passes])
    head = ["", "problems", *(f"{name} [95 %]" for name in columns), "pass"]
    kept = [place for place in range(len(head)) if place < 2 or any(row[place] for row in rows)]
    return _table([head[place] for place in kept], [[row[place] for place in kept] for row in rows]) + _own(run)


def _own(run: Run) -> str:
    """What each reward of the recipe pays in a run's evaluations."""
    rows = []
    for label, evaluation in _labelled(run):
        for name, entry in evaluation.get("rewards", {}).items():
            numbers = [str(Estimate.from_dict(entry[key])) if key in entry else "" for key in ("mean", "passed")]
            rows.append([f"{run.name}, {label}", name, *numbers])
    return _table(["", "reward", "mean [95 %]", "passed [95 %]"], rows) if rows else ""


def _pictures(pictures: list[Picture]) -> str:
    figures = [
        f'<figure><figcaption>{_html(picture.title)}</figcaption><img alt="{_html(picture.title)}" '
        f'src="data:image/png;base64,{base64.b64encode(picture.png).decode("ascii")}"></figure>'
        for picture in pictures
    ]
    return f'<div class="pictures">{"".join(figures)}</div>'


def _completions(run: Run) -> str:
    """The best and the worst completions of the last quarter of the run, by their total reward."""
    scored = run.rows.dropna(subset="total").drop_duplicates(["prompt", "completion"])
    steps = sorted(scored["step"].unique())
    late = scored[scored["step"] >= steps[-max(1, len(steps) // 4)]] if steps else scored
    ordered = late.sort_values("total", ascending=False, kind="stable")
    half = min(EXAMPLES, len(ordered) // 2)
    table = run.texts(pd.concat([ordered.head(half), ordered.tail(half)]))
    paid = [reward.name for reward in run.rewards if reward.name in table.columns]
    rows = [
        [place, f"{row['step']:.0f}", row["question"], row["completion"], *(_number(row[name]) for name in paid)]
        for place, (_, row) in zip(["best"] * half + ["worst"] * half, table.iterrows(), strict=True)
    ]
    return _table(["", "step", "prompt", "completion", *paid], rows)


def _changes(run: Run) -> str:
    """Held-out problems whose strict verdict differs before and after: gained, then lost."""
    tables = [run.folder / EVALUATIONS / label / "completions.parquet" for label in (BEFORE, AFTER)]
    if not all(table.is_file() for table in tables):
        return ""
    before, after = (read_table(table, EVALUATED).query("sample == 0").set_index("problem") for table in tables)
    if "strict" not in before or "strict" not in after:
        return ""
    both = before.join(after, rsuffix="_after", how="inner")
    both = both[both["prompt"] == both["prompt_after"]]
    changed = {
        "gained": both[~both["strict"] & both["strict_after"]],
        "lost": both[both["strict"] & ~both["strict_after"]],
    }
    counts = f"{len(changed['gained'])} of {len(both)} problems gained, {len(changed['lost'])} lost."
    rows = [
        [kind, _question(row["prompt"]), row["gold"], row["completion"], row["completion_after"]]
        for kind, chosen in changed.items()
        for _, row in chosen.head(EXAMPLES).iterrows()
    ]
    return f"<p>{counts}</p>" + _table(["", "prompt", "gold", "before", "after"], rows)


def _question(prompt: str) -> str:
    """The last message of a prompt as `completions.parquet` of an evaluation holds it: JSON messages, or text."""
    try:
        messages = json.loads(prompt)
    except ValueError:
        return prompt
    return last_message(messages) if isinstance(messages, list) else prompt


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(f"<th>{_html(word)}</th>" for word in head)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    if len(text) > 24 or "\n" in text:
        clipped = text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " …"
        return f'<td class="completion"><pre>{_html(clipped)}</pre></td>'
    return f"<td>{_html(text)}</td>"


def _number(value: Any) -> str:
    return "–" if pd.isna(value) else f"{value:.3g}"


def _recipe(run: Run) -> str:
    return f"<pre>{_html(yaml.safe_dump(redacted(run.recipe), sort_keys=False, allow_unicode=True))}</pre>"
