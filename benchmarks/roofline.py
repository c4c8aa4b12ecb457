"""Training phase of TRL and ours on GPUs that nobody had, predicted from the kernels of one micro-batch.

    python benchmarks/roofline.py > benchmarks/results/roofline.md          # a minute, on any machine with torch 2.12

A micro-batch of 8 completions runs forward and backward on the meta device, which has sizes and no data. Each kernel
that a GPU would launch is recorded with its floating-point operations and the bytes that it reads and writes. A kernel
takes the longer of both at the rates of `GPUS`, and at least `SHORTEST`. The host takes `LAUNCH` for each kernel. A
micro-batch takes the longer of all kernels and all launches. Models are measured with one and two layers, and the
difference is multiplied by their number of layers.

What the CPU would compute by other kernels is replaced: SDPA by FlashAttention, or by the memory-efficient kernel with
a 16-bit bias where there is a mask, varlen_attn by its operator, and TRL's head by its Triton kernels.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import transformers
import trl
from gpu_rows import DENSE_TFLOPS
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config
from transformers.utils import logging as transformers_logging
from trl.kernels import chunked_logprob
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as HEAD_CHUNK

from grpo_recipes.training import varlen
from grpo_recipes.training.packed_attention import AttentionSwitch, GroupSpans

PROMPTS, GROUP = 8, 8
SHORT, LONG, LONGEST = 200, 500, 1024
"""Tokens of the shortest prompt, of the longest prompt, and of the longest completion."""
RANK = 16
"""Rank of LoRA."""
LAUNCH, SHORTEST = 4.5e-6, 2e-6
"""Seconds of the host per kernel in eager mode, and of the shortest kernel."""
MATMUL_SHARE, ATTENTION_SHARE, BANDWIDTH_SHARE = 0.65, 0.45, 0.8
"""Shares of a GPU's peak that matrix products, attention kernels and memory-bound kernels reach."""


class GPU(NamedTuple):
    """Peaks of a GPU from its data sheet."""

    flops_16bit: float
    """Dense bfloat16 operations per second."""
    flops_32bit: float
    """Float32 operations per second, without TF32."""
    bandwidth: float
    """Bytes per second."""


GPUS = {
    "H200": GPU(1e12 * DENSE_TFLOPS["H200"], 67e12, 4.8e12),
    "H100": GPU(1e12 * DENSE_TFLOPS["H100"], 67e12, 3.35e12),
    "A100": GPU(1e12 * DENSE_TFLOPS["A100"], 19.5e12, 2.04e12),
    "4090": GPU(1e12 * DENSE_TFLOPS["4090"], 82e12, 1.01e12),
}

