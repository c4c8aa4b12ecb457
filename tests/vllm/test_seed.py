"""The recipe's seed decides what a colocated vLLM samples."""

from pathlib import Path

import pytest

from tests.support import launching
from tests.vllm.test_generator_is_policy import Row, recipe, train


@pytest.mark.nightly
def test_two_seeds_and_two_steps_differ_and_one_seed_repeats(policy: Path, tmp_path: Path, extensions: str) -> None:
    rows = launching.write_rows(tmp_path / "rows.jsonl", 2)

    def sampled(name: str, seed: int) -> list[list[str]]:
        """Return the completions of two steps on the same two prompts, by a policy that stays the same."""
        changes = {
            "seed": seed,
            "learning_rate": 0.0,
            "shuffle_dataset": False,
            "max_steps": 2,
            "log_completions": True,
        }
        row, folder = Row("colocate", "full", changes=changes), tmp_path / name
        folder.mkdir()
        train(row, recipe(row, policy, rows, folder, None), extensions=extensions)
        table = launching.completions(folder / "run").sort_values(["prompt"], kind="stable")
        return [table[table["step"] == step]["completion"].tolist() for step in (1, 2)]

    first, again, other = sampled("first", 1), sampled("again", 1), sampled("other", 2)
    assert len(first[0]) == len(first[1]) == 8
    assert first == again
    assert first[0] != first[1]
    assert first[0] != other[0]
    assert first[1] != other[1]
