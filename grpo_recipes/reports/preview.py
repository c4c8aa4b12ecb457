"""Samples of the untrained policy: completions, their rewards, the cost of a step, and what follows from them.

`grpo_recipes.preview` draws the sample. The suggestions are rules of thumb, with the thresholds of `diagnostics`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from grpo_recipes.checks.geometry import Geometry
from grpo_recipes.checks.rewards import prefilled_notes
from grpo_recipes.evaluation.estimates import Estimate, mean_share
from grpo_recipes.reports.diagnostics import FLAT_GROUPS_LIMIT, TRUNCATED_LIMIT
from grpo_recipes.reports.transcript import Part as Turn
from grpo_recipes.reports.transcript import limited
from grpo_rewards.explain import json_values, score_line
from grpo_rewards.registry import BuiltReward
from grpo_rewards.reward import is_passing, reaches
from grpo_rewards.terminal import Cell, Labelled, Part, Table

SHOWN_PROMPTS = 4
"""Number of prompts that are printed. `--json` has all of them."""
SHOWN_LINES = 30
"""Number of lines of a prompt or a completion that are printed. The middle of a longer text is left out."""
SHOWN_TURNS = 6
"""Number of turns, calls and results of a completion that are printed, of its beginning and of its end."""
SHOWN_CHARS = 2_000
"""Number of characters of a prompt or a completion that are printed."""
EASY = 0.5
"""Share of the range of the total above which a zero-variance group counts as too easy, and below as too hard."""

_FLAT = 1e-9
_INDENT = "  | "


@dataclass(frozen=True)
class Completion:
    """Completion with its scores.

    Attributes:
        text: Text as the rewards of this project read it: of a completion with tools, the last message.
        tokens: Length in tokens.
        is_cut: True if `max_completion_length` has cut it.
        scores: Scores by the name of the reward, before the weight. None is no score.
        logged: Values that each reward logged about the completion, by the name of the reward.
        total: Weighted sum of the scores, or None if no reward scores the completion.
        turns: Turns, calls and results of a completion with tools, or none.
    """

    text: str
    tokens: int
    is_cut: bool
    scores: Mapping[str, float | None]
    logged: Mapping[str, Mapping[str, Any]]
    total: float | None
    turns: tuple[Turn, ...] = ()

    @property
    def content(self) -> tuple[str, tuple[Turn, ...]]:
        """All that the policy and the tools have written."""
        return self.text, self.turns

    def as_dict(self) -> dict[str, Any]:
        """Return the completion for `--json`."""
        said = {name: json_values(values) for name, values in self.logged.items()}
        shared = {"text": self.text, "tokens": self.tokens, "cut": self.is_cut}
        turns = {"turns": [asdict(turn) for turn in self.turns]} if self.turns else {}
        return {**shared, **turns, "total": self.total, "pay": dict(self.scores), "said": said}


@dataclass(frozen=True)
class Group:
    """Prompt as the model sees it, its length in tokens, and its completions."""

    prompt: str
    tokens: int
    completions: Sequence[Completion]

    def totals(self) -> list[float]:
        """Return the totals of the completions that have one."""
        return [one.total for one in self.completions if one.total is not None]

    def scores(self, name: str) -> list[float]:
        """Return the scores that a reward gives."""
        scores = [one.scores[name] for one in self.completions]
        return [score for score in scores if score is not None]

    def extremes(self) -> list[Completion]:
        """Return the completions with the highest, the middle and the lowest total, of different content."""
        distinct = {one.content: one for one in self.completions}.values()
        ranked = sorted(distinct, key=lambda one: -math.inf if one.total is None else one.total, reverse=True)
        places = sorted({0, len(ranked) // 2, len(ranked) - 1})
        return [ranked[place] for place in places]


@dataclass(frozen=True)
class RewardSummary:
    """Scores of one reward over all completions.

    Attributes:
        reward: Reward.
        mean: Mean score, or None if the reward scores nothing.
        full: Share of the completions that earn the full score, or None if it is not known.
        unscored: Number of completions without a score.
        varies: Number of groups in which the score varies.
    """

    reward: BuiltReward
    mean: float | None
    full: float | None
    unscored: int
    varies: int

    def as_dict(self) -> dict[str, Any]:
        """Return the summary for `--json`."""
        values = {key: value for key, value in vars(self).items() if key != "reward"}
        return {"weight": self.reward.weight, "kind": self.reward.kind, **values}


@dataclass(frozen=True)
class Cost:
    """Time of the sample, in seconds, and what it says about an optimizer step.

    Attributes:
        geometry: Batch geometry of the training on this machine.
        device: Name of the device that generated.
        steps: Optimizer steps of the run.
        completions: Completions that were generated together and timed.
        tokens: Tokens of these completions.
        generation: Time of their generation.
        scoring: Time of all rewards for these completions.
        training: Time of their log-probabilities, loss and gradient, or None if the memory was not enough for them.
    """

    geometry: Geometry
    device: str
    steps: int
    completions: int
    tokens: int
    generation: float
    scoring: float
    training: float | None

    def step(self) -> dict[str, float]:
        """Return the expected seconds of the parts of an optimizer step, on each process."""
        geometry = self.geometry
        trained = geometry.completions_per_optimizer_step / geometry.num_processes / self.completions
        generated = trained / geometry.num_iterations  # a generation batch serves this many times
        parts = {"generation": self.generation * generated, "scoring": self.scoring * generated}
        return parts if self.training is None else {**parts, "training": self.training * trained}

    def tokens_per_step(self, mean_length: float) -> int:
        """Return the expected number of completion tokens of an optimizer step, on all processes."""
        return round(self.geometry.completions_per_optimizer_step * mean_length)

    def as_dict(self, mean_length: float) -> dict[str, Any]:
        """Return the entry for `--json`."""
        values = {key: value for key, value in vars(self).items() if key != "geometry"}
        return {
            **values,
            "tokens_per_second": self.tokens / self.generation,
            "tokens_per_step": self.tokens_per_step(mean_length),
            "step": self.step(),
        }


@dataclass(frozen=True)
class Preview:
    """Sample of the untrained policy of a recipe.

    Attributes:
        source: File of the recipe.
        model: Name of the policy.
        generator: Name of what generated the completions.
        max_completion_length: Tokens after which a completion is cut.
        temperature: Temperature of the sampling.
        by_reward: True if each reward is normalized before the weighted sum, so that each needs a variance of its own.
        rewards: Rewards with their weights.
        groups: Prompts with their completions.
        cost: Time of the sample.
    """

    source: str
    model: str
    generator: str
    max_completion_length: int
    temperature: float
    by_reward: bool
    rewards: Sequence[BuiltReward]
    groups: Sequence[Group]
    cost: Cost

    @property
    def completions(self) -> list[Completion]:
        """Completions of all groups."""
        return [one for group in self.groups for one in group.completions]

    @property
    def mean_length(self) -> float:
        """Mean length of a completion in tokens."""
        return fmean(one.tokens for one in self.completions)

    def is_flat(self, group: Group) -> bool:
        """Return True if a group has zero variance, so that its advantages are 0."""
        if not self.by_reward:
            return not _varies(group.totals())
        return not any(_varies(group.scores(reward.name)) for reward in self.rewards if reward.weight)

    def flat_groups(self) -> list[Group]:
        """Return the zero-variance groups."""
        return [group for group in self.groups if self.is_flat(group)]

    def _flat_share(self) -> Estimate:
        """Return the share of zero-variance groups. Groups of the same prompt count as one group."""
        flat = [float(self.is_flat(group)) for group in self.groups]
        return mean_share(flat, clusters=[group.prompt for group in self.groups])

    def summaries(self) -> list[RewardSummary]:
        """Return the summary of each reward."""
        return [_summary(reward, self.groups) for reward in self.rewards]

    def describe(self) -> list[Part]:
        """Return the preview for the terminal."""
        parts: list[Part] = [Cell(f"{self.source}: {self.model} before training", "head")]
        for number, group in enumerate(self.groups[:SHOWN_PROMPTS], 1):
            parts += ["", *_group(number, group)]
        if len(self.groups) > SHOWN_PROMPTS:
            parts += ["", f"  {SHOWN_PROMPTS} of {len(self.groups)} prompts are shown; `--json` has all of them"]
        parts += ["", _rewards_table(self.summaries(), len(self.completions), len(self.groups)), ""]
        return [*parts, *self._lines(), *(Labelled("what follows", sentence) for sentence in self.findings())]

    def _lines(self) -> list[Part]:
        flat, cut = self.flat_groups(), [one for one in self.completions if one.is_cut]
        lengths = sorted(one.tokens for one in self.completions)
        share = self._flat_share()
        geometry, cost, step = self.cost.geometry, self.cost, self.cost.step()
        parts = ", ".join(f"{_seconds(seconds)} {name}" for name, seconds in step.items())
        return [
            Labelled(
                "zero variance",
                f"{len(flat)} of {len(self.groups)} groups (95 % interval {share.low:.0%} to {share.high:.0%}): their "
                "advantages are 0",
            ),
            Labelled(
                "completions",
                f"{lengths[0]} to {lengths[-1]} tokens, mean {self.mean_length:.0f}; {len(cut)} of {len(lengths)} are "
                f"cut at `max_completion_length` {self.max_completion_length}",
            ),
            Labelled(
                "generation",
                f"{cost.tokens / cost.generation:,.0f} tokens/s on {cost.device} by {self.generator}, "
                f"{cost.completions} completions at once",
            ),
            Labelled(
                "optimizer step",
                f"{_seconds(sum(step.values()))} for {geometry.completions_per_optimizer_step} completions, about "
                f"{cost.tokens_per_step(self.mean_length):,} tokens: {parts}{self._caveat()}",
            ),
            Labelled(
                "run",
                f"{cost.steps:,} optimizer steps: {_seconds(cost.steps * sum(step.values()))}, if the lengths stay",
            ),
        ]

    def _caveat(self) -> str:
        together = self.cost.geometry.completions_per_rank
        text = ". The update and messages between processes are not included"
        if together > self.cost.completions:
            text += f". Training generates {together} completions at once, which takes less time for each on a GPU"
        return text

    def findings(self) -> list[str]:
        """Return what follows from the sample, each sentence with the key of the recipe to change."""
        found = [sentence for check in CHECKS for sentence in check(self)]
        if found:
            return found
        groups = len(self.groups) - len(self.flat_groups())
        return [f"nothing stands in the way: {groups} of {len(self.groups)} groups have a gradient"]

    def as_dict(self) -> dict[str, Any]:
        """Return the preview for `--json`."""
        groups = []
        for group in self.groups:
            completions = [one.as_dict() for one in group.completions]
            shared = {"prompt": group.prompt, "tokens": group.tokens, "zero_variance": self.is_flat(group)}
            groups.append({**shared, "completions": completions})
        share = self._flat_share()
        return {
            "recipe": self.source,
            "model": self.model,
            "generator": self.generator,
            "groups": groups,
            "rewards": {summary.reward.name: summary.as_dict() for summary in self.summaries()},
            "zero_variance": {"groups": len(self.flat_groups()), "of": len(self.groups), **share.as_dict()},
            "cut": sum(one.is_cut for one in self.completions),
            "mean_length": self.mean_length,
            "cost": self.cost.as_dict(self.mean_length),
            "findings": self.findings(),
        }


def _varies(values: Sequence[float]) -> bool:
    return len(values) > 1 and max(values) - min(values) > _FLAT


def _summary(reward: BuiltReward, groups: Sequence[Group]) -> RewardSummary:
    scores = [one.scores[reward.name] for group in groups for one in group.completions]
    scored = [score for score in scores if score is not None]
    mean = fmean(scored) if scored else None
    highest = reward.highest_pay
    full = None if highest is None else sum(reaches(score, highest) for score in scored) / len(scores)
    varies = sum(_varies(group.scores(reward.name)) for group in groups)
    return RewardSummary(reward, mean, full, len(scores) - len(scored), varies)


# The terminal


def _group(number: int, group: Group) -> Iterator[Part]:
    """Yield a prompt and some of its completions with the reasons for their scores."""
    yield Cell(f"prompt {number}: {group.tokens} tokens, exactly as the model sees it", "head")
    yield from _lines_of(group.prompt)
    for one in group.extremes():
        total = "no reward scores it" if one.total is None else f"reward {one.total:g}"
        cut = ", cut" if one.is_cut else ""
        yield Cell(f"  completion of {one.tokens} tokens{cut}: {total}", "head")
        if one.turns:
            for turn in limited(one.turns, SHOWN_TURNS, SHOWN_TURNS):
                yield Cell(f"    {turn.label}", "dim")
                yield from _lines_of(turn.text)
        else:
            yield from _lines_of(one.text)
        for name, score in one.scores.items():
            yield Cell(f"    {score_line(name, score, one.logged[name])}", "dim")


def _lines_of(text: str) -> Iterator[str]:
    """Yield the lines of a text, without the middle of a long one: a completion ends in its answer."""
    if len(text) > SHOWN_CHARS:
        text = f"{text[: SHOWN_CHARS // 2]} … {text[-SHOWN_CHARS // 2 :]}"
    lines = text.split("\n")
    if len(lines) > SHOWN_LINES:
        lines = [*lines[: SHOWN_LINES // 2], "…", *lines[-SHOWN_LINES // 2 :]]
    for line in lines:
        yield f"{_INDENT}{line}"


def _rewards_table(summaries: Sequence[RewardSummary], completions: int, groups: int) -> Table:
    rows = []
    for summary in summaries:
        mean = "-" if summary.mean is None else f"{summary.mean:.3f}"
        full = "-" if summary.full is None else f"{summary.full:.0%}"
        unscored, varies = f"{summary.unscored} of {completions}", f"{summary.varies} of {groups} groups"
        rows.append((summary.reward.name, f"{summary.reward.weight:g}", mean, full, unscored, varies))
    return Table(rows, ("reward", "weight", "mean", "full score", "no score", "varies in"), frozenset({1, 2, 3, 4, 5}))


def _seconds(seconds: float) -> str:
    """Return a time in the unit in which it has two digits."""
    if seconds < 0.095:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# Suggestions


def too_hard_or_easy(preview: Preview) -> Iterator[str]:
    """Suggest other rows if more than half of the groups have no variance."""
    flat, count = preview.flat_groups(), len(preview.groups)
    if len(flat) <= FLAT_GROUPS_LIMIT * count:
        return
    totals = [total for group in preview.groups for total in group.totals()] or [0.0]
    judged = _earn_much(preview, flat)
    if judged:
        easy = sum(judged)
        if easy > len(judged) / 2:
            yield (
                f"too easy: in {easy} of {count} groups all completions earn much, so nothing is learned from them: "
                "keep harder rows (`dataset.pass_rate`), or raise `temperature`"
            )
        else:
            yield (
                f"too hard: in {len(judged) - easy} of {count} groups all completions earn little, so nothing is "
                "learned from them: keep easier rows (`dataset.pass_rate`), raise `num_generations`, or begin with a "
                "policy that solves some (`model_name_or_path`)"
            )
    elif max(totals) - min(totals) <= _FLAT:
        yield (
            f"{len(flat)} of {count} groups have zero variance, and all completions earn the same: check `rewards` "
            f"against the completions above{_undeclared(preview)}"
        )
    else:
        yield (
            f"{len(flat)} of {count} groups have zero variance, so nothing is learned from them: raise "
            f"`num_generations` or `temperature`, or train on other rows{_undeclared(preview)}"
        )


def _earn_much(preview: Preview, flat: Sequence[Group]) -> list[bool]:
    """Return True for each zero-variance group whose completions earn much, and False for the others.

    The completions of a group earn much if all of them pass, or, without a reward that says what passes, if they earn
    more than half of what the rewards can pay. Groups without a score are left out. If neither is known, the list is
    empty.
    """
    judges = [reward for reward in preview.rewards if reward.weight > 0 and reward.passes_at is not None]
    if judges:
        much = []
        for group in flat:
            scores = [(judge, score) for judge in judges for score in group.scores(judge.name)]
            if scores:
                much.append(all(is_passing(score, judge.passes_at) for judge, score in scores))
        return much
    highest = 0.0
    for reward in preview.rewards:
        if reward.weight and (reward.highest_pay is None or reward.weight < 0):
            return []
        highest += reward.weight * (reward.highest_pay or 0.0)
    totals = [total for group in preview.groups for total in group.totals()] or [0.0]
    low, high = min(0.0, *totals), max(highest, *totals)
    if high - low <= _FLAT:
        return []
    return [fmean(group.totals()) > low + EASY * (high - low) for group in flat if group.totals()]


def _undeclared(preview: Preview) -> str:
    """Return a clause that names the rewards whose highest pay is not known, or ""."""
    names = [f"`{reward.name}`" for reward in preview.rewards if reward.weight and reward.highest_pay is None]
    if not names:
        return ""
    return f". Set `highest_pay` in the spec of {' and '.join(names)}, to learn which rows to keep"


def paid_above(preview: Preview) -> Iterator[str]:
    """Name the rewards that pay more than their declared highest pay."""
    for reward in preview.rewards:
        most = max((score for group in preview.groups for score in group.scores(reward.name)), default=None)
        if most is not None and reward.highest_pay is not None and not reaches(reward.highest_pay, most):
            yield f"`{reward.name}` pays {most:g}, more than its `highest_pay` {reward.highest_pay:g}: correct its spec"


def another_tag_opened(preview: Preview) -> Iterator[str]:
    """Name the rewards whose `prefilled` is not the reasoning tag that the prompt opens."""
    yield from prefilled_notes(preview.rewards, preview.groups[0].prompt)


def format_never_met(preview: Preview) -> Iterator[str]:
    """Suggest another prompt if no completion earns the full score of a format reward."""
    rewards = {summary.reward.name for summary in preview.summaries()}
    for summary in preview.summaries():
        if summary.mean is None:  # the reward scored no completion, which `unscorable` reports
            continue
        if summary.reward.kind == "format" and summary.full == 0 and summary.reward.weight > 0:
            partly = " (some earn a part)" if summary.mean else ""
            partial_credit = "add a reward with partial credit (`tag_presence`), "
            if "tag_presence" in rewards:
                partial_credit = ""
            yield (
                f"no completion has the format of `{summary.reward.name}`{partly}, and training only raises what is "
                f"sampled: describe the format in `dataset.system_prompt`, {partial_credit}or begin with a policy that "
                "knows the format (`model_name_or_path`)"
            )


def never_right(preview: Preview) -> Iterator[str]:
    """Suggest another place to look for the answer if no completion earns anything from a correctness reward."""
    texts = [one.text for one in preview.completions]
    for reward in preview.rewards:
        scores = [score for group in preview.groups for score in group.scores(reward.name)]
        if reward.kind != "correctness" or not scores or any(is_passing(score, reward.passes_at) for score in scores):
            continue
        note = reward.declared.unparsed_note(texts)
        reason = f": {note}. Ask for an answer in the prompt, or set `extract` in `rewards`" if note else ""
        yield f"`{reward.name}` pays for none of {len(texts)} completions{reason}"


def cut_at_the_cap(preview: Preview) -> Iterator[str]:
    """Suggest a larger cap if more than a quarter of the completions are cut."""
    cut = sum(one.is_cut for one in preview.completions)
    if cut > TRUNCATED_LIMIT * len(preview.completions):
        yield (
            f"{cut} of {len(preview.completions)} completions are cut at {preview.max_completion_length} tokens, and "
            "an answer behind the cut is lost: raise `max_completion_length`, or set `mask_truncated_completions: "
            "true`. A base model that never ends needs `generation_kwargs.stop`"
        )


def identical(preview: Preview) -> Iterator[str]:
    """Suggest a higher temperature if more than half of the groups repeat one text."""
    repeated = sum(len({one.content for one in group.completions}) == 1 for group in preview.groups)
    if repeated > FLAT_GROUPS_LIMIT * len(preview.groups):
        yield (
            f"{repeated} of {len(preview.groups)} groups repeat one completion, so that there is nothing to compare: "
            f"raise `temperature` above {preview.temperature:g}"
        )


def unscorable(preview: Preview) -> Iterator[str]:
    """Name the rewards that score nothing."""
    for summary in preview.summaries():
        if summary.mean is None:
            yield (
                f"`{summary.reward.name}` scores none of {summary.unscored} completions: its gold can't be read in "
                "these rows; correct `dataset.columns`, or the reward's `kwargs` in `rewards`"
            )


def memory_too_small(preview: Preview) -> Iterator[str]:
    """Suggest smaller micro-batches if the gradient was not computed."""
    if preview.cost.training is None:
        yield (
            "the loss and its gradient need more memory than the device has: lower `per_device_train_batch_size`, and "
            "raise `gradient_accumulation_steps` as much"
        )


CHECKS: tuple[Callable[[Preview], Iterator[str]], ...] = (
    memory_too_small,
    unscorable,
    paid_above,
    another_tag_opened,
    format_never_met,
    never_right,
    too_hard_or_easy,
    cut_at_the_cap,
    identical,
)
