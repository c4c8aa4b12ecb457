"""What a report answers first: is the policy better, did the checks find anything, and what ran on what."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_recipes.evaluation.estimates import Estimate, mcnemar, paired_difference
from grpo_recipes.reports.charts import number, percent
from grpo_recipes.reports.diagnostics import CHECKS, Diagnosis, diagnose, looks_for
from grpo_recipes.reports.run import Run
from grpo_recipes.runs.files import AFTER, BEFORE, EVALUATED, EVALUATIONS, read_table


@dataclass(frozen=True)
class Check:
    """A check of `diagnose` as the page lists it: its name, what it looks for, how it came out, and what it says."""

    name: str
    looks_for: str
    state: str
    """found, fine or no data"""
    said: str = ""


@dataclass(frozen=True)
class Verdict:
    """One sentence on whether the policy is better, and a clause on how sure that is."""

    sentence: str
    sure: str
    tone: str = "neutral"
    """better, worse or neutral"""


@dataclass(frozen=True)
class Answer:
    """The answers on one run."""

    run: Run

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """What the checks found."""
        return diagnose(self.run)

    @cached_property
    def pairs(self) -> pd.DataFrame | None:
        """The first completion of each held-out problem before and after (`*_after`); None unless both are there."""
        tables = [self.run.folder / EVALUATIONS / label / "completions.parquet" for label in (BEFORE, AFTER)]
        if not all(table.is_file() for table in tables):
            return None
        before, after = (read_table(table, EVALUATED).query("sample == 0").set_index("problem") for table in tables)
        if "strict" not in before or "strict" not in after:
            return None
        both = before.join(after, rsuffix="_after", how="inner")
        return both[both["prompt"] == both["prompt_after"]]

    @cached_property
    def verdict(self) -> Verdict:
        """Accuracy before and after on the same problems, or the nearest to it that was measured."""
        evaluations = {label: self.run.evaluations.get(label, {}) for label in (BEFORE, AFTER)}
        shares = {label: Estimate.from_dict(one["strict"]) for label, one in evaluations.items() if "strict" in one}
        if len(shares) == 2:
            return self._before_and_after(shares[BEFORE], shares[AFTER], evaluations)
        if AFTER in shares:
            share, problems = shares[AFTER], evaluations[AFTER]["problems"]
            return Verdict(
                f"Accuracy {percent(share.value)} on {problems:,} held-out problems",
                f"{_interval(share)}; what it was before training was not measured: `grpo-recipes evaluate` of the model that "
                f"it began from, with `--output {self.run.folder / EVALUATIONS / BEFORE}`, would tell",
            )
        return self._by_reward()

    def _before_and_after(self, before: Estimate, after: Estimate, evaluations: Mapping[str, Any]) -> Verdict:
        problems = evaluations[AFTER]["problems"]
        change = f"Accuracy {percent(before.value)} → {percent(after.value)} on {problems:,} held-out problems"
        asked = [evaluations[label]["settings"] for label in (BEFORE, AFTER)]
        if asked[0].get("strict") != asked[1].get("strict"):
            return Verdict(change, "Judged by different rewards before and after, so that the two can't be compared")
        gain = after.value - before.value
        if asked[0]["samples"] > 1 or self.pairs is None or len(self.pairs) != problems:
            sure = f"{_points(gain)} points; before {_interval(before)}, after {_interval(after)}"
            is_clear = after.low > before.high or after.high < before.low
        else:
            verdicts = [self.pairs[name].astype(bool).tolist() for name in ("strict", "strict_after")]
            difference = paired_difference(*(list(map(float, one)) for one in verdicts))
            only = [
                sum(one and not other for one, other in zip(*pair, strict=True)) for pair in (verdicts, verdicts[::-1])
            ]
            sure = (
                f"{_points(difference.value)} points (95 %: {_points(difference.low)} to {_points(difference.high)}; "
                f"McNemar's test: p = {mcnemar(*only):.1g})"
            )
            is_clear = difference.low > 0 or difference.high < 0
        if not is_clear:
            return Verdict(change, f"{sure}: no clear difference")
        return Verdict(change, sure, "better" if gain > 0 else "worse")

    def _by_reward(self) -> Verdict:
        """What the reward says where no accuracy was measured."""
        reward = self.run.series("reward")
        if not len(reward):
            return Verdict("Nothing was measured", "The log has no reward, and no evaluation is in the run's folder")
        sure = (
            "The reward that it was trained on, on its training prompts; accuracy on held-out problems was not measured: "
            f"`grpo-recipes evaluate {self.run.folder}` measures it"
        )
        first, last = (number(end) for end in (reward.start, reward.end))
        if len(reward) == 1:
            return Verdict(f"Training reward {last} at step {reward.steps[0]}", sure)
        return Verdict(f"Training reward {first} → {last} over {self.run.log.last_step:,} optimiser steps", sure)

    @property
    def checked(self) -> str:
        """How many checks had data, and how many found something, as a sentence without its full stop."""
        diagnosis = self.diagnosis
        if not diagnosis.checked:
            return diagnosis.coverage
        found = len({finding.check for finding in diagnosis.findings})
        what = "none found anything" if not found else f"{found} found something"
        return f"{diagnosis.checked} of {len(CHECKS)} checks had data, {what}"

    @property
    def checks(self) -> list[Check]:
        """Every check: what was found first, then what had no data, then what is fine."""
        diagnosis = self.diagnosis
        known = {check.__name__: looks_for(check) for check in CHECKS}
        found = [
            Check(finding.check, known.get(finding.check, ""), "found", finding.sentence)
            for finding in diagnosis.findings
        ]
        missing = [Check(name, known[name], "no data", reason) for name, reason in diagnosis.unchecked.items()]
        done = {check.name for check in (*found, *missing)}
        return [*found, *missing, *(Check(name, words, "fine") for name, words in known.items() if name not in done)]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """What ran: each with its name."""
        run, record = self.run, self.run.record
        spec = run.recipe.get("dataset") or {}
        data = _last_part(spec.get("name") or spec.get("path") or "") if isinstance(spec, Mapping) else ""
        prompts = f"{record['train_prompts']:,} prompts" if isinstance(record.get("train_prompts"), int) else ""
        steps = f"{run.log.last_step:,}"
        planned = run.config.get("max_steps")
        if run.is_running and isinstance(planned, int) and planned > run.log.last_step:
            steps = f"{steps} of {planned:,}"
        facts = {
            "Model": _last_part(run.recipe.get("model_name_or_path", "")),
            "Data": ", ".join(filter(None, [data, prompts])),
            "Optimiser steps": steps,
            "Time in steps": duration(seconds(run)),
            "Tokens": self._tokens(),
            "Hardware": str(record.get("hardware") or _processes(record)),
            "Recipe": _last_part(record.get("source", "")),
        }
        return [(name, value) for name, value in facts.items() if value]

    @property
    def made_with(self) -> str:
        """When the run was started, with which versions."""
        record = self.run.record
        versions = record.get("versions") or {}
        names = ("grpo-recipes", "trl", "transformers", "torch")
        parts = [f"{name} {versions[name]}" for name in names if name in versions]
        if "started" in record:
            parts.insert(0, f"Started {record['started']}".replace("T", " ").replace("Z", " UTC"))
        return "; ".join(parts)

    def _tokens(self) -> str:
        tokens = self.run.series("num_tokens")
        return f"{number(tokens.values[-1])} in prompts and completions" if len(tokens) else ""


def seconds(run: Run) -> float | None:
    """How long the optimiser steps took, from the mean time of a step at each logged one; None if it was not logged."""
    times = run.series("step_time")
    if not len(times):
        return None
    spans = [step - before for before, step in zip([0, *times.steps], times.steps, strict=False)]
    return math.fsum(span * time for span, time in zip(spans, times.values, strict=True) if span > 0)


def duration(length: float | None) -> str:
    """A time in its two largest units."""
    if length is None or not 0 <= length < 1e10:
        return ""
    if length < 60:
        return f"{length:.0f} s"
    minutes, rest = divmod(round(length), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def _processes(record: Mapping[str, Any]) -> str:
    size = record.get("world_size")
    return f"{size} process{'es' if size != 1 else ''}" if size is not None else ""


def _points(share: float) -> str:
    points = 100 * share
    return f"{points:+.0f}" if abs(points) >= 10 or abs(points - round(points)) < 0.05 else f"{points:+.1f}"


def _interval(share: Estimate) -> str:
    return f"95 %: {100 * share.low:.0f} to {percent(share.high)}"


def _last_part(path: Any) -> str:
    """A name on the hub as it is, a path's last part, or how many there are of several."""
    if isinstance(path, list):
        return f"{len(path)} sources mixed"
    text = str(path)
    return text if text.count("/") == 1 and not text.startswith(("/", ".", "~")) else Path(text).name
