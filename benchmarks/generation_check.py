"""Cost of the check that compares generator and trainer, as a share of the step that it belongs to.

    python benchmarks/generation_check.py                   # two minutes of CPU time
    python benchmarks/generation_check.py --loops stock --steps 6

The steps are complete steps of benchmarks/step.py (8 prompts × 8 completions with GSM8K's lengths), with LoRA. The
share is the CPU time inside the check divided by that of the step around it, within one run, because the difference of
two runs is smaller than their noise. Two rows are compared, and eight in the first four steps of a launch. Hypotheses
are computed only where a run differs from its policy, which these do not. With transformers' own loop the time of
recording is measured where it happens. In group decoding it is measured by recording everything once more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import step

from grpo_recipes import GRPOTrainer
from grpo_recipes.generation import generator_check as generation_check
from grpo_recipes.generation import groups
from grpo_recipes.generation.generator_check import GenerationCheck
from grpo_recipes.generation.recorder import Recorder
from grpo_recipes.generation.sampling_settings import ProcessorCheck

LOOPS = {"groups": "auto", "stock": "off"}


class Clock:
    """Clock of the CPU seconds inside some functions, outermost calls only."""

    def __init__(self) -> None:
        self.spent, self.depth = 0.0, 0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call` with its time added to this clock."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.depth += 1
            start = time.process_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.spent += time.process_time() - start

        return run


def shares(size: str, workload: str, loop: str, steps: int) -> Iterator[str]:
    """Return the rows of the table: a kind of step, the CPU time of its check and of the step, and the share."""
    clock, again, choose = Clock(), Clock(), groups.GroupLoop.choose
    parts_of_check = [
        (GenerationCheck, "__call__"),
        (GenerationCheck, "check_processors"),
        (ProcessorCheck, "_compare"),
        (Recorder, "__call__"),
    ]
    untimed = [getattr(owner, name) for owner, name in parts_of_check]
    for owner, name in parts_of_check:
        setattr(owner, name, clock.timed(getattr(owner, name)))

    def recording_again(batch: groups.GroupLoop, logits: Tensor) -> Tensor:
        places = [place for place, row in enumerate(batch.generating) if row in batch.recorded]
        if places:
            again.timed(
                lambda: (logits[places] / batch.turn.temperature).log_softmax(-1).gather(1, logits[places, :1].long())
            )()
        return choose(batch, logits)

    groups.GroupLoop.choose = recording_again
    try:
        config = {"gradient_checkpointing": False, "loss_type": "grpo", "generation": LOOPS[loop]}
        config["generation_kwargs"] = {"suppress_tokens": [step.EOS]}
        run = step.Trainer(GRPOTrainer, step.policy(size, tempfile.mkdtemp()), True, True, **config)
        check = run.trainer._generation_check
        run.step(step.Batch.draw("d", 0))  # the first step warms up, and decides whether groups are decoded
        for kind, batches in (("from the fifth on", generation_check.FIRST), ("the first four", 0)):
            parts, wholes = [], []
            for number in range(steps):
                check.batches = batches  # it decides how many rows are compared
                run.trainer.state.global_step += 1
                clock.spent = again.spent = 0.0
                run.step(step.Batch.draw(workload, number))
                parts.append(clock.spent + again.spent)
                wholes.append(run.measured.whole[-1] - again.spent)
            part, whole = statistics.median(parts), statistics.median(wholes)
            yield f"| {size} | {workload} | {loop} | {kind} | {part:.3f} | {whole:.2f} | {part / whole:.2%} |"
    finally:
        groups.GroupLoop.choose = choose
        for (owner, name), method in zip(parts_of_check, untimed, strict=True):
            setattr(owner, name, method)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["small"], choices=step.MODELS)
    parser.add_argument("--workloads", nargs="+", default=["a"], choices=step.WORKLOADS)
    parser.add_argument("--loops", nargs="+", default=list(LOOPS), choices=LOOPS)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | workload | loop | a step | the check, CPU s | the step, CPU s | share |")
    print("|---|---|---|---|---|---|---|")
    for size in args.models:
        for workload in args.workloads:
            for loop in args.loops:
                for row in shares(size, workload, loop, args.steps):
                    print(row, flush=True)


if __name__ == "__main__":
    main()