SIZES: dict[str, dict[str, int | bool]] = {
    "0.5B": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "1.5B": {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "7B": {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False},
}  # fmt: skip
"""Configurations of Qwen2.5."""

RUNS = [("0.5B", False, False), ("1.5B", False, False), ("1.5B", False, True), ("1.5B", True, True), ("7B", True, True)]
"""Model, LoRA and gradient checkpointing of each run."""

LENGTHS = {"mean 300": (5.55, 0.55), "long tail": (5.0, 1.1)}
"""Mean and spread of the logarithm of a completion's length."""

LAYOUTS = ("TRL, padded", "packed, varlen_attn", "packed, SDPA per completion")

ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
GATHERS = {"embedding", "gather", "index", "index_select"}
"""Kernels that read as much of their first argument as they write."""


# ---- Kernels


class Kernel(NamedTuple):
    """Work of one kernel."""

    flops: float
    moved: int
    """Bytes read and written."""
    is_16bit: bool
    is_attention: bool = False

    def seconds(self, gpu: GPU) -> float:
        """Return the time of the kernel on a GPU."""
        peak = gpu.flops_16bit if self.is_16bit else gpu.flops_32bit
        computing = self.flops / peak / (ATTENTION_SHARE if self.is_attention else MATMUL_SHARE)
        return max(computing, self.moved / gpu.bandwidth / BANDWIDTH_SHARE, SHORTEST)


class Recorder(TorchDispatchMode):
    """Dispatch mode that records the kernels launched inside its block.

    Args:
        pairs: number of pairs of a query and a key that `varlen_attn` computes.
    """

    def __init__(self, pairs: int = 0) -> None:
        super().__init__()
        self.pairs = pairs
        self.kernels: list[Kernel] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record its kernel."""
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in ALLOCATIONS:
            inputs = _tensors((args[1:] if name in ("copy_", "fill_", "zero_") else args, kwargs))
            outputs = _tensors(result)
            moved = 2 * _bytes(outputs) if name in GATHERS else _bytes(inputs) + _bytes(outputs)
            self.kernels.append(
                Kernel(self.flops(name, inputs), moved, _is_16bit(inputs), "attention" in name or "varlen" in name)
            )
        return result

    def flops(self, name: str, inputs: Sequence[Tensor]) -> float:
        """Return the floating-point operations of matrix products and attention, and 0 for all else."""
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            first, second = inputs[-2:] if name in ("addmm", "baddbmm") else inputs[:2]
            return 2.0 * first.numel() * second.shape[-1]
        backward = name.endswith("_backward")
        passes = 2.5 if backward else 1.0
        if "varlen_attn" in name:
            heads, width = inputs[backward].shape[1:]
            return passes * 4 * self.pairs * heads * width
        if name.startswith("_scaled_dot_product"):
            query, key = inputs[backward : backward + 2]
            computed = 0.5 if "flash" in name else 1.0  # causal, or with a mask that skips nothing
            return passes * computed * 4 * query.numel() * key.shape[2]
        return 0.0


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def _is_16bit(tensors: Sequence[Tensor]) -> bool:
    return min((tensor.itemsize for tensor in tensors if tensor.is_floating_point()), default=4) == 2


@contextmanager
def gpu_kernels(recorder: Recorder) -> Iterator[None]:
    """Let attention and TRL's head take the kernels of a GPU inside this block, on the meta device."""
    aten, autocast = torch.ops.aten, torch.is_autocast_enabled

    def sdpa(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        if attn_mask is None:
            return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, options["is_causal"])[0]
        bias = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -1)
        bias = bias.expand(-1, query.shape[1], -1, -1)
        return aten._scaled_dot_product_efficient_attention(query, key, value, bias, True)[0]

    def fold(tile: Tensor, *_: Any, **__: Any) -> None:
        recorder.kernels.append(Kernel(0, _bytes([tile]), is_16bit=True))

    def unfold(tile: Tensor, *_: Any, **__: Any) -> None:
        recorder.kernels.append(Kernel(0, 2 * _bytes([tile]), is_16bit=True))

    def add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
        work = 2.0 * first.numel() * second.shape[1]
        recorder.kernels.append(Kernel(work, _bytes([total, total, first, second]), is_16bit=True))

    replacements: dict[str, Callable[..., Any]] = {
        "torch.nn.functional.scaled_dot_product_attention": sdpa,
        "grpo_recipes.training.packed_attention.scaled_dot_product_attention": sdpa,
        "trl.kernels.chunked_logprob._forward_tile": fold,
        "trl.kernels.chunked_logprob._backward_tile": unfold,
        "trl.kernels.chunked_logprob._addmm_fp32": add_product,
        "grpo_recipes.training.varlen._row_stored": _row_stored,
        # torch knows no autocast of the meta device.
        "torch.is_autocast_enabled": lambda device=None: device != "meta" and autocast(device),
    }
    with ExitStack() as stack:
        for name, replacement in replacements.items():
            stack.enter_context(patch(name, replacement))
        yield


def _row_stored(rows: dict[Tensor, Tensor], segments: Any, repeats: int) -> torch.autograd.graph.saved_tensors_hooks:
    """Store the states of the row as `varlen` does, which finds tensors by addresses that meta tensors lack."""
    stored = {gathered.untyped_storage()._cdata: row.detach() for gathered, row in rows.items()}

    def pack(tensor: Tensor) -> tuple[Tensor, bool]:
        row = stored.get(tensor.untyped_storage()._cdata)
        return (tensor, False) if row is None else (row, True)

    def unpack(kept: tuple[Tensor, bool]) -> Tensor:
        return varlen._of_segments(kept[0], segments, repeats) if kept[1] else kept[0]

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


# ---- Micro-batches


