"""Configurations of released models, tiny ones with the same features, and a comparison of the two.

A released configuration is the default of its class, with the keys in `RELEASED` where the defaults are not those of a
released checkpoint. A tiny one keeps every kind of layer, in the released order, every switch, and the relations of the
sizes: query heads per key head, the width of attention beside the hidden size, groups of experts. `lacks` finds what a
tiny configuration does not keep, without a list of what was meant to be kept.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import initialization as transformers_initialization
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support.recorded import WORDS

WINDOW = 64
"""Largest attention window of a tiny model, in tokens: shorter than the long rows, longer than the short ones."""

LONG_PROMPT = 100
"""Number of tokens that the prompts of long rows stay below."""

HIDDEN, HEAD_WIDTH, LAYERS = 32, 8, 4
"""Hidden size of a tiny model with four heads, channels of a head, and number of layers if few kinds need no more."""

MOST_QUERIES = 16
"""Largest number of query heads for each key head."""

ORIGINAL_POSITIONS = 32
"""Number of positions that a scaled rotary table of a tiny model was made for."""

POSITIONS = 160
"""Number of positions of a tiny model: those of a long prompt, its completion and the padding of the checks."""

SIZES: list[tuple[str, int]] = [
    (r"vocab", WORDS),
    (r"index_block_size", 16),
    (r"index_topk$|keep_window_size", WINDOW),
    (r"per_tok|topk|top_k|moe_k$|num_selected", 2),
    (r"experts$|expert_num$", 4),
    (r"head_dim|head_size|dim_head|d_head|kv_channels", HEAD_WIDTH),
    (r"heads?$", 4),
    (r"layers?$|num_blocks", 4),
    (r"rotary_dim", 4),
    (r"rank$", 8),
    (r"position|n_ctx|seq_len|context_length", POSITIONS),
    (r"window", WINDOW),
    (r"chunk", 16),
    (r"state", 8),
    (r"ffn|intermediate|dim_ff|dff|d_inner|n_inner|feed_forward|mid_dim", 48),
    (r"hidden|d_model|n_embd|emb_dim|embed_dim|embedding_size|embedding_dim|proj_dim|lru_width|adapter_", HIDDEN),
]
"""Sizes of a tiny model by the names of its configuration's keys. The first pattern found in a name counts."""

_QUERIES_AND_KEYS = (
    ("num_attention_heads", "num_key_value_heads"),
    ("swa_num_attention_heads", "swa_num_key_value_heads"),
    ("linear_num_value_heads", "linear_num_key_heads"),
)
"""Keys of a number of heads, and of the smaller number of heads that they share."""

_FIRST_LAYERS = ("first_k_dense_replace", "num_dense_layers")
_LAST_LAYERS = ("num_kv_shared_layers",)
"""Keys of a number of layers, counted from the first or from the last one, that differ from the others."""

_LAYER_INDICES = re.compile(r"(_ids|_indices|_idxs|_indexes|cross_attention_layers|moe_layers|mlp_only_layers)$")
"""Names of keys that hold the indices of layers."""

_ATTENTION_SCALES = ("attention_multiplier", "query_pre_attn_scalar")
"""Keys of the scale of attention that are made for the width of a head."""

_NEUTRAL = re.compile(
    r"attention_multiplier|query_pre_attn_scalar|embedding_scale$|drop|jitter|router_aux_loss_coef|init|std$|token_id"
    r"|version|use_cache|is_decoder|use_mamba_kernels|^mode$|vocab"
)
"""Names of keys that a comparison of gradients or tokens must set, whatever a released model has."""


def _pattern(*runs: tuple[str, int]) -> list[str]:
    """Return the kinds of layers of a model from runs of one kind."""
    return [kind for kind, count in runs for _ in range(count)]


def _attention_at(layers: int, indices: tuple[int, ...], other: str) -> list[str]:
    """Return the kinds of layers of a model with full attention at some indices."""
    return ["full_attention" if index in indices else other for index in range(layers)]


