"""Checkpoint that the trainer of a script resumes from, what a save leaves, and the sums that a resume restores."""

import json
import logging
import os
import stat
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_recipes.process.faults import RunFault
from grpo_recipes.runs.checkpoints import Manifest, read_manifest, write_manifest
from grpo_recipes.runs.files import LIVE, RunError
from grpo_recipes.runs.identity import Identity
from grpo_recipes.runs.lock import FolderLost
from grpo_recipes.runs.resume import Resume
from grpo_recipes.training.saving import LOGGED, CompleteCheckpoints
from tests.support.errors import refused

NOTHING = Identity({"rows": 0, "columns": {}, "weights": {}, "rewards": {}, "versions": {}, "chat_template": None})


def saved(folder: Path, step: int, processes: int = 1, *, model_only: bool = False) -> Path:
    """Save a checkpoint of one file with a manifest."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    manifest = Manifest(step, processes, model_only, {}, identity=NOTHING.content)
    write_manifest(checkpoint, manifest, each_node=False, writes=True)
    return checkpoint


def damage(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"Weights")


def state_of(step: int, best: Path | None = None) -> Any:
    return SimpleNamespace(global_step=step, best_model_checkpoint=best and str(best))


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """Return a stand-in for TRL's trainer, with what a log entry sums."""
    args = SimpleNamespace(
        output_dir=str(tmp_path), world_size=1, process_index=0, save_on_each_node=False, should_save=False,
        save_total_limit=None, push_to_hub=False, load_best_model_at_end=False, save_only_model=False,
        eval_on_start=True,
    )  # fmt: skip
    return SimpleNamespace(
        args=args, callback_handler=SimpleNamespace(callbacks=[]), model=torch.nn.Linear(1, 1).eval(),
        _tr_loss=torch.tensor(0.5), _globalstep_last_logged=3, _total_loss_scalar=7.0,
        _metrics={"train": defaultdict(list, reward=[1.0])}, state=state_of(8),
    )  # fmt: skip


@pytest.fixture
def checkpoints(trainer: Any) -> CompleteCheckpoints:
    made = CompleteCheckpoints(trainer, lambda: NOTHING)
    made.identity = NOTHING
    return made


