"""`kl_to_reference` with padded texts, an adapter of another dtype, and a checkpoint from another folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from grpo_recipes import GRPOTrainer
from grpo_recipes.training.adapters import adapter_tensors
from grpo_recipes.training.reference import REF, kl_to_reference
from tests.grpo_recipes.training.test_reference import KillAt, Killed, equal, lora, tensors
from tests.support import tiny
from tests.support.short_runs import TEXTS, adapted, arguments, load, moved, trainer

ZERO, SEEN = 1e-6, 1e-5


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_policy(tmp_path_factory.mktemp("policy"))


def test_padding_is_excluded_from_the_mean(policy: Path, tmp_path: Path) -> None:
    ours = trainer(GRPOTrainer, adapted(policy, lora(), continued=True), arguments(tmp_path), reference="base")
    ids = [tiny.byte_tokenizer()(text)["input_ids"] for text in TEXTS]
    assert len(ids[0]) < len(ids[1])
    alone = [kl_to_reference(ours, [text]) for text in TEXTS]
    tokens = [len(text) - 1 for text in ids]
    mean = sum(kl * count for kl, count in zip(alone, tokens, strict=True)) / sum(tokens)
    assert min(alone) > SEEN
    assert abs(alone[0] - alone[1]) > 0.1 * mean
    assert kl_to_reference(ours, TEXTS) == pytest.approx(mean, rel=1e-4)


def test_a_loaded_reference_has_the_policys_dtype(policy: Path, tmp_path: Path) -> None:
    """PEFT loads an adapter in float32, which would differ from equal weights in bfloat16."""
    adapted(policy, lora(), continued=True).save_pretrained(tmp_path / "adapter")
    base = load(policy, torch.bfloat16)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True, autocast_adapter_dtype=False)
    for tensor in adapter_tensors(model, "default").values():
        tensor.data = tensor.data.bfloat16()
    ours = trainer(GRPOTrainer, model, arguments(tmp_path), reference={"adapter": tmp_path / "adapter"})
    assert {tensor.dtype for tensor in adapter_tensors(ours.model, REF).values()} == {torch.bfloat16}
    assert kl_to_reference(ours, TEXTS) <= ZERO


@pytest.mark.slow
def test_a_refreshed_reference_is_read_from_the_checkpoint_that_is_resumed(policy: Path, tmp_path: Path) -> None:
    """The checkpoint was copied to another folder, beside a checkpoint of the same step with another reference."""
    refresh = {"sync_ref_model": True, "ref_model_sync_steps": 1, "save_strategy": "steps", "save_steps": 1}
    stored = {}
    for name, scale in (("first", 0.05), ("second", 0.2)):
        model = moved(adapted(policy, lora(), continued=False), scale=scale)
        run = trainer(GRPOTrainer, model, arguments(tmp_path / name, max_steps=1, **refresh))
        run.train()
        stored[name] = tensors(run.model, REF)
    assert not equal(stored["first"], stored["second"])
    elsewhere = tmp_path / "kept" / "checkpoint-1"
    shutil.copytree(tmp_path / "first" / "checkpoint-1", elsewhere)
    args = arguments(tmp_path / "second", max_steps=3, resume_from_checkpoint=str(elsewhere), **refresh)
    resumed = trainer(GRPOTrainer, adapted(policy, lora(), continued=True), args)
    resumed.add_callback(KillAt(1))
    with pytest.raises(Killed):
        resumed.train(resume_from_checkpoint=str(elsewhere))
    assert equal(stored["first"], tensors(resumed.model, REF))
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "first" / "checkpoint-1").rglob("*.*")}
    assert {"reference.safetensors", "adapter_model.safetensors"} <= set(modes)
    assert len(set(modes.values())) == 1, "weights as readable as the configuration"
