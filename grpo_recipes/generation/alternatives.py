"""What may have generated in place of the policy, as far as it can be computed at hand, and how tokens are scored under it.

Nothing is copied on the device: an adapter is switched off, or its scale doubled, for the length of a forward; as it was a
step ago, it is kept in host memory. Earlier weights of a full model would take the memory of a second model, and are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import PeftModel
from peft.helpers import rescale_adapter_scale
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.generation import logits_process as processors
from trl.models.utils import disable_gradient_checkpointing

from grpo_recipes.generation.agreement import has_whole_precision
from grpo_recipes.training.layout_check import in_float32
from grpo_recipes.training.log_probs import PerToken, eval_no_grad
from grpo_recipes.training.packing import Rows

OFF, TWICE, AGO, REFERENCE = "off", "twice", "ago", "reference"
HALF, RAW, UNPADDED, WHOLE = "half", "raw", "unpadded", "whole"
WEIGHTS = {
    OFF: "the model with its adapter switched off",
    TWICE: "the model with its adapter applied twice",
    AGO: "the model with its adapter as it was a step ago",
    REFERENCE: "the reference model",
}
"""Other weights than the policy's, as a sentence names them."""
READINGS = (RAW, UNPADDED, WHOLE)
"""Other ways to score the same weights."""

PROCESSED_TOKENS = 256
"""Tokens of a completion of which processed scores are computed: each takes the logits of the whole vocabulary."""

HARMLESS = {"detokenize", "include_stop_str_in_output", "max_tokens", "min_tokens_to_keep", "n", "seed", "stop"}
"""Keys of `generation_kwargs` that leave the scores of tokens alone, beside those of `Processing`."""


