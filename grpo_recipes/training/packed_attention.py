"""Attention of a packed row: each suffix attends causally to its own prefix and to itself.

transformers finds `packed_attention` by its name in `AttentionInterface`, and passes it the keyword arguments of the
model's forward, which hold the spans of the row. `AttentionSwitch` gives a model this attention for packed rows, and
the implementation that the user set for everything else.

Shapes: N tokens of the packed row, D dimensions per attention head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_recipes.generation.models import base_model

ATTENTION = "grpo_packed_sdpa"
"""Name of `packed_attention` in transformers' registries."""

ADDED_TERMS = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")
"""Arguments by which models of transformers add to SDPA: caps, sinks, biases, and choices of keys."""

TAKES_FLOAT32 = ("sdpa", "eager")
"""Implementations that take float32 anywhere. FlashAttention takes 16 bits, FlexAttention has no gradient on a CPU."""

Span = tuple[int, int]
"""Half-open range [start, stop) of the packed row."""

Kernel = Callable[["GroupSpans", Tensor, Tensor, Tensor, float | None], Tensor | None]
"""Function of spans, query, key, value and scaling that returns the attention output, (1, N, heads, D), or None."""


class GroupSpans:
    """Spans of a packed row that belong together, passed through the model as the keyword argument `group_spans`.

    An argument, because gradient checkpointing runs the layers again in the backward pass, after a context variable
    would have been reset. Not a dataclass, because FSDP2 in 16-bit precision rebuilds the dataclasses among the
    arguments of a layer, and `attended` would be counted in a copy.

    Args:
        groups: prefix and suffixes of each group, in the order of the row.
        kernel: kernel that is tried first, or None for SDPA alone.
        recomputed: True if the backward pass may run the layers again (gradient checkpointing).
    """

    attended: int
    """Number of attention layers that have applied these spans and no other mask than causality."""
    index: Any
    """Spans in the form of `kernel`, created by the first layer."""
    mask: Tensor | None
    """Shared attention bias. Every suffix mask is a view of it. Created by the first layer that needs a mask."""

    def __init__(
        self, groups: list[tuple[Span, list[Span]]], kernel: Kernel | None = None, recomputed: bool = False
    ) -> None:
        self.groups, self.kernel, self.recomputed = groups, kernel, recomputed
        self.attended, self.index, self.mask = 0, None, None

    def suffix_mask(self, context: int, own: int, like: Tensor) -> Tensor:
        """Return the bias for the attention scores of a suffix behind its prefix, (own, context + own).

        Args:
            context: number of prefix tokens.
            own: number of suffix tokens, at most `context`.
            like: tensor that gives dtype and device.

        Returns:
            0 where a suffix token may attend, -inf where the key lies in its future.
        """
        if self.mask is None:
            sizes = [(prefix[1] - prefix[0], stop - start) for prefix, (start, stop) in self.segments()]
            longest = max(length for before, length in sizes if length <= before)
            widest = max(before for before, _ in sizes)
            self.mask = like.new_full((longest, widest + longest), -torch.inf).triu(widest + 1)
        # A mask per suffix would stay in memory until the backward pass, in every layer. The views share one tensor.
        widest = self.mask.shape[1] - self.mask.shape[0]
        return self.mask[:own, widest - context : widest + own]

    def segments(self) -> Iterator[tuple[Span, Span]]:
        """Yield (context, queries) for each prefix, with an empty context, and each suffix, with its prefix."""
        for prefix, suffixes in self.groups:
            if prefix[1] > prefix[0]:
                yield (prefix[0], prefix[0]), prefix
            for suffix in suffixes:
                yield prefix, suffix


