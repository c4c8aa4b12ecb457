"""Collective calls on two processes."""

import os
from pathlib import Path
from typing import Any

import torch

from grpo_recipes.process.ranks import gather, largest_of_ranks, on_any_rank, on_first_rank, raise_alike, rank
from grpo_rewards.errors import UserError
from tests.support.errors import refused


def raising(place: str) -> Any:
    raise UserError(place, "wrong", "mend it")


def results_of_rank(number: int, store: Path) -> list[Any]:
    """Return the results of one of two ranks. Each rank raises where the other one alone has failed."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=2)
    try:
        results: list[Any] = [gather(rank()), on_first_rank(rank)]
        results += [largest_of_ranks(number, torch.device("cpu")), on_any_rank(number == 1, torch.device("cpu"))]
        results += [on_any_rank(False, torch.device("cpu")), raise_alike(lambda: "alike")]
        with refused("first rank"):
            on_first_rank(lambda: raising("first rank"))
        with refused("rank 1"):
            raise_alike(lambda: raising("rank 1") if number == 1 else None)
        return results
    finally:
        torch.distributed.destroy_process_group()


EXPECTED = [[0, 1], 0, 1, True, False, "alike"]


def test_both_ranks_get_the_same_results(tmp_path: Path) -> None:
    other = os.fork()
    if other == 0:
        code = 1
        try:
            code = int(results_of_rank(1, tmp_path / "store") != EXPECTED)
        finally:
            os._exit(code)
    assert results_of_rank(0, tmp_path / "store") == EXPECTED
    assert os.waitpid(other, 0)[1] == 0


def test_a_process_on_its_own_is_the_first_rank() -> None:
    assert (gather("value"), on_first_rank(rank), largest_of_ranks(3, torch.device("cpu"))) == (["value"], 0, 3)
    with refused("alone"):
        raise_alike(lambda: raising("alone"))
