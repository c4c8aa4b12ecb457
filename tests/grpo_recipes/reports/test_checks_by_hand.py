"""Every figure of the checks' sentences, worked out by hand from logs of a few points.

Ten points have quarters of two. The default run spends a tenth of its tokens in each of ten steps.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest

from grpo_recipes.reports import diagnostics, tool_checks, update_checks
from grpo_recipes.reports.checking import MOVING_PROMPTS, DoesNotApply, NoData
from grpo_recipes.reports.run import OutOfTime, Run, Sampled
from tests.support.logged_runs import logged, scored

RISING = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]  # from 0.15 to 0.95 by quarters
LENGTHS = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 100.0]
RIGHT = {"name": "right", "kind": "correctness", "highest_pay": 1.0}
TAGS = {"name": "tags", "kind": "format", "highest_pay": 1.0}
OTHER = {"name": "other", "kind": "other"}
STAYS = "`right` goes from 0.50 to 0.50"


def accuracy(before: tuple[float, float, float], after: tuple[float, float, float]) -> dict[str, Any]:
    return {
        label: {"strict": dict(zip(("value", "low", "high"), numbers, strict=True))}
        for label, numbers in (("before", before), ("after", after))
    }


def flat(value: float, count: int = 10) -> list[float]:
    return [value] * count


def result(check: Any, run: Run) -> Any:
    """Return what a check finds, or the name and the text of the reason why it can't be made."""
    try:
        return check(run)
    except (NoData, DoesNotApply) as reason:
        return type(reason), str(reason)


KL = "KL to the reference"
CLIP = "clip_ratio/region_mean"
STALE = "the tokens are stale: lower `learning_rate`, `num_iterations` or `steps_per_generation`"
SIZE, MISMATCHED = "passes/{}/effective_sample_size", "passes/{}/effective_sample_size_with_mismatch"
PLANNED = {"gradient_accumulation_steps": 4, "num_iterations": 1}
ONE_PASS = (DoesNotApply, "each generation is trained on in one pass")
NO_PASSES = (NoData, "`passes/1/effective_sample_size` was not logged")
LOST = (
    "a step changes 2.{}% of the trained weights up to step 22, where 4.0% would change if no update were lost to "
    "rounding"
)


@pytest.mark.parametrize(
    ("metrics", "config", "expected"),
    [
        (
            {"kl": flat(0.1, 4) + flat(2.0, 6)},
            {"beta": 0.1},
            (
                5,
                f"{KL} reaches 2.0 nats per token, above 1 from step 5: 50% of the run's tokens come after step 5; "
                "lower `learning_rate` or raise `beta`",
            ),
        ),
        (
            {"kl": flat(1.0, 5) + flat(2.0, 5)},
            {},
            (
                6,
                f"{KL} reaches 2.0 nats per token, above 1 from step 6: 40% of the run's tokens come after step 6; "
                "lower `learning_rate` or raise `beta`",
            ),
        ),
        ({"kl": flat(1.0)}, {"beta": 0.0}, f"{KL} is at most 1 nats per token (limit 1)"),
        ({"kl": [0.1] * 4 + [9.0] * 2 + [0.1] * 4}, {}, f"{KL} is at most 0.1 nats per token (limit 1)"),
        ({"reward": flat(1.0)}, {"beta": 0}, (DoesNotApply, "`beta` is 0, so that no KL is computed")),
        ({"reward": flat(1.0)}, {}, (NoData, "`kl` was not logged")),
    ],
)
def test_the_kl_counts_as_a_median_of_five_points(metrics: Any, config: Any, expected: Any) -> None:
    assert result(update_checks.kl_blow_up, logged(metrics, config=config)) == expected


@pytest.mark.parametrize(
    ("changed", "steps", "expected"),
    [
        (
            [0.9, 0.9, 0.03, 0.01],
            [10, 20, 21, 22],
            (
                22,
                LOST.format(0) + ", so that 50% of the changes are wasted: set `dtype: float32` or `optim: adamw_bf16` "
                "(docs/precision.md)",
            ),
        ),
        ([0.0, 0.0, 0.03, 0.018], [10, 20, 21, 22], LOST.format(4)),  # 60 % of 4 %
        ([0.01, 0.01], [19, 20], (NoData, "the run has no more than 20 steps")),
    ],
)
def test_updates_of_the_first_20_steps_do_not_count(changed: Any, steps: Any, expected: Any) -> None:
    expectation = [0.9, 0.9, 0.03, 0.05][: len(changed)]
    run = logged({"updates/changed": changed, "updates/expected": expectation}, steps)
    assert result(update_checks.lost_updates, run) == expected


@pytest.mark.parametrize("missing", ["updates/changed", "updates/expected"])
def test_updates_are_compared_only_if_both_shares_were_logged_after_step_20(missing: str) -> None:
    shares = {"updates/changed": flat(0.04, 3), "updates/expected": flat(0.04, 3)}
    run = logged(shares | {missing: [0.04, 0.04]}, [19, 20, 21])
    assert result(update_checks.lost_updates, run) == (NoData, "the run has no more than 20 steps")


@pytest.mark.parametrize(
    ("metrics", "config", "expected"),
    [
        (
            {CLIP: flat(0.0, 8) + flat(0.5, 2)},
            {},
            (
                9,
                "the loss clips 50% of the tokens at the end of the run, more than 20% first at step 9: 10% of the "
                f"run's tokens have no gradient; {STALE}, or raise `epsilon` and `epsilon_high`",
            ),
        ),
        (
            {CLIP: flat(0.2, 8) + flat(0.5, 2)},  # 26 % on average
            {},
            (
                9,
                "the loss clips 26% of the tokens of the run, more than 20% first at step 9: 26% of the run's tokens "
                f"have no gradient; {STALE}, or raise `epsilon` and `epsilon_high`",
            ),
        ),
        (
            {CLIP: flat(0.3), "passes/1/clip_share": flat(0.11), "passes/2/clip_share": flat(0.5)},
            {},
            (
                1,
                "the loss clips 30% of the tokens of the run, more than 20% first at step 1 (pass 1: 11%, pass 2: "
                "50%): 30% of the run's tokens have no gradient; pass 1 comes before any update, so that sampling or "
                "the log-probabilities of the loss differ from the policy that generated (docs/generation-check.md)",
            ),
        ),
        (
            {"cispo_clip_ratio": flat(0.25, 4), "passes/1/clip_share": flat(0.1, 4)},
            {},
            (
                1,
                "the loss clips 25% of the tokens of the run, more than 20% first at step 1: 25% of the run's tokens "
                f"have no gradient; {STALE}, or raise `epsilon` and `epsilon_high`",
            ),
        ),
        ({CLIP: flat(0.2, 4)}, {}, "the loss clips 20% of the tokens at the end of the run (limit 20%)"),
        (
            {CLIP: flat(0.5)},
            {"importance_sampling_level": "sequence"},
            "the loss clips 50% of the tokens at the end of the run (limit 50%)",
        ),
        ({CLIP: flat(0.5, 3)}, {}, (NoData, f"`{CLIP}` was logged fewer than four times")),
        ({}, {"loss_type": "sapo"}, (DoesNotApply, "the loss `sapo` clips no tokens")),
        ({}, {"loss_type": "vespo"}, (DoesNotApply, "the loss `vespo` clips no tokens")),
        ({}, {"loss_type": "dapo"}, (NoData, f"`{CLIP}` was not logged")),
    ],
)
def test_clipped_tokens_are_counted_in_the_run_and_at_its_end(metrics: Any, config: Any, expected: Any) -> None:
    assert result(update_checks.clipped_tokens, logged(metrics, config=config)) == expected


def norms(**changed: float) -> list[float]:
    """Return 20 gradient norms of 0.4, except at the steps that are named."""
    return [changed.get(f"at{step}", 0.4) for step in range(1, 21)]


NORM = "the gradient norm has a median of "


@pytest.mark.parametrize(
    ("metrics", "infinite", "expected"),
    [
        (
            {
                "grad_norm": norms(at2=9.0, at3=9.0, at10=4.1, at12=3.9, at15=50.0, at16=0.0),
                "frac_reward_zero_std": [float(step == 15) for step in range(1, 21)],
            },
            [18],
            (
                3,
                f"{NORM}0.4, and 2 of 18 norms are spikes, the largest 9 at step 3: 10% of the run's tokens are in "
                "updates that few rows decide; look at the completions of these steps, and lower `learning_rate` or "
                "`max_grad_norm`",
            ),
        ),
        ({"grad_norm": norms(at2=9.0, at12=3.9)}, [], f"{NORM}0.4 and is at most 9 (a spike has 4)"),
        # The logarithms lie 1 above and below 0, so that a robust standard deviation is 1.4826.
        (
            {"grad_norm": [math.e, 1 / math.e] * 10},
            [],
            f"{NORM}1.5 and is at most 2.7 (a spike has {math.exp(6 * 1.4826):.2g})",
        ),
        # With a median of 1, whose logarithm is 0, a norm of 10 is exactly ten times the median.
        (
            {"grad_norm": [*flat(1.0, 11), 10.0, *flat(1.0, 8)]},
            [],
            (
                12,
                f"{NORM}1, and 1 of 20 norms are spikes, the largest 10 at step 12: 5% of the run's tokens are in "
                "updates that few rows decide; look at the completions of these steps, and lower `learning_rate` or "
                "`max_grad_norm`",
            ),
        ),
        # Six deviations of such norms lie beyond the largest float: exp(700) is shown.
        ({"grad_norm": [1e300, 1e-300] * 10}, [], f"{NORM}5e+299 and is at most 1e+300 (a spike has 1e+304)"),
        ({"grad_norm": flat(0.4, 11)}, [], (NoData, "`grad_norm` was logged fewer than 12 times")),
        ({"grad_norm": flat(0.4, 12)}, [], f"{NORM}0.4 and is at most 0.4 (a spike has 4)"),
        (
            {"grad_norm": flat(0.4, 7), "reward": flat(1.0)},
            [3, 8, 9, 10],
            (
                8,
                "the gradient norm is NaN or infinite from step 8 to the end: 30% of the run's tokens come after step "
                "7 and train nothing; resume from an earlier checkpoint with a lower `learning_rate`, or with "
                "`dtype: float32`",
            ),
        ),
        (
            {"grad_norm": flat(0.4, 18), "reward": flat(1.0, 20)},
            [18, 19, 20],  # step 18 was repeated, and its norm was finite once
            f"{NORM}0.4 and is at most 0.4 (a spike has 4)",
        ),
    ],
)
def test_a_spike_is_ten_times_the_median_and_six_deviations(metrics: Any, infinite: Any, expected: Any) -> None:
    assert result(update_checks.gradient_spikes, logged(metrics, infinite=infinite)) == expected