def test_a_script_resumes_from_the_newest_undamaged_checkpoint(
    checkpoints: CompleteCheckpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert [checkpoints.resumption(asked) for asked in (None, False, True)] == [None, False, True]  # there is none
    first, second, third = (saved(tmp_path, step) for step in (9, 10, 11))
    assert checkpoints.resumption(True) == str(third)
    assert checkpoints.resumed_from == third
    assert caplog.messages == []
    damage(third)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.resumption(True) == str(second)
    (said,) = caplog.messages
    assert str(third / "model.safetensors") in said
    assert checkpoints.resumption(str(first)) == str(first)
    with refused("checkpoint-11", by=RunError):
        checkpoints.resumption(str(third))
    assert checkpoints.resumed_from is None
    checkpoints.decision = Resume(tmp_path, 1, third, [third])  # confirmed by `run/prepare.py`: it is not read again
    assert checkpoints.resumption(str(third)) == str(third)
    checkpoints.decision = None
    (third / "model.safetensors").unlink()
    for checkpoint in (first, second):
        damage(checkpoint)
    with refused("checkpoint-11", by=RunError):
        checkpoints.resumption(True)


def test_a_checkpoint_of_another_kind_is_refused_or_warned_of(
    checkpoints: CompleteCheckpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`transformers` can go on with another number of processes, and not without an optimizer."""
    with pytest.raises(RunError, match=r"checkpoint-1.*`save_only_model`"):
        checkpoints.resumption(str(saved(tmp_path, 1, model_only=True)))
    other = saved(tmp_path, 2, processes=4)
    theirs = tmp_path / "theirs" / "checkpoint-7"  # only transformers knows whether it is complete
    theirs.mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.resumption(True) == str(other)
        assert checkpoints.resumption(str(theirs)) == str(theirs)
    assert [("4 process(es)" in said, "not compared" in said) for said in caplog.messages] == [
        (True, False), (False, True)
    ]  # fmt: skip


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda best: None,
    "contents": damage,
    "missing": lambda best: (best / "model.safetensors").unlink(),
    "size": lambda best: (best / "model.safetensors").write_bytes(b"weigh"),
    "manifest": lambda best: (best / "manifest.json").unlink(),
    "description": lambda best: (best / "config.json").write_text("{"),
}


@pytest.mark.parametrize("wrong", DAMAGES)
def test_the_best_checkpoint_is_compared_before_the_first_step(
    checkpoints: CompleteCheckpoints, trainer: Any, tmp_path: Path, wrong: str
) -> None:
    """`load_best_model_at_end` loads it after the last step, when a damaged one costs the whole training."""
    best, newest = saved(tmp_path, 1), saved(tmp_path, 2)
    DAMAGES[wrong](best)
    checkpoints.resumed_from = newest
    checkpoints.on_train_begin(trainer.args, state_of(2, best))  # it is not loaded
    trainer.args.load_best_model_at_end = True
    with nullcontext() if wrong == "nothing" else refused("checkpoint-1", "load_best_model_at_end", by=RunError):
        checkpoints.on_train_begin(trainer.args, state_of(2, best))
    damage(newest)
    for chosen in (newest, None):  # the newest was compared when it was chosen
        checkpoints.on_train_begin(trainer.args, state_of(2, chosen))


def test_the_sums_of_the_next_log_entry_are_restored(
    checkpoints: CompleteCheckpoints, trainer: Any, tmp_path: Path
) -> None:
    """Each rank's own loss; their mean on another number of ranks."""
    content = {"losses_since": [1.0, 3.0], "logged_step": 4, "loss_total": 7.5, "metrics_since": {"reward": [1.0, 2.0]}}
    (tmp_path / LOGGED).write_text(json.dumps(content))
    checkpoints.resumed_from = tmp_path
    for ranks, rank, loss in ((2, 0, 1.0), (2, 1, 3.0), (1, 0, 2.0), (4, 3, 2.0)):
        trainer.args.world_size, trainer.args.process_index = ranks, rank
        trainer.callback_handler.callbacks = [checkpoints, "of a script"]
        trainer._metrics["train"] = defaultdict(list, reward=[0.5])
        checkpoints.on_train_begin(trainer.args, state_of(5))
        assert trainer._tr_loss.item() == loss
    assert (trainer._globalstep_last_logged, trainer._total_loss_scalar, trainer._initial_global_step) == (4, 7.5, 0)
    assert trainer._metrics["train"] == {"reward": [0.5, 1.0, 2.0]}
    assert not trainer.args.eval_on_start, "a run is evaluated before its first step only once"
    assert trainer.model.training, "else the next metrics would be logged as an evaluation's"
    assert trainer.callback_handler.callbacks == ["of a script", checkpoints], "it lists what the others add"


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, 1, [1, 2, 3, 10, 11]),
        (1, None, [11]),
        (1, 1, [1, 11]),  # a resume needs the newest, and the end of the training the best
        (2, 11, [10, 11]),
        (4, 10, [2, 3, 10, 11]),
        (9, 1, [1, 2, 3, 10, 11]),
    ],
)
def test_a_complete_checkpoint_is_pushed_and_only_then_older_ones_are_removed(
    checkpoints: CompleteCheckpoints, trainer: Any, tmp_path: Path, limit: int | None, best: int | None, left: list[int]
) -> None:
    def steps() -> list[int]:
        return sorted(int(path.name.partition("-")[2]) for path in tmp_path.iterdir())

    for step in (1, 2, 3, 10):
        saved(tmp_path, step)
    newest = tmp_path / "checkpoint-11"
    newest.mkdir()
    (newest / "model.safetensors").write_bytes(b"weights")
    (newest / "model.safetensors").chmod(0o600)  # as safetensors writes it
    pushed = []

    def push(folder: str) -> None:
        manifest = read_manifest(Path(folder))
        assert manifest is not None
        assert set(manifest.files) == {"model.safetensors", LOGGED}
        assert (manifest.step, manifest.num_processes, manifest.model_only) == (11, 1, False)
        assert manifest.identity == NOTHING.content
        pushed.append(steps())

    trainer._push_from_checkpoint = push
    args = trainer.args
    args.should_save, args.save_total_limit, args.push_to_hub = True, limit, True
    state = state_of(11, best and tmp_path / f"checkpoint-{best}")
    for _ in range(2):  # the first call of `train` was interrupted, and did not restore the arguments
        checkpoints.on_train_begin(args, state)
        assert (args.save_total_limit, args.push_to_hub) == (None, False), "transformers does neither"
    checkpoints.on_save(args, state)
    assert pushed == [[1, 2, 3, 10, 11]]
    assert steps() == left
    assert checkpoints.last_saved == newest
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((newest / "model.safetensors").stat().st_mode) == 0o666 & ~umask
    checkpoints.on_train_end(args, state)
    assert (args.save_total_limit, args.push_to_hub) == (limit, True)
    restored = json.loads((newest / LOGGED).read_text())
    assert restored == {
        "losses_since": [0.5], "logged_step": 3, "loss_total": 7.0, "metrics_since": {"reward": [1.0]}
    }  # fmt: skip


