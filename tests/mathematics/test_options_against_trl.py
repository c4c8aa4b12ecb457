"""TRL's optional terms compared with the oracle: masks, reweighting, entropy bonus, router loss, log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.mathematics import oracle
from tests.mathematics.conftest import ScenarioFactory
from tests.mathematics.harness import (
    EOS,
    PAD,
    Scenario,
    compare,
    difference,
    load_policy,
    make_trainer,
    token_lists,
    trl_losses,
)
from tests.mathematics.oracle import LOSS_TYPES, Completion, Geometry, Objective
from tests.mathematics.test_loss_against_trl import check
from tests.support.grids import covering

ON_POLICY = Geometry(1, 1, 1)
ACCUMULATED = Geometry(2, 4, 1)
OFF_POLICY = Geometry(1, 1, 3)

OPTIONS: list[dict[str, Any]] = [
    {"top_entropy_quantile": 0.4},
    {"entropy_coef": 0.05},
    {"top_entropy_quantile": 0.4, "entropy_coef": 0.05},
    {"off_policy_mask_threshold": 0.05},
    {"epsilon": 0.1, "epsilon_high": 0.3, "sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.3},
    {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.0},
]


@pytest.mark.slow  # as all tests of TRL's code alone that take seconds
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    ("loss_type", "options"),
    # In reverse order, which pairs the last losses with their own options.
    covering(LOSS_TYPES[::-1], OPTIONS[::-1], rest=pytest.mark.nightly),
    ids=lambda value: " ".join(value) if isinstance(value, dict) else value,
)
def test_options(loss_type: str, options: dict[str, Any], scenario: ScenarioFactory, record_cell: Callable) -> None:
    for geometry in (ACCUMULATED, OFF_POLICY):
        objective = Objective(loss_type, beta=0.04, **options)
        found = compare(scenario(geometry), objective)
        check(found, torch.float64, (geometry, objective))
        record_cell("TRL's options in float64", found)


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
def test_the_off_policy_mask_drops_some_completions(scenario: ScenarioFactory) -> None:
    rows = scenario(OFF_POLICY).rows(2)[1][0]
    kept = [oracle.is_kept_off_policy(row, 0.05) for row in rows]
    assert not all(kept)
    assert any(kept[i] for i, row in enumerate(rows) if row.advantage < 0)


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_truncated_completions_are_masked(loss_type: str, checkpoint: Path, record_cell: Callable) -> None:
    case = Scenario(checkpoint, ACCUMULATED, torch.float64, mask_truncated_completions=True)

    def masked(rows: list[Completion]) -> list[Completion]:
        return [replace(row, counted=[row.tokens[-1] == EOS] * len(row.tokens)) for row in rows]

    objective = Objective(loss_type, beta=0.04)
    found = compare(case, objective, rows=masked)
    check(found, torch.float64, objective)
    record_cell("TRL's options in float64", found)


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("loss_type", "level"), covering(LOSS_TYPES, ["token", "sequence"]))
def test_tool_tokens_are_masked(loss_type: str, level: str, scenario: ScenarioFactory, record_cell: Callable) -> None:
    def by_tool(position: int) -> bool:
        return position % 3 == 1

    def rows(batch: list[Completion]) -> list[Completion]:
        return [replace(row, counted=[not by_tool(t) for t in range(len(row.tokens))]) for row in batch]

    def inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        width = batch["completion_ids"].shape[1]
        mask = torch.tensor([int(not by_tool(t)) for t in range(width)]).expand_as(batch["completion_ids"])
        tokens = sum(row.length for row in rows(scenario(OFF_POLICY).rows(0)[1][0]))
        return {**batch, "tool_mask": mask, "num_items_in_batch": torch.tensor(tokens)}

    objective = Objective(loss_type, level, beta=0.04)
    found = compare(scenario(OFF_POLICY), objective, rows=rows, inputs=inputs)
    check(found, torch.float64, objective)
    record_cell("TRL's options in float64", found)


MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


class Engine:
    """Replacement for vLLM: completions of a scenario with slightly wrong log-probabilities, one of them unknown."""

    def __init__(self, checkpoint: Path, scenario: Scenario, mode: str, low: float | None, high: float | None) -> None:
        self.pairs = scenario.pairs
        self.trainer = make_trainer(
            checkpoint,
            torch.float64,
            beta=0.04,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=low,
            vllm_importance_sampling_clip_max=high,
        )
        self.trainer.use_vllm = True
        self.trainer._last_loaded_step = self.trainer.state.global_step
        self.trainer.rollout_func = self.rollout
        self.trainer.model.train()
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.ref_model.load_state_dict(scenario.reference)

    def log_probs(self, tokens: list[int]) -> list[float | None]:
        """Return the engine's log-probabilities, which depend on the token and its place, or None."""
        return [None if t == 2 else -1.5 - 0.3 * ((3 * token + t) % 5) for t, token in enumerate(tokens)]

    def rollout(self, prompts: list[str], _: Any) -> dict[str, Any]:
        completions = [tokens for _, tokens in self.pairs]
        return {
            "prompt_ids": [prompt for prompt, _ in self.pairs],
            "completion_ids": completions,
            "logprobs": [self.log_probs(tokens) for tokens in completions],
        }

    def inputs(self) -> dict[str, Tensor]:
        """Return TRL's scored generation batch."""
        return self.trainer._generate_and_score_completions([{"prompt": "1 2"}] * len(self.pairs))


