"""Sizes in a model's config.json: an error names file, key and value before transformers builds anything."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, GPT2Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grpo_recipes.checks.model_sizes import check_model_sizes, largest_position
from grpo_recipes.plan.memory import MemoryUnknown, load_shape
from grpo_rewards.errors import UserError
from tests.support import tiny


def change(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.save_policy(tmp_path / "model")


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"])
@pytest.mark.parametrize("value", [10**7, 10**12, "x", -4, 0, None, float("nan"), 4.5, True, [[1]], {"a": 1}])
def test_an_impossible_size_is_refused(model: Path, key: str, value: Any) -> None:
    path = change(model, **{key: value})
    with pytest.raises(UserError, match=re.escape(f"{path}: `{key}` is ")):
        check_model_sizes(str(model))


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"text_config": {"hidden_size": -4}}, "text_config.hidden_size"),
        ({"vision_config": {"num_hidden_layers": 10**7}}, "vision_config.num_hidden_layers"),
        ({"thinker_config": {"text_config": {"vocab_size": "x"}}}, "thinker_config.text_config.vocab_size"),
        ({"head_dim": 10**6}, "head_dim"),
        ({"num_experts": 10**7}, "num_experts"),
        ({"intermediate_size": [64] * 2000}, "intermediate_size"),
    ],
)
def test_sizes_of_nested_configurations_are_checked(model: Path, values: dict[str, Any], key: str) -> None:
    change(model, **values)
    with pytest.raises(UserError, match=f"`{re.escape(key)}` is "):
        check_model_sizes(str(model))


def test_the_size_names_of_an_architecture_are_checked(tmp_path: Path) -> None:
    tiny.policy(GPT2Config, n_layer=1, n_embd=8, n_head=1).save_pretrained(tmp_path)
    check_model_sizes(str(tmp_path))
    change(tmp_path, n_layer=10**7)
    with pytest.raises(UserError, match="`n_layer` is 10000000"):
        check_model_sizes(str(tmp_path))


@pytest.mark.parametrize("values", [{"vocab_size": 4_000_000}, {"intermediate_size": 10**6}, {"hidden_size": 2**17}])
def test_a_size_that_the_weights_cannot_hold_is_refused(model: Path, values: dict[str, int]) -> None:
    """`transformers` builds the modules of any size before it reports that the weights differ."""
    change(model, **values)
    with pytest.raises(UserError, match="more than the weights beside it can hold"):
        check_model_sizes(str(model))
    (model / "model.safetensors").unlink()
    check_model_sizes(str(model))  # another check reports that they are missing


@pytest.mark.parametrize(
    "key", ["num_experts", "num_local_experts", "n_routed_experts", "num_hidden_layers", "intermediate_size"]
)
def test_every_matrix_that_the_weights_must_hold_is_counted(model: Path, key: str) -> None:
    change(model, **{key: 1024})
    (model / "model.safetensors").write_bytes(b"x" * 2048)  # 16,384 weights of a bit: fewer than 1,024 rows
    assert json.loads((model / "config.json").read_text())["hidden_size"] == 32
    with pytest.raises(UserError, match=f"`{key}` 1,024 are more than the weights"):
        check_model_sizes(str(model))


@pytest.mark.parametrize(
    "key", ["num_key_value_heads", "head_dim", "moe_intermediate_size", "num_experts", "max_position_embeddings"]
)
def test_a_size_that_released_models_leave_empty_may_be_null_or_0_but_not_negative(model: Path, key: str) -> None:
    for value in (None, 0):
        change(model, **{key: value})
        check_model_sizes(str(model))
    change(model, **{key: -1})
    with pytest.raises(UserError, match=f"`{key}` is -1"):
        check_model_sizes(str(model))


def test_a_part_that_is_no_language_model_may_use_a_key_in_another_sense(model: Path) -> None:
    change(model, vision_config={"hidden_size": 0, "num_hidden_layers": [0, 0], "vocab_size": "none"})
    check_model_sizes(str(model))
    for part in ("text_config", "decoder"):
        path = change(model, vision_config={}, **{part: {"hidden_size": 0}})
        with pytest.raises(UserError, match=f"`{part}.hidden_size` is 0"):
            check_model_sizes(str(model))
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != part}))


def test_the_largest_position_is_that_of_the_language_model_whatever_its_part(model: Path, tmp_path: Path) -> None:
    change(model, max_position_embeddings=512, vision_config={"max_position_embeddings": 4096})
    assert largest_position(str(model)) == 4096
    change(model, max_position_embeddings=8192)
    assert largest_position(str(model)) == 8192
    change(model, max_position_embeddings=None, vision_config={})
    assert largest_position(str(model)) is None
    assert largest_position(str(tmp_path / "nothing")) is None


def test_an_adapter_beside_a_copy_of_the_configuration_of_its_base_passes(model: Path) -> None:
    """Some trainers save both. The adapter's few weights do not limit the sizes of the base."""
    (model / "model.safetensors").rename(model / "adapter_model.safetensors")
    (model / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "elsewhere"}))
    change(model, vocab_size=4_000_000)
    check_model_sizes(str(model))
    change(model, vocab_size=10**7)
    with pytest.raises(UserError, match="`vocab_size` is 10000000"):
        check_model_sizes(str(model))


@pytest.mark.slow
def test_every_architecture_of_transformers_passes_with_its_own_sizes(tmp_path: Path) -> None:
    checked = 0
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[model_type]()
        except Exception:  # an architecture without defaults
            continue
        (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
        check_model_sizes(str(tmp_path))
        checked += 1
    assert checked > 100


def test_a_model_without_a_configuration_is_not_checked(tmp_path: Path) -> None:
    check_model_sizes(str(tmp_path))
    check_model_sizes("organisation/that-is-not-in-the-cache")


@pytest.mark.parametrize(
    "values", [{"hidden_act": "zz"}, {"model_type": ["a"]}, {"rope_parameters": 5}, {"dtype": "x"}]
)
def test_the_memory_of_a_model_that_cannot_be_built_is_unknown(model: Path, values: dict[str, Any]) -> None:
    change(model, **values)
    with pytest.raises(MemoryUnknown):
        load_shape(str(model))
    with pytest.raises(UserError):
        load_shape(str(change(model, num_hidden_layers=10**7)))
