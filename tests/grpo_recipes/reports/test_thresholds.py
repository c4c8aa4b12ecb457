"""Results of every check on logs of a few points, whose figures can be worked out by hand.

Ten points have quarters of two. The default run spends a tenth of its tokens in each of ten steps. An expected result
is the step of a problem with figures of the finding, or `fine`, `no-data` or `n/a` with figures of the text.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest

from grpo_recipes.reports import diagnostics, progress_checks, reward_checks, update_checks
from grpo_recipes.reports.checking import Check, DoesNotApply, Finding, NoData
from grpo_recipes.reports.run import Run, RunReward
from tests.support.logged_runs import logged, scored

RIGHT = {"name": "right", "kind": "correctness", "highest_pay": 1.0}
TAGS = {"name": "tags", "kind": "format", "highest_pay": 1.0}
OTHER, JUDGE = {"name": "other", "kind": "other"}, {"name": "judge", "kind": "judge"}
SHORT = {"name": "short", "kind": "length"}
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
HALF = flat(0.5)


def accuracy(before: tuple[float, float, float], after: tuple[float, float, float]) -> dict[str, Any]:
    keys, shares = ("value", "low", "high"), {"before": before, "after": after}
    return {"evaluations": {label: {"strict": dict(zip(keys, shares[label], strict=True))} for label in shares}}


def result(check: Check, run: Run) -> tuple[str, Finding | str]:
    """Return the kind of a check's result, or the step of a problem, and the result itself."""
    try:
        found = check(run)
    except NoData as reason:
        return "no-data", str(reason)
    except DoesNotApply as reason:
        return "n/a", str(reason)
    return ("fine", found) if isinstance(found, str) else (str(found.step), found)


def differences(check: Check, case: Case) -> list[str]:
    """Return the parts of an expected result that a check does not have."""
    metrics, more, expected = case
    wanted, *figures = expected.split()
    kind, found = result(check, logged(metrics, **more))
    wrong = [] if kind == wanted else [f"{kind} instead of {wanted}"]
    for figure in figures:
        name, _, value = figure.rpartition("=")
        if isinstance(found, Finding):
            is_there = value == shown(found.threshold if name == "limit" else found.figures.get(name), value)
        else:
            is_there = re.search(rf"(?<![\d.]){re.escape(value)}(?![\d.]\d)", found) is not None
        wrong += [] if is_there else [f"no {figure} in {found}"]
    return [f"{expected}: {one}" for one in wrong]


def shown(value: Any, like: str) -> str:
    """Return a figure with as many decimals as another has."""
    return f"{value:.{len(like.partition('.')[2])}f}" if isinstance(value, float) else str(value)


def config(**values: Any) -> dict[str, Any]:
    return {"config": values}


def beside(*rewards: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"rewards": list(rewards), **more}


def of_most(pay: float, **more: Any) -> dict[str, Any]:
    return beside({**RIGHT, "highest_pay": pay}, **more)


# ---- Updates

CLIP, SIZE = "clip_ratio/region_mean", "passes/{}/effective_sample_size"
LENGTH, ZERO = "completions/mean_length", "frac_reward_zero_std"
PLANNED = {"gradient_accumulation_steps": 4, "num_iterations": 1}


def clipped(one: float, two: float) -> Metrics:
    return {CLIP: flat(0.3), "passes/1/clip_share": flat(one), "passes/2/clip_share": flat(two)}


def sizes(*passes: Sequence[float], mismatched: Sequence[float] = ()) -> Metrics:
    found = {SIZE.format(number): values for number, values in enumerate(passes, 1)}
    return {**found, **({f"{SIZE.format(1)}_with_mismatch": mismatched} if mismatched else {})}


def norms(**changed: float) -> Metrics:
    """Return 20 gradient norms of 0.4, except at the steps that are named."""
    return {"grad_norm": [changed.get(f"at{step}", 0.4) for step in range(1, 21)]}


def updates(*changed: float, steps: Sequence[int] = (10, 20, 21, 22)) -> tuple[Metrics, dict[str, Any]]:
    expected = (0.9, 0.9, 0.03, 0.05)[: len(changed)]
    return {"updates/changed": changed, "updates/expected": expected}, {"steps": steps}


SPIKES = norms(at2=9.0, at3=9.0, at10=4.1, at12=3.9, at15=50.0, at16=0.0)
FLAT_STEP = {ZERO: [float(step == 15) for step in range(1, 21)]}

