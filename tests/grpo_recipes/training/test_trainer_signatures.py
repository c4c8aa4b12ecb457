"""Methods of the trainer that replace TRL's: callers that leave an argument out get TRL's default."""

from __future__ import annotations

import inspect

import pytest
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer

OVERRIDES = sorted(
    name
    for name, method in vars(GRPOTrainer).items()
    if inspect.isfunction(method) and hasattr(TRLGRPOTrainer, name) and name != "__init__"
)


def test_the_seams_are_among_them() -> None:
    assert {"_get_per_token_logps_and_entropies", "compute_loss", "_generate_single_turn", "evaluate"} <= {*OVERRIDES}


@pytest.mark.parametrize("name", OVERRIDES)
def test_the_defaults_are_trls(name: str) -> None:
    ours = inspect.signature(getattr(GRPOTrainer, name)).parameters
    theirs = inspect.signature(getattr(TRLGRPOTrainer, name)).parameters
    for parameter in ours.keys() & theirs.keys():
        assert ours[parameter].default == theirs[parameter].default, parameter
