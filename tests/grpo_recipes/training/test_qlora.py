"""LoRA on a base in 4 bits, with bitsandbytes itself on a CPU: gradients, a resumed run and the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import LlamaConfig, PreTrainedModel, Qwen2Config

from grpo_recipes import GRPOTrainer
from grpo_recipes.training.adamw_bf16 import adamw_bf16
from grpo_recipes.training.adapters import adapter_tensors
from grpo_recipes.training.packing import Layout
from grpo_recipes.training.reference import kl_to_reference
from grpo_rewards.errors import UserError
from tests.support import tiny
from tests.support.layouts import logged
from tests.support.quantized import LORA, in_4_bits, needs_bitsandbytes, save_policy
from tests.support.short_runs import TEXTS, arguments, log_probabilities, moved, trainer

pytestmark = [pytest.mark.slow, needs_bitsandbytes]


def with_adapter(base: PreTrainedModel) -> PeftModel:
    """Add an adapter whose weights have all moved, in bfloat16 as TRL stores it on a quantized base."""
    torch.manual_seed(1)
    model = moved(get_peft_model(base, LORA))
    for weight in adapter_tensors(model, "default").values():
        weight.data = weight.data.bfloat16()
    return model


def gradients(model: PeftModel) -> list[torch.Tensor]:
    """Return the gradients of a text's likelihood in training mode."""
    ids = tiny.byte_tokenizer()(TEXTS[1], return_tensors="pt")["input_ids"]
    model.train()
    loss = model(input_ids=ids, labels=ids).loss
    return list(torch.autograd.grad(loss, [weight for weight in model.parameters() if weight.requires_grad]))


def bits(value: torch.Tensor | float) -> bytes:
    """Return the bits of a number or tensor. A part of `low_bits` is NaN, which equals nothing as a number."""
    return torch.as_tensor(value).reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config])  # without and with biases
def test_an_evaluation_leaves_the_gradient_of_the_dequantized_base(tmp_path: Path, config_class: Any) -> None:
    policy = save_policy(tmp_path / "policy", torch.float32, config_class)
    ours = trainer(GRPOTrainer, with_adapter(in_4_bits(policy, torch.float32, repacks=True)), arguments(tmp_path))
    log_probabilities(ours.model, TEXTS[0])
    expected = gradients(with_adapter(in_4_bits(policy, torch.float32, repacks=True).dequantize()))
    torch.testing.assert_close(gradients(ours.model), expected, atol=1e-5, rtol=1e-3)


def test_weights_that_an_evaluation_has_repacked_are_refused(tmp_path: Path) -> None:
    model = with_adapter(in_4_bits(save_policy(tmp_path / "policy", torch.float32), torch.float32, repacks=True))
    log_probabilities(model, TEXTS[0])
    with pytest.raises(UserError):
        trainer(GRPOTrainer, model, arguments(tmp_path))


def test_the_kl_to_the_base_is_that_of_two_models(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", torch.float32)
    dequantized = in_4_bits(policy, torch.float32, repacks=True).dequantize()
    base = log_probabilities(dequantized, TEXTS[1])
    difference = base - log_probabilities(with_adapter(dequantized), TEXTS[1])
    expected = float((difference.exp() - difference - 1).mean())
    model = with_adapter(in_4_bits(policy, torch.float32, repacks=True))
    ours = trainer(GRPOTrainer, model, arguments(tmp_path), reference="base")
    assert ours.ref_model is None
    assert kl_to_reference(ours, [TEXTS[1]]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.timeout(900)
def test_a_packed_run_is_resumed_to_the_bit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Completions are decoded in groups and compared, the reference is the base, and `adamw_bf16` updates."""
    policy = save_policy(tmp_path / "policy", torch.bfloat16)
    changes = {"bf16": True, "max_steps": 4, "save_strategy": "steps", "save_steps": 2}

    def run(name: str, resume: Path | None = None) -> Any:
        args = arguments(tmp_path / name, **changes)
        torch.manual_seed(1)
        base, optimizer = in_4_bits(policy, torch.bfloat16, repacks=True), adamw_bf16(args)
        ours = trainer(GRPOTrainer, base, args, peft_config=LORA, optimizer_cls_and_kwargs=optimizer)
        ours.train(resume_from_checkpoint=None if resume is None else str(resume))
        return ours

    whole = run("whole")
    assert list(whole._log_probs._layouts.values()) == [Layout.PACKED]
    assert whole._generation.groups.is_verified
    assert whole.ref_model is None
    assert ["16-bit" in line for line in logged(caplog)] == [True]
    entries = [entry for entry in whole.state.log_history if "kl" in entry]
    assert entries[0]["kl"] == 0 < entries[-1]["kl"]
    assert 0 < entries[0]["sampling/sampling_logp_difference/mean"] < 0.05
    assert {weight.dtype for weight in adapter_tensors(whole.model, "default").values()} == {torch.bfloat16}

    resumed = run("resumed", tmp_path / "whole" / "checkpoint-2")
    for mine, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    states = [ours.optimizer.state_dict()["state"] for ours in (resumed, whole)]
    assert states[0].keys() == states[1].keys()
    for key, state in states[0].items():
        assert {name: bits(value) for name, value in state.items()} == {
            name: bits(value) for name, value in states[1][key].items()
        }
