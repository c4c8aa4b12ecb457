"""Decisions of a resume on checkpoints that no training wrote: the newest one, obstacles, and what is renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.recipe.trl_keys import RESUME_MAY_CHANGE
from grpo_recipes.runs import resume
from grpo_recipes.runs.checkpoints import MANIFEST, Manifest, Rejected, write_manifest
from grpo_recipes.runs.files import RunError
from grpo_recipes.runs.resume import (
    LAUNCH,
    Resume,
    begin_launch,
    confirmed,
    decide,
    earlier_launch,
    last_source,
    layout_change,
    newest_checkpoint,
    oldest_first,
    recipe_changes,
    set_aside,
)


def saved(folder: Path, step: int, suffix: str = "", *, processes: int = 1, model_only: bool = False) -> Path:
    """Save a checkpoint of two files with a manifest."""
    checkpoint = folder / f"checkpoint-{step}{suffix}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    write_manifest(checkpoint, Manifest(step, processes, model_only, {}), each_node=False, writes=True)
    return checkpoint


def of_another_trainer(folder: Path, step: int) -> Path:
    """Save the last file of a checkpoint, as a trainer does that writes no manifest."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return checkpoint


def damage(checkpoint: Path) -> None:
    """Change the contents of a file and not its size."""
    (checkpoint / "model.safetensors").write_bytes(b"Weights")


def names(paths: Any) -> list[str]:
    return [path.name for path in paths]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


# Launches


def test_a_launch_leaves_nothing_in_a_new_folder_and_renames_what_it_abandons(run: Path) -> None:
    assert begin_launch(run, None) == []
    assert list(run.iterdir()) == []
    for step in (2, 4, 10):
        saved(run, step)
    earlier = saved(run, 10, "-abandoned")
    (earlier / "old").touch()
    assert names(begin_launch(run, run / "checkpoint-2")) == ["checkpoint-4", "checkpoint-10"]
    assert sorted(path.name for path in run.glob("checkpoint-*")) == [
        "checkpoint-10-abandoned", "checkpoint-2", "checkpoint-4-abandoned"
    ]  # fmt: skip
    assert not (earlier / "old").exists(), "the later one of a step is kept"
    assert last_source(run) == run / "checkpoint-2"
    assert names(decide(run, True, 1).checkpoints) == ["checkpoint-2"], "it is one of the folder, listed once"
    assert last_source(run.rename(run.with_name("moved"))) == run.with_name("moved") / "checkpoint-2"


def test_a_launch_that_begins_anew_is_recorded_where_there_was_another(run: Path) -> None:
    begin_launch(run, saved(run, 2))
    (run / "checkpoint-2").rename(run / "gone")
    assert begin_launch(run, None) == []
    assert last_source(run) is None
    saved(run, 3)
    assert names(begin_launch(run, None)) == ["checkpoint-3"]


def test_the_checkpoint_of_another_folder_is_recorded_by_its_path(run: Path, tmp_path: Path) -> None:
    other = saved(tmp_path / "other", 5)
    for step in (4, 6):
        saved(run, step)
    assert names(begin_launch(run, other)) == ["checkpoint-6"], "step 5 of the other run comes before it"
    moved = run.rename(tmp_path / "moved")
    assert last_source(moved) == other
    assert names(decide(moved, True, 1).checkpoints) == ["checkpoint-5", "checkpoint-4"]
    (other / "trainer_state.json").unlink()
    point = decide(moved, True, 1)
    assert (names(point.checkpoints), point.rejected) == (["checkpoint-4"], []), "nothing is left of it"


def test_the_step_of_a_checkpoint_under_another_name_is_that_of_its_state(run: Path) -> None:
    source = saved(run, 3).rename(run / "checkpoint-3.best")
    for step in (2, 4):
        saved(run, step)
    assert names(begin_launch(run, source)) == ["checkpoint-4"]
    theirs = of_another_trainer(run.with_name("theirs"), 5).rename(run.with_name("theirs") / "checkpoint-9-abandoned")
    for step in (5, 6):
        saved(run, step)
    assert names(begin_launch(run, theirs)) == ["checkpoint-6"]


