"""Files of a run, written without training. Metrics are those of a healthy run, except where a test replaces them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

STEPS = range(1, 41)
NOISE = 0.01


def ramp(start: float, end: float) -> Callable[[float], float]:
    """Return a metric that moves evenly from `start` to `end` with the share of the run that is over."""
    return lambda over: start + (end - start) * over


HEALTHY: dict[str, Callable[[float], float]] = {
    "reward": ramp(0.8, 2.2),
    "rewards/gsm8k_correctness/mean": ramp(0.5, 1.5),
    "rewards/gsm8k_correctness/std": ramp(0.9, 0.8),
    "rewards/gsm8k_correctness/parsed": ramp(0.7, 0.9),
    "rewards/tag_presence/mean": ramp(0.3, 0.7),
    "rewards/tag_presence/std": ramp(0.4, 0.2),
    "kl": ramp(0.0, 0.08),
    "entropy": ramp(0.6, 0.3),
    "frac_reward_zero_std": ramp(0.1, 0.4),
    "completions/mean_length": ramp(100, 140),
    "completions/clipped_ratio": ramp(0.02, 0.05),
    "clip_ratio/region_mean": ramp(0.0, 0.01),
    "passes/1/effective_sample_size": ramp(1.0, 1.0),
    "passes/2/effective_sample_size": ramp(0.98, 0.96),
    "passes/1/clip_share": ramp(0.0, 0.0),
    "passes/2/clip_share": ramp(0.0, 0.02),
    "grad_norm": ramp(0.5, 0.3),
    "num_tokens": ramp(0, 400_000),
    "learning_rate": ramp(1e-5, 0.0),
    "step_time": ramp(2.0, 2.0),
    "updates/changed": ramp(0.05, 0.04),
    "updates/expected": ramp(0.05, 0.04),
}
RECIPE = {"model_name_or_path": "tiny", "max_completion_length": 256, "num_generations": 4, "beta": 0.04}
CONFIG = {"max_completion_length": 256, "num_generations": 4, "beta": 0.04}
REWARDS = [
    {"name": "gsm8k_correctness", "source": "gsm8k_correctness", "weight": 1.0, "kind": "correctness"},
    {"name": "tag_presence", "source": "tag_presence", "weight": 1.0, "kind": "format"},
]


def healthy_completions() -> list[dict[str, Any]]:
    """Return groups of four at four steps: right and wrong answers, no two of them equal."""
    return [
        {
            "step": step,
            "prompt": [{"role": "user", "content": f"question {step}.{prompt}"}],
            "completion": [{"role": "assistant", "content": f"<answer>{member}</answer> <b>{step}</b>"}],
            "gsm8k_correctness": 2.0 * (member == 0),
            "tag_presence": 0.8,
            "advantage": 1.5 if member == 0 else -0.5,
        }
        for step in (10, 20, 30, 40)
        for prompt in range(2)
        for member in range(4)
    ]


TOOL_METRICS: dict[str, Callable[[float], float]] = {
    "tools/call_frequency": ramp(0.8, 1.2),
    "tools/failure_frequency": ramp(0.2, 0.1),
    "tools/turns": ramp(1.8, 2.2),
    "tools/rows_with_calls": ramp(0.6, 0.8),
    "tools/rows_at_limit": ramp(0.05, 0.02),
    "tools/rows_out_of_budget": ramp(0.05, 0.06),
    "tools/tokens_share": ramp(0.3, 0.4),
    "tools/unknown/calls": ramp(0.02, 0.0),
    "tools/add/calls": ramp(0.7, 1.0),
    "tools/add/failures": ramp(0.02, 0.01),
    "tools/add/mistakes": ramp(0.1, 0.02),
    "tools/add/seconds": ramp(0.01, 0.02),
    "tools/find/calls": ramp(0.1, 0.2),
}
"""Metrics of a healthy run with two tools."""


def tool_completions(
    calls: Callable[[int, int], int] = lambda step, member: member % 3,
    pay: Callable[[int, int], float] = lambda step, member: 2.0 * (member == 0),
    reward: str = "gsm8k_correctness",
) -> list[dict[str, Any]]:
    """Return groups of four at four steps, with a number of calls and a reward by step and member."""
    rows = []
    for step in range(10, 41, 10):
        for prompt in range(2):
            for member in range(4):
                asked = {"role": "user", "content": f"question {step}.{prompt}"}
                messages = tool_messages(calls(step, member), f"<answer>{member}</answer> <b>{step}</b>")
                scores = {reward: pay(step, member), "advantage": 0.5}
                rows.append({"step": step, "prompt": [asked], "completion": messages, **scores})
    return rows


def tool_messages(calls: int, answer: str) -> list[dict[str, Any]]:
    """Return a completion with some calls, one per turn, and an answer."""
    messages: list[dict[str, Any]] = []
    for number in range(calls):
        function = {"name": "add", "arguments": json.dumps({"a": 1, "b": number})}
        called = [{"type": "function", "function": function}]
        messages += [
            {"role": "assistant", "content": "I add.", "tool_calls": called},
            {"role": "tool", "name": "add", "content": str(1 + number)},
        ]
    return [*messages, {"role": "assistant", "content": answer}]


def write_run(
    folder: Path,
    metrics: dict[str, Callable[[float], float] | None] | None = None,
    *,
    rewards: list[dict[str, Any]] | None = None,
    completions: list[dict[str, Any]] | None = None,
    evaluations: dict[str, dict[str, Any]] | None = None,
    seed: int = 0,
) -> Path:
    """Write a run in which `metrics` replace healthy ones (None: not logged), with noise of 1 % on each."""
    generator = random.Random(seed)
    curves = {key: curve for key, curve in {**HEALTHY, **(metrics or {})}.items() if curve is not None}
    history = [
        {"step": step, **{key: curve(step / len(STEPS)) * generator.gauss(1, NOISE) for key, curve in curves.items()}}
        for step in STEPS
    ]
    (folder / "completions").mkdir(parents=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history, "global_step": len(STEPS)}))
    record = {"recipe": RECIPE, "config": CONFIG, "rewards": REWARDS if rewards is None else rewards}
    record["versions"] = {"trl": "1.16.0"}
    (folder / "run.json").write_text(json.dumps(record))
    table = pd.DataFrame(healthy_completions() if completions is None else completions)
    for step, rows in table.groupby("step"):
        rows.to_parquet(folder / "completions" / f"completions_{step:05d}.parquet")
    for label, summary in (evaluations or {}).items():
        (folder / "evaluations" / label).mkdir(parents=True)
        (folder / "evaluations" / label / "evaluation.json").write_text(json.dumps(summary))
    return folder
