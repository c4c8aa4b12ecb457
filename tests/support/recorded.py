"""The training phase of TRL's trainer and of ours on recorded completions, driven micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from tests.support import tiny, trainers

PAD, EOS, WORDS = 0, 1, 40
"""Ids of padding and of the end, and how many words (`t0`, `t1`, ...) there are."""
MAX_COMPLETION_LENGTH = 12


def tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer of the words. The first two words are padding and the end token."""
    return tiny.word_tokenizer([f"t{n}" for n in range(WORDS)])


def model(config_class: type[PreTrainedConfig] = Qwen2Config, seed: int = 0, **config: Any) -> PreTrainedModel:
    """Build a policy over the words."""
    sizes = {"vocab_size": WORDS, "intermediate_size": 48, "attn_implementation": "sdpa"}
    return tiny.policy(config_class, seed, **{**sizes, **config})


@dataclass
class Recording:
    """Prompts with their completions and rewards, one generation batch."""

    prompts: list[list[int]]
    completions: list[list[list[int]]]
    """By prompt."""
    rewards: list[list[float]]
    """By prompt."""
    masks: list[list[list[int]]] | None = None
    """By prompt, 1 for each token of the policy and 0 for each of a tool, or None if no tool was called."""

    @classmethod
    def random(
        cls, prompts: int = 4, group: int = 4, seed: int = 0, zero: Sequence[int] = (), longest: int = 20
    ) -> Recording:
        """Uneven lengths, a one-token prompt and a one-token completion; groups in `zero` get equal rewards."""
        generator = torch.Generator().manual_seed(seed)

        def draw(low: int, high: int, size: int) -> list[int]:
            return torch.randint(low, high, (size,), generator=generator).tolist()

        lengths = [1, *draw(2, longest, prompts - 1)]
        texts = [[2 + index, *draw(2, WORDS, length - 1)] for index, length in enumerate(lengths)]
        sizes = [draw(1, MAX_COMPLETION_LENGTH + 1, group) for _ in range(prompts)]
        sizes[-1][0] = 1
        completions = [[[*draw(2, WORDS, size - 1), EOS] for size in row] for row in sizes]
        rewards = [[0.5] * group if p in zero else [float(x) for x in draw(0, 5, group)] for p in range(prompts)]
        return cls(texts, completions, rewards)

    def with_tools(self, seed: int = 0) -> Recording:
        """Return the recording with tool results in its completions: in most rows, also at the end, and never first."""
        generator = torch.Generator().manual_seed(seed)
        masks = []
        for group in self.completions:
            # Runs of 1 to 4 tokens that are the policy's, the tool's, the policy's, and so on.
            runs = [torch.randint(1, 5, (MAX_COMPLETION_LENGTH,), generator=generator).tolist() for _ in group]
            values = [[1 - place % 2 for place, size in enumerate(row) for _ in range(size)] for row in runs]
            masks.append([mask[: len(ids)] for mask, ids in zip(values, group, strict=True)])
        return replace(self, masks=masks)

    @property
    def group(self) -> int:
        """The number of completions of each prompt."""
        return len(self.completions[0])

    def texts(self) -> list[str]:
        """Return the prompts as text."""
        return [" ".join(f"t{token}" for token in prompt) for prompt in self.prompts]

    def dataset(self) -> Dataset:
        """Return the table of the prompts."""
        return Dataset.from_dict({"prompt": self.texts()})

    def rows(self, rank: int = 0, ranks: int = 1) -> list[dict[str, str]]:
        """Return the rows that the data loader gives to one rank."""
        rows = [{"prompt": text} for text in self.texts() for _ in range(self.group)]
        share = len(rows) // ranks
        return rows[rank * share : (rank + 1) * share]

    def rollout(self, prompts: list[str], trainer: TRLGRPOTrainer) -> dict[str, Any]:
        """Return the recorded completions in order, for whichever rank calls: TRL's `rollout_func`."""
        texts = self.texts()
        before = trainer.accelerator.process_index * len(prompts)
        found = [(texts.index(prompt), (before + row) % self.group) for row, prompt in enumerate(prompts)]
        output = {
            "prompt_ids": [self.prompts[prompt] for prompt, _ in found],
            "completion_ids": [self.completions[prompt][member] for prompt, member in found],
            "logprobs": None,
            "recorded": [self.rewards[prompt][member] for prompt, member in found],
        }
        if self.masks is not None:
            output["env_mask"] = [self.masks[prompt][member] for prompt, member in found]
        return output


