"""Training phase and complete step of stock TRL and ours in one run, on recorded completions.

    python benchmarks/step.py                                    # the small model, full fine-tuning: an hour of CPU
    python benchmarks/step.py --models small large --tuning full lora --checkpointing off on       # all of it: a day
    python benchmarks/step.py --workloads a --steps 5 --whole-step
    python benchmarks/step.py --turns 4 8 --steps 4                # complete steps of turns with a tool: minutes
    python benchmarks/step.py --models qwen3_5 gpt_oss --layouts auto "one bucket" --workloads a b --steps 4

Each step has 8 prompts × 8 completions in 8 micro-batches. Workloads: (a) prompts as long as GSM8K's, completions
log-normal(4.4, 0.6) of at most 256 tokens; (b) log-normal(4.79, 0.9), at most 1024; (c) = (b), half of the groups
without variance in their rewards; (d) the worst case: equal lengths and prompts of two tokens, so that nothing is
padded or shared; (e) prompts of 200 to 500 tokens, completions log-normal(5.55, 0.55), 300 tokens on average.

The layout "prompts not shared" packs each completion with a prompt of its own, as padding-free trainers do.

Trainers take turns step by step, on one thread. Times are CPU time of this process, medians over steps. Ratios are
stock TRL over ours. Memory is the peak above the memory in use before the step.

`--whole-step` adds generation, in which every row ends with as many tokens as its recorded completion, and measures
each phase of a step. The contestants are stock TRL with transformers' loop and with its continuous batching, ours
without and with group decoding, and a loop written from the description of the from-scratch documents: full logits, one
padded batch, and the frozen copy as the reference. Its memory is that of generation. A step of (d) warms up before the
steps that count.

`--turns 4 8` measures complete steps with a tool instead, on prompts of 600 characters, with the policy, tool and
script of `tool_turns.py`. The first step warms up.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import platform
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from typing import Any

import tool_turns
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5TextConfig,
    StoppingCriteria,
)
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig
from trl import GRPOTrainer as TRLGRPOTrainer
from unshared import prompts_not_shared
from workloads import EOS, GROUP, PAD, PROMPTS, VOCABULARY, Batch, cap

from grpo_recipes import GRPOTrainer
from grpo_recipes.generation.groups import Turn

MICRO_BATCHES = 8
LEARNING_RATE = 0.1
QWEN2 = {"small": (192, 4, 4), "large": (512, 6, 8)}
"""Hidden size, number of layers and number of attention heads of the models that are Qwen2."""
LINEAR = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ARCHITECTURES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3_5": (Qwen3_5TextConfig, {"intermediate_size": 1024, "num_key_value_heads": 2, **LINEAR}),
    "gpt_oss": (GptOssConfig, {"intermediate_size": 512, "num_key_value_heads": 2, "sliding_window": 128, **EXPERTS}),
}
"""Models that can't be packed, of hidden size 256 and 6 layers: a gated delta rule, and sinks with a sliding window."""
MODELS = (*QWEN2, *ARCHITECTURES)
WORKLOADS = ("a", "b", "c", "d", "e")
PHASES = ("generation", "reference", "forward", "backward")
MEASURING = "measuring"
ONE_BUCKET, UNSHARED = "one bucket", "packed, prompts not shared"
LAYOUTS = {"auto": "auto", UNSHARED: "auto", "trimmed": {"layout": "trimmed"}, ONE_BUCKET: {"layout": "trimmed"}}
"""Settings of the layouts: the best one, packed rows that share no prompt, and trimmed rows in buckets of similar
length and without buckets."""
OTHERS = ("TRL, continuous batching", "from scratch", "ours, generation off", "ours")
"""Contestants of complete steps beside TRL."""


