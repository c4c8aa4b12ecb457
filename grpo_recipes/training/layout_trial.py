"""Rows on which layouts are compared, and the state of a model during the comparison.

`layout_check.py` compares layouts twice: on rows of the first micro-batch, and on a few short rows in training mode,
with gradients. Here the rows are chosen (`sample`, `with_edges`), and the model is put into a state in which a wrong
layout shows: perturbed, in float32, with gradients of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_recipes.generation.models import base_model, in_mode, kept_scores, tensors_16bit
from grpo_recipes.generation.rows import Rows, on_device
from grpo_recipes.training.adapters import gathered
from grpo_recipes.training.layout_rules import attention_window, text_config
from grpo_recipes.training.packing import Layout, ModelCall

EXTRA_PADDING = 8
"""Columns of padding that the checks add on either side. The first micro-batch may have no padding of its own."""

COMPARED_ROWS = 4
"""Largest number of rows of the first micro-batch that are compared: two completions of each of two prompts."""

SAMPLE_TOKENS = 32
"""Number of tokens that the short rows keep of a prompt, and of a completion."""

CHUNK = 64
"""Number of tokens of a chunk in layers that scan a row, where the configuration does not state one."""

NOISE_AROUND_ZERO, NOISE_RELATIVE = 0.05, 0.1
"""Standard deviation of the perturbation of a tensor of zeros, and its share of any other value."""

LONGEST_SAMPLE = 1024
"""Largest number of tokens of a prompt, and of a completion, that are compared to leave a window or a chunk."""

COMPARED_WEIGHTS = 2**26
"""Number of weights whose gradients are compared, those of the smallest tensors. Every layer has some of them."""

Gradients = Sequence[Tensor | None]
"""Gradient of each compared parameter, None where the result does not depend on the parameter."""

Results = tuple[Tensor, Gradients]
"""Log-probabilities, (B, T), and gradients of a model call."""


@dataclass(frozen=True)
class Trial:
    """Rows on which layouts are compared, and the way in which a layout is computed on them."""

    rows: Rows
    model: nn.Module
    """Model that is called."""
    bare: nn.Module
    """The model inside accelerate's wrappers."""
    is_float32: bool
    where: str
    """Name of the rows in a message."""
    when: str = ""
    """Condition under which the results hold, for a message."""
    parameters: Sequence[nn.Parameter] = ()
    """Parameters whose gradients are compared."""
    in_columns: bool = True
    """True if the shared layout may keep TRL's columns where rows can't be trimmed."""

    def padded(self) -> ModelCall:
        """Return the call of TRL's layout with padding on either side, as far as the model has positions for it."""
        left = self.room_for_padding()
        wide = self.rows.widen(left, self.room_for_padding(left)) if left else self.rows
        return ModelCall(wide, Layout.PADDED)

    def room_for_padding(self, added: int = 0) -> int:
        """Return the number of columns, up to `EXTRA_PADDING`, for which positions remain after `added` columns."""
        longest = getattr(text_config(self.bare), "max_position_embeddings", None) or math.inf
        return int(max(0, min(EXTRA_PADDING, longest - self.rows.input_ids.size(1) - added)))

    def part(self, index: np.ndarray, expected: Results) -> tuple[Rows, Results]:
        """Return the rows at `index` and their expected results, with at least two completions of one prompt.

        A rank without such rows gets one row without labels, because it must make the call that the others make.
        """
        if len(index):
            some = self.rows.host.select(index)
            # A prompt with one completion is packed as an ordinary row, and a comparison of ordinary rows proves
            # nothing.
            if len(some.groups()) == len(index):
                index = np.append(index, index[some.labels.argmax()])
            rows = self.rows.select(index)
        else:
            index = np.zeros(1, dtype=np.int64)
            rows = self.rows.select(index).unlabelled()
        return rows, (expected[0][on_device(index, expected[0].device)], expected[1])


# ---- Rows to compare


