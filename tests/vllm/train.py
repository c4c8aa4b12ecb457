"""`grpo_recipes.train` with vLLM on a CPU.

With `BARE=1` vLLM gets what plain TRL sends, and with `LOOP=trl` TRL's own tool loop runs.
"""

import os

from grpo_recipes import GRPOTrainer, train
from grpo_recipes.training import reference
from tests.vllm import cpu

if __name__ == "__main__":
    cpu.replace_in_vllm()
    cpu.replace_in_trl()
    if os.environ.get("BARE"):
        reference.send_policy = lambda trainer: None
    if os.environ.get("LOOP") == "trl":
        del GRPOTrainer._tool_call_loop
    train.leave(train.main())
