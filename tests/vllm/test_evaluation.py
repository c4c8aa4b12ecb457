"""`grpo-recipes evaluate --vllm` completes as transformers does, with an adapter as with the merged model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.support import launching
from tests.vllm.conftest import Server

PROBLEMS = 200


def grpo_recipes(*arguments: Any) -> None:
    command = [sys.executable, "-m", "tests.vllm.cli", *map(str, arguments)]
    done = subprocess.run(command, cwd=launching.ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launching.write_rows(tmp_path_factory.mktemp("problems") / "test.jsonl", PROBLEMS)


def evaluated(model: Path, problems: Path, output: Path, *arguments: Any) -> tuple[list[str], dict[str, Any]]:
    """Return the greedy completions of every problem, and evaluation.json."""
    options = ["--path", problems, "--split", "train", "--prompt_format", "text", "--system_prompt", "none"]
    grpo_recipes("evaluate", model, *options, "--max_new_tokens", 32, "--output", output, *arguments)
    table = pd.read_parquet(output / "completions.parquet")
    assert len(table) == PROBLEMS
    return table["completion"].tolist(), json.loads((output / "evaluation.json").read_text())


@pytest.mark.nightly
def test_vllm_completes_as_transformers_does(policy: Path, problems: Path, tmp_path: Path, server: Server) -> None:
    expected, of_transformers = evaluated(policy, problems, tmp_path / "transformers")
    found, of_vllm = evaluated(policy, problems, tmp_path / "vllm", "--vllm")
    served, of_server = evaluated(policy, problems, tmp_path / "server", "--vllm", "--vllm_server_base_url", server.url)
    assert len(set(expected)) > PROBLEMS // 2
    assert found == expected
    assert served == expected
    made = [one["made_with"] for one in (of_transformers, of_vllm, of_server)]
    assert [one["dtype"] for one in made] == ["float32"] * 3
    assert of_vllm["engine"] == "vllm"
    assert made[1]["version"].startswith("0.30.0")
    assert made[2]["version"].startswith("0.30.0")


@pytest.mark.nightly
def test_an_adapter_completes_as_the_merged_model_does(
    policy: Path, adapter: Path, problems: Path, tmp_path: Path
) -> None:
    grpo_recipes("merge", adapter, "--output", tmp_path / "merged")
    base, _ = evaluated(policy, problems, tmp_path / "base", "--vllm")
    expected, _ = evaluated(tmp_path / "merged", problems, tmp_path / "whole", "--vllm")
    found, of_adapter = evaluated(adapter, problems, tmp_path / "adapter", "--vllm")
    assert of_adapter["made_with"]["adapter"] == "LoRARequest"
    assert found == expected
    assert sum(one != other for one, other in zip(found, base, strict=True)) > PROBLEMS // 2
