"""Logs of simulated runs with the noise of real ones: binomial rewards, log-normal norms, heavy-tailed KL."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

Curve = Callable[[float], float]
"""Value by the share of the run that is over."""

CORRECT, TAGS = 2.0, 1.0
"""Pay of a right answer and of its format."""


def line(start: float, end: float) -> Curve:
    """Return a curve that moves evenly."""
    return lambda over: start + (end - start) * over


def constant(value: float) -> Curve:
    """Return a curve that does not move."""
    return lambda over: value


def saturating(start: float, end: float, by: float = 0.3) -> Curve:
    """Return a curve that has moved almost to its end when a share `by` of the run is over."""
    return lambda over: end + (start - end) * math.exp(-3 * over / by)


SKILL, TAG_CHANCE, LENGTH = line(-1.5, 2.0), line(0.4, 0.95), line(120, 140)
CLIPPED, SAMPLE_SIZE, NORM, KL = line(0.0, 0.02), line(0.99, 0.97), line(0.5, 0.3), line(0.0, 0.05)


@dataclass(frozen=True)
class Simulation:
    """A run on prompts of different difficulty. Its skill is the log-odds of a right answer to the median prompt."""

    skill: Curve = SKILL
    tags: Curve = TAG_CHANCE
    """Probability of the format."""
    length: Curve = LENGTH
    held_out_skill: Curve | None = None
    """Skill on held-out problems, or None for that of training."""
    clipped: Curve = CLIPPED
    """Clip share of later passes."""
    sample_size: Curve = SAMPLE_SIZE
    """Effective sample size of later passes."""
    norm: Curve = NORM
    norm_spread: float = 0.5
    """Standard deviation of the logarithm of the gradient norm."""
    kl: Curve = KL
    spikes: Sequence[int] = ()
    """Steps with a gradient norm of 30 times the usual one."""
    tags_pay: float = TAGS
    steps: int = 120
    prompts: int = 8
    group: int = 8
    passes: int = 1
    logging_steps: int = 1
    eval_steps: int = 15
    eval_problems: int = 300
    difficulty: float = 1.5
    """Standard deviation of the prompts' log-odds."""
    metrics: dict[str, Curve | None] = field(default_factory=dict)
    """Metrics in place of the simulated ones (None: not logged)."""
    recipe: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path, seed: int) -> Path:
        """Write the run as a folder with `run.json` and `trainer_state.json`."""
        folder.mkdir(parents=True)
        state = {"log_history": self.history(seed), "global_step": self.steps, "max_steps": self.steps}
        (folder / "trainer_state.json").write_text(json.dumps(state))
        rewards = [
            {"name": "right", "source": "x", "weight": 1.0, "kind": "correctness", "highest_pay": CORRECT},
            {"name": "tags", "source": "y", "weight": 1.0, "kind": "format", "highest_pay": self.tags_pay},
        ]
        config = {"max_completion_length": 512, "beta": 0.04, "gradient_accumulation_steps": 1} | self.config
        config |= {"steps_per_generation": 1, "num_iterations": self.passes}
        (folder / "run.json").write_text(json.dumps({"recipe": self.recipe, "config": config, "rewards": rewards}))
        return folder

    def history(self, seed: int) -> list[dict[str, Any]]:
        """Return the log entries, with training metrics averaged over `logging_steps` as TRL does."""
        draw = random.Random(seed)
        history: list[dict[str, Any]] = []
        waiting: list[dict[str, float]] = []
        for step in range(1, self.steps + 1):
            waiting.append(self._entry(step, draw))
            if step % self.logging_steps == 0:
                keys = dict.fromkeys(key for entry in waiting for key in entry)
                entry = {key: fmean(one[key] for one in waiting if key in one) for key in keys}
                for key in ("grad_norm", "num_tokens"):  # not means
                    last = [one[key] for one in waiting if key in one][-1:]
                    entry |= dict.fromkeys([key] * len(last), *last)
                history.append({"step": step, **entry})
                waiting = []
            if step % self.eval_steps == 0:
                history.append({"step": step, "eval_reward": self._evaluate(step / self.steps, draw)})
        return history

    def _entry(self, step: int, draw: random.Random) -> dict[str, float]:
        over, number = step / self.steps, 1 + (step - 1) % self.passes
        entry = self._updated(step, over, number, draw)
        if number == 1:
            entry |= self._generated(step, over, draw)
        for key, curve in self.metrics.items():
            entry.pop(key, None)
            if curve is not None:
                entry[key] = curve(over)
        return entry

    def _generated(self, step: int, over: float, draw: random.Random) -> dict[str, float]:
        """Return the metrics of a generation batch."""
        right, tags, flat = [], [], 0
        for _ in range(self.prompts):
            chance = 1 / (1 + math.exp(-self.skill(over) - draw.gauss(0, self.difficulty)))
            members = [CORRECT * (draw.random() < chance) for _ in range(self.group)]
            formats = [self.tags_pay * (draw.random() < self.tags(over)) for _ in range(self.group)]
            totals = {one + other for one, other in zip(members, formats, strict=True)}
            right, tags, flat = right + members, tags + formats, flat + (len(totals) == 1)
        rows = len(right)
        lengths = [self.length(over) * draw.lognormvariate(0, 0.4) for _ in range(rows)]
        return {
            "reward": fmean(right) + fmean(tags),
            "reward_std": pstdev([one + other for one, other in zip(right, tags, strict=True)]),
            "rewards/right/mean": fmean(right),
            "rewards/right/std": pstdev(right),
            "rewards/right/parsed": 0.9,
            "rewards/tags/mean": fmean(tags),
            "rewards/tags/std": pstdev(tags),
            "frac_reward_zero_std": flat / self.prompts,
            "completions/mean_length": fmean(lengths),
            "completions/clipped_ratio": sum(length > 512 for length in lengths) / rows,
            "num_tokens": float(step * rows * 200),
        }

    def _updated(self, step: int, over: float, number: int, draw: random.Random) -> dict[str, float]:
        """Return the metrics of an optimizer step."""
        is_later = number > 1
        clipped = self.clipped(over) * draw.uniform(0.5, 1.5) if is_later else 0.0
        entry = {
            "clip_ratio/region_mean": min(1.0, clipped),
            "kl": self.kl(over) * draw.lognormvariate(0, 1.0),
            "entropy": 0.5 - 0.2 * over + draw.gauss(0, 0.02),
            "grad_norm": self.norm(over) * draw.lognormvariate(0, self.norm_spread),
        }
        if step in self.spikes:
            entry["grad_norm"] *= 30
        if self.passes > 1:
            size = self.sample_size(over) - draw.uniform(0, 0.01) if is_later else 1.0
            entry |= {f"passes/{number}/effective_sample_size": size, f"passes/{number}/clip_share": min(1.0, clipped)}
        return entry

    def _evaluate(self, over: float, draw: random.Random) -> float:
        skill = (self.held_out_skill or self.skill)(over)
        paid = 0.0
        for _ in range(self.eval_problems):
            chance = 1 / (1 + math.exp(-skill - draw.gauss(0, self.difficulty)))
            paid += CORRECT * (draw.random() < chance) + self.tags_pay * (draw.random() < self.tags(over))
        return paid / self.eval_problems


