"""Runs with `optim: adamw_bf16`, killed and resumed on one process and two, and runs under DeepSpeed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from tests.support import launching

pytestmark = pytest.mark.slow
MODULE = "tests.support.train_reading_states"
KEPT = ["torch.bfloat16", "torch.float32"]
CURED = {"dtype": "bfloat16", "optim": "adamw_bf16", "learning_rate": 1e-5, "max_steps": 6, "save_total_limit": 3}
LORA = {"use_peft": True, "lora_target_modules": ["q_proj", "v_proj"], "lora_r": 4}


def dtypes(output: Path) -> dict[str, list[str]]:
    return json.loads((output / "dtypes-rank0.json").read_text())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("layout", "tuning"), [pytest.param("cpu", "lora", marks=pytest.mark.nightly), ("ddp_cpu", "full")]
)
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(layout: str, tuning: str, tmp_path: Path) -> None:
    """Parameters, completions, moments and low bits are equal to the bit."""
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 16)
    processes = 1 if layout == "cpu" else 2
    changes = {**CURED, **(LORA if tuning == "lora" else {}), "per_device_train_batch_size": 16 // processes}
    alone = launching.write_recipe(tmp_path / "alone.yaml", policy, rows, tmp_path / "alone", **changes)
    launching.launch(layout, alone, module=MODULE)
    output = tmp_path / "killed"
    killed = launching.write_recipe(tmp_path / "killed.yaml", policy, rows, output, **changes)
    process = launching.start(layout, killed, module=MODULE)
    assert launching.wait_for((output / "checkpoint-4").is_dir, process)
    launching.kill_tree(process.pid)
    launching.finish(process)
    assert not (output / "trainer_state.json").exists()
    said = launching.launch(layout, killed, "--resume_from_checkpoint", "true", module=MODULE)
    assert "resuming from" in said
    launching.assert_same_run(tmp_path / "alone", output)
    for rank in range(processes):
        kept = [torch.load(folder / f"state-rank{rank}.pt") for folder in (tmp_path / "alone", output)]
        assert len(kept[0]) == len(kept[1]) > 0
        assert all(map(torch.equal, *kept))
    expected = ["torch.float32"] if tuning == "lora" else ["torch.bfloat16"]
    assert dtypes(output)["weights"] == expected  # PEFT keeps an adapter on a bfloat16 base in float32
    assert dtypes(output)["state"] == (["torch.float32"] if tuning == "lora" else KEPT)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("stage", "optim"), [(2, "adamw_torch"), (3, "adamw_torch"), (3, "adamw_bf16")])
def test_deepspeed_keeps_float32_weights_of_its_own(stage: int, optim: str, tmp_path: Path, extensions: str) -> None:
    """The weights are bfloat16, and a step updates float32 copies, so `adamw_bf16` is refused under DeepSpeed."""
    pytest.importorskip("deepspeed")
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 16)
    zero3 = yaml.safe_load((launching.ROOT / "accelerate_configs" / "zero3_cpu.yaml").read_text())
    zero3["deepspeed_config"] |= {"zero_stage": stage, "zero3_init_flag": stage == 3}
    zero3["mixed_precision"] = "bf16"
    layout = tmp_path / "zero.yaml"
    layout.write_text(yaml.safe_dump(zero3))
    changes = {**CURED, "optim": optim, "bf16": True, "max_steps": 2, "save_strategy": "no", "save_steps": None}
    recipe = launching.write_recipe(tmp_path / "r.yaml", policy, rows, tmp_path / "run", **changes)
    process = launching.start(str(layout), recipe, module=MODULE, TORCH_EXTENSIONS_DIR=extensions)
    said = launching.finish(process)
    if optim == "adamw_bf16":
        assert process.returncode != 0
        assert "`optim`" in said
        return
    assert process.returncode == 0, said[-5000:]
    seen = dtypes(tmp_path / "run")
    assert seen["weights"] == ["torch.bfloat16"]
    assert seen["updated"] == ["torch.float32"]
    assert seen["state"] == ["torch.float32"]