CASES: dict[str, list[Case]] = {
    "kl_blow_up": [
        ({"kl": flat(0.1, 4) + flat(2.0, 6)}, config(beta=0.1), "5 highest=2.0 limit=1.0 lost=0.5 since=5"),
        ({"kl": flat(1.0)}, config(beta=0.0), "fine 1"),
        ({"kl": [0.1] * 4 + [9.0] * 2 + [0.1] * 4}, {}, "fine 0.1"),  # a median of five
        ({"reward": flat(1.0)}, config(beta=0), "n/a `beta`"),
        ({"reward": flat(1.0)}, {}, "no-data `kl`"),
    ],
    "lost_updates": [
        (*updates(0.9, 0.9, 0.03, 0.01), "22 changed=0.02 expected=0.04 wasted=0.5 limit=0.6"),
        (*updates(0.0, 0.0, 0.03, 0.0175), "22 wasted=0.41"),
        (*updates(0.0, 0.0, 0.03, 0.018), "fine 2.4% 4.0%"),  # 60 % of 4 %
        (*updates(0.01, 0.01, steps=[19, 20]), "no-data 20"),
        ({"updates/changed": [0.1] * 25}, {}, "n/a `updates/expected`"),
    ],
    "clipped_tokens": [
        ({CLIP: flat(0.0, 8) + flat(0.5, 2)}, {}, "9 share=0.5 limit=0.2 lost=0.1 unit=tokens"),
        ({CLIP: flat(0.2, 8) + flat(0.5, 2)}, {}, "9 share=0.26 lost=0.26"),
        ({"cispo_clip_ratio": flat(0.25, 4)}, {}, "1 share=0.25"),
        ({CLIP: flat(0.2, 4)}, {}, "fine 20%"),
        ({CLIP: flat(0.5)}, config(importance_sampling_level="sequence"), "fine 50%"),
        ({CLIP: flat(0.5, 3)}, {}, f"no-data `{CLIP}`"),
        ({}, config(loss_type="sapo"), "n/a `sapo`"),
        ({}, config(loss_type="dapo"), f"no-data `{CLIP}`"),
    ],
    "gradient_spikes": [
        # Zeros, steps in which every group is flat and the first tenth do not count.
        ({**SPIKES, **FLAT_STEP}, {"infinite": [18]}, "3 median=0.4 spikes=2 norms=18 largest=9.0 at=3 lost=0.10"),
        (norms(at2=9.0, at12=3.9), {}, "fine 0.4 9 4"),
        # The logarithms lie 1 above and below 0, so that a robust standard deviation is 1.4826.
        ({"grad_norm": [math.e, 1 / math.e] * 10}, {}, f"fine {math.exp(6 * 1.4826):.2g}"),
        ({"grad_norm": [*flat(1.0, 11), 10.0, *flat(1.0, 8)]}, {}, "12 spikes=1 norms=20 largest=10.0 at=12 lost=0.05"),
        ({"grad_norm": flat(0.4, 11)}, {}, "no-data 12"),
        ({"grad_norm": flat(0.4, 12)}, {}, "fine"),
        ({"grad_norm": flat(0.4, 7), "reward": flat(1.0)}, {"infinite": [3, 8, 9, 10]}, "8 count=3 lost=0.3 since=7"),
        ({"grad_norm": flat(0.4, 18), "reward": flat(1.0, 20)}, {"infinite": [18, 19, 20]}, "fine"),  # two at the end
    ],
    "stale_tokens": [
        (sizes(flat(1.0), flat(0.9, 5) + flat(0.5, 5), mismatched=flat(0.7)), {}, "6 size=0.5 number=2 lost=0.3"),
        (sizes(flat(1.0), mismatched=flat(0.75)), {}, "1 size=0.75 number=1 is_mismatch=True lost=0.25 limit=0.8"),
        (sizes(flat(0.8, 5) + flat(0.6, 5)), {}, "6 size=0.6 is_mismatch=False lost=0.3"),
        (sizes(flat(0.8), mismatched=flat(0.8)), {}, "fine 80%"),
        (sizes(flat(1.0), flat(1.0, 3)), {}, f"no-data `{SIZE.format(2)}`"),
        ({}, config(**PLANNED), "n/a"),
        ({}, config(**PLANNED, steps_per_generation=8), "no-data"),
        ({}, config(gradient_accumulation_steps=4, num_iterations=2), "no-data"),
        ({}, config(gradient_accumulation_steps=4, num_iterations=2, steps_per_generation=2), "n/a"),
    ],
}

