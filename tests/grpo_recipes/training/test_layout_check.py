"""Choice of the exact layout: faults that the comparisons with TRL's rows must find."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from peft import LoraConfig
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes.generation.models import in_float32
from grpo_recipes.generation.rows import Rows
from grpo_recipes.process.messages import Announcer
from grpo_recipes.training.layout_check import LayoutCheck
from grpo_recipes.training.layout_rules import LayoutRules
from grpo_recipes.training.layout_trial import fits_in_float32
from grpo_recipes.training.packed_attention import AttentionSwitch
from grpo_recipes.training.packing import Layout, ModelCall, SpansIgnored
from grpo_recipes.training.segments import SegmentedModels
from tests.support import tiny
from tests.support.grids import only
from tests.support.layouts import (
    RAGGED,
    SCALED_BY_POSITION,
    TARGETS,
    adapted,
    check_exact,
    chosen,
    flat,
    layout_of,
    logged,
    named,
    padded,
    scored,
    settings,
    tokens_of,
    trainer_on,
)
from tests.support.recorded import make_trainer, model

PADDED, SHARED_PADDED, TRIMMED, SHARED, PACKED = Layout
CPU = torch.device("cpu")
ROWS = padded([[5, 6, 7], [5, 6, 7], [8], [8]], [[1, 2], [3], [4], [9, 9]])
# ---- Checks 2 and 3: decisions, with the results of the model calls given


class Computation:
    """Model calls with equal results in every layout but the wrong ones.

    Args:
        policy: model that is checked.
        wrong: layout, or "buckets" for trimmed rows in many, and True in training mode (check 3), each with an offset
            of its log-probabilities or an error.
        noise: standard deviation of random numbers in training mode.
    """

    def __init__(self, policy: Any, wrong: dict[tuple[Any, bool], Any] | None = None, noise: float = 0.0) -> None:
        self.policy, self.wrong, self.noise = policy, wrong or {}, noise
        self.calls: list[tuple[ModelCall, bool, bool]] = []
        """Calls, True if in training mode, and True if with checkpointing."""

    def __call__(self, call: ModelCall, called: Any, compute_entropy: bool) -> tuple[Tensor, None]:
        training = self.policy.training
        assert not compute_entropy, "it would cost a second pass over the logits"
        self.calls.append((call, training, self.policy.is_gradient_checkpointing))
        fault = self.wrong.get(("buckets" if call.layout is TRIMMED and not call.launches else call.layout, training))
        if isinstance(fault, Exception):
            raise fault
        tokens = call.rows.input_ids[:, -call.rows.logits_to_keep :] % 7 + 1
        values = -tokens * self.policy.lm_head.weight.square().mean() - (fault or 0.0)
        if training and self.noise:
            values = values + self.noise * torch.randn(values.shape)
        return values, None

    def rows(self, layout: Layout, training: bool) -> list[Rows]:
        """Return the rows of the calls of a layout."""
        return [call.rows for call, mode, _ in self.calls if call.layout is layout and mode is training]


def check_of(run: Computation, **changes: Any) -> tuple[LayoutCheck, list[str]]:
    """Return a check of the model calls, and the list of what it logs."""
    said: list[str] = []
    args = settings(**changes)
    parts: Any = (Accelerator(cpu=True), args, run, AttentionSwitch(), SegmentedModels(), LayoutRules(args))
    return LayoutCheck(*parts, Announcer(said.append)), said


@pytest.fixture
def llama() -> PreTrainedModel:
    return model(transformers.LlamaConfig).eval()


OFF = 0.1
FIRST, SHORT = False, True
DECISIONS: list[tuple[dict[Any, Any], Layout, Layout, bool]] = [
    # Wrong in the first rows or in the short ones, wanted, chosen, and whether buckets are verified.
    ({}, PACKED, PACKED, False),
    ({}, SHARED, SHARED, True),
    ({}, TRIMMED, TRIMMED, True),
    ({(PACKED, FIRST): OFF}, PACKED, SHARED, True),
    ({(PACKED, SHORT): OFF}, PACKED, SHARED, True),
    ({(PACKED, FIRST): OFF, (SHARED, SHORT): OFF}, PACKED, TRIMMED, True),
    ({(PACKED, SHORT): OFF, (SHARED, FIRST): OFF}, PACKED, TRIMMED, True),
    ({(SHARED, FIRST): OFF}, SHARED, TRIMMED, True),
    ({(SHARED, FIRST): OFF, ("buckets", FIRST): OFF}, SHARED, TRIMMED, False),
    ({("buckets", SHORT): OFF}, TRIMMED, TRIMMED, False),
    ({(TRIMMED, FIRST): OFF}, PACKED, SHARED_PADDED, True),
    ({(TRIMMED, SHORT): OFF}, PACKED, SHARED_PADDED, True),
    ({(TRIMMED, FIRST): OFF}, TRIMMED, PADDED, False),
    ({(TRIMMED, FIRST): OFF, (SHARED_PADDED, SHORT): OFF}, PACKED, PADDED, False),
    ({(PACKED, FIRST): SpansIgnored("spans")}, PACKED, SHARED, True),
    ({(PACKED, FIRST): OFF, (SHARED, SHORT): KeyError("cache")}, PACKED, TRIMMED, True),
]


def test_the_layout_is_the_most_preferred_that_agrees_in_both_comparisons(llama: PreTrainedModel) -> None:
    for wrong, wanted, expected, verified in DECISIONS:
        found, said = check_of(Computation(llama, wrong))
        assert (wrong, found.choose(llama, llama, ROWS, wanted)) == (wrong, expected)
        assert found.segmented.of(llama).buckets.is_verified is verified, wrong
        assert [(expected.described in line, wanted.described in line) for line in said] == [(True, True)] * (
            expected < wanted
        )
    found.choose(llama, llama, ROWS, PACKED)
    assert len(said) == 1, "a second model has the same reason"
    in_columns, _ = check_of(Computation(llama, {(TRIMMED, FIRST): OFF}))
    assert in_columns.choose(llama, llama, ROWS, PACKED, in_columns=False) is PADDED
    llama.lm_head.weight.ds_id = 1  # type: ignore[attr-defined]
    for wrong, expected in (({(PACKED, FIRST): OFF}, TRIMMED), ({(TRIMMED, FIRST): OFF}, PADDED), ({}, PACKED)):
        assert check_of(Computation(llama, wrong))[0].choose(llama, llama, ROWS, PACKED) is expected


@pytest.mark.parametrize(
    ("layout", "error"), [(PACKED, ValueError()), (TRIMMED, ValueError()), (SHARED, torch.OutOfMemoryError())]
)
def test_errors_that_no_layout_explains_end_the_run(llama: PreTrainedModel, layout: Layout, error: Exception) -> None:
    found, _ = check_of(Computation(llama, {(layout, FIRST): error}))
    with pytest.raises(type(error)):
        found.choose(llama, llama, ROWS, layout)


def test_a_model_that_draws_numbers_in_training_shares_no_prompt(llama: PreTrainedModel) -> None:
    for wanted, expected in ((PACKED, TRIMMED), (SHARED, TRIMMED), (TRIMMED, TRIMMED), (SHARED_PADDED, PADDED)):
        assert check_of(Computation(llama, noise=3e-5))[0].choose(llama, llama, ROWS, wanted) is expected
    # Two 16-bit results may differ by rounding alone, and this random noise is larger.
    half = model(transformers.LlamaConfig).bfloat16()
    half.is_quantized = True
    found, said = check_of(Computation(half, noise=1e-3))
    assert found.choose(half, half, ROWS, PACKED) is TRIMMED
    assert "16-bit" in said[0]


def test_rows_without_a_label_decide_nothing(llama: PreTrainedModel) -> None:
    found, said = check_of(Computation(llama))
    assert found.choose(llama, llama, ROWS.unlabelled(), PACKED) is None
    assert found.choose(llama, llama, padded([[5], [5]], [[1], []]), PACKED) is PACKED
    padding, _ = check_of(Computation(llama), pad_to_multiple_of=8)
    assert padding.choose(llama, llama, ROWS.unlabelled(), PACKED) is PADDED
    assert said == []


def test_which_rows_are_compared(llama: PreTrainedModel) -> None:
    """Padding is added on both sides, windows leave rows out, and a single row is packed twice."""
    run = Computation(llama)
    assert check_of(run)[0].choose(llama, llama, ROWS, PACKED) is PACKED
    for mode in (FIRST, SHORT):
        (wide, *_), (packed, *_) = run.rows(PADDED, mode), run.rows(PACKED, mode)
        assert (wide.input_ids.shape[1], wide.logits_to_keep) == (ROWS.input_ids.shape[1] + 16, ROWS.logits_to_keep + 8)
        assert tokens_of(packed) == tokens_of(ROWS)
    llama.config.layer_types = None
    for window, rows in ((3, [2, 3]), (2, [2, 2])):
        llama.config.sliding_window = window
        run = Computation(llama)
        found, said = check_of(run)
        assert found.choose(llama, llama, ROWS, PACKED) is PACKED
        for mode in (FIRST, SHORT):
            assert tokens_of(run.rows(PACKED, mode)[0]) == tokens_of(ROWS.select(np.array(rows)))
        assert str(window) in said[0]
        assert found.segmented.of(llama).shared.is_verified, "rows that leave the window share their prompts"
    found, _ = check_of(Computation(llama, {(SHARED, SHORT): OFF}))
    assert found.choose(llama, llama, ROWS, PACKED) is PACKED
    assert not found.segmented.of(llama).shared.is_verified
    llama.config.sliding_window = 1
    assert check_of(Computation(llama))[0].choose(llama, llama, ROWS, PACKED) is SHARED, "no row fits"


def test_padding_is_added_as_far_as_there_are_positions(llama: PreTrainedModel) -> None:
    for positions, *expected in ((100, (21, 10), (13, 10)), (14, (14, 3), (13, 10)), (12, (12, 2), (12, 9))):
        llama.config.max_position_embeddings = positions
        run = Computation(llama, {(TRIMMED, FIRST): OFF})
        assert check_of(run)[0].choose(llama, llama, ROWS, PACKED) is SHARED_PADDED
        sizes = [(rows.input_ids.shape[1], rows.logits_to_keep) for rows in run.rows(PADDED, FIRST)]
        assert sizes[:2] == expected, "with padding, and in TRL's columns"


def test_short_rows_leave_windows_and_chunks(llama: PreTrainedModel) -> None:
    """The longest prompt and completion of check 3. Those of the first micro-batch have 3 and 2 tokens."""
    config, start = llama.config, {"max_position_embeddings": 10**6, "layer_types": None}
    for changes, lengths in (
        ({}, (3, 2)),
        ({"layer_types": ["linear_attention"]}, (72, 72)),  # a chunk of 64, and 8
        ({"layer_types": ["linear_attention"], "mamba_chunk_size": 256}, (264, 264)),
        ({"layer_types": ["mamba"], "chunk_size": 16}, (72, 72)),
        ({"layer_types": ["mamba"], "chunk_size": 4096}, (1032, 1032)),
        ({"sliding_window": 11}, (19, 2)),  # the longest row has 3 + 9 tokens
        ({"sliding_window": 12}, (3, 2)),
        ({"attention_chunk_size": 5}, (13, 2)),
        ({"sliding_window": 11, "layer_types": ["sliding_attention", "conv"]}, (72, 72)),
        ({"layer_types": ["conv"], "max_position_embeddings": 159}, (71, 71)),
        ({"layer_types": ["conv"], "index_topk": 40}, (12, 12)),
    ):
        llama.config = copy.copy(config)
        for name, value in {**start, **changes}.items():
            setattr(llama.config, name, value)
        run = Computation(llama)
        assert check_of(run)[0].choose(llama, llama, ROWS, SHARED) is SHARED
        compared = tokens_of(run.rows(SHARED, SHORT)[0])
        assert (changes, *(max(len(row[side]) for row in compared) for side in (0, 1))) == (changes, *lengths)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_shared_prompts_are_compared_with_checkpointing(llama: PreTrainedModel, use_reentrant: bool | None) -> None:
    """Their cache runs a second time. Reentrant checkpointing writes into `grad`, and must leave that of the run."""
    keywords = None if use_reentrant is None else {"use_reentrant": use_reentrant}
    weight = llama.lm_head.weight
    weight.grad = before = torch.full_like(weight, 5.0)
    run = Computation(llama)
    found, _ = check_of(run, gradient_checkpointing=True, gradient_checkpointing_kwargs=keywords)
    assert found.choose(llama, llama, ROWS, SHARED) is SHARED
    checkpointed = {(call.layout, training) for call, training, on in run.calls if on}
    assert checkpointed == {(SHARED, SHORT)}
    assert weight.grad is before
    assert (before == 5).all()
    assert not llama.is_gradient_checkpointing


def test_rows_with_holes_or_beyond_the_window_are_not_packed(llama: PreTrainedModel) -> None:
    found, said = check_of(Computation(llama))
    rows = padded([[5], [5, 6], [5]], [[1, 2, 3], [1, 2, 3], [1, 2]])
    for window, fits in ((4, [True, False, True]), (5, [True] * 3)):
        llama.config.sliding_window, llama.config.layer_types = window, None
        assert found.fits(llama, rows.host).tolist() == fits
    assert len(said) == 1
    holes = Rows(rows.input_ids, rows.attention_mask.clone(), 3)
    holes.attention_mask[0, 3] = 0  # the second of three tokens
    holes.attention_mask[2, 2] = 0  # the first of two
    assert found.fits(llama, holes.host).tolist() == [False, True, False]
    assert "holes" in said[1]


# ---- The state of a model during the check


@pytest.mark.parametrize("dtype", only([torch.bfloat16], [torch.float32, torch.bfloat16]))
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
    assert layout_of(trainer) is PACKED
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in policy.modules())
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    for name, (tensor, before) in tensors.items():
        assert (tensor.dtype, tensor.data_ptr(), tensor.grad) == (before.dtype, places[name], None)
        assert torch.equal(tensor.detach().view(bits), before.detach().view(bits))
    assert trainer.accelerator.native_amp == (trainer.accelerator.mixed_precision != "no")


# ---- Adapters


@pytest.mark.parametrize(
    ("config", "layout", "reason"),
    [
        (peft.ShadowConfig(r=4, shadow_dropout=0.0, task_type="CAUSAL_LM"), TRIMMED, "packed rows"),
        (LoraConfig(r=4, velora_config={"num_groups": 4}, **TARGETS), PADDED, "VeLoRA"),
        (peft.PveraConfig(r=8, **TARGETS), TRIMMED, "random numbers"),
    ],
)
def test_a_new_adapter_that_will_mix_tokens_is_noticed(
    config: peft.PeftConfig, layout: Layout, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The adapter adds nothing yet, so packed rows have the log-probabilities of TRL's rows."""
    assert chosen(adapted(config), tmp_path) is layout
    (sentence,) = logged(caplog)
    assert reason in sentence


