"""Shaping rewards that compare the completions of one group. TRL's own shaping rewards serve by dotted path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_rewards.completions import check_rows, completion_text, prompt_groups
from grpo_rewards.math.correctness import gsm8k_correctness
from grpo_rewards.reward import BaseReward, Kind, LogColumn


@dataclass(frozen=True)
class GroupLength(BaseReward):
    """The length reward of Kimi k1.5, within the group of one prompt.

    With L = 0.5 - (length - shortest) / (longest - shortest) over the group:

    | completion | pay |
    |---|---|
    | correct | L, from 0.5 for the shortest of its group to -0.5 for the longest |
    | wrong | min(0, L): a short wrong answer earns nothing |
    | all of its group equally long | 0 |
    | correctness can't be told (None) | None |

    Source: Kimi k1.5 (arXiv 2501.12599), section 2.3.3. The length is in tokens where the trainer hands over
    `completion_ids`, else in characters. open-r1's version spans the whole batch instead of the group.

    Args:
        num_generations: completions per prompt; a recipe fills it in.
        correctness: the reward that tells right (it pays more than 0) from wrong: a reward, or a spec of one.
        name: the reward's name in logs.
    """

    needs_whole_groups: ClassVar[bool] = True
    kind: ClassVar[Kind] = "length"
    reward_fields: ClassVar[tuple[str, ...]] = ("correctness",)

    num_generations: int | None = None
    correctness: Callable[..., Any] | Mapping[str, Any] | str = gsm8k_correctness
    name: str = "group_length"

    def __post_init__(self) -> None:
        if self.num_generations is not None and (type(self.num_generations) is not int or self.num_generations < 1):
            raise ValueError(f"num_generations must be a positive whole number, not {self.num_generations!r}")
        if isinstance(self.correctness, (str, Mapping)):
            from grpo_rewards.registry import build_rewards

            object.__setattr__(self, "correctness", build_rewards([self.correctness])[0].function)

    @property
    def highest_pay(self) -> float:
        """Pay of the shortest right completion of its group."""
        return 0.5

    @property
    def asks(self) -> tuple[Any, ...]:
        """Reward that tells right from wrong."""
        return (self.correctness,)

    def __call__(
        self,
        prompts: Any = None,
        completions: Sequence[Any] = (),
        *,
        completion_ids: Sequence[Sequence[int]] | None = None,
        log_extra: Any = None,
        log_metric: Any = None,
        log_reason: LogColumn = None,
        **columns: Any,
    ) -> list[float | None]:
        """Score whole groups.

        Raises:
            ValueError: `num_generations` is not known, or the call does not hold whole groups.
        """
        check_rows(self.name, prompts=prompts, completions=completions)
        groups = prompt_groups(self.name, prompts, self.num_generations)
        lengths = [len(ids) for ids in completion_ids or map(completion_text, completions)]
        assert callable(self.correctness)
        correct = self.correctness(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        rewards: list[float | None] = []
        reasons: list[str] = []
        for group in groups:
            rewards += _group_rewards(lengths[group], correct[group])
            reasons += _reasons(lengths[group], correct[group])
        if log_reason is not None:
            log_reason("reason", reasons)
        return rewards


def _group_rewards(lengths: Sequence[int], correct: Sequence[float | None]) -> list[float | None]:
    shortest, longest = min(lengths), max(lengths)
    span = longest - shortest
    rewards: list[float | None] = []
    for length, score in zip(lengths, correct, strict=True):
        if score is None:
            rewards.append(None)
            continue
        saving = 0.5 - (length - shortest) / span if span else 0.0
        rewards.append(saving if score > 0 else min(0.0, saving))
    return rewards


def _reasons(lengths: Sequence[int], correct: Sequence[float | None]) -> list[str]:
    among = f"in a group of {min(lengths)} to {max(lengths)}"
    judged = ("not scored" if score is None else "right" if score > 0 else "wrong" for score in correct)
    return [f"{said}, length {length} {among}" for said, length in zip(judged, lengths, strict=True)]


group_length = GroupLength()
