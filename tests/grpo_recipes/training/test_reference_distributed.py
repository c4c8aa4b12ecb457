"""The reference with parameters partitioned by ZeRO-3 and FSDP2, on two CPU processes."""

import json
from pathlib import Path

import pytest
import yaml
from peft import LoraConfig

from grpo_recipes.recipe.recipe import shipped
from tests.support import launching
from tests.support.reference_worker import REFRESH
from tests.support.short_runs import adapted
from tests.support.tiny import save_policy

CASES = {
    "zero3": ["full", "new", "continued", "bf16", "embedding", "full-resume", "new-resume", "continued-resume"],
    "fsdp2": ["full", "new", "continued", "full-resume", "new-resume", "continued-resume"],
}
FSDP2 = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "FULL_STATE_DICT",
        "fsdp_reshard_after_forward": True,
        "fsdp_cpu_ram_efficient_loading": False,
    },
    "num_machines": 1,
    "num_processes": 2,
    "machine_rank": 0,
    "mixed_precision": "no",
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": True,
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", CASES)
def test_the_reference_of_partitioned_policies(backend: str, extensions: str, tmp_path: Path) -> None:
    """One launch has all cases, because starting two processes takes longer than training them."""
    if backend == "zero3":
        pytest.importorskip("deepspeed")
    save_policy(tmp_path / "policy")
    config = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear")
    adapted(tmp_path / "policy", config, continued=True).save_pretrained(tmp_path / "sft")
    layout = shipped("accelerate_configs", "zero3_cpu")
    if backend == "fsdp2":
        layout = tmp_path / "fsdp2.yaml"
        layout.write_text(yaml.safe_dump(FSDP2))
    arguments = ("tests.support.reference_worker", str(tmp_path), *CASES[backend])
    launching.launch_module(str(layout), *arguments, TORCH_EXTENSIONS_DIR=extensions)
    found = {case: json.loads((tmp_path / f"{case}.json").read_text()) for case in CASES[backend]}
    for case, seen in found.items():
        if case.endswith("-resume"):
            uninterrupted = found[case.removesuffix("-resume")]
            assert seen["policy"] == uninterrupted["policy"], case
            assert seen["reference"] == uninterrupted["reference"], case
        else:
            assert seen["processes"] == 2
            assert seen["partitioned"], case
            assert seen["dtypes"] == ["torch.bfloat16" if case == "bf16" else "torch.float32"]
            assert max(seen["kl"][0], seen["kl"][REFRESH]) <= 1e-6 < min(seen["kl"][1:REFRESH]), case
            assert seen["refreshed"], case
