"""The command that trains a recipe, in each of the processes that a launcher starts.

    accelerate launch --config_file accelerate_configs/ddp.yaml -m grpo_recipes.train --config recipes/x.yaml
    python -m grpo_recipes.train --config recipes/x.yaml [--key value ...]

`grpo_recipes.run.train` is what it does. Its imports take seconds, so this file first handles Ctrl-C and prepares the
libraries.
"""

from grpo_recipes.process.signals import leave_on_interrupt, raise_on_interrupt
from grpo_rewards.startup import prepare_libraries

if __name__ == "__main__":  # before the imports that take seconds
    leave_on_interrupt()
    prepare_libraries()

from grpo_recipes.run.endings import leave
from grpo_recipes.run.train import main

if __name__ == "__main__":
    raise_on_interrupt()
    leave(main())