BELOW = "It is below 80% first at step {}, which wastes {}% of the run's tokens; "
NOT_POLICY = (
    "with the generator's log-probabilities the effective sample size is {}% of the tokens already in pass 1, before "
    "any update: the generator is not the policy. "
)
ONE_DTYPE = "see docs/generation-check.md, and compute generator and policy in one dtype"
FEWER_PASSES = "lower `learning_rate`, `num_iterations` or `steps_per_generation`"


@pytest.mark.parametrize(
    ("metrics", "config", "expected"),
    [
        (
            {SIZE.format(1): flat(1.0), SIZE.format(2): flat(0.9, 5) + flat(0.5, 5), MISMATCHED.format(1): flat(0.7)},
            {},
            (
                6,
                "the effective sample size is 50% of the tokens in pass 2 at the end of the run (pass 1: 100%, pass "
                f"2: 50%): the tokens are stale. {BELOW.format(6, 30)}{FEWER_PASSES}",
            ),
        ),
        (
            {SIZE.format(1): flat(1.0, 4), MISMATCHED.format(1): flat(0.75, 4)},
            {},
            (1, NOT_POLICY.format(75) + BELOW.format(1, 25) + ONE_DTYPE),
        ),
        (
            {SIZE.format(1): flat(0.8, 5) + flat(0.6, 5)},
            {},
            (
                6,
                "the effective sample size is 60% of the tokens in pass 1 at the end of the run: the tokens are "
                f"stale. {BELOW.format(6, 30)}{FEWER_PASSES}",
            ),
        ),
        (
            {SIZE.format(1): flat(0.5, 4), MISMATCHED.format(1): flat(0.5, 4)},
            {},
            (1, NOT_POLICY.format(50) + BELOW.format(1, 50) + ONE_DTYPE),
        ),
        (
            {SIZE.format(1): flat(0.8, 4), MISMATCHED.format(1): flat(0.8, 4)},
            {},
            "the effective sample size is 80% of the tokens in pass 1 at the end of the run, and 80% in pass 1 with "
            "the generator's log-probabilities (limit 80%)",
        ),
        (
            {SIZE.format(1): flat(0.8, 4), "passes/2/clip_share": flat(0.1)},
            {},
            "the effective sample size is 80% of the tokens in pass 1 at the end of the run (limit 80%)",
        ),
        (
            {SIZE.format(1): flat(1.0), SIZE.format(2): flat(1.0, 3)},
            {},
            (NoData, "`passes/2/effective_sample_size` was logged fewer than four times"),
        ),
        ({}, PLANNED, ONE_PASS),
        ({}, {**PLANNED, "steps_per_generation": 8}, NO_PASSES),
        ({}, {**PLANNED, "num_iterations": 2}, NO_PASSES),
        ({}, {**PLANNED, "num_iterations": 2, "steps_per_generation": 2}, ONE_PASS),
        ({}, {**PLANNED, "generation_batch_size": 8}, NO_PASSES),
        ({}, {"num_iterations": 1}, NO_PASSES),
        ({}, {"gradient_accumulation_steps": 4}, NO_PASSES),
    ],
)
def test_the_worst_pass_decides_on_stale_tokens(metrics: Any, config: Any, expected: Any) -> None:
    assert result(update_checks.stale_tokens, logged(metrics, config=config)) == expected


def test_a_metric_of_each_pass_is_listed_by_the_number_of_the_pass() -> None:
    """Names that are no pass, or are other metrics, are left out, and so is a pass without points."""
    numbers = ("10", "2", "999999", "1000000", "x", "\u00b2")
    metrics = {f"passes/{number}/clip_share": [0.5] for number in numbers}
    run = logged({**metrics, "passes/3/clip_share": [], "passes/4/size": [0.5], "passes/5/clip_share/x": [0.5]})
    found = update_checks.passes(run, "clip_share")
    assert list(found) == [2, 10, 999_999]
    assert found[2].values == [0.5]


def paid(right: Sequence[float] = (), tags: Sequence[float] = (), **more: Sequence[float]) -> dict[str, Any]:
    return {"rewards/right/mean": right, "rewards/tags/mean": tags, **more}


RISES = "`tags` rises from 0.15 to 0.95"
GATE = (
    "40% of the run's tokens come after step 6, where half of the format is learnt; lower its `weight`, or pay it only "
    "with a right answer (`gate`)"
)
NOISY = [0.0, 0.4, 0.0, 0.4, 0.0, 0.4, 0.0, 0.4, 0.5, 0.5]


@pytest.mark.parametrize(
    ("metrics", "more", "expected"),
    [
        (paid(flat(0.5), RISING), {}, (10, f"{RISES} by step 10, while {STAYS}: {GATE}")),
        (paid(flat(0.5), RISING[:7]), {}, (NoData, "`tags` was logged fewer than 8 times")),
        (paid(flat(0.5), flat(0.5, 8)), {}, "no format reward rises: `tags` goes from 0.50 to 0.50"),
        (paid((), RISING), {}, (NoData, "`right` was logged fewer than four times")),
        # Three points that rise from 0 to 0.5 have no trend, so that they can't be called noise either.
        (paid([0.0, 0.2, 0.5], RISING), {}, (NoData, "`right` was logged fewer than four times")),
        (
            paid(flat(0.5), RISING),  # correctness is known to stay flat, whatever an evaluation says
            {"evaluations": accuracy((0.4, 0.3, 0.5), (0.7, 0.6, 0.8))},
            (10, f"{RISES} by step 10, while {STAYS}: {GATE}"),
        ),
        (
            {"rewards/other/mean": flat(0.5), "rewards/tags/mean": RISING},
            {
                "rewards": [OTHER, TAGS],
                "evaluations": accuracy((0.4, 0.3, 0.5), (0.7, 0.5, 0.8)),
            },  # intervals that meet
            (10, f"{RISES} by step 10, while `other` goes from 0.50 to 0.50: {GATE}"),
        ),
        (
            # A length is no correctness, as long as another reward may be.
            {"rewards/tags/mean": RISING, "rewards/short/mean": RISING, "rewards/other/mean": flat(0.5)},
            {"rewards": [TAGS, {"name": "short", "kind": "length"}, OTHER]},
            (10, f"{RISES} by step 10, while `other` goes from 0.50 to 0.50: {GATE}"),
        ),
        (
            # 4 is half of the way from 0.5 to 7.5.
            paid(flat(0.5), [float(place) for place in range(9)]),
            {"rewards": [RIGHT, {**TAGS, "highest_pay": 8.0}]},
            (
                9,
                f"`tags` rises from 0.50 to 7.50 by step 9, while {STAYS}: "
                f"{GATE.replace('40%', '50%').replace('step 6', 'step 5')}",
            ),
        ),
        (
            # Highest pays are unknown. Correctness rises by 0.15 of 0.6 and may rise by as much again, the format by
            # 0.8 of 1.
            paid([0.3, 0.6, 0.3, 0.6, 0.3, 0.6, 0.3, 0.6, 0.6, 0.6], RISING),
            {"rewards": [{"name": "right", "kind": "correctness"}, {"name": "tags", "kind": "format"}]},
            f"{RISES}, and `right` goes from 0.45 to 0.60, which may be noise",
        ),
        (paid(flat(0.5), flat(0.5)), {}, "no format reward rises: `tags` goes from 0.50 to 0.50"),
        (paid(RISING, RISING), {}, f"{RISES}, and so does `right`, from 0.15 to 0.95"),
        (paid(flat(0.9), RISING), {}, f"{RISES}, and correctness has little room to rise"),
        (paid(NOISY, RISING), {}, f"{RISES}, and `right` goes from 0.20 to 0.50, which may be noise"),
        (
            paid(flat(0.5), RISING, eval_reward=RISING),
            {"recipe": {"sampling": "informative"}},
            f"{RISES}, and so does the held-out reward",
        ),
        (
            paid(flat(0.5), RISING, eval_reward=flat(0.5)),
            {"recipe": {"sampling": "informative"}},
            (NoData, MOVING_PROMPTS),
        ),
        (paid(flat(0.5, 3), RISING), {}, (NoData, "`right` was logged fewer than four times")),
        (
            paid((), RISING),
            {"rewards": [TAGS]},
            (
                10,
                f"{RISES} by step 10, while no reward pays a correct answer: the format can be earned without solving "
                f"anything: {GATE}",
            ),
        ),
        (
            {"rewards/other/mean": flat(0.5), "rewards/tags/mean": RISING},
            {"rewards": [OTHER, TAGS], "evaluations": accuracy((0.4, 0.3, 0.5), (0.7, 0.6, 0.8))},
            f"{RISES}, and so does strict accuracy",
        ),
        ({"rewards/right/mean": RISING}, {"rewards": [RIGHT]}, (DoesNotApply, "no reward judges the format alone")),
        ({"reward": RISING}, {}, (NoData, "no reward was logged")),
    ],
)
def test_a_format_is_learnt_alone_if_nothing_else_rises(metrics: Any, more: Any, expected: Any) -> None:
    run = logged(metrics, **{"rewards": [RIGHT, TAGS], **more})
    assert result(diagnostics.format_without_correctness, run) == expected


@pytest.mark.parametrize(("highest_pay", "is_found"), [(64.0, False), (64.5, True)])
def test_another_reward_must_stay_below_half_of_the_rise_of_the_format(highest_pay: float, is_found: bool) -> None:
    """The other reward rises by 3 and its standard error is a third of its margin, 5 % of 60: together 4, 1/16 of 64.

    The format rises by 6/64 of 3/4, which is 1/8.
    """
    rewards = [{"name": "right", "highest_pay": highest_pay}, {**TAGS, "highest_pay": 0.75}]
    run = logged(paid([57.0, 58.0, 59.0, 60.0], [place / 64 for place in range(8)]), rewards=rewards)
    found = result(diagnostics.format_without_correctness, run)
    assert isinstance(found, tuple) == is_found
    assert is_found or found.endswith("`right` goes from 57.00 to 60.00, which may be noise")