def with_sampler(engine: Engine, rows: list[Completion], mode: str, low: float | None, high: float | None) -> None:
    """Add to each row the engine's log-probabilities and the oracle's weights for them."""
    for row in rows:
        reported = [math.nan if value is None else value for value in engine.log_probs(row.tokens)]
        row.old = row.log_probs.detach()
        row.sampler = torch.tensor(reported)
        row.sampler_weight = oracle.sampler_weight(row.old, row.sampler, mode, low, high, row.counted)


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("low", "high"), [(None, 1.5), (0.5, None), (0.7, 2.0)])
@pytest.mark.parametrize("mode", MODES)
def test_sampler_weights(
    mode: str, low: float | None, high: float | None, checkpoint: Path, scenario: ScenarioFactory
) -> None:
    case = scenario(ON_POLICY)
    engine = Engine(checkpoint, case, mode, low, high)
    inputs = engine.inputs()
    rows = {(*row.prompt, -1, *row.tokens): replace(row) for batch in case.rows(0)[1] for row in batch}
    with_sampler(engine, list(rows.values()), mode, low, high)
    for (prompt, tokens), weights in zip(token_lists(inputs), inputs["importance_sampling_ratio"], strict=True):
        expected = rows[(*prompt, -1, *tokens)].sampler_weight
        assert torch.allclose(weights[: len(tokens)], expected, rtol=0, atol=1e-10)
        assert weights.shape == ((1,) if mode.startswith("sequence") else (8,))


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("loss_type", "mode"), covering(LOSS_TYPES, MODES, rest=pytest.mark.nightly))
def test_loss_with_sampler_weights(
    loss_type: str, mode: str, checkpoint: Path, scenario: ScenarioFactory, record_cell: Callable
) -> None:
    case = scenario(ON_POLICY)
    engine = Engine(checkpoint, case, mode, 0.5, 2.0)
    objective = Objective(loss_type, beta=0.04, off_policy_mask_threshold=0.1)
    trainer = engine.trainer
    trainer.loss_type, trainer.off_policy_mask_threshold = loss_type, 0.1
    losses = trl_losses(trainer, [engine.inputs()])
    policy, (batch,) = case.rows(0)
    rows = [replace(row) for row in batch]
    with_sampler(engine, rows, mode, 0.5, 2.0)
    loss = oracle.micro_batch_loss(rows, objective, ON_POLICY, case.generation_tokens)
    found = difference(policy, [loss], trainer.model, losses)
    check(found, torch.float64, objective)
    record_cell("TRL's options in float64", found)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_router_loss(loss_type: str, checkpoint: Path) -> None:
    """The router loss is compared in float32, because the matrix product of the experts has no float64."""
    accumulation, coefficient = 2, 0.5
    trainer = make_trainer(checkpoint / "experts", torch.float32, loss_type=loss_type)
    assert trainer.router_aux_loss_coef == coefficient
    trainer.current_gradient_accumulation_steps = accumulation
    trainer.model.train()
    torch.manual_seed(39)
    inputs = trainer._prepare_inputs([{"prompt": p} for p in ("1 2", "3 4 5") for _ in range(4)])
    (with_it,) = trl_losses(trainer, [inputs])
    gradients = {name: parameter.grad.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.aux_loss_enabled = False
    (without,) = trl_losses(trainer, [inputs])

    model = load_policy(checkpoint / "experts", torch.float32)
    expected = coefficient / accumulation * router_loss(model, inputs)
    assert with_it - without == pytest.approx(expected.item(), abs=1e-6)
    expected.backward()
    for name, parameter in model.named_parameters():
        ours = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        theirs = gradients[name] - trainer.model.get_parameter(name).grad
        assert (ours - theirs).abs().max() <= 1e-5 * gradients[name].abs().max() + 1e-12, name


def router_loss(model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the load-balancing loss from the router logits of each row alone, without padding."""
    logits = [
        model(input_ids=torch.tensor([[*prompt, *tokens]]), output_router_logits=True).router_logits
        for prompt, tokens in token_lists(inputs)
    ]
    by_layer = [torch.cat(layer) for layer in zip(*logits, strict=True)]
    return oracle.load_balancing_loss(by_layer, top_k=2)


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_log_probabilities_and_masks_of_the_scoring_path(temperature: float, scenario: ScenarioFactory) -> None:
    case = scenario(OFF_POLICY, temperature)
    (inputs,) = case.steps[0].inputs
    assert inputs["num_items_in_batch"].item() == case.generation_tokens
    rows = case.rows(0)[1][0]
    for index, row in enumerate(rows):
        length = len(row.tokens)
        assert inputs["completion_mask"][index].tolist() == [1] * length + [0] * (8 - length)
        assert set(inputs["completion_ids"][index][length:].tolist()) <= {PAD}
        assert inputs["advantages"][index].item() == pytest.approx(row.advantage, abs=1e-10)
        for name, expected in (("old_per_token_logps", row.old), ("ref_per_token_logps", row.reference)):
            assert torch.allclose(inputs[name][index, :length], expected, rtol=0, atol=1e-10), name


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
def test_old_log_probabilities_are_kept_exactly_when_the_policy_moves(scenario: ScenarioFactory) -> None:
    for geometry in (Geometry(1, 1, 1), Geometry(2, 2, 1), Geometry(2, 4, 1), Geometry(1, 1, 3), Geometry(4, 2, 2)):
        inputs = scenario(geometry).steps[0].inputs[0]
        assert ("old_per_token_logps" in inputs) == geometry.needs_old_log_probs, geometry


def test_completions_end_with_their_first_eos(checkpoint: Path) -> None:
    trainer = make_trainer(checkpoint, torch.float32)
    generate, sampled = trainer.model.generate, []

    def remembering(*args: Any, **kwargs: Any) -> Tensor:
        sampled.append(generate(*args, **kwargs))
        return sampled[-1]

    trainer.model.generate = remembering
    torch.manual_seed(39)
    prompts = [[3, 4, 5]] * 8
    completions, _ = trainer._generate_single_turn(prompts, None, {}, 4)
    expected = [oracle.until_end(row[3:], (EOS,)) for row in sampled[0].tolist()]
    assert any(row[-1] == EOS and len(row) < 8 for row in expected)
    assert completions == expected


def test_the_tokenizer_is_kept_in_a_round_trip(checkpoint: Path) -> None:
    trainer = make_trainer(checkpoint, torch.float32)
    assert trainer.processing_class("1 2 3")["input_ids"] == [3, 4, 5]
    assert load_policy(checkpoint, torch.float32).config.vocab_size == len(trainer.processing_class)