def paged_cache(workload: str) -> dict[str, int]:
    """Return a cache of transformers' continuous batching for exactly the rows of a step.

    The default, all free memory in batches of 8192 tokens, needs a mask of gigabytes on a CPU.
    """
    page, longest_prompt = 32, 500 if workload == "e" else 160
    pages = -(-(longest_prompt + cap(workload)) // page)
    return {"page_size": page, "num_blocks": PROMPTS * GROUP * pages, "max_batch_tokens": 512}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words `t0` ... `t2047`."""
    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(VOCABULARY)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1", padding_side="left")


def policy(size: str, folder: str) -> PreTrainedModel:
    """Return the model of the given name, always the same, and save it to `folder` for TRL's reference."""
    torch.manual_seed(0)
    if size in QWEN2:
        hidden, layers, heads = QWEN2[size]
        config_class: type[PreTrainedConfig] = Qwen2Config
        sizes = {"intermediate_size": 4 * hidden, "num_key_value_heads": 2}
    else:
        hidden, layers, heads = 256, 6, 4
        config_class, sizes = ARCHITECTURES[size]
        sizes = {**sizes, "head_dim": hidden // heads}
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=2048,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        **sizes,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    model.config._name_or_path = folder
    return model


# ---- one step of each contestant


@dataclass(frozen=True)
class Meter:
    """Clock and memory of a device: CPU time and resident memory, or wall time and the allocator's peak on a GPU."""

    device: str = "cpu"

    def now(self) -> float:
        """Return the seconds after the device has finished its work."""
        if self.device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def in_use(self) -> float:
        """Reset `peak` and return the MiB in use: of the process on Linux, or of the GPU's tensors."""
        gc.collect()
        if self.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated() / 2**20
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return status("VmRSS") / 1024

    def peak(self) -> float:
        """Return the largest number of MiB in use since `in_use`."""
        return status("VmHWM") / 1024 if self.device == "cpu" else torch.cuda.max_memory_allocated() / 2**20


@dataclass
class Measured:
    """Measurements of one contestant's steps."""

    meter: Meter = Meter()
    training: list[float] = field(default_factory=list)
    """Seconds of each step without generation and scoring."""
    whole: list[float] = field(default_factory=list)
    """Seconds of each step."""
    memory: list[float] = field(default_factory=list)
    """Peak MiB above the baseline of each step, or of its generation."""
    phases: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Seconds of each phase of each step."""
    step: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of each phase of the current step."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the block to a phase of the step."""
        start = self.meter.now()
        yield
        self.step[name] += self.meter.now() - start

    @contextmanager
    def peak_memory(self) -> Iterator[None]:
        """Record the peak memory above the memory in use at the start of the block."""
        with self.phase(MEASURING):
            before = self.meter.in_use()
        yield
        self.memory.append(self.meter.peak() - before)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with its time added to a phase."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return call(*args, **kwargs)

        return counted

    def end_step(self, spent: float) -> float:
        """Record the phases of a step of `spent` seconds, and return these without the time of measuring."""
        for name in PHASES:
            self.phases[name].append(self.step.pop(name, 0.0))
        spent -= self.step.pop(MEASURING, 0.0)
        self.whole.append(spent)
        return spent


class Trainer:
    """Trainer driven step by step, with SGD, on given batches."""

    def __init__(
        self,
        cls: type[TRLGRPOTrainer],
        model: PreTrainedModel,
        generates: bool,
        lora: bool,
        device: str = "cpu",
        **config: Any,
    ):
        settings = {
            "output_dir": tempfile.mkdtemp(),
            "use_cpu": device == "cpu",
            "bf16": False,
            "report_to": "none",
            "disable_tqdm": True,
            "per_device_train_batch_size": PROMPTS * GROUP // MICRO_BATCHES,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "num_generations": GROUP,
            "max_completion_length": 1024,
            **config,
        }
        given = {name: settings.pop(name, "auto") for name in ("micro_batching", "generation")}
        ours = given if cls is GRPOTrainer else {}
        self.trainer = cls(
            model=model,
            reward_funcs=lambda recorded, **_: recorded,
            args=GRPOConfig(**settings),
            train_dataset=Dataset.from_dict({"prompt": [f"t{n}" for n in range(2, 2 + PROMPTS)]}),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.0) if lora else None,
            **ours,
        )
        self.generates = generates
        self.trainer.rollout_func = self.rollout
        self.trainer.current_gradient_accumulation_steps = MICRO_BATCHES
        if settings["gradient_checkpointing"]:
            self.trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.measured = Measured(Meter(device))
        self.generation = 0.0
        self._time_generation()
        if generates:
            self._time_phases()

    def _time_phases(self) -> None:
        trainer, timed = self.trainer, self.measured.timed
        score, forward = trainer._get_per_token_logps_and_entropies, trainer.compute_loss
        reference = timed("reference", score)
        trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
            score if torch.is_grad_enabled() else reference
        )(*args, **kwargs)
        trainer.compute_loss = timed("forward", forward)
        trainer.accelerator.backward = timed("backward", trainer.accelerator.backward)

    def _time_generation(self) -> None:
        original = self.trainer._generate_and_score_completions

        def timed(inputs: Any) -> Any:
            start = self.measured.meter.now()
            try:
                return original(inputs)
            finally:
                self.generation = self.measured.meter.now() - start

        self.trainer._generate_and_score_completions = timed

    @property
    def prompts(self) -> list[list[int]]:
        """Return the prompt of each row of the step."""
        return [prompt for prompt in self.batch.prompts for _ in range(GROUP)]

    def generate(self) -> None:
        """Generate completions as long as the recorded ones."""
        with recorded_lengths(self.trainer.model, self.batch):
            self.trainer._generate_single_turn(self.prompts, None, {}, GROUP)

    def rollout(self, prompts: list[str], trainer: TRLGRPOTrainer) -> dict[str, Any]:
        """Return the recorded completions and discard the generated tokens."""
        if self.generates:
            with self.measured.peak_memory(), self.measured.phase("generation"):
                self.generate()
        return {
            "prompt_ids": self.prompts,
            "completion_ids": [completion for group in self.batch.completions for completion in group],
            "logprobs": None,
            "recorded": [reward for group in self.batch.rewards for reward in group],
        }

    def step(self, batch: Batch) -> None:
        """Take one optimizer step and measure it."""
        self.batch = batch
        rows = [{"prompt": text} for text in batch.text for _ in range(GROUP)]
        torch.manual_seed(0)
        start = self.measured.meter.now()
        with nullcontext() if self.generates else self.measured.peak_memory():
            for _ in range(MICRO_BATCHES):
                self.trainer.training_step(self.trainer.model, rows, None)
            sgd(self.trainer.model)
        spent = self.measured.end_step(self.measured.meter.now() - start)
        self.measured.training.append(spent - self.generation)

    @property
    def parameters(self) -> list[Tensor]:
        """Return the parameters of the policy."""
        return list(self.trainer.model.parameters())


