"""The weights that reach vLLM are the policy's, also where they are read after TRL's iterator has ended; the seed is the run's.

tests/vllm runs the same against vLLM itself.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoHaConfig, LoraConfig, OFTConfig, PeftConfig, PeftModel
from trl import GRPOTrainer as TRLGRPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.training.reference import set_reference, without_trl_reference
from grpo_recipes.training.vllm_engine import sampling_by_seed
from tests import tiny
from tests.grpo_recipes.short_runs import adapted, arguments, trainer

ATTENTION = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", "target_modules": "all-linear", **changes})


ADAPTERS: dict[str, PeftConfig] = {
    "LoRA": lora(),
    "LoRA on the embedding": lora(target_modules=["embed_tokens", "q_proj"]),
    "DoRA": lora(use_dora=True),
    "modules_to_save": lora(modules_to_save=["lm_head"]),
    "trainable tokens": lora(trainable_token_indices=[5, 6, 7]),
    "IA3": IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": LoHaConfig(r=4, **ATTENTION),
    "OFT": OFTConfig(r=0, oft_block_size=8, **ATTENTION),
}


class GatherNothing:
    """TRL's `DistributedBackend` on one process."""

    is_fsdp = False

    def gather_params(self, parameters: list[torch.Tensor]) -> Any:
        return torch.no_grad()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_policy(tmp_path_factory.mktemp("policy"))


def exporter(model: PeftModel) -> VLLMGeneration:
    """TRL's, without an engine behind it."""
    vllm = object.__new__(VLLMGeneration)
    vllm.model, vllm._dist = model, GatherNothing()
    return vllm


def merged(model: PeftModel) -> dict[str, torch.Tensor]:
    """The policy's weights by PEFT's own export."""
    return dict(copy.deepcopy(model).merge_and_unload().named_parameters())


def with_vllm(model: PeftModel, args: Any) -> TRLGRPOTrainer:
    """TRL's trainer as it stands when a reference is set, its weights going to vLLM."""
    with without_trl_reference(args):
        built = trainer(TRLGRPOTrainer, model, args)
    built.vllm_generation = exporter(model)
    return built


def sent_by_trl(model: PeftModel) -> dict[str, torch.Tensor]:
    """What vLLM's packer reads: it collects the tensors and copies them when the iterator has ended."""
    return dict(exporter(model)._iter_named_params())


@pytest.mark.parametrize("beta", [0.04, 0.0])
@pytest.mark.parametrize("name", ["default", "policy"])
@pytest.mark.parametrize("kind", ["LoRA", "modules_to_save"])
def test_vllm_gets_the_merged_weights(policy: Path, tmp_path: Path, kind: str, name: str, beta: float) -> None:
    built = with_vllm(adapted(policy, ADAPTERS[kind], continued=True, name=name), arguments(tmp_path, beta=beta))
    expected = merged(built.model)
    set_reference(built, "initial")
    set_reference(built, "initial")  # again, as a script may: the weights are filtered once
    assert_sent(built, expected)


@pytest.mark.parametrize("kind", [kind for kind in ADAPTERS if kind not in ("LoRA", "modules_to_save")])
def test_vllm_gets_the_merged_weights_of_every_kind_of_adapter(policy: Path, tmp_path: Path, kind: str) -> None:
    built = with_vllm(adapted(policy, ADAPTERS[kind], continued=True), arguments(tmp_path, beta=0.0))
    expected = merged(built.model)
    set_reference(built)
    assert_sent(built, expected)


def assert_sent(built: TRLGRPOTrainer, expected: dict[str, torch.Tensor]) -> None:
    """Names and values are the merged model's, the second time as the first, and afterwards the base is as it was."""
    for _ in range(2):
        sent = dict(built.vllm_generation._iter_named_params())
        assert sent.keys() == expected.keys()
        for key, tensor in sent.items():
            # Merging and unmerging leaves a rounding in the base.
            torch.testing.assert_close(tensor, expected[key], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["LoRA", "trainable tokens"])
def test_trl_sends_the_base(policy: Path, kind: str) -> None:
    """If this fails, TRL has mended it: `send_policy` can go as far as names allow."""
    model = adapted(policy, ADAPTERS[kind], continued=True)
    expected, base = merged(model), model.get_base_model()
    sent = sent_by_trl(model)
    if kind == "trainable tokens":
        assert "model.embed_tokens.weight" not in sent
        assert "model.embed_tokens.token_adapter.weight" in sent
    layer = "model.layers.0.mlp.up_proj.weight"
    assert (sent[layer] - expected[layer]).abs().max() > 0.01
    unmerged = base.model.layers[0].mlp.up_proj.get_base_layer().weight
    assert torch.equal(sent[layer], unmerged)


class SeededEngine:
    """An engine as vLLM seeds it when it is built: the process's random state, by the rank that TRL hands it."""

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0)


def test_the_seed_decides_what_a_colocated_engine_draws(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", SeededEngine)

    def drawn(trainer_class: Any, seed: int) -> list[float]:
        args = arguments(tmp_path, seed=seed, use_vllm=True, vllm_mode="colocate", beta=0.0)
        trainer(trainer_class, str(policy), args)
        return torch.rand(4).tolist()

    assert drawn(TRLGRPOTrainer, 1) == drawn(TRLGRPOTrainer, 2), "if this fails, TRL has mended it"
    assert drawn(GRPOTrainer, 1) == drawn(GRPOTrainer, 1) != drawn(GRPOTrainer, 2)
    for unseeded in ({"vllm_mode": "server"}, {"use_vllm": False}):  # no engine draws from this process's random state
        args = arguments(tmp_path, **{"use_vllm": True, "vllm_mode": "colocate", **unseeded})
        state = torch.get_rng_state()
        with sampling_by_seed(args):
            pass
        assert torch.equal(torch.get_rng_state(), state)
