"""Memory by layout: machines, ranks, copies, head sizes and optimizers, each against a second derivation."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from peft import LoraConfig
from transformers import (
    AutoConfig,
    GPT2Config,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen3Config,
)
from transformers.utils import logging
from trl import GRPOConfig, ModelConfig

from grpo_recipes.plan import memory
from grpo_recipes.plan.layers import LayerBytes, Measured
from grpo_recipes.plan.memory import (
    GIB,
    HOST_BUFFERS,
    MemoryPlan,
    MemoryUnknown,
    ModelShape,
    RefusedAdapter,
    Sharding,
    best_precision,
    changes_that_fit,
    memory_plan,
    quantised_bytes,
    sharing_prompts,
)
from grpo_recipes.recipe.recipe import find_file, parse_recipe
from grpo_rewards.errors import UserError
from tests.grpo_recipes.plan.test_memory import LORA, TINY, states

SIZES = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 320}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
DENSE = ModelShape(7_000, 7_000, 500, 2, 8, 32, 8, 8, 400, False)
FULL = replace(TINY, shape=DENSE, full_reference=False)
ADAPTER = replace(FULL, shape=replace(DENSE, trained=70))


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SIZES, **HEADS, head_dim=32, tie_word_embeddings=True),  # heads wider than the hidden size
        LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=False, initializer_range=0.07),
        LlamaConfig(**SIZES, num_attention_heads=4, head_dim=8),  # heads narrower than the hidden size
    ],
    ids=["qwen3", "llama", "narrow"],
)
def test_sizes_are_those_of_the_modules(config: PretrainedConfig) -> None:
    from transformers import AutoModelForCausalLM

    shape = ModelShape.from_config(config)
    model = AutoModelForCausalLM.from_config(config)
    layer, linear = model.model.layers[0], torch.nn.Linear
    assert (shape.query, shape.key_value) == (layer.self_attn.q_proj.out_features, layer.self_attn.k_proj.out_features)
    assert shape.intermediate == layer.mlp.up_proj.out_features
    assert shape.ties_head == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert shape.norms_heads == hasattr(layer.self_attn, "q_norm")
    assert shape.initializer_range == config.initializer_range
    assert (shape.layers, shape.hidden, shape.head) == (3, 48, 320 * 48)
    assert (shape.cached, shape.states) == (3 * 2 * shape.key_value, 0)
    assert shape.largest_layer == max(parameter.numel() for parameter in model.parameters())
    inner = [module.weight.numel() for module in model.model.modules() if isinstance(module, linear)]
    assert shape.quantisable == sum(inner)


def test_a_configuration_without_a_feed_forward_size_has_four_hidden_sizes() -> None:
    shape = ModelShape.from_config(GPT2Config(n_embd=64, n_head=4, n_layer=2, vocab_size=300))
    assert (shape.intermediate, shape.query, shape.key_value) == (256, 64, 64)


@pytest.mark.parametrize("machines", [1, 2, 4])
@pytest.mark.parametrize("offloads_parameters", [False, True])
def test_host_memory_of_a_machine_is_deepspeeds(machines: int, offloads_parameters: bool) -> None:
    layout = Sharding(8 * machines, machines, "zero3", True, offloads_parameters)
    host, *_ = estimate_zero3_model_states_mem_needs(7_000, 500, 8, machines, True, offloads_parameters)
    assert replace(FULL, layout=layout).host() == pytest.approx(host, abs=1)
    weights = 2 * 7_000 / machines * HOST_BUFFERS if offloads_parameters else 0
    assert replace(FULL, layout=layout, full_reference=True).host() == pytest.approx(host + weights, abs=1)
    # Frozen weights have no gradient and no state, so they are on the host only if parameters are.
    host, *_ = estimate_zero3_model_states_mem_needs(70, 500, 8, machines, True, offloads_parameters)
    frozen = 2 * (7_000 - 70) / machines * HOST_BUFFERS if offloads_parameters else 0
    assert replace(ADAPTER, layout=layout).host() == pytest.approx(host + frozen, abs=1)  # DeepSpeed's is an integer


def test_host_memory_of_one_gpu_with_an_offloaded_optimizer_is_deepspeeds() -> None:
    layout = Sharding.described(find_file("accelerate_configs", "zero2_offload"))
    assert layout == Sharding(1, 1, "zero2", offload_optimizer=True)
    assert replace(FULL, layout=layout).host() == estimate_zero2_model_states_mem_needs(7_000, 1, 1)[0]
    assert replace(FULL, layout=replace(layout, offload_optimizer=False)).host() == 0


Bytes = tuple[float, float, float]
STATES: list[tuple[str, MemoryPlan, Sharding, Bytes]] = [
    # Bytes of parameters, gradients and optimizer: P parameters of which T are trained, L in the largest layer, on 8
    # GPUs in 2 machines. The second copy of gradients are the buckets of DistributedDataParallel.
    ("one GPU", FULL, Sharding(), (2 * 7_000, 2 * 7_000, 4 * 7_000)),
    ("DDP", FULL, Sharding(8, 2), (2 * 7_000, 2 * 2 * 7_000, 4 * 7_000)),
    ("DDP on one machine", FULL, Sharding(2, 1), (2 * 7_000, 2 * 2 * 7_000, 4 * 7_000)),
    ("FSDP2", FULL, Sharding(8, 2, "fsdp2"), (4 * 7_000 / 8 + 4 * 500, 4 * 7_000 / 8, 8 * 7_000 / 8)),
    ("ZeRO-2", FULL, Sharding(8, 2, "zero2"), (2 * 7_000, 6 * 7_000 / 8, 12 * 7_000 / 8)),
    ("ZeRO-3", FULL, Sharding(8, 2, "zero3"), (2 * 7_000 / 8 + 4 * 500, 4 * 7_000 / 8, 12 * 7_000 / 8)),
    ("LoRA", ADAPTER, Sharding(), (2 * 6_930 + 4 * 70, 4 * 70, 8 * 70)),
    ("LoRA, DDP", ADAPTER, Sharding(8, 2), (2 * 6_930 + 4 * 70, 2 * 4 * 70, 8 * 70)),
    ("LoRA, FSDP2", ADAPTER, Sharding(8, 2, "fsdp2"), ((2 * 6_930 + 4 * 70) / 8 + 4 * 500, 4 * 70 / 8, 8 * 70 / 8)),
    ("LoRA, ZeRO-2", ADAPTER, Sharding(8, 2, "zero2"), (2 * 7_000, 6 * 70 / 8, 12 * 70 / 8)),
    ("offloaded", FULL, Sharding(8, 1, "zero3", True, True), (4 * 500, 0, 0)),
    ("offloaded optimizer", FULL, Sharding(8, 1, "zero2", True), (2 * 7_000, 0, 0)),
    ("4 bits", replace(ADAPTER, quantised_bytes=0.5), Sharding(), (2 * 2_930 + 0.5 * 4_000 + 2 * 70, 2 * 70, 4 * 70)),
    ("4 bits, FSDP2", replace(ADAPTER, quantised_bytes=0.5), Sharding(8, 2, "fsdp2"),
     ((2 * 2_930 + 0.5 * 4_000 + 2 * 70) / 8 + 4 * 500, 2 * 70 / 8, 4 * 70 / 8)),
    ("whole ZeRO-2", replace(FULL, mixed_precision=False, dtype_bytes=4), Sharding(8, 1, "zero2"),
     (4 * 7_000, 6 * 7_000 / 8, 8 * 7_000 / 8)),
    ("whole FSDP2", replace(FULL, mixed_precision=False), Sharding(8, 1, "fsdp2"),
     (2 * 7_000 / 8 + 4 * 500, 2 * 7_000 / 8, 4 * 7_000 / 8)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "run", "layout", "expected"), STATES, ids=[name for name, *_ in STATES])
def test_the_states_of_a_layout(name: str, run: MemoryPlan, layout: Sharding, expected: Bytes) -> None:
    if run.quantised_bytes is not None:
        run = replace(run, shape=replace(run.shape, quantisable=4_000))
    parts = replace(run, layout=layout).parts()
    assert (parts["parameters"], parts["gradients"], parts["optimizer"]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("optim", "adapter", "full"),
    # Bytes of state per float32 weight of an adapter and per bfloat16 weight, from the source of each optimizer.
    [("adamw_torch", 8, 4), ("adamw_torch_fused", 8, 4), ("adamw_bf16", 8, 10), ("sgd", 0, 0), ("adafactor", 0, 0),
     ("rmsprop", 4, 2), ("adagrad", 4, 2), ("lion_32bit", 4, 2), ("lion_8bit", 1, 1), ("rmsprop_bnb_8bit", 1, 1),
     ("adamw_8bit", 2, 2), ("paged_adamw_8bit", 2, 2), ("adamw_torch_8bit", 2, 2), ("adamw_torch_4bit", 1, 1),
     ("adamw_bnb_8bit", 2, 2), ("paged_lion_8bit", 1, 1), ("paged_lion_32bit", 4, 2)],
)  # fmt: skip
def test_the_state_of_each_optimizer(optim: str, adapter: int, full: int) -> None:
    for run, size in ((FULL, full), (ADAPTER, adapter)):
        run = replace(run, layout=Sharding(), optim=optim)
        assert run.parts()["optimizer"] == size * run.shape.trained


def config(folder: Path, **changes: Any) -> GRPOConfig:
    values = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none", **changes}
    return GRPOConfig(**values)


def run_of(args: GRPOConfig, dtype: str | None = None, **changes: Any) -> MemoryPlan:
    return memory_plan(
        args, dtype, changes.pop("shape", DENSE), Sharding(), prompt_tokens=100, steps_per_generation=3, **changes
    )


def test_a_plan_follows_the_recipe(tmp_path: Path) -> None:
    """A rank generates the rows of all its micro-batches at once, and trains on those of one."""
    args = config(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=2, max_completion_length=60)
    run = run_of(args)
    assert (run.rows, run.generated_rows, run.tokens, run.prompt_tokens) == (8, 24, 160, 100)
    assert (run.dtype_bytes, run.mixed_precision, run.full_reference, run.accumulates) == (4, False, False, True)
    assert run_of(args, "float32").dtype_bytes == 4
    assert run_of(args, "bfloat16").dtype_bytes == 2
    for changes, mixed in (({"fp16": True}, True), ({"bf16": None, "use_cpu": True}, False), ({"bf16": True}, True)):
        for key, value in changes.items():
            setattr(args, key, value)
        assert run_of(args).mixed_precision is mixed
        args.bf16 = args.fp16 = False
    args.bf16, args.use_cpu = None, False  # TRL's default on a GPU
    assert run_of(args).mixed_precision
    args.gradient_accumulation_steps, args.beta = 1, 0.04
    assert (run_of(args).accumulates, run_of(args).full_reference) == (False, True)
    assert not run_of(args, shape=replace(DENSE, trained=70)).full_reference, "an adapter's reference is its base"
    assert run_of(args, keeps_turns=True).keeps_turns
    args.use_transformers_continuous_batching = True
    assert not run_of(args, keeps_turns=True).keeps_turns


def test_reward_models_are_held_in_16_bits_on_every_gpu() -> None:
    for layout in (Sharding(), Sharding(8, 1, "zero3"), Sharding(8, 2, "fsdp2")):
        with_judge = replace(FULL, layout=layout, reward_parameters=1_000)
        assert with_judge.peak() - replace(FULL, layout=layout).peak() == 2 * 1_000


@pytest.mark.parametrize("sharding", ["zero3", "fsdp2"])
def test_the_suggested_number_of_machines_is_the_smallest_that_fits(sharding: str) -> None:
    run = replace(TINY, layout=Sharding(16, 2, sharding), gather_for_generation=False, generated_rows=1, rows=1)
    seen = set()
    for gpu_memory in range(8, 15):
        run = replace(run, gpu_memory=gpu_memory * GIB)
        if run.fits():
            continue
        (said,) = [change for change in changes_that_fit(run, 4) if change.startswith("num_machines")] or [""]
        fitting = [
            machines
            for machines in range(4, 33, 2)
            if replace(run, layout=Sharding(8 * machines, machines, sharding)).fits()
        ]
        if not fitting:
            assert not said
            continue
        assert said.startswith(f"num_machines: {fitting[0]}, num_processes: {8 * fitting[0]}: ")
        seen.add(fitting[0])
    assert {4, 6, 8} <= seen


def test_parameters_are_not_offloaded_where_the_layout_cannot() -> None:
    """`accelerate_configs/zero3_offload.yaml` is DeepSpeed's."""
    small = replace(TINY, gpu_memory=8 * GIB, generated_rows=1, rows=1, gather_for_generation=False)
    for sharding, offered in (("zero3", True), ("none", True), ("fsdp2", False)):
        run = replace(small, full_reference=False, layout=Sharding(8, 1, sharding))
        assert any("zero3_offload" in change for change in changes_that_fit(run, 1)) is offered


