"""Packed rows compared with one unpadded row at a time, and the checks that decide whether a model is packed."""

from __future__ import annotations

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
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
from grpo_recipes.process import ranks
from grpo_recipes.training import packed_attention
from grpo_recipes.training.packed_attention import ATTENTION, AttentionSwitch, GroupSpans
from grpo_recipes.training.packing import Layout, SpansIgnored, order, pack
from tests.support import device
from tests.support.grids import only
from tests.support.layouts import (
    RAGGED,
    check_exact,
    flat,
    layout_of,
    logged,
    one_by_one,
    padded,
    scored,
    trainer_on,
)
from tests.support.recorded import compare, make_trainer, model

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
EXACT: dict[str, dict[str, Any]] = {
    "Gemma3TextConfig": {"sliding_window": 64, "head_dim": 8},
    "Qwen3MoeConfig": {**EXPERTS, "router_aux_loss_coef": 0.0},
}
"""Architectures that pack, by the name of their configuration. `make models` compares every type."""


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


# ---- The row


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


@settings(deadline=None, max_examples=40)
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


# ---- Log-probabilities, entropies and gradients


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", only(["Gemma3TextConfig"], EXACT))
def test_packed_log_probabilities_are_those_of_unpadded_rows(
    architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = model(getattr(transformers, architecture), **EXACT[architecture])
    expected = one_by_one(policy.eval(), flat(RAGGED))
    trainer = trainer_on(policy, tmp_path)
    check_exact(trainer, flat(RAGGED), expected, device.tolerance(1e-5))
    assert layout_of(trainer) is Layout.PACKED, logged(caplog)


@pytest.mark.parametrize("layout", ["packed", "trimmed"])
def test_every_batch_size_gives_the_same_values_in_as_many_model_calls(layout: str, tmp_path: Path) -> None:
    trainer = trainer_on(model(), tmp_path, micro_batching={"layout": layout})
    rows = flat(RAGGED).select(np.array([4, 0, 8, 2, 6, 1, 5, 3, 7]))
    expected = one_by_one(trainer.model, rows)
    scored(trainer, rows)  # the first call chooses the layout
    calls: list[int] = []
    trainer.model.register_forward_pre_hook(lambda *_: calls.append(1))
    for batch_size in (4, 9):
        calls.clear()
        torch.testing.assert_close(scored(trainer, rows, batch_size=batch_size), expected, atol=1e-5, rtol=0)
        assert len(calls) == -(-9 // batch_size)


@pytest.mark.parametrize("layout", only(["packed"], ["packed", "trimmed"]))
def test_rows_without_a_token_to_score(layout: str, tmp_path: Path) -> None:
    trainer = trainer_on(model(), tmp_path, micro_batching={"layout": layout})
    none = padded([[5, 6, 7], [8]], [[], []])
    scored(trainer, none)
    assert trainer._log_probs._layouts == {}, "they decide nothing"
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout[layout.upper()]
    some = padded([[5, 6, 7], [8], [5, 6, 7]], [[10, 11], [], []])
    ran: list[int] = []
    count = trainer.model.register_forward_pre_hook(
        lambda _, args, given: ran.append(given["input_ids"].numel()), with_kwargs=True
    )
    scored(trainer, some)
    count.remove()
    check_exact(trainer, some, one_by_one(trainer.model, some))
    assert trainer._log_probs.plan(trainer.model, some.host, layout_of(trainer)).tokens == ran[0]
    assert trainer._log_probs.plan(trainer.model, some.host, Layout.PADDED).tokens == some.input_ids.numel()
    trainer.model.train()
    log_probs, entropies, _ = trainer._get_per_token_logps_and_entropies(
        trainer.model, none.input_ids, none.attention_mask, none.logits_to_keep, compute_entropy=True
    )
    assert not log_probs.any()
    assert not entropies.any()
    log_probs.sum().backward()  # DDP and ZeRO wait for a gradient of each parameter
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in trainer.model.parameters())


LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0)
HEAD = {"temperature": 0.7, "cast_lm_head_to_fp32": True}
CHECKPOINTING = {"gradient_checkpointing": True, "beta": 0.04}
STEPS: dict[str, dict[str, Any]] = {
    "checkpointing": {**CHECKPOINTING, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant checkpointing": {**CHECKPOINTING, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "LoRA": {"peft_config": LORA, "beta": 0.04},
    "checkpointing, temperature and float32 head": {**HEAD, "gradient_checkpointing": True},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", only(["LoRA", "checkpointing, temperature and float32 head"], STEPS))
def test_the_gradient_of_packed_rows_is_trls(name: str, tmp_path: Path) -> None:
    assert compare(RAGGED, tmp_path, per_device_train_batch_size=9, **STEPS[name]) <= device.tolerance(1e-5)


@pytest.mark.gpu
@device.slow_on_cpu
def test_a_bfloat16_model_is_packed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_on(model().bfloat16(), tmp_path)
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.PACKED
    if device.NAME != "pretend":  # a pretend GPU has no FlashAttention
        assert logged(caplog) == []


# ---- Models and settings that must not be packed


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, **NO_DROPOUT}  # learned positions
LOCAL = {"rope_type": "default", "rope_theta": 10000.0}
DYNAMIC = {**LOCAL, "rope_type": "dynamic", "factor": 4.0}
UP_TO_20 = {"original_max_position_embeddings": 20}  # some rows are shorter, some longer
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS, **UP_TO_20}
LONG = {"sliding_window": None, **UP_TO_20, "rope_parameters": LONGROPE}
WINDOW = {"sliding_window": 64, "head_dim": 8}
SOME_LAYERS = {"full_attention": DYNAMIC, "sliding_attention": LOCAL}
FALLS_BACK: dict[str, tuple[str, str, Layout, dict[str, Any]]] = {
    "caps": ("Gemma2", "SDPA", Layout.SHARED, {**WINDOW, "attn_implementation": "eager"}),
    "learned positions": ("GPT2", "padding", Layout.SHARED_PADDED, GPT2),
    "a window in some layers": ("Gemma3Text", "8 tokens", Layout.PACKED, {"sliding_window": 8, "head_dim": 8}),
    "longrope": ("Phi3", "longrope", Layout.PADDED, LONG),
    "dynamic": ("Llama", "dynamic", Layout.PADDED, {"max_position_embeddings": 20, "rope_parameters": DYNAMIC}),
    "dynamic in some layers": ("Gemma3Text", "dynamic", Layout.PADDED, {**WINDOW, "rope_parameters": SOME_LAYERS}),
}
"""Model, a word of the logged reason, layout, and changes of the model."""


