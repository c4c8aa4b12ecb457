"""Samples of the untrained policy: completions, their rewards, and what follows from them.

`run/preview.py` draws the sample. What follows uses the thresholds of `diagnose`, which are rules of thumb.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from grpo_recipes.checks.rewards import prefilled_notes
from grpo_recipes.evaluation.estimates import mean_share
from grpo_recipes.reports.cards import FIRST_PARTS, LAST_PARTS, shortened
from grpo_recipes.reports.charts import duration
from grpo_recipes.reports.progress_checks import TRUNCATED_LIMIT
from grpo_recipes.reports.reward_checks import FLAT_GROUPS_LIMIT, earns_much
from grpo_recipes.reports.transcript import TurnPart, limited
from grpo_rewards.explain import score_line
from grpo_rewards.registry import BuiltReward
from grpo_rewards.reward import is_passing, reaches
from grpo_rewards.terminal import Cell, Labelled, Part, Table

FLAT = 1e-9
"""Largest range of scores that counts as no variance."""


@dataclass(frozen=True)
class Preview:
    """Sample of the untrained policy of a recipe.

    Attributes:
        source: File of the recipe.
        model: Name of the policy.
        by_reward: True if each reward is normalized before the weighted sum, so that each needs a variance of its own.
        rewards: Rewards with their weights.
        prompts: Prompts as the model sees them.
        rows: Table of the completions. Columns: `prompt`, the number of the prompt; `prompt_tokens`; `text`, or the
            last message of a completion with tools; `turns`, its transcript; `tokens`; `cut`, True if
            `max_completion_length` has cut it; `total`, the weighted sum of the scores; `pay/NAME`, the score of each
            reward, NaN for none; and `said`, the values that each reward logged, by its name.
        seconds_per_completion: Mean time of its generation and its rewards.
    """

    source: str
    model: str
    by_reward: bool
    rewards: Sequence[BuiltReward]
    prompts: Sequence[str]
    rows: pd.DataFrame
    seconds_per_completion: float

    @cached_property
    def is_flat(self) -> pd.Series:
        """True for each prompt whose group has zero variance, so that its advantages are 0."""
        columns = ["total"]
        if self.by_reward:
            columns = [f"pay/{reward.name}" for reward in self.rewards if reward.weight]
        return ~self._varies(columns).any(axis=1)

    def _varies(self, columns: Sequence[str]) -> pd.DataFrame:
        groups = self.rows.groupby("prompt")[list(columns)]
        return groups.max() - groups.min() > FLAT

    def findings(self) -> list[str]:
        """Return what follows from the sample, each sentence with the key of the recipe to change."""
        found = [*self._of_rewards(), *self._of_groups()]
        flat, count = int(self.is_flat.sum()), len(self.prompts)
        return found or [f"nothing stands in the way: {count - flat} of {count} groups have a gradient"]

    def _of_rewards(self) -> Iterator[str]:
        yield from prefilled_notes(self.rewards, self.prompts[0])
        for reward in self.rewards:
            name, scores, highest = reward.name, self.rows[f"pay/{reward.name}"], reward.highest_pay
            if scores.isna().all():
                yield (
                    f"`{name}` scores none of {len(scores)} completions: its gold can't be read in these rows; correct "
                    "`dataset.columns`, or the reward's `kwargs` in `rewards`"
                )
                continue
            if highest is not None and not reaches(highest, scores.max()):
                yield f"`{name}` pays {scores.max():g}, more than its `highest_pay` {highest:g}: correct its spec"
            earns_full = highest is None or reaches(scores, highest).any()
            if reward.kind == "format" and reward.weight > 0 and not earns_full:
                parts = "" if "pay/tag_presence" in self.rows else ", pay its parts (`tag_presence`)"
                yield (
                    f"no completion has the format of `{name}`, and training only raises what is sampled: describe the "
                    f"format in `dataset.system_prompt`{parts}, or begin with a policy that knows the format "
                    "(`model_name_or_path`)"
                )
            if reward.kind == "correctness" and not is_passing(scores, reward.passes_at).any():
                note = reward.declared.unparsed_note(self.rows["text"].tolist())
                reason = f": {note}. Ask for an answer in the prompt, or set `extract` in `rewards`" if note else ""
                yield f"`{name}` pays for none of {len(scores)} completions{reason}"

    def _of_groups(self) -> Iterator[str]:
        count, flat, cut = len(self.prompts), int(self.is_flat.sum()), int(self.rows["cut"].sum())
        if flat > FLAT_GROUPS_LIMIT * count:
            yield self._why_flat(f"{flat} of {count} groups have zero variance, so nothing is learned from them")
        if cut > TRUNCATED_LIMIT * len(self.rows):
            yield (
                f"{cut} of {len(self.rows)} completions are cut, and an answer behind the cut is lost: raise "
                "`max_completion_length`, or set `mask_truncated_completions: true`. A base model that never ends "
                "needs `generation_kwargs.stop`"
            )

    def _why_flat(self, problem: str) -> str:
        """Return a sentence on zero-variance groups: whether most are too easy or too hard, if that is known."""
        much = earns_much(self.rows, [reward for reward in self.rewards if reward.weight])
        is_scored = self.rows.groupby("prompt")["total"].count() > 0
        if much is None or not (is_scored & self.is_flat).any():
            return (
                f"{problem}: check `rewards` against the completions above, raise `num_generations` or `temperature`, "
                "or train on other rows"
            )
        is_easy = much.groupby(self.rows["prompt"]).all()[is_scored & self.is_flat]
        if is_easy.mean() > 0.5:
            return (
                f"too easy: {problem}, and in {is_easy.sum()} all completions earn much: keep harder rows "
                "(`dataset.pass_rate`), or raise `temperature`"
            )
        return (
            f"too hard: {problem}, and in {(~is_easy).sum()} all completions earn little: keep easier rows "
            "(`dataset.pass_rate`), raise `num_generations`, or begin with a policy that solves some "
            "(`model_name_or_path`)"
        )

    def describe(self) -> list[Part]:
        """Return the preview for the terminal."""
        parts: list[Part] = [Cell(f"{self.source}: {self.model} before training", "head")]
        for number, prompt in enumerate(self.prompts):
            rows = self.rows[self.rows["prompt"] == number]
            title = f"prompt {number + 1}: {rows['prompt_tokens'].iloc[0]} tokens, exactly as the model sees it"
            parts += ["", Cell(title, "head"), *_indented(prompt)]
            ranked = rows.drop_duplicates(["text", "turns"]).sort_values("total", ascending=False, kind="stable")
            best_middle_worst = ranked.iloc[sorted({0, len(ranked) // 2, len(ranked) - 1})]
            for _, row in best_middle_worst.iterrows():
                parts += _completion(row)
        parts += ["", self._rewards(), "", *self._figures()]
        return [*parts, *(Labelled("what follows", sentence) for sentence in self.findings())]

    def _rewards(self) -> Table:
        """Return what each reward pays, and in how many groups its score varies."""
        rows = []
        for reward in self.rewards:
            scores, highest = self.rows[f"pay/{reward.name}"], reward.highest_pay
            mean = "-" if scores.isna().all() else f"{scores.mean():.3f}"
            full = "-" if highest is None else f"{reaches(scores, highest).mean():.0%}"
            unscored = f"{scores.isna().sum()} of {len(scores)}"
            varies = f"{self._varies([scores.name]).sum().item()} of {len(self.prompts)} groups"
            rows.append((reward.name, f"{reward.weight:g}", mean, full, unscored, varies))
        head = ("reward", "weight", "mean", "full score", "no score", "varies in")
        return Table(rows, head, frozenset({1, 2, 3, 4, 5}))

    def _figures(self) -> Iterator[Labelled]:
        """Yield the figures of the sample for the terminal."""
        lengths, flat = self.rows["tokens"], f"{self.is_flat.sum()} of {len(self.prompts)} groups"
        share = mean_share(self.is_flat.astype(float).tolist(), clusters=list(self.prompts))
        interval = f"95 % interval {share.low:.0%} to {share.high:.0%}"
        yield Labelled("zero variance", f"{flat} ({interval}): their advantages are 0")
        tokens = f"{lengths.min()} to {lengths.max()} tokens, mean {lengths.mean():.0f}"
        cut = f"{self.rows['cut'].sum()} of {len(lengths)} are cut at `max_completion_length`"
        yield Labelled("completions", f"{tokens}; {cut}")
        time = f"{duration(self.seconds_per_completion)} per completion, for generation and rewards"
        yield Labelled("time", time)

    def as_dict(self) -> dict[str, Any]:
        """Return the preview for `--json`."""
        turns = [[asdict(turn) for turn in row] for row in self.rows["turns"]]
        text = self.rows.assign(turns=turns).to_json(orient="records", double_precision=15, default_handler=str)
        return {"prompts": list(self.prompts), "completions": json.loads(text), "findings": self.findings()}


def _completion(row: pd.Series) -> Iterator[Part]:
    """Yield a completion with the reasons for its scores."""
    total = "no reward scores it" if pd.isna(row["total"]) else f"reward {row['total']:g}"
    yield Cell(f"  completion of {row['tokens']} tokens{', cut' if row['cut'] else ''}: {total}", "head")
    for turn in limited(row["turns"], FIRST_PARTS, LAST_PARTS) or [TurnPart("text", 1, row["text"])]:
        if row["turns"]:
            yield Cell(f"    {turn.label}", "dim")
        yield from _indented(turn.text)
    for key in row.index[row.index.str.startswith("pay/")]:
        name = key.removeprefix("pay/")
        score = None if pd.isna(row[key]) else float(row[key])
        yield Cell(f"    {score_line(name, score, row['said'].get(name, {}))}", "dim")


def _indented(text: str) -> Iterator[str]:
    for line in shortened(text).split("\n"):
        yield f"  | {line}"