_SLIDING_3_TO_1 = _pattern(("sliding_attention", 3), ("full_attention", 1))
_GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "tie_word_embeddings": True}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
_INDEXER = {"n_heads": 16, "kv_heads": 1, "head_dim": 256, "budget": 2048, "compress_ratio": 4}
_QWEN4 = {f"indexer_{key}": value for key, value in _INDEXER.items()}
RELEASED: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "cohere_compass_text": {
        "layer_types": _SLIDING_3_TO_1 * 10,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 8, "rope_theta": 500000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
        "d_model": 6144,
        "n_heads": 48,
    },
    "deepseek_v2": {
        "hidden_size": 5120,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "first_k_dense_replace": 1,
        "n_routed_experts": 160,
        "num_experts_per_tok": 6,
        "n_group": 8,
        "topk_group": 3,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 16.0,
        "rope_parameters": _YARN,
    },
    "deepseek_v3": {"rope_parameters": _YARN},
    "dots1": {
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "gemma3_text": {
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "gemma4_text": {"num_kv_shared_layers": 10, "use_double_wide_mlp": True},
    "glm4_moe": {"head_dim": 128, "attention_bias": True},
    "granite": {**_GRANITE, "num_key_value_heads": 8, "attention_multiplier": 0.0078125, "logits_scaling": 16.0},
    "granitemoe": {**_GRANITE, "num_key_value_heads": 8, "attention_multiplier": 0.015625, "logits_scaling": 6.0},
    "granitemoehybrid": {
        **_GRANITE,
        "num_key_value_heads": 8,
        "attention_multiplier": 0.0078125,
        "logits_scaling": 16.0,
        "num_hidden_layers": 40,
        "layer_types": _attention_at(40, (5, 15, 25, 35), "linear_attention"),
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
    },
    "hunyuan_v1_dense": {"head_dim": 128, "num_key_value_heads": 8},
    "hunyuan_v1_moe": {"head_dim": 128, "num_key_value_heads": 8},
    "laguna": {
        "layer_types": _pattern(("full_attention", 1), ("sliding_attention", 3)) * 10,
        "num_attention_heads_per_layer": [48, 64, 64, 64] * 10,
    },
    "lfm2": {"num_hidden_layers": 16, "layer_types": _attention_at(16, (2, 5, 8, 10, 12, 14), "conv")},
    "lfm2_moe": {"num_hidden_layers": 24, "layer_types": _attention_at(24, (2, 6, 10, 14, 18, 21), "conv")},
    "llama": {
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "mellum": {"layer_types": _SLIDING_3_TO_1 * 7},
    "minimax_m3_vl_text": {
        "layer_types": _pattern(("full_attention", 3), ("minimax_m3_sparse", 57)),
        "mlp_layer_types": _pattern(("dense", 3), ("sparse", 57)),
    },
    "ministral": {
        "head_dim": 128,
        "num_hidden_layers": 36,
        "layer_types": _pattern(("full_attention", 1), ("sliding_attention", 3)) * 9,
    },
    "mistral": {"sliding_window": None},
    "mixtral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "phi3": {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "qwen2": {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28},
    "qwen3": {"num_key_value_heads": 8, "num_hidden_layers": 36},
    "qwen3_moe": {"num_hidden_layers": 48, "head_dim": 128, "norm_topk_prob": True},
    "qwen4_exp_text": _QWEN4,
    "starcoder2": {"sliding_window": 4096},
    "xmod": {"default_language": "en_XX"},
}
"""Keys by model type in which released checkpoints differ from the defaults of the configuration class.

The ten most trained types are Qwen3 8B, Qwen2.5 7B, Llama 3.1 8B, Qwen3.5, Qwen3 30B-A3B, Gemma 3 4B, gpt-oss,
Mistral 7B v0.3, Phi-4 and Qwen3-Next.
"""

_SHARED_TWICE = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_d_head": "auto"},
    "blenderbot": {"encoder_layers": 4},
    "blt_global_transformer": {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8},
    "blt_local_decoder": {"hidden_size_global": 64},
    "blt_local_encoder": {"hidden_size_global": 64},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 500000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        "d_model": 96,
        "n_heads": 12,
    },
    "deepseek_v4": {
        "head_dim": 16,
        "o_groups": 2,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    },
    "dots3_note_text": {
        "head_dim": 32,
        **{f"swa_{key}": 2 for key in ("num_attention_heads", "num_key_value_heads")},
        **{"swa_q_lora_rank": 8, "swa_kv_lora_rank": 16},
        **{"swa_head_dim": 32, "swa_qk_nope_head_dim": 24, "swa_v_head_dim": 8},
    },
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_head": "auto"},
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"mamba_d_head": "auto"},
    "hrm_text": {"num_layers_per_stack": 4, "num_hidden_layers": 32, "embedding_scale": 5.0},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2, "use_mamba_kernels": False},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 2},
    "qwen4_exp_text": {"ngram_vocab_size_base": WORDS, "indexer_budget": 16},
    "reformer": {
        "hidden_size": 32,
        "attention_head_size": 16,
        "axial_pos_shape": [10, 16],
        "axial_pos_embds_dim": [16, 16],
    },
    "xlstm": {"mode": "train"},
    "zamba": _SHARED_TWICE,
    "zamba2": _SHARED_TWICE,
}
"""Keys of tiny models that the patterns get wrong, by model type."""


