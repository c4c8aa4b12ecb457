"""Metrics of each pass over a generation batch, against sums over single rows in float64."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from grpo_recipes import GRPOTrainer
from grpo_recipes.training.passes import Passes
from tests.support import launching
from tests.support.recorded import Recording, make_trainer, model

small = partial(model, num_hidden_layers=1)
RECORDING = Recording.random(prompts=4, group=4, seed=5, zero=(1,))
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "learning_rate": 0.003,
    "lr_scheduler_type": "constant",
    "shuffle_dataset": False,
    "epsilon": 0.1,
    "micro_batching": "off",
}


class KeepPolicies(TrainerCallback):
    """Copies of the policy at the start of each optimizer step."""

    def __init__(self) -> None:
        self.policies: list[PreTrainedModel] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        policy = small()
        policy.load_state_dict(kwargs["model"].state_dict())
        self.policies.append(policy.double().eval())


def trained(folder: Path, recording: Recording = RECORDING, **settings: Any) -> tuple[GRPOTrainer, KeepPolicies]:
    """Train on a recording, and return the trainer and the policies of its steps."""
    kept = KeepPolicies()
    trainer: Any = make_trainer(GRPOTrainer, recording, small(), folder, **{**SETTINGS, **settings})
    trainer.add_callback(kept)
    trainer.train()
    return trainer, kept


def rows(recording: Recording) -> Iterator[tuple[float, list[int], list[int]]]:
    """Yield advantage, prompt and completion of each row."""
    for prompt, group, rewards in zip(recording.prompts, recording.completions, recording.rewards, strict=True):
        mean = sum(rewards) / len(rewards)
        for completion, reward in zip(group, rewards, strict=True):
            yield reward - mean, prompt, completion


@torch.no_grad()
def log_probs(policy: PreTrainedModel, prompt: list[int], completion: list[int]) -> Tensor:
    logits = policy(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def expected(now: PreTrainedModel, generated: PreTrainedModel, loss_type: str, level: str) -> tuple[float, float]:
    """Return effective sample size and clip share of all tokens of the recording with an advantage."""
    weights, clipped = [], 0
    for advantage, prompt, completion in rows(RECORDING):
        if not advantage:
            continue
        difference = log_probs(now, prompt, completion) - log_probs(generated, prompt, completion)
        if level == "sequence":
            difference = difference.mean().expand_as(difference)
        ratios = difference.exp().tolist()
        weights += ratios
        for ratio in ratios:
            if loss_type == "cispo":
                clipped += advantage > 0 and ratio > 1.02
            else:
                clipped += ratio < 0.9 if advantage < 0 else ratio > 1.1
    total, square = math.fsum(weights), math.fsum(weight * weight for weight in weights)
    return total * total / (len(weights) * square), clipped / len(weights)


def logged(trainer: GRPOTrainer, number: int, step: int) -> dict[str, float]:
    """Return the metrics of a pass at a step, which has no other passes."""
    entry = next(entry for entry in trainer.state.log_history if entry["step"] == step and "loss" in entry)
    found = {key: value for key, value in entry.items() if key.startswith("passes/")}
    assert all(key.startswith(f"passes/{number}/") for key in found), found
    return {key.removeprefix(f"passes/{number}/"): value for key, value in found.items()}


@pytest.mark.parametrize(
    ("loss_type", "level", "layout"),
    [
        ("dapo", "token", "packed"),
        pytest.param("cispo", "token", "trimmed", marks=pytest.mark.slow),
        pytest.param("grpo", "sequence", "padded", marks=pytest.mark.slow),
    ],
)
def test_each_iteration_has_its_own_metrics(loss_type: str, level: str, layout: str, tmp_path: Path) -> None:
    """The same figures in every layout: rows without advantage are skipped in two of them and count in none."""
    options: dict[str, Any] = {"loss_type": loss_type, "importance_sampling_level": level, "num_iterations": 3}
    if loss_type == "cispo":
        options["epsilon_high"] = 1.02
    trainer, kept = trained(tmp_path, **options, max_steps=3, micro_batching={"layout": layout})
    assert logged(trainer, 1, 1) == pytest.approx({"effective_sample_size": 1.0, "clip_share": 0.0}, abs=1e-5)
    sizes = []
    for number in (2, 3):
        size, clipped = expected(kept.policies[number - 1], kept.policies[0], loss_type, level)
        found = logged(trainer, number, number)
        assert found == pytest.approx({"effective_sample_size": size, "clip_share": clipped}, abs=1e-4)
        sizes.append(size)
    assert 1 > sizes[0] > sizes[1]
    assert clipped > 0.02


def test_parts_of_a_generation_batch_are_passes_too(tmp_path: Path) -> None:
    trainer, _ = trained(tmp_path, gradient_accumulation_steps=2, steps_per_generation=4, max_steps=4)
    sizes = [logged(trainer, number, step)["effective_sample_size"] for number, step in enumerate((1, 2), start=1)]
    assert sizes[0] == pytest.approx(1, abs=1e-5)
    assert sizes[1] < 0.9999
    assert logged(trainer, 1, 3)["effective_sample_size"] == pytest.approx(1, abs=1e-5)


def test_a_loss_without_a_clip_has_no_clip_share(tmp_path: Path) -> None:
    trainer, _ = trained(tmp_path, loss_type="sapo", num_iterations=2, max_steps=2)
    assert logged(trainer, 2, 2).keys() == {"effective_sample_size"}


def test_mismatch_shows_in_the_first_pass_and_staleness_in_later_ones(tmp_path: Path) -> None:
    """A generator whose log-probabilities are off by +-0.5, and NaN at the first token of each completion."""

    class Generated(Recording):
        def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
            output = super().rollout(prompts, trainer)
            sampled = []
            for prompt, completion in zip(output["prompt_ids"], output["completion_ids"], strict=True):
                values = log_probs(trainer.model.eval(), prompt, completion).tolist()
                sampled.append([value + 0.5 * (-1) ** place for place, value in enumerate(values)])
                sampled[-1][0] = math.nan
            trainer.model.train()
            return {**output, "logprobs": sampled}

    recording = Generated(RECORDING.prompts, RECORDING.completions, RECORDING.rewards)
    trainer, _ = trained(tmp_path, recording, num_iterations=2, max_steps=2, generation_check=False)
    first, second = logged(trainer, 1, 1), logged(trainer, 2, 2)
    assert first["effective_sample_size"] == pytest.approx(1, abs=1e-5)
    down, up = 0, 0
    for advantage, _, completion in rows(recording):
        if advantage:
            down += len(completion) // 2
            up += (len(completion) - 1) // 2
    total, square = up * math.exp(-0.5) + down * math.exp(0.5), up * math.exp(-1) + down * math.exp(1)
    assert first["effective_sample_size_with_mismatch"] == pytest.approx(total**2 / ((up + down) * square), abs=1e-4)
    assert second["effective_sample_size"] < 0.9999
    assert second["effective_sample_size_with_mismatch"] < 0.9


def passes_of(level: str, epsilon: float, *, reduce: Any = lambda sums: sums) -> tuple[Any, Passes]:
    """Return a stand-in for TRL's trainer, and its passes."""
    trainer: Any = SimpleNamespace(
        importance_sampling_level=level,
        loss_type="dapo",
        epsilon_low=epsilon,
        epsilon_high=epsilon,
        state=SimpleNamespace(global_step=4),
        accelerator=SimpleNamespace(sync_gradients=True, reduce=reduce),
    )
    passes = Passes(trainer)
    passes.start()
    return trainer, passes


