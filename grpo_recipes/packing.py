"""Per-token log-probabilities without padding, and with each prompt computed once.

TRL pads a micro-batch to one rectangle and runs every prompt once per completion. Here the completions of a prompt share
it: with prefix = prompt[:-1] and, for each completion, suffix = [last prompt token] + completion[:-1], a micro-batch
becomes one row

    prefix, suffix, suffix, ...      (of the first prompt)      prefix, suffix, ...      (of the next)      ...

in which every suffix position predicts exactly one completion token, positions restart at len(prefix) in each suffix, and
attention lets a suffix see its own prefix and nothing else. That takes (P - 1) + sum(L) tokens per group, where TRL's
rectangle takes G (max P + max L). The idea is Prefix Grouper's (arXiv 2506.05433); the row goes through stock transformers
models by way of `AttentionInterface`, and the model's labels through `shift_labels` of TRL's fused head.

A wrong attention mask gives wrong log-probabilities without any error, so a model is packed only after its configuration
has been inspected and its first micro-batch agrees with TRL's own computation. See docs/efficiency.md.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from trl import GRPOConfig
from trl.models.utils import disable_gradient_checkpointing

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None  # type: ignore[assignment]

ATTENTION = "grpo_packed_sdpa"
"""The name of our attention in transformers' registries: stock SDPA, except in a forward that carries a plan."""

TOLERANCE_FP32 = 1e-4
"""Largest difference of a log-probability on the first micro-batch, in float32."""
TOLERANCE_16BIT = 5e-2
"""Mean difference of the log-probabilities on the first micro-batch, in bfloat16 or float16. The largest is no measure
there: over thousands of tokens, two correct kernels differ by more than that on some."""

EXTRA_PADDING = 8
"""Columns of padding added on the left for the check, so that a model whose result depends on padding is noticed even
where the first micro-batch has none."""

WORTHWHILE = 0.95
"""Pack only where the packed row has at most this share of the tokens of trimmed rows; a rectangle is quicker per token."""

IGNORED = -100
"""The label of a position that predicts nothing."""

_ELSEWHERE = "on another rank"

Span = tuple[int, int]
PerToken = tuple[Tensor, Tensor | None]


logger = get_logger(__name__)


class Layout(IntEnum):
    """How the rows of a model call are laid out, in the order in which they are preferred."""

    PLAIN = 0
    """TRL's rectangle, untouched."""
    TRIMMED = 1
    """The columns and rows that hold no label or context are cut away."""
    PACKED = 2
    """One row without padding, prompts shared."""

    def __str__(self) -> str:
        return ("left as TRL pads them", "trimmed and not packed", "packed")[self]


class GroupPlan:
    """Which spans of a packed row belong together; travels through the model as the keyword argument `group_plan`.

    It is an argument, and not context, because checkpointing runs the layers again in the backward pass. It is no dataclass,
    because FSDP2 in 16 bit hands its modules copies of those, and what the layers note here would be lost.
    """

    groups: list[tuple[Span, list[Span]]]
    """The prefix of each group and its suffixes, as [start, stop) in the packed row, in the row's order."""
    attended: int
    """How many attention layers have followed the plan, and had no other mask than causality."""
    varlen: Varlen | None
    """The same for `varlen_attn`, made by the first layer that wants it."""

    def __init__(self, groups: list[tuple[Span, list[Span]]]) -> None:
        self.groups, self.attended, self.varlen = groups, 0, None

    def segments(self) -> Iterator[tuple[Span, Span]]:
        """(context, own span) of each run of queries: prefixes have no context, suffixes have their prefix."""
        for prefix, suffixes in self.groups:
            if prefix[1] > prefix[0]:
                yield (prefix[0], prefix[0]), prefix
            for suffix in suffixes:
                yield prefix, suffix


