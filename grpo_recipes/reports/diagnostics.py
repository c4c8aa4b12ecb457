"""What looks wrong in a run, from its own files: `diagnose(Run.read(folder))`.

Each check looks for one problem and reports it in a sentence with the figure and the step. A check whose metrics the run did
not log says so instead, so that "nothing looks wrong" counts only the checks that had data. The thresholds are rules of
thumb; each is written in its check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import pandas as pd

from grpo_recipes.evaluation.accuracy import judging_reward, single_specs
from grpo_recipes.reports.run import Run, RunReward, Series
from grpo_recipes.runs.files import AFTER, BEFORE
from grpo_rewards.registry import RewardSpecError
from grpo_rewards.terminal import Cell, Part, Table, visible


@dataclass(frozen=True)
class Finding:
    """One thing that looks wrong: the check that found it, the optimiser step it shows at, and a sentence."""

    check: str
    step: int
    sentence: str


# How many of the last logged completions are looked at for where they state their answers.
LATEST_TEXTS = 1000

# Where the checks find something; the report draws these into its pictures.
KL_LIMIT = 1.0  # nats a token
TRUNCATED_LIMIT = 0.25  # of the completions
FLAT_GROUPS_LIMIT = 0.5  # of the groups
LENGTH_LIMIT = 0.8  # of `max_completion_length`
ENTROPY_LIMIT = 0.1  # of the entropy at the start
UPDATES_LIMIT = 0.6  # of the weights that would change if no update were lost

Found = tuple[int, str]
"""What a check found: the step and the sentence."""


class NoData(Exception):
    """Why a check could not be made."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found, in the order of `CHECKS`, and, by name, why the other checks were not made."""

    findings: list[Finding]
    unchecked: dict[str, str]
    reading: str = ""
    """Clause on the logged steps whose completions were not read, if there are too many to read all."""

    @property
    def checked(self) -> int:
        """How many checks had data."""
        return len(CHECKS) - len(self.unchecked)

    @property
    def looks_fine(self) -> bool:
        """Whether there was something to check, and nothing was found."""
        return self.checked > 0 and not self.findings

    @property
    def coverage(self) -> str:
        """Which checks had data, as a clause."""
        if not self.checked:
            return "nothing could be checked: the run logged none of the metrics that the checks read"
        had = f"{self.checked} of {len(CHECKS)} checks had data"
        missing = ", ".join(f"{name} ({reason})" for name, reason in self.unchecked.items())
        return "; ".join(filter(None, [had, missing and f"not checked: {missing}", self.reading]))


def diagnose(run: Run) -> Diagnosis:
    """Make every check on a run."""
    diagnosis = Diagnosis([], {})
    for check in CHECKS:
        run.check_time()
        try:
            if found := check(run):
                diagnosis.findings.append(Finding(check.__name__, *found))
        except NoData as reason:
            diagnosis.unchecked[check.__name__] = str(reason)
    if golds := unscorable_golds(run):
        diagnosis.findings.append(golds)
    return replace(diagnosis, reading=_reading(run))


def as_table(diagnosis: Diagnosis) -> list[Part]:
    """Every check for the terminal: what was found first, then what had no data, then what is fine; and a line of summary."""
    rows: list[tuple[Cell, str, object]] = [
        (Cell("found", "bad"), finding.check, finding.sentence) for finding in diagnosis.findings
    ]
    rows += [(Cell("no data", "dim"), name, Cell(reason, "dim")) for name, reason in diagnosis.unchecked.items()]
    done = {finding.check for finding in diagnosis.findings} | set(diagnosis.unchecked)
    fine = [check for check in CHECKS if check.__name__ not in done]
    rows += [(Cell("fine", "good"), check.__name__, Cell(f"not found: {looks_for(check)}", "dim")) for check in fine]
    head = Cell("diagnosis: nothing looks wrong", "good") if diagnosis.looks_fine else Cell("diagnosis:", "head")
    return [head, Table(rows), f"  {diagnosis.coverage}"]


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """A diagnosis for `--json`."""
    return {
        "looks_fine": diagnosis.looks_fine,
        "checks": len(CHECKS),
        "checked": diagnosis.checked,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "unchecked": diagnosis.unchecked,
        "reading": diagnosis.reading,
    }


def looks_for(check: Callable[[Run], Found | None]) -> str:
    """What a check looks for, as a clause: the first line of its documentation."""
    return (check.__doc__ or "").partition("\n")[0].rstrip(".")


