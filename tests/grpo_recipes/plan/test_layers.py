"""Measured bytes of decoder layers, compared to the byte with a meter of whole models of one and of two layers."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GPT2Config, Lfm2Config, LlamaConfig, PretrainedConfig

from grpo_recipes.plan import layers
from grpo_recipes.plan.layers import MeasuredLayers, NotMeasured, Precision, RowSizes
from grpo_recipes.plan.memory import ModelShape
from tests.support.memory_meter import (
    Batch,
    Meter,
    _hidden,
    _observed,
    _segmented_hidden,
    _segments,
    build,
    gpu_kernels,
)

ROWS, PROMPT, COMPLETION = 4, 16, 16
TOKENS = PROMPT + COMPLETION
BATCH = Batch(ROWS, PROMPT, COMPLETION)
SIZES: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1)
BF16, FLOAT32, AUTOCAST = Precision(2, 2, False), Precision(4, 4, False), Precision(4, 4, True)
ADAPTER = Precision(2, 4, False)


def llama(layers: int) -> PretrainedConfig:
    return LlamaConfig(**SIZES, **HEADS, num_hidden_layers=layers)


def gpt2(layers: int) -> PretrainedConfig:
    return GPT2Config(vocab_size=512, n_embd=64, n_head=2, n_layer=layers)


def convolutions(layers: int) -> PretrainedConfig:
    return Lfm2Config(**SIZES, **HEADS, num_hidden_layers=layers, layer_types=["conv"] * layers)


class Whole(NamedTuple):
    """Bytes of a whole model without its last norm."""

    live: int
    """Held between forward and backward, with the output."""
    forward: int
    """Peak of the forward pass."""
    backward: int
    """Peak of the backward pass, with the output and its gradient."""


def whole(config: PretrainedConfig, precision: Precision, adapter: Any, group: int | None, trains: bool) -> Whole:
    with FakeTensorMode(allow_non_fake_inputs=True):
        dtype = torch.bfloat16 if precision.weight == 2 else torch.float32
        model: Any = build(config, dtype, copy.deepcopy(adapter))
        model.train(trains)
        base = model if adapter is None else model.get_base_model()
        for name in ("norm", "ln_f", "embedding_norm"):
            if hasattr(base.base_model, name):
                setattr(base.base_model, name, nn.Identity())
        ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
        known = [*model.parameters(), *model.buffers(), ids, mask := torch.ones_like(ids)]
        for parameter in model.parameters():
            if parameter.requires_grad and trains:
                parameter.grad = torch.empty_like(parameter)
                known.append(parameter.grad)
        segmented = segments = None
        if group is not None:
            segmented, segments = _observed(model), _segments(BATCH, group)
            known += [value for part in segments.in_order() for value in vars(part).values() if value is not None]
            known.append(segments.positions)
        meter = Meter(known)
        with meter, gpu_kernels(), torch.set_grad_enabled(trains):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision.autocast):
                if segmented is None:
                    output = _hidden(base, ids, mask, None)
                else:
                    output = _segmented_hidden(segmented, base, segments)
            live, forward, meter.peak = meter.live, meter.peak, 0
            if trains:
                output.backward(torch.empty_like(output))
        return Whole(live, forward, meter.peak)


MODELS = {
    "bfloat16": (llama, BF16, None),
    "float32": (llama, FLOAT32, None),
    "autocast": (llama, AUTOCAST, None),
    "adapter": (llama, ADAPTER, LORA),
    "dropout": (gpt2, BF16, None),
    "convolutions": (convolutions, BF16, None),
}


def measured(config: PretrainedConfig, precision: Precision, adapter: Any, prompts: int | None, trains: bool) -> Any:
    layers = MeasuredLayers(ModelShape.built(config, copy.deepcopy(adapter))[1])
    sizes = RowSizes(ROWS, PROMPT, COMPLETION, prompts)
    found = layers.measure(precision, sizes, trains=trains)
    assert layers.measure(precision, sizes, trains=trains) is found
    return found


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_keeps_and_needs_what_it_adds_to_a_model(name: str) -> None:
    model, precision, adapter = MODELS[name]
    one, two = (whole(model(layers), precision, adapter, None, True) for layers in (1, 2))
    found = measured(model(3), precision, adapter, None, True)
    layer, last, between = found.layers[0], found.layers[2], found.between
    assert len(found.layers) == 3
    assert layer == last
    assert between == ROWS * TOKENS * 64 * precision.weight
    assert layer.kept == two.live - one.live
    assert layer.backward == two.backward - two.live + layer.kept - between  # the gradient of the output
    if adapter is None:
        assert layer.forward == one.forward - between - found.shared
    else:  # with a frozen base the first layer's input has no gradient, so it keeps less than the others
        least = whole(model(1), precision, adapter, None, False)
        assert layer.forward > least.forward
        assert one.live - between < layer.kept + found.shared


@pytest.mark.parametrize(("name", "casts"), [("dropout", 0), ("autocast", 2 * (6 * 64 * 32 + 3 * 64 * 128))])
def test_a_forward_without_gradients_keeps_nothing_but_casts_of_weights(name: str, casts: int) -> None:
    model, precision, adapter = MODELS[name]
    found = measured(model(2), precision, adapter, None, False)
    layer = found.layers[0]
    assert layer.kept == casts
    assert layer.forward == whole(model(1), precision, adapter, None, False).forward - found.between - found.shared
    assert layer.backward == 0


def test_layers_of_two_kinds_are_measured_one_by_one() -> None:
    kinds = ["conv", "full_attention", "conv"]
    mixed = Lfm2Config(**SIZES, **HEADS, num_hidden_layers=3, layer_types=kinds)
    first, attention, third = measured(mixed, BF16, None, None, True).layers
    assert first == third == measured(convolutions(1), BF16, None, None, True).layers[0]
    model = Lfm2Config(**SIZES, **HEADS, num_hidden_layers=1, layer_types=kinds[1:2])
    assert attention == measured(model, BF16, None, None, True).layers[0] != first


def test_a_layer_behind_shared_prompts_keeps_what_it_adds_to_a_model() -> None:
    """Two prompts of 15 tokens run once. Each completion also computes the last token of its prompt."""
    one, two = (whole(llama(layers), AUTOCAST, None, 2, True) for layers in (1, 2))
    found = measured(llama(2), AUTOCAST, None, 2, True)
    layer, between = found.layers[0], found.between
    assert between == (2 * (PROMPT - 1) + ROWS * COMPLETION) * 64 * 4
    assert layer.kept == two.live - one.live
    assert layer.forward + between + found.shared == pytest.approx(one.forward, abs=1024)  # ends of blocks
    assert layer.backward - layer.kept + between == pytest.approx(two.backward - two.live, abs=1024)


def test_a_model_that_cannot_run_without_data_is_named() -> None:
    model = ModelShape.built(llama(1))[1]

    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("no data\nhere")

    model.model.layers[0].forward = fails
    with pytest.raises(NotMeasured, match="^ValueError: no data$"):
        MeasuredLayers(model).measure(BF16, RowSizes(1, 1, 1))


# ---- The parts of a measurement


def test_bytes_are_counted_in_blocks_from_their_creation_to_their_release() -> None:
    known = torch.zeros(1000)
    with layers._Bytes([known]) as meter:
        known.add_(1)
        assert (meter.live, meter.peak) == (0, 0)
        one, block = torch.zeros(1), torch.zeros(128)
        more = torch.full(size=(129,), fill_value=2.0)
        assert meter.live == meter.peak == 512 + 512 + 1024
        view = more[:2]
        del more
        assert meter.live == 2048, "a view holds the whole storage"
        del view
        torch.zeros(10**6, device="meta")
        assert (meter.live, meter.peak) == (1024, 2048)
        meter.restart()
        assert meter.peak == 1024
        del one
        again = torch.zeros(1)
        assert (meter.live, meter.peak) == (1024, 1024)
        pair = torch.zeros(2, 128).unbind()
        assert meter.live == 2048
        del pair
    assert (block.numel(), again.numel(), meter.live) == (128, 1, 1024)


@pytest.mark.parametrize(("forms", "length"), [([], 0), ([0], 0), ([2], 2), ([4, 3], 3), ([2, 0], 0)])
def test_a_skipped_layer_returns_its_input_in_the_form_of_the_first_layers_output(
    forms: list[int], length: int
) -> None:
    skipped = layers._Skipped(nn.Linear(3, 5), forms)
    states = torch.zeros(1, 2, 3)
    found = skipped(states, None, mask=None)
    assert found is states if length == 0 else (found[0] is states and found[1:] == (None,) * (length - 1))
    assert skipped.out_features == 5
    assert not list(skipped.parameters())


def test_weights_get_the_precision_of_the_run_and_tied_ones_stay_tied() -> None:
    with torch.device("meta"):
        model: Any = nn.Module()
        model.norm = nn.BatchNorm1d(4)
        model.first, model.second = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
        model.second.weight = model.first.weight
        model.frozen = nn.Linear(4, 3).requires_grad_(requires_grad=False)
        model.norm.register_buffer("nothing", None)
    layers._pretend(model, Precision(2, 4, False))
    assert {name: value.dtype for name, value in model.named_parameters()} == {
        **dict.fromkeys(["norm.weight", "norm.bias", "first.weight"], torch.float32),
        **dict.fromkeys(["frozen.weight", "frozen.bias"], torch.bfloat16),
    }
    assert model.second.weight is model.first.weight
    assert model.first.bias is None
    assert [value.requires_grad for value in model.parameters()] == [True, True, True, False, False]
    assert {name: (value.dtype, value.shape) for name, value in model.named_buffers()} == {
        **dict.fromkeys(["norm.running_mean", "norm.running_var"], (torch.float32, (4,))),
        "norm.num_batches_tracked": (torch.int64, ()),
    }
    assert all(value.device.type == "cpu" for value in (*model.parameters(), *model.buffers()))


def test_hidden_states_are_the_tensors_of_three_dimensions() -> None:
    states, mask = torch.zeros(1, 2, 3), torch.zeros(1, 2)
    assert layers._hidden(states)[0] is states
    for values in ((states, None, mask, 3, states), [states, mask, states]):
        assert [value is states for value in layers._hidden(values)] == [True, True]
    assert layers._hidden((None, mask, torch.zeros(1, 1, 2, 3))) == []


def test_embeddings_get_a_gradient_where_a_frozen_base_gives_them_none() -> None:
    anchor, frozen = nn.Parameter(torch.ones(())), torch.zeros(2, 3)
    found = layers._add(anchor, nn.Identity(), (), frozen)
    assert found.requires_grad
    assert torch.equal(found, torch.ones(2, 3))
    trained = torch.zeros(2, 3, requires_grad=True)
    assert layers._add(anchor, nn.Identity(), (), trained) is trained
    with torch.no_grad():
        assert layers._add(anchor, nn.Identity(), (), frozen) is frozen


def test_rows_have_ids_and_no_padding() -> None:
    rows = layers._rows(2, 5)
    assert {name: (value.shape, value.dtype) for name, value in rows.items()} == {
        **dict.fromkeys(["input_ids", "attention_mask"], ((2, 5), torch.int64))
    }
    assert rows["attention_mask"].all()


def test_dropout_is_that_of_the_gpu_only_where_numbers_are_dropped() -> None:
    numbers = torch.ones(1000)
    assert layers._dropout(numbers, 0.5, training=False) is numbers
    assert layers._dropout(numbers, 0.0) is numbers
    dropped = layers._dropout(numbers)
    assert set(dropped.tolist()) == {0.0, 2.0}


def test_experts_multiply_their_own_tokens() -> None:
    tokens, weights = torch.randn(5, 3), torch.randn(2, 3, 4)
    ends = torch.tensor([2, 5], dtype=torch.int32)
    expected = torch.cat([tokens[:2] @ weights[0], tokens[2:] @ weights[1]])

    def stock(*given: Any, **ends: Any) -> Any:
        return given, ends

    stand_in: Any = stock
    torch.testing.assert_close(layers._grouped_mm(stand_in, tokens, weights, offs=ends), expected)
    tokens, weights = tokens.bfloat16(), weights.bfloat16()
    assert layers._grouped_mm(stand_in, tokens, weights, offs=ends) == ((tokens, weights), {"offs": ends})


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_runs_by_the_kernel_of_the_gpu(
    dtype: torch.dtype, mask: torch.dtype | None, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flash attention takes 16 bits and no mask. The other kernel gets a bias of each head in the queries' dtype."""
    called: list[tuple[str, tuple[Any, ...], Any]] = []

    def kernel(name: str) -> Any:
        def attention(*given: Any, scale: Any) -> Any:
            called.append((name, given, scale))
            return given[0], "statistics"

        return attention

    ops = SimpleNamespace(
        aten=SimpleNamespace(
            _scaled_dot_product_flash_attention=kernel("flash"),
            _scaled_dot_product_efficient_attention=kernel("efficient"),
        )
    )
    monkeypatch.setattr(torch, "ops", ops)
    query, key, value = (torch.full((2, 4, 3, 8), float(n), dtype=dtype) for n in range(3))
    shown = None if mask is None else torch.eye(3).bool().expand(2, 1, 3, 3).to(mask)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = layers._attention(query, key, value, shown, 0.25, is_causal=True, scale=0.5)
    ((name, given, scale),) = called
    computed = torch.bfloat16 if autocast else dtype
    assert name == ("flash" if mask is None and computed == torch.bfloat16 else "efficient")
    assert found.dtype == computed
    assert [float(one.mean()) for one in given[:3]] == [0.0, 1.0, 2.0]
    assert {one.dtype for one in given[:3]} == {computed}
    assert scale == 0.5
    if name == "flash":
        assert given[3:] == (0.25, True, False)
        return
    assert given[4:] == (True, 0.25, True)
    if mask is None:
        assert given[3] is None
    else:
        assert (given[3].shape, given[3].dtype) == ((2, 4, 3, 3), computed)
        assert given[3].untyped_storage().nbytes() == 2 * 3 * 3 * computed.itemsize, "heads share it"
        hidden = ~torch.eye(3).bool() if mask == torch.bool else torch.zeros(3, 3).bool()
        assert torch.equal(given[3][1, 2], torch.zeros(3, 3, dtype=computed).masked_fill(hidden, -torch.inf))


def test_a_forward_pass_without_gradients_keeps_no_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def efficient(query: Any, key: Any, value: Any, *given: Any, scale: Any) -> Any:
        asked.append((*given, scale))
        return (query,)

    ops = SimpleNamespace(aten=SimpleNamespace(_scaled_dot_product_efficient_attention=efficient))
    monkeypatch.setattr(torch, "ops", ops)
    states = torch.zeros(1, 1, 2, 4)
    with torch.no_grad():
        layers._attention(states, states, states)
    layers._attention(states, states, states)
    assert asked == [(None, gradient, 0.0, False, None) for gradient in (False, True)]
