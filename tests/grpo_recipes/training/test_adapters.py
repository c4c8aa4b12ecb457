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
from safetensors.torch import load_file, save_file

from grpo_recipes.training import adapters
from grpo_recipes.training.adapters import adapter_tensors, gathered, load_adapter, with_its_base
from tests.support.errors import refused
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


def arguments(**changes: Any) -> Any:
    values = {"model_init_kwargs": {"dtype": "bfloat16"}, "trust_remote_code": False}
    return SimpleNamespace(**{**values, **changes}, distributed_state=SimpleNamespace(num_processes=1))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return the folder of an adapter whose base is in another folder."""
    model().save_pretrained(tmp_path / "base")
    policy = get_peft_model(model(), LoraConfig(**LORA, init_lora_weights=False))
    policy.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    policy.save_pretrained(tmp_path / "sft")
    return tmp_path / "sft"


def test_an_adapter_is_loaded_on_the_base_that_it_was_trained_on(saved: Path) -> None:
    args = arguments()
    policy: Any = with_its_base(str(saved), args)
    assert args.model_init_kwargs is None, "TRL would warn that it ignores them"
    assert policy.get_base_model().dtype == torch.bfloat16
    tensors = adapter_tensors(policy, "default")
    stored = load_file(saved / "adapter_model.safetensors")
    assert tensors.keys() == stored.keys()
    for name, tensor in tensors.items():
        assert tensor.requires_grad
        assert torch.equal(tensor, stored[name])
    for other, given in ((policy, args), (str(saved.parent), args), ("a/b", args), (str(saved), None)):
        assert with_its_base(other, given) is other


def test_under_zero3_the_adapter_has_the_dtype_of_its_base(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "is_deepspeed_zero3_enabled", lambda: True)
    weights = saved / "adapter_model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(weights).items()}, weights)
    policy: Any = with_its_base(str(saved), arguments())
    assert {tensor.dtype for tensor in adapter_tensors(policy, "default").values()} == {torch.bfloat16}


def test_the_arguments_of_the_base(monkeypatch: pytest.MonkeyPatch, saved: Path) -> None:
    """TRL's default, `device_map: auto`, would spread each rank's model over all GPUs."""
    found: dict[str, Any] = {}

    def base(name: str, **init: Any) -> Any:
        found.update(init, name=name)
        return model()

    monkeypatch.setattr(adapters, "create_model_from_path", base)
    for revision, processes, expected in (
        (None, 1, {"revision": "main", "device_map": "auto"}),
        ("v2", 2, {"revision": "v2", "device_map": None}),
    ):
        config: Any = SimpleNamespace(base_model_name_or_path="some/base", revision=revision)
        args = arguments(model_init_kwargs={"device_map": "auto"}, trust_remote_code=True)
        args.distributed_state.num_processes = processes
        load_adapter(str(saved), config, args, "model", num_labels=1)
        assert found == {**expected, "trust_remote_code": True, "num_labels": 1, "name": "some/base"}


def test_a_base_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for base in ("gone", "empty"):
        config: Any = SimpleNamespace(base_model_name_or_path=str(tmp_path / base), revision=None)
        with refused("`reward_model` sft", str(tmp_path / base), "`base_model_name_or_path`") as caught:
            load_adapter("sft", config, arguments(), "reward_model")
        assert "\n" not in str(caught.value)