def test_the_layout_is_verified_again_for_another_adapter_state(tmp_path: Path) -> None:
    """With the adapter switched off, the model is an ordinary one and is packed."""
    trainer = trainer_on(adapted(peft.LilyConfig(r=4, num_B=2, **TARGETS)), tmp_path)
    with trainer.model.disable_adapter():
        scored(trainer, flat(RAGGED))
        assert layout_of(trainer) is PACKED
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is PADDED
    assert trainer.model.get_base_model().config._attn_implementation == "sdpa"
    with trainer.model.disable_adapter():
        scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is PADDED


# ---- Gradients


class MixesGradients(torch.autograd.Function):
    """The identity, with a gradient that mixes all tokens."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + gradient.mean(dim=(0, 1), keepdim=True)


class Changed(nn.Module):
    """Layer whose input or output is changed."""

    def __init__(self, layer: nn.Module, before: Any = None, added: Any = None) -> None:
        super().__init__()
        self.layer, self.before, self.added = layer, before, added

    def forward(self, hidden: Tensor) -> Tensor:
        output = self.layer(self.before(hidden) if self.before else hidden)
        return output + self.added(hidden) if self.added else output


def test_a_gradient_that_mixes_tokens_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log-probabilities agree in every layout."""
    policy = model(transformers.LlamaConfig)
    policy.model.layers[0].mlp = Changed(policy.model.layers[0].mlp, before=MixesGradients.apply)
    assert chosen(policy, tmp_path) is PADDED
    assert "gradients" in logged(caplog)[0]


