"""Adapters of a policy: their tensors, also where ZeRO-3 partitions them, and how they are loaded."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model

from grpo_recipes.training import adapters
from grpo_recipes.training.adapters import adapter_dtype_kept, adapter_tensors, gathered, load_adapter, with_its_base
from grpo_rewards.errors import UserError
from tests.support.recorded import model

LORA: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}


def test_tensors_are_named_without_the_adapter_wherever_its_name_stands() -> None:
    policy = get_peft_model(model(), LoraConfig(**LORA, modules_to_save=["lm_head"]), adapter_name="policy")
    policy.add_adapter("other", LoraConfig(**LORA))
    found = adapter_tensors(policy, "policy")
    layers = [f"base_model.model.model.layers.{n}.self_attn.q_proj.lora_{side}.weight" for n in (0, 1) for side in "AB"]
    assert sorted(found) == sorted([*layers, "base_model.model.lm_head.modules_to_save.weight"])
    assert sorted(adapter_tensors(policy, "other")) == sorted(layers)
    assert found[layers[0]] is policy.base_model.model.model.layers[0].self_attn.q_proj.lora_A["policy"].weight
    ia3 = get_peft_model(model(), IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[]))
    names = [f"base_model.model.model.layers.{n}.self_attn.k_proj.ia3_l" for n in (0, 1)]
    assert list(adapter_tensors(ia3, "default")) == names


@pytest.mark.parametrize(("write", "rank"), [(True, 0), (False, None)])
def test_only_partitioned_tensors_are_gathered(write: bool, rank: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    @contextmanager
    def gather(tensors: Any, modifier_rank: Any) -> Any:
        calls.append((tensors, modifier_rank))
        yield
        calls.append("left")

    deepspeed = ModuleType("deepspeed")
    deepspeed.zero = SimpleNamespace(GatheredParameters=gather)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    plain, split = torch.zeros(1), torch.zeros(0)
    with gathered([plain, None], write=write):
        pass
    assert calls == []
    split.ds_id = 4  # type: ignore[attr-defined]
    with gathered([plain, None, split], write=write):
        assert len(calls) == 1
    assert calls == [([split], rank), "left"]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what is loaded: the base and its arguments, and those of the adapter."""
    found: dict[str, Any] = {"zero3": False}

    def base(name: str, **init: Any) -> str:
        found["base"], found["init"] = name, init
        if "error" in found:
            raise found["error"]
        return "the base"

    def adapter(base: Any, name: str, **options: Any) -> str:
        found["adapter"] = (base, name, options)
        return "the policy"

    monkeypatch.setattr(adapters, "create_model_from_path", base)
    monkeypatch.setattr(adapters.PeftModel, "from_pretrained", adapter)
    monkeypatch.setattr(adapters, "is_deepspeed_zero3_enabled", lambda: found["zero3"])
    return found


def arguments(processes: int = 1, **changes: Any) -> Any:
    values = {"model_init_kwargs": {"dtype": "float32", "device_map": "auto"}, "trust_remote_code": True}
    return SimpleNamespace(**{**values, **changes}, distributed_state=SimpleNamespace(num_processes=processes))


def test_an_adapter_is_loaded_on_the_base_that_it_was_trained_on(loads: dict[str, Any]) -> None:
    config: Any = SimpleNamespace(base_model_name_or_path="some/base", revision=None)
    args = arguments()
    assert load_adapter("sft", config, args, "model", revision="r1", num_labels=1) == "the policy"
    assert loads["base"] == "some/base"
    assert loads["init"] == {
        **{"dtype": "float32", "device_map": "auto", "revision": "main", "trust_remote_code": True, "num_labels": 1}
    }
    assert args.model_init_kwargs is None
    options = {"is_trainable": True, "revision": "r1", "autocast_adapter_dtype": True}
    assert loads["adapter"] == ("the base", "sft", options)
    config.revision, loads["zero3"] = "v2", True
    load_adapter("sft", config, arguments(2, model_init_kwargs=None, trust_remote_code=False), "model")
    assert loads["init"] == {"revision": "v2", "trust_remote_code": False, "device_map": None}
    options = {"is_trainable": True, "revision": None, "autocast_adapter_dtype": False}
    assert loads["adapter"] == ("the base", "sft", options)


@pytest.mark.parametrize("error", [OSError("no such\nfolder"), ValueError("no such\nfolder")])
def test_a_base_that_cannot_be_loaded_is_named(error: Exception, loads: dict[str, Any]) -> None:
    loads["error"] = error
    config: Any = SimpleNamespace(base_model_name_or_path="some/base", revision=None)
    with pytest.raises(UserError) as caught:
        load_adapter("sft", config, arguments(), "reward_model")
    assert str(caught.value) == (
        "`reward_model` sft is an adapter, and its base some/base can't be loaded: set `base_model_name_or_path` in "
        "its adapter_config.json (no such folder)"
    )


def test_a_folder_of_an_adapter_becomes_a_model_and_all_else_stays(loads: dict[str, Any], tmp_path: Path) -> None:
    policy = get_peft_model(model(), LoraConfig(**LORA))
    policy.peft_config["default"].base_model_name_or_path = "some/base"
    folder = str(tmp_path / "adapter")
    policy.peft_config["default"].save_pretrained(folder)
    for other, args in ((policy, arguments()), (str(tmp_path), arguments()), ("a/b", arguments()), (folder, None)):
        assert with_its_base(other, args) is other
    assert "base" not in loads
    assert with_its_base(folder, arguments()) == "the policy"
    assert loads["base"] == "some/base"
    assert loads["adapter"][1] == folder


def test_weights_of_a_checkpoint_keep_the_dtype_of_the_adapter(tmp_path: Path) -> None:
    policy = get_peft_model(model(), LoraConfig(**LORA))
    policy.save_pretrained(tmp_path / "saved")
    policy.bfloat16()
    with adapter_dtype_kept(policy):
        policy.load_adapter(str(tmp_path / "saved"), "default")
    assert {tensor.dtype for tensor in adapter_tensors(policy, "default").values()} == {torch.bfloat16}
    policy.load_adapter(str(tmp_path / "saved"), "again")
    assert {tensor.dtype for tensor in adapter_tensors(policy, "again").values()} == {torch.float32}
    with adapter_dtype_kept(full := model()):
        assert "load_adapter" not in vars(full)