@dataclass(frozen=True)
class Lengths:
    """Tokens of the prompts, (prompts,), and of their completions, (prompts, group), of a generation batch."""

    prompts: np.ndarray
    completions: np.ndarray

    @classmethod
    def draw(cls, name: str) -> Lengths:
        """Return the lengths of a workload, always the same."""
        random = np.random.default_rng(0)
        prompts = random.integers(SHORT, LONG + 1, PROMPTS)
        drawn = np.exp(random.normal(*LENGTHS[name], (PROMPTS, GROUP)))
        return cls(prompts, np.clip(drawn, 1, LONGEST).astype(int))

    def spans(self, number: int) -> GroupSpans:
        """Return the spans of the packed row of a prompt."""
        end = int(self.prompts[number]) - 1
        prefix, suffixes = (0, end), []
        for length in self.completions[number].tolist():
            suffixes.append((end, end + length))
            end += length
        return GroupSpans([(prefix, suffixes)])


class Cost(NamedTuple):
    """Cost of a micro-batch."""

    tokens: float
    flops: float
    launches: float
    seconds: dict[str, float]
    """Time of all kernels by GPU."""

    def time(self, gpu: str) -> float:
        """Return the seconds of the micro-batch."""
        return max(self.seconds[gpu], LAUNCH * self.launches)


def cost(size: str, lora: bool, checkpointing: bool, lengths: Lengths, layout: str) -> Cost:
    """Return the mean cost of the micro-batches of a generation batch."""
    layers = int(SIZES[size]["num_hidden_layers"])
    models = [model_of(size, count, lora, checkpointing) for count in (1, 2)]
    # TRL pads all micro-batches of a generation batch to one width.
    numbers = range(1 if layout == LAYOUTS[0] else PROMPTS)
    found = []
    for number in numbers:
        (tokens, one), (_, two) = (kernels_of(model, lengths, number, layout, checkpointing) for model in models)
        found.append([tokens, *_of_layers(one, two, layers)])
    tokens, flops, launches, *seconds = (mean(column) for column in zip(*found, strict=True))
    return Cost(tokens, flops, launches, dict(zip(GPUS, seconds, strict=True)))


def _of_layers(one: list[Kernel], two: list[Kernel], layers: int) -> list[float]:
    """Return flops, launches and seconds by GPU of a model, from the kernels of one and of two layers."""
    sums = []
    for kernels in (one, two):
        times = [sum(kernel.seconds(gpu) for kernel in kernels) for gpu in GPUS.values()]
        sums.append([sum(kernel.flops for kernel in kernels), float(len(kernels)), *times])
    return [first + (layers - 1) * (second - first) for first, second in zip(*sums, strict=True)]


def model_of(size: str, layers: int, lora: bool, checkpointing: bool) -> PreTrainedModel:
    """Return a model in bfloat16 without data."""
    config = Qwen2Config(**{**SIZES[size], "num_hidden_layers": layers, "use_cache": False})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    if lora:
        model.enable_input_require_grads()
        with torch.device("meta"):
            get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear"))
    # Adapters too: the products of float32 adapters are made in bfloat16 under autocast.
    return model.to(torch.bfloat16).train()


