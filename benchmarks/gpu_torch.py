"""Sections of benchmarks/gpu.py that need torch, transformers and numpy, and neither trl nor datasets."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from gpu_attention import seconds
from gpu_rows import Bench, Measurement, Row, release
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from unshared import pack_apart
from workloads import GROUP

from grpo_recipes.generation.rows import Rows
from grpo_recipes.training.adamw_bf16 import AdamWBF16, merge
from grpo_recipes.training.packed_attention import AttentionSwitch, GroupSpans
from grpo_recipes.training.packing import PackedRow, pack
from grpo_recipes.training.varlen import VarlenKernel
from grpo_rewards.attention import without_cudnn_attention

# ---- Forward and backward pass of a model


class Case(NamedTuple):
    """Micro-batch of a workload, and how the model is trained."""

    model: str
    workload: str
    rows: int
    tuning: str = "full"
    checkpointing: bool = False


def micro_batch(bench: Bench) -> Iterator[Measurement]:
    """Compare the gradient of a packed micro-batch with that of padded rows, and measure the layouts."""
    yield Measurement({"model": bench.check_shape, "dtype": "float32"}, partial(_gradients_agree, bench))
    small, large, largest = ("tiny",) * 3 if bench.tiny else ("0.5B", "1.5B", "7B")
    cases = [
        Case(small, "e", 2 * GROUP),
        Case(large, "e", 2 * GROUP, checkpointing=True),
        Case(largest, "e", GROUP, "LoRA", checkpointing=True),
        *(Case(model, workload, GROUP) for workload in "ab" for model in bench.shapes),
    ]
    for case in cases:
        yield Measurement(case._asdict(), partial(_micro_batch_times, bench, case))


class MicroBatch:
    """Prompts with their completions, and the sum of the log-probabilities in each layout.

    Args:
        bench: device and sizes.
        case: model and workload.
        dtype: dtype of the weights.
        autocast: True to run padded rows under autocast.
    """

    def __init__(self, bench: Bench, case: Case, dtype: torch.dtype, autocast: bool = False) -> None:
        self.autocast, self.device = autocast, bench.device
        self.model: PreTrainedModel = bench.model(case.model, dtype).train()
        if case.checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if case.tuning == "LoRA":
            from peft import LoraConfig, get_peft_model

            self.model.enable_input_require_grads()
            get_peft_model(self.model, LoraConfig(r=16, target_modules="all-linear")).to(dtype)
        batch = bench.batch(case.workload, 0)
        prompts = [prompt for prompt in batch.prompts for _ in range(GROUP)]
        completions = [row for group in batch.completions for row in group]
        rows = Rows.of_tokens(prompts, completions, torch.device(bench.device))
        self.rows = rows.select(slice(0, case.rows))
        self.checkpointing = case.checkpointing
        self.refusals: list[str] = []
        self.kernel = VarlenKernel(self.refusals.append)
        self.used = "SDPA"
        self.attention = AttentionSwitch()

    def padded(self) -> Tensor:
        """Return the sum from the rows that TRL would run."""
        self.attention.restore(self.model)
        keep = self.rows.logits_to_keep
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            hidden = self.model.model(
                input_ids=self.rows.input_ids, attention_mask=self.rows.attention_mask, use_cache=False
            )
            labelled = self.rows.attention_mask[:, -keep:].bool()
            labels = self.rows.input_ids[:, -keep:][labelled]
            return self._sum(hidden.last_hidden_state[:, -keep - 1 : -1][labelled], labels)

    def packed(self) -> Tensor:
        """Return the sum from our packed row."""
        return self._of_row(pack(self.rows))

    def apart(self) -> Tensor:
        """Return the sum from a packed row that shares no prompt."""
        return self._of_row(pack_apart(self.rows))

    def _of_row(self, row: PackedRow) -> Tensor:
        self.attention.pack(self.model)
        hidden = self.model.model(
            input_ids=row.input_ids,
            position_ids=row.position_ids,
            attention_mask=torch.ones_like(row.input_ids),
            group_spans=GroupSpans(row.groups, self._attend, recomputed=self.checkpointing),
            use_cache=False,
        )
        return self._sum(hidden.last_hidden_state[0, row.positions], row.labels[0, row.positions])

    def _attend(self, *inputs: Any) -> Tensor | None:
        output = self.kernel(*inputs)
        self.used = "SDPA" if output is None else "varlen_attn"
        return output

    def _sum(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of log-probabilities by TRL's head, or by whole logits where TRL is not installed."""
        head = self.model.lm_head.weight
        try:
            from trl.kernels.chunked_logprob import ChunkedLogProbFunction
            from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE
        except ImportError:
            return cross_entropy((hidden @ head.T).float(), labels, reduction="sum")
        options = (1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ("entropy",))
        return -ChunkedLogProbFunction.apply(hidden, head, None, labels, *options)[0].sum()

    def gradients(self, loss: Callable[[], Tensor]) -> list[Tensor]:
        """Return the gradients of a sum, and keep none."""
        # TRL's rows get the kernel that torch chooses.
        with nullcontext() if loss == self.padded else without_cudnn_attention():
            loss().backward()
        found = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self.model.zero_grad()
        return found