def test_of_several_rewards_the_first_with_the_property_is_named() -> None:
    second = {**TAGS, "name": "second"}
    rewards = [RIGHT, TAGS, second]

    def found(tags: list[float], more: list[float], right: list[float], judges: Any = ()) -> Any:
        metrics = paid(right, tags) | {"rewards/second/mean": more, "rewards/late/mean": flat(0.5)}
        return result(diagnostics.format_without_correctness, logged(metrics, rewards=[*rewards, *judges]))

    assert found(flat(0.5, 7), flat(0.5, 6), flat(0.5)) == (NoData, "`tags` was logged fewer than 8 times")
    assert found(flat(0.5), flat(0.2), flat(0.5)) == "no format reward rises: `tags` goes from 0.50 to 0.50"
    assert found(flat(0.5), RISING, flat(0.5))[1].startswith("`second` rises from 0.15 to 0.95")
    assert found(RISING, [value / 2 for value in RISING], flat(0.5))[1].startswith("`tags` rises")
    late = {**RIGHT, "name": "late"}
    assert "while `late` goes from 0.50 to 0.50" in found(RISING, RISING, flat(0.5, 3), [late])[1]
    late["name"] = "later"
    assert found(RISING, RISING, flat(0.5, 3), [late]) == (NoData, "`right` was logged fewer than four times")


GREW = "completions grow from 15 to 95 tokens"
GROWTH = "74% of the completion tokens are growth"  # 5 + 15 + ... + 85 of 550


@pytest.mark.parametrize(
    ("lengths", "cap", "expected"),
    [
        (
            LENGTHS,
            100,
            (
                8,
                f"{GREW}, into the cap of 100 (`max_completion_length`) from step 8: {GROWTH}; raise the cap, or pay "
                "for short answers (`group_length`)",
            ),
        ),
        (
            LENGTHS,
            118.75,  # 95 is 80 % of it
            (
                10,
                f"{GREW}, into the cap of 118.75 (`max_completion_length`) from step 10: {GROWTH}; raise the cap, or "
                "pay for short answers (`group_length`)",
            ),
        ),
        (
            [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],  # 12.25 of 22 are beyond 1.25
            5,
            (
                7,
                "completions grow from 1 to 4 tokens, into the cap of 5 (`max_completion_length`) from step 7: 56% of "
                "the completion tokens are growth; raise the cap, or pay for short answers (`group_length`)",
            ),
        ),
        (
            [10.0, 10.0, 90.0, 10.0, 90.0, 10.0, 20.0, 20.0],  # a rise within its noise
            10,
            "completions go from 10 to 20 tokens on average, where the cap is 10",
        ),
        (LENGTHS, 119, "completions go from 15 to 95 tokens on average, where the cap is 119"),
        (
            [100.0, 108.0, 117.0, 125.0],
            125,
            (
                1,
                "completions grow from 100 to 125 tokens, into the cap of 125 (`max_completion_length`) from step 1: "
                "11% of the completion tokens are growth; raise the cap, or pay for short answers (`group_length`)",
            ),
        ),
        (
            [100.0, 108.0, 117.0, 124.0],
            125,
            "completions go from 100 to 124 tokens on average, where the cap is 125",
        ),
    ],
)
def test_growth_by_a_quarter_beyond_four_fifths_of_the_cap_is_found(lengths: Any, cap: float, expected: Any) -> None:
    run = logged({"completions/mean_length": lengths}, config={"max_completion_length": cap})
    assert result(diagnostics.length_into_cap, run) == expected


@pytest.mark.parametrize(
    ("reward", "more", "expected"),
    [
        (
            flat(1.0),
            {"rewards": [RIGHT, TAGS]},
            (
                2,
                f"{GREW}, by a quarter from step 2, while the reward goes from 1.00 to 1.00: {GROWTH}; pay for short "
                "answers (`group_length`), or lower `max_completion_length`",
            ),
        ),
        (
            flat(1.0),
            {"rewards": [{**RIGHT, "highest_pay": 0.5}]},  # a tenth of it is the margin
            "completions go from 15 to 95 tokens, and the reward goes from 1.00 to 1.00, which may be noise",
        ),
        (
            [*flat(-1.0, 9), -0.5],
            {"rewards": [OTHER]},
            "completions go from 15 to 95 tokens, and the reward goes from -1.00 to -0.75, which may be noise",
        ),
        (RISING, {"rewards": [OTHER]}, "completions go from 15 to 95 tokens, and the reward rises from 0.15 to 0.95"),
        (
            flat(1.0),
            {"evaluations": accuracy((0.4, 0.3, 0.5), (0.7, 0.6, 0.8))},
            "completions go from 15 to 95 tokens, and strict accuracy rises",
        ),
        (flat(1.0), {"recipe": {"sampling": "informative"}}, (NoData, MOVING_PROMPTS)),
        # The first step counts: three points would have no trend.
        (
            [0.5, 0.7, 0.9, 1.1],
            {"rewards": [OTHER]},
            "completions go from 15 to 95 tokens, and the reward rises from 0.50 to 1.10",
        ),
    ],
)
def test_growth_without_gain_is_found_unless_the_reward_is_too_noisy(reward: Any, more: Any, expected: Any) -> None:
    run = logged({"completions/mean_length": LENGTHS, "reward": reward}, **more)
    assert result(diagnostics.length_without_gain, run) == expected


def test_growth_by_a_quarter_is_dated_from_exactly_a_quarter() -> None:
    lengths = [16.0, 16.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0]
    step, sentence = result(
        diagnostics.length_without_gain, logged({"completions/mean_length": lengths, "reward": flat(1.0, 8)})
    )
    assert step == 3
    assert "from 16 to 65 tokens, by a quarter from step 3, while" in sentence


def test_the_largest_mean_stands_for_an_unknown_highest_pay() -> None:
    """The reward dips from 1 to 0.4 and comes back: a rise of 5 % of 1 can't be excluded, a tenth can."""
    dip = [1 - 0.6 * math.sin(math.pi * place / 199) for place in range(200)]
    metrics = {"completions/mean_length": [10.0 + place for place in range(200)], "reward": dip}
    assert "while the reward goes from 0.78 to 0.78" in result(diagnostics.length_without_gain, logged(metrics))[1]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("format", "problem"),
        ("length", "problem"),
        ("judge", "completions go from 15 to 95 tokens, and `x` rises from 0.15 to 0.95"),
        ("correctness", "completions go from 15 to 95 tokens, and `x` rises from 0.15 to 0.95"),
    ],
)
def test_a_format_or_length_that_rises_is_no_gain(kind: str, says: str) -> None:
    metrics = {"completions/mean_length": LENGTHS, "reward": flat(1.0), "rewards/x/mean": RISING}
    found = result(diagnostics.length_without_gain, logged(metrics, rewards=[{"name": "x", "kind": kind}]))
    assert (found if isinstance(found, str) else "problem") == says


CUT = (
    "30% of the completions are cut off at `max_completion_length` by step 10, and an answer behind the cut is lost: "
    "{}% of the run's tokens are in such completions; raise it{}"
)
MASK = ", or set `mask_truncated_completions: true`"


@pytest.mark.parametrize(
    ("share", "lengths", "config", "expected"),
    [
        (flat(0.25, 4), [], {}, "25% of the completions are cut off at the end of the run (limit 25%)"),
        (flat(0.3), flat(50.0), {"max_completion_length": 100}, (10, CUT.format(60, MASK))),
        (flat(0.3), flat(50.0), {}, (10, CUT.format(30, MASK))),
        (flat(0.3), flat(50.0, 9), {"max_completion_length": 100}, (10, CUT.format(30, MASK))),
        (
            flat(0.3, 9),
            flat(50.0),
            {"max_completion_length": 100},
            (9, CUT.format(27, MASK).replace("step 10", "step 9")),
        ),
        (
            flat(0.3),
            flat(0.5),
            {"max_completion_length": 2, "mask_truncated_completions": True},
            (10, CUT.format(60, ", or end the run earlier")),
        ),
        (flat(0.3), flat(20.0), {"max_completion_length": 100}, (10, CUT.format(100, MASK))),
    ],
)
def test_a_truncated_completion_has_as_many_tokens_as_the_cap(
    share: Any, lengths: Any, config: Any, expected: Any
) -> None:
    run = logged({"completions/clipped_ratio": share, "completions/mean_length": lengths}, config=config)
    assert result(diagnostics.truncated, run) == expected


def test_entropy_collapses_below_a_tenth_of_its_start() -> None:
    falling = [1.0, 1.0, 0.9, 0.7, 0.5, 0.1, 0.09, 0.05, 0.05, 0.05]
    assert result(diagnostics.entropy_collapse, logged({"entropy": falling})) == (
        7,
        "entropy falls from 1.000 to 0.050 nats per token, below a tenth from step 7: the policy has stopped "
        "exploring, and 30% of the run's tokens come after step 7; lower `learning_rate`, raise `temperature` or "
        "`epsilon_high`, or add a KL term (`beta`)",
    )
    times_4 = result(diagnostics.entropy_collapse, logged({"entropy": [4 * value for value in falling]}))
    assert times_4[0] == 7
    assert times_4[1].startswith("entropy falls from 4.000 to 0.200 nats per token, below a tenth from step 7: ")
    at_limit = [*falling[:6], 0.1, 0.1, 0.1, 0.1]
    assert result(diagnostics.entropy_collapse, logged({"entropy": at_limit})) == (
        "entropy goes from 1.000 to 0.100 nats per token"
    )
    noisy = [1.0, 1.0, 9.0, 0.0, 9.0, 0.0, 0.05, 0.05]  # its noise hides the fall
    assert result(diagnostics.entropy_collapse, logged({"entropy": noisy})) == (
        "entropy goes from 1.000 to 0.050 nats per token"
    )
    solved = logged({"entropy": falling, "reward": flat(0.9)}, rewards=[RIGHT])
    assert result(diagnostics.entropy_collapse, solved) == (
        "entropy goes from 1.000 to 0.050 nats per token, and nearly all is solved"
    )


