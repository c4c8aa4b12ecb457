"""Checks for what looks wrong in a run, made from its own files: `diagnose(Run.read(folder))`.

Each check looks for one problem. It reports the problem in a sentence with the figure, the step, what the problem costs
and what to change, or the figure that is fine. A check whose metrics the run did not log raises `NoData`, and a check
that means nothing for the run raises `DoesNotApply`, so that "nothing looks wrong" counts only the checks that had
data, at least half of those that apply. The thresholds are rules of thumb. The report draws the constant thresholds
into its charts.

Rewards are means of few completions, so each check of a trend asks whether the change exceeds the noise of the points
(`Series.margin`). A check for a reward that does *not* rise asks in addition whether the noise could hide a rise.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from grpo_recipes.data.places import NAMED_ROWS
from grpo_recipes.reports import progress_checks, reward_checks, tool_checks, update_checks
from grpo_recipes.reports.checking import Check, DoesNotApply, Finding, NoData
from grpo_recipes.reports.run import Run
from grpo_rewards.terminal import Cell, Part, Table, visible

PROBLEM, FINE, NOT_CHECKED, NOT_APPLICABLE = "problem", "fine", "not checked", "does not apply"
"""Results of a check, in the order in which they are listed."""


@dataclass(frozen=True)
class Diagnosis:
    """Result of all checks of a run."""

    findings: list[Finding]
    """Problems, in the order of `CHECKS`."""
    fine: dict[str, str]
    """Names of the checks that found no problem, with the figures."""
    unchecked: dict[str, str]
    """Names of the checks that could not be made, with the reasons."""
    not_applicable: dict[str, str]
    """Names of the checks that do not apply to the run, with the reasons. They are not counted."""
    reading: str = ""
    """Clause on logged completions that were not read because there are too many."""

    @property
    def applicable(self) -> int:
        """Number of checks that apply to the run."""
        return len(CHECKS) - len(self.not_applicable)

    @property
    def checked(self) -> int:
        """Number of checks that had data."""
        return self.applicable - len(self.unchecked)

    @property
    def looks_fine(self) -> bool:
        """True if at least half of the checks that apply had data and none found a problem."""
        return not self.findings and 0 < self.applicable <= 2 * self.checked

    @property
    def verdict(self) -> str:
        """Result in a few words, or "" if no check had data."""
        if self.findings:
            return f"{len(self.findings)} problem{'s' * (len(self.findings) > 1)}"
        if not self.checked:
            return ""
        return "nothing looks wrong" if self.looks_fine else "too short to judge"

    @property
    def coverage(self) -> str:
        """Clause on the checks that had data."""
        if not self.checked:
            return "nothing could be checked: the run has too few steps, or logged no metric that the checks read"
        return "; ".join(filter(None, [f"{self.checked} of {self.applicable} checks had data", self.reading]))

    @property
    def headline(self) -> str:
        """Line with the verdict and the number of checks that it rests on."""
        return f"diagnosis: {', '.join(filter(None, [self.verdict, self.coverage]))}"

    def rows(self) -> list[tuple[str, str, str]]:
        """Return result, name and text of every check: problems first, and checks that do not apply last."""
        rows = [(PROBLEM, finding.check, finding.sentence) for finding in self.findings]
        results = ((FINE, self.fine), (NOT_CHECKED, self.unchecked), (NOT_APPLICABLE, self.not_applicable))
        for result, texts in results:
            rows += [(result, name, text) for name, text in texts.items()]
        return rows


def diagnose(run: Run) -> Diagnosis:
    """Make every check on a run."""
    sampled, reading = run.completion_files, ""
    if len(sampled.kept) < sampled.count:
        reading = f"of the completions, {len(sampled.kept):,} of {sampled.count:,} steps were read, evenly spread"
    diagnosis = Diagnosis([], {}, {}, {}, reading)
    for check in CHECKS:
        run.check_time()
        name = check.__name__
        try:
            result = check(run)
        except NoData as reason:
            diagnosis.unchecked[name] = str(reason)
        except DoesNotApply as reason:
            diagnosis.not_applicable[name] = str(reason)
        else:
            if isinstance(result, str):
                diagnosis.fine[name] = result
            else:
                diagnosis.findings.append(replace(result, check=name))
    diagnosis.findings.extend(filter(None, (unscorable_golds(run), unscored(run), stopped(run))))
    return diagnosis


def as_table(diagnosis: Diagnosis) -> list[Part]:
    """Return every check for the terminal as a table below the headline."""
    styles = {PROBLEM: "bad", FINE: "good"}
    rows = []
    for result, name, text in diagnosis.rows():
        rows.append((Cell(result, styles.get(result, "dim")), name, Cell(text, "" if result == PROBLEM else "dim")))
    return [Cell(diagnosis.headline, "good" if diagnosis.looks_fine else "head"), Table(rows)]


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return a diagnosis for `--json`.

    Each of `findings` has `check`, `step`, `threshold`, `figures` (numbers and names, by name) and `sentence`.
    """
    counts = {"checks": len(CHECKS), "checked": diagnosis.checked}
    return {"looks_fine": diagnosis.looks_fine, "verdict": diagnosis.verdict, **counts, **asdict(diagnosis)}


