"""The call of `varlen_attn` for packed rows, with the kernel replaced by its documented formula on a CPU."""

from __future__ import annotations

import functools
import gc
import inspect
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo_recipes.training import varlen
from grpo_recipes.training.packed_attention import GroupSpans, sdpa
from grpo_recipes.training.packing import Layout
from grpo_recipes.training.varlen import KernelSegments, VarlenKernel
from tests.support.layouts import RAGGED, check_exact, flat, layout_of, one_by_one, trainer_on
from tests.support.recorded import model
from tests.support.varlen_kernel import VERSIONS, install, torch_2_11, torch_2_12

GROUPS = [((0, 6), [(6, 8), (8, 14), (14, 23)]), ((23, 23), [(23, 25)]), ((25, 26), [(26, 27), (27, 31)])]
"""Suffixes shorter and longer than their prefix, and an empty prefix."""
LENGTH = 31


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Tensor]], None]:
    """Return a function that makes a kernel the installed one."""
    return functools.partial(install, monkeypatch)


def row(
    dtype: torch.dtype = torch.float32, heads: int = 4, key_heads: int = 2, size: int = 8
) -> tuple[list[Tensor], Tensor]:
    """Return query, key and value of a packed row, and weights of its output."""
    torch.manual_seed(0)
    states = [torch.randn(1, n, LENGTH, size).to(dtype).requires_grad_() for n in (heads, key_heads, key_heads)]
    return states, torch.randn(1, LENGTH, heads, size)


def results(
    attend: Callable[..., Tensor | None],
    states: list[Tensor],
    weights: Tensor,
    scaling: float | None = 0.3,
    **options: Any,
) -> list[Tensor]:
    """Return the output of an attention function, and its gradients."""
    output = attend(GroupSpans(GROUPS, **options), *states, scaling)
    assert output is not None
    return [output.detach(), *torch.autograd.grad((output.float() * weights).sum(), states)]


def refused(*states: Tensor, scaling: float | None = 0.3) -> str:
    """Return the sentence that is logged when the installed kernel is not used, twice."""
    said: list[str] = []
    attend = VarlenKernel(said.append)
    for _ in range(2):
        assert attend(GroupSpans(GROUPS), *states, scaling) is None
    (sentence,) = said
    assert "\n" not in sentence
    return sentence


def test_a_run_with_the_kernel_has_the_same_log_probabilities(tmp_path: Path, on_gpu: Any) -> None:
    """With a scaling other than 1 / sqrt(D)."""
    calls: list[int] = []
    on_gpu(kernel_like(lambda output, args: calls.append(1) or output))
    policy = model(transformers.GraniteConfig, attention_multiplier=0.5)
    expected = one_by_one(policy.eval(), flat(RAGGED))
    trainer = trainer_on(policy, tmp_path)
    check_exact(trainer, flat(RAGGED), expected)
    assert layout_of(trainer) is Layout.PACKED
    assert calls


def test_outputs_and_gradients_are_those_of_sdpa_in_each_version(on_gpu: Any) -> None:
    for version, key_heads, scaling, recomputed in (
        ("2.12", 1, 0.3, True), ("2.12", 2, 0.3, False), ("2.12", 4, 0.3, True),
        ("2.11", 2, 0.3, False),
        ("2.10", 2, None, False), ("2.10", 4, 8**-0.5, False),
    ):  # fmt: skip
        on_gpu(VERSIONS[version])
        states, weights = row(key_heads=key_heads)
        expected = results(sdpa, states, weights, scaling)
        got = results(VarlenKernel(pytest.fail), states, weights, scaling, recomputed=recomputed)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    on_gpu(VERSIONS["2.10"])
    for scaling in (0.3, 0.0):
        assert refused(*row()[0], scaling=scaling)


def test_the_trial_may_be_made_in_a_checkpointed_layer(on_gpu: Any) -> None:
    """Checkpointing compares the tensors that a layer stores with those of its second run, which makes no trial."""
    on_gpu(torch_2_11)
    attend = VarlenKernel(pytest.fail)

    def checkpointed(*inputs: Any) -> Tensor:
        return checkpoint(attend, *inputs, use_reentrant=False)

    torch.testing.assert_close(results(checkpointed, *row(), recomputed=True), results(sdpa, *row()))


# ---- Kernels that are not used