def test_the_best_precision_is_the_first_that_fits() -> None:
    run = replace(TINY, layout=Sharding(), full_reference=False, gather_for_generation=False, rows=1, generated_rows=1)
    float32 = replace(run, dtype_bytes=4).peak()
    rounded = replace(run, optim="adamw_bf16").peak()
    assert rounded < float32
    for usable, named in ((float32, "dtype: float32 ("), (rounded, "with optim: adamw_bf16 (")):
        gpu_memory = (usable * 1.001 + 1.5 * GIB) / 0.95  # context, and the share lost to fragmentation
        assert named in best_precision(replace(run, gpu_memory=gpu_memory))
        assert named not in best_precision(replace(run, gpu_memory=gpu_memory / 1.01))


def test_lora_takes_less_than_full_fine_tuning_in_every_layout() -> None:
    for sharding in ("none", "zero2", "zero3", "fsdp2"):
        layout = Sharding(8, 2, sharding)
        assert states(replace(LORA, layout=layout)) < states(replace(TINY, layout=layout))


def test_gpus_that_share_an_engine_share_its_weights() -> None:
    for split in (1, 2, 4):
        run = replace(FULL, vllm="colocate", vllm_split=split, gpu_memory=None)
        assert run.parts()["vLLM's share"] == 2 * 7_000 / split
    for sharding in ("none", "zero2", "fsdp2"):
        assert replace(FULL, layout=Sharding(8, 1, sharding)).parts()["gathered weights"] == 0, "no layer is split"
    assert replace(FULL, layout=Sharding(8, 1, "zero3")).parts()["gathered weights"] == 2 * 7_000


