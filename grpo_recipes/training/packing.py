"""One packed row per micro-batch: each prompt once, followed by its completions, without padding.

TRL pads all rows of a micro-batch to one length and runs every prompt once per completion. Here the completions of a
prompt share the prompt. With prefix = prompt[:-1] and, for each completion, suffix = [last prompt token] +
completion[:-1], a micro-batch becomes one row:

    prefix, suffix, suffix, ...      (first prompt)      prefix, suffix, ...      (second prompt)      ...

Every suffix position predicts exactly one completion token. Position ids restart at len(prefix) in each suffix. A
suffix attends to its own prefix and to itself, causally, and to nothing else. The row has (P - 1) + sum(L) tokens per
group of G completions, where TRL's padded rows have G (max P + max L).

The idea is Prefix Grouper's (arXiv 2506.05433). The row runs through stock transformers models: attention by way of
`AttentionInterface`, labels by way of `shift_labels` of TRL's fused head. See docs/efficiency.md.

Shapes: B rows, P prompt columns, T completion columns, N tokens of the packed row, D dimensions per attention head.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_recipes.generation.models import base_model
from grpo_recipes.generation.rows import Rows, unpadded

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None  # type: ignore[assignment]

ATTENTION = "grpo_packed_sdpa"
"""Name of `packed_attention` in transformers' registries."""

IGNORED = -100
"""Label of a position that predicts nothing."""

Span = tuple[int, int]
"""Half-open range [start, stop) of the packed row."""


class Layout(IntEnum):
    """Layout of the rows of a model call, from the least to the most preferred."""

    PADDED = 0
    """Stock TRL layout: every row is padded to the longest of the generation batch."""
    TRIMMED = 1
    """Padded layout without the columns and rows that hold no label or context."""
    PACKED = 2
    """One row without padding, in which the completions of a group share their prompt."""


class GroupSpans:
    """Spans of a packed row that belong together, passed through the model as the keyword argument `group_spans`.

    An argument, because gradient checkpointing runs the layers again in the backward pass, after a context variable
    would have been reset. Not a dataclass, because FSDP2 in 16-bit precision rebuilds the dataclasses among the
    arguments of a layer, and `attended` would be counted in a copy.
    """

    groups: list[tuple[Span, list[Span]]]
    """Prefix and suffixes of each group, in the order of the row."""
    attended: int
    """Number of attention layers that have applied these spans and no other mask than causality."""
    varlen: Varlen | None
    """Spans in the form of `varlen_attn`, created by the first layer that needs them."""
    mask: Tensor | None
    """Shared attention bias. Every suffix mask is a view of it. Created by the first layer that needs a mask."""

    def __init__(self, groups: list[tuple[Span, list[Span]]]) -> None:
        self.groups, self.attended, self.varlen, self.mask = groups, 0, None, None

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


@dataclass(frozen=True)
class Varlen:
    """Arguments of `varlen_attn` for a packed row: each segment is one sequence, with keys gathered from the row."""

    keys: Tensor
    """Positions in the packed row of the keys of all sequences, one sequence after the other, (K,)."""
    query_ends: Tensor
    """Cumulative numbers of queries, (sequences + 1,), int32."""
    key_ends: Tensor
    """Cumulative numbers of keys, (sequences + 1,), int32."""
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, spans: GroupSpans, device: torch.device) -> Varlen:
        """Return the arguments for `spans`, on the device of the row."""
        segments = list(spans.segments())
        queries = [stop - start for _, (start, stop) in segments]
        keys = [np.r_[slice(*context), slice(*own)] for context, own in segments]
        lengths = [len(positions) for positions in keys]
        gathered = torch.from_numpy(np.concatenate(keys)).to(device)
        return cls(gathered, _ends(queries, device), _ends(lengths, device), max(queries), max(lengths))