@pytest.mark.parametrize(
    ("level", "weights", "clipped"),
    [
        # Two tokens of the first row, two of the second. The third has no advantage, the last token is padding.
        ("token", [1.5, 0.5, 0.5, 2.0], 2),  # above 1.1 with an advantage, below 0.9 without
        ("sequence", [0.75**0.5] * 2 + [1.0] * 2, 0),
    ],
)
def test_the_sums_of_a_micro_batch_by_hand(level: str, weights: list[float], clipped: int) -> None:
    another_rank = torch.tensor([4.0] * 4 + [0.0] * 3)  # four tokens with a ratio of 1, that count as clipped
    trainer, passes = passes_of(level, 0.1, reduce=lambda sums: sums + another_rank)
    trainer.accelerator.sync_gradients = False
    ratios = torch.tensor([[1.5, 0.5, 9.0], [0.5, 2.0, 9.0], [3.0, 3.0, 3.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1]])
    old = torch.full((3, 3), -2.0)
    inputs = {"completion_mask": mask, "advantages": torch.tensor([1.0, -1.0, 0.0]), "old_per_token_logps": old}
    log_probs = old + ratios.log()
    passes.add(inputs, None)
    passes.add({**inputs, "old_per_token_logps": None}, log_probs)
    assert passes.metrics() == {}
    for _ in range(2):
        passes.add(inputs, log_probs)
    assert passes.metrics() == {}, "the optimizer step is not complete"
    trainer.accelerator.sync_gradients = True
    sampled = log_probs - torch.tensor(2.0).log()
    sampled[0, 0] = math.nan
    trainer.state.global_step = 5
    passes.add({**inputs, "sampling_per_token_logps": sampled}, log_probs)
    # The generator's ratios are 2. The first token has none, and is 1 in the mean of its completion.
    others = [2.0] * 3 if level == "token" else [2.0**0.5, 2.0, 2.0]

    def size(values: list[float]) -> Any:
        return pytest.approx(sum(values) ** 2 / (len(values) * sum(value**2 for value in values)))

    assert passes.metrics() == {
        "passes/1/effective_sample_size": size([*weights, *weights, *[1.0] * 4]),
        "passes/1/clip_share": (2 * clipped + 4) / 12,
        "passes/2/effective_sample_size": size([*weights, *[1.0] * 4]),
        "passes/2/clip_share": (clipped + 4) / 8,
        "passes/2/effective_sample_size_with_mismatch": size(others),
    }
    assert passes.metrics() == {}


