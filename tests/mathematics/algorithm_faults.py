"""Faults planted in the recipes of recipes/algorithms, in TRL and in our code, which the comparison must find."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trl import GRPOTrainer

import grpo_recipes
from grpo_recipes.recipe.recipe import Recipe
from grpo_recipes.training import advantages
from tests.mathematics.algorithms import Held, Layout, hold
from tests.mathematics.harness import edited

LOSS = (GRPOTrainer, "_compute_loss")
SCORE = (GRPOTrainer, "_generate_and_score_completions")
MAX_RL = (advantages, "max_rl")
RULE = (grpo_recipes.GRPOTrainer, "_generate_with_advantages")
LIMIT = 1e-10


@dataclass(frozen=True)
class Fault:
    """A planted fault: a recipe with other keys, unchecked, or a function with one text replaced by another."""

    algorithm: str
    name: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    edit: tuple[tuple[Any, str], str, str] | None = None
    rewards: Any = None

    def plant(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the fault's keys."""
        changed = replace(recipe, training={**recipe.training, **self.keys})
        return changed if self.rewards is None else replace(changed, rewards=self.rewards(recipe.rewards))

    def found(self, checkpoint: Path) -> Held:
        """Return the differences of the faulty recipe from its paper."""
        # In the second update of a generation, the ratios differ from 1.
        layout = Layout(1, 1 if self.algorithm == "maxrl" else 2)
        with contextlib.ExitStack() as planted:
            if self.edit is not None:
                (owner, function), old, new = self.edit
                planted.enter_context(edited(owner, function, (old, new)))
            return hold(checkpoint, self.algorithm, layout, updates=2, edit=self.plant)


def _cache_of_4(rewards: list[Any]) -> list[Any]:
    return [rewards[0], {**rewards[1], "kwargs": {**rewards[1]["kwargs"], "soft_punish_cache": 4}}]


def _unpunished(rewards: list[Any]) -> list[Any]:
    return [rewards[0], {**rewards[1], "weight": 0.0}]


def _summed(rewards: list[Any]) -> list[Any]:
    return [{"name": "sum", "rewards": rewards}]


FAULTS: tuple[Fault, ...] = (
    Fault("grpo", "no division by the deviation", {"scale_rewards": "none"}),
    Fault("grpo", "the deviation of the batch", {"scale_rewards": "batch"}),
    Fault("grpo", "the KL times the ratio", {"use_bias_correction_kl": True}),
    Fault("grpo", "a tenth of the KL", {"beta": 0.004}),
    Fault("grpo", "another clip", {"epsilon": 0.1}),
    Fault("grpo", "a mean over tokens", {"loss_type": "dapo"}),
    Fault("grpo", "the KL of the reference", edit=(LOSS, "- (ref_per_token_logps - per_token_logps) - 1",
                                                   "+ (ref_per_token_logps - per_token_logps) - 1")),
    Fault("dr-grpo", "divided by the deviation", {"scale_rewards": "group"}),
    Fault("dr-grpo", "a mean over each completion", {"loss_type": "grpo"}),
    Fault("dr-grpo", "a mean over tokens", {"loss_type": "dapo"}),
    Fault("dr-grpo", "a KL term", {"beta": 0.04, "use_bias_correction_kl": False}),
    Fault("dr-grpo", "the batch's mean", edit=(SCORE, "advantages = rewards - mean_grouped_rewards",
                                               "advantages = rewards - torch.nanmean(rewards)")),
    Fault("dapo", "no higher clip", {"epsilon_high": 0.2}),
    Fault("dapo", "truncated completions trained on", {"mask_truncated_completions": False}),
    Fault("dapo", "a mean over each completion", {"loss_type": "grpo"}),
    Fault("dapo", "another length of the punishment", rewards=_cache_of_4),
    Fault("dapo", "no punishment", rewards=_unpunished),
    Fault("dapo", "the clips exchanged", edit=(LOSS, "1 - self.epsilon_low, 1 + self.epsilon_high)",
                                               "1 - self.epsilon_high, 1 + self.epsilon_low)")),
    Fault("gspo", "a ratio for each token", {"importance_sampling_level": "token"}),
    Fault("gspo", "the clip of tokens", {"epsilon": 0.2, "epsilon_high": 0.28}),
    Fault("gspo", "completions weighted by length", {"loss_type": "luspo"}),
    Fault("gspo", "a mean over tokens", {"loss_type": "dapo"}),
    Fault("gspo", "no root of the ratio", edit=(LOSS, "(log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)",
                                                "(log_ratio * mask).sum(-1)")),
    Fault("cispo", "no bound", {"epsilon_high": None}),
    Fault("cispo", "a width for a bound", {"epsilon_high": 0.28}),
    Fault("cispo", "the update clipped instead of the weight", {"loss_type": "dapo", "epsilon_high": 4.0}),
    Fault("cispo", "a gradient through the weight", edit=(LOSS, "max=self.epsilon_high).detach()",
                                                          "max=self.epsilon_high)")),
    Fault("sapo", "the temperatures exchanged", {"sapo_temperature_pos": 1.05, "sapo_temperature_neg": 1.0}),
    Fault("sapo", "a clip for the gate", {"loss_type": "grpo"}),
    Fault("sapo", "a gate on the whole completion", {"importance_sampling_level": "sequence"}),
    Fault("sapo", "the slope not normalized", edit=(LOSS, "* 4 / temperatures", "* 4")),
    Fault("gdpo", "the sum normalized", {"multi_objective_aggregation": "sum_then_normalize"}),
    Fault("gdpo", "one reward made of both", rewards=_summed),
    Fault("gdpo", "no normalization over the batch", edit=(
        SCORE, "(rewards - torch.nanmean(rewards)) / (std_rewards + 1e-4)", "rewards")),
    Fault("gdpo", "a mean over tokens", {"loss_type": "dapo"}),
    Fault("maxrl", "not divided by the mean", edit=(MAX_RL, "torch.where(mean == 0, 1.0, mean)", "1.0")),
    Fault("maxrl", "divided by the deviation too", edit=(
        MAX_RL, "torch.where(mean == 0, 1.0, mean)", "(mean + (mean == 0)) / (rewards.std(1, keepdim=True) + 1e-4)")),
    Fault("maxrl", "a mean over each completion", {"loss_type": "grpo"}),
    Fault("maxrl", "divided by the sum", edit=(MAX_RL, "rewards.nanmean(", "rewards.nansum(")),
    Fault("maxrl", "TRL's advantages", edit=(RULE, "self._advantage_rule is None", "True")),
)  # fmt: skip
