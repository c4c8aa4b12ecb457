"""Recorded completions with tool results, trained in every layout: the gradient of each optimizer step is TRL's.

A tool's tokens are context of the turns behind them, and in no loss, KL, entropy, clip or ratio of a sequence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from grpo_recipes import GRPOTrainer
from grpo_recipes.recipe.losses import LOSS_TYPES
from tests.support.grids import covering
from tests.support.recorded import Recording, compare, gradients, largest_gap, make_trainer, model

LIMIT = 1e-5
"""Largest difference of a gradient, relative to the largest entry of its tensor."""
VESPO_LIMIT = 3e-5
"""`LIMIT` of VESPO, whose weight of a row is the exponential of 3 + 2s - 3e^s, with s the sum of a row's log-ratios.

A log-probability of -5 is rounded by 3e-7, so s of up to 12 tokens by about 1e-6. The rows have s up to 1.4, where an
error of s is multiplied by up to 10. Terms of rows cancel: an entry of `model.norm.weight` is 0.009 where the step's
largest is 0.077. On a build of torch 2.8, TRL's gradient in float32 differs from float64's by 5e-6 and ours from TRL's
by 1.4e-5.
"""
LAYOUTS: list[Any] = [
    "auto",
    {"skip_zero_advantage": False},
    {"layout": "trimmed"},
    {"layout": "padded"},
    "off",
]
SIZES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
TURNS = Recording.random(seed=1, zero=(2,)).with_tools()
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "KL": {"beta": 0.04},
    "KL without bias correction": {"beta": 0.04, "use_bias_correction_kl": False, "num_iterations": 2},
    "entropy bonus": {"entropy_coef": 0.05},
    "entropy quantile": {"top_entropy_quantile": 0.4},
    "ratio of sequences": {"importance_sampling_level": "sequence", "num_iterations": 3},
    "iterations": {"num_iterations": 3, "epsilon_high": 0.28, "beta": 0.04},
    "two-sided clip": {"delta": 1.5, "num_iterations": 2},
    "windows": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "windows across generations": {"gradient_accumulation_steps": 6, "steps_per_generation": 4, "generations": 3},
    "truncated": {"mask_truncated_completions": True},
    "off-policy mask": {"off_policy_mask_threshold": 0.05, "num_iterations": 3},
    "LoRA": {"peft": True, "num_iterations": 2, "beta": 0.04},
}
PER_TOKEN = ("cispo", "sapo", "vespo")
"""Losses that refuse a ratio of whole completions."""
CELLS = [
    cell
    for cell in covering(OPTIONS, LOSS_TYPES, LAYOUTS, rest=pytest.mark.nightly)
    if cell.values[0] != "ratio of sequences" or cell.values[1] not in PER_TOKEN
]


def gap(folder: Path, option: str, recording: Recording = TURNS, **config: Any) -> float:
    """Return the difference of our gradients from TRL's under an option."""
    settings = {**SIZES, **config, **OPTIONS[option]}
    if settings.pop("peft", False):
        settings["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return compare(recording, folder, **settings)


@pytest.mark.one_case_in(36)
@pytest.mark.parametrize(("option", "loss_type", "micro_batching"), CELLS, ids=str)
def test_the_gradient_is_trls(option: str, loss_type: str, micro_batching: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)  # LoRA's weights
    limit = VESPO_LIMIT if loss_type == "vespo" else LIMIT
    assert gap(tmp_path, option, loss_type=loss_type, micro_batching=micro_batching) <= limit


@pytest.mark.parametrize(
    ("loss_type", "micro_batching"),
    [
        ("dapo", {"layout": "trimmed"}),
        *(
            pytest.param(*cell.values, marks=pytest.mark.slow)
            for cell in covering(LOSS_TYPES, LAYOUTS[:-1])
            if not cell.marks
        ),
    ],
    ids=str,
)
def test_full_kl_is_the_same_in_every_layout(loss_type: str, micro_batching: Any, tmp_path: Path) -> None:
    """The KL over the vocabulary is ours: the padded layout, which the oracle is compared with, stands for TRL."""
    steps = []
    settings = {**SIZES, "loss_type": loss_type, "kl_estimator": "full", "beta": 0.1, "num_iterations": 2}
    for name in ("off", micro_batching):
        made = make_trainer(GRPOTrainer, TURNS, model(), tmp_path, micro_batching=name, **settings)
        steps.append(gradients(made, TURNS.rows()))
    assert largest_gap(steps[1], steps[0]) <= LIMIT


@pytest.mark.one_case_in(5)
@pytest.mark.parametrize("micro_batching", LAYOUTS, ids=str)
def test_rewritten_tool_tokens_change_the_context_only(micro_batching: Any, tmp_path: Path) -> None:
    """A tool token behind the last turn is read by nothing: other tokens there leave the gradient as it is."""
    assert TURNS.masks is not None
    found = []
    for token in (5, 9):
        completions = [
            [ids if mask[-1] else [*ids[:-1], token] for ids, mask in zip(group, masks, strict=True)]
            for group, masks in zip(TURNS.completions, TURNS.masks, strict=True)
        ]
        recording = Recording(TURNS.prompts, completions, TURNS.rewards, TURNS.masks)
        settings = {**SIZES, "micro_batching": micro_batching, "entropy_coef": 0.05}
        made = make_trainer(GRPOTrainer, recording, model(), tmp_path, **settings)
        found.append(gradients(made, recording.rows()))
    assert largest_gap(found[1], found[0]) <= LIMIT
