"""Share of AdamW's updates that bfloat16 weights keep: ours and its peers against float32, on equal gradients.

    TORCHDYNAMO_DISABLE=1 python benchmarks/precision.py       # 1,000 and 2,500 steps; some minutes on one thread
    python benchmarks/precision.py --policy runs/quickstart/policy-seed0 --steps 1000
    python benchmarks/precision.py --cost                            # cost of sampling the changes of a step

Every contestant starts from the same bfloat16 weights and gets the same bfloat16 gradients at learning rate 5e-6: a
fixed direction for each weight, N(0, 1), plus noise N(0, 1), ten times smaller after a fifth of the run. There are two
sets of weights. One is the quickstart's policy cast to bfloat16 (without `--policy` it is trained first, which takes a
minute). The other has the distribution of Qwen2.5: matrices of N(0, 0.02), its `initializer_range`, norms above 1,
biases of the queries and keys up to tens. The step of an optimizer does not depend on shapes, so that a part of each
set is enough.

Displacement is the weights after the run minus the weights before. Projection is the contestant's displacement along
that of float32: 1 if it is as far. Error is the length of their difference, as a share of float32's displacement.
`whole` is the weight with the remainder that the optimizer keeps for it. `stored` is the bfloat16 weight alone, which
cannot do better than the row that rounds the last weights of float32. Peers that are not installed are skipped with a
line: `pip install torch-optimi torchao`. torchao compiles its step for each shape, which takes minutes on a CPU and
changes no number. The variable disables that, and torchao's times then mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_recipes.training.adamw_bf16 import AdamWBF16, UpdateSample, merge

OPTIONS: dict[str, Any] = {"lr": 5e-6, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
# Block size of torchao's 8-bit moments. It keeps a tensor of another size in the dtype of the weights.
BLOCK = 256
Optimizers = dict[str, Callable[[list[Any]], torch.optim.Optimizer]]


class BFloat16Compensation(torch.optim.Optimizer):
    """AdamW with float32 moments and a bfloat16 buffer for the rounding error (Kahan summation), for comparison."""

    def __init__(self, params: list[Tensor]) -> None:
        super().__init__(params, {})
        self.inner = torch.optim.AdamW([p.detach().float().requires_grad_() for p in params], **OPTIONS)
        for param in params:
            self.state[param]["kahan_comp"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step with torch's AdamW on the weights plus their rounding error."""
        params, inner = self.param_groups[0]["params"], self.inner.param_groups[0]["params"]
        for param, whole in zip(params, inner, strict=True):
            whole.copy_(param.float() + self.state[param]["kahan_comp"].float())
            whole.grad = param.grad.float()
        self.inner.step()
        for param, whole in zip(params, inner, strict=True):
            param.copy_(whole)
            self.state[param]["kahan_comp"].copy_(whole - param.float())
            self.state[param]["exp_avg_sq"] = self.inner.state[whole]["exp_avg_sq"]


def contestants() -> Optimizers:
    """Return every installed optimizer, and print a line for each package that is missing."""
    found: Optimizers = {
        "torch AdamW on bfloat16": lambda params: torch.optim.AdamW(params, **OPTIONS),
        "adamw_bf16 (ours)": lambda params: AdamWBF16(params, **OPTIONS),
        "bfloat16 compensation, float32 moments": BFloat16Compensation,
    }
    with _peer("torch-optimi", "optimi") as optimi:
        if optimi is not None:
            name = f"torch-optimi {version('torch-optimi')}"
            found[f"{name} AdamW, kahan_sum"] = lambda params: optimi.AdamW(params, kahan_sum=True, **OPTIONS)
            found[f"{name} StableAdamW, kahan_sum (transformers' stable_adamw)"] = lambda params: optimi.StableAdamW(
                params, lr=OPTIONS["lr"], betas=(0.9, 0.999), weight_decay=0.01, kahan_sum=True
            )
    with _peer("torchao", "torchao.optim") as torchao:
        if torchao is not None:
            name = f"torchao {version('torchao')}"
            more = {**OPTIONS, "bf16_stochastic_round": True}
            found[f"{name} AdamW, stochastic rounding"] = lambda params: torchao._AdamW(params, **more)
            found[f"{name} AdamW8bit, stochastic rounding (transformers' adamw_torch_8bit)"] = lambda params: (
                torchao.AdamW8bit(params, **more)
            )
    return found


@contextlib.contextmanager
def _peer(package: str, module: str) -> Iterator[Any]:
    try:
        version(package)
        yield import_module(module)
    except PackageNotFoundError:
        print(f"{package} is not installed: left out")
        yield None


@dataclass(frozen=True)
class Result:
    """Result of a contestant's run."""

    projection: float
    error: float
    stored_error: float
    second_moment: float | None
    """Median over weights of its second moment divided by float32's; None if it is stored in another form."""
    seconds: float


def gradients(weights: list[Tensor], steps: int) -> Iterator[list[Tensor]]:
    """Yield the gradients of the run, in bfloat16."""
    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(w.shape, generator=generator) for w in weights]
    for step in range(steps):
        scale = 1.0 if step < steps // 5 else 0.1
        yield [(scale * (d + torch.randn(d.shape, generator=generator))).bfloat16() for d in directions]