def sample(rows: Rows, index: np.ndarray, longest: int | None = None) -> Rows:
    """Return two completions of each of two prompts, cut to `longest` tokens on either side if it is given.

    The prompts are those of the rows at `index` that have several completions and most tokens. A single completion is
    taken twice, so that its prompt is shared too. Without an index, the result is one row without labels.
    """
    prompt = rows.input_ids.size(1) - rows.logits_to_keep
    left = 0 if longest is None else max(prompt - longest, 0)
    width = rows.logits_to_keep if longest is None else min(rows.logits_to_keep, longest)
    if not len(index):
        return rows.select(slice(1), left, width).unlabelled()
    some = rows.host.select(index, left, width)
    lengths = some.mask.sum(1)

    def preference(group: list[int]) -> tuple[bool, int]:
        return len(group) > 1, int(lengths[group].sum())

    groups = sorted(some.groups().values(), key=preference, reverse=True)
    chosen: list[int] = []
    for group in groups[:2]:
        chosen += (group * 2)[:2]
    return rows.select(index[chosen], left, width)


def with_edges(rows: Rows, prompt: int, completion: int) -> Rows:
    """Return rows with the tokens of a few rows in them, in the lengths at which a cache may be wrong.

    Args:
        rows: rows as `sample` returns them, of which the first two share a prompt.
        prompt: number of tokens of the longest prompt.
        completion: number of tokens of the longest completion.

    Returns:
        The rows of `sample`, a prompt of one token, a completion of one token, and if they are shorter than the longest
        lengths, the first prompt repeated up to its length, with completions of that length and of half of it.
    """
    host = rows.host
    if not host.labels.all():
        return rows  # this rank has no label to compare
    prompts, completions = host.prompts(), host.completions()
    long = np.resize(prompts[0], prompt)
    made = [
        *zip(prompts, completions, strict=True),
        (prompts[0][-1:], completions[0]),
        (prompts[0], completions[0][:1]),
    ]
    if prompt + completion > len(prompts[0]) + len(completions[0]):
        made += [(long, np.resize(completions[0], size)) for size in (completion, max(completion // 2, 1))]
    # The padding of these rows, where they have any: some models find it by its ID.
    padding = int(host.ids[~host.mask][0]) if not host.mask.all() else int(host.ids[0, -1])
    before, device = host.prompt_mask.shape[1], rows.input_ids.device
    found = Rows.of_tokens([left.tolist() for left, _ in made], [right.tolist() for _, right in made], device)
    found = found.widen(max(0, before - found.input_ids.size(1) + found.logits_to_keep), 0)
    ids = found.input_ids.where(found.attention_mask.bool(), padding)
    return Rows(ids, found.attention_mask, found.logits_to_keep)


def sample_lengths(config: Any, rows: Rows, completion_tokens: int) -> tuple[int, int]:
    """Return the numbers of tokens of a prompt and a completion that leave the windows and chunks of a model.

    Args:
        config: configuration of the language model.
        rows: rows of a micro-batch.
        completion_tokens: number of tokens of the longest completion of the run.
    """
    prompt = completion = 1
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention", "chunked_attention"}:
        chunks = [getattr(config, name, None) for name in ("chunk_size", "mamba_chunk_size")]
        chunk = max([CHUNK, *(size for size in chunks if isinstance(size, int))])
        prompt = completion = min(chunk, LONGEST_SAMPLE) + EXTRA_PADDING
    widest = rows.input_ids.size(1) - rows.logits_to_keep + completion_tokens
    window = attention_window(config) or getattr(config, "attention_chunk_size", None)
    if window is not None and window < widest:
        prompt = max(prompt, min(window, LONGEST_SAMPLE) + EXTRA_PADDING)
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    room = min(positions, kept_scores(config)[1]) - 2 * EXTRA_PADDING
    if prompt + completion > room:
        prompt = completion = max(int(room // 2), 0)
    return prompt, completion


# ---- State of a model during the comparison


@contextmanager
def perturbed(model: nn.Module) -> Iterator[None]:
    """Add noise to each trainable tensor that holds one value, and restore its bits afterwards."""
    saved: list[tuple[nn.Parameter, Tensor]] = []
    # A fixed generator of its own: all ranks must hold the same weights, and the run's random state must not change.
    generator = torch.Generator().manual_seed(0)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(hasattr(parameter, "ds_id") for parameter in parameters) and not isinstance(model, PeftModel):
        parameters = []  # gathering each weight of a full model would take longer than a step
    try:
        for parameter in parameters:
            with gathered([parameter], write=True):
                values = _local(parameter)
                if not _holds_one_value(values):
                    continue
                saved.append((parameter, values.clone()))
                value = abs(float(values.flatten()[0]))
                size = NOISE_RELATIVE * value if value else NOISE_AROUND_ZERO
                values.add_((size * torch.randn(values.shape, generator=generator)).to(values))
        yield
    finally:
        # Copied back, and not subtracted: subtraction would leave rounding errors.
        for parameter, before in saved:
            with gathered([parameter], write=True):
                _local(parameter).copy_(before)


def _local(parameter: nn.Parameter) -> Tensor:
    """Return this rank's values of a parameter, outside autograd."""
    return parameter.to_local().data if isinstance(parameter, DTensor) else parameter.data


def _holds_one_value(values: Tensor) -> bool:
    """Return True if all entries of a tensor are equal."""
    if not values.numel() or not values.is_floating_point():
        return False
    first = values.flatten()[:1]
    # The first entries of most tensors already differ, and then the others are not read.
    return bool((values.flatten()[:64] == first).all()) and bool((values == first).all())


def fits_in_float32(model: nn.Module, device: torch.device) -> bool:
    """Return True if there is memory for float32 copies of the 16-bit weights, and a quarter more for short rows."""
    if getattr(base_model(model), "is_quantized", False):
        return False
    needed = 4 * sum(tensor.numel() for tensor in tensors_16bit(model))
    if not needed:
        return True
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        # torch's cache counts as used, although it can be given out again.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = psutil.virtual_memory().available
    return needed * 1.25 <= free


@contextmanager
def in_training(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put the model into training mode, and restore modes, buffers and the random state afterwards."""
    # Some models change buffers in training mode, such as the load statistics of a router.
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with in_mode(model, training=True), torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for buffer, values in buffers:
            if not torch.equal(buffer, values):
                buffer.copy_(values)


def random_state(device: torch.device) -> Tensor:
    """Return the state of the generator that a model on `device` draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def compared(model: nn.Module) -> list[nn.Parameter]:
    """Return the trainable parameters whose gradients are compared, the smallest first, if possible at least one."""
    trainable = sorted((parameter for parameter in model.parameters() if parameter.requires_grad), key=Tensor.numel)
    found, weights = trainable[:1], 0
    for parameter in trainable[1:]:
        weights += parameter.numel()
        if weights > COMPARED_WEIGHTS:
            break
        found.append(parameter)
    return found


def gradients(log_probs: Tensor, parameters: Sequence[nn.Parameter], *, reentrant: bool = False) -> Gradients:
    """Return the gradients of a fixed random combination of `log_probs`, (B, T).

    Args:
        log_probs: (B, T).
        parameters: parameters whose gradients are returned.
        reentrant: True if `log_probs` was computed with reentrant checkpointing, which computes all gradients or none.
    """
    if not parameters or not log_probs.requires_grad:
        return [None] * len(parameters)
    # Random weights, because errors of single tokens could cancel in the gradient of a sum.
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(log_probs.shape, generator=generator).to(log_probs)
    total = (log_probs * weights).sum()
    if not reentrant:
        return torch.autograd.grad(total, parameters, allow_unused=True)
    total.backward()
    return [parameter.grad for parameter in parameters]


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Take the gradients from a model's parameters inside this block, and give them back afterwards."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
