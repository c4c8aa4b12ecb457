"""Reward functions for GRPO trainers: pure, deterministic, bounded in time, importable without torch."""

from grpo_rewards.correctness import gsm8k_correctness, math_correctness
from grpo_rewards.format_tags import tag_count, tag_presence, tag_structure, well_formed
from grpo_rewards.registry import BuiltReward, RewardSpecError, build_rewards
from grpo_rewards.shaping import group_length

__all__ = [
    "BuiltReward",
    "RewardSpecError",
    "build_rewards",
    "group_length",
    "gsm8k_correctness",
    "math_correctness",
    "tag_count",
    "tag_presence",
    "tag_structure",
    "well_formed",
]
__version__ = "0.1.0"
