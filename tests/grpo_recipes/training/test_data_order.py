"""Stopping and going on: the order of the data, cut-off checkpoints, SIGTERM; and real kills, in the slow part."""

import fnmatch
import json
import os
import random
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler
from transformers import TrainerControl, TrainerState
from trl.trainer.utils import RepeatSampler

from grpo_recipes import train
from grpo_recipes.checks.checks import Machine, check
from grpo_recipes.checks.geometry import geometry_of
from grpo_recipes.process.ranks import on_any_rank
from grpo_recipes.recipe.recipe import RecipeError, parse_recipe, resolved
from grpo_recipes.recipe.trl_keys import RESUME_MAY_CHANGE
from grpo_recipes.runs.checkpoints import Rejected, checkpoint_damage, is_complete
from grpo_recipes.runs.resume import IN_GEOMETRY, decide, layout_change, newest_checkpoint, recipe_changes, set_aside
from grpo_recipes.training.callbacks import StopOnSignal
from grpo_recipes.training.data_order import EpochSampler, SetSamplerEpoch
from tests.support import launching
from tests.tools import boundaries, torture


def repeat_sampler(prompts: int, **changes: object) -> RepeatSampler:
    return RepeatSampler(
        range(prompts), **{"mini_repeat_count": 2, "batch_size": 3, "repeat_count": 2, "seed": 7, **changes}
    )


@settings(deadline=None, max_examples=50)
@given(prompts=st.integers(3, 30), epochs=st.integers(1, 5), seed=st.integers(0, 9), shuffle=st.booleans())
def test_any_epoch_can_be_the_first(prompts: int, epochs: int, seed: int, shuffle: bool) -> None:
    plain = repeat_sampler(prompts, seed=seed, shuffle=shuffle)
    expected = [list(plain) for _ in range(epochs)]  # one process that is never interrupted
    for epoch in range(epochs):
        resumed = EpochSampler.like(repeat_sampler(prompts, seed=seed, shuffle=shuffle))
        resumed.epoch = epoch
        assert list(resumed) == expected[epoch]
        assert len(resumed) == len(expected[epoch])


@pytest.mark.parametrize("epoch", [1.25, 1.6])
def test_a_resumed_epoch_on_two_ranks_goes_on_where_it_stopped(epoch: float) -> None:
    plain = repeat_sampler(12)
    list(plain)
    second_epoch = list(plain)
    sampler = EpochSampler.like(repeat_sampler(12))
    state = TrainerState(epoch=epoch)
    SetSamplerEpoch(sampler).on_epoch_begin(SimpleNamespace(), state, TrainerControl())
    seen = []
    for rank in range(2):
        shard = BatchSamplerShard(BatchSampler(sampler, 3, drop_last=False), 2, rank)
        seen.append([index for batch in SkipBatchSampler(shard, 2) for index in batch])
    rest = second_epoch[2 * 2 * 3 :]
    assert sorted(seen[0] + seen[1]) == sorted(rest)


def refused(before: Mapping[str, Any], now: Mapping[str, Any], directory: str = ".") -> list[str]:
    return recipe_changes(before, now, directory, RESUME_MAY_CHANGE)[0]