def test_rotation_removes_abandoned_checkpoints_and_then_low_steps_first(run: Path) -> None:
    for step in (2, 9, 10):
        saved(run, step)
    for step in (4, 30, 100):
        saved(run, step, "-abandoned")
    saved(run, 1, "-damaged")
    assert [(path.name.split("-")[1], "abandoned" in path.name) for path in oldest_first(run)] == [
        ("4", True), ("30", True), ("100", True), ("2", False), ("9", False), ("10", False)
    ]  # fmt: skip


def test_a_renamed_checkpoint_replaces_an_earlier_one_of_its_step(run: Path) -> None:
    left = run / "checkpoint-3-incomplete"
    left.mkdir()
    (left / "old").touch()
    (run / "checkpoint-3").mkdir()
    set_aside([Rejected(run / "checkpoint-3", "cut off", cut_off=True)])
    assert [path.name for path in run.rglob("*")] == ["checkpoint-3-incomplete"]


# Decisions


def test_the_highest_step_is_the_newest_and_a_step_is_a_number(run: Path) -> None:
    for step in (9, 10, 2):
        saved(run, step)
    saved(run, 11, processes=4)
    (run / "checkpoint-12").mkdir()
    saved(run, 99, "-abandoned")
    point = decide(run, True, 1)
    assert names(point.checkpoints) == ["checkpoint-11", "checkpoint-10", "checkpoint-9", "checkpoint-2"]
    assert point.newest == newest_checkpoint(run, 1) == run / "checkpoint-11"
    assert (
        names(one.path for one in point.rejected) == names(one.path for one in point.passed_over) == ["checkpoint-12"]
    )
    assert str(point.obstacle()).startswith(f"{run / 'checkpoint-11'} is of 4 process(es), and this launch has 1")
    assert decide(run, True, 4).obstacle() is None
    assert decide(run, str(run / "checkpoint-9"), 1).obstacle() is None
    assert "without its optimizer" in str(Resume(run, 1, None, [saved(run, 20, model_only=True)]).obstacle())
    assert "without its optimizer" in str(decide(run, str(run / "checkpoint-20"), 1).obstacle())


def test_only_newer_checkpoints_of_this_folder_are_passed_over(run: Path, tmp_path: Path) -> None:
    def rejected(folder: Path, step: int) -> Rejected:
        return Rejected(folder / f"checkpoint-{step}", "cut off", cut_off=True)

    found = [rejected(run, 12), rejected(run, 11), rejected(run, 3), rejected(tmp_path / "other", 20)]
    complete = [saved(run, 5)]
    assert names(one.path for one in Resume(run, 1, None, complete, found).passed_over) == [
        "checkpoint-11",
        "checkpoint-12",
    ]
    assert names(one.path for one in Resume(run, 1, None, [], found).passed_over) == [
        "checkpoint-3", "checkpoint-11", "checkpoint-12"
    ]  # fmt: skip


def test_a_run_is_not_begun_anew_if_that_loses_complete_checkpoints(run: Path) -> None:
    assert decide(run, True, 1).obstacle() is None, "an empty folder begins"
    (run / "run.json").write_text("{}")
    of_another_trainer(run, 1)
    point = decide(run, True, 1)
    assert (point.newest, point.obstacle()) == (None, None), "cut off before it was complete"
    (saved(run, 2) / "model.safetensors").unlink()
    said = str(decide(run, True, 1).obstacle())
    assert f"{run / 'checkpoint-2' / 'model.safetensors'} is missing, and no other checkpoint is left" in said
    assert "checkpoint-1" not in said, "nothing is lost with it"


