"""Assignment of rows to micro-batches, and skipping of rows, with the gradient of each optimizer step unchanged.

TRL shuffles the rows of a generation batch, cuts them into micro-batches, and pads every row to the longest row of the
generation batch. `regroup` moves rows within windows of micro-batches that always belong to one optimizer step, so that
rows of one prompt (packed, shared) or of similar length (trimmed) share a micro-batch. It masks out zero-advantage rows
and cuts the padding that is left. Every micro-batch keeps its number of rows: TRL's means over rows keep their divisor,
and every rank makes the same model calls.

Shapes: B rows of a micro-batch, R rows of a window, P prompt columns, T completion columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from grpo_recipes.generation.rows import HostRows, Rows, on_device
from grpo_recipes.recipe.losses import LOSS_TYPES
from grpo_recipes.recipe.specs import MicroBatching
from grpo_recipes.training.packing import Layout, order

if TYPE_CHECKING:
    from grpo_recipes.generation.models import TRLTrainer

# Values that are set to 0 in a masked row. TRL's new log-probabilities are 0 there, so the ratio is exp(0 - 0) = 1. Any
# other value could give an infinite ratio, and 0 * inf is NaN. The reference's log-probabilities are not listed,
# because rows are masked only where the loss has no KL term.
_LOG_PROBS = ("old_per_token_logps", "sampling_per_token_logps")

_MULTIMODAL = {"pixel_values", "num_images", "token_type_ids", "mm_token_type_ids"}

MicroBatch = dict[str, Any]
"""TRL's inputs of one model call: tensors (B, ...), lists of length B, and scalars, by name."""


@dataclass(frozen=True)
class Exactness:
    """Changes of micro-batches that leave the gradient of an optimizer step as it is."""

    regroup: bool
    """True if rows may move to another micro-batch of the window."""
    skip: bool
    """True if zero-advantage rows may leave forward and backward."""
    rescale: bool = False
    """True if advantages must be multiplied by (new divisor) / (old divisor)."""


def exactness(trainer: TRLTrainer, micro_batching: MicroBatching) -> Exactness:
    """Return the changes of micro-batches that are exact for a trainer's loss, with skipped rows as its user allows.

    Trimming and packing are exact for every loss.
    """
    loss = LOSS_TYPES.get(trainer.loss_type)
    # These three are statistics of one micro-batch, so the gradient depends on which rows share it.
    statistics = trainer._entropy_bonus_enabled or trainer.top_entropy_quantile < 1.0 or trainer.aux_loss_enabled
    if loss is None or statistics:
        return Exactness(False, False)
    without_kl = trainer.beta == 0.0  # a zero-advantage row still has a KL term
    skip = without_kl and micro_batching.skip_zero_advantage
    if loss.counts_other_rows:
        # The divisor is the number of tokens of the micro-batch (`bnpo`). Advantages can carry its change, because the
        # policy loss is linear in them. A KL term has no factor of its own per row.
        return Exactness(without_kl, skip, rescale=without_kl)
    return Exactness(True, skip)


def asked_layout(micro_batching: MicroBatching) -> Layout:
    """Return the most compact layout that a recipe allows."""
    return Layout[micro_batching.layout.upper()]


def window_size(steps_per_generation: int, gradient_accumulation_steps: int) -> int:
    """Return the number of consecutive micro-batches of a generation batch that always belong to one optimizer step.

    An optimizer step ends after a multiple of `gradient_accumulation_steps` micro-batches of an epoch, and an epoch
    holds complete generation batches. Modulo `steps_per_generation`, those ends are multiples of the greatest common
    divisor.
    """
    return math.gcd(steps_per_generation, gradient_accumulation_steps)


def regroup(
    buffer: Sequence[MicroBatch], window: int, layout: Layout, exact: Exactness
) -> list[tuple[MicroBatch, HostRows]]:
    """Redistribute the rows of a generation batch within windows of micro-batches.

    Args:
        buffer: TRL's micro-batches, all with the same keys. Tensors (B, ...) and lists of length B move with their
            rows.
        window: number of micro-batches per window.
        layout: layout of the model calls.
        exact: changes to make, which leave the gradient as it is.

    Returns:
        As many micro-batches of B rows each, trimmed, and their rows in the host's memory. TRL's micro-batches in the
        padded layout and with images.
    """
    host, contributing = _on_host(buffer)
    size = len(buffer[0]["completion_ids"])
    parts = [slice(start, start + size) for start in range(0, len(host.ids), size)]
    if layout is Layout.PADDED or not all(map(_has_one_entry_per_row, buffer)):
        return [(batch, host.select(part)) for batch, part in zip(buffer, parts, strict=True)]
    merged, unmasked = _merge(buffer), host
    # Tokens that TRL's divisor counted in the micro-batch that each row was in, (rows,).
    tokens = torch.cat([loss_mask(batch).sum().expand(size) for batch in buffer])
    skipped = ~contributing & exact.skip
    if skipped.any():
        merged, host = _mask_out(merged, on_device(skipped, tokens.device)), host.without_labels(skipped)
    sequence = np.arange(len(skipped))
    if exact.regroup:
        # Rows with shared prompts are ordered before masking: a skipped row then keeps its place beside its prompt, and
        # a group as large as a micro-batch is never split over two. Trimmed rows are ordered after masking: skipped
        # rows have length 0, and gather in micro-batches that cost next to nothing.
        ordered = unmasked if layout.shares_prompts else host
        for start in range(0, len(sequence), window * size):
            rows = slice(start, start + window * size)
            sequence[rows] = start + order(ordered.select(rows), layout)
    places = on_device(sequence, tokens.device)
    regrouped = []
    for part in parts:
        batch = _take(merged, sequence[part], places[part])
        if exact.rescale:
            # TRL divides a row by the tokens of its micro-batch. The factor (new / old tokens) restores the row's
            # weight.
            scale = loss_mask(batch).sum() / tokens[places[part]].clamp(min=1)
            advantages = batch["advantages"]  # (B,) or (B, T)
            batch["advantages"] = advantages * scale.reshape(-1, *[1] * (advantages.ndim - 1))
        regrouped.append(_trimmed(batch, host.select(sequence[part]), columns_kept=layout is Layout.SHARED_PADDED))
    return regrouped


