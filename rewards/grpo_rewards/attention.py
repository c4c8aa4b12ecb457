"""Choice of the kernel of attention, for rows whose lengths differ from call to call.

The module needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Keep SDPA inside this block from cuDNN, which builds a plan for each new shape of its inputs.

    A plan takes 0.06 to 1 second, and cuDNN is PyTorch's first choice on Hopper. The backward pass of gradient
    checkpointing must run inside the block too: another kernel stores other tensors.
    """
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
