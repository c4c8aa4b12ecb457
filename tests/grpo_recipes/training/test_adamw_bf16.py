"""AdamW for bfloat16 weights against torch's AdamW on float32 copies."""

import copy
import math
from pathlib import Path

import pytest
import torch

from grpo_recipes.training import adamw_bf16
from grpo_recipes.training.adamw_bf16 import AdamWBF16, merge, split_into

OPTIONS = {"lr": 5e-6, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
EVERY_FLOAT16_PATTERN = torch.arange(-(2**15), 2**15, dtype=torch.int32)


def weights(seed: int = 0) -> list[torch.Tensor]:
    """A matrix, a row, a norm's ones and a number, of the sizes that a model's weights have."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator) * 0.02 for shape in [(40, 30), (7,)]]
    return [tensor.bfloat16() for tensor in [*drawn, torch.ones(30), torch.tensor(0.3)]]


def gradients(step: int, like: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    scale = 1.0 if step < 10 else 0.1
    return [(torch.randn(tensor.shape, generator=generator) * scale).bfloat16() for tensor in like]


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in steps:
        for param, grad in zip(params, gradients(step, params), strict=True):
            param.grad = grad.to(param.dtype)
        optimizer.step()


def cured(values: list[torch.Tensor]) -> AdamWBF16:
    return AdamWBF16([torch.nn.Parameter(value.clone()) for value in values], **OPTIONS)


def params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param.detach() for group in optimizer.param_groups for param in group["params"]]


def wholes(optimizer: AdamWBF16) -> list[torch.Tensor]:
    return [
        merge(param, optimizer.state[param]["low_bits"])
        for group in optimizer.param_groups
        for param in group["params"]
    ]


@pytest.mark.parametrize("chunk", [2**22, 64])
def test_it_is_torchs_adamw_on_float32_weights_to_the_bit(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(adamw_bf16, "CHUNK", chunk)
    ours = cured(weights())
    theirs = torch.optim.AdamW([torch.nn.Parameter(w.float()) for w in weights()], foreach=False, **OPTIONS)
    train(ours, range(30))
    train(theirs, range(30))
    for whole, stored, expected in zip(wholes(ours), params(ours), params(theirs), strict=True):
        assert torch.equal(whole, expected)
        spacing = 2.0 ** (expected.abs().log2().floor() - 7)
        assert ((stored.float() - expected).abs() <= spacing / 2).all()


def test_a_parameter_is_updated_in_as_few_pieces_as_memory_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(list(adamw_bf16._chunks(weights()[:1]))) == 1
    monkeypatch.setattr(adamw_bf16, "CHUNK", 64)
    assert [len(piece) for (piece,) in adamw_bf16._chunks(weights()[:1])] == [2] * 20  # rows of 30


def test_plain_adamw_on_bfloat16_loses_most_of_it() -> None:
    """The fault that this optimiser is for, so that the test above can't pass by chance."""
    plain = torch.optim.AdamW([torch.nn.Parameter(w) for w in weights()], **OPTIONS)
    train(plain, range(30))
    start, moved = weights()[0].double(), params(plain)[0].double()
    ours = cured(weights())
    train(ours, range(30))
    true = wholes(ours)[0].double() - start
    assert ((moved - start) * true).sum() / (true * true).sum() < 0.2


def test_float32_weights_take_the_same_step() -> None:
    ours = cured([w.float() for w in weights()])
    theirs = torch.optim.AdamW([torch.nn.Parameter(w.float()) for w in weights()], foreach=False, **OPTIONS)
    train(ours, range(5))
    train(theirs, range(5))
    assert all(map(torch.equal, params(ours), params(theirs)))
    assert "low_bits" not in ours.state[ours.param_groups[0]["params"][0]]


@pytest.mark.parametrize("low", [-(2**15), -1, 0, 1, 2**15 - 1])
def test_every_bfloat16_with_its_bits_is_one_float32_and_back(low: int) -> None:
    weight = EVERY_FLOAT16_PATTERN.to(torch.int16).view(torch.bfloat16)
    finite = weight[weight.isfinite() & (weight != 0)]
    low_bits = torch.full_like(finite, low, dtype=torch.int16)
    whole = merge(finite, low_bits)
    back, bits = torch.empty_like(finite), torch.empty_like(low_bits)
    split_into(whole, back, bits)
    assert torch.equal(merge(back, bits).view(torch.int32), whole.view(torch.int32))


def test_a_weight_that_something_else_sets_to_0_is_0() -> None:
    """Its bits are those of the weight before; under a zero they would spell a NaN."""
    zeros = torch.tensor([0.0, -0.0], dtype=torch.bfloat16)
    assert merge(zeros, torch.full((2,), -300, dtype=torch.int16)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0x7FC00000, 0x7F800001, -1, -(2**22)])
def test_a_nan_stays_one_and_an_infinity_too(pattern: int) -> None:
    """NaNs of any bits: a GPU's are 0x7FFFFFFF, to which nothing can be added."""
    whole = torch.tensor([pattern, 0x7F800000, -0x800000], dtype=torch.int32).view(torch.float32)
    stored, bits = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int16)
    split_into(whole, stored, bits)
    assert stored[0].isnan()
    assert stored[1:].tolist() == [math.inf, -math.inf]


def test_a_loaded_state_goes_on_to_the_bit(tmp_path: Path) -> None:
    """torch casts a loaded state to the weights' dtype: moments and bits would be bfloat16, and the run another."""
    whole, first = cured(weights()), cured(weights())
    train(whole, range(12))
    train(first, range(6))
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    second = cured([param.clone() for param in params(first)])
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    train(second, range(6, 12))
    assert all(map(torch.equal, params(whole), params(second)))
    for param, other in zip(params(whole), params(second), strict=True):
        for name, value in whole.state[_of(whole, param)].items():
            loaded = second.state[_of(second, other)][name]
            assert loaded.dtype == value.dtype, name
            assert torch.equal(loaded, value), name


def _of(optimizer: torch.optim.Optimizer, value: torch.Tensor) -> torch.nn.Parameter:
    return next(p for group in optimizer.param_groups for p in group["params"] if p.data_ptr() == value.data_ptr())


def test_a_step_of_rate_0_changes_nothing() -> None:
    """torch's distributed checkpoints make such a step to have a state to load into."""
    optimizer = cured(weights())
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, range(3))
    assert all(map(torch.equal, params(optimizer), weights()))


def test_a_step_returns_the_loss_of_its_closure() -> None:
    optimizer = cured(weights())
    assert optimizer.step(lambda: 0.5) == 0.5
    assert optimizer.step() is None


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="float16"):
        AdamWBF16([torch.nn.Parameter(torch.ones(3, dtype=torch.float16))])


def test_state_takes_ten_bytes_a_weight() -> None:
    optimizer = cured(weights()[:1])
    train(optimizer, range(1))
    (state,) = copy.copy(optimizer.state).values()
    held = sum(value.numel() * value.element_size() for name, value in state.items() if name != "step")
    assert held == 10 * weights()[0].numel()
