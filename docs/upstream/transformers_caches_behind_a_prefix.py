"""A reproduction for docs/upstream/transformers-caches-behind-a-prefix.md."""

import torch
from transformers import AutoModelForCausalLM, BambaConfig, DynamicCache, JambaConfig, Qwen2Config

sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
bamba = {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
jamba = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
for config in BambaConfig(**sizes, **bamba), JambaConfig(**sizes, **jamba), Qwen2Config(**sizes):
    torch.manual_seed(0)
    model, tokens = AutoModelForCausalLM.from_config(config).eval(), torch.randint(1, 40, (1, 20))
    if config.model_type == "qwen2":
        model.train().gradient_checkpointing_enable()
    cache = DynamicCache(config=config)
    model(tokens[:, :10], past_key_values=cache, use_cache=True)
    behind = model(tokens[:, 10:], past_key_values=cache, use_cache=True).logits
    print(config.model_type, (behind - model(tokens, use_cache=False).logits[:, 10:]).abs().max().item())