def checkpoint(folder: Path, step: int, processes: int) -> Path:
    """A checkpoint's last files, as transformers writes them."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    names = ["rng_state.pth"] if processes == 1 else [f"rng_state_{rank}.pth" for rank in range(processes)]
    for name in names:
        torch.save({"cpu": torch.get_rng_state()}, path / name)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return path


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_checkpoint_without_its_last_bytes_is_not_resumed(tmp_path: Path, processes: int) -> None:
    """One of another trainer. Numbers are compared as numbers, and what is no checkpoint of a run is left alone."""
    for step in (8, 9, 10):
        (checkpoint(tmp_path, step, processes) / "global_step").mkdir()  # weights that are not looked into
    (tmp_path / "checkpoint-best").mkdir()
    point = decide(tmp_path, True, processes)
    assert (point.newest, list(point.rejected)) == (tmp_path / "checkpoint-10", [])
    for file in sorted(path for path in (tmp_path / "checkpoint-10").iterdir() if path.is_file()):
        whole = file.read_bytes()
        for kept in (0, 1, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:kept])
            point = decide(tmp_path, True, processes)
            assert point.newest == tmp_path / "checkpoint-9", (file.name, kept)
            assert [(one.path.name, one.cut_off) for one in point.passed_over] == [("checkpoint-10", True)]
        file.unlink()
        assert not is_complete(tmp_path / "checkpoint-10", processes)
        file.write_bytes(whole)
    assert is_complete(tmp_path / "checkpoint-10", processes)


def test_what_was_cut_off_twice_is_set_aside_twice(tmp_path: Path) -> None:
    for _ in range(2):
        set_aside([Rejected(checkpoint(tmp_path, 3, 1), "checkpoint-3 was cut off", cut_off=True)])
    assert [path.name for path in tmp_path.iterdir()] == ["incomplete-checkpoint-3"]


def test_no_checkpoint_is_complete(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "nothing", 1) is None
    cut_off = checkpoint(tmp_path, 1, 1)
    (cut_off / "trainer_state.json").unlink()
    point = decide(tmp_path, True, 1)
    assert point.newest is None
    assert [one.path for one in point.passed_over] == [cut_off]


def test_a_layout_that_moves_the_place_in_the_data_is_named() -> None:
    before = {"geometry": {"num_processes": 2, "num_generations": 8}, "train_prompts": 100, "seed": 42, "world_size": 2}
    assert layout_change(before, before) is None
    assert layout_change(before, {**before, "seed": 1}) == "seed was 42 and is 1"
    other = {**before, "geometry": {"num_processes": 4, "num_generations": 8}}
    assert layout_change(before, other) == "num_processes was 2 and is 4"
    assert layout_change({}, before) is None  # a run that recorded nothing


def test_what_may_change_on_resume_is_what_the_page_lists() -> None:
    page = (Path(__file__).parents[3] / "docs" / "scaling.md").read_text()
    rows = page.partition("| what may change on resume | keys |")[2].partition("\n\n")[0]
    patterns = re.findall(r"`([^`]+)`", rows)
    assert sorted(patterns) == sorted(RESUME_MAY_CHANGE)
    for pattern in patterns:
        outer, _, key = pattern.replace("*", "x").rpartition(".")
        before, now = ({outer: {key: value}} if outer else {key: value} for value in (5, 6))
        assert refused(before, now) == []


@settings(deadline=None, max_examples=60)
@given(key=st.sampled_from(sorted(resolved({}))), value=st.integers(7, 9))
def test_every_key_of_trl_is_refused_or_listed(key: str, value: int) -> None:
    before = resolved({"dataset": {"name": "gsm8k"}, "rewards": ["a"]})
    changes = refused({**before, key: 5}, {**before, key: value})
    listed = any(fnmatch.fnmatch(key, pattern) for pattern in RESUME_MAY_CHANGE)
    follows = ["epsilon_high"] if key == "epsilon" else []  # unless it is set
    changed = [] if listed or key in IN_GEOMETRY else [key, *follows]
    assert sorted(changes) == sorted(f"`{name}` was 5 and is {value}" for name in changed)


def test_one_recipe_spelled_in_two_ways_is_one_recipe(tmp_path: Path) -> None:
    for name in ("there", "copied", "other"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "rows.jsonl").write_text("1" if name != "other" else "2")
    before = resolved({"rewards": ["a"], "model_name_or_path": "there", "dataset": {"path": "there/deep/rows.jsonl"}})
    now = resolved({"rewards": [{"name": "a", "weight": 1}], "bf16": True, "epsilon_high": 0.2, "learning_rate": 1e-6})
    copied = str(tmp_path / "copied")
    assert (
        refused(
            before,
            {**now, "model_name_or_path": copied, "dataset": {"path": f"{copied}/deep/rows.jsonl"}},
            str(tmp_path),
        )
        == []
    )
    other = str(tmp_path / "other")
    said = refused(
        before, {**now, "model_name_or_path": copied, "dataset": {"path": f"{other}/deep/rows.jsonl"}}, str(tmp_path)
    )
    assert said == [f"`dataset.path` was there/deep/rows.jsonl and is {other}/deep/rows.jsonl"]
    # The name of a model on the hub is no path, and a folder is no file.
    for was, now_is in (("there", "a/model"), ("a/model", copied), ("there/deep/rows.jsonl", copied)):
        said = refused({"model_name_or_path": was}, {"model_name_or_path": now_is}, str(tmp_path))
        assert said == [f"`model_name_or_path` was {was} and is {now_is}"]


def test_what_is_wrong_with_a_checkpoint(tmp_path: Path, tiny_model: Path) -> None:
    """A checkpoint as transformers writes it, each of its files cut off, emptied or removed in turn."""
    folder = checkpoint(tmp_path, 4, 1)
    (folder / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes())
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({"state": torch.zeros(9)}, folder / name)
    assert checkpoint_damage(folder) is None
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt"):
        whole = (folder / name).read_bytes()
        for kept in (0, 5, len(whole) // 2, len(whole) - 1):
            (folder / name).write_bytes(whole[:kept])
            assert str(folder / name) in str(checkpoint_damage(folder)), (name, kept)
        (folder / name).unlink()
        assert f"{name} " in str(checkpoint_damage(folder))
        assert "missing" in str(checkpoint_damage(folder))
        (folder / name).write_bytes(whole)
    (folder / "scheduler.pt").unlink()
    (folder / "global_step4").mkdir()  # DeepSpeed's own
    assert checkpoint_damage(folder) is None


def test_a_second_ctrl_c_stops_at_once_and_the_launchers_echo_does_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted_twice() -> StopOnSignal:
        callback = StopOnSignal(lambda step: True)
        args, state = SimpleNamespace(device=torch.device("cpu")), TrainerState(max_steps=9, global_step=1)
        previous = signal.getsignal(signal.SIGINT)
        callback.on_train_begin(args, state, TrainerControl())
        try:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            callback.on_step_end(args, state, TrainerControl())
        finally:
            callback.restore_handlers()
        assert signal.getsignal(signal.SIGINT) == previous
        return callback

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    stopped = interrupted_twice()
    assert (stopped.stopped, stopped.name) == (True, "Ctrl-C")
    assert capfd.readouterr().err.count("a second Ctrl-C stops it at once") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_stops_where_no_generation_is_under_way(number: signal.Signals) -> None:
    callback = StopOnSignal(lambda step: step % 3 == 0)
    args, state = SimpleNamespace(device=torch.device("cpu")), TrainerState(max_steps=100)
    previous = signal.signal(number, signal.SIG_DFL)
    callback.on_train_begin(args, state, TrainerControl())
    try:
        stopped = []
        for state.global_step in range(1, 7):
            control = TrainerControl()
            if state.global_step == 4:
                os.kill(os.getpid(), number)
            callback.on_step_end(args, state, control)
            stopped.append((control.should_save, control.should_training_stop))
    finally:
        callback.on_train_end(args, state, TrainerControl())
    assert stopped == [(False, False)] * 5 + [(True, True)]
    assert callback.stopped
    assert callback.name == number.name
    assert signal.signal(number, previous) == signal.SIG_DFL


ON_TWO_RANKS = [((0, 0), None), ((0, signal.SIGTERM), "SIGTERM"), ((signal.SIGINT, signal.SIGINT), "Ctrl-C")]


def stops_of_rank(rank: int, store: Path) -> list[str | None]:
    """What one of two ranks stops for at the end of a step, for each of `ON_TWO_RANKS`."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        stops = []
        for signals, _ in ON_TWO_RANKS:
            callback, control = StopOnSignal(lambda step: True), TrainerControl()
            callback.requested = signals[rank]
            callback.on_step_end(SimpleNamespace(device=torch.device("cpu")), TrainerState(max_steps=9), control)
            stops.append(callback.name if control.should_training_stop else None)
        assert on_any_rank(rank == 1, torch.device("cpu")) is True
        assert on_any_rank(False, torch.device("cpu")) is False
        return stops
    finally:
        torch.distributed.destroy_process_group()


