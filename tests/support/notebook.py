"""Jupyter kernel that runs the cells of notebooks/one_gpu.ipynb, for its test and for its stored outputs."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "one_gpu.ipynb"
CELL_SECONDS = 600

Output = dict[str, Any]
"""Output of a cell, as a notebook stores it."""


def cells() -> list[dict[str, Any]]:
    """Return the cells of the notebook that hold code."""
    return [cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def code_of(cell: dict[str, Any], parameters: str) -> str:
    """Return the code of a cell. `parameters` follow that of the cell with the parameters."""
    is_parameters = "parameters" in cell["metadata"].get("tags", [])
    return "".join(cell["source"]) + (f"\n{parameters}" if is_parameters else "")


def text_of(outputs: list[Output]) -> str:
    """Return everything that a cell printed or showed, as text."""
    return "".join(one["text"] if "text" in one else str(one["data"].get("text/plain", "")) for one in outputs)


class CellError(Exception):
    """A cell that raised, or did not end in `CELL_SECONDS`. The message holds its code and its outputs."""


class Kernel:
    """A Jupyter kernel in a folder, with some variables of the environment."""

    def __init__(self, folder: Path, **variables: str) -> None:
        from jupyter_client.manager import start_new_kernel

        paths = [str(NOTEBOOK.parents[1]), str(NOTEBOOK.parents[1] / "rewards"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
        environment |= variables
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
        self.manager, self.client = start_new_kernel(cwd=str(folder), env=environment)

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def run(self, code: str, interrupt_when: Callable[[], bool] | None = None) -> list[Output]:
        """Run a cell, interrupt it once when `interrupt_when` is true, and return its outputs.

        Raises:
            CellError: The cell raises, takes too long, or ends before it could be interrupted.
        """
        asked = self.client.execute(code)
        outputs: list[Output] = []
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
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                outputs.append({"output_type": kind, "name": content["name"], "text": content["text"]})
            elif kind in ("execute_result", "display_data"):
                outputs.append({"output_type": kind, "data": content["data"], "metadata": {}})
            elif kind == "error":
                raise CellError("\n".join([code, text_of(outputs), *content["traceback"]]))
            elif kind == "status" and content["execution_state"] == "idle":
                if interrupt_when is not None:
                    raise CellError(f"the cell was over before it could be interrupted:\n{code}\n{text_of(outputs)}")
                return outputs
        raise CellError(f"still running after {CELL_SECONDS} s:\n{code}\n{text_of(outputs)}")
