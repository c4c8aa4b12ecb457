"""Decision from which checkpoint a run resumes: abandoned checkpoints, and the comparison of recipes."""

import fnmatch
import json
import re
import shutil
from collections.abc import Mapping
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
from grpo_recipes.runs.files import LIVE, RunError
from grpo_recipes.runs.resume import IN_GEOMETRY, LAUNCH, confirmed, decide, layout_change, recipe_changes
from grpo_rewards.errors import UserError
from tests.support import launching, short_runs


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


@pytest.mark.slow
def test_true_follows_the_last_launch_and_not_the_highest_step(run: Path, policy: str) -> None:
    branch = script(policy, run, StopAfter(3, saves=True), max_steps=8)
    branch.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert (steps_saved(run), steps_abandoned(run)) == ([2, 3], [4, 6])
    again = script(policy, run, max_steps=8)
    again.train(resume_from_checkpoint=True)
    assert again.checkpoints.resumed_from == run / "checkpoint-3"
    last = script(policy, run, max_steps=10)
    last.train(resume_from_checkpoint=True)
    assert last.checkpoints.resumed_from == run / "checkpoint-8"


@pytest.mark.slow
def test_a_branch_that_saved_nothing_resumes_at_its_branch_point(run: Path, policy: str) -> None:
    script(policy, run, StopAfter(3, saves=False), max_steps=8).train(str(run / "checkpoint-2"))
    assert (steps_saved(run), steps_abandoned(run)) == ([2], [4, 6])
    again = script(policy, run, StopAfter(3, saves=False), max_steps=8)
    again.train(resume_from_checkpoint=True)
    assert again.checkpoints.resumed_from == run / "checkpoint-2"


@pytest.mark.slow
def test_an_abandoned_checkpoint_can_be_named(run: Path, policy: str) -> None:
    script(policy, run, StopAfter(3, saves=True), max_steps=8).train(str(run / "checkpoint-2"))
    script(policy, run, StopAfter(5, saves=False), max_steps=8).train(str(run / "checkpoint-4-abandoned"))
    assert (steps_saved(run), steps_abandoned(run)) == ([2, 3], [4, 6])
    again = script(policy, run, StopAfter(5, saves=True), max_steps=8)
    again.train(resume_from_checkpoint=True)
    assert again.checkpoints.resumed_from == run / "checkpoint-4-abandoned"
    assert decide(run, True, 1).newest == run / "checkpoint-5"


@pytest.mark.slow
def test_the_last_of_two_branches_is_followed_in_a_moved_folder_too(run: Path, policy: str, tmp_path: Path) -> None:
    for step in (5, 3):
        branch = script(policy, run, StopAfter(step, saves=True), max_steps=8, save_steps=100)
        branch.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert decide(run, True, 1).newest == run / "checkpoint-3"
    shutil.rmtree(run / "checkpoint-3")
    moved = run.rename(tmp_path / "moved")
    assert decide(moved, True, 1).newest == moved / "checkpoint-2"


def test_a_branch_whose_branch_point_is_gone_is_not_replaced_by_another(run: Path, policy: str) -> None:
    script(policy, run, StopAfter(3, saves=False), max_steps=8).train(str(run / "checkpoint-2"))
    shutil.rmtree(run / "checkpoint-2")
    with pytest.raises(
        RunError,
        match=r"checkpoint-2 and saved nothing.*saved checkpoint-4-abandoned and checkpoint-6-abandoned: name the",
    ):
        script(policy, run, max_steps=8).train(resume_from_checkpoint=True)


@pytest.mark.slow
def test_a_script_that_began_anew_does_not_resume_from_an_earlier_run(run: Path, policy: str) -> None:
    script(policy, run, StopAfter(1, saves=False)).train()
    assert (steps_saved(run), steps_abandoned(run)) == ([], [2, 4, 6])
    says = "began anew and saved nothing; an earlier launch saved checkpoint-2-abandoned and"
    with pytest.raises(RunError, match=says):
        script(policy, run).train(resume_from_checkpoint=True)
    script(policy, run, StopAfter(1, saves=True)).train()
    again = script(policy, run)
    again.train(resume_from_checkpoint=True)
    assert again.checkpoints.resumed_from == run / "checkpoint-1"