# ---- Learning


def paid(right: Sequence[float] = (), tags: Sequence[float] = (), **more: Sequence[float]) -> Metrics:
    return {"rewards/right/mean": right, "rewards/tags/mean": tags, **more}


def other(values: Sequence[float], **more: Sequence[float]) -> Metrics:
    return {"rewards/other/mean": values, "rewards/tags/mean": RISING, **more}


def summed(**parts: Sequence[float]) -> Metrics:
    """Return the metrics of a sum of rewards and of its parts, of which the format rises."""
    return {f"rewards/total/{name}": values for name, values in {"mean": HALF, "tags": RISING, **parts}.items()}


def of_parts(*parts: dict[str, Any]) -> dict[str, Any]:
    return beside({"name": "total", "source": "sum", "kind": "other", "parts": list(parts)})


def grown(reward: Sequence[float], **more: Sequence[float]) -> Metrics:
    return {LENGTH: LENGTHS, "reward": reward, **more}


CAP = {"config": {"max_completion_length": 100}}
LATE = {"rewards/late/mean": flat(0.5)}
ALONE = "10 reward=tags start=0.15 end=0.95 lost=0.4 since=6"
NOISY = [0.0, 0.4, 0.0, 0.4, 0.0, 0.4, 0.0, 0.4, 0.5, 0.5]
# A reward that rises by 3 with a standard error of 1, a third of its margin of 5 %: together 4, 1/16 of 64. The format
# rises by 6/64 of 3/4, which is 1/8.
SLOW = paid([57.0, 58.0, 59.0, 60.0], ramp(8, 1 / 64))
BETTER = accuracy((0.4, 0.3, 0.5), (0.7, 0.6, 0.8))

