"""`torch.nn.attention.varlen.varlen_attn` on a CPU, by its documentation, as three versions of torch have it.

It shows which sequences, masks and heads the kernel is asked for, and what its graph stores: query, key, value, output
and the ends of the sequences, as FlashAttention does. It shows nothing about the kernel's own rounding and limits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_recipes.training import varlen


def formula(
    query: Tensor, key: Tensor, value: Tensor, ends: tuple[Tensor, Tensor], scale: float | None, window: tuple[int, int]
) -> Tensor:
    """Return attention by its formula, (queries, heads, D), one sequence at a time.

    Queries are aligned with the end of the keys, as in FlashAttention: query i of n is at key i + (keys - n).
    """
    heads = query.shape[1] // key.shape[1]
    outputs = []
    for (a, b), (c, d) in zip(*(x.unfold(0, 2, 1).tolist() for x in ends), strict=True):
        keys, values = (x[c:d].repeat_interleave(heads, dim=1).float() for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[a:b].float(), keys)
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        # Distance of each key behind each query.
        behind = torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)
        left, right = window
        seen = torch.ones_like(behind).bool()
        if left >= 0:
            seen &= behind <= left
        if right >= 0:
            seen &= behind >= -right
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs).to(query.dtype)


class Attention(torch.autograd.Function):
    """The formula, which stores what the kernel's graph stores."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        """Return the formula's output."""
        output = formula(query, key, value, *rest)
        ctx.save_for_backward(query, key, value, output, *rest[0])
        ctx.rest = rest
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the formula's gradients."""
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors[:3]]
        with torch.enable_grad():
            output = formula(*inputs, *ctx.rest)
        return *torch.autograd.grad(output, inputs, gradients[0]), None, None, None


def checked(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int
) -> tuple[Tensor, Tensor]:
    """Return the ends of the sequences, of which the arguments must be a description."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert cu_seq_q[-1] == len(query)
    assert cu_seq_k[-1] == len(key) == len(value)
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    return cu_seq_q, cu_seq_k


def torch_2_10(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    return_aux: Any = None,
) -> Tensor:
    """Compute attention with the arguments of torch 2.10, which takes equally many heads only."""
    ends = checked(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    if query.shape[1] != key.shape[1]:
        raise RuntimeError("Number of heads must be equal")
    return Attention.apply(query, key, value, ends, None, (-1, 0 if is_causal else -1))


def torch_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Compute attention with the arguments of torch 2.11, whose kernel takes grouped heads without an argument."""
    ends = checked(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    return Attention.apply(query, key, value, ends, scale, window_size)


def torch_2_12(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention with the arguments of torch 2.12."""
    ends = checked(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    if (query.shape[1] != key.shape[1]) and not enable_gqa:
        raise ValueError("Expect query and key/value to have the same number of heads")
    return Attention.apply(query, key, value, ends, scale, window_size)


VERSIONS: dict[str, Callable[..., Tensor]] = {"2.10": torch_2_10, "2.11": torch_2_11, "2.12": torch_2_12}


def install(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Tensor]) -> None:
    """Make a kernel that of the installed torch, and let it have the tensors of a CPU."""
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(varlen, "is_candidate", lambda query: True)