def _gradients_agree(bench: Bench) -> Row:
    case = MicroBatch(bench, Case(bench.check_shape, "a", GROUP), torch.float32)
    expected = case.gradients(case.padded)
    largest = max(float(gradient.abs().max()) for gradient in expected)
    gaps = []
    for layout in (case.packed, case.apart):
        pairs = zip(case.gradients(layout), expected, strict=True)
        gaps.append(max(float((mine - stock).abs().max()) for mine, stock in pairs) / largest)
    return {"difference": f"{max(gaps):.1e}", "limit": "1e-04", "result": "ok" if max(gaps) <= 1e-4 else "WRONG"}


def _micro_batch_times(bench: Bench, case: Case) -> Row:
    made = MicroBatch(bench, case, bench.dtype)
    layouts = {"TRL": made.padded, "packed apart": made.apart, "ours": made.packed}
    found: Row = {
        "padded tokens": made.rows.input_ids.numel(),
        "packed tokens": made.rows.host.packed_tokens(),
    }
    costs = {name: _cost(bench, partial(made.gradients, layout)) for name, layout in layouts.items()}
    kernel = made.refusals[0] if made.refusals else made.used
    if case.tuning == "full" and not bench.tiny:
        del made, layouts
        release()
        # Weights in float32, autocast and gradient checkpointing.
        stock = MicroBatch(bench, case._replace(checkpointing=True), torch.float32, autocast=True)
        costs["TRL's default"] = _cost(bench, partial(stock.gradients, stock.padded))
    for name, (taken, peak) in costs.items():
        found |= {f"{name}, ms": f"{1000 * taken:.1f}" if taken else "out of memory", f"{name}, peak GiB": peak}
    ours = costs.pop("ours")[0]
    found |= {f"{name} ÷ ours": f"{taken / ours:.2f}" for name, (taken, _) in costs.items() if taken and ours}
    return {**found, "attention": kernel}


def _cost(bench: Bench, work: Callable[[], object]) -> tuple[float | None, str]:
    """Return the seconds of a call, or None if it does not fit, and the GiB that it takes."""
    try:
        return seconds(bench, work, series=3), _peak(bench, work)
    except torch.OutOfMemoryError:
        return None, "-"
    finally:
        release()


def _peak(bench: Bench, work: Callable[[], object]) -> str:
    """Return the GiB that a call takes beside what is in use before."""
    if bench.device == "cpu":
        return "-"
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return f"{(torch.cuda.max_memory_allocated() - before) / 2**30:.2f}"


# ---- Optimizer


def adamw_bf16(bench: Bench) -> Iterator[Measurement]:
    """Compare three steps on bfloat16 weights with torch's fused AdamW on float32 weights, and time both."""
    for shape in bench.shapes:
        yield Measurement({"weights of": shape}, partial(_steps_agree, bench, shape))


def _steps_agree(bench: Bench, shape: str) -> Row:
    start = [parameter.detach() for parameter in bench.model(shape, torch.bfloat16).parameters()]
    ours = [nn.Parameter(weight) for weight in start]
    exact = [nn.Parameter(weight.float()) for weight in start]
    optimizers = AdamWBF16(ours), torch.optim.AdamW(exact, fused=True)
    torch.manual_seed(0)
    for weight, copy in zip(ours, exact, strict=True):
        weight.grad = torch.randn_like(weight)
        copy.grad = weight.grad.float()
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step()
    equal = True
    for weight, copy in zip(ours, exact, strict=True):
        (found,) = merge([weight.detach()], [optimizers[0].state[weight]["low_bits"]])[1]
        equal &= torch.equal(found, copy)
    times = [seconds(bench, optimizer.step) for optimizer in optimizers]
    return {
        "weights": f"{sum(weight.numel() for weight in ours):,}",
        "difference": "none" if equal else "bits differ",
        "result": "ok" if equal else "WRONG",
        "adamw_bf16, ms": f"{1000 * times[0]:.1f}",
        "torch fused, float32, ms": f"{1000 * times[1]:.1f}",
    }


# ---- Decoding


def decode_step(bench: Bench) -> Iterator[Measurement]:
    """Compare greedy tokens of group decoding with those of transformers' loop, and time a token."""
    yield Measurement({"model": bench.check_shape, "dtype": "float32"}, partial(_greedy_tokens_agree, bench))
    for shape in bench.shapes:
        yield Measurement({"model": shape}, partial(_token_times, bench, shape))


def _greedy_tokens_agree(bench: Bench) -> Row:
    loops = _generations(bench, bench.check_shape, torch.float32)
    tokens = 8 if bench.tiny else 32
    same = torch.equal(loops["transformers"](tokens), loops["groups"](tokens))
    return {"difference": "none" if same else "tokens differ", "result": "ok" if same else "WRONG"}


