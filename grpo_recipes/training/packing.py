"""One packed row: each prompt once, its completions behind it, no padding.

TRL pads a micro-batch to one rectangle and runs every prompt once per completion. Here the completions of a prompt share
it: with prefix = prompt[:-1] and, for each completion, suffix = [last prompt token] + completion[:-1], a micro-batch
becomes one row

    prefix, suffix, suffix, ...      (of the first prompt)      prefix, suffix, ...      (of the next)      ...

in which every suffix position predicts exactly one completion token, positions restart at len(prefix) in each suffix, and
attention lets a suffix see its own prefix and nothing else. That takes (P - 1) + sum(L) tokens per group, where TRL's
rectangle takes G (max P + max L). The idea is Prefix Grouper's (arXiv 2506.05433); the row goes through stock transformers
models by way of `AttentionInterface`, and the labels by way of `shift_labels` of TRL's fused head. See docs/efficiency.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None  # type: ignore[assignment]

ATTENTION = "grpo_packed_sdpa"
"""The name of our attention in transformers' registries: stock SDPA, except in a forward that is given `group_spans`."""

IGNORED = -100
"""The label of a position that predicts nothing."""

Span = tuple[int, int]
"""[start, stop) in the packed row."""


class Layout(IntEnum):
    """How the rows of a model call are laid out, in the order in which they are preferred."""

    PADDED = 0
    """Stock TRL layout: every row is padded to the longest of the generation batch."""
    TRIMMED = 1
    """Padded layout without the columns and rows that hold no label or context."""
    PACKED = 2
    """One row without padding, in which the completions of a group share their prompt."""

    def __str__(self) -> str:
        return ("left as TRL pads them", "trimmed and not packed", "packed")[self]


class GroupSpans:
    """Which spans of a packed row belong together; travels through the model as the keyword argument `group_spans`.

    It is an argument and not context, because gradient checkpointing runs the layers again in the backward pass. It is not
    a dataclass, because FSDP2 in 16 bit rebuilds the dataclasses among its arguments, and the layers' count would be lost.
    """

    groups: list[tuple[Span, list[Span]]]
    """The prefix of each group and its suffixes, in the row's order."""
    attended: int
    """How many attention layers have kept to these spans, with no other mask than causality."""
    varlen: Varlen | None
    """The same for `varlen_attn`, made by the first layer that needs it."""
    mask: Tensor | None
    """What the masks of all suffixes are views of, made by the first layer that needs one."""

    def __init__(self, groups: list[tuple[Span, list[Span]]]) -> None:
        self.groups, self.attended, self.varlen, self.mask = groups, 0, None, None

    def suffix_mask(self, context: int, own: int, like: Tensor) -> Tensor:
        """What is added to the scores of `own` <= `context` tokens behind `context` others, (own, context + own).

        It is a view of one tensor, since every layer keeps its masks for the backward pass.
        """
        if self.mask is None:
            sizes = [(prefix[1] - prefix[0], stop - start) for prefix, (start, stop) in self.segments()]
            longest = max(length for before, length in sizes if length <= before)
            widest = max(before for before, _ in sizes)
            self.mask = like.new_full((longest, widest + longest), -torch.inf).triu(widest + 1)
        widest = self.mask.shape[1] - self.mask.shape[0]
        return self.mask[:own, widest - context : widest + own]

    def segments(self) -> Iterator[tuple[Span, Span]]:
        """(context, own span) of each run of queries: a prefix has an empty context, a suffix has its prefix."""
        for prefix, suffixes in self.groups:
            if prefix[1] > prefix[0]:
                yield (prefix[0], prefix[0]), prefix
            for suffix in suffixes:
                yield prefix, suffix


@dataclass(frozen=True)
class Varlen:
    """`GroupSpans` as `varlen_attn` takes them: each run of queries is a sequence, its keys gathered from the packed row."""

    keys: Tensor
    """The positions whose keys and values each sequence sees, one after the other, (K,)."""
    query_ends: Tensor
    """Cumulative lengths of the queries, (sequences + 1,), int32."""
    key_ends: Tensor
    """Cumulative lengths of the keys, (sequences + 1,), int32."""
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, spans: GroupSpans, device: torch.device) -> Varlen:
        """The index of `spans`, on the device of the row."""
        segments = list(spans.segments())
        queries = [stop - start for _, (start, stop) in segments]
        keys = [np.r_[slice(*context), slice(*own)] for context, own in segments]
        lengths = [len(positions) for positions in keys]
        seen = torch.from_numpy(np.concatenate(keys)).to(device)
        return cls(seen, _ends(queries, device), _ends(lengths, device), max(queries), max(lengths))


@dataclass(frozen=True)
class PackedRow:
    """One packed row of N tokens, and where its results go. The first three tensors are (1, N)."""

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    """The token that each suffix position predicts, -100 elsewhere."""
    group_spans: GroupSpans
    rows: Tensor
    """For each label, in the packed order: its row in TRL's layout, (labels,)."""
    columns: Tensor
    """For each label: its column in TRL's completions, (labels,)."""
    positions: Tensor
    """For each label: the place in the packed row that predicts it, (labels,)."""


