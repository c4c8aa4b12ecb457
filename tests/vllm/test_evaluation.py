"""`grpo-recipes evaluate --vllm` completes as transformers does, with an adapter as with the merged model."""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from transformers import AutoTokenizer

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


@pytest.mark.nightly
def test_a_server_of_an_exported_folder_gives_the_greedy_tokens_of_the_run(
    adapter: Path, problems: Path, tmp_path: Path
) -> None:
    """The server takes the settings that a request leaves out from the folder, as `vllm serve` does by default."""
    expected, _ = evaluated(adapter, problems, tmp_path / "evaluated")
    grpo_recipes("export", adapter, "--to", tmp_path / "exported")
    prompts = [json.loads(line)["question"] for line in problems.read_text().splitlines()]
    started = Server(tmp_path / "exported", tmp_path / "log.txt", settings="auto")
    try:
        started.wait()
        found = completions(started.url, tmp_path / "exported", prompts)
    finally:
        launching.kill_tree(started.process.pid)
    assert found == expected


def completions(url: str, model: Path, prompts: list[str]) -> list[str]:
    """Return a server's completions at temperature 0, from their tokens: its text leaves out half a character."""
    body = {"model": str(model), "prompt": prompts, "temperature": 0, "max_tokens": 32, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        choices = json.load(answer)["choices"]
    tokens = [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]
    return AutoTokenizer.from_pretrained(model).batch_decode(tokens, skip_special_tokens=True)
