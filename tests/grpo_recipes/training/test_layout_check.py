"""Checks beyond the first micro-batch: layouts compared on short rows, with perturbed adapters and with gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes.generation.agreement import gradient_disagreement
from grpo_recipes.generation.models import in_float32, scaled_by_position
from grpo_recipes.training import layout_check
from grpo_recipes.training.packing import Layout
from tests.grpo_recipes.training.test_packing import flat, layout_of, padded, scored, trainer_on
from tests.support import tiny
from tests.support.recorded import Recording, make_trainer, model
from tests.support.short_runs import partitioned

RAGGED = Recording.random(prompts=3, group=3, seed=3)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Any:
    """Return a function that lists the messages logged about the layout."""
    return lambda: [record.getMessage() for record in caplog.records if record.name == layout_check.__name__]


def quickly(cases: Iterable[str], *quick: str) -> list[Any]:
    """Return the cases as parameters, all but the `quick` ones marked slow."""
    return [pytest.param(case, marks=() if case in quick else pytest.mark.slow) for case in cases]


def adapted(config: peft.PeftConfig) -> peft.PeftModel:
    """Return a tiny Llama with a new adapter, which adds nothing yet."""
    torch.manual_seed(1)
    return get_peft_model(model(transformers.LlamaConfig), config)


def checked(policy: PreTrainedModel, folder: Path, **config: Any) -> Layout:
    """Return the layout that a trainer chooses for a policy."""
    trainer = trainer_on(policy, folder, **config)
    trainer.model.train()
    scored(trainer, flat(RAGGED))
    return layout_of(trainer)


# ---- adapters


TARGETS = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
MIXES_TOKENS: dict[str, tuple[peft.PeftConfig, Layout, str]] = {
    "Lily": (peft.LilyConfig(r=4, num_B=2, **TARGETS), Layout.PADDED, "depend on padding once it has trained"),
    "Shadow": (
        peft.ShadowConfig(r=4, shadow_dropout=0.0, task_type="CAUSAL_LM"),
        Layout.TRIMMED,
        "packed rows give other results once it has trained",
    ),
    "aLoRA": (LoraConfig(r=4, alora_invocation_tokens=[7], **TARGETS), Layout.TRIMMED, "invocation tokens"),
    "VeLoRA": (LoraConfig(r=4, velora_config={"num_groups": 4}, **TARGETS), Layout.PADDED, "VeLoRA"),
    "PVeRA": (peft.PveraConfig(r=8, **TARGETS), Layout.TRIMMED, "in training the model draws random numbers"),
}


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("kind", quickly(MIXES_TOKENS, "Lily", "Shadow", "PVeRA"))
def test_a_new_adapter_that_will_mix_tokens_is_noticed(kind: str, tmp_path: Path, logged: Any) -> None:
    """The adapter adds nothing yet, so packed rows have the log-probabilities of TRL's rows."""
    config, layout, reason = MIXES_TOKENS[kind]
    assert checked(adapted(config), tmp_path) is layout
    (sentence,) = logged()
    assert reason in sentence


def test_an_ordinary_new_adapter_is_packed(tmp_path: Path, logged: Any) -> None:
    assert checked(adapted(LoraConfig(r=4, lora_dropout=0.0, **TARGETS)), tmp_path) is Layout.PACKED
    assert logged() == []


def test_the_layout_is_verified_again_for_another_adapter_state(tmp_path: Path) -> None:
    """With the adapter switched off, the model is an ordinary one and is packed."""
    trainer = trainer_on(adapted(peft.LilyConfig(r=4, num_B=2, **TARGETS)), tmp_path)
    with trainer.model.disable_adapter():
        scored(trainer, flat(RAGGED))
        assert layout_of(trainer) is Layout.PACKED
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.PADDED
    assert trainer.model.get_base_model().config._attn_implementation == "sdpa"
    with trainer.model.disable_adapter():
        scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.PADDED


