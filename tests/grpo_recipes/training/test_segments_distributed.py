"""Two uneven ranks: the weights of stock TRL in one process, under DDP, FSDP2 and ZeRO-3."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from grpo_recipes.recipe.recipe import find_file
from grpo_recipes.training.layout_rules import VERIFIED_UNDER_SHARDING
from tests.grpo_recipes.training.test_reference_distributed import FSDP2
from tests.support import launching
from tests.support.train_recorded import policy_of, uneven

TYPES = ["gpt_oss", "granitemoehybrid", "lfm2", "mamba2", "qwen3_5_text"]
JOBS = [*TYPES, "granitemoehybrid+reversed", "lfm2+reversed", "tiny", "tiny+lora"]
"""Models of `support/train_recorded.py`.

Granite 4 and LFM2 are released in the reversed order: the prefixes of their last layer, a recurrent one, only serve the
states of the completions.
"""

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


def trained(kind: str, ranks: int, output: Path, jobs: list[str], config: str = "cpu") -> None:
    """Train all jobs in one launch, because starting the processes takes longer than training."""
    config = written(config, output.with_suffix(".yaml"))
    launching.launch_module(config, "tests.support.train_recorded", kind, str(ranks), str(output), *jobs)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next(folder.glob("*model.safetensors")))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of what stock TRL trained in one process."""
    folder = tmp_path_factory.mktemp("trl")
    trained("trl", 1, folder, JOBS)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("config", ["ddp_cpu", "zero3", "fsdp2"])
def test_two_ranks_train_to_the_weights_of_trl(config: str, checkpointing: bool, alone: Path, tmp_path: Path) -> None:
    """On one rank all advantages are zero."""
    if config == "zero3":
        pytest.importorskip("deepspeed")
    option = "+checkpointing" if checkpointing else ""
    jobs = [job for job in JOBS if (config, job) != ("fsdp2", "tiny+lora")]
    trained("ours", 2, tmp_path, [job + option for job in jobs], config)
    for job in jobs:
        folder = tmp_path / (job + option)
        layout = "packed" if job.startswith("tiny") else "shared"
        assert [file.read_text() for file in folder.glob("layout-*")] == [layout] * 2
        ours, expected = weights(folder), weights(alone / job)
        for name, value in expected.items():
            torch.testing.assert_close(ours[name], value, atol=2e-5, rtol=0, msg=f"{job}: {name}")
        check_learnt(job, expected)
    for entry in json.loads((tmp_path / f"tiny{option}" / "log.json").read_text()):
        if "loss" in entry:
            check_logged(entry)


def check_learnt(job: str, trained: dict[str, torch.Tensor]) -> None:
    """Check that a model has moved. Some weights are saved under other names than the model has for them."""
    if "lora" in job:
        assert any(value.any() for name, value in trained.items() if "lora_B" in name)
        return
    start = policy_of(job).state_dict().items()
    assert max(float((trained[name] - value).abs().max()) for name, value in start if name in trained) > 1e-3


def check_logged(entry: dict[str, float]) -> None:
    """Check the metrics of a step, which are sums over ranks."""
    recording = uneven()
    prompts, groups = recording.prompts[2:], recording.completions[2:]
    needed = sum(len(prompt) - 1 for prompt in prompts) + sum(len(c) for group in groups for c in group)
    assert entry["efficiency/rows_skipped"] == 8
    assert entry["efficiency/tokens_needed"] == needed
    assert entry["entropy"] > 0


def test_every_type_that_is_shared_under_sharding_was_compared() -> None:
    assert set(TYPES) == VERIFIED_UNDER_SHARDING