@pytest.mark.parametrize(("accumulation", "factor", "accumulates"), [(4, 4, False), (8, 4, True), (4, 2, True)])
def test_larger_micro_batches_shorten_the_accumulation(accumulation: int, factor: int, accumulates: bool) -> None:
    assert sharing_prompts(TINY, factor, 8, accumulation).accumulates is accumulates


def test_quantized_weights_are_counted_with_their_scales() -> None:
    """64 weights share a scale. Nested quantization stores it in 8 bits, and 256 scales share a float32 number."""
    weights = 2**20
    scales = weights // 64
    for keys, size in (
        ({}, None),
        ({"load_in_8bit": True}, weights),
        ({"load_in_4bit": True}, weights / 2 + 4 * scales),
        ({"load_in_4bit": True, "use_bnb_nested_quant": True}, weights / 2 + scales + 4 * scales / 256),
    ):
        found = quantised_bytes(ModelConfig(**keys))
        assert (found if found is None else found * weights) == size


@pytest.mark.parametrize(("stage", "sharding"), [(0, "none"), (1, None), (2, "zero2"), (3, "zero3")])
def test_each_stage_of_zero_is_a_layout_of_its_own(tmp_path: Path, stage: int, sharding: str | None) -> None:
    path = tmp_path / "layout.yaml"
    path.write_text(f"distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {{zero_stage: {stage}}}\n")
    if sharding is not None:
        assert Sharding.described(path) == Sharding(4, 1, sharding)
        return
    with pytest.raises(MemoryUnknown, match="no estimate for the layout"):
        Sharding.described(path)


