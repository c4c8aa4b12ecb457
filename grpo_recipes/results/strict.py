"""What makes a completion *strictly* right: the highest pay of each correctness and format reward of the recipe.

`asked_by` turns a recipe's rewards into the ones that decide: its correctness rewards with their own `extract` and tags, and
its format rewards, each as it is configured. Weights, names and amounts make no difference. `is_right` scores completions by
them. Without a recipe the default asks for one reasoning block, then one answer block that holds the right answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from grpo_rewards.answers import answer_extractor
from grpo_rewards.correctness import GSM8KCorrectness
from grpo_rewards.format_tags import TagCount, TagPresence, TagStructure, WellFormed
from grpo_rewards.registry import TRL_REWARDS, Spec, build_rewards, own_name, spec_parts
from grpo_rewards.terminal import visible

Tags = tuple[str, str]
FORMATS = (TagStructure, TagCount, TagPresence, WellFormed)
JUDGES = ("gsm8k_correctness", "math_correctness", "tag_structure", "tag_count", "tag_presence", "well_formed")
THINK_FORMAT = "trl.rewards.think_format_reward"


@dataclass(frozen=True)
class ThinkFormat:
    """TRL's `think_format_reward`, called on texts: 1 if the completion begins with one closed think block, else 0."""

    highest_pay: ClassVar[float] = 1.0

    name: str = "think_format_reward"

    def __call__(self, *, completions: Sequence[str], **columns: Any) -> list[float]:
        """Score each completion."""
        from trl.rewards import think_format_reward

        return think_format_reward([[{"content": completion}] for completion in completions])


Format = TagStructure | TagCount | TagPresence | WellFormed | ThinkFormat
Asked = GSM8KCorrectness | Format


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
    if not any(isinstance(reward, GSM8KCorrectness) for reward in known):
        known.append(GSM8KCorrectness(pay_exact=1.0, pay_equal=1.0, tags=tags))
    return tuple(sorted(dict.fromkeys(known), key=repr))


def is_right(asked: Sequence[Asked], completions: Sequence[str], golds: Sequence[str]) -> list[bool]:
    """Whether each completion earns the most that every reward can pay; `golds` as `answers.read_gold` takes them."""
    pays = [reward(completions=completions, answer=golds) for reward in asked]
    most = [reward.highest_pay for reward in asked]
    return [list(row) == most for row in zip(*pays, strict=True)]


def stated_answer(asked: Sequence[Asked], completion: str, tags: Tags) -> str | None:
    """The final answer where the first correctness reward looks, else in any recognised layout."""
    judge = next(reward for reward in asked if isinstance(reward, GSM8KCorrectness))
    own = answer_extractor(judge.extract, judge.tags, judge.prefilled is not None)(completion)
    return own if own is not None else answer_extractor("auto", tags)(completion)


def describe(asked: Sequence[Mapping[str, Any]]) -> str:
    """What strict asks for, from the rewards' fields as `evaluation.json` holds them."""
    words = [
        visible(
            f"right by `extract: {reward['extract']}`" if "extract" in reward else f"full pay of `{reward['name']}`"
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


def judge_of(spec: Mapping[str, Any]) -> GSM8KCorrectness | Format | None:
    """One of our correctness or format rewards as a spec describes it; None for every other reward.

    The spec may come from a run of somebody else's, so that nothing is imported or called by a name that it gives.
    """
    if own_name(str(spec.get("name"))) not in JUDGES:
        return None
    return build_rewards([spec])[0].function  # type: ignore[return-value]


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
            kept = {key: getattr(reward, key) for key in ("extract", "tags", "prefilled", "deadline")}
            yield GSM8KCorrectness(pay_exact=1.0, pay_equal=float(reward.pay_equal > reward.pay_wrong), **kept)
    elif isinstance(reward, FORMATS) and reward.pay > 0:
        yield type(reward)(tags=reward.tags, prefilled=reward.prefilled)


def _with_tags(reward: Asked, tags: Tags) -> Asked:
    if isinstance(reward, ThinkFormat):
        return reward
    return replace(reward, tags=tags, prefilled=tags[0] if reward.prefilled else None)