CASES |= {
    "format_without_correctness": [
        (paid(HALF, RISING), BOTH, f"{ALONE} judge=right judge_start=0.5 judge_end=0.5 limit=0.5"),
        (paid(HALF, RISING), {**BOTH, **BETTER}, ALONE),  # correctness is known, whatever an evaluation shows
        (paid(HALF, RISING[:7]), BOTH, "no-data 8"),
        (paid(flat(0.5), flat(0.5, 8)), BOTH, "fine `tags` 0.50"),
        (paid([0.0, 0.2, 0.5], RISING), BOTH, "no-data `right`"),
        (paid(RISING, RISING), BOTH, "fine `right`"),
        (paid(flat(0.9), RISING), BOTH, "fine"),  # nine tenths of the pay leave little room to rise
        (paid(flat(0.895), RISING), BOTH, "10"),
        (paid(NOISY, RISING), BOTH, "fine `right` 0.20 0.50"),
        (SLOW, beside({"name": "right", "highest_pay": 64.0}, {**TAGS, "highest_pay": 0.75}), "fine"),
        (SLOW, beside({"name": "right", "highest_pay": 64.5}, {**TAGS, "highest_pay": 0.75}), "8"),
        (paid(HALF, RISING, eval_reward=RISING), {**BOTH, **INFORMATIVE}, "fine"),
        (paid(HALF, RISING, eval_reward=flat(0.5)), {**BOTH, **INFORMATIVE}, "no-data `sampling`"),
        (paid((), RISING), beside(TAGS), ALONE),
        (summed(right=HALF), of_parts(TAGS, RIGHT), "10 reward=total/tags judge=total/right"),
        (summed(judge=RISING), of_parts(TAGS, JUDGE), "fine `total/judge`"),
        (other(flat(0.5)), beside(OTHER, TAGS, **BETTER), "fine"),
        (other(flat(0.5)), beside(OTHER, TAGS, **accuracy((0.4, 0.3, 0.5), (0.7, 0.5, 0.8))), ALONE),
        # A length is no correctness, as long as another reward may be.
        (other(flat(0.5), **{"rewards/short/mean": RISING}), beside(TAGS, SHORT, OTHER), ALONE),
        (paid(flat(0.5, 3), RISING, **LATE), beside(RIGHT, TAGS, {**RIGHT, "name": "late"}), "10 judge=late"),
    ],
    "length_into_cap": [
        ({LENGTH: LENGTHS}, config(max_completion_length=100), "8 start=15.0 end=95.0 cap=100 growth=0.74 limit=80.0"),
        ({LENGTH: LENGTHS}, config(max_completion_length=118.75), "10"),  # 95 is 80 % of it
        ({LENGTH: LENGTHS}, config(max_completion_length=119), "fine 119"),
        ({LENGTH: [10, 10, 90, 10, 90, 10, 20, 20]}, config(max_completion_length=10), "fine"),  # noise
        ({LENGTH: [100, 108, 117, 125]}, config(max_completion_length=125), "1 growth=0.11"),  # by a quarter
        ({LENGTH: LENGTHS}, config(max_completion_length=None), "n/a"),
        ({LENGTH: LENGTHS}, {}, "no-data `run.json`"),
    ],
    "length_without_gain": [
        (grown(flat(1.0)), BOTH, "2 start=15.0 end=95.0 reward_start=1.0 reward_end=1.0 growth=0.74 limit=1.25"),
        (grown(flat(1.0)), of_most(0.5), "fine"),  # a tenth of it is the margin
        (grown(flat(1.0)), of_most(0.505), "2"),
        (grown([*flat(-1.0, 9), -0.5]), beside(OTHER), "fine -1.00 -0.75"),
        (grown(RISING), beside(OTHER), "fine 0.15 0.95"),
        (grown(flat(1.0)), BETTER, "fine"),
        (grown(flat(1.0)), INFORMATIVE, "no-data `sampling`"),
        (grown(flat(1.0), **{"rewards/x/mean": RISING}), beside({"name": "x", "kind": "format"}), "2"),
        (grown(flat(1.0), **{"rewards/x/mean": RISING}), beside({"name": "x", "kind": "judge"}), "fine `x`"),
        ({LENGTH: [16, 16, 20, 30, 40, 50, 60, 70], "reward": flat(1.0, 8)}, {}, "3"),
    ],
    "truncated": [
        ({"completions/clipped_ratio": flat(0.25, 4)}, {}, "fine 25%"),
        ({"completions/clipped_ratio": flat(0.3)}, {}, "10 share=0.3 lost=0.3 limit=0.25"),
        # A truncated completion has as many tokens as the cap.
        ({"completions/clipped_ratio": flat(0.3), LENGTH: flat(50.0)}, CAP, "10 lost=0.6"),
    ],
    "entropy_collapse": [
        ({"entropy": [1.0, 1.0, 0.9, 0.7, 0.5, 0.1, 0.09, 0.05, 0.05, 0.05]}, {}, "7 end=0.05 lost=0.3 limit=0.1"),
        ({"entropy": [1.0, 1.0, 0.9, 0.7, 0.5, 0.1, 0.1, 0.1, 0.1, 0.1]}, {}, "fine 1.000 0.100"),
        ({"entropy": [1.0, 1.0, 9.0, 0.0, 9.0, 0.0, 0.05, 0.05]}, {}, "fine"),  # its noise hides the fall
        ({"entropy": [1.0, 1.0, *flat(0.05, 8)], "reward": flat(0.9)}, beside(RIGHT), "fine"),  # nearly all is solved
    ],
    "zero_variance": [
        ({ZERO: flat(0.5, 4)}, {}, "fine 50% 80%"),
        ({ZERO: flat(0.6)}, {}, "1 share=0.6 lost=0.6 limit=0.5 easy=None"),
        ({ZERO: flat(0.0, 6) + flat(0.8, 2) + flat(0.9, 2)}, {}, "9 share=0.9 lost=0.34 limit=0.8"),
        ({ZERO: flat(0.0, 8) + flat(0.8, 2)}, {}, "fine 16% 80%"),
    ],
    "no_answer_found": [
        ({}, BOTH, "no-data"),
        ({}, beside(TAGS), "n/a"),
        ({"rewards/a/parsed": flat(0.9), "rewards/b/parsed": flat(0.5), "rewards/c/parsed": []}, {}, "fine `b` 50%"),
        ({"rewards/a/parsed": flat(0.5), "rewards/b/parsed": flat(0.0)}, {}, "10 reward=b"),
    ],
}

# ---- Trends


def spread(right: Sequence[float] = (), tags: Sequence[float] = (), **more: float) -> Metrics:
    found = {"right": right, "tags": tags, **{name: flat(value) for name, value in more.items()}}
    return {f"rewards/{name}/std": values for name, values in found.items() if len(values)}


def overfitted(held_out: Sequence[float] = (), **more: Any) -> tuple[Metrics, dict[str, Any]]:
    return {"reward": RISING, "eval_reward": held_out}, more


