"""Each recipe of recipes/algorithms equals its paper in loss and gradient, and planted faults are found.

docs/algorithms.md holds the figures. A test that measures a figure compares it with the page.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.mathematics import algorithms_page as page
from tests.mathematics import papers
from tests.mathematics.algorithm_faults import FAULTS, LIMIT, Fault
from tests.mathematics.algorithms import LAYOUTS, Held, Layout, float64_rewards, hold, layout_of
from tests.mathematics.harness import Difference, float64_trl
from tests.mathematics.papers import PAPERS
from tests.support.grids import only

MADE = "python -m tests.mathematics.algorithms_page > docs/algorithms.md"
FIGURES = page.read(page.PAGE.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with float64_trl(), float64_rewards():
        yield


@pytest.fixture(scope="module")
def both_ranks(checkpoint: Path) -> dict[str, Held]:
    """Return the differences of every recipe on two processes, launched once."""
    return page.on_two_ranks(checkpoint)


def check(held: Held, name: str, layout: str) -> None:
    """Assert that a comparison is within the limit and within the figure of the page."""
    worst = max(held.loss, held.gradient)
    assert worst <= LIMIT, held
    assert worst <= float(FIGURES[name][layout]), f"{held}: {MADE}"


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("name", only(["grpo", "gspo", "gdpo"], PAPERS))
def test_a_recipe_equals_its_paper_with_two_updates_and_accumulation(
    name: str, checkpoint: Path, record_cell: Callable
) -> None:
    held = hold(checkpoint, name, layout_of(name, "accumulation"), updates=2)
    check(held, name, "accumulation")
    assert held.updates == 2
    record_cell("published algorithms", Difference(held.loss, held.gradient))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "two ranks"])
@pytest.mark.parametrize("name", PAPERS)
def test_a_recipe_equals_its_paper_on_one_process(
    name: str, layout: str, checkpoint: Path, record_cell: Callable
) -> None:
    held = hold(checkpoint, name, layout_of(name, layout))
    check(held, name, layout)
    assert held.truncated, "no completion was truncated, so a missing filter would go unnoticed"
    if layout_of(name, layout).updates > 1:
        assert held.bounded, "no ratio left the bounds, so missing bounds would go unnoticed"
    record_cell("published algorithms", Difference(held.loss, held.gradient))


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPERS)
def test_a_recipe_equals_its_paper_on_two_processes(
    name: str, both_ranks: dict[str, Held], record_cell: Callable
) -> None:
    check(both_ranks[name], name, "two ranks")
    assert both_ranks[name].updates == 4
    record_cell("published algorithms", Difference(both_ranks[name].loss, both_ranks[name].gradient))


@pytest.mark.parametrize(
    "fault",
    only([], FAULTS, slow={fault.algorithm: fault for fault in FAULTS}.values()),  # one of each algorithm
    ids=lambda fault: f"{fault.algorithm}: {fault.name}",
)
def test_a_planted_fault_is_found(fault: Fault, checkpoint: Path) -> None:
    held = fault.found(checkpoint)
    assert max(held.loss, held.gradient) > float(FIGURES[fault.algorithm]["smallest"]) > 1e3 * LIMIT, MADE


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPERS)
def test_the_effect_of_the_added_constant(name: str, checkpoint: Path) -> None:
    printed, measured = FIGURES[name]["without 1e-4"], page.without_the_constant(checkpoint, name)
    assert (printed == "–") == (measured == "–"), MADE
    if printed != "–":
        assert 0.5 < float(measured) / float(printed) < 2, MADE


@pytest.mark.slow
def test_dapo_without_dynamic_sampling_also_divides_by_tokens_of_zero_variance_groups(checkpoint: Path) -> None:
    """The recipe's gradient is DAPO's over the groups with variance, times their share of the tokens."""

    def informative(update: papers.Update) -> Tensor:
        kept = [row for row in update.rows if row.advantage and not row.is_truncated]
        counted = [row for row in update.rows if not row.is_truncated]
        share = sum(len(row.new) for row in kept) / sum(len(row.new) for row in counted)
        return papers.dapo(replace(update, rows=kept)) * share

    paper = replace(PAPERS["dapo"], objective=informative)
    held = hold(checkpoint, "dapo", Layout(), paper=paper)
    assert held.zero, "no group without variance"
    assert max(held.loss, held.gradient) <= LIMIT, held


# Expectations, by summing over every group that a small policy can sample

LOGITS = torch.tensor([0.3, -0.5, 1.1, 0.2], dtype=torch.float64)
REWARDS = [1.0, 0.0, 0.0, 1.0]


def expected_gradient(advantages: Callable[[Sequence[float]], Sequence[float]], size: int) -> Tensor:
    """Return the expectation of the mean of A grad log p over all groups of `size` completions of one token."""
    logits = LOGITS.clone().requires_grad_()
    log_p = torch.log_softmax(logits, 0)
    total = torch.zeros((), dtype=torch.float64)
    for group in itertools.product(range(len(REWARDS)), repeat=size):
        values = advantages([REWARDS[token] for token in group])
        weight = math.exp(sum(log_p[token].item() for token in group))
        total = total + weight * sum(a * log_p[t] for a, t in zip(values, group, strict=True)) / size
    return torch.autograd.grad(total, logits)[0]


def gradient_of(function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the gradient of a function of the probability of a correct answer."""
    logits = LOGITS.clone().requires_grad_()
    p = (torch.softmax(logits, 0) * torch.tensor(REWARDS, dtype=torch.float64)).sum()
    return torch.autograd.grad(function(p), logits)[0]


def likelihood(order: int) -> Callable[[Tensor], Tensor]:
    """Return MaxRL's likelihood to an order: the sum over k up to `order` of pass@k / k, up to a constant."""
    return lambda p: -sum((1 - p) ** k / k for k in range(1, order + 1))


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_expected_gradient_of_dr_grpo(size: int) -> None:
    found = expected_gradient(lambda rewards: papers.centred([[[r] for r in rewards]], 0.0)[0], size)
    assert torch.allclose(found, (size - 1) / size * gradient_of(lambda p: p), atol=1e-14)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_expected_gradient_of_maxrl(size: int) -> None:
    found = expected_gradient(lambda rewards: papers.over_the_mean([[[r] for r in rewards]], 0.0)[0], size)
    assert torch.allclose(found, gradient_of(likelihood(size - 1)), atol=1e-14)

    def without_baseline(rewards: Sequence[float]) -> list[float]:
        return [reward * len(rewards) / sum(rewards) if any(rewards) else 0.0 for reward in rewards]

    assert torch.allclose(expected_gradient(without_baseline, size), gradient_of(likelihood(size)), atol=1e-14)


# The page


def test_the_papers_import_nothing_that_they_are_compared_with() -> None:
    tree = ast.parse(inspect.getsource(papers))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert modules == {"__future__", "collections.abc", "dataclasses", "math", "torch"}


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    """The figures are taken from the page. The tests above measure them."""
    assert page.PAGE.read_text(encoding="utf-8") == page.page(FIGURES), MADE


def test_every_paper_has_faults_and_the_page_counts_them() -> None:
    assert {name: int(row["faults"]) for name, row in FIGURES.items()} == {
        name: sum(fault.algorithm == name for fault in FAULTS) for name in PAPERS
    }
    assert all(int(row["faults"]) >= 4 for row in FIGURES.values())
