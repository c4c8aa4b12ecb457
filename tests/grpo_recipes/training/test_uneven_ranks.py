"""Two ranks, one with zero advantages only, train to the parameters of one process and do not hang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support import launching
from tests.support.recorded import model
from tests.support.train_recorded import uneven


def trained(kind: str, ranks: int, output: Path, *options: str, config: str = "cpu") -> dict[str, torch.Tensor]:
    """Train, and return the final weights."""
    launching.launch_module(config, "tests.support.train_recorded", kind, str(ranks), str(output), *options)
    return load_file(next(output.glob("*model.safetensors")))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return the weights of stock TRL in one process."""
    return trained("trl", 1, tmp_path_factory.mktemp("alone"))


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("config", ["ddp_cpu", "zero3_cpu"])
def test_uneven_ranks_train_to_the_weights_of_one_process(config: str, alone: dict, tmp_path: Path) -> None:
    ours = trained("ours", 2, tmp_path, config=config)
    start = model().state_dict()
    assert max(float((alone[name] - start[name]).abs().max()) for name in alone) > 1e-3, "something is learnt"
    for name, expected in alone.items():
        torch.testing.assert_close(ours[name], expected, atol=1e-6, rtol=0, msg=name)
    logged = [entry for entry in json.loads((tmp_path / "log.json").read_text()) if "loss" in entry]
    recording = uneven()
    needed = sum(len(p) - 1 for p in recording.prompts[2:]) + sum(
        len(c) for group in recording.completions[2:] for c in group
    )
    for entry in logged:
        assert entry["efficiency/rows_skipped"] == 8
        assert entry["efficiency/tokens_needed"] == needed, "summed over ranks"
        assert entry["entropy"] > 0


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("config", ["ddp_cpu", "zero3_cpu"])
def test_uneven_ranks_with_an_adapter(config: str, tmp_path: Path) -> None:
    expected = trained("trl", 1, tmp_path / "alone", "--lora")
    ours = trained("ours", 2, tmp_path / "two", "--lora", config=config)
    assert any(value.any() for name, value in expected.items() if "lora_B" in name)
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=0, msg=name)
