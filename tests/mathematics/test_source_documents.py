"""Formulas of the five source documents: the TRL settings that they equal, and their mistakes.

Each formula is written here as its document computes it: batched, with its padding and masks. The correct ones are
compared with TRL's trainer on the same rows. The others are shown to compute something else.
"""

from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer

from grpo_recipes.recipe.recipe import Recipe, parse_recipe
from tests.mathematics import oracle
from tests.mathematics.conftest import ScenarioFactory, SummaryLines
from tests.mathematics.harness import (
    NUM_GENERATIONS,
    Scenario,
    difference,
    float64_model,
    load_policy,
    make_trainer,
    moved,
    trl_losses,
)
from tests.mathematics.oracle import Geometry, Objective

ON_POLICY, OFF_POLICY = Geometry(1, 1, 1), Geometry(1, 1, 3)
EXACT = 1e-10


def log_probs(model: torch.nn.Module, inputs: dict[str, Tensor], masked: bool = True) -> Tensor:
    """Return the documents' per-token log-probabilities, (B, T): padded logits, unscaled, shifted by one, gathered."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    with float64_model():
        logits = model(input_ids=ids, attention_mask=mask if masked else None).logits
    width = inputs["completion_ids"].shape[1]
    shifted = torch.log_softmax(logits[:, :-1], dim=-1)[:, -width:]
    return shifted.gather(-1, ids[:, -width:, None]).squeeze(-1)


def sequence_mean(per_token: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    mask = inputs["completion_mask"]
    return ((per_token * mask).sum(1) / mask.sum(1)).mean()


def k3(reference: Tensor, policy: Tensor) -> Tensor:
    return torch.exp(reference - policy) - (reference - policy) - 1


def clipped_surrogate_loss(new: Tensor, inputs: dict[str, Tensor], epsilon: float, beta: float) -> Tensor:
    """Return `grpo_loss` of "GRPO from scratch"."""
    ratio = torch.exp(new - inputs["old_per_token_logps"])
    advantage = inputs["advantages"].unsqueeze(1)
    surrogate = torch.min(ratio * advantage, torch.clamp(ratio, 1 - epsilon, 1 + epsilon) * advantage)
    return -sequence_mean(surrogate - beta * k3(inputs["ref_per_token_logps"], new), inputs)


def on_policy_loss(new: Tensor, inputs: dict[str, Tensor], beta: float) -> Tensor:
    """Return the loss of MiniMind and open-r1, with the ratio p / sg(p) and no clip."""
    per_token = torch.exp(new - new.detach()) * inputs["advantages"].unsqueeze(1)
    return sequence_mean(-(per_token - beta * k3(inputs["ref_per_token_logps"], new)), inputs)


def assert_equals_trl(
    scenario: Scenario, step: int, loss: Tensor, policy: Any, objective: Objective, **config: Any
) -> None:
    """Assert that the document's loss and gradient equal TRL's on the same rows."""
    trainer = scenario.trainer(objective, **config)
    trainer.model.load_state_dict(scenario.steps[step].policy)
    losses = trl_losses(trainer, scenario.steps[step].inputs)
    found = difference(policy, [loss], trainer.model, losses)
    assert max(found.loss, found.gradient) <= EXACT


@pytest.mark.slow  # it runs none of our code
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("step", [0, 1, 2])
def test_grpo_from_scratch_loss_is_grpo_without_bias_correction(step: int, scenario: ScenarioFactory) -> None:
    case = scenario(OFF_POLICY)
    policy = case.model(case.steps[step].policy)
    (inputs,) = case.steps[step].inputs
    loss = clipped_surrogate_loss(log_probs(policy, inputs), inputs, epsilon=0.1, beta=0.04)
    objective = Objective("grpo", beta=0.04, use_bias_correction_kl=False, epsilon=0.1)
    assert_equals_trl(case, step, loss, policy, objective)


@pytest.mark.slow  # it runs none of our code
@pytest.mark.usefixtures("in_float64")
def test_grpo_from_scratch_undivided_accumulation_is_the_large_batch_times_the_number_of_batches(
    scenario: ScenarioFactory, summary: SummaryLines
) -> None:
    """The document calls backward on each of N batches without dividing by N."""
    case = scenario(ON_POLICY)
    policy = case.model(case.steps[0].policy)
    (large_batch,) = case.steps[0].inputs
    large_batch = {**large_batch, "old_per_token_logps": log_probs(policy, large_batch).detach()}
    parts = [
        {key: value[i : i + 2] if value.ndim else value for key, value in large_batch.items()} for i in (0, 2, 4, 6)
    ]
    weights = list(policy.parameters())

    def gradient(loss: Tensor) -> list[Tensor]:
        return torch.autograd.grad(loss, weights)

    large = gradient(clipped_surrogate_loss(log_probs(policy, large_batch), large_batch, 0.1, 0.04))
    undivided = gradient(sum(clipped_surrogate_loss(log_probs(policy, part), part, 0.1, 0.04) for part in parts))
    for ours, theirs in zip(large, undivided, strict=True):
        assert torch.allclose(theirs, len(parts) * ours, rtol=0, atol=1e-12)
    norm, norm_of_large = (math.sqrt(sum((g**2).sum().item() for g in gs)) for gs in (undivided, large))
    summary(
        f"GRPO from scratch, 4 batches accumulated: gradient norm {norm:.3f} undivided, "
        f"{norm_of_large:.3f} as a large batch; "
        f"its clip at 0.1 scales them by {min(1.0, 0.1 / norm):.3f} and {min(1.0, 0.1 / norm_of_large):.3f}"
    )


def test_grpo_from_scratch_adam_hides_a_constant_factor_and_makes_the_number_of_updates_decisive() -> None:
    """Undivided gradients make no larger steps under AdamW. 500 passes with accumulation 6 make only 83 updates."""
    moved = {}
    for factor in (1.0, 6.0):
        weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer = torch.optim.AdamW([weight], lr=5e-6)
        for step in range(4):
            weight.grad = factor * torch.tensor([1.0, -0.5, 0.1 * (step + 1)], dtype=torch.float64)
            optimizer.step()
        moved[factor] = weight.detach()
    assert torch.allclose(moved[1.0], moved[6.0], rtol=0, atol=1e-11)
    assert sum((step + 1) % 6 == 0 for step in range(500)) == 83


@pytest.fixture(scope="module")
def open_r1() -> Recipe:
    return parse_recipe(["--config", "open-r1-trl-0.15"])


def objective_of(recipe: Recipe) -> Objective:
    """Return the recipe's loss as the oracle's `Objective`."""
    values = vars(recipe.config)
    return Objective(**{field.name: values[field.name] for field in fields(Objective)})


@pytest.mark.usefixtures("in_float64")
def test_open_r1_recipe_reproduces_the_loss_of_trl_0_15(open_r1: Recipe, scenario: ScenarioFactory) -> None:
    case = scenario(ON_POLICY)
    policy = case.model(case.steps[0].policy)
    (inputs,) = case.steps[0].inputs
    loss = on_policy_loss(log_probs(policy, inputs), inputs, beta=0.04)
    objective = objective_of(open_r1)
    assert_equals_trl(case, 0, loss, policy, objective)
    (rows,) = case.rows(0)[1]
    ours = oracle.micro_batch_loss(rows, objective, ON_POLICY, case.generation_tokens)
    assert ours.item() == pytest.approx(loss.item(), abs=EXACT)


@pytest.mark.slow  # it runs none of our code
@pytest.mark.usefixtures("in_float64")
def test_open_r1_recipe_needs_each_of_its_settings(open_r1: Recipe, scenario: ScenarioFactory) -> None:
    """TRL's present defaults give another loss or gradient where the recipe differs from them."""
    case = scenario(ON_POLICY)
    policy = case.model(case.steps[0].policy)
    (inputs,) = case.steps[0].inputs
    loss = on_policy_loss(log_probs(policy, inputs), inputs, beta=0.04)
    wanted = objective_of(open_r1)
    for change in ({"loss_type": "dapo"}, {"beta": 0.0}, {"use_bias_correction_kl": True}, {"temperature": 0.8}):
        with pytest.raises(AssertionError):
            assert_equals_trl(case, 0, loss, policy, Objective(**{**vars(wanted), **change}))