def _on_host(buffer: Sequence[MicroBatch]) -> tuple[HostRows, np.ndarray]:
    """Copy a generation batch to the host once. Return its rows, and which of them contribute, (rows,) bool."""
    found = []
    for batch in buffer:
        rows = as_rows(batch)
        found.append(torch.cat([rows.input_ids, rows.attention_mask, contributes(batch)[:, None]], dim=1))
    copied, width = torch.cat(found).cpu().numpy(), (found[0].size(1) - 1) // 2
    host = HostRows(copied[:, :width], copied[:, width:-1] != 0, buffer[0]["completion_ids"].size(1))
    return host, copied[:, -1] != 0


def loss_mask(batch: MicroBatch) -> Tensor:
    """Return the mask of the tokens in the loss, (B, T)."""
    return batch["completion_mask"] * batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]


def contributes(batch: MicroBatch) -> Tensor:
    """Return True for each row with a policy gradient, (B,): a nonzero advantage and a token in the loss."""
    return batch["advantages"].reshape(len(batch["advantages"]), -1).any(1) & loss_mask(batch).any(1)


def as_rows(batch: MicroBatch) -> Rows:
    """Return the rows of the model call for a micro-batch."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return Rows(ids, mask, batch["completion_ids"].size(1))


def _is_per_row(value: object) -> bool:
    """Return True for a list or a tensor with rows, and False for a scalar."""
    return isinstance(value, list) or (isinstance(value, Tensor) and value.ndim > 0)


def _has_one_entry_per_row(batch: MicroBatch) -> bool:
    """Return True if every value has one entry per row. With images, TRL holds one entry per image patch."""
    if _MULTIMODAL & batch.keys():
        return False
    return all(len(value) == len(batch["completion_ids"]) for value in batch.values() if _is_per_row(value))


def _merge(batches: Sequence[MicroBatch]) -> MicroBatch:
    """Return one batch of all rows. TRL cut the batches from one, so their widths are equal."""
    merged = dict(batches[0])
    for key, first in batches[0].items():
        if _is_per_row(first):
            parts = [batch[key] for batch in batches]
            merged[key] = torch.cat(parts) if isinstance(first, Tensor) else [*chain.from_iterable(parts)]
    return merged


def _take(batch: MicroBatch, rows: np.ndarray, places: Tensor) -> MicroBatch:
    """Return the given rows of a batch, in the given order. `places` holds the same numbers on the device."""
    taken = dict(batch)
    for key, value in batch.items():
        if _is_per_row(value):
            taken[key] = value[places] if isinstance(value, Tensor) else [value[row] for row in rows]
    return taken


def _mask_out(batch: MicroBatch, skipped: Tensor) -> MicroBatch:
    """Return the batch with skipped rows, (B,) bool, masked out but for the last prompt token.

    A row that is masked out completely would attend to nothing, and a softmax over no keys is NaN.
    """
    column = skipped[:, None]  # (B, 1)
    masked = dict(batch)
    masked["prompt_mask"] = batch["prompt_mask"].masked_fill(column, 0)
    masked["prompt_mask"][:, -1] = batch["prompt_mask"][:, -1]
    masked["completion_mask"] = batch["completion_mask"].masked_fill(column, 0)
    for key in _LOG_PROBS:
        if batch.get(key) is not None:
            masked[key] = batch[key].masked_fill(column, 0.0)
    return masked


def _trimmed(batch: MicroBatch, host: HostRows, columns_kept: bool) -> tuple[MicroBatch, HostRows]:
    """Return a micro-batch and its rows in the host's memory without the columns that no row uses.

    Args:
        batch: micro-batch.
        host: its rows.
        columns_kept: True to keep all prompt columns, by which some models count positions.
    """
    left, width = host.extent()
    if columns_kept:
        left = 0
    full = batch["completion_ids"].size(1)
    # Two columns at least: TRL takes a value of (B, 1) for one per sequence, and would not mask it in its metrics.
    width = max(width, min(2, full))
    cut = dict(batch)
    for key, value in batch.items():
        if key in ("prompt_ids", "prompt_mask"):
            cut[key] = value[:, left:]
        elif isinstance(value, Tensor) and value.ndim > 1 and value.size(1) == full:
            cut[key] = value[:, :width]
    return cut, host.select(slice(None), left, width)
