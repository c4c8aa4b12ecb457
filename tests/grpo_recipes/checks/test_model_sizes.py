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


@pytest.mark.one_case_in(3)
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


ROOT = Path(__file__).parents[3]
ROW = re.compile(r"\| (`[a-z_`, ]+`) \| ([0-9,]+) \| (yes|no) \| (yes|no) \|")
LIMITS = [
    (key, int(limit.replace(",", "")), optional == "yes", per_layer == "yes")
    for keys, limit, optional, per_layer in ROW.findall((ROOT / "docs" / "security.md").read_text())
    for key in re.findall("[a-z_]+", keys)
]


def is_accepted(folder: Path, **values: Any) -> bool:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    try:
        check_model_sizes(str(folder))
    except UserError:
        return False
    return True


def test_the_limits_are_those_that_the_documentation_names(tmp_path: Path) -> None:
    assert len(LIMITS) == 12
    for key, most, optional, per_layer in LIMITS:
        assert not is_accepted(tmp_path, **{key: True})
        for value, is_fine in {1: True, most: True, most + 1: False, 0: optional, None: optional, -1: False}.items():
            assert is_accepted(tmp_path, **{key: value}) is is_fine, (key, value)
        lists = {(1, most): True, (most, most + 1): False, (0,): optional, (1,) * 1024: True, (1,) * 1025: False}
        for values, is_fine in lists.items():
            assert is_accepted(tmp_path, **{key: list(values)}) is (is_fine and per_layer), (key, values[:2])


PUBLISHED = {
    "vocab_size": 262_208, "hidden_size": 18_432, "num_hidden_layers": 126, "num_attention_heads": 128,
    "num_key_value_heads": 128, "head_dim": 576, "intermediate_size": 73_728, "num_experts": 512,
    "n_routed_experts": 384, "moe_intermediate_size": 14_336, "num_local_experts": 128,
    "max_position_embeddings": 10_485_760,
}  # fmt: skip
"""Largest values among Gemma 3, Nemotron 4, Llama 3.1 and 4, Qwen3-Next, Kimi K2, Snowflake Arctic and gpt-oss."""


def test_the_limits_are_several_times_the_sizes_of_published_models() -> None:
    assert set(PUBLISHED) == {key for key, *_ in LIMITS}
    for key, most, _, _ in LIMITS:
        assert 4 < most / PUBLISHED[key] < 1000, key


def test_in_another_part_only_numbers_above_the_limit_are_refused(tmp_path: Path) -> None:
    for values, is_fine in (
        ({"hidden_size": 2**17}, True), ({"hidden_size": 2**17 + 1}, False), ({"hidden_size": 1e30}, False),
        ({"hidden_size": [2**17, "x", None]}, True), ({"hidden_size": [1, 2**17 + 1]}, False),
        ({"hidden_size": [0] * 1024}, True), ({"hidden_size": [0] * 1025}, False), ({"hidden_size": True}, True),
    ):  # fmt: skip
        for nested in ({"vision_config": values}, {"audio_config": {"encoder": values}}):
            assert is_accepted(tmp_path, **nested) is is_fine, nested


def test_beside_a_text_config_the_outer_sizes_are_another_part(tmp_path: Path) -> None:
    assert not is_accepted(tmp_path, hidden_size=0)
    for part in ("text_config", "decoder"):
        assert is_accepted(tmp_path, **{part: {}, "hidden_size": 0})
        assert not is_accepted(tmp_path, **{part: {}, "hidden_size": 10**9})
        assert not is_accepted(tmp_path, **{part: "a name", "hidden_size": 0})
        assert not is_accepted(tmp_path, thinker_config={part: {"hidden_size": 0}})


def test_an_architecture_that_is_not_known_has_the_usual_names(tmp_path: Path) -> None:
    for model_type in ("of-tomorrow", None, ["llama"], 3):
        assert is_accepted(tmp_path, model_type=model_type, n_layer=10**7, hidden_size=8)
        assert not is_accepted(tmp_path, model_type=model_type, hidden_size=0)
    assert not is_accepted(tmp_path, model_type="gpt2", n_embd=0)


@pytest.mark.parametrize(
    ("values", "rows", "name"),
    [
        ({"vocab_size": 1024}, 1024, "vocab_size"),
        ({"num_experts": 1024}, 1024, "num_experts"),
        ({"intermediate_size": [8, 1024, 8]}, 1024, "intermediate_size"),
        ({"head_dim": 32, "num_attention_heads": 32}, 1024, "head_dim"),
        ({"intermediate_size": [], "num_hidden_layers": 900}, 900, "num_hidden_layers"),
        ({"num_hidden_layers": 900, "head_dim": None, "num_attention_heads": 32}, 900, "num_hidden_layers"),
    ],
)
@pytest.mark.parametrize("part", ["", "text_config."])
def test_each_byte_of_the_weights_holds_8_of_them(
    values: dict[str, Any], rows: int, name: str, part: str, tmp_path: Path
) -> None:
    """A matrix has a row of `hidden_size` weights for each token, layer, expert or head dimension."""
    config = {"hidden_size": 32, **values}
    config = {"hidden_size": 8, "text_config": config} if part else config
    (tmp_path / "model.safetensors").write_bytes(bytes(rows * 32 // 8))
    assert is_accepted(tmp_path, **config)
    (tmp_path / "model.safetensors").write_bytes(bytes(rows * 32 // 8 - 1))
    with pytest.raises(UserError, match=rf"config.json: `{part}hidden_size` 32 and `{name}` "):
        check_model_sizes(str(tmp_path))
    check_model_sizes(str(tmp_path / "config.json"))  # a configuration that is named itself belongs to no weights


def test_the_weights_of_all_shards_are_counted(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for shard in index["weight_map"].values():
        (tmp_path / shard).write_bytes(bytes(2048))
    assert is_accepted(tmp_path, hidden_size=32, vocab_size=1024)
    assert not is_accepted(tmp_path, hidden_size=32, vocab_size=1025)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()  # another check reports it
    assert is_accepted(tmp_path, hidden_size=32, vocab_size=1025)


def test_the_named_revision_is_looked_up_on_the_hub_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    seen: list[tuple[Any, ...]] = []

    def cached_file(name: str, file: str, *, revision: str, local_files_only: bool) -> str | None:
        seen.append((name, file, revision, local_files_only))
        if name == "org/gone":
            raise OSError("no such model")
        return None if name == "org/empty" else str(tmp_path / "config.json")

    monkeypatch.setattr("transformers.utils.cached_file", cached_file)
    check_model_sizes("org/model")
    check_model_sizes("org/model", "v2", local_only=False)
    assert largest_position("org/model", "v3") == 64
    assert [one[1:] for one in seen] == [
        ("config.json", "main", True), ("config.json", "v2", False), ("config.json", "v3", True)
    ]  # fmt: skip
    for name in ("org/gone", "org/empty"):
        assert largest_position(name) is None


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
