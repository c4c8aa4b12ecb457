"""Comparison of TRL's trainer on a tiny policy with the oracle, micro-batch by micro-batch.

A `Scenario` lets TRL generate and score one generation batch, and stores the micro-batches of its trainer and the
policy at each optimizer step. `compare` then computes the loss and the gradient of each step under one `Objective` with
TRL, and with the oracle from the token IDs alone.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.llama import modeling_llama
from transformers.utils import logging as transformers_logging
from trl import GRPOTrainer
from trl.kernels import chunked_divergence, chunked_logprob

from tests.mathematics import oracle
from tests.mathematics.oracle import Completion, Geometry, Objective
from tests.support import tiny, trainers

PAD, EOS = 0, 1
VOCABULARY = ["<pad>", "<eos>", *"0123456789"]
PROMPTS = ["1 2", "3 4 5", "6", "7 8 9 0"]
NUM_GENERATIONS = 4
MAX_COMPLETION_LENGTH = 8


@contextlib.contextmanager
def edited(owner: Any, name: str, *edits: tuple[str, str], everywhere: bool = False) -> Iterator[None]:
    """Replace a function of a class or module by a copy with edited source inside the block.

    Each edit is (old text, new text). The old text must occur, and exactly once unless `everywhere` is True.
    """
    original = inspect.getattr_static(owner, name)
    source = _source(getattr(owner, name))
    for old, new in edits:
        count = source.count(old)
        assert count == 1 or (everywhere and count), f"{name} holds {count} times: {old}"
        source = source.replace(old, new)
    module = sys.modules[getattr(owner, "__module__", None) or owner.__name__]
    source = source.replace("super()", f"super({getattr(owner, '__name__', '')}, self)")
    scope: dict[str, Any] = {}
    exec(_compiled(source, name), module.__dict__, scope)
    getattr(scope[name], "__func__", scope[name])._edited_source = source
    setattr(owner, name, scope[name])
    try:
        yield
    finally:
        setattr(owner, name, original)


@cache
def _source(function: Any) -> str:
    return getattr(function, "_edited_source", None) or textwrap.dedent(inspect.getsource(function))


@cache
def _compiled(source: str, name: str) -> CodeType:
    return compile(source, f"<edited {name}>", "exec")


_TO_FLOAT64 = (
    ("torch.float32", "torch.float64"),
    (".float()", ".double()"),
    ("dtype=torch.float)", "dtype=torch.float64)"),
)


def _edits_to_float64(function: Any) -> list[tuple[str, str]]:
    source = _source(function)
    return [(old, new) for old, new in _TO_FLOAT64 if old in source]


@contextlib.contextmanager
def float64_model() -> Iterator[None]:
    """Keep a Llama with float64 weights in float64, although transformers casts norms and rotary angles to float32."""
    with contextlib.ExitStack() as stack:
        for owner in (modeling_llama.LlamaRMSNorm, modeling_llama.LlamaRotaryEmbedding):
            stack.enter_context(edited(owner, "forward", *_edits_to_float64(owner.forward), everywhere=True))
        yield


@contextlib.contextmanager
def float64_trl() -> Iterator[None]:
    """Run TRL in float64. Its fused log-probabilities and its entropy mask otherwise accumulate in float32."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(float64_model())
        kernel = chunked_logprob.ChunkedLogProbFunction
        for owner, name in (
            (chunked_logprob, "_forward_tile"),
            (chunked_logprob, "_backward_tile"),
            (chunked_logprob, "_addmm_fp32"),
            (kernel, "forward"),
            (kernel, "backward"),
            (GRPOTrainer, "get_high_entropy_mask"),
        ):
            edits = _edits_to_float64(getattr(owner, name))
            stack.enter_context(edited(owner, name, *edits, everywhere=True))
        # A rank whose completions have one token counts in the default dtype, and the counts of all ranks are reduced.
        count = ("mask.sum().float()", "mask.sum().double()")
        stack.enter_context(edited(GRPOTrainer, "_compute_loss", count, everywhere=True))
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        stack.callback(torch.set_default_dtype, before)
        yield


