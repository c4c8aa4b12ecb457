"""Figures that need a GPU: our kernels against the reference ones, and times and memory at the sizes of real training.

    python benchmarks/gpu.py                                   # every section, on one GPU, in under 8 minutes
    python benchmarks/gpu.py --sections correctness training --minutes 4
    python benchmarks/gpu.py --policy FOLDER                   # with a pretrained model to train for 100 steps
    python benchmarks/gpu.py --tiny --device cpu               # everything in 3 minutes; the figures mean nothing

Models have random weights in the shapes of Qwen2.5-0.5B and 1.5B. Completions are those of benchmarks/step.py. Each
section prints its table row by row. After each row the JSON file (`--output`) holds every figure so far, with the
machine and the versions. A row whose kernel, package or time is missing says "not run" and the reason. Times are wall
time after the device has finished, medians of alternating steps without the first one. The exit code is 1 if a check of
`correctness` fails.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from precision import OPTIONS, contestants
from reward_model import build, compare
from step import EOS, GROUP, MICRO_BATCHES, PAD, Batch, Trainer, cap, compete, median, paged_cache, tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config
from transformers.utils import logging as transformers_logging
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.generation.groups import Turn, decoding
from grpo_recipes.plan.memory import ModelShape, Sharding, memory_plan
from grpo_recipes.training import packed_attention, varlen
from grpo_rewards.reward_model import RewardModelScore

SHAPES: dict[str, dict[str, int]] = {
    "0.5B": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2},
    "1.5B": {"vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2},
    "check": {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
              "num_attention_heads": 8, "num_key_value_heads": 2},
    "tiny": {"vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip
"""Configurations of Qwen2.5, without weights. The head sizes are 64, 128, 64 and 8."""

DENSE_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "A100": 312, "L40S": 362, "L4": 121, "4090": 165}
"""Peak of dense bfloat16 by the name of a GPU, from NVIDIA's data sheets, in 1e12 operations per second."""

Row = dict[str, Any]


class NotRun(Exception):
    """Reason why a row is not measured."""


@dataclass(frozen=True)
class Bench:
    """Device, sizes and time limit of the measurements."""

    device: str
    tiny: bool
    steps: int
    policy: Path | None
    ends: float
    """End of the allowed time, on the monotonic clock."""

    @property
    def shapes(self) -> list[str]:
        """Names of the models that are timed."""
        return ["tiny"] if self.tiny else ["0.5B", "1.5B"]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the timed models."""
        return torch.float32 if self.tiny else torch.bfloat16

    def model(self, shape: str, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Return a model of a shape with random weights, always the same."""
        torch.manual_seed(0)
        config = Qwen2Config(
            **SHAPES[shape], max_position_embeddings=2048, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None
        )
        return AutoModelForCausalLM.from_config(config).to(self.device, dtype or self.dtype)

    def batch(self, workload: str, seed: int) -> Batch:
        """Return a step's batch, with few short completions for `--tiny`."""
        batch = Batch.draw(workload, seed)
        if self.tiny:
            batch.completions[:] = [[[*row[:5], EOS] for row in group] for group in batch.completions]
            batch.prompts[:] = [prompt[:12] for prompt in batch.prompts]
        return batch


# ---- correctness


def correctness(bench: Bench) -> Iterator[Row]:
    """Compare packed gradients with those of TRL's padded layout, and group decoding and scoring with single rows."""
    shape = "tiny" if bench.tiny else "check"
    exact = gradient(bench, shape, torch.float32, packed=False)
    for lora, checkpointing in ((False, False), (False, True), (True, False)):
        name = "LoRA" if lora else "checkpointing" if checkpointing else "full"
        plain32 = gradient(bench, shape, torch.float32, packed=False, lora=lora) if lora else exact
        with kernels() as used:
            packed32 = gradient(bench, shape, torch.float32, packed=True, lora=lora, checkpointing=checkpointing)
        yield checked(f"packed, float32, {name}", used, distance(packed32, plain32), 1e-4)
        noise = distance(gradient(bench, shape, torch.bfloat16, packed=False, lora=lora), plain32)
        for kernel in ("SDPA", "varlen_attn"):
            try:
                with kernels(only_sdpa=kernel == "SDPA") as used:
                    got = gradient(bench, shape, torch.bfloat16, packed=True, lora=lora, checkpointing=checkpointing)
                if kernel not in used:
                    raise NotRun(f"the packed row went through {', '.join(used) or 'no kernel of ours'}")
                row = checked(f"packed, bfloat16, {name}, {kernel}", used, distance(got, plain32), 2 * noise)
                yield {**row, "plain bfloat16's": f"{noise:.1e}"}
            except NotRun as reason:
                yield {"check": f"packed, bfloat16, {name}, {kernel}", "result": f"not run: {reason}"}
    yield from decoding_by_groups(bench, shape)
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), "small", torch.float32)
        reward = RewardModelScore(folder, device=bench.device, clamp=None)
        row = compare(reward, (40, 30, 4, True, 2), 1, time.perf_counter)
    yield checked("reward model by groups, float32", {"SDPA": 1}, float(row.split("|")[-2]), 1e-3)


