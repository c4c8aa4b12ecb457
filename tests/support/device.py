"""Device of the tests that also run on a GPU: `GRPO_TEST_DEVICE` is cpu (default), pretend (a pretend GPU) or cuda.

GRPO_TEST_DEVICE=cuda pytest -m gpu
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support.pretend_gpu import PretendGPU

NAME = os.environ.get("GRPO_TEST_DEVICE", "cpu")
if NAME not in ("cpu", "pretend", "cuda"):
    raise ValueError(f"GRPO_TEST_DEVICE is {NAME!r}: set cpu, pretend or cuda")
TYPE = "cpu" if NAME == "cpu" else "cuda"

slow_on_cpu = pytest.mark.slow if NAME == "cpu" else pytest.mark.gpu
"""Mark of a test that shows nothing new on a CPU."""


def here(value: Any) -> Any:
    """Return a tensor, a model or a dictionary of tensors on the device of the tests."""
    if isinstance(value, Mapping):
        return {name: here(item) for name, item in value.items()}
    # Outside of a test, such as in a module that is imported, there is no pretend GPU.
    return value.to(TYPE) if NAME != "pretend" or PretendGPU.current is not None else value


def tolerance(on_cpu: float) -> float:
    """Return the tolerance of a comparison in float32. The kernels of a GPU add in another order."""
    return on_cpu * 10 if NAME == "cuda" else on_cpu


@contextmanager
def device_of_tests() -> Iterator[None]:
    """Let tensors inside this block be on the device of the tests."""
    if NAME != "pretend":
        yield
        return
    with PretendGPU():
        yield


def adopt(trainer: Any) -> None:
    """Move a trainer to the pretend GPU if a test runs there. A real one has it from the start."""
    if NAME == "pretend" and PretendGPU.current is not None:
        PretendGPU.current.adopt(trainer)


def allocated() -> tuple[int, int]:
    """Return the bytes in use on the GPU, and the largest number since the last call, after its work is done."""
    torch.cuda.synchronize()
    found = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found
