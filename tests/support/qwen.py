"""The published sizes of the Qwen2.5 models that recipes name, for machines that can't reach the hub."""

from pathlib import Path

from transformers import Qwen2Config

# hidden, intermediate, layers, heads, key-value heads, vocabulary, tied: from each model's config.json.
SIZES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
    "72B": (8192, 29568, 80, 64, 8, 152064, False),
}
# From the models' cards.
PARAMETERS = {"0.5B": 0.494e9, "1.5B": 1.54e9, "7B": 7.61e9, "72B": 72.7e9}


def config(size: str) -> Qwen2Config:
    """Return the configuration of a model."""
    hidden, intermediate, layers, heads, key_value_heads, vocabulary, tied = SIZES[size]
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        architectures=["Qwen2ForCausalLM"],
    )


def write_config(folder: Path, size: str) -> Path:
    """Write a model's config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    config(size).save_pretrained(folder)
    return folder / "config.json"
