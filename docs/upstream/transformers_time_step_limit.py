"""A reproduction for docs/upstream/transformers-time-step-limit.md."""

import torch
from transformers import DynamicCache, Zamba2Config, Zamba2ForCausalLM

sizes = {"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "n_mamba_heads": 4}
for least in (1e-3, 1e-9):
    torch.manual_seed(0)
    config = Zamba2Config(**sizes, intermediate_size=48, layers_block_type=["mamba", "hybrid"], time_step_min=least)
    model, tokens = Zamba2ForCausalLM(config).double().eval(), torch.randint(0, 40, (1, 30))
    for name, parameter in model.named_parameters():
        parameter.data += 0.2 * torch.randn_like(parameter) - 6.0 * name.endswith("dt_bias")
    cache = DynamicCache(config=config)
    with torch.no_grad():
        steps = [model(tokens[:, [i]], past_key_values=cache, use_cache=True).logits for i in range(30)]
        print(least, (torch.cat(steps, 1) - model(tokens, use_cache=False).logits).abs().max().item())