@pytest.mark.parametrize(("sizes", "cached"), [((0, 0), 2 * 3 * 2 * 12), ((0, 5), 0), ((7, 0), 7)])
def test_a_model_that_does_not_show_its_cache_is_taken_to_fill_every_layer(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], cached: int
) -> None:
    monkeypatch.setattr(memory, "_cache_sizes", lambda model: sizes)
    assert ModelShape.from_config(LlamaConfig(**SIZES, **HEADS)).cached == cached


def test_states_of_a_scan_are_float32_whatever_the_weights_are() -> None:
    run = replace(FULL, shape=replace(DENSE, states=10, cached=0), generated_rows=3)
    for dtype_bytes in (2, 4):
        assert replace(run, dtype_bytes=dtype_bytes).parts()["KV cache"] == 3 * 10 * 4


@pytest.mark.parametrize(
    ("run", "sharding", "copies"),
    [(FULL, "none", 0), (FULL, "zero2", 0), (FULL, "zero3", 1), (FULL, "fsdp2", 1), (ADAPTER, "none", 1)],
)
def test_weights_that_are_gathered_or_merged_are_copied_on_their_way_to_a_server(
    run: MemoryPlan, sharding: str, copies: int
) -> None:
    """One pack holds this model, and the sources of a pack are views unless they are gathered or merged."""
    sent = replace(run, vllm="server", layout=Sharding(8, 1, sharding)).parts()["weights on their way"]
    assert sent == (1 + copies) * 2 * 7_000


