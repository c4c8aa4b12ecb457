"""First questions to a GPU: which kernels it has, and what a new shape costs. Each takes a second or two.

    PYTHONPATH=.:rewards python benchmarks/gpu_probe.py

Prints a JSON line for each question, with the seconds that it took. A question that fails has the end of its traceback,
and does not end the others. Without a GPU everything runs at tiny sizes, and the figures mean nothing.
"""

from __future__ import annotations

import argparse
import inspect
import json
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from grpo_recipes.training.varlen import VarlenKernel, varlen_attn
from grpo_rewards.attention import without_cudnn_attention

Answer = dict[str, Any]
KERNELS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "torch's choice": nullcontext,  # cuDNN on Hopper
    "without cuDNN": without_cudnn_attention,
}
HEADS = ((14, 2, 64), (12, 2, 128), (8, 8, 80), (8, 4, 256), (4, 2, 12))
"""Attention heads, key-value heads and dimensions per head, of Qwen2.5 and of other models."""


class Device:
    """GPU, or a CPU with tiny sizes."""

    def __init__(self, name: str) -> None:
        self.name, self.is_gpu = name, name == "cuda"

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def milliseconds(self, work: Callable[[], object]) -> float:
        """Return the milliseconds of a call."""
        self.wait()
        start = time.perf_counter()
        work()
        self.wait()
        return 1000 * (time.perf_counter() - start)

    def states(self, rows: int, heads: tuple[int, int, int], queries: int, keys: int, *, grad: bool) -> list[Tensor]:
        """Return query, key and value in bfloat16."""
        own, shared, size = heads
        shapes = [(rows, own, queries, size), (rows, shared, keys, size), (rows, shared, keys, size)]
        return [torch.randn(shape, device=self.name, dtype=torch.bfloat16, requires_grad=grad) for shape in shapes]

    def first_and_again(self, call: Callable[[int], Callable[[], object]], sizes: range) -> Answer:
        """Return the milliseconds of the first and of the second call at each size."""
        first, again = [], []
        for size in sizes:
            work = call(size)
            first.append(round(self.milliseconds(work), 2))
            again.append(round(self.milliseconds(work), 2))
        return {"first": first, "again": again}


def machine(device: Device) -> Answer:
    """Return the GPU and the versions of packages."""
    found: Answer = {}
    for package in ("torch", "transformers", "accelerate", "peft", "trl", "datasets"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if device.is_gpu:
        found["GPU"] = torch.cuda.get_device_name()
        found["cuDNN"] = torch.backends.cudnn.version()
        found["free GiB"] = torch.cuda.mem_get_info()[0] >> 30
    return found


def rates(device: Device) -> Answer:
    """Return the rate of bfloat16 products and the time of a launch."""
    size = 8192 if device.is_gpu else 64
    first, second = (torch.randn(size, size, device=device.name, dtype=torch.bfloat16) for _ in range(2))
    row, launches = first[0], 500
    times = sorted(device.milliseconds(lambda: first @ second) for _ in range(6))

    def launch() -> None:
        for _ in range(launches):
            row.add_(1)

    launch()
    return {
        "bfloat16, TFLOP/s": round(2 * size**3 / times[2] / 1e9, 1),
        "a launch, µs": round(1000 * device.milliseconds(launch) / launches, 1),
    }


def new_training_shapes(device: Device) -> Answer:
    """Return the milliseconds of attention, forward and backward, with a mask (TRL's rows) and causal (packed rows)."""
    found = {}
    for name, kernel in KERNELS.items():
        for masked in (True, False):

            def call(width: int, kernel: Any = kernel, masked: bool = masked) -> Callable[[], object]:
                query, key, value = device.states(8, (14, 14, 64), width, width, grad=True)
                mask = torch.ones(8, 1, width, width, dtype=torch.bool, device=device.name).tril() if masked else None

                def work() -> None:
                    with kernel():
                        sdpa(query, key, value, attn_mask=mask, is_causal=not masked).sum().backward()

                return work

            start = (301 if masked else 401) if device.is_gpu else 20
            found[f"{name}, {'mask' if masked else 'causal'}"] = device.first_and_again(
                call, range(start, start + 30, 6)
            )
    return found


def new_decoding_shapes(device: Device) -> Answer:
    """Return the milliseconds of the attention of one token, with grouped queries as rows and a mask, or without."""
    found = {}
    for name, kernel in KERNELS.items():
        for masked in (True, False):

            def call(keys: int, kernel: Any = kernel, masked: bool = masked) -> Callable[[], object]:
                heads = (2, 2, 64) if masked else (14, 2, 64)
                query, key, value = device.states(64, heads, 7 if masked else 1, keys, grad=False)
                mask = torch.ones(64, 1, 1, keys, dtype=torch.bool, device=device.name) if masked else None

                def work() -> None:
                    with kernel(), torch.no_grad():
                        sdpa(query, key, value, attn_mask=mask, enable_gqa=not masked)

                return work

            found[f"{name}, {'mask' if masked else 'no mask'}"] = device.first_and_again(call, range(200, 205))
    return found


def nan_of_cudnn(device: Device) -> Answer:
    """Return the entries of a query's gradient that are not finite, at 704 columns (pytorch#196678)."""
    found = {}
    for name, kernel in KERNELS.items():
        torch.manual_seed(0)
        query, key, value = (
            torch.randn(1, 1, 704, 64, device=device.name, dtype=torch.bfloat16) * scale for scale in (0.1, 0.1, 1.0)
        )
        query[..., 0], key[..., 0] = 1.0, -960
        query.requires_grad_()
        mask = torch.ones(704, 704, dtype=torch.bool, device=device.name).tril()[None, None]
        with kernel():
            sdpa(query, key, value, attn_mask=mask).backward(torch.randn_like(value))
        assert query.grad is not None
        found[name] = int((~torch.isfinite(query.grad)).sum())
    return found


def varlen_kernel(device: Device) -> Answer:
    """Return how `varlen_attn` is called for the heads of several models, or why it is not used."""
    if varlen_attn is None or not device.is_gpu:
        return {"varlen_attn": "needs a GPU and torch 2.10"}
    found: Answer = {"arguments": str(inspect.signature(varlen_attn))}
    for heads in HEADS:
        refusals: list[str] = []
        kernel = VarlenKernel(refusals.append)
        _, call = kernel._trial(*device.states(1, heads, 18, 18, grad=False), None)
        own, shared, size = heads
        found[f"{own}/{shared} heads of {size}"] = str(call) if call else refusals[0]
    return found


QUESTIONS = (machine, rates, new_training_shapes, new_decoding_shapes, nan_of_cudnn, varlen_kernel)


def main(args: list[str] | None = None) -> None:
    """Ask all questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    device = Device(parser.parse_args(args).device)
    for question in QUESTIONS:
        start = time.perf_counter()
        try:
            answer = question(device)
        except Exception:  # a question that fails must not end the others
            answer = {"FAILED": traceback.format_exc()[-600:]}
        print(json.dumps({question.__name__: answer, "s": round(time.perf_counter() - start, 1)}), flush=True)


if __name__ == "__main__":
    main()