def test_a_signal_to_one_rank_stops_both(tmp_path: Path) -> None:
    other = os.fork()
    if other == 0:
        code = 1
        try:
            code = int(stops_of_rank(1, tmp_path / "store") != [name for _, name in ON_TWO_RANKS])
        finally:
            os._exit(code)
    assert stops_of_rank(0, tmp_path / "store") == [name for _, name in ON_TWO_RANKS]
    assert os.waitpid(other, 0)[1] == 0


def test_the_best_of_each_epoch_may_be_saved(tmp_path: Path) -> None:
    """`eval_steps` means nothing there, and an epoch ends with a generation."""
    rows = launching.write_rows(tmp_path / "rows.jsonl", 9)
    changes = {"per_device_train_batch_size": 4, "max_steps": 12, "num_iterations": 3, "save_steps": None}
    changes |= {"save_strategy": "best", "eval_strategy": "epoch", "metric_for_best_model": "eval_reward"}
    changes |= {"dataset": {"name": "gsm8k", "path": str(rows), "prompt_format": "text", "eval_split": "train[:4]"}}
    recipe_file = launching.write_recipe(tmp_path / "mine.yaml", tmp_path, rows, tmp_path / "run", **changes)
    recipe = parse_recipe(["--config", str(recipe_file)])
    geometry_of(recipe, 1).check_saves(recipe.config, 9)  # raises nothing


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2, "save_steps": 5}, "set `save_steps` to 6"),
        ({"num_iterations": 2, "save_steps": 3}, "set `save_steps` to 4"),
        ({"num_iterations": 3, "save_steps": 0.3}, "set `save_steps` to 6"),
        # 3 generations of 3 micro-batches in steps of 2: the epoch's fifth step is a short one.
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2, "save_steps": 3}, "set `save_steps` to 5"),
    ],
)
def test_a_save_inside_a_generation_is_refused_with_one_that_is_not(tmp_path: Path, changes: dict, says: str) -> None:
    path = tmp_path / "mine.yaml"
    rows = launching.write_rows(tmp_path / "rows.jsonl", 9)
    values = {"per_device_train_batch_size": 4, "max_steps": 12, **changes}
    if changes.get("steps_per_generation") == 3:
        values["num_generations"] = 4
    recipe = parse_recipe(["--config", str(launching.write_recipe(path, tmp_path, rows, tmp_path / "run", **values))])
    with pytest.raises(RecipeError, match=says) as error:
        check(recipe, Machine(1, bf16=False))
    assert "mine.yaml: `save_steps`" in str(error.value)
    key, _, fixed = str(error.value).rsplit("set ", 1)[1].partition(" to ")
    values[key.strip("`")] = int(fixed)
    recipe = parse_recipe(["--config", str(launching.write_recipe(path, tmp_path, rows, tmp_path / "run", **values))])
    check(recipe, Machine(1, bf16=False))