IGNORED = (
    ": the policy gradient ignores {}% of the run's tokens; end the run earlier, or use prompts of another difficulty"
)
INFORMATIVE = ", or fewer such prompts (`sampling: informative`)"
NO_VARIANCE = "of the groups have no variance in their rewards"
# Groups with rewards 0, 4, 4 and a mixed one: a reward above 2 is easy.
GROUPS = scored([(1, 0, 0.0), (1, 0, 0.0), (2, 0, 4.0), (2, 0, 4.0), (3, 0, 4.0), (4, 0, 0.0), (4, 0, 4.0)])


@pytest.mark.parametrize(
    ("shares", "more", "expected"),
    [
        (flat(0.5, 4), {}, f"50% {NO_VARIANCE} (limit 50%), and 50% at the end of the run (limit 80%)"),
        (flat(0.6), {}, (1, f"60% {NO_VARIANCE}, more than half first at step 1{IGNORED.format(60)}{INFORMATIVE}")),
        (
            flat(0.6),
            {"rows": GROUPS, "recipe": {"sampling": "informative"}, "rewards": [RIGHT]},
            (
                1,
                f"60% {NO_VARIANCE}, more than half first at step 1 (of those logged, 67% are too easy: all earn much; "
                f"33% too hard: all earn little){IGNORED.format(60)}",
            ),
        ),
        (
            flat(0.0, 6) + flat(0.8, 2) + flat(0.9, 2),
            {},
            (
                9,
                f"90% {NO_VARIANCE} at the end of the run, more than 80% first at step 9{IGNORED.format(34)}"
                f"{INFORMATIVE}",
            ),
        ),
        (
            flat(0.5, 5) + flat(0.7, 5),
            {},
            (6, f"60% {NO_VARIANCE}, more than half first at step 6{IGNORED.format(60)}{INFORMATIVE}"),
        ),
        (
            flat(0.0, 8) + flat(0.8, 2),
            {},
            f"16% {NO_VARIANCE} (limit 50%), and 80% at the end of the run (limit 80%)",
        ),
    ],
)
def test_groups_without_variance_count_in_the_run_and_at_its_end(shares: Any, more: Any, expected: Any) -> None:
    assert result(diagnostics.zero_variance, logged({"frac_reward_zero_std": shares}, **more)) == expected


HALF_EASY = " (of those logged, 50% are too easy: all earn much; 50% too hard: all earn little)"


