"""`grpo_recipes.train` with vLLM on a CPU; with `BARE=1` vLLM gets what plain TRL sends."""

import os

from grpo_recipes import train
from grpo_recipes.training import reference
from tests.vllm import cpu

if __name__ == "__main__":
    cpu.replace_in_vllm()
    cpu.replace_in_trl()
    if os.environ.get("BARE"):
        reference.send_policy = lambda trainer: None
    train.leave(train.main())