def kernels_of(
    model: PreTrainedModel, lengths: Lengths, number: int, layout: str, checkpointing: bool
) -> tuple[int, list[Kernel]]:
    """Return the tokens of a prompt's micro-batch, and the kernels of its forward and backward pass."""
    spans, labels = lengths.spans(number), int(lengths.completions[number].sum())
    recorder = Recorder(sum((b - a) * (d - c) + (d - c) * (d - c + 1) // 2 for (a, b), (c, d) in spans.segments()))
    switch, inputs = AttentionSwitch(), {"use_cache": False}
    if layout == LAYOUTS[0]:
        width = int(lengths.prompts.max() + lengths.completions.max())
        ids = torch.empty(GROUP, width, dtype=torch.long, device="meta")
        mask = torch.empty(GROUP, 1, width, width, dtype=torch.bool, device="meta")
    else:
        ids = torch.empty(1, spans.groups[0][1][-1][1], dtype=torch.long, device="meta")
        mask = None
        spans.recomputed = checkpointing
        spans.kernel = _one_call if layout == LAYOUTS[1] else None
        inputs["group_spans"] = spans
        switch.pack(model)
    for parameter in model.parameters():
        parameter.grad = None
    targets = torch.empty(labels, dtype=torch.long, device="meta")
    with gpu_kernels(recorder), recorder:
        hidden = model.model(
            input_ids=ids, position_ids=torch.empty_like(ids), attention_mask={"full_attention": mask}, **inputs
        ).last_hidden_state
        labelled = hidden.flatten(0, 1)[:labels].clone()
        log_probs = chunked_logprob.ChunkedLogProbFunction.apply(
            labelled, model.lm_head.weight, None, targets, 1.0, HEAD_CHUNK, None, 1.0, ("entropy",)
        )[0]
        (log_probs * torch.empty_like(log_probs)).sum().backward()
    switch.restore(model)
    return ids.numel(), recorder.kernels


def takes_grouped_heads() -> bool:
    """Return True if the installed torch has a `varlen_attn` for grouped heads, as torch 2.12 does."""
    kernel = varlen.varlen_attn
    return kernel is not None and "enable_gqa" in inspect.signature(kernel).parameters


def _one_call(spans: GroupSpans, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Return the attention output of `varlen_attn` as torch 2.12 has it."""
    form = varlen._KernelCall({"scale": scaling, "window_size": (-1, 0), "enable_gqa": True}, 1)
    return varlen._attended(form, spans, query, key, value, scaling)


# ---- The page


def introduction(versions: str) -> str:
    """Return the page above its table."""
    peaks = [f"{name} {gpu.flops_16bit / 1e12:.0f} and {gpu.bandwidth / 1e12}" for name, gpu in GPUS.items()]
    lengths = [f"{name}: {center} and {spread}" for name, (center, spread) in LENGTHS.items()]
    return f"""# The training phase on a GPU, predicted

`python benchmarks/roofline.py` with {versions}.
**Nothing on this page was measured on a GPU.** The kernels of one micro-batch are those that PyTorch launches in eager
mode, recorded on tensors without data. Their times follow from assumptions:

- A kernel takes the longer of its operations and its bytes at the GPU's rates, and at least {1e6 * SHORTEST:.0f} µs.
- Matrix products reach {100 * MATMUL_SHARE:.0f} % of the peak, attention {100 * ATTENTION_SHARE:.0f} %, and memory
  traffic {100 * BANDWIDTH_SHARE:.0f} % of the bandwidth.
- The host takes {1e6 * LAUNCH:.1f} µs per kernel. A micro-batch takes the longer of all its kernels and all launches.
- Peaks of the data sheets, in TFLOP/s of dense bfloat16 and TB/s (H100 is SXM, A100 has 80 GB):
  {", ".join(peaks)}.
- Qwen2.5 with weights and adapters (rank {RANK}) in bfloat16, without autocast. TRL runs SDPA with a mask, and its head
  by Triton. Only forward and backward pass of the policy count: no reference, no optimizer, no waits of the host.
- {PROMPTS} prompts of {SHORT} to {LONG} tokens, {GROUP} completions each of at most {LONGEST} tokens. The logarithm of
  a length is normal with mean and spread ({", ".join(lengths)}).
- One prompt with its completions is a micro-batch. TRL pads it to the longest prompt and the longest completion of all.

In parentheses: TRL's time divided by this one.
"""


def table() -> Iterator[str]:
    """Yield the lines of the table."""
    yield f"| model | lengths | layout | tokens | TFLOP | kernels | {' | '.join(f'{gpu}, ms' for gpu in GPUS)} |"
    yield "|---" * (6 + len(GPUS)) + "|"
    for size, lora, checkpointing in RUNS:
        for workload in LENGTHS:
            lengths = Lengths.draw(workload)
            stock: Cost | None = None
            for layout in LAYOUTS:
                found = cost(size, lora, checkpointing, lengths, layout)
                stock = stock or found
                times = [f"{1000 * found.time(gpu):.1f} ({stock.time(gpu) / found.time(gpu):.1f})" for gpu in GPUS]
                name = f"{size}, {'LoRA' if lora else 'full'}{', checkpointing' if checkpointing else ''}"
                yield (
                    f"| {name} | {workload} | {layout} | {found.tokens:,.0f} | {found.flops / 1e12:.1f} | "
                    f"{found.launches:,.0f} | {' | '.join(times)} |"
                )


def main() -> None:
    """Print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    if not takes_grouped_heads():
        parser.error(f"torch {torch.__version__} has no varlen_attn for grouped heads: install torch 2.12 or later")
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, trl {trl.__version__}"
    print(introduction(versions))
    for line in table():
        print(line, flush=True)


if __name__ == "__main__":
    main()