def released(model_type: str) -> PreTrainedConfig:
    """Return the configuration of a model type's released checkpoints."""
    config_class = CONFIG_MAPPING[model_type]
    parts = {name: getattr(part, "model_type", "") for name, part in config_class.sub_configs.items()}
    made = {name: released(part) for name, part in parts.items() if part in RELEASED}
    return config_class(**{**made, **RELEASED.get(model_type, {})})


# ---- Tiny configurations


def tiny(model_type: str) -> PreTrainedConfig:
    """Return a tiny configuration with the features of the released ones, whose training is deterministic."""
    return _tiny(released(model_type))


def _tiny(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the tiny counterpart of a configuration, or of a part of one."""
    fields = [field.name for field in dataclasses.fields(config)]
    names = dict.fromkeys([*fields, *RELEASED.get(config.model_type, {})])
    sizes, kept = _related_sizes(config), _kept_layers(config)
    settings: dict[str, Any] = {}
    for name in names:
        value = _key(config, name)
        settings[name] = sizes[name] if name in sizes else _value(config, name, value, sizes, kept)
    return type(config)(**{**settings, **SPECIAL.get(config.model_type, {})})


def _key(config: PreTrainedConfig, name: str) -> Any:
    """Return the value of a key for all layers, or None. Asking for an attribute raises if layers differ in it."""
    name = (config.attribute_map or {}).get(name, name)
    values = vars(config)
    return values[name] if name in values else getattr(config, name, None)


def _value(config: PreTrainedConfig, name: str, value: Any, sizes: dict[str, int], kept: list[int]) -> Any:
    """Return the value of a key of a tiny configuration."""
    if isinstance(value, PreTrainedConfig):
        return _tiny(value)
    if isinstance(value, float) and re.search(r"drop|jitter|router_aux_loss_coef", name):
        return 0.0
    if name in ("initializer_range", "init_std"):
        # Far from uniform, and no further in a wider model: there, rounding would grow from layer to layer.
        return 0.2 * math.sqrt(HIDDEN / max(sizes.get("hidden_size", HIDDEN), HIDDEN))
    if name in _ATTENTION_SCALES and value is not None:
        # Small heads at the scale of large ones would attend to all tokens alike, and hide a wrong mask.
        narrower = _head_width(config) / HEAD_WIDTH
        return int(value / narrower) if name == "query_pre_attn_scalar" else min(value * narrower, 1.0)
    if name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        return {"pad_token_id": 0, "eos_token_id": 1}.get(name, None if value is None else 2)
    if name == "is_decoder":
        return True
    if name == "rope_parameters" and isinstance(value, Mapping):
        return _rope(value)
    if isinstance(value, list | tuple):
        return _of_layers(config, name, list(value), sizes, kept)
    if isinstance(value, int) and not isinstance(value, bool) and not name.endswith("_id"):
        return _size(config, name, value, sizes, kept)
    return value


def _related_sizes(config: PreTrainedConfig) -> dict[str, int]:
    """Return the numbers of heads and the hidden size of a tiny configuration, with the relations of the released."""
    sizes: dict[str, int] = {}
    for queries, keys in _QUERIES_AND_KEYS:
        count, shared = _key(config, queries), _key(config, keys)
        if isinstance(count, int) and isinstance(shared, int):
            grouped = 1 < shared < count
            sizes[queries] = 2 * min(count // shared, MOST_QUERIES) if grouped else 4
            sizes[keys] = 2 if grouped else min(shared, 4)
    heads, hidden = _key(config, "num_attention_heads"), _key(config, "hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and _key(config, "kv_lora_rank") is None:
        width = HEAD_WIDTH * sizes.get("num_attention_heads", 4)
        sizes["hidden_size"] = {0: width, 1: width // 2, -1: 2 * width}[_attention_beside_hidden(config)]
    if isinstance(_key(config, "qk_head_dim"), int):
        sizes["qk_head_dim"] = 2 * HEAD_WIDTH  # the sum of the part with positions and the one without
    return sizes | {(config.attribute_map or {}).get(name, name): size for name, size in sizes.items()}


def _head_width(config: PreTrainedConfig) -> int:
    """Return the number of channels of an attention head."""
    given = _key(config, "head_dim") or _key(config, "attention_head_size")
    return given or _key(config, "hidden_size") // _key(config, "num_attention_heads")


def _attention_beside_hidden(config: PreTrainedConfig) -> int:
    """Return 0 if the heads of attention are together as wide as the hidden size, 1 if wider, and -1 if narrower."""
    hidden, width = _key(config, "hidden_size"), _key(config, "num_attention_heads") * _head_width(config)
    return (width > hidden) - (width < hidden)


def _size(config: PreTrainedConfig, name: str, value: int, sizes: dict[str, int], kept: list[int]) -> int:
    """Return a size of a tiny configuration."""
    layers = _layers(config)
    if name in _FIRST_LAYERS:
        return sum(index < value for index in kept)
    if name in _LAST_LAYERS:
        return sum(index >= layers - value for index in kept)
    if re.search(r"layers?$|num_blocks", name) and value == layers:
        return len(kept)
    if re.search(r"^n_group$|num_expert_group$", name) and value > 1:
        return min(value, 4)
    if re.search(r"experts$", name) and value >= 8 and _expert_groups(config) > 1:
        return 8
    size = next((size for pattern, size in SIZES if re.search(pattern, name)), value)
    if size == HIDDEN and value == _key(config, "hidden_size"):
        size = sizes.get("hidden_size", size)
    return min(value, size)


def _expert_groups(config: PreTrainedConfig) -> int:
    """Return the number of groups of experts that a router chooses among."""
    return _key(config, "n_group") or _key(config, "num_expert_group") or 1


def _rope(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a tiny model: those of the released one, with fewer original positions."""
    rope: dict[str, Any] = {}
    for name, entry in value.items():
        if isinstance(entry, Mapping):
            rope[name] = _rope(entry)
        else:
            rope[name] = ORIGINAL_POSITIONS if name == "original_max_position_embeddings" else entry
    return rope


# ---- Layers


def _layers(config: PreTrainedConfig) -> int:
    """Return the number of layers, or 0 if the configuration does not say."""
    number = _key(config, "num_hidden_layers")
    return number if isinstance(number, int) else 0


def _of_layers(config: PreTrainedConfig, name: str, value: list[Any], sizes: dict[str, int], kept: list[int]) -> Any:
    """Return a list of a tiny configuration: of the kept layers, if it has an entry for each layer."""
    if _LAYER_INDICES.search(name) and all(isinstance(entry, int) for entry in value):
        return [place for place, index in enumerate(kept) if index in value]
    if len(value) != _layers(config):
        return value
    entries = [value[index] for index in kept]
    if name == "num_attention_heads_per_layer":
        return [sizes["num_key_value_heads"] * entry // _key(config, "num_key_value_heads") for entry in entries]
    sized = [isinstance(entry, int) and not isinstance(entry, bool) for entry in entries]
    return [
        _size(config, name, entry, sizes, kept) if is_size else entry
        for entry, is_size in zip(entries, sized, strict=True)
    ]


def _kept_layers(config: PreTrainedConfig) -> list[int]:
    """Return the indices of the layers that a tiny model keeps: one of each kind, and the first ones up to `LAYERS`."""
    kinds = layer_kinds(config)
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    kept = set(first.values())
    for index in range(len(kinds)):
        if len(kept) < LAYERS:
            kept.add(index)
    return sorted(kept)


def layer_kinds(config: PreTrainedConfig) -> list[tuple[tuple[str, str], ...]]:
    """Return what the configuration says of each layer: (key, value) pairs, in which a size is only its rank."""
    layers, said = _layers(config), []
    for name, value in sorted(config.to_dict().items()):
        if isinstance(value, list | tuple):
            said += [(name, entries) for entries in [_said_of_layers(name, list(value), layers)] if entries]
        elif name == "per_layer_config" and value:
            of_layer = {int(index): sorted(keys) for index, keys in value.items()}
            said.append((name, [" ".join(of_layer.get(index, [])) for index in range(layers)]))
        elif name in _FIRST_LAYERS and value:
            said.append((name, [str(index < value) for index in range(layers)]))
        elif name in _LAST_LAYERS and value:
            said.append((name, [str(index >= layers - value) for index in range(layers)]))
    return [tuple((name, entries[index]) for name, entries in said) for index in range(layers)]


def _said_of_layers(name: str, value: list[Any], layers: int) -> list[str]:
    """Return what a list of a configuration says of each layer, or an empty list if it says nothing of layers."""
    if _LAYER_INDICES.search(name) and all(isinstance(entry, int) for entry in value):
        return [str(index in value) for index in range(layers)]
    if len(value) != layers or any(isinstance(entry, list | dict) for entry in value):
        return []
    if name == "num_attention_heads_per_layer" or all(type(entry) is int and entry > 1 for entry in value):
        ranks = sorted(set(value))
        return [str(ranks.index(entry)) for entry in value]
    return [str(entry) for entry in value]


# ---- Features that a tiny configuration lacks


def lacks(full: PreTrainedConfig, small: PreTrainedConfig) -> list[str]:
    """Return the features of a released configuration that a tiny one does not have."""
    found = []
    if missing := set(layer_kinds(full)) - set(layer_kinds(small)):
        found.append("layers with " + ", ".join(sorted(" ".join(map("=".join, kind)) for kind in missing)))
    wanted, got = dict(_scalars(full.to_dict())), dict(_scalars(small.to_dict()))
    for name, value in wanted.items():
        other = got.get(name)
        if type(value) is int and type(other) is int:
            if min(value, 2) != min(other, 2):
                found.append(f"{name} {value} ({other})")
        elif other != value:
            found.append(f"{name} {value} ({other})")
    for part, one in _parts(full):
        other_part = dict(_parts(small)).get(part)
        if other_part is not None:
            found += [f"{part}{sentence}" for sentence in _relations(one, other_part)]
    return found


def _scalars(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers, switches and names of a configuration that a tiny one should have."""
    for name, value in settings.items():
        if name == "per_layer_config":
            continue  # the keys of each layer: `layer_kinds` has them
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{name}.")
        elif not isinstance(value, list | tuple) and not _NEUTRAL.search(str(name)):
            yield f"{prefix}{name}", value


def _parts(config: PreTrainedConfig, prefix: str = "") -> Iterator[tuple[str, PreTrainedConfig]]:
    """Yield a configuration and those inside it, with the prefix of their keys."""
    yield prefix, config
    for name in config.sub_configs:
        part = _key(config, name)
        if isinstance(part, PreTrainedConfig):
            yield from _parts(part, f"{prefix}{name}.")


def _relations(full: PreTrainedConfig, small: PreTrainedConfig) -> Iterator[str]:
    """Yield the relations of sizes that a tiny configuration does not have."""
    for queries, keys in _QUERIES_AND_KEYS:
        ratios = [_ratio(config, queries, keys) for config in (full, small)]
        if ratios[0] != ratios[1]:
            yield f"{queries} / {keys} = {ratios[0]} ({ratios[1]})"
    beside = [_attention_beside_hidden(config) if _ratio_known(config) else None for config in (full, small)]
    if beside[0] != beside[1]:
        yield "width of attention beside the hidden size"
    for name, value in small.to_dict().items():
        if re.search(r"window|index_topk$", name) and type(value) is int and value >= LONG_PROMPT:
            yield f"rows longer than {name}"


def _ratio(config: PreTrainedConfig, queries: str, keys: str) -> str:
    """Return the number of query heads for each key head, "all" for a single key head, or "" if there is none."""
    count, shared = _key(config, queries), _key(config, keys)
    if not isinstance(count, int) or not isinstance(shared, int):
        return ""
    return "all" if shared == 1 < count else f"{count / shared:g}"


def _ratio_known(config: PreTrainedConfig) -> bool:
    """Return True if a configuration has heads and a hidden size, and its heads are not those of latent attention."""
    sizes = (_key(config, "num_attention_heads"), _key(config, "hidden_size"))
    return all(isinstance(size, int) for size in sizes) and _key(config, "kv_lora_rank") is None


def is_limited(config: PreTrainedConfig) -> bool:
    """Return True if long rows leave a window or a chunk of a tiny model, or its layers carry states along them."""
    kinds = {value for kind in layer_kinds(config) for name, value in kind if name == "layer_types"}
    if kinds - {"full_attention"}:
        return True
    names = dict(_scalars(config.get_text_config().to_dict()))
    limits = re.compile(r"window|chunk|index_topk|index_block|state_size|d_state|conv_kernel|d_conv|^block_size")
    unlimited = re.compile(r"chunk_size_feed_forward|max_window_layers|pattern")
    return any(
        type(value) is int and value > 0 and limits.search(name) and not unlimited.search(name)
        for name, value in names.items()
    )


# ---- Modules that a tiny model lacks


def lacks_modules(full: PreTrainedModel, small: PreTrainedModel) -> list[str]:
    """Return the kinds of layers of a released model, by class and parameters, that a tiny one does not have."""
    found, made = [], _module_kinds(small)
    for place, kinds in _module_kinds(full).items():
        others = made.get(place, set())
        for name, parameters in sorted(kinds - others, key=str):
            missing = parameters - {parameter for _, some in others for parameter in some}
            described = ", ".join(sorted(missing)[:3]) or "another combination of parameters"
            found.append(f"{place}: {name} with {described}")
    return found


def _module_kinds(model: nn.Module) -> dict[str, set[tuple[str, frozenset[str]]]]:
    """Return the (class, parameter names) of the members of each list of modules, without the indices of layers."""
    kinds: dict[str, set[tuple[str, frozenset[str]]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            place = re.sub(r"\.\d+", "", name)
            for member in module:
                parameters = frozenset(re.sub(r"\.\d+", "", parameter) for parameter, _ in member.named_parameters())
                kinds.setdefault(place, set()).add((type(member).__name__, parameters))
    return kinds


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    """Return the model of a configuration without memory for its weights."""
    with torch.device("meta"), transformers_initialization.no_init_weights():
        return AutoModelForCausalLM.from_config(copy.deepcopy(config))


def all_lacks(model_type: str) -> list[str]:
    """Return what the tiny model of a type lacks of the released ones, in its configuration and in its modules."""
    full, small = released(model_type), tiny(model_type)
    return lacks(full, small) + lacks_modules(on_meta(_trainable(full)), on_meta(small))


def _trainable(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration whose model generates, if its class would be an encoder by default."""
    if hasattr(config, "is_decoder"):
        config = copy.deepcopy(config)
        config.is_decoder = True
    return config