def checked(check: str, used: dict[str, int], found: float, limit: float) -> Row:
    """Return a row of `correctness`."""
    calls = ", ".join(f"{kernel} × {count}" for kernel, count in used.items())
    result = "ok" if found <= limit else "WRONG"
    return {"check": check, "kernel": calls, "difference": f"{found:.1e}", "limit": f"{limit:.1e}", "result": result}


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
    bench: Bench, shape: str, dtype: torch.dtype, *, packed: bool, lora: bool = False, checkpointing: bool = False
) -> list[Tensor]:
    """Return the gradients of a step on a recorded batch, in float32."""
    settings = {
        "gradient_checkpointing": checkpointing,
        "loss_type": "grpo",
        "micro_batching": "auto" if packed else "off",
    }
    made = Trainer(GRPOTrainer, bench.model(shape, dtype), False, lora, bench.device, **settings)
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


def decoding_by_groups(bench: Bench, shape: str) -> Iterator[Row]:
    """Compare the greedy tokens of both loops, in float32, on prompts of different lengths."""
    model, batch = bench.model(shape, torch.float32).eval(), bench.batch("a", 0)
    rows = [prompt for prompt in batch.prompts for _ in range(GROUP)]
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows], device=bench.device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=bench.device)
    turn, given = Turn(), {"input_ids": ids, "attention_mask": mask, "do_sample": False, "max_new_tokens": 32}
    stock = model.generate(**given)
    with decoding(model, turn):
        ours = model.generate(**given)
    same = stock.shape == ours.shape and torch.equal(stock, ours)
    reason = f"not run: {turn.declined}" if turn.declined else "ok" if same else "WRONG"
    yield {
        "check": "greedy tokens by groups, float32",
        "difference": "none" if same else "tokens differ",
        "result": reason,
    }


# ---- time and memory


def training(bench: Bench) -> Iterator[Row]:
    """Measure the training phase, stock TRL and ours in turns."""
    for shape in bench.shapes:
        for lora in (False, True):
            for workload in "abc":
                yield bench_row(bench, lambda s=shape, t=lora, w=workload: phase(bench, s, t, w), shape, lora, workload)


def bench_row(bench: Bench, measure: Callable[[], Row], shape: str, lora: bool, workload: str) -> Row:
    """Return the figures of `measure`, or the reason why it was not run."""
    head = {"model": shape, "tuning": "LoRA" if lora else "full", "workload": workload}
    try:
        if time.monotonic() > bench.ends:
            raise NotRun("no time is left")
        return {**head, **measure()}
    except (NotRun, torch.cuda.OutOfMemoryError) as reason:
        return {**head, "result": f"not run: {' '.join(str(reason).split())[:100]}"}
    finally:
        release()


def release() -> None:
    """Release the GPU's memory between rows."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def phase(bench: Bench, shape: str, lora: bool, workload: str) -> Row:
    """Return a row of `training`."""
    config = {"gradient_checkpointing": False, "loss_type": "grpo", "learning_rate": 1e-6}
    makers = {"TRL": (TRLGRPOTrainer, {}), "ours": (GRPOTrainer, {"micro_batching": "auto"})}
    each = {
        name: Trainer(cls, bench.model(shape), False, lora, bench.device, **config, **more)
        for name, (cls, more) in makers.items()
    }
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
        "tokens/s": f"{needed / seconds:,.0f}",
        "computed ÷ needed": f"{computed / needed:.2f}",
        "MFU": f"{flops / seconds / peak / 1e12:.1%}" if peak else "unknown peak",
        "TRL, peak GiB": f"{median(stock.memory) / 1024:.2f}",
        "ours, peak GiB": f"{median(ours.memory) / 1024:.2f}",
        "planned, GiB": f"{planned(each['ours'], bench, workload) / 2**30:.2f}",
    }


def planned(trainer: Trainer, bench: Bench, workload: str) -> float:
    """Return the bytes of gradients and activations that `plan` expects of a micro-batch in TRL's layout."""
    args = copy.copy(trainer.trainer.args)
    args.max_completion_length = cap(workload)
    peft_config = getattr(trainer.trainer.model, "peft_config", {}).get("default")
    shape = ModelShape.from_config(trainer.trainer.model.config, peft_config)
    dtype = str(bench.dtype).removeprefix("torch.")
    plan = memory_plan(args, dtype, shape, Sharding(), prompt_tokens=160, steps_per_generation=MICRO_BATCHES)
    parts = plan.parts()
    return parts["gradients"] + parts["activations"]