class Unshared(Trainer):
    """Ours, with a prompt of its own for each completion of a packed row."""

    def step(self, batch: Batch) -> None:
        """Take one optimizer step and measure it."""
        with prompts_not_shared():
            super().step(batch)


class FromScratch:
    """Loop of the from-scratch documents, with accumulated gradients divided by their number."""

    def __init__(self, model: PreTrainedModel, reference: PreTrainedModel, beta: float):
        self.model, self.reference, self.beta = model, reference, beta
        self.measured = Measured()

    def step(self, batch: Batch) -> None:
        """Generate, score with policy and frozen copy on one padded batch, and take one step."""
        start = self.measured.meter.now()
        with self.measured.peak_memory(), self.measured.phase("generation"):
            generate(self.model, batch)
        self._train(batch)
        self.measured.end_step(self.measured.meter.now() - start)

    def _train(self, batch: Batch) -> None:
        pairs = [(p, c) for p, group in zip(batch.prompts, batch.completions, strict=True) for c in group]
        left, right = max(len(p) for p, _ in pairs), max(len(c) for _, c in pairs)
        ids = torch.tensor([[PAD] * (left - len(p)) + p + c + [PAD] * (right - len(c)) for p, c in pairs])
        mask = torch.tensor(
            [[0] * (left - len(p)) + [1] * (len(p) + len(c)) + [0] * (right - len(c)) for p, c in pairs]
        )
        advantages = torch.tensor(batch.advantages())[:, None]
        for rows in torch.arange(len(pairs)).chunk(MICRO_BATCHES):
            kept = mask[rows, -right:]
            with self.measured.phase("forward"):
                log_probs = self._log_probs(self.model, ids[rows], mask[rows], right)
                ratio = torch.exp(log_probs - log_probs.detach())
                loss = -torch.min(ratio * advantages[rows], ratio.clamp(0.8, 1.2) * advantages[rows])
            if self.beta:
                with torch.no_grad(), self.measured.phase("reference"):
                    reference = self._log_probs(self.reference, ids[rows], mask[rows], right)
                loss = loss + self.beta * (torch.exp(reference - log_probs) - (reference - log_probs) - 1)
            with self.measured.phase("backward"):
                (((loss * kept).sum(1) / kept.sum(1)).mean() / MICRO_BATCHES).backward()
        sgd(self.model)

    @staticmethod
    def _log_probs(model: PreTrainedModel, ids: Tensor, mask: Tensor, keep: int) -> Tensor:
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -keep - 1 : -1]
        return logits.log_softmax(-1).gather(2, ids[:, -keep:, None])[..., 0]

    @property
    def parameters(self) -> list[Tensor]:
        """Return the parameters of the policy."""
        return list(self.model.parameters())


