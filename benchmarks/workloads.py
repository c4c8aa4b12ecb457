"""Workloads of benchmarks/step.py and benchmarks/gpu.py: prompts, completions and rewards, drawn by a seed.

benchmarks/step.py describes them. This module needs numpy and torch only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

PROMPTS, GROUP = 8, 8
VOCABULARY, PAD, EOS = 2048, 0, 1


@dataclass(frozen=True)
class Batch:
    """Generation batch: prompts, with the completions and rewards of each."""

    prompts: list[list[int]]
    completions: list[list[list[int]]]
    rewards: list[list[float]]

    @classmethod
    def draw(cls, workload: str, seed: int) -> Batch:
        """Return the batch of a step."""
        random = np.random.default_rng(seed)
        prompts = np.clip(np.exp(random.normal(4.47, 0.36, PROMPTS)), 30, 160).astype(int)
        if workload == "e":
            prompts = random.integers(200, 501, PROMPTS)
        mean, spread = {"a": (4.4, 0.6), "e": (5.55, 0.55)}.get(workload, (4.79, 0.9))
        lengths = np.clip(np.exp(random.normal(mean, spread, (PROMPTS, GROUP))), 1, cap(workload)).astype(int)
        if workload == "d":
            prompts, lengths = np.full_like(prompts, 2), np.full_like(lengths, 128)
        rewards = random.normal(size=(PROMPTS, GROUP))
        if workload == "c":
            rewards[::2] = 1.0

        def tokens(length: int) -> list[int]:
            return random.integers(2, VOCABULARY, length).tolist()

        return cls(
            [tokens(length) for length in prompts],
            [[[*tokens(length - 1), EOS] for length in row] for row in lengths],
            rewards.tolist(),
        )

    @property
    def text(self) -> list[str]:
        """Return the prompts as text."""
        return [" ".join(f"t{token}" for token in prompt) for prompt in self.prompts]

    @property
    def longest(self) -> int:
        """Length of the longest completion."""
        return max(len(completion) for group in self.completions for completion in group)

    def advantages(self) -> list[float]:
        """Return TRL's advantages: unbiased z-scores in each group."""
        rewards = torch.tensor(self.rewards)
        centred = rewards - rewards.mean(1, keepdim=True)
        return (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten().tolist()


def cap(workload: str) -> int:
    """Return the length of the longest completion of a workload."""
    return 256 if workload == "a" else 1024