class AttentionSwitch:
    """The attention of each model: `packed_attention` for packed rows, the user's implementation for all else.

    The configuration is set itself. `set_attn_implementation` would look for the packages and kernels of the user's
    implementation each time, and refuses kernels of a hub repository that the user has allowed for one load only.
    """

    def __init__(self) -> None:
        self._users: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        """Implementation that the user set for a model."""

    def pack(self, model: nn.Module) -> None:
        """Let the model's attention keep the completions of a packed row apart."""
        base = base_model(model)
        if base.config._attn_implementation == ATTENTION:
            return
        # Registered here and not on import, which must not change what transformers knows.
        AttentionInterface.register(ATTENTION, packed_attention)
        # Without a mask function of its own, a new name gets no mask at all, and padded rows would attend to padding.
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)
        self._users[base] = base.config._attn_implementation
        base.config._attn_implementation = ATTENTION

    def restore(self, model: nn.Module) -> None:
        """Give the model the user's implementation again."""
        base = base_model(model)
        if base.config._attn_implementation == ATTENTION:
            base.config._attn_implementation = self._users.get(base, "sdpa")

    @contextmanager
    def in_float32(self, model: nn.Module) -> Iterator[None]:
        """Let rows that are not packed run in float32 inside this block, whatever the user's implementation takes."""
        self.restore(model)
        config = base_model(model).config
        users = config._attn_implementation
        if users not in TAKES_FLOAT32:
            # Every model has eager attention, with all that its own attention adds to SDPA.
            config._attn_implementation = "eager"
        try:
            yield
        finally:
            self.restore(model)
            config._attn_implementation = users


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    group_spans: GroupSpans | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention of each suffix to its own prefix and itself, or stock SDPA without `group_spans`.

    Args:
        module: attention layer.
        query: (1, heads, N, D).
        key: (1, key-value heads, N, D).
        value: (1, key-value heads, N, D).
        attention_mask: mask of transformers, of which a packed row needs none.
        dropout: dropout probability of the attention weights.
        scaling: factor of the attention scores, by default 1 / sqrt(D).
        group_spans: spans of a packed row, or None for a row in any other layout.
        **kwargs: further arguments of stock SDPA.

    Returns:
        The attention output, (1, N, heads, D), and None in place of the attention weights.
    """
    if group_spans is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    # A boolean mask says only that attention is causal, and the spans imply that. A float mask is added to the scores
    # and would be lost here, without an error, as would dropout and any other term: such a layer is not counted, and
    # `LogProbs` rejects the row after the forward.
    has_other_mask = attention_mask is not None and attention_mask.is_floating_point()
    if not has_other_mask and not dropout and all(kwargs.get(name) is None for name in ADDED_TERMS):
        group_spans.attended += 1
    query, key, value = _autocast(query, key, value)
    output = None
    if group_spans.kernel is not None:
        output = group_spans.kernel(group_spans, query, key, value, scaling)
    return sdpa(group_spans, query, key, value, scaling) if output is None else output, None


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """Return float32 tensors in the dtype of autocast, as SDPA casts them itself. Kernels outside of it do not."""
    # The query of float32 weights is float32 under autocast, because of the rotary embedding. Their value is not.
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device)
    return [tensor.to(dtype) if tensor.dtype == torch.float32 else tensor for tensor in tensors]


def is_on_gpu(tensor: Tensor) -> bool:
    """Return True for a tensor that a GPU computes with."""
    return tensor.device.type != "cpu"


def sdpa(spans: GroupSpans, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Return the attention output, (1, N, heads, D), of one SDPA call per suffix."""
    heads = query.shape[1] // key.shape[1]
    on_gpu = is_on_gpu(query)
    if heads > 1 and on_gpu and query.dtype == torch.float32:
        # No kernel on a GPU takes grouped heads in float32, and without one SDPA stores all scores.
        key, value = key.repeat_interleave(heads, dim=1), value.repeat_interleave(heads, dim=1)
        heads = 1
    grouped = heads > 1
    # One split has one concatenation as its gradient. The gradient of a slice is a tensor as long as the row, per span.
    lengths = [stop - start for prefix, suffixes in spans.groups for start, stop in (prefix, *suffixes)]
    parts = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    outputs = []
    for (start, stop), suffixes in spans.groups:
        context = stop - start
        prefix_q, prefix_k, prefix_v = next(parts)
        for number, (first, last) in enumerate(suffixes):
            q, k, v = next(parts)
            k, v = torch.cat([prefix_k, k], dim=2), torch.cat([prefix_v, v], dim=2)
            # On a GPU the kernels want aligned masks, which a view of the shared mask is not.
            if number and last - first <= context and not on_gpu:
                mask = spans.suffix_mask(context, last - first, query)
                output = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
            else:
                # Prefix and suffix together are a square causal block, (1, heads, P - 1 + L, D), which the kernels are
                # made for. Running the queries of a shorter prefix again costs less than a mask.
                q = torch.cat([prefix_q, q], dim=2)
                output = scaled_dot_product_attention(q, k, v, scale=scaling, is_causal=True, enable_gqa=grouped)
                if number:  # the results of the prefix are kept once, from the first suffix
                    output = output[:, :, context:]
            outputs.append(output)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()
