"""Which rows meet in which micro-batch, and which need not run at all, with the gradient unchanged.

TRL shuffles the rows of a generation batch, cuts them into micro-batches, and pads all of them to the longest row of the
generation batch. `regroup` deals the rows out again inside each window of micro-batches that always falls into one
optimiser step, so that rows of one prompt (packed) or of one length (trimmed) meet; it empties rows that cannot contribute,
and cuts the padding that is left. Every micro-batch keeps its number of rows, so that TRL's means over rows keep their
divisor and all ranks stay alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from grpo_recipes.recipe.specs import MicroBatching
from grpo_recipes.training.packing import Layout, Rows, extent, order

IDLE = "no_row_contributes"
"""Set to True in a micro-batch in which no rank has a row that contributes."""

# A row that is emptied must leave ratios of 1 behind: TRL has zeros there for masked tokens, and 0 * inf is NaN.
_LOG_PROBS = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")

_MULTIMODAL = {"pixel_values", "num_images", "token_type_ids", "mm_token_type_ids"}

MicroBatch = dict[str, Any]


class Divisor(Enum):
    """What TRL divides the sum of a micro-batch's token losses by."""

    GENERATION = "active tokens of the generation batch"
    ROWS = "rows of the micro-batch"
    TOKENS = "active tokens of the micro-batch"


DIVISORS: dict[str, Divisor] = {
    "dapo": Divisor.GENERATION,
    "cispo": Divisor.GENERATION,
    "vespo": Divisor.GENERATION,
    "grpo": Divisor.ROWS,
    "sapo": Divisor.ROWS,
    "luspo": Divisor.ROWS,
    "dr_grpo": Divisor.ROWS,
    "bnpo": Divisor.TOKENS,
}
"""TRL's loss types. Trimming and packing are exact for each; `exactness` says what else is."""


@dataclass(frozen=True)
class Exactness:
    """What leaves the gradient of an optimiser step unchanged."""

    regroup: bool
    """Rows may change their micro-batch inside a window."""
    skip: bool
    """Rows of advantage zero may leave forward and backward."""
    rescale: bool = False
    """Advantages then carry the change of the divisor: they are multiplied by new / original."""


def exactness(
    loss_type: str,
    beta: float,
    *,
    entropy_bonus: bool = False,
    entropy_quantile: float = 1.0,
    router_loss: bool = False,
) -> Exactness:
    """What may be done to the micro-batches of this loss.

    The divisor of `grpo`, `sapo`, `luspo` and `dr_grpo` is kept because rows are emptied and not removed; that of `bnpo`
    changes, and the advantages carry the change, which the KL term could not.
    """
    if entropy_bonus or entropy_quantile < 1.0 or router_loss:  # each is a statistic of its micro-batch
        return Exactness(False, False)
    divisor = DIVISORS.get(loss_type)
    if divisor is None:
        return Exactness(False, False)
    if divisor is Divisor.TOKENS:
        return Exactness(beta == 0.0, beta == 0.0, rescale=beta == 0.0)
    return Exactness(True, skip=beta == 0.0)  # with a beta, every row has a KL term


def asked_layout(asked: MicroBatching) -> Layout:
    """The most that model calls may be laid out as."""
    return Layout.PACKED if asked.pack else Layout.TRIMMED if asked.trim else Layout.PLAIN