def kernel_like(change: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return a kernel with the arguments of torch 2.12 whose output is changed by (output, arguments)."""

    @functools.wraps(torch_2_12)
    def attend(*args: Any, **kwargs: Any) -> Tensor:
        return change(torch_2_12(*args, **kwargs), args)

    return attend


def unmasked(*args: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
    """Compute attention without the mask that was asked for."""
    return torch_2_11(*args, scale=scale)


def raising(error: Exception, length: int | None = None) -> Callable[..., Tensor]:
    """Return a kernel that raises, for rows of a length only if it is given."""

    def change(output: Tensor, args: Any) -> Tensor:
        if length in (None, len(args[0])):
            raise error
        return output

    return kernel_like(change)


def wrong_gradient(output: Tensor, args: Any) -> Tensor:
    more = args[2].sum() * torch.linspace(0, 1, output.numel()).reshape(output.shape)
    return output + more - more.detach()


FLASH = RuntimeError("FlashAttention only supports head sizes that are a multiple of 8\nException raised from mha_fwd")


def test_a_kernel_that_refuses_or_is_wrong_is_not_used(on_gpu: Any) -> None:
    """Rounding to bfloat16 differs by less than a twentieth of the largest entry, and a wrong mask by more."""
    for kernel, word in (
        (raising(FLASH), "multiple of 8"),
        (unmasked, "differs"),
        (lambda query, key, value: query, "causal"),
        (kernel_like(lambda output, _: output * 1.06), "0.06"),
        (kernel_like(lambda output, _: output * math.nan), "inf"),
        (kernel_like(wrong_gradient), "differs"),
        (raising(RuntimeError("too many resources"), LENGTH), "resources"),  # a size that the trial did not have
    ):
        on_gpu(kernel)
        assert word in refused(*row()[0])
    on_gpu(kernel_like(lambda output, _: output * 1.04))
    assert VarlenKernel(pytest.fail)(GroupSpans(GROUPS), *row()[0], 0.3) is not None


def test_each_kind_of_heads_has_one_trial(on_gpu: Any) -> None:
    """The trial is made of rows of another length."""
    tried: list[int] = []
    on_gpu(kernel_like(lambda output, args: tried.append(len(args[0])) or output))
    kernel = VarlenKernel(pytest.fail)
    wide_values, _ = row()
    wide_values[2] = torch.zeros(1, 2, LENGTH, 16)
    kinds = [row()[0], row(heads=2)[0], row(key_heads=4)[0], row(size=16)[0], row(torch.bfloat16)[0], wide_values]
    calls = [(states, 0.3) for states in kinds] + [(kinds[0], 0.5)]
    for number, (states, scaling) in enumerate(calls, start=1):
        for _ in range(2):
            assert kernel(GroupSpans(GROUPS), *states, scaling) is not None
        assert len([length for length in tried if length != LENGTH]) == number


def test_tensors_that_a_kernel_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    half, full = torch.bfloat16, torch.float32
    for is_cuda, dtype, takes in ((True, half, True), (True, torch.float16, True), (True, full, False)):
        query: Any = SimpleNamespace(is_cuda=is_cuda, dtype=dtype)
        assert varlen.is_candidate(query) is takes
    states, _ = row(half)
    assert not varlen.is_candidate(states[0])
    assert VarlenKernel(pytest.fail)(GroupSpans(GROUPS), *states, None) is None


# ---- Memory and random numbers


@pytest.mark.parametrize(("recomputed", "freed"), [(False, True), (True, False)])
def test_copied_keys_and_values_are_not_stored(recomputed: bool, freed: bool, on_gpu: Any) -> None:
    """Without the hooks each layer stores all copies. Checkpointing's own hooks must see them."""
    seen: list[Any] = []

    @functools.wraps(torch_2_12)
    def watched(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        if len(query) == LENGTH:
            seen.extend(weakref.ref(tensor.untyped_storage()) for tensor in (key, value))
        return torch_2_12(query, key, value, *rest, **kwargs)

    on_gpu(watched)
    states, weights = row()
    output = VarlenKernel(pytest.fail)(GroupSpans(GROUPS, recomputed=recomputed), *states, 0.3)
    assert output is not None
    gc.collect()
    assert [reference() is None for reference in seen] == [freed, freed]
    gc.disable()  # a hook that stores an output in its own graph would make a cycle
    try:
        storage = weakref.ref(output.untyped_storage())
        (output * weights).sum().backward()
        del output
        assert storage() is None
    finally:
        gc.enable()


def test_the_gradient_of_a_prefix_is_added_in_float32(on_gpu: Any) -> None:
    """A sum of 258 ones in bfloat16, one after the other, ends at 256."""
    spans = GroupSpans([((0, 1), [(n, n + 1) for n in range(1, 258)])])
    segments = KernelSegments.of(spans, torch.device("cpu"))
    states = torch.zeros(1, 1, 258, 1, dtype=torch.bfloat16, requires_grad=True)
    varlen.KeysOfSegments.apply(states, segments, 1).sum().backward()
    assert states.grad is not None
    assert states.grad[0, 0, 0, 0] == 258
    assert (states.grad[0, 0, 1:] == 1).all()


def test_contract_with_torch() -> None:
    """The kernel, which no CPU runs, has the arguments that are passed, and those of its stand-in for this version."""
    kernel = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    parameters = list(inspect.signature(kernel).parameters)
    names = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert parameters[:7] == names, "torch changed varlen_attn: adapt varlen.py"
    version = ".".join(torch.__version__.split(".")[:2])
    stand_in = VERSIONS.get(version, torch_2_12)
    assert set(inspect.signature(stand_in).parameters) <= set(parameters), "torch changed varlen_attn: adapt varlen.py"
