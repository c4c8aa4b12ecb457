"""Parts that several checks share, from series written by hand."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from grpo_recipes.reports import checking
from grpo_recipes.reports.run import Log, Run, RunReward, Series

NOTHING = Series([], [])


def run(last_step: int = 4, rewards: tuple[RunReward, ...] = (), **logged: list[float]) -> Run:
    """Return a run that logged metrics at steps 2, 4, ... A letter is the metric of the reward with that name."""
    log = Log(last_step=last_step)
    for name, values in logged.items():
        key = f"rewards/{name}/mean" if len(name) == 1 else name
        log.metrics[key] = (array("q", range(2, 2 * len(values) + 1, 2)), array("d", values))
    found = Run(Path("/nowhere"), {}, log)
    vars(found)["rewards"] = list(rewards)
    return found


def test_points_after_a_step_and_the_first_step_of_a_condition() -> None:
    series = Series([2, 4, 6], [1.0, 5.0, 9.0])
    assert series.after(3).values == series.after(2).values == [5.0, 9.0]
    assert series.after(4).steps == [6]
    assert series.after(0).steps == [2, 4, 6]
    assert series.first_step(lambda value: value >= 5) == 4
    assert (series.last_step, NOTHING.last_step) == (6, 0)


def test_the_highest_total_is_known_only_if_every_part_is() -> None:
    def highest(*rewards: tuple[float | None, float]) -> float | None:
        named = [RunReward(f"r{n}", weight, highest_pay=pay) for n, (pay, weight) in enumerate(rewards)]
        return checking.highest_total(named)

    assert highest((2.0, 1.0), (0.5, 3.0)) == 3.5
    assert highest((2.0, 1.0), (0.5, 0.0)) == highest((2.0, 1.0), (0.0, 1.0)) == 2.0
    assert highest((0.5, 1.0)) == 0.5
    assert highest((2.0, 1.0), (None, 1.0)) is None
    assert highest((2.0, 1.0), (0.5, -1.0)) is None
    assert highest((0.0, 1.0)) is None
    assert highest() is None


def test_a_run_is_solved_if_all_rewards_of_correctness_end_at_nine_tenths() -> None:
    def solved(a: float, b: float) -> bool:
        rewards = (
            RunReward("a", kind="correctness", highest_pay=1.0),
            RunReward("b", kind="correctness", highest_pay=2.0),
            RunReward("c", kind="format", highest_pay=1.0),
        )
        return checking.is_solved(run(rewards=rewards, a=[0.0, 0.0, 0.0, a], b=[0.0, 0.0, 0.0, b], c=[0.0] * 4))

    assert solved(0.9, 1.8)
    assert not solved(0.89, 1.8)
    assert not solved(0.9, 1.79)
    assert not checking.is_solved(run(rewards=(RunReward("c", kind="format", highest_pay=1.0),), c=[1.0] * 4))
    assert not checking.is_solved(run(rewards=(RunReward("a", kind="correctness"),), a=[1.0] * 4))
    # A reward that was not logged is left out.
    both = tuple(RunReward(name, kind="correctness", highest_pay=1.0) for name in "ab")
    assert checking.is_solved(run(rewards=both, a=[1.0] * 4))
    assert not checking.is_solved(run(rewards=(RunReward("a", kind="correctness", highest_pay=1.0),)))


def test_a_run_is_near_its_best_by_correctness_or_by_the_total() -> None:
    rewards = (RunReward("a", kind="correctness", highest_pay=1.0), RunReward("c", highest_pay=3.0))
    assert checking.is_near_best(run(rewards=rewards, a=[0.95] * 4, reward=[0.0] * 4))
    assert checking.is_near_best(run(rewards=rewards, a=[0.5] * 4, reward=[1.0, 1.0, 1.0, 3.6]))
    assert not checking.is_near_best(run(rewards=rewards, a=[0.5] * 4, reward=[1.0, 1.0, 1.0, 3.59]))
    assert not checking.is_near_best(run(rewards=rewards, a=[0.5] * 4))


def test_a_sum_of_rewards_is_judged_by_its_parts() -> None:
    inner = RunReward("inner", parts=(RunReward("a"), RunReward("b", kind="correctness")))
    assert checking.judges_correctness([RunReward("outer", parts=(inner, RunReward("c")))])
    assert not checking.judges_correctness([RunReward("d", kind="format")])


def test_a_cost_is_a_share_of_the_tokens_or_else_of_the_steps() -> None:
    """Half of what steps 1 and 2 spent is lost, and all of what steps 3 and 4 spent."""
    shares, halves = Series([2, 4], [0.5, 1.0]), {"num_tokens": [100.0, 400.0]}
    assert checking.cost(run(), shares) == {"lost": pytest.approx(0.75), "unit": "steps"}
    assert checking.cost(run(**halves), shares) == {"lost": 0.875, "unit": "tokens"}
    assert checking.cost(run(num_tokens=[0.0, 0.0]), shares) == {"lost": pytest.approx(0.75), "unit": "steps"}
    assert checking.cost(run(**halves), Series([2, 4], [-1.0, 2.0])) == {"lost": 0.75, "unit": "tokens"}
    assert checking.cost_after(run(**halves), 2) == {"lost": 0.75, "unit": "tokens", "since": 2}
    assert checking.cost_after(run(), 1) == {"lost": pytest.approx(0.75), "unit": "steps", "since": 1}
    assert checking.cost_after(run(**halves), 1)["lost"] == 0.875
    assert checking.cost_after(run(num_tokens=[0.0, 400.0]), 2)["lost"] == 1
    assert checking.cost_after(run(0), 0)["lost"] == 0
    # A launch that counts from 0 again spent nothing until it passed the count before.
    assert checking.cost_after(run(6, num_tokens=[300.0, 50.0, 400.0]), 4)["lost"] == 0.25