def metrics_of(ratios: list[list[float]], masks: list[list[int]], level: str = "token") -> dict[str, float]:
    """Return the metrics of one micro-batch with given ratios, by the last part of their names."""
    (_, passes), log_ratios = passes_of(level, 0.0), torch.tensor(ratios).log()
    inputs = {"completion_mask": torch.tensor(masks), "advantages": torch.tensor([1.0, -1.0][: len(ratios)])}
    passes.add({**inputs, "old_per_token_logps": torch.zeros_like(log_ratios)}, log_ratios)
    return {name.removeprefix("passes/1/"): value for name, value in passes.metrics().items()}


def test_edges_of_the_metrics_of_a_pass() -> None:
    # On-policy tokens have a ratio of exactly 1, and a gradient.
    assert metrics_of([[1.0, 1.0], [1.0, 1.0]], [[1, 1], [1, 1]])["clip_share"] == 0.0
    # The float32 sums of three weights of 1.7 give 1.0000001.
    assert metrics_of([[1.7] * 3], [[1, 1, 1]])["effective_sample_size"] == 1.0
    # The ratio of a completion of one token is that of the token.
    found = metrics_of([[2.0, 9.0], [1.0, 1.0]], [[1, 0], [1, 1]], level="sequence")
    assert found["effective_sample_size"] == pytest.approx((2 + 1 + 1) ** 2 / (3 * (4 + 1 + 1)))


def test_a_log_ratio_counts_up_to_20() -> None:
    for one, other, are_equal in ((20.4, 30.0, True), (-20.4, -30.0, True), (19.0, 19.5, False)):
        found = metrics_of([[math.exp(one), math.exp(other)]], [[1, 1]])["effective_sample_size"]
        assert (found == pytest.approx(1.0, abs=1e-4)) is are_equal


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ranks_log_what_one_process_logs(tmp_path: Path) -> None:
    """On one of the two ranks every advantage is zero."""
    entries = []
    for ranks, config in ((1, "cpu"), (2, "ddp_cpu")):
        folder = tmp_path / str(ranks)
        arguments = ("tests.support.train_recorded", "ours", str(ranks), str(folder), "tiny+twice")
        launching.launch_module(config, *arguments)
        history = json.loads((folder / "tiny+twice" / "log.json").read_text())
        entries.append([{k: v for k, v in entry.items() if k.startswith("passes/")} for entry in history][:4])
    alone, two = entries
    assert [sorted(entry) for entry in alone[:2]] == [
        [f"passes/{number}/{name}" for name in ("clip_share", "effective_sample_size")] for number in (1, 2)
    ]
    for one, other in zip(alone, two, strict=True):
        assert other == pytest.approx(one, abs=1e-5)
    assert alone[1]["passes/2/effective_sample_size"] < 0.9999
