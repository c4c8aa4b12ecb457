"""AdamW for bfloat16 weights whose parameters FSDP2 shards over two ranks: steps and states equal those of one rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from grpo_recipes.training.adamw_bf16 import AdamWBF16
from tests.support import tiny

IDS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
STEPS = 4


def policy(sharded: bool) -> PreTrainedModel:
    torch.manual_seed(0)
    made = tiny.policy().to(torch.bfloat16)
    if sharded:
        mesh = init_device_mesh("cpu", (2,))
        for layer in made.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(made, mesh=mesh)
    return made


def train(model: PreTrainedModel, optimizer: AdamWBF16, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all values of a tensor, as the bits of a 16-bit dtype, because some low bits are those of a NaN."""
    value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return value.detach().view(torch.int16) if value.dtype == torch.bfloat16 else value.detach()


def everything(model: PreTrainedModel, optimizer: AdamWBF16) -> list[torch.Tensor]:
    """Return all weights, moments, bits and counts of steps."""
    values = []
    for parameter in model.parameters():
        values += [whole(parameter), *(whole(value) for _, value in sorted(optimizer.state[parameter].items()))]
    return values


def resumed(model: PreTrainedModel, optimizer: AdamWBF16, folder: Path, full: bool) -> tuple[Any, AdamWBF16]:
    """Save, and return a new model and optimizer that loaded what was saved."""
    options = StateDictOptions(full_state_dict=full, cpu_offload=full, broadcast_from_rank0=full)
    weights, state = get_state_dict(model, optimizer, options=options)
    again = policy(sharded=True)
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    loaded = AdamWBF16(again.parameters(), lr=1e-3)
    if full:
        if torch.distributed.get_rank() == 0:
            torch.save((weights, state), folder / "state.pt")
        torch.distributed.barrier()
        weights, state = torch.load(folder / "state.pt", weights_only=False)
    else:
        checkpoint.save({"weights": weights, "state": state}, checkpoint_id=str(folder / "sharded"))
        weights, state = get_state_dict(again, loaded, options=options)
        read = {"weights": weights, "state": state}
        checkpoint.load(read, checkpoint_id=str(folder / "sharded"))
        weights, state = read["weights"], read["state"]
    set_state_dict(again, loaded, model_state_dict=weights, optim_state_dict=state, options=options)
    return again, loaded


def two_ranks(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    alone, model = policy(sharded=False), policy(sharded=True)
    expected, optimizer = AdamWBF16(alone.parameters(), lr=1e-3), AdamWBF16(model.parameters(), lr=1e-3)
    train(alone, expected, STEPS)
    train(model, optimizer, STEPS)
    assert all(map(torch.equal, everything(model, optimizer), everything(alone, expected)))
    for full in (True, False):
        again, loaded = resumed(model, optimizer, folder, full)
        assert all(map(torch.equal, everything(again, loaded), everything(model, optimizer)))
        train(again, loaded, STEPS)
        train(model, optimizer, STEPS)
        assert all(map(torch.equal, everything(again, loaded), everything(model, optimizer)))
    # Threads of gloo outlive destroy_process_group() here. One that frees its last tensor while Python ends aborts.
    os._exit(0)


@pytest.mark.slow
def test_a_sharded_state_is_saved_and_continued_to_the_bit(tmp_path: Path) -> None:
    multiprocessing.spawn(two_ranks, (tmp_path,), nprocs=2)