def describe(diagnosis: Diagnosis) -> str:
    """The findings, and which checks had data, as lines of text."""
    head = "diagnosis: nothing looks wrong" if diagnosis.looks_fine else "diagnosis:"
    findings = [f"  - {visible(finding.sentence)}" for finding in diagnosis.findings]
    return "\n".join([head, *findings, f"  {visible(diagnosis.coverage)}"])


def format_without_correctness(run: Run) -> Found | None:
    """Format pay rises while correctness does not: the policy may be learning a layout instead of the task.

    If no reward is known to pay for correctness, any that is not known to pay for format or length may.
    """
    parts = list(run.parts())
    formats = [(reward, means) for reward, means in parts if reward.kind == "format"]
    if not any(len(means) for _, means in parts):
        raise NoData("no reward was logged")
    if formats and not any(means.has_trend for _, means in formats):
        raise _too_few(formats[0][0].name)
    rising = [(reward, means) for reward, means in formats if means.trend > 0]
    others = [(reward, means) for reward, means in parts if reward.kind != "format"]
    unknown = [(reward, means) for reward, means in others if reward.kind != "length"]
    judges = [(reward, means) for reward, means in others if reward.kind == "correctness"] or unknown or others
    if not rising or any(means.trend > 0 for _, means in judges):
        return None
    if not any(reward.kind == "correctness" for reward, _ in judges) and _strict_rises(run):
        return None
    reward, means = rising[0]
    step = _last_step(means)
    sentence = f"`{reward.name}` rises from {means.start:.2f} to {means.end:.2f} by step {step}, while "
    if not judges:
        return step, sentence + "no reward pays a correct answer: the format can be earned without solving anything"
    measured = [(judge, flat) for judge, flat in judges if flat.has_trend]
    if not measured:
        raise _too_few(judges[0][0].name)
    judge, flat = measured[0]
    return step, sentence + f"`{judge.name}` goes from {flat.start:.2f} to {flat.end:.2f}"


def length_into_cap(run: Run) -> Found | None:
    """Completions grow by a quarter or more, to beyond 80 % of `max_completion_length`."""
    lengths, cap = _trending(run, "completions/mean_length"), run.config.get("max_completion_length")
    if not run.config:
        raise NoData("no `run.json` says `max_completion_length`")
    if cap is None or lengths.trend <= 0 or lengths.end < 1.25 * lengths.start or lengths.end < LENGTH_LIMIT * cap:
        return None
    step = _first_step(lengths, lambda value: value >= LENGTH_LIMIT * cap)
    return step, (
        f"completions grow from {lengths.start:.0f} to {lengths.end:.0f} tokens, into the cap of {cap} "
        f"(`max_completion_length`) from step {step}"
    )


def truncated(run: Run) -> Found | None:
    """More than a quarter of the completions, at the end of the run, are cut off at the cap."""
    share = _logged(run, "completions/clipped_ratio")
    if share.end <= TRUNCATED_LIMIT:
        return None
    step = _last_step(share)
    return step, (
        f"{share.end:.0%} of the completions are cut off at `max_completion_length` by step {step}: an answer further on "
        "is lost; raise it, or set `mask_truncated_completions: true`"
    )


def identical_completions(run: Run) -> Found | None:
    """Of the groups that could still earn more, more than half hold one text `num_generations` times."""
    groups = _groups(run)
    judged = groups[groups["reward"].notna() & (groups["size"] > 1)] if len(groups) else groups
    if len(judged) < 4:
        raise NoData("fewer than four groups of completions were logged")
    open_groups = judged[judged["reward"] < run.rows["total"].max() - 1e-6]
    if len(open_groups) < 4 or open_groups["identical"].mean() <= 0.5:
        return None
    step = int(open_groups.loc[open_groups["identical"], "step"].min())
    return step, (
        f"{open_groups['identical'].mean():.0%} of the groups that don't earn the best reward repeat one completion "
        f"throughout, from step {step}: there is nothing to compare; raise `temperature`"
    )


def entropy_collapse(run: Run) -> Found | None:
    """The policy's entropy falls below a tenth of what it was."""
    entropy = _trending(run, "entropy")
    if entropy.trend >= 0 or entropy.end >= ENTROPY_LIMIT * entropy.start:
        return None
    step = _first_step(entropy, lambda value: value < ENTROPY_LIMIT * entropy.start)
    return step, (
        f"entropy falls from {entropy.start:.3f} to {entropy.end:.3f} nats a token, below a tenth from step {step}: the policy "
        "has stopped exploring"
    )