EVEN = {"steps": list(range(2, 33, 2))}
ROSE = [0.25, 0.5, 0.75, *flat(1.0, 13)]
PAYS_2, PAYS_100 = of_most(2.0, **EVEN), of_most(100.0, **EVEN)

CASES |= {
    "dominant_reward": [
        (spread(flat(1.0), flat(4.0)), BOTH, "fine 94% `tags`"),
        (spread(flat(1.0), flat(5.0)), BOTH, "10 reward=tags share=0.96 lost=1 limit=0.95"),
        (spread(flat(1.0), flat(5.0)), beside({**RIGHT, "weight": 2.0}, TAGS), "fine 86%"),
        (spread(flat(5.0), flat(1.0)), BOTH, "fine 96% `right`"),
        (spread(flat(1.0), other=5.0), beside(RIGHT, OTHER), "10 reward=other share=0.96"),
        (spread(flat(0.0), flat(0.0)), BOTH, "fine"),
        (spread((), flat(1.0)), beside(TAGS), "n/a"),
        (spread(other=1.0, judge=9.0), beside(OTHER, JUDGE), "n/a"),
        (spread(flat(1.0), flat(9.0)), {}, "no-data `run.json`"),
        # The variances of all steps are added: 1 and 19 are 95 % exactly.
        (spread([1.0, *flat(0.0, 9)], [3.0, 3.0, 1.0, *flat(0.0, 7)]), BOTH, "fine 95% `tags`"),
        (spread(flat(0.0, 5) + flat(1.0, 5), flat(0.0, 5) + flat(9.0, 5)), BOTH, "10 share=0.99 lost=0.5"),
        (spread(flat(1.0, 3), flat(1.0)), BOTH, "no-data `rewards/right/std`"),
    ],
    "overfitting": [
        (*overfitted([0.5, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]), "8 held_out_start=0.55 since=2 lost=0.8"),
        (*overfitted(flat(0.5)), "1 held_out_end=0.5 lost=0.9 limit=0.25"),
        (*overfitted(flat(0.5), **of_most(0.55)), "fine"),  # nine tenths of the highest pay
        (*overfitted([*flat(0.5, 8), 0.7, 0.7]), "fine 0.50 0.70"),  # a quarter of the rise of 0.8
        ({"reward": ramp(10), "eval_reward": [10, 10, 11, 9, 11, 9, 11, 9, 11.95, 11.95]}, {}, "1 held_out_end=11.95"),
        ({"reward": ramp(10), "eval_reward": [10, 10, 11, 9, 11, 9, 11, 9, 12.0, 12.0]}, {}, "fine"),  # 2 of 8
        (*overfitted(ramp(60, 0.01)[50:]), "fine 0.51 0.58"),  # a slow rise, but a clear one
        (*overfitted(flat(0.5, 3)), "no-data"),
        (*overfitted(**accuracy((0.6, 0.5, 0.7), (0.4, 0.3, 0.49))), "10 limit=None"),
        (*overfitted(**accuracy((0.6, 0.5, 0.7), (0.4, 0.3, 0.5))), "1 limit=0.05"),  # intervals that meet
        (*overfitted(**accuracy((0.5, 0.48, 0.52), (0.51, 0.5, 0.54))), "fine 0.500 0.510"),
        (*overfitted(**accuracy((0.02, 0.0, 0.04), (0.03, 0.01, 0.05))), "1 lost=0.9"),  # a gain of at most 5 %
        (*overfitted(**accuracy((0.92, 0.9, 0.95), (0.92, 0.9, 0.94))), "1"),  # just room for 5 % more
        (*overfitted(**accuracy((0.95, 0.94, 0.96), (0.95, 0.94, 0.96))), "fine"),
    ],
    "plateau": [
        ({"reward": ROSE}, PAYS_2, "8 start=1.0 end=1.0 lost=0.75 since=8 limit=0.1"),
        ({"reward": [0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, *flat(1.0, 8)]}, PAYS_2, "18 lost=0.44"),
        # The plateau is at 20 and has a margin of 1, so that it begins at 19.
        ({"reward": [10, 12, 14, 16, 17, 18, 19, 19, *flat(20.0, 8)]}, PAYS_100, "14 lost=0.56"),
        # From 1 to 6 in all and from 5 to 6 in the second half, which is a fifth and not more than its noise.
        ({"reward": [*flat(1.0, 4), 2, 3, 4, 5, 5, 5, 6, 5, *flat(6.0, 4)]}, PAYS_100, "fine"),
        ({"reward": [*flat(1.0, 4), 2, 3, 4, 5, 5, 5, 6, 5, *flat(5.97, 4)]}, PAYS_100, "14"),
        ({"reward": [1.0, 1.2] * 8}, PAYS_2, "fine"),
        ({"reward": ROSE[:15]}, {"steps": EVEN["steps"][:15]}, "no-data 16"),
        ({"reward": ROSE}, {"steps": [*range(1, 16), 29]}, "no-data 30"),
        ({"reward": ROSE}, of_most(1.26, **EVEN), "8"),
        ({"reward": ROSE}, of_most(1.25, **EVEN), "fine"),  # 80 % of the highest pay
        ({"reward": ROSE}, beside(OTHER, rows=scored([(1, 0, 0.0), (1, 0, 1.25)]), **EVEN), "fine"),
        ({"reward": ROSE, ZERO: flat(0.5, 16)}, PAYS_2, "fine"),
        ({"reward": ROSE, ZERO: flat(0.49, 16)}, PAYS_2, "8"),
        ({"reward": ROSE}, {**INFORMATIVE, **EVEN}, "no-data `sampling`"),
        ({"reward": ROSE, "eval_reward": ramp(16, 1 / 8)}, EVEN, "fine 1.06 1.81"),
        # The second half of 32 steps begins at step 17. Four evaluations from there on have a trend, three have none.
        ({"reward": flat(1.0, 32), "eval_reward": ramp(19, 1 / 8)}, of_most(2.0), "1"),
        ({"reward": flat(1.0, 32), "eval_reward": ramp(20, 1 / 8)}, of_most(2.0), "fine 2.00 2.38"),
    ],
}

