"""Tiny models and tokenizers that need no files: what every test folder trains, scores with and loads."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


# Tokenizers


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """`<pad>` 0, `<eos>` 1, then one token a byte in the byte-level alphabet's order; no chat template."""
    return _byte_level(["<pad>", "<eos>", *_BYTES], pad_token="<pad>", eos_token="<eos>", padding_side="left")


def chat_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Bytes are 0..255, `<|im_start|>` 256, `<|im_end|>` 257, which is eos and pad too: the template ends in `pad`."""
    special = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    tokenizer = _byte_level([*_BYTES, "<|im_start|>", "<|im_end|>"], use_regex=False, **special)
    tokenizer.chat_template = template
    return tokenizer


def word_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """Words between spaces; the first is padding, the second the end."""
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": words[0], "eos_token": words[1], "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def _byte_level(vocabulary: Sequence[str], use_regex: bool = True, **special: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(vocabulary)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


# Policies and reward models


def policy(config_class: type[PreTrainedConfig] = LlamaConfig, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Build a model of 35,000 parameters over `byte_tokenizer` whose distributions are far from uniform."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config_class(**{**_SIZES, **config}))


def save_policy(folder: Path, **config: Any) -> Path:
    """Save a new policy and its tokenizer in `folder`."""
    policy(**config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def save_tool_policy(folder: Path, template: str | None = None) -> Path:
    """Save a new policy over bytes whose chat template has tools: that of Qwen2.5 if none is given."""
    from trl.chat_template_utils import qwen2_5_chat_template

    config = {"eos_token_id": 257, "pad_token_id": 257, "max_position_embeddings": 4096}
    policy(**config).save_pretrained(folder)
    chat_tokenizer(qwen2_5_chat_template if template is None else template).save_pretrained(folder)
    return folder


_SIZES: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "initializer_range": 0.2,
}


def reward_config(**config: Any) -> LlamaConfig:
    """Return the configuration of a two-layer Llama over `chat_tokenizer`, with grouped queries and one label."""
    sizes = {"intermediate_size": 48, "max_position_embeddings": 2048, "num_labels": 1}
    return LlamaConfig(**{**_SIZES, **sizes, "eos_token_id": 257, "pad_token_id": 257, **config})


def save_reward_model(
    folder: Path,
    network_class: type[PreTrainedModel] = LlamaForSequenceClassification,
    config: PreTrainedConfig | None = None,
    template: str | None = CHATML,
) -> Path:
    """Write a random reward model with its tokenizer; scores spread over a few units."""
    torch.manual_seed(0)
    network_class(config or reward_config()).save_pretrained(folder)
    chat_tokenizer(template).save_pretrained(folder)
    return folder


# InternLM2 reward checkpoints in the hub's layout

INTERNLM2_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}{{ '<|reward|>' }}"
)
INTERNLM2_SPECIAL = ["reward", "plugin", "interpreter", "action_end", "action_start", "im_end", "im_start"]
"""Between `<|` and `|>`, by id; they name the last tokens of the vocabulary."""
INTERNLM2_CONFIG: dict[str, Any] = {
    "architectures": ["InternLM2ForRewardModel"],
    "attn_implementation": "eager",
    "auto_map": {
        "AutoConfig": "configuration_internlm2.InternLM2Config",
        "AutoModel": "modeling_internlm2.InternLM2ForRewardModel",
    },
    "bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "model_type": "internlm2",
    "pad_token_id": 2,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def save_internlm2(
    folder: Path, *, seed: int, heads: int, kv_heads: int, hidden: int, layers: int, vocabulary: int | None = None
) -> Path:
    """Write a random InternLM2 reward checkpoint; `vocabulary` embeds more tokens than its tokenizer has."""
    sentencepiece_model, size = _internlm2_vocabulary()
    vocabulary = vocabulary or size
    intermediate, head_dim = hidden * 5 // 2, hidden // heads
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return 0.2 * torch.randn(rows, columns, generator=generator)

    def norm() -> torch.Tensor:
        return 1 + 0.3 * torch.randn(hidden, generator=generator)

    tensors = {"model.tok_embeddings.weight": matrix(vocabulary, hidden)}
    for n in range(layers):
        layer = f"model.layers.{n}."
        tensors |= {
            layer + "attention.wqkv.weight": matrix((heads + 2 * kv_heads) * head_dim, hidden),
            layer + "attention.wo.weight": matrix(hidden, heads * head_dim),
            layer + "feed_forward.w1.weight": matrix(intermediate, hidden),
            layer + "feed_forward.w3.weight": matrix(intermediate, hidden),
            layer + "feed_forward.w2.weight": matrix(hidden, intermediate),
            layer + "attention_norm.weight": norm(),
            layer + "ffn_norm.weight": norm(),
        }
    tensors |= {"model.norm.weight": norm(), "v_head.weight": matrix(1, hidden)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "reward_token_id": size - len(INTERNLM2_SPECIAL),
    }
    (folder / "config.json").write_text(json.dumps({**INTERNLM2_CONFIG, **sizes}))
    (folder / "tokenizer.model").write_bytes(sentencepiece_model)
    (folder / "tokenizer_config.json").write_text(json.dumps(_internlm2_tokenizer_config(size)))
    return folder


def _internlm2_tokenizer_config(size: int) -> dict[str, Any]:
    special = [f"<|{name}|>" for name in INTERNLM2_SPECIAL]
    added = {0: "<unk>", 1: "<s>", 2: "</s>", **dict(enumerate(special, size - len(special)))}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": {str(index): {"content": token, **flags} for index, token in added.items()},
        "additional_special_tokens": special[::-1],
        "auto_map": {
            "AutoTokenizer": [
                "tokenization_internlm2.InternLM2Tokenizer",
                "tokenization_internlm2_fast.InternLM2TokenizerFast",
            ]
        },
        "bos_token": "<s>",
        "chat_template": INTERNLM2_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "decode_with_prefix_space": False,
        "eos_token": "</s>",
        "model_max_length": 10**30,
        "pad_token": "</s>",
        "sp_model_kwargs": None,
        "tokenizer_class": "InternLM2Tokenizer",
        "unk_token": "<unk>",
    }


@functools.cache
def _internlm2_vocabulary() -> tuple[bytes, int]:
    """Train a SentencePiece model on this project's licence and a few words. Return it and its number of pieces.

    As in the published model, bytes stand for unknown characters, spaces are kept, and unused pieces lie at the end,
    for the special tokens to name.
    """
    from sentencepiece import SentencePieceTrainer, sentencepiece_model_pb2

    licence = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8").splitlines()
    words = [
        "one two three four five six seven",
        "eight nine ten eleven",
        "twin twig twist shelve delve helve",
        "user",
        "assistant",
    ]
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([*licence, *words * 100]),
        model_writer=written,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    model = sentencepiece_model_pb2.ModelProto.FromString(written.getvalue())
    for number in range(len(INTERNLM2_SPECIAL)):
        unused = sentencepiece_model_pb2.ModelProto.SentencePiece
        model.pieces.append(unused(piece=f"[UNUSED_TOKEN_{number}]", type=unused.USER_DEFINED))
    model.trainer_spec.vocab_size = len(model.pieces)
    return model.SerializeToString(), len(model.pieces)
