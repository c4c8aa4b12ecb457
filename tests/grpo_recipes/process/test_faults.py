"""What a failed run says last, and what is stopped before it fails."""

import asyncio
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_recipes import train
from grpo_recipes.process import faults
from grpo_recipes.runs.files import write_atomically
from tests.support import launching

TEXTS = ["one", "two", "three"]


def returning(*values: object):
    def judge(prompts: list, completions: list, **columns: object) -> list:
        return list(values)

    return judge


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, torch.tensor(math.inf), "2", 1j, 1e39, 10**400])
def test_what_is_no_finite_number_is_stopped_with_its_row(value: object) -> None:
    guard = faults.checked_reward(returning(1.0, None, value))
    with pytest.raises(faults.RewardFault, match=r"reward `judge` returned .* for row 2 .*'three'.*None"):
        guard(prompts=TEXTS, completions=TEXTS)


def test_a_long_completion_is_named_by_its_beginning() -> None:
    guard = faults.checked_reward(returning(math.nan))
    with pytest.raises(faults.RewardFault) as error:
        guard(prompts=["one"], completions=["a\n b " * 99])
    assert f"(completion {'a b ' * 15!r})" in str(error.value)


@pytest.mark.parametrize("completions", [TEXTS, [[{"role": "assistant", "content": text}] for text in TEXTS]])
def test_what_is_finite_passes_as_it_is(completions: list) -> None:
    values = [1, None, torch.tensor(0.5)]
    guard = faults.checked_reward(returning(*values))
    assert guard(prompts=TEXTS, completions=completions, answer=TEXTS) == values
    assert guard.__name__ == "judge"


SHAPES = {
    "None": (None, "returned None, not a list of scores for 3 completions"),
    "a number": (0.5, "returned a float, not a list of scores for 3 completions"),
    "a mapping": ({0: 1.0, 1: 1.0, 2: 1.0}, "returned a dict, not a list of scores for 3 completions"),
    "a set": ({1.0, 2.0, 3.0}, "returned a set, not a list of scores for 3 completions"),
    "text": ("123", "returned a str, not a list of scores for 3 completions"),
    "a tensor without dimensions": (torch.tensor(0.5), "returned a Tensor, not a list of scores for 3 completions"),
    "one score for all": ([1.0], "returned 1 scores for 3 completions"),
    "too many": ([1.0] * 4, "returned 4 scores for 3 completions"),
    "none at all": ([], "returned 0 scores for 3 completions"),
}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_no_list_of_scores_is_refused_by_name(shape: str, is_async: bool) -> None:
    """TRL would write one score into every row, and the keys of a mapping as if they were scores."""
    value, says = SHAPES[shape]

    def judge(prompts: list, completions: list, **columns: object) -> object:
        return value

    async def judge_async(prompts: list, completions: list, **columns: object) -> object:
        return value

    async def awaited() -> object:
        return await faults.checked_reward(judge_async)(prompts=TEXTS, completions=TEXTS)

    guard = faults.checked_reward(judge)
    with pytest.raises(faults.RewardFault, match=f"reward `judge(_async)?` {says}: it must return one for each"):
        asyncio.run(awaited()) if is_async else guard(prompts=TEXTS, completions=TEXTS)


@pytest.mark.parametrize(
    "value", [(1.0, 2.0, 3.0), torch.ones(3), iter([1.0, 1.0, 1.0]), {1: 1.0, 2: 2.0, 3: 3.0}.values()]
)
def test_any_sequence_of_scores_is_a_list_of_them(value: object) -> None:
    guard = faults.checked_reward(lambda prompts, completions, **columns: value)
    assert len(guard(prompts=TEXTS, completions=TEXTS)) == 3


def test_the_part_of_a_sum_is_named() -> None:
    from dataclasses import replace

    from grpo_rewards.registry import build_rewards

    (built,) = build_rewards([{"name": "sum", "rewards": ["tag_count"]}])
    parts = (replace(built.function.parts[0], function=lambda **columns: None, name="part"),)
    with pytest.raises(faults.RewardFault, match="reward `part`: `scores` must be a list"):
        faults.checked_reward(replace(built.function, parts=parts))(prompts=TEXTS, completions=TEXTS)


def test_asynchronous_rewards_are_checked_too() -> None:
    class Judge:
        async def __call__(self, prompts: list, completions: list, **columns: object) -> list[float]:
            return [math.nan] * 3

    from trl.trainer.utils import is_async_callable

    guard = faults.checked_reward(Judge())
    assert is_async_callable(guard)
    with pytest.raises(faults.RewardFault, match="`Judge` returned nan for row 0"):
        asyncio.run(guard(prompts=TEXTS, completions=TEXTS))


