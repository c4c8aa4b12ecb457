"""Planned states compared with DeepSpeed's and accelerate's estimators and with a model's tensors, and generation."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from trl import GRPOConfig, ModelConfig

from grpo_recipes.plan.memory import (
    CHANGES,
    GIB,
    MemoryPlan,
    Sharding,
    parse_size,
    quantised_bytes,
)
from grpo_recipes.plan.model_shape import MemoryUnknown, ModelShape, RefusedAdapter, load_model
from grpo_recipes.recipe.recipe import find_file
from grpo_recipes.training.activations import Activations, Measured, MicroBatchShape
from grpo_recipes.training.layout_facts import LayoutFacts
from grpo_recipes.training.packing import Layout
from grpo_rewards.terminal import Labelled
from tests.support import launching, qwen
from tests.support.errors import refused
from tests.tools.models import build

STATES = ("parameters", "gradients", "optimizer")


def states(run: MemoryPlan) -> tuple[float, ...]:
    found = run._deepspeed_states() if run.sharding.is_deepspeed else run._torch_states()
    return tuple(found[name] for name in STATES)


# ---- States


TINY = LlamaConfig(
    **{"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
)
LORA = LoraConfig(r=2, target_modules=["q_proj", "k_proj"])


@functools.cache
def built(has_adapter: bool) -> tuple[ModelShape, LayoutFacts]:
    """Build the tiny model once for all tests, because it keeps what it has measured."""
    shape, model = ModelShape.built(TINY, LORA if has_adapter else None)
    return shape, facts_of(Activations(model))


def facts_of(activations: Any) -> LayoutFacts:
    return LayoutFacts("llama", Layout.PADDED, "", activations)


class Nothing:
    """Activations of no bytes, for tests of other parts: a measurement takes half a second."""

    def measure(self, batch: MicroBatchShape) -> Measured:
        return Measured(0, 0, 0)


def given(model: Path | None = None, adapter: LoraConfig | None = None, **changes: Any) -> MemoryPlan:
    """Return the plan of a model, by default the tiny one. Keys of `GRPOConfig` are among the changes."""
    if model is None:
        shape, facts = built(adapter is not None)
    else:
        shape, network = load_model(str(model), adapter)
        facts = facts_of(Activations(network))
    fields = MemoryPlan.__dataclass_fields__
    own = {name: value for name, value in changes.items() if name in fields}
    keys = {"output_dir": "unused", "use_cpu": True, "bf16": False, "report_to": "none", "num_generations": 2}
    keys |= {"max_completion_length": 8, "gradient_checkpointing": False}
    config = GRPOConfig(**{**keys, **{name: value for name, value in changes.items() if name not in fields}})
    values = {"sharding": Sharding(), "rows": 4, "steps_per_generation": 2, "prompt_tokens": 8, "dtype_bytes": 2}
    return MemoryPlan(**{"shape": shape, "facts": facts, "config": config, **values, **own})


def test_model_states_agree_with_deepspeed(tmp_path: Path) -> None:
    """A frozen base adds 2 bytes per parameter, split over the GPUs."""
    full = given(qwen.write_config(tmp_path, "7B"), bf16=True)
    adapted = given(tmp_path / "config.json", LoraConfig(r=16, target_modules=["q_proj"]), bf16=True)
    assert full.shape.parameters == pytest.approx(qwen.PARAMETERS["7B"], rel=0.01)
    for run, name, processes in (
        *((full, "zero3", 8), (full, "zero3", 7), (full, "zero2", 8), (full, "zero3_offload", 8)),
        *((full, "zero3_multinode", 16), (adapted, "zero3", 8)),
    ):
        layout = replace(Sharding.described(find_file("accelerate_configs", name)), num_processes=processes)
        trained, gpus = run.shape.trained, {"num_gpus_per_node": processes, "num_nodes": 1}
        if name == "zero2":
            expected = estimate_zero2_model_states_mem_needs(trained, cpu_offload=False, **gpus)[1]
        else:
            offload = {"cpu_offload": layout.offload_optimizer, "cpu_offload_params": layout.offload_parameters}
            needs = estimate_zero3_model_states_mem_needs(trained, run.shape.largest_module, **offload, **gpus)
            expected = needs[1]
        frozen = 2 * (run.shape.parameters - trained) / processes
        assert sum(states(replace(run, sharding=layout))) == pytest.approx(expected + frozen, rel=0.15), name


@pytest.mark.slow
def test_model_states_of_an_unsplit_float32_model_agree_with_accelerate(tmp_path: Path) -> None:
    run = given(qwen.write_config(tmp_path, "1.5B"), dtype_bytes=4)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    size, _ = calculate_maximum_sizes(model)
    assert sum(states(run)) == pytest.approx(estimate_training_usage(size, "float32")["step"], rel=0.15)


def test_model_states_agree_with_the_tensors_of_one_process(tmp_path: Path) -> None:
    """The bytes of parameters, gradients and Adam's moments of a small model are counted after one step."""
    launching.build_policy(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    held = [list(model.parameters()), [parameter.grad for parameter in model.parameters()], moments]
    sizes = tuple(sum(tensor.nbytes for tensor in tensors) for tensors in held)
    assert states(given(tmp_path, dtype_bytes=4)) == sizes


P, T, M, L, OUT = 7_000, 70, 500, 1_000, 3_000
"""Parameters, trained ones of an adapter, those of the largest module and of a layer, and those outside of layers."""
FSDP2_GATHERED = 2 * (OUT + 2 * L)


def test_the_states_of_a_layout() -> None:
    for trained, layout, changes, expected in (
        (P, Sharding(), {}, (2 * P, 2 * P, 4 * P)),
        (P, Sharding(8), {}, (2 * P, 2 * 2 * P, 4 * P)),  # DistributedDataParallel copies gradients into buckets
        (P, Sharding(8, "fsdp2"), {}, (4 * P / 8 + FSDP2_GATHERED, 4 * P / 8, 8 * P / 8)),
        (P, Sharding(8, "zero2"), {}, (2 * P, 6 * P / 8, 12 * P / 8)),
        (P, Sharding(8, "zero3"), {}, (2 * P / 8 + 4 * M, 4 * P / 8, 12 * P / 8)),
        (P, Sharding(8, "zero3", True, True), {}, (4 * M, 0, 0)),
        (P, Sharding(8, "zero2", True), {}, (2 * P, 0, 0)),
        (T, Sharding(), {}, (2 * (P - T) + 4 * T, 4 * T, 8 * T)),
        (T, Sharding(8), {}, (2 * (P - T) + 4 * T, 2 * 4 * T, 8 * T)),
        (T, Sharding(8, "fsdp2"), {}, ((2 * (P - T) + 4 * T) / 8 + FSDP2_GATHERED, 4 * T / 8, 8 * T / 8)),
        (T, Sharding(8, "zero2"), {}, (2 * P, 6 * T / 8, 12 * T / 8)),
        (T, Sharding(), {"quantised_bytes": 0.5}, (2 * (P - T - 4_000) + 0.5 * 4_000 + 2 * T, 2 * T, 4 * T)),
    ):  # fmt: skip
        shape = ModelShape(P, trained, M, L, P - OUT, quantisable=4_000)
        run = replace(given(bf16=True), shape=shape, sharding=layout, **changes)
        assert states(run) == pytest.approx(expected)


def test_the_state_of_each_optimizer() -> None:
    # Bytes of state per float32 weight of an adapter and per bfloat16 weight, from the source of each optimizer.
    for optim, adapter, full in (
        *[("adamw_torch_fused", 8, 4), ("adamw_bf16", 8, 10), ("sgd", 0, 0), ("adafactor", 0, 0)],
        *[("adamw_8bit", 2, 2), ("paged_adamw_8bit", 2, 2), ("adamw_torch_8bit", 2, 2), ("adamw_bnb_8bit", 2, 2)],
    ):
        run = given(optim=optim)
        for trained, size in ((P, full), (T, adapter)):
            assert states(replace(run, shape=ModelShape(P, trained, M, L, P)))[2] == size * trained


def test_quantized_weights_are_counted_with_their_scales() -> None:
    assert quantised_bytes(ModelConfig()) is None
    assert quantised_bytes(ModelConfig(load_in_8bit=True)) == 1
    assert quantised_bytes(ModelConfig(load_in_4bit=True)) == 0.5 + 4 / 64


def test_a_full_reference_is_split_where_parameters_are() -> None:
    for sharding, share in (("none", 1), ("zero2", 1), ("zero3", 1 / 8), ("fsdp2", 1 / 8)):
        run = given(sharding=Sharding(8, sharding), beta=0.04, facts=facts_of(Nothing()))
        assert run.parts()["reference"] == 2 * run.shape.parameters * share
    assert given(adapter=LORA, beta=0.04, facts=facts_of(Nothing())).parts()["reference"] == 0


# ---- Generation


@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        ("llama", torch.float32),
        pytest.param("lfm2_moe", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_the_cache_is_that_of_the_model(model_type: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Autocast, without which generation runs, does not make it smaller. States do not grow with the tokens."""
    model = build(model_type).to(dtype)
    model.config.save_pretrained(tmp_path)
    run = given(tmp_path, rows=3, steps_per_generation=1, dtype_bytes=dtype.itemsize, bf16=True)
    cache = model(torch.ones(3, 16, dtype=torch.long), use_cache=True).past_key_values
    held = 0
    for layer in cache.layers:
        tensors = [getattr(layer, name, None) for name in ("keys", "values")]
        for kept in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            tensors += kept.values()
        held += sum(tensor.nbytes for tensor in tensors if tensor is not None)
    found = 3 * run.facts.measure(run._forward(1, 8, 8)).cache
    assert held <= found <= 1.1 * held + 10 * 512 * len(cache.layers)  # whole blocks
    assert found < run._generation()["generation"]


def test_training_and_generation_share_memory_except_beside_vllm() -> None:
    for keys in ({}, {"use_vllm": True, "vllm_mode": "server"}, {"vllm_enable_sleep_mode": True, "use_vllm": True}):
        run = given(gpu_memory=GIB, **keys)
        *held, activations = list(run.parts().values())[:6]
        assert run.peak() == pytest.approx(sum(held) + max(activations, sum(run._generation().values())))
    colocated = given(use_vllm=True, vllm_mode="colocate", gpu_memory=80 * GIB)
    assert colocated.parts()["vLLM's share"] == 0.3 * 80 * GIB
    assert colocated.peak() == pytest.approx(sum(colocated.parts().values()))
    assert colocated.fits()
    assert not replace(colocated, shape=replace(colocated.shape, parameters=20 * 10**9)).fits()


def test_split_weights_are_gathered_for_generation_and_for_the_merge_of_an_adapter() -> None:
    split = Sharding(8, "zero3")
    for adapter, vllm, is_gathered in ((None, False, True), (None, True, False), (LORA, True, True)):
        run = given(adapter=adapter, sharding=split, use_vllm=vllm)
        assert run._generation()["gathered weights"] == (2 * run.shape.parameters if is_gathered else 0)


def test_turns_keep_a_copy_of_the_cache_within_a_share_of_the_gpu() -> None:
    run = given(keeps_turns=True)
    parts = run._generation()
    cache = 8 * run.facts.measure(run._forward(1, 8, 8)).cache
    without = replace(run, keeps_turns=False)._generation()["generation"]
    assert parts["generation"] == pytest.approx(without + cache)
    assert replace(run, gpu_memory=1000.0)._generation()["generation"] == pytest.approx(without + 125)
    # Each distinct prompt runs once, and so half of the rows.
    assert replace(run, keeps_turns=False, decodes_groups=False)._generation()["generation"] > without


# ---- The verdict


def test_what_does_not_fit_is_named_with_the_key_that_changes_it() -> None:
    run = given(gpu_memory=4 * GIB)
    assert run.usable() == pytest.approx(0.95 * 4 * GIB - 1.5 * GIB)
    assert run.fits() is True
    small = replace(run, gpu_memory=(1.5 * GIB + 10**4) / 0.95)
    assert small.fits() is False
    (said,) = [part for part in small.describe() if isinstance(part, Labelled)]
    assert said.text.startswith("activations, ")
    assert "gradient_checkpointing: true" in said.text
    assert set(run.parts()) == set(CHANGES), "each part may be the largest"


def test_sizes_of_gpus_are_parsed_or_refused() -> None:
    assert [parse_size(text) for text in ("80", "24GiB", "141gb")] == [80 * GIB, 24 * GIB, 141 * GIB]
    for text in ("0", "-3GB", "nan", "inf", "big"):
        with refused("--gpu_memory", repr(text), "80GB"):
            parse_size(text)


# ---- Files


ZERO3 = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {zero_stage: 3, "


def test_layouts_are_read_from_accelerate_configurations(tmp_path: Path) -> None:
    for text, layout in (
        ("num_processes: 2", Sharding(2)),
        ("num_processes: 2\nnum_machines: 2\ndistributed_type: MULTI_CPU", Sharding(2)),
        ("num_processes: 4\ndistributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 0}", Sharding(4)),
        ("num_processes: 4\ndistributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 1}", None),
        ("num_processes: 2\ndistributed_type: DEEPSPEED\ndeepspeed_config:", None),
        ("num_processes: 2\ndistributed_type: MEGATRON_LM", None),
        (ZERO3 + "offload_optimizer_device: nvme}", Sharding(2, "zero3", offload_optimizer=True)),
        (ZERO3 + "offload_param_device: cpu}", Sharding(2, "zero3", offload_parameters=True)),
        ("zero2_offload", Sharding(1, "zero2", offload_optimizer=True)),
        ("zero3_multinode", Sharding(16, "zero3")),
        ("fsdp2", Sharding(8, "fsdp2")),
    ):
        path = tmp_path / "layout.yaml"
        if ":" in text:
            path.write_text(text)
        else:
            path = find_file("accelerate_configs", text)
        if layout is not None:
            assert Sharding.described(path) == layout
        else:
            with refused("layout.yaml", by=MemoryUnknown):
                Sharding.described(path)


def test_an_adapter_of_no_module_is_refused_with_the_names_of_modules() -> None:
    for wanted, names in (("q_proj", "`.*q_proj`"), (["query", "key"], "down_proj, gate_proj")):
        with refused("`lora_target_modules`", names, by=RefusedAdapter):
            ModelShape.built(TINY, LoraConfig(target_modules=wanted))


def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with refused("./no/model", "--model_config", by=MemoryUnknown):
        load_model("./no/model")
    file = tmp_path / "config.json"
    file.write_text("{")
    for model in (file, tmp_path):
        with refused("", "config.json") as found:
            load_model(str(model))
        assert not isinstance(found.value, MemoryUnknown)
    file.write_text(json.dumps({"model_type": "of_a_stranger"}))
    with refused("config.json", "--model_config", by=MemoryUnknown):
        load_model(str(file))