def test_the_folder_of_another_trainer_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "begun" / "checkpoint-3").mkdir(parents=True)
    assert decide(tmp_path / "begun", True, 2).obstacle() is None, "killed in its first save"
    finished = of_another_trainer(tmp_path / "theirs", 3)  # by another number of processes
    said = f"there is no complete checkpoint of 2 process(es) in {tmp_path / 'theirs'}"
    assert str(decide(tmp_path / "theirs", True, 2).obstacle()).startswith(said)
    assert "there is no complete checkpoint of 2 process(es)" in str(decide(tmp_path, str(finished), 2).obstacle())
    trusted = decide(tmp_path, str(finished), 2, trusts_others=True)
    assert (trusted.newest, trusted.obstacle()) == (finished, None)
    (tmp_path / "theirs" / "checkpoint-4").mkdir()
    assert str(decide(tmp_path / "theirs", True, 2).obstacle()).startswith(said), "one of the two was complete"
    (tmp_path / "theirs" / "checkpoint-4").rmdir()
    saved(tmp_path / "theirs", 4)  # this folder has manifests: a checkpoint without one was cut off
    assert decide(tmp_path, str(finished), 2, trusts_others=True).newest is None
    ours = saved(tmp_path / "elsewhere", 1).rename(tmp_path / "elsewhere" / "best")
    assert decide(tmp_path, str(ours), 1, trusts_others=True).newest == ours
    (ours / "model.safetensors").unlink()
    assert decide(tmp_path, str(ours), 1, trusts_others=True).newest is None, "its manifest says what is missing"


@pytest.mark.parametrize("left", ["source gone", "abandoned"])
def test_a_launch_that_saved_nothing_is_not_replaced_by_an_earlier_one(run: Path, left: str) -> None:
    source = saved(run, 2)
    saved(run, 4)
    begin_launch(run, source if left == "source gone" else None)
    if left == "source gone":
        source.rename(run / "elsewhere")
    (run / "checkpoint-3").mkdir()  # cut off
    begun = (
        "resumed from .*checkpoint-2 and saved nothing, and that checkpoint is gone; " if left == "source gone" else ""
    )
    saved_names = "checkpoint-4-abandoned" if begun else "checkpoint-2-abandoned and checkpoint-4-abandoned"
    with pytest.raises(RunError, match=f"{begun}an earlier launch saved {saved_names}: name the checkpoint"):
        decide(run, True, 1)
    damaged = saved(run, 5)
    assert decide(run, True, 1).newest == damaged
    (damaged / "model.safetensors").unlink()
    assert "checkpoint-5/model.safetensors is missing, and no other" in str(decide(run, True, 1).obstacle())


def test_the_newest_checkpoint_whose_contents_are_intact_on_every_machine_is_confirmed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3, 4):
        saved(run, step)
    (run / "checkpoint-5").mkdir()
    damage(run / "checkpoint-4")
    point = decide(run, True, 1)
    found = confirmed(point, each_node=False)
    assert (names(found.checkpoints), names(one.path for one in found.rejected)) == (
        ["checkpoint-3"], ["checkpoint-5", "checkpoint-4"]
    )  # fmt: skip
    assert [one.cut_off for one in found.rejected] == [True, False], "a damaged one had been complete"
    # Another rank does not see step 3.
    monkeypatch.setattr(resume, "gather", lambda mine: [mine, [name for name in mine if name != "checkpoint-3"]])
    found = confirmed(point, each_node=False)
    assert names(found.checkpoints) == ["checkpoint-2"]
    assert found.rejected[-1].reason == f"{run / 'checkpoint-3'} is not complete on every machine"
    for step in (1, 2):
        damage(run / f"checkpoint-{step}")
    found = confirmed(point, each_node=False)
    assert found.newest is None
    assert "and no other checkpoint is left to resume from" in str(found.obstacle())