@pytest.mark.parametrize(
    ("run", "sharding", "size"),
    [
        (replace(FULL, dtype_bytes=4), "none", 4),
        (replace(FULL, dtype_bytes=4), "zero2", 2),  # DeepSpeed casts the weights
        (replace(FULL, dtype_bytes=4), "zero3", 2 + 2),
        (replace(FULL, dtype_bytes=4), "fsdp2", 4 + 4),
        (replace(ADAPTER, dtype_bytes=4), "zero2", 2 + 2),
        (replace(ADAPTER, dtype_bytes=4), "fsdp2", 4 + 4),
    ],
)
def test_weights_go_to_a_server_in_the_dtype_in_which_they_are_held(run: MemoryPlan, sharding: str, size: int) -> None:
    sent = replace(run, vllm="server", layout=Sharding(8, 1, sharding)).parts()["weights on their way"]
    assert sent == size * 7_000


def test_a_cache_between_turns_is_as_large_as_the_cache_where_the_gpu_is_not_known() -> None:
    run = replace(TINY, keeps_turns=True, gpu_memory=None)
    assert run.parts()["KV cache kept between turns"] == run.parts()["KV cache"] > 0
    for vllm in ("colocate", "server"):
        parts = replace(TINY, keeps_turns=True, vllm=vllm).parts()
        assert (parts["KV cache kept between turns"], parts["KV cache"]) == (0, 0)
    assert replace(TINY, gpu_memory=None, vllm="colocate").vllm_budget() == math.inf
    assert replace(TINY, vllm="server").vllm_budget() == math.inf
    assert replace(TINY, vllm="colocate").vllm_budget() == 0.3 * 80 * GIB