@pytest.mark.parametrize("case", only(["a window in some layers", "dynamic"], FALLS_BACK))
def test_a_model_that_cannot_be_packed_logs_the_reason_once(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, reason, layout, config = FALLS_BACK[case]
    policy, twin = (model(getattr(transformers, f"{name}Config"), **config).eval() for _ in range(2))
    ours = trainer_on(policy, tmp_path)
    theirs = make_trainer(TRLGRPOTrainer, RAGGED, twin, tmp_path, per_device_train_batch_size=9)
    for _ in range(2):
        check_exact(ours, flat(RAGGED), scored(theirs, flat(RAGGED)))
    assert layout_of(ours) is layout
    (sentence,) = logged(caplog)
    assert reason in sentence


def test_attention_dropout_in_a_packed_row_raises(tmp_path: Path) -> None:
    """A script switches it on after the layout was verified."""
    policy = model(transformers.LlamaConfig)
    trainer = trainer_on(policy, tmp_path)
    scored(trainer, flat(RAGGED))
    for layer in policy.model.layers:
        layer.self_attn.attention_dropout = 0.5
    trainer.model.train()
    with pytest.raises(SpansIgnored, match="0 of its 2"):
        scored(trainer, flat(RAGGED))


def test_rows_that_the_full_kl_reads_stay_padded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_on(model(), tmp_path, kl_estimator="full", beta=0.04)
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.PADDED
    assert "KL" in logged(caplog)[0]


# ---- Models whose configuration shows nothing


def test_rows_as_long_as_the_context_can_be_compared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    longest = flat(RAGGED).input_ids.shape[1]
    trainer = trainer_on(model(transformers.GPT2Config, **{**GPT2, "max_position_embeddings": longest}), tmp_path)
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.SHARED_PADDED
    assert "learned" in logged(caplog)[0]
    rotary = trainer_on(model(max_position_embeddings=longest), tmp_path)
    scored(rotary, flat(RAGGED))
    assert layout_of(rotary) is Layout.PACKED


def test_a_layer_with_a_float_mask_is_not_packed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Doge adds a learned float mask, which is too small to show in the log-probabilities of bfloat16."""
    policy = model(transformers.DogeConfig, router_aux_loss_coef=0.0, output_router_logits=False).bfloat16()
    trainer = trainer_on(policy, tmp_path, disable_dropout=True)
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.SHARED
    assert "0 of its 2" in logged(caplog)[0]


class CountsFromTheRow(nn.Module):
    """A rotary table by place in the row instead of `position_ids`, which is correct as long as no prompt is shared."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, hidden: Tensor, position_ids: Tensor, **kwargs: Any) -> Tensor:
        return self.table(hidden, torch.arange(hidden.shape[1])[None], **kwargs)


def faulty() -> PreTrainedModel:
    """Return a model that is right as long as no prompt is shared."""
    policy = model(transformers.LlamaConfig)
    policy.model.rotary_emb = CountsFromTheRow(policy.model.rotary_emb)
    return policy


def test_one_row_is_packed_twice_if_no_prompt_is_shared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One completion packed alone is the unpadded row, and any model would agree with it."""
    trainer = trainer_on(faulty(), tmp_path)
    scored(trainer, flat(RAGGED).select(np.array([4])))
    assert layout_of(trainer) is Layout.TRIMMED
    assert "packed rows" in logged(caplog)[0]


SHORT = padded([[5, 6], [5, 6]], [[7, 8, 9], [7, 1]])
WIDE = padded([[5, 6, 7, 8]] * 2, [[7, 8, 9, 5, 6, 3, 2, 5], [7, 8, 9, 5, 6, 3, 2, 1]])
UNLABELLED = padded([[5, 6], [5, 6]], [[], []])


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
        ranks, "largest_of_ranks", lambda number, _: max(meet(this.rank, "collective", number))
    )
    with collective, ThreadPoolExecutor(2) as pool:
        list(pool.map(choose, range(2)))
    return done


RANKS: dict[str, tuple[str, dict[str, Any], Rows, Rows, Layout]] = {
    "one rank has no row inside the window": ("Mistral", {"sliding_window": 8}, SHORT, WIDE, Layout.PACKED),
    "no rank has one": ("Mistral", {"sliding_window": 4}, WIDE, WIDE, Layout.SHARED),
    "only one rank notices that padding matters": ("GPT2", GPT2, WIDE, UNLABELLED, Layout.SHARED_PADDED),
    "no room for padding": ("GPT2", {**GPT2, "max_position_embeddings": 12}, SHORT, WIDE, Layout.PADDED),
    "one rank has no label": ("Qwen2", {}, SHORT, UNLABELLED, Layout.PACKED),
}


@pytest.mark.parametrize("case", only(list(RANKS)[:3:2], RANKS))
def test_ranks_make_the_same_calls_while_they_choose_a_layout(case: str, tmp_path: Path) -> None:
    name, config, first, second, found = RANKS[case]
    trainers = [trainer_on(model(getattr(transformers, f"{name}Config"), **config), tmp_path) for _ in range(2)]
    done = on_two_ranks(trainers, [first, second])
    assert done[0] == done[1]
    assert [layout_of(trainer) for trainer in trainers] == [found, found]


def test_no_rank_calls_the_model_if_no_rank_has_a_label(tmp_path: Path) -> None:
    trainers = [trainer_on(model(), tmp_path) for _ in range(2)]
    assert on_two_ranks(trainers, [UNLABELLED, UNLABELLED]) == [["collective"]] * 2
    assert [trainer._log_probs._layouts for trainer in trainers] == [{}, {}]


def test_one_rank_that_disagrees_decides_for_all(tmp_path: Path) -> None:
    trainers = [trainer_on(policy, tmp_path) for policy in (model(transformers.LlamaConfig), faulty())]
    done = on_two_ranks(trainers, [SHORT, WIDE])
    assert done[0] == done[1]
    assert [layout_of(trainer) for trainer in trainers] == [Layout.TRIMMED] * 2
    assert [trainer.model.config._attn_implementation for trainer in trainers] == ["sdpa"] * 2


def test_rows_with_holes_in_their_completion_mask_are_not_packed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_on(model(), tmp_path)
    scored(trainer, flat(RAGGED))
    rows = padded([[5, 6, 7], [5, 6, 7]], [[10, 11, 12], [13, 14, 15]])
    rows.attention_mask[0, 4] = 0
    theirs = make_trainer(TRLGRPOTrainer, RAGGED, model(), tmp_path, per_device_train_batch_size=9)
    check_exact(trainer, rows, scored(theirs, rows))
    assert "holes" in logged(caplog)[0]


def test_multimodal_inputs_are_scored_by_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_on(model(), tmp_path)
    seen: dict[str, Any] = {}

    def score(self: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None, None]:
        seen.update(kwargs)
        return torch.zeros(1, 1), None, None

    monkeypatch.setattr(TRLGRPOTrainer, "_get_per_token_logps_and_entropies", score)
    rows = flat(RAGGED)
    for fields in ({"pixel_values": torch.zeros(2, 3), "num_images": None}, {"num_images": [], "pixel_values": None}):
        seen.clear()
        trainer._get_per_token_logps_and_entropies(
            trainer.model, rows.input_ids, rows.attention_mask, rows.logits_to_keep, **fields
        )
        assert seen == fields
    assert trainer._log_probs._layouts == {}


# ---- Contracts with the libraries


def test_contract_with_trl() -> None:
    """TRL 1.16 has the functions and arguments that log_probs.py and trainer.py use."""
    log_probs = inspect.signature(TRLGRPOTrainer._get_per_token_logps_and_entropies).parameters
    expected = ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"]
    adapt = "TRL changed `_get_per_token_logps_and_entropies`: adapt seam 2 in grpo_recipes/training/trainer.py"
    assert list(log_probs)[:8] == [*expected, "compute_aux_loss"], adapt
    assert {"pixel_values", "token_type_ids"} <= set(log_probs), adapt
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
