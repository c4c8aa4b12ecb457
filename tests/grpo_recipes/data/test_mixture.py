"""A run on a mixture of three sources is killed and resumed, and gives the result of an uninterrupted run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from grpo_recipes.data.load import load
from grpo_recipes.recipe.dataset import DatasetSpec
from grpo_recipes.runs.resume import newest_checkpoint
from tests.support import launching


def mixture(folder: Path) -> dict[str, Any]:
    """Return a mixture of JSONL, Parquet and a saved folder with the fractions 0.5, 1 and 0.25.

    It has 4 of 8, 8 of 8, and 2 of 4 rows.
    """
    rows = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(20)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:8]))
    datasets.Dataset.from_list(rows[8:16]).to_parquet(folder / "b.parquet")
    datasets.Dataset.from_list(rows[16:]).save_to_disk(str(folder / "saved"))
    shares = {"a.jsonl": 0.5, "b.parquet": 1.0, "saved": 0.25}
    sources = [{"path": str(folder / name), "fraction": fraction} for name, fraction in shares.items()]
    return {"path": sources, "prompt_format": "text"}


def by_source(completions: list[str], source: list[str], log_extra: Any, **columns: Any) -> list[float]:
    """Return the number of different characters of each completion, and log the source of each row."""
    log_extra("source", [Path(path).name for path in source])
    return launching.variety(completions)


@pytest.mark.nightly
def test_a_killed_run_on_a_mixture_resumes_to_the_same_result(tmp_path: Path) -> None:
    dataset, layout, processes = mixture(tmp_path), "ddp_cpu", 2
    assert len(load(DatasetSpec.parse(dataset))) == 14
    policy, size = launching.build_policy(tmp_path / "policy"), 16 // processes
    changes = {"dataset": dataset, "per_device_train_batch_size": size, "max_steps": 6}
    changes["rewards"] = ["tests.grpo_recipes.data.test_mixture.by_source"]
    names = ("alone", "killed")
    alone, killed = (
        launching.write_recipe(tmp_path / f"{name}.yaml", policy, None, tmp_path / name, **changes) for name in names
    )
    launching.launch(layout, alone)
    process = launching.start(layout, killed)
    assert launching.wait_for((tmp_path / "killed" / "completions" / "completions_00004.parquet").exists, process)
    launching.kill_tree(process.pid)
    launching.finish(process)
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    assert newest_checkpoint(tmp_path / "killed", processes) is not None
    output = launching.launch(layout, killed, "--resume_from_checkpoint", "true")
    assert "resuming from" in output
    launching.assert_same_run(tmp_path / "alone", tmp_path / "killed")
    seen = launching.completions(tmp_path / "killed")
    assert set(seen["source"]) == {"a.jsonl", "b.parquet", "saved"}
