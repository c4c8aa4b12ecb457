"""A length reward that compares the completions of one group. TRL's own length rewards work by their dotted paths.

With L = 0.5 - (length - shortest) / (longest - shortest) over the group:

| completion | pay |
|---|---|
| correct | L, from 0.5 for the shortest of its group to -0.5 for the longest |
| wrong | min(0, L): a short wrong answer earns nothing |
| all of its group equally long | 0 |
| correctness is unknown (None) | None |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_rewards.completions import check_rows, completion_text, prompt_groups
from grpo_rewards.math.correctness import gsm8k_correctness
from grpo_rewards.reward import BaseReward, Kind, Scored, check_count


@dataclass(frozen=True)
class GroupLength(BaseReward):
    """Length reward of Kimi k1.5, within the group of one prompt.

    With L = 0.5 - (length - shortest) / (longest - shortest) over the group:

    | completion | pay |
    |---|---|
    | correct | L, from 0.5 for the shortest of its group to -0.5 for the longest |
    | wrong | min(0, L): a short wrong answer earns nothing |
    | all of its group equally long | 0 |
    | correctness is unknown (None) | None |

    Source: Kimi k1.5 (arXiv 2501.12599), section 2.3.3. The length is in tokens if the trainer passes `completion_ids`,
    otherwise in characters. open-r1's version compares all completions of the batch instead of the group.

    Args:
        num_generations: number of completions per prompt; a recipe fills it in.
        correctness: reward that pays more than 0 for a correct completion; in a recipe, its spec.
        name: name of the reward in logs.
    """

    needs_whole_groups: ClassVar[bool] = True
    kind: ClassVar[Kind] = "length"
    reward_fields: ClassVar[tuple[str, ...]] = ("correctness",)

    num_generations: int | None = None
    correctness: Callable[..., Any] = gsm8k_correctness
    name: str = "group_length"

    def __post_init__(self) -> None:
        if self.num_generations is not None:
            check_count(self.num_generations, "num_generations")

    @property
    def highest_pay(self) -> float:
        """Pay of the shortest completion of its group, if correct."""
        return 0.5

    @property
    def consulted(self) -> tuple[Any, ...]:
        """Reward that decides if a completion is correct."""
        return (self.correctness,)

    def _scored(self, prompts: Any, completions: Sequence[Any], columns: Mapping[str, Any]) -> Scored:
        check_rows(self.name, prompts=prompts, completions=completions)
        groups = prompt_groups(self.name, prompts, self.num_generations)
        lengths = [len(ids) for ids in columns.get("completion_ids") or map(completion_text, completions)]
        correct = self.correctness(prompts=prompts, completions=completions, **columns)
        rewards: list[float | None] = []
        reasons: list[str] = []
        for group in groups:
            shortest, longest = min(lengths[group]), max(lengths[group])
            for length, score in zip(lengths[group], correct[group], strict=True):
                saving = 0.5 - (length - shortest) / (longest - shortest) if longest > shortest else 0.0
                reward: float | None = None
                judged = "not scored"
                if score is not None:
                    reward, judged = (saving, "right") if score > 0 else (min(0.0, saving), "wrong")
                rewards.append(reward)
                reasons.append(f"{judged}, length {length} in a group of {shortest} to {longest}")
        return Scored(rewards, reasons=reasons)


group_length = GroupLength()
