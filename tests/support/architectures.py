"""Tiny models of many architectures, a batch of groups to generate for, and a trainer that generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.generation.groups import Turn, decoding
from tests.support import device
from tests.support.exact_generation import exact_generation, generate_exactly
from tests.support.recorded import model, tokenizer
from tests.support.trainers import make_trainer

ENDS = [1, 2, 3]
"""Several end-of-sequence tokens, so that rows end at many lengths."""

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "Qwen2Config": {},
    "Qwen3Config": {"head_dim": 8},
    "Qwen3MoeConfig": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "MistralConfig": {"sliding_window": 6},
    "Gemma2Config": {"sliding_window": 6, "head_dim": 8, "attn_implementation": "eager"},
    "Gemma3TextConfig": {"sliding_window": 6, "head_dim": 8},
    "GPT2Config": {"n_embd": 32, "n_layer": 2, "n_head": 4, **NO_DROPOUT},
    "GPTNeoXConfig": {"num_key_value_heads": 4, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    "Phi3Config": {"sliding_window": None},
    "Olmo2Config": {},
    "SmolLM3Config": {},
    "BloomConfig": {"n_head": 4, "n_layer": 2, "attn_implementation": "eager"},
    "OPTConfig": {"ffn_dim": 32, "dropout": 0.0, "word_embed_proj_dim": 32},
}

SAMPLED = {"do_sample": True, "top_k": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": SAMPLED,
    "repetition penalty": {**SAMPLED, "repetition_penalty": 1.3},
    "filters": {"do_sample": True, "temperature": 0.7, "top_k": 10, "top_p": 0.9, "min_p": 0.02},
    "forbidden": {**SAMPLED, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 7]], "suppress_tokens": [9]},
    "lengths": {**SAMPLED, "min_new_tokens": 3, "exponential_decay_length_penalty": (3, 1.2)},
    "biased": {**SAMPLED, "sequence_bias": [[[5], 2.0]], "typical_p": 0.9, "epsilon_cutoff": 0.01},
    "watermark": {**SAMPLED, "watermarking_config": {"greenlist_ratio": 0.5, "bias": 2.0}},  # not known to be row-wise
}


def tiny(architecture: str, **changes: Any) -> PreTrainedModel:
    """Build a model of an architecture on the device of the tests, ready to generate."""
    built = model(getattr(transformers, architecture), **{**ARCHITECTURES.get(architecture, {}), **changes})
    moved: PreTrainedModel = device.here(built.eval())
    return moved


def batch(lengths: tuple[int, ...] = (3, 11, 1, 7), group: int = 4) -> dict[str, Tensor]:
    """Prompts of these lengths, `group` times each, padded on the left."""
    generator, width = torch.Generator().manual_seed(1), max(lengths)
    prompts = [torch.randint(4, 40, (length,), generator=generator).tolist() for length in lengths]
    rows = [prompt for prompt in prompts for _ in range(group)]
    inputs: dict[str, Tensor] = device.here(
        {
            "input_ids": torch.tensor([[0] * (width - len(row)) + row for row in rows]),
            "attention_mask": torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
        }
    )
    return inputs


def config(**changes: Any) -> GenerationConfig:
    """Return settings that sample at most 24 tokens, with the changes of a test."""
    known = {"max_new_tokens": 24, "eos_token_id": ENDS, "pad_token_id": 0, "disable_compile": True}
    return GenerationConfig(**{**known, **SAMPLED, **changes})


def generated(
    policy: PreTrainedModel, turn: Turn | None, inputs: dict[str, Tensor] | None = None, seed: int = 3, **how: Any
) -> Tensor:
    """Return prompts and completions of `generate`, with what `turn` requests, or of transformers' own loop."""
    given = {name: how.pop(name) for name in ("logits_processor", "streamer", "num_beams") if name in how}
    torch.manual_seed(seed)
    with decoding(policy, turn):
        return policy.generate(**(inputs or batch()), **given, generation_config=config(**how))


def assert_same(policy: PreTrainedModel, inputs: dict[str, Tensor] | None = None, **how: Any) -> Tensor:
    """Assert that both loops generate the same tokens from the same seed."""
    expected, turn = generated(policy, None, inputs, **how), Turn()
    with exact_generation():
        got = generated(policy, turn, inputs, **how)
    assert turn.declined == ""
    assert got.tolist() == expected.tolist()
    return got


def moved_no_states(self: Any, holes: list[int], movers: list[int], count: int) -> None:
    """Plant a fault in `StateBuffer.keep_states`: drop the last rows of the states, whichever have finished."""
    for states in (self.conv_states, self.recurrent_states):
        for number, state in states.items():
            states[number] = None if state is None else state[:count]


def lengths(tokens: Tensor, width: int) -> list[int]:
    """Return the number of tokens of each completion, including its end."""
    found = torch.isin(tokens[:, width:], torch.tensor(ENDS))
    return [int(row.int().argmax()) + 1 if row.any() else len(row) for row in found]


PROMPTS = Dataset.from_dict(
    {"prompt": [" ".join(f"t{(7 * i + j) % 38 + 2}" for j in range(1 + i % 9)) for i in range(16)]}
)


def reward(completions: list[str], **columns: Any) -> list[float]:
    """Any function of the text whose value differs inside a group."""
    return [float(sum(map(ord, completion)) % 97) for completion in completions]


def trainer(
    folder: Path, cls: type[TRLGRPOTrainer] = GRPOTrainer, policy: PreTrainedModel | None = None, **more: Any
) -> Any:
    """Build a trainer whose completions end at many lengths. Ours draws the random numbers of the stock loop."""
    policy = model() if policy is None else policy
    policy.generation_config.eos_token_id = ENDS
    if more.get("peft_config") is not None:
        more.setdefault("reference", "base")
    settings: dict[str, Any] = {
        "num_generations": 4,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 24,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "tokenizer": tokenizer(),
        **more,
    }
    made = make_trainer(cls, policy, folder, rewards=reward, rows=PROMPTS, **settings)
    if issubclass(cls, GRPOTrainer):
        generate_exactly(made)
    return made


def adapter(**changes: Any) -> LoraConfig:
    """Return the configuration of an adapter whose weights all matter from the start."""
    return LoraConfig(r=4, target_modules="all-linear", **{"init_lora_weights": False, "lora_dropout": 0.0, **changes})