# ---- Noise in training, positions and widths


@pytest.mark.slow
@pytest.mark.parametrize("reason", SCALED_BY_POSITION)
def test_a_model_whose_attention_counts_padding_shares_prompts_in_trls_columns(
    reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert chosen(named(SCALED_BY_POSITION[reason]), tmp_path) is SHARED_PADDED
    assert reason in logged(caplog)[0]


def test_a_model_whose_masks_count_the_row_stays_padded(tmp_path: Path) -> None:
    sizes = {"dim_head": 8, "dim_ff": 64, "prompt_length": 4, "prompt_types": 4, "segment_types": 4, "dropout_p": 0.0}
    policy = model(transformers.CpmAntConfig, **sizes, attn_implementation="eager")
    assert chosen(policy, tmp_path) is PADDED


def test_rows_longer_than_the_scores_that_attention_keeps_stay_padded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    indexed = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 2, "attn_implementation": "eager"}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = {**latent, **indexed, **experts, "head_dim": 8, "num_key_value_heads": 4}
    trainer = trainer_on(model(transformers.DeepseekV32Config, **config), tmp_path)
    theirs = make_trainer(TRLGRPOTrainer, RAGGED, trainer.model, tmp_path, per_device_train_batch_size=9)
    check_exact(trainer, flat(RAGGED), scored(theirs, flat(RAGGED)), 1e-4)
    assert trainer._log_probs._layouts == {}
    assert "`index_topk`" in logged(caplog)[0]