def generation(bench: Bench) -> Iterator[Row]:
    """Measure eight prompts × eight completions of recorded lengths: transformers' loop, ours, continuous batching."""
    for shape in bench.shapes:
        for workload in ("a", "b"):
            yield bench_row(bench, lambda s=shape, w=workload: loops(bench, s, w), shape, False, workload)
    yield {"model": "-", "result": "not run: a captured decode step (CUDA graphs) is not built"}
    yield {
        "model": "-",
        "result": f"not run: vLLM {installed('vllm') or 'is not installed'}; it is timed under `make test-vllm`",
    }


def loops(bench: Bench, shape: str, workload: str) -> Row:
    """Return a row of `generation`."""
    each = steppers(bench, shape, workload)
    compete(each, [bench.batch(workload, seed) for seed in range(bench.steps)])
    seconds = {name: median(one.measured.phases["generation"]) for name, one in each.items()}
    memory = {name: median(one.measured.memory) / 1024 for name, one in each.items()}
    return {
        **{f"{name}, s": f"{value:.2f}" for name, value in seconds.items()},
        "TRL ÷ ours": f"{seconds['TRL'] / seconds['ours']:.2f}",
        "TRL, peak GiB": f"{memory['TRL']:.2f}",
        "ours, peak GiB": f"{memory['ours']:.2f}",
    }


def steppers(bench: Bench, shape: str, workload: str) -> dict[str, Trainer]:
    """Return the trainers that take complete steps."""
    config = {
        "gradient_checkpointing": False,
        "loss_type": "grpo",
        "max_completion_length": cap(workload),
        "generation_kwargs": {"suppress_tokens": [EOS]},
    }
    batching = {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": paged_cache(workload),
    }
    return {
        name: Trainer(cls, bench.model(shape), True, False, bench.device, **config, **more)
        for name, cls, more in (
            ("TRL", TRLGRPOTrainer, {}),
            ("TRL, continuous batching", TRLGRPOTrainer, batching),
            ("ours", GRPOTrainer, {}),
        )
    }


def whole_step(bench: Bench) -> Iterator[Row]:
    """Measure complete steps: generation, scoring, loss and gradient."""

    def measure(shape: str) -> Row:
        each = steppers(bench, shape, "a")
        compete(each, [bench.batch("a", seed) for seed in range(bench.steps)])
        seconds = {name: median(one.measured.whole) for name, one in each.items()}
        return {
            **{f"{name}, s": f"{value:.2f}" for name, value in seconds.items()},
            "TRL ÷ ours": f"{seconds['TRL'] / seconds['ours']:.2f}",
        }

    for shape in bench.shapes:
        yield bench_row(bench, lambda s=shape: measure(s), shape, False, "a")


def reward_model(bench: Bench) -> Iterator[Row]:
    """Measure a reward model of 1.8 billion parameters, with one forward per score and by groups."""
    size, layout = ("small", (40, 30, 4, False, 1)) if bench.tiny else ("1.8b", (500, 100, 8, False, 4))
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder), size, bench.dtype)
        reward = RewardModelScore(folder, device=bench.device, clamp=None)
        cells = [cell.strip() for cell in compare(reward, layout, 3, time.perf_counter).split("|")[1:-1]]
    yield dict(zip(("layout", "loop, s", "by group, s", "ratio", "scores/s", "difference"), cells, strict=True))


def precision(bench: Bench) -> Iterator[Row]:
    """Measure optimizer steps on bfloat16 weights: time, state, and share of updates that change a stored weight."""
    model = bench.model(bench.shapes[0], torch.bfloat16)
    torch.manual_seed(2)
    gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
    plain = torch.optim.AdamW
    makers = {"torch AdamW on float32": lambda params: plain(params, **OPTIONS), **contestants()}
    for name, make in makers.items():
        wide = name == "torch AdamW on float32"
        params = [torch.nn.Parameter(p.detach().float() if wide else p.detach().clone()) for p in model.parameters()]
        for param, grad in zip(params, gradients, strict=True):
            param.grad = grad.to(param.dtype)
        optimizer = make(params)
        optimizer.step()
        before, seconds = [p.detach().clone() for p in params], []
        for _ in range(3):
            synchronise(bench)
            started = time.perf_counter()
            optimizer.step()
            synchronise(bench)
            seconds.append(time.perf_counter() - started)
        changed = sum(int((p != old).sum()) for p, old in zip(params, before, strict=True))
        state = sum(v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor))
        yield {
            "optimizer": name,
            "step, ms": f"{1000 * sorted(seconds)[1]:.1f}",
            "state, bytes a weight": f"{state / sum(p.numel() for p in params):.1f}",
            "weights changed after 3 steps": f"{changed / sum(p.numel() for p in params):.1%}",
        }
        del optimizer, params, before
        release()