def run(weights: list[Tensor], steps: int, optimizers: Optimizers) -> dict[str, Result]:
    """Run every contestant on the same weights and gradients, step by step in turns."""
    reference = [w.float().requires_grad_() for w in weights]
    exact = torch.optim.AdamW(reference, **OPTIONS)
    params = {name: [torch.nn.Parameter(w.clone()) for w in weights] for name in optimizers}
    made = {name: make(params[name]) for name, make in optimizers.items()}
    seconds: dict[str, list[float]] = defaultdict(list)
    for grads in gradients(weights, steps):
        for param, grad in zip(reference, grads, strict=True):
            param.grad = grad.float()
        exact.step()
        for name, optimizer in made.items():
            for param, grad in zip(params[name], grads, strict=True):
                param.grad = grad.clone()
            started = time.process_time()
            optimizer.step()
            seconds[name].append(time.process_time() - started)
    start, end = _flat(weights), _flat([w.detach() for w in reference])
    moments = _flat([exact.state[w]["exp_avg_sq"] for w in reference])
    results = {}
    for name, optimizer in made.items():
        whole, stored = _flat([_whole(p, optimizer) for p in params[name]]), _flat([p.detach() for p in params[name]])
        squares = [optimizer.state[p].get("exp_avg_sq") for p in params[name]]
        plain = all(isinstance(s, Tensor) and type(s) is Tensor for s in squares)
        # torch-optimi stores the moment after the bias correction.
        correction = 1 - OPTIONS["betas"][1] ** steps if name.startswith("torch-optimi") else 1.0
        ratio = correction * float((_flat(squares) / moments).median()) if plain else None
        results[name] = _result(start, end, whole, stored, ratio, statistics.median(seconds[name]))
    rounded = _flat([w.detach().bfloat16() for w in reference])
    results["float32, its last weights rounded to bfloat16"] = _result(start, end, end, rounded, 1.0, 0.0)
    return results


def _result(start: Tensor, end: Tensor, whole: Tensor, stored: Tensor, ratio: float | None, seconds: float) -> Result:
    true, ours = end - start, whole - start
    error = (ours - true).norm() / true.norm()
    stored_error = (stored - end).norm() / true.norm()
    return Result(float(ours @ true / (true @ true)), float(error), float(stored_error), ratio, seconds)


def _whole(param: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """Return a weight plus the remainder that its optimizer keeps."""
    state, value = optimizer.state[param], param.detach()
    if "low_bits" in state:
        return merge([value], [state["low_bits"]])[1][0]
    if isinstance(compensation := state.get("kahan_comp"), Tensor) and compensation.shape == value.shape:
        return value.double() + compensation.double()
    return value


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def qwen_weights() -> list[Tensor]:
    """Return weights with the distribution of a Qwen2.5 layer, fewer of each: matrices, norms, biases."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    matrices, norms, biases = 0.02 * normal(400 * BLOCK), 1 + normal(3072).abs(), 10 * normal(512)
    return [tensor.bfloat16() for tensor in (matrices, norms, biases)]


def policy_weights(folder: Path | None) -> list[Tensor]:
    """Return the quickstart's policy in bfloat16: every fourth weight of its matrices, all norms and biases."""
    with tempfile.TemporaryDirectory() as made:
        if folder is None:
            from grpo_recipes.quickstart import WarmStart, warm_start
            from grpo_recipes.recipe.dataset import DatasetSpec

            folder = Path(made)
            warm_start(WarmStart(), DatasetSpec("arithmetic", prompt_style="think"), folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    matrices = torch.cat([param.detach().flatten() for param in model.parameters() if param.dim() > 1])
    others = torch.cat([param.detach() for param in model.parameters() if param.dim() == 1])
    part = matrices[::4]
    return [part[: len(part) // BLOCK * BLOCK].bfloat16(), others.bfloat16()]


def table(title: str, results: dict[str, Result]) -> str:
    """Return one run as Markdown."""
    plain = results["torch AdamW on bfloat16"].seconds
    lines = [
        f"{title}\n",
        "| optimizer | projection, whole | error, whole | error, stored | second moment ÷ float32's | time ÷ plain |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        ratio = "–" if result.second_moment is None else f"{result.second_moment:.2f}"
        timed = result.seconds and not ("torchao" in name and "TORCHDYNAMO_DISABLE" in os.environ)
        cost = f"{result.seconds / plain:.1f}" if timed else "–"
        lines.append(
            f"| {name} | {result.projection:.4f} | {result.error:.4f} | {result.stored_error:.4f} | {ratio} | {cost} |"
        )
    return "\n".join(lines)


def sampling_cost(repeats: int = 50) -> str:
    """Return a line with the CPU time of sampling the changes of one step."""
    params = [torch.nn.Parameter(torch.randn(512, 512).bfloat16() * 0.02) for _ in range(300)]
    optimizer, sample = torch.optim.AdamW(params, **OPTIONS), UpdateSample(defaultdict(list))
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    nothing: Any = None
    sample.on_train_begin(nothing, nothing, nothing, optimizer=optimizer)
    taken = 0.0
    for _ in range(repeats):
        started = time.process_time()
        sample.on_step_begin(nothing, nothing, nothing)
        sample.on_optimizer_step(nothing, nothing, nothing, optimizer=optimizer)
        taken += time.process_time() - started
    return f"sampling 4,096 of 79 million weights in 300 tensors: {1000 * taken / repeats:.1f} ms a step"


def main() -> None:
    """Run the comparison and print its tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[1000, 2500])
    parser.add_argument("--policy", type=Path, help="folder of the quickstart's policy")
    parser.add_argument("--cost", action="store_true", help="measure only the cost of the sample")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(sampling_cost())
    if options.cost:
        return
    print(f"torch {torch.__version__}")
    optimizers = contestants()
    sets = {"the quickstart's policy": policy_weights(options.policy), "weights as Qwen2.5 has them": qwen_weights()}
    for (name, weights), steps in ((item, steps) for item in sets.items() for steps in options.steps):
        title = f"{name} ({sum(w.numel() for w in weights):,} weights), {steps:,} steps"
        print(f"\n{table(title, run(weights, steps, optimizers))}", flush=True)


if __name__ == "__main__":
    main()
