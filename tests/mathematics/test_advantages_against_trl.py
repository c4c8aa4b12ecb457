"""TRL's advantages and logged reward statistics, compared with the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.mathematics import oracle
from tests.mathematics.harness import EOS, NUM_GENERATIONS, PROMPTS, make_trainer
from tests.mathematics.oracle import Reward

SCALES = ("group", "batch", "none")
SETTINGS = [(scale, "sum_then_normalize") for scale in SCALES] + [("group", "normalize_then_sum")]
WEIGHT_SETS = ([1.0, 1.0], [1.0, 0.5], [2.0, -0.25])
ROWS = 2 * NUM_GENERATIONS

# Eighths are exact in float32, the dtype in which TRL keeps rewards and weights.
reward_values = st.one_of(st.none(), st.integers(-16, 16).map(lambda n: n / 8), st.just(float("nan")))
reward_tables = st.lists(st.tuples(reward_values, reward_values), min_size=ROWS, max_size=ROWS)

UNEVEN_TABLES: list[list[tuple[Reward, Reward]]] = [
    [(n / 8, (n * n % 5) / 4) for n in range(ROWS)],
    [(1.0, None)] * NUM_GENERATIONS + [(n / 4, None if n % 2 else 0.5) for n in range(NUM_GENERATIONS)],
    [(None, None)] * 3 + [(0.5, 1.0), (None, None), (1.0, None), (None, 0.25), (0.0, 0.0)],
    [(0.25, 0.25)] * ROWS,
    [(None, None)] * ROWS,
]


class Scorer:
    """TRL's trainer with two rewards that return the values of a table, whatever the completions are."""

    def __init__(self, checkpoint: Path, scale: str, aggregation: str, weights: list[float]) -> None:
        self.table: list[tuple[Reward, Reward]] = []

        def first(completions: list[str], **_: Any) -> list[Reward]:
            return [row[0] for row in self.table]

        def second(completions: list[str], **_: Any) -> list[Reward]:
            return [row[1] for row in self.table]

        self.trainer = make_trainer(
            checkpoint,
            torch.float64,
            [first, second],
            scale_rewards=scale,
            multi_objective_aggregation=aggregation,
            reward_weights=weights,
        )
        self.trainer.rollout_func = self._completions
        self.trainer.model.train()

    @staticmethod
    def _completions(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [[2 + n % 10, EOS] for n in range(len(prompts))]
        return {"prompt_ids": [[2, 3]] * len(prompts), "completion_ids": ids, "logprobs": None}

    def score(self, table: list[tuple[Reward, Reward]]) -> tuple[list[float], dict[str, float]]:
        """Return TRL's advantages and logged reward statistics for the rows of a table."""
        self.table = table
        self.trainer._metrics["train"].clear()
        rows = [{"prompt": prompt} for prompt in PROMPTS[:2] for _ in range(NUM_GENERATIONS)]
        output = self.trainer._generate_and_score_completions(rows)
        metrics = {name: values[-1] for name, values in self.trainer._metrics["train"].items()}
        return output["advantages"].tolist(), metrics


def check(
    scorer: Scorer, table: list[tuple[Reward, Reward]], weights: list[float], scale: str, aggregation: str
) -> None:
    """Assert that advantages are within 1e-9 and statistics within 1e-6 of the oracle's."""
    advantages, metrics = scorer.score(table)
    arguments = (table, weights, NUM_GENERATIONS, scale, aggregation)
    assert advantages == pytest.approx(oracle.advantages(*arguments), abs=1e-9, rel=1e-9)
    expected = oracle.reward_metrics(*arguments)
    for name, column in zip(("first", "second"), zip(*table, strict=True), strict=True):
        expected |= {f"rewards/{name}/{key}": value for key, value in oracle.column_metrics(column).items()}
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-6, nan_ok=True), name


@pytest.mark.one_case_in(6)
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("weights", WEIGHT_SETS, ids=str)
@pytest.mark.parametrize(("scale", "aggregation"), SETTINGS)
def test_chosen_rewards(checkpoint: Path, scale: str, aggregation: str, weights: list[float]) -> None:
    scorer = Scorer(checkpoint, scale, aggregation, weights)
    for table in UNEVEN_TABLES:
        check(scorer, table, weights, scale, aggregation)


@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("scale", "aggregation"), SETTINGS)
def test_any_rewards(checkpoint: Path, scale: str, aggregation: str) -> None:
    scorer = Scorer(checkpoint, scale, aggregation, [1.0, 0.5])

    @settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(reward_tables)
    def holds(table: list[tuple[Reward, Reward]]) -> None:
        check(scorer, table, [1.0, 0.5], scale, aggregation)

    holds()


@given(reward_tables)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_group_relative_advantages_sum_to_zero(table: list[tuple[Reward, Reward]]) -> None:
    for scale in ("group", "batch", "none"):
        values = oracle.advantages(table, [1.0, 0.5], NUM_GENERATIONS, scale)
        for start in range(0, ROWS, NUM_GENERATIONS):
            assert sum(values[start : start + NUM_GENERATIONS]) == pytest.approx(0.0, abs=1e-9)
    assert sum(
        oracle.advantages(table, [1.0, 0.5], NUM_GENERATIONS, aggregation="normalize_then_sum")
    ) == pytest.approx(0.0, abs=1e-9)
