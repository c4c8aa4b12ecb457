"""Sections of benchmarks/gpu.py that drive TRL's trainer and ours: gradients, times and memory."""

from __future__ import annotations

import copy
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from gpu_rows import DENSE_TFLOPS, Bench, Measurement, NotRun, Row
from step import MICRO_BATCHES, Trainer, compete, median, paged_cache, tokens
from torch import Tensor
from trl import GRPOTrainer as TRLGRPOTrainer
from workloads import EOS, GROUP, cap

from grpo_recipes import GRPOTrainer
from grpo_recipes.plan.memory import MemoryPlan, Sharding
from grpo_recipes.plan.model_shape import ModelShape
from grpo_recipes.recipe.specs import MicroBatching
from grpo_recipes.training import packed_attention, varlen
from grpo_recipes.training.layout_facts import describe

# ---- Correctness


def correctness(bench: Bench) -> Iterator[Measurement]:
    """Compare packed gradients with those of TRL's padded layout."""
    padded = cache(partial(gradient, bench, packed=False))  # several rows compare with the same gradient
    for lora, checkpointing in ((False, False), (False, True), (True, False)):
        name = "LoRA" if lora else "checkpointing" if checkpointing else "full"
        for kernel, dtype in (("any", torch.float32), ("SDPA", torch.bfloat16), ("varlen_attn", torch.bfloat16)):
            check = f"packed, {str(dtype).split('.')[1]}, {name}" + (f", {kernel}" if kernel != "any" else "")
            yield Measurement({"check": check}, partial(_checked, bench, padded, kernel, dtype, lora, checkpointing))


def _checked(
    bench: Bench, padded: Callable[..., list[Tensor]], kernel: str, dtype: torch.dtype, lora: bool, checkpointing: bool
) -> Row:
    """Return the difference of packed gradients from padded ones in float32, through one kernel."""
    exact = padded(dtype=torch.float32, lora=lora)
    with kernels(only_sdpa=kernel == "SDPA") as used:
        found = gradient(bench, packed=True, dtype=dtype, lora=lora, checkpointing=checkpointing)
    if kernel != "any" and kernel not in used:
        raise NotRun(f"the packed row went through {', '.join(used) or 'no kernel of ours'}")
    noise = 0.0 if dtype == torch.float32 else distance(padded(dtype=dtype, lora=lora), exact)
    difference, limit = distance(found, exact), max(1e-4, 2 * noise)
    return {
        "kernel": ", ".join(f"{name} × {count}" for name, count in used.items()),
        "difference": f"{difference:.1e}",
        "padded rows": f"{noise:.1e}" if noise else "-",
        "limit": f"{limit:.1e}",
        "result": "ok" if difference <= limit else "WRONG",
    }


@contextmanager
def kernels(only_sdpa: bool = False) -> Iterator[dict[str, int]]:
    """Count the calls of the kernels that packed attention chooses from. With `only_sdpa` there is one choice."""
    used: dict[str, int] = {}
    names = [(varlen, "_attended"), (packed_attention, "scaled_dot_product_attention"), (varlen, "is_candidate")]
    stock = [getattr(module, name) for module, name in names]

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*args: Any, **kwargs: Any) -> Any:
            used[name] = used.get(name, 0) + 1
            return call(*args, **kwargs)

        return calling

    varlen._attended = counted("varlen_attn", varlen._attended)
    packed_attention.scaled_dot_product_attention = counted("SDPA", packed_attention.scaled_dot_product_attention)
    if only_sdpa:
        varlen.is_candidate = lambda query: False
    try:
        yield used
    finally:
        for (module, name), function in zip(names, stock, strict=True):
            setattr(module, name, function)


def gradient(
    bench: Bench, *, packed: bool, dtype: torch.dtype, lora: bool = False, checkpointing: bool = False
) -> list[Tensor]:
    """Return the gradients of a step on a recorded batch, in float32."""
    settings = {
        "gradient_checkpointing": checkpointing,
        "loss_type": "grpo",
        "micro_batching": "auto" if packed else "off",
    }
    made = Trainer(GRPOTrainer, bench.model(bench.check_shape, dtype), False, lora, bench.device, **settings)
    torch.manual_seed(1)
    with torch.no_grad():  # a new adapter changes nothing yet
        for name, parameter in made.trainer.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    made.batch = bench.batch("a", 0)
    rows = [{"prompt": text} for text in made.batch.text for _ in range(GROUP)]
    for _ in range(MICRO_BATCHES):
        made.trainer.training_step(made.trainer.model, rows, None)
    return [p.grad.float() for p in made.trainer.model.parameters() if p.grad is not None]


