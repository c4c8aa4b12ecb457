"""Rows of recorded completions, scored by our trainer in the layout that it chooses, and one by one without padding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.generation.rows import Rows
from grpo_recipes.training import layout_check
from grpo_recipes.training.packed_attention import Span
from grpo_recipes.training.packing import Layout
from tests.support import device
from tests.support.recorded import Recording, make_trainer, model

RAGGED = Recording.random(prompts=3, group=3, seed=3)
TARGETS: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 8}
SCALED_BY_POSITION: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_4_scaling_beta": (
        "Ministral3Config",
        {"head_dim": 8, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}, "sliding_window": None},
    ),
    "scalable softmax": (
        "BeamConfig",
        {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}
"""Models whose attention counts padding, by the reason."""


def named(case: tuple[str, dict[str, Any]]) -> PreTrainedModel:
    """Return a tiny model of a configuration class and its values."""
    return model(getattr(transformers, case[0]), **case[1])


def adapted(config: peft.PeftConfig) -> peft.PeftModel:
    """Return a tiny Llama with a new adapter, which adds nothing yet."""
    torch.manual_seed(1)
    return peft.get_peft_model(model(transformers.LlamaConfig), config)


def settings(**changes: Any) -> Any:
    """Return the settings of a run that the choice of a layout reads."""
    values = {"pad_to_multiple_of": None, "neftune_noise_alpha": None, "torch_compile": False}
    more = {"gradient_checkpointing": False, "gradient_checkpointing_kwargs": None, "max_completion_length": 9}
    return SimpleNamespace(**{**values, **more, **changes})


def tokens_of(rows: Rows) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of the prompt and of the completion of each row."""
    return [(p.tolist(), c.tolist()) for p, c in zip(rows.host.prompts(), rows.host.completions(), strict=True)]


def padded(prompts: list[list[int]], completions: list[list[int]]) -> Rows:
    """Return rows in TRL's layout: prompts padded on the left, completions on the right."""
    left, right = max(map(len, prompts)), max(1, *map(len, completions))
    ids, mask = [], []
    for p, c in zip(prompts, completions, strict=True):
        before, after = [0] * (left - len(p)), [0] * (right - len(c))
        ids.append([*before, *p, *c, *after])
        mask.append([*before, *[1] * (len(p) + len(c)), *after])
    return Rows(device.here(torch.tensor(ids)), device.here(torch.tensor(mask)), right)


def flat(recording: Recording) -> Rows:
    """Return the rows of a recording in TRL's layout."""
    pairs = [(p, c) for p, group in zip(recording.prompts, recording.completions, strict=True) for c in group]
    return padded([prompt for prompt, _ in pairs], [completion for _, completion in pairs])


def one_by_one(policy: PreTrainedModel, rows: Rows) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies, each (B, T), from the logits of each row alone, without padding."""
    log_probs, entropies = (device.here(torch.zeros(rows.completion_mask.shape)) for _ in range(2))
    policy = device.here(policy)
    with torch.no_grad():
        for row, (ids, mask) in enumerate(zip(rows.input_ids, rows.attention_mask, strict=True)):
            length = int(mask[-rows.logits_to_keep :].sum())
            tokens = ids[mask.bool()][None]
            if length:
                logits = policy(tokens, use_cache=False).logits[0, -length - 1 : -1].log_softmax(-1)
                log_probs[row, :length] = logits.gather(1, tokens[0, -length:, None])[:, 0]
                entropies[row, :length] = -(logits.exp() * logits).sum(-1)
    return log_probs, entropies


def attention(spans: Sequence[tuple[Span, list[Span]]], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the attention of a packed row by its formula, (1, N, heads, D), of (1, heads, N, D)."""
    heads = query.shape[1] // key.shape[1]
    parts = []
    for (start, stop), suffixes in spans:
        for context, (first, last) in [((start, start), (start, stop)), *(((start, stop), own) for own in suffixes)]:
            seen = torch.cat([torch.arange(*context), torch.arange(first, last)]).to(query.device)
            own = torch.arange(first, last, device=query.device)
            keys, values = (states[0, :, seen].repeat_interleave(heads, 0) for states in (key, value))
            scores = query[0, :, own] @ keys.transpose(1, 2) * query.shape[-1] ** -0.5
            weights = scores.masked_fill(seen > own[:, None], -torch.inf).softmax(-1)
            parts.append((weights @ values).transpose(0, 1))
    return torch.cat(parts)[None]


def trainer_on(policy: PreTrainedModel, folder: Path, recording: Recording = RAGGED, **config: Any) -> GRPOTrainer:
    """Build our trainer whose micro-batch is the whole recording."""
    count = len(recording.prompts) * recording.group
    return make_trainer(GRPOTrainer, recording, policy, folder, per_device_train_batch_size=count, **config)


def scored(trainer: TRLGRPOTrainer, rows: Rows, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies, each (B, T), of a trainer's policy."""
    with torch.no_grad():
        log_probs, entropies, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, rows.input_ids, rows.attention_mask, rows.logits_to_keep, compute_entropy=True, **kwargs
        )
    return log_probs, entropies


def check_exact(trainer: TRLGRPOTrainer, rows: Rows, expected: tuple[Tensor, Tensor], atol: float = 1e-5) -> None:
    """Check that a trainer gives rows the expected log-probabilities and entropies."""
    torch.testing.assert_close(scored(trainer, rows), expected, atol=atol, rtol=0)


def layout_of(trainer: GRPOTrainer) -> Layout:
    """Return the layout that was chosen for the only model of a trainer."""
    (layout,) = trainer._log_probs._layouts.values()
    return layout


def chosen(policy: PreTrainedModel, folder: Path, **config: Any) -> Layout:
    """Return the layout that a trainer chooses for a policy on the recorded rows."""
    trainer = trainer_on(policy, folder, **config)
    trainer.model.train()
    scored(trainer, flat(RAGGED))
    return layout_of(trainer)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages that were logged about layouts."""
    return [record.getMessage() for record in caplog.records if record.name == layout_check.__name__]