@pytest.mark.parametrize(
    ("totals", "declared", "says"),
    [
        # Groups of two. Of at most 14, a group at 7 is not in the upper half.
        ([10, 10, 14, 0, 7, 7], {"highest_pay": 14.0}, HALF_EASY),
        ([-6, -6, 14, 0, 5, 5], {"highest_pay": 14.0}, HALF_EASY),
        # All earn the floor of a reward.
        ([0.01] * 4, {"highest_pay": 1.0}, HALF_EASY.replace("50%", "0%", 1).replace("50%", "100%")),
        ([0.6, 0.6, 1, 0.6, 1, 1], {"highest_pay": 1.0, "passes_at": 1.0}, HALF_EASY),
        ([0.6, 0.6, 1, 0.6, 1, 1], {}, ""),
        ([10, 14, 14, 10], {"highest_pay": 14.0}, ""),
        ([], {"highest_pay": 14.0}, ""),
    ],
)
def test_groups_are_easy_by_what_passes_or_by_what_can_be_paid(
    totals: list[float], declared: dict[str, float], says: str
) -> None:
    rows = scored([(place // 2, 0, total) for place, total in enumerate(totals)])
    rows["pay/mine"] = rows["total"]
    rewards = [{"name": "mine", "kind": "correctness", **declared}]
    _, sentence = result(
        diagnostics.zero_variance, logged({"frac_reward_zero_std": flat(0.6)}, rows=rows, rewards=rewards)
    )
    assert f"more than half first at step 1{says}: the policy gradient ignores" in sentence


ALONE = (DoesNotApply, "no reward is beside one of another kind that it must not dominate")


@pytest.mark.parametrize(
    ("spread", "rewards", "expected"),
    [
        (
            {"right": 1.0, "tags": 4.0},
            [RIGHT, TAGS],
            "the largest part of the rewards' variance is 94%, that of `tags`",
        ),
        (
            {"right": 1.0, "tags": 5.0},
            [RIGHT, TAGS],
            (
                10,
                "`tags` carries 96% of the rewards' variance up to step 10: the others have hardly any effect on 100% "
                "of the run's tokens; lower its `weight`",
            ),
        ),
        (
            {"right": 1.0, "tags": 5.0},
            [{**RIGHT, "weight": 2.0}, TAGS],
            "the largest part of the rewards' variance is 86%, that of `tags`",
        ),
        (
            {"right": 0.0, "tags": 1.0},
            [RIGHT, TAGS],
            (
                10,
                "`tags` carries 100% of the rewards' variance up to step 10: the others have hardly any effect on 100% "
                "of the run's tokens; use prompts of which the policy solves some, because the other rewards are "
                "constant",
            ),
        ),
        (
            {"right": 5.0, "tags": 1.0},
            [RIGHT, TAGS],
            "the largest part of the rewards' variance is 96%, that of `right`",
        ),
        (
            {"right": 1.0, "other": 5.0},
            [RIGHT, OTHER],
            (
                10,
                "`other` carries 96% of the rewards' variance up to step 10: the others have hardly any effect on 100% "
                "of the run's tokens; lower its `weight`",
            ),
        ),
        ({"right": 0.0, "tags": 0.0}, [RIGHT, TAGS], "the rewards have no variance"),
        *(
            (
                {"other": 1.0, kind: 5.0},
                [OTHER, {"name": kind, "kind": kind}],
                (
                    10,
                    f"`{kind}` carries 96% of the rewards' variance up to step 10: the others have hardly any effect "
                    "on 100% of the run's tokens; lower its `weight`",
                ),
            )
            for kind in ("format", "length")
        ),
        (
            {"other": 1.0, "judge": 5.0, "tags": 0.0},
            [OTHER, {"name": "judge", "kind": "judge"}, TAGS],
            "the largest part of the rewards' variance is 96%, that of `judge`",
        ),
        ({"tags": 1.0}, [TAGS], ALONE),
        ({"right": 1.0, "more": 9.0}, [RIGHT, {**RIGHT, "name": "more"}], ALONE),
        ({"other": 1.0, "more": 9.0}, [OTHER, {"name": "more", "kind": "judge"}], ALONE),
        (
            {"other": 1.0, "more": 1.0},
            [OTHER, {"name": "more", "kind": "length"}],
            "the largest part of the rewards' variance is 50%, that of `other`",
        ),
        (
            {"other": 1.0, "tags": 1.0},
            [OTHER, TAGS],
            "the largest part of the rewards' variance is 50%, that of `other`",
        ),
        (
            {"other": 1.0, "more": 9.0},
            [OTHER, {**OTHER, "name": "more"}],
            ALONE,
        ),
    ],
)
def test_a_reward_dominates_by_its_weighted_variance(spread: Any, rewards: Any, expected: Any) -> None:
    run = logged({f"rewards/{name}/std": flat(value) for name, value in spread.items()}, rewards=rewards)
    assert result(diagnostics.dominant_reward, run) == expected


ALL_BUT = "`tags` carries {}% of the rewards' variance up to step 10: the others have hardly any effect on {}% of the "


@pytest.mark.parametrize(
    ("right", "tags", "expected"),
    [
        # All steps count, not the largest one: 10 * 1 of 10 * 1 + 3 ** 2.
        (flat(1.0), [3.0, *flat(0.0, 9)], "the largest part of the rewards' variance is 53%, that of `right`"),
        # 1 and 19 are 95 % exactly.
        (
            [1.0, *flat(0.0, 9)],
            [3.0, 3.0, 1.0, *flat(0.0, 7)],
            "the largest part of the rewards' variance is 95%, that of `tags`",
        ),
        # In a step in which no reward varies, none dominates.
        (flat(0.0, 5) + flat(1.0, 5), flat(0.0, 5) + flat(9.0, 5), ALL_BUT.format(99, 50)),
        # In the first half the share is 25 / 34.
        (flat(3.0, 5) + flat(0.0, 5), flat(5.0, 5) + flat(50.0, 5), ALL_BUT.format(100, 50)),
        # A step at which the other reward was not logged counts as one without its variance.
        (flat(0.1, 5), flat(1.0), ALL_BUT.format(100, 100)),
        (flat(1.0, 3), flat(1.0), (NoData, "`rewards/right/std` was logged fewer than four times")),
    ],
)
def test_the_variances_of_all_steps_are_added(right: Any, tags: Any, expected: Any) -> None:
    run = logged({"rewards/right/std": right, "rewards/tags/std": tags}, rewards=[RIGHT, TAGS])
    found = result(diagnostics.dominant_reward, run)
    if isinstance(expected, str) and expected.startswith("`"):
        assert found[0] == 10
        assert found[1].startswith(expected)
    else:
        assert found == expected


def test_weights_are_needed_to_compare_variances() -> None:
    run = logged({"rewards/right/std": flat(1.0), "rewards/tag_presence/std": flat(9.0)})
    assert result(diagnostics.dominant_reward, run) == (NoData, "no `run.json` holds the rewards' weights")


TRAINED = "the training reward rises from 0.15 to 0.95, while "


@pytest.mark.parametrize(
    ("held_out", "more", "expected"),
    [
        (
            [0.5, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0],
            {},
            (
                8,
                f"{TRAINED}the held-out reward falls from 0.55 to 0.05 by step 8: it was best at step 2, and 80% of "
                "the run's tokens come after step 2; use a checkpoint near it, and train on more prompts",
            ),
        ),
        (
            flat(0.5),
            {},
            (
                1,
                f"{TRAINED}the held-out reward stays at 0.50 from step 1 on: 90% of the run's tokens come after step "
                "1; train on more prompts, or end the run earlier",
            ),
        ),
        (
            flat(0.5),
            {"rewards": [{**RIGHT, "highest_pay": 0.55}]},
            f"{TRAINED}the held-out reward goes from 0.50 to 0.50",
        ),
        (
            [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.7, 0.7],  # a quarter of the rise of 0.8
            {},
            f"{TRAINED}the held-out reward goes from 0.50 to 0.70",
        ),
        (
            [],
            {"evaluations": accuracy((0.6, 0.5, 0.7), (0.4, 0.3, 0.49))},
            (
                10,
                f"{TRAINED}strict accuracy on held-out problems falls from 0.600 to 0.400 by step 10: all of the run's "
                "tokens made it worse; train on more prompts, or with a lower `learning_rate`, and evaluate during "
                "training (`eval_strategy: steps`)",
            ),
        ),
        (
            [],
            {"evaluations": accuracy((0.5, 0.48, 0.52), (0.5, 0.48, 0.52))},
            (
                1,
                f"{TRAINED}strict accuracy on held-out problems stays flat, from 0.500 to 0.500: 90% of the run's "
                "tokens come after step 1; train on more prompts, or end the run earlier",
            ),
        ),
        (
            [],
            {"evaluations": accuracy((0.5, 0.48, 0.52), (0.51, 0.5, 0.54))},
            f"{TRAINED}strict accuracy on held-out problems goes from 0.500 to 0.510",
        ),
        (
            [],
            {"evaluations": accuracy((0.93, 0.92, 0.94), (0.95, 0.94, 0.96))},  # there was room for 5 % more
            (
                1,
                f"{TRAINED}strict accuracy on held-out problems stays flat, from 0.930 to 0.950: 90% of the run's "
                "tokens come after step 1; train on more prompts, or end the run earlier",
            ),
        ),
        (
            [],
            {"evaluations": accuracy((0.92, 0.9, 0.95), (0.92, 0.9, 0.94))},  # just room for 5 % more
            (
                1,
                f"{TRAINED}strict accuracy on held-out problems stays flat, from 0.920 to 0.920: 90% of the run's "
                "tokens come after step 1; train on more prompts, or end the run earlier",
            ),
        ),
        (
            [],
            {"evaluations": accuracy((0.95, 0.94, 0.96), (0.95, 0.94, 0.96))},
            f"{TRAINED}strict accuracy on held-out problems goes from 0.950 to 0.950",
        ),
        (
            flat(0.5, 3),
            {},
            (NoData, "neither four evaluations during training nor one before and one after"),
        ),
        (
            [],
            {"evaluations": {"before": {}, **accuracy((0.5, 0.4, 0.6), (0.5, 0.4, 0.6)), "after": {}}},
            (NoData, "neither four evaluations during training nor one before and one after"),
        ),
        (
            flat(0.9),
            {"rewards": [RIGHT]},  # nine tenths of the highest pay
            f"{TRAINED}the held-out reward goes from 0.90 to 0.90",
        ),
        (
            [0.5 + place / 100 for place in range(10)],  # a slow rise, but a clear one
            {},
            f"{TRAINED}the held-out reward goes from 0.51 to 0.58",
        ),
        (
            [0.5 + place / 100 for place in range(10)],
            {"evaluations": accuracy((0.5, 0.48, 0.52), (0.5, 0.48, 0.52))},  # flat, while the held-out reward rises
            f"{TRAINED}the held-out reward goes from 0.51 to 0.58",
        ),
        (
            [],
            {"evaluations": accuracy((0.6, 0.5, 0.7), (0.4, 0.3, 0.5))},  # intervals that meet are no fall
            (
                1,
                f"{TRAINED}strict accuracy on held-out problems stays flat, from 0.600 to 0.400: 90% of the run's "
                "tokens come after step 1; train on more prompts, or end the run earlier",
            ),
        ),
        (
            [],
            {"evaluations": accuracy((0.02, 0.0, 0.04), (0.03, 0.01, 0.05))},  # a gain of at most 5 %
            (
                1,
                f"{TRAINED}strict accuracy on held-out problems stays flat, from 0.020 to 0.030: 90% of the run's "
                "tokens come after step 1; train on more prompts, or end the run earlier",
            ),
        ),
    ],
)
def test_overfitting_is_a_training_reward_that_rises_alone(held_out: Any, more: Any, expected: Any) -> None:
    run = logged({"reward": RISING, "eval_reward": held_out}, **more)
    assert result(diagnostics.overfitting, run) == expected


@pytest.mark.parametrize("trained", [flat(0.5), RISING[::-1]])
def test_a_training_reward_that_does_not_rise_is_no_overfitting(trained: list[float]) -> None:
    run = logged({"reward": trained, "eval_reward": RISING[::-1]})
    assert result(diagnostics.overfitting, run).startswith("the training reward does not rise: it goes from ")


SWINGS = [4.0, 6.0, 4.0, 6.0, 4.0, 6.0, 4.0, 6.0, 4.5, 6.5]


@pytest.mark.parametrize(
    ("trained", "held_out", "found"),
    [
        # The last four points of training rise by 0.3, the evaluations by 0.08: more than a quarter of that.
        (RISING, [0.5, 0.5, 0.5, 0.58], None),
        (RISING, flat(0.5, 4), "the held-out reward stays at 0.50 from step 7 on"),
        # Training rises by 0.5 from the first evaluation on, which its noise can make.
        (flat(0.0) + SWINGS, flat(5.0), None),
        # A margin of 5 % of 20 is as large as the rise of training, and hides one of that size.
        ([place / 8 for place in range(10)], flat(20.0), None),
        ([place / 8 for place in range(10)], flat(19.0), "the held-out reward stays at 19.00 from step 1 on"),
        # A change of 2 is a quarter of the rise of 8.
        ([float(place) for place in range(10)], [10.0, 10.0, 11.0, 9.0, 11.0, 9.0, 11.0, 9.0, 12.0, 12.0], None),
        (
            [float(place) for place in range(10)],
            [10.0, 10.0, 11.0, 9.0, 11.0, 9.0, 11.0, 9.0, 11.9, 11.9],
            "the held-out reward stays at 11.90 from step 1 on",
        ),
    ],
)
def test_the_training_reward_counts_from_the_first_evaluation_on(
    trained: Any, held_out: Any, found: str | None
) -> None:
    run = logged({"reward": trained})
    first = len(trained) - len(held_out) + 1
    run.log.metrics["eval_reward"] = (array("q", range(first, len(trained) + 1)), array("d", held_out))
    said = result(diagnostics.overfitting, run)
    if found is None:
        assert said.endswith(
            f"the held-out reward goes from {run.series('eval_reward').start:.2f} to "
            f"{run.series('eval_reward').end:.2f}"
        )
    else:
        assert said[0] == first
        assert f"while {found}: " in said[1]


EVEN = list(range(2, 33, 2))
ROSE = [0.25, 0.5, 0.75, *flat(1.0, 13)]
SECOND_HALF = "in the second half of the run the reward goes from 1.00 to 1.00"
PAYS_2 = {**RIGHT, "highest_pay": 2.0}
NOT_SINCE = (
    "the reward has not risen since step {0}, and goes from {1:.2f} to {2:.2f} in the second half of the run: {3}% of "
    "the run's tokens come after step {0}; end the run there, or change what may limit it (the prompts' difficulty, "
    "`learning_rate`, `beta`)"
)


@pytest.mark.parametrize(
    ("metrics", "steps", "more", "expected"),
    [
        (
            {"reward": ROSE},
            EVEN,
            {"rewards": [PAYS_2]},
            (
                8,
                "the reward has not risen since step 8, and goes from 1.00 to 1.00 in the second half of the run: 75% "
                "of the run's tokens come after step 8; end the run there, or change what may limit it (the prompts' "
                "difficulty, `learning_rate`, `beta`)",
            ),
        ),
        (
            {"reward": [1.0, 0.75, *flat(0.5, 14)]},  # it fell, which is no slow rise
            EVEN,
            {"rewards": [PAYS_2]},
            (
                2,
                "the reward has not risen since step 2, and goes from 0.50 to 0.50 in the second half of the run: 94% "
                "of the run's tokens come after step 2; end the run there, or change what may limit it (the prompts' "
                "difficulty, `learning_rate`, `beta`)",
            ),
        ),
        (
            {"reward": flat(1.0, 16)},
            [*range(1, 16), 30],
            {"rewards": [PAYS_2]},
            (1, NOT_SINCE.format(1, 1.0, 1.0, 97)),
        ),
        (
            # The window of the second half begins after 0.7.
            {"reward": [0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, *flat(1.0, 8)]},
            EVEN,
            {"rewards": [PAYS_2]},
            (18, NOT_SINCE.format(18, 1.0, 1.0, 44)),
        ),
        (
            # The plateau is at 20 and has a margin of 1, so that it begins at 19.
            {"reward": [10.0, 12.0, 14.0, 16.0, 17.0, 18.0, 19.0, 19.0, *flat(20.0, 8)]},
            EVEN,
            {"rewards": [{**RIGHT, "highest_pay": 100.0}]},
            (14, NOT_SINCE.format(14, 20.0, 20.0, 56)),
        ),
        # From 1 to 6 in all and from 5 to 6 in the second half, which is a fifth and not more than its noise.
        (
            {"reward": [*flat(1.0, 4), 2.0, 3.0, 4.0, 5.0, 5.0, 5.0, 6.0, 5.0, *flat(6.0, 4)]},
            EVEN,
            {"rewards": [{**RIGHT, "highest_pay": 100.0}]},
            "in the second half of the run the reward goes from 5.00 to 6.00, which may be a rise within its noise",
        ),
        (
            {"reward": [1.0, 1.2] * 8},
            EVEN,
            {"rewards": [PAYS_2]},
            "in the second half of the run the reward goes from 1.10 to 1.10, which may be a rise within its noise",
        ),
        ({"reward": ROSE[:15]}, EVEN[:15], {}, (NoData, "`reward` was logged fewer than 16 times")),
        ({"reward": ROSE}, [*range(1, 16), 29], {}, (NoData, "the run has fewer than 30 steps")),
        (
            {"reward": ROSE},
            EVEN,
            {"rewards": [{**RIGHT, "highest_pay": 1.25}]},
            f"{SECOND_HALF}, and has little room to rise",
        ),
        (
            {"reward": ROSE},
            EVEN,
            {"rewards": [OTHER], "rows": scored([(1, 0, 0.0), (1, 0, 1.25)])},
            f"{SECOND_HALF}, which is near the best that any logged completion earned",
        ),
        (
            {"reward": ROSE, "frac_reward_zero_std": flat(0.5, 16)},
            EVEN,
            {"rewards": [PAYS_2]},
            f"{SECOND_HALF}, because most groups have no variance",
        ),
        ({"reward": ROSE}, EVEN, {"recipe": {"sampling": "informative"}}, (NoData, MOVING_PROMPTS)),
        (
            {"reward": ROSE, "eval_reward": [n / 8 for n in range(16)]},
            EVEN,
            {},
            "in the second half of the run the held-out reward rises from 1.06 to 1.81",
        ),
        (
            {"reward": ROSE},
            EVEN,
            {"rewards": [{**TAGS, "highest_pay": 9.0, "weight": 0.05}, {**OTHER, "highest_pay": 0.0}], "rows": GROUPS},
            f"{SECOND_HALF}, and has little room to rise",  # 9 * 0.05 is all that there is to earn
        ),
    ],
)
def test_a_plateau_is_dated_from_its_first_quarter_of_a_half(
    metrics: Any, steps: Any, more: Any, expected: Any
) -> None:
    assert result(diagnostics.plateau, logged(metrics, steps, **more)) == expected


@pytest.mark.parametrize(("evaluations", "is_found"), [(19, True), (20, False)])
def test_a_measure_must_rise_in_the_second_half_alone(evaluations: int, is_found: bool) -> None:
    """The second half of 32 steps begins at step 17. Four evaluations from there on have a trend, three have none."""
    metrics = {"reward": flat(1.0, 32), "eval_reward": [place / 8 for place in range(evaluations)]}
    found = result(diagnostics.plateau, logged(metrics, rewards=[PAYS_2]))
    assert isinstance(found, tuple) == is_found
    assert is_found or found == "in the second half of the run the held-out reward rises from 2.00 to 2.38"


def test_the_second_half_of_an_odd_number_of_points_is_the_larger_one() -> None:
    """The second half of 19 points is the last ten. Its first two are 0.8 and 1."""
    reward = [*flat(0.0, 9), 0.8, *flat(1.0, 9)]
    found = result(
        diagnostics.plateau, logged({"reward": reward}, range(2, 40, 2), rewards=[{**RIGHT, "highest_pay": 100.0}])
    )
    assert found[0] == 20
    assert "goes from 0.90 to 1.00" in found[1]


def test_a_plateau_begins_with_the_second_half_at_the_latest() -> None:
    """A hill in the second half is as low at its foot as the first half was."""
    hill = [math.sin(math.pi * place / 99) for place in range(100)]
    found = result(
        diagnostics.plateau, logged({"reward": flat(0.0, 100) + hill}, rewards=[{**RIGHT, "highest_pay": 9.0}])
    )
    assert found[0] == 101
    # The sum of the second half is more than the largest float, so that no point reaches its mean.
    huge = logged({"reward": flat(1.2e307, 40)}, rewards=[{**RIGHT, "highest_pay": 1.6e308}])
    assert result(diagnostics.plateau, huge)[0] == 21


# Tools

NEVER = (
    "no completion calls a tool up to step 10: ask for calls in the prompt, or begin with a model that writes them, "
    "because GRPO can't reinforce what is never sampled"
)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"tools/call_frequency": flat(0.0)}, (10, NEVER)),
        (
            {"tools/call_frequency": flat(1.0, 5) + flat(0.0, 5)},
            (
                5,
                "completions stop calling tools: the last calls are at step 5: look whether a call lowers the reward, "
                "by its length or by its errors",
            ),
        ),
        (
            {
                "tools/call_frequency": flat(0.5),
                **{f"tools/{name}/calls": [float(name == "b")] for name in "abcdef"},
                "tools/unknown/calls": flat(0.0),
            },
            "a completion makes 0.5 calls on average at the end of the run; never called: `a`, `c`, `d`, `e`, `f`",
        ),
        (
            {"tools/call_frequency": flat(0.5), **{f"tools/{name}/calls": [0.0] for name in "abcdef"}},
            "a completion makes 0.5 calls on average at the end of the run; never called: `a`, `b`, `c`, `d`, `e`, …",
        ),
        (
            {"tools/call_frequency": flat(0.5), "tools/a/calls": [0.5]},
            "a completion makes 0.5 calls on average at the end of the run",
        ),
        (
            # Only `zip` is a tool with a count of calls, and it was called once.
            {
                "tools/call_frequency": flat(0.5),
                "tools/zip/calls": [0.0, 0.5],
                "tools/zip/failures": flat(0.0),
                "tools/calls": flat(0.0),
                "tools/a/b/calls": flat(0.0),
            },
            "a completion makes 0.5 calls on average at the end of the run",
        ),
        (
            {"tools/call_frequency": flat(0.5), "tools/zip/calls": [0.0], "tools/zip/failures": flat(0.0)},
            "a completion makes 0.5 calls on average at the end of the run; never called: `zip`",
        ),
        ({"reward": flat(1.0)}, (DoesNotApply, "the policy has no tools")),
    ],
)
def test_tools_that_are_never_called_are_named(metrics: Any, expected: Any) -> None:
    assert result(tool_checks.tools_never_called, logged(metrics)) == expected