@dataclass(frozen=True)
class Varlen:
    """A plan as `varlen_attn` takes it: every run of queries is a sequence, with keys gathered from the packed row."""

    keys: Tensor
    """The positions whose keys and values each sequence sees, one after the other, (K,)."""
    query_ends: Tensor
    """Cumulative lengths of the queries, (sequences + 1,), int32."""
    key_ends: Tensor
    """Cumulative lengths of the keys, (sequences + 1,), int32."""
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, plan: GroupPlan, device: torch.device) -> Varlen:
        """Index a plan, on the device of the row."""
        segments = list(plan.segments())
        queries = [stop - start for _, (start, stop) in segments]
        keys = [np.r_[slice(*context), slice(*own)] for context, own in segments]
        lengths = [len(positions) for positions in keys]
        seen = torch.from_numpy(np.concatenate(keys)).to(device)
        return cls(seen, _ends(queries, device), _ends(lengths, device), max(queries), max(lengths))


@dataclass(frozen=True)
class PackedRow:
    """One packed row and where its results go. Every tensor but the last three is (1, N)."""

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    """The token that each suffix position predicts, -100 elsewhere."""
    plan: GroupPlan
    rows: Tensor
    """Of each label, in the packed order: its row in TRL's layout, (labels,)."""
    columns: Tensor
    """Of each label: its column in TRL's layout, (labels,)."""
    positions: Tensor
    """Of each label: its position in the packed row, (labels,)."""


@dataclass(frozen=True)
class Rows:
    """What a model call is asked for, in TRL's layout: prompts padded on the left, completions on the right."""

    input_ids: Tensor
    """(B, P + T)."""
    attention_mask: Tensor
    """(B, P + T), 1 where there is a token."""
    logits_to_keep: int
    """T."""

    def select(self, index: Tensor, left: int = 0, width: int | None = None) -> Rows:
        """The rows of `index` without their first `left` columns, completions cut to `width`."""
        keep = self.logits_to_keep if width is None else width
        cut = slice(left, self.input_ids.size(1) - self.logits_to_keep + keep)
        return Rows(self.input_ids[index, cut], self.attention_mask[index, cut], keep)

    def head(self, count: int) -> Rows:
        """The first `count` rows."""
        return Rows(self.input_ids[:count], self.attention_mask[:count], self.logits_to_keep)

    def unlabelled(self) -> Rows:
        """The same rows with their completions masked out."""
        mask = self.attention_mask.clone()
        mask[:, -self.logits_to_keep :] = 0
        return Rows(self.input_ids, mask, self.logits_to_keep)

    def widen(self, columns: int) -> Rows:
        """The same rows with columns of padding added on the left."""
        ids = pad(self.input_ids, (columns, 0), value=int(self.input_ids[0, -1]))
        return Rows(ids, pad(self.attention_mask, (columns, 0)), self.logits_to_keep)

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
        """The tokens of the packed row: for each prompt that has a label, its length less one, and each label."""
        lengths, prompts = self.completion_mask.sum(1).tolist(), self.prompt_mask.sum(1).tolist()
        used = {number for number, length in zip(self.prompt_numbers(), lengths, strict=True) if length}
        return max(sum(prompts[number] - 1 for number in used) + sum(lengths), 1)

    def trimmed(self) -> tuple[Rows, Tensor]:
        """The rows that hold labels, without common padding, and which rows those are; at least one row, of one label."""
        index = self.completion_mask.any(1).nonzero().flatten()
        if not len(index):  # one call is owed all the same: ranks must make the same number of them
            index = index.new_zeros(1)
            return self.select(index, self.input_ids.size(1) - self.logits_to_keep - 1, 1), index
        left, width = extent(self.prompt_mask[index], self.completion_mask[index])
        return self.select(index, left, width), index


def extent(prompt_mask: Tensor, completion_mask: Tensor) -> tuple[int, int]:
    """The first column that any prompt uses and the number of columns that any completion uses, at least 1 of each."""
    prompts, completions = prompt_mask.any(0).nonzero(), completion_mask.any(0).nonzero()
    last = prompt_mask.size(1) - 1
    return (int(prompts[0]) if len(prompts) else last), (int(completions[-1]) + 1 if len(completions) else 1)