# ---- Tools and completions


def eight(step: int, calls: int, *totals: float) -> list[tuple[int, int, float]]:
    """Return eight completions of a step with as many calls, whose rewards repeat `totals`."""
    return [(step, calls, totals[place % len(totals)]) for place in range(8)]


def by_step(*totals: float, calls: Sequence[int] = (1, 1, 2, 2)) -> list[tuple[int, int, float]]:
    """Return eight completions of each of some steps, all of a step with one reward."""
    return [row for step, total in enumerate(totals) for row in eight(step + 1, calls[step], total)]


def calling(rows: Sequence[Any], reward: Sequence[float] = RISING, **more: Any) -> tuple[Metrics, dict[str, Any]]:
    return {"reward": reward, "tools/calls": []}, {"rows": scored(rows).assign(note=math.nan), **more}


def tool(**shares: float) -> Metrics:
    """Return shares of the metrics of tools at four steps."""
    return {f"tools/{name.replace('__', '/')}": flat(share, 4) for name, share in shares.items()}


def groups(*repeats: bool, reward: float = 0.0) -> list[dict[str, Any]]:
    """Return a group of two completions for each of some steps, which repeat one text of 10 letters or do not."""
    shared = {"total": reward, "characters": 10, "calls": 0}
    return [
        {"step": step, "prompt": step, "completion": f"{step} {0 if same else member}", **shared}
        for step, same in enumerate(repeats, 1)
        for member in range(2)
    ]


def shown_rows(*rows: dict[str, Any]) -> tuple[Metrics, dict[str, Any]]:
    return {"reward": flat(0.5)}, {"rows": pd.DataFrame(rows)}