@dataclass(frozen=True)
class Efficiency:
    """Tokens and rows of one generation batch's training passes, one forward each."""

    computed: int
    """Tokens that run through the model."""
    needed: int
    """Tokens without any padding, of rows that contribute; when packing, each prompt once per window."""
    padded: int
    """Tokens of TRL's own micro-batches."""
    rows: int
    skipped: int
    """Rows that do not contribute."""

    @property
    def padding(self) -> float:
        """The share of the computed tokens that nobody needs, in [0, 1]."""
        return max(0.0, 1.0 - self.needed / self.computed) if self.computed else 0.0

    def __add__(self, other: Efficiency) -> Efficiency:
        """Of two generation batches together."""
        return Efficiency(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def metrics(self) -> dict[str, float]:
        """As logged, by name."""
        names = {
            "tokens_computed": self.computed,
            "tokens_needed": self.needed,
            "padding": self.padding,
            "rows_skipped": self.skipped,
        }
        return {f"efficiency/{name}": float(value) for name, value in names.items()}

    def __str__(self) -> str:
        return (
            f"{self.computed:,} tokens computed ({self.padded:,} in TRL's micro-batches), {self.needed:,} needed, "
            f"{self.padding:.1%} padding, {self.skipped} of {self.rows} rows skipped"
        )


def window_size(steps_per_generation: int, gradient_accumulation_steps: int) -> int:
    """How many consecutive micro-batches of a generation batch always belong to one optimiser step.

    An optimiser step ends after a multiple of `gradient_accumulation_steps` micro-batches of an epoch, which holds whole
    generation batches; modulo `steps_per_generation` those ends fall on multiples of the greatest common divisor.
    """
    return math.gcd(steps_per_generation, gradient_accumulation_steps)


def regroup(
    buffer: Sequence[MicroBatch], window: int, layout: Layout, exact: Exactness, skip: bool = True
) -> list[MicroBatch]:
    """Deal the rows of a generation batch out again, inside windows of `window` micro-batches.

    `buffer` holds TRL's micro-batches, each a mapping with the same keys: tensors of (B, ...) or lists of B, which follow
    their rows, and scalars. Returns as many micro-batches of B rows each, trimmed; nothing is changed in `layout` PLAIN.
    """
    if layout is Layout.PLAIN or not all(map(_is_rectangular, buffer)):
        return list(buffer)
    step = window if exact.regroup else 1
    result = []
    for start in range(0, len(buffer), step):
        result += _deal(buffer[start : start + step], layout, exact, skip)
    return result


def _deal(batches: Sequence[MicroBatch], layout: Layout, exact: Exactness, skip: bool) -> list[MicroBatch]:
    """Regroup the rows of one window."""
    merged = _merge(batches)
    tokens = torch.cat([loss_mask(batch).sum().expand(_size(batch)) for batch in batches])
    idle = ~contributes(merged) if skip and exact.skip else torch.zeros_like(tokens, dtype=torch.bool)
    emptied = _emptied(merged, idle)
    sequence = torch.arange(len(idle), device=idle.device)
    if exact.regroup:  # idle rows stay with their prompt when packing: a group as large as a micro-batch is never split
        sequence = order(as_rows(merged if layout is Layout.PACKED else emptied), layout)
    dealt = [_take(emptied, rows) for rows in sequence.split(_size(batches[0]))]
    if exact.rescale:
        for batch, before in zip(dealt, tokens[sequence].split(_size(batches[0])), strict=True):
            scale = loss_mask(batch).sum() / before.clamp(min=1)
            advantages = batch["advantages"]
            batch["advantages"] = advantages * scale.reshape(-1, *[1] * (advantages.ndim - 1))
    return [_trimmed(batch) for batch in dealt]


def loss_mask(batch: MicroBatch) -> Tensor:
    """The tokens that the loss is taken over, (B, T)."""
    return batch["completion_mask"] * batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]


def contributes(batch: MicroBatch) -> Tensor:
    """Which rows have a policy gradient: an advantage other than zero and a token that counts, (B,)."""
    return batch["advantages"].reshape(_size(batch), -1).any(1) & loss_mask(batch).any(1)