def test_the_launch_before_is_recorded_beside_its_checkpoint(run: Path, tmp_path: Path) -> None:
    other = saved(tmp_path / "other", 1)
    launches = [{"seed": 1}, {"seed": 2}]
    record = {"recipe": {}, "launches": launches}
    (other.parent / "run.json").write_text(json.dumps(record))
    (run / "run.json").write_text(json.dumps({**record, "launches": [{"seed": 3}]}))
    (other / MANIFEST).write_text((other / MANIFEST).read_text())
    assert _seed(run, other) == _seed(other.parent, None)
    assert _seed(run, None) != _seed(run, other)
    (other.parent / "run.json").unlink()
    with pytest.raises(RunError, match="which says what that run trained, is missing"):
        earlier_launch(run, other)
    assert earlier_launch(run, of_another_trainer(tmp_path / "theirs", 1)) == {}
    assert earlier_launch(tmp_path / "new", None) == {}
    assert earlier_launch(other.parent, None) == {}, "a new run needs no record of an earlier one"


def _seed(folder: Path, checkpoint: Path | None) -> Any:
    return json.dumps(dict(earlier_launch(folder, checkpoint)), sort_keys=True, default=str)


# Comparison of recipes

ORDER = {
    "geometry": {"num_processes": 2, "num_generations": 8},
    "train_prompts": 100,
    "seed": 0,
    "shuffle_dataset": True,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"train_prompts": 99}, "train_prompts was 100 and is 99"),
        ({"shuffle_dataset": False}, "shuffle_dataset was True and is False"),
        ({"geometry": {"num_processes": 2, "num_generations": 4}}, "num_generations was 8 and is 4"),
        ({"geometry": {"num_processes": 2, "num_generations": 8, "later": 1}}, None),
        ({"world": 3}, None),
    ],
)
def test_each_entry_of_the_data_order_is_compared(changes: dict[str, Any], said: str | None) -> None:
    assert layout_change(ORDER, {**ORDER, **changes}) == said


def compared(before: dict[str, Any], now: dict[str, Any], directory: str = ".") -> tuple[list[str], list[str]]:
    return recipe_changes(before, now, directory, RESUME_MAY_CHANGE)


def named(*rewards: Any) -> dict[str, Any]:
    return {"rewards": list(rewards)}


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        ({"beta": 0.1}, {"beta": 0.2}, ["`beta` was 0.1 and is 0.2"]),
        ({}, {"beta": 0.2}, ["`beta` was not set and is 0.2"]),
        ({"beta": None}, {}, []),
        ({"fp16": True}, {"bf16": True, "fp16": True}, ["`bf16` was false and is true"]),
        ({"fp16": True}, {"bf16": False, "fp16": True}, []),
        ({"fp16": False}, {"bf16": True, "fp16": False}, []),
        ({"bf16": False}, {"bf16": True}, ["`bf16` was false and is true"]),
        ({"epsilon": 0.3, "epsilon_high": 0.0}, {"epsilon": 0.3}, ["`epsilon_high` was 0.0 and is 0.3"]),
        ({"parts": ["b", {"a": 1}]}, {"parts": ["b", {"a": 2}]}, ["`parts.1.a` was 1 and is 2"]),
        ({"epsilon": 0.3}, {"epsilon": 0.3, "epsilon_high": 0.3}, []),
        ({"epsilon": 0.3}, {"epsilon": 0.3, "epsilon_high": 0.2}, ["`epsilon_high` was 0.3 and is 0.2"]),
        ({"betas": [1, 2]}, {"betas": [1, 2]}, []),
        ({"betas": [1, 2]}, {"betas": [2, 1]}, ["`betas` was [1, 2] and is [2, 1]"]),
        ({"betas": (1, Path("a"))}, {"betas": [1, "a"]}, []),
        (named("a"), named({"name": "a", "weight": 1}), []),
        (named({"name": "a"}), named({"name": "a", "weight": 0}), ["`rewards.0.weight` was 1.0 and is 0"]),
        (named({"name": "a", "weight": 0}), named({"name": "a", "weight": 0.0}), []),
        (named("a", "b"), named("b", "a"), ["`rewards.0.name` was a and is b", "`rewards.1.name` was b and is a"]),
        (
            named("a"),
            named("a", "b"),
            ["`rewards.1.name` was not set and is b", "`rewards.1.weight` was not set and is 1.0"],
        ),
        (
            named({"name": "sum", "rewards": ["a", {"name": "b", "weight": 2}]}),
            named({"name": "sum", "rewards": [{"name": "a"}, {"name": "b", "weight": 2.0}]}),
            [],
        ),
        (
            named({"name": "sum", "rewards": ["a"]}),
            named({"name": "sum", "rewards": [{"name": "a", "weight": 3}]}),
            ["`rewards.0.rewards.0.weight` was 1.0 and is 3"],
        ),
        ({"generation_batch_size": 8}, {"steps_per_generation": 2}, []),  # compared as the geometry
        ({"disable_dropout": True}, {"disable_dropout": False}, ["`disable_dropout` was true and is false"]),
    ],
)
def test_a_change_of_meaning_is_refused_and_another_spelling_is_not(
    before: dict[str, Any], now: dict[str, Any], refused: list[str]
) -> None:
    assert compared(before, now) == (refused, [])


