"""The sampled share of changed weights, compared with a count over all weights, and in the logs of runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig

from grpo_recipes import GRPOTrainer, train
from grpo_recipes.reports.diagnostics import diagnose
from grpo_recipes.reports.run import Run
from grpo_recipes.training.adamw_bf16 import (
    CHANGED,
    EXPECTED,
    SAMPLE,
    AdamWBF16,
    UpdateSample,
    WeightSample,
    adamw_bf16,
    draw_sample,
    merge,
)
from tests.support import launching, short_runs
from tests.support.errors import refused
from tests.support.tiny import policy, save_policy

NOTHING: Any = None


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    tensors = [0.02 * torch.randn(300, 200), torch.ones(500), torch.zeros(40, 50), 0.02 * torch.randn(100, 100)]
    return [torch.nn.Parameter(tensor.to(dtype)) for tensor in tensors]


def step(
    params: list[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    steps: Sequence[Sequence[Any]] = (),
    begun: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Return the metrics of steps on the gradients of each, or of one on random ones, with none for the last parameter.

    Args:
        params: the parameters.
        optimizer: their optimizer.
        steps: gradient of each parameter in each step.
        begun: function that is called after the sample was drawn.
    """
    metrics: dict[str, list[float]] = defaultdict(list)
    sample = UpdateSample(metrics)
    sample.on_train_begin(NOTHING, NOTHING, NOTHING, optimizer=optimizer)
    begun()
    for gradients in steps or [[*map(torch.randn_like, params[:-1]), None]]:
        sample.on_step_begin(NOTHING, NOTHING, NOTHING)
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        optimizer.step()
        sample.on_optimizer_step(NOTHING, NOTHING, NOTHING, optimizer=optimizer)
    return metrics


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sample_agrees_with_a_count_over_all_weights(dtype: torch.dtype) -> None:
    params = parameters(dtype)
    before = torch.cat([param.detach().double().flatten() for param in params[:-1]])
    metrics = step(params, torch.optim.AdamW(params, lr=2e-5, weight_decay=0.0))
    after = torch.cat([param.detach().double().flatten() for param in params[:-1]])
    bits = {torch.float32: 24, torch.bfloat16: 8}[dtype]
    spacing = 2.0 ** (before.abs().log2().floor() - bits + 1)  # 0 at a weight of 0, which any update moves
    expected = (2e-5 / spacing).clamp(max=1)  # Adam's first step has the size of the learning rate
    assert metrics[CHANGED] == [pytest.approx(float((after != before).double().mean()), abs=0.05)]
    assert metrics[EXPECTED] == [pytest.approx(float(expected.mean()), abs=0.05)]


def test_the_sample_is_the_same_in_every_run_and_proportional_to_size() -> None:
    params = parameters(torch.float32)
    state = torch.get_rng_state()
    one, other = draw_sample(params), draw_sample(params)
    assert torch.equal(torch.get_rng_state(), state), "the run samples as it would without"
    assert all(torch.equal(a.places, b.places) for a, b in zip(one, other, strict=True))
    assert sum(len(part.places) for part in one) == SAMPLE
    largest = next(part for part in one if part.parameter is params[0])
    assert len(largest.places) / SAMPLE == pytest.approx(60_000 / 72_500, abs=0.15)
    # A rank may hold nothing of a parameter. 64 draws leave none of four out but by a chance of 4 * 0.75**64.
    frozen, empty = torch.nn.Parameter(torch.ones(3), requires_grad=False), torch.nn.Parameter(torch.ones(0))
    assert draw_sample([frozen]) == draw_sample([empty]) == []
    small = [torch.nn.Parameter(torch.ones(1)) for _ in range(4)]
    assert {id(part.parameter) for part in draw_sample([empty, *small, empty])} == {*map(id, small)}


# ---- numbers by hand