def test_the_rates_of_a_resumed_run_count_the_steps_of_this_launch(checkpoints: CompleteCheckpoints) -> None:
    """The 8 steps and 64 samples of the whole run are divided by the 2 s of this launch, which made 3."""
    checkpoints.first_step = 5
    logs = {"train_loss": 0.5, "train_runtime": 2.0, "train_samples_per_second": 32.0, "train_steps_per_second": 0.5}
    checkpoints.correct_rates(alone := dict(logs))
    assert alone == logs
    checkpoints.resumed_from = Path("checkpoint-5")
    checkpoints.correct_rates(eval_logs := {"eval_loss": 0.1, "train_samples_per_second": 1.0})
    assert eval_logs == {"eval_loss": 0.1, "train_samples_per_second": 1.0}
    checkpoints.correct_rates(logs)
    assert logs == {
        "train_loss": 0.5, "train_runtime": 2.0, "train_samples_per_second": 12.0, "train_steps_per_second": 0.188
    }  # fmt: skip


# ---- the folder of the run


class Folder:
    """Stand-in for the lock of the folder that a launch holds, until it is lost."""

    is_lost, asked = False, 0

    def loss(self) -> str | None:
        self.asked += 1
        return "it was taken over" if self.is_lost else None


def events(due: str) -> Any:
    names = ("should_log", "should_evaluate", "should_save")
    return SimpleNamespace(**{name: name == due for name in names})


def test_nothing_is_written_to_a_folder_that_was_lost(
    checkpoints: CompleteCheckpoints, trainer: Any, tmp_path: Path
) -> None:
    checkpoints.held = folder = Folder()  # type: ignore[assignment]
    for hook in ("on_step_end", "on_epoch_end", "on_log"):
        getattr(checkpoints, hook)(trainer.args, trainer.state, events(""))
    assert folder.asked == 0, "nothing is to be written"
    folder.is_lost = True
    due = [(hook, f"should_{kind}") for hook in ("on_step_end", "on_epoch_end") for kind in ("log", "evaluate", "save")]
    due += [("on_train_begin", ""), ("on_log", "should_save"), ("on_evaluate", ""), ("on_save", "")]
    for resumed, last, named in (
        (None, None, "no checkpoint"),
        (tmp_path / "checkpoint-3", None, "checkpoint-3"),
        (tmp_path / "checkpoint-3", tmp_path / "checkpoint-6", "checkpoint-6"),
    ):
        checkpoints.resumed_from, checkpoints.last_saved = resumed, last
        for hook, event in due:
            with pytest.raises(FolderLost, match=f"after step 8 .*{named}"):
                getattr(checkpoints, hook)(trainer.args, trainer.state, events(event))
    assert not list(tmp_path.iterdir())


def test_older_checkpoints_stay_if_the_folder_is_lost_while_one_is_pushed(
    checkpoints: CompleteCheckpoints, trainer: Any, tmp_path: Path
) -> None:
    older, newest = saved(tmp_path, 1), tmp_path / "checkpoint-2"
    newest.mkdir()
    checkpoints.held = folder = Folder()  # type: ignore[assignment]
    checkpoints.limit, checkpoints.pushes = 1, True
    trainer._push_from_checkpoint = lambda path: setattr(folder, "is_lost", True)
    trainer.args.should_save = True
    with pytest.raises(FolderLost, match="checkpoint-2"):
        checkpoints.on_save(trainer.args, state_of(2))
    assert older.is_dir()


def test_a_launch_renames_later_checkpoints_and_removes_the_live_log(
    checkpoints: CompleteCheckpoints, trainer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only one rank writes there, once the folder is known to be held."""
    first, second = saved(tmp_path, 1), saved(tmp_path, 2)
    (tmp_path / LIVE).touch()
    checkpoints.held = folder = Folder()  # type: ignore[assignment]
    checkpoints.resumption(str(first))
    assert (folder.asked, (tmp_path / LIVE).exists(), second.is_dir()) == (1, True, True)
    trainer.args.should_save, folder.is_lost = True, True
    with pytest.raises(FolderLost):
        checkpoints.resumption(str(first))
    assert (tmp_path / LIVE).exists()
    folder.is_lost = False
    with caplog.at_level(logging.WARNING):
        assert checkpoints.resumption(str(first)) == str(first)
    assert any("checkpoint-2-abandoned" in message for message in caplog.messages)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2-abandoned"]
    assert not (tmp_path / LIVE).exists()


@pytest.mark.parametrize("kind", ["link", "file", "folder"])
def test_a_checkpoint_is_not_saved_through_a_link_or_over_a_file(
    checkpoints: CompleteCheckpoints, trainer: Any, tmp_path: Path, kind: str
) -> None:
    place, outside = tmp_path / "checkpoint-4", tmp_path / "outside"
    outside.mkdir()
    # A folder is a checkpoint of an earlier launch, which is saved again.
    make = {"link": lambda: place.symlink_to(outside), "file": place.touch, "folder": place.mkdir}
    make[kind]()
    with nullcontext() if kind == "folder" else pytest.raises(RunFault, match="checkpoint-4"):
        checkpoints.on_step_end(trainer.args, state_of(4), events("should_save"))
