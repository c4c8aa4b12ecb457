"""A meter of the memory of a training micro-batch at real sizes, on tensors without data.

    with FakeTensorMode():
        model = build(config, torch.float32)
        meter = measure(model, Batch(rows=16, prompt=512, completion=256), checkpointing=True, autocast=True)
    meter.peak, meter.largest

It counts the bytes of every tensor that the forward and the backward of a micro-batch create, gradients included, from
its creation to its release, in blocks of 512 bytes as CUDA's allocator takes. Weights and optimizer states are not
counted. Operators that a GPU computes by other kernels than a CPU are replaced: attention by the flash kernel, or by
the memory-efficient one with a 16-bit bias if there is a mask, and TRL's kernels of the head by their tiles.

It cannot show fragmentation, the allocator's cache, workspaces inside kernels, or communication.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction
from trl.kernels.chunked_logprob import ChunkedLogProbFunction
from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as HEAD_CHUNK

from grpo_recipes.training.packed_attention import AttentionSwitch, GroupSpans, Kernel
from grpo_recipes.training.segments import Segment, SegmentedModel, Segments

Backbone = Callable[[], Tensor]
"""Function that returns the last hidden states of a micro-batch, (rows, tokens, hidden)."""

BLOCK = 512
"""Bytes of CUDA's smallest allocation."""


@dataclass(frozen=True)
class Batch:
    """Sizes of a micro-batch."""

    rows: int
    prompt: int
    """Tokens of a padded prompt."""
    completion: int
    """Tokens of a padded completion."""


