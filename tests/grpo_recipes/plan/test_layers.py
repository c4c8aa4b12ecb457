"""Measured bytes of decoder layers, compared to the byte with a meter of whole models of one and of two layers."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import GPT2Config, Lfm2Config, LlamaConfig, PretrainedConfig

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
