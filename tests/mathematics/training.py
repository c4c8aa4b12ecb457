"""Comparison of TRL's own training loop with the oracle, on one process or several.

`Recorder` is TRL's trainer with a record of its inputs and results. `compare_training` runs `train()` and compares the
loss of each micro-batch on each rank and the gradient of each optimizer step with the oracle.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import GRPOTrainer

import grpo_recipes
from tests.mathematics import oracle
from tests.mathematics.harness import (
    NUM_GENERATIONS,
    REWARDS,
    WEIGHTS,
    Difference,
    difference,
    float64_model,
    make_trainer,
    moved,
    token_lists,
)
from tests.mathematics.oracle import Completion, Geometry, Objective

LEARNING_RATE = 0.5
Tokens = tuple[list[int], list[int]]


@dataclass
class Step:
    """An optimizer step of one rank: weights before it, rows and loss of each micro-batch, gradient after DDP."""

    policy: dict[str, Tensor]
    micro_batches: list[list[Tokens]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradient: dict[str, Tensor] = field(default_factory=dict)
    generation: int = -1


class _GradientCallback(TrainerCallback):
    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.recorder.close_step()


class _Recording:
    """Mixin for a trainer class that records each generation batch and each optimizer step of this rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generations: list[tuple[dict[str, Tensor], list[Tokens]]] = []
        self.steps: list[Step] = []
        self._open = False
        self.add_callback(_GradientCallback(self))

    def _weights(self) -> dict[str, Tensor]:
        return copy.deepcopy(self.accelerator.unwrap_model(self.model).state_dict())

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        self.generations.append((self._weights(), token_lists(output)))
        return output

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute TRL's loss, and record its inputs and value."""
        if not self._open:
            self.steps.append(Step(self._weights(), generation=len(self.generations) - 1))
            self._open = True
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.steps[-1].micro_batches.append(token_lists(inputs))
        self.steps[-1].losses.append(loss.item())
        return loss

    def close_step(self) -> None:
        """Record the gradient that the optimizer is about to use."""
        model = self.accelerator.unwrap_model(self.model)
        self.steps[-1].gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
        self._open = False


class Recorder(_Recording, GRPOTrainer):
    """TRL's trainer with a record of its steps."""


