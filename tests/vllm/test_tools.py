"""Two ranks whose rows call tools in different numbers of turns get the completions of their own rows from vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support import launching
from tests.support.tool_rollouts import call
from tests.vllm.conftest import Server, free_port
from tests.vllm.taught import CALLS, TOOLS, question, save_taught_policy, transcripts
from tests.vllm.test_generator_is_policy import EQUAL, Row, differences, train

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

CONTEXT = 1024
"""Number of tokens of a prompt and twice `max_completion_length`, or more."""


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_taught_policy(tmp_path_factory.mktemp("taught"))


@pytest.fixture(scope="module")
def tool_server(taught: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(taught, tmp_path_factory.mktemp("server") / "log.txt", "--max-model-len", str(CONTEXT))
    try:
        started.wait()
        yield started
    finally:
        launching.kill_tree(started.process.pid)


def tool_recipe(taught: Path, folder: Path, ranks: int, **changes: Any) -> Path:
    """Write a recipe of two steps with four rows each, two completions per row."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": question(n), "answer": "0"}) + "\n" for n in range(len(CALLS))))
    return launching.write_recipe(
        folder / "recipe.yaml",
        taught,
        None,
        folder / "run",
        dataset={"path": str(rows), "prompt_format": "conversational"},
        rewards=["tests.support.tool_rollouts.transcript_reward"],
        shuffle_dataset=False,
        per_device_train_batch_size=8 // ranks,
        num_generations=2,
        max_completion_length=256,
        save_strategy="no",
        learning_rate=0.0,
        temperature=0.1,  # the policy is so sure that each token is its likeliest
        log_completions=True,
        **{"max_steps": 2, **TOOLS, **changes},
    )


def written(run: Path) -> list[list[str]]:
    """Return the turns and results of each row of a run, as `transcripts` writes them."""
    table = launching.completions(run)
    found: dict[str, list[list[str]]] = {}
    for prompt, messages in zip(table["prompt"], table["completion"], strict=True):
        found.setdefault(prompt[-1]["content"], []).append([text_of(message) for message in messages])
    for texts in found.values():
        assert texts == [texts[0]] * 2, "both completions of a row are greedy"
    return [found[question(number)][0] for number in range(len(found))]


def text_of(message: Mapping[str, Any]) -> str:
    """Return a message as the policy or the tool wrote it."""
    if message["tool_calls"] is None:
        return message["content"]
    (made,) = message["tool_calls"]
    return call(made["function"]["name"], **json.loads(made["function"]["arguments"]))


@pytest.fixture(scope="module")
def in_process(taught: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Return what one process without vLLM writes."""
    folder = tmp_path_factory.mktemp("in-process")
    launching.launch("cpu", tool_recipe(taught, folder, 1))
    return written(folder / "run")


def run(mode: str, taught: Path, folder: Path, server: Server | None, loop: str = "ours", **changes: Any) -> str:
    """Train two ranks with vLLM, and return the output."""
    if server is None:
        changes["vllm_max_model_length"] = CONTEXT
    else:
        changes |= {"vllm_server_base_url": server.url, "vllm_group_port": free_port()}
    path = tool_recipe(taught, folder, 2, use_vllm=True, vllm_mode=mode, **changes)
    return train(Row(mode, "tools", "ddp_cpu"), path, extensions="", LOOP=loop)


@pytest.mark.parametrize("mode", ["server", "colocate", "tensor parallel"])
def test_each_row_gets_its_own_turns(
    mode: str, request: Any, taught: Path, in_process: list[list[str]], tmp_path: Path
) -> None:
    if mode == "server":
        said = run(mode, taught, tmp_path, request.getfixturevalue("tool_server"))
    else:
        ranks = 2 if mode == "tensor parallel" else 1
        said = run("colocate", taught, tmp_path, None, vllm_tensor_parallel_size=ranks)
    assert in_process == transcripts()
    assert written(tmp_path / "run") == in_process
    # The checks of turns and of the generator stop a run, or say why they do not look.
    assert "not checked" not in said
    found = differences(tmp_path / "run")
    assert len(found) == 2
    assert max(found) < EQUAL, "a token of another row is improbable"


def test_trls_own_loop_mixes_the_rows_of_ranks(taught: Path, tmp_path: Path, tool_server: Server) -> None:
    """In the first step rank 0 asks for the next turn of two rows and rank 1 for that of one, two completions each.

    If this fails, TRL has fixed it, and ranks need not pad their rows.
    """
    run("server", taught, tmp_path, tool_server, loop="trl", max_steps=1, generation_check=False)
    rows, expected = written(tmp_path / "run"), transcripts()
    assert rows[:2] == expected[:2]
    assert rows[2] == [*expected[2][:-1], expected[1][-1]], "the answer is that of a row of rank 0"
