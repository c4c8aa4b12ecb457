"""Rules for advantages: their values, the rewards that they refuse, and their use and log in a training."""

from __future__ import annotations

from collections import deque
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from trl import GRPOTrainer as TRLGRPOTrainer

import grpo_recipes
from grpo_recipes.recipe.specs import AdvantageRule
from grpo_recipes.training.advantages import compute_advantages, max_rl
from tests.support import trainers

NAN = float("nan")


def test_max_rl_computed_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [NAN, 1, 0, NAN], [NAN, NAN, NAN, NAN]])
    expected = [[1, -1, -1, 1], [3, -1, -1, -1], [0, 0, 0, 0], [0, 1, -1, 0], [0, 0, 0, 0]]
    assert max_rl(rewards).tolist() == expected


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=2, max_size=12))
def test_max_rl_equals_exact_fractions(rewards: list[int]) -> None:
    mean = Fraction(sum(rewards), len(rewards))
    expected = [float((reward - mean) / mean) if mean else 0.0 for reward in rewards]
    assert max_rl(torch.tensor([rewards], dtype=torch.float64))[0].tolist() == pytest.approx(expected)


def test_a_negative_total_reward_raises() -> None:
    with pytest.raises(ValueError, match=r"`advantages: max_rl`.*-0\.5"):
        max_rl(torch.tensor([[NAN, -0.5, 1.0]]))


@pytest.mark.parametrize("rule", get_args(AdvantageRule))
def test_every_rule_sums_the_rewards_by_weight_and_ignores_missing_ones(rule: AdvantageRule) -> None:
    # Two groups of two completions and two functions: totals 1 and 3, then 2 and unscored.
    rewards = torch.tensor([[1.0, NAN], [1.0, 1.0], [0.0, 1.0], [NAN, NAN]])
    found = compute_advantages(rule, rewards, torch.tensor([1.0, 2.0]), num_generations=2)
    assert found.tolist() == pytest.approx([-0.5, 0.5, 0.0, 0.0])


def by_tokens(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(sum(ids) % 3) for ids in completion_ids]


def test_a_training_uses_and_logs_the_advantages_of_the_rule(make_trainer: Any) -> None:
    trainer = make_trainer(by_tokens, advantages="max_rl", scale_rewards="none")
    used = trainers.one_batch(trainer)["advantages"]
    logged = torch.tensor(list(trainer._logs["advantages"]))
    rewards = torch.tensor(list(trainer._logs["rewards"]["by_tokens"])).view(-1, trainer.num_generations)
    mean = rewards.mean(1, keepdim=True)
    expected = torch.where(mean > 0, (rewards - mean) / mean, 0.0).flatten()
    assert expected.any()
    torch.testing.assert_close(logged, expected)
    torch.testing.assert_close(used, expected)


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        (True, [1.0, -1.0, -1 / 3, 1 / 3]),  # groups of two: rewards 2 and 0, 1 and 2
        (False, [0.6, -1.0, -0.2, 0.6]),  # one group of four, with a mean of 1.25
    ],
)
def test_each_rank_gets_its_rows_and_the_log_those_of_all_ranks(
    training: bool, expected: list[float], make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two ranks has the rewards of the first one in reverse."""
    monkeypatch.setattr(TRLGRPOTrainer, "_generate_and_score_completions", lambda self, inputs: {"advantages": "TRL's"})
    trainer = make_trainer(
        by_tokens, advantages="max_rl", scale_rewards="none", num_generations=2, num_generations_eval=4
    )
    trainer.model.train(training)
    rewards = torch.tensor([[2.0], [0.0], [1.0], [2.0]])
    trainer._step_state.rewards = torch.cat([rewards, rewards.flip(0)])
    every = [*expected, *reversed(expected)]
    for rank, room in ((0, 9), (1, None)):
        monkeypatch.setitem(trainer.accelerator.state._shared_state, "process_index", rank)
        trainer._logs["advantages"] = deque([9.0, 9.0, *[0.0] * 8], maxlen=room)  # 0 stands for TRL's own
        found = trainer._generate_with_advantages(["row"] * 4)["advantages"]
        assert found.tolist() == pytest.approx(every[4 * rank : 4 * rank + 4])
        assert list(trainer._logs["advantages"]) == pytest.approx([9.0, 9.0, *every][-(room or 10) :])


@pytest.fixture
def make_trainer(tiny_model: Path, tmp_path: Path) -> Any:
    """Return a factory of our trainer on the tiny model, for one step."""
    rows = Dataset.from_dict({"prompt": ["1 + 1 =", "2 + 2 =", "3 + 3 =", "4 + 4 ="]})
    sizes = {"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8}
    sizes |= {"max_steps": 1, "logging_steps": 1}

    def make(reward: Any, **config: Any) -> grpo_recipes.GRPOTrainer:
        more = {**sizes, **config}
        return trainers.make_trainer(
            grpo_recipes.GRPOTrainer, str(tiny_model), tmp_path / "run", rewards=reward, rows=rows, **more
        )

    return make
