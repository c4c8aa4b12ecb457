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

from grpo_recipes.training import packed_attention, varlen
from grpo_recipes.training.packed_attention import GroupSpans, sdpa
from grpo_recipes.training.packing import Layout
from grpo_recipes.training.varlen import Segments, VarlenKernel
from tests.grpo_recipes.training.test_packing import RAGGED, flat, layout_of, logged, one_by_one, scored, trainer_on
from tests.support.pretend_gpu import PretendGPU
from tests.support.recorded import model
from tests.support.varlen_kernel import VERSIONS, Attention, torch_2_11, torch_2_12

__all__ = ["logged"]  # a fixture

GROUPS = [((0, 6), [(6, 8), (8, 14), (14, 23)]), ((23, 23), [(23, 25)]), ((25, 26), [(26, 27), (27, 31)])]
"""Suffixes shorter and longer than their prefix, and an empty prefix."""
LENGTH = 31


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Tensor]], None]:
    """Return a function that makes a kernel the installed one, and lets it have every tensor."""

    def install(kernel: Callable[..., Tensor]) -> None:
        monkeypatch.setattr(varlen, "varlen_attn", kernel)
        monkeypatch.setattr(varlen, "is_candidate", lambda query: True)

    return install


def row(
    dtype: torch.dtype = torch.float32, heads: int = 4, key_heads: int = 2, size: int = 8
) -> tuple[list[Tensor], Tensor]:
    """Return query, key and value of a packed row, and weights of its output."""
    torch.manual_seed(0)
    states = [torch.randn(1, n, LENGTH, size).to(dtype).requires_grad_() for n in (heads, key_heads, key_heads)]
    return states, torch.randn(1, LENGTH, heads, size)


def results(
    attend: Callable[..., Tensor | None], states: list[Tensor], weights: Tensor, **options: Any
) -> list[Tensor]:
    """Return the output of an attention function, and its gradients."""
    output = attend(GroupSpans(GROUPS, **options), *states, 0.3)
    assert output is not None
    return [output.detach(), *torch.autograd.grad((output.float() * weights).sum(), states)]


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaConfig", {}),  # grouped heads
        ("GraniteConfig", {"num_key_value_heads": 4, "attention_multiplier": 0.5}),  # a scaling other than 1 / sqrt(D)
    ],
)
def test_the_varlen_call_is_the_same_attention(
    version: str, architecture: str, changes: dict[str, Any], tmp_path: Path, logged: Any, on_gpu: Any
) -> None:
    calls: list[int] = []

    @functools.wraps(VERSIONS[version])
    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return VERSIONS[version](*args, **kwargs)

    on_gpu(counted)
    policy = model(getattr(transformers, architecture), **changes)
    expected = one_by_one(policy.eval(), flat(RAGGED))
    trainer = trainer_on(policy, tmp_path)
    got = scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.PACKED, logged()
    # torch 2.10 has no argument for the scaling.
    assert bool(calls) is not (version == "2.10" and architecture == "GraniteConfig")
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("recomputed", [False, True])
def test_outputs_and_gradients_are_those_of_sdpa(key_heads: int, recomputed: bool, on_gpu: Any) -> None:
    on_gpu(torch_2_12)
    states, weights = row(key_heads=key_heads)
    expected = results(sdpa, states, weights)
    got = results(VarlenKernel(pytest.fail), states, weights, recomputed=recomputed)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