def test_models_are_left_to_trl() -> None:
    model = torch.nn.Linear(1, 1)
    assert faults.checked_reward(model) is model
    assert faults.checked_reward("some/model") == "some/model"


def test_a_reward_that_raises_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def judge(prompts: list, completions: list, **columns: object) -> list:
        raise KeyError("gold")

    with pytest.raises(faults.RewardFault) as fault:
        faults.checked_reward(judge)(prompts=TEXTS, completions=TEXTS)
    faults.report(fault.value, tmp_path, None)
    said = capsys.readouterr().err.splitlines()
    again = "no checkpoint had been saved: `--resume_from_checkpoint true` starts again"
    assert said[-1] == f"error: reward `judge` raised KeyError: 'gold'; {again}"
    assert any("Traceback" in line for line in said)


@pytest.mark.parametrize("folder", ["/proc/run", "/dev/null/run"])
def test_the_sentence_is_said_where_nothing_can_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"{folder}/error.json")
    faults.report(OSError(28, "No space left on device"), Path(folder), None)
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: OSError: [Errno 28] No space left on device;")


def test_a_full_disk_leaves_no_half_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        write(path, content[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    faults.report(RuntimeError("the disk is full"), tmp_path, None)
    assert "the disk is full" in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "is_full"),
    [
        ({"f_bavail": 1}, True),
        ({"f_favail": 3}, True),  # no inodes
        ({"f_files": 0, "f_favail": 0}, False),  # btrfs counts none
        ({}, False),
    ],
)
def test_a_full_disk_is_called_that(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, int],
    is_full: bool,
) -> None:
    """torch's own words for it are "unexpected pos 64832 vs 64724"."""
    disk = {"f_bavail": 1 << 20, "f_frsize": 4096, "f_files": 10_000, "f_favail": 9_000, **changes}
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(**disk))
    faults.report(RuntimeError("unexpected pos 64832 vs 64724"), tmp_path, tmp_path / "checkpoint-5")
    last = capsys.readouterr().err.splitlines()[-1]
    hint = f"; the disk of {tmp_path} is full: make room first" if is_full else ""
    assert last.endswith(f"goes on from checkpoint-5{hint}")


@pytest.mark.parametrize(
    ("error", "began", "curable"),
    [
        (ValueError("a combination that TRL refuses"), False, False),
        (RuntimeError("size mismatch in the checkpoint"), False, False),
        (ConnectionError("the vLLM server"), False, True),
        (ValueError("of a step"), True, True),
        (RuntimeError("CUDA out of memory"), True, True),
    ],
)
def test_a_restart_is_recommended_only_where_it_could_help(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, error: Exception, began: bool, curable: bool
) -> None:
    assert faults.is_curable(error, began=began) == curable
    faults.report(error, tmp_path, tmp_path / "checkpoint-4", curable=curable)
    assert ("--resume_from_checkpoint" in capsys.readouterr().err.splitlines()[-1]) == curable