def test_sizes_that_are_not_given_add_no_bytes() -> None:
    assert ModelShape.initializer_range == 0.02
    alone = replace(FULL, layout=Sharding())
    assert alone.parts()["KV cache"] == 0
    quantised = replace(alone, shape=replace(DENSE, trained=70), quantised_bytes=0.5)
    assert quantised.parts()["parameters"] == 2 * 7_000
    assert replace(alone, layout=Sharding(offload_optimizer=True)).host() == 16 * 7_000 * 1.5
    assert alone.host() == 0


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("num_processes: 2", Sharding(2, 1, "none")),
        ("num_processes: 2\nnum_machines: 2\ndistributed_type: MULTI_CPU", Sharding(2, 2, "none")),
        ("num_processes: 2\ndistributed_type: DEEPSPEED\ndeepspeed_config:", None),
        ("num_processes: 2\ndistributed_type: DEEPSPEED\ndeepspeed_config: {offload_param_device: none}", None),
        (
            "num_processes: 2\ndistributed_type: DEEPSPEED\n"
            "deepspeed_config: {zero_stage: 3, offload_optimizer_device: nvme, offload_param_device: none}",
            Sharding(2, 1, "zero3", offload_optimizer=True),
        ),
        (
            "num_processes: 2\ndistributed_type: DEEPSPEED\n"
            "deepspeed_config: {zero_stage: 3, offload_param_device: nvme}",
            Sharding(2, 1, "zero3", offload_parameters=True),
        ),
    ],
)
def test_keys_that_an_accelerate_configuration_lacks(tmp_path: Path, text: str, layout: Sharding | None) -> None:
    path = tmp_path / "layout.yaml"
    path.write_text(text)
    if layout is not None:
        assert Sharding.described(path) == layout
        return
    with pytest.raises(MemoryUnknown, match="no estimate for the layout"):
        Sharding.described(path)


def test_sizes_of_models_with_other_layers() -> None:
    gpt2 = ModelShape.from_config(GPT2Config(n_embd=64, n_head=4, n_layer=2, vocab_size=10, n_positions=8))
    assert gpt2.largest_layer == 64 * 256 + 256  # weights and biases of the feed-forward layer
    assert gpt2.quantisable == 0, "its layers are no `nn.Linear`"
    assert (str(gpt2.query), str(gpt2.key_value)) == ("64", "64")
    phi = {**SIZES, "num_attention_heads": 4}
    assert ModelShape.from_config(PhiConfig(**phi, qk_layernorm=True)).norms_heads
    assert not ModelShape.from_config(PhiConfig(**phi)).norms_heads
    scan = {"hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 320, "state_size": 8}
    mamba2 = ModelShape.from_config(Mamba2Config(**scan, num_heads=8, head_dim=12, n_groups=1))
    assert (mamba2.query, mamba2.key_value) == (96, 96)
    mamba = ModelShape.from_config(MambaConfig(**scan))  # without heads
    assert (mamba.query, mamba.key_value, mamba.cached) == (48, 48, 0)
    assert mamba.states > 0


def test_an_adapter_is_counted_beside_the_model() -> None:
    config = LlamaConfig(**SIZES, **HEADS)
    base = ModelShape.from_config(config)
    assert base.trained == base.parameters
    shape = ModelShape.from_config(config, LoraConfig(r=2, target_modules=["q_proj", "k_proj"]))
    added = 3 * 2 * ((48 + 48) + (48 + 24))  # both matrices of an adapter, in each of three layers
    assert (shape.parameters, shape.trained) == (base.parameters + added, added)
    assert replace(shape, parameters=base.parameters, trained=base.trained) == base


def test_a_model_that_cannot_run_shows_no_cache() -> None:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_info()
    try:
        assert memory._cache_sizes(torch.nn.Linear(1, 1)) == (0, 0)
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity(verbosity)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("q_proj", r"a single name is a pattern for the whole path: write `\.\*q_proj`, or name two modules$"),
        (
            ["query", "key"],
            "key, query matches no module of the model: name some of down_proj, gate_proj, k_proj, lm_head, o_proj, "
            "q_proj, up_proj, v_proj, or `all-linear`$",
        ),
        (".*query", r"\.\*query matches no module of the model: name some of down_proj, "),
    ],
)
def test_an_adapter_of_no_module_is_refused_with_the_names_of_modules(wanted: Any, message: str) -> None:
    with pytest.raises(RefusedAdapter, match=f"^`lora_target_modules`: {message}"):
        ModelShape.from_config(LlamaConfig(**SIZES, **HEADS), LoraConfig(target_modules=wanted))