def pretrained(bench: Bench) -> Iterator[Row]:
    """Train a pretrained instruct model on arithmetic problems for 100 steps and return its first and last rewards."""
    if bench.policy is None:
        yield {
            "model": "-",
            "result": "not run: `--policy FOLDER` names a pretrained model (benchmarks/real_model.py makes one)",
        }
        return
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
    yield {"model": bench.policy.name, "steps": steps, "s": seconds, "reward": f"{rewards[0]:.3f} -> {rewards[-1]:.3f}"}


def synchronise(bench: Bench) -> None:
    """Wait for the device."""
    if bench.device != "cpu":
        torch.cuda.synchronize()


# ---- the run

SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "correctness": correctness,
    "training": training,
    "generation": generation,
    "whole_step": whole_step,
    "reward_model": reward_model,
    "precision": precision,
    "pretrained": pretrained,
}


def gpu_kind(bench: Bench) -> str:
    """Return the key of `DENSE_TFLOPS` in the GPU's name, or "" for a CPU or another GPU."""
    name = "" if bench.device == "cpu" else torch.cuda.get_device_name()
    return next((kind for kind in DENSE_TFLOPS if all(word in name for word in kind.split())), "")


def installed(package: str) -> str:
    """Return a package's version, or "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def machine(bench: Bench) -> Row:
    """Return the machine and the versions of the measurement."""
    packages = ("torch", "transformers", "trl", "peft", "accelerate")
    return {
        "device": "cpu" if bench.device == "cpu" else torch.cuda.get_device_name(),
        "python": platform.python_version(),
        **{package: installed(package) for package in packages},
        "varlen_attn": varlen.varlen_attn is not None,
        "figures mean something": not bench.tiny,
    }


def measure(bench: Bench, sections: list[str], output: Path) -> dict[str, Any]:
    """Run the sections, print their tables row by row, update the file, and return its contents."""
    found: dict[str, Any] = {"machine": machine(bench), "sections": {}}
    print(json.dumps(found["machine"]), flush=True)
    for name in sections:
        rows: list[Row] = found["sections"].setdefault(name, [])
        print(f"\n## {name}: {(SECTIONS[name].__doc__ or '').splitlines()[0]}", flush=True)
        started = time.monotonic()
        try:
            if started > bench.ends:
                raise NotRun("no time is left")
            for row in SECTIONS[name](bench):
                rows.append(row)
                write(output, found)
                print("  ".join(f"{key}: {value}" for key, value in row.items()), flush=True)
        except NotRun as reason:
            rows.append({"result": f"not run: {reason}"})
        except Exception:  # a section that fails must not prevent the later ones
            rows.append({"result": "FAILED", "traceback": traceback.format_exc()})
            print(traceback.format_exc(), flush=True)
        release()
        print(f"({time.monotonic() - started:.0f} s)", flush=True)
        write(output, found)
    return found


def write(output: Path, found: dict[str, Any]) -> None:
    """Write the figures so far."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")


def main(args: list[str] | None = None) -> int:
    """Run the sections of the command line and return 1 if a check or a section failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes at which figures mean nothing")
    parser.add_argument(
        "--steps", type=int, default=4, help="number of steps of each row; the first one warms up (default: 4)"
    )
    parser.add_argument(
        "--minutes", type=float, default=8, help="minutes after which no further row starts (default: 8)"
    )
    parser.add_argument("--policy", type=Path, help="folder with a pretrained model")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu.json"))
    options = parser.parse_args(args)
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use: `--tiny --device cpu` runs everything on a CPU")
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if options.device == "cpu":
        torch.set_num_threads(1)
    ends = time.monotonic() + 60 * options.minutes
    bench = Bench(options.device, options.tiny, 2 if options.tiny else options.steps, options.policy, ends)
    found = measure(bench, options.sections, options.output)
    results = [row.get("result", "") for rows in found["sections"].values() for row in rows]
    print(f"\n{options.output} holds these figures")
    return int(any(result in ("WRONG", "FAILED") for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