def scores(totals: list[float], **declared: Any) -> tuple[Metrics, dict[str, Any]]:
    """Return a run without variance whose logged groups have two completions each."""
    rows = scored([(place // 2, 0, total) for place, total in enumerate(totals)])
    rewards = [{"name": "mine", "kind": "correctness", **declared}]
    return {ZERO: flat(0.6)}, {"rows": rows.assign(**{"pay/mine": rows["total"]}), "rewards": rewards}


HALVES = [*eight(1, 1, 0)[:4], *eight(1, 2, 0)[:4], *eight(2, 1, 0), *eight(3, 1, 0)]
# Eight values whose mean is 0 and has a standard error of (14 / 7 / 8) ** 0.5.
DEVIATIONS = (-1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -2.0, 2.0)
TWO_LEVELS = [row for step in (1, 2, 3, 4) for row in eight(step, 1 + (step > 2), *((0, 1) if step < 3 else (2, 3)))]
BEST = [{**row, "step": 8, "prompt": 8} for row in groups(False, reward=1.0)]
SINGLE = [{**BEST[0], "prompt": prompt, "total": 0.0} for prompt in range(90, 99)]
PAY_1 = {"highest_pay": 1.0, "passes_at": 1.0}
BY_CALLS = [*by_step(1, 1, 1, calls=(1, 1, 1)), *eight(4, 1, 2.0)[:4], *eight(4, 3, 2.0)[:4]]

CASES |= {
    "tools_never_called": [
        ({"tools/call_frequency": flat(0.0)}, {}, "10 calls=0 limit=0"),
        ({"tools/call_frequency": flat(1.0, 5) + flat(0.0, 5)}, {}, "5"),
        ({"tools/call_frequency": HALF, "tools/a/calls": [0.0], "tools/b/calls": [1.0]}, {}, "fine 0.5 `a`"),
        ({"reward": flat(1.0)}, {}, "n/a"),
        ({}, {"recipe": {"tools": ["add"]}}, "no-data `tools/call_frequency`"),
    ],
    "failing_tools": [
        (tool(failure_frequency=0.5, call_frequency=1, a__calls=1, a__failures=0.1), {}, "fine 50%"),
        (tool(failure_frequency=0.5, call_frequency=1, a__calls=1, a__failures=0.102), {}, "4 tool=a limit=0.1"),
        (tool(failure_frequency=0.6, call_frequency=1, a__calls=1, a__failures=0.1), {}, "4 share=0.6 limit=0.5"),
        (tool(failure_frequency=0.6, call_frequency=0, a__calls=0, a__failures=0.2), {}, "no-data"),
    ],
    "tool_limits_hit": [
        (tool(rows_at_limit=0.125, rows_out_of_budget=0.125), {}, "fine 25%"),
        (tool(rows_at_limit=0.25, rows_out_of_budget=0.125), {}, "4 share=0.375 metric=tools/rows_at_limit"),
        (tool(rows_at_limit=0.125, rows_out_of_budget=0.25), {}, "4 metric=tools/rows_out_of_budget limit=0.25"),
    ],
    "calls_without_gain": [
        (*calling(eight(1, 1, 0, 1) + eight(2, 1, 0, 1), HALF), "2 calling=1 start=0.5 end=0.5 limit=0.95"),
        (*calling([*eight(1, 1, 0, 1)[:7], (1, 1, math.nan)], HALF), "no-data 8"),
        (*calling([(1, 1, 1.0)] * 19 + [(1, 1, 0.0)], HALF), "fine"),  # a mean at 95 % of the range
        (*calling([(1, 1, 1.0)] * 18 + [(1, 1, 0.0)], HALF), "1"),
        (*calling([(1, 1, 1.0)] * 19 + [(1, 0, 0.0)], HALF), "fine 95%"),
        (*calling(eight(1, 0, 0, 1) + eight(2, 1, 0, 1), HALF), "2 with_calls=0.50 without=0.50"),
        (*calling(eight(1, 0, 0) + eight(2, 1, 0, 1), HALF), "fine 0.50 0.00"),
        (*calling(eight(1, 0, 0)[:7] + eight(2, 1, 0, 1), HALF), "2"),
        # A difference of 1 is exactly two standard errors.
        (*calling([*eight(1, 0, 0), *eight(2, 1, *(1 + one for one in DEVIATIONS))], HALF), "2 with_calls=1.00"),
        (*calling([*eight(1, 0, 0), *eight(2, 1, *(1.1 + one for one in DEVIATIONS))], HALF), "fine 1.10"),
    ],
    "reward_by_calls_alone": [
        (*calling(by_step(1.0, 1.0, 2.0, 2.0), **beside(OTHER)), "4 start=1.0 end=2.0 rise=1.0 limit=0.9"),
        # Half of the last completions have one call, as all of the first, and earn 2 instead of 1: (1 + 1/2) / 2.
        (*calling(BY_CALLS, **beside(RIGHT)), "fine 0.75 1.00"),
        # The numbers of calls explain 4/5 of the variance, which does not matter where answers are judged.
        (*calling(TWO_LEVELS, **beside(OTHER)), "fine 80%"),
        (*calling(TWO_LEVELS, **beside(RIGHT, OTHER)), "4 rise=2.0 at_equal_calls=0.0"),
        (*calling(by_step(1, 1, 1, 1, calls=(0, 0, 1, 1)), **beside(OTHER)), "no-data"),
        (*calling(by_step(1.0, 1.0, 2.0, 2.0)[:-1], **beside(OTHER)), "no-data"),
        # A tenth of a rise of 4 is 0.4.
        (*calling([*HALVES, *eight(4, 2, 0.7)[:4], *eight(4, 3, 7.3)[:4]], **beside(RIGHT)), "4 at_equal_calls=0.35"),
        (*calling([*HALVES, *eight(4, 2, 1.0)[:4], *eight(4, 3, 7.0)[:4]], **beside(RIGHT)), "fine 0.50 4.00"),
        # The first quarter of eight steps are two.
        (*calling([row for n in range(1, 9) for row in eight(n, n, n)], **beside(OTHER)), "8 start=1.5 end=7.5"),
        (*calling(by_step(1, 2, 3, 4, calls=(1, 1, 1, 1)), **beside(RIGHT)), "fine 1"),
        ({"reward": RISING, "rewards/right/mean": RISING, "tools/calls": []}, beside(OTHER, RIGHT), "fine `right`"),
    ],
    "identical_completions": [
        (*shown_rows(*groups(True, True, True)), "no-data"),
        (*shown_rows(*groups(True, True, False, False), *BEST), "fine 50%"),
        (*shown_rows(*groups(False, True, True, True), *BEST), "2 share=0.75 wasted=0.6 limit=0.5"),
        (*shown_rows(*groups(True, True, False, False), *BEST, *SINGLE), "fine 50%"),  # groups of one repeat nothing
    ],
    "zero_variance ": [
        # A group at 7 of at most 14 is not in the upper half. Neither is a group at 5 between -6 and 14.
        (*scores([10, 10, 14, 0, 7, 7], highest_pay=14.0), "1 easy=0.5"),
        (*scores([-6, -6, 14, 0, 5, 5], highest_pay=14.0), "1 easy=0.5"),
        (*scores([0.6, 0.6, 1, 0.6, 1, 1], **PAY_1), "1 easy=0.5"),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_a_check_finds_what_its_threshold_requires(name: str) -> None:
    assert [one for case in CASES[name] for one in differences(CHECKS[name.strip()], case)] == []


def test_every_check_has_cases() -> None:
    assert {name.strip() for name in CASES} == set(CHECKS)


def test_clipping_in_the_first_pass_is_not_staleness() -> None:
    """More than half of the limit is clipped before any update, which stale tokens do not explain."""
    findings = [update_checks.clipped_tokens(logged(clipped(share, 0.5))) for share in (0.11, 0.1)]
    assert [finding.figures["passes"] for finding in findings] == [{1: 0.11, 2: 0.5}, {1: 0.1, 2: 0.5}]
    assert ["generation-check" in finding.sentence for finding in findings] == [True, False]


def test_the_training_reward_counts_from_the_first_evaluation_on() -> None:
    """The last four points of training rise by 0.3, of which 0.08 is more than a quarter."""
    for held_out, expected in (([0.5, 0.5, 0.5, 0.58], "fine"), (flat(0.5, 4), "7")):
        run = logged({"reward": RISING})
        run.log.metrics["eval_reward"] = (array("q", range(7, 11)), array("d", held_out))
        assert result(progress_checks.overfitting, run)[0] == expected


def test_a_completion_earns_much_if_it_passes_every_judge() -> None:
    rows = pd.DataFrame({"total": 1.0, "pay/a": [1.0, 1.0, 0.0], "pay/b": [1.0, 0.0, 0.0]})
    assert list(reward_checks.earns_much(rows, [RunReward(name, passes_at=1.0) for name in "ab"])) == [
        True,
        False,
        False,
    ]


def test_rows_beyond_the_named_ones_are_an_ellipsis() -> None:
    for count, rows in ((diagnostics.NAMED_ROWS, "a; b"), (diagnostics.NAMED_ROWS + 1, "a; b; …")):
        golds = {"count": count, "total": 99, "rows": ["a", "b"]}
        finding = diagnostics.unscorable_golds(logged({}, unscorable_golds=golds))
        assert finding is not None
        assert finding.figures == {"count": count, "total": 99, "rows": rows}
    assert diagnostics.unscorable_golds(logged({})) is None


def test_a_reward_that_scored_no_completion_is_named() -> None:
    for means, named in ((([], []), ["a", "b"]), (([0.5], []), ["b"]), (([0.5], [0.0]), [])):
        metrics = {f"rewards/{name}/mean": values for name, values in zip("ab", means, strict=True)}
        finding = diagnostics.unscored(logged(metrics, [1, 2], rewards=[{"name": "a"}, {"name": "b"}]))
        assert re.findall("`(.)`", finding.figures["rewards"] if finding else "") == named
