"""notebooks/one_gpu.ipynb: its cells run on a CPU with a tiny model, one of them interrupted and run again."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.notebook import Kernel, cells, code_of, text_of

CELLS = cells()


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
        code = code_of(cell, 'MODEL, STEPS, LENGTH, RATE = "tiny", 30, 8, 1e-3')
        if "run_recipe(recipe)" in code:
            stopped = text_of(kernel.run(code, interrupt_when=trains))
            assert "130" in stopped
            assert not (run / "adapter_model.safetensors").exists()
            assert any(run.glob("checkpoint-*")), "it was saved"
            assert "resuming from" in text_of(kernel.run(code))
            assert (run / "adapter_model.safetensors").is_file()
            state = json.loads((run / "trainer_state.json").read_text())
            assert state["global_step"] == 30
            continue
        said[cell["id"]] = text_of(kernel.run(code))
    whole = "\n".join(said.values())
    for words in ("wrote problems.yaml", "optimizer steps", "B - A", "checks had data", "vllm serve exported"):
        assert words in whole
    assert (run / "report" / "report.html").is_file()
    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_the_stored_outputs_are_of_one_run_of_all_cells() -> None:
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    shown = text_of([output for cell in CELLS for output in joined(cell["outputs"])])
    for words in (
        "wrote problems.yaml",
        "the adapter is in runs/problems",
        "B - A",
        "checks had data",
        "vllm serve exported",
    ):
        assert words in shown


def test_no_stored_output_names_a_machine() -> None:
    """Neither a path from the root, nor an address in memory, nor a control character."""
    for cell in CELLS:
        text = text_of(joined(cell["outputs"]))
        assert not re.search(r"(?<![\w:/<])/(?:home|root|tmp|work|usr|opt|mnt|var)\b", text), cell["id"]
        assert " at 0x" not in text
        assert text.replace("\n", "").isprintable()


def joined(outputs: list[dict]) -> list[dict]:
    """Return stored outputs with their lines joined."""
    found = []
    for output in outputs:
        if "text" in output:
            found.append({"text": "".join(output["text"])})
        else:
            found.append({"data": {kind: "".join(lines) for kind, lines in output["data"].items()}})
    return found