def test_a_rank_that_lost_another_says_what_the_other_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    faults.report(faults.RewardFault("reward `judge` raised ValueError: no"), tmp_path, tmp_path / "checkpoint-4")
    capsys.readouterr()
    monkeypatch.setenv("RANK", "0")
    faults.report(RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer"), tmp_path, None)
    expected = (
        "error: rank 1: reward `judge` raised ValueError: no; `--resume_from_checkpoint true` goes on from checkpoint-4"
    )
    assert capsys.readouterr().err.splitlines() == [expected]
    assert json.loads((tmp_path / "error.json").read_text())["message"] == expected
    # The next attempt does not mistake the old sentence for its own.
    monkeypatch.setenv("RANK", "1")
    faults.forget(tmp_path)
    monkeypatch.setattr(faults, "SENTENCE_SECONDS", 0)
    faults.report(RuntimeError("Connection reset by peer"), tmp_path, None)
    assert "another rank ended without an error of its own" in capsys.readouterr().err.splitlines()[-1]


def test_a_sentence_that_comes_late_is_waited_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network file system another rank's file may be seen after the connection to it is lost."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(faults, "SENTENCE_SECONDS", 60)
    record = json.dumps({"sentence": "rank 1: no room", "rank": 1, "time": 1.0})
    late = threading.Timer(0.2, write_atomically, (tmp_path / "fault-rank1.json", record))
    late.start()
    faults.report(RuntimeError("Connection reset by peer"), tmp_path, None)
    late.join()
    assert capsys.readouterr().err.splitlines() == ["error: rank 1: no room"]


def test_a_generator_that_is_not_the_policy_is_one_sentence(tmp_path: Path) -> None:
    said = faults.sentence(faults.NotThePolicy("the generator is not the policy: so"), 0, tmp_path / "checkpoint-4")
    assert said == ("the generator is not the policy: so; `--resume_from_checkpoint true` goes on from checkpoint-4")


@pytest.mark.parametrize(
    ("error", "ranks", "is_lost"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer"), "2", True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer"), "1", False),
        (torch.distributed.DistNetworkError("no route"), "2", True),
        (torch.distributed.DistNetworkError("no route"), "1", False),
        (faults.RewardFault("reward `judge` raised RuntimeError: NCCL error"), "2", False),
    ],
)
def test_only_one_rank_of_several_loses_another(
    monkeypatch: pytest.MonkeyPatch, error: Exception, ranks: str, is_lost: bool
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    said = faults.sentence(error, 0, None)
    assert ("another rank ended without an error of its own" in said) == is_lost
    assert (str(error) in said) != is_lost


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Connection refused: http://localhost:8000"),
        FileNotFoundError("/home/igloo/x"),
        RuntimeError("nccls"),
    ],
)
def test_an_error_of_this_ranks_own_is_not_taken_for_a_lost_rank(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, ranks: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    faults.report(error, tmp_path, None)
    assert type(error).__name__ in capsys.readouterr().err.splitlines()[-1]
    assert (tmp_path / "fault-rank0.json").is_file()


def test_a_lock_without_a_builder_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    faults.check_build_locks(patience=0)
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(exist_ok=True)
    lock.touch()
    with pytest.raises(faults.BuildLocked, match=f"^{lock}: .*remove that file"):
        faults.check_build_locks(patience=0)


def test_a_lock_with_a_builder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "cpu_adam"
    folder.mkdir()
    (folder / "lock").touch()
    builder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=folder)
    try:
        faults.check_build_locks(patience=0)
    finally:
        builder.kill()
        builder.wait()
    with pytest.raises(faults.BuildLocked):
        faults.check_build_locks(patience=0)


def test_a_recipe_is_refused_while_the_lock_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr(faults.check_build_locks, "__defaults__", (0.0,))
    (tmp_path / "extensions" / "deepspeed_shm_comm").mkdir(parents=True)
    (tmp_path / "extensions" / "deepspeed_shm_comm" / "lock").touch()
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    recipe = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, tmp_path / "run")
    assert train.main(["--config", str(recipe)]) == 2
    assert "remove that file" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "reward", "says"),
    [
        (
            "ddp_cpu",
            "raises_on_rank_1",
            "rank 1: reward `raises_on_rank_1` raised ValueError: the judge did not answer",
        ),
        (
            "zero3_cpu",
            "raises_on_rank_1",
            "rank 1: reward `raises_on_rank_1` raised ValueError: the judge did not answer",
        ),
        ("ddp_cpu", "infinite_on_rank_1", "rank 1: reward `infinite_on_rank_1` returned inf for row 3"),
        (
            "ddp_cpu",
            "nothing_on_rank_1",
            "rank 1: reward `nothing_on_rank_1` returned None, not a list of scores for 8 completions",
        ),
        ("ddp_cpu", "one_on_rank_1", "rank 1: reward `one_on_rank_1` returned 1 scores for 8 completions"),
        ("ddp_cpu", "kills_rank_1", "another rank ended without an error of its own; it was probably killed"),
    ],
)
def test_a_fault_on_one_rank_ends_every_rank_with_the_sentence_that_matters(
    tmp_path: Path, extensions: str, layout: str, reward: str, says: str
) -> None:
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    rewards = [f"tests.support.launching.{reward}"]
    recipe = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, tmp_path / "run", rewards=rewards)
    process = launching.start(layout, recipe, TORCH_EXTENSIONS_DIR=extensions)
    assert launching.wait_for((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").exists, process)
    broken = time.monotonic()
    said = launching.finish(process, timeout=60)
    print(f"{layout}, {reward}: ended {time.monotonic() - broken:.0f} s after the last save")
    assert process.returncode == 1
    ranks, _, launcher = said.partition("] failed (exitcode")
    *_, last = [line for line in ranks.splitlines() if not re.match(r"[WE]\d{4} ", line)]  # torch's own log
    assert last.startswith("error: "), said
    assert says in last
    assert "goes on from checkpoint-2" in last
    survivors = 1 if reward == "kills_rank_1" else 2
    assert sum(line.startswith("error: ") and says in line for line in ranks.splitlines()) == survivors
    # The launcher's own report, which comes after, ends with the sentence or with the signal.
    assert f"error: {'rank 0: ' if survivors == 1 else ''}{says}" in launcher
    assert (tmp_path / "run" / "checkpoint-2" / "model.safetensors").is_file()
    assert os.path.exists(tmp_path / "run" / "completions" / "completions_00002.parquet")