@pytest.mark.slow
def test_a_branch_in_another_folder_continues_there(run: Path, policy: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    script(policy, other, StopAfter(3, saves=False), max_steps=8).train(str(run / "checkpoint-2"))
    again = script(policy, other, StopAfter(3, saves=True), max_steps=8)
    again.train(resume_from_checkpoint=True)
    assert again.checkpoints.resumed_from == run / "checkpoint-2"
    assert steps_saved(other) == [3]
    # Nothing is renamed in the other folder if its checkpoint is the one that is damaged.
    weights = other / "checkpoint-3" / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    point = confirmed(decide(other, True, 1), each_node=False)
    assert (point.newest, [one.path for one in point.passed_over]) == (run / "checkpoint-2", [other / "checkpoint-3"])
    shutil.copytree(run / "checkpoint-2", tmp_path / "kept")
    (run / "checkpoint-2" / "optimizer.pt").unlink()
    reason = str(confirmed(decide(other, True, 1), each_node=False).obstacle())
    assert "optimizer.pt is missing, and no other checkpoint is left" in reason
    shutil.rmtree(run / "checkpoint-2")
    shutil.copytree(tmp_path / "kept", run / "checkpoint-2")
    shutil.rmtree(other / "checkpoint-3")
    script(policy, other, StopAfter(3, saves=True), max_steps=8).train(resume_from_checkpoint=True)
    # Once the branch has a checkpoint of its own, its folder may be moved away.
    moved = Path(shutil.copytree(other, tmp_path / "moved"))
    last = script(policy, moved, StopAfter(4, saves=False), max_steps=8)
    last.train(resume_from_checkpoint=True)
    assert last.checkpoints.resumed_from == moved / "checkpoint-3"
    left = script(policy, run, StopAfter(7, saves=False), max_steps=8)
    left.train(resume_from_checkpoint=True)
    assert left.checkpoints.resumed_from == run / "checkpoint-6"


@pytest.mark.parametrize(
    ("limit", "left"), [(1, ([3], [])), pytest.param(2, ([2, 3], []), marks=pytest.mark.slow), (3, ([2, 3], [6]))]
)
def test_rotation_removes_abandoned_checkpoints_first(
    run: Path, policy: str, limit: int, left: tuple[list[int], list[int]]
) -> None:
    branch = script(policy, run, StopAfter(3, saves=True), max_steps=8, save_total_limit=limit)
    branch.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert (steps_saved(run), steps_abandoned(run)) == left


def test_a_launch_that_saved_only_a_part_resumes_before_it(run: Path, policy: str) -> None:
    """The launch was killed in its first save."""
    script(policy, run, StopAfter(3, saves=False), max_steps=8).train(str(run / "checkpoint-2"))
    (run / "checkpoint-3").mkdir()
    point = decide(run, True, 1)
    assert [one.path.name for one in point.rejected] == ["checkpoint-3"]
    with pytest.raises(RunError, match=r"checkpoint-3 was cut off .*: name another checkpoint"):
        script(policy, run).train(resume_from_checkpoint=str(run / "checkpoint-3"))
    assert confirmed(point, each_node=False).newest == run / "checkpoint-2"
    shutil.rmtree(run / "checkpoint-2")
    with pytest.raises(RunError, match=r"resumed from .*checkpoint-2 and saved nothing"):
        decide(run, True, 1)


def test_a_damaged_record_of_the_last_launch_is_named(run: Path, policy: str) -> None:
    script(policy, run, StopAfter(3, saves=False), max_steps=8).train(str(run / "checkpoint-2"))
    for content in ("{", '{"resumed_from": 1}', "[]"):
        (run / LAUNCH).write_text(content)
        with pytest.raises(UserError, match=r"_launch.json: .*remove the file"):
            decide(run, True, 1)


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
    assert "checkpoint-4 is renamed to checkpoint-4-abandoned and checkpoint-6 is renamed" in caplog.text
    assert train.main([*command, "--resume_from_checkpoint=true", "--max_steps=4"]) == 0
    assert f"resuming from {output / 'checkpoint-3'}" in capsys.readouterr().out
    record = json.loads((output / "run.json").read_text())
    assert [Path(launch["resumed_from"] or "none").name for launch in record["launches"]] == [
        "none",
        "checkpoint-2",
        "checkpoint-3",
    ]


def test_a_report_of_a_branch_under_way_holds_nothing_of_the_abandoned_steps(run: Path, policy: str) -> None:
    shutil.copy(run / "checkpoint-6" / "trainer_state.json", run)  # as a finished run leaves it
    script(policy, run, StopAfter(3, saves=False), max_steps=8).train(str(run / "checkpoint-2"))
    lines = [{"step": 2, "max_steps": 8}, *({"step": step, "reward": 0.5} for step in (1, 2, 3))]
    (run / LIVE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = Run.read(run)
    assert (list(found.series("reward").steps), found.log.max_steps) == ([1, 2, 3], 8)


def test_a_script_that_branches_off_removes_the_log_of_the_launch_before(run: Path, policy: str) -> None:
    """A script writes no `_log.jsonl`. The old file would reach the last step too, with the abandoned entries."""
    lines = [{"step": 0, "max_steps": 6}, *({"step": step, "reward": -9.0} for step in range(1, 7))]
    (run / LIVE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Run.read(run).series("reward").values == [-9.0] * 6
    script(policy, run).train(str(run / "checkpoint-2"))
    rewards = Run.read(run).series("reward")
    assert rewards.steps == [1, 2, 3, 4, 5, 6]
    assert -9.0 not in rewards.values


@pytest.mark.slow
def test_two_ranks_of_a_script_decide_alike(tmp_path: Path) -> None:
    launching.build_policy(tmp_path / "policy")
    (tmp_path / "golds.txt").write_text(" ".join(map(str, range(16))))

    def said(*arguments: str) -> str:
        module = "tests.support.script_without_recipe"
        return launching.launch_module("ddp_cpu", module, str(tmp_path), *arguments)

    said("6", "none")
    begun = said("3", str(tmp_path / "run" / "checkpoint-2"))
    assert begun.count("checkpoint-4 is renamed to checkpoint-4-abandoned and checkpoint-6 is renamed") == 1
    assert (steps_saved(tmp_path / "run"), steps_abandoned(tmp_path / "run")) == ([2, 3], [4, 6])
    resumed = said("4", "true")
    assert resumed.count(f"went on from {tmp_path / 'run' / 'checkpoint-3'}") == 2
    (tmp_path / "golds.txt").write_text(" ".join(map(str, range(1, 17))))
    refused = said("8", "true")
    for rank in range(2):
        assert f"rank {rank} refused: since " in refused
    assert refused.count("the column `answer` of the dataset has changed") == 2
    (tmp_path / "run" / LAUNCH).write_text("{")
    refused = said("8", "true")
    for rank in range(2):
        assert f"rank {rank} refused: {tmp_path / 'run' / LAUNCH}: can't be read as JSON" in refused


# Comparison of recipes


def refused(before: Mapping[str, Any], now: Mapping[str, Any], directory: str = ".") -> list[str]:
    return recipe_changes(before, now, directory, RESUME_MAY_CHANGE)[0]


def test_a_changed_data_order_is_named() -> None:
    before = {"geometry": {"num_processes": 2, "num_generations": 8}, "train_prompts": 100, "seed": 42, "world_size": 2}
    assert layout_change(before, before) is None
    assert layout_change(before, {**before, "seed": 1}) == "seed was 42 and is 1"
    other = {**before, "geometry": {"num_processes": 4, "num_generations": 8}}
    assert layout_change(before, other) == "num_processes was 2 and is 4"
    assert layout_change({}, before) is None  # a run that recorded nothing


def test_the_page_lists_the_keys_that_may_change_on_resume() -> None:
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


def test_two_spellings_of_one_recipe_are_equal(tmp_path: Path) -> None:
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
    # A key that is no longer set has another value too.
    assert refused({"beta": 0.1}, {}, str(tmp_path)) == ["`beta` was 0.1 and is not set"]
    # Two folders with files of the same names and other contents are different models.
    said = refused({"model_name_or_path": "there"}, {"model_name_or_path": other}, str(tmp_path))
    assert said == [f"`model_name_or_path` was there and is {other}"]
    # The name of a model on the hub is no path, and a folder is no file.
    for was, now_is in (("there", "a/model"), ("a/model", copied), ("there/deep/rows.jsonl", copied)):
        said = refused({"model_name_or_path": was}, {"model_name_or_path": now_is}, str(tmp_path))
        assert said == [f"`model_name_or_path` was {was} and is {now_is}"]
