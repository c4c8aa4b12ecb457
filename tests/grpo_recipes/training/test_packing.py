"""Packed rows compared with one unpadded row at a time, and the checks that decide whether a model is packed."""

from __future__ import annotations

import inspect
import runpy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.utils import _apply_to_tensors
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import dynamic_rope_update
from trl import GRPOTrainer as TRLGRPOTrainer
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from grpo_recipes import GRPOTrainer
from grpo_recipes.generation.rows import Rows
from grpo_recipes.training import layout_check, packed_attention
from grpo_recipes.training.packed_attention import ATTENTION, AttentionSwitch, GroupSpans
from grpo_recipes.training.packing import Layout, order, pack
from tests.support import device
from tests.support.grids import only
from tests.support.recorded import Recording, compare, make_trainer, model

EXACT = {
    "Qwen2Config": {},
    "Qwen3Config": {"head_dim": 8},
    "LlamaConfig": {},
    "MistralConfig": {"sliding_window": None},
    "Phi3Config": {},
    "Olmo2Config": {},
    "SmolLM3Config": {},
    "GPTNeoXConfig": {"num_key_value_heads": 4, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "Gemma3TextConfig": {"sliding_window": 64, "head_dim": 8},
}
"""Architectures that pack, by the name of their configuration."""

RAGGED = Recording.random(prompts=3, group=3, seed=3)


def padded(prompts: list[list[int]], completions: list[list[int]]) -> Rows:
    """Return rows in TRL's layout: prompts padded on the left, completions on the right."""
    left, right = max(map(len, prompts)), max(1, *map(len, completions))
    ids = [[0] * (left - len(p)) + p + c + [0] * (right - len(c)) for p, c in zip(prompts, completions, strict=True)]
    mask = [
        [0] * (left - len(p)) + [1] * (len(p) + len(c)) + [0] * (right - len(c))
        for p, c in zip(prompts, completions, strict=True)
    ]
    return Rows(device.here(torch.tensor(ids)), device.here(torch.tensor(mask)), right)


def flat(recording: Recording) -> Rows:
    """Return the rows of a recording in TRL's layout."""
    pairs = [
        (prompt, completion)
        for prompt, group in zip(recording.prompts, recording.completions, strict=True)
        for completion in group
    ]
    return padded([prompt for prompt, _ in pairs], [completion for _, completion in pairs])


def test_rows_that_should_share_a_micro_batch_are_neighbours_in_their_own_order() -> None:
    rng = np.random.default_rng(0)
    prompts = [[5 + int(kind)] * (1 + int(kind)) for kind in rng.integers(0, 3, 100)]
    completions = [[9] * int(length) for length in rng.integers(0, 4, 100)]
    host = padded(prompts, completions).host
    shared = sorted(range(100), key=lambda row: prompts.index(prompts[row]))
    for layout in (Layout.SHARED_PADDED, Layout.SHARED, Layout.PACKED):
        assert order(host, layout).tolist() == shared
    trimmed = sorted(range(100), key=lambda row: (len(completions[row]), len(prompts[row])))
    assert order(host, Layout.TRIMMED).tolist() == trimmed


def one_by_one(policy: PreTrainedModel, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies, each (B, T), from the logits of each row alone, without padding."""
    log_probs, entropies = (device.here(torch.zeros(rows.completion_mask.shape)) for _ in range(2))
    policy = device.here(policy)
    with torch.no_grad():
        for row, (ids, mask) in enumerate(zip(rows.input_ids, rows.attention_mask, strict=True)):
            length = int(mask[-rows.logits_to_keep :].sum())
            tokens = ids[mask.bool()][None]
            if length:
                logits = policy(tokens, use_cache=False).logits[0, -length - 1 : -1].log_softmax(-1)
                log_probs[row, :length] = logits.gather(1, tokens[0, -length:, None])[:, 0]
                entropies[row, :length] = -(logits.exp() * logits).sum(-1)
    return log_probs, entropies


def trainer_on(policy: PreTrainedModel, folder: Path, recording: Recording = RAGGED, **config: Any) -> GRPOTrainer:
    count = len(recording.prompts) * recording.group
    return make_trainer(GRPOTrainer, recording, policy, folder, per_device_train_batch_size=count, **config)


def scored(trainer: TRLGRPOTrainer, rows: Rows, **kwargs: Any) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        log_probs, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, rows.input_ids, rows.attention_mask, rows.logits_to_keep, compute_entropy=True, **kwargs
        )
    return log_probs, entropies


def layout_of(trainer: GRPOTrainer) -> Layout:
    (layout,) = trainer._log_probs._layouts.values()
    return layout


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Any:
    """Return a function that lists the messages logged about the layout."""
    return lambda: [record.getMessage() for record in caplog.records if record.name == layout_check.__name__]


# ---- the row


def test_a_packed_row_against_one_written_by_hand() -> None:
    rows = padded([[5, 6, 7], [8], [5, 6, 7]], [[10, 11], [12, 13], [14]])
    packed = pack(rows)
    #                            5 6 | 7 10 | 7 | 8 12: the prompt 5 6 7 once, each label predicted by one position
    assert packed.input_ids[0].tolist() == [5, 6, 7, 10, 7, 8, 12]
    assert packed.position_ids[0].tolist() == [0, 1, 2, 3, 2, 0, 1]
    assert packed.labels[0].tolist() == [-100, -100, 10, 11, 14, 12, 13]
    assert packed.groups == [((0, 2), [(2, 4), (4, 5)]), ((5, 5), [(5, 7)])]
    assert packed.rows.tolist() == [0, 0, 2, 1, 1]
    assert packed.columns.tolist() == [0, 1, 0, 0, 1]
    assert packed.positions.tolist() == [2, 3, 4, 5, 6]


tokens = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@settings(deadline=None)
@given(st.lists(st.tuples(tokens, st.lists(st.integers(1, 9), max_size=4)), min_size=1, max_size=6))
def test_every_label_is_predicted_once_from_its_own_context(pairs: list[tuple[list[int], list[int]]]) -> None:
    rows = padded([prompt for prompt, _ in pairs], [completion for _, completion in pairs])
    packed = pack(rows)
    ids, labels = packed.input_ids[0].tolist(), packed.labels[0].tolist()
    found: dict[tuple[int, int], int] = {}
    for row, column, position in zip(packed.rows, packed.columns, packed.positions, strict=True):
        found[int(row), int(column)] = labels[int(position)]
    expected = {(row, column): token for row, (_, c) in enumerate(pairs) for column, token in enumerate(c)}
    assert found == expected
    contexts = [
        tuple(ids[a:b] + ids[c:d])
        for (a, b), (c, d) in GroupSpans(packed.groups).segments()
        if (labels[c:d] or [0])[0] != -100
    ]
    assert sorted(contexts) == sorted((*p, *c)[:-1] for p, c in pairs if c)
    distinct = {tuple(prompt) for prompt, completion in pairs if completion}
    needed = sum(len(prompt) - 1 for prompt in distinct) + sum(len(completion) for _, completion in pairs)
    assert len(ids) == rows.host.packed_tokens() == max(needed, 1)


# ---- log-probabilities, entropies and gradients


@pytest.mark.gpu
@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("architecture", EXACT)
def test_packed_log_probabilities_are_those_of_unpadded_rows(architecture: str, tmp_path: Path, logged: Any) -> None:
    policy = model(getattr(transformers, architecture), **EXACT[architecture])
    rows = flat(RAGGED)
    expected = one_by_one(policy.eval(), rows)
    trainer = trainer_on(policy, tmp_path)
    got = scored(trainer, rows)
    assert layout_of(trainer) is Layout.PACKED, logged()
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=device.tolerance(1e-5), rtol=0)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("batch_size", [1, 2, 4, 9])
@pytest.mark.parametrize("pack_rows", [True, False])
def test_every_batch_size_gives_the_same_values_in_as_many_model_calls(
    batch_size: int, pack_rows: bool, tmp_path: Path
) -> None:
    trainer = trainer_on(model(), tmp_path, micro_batching={"layout": "packed" if pack_rows else "trimmed"})
    rows = flat(RAGGED).select(np.array([4, 0, 8, 2, 6, 1, 5, 3, 7]))
    expected = one_by_one(trainer.model, rows)
    scored(trainer, rows)  # the first call chooses the layout
    calls: list[int] = []
    handle = trainer.model.register_forward_pre_hook(lambda *_: calls.append(1))
    got = scored(trainer, rows, batch_size=batch_size)
    handle.remove()
    assert len(calls) == -(-9 // batch_size)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("pack_rows", [True, False])
def test_rows_without_a_token_to_score(pack_rows: bool, tmp_path: Path) -> None:
    trainer = trainer_on(model(), tmp_path, micro_batching={"layout": "packed" if pack_rows else "trimmed"})
    scored(trainer, flat(RAGGED))
    some = padded([[5, 6, 7], [8], [5, 6, 7]], [[10, 11], [], []])
    expected = one_by_one(trainer.model, some)
    ran: list[int] = []
    count = trainer.model.register_forward_pre_hook(
        lambda _, args, given: ran.append(given["input_ids"].numel()), with_kwargs=True
    )
    torch.testing.assert_close(scored(trainer, some), expected, atol=1e-5, rtol=0)
    count.remove()
    assert [trainer._log_probs.tokens(trainer.model, some.host, layout_of(trainer))] == ran
    assert trainer._log_probs.tokens(trainer.model, some.host, Layout.PADDED) == some.input_ids.numel()
    none = padded([[5, 6, 7], [8]], [[], []])
    trainer.model.train()
    log_probs, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, none.input_ids, none.attention_mask, none.logits_to_keep, compute_entropy=True
    )
    assert not log_probs.any()
    assert not entropies.any()
    log_probs.sum().backward()  # DDP and ZeRO wait for a gradient of each parameter
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in trainer.model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_runs_the_layers_again_with_the_spans(use_reentrant: bool, tmp_path: Path) -> None:
    keywords = {"use_reentrant": use_reentrant}
    gap = compare(
        RAGGED,
        tmp_path,
        per_device_train_batch_size=9,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs=keywords,
        beta=0.04,
    )
    assert gap <= device.tolerance(1e-5)


@pytest.mark.gpu
def test_packing_with_lora(tmp_path: Path) -> None:
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0)
    gap = compare(RAGGED, tmp_path, per_device_train_batch_size=9, peft_config=adapter, beta=0.04)
    assert gap <= device.tolerance(1e-5)


def test_packing_with_a_temperature_and_a_float32_head(tmp_path: Path) -> None:
    config = {"temperature": 0.7, "cast_lm_head_to_fp32": True}
    assert compare(RAGGED, tmp_path, per_device_train_batch_size=9, **config) <= 1e-5


@pytest.mark.gpu
def test_a_bfloat16_model_is_packed(tmp_path: Path, logged: Any) -> None:
    trainer = trainer_on(model().bfloat16(), tmp_path)
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.PACKED
    if device.NAME != "pretend":  # a pretend GPU has no FlashAttention
        assert logged() == []


# ---- models and settings that must not be packed


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "router_aux_loss_coef": 0.0}
FALLS_BACK: dict[str, tuple[str, dict[str, Any]]] = {
    "layers of linear_attention": ("Qwen3NextConfig", LINEAR),
    "does not go through transformers' AttentionInterface": (
        "BloomConfig",
        {"n_head": 4, "n_layer": 2, "attn_implementation": "eager"},
    ),  # ALiBi
    "the model has dropout": ("LlamaConfig", {"attention_dropout": 0.5}),
    "is not that of SDPA": ("Gemma2Config", {"sliding_window": 64, "head_dim": 8, "attn_implementation": "eager"}),
    "depend on padding": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, **NO_DROPOUT}),  # learned positions
    "rows of more than 8 tokens": ("MistralConfig", {"sliding_window": 8}),
    "more than 8 tokens": ("Gemma3TextConfig", {"sliding_window": 8, "head_dim": 8}),  # sliding window in some layers
    "a rotary table of type longrope depends on the longest row": (
        "Phi3Config",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 20,  # some rows are shorter, some longer
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
                "original_max_position_embeddings": 20,
            },
        },
    ),
    "a rotary table of type dynamic depends on the longest row": (
        "LlamaConfig",
        {
            "max_position_embeddings": 20,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        },
    ),
    "router loss": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    ),
}
"""Reason for which a model is not packed, and a model with that reason."""


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("reason", only(FALLS_BACK.keys() - {"layers of linear_attention"}, FALLS_BACK))
def test_a_model_that_cannot_be_packed_logs_the_reason_once(reason: str, tmp_path: Path, logged: Any) -> None:
    name, config = FALLS_BACK[reason]
    policy, twin = (model(getattr(transformers, name), **config).eval() for _ in range(2))
    ours = trainer_on(policy, tmp_path)
    theirs = make_trainer(TRLGRPOTrainer, RAGGED, twin, tmp_path, per_device_train_batch_size=9)
    rows = flat(RAGGED)
    for _ in range(2):
        got, expected = scored(ours, rows), scored(theirs, rows)
        for mine, other in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)
    (sentence,) = logged()
    assert reason in sentence


@pytest.mark.parametrize("pack_rows", [True, False])
def test_a_rotary_table_of_the_longest_row_in_one_kind_of_layer(pack_rows: bool, tmp_path: Path, logged: Any) -> None:
    """Rows are neither packed nor trimmed, because the width of the rows is part of the result."""
    local = {"rope_type": "default", "rope_theta": 10000.0}
    rotary = {"full_attention": {**local, "rope_type": "dynamic", "factor": 4.0}, "sliding_attention": local}
    policy = model(transformers.Gemma3TextConfig, sliding_window=64, head_dim=8, rope_parameters=rotary)
    trainer = trainer_on(policy, tmp_path, micro_batching={"layout": "packed" if pack_rows else "trimmed"})
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.PADDED
    assert "rotary table of type dynamic" in logged()[0]


def test_a_mixture_of_experts_without_router_loss_is_packed(tmp_path: Path) -> None:
    config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    policy = model(transformers.Qwen3MoeConfig, router_aux_loss_coef=0.0, **config)
    expected = one_by_one(policy.eval(), flat(RAGGED))
    trainer = trainer_on(policy, tmp_path)
    torch.testing.assert_close(scored(trainer, flat(RAGGED)), expected, atol=1e-5, rtol=0)
    assert layout_of(trainer) is Layout.PACKED


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"pad_to_multiple_of": 8}, "pad_to_multiple_of asks for the shapes that TRL makes"),
    ],
)
def test_settings_that_forbid_packing(config: dict[str, Any], reason: str, tmp_path: Path, logged: Any) -> None:
    trainer = trainer_on(model(), tmp_path, **config)
    expected = one_by_one(trainer.model, flat(RAGGED))
    torch.testing.assert_close(scored(trainer, flat(RAGGED)), expected, atol=1e-5, rtol=0)
    assert layout_of(trainer) < Layout.PACKED
    assert trainer.model.config._attn_implementation == "sdpa"
    (sentence,) = logged()
    assert reason in sentence


def test_lora_dropout_forbids_packing_but_not_trimming(tmp_path: Path, logged: Any) -> None:
    adapter = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    trainer = trainer_on(model(), tmp_path, peft_config=adapter)
    trainer.model.train()
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.TRIMMED
    assert all(module.training for module in trainer.model.modules())
    (sentence,) = logged()
    assert "dropout" in sentence


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout"])
def test_a_dropout_rate_that_is_an_attribute(rate: str, tmp_path: Path, logged: Any) -> None:
    """OPT has no `nn.Dropout` and stores both of its rates as `self.dropout`."""
    rates = {"dropout": 0.0, "attention_dropout": 0.0, rate: 0.1}
    trainer = trainer_on(model(transformers.OPTConfig, ffn_dim=48, word_embed_proj_dim=32, **rates), tmp_path)
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.TRIMMED
    assert "the model has dropout" in logged()[0]


def test_attention_dropout_in_a_packed_row_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_check, "unsupported", lambda model: "")
    monkeypatch.setattr(layout_check, "unshareable", lambda model: "")
    monkeypatch.setattr(
        layout_check.LayoutCheck, "_compare_short_rows", lambda self, model, bare, rows, found, in_columns: (found, "")
    )
    trainer = trainer_on(model(transformers.LlamaConfig, attention_dropout=0.5), tmp_path)
    trainer.model.train()
    with pytest.raises(RuntimeError, match="0 of its . layers keep the completions"):
        scored(trainer, flat(RAGGED))


class WithFullKL(GRPOTrainer):
    """A trainer whose KL term reads the hidden states of TRL's rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, kl_estimator="full", **kwargs)


def test_rows_that_the_full_kl_reads_stay_padded(tmp_path: Path, logged: Any) -> None:
    trainer = make_trainer(WithFullKL, RAGGED, model(), tmp_path, beta=0.04, per_device_train_batch_size=9)
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.PADDED
    (sentence,) = logged()
    assert "are padded, not packed: the full-vocabulary KL reads the hidden states of TRL's rows" in sentence


@pytest.mark.parametrize(
    ("kinds", "window"),
    [(None, 8), (["sliding_attention", "full_attention"], 8), (["full_attention", "full_attention"], None)],
)
def test_a_sliding_window_counts_only_if_a_layer_uses_it(kinds: list[str] | None, window: int | None) -> None:
    assert layout_check.attention_window(SimpleNamespace(sliding_window=8, layer_types=kinds)) == window


# ---- models whose configuration shows nothing


def test_the_first_micro_batch_shows_a_wrong_mask(tmp_path: Path, logged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with a supported configuration is still not packed if its log-probabilities change."""
    monkeypatch.setattr(layout_check, "attention_window", lambda config: None)
    trainer = trainer_on(model(transformers.MistralConfig, sliding_window=8), tmp_path)
    expected = one_by_one(trainer.model, flat(RAGGED))
    torch.testing.assert_close(scored(trainer, flat(RAGGED)), expected, atol=1e-5, rtol=0)
    assert layout_of(trainer) is Layout.SHARED
    assert trainer.model.config._attn_implementation == "sdpa"
    (sentence,) = logged()
    assert "packed rows give other results (log-probabilities by " in sentence
    assert "on the first micro-batch" in sentence


@pytest.mark.slow
def test_a_layer_that_ignores_the_spans_is_noticed(
    tmp_path: Path, logged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_check, "unsupported", lambda model: "")
    policy = model(transformers.Qwen3NextConfig, **LINEAR).eval()
    expected = one_by_one(policy, flat(RAGGED))
    trainer = trainer_on(policy, tmp_path)
    torch.testing.assert_close(scored(trainer, flat(RAGGED)), expected, atol=1e-5, rtol=0)
    (sentence,) = logged()
    assert "1 of its 2 layers keep the completions of a packed row apart" in sentence


def test_a_model_is_not_packed_if_none_of_its_first_rows_can_be_compared(tmp_path: Path, logged: Any) -> None:
    trainer = trainer_on(model(transformers.MistralConfig, sliding_window=1), tmp_path)
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.TRIMMED
    assert "no row of the first micro-batch can be packed" in logged()[-1]


def test_rows_as_long_as_the_context_can_be_compared(tmp_path: Path, logged: Any) -> None:
    learned = {"n_embd": 32, "n_layer": 2, "n_head": 4, **NO_DROPOUT}
    longest = flat(RAGGED).input_ids.shape[1]
    trainer = trainer_on(model(transformers.GPT2Config, **{**learned, "max_position_embeddings": longest}), tmp_path)
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.SHARED_PADDED
    assert "its positions are learned" in logged()[0]
    rotary = trainer_on(model(max_position_embeddings=longest), tmp_path)
    scored(rotary, flat(RAGGED))
    assert layout_of(rotary) is Layout.PACKED
    bloom = model(transformers.BloomConfig, n_head=4, n_layer=2, attn_implementation="eager")
    del bloom.config.max_position_embeddings  # a configuration without a limit: ALiBi has no longest row
    assert (
        layout_check._padded_call(flat(RAGGED), bloom).rows.input_ids.shape[1]
        == longest + 2 * layout_check.EXTRA_PADDING
    )


def test_rows_without_a_label_decide_nothing(tmp_path: Path, logged: Any) -> None:
    trainer = trainer_on(model(), tmp_path)
    scored(trainer, padded([[5, 6, 7], [8]], [[], []]))
    assert trainer._log_probs._layouts == {}
    assert logged() == []
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.PACKED


def test_a_layer_with_a_float_mask_is_not_packed(tmp_path: Path, logged: Any) -> None:
    """Doge adds a learned float mask, which is too small to show in the log-probabilities of bfloat16."""
    policy = model(transformers.DogeConfig, router_aux_loss_coef=0.0, output_router_logits=False).bfloat16()
    trainer = trainer_on(policy, tmp_path, disable_dropout=True)
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.SHARED
    (sentence,) = logged()
    assert "0 of its 2 layers keep the completions of a packed row apart" in sentence


class MixesNeighbours(nn.Module):
    """A layer that adds the preceding token of the row, whatever attention mask and position ids are."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden + hidden.roll(1, dims=1) * (torch.arange(hidden.shape[1]) > 0)[:, None])


class CountsFromTheRow(nn.Module):
    """A rotary table by place in the row instead of `position_ids`, which is correct as long as no prompt is shared."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, hidden: Tensor, position_ids: Tensor, **kwargs: Any) -> Tensor:
        return self.table(hidden, torch.arange(hidden.shape[1])[None], **kwargs)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("rows", [[4], [0, 4], [5, 0]], ids=str)
@pytest.mark.parametrize("fault", [MixesNeighbours, CountsFromTheRow])
def test_one_row_is_packed_twice_if_no_prompt_is_shared(
    fault: type[nn.Module], rows: list[int], tmp_path: Path, logged: Any
) -> None:
    """One completion packed alone is the unpadded row, and any model would agree with it."""
    policy = model(transformers.LlamaConfig)
    if fault is MixesNeighbours:
        for layer in policy.model.layers:
            layer.mlp = fault(layer.mlp)
    else:
        policy.model.rotary_emb = fault(policy.model.rotary_emb)
    trainer = trainer_on(policy, tmp_path)
    scored(trainer, flat(RAGGED).select(np.array(rows)))
    assert layout_of(trainer) is Layout.TRIMMED
    assert "packed rows give other results (log-probabilities" in logged()[0]


SHORT = padded([[5, 6], [5, 6]], [[7, 8, 9], [7, 1]])
LONG = padded([[5, 6, 7, 8]] * 2, [[7, 8, 9, 5, 6, 3, 2, 5], [7, 8, 9, 5, 6, 3, 2, 1]])
UNLABELLED = padded([[5, 6], [5, 6]], [[], []])
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, **NO_DROPOUT}


def on_two_ranks(trainers: list[GRPOTrainer], rows: list[Rows]) -> list[list[str]]:
    """Return the model calls and collectives of each of two ranks, one thread each, while they choose a layout.

    Both ranks wait for each other as under ZeRO-3. Ranks that diverge raise BrokenBarrierError instead of hanging.
    """
    barrier, slots, done = Barrier(2, timeout=20), [None, None], [[], []]

    def meet(rank: int, what: str, value: Any = None) -> list[Any]:
        slots[rank] = (what, value)
        barrier.wait()
        met = list(slots)
        barrier.wait()
        assert met[0][0] == met[1][0], f"one rank waits in a {met[0][0]}, the other in a {met[1][0]}"
        done[rank].append(what)
        return [entry for _, entry in met]

    this = threading.local()

    def choose(rank: int) -> None:
        this.rank, trainer = rank, trainers[rank]
        trainer.model.register_forward_pre_hook(lambda *_: meet(rank, "model call") and None)
        trainer._log_probs.layout(trainer.model, rows[rank], len(rows[rank].input_ids))

    collective = mock.patch.object(
        layout_check, "on_any_rank", lambda flag, _: any(meet(this.rank, "collective", flag))
    )
    with collective, ThreadPoolExecutor(2) as pool:
        list(pool.map(choose, range(2)))
    return done


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("name", "config", "first", "second", "found"),
    [
        ("MistralConfig", {"sliding_window": 8}, SHORT, LONG, Layout.PACKED),  # one rank has no row inside the window
        ("MistralConfig", {"sliding_window": 4}, LONG, LONG, Layout.SHARED),  # no rank has one
        ("GPT2Config", GPT2, LONG, UNLABELLED, Layout.SHARED_PADDED),  # only one rank notices that padding matters
        (
            "GPT2Config",
            {**GPT2, "max_position_embeddings": 12},
            SHORT,
            LONG,
            Layout.PADDED,
        ),  # no room for padding on one rank
        ("Qwen2Config", {}, SHORT, UNLABELLED, Layout.PACKED),
    ],
)
def test_ranks_make_the_same_calls_while_they_choose_a_layout(
    name: str, config: dict[str, Any], first: Rows, second: Rows, found: Layout, swapped: bool, tmp_path: Path
) -> None:
    trainers = [trainer_on(model(getattr(transformers, name), **config), tmp_path) for _ in range(2)]
    done = on_two_ranks(trainers, [second, first] if swapped else [first, second])
    assert done[0] == done[1]
    assert [layout_of(trainer) for trainer in trainers] == [found, found]


def test_no_rank_calls_the_model_if_no_rank_has_a_label(tmp_path: Path) -> None:
    trainers = [trainer_on(model(), tmp_path) for _ in range(2)]
    assert on_two_ranks(trainers, [UNLABELLED, UNLABELLED]) == [["collective"]] * 2
    assert [trainer._log_probs._layouts for trainer in trainers] == [{}, {}]


def test_one_rank_that_disagrees_decides_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_check, "attention_window", lambda config: None)
    trainers = [trainer_on(model(transformers.MistralConfig, sliding_window=6), tmp_path) for _ in range(2)]
    done = on_two_ranks(trainers, [SHORT, LONG])
    assert done[0] == done[1]
    assert [layout_of(trainer) for trainer in trainers] == [Layout.SHARED] * 2
    assert [trainer.model.config._attn_implementation for trainer in trainers] == ["sdpa"] * 2


def test_rows_with_holes_in_their_completion_mask_are_not_packed(tmp_path: Path, logged: Any) -> None:
    trainer = trainer_on(model(), tmp_path)
    scored(trainer, flat(RAGGED))
    rows = padded([[5, 6, 7], [5, 6, 7]], [[10, 11, 12], [13, 14, 15]])
    rows.attention_mask[0, 4] = 0
    theirs = make_trainer(TRLGRPOTrainer, RAGGED, model(), tmp_path, per_device_train_batch_size=9)
    torch.testing.assert_close(scored(trainer, rows), scored(theirs, rows), atol=1e-5, rtol=0)
    assert "holes" in logged()[0]


def test_multimodal_inputs_are_scored_by_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_on(model(), tmp_path)
    seen: dict[str, Any] = {}

    def score(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None, None]:
        seen.update(kwargs)
        return torch.zeros(1, 1), None, None

    monkeypatch.setattr(TRLGRPOTrainer, "_get_per_token_logps_and_entropies", score)
    rows = flat(RAGGED)
    pixels = torch.zeros(2, 3)
    for fields in ({"pixel_values": pixels, "num_images": None}, {"num_images": [], "pixel_values": None}):
        seen.clear()
        trainer._get_per_token_logps_and_entropies(
            trainer.model, rows.input_ids, rows.attention_mask, rows.logits_to_keep, **fields
        )
        assert seen == fields
    assert trainer._log_probs._layouts == {}


def test_generation_is_the_same_with_the_packing_attention(tmp_path: Path) -> None:
    policy = model().eval()
    inputs = {
        "input_ids": torch.tensor([[0, 0, 5, 6], [7, 8, 9, 4]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1], [1] * 4]),
    }
    before = policy.generate(
        **inputs, max_new_tokens=8, do_sample=False, output_scores=True, return_dict_in_generate=True
    )
    AttentionSwitch().pack(policy)
    after = policy.generate(
        **inputs, max_new_tokens=8, do_sample=False, output_scores=True, return_dict_in_generate=True
    )
    assert torch.equal(before.sequences, after.sequences)
    assert all(torch.equal(a, b) for a, b in zip(before.scores, after.scores, strict=True))
    policy.save_pretrained(tmp_path)
    assert ATTENTION not in (tmp_path / "config.json").read_text()


# ---- contracts with the libraries


def test_contract_with_trl() -> None:
    """TRL 1.16 has the functions and arguments that log_probs.py and trainer.py use."""
    log_probs = inspect.signature(TRLGRPOTrainer._get_per_token_logps_and_entropies).parameters
    expected = ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"]
    assert list(log_probs)[:8] == [*expected, "compute_aux_loss"], (
        "TRL changed `_get_per_token_logps_and_entropies`: adapt seam 2 in grpo_recipes/training/trainer.py"
    )
    assert {"pixel_values", "token_type_ids"} <= set(log_probs), "TRL moved its multimodal arguments: adapt seam 2"
    forward = inspect.getsource(add_fused_lm_head)
    for needed in ("shift_labels=None", "**kwargs)"):
        assert needed in forward, f"TRL's fused head has no `{needed}`: packed rows have no other way into the model"
    assert {"log_probs", "entropy"} <= set(inspect.signature(FusedCausalLMOutput).parameters), "adapt _run_packed"


def test_contract_with_transformers() -> None:
    """Transformers has the functions and arguments that packed_attention.py and log_probs.py use."""
    AttentionSwitch().pack(model())
    sdpa = inspect.signature(packed_attention.sdpa_attention_forward).parameters
    assert list(sdpa)[:7] == ["module", "query", "key", "value", "attention_mask", "dropout", "scaling"], (
        "transformers changed the attention functions that AttentionInterface holds: adapt packed_attention"
    )
    assert ATTENTION in transformers.AttentionInterface().valid_keys(), "AttentionInterface.register changed"
    assert ATTENTION in transformers.AttentionMaskInterface().valid_keys(), "AttentionMaskInterface changed"
    assert hasattr(PreTrainedModel, "_can_set_attn_implementation"), "adapt `unsupported`: it asks this of a model"
    update = inspect.getsource(dynamic_rope_update)
    for line in ('if "dynamic" in rope_type:', 'elif rope_type == "longrope":'):
        assert line in update, "transformers changed which rotary tables follow the row: adapt rotary_of_the_longest"
    attention = inspect.getsource(transformers.models.qwen2.modeling_qwen2.Qwen2Attention.forward)
    assert "**kwargs" in attention, "attention layers no longer pass arguments on: the spans can't reach the attention"


def test_fsdp_passes_the_spans_as_the_same_object() -> None:
    """FSDP2 in 16-bit precision rebuilds the containers and dataclasses among a forward's arguments."""
    if not hasattr(FSDPState, "_cast_forward_inputs"):
        pytest.skip("torch 2.8 casts inputs elsewhere")
    source = inspect.getsource(FSDPState._cast_forward_inputs)
    assert "_apply_to_tensors(cast_fn, kwargs)" in source, "torch casts the arguments of FSDP2's forwards another way"
    spans = GroupSpans(pack(flat(RAGGED)).groups)
    assert _apply_to_tensors(lambda tensor: tensor.bfloat16(), {"group_spans": spans})["group_spans"] is spans


def test_importing_the_module_registers_no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(transformers.AttentionInterface, "register", lambda *names: registered.append(names))
    runpy.run_path(str(packed_attention.__file__))
    assert not registered