@pytest.mark.parametrize("recipe", [{"tools": ["add"]}, {"environment_factory": "a.b"}])
def test_a_recipe_with_tools_is_checked_for_them_before_anything_is_logged(recipe: dict[str, Any]) -> None:
    expected = (NoData, "`tools/call_frequency` was not logged")
    assert result(tool_checks.tools_never_called, logged({}, recipe=recipe)) == expected


@pytest.mark.parametrize(
    ("failed", "faults", "called", "expected"),
    [
        (0.5, 0.1, 1.0, "50% of the calls fail at the end of the run (limit 50%)"),
        (
            0.5,
            0.2,
            1.0,
            (
                4,
                "`a` fails in 20% of its calls up to step 4: it raises, or passes `tool_limits.seconds`; correct the "
                "tool",
            ),
        ),
        (
            0.6,
            0.1,
            1.0,
            (
                4,
                "60% of the calls fail at the end of the run (step 4): calls name no tool, have arguments that don't "
                "fit, or a tool raises; describe the arguments in its docstring, and read the results in the report",
            ),
        ),
        (0.6, 0.2, 0.0, (NoData, "no tool was called")),
    ],
)
def test_calls_that_fail_are_counted(failed: float, faults: float, called: float, expected: Any) -> None:
    metrics = {
        "tools/failure_frequency": flat(failed, 4),
        "tools/call_frequency": flat(called, 4),
        "tools/a/calls": flat(called, 4),
        "tools/a/failures": flat(faults, 4),
    }
    assert result(tool_checks.failing_tools, logged(metrics)) == expected


@pytest.mark.parametrize("called", [[], [0.0, 0.0, 0.0, 1.0]])
def test_failures_count_if_a_tool_was_called_at_some_step_or_calls_were_not_counted(called: list[float]) -> None:
    run = logged({"tools/failure_frequency": flat(0.5, 4), "tools/call_frequency": called, "tools/a/calls": [1.0]})
    assert result(tool_checks.failing_tools, run) == "50% of the calls fail at the end of the run (limit 50%)"


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ((0.125, 0.125, 0.0), "limits end 25% of the completions at the end of the run (limit 25%)"),
        (
            (0.25, 0.125, 0.0),
            (
                4,
                "limits end 38% of the completions by step 4, and 25% still call a tool after "
                "`max_tool_calling_iterations` turns: raise it",
            ),
        ),
        (
            (0.125, 0.25, 0.0),
            (
                4,
                "limits end 38% of the completions by step 4, and 25% have no room for a result in "
                "`max_completion_length`: raise it, or lower `tool_limits.result_tokens`",
            ),
        ),
        (
            (0.0, 0.0, 0.5),
            (
                4,
                "limits end 50% of the completions by step 4, and 50% lose a result that can't be cut to "
                "`max_completion_length`: raise it, or let the tool return a text",
            ),
        ),
    ],
)
def test_the_limit_that_ends_most_completions_is_named(shares: tuple[float, ...], expected: Any) -> None:
    names = ("at_limit", "out_of_budget", "results_dropped")
    metrics = {f"tools/rows_{name}": flat(share, 4) for name, share in zip(names, shares, strict=True)}
    assert result(tool_checks.tool_limits_hit, logged(metrics)) == expected


def test_a_limit_that_was_not_logged_ends_no_completion() -> None:
    run = logged({"tools/rows_at_limit": flat(0.25, 4)})
    assert (
        result(tool_checks.tool_limits_hit, run)
        == "limits end 25% of the completions at the end of the run (limit 25%)"
    )


ALL_CALL = "100% of the completions call a tool at the end of the run"
LOOK = ": look in the report whether the results help, and whether the answer uses them"


def eight(step: int, calls: int, *totals: float) -> list[tuple[int, int, float]]:
    """Return eight completions of a step with as many calls, whose rewards repeat `totals`."""
    return [(step, calls, totals[place % len(totals)]) for place in range(8)]


DEVIATIONS = (-1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -2.0, 2.0)
"""Eight values whose mean is 0 and has a standard error of (14 / 7 / 8) ** 0.5."""


