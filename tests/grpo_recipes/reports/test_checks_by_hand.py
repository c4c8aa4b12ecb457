"""Every figure of the checks' sentences, worked out by hand from logs of a few points.

Ten points have quarters of two. The default run spends a tenth of its tokens in each of ten steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest

from grpo_recipes.reports import diagnostics, tool_checks, update_checks
from grpo_recipes.reports.checking import MOVING_PROMPTS, DoesNotApply, NoData
from grpo_recipes.reports.run import Run
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
    expectation = [0.9, 0.9, 0.04, 0.04][: len(changed)]
    run = logged({"updates/changed": changed, "updates/expected": expectation}, steps)
    assert result(update_checks.lost_updates, run) == expected


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
            [19, 20],
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
    ],
)
def test_the_worst_pass_decides_on_stale_tokens(metrics: Any, config: Any, expected: Any) -> None:
    assert result(update_checks.stale_tokens, logged(metrics, config=config)) == expected


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
    ],
)
def test_growth_without_gain_is_found_unless_the_reward_is_too_noisy(reward: Any, more: Any, expected: Any) -> None:
    run = logged({"completions/mean_length": LENGTHS, "reward": reward}, **more)
    assert result(diagnostics.length_without_gain, run) == expected


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
    falling = [1.0, 1.0, 0.9, 0.7, 0.5, 0.3, 0.09, 0.05, 0.05, 0.05]
    assert result(diagnostics.entropy_collapse, logged({"entropy": falling})) == (
        7,
        "entropy falls from 1.000 to 0.050 nats per token, below a tenth from step 7: the policy has stopped "
        "exploring, and 30% of the run's tokens come after step 7; lower `learning_rate`, raise `temperature` or "
        "`epsilon_high`, or add a KL term (`beta`)",
    )
    at_limit = [*falling[:6], 0.1, 0.1, 0.1, 0.1]
    assert result(diagnostics.entropy_collapse, logged({"entropy": at_limit})) == (
        "entropy goes from 1.000 to 0.100 nats per token"
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
        (flat(0.5, 4), {}, f"50% {NO_VARIANCE} (limit 50%)"),
        (flat(0.6), {}, (1, f"60% {NO_VARIANCE}, more than half first at step 1{IGNORED.format(60)}{INFORMATIVE}")),
        (
            flat(0.6),
            {"rows": GROUPS, "recipe": {"sampling": "informative"}},
            (
                1,
                f"60% {NO_VARIANCE}, more than half first at step 1 (of those logged, 67% are too easy: all earn much; "
                f"33% too hard: all earn little){IGNORED.format(60)}",
            ),
        ),
        (
            flat(0.0, 8) + flat(0.9, 2),
            {},
            (
                9,
                f"90% {NO_VARIANCE} at the end of the run, more than 80% first at step 9{IGNORED.format(18)}"
                f"{INFORMATIVE}",
            ),
        ),
        (flat(0.0, 8) + flat(0.8, 2), {}, f"16% {NO_VARIANCE} (limit 50%)"),
    ],
)
def test_groups_without_variance_count_in_the_run_and_at_its_end(shares: Any, more: Any, expected: Any) -> None:
    assert result(diagnostics.zero_variance, logged({"frac_reward_zero_std": shares}, **more)) == expected


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
        (
            {"other": 1.0, "more": 9.0},
            [OTHER, {**OTHER, "name": "more"}],
            (DoesNotApply, "no reward is beside one of another kind that it must not dominate"),
        ),
    ],
)
def test_a_reward_dominates_by_its_weighted_variance(spread: Any, rewards: Any, expected: Any) -> None:
    run = logged({f"rewards/{name}/std": flat(value) for name, value in spread.items()}, rewards=rewards)
    assert result(diagnostics.dominant_reward, run) == expected


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
    ],
)
def test_overfitting_is_a_training_reward_that_rises_alone(held_out: Any, more: Any, expected: Any) -> None:
    run = logged({"reward": RISING, "eval_reward": held_out}, **more)
    assert result(diagnostics.overfitting, run) == expected


EVEN = list(range(2, 33, 2))
ROSE = [0.25, 0.5, 0.75, *flat(1.0, 13)]
SECOND_HALF = "in the second half of the run the reward goes from 1.00 to 1.00"
PAYS_2 = {**RIGHT, "highest_pay": 2.0}


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
            f"{SECOND_HALF}, and has little room to rise",
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


ALL_CALL = "100% of the completions call a tool at the end of the run"
LOOK = ": look in the report whether the results help, and whether the answer uses them"


def eight(step: int, calls: int, *totals: float) -> list[tuple[int, int, float]]:
    """Return eight completions of a step with as many calls, whose rewards repeat `totals`."""
    return [(step, calls, totals[place % len(totals)]) for place in range(8)]


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
            [*eight(1, 1, 0, 1)[:7], (1, 0, 0.0)],
            flat(0.5),
            "88% of the completions call a tool at the end of the run (limit 95%)",
        ),
    ],
)
def test_calls_help_if_the_reward_rises_or_is_higher_with_them(rows: Any, reward: Any, expected: Any) -> None:
    run = logged({"reward": reward, "tools/calls": []}, rows=scored(rows))
    assert result(tool_checks.calls_without_gain, run) == expected


COUNTS = "calls per completion go from 1 to 2"
TURNS = ": look whether a reward pays for calls instead of what they achieve"


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