@pytest.mark.usefixtures("in_float64")
def test_open_r1_recipe_does_not_reweight_what_vllm_sampled(open_r1: Recipe, checkpoint: Path) -> None:
    """With vLLM, TRL corrects for the engine's log-probabilities by default. TRL 0.15 had no such correction."""
    values = vars(open_r1.config)
    assert (values["use_vllm"], values["vllm_mode"]) == (True, "server")
    key = "vllm_importance_sampling_correction"
    for correction in (True, values[key]):
        trainer = make_trainer(checkpoint, torch.float64, **{key: correction})
        trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
        trainer.rollout_func = lambda prompts, _: {
            "prompt_ids": [[3, 4]] * len(prompts),
            "completion_ids": [[5, 6, 1]] * len(prompts),
            "logprobs": [[-1.0, -2.0, -0.5]] * len(prompts),
        }
        trainer.model.train()
        inputs = trainer._generate_and_score_completions([{"prompt": "1 2"}] * NUM_GENERATIONS)
        assert ("importance_sampling_ratio" in inputs) == correction
    assert correction is False


@pytest.mark.usefixtures("in_float64")
def test_open_r1_recipe_sums_two_weighted_rewards_into_group_advantages(
    open_r1: Recipe, scenario: ScenarioFactory
) -> None:
    built = open_r1.build_rewards()
    assert [(reward.name, reward.weight) for reward in built] == [("math_correctness", 1.0), ("tag_structure", 0.5)]
    rewards = torch.tensor([[n / 8, (3 * n % 4) / 4] for n in range(8)])
    total = (rewards * torch.tensor([reward.weight for reward in built])).sum(1).view(-1, NUM_GENERATIONS)
    document = (total - total.mean(1, keepdim=True)) / (total.std(1, keepdim=True) + 1e-4)
    ours = oracle.advantages(rewards.tolist(), [1.0, 0.5], NUM_GENERATIONS)
    assert ours == pytest.approx(document.flatten().tolist(), abs=1e-9)