def test_the_trial_may_be_made_in_a_checkpointed_layer(on_gpu: Any) -> None:
    """Checkpointing compares the tensors that a layer stores with those of its second run, which makes no trial."""
    on_gpu(torch_2_11)
    said: list[str] = []
    attend = VarlenKernel(said.append)

    def checkpointed(*inputs: Any) -> Tensor:
        return checkpoint(attend, *inputs, use_reentrant=False)

    expected = results(sdpa, *row())
    for mine, theirs in zip(results(checkpointed, *row(), recomputed=True), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
    assert said == []


def test_bfloat16_results_are_as_near_to_float32_as_sdpas(on_gpu: Any) -> None:
    on_gpu(torch_2_12)
    # Equally many heads: a group's gradient is summed by the kernel, and SDPA of torch 2.8 does it in float32.
    exact = results(sdpa, *row(key_heads=4))
    stock, ours = (results(attend, *row(torch.bfloat16, key_heads=4)) for attend in (sdpa, VarlenKernel(pytest.fail)))
    for best, loop, mine in zip(exact, stock, ours, strict=True):
        assert (mine.float() - best).norm() <= (loop.float() - best).norm()


def without_groups(*args: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
    """Compute attention with equally many heads only."""
    if args[0].shape[1] != args[1].shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    return torch_2_11(*args, scale=scale, window_size=window_size)


def test_keys_and_values_are_repeated_for_a_kernel_that_takes_no_groups(on_gpu: Any) -> None:
    on_gpu(without_groups)
    states, weights = row()
    kernel = VarlenKernel(pytest.fail)
    for mine, theirs in zip(results(kernel, states, weights), results(sdpa, states, weights), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
    assert [form.repeats for form in kernel._forms.values() if form] == [2]


def refusing(*args: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
    """Refuse, as FlashAttention does on a GPU before compute capability 8.0, and for sizes that it does not have."""
    raise RuntimeError(
        "FlashAttention only supports head sizes that are a multiple of 8\nException raised from mha_fwd"
    )


def unmasked(*args: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
    """Compute attention without the mask that was asked for."""
    return torch_2_11(*args, scale=scale)


class NoBackward(Attention):
    """Attention whose kernel has no backward pass for these sizes."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Refuse."""
        raise RuntimeError("FlashAttention backward does not support this head size")


def without_backward(*args: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
    """Compute attention that can't be trained."""
    return NoBackward.apply(*args[:3], args[3:5], scale, window_size)


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (refusing, "multiple of 8"),
        (unmasked, "differs from SDPA"),
        (without_backward, "backward does not support"),
        (lambda query, key, value: query, "no causal mask"),
    ],
)
def test_a_kernel_that_refuses_or_is_wrong_is_not_used(kernel: Any, reason: str, on_gpu: Any) -> None:
    on_gpu(kernel)
    said: list[str] = []
    attend = VarlenKernel(said.append)
    states, _ = row()
    assert attend(GroupSpans(GROUPS), *states, 0.3) is None
    assert attend(GroupSpans(GROUPS), *states, 0.3) is None
    (sentence,) = said
    assert reason in sentence
    assert "\n" not in sentence


def scaled(factor: float) -> Callable[..., Tensor]:
    """Return a kernel whose output and gradients are too large by a factor."""

    @functools.wraps(torch_2_12)
    def attend(*args: Any, **kwargs: Any) -> Tensor:
        return torch_2_12(*args, **kwargs) * factor

    return attend


def test_a_kernel_may_differ_by_a_twentieth_of_the_largest_entry(on_gpu: Any) -> None:
    """Rounding to bfloat16 differs by less, and a wrong mask by more."""
    states, _ = row()
    on_gpu(scaled(1.04))
    assert VarlenKernel(pytest.fail)(GroupSpans(GROUPS), *states, 0.3) is not None
    on_gpu(scaled(1.06))
    said: list[str] = []
    assert VarlenKernel(said.append)(GroupSpans(GROUPS), *states, 0.3) is None
    assert "it differs from SDPA by 0.06 of the largest entry in a trial" in said[0]


def test_one_wrong_gradient_is_enough_to_refuse_a_kernel(on_gpu: Any) -> None:
    @functools.wraps(torch_2_12)
    def attend(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        output = torch_2_12(query, key, value, *rest, **kwargs)
        more = value.sum() * torch.linspace(0, 1, output.numel()).reshape(output.shape)
        return output + more - more.detach()

    on_gpu(attend)
    said: list[str] = []
    assert VarlenKernel(said.append)(GroupSpans(GROUPS), *row()[0], 0.3) is None
    assert "differs from SDPA" in said[0]


def test_the_trial_is_a_packed_row() -> None:
    """Its spans follow one another, and it has prefixes of several tokens and of one, before several rows and one."""
    spans = [span for prefix, rows in varlen.TRIAL_SPANS for span in (prefix, *rows)]
    ends = [0, *(stop for _, stop in spans)]
    assert [start for start, _ in spans] == ends[:-1]
    assert all(start < stop for start, stop in spans)
    assert {min(2, prefix[1] - prefix[0]) for prefix, _ in varlen.TRIAL_SPANS} == {1, 2}
    assert {min(2, len(rows)) for _, rows in varlen.TRIAL_SPANS} == {1, 2}


def test_each_kind_of_heads_has_one_trial(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(torch_2_12)
    tried: list[Any] = []
    monkeypatch.setattr(VarlenKernel, "_trial", lambda self, *given: tried.append(given) or None)
    kernel = VarlenKernel(pytest.fail)
    wide_values, _ = row()
    wide_values[2] = torch.zeros(1, 2, LENGTH, 16)
    longer = [torch.cat([state, state], 2) for state in row()[0]]
    kinds = [row()[0], row(heads=2)[0], row(key_heads=4)[0], row(size=16)[0], row(torch.bfloat16)[0], wide_values]
    for number, states in enumerate(kinds, start=1):
        assert kernel(GroupSpans(GROUPS), *states, 0.3) is None
        assert len(tried) == number
    assert kernel(GroupSpans(GROUPS), *row()[0], 0.5) is None
    assert len(tried) == len(kinds) + 1, "another scaling is another kind"
    for states in (*kinds, longer):
        assert kernel(GroupSpans(GROUPS), *states, 0.3) is None
    assert len(tried) == len(kinds) + 1, "the length of a row is no kind"


@pytest.mark.parametrize(
    ("version", "heads", "scaling", "forms"),
    [
        ("2.10", 2, None, [({"is_causal": True}, 1)]),
        ("2.10", 2, 0.25, [({"is_causal": True}, 1)]),  # the default for heads of 16
        ("2.10", 2, 0.2, []),
        ("2.10", 2, 0.3, []),
        ("2.10", 2, 0.0, []),
        ("2.10", 4, None, [({"is_causal": True}, 1), ({"is_causal": True}, 2)]),
        ("2.11", 2, 0.3, [({"scale": 0.3, "window_size": (-1, 0)}, 1)]),
        ("2.11", 4, 0.3, [({"scale": 0.3, "window_size": (-1, 0)}, 1), ({"scale": 0.3, "window_size": (-1, 0)}, 2)]),
        ("2.12", 2, 0.3, [({"scale": 0.3, "window_size": (-1, 0)}, 1)]),
        (
            *("2.12", 4, 0.3),
            [
                ({"scale": 0.3, "window_size": (-1, 0), "enable_gqa": True}, 1),
                ({"scale": 0.3, "window_size": (-1, 0)}, 2),
            ],
        ),
    ],
)
def test_the_ways_of_calling_the_kernel_of_each_version(
    version: str, heads: int, scaling: float | None, forms: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", VERSIONS[version])
    found = varlen._forms(torch.zeros(1, heads, 3, 16), torch.zeros(1, 2, 3, 16), scaling)
    assert [(form.arguments, form.repeats) for form in found] == forms


def test_tensors_that_a_kernel_may_take() -> None:
    for is_cuda, dtype, takes in (
        (True, torch.bfloat16, True),
        (True, torch.float16, True),
        (True, torch.float32, False),
        (False, torch.bfloat16, False),
    ):
        query: Any = SimpleNamespace(is_cuda=is_cuda, dtype=dtype)
        assert varlen.is_candidate(query) is takes


def test_the_gap_between_two_tensors_is_relative_to_the_largest_entry() -> None:
    def gap(got: list[float], expected: list[float], dtype: torch.dtype = torch.float32) -> float:
        return varlen._relative_gap(torch.tensor(got, dtype=dtype), torch.tensor(expected, dtype=dtype))

    assert gap([1.0, -3.0], [2.0, -4.0]) == 0.25
    assert gap([0.0, 4.0], [2.0, 4.0]) == gap([4.0, 4.0], [2.0, 4.0]) == 0.5
    assert gap([60_000.0], [-60_000.0], torch.float16) == 2.0
    assert gap([math.nan], [1.0]) == gap([0.0], [0.0]) == math.inf


def test_a_run_whose_kernel_refuses_is_packed_by_sdpa(tmp_path: Path, logged: Any, on_gpu: Any) -> None:
    on_gpu(refusing)
    policy = model()
    expected = one_by_one(policy.eval(), flat(RAGGED))
    trainer = trainer_on(policy, tmp_path)
    got = scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.PACKED
    assert ["multiple of 8" in line for line in logged()] == [True]
    torch.testing.assert_close(got[0], expected[0], atol=1e-5, rtol=0)


def test_equal_refusals_are_announced_once(tmp_path: Path, logged: Any, on_gpu: Any) -> None:
    """Layers whose heads have several sizes make a trial each."""
    on_gpu(refusing)
    kernel = trainer_on(model(), tmp_path)._log_probs._kernel
    for size in (8, 16):
        assert kernel(GroupSpans(GROUPS), *row(size=size)[0], 0.3) is None
    assert len(logged()) == 1


def test_float32_is_attended_on_a_gpu_without_masks_and_grouped_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """For grouped heads in float32, and for a mask that is a view with an offset, SDPA would store all scores."""
    states, weights = row()
    expected = results(sdpa, states, weights)
    stock = packed_attention.scaled_dot_product_attention

    def checked(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, **options: Any) -> Tensor:
        assert is_causal
        assert not options["enable_gqa"]
        assert query.shape[1] == key.shape[1] == value.shape[1]
        return stock(query, key, value, is_causal=is_causal, **options)

    monkeypatch.setattr(packed_attention, "scaled_dot_product_attention", checked)
    with PretendGPU():
        on_gpu = [state.detach().to("cuda").requires_grad_() for state in states]
        got = [tensor.cpu() for tensor in results(sdpa, on_gpu, weights.to("cuda"))]
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


def test_a_kernel_that_refuses_after_its_trial_is_given_up(on_gpu: Any) -> None:
    def refusing_long_rows(*args: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
        if len(args[0]) == LENGTH:
            raise RuntimeError("CUDA error: too many resources requested for launch")
        return torch_2_11(*args, scale=scale, window_size=window_size)

    on_gpu(refusing_long_rows)
    said: list[str] = []
    attend = VarlenKernel(said.append)
    states, _ = row()
    for _ in range(2):
        assert attend(GroupSpans(GROUPS), *states, 0.3) is None
    (sentence,) = said
    assert "too many resources" in sentence


def test_a_kernel_without_memory_ends_the_run(on_gpu: Any) -> None:
    def out_of_memory(*args: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
        if len(args[0]) == LENGTH:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch_2_11(*args, scale=scale, window_size=window_size)

    on_gpu(out_of_memory)
    states, _ = row()
    with pytest.raises(torch.OutOfMemoryError):
        VarlenKernel(pytest.fail)(GroupSpans(GROUPS), *states, 0.3)


def test_tensors_on_a_cpu_never_reach_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", lambda *args, **kwargs: pytest.fail("called"))
    states, _ = row(torch.bfloat16)
    assert VarlenKernel(pytest.fail)(GroupSpans(GROUPS), *states, None) is None


def test_the_trial_leaves_the_random_state_and_the_gradients_alone(on_gpu: Any) -> None:
    on_gpu(torch_2_12)
    states, _ = row()
    before = torch.get_rng_state()
    with torch.no_grad():
        VarlenKernel(pytest.fail)(GroupSpans(GROUPS), *states, 0.3)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(tensor.grad is None for tensor in states)


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
    (output * weights).sum().backward()


def test_a_graph_is_freed_without_the_garbage_collector(on_gpu: Any) -> None:
    """A hook that stores an output in its own graph would make a cycle."""
    on_gpu(torch_2_12)
    states, weights = row()
    gc.collect()
    gc.disable()
    try:
        output = VarlenKernel(pytest.fail)(GroupSpans(GROUPS), *states, 0.3)
        assert output is not None
        storage = weakref.ref(output.untyped_storage())
        (output * weights).sum().backward()
        del output
        assert storage() is None
    finally:
        gc.enable()


def test_the_gradient_of_a_prefix_is_added_in_float32(on_gpu: Any) -> None:
    """A sum of 258 ones in bfloat16, one after the other, ends at 256."""
    spans = GroupSpans([((0, 1), [(n, n + 1) for n in range(1, 258)])])
    segments = Segments.of(spans, torch.device("cpu"))
    states = torch.zeros(1, 1, 258, 1, dtype=torch.bfloat16, requires_grad=True)
    gathered = varlen.KeysOfSegments.apply(states, segments, 1)
    gathered.sum().backward()
    assert states.grad is not None
    assert states.grad[0, 0, 0, 0] == 258
    assert (states.grad[0, 0, 1:] == 1).all()


def test_segments_of_a_packed_row() -> None:
    segments = Segments.of(GroupSpans([((0, 2), [(2, 4), (4, 6)]), ((6, 6), [(6, 8)])]), torch.device("cpu"))
    assert segments.query_ends.tolist() == [0, 2, 4, 6, 8]
    assert segments.key_ends.tolist() == [0, 2, 6, 10, 12]
    assert segments.keys.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 4, 5, 6, 7]
    assert segments.own.tolist() == [0, 1, 4, 5, 8, 9, 10, 11]
    assert [(span, places.tolist()) for span, places in segments.contexts] == [((0, 2), [2, 3, 6, 7])]
    assert (segments.longest_query, segments.longest_key) == (2, 4)


def test_contract_with_torch() -> None:
    """The kernel, which no CPU runs, has the arguments that are passed, and those of its stand-in for this version."""
    kernel = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    parameters = list(inspect.signature(kernel).parameters)
    names = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert parameters[:7] == names, "torch changed varlen_attn: adapt varlen.py"
    version = ".".join(torch.__version__.split(".")[:2])
    stand_in = VERSIONS.get(version, torch_2_12)
    assert set(inspect.signature(stand_in).parameters) <= set(parameters), "torch changed varlen_attn: adapt varlen.py"
