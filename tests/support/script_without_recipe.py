"""A training script without a recipe, for `accelerate launch`, which starts several times in one process.

Its arguments are a folder with `policy`, and a text for each start: the first gold, the number of steps, and what to
resume (a checkpoint, `true` or `none`).
"""

import sys
from pathlib import Path
from typing import Any

from datasets import Dataset

from grpo_recipes import GRPOTrainer
from grpo_rewards.errors import UserError
from tests.support import short_runs
from tests.support.tiny import byte_tokenizer


def same_as_gold(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """Differs inside a group, and with the gold."""
    return [float(len(set(text + gold))) for text, gold in zip(completions, answer, strict=True)]


def start(folder: Path, first_gold: int, steps: int, resume: str) -> None:
    golds = [str(first_gold + number) for number in range(16)]
    rows = Dataset.from_dict({"prompt": [f"{number} =" for number in range(16)], "answer": golds})
    args = short_runs.arguments(folder / "run", max_steps=steps, save_strategy="steps", save_steps=2)
    trainer = GRPOTrainer(
        model=str(folder / "policy"),
        reward_funcs=same_as_gold,
        args=args,
        train_dataset=rows,
        processing_class=byte_tokenizer(),
    )
    asked: str | bool = resume == "true" or (resume if resume != "none" else False)
    try:
        trainer.train(resume_from_checkpoint=asked)
        print(f"rank {args.process_index} went on from {trainer.checkpoints.resumed_from}")
    except UserError as error:
        print(f"rank {args.process_index} refused: {error}")


if __name__ == "__main__":
    for launch in sys.argv[2:]:
        first_gold, steps, resume = launch.split(" ", 2)
        start(Path(sys.argv[1]), int(first_gold), int(steps), resume)