@pytest.mark.parametrize("answers", [True, False])
def test_a_configuration_is_read_here_or_from_a_hub_that_answers(
    answers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, bool]] = []

    def read(model: str, *, local_files_only: bool, trust_remote_code: bool) -> PretrainedConfig:
        assert trust_remote_code is False
        asked.append((model, local_files_only))
        return LlamaConfig(**SIZES, **HEADS)

    monkeypatch.setattr(AutoConfig, "from_pretrained", read)
    monkeypatch.setattr(memory, "hub_answers", lambda: answers)
    folder = tmp_path / "model"
    LlamaConfig(**SIZES, **HEADS).save_pretrained(folder)
    for model, here_only in (("some/model", not answers), (str(folder), True)):
        asked.clear()
        shape, built = memory.load_model(model)
        assert asked == [(model, here_only)]
        assert memory.load_shape(model) == shape == ModelShape.from_config(built.config)


def test_a_configuration_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(MemoryUnknown, match=r"^\./no/model: there is no such folder .*--model_config FILE"):
        memory.load_model("./no/model")
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(UserError, match="give a model's config.json") as refused:
        memory.load_model(str(file))
    assert not isinstance(refused.value, MemoryUnknown)
    with pytest.raises(UserError, match="config.json") as refused:
        memory.load_model(str(tmp_path))
    assert not isinstance(refused.value, MemoryUnknown)
    file.write_text('{"model_type": "of_a_stranger"}')
    with pytest.raises(MemoryUnknown, match="no configuration could be loaded"):
        memory.load_model(str(file))


def test_only_warnings_about_the_future_are_kept_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    LlamaConfig(**SIZES, **HEADS).save_pretrained(tmp_path)

    def built(*_: Any) -> Any:
        warnings.warn("later", FutureWarning, stacklevel=2)
        warnings.warn("now", UserWarning, stacklevel=2)
        return "shape", "model"

    monkeypatch.setattr(ModelShape, "built", built)
    with warnings.catch_warnings(record=True, action="always") as found:
        assert memory.load_model(str(tmp_path)) == ("shape", "model")
    assert [str(one.message) for one in found] == ["now"]


@pytest.mark.parametrize(
    ("keys", "is_loaded"),
    [
        ({"use_peft": True, "lora_target_modules": ["q_proj", "k_proj"]}, True),
        ({"use_peft": True}, True),
        ({"lora_target_modules": ["q_proj", "k_proj"]}, False),
    ],
)
def test_a_new_adapter_is_added_to_a_model_without_weights(
    keys: dict[str, Any], is_loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = []

    def policy_model(recipe: Any) -> None:
        loaded.append(recipe)
        raise MemoryUnknown("not here")

    monkeypatch.setattr(memory, "policy_model", policy_model)
    recipe: Any = SimpleNamespace(model=keys)
    memory.check_adapter(recipe)
    assert loaded == ([recipe] if is_loaded else [])


def test_the_policy_is_the_recipes_unless_a_file_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "load_model", lambda model, adapter: (model, adapter))
    lora = parse_recipe(["--config", "gsm8k-qwen2.5-1.5b-lora"])
    found, adapter = map(str, memory.policy_model(lora))
    assert found == lora.model["model_name_or_path"]
    assert "LoraConfig(" in adapter
    assert memory.policy_model(lora, "config.json")[0] == "config.json"