def zero_variance(run: Run) -> Found | None:
    """Over the run, more than half of the groups have one reward for all completions, and so no gradient."""
    share = _logged(run, "frac_reward_zero_std")
    if share.mean <= FLAT_GROUPS_LIMIT:
        return None
    step = _first_step(share, lambda value: value > FLAT_GROUPS_LIMIT)
    advice = "" if run.recipe.get("sampling") else "; `sampling: informative` generates fewer such prompts"
    return step, (
        f"{share.mean:.0%} of the groups have no variance in their rewards, more than half first at step {step}"
        f"{_easy_or_hard(run)}{advice}"
    )


def kl_blow_up(run: Run) -> Found | None:
    """The KL to the reference exceeds 1 nat a token."""
    kl = _logged(run, "kl", ", as `beta` is 0" if run.config.get("beta") == 0 else "")
    if max(kl.values) <= KL_LIMIT:
        return None
    step = _first_step(kl, lambda value: value > KL_LIMIT)
    return step, (
        f"KL to the reference reaches {max(kl.values):.1f} nats a token, above 1 from step {step}: lower `learning_rate` "
        "or raise `beta`"
    )


def dominant_reward(run: Run) -> Found | None:
    """A format or shaping reward carries more than 95 % of the variance of the weighted rewards."""
    if not run.knows_weights:
        raise NoData("no `run.json` says the rewards' weights")
    if not run.rewards:
        raise NoData("`run.json` names no reward")
    variances = {reward: _weighted_variance(run, reward) for reward in run.rewards}
    total = sum(variances.values())
    if len(variances) < 2 or not total > 0:
        return None
    reward, variance = max(variances.items(), key=lambda item: item[1])
    if reward.kind not in ("format", "length") or variance <= 0.95 * total:
        return None
    step = _last_step(run.series(f"rewards/{reward.name}/std"))
    return step, (
        f"`{reward.name}` carries {variance / total:.0%} of the rewards' variance up to step {step}: the others hardly steer; "
        "lower its `weight`"
    )


def overfitting(run: Run) -> Found | None:
    """The training reward rises while the held-out reward, or the strict accuracy before and after, falls."""
    trained, held_out, strict = _trending(run, "reward"), run.series("eval_reward"), _strict_shares(run)
    if not held_out.has_trend and len(strict) < 2:
        raise NoData("neither four evaluations during training nor one before and one after")
    if trained.trend <= 0:
        return None
    sentence = f"the training reward rises from {trained.start:.2f} to {trained.end:.2f}, while "
    if held_out.trend < 0:
        best = held_out.steps[held_out.values.index(max(held_out.values))]
        return _last_step(held_out), (
            f"{sentence}the held-out reward falls from {held_out.start:.2f} to {held_out.end:.2f} by step "
            f"{_last_step(held_out)}; it was best at step {best}"
        )
    if len(strict) == 2 and strict[1]["high"] < strict[0]["low"]:
        return _last_step(trained), (
            f"{sentence}strict accuracy on held-out problems falls from {strict[0]['value']:.3f} to {strict[1]['value']:.3f} by "
            f"step {_last_step(trained)}"
        )
    return None


def unscorable_golds(run: Run) -> Finding | None:
    """Golds that no correctness reward can score, as counted when the run began. Not among `CHECKS`, as no metric shows them."""
    golds = run.record.get("unscorable_golds")
    if not golds:
        return None
    rows = ", ".join(map(str, golds["rows"])) + (", …" if golds["count"] > len(golds["rows"]) else "")
    return Finding(
        "unscorable_golds",
        0,
        f"{golds['count']} of {golds['total']} golds can't be scored by a correctness reward (rows {rows} of the dataset, "
        "counted from 1): correct or remove them",
    )


def no_answer_found(run: Run) -> Found | None:
    """No completion of the whole run states an answer where a correctness reward looks, so that it can't pay."""
    keys = [key for key in run.logged("rewards/") if key.endswith("/parsed")]
    logged = {key.removeprefix("rewards/").removesuffix("/parsed"): run.series(key) for key in keys}
    found = {name: shares for name, shares in logged.items() if len(shares)}
    if not found:
        raise NoData("no reward logs how many answers it finds (`rewards/*/parsed`)")
    for name, shares in found.items():
        if max(shares.values) == 0:
            return _last_step(shares), (
                f"`{name}` has paid nothing up to step {_last_step(shares)}: "
                f"{_where_answers_are(run, name)}: ask for one in the prompt, or set another `extract`"
            )
    return None


