"""The only subclass of TRL's `GRPOTrainer`: the seams at which ours differs from TRL 1.16."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from torch.utils.data import Sampler
from trl import GRPOConfig
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes.generation.generator_check import GenerationCheck
from grpo_recipes.generation.rows import PerToken, Rows
from grpo_recipes.generation.stop_strings import StopStrings
from grpo_recipes.process.messages import tied_weights
from grpo_recipes.recipe.losses import LOSS_TYPES
from grpo_recipes.recipe.specs import (
    AdvantageRule,
    GenerationMode,
    KLEstimator,
    MicroBatching,
    ReferenceSpec,
    SamplingSpec,
    typed,
)
from grpo_recipes.recipe.trl_keys import check_advantages, check_generation
from grpo_recipes.training import micro_batches as microbatch
from grpo_recipes.training import offline
from grpo_recipes.training.adamw_bf16 import UpdateSample
from grpo_recipes.training.adapters import with_its_base
from grpo_recipes.training.advantages import advantages as advantages_by_rule
from grpo_recipes.training.callbacks import CompactCompletions
from grpo_recipes.training.continuous_batching import ContinuousBatching, refuse_cast
from grpo_recipes.training.data_order import EpochSampler, SetSamplerEpoch
from grpo_recipes.training.eval_completions import separate_eval_completions
from grpo_recipes.training.full_kl import FullKL, Projection, check_full_kl, last_hidden_states
from grpo_recipes.training.generation import Generation
from grpo_recipes.training.hidden_arguments import hide_secrets
from grpo_recipes.training.identity import identity_of, starting_weights
from grpo_recipes.training.log_probs import LogProbs
from grpo_recipes.training.packing import Layout
from grpo_recipes.training.prompt_sampler import PromptSampling
from grpo_recipes.training.reference import reference_in, set_reference, without_trl_reference
from grpo_recipes.training.saving import CompleteCheckpoints
from grpo_recipes.training.stop_strings import corrected, take_over_mask
from grpo_recipes.training.trl_patches import neutral_engine, sampling_by_seed, send_settings

logger = logging.getLogger(__name__)

# The smallest positive number. TRL computes and logs its sampled KL only if `beta` is not 0, and adds beta * KL to the loss
# in the same function. With this beta the metric `kl` stays and the product underflows to 0. Setting `beta` to 0 would drop
# the metric. Subtracting beta * KL from TRL's loss afterwards would leave rounding errors in the gradient.
_LOGGED_ONLY = math.ulp(0.0)


class GRPOTrainer(TRLGRPOTrainer):
    """TRL's `GRPOTrainer`: the same arguments, methods, metrics and files, so that a TRL script changes one import.

    Args:
        reference: what the KL term ties the policy to, as `grpo_recipes.training.reference.set_reference` takes it.
        kl_estimator: how `beta` weighs the distance from the reference. "sampled" is TRL's estimate from the sampled
            tokens. "full" is KL(policy || reference) over the vocabulary at each completion token, logged as `kl/full`.
        micro_batching: "auto", "off", or a mapping of `layout` and `skip_zero_advantage`: how the training phase avoids
            padding, repeated prompts and zero-advantage rows. See docs/efficiency.md.
        generation: "auto" or "off": whether transformers' `generate` runs each prompt of a batch once and drops finished
            rows, where the tokens stay what they are. Concerns neither vLLM nor continuous batching.
        sampling: "informative" or a mapping: leaves out prompts whose last groups had no variance. See docs/sampling.md.
        advantages: "max_rl" or None: rule that computes the advantages in place of TRL. See docs/algorithms.md.
        generation_check: whether completions are compared with the policy, and a run is stopped where they are not its own.
            See docs/generation-check.md.
        optimizer_cls_and_kwargs: transformers' own argument, which TRL's trainer leaves out: an optimiser by its class.
    """

    beta: float
    log_completions: bool

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *rest: Any,
        reference: str | Mapping[str, Any] | ReferenceSpec | None = None,
        kl_estimator: KLEstimator = "sampled",
        micro_batching: str | Mapping[str, Any] | MicroBatching = "auto",
        generation: GenerationMode = "auto",
        sampling: str | Mapping[str, Any] | SamplingSpec | None = None,
        advantages: AdvantageRule | None = None,
        generation_check: bool = True,
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        self.micro_batching = MicroBatching.parse(micro_batching)
        typed("kl_estimator", kl_estimator, KLEstimator)
        generation = typed("generation", generation, GenerationMode)
        typed("advantages", advantages, AdvantageRule | None)
        self._advantage_rule = advantages
        if args is not None:
            check_generation(args)
            check_advantages(advantages, args)
            hide_secrets(args)
        # TRL builds no reference of its own.
        with without_trl_reference(args), sampling_by_seed(args), neutral_engine():
            super().__init__(with_its_base(model, args), reward_funcs, args, *rest, **kwargs)
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        if not self.is_deepspeed_enabled:  # its optimiser holds float32 weights of its own
            self.add_callback(UpdateSample(self._metrics["train"]))
        self.reference_sentence = set_reference(self, reference)
        self._efficiency: microbatch.Efficiency | None = None
        self._full_kl = None
        if kl_estimator == "full":
            check_full_kl(self.beta, self.loss_type, images=self._is_vlm, fsdp=self.is_fsdp_enabled)
            self._full_kl = FullKL(_causal_lm(self.model), self.temperature)
        self._exact = microbatch.exactness(
            self.loss_type,
            self.beta,
            entropy_bonus=self._entropy_bonus_enabled,
            entropy_quantile=self.top_entropy_quantile,
            router_loss=self.aux_loss_enabled,
        )
        untouched = "the full-vocabulary KL reads the hidden states of TRL's rows" if self._full_kl is not None else ""
        asked, plain = microbatch.asked_layout(self.micro_batching), self._plain_log_probs
        self._log_probs = LogProbs(self.accelerator, self.args, plain, asked, self.aux_loss_enabled, untouched)
        self._stop = StopStrings.of(self.args.generation_kwargs, self._tokenizer)
        self._masks_truncated = self._stop is not None and take_over_mask(self)
        self._generation_check = GenerationCheck(self, self._plain_log_probs, generation_check)
        self._generation = Generation(self, self._generation_check, self._stop, generation)
        if self.use_vllm:
            send_settings(self, self._generation.published)
        if self.use_transformers_continuous_batching:
            refuse_cast(self.model, self.args)
            self._continuous_batching = ContinuousBatching(self.continuous_batching_config)
        self._prompts = PromptSampling.added_to(self, sampling)
        self._sources = starting_weights(model, self.model, reference)
        self.checkpoints = CompleteCheckpoints(self, lambda: identity_of(self, self._sources))
        self.add_callback(self.checkpoints)
        self.add_callback(CompactCompletions(self))

    # Seam 1: the buffer of a generation batch, after TRL has generated, scored, shuffled and split it.

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        buffer = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        off = microbatch.asked_layout(self.micro_batching) is Layout.PADDED
        # A new buffer was generated just now: evaluation, and a generation that serves again, leave the old one.
        if not off and self._buffered_inputs is not buffer:
            self._regroup(self._buffered_inputs)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return offline.with_recorded_log_probs(inputs, self.rollout_func)

    def _generate_and_score_completions(self, inputs: list[Any]) -> dict[str, Any]:
        """Generate and score the prompts that are drawn, with the advantages of the trainer's rule."""
        if self._prompts is None or not self.model.training:
            return self._generate_with_advantages(inputs)
        return self._prompts.generate(inputs, self._generate_with_advantages)

    def _generate_with_advantages(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Run TRL's generation and scoring, then replace its advantages, in the batch and in the log, by the rule's."""
        output = super()._generate_and_score_completions(inputs)
        if self._advantage_rule is None:
            return output
        group = self.num_generations if self.model.training else self.num_generations_eval
        values = advantages_by_rule(self._advantage_rule, self._gathered_rewards, self.reward_weights, group)
        logged = self._logs["advantages"]
        for _ in range(min(len(logged), len(values))):  # TRL's log keeps the last generation batch only
            logged.pop()
        logged.extend(values.tolist())
        first = self.accelerator.process_index * len(inputs)
        output["advantages"] = values[first : first + len(inputs)]
        return output

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Keep TRL's gathered rewards, (completions of all ranks, functions), for the rule for advantages."""
        self._gathered_rewards = super()._calculate_rewards(*args, **kwargs)
        return self._gathered_rewards

    def _regroup(self, padded: list[dict[str, Any]]) -> None:
        """Replace TRL's micro-batches with ours, and log what that saves over all ranks."""
        window = microbatch.window_size(self.args.steps_per_generation, self.args.gradient_accumulation_steps)
        first = microbatch.as_rows(padded[0])
        layout = self._log_probs.layout(self.model, first, len(first.input_ids))
        skip = self.micro_batching.skip_zero_advantage
        ours = microbatch.regroup(padded, window, layout, self._exact, skip)
        tokens = [self._log_probs.model_call(self.model, microbatch.as_rows(batch), layout).tokens for batch in ours]
        counts = microbatch.count(padded, ours, tokens, window, layout)
        efficiency = microbatch.mark_empty(ours, self.accelerator.reduce(counts.to(self.accelerator.device)))
        for name, value in efficiency.metrics().items():
            self._metrics["train"][name].append(value)
        self._efficiency = efficiency if self._efficiency is None else self._efficiency + efficiency
        self._buffered_inputs = ours

    # Seam 2: log-probabilities, for the loss and for the old and reference policies.

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **multimodal: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if compute_aux_loss or any(value is not None for value in multimodal.values()):
            inputs = (model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss)
            return super()._get_per_token_logps_and_entropies(*inputs, **multimodal)
        rows = Rows(input_ids, attention_mask, logits_to_keep)
        return *self._log_probs(model, rows, batch_size, compute_entropy), None

    def _plain_log_probs(self, model: nn.Module, rows: Rows, compute_entropy: bool) -> PerToken:
        """TRL's own computation, in one model call."""
        log_probs, entropies, _ = super()._get_per_token_logps_and_entropies(
            model, rows.input_ids, rows.attention_mask, rows.logits_to_keep, compute_entropy=compute_entropy
        )
        return log_probs, entropies

    # Seam 3: a term beside TRL's loss.

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """TRL's loss; with `kl_estimator` "full", the KL over the vocabulary takes the place of its sampled KL term."""
        with microbatch.empty_unlogged(inputs, self._metrics["train"]):
            if self._full_kl is None:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            mask = microbatch.loss_mask(inputs)
            with self._full_kl.against(self._reference_projection(inputs), mask), self._kl_logged_only():
                loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            kl = self._full_kl.tokens
            assert kl is not None, "TRL's loss runs the policy's forward"
            self._log_full_kl(kl.detach(), mask)
            return loss + self.beta * (kl * self._token_weights(inputs, mask)).sum()

    @contextmanager
    def _kl_logged_only(self) -> Iterator[None]:
        """Let TRL compute and log its sampled KL without adding it to the loss."""
        beta, self.beta = self.beta, _LOGGED_ONLY
        try:
            yield
        finally:
            self.beta = beta

    def _reference_projection(self, inputs: dict[str, Any]) -> Projection:
        """The reference's hidden states at the completion tokens, and its head, without a graph."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        with reference_in(self) as model, torch.no_grad():
            causal_lm = _causal_lm(self._log_probs.bare(model))
            with last_hidden_states(causal_lm) as states, self.accelerator.autocast():
                model(input_ids=ids, attention_mask=mask, logits_to_keep=1, use_cache=False)
            return Projection.of(causal_lm, states[0], inputs["completion_ids"].shape[1])

    def _token_weights(self, inputs: dict[str, Any], mask: Tensor) -> Tensor:
        """The weight of each token's loss in the loss of this micro-batch, (B, T)."""
        accumulation = self.current_gradient_accumulation_steps if self.model.training else 1
        tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        if self.model.training:
            tokens = tokens * accumulation / self.args.steps_per_generation
        return LOSS_TYPES[self.loss_type].token_weights(mask, accumulation, self.max_completion_length, tokens)

    def _log_full_kl(self, kl: Tensor, mask: Tensor) -> None:
        """Log `kl/full`: the mean over the completion tokens of all ranks."""
        total, count = self.accelerator.reduce(torch.stack([kl.sum(), mask.sum().to(kl.dtype)])).tolist()
        self._metrics["train" if self.model.training else "eval"]["kl/full"].append(total / max(count, 1.0))

    # Seam 6: generation, in a context around TRL's own.

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, **more: Any
    ) -> tuple[list[list[int]], Any]:
        turn = partial(super()._generate_single_turn, prompt_ids, images, multimodal_fields, num_generations, **more)
        log_probs = None
        if self.use_vllm:
            completion_ids, log_probs = turn()
            difference = self._generation_check.of_vllm(prompt_ids, completion_ids, log_probs)
        elif self.use_transformers_continuous_batching:
            bare = self._log_probs.bare(self.model)
            published = self._generation.published.aside(bare, self.generation_config)
            with published, self._continuous_batching.around(bare, prompt_ids, self.max_completion_length):
                completion_ids, _ = turn()
            difference = self._generation_check(prompt_ids, completion_ids, None)
        else:
            completion_ids, difference = self._generation(lambda: turn()[0], self.model, prompt_ids)
        if difference is not None:
            metrics = self._metrics["train" if self.model.training else "eval"]
            for name, value in zip(("mean", "max"), difference, strict=True):
                metrics[f"sampling/sampling_logp_difference/{name}"].append(value)
        return completion_ids, log_probs

    def _generate(self, prompts: list[Any]) -> Any:
        """TRL's completions, its metrics and mask of truncated ones corrected for those that end with a stop string."""
        output = super()._generate(prompts)
        return output if self._stop is None else corrected(self, output, self._stop, self._masks_truncated)

    # Public methods: which checkpoint is resumed, and what TRL writes of the completions.

    def train(self, resume_from_checkpoint: str | bool | None = None, *rest: Any, **kwargs: Any) -> Any:
        """TRL's training, resumed only from a checkpoint that is whole; of True, from the newest such one."""
        with tied_weights(self.model):
            return super().train(self.checkpoints.resumption(resume_from_checkpoint), *rest, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's log, and one line on the tokens that all generation batches since the last one took.

        An empty table of completions is not written: a run resumed at its end would lose its last table to it.
        """
        if self._efficiency is not None and self.model.training:
            if self.accelerator.is_main_process:
                logger.info("step %d: %s", self.state.global_step, self._efficiency)
            self._efficiency = None
        asked, self.log_completions = self.log_completions, self.log_completions and bool(self._logs["prompt"])
        self.checkpoints.correct_rates(logs)
        super().log(logs, start_time)
        self.log_completions = asked

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """TRL's evaluation, with its completions in a file of their own."""
        with separate_eval_completions(self, eval_dataset, metric_key_prefix):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    # Seam 5: the order of the prompts.

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        """TRL's order of prompts, also after a resume past the first epoch; with `sampling` some are marked to be left out."""
        plain = offline.with_baseline(super()._get_train_sampler(dataset), self.rollout_func)
        sampler = EpochSampler.like(plain) if self._prompts is None else self._prompts.sampler_like(plain)
        self.remove_callback(SetSamplerEpoch)
        self.add_callback(SetSamplerEpoch(sampler))
        return sampler


def _causal_lm(model: Any) -> Any:
    """The causal language model inside a PEFT model."""
    return model.get_base_model() if is_peft_model(model) else model
