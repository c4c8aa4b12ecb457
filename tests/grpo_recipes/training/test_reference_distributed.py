"""The reference with parameters partitioned by ZeRO-3 and FSDP2, on two CPU processes."""

import json
import os
from pathlib import Path
from typing import Any

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
RUNS = [(backend, case) for backend, cases in CASES.items() for case in cases if "-" not in case]
RESUMED = [(backend, case) for backend, cases in CASES.items() for case in cases if "-" in case]


class Launches:
    """One launch per backend for all its cases, because starting two processes takes longer than training them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def seen(self, backend: str, case: str) -> dict[str, Any]:
        folder = self.root / backend
        if not folder.exists():
            self.launch(backend, folder)
        return json.loads((folder / f"{case}.json").read_text())

    def launch(self, backend: str, folder: Path) -> None:
        save_policy(folder / "policy")
        config = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear")
        adapted(folder / "policy", config, continued=True).save_pretrained(folder / "sft")
        layout = shipped("accelerate_configs", "zero3_cpu")
        if backend == "fsdp2":
            layout = folder / "fsdp2.yaml"
            layout.write_text(yaml.safe_dump(FSDP2))
        # DeepSpeed builds a helper here. A run killed during the build leaves a lock that would stop every later run.
        extensions = os.environ.get("TORCH_EXTENSIONS_DIR", str(self.root / "extensions"))
        worker = "tests.support.reference_worker"
        launching.launch_module(str(layout), worker, str(folder), *CASES[backend], TORCH_EXTENSIONS_DIR=extensions)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.mktemp("distributed"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("backend", "case"), RUNS)
def test_the_kl_is_0_at_step_0_and_after_a_hard_refresh(launches: Launches, backend: str, case: str) -> None:
    if backend == "zero3":
        pytest.importorskip("deepspeed")
    seen = launches.seen(backend, case)
    assert seen["processes"] == 2
    assert seen["partitioned"]
    assert seen["dtypes"] == ["torch.bfloat16" if case == "bf16" else "torch.float32"]
    kl = seen["kl"]
    assert max(kl[0], kl[REFRESH]) <= 1e-6 < min(kl[REFRESH - 1], kl[REFRESH + 1])
    assert seen["refreshed"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("backend", "case"), RESUMED)
def test_a_resumed_run_equals_the_uninterrupted_run(launches: Launches, backend: str, case: str) -> None:
    if backend == "zero3":
        pytest.importorskip("deepspeed")
    resumed, uninterrupted = launches.seen(backend, case), launches.seen(backend, case.removesuffix("-resume"))
    assert resumed["policy"] == uninterrupted["policy"]
    assert resumed["reference"] == uninterrupted["reference"]
