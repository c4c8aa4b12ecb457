"""`grpo_recipes.train`, which also writes down what the trained weights and their optimizer's state are stored in."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from grpo_recipes import GRPOTrainer, train
from grpo_recipes.run import build


class Reading(GRPOTrainer):
    def train(self, *args: Any, **kwargs: Any) -> Any:
        result = super().train(*args, **kwargs)
        seen = {
            "weights": sorted({str(weights.dtype) for weights in self.model.parameters() if weights.requires_grad}),
            "updated": sorted({str(weights.dtype) for weights in updated(self.optimizer.optimizer)}),
            "state": sorted({str(value.dtype) for value in states(self.optimizer.optimizer)}),
        }
        Path(self.args.output_dir, f"dtypes-rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(seen))
        if not self.is_deepspeed_enabled:
            whole = [local(value) for value in states(self.optimizer.optimizer)]
            torch.save(whole, Path(self.args.output_dir, f"state-rank{os.environ.get('RANK', '0')}.pt"))
        return result


def updated(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that the optimizer's step updates: DeepSpeed's own copies, or the weights themselves."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups"):  # ZeRO-3, ZeRO-2
        if hasattr(optimizer, name):
            yield from getattr(optimizer, name)
            return
    yield from (weights for group in optimizer.param_groups for weights in group["params"])


def states(optimizer: Any) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor) and value.dim())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor. Low bits become integers, because some are those of a NaN."""
    part = getattr(tensor, "_local_tensor", tensor).detach().clone()
    return part.view(torch.int16) if part.dtype == torch.bfloat16 else part


if __name__ == "__main__":
    build.GRPOTrainer = Reading  # type: ignore[misc]
    train.leave(train.main())
