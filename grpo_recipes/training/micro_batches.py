"""Which rows run together in a micro-batch, and which need not run at all, with the gradient unchanged.

TRL shuffles the rows of a generation batch, cuts them into micro-batches, and pads all of them to the longest row of the
generation batch. `regroup` redistributes the rows inside each window of micro-batches that always belongs to one optimiser
step, so that rows of one prompt (packed) or of one length (trimmed) come together; it empties rows that cannot contribute,
and cuts the padding that is left. Every micro-batch keeps its number of rows, so that TRL's means over rows keep their
divisor and every rank makes the same calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_recipes.recipe.losses import LOSS_TYPES
from grpo_recipes.recipe.specs import MicroBatching
from grpo_recipes.training.packing import Layout, Rows, extent, order

IDLE = "no_row_contributes"
"""Set to True in a micro-batch in which no rank has a row that contributes."""

# Set to 0 in an emptied row, where TRL's new log-probabilities are 0: the ratio must be 1 there, because 0 * inf is NaN.
# No reference's are among them: rows are emptied only where the loss has no KL term.
_LOG_PROBS = ("old_per_token_logps", "sampling_per_token_logps")

_MULTIMODAL = {"pixel_values", "num_images", "token_type_ids", "mm_token_type_ids"}

MicroBatch = dict[str, Any]


@dataclass(frozen=True)
class Exactness:
    """Which changes leave the gradient of an optimiser step as it was."""

    regroup: bool
    """Rows may move to another micro-batch of the window."""
    skip: bool
    """Rows of advantage zero may be left out of forward and backward."""
    rescale: bool = False
    """If so, advantages are multiplied by new / old divisor."""


def exactness(
    loss_type: str,
    beta: float,
    *,
    entropy_bonus: bool = False,
    entropy_quantile: float = 1.0,
    router_loss: bool = False,
) -> Exactness:
    """What may be done to the micro-batches of this loss. Trimming and packing are exact for every loss type of TRL.

    Rows are emptied and not removed, so that a divisor that counts rows is kept. The divisor of `bnpo` changes with its
    tokens; advantages can carry that change, and a KL term could not.
    """
    loss = LOSS_TYPES.get(loss_type)
    statistic_of_a_micro_batch = entropy_bonus or entropy_quantile < 1.0 or router_loss
    if loss is None or statistic_of_a_micro_batch:
        return Exactness(False, False)
    without_kl = beta == 0.0  # with a beta, every row has a KL term
    if loss.counts_other_rows:
        return Exactness(without_kl, without_kl, rescale=without_kl)
    return Exactness(True, skip=without_kl)


def asked_layout(asked: MicroBatching) -> Layout:
    """Return the most compact layout that a recipe allows."""
    return Layout[asked.layout.upper()]


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
        """The share of the computed tokens that was not needed, in [0, 1]."""
        return max(0.0, 1.0 - self.needed / self.computed) if self.computed else 0.0

    def __add__(self, other: Efficiency) -> Efficiency:
        """The totals of two generation batches."""
        return Efficiency(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def metrics(self) -> dict[str, float]:
        """The logged metrics, by name."""
        names = ("tokens_computed", "tokens_needed", "padding", "rows_skipped")
        values = (self.computed, self.needed, self.padding, self.skipped)
        return {f"efficiency/{name}": float(value) for name, value in zip(names, values, strict=True)}

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
    """Redistribute the rows of a generation batch, inside windows of `window` micro-batches.

    `buffer` holds TRL's micro-batches, each a mapping with the same keys: tensors of (B, ...) or lists of B, which move
    with their rows, and scalars. Returns as many micro-batches of B rows each, trimmed; in `layout` PLAIN they are TRL's.
    """
    if layout is Layout.PADDED or not all(map(_is_rectangular, buffer)):
        return list(buffer)
    step = window if exact.regroup else 1
    result = []
    for start in range(0, len(buffer), step):
        result += _regroup_window(buffer[start : start + step], layout, exact, skip)
    return result


def _regroup_window(batches: Sequence[MicroBatch], layout: Layout, exact: Exactness, skip: bool) -> list[MicroBatch]:
    """Regroup the R rows of one window."""
    size = _size(batches[0])
    merged = _merge(batches)
    # For each row, (R,): the tokens that TRL's divisor counted in the micro-batch that the row was in.
    tokens = torch.cat([loss_mask(batch).sum().expand(_size(batch)) for batch in batches])
    idle = ~contributes(merged) if skip and exact.skip else torch.zeros_like(tokens, dtype=torch.bool)
    emptied = _emptied(merged, idle)
    sequence = torch.arange(len(idle), device=idle.device)
    if exact.regroup:
        # Packed, idle rows keep their place beside their prompt, so that a group as large as a micro-batch is never split.
        # Trimmed, they have length 0 and gather in micro-batches that cost next to nothing.
        sequence = order(as_rows(merged if layout is Layout.PACKED else emptied), layout)
    regrouped = [_take(emptied, rows) for rows in sequence.split(size)]
    if exact.rescale:
        # TRL will divide a row by the tokens of its new micro-batch: new / old restores the weight that it had.
        for batch, before in zip(regrouped, tokens[sequence].split(size), strict=True):
            scale = loss_mask(batch).sum() / before.clamp(min=1)
            advantages = batch["advantages"]  # (B,) or (B, T)
            batch["advantages"] = advantages * scale.reshape(-1, *[1] * (advantages.ndim - 1))
    return [_trimmed(batch) for batch in regrouped]


def loss_mask(batch: MicroBatch) -> Tensor:
    """The tokens that the loss is taken over, (B, T)."""
    return batch["completion_mask"] * batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]


def contributes(batch: MicroBatch) -> Tensor:
    """Which rows have a policy gradient, (B,): an advantage other than zero and a token in the loss."""
    return batch["advantages"].reshape(_size(batch), -1).any(1) & loss_mask(batch).any(1)


def as_rows(batch: MicroBatch) -> Rows:
    """A micro-batch as the rows of a model call."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    return Rows(ids, mask, batch["completion_ids"].size(1))