@contextlib.contextmanager
def float64_divergence() -> Iterator[None]:
    """Run TRL's chunked divergence in float64. Use it inside `float64_trl`, which edits what it imports."""
    kernel = chunked_divergence.ChunkedDivergenceFunction
    with contextlib.ExitStack() as stack:
        for owner, name in (
            (kernel, "forward"),
            (kernel, "backward"),
            (chunked_divergence, "_project"),
            (chunked_divergence, "_addmm_fp32"),
        ):
            edits = _edits_to_float64(getattr(owner, name))
            stack.enter_context(edited(owner, name, *edits, everywhere=True))
        yield


def build_policy(folder: Path, config_class: type[PreTrainedConfig] = LlamaConfig, **config: Any) -> None:
    """Save a model of one layer whose next-token distributions are far from uniform."""
    sizes = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "initializer_range": 0.4,
    }
    tiny.policy(config_class, **{**sizes, **config}).save_pretrained(folder)


def tiny_checkpoint(folder: Path) -> Path:
    """Save the tiny policy and its tokenizer, and in `experts` a mixture of experts, and return the folder."""
    build_policy(folder)
    build_policy(
        folder / "experts", MixtralConfig, num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=0.5
    )
    for home in (folder, folder / "experts"):
        tiny.word_tokenizer(VOCABULARY).save_pretrained(home)
    return folder


