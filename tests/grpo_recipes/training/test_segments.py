"""Prompts shared through a cache: TRL's gradients, and faults that the verification must find."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from torch import Tensor, nn
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.training import segments
from grpo_recipes.training.packing import Layout
from tests.support import device
from tests.support.grids import only
from tests.support.layouts import (
    RAGGED,
    check_exact,
    chosen,
    flat,
    layout_of,
    logged,
    one_by_one,
    scored,
    trainer_on,
)
from tests.support.recorded import Recording, gradients, largest_gap, make_trainer, model
from tests.tools.models import build

ADAPTER = {"peft_config": LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)}
CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in ("qwen3_5_text", "gpt2", "mamba2", "lfm2_moe", "granitemoehybrid", "bert")},
    "adapter": ("qwen3_5_text", ADAPTER),
    "checkpointing": ("qwen3_5_text", CHECKPOINTING),
    "checkpointing, layers inside layers": ("zamba2", CHECKPOINTING),
    "reentrant checkpointing": ("qwen3_5_text", REENTRANT),
    "reentrant checkpointing, attention sinks": ("gpt_oss", REENTRANT),
    "reentrant checkpointing, no cache": ("gpt2", REENTRANT),
}
"""Model type and settings. Bert and GPT-2 count padding in their positions. `make models` compares every type."""


@pytest.mark.gpu
@pytest.mark.parametrize("case", only(["lfm2_moe", "gpt2"], CASES))
def test_the_gradient_is_trls(case: str, tmp_path: Path) -> None:
    kind, config = CASES[case]
    if config is REENTRANT and device.NAME == "pretend":
        pytest.skip("C++ fills in gradients of zeros on the device of C++")
    recording = Recording.random(prompts=4, group=4, seed=3, zero=(2,))
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    found = []
    for cls in (TRLGRPOTrainer, GRPOTrainer):
        trainer: Any = make_trainer(cls, recording, build(kind), tmp_path / cls.__module__, **sizes, **config)
        if config.get("gradient_checkpointing"):
            trainer.model.gradient_checkpointing_enable(config["gradient_checkpointing_kwargs"])
            trainer.model.enable_input_require_grads()
        found.append(gradients(trainer, recording.rows()))
    assert layout_of(trainer) is (Layout.SHARED_PADDED if kind in ("bert", "gpt2") else Layout.SHARED)
    assert largest_gap(found[1], found[0]) < 1e-3


# ---- Faults, each found before the first step


def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the layers write to the states of the prefixes."""
    monkeypatch.setattr(segments, "_keep_unchanged", lambda layer: None)


def continued(change: Callable[[Any], None], backward_only: bool = False) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a fault that changes each cache layer behind the prefixes, in the backward pass only if asked."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        continuing = segments._continuing

        def changed(given: Any, before: Any, indices: Any, owners: Tensor | None) -> Any:
            cache = continuing(given, before, indices, owners)
            in_backward = torch._C._current_graph_task_id() != -1
            for index in indices if owners is not None and (in_backward or not backward_only) else ():
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


def emptied(layer: Any) -> None:
    for number, state in getattr(layer, "recurrent_states", {}).items():
        layer.recurrent_states[number] = torch.zeros_like(state)


def restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let positions and masks begin at 0 behind the prefixes."""
    of_length = segments._cache_of_length
    monkeypatch.setattr(segments, "_cache_of_length", lambda config, rows, columns: of_length(config, rows, 0))


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None], dict[str, Any]]] = {
    "a state written in place": ("qwen3_5_text", in_place, {}),
    "a state without its gradient": ("lfm2", continued(without_gradient), {}),
    "keys without their gradient": ("gpt_oss", continued(without_key_gradient), {}),
    "positions that begin anew": ("gpt_oss", restarted, {}),
    "a cache that checkpointing loses": ("qwen3_5_text", continued(emptied, backward_only=True), CHECKPOINTING),
}


@pytest.mark.parametrize("fault", only(["a state without its gradient"], FAULTS))
def test_a_fault_is_found_before_the_first_step(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, plant, config = FAULTS[fault]
    plant(monkeypatch)
    assert chosen(build(kind), tmp_path, router_aux_loss_coef=0.0, **config) is Layout.TRIMMED
    assert "shared prompts" in logged(caplog)[0]


def test_a_model_that_computes_between_its_layers_is_not_segmented(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert chosen(policy, tmp_path) is Layout.TRIMMED
    assert "between its layers" in logged(caplog)[0]


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    """Build a trainer whose policy shares prompts, with and without checkpointing."""
    trainer = trainer_on(build("lfm2"), tmp_path_factory.mktemp("lfm2"), gradient_checkpointing=True)
    scored(trainer, flat(RAGGED))
    assert layout_of(trainer) is Layout.SHARED
    return trainer


def log_probs_of(trainer: GRPOTrainer) -> Tensor:
    """Return the log-probabilities of the recorded rows in the graph."""
    rows = flat(RAGGED)
    inputs = (trainer.model, rows.input_ids, rows.attention_mask, rows.logits_to_keep)
    return trainer._get_per_token_logps_and_entropies(*inputs)[0]


def test_each_call_of_a_mixer_gets_a_gradient_of_its_output_under_zero3(
    lfm2: GRPOTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed gathers the weights of a call when that gradient arrives, and a prefix also feeds its states."""
    policy: Any = lfm2.model
    calls: list[Tensor] = []
    reached: list[Tensor] = []

    def record(module: nn.Module, args: Any, output: Tensor) -> None:
        calls.append(output)
        output.register_hook(reached.append)

    handle = policy.model.layers[-1].conv.register_forward_hook(record)
    unreached, found = [], []
    for zero3 in (False, True):
        if zero3:  # DeepSpeed's mark of a partitioned weight
            monkeypatch.setattr(next(policy.model.parameters()), "ds_id", 0, raising=False)
        policy.zero_grad()
        log_probs_of(lfm2).sum().backward()
        unreached.append(len(calls) - len(reached))
        found.append([parameter.grad for parameter in policy.parameters()])
        calls.clear()
        reached.clear()
    handle.remove()
    assert unreached == [1, 0]
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-5)


def test_the_model_is_left_as_it_was(lfm2: GRPOTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an error inside a layer, such as a lack of memory.

    Tensors in a circle of references would stay in memory, with those of all layers, until Python looks for them.
    """
    policy: Any = lfm2.model
    layers = list(policy.model.layers)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        scored(lfm2, flat(RAGGED))
        gc.collect()
        assert not [found for found in gc.garbage if isinstance(found, Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    for failing in (False, True):
        if failing:
            monkeypatch.setattr(policy.model.layers[1].feed_forward, "forward", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                scored(lfm2, flat(RAGGED))
        assert list(policy.model.layers) == layers
        assert "forward" not in vars(policy.model)
        assert not any("forward" in vars(layer) or layer._forward_hooks for layer in layers)


def test_checkpointing_leaves_no_hidden_states_behind(lfm2: GRPOTrainer) -> None:
    """A function that a checkpoint keeps in the graph must not hold the graph's end, which would never be freed."""
    policy: Any = lfm2.model
    policy.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train()
    states: list[Any] = []
    ran: list[int] = []
    handles = [
        policy.model.layers[-1].register_forward_hook(lambda *given: states.extend(map(weakref.ref, given[2]))),
        policy.model.layers[0].feed_forward.register_forward_hook(lambda *_: ran.append(1)),
    ]
    found = log_probs_of(lfm2)
    once = len(ran)
    found.sum().backward()
    assert len(ran) > once, "the layers run again"
    del found
    gc.collect()
    assert len(states) > 1
    assert all(state() is None for state in states)
    for handle in handles:
        handle.remove()
    policy.gradient_checkpointing_disable()


def test_rows_that_leave_the_window_of_a_packed_model_share_their_prompts(tmp_path: Path) -> None:
    policy = model(transformers.Gemma3TextConfig, sliding_window=24, head_dim=8)
    trainer = trainer_on(policy, tmp_path)
    trainer._log_probs.launches = 1.0
    scored(trainer, flat(RAGGED).select(slice(0, 3)))
    assert layout_of(trainer) is Layout.PACKED
    rows = flat(Recording.random(prompts=3, group=3, seed=3, longest=40))
    assert rows.host.mask.sum(1).max() > 24
    check_exact(trainer, rows, one_by_one(policy, rows))
    computed, trimmed = (
        trainer._log_probs.plan(policy, rows.host, wanted).tokens for wanted in (Layout.PACKED, Layout.TRIMMED)
    )
    assert rows.host.packed_tokens() < computed < trimmed, "shared"


def test_a_model_whose_layers_no_forward_has_shown_runs_no_segments() -> None:
    with pytest.raises(segments.NotSegmented), segments.SegmentedModel(model()).taking_segments():
        pass
