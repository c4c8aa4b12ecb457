"""Figures and thresholds of every check, worked out by hand from logs of a few points.

Ten points have quarters of two. The default run spends a tenth of its tokens in each of ten steps. An expected result
is the step of a problem, `fine`, `no data` or `n/a`, and what its sentence has in this order.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from grpo_recipes.reports import diagnostics, tool_checks, update_checks
from grpo_recipes.reports.checking import Check, DoesNotApply, NoData
from grpo_recipes.reports.run import OutOfTime, Run, Sampled
from tests.support.logged_runs import logged, scored

RIGHT = {"name": "right", "kind": "correctness", "highest_pay": 1.0}
TAGS = {"name": "tags", "kind": "format", "highest_pay": 1.0}
OTHER = {"name": "other", "kind": "other"}
BOTH = {"rewards": [RIGHT, TAGS]}
INFORMATIVE = {"recipe": {"sampling": "informative"}}
CHECKS: dict[str, Check] = {check.__name__: check for check in diagnostics.CHECKS}

Metrics = dict[str, Sequence[float]]
Case = tuple[Metrics, dict[str, Any], str]


def flat(value: float, count: int = 10) -> list[float]:
    return [value] * count


def ramp(count: int, step: float = 1.0) -> list[float]:
    return [place * step for place in range(count)]


RISING = ramp(11, 0.1)[1:]  # from 0.15 to 0.95 by quarters
LENGTHS = ramp(11, 10.0)[1:]


def accuracy(before: tuple[float, float, float], after: tuple[float, float, float]) -> dict[str, Any]:
    shares = {"before": before, "after": after}
    found = {
        label: {"strict": dict(zip(("value", "low", "high"), share, strict=True))} for label, share in shares.items()
    }
    return {"evaluations": found}


BETTER = accuracy((0.4, 0.3, 0.5), (0.7, 0.6, 0.8))


def result(check: Check, run: Run) -> str:
    """Return what a check finds as text."""
    try:
        found = check(run)
    except NoData as reason:
        return f"no data: {reason}"
    except DoesNotApply as reason:
        return f"n/a: {reason}"
    return f"fine: {found}" if isinstance(found, str) else f"{found[0]}: {found[1]}"


def assert_found(name: str, case: Case) -> None:
    metrics, more, expected = case
    text = result(CHECKS[name], logged(metrics, **more))
    assert re.match(".*?".join(map(re.escape, expected.split(" … "))), text), (text, expected)


CLIP, SIZE = "clip_ratio/region_mean", "passes/{}/effective_sample_size"
MISMATCHED = f"{SIZE}_with_mismatch"
PLANNED = {"gradient_accumulation_steps": 4, "num_iterations": 1}


def config(**values: Any) -> dict[str, Any]:
    return {"config": values}


def clipped(one: float, two: float, of_all: float = 0.3) -> Metrics:
    return {CLIP: flat(of_all), "passes/1/clip_share": flat(one), "passes/2/clip_share": flat(two)}


def sizes(*passes: Sequence[float], mismatched: Sequence[float] = ()) -> Metrics:
    found = {SIZE.format(number): values for number, values in enumerate(passes, 1)}
    return {**found, **({MISMATCHED.format(1): mismatched} if mismatched else {})}


def norms(**changed: float) -> Metrics:
    """Return 20 gradient norms of 0.4, except at the steps that are named."""
    return {"grad_norm": [changed.get(f"at{step}", 0.4) for step in range(1, 21)]}


def updates(*changed: float, steps: Sequence[int] = (10, 20, 21, 22)) -> tuple[Metrics, dict[str, Any]]:
    expected = (0.9, 0.9, 0.03, 0.05)[: len(changed)]
    return {"updates/changed": changed, "updates/expected": expected}, {"steps": steps}


FLAT_STEP = {"frac_reward_zero_std": [float(step == 15) for step in range(1, 21)]}

UPDATES: dict[str, list[Case]] = {
    "kl_blow_up": [
        ({"kl": flat(0.1, 4) + flat(2.0, 6)}, config(beta=0.1), "5: … 2.0 nats … above 1 from step 5: 50%"),
        ({"kl": flat(1.0, 5) + flat(2.0, 5)}, {}, "6: … 40%"),
        ({"kl": flat(1.0)}, config(beta=0.0), "fine: … at most 1 nats per token (limit 1)"),
        ({"kl": [0.1] * 4 + [9.0] * 2 + [0.1] * 4}, {}, "fine: … at most 0.1"),  # a median of five
        ({"reward": flat(1.0)}, config(beta=0), "n/a: `beta` is 0"),
        ({"reward": flat(1.0)}, {}, "no data: `kl`"),
    ],
    "lost_updates": [
        (*updates(0.9, 0.9, 0.03, 0.01), "22: … 2.0% … 4.0% would … 50% of the changes are wasted"),
        (*updates(0.0, 0.0, 0.03, 0.0175), "22: … 41% of the changes"),
        (*updates(0.0, 0.0, 0.03, 0.018), "fine: … 2.4% … 4.0%"),  # 60 % of 4 %
        (*updates(0.01, 0.01, steps=[19, 20]), "no data: … 20 steps"),
        ({"updates/changed": [0.1] * 25}, {}, "n/a: `updates/expected`"),
    ],
    "clipped_tokens": [
        ({CLIP: flat(0.0, 8) + flat(0.5, 2)}, {}, "9: … 50% … at the end … 20% first at step 9: 10% … are stale"),
        ({CLIP: flat(0.2, 8) + flat(0.5, 2)}, {}, "9: … 26% … of the run … first at step 9: 26%"),
        (clipped(0.11, 0.5), {}, "1: … 30% … (pass 1: 11%, pass 2: 50%): 30% … pass 1 comes before any update"),
        (clipped(0.1, 0.5), {}, "1: … the tokens are stale"),
        ({"cispo_clip_ratio": flat(0.25, 4)}, {}, "1: … 25%"),
        ({CLIP: flat(0.2, 4)}, {}, "fine: … 20% … (limit 20%)"),
        ({CLIP: flat(0.5)}, config(importance_sampling_level="sequence"), "fine: … (limit 50%)"),
        ({CLIP: flat(0.5, 3)}, {}, "no data: … four times"),
        ({}, config(loss_type="sapo"), "n/a: … `sapo`"),
        ({}, config(loss_type="vespo"), "n/a: … `vespo`"),
        ({}, config(loss_type="dapo"), f"no data: `{CLIP}`"),
    ],
    "gradient_spikes": [
        # Zeros, steps in which every group is flat and the first tenth do not count.
        (
            {**norms(at2=9.0, at3=9.0, at10=4.1, at12=3.9, at15=50.0, at16=0.0), **FLAT_STEP},
            {"infinite": [18]},
            "3: … median of 0.4, and 2 of 18 … largest 9 at step 3: 10%",
        ),
        (norms(at2=9.0, at12=3.9), {}, "fine: … 0.4 and is at most 9 (a spike has 4)"),
        # The logarithms lie 1 above and below 0, so that a robust standard deviation is 1.4826.
        ({"grad_norm": [math.e, 1 / math.e] * 10}, {}, f"fine: … (a spike has {math.exp(6 * 1.4826):.2g})"),
        ({"grad_norm": [*flat(1.0, 11), 10.0, *flat(1.0, 8)]}, {}, "12: … 1 of 20 … largest 10 at step 12: 5%"),
        ({"grad_norm": [1e300, 1e-300] * 10}, {}, "fine: … (a spike has 1e+304)"),  # beyond the largest float
        ({"grad_norm": flat(0.4, 11)}, {}, "no data: … 12 times"),
        ({"grad_norm": flat(0.4, 12)}, {}, "fine: "),
        (
            {"grad_norm": flat(0.4, 7), "reward": flat(1.0)},
            {"infinite": [3, 8, 9, 10]},
            "8: … NaN or infinite from step 8 … 30% … after step 7",
        ),
        ({"grad_norm": flat(0.4, 18), "reward": flat(1.0, 20)}, {"infinite": [18, 19, 20]}, "fine: "),  # two at the end
    ],
    "stale_tokens": [
        (
            sizes(flat(1.0), flat(0.9, 5) + flat(0.5, 5), mismatched=flat(0.7)),
            {},
            "6: … 50% of the tokens in pass 2 … (pass 1: 100%, pass 2: 50%): the tokens are stale … step 6 … 30%",
        ),
        (sizes(flat(1.0), mismatched=flat(0.75)), {}, "1: … 75% … already in pass 1 … not the policy … 25%"),
        (sizes(flat(0.5), mismatched=flat(0.5)), {}, "1: … 50% … not the policy"),
        (sizes(flat(0.8, 5) + flat(0.6, 5)), {}, "6: … 60% … are stale … below 80% first at step 6 … 30%"),
        (sizes(flat(0.8), mismatched=flat(0.8)), {}, "fine: … 80% … and 80% in pass 1 … (limit 80%)"),
        (sizes(flat(0.8)), {}, "fine: … 80% of the tokens in pass 1 at the end of the run (limit 80%)"),
        (sizes(flat(1.0), flat(1.0, 3)), {}, f"no data: `{SIZE.format(2)}` … four times"),
        ({}, config(**PLANNED), "n/a: … one pass"),
        ({}, config(**PLANNED, steps_per_generation=8), "no data: "),
        ({}, config(gradient_accumulation_steps=4, num_iterations=2), "no data: "),
        ({}, config(gradient_accumulation_steps=4, num_iterations=2, steps_per_generation=2), "n/a: "),
        ({}, config(**PLANNED, generation_batch_size=8), "no data: "),
    ],
}


def paid(right: Sequence[float] = (), tags: Sequence[float] = (), **more: Sequence[float]) -> Metrics:
    return {"rewards/right/mean": right, "rewards/tags/mean": tags, **more}


def other(values: Sequence[float], **more: Sequence[float]) -> Metrics:
    return {"rewards/other/mean": values, "rewards/tags/mean": RISING, **more}


def beside(*rewards: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"rewards": list(rewards), **more}


def grown(reward: Sequence[float], **more: Sequence[float]) -> Metrics:
    return {"completions/mean_length": LENGTHS, "reward": reward, **more}


SHORT = {"name": "short", "kind": "length"}
ALONE = "10: `tags` rises from 0.15 to 0.95 by step 10, while … 40% … come after step 6"
NOISY = [0.0, 0.4, 0.0, 0.4, 0.0, 0.4, 0.0, 0.4, 0.5, 0.5]
HALF_NOISE = [0.3, 0.6, 0.3, 0.6, 0.3, 0.6, 0.3, 0.6, 0.6, 0.6]
SLOW = paid([57.0, 58.0, 59.0, 60.0], ramp(8, 1 / 64))
"""Reward that rises by 3 with a standard error of 1, a third of its margin of 5 %: together 4, 1/16 of 64.