# ---- state after the check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_check_restores_the_model_to_the_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    policy = adapted(LoraConfig(r=4, lora_dropout=0.0, **TARGETS)).to(dtype)
    zeros = [parameter for parameter in policy.parameters() if parameter.requires_grad and not parameter.any()]
    zeros[0].data[0, 0] = -0.0
    trainer = trainer_on(policy, tmp_path)
    trainer.model.train()
    tensors = {name: (tensor, tensor.clone()) for name, tensor in policy.state_dict(keep_vars=True).items()}
    places = {name: tensor.data_ptr() for name, (tensor, _) in tensors.items()}
    state = torch.get_rng_state()
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.PACKED
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in policy.modules())
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    for name, (tensor, before) in tensors.items():
        assert (tensor.dtype, tensor.data_ptr(), tensor.grad) == (before.dtype, places[name], None)
        assert torch.equal(tensor.detach().view(bits), before.detach().view(bits))
    assert trainer.accelerator.native_amp == (trainer.accelerator.mixed_precision != "no")


def test_every_trainable_tensor_of_one_value_is_perturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_check, "gathered", partitioned)
    policy = adapted(LoraConfig(r=4, **TARGETS))
    policy.get_base_model().model.norm.weight.requires_grad_(True)
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    with layout_check.perturbed(policy):
        assert all(len(parameter.unique()) > 1 for parameter in trained.values())
        assert (policy.get_base_model().model.norm.weight > 0).all()
    assert all(not parameter.any() for name, parameter in trained.items() if "lora_B" in name)


def test_a_sample_holds_two_short_completions_of_two_prompts() -> None:
    rows = padded([[5, 6, 7], [8], [5, 6, 7], [9, 9], [5, 6, 7]], [[10, 11, 3], [12], [14], [15], [16]])
    few = layout_check.sample(rows, np.arange(5), longest=2)
    assert few.input_ids.tolist() == [[6, 7, 10, 11], [6, 7, 14, 0], [9, 9, 15, 0], [9, 9, 15, 0]]
    assert few.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0]]
    assert layout_check.sample(rows, np.arange(0), longest=2).completion_mask.tolist() == [[0, 0]]


# ---- gradients


