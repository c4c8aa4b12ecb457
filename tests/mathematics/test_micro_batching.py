"""Loss and gradient of regrouped and packed micro-batches, compared with the oracle cell by cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_recipes import GRPOTrainer
from grpo_recipes.recipe.specs import MicroBatching
from grpo_recipes.training import micro_batches
from grpo_recipes.training.step_plan import PLAN
from tests.mathematics import oracle
from tests.mathematics.conftest import ScenarioFactory
from tests.mathematics.harness import Difference, Scenario, difference, make_trainer, trl_losses
from tests.mathematics.oracle import LOSS_TYPES, Completion, Objective
from tests.mathematics.test_loss_against_trl import LIMIT, LOSS_LIMIT, cells
from tests.support.grids import covering

# Value of `micro_batching`, True if the rows of the first prompt have zero advantage, and True if tools have written
# tokens of the completions.
CASES = {
    "packed": ("auto", False, False),
    "packed, half of the groups at zero advantage": ("auto", True, False),
    "trimmed, half of the groups at zero advantage": ({"layout": "trimmed"}, True, False),
    "packed, with tool tokens": ("auto", False, True),
    "packed, half of the groups at zero advantage, with tool tokens": ("auto", True, True),
    "trimmed, with tool tokens": ({"layout": "trimmed"}, True, True),
}


VESPO_LOSS_LIMIT = 2e-6
"""Largest difference of VESPO's loss in float32. Its weight is the product of all ratios, whose rounding adds up."""


def by_policy(tokens: Sequence[int]) -> list[bool]:
    """Return True for each token of a completion that the policy wrote. The others differ from row to row."""
    return [place == 0 or (place + tokens[0]) % 3 > 0 for place in range(len(tokens))]


def with_tool_mask(inputs: dict[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """Return the micro-batch with TRL's mask of tool tokens and number of tokens in the loss."""
    masks = [by_policy(row) for row in inputs["completion_ids"].tolist()]
    return {**inputs, "tool_mask": torch.tensor(masks).long(), "num_items_in_batch": torch.tensor(tokens)}


def with_tool_tokens(row: Completion) -> Completion:
    """Return the oracle's row without its tool tokens in the loss."""
    return replace(row, counted=by_policy(row.tokens))


def without_advantage(inputs: dict[str, Tensor], prompt: Tensor) -> dict[str, Tensor]:
    """Return the micro-batch with the advantages of one prompt's rows set to 0."""
    same = (inputs["prompt_ids"] == prompt).all(1)
    return {**inputs, "advantages": inputs["advantages"].masked_fill(same, 0.0)}


def deal(trainer: GRPOTrainer, scenario: Scenario, buffer: list[dict[str, Tensor]]) -> list[dict[str, Any]]:
    """Return the buffer as our `_prepare_inputs` regroups it."""
    first = micro_batches.as_rows(buffer[0])
    layout = trainer._log_probs.layout(trainer.model, first, len(first.input_ids))
    assert layout is micro_batches.asked_layout(trainer.micro_batching)
    window = micro_batches.window_size(scenario.geometry.steps_per_generation, scenario.geometry.accumulation)
    regrouped = micro_batches.regroup(buffer, window, layout, trainer._exact)
    return [{**batch, PLAN: trainer._log_probs.plan(trainer.model, rows, layout)} for batch, rows in regrouped]


def compare(scenario: Scenario, objective: Objective, micro_batching: Any, zero: bool, tools: bool) -> Difference:
    """Compare our trainer with the oracle on every optimizer step of the scenario."""
    keys = {key: value for key, value in asdict(objective).items() if key != "max_completion_length"}
    config = {**scenario.config, **keys}
    trainer = make_trainer(scenario.checkpoint, scenario.dtype, trainer=GRPOTrainer, **config)
    trainer.micro_batching = MicroBatching.parse(micro_batching)
    trainer._log_probs.wanted = micro_batches.asked_layout(trainer.micro_batching)
    trainer.current_gradient_accumulation_steps = scenario.geometry.accumulation
    trainer.model.train()
    size = scenario.geometry.steps_per_generation
    buffer = [inputs for step in scenario.steps for inputs in step.inputs][:size]
    prompt = buffer[0]["prompt_ids"][0]
    token_ids = prompt[buffer[0]["prompt_mask"][0].bool()].tolist()
    if zero:
        buffer = [without_advantage(inputs, prompt) for inputs in buffer]
    tokens = scenario.generation_tokens
    if tools:
        tokens = sum(sum(by_policy(completion)) for _, completion in scenario.pairs)
        buffer = [with_tool_mask(inputs, tokens) for inputs in buffer]
    dealt = deal(trainer, scenario, buffer)
    result = Difference()
    for index, step in enumerate(scenario.steps):
        trainer.model.load_state_dict(step.policy)
        start = index * scenario.geometry.accumulation
        turns = range(start, start + scenario.geometry.accumulation)
        losses = trl_losses(trainer, [dealt[turn % size] for turn in turns])
        policy, batches = scenario.rows(index)
        ours = [[with_advantage(row, token_ids if zero else None) for row in batch] for batch in batches]
        if tools:
            ours = [[with_tool_tokens(row) for row in batch] for batch in ours]
        expected = [oracle.micro_batch_loss(batch, objective, scenario.geometry, tokens) for batch in ours]
        result.widen(difference(policy, [sum(expected)], trainer.model, [sum(losses)]))
    return result


def with_advantage(row: Completion, without: list[int] | None) -> Completion:
    """Return the oracle's row, with advantage 0 if it answers the prompt `without`."""
    return replace(row, advantage=0.0) if row.prompt == without else row


@pytest.mark.slow
@pytest.mark.parametrize(("loss_type", "case"), covering(LOSS_TYPES, CASES, rest=pytest.mark.nightly))
@pytest.mark.parametrize("every", [48, pytest.param(24, marks=pytest.mark.nightly)])
def test_float32_cells(loss_type: str, case: str, every: int, scenario: ScenarioFactory, record_cell: Callable) -> None:
    for geometry, objective in cells(loss_type, every):
        found = compare(scenario(geometry, objective.temperature, torch.float32), objective, *CASES[case])
        limit = VESPO_LOSS_LIMIT if loss_type == "vespo" else LOSS_LIMIT[torch.float32]
        assert found.loss <= limit, (geometry, objective, found)
        assert found.gradient <= LIMIT[torch.float32], (geometry, objective, found)
        record_cell("micro-batching in float32", found)


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("loss_type", "case"), covering(LOSS_TYPES, CASES, rest=pytest.mark.nightly))
@pytest.mark.parametrize("every", [24, pytest.param(4, marks=pytest.mark.nightly)])
def test_float64_cells(loss_type: str, case: str, every: int, scenario: ScenarioFactory, record_cell: Callable) -> None:
    for geometry, objective in cells(loss_type, every):
        found = compare(scenario(geometry, objective.temperature, torch.float64), objective, *CASES[case])
        assert found.loss <= LOSS_LIMIT[torch.float64], (geometry, objective, found)
        assert found.gradient <= LIMIT[torch.float64], (geometry, objective, found)
        record_cell("micro-batching in float64", found)
