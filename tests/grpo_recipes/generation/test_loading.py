"""Weights that lack a tensor: refused wherever a trainer loads a policy, an adapter or a reward model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from grpo_recipes import GRPOTrainer
from grpo_recipes.generation.loading import complete_weights
from tests.support import short_runs
from tests.support.errors import refused
from tests.support.tiny import save_policy, save_reward_model

DOWN = "model.layers.0.mlp.down_proj.weight"

Tensors = dict[str, torch.Tensor]


def changed(folder: Path, change: Callable[[Tensors], object], file: str = "model.safetensors") -> str:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, {"format": "pt"})
    return str(folder)


def trained(model: object, tmp_path: Path, **more: object) -> GRPOTrainer:
    arguments = short_runs.arguments(tmp_path / "out", beta=0.0, model_init_kwargs={"dtype": "float32"})
    made: Any = short_runs.trainer(GRPOTrainer, model, arguments, **more)
    return cast(GRPOTrainer, made)


def narrow(tensors: Tensors) -> None:
    tensors[DOWN] = tensors[DOWN][:, :-1].contiguous()


def renamed(tensors: Tensors) -> None:
    tensors["other.weight"] = tensors.pop(DOWN)


@pytest.mark.parametrize(
    ("change", "figures"),
    [
        (lambda tensors: tensors.pop(DOWN), [1, DOWN]),
        (narrow, [1, DOWN, (32, 63), (32, 64)]),
        (renamed, [1, DOWN, "other.weight"]),
    ],
)
def test_a_policy_of_which_a_tensor_is_missing_is_refused(
    change: Callable[[Tensors], object], figures: list[object], tmp_path: Path
) -> None:
    name, stock = changed(save_policy(tmp_path / "policy"), change), vars(PreTrainedModel)["from_pretrained"]
    with refused(name, *figures):
        trained(name, tmp_path)
    assert vars(PreTrainedModel)["from_pretrained"] is stock


def test_an_unexpected_tensor_is_listed_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = changed(save_policy(tmp_path / "policy"), lambda tensors: tensors.update({"mtp.norm": torch.ones(2)}))
    with caplog.at_level(logging.WARNING):
        trained(name, tmp_path)
    (sentence,) = [record.message for record in caplog.records if "mtp.norm" in record.message]
    assert sentence.startswith(name)


def test_tied_weights_are_complete(tmp_path: Path) -> None:
    folder = save_policy(tmp_path / "policy", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    with complete_weights():
        model = LlamaForCausalLM.from_pretrained(folder)
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_an_adapter_and_its_base_are_complete(tmp_path: Path) -> None:
    base = save_policy(tmp_path / "base")
    short_runs.adapted(base, LoraConfig(task_type="CAUSAL_LM"), continued=True).save_pretrained(
        str(tmp_path / "adapter")
    )
    assert isinstance(trained(str(tmp_path / "adapter"), tmp_path).model, PeftModel)
    whole = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    changed(tmp_path / "adapter", lambda tensors: tensors.popitem(), "adapter_model.safetensors")
    with refused(tmp_path / "adapter", "lora_"):
        trained(str(tmp_path / "adapter"), tmp_path)
    save_file(whole, tmp_path / "adapter" / "adapter_model.safetensors")
    changed(base, lambda tensors: tensors.pop(DOWN))
    with refused(base, 1, DOWN):
        trained(str(tmp_path / "adapter"), tmp_path)


def test_a_reward_model_without_a_trained_head_is_refused(tmp_path: Path) -> None:
    model = save_policy(tmp_path / "policy")

    def built(head: type[PreTrainedModel]) -> GRPOTrainer:
        return trained(str(model), tmp_path, rewards=str(save_reward_model(tmp_path / head.__name__, head)))

    assert len(built(LlamaForSequenceClassification).reward_funcs) == 1
    with refused("ForCausalLM", 1, "score.weight"):
        built(LlamaForCausalLM)