@dataclass(frozen=True)
class Rows:
    """The rows of a model call in TRL's layout: prompts padded on the left, completions on the right."""

    input_ids: Tensor
    """(B, P + T)."""
    attention_mask: Tensor
    """(B, P + T), 1 where there is a token."""
    logits_to_keep: int
    """T."""

    def select(self, index: Tensor | slice, left: int = 0, width: int | None = None) -> Rows:
        """The rows at `index` without their first `left` columns, completions cut to `width`."""
        keep = self.logits_to_keep if width is None else width
        cut = slice(left, self.input_ids.size(1) - self.logits_to_keep + keep)
        return Rows(self.input_ids[index, cut], self.attention_mask[index, cut], keep)

    def unlabelled(self) -> Rows:
        """The same rows with their completions masked out."""
        mask = self.attention_mask.clone()
        mask[:, -self.logits_to_keep :] = 0
        return Rows(self.input_ids, mask, self.logits_to_keep)

    def widen(self, left: int, right: int) -> Rows:
        """The same rows with columns of padding added on both sides."""
        ids = pad(self.input_ids, (left, right), value=int(self.input_ids[0, -1]))
        return Rows(ids, pad(self.attention_mask, (left, right)), self.logits_to_keep + right)

    @property
    def completion_mask(self) -> Tensor:
        """(B, T)."""
        return self.attention_mask[:, -self.logits_to_keep :]

    @property
    def prompt_mask(self) -> Tensor:
        """(B, P)."""
        return self.attention_mask[:, : -self.logits_to_keep]

    def prompts(self) -> list[np.ndarray]:
        """Each row's prompt without padding."""
        return unpadded(self.input_ids[:, : -self.logits_to_keep], self.prompt_mask)

    def prompt_numbers(self) -> list[int]:
        """For each row the first row that has the same prompt."""
        first: dict[bytes, int] = {}
        return [first.setdefault(prompt.tobytes(), row) for row, prompt in enumerate(self.prompts())]

    def packed_tokens(self) -> int:
        """The length of the packed row: each prompt that has a label, less its last token, and one token for each label."""
        lengths, prompts = self.completion_mask.sum(1).tolist(), self.prompt_mask.sum(1).tolist()
        used = {number for number, length in zip(self.prompt_numbers(), lengths, strict=True) if length}
        return max(sum(prompts[number] - 1 for number in used) + sum(lengths), 1)

    def trimmed(self) -> tuple[Rows, Tensor]:
        """The rows that hold labels, without common padding, and which rows those are; at least one row, one column wide."""
        index = self.completion_mask.any(1).nonzero().flatten()
        if not len(index):  # all ranks must call the model equally often, so a row is run even if it has no label
            index = index.new_zeros(1)
            return self.select(index, self.input_ids.size(1) - self.logits_to_keep - 1, 1), index
        left, width = extent(self.prompt_mask[index], self.completion_mask[index])
        return self.select(index, left, width), index


def extent(prompt_mask: Tensor, completion_mask: Tensor) -> tuple[int, int]:
    """The first column that a prompt uses and the number of columns that a completion uses; both keep at least one."""
    prompts, completions = prompt_mask.any(0).nonzero(), completion_mask.any(0).nonzero()
    last = prompt_mask.size(1) - 1
    return (int(prompts[0]) if len(prompts) else last), (int(completions[-1]) + 1 if len(completions) else 1)


def unpadded(ids: Tensor, mask: Tensor) -> list[np.ndarray]:
    """The tokens of each row of (B, P) that the mask keeps."""
    return [row[kept] for row, kept in zip(ids.cpu().numpy(), mask.bool().cpu().numpy(), strict=True)]


def order(rows: Rows, layout: Layout) -> Tensor:
    """An order of the rows, (B,), in which those that should run together are neighbours.

    Packed, these are the rows of one prompt. Trimmed, they are the rows of a completion length, then of a prompt length:
    completions vary more than prompts, and this order wastes less than one by total length.
    """
    if layout is Layout.PACKED:
        return torch.tensor(rows.prompt_numbers(), device=rows.input_ids.device).argsort(stable=True)
    prompts, completions = rows.prompt_mask.sum(1), rows.completion_mask.sum(1)
    return (completions * (rows.prompt_mask.size(1) + 1) + prompts).argsort(stable=True)


