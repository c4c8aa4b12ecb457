"""What makes a completion *strictly* right: full marks from what the recipe's own rewards ask for.

`asked_by` turns a recipe's rewards into the ones that judge: its correctness rewards, by their own `extract` and tags, and
its format rewards, each as it is configured. Weights, names and amounts make no difference. `is_right` holds completions
against them. Without a recipe the default asks for one reasoning block, one answer block, and the answer in the latter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from grpo_rewards.answers import answer_extractor
from grpo_rewards.correctness import GSM8KCorrectness
from grpo_rewards.format_tags import TagCount, TagPresence, TagStructure, WellFormed
from grpo_rewards.registry import REGISTERED, Spec, build_rewards, spec_parts

Tags = tuple[str, str]
FORMATS = (TagStructure, TagCount, TagPresence, WellFormed)
OUR_MODULES = ("grpo_rewards.correctness", "grpo_rewards.format_tags")
# TRL's compare what math-verify finds anywhere outside the reasoning.
TRL_CORRECTNESS = ("trl.rewards.accuracy_reward", "trl.rewards.reasoning_accuracy_reward")
TRL_FORMAT = "trl.rewards.think_format_reward"


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
    """What a recipe's rewards ask of a completion, in an order of its own; the default where they ask for nothing known.

    Rewards of unknown kinds are passed over, and so are those that the weighted sum does not reward: a weight of 0 is only
    logged. Where the recipe names no correctness reward, the answer is asked for where the default asks for it.

    Args:
        specs: a recipe's `rewards`.
        tags: the reasoning and the answer tag, of what the recipe does not say.
        override_tags: whether `tags` hold for the recipe's rewards too.

    Raises:
        grpo_rewards.registry.RewardSpecError: a spec of a known reward that can't be built.
        ValueError: tags that are none.
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
        f"right by `extract: {reward['extract']}`" if "extract" in reward else f"full pay of `{reward['name']}`"
        for reward in asked
    ]
    return " and ".join(words)


def _known(specs: Sequence[Spec], tags: Tags) -> Iterator[Asked]:
    for spec in specs:
        # Anything else than these two is of the user's own making; training has refused what is no spec at all.
        name = spec.get("name") if isinstance(spec, Mapping) else spec
        weight = spec.get("weight", 1.0) if isinstance(spec, Mapping) else 1.0
        if isinstance(weight, (int, float)) and weight <= 0:
            continue
        if parts := spec_parts(spec):
            yield from _known(parts, tags)
        elif name in TRL_CORRECTNESS:
            yield GSM8KCorrectness(extract="auto", pay_exact=1.0, pay_equal=1.0, tags=tags)
        elif name == TRL_FORMAT:
            yield ThinkFormat()
        elif isinstance(name, str) and REGISTERED.get(name, name).replace(":", ".").rpartition(".")[0] in OUR_MODULES:
            yield from _plain(build_rewards([spec])[0].function)


def _plain(reward: Any) -> Iterator[Asked]:
    """A reward without what makes no difference to who gets full marks; nothing if no completion can earn any."""
    if isinstance(reward, GSM8KCorrectness):
        exact, equal = (float(pay > reward.pay_wrong) for pay in (reward.pay_exact, reward.pay_equal))
        if exact:
            yield GSM8KCorrectness(
                extract=reward.extract,
                pay_exact=exact,
                pay_equal=equal,
                tags=reward.tags,
                prefilled=reward.prefilled,
                deadline=reward.deadline,
            )
    elif isinstance(reward, FORMATS) and reward.pay > 0:
        yield type(reward)(tags=reward.tags, prefilled=reward.prefilled)


def _with_tags(reward: Asked, tags: Tags) -> Asked:
    if isinstance(reward, ThinkFormat):
        return reward
    return replace(reward, tags=tags, prefilled=tags[0] if reward.prefilled else None)
