"""A model's published generation_config.json does not steer vLLM: in training, in an evaluation, from a server."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import launching
from tests.vllm.conftest import Server
from tests.vllm.test_evaluation import evaluated
from tests.vllm.test_evaluation import problems as problems  # a fixture
from tests.vllm.test_generator_is_policy import EQUAL, Row, differences, recipe, train

STEERING = {"temperature": 0.1, "top_k": 1, "top_p": 0.1, "min_p": 0.9, "repetition_penalty": 5.0}
ENDS = {"eos_token_id": [1, *range(100, 110)], "pad_token_id": 0}


@pytest.fixture(scope="module")
def plain(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(policy, tmp_path_factory.mktemp("plain") / "policy")


@pytest.fixture(scope="module")
def steering(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(policy, tmp_path_factory.mktemp("steering") / "policy", **STEERING)


def published(policy: Path, folder: Path, **settings: object) -> Path:
    """Save a copy of the policy with many end tokens and other settings."""
    shutil.copytree(policy, folder)
    (folder / "generation_config.json").write_text(json.dumps({**ENDS, **settings}))
    return folder


@pytest.fixture
def steered_server(steering: Path, tmp_path: Path) -> Iterator[Server]:
    """Start a server that reads the model's settings, as vLLM does by itself.

    Each test gets its own, because training changes the server's weights.
    """
    started = Server(steering, tmp_path / "server.txt", settings="auto")
    try:
        started.wait()
        yield started
    finally:
        launching.kill_tree(started.process.pid)


@pytest.mark.nightly
def test_training_on_a_colocated_engine(plain: Path, steering: Path, tmp_path: Path, extensions: str) -> None:
    rows = launching.write_rows(tmp_path / "rows.jsonl", 2)
    sampled = []
    for name, policy in (("plain", plain), ("steering", steering)):
        row, folder = Row("colocate", "full", changes={"log_completions": True}), tmp_path / name
        folder.mkdir()
        said = train(row, recipe(row, policy, rows, folder, None), extensions=extensions)
        assert ("the model's generation_config is not applied to completions (min_p: 0.9" in said) is (
            name == "steering"
        )
        assert max(differences(folder / "run")) < EQUAL
        table = launching.completions(folder / "run")
        sampled.append(table[["step", "prompt", "completion"]].values.tolist())
    assert sampled[0] == sampled[1]
    assert len({completion for *_, completion in sampled[0]}) > len(sampled[0]) // 2


@pytest.mark.nightly
def test_training_with_a_server(steered_server: Server, steering: Path, tmp_path: Path, extensions: str) -> None:
    row = Row("server", "full", changes={"log_completions": True})
    rows = launching.write_rows(tmp_path / "rows.jsonl", 2)
    train(row, recipe(row, steering, rows, tmp_path, steered_server), extensions=extensions)
    assert max(differences(tmp_path / "run")) < EQUAL
    completions = launching.completions(tmp_path / "run")["completion"].tolist()
    assert len(set(completions)) > len(completions) // 2, "top_k 1 would repeat one completion"


@pytest.mark.nightly
def test_an_evaluation(plain: Path, steering: Path, steered_server: Server, problems: Path, tmp_path: Path) -> None:
    """The evaluation is greedy, so that only penalties and end tokens could differ."""
    expected, _ = evaluated(plain, problems, tmp_path / "transformers")
    found, summary = evaluated(steering, problems, tmp_path / "vllm", "--vllm")
    url = ("--vllm", "--vllm_server_base_url", steered_server.url)
    served, of_server = evaluated(steering, problems, tmp_path / "server", *url)
    assert found == served == expected
    assert summary["sampling"] == of_server["sampling"]
    assert summary["sampling"]["stop_token_ids"] == ENDS["eos_token_id"]