BASE = Simulation()

HEALTHY: dict[str, Simulation] = {
    "rising": BASE,
    "from nothing": replace(BASE, skill=line(-5, 0)),
    "solved in the end": replace(BASE, skill=line(-1, 4), tags=saturating(0.4, 0.97), difficulty=1.0),
    "slow": replace(BASE, skill=line(-0.6, 0.6), tags=line(0.7, 0.9), steps=200),
    "nearly solved from the start": replace(BASE, skill=line(2.5, 2.8), tags=constant(0.97), difficulty=0.5),
    "small batches": replace(BASE, prompts=1, group=8),
    "four rows": replace(BASE, prompts=1, group=4, steps=60),
    "longer with better answers": replace(BASE, length=line(100, 220)),
    "no evaluation": replace(BASE, eval_steps=1000),
    "one evaluation": replace(BASE, eval_steps=100),
    "four small evaluations": replace(BASE, eval_steps=30, eval_problems=100),
    "two steps": replace(BASE, steps=2),
    "six steps": replace(BASE, steps=6, eval_steps=2),
    "fifteen steps": replace(BASE, steps=15, eval_steps=5),
    "logged rarely": replace(BASE, logging_steps=10),
    "two passes": replace(BASE, passes=2),
    "three passes, logged rarely": replace(BASE, passes=3, logging_steps=9),
    "sequences of GSPO": replace(
        BASE, passes=2, clipped=constant(0.6), config={"importance_sampling_level": "sequence"}
    ),
    "heavy tails": replace(BASE, norm_spread=1.0, kl=line(0.02, 0.15)),
    "large first norms": replace(BASE, norm=lambda over: 15.0 if over < 0.05 else 0.4),
    "falling norms": replace(BASE, norm=lambda over: 5.0 * 0.02**over),
    "no KL": replace(BASE, metrics={"kl": None}, config={"beta": 0}),
    "constant columns": replace(
        BASE,
        tags=constant(1.0),
        metrics={"entropy": constant(0.3), "grad_norm": constant(1.0), "kl": constant(0.0)},
    ),
    "harder prompts as it learns": replace(
        BASE, skill=constant(0.0), held_out_skill=line(-1.5, 2), recipe={"sampling": "informative"}
    ),
    "ten steps": replace(BASE, steps=10, eval_steps=3),
    "four logged means": replace(BASE, logging_steps=30, eval_steps=30),
    "harder prompts, no evaluation": replace(
        BASE, skill=constant(0.0), eval_steps=1000, recipe={"sampling": "informative"}, tags=constant(0.9)
    ),
}
"""Runs in which nothing is wrong."""

