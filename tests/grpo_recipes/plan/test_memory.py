"""Estimated memory compared with DeepSpeed's and accelerate's estimators, and with the tensors of a tiny model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_recipes.plan.memory import (
    GIB,
    MemoryPlan,
    MemoryUnknown,
    ModelShape,
    Sharding,
    changes_that_fit,
    load_shape,
    parse_size,
    sharing_prompts,
)
from grpo_recipes.plan.plan import plan
from grpo_recipes.recipe.recipe import find_file
from grpo_recipes.training.adamw_bf16 import CHUNK, AdamWBF16
from tests.support import launching, qwen
from tests.support.grids import only
from tests.support.memory_meter import Meter
from tests.tools.models import build

STATES = ("parameters", "gradients", "optimizer")


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("qwen")
    return {size: qwen.write_config(folder / size, size) for size in qwen.SIZES}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", 64)


def planned(recipe: str, layout: str, config: Path, rows: Path, *arguments: str, **options: object) -> MemoryPlan:
    path = ["--config", recipe, "--dataset.path", str(rows), *arguments]
    run = plan(path, accelerate_config=layout, model_config_file=str(config), **options).memory
    assert isinstance(run, MemoryPlan)
    return run


def states(run: MemoryPlan) -> float:
    parts = run.parts()
    return sum(parts[name] for name in STATES)


def deepspeeds_estimate(run: MemoryPlan, trained: int) -> float:
    """Return DeepSpeed's estimate of the bytes on one GPU in full fine-tuning."""
    layout, shape = run.layout, run.shape
    gpus = {"num_gpus_per_node": layout.num_processes // layout.num_machines, "num_nodes": layout.num_machines}
    if layout.sharding == "zero2":
        return estimate_zero2_model_states_mem_needs(trained, cpu_offload=layout.offload_optimizer, **gpus)[1]
    return estimate_zero3_model_states_mem_needs(
        trained,
        shape.largest_layer,
        cpu_offload=layout.offload_optimizer,
        cpu_offload_params=layout.offload_parameters,
        **gpus,
    )[1]


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("size", qwen.SIZES)
def test_the_number_of_parameters_agrees_with_the_model_card(configs: dict[str, Path], size: str) -> None:
    assert load_shape(str(configs[size])).parameters == pytest.approx(qwen.PARAMETERS[size], rel=0.01)


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize(
    ("recipe", "layout", "size"),
    [
        ("gsm8k-qwen2.5-1.5b-8xa100", "zero2", "1.5B"),
        ("gsm8k-qwen2.5-1.5b-8xa100", "zero3", "1.5B"),
        ("gsm8k-qwen2.5-7b-full-zero3", "zero2", "7B"),
        ("gsm8k-qwen2.5-7b-full-zero3", "zero3", "7B"),
        ("gsm8k-qwen2.5-7b-full-zero3", "zero3_offload", "7B"),
        ("gsm8k-qwen2.5-7b-full-zero3", "zero3_multinode", "7B"),
    ],
)
def test_model_states_of_full_fine_tuning_agree_with_deepspeed(
    configs: dict[str, Path], rows: Path, recipe: str, layout: str, size: str
) -> None:
    processes = {"num_processes": 7, "arguments": []} if "8xa100" in recipe else {}
    run = planned(recipe, layout, configs[size], rows, num_processes=processes.get("num_processes"))
    assert states(run) == pytest.approx(deepspeeds_estimate(run, run.shape.parameters), rel=0.15)
    if run.host():
        host = estimate_zero3_model_states_mem_needs(run.shape.parameters, run.shape.largest_layer, 8, 1)[0]
        assert run.host() == pytest.approx(host, rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "layout", "size"),
    [
        ("gsm8k-qwen2.5-7b-lora-zero3", "zero3", "7B"),
        pytest.param("gsm8k-qwen2.5-72b-lora-zero3-2node", "zero3_multinode", "72B", marks=pytest.mark.slow),
    ],
)
def test_model_states_of_lora_agree_with_deepspeed_plus_a_share_of_the_frozen_base(
    configs: dict[str, Path], rows: Path, recipe: str, layout: str, size: str
) -> None:
    run = planned(recipe, layout, configs[size], rows)
    frozen = 2 * (run.shape.parameters - run.shape.trained) / run.layout.num_processes
    assert run.shape.trained < 0.02 * run.shape.parameters
    assert states(run) == pytest.approx(deepspeeds_estimate(run, run.shape.trained) + frozen, rel=0.15)