@dataclass(frozen=True)
class PackedRow:
    """One packed row of N tokens with n labels, and the places of its results in TRL's layout."""

    input_ids: Tensor
    """(1, N)."""
    position_ids: Tensor
    """(1, N)."""
    labels: Tensor
    """Token that each suffix position predicts, and -100 in prefixes, (1, N)."""
    group_spans: GroupSpans
    rows: Tensor
    """Row in TRL's layout of each label, in packed order, (n,)."""
    columns: Tensor
    """Column in TRL's completions of each label, (n,)."""
    positions: Tensor
    """Position in the packed row that predicts each label, (n,)."""


@dataclass(frozen=True)
class ModelCall:
    """A model call: the layout chosen for it, and its rows."""

    layout: Layout
    rows: Rows
    """B rows, (B, P + T)."""
    trimmed: Rows
    """Rows of the trimmed layout."""
    index: Tensor
    """Indices of the rows that `trimmed` holds, (rows,)."""

    @property
    def tokens(self) -> int:
        """Number of tokens that run through the model, padding included."""
        if self.layout is Layout.PACKED:
            return self.rows.packed_tokens()
        return (self.rows if self.layout is Layout.PADDED else self.trimmed).input_ids.numel()


class SpansIgnored(RuntimeError):
    """An attention layer did not use `packed_attention`, or added a float mask."""


def order(rows: Rows, layout: Layout) -> Tensor:
    """Return an order of the rows, (B,), in which rows that should share a micro-batch are neighbours.

    Packed rows are sorted by prompt. Trimmed rows are sorted by completion length, then by prompt length.
    """
    if layout is Layout.PACKED:
        return torch.tensor(rows.prompt_numbers(), device=rows.input_ids.device).argsort(stable=True)
    # Not by total length: completions vary more than prompts, and a long prompt beside a long completion pads both
    # sides.
    prompts, completions = rows.prompt_mask.sum(1), rows.completion_mask.sum(1)
    return (completions * (rows.prompt_mask.size(1) + 1) + prompts).argsort(stable=True)


@dataclass
class _Line:
    """Packed row under construction."""

    ids: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)
    length: int = 0

    def append(self, tokens: np.ndarray, first_position: int, predicted: np.ndarray) -> Span:
        """Add tokens and the labels that they predict, both (length,), and return their span in the row."""
        self.ids.append(tokens)
        self.positions.append(np.arange(first_position, first_position + len(tokens)))
        self.labels.append(predicted)
        start, self.length = self.length, self.length + len(tokens)
        return start, self.length


def pack(rows: Rows) -> PackedRow:
    """Lay the rows out as one packed row.

    Rows without labels are dropped. If no row has a label, the result is one token that predicts nothing.
    """
    prompts = rows.prompts()
    completions = unpadded(rows.input_ids[:, -rows.logits_to_keep :], rows.completion_mask)
    line = _Line()
    groups: list[tuple[Span, list[Span]]] = []
    owners: list[int] = []  # row in TRL's layout of each suffix
    for number, same_prompt in rows.groups().items():
        group = [row for row in same_prompt if len(completions[row])]
        if not group:
            continue
        prompt, context = prompts[number], len(prompts[number]) - 1
        prefix = line.append(prompt[:-1], 0, np.full(context, IGNORED))
        suffixes = []
        for row in group:
            # The last prompt token predicts the first token of every completion. One position has one label, so each
            # suffix gets its own copy of that token, and the shared prefix predicts nothing.
            tokens = np.concatenate([prompt[-1:], completions[row][:-1]])
            suffixes.append(line.append(tokens, context, completions[row]))
        groups.append((prefix, suffixes))
        owners += group
    if not groups:
        groups = [((0, 0), [line.append(rows.input_ids[0, -1:].cpu().numpy(), 0, np.full(1, IGNORED))])]

    device, lengths = rows.input_ids.device, [len(completions[row]) for row in owners]
    labels = _joined(line.labels, device)
    return PackedRow(
        input_ids=_joined(line.ids, device)[None],
        position_ids=_joined(line.positions, device)[None],
        labels=labels[None],
        group_spans=GroupSpans(groups),
        # Labels lie suffix after suffix and, within a suffix, in the order of the completion's columns.
        rows=_joined([np.repeat(owners, lengths)], device),
        columns=_joined([np.arange(length) for length in lengths], device),
        positions=(labels != IGNORED).nonzero().flatten(),
    )