@settings(deadline=None, max_examples=100)
@given(
    accumulation=st.integers(1, 5), steps=st.integers(1, 5), iterations=st.integers(1, 3), generations=st.integers(1, 5)
)
def test_generation_boundaries_by_counting(accumulation: int, steps: int, iterations: int, generations: int) -> None:
    from grpo_recipes.checks.geometry import Geometry

    layout = Geometry(1, 4, accumulation, steps, 4, iterations)
    prompts = generations * layout.prompts_per_generation
    trained = 0
    for step in range(1, 3 * layout.optimizer_steps_per_epoch(prompts) + 1):
        in_epoch = trained % (generations * steps * iterations)
        trained += min(accumulation, generations * steps * iterations - in_epoch)
        assert layout.ends_generation(step, prompts) == (trained % (steps * iterations) == 0)


@pytest.mark.parametrize("steps", [[4], pytest.param([1, 2, 3, 5, 6, 7], marks=pytest.mark.slow)])
def test_a_resumed_run_logs_what_one_left_alone_does(tmp_path: Path, steps: list[int]) -> None:
    """Resumed after each step: between two log entries, at one, in another epoch, and at the end. Rates are of the launch."""
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 6)
    changes = {"per_device_train_batch_size": 8, "max_steps": 7, "logging_steps": 3, "beta": 0.04}
    recipe = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, tmp_path / "alone", **changes)
    assert train.main(["--config", str(recipe)]) == 0
    expected = launching.log_history(tmp_path / "alone")
    assert [entry["step"] for entry in expected] == [3, 6, 7]
    for step in steps:
        killed = tmp_path / f"killed-{step}"
        shutil.copytree(tmp_path / "alone", killed)
        for late in range(step + 1, 8):
            shutil.rmtree(killed / f"checkpoint-{late}")
        resume = ["--config", str(recipe), "--output_dir", str(killed), "--resume_from_checkpoint", "true"]
        assert train.main(resume) == 0
        launching.assert_same_run(tmp_path / "alone", killed)
        last = json.loads((killed / "trainer_state.json").read_text())["log_history"][-1]
        taken = last["train_steps_per_second"] * last["train_runtime"]
        assert taken == pytest.approx(7 - step, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kills"), [("cpu", 2), ("ddp_cpu", 1)])
def test_a_killed_run_ends_like_one_left_alone(tmp_path: Path, layout: str, kills: int) -> None:
    rows = launching.write_rows(tmp_path / "rows.jsonl", 8)
    assert len(torture.torture(layout, kills, random.Random(kills), rows, tmp_path)) == kills


@pytest.mark.slow
def test_a_run_killed_at_files_of_a_save_ends_like_one_left_alone(tmp_path: Path) -> None:
    """A sample of `make torture`: full fine-tuning and LoRA, the reference refreshed, one checkpoint kept."""
    if reason := boundaries.why_not():
        pytest.skip(reason)
    kills, counts = boundaries.kill_everywhere("cpu", 6, random.Random(3), tmp_path / "torture")
    assert len(kills) == 6
    assert len({kill.boundary.kind for kill in kills}) == 6
    assert min(counts.values()) > 30


@pytest.mark.slow
def test_sigterm_then_resume_ends_like_a_run_left_alone(tmp_path: Path) -> None:
    """On two processes, past epoch 2, in the middle of a generation, with saves set far apart."""
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    changes = {"num_iterations": 2, "max_steps": 16, "save_steps": 1000}
    alone = launching.write_recipe(tmp_path / "alone.yaml", policy, rows, tmp_path / "alone", **changes)
    launching.launch("ddp_cpu", alone)
    output = tmp_path / "stopped"
    recipe = launching.write_recipe(tmp_path / "stopped.yaml", policy, rows, output, **changes)
    process = launching.start("ddp_cpu", recipe)
    assert launching.wait_for((output / "completions" / "completions_00009.parquet").exists, process)
    process.send_signal(signal.SIGTERM)
    said = launching.finish(process)
    assert "which is saved: `--resume_from_checkpoint true` goes on from there" in said
    (saved,) = output.glob("checkpoint-*")
    assert int(saved.name.partition("-")[2]) % 2 == 0
    assert "Traceback" not in said.split("stopped by SIGTERM")[0]
    assert not (output / "model.safetensors").exists()
    launching.launch("ddp_cpu", recipe, "--resume_from_checkpoint", "true")
    launching.assert_same_run(tmp_path / "alone", output)