def distance(got: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of an entry, as a share of the largest entry."""
    largest = max(float(tensor.abs().max()) for tensor in expected)
    return max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True)) / largest


# ---- Time and memory


def whole_step(bench: Bench) -> Iterator[Measurement]:
    """Measure complete steps: generation, scoring, loss and gradient."""
    for shape in bench.shapes:
        yield Measurement({"model": shape}, partial(_step_times, bench, shape))


def _step_times(bench: Bench, shape: str) -> Row:
    config = {
        "gradient_checkpointing": False,
        "loss_type": "grpo",
        "max_completion_length": cap("a"),
        "generation_kwargs": {"suppress_tokens": [EOS]},  # a criterion ends each row at its recorded length
    }
    each = {
        name: Trainer(cls, bench.model(shape), True, False, bench.device, **config)
        for name, cls in (("TRL", TRLGRPOTrainer), ("ours", GRPOTrainer))
    }
    compete(each, [bench.batch("a", seed) for seed in range(bench.steps)])
    seconds = {name: median(one.measured.whole) for name, one in each.items()}
    generation = {name: median(one.measured.phases["generation"]) for name, one in each.items()}
    return {
        **{f"{name}, s": f"{value:.2f}" for name, value in seconds.items()},
        **{f"{name}, generation, s": f"{value:.2f}" for name, value in generation.items()},
        "TRL ÷ ours": f"{seconds['TRL'] / seconds['ours']:.2f}",
        "ours, first step, s": f"{each['ours'].measured.whole[0]:.2f}",
    }


def memory(bench: Bench) -> Iterator[Measurement]:
    """Compare the peak of a micro-batch in TRL's layout and in ours with the one that `plan` expects of TRL's."""
    for shape in bench.shapes:
        for lora in (False, True):
            head = {"model": shape, "tuning": "LoRA" if lora else "full", "workload": "e"}
            yield Measurement(head, partial(_peaks, bench, shape, lora))


def _peaks(bench: Bench, shape: str, lora: bool) -> Row:
    each = {name: _trainer(bench, shape, lora, name) for name in ("TRL", "ours")}
    compete(each, [bench.batch("e", seed) for seed in range(2)])
    peaks = {f"{name}, peak GiB": f"{median(one.measured.memory) / 1024:.2f}" for name, one in each.items()}
    return {**peaks, "planned, GiB": f"{planned(each['ours'], bench, 'e') / 2**30:.2f}"}


def _trainer(bench: Bench, shape: str, lora: bool, name: str) -> Trainer:
    """Return TRL's trainer or ours, for the training phase."""
    config = {"gradient_checkpointing": False, "loss_type": "grpo", "learning_rate": 1e-6}
    cls = TRLGRPOTrainer if name == "TRL" else GRPOTrainer
    return Trainer(cls, bench.model(shape), False, lora, bench.device, **config)


def training(bench: Bench) -> Iterator[Measurement]:
    """Measure the training phase, stock TRL and ours in turns."""
    for workload in "ea":
        for shape in bench.shapes:
            for lora in (False, True):
                head = {"model": shape, "tuning": "LoRA" if lora else "full", "workload": workload}
                yield Measurement(head, partial(phase, bench, shape, lora, workload))


def phase(bench: Bench, shape: str, lora: bool, workload: str) -> Row:
    """Return a row of `training`."""
    each = {name: _trainer(bench, shape, lora, name) for name in ("TRL", "ours")}
    compete(each, [bench.batch(workload, seed) for seed in range(bench.steps)])
    stock, ours = each["TRL"].measured, each["ours"].measured
    computed, needed = tokens(each["ours"])
    seconds = median(ours.training)
    model = each["ours"].trainer.model
    parameters = sum(p.numel() for p in model.parameters())
    peak = DENSE_TFLOPS.get(gpu_kind(bench))
    flops = (4 if lora else 6) * parameters * needed  # a frozen weight has no gradient of its own
    return {
        "TRL, s": f"{median(stock.training):.2f}",
        "ours, s": f"{seconds:.2f}",
        "TRL ÷ ours": f"{median(stock.training) / seconds:.2f}",
        "ours, first step, s": f"{ours.training[0]:.2f}",  # with the checks of the layout
        "tokens/s": f"{needed / seconds:,.0f}",
        "computed ÷ needed": f"{computed / needed:.2f}",
        "MFU": f"{flops / seconds / peak / 1e12:.1%}" if peak else "unknown peak",
        "TRL, peak GiB": f"{median(stock.memory) / 1024:.2f}",
        "ours, peak GiB": f"{median(ours.memory) / 1024:.2f}",
        **{f"{name}, waits a step": str(waits(bench, one, workload)) for name, one in each.items()},
    }


def waits(bench: Bench, trainer: Trainer, workload: str) -> int | str:
    """Return the number of times that the host waits for the GPU in a step."""
    if bench.device == "cpu":
        return "-"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trainer.step(bench.batch(workload, bench.steps))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def planned(trainer: Trainer, bench: Bench, workload: str) -> float:
    """Return the bytes of gradients and activations that `plan` expects of a micro-batch in TRL's layout."""
    args = copy.copy(trainer.trainer.args)
    batch = bench.batch(workload, 1)
    args.max_completion_length = batch.longest
    prompt_tokens = max(map(len, batch.prompts))
    peft_config = getattr(trainer.trainer.model, "peft_config", {}).get("default")
    shape, model = ModelShape.built(trainer.trainer.model.config, peft_config)
    plan = MemoryPlan(
        shape,
        describe(args, model, prompt_tokens + batch.longest, MicroBatching("padded")),
        Sharding(),
        args,
        rows=args.per_device_train_batch_size,
        steps_per_generation=MICRO_BATCHES,
        prompt_tokens=prompt_tokens,
        dtype_bytes=bench.dtype.itemsize,
    )
    parts = plan.parts()
    return parts["gradients"] + parts["activations"]


def gpu_kind(bench: Bench) -> str:
    """Return the key of `DENSE_TFLOPS` in the GPU's name, or "" for a CPU or another GPU."""
    name = "" if bench.device == "cpu" else torch.cuda.get_device_name()
    return next((kind for kind in DENSE_TFLOPS if all(word in name for word in kind.split())), "")


def generation(bench: Bench) -> Iterator[Measurement]:
    """Measure eight prompts × eight completions of recorded lengths: transformers' loop, ours, continuous batching."""
    for shape in bench.shapes:
        yield Measurement({"model": shape, "workload": "a"}, partial(loops, bench, shape, "a"))


def loops(bench: Bench, shape: str, workload: str) -> Row:
    """Return a row of `generation`."""
    config = {
        "gradient_checkpointing": False,
        "loss_type": "grpo",
        "max_completion_length": cap(workload),
        "generation_kwargs": {"suppress_tokens": [EOS]},
    }
    batching: dict[str, Any] = {"use_transformers_continuous_batching": True}
    if bench.device == "cpu":  # where the default needs a mask of gigabytes
        batching["transformers_continuous_batching_config"] = paged_cache(workload)
    kinds = (
        ("TRL", TRLGRPOTrainer, {}),
        ("TRL, continuous batching", TRLGRPOTrainer, batching),
        ("ours", GRPOTrainer, {}),
    )
    each = {
        name: Trainer(cls, bench.model(shape), True, False, bench.device, **config, **more) for name, cls, more in kinds
    }
    compete(each, [bench.batch(workload, seed) for seed in range(bench.steps)])
    seconds = {name: median(one.measured.phases["generation"]) for name, one in each.items()}
    memory = {name: median(one.measured.memory) / 1024 for name, one in each.items()}
    return {
        **{f"{name}, s": f"{value:.2f}" for name, value in seconds.items()},
        "TRL ÷ ours": f"{seconds['TRL'] / seconds['ours']:.2f}",
        "TRL, peak GiB": f"{memory['TRL']:.2f}",
        "ours, peak GiB": f"{memory['ours']:.2f}",
    }


def pretrained(bench: Bench) -> Iterator[Measurement]:
    """Train a pretrained instruct model on arithmetic problems for 100 steps, and show its first and last rewards."""
    yield Measurement({"model": bench.policy.name if bench.policy else "-"}, partial(_trained, bench))


def _trained(bench: Bench) -> Row:
    if bench.policy is None:
        raise NotRun("`--policy FOLDER` names a pretrained model (benchmarks/real_model.py makes one)")

    from grpo_recipes import Recipe, run_recipe

    with tempfile.TemporaryDirectory() as folder:
        steps = 2 if bench.tiny else 100
        changes = {
            "model_name_or_path": str(bench.policy),
            "output_dir": f"{folder}/run",
            "use_cpu": bench.device == "cpu",
            "max_steps": steps,
            "logging_steps": max(1, steps // 10),
            "learning_rate": 1e-6 if not bench.tiny else 1e-4,
        }
        started = time.perf_counter()
        run_recipe(Recipe.load("quickstart", **changes))
        state = json.loads((Path(folder) / "run" / "trainer_state.json").read_text())
    rewards = [entry["reward"] for entry in state["log_history"] if "reward" in entry]
    seconds = f"{time.perf_counter() - started:.0f}"
    return {"steps": steps, "s": seconds, "reward": f"{rewards[0]:.3f} -> {rewards[-1]:.3f}"}