def sampled(values: list[float], dtype: torch.dtype = torch.float32) -> WeightSample:
    """Return a parameter of these values with a gradient, all of which are sampled."""
    parameter = torch.nn.Parameter(torch.tensor(values, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    return WeightSample(parameter, torch.arange(len(values)), dtype)


def optimizer_of(*parts: tuple[WeightSample, dict[str, Any], dict[str, Any]]) -> Any:
    """Return an optimizer with a group of settings and a state for each parameter."""
    groups = [{"params": [part.parameter], **settings} for part, settings, _ in parts]
    states = {part.parameter: state for part, _, state in parts if state}
    return SimpleNamespace(param_groups=groups, state=states)


def moments(mean: list[float], square: list[float], step: float) -> dict[str, Any]:
    return {"exp_avg": torch.tensor(mean), "exp_avg_sq": torch.tensor(square), "step": torch.tensor(step)}


def test_a_parameter_without_a_gradient_in_a_step_has_no_update_to_lose() -> None:
    """The optimizer leaves an expert that no token reached as it is, and keeps the moments of its earlier steps."""
    params = [torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in range(2)]
    one = torch.ones(64, dtype=torch.bfloat16)
    metrics = step(params, torch.optim.AdamW(params, lr=1.0), [(one, one), (one, None), (None, None)])
    assert metrics == {CHANGED: [1.0, 1.0], EXPECTED: [1.0, 1.0]}, "and the last step has none"


def shares(
    parts: list[WeightSample], made: Any, after: list[list[float]], metrics: dict[str, list[float]] | None = None
) -> dict[str, list[float]]:
    """Return the metrics of a step of an optimizer after which the sampled weights have these values."""
    metrics = defaultdict(list) if metrics is None else metrics
    callback = UpdateSample(metrics)
    callback.sample = parts
    callback.on_step_begin(NOTHING, NOTHING, NOTHING)
    for part, values in zip(parts, after, strict=True):
        part.parameter.data = torch.tensor(values)
    callback.on_optimizer_step(NOTHING, NOTHING, NOTHING, optimizer=made)
    return metrics


def test_the_expected_update_is_adamws_of_the_settings_of_its_group() -> None:
    """The spacing is 2**-21 at 4, and 2**-23 at 1. After two steps the moments are divided by 0.75 and 0.4375."""
    one, other = sampled([4.0, 4.0, -4.0, 4.0]), sampled([1.0, 1.0])
    unit = 2.0**-24
    first = {"lr": unit, "betas": (0.5, 0.75), "eps": 1.0, "weight_decay": 0.125}
    states = moments([1.5, -3.0, 0.75, 0.0], [0.4375 * 4, 0.0, 0.4375, 1.0], 2.0), moments([1.0, -0.5], [0.0, 2.0], 1.0)
    made = optimizer_of((one, first, states[0]), (other, {"lr": unit, "betas": (0.75, 0.5), "eps": 8.0}, states[1]))
    # |2 / (2 + 1) + 0.5|, |-4 / (0 + 1) + 0.5| and |1 / (1 + 1) - 0.5|. The last weight has had no gradient.
    # Without weight decay 4 / (0 + 8) and 2 / (2 + 8). The third weight has no update, so it does not count.
    expected = [7 / 6 / 8, 3.5 / 8, 0.5 / 2, 0.2 / 2]
    found = shares([one, other], made, [[4.0, 4.0, -4.0, 4.0], [1.0, 1.0]])
    assert found == {CHANGED: [0.0], EXPECTED: [pytest.approx(sum(expected) / 4)]}


def test_the_shares_of_hand_computed_updates() -> None:
    """Each update is 2**-24. The spacing of float32 is 2**-23 at 1, 2**-21 at 4 and 2**-25 at 0.25."""
    before, after = [1.0, 1.5, 4.0, 0.25, 0.0, 3.0, 0.0], [2.0, 1.5, 4.0, 0.125, 1.0, 5.0, 0.0]
    part = sampled(before)
    settings = {"lr": 2.0**-24, "betas": (0.0, 0.0), "eps": 1.0}
    state = moments([1.0] * 5 + [0.0, 0.0], [0.0] * 7, 1.0)
    metrics = shares([part], optimizer_of((part, settings, state)), [after])
    # The last two did not have to move, and one of them has.
    assert metrics == {CHANGED: [3 / 5], EXPECTED: [(0.5 + 0.5 + 0.125 + 1 + 1) / 5]}
    still = optimizer_of((part, settings, moments([0.0] * 7, [1.0] * 7, 1.0)))
    shares([part], still, [after], metrics)
    assert [len(values) for values in metrics.values()] == [1, 1], "nothing was to move"


def test_an_optimizer_without_adams_moments_has_no_expected_share() -> None:
    params = parameters(torch.float32)
    metrics = step(params, torch.optim.SGD(params, lr=0.1))
    assert EXPECTED not in metrics
    assert metrics[CHANGED][0] == pytest.approx(62_500 / 72_500, abs=0.15)


def test_without_moments_the_share_is_of_all_sampled_weights() -> None:
    for missing in ("exp_avg", "exp_avg_sq", "step", "betas", "state"):
        part = sampled([1.0, 2.0, 3.0, 4.0])
        settings: dict[str, Any] = {"lr": 1.0, "betas": (0.5, 0.75), "eps": 1.0}
        state = {} if missing == "state" else moments([1.0] * 4, [1.0] * 4, 1.0)
        state.pop(missing, None)
        settings.pop(missing, None)
        assert shares([part], optimizer_of((part, settings, state)), [[1.0, 2.0, 5.0, 4.0]]) == {CHANGED: [0.25]}


def test_a_step_that_a_gradient_scaler_skips_is_not_counted() -> None:
    params = parameters(torch.float32)
    optimizer = torch.optim.AdamW(params)
    optimizer.step_was_skipped = True  # type: ignore[attr-defined]
    assert not step(params, optimizer)


def test_weights_that_are_cast_during_the_run_fall_behind() -> None:
    """The cast is that of TRL's continuous batching: float32 weights in place."""
    params = parameters(torch.float32)

    def cast() -> None:
        for param in params:
            param.data = param.data.bfloat16()

    steps = [[torch.randn_like(param, dtype=torch.bfloat16) for param in params] for _ in range(3)]
    metrics = step(params, torch.optim.AdamW(params, lr=1e-6), steps, begun=cast)
    assert metrics[CHANGED][-1] < 0.2
    assert metrics[EXPECTED][-1] > 0.9


def test_a_run_logs_both_shares_and_uses_the_given_optimizer(tmp_path: Path) -> None:
    args = short_runs.arguments(tmp_path, beta=0.0, learning_rate=1e-5)
    run = short_runs.trainer(GRPOTrainer, policy().to(torch.bfloat16), args, optimizer_cls_and_kwargs=adamw_bf16(args))
    run.train()
    assert isinstance(run.optimizer.optimizer, AdamWBF16)
    group = run.optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-8, 0.0)
    (logged,) = [entry for entry in run.state.log_history if CHANGED in entry]
    assert 0 < logged[CHANGED] <= 1
    assert 0 < logged[EXPECTED] <= 1


def test_an_adapter_that_trl_casts_for_a_quantized_base_keeps_its_updates(tmp_path: Path) -> None:
    """TRL casts if the model has this attribute, which bitsandbytes sets. The base here is not quantized."""
    model = policy().to(torch.bfloat16)
    model.is_loaded_in_4bit = True
    args = short_runs.arguments(tmp_path, beta=0.0, learning_rate=1e-6)
    torch.manual_seed(0)
    config = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    run = short_runs.trainer(GRPOTrainer, model, args, peft_config=config, optimizer_cls_and_kwargs=adamw_bf16(args))
    adapter = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in adapter} == {torch.bfloat16}
    before = [parameter.detach().float().clone() for parameter in adapter]
    run.train()
    state = run.optimizer.state
    moved = [merge([p.detach()], [state[p]["low_bits"]])[1][0] != b for p, b in zip(adapter, before, strict=True)]
    assert torch.cat([m.flatten() for m in moved]).float().mean() > 0.9
    stored = [p.detach().float() != b for p, b in zip(adapter, before, strict=True)]
    assert torch.cat([s.flatten() for s in stored]).float().mean() < 0.1