@pytest.mark.parametrize(
    ("rows", "reward", "expected"),
    [
        (
            eight(1, 1, 0, 1) + eight(2, 1, 0, 1),
            flat(0.5),
            (2, f"{ALL_CALL} (step 2), while the reward goes from 0.50 to 0.50{LOOK}"),
        ),
        (
            eight(1, 1, 0, 1)[:7],
            flat(0.5),
            (NoData, "fewer than 8 scored completions were logged at the end of the run"),
        ),
        (eight(1, 1, 0, 1), RISING, f"{ALL_CALL}, and the reward goes from 0.15 to 0.95"),
        (
            eight(1, 1, 0, 1) + eight(2, 1, 1),
            flat(0.5),
            f"{ALL_CALL}, and nearly all earn the best reward",
        ),
        (
            [(1, 1, 1.0)] * 19 + [(1, 1, 0.0)],  # a mean at 95 % of the range
            flat(0.5),
            f"{ALL_CALL}, and nearly all earn the best reward",
        ),
        (
            [(1, 1, 1.0)] * 19 + [(1, 0, 0.0)],
            flat(0.5),
            "95% of the completions call a tool at the end of the run, and nearly all earn the best reward",
        ),
        (
            [(1, 1, 1.0)] * 18 + [(1, 1, 0.0)],
            flat(0.5),
            (1, f"{ALL_CALL} (step 1), while the reward goes from 0.50 to 0.50{LOOK}"),
        ),
        (
            eight(1, 0, 0, 1) + eight(2, 1, 0, 1),
            flat(0.5),
            (
                2,
                f"{ALL_CALL} (step 2), while the reward goes from 0.50 to 0.50, and in the whole run those with a call "
                f"earn 0.50 and those without 0.50{LOOK}",
            ),
        ),
        (
            eight(1, 0, 0) + eight(2, 1, 0, 1),
            flat(0.5),
            f"{ALL_CALL}, and in the whole run those with a call earn 0.50 and those without 0.00",
        ),
        (
            eight(1, 0, 0)[:7] + eight(2, 1, 0, 1),
            flat(0.5),
            (2, f"{ALL_CALL} (step 2), while the reward goes from 0.50 to 0.50{LOOK}"),
        ),
        (
            [*eight(1, 1, 0, 1)[:7], (1, 1, math.nan)],  # one without a reward
            flat(0.5),
            (NoData, "fewer than 8 scored completions were logged at the end of the run"),
        ),
        (
            eight(1, 1, 0.5) + eight(2, 1, 0.5),  # no reward is better than another
            flat(0.5),
            (2, f"{ALL_CALL} (step 2), while the reward goes from 0.50 to 0.50{LOOK}"),
        ),
        (
            [(1, 1, -5.0)] + [(2, 1, -1.0)] * 19 + [(2, 1, -2.0)],  # 3.95 of 4 above the lowest
            flat(0.5),
            f"{ALL_CALL}, and nearly all earn the best reward",
        ),
        (
            # Both means have a standard error of 0.5, so that together they have 0.71.
            [*eight(1, 0, *DEVIATIONS), *eight(2, 1, *(1 + one for one in DEVIATIONS))],
            flat(0.5),
            (
                2,
                f"{ALL_CALL} (step 2), while the reward goes from 0.50 to 0.50, and in the whole run those with a call "
                f"earn 1.00 and those without 0.00{LOOK}",
            ),
        ),
        (
            [*eight(1, 0, *DEVIATIONS), *eight(2, 1, *(1.5 + one for one in DEVIATIONS))],
            flat(0.5),
            f"{ALL_CALL}, and in the whole run those with a call earn 1.50 and those without 0.00",
        ),
        (
            # A difference of 1 is exactly two standard errors.
            [*eight(1, 0, 0), *eight(2, 1, *(1 + one for one in DEVIATIONS))],
            flat(0.5),
            (
                2,
                f"{ALL_CALL} (step 2), while the reward goes from 0.50 to 0.50, and in the whole run those with a call "
                f"earn 1.00 and those without 0.00{LOOK}",
            ),
        ),
        (
            [*eight(1, 1, 0, 1)[:7], (1, 0, 0.0)],
            flat(0.5),
            "88% of the completions call a tool at the end of the run (limit 95%)",
        ),
    ],
)
def test_calls_help_if_the_reward_rises_or_is_higher_with_them(rows: Any, reward: Any, expected: Any) -> None:
    table = scored(rows).assign(note=math.nan)  # a column without values does not matter
    run = logged({"reward": reward, "tools/calls": []}, rows=table)
    assert result(tool_checks.calls_without_gain, run) == expected


COUNTS = "calls per completion go from 1 to 2"
FEW = (NoData, "too few scored completions with calls were logged")


def by_step(*totals: float, calls: Sequence[int] = (1, 1, 2, 2)) -> list[tuple[int, int, float]]:
    """Return eight completions of each of some steps, all of a step with one reward."""
    return [row for step, total in enumerate(totals) for row in eight(step + 1, calls[step], total)]


TURNS = ": look whether a reward pays for calls instead of what they achieve"


HALVES = [*eight(1, 1, 0)[:4], *eight(1, 2, 0)[:4], *eight(2, 1, 0), *eight(3, 1, 0)]


@pytest.mark.parametrize(
    ("rows", "rewards", "expected"),
    [
        (
            [row for step in (1, 2, 3, 4) for row in eight(step, 1 + (step > 2), 1.0 + (step > 2))],
            [OTHER],
            (
                4,
                f"{COUNTS} by step 4, and the reward rises by 1.00, but by 0.00 among completions with equally many "
                f"calls{TURNS}",
            ),
        ),
        # Half of the last completions have one call, as all of the first, and earn 2 instead of 1: (1 + 1/2) / 2.
        (
            [row for step in (1, 2, 3) for row in eight(step, 1, 1.0)] + eight(4, 1, 2.0)[:4] + eight(4, 3, 2.0)[:4],
            [RIGHT],
            f"{COUNTS}; at equal numbers of calls the reward rises by 0.75 of 1.00",
        ),
        # The numbers of calls explain 4/5 of the variance: rewards 0 and 1 with one call, 2 and 3 with two calls.
        (
            [row for step in (1, 2, 3, 4) for row in eight(step, 1 + (step > 2), *((0, 1) if step < 3 else (2, 3)))],
            [OTHER],
            f"{COUNTS}, which explain 80% of the differences between rewards",
        ),
        (
            [row for step in (1, 2, 3, 4) for row in eight(step, 0 if step < 3 else 1, 1.0)],
            [OTHER],
            (NoData, "too few scored completions with calls were logged"),
        ),
        ([row for step in (1, 2, 3, 4) for row in eight(step, 1, 1.0)], [RIGHT], "calls per completion go from 1 to 1"),
        # Means of -3 and 3 and deviations of 1: 9/10 of the variance, from which on the calls explain the rise.
        (
            [row for step in (1, 2, 3, 4) for row in eight(step, 1 + (step > 2), *((-4, -2) if step < 3 else (2, 4)))],
            [OTHER],
            (
                4,
                f"{COUNTS} by step 4, and the reward rises by 6.00, but by 0.00 among completions with equally many "
                f"calls{TURNS}",
            ),
        ),
        # Squares of such rewards are less than the smallest float.
        (by_step(0.0, 0.0, 1e-200, 1e-200), [OTHER], f"{COUNTS}, which explain 0% of the differences between rewards"),
        # One of several rewards judges answers.
        (
            by_step(1.0, 1.0, 2.0, 2.0, calls=(0, 0, 1, 1)),
            [RIGHT, OTHER],
            (
                4,
                "calls per completion go from 0 to 1 by step 4, and the reward rises by 1.00, but by 0.00 among "
                f"completions with equally many calls{TURNS}",
            ),
        ),
        # Four fifths of the variance are explained, which does not matter where answers are judged.
        (
            [row for step in (1, 2, 3, 4) for row in eight(step, 1 + (step > 2), *((0, 1) if step < 3 else (2, 3)))],
            [RIGHT],
            (
                4,
                f"{COUNTS} by step 4, and the reward rises by 2.00, but by 0.00 among completions with equally many "
                f"calls{TURNS}",
            ),
        ),
        # Means of calls are compared, not their extremes.
        (
            [*by_step(0.0, 0.0, 0.0, calls=(2, 2, 2)), *eight(4, 1, 1)[:4], *eight(4, 3, 1)[:4]],
            [RIGHT],
            "calls per completion go from 2 to 2",
        ),
        (
            [*eight(1, 1, 0)[:4], *eight(1, 4, 0)[:4], *eight(2, 1, 0), *eight(3, 1, 0), *eight(4, 3, 1)],
            [RIGHT],
            (
                4,
                "calls per completion go from 2.5 to 3 by step 4, and the reward rises by 1.00, but by 0.00 among "
                f"completions with equally many calls{TURNS}",
            ),
        ),
        # A tenth of a rise of 4 is 0.4.
        (
            [*HALVES, *eight(4, 2, 0.5)[:4], *eight(4, 3, 7.5)[:4]],
            [RIGHT],
            (
                4,
                "calls per completion go from 1.5 to 2.5 by step 4, and the reward rises by 4.00, but by 0.25 among "
                f"completions with equally many calls{TURNS}",
            ),
        ),
        (by_step(1.0, 1.0, 2.0, 2.0)[1:], [OTHER], FEW),
        (by_step(1.0, 1.0, 2.0, 2.0)[:-1], [OTHER], FEW),
        # Two numbers of calls are compared: shares of a half each, and rises of 1 and 3.
        (
            [*HALVES, *eight(4, 1, 1)[:2], *eight(4, 2, 3)[:4], *eight(4, 5, 4)[:2]],
            [RIGHT],
            "calls per completion go from 1.5 to 2.5; at equal numbers of calls the reward rises by 1.88 of 2.75",
        ),
        # The first quarter of eight steps are two.
        (
            [row for step in range(1, 9) for row in eight(step, step, float(step))],
            [OTHER],
            (
                8,
                "calls per completion go from 1.5 to 7.5 by step 8, and the reward rises by 6.00, but by 0.00 among "
                f"completions with equally many calls{TURNS}",
            ),
        ),
        (
            [row for step in (1, 2, 3, 4) for row in eight(step, 1, float(step))],
            [RIGHT],
            "calls per completion go from 1 to 1",
        ),
        (
            [row for step in (1, 2, 3, 4) for row in eight(step, step, 1.0)],
            [RIGHT],
            "calls per completion go from 1 to 4",
        ),
    ],
)
def test_a_reward_for_calls_alone_is_told_from_one_for_what_they_achieve(
    rows: Any, rewards: Any, expected: Any
) -> None:
    run = logged({"reward": RISING, "tools/calls": []}, rows=scored(rows), rewards=rewards)
    assert result(tool_checks.reward_by_calls_alone, run) == expected