def unpadded(ids: Tensor, mask: Tensor) -> list[np.ndarray]:
    """The tokens of each row of (B, P) that the mask keeps."""
    return [row[kept] for row, kept in zip(ids.cpu().numpy(), mask.bool().cpu().numpy(), strict=True)]


def pack(rows: Rows) -> PackedRow:
    """Lay the rows out as one packed row. Rows without labels stay out; with no label at all, one idle token is left."""
    prompts, numbers = rows.prompts(), rows.prompt_numbers()
    completions = unpadded(rows.input_ids[:, -rows.logits_to_keep :], rows.completion_mask)
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    owners: list[int] = []
    groups: list[tuple[Span, list[Span]]] = []
    end = 0
    for number in dict.fromkeys(numbers):
        members = [row for row, other in enumerate(numbers) if other == number and len(completions[row])]
        if not members:
            continue
        prompt = prompts[members[0]]
        context = len(prompt) - 1
        ids.append(prompt[:-1])
        positions.append(np.arange(context))
        labels.append(np.full(context, IGNORED))
        prefix, suffixes = (end, end + context), []
        end += context
        for row in members:
            completion = completions[row]
            ids += [prompt[-1:], completion[:-1]]
            positions.append(np.arange(context, context + len(completion)))
            labels.append(completion)
            suffixes.append((end, end + len(completion)))
            end += len(completion)
        owners += members
        groups.append((prefix, suffixes))
    if not groups:
        ids, positions, labels = [rows.input_ids[0, -1:].cpu().numpy()], [np.zeros(1)], [np.full(1, IGNORED)]
        groups = [((0, 0), [(0, 1)])]
    lengths = [len(completions[row]) for row in owners]
    columns = [np.arange(length) for length in lengths]

    def tensor(parts: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0), *parts]).astype(np.int64)).to(rows.input_ids.device)

    predicted = tensor(labels)
    return PackedRow(
        input_ids=tensor(ids)[None],
        position_ids=tensor(positions)[None],
        labels=predicted[None],
        plan=GroupPlan(groups),
        rows=tensor([np.repeat(owners, lengths)]),
        columns=tensor(columns),
        positions=(predicted != IGNORED).nonzero().flatten(),
    )


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    group_plan: GroupPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stock SDPA; with a plan, causal attention of each suffix on its own prefix and itself. Shapes as transformers':
    query (1, heads, N, D), key and value (1, key-value heads, N, D); returns (1, N, heads, D).

    Raises `RuntimeError` for a plan with dropout, which `unsupported` should have seen.
    """
    if group_plan is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if dropout > 0:
        raise RuntimeError(
            f"a packed row reached {type(module).__name__} with an attention dropout of {dropout:g}, which its "
            "completions would share: set micro_batching: {pack: false}"
        )
    # A plan stands for causality, which is all that a mask of booleans says here; a float mask adds to the scores.
    if attention_mask is None or not attention_mask.is_floating_point():
        group_plan.attended += 1
    if _has_varlen(query, value):
        return _varlen(group_plan, query, key, value, scaling), None
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for (start, stop), suffixes in group_plan.groups:
        for number, (first, last) in enumerate(suffixes):
            # The prefix's queries run again with each suffix: a square causal block is what the kernels are made for,
            # and costs less than a mask.
            q, k, v = (torch.cat([x[:, :, start:stop], x[:, :, first:last]], dim=2) for x in (query, key, value))
            output = scaled_dot_product_attention(q, k, v, scale=scaling, is_causal=True, enable_gqa=grouped)
            outputs.append(output if number == 0 else output[:, :, stop - start :])
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _has_varlen(query: Tensor, value: Tensor) -> bool:
    """Whether torch's FlashAttention over uneven sequences takes these tensors; its first version had no windows."""
    if varlen_attn is None or not query.is_cuda or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    known = inspect.signature(varlen_attn).parameters
    return "window_size" in known and "enable_gqa" in known and query.shape[-1] == value.shape[-1] <= 256