def count(
    padded: Sequence[MicroBatch], ours: Sequence[MicroBatch], tokens: Sequence[int], window: int, layout: Layout
) -> Tensor:
    """One rank's counts for `mark_idle`, to be summed over ranks, (5 + micro-batches,).

    `tokens` holds the number of tokens that each model call for `ours` computes.
    """
    needed = sum(needed_tokens(ours[start : start + window], layout) for start in range(0, len(ours), window))
    labelled = [int(batch["completion_mask"].any(1).sum()) for batch in ours]
    rows = sum(map(_size, ours))
    skipped = 0 if layout is Layout.PADDED else rows - sum(labelled)
    rectangle = sum(as_rows(batch).input_ids.numel() for batch in padded)
    return torch.tensor([sum(tokens), needed, rectangle, rows, skipped, *labelled])


def mark_idle(ours: Sequence[MicroBatch], totals: Tensor) -> Efficiency:
    """Mark with `IDLE` the micro-batches that are empty on all ranks. `totals` is `count` summed over ranks."""
    computed, needed, rectangle, rows, skipped, *labelled = totals.tolist()
    for batch, number in zip(ours, labelled, strict=True):
        if not number:
            batch[IDLE] = True
    return Efficiency(computed, needed, rectangle, rows, skipped)


@contextmanager
def idle_unlogged(batch: MicroBatch, metrics: dict[str, list[float]]) -> Iterator[None]:
    """Keep a micro-batch in which no rank has a row that contributes out of the averages that TRL logs."""
    before = {name: len(values) for name, values in metrics.items()}
    yield
    if IDLE in batch:
        for name in list(metrics):
            del metrics[name][before.get(name, 0) :]
            if not metrics[name]:
                del metrics[name]


def needed_tokens(batches: Sequence[MicroBatch], layout: Layout) -> int:
    """Tokens of the rows that have a label, without padding; in layout PACKED each prompt counts once over all `batches`."""
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
    """Whether every value has one entry per row, as it has without images."""
    if _MULTIMODAL & batch.keys():
        return False
    sequences = [v for v in batch.values() if isinstance(v, list) or (isinstance(v, Tensor) and v.ndim > 0)]
    return all(len(value) == _size(batch) for value in sequences)


def _merge(batches: Sequence[MicroBatch]) -> MicroBatch:
    """One batch of all rows. TRL cuts the batches from one, so their widths are equal."""

    def join(values: list[Any]) -> Any:
        if isinstance(values[0], list):
            return [entry for value in values for entry in value]
        return torch.cat(values) if isinstance(values[0], Tensor) and values[0].ndim > 0 else values[0]

    return {key: join([batch[key] for batch in batches]) for key in batches[0]}


def _take(batch: MicroBatch, rows: Tensor) -> MicroBatch:
    """The given rows of a batch, in that order."""

    def pick(value: Any) -> Any:
        if isinstance(value, list):
            return [value[row] for row in rows.tolist()]
        return value[rows] if isinstance(value, Tensor) and value.ndim > 0 else value

    return {key: pick(value) for key, value in batch.items()}


def _emptied(batch: MicroBatch, idle: Tensor) -> MicroBatch:
    """Mask out the completions of idle rows and their prompts but for one token: a row with none would attend to nothing."""
    if not idle.any():
        return batch
    dead = idle[:, None]  # (B, 1)
    prompts = batch["prompt_mask"].masked_fill(dead, 0)
    prompts[:, -1] = batch["prompt_mask"][:, -1]
    masks = {"prompt_mask": prompts, "completion_mask": batch["completion_mask"].masked_fill(dead, 0)}
    log_probs = {key: batch[key].masked_fill(dead, 0.0) for key in _LOG_PROBS if batch.get(key) is not None}
    return {**batch, **masks, **log_probs}


def _trimmed(batch: MicroBatch) -> MicroBatch:
    """Cut the columns that no row of the micro-batch uses.

    At least two columns of completions stay, if there are two: TRL takes a value of (B, 1) for one per sequence, and would
    leave the mask out of its metrics.
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