def test_a_rise_at_equal_calls_of_exactly_the_limit_is_explained_by_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is 7/8 here, so that all means are exact. Half of the completions rise by 1/4, 1/8 of the rise of 1."""
    monkeypatch.setattr(tool_checks, "CALL_COUNT_LIMIT", 0.875)
    rows = [*HALVES, *eight(4, 2, 0.25)[:4], *eight(4, 3, 1.75)[:4]]
    run = logged({"reward": RISING, "tools/calls": []}, rows=scored(rows), rewards=[RIGHT])
    step, sentence = result(tool_checks.reward_by_calls_alone, run)
    assert step == 4
    assert "the reward rises by 1.00, but by 0.12 among" in sentence


@pytest.mark.parametrize(
    ("reward", "right", "expected"),
    [
        (flat(0.5), flat(0.5), "the reward does not rise: it goes from 0.50 to 0.50"),
        (RISING[::-1], flat(0.5), "the reward does not rise: it goes from 0.95 to 0.15"),
        (RISING, RISING, "`right` rises too, from 0.15 to 0.95"),
        (RISING, RISING[::-1], FEW),
    ],
)
def test_a_reward_that_does_not_rise_or_rises_with_correctness_is_not_paid_for_calls(
    reward: Any, right: Any, expected: Any
) -> None:
    metrics = {"reward": reward, "rewards/right/mean": right, "rewards/other/mean": RISING, "tools/calls": []}
    run = logged(metrics, rows=scored([]), rewards=[OTHER, RIGHT])
    assert result(tool_checks.reward_by_calls_alone, run) == expected


REPEAT = "of the groups that don't earn the best reward repeat one completion"


def groups(*repeats: bool, reward: float = 0.0) -> list[dict[str, Any]]:
    """Return a group of two completions for each of some steps, which repeat one text of 10 letters or do not."""
    return [
        {
            "step": step,
            "prompt": step,
            "total": reward,
            "completion": f"{step} {0 if same else member}",
            "characters": 10,
        }
        for step, same in enumerate(repeats, 1)
        for member in range(2)
    ]


BEST = [{**row, "step": 8, "prompt": 8} for row in groups(False, reward=1.0)]
RAISE = "raise `temperature`"


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (groups(True, True, True), (NoData, "fewer than four groups of completions were logged")),
        (groups(True, True, False, False) + BEST, f"50% {REPEAT} (limit 50%)"),
        (
            groups(False, True, True, True) + BEST,
            (
                2,
                f"75% {REPEAT} throughout, from step 2: there is nothing to compare in 60% of the logged text; {RAISE}",
            ),
        ),
        (
            groups(True, True, True) + BEST,
            "1 of 4 groups earn the best reward",
        ),
    ],
)
def test_repeated_groups_count_where_more_could_be_earned(rows: Any, expected: Any) -> None:
    table = scored([]).iloc[:0]
    run = logged({"reward": flat(0.5)}, rows=pd.concat([table, pd.DataFrame(rows).assign(calls=0)], ignore_index=True))
    assert result(diagnostics.identical_completions, run) == expected


def test_groups_of_one_or_without_rewards_repeat_nothing() -> None:
    rows = pd.DataFrame(groups(True, True, False, False) + BEST).assign(calls=0)
    alone = [{"step": 9, "prompt": 90 + place, "total": 0.0, "completion": "x", "characters": 10} for place in range(9)]
    unscored = groups(True, True, True, reward=math.nan)
    more = pd.DataFrame([*alone, *({**row, "prompt": f"u{row['prompt']}"} for row in unscored)]).assign(calls=0)
    run = logged({"reward": flat(0.5)}, rows=pd.concat([rows, more], ignore_index=True))
    assert result(diagnostics.identical_completions, run) == f"50% {REPEAT} (limit 50%)"


@pytest.mark.parametrize(("characters", "share"), [(0, "0%"), (1, "100%")])
def test_nearly_all_completions_may_be_empty(characters: int, share: str) -> None:
    rows = pd.DataFrame(groups(True, True, True, True) + BEST).assign(calls=0)
    rows["characters"] = [characters, *[0] * (len(rows) - 1)]
    run = logged({"reward": flat(0.5)}, rows=rows)
    step, sentence = result(diagnostics.identical_completions, run)
    assert (step, f"there is nothing to compare in {share} of the logged text" in sentence) == (1, True)


def test_a_group_is_a_prompt_at_a_step_that_earns_less_than_the_best_by_a_millionth() -> None:
    """Two prompts, each at three steps: a group repeats its text, and no other group has the same."""
    rows = [
        {"step": step, "prompt": prompt, "total": 0.0, "completion": f"{step} {prompt}", "characters": 10, "calls": 0}
        for step in (1, 2, 3)
        for prompt in (1, 2)
        for _ in range(2)
    ]
    best = {**rows[0], "step": 4}
    run = logged({"reward": flat(0.5)}, rows=pd.DataFrame([*rows, {**best, "total": 1.0}]))
    assert result(diagnostics.identical_completions, run)[1].startswith(f"100% {REPEAT} throughout, from step 1")
    run = logged({"reward": flat(0.5)}, rows=pd.DataFrame([*rows, {**best, "total": 1e-6}]))
    assert result(diagnostics.identical_completions, run) == "6 of 6 groups earn the best reward"


NO_PARSED = (NoData, "no reward logs how many answers it finds (`rewards/*/parsed`)")


@pytest.mark.parametrize(
    ("parsed", "rewards", "expected"),
    [
        ({}, [RIGHT, TAGS], NO_PARSED),
        ({}, [], NO_PARSED),
        ({}, [TAGS], (DoesNotApply, "no reward compares answers")),
        ({}, [{**TAGS, "parts": [RIGHT]}], NO_PARSED),
        ({"a": flat(0.9), "b": flat(0.5), "c": []}, [RIGHT], "`b` finds an answer in 50% of the completions"),
        ({"a": [0.0, 0.1], "b": flat(0.5)}, [RIGHT], "`a` finds an answer in 5% of the completions"),
        (
            {"a": flat(0.5), "b": flat(0.0)},
            [RIGHT],
            (
                10,
                "`b` has paid nothing up to step 10, on all of the run's tokens: no completion states an answer where "
                "it looks: ask for one in the prompt, or set another `extract`",
            ),
        ),
    ],
)
def test_the_reward_that_finds_the_fewest_answers_is_named(parsed: Any, rewards: Any, expected: Any) -> None:
    run = logged({f"rewards/{name}/parsed": shares for name, shares in parsed.items()}, rewards=rewards)
    assert result(diagnostics.no_answer_found, run) == expected


@pytest.mark.parametrize(("count", "rest"), [(diagnostics.NAMED_ROWS, ""), (diagnostics.NAMED_ROWS + 1, "; …")])
def test_rows_that_are_not_named_are_an_ellipsis(count: int, rest: str) -> None:
    golds = {"count": count, "total": 99, "rows": ["a.csv, line 2", "b.csv, line 3"]}
    finding = diagnostics.unscorable_golds(logged({}, unscorable_golds=golds))
    assert finding == diagnostics.Finding(
        "unscorable_golds",
        0,
        f"{count} of 99 golds can't be scored by a correctness reward (a.csv, line 2; b.csv, line 3{rest}): correct or "
        "remove them",
    )
    assert diagnostics.unscorable_golds(logged({})) is None


def test_answers_are_looked_for_in_the_last_thousand_completions() -> None:
    recipe = {"rewards": ["tag_presence", {"name": "gsm8k_correctness", "kwargs": {"extract": "boxed"}}]}
    run = logged({"rewards/gsm8k_correctness/parsed": flat(0.0)}, rows=scored([(1, 0, 0.0)] * 1001), recipe=recipe)
    vars(run)["texts"] = lambda rows: pd.DataFrame({"completion": ["<answer>7</answer>"] * len(rows)})
    _, sentence = result(diagnostics.no_answer_found, run)
    assert "`extract: answer_tag` finds one in 1000 of 1000" in sentence


# All checks


def test_checks_that_do_not_apply_are_not_counted() -> None:
    names = [check.__name__ for check in diagnostics.CHECKS]
    diagnosis = diagnostics.Diagnosis([], {names[0]: "fine"}, dict.fromkeys(names[2:], "no data"), {names[1]: "no"})
    assert (diagnosis.applicable, diagnosis.checked, diagnosis.looks_fine) == (len(names) - 1, 1, False)
    assert not diagnostics.as_dict(diagnosis)["looks_fine"]
    most = replace(diagnosis, fine=dict.fromkeys(names[2:], "fine"), unchecked={names[0]: "no data"})
    assert diagnostics.as_dict(most)["looks_fine"]
    assert not replace(diagnosis, unchecked=dict.fromkeys(names, "no data"), not_applicable={}, fine={}).looks_fine
    assert not replace(diagnosis, findings=[diagnostics.Finding(names[0], 1, "bad")], fine={}).looks_fine


def test_what_a_check_looks_for_is_the_first_line_of_its_docstring() -> None:
    def check(run: Run) -> str:
        """Look for trouble.

        Look for more of it.
        """
        return "fine"

    assert diagnostics.looks_for(check) == "trouble"
    assert diagnostics.looks_for(lambda run: "fine") == ""


def test_the_deadline_holds_for_checks_that_read_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(run: Run) -> str:
        return "fine"

    monkeypatch.setattr(diagnostics, "CHECKS", (check,))
    run = logged({})
    vars(run)["completion_files"] = Sampled([], 0)
    assert diagnostics.diagnose(run).fine == {"check": "fine"}
    late = replace(run, deadline=-math.inf)
    vars(late)["completion_files"] = Sampled([], 0)
    with pytest.raises(OutOfTime):
        diagnostics.diagnose(late)


@pytest.mark.parametrize(
    ("means", "named"),
    [
        ({"a": [], "b": []}, "`a` and `b` returned None for every completion, so nothing was learned:"),
        ({"a": [0.5], "b": []}, "`b` returned None for every completion, so nothing was learned from it:"),
        ({"a": [0.5], "b": [0.0]}, None),
    ],
)
def test_a_reward_that_scored_no_completion_is_named(means: dict[str, list[float]], named: str | None) -> None:
    rewards = [{"name": name} for name in means]
    finding = diagnostics.unscored(
        logged({f"rewards/{name}/mean": values for name, values in means.items()}, [1, 2], rewards=rewards)
    )
    assert (finding is None) == (named is None)
    assert finding is None or named in finding.sentence
