"""One-line faults planted in TRL, each with the test that must fail on it.

`FAULTS` is a table of the fault, its function, the edit and the test. A fault is planted by editing the source of the
function in this process. An edit whose text no longer occurs in TRL raises.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer
from trl.kernels import chunked_logprob
from trl.trainer import grpo_trainer

from tests.mathematics import test_advantages_against_trl as advantages
from tests.mathematics import test_options_against_trl as options
from tests.mathematics.harness import Scenario, compare, edited, float64_trl
from tests.mathematics.oracle import Geometry, Objective
from tests.mathematics.test_loss_against_trl import GEOMETRIES, cells, check
from tests.mathematics.two_processes import DISTRIBUTED_FAULTS
from tests.support.grids import only

LOSS = GRPOTrainer, "_compute_loss"
SCORE = GRPOTrainer, "_generate_and_score_completions"
REWARD = GRPOTrainer, "_calculate_rewards"
GENERATE = GRPOTrainer, "_generate_single_turn"
LOG_PROBS = GRPOTrainer, "_get_per_token_logps_and_entropies"
OFF_POLICY_MASK = GRPOTrainer, "get_off_policy_mask"
GAMMA = GRPOTrainer, "get_gamma_weights"
KERNEL = chunked_logprob.ChunkedLogProbFunction, "forward"
KERNEL_BACKWARD = chunked_logprob, "_backward_tile"

PLAIN, SPLIT, MOVING = Geometry(1, 1, 1), Geometry(2, 4, 1), Geometry(1, 1, 3)


def float64_cells(scenario: Any, geometry: Geometry, **objective: Any) -> None:
    """Compare one of the cells of `test_float64_cells` and `test_every_float64_cell`."""
    cell = Objective(**objective)
    assert (geometry, cell) in set(cells(cell.loss_type, 1)), "not a cell of the grid"
    check(compare(scenario(geometry, cell.temperature), cell), torch.float64, cell)


@dataclass(frozen=True)
class Fault:
    """A planted fault: the function, the replaced text and its replacement, and the test that must fail."""

    name: str
    where: tuple[Any, str]
    old: str
    new: str
    test: Callable[..., None]
    arguments: dict[str, Any] = field(default_factory=dict)
    everywhere: bool = False


def cell(geometry: Geometry, **objective: Any) -> tuple[Callable[..., None], dict[str, Any]]:
    """Return the test of one cell and its arguments."""
    return float64_cells, {"geometry": geometry, **objective}


def option(loss_type: str, **given: Any) -> tuple[Callable[..., None], dict[str, Any]]:
    """Return the test of one option and its arguments."""
    return options.test_options, {"loss_type": loss_type, "options": given}


def rewards(
    scale: str = "group", aggregation: str = "sum_then_normalize"
) -> tuple[Callable[..., None], dict[str, Any]]:
    """Return the test of chosen rewards and its arguments."""
    return advantages.test_chosen_rewards, {"scale": scale, "aggregation": aggregation, "weights": [1.0, 0.5]}


SCORING = options.test_log_probabilities_and_masks_of_the_scoring_path, {"temperature": 0.8}
K3 = "torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1"
GRPO_MEAN = "((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()"
FAULTS = [
    # the KL term
    Fault("k3 without -1", LOSS, K3, K3[:-4], *cell(PLAIN, loss_type="grpo", beta=0.04)),
    Fault("KL sign", LOSS, "per_token_loss + self.beta", "per_token_loss - self.beta",
          *cell(PLAIN, loss_type="grpo", beta=0.04)),
    Fault("KL of the reference against the policy", LOSS, K3,
          "torch.exp(per_token_logps - ref_per_token_logps) - (per_token_logps - ref_per_token_logps) - 1",
          *cell(PLAIN, loss_type="grpo", beta=0.04)),
    Fault("k2 for k3", LOSS, K3, "0.5 * (ref_per_token_logps - per_token_logps) ** 2",
          *cell(PLAIN, loss_type="grpo", beta=0.04)),
    Fault("bias correction forgotten", LOSS, "per_token_kl = per_token_kl * coef_1", "pass",
          *cell(PLAIN, loss_type="grpo", beta=0.04)),
    Fault("bias correction detached", LOSS, "per_token_kl * coef_1", "per_token_kl * coef_1.detach()",
          *cell(PLAIN, loss_type="grpo", beta=0.04)),
    Fault("bias correction always on", LOSS, "if self.args.use_bias_correction_kl:", "if True:",
          *cell(PLAIN, loss_type="grpo", beta=0.04, use_bias_correction_kl=False)),
    # the importance ratio and its clip
    Fault("ratio inverted", LOSS, "log_ratio = per_token_logps - old_per_token_logps",
          "log_ratio = old_per_token_logps - per_token_logps", *cell(MOVING, loss_type="grpo")),
    Fault("ratio detached", LOSS, "torch.exp(log_importance_weights)", "torch.exp(log_importance_weights).detach()",
          *cell(PLAIN, loss_type="grpo", beta=0.04)),
    Fault("old log-probabilities ignored", LOSS, 'inputs.get("old_per_token_logps")', "None",
          *cell(MOVING, loss_type="grpo")),
    Fault("clamp sides swapped", LOSS, "1 - self.epsilon_low, 1 + self.epsilon_high)",
          "1 - self.epsilon_high, 1 + self.epsilon_low)", *cell(MOVING, loss_type="grpo", epsilon_high=0.28)),
    Fault("maximum for minimum", LOSS, "-torch.min(per_token_loss1", "-torch.max(per_token_loss1",
          *cell(MOVING, loss_type="grpo")),
    Fault("no clip", LOSS, "-torch.min(per_token_loss1, per_token_loss2)", "-per_token_loss1",
          *cell(MOVING, loss_type="grpo")),
    Fault("delta ignored", LOSS, "if self.args.delta is not None:", "if False:",
          *cell(MOVING, loss_type="grpo", delta=1.5)),
    Fault("delta as a lower bound", LOSS, "max=self.args.delta", "min=self.args.delta",
          *cell(MOVING, loss_type="grpo", delta=1.5)),
    Fault("sequence ratio without the mean", LOSS, "(log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)",
          "(log_ratio * mask).sum(-1)", *cell(MOVING, loss_type="grpo", importance_sampling_level="sequence")),
    Fault("sequence ratio over the padded width", LOSS, "(log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)",
          "(log_ratio * mask).mean(-1)", *cell(MOVING, loss_type="grpo", importance_sampling_level="sequence")),
    # the other loss types
    Fault("CISPO weight not detached", LOSS, "max=self.epsilon_high).detach()", "max=self.epsilon_high)",
          *cell(MOVING, loss_type="cispo", epsilon_high=0.28)),
    Fault("CISPO bound 1 + epsilon", LOSS, "max=self.epsilon_high)", "max=1 + self.epsilon_high)",
          *cell(MOVING, loss_type="cispo")),
    Fault("SAPO temperatures swapped", LOSS, "self.args.sapo_temperature_pos, self.args.sapo_temperature_neg",
          "self.args.sapo_temperature_neg, self.args.sapo_temperature_pos", *cell(MOVING, loss_type="sapo")),
    Fault("SAPO slope not normalised", LOSS, "* 4 / temperatures", "* 4", *cell(MOVING, loss_type="sapo")),
    Fault("VESPO weight without lambda", GAMMA, "lambda_seq + k_seq * log_w_seq", "k_seq * log_w_seq",
          *cell(MOVING, loss_type="vespo")),
    Fault("VESPO constants by the wrong sign", GAMMA, "advantages >= 0", "advantages < 0",
          *cell(MOVING, loss_type="vespo")),
    # normalizers
    Fault("token mean for sequence mean", LOSS, GRPO_MEAN, "(per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)",
          *cell(PLAIN, loss_type="grpo")),
    Fault("mean over the padded width", LOSS, GRPO_MEAN, "(per_token_loss * mask).mean(-1).mean()",
          *cell(PLAIN, loss_type="grpo")),
    Fault("forgotten accumulation", LOSS, "loss = loss / normalizer", "pass", *cell(SPLIT, loss_type="grpo"), True),
    Fault("forgotten accumulation in dr_grpo", LOSS, "loss = loss / normalizer", "pass",
          *cell(SPLIT, loss_type="dr_grpo"), True),
    Fault("wrong rescale from generation batch to step", LOSS,
          "self.current_gradient_accumulation_steps / self.args.steps_per_generation",
          "self.args.steps_per_generation / self.current_gradient_accumulation_steps", *cell(SPLIT, loss_type="dapo")),
    Fault("no rescale from generation batch to step", LOSS,
          "self.current_gradient_accumulation_steps / self.args.steps_per_generation", "1.0",
          *cell(SPLIT, loss_type="dapo")),
    Fault("padded tokens counted", SCORE, "gather(loss_mask.sum())", "gather(torch.tensor(loss_mask.numel()))",
          *cell(PLAIN, loss_type="dapo")),
    Fault("dr_grpo divides by the tokens", LOSS, "(per_token_loss.size(0) * self.max_completion_length)", "mask.sum()",
          *cell(PLAIN, loss_type="dr_grpo")),
    Fault("bnpo divides by the padded size", LOSS, "(per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)",
          "(per_token_loss * mask).sum() / mask.numel()", *cell(PLAIN, loss_type="bnpo")),
    Fault("luspo sums over completions", LOSS, "(per_token_loss * mask).sum(-1).mean()",
          "(per_token_loss * mask).sum()",
          *cell(PLAIN, loss_type="luspo")),
    # masks, bonus, sampler, router
    Fault("tool mask ignored", LOSS, 'completion_mask * inputs["tool_mask"]', "completion_mask",
          options.test_tool_tokens_are_masked, {"loss_type": "grpo", "level": "token"}),
    Fault("sequence ratio over masked tokens", LOSS, "(log_ratio * mask).sum(-1) /", "log_ratio.sum(-1) /",
          options.test_tool_tokens_are_masked, {"loss_type": "grpo", "level": "sequence"}),
    Fault("lowest entropies kept", LOSS, "1 - self.top_entropy_quantile", "self.top_entropy_quantile",
          *option("grpo", top_entropy_quantile=0.4)),
    Fault("entropy mask unused", LOSS, "per_token_loss * entropy_mask", "per_token_loss",
          *option("grpo", top_entropy_quantile=0.4)),
    Fault("entropy punished", LOSS, "loss - apply_coef * entropy_loss", "loss + apply_coef * entropy_loss",
          *option("grpo", entropy_coef=0.05)),
    Fault("entropy gradient reversed", KERNEL_BACKWARD, "grad -= grad_entropy", "grad += grad_entropy",
          *option("grpo", entropy_coef=0.05)),
    Fault("off-policy mask of good completions", OFF_POLICY_MASK, "advantages >= 0", "advantages <= 0",
          *option("grpo", off_policy_mask_threshold=0.05)),
    Fault("off-policy KL reversed", OFF_POLICY_MASK, "sampling_per_token_logps - per_token_logps.detach()",
          "per_token_logps.detach() - sampling_per_token_logps", *option("grpo", off_policy_mask_threshold=0.05)),
    Fault("sampler weight unused", LOSS, 'per_token_loss * inputs["importance_sampling_ratio"]', "per_token_loss",
          options.test_loss_with_sampler_weights, {"loss_type": "grpo", "mode": "token_truncate"}),
    Fault("sampler weight inverted", SCORE, "(old_per_token_logps - sampling_per_token_logps) * mask",
          "(sampling_per_token_logps - old_per_token_logps) * mask",
          options.test_sampler_weights, {"mode": "token_truncate", "low": 0.7, "high": 2.0}),
    Fault("kept truncated completions only", SCORE, "completion_mask = completion_mask * (~is_truncated)",
          "completion_mask = completion_mask * (is_truncated)",
          options.test_truncated_completions_are_masked, {"loss_type": "grpo"}),
    Fault("router loss not divided by accumulation", LOSS, "self.router_aux_loss_coef * aux_loss / normalizer",
          "self.router_aux_loss_coef * aux_loss", options.test_router_loss, {"loss_type": "grpo"}),
    # log-probabilities
    Fault("temperature forgotten", KERNEL, '"inv_t": 1 / temperature', '"inv_t": 1.0', *SCORING),
    Fault("temperature forgotten in the gradient", KERNEL_BACKWARD, "grad = grad * inv_t", "pass",
          *cell(PLAIN, loss_type="grpo", temperature=0.8)),
    Fault("log-probabilities one token early", LOG_PROBS, "outputs.log_probs[:, -logits_to_keep:]",
          "outputs.log_probs[:, -logits_to_keep - 1 : -1]", *SCORING),
    Fault("left padding attended to", LOG_PROBS, '"attention_mask": attention_mask_batch}',
          '"attention_mask": torch.ones_like(attention_mask_batch)}', *SCORING),
    Fault("EOS left out of the mask", GENERATE, "sequence_indices <= eos_idx", "sequence_indices < eos_idx",
          options.test_completions_end_with_their_first_eos),
    Fault("one token after EOS kept", GENERATE, "sequence_indices <= eos_idx", "sequence_indices <= 1 + eos_idx",
          options.test_completions_end_with_their_first_eos),
    Fault("wrong condition for old log-probabilities", SCORE,
          "self.args.gradient_accumulation_steps % generate_every != 0",
          "generate_every % self.args.gradient_accumulation_steps != 0",
          options.test_old_log_probabilities_are_kept_exactly_when_the_policy_moves),
    Fault("old log-probabilities only for mu > 1", SCORE, "self.args.gradient_accumulation_steps % generate_every != 0",
          "self.num_iterations > 1", options.test_old_log_probabilities_are_kept_exactly_when_the_policy_moves),
    # rewards and advantages
    Fault("biased standard deviation", (grpo_trainer, "nanstd"), "variance *= correction", "pass", *rewards()),
    Fault("no epsilon", SCORE, "advantages / (std_rewards + 1e-4)", "advantages / std_rewards", *rewards()),
    Fault("another epsilon", SCORE, "advantages / (std_rewards + 1e-4)", "advantages / (std_rewards + 1e-6)",
          *rewards()),
    Fault("scaled although scale_rewards is none", SCORE, 'if self.scale_rewards != "none":', "if True:",
          *rewards("none")),
    Fault("batch mean for group mean", SCORE, "rewards - mean_grouped_rewards", "rewards - torch.nanmean(rewards)",
          *rewards()),
    Fault("group means in the wrong order", SCORE, "mean_grouped_rewards.repeat_interleave(num_generations, dim=0)",
          "mean_grouped_rewards.repeat(num_generations)", *rewards()),
    Fault("weights ignored", SCORE, "(rewards_per_func * self.reward_weights.to(device).unsqueeze(0)).nansum(dim=1)",
          "rewards_per_func.nansum(dim=1)", *rewards()),
    Fault("None as 0", REWARD, "reward if reward is not None else torch.nan", "reward or 0.0", *rewards()),
    Fault("NaN as 0", SCORE, "unscorable_mask = torch.isnan(rewards_per_func).all(dim=1)",
          "unscorable_mask = torch.zeros(len(rewards_per_func), dtype=torch.bool)", *rewards()),
    Fault("a row with one None left out", SCORE, "torch.isnan(rewards_per_func).all(dim=1)",
          "torch.isnan(rewards_per_func).any(dim=1)", *rewards()),
    Fault("summed scores not normalised again", SCORE, "(rewards - torch.nanmean(rewards)) / (std_rewards + 1e-4)",
          "rewards - torch.nanmean(rewards)", *rewards("group", "normalize_then_sum")),
    Fault("weights ignored after normalising", SCORE,
          "(reward_k * self.reward_weights.to(device).unsqueeze(0)).nansum(dim=1)", "reward_k.nansum(dim=1)",
          *rewards("group", "normalize_then_sum")),
    Fault("reward_std of the groups", SCORE, "nanstd(rewards).item()",
          "nanstd(rewards.view(-1, num_generations), dim=1).nanmean().item()", *rewards()),
    Fault("advantages not shuffled with their rows", (grpo_trainer, "shuffle_sequence_dict"), "return v[permutation]",
          "return v[permutation] if v.ndim > 1 else v", *SCORING),
    # logged quantities
    Fault("kl logged without the bias correction", LOSS, "global_masked_mean(per_token_kl)",
          f"global_masked_mean({K3})", *cell(MOVING, loss_type="grpo", beta=0.04)),
    Fault("low clips counted on the wrong side", LOSS, "(coef_1 < 1 - self.epsilon_low) & (advantages < 0)",
          "(coef_1 < 1 - self.epsilon_low) & (advantages > 0)", *cell(MOVING, loss_type="grpo")),
    Fault("high clips counted whatever the sign", LOSS, "(coef_1 > 1 + self.epsilon_high) & (advantages > 0)",
          "(coef_1 > 1 + self.epsilon_high)", *cell(MOVING, loss_type="grpo")),
]  # fmt: skip


@pytest.fixture(scope="module")
def sound(checkpoint: Path) -> Callable[..., Scenario]:
    """Return scenarios prepared without a fault, for faults of the loss."""

    @lru_cache
    def get(geometry: Geometry, temperature: float = 1.0) -> Scenario:
        return Scenario(checkpoint, geometry, torch.float64, temperature=temperature)

    return get


def run_test(fault: Fault, checkpoint: Path, scenario: Callable[..., Scenario]) -> None:
    """Call the fault's test with the fixtures that it requests."""
    fixtures = {"checkpoint": checkpoint, "scenario": scenario, "record_cell": lambda *_: None}
    wanted = inspect.signature(fault.test).parameters
    fault.test(**{name: value for name, value in fixtures.items() if name in wanted}, **fault.arguments)