def test_model_states_of_an_unsplit_float32_model_agree_with_accelerate(configs: dict[str, Path], rows: Path) -> None:
    more = ["--dtype", "float32", "--bf16", "false", "--fp16", "false"]
    run = planned("gsm8k-qwen2.5-1.5b-24gb", "single_gpu", configs["1.5B"], rows, *more)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(configs["1.5B"]))
    size, _ = calculate_maximum_sizes(model)
    assert states(run) == pytest.approx(estimate_training_usage(size, "float32")["step"], rel=0.15)


def test_model_states_agree_with_the_tensors_of_one_process(tmp_path: Path) -> None:
    """The bytes of parameters, gradients and Adam's moments of a small model are counted after one step."""
    launching.build_policy(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    held = {
        "parameters": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters()],
        "optimizer": moments,
    }
    shape = load_shape(str(tmp_path))
    run = replace(TINY, shape=shape, layout=Sharding(), dtype_bytes=4, mixed_precision=False)
    for name, tensors in held.items():
        assert run.parts()[name] == sum(tensor.numel() * tensor.element_size() for tensor in tensors), name


TINY = MemoryPlan(
    shape=ModelShape(
        7_000_000_000, 7_000_000_000, 500_000_000, 28, 3584, 18944, 512, 3584, 500_000_000, False, cached=28 * 2 * 512
    ),
    layout=Sharding(8, 1, "zero3"),
    rows=8,
    generated_rows=32,
    tokens=1024,
    prompt_tokens=512,
    dtype_bytes=2,
    mixed_precision=True,
    gradient_checkpointing=True,
    full_reference=True,
    gather_for_generation=True,
    vllm=None,
    vllm_share=0.3,
    vllm_split=1,
    vllm_sleeps=False,
    reward_parameters=0,
    gpu_memory=80 * GIB,
)
LORA = replace(TINY, shape=replace(TINY.shape, trained=40_000_000), full_reference=False)