def recorded_reward(recorded: Sequence[float], **_: Any) -> list[float]:
    """Return the reward that was recorded with each completion."""
    return list(recorded)


def make_trainer(
    cls: type[TRLGRPOTrainer],
    recording: Recording,
    policy: PreTrainedModel,
    folder: Path,
    peft_config: Any = None,
    **config: Any,
) -> TRLGRPOTrainer:
    """Build a trainer that generates what was recorded, with its files in `folder`."""
    if peft_config is not None:
        config.setdefault("reference", "base")  # the reference that TRL takes for a new adapter, whatever its start
    if config.get("beta"):  # TRL loads the reference from the path of the policy
        policy.save_pretrained(folder / "policy")
        policy.config._name_or_path = str(folder / "policy")
    trainer = trainers.make_trainer(
        cls,
        policy,
        folder / "run",
        rewards=recorded_reward,
        rows=recording.dataset(),
        tokenizer=tokenizer(),
        peft_config=peft_config,
        **{
            "num_generations": recording.group,
            "max_completion_length": MAX_COMPLETION_LENGTH,
            "logging_steps": 1,
            **config,
        },
    )
    trainer.rollout_func = recording.rollout
    return trainer


def moved(state: dict[str, Tensor], seed: int, size: float = 0.05) -> dict[str, Tensor]:
    """Weights after a stand-in for an optimizer step."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: value + size * torch.randn(value.shape, generator=generator).to(value.device)
        for name, value in state.items()
    }


def gradients(trainer: TRLGRPOTrainer, rows: list[dict[str, str]], generations: int = 1) -> list[dict[str, Tensor]]:
    """Return the gradient of each optimizer step of `generations` generation batches. The policy moves in between."""
    args = trainer.args
    torch.manual_seed(0)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    steps = []
    for micro_step in range(generations * args.steps_per_generation * args.num_iterations):
        inputs = trainer._prepare_inputs(rows)
        trainer.compute_loss(trainer.model, inputs).backward()
        trainer._step += 1
        if trainer._step % args.gradient_accumulation_steps == 0:
            named = trainer.model.named_parameters()
            steps.append({name: p.grad.clone() for name, p in named if p.grad is not None})
            trainer.model.zero_grad()
            trained = {name: p.detach() for name, p in trainer.model.named_parameters() if p.requires_grad}
            trainer.model.load_state_dict(moved(trained, seed=micro_step), strict=False)
    return steps


def largest_gap(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> float:
    """Return the largest difference between two gradients, relative to the largest entry of its tensor.

    Steps and parameters of both sides must be the same.
    """
    assert len(ours) == len(theirs) > 0
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()
        # A tensor whose gradient is zero but for rounding is compared with the step's largest entry.
        floor = 1e-3 * max(float(value.abs().max()) for value in other.values())
        for name, value in other.items():
            scale = max(float(value.abs().max()), floor, 1e-12)
            worst = max(worst, float((mine[name] - value).abs().max()) / scale)
    return worst


def compare(recording: Recording, folder: Path, build: Callable[[], PreTrainedModel] = model, **config: Any) -> float:
    """`largest_gap` of our trainer and TRL's under one configuration."""
    generations = config.pop("generations", 1)
    ours = make_trainer(GRPOTrainer, recording, build(), folder, **config)
    theirs = make_trainer(TRLGRPOTrainer, recording, build(), folder, **config)
    for trainer in (ours, theirs):
        if trainer.ref_model is not None:
            trainer.ref_model.load_state_dict(moved(build().state_dict(), seed=99))
    rows = recording.rows()
    return largest_gap(gradients(ours, rows, generations), gradients(theirs, rows, generations))