@pytest.mark.slow
@pytest.mark.parametrize("fault", only(FAULTS[::12], FAULTS), ids=lambda fault: fault.name)
def test_fault_is_caught(fault: Fault, checkpoint: Path, sound: Callable[..., Scenario]) -> None:
    with float64_trl(), contextlib.ExitStack() as planted:
        if fault.where in (LOSS, GAMMA, OFF_POLICY_MASK, KERNEL_BACKWARD):
            scenario = sound
        else:
            scenario = lru_cache(lambda geometry, t=1.0: Scenario(checkpoint, geometry, torch.float64, temperature=t))
        if scenario is sound:
            # Prepared before the fault is planted, so that the fault can only show in the loss.
            for geometry in GEOMETRIES:
                sound(geometry, fault.arguments.get("temperature", 1.0))
        planted.enter_context(edited(*fault.where, (fault.old, fault.new), everywhere=fault.everywhere))
        with pytest.raises(AssertionError) as caught:
            run_test(fault, checkpoint, scenario)
    assert "times:" not in str(caught.value), "the edit itself failed"


@pytest.mark.slow
def test_the_tests_pass_without_a_fault(checkpoint: Path, sound: Callable[..., Scenario]) -> None:
    with float64_trl():
        for fault in {(fault.test, str(fault.arguments)): fault for fault in FAULTS}.values():
            run_test(fault, checkpoint, sound)


def test_there_are_at_least_thirty_faults_with_unique_names() -> None:
    assert len({*DISTRIBUTED_FAULTS, *(fault.name for fault in FAULTS)}) == len(DISTRIBUTED_FAULTS) + len(FAULTS) >= 30
