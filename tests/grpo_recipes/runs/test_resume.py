"""Decision from which checkpoint a run resumes: abandoned checkpoints, and the comparison of recipes."""

import fnmatch
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainerCallback

from grpo_recipes import GRPOTrainer, train
from grpo_recipes.recipe.recipe import resolved
from grpo_recipes.recipe.trl_keys import RESUME_MAY_CHANGE
from grpo_recipes.reports.run import Run
from grpo_recipes.runs import resume
from grpo_recipes.runs.checkpoints import Manifest, Rejected, write_manifest
from grpo_recipes.runs.files import LIVE, RunError
from grpo_recipes.runs.resume import (
    IN_GEOMETRY,
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
)
from tests.support import launching, short_runs
from tests.support.errors import refused


class StopAfter(TrainerCallback):
    """Ends a training after an optimizer step, as SIGTERM does, with or without a save."""

    def __init__(self, step: int, *, saves: bool) -> None:
        self.step = step
        self.saves = saves

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True
            control.should_save = self.saves


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    return launching.build_policy(tmp_path_factory.mktemp("policy") / "policy").as_posix()


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory, policy: str) -> Path:
    """Train six steps with checkpoints 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    script(policy, folder).train()
    return folder


@pytest.fixture
def run(six_steps: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(six_steps, tmp_path / "run"))


def script(policy: str, folder: Path, *stops: StopAfter, **changes: Any) -> GRPOTrainer:
    """Return the trainer that a script without a recipe builds."""
    args = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "beta": 0.0, **changes}
    trainer = short_runs.trainer(GRPOTrainer, policy, short_runs.arguments(folder, **args))
    for stop in stops:
        trainer.add_callback(stop)
    return trainer


def steps_saved(folder: Path, suffix: str = "") -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in folder.glob(f"checkpoint-*[0-9]{suffix}"))


def steps_abandoned(folder: Path) -> list[int]:
    return steps_saved(folder, "-abandoned")


def damage(checkpoint: Path, name: str = "model.safetensors") -> None:
    """Change the contents of a file and not its size."""
    file = checkpoint / name
    file.write_bytes(file.read_bytes()[:-1] + b"?")


def write_log(run: Path, most: int, reward: float, *steps: int) -> None:
    """Write the log of a launch of a recipe that has not ended."""
    lines = [{"step": 0, "max_steps": most}, *({"step": step, "reward": reward} for step in steps)]
    (run / LIVE).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_branch_that_saved_nothing_resumes_at_its_branch_point(run: Path, policy: str) -> None:
    write_log(run, 6, -9.0, *range(1, 7))
    shutil.copy(run / "checkpoint-6" / "trainer_state.json", run)  # as a finished run leaves it
    script(policy, run, StopAfter(3, saves=False), max_steps=8).train(str(run / "checkpoint-2"))
    assert (steps_saved(run), steps_abandoned(run)) == ([2], [4, 6])
    assert not (run / LIVE).exists(), "a script writes no log, and the old one holds the abandoned steps"
    write_log(run, 8, 0.5, 1, 2, 3)
    found = Run.read(run)
    assert (list(found.series("reward").values), found.log.max_steps) == ([0.5] * 3, 8)
    (run / "checkpoint-3").mkdir()  # killed in its first save
    point = decide(run, True, 1)
    assert [one.path.name for one in point.rejected] == ["checkpoint-3"]
    assert confirmed(point, each_node=False).newest == run / "checkpoint-2"
    with refused(run / "checkpoint-3", by=RunError):
        script(policy, run).train(resume_from_checkpoint=str(run / "checkpoint-3"))
    shutil.rmtree(run / "checkpoint-2")
    with refused(run, run / "checkpoint-2", "checkpoint-4-abandoned", "checkpoint-6-abandoned", by=RunError):
        script(policy, run, max_steps=8).train(resume_from_checkpoint=True)
    for content in ("{", '{"resumed_from": 1}', "[]"):
        (run / LAUNCH).write_text(content)
        with refused(run / LAUNCH, by=RunError):
            decide(run, True, 1)


def test_true_follows_the_last_launch_and_not_the_highest_step(run: Path, policy: str) -> None:
    branch = script(policy, run, StopAfter(3, saves=True), max_steps=8, save_total_limit=3)
    branch.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert (steps_saved(run), steps_abandoned(run)) == ([2, 3], [6]), "rotation removes abandoned ones first"
    again = script(policy, run, StopAfter(4, saves=False), max_steps=8)
    again.train(resume_from_checkpoint=True)
    assert again.checkpoints.resumed_from == run / "checkpoint-3"
    damage(run / "checkpoint-3", "optimizer.pt")
    again = script(policy, run, StopAfter(3, saves=False), max_steps=8)
    again.train(resume_from_checkpoint=True)
    assert again.checkpoints.resumed_from == run / "checkpoint-2"
    script(policy, run, StopAfter(1, saves=False)).train()
    assert (steps_saved(run), steps_abandoned(run)) == ([], [2, 3, 6]), "it began anew"
    with refused(run, "checkpoint-2-abandoned", by=RunError):
        script(policy, run).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_true_follows_the_last_launch_of_a_recipe_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 16)
    recipe = launching.write_recipe(
        tmp_path / "mine.yaml", policy, rows, tmp_path / "run", save_steps=2, max_completion_length=4, report_to="none"
    )
    command = ["--config", str(recipe)]
    assert train.main(command) == 0
    output = tmp_path / "run"
    # A run of three steps in all ends the branch after step 3, which is saved.
    branch = ["--resume_from_checkpoint", str(output / "checkpoint-2")]
    assert train.main([*command, *branch, "--max_steps=3", "--save_steps=1"]) == 0
    assert list(Run.read(output).series("reward").steps) == [1, 2, 3]  # not the six of the launch before
    assert "checkpoint-4-abandoned" in caplog.text
    assert train.main([*command, "--resume_from_checkpoint=true", "--max_steps=4"]) == 0
    assert str(output / "checkpoint-3") in capsys.readouterr().out
    record = json.loads((output / "run.json").read_text())
    assert [Path(launch["resumed_from"] or "none").name for launch in record["launches"]] == [
        "none",
        "checkpoint-2",
        "checkpoint-3",
    ]


@pytest.mark.slow
def test_two_ranks_of_a_script_decide_alike(tmp_path: Path) -> None:
    launching.build_policy(tmp_path / "policy")
    run = tmp_path / "run"

    def said(*launches: str) -> str:
        return launching.launch_module("ddp_cpu", "tests.support.script_without_recipe", str(tmp_path), *launches)

    output = said("0 6 none", f"0 3 {run / 'checkpoint-2'}", "0 4 true", "1 8 true")
    assert output.count("checkpoint-4-abandoned") == 1
    assert (steps_saved(run), steps_abandoned(run)) == ([2, 3, 4], [4, 6])
    assert output.count(f"went on from {run / 'checkpoint-3'}") == 2
    assert output.count("`answer`") == 2, "other golds"
    (run / LAUNCH).write_text("{")
    output += said("0 8 true")
    for rank in range(2):
        assert f"rank {rank} refused: {run / 'checkpoint-4'}: " in output
        assert f"rank {rank} refused: {run / LAUNCH}: " in output


# Decisions on checkpoints that no training wrote


def of_another_trainer(folder: Path, step: int, suffix: str = "") -> Path:
    """Save the last file of a checkpoint, as a trainer does that writes no manifest."""
    checkpoint = folder / f"checkpoint-{step}{suffix}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return checkpoint


def saved(folder: Path, step: int, suffix: str = "", *, processes: int = 1, model_only: bool = False) -> Path:
    """Save a checkpoint of two files with a manifest."""
    checkpoint = of_another_trainer(folder, step, suffix)
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    write_manifest(checkpoint, Manifest(step, processes, model_only, {}), each_node=False, writes=True)
    return checkpoint


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def test_a_launch_leaves_nothing_in_a_new_folder_and_renames_what_it_abandons(empty: Path) -> None:
    assert begin_launch(empty, None) == []
    assert list(empty.iterdir()) == []
    for step in (2, 4, 10):
        saved(empty, step)
    earlier = saved(empty, 10, "-abandoned")
    (earlier / "old").touch()
    assert names(begin_launch(empty, empty / "checkpoint-2")) == ["checkpoint-4", "checkpoint-10"]
    kept = ["checkpoint-10-abandoned", "checkpoint-2", "checkpoint-4-abandoned"]
    assert sorted(names(empty.glob("checkpoint-*"))) == kept
    assert not (earlier / "old").exists(), "the later one of a step is kept"
    assert last_source(empty) == empty / "checkpoint-2"
    assert names(decide(empty, True, 1).checkpoints) == ["checkpoint-2"], "it is one of the folder, listed once"
    moved = empty.rename(empty.with_name("moved"))
    assert last_source(moved) == moved / "checkpoint-2"
    (moved / "checkpoint-2").rename(moved / "gone")
    assert begin_launch(moved, None) == []
    assert last_source(moved) is None
    saved(moved, 3)
    assert names(begin_launch(moved, None)) == ["checkpoint-3"]


def test_an_abandoned_checkpoint_can_be_named(empty: Path) -> None:
    for step in (2, 4, 6):
        saved(empty, step)
    for source in ("checkpoint-2", "checkpoint-4-abandoned"):
        begin_launch(empty, empty / source)
        assert decide(empty, True, 1).newest == empty / source
    saved(empty, 5)
    assert decide(empty, True, 1).newest == empty / "checkpoint-5"


def test_the_checkpoint_of_another_folder_is_recorded_by_its_path(empty: Path, tmp_path: Path) -> None:
    other = saved(tmp_path / "other", 5)
    for step in (4, 6):
        saved(empty, step)
    assert names(begin_launch(empty, other)) == ["checkpoint-6"], "step 5 of the other run comes before it"
    moved = empty.rename(tmp_path / "moved")
    assert last_source(moved) == other
    assert names(decide(moved, True, 1).checkpoints) == ["checkpoint-5", "checkpoint-4"]
    damage(saved(moved, 7))
    point = confirmed(decide(moved, True, 1), each_node=False)
    assert (point.newest, [one.path.name for one in point.passed_over]) == (other, ["checkpoint-7"])
    (other / "trainer_state.json").unlink()
    point = decide(moved, True, 1)
    assert (names(point.checkpoints), point.rejected) == (["checkpoint-7", "checkpoint-4"], []), "nothing is left of it"


def test_the_step_of_a_checkpoint_under_another_name_is_that_of_its_state(empty: Path, tmp_path: Path) -> None:
    source = saved(empty, 3).rename(empty / "checkpoint-3.best")
    for step in (2, 4):
        saved(empty, step)
    assert names(begin_launch(empty, source)) == ["checkpoint-4"]
    theirs = of_another_trainer(tmp_path / "theirs", 5).rename(tmp_path / "theirs" / "checkpoint-9-abandoned")
    for step in (5, 6):
        saved(empty, step)
    assert names(begin_launch(empty, theirs)) == ["checkpoint-6"]


def test_rotation_removes_abandoned_checkpoints_and_then_low_steps(empty: Path) -> None:
    for step, suffix in ((2, ""), (9, ""), (10, ""), (4, "-abandoned"), (30, "-abandoned"), (1, "-damaged")):
        saved(empty, step, suffix)
    order = ["checkpoint-4-abandoned", "checkpoint-30-abandoned", "checkpoint-2", "checkpoint-9", "checkpoint-10"]
    assert names(oldest_first(empty)) == order


def test_the_highest_step_is_the_newest_and_a_step_is_a_number(empty: Path) -> None:
    for step in (9, 10, 2):
        saved(empty, step)
    saved(empty, 11, processes=4)
    (empty / "checkpoint-12").mkdir()
    saved(empty, 99, "-abandoned")
    point = decide(empty, True, 1)
    assert names(point.checkpoints) == ["checkpoint-11", "checkpoint-10", "checkpoint-9", "checkpoint-2"]
    assert point.newest == newest_checkpoint(empty, 1) == empty / "checkpoint-11"
    assert (
        [one.path.name for one in point.rejected] == [one.path.name for one in point.passed_over] == ["checkpoint-12"]
    )
    assert is_about(point.obstacle(), empty / "checkpoint-11", "4 process", "has 1")
    assert decide(empty, True, 4).obstacle() is None
    assert decide(empty, str(empty / "checkpoint-9"), 1).obstacle() is None
    saved(empty, 20, model_only=True)
    for requested in (True, str(empty / "checkpoint-20")):
        assert is_about(decide(empty, requested, 1).obstacle(), empty / "checkpoint-20", "`save_only_model`")


def test_only_newer_checkpoints_of_this_folder_are_passed_over(empty: Path, tmp_path: Path) -> None:
    places = (empty / "checkpoint-12", empty / "checkpoint-11", empty / "checkpoint-3", tmp_path / "checkpoint-20")
    found = [Rejected(place, RunError(place, "cut off", "name another"), cut_off=True) for place in places]
    newer = [one.path.name for one in Resume(empty, 1, None, [saved(empty, 5)], found).passed_over]
    assert newer == ["checkpoint-11", "checkpoint-12"]
    every = [one.path.name for one in Resume(empty, 1, None, [], found).passed_over]
    assert every == ["checkpoint-3", "checkpoint-11", "checkpoint-12"]


def test_a_run_is_not_begun_anew_if_that_loses_complete_checkpoints(empty: Path) -> None:
    assert decide(empty, True, 1).obstacle() is None, "an empty folder begins"
    (empty / "run.json").write_text("{}")
    of_another_trainer(empty, 1)
    point = decide(empty, True, 1)
    assert (point.newest, point.obstacle()) == (None, None), "cut off before it was complete"
    (saved(empty, 2) / "model.safetensors").unlink()
    obstacle = decide(empty, True, 1).obstacle()
    assert is_about(obstacle, empty / "checkpoint-2" / "model.safetensors", str(empty / "checkpoint-2"))
    assert "checkpoint-1" not in str(obstacle), "nothing is lost with it"


def test_the_folder_of_another_trainer_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "begun" / "checkpoint-3").mkdir(parents=True)
    assert decide(tmp_path / "begun", True, 2).obstacle() is None, "killed in its first save"
    theirs = tmp_path / "theirs"
    finished = of_another_trainer(theirs, 3)  # by another number of processes
    assert is_about(decide(theirs, True, 2).obstacle(), theirs, "2 process")
    assert is_about(decide(tmp_path, str(finished), 2).obstacle(), finished, "2 process")
    trusted = decide(tmp_path, str(finished), 2, trusts_others=True)
    assert (trusted.newest, trusted.obstacle()) == (finished, None)
    (theirs / "checkpoint-4").mkdir()
    assert is_about(decide(theirs, True, 2).obstacle(), theirs, "2 process"), "one of the two was complete"
    (theirs / "checkpoint-4").rmdir()
    saved(theirs, 4)  # this folder has manifests: a checkpoint without one was cut off
    assert decide(tmp_path, str(finished), 2, trusts_others=True).newest is None
    ours = saved(tmp_path / "elsewhere", 1).rename(tmp_path / "elsewhere" / "best")
    assert decide(tmp_path, str(ours), 1, trusts_others=True).newest == ours
    (ours / "model.safetensors").unlink()
    assert decide(tmp_path, str(ours), 1, trusts_others=True).newest is None, "its manifest says what is missing"


def test_a_launch_that_saved_nothing_is_not_replaced_by_an_earlier_one(tmp_path: Path) -> None:
    for folder, is_gone in ((tmp_path / "gone", True), (tmp_path / "anew", False)):
        source = saved(folder, 2)
        saved(folder, 4)
        begin_launch(folder, source if is_gone else None)
        if is_gone:
            source.rename(folder / "elsewhere")
        (folder / "checkpoint-3").mkdir()  # cut off
        before = "checkpoint-2" if is_gone else "checkpoint-2-abandoned"
        with refused(folder, before, "checkpoint-4-abandoned", by=RunError):
            decide(folder, True, 1)
        damaged = saved(folder, 5)
        assert decide(folder, True, 1).newest == damaged
        (damaged / "model.safetensors").unlink()
        assert is_about(decide(folder, True, 1).obstacle(), damaged / "model.safetensors")


def test_the_newest_checkpoint_whose_contents_are_intact_on_every_machine_is_confirmed(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3, 4):
        saved(empty, step)
    (empty / "checkpoint-5").mkdir()
    damage(empty / "checkpoint-4")
    point = decide(empty, True, 1)
    found = confirmed(point, each_node=False)
    rejected = [(one.path.name, one.cut_off) for one in found.rejected]
    assert (names(found.checkpoints), rejected) == (["checkpoint-3"], [("checkpoint-5", True), ("checkpoint-4", False)])
    # Another rank does not see step 3.
    monkeypatch.setattr(resume, "gather", lambda mine: [mine, [name for name in mine if name != "checkpoint-3"]])
    found = confirmed(point, each_node=False)
    assert (names(found.checkpoints), found.rejected[-1].path) == (["checkpoint-2"], empty / "checkpoint-3")
    for step in (1, 2):
        damage(empty / f"checkpoint-{step}")
    found = confirmed(point, each_node=False)
    assert found.newest is None
    assert is_about(found.obstacle(), "checkpoint-4")


def test_the_launch_before_is_recorded_beside_its_checkpoint(empty: Path, tmp_path: Path) -> None:
    other = saved(tmp_path / "other", 1)
    for folder, seed in ((other.parent, 1), (empty, 2)):
        (folder / "run.json").write_text(json.dumps({"recipe": {"seed": seed}}))
    assert earlier_launch(empty, other)["recipe"] == {"seed": 1}
    assert earlier_launch(empty, None)["recipe"] == {"seed": 2}
    (other.parent / "run.json").unlink()
    with refused(other.parent / "run.json", other, by=RunError):
        earlier_launch(empty, other)
    assert earlier_launch(empty, of_another_trainer(tmp_path / "theirs", 1)) == {}
    assert earlier_launch(tmp_path / "new", None) == {}
    assert earlier_launch(other.parent, None) == {}, "a new run needs no record of an earlier one"


def names(paths: Iterable[Path]) -> list[str]:
    return [path.name for path in paths]


def is_about(error: RunError | None, place: object, *figures: str) -> bool:
    """Return True if an error has a fix, is about a place, and shows some figures."""
    assert error is not None
    return str(place) in error.place and bool(error.fix) and all(figure in str(error) for figure in figures)


# Comparison of recipes


def changed(before: Mapping[str, Any], now: Mapping[str, Any], directory: str = ".") -> list[list[str]]:
    """Return the refused changes, each as the key, the value before and the value now."""
    clauses, _ = recipe_changes(before, now, directory, RESUME_MAY_CHANGE)
    return [re.split("` was | and is ", clause.removeprefix("`")) for clause in clauses]


def test_a_changed_data_order_is_named() -> None:
    order = {"geometry": {"num_processes": 2, "num_generations": 8}, "train_prompts": 100, "seed": 0}
    order["shuffle_dataset"] = True
    changes = {"seed": 1, "train_prompts": 99, "shuffle_dataset": False}
    for key, value in changes.items():
        words = str(layout_change(order, {**order, key: value})).split()
        assert (words[0], words[2], words[-1]) == (key, str(order[key]), str(value))
    other = {**order, "geometry": {"num_processes": 4, "num_generations": 8}}
    assert str(layout_change(order, other)).split()[0] == "num_processes"
    for same in (order, {**order, "world": 3}, {**order, "geometry": {"num_processes": 2, "later": 1}}):
        assert layout_change(order, same) is None
    assert layout_change({}, order) is None  # a run that recorded nothing


def named(*rewards: Any) -> dict[str, Any]:
    return {"rewards": list(rewards)}


def summed(*rewards: Any) -> dict[str, Any]:
    return {"name": "sum", **named(*rewards)}


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ({}, {"beta": 0.2}, [["beta", "not set", "0.2"]]),
        ({"beta": 0.1}, {}, [["beta", "0.1", "not set"]]),
        ({"beta": None}, {}, []),
        ({"fp16": True}, {"bf16": True, "fp16": True}, [["bf16", "false", "true"]]),
        ({"fp16": False}, {"bf16": True, "fp16": False}, []),
        ({"epsilon": 0.3, "epsilon_high": 0.0}, {"epsilon": 0.3}, [["epsilon_high", "0.0", "0.3"]]),
        ({"epsilon": 0.3}, {"epsilon": 0.3, "epsilon_high": 0.3}, []),
        ({"parts": ["b", {"a": 1}]}, {"parts": ["b", {"a": 2}]}, [["parts.1.a", "1", "2"]]),
        ({"betas": [1, 2]}, {"betas": [2, 1]}, [["betas", "[1, 2]", "[2, 1]"]]),
        ({"betas": (1, Path("a"))}, {"betas": [1, "a"]}, []),
        (named("a"), named({"name": "a", "weight": 1}), []),
        (named({"name": "a"}), named({"name": "a", "weight": 0}), [["rewards.0.weight", "1.0", "0"]]),
        (named("a", "b"), named("b", "a"), [["rewards.0.name", "a", "b"], ["rewards.1.name", "b", "a"]]),
        (named(summed("a")), named(summed({"name": "a", "weight": 1.0})), []),
        (named(summed("a")), named(summed({"name": "a", "weight": 3})), [["rewards.0.rewards.0.weight", "1.0", "3"]]),
        ({"generation_batch_size": 8}, {"steps_per_generation": 2}, []),  # compared as the geometry
        ({"disable_dropout": True}, {"disable_dropout": False}, [["disable_dropout", "true", "false"]]),
    ],
)
def test_a_changed_value_is_refused_and_another_spelling_is_not(
    before: dict[str, Any], now: dict[str, Any], expected: list[list[str]]
) -> None:
    assert changed(before, now) == expected


def test_a_change_that_is_made_is_logged_unless_it_names_the_resume() -> None:
    before = {"logging_steps": 1, "output_dir": "a", "resume_from_checkpoint": None, "hub_token": "x"}
    now = {"logging_steps": 5, "output_dir": "b", "resume_from_checkpoint": "true", "hub_token": "y"}
    more = ({"micro_batching": {"layout": layout}} for layout in ("packed", "padded"))
    refusals, applied = recipe_changes({**before, **next(more)}, {**now, **next(more)}, ".", RESUME_MAY_CHANGE)
    assert (refusals, [clause.split("`")[1] for clause in applied]) == ([], ["logging_steps", "micro_batching.layout"])


def test_a_path_may_change_if_every_file_behind_it_is_equal(tmp_path: Path) -> None:
    """Relative paths of the launch before begin in its directory, and those of this launch in its own."""
    changes: dict[str, tuple[Callable[[Path], object], bool]] = {
        "copy": (lambda folder: None, True),
        "contents": (lambda folder: (folder / "deep" / "b").write_text("3"), False),
        "further file": (lambda folder: (folder / "deep" / "c").write_text("1"), False),
        "missing file": (lambda folder: (folder / "deep" / "b").unlink(), False),
        "empty folder": (lambda folder: (folder / "empty").mkdir(), True),
        "moved file": (lambda folder: (folder / "deep" / "b").rename(folder / "b"), False),
    }
    for name, (change, is_equal) in changes.items():
        for folder in (tmp_path / name / "there" / "model", tmp_path / name / "here"):
            (folder / "deep").mkdir(parents=True)
            (folder / "a").write_text("1")
            (folder / "deep" / "b").write_text("2")
        change(tmp_path / name / "here")
        for path in tmp_path.rglob("*"):  # as a tool leaves them that copies times
            os.utime(path, (1e9, 1e9))
        now, directory = {"model_name_or_path": str(tmp_path / name / "here")}, str(tmp_path / name / "there")
        assert (changed({"model_name_or_path": "model"}, now, directory) == []) is is_equal, name
        assert changed({"model_name_or_path": "missing"}, now, directory)
        assert changed({"model_name_or_path": "model"}, {"model_name_or_path": "missing"}, directory)
    one, other = ({"model_name_or_path": str(tmp_path / "contents" / name)} for name in ("here/deep/b", "here/a"))
    assert changed(one, {"model_name_or_path": str(tmp_path / "copy" / "here" / "deep" / "b")})
    assert changed(other, {"model_name_or_path": str(tmp_path / "copy" / "here" / "a")}) == []


def test_the_page_lists_the_keys_that_may_change_on_resume() -> None:
    page = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()
    rows = page.partition("## Keys that a resumed run may change\n\nAs patterns.")[2].partition("\n\n")[2]
    patterns = re.findall(r"`([^`]+)`", rows)
    assert sorted(patterns) == sorted(RESUME_MAY_CHANGE)
    for pattern in patterns:
        outer, _, key = pattern.replace("*", "x").rpartition(".")
        before, now = ({outer: {key: value}} if outer else {key: value} for value in (5, 6))
        assert changed(before, now) == []


@settings(deadline=None, max_examples=40)
@given(key=st.sampled_from(sorted(resolved({}))), value=st.integers(7, 9))
def test_every_key_of_trl_is_refused_or_listed(key: str, value: int) -> None:
    before = resolved({"dataset": {"name": "gsm8k"}, "rewards": ["a"]})
    listed = any(fnmatch.fnmatch(key, pattern) for pattern in RESUME_MAY_CHANGE)
    follows = ["epsilon_high"] if key == "epsilon" else []  # unless it is set
    expected = [] if listed or key in IN_GEOMETRY else [key, *follows]
    changes = changed({**before, key: 5}, {**before, key: value})
    assert sorted(changes) == sorted([name, "5", str(value)] for name in expected)
