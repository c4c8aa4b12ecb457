"""Reward functions for GRPO trainers: pure, deterministic, bounded in time, importable without torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from grpo_rewards.built import BuiltReward, RewardSpecError
from grpo_rewards.format_tags import tag_count, tag_presence, tag_structure, well_formed
from grpo_rewards.length import group_length
from grpo_rewards.math.correctness import gsm8k_correctness, math_correctness
from grpo_rewards.registry import build_rewards

if TYPE_CHECKING:
    from grpo_rewards.choices import choice_correctness
    from grpo_rewards.ifeval import instructions
    from grpo_rewards.ngrams import repetition
    from grpo_rewards.programs import unit_tests
    from grpo_rewards.schema import json_schema
    from grpo_rewards.strings import string_match

__all__ = [
    "BuiltReward",
    "RewardSpecError",
    "build_rewards",
    "choice_correctness",
    "group_length",
    "gsm8k_correctness",
    "instructions",
    "json_schema",
    "math_correctness",
    "repetition",
    "string_match",
    "tag_count",
    "tag_presence",
    "tag_structure",
    "unit_tests",
    "well_formed",
]
__version__ = "0.1.0"

# Modules imported on first use, so that a run does not wait for rewards that it does not use.
_LAZY = {
    "choice_correctness": "grpo_rewards.choices",
    "instructions": "grpo_rewards.ifeval",
    "json_schema": "grpo_rewards.schema",
    "repetition": "grpo_rewards.ngrams",
    "string_match": "grpo_rewards.strings",
    "unit_tests": "grpo_rewards.programs",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
