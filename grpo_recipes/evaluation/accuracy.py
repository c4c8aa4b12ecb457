"""Rewards of an evaluation: those that define strict accuracy, and the scores of all rewards of the recipe.

A completion is *strictly* right if it earns the most from every correctness and format reward of the recipe. Weights,
names and amounts make no difference. Without a recipe, it must consist of one reasoning block and one answer block with
the right answer.

Each reward of the recipe is also measured by itself, without its weight. A completion *passes* a correctness reward if
it earns the most, where a number in another form counts as equal. It passes a reward of the user's own from the score
`passes_at` of the spec on, or, if the reward judges correctness, from its `highest_pay` on.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pandas as pd

from grpo_recipes.runs import files
from grpo_rewards import registry
from grpo_rewards.completions import completion_text, copied, listed_scores
from grpo_rewards.composed import leaves
from grpo_rewards.errors import UserError, one_line
from grpo_rewards.format_tags import WellFormed
from grpo_rewards.math.answers import extract_answer
from grpo_rewards.math.correctness import GSM8KCorrectness
from grpo_rewards.math.decimals import Decimal
from grpo_rewards.registry import RewardSpec
from grpo_rewards.reward import BaseReward, Kind, is_passing, reaches
from grpo_rewards.terminal import visible

PAY, PASSED = "reward/{}", "passed/{}"
"""Columns of `completions.parquet` for a reward."""
THINK_FORMAT = "trl.rewards.think_format_reward"

Tags = tuple[str, str]
Prompt = str | Sequence[Mapping[str, Any]]
Columns = Mapping[str, Any]


@dataclass(frozen=True)
class ThinkFormat(BaseReward):
    """TRL's `think_format_reward`: 1 if the completion begins with one closed think block, else 0."""

    kind: ClassVar[Kind] = "format"

    name: str = "think_format_reward"

    @property
    def highest_pay(self) -> float:
        """Score of a completion in the format."""
        return 1.0

    def __call__(self, prompts: Any = None, completions: Sequence[str] = (), **columns: Any) -> list[float | None]:
        """Score each completion, given as text."""
        from trl.rewards import think_format_reward

        return list(think_format_reward([[{"content": completion}] for completion in completions]))


# Strict accuracy


def strict_rewards(specs: Sequence[RewardSpec], tags: Tags, *, override_tags: bool = False) -> tuple[BaseReward, ...]:
    """Return the rewards that a strictly right completion must earn in full, sorted, each with standard pay.

    These are the recipe's correctness and format rewards with a positive weight. A user's own rewards are skipped,
    because they may need other columns. TRL's correctness rewards count as ours with `extract: auto`. The default
    correctness reward is added if the recipe has none.

    Args:
        specs: `rewards` of a recipe.
        tags: Reasoning and answer tag, for rewards that do not name theirs.
        override_tags: True if `tags` also replace the tags of the recipe's rewards.

    Raises:
        RewardSpecError: One of our rewards can't be built from its spec.
        ValueError: `tags` are not two different tag names.
    """
    rewards = list(_deciding_rewards(specs, tags))
    default = GSM8KCorrectness(pay_exact=1.0, pay_equal=1.0, tags=tags)
    if override_tags:
        rewards = [reward.with_tags(tags) for reward in rewards]
    if not rewards:
        return default, WellFormed(tags=tags)
    if not any(reward.kind == "correctness" for reward in rewards):
        rewards.append(default)
    return tuple(sorted(dict.fromkeys(rewards), key=repr))


def has_correctness(specs: Sequence[RewardSpec]) -> bool:
    """Return True if a recipe has a correctness reward that can decide strict accuracy."""
    return any(reward.kind == "correctness" for reward in _deciding_rewards(specs, ("think", "answer")))


def _deciding_rewards(specs: Sequence[RewardSpec], tags: Tags) -> Iterator[BaseReward]:
    for spec in single_specs(specs):
        name = str(spec.get("name"))
        package, _, attribute = name.rpartition(".")
        if (reward := judging_reward(spec)) is not None:
            if (standard := reward.with_unit_pay()) is not None:
                yield standard
        elif name == THINK_FORMAT:
            yield ThinkFormat()
        elif package == "trl.rewards" and registry.TRL_REWARDS.get(attribute, ("other",))[0] == "correctness":
            yield GSM8KCorrectness(extract="auto", pay_exact=1.0, pay_equal=1.0, tags=tags)


def single_specs(specs: Iterable[RewardSpec]) -> Iterator[Mapping[str, Any]]:
    """Yield the rewards of a recipe with a positive weight as mappings. A composed reward is replaced by its parts."""
    for spec in specs:
        mapping = {"name": spec} if isinstance(spec, str) else spec
        weight = mapping.get("weight")
        if isinstance(weight, (int, float)) and weight <= 0:
            continue
        if parts := registry.spec_parts(mapping):
            yield from single_specs(parts)
        else:
            yield mapping


