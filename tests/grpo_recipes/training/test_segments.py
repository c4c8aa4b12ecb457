"""Prompts shared through a cache: TRL's gradients, and faults that the verification must find."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.training import buckets, layout_check, log_probs, segments
from grpo_recipes.training.packing import Layout
from tests.grpo_recipes.training.test_packing import flat, layout_of, one_by_one, padded, scored, trainer_on
from tests.support import device
from tests.support.recorded import Recording, gradients, largest_gap, make_trainer, model
from tests.tools.models import build

RAGGED = Recording.random(prompts=3, group=3, seed=3)
KINDS = ["qwen3_5_text", "gpt_oss", "mamba2", "lfm2_moe", "granitemoehybrid", "gemma2", "bloom", "bert", "gpt2"]
"""Model types with recurrent states, convolutions, sinks, caps, ALiBi, and positions that count padding."""

IN_COLUMNS = {"bert", "gpt2"}
"""Model types whose prompts are shared in TRL's columns."""


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Any:
    """Return a function that lists the messages logged about the layout."""
    return lambda: [record.getMessage() for record in caplog.records if record.name == layout_check.__name__]


def both(
    kind: str, folder: Path, adapter: bool = False, **config: Any
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]], Layout]:
    """Return the gradients of one generation batch, by optimizer step, of TRL and of ours, and the layout of ours."""
    recording = Recording.random(prompts=4, group=4, seed=3, zero=(2,))
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    found: list[Any] = []
    for cls in (TRLGRPOTrainer, GRPOTrainer):
        policy: Any = build(kind)
        lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if adapter else None
        trainer = make_trainer(cls, recording, policy, folder / cls.__module__, peft_config=lora, **sizes, **config)
        if config.get("gradient_checkpointing"):
            trainer.model.gradient_checkpointing_enable(config.get("gradient_checkpointing_kwargs"))
            trainer.model.enable_input_require_grads()
        found.append(gradients(trainer, recording.rows()))
    return found[0], found[1], layout_of(trainer)


@pytest.mark.gpu
@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("qwen3_5_text", "gpt2") else pytest.mark.slow) for kind in KINDS]
)
def test_the_gradient_is_trls(kind: str, tmp_path: Path) -> None:
    theirs, ours, layout = both(kind, tmp_path)
    assert layout is (Layout.SHARED_PADDED if kind in IN_COLUMNS else Layout.SHARED)
    assert largest_gap(ours, theirs) < 1e-3


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "gpt_oss", "zamba2", "gpt2"])
def test_the_gradient_with_checkpointing_is_trls(kind: str, use_reentrant: bool, tmp_path: Path) -> None:
    """Layers inside a layer of Zamba 2 checkpoint too, and GPT-2's backbone passes no cache while it checkpoints."""
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": use_reentrant}}
    if use_reentrant and device.NAME == "pretend":
        pytest.skip("C++ fills in gradients of zeros on the device of C++")
    if kind == "zamba2" and use_reentrant:  # its layers share the embeddings, which TRL can't train either
        pytest.skip("reentrant checkpointing runs the graph of the embeddings twice")
    theirs, ours, layout = both(kind, tmp_path, **options)
    assert layout is (Layout.SHARED_PADDED if kind in IN_COLUMNS else Layout.SHARED)
    assert largest_gap(ours, theirs) < 1e-3


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5_text", "gpt_oss", "lfm2_moe"])
def test_the_gradient_of_an_adapter_is_trls(kind: str, tmp_path: Path) -> None:
    theirs, ours, layout = both(kind, tmp_path, adapter=True)
    assert layout is Layout.SHARED
    assert largest_gap(ours, theirs) < 1e-3


# ---- Faults, each found before the first step


def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layers write to the states of the prefixes."""
    monkeypatch.setattr(segments, "_keep_unchanged", lambda layer: None)


def changed_continuation(change: Callable[[Any], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a fault that changes each cache layer behind the prefixes."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        continuing = segments._continuing

        def changed(given: Any, prefixes: Any, indices: Any, owners: Tensor) -> Any:
            cache = continuing(given, prefixes, indices, owners)
            for index in indices:
                change(cache.layers[index])
            return cache

        monkeypatch.setattr(segments, "_continuing", changed)

    return plant


def without_gradient(layer: Any) -> None:
    for states in (layer.recurrent_states, layer.conv_states) if hasattr(layer, "recurrent_states") else ():
        for number, state in states.items():
            states[number] = state.detach() if state is not None else None


def without_key_gradient(layer: Any) -> None:
    if getattr(layer, "keys", None) is not None and layer.keys.device.type != "meta":
        layer.keys = layer.keys.detach()


def restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let positions and masks begin at 0 behind the prefixes."""
    of_length = segments._cache_of_length
    monkeypatch.setattr(segments, "_cache_of_length", lambda config, rows, columns: of_length(config, rows, 0))


