"""What makes a completion *strictly* right: the highest pay of each correctness and format reward of the recipe.

`asked_by` turns a recipe's rewards into the ones that decide: those of ours that declare the kind correctness or format, each
as it is configured. Weights, names and amounts make no difference. `is_right` scores completions by them. Without a recipe
the default asks for one reasoning block, then one answer block that holds the right answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_rewards.format_tags import WellFormed
from grpo_rewards.math.answers import answer_extractor
from grpo_rewards.math.correctness import GSM8KCorrectness
from grpo_rewards.registry import TRL_REWARDS, Spec, build_rewards, own_name, resolve, spec_parts
from grpo_rewards.reward import BaseReward, Kind
from grpo_rewards.terminal import visible

Tags = tuple[str, str]
THINK_FORMAT = "trl.rewards.think_format_reward"


@dataclass(frozen=True)
class ThinkFormat(BaseReward):
    """TRL's `think_format_reward`, called on texts: 1 if the completion begins with one closed think block, else 0."""

    kind: ClassVar[Kind] = "format"

    name: str = "think_format_reward"

    @property
    def highest_pay(self) -> float:
        """Pay of a completion in the format."""
        return 1.0

    def __call__(self, prompts: Any = None, completions: Sequence[str] = (), **columns: Any) -> list[float | None]:
        """Score each completion."""
        from trl.rewards import think_format_reward

        return think_format_reward([[{"content": completion}] for completion in completions])


def asked_by(specs: Sequence[Spec], tags: Tags, *, override_tags: bool = False) -> tuple[BaseReward, ...]:
    """What a recipe's rewards ask of a completion, sorted; the default if none of them pays for correctness or format.

    Left out are rewards of other kinds, a user's own (which may need other columns), and those without a positive weight,
    which reward nothing. TRL's correctness rewards count as ours with `extract: auto`. If the recipe has no correctness
    reward, the default's is added.

    Args:
        specs: a recipe's `rewards`.
        tags: the reasoning and the answer tag, for what the recipe does not say.
        override_tags: whether `tags` replace those of the recipe's rewards too.

    Raises:
        grpo_rewards.registry.RewardSpecError: a spec of one of our rewards that can't be built.
        ValueError: `tags` are not two different tag names.
    """
    known = list(_known(specs, tags))
    if override_tags:
        known = [reward.with_tags(tags) for reward in known]
    if not known:
        return GSM8KCorrectness(pay_exact=1.0, pay_equal=1.0, tags=tags), WellFormed(tags=tags)
    if not any(reward.kind == "correctness" for reward in known):
        known.append(GSM8KCorrectness(pay_exact=1.0, pay_equal=1.0, tags=tags))
    return tuple(sorted(dict.fromkeys(known), key=repr))


def judges_correctness(specs: Sequence[Spec]) -> bool:
    """Whether one of a recipe's rewards that decide is of the kind correctness."""
    return any(reward.kind == "correctness" for reward in _known(specs, ("think", "answer")))


def is_right(
    asked: Sequence[BaseReward], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> list[bool]:
    """Return, for each completion, True if it passes every reward; `columns` are the dataset's, `answer` the golds."""
    passed = [reward.passed(reward(completions=completions, **columns)) for reward in asked]
    return [all(row) for row in zip(*passed, strict=True)]


def passing(spec: Spec) -> BaseReward | None:
    """What a completion that passes one of our correctness rewards earns in full, whatever a spec says of pay.

    None for every other reward, and for one whose answers all earn the same.
    """
    built = judge_of({"name": spec} if isinstance(spec, str) else spec)
    if built is None or built.kind != "correctness":
        return None
    return built.with_unit_pay()


def can_judge(asked: Sequence[BaseReward], rows: int, columns: Mapping[str, Sequence[Any]]) -> list[bool]:
    """Return, for each row, True if every reward can score it.

    Raises:
        ValueError: a reward needs a column that is not there.
    """
    valid = [reward.validate(rows, columns) for reward in asked]
    return [all(row) for row in zip(*valid, strict=True)]


def columns_read(reward: BaseReward) -> set[str]:
    """Return the names of the dataset columns that tell one row from another to a reward."""
    return {*reward.columns_read, *reward.optional_columns}


def gold_column(asked: Sequence[BaseReward]) -> str:
    """Where the first correctness reward finds its golds; `answer` for one that has none."""
    judge = next(reward for reward in asked if reward.kind == "correctness")
    return judge.gold_column or "answer"


def stated_answers(
    asked: Sequence[BaseReward], completions: Sequence[str], columns: Mapping[str, Sequence[Any]], tags: Tags
) -> list[str | None]:
    """Each completion's answer as the first correctness reward reads it, else in any recognised layout."""
    logged: dict[str, list[str | None]] = {}
    judge = next(reward for reward in asked if reward.kind == "correctness")
    judge(completions=completions, **columns, log_extra=logged.__setitem__)
    own = logged.get("extracted", [None] * len(completions))
    anywhere = answer_extractor("auto", tags)
    return [
        anywhere(completion) if answer is None else answer for answer, completion in zip(own, completions, strict=True)
    ]


def describe(asked: Sequence[Mapping[str, Any]]) -> str:
    """What strict asks for, from the rewards' fields as `evaluation.json` holds them."""
    words = [
        visible(
            f"right by `extract: {reward['extract']}`" if "pay_exact" in reward else f"full pay of `{reward['name']}`"
        )
        for reward in asked
    ]
    return " and ".join(words)


def single_specs(specs: Iterable[Spec]) -> Iterator[Mapping[str, Any]]:
    """The rewards of a recipe that can pay, as mappings: the parts of a composed one in its place."""
    for spec in specs:
        mapping = {"name": spec} if isinstance(spec, str) else spec
        weight = mapping.get("weight", 1.0)
        if isinstance(weight, (int, float)) and weight <= 0:
            continue
        yield from single_specs(spec_parts(mapping)) if spec_parts(mapping) else [mapping]


def judge_of(spec: Mapping[str, Any]) -> BaseReward | None:
    """One of our correctness or format rewards as a spec describes it; None for every other reward.

    The spec may come from a run of somebody else's, so that nothing is imported or called by a name that it gives.
    """
    own = own_name(str(spec.get("name")))
    # By the class, before anything is built: a reward of another kind may take the spec of a further one, or a model's name.
    if own is None or resolve(own).kind not in ("correctness", "format"):
        return None
    return build_rewards([spec])[0].declared


def _known(specs: Sequence[Spec], tags: Tags) -> Iterator[BaseReward]:
    for spec in single_specs(specs):
        name = str(spec.get("name"))
        package, _, attribute = name.rpartition(".")
        if (built := judge_of(spec)) is not None:
            if (asked := built.with_unit_pay()) is not None:
                yield asked
        elif name == THINK_FORMAT:
            yield ThinkFormat()
        elif package == "trl.rewards" and TRL_REWARDS.get(attribute, ("other",))[0] == "correctness":
            yield GSM8KCorrectness(extract="auto", pay_exact=1.0, pay_equal=1.0, tags=tags)