def describe(diagnosis: Diagnosis) -> str:
    """Return the headline and the findings as lines of text."""
    head = diagnosis.headline
    if diagnosis.checked and diagnosis.unchecked:
        # A short run has data for few checks, and a reason for each of the others would be a paragraph.
        head += f"; `grpo-recipes diagnose` says why {len(diagnosis.unchecked)} had none"
    return "\n".join([visible(head), *(f"  - {visible(finding.sentence)}" for finding in diagnosis.findings)])


CHECKS: tuple[Check, ...] = (
    reward_checks.format_without_correctness,
    progress_checks.length_into_cap,
    progress_checks.length_without_gain,
    progress_checks.truncated,
    reward_checks.identical_completions,
    progress_checks.entropy_collapse,
    reward_checks.zero_variance,
    update_checks.kl_blow_up,
    reward_checks.dominant_reward,
    progress_checks.overfitting,
    progress_checks.plateau,
    reward_checks.no_answer_found,
    update_checks.lost_updates,
    update_checks.clipped_tokens,
    update_checks.stale_tokens,
    update_checks.gradient_spikes,
    *tool_checks.CHECKS,
)


def unscorable_golds(run: Run) -> Finding | None:
    """Return a finding for golds that no correctness reward can score, counted when the run began.

    It is not among `CHECKS`, because no metric shows it.
    """
    golds = run.record.get("unscorable_golds")
    if not golds:
        return None
    rows = "; ".join([*map(str, golds["rows"]), *["…"] * (golds["count"] > NAMED_ROWS)])
    return Finding(
        0, None, {"count": golds["count"], "total": golds["total"], "rows": rows}, "", "unscorable_golds"
    ).saying("{count} of {total} golds can't be scored by a correctness reward ({rows}): correct or remove them")


def unscored(run: Run) -> Finding | None:
    """Return a finding for rewards that returned None for every completion. TRL logs NaN as the mean of such a reward.

    It is not among `CHECKS`, because it would be fine in nearly every run.
    """
    keys = {reward.name: f"rewards/{reward.name}/mean" for reward in run.rewards}
    names = [f"`{name}`" for name, key in keys.items() if key in run.log.metrics and not len(run.series(key))]
    if not names:
        return None
    return Finding(run.log.last_step, None, {"rewards": " and ".join(names)}, "", "unscored").saying(
        "{rewards} returned None for every completion, so nothing was learned from it: correct the reward, or the "
        "columns that it reads"
    )


def stopped(run: Run) -> Finding | None:
    """Return a finding with the cause for which the run stopped before its last step, if it was recorded."""
    if run.fault is None:
        return None
    cause = run.fault["sentence"].rstrip(".")
    return Finding(run.log.last_step, None, {"cause": cause}, f"the run stopped: {cause}", "stopped")