class Lengths(StoppingCriteria):
    """Stopping criterion that ends each row at the length of its recorded completion."""

    def __init__(self, batch: Batch):
        self.lengths = torch.tensor([len(completion) for group in batch.completions for completion in group])
        self.width = 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Return the mask (rows,) of the rows that end."""
        self.width = self.width or input_ids.shape[1] - 1
        return input_ids.shape[1] - self.width >= self.lengths.to(input_ids.device)


@contextmanager
def recorded_lengths(model: Any, batch: Batch) -> Iterator[None]:
    """End the rows that `model` or its continuous batching generates within the block at their recorded lengths."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    criteria, add_requests, lengths = (
        base._get_stopping_criteria,
        ContinuousBatchingManager.add_requests,
        Lengths(batch),
    )

    single_turn = TRLGRPOTrainer._generate_single_turn

    def cut(*args: Any, **kwargs: Any) -> Any:  # TRL recognises the end of a row by its end-of-sequence token alone
        completions, log_probs = single_turn(*args, **kwargs)
        return [row[:length] for row, length in zip(completions, lengths.lengths.tolist(), strict=True)], log_probs

    def with_lengths(*args: Any, **kwargs: Any) -> Any:
        made = criteria(*args, **kwargs)
        made.append(lengths)
        return made

    def each(manager: Any, inputs: list[list[int]], **_: Any) -> list[str]:
        pairs = zip(inputs, lengths.lengths.tolist(), strict=True)
        return [manager.add_request(prompt, max_new_tokens=length) for prompt, length in pairs]

    base._get_stopping_criteria, ContinuousBatchingManager.add_requests = with_lengths, each
    TRLGRPOTrainer._generate_single_turn = cut
    try:
        yield
    finally:
        del base._get_stopping_criteria
        ContinuousBatchingManager.add_requests = add_requests
        TRLGRPOTrainer._generate_single_turn = single_turn


@torch.no_grad()
def generate(model: PreTrainedModel, batch: Batch) -> None:
    """Sample the recorded number of tokens for every row, in a simple loop."""
    rows = [prompt for prompt in batch.prompts for _ in range(GROUP)]
    left = max(map(len, rows))
    ids = torch.tensor([[PAD] * (left - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (left - len(row)) + [1] * len(row) for row in rows])
    training = model.training
    model.eval()
    with recorded_lengths(model, batch):
        model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, suppress_tokens=[EOS], max_new_tokens=batch.longest
        )
    model.train(training)


@torch.no_grad()
def sgd(model: torch.nn.Module) -> None:
    """Return SGD without momentum. Adam would turn rounding errors into steps of full length."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter -= LEARNING_RATE * parameter.grad
            parameter.grad = None


def status(key: str) -> int:
    """Return a figure of /proc/self/status in KiB."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key))


# ---- tables


def compete(contestants: dict[str, Any], batches: Sequence[Batch]) -> str:
    """Let the contestants take turns on each batch.

    Returns:
        The largest difference of a parameter after the third step, and the distance that the parameters had moved.
    """
    first, *others = contestants.values()
    start = [parameter.detach().clone() for parameter in first.parameters]
    said = "-"
    for number, batch in enumerate(batches):
        for contestant in contestants.values():
            contestant.step(batch)
        if number == 2:
            gap = max(distance(first.parameters, other.parameters) for other in others)
            said = f"{gap:.0e} of {distance(first.parameters, start):.0e}"
    return said


