"""notebooks/one_gpu.ipynb: its cells run on a CPU with a tiny model, one of them interrupted and run again."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "one_gpu.ipynb"
CELLS = [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
CELL_SECONDS = 240


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


class Kernel:
    """A Jupyter kernel in a folder; a cell's output is everything that it printed or showed, as text."""

    def __init__(self, folder: Path):
        from jupyter_client.manager import start_new_kernel

        paths = [str(NOTEBOOK.parents[1]), str(NOTEBOOK.parents[1] / "rewards"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
        self.manager, self.client = start_new_kernel(cwd=str(folder), env=environment)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def run(self, code: str, interrupt_when: Callable[[], bool] | None = None) -> str:
        """Run a cell, and interrupt it once when `interrupt_when` first says so. Fails if the cell raises."""
        asked = self.client.execute(code)
        shown: list[str] = []
        until = time.monotonic() + CELL_SECONDS
        while time.monotonic() < until:
            if interrupt_when is not None and interrupt_when():
                self.manager.interrupt_kernel()
                interrupt_when = None
            try:
                message = self.client.get_iopub_msg(timeout=0.05)
            except Empty:
                continue
            if message["parent_header"].get("msg_id") != asked:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                shown.append(content["text"])
            elif message["msg_type"] in ("execute_result", "display_data"):
                shown.append(str(content["data"].get("text/plain", "")))
            elif message["msg_type"] == "error":
                pytest.fail("\n".join([code, *shown, *content["traceback"]]))
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                assert interrupt_when is None, "the cell was over before it could be interrupted"
                return "".join(shown)
        pytest.fail(f"still running after {CELL_SECONDS} s:\n{code}\n{''.join(shown)}")


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    pytest.importorskip("ipykernel", reason="needs ipykernel, which the extra `dev` brings")
    started = Kernel(tmp_path)
    yield started
    started.close()


@pytest.mark.slow
def test_every_cell_runs_and_ctrl_c_in_training_goes_on(kernel: Kernel, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "tiny")
    said: dict[str, str] = {}
    run = tmp_path / "runs" / "problems"

    def trains() -> bool:
        """Return True if the completions of the first step were logged."""
        return any((run / "completions").glob("*.parquet"))

    for cell in CELLS:
        code = source(cell)
        if "parameters" in cell["metadata"].get("tags", []):
            code += '\nMODEL, STEPS, LENGTH = "tiny", 30, 8'
        if "run_recipe(recipe)" in code:
            stopped = kernel.run(code, interrupt_when=trains)
            assert "130" in stopped
            assert not (run / "model.safetensors").exists()
            assert any(run.glob("checkpoint-*")), "it was saved"
            assert "resuming from" in kernel.run(code)
            assert (run / "model.safetensors").is_file()
            state = json.loads((run / "trainer_state.json").read_text())
            assert state["global_step"] == 30
            continue
        said[code.splitlines()[0]] = kernel.run(code)
    assert "wrote problems.yaml" in said["from pathlib import Path"]
    assert (
        "optimizer steps"
        in said["!grpo-recipes plan problems.yaml --max_steps {STEPS} --max_completion_length {LENGTH}"]
    )
    assert "B - A" in said["!grpo-recipes compare runs/before runs/after"]
    assert "checks had data" in said["!grpo-recipes diagnose runs/problems"]
    assert (run / "report" / "report.html").is_file()


def test_no_output_is_kept_in_the_notebook() -> None:
    """Outputs go stale, and hold whatever a machine printed."""
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in CELLS)
