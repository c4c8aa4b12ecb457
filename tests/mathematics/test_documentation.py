"""docs/mathematics.md: its worked example is recomputed. Every test that it and docs/seeds.md name exists."""

from __future__ import annotations

import re

import pytest
import torch

from tests.mathematics import oracle
from tests.mathematics.conftest import REPOSITORY
from tests.mathematics.oracle import Completion, Geometry, Objective

PAGE = (REPOSITORY / "docs" / "mathematics.md").read_text(encoding="utf-8")
SEEDS = (REPOSITORY / "docs" / "seeds.md").read_text(encoding="utf-8")
FOLDER = REPOSITORY / "tests" / "mathematics"

REWARDS = [[1.0, 0.5], [0.0, 0.5], [0.0, 0.0], [1.0, 1.0]]
WEIGHTS = [1.0, 0.5]


def row_of(first: str, *cells: str) -> list[str]:
    """Return the cells of the table row that starts with these cells."""
    rows = [
        [cell.strip() for cell in line.strip("|\n ").split("|")] for line in PAGE.splitlines() if line.startswith("|")
    ]
    (found,) = [row for row in rows if row[: 1 + len(cells)] == [first, *cells]]
    return found


def completion(advantage: float, old: list[float], new: list[float], reference: list[float]) -> Completion:
    row = Completion([], list(range(len(new))), advantage, torch.tensor(new), torch.zeros(len(new)))
    row.old, row.reference = torch.tensor(old), torch.tensor(reference)
    return row


def test_the_worked_example() -> None:
    objective = Objective("grpo", beta=0.04, max_completion_length=8)
    totals = oracle.weighted_rewards(REWARDS, WEIGHTS)
    columns = [
        totals,
        oracle.advantages(REWARDS, WEIGHTS, 4),
        oracle.advantages(REWARDS, WEIGHTS, 4, "none"),
        oracle.advantages(REWARDS, WEIGHTS, 4, aggregation="normalize_then_sum"),
    ]
    for index, rewards in enumerate(REWARDS):
        _, _, *figures = row_of(str(index + 1), ", ".join(f"{reward:g}" for reward in rewards))
        assert [float(figure) for figure in figures] == pytest.approx([c[index] for c in columns], abs=5.1e-5)

    group = columns[1]
    first = completion(group[0], [-1.2, -0.7, -2.0], [-0.9, -0.8, -1.9], [-1.3, -0.7, -1.8])
    second = completion(group[1], [-0.6], [-0.5], [-0.6])
    assert first.old is not None
    assert first.reference is not None
    by_token = [
        first.old,
        first.log_probs,
        first.reference,
        oracle.importance_ratio(first, "token"),
        oracle.policy_loss(first, objective),
        oracle.kl_k3(first.log_probs, first.reference),
        oracle.kl_term(first, objective),
        oracle.token_losses(first, objective),
    ]
    for index in range(3):
        _, *figures = row_of(str(index + 1), f"{first.old[index]:.1f}")
        numbers = [float(figure.split()[0]) for figure in figures]
        assert numbers == pytest.approx([column[index].item() for column in by_token], abs=5.1e-5)

    assert f"Its mean over tokens is {oracle.token_losses(first, objective).mean():.4f}" in PAGE
    assert f"the token loss {oracle.token_losses(second, objective).item():.4f}" in PAGE
    losses = [
        oracle.micro_batch_loss([first, second], Objective(name.strip("`"), beta=0.04), Geometry(), 4).item()
        for name in row_of("`grpo`", "`luspo`")
    ]
    assert [float(figure) for figure in row_of(f"{losses[0]:.4f}")] == pytest.approx(losses, abs=5.1e-5)


def test_every_test_that_the_pages_name_exists() -> None:
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", PAGE + SEEDS)
    named += [("test_source_documents.py", name) for name in re.findall(r"`(test_\w+)`", PAGE + SEEDS)]
    assert len(named) > 20
    for file, name in named:
        assert f"def {name}(" in (FOLDER / file).read_text(), f"{file}::{name}"