def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the results of a bucket's rows to each other."""
    lay_out = buckets.lay_out

    def mixed(*args: Any) -> Any:
        laid = lay_out(*args)
        laid.rows.copy_(laid.rows.flip(0))
        return laid

    monkeypatch.setattr(log_probs, "lay_out", mixed)


def other_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the rows of a bucket continue the first prefix."""
    lay_out = buckets.lay_out

    def mixed(*args: Any) -> Any:
        laid = lay_out(*args)
        for segment in laid.segments.buckets:
            if segment.owners is not None:
                segment.owners.zero_()
        return laid

    monkeypatch.setattr(log_probs, "lay_out", mixed)


def lost_when_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layers that checkpointing runs again in the backward pass see an empty cache."""
    continuing = segments._continuing

    def lost(given: Any, prefixes: Any, indices: Any, owners: Tensor) -> Any:
        again = torch._C._current_graph_task_id() != -1  # inside a backward pass
        cache = continuing(given, prefixes, indices, owners)
        for index in indices if again else ():
            for number, state in getattr(cache.layers[index], "recurrent_states", {}).items():
                cache.layers[index].recurrent_states[number] = torch.zeros_like(state)
        return cache

    monkeypatch.setattr(segments, "_continuing", lost)


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = {
    "a state written in place": ("qwen3_5_text", in_place, {}),
    "a state without its gradient": ("qwen3_5_text", changed_continuation(without_gradient), {}),
    "keys without their gradient": ("gpt_oss", changed_continuation(without_key_gradient), {}),
    "positions that begin anew": ("gpt_oss", restarted, {}),
    "rows of a bucket swapped": ("gpt_oss", swapped, {}),
    "another row's prompt": ("qwen3_5_text", other_prompt, {}),
    "a cache that checkpointing loses": ("qwen3_5_text", lost_when_checkpointed, {"gradient_checkpointing": True}),
}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            name, marks=() if name in ("a state without its gradient", "another row's prompt") else pytest.mark.slow
        )
        for name in FAULTS
    ],
)
def test_a_fault_is_found_before_the_first_step(
    fault: str, tmp_path: Path, logged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, plant, config = FAULTS[fault]
    plant(monkeypatch)
    trainer = trainer_on(build(kind), tmp_path, router_aux_loss_coef=0.0, **config)
    trainer.model.train()
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.TRIMMED
    assert "shared prompts give other results" in logged()[0]


def test_a_model_that_computes_between_its_layers_is_not_segmented(tmp_path: Path, logged: Any) -> None:
    """Code between the layers sees the hidden states of the embedding while the layers' arguments are recorded."""
    policy = build("bloom")
    backbone = policy.transformer

    class Scaled(nn.ModuleList):
        def __iter__(self) -> Any:
            for layer in super().__iter__():
                yield partial(scaled, layer)

    def scaled(layer: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return layer(hidden * 2.0, *args, **kwargs)

    plain = backbone.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        layers = backbone.h
        backbone._modules["h"] = Scaled(layers)
        try:
            return plain(*args, **kwargs)
        finally:
            backbone._modules["h"] = layers

    backbone.forward = forward
    trainer = trainer_on(policy, tmp_path)
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.TRIMMED
    assert "the model computes between its layers" in logged()[0]


def test_each_call_of_a_mixer_gets_a_gradient_of_its_output_under_zero3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed gathers the weights of a call when that gradient arrives, and a prefix also feeds its states."""
    policy = build("mamba2")
    trainer = trainer_on(policy, tmp_path)
    rows = flat(RAGGED)
    scored(trainer, rows)
    assert layout_of(trainer) is Layout.SHARED
    calls: list[Tensor] = []
    reached: list[Tensor] = []

    def record(module: nn.Module, args: Any, output: Tensor) -> None:
        calls.append(output)
        output.register_hook(reached.append)

    policy.backbone.layers[-1].mixer.register_forward_hook(record)
    found = {}
    for zero3 in (False, True):
        monkeypatch.setattr(segments.SegmentedModel, "_is_zero3", zero3)
        policy.zero_grad()
        trainer._get_per_token_logps_and_entropies(
            trainer.model, rows.input_ids, rows.attention_mask, rows.logits_to_keep
        )[0].sum().backward()
        unreached = len(calls) - len(reached)
        found[zero3] = unreached, [parameter.grad for parameter in policy.parameters()]
        calls.clear()
        reached.clear()
    assert (found[False][0], found[True][0]) == (1, 0)
    torch.testing.assert_close(found[True][1], found[False][1], atol=1e-6, rtol=1e-5)


def test_prompts_are_not_shared_under_fsdp1() -> None:
    policy = build("qwen3_5_text")
    assert layout_check.sharding_of(policy) == ""
    policy.model.layers[0]._fsdp_wrapped_module = nn.Identity()
    assert "not under FSDP1" in layout_check.unsupported_under_sharding(policy, layout_check.sharding_of(policy))


def test_segments_of_several_chunks_are_computed_in_short_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, sizes = modeling_qwen3_5.torch_chunk_gated_delta_rule, []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        sizes.append(kwargs.get("chunk_size"))
        return rule(*args, **kwargs)

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", functools.wraps(rule)(recorded))
    policy = build("qwen3_5_text")
    trainer = trainer_on(policy, tmp_path, max_completion_length=80)
    rows = padded([[2, 3, 4]] * 3, [[2 + number % 13 for number in range(size)] for size in (70, 33, 5)])
    scored(trainer, rows)
    assert layout_of(trainer) is Layout.SHARED
    sizes.clear()
    found = scored(trainer, rows)
    assert set(sizes) == {segments.DELTA_RULE_CHUNK}
    torch.testing.assert_close(found, one_by_one(policy, rows), atol=1e-4, rtol=0)


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    policy = build("qwen3_5_text")
    layers = list(policy.model.layers)
    trainer = trainer_on(policy, tmp_path)
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.SHARED
    assert list(policy.model.layers) == layers
    assert "forward" not in vars(policy.model)
    assert not any("forward" in vars(layer) or layer._forward_hooks for layer in layers)


@pytest.mark.slow
def test_no_tensor_waits_for_the_garbage_collector(tmp_path: Path) -> None:
    """Tensors in a circle of references would stay in memory, with those of all layers, until Python looks for them."""
    trainer = trainer_on(build("qwen3_5_text"), tmp_path)
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.SHARED
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        scored(trainer, flat(RAGGED))
        gc.collect()
        assert not [found for found in gc.garbage if isinstance(found, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_checkpointing_leaves_no_hidden_states_behind(tmp_path: Path) -> None:
    """A function that a checkpoint keeps in the graph must not hold the graph's end, which would never be freed."""
    policy, rows = build("lfm2"), flat(RAGGED)
    trainer = trainer_on(policy, tmp_path, gradient_checkpointing=True)
    scored(trainer, rows)
    assert layout_of(trainer) is Layout.SHARED
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    states: list[Any] = []
    policy.model.layers[-1].register_forward_hook(lambda *given: states.extend(map(weakref.ref, given[2])))
    found = trainer._get_per_token_logps_and_entropies(policy, rows.input_ids, rows.attention_mask, rows.logits_to_keep)
    found[0].sum().backward()
    del found
    gc.collect()
    assert len(states) > 1
    assert all(state() is None for state in states)


def test_rows_behind_a_window_are_compared(tmp_path: Path, logged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a run may leave the window although those of the first micro-batch do not."""
    lengths: list[int] = []
    monkeypatch.setattr(layout_check, "with_edges", lambda rows, prompt, completion: lengths.append(prompt) or rows)
    policy = model(transformers.Gemma2Config, sliding_window=16, head_dim=8, attn_implementation="eager")
    trainer = trainer_on(policy, tmp_path, max_completion_length=40)
    scored(trainer, flat(RAGGED))
    assert lengths == [16 + layout_check.EXTRA_PADDING]


def test_rows_that_leave_the_window_of_a_packed_model_share_their_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(buckets.LAUNCH_TOKENS, "cpu", 1.0)
    policy = model(transformers.Gemma3TextConfig, sliding_window=24, head_dim=8)
    trainer = trainer_on(policy, tmp_path)
    scored(trainer, flat(RAGGED).select(slice(0, 3)))
    assert layout_of(trainer) is Layout.PACKED
    rows = flat(Recording.random(prompts=3, group=3, seed=3, longest=40))
    assert rows.host.mask.sum(1).max() > 24
    (layout, _) = trainer._log_probs._layout_of_call(trainer.model, rows.host, Layout.PACKED)
    assert layout is Layout.SHARED
    torch.testing.assert_close(scored(trainer, rows), one_by_one(policy, rows), atol=1e-5, rtol=0)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("part", ["dropout", "router"])
def test_prompts_are_not_shared_where_their_rows_would_share_noise_or_a_loss(
    part: str, tmp_path: Path, logged: Any
) -> None:
    if part == "dropout":
        policy: PreTrainedModel = get_peft_model(
            build("qwen3_5_text"), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5)
        )
        trainer = trainer_on(policy, tmp_path)
    else:
        trainer = trainer_on(build("gpt_oss"), tmp_path, router_aux_loss_coef=0.1)
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.TRIMMED
    assert ("dropout" if part == "dropout" else "router loss") in logged()[0]