@dataclass(frozen=True)
class Processing:
    """What vLLM does to logits beyond temperature; TRL has it return the log-probabilities of the result."""

    repetition_penalty: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def of(cls, args: Any) -> tuple[Processing, str]:
        """What `args` (`GRPOConfig`) ask for, and why it can't be computed here, if it can't."""
        given = args.generation_kwargs or {}
        names = cls.__dataclass_fields__
        values = {name: given.get(name, getattr(args, name)) for name in names}
        values["top_k"] = max(values["top_k"] or 0, 0)  # -1 is vLLM's own word for none
        found = cls(**{name: value for name, value in values.items() if value is not None})
        unknown = sorted(set(given) - set(names) - HARMLESS - {"temperature"})
        if args.vllm_structured_outputs_regex is not None:
            unknown.append("vllm_structured_outputs_regex")
        return found, f"{', '.join(unknown)} may change the scores of tokens" if unknown else ""

    def __bool__(self) -> bool:
        """Whether it changes anything."""
        return self != Processing()

    def __str__(self) -> str:
        changed = {name: value for name, value in vars(self).items() if value != getattr(Processing(), name)}
        return ", ".join(f"{name} {value}" for name, value in changed.items())

    def log_probs(self, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
        """Of the last T tokens of `ids` (L,), (T,), with the logits before each, (T, vocabulary).

        In vLLM's order: penalties, temperature, min_p, top_k, top_p. A token that rounding left just outside is kept.
        """
        count = len(logits)
        sampled = ids[-count:, None]
        if self.repetition_penalty != 1.0:
            # The tokens before each; the places of later ones repeat the first, for which a penalty counts once.
            earlier = torch.arange(len(ids), device=ids.device) < torch.arange(
                len(ids) - count, len(ids), device=ids.device
            ).unsqueeze(1)
            seen = torch.where(earlier, ids, ids[0])
            logits = processors.RepetitionPenaltyLogitsProcessor(self.repetition_penalty)(seen, logits)
        scores = logits / temperature
        own, unused = scores.gather(1, sampled), ids[None]
        if self.min_p:
            scores = processors.MinPLogitsWarper(self.min_p)(unused, scores)
        if self.top_k > 0:
            scores = processors.TopKLogitsWarper(self.top_k)(unused, scores)
        if self.top_p < 1.0:
            scores = processors.TopPLogitsWarper(self.top_p)(unused, scores)
        return (own - scores.scatter(1, sampled, own).logsumexp(1, keepdim=True))[:, 0]


@dataclass
class Scorer:
    """Log-probabilities of completions as a generator gives them, in as many forwards on every rank."""

    trainer: Any
    policy: nn.Module
    """The trainer's model, inside accelerate's wrappers."""
    plain: Callable[[nn.Module, Rows, bool], PerToken]
    processing: Processing | None
    """None where the generator's log-probabilities are those of the logits over temperature alone."""
    padded: bool = True
    """Whether rows run side by side, as TRL's loss has them, or each without padding."""
    autocast: bool = True
    """Whether the policy runs under autocast where the loss does."""

    def __call__(self, model: nn.Module, rows: Rows, size: int) -> Tensor:
        """(B, T), in forwards of at most `size` rows; without meaning where there is no token."""
        if self.processing is not None or not self.padded:
            size = 1
        chunks = torch.arange(len(rows.input_ids), device=rows.input_ids.device).split(size)
        again = self.trainer.args.gradient_checkpointing_kwargs
        accelerator = self.trainer.accelerator
        precision = nullcontext() if self.autocast else in_float32(accelerator.unwrap_model(model), accelerator)
        with eval_no_grad(model), disable_gradient_checkpointing(self.policy, again), precision:
            return torch.cat([self._of(model, rows.select(chunk)) for chunk in chunks])

    def _of(self, model: nn.Module, rows: Rows) -> Tensor:
        width = rows.logits_to_keep
        if self.processing is not None or not self.padded:
            rows, _ = rows.trimmed()
        values = self._processed(model, rows) if self.processing is not None else self.plain(model, rows, False)[0]
        return nn.functional.pad(values, (0, width - values.shape[1]))

    def _processed(self, model: nn.Module, row: Rows) -> Tensor:
        assert self.processing is not None
        keep = row.logits_to_keep
        with self.trainer.accelerator.autocast():
            output = model(
                input_ids=row.input_ids, attention_mask=row.attention_mask, logits_to_keep=keep + 1, use_cache=False
            )
        ids = row.input_ids[0, row.attention_mask[0].bool()]
        return self.processing.log_probs(output.logits[0, -keep - 1 : -1].float(), ids, self.trainer.temperature)[None]


class Adapters:
    """The trained tensors of an adapter, as they were at the last two steps at which completions were generated."""

    def __init__(self, policy: nn.Module, sharded: bool) -> None:
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        self.trained = trained if isinstance(policy, PeftModel) and not sharded else []
        self.kept: dict[int, list[Tensor]] = {}

    def keep(self, step: int) -> None:
        """Copy them to host memory, if `step` is a new one."""
        if self.trained and step not in self.kept:
            self.kept = dict([*self.kept.items()][-1:])
            self.kept[step] = [parameter.detach().to("cpu", copy=True) for parameter in self.trained]

    @property
    def has_earlier(self) -> bool:
        """Whether there is an earlier step than the newest."""
        return len(self.kept) > 1

    @contextmanager
    def earlier(self) -> Iterator[None]:
        """While it lasts, the adapter is as it was at the step before the newest."""
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


def alternatives(
    trainer: Any, adapters: Adapters, scorer: Scorer, half: bool
) -> Mapping[str, tuple[AbstractContextManager[Any], nn.Module, Scorer]]:
    """What can be computed now, the same on every rank: the context of each, the model to score with, and how.

    With `half`, the policy in bfloat16 too.
    """
    model, policy = trainer.model, scorer.policy
    found: dict[str, tuple[AbstractContextManager[Any], nn.Module, Scorer]] = {}
    if isinstance(policy, PeftModel):
        found[OFF] = (policy.disable_adapter(), model, scorer)
        if any(isinstance(module, LoraLayer) for module in policy.modules()):
            found[TWICE] = (rescale_adapter_scale(policy, 2), model, scorer)
        if adapters.has_earlier:
            found[AGO] = (adapters.earlier(), model, scorer)
    elif getattr(trainer, "ref_model", None) is not None:
        found[REFERENCE] = (nullcontext(), trainer.ref_model, scorer)
    if half and has_whole_precision(policy):
        device = trainer.accelerator.device.type
        found[HALF] = (torch.autocast(device, torch.bfloat16), model, replace(scorer, autocast=True))
    if has_whole_precision(policy) and trainer.accelerator.mixed_precision != "no" and scorer.autocast:
        # An adapter's output is added to the base's: bfloat16 swallows most of a new one's, which `generate` does not.
        found[WHOLE] = (nullcontext(), model, replace(scorer, autocast=False))
    if scorer.processing is not None:
        found[RAW] = (nullcontext(), model, replace(scorer, processing=None))
    elif scorer.padded:
        found[UNPADDED] = (nullcontext(), model, replace(scorer, padded=False))
    return found