def lost_updates(run: Run) -> Found | None:
    """After 20 steps, fewer than 60 % of the weights change in a step that would if no update were lost to rounding.

    Simulated on weights of N(0, 0.02) at rates from 1e-6 to 2e-5, plain AdamW on bfloat16 comes to 20 to 50 %, weights that
    keep what is rounded off to 80 % and more; in the first steps they too have kept little.
    """
    changed, expected = (_after(_logged(run, key), 20) for key in ("updates/changed", "updates/expected"))
    if not len(changed) or not len(expected):
        raise NoData("the run has no more than 20 steps")
    if changed.mean >= UPDATES_LIMIT * expected.mean:
        return None
    step = _last_step(changed)
    return step, (
        f"a step changes {changed.mean:.1%} of the trained weights up to step {step}, where {expected.mean:.1%} would change "
        f"if no update were lost to rounding: set `dtype: float32` or `optim: adamw_bf16` (docs/precision.md)"
    )


CHECKS: tuple[Callable[[Run], Found | None], ...] = (
    format_without_correctness,
    length_into_cap,
    truncated,
    identical_completions,
    entropy_collapse,
    zero_variance,
    kl_blow_up,
    dominant_reward,
    overfitting,
    no_answer_found,
    lost_updates,
)


def _reading(run: Run) -> str:
    sampled = run.completion_files
    if sampled.read == sampled.count:
        return ""
    return f"of the completions, {sampled.read:,} of {sampled.count:,} steps were read, evenly spread"


def _logged(run: Run, key: str, why_not: str = "") -> Series:
    series = run.series(key)
    if not len(series):
        raise NoData(f"`{key}` was not logged{why_not}")
    return series


def _trending(run: Run, key: str) -> Series:
    series = run.series(key)
    if not series.has_trend:
        raise _too_few(key)
    return series


def _after(series: Series, step: int) -> Series:
    kept = [place for place, logged in enumerate(series.steps) if logged > step]
    return Series([series.steps[place] for place in kept], [series.values[place] for place in kept])


def _too_few(metric: str) -> NoData:
    raise NoData(f"`{metric}` was logged fewer than four times")


def _where_answers_are(run: Run, name: str) -> str:
    """Return a clause that says where a reward looks for an answer, and where the logged completions state one."""
    for spec in single_specs(run.recipe.get("rewards") or []):
        if name not in (spec.get("alias"), str(spec.get("name")).rpartition(".")[2]):
            continue
        with suppress(RewardSpecError):
            if (reward := judging_reward(spec)) is not None:
                texts = run.texts(run.rows.tail(LATEST_TEXTS))
                note = reward.unparsed_note(texts["completion"].tolist() if len(texts) else [])
                return note or f"no completion states an answer {reward.looks_at}"
    return "no completion states an answer where it looks"


def _strict_shares(run: Run) -> list[Mapping[str, float]]:
    """The strict accuracy before and after, as far as there are both."""
    evaluations = [run.evaluations[label] for label in (BEFORE, AFTER) if label in run.evaluations]
    return [evaluation["strict"] for evaluation in evaluations if "strict" in evaluation]


def _strict_rises(run: Run) -> bool:
    strict = _strict_shares(run)
    return len(strict) == 2 and strict[1]["low"] > strict[0]["high"]


def _groups(run: Run) -> pd.DataFrame:
    """One row for each logged group: its step, mean reward, whether its completions are one text, and its reward's spread."""
    grouped = run.rows.groupby(["step", "prompt"], sort=False)
    table = grouped.agg(
        reward=("total", "mean"),
        highest=("total", "max"),
        lowest=("total", "min"),
        texts=("completion", "nunique"),
        size=("completion", "size"),
    ).reset_index()
    table["spread"] = table["highest"] - table["lowest"]
    table["identical"] = (table["texts"] == 1) & (table["size"] > 1)
    return table


def _easy_or_hard(run: Run) -> str:
    """How the groups without variance divide, by their reward against the middle of what the run ever paid."""
    groups, totals = _groups(run), run.rows["total"]
    flat = groups[groups["spread"] < 1e-9] if len(groups) else groups
    if not len(flat) or totals.max() - totals.min() < 1e-9:
        return ""
    easy = (flat["reward"] > (totals.max() + totals.min()) / 2).mean()
    return f": of those logged, {easy:.0%} are too easy (all earn much) and {1 - easy:.0%} too hard (all earn little)"


def _weighted_variance(run: Run, reward: RunReward) -> float:
    spread = _logged(run, f"rewards/{reward.name}/std")
    return reward.weight * reward.weight * sum(value * value for value in spread.values) / len(spread)


def _first_step(series: Series, is_reached: Callable[[float], bool]) -> int:
    return next(step for step, value in zip(series.steps, series.values, strict=True) if is_reached(value))


def _last_step(series: Series) -> int:
    return series.steps[-1] if len(series) else 0