def judging_reward(spec: Mapping[str, Any]) -> BaseReward | None:
    """Return our correctness or format reward that a spec describes, or None for any other reward.

    The spec may come from a stranger's run, so nothing is imported or called by a name in it.
    """
    own = registry.own_name(str(spec.get("name")))
    # The class is checked before anything is built: other kinds may take a model's name, or the spec of another reward.
    if own is None or registry.resolve(own).kind not in ("correctness", "format"):
        return None
    (built,) = registry.build_rewards([spec])
    return built.declared


def is_right(rewards: Sequence[BaseReward], completions: Sequence[str], columns: Columns) -> list[bool]:
    """Return, for each completion, True if it passes every reward.

    Args:
        rewards: Rewards. The method `passed` of each one decides.
        completions: Texts.
        columns: Columns of the dataset with one entry per completion.
    """
    passed = [reward.passed(reward(completions=completions, **columns)) for reward in rewards]
    return [all(row) for row in zip(*passed, strict=True)]


def can_score(rewards: Sequence[BaseReward], rows: int, columns: Columns) -> list[bool]:
    """Return, for each row of the dataset, True if every reward can score it.

    Raises:
        ValueError: A reward needs a column that is missing.
    """
    valid = [reward.validate(rows, columns) for reward in rewards]
    return [all(row) for row in zip(*valid, strict=True)]


def gold_column(rewards: Sequence[BaseReward]) -> str:
    """Return the column with the golds of the first correctness reward, or `answer` if that reward has none."""
    return _correctness(rewards).gold_column or "answer"


def decimal(rewards: Sequence[BaseReward]) -> Decimal:
    """Return the decimal mark that the first correctness reward reads, a point if it declares none."""
    return getattr(_correctness(rewards), "decimal", None) or "point"


def stated_answers(
    rewards: Sequence[BaseReward], completions: Sequence[str], columns: Columns, tags: Tags
) -> list[str | None]:
    """Return the answer of each completion as the first correctness reward reads it, or else in any known layout."""
    logged: dict[str, list[str | None]] = {}
    _correctness(rewards)(completions=completions, **columns, log_extra=logged.__setitem__)
    answers = logged.get("extracted", [None] * len(completions))
    for place, completion in enumerate(completions):
        if answers[place] is None:
            answers[place] = extract_answer(completion, "auto", tags=tags)
    return answers


def _correctness(rewards: Sequence[BaseReward]) -> BaseReward:
    return next(reward for reward in rewards if reward.kind == "correctness")


def describe(rewards: Sequence[Mapping[str, Any]]) -> str:
    """Return what strict accuracy requires, from the rewards' fields in `evaluation.json`."""
    clauses = []
    for reward in rewards:
        is_exact = "pay_exact" in reward
        clauses.append(f"right by `extract: {reward['extract']}`" if is_exact else f"full pay of `{reward['name']}`")
    return " and ".join(map(visible, clauses))


# Scores of each reward


@dataclass(frozen=True)
class MeasuredReward:
    """Reward of the recipe that can score held-out completions."""

    name: str
    function: Callable[..., Any]
    passing: BaseReward | None
    """Reward of this package that a passing completion earns in full, or None if the reward is not such a judge."""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Spec in the recipe without the weight, which does not matter."""
    passes_at: float | None = None
    """Smallest score of a completion that passes any other reward, or None if that is not known."""
    highest_pay: float | None = None
    """Largest score of one completion, or None if it is not known."""

    @property
    def has_verdict(self) -> bool:
        """True if it is known which completions pass."""
        return self.passing is not None or self.passes_at is not None

    def passed(self, texts: Sequence[str], scores: Sequence[float | None], columns: Columns) -> list[bool]:
        """Return True for each completion that passes. `has_verdict` must be true."""
        if self.passing is not None:
            return is_right((self.passing,), texts, columns)
        return [score is not None and bool(is_passing(score, self.passes_at)) for score in scores]

    def scores(self, prompts: Sequence[Prompt], completions: Sequence[Any], columns: Columns) -> list[float | None]:
        """Return the score of each completion, or None for one that the reward can't score.

        Args:
            prompts: Texts or messages.
            completions: Texts, or messages if tools were called.
            columns: Columns of the dataset with one entry per completion.

        Raises:
            Exception: The reward raises it, or does not return one finite number per completion.
        """
        messages: list[Any] = []
        for prompt, completion in zip(prompts, completions, strict=True):
            # TRL gives rewards the completion of a conversation as messages.
            is_whole = isinstance(prompt, str) or not isinstance(completion, str)
            messages.append(completion if is_whole else [{"role": "assistant", "content": completion}])
        scores = self.function(**copied({**columns, "prompts": list(prompts), "completions": messages}))
        if inspect.iscoroutine(scores):
            scores = asyncio.run(scores)
        values = listed_scores(self.name, scores, len(messages))
        for value in values:
            if value is None:
                continue
            if not math.isfinite(value):
                raise ValueError(f"{value} is no finite number")
            if self.highest_pay is not None and not reaches(self.highest_pay, value):
                raise ValueError(f"{value:g} is more than its `highest_pay` {self.highest_pay:g}: correct its spec")
        return [None if value is None else float(value) for value in values]

    def fails_on(self, row: Mapping[str, Any], samples: int) -> str | None:
        """Return why the reward can't score a held-out row with empty completions, or None if it can."""
        columns = {name: [value] * samples for name, value in row.items() if name != "prompt"}
        try:
            self.scores([row["prompt"]] * samples, [""] * samples, columns)
        except (Exception, SystemExit) as error:  # such as a missing column, or an argument that only a trainer gives
            return _reason(error)
        return None


