"""Tiny models and a tokenizer that need no files: one token a byte, a ChatML template that ends in `pad`."""

import importlib.util
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def byte_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Bytes are 0..255 in the byte-level alphabet's order, `<|im_start|>` 256, `<|im_end|>` 257, eos and pad too."""
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<|im_start|>": 256, "<|im_end|>": 257}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def llama_reward_config(**settings) -> LlamaConfig:
    """A two-layer Llama over `byte_tokenizer`, with grouped queries and one label."""
    return LlamaConfig(
        **{
            "vocab_size": 258,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "num_labels": 1,
            "bos_token_id": None,
            "eos_token_id": 257,
            "pad_token_id": 257,
            "initializer_range": 0.2,
            **settings,
        }
    )


def save_reward_model(folder: Path, network_class=LlamaForSequenceClassification, config=None, template=CHATML) -> Path:
    """Write a random reward model with its tokenizer; scores spread over a few units."""
    torch.manual_seed(0)
    network_class(config or llama_reward_config()).save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    return folder


def internlm2_maker(internlm2_dir: Path):
    """The function `build(out, seed, heads, kv_heads, hidden, layers)` that writes a checkpoint in the hub's layout."""
    spec = importlib.util.spec_from_file_location("make_tiny", internlm2_dir / "make_tiny.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build