class Meter(TorchDispatchMode):
    """Dispatch mode that follows the storages of the tensors created inside its block."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        """Count no storage of `known`."""
        super().__init__()
        self.live = self.peak = 0
        self.largest: list[tuple[str, int]] = []
        """Bytes at the peak by the operator that allocated them, the largest first."""
        self.phase = "forward"
        self._by_operator: Counter[str] = Counter()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf, f"{self.phase}: {func.overloadpacket.__name__}")
        return result

    def _count(self, tensor: Tensor, operator: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = -(-storage.nbytes() // BLOCK) * BLOCK
        self._known.add(key)
        self._by_operator[operator] += size
        self.live += size
        weakref.finalize(storage, self._release, key, size, operator)
        if self.live > self.peak:
            self.peak = self.live
            self.largest = self._by_operator.most_common(12)

    def _release(self, key: int, size: int, operator: str) -> None:
        self._known.discard(key)
        self._by_operator[operator] -= size
        self.live -= size


def build(
    config: PretrainedConfig,
    dtype: torch.dtype,
    adapter: LoraConfig | None = None,
    adapter_dtype: torch.dtype = torch.float32,
    quantised: bool = False,
) -> nn.Module:
    """Return a model without data whose tensors claim to lie on the CPU, where autocast and autograd accept them.

    Args:
        config: Configuration of the model.
        dtype: Dtype of the weights.
        adapter: Configuration of a new adapter, or None.
        adapter_dtype: Dtype of the adapter's weights.
        quantised: True to make a copy of each frozen matrix when it is used, as bitsandbytes dequantizes it.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # with SDPA where the model supports it
        if adapter is not None:
            model = get_peft_model(model, adapter)
    pretended: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in pretended:  # tied weights are one tensor
                    is_adapter = adapter is not None and parameter.requires_grad
                    empty = torch.empty(parameter.shape, dtype=adapter_dtype if is_adapter else dtype)
                    pretended[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                module._parameters[name] = pretended[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
        if quantised and isinstance(module, nn.Linear) and not module.weight.requires_grad:
            module.forward = partial(_Quantised.apply, module.weight, module.bias)  # type: ignore[method-assign]
    return model


def measure(
    model: nn.Module,
    batch: Batch,
    *,
    checkpointing: bool,
    autocast: bool,
    accumulates: bool = False,
    splits_gradients: bool = False,
    group: int | None = None,
    segmented: bool = False,
    varlen: bool = True,
    full_kl: bool = False,
    trains: bool = True,
) -> Meter:
    """Return the meter after the forward and, if it trains, the backward of a micro-batch.

    Args:
        model: Model of `build`.
        batch: Sizes of the micro-batch.
        checkpointing: True to recompute the activations of each layer in the backward.
        autocast: True to compute matrix products in bfloat16 whatever the dtype of the weights is.
        accumulates: True if an earlier micro-batch has left its gradients.
        splits_gradients: True if a gradient leaves the GPU as soon as it is complete, as under ZeRO.
        group: Completions of a prompt in a packed or shared layout, or None for TRL's padded layout.
        segmented: True for completions behind a cache of their prompts, False for a packed row.
        varlen: True if the attention of a packed row is one call of `varlen_attn`, False if it is one SDPA call per
            completion.
        full_kl: True to add the KL over the vocabulary to the loss. The model stands for its reference.
        trains: False for a forward without gradients, as the check of the layout makes it.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    model.train(trains)
    if checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        if base is not model:
            base.enable_input_require_grads()
    for parameter in model.parameters():
        if splits_gradients and parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop_gradient)
    spans = None if group is None or segmented else _spans(batch, group, _varlen if varlen else None)
    shape = (batch.rows, batch.prompt + batch.completion)
    if spans is not None:
        AttentionSwitch().pack(model)
        shape = (1, spans.groups[-1][1][-1][1])
    ids = torch.empty(shape, dtype=torch.long)
    targets = torch.zeros(batch.rows * batch.completion, dtype=torch.long)
    given = [ids, torch.ones_like(ids), targets]
    backbone: Backbone = partial(_hidden, base, *given[:2], spans)
    known = [*model.parameters(), *model.buffers(), *given]
    if segmented:
        assert group is not None
        segments = _segments(batch, group)
        backbone = partial(_segmented_hidden, _observed(model), base, segments)
        known += [value for part in segments.in_order() for value in vars(part).values() if value is not None]
        known.append(segments.positions)
    meter = Meter(known)
    with meter, gpu_kernels():
        if accumulates:
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
        with torch.set_grad_enabled(trains):
            loss = _loss(base, backbone, targets, full_kl, autocast)
        if trains:
            meter.phase = "backward"
            loss.backward()
    return meter


def _loss(base: nn.Module, backbone: Backbone, targets: Tensor, full_kl: bool, autocast: bool) -> Tensor:
    """Return a loss of the log-probabilities of `targets`, (completion tokens,), computed as on a GPU."""
    reference = None
    if full_kl:
        with torch.no_grad(), _precision(autocast):
            reference = backbone()
    with _precision(autocast):
        hidden = backbone()
        head = base.get_output_embeddings()
        # The values of these indices do not matter. A boolean mask, as TRL has it, needs data.
        scored = hidden[:, :-1][targets, targets]
        log_probs = ChunkedLogProbFunction.apply(
            scored, head.weight, head.bias, targets, 1.0, HEAD_CHUNK, None, 1.0, ("entropy",)
        )[0]
        loss = log_probs.square().sum()
        if reference is not None:
            policy, other = (states[:, :-1][targets, targets] for states in (hidden, reference))
            both = (policy, head.weight, head.bias, other, head.weight, head.bias)
            loss = loss + ChunkedDivergenceFunction.apply(*both, 1.0, 1.0)[0].sum()
    return loss


def _precision(autocast: bool) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()


def _hidden(base: nn.Module, ids: Tensor, mask: Tensor, spans: GroupSpans | None) -> Tensor:
    """Return the last hidden states, (rows, tokens, hidden)."""
    given: dict[str, Any] = {"attention_mask": mask}
    if spans is not None:
        # transformers drops a mask of ones, which it cannot see without data, and leaves a mask of four dimensions.
        given = {"attention_mask": mask[:, :1, None, None].bool(), "position_ids": mask, "group_spans": spans}
    return base.base_model(input_ids=ids, use_cache=False, **given).last_hidden_state


def _segments(batch: Batch, group: int) -> Segments:
    """Return a segment of distinct prompts, and a bucket of their completions."""
    prompts, context = batch.rows // group, batch.prompt - 1
    ids, before = (torch.empty(size, dtype=torch.long) for size in ((batch.rows, batch.completion), (prompts, context)))
    mask = torch.ones(batch.rows, context + batch.completion, dtype=torch.long)
    bucket = Segment(ids, mask, torch.zeros(batch.rows, dtype=torch.long))
    places = torch.zeros(batch.rows * batch.completion, dtype=torch.long)
    return Segments([bucket], places, Segment(before, torch.ones_like(before)))


def _observed(model: nn.Module) -> SegmentedModel:
    """Return a model that takes segments, after a short forward that shows its layers."""
    segmented, ids = SegmentedModel(model), torch.empty(2, 8, dtype=torch.long)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with segmented.observed(), torch.no_grad(), gpu_kernels():
        base.base_model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return segmented


def _segmented_hidden(segmented: SegmentedModel, base: nn.Module, segments: Segments) -> Tensor:
    """Return the last hidden states of all labels, (1, labels, hidden)."""
    with segmented.taking_segments():
        return base.base_model(segments=segments).last_hidden_state


def _spans(batch: Batch, group: int, kernel: Kernel | None) -> GroupSpans:
    """Return the spans of a packed row of groups."""
    groups, end = [], 0
    for first in range(0, batch.rows, group):
        prefix = (end, end + batch.prompt - 1)
        completions = min(group, batch.rows - first)
        starts = range(prefix[1], prefix[1] + completions * batch.completion, batch.completion)
        suffixes = [(start, start + batch.completion) for start in starts]
        groups.append((prefix, suffixes))
        end = suffixes[-1][1]
    return GroupSpans(groups, kernel, recomputed=True)


def _varlen(spans: GroupSpans, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Compute attention of keys and values that are gathered once per segment, and store what `varlen_attn` does."""
    length = sum(stop - start + last - first for (start, stop), (first, last) in spans.segments())
    places = torch.zeros(length, dtype=torch.long)
    keys, values = (tensor.index_select(2, places) for tensor in (key, value))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(query, keys, values, 0.0, False, False, scale=scaling)[0].transpose(1, 2)


class _Quantised(torch.autograd.Function):
    """Linear layer with a frozen weight that is dequantized in the forward and in the backward (`MatMul4Bit`)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return nn.functional.linear(tensor, weight.clone(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return None, None, gradient @ ctx.saved_tensors[0].clone()


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Replace the kernels that take another amount of memory on a CPU."""
    replaced = {
        "torch.nn.functional.scaled_dot_product_attention": _attention,
        "grpo_recipes.training.packed_attention.scaled_dot_product_attention": _attention,
        "grpo_recipes.training.packed_attention.is_on_gpu": lambda tensor: True,
        "torch.nn.functional.dropout": _dropout,
        "trl.kernels.chunked_logprob._forward_tile": _nothing,
        "trl.kernels.chunked_logprob._backward_tile": _nothing,
        "trl.kernels.chunked_logprob._addmm_fp32": _nothing,
        "trl.kernels.chunked_divergence._stats_tile": _nothing,
        "trl.kernels.chunked_divergence._backward_tile": _nothing,
        "trl.kernels.chunked_divergence._addmm_fp32": _nothing,
        "trl.kernels.chunked_divergence._project": _project,
    }
    if grouped := getattr(nn.functional, "grouped_mm", None):  # torch 2.8 has none
        replaced["torch.nn.functional.grouped_mm"] = partial(_grouped_mm, grouped)
    patches = [patch(name, replacement) for name, replacement in replaced.items()]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def _grouped_mm(stock: Callable[..., Tensor], tensor: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
    """Multiply the tokens of experts in any precision. torch knows the shapes of the stock kernel in bfloat16 only."""
    if tensor.dtype == torch.bfloat16:
        return stock(tensor, weight, offs=offs)
    return torch.ops.transformers.grouped_mm_fallback(tensor, weight, offs=offs)


def _nothing(*_: Any, **__: Any) -> None:
    """Stand for a kernel that allocates nothing: its results are written into tensors that exist."""


def _project(
    tile: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, start: int, end: int, dtype: torch.dtype
) -> None:
    """Project to a float32 tile as CUDA does, with a copy of the weights in the compute precision only."""
    weight[start:end].to(dtype)


def _dropout(tensor: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drop numbers by CUDA's kernel, which keeps a mask of one byte per number."""
    return torch.native_dropout(tensor, p, training)[0] if training and p else tensor


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention as a GPU does."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.bfloat16) for tensor in (query, key, value))
    if attn_mask is None and query.dtype != torch.float32:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    bias = None
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype)
        if attn_mask.dtype == torch.bool:
            bias = bias.masked_fill_(~attn_mask, -torch.inf)
        bias = bias.expand(-1, query.shape[1], -1, -1)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]