def test_rows_of_as_many_tokens_as_the_kept_scores_are_not_padded(llama: PreTrainedModel) -> None:
    found, _ = check_of(Computation(llama))
    assert not found.exceeds_kept_scores(llama, 10**9)
    llama.config.index_topk = 40
    assert [found.exceeds_kept_scores(llama, width) for width in (40, 41)] == [False, True]


def test_a_model_that_depends_on_padding_on_the_right_is_noticed(tmp_path: Path) -> None:
    """The rows have no padding, so only the added columns show the dependence."""
    policy = model(transformers.LlamaConfig)
    policy.model.layers[0].mlp = Changed(policy.model.layers[0].mlp, added=lambda hidden: 0.1 * hidden[:, -1:])
    trainer = trainer_on(policy, tmp_path)
    scored(trainer, padded([[5, 6, 7]] * 2, [[8, 9], [4, 4]]))
    assert layout_of(trainer) is PADDED


# ---- 16-bit precision


HUNYUAN = ("HunYuanDenseV1Config", {"head_dim": 8})
"""A model that depends on padding, in bfloat16 by as little as rounding."""


def test_a_16_bit_model_gets_the_layout_of_float32(tmp_path: Path) -> None:
    assert chosen(named(HUNYUAN).bfloat16(), tmp_path) is SHARED_PADDED


