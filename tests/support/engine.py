"""Stub of vLLM that samples from copies of the policy, correctly or with one of the faults that other trainers had."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.helpers import rescale_adapter_scale

from tests.support.architectures import ENDS

SETTINGS = {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_mode": "token_truncate"}


class Engine:
    """The methods of `VLLMGeneration` that TRL's trainer calls.

    Args:
        fault: Planted fault. "" is none. "off" and "twice" change how the adapter gets into the weights. "ago" delays
            each weight transfer by a step, and "start" drops them all. "disk" loads the weights from disk after each
            transfer. "merged" is no fault: the adapter is merged before the weights are rounded, as TRL does. Nor is
            "raw": log-probabilities are those before the filters.
        dtype: Computation dtype, or None for the policy's own.
    """

    def __init__(self, *, fault: str, dtype: torch.dtype | None, model: Any, **settings: Any) -> None:
        self.fault, self.dtype, self.policy, self.settings = fault, dtype, model, settings
        self.start = self.before = self.now = copied(model)

    def sync_weights(self) -> None:
        """Take the policy's weights."""
        self.before, self.now = self.now, copied(self.policy)

    def _iter_named_params(self) -> Iterator[Any]:
        """Yield no tensor: `sync_weights` copies the entire model."""
        return iter(())

    def _serving(self) -> tuple[Any, AbstractContextManager[Any]]:
        """Return the model that serves, and the context in which it does."""
        model = {"ago": self.before, "start": self.start, "disk": self.start}.get(self.fault, self.now)
        model = copied(model).eval()
        if self.fault == "merged":
            model = model.merge_and_unload()
        if self.dtype is not None:
            model = model.to(self.dtype)
        if self.fault == "off" or (self.fault == "disk" and isinstance(model, PeftModel)):
            return model, model.disable_adapter()
        return model, rescale_adapter_scale(model, 2.0) if self.fault == "twice" else nullcontext()

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], **ignored: Any) -> tuple[Any, ...]:
        """Return completions and their log-probabilities after processing, as vLLM's `processed_logprobs`."""
        model, context = self._serving()
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        with context:
            made = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                eos_token_id=ENDS,
                pad_token_id=0,
                max_new_tokens=self.settings["max_completion_length"],
                return_dict_in_generate=True,
                output_scores=True,
                output_logits=True,
                **{name: self.settings[name] for name in names},
            )
        tokens = made.sequences[:, width:]
        scored = (
            [logits / self.settings["temperature"] for logits in made.logits] if self.fault == "raw" else made.scores
        )
        scores = torch.stack(list(scored), 1).float().log_softmax(-1).gather(2, tokens[..., None])[..., 0]
        ends = [next((n + 1 for n, token in enumerate(row) if token in ENDS), len(row)) for row in tokens.tolist()]
        completions = [row[:end] for row, end in zip(tokens.tolist(), ends, strict=True)]
        log_probs = [[[value] for value in row[:end]] for row, end in zip(scores.tolist(), ends, strict=True)]
        return prompts, completions, log_probs, None


def copied(model: Any) -> Any:
    """Return a copy without TRL's `forward`, which would run the original."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        vars(module).pop("forward", None)
    return copied


def serve(patch: pytest.MonkeyPatch, fault: str = "", dtype: torch.dtype | None = None) -> None:
    """Let TRL's trainers with `use_vllm` generate with an `Engine`."""
    made = functools.partial(Engine, fault=fault, dtype=dtype)
    patch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", made)
