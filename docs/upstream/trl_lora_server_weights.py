"""A reproduction for docs/upstream/trl-lora-server-weights.md."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2Config, Qwen2ForCausalLM
from trl.generation.vllm_generation import VLLMGeneration


class Dist:
    """A stand-in for what TRL knows of the launch."""

    is_fsdp = False

    def gather_params(self, params):
        """Gather nothing."""
        return torch.no_grad()


sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=1))
model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
generation = object.__new__(VLLMGeneration)
generation.model, generation._dist = model, Dist()
name = "model.layers.0.mlp.up_proj.weight"
merged = {n: t.clone() for n, t in generation._iter_named_params()}[name]  # read one by one
packed = dict(generation._iter_named_params())[name]  # read as pack_tensors does: after the iterator has ended
base = model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight
print(torch.equal(packed, base), (merged - base).abs().max().item())  # True, above 0: the adapter is lost