def load_policy(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Return the tiny policy in the given dtype."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def moved(model: torch.nn.Module, seed: int, size: float = 0.05) -> dict[str, Tensor]:
    """Return a state dict with Gaussian noise added, in place of an optimizer step or a reference."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + size * torch.randn(value.shape, generator=generator, dtype=torch.float64).to(value.dtype)
        for name, value in model.state_dict().items()
    }


def length_reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Return a binary fraction that depends on the tokens, which float32 represents exactly."""
    return [(sum(ids) % 8) / 8 for ids in completion_ids]


def parity_reward(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
    """Return 1 for an odd number of tokens, 0 for an even one, and None if the first token is the last one."""
    return [None if len(ids) == 1 else float(len(ids) % 2) for ids in completion_ids]


REWARDS = [length_reward, parity_reward]
WEIGHTS = [1.0, 0.5]


def make_trainer(
    checkpoint: Path,
    dtype: torch.dtype,
    rewards: Sequence[Any] = tuple(REWARDS),
    trainer: type = GRPOTrainer,
    **config: Any,
) -> GRPOTrainer:
    """Return TRL's trainer on the tiny policy, on CPU, constructed as a user would."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_generations": NUM_GENERATIONS,
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "generation_kwargs": {"suppress_tokens": [PAD]},
        "reward_weights": WEIGHTS[: len(rewards)],
        **config,
    }
    transformers_logging.disable_progress_bar()
    return trainers.make_trainer(
        trainer,
        load_policy(checkpoint, dtype),
        tempfile.gettempdir(),
        rewards=list(rewards),
        rows=Dataset.from_dict({"prompt": PROMPTS}),
        tokenizer=AutoTokenizer.from_pretrained(checkpoint),
        **settings,
    )


@dataclass
class Step:
    """An optimizer step: the policy's weights and the micro-batches of the accumulation window."""

    policy: dict[str, Tensor]
    inputs: list[dict[str, Tensor]]


class Scenario:
    """The optimizer steps of one generation batch, prepared by TRL's own generation and scoring.

    The policy moves between steps by a fixed amount of noise, large enough for ratios on both sides of the clip.
    """

    def __init__(
        self,
        checkpoint: Path,
        geometry: Geometry,
        dtype: torch.dtype,
        seed: int = 39,
        moves: float = 0.08,
        **config: Any,
    ) -> None:
        self.checkpoint, self.geometry, self.dtype = checkpoint, geometry, dtype
        self.config = {
            "gradient_accumulation_steps": geometry.accumulation,
            "steps_per_generation": geometry.steps_per_generation,
            "num_iterations": geometry.iterations,
            "per_device_train_batch_size": 8 // geometry.steps_per_generation,
            "beta": 0.04,
            **config,
        }
        self.temperature = self.config.get("temperature", 1.0)
        trainer = make_trainer(checkpoint, dtype, **self.config)
        self.generation_policy = copy.deepcopy(trainer.model.state_dict())
        self.reference = moved(trainer.model, seed=99)
        trainer.ref_model.load_state_dict(self.reference)
        self.steps = self._prepare(trainer, seed, moves)
        self.metrics = {name: list(values) for name, values in trainer._metrics["train"].items()}
        self._rows: dict[int, tuple[LlamaForCausalLM, list[list[Completion]]]] = {}
        self.pairs = self._generated()
        self.advantages = self._advantages()

    def _prepare(self, trainer: GRPOTrainer, seed: int, moves: float) -> list[Step]:
        torch.manual_seed(seed)
        trainer.model.train()
        rows = [{"prompt": prompt} for prompt in PROMPTS[: 8 // NUM_GENERATIONS] for _ in range(NUM_GENERATIONS)]
        micro_batches = self.geometry.steps_per_generation * self.geometry.iterations
        windows = max(micro_batches // self.geometry.accumulation, 1)
        steps = []
        for window in range(windows):
            inputs = []
            for _ in range(self.geometry.accumulation):
                inputs.append(trainer._prepare_inputs(rows))
                trainer._step += 1
            steps.append(Step(copy.deepcopy(trainer.model.state_dict()), inputs))
            trainer.model.load_state_dict(moved(trainer.model, seed=window + 1, size=moves))
        return steps

    def trainer(self, objective: Objective, **config: Any) -> GRPOTrainer:
        """Return TRL's trainer as a recipe with this objective would build it, ready for `compute_loss`."""
        keys = {key: value for key, value in asdict(objective).items() if key != "max_completion_length"}
        trainer = make_trainer(self.checkpoint, self.dtype, **{**self.config, **keys, **config})
        if trainer.ref_model is not None:
            trainer.ref_model.load_state_dict(self.reference)
        trainer.current_gradient_accumulation_steps = self.geometry.accumulation
        trainer.model.train()
        return trainer

    # the oracle's side

    def model(self, state: dict[str, Tensor]) -> LlamaForCausalLM:
        """Return a float64 model with the given weights that TRL has not modified."""
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(self.checkpoint)).double()
        model.load_state_dict({name: value.double() for name, value in state.items()})
        return model

    def rows(self, step: int) -> tuple[LlamaForCausalLM, list[list[Completion]]]:
        """Return the policy of a step and the completions of each micro-batch, from token IDs, rewards and weights.

        They do not depend on the objective, so they are computed once and their graph is kept.
        """
        if step not in self._rows:
            policy = self.model(self.steps[step].policy)
            with float64_model():
                rows = [
                    [self._completion(policy, prompt, tokens) for prompt, tokens in token_lists(inputs)]
                    for inputs in self.steps[step].inputs
                ]
            self._rows[step] = policy, rows
        return self._rows[step]

    def _completion(self, policy: LlamaForCausalLM, prompt: list[int], tokens: list[int]) -> Completion:
        log_probs, entropies = oracle.token_statistics(policy, prompt, tokens, self.temperature)
        row = Completion(prompt, tokens, self.advantages[(*prompt, -1, *tokens)], log_probs, entropies)
        row.reference = self._log_probs(self._reference_model, prompt, tokens)
        if self.geometry.needs_old_log_probs:
            row.old = self._log_probs(self._old_model, prompt, tokens)
        return row

    @cached_property
    def _reference_model(self) -> LlamaForCausalLM:
        return self.model(self.reference)

    @cached_property
    def _old_model(self) -> LlamaForCausalLM:
        return self.model(self.generation_policy)

    def _log_probs(self, model: LlamaForCausalLM, prompt: list[int], tokens: list[int]) -> Tensor:
        return oracle.token_statistics(model, prompt, tokens, self.temperature)[0].detach()

    def _generated(self) -> list[tuple[list[int], list[int]]]:
        """Return the (prompt, completion) tokens of the generation batch, with each prompt's completions together."""
        batches = [inputs for step in self.steps for inputs in step.inputs][: self.geometry.steps_per_generation]
        return sorted(pair for inputs in batches for pair in token_lists(inputs))

    def rewards(self) -> list[list[float | None]]:
        """Return the rewards of each generated row, (N, number of rewards)."""
        completions = [tokens for _, tokens in self.pairs]
        return [list(row) for row in zip(*(reward(completion_ids=completions) for reward in REWARDS), strict=True)]

    def _advantages(self) -> dict[tuple[int, ...], float]:
        """Return the oracle's advantage of each row of the generation batch, by its tokens."""
        values = oracle.advantages(self.rewards(), WEIGHTS, NUM_GENERATIONS)
        return {(*prompt, -1, *tokens): value for (prompt, tokens), value in zip(self.pairs, values, strict=True)}

    @property
    def generation_tokens(self) -> int:
        """Number of completion tokens in the generation batch."""
        return sum(len(tokens) for _, tokens in self.pairs)


def token_lists(inputs: dict[str, Tensor]) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, completion) of each row without padding. The completion ends with its first EOS."""
    result = []
    for prompt, completion in zip(inputs["prompt_ids"].tolist(), inputs["completion_ids"].tolist(), strict=True):
        tokens = oracle.until_end(completion, (EOS,))
        result.append(([t for t in prompt if t != PAD], [t for t in tokens if t != PAD]))
    return result


@dataclass
class Difference:
    """Largest differences found.

    Those of a loss or a metric are relative where its value exceeds 1. Those of a gradient are relative to the largest
    entry of its tensor.
    """

    loss: float = 0.0
    gradient: float = 0.0
    metric: float = 0.0

    def widen(self, other: Difference) -> None:
        """Keep the larger difference of each kind."""
        for name, value in asdict(other).items():
            # `max` could drop a NaN, so a NaN counts as infinite.
            setattr(self, name, max(getattr(self, name), value if value == value else float("inf")))


def relative_difference(ours: Tensor, theirs: Tensor) -> float:
    """Return max|difference| / max|gradient| of one parameter tensor, or 0 if both are zero."""
    scale = ours.abs().max().item()
    gap = (ours - theirs.double()).abs().max().item()
    return gap / scale if scale > 0 else gap


def compare(
    scenario: Scenario,
    objective: Objective,
    steps: Sequence[int] | None = None,
    rows: Callable[[list[Completion]], list[Completion]] = list,
    inputs: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
    **config: Any,
) -> Difference:
    """Compare TRL with the oracle on the steps of a scenario: loss of each micro-batch, gradient of each step, metrics.

    `rows` changes the oracle's rows and `inputs` TRL's inputs in the same way. `config` holds further `GRPOConfig`
    keys.
    """
    trainer = scenario.trainer(objective, **config)
    result = Difference()
    for index in range(len(scenario.steps)) if steps is None else steps:
        trainer.model.load_state_dict(scenario.steps[index].policy)
        losses = trl_losses(trainer, [inputs(batch) for batch in scenario.steps[index].inputs])
        policy, micro_batches = scenario.rows(index)
        micro_batches = [rows(micro_batch) for micro_batch in micro_batches]
        tokens = sum(row.length for row in rows(_first_generation(scenario)))
        expected = [oracle.micro_batch_loss(batch, objective, scenario.geometry, tokens) for batch in micro_batches]
        result.widen(difference(policy, expected, trainer.model, losses))
        for position, batch in enumerate(micro_batches):
            for name, value in oracle.loss_metrics(batch, objective).items():
                gap = abs(trainer._metrics["train"][name][position] - value)
                result.widen(Difference(metric=gap / max(1.0, abs(value))))
    return result


def trl_losses(trainer: GRPOTrainer, micro_batches: Sequence[dict[str, Tensor]]) -> list[float]:
    """Return TRL's loss of each micro-batch of an optimizer step, and accumulate its gradient in the model."""
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()
    losses = []
    for inputs in micro_batches:
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        losses.append(loss.item())
    return losses


def difference(
    policy: torch.nn.Module, expected: Sequence[Tensor], theirs: torch.nn.Module, losses: Sequence[float]
) -> Difference:
    """Compare the oracle's losses and their summed gradient with TRL's losses and the gradient in `.grad`."""
    result = Difference()
    for ours, loss in zip(expected, losses, strict=True):
        result.widen(Difference(loss=abs(ours.item() - loss) / max(1.0, abs(loss))))
    names, parameters = zip(*policy.named_parameters(), strict=True)
    gradients = torch.autograd.grad(sum(expected), parameters, retain_graph=True, allow_unused=True)
    for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
        ours = torch.zeros_like(parameter) if gradient is None else gradient
        result.widen(Difference(gradient=relative_difference(ours, theirs.get_parameter(name).grad)))
    return result


def _first_generation(scenario: Scenario) -> list[Completion]:
    batches = (batch for index in range(len(scenario.steps)) for batch in scenario.rows(index)[1])
    return [row for batch in islice(batches, scenario.geometry.steps_per_generation) for row in batch]
