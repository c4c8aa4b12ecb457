"""The only subclass of TRL's `GRPOTrainer`: every override of TRL 1.16, and nothing else.

Replacements inside TRL are in `trl_patches.py`. What an override calls is in the module that it names.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl import GRPOConfig
from trl.trainer.utils import RepeatSampler

from grpo_recipes.checks.tools import check_unique
from grpo_recipes.data.tables import check_no_image_columns
from grpo_recipes.generation.generator_check import GenerationCheck
from grpo_recipes.generation.loading import complete_weights
from grpo_recipes.generation.models import base_model, keep_4bit_layout
from grpo_recipes.generation.rows import PerToken, Rows
from grpo_recipes.generation.sampling import random_state_kept
from grpo_recipes.generation.stop_strings import StopStrings
from grpo_recipes.process.faults import no_exit
from grpo_recipes.process.messages import log_progress, tied_weights
from grpo_recipes.recipe import specs
from grpo_recipes.recipe.losses import LOSS_TYPES
from grpo_recipes.recipe.trl_keys import check_advantages, check_generation, check_turn_ends
from grpo_recipes.training import micro_batches, offline, step_plan, trl_patches
from grpo_recipes.training.adamw_bf16 import UpdateSample
from grpo_recipes.training.adapters import adapter_dtype_kept, with_its_base
from grpo_recipes.training.advantages import compute_advantages
from grpo_recipes.training.callbacks import DropLaterCompletions, identity_of, starting_weights
from grpo_recipes.training.data_order import EpochSampler, SetSamplerEpoch
from grpo_recipes.training.finite import FiniteSteps
from grpo_recipes.training.full_kl import READS_PADDED_ROWS, FullKL, Projection, check_full_kl, last_hidden_states
from grpo_recipes.training.generation import Generation
from grpo_recipes.training.log_probs import LogProbs
from grpo_recipes.training.packing import Layout
from grpo_recipes.training.passes import Passes
from grpo_recipes.training.prompt_sampler import PromptSampling
from grpo_recipes.training.reference import reference_in, set_reference, without_trl_reference
from grpo_recipes.training.saving import CompleteCheckpoints
from grpo_recipes.training.tool_turns import ToolTurns
from grpo_recipes.training.turn_check import TurnCheck
from grpo_rewards.attention import without_cudnn_attention

if TYPE_CHECKING:
    from grpo_recipes.generation.models import TRLTrainer as TRLGRPOTrainer
else:
    from trl import GRPOTrainer as TRLGRPOTrainer


class GRPOTrainer(TRLGRPOTrainer):
    """TRL's `GRPOTrainer`: the same arguments, methods, metrics and files, so that a TRL script changes one import.

    Args:
        reference: reference policy of the KL term, as `grpo_recipes.training.reference.set_reference` takes it.
        kl_estimator: estimator of the KL term. "sampled" is TRL's, from the sampled tokens. "full" is
            KL(policy || reference) over the vocabulary at each completion token, logged as `kl/full`.
        micro_batching: "auto", "off", or a mapping of `layout` and `skip_zero_advantage`, by which the training phase
            avoids padding, repeated prompts and zero-advantage rows. See docs/efficiency.md.
        generation: "auto" to let transformers' `generate` run each prompt of a batch once and drop finished rows if the
            tokens stay the same, or "off". It does not concern vLLM and continuous batching.
        sampling: "informative" or a mapping, to skip prompts whose last groups had zero variance. See docs/sampling.md.
        advantages: "max_rl" or None, the rule that computes the advantages in place of TRL. See docs/algorithms.md.
        generation_check: True to compare completions with the policy, and stop a run whose policy did not generate
            them. See docs/generation-check.md.
        tool_limits: limits on each call of a tool, a mapping of `seconds`, `result_tokens` and `failures`, or None for
            the defaults of `ToolLimits`.
        optimizer_cls_and_kwargs: class and arguments of the optimizer, an argument of transformers' trainer that TRL's
            does not pass on.
    """

    beta: float
    log_completions: bool

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *rest: Any,
        reference: str | Mapping[str, Any] | specs.ReferenceSpec | None = None,
        kl_estimator: specs.KLEstimator = "sampled",
        micro_batching: str | Mapping[str, Any] | specs.MicroBatching = "auto",
        generation: specs.GenerationMode = "auto",
        sampling: str | Mapping[str, Any] | specs.SamplingSpec | None = None,
        advantages: specs.AdvantageRule | None = None,
        generation_check: bool = True,
        tool_limits: str | Mapping[str, Any] | specs.ToolLimits | None = None,
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        # A mistake in an argument is found before TRL loads the model, which may take minutes.
        self.micro_batching = specs.MicroBatching.parse(micro_batching)
        specs.typed("kl_estimator", kl_estimator, specs.KLEstimator)
        generation = specs.typed("generation", generation, specs.GenerationMode)
        self._advantage_rule = specs.typed("advantages", advantages, specs.AdvantageRule | None)
        limits = specs.ToolLimits() if tool_limits is None else specs.ToolLimits.parse(tool_limits)
        if args is not None:
            check_generation(args)
            check_advantages(advantages, args)
            trl_patches.hide_secrets(args)
            for key in ("tools", "environment_factory"):
                if kwargs.get(key):
                    check_turn_ends(args, key)
        check_unique(tool.__name__ for tool in kwargs.get("tools") or ())
        # TRL's own reference would be a second model in memory, even where a switched-off adapter serves as one.
        policy = with_its_base(model, args)
        with (
            without_trl_reference(args),
            trl_patches.sampling_by_seed(args),
            trl_patches.neutral_engine(),
            complete_weights(),
        ):
            super().__init__(policy, reward_funcs, args, *rest, **kwargs)
        if not self._is_vlm:
            check_no_image_columns(self.train_dataset)
        keep_4bit_layout(self.model)
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        if not self.is_deepspeed_enabled:  # DeepSpeed's optimizer updates float32 weights of its own
            self.add_callback(UpdateSample(self._metrics["train"]))
        self._set_up_loss(reference, kl_estimator)
        self._finite = FiniteSteps(self)
        self.add_callback(self._finite)
        self._stop = StopStrings.of(self.args.generation_kwargs, self._tokenizer)
        self._masks_truncated = self._stop is not None and trl_patches.take_over_mask(self)
        self._generation_check = GenerationCheck(self, self._trl_log_probs, generation_check)
        self._generation = Generation(self, self._generation_check, self._stop, generation)
        self._tool_turns = ToolTurns(self, limits)
        self._turn_check = TurnCheck(self, self._stop, generation_check)
        self._prompts = PromptSampling.added_to(self, sampling)
        self._sources = starting_weights(model, self.model, reference)
        self.checkpoints = CompleteCheckpoints(self, lambda: identity_of(self, self._sources))
        self.add_callback(self.checkpoints)
        self.add_callback(DropLaterCompletions(self))

    def _set_up_loss(
        self, reference: str | Mapping[str, Any] | specs.ReferenceSpec | None, kl_estimator: specs.KLEstimator
    ) -> None:
        """Set the KL term. Decide which changes of micro-batches are exact, and which layouts may be tried."""
        self.reference_sentence = set_reference(self, reference)
        self._full_kl, reason = None, ""
        if kl_estimator == "full":
            check_full_kl(self.beta, self.loss_type, images=self._is_vlm, fsdp=self.is_fsdp_enabled)
            self._full_kl, reason = FullKL(base_model(self.model), self.temperature), READS_PADDED_ROWS
        self._step_state = step_plan.StepState()
        self._passes = Passes(self)
        self._exact = micro_batches.exactness(self, self.micro_batching)
        layout = micro_batches.asked_layout(self.micro_batching)
        self._log_probs = LogProbs(
            self.accelerator, self.args, self._trl_log_probs, layout, self.aux_loss_enabled, reason
        )

    # ---- Around a step: kernels of attention, and values that are not finite

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of TRL's micro-batch after its backward pass. Our layouts have other shapes each time."""
        with without_cudnn_attention():
            loss = super().training_step(*args, **kwargs)
        self._finite.add_loss(loss)
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Tensor | float | None:
        """Return the gradient norm of an optimizer step, which is checked once it is known on the host."""
        self._finite.norm = super()._get_grad_norm(*args, **kwargs)
        return self._finite.norm

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None, None]:
        """Return TRL's loss of a batch of an evaluation."""
        with without_cudnn_attention():
            return super().prediction_step(*args, **kwargs)

    # ---- Seam 1: the buffer of a generation batch, after TRL has generated, scored, shuffled and split it

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """Return TRL's next micro-batch, or ours of a generation batch that was regrouped."""
        buffer = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        # Only a new buffer is regrouped: evaluation, and a generation batch that serves again, keep the old one.
        if self._buffered_inputs is not buffer:
            self._passes.start()
            if self._log_probs.wanted is not Layout.PADDED:
                self._regroup(self._buffered_inputs)
            self._turn_check.check_micro_batches(self._buffered_inputs)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return offline.with_recorded_log_probs(inputs, self.rollout_func)

    def _regroup(self, padded: list[dict[str, Any]]) -> None:
        """Replace TRL's micro-batches with ours and their plans, and log the tokens that this saves over all ranks."""
        window = micro_batches.window_size(self.args.steps_per_generation, self.args.gradient_accumulation_steps)
        first = micro_batches.as_rows(padded[0])
        layout = self._log_probs.layout(self.model, first, len(first.input_ids))
        regrouped = micro_batches.regroup(padded, window, layout, self._exact)
        ours = [{**batch, step_plan.PLAN: self._log_probs.plan(self.model, rows, layout)} for batch, rows in regrouped]
        efficiency = step_plan.measure(padded, ours, window, layout, self.accelerator)
        for name, value in efficiency.metrics().items():
            self._metrics["train"][name].append(value)
        self._step_state.efficiency += efficiency
        self._buffered_inputs = ours

    # ---- Seam 2: log-probabilities, for the loss and for the old and reference policies

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
        """Return log-probabilities, entropies and router loss, computed in the cheapest layout that is exact."""
        # Only TRL's own rows carry images, and only they count a prompt once per completion in the router loss.
        if compute_aux_loss or any(value is not None for value in multimodal.values()):
            inputs = (model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, compute_aux_loss)
            output = super()._get_per_token_logps_and_entropies(*inputs, **multimodal)
        else:
            rows = Rows(input_ids, attention_mask, logits_to_keep)
            output = *self._log_probs(model, rows, batch_size, compute_entropy, self._step_state.plan), None
        # With gradients, this is the policy in the loss. Without, it is the old or the reference policy.
        self._step_state.log_probs = output[0].detach() if torch.is_grad_enabled() else None
        return output

    def _trl_log_probs(self, model: nn.Module, rows: Rows, compute_entropy: bool) -> PerToken:
        """Run TRL's own computation in one model call."""
        log_probs, entropies, _ = super()._get_per_token_logps_and_entropies(
            model, rows.input_ids, rows.attention_mask, rows.logits_to_keep, compute_entropy=compute_entropy
        )
        return log_probs, entropies

    # ---- Seam 3: a term beside TRL's loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Return TRL's loss, with our KL term if it is set, and count the micro-batch for the metrics of its pass."""
        compute = super().compute_loss if self._full_kl is None else self._loss_with_full_kl
        with step_plan.empty_unlogged(inputs, self._metrics["train"]), self._step_state.in_loss(inputs):
            loss = compute(model, inputs, *args, **kwargs)
            if self.model.training:
                self._passes.add(inputs, self._step_state.log_probs)
        return loss

    def _loss_with_full_kl(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Return TRL's loss, with the KL over the vocabulary in place of its sampled KL term."""
        assert self._full_kl is not None
        mask, reference = micro_batches.loss_mask(inputs), self._reference_projection(inputs)
        # TRL computes and logs its sampled KL where `beta != 0`, and adds it to the loss. The product of the smallest
        # float64 above 0 and a float32 tensor is 0. To subtract beta * KL afterwards would leave rounding errors in the
        # gradient.
        beta, self.beta = self.beta, math.ulp(0.0)
        try:
            with self._full_kl.against(reference, mask):
                loss = super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.beta = beta
        kl = self._full_kl.tokens
        assert kl is not None, "TRL's loss runs the policy's forward"
        self._log_full_kl(kl.detach(), mask)
        return loss + self.beta * (kl * self._token_weights(inputs, mask)).sum()

    def _reference_projection(self, inputs: dict[str, Any]) -> Projection:
        """Return the reference's hidden states at the completion tokens, and its head, without a graph."""
        rows = micro_batches.as_rows(inputs)
        with reference_in(self) as model, torch.no_grad():
            causal_lm = base_model(self._log_probs.bare(model))
            with last_hidden_states(causal_lm) as states, self.accelerator.autocast():
                model(input_ids=rows.input_ids, attention_mask=rows.attention_mask, logits_to_keep=1, use_cache=False)
            return Projection.of(causal_lm, states[0], rows.logits_to_keep)

    def _token_weights(self, inputs: dict[str, Any], mask: Tensor) -> Tensor:
        """Return the weight (B, T) of each token's loss in the loss of this micro-batch."""
        accumulation = self.current_gradient_accumulation_steps if self.model.training else 1
        tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        if self.model.training:
            # TRL counts the tokens of the whole generation batch, of which an optimizer step trains on a part.
            tokens = tokens * accumulation / self.args.steps_per_generation
        return LOSS_TYPES[self.loss_type].token_weights(mask, accumulation, self.max_completion_length, tokens)

    def _log_full_kl(self, kl: Tensor, mask: Tensor) -> None:
        """Log `kl/full`, the mean over the completion tokens of all ranks."""
        # Sums, not means, are reduced: ranks have different numbers of tokens.
        total, count = self.accelerator.reduce(torch.stack([kl.sum(), mask.sum().to(kl.dtype)])).tolist()
        self._metrics["train" if self.model.training else "eval"]["kl/full"].append(total / max(count, 1.0))

    # ---- Seam 4: prompts and advantages of a generation batch

    def _generate_and_score_completions(self, inputs: list[Any]) -> dict[str, Any]:
        """Generate and score the prompts that are drawn, with the advantages of the trainer's rule."""
        if self._prompts is None or not self.model.training:
            return self._generate_with_advantages(inputs)
        return self._prompts.generate(inputs, self._generate_with_advantages)

    def _generate_with_advantages(self, inputs: list[Any]) -> dict[str, Any]:
        """Run TRL's generation and scoring, then replace its advantages in the batch and in the log by the rule's."""
        self._finite.check_steps()  # weights that are not finite would be taken for another generator's
        with ExitStack() as self._step_state.resets:
            self._step_state.resets.enter_context(random_state_kept())
            output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self._finite.check_rewards()
        if self._advantage_rule is None:
            return output
        group = self.num_generations if self.model.training else self.num_generations_eval
        values = compute_advantages(self._advantage_rule, self._step_state.rewards, self.reward_weights, group)
        logged = self._logs["advantages"]
        assert isinstance(logged, deque)
        for _ in range(min(len(logged), len(values))):  # TRL's log keeps the last generation batch only
            logged.pop()
        logged.extend(values.tolist())
        first = self.accelerator.process_index * len(inputs)
        output["advantages"] = values[first : first + len(inputs)]
        return output

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return TRL's rewards (completions of all ranks, functions), and keep them for the rule for advantages."""
        functions = self.reward_funcs
        self.reward_funcs = [trl_patches.on_copies(function) for function in functions]
        try:
            with random_state_kept():
                self._step_state.rewards = super()._calculate_rewards(*args, **kwargs)
        finally:
            self.reward_funcs = functions
        return self._step_state.rewards

    # ---- Seam 5: generation, in a context around TRL's own

    def _generate_single_turn(
        self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Return TRL's completions and log-probabilities of one turn, compared with the policy."""
        turn = partial(super()._generate_single_turn, prompt_ids, *args, **kwargs)
        completion_ids, log_probs, difference = self._generation(turn, prompt_ids)
        self._turn_check.record(prompt_ids, completion_ids, log_probs)
        if difference is not None:
            metrics = self._metrics["train" if self.model.training else "eval"]
            for name, value in zip(("mean", "max"), difference, strict=True):
                metrics[f"sampling/sampling_logp_difference/{name}"].append(value)
        return completion_ids, log_probs

    def _generate(self, prompts: list[Any]) -> Any:
        """Return TRL's completions, with its metrics and mask corrected for those that end with a stop string."""
        self._step_state.resets.close()
        self._tool_turns.rows = []
        self._turn_check.start(prompts)
        self._log_probs.restore_attention(self.model)
        with self._generation.one_batch(), trl_patches.malformed_calls(self):
            output = super()._generate(prompts)
        # Before the mask of truncated completions, which takes sampled tokens out of the loss.
        self._turn_check(output, self._tool_turns.rows)
        return (
            output
            if self._stop is None
            else trl_patches.correct_counts(self, output, self._stop, self._masks_truncated)
        )

    # ---- Seam 6: the order of the prompts

    def _get_train_sampler(self, dataset: Any = None) -> RepeatSampler:
        """Return TRL's order of prompts, also after a resume past the first epoch. `sampling` marks some as skipped."""
        stock = cast(RepeatSampler, super()._get_train_sampler(dataset))  # TRL declares any sampler
        recorded = offline.with_baseline(stock, self.rollout_func)
        sampler = EpochSampler(recorded) if self._prompts is None else self._prompts.sampler_like(recorded)
        # A second training has another sampler, and the epoch is set on one of them only.
        self.remove_callback(SetSamplerEpoch)
        self.add_callback(SetSamplerEpoch(sampler))
        return sampler

    # ---- Seam 7: the turns after a tool call

    def _tool_call_loop(
        self,
        prompts: list[Any],
        prompt_ids: list[list[int]],
        completion_ids: list[list[int]],
        completions: list[list[dict[str, Any]]],
        logprobs: list[list[float]] | None,
        images: Any,
        multimodal_fields: dict[str, Any],
    ) -> tuple[Any, ...]:
        """Return TRL's seven values, of calls within `tool_limits` and equally many generations on every rank."""
        if self._tool_turns.are_trls(multimodal_fields):
            inputs = (prompts, prompt_ids, completion_ids, completions, logprobs, images, multimodal_fields)
            return super()._tool_call_loop(*inputs)
        return self._tool_turns(prompt_ids, completion_ids, completions, logprobs)

    # ---- Public methods: the checkpoint that is resumed, and what TRL writes of the completions

    def train(self, resume_from_checkpoint: str | bool | None = None, *rest: Any, **kwargs: Any) -> Any:
        """Run TRL's training, resumed only from a complete checkpoint. True stands for the newest one."""
        try:
            with tied_weights(self.model), no_exit(), trl_patches.steady_clock():
                return super().train(self.checkpoints.resumption(resume_from_checkpoint), *rest, **kwargs)
        finally:
            self._log_probs.restore_attention(self.model)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a checkpoint as transformers does, but keep the dtype of an adapter."""
        with adapter_dtype_kept(self.model if model is None else model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint as transformers does, unless a step or the weights are not finite."""
        self._finite.check_weights()
        super()._save_checkpoint(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, and one line on the tokens computed for the generation batches since the last log."""
        if self.model.training:
            if self._step_state.efficiency.rows and self.accelerator.is_main_process:
                log_progress(f"step {self.state.global_step}: {self._step_state.efficiency}")
            self._step_state.efficiency = step_plan.Efficiency()
            for name, value in self._passes.metrics().items():
                self._metrics["train"][name].append(value)
        # A run resumed at its end logs without new completions: TRL would overwrite its last table by an empty one.
        log_completions = self.log_completions
        self.log_completions = log_completions and bool(self._logs["prompt"])
        self.checkpoints.correct_rates(logs)
        with trl_patches.storable_logs(self):
            super().log(logs, start_time)
        self.log_completions = log_completions

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Run TRL's evaluation, with its completions in a file of their own."""
        with (
            trl_patches.separate_eval_completions(self, eval_dataset, metric_key_prefix),
            no_exit(),
            trl_patches.steady_clock(),
        ):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