def double_normalized(rewards: Tensor) -> Tensor:
    """Return MiniMind's advantage: the z-score in the group clamped to ±10, then a z-score over the batch."""
    grouped = rewards.view(-1, NUM_GENERATIONS)
    scores = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)).flatten()
    scores = scores.clamp(-10, 10)
    return (scores - scores.mean()) / (scores.std() + 1e-8)


@pytest.mark.usefixtures("in_float64")
def test_minimind_advantage_is_normalize_then_sum_of_one_reward() -> None:
    rewards = torch.tensor([0.1, 0.75, 2.0, -1.5, 0.3, 0.3, 0.9, 0.2])
    ours = oracle.advantages([[r] for r in rewards.tolist()], [1.0], NUM_GENERATIONS, aggregation="normalize_then_sum")
    gap = (double_normalized(rewards) - torch.tensor(ours)).abs().max().item()
    assert 0 < gap < 2e-4, "equal up to the second epsilon, 1e-8 there and 1e-4 in TRL"


def test_minimind_clamp_never_acts() -> None:
    """A z-score with the sample deviation is at most (G - 1) / sqrt(G), which is 2.47 for groups of 8."""
    one_apart = [[1.0]] + [[0.0]] * 7
    assert max(oracle.advantages(one_apart, [1.0], 8)) == pytest.approx(7 / math.sqrt(8), abs=1e-2)


@pytest.mark.slow  # it runs none of our code
@pytest.mark.usefixtures("in_float64")
def test_minimind_loss_is_grpo_but_for_temperature_and_padding(
    scenario: ScenarioFactory, summary: SummaryLines
) -> None:
    """MiniMind samples at temperature 0.8, scores at 1, and lets tokens attend to the left padding."""
    case = scenario(ON_POLICY)
    policy = case.model(case.steps[0].policy)
    (inputs,) = case.steps[0].inputs
    objective = Objective("grpo", beta=0.02, use_bias_correction_kl=False)
    assert_equals_trl(case, 0, on_policy_loss(log_probs(policy, inputs), inputs, 0.02), policy, objective)
    unmasked = log_probs(policy, inputs, masked=False)
    mask = inputs["completion_mask"].bool()
    padded = inputs["prompt_mask"].min(1).values == 0
    shift = (unmasked - log_probs(policy, inputs))[mask & padded.unsqueeze(1)].abs().max().item()
    summary(f"MiniMind: attending to the left padding moves a token's log-probability by up to {shift:.2f}")
    assert shift > 0.1
    cooler = scenario(ON_POLICY, 0.8)
    (inputs,) = cooler.steps[0].inputs
    at_one = on_policy_loss(log_probs(policy, inputs), inputs, 0.02)
    with pytest.raises(AssertionError):
        assert_equals_trl(cooler, 0, at_one, policy, Objective(**{**vars(objective), "temperature": 0.8}))


def triples_loss(
    policy_logits: Tensor, reference_logits: Tensor, rewards: Tensor, beta: float, **reduction: Any
) -> Tensor:
    """Return `grpo_loss` of the scored triples. The misspelled reduction is the default."""
    log_policy = torch.log(functional.softmax(policy_logits, dim=-1))
    reference = functional.softmax(reference_logits, dim=-1)
    kl = functional.kl_div(log_policy, reference, **(reduction or {"reduce": "batchmean"}), log_target=False)
    return -rewards.mean() + beta * kl