def test_the_check_runs_without_autocast(tmp_path: Path) -> None:
    """The rounding of bfloat16 is far above the float32 tolerance, and a dependence on padding far below it."""
    assert chosen(named(HUNYUAN), tmp_path / "counts", bf16=True) is SHARED_PADDED
    assert chosen(model(), tmp_path / "plain", bf16=True) is PACKED


def test_weights_without_room_in_float32_are_compared_in_16_bits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SimpleNamespace(available=0)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    assert chosen(model().bfloat16(), tmp_path) is PACKED
    (sentence,) = logged(caplog)
    assert "16-bit" in sentence
    policy = tiny.policy().bfloat16()
    copies = 4 * sum(parameter.numel() for parameter in policy.parameters())
    for share, fits in ((1.2, False), (1.3, True)):
        memory.available = int(share * copies)
        assert fits_in_float32(policy, CPU) is fits
        assert fits_in_float32(tiny.policy(), CPU), "it is in float32 already"
    policy.is_quantized = True
    assert not fits_in_float32(policy, CPU)
    policy.is_quantized = False
    for name, value in (("mem_get_info", (copies, 0)), ("memory_reserved", copies)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    for allocated, fits in ((0.7, True), (0.8, False)):
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device, share=allocated: share * copies)
        assert fits_in_float32(policy, torch.device("cuda")) is fits


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
