"""A step or weights that are NaN or infinite: named at once and never saved, without a wait for the device."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState

from grpo_recipes import GRPOTrainer
from grpo_recipes.evaluation.saved_model import SavedModel
from grpo_recipes.generation.models import nonfinite_weights
from grpo_recipes.process.faults import NotFinite
from grpo_recipes.training.finite import FiniteSteps
from tests.support import short_runs
from tests.support.errors import refused
from tests.support.tiny import save_policy

DOWN = "model.layers.0.mlp.down_proj.weight"


class SpoilWeights(TrainerCallback):
    """Writes a NaN into the weights at the end of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: TrainerState, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.step:
            with torch.no_grad():
                model.get_parameter(DOWN)[0, 0] = math.nan


def trainer(tmp_path: Path, check: bool = True, rewards: Any = short_runs.reward, **changes: Any) -> GRPOTrainer:
    values = {"max_steps": 3, "beta": 0.0, "learning_rate": 1e-4, "max_completion_length": 2, **changes}
    args = short_runs.arguments(tmp_path / "run", **values)
    policy = str(save_policy(tmp_path / "policy", num_hidden_layers=1))
    more = {"micro_batching": "off", "generation_check": check, "rewards": rewards}
    made: Any = short_runs.trainer(GRPOTrainer, policy, args, **more)
    return cast(GRPOTrainer, made)


def saved(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))


def test_a_gradient_that_is_not_finite_ends_the_run_at_its_step(tmp_path: Path) -> None:
    run = trainer(tmp_path, check=False, save_strategy="steps", save_steps=1)

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        return gradient * math.nan if run.state.global_step == 1 else gradient

    run.model.get_parameter(DOWN).register_hook(spoil)
    with pytest.raises(NotFinite, match="^step 2: the gradient norm .*`learning_rate`"):
        run.train()
    assert saved(tmp_path) == ["checkpoint-1"]


@pytest.mark.parametrize(
    ("step", "changes", "message"),
    [
        (2, {"save_strategy": "steps", "save_steps": 1}, f"^step 2: .* not saved, .* 1 .*{DOWN}"),
        (3, {}, f"^step 3: .* not saved, .* 1 .*{DOWN}"),  # `save_model` would write them
        (1, {}, f"^step 2: .*log-probabilities are NaN, .* 1 .*{DOWN}"),
    ],
)
def test_weights_that_are_not_finite_are_named_and_not_saved(
    step: int, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    run = trainer(tmp_path, **changes)
    run.add_callback(SpoilWeights(step))
    with pytest.raises(NotFinite, match=message):
        run.train()
    assert saved(tmp_path) == (["checkpoint-1"] if changes else [])


def test_a_policy_that_is_not_finite_is_neither_trained_nor_evaluated(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    with torch.no_grad():
        run.model.get_parameter(DOWN)[1, 1] = math.inf
    with refused("policy", "1 of its weights", DOWN):
        run.train()
    run.save_model(str(tmp_path / "spoilt"))
    with refused("spoilt", "1 of its weights", DOWN):
        SavedModel(str(tmp_path / "spoilt")).load()


def test_a_reward_too_large_for_advantages_is_named(tmp_path: Path) -> None:
    def boundless(completions: list[str], **kwargs: Any) -> list[float | None]:
        return [None, 0.0, *(1e30 for _ in completions[2:])]

    with pytest.raises(NotFinite, match=r"^step 1: .*boundless .* 1e\+30"):
        trainer(tmp_path, rewards=boundless).train()


class Steps:
    """A `FiniteSteps` of a trainer with two ranks, the other of which has finite values."""

    def __init__(self) -> None:
        self.reads = 0
        self.accelerator = SimpleNamespace(device=torch.device("cpu"), reduce=self.reduce)
        trainer: Any = SimpleNamespace(accelerator=self.accelerator, model=nn.Linear(2, 2))
        self.checked = FiniteSteps(trainer)

    def reduce(self, values: torch.Tensor) -> torch.Tensor:
        self.reads += 1
        return values

    def step(self, number: int, loss: float, norm: float, *, skips: str = "", logs: bool = False) -> None:
        self.checked.add_loss(torch.tensor(0.5))
        self.checked.add_loss(torch.tensor(loss))
        self.checked.norm = torch.tensor(norm)
        self.accelerator.optimizer_step_was_skipped, self.accelerator.mixed_precision = bool(skips), skips or "bf16"
        control = TrainerControl(should_log=logs)
        self.checked.on_step_end(None, TrainerState(global_step=number), control)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss", "norm", "skips", "named"),
    [
        (math.inf, 1.0, "", "the loss"),
        (1.0, math.nan, "", "the gradient norm"),
        (1.0, -1.0, "bf16", "the gradient norm"),  # DeepSpeed's mark of a norm that is not finite, and its skip
    ],
)
def test_values_are_read_only_with_the_log_and_name_the_first_step(
    loss: float, norm: float, skips: str, named: str
) -> None:
    steps = Steps()
    steps.step(1, 1.0, 1.0)
    steps.step(2, math.nan, math.inf, skips="fp16")  # loss scaling
    steps.step(3, loss, norm, skips=skips)
    steps.step(4, math.nan, math.nan)
    assert steps.reads == 0
    with pytest.raises(NotFinite, match=f"^step 3: {named} .* still finite"):
        steps.step(5, 1.0, 1.0, logs=True)
    assert steps.reads == 1


def test_only_the_part_of_a_rank_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed leaves the end of the last rank's part as it was in memory."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    model = nn.Linear(1, 1, bias=False)
    weight: Any = model.weight
    weight.ds_tensor, weight.ds_numel = torch.tensor([1.0, 2.0, math.nan, math.inf]), 6
    weight.ds_process_group = None
    assert nonfinite_weights(model) == []
    weight.ds_numel = 7
    assert nonfinite_weights(model) == ["weight"]