def test_a_change_that_is_made_is_logged_unless_it_names_the_resume() -> None:
    before = {
        "logging_steps": 1,
        "output_dir": "a",
        "resume_from_checkpoint": None,
        "micro_batching": {"layout": "packed"},
    }
    now = {
        "logging_steps": 5,
        "output_dir": "b",
        "resume_from_checkpoint": "true",
        "micro_batching": {"layout": "padded"},
    }
    logged = ["`logging_steps` was 1 and is 5", "`micro_batching.layout` was packed and is padded"]
    assert compared(before, now) == ([], logged)
    assert compared({**before, "hub_token": "x"}, {**now, "hub_token": "y"}) == ([], logged)


def nothing(folder: Path) -> None: ...


@pytest.mark.parametrize(
    ("change", "is_equal"),
    [
        (nothing, True),
        (lambda folder: (folder / "deep" / "b").write_text("3"), False),
        (lambda folder: (folder / "deep" / "c").write_text("1"), False),
        (lambda folder: (folder / "deep" / "b").unlink(), False),
        (lambda folder: (folder / "empty").mkdir(), True),
        (lambda folder: (folder / "deep" / "b").rename(folder / "b"), False),
    ],
    ids=["copy", "contents", "further file", "missing file", "empty folder", "moved file"],
)
def test_a_path_may_change_if_every_file_behind_it_is_equal(
    tmp_path: Path, change: Callable[[Path], object], is_equal: bool
) -> None:
    """Relative paths of the launch before begin in its directory, and those of this launch in its own."""
    for name in ("there/model", "here"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "a").write_text("1")
        (tmp_path / name / "deep" / "b").write_text("2")
    change(tmp_path / "here")
    for path in tmp_path.rglob("*"):  # as a tool leaves them that copies times
        os.utime(path, (1e9, 1e9))
    before, now = {"model_name_or_path": "model"}, {"model_name_or_path": str(tmp_path / "here")}
    refused, _ = compared(before, now, str(tmp_path / "there"))
    assert (refused == []) is is_equal
    assert compared(now, {"model_name_or_path": str(tmp_path / "there" / "model")}, "/")[0] == [] or not is_equal
    assert compared({"model_name_or_path": "missing"}, now, str(tmp_path / "there"))[0]
    assert compared(before, {"model_name_or_path": "missing"}, str(tmp_path / "there"))[0]
    one, other = ({"model_name_or_path": str(tmp_path / name / "deep" / "b")} for name in ("there/model", "here"))
    if (tmp_path / "here" / "deep" / "b").exists():
        same = (tmp_path / "here" / "deep" / "b").read_text() == "2"
        assert (compared(one, other)[0] == []) is same


def test_a_file_and_an_empty_folder_are_no_equal_paths(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for was, now_is in (("folder", "file"), ("file", "folder")):
        now = {"model_name_or_path": str(tmp_path / now_is)}
        assert compared({"model_name_or_path": was}, now, str(tmp_path))[0]


def test_a_damaged_record_of_a_launch_is_an_error_of_its_file(run: Path) -> None:
    (run / LAUNCH).write_text('{"resumed_from": 1}')
    with pytest.raises(RunError, match=LAUNCH):
        last_source(run)
