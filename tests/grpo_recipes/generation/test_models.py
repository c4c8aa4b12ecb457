"""Facts that are read from a model before it generates or is packed, and parts that are replaced for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.utils.import_utils import enable_tf32

from grpo_recipes.generation import models
from grpo_recipes.generation.models import (
    _float32_settings,
    cache_argument,
    computes_in_float32,
    describe_dropout,
    dropout_rates,
    eval_no_grad,
    full_float32_products,
    in_float32,
    kept_scores,
    method_replaced,
    scaled_by_position,
    unfit,
)
from tests.support.errors import refused


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"rope_parameters": None}, None),
        ({"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
        ({"rope_parameters": {"llama_4_scaling_beta": 0.0}}, None),
        ({"rope_parameters": {"full": {"llama_4_scaling_beta": 0.1}, "sliding": {}}}, "llama_4_scaling_beta"),
        ({"model_type": "beam", "rope_parameters": {"full": None, "sliding": {}}}, "scalable softmax"),
        ({"model_type": "other", "rope_parameters": {"full": None}}, None),
        ({"attn_temperature_tuning": True}, "attn_temperature_tuning"),
        ({"attn_temperature_tuning": False, "log_scaling_n_floor": 8}, "log_scaling_n_floor"),
    ],
    ids=str,
)
def test_attention_that_is_scaled_by_position(config: dict[str, Any], name: str | None) -> None:
    assert scaled_by_position(SimpleNamespace(**config)) == name


def test_the_scores_that_attention_keeps() -> None:
    assert kept_scores(SimpleNamespace(index_topk=4, keep_window_size=7)) == ("index_topk", 4)
    assert kept_scores(SimpleNamespace(index_topk=0)) == ("", float("inf"))


class Attention(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.attention_dropout, self.scale, self.layerdrop_at = rate, 0.5, 3


def test_dropout_is_found_in_modules_and_in_numbers_of_other_layers() -> None:
    policy = nn.ModuleDict({"a": nn.Dropout(0.1), "b": nn.Dropout(0.0), "c": Attention(0.2), "d": Attention(0.0)})
    assert [(path, name) for path, _, name in dropout_rates(policy)] == [("a", "p"), ("c", "attention_dropout")]


@pytest.mark.parametrize("rate", [0.05, 0.0])
def test_the_dropout_of_an_adapter_alone_is_switched_off_by_its_own_key(rate: float) -> None:
    layer = nn.ModuleDict({"lora_dropout": nn.ModuleDict({"default": nn.Dropout(0.1)}), "attention": Attention(rate)})
    assert f"`{'disable_dropout: true' if rate else 'lora_dropout: 0'}`" in describe_dropout(layer)


def test_a_policy_with_dropout_is_not_decoded_in_groups() -> None:
    policy: Any = nn.ModuleDict({"drop": nn.Dropout(0.1)})
    for training, rate, reason in ((False, 0.1, ""), (True, 0.0, ""), (True, 0.1, "`disable_dropout: true`")):
        policy.train(training)["drop"].p = rate
        assert reason in unfit(policy)
        assert bool(unfit(policy)) == bool(reason)


def test_4_bit_weights_are_not_repacked() -> None:
    layer = nn.Linear(1, 1)
    layer.support_avx512bf16_for_cpu = True  # type: ignore[assignment]
    policy = nn.Sequential(nn.ReLU(), layer)
    models.keep_4bit_layout(policy)
    assert layer.support_avx512bf16_for_cpu is False
    layer.weight.quant_state = SimpleNamespace(packing_format_for_cpu=True)  # type: ignore[attr-defined]
    with refused("model", "4-bit"):
        models.keep_4bit_layout(policy)


def test_methods_and_modes_are_restored() -> None:
    policy = nn.Sequential(nn.Dropout(0.1), nn.Linear(1, 1))
    policy[1].eval()
    own = policy.own = lambda: "own"  # type: ignore[assignment]
    with (
        suppress(RuntimeError),
        method_replaced(policy, "extra_repr", lambda: "x"),
        method_replaced(policy, "own", print),
    ):
        assert policy.extra_repr() == "x"
        raise RuntimeError
    assert "extra_repr" not in vars(policy)
    assert vars(policy)["own"] is own
    with suppress(RuntimeError), eval_no_grad(policy):
        assert not any(module.training for module in policy.modules())
        assert not torch.is_grad_enabled()
        raise RuntimeError
    assert [module.training for module in policy.modules()] == [True, True, False]
    assert torch.is_grad_enabled()


def test_16_bit_weights_are_float32_copies_inside_and_the_same_objects_afterwards() -> None:
    policy = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).bfloat16()
    policy[1].weight = policy[0].weight  # tied
    policy[1].bias.requires_grad_(False)
    policy.register_buffer("counts", torch.ones(1, dtype=torch.long))
    policy.register_buffer("table", torch.ones(1, dtype=torch.float16))
    policy[0].bias.data = policy[0].bias.data.float()
    before = [*policy.parameters(), *policy.buffers()]
    stock, wrapped = policy.forward, lambda given: "autocast"
    vars(policy).update(forward=wrapped, _original_forward=stock)
    accelerator: Any = SimpleNamespace(native_amp=True, device=torch.device("cpu"))
    with suppress(RuntimeError), torch.autocast("cpu", torch.bfloat16), in_float32(policy, accelerator):
        assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
        assert policy[0].weight is policy[1].weight
        assert (policy[0].weight.requires_grad, policy[1].bias.requires_grad) == (True, False)
        assert (policy.table.dtype, policy.counts.dtype) == (torch.float32, torch.int64)
        assert policy[0].bias is before[1], "it is float32 already"
        assert accelerator.native_amp is False
        assert vars(policy)["forward"] is stock
        assert not torch.is_autocast_enabled("cpu")
        raise RuntimeError
    after = [*policy.parameters(), *policy.buffers()]
    assert [id(one) for one in before] == [id(one) for one in after]
    assert accelerator.native_amp is True
    assert vars(policy)["forward"] is wrapped


@pytest.fixture
def precision() -> Iterator[None]:
    """Restore torch's settings of float32 products after the test."""
    yield
    torch.set_float32_matmul_precision("highest")
    for setting in _float32_settings():
        setting.fp32_precision = "none"
    if _float32_settings():
        torch.backends.fp32_precision = "none"


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("tf32", [lambda: enable_tf32(True), lambda: torch.set_float32_matmul_precision("high")])
def test_tf32_products_are_full_float32_inside_and_tf32_afterwards(tf32: Callable[[], None]) -> None:
    policy, gpu = nn.Linear(2, 2), torch.device("cuda")
    tf32()
    assert computes_in_float32(policy, torch.device("cpu"))
    for _ in range(2):
        assert not computes_in_float32(policy, gpu)
        with suppress(RuntimeError), full_float32_products():
            assert computes_in_float32(nn.Sequential(policy, nn.Conv1d(2, 2, 1)), gpu)
            raise RuntimeError
    assert not computes_in_float32(policy.half(), gpu)


@pytest.mark.usefixtures("precision")
@pytest.mark.skipif(not _float32_settings(), reason="torch before 2.9 has one setting for all products")
def test_an_inherited_precision_is_inherited_again() -> None:
    """A later run in the same process may switch `tf32` off."""
    enable_tf32(True)
    with full_float32_products():
        pass
    enable_tf32(False)
    assert computes_in_float32(nn.Linear(2, 2), torch.device("cuda"))


def test_a_cache_is_given_under_the_name_that_the_model_has_for_it() -> None:
    class Mamba(nn.Module):
        def forward(self, input_ids: Any, cache_params: Any = None) -> None: ...

    class Wrapper(nn.Module):
        def forward(self, **kwargs: Any) -> None: ...

    assert [cache_argument(model()) for model in (Mamba, Wrapper)] == ["cache_params", "past_key_values"]