def _reason(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}")


def measurable_rewards(
    specs: Sequence[RewardSpec], row: Mapping[str, Any], samples: int, *, is_trusted: bool
) -> tuple[list[MeasuredReward], list[str]]:
    """Return the rewards of a recipe that can be measured, and the others' names with the reasons.

    Args:
        specs: `rewards` of the recipe.
        row: A held-out row, by column. Each reward is tried on it with an empty completion.
        samples: Completions per problem.
        is_trusted: True if the user named the recipe. Rewards of a stranger's run are neither imported by name nor
            allowed to reach another machine or model.

    Raises:
        RewardSpecError: A reward can't be built from its spec.
    """
    measured: list[MeasuredReward] = []
    skipped: list[str] = []
    for spec in specs:
        mapping = {"name": spec} if isinstance(spec, str) else spec
        if not is_trusted and not all(registry.own_name(name) for name in _called_names(mapping)):
            name = mapping.get("alias") or mapping.get("name")
            skipped.append(f"{name} (code that the run names: give its recipe with --recipe)")
            continue
        (built,) = registry.build_rewards([spec], num_generations=samples)
        judge = judging_reward(mapping)
        passing = judge.with_unit_pay() if judge is not None and judge.kind == "correctness" else None
        unweighted = {key: value for key, value in mapping.items() if key != "weight"}
        reward = MeasuredReward(built.name, built.function, passing, unweighted, built.passes_at, built.highest_pay)
        if reason := _obstacle(built, samples, is_trusted=is_trusted) or reward.fails_on(row, samples):
            skipped.append(f"{built.name} ({reason})")
        else:
            measured.append(reward)
    return measured, skipped


def _called_names(spec: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of everything that a spec calls: itself or its parts, and rewards among its arguments."""
    name = str(spec.get("name"))
    if not registry.is_composed(spec):
        yield name
    own = registry.own_name(name)
    kwargs: Any = spec.get("kwargs") or {}
    inner = registry.spec_parts(spec)
    for key in registry.fields_of_rewards(registry.resolve(own)) if own else ():
        if key in kwargs:
            inner.append(kwargs[key])
    for part in inner:
        yield from _called_names(part if isinstance(part, Mapping) else {"name": part})


def _obstacle(built: registry.BuiltReward, samples: int, *, is_trusted: bool) -> str | None:
    """Return why a reward may not be called, or None."""
    asks_a_model = any(leaf.kind == "judge" for leaf in leaves([built]))
    if asks_a_model and not is_trusted:
        return "it asks a model that the run names: give its recipe with --recipe"
    # A judge needs whole groups only to skip all of one.
    if samples == 1 and built.needs_whole_groups and not asks_a_model:
        return "it compares completions of one prompt: ask for several with --samples"
    return None


def reward_columns(rewards: Iterable[MeasuredReward]) -> dict[str, files.Condition]:
    """Return the columns of `completions.parquet` for some rewards."""
    columns: dict[str, files.Condition] = {}
    for reward in rewards:
        columns[PAY.format(reward.name)] = files.NUMBERS
        if reward.has_verdict:
            columns[PASSED.format(reward.name)] = files.BOOLEANS
    return columns


def reward_values(
    rewards: Iterable[MeasuredReward], prompts: Sequence[Prompt], completions: Sequence[Any], columns: Columns
) -> dict[str, Any]:
    """Return the values of the columns in `reward_columns` for a batch of completions, texts or messages.

    Raises:
        UserError: A reward can't score a completion.
    """
    values: dict[str, Any] = {}
    for reward in rewards:
        try:
            scores = reward.scores(prompts, completions, columns)
        except (Exception, SystemExit) as error:  # a user's function may fail in any way
            problem = f"it can't score the held-out rows ({_reason(error)})"
            raise UserError(f"reward `{reward.name}`", problem, "correct it, or leave it out of the recipe") from error
        # In pandas None becomes NaN only with the type given.
        values[PAY.format(reward.name)] = pd.Series(scores, dtype="float64")
        if reward.has_verdict:
            texts = [completion_text(completion) for completion in completions]
            values[PASSED.format(reward.name)] = reward.passed(texts, scores, columns)
    return values