The format rises by 6/64 of 3/4, which is 1/8.
"""


def of_most(pay: float, reward: dict[str, Any] = RIGHT, **more: Any) -> dict[str, Any]:
    return beside({**reward, "highest_pay": pay}, **more)


LEARNING: dict[str, list[Case]] = {
    "format_without_correctness": [
        (paid(flat(0.5), RISING), BOTH, f"{ALONE} … `gate`"),
        (paid(flat(0.5), RISING), {**BOTH, **BETTER}, ALONE),  # correctness is known, whatever an evaluation shows
        (paid(flat(0.5), RISING[:7]), BOTH, "no data: `tags` … 8 times"),
        (paid(flat(0.5), flat(0.5, 8)), BOTH, "fine: no format reward rises: `tags` goes from 0.50 to 0.50"),
        (paid((), RISING), BOTH, "no data: `right` … four times"),
        (paid([0.0, 0.2, 0.5], RISING), BOTH, "no data: `right` … four times"),
        (paid(RISING, RISING), BOTH, "fine: … so does `right`"),
        (paid(flat(0.9), RISING), BOTH, "fine: … little room to rise"),
        (paid(flat(0.895), RISING), BOTH, "10: "),
        (paid(NOISY, RISING), BOTH, "fine: … `right` goes from 0.20 to 0.50, which may be noise"),
        # Highest pays are unknown. Correctness rises by 0.15 of 0.6 and may rise by as much again, the format by 0.8.
        (paid(HALF_NOISE, RISING), beside(*({**one, "highest_pay": None} for one in (RIGHT, TAGS))), "fine: … noise"),
        (SLOW, beside({"name": "right", "highest_pay": 64.0}, {**TAGS, "highest_pay": 0.75}), "fine: … noise"),
        (SLOW, beside({"name": "right", "highest_pay": 64.5}, {**TAGS, "highest_pay": 0.75}), "8: "),
        (paid(flat(0.5), RISING, eval_reward=RISING), {**BOTH, **INFORMATIVE}, "fine: … the held-out reward"),
        (paid(flat(0.5), RISING, eval_reward=flat(0.5)), {**BOTH, **INFORMATIVE}, "no data: `sampling`"),
        (paid((), RISING), beside(TAGS), f"{ALONE.replace(' … 40%', ' … no reward pays a correct answer … 40%')}"),
        (other(flat(0.5)), beside(OTHER, TAGS, **BETTER), "fine: … so does strict accuracy"),
        (other(flat(0.5)), beside(OTHER, TAGS, **accuracy((0.4, 0.3, 0.5), (0.7, 0.5, 0.8))), ALONE),
        # A length is no correctness, as long as another reward may be.
        (other(flat(0.5), **{"rewards/short/mean": RISING}), beside(TAGS, SHORT, OTHER), f"{ALONE}"),
        ({"rewards/right/mean": RISING}, beside(RIGHT), "n/a: no reward judges the format"),
        ({"reward": RISING}, BOTH, "no data: no reward"),
    ],
    "length_into_cap": [
        ({"completions/mean_length": LENGTHS}, config(max_completion_length=100), "8: … 15 to 95 … step 8: 74%"),
        ({"completions/mean_length": LENGTHS}, config(max_completion_length=118.75), "10: "),  # 95 is 80 % of it
        ({"completions/mean_length": LENGTHS}, config(max_completion_length=119), "fine: … the cap is 119"),
        # A rise within its noise, and growth by exactly a quarter and by less.
        ({"completions/mean_length": [10, 10, 90, 10, 90, 10, 20, 20]}, config(max_completion_length=10), "fine: "),
        ({"completions/mean_length": [100, 108, 117, 125]}, config(max_completion_length=125), "1: … 11%"),
        ({"completions/mean_length": [100, 108, 117, 124]}, config(max_completion_length=125), "fine: "),
        ({"completions/mean_length": LENGTHS}, config(max_completion_length=None), "n/a: "),
        ({"completions/mean_length": LENGTHS}, {}, "no data: no `run.json`"),
    ],
    "length_without_gain": [
        (grown(flat(1.0)), BOTH, "2: … 15 to 95 tokens, by a quarter from step 2, while the reward … 1.00: 74%"),
        (grown(flat(1.0)), of_most(0.5), "fine: … may be noise"),  # a tenth of it is the margin
        (grown(flat(1.0)), of_most(0.505), "2: "),
        (grown([*flat(-1.0, 9), -0.5]), beside(OTHER), "fine: … -1.00 to -0.75, which may be noise"),
        (grown(RISING), beside(OTHER), "fine: … the reward rises from 0.15 to 0.95"),
        (grown([0.5, 0.7, 0.9, 1.1]), beside(OTHER), "fine: … the reward rises"),
        (grown(flat(1.0)), BETTER, "fine: … strict accuracy rises"),
        (grown(flat(1.0)), INFORMATIVE, "no data: `sampling`"),
        (grown(flat(1.0), **{"rewards/x/mean": RISING}), beside({"name": "x", "kind": "format"}), "2: "),
        (grown(flat(1.0), **{"rewards/x/mean": RISING}), beside({"name": "x", "kind": "length"}), "2: "),
        (grown(flat(1.0), **{"rewards/x/mean": RISING}), beside({"name": "x", "kind": "judge"}), "fine: … `x` rises"),
        ({"completions/mean_length": [16, 16, 20, 30, 40, 50, 60, 70], "reward": flat(1.0, 8)}, {}, "3: … from step 3"),
        # The reward dips from 1 to 0.4 and comes back: a rise of 5 % of 1 can't be excluded, a tenth can.
        (
            {
                "completions/mean_length": ramp(210)[10:],
                "reward": [1 - 0.6 * math.sin(math.pi * place / 199) for place in range(200)],
            },
            {},
            "35: … 0.78 to 0.78",
        ),
    ],
    "truncated": [
        ({"completions/clipped_ratio": flat(0.25, 4)}, {}, "fine: 25% … (limit 25%)"),
        ({"completions/clipped_ratio": flat(0.3)}, {}, "10: 30% … 30% of the run's tokens … `mask_truncated"),
        (
            {"completions/clipped_ratio": flat(0.3), "completions/mean_length": flat(50.0)},
            config(max_completion_length=100, mask_truncated_completions=True),
            "10: … 60% … or end the run earlier",  # a truncated completion has as many tokens as the cap
        ),
    ],
    "entropy_collapse": [
        ({"entropy": [1.0, 1.0, 0.9, 0.7, 0.5, 0.1, 0.09, 0.05, 0.05, 0.05]}, {}, "7: … 1.000 to 0.050 … step 7 … 30%"),
        ({"entropy": [1.0, 1.0, 0.9, 0.7, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1]}, {}, "fine: … 1.000 to 0.100"),
        ({"entropy": [1.0, 1.0, 0.9, 0.7, 0.5, 0.1, *flat(0.098, 4)]}, {}, "7: "),
        ({"entropy": [1.0, 1.0, 9.0, 0.0, 9.0, 0.0, 0.05, 0.05]}, {}, "fine: "),  # its noise hides the fall
        ({"entropy": [1.0, 1.0, *flat(0.05, 8)], "reward": flat(0.9)}, beside(RIGHT), "fine: … is solved"),
    ],
    "zero_variance": [
        ({"frac_reward_zero_std": flat(0.5, 4)}, {}, "fine: 50% … (limit 50%), and 50% … (limit 80%)"),
        ({"frac_reward_zero_std": flat(0.6)}, {}, "1: 60% … 50% first at step 1: … 60% … `sampling: informative`"),
        ({"frac_reward_zero_std": flat(0.0, 6) + flat(0.8, 2) + flat(0.9, 2)}, {}, "9: 90% … first at step 9 … 34%"),
        ({"frac_reward_zero_std": flat(0.0, 8) + flat(0.8, 2)}, {}, "fine: 16% … 80%"),
    ],
    "no_answer_found": [
        ({}, BOTH, "no data: "),
        ({}, beside(TAGS), "n/a: "),
        ({}, beside({**TAGS, "parts": [RIGHT]}), "no data: "),
        ({"rewards/a/parsed": flat(0.9), "rewards/b/parsed": flat(0.5), "rewards/c/parsed": []}, {}, "fine: `b` … 50%"),
        ({"rewards/a/parsed": [0.0, 0.1]}, {}, "fine: `a` … 5%"),
        ({"rewards/a/parsed": flat(0.5), "rewards/b/parsed": flat(0.0)}, {}, "10: `b` … paid nothing up to step 10"),
    ],
}


def spread(right: Sequence[float] = (), tags: Sequence[float] = (), **more: float) -> Metrics:
    found = {
        "rewards/right/std": right,
        "rewards/tags/std": tags,
        **{f"rewards/{n}/std": flat(v) for n, v in more.items()},
    }
    return {key: values for key, values in found.items() if len(values)}


def overfitted(held_out: Sequence[float] = (), **more: Any) -> tuple[Metrics, dict[str, Any]]:
    return {"reward": RISING, "eval_reward": held_out}, more


EVEN = {"steps": list(range(2, 33, 2))}
ROSE = [0.25, 0.5, 0.75, *flat(1.0, 13)]
PAYS_2 = of_most(2.0, **EVEN)
PAYS_100 = of_most(100.0, **EVEN)
JUDGE = {"name": "judge", "kind": "judge"}

TRENDS: dict[str, list[Case]] = {
    "dominant_reward": [
        (spread(flat(1.0), flat(4.0)), BOTH, "fine: … 94%, that of `tags`"),
        (spread(flat(1.0), flat(5.0)), BOTH, "10: `tags` carries 96% … 100% of the run's tokens; lower its `weight`"),
        (spread(flat(1.0), flat(5.0)), beside({**RIGHT, "weight": 2.0}, TAGS), "fine: … 86%"),
        (spread(flat(0.0), flat(1.0)), BOTH, "10: … 100% … constant"),
        (spread(flat(5.0), flat(1.0)), BOTH, "fine: … 96%, that of `right`"),
        (spread(flat(1.0), other=5.0), beside(RIGHT, OTHER), "10: `other` carries 96%"),
        (spread(other=1.0, short=5.0), beside(OTHER, SHORT), "10: `short` carries 96%"),
        (spread(other=1.0, judge=5.0, tags=[0.0] * 10), beside(OTHER, JUDGE, TAGS), "fine: … 96%, that of `judge`"),
        (spread(flat(0.0), flat(0.0)), BOTH, "fine: … no variance"),
        (spread((), flat(1.0)), beside(TAGS), "n/a: "),
        (spread(flat(1.0), more=9.0), beside(RIGHT, {**RIGHT, "name": "more"}), "n/a: "),
        (spread(other=1.0, judge=9.0), beside(OTHER, JUDGE), "n/a: "),
        (spread(flat(1.0), flat(9.0)), {}, "no data: no `run.json`"),
        # The variances of all steps are added: 1 and 19 are 95 % exactly.
        (spread([1.0, *flat(0.0, 9)], [3.0, 3.0, 1.0, *flat(0.0, 7)]), BOTH, "fine: … 95%, that of `tags`"),
        (spread(flat(0.0, 5) + flat(1.0, 5), flat(0.0, 5) + flat(9.0, 5)), BOTH, "10: … 99% … 50% of the"),
        (spread(flat(0.1, 5), flat(1.0)), BOTH, "10: … 100% … 100% of the"),
        (spread(flat(1.0, 3), flat(1.0)), BOTH, "no data: `rewards/right/std` … four times"),
    ],
    "overfitting": [
        (*overfitted([0.5, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]), "8: … 0.55 to 0.05 … best at step 2, and 80%"),
        (*overfitted(flat(0.5)), "1: … held-out reward stays at 0.50 from step 1 on: 90%"),
        (*overfitted(flat(0.5), **of_most(0.55)), "fine: "),  # nine tenths of the highest pay
        (*overfitted([*flat(0.5, 8), 0.7, 0.7]), "fine: … 0.50 to 0.70"),  # a quarter of the rise of 0.8
        ({"reward": ramp(10), "eval_reward": [10, 10, 11, 9, 11, 9, 11, 9, 11.95, 11.95]}, {}, "1: … stays at 11.95"),
        ({"reward": ramp(10), "eval_reward": [10, 10, 11, 9, 11, 9, 11, 9, 12.0, 12.0]}, {}, "fine: "),  # 2 of 8
        (*overfitted(ramp(60, 0.01)[50:]), "fine: … 0.51 to 0.58"),  # a slow rise, but a clear one
        (*overfitted(flat(0.5, 3)), "no data: "),
        (*overfitted(**accuracy((0.6, 0.5, 0.7), (0.4, 0.3, 0.49))), "10: … falls from 0.600 to 0.400 by step 10"),
        (*overfitted(**accuracy((0.6, 0.5, 0.7), (0.4, 0.3, 0.5))), "1: … stays flat"),  # intervals that meet
        (*overfitted(**accuracy((0.5, 0.48, 0.52), (0.5, 0.48, 0.52))), "1: … stays flat, from 0.500 to 0.500: 90%"),
        (*overfitted(**accuracy((0.5, 0.48, 0.52), (0.51, 0.5, 0.54))), "fine: … 0.500 to 0.510"),
        (*overfitted(**accuracy((0.02, 0.0, 0.04), (0.03, 0.01, 0.05))), "1: … stays flat"),  # a gain of at most 5 %
        (*overfitted(**accuracy((0.92, 0.9, 0.95), (0.92, 0.9, 0.94))), "1: … stays flat"),  # just room for 5 % more
        (*overfitted(**accuracy((0.95, 0.94, 0.96), (0.95, 0.94, 0.96))), "fine: "),
        (*overfitted(ramp(60, 0.01)[50:], **accuracy((0.5, 0.48, 0.52), (0.5, 0.48, 0.52))), "fine: … 0.58"),
        ({"reward": flat(0.5), "eval_reward": RISING[::-1]}, {}, "fine: the training reward does not rise"),
    ],
    "plateau": [
        ({"reward": ROSE}, PAYS_2, "8: … since step 8, and goes from 1.00 to 1.00 … 75% … after step 8"),
        ({"reward": [1.0, 0.75, *flat(0.5, 14)]}, PAYS_2, "2: … 94%"),  # it fell, which is no slow rise
        ({"reward": [0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, *flat(1.0, 8)]}, PAYS_2, "18: … 44%"),
        # The plateau is at 20 and has a margin of 1, so that it begins at 19.
        ({"reward": [10, 12, 14, 16, 17, 18, 19, 19, *flat(20.0, 8)]}, PAYS_100, "14: … 56%"),
        # From 1 to 6 in all and from 5 to 6 in the second half, which is a fifth and not more than its noise.
        ({"reward": [*flat(1.0, 4), 2, 3, 4, 5, 5, 5, 6, 5, *flat(6.0, 4)]}, PAYS_100, "fine: … within its noise"),
        ({"reward": [*flat(1.0, 4), 2, 3, 4, 5, 5, 5, 6, 5, *flat(5.97, 4)]}, PAYS_100, "14: "),
        ({"reward": [1.0, 1.2] * 8}, PAYS_2, "fine: … within its noise"),
        ({"reward": ROSE[:15]}, {"steps": EVEN["steps"][:15]}, "no data: … 16 times"),
        ({"reward": ROSE}, {"steps": [*range(1, 16), 29]}, "no data: … 30 steps"),
        ({"reward": flat(1.0, 16)}, of_most(2.0, steps=[*range(1, 16), 30]), "1: … 97%"),
        ({"reward": ROSE}, of_most(1.26, **EVEN), "8: "),
        ({"reward": ROSE}, of_most(1.25, **EVEN), "fine: … little room to rise"),  # 80 % of the highest pay
        ({"reward": ROSE}, beside(OTHER, rows=scored([(1, 0, 0.0), (1, 0, 1.25)]), **EVEN), "fine: … near the best"),
        ({"reward": ROSE, "frac_reward_zero_std": flat(0.5, 16)}, PAYS_2, "fine: … no variance"),
        ({"reward": ROSE, "frac_reward_zero_std": flat(0.49, 16)}, PAYS_2, "8: "),
        ({"reward": ROSE}, {**INFORMATIVE, **EVEN}, "no data: `sampling`"),
        ({"reward": ROSE, "eval_reward": ramp(16, 1 / 8)}, EVEN, "fine: … held-out reward rises from 1.06 to 1.81"),
        # The second half of 32 steps begins at step 17. Four evaluations from there on have a trend, three have none.
        ({"reward": flat(1.0, 32), "eval_reward": ramp(19, 1 / 8)}, of_most(2.0), "1: "),
        ({"reward": flat(1.0, 32), "eval_reward": ramp(20, 1 / 8)}, of_most(2.0), "fine: … 2.00 to 2.38"),
        # The second half of 19 points is the last ten.
        ({"reward": [*flat(0.0, 9), 0.8, *flat(1.0, 9)]}, of_most(100.0, steps=list(range(2, 40, 2))), "20: … 0.90"),
        # A hill is as low at its foot as the first half was, and the largest floats have no mean that is reached.
        ({"reward": flat(0.0, 100) + [math.sin(math.pi * n / 99) for n in range(100)]}, of_most(9.0), "101: "),
        ({"reward": flat(1.2e307, 40)}, of_most(1.6e308), "21: "),
    ],
}


def eight(step: int, calls: int, *totals: float) -> list[tuple[int, int, float]]:
    """Return eight completions of a step with as many calls, whose rewards repeat `totals`."""
    return [(step, calls, totals[place % len(totals)]) for place in range(8)]


def by_step(*totals: float, calls: Sequence[int] = (1, 1, 2, 2)) -> list[tuple[int, int, float]]:
    """Return eight completions of each of some steps, all of a step with one reward."""
    return [row for step, total in enumerate(totals) for row in eight(step + 1, calls[step], total)]


def calling(
    rows: list[tuple[int, int, float]], reward: Sequence[float] = RISING, **more: Any
) -> tuple[Metrics, dict[str, Any]]:
    return {"reward": reward, "tools/calls": []}, {"rows": scored(rows).assign(note=math.nan), **more}


def tool(**shares: float) -> Metrics:
    """Return shares of the metrics of tools at four steps."""
    return {f"tools/{name.replace('__', '/')}": flat(share, 4) for name, share in shares.items()}


HALF = flat(0.5)
HALVES = [*eight(1, 1, 0)[:4], *eight(1, 2, 0)[:4], *eight(2, 1, 0), *eight(3, 1, 0)]
DEVIATIONS = (-1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -2.0, 2.0)
"""Eight values whose mean is 0 and has a standard error of (14 / 7 / 8) ** 0.5."""
TWO_LEVELS = [row for step in (1, 2, 3, 4) for row in eight(step, 1 + (step > 2), *((0, 1) if step < 3 else (2, 3)))]
FEW = "no data: too few scored completions"
MANY = {f"tools/{name}/calls": [0.0] for name in "abcdef"}

TOOLS: dict[str, list[Case]] = {
    "tools_never_called": [
        ({"tools/call_frequency": flat(0.0)}, {}, "10: no completion calls a tool"),
        ({"tools/call_frequency": flat(1.0, 5) + flat(0.0, 5)}, {}, "5: … last calls are at step 5"),
        ({"tools/call_frequency": HALF, **MANY, "tools/b/calls": [1.0]}, {}, "fine: … 0.5 … `a`, `c`, `d`, `e`, `f`"),
        ({"reward": flat(1.0)}, {}, "n/a: the policy has no tools"),
        ({}, {"recipe": {"tools": ["add"]}}, "no data: `tools/call_frequency`"),
        ({}, {"recipe": {"environment_factory": "a.b"}}, "no data: `tools/call_frequency`"),
    ],
    "failing_tools": [
        (tool(failure_frequency=0.5, call_frequency=1, a__calls=1, a__failures=0.1), {}, "fine: 50% … (limit 50%)"),
        (tool(failure_frequency=0.5, call_frequency=1, a__calls=1, a__failures=0.102), {}, "4: `a` fails in 10%"),
        (tool(failure_frequency=0.6, call_frequency=1, a__calls=1, a__failures=0.1), {}, "4: 60% of the calls fail"),
        (tool(failure_frequency=0.6, call_frequency=0, a__calls=0, a__failures=0.2), {}, "no data: no tool was called"),
    ],
    "tool_limits_hit": [
        (tool(rows_at_limit=0.125, rows_out_of_budget=0.125), {}, "fine: limits end 25%"),
        (tool(rows_at_limit=0.25, rows_out_of_budget=0.125), {}, "4: … 38% … 25% … `max_tool_calling_iterations`"),
        (tool(rows_at_limit=0.125, rows_out_of_budget=0.25), {}, "4: … 38% … 25% have … `tool_limits.result_tokens`"),
        (tool(turns=1.0), {}, "no data: "),
    ],
    "calls_without_gain": [
        (*calling(eight(1, 1, 0, 1) + eight(2, 1, 0, 1), HALF), "2: 100% … while the reward goes from 0.50 to 0.50"),
        (*calling(eight(1, 1, 0, 1)[:7], HALF), "no data: fewer than 8"),
        (*calling([*eight(1, 1, 0, 1)[:7], (1, 1, math.nan)], HALF), "no data: fewer than 8"),
        (*calling(eight(1, 1, 0, 1), RISING), "fine: … 0.15 to 0.95"),
        (*calling([(1, 1, 1.0)] * 19 + [(1, 1, 0.0)], HALF), "fine: … the best reward"),  # a mean at 95 % of the range
        (*calling([(1, 1, 1.0)] * 18 + [(1, 1, 0.0)], HALF), "1: 100%"),
        (*calling([(1, 1, 1.0)] * 19 + [(1, 0, 0.0)], HALF), "fine: 95% … the best reward"),
        (*calling([*eight(1, 1, 0, 1)[:7], (1, 0, 0.0)], HALF), "fine: 88% … (limit 95%)"),
        (*calling(eight(1, 1, 0.5) + eight(2, 1, 0.5), HALF), "2: "),  # no reward is better than another
        (*calling(eight(1, 0, 0, 1) + eight(2, 1, 0, 1), HALF), "2: … with a call earn 0.50 and those without 0.50"),
        (*calling(eight(1, 0, 0) + eight(2, 1, 0, 1), HALF), "fine: … earn 0.50 and those without 0.00"),
        (*calling(eight(1, 0, 0)[:7] + eight(2, 1, 0, 1), HALF), "2: "),
        # A difference of 1 is exactly two standard errors.
        (*calling([*eight(1, 0, 0), *eight(2, 1, *(1 + one for one in DEVIATIONS))], HALF), "2: … 1.00 and … 0.00"),
        (*calling([*eight(1, 0, 0), *eight(2, 1, *(1.1 + one for one in DEVIATIONS))], HALF), "fine: … 1.10"),
    ],
    "reward_by_calls_alone": [
        (*calling(by_step(1.0, 1.0, 2.0, 2.0), **beside(OTHER)), "4: … from 1 to 2 … rises by 1.00, but by 0.00"),
        # Half of the last completions have one call, as all of the first, and earn 2 instead of 1: (1 + 1/2) / 2.
        (
            *calling(
                [*by_step(1, 1, 1, calls=(1, 1, 1)), *eight(4, 1, 2.0)[:4], *eight(4, 3, 2.0)[:4]], **beside(RIGHT)
            ),
            "fine: … 0.75 of 1.00",
        ),
        # The numbers of calls explain 4/5 of the variance, which does not matter where answers are judged.
        (*calling(TWO_LEVELS, **beside(OTHER)), "fine: … explain 80%"),
        (*calling(TWO_LEVELS, **beside(RIGHT, OTHER)), "4: … rises by 2.00, but by 0.00"),
        (*calling(by_step(1, 1, 1, 1, calls=(0, 0, 1, 1)), **beside(OTHER)), FEW),
        (*calling(by_step(1.0, 1.0, 2.0, 2.0)[1:], **beside(OTHER)), FEW),
        (*calling(by_step(1.0, 1.0, 2.0, 2.0)[:-1], **beside(OTHER)), FEW),
        (*calling(by_step(0.0, 0.0, 1e-200, 1e-200), **beside(OTHER)), "fine: … 0%"),
        # A tenth of a rise of 4 is 0.4.
        (*calling([*HALVES, *eight(4, 2, 0.7)[:4], *eight(4, 3, 7.3)[:4]], **beside(RIGHT)), "4: … 4.00, but by 0.35"),
        (*calling([*HALVES, *eight(4, 2, 1.0)[:4], *eight(4, 3, 7.0)[:4]], **beside(RIGHT)), "fine: … 0.50 of 4.00"),
        # The first quarter of eight steps are two.
        (*calling([row for n in range(1, 9) for row in eight(n, n, n)], **beside(OTHER)), "8: … from 1.5 to 7.5"),
        (*calling(by_step(1, 2, 3, 4, calls=(1, 1, 1, 1)), **beside(RIGHT)), "fine: … from 1 to 1"),
        (*calling(by_step(1, 1, 1, 1, calls=(1, 2, 3, 4)), **beside(RIGHT)), "fine: … from 1 to 4"),
        (*calling([], RISING[::-1], **beside(OTHER)), "fine: the reward does not rise"),
        (
            {"reward": RISING, "rewards/right/mean": RISING, "tools/calls": []},
            beside(OTHER, RIGHT),
            "fine: `right` rises too",
        ),
    ],
}


def groups(*repeats: bool, reward: float = 0.0) -> list[dict[str, Any]]:
    """Return a group of two completions for each of some steps, which repeat one text of 10 letters or do not."""
    shared = {"total": reward, "characters": 10, "calls": 0}
    rows = []
    for step, same in enumerate(repeats, 1):
        for member in range(2):
            rows.append({"step": step, "prompt": step, "completion": f"{step} {0 if same else member}", **shared})
    return rows


BEST = [{**row, "step": 8, "prompt": 8} for row in groups(False, reward=1.0)]
SINGLE = [{**BEST[0], "step": 9, "prompt": 90 + place, "total": 0.0} for place in range(9)]


def shown(*rows: dict[str, Any]) -> tuple[Metrics, dict[str, Any]]:
    return {"reward": flat(0.5)}, {"rows": pd.DataFrame(rows)}


def scores(totals: list[float], **declared: Any) -> tuple[Metrics, dict[str, Any]]:
    """Return a run without variance whose logged groups have two completions each."""
    rows = scored([(place // 2, 0, total) for place, total in enumerate(totals)])
    rewards = [{"name": "mine", "kind": "correctness", **declared}]
    return {"frac_reward_zero_std": flat(0.6)}, {"rows": rows.assign(**{"pay/mine": rows["total"]}), "rewards": rewards}


PAY_1 = {"highest_pay": 1.0, "passes_at": 1.0}
COMPLETIONS: dict[str, list[Case]] = {
    "identical_completions": [
        (*shown(*groups(True, True, True)), "no data: fewer than four"),
        (*shown(*groups(True, True, False, False), *BEST), "fine: 50% … (limit 50%)"),
        (*shown(*groups(False, True, True, True), *BEST), "2: 75% … from step 2 … 60%"),
        (*shown(*groups(True, True, True), *BEST), "fine: 1 of 4 groups earn the best"),
        (*shown(*groups(True, True, False, False), *BEST, *SINGLE), "fine: 50%"),  # groups of one repeat nothing
        (*shown(*({**row, "characters": 0} for row in [*groups(*[True] * 4), *BEST])), "1: … 0% of the logged text"),
        (*shown(*groups(*[True] * 4), {**BEST[0], "total": 1e-6}, {**BEST[0], "total": 1e-6}), "fine: 5 of 5"),
    ],
    "zero_variance": [
        # A group at 7 of at most 14 is not in the upper half. Neither is a group at 5 between -6 and 14.
        (*scores([10, 10, 14, 0, 7, 7], highest_pay=14.0), "1: … 50% are too easy … 50% too hard"),
        (*scores([-6, -6, 14, 0, 5, 5], highest_pay=14.0), "1: … 50% are too easy"),
        (*scores([0.01] * 4, highest_pay=1.0), "1: … 0% are too easy … 100% too hard"),
        (*scores([0.6, 0.6, 1, 0.6, 1, 1], **PAY_1), "1: … 50% are too easy"),
        (*scores([0.6, 0.6, 1, 0.6, 1, 1]), "1: … first at step 1: the policy gradient"),
        (*scores([10, 14, 14, 10], highest_pay=14.0), "1: … first at step 1: the policy gradient"),
    ],
}


CASES = [
    pytest.param(name, case, id=f"{name}-{place}-{case[2][:12]}")
    for table in (UPDATES, LEARNING, TRENDS, TOOLS, COMPLETIONS)
    for name, cases in table.items()
    for place, case in enumerate(cases)
]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_check_finds_what_its_threshold_says(name: str, case: Case) -> None:
    assert_found(name, case)


def test_the_training_reward_counts_from_the_first_evaluation_on() -> None:
    """The last four points of training rise by 0.3, of which 0.08 is more than a quarter."""
    for held_out, expected in (([0.5, 0.5, 0.5, 0.58], "fine: "), (flat(0.5, 4), "7: ")):
        run = logged({"reward": RISING})
        run.log.metrics["eval_reward"] = (array("q", range(7, 11)), array("d", held_out))
        assert result(diagnostics.overfitting, run).startswith(expected)


def test_the_first_reward_with_a_trend_is_named() -> None:
    metrics = {**paid(flat(0.5, 3), RISING), "rewards/late/mean": flat(0.5)}
    assert_found(
        "format_without_correctness", (metrics, beside(RIGHT, TAGS, {**RIGHT, "name": "late"}), "10: … `late`")
    )


def test_a_metric_of_each_pass_is_listed_by_the_number_of_the_pass() -> None:
    """Names that are no pass, or are other metrics, are left out, and so is a pass without points."""
    metrics = {f"passes/{number}/clip_share": [0.5] for number in ("10", "2", "1000000", "x", "\u00b2")}
    run = logged({**metrics, "passes/3/clip_share": [], "passes/4/size": [0.5], "passes/5/clip_share/x": [0.5]})
    assert list(update_checks.passes(run, "clip_share")) == [2, 10]


def test_only_names_with_a_count_of_calls_are_tools() -> None:
    keys = ("zip/calls", "zip/failures", "calls", "a/b/calls", "unknown/calls")
    assert tool_checks.tools(logged({f"tools/{key}": [0.0] for key in keys})) == ["zip"]


@pytest.mark.parametrize(("count", "rest"), [(diagnostics.NAMED_ROWS, ""), (diagnostics.NAMED_ROWS + 1, "; …")])
def test_rows_that_are_not_named_are_an_ellipsis(count: int, rest: str) -> None:
    golds = {"count": count, "total": 99, "rows": ["a.csv, line 2", "b.csv, line 3"]}
    finding = diagnostics.unscorable_golds(logged({}, unscorable_golds=golds))
    assert finding is not None
    assert f"{count} of 99 golds" in finding.sentence
    assert f"(a.csv, line 2; b.csv, line 3{rest})" in finding.sentence
    assert diagnostics.unscorable_golds(logged({})) is None


def test_answers_are_looked_for_in_the_last_thousand_completions() -> None:
    recipe = {"rewards": ["tag_presence", {"name": "gsm8k_correctness", "kwargs": {"extract": "boxed"}}]}
    run = logged({"rewards/gsm8k_correctness/parsed": flat(0.0)}, rows=scored([(1, 0, 0.0)] * 1001), recipe=recipe)
    vars(run)["texts"] = lambda rows: pd.DataFrame({"completion": ["<answer>7</answer>"] * len(rows)})
    assert "`extract: answer_tag` finds one in 1000 of 1000" in result(diagnostics.no_answer_found, run)


@pytest.mark.parametrize(
    ("means", "named"),
    [
        ({"a": [], "b": []}, "`a` and `b` returned None for every completion, so nothing was learned from it:"),
        ({"a": [0.5], "b": []}, "`b` returned None for every completion, so nothing was learned from it:"),
        ({"a": [0.5], "b": [0.0]}, ""),
    ],
)
def test_a_reward_that_scored_no_completion_is_named(means: dict[str, list[float]], named: str) -> None:
    metrics = {f"rewards/{name}/mean": values for name, values in means.items()}
    finding = diagnostics.unscored(logged(metrics, [1, 2], rewards=[{"name": name} for name in means]))
    assert (finding.sentence if finding else "").startswith(named)
    assert bool(finding) == bool(named)


def test_a_run_is_judged_by_the_checks_that_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    names = list(CHECKS)
    few = diagnostics.Diagnosis([], {names[0]: "fine"}, dict.fromkeys(names[2:], "no data"), {names[1]: "no"})
    assert (few.applicable, few.checked, few.looks_fine) == (len(names) - 1, 1, False)
    most = replace(few, fine=dict.fromkeys(names[2:], "fine"), unchecked={names[0]: "no data"})
    assert diagnostics.as_dict(most)["looks_fine"]
    assert not replace(most, findings=[diagnostics.Finding(names[0], 1, "bad")]).looks_fine
    late = replace(logged({}), deadline=-math.inf)
    vars(late)["completion_files"] = Sampled([], 0)
    with pytest.raises(OutOfTime):
        diagnostics.diagnose(late)