def as_rows(batch: MicroBatch) -> Rows:
    """The rows that a micro-batch gives to the model."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return Rows(ids, mask, batch["completion_ids"].size(1))


def count(
    padded: Sequence[MicroBatch], ours: Sequence[MicroBatch], tokens: Sequence[int], window: int, layout: Layout
) -> Tensor:
    """What `Efficiency` and `mark_idle` need from one rank, to be summed over ranks, (5 + micro-batches,).

    `tokens` holds what the model calls for `ours` compute.
    """
    needed = sum(needed_tokens(ours[start : start + window], layout) for start in range(0, len(ours), window))
    labelled = [int(batch["completion_mask"].any(1).sum()) for batch in ours]
    rows = sum(map(_size, ours))
    skipped = 0 if layout is Layout.PLAIN else rows - sum(labelled)
    rectangle = sum(as_rows(batch).input_ids.numel() for batch in padded)
    return torch.tensor([sum(tokens), needed, rectangle, rows, skipped, *labelled])


def mark_idle(ours: Sequence[MicroBatch], totals: Tensor) -> Efficiency:
    """Mark with `IDLE` the micro-batches that are empty on all ranks, given the summed `count`; returns the totals."""
    computed, needed, rectangle, rows, skipped, *labelled = totals.tolist()
    for batch, number in zip(ours, labelled, strict=True):
        if not number:
            batch[IDLE] = True
    return Efficiency(computed, needed, rectangle, rows, skipped)


def needed_tokens(batches: Sequence[MicroBatch], layout: Layout) -> int:
    """Tokens of the rows that have a label, without padding; in layout PACKED each prompt once over all `batches`."""
    rows = [as_rows(batch) for batch in batches]
    if layout is not Layout.PACKED:
        return sum(int(part.attention_mask[part.completion_mask.any(1)].sum()) for part in rows)
    prompts: dict[bytes, int] = {}
    for part in rows:
        for prompt, length in zip(part.prompts(), part.completion_mask.any(1).tolist(), strict=True):
            if length:
                prompts[prompt.tobytes()] = len(prompt) - 1
    return sum(prompts.values()) + sum(int(part.completion_mask.sum()) for part in rows)


def _size(batch: MicroBatch) -> int:
    return len(batch["completion_ids"])


def _is_rectangular(batch: MicroBatch) -> bool:
    """Whether every value belongs to the rows one by one, as it does without images."""
    if _MULTIMODAL & batch.keys():
        return False
    sequences = [v for v in batch.values() if isinstance(v, list) or (isinstance(v, Tensor) and v.ndim > 0)]
    return all(len(value) == _size(batch) for value in sequences)


def _merge(batches: Sequence[MicroBatch]) -> MicroBatch:
    """One batch of all rows. All batches are padded alike, being cut from one."""

    def join(values: list[Any]) -> Any:
        if isinstance(values[0], list):
            return [entry for value in values for entry in value]
        return torch.cat(values) if isinstance(values[0], Tensor) and values[0].ndim > 0 else values[0]

    return {key: join([batch[key] for batch in batches]) for key in batches[0]}


def _take(batch: MicroBatch, rows: Tensor) -> MicroBatch:
    def pick(value: Any) -> Any:
        if isinstance(value, list):
            return [value[row] for row in rows.tolist()]
        return value[rows] if isinstance(value, Tensor) and value.ndim > 0 else value

    return {key: pick(value) for key, value in batch.items()}


def _emptied(batch: MicroBatch, idle: Tensor) -> MicroBatch:
    """Mask out the completions of idle rows and all but the last token of their prompts."""
    if not idle.any():
        return batch
    dead = idle[:, None]
    prompts = batch["prompt_mask"].masked_fill(dead, 0)
    prompts[:, -1] = batch["prompt_mask"][:, -1]
    masks = {"prompt_mask": prompts, "completion_mask": batch["completion_mask"].masked_fill(dead, 0)}
    log_probs = {key: batch[key].masked_fill(dead, 0.0) for key in _LOG_PROBS if batch.get(key) is not None}
    return {**batch, **masks, **log_probs}


def _trimmed(batch: MicroBatch) -> MicroBatch:
    """Cut the columns that no row of the micro-batch uses.

    Two stay, where there are two: TRL takes values of (B, 1) for one per sequence, and its metrics would forget the mask.
    """
    left, width = extent(batch["prompt_mask"], batch["completion_mask"])
    full = batch["completion_ids"].size(1)
    width = max(width, min(2, full))
    cut = dict(batch)
    for key, value in batch.items():
        if key in ("prompt_ids", "prompt_mask"):
            cut[key] = value[:, left:]
        elif isinstance(value, Tensor) and value.ndim > 1 and value.size(1) == full:
            cut[key] = value[:, :width]
    return cut
