"""Hypotheses about what generated in place of the policy, and log-probabilities of the same tokens under each of them.

No hypothesis copies weights on the device. An adapter is switched off, or its scale doubled, for the length of a
forward. The adapter of an earlier step is kept in host memory. Earlier weights of a full model would take the memory of
a second model, and are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from peft import PeftModel
from peft.helpers import rescale_adapter_scale
from peft.tuners.lora import LoraLayer
from torch import LongTensor, Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import logits_process as processors
from trl.models.utils import disable_gradient_checkpointing

from grpo_recipes.generation.agreement import BFLOAT16, EARLIER, NO_AUTOCAST, OFF, TWICE, UNPADDED, UNPROCESSED
from grpo_recipes.generation.models import eval_no_grad, in_float32, is_float32
from grpo_recipes.generation.rows import PerToken, Rows

if TYPE_CHECKING:
    from grpo_recipes.generation.models import FilledConfig, TRLTrainer

PROCESSED_TOKENS = 256
"""Number of tokens of a completion that are scored after processing. Each needs the logits of the full vocabulary."""

HARMLESS = {"detokenize", "include_stop_str_in_output", "max_tokens", "min_tokens_to_keep", "n", "seed", "stop"}
"""Keys of `generation_kwargs` that do not change the scores of tokens, apart from those of `Processing`."""


@dataclass(frozen=True)
class Processing:
    """Settings by which vLLM changes logits beyond temperature. Its log-probabilities are of the changed logits."""

    repetition_penalty: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def of(cls, args: FilledConfig) -> tuple[Processing, str]:
        """Return the settings of `args`, and the reason why log-probabilities cannot be computed here, or ""."""
        given = args.generation_kwargs or {}
        names = cls.__dataclass_fields__
        values = {name: given.get(name, getattr(args, name)) for name in names}
        # None stands for the default of vLLM and of TRL, which changes nothing.
        values["top_k"] = max(values["top_k"] or 0, 0)  # vLLM writes -1 for no limit
        settings = cls(**{name: value for name, value in values.items() if value is not None})
        unknown = sorted(set(given) - set(names) - HARMLESS - {"temperature"})
        if args.vllm_structured_outputs_regex is not None:
            unknown.append("vllm_structured_outputs_regex")
        return settings, f"{', '.join(unknown)} may change the scores of tokens" if unknown else ""

    def __bool__(self) -> bool:
        """Return True if the settings change any logits."""
        return self != Processing()

    def __str__(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != getattr(Processing(), name)}
        return ", ".join(f"{name} {value}" for name, value in changed.items())

    def log_probs(self, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        """Return the log-probabilities of the last T tokens of one row after processing.

        Args:
            logits: logits before each of the T tokens, (T, vocabulary).
            ids: token IDs of prompt and completion, (L,).
            temperature: divisor of the logits.

        Returns:
            Log-probabilities (T,). A sampled token that rounding here moves just outside a filter is kept.
        """
        # vLLM's order: penalties, temperature, min_p, top_k, top_p. Transformers applies min_p last.
        count = len(logits)
        sampled = ids[-count:, None]
        if self.repetition_penalty != 1.0:
            places = torch.arange(len(ids), device=ids.device)
            is_earlier = places < places[-count:, None]
            # The penalty counts each token once, so the first token may stand in for those that come later.
            seen = torch.where(is_earlier, ids, ids[0])
            logits = processors.RepetitionPenaltyLogitsProcessor(self.repetition_penalty)(seen, logits)
        scores = logits / temperature
        own, unused = scores.gather(1, sampled), cast(LongTensor, ids[None])
        if self.min_p:
            scores = processors.MinPLogitsWarper(self.min_p)(unused, scores)
        if self.top_k > 0:
            scores = processors.TopKLogitsWarper(self.top_k)(unused, scores)
        if self.top_p < 1.0:
            scores = processors.TopPLogitsWarper(self.top_p)(unused, scores)
        return (own - scores.scatter(1, sampled, own).logsumexp(1, keepdim=True))[:, 0]


@dataclass
class Scorer:
    """Computation of log-probabilities as a generator gives them, in equally many forwards on every rank."""

    trainer: TRLTrainer
    policy: nn.Module
    """The trainer's model, inside accelerate's wrappers."""
    trl_log_probs: Callable[[nn.Module, Rows, bool], PerToken]
    """TRL's own computation: (model, rows, compute_entropy) -> log-probabilities and entropies, each (B, T)."""
    processing: Processing | None
    """Settings that the generator's log-probabilities come after, or None if temperature alone changes the logits."""
    padded: bool = True
    """True if rows run side by side, as in TRL's loss. False if each runs alone, without padding."""
    autocast: bool = True
    """True if the policy runs under autocast, as in the loss."""

    def __call__(self, rows: Rows) -> Tensor:
        """Return float32 log-probabilities (B, T), in forwards of as many rows as in the loss.

        Those of padding mean nothing.
        """
        model, args, accelerator = self.trainer.model, self.trainer.args, self.trainer.accelerator
        size = args.per_device_train_batch_size if model.training else args.per_device_eval_batch_size
        alone = self.processing is not None or not self.padded
        if alone:
            # Rows without padding have widths of their own, and processed scores hold a vocabulary for each token.
            size = 1
        precision = nullcontext() if self.autocast else in_float32(self.policy, accelerator)
        # TRL's annotation leaves out models with an adapter.
        policy = cast(PreTrainedModel, self.policy)
        checkpointing = disable_gradient_checkpointing(policy, args.gradient_checkpointing_kwargs)
        scores = []
        with eval_no_grad(model), checkpointing, precision:
            for start in range(0, len(rows.input_ids), size):
                chunk = rows.select(slice(start, start + size))
                if alone:
                    chunk, _ = chunk.trimmed()
                if self.processing is not None:
                    values = self._score_processed(chunk, self.processing)
                else:
                    values = self.trl_log_probs(model, chunk, False)[0]
                # Trimmed rows are narrower than the batch that they go back into.
                scores.append(nn.functional.pad(values, (0, rows.logits_to_keep - values.shape[1])))
        return torch.cat(scores).float()

    def _score_processed(self, row: Rows, processing: Processing) -> Tensor:
        """Return log-probabilities (1, T) of one row after processing."""
        keep = row.logits_to_keep
        # One logit more than tokens: the last prompt token predicts the first of the completion.
        with self.trainer.accelerator.autocast():
            output = self.trainer.model(
                input_ids=row.input_ids, attention_mask=row.attention_mask, logits_to_keep=keep + 1, use_cache=False
            )
        ids = row.input_ids[0, row.attention_mask[0].bool()]
        return processing.log_probs(output.logits[0, -keep - 1 : -1].float(), ids, self.trainer.temperature)[None]