@pytest.fixture
def logits() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    policy, reference = torch.randn(2, 2, 5, 12, generator=generator, dtype=torch.float64)
    return policy.requires_grad_(), reference


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
def test_scored_triples_reward_has_no_gradient(logits: tuple[Tensor, Tensor]) -> None:
    policy, reference = logits
    gradients = [
        torch.autograd.grad(triples_loss(policy, reference, torch.tensor([reward] * 2), 0.1), policy)[0]
        for reward in (0.0, 5.0)
    ]
    assert torch.equal(*gradients), "the gradient does not depend on the rewards"
    only_reward = triples_loss(policy, reference, torch.tensor([5.0] * 2), beta=0.0)
    assert torch.autograd.grad(only_reward, policy)[0].abs().max() == 0


@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
def test_scored_triples_kl_is_reversed_and_divided_by_the_vocabulary(logits: tuple[Tensor, Tensor]) -> None:
    policy, reference = logits
    penalty = triples_loss(policy, reference, torch.zeros(2), beta=1.0)
    reversed_kl = oracle.full_kl(reference, policy)
    assert penalty.item() == pytest.approx(reversed_kl.mean().item() / policy.shape[-1], abs=1e-12)
    meant = triples_loss(policy, reference, torch.zeros(2), beta=1.0, reduction="batchmean")
    assert meant.item() == pytest.approx(reversed_kl.sum().item() / policy.shape[0], abs=1e-12)
    assert abs(reversed_kl.mean() - oracle.full_kl(policy, reference).mean()) > 0.01


@pytest.mark.slow  # it runs none of our code
@pytest.mark.filterwarnings("ignore:size_average and reduce args will be deprecated")
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
def test_scored_triples_scores_the_prompt_and_never_reads_the_response(checkpoint: Path) -> None:
    policy, reference = load_policy(checkpoint, torch.float32), load_policy(checkpoint, torch.float32)
    reference.load_state_dict(moved(reference, seed=99))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def document_loss(row: dict[str, Any]) -> float:
        inputs = tokenizer([row["prompt"]], return_tensors="pt", return_token_type_ids=False)
        rewards = torch.tensor([row["reward"]])
        return triples_loss(policy(**inputs).logits, reference(**inputs).logits, rewards, 0.1).item()

    rows = [{"prompt": "1 2 3", "response": response, "reward": 5.0} for response in ("4 5", "6")]
    assert document_loss(rows[0]) == document_loss(rows[1])
    assert document_loss({**rows[0], "prompt": "1 2 3 4 5"}) != document_loss(rows[0])


def test_full_vocabulary_kl_is_of_the_reference_against_the_policy(logits: tuple[Tensor, Tensor]) -> None:
    policy, reference = (tensor[0] for tensor in logits)
    document = functional.kl_div(
        torch.log_softmax(policy, dim=-1), torch.softmax(reference, dim=-1), reduction="batchmean"
    )
    positions = policy.shape[0]
    assert document.item() == pytest.approx(oracle.full_kl(reference, policy).sum().item() / positions, abs=1e-12)
    assert abs(document.item() - oracle.full_kl(policy, reference).sum().item() / positions) > 0.01


def test_full_vocabulary_kl_generation_leaves_no_graph(checkpoint: Path) -> None:
    model = load_policy(checkpoint, torch.float32)
    torch.manual_seed(0)
    output = model.generate(
        input_ids=torch.tensor([[3, 4]]),
        max_new_tokens=4,
        do_sample=True,
        return_dict_in_generate=True,
        output_scores=True,
    )
    scores = torch.stack(output.scores, dim=1)
    assert not scores.requires_grad
    loss = -torch.tensor([1.0]).mean() + 0.1 * functional.kl_div(
        torch.log_softmax(scores[:, -1], dim=-1), torch.softmax(scores[:, 0], dim=-1), reduction="batchmean"
    )
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()


def test_full_vocabulary_kl_sixteen_completions_meet_four_answers() -> None:
    """`zip` stops at the shorter list: 4 of 16 completions are scored, all of the first prompt."""
    prompts, generations = ["a", "b", "c", "d"], 4
    completions = [f"completion of {prompt}" for prompt in prompts for _ in range(generations)]
    answers = [f"answer to {prompt}" for prompt in prompts]
    scored = list(zip(completions, answers, strict=False))
    assert len(scored) == 4
    assert [completion[-1] == answer[-1] for completion, answer in scored] == [True, False, False, False]
    with pytest.raises(ValueError, match="shorter"):
        list(zip(completions, answers, strict=True))
