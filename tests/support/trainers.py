"""The one factory of the tests' trainers: TRL's or ours, on a CPU, which write nothing but their output folder."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase
from trl import GRPOConfig
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from tests.support import device

SETTINGS: dict[str, Any] = {
    "use_cpu": device.NAME != "cuda",
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "gradient_checkpointing": False,
}
"""TRL arguments of every trainer of the tests, unless a test replaces one."""

OUR_OPTIONS = (
    "advantages",
    "generation",
    "generation_check",
    "kl_estimator",
    "micro_batching",
    "optimizer_cls_and_kwargs",
    "reference",
    "sampling",
    "tool_limits",
)
"""Parameters that our trainer adds to TRL's."""

TRL_PARAMETERS = ("environment_factory", "rollout_func", "tools")
"""Parameters of TRL's trainer that few tests need."""


def arguments(folder: Path | str, **settings: Any) -> GRPOConfig:
    """Return TRL's arguments with our defaults for tests, for a run in `folder`."""
    return GRPOConfig(output_dir=str(folder), **{**SETTINGS, **settings})


def make_trainer(
    cls: Callable[..., TRLGRPOTrainer],
    model: Any,
    args: GRPOConfig | Path | str,
    *,
    rewards: Any,
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase | None = None,
    peft_config: Any = None,
    eval_dataset: Dataset | None = None,
    **settings: Any,
) -> Any:
    """Build a trainer of `cls`.

    Args:
        cls: TRL's `GRPOTrainer`, ours, a subclass of either, or a function that builds ours.
        model: Model, or path of a model.
        args: TRL's arguments, or the output folder, for which they are made from `settings`.
        rewards: One reward function or a list of them.
        rows: Training dataset.
        tokenizer: Tokenizer, or None if the trainer loads the one of `model`.
        peft_config: Configuration of a new adapter.
        eval_dataset: Dataset of the evaluations.
        settings: TRL arguments and parameters, and options that only our trainer has. TRL's trainer gets the former, so
            that one call can build both sides of a comparison.
    """
    ours = {key: settings.pop(key) for key in OUR_OPTIONS if key in settings}
    theirs = {key: settings.pop(key) for key in TRL_PARAMETERS if key in settings}
    if not isinstance(args, GRPOConfig):
        args = arguments(args, **settings)
    elif settings:
        raise TypeError(f"{sorted(settings)} would be lost: put them into `args`")
    trainer = cls(
        model=model,
        reward_funcs=rewards,
        args=args,
        train_dataset=rows,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        peft_config=peft_config,
        **theirs,
        **(ours if not isinstance(cls, type) or issubclass(cls, GRPOTrainer) else {}),
    )
    device.adopt(trainer)
    return trainer


def one_batch(trainer: Any, prompts: int = 2) -> dict[str, Any]:
    """Generate and score completions of the first prompts as a training does, without a step, and return the batch."""
    trainer.model.train()
    rows = [row for row in trainer.train_dataset.select(range(prompts)) for _ in range(trainer.num_generations)]
    return trainer._generate_and_score_completions(copy.deepcopy(rows))
