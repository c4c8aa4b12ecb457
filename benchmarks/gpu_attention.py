"""Attention of one micro-batch by each kernel: outputs, gradients, time and memory. Needs torch and no trl.

The micro-batch is one prompt with eight completions, N tokens as one packed row, or B rows of W columns as TRL pads
them. All kernels get the same numbers, and are compared with the formula in float32.

Shapes: H attention heads, K key-value heads, D dimensions per head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import torch
from gpu_rows import SHAPES, Bench, Measurement, NotRun, Row
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from workloads import Batch

from grpo_recipes.generation.agreement import ATTENTION
from grpo_recipes.training.packed_attention import GroupSpans, Span, sdpa
from grpo_recipes.training.varlen import VarlenKernel

LIMITS = {torch.float32: 1e-4, torch.bfloat16: ATTENTION}
"""Largest difference from the formula, relative to the largest entry, by dtype."""


class Inputs(NamedTuple):
    """Arguments of attention, (B, heads, tokens, D), and the gradient of its output, (B, tokens, H, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor


@dataclass(frozen=True)
class PackedRow:
    """A group as our packed row."""

    prefix: Span
    suffixes: list[Span]
    inputs: Inputs

    @classmethod
    def draw(cls, batch: Batch, shape: str, device: str) -> PackedRow:
        """Return the first group of a batch, with random numbers for a model's heads."""
        start = len(batch.prompts[0]) - 1
        prefix, suffixes = (0, start), []
        for completion in batch.completions[0]:
            suffixes.append((start, start + len(completion)))
            start += len(completion)
        sizes = SHAPES[shape]
        heads, key_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
        width = sizes["hidden_size"] // heads
        generator = torch.Generator(device).manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, width, generator=generator, device=device)

        key, value = noise(1, key_heads, start), noise(1, key_heads, start)
        return cls(prefix, suffixes, Inputs(noise(1, heads, start), key, value, noise(1, start, heads)))

    def formula(self) -> list[Tensor]:
        """Return the output and the gradients of query, key and value by the formula of attention."""
        query, key, value = (tensor.clone().requires_grad_() for tensor in self.inputs[:3])
        repeats = query.shape[1] // key.shape[1]
        parts = []
        for first, last in [self.prefix, *self.suffixes]:
            own = torch.arange(first, last, device=query.device)
            seen = own
            if (first, last) != self.prefix:
                seen = torch.cat([torch.arange(*self.prefix, device=query.device), own])
            keys, values = (tensor[0, :, seen].repeat_interleave(repeats, 0) for tensor in (key, value))
            scores = query[0, :, own] @ keys.transpose(1, 2) / query.shape[3] ** 0.5
            scores = scores.masked_fill(seen > own[:, None], -torch.inf)
            parts.append((scores.softmax(-1) @ values).transpose(0, 1))
        output = torch.cat(parts)[None]
        return [output.detach(), *torch.autograd.grad(output, (query, key, value), self.inputs.gradient)]


@dataclass(frozen=True)
class PaddedRows:
    """The same group in TRL's layout, as wide as the longest prompt and the longest completion of the batch."""

    index: Tensor
    """Position in the packed row of each token, and -1 for padding, (B, W)."""
    first: Tensor
    """Place among the B × W tokens of the first copy of each token of the packed row, (N,)."""
    inputs: Inputs

    @classmethod
    def of(cls, row: PackedRow, batch: Batch) -> PaddedRows:
        """Return the rows with the numbers of a packed row."""
        left, right = max(map(len, batch.prompts)) - 1, batch.longest
        device, length = row.inputs.query.device, row.suffixes[-1][1]
        index = torch.full((len(row.suffixes), left + right), -1, device=device)
        for number, (start, stop) in enumerate(row.suffixes):
            index[number, left - row.prefix[1] : left] = torch.arange(*row.prefix, device=device)
            index[number, left : left + stop - start] = torch.arange(start, stop, device=device)
        places = torch.arange(index.numel(), device=device)
        owners = index.flatten().where(index.flatten() >= 0, length)
        first = places.new_full((length + 1,), len(places)).scatter_reduce(0, owners, places, "amin")[:length]
        gradient = torch.zeros(len(places), *row.inputs.gradient.shape[2:], device=device)
        gradient[first] = row.inputs.gradient[0]
        spread = [tensor[0][:, index.clamp(min=0)].transpose(0, 1) for tensor in row.inputs[:3]]
        return cls(index, first, Inputs(*spread, gradient.unflatten(0, index.shape)))

    @property
    def mask(self) -> Tensor:
        """Mask as transformers makes it, (B, 1, W, W): causal, and no padding is a key but its own."""
        columns = torch.arange(self.index.shape[1], device=self.index.device)
        causal, own = columns <= columns[:, None], columns == columns[:, None]
        return ((self.index >= 0)[:, None, None] & causal) | own

    def packed(self, results: Sequence[Tensor]) -> list[Tensor]:
        """Return an output and gradients as those of the packed row, copies of a token added in float32."""
        output, *gradients = results
        folded = []
        for gradient in gradients:
            heads = gradient.float().transpose(1, 2)[self.index >= 0]  # (tokens, heads, D)
            total = heads.new_zeros(len(self.first), *heads.shape[1:])
            folded.append(total.index_add(0, self.index[self.index >= 0], heads).transpose(0, 1)[None])
        return [output.flatten(0, 1)[self.first][None], *folded]


