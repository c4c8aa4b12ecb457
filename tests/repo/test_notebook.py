"""notebooks/one_gpu.ipynb: its cells run on a CPU with a tiny model, one of them interrupted and run again."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.notebook import Kernel, cells, code_of, text_of

CELLS = cells()


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    pytest.importorskip("ipykernel", reason="needs ipykernel, which the extra `dev` brings")
    started = Kernel(tmp_path)
    yield started
    started.close()


@pytest.mark.nightly
def test_every_cell_runs_and_ctrl_c_in_training_goes_on(kernel: Kernel, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "tiny")
    said = []
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
            assert json.loads((run / "trainer_state.json").read_text())["global_step"] == 30
            continue
        said.append(text_of(kernel.run(code)))
    assert_complete("\n".join(said))
    assert (run / "report" / "report.html").is_file()
    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_the_stored_outputs_are_of_one_run_of_all_cells() -> None:
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    assert_complete("".join(stored(cell) for cell in CELLS))


def assert_complete(shown: str) -> None:
    """Assert that the outputs are those of `init`, training, `compare`, `diagnose` and `export`."""
    for words in ("wrote problems.yaml", "B - A", "checks had data", "vllm serve exported"):
        assert words in shown


def test_no_stored_output_names_a_machine() -> None:
    """Neither a path from the root, nor an address in memory, nor a control character."""
    for cell in CELLS:
        text = stored(cell)
        assert not re.search(r"(?<![\w:/<])/(?:home|root|tmp|work|usr|opt|mnt|var)\b", text), cell["id"]
        assert " at 0x" not in text
        assert text.replace("\n", "").isprintable()


def stored(cell: dict[str, Any]) -> str:
    """Return the stored outputs of a cell as text."""
    outputs = cell["outputs"]
    return "".join("".join(one.get("text") or one["data"].get("text/plain", [])) for one in outputs)