def pack(rows: Rows) -> PackedRow:
    """Lay the rows out as one packed row. Rows without labels are left out; if none has a label, one idle token is left."""
    prompts, numbers = rows.prompts(), rows.prompt_numbers()
    completions = unpadded(rows.input_ids[:, -rows.logits_to_keep :], rows.completion_mask)
    runs: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # token ids, position ids, labels; each (length,)
    end = 0

    def append(tokens: np.ndarray, position: int, predicted: np.ndarray) -> Span:
        """Add tokens to the row, at positions that count from `position`; returns where they lie in the row."""
        nonlocal end
        runs.append((tokens, np.arange(position, position + len(tokens)), predicted))
        end += len(tokens)
        return end - len(tokens), end

    groups: list[tuple[Span, list[Span]]] = []
    owners: list[int] = []  # of each suffix: its row in TRL's layout
    for number in dict.fromkeys(numbers):
        members = [row for row, other in enumerate(numbers) if other == number and len(completions[row])]
        if not members:
            continue
        # The prompt's last token predicts the first token of each completion, which differs: so each suffix has its own
        # copy of it, at the position that follows the prefix, and the prefix predicts nothing.
        prompt, context = prompts[number], len(prompts[number]) - 1
        prefix = append(prompt[:-1], 0, np.full(context, IGNORED))
        suffixes = [
            append(np.concatenate([prompt[-1:], completions[row][:-1]]), context, completions[row]) for row in members
        ]
        groups.append((prefix, suffixes))
        owners += members
    if not groups:
        idle = append(rows.input_ids[0, -1:].cpu().numpy(), 0, np.full(1, IGNORED))
        groups = [((0, 0), [idle])]

    def tensor(parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0), *parts]).astype(np.int64)).to(rows.input_ids.device)

    # Labels lie suffix after suffix, and in each suffix in the order of the completion's columns.
    lengths = [len(completions[row]) for row in owners]
    ids, positions, labels = (tensor(parts) for parts in zip(*runs, strict=True))
    return PackedRow(
        input_ids=ids[None],
        position_ids=positions[None],
        labels=labels[None],
        group_spans=GroupSpans(groups),
        rows=tensor([np.repeat(owners, lengths)]),
        columns=tensor([np.arange(length) for length in lengths]),
        positions=(labels != IGNORED).nonzero().flatten(),
    )


def register_attention() -> None:
    """Make `ATTENTION` known to transformers."""
    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


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
    """Stock SDPA; with `group_spans`, causal attention of each suffix to its own prefix and itself.

    Shapes are transformers': query (1, heads, N, D), key and value (1, key-value heads, N, D); returns (1, N, heads, D).
    Raises `RuntimeError` for a packed row with dropout, which the inspection of the model should have found.
    """
    if group_spans is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if dropout > 0:
        raise RuntimeError(
            f"a packed row reached {type(module).__name__} with an attention dropout of {dropout:g}, which its "
            "completions would share: set `micro_batching: {layout: trimmed}`"
        )
    # The spans imply causality, which is all that a boolean mask says here. A float mask adds to the scores and would be
    # lost: such a layer is not counted, and the row is refused after the forward.
    if attention_mask is None or not attention_mask.is_floating_point():
        group_spans.attended += 1
    if _has_varlen(query, value):
        return _varlen(group_spans, query, key, value, scaling), None
    grouped = query.shape[1] != key.shape[1]
    # One split, whose gradient is one concatenation: that of a slice is a tensor as long as the whole row, for every span.
    lengths = [stop - start for prefix, suffixes in group_spans.groups for start, stop in (prefix, *suffixes)]
    spans = zip(*(x.split(lengths, dim=2) for x in (query, key, value)), strict=True)
    outputs = []
    for (start, stop), suffixes in group_spans.groups:
        prefix, context = next(spans), stop - start
        for number, (first, last) in enumerate(suffixes):
            suffix = next(spans)
            k, v = (torch.cat(parts, dim=2) for parts in zip(prefix[1:], suffix[1:], strict=True))
            if number and last - first <= context and query.device.type == "cpu":  # a GPU's kernels want aligned masks
                q, mask = suffix[0], group_spans.suffix_mask(context, last - first, query)
                output = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped)
            else:
                # Prefix and suffix together are a square causal block, (1, heads, P - 1 + L, D), which the kernels are made
                # for: behind a shorter prefix, running its queries again costs less than a mask. Its results are kept once.
                q = torch.cat([prefix[0], suffix[0]], dim=2)
                output = scaled_dot_product_attention(q, k, v, scale=scaling, is_causal=True, enable_gqa=grouped)
                output = output if number == 0 else output[:, :, context:]
            outputs.append(output)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _has_varlen(query: Tensor, value: Tensor) -> bool:
    """Whether torch's FlashAttention over uneven sequences takes these tensors; its first version had no windows."""
    if varlen_attn is None or not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    known = inspect.signature(varlen_attn).parameters
    return "window_size" in known and "enable_gqa" in known and query.shape[-1] == value.shape[-1] <= 256


def _varlen(spans: GroupSpans, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """The same in one FlashAttention call, whose causal mask is aligned to the end of each sequence's keys."""
    if spans.varlen is None:
        spans.varlen = Varlen.of(spans, query.device)
    index = spans.varlen
    # (1, heads, N, D) to (N, heads, D); sequences lie one after the other, so the queries need no gathering.
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
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[None]


def _ends(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Cumulative lengths from 0, (sequences + 1,), int32."""
    return pad(torch.tensor(lengths, device=device).cumsum(0), (1, 0)).to(torch.int32)