def test_the_kv_cache_of_one_generation_batch() -> None:
    """Each layer has two tensors of (rows, key-value heads × head size, tokens) elements of two bytes."""
    run = replace(TINY, gather_for_generation=False)
    assert run.parts()["KV cache"] == 28 * 2 * 32 * 512 * 1024 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_have_the_dtype_of_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    """Autocast, which generation runs without, does not make the cache of float32 weights smaller."""
    launching.build_policy(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    cache = model(torch.ones(3, 5, dtype=torch.long), use_cache=True).past_key_values
    held = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    run = replace(TINY, shape=load_shape(str(tmp_path)), layout=Sharding(), dtype_bytes=dtype.itemsize)
    assert replace(run, generated_rows=3, tokens=5).parts()["KV cache"] == held
    assert replace(run, generated_rows=3, tokens=5, layout=Sharding(2, 1, "zero2")).parts()["KV cache"] == 2 * held / (
        dtype.itemsize
    ), "DeepSpeed casts the weights"


@pytest.mark.parametrize("model_type", only(["qwen3_5_text"], ["qwen3_5_text", "falcon_h1", "lfm2_moe"]))
def test_recurrent_states_are_counted_once_per_row(tmp_path: Path, model_type: str) -> None:
    """A layer with states holds no keys, and a state does not grow with the tokens."""
    model = build(model_type)
    model.config.save_pretrained(tmp_path)
    run = replace(TINY, shape=load_shape(str(tmp_path / "config.json")), layout=Sharding(), dtype_bytes=4)
    for rows, tokens in ((3, 5), (2, 40)):
        cache = model(torch.ones(rows, tokens, dtype=torch.long), use_cache=True).past_key_values
        held = 0
        for layer in cache.layers:
            tensors = [getattr(layer, name, None) for name in ("keys", "values")]
            for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
                tensors += states.values()
            held += sum(tensor.nbytes for tensor in tensors if tensor is not None)
        parts = replace(run, generated_rows=rows, tokens=tokens, keeps_turns=True).parts()
        assert parts["KV cache"] == held
        assert parts["KV cache kept between turns"] == 0


def test_temporaries_of_adamw_bf16_count_where_a_micro_batch_takes_less() -> None:
    weights = torch.zeros(2**16, dtype=torch.bfloat16, requires_grad=True)
    weights.grad = torch.ones_like(weights)
    optimizer = AdamWBF16([weights])
    optimizer.step()
    held = [weights, weights.grad, *optimizer.state[weights].values()]
    with Meter(held) as meter:
        optimizer.step()
    shape = replace(TINY.shape, parameters=2**16, trained=2**16, layers=1, hidden=8, intermediate=8, query=8, head=0)
    run = replace(TINY, shape=shape, layout=Sharding(), rows=1, tokens=1, optim="adamw_bf16")
    assert meter.peak <= run.parts()["activations"] <= 1.05 * meter.peak
    many = replace(run, shape=replace(shape, parameters=2**30, trained=2**30))
    assert many.parts()["activations"] == pytest.approx(CHUNK * meter.peak / 2**16, rel=0.05)
    assert replace(run, optim="adamw_torch").parts()["activations"] < 0.5 * meter.peak


@pytest.mark.slow
def test_turns_keep_a_copy_of_the_kv_cache_within_a_share_of_the_gpu(configs: dict[str, Path], rows: Path) -> None:
    kept = "KV cache kept between turns"

    def parts(*arguments: str) -> dict[str, float]:
        options = {"accelerate_config": "single_gpu", "model_config_file": str(configs["1.5B"])}
        run = plan(["--config", "calculator", *arguments], **options).memory
        assert isinstance(run, MemoryPlan)
        return run.parts()

    run = parts()
    assert 0 < run[kept] == run["KV cache"]
    assert parts("--generation", "off")[kept] == parts("--use_vllm", "true")[kept] == 0
    qwen_7b = "gsm8k-qwen2.5-7b-lora-zero3"
    assert planned(qwen_7b, "zero3", configs["7B"], rows).parts()[kept] == 0, "no tools"
    small = replace(TINY, keeps_turns=True, gpu_memory=8 * GIB)
    assert small.parts()[kept] == GIB < small.parts()["KV cache"]
    assert small.peak() == pytest.approx(replace(small, keeps_turns=False).peak() + GIB)


@pytest.mark.parametrize("vllm", ["server", "colocate"])
def test_an_adapter_goes_to_vllm_through_gathered_weights(vllm: str) -> None:
    weights = 2 * TINY.shape.parameters
    share = 0.3 * 80 * GIB if vllm == "colocate" else 0
    for run, gathered in ((LORA, weights), (TINY, 0)):  # a full model is sent tensor by tensor
        parts = replace(run, vllm=vllm).parts()
        assert (parts["gathered weights"], parts["KV cache"], parts["vLLM's share"]) == (gathered, 0, share)


def test_weights_are_sent_to_a_server_in_packs() -> None:
    """Two packs of 1 GiB and a tensor are in flight. Gathered or merged copies count too, and views do not."""

    def packs(run: MemoryPlan) -> float:
        return run.parts()["weights on their way"]

    pack = GIB + 2 * TINY.shape.largest_layer
    server = replace(TINY, vllm="server")
    assert packs(server) == 3 * pack
    assert packs(replace(server, layout=Sharding())) == 2 * pack
    assert packs(replace(LORA, vllm="server", layout=Sharding())) == 3 * pack
    small = replace(server, shape=ModelShape(1000, 1000, 500, 2, 8, 16, 8, 8, 500, True), layout=Sharding())
    assert packs(small) == 2 * 1000  # one pack holds all weights
    assert packs(replace(TINY, vllm="colocate")) == packs(TINY) == 0


def test_training_and_generation_share_memory_except_beside_vllm() -> None:
    for run in (TINY, replace(TINY, vllm="server"), replace(TINY, vllm="colocate", vllm_sleeps=True)):
        parts = run.parts()
        *held, activations, weights, cache, kept, share, packs = parts.values()
        assert run.peak() == pytest.approx(sum(held) + max(activations, weights + cache + kept + share + packs))
    colocated = replace(TINY, vllm="colocate")
    assert colocated.peak() == pytest.approx(sum(colocated.parts().values()))


@pytest.mark.parametrize(("sharding", "bytes_each"), [("none", 2), ("zero2", 2), ("zero3", 2 / 8), ("fsdp2", 2 / 8)])
def test_a_full_reference_is_split_where_parameters_are(sharding: str, bytes_each: float) -> None:
    run = replace(TINY, layout=Sharding(8, 1, sharding))
    assert run.parts()["reference"] == bytes_each * run.shape.parameters
    assert replace(LORA, layout=Sharding(8, 1, sharding)).parts()["reference"] == 0


@pytest.mark.parametrize(
    ("factor", "group", "prompts"),
    [(1, 8, 1), (1, 16, 1), (4, 8, 4), (3, 16, 2), (1, 3, 4)],  # the last rows begin and end inside a group
)
def test_a_packed_row_computes_each_prompt_once(factor: int, group: int, prompts: int) -> None:
    larger = sharing_prompts(TINY, factor, group, accumulation=1)
    assert (larger.rows, larger.prompts) == (8 * factor, prompts)
    assert larger.parts()["activations"] < replace(larger, prompts=None).parts()["activations"]


@pytest.mark.parametrize("gpu_memory", [12, 16, 24, 40])
def test_suggested_changes_fit(gpu_memory: int) -> None:
    """The peak that a suggestion names is below the memory of the GPU."""
    run = replace(TINY, gpu_memory=gpu_memory * GIB)
    if run.fits():
        assert gpu_memory == 40
        return
    suggestions = changes_that_fit(run, accumulation=4)
    assert suggestions
    for suggestion in suggestions:
        if "no single change" in suggestion:
            continue
        peak = float(suggestion.rpartition(": ")[2].removesuffix(" GiB"))
        assert peak <= gpu_memory


def test_a_smaller_micro_batch_keeps_the_size_of_the_optimizer_step() -> None:
    run = replace(TINY, rows=64, generated_rows=1, gather_for_generation=False, vllm="server", gpu_memory=40 * GIB)
    (first, *_) = changes_that_fit(run, accumulation=2)
    words = first.replace(":", "").split()
    rows, accumulation = int(words[1]), int(words[4])
    assert rows * accumulation == 64 * 2
    assert replace(run, rows=rows).fits()
    assert not replace(run, rows=rows * 2).fits()


def test_a_share_that_cannot_hold_vllms_weights_does_not_fit() -> None:
    assert replace(TINY, vllm="colocate", vllm_share=0.3).fits()
    assert not replace(TINY, vllm="colocate", vllm_share=0.1).fits()


@pytest.mark.parametrize(("text", "size"), [("80GB", 80), ("80", 80), ("24GiB", 24), ("141gb", 141)])
def test_sizes_of_gpus_are_parsed(text: str, size: int) -> None:
    assert parse_size(text) == size * GIB


@pytest.mark.parametrize("text", ["0", "-3GB", "nan", "inf", "big", ""])
def test_a_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=".*"):
        parse_size(text)


def test_layouts_are_read_from_accelerate_configurations(tmp_path: Path) -> None:
    def described(name: str) -> Sharding:
        return Sharding.described(find_file("accelerate_configs", name))

    assert described("ddp") == Sharding(8, 1, "none")
    assert described("zero2") == Sharding(8, 1, "zero2")
    assert described("zero3_multinode") == Sharding(16, 2, "zero3")
    assert described("zero3_offload") == Sharding(8, 1, "zero3", True, True)
    assert described("fsdp2") == Sharding(8, 1, "fsdp2")
    other = tmp_path / "megatron.yaml"
    other.write_text("distributed_type: MEGATRON_LM\nnum_processes: 8\n")
    with pytest.raises(MemoryUnknown, match="no estimate for the layout"):
        Sharding.described(other)