@pytest.mark.parametrize("mixed", [True, False])
def test_all_precisions_are_named_with_their_peaks_where_the_gpu_is_not_known(mixed: bool) -> None:
    shape = replace(DENSE, parameters=10**10, trained=10**10)
    run = replace(FULL, shape=shape, optim="adamw_8bit", layout=Sharding(2, 1), gather_for_generation=False)
    run = replace(run, dtype_bytes=2, mixed_precision=mixed, gpu_memory=None)
    offloaded = replace(run, layout=Sharding(2, 1, "zero2", offload_optimizer=True))
    ways = {
        "dtype: float32": replace(run, dtype_bytes=4, optim="adamw_torch"),
        "dtype: bfloat16 with optim: adamw_bf16": replace(run, optim="adamw_bf16"),
        "accelerate_configs/zero2_offload.yaml, which keeps float32 weights in host memory": offloaded,
    }
    texts = [f"{way} ({changed.peak() / 2**30:.1f} GiB)" for way, changed in ways.items()]
    assert len({text.rpartition(" (")[2] for text in texts}) == 3
    for dtype_bytes in (2, 4):
        assert best_precision(replace(run, dtype_bytes=dtype_bytes)) == ", else ".join(texts)
    small = replace(run, gpu_memory=GIB)
    assert best_precision(small) == "none of these fits this GPU: an adapter (`use_peft: true`) is kept in float32"
    assert best_precision(replace(run, gpu_memory=(offloaded.peak() + 2 * GIB) / 0.95)) == texts[2]


def test_at_most_sixteen_times_as_many_machines_are_named() -> None:
    run = replace(TINY, layout=Sharding(1, 1, "zero3"), generated_rows=1, rows=1, gather_for_generation=False)
    run = replace(run, shape=replace(TINY.shape, parameters=7 * 10**11, trained=7 * 10**11))
    peaks = {n: replace(run, layout=Sharding(n, n, "zero3")).peak() for n in (2, 16, 17)}
    for usable, machines in ((peaks[16] + 10**6, 16), (peaks[17] + 10**6, 2), (peaks[2] + 10**6, 2)):
        limited = replace(run, gpu_memory=(usable + 1.5 * GIB) / 0.95)
        text, changed = memory._more_machines(limited)
        assert text == f"num_machines: {machines}, num_processes: {machines}"
        assert changed == replace(limited, layout=Sharding(machines, machines, "zero3"))


def test_half_of_a_micro_batch_is_tried_first() -> None:
    run = replace(FULL, rows=12, vllm="server", gpu_memory=100 * GIB, layout=Sharding())
    texts = [text for text, _ in memory._changes(run, 1)]
    assert "per_device_train_batch_size: 6 with gradient_accumulation_steps: 2" in texts
    odd = [text for text, _ in memory._changes(replace(run, rows=9), 1)]
    assert "per_device_train_batch_size: 3 with gradient_accumulation_steps: 3" in odd


@pytest.mark.parametrize(("gpu_memory", "measured"), [(1, []), (200 * GIB, ["check", "rows"])])
def test_layers_are_measured_only_where_the_states_alone_may_fit(gpu_memory: float, measured: list[str]) -> None:
    found: list[str] = []

    def measure(precision: Any, sizes: Any, *, trains: bool = True) -> Measured:
        found.append("rows" if trains else "check")
        return Measured([LayerBytes(1, 1, 1)], 0, 1)

    layers: Any = SimpleNamespace(measure=measure)
    plan = replace(FULL, layers=layers, gpu_memory=gpu_memory)
    assert plan.fits() is bool(measured)
    assert sorted(set(found)) == measured
