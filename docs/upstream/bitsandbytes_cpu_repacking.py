"""A reproduction for docs/upstream/bitsandbytes-cpu-repacking.md."""

import torch
from bitsandbytes.nn import Linear4bit

layer = Linear4bit(64, 128, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to("cpu")
layer.support_avx512bf16_for_cpu = True
tokens = torch.randn(2, 64, dtype=torch.bfloat16)
print(layer.train()(tokens.clone().requires_grad_()).grad_fn)  # MatMul4BitBackward
layer.eval()(tokens)
print(layer.train()(tokens.clone().requires_grad_()).grad_fn)  # no longer MatMul4BitBackward
