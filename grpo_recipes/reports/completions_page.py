"""Page with all completions of a run, to filter and search without a server: `completions.html` beside the report.

The page holds the completions as JSON, compressed with gzip and written in base64, so that no text of a run can end the
element that holds it. The browser runs one script, `templates/completions.js`, which the content security policy of the
page names by its hash. The script shows every text as text: nothing in a completion becomes markup or code.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from grpo_recipes.reports.run import PARTS, Run
from grpo_recipes.runs.files import write_atomically
from grpo_rewards.terminal import visible, visible_lines

TEMPLATES = Path(__file__).parent / "templates"
LIMIT = 100_000_000
"""Number of characters of all completions and prompts above which a page has some steps only. A browser holds them."""


@dataclass(frozen=True)
class CompletionsPage:
    """Written page with completions: its file, their number, and sentences on what it holds and leaves out."""

    name: str
    rows: int
    note: str


def policy(style: str, script: str = "") -> str:
    """Return a content security policy that allows one style, perhaps one script, and loads nothing."""
    scripts = f"script-src '{_digest(script)}'; " if script else ""
    return f"default-src 'none'; style-src '{_digest(style)}'; {scripts}base-uri 'none'; form-action 'none'"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def write_completions_page(
    run: Run, folder: Path, name: str, environment: jinja2.Environment, style: str
) -> CompletionsPage | None:
    """Write the page with the completions of a run, and return its description, or None if none was logged.

    Args:
        run: The run.
        folder: Folder for the page.
        name: Name of the file.
        environment: Environment with the templates of the report.
        style: CSS of the report.
    """
    if not len(run.rows):
        return None
    rows = _within_limit(run.rows)
    script = (TEMPLATES / "completions.js").read_text(encoding="utf-8")
    note = (
        f"The page holds {len(rows):,} completions of {rows['step'].nunique():,} of {run.completion_files.count:,} "
        "logged steps, evenly spread. TRL logs the last generation before each logging step."
    )
    text = environment.get_template("completions.html").render(
        run=run.name,
        style=Markup(style),
        script=Markup(script),
        policy=policy(style, script),
        note=note,
        data=_packed(_items(run, rows)),
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )
    write_atomically(folder / name, text)
    return CompletionsPage(name, len(rows), note)


def _within_limit(rows: pd.DataFrame) -> pd.DataFrame:
    """Return all rows, or those of every second, third, … step up to the last one, so that about `LIMIT` remain."""
    every = math.ceil(rows["characters"].sum() / LIMIT)
    steps = sorted(rows["step"].unique())
    return rows[rows["step"].isin(steps[::-1][:: max(1, every)])]


def _items(run: Run, rows: pd.DataFrame) -> Iterator[Any]:
    """Yield what the script reads: names, then each prompt once, as a text, before the first of its completions.

    A completion is a list: step, number of the prompt, text, gold, verdict, advantage, total, and the rewards. In place
    of the text, a transcript is a list of kind, heading and text of each part.
    """
    rewards = [reward.name for reward in run.rewards if f"pay/{reward.name}" in rows.columns]
    yield {"rewards": [visible(name) for name in rewards]}
    prompts: dict[int, int] = {}
    for batch in run.batches(rows):
        for row in batch.to_dict("records"):
            prompt = hash(row["question"])
            if prompt not in prompts:
                prompts[prompt] = len(prompts)
                yield visible_lines(row["question"])
            texts = [_text(row.get(key)) for key in ("gold", "verdict")]
            numbers = [_number(row.get(key)) for key in ("advantage", "total", *rewards)]
            parts = [(part.kind, visible(part.label), visible_lines(part.text)) for part in row[PARTS]]
            yield [int(row["step"]), prompts[prompt], parts or visible_lines(row["completion"]), *texts, *numbers]


def _text(value: Any) -> str:
    return visible(value) if isinstance(value, str) else ""


def _number(value: Any) -> float | None:
    """Return a number with six digits, or None for a missing one."""
    return float(f"{value:.6g}") if isinstance(value, (int, float)) and math.isfinite(value) else None


def _packed(items: Iterator[Any]) -> Markup:
    """Return a JSON array of the items, compressed by gzip and in base64. Only the compressed form is held."""
    packed = io.BytesIO()
    with gzip.open(packed, "wt", encoding="utf-8") as file:
        for place, item in enumerate(items):
            file.write(f"{',' if place else '['}\n{json.dumps(item, ensure_ascii=False)}")
        file.write("]")
    return Markup(base64.b64encode(packed.getvalue()).decode())
