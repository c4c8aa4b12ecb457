"""`grpo_recipes.train` with `vllm_mode: server`, and a stub in the place of the client: no vLLM, no GPU.

The stub writes each prompt's last eight tokens and the number of the completion, and records what it was asked for.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trl.generation import vllm_generation

from grpo_recipes import train
from grpo_recipes.checks import packages


class StubServer:
    """The methods of TRL's `VLLMClient` that `VLLMGeneration` calls."""

    def __init__(self, **settings: Any):
        self.log = Path(os.environ["STUB_LOG"])

    def init_communicator(self, device: Any) -> None:
        self._write({"rank": os.environ["RANK"]})

    def update_named_params(self, metadata: Sequence[Any], named_params: Iterable[tuple[str, Any]]) -> None:
        self._write({"weights": {name: float(value.double().sum()) for name, value in named_params}})

    def reset_prefix_cache(self) -> None:
        pass

    def generate(self, prompts: list[list[int]], n: int, **sampling: Any) -> dict[str, Any]:
        self._write({"prompts": prompts, "n": n})
        completions = [[*prompt[-8:], 20 + number] for prompt in prompts for number in range(n)]
        return {
            "prompt_ids": prompts,
            "completion_ids": completions,
            "logprobs": [[[0.0]] * len(ids) for ids in completions],
        }

    def _write(self, entry: dict[str, Any]) -> None:
        with self.log.open("a") as file:
            file.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    vllm_generation.is_vllm_available = packages.is_vllm_available = lambda: True
    vllm_generation.VLLMClient = StubServer
    train.leave(train.main())
