"""Five commands lead from a CSV of problems to a report, without editing a file."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from grpo_recipes import cli


def level_reward(completions: list, level: list, **columns: Any) -> list[float]:
    """Return the level of each row, as a user's reward that reads another column."""
    return [float(one) for one in level]


@pytest.mark.slow
def test_five_commands_lead_from_a_csv_to_a_report(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    pairs = [(draw.randint(1, 99), number) for number in range(200)]
    table = pd.DataFrame(
        {
            "problem": [f"What is {a} + {b}?" for a, b in pairs],
            "solution": [rf"We add them: $\boxed{{{a + b}}}$." for a, b in pairs],
            "level": [1 + number % 5 for _, number in pairs],
            "source": "made",
        }
    )
    table.to_csv("problems.csv", index=False)
    rewards = ["--rewards", "[math_correctness, tests.grpo_recipes.test_own_table.level_reward]"]
    short = ["--max_steps", "3", "--max_completion_length", "8", "--eval_steps", "2", "--save_steps", "3"]
    assert cli.main(["init", "problems.csv", "--model", str(tiny_model)]) == 0
    assert cli.main(["plan", "problems.yaml", *rewards, *short]) == 0
    output = capsys.readouterr().out
    assert "What is " in output, "one prompt is shown"
    assert cli.main(["train", "problems.yaml", *rewards, *short]) == 0
    record = json.loads(Path("runs/problems/run.json").read_text())
    held_out = 200 - record["train_prompts"]
    assert 5 <= held_out <= 40
    capsys.readouterr()
    assert cli.main(["evaluate", "runs/problems", "--recipe", "runs/problems/run.json", "--max_new_tokens", "4"]) == 0
    output = capsys.readouterr().out
    assert f"{held_out} problems" in output
    assert re.search(r"^  level_reward +\d\.\d+ \[", output, re.MULTILINE), "its mean, with an interval"
    assert cli.main(["report", "runs/problems"]) == 0
    assert "level_reward" in Path("runs/problems/report/report.html").read_text()
    completions = pd.concat(map(pd.read_parquet, Path("runs/problems/completions").glob("completions_*.parquet")))
    levels = dict(zip(table["problem"], table["level"], strict=True))
    for prompt, reward in zip(completions["prompt"], completions["level_reward"], strict=True):
        (problem,) = [problem for problem in levels if problem in str(prompt)]
        assert reward == levels[problem]