def _varlen(plan: GroupPlan, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """The same in one FlashAttention call, whose causal mask is aligned to the end of each sequence's keys."""
    if plan.varlen is None:
        plan.varlen = Varlen.of(plan, query.device)
    index = plan.varlen
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
    return pad(torch.tensor(lengths, device=device).cumsum(0), (1, 0)).to(torch.int32)


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@dataclass(frozen=True)
class Call:
    """One model call: the layout chosen for it and what that layout computes."""

    layout: Layout
    rows: Rows
    """The rows asked for."""
    trimmed: Rows
    index: Tensor
    """Which rows `trimmed` holds."""

    @property
    def tokens(self) -> int:
        """Tokens that run through the model, padding included."""
        if self.layout is Layout.PACKED:
            return self.rows.packed_tokens()
        return (self.rows if self.layout is Layout.PLAIN else self.trimmed).input_ids.numel()


@dataclass
class LogProbs:
    """Per-token log-probabilities and entropies in TRL's (B, T) layout, computed in the cheapest layout that is exact.

    `plain` is TRL's own computation, (model, rows, compute_entropy) -> (log-probabilities, entropies), each (B, T), zero
    where there is no label.
    """

    accelerator: Accelerator
    args: GRPOConfig
    plain: Callable[[nn.Module, Rows, bool], PerToken]
    wanted: Layout
    """The most that the user wants."""
    router_loss: bool = False
    plain_because: str = ""
    """Why TRL's rows must stay as they are, if they must: something else reads them during the forward."""
    _settled: dict[int, Layout] = field(default_factory=dict)
    _bare: dict[nn.Module, nn.Module] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

    def __call__(self, model: nn.Module, rows: Rows, batch_size: int | None, compute_entropy: bool) -> PerToken:
        """Log-probabilities and entropies of `rows`, in ceil(B / batch_size) model calls on every rank."""
        size = len(rows.input_ids)
        chunk = batch_size or size
        layout = self.layout(model, rows, chunk)
        plain = layout is Layout.PLAIN or size <= chunk
        sequence = torch.arange(size, device=rows.input_ids.device) if plain else order(rows, layout)
        calls = [self.plan(model, rows.select(index), layout) for index in sequence.split(chunk)]
        log_probs, entropies = zip(*(self._run(call, model, compute_entropy) for call in calls), strict=True)
        back = sequence.argsort()
        return torch.cat(log_probs)[back], torch.cat(entropies)[back] if compute_entropy else None

    def layout(self, model: nn.Module, rows: Rows, chunk: int) -> Layout:
        """The layout that this model is run in; settled on the first `chunk` rows it meets, for all ranks alike."""
        bare = self.bare(model)
        if id(bare) not in self._settled:
            found = self._settle(model, bare, rows.head(chunk))
            if found is None:  # no row has a label: nothing can be learnt from them
                return Layout.PLAIN
            self._settled[id(bare)] = found
        return self._settled[id(bare)]

    def bare(self, model: nn.Module) -> nn.Module:
        """The model inside accelerate's wrappers, looked for once: that takes 0.7 ms, many times a step."""
        if model not in self._bare:
            self._bare[model] = self.accelerator.unwrap_model(model)
        return self._bare[model]

    def plan(self, model: nn.Module, rows: Rows, layout: Layout) -> Call:
        """The model call for `rows` in `layout`; trimmed rather than packed where that is impossible or saves little."""
        trimmed, index = rows.trimmed()
        if layout is Layout.PACKED and not (
            self._fits(self.bare(model), trimmed).all()
            and rows.packed_tokens() <= WORTHWHILE * trimmed.input_ids.numel()
        ):
            layout = Layout.TRIMMED
        return Call(layout, rows, trimmed, index)

    def _run(self, call: Call, model: nn.Module, compute_entropy: bool) -> PerToken:
        if call.layout is Layout.PACKED:
            return self._run_packed(model, pack(call.rows), call.rows, compute_entropy)
        if call.layout is Layout.PLAIN:
            return self.plain(model, call.rows, compute_entropy)
        log_probs, entropies = self.plain(model, call.trimmed, compute_entropy)
        return _spread(log_probs, call), _spread(entropies, call) if entropies is not None else None

    def _run_packed(self, model: nn.Module, packed: PackedRow, rows: Rows, compute_entropy: bool) -> PerToken:
        with self.accelerator.autocast():
            outputs = model(
                input_ids=packed.input_ids,
                position_ids=packed.position_ids,
                attention_mask=torch.ones_like(packed.input_ids),
                shift_labels=packed.labels,
                fused_lm_head=True,
                group_plan=packed.plan,
            )
        layers = num_layers(self.bare(model))
        if packed.plan.attended != layers:
            raise NotFollowed(f"{packed.plan.attended} of its {layers} layers follow the plan of a packed row")
        shape = (len(rows.input_ids), rows.logits_to_keep)

        def scatter(values: Tensor) -> Tensor:
            target = (packed.rows, packed.columns)
            return values.new_zeros(shape).index_put(target, values[0, packed.positions])

        return scatter(outputs.log_probs), scatter(outputs.entropy) if compute_entropy else None

    def _settle(self, model: nn.Module, bare: nn.Module, rows: Rows) -> Layout | None:
        """Inspect the model, then hold the layout against TRL's plain rows; None if no rank has a label."""
        found, reason = self._allowed(bare)
        if found is not Layout.PLAIN:
            if not self._on_any_rank(bool(rows.completion_mask.any())):
                return None
            with at_rest(bare), disable_gradient_checkpointing(bare, self.args.gradient_checkpointing_kwargs):
                found, doubt = self._verify(model, bare, rows, found)
            reason = doubt or reason
        if found is not Layout.PACKED:
            stock_attention(bare)
        if found < self.wanted:
            self.say_once(f"micro-batches are {found}: {reason}")
        return found

    def _allowed(self, model: nn.Module) -> tuple[Layout, str]:
        """The most that settings and model allow, and why it isn't what the user wants."""
        if self.args.pad_to_multiple_of is not None:
            return Layout.PLAIN, "pad_to_multiple_of asks for the shapes that TRL makes"
        if self.plain_because:
            return Layout.PLAIN, self.plain_because
        rotary = rotary_of_the_longest(text_config(model))
        if rotary:
            return Layout.PLAIN, f"a rotary table of type {rotary} depends on the longest row, padding included"
        if self.wanted is not Layout.PACKED:
            return self.wanted, ""
        reason = unsupported(model)
        if self.router_loss:
            reason = "a packed row would count a prompt once in the router loss"
        elif self.args.torch_compile:
            reason = "torch.compile would compile each packed shape anew"
        return (Layout.TRIMMED, reason) if reason else (Layout.PACKED, "")

    def _verify(self, model: nn.Module, bare: nn.Module, rows: Rows, wanted: Layout) -> tuple[Layout, str]:
        """The best layout up to `wanted` that agrees with TRL's rows on every rank, and why it isn't `wanted`.

        Under ZeRO-3 and FSDP a model call is a collective: ranks settle each stage together, whatever their own rows are.
        """
        room = (getattr(text_config(bare), "max_position_embeddings", None) or math.inf) - rows.input_ids.size(1)
        columns = int(max(0, min(EXTRA_PADDING, room)))
        if self._on_any_rank(not columns and _learns_positions(base_model(bare))):
            return Layout.PLAIN, "its positions are learnt, and the rows leave no room to check whether padding matters"
        expected, _ = self.plain(model, rows.widen(columns), False)
        trimmed, index = rows.trimmed()
        got, _ = self._run(Call(Layout.TRIMMED, rows, trimmed, index), model, False)
        doubt = self._disagreement(got, expected, rows, bare)
        if self._on_any_rank(bool(doubt)):
            return Layout.PLAIN, f"the log-probabilities of this model depend on padding ({doubt or _ELSEWHERE})"
        if wanted is not Layout.PACKED:
            return Layout.TRIMMED, ""
        packable = (self._fits(bare, rows) & rows.completion_mask.any(1)).nonzero().flatten()
        if not self._on_any_rank(len(packable) > 0):
            return Layout.TRIMMED, "no row of the first micro-batch can be packed"
        packing_attention(bare)
        index = _sharing(rows, packable) if len(packable) else packable.new_zeros(1)
        some = rows.select(index)
        if not len(packable):  # this rank has no say, but owes the others a call
            some = some.unlabelled()
        try:
            got, _ = self._run_packed(model, pack(some), some, False)
            doubt = self._disagreement(got, expected[index], some, bare)
            doubt = doubt and f"packed rows give other log-probabilities ({doubt})"
        except NotFollowed as error:  # raised after the call
            doubt = str(error)
        if self._on_any_rank(bool(doubt)):
            return Layout.TRIMMED, doubt or f"packed rows give other log-probabilities ({_ELSEWHERE})"
        return Layout.PACKED, ""

    def _on_any_rank(self, here: bool) -> bool:
        """Whether something holds on at least one rank; every rank must ask."""
        return bool(self.accelerator.gather(torch.tensor([int(here)], device=self.accelerator.device)).any())

    def _disagreement(self, got: Tensor, expected: Tensor, rows: Rows, model: nn.Module) -> str:
        """By how much two computations differ where there are labels, as a phrase; empty within the tolerance."""
        gap = (got - expected).abs()[rows.completion_mask.bool()].float()
        if not gap.numel():
            return ""
        exact = (
            next(model.parameters()).dtype in (torch.float32, torch.float64)
            and self.accelerator.mixed_precision == "no"
        )
        value, limit = (gap.max(), TOLERANCE_FP32) if exact else (gap.mean(), TOLERANCE_16BIT)
        return "" if value <= limit else f"by {value:.1e} on the first micro-batch, {limit:.0e} allowed"

    def _fits(self, model: nn.Module, rows: Rows) -> Tensor:
        """Which rows can be packed, (B,): their masks have no holes and they lie inside the model's attention window."""
        mask = rows.completion_mask
        whole = ~(mask[:, 1:] > mask[:, :-1]).any(1)
        if not whole.all():
            self.say_once("rows whose completion mask has holes are not packed")
        window = attention_window(text_config(model))
        if window is None:
            return whole
        inside = rows.attention_mask.sum(1) <= window
        if not inside.all():
            self.say_once(f"rows of more than {window} tokens, the model's attention window, are not packed")
        return whole & inside

    def say_once(self, sentence: str) -> None:
        """Log a degraded mode, once, on the main process."""
        if sentence not in self._said:
            self._said.add(sentence)
            logger.warning(sentence)


class NotFollowed(RuntimeError):
    """Some attention layer of the model did not follow the plan of a packed row."""


def order(rows: Rows, layout: Layout) -> Tensor:
    """An order of the rows in which those that should meet are neighbours, (B,).

    Packed, these are the rows of a prompt. Trimmed, they are the rows of a completion length, then of a prompt length:
    completions vary more than prompts, and chunks of such an order waste less than those of an order by total length.
    """
    if layout is Layout.PACKED:
        return torch.tensor(rows.prompt_numbers(), device=rows.input_ids.device).argsort(stable=True)
    prompts, completions = rows.prompt_mask.sum(1), rows.completion_mask.sum(1)
    return (completions * (rows.prompt_mask.size(1) + 1) + prompts).argsort(stable=True)


def _sharing(rows: Rows, index: Tensor) -> Tensor:
    """`index`, with the row of the longest completion twice where no two of its rows share a prompt.

    One completion, packed alone, is the plain row, and proves nothing.
    """
    some = rows.select(index)
    if len(set(some.prompt_numbers())) < len(index):
        return index
    return torch.cat([index, index[some.completion_mask.sum(1).argmax()][None]])


def _spread(values: Tensor, call: Call) -> Tensor:
    """Results of trimmed rows in the layout of all rows, zero where nothing was computed."""
    wide = pad(values, (0, call.rows.logits_to_keep - values.size(1)))
    return wide.new_zeros(len(call.rows.input_ids), wide.size(1)).index_copy(0, call.index, wide)


def base_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside a PEFT model."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model."""
    return base_model(model).config.get_text_config()


def num_layers(model: nn.Module) -> int:
    """The number of attention layers that a forward runs."""
    return text_config(model).num_hidden_layers


def packing_attention(model: nn.Module) -> None:
    """Let the model's attention follow plans."""
    base_model(model).set_attn_implementation(ATTENTION)


def has_packing_attention(model: nn.Module) -> bool:
    """Whether the model's attention follows plans."""
    return text_config(model)._attn_implementation == ATTENTION


def stock_attention(model: nn.Module) -> None:
    """Give the model stock SDPA back if it had ours."""
    if has_packing_attention(model):
        base_model(model).set_attn_implementation("sdpa")


def attention_window(config: Any) -> int | None:
    """The sliding window of a model's attention in tokens, None without one."""
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or "sliding_attention" in kinds
    return getattr(config, "sliding_window", None) if slides else None


def rotary_of_the_longest(config: Any) -> str | None:
    """The type of a rotary table that transformers picks anew by the largest position of each forward, None without one.

    TRL pads every pass over a generation batch to one width, and so gives all of them one table.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    tables = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]  # or by layer type
    kinds = [table.get("rope_type") or "default" for table in tables]
    return next((kind for kind in kinds if "dynamic" in kind or kind == "longrope"), None)


def unsupported(model: nn.Module) -> str | None:
    """Why this model can't be packed, as far as its configuration and modules tell; None if nothing speaks against it."""
    base, config = base_model(model), text_config(model)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    parameters = inspect.signature(base.base_model.forward).parameters
    if config is not base.config:
        return "the model is multimodal"
    if kinds:
        return f"the model has layers of {', '.join(sorted(kinds))}"
    if not base._can_set_attn_implementation():
        return f"the attention of {type(base).__name__} does not go through transformers' AttentionInterface"
    if config._attn_implementation not in ("sdpa", ATTENTION):
        return f"its attention implementation is {config._attn_implementation}, not sdpa"
    if "position_ids" not in parameters or "kwargs" not in parameters:
        return f"the forward of {type(base.base_model).__name__} takes no position_ids or no further arguments"
    if isinstance(model, PeftModel) and model.active_peft_config.is_prompt_learning:
        return "the adapter puts virtual tokens before the prompt"
    if drops(base):
        return "the model has dropout, and a packed prompt would share one mask among its completions"
    return None


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Without gradient and without dropout, which would make any two computations differ."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _learns_positions(model: PreTrainedModel) -> bool:
    """Whether the model has an embedding table beside that of its tokens."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return any(table is not model.get_input_embeddings() for table in tables)


def drops(model: nn.Module) -> bool:
    """Whether a module drops activations: an `nn.Dropout` or the like, or a layer that holds its rate as a number.

    Transformers' attention layers call it `attention_dropout` or, as OPT's, `dropout`.
    """
    return any(
        isinstance(value, float) and value > 0 and "drop" in f"{type(module).__name__}.{name}".lower()
        for module in model.modules()
        for name, value in vars(module).items()
    )
