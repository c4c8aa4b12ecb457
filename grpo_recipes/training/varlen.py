"""FlashAttention over a packed row in one call: `torch.nn.attention.varlen.varlen_attn`, on CUDA in 16 bits.

Each segment of the row (a prefix, or a suffix behind its prefix) is one sequence of the call. Its keys and values are
gathered from the row, so that those of a prefix are copied once per suffix. `KeysOfSegments` gathers, and adds the
gradients of a prefix in a fixed order. Until the backward pass the keys and values of the row are stored instead of the
copies, and gathered again there: a second pass over the copied bytes, for the memory of all copies in all layers.

Shapes: N tokens of the packed row, K keys of all segments, D dimensions per attention head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from grpo_recipes.generation.agreement import ATTENTION
from grpo_recipes.generation.models import DTYPES_16BIT
from grpo_recipes.generation.rows import on_device
from grpo_recipes.generation.verified import FastWay
from grpo_recipes.training.packed_attention import GroupSpans, Span, sdpa

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None  # type: ignore[assignment]

TRIAL_SPANS: list[tuple[Span, list[Span]]] = [((0, 5), [(5, 8), (8, 15)]), ((15, 16), [(16, 18)])]
"""Packed row of the trial: suffixes shorter and longer than their prefix, and a second group."""

REFUSED = (
    "packed rows are computed with one SDPA call per completion, because torch's varlen_attn does not take the heads "
    "of this model on this GPU ({})"
)
"""Sentence that is logged where the kernel is not used."""


@dataclass(frozen=True)
class KernelSegments:
    """Segments of a packed row as the arguments of `varlen_attn`, on the device of the row."""

    keys: Tensor
    """Position in the row of each key, one segment after the other, (K,), int32."""
    own: Tensor
    """Place among the K keys at which each token of the row is a key of its own segment, (N,), int32."""
    contexts: list[tuple[Span, Tensor]]
    """Each prefix, and the places of its copies among the keys, one suffix after the other, (suffixes × prefix,)."""
    query_ends: Tensor
    """Cumulative numbers of queries, (segments + 1,), int32."""
    key_ends: Tensor
    """Cumulative numbers of keys, (segments + 1,), int32."""
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, spans: GroupSpans, device: torch.device) -> KernelSegments:
        """Return the segments of `spans`, in one copy to the device."""
        segments = list(spans.segments())
        queries = np.array([stop - start for _, (start, stop) in segments])
        contexts = np.array([stop - start for (start, stop), _ in segments])
        lengths = queries + contexts
        ends = np.append(0, lengths.cumsum())
        keys = [np.r_[slice(*context), slice(*own)] for context, own in segments]
        own = [np.arange(end - own, end) for own, end in zip(queries, ends[1:], strict=True)]
        copies: dict[Span, list[np.ndarray]] = {}
        for (context, _), start, length in zip(segments, ends[:-1], contexts, strict=True):
            if length:
                copies.setdefault(context, []).append(np.arange(start, start + length))
        parts = [*keys, *own, *(part for places in copies.values() for part in places)]
        sizes = [sum(lengths), sum(queries), *(sum(map(len, places)) for places in copies.values())]
        query_ends = np.append(0, queries.cumsum())
        flat = np.concatenate([*parts, query_ends, ends]).astype(np.int32)
        joined = on_device(flat, device)
        key, own_key, *copied, query_end, key_end = joined.split([*map(int, sizes), len(query_ends), len(ends)])
        prefixes = list(zip(copies, copied, strict=True))
        return cls(key, own_key, prefixes, query_end, key_end, int(queries.max()), int(lengths.max()))


class KeysOfSegments(torch.autograd.Function):
    """Keys or values of all segments, gathered from those of the row.

    The backward pass adds the gradients of a prefix's copies in float32, in the order of its suffixes. The gradient of
    an index would sort all K positions, or add in an order that changes from run to run.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, segments: KernelSegments, repeats: int) -> Tensor:
        """Return the states of all segments, (K, repeats × heads, D), of (1, heads, N, D)."""
        ctx.segments, ctx.repeats = segments, repeats
        return _of_segments(states, segments, repeats)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the states of the row."""
        gradient, segments = gradients[0], ctx.segments
        if ctx.repeats > 1:
            gradient = gradient.unflatten(1, (-1, ctx.repeats)).sum(2)
        row = gradient.index_select(0, segments.own)
        for (start, stop), copies in segments.contexts:
            parts = gradient.index_select(0, copies).unflatten(0, (-1, stop - start))
            row[start:stop] = (row[start:stop].float() + parts.sum(0, dtype=torch.float32)).to(row.dtype)
        return row.transpose(0, 1)[None], None, None


def _of_segments(states: Tensor, segments: KernelSegments, repeats: int) -> Tensor:
    gathered = states[0].transpose(0, 1).index_select(0, segments.keys)
    return gathered.repeat_interleave(repeats, dim=1) if repeats > 1 else gathered


class _KernelCall(NamedTuple):
    """A way of calling the installed `varlen_attn`."""

    arguments: dict[str, Any]
    repeats: int
    """Number of times that each key-value head is repeated."""


class VarlenKernel:
    """`varlen_attn` for packed rows, used for the tensors that it takes.

    Which tensors those are depends on the version of torch, the GPU, the dtype and the sizes of the heads. So the first
    layer of each kind makes a trial: a short packed row whose output and gradients must agree with SDPA's.

    Args:
        announce: function that logs a sentence.
    """

    def __init__(self, announce: Callable[[str], object]) -> None:
        self._announce = announce
        self._tried: dict[tuple[Any, ...], tuple[FastWay, _KernelCall | None]] = {}
        """Result of the trial, and the call that agreed, by device, dtype, sizes of the heads and scaling."""

    def __call__(
        self, spans: GroupSpans, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> Tensor | None:
        """Return the attention output, (1, N, heads, D), or None if the kernel does not take these tensors."""
        if varlen_attn is None or not is_candidate(query):
            return None
        kind = (query.device, query.dtype, query.shape[1], key.shape[1], query.shape[3], value.shape[3], scaling)
        if kind not in self._tried:
            self._tried[kind] = self._trial(query, key, value, scaling)
        way, call = self._tried[kind]
        if call is None or way.doubt:
            return None
        # The kernel may refuse a size that the trial did not have.
        return way.use(partial(_attended, call, spans, query, key, value, scaling), refusals=(RuntimeError,))

    def _trial(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> tuple[FastWay, _KernelCall | None]:
        """Return the kernel as a fast way, and the first way of calling it that agrees with SDPA, or None."""
        spans = GroupSpans(TRIAL_SPANS)
        length = TRIAL_SPANS[-1][1][-1][1]
        generator = torch.Generator().manual_seed(0)  # the run's random state must not change

        def noise(like: Tensor) -> Tensor:
            drawn = torch.randn(1, like.shape[1], length, like.shape[3], generator=generator)
            return drawn.to(like.device, like.dtype).requires_grad_()

        tensors = (noise(query), noise(key), noise(value))
        way = FastWay(self._announce, REFUSED)
        doubt = "it has no causal mask, or no scaling of scores"
        # Gradient checkpointing runs a layer again, and compares what it stores. A trial is made once.
        with torch.enable_grad(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            expected = _with_gradients(sdpa(spans, *tensors, scaling), tensors)

            def difference(call: _KernelCall) -> str:
                got = _with_gradients(_attended(call, spans, *tensors, scaling), tensors)
                gap = max(_relative_gap(mine, theirs) for mine, theirs in zip(got, expected, strict=True))
                return "" if gap <= ATTENTION else f"it differs from SDPA by {gap:.2f} of the largest entry in a trial"

            for call in _calls(query, key, scaling):
                doubt = FastWay().check(partial(difference, call), refusals=(RuntimeError, ValueError))
                if not doubt:
                    way.record("")
                    return way, call
        way.record(doubt)
        return way, None


def is_candidate(query: Tensor) -> bool:
    """Return True if a kernel of FlashAttention may exist for the device and dtype of a query."""
    return query.is_cuda and query.dtype in DTYPES_16BIT


def _calls(query: Tensor, key: Tensor, scaling: float | None) -> Iterator[_KernelCall]:
    """Yield the ways of calling the installed `varlen_attn`, the cheapest first."""
    # torch 2.10 has `is_causal` and no scale, 2.11 `window_size` and `scale`, 2.12 `enable_gqa` as well.
    parameters = inspect.signature(varlen_attn).parameters
    arguments: dict[str, Any] = {}
    if "scale" in parameters:
        arguments["scale"] = scaling
    elif scaling is not None and scaling != query.shape[-1] ** -0.5:
        return
    # The kernel aligns the diagonal to the end of the keys, so a suffix sees its complete prefix.
    if "window_size" in parameters:
        arguments["window_size"] = (-1, 0)
    elif "is_causal" in parameters:
        arguments["is_causal"] = True
    else:
        return
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and "enable_gqa" in parameters:
        yield _KernelCall({**arguments, "enable_gqa": True}, 1)
    else:
        yield _KernelCall(arguments, 1)  # a kernel may know grouped heads without an argument
    if repeats > 1:
        yield _KernelCall(arguments, repeats)


def _attended(
    call: _KernelCall, spans: GroupSpans, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    """Return the attention output, (1, N, heads, D), of one call over all segments."""
    if spans.index is None:
        spans.index = KernelSegments.of(spans, query.device)
    segments: KernelSegments = spans.index
    keys: Tensor = KeysOfSegments.apply(key, segments, call.repeats)
    values: Tensor = KeysOfSegments.apply(value, segments, call.repeats)
    # (1, heads, N, D) to (N, heads, D). Segments lie one after the other in the row, so queries need no gathering.
    queries = query[0].transpose(0, 1).contiguous()
    # Checkpointing stores nothing before its second forward. Its own hooks must see every tensor.
    stored = nullcontext() if spans.recomputed else _row_stored({keys: key, values: value}, segments, call.repeats)
    with stored:
        output: Tensor = varlen_attn(  # type: ignore[assignment]  # a tuple only with `return_aux`
            queries,
            keys,
            values,
            segments.query_ends,
            segments.key_ends,
            segments.longest_query,
            segments.longest_key,
            **call.arguments,
        )
    return output[None]


def _row_stored(rows: dict[Tensor, Tensor], segments: KernelSegments, repeats: int) -> saved_tensors_hooks:
    """Return hooks that store the states of the row in place of those that were gathered from them.

    Args:
        rows: states of the row, (1, heads, N, D), by what was gathered from them.
        segments: segments of the row.
        repeats: number of times that each head was repeated.
    """
    # By address: the hooks get another object for the same tensor.
    gather = partial(_of_segments, segments=segments, repeats=repeats)
    stored = {gathered.data_ptr(): partial(gather, row.detach()) for gathered, row in rows.items()}

    def pack(tensor: Tensor) -> Tensor | partial[Tensor]:
        return stored.get(tensor.data_ptr(), tensor)

    def unpack(kept: Tensor | partial[Tensor]) -> Tensor:
        return kept() if isinstance(kept, partial) else kept

    return saved_tensors_hooks(pack, unpack)


def _with_gradients(output: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the output, and the gradients of a fixed combination of its entries."""
    weights = torch.linspace(-1, 1, output.numel()).reshape(output.shape).to(output)
    return [output.detach(), *torch.autograd.grad(output, inputs, weights)]


def _relative_gap(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected entry, and infinity if it is not a number."""
    gap = (got.float() - expected.float()).abs().max() / expected.float().abs().max()
    return float(gap.nan_to_num(torch.inf))