def _joined(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """Return the parts one after the other as int64, (n,). No parts give an empty tensor."""
    return torch.from_numpy(np.concatenate([np.zeros(0), *parts]).astype(np.int64)).to(device)


def packing_attention(model: nn.Module) -> None:
    """Let the model's attention keep the completions of a packed row apart."""
    # Registered here and not on import, which must not change what transformers knows.
    AttentionInterface.register(ATTENTION, packed_attention)
    # Without a mask function of its own, a new name gets no mask at all, and padded rows would attend to padding.
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    base_model(model).set_attn_implementation(ATTENTION)


def has_packing_attention(model: nn.Module) -> bool:
    """Return True if the model's attention is that of `packing_attention`."""
    return base_model(model).config.get_text_config()._attn_implementation == ATTENTION


def stock_attention(model: nn.Module) -> None:
    """Undo `packing_attention`."""
    if has_packing_attention(model):
        base_model(model).set_attn_implementation("sdpa")


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

    Raises:
        RuntimeError: a packed row has attention dropout.
    """
    if group_spans is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if dropout > 0:  # `layout_check.unsupported` finds dropout first, unless the model changes it later
        raise RuntimeError(
            f"{type(module).__name__} has an attention dropout of {dropout:g}, which the completions of a packed row "
            "would share: set `micro_batching: {layout: trimmed}`"
        )
    # A boolean mask says only that attention is causal, and the spans imply that. A float mask is added to the scores
    # and would be lost here, without an error: its layer is not counted, and `LogProbs` rejects the row after the
    # forward.
    if attention_mask is None or not attention_mask.is_floating_point():
        group_spans.attended += 1
    if _has_varlen(query, value):
        return _varlen(group_spans, query, key, value, scaling), None
    return _sdpa(group_spans, query, key, value, scaling), None


def _has_varlen(query: Tensor, value: Tensor) -> bool:
    """Return True if torch has FlashAttention over uneven sequences, with windows, for these tensors."""
    if varlen_attn is None or not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    # The first version of the function had no windows.
    parameters = inspect.signature(varlen_attn).parameters
    return "window_size" in parameters and "enable_gqa" in parameters and query.shape[-1] == value.shape[-1] <= 256


def _varlen(spans: GroupSpans, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Return the attention output, (1, N, heads, D), of one FlashAttention call over all segments."""
    if spans.varlen is None:
        spans.varlen = Varlen.of(spans, query.device)
    index = spans.varlen
    # (1, heads, N, D) to (N, heads, D). Segments lie one after the other in the row, so queries need no gathering.
    queries, keys, values = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    attended: Tensor = varlen_attn(  # type: ignore[assignment]  # a tuple only with `return_aux`
        queries,
        keys[index.keys],
        values[index.keys],
        index.query_ends,
        index.key_ends,
        index.longest_query,
        index.longest_key,
        scale=scaling,
        # Causal. The kernel aligns the diagonal to the end of the keys, so a suffix sees its complete prefix.
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[None]


def _sdpa(spans: GroupSpans, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Return the attention output, (1, N, heads, D), of one SDPA call per suffix."""
    grouped = query.shape[1] != key.shape[1]
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
            if number and last - first <= context and query.device.type == "cpu":
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


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the cumulative lengths, starting at 0, (sequences + 1,), int32."""
    return pad(torch.tensor(lengths, device=device).cumsum(0), (1, 0)).to(torch.int32)