class Adapters:
    """Copies in host memory of an adapter's trained tensors at the last two steps that generated completions."""

    def __init__(self, policy: nn.Module, sharded: bool) -> None:
        # Shards would have to be gathered at every step, which costs more than the check may.
        keeps = isinstance(policy, PeftModel) and not sharded
        self.trained = [parameter for parameter in policy.parameters() if parameter.requires_grad] if keeps else []
        self.kept: dict[int, list[Tensor]] = {}

    def keep(self, step: int) -> None:
        """Copy the trained tensors to host memory, once for each step."""
        if self.trained and step not in self.kept:
            self.kept = dict([*self.kept.items()][-1:])  # the newest one becomes the earlier one
            self.kept[step] = [parameter.detach().to("cpu", copy=True) for parameter in self.trained]

    @contextmanager
    def earlier(self) -> Iterator[None]:
        """Set the adapter inside this block to its values at the step before the newest."""
        # Training must go on from the same bits, so the values now are copied, not computed back.
        now = [parameter.detach().clone() for parameter in self.trained]
        before = self.kept[min(self.kept)]
        try:
            self._set(before)
            yield
        finally:
            self._set(now)

    def _set(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.trained, values, strict=True):
                parameter.copy_(value)


Hypothesis = tuple[AbstractContextManager[Any], Scorer]
"""One way in which the tokens may have been generated: the context of the forward, entered once, and its scorer."""


def hypotheses(trainer: TRLTrainer, adapters: Adapters, scorer: Scorer, with_bfloat16: bool) -> dict[str, Hypothesis]:
    """Return the hypotheses that can be computed now, by name and in the same order on every rank.

    Args:
        trainer: the trainer.
        adapters: earlier values of the policy's adapter.
        scorer: the computation of the policy's own log-probabilities.
        with_bfloat16: True to add the policy in bfloat16, if it is float32.
    """
    # The contexts change nothing before they are entered.
    policy, accelerator = scorer.policy, trainer.accelerator
    found: dict[str, Hypothesis] = {}
    if isinstance(policy, PeftModel):
        found[OFF] = policy.disable_adapter(), scorer
        # Other adapters have no scale: to apply one twice has no meaning that all of them share.
        if any(isinstance(module, LoraLayer) for module in policy.modules()):
            found[TWICE] = rescale_adapter_scale(policy, 2), scorer
        if len(adapters.kept) > 1:
            found[EARLIER] = adapters.earlier(), scorer
    if with_bfloat16 and is_float32(policy):
        found[BFLOAT16] = torch.autocast(accelerator.device.type, torch.bfloat16), replace(scorer, autocast=True)
    if is_float32(policy) and accelerator.mixed_precision != "no" and scorer.autocast:
        # The loss adds an adapter's output to the base's under autocast. bfloat16 rounds away most of what a new
        # adapter adds, and `generate`, which runs without autocast, does not.
        found[NO_AUTOCAST] = nullcontext(), replace(scorer, autocast=False)
    if scorer.processing is not None:
        found[UNPROCESSED] = nullcontext(), replace(scorer, processing=None)
    elif scorer.padded:
        found[UNPADDED] = nullcontext(), replace(scorer, padded=False)
    return found