def _token_times(bench: Bench, shape: str) -> Row:
    loops = _generations(bench, shape, bench.dtype)
    few, many = (2, 4) if bench.tiny else (8, 40)
    each = {}
    for name, generate in loops.items():
        generate(few)
        times = []
        for tokens in (few, many):
            bench.synchronise()
            started = time.perf_counter()
            generate(tokens)
            bench.synchronise()
            times.append(time.perf_counter() - started)
        each[name] = 1000 * (times[1] - times[0]) / (many - few)
    return {"rows": 64, **{f"{name}, ms a token": f"{value:.2f}" for name, value in each.items()}}


def _generations(bench: Bench, shape: str, dtype: torch.dtype) -> dict[str, Callable[[int], Tensor]]:
    """Return decoding loops by name, as functions of the number of tokens, on 64 rows of 8 prompts."""
    from grpo_recipes.generation.groups import Turn, decoding  # needs psutil, which the other rows do not

    model = bench.model(shape, dtype).eval()
    prompts = [prompt for prompt in bench.batch("a", 0).prompts for _ in range(GROUP)]
    rows = Rows.of_tokens(prompts, [[]] * len(prompts), torch.device(bench.device))

    def stock(tokens: int) -> Tensor:
        return model.generate(
            input_ids=rows.input_ids,
            attention_mask=rows.attention_mask,
            do_sample=False,
            eos_token_id=model.config.vocab_size,  # no row ends before the last token
            pad_token_id=0,
            max_new_tokens=tokens,
        )

    def groups(tokens: int) -> Tensor:
        turn = Turn()
        with decoding(model, turn):
            generated = stock(tokens)
        if turn.declined:
            raise RuntimeError(f"not decoded in groups: {turn.declined}")
        return generated

    return {"transformers": stock, "groups": groups}


# ---- Reward model


def reward_model(bench: Bench) -> Iterator[Measurement]:
    """Compare a reward model by groups with one forward pass per score, and measure 1.8 billion parameters."""
    yield Measurement({"dtype": "float32"}, partial(_scores_agree, bench))
    yield Measurement({}, partial(_scoring_times, bench))


def _scores_agree(bench: Bench) -> Row:
    cells = _scored(bench, "small", torch.float32, (40, 30, 4, True, 2), 1)
    gap = float(cells["difference"])
    return {"difference": f"{gap:.1e}", "limit": "1e-03", "result": "ok" if gap <= 1e-3 else "WRONG"}


def _scoring_times(bench: Bench) -> Row:
    size, layout = ("small", (40, 30, 4, False, 1)) if bench.tiny else ("1.8b", (500, 100, 8, False, 4))
    return _scored(bench, size, bench.dtype, layout, 3)


def _scored(
    bench: Bench, size: str, dtype: torch.dtype, layout: tuple[int, int, int, bool, int], rounds: int
) -> dict[str, str]:
    """Return the row of benchmarks/reward_model.py for a layout."""
    from reward_model import build, compare

    from grpo_rewards.reward_model import RewardModelScore

    with tempfile.TemporaryDirectory() as folder:
        with torch.device(bench.device):  # random weights are drawn in seconds there
            build(Path(folder), size, dtype)
        reward = RewardModelScore(folder, device=bench.device, clamp=None)
        cells = [cell.strip() for cell in compare(reward, layout, rounds, time.perf_counter).split("|")[1:-1]]
    return dict(zip(("layout", "loop, s", "by group, s", "ratio", "scores/s", "difference"), cells, strict=True))


# ---- Precision


def precision(bench: Bench) -> Iterator[Measurement]:
    """Measure optimizer steps on bfloat16 weights: time, state, and share of updates that change a stored weight."""
    from precision import OPTIONS, contestants

    def on_float32(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, **OPTIONS)

    yield Measurement(
        {"optimizer": "torch AdamW on float32"}, partial(_optimizer_times, bench, on_float32, torch.float32)
    )
    for name, make in contestants().items():
        yield Measurement({"optimizer": name}, partial(_optimizer_times, bench, make, torch.bfloat16))


def _optimizer_times(
    bench: Bench, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], dtype: torch.dtype
) -> Row:
    weights = bench.model(bench.shapes[0], torch.bfloat16).parameters()
    params = [nn.Parameter(weight.detach().to(dtype)) for weight in weights]
    torch.manual_seed(2)
    for param in params:
        param.grad = torch.randn_like(param, dtype=torch.bfloat16).to(dtype)
    optimizer = make(params)
    optimizer.step()
    before, times = [param.detach().clone() for param in params], []
    for _ in range(3):
        bench.synchronise()
        started = time.perf_counter()
        optimizer.step()
        bench.synchronise()
        times.append(time.perf_counter() - started)
    changed = sum(int((param != old).sum()) for param, old in zip(params, before, strict=True))
    state = sum(v.nbytes for values in optimizer.state.values() for v in values.values() if isinstance(v, Tensor))
    count = sum(param.numel() for param in params)
    return {
        "step, ms": f"{1000 * median(times):.1f}",
        "state, bytes a weight": f"{state / count:.1f}",
        "weights changed after 3 steps": f"{changed / count:.1%}",
    }