def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest difference of an entry."""
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


def tokens(trainer: Trainer) -> tuple[float, float]:
    """Return the mean number of tokens computed and needed in a step."""
    logged = trainer.trainer._metrics["train"]
    return tuple(statistics.mean(logged[f"efficiency/tokens_{name}"]) for name in ("computed", "needed"))


def training_phase(
    size: str, workload: str, steps: int, tuning: str, checkpointing: bool, layouts: dict[str, Any]
) -> Iterator[str]:
    """Yield the rows of the table of training phases."""
    folder = tempfile.mkdtemp()
    config = {"gradient_checkpointing": checkpointing, "loss_type": "grpo", "learning_rate": 1e-6}
    config["router_aux_loss_coef"] = 0.0  # prompts are not shared with a router loss
    contestants = {"trl": Trainer(TRLGRPOTrainer, policy(size, folder), False, tuning == "lora", **config)}
    for name, micro_batching in layouts.items():
        more = {**config, "micro_batching": micro_batching}
        kind = Unshared if name == UNSHARED else Trainer
        contestants[name] = kind(GRPOTrainer, policy(size, folder), False, tuning == "lora", **more)
        if name == ONE_BUCKET:
            contestants[name].trainer._log_probs.launches = math.inf
    gap = compete(contestants, [Batch.draw(workload, seed) for seed in range(steps)])
    stock = contestants["trl"].measured
    for name in layouts:
        ours = contestants[name].measured
        computed, needed = tokens(contestants[name])
        yield (
            f"| {size} | {workload} | {tuning} | {'on' if checkpointing else 'off'} | {name} | {computed:,.0f} | "
            f"{computed / needed:.2f} | {median(stock.training):.2f} | {median(ours.training):.2f} | "
            f"{median(stock.training) / median(ours.training):.2f} | "
            f"{median(ours.memory) / median(stock.memory):.2f} | "
            f"{gap} |"
        )


def whole_step(
    size: str, workload: str, beta: float, steps: int, seed: int, others: Sequence[str] = OTHERS
) -> Iterator[str]:
    """Yield the rows of the table of complete steps: TRL and `others`."""
    folder = tempfile.mkdtemp()
    config = {
        "gradient_checkpointing": False,
        "loss_type": "grpo",
        "beta": beta,
        "use_bias_correction_kl": False,
        "generation_kwargs": {"suppress_tokens": [EOS]},
    }

    def contestant(cls: type[TRLGRPOTrainer], **more: Any) -> Trainer:
        return Trainer(cls, policy(size, folder), True, False, **config, **more)

    known: dict[str, Callable[[], Any]] = {
        "TRL": lambda: contestant(TRLGRPOTrainer),
        "TRL, continuous batching": lambda: contestant(
            TRLGRPOTrainer,
            use_transformers_continuous_batching=True,
            transformers_continuous_batching_config=paged_cache(workload),
        ),
        "from scratch": lambda: FromScratch(policy(size, folder), policy(size, folder), beta),
        "ours, generation off": lambda: contestant(GRPOTrainer, generation="off"),
        "ours": lambda: contestant(GRPOTrainer),
    }
    contestants = {name: known[name]() for name in ("TRL", *others)}
    # A step of (d) warms up: in it, ours verifies the batch and the model.
    gap = compete(contestants, [Batch.draw("d", seed), *(Batch.draw(workload, seed + step) for step in range(steps))])
    stock = contestants["TRL"].measured
    for name, each in contestants.items():
        measured = each.measured
        phases = " | ".join(f"{median(measured.phases[phase]):.2f}" for phase in PHASES)
        yield (
            f"| {size} | {workload} | {beta:g} | {name} | {phases} | {median(measured.whole):.2f} | "
            f"{median(stock.whole) / median(measured.whole):.2f} | "
            f"{median(measured.memory) / median(stock.memory):.2f} | "
            f"{gap} |"
        )


def step_of_turns(turns: int, steps: int, **sizes: int) -> Iterator[str]:
    """Yield the rows of the table of complete steps whose completions have up to `turns` turns."""
    folder = tempfile.mkdtemp()
    shape = {"prompts": PROMPTS, "group": GROUP, "micro_batches": MICRO_BATCHES}
    contestants = {
        name: tool_turns.Contestant(cls, turns, folder, **shape, sizes=sizes)
        for name, cls in {"TRL": TRLGRPOTrainer, "ours": GRPOTrainer}.items()
    }
    spent: dict[str, list[float]] = defaultdict(list)
    same, gap = True, 0.0
    for number in range(steps):
        prompts = tool_turns.conversations(600, PROMPTS, number)
        completions = []
        for name, contestant in contestants.items():
            start = time.process_time()
            completions.append(contestant.step(prompts, number, sgd))
            spent[name].append(time.process_time() - start)
        same &= completions[0] == completions[1]
        gap = max(gap, distance(*(list(contestant.model.parameters()) for contestant in contestants.values())))
    for name, contestant in contestants.items():
        training = [whole - seconds for whole, seconds in zip(spent[name], contestant.seconds, strict=True)]
        yield (
            f"| {turns} | {name} | {median(contestant.seconds):.2f} | {median(training):.2f} | "
            f"{median(spent[name]):.2f} | {median(spent['TRL']) / median(spent[name]):.2f} | "
            f"{'yes' if same else 'NO'} | {gap:.0e} |"
        )


def median(values: Sequence[float]) -> float:
    """Return the median without the first step, which warms up and verifies the model, if there are more."""
    return statistics.median(values[1:] or values)


def table(head: str, rows: Callable[[], Iterator[str]]) -> None:
    """Print a table row by row during the measurement."""
    print(f"\n{head}\n{'|---' * (head.count('|') - 1)}|", flush=True)
    for row in rows():
        print(row, flush=True)


def main() -> None:
    """Run the benchmarks of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list("abc"))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["small"])
    parser.add_argument("--tuning", nargs="+", choices=("full", "lora"), default=["full"])
    parser.add_argument("--checkpointing", nargs="+", choices=("off", "on"), default=["off"])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["auto", UNSHARED, "trimmed"])
    parser.add_argument(
        "--steps",
        type=int,
        default=6,
        help="number of steps of each contestant; without --whole-step the first one warms up",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first step's batch (--whole-step)")
    parser.add_argument("--beta", nargs="+", type=float, default=[0.0], help="weights of the KL term (--whole-step)")
    parser.add_argument(
        "--whole-step",
        action="store_true",
        help="measure complete steps with generation, also of the from-scratch loop",
    )
    parser.add_argument(
        "--others", nargs="+", choices=OTHERS, default=OTHERS, help="contestants beside TRL (--whole-step)"
    )
    parser.add_argument("--turns", nargs="+", type=int, help="measure complete steps of turns with a tool instead")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    versions = ", ".join(f"{name} {version(name)}" for name in ("trl", "transformers", "torch"))
    print(f"{platform.machine()}, one thread, {versions}")
    if asked.turns:
        Turn.same_stream = True  # the random numbers of the stock loop, so that tokens can be compared
        head = (
            "| turns | | generation | training | whole step, CPU s | TRL ÷ | tokens as TRL's | "
            "largest parameter difference |"
        )
        table(head, lambda: (row for turns in asked.turns for row in step_of_turns(turns, asked.steps)))
        return
    if asked.whole_step:
        head = (
            f"| model | workload | beta | | {' | '.join(PHASES)} | whole step, CPU s | TRL ÷ | "
            "memory of generation ÷ TRL | "
            "largest parameter difference after 3 steps |"
        )
        cases = list(product(asked.models, asked.workloads, asked.beta))
        table(head, lambda: (row for case in cases for row in whole_step(*case, asked.steps, asked.seed, asked.others)))
        return
    head = (
        "| model | workload | tuning | checkpointing | layout | tokens | computed ÷ needed | TRL, CPU s | "
        "ours, CPU s | "
        "TRL ÷ ours | memory, ours ÷ TRL | largest parameter difference after 3 steps |"
    )
    wanted = {name: LAYOUTS[name] for name in asked.layouts}
    options = list(product(asked.models, asked.workloads, asked.tuning, asked.checkpointing))
    table(
        head,
        lambda: (
            row
            for size, load, tuning, checkpointing in options
            for row in training_phase(size, load, asked.steps, tuning, checkpointing == "on", wanted)
        ),
    )


if __name__ == "__main__":
    main()
