"""Names of models and datasets: which are paths, and which the hub could have."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_recipes.data.hub import is_missing


def test_a_misspelt_run_beside_other_runs_is_no_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, file in [("runs/prices", "run.json"), ("Qwen/Qwen3-4B", "config.json")]:
        Path(folder).mkdir(parents=True)
        (Path(folder) / file).write_text("{}")
    assert is_missing("runs/price")
    assert not is_missing("runs/prices")
    assert not is_missing("Qwen/Qwen2.5-1.5B-Instruct")
    assert not is_missing("gpt2")
