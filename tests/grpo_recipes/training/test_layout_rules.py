"""Layouts that settings and models allow, decided without a computation."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import transformers
from peft import LoraConfig, PromptTuningConfig
from torch import nn

from grpo_recipes.training import layout_rules
from grpo_recipes.training.layout_rules import FSDP1, FSDP2, ZERO3, LayoutRules
from grpo_recipes.training.packing import Layout
from tests.support.layouts import SCALED_BY_POSITION, TARGETS, adapted, named, settings
from tests.support.recorded import model
from tests.tools.models import build

PADDED, SHARED_PADDED, TRIMMED, SHARED, PACKED = Layout


def test_what_a_model_allows() -> None:
    models = {
        "llama": model(transformers.LlamaConfig),
        "bloom": model(transformers.BloomConfig, n_head=4, n_layer=2, attn_implementation="eager"),
        "dropout": model(transformers.LlamaConfig, attention_dropout=0.1),
        "lfm2": build("lfm2"),  # verified under sharding
        "scaled": named(SCALED_BY_POSITION["llama_4_scaling_beta"]),
        "softmax": named(SCALED_BY_POSITION["scalable softmax"]),
    }
    table = [
        *[("llama", wanted, "", wanted) for wanted in Layout],
        ("bloom", PACKED, "", SHARED), ("bloom", SHARED, "", SHARED), ("lfm2", PACKED, "", SHARED),
        ("dropout", PACKED, "", TRIMMED), ("dropout", SHARED, "", TRIMMED), ("dropout", SHARED_PADDED, "", PADDED),
        ("dropout", TRIMMED, "", TRIMMED),
        ("llama", PACKED, ZERO3, PACKED), ("llama", SHARED, ZERO3, TRIMMED), ("bloom", PACKED, ZERO3, TRIMMED),
        ("lfm2", PACKED, FSDP2, SHARED), ("lfm2", PACKED, ZERO3, SHARED), ("lfm2", PACKED, FSDP1, TRIMMED),
        *[("scaled", wanted, "", SHARED_PADDED) for wanted in (PACKED, SHARED, SHARED_PADDED)],
        ("softmax", PACKED, "", SHARED_PADDED), ("scaled", TRIMMED, "", PADDED), ("scaled", PACKED, ZERO3, PADDED),
    ]  # fmt: skip
    for name, wanted, sharding, expected in table:
        found, reason = LayoutRules(settings()).allowed(models[name], wanted, sharding)
        assert (name, wanted, sharding, found) == (name, wanted, sharding, expected)
        assert reason or found is wanted
    assert LayoutRules(settings(), router_loss=True).allowed(models["scaled"], PACKED, "")[0] is PADDED


def test_settings_that_keep_rows_padded_or_unshared() -> None:
    policy = model()
    for rules, layout, key in (
        (LayoutRules(settings(pad_to_multiple_of=8)), PADDED, "pad_to_multiple_of"),
        (LayoutRules(settings(neftune_noise_alpha=0.0)), PADDED, "neftune_noise_alpha"),
        (LayoutRules(settings(), padded_because="full KL"), PADDED, "full KL"),
        (LayoutRules(settings(), router_loss=True), TRIMMED, "router loss"),
        (LayoutRules(settings(torch_compile=True)), TRIMMED, "torch.compile"),
    ):
        found, reason = rules.allowed(policy, PACKED, "")
        assert found is layout
        assert key in reason


def test_adapters_and_compiled_models_that_share_no_prompt() -> None:
    rules = LayoutRules(settings())
    assert rules.unshared(adapted(LoraConfig(r=2, **TARGETS))) == ""
    compiled = [model(), model(), model()]
    compiled[0].model = torch.compile(compiled[0].model)
    compiled[1].compile()
    compiled[2].model.layers[1].compile()
    for policy, word in (
        (adapted(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)), "virtual tokens"),
        (adapted(LoraConfig(r=2, **TARGETS, alora_invocation_tokens=[7])), "invocation tokens"),
        (adapted(LoraConfig(r=2, **TARGETS, lora_dropout=0.1)), "dropout"),
        *[(policy, "compiled") for policy in compiled],
    ):
        assert word in rules.unshared(policy)


def test_how_weights_are_split_is_read_from_modules_and_parameters() -> None:
    plain, zero3, fsdp1, fsdp2 = (nn.Sequential(nn.Linear(1, 1)) for _ in range(4))
    zero3[0].weight.ds_id = 3  # type: ignore[assignment]
    fsdp1[0]._fsdp_wrapped_module = nn.Linear(1, 1)
    fsdp2.append(type("Split", (nn.Linear, layout_rules.FSDPModule), {"__new__": object.__new__})(1, 1))
    found = [layout_rules.sharding_of(policy) for policy in (plain, zero3, fsdp1, fsdp2)]
    assert found == ["", ZERO3, FSDP1, FSDP2]


def test_a_sliding_window_counts_only_if_a_layer_uses_it() -> None:
    mixed, full = ["sliding_attention", "full_attention"], ["full_attention"]
    for kinds, window in ((None, 8), (mixed, 8), (full, None), ([], None)):
        assert layout_rules.attention_window(SimpleNamespace(sliding_window=8, layer_types=kinds)) == window