def test_continuous_batching_may_not_cast_trained_weights(tmp_path: Path) -> None:
    args = short_runs.arguments(tmp_path, use_transformers_continuous_batching=True)
    args.bf16 = True  # on a CPU, `GRPOConfig` itself refuses it
    with refused("`use_transformers_continuous_batching`", "torch.bfloat16"):
        model = policy().to(torch.bfloat16)
        short_runs.trainer(GRPOTrainer, model, args, peft_config=LoraConfig(r=2, task_type="CAUSAL_LM"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "optim", "found"),
    [
        ("bfloat16", "adamw_torch_fused", True),
        pytest.param("bfloat16", "adamw_bf16", False, marks=pytest.mark.nightly),
        pytest.param("float32", "adamw_torch_fused", False, marks=pytest.mark.nightly),
    ],
)
def test_the_diagnosis_finds_lost_updates_and_only_lost_ones(
    dtype: str, optim: str, found: bool, tmp_path: Path
) -> None:
    policy_folder = save_policy(tmp_path / "policy", initializer_range=0.02)
    rows = launching.write_rows(tmp_path / "rows.jsonl", 64)
    changes = {"dtype": dtype, "optim": optim, "max_steps": 60, "learning_rate": 5e-6, "save_strategy": "no"}
    recipe = launching.write_recipe(
        tmp_path / "r.yaml", policy_folder, rows, tmp_path / "run", save_steps=None, **changes
    )
    assert train.main(["--config", str(recipe)]) == 0
    diagnosis = diagnose(Run.read(tmp_path / "run"))
    assert "lost_updates" not in diagnosis.unchecked
    assert ("lost_updates" in {finding.check for finding in diagnosis.findings}) is found
