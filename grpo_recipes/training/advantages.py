"""Published rules for advantages that TRL's options cannot express, one function each: the recipe's key `advantages`.

A rule gets the rewards of complete groups, gathered over all ranks as TRL gathers them, so no rank needs a complete
group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_recipes.recipe.specs import AdvantageRule


def max_rl(rewards: Tensor) -> Tensor:
    """Return MaxRL's advantages (R - m) / m, with m the mean reward of the group (arXiv 2602.02710).

    A group without a success has m = 0 and advantage 0. The paper assumes rewards that are never negative: with rewards
    0 and 1, a group of G completions estimates the gradient of the likelihood of a right answer to order G - 1.

    Args:
        rewards: total reward of each completion, (P, G), NaN where no reward function scored it.

    Returns:
        The advantages, (P, G), 0 where the reward is NaN.

    Raises:
        ValueError: a reward is negative.
    """
    if (rewards < 0).any():
        raise ValueError(
            f"`advantages: max_rl` divides by a group's mean reward, and a completion's total reward is "
            f"{rewards.nan_to_num().min().item():g}: use rewards and weights that are never negative"
        )
    mean = rewards.nanmean(dim=1, keepdim=True)
    # A zero mean means that every reward of the group is 0, so 0 / 1 gives the advantage 0.
    return ((rewards - mean) / torch.where(mean == 0, 1.0, mean)).nan_to_num(nan=0.0)


def compute_advantages(rule: AdvantageRule, rewards: Tensor, weights: Tensor, num_generations: int) -> Tensor:
    """Return the advantages of all completions by a rule, (B * G,), in the order of the rewards.

    Args:
        rule: name of the rule.
        rewards: gathered rewards, (B * G, functions), NaN where a function returned None.
        weights: weight of each function, (functions,).
        num_generations: completions per prompt, G.
    """
    # As TRL's own sum: a function that returned None adds nothing, and a row without any score stays NaN.
    total = (rewards * weights.to(rewards.device)).nansum(dim=1)
    total[rewards.isnan().all(dim=1)] = torch.nan
    rules = {"max_rl": max_rl}
    return rules[rule](total.view(-1, num_generations)).flatten()
