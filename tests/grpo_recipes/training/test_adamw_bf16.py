"""AdamW for bfloat16 weights compared with torch's AdamW on float32 copies."""

import copy
from pathlib import Path

import pytest
import torch

from grpo_recipes.training import adamw_bf16
from grpo_recipes.training.adamw_bf16 import AdamWBF16, merge, split_into
from tests.support import device

OPTIONS = {"lr": 5e-6, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
EVERY_FLOAT16_PATTERN = torch.arange(-(2**15), 2**15, dtype=torch.int32)


def weights(seed: int = 0) -> list[torch.Tensor]:
    """Return a matrix, a vector, the ones of a norm and a scalar, with values as in a model."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator) * 0.02 for shape in [(40, 30), (7,)]]
    return [device.here(tensor.bfloat16()) for tensor in [*drawn, torch.ones(30), torch.tensor(0.3)]]


def gradients(step: int, like: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    scale = 1.0 if step < 10 else 0.1
    return [(torch.randn(tensor.shape, generator=generator) * scale).bfloat16().to(tensor.device) for tensor in like]


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in steps:
        for param, grad in zip(params, gradients(step, params), strict=True):
            param.grad = grad.to(param.dtype)
        optimizer.step()


def adamw_on_bf16(values: list[torch.Tensor]) -> AdamWBF16:
    return AdamWBF16([torch.nn.Parameter(value.clone()) for value in values], **OPTIONS)


def params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param.detach() for group in optimizer.param_groups for param in group["params"]]


def float32_weights(optimizer: AdamWBF16) -> list[torch.Tensor]:
    return [
        merge([param.detach()], [optimizer.state[param]["low_bits"]])[1][0]
        for group in optimizer.param_groups
        for param in group["params"]
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [2**22, 520])
def test_the_float32_numbers_equal_torchs_adamw_to_the_bit(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(adamw_bf16, "CHUNK", chunk)
    ours = adamw_on_bf16(weights())
    theirs = torch.optim.AdamW([torch.nn.Parameter(w.float()) for w in weights()], fused=True, **OPTIONS)
    train(ours, range(30))
    train(theirs, range(30))
    for float32, stored, expected in zip(float32_weights(ours), params(ours), params(theirs), strict=True):
        assert torch.equal(float32, expected)
        spacing = 2.0 ** (expected.abs().log2().floor() - 7)
        assert ((stored.float() - expected).abs() <= spacing / 2).all()


def test_parameters_of_both_dtypes_take_their_own_steps() -> None:
    values = [weights()[0], weights()[0].float(), weights()[1].float(), weights()[1]]
    ours = AdamWBF16([torch.nn.Parameter(value.clone()) for value in values], **OPTIONS)
    theirs = torch.optim.AdamW([torch.nn.Parameter(value.float()) for value in values], fused=True, **OPTIONS)
    train(ours, range(3))
    train(theirs, range(3))
    found, expected = ours.param_groups[0]["params"], params(theirs)
    for param, other in zip(found, expected, strict=True):
        low_bits = ours.state[param].get("low_bits")
        float32 = param.detach() if low_bits is None else merge([param.detach()], [low_bits])[1][0]
        assert torch.equal(float32, other)


def test_the_defaults_are_those_of_torchs_adamw() -> None:
    made = AdamWBF16([torch.nn.Parameter(torch.ones(1))])
    stock = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    assert made.defaults == {name: stock.defaults[name] for name in made.defaults}
    assert {"lr", "betas", "eps", "weight_decay"} == made.defaults.keys()


def test_a_parameter_without_a_gradient_keeps_its_own_count_of_steps() -> None:
    ours = AdamWBF16([torch.nn.Parameter(w.float()) for w in weights()[:2]], **OPTIONS)
    theirs = torch.optim.AdamW([torch.nn.Parameter(w.float()) for w in weights()[:2]], fused=True, **OPTIONS)
    for optimizer in (ours, theirs):
        train(optimizer, range(2))
        params(optimizer)[0].grad = None
        optimizer.param_groups[0]["params"][0].grad = None
        optimizer.step()
        train(optimizer, range(3, 5))
    assert all(map(torch.equal, params(ours), params(theirs)))


@pytest.mark.parametrize("low", [-(2**15), -1, 0, 2**15 - 1])
def test_merge_and_split_are_inverse_for_every_bfloat16(low: int) -> None:
    weight = EVERY_FLOAT16_PATTERN.to(torch.int16).view(torch.bfloat16)
    finite = weight[weight.isfinite() & (weight != 0)]
    low_bits = torch.full_like(finite, low, dtype=torch.int16)
    float32 = merge([finite], [low_bits])[0]
    kept = float32.clone()
    back, bits = torch.empty_like(finite), torch.empty_like(low_bits)
    split_into(float32, [back], [bits])
    assert torch.equal(merge([back], [bits])[0].view(torch.int32), kept.view(torch.int32))
    # The nearest bfloat16, and of two the one away from 0, by integers.
    nearest = (kept.view(torch.int32).long() + 0x8000) >> 16
    assert torch.equal(back.view(torch.int16).long(), nearest.to(torch.int16).long())


def test_a_weight_that_other_code_sets_to_0_is_0() -> None:
    """The low bits are still those of the previous weight, and with a zero they would be a NaN."""
    zeros = torch.tensor([0.0, -0.0], dtype=torch.bfloat16)
    assert merge([zeros], [torch.full((2,), -300, dtype=torch.int16)])[0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("pattern", [0x7FFFFFFF, 0x7F800001, -1])
def test_nan_stays_nan_and_infinity_becomes_it(pattern: int) -> None:
    """A NaN may have any bits. On a GPU they are 0x7FFFFFFF, and adding to them overflows."""
    float32 = torch.tensor([pattern, 0x7F800000, -0x800000], dtype=torch.int32).view(torch.float32)
    stored, bits = torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.int16)
    split_into(float32, [stored], [bits])
    assert stored.isnan().all()
    assert merge([stored], [bits])[0].isnan().all()


def test_training_continues_to_the_bit_from_a_loaded_state(tmp_path: Path) -> None:
    """Torch casts a loaded state to the weights' dtype. Moments and bits in bfloat16 would change the run."""
    uninterrupted, first = adamw_on_bf16(weights()), adamw_on_bf16(weights())
    train(uninterrupted, range(12))
    train(first, range(6))
    torch.save(first.state_dict(), tmp_path / "optimizer.pt")
    second = adamw_on_bf16([param.clone() for param in params(first)])
    second.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    train(second, range(6, 12))
    assert all(map(torch.equal, params(uninterrupted), params(second)))
    for state, loaded in zip(uninterrupted.state.values(), second.state.values(), strict=True):
        for name, value in state.items():
            assert loaded[name].dtype == value.dtype, name
            assert torch.equal(bits(loaded[name]), bits(value)), name


def bits(value: torch.Tensor) -> torch.Tensor:
    """Return the bits of 16-bit values, some of which are NaN, and other values as they are."""
    return value.view(torch.int16) if value.dtype == torch.bfloat16 else value


def test_a_step_with_a_learning_rate_of_0_changes_nothing() -> None:
    """Torch's distributed checkpoints make such a step to create a state that they can load into."""
    optimizer = adamw_on_bf16(weights())
    optimizer.param_groups[0]["lr"] = 0.0
    train(optimizer, range(3))
    assert all(map(torch.equal, params(optimizer), weights()))


def test_a_step_returns_the_loss_of_its_closure() -> None:
    optimizer = adamw_on_bf16(weights())
    assert optimizer.step(lambda: 0.5) == 0.5
    assert optimizer.step() is None


def test_parameters_of_other_dtypes_raise() -> None:
    with pytest.raises(TypeError, match="float16"):
        AdamWBF16([torch.nn.Parameter(torch.ones(3, dtype=torch.float16))])


def test_the_state_takes_ten_bytes_per_weight() -> None:
    optimizer = adamw_on_bf16(weights()[:1])
    train(optimizer, range(1))
    (state,) = copy.copy(optimizer.state).values()
    held = sum(value.numel() * value.element_size() for name, value in state.items() if name != "step")
    assert held == 10 * weights()[0].numel()