class MixesGradients(torch.autograd.Function):
    """The identity, with a gradient that mixes all tokens."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + gradient.mean(dim=(0, 1), keepdim=True)


class WithMixedGradients(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(MixesGradients.apply(hidden))


def test_a_gradient_that_mixes_tokens_is_noticed(tmp_path: Path, logged: Any) -> None:
    """The log-probabilities agree in every layout."""
    policy = model(transformers.LlamaConfig)
    policy.model.layers[0].mlp = WithMixedGradients(policy.model.layers[0].mlp)
    assert checked(policy, tmp_path) is Layout.PADDED
    (sentence,) = logged()
    assert "gradients by" in sentence
    assert "on a few short rows" in sentence


@pytest.mark.parametrize(
    ("got", "expected", "agree_in_float32", "agree_in_16_bits"),
    [
        ([[1.0, 2.0], [0.5]], [[1.0, 2.0], [0.5]], True, True),
        (
            [[1.0, 2.0], [0.6]],
            [[1.0, 2.0], [0.5]],
            False,
            True,
        ),  # relative to its tensor in float32, to all tensors in 16 bits
        ([[1.0, 2.01], [0.5]], [[1.0, 2.0], [0.5]], True, True),
        ([[1.0, 2.04], [0.5]], [[1.0, 2.0], [0.5]], False, True),
        ([[1.0, 2.5], [0.5]], [[1.0, 2.0], [0.5]], False, False),  # 0.5 of 2.3
        ([[1.0, 2.0], [2e-6]], [[1.0, 2.0], [1e-9]], True, True),  # a gradient that is zero except for rounding
        ([[1.0, 2.0], [2e-3]], [[1.0, 2.0], [1e-9]], False, True),
        ([[0.0], None], [None, [0.0]], True, True),
        ([[0.5], None], [None, [0.0]], False, False),
        ([None], [None], True, True),
        ([[math.nan]], [[1.0]], False, False),
    ],
)
def test_which_gradients_agree(got: Any, expected: Any, agree_in_float32: bool, agree_in_16_bits: bool) -> None:
    mine, theirs = ([part and torch.tensor(part) for part in side] for side in (got, expected))
    assert (gradient_disagreement(mine, theirs, is_float32=True) == "") is agree_in_float32
    assert (gradient_disagreement(mine, theirs, is_float32=False) == "") is agree_in_16_bits


# ---- noise in training


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.0, "head_dim": 8}
NOISY: dict[str, tuple[str, dict[str, Any], Layout]] = {
    "a jittered router": ("MixtralConfig", {**EXPERTS, "router_jitter_noise": 0.1}, Layout.TRIMMED),
    "a jittered router, small": ("MixtralConfig", {**EXPERTS, "router_jitter_noise": 3e-5}, Layout.TRIMMED),
    "a router without jitter": ("MixtralConfig", EXPERTS, Layout.PACKED),
    "PhiMoE": ("PhimoeConfig", {**EXPERTS, "input_jitter_noise": 0.01}, Layout.TRIMMED),
}


@pytest.mark.parametrize("case", quickly(NOISY, "a jittered router, small"))
def test_a_model_with_random_numbers_in_training_is_not_packed(case: str, tmp_path: Path) -> None:
    name, config, layout = NOISY[case]
    trainer = trainer_on(model(getattr(transformers, name), **config), tmp_path)
    rows, state = flat(RAGGED), torch.get_rng_state()
    assert trainer._log_probs.layout(trainer.model, rows, len(rows.input_ids)) is layout
    assert torch.equal(torch.get_rng_state(), state)


def test_neftune_noise_keeps_rows_padded(tmp_path: Path, logged: Any) -> None:
    assert checked(model(), tmp_path, neftune_noise_alpha=5.0) is Layout.PADDED
    assert "neftune_noise_alpha" in logged()[0]


# ---- positions and widths


LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
INDEXED = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 2, "attn_implementation": "eager"}
MISTRAL_4 = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 8}
CPM_ANT = {"dim_head": 8, "dim_ff": 64, "prompt_length": 4, "prompt_types": 4, "segment_types": 4, "dropout_p": 0.0}
SCALED_BY_POSITION: dict[str, tuple[str, dict[str, Any], str]] = {
    "Ministral 3": (
        "Ministral3Config",
        {"head_dim": 8, "rope_parameters": {**MISTRAL_4, "llama_4_scaling_beta": 0.1}, "sliding_window": None},
        "llama_4_scaling_beta",
    ),
    "Beam": (
        "BeamConfig",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "scalable softmax",
    ),
}


@pytest.mark.parametrize("case", quickly(SCALED_BY_POSITION, "Ministral 3"))
def test_a_model_whose_attention_counts_padding_shares_prompts_in_trls_columns(
    case: str, tmp_path: Path, logged: Any
) -> None:
    name, config, reason = SCALED_BY_POSITION[case]
    assert checked(model(getattr(transformers, name), **config), tmp_path) is Layout.SHARED_PADDED
    assert reason in logged()[0]
    trimmed = trainer_on(
        model(getattr(transformers, name), **config), tmp_path / "trimmed", micro_batching={"layout": "trimmed"}
    )
    scored(trimmed, flat(RAGGED))
    assert layout_of(trimmed) is Layout.PADDED


@pytest.mark.slow
def test_a_model_whose_masks_count_the_row_stays_padded(tmp_path: Path, logged: Any) -> None:
    policy = model(transformers.CpmAntConfig, **CPM_ANT, attn_implementation="eager")
    assert checked(policy, tmp_path) is Layout.PADDED
    assert "depend on padding" in logged()[0]


@pytest.mark.parametrize("number", [4, 64])
def test_rows_longer_than_the_scores_that_attention_keeps_stay_padded(number: int, tmp_path: Path, logged: Any) -> None:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = {**LATENT, **INDEXED, **experts, "head_dim": 8, "num_key_value_heads": 4, "index_topk": number}
    trainer = trainer_on(model(transformers.DeepseekV32Config, **config), tmp_path)
    rows = flat(RAGGED)
    theirs = make_trainer(TRLGRPOTrainer, RAGGED, trainer.model, tmp_path, per_device_train_batch_size=9)
    torch.testing.assert_close(scored(trainer, rows), scored(theirs, rows), atol=1e-4, rtol=0)
    if number < rows.input_ids.size(1):
        assert trainer._log_probs._layouts == {}
        assert "rows of more than 4 tokens are padded: attention keeps the `index_topk` highest scores" in logged()[0]
    else:
        assert layout_of(trainer) is Layout.SHARED


def test_a_softmax_scaled_by_position_is_known_from_the_configuration() -> None:
    assert scaled_by_position(transformers.BeamConfig()) == "scalable softmax"


def test_a_model_that_depends_on_padding_on_the_right_is_noticed(tmp_path: Path, logged: Any) -> None:
    """The rows have no padding, so only the added columns show the dependence."""
    policy = model(transformers.LlamaConfig)

    class CountsTheRow(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, hidden: Tensor) -> Tensor:
            return self.layer(hidden) + 0.1 * hidden[:, -1:]

    policy.model.layers[0].mlp = CountsTheRow(policy.model.layers[0].mlp)
    trainer = trainer_on(policy, tmp_path)
    scored(trainer, padded([[5, 6, 7]] * 2, [[8, 9], [4, 4]]))
    assert layout_of(trainer) is Layout.PADDED
    assert "depend on padding" in logged()[0]


# ---- 16-bit precision


IN_16_BIT: dict[str, dict[str, Any]] = {
    "RecurrentGemmaConfig": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 64, "head_dim": 8},
    "HunYuanDenseV1Config": {"head_dim": 8},
}


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("architecture", IN_16_BIT)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_a_16_bit_model_gets_the_layout_of_float32(
    dtype: torch.dtype, architecture: str, tmp_path: Path, logged: Any
) -> None:
    """In bfloat16, the dependence of these models on padding is as small as rounding."""
    policy = model(getattr(transformers, architecture), **IN_16_BIT[architecture]).to(dtype)
    found = checked(policy, tmp_path)
    assert found is (Layout.PADDED if "Recurrent" in architecture else Layout.SHARED_PADDED)
    assert "padding" in logged()[0]


def test_the_check_runs_without_autocast(tmp_path: Path, logged: Any) -> None:
    policy = model(transformers.HunYuanDenseV1Config, **IN_16_BIT["HunYuanDenseV1Config"])
    assert checked(policy, tmp_path, bf16=True) is Layout.SHARED_PADDED
    assert "1e-04 allowed" in logged()[0]


def test_a_model_under_autocast_is_packed(tmp_path: Path, logged: Any) -> None:
    """The rounding of bfloat16 is far above the float32 tolerance."""
    assert checked(model(), tmp_path, bf16=True) is Layout.PACKED
    assert logged() == []


def test_weights_without_room_in_float32_are_compared_in_16_bits(
    tmp_path: Path, logged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_check.psutil, "virtual_memory", lambda: type("Memory", (), {"available": 0}))
    assert checked(model().bfloat16(), tmp_path) is Layout.PACKED
    (sentence,) = logged()
    assert "compared in 16-bit precision" in sentence


def test_fits_in_float32_counts_copies_and_a_quarter_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is needed for float32 copies of 16-bit weights and a quarter more for the short rows."""
    policy, device = tiny.policy().bfloat16(), torch.device("cpu")
    copies = 4 * sum(parameter.numel() for parameter in policy.parameters())
    for share, fits in ((1.2, False), (1.3, True)):
        memory = type("Memory", (), {"available": int(share * copies)})
        monkeypatch.setattr(layout_check.psutil, "virtual_memory", lambda memory=memory: memory)
        assert layout_check.fits_in_float32(policy, device) is fits
        assert layout_check.fits_in_float32(tiny.policy(), device)
    policy.is_quantized = True
    assert not layout_check.fits_in_float32(policy, device)


def test_gradient_hooks_stay_after_the_float32_copies() -> None:
    """DistributedDataParallel averages gradients by hooks on accumulators. Without them ranks train apart."""
    policy = tiny.policy().to(torch.bfloat16)
    policy.lm_head.requires_grad_(False)
    weight = next(policy.parameters())
    accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
    called: list[bool] = []
    accumulator.register_hook(lambda *_: called.append(True))
    with in_float32(policy, Accelerator(cpu=True)):
        assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
        assert [name for name, p in policy.named_parameters() if not p.requires_grad] == ["lm_head.weight"]
    assert next(policy.parameters()) is weight
    policy(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert called == [True]
