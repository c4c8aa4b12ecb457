"""Page with all completions of a run, to filter and search without a server: `completions.html` beside the report.

The page holds the completions as JSON, compressed with gzip and written in base64, so that no text of a run can end the
element that holds it. The browser runs one script, `templates/completions.js`, which the content security policy of the
page names by its hash. The script shows every text as text: nothing in a completion becomes markup or code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup

from grpo_recipes.reports.cards import shortened, tags_of
from grpo_recipes.reports.run import MAX_STEPS, PARTS, Run, spread
from grpo_recipes.reports.transcript import Part, limited
from grpo_recipes.runs.files import replacing
from grpo_rewards.terminal import visible, visible_lines

DATA = '<script type="text/plain" id="data">'
"""Beginning of the element with the completions, which are written behind it and are never in memory as a whole."""
GZIP = 31
"""Argument of zlib for a stream with the header of gzip."""
TEMPLATES = Path(__file__).parent / "templates"
LIMIT = 100_000_000
"""Largest number of characters of all completions and prompts on a page. A browser holds them in memory."""


RESULT_HEAD, RESULT_TAIL = 1500, 500
"""Characters that are shown of a long result of a tool."""
FIRST_PARTS, LAST_PARTS = 150, 50
"""Parts that are shown of a long transcript."""


@dataclass(frozen=True)
class CompletionsPage:
    """Written page with completions.

    Attributes:
        name: Name of the file.
        rows: Number of completions on the page.
        size: Size of the file in bytes.
        note: Sentences on what the page holds, and on what is left out.
    """

    name: str
    rows: int
    size: int
    note: str

    @property
    def shown_size(self) -> str:
        """Size of the file in megabytes or kilobytes."""
        return f"{self.size / 1e6:.1f} MB" if self.size >= 1e6 else f"{self.size / 1e3:.0f} kB"


def policy(style: str, script: str = "") -> str:
    """Return a content security policy that allows one style, perhaps one script, and loads nothing."""
    sources = [f"style-src '{_digest(style)}'"]
    if script:
        sources.append(f"script-src '{_digest(script)}'")
    return f"default-src 'none'; {'; '.join(sources)}; base-uri 'none'; form-action 'none'"


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
    note = _note(run, rows)
    text = environment.get_template("completions.html").render(
        run=run.name,
        style=Markup(style),
        script=Markup(script),
        policy=policy(style, script),
        note=note,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    )
    before, mark, after = text.partition(DATA)
    with replacing(folder / name) as part:
        with part.open("wb") as file:
            file.write(f"{before}{mark}".encode())
            file.writelines(_packed(_items(run, rows)))
            file.write(after.encode())
        size = part.stat().st_size
    return CompletionsPage(name, len(rows), size, note)


def _within_limit(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of as many steps as fit into `LIMIT`, evenly spread, or the first rows of the last step."""
    sizes = rows.groupby("step")["characters"].sum()
    count = len(sizes)
    while True:
        kept = spread(list(sizes.index), count)
        if count == 1 or sizes[kept].sum() <= LIMIT:
            break
        count = math.floor(0.9 * count)
    if count == 1:
        kept = [sizes.index[-1]]
    rows = rows[rows["step"].isin(kept)]
    return rows[rows["characters"].cumsum() <= LIMIT]


def _note(run: Run, rows: pd.DataFrame) -> str:
    """Return which completions the page holds, and the limit."""
    steps, logged = rows["step"].nunique(), run.completion_files.count
    sentences = [
        f"The page holds {len(rows):,} completions of {steps:,} of {logged:,} logged steps. TRL logs the last "
        "generation before each logging step."
    ]
    if steps < logged or len(rows) < len(run.rows):
        sentences.append("The other steps are left out, evenly spread.")
    limit = f"A page holds at most {LIMIT // 1_000_000:,} million characters of at most {MAX_STEPS:,} steps."
    return " ".join([*sentences, limit])


def _items(run: Run, rows: pd.DataFrame) -> Iterator[Any]:
    """Yield what the script reads: names, then each prompt once, as a text, before the first of its completions.

    A completion is a list: step, number of the prompt, text, gold, verdict, advantage, total, and the rewards. In place
    of the text, a transcript is a list of kind, heading and text of each part.
    """
    rewards = [reward.name for reward in run.rewards if f"pay/{reward.name}" in rows.columns]
    yield {"rewards": [visible(name) for name in rewards], "tags": [visible(tag) for tag in tags_of(run)]}
    prompts: dict[int, int] = {}
    for batch in run.batches(rows):
        for row in batch.to_dict("records"):
            prompt = hash(row["question"])
            if prompt not in prompts:
                prompts[prompt] = len(prompts)
                yield visible_lines(row["question"])
            texts = [_text(row.get(key)) for key in ("gold", "verdict")]
            numbers = [_number(row.get(key)) for key in ("advantage", "total", *rewards)]
            shown = _transcript(row[PARTS]) or visible_lines(row["completion"])
            yield [int(row["step"]), prompts[prompt], shown, *texts, *numbers]


def _transcript(parts: Sequence[Part]) -> list[tuple[str, str, str]]:
    shown: list[tuple[str, str, str]] = []
    for part in limited(parts, FIRST_PARTS, LAST_PARTS):
        text = shortened(part.text, RESULT_HEAD, RESULT_TAIL) if part.kind == "result" else part.text
        shown.append((part.kind, visible(part.label), visible_lines(text)))
    return shown


def _text(value: Any) -> str:
    return visible(value) if isinstance(value, str) else ""


def _number(value: Any) -> float | None:
    """Return a number with six digits, or None for a missing one."""
    return float(f"{value:.6g}") if isinstance(value, (int, float)) and math.isfinite(value) else None


def _packed(items: Iterator[Any]) -> Iterator[bytes]:
    """Yield the parts of a JSON array of the items, compressed by gzip and in base64."""
    compressor = zlib.compressobj(wbits=GZIP)
    opening, waiting = b"[", b""
    for item in items:
        waiting += compressor.compress(opening + json.dumps(item, ensure_ascii=False).encode())
        opening = b",\n"
        whole = len(waiting) // 3 * 3  # base64 writes three bytes as four characters, and pads only at the end
        yield base64.b64encode(waiting[:whole])
        waiting = waiting[whole:]
    yield base64.b64encode(waiting + compressor.compress(b"]") + compressor.flush())
