"""TRL's own rewards in a recipe, by dotted path, on a dataset with the columns that they read."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pandas as pd
import pytest

from grpo_recipes import train


def test_three_of_trls_rewards_are_paid(tiny_model: Path, tmp_path: Path) -> None:
    with (tmp_path / "problems.csv").open("w", newline="") as file:
        lines = csv.DictWriter(file, ["problem", "solution", "level"])
        lines.writeheader()
        lines.writerows({"problem": f"{n} + 1?", "solution": f"$\\boxed{{{n + 1}}}$", "level": n} for n in range(8))
    overlong = {"max_completion_len": 4, "soft_punish_cache": 4}
    recipe = {
        "model_name_or_path": str(tiny_model),
        "dataset": {"path": str(tmp_path / "problems.csv"), "columns": {"question": "problem"}},
        "rewards": [
            "trl.rewards.accuracy_reward",
            "trl.rewards.think_format_reward",
            {"name": "trl.rewards.get_soft_overlong_punishment", "kwargs": overlong},
        ],
        "output_dir": str(tmp_path / "run"),
        **{"use_cpu": True, "bf16": False, "dtype": "float32", "gradient_checkpointing": False},
        **{"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4, "max_steps": 1},
        **{"logging_steps": 1, "save_strategy": "no", "report_to": "none"},
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(recipe))
    assert train.main(["--config", str(tmp_path / "mine.yaml")]) == 0
    (paid,) = (tmp_path / "run" / "completions").glob("*.parquet")
    table = pd.read_parquet(paid)
    assert set(table["accuracy_reward"]) <= {0.0, 1.0}  # None, and so NaN, if the golds were not there to be read
    assert table["solution"].str.startswith("$\\boxed").all()
    assert set(table["think_format_reward"]) <= {0.0, 1.0}
    assert table["soft_overlong_punishment_reward"].between(-1, 0).all()
    history = json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]
    assert history[0]["rewards/soft_overlong_punishment_reward/mean"] == pytest.approx(
        table["soft_overlong_punishment_reward"].mean()
    )