PLANTED: dict[str, tuple[str, Simulation]] = {
    "held-out reward stays flat": (
        "overfitting",
        replace(BASE, held_out_skill=constant(-1.5), tags=constant(0.9), eval_problems=1000),
    ),
    "held-out reward falls": ("overfitting", replace(BASE, held_out_skill=line(1.0, -1.0), tags=constant(0.9))),
    "all solved in the last quarter": (
        "zero_variance",
        replace(BASE, skill=lambda over: 0.0 if over < 0.6 else 7.0, tags=lambda over: 0.7 if over < 0.6 else 1.0),
    ),
    "twice as long for nothing": (
        "length_without_gain",
        replace(BASE, skill=constant(0.0), tags=constant(0.9), length=line(100, 220), prompts=16, difficulty=0.5),
    ),
    "stale after many passes": ("clipped_tokens", replace(BASE, passes=4, clipped=line(0.1, 0.7))),
    "weights of few tokens": ("stale_tokens", replace(BASE, passes=4, sample_size=line(0.9, 0.4))),
    "three spikes": ("gradient_spikes", replace(BASE, spikes=(50, 51, 90), norm_spread=0.3)),
    "one spike": ("gradient_spikes", replace(BASE, spikes=(77,), norm_spread=0.2)),
    "plateau from a third on": (
        "plateau",
        replace(
            BASE, skill=saturating(-2, 0.3, by=0.2), tags=saturating(0.3, 0.95, by=0.2), prompts=16, difficulty=0.5
        ),
    ),
    "format pays a hundred times as much": ("dominant_reward", replace(BASE, tags_pay=20.0, tags=line(0.3, 0.9))),
}
"""Runs with a problem, and the check that finds it."""
