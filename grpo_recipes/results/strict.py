"""What makes a completion *strictly* right: the highest pay of each correctness and format reward of the recipe.

`asked_by` turns a recipe's rewards into the ones that decide: those of ours that declare the kind correctness or format, each
as it is configured. Weights, names and amounts make no difference. `is_right` scores completions by them. Without a recipe
the default asks for one reasoning block, then one answer block that holds the right answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from grpo_rewards.answers import answer_extractor
from grpo_rewards.completions import Kind
from grpo_rewards.correctness import GSM8KCorrectness
from grpo_rewards.format_tags import WellFormed
from grpo_rewards.registry import TRL_REWARDS, Spec, build_rewards, own_name, resolve, spec_parts
from grpo_rewards.terminal import visible

Tags = tuple[str, str]
THINK_FORMAT = "trl.rewards.think_format_reward"


@dataclass(frozen=True)
class ThinkFormat:
    """TRL's `think_format_reward`, called on texts: 1 if the completion begins with one closed think block, else 0."""

    kind: ClassVar[Kind] = "format"
    highest_pay: ClassVar[float] = 1.0

    name: str = "think_format_reward"

    def __call__(self, *, completions: Sequence[str], **columns: Any) -> list[float]:
        """Score each completion."""
        from trl.rewards import think_format_reward

        return think_format_reward([[{"content": completion}] for completion in completions])


# One of our rewards, a frozen dataclass, of the kind correctness or format.
Asked = Any
# What a reward pays, and how it is called, says nothing about what earns the most: fields, as far as a reward has them.
_PLAIN = {"pay": 1.0, "pay_wrong": 0.0, "pay_partial": 0.0, "prefix": ""}


def asked_by(specs: Sequence[Spec], tags: Tags, *, override_tags: bool = False) -> tuple[Asked, ...]:
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
        known = [_with_tags(reward, tags) for reward in known]
    if not known:
        return GSM8KCorrectness(pay_exact=1.0, pay_equal=1.0, tags=tags), WellFormed(tags=tags)
    if not any(reward.kind == "correctness" for reward in known):
        known.append(GSM8KCorrectness(pay_exact=1.0, pay_equal=1.0, tags=tags))
    return tuple(sorted(dict.fromkeys(known), key=repr))


def judges_correctness(specs: Sequence[Spec]) -> bool:
    """Whether one of a recipe's rewards that decide is of the kind correctness."""
    return any(reward.kind == "correctness" for reward in _known(specs, ("think", "answer")))


def is_right(asked: Sequence[Asked], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> list[bool]:
    """Whether each completion earns the most that every reward can pay; `columns` are the dataset's, `answer` the golds."""
    pays = [reward(completions=completions, **columns) for reward in asked]
    most = [reward.highest_pay for reward in asked]
    return [list(row) == most for row in zip(*pays, strict=True)]


def passing(spec: Spec) -> Asked | None:
    """What a completion that passes one of our correctness rewards earns in full, whatever a spec says of pay.

    None for every other reward, and for one whose answers all earn the same.
    """
    built = judge_of({"name": spec} if isinstance(spec, str) else spec)
    if built is None or built.kind != "correctness":
        return None
    return next(iter(_plain(built)), None)


def can_judge(asked: Sequence[Asked], rows: int, columns: Mapping[str, Sequence[Any]]) -> list[bool]:
    """Whether every reward can score each of the rows: one says by None that it can't, whatever the completion.

    Raises:
        ValueError: a reward needs a column that is not there.
    """
    pays = [reward(completions=[""] * rows, **columns) for reward in asked]
    return [None not in row for row in zip(*pays, strict=True)]


def columns_read(reward: Asked) -> set[str]:
    """The dataset columns that tell one row from another to a reward."""
    return {*getattr(reward, "columns_read", ()), getattr(reward, "choices_column", None) or ""} - {""}


def gold_column(asked: Sequence[Asked]) -> str:
    """Where the first correctness reward finds its golds; `answer` for one that has none."""
    judge = next(reward for reward in asked if reward.kind == "correctness")
    return getattr(judge, "gold_column", "answer")


def stated_answers(
    asked: Sequence[Asked], completions: Sequence[str], columns: Mapping[str, Sequence[Any]], tags: Tags
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


def judge_of(spec: Mapping[str, Any]) -> Any | None:
    """One of our correctness or format rewards as a spec describes it; None for every other reward.

    The spec may come from a run of somebody else's, so that nothing is imported or called by a name that it gives.
    """
    own = own_name(str(spec.get("name")))
    # By the class, before anything is built: a reward of another kind may take the spec of a further one, or a model's name.
    if own is None or getattr(resolve(own), "kind", None) not in ("correctness", "format"):
        return None
    return build_rewards([spec])[0].function


def _known(specs: Sequence[Spec], tags: Tags) -> Iterator[Asked]:
    for spec in single_specs(specs):
        name = str(spec.get("name"))
        package, _, attribute = name.rpartition(".")
        if (built := judge_of(spec)) is not None:
            yield from _plain(built)
        elif name == THINK_FORMAT:
            yield ThinkFormat()
        elif package == "trl.rewards" and TRL_REWARDS.get(attribute, ("other",))[0] == "correctness":
            yield GSM8KCorrectness(extract="auto", pay_exact=1.0, pay_equal=1.0, tags=tags)


def _plain(reward: Any) -> Iterator[Asked]:
    """A reward without what makes no difference to which completions earn its highest pay; nothing if none earns any."""
    if isinstance(reward, GSM8KCorrectness):
        if reward.pay_exact > reward.pay_wrong:
            kept = {key: getattr(reward, key) for key in ("extract", "tags", "prefilled", "gold_column", "deadline")}
            yield GSM8KCorrectness(pay_exact=1.0, pay_equal=float(reward.pay_equal > reward.pay_wrong), **kept)
    elif reward.highest_pay > 0:
        known = {field.name: field.default for field in fields(reward)}
        # A format reward pays its `pay` for each of several tags: there, its default serves as well.
        paid = _PLAIN if reward.kind == "correctness" else {"pay": known["pay"]}
        changed = {key: value for key, value in paid.items() if key in known}
        yield replace(reward, **changed, name=known["name"])


def _with_tags(reward: Asked, tags: Tags) -> Asked:
    if isinstance(reward, ThinkFormat):
        return reward
    return replace(reward, tags=tags, prefilled=tags[0] if reward.prefilled else None)
