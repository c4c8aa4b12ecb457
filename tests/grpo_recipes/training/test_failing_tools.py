"""A run whose tools mostly fail stops with one sentence, and mistakes of the policy do not count."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_recipes import GRPOTrainer
from grpo_recipes.process.faults import RunFault
from grpo_recipes.tools import run
from grpo_recipes.tools.examples import calculator
from tests.support.tool_rollouts import ADD, BROKEN, GROUP, call, play, tool_trainer


@pytest.fixture(autouse=True)
def few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge after 16 calls: a generation batch of the tests has few."""
    monkeypatch.setattr(run, "ENOUGH_CALLS", 16)


def test_a_tool_that_mostly_fails_stops_the_run(tmp_path: Path) -> None:
    trainer = tool_trainer(GRPOTrainer, tmp_path, [[[BROKEN, BROKEN + ADD]] * GROUP] * 2)
    with pytest.raises(RunFault) as stopped:
        play(trainer)
    figures = ("66.7%", "24", "`broken`", "OSError", "`tool_limits.failures`", "0.5")
    assert all(figure in str(stopped.value) for figure in figures)


def test_a_policy_that_calls_a_tool_wrongly_trains_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The shipped calculator refuses what a weak policy writes, which is no fault of the tool."""
    wrong = call("calculator", expression="2^10") + call("calculator", expression="two") + call("calculator", a=1)
    trainer = tool_trainer(
        GRPOTrainer, tmp_path, [[[wrong]] * GROUP] * 2, tools=[calculator], max_completion_length=600
    )
    metrics = play(trainer, batches=2)
    assert (metrics["tools/mistakes"], metrics["tools/calculator/failures"]) == ([1, 1], [0, 0])
    assert len([said for said in caplog.messages if "`calculator`" in said]) == 1