def attention(bench: Bench) -> Iterator[Measurement]:
    """Compare the kernels of packed rows, and SDPA on padded rows, with the formula: results, time and memory."""
    kernels = [("SDPA, padded rows", bench.dtype), ("SDPA, packed", bench.dtype), ("varlen_attn, packed", bench.dtype)]
    if bench.dtype != torch.float32:
        kernels.append(("SDPA, packed", torch.float32))
    for shape in bench.shapes:
        for workload in ("a", "b"):
            for name, dtype in kernels:
                head = {"heads of": shape, "workload": workload, "kernel": name, "dtype": str(dtype).split(".")[1]}
                yield Measurement(head, lambda s=shape, w=workload, n=name, d=dtype: measured(bench, s, w, n, d))


def measured(bench: Bench, shape: str, workload: str, name: str, dtype: torch.dtype) -> Row:
    """Return the figures of a kernel."""
    batch = bench.batch(workload, 0)
    row = PackedRow.draw(batch, shape, bench.device)
    padded = PaddedRows.of(row, batch) if "padded" in name else None
    given = (padded or row).inputs
    inputs = Inputs(*(tensor.to(dtype).contiguous() for tensor in given))
    for tensor in inputs[:3]:
        tensor.requires_grad_()
    forward = _kernel(name, row, padded)

    def whole() -> list[Tensor]:
        output = forward(*inputs[:3])
        return [output.detach(), *torch.autograd.grad(output, inputs[:3], inputs.gradient)]

    found = whole() if padded is None else padded.packed(whole())
    gaps = [_relative_gap(mine, exact) for mine, exact in zip(found, row.formula(), strict=True)]
    calls = 1 if bench.tiny else 10  # a short kernel ends before the host has noticed that it runs
    held, peak = memory(bench, lambda: forward(*inputs[:3]), inputs)
    return {
        "tokens": inputs.query.shape[0] * inputs.query.shape[2],
        "difference of output": f"{gaps[0]:.1e}",
        "of gradients": f"{max(gaps[1:]):.1e}",
        "limit": f"{LIMITS[dtype]:.0e}",
        "result": "ok" if max(gaps) <= LIMITS[dtype] else "WRONG",
        "forward, ms": f"{1000 * seconds(bench, lambda: forward(*inputs[:3]), calls):.3f}",
        "and backward, ms": f"{1000 * seconds(bench, whole, calls):.3f}",
        "held, MiB": held,
        "peak, MiB": peak,
    }


def _kernel(name: str, row: PackedRow, padded: PaddedRows | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return attention as a function of query, key and value."""
    if padded is not None:
        mask = padded.mask

        def stock(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            repeats = query.shape[1] // key.shape[1]  # transformers repeats the heads wherever there is a mask
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
            return scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)

        return stock
    spans = GroupSpans([(row.prefix, row.suffixes)])
    if name.startswith("SDPA"):
        return lambda query, key, value: sdpa(spans, query, key, value, None)
    refusals: list[str] = []
    kernel = VarlenKernel(refusals.append)

    def one_call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = kernel(spans, query, key, value, None)
        if output is None:
            raise NotRun(refusals[0] if refusals else "varlen_attn takes 16 bits on a GPU")
        return output

    return one_call


def seconds(bench: Bench, work: Callable[[], object], calls: int = 1, series: int = 5) -> float:
    """Return the median time of a call, without the first one, over `series` series of `calls` calls."""
    work()
    found = []
    for _ in range(series):
        bench.synchronise()
        started = time.perf_counter()
        for _ in range(calls):
            work()
        bench.synchronise()
        found.append((time.perf_counter() - started) / calls)
    return median(found)


def memory(bench: Bench, forward: Callable[[], Tensor], inputs: Inputs) -> tuple[str, str]:
    """Return the MiB that the graph of a forward pass holds beside its inputs, and the peak of both passes."""
    if bench.device == "cpu":
        return "-", "-"
    bench.synchronise()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = forward()
    held = torch.cuda.memory_allocated() - before
    torch.autograd.grad(output, inputs[:3], inputs.gradient)
    peak = torch.cuda.max_memory_allocated() - before
    return f"{held / 2**20:.1f}", f"{peak / 2**20:.1f}"


def _relative_gap(found: Tensor, exact: Tensor) -> float:
    gap = (found.float() - exact).abs().max() / exact.abs().max()
    return float(gap.nan_to_num(torch.inf))
