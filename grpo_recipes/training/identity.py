"""Identity of a trainer that a script has built: where its weights come from, and what its steps read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import PeftModel
from torch import nn

from grpo_recipes.data.hub import hub_commit
from grpo_recipes.recipe.specs import ReferenceSpec
from grpo_recipes.runs.identity import Identity, Source, identify, loaded_source, reward_models
from grpo_recipes.runs.weights import ADAPTER_CONFIG
from grpo_rewards.registry import BuiltReward


def starting_weights(given: Any, model: nn.Module, reference: Any) -> dict[str, Source]:
    """Return where the weights of a policy and its reference come from, by role.

    Args:
        given: the trainer's `model` argument, a name or a model.
        model: the model that the trainer made of it.
        reference: the trainer's `reference` argument.
    """
    loaded = loaded_source(model.get_base_model() if isinstance(model, PeftModel) else model)
    sources = {"policy": loaded}
    if isinstance(given, PeftModel):
        # PEFT keeps no path of an adapter.
        sources = {"policy": Source(""), "base": loaded}
    elif isinstance(given, str) and (Path(given) / ADAPTER_CONFIG).is_file():
        sources = {"policy": Source(given), "base": loaded}
    if reference is not None and (adapter := ReferenceSpec.parse(reference).adapter) is not None:
        sources["reference"] = Source(adapter)
    return sources


def identity_of(trainer: Any, sources: Mapping[str, Source]) -> Identity:
    """Return the identity of the launch that begins with a trainer's `train`."""
    rewards = []
    for function, name in zip(trainer.reward_funcs, trainer.reward_func_names, strict=True):
        rewards.append(BuiltReward(function, 1.0, name))
    sources = {**sources, **reward_models(rewards, hub_commit)}
    # A rollout function or an environment may read any column.
    reads_rows = trainer.rollout_func is not None or bool(getattr(trainer, "environment_factories", None))
    return identify(trainer.train_dataset, rewards, sources, all_columns=reads_rows)
