"""Shared prompts on two ranks: the weights of stock TRL in one process, under DDP, FSDP2 and ZeRO-3."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from grpo_recipes.recipe.recipe import find_file
from grpo_recipes.training.layout_check import VERIFIED_UNDER_SHARDING
from tests.grpo_recipes.training.test_reference_distributed import FSDP2
from tests.support import launching
from tests.tools import models

TYPES = ["gpt_oss", "granitemoehybrid", "lfm2", "mamba2", "qwen3_5_text"]
CONFIGS = ["ddp_cpu", "zero3", "fsdp2"]

ZERO3 = {
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
"""Settings of DeepSpeed that release each weight after its use, as they do the large weights of a real model."""


def written(config: str, path: Path) -> str:
    """Return a configuration of `accelerate launch`, a shipped one or the path of a new file."""
    if config == "fsdp2":
        path.write_text(yaml.safe_dump(FSDP2))
    elif config == "zero3":
        settings = path.with_suffix(".json")
        settings.write_text(json.dumps(ZERO3))
        shipped = yaml.safe_load(find_file("accelerate_configs", "zero3_cpu").read_text())
        given = {"deepspeed_config_file": str(settings), "zero3_init_flag": True}
        # accelerate takes the precision from DeepSpeed's settings.
        path.write_text(yaml.safe_dump({**shipped, "deepspeed_config": given, "mixed_precision": None}))
    else:
        return config
    return str(path)


def trained(kind: str, ranks: int, output: Path, *options: str, config: str = "cpu") -> dict[str, torch.Tensor]:
    """Train, and return the final weights."""
    config = written(config, output.with_suffix(".yaml"))
    launching.launch_module(config, "tests.support.train_recorded", kind, str(ranks), str(output), *options)
    return load_file(next(output.glob("*model.safetensors")))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """Return a dictionary for the weights of stock TRL in one process, by model type."""
    return {}


def compare(
    model_type: str, config: str, options: list[str], alone: dict[str, dict[str, torch.Tensor]], path: Path
) -> None:
    """Compare the weights of ours on two ranks with those of stock TRL in one process.

    Args:
        model_type: type of the model.
        config: configuration of the two ranks.
        options: options of ours. TRL gets `--reversed` only.
        alone: weights of stock TRL by model, to which those of this model are added.
        path: folder of the outputs.
    """
    if config == "zero3":
        pytest.importorskip("deepspeed")
    reversed_layers = "--reversed" in options
    policy = [model_type, *(["--reversed"] if reversed_layers else [])]
    expected = alone.setdefault(" ".join(policy), {})
    if not expected:
        expected.update(trained("trl", 1, path / "trl", *policy))
    ours = trained("ours", 2, path / "ours", model_type, *options, config=config)
    assert [file.read_text() for file in (path / "ours").glob("layout-*")] == ["shared"] * 2
    # Some weights are saved under other names than the model has for them.
    start = models.build(model_type, reversed_layers=reversed_layers).state_dict()
    moved = max(float((expected[name] - value).abs().max()) for name, value in start.items() if name in expected)
    assert moved > 1e-3, "something is learnt"
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, atol=2e-5, rtol=0, msg=name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("model_type", TYPES)
def test_two_ranks_with_shared_prompts_train_to_the_weights_of_trl(
    model_type: str, config: str, checkpointing: bool, alone: dict[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    compare(model_type, config, ["--checkpointing"] if checkpointing else [], alone, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("config", ["zero3", pytest.param("fsdp2", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("model_type", ["granitemoehybrid", "lfm2"])
def test_models_that_end_with_a_recurrent_layer_train_to_the_weights_of_trl(
    model_type: str, config: str, checkpointing: bool, alone: dict[str, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """As Granite 4 and LFM2 are released. The prefixes of the last layer only serve the states of the completions."""
    options = ["--reversed", *(["--checkpointing"] if checkpointing else [])]
    compare(model_type, config, options, alone, tmp_path)


def test_every_type_that_is_shared_under_sharding_was_compared() -> None:
    assert set(TYPES) == VERIFIED_UNDER_SHARDING