class FullKLRecorder(_Recording, grpo_recipes.GRPOTrainer):
    """Our trainer with the KL over the full vocabulary and a record of its steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, kl_estimator="full", **kwargs)


def train(
    checkpoint: Path,
    objective: Objective,
    geometry: Geometry,
    rows_per_micro_batch: int,
    steps: int,
    dtype: torch.dtype = torch.float64,
    **config: Any,
) -> Recorder:
    """Train with SGD for some optimizer steps, with a reference that differs a little from the initial policy."""
    keys = {key: value for key, value in asdict(objective).items() if key != "max_completion_length"}
    trainer = make_trainer(
        checkpoint,
        dtype,
        **{
            "trainer": Recorder,
            **keys,
            "gradient_accumulation_steps": geometry.accumulation,
            "steps_per_generation": geometry.steps_per_generation,
            "num_iterations": geometry.iterations,
            "per_device_train_batch_size": rows_per_micro_batch,
            "max_steps": steps,
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "optim": "sgd",
            "max_grad_norm": 0.0,
            "logging_steps": 1,
            **config,
        },
    )
    assert trainer.accelerator.num_processes == geometry.ranks
    if trainer.ref_model is not None:
        trainer.ref_model.load_state_dict(moved(trainer.ref_model, seed=99))
    trainer.train()
    return trainer


def compare_training(
    checkpoint: Path,
    objective: Objective,
    geometry: Geometry,
    rows_per_micro_batch: int,
    steps: int,
    dtype: torch.dtype = torch.float64,
    full_kl: bool = False,
) -> Difference:
    """Return the largest differences between a training run on all ranks and the oracle."""
    recorder = FullKLRecorder if full_kl else Recorder
    trainer = train(checkpoint, objective, geometry, rows_per_micro_batch, steps, dtype, trainer=recorder)
    reference = None if trainer.ref_model is None else trainer.accelerator.unwrap_model(trainer.ref_model).state_dict()
    by_rank = gather_object([(trainer.generations, trainer.steps)])
    result = Difference()
    for index, step in enumerate(trainer.steps):
        weights, _ = trainer.generations[step.generation]
        generated = sorted(row for generations, _ in by_rank for row in generations[step.generation][1])
        view = _View(checkpoint, objective, geometry, generated, step.policy, weights, reference, full_kl)
        expected = view.losses([steps[index].micro_batches for _, steps in by_rank])
        for rank, (_, steps_of_rank) in enumerate(by_rank):
            for ours, theirs in zip(expected[rank], steps_of_rank[index].losses, strict=True):
                result.widen(Difference(loss=abs(ours.item() - theirs) / max(1.0, abs(theirs))))
        mean_over_ranks = sum(sum(losses) for losses in expected) / geometry.ranks
        result.widen(difference(view.policy, [mean_over_ranks], _WithGradient(step.gradient), [mean_over_ranks.item()]))
    return result


class _WithGradient:
    """Recorded gradients with the interface of a model."""

    def __init__(self, gradient: dict[str, Tensor]) -> None:
        self._gradient = gradient

    def get_parameter(self, name: str) -> Tensor:
        """Return a tensor whose `.grad` is the recorded gradient."""
        holder = torch.zeros_like(self._gradient[name])
        holder.grad = self._gradient[name]
        return holder


class _View:
    """The oracle's computation of one optimizer step."""

    def __init__(
        self,
        checkpoint: Path,
        objective: Objective,
        geometry: Geometry,
        generated: Sequence[Tokens],
        policy: dict[str, Tensor],
        generation_policy: dict[str, Tensor],
        reference: dict[str, Tensor] | None,
        full_kl: bool,
    ) -> None:
        self.objective, self.geometry, self.full_kl = objective, geometry, full_kl
        self.policy = load(checkpoint, policy)
        self.old = load(checkpoint, generation_policy) if geometry.needs_old_log_probs else None
        self.reference = None if reference is None else load(checkpoint, reference)
        self.generation_tokens = sum(len(tokens) for _, tokens in generated)
        rewards = [reward(completion_ids=[tokens for _, tokens in generated]) for reward in REWARDS]
        values = oracle.advantages(list(zip(*rewards, strict=True)), WEIGHTS, NUM_GENERATIONS)
        self.advantages = {(*p, -1, *t): value for (p, t), value in zip(generated, values, strict=True)}

    def losses(self, micro_batches: Sequence[Sequence[Sequence[Tokens]]]) -> list[list[Tensor]]:
        """Return the loss of each rank's micro-batches. `micro_batches` and the result are lists by rank."""
        with float64_model():
            ranks = [[[self._completion(*row) for row in batch] for batch in rank] for rank in micro_batches]
        return [[self._loss(ranks, rank, index) for index in range(len(ranks[rank]))] for rank in range(len(ranks))]

    def _loss(self, ranks: Sequence[Sequence[list[Completion]]], rank: int, index: int) -> Tensor:
        beside = [row for other, batches in enumerate(ranks) if other != rank for row in batches[index]]
        batch = ranks[rank][index]
        return oracle.micro_batch_loss(batch, self.objective, self.geometry, self.generation_tokens, beside)

    def _completion(self, prompt: list[int], tokens: list[int]) -> Completion:
        scored = [
            None if model is None else oracle.token_statistics(model, prompt, tokens, self.objective.temperature)
            for model in (self.policy, self.old, self.reference)
        ]
        row = Completion(prompt, tokens, self.advantages[(*prompt, -1, *tokens)], *scored[0])
        row.old, row.reference = (None if s is None else s[0].detach() for s in scored[1:])
        if self.full_kl:
            row.full_kl = oracle.completion_kl(self.policy, self.reference, prompt, tokens, self.objective.temperature)
        return row


def load(checkpoint: Path, state: dict[str, Tensor]) -> LlamaForCausalLM:
    """Return a float64 model with the given weights that TRL has not modified."""
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(checkpoint)).double()
    model.load_state_dict({name: value.double() for name, value in state.items()})
    return model
