"""Checkpoint that the trainer of a script resumes from, and the sums that it restores."""

import json
import logging
import os
import stat
from collections import defaultdict
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
from grpo_recipes.training import saving
from grpo_recipes.training.saving import LOGGED, CompleteCheckpoints

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


@pytest.fixture
def checkpoints(tmp_path: Path) -> CompleteCheckpoints:
    args = SimpleNamespace(output_dir=str(tmp_path), world_size=1, save_on_each_node=False, should_save=False)
    return CompleteCheckpoints(SimpleNamespace(args=args), lambda: NOTHING)  # type: ignore[arg-type]


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
    assert said.startswith(f"{third / 'model.safetensors'} is damaged")
    assert said.endswith("no run can resume from it")
    assert checkpoints.resumption(str(first)) == str(first)
    with pytest.raises(RunError, match=r"checkpoint-11.* is damaged.*name another checkpoint"):
        checkpoints.resumption(str(third))
    assert checkpoints.resumed_from is None
    checkpoints.decision = Resume(tmp_path, 1, third, [third])  # `train.py` has confirmed it: it is not read again
    assert checkpoints.resumption(str(third)) == str(third)
    checkpoints.decision = None
    (third / "model.safetensors").unlink()
    with pytest.raises(RunError, match=r"checkpoint-11.* is missing: name another checkpoint"):
        checkpoints.resumption(str(third))
    for checkpoint in (first, second):
        damage(checkpoint)
    with pytest.raises(RunError, match=r"is missing: name another checkpoint"):
        checkpoints.resumption(True)


def test_a_checkpoint_of_another_kind_is_refused_or_warned_of(
    checkpoints: CompleteCheckpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`transformers` can go on with another number of processes, and not without an optimizer."""
    with pytest.raises(RunError, match=r"checkpoint-1 was saved with `save_only_model`"):
        checkpoints.resumption(str(saved(tmp_path, 1, model_only=True)))
    other = saved(tmp_path, 2, processes=4)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.resumption(True) == str(other)
    assert [message.partition(",")[0] for message in caplog.messages] == [f"{other} is of 4 process(es)"]


@pytest.mark.parametrize("wrong", ["nothing", "contents", "missing", "size", "manifest", "description"])
@pytest.mark.parametrize("is_loaded", [True, False])
def test_the_best_checkpoint_is_compared_before_the_first_step(
    checkpoints: CompleteCheckpoints, tmp_path: Path, wrong: str, is_loaded: bool
) -> None:
    """`load_best_model_at_end` loads it after the last step, when a damaged one costs the whole training."""
    best, newest = saved(tmp_path, 1), saved(tmp_path, 2)
    weights = best / "model.safetensors"
    match wrong:
        case "contents":
            damage(best)
        case "missing":
            weights.unlink()
        case "size":
            weights.write_bytes(b"weigh")
        case "manifest":
            (best / "manifest.json").unlink()
        case "description":
            (best / "config.json").write_text("{")
    args: Any = SimpleNamespace(**vars(checkpoints.trainer.args), save_total_limit=None, push_to_hub=False)
    args.load_best_model_at_end = is_loaded
    checkpoints.trainer.callback_handler = SimpleNamespace(callbacks=[])  # type: ignore[assignment]
    checkpoints.resumed_from = newest
    state: Any = SimpleNamespace(global_step=2, best_model_checkpoint=str(best))
    if wrong == "nothing" or not is_loaded:
        checkpoints.on_train_begin(args, state)
    else:
        with pytest.raises(RunError, match=r"checkpoint-1.*`load_best_model_at_end` would load it at the end"):
            checkpoints.on_train_begin(args, state)
    damage(newest)
    state.best_model_checkpoint = str(newest)  # was compared when it was chosen
    checkpoints.on_train_begin(args, state)
    state.best_model_checkpoint = None
    checkpoints.on_train_begin(args, state)


@pytest.mark.parametrize(("ranks", "rank", "loss"), [(2, 0, 1.0), (2, 1, 3.0), (1, 0, 2.0), (4, 3, 2.0)])
def test_the_sums_of_the_next_log_entry_are_restored(tmp_path: Path, ranks: int, rank: int, loss: float) -> None:
    """Each rank's own loss; their mean on another number of ranks."""
    args = SimpleNamespace(
        save_total_limit=1, push_to_hub=False, load_best_model_at_end=False, world_size=ranks, process_index=rank
    )
    trainer = SimpleNamespace(
        args=args, callback_handler=SimpleNamespace(callbacks=[]), model=torch.nn.Linear(1, 1).eval(),
        _tr_loss=torch.tensor(0.0), _metrics={"train": defaultdict(list, reward=[0.5])},
    )  # fmt: skip
    content = {"losses_since": [1.0, 3.0], "logged_step": 4, "loss_total": 7.5, "metrics_since": {"reward": [1.0, 2.0]}}
    (tmp_path / LOGGED).write_text(json.dumps(content))
    callback = CompleteCheckpoints(trainer, lambda: NOTHING)  # type: ignore[arg-type]
    trainer.callback_handler.callbacks = [callback, "of a script"]
    callback.resumed_from = tmp_path
    state = SimpleNamespace(global_step=5, best_model_checkpoint=None)
    callback.on_train_begin(args, state, SimpleNamespace())  # type: ignore[arg-type]
    assert trainer._tr_loss.item() == loss
    assert (trainer._globalstep_last_logged, trainer._total_loss_scalar, trainer._initial_global_step) == (4, 7.5, 0)
    assert trainer._metrics["train"] == {"reward": [0.5, 1.0, 2.0]}
    assert trainer.model.training, "else the next metrics would be logged as an evaluation's"
    assert trainer.callback_handler.callbacks == ["of a script", callback], "it lists what the others add"
    assert args.save_total_limit is None
    callback.on_train_end(args, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    assert (args.save_total_limit, args.push_to_hub) == (1, False)


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, 1, [1, 2, 3, 10, 11]),
        (-1, 1, [1, 2, 3, 10, 11]),
        (1, None, [11]),
        (1, 1, [1, 11]),  # a resume needs the newest, and the end of the training the best
        (2, 1, [1, 11]),
        (2, 11, [10, 11]),
        (3, 2, [2, 10, 11]),
        (4, 10, [2, 3, 10, 11]),
        (9, 1, [1, 2, 3, 10, 11]),
    ],
)
def test_a_complete_checkpoint_is_pushed_and_only_then_older_ones_are_removed(
    checkpoints: CompleteCheckpoints, tmp_path: Path, limit: int | None, best: int | None, left: list[int]
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

    trainer: Any = checkpoints.trainer
    trainer.args.should_save = True
    trainer._push_from_checkpoint = push
    trainer._tr_loss, trainer._globalstep_last_logged, trainer._total_loss_scalar = torch.tensor(0.5), 3, 7.0
    trainer._metrics, trainer.callback_handler = {"train": {"reward": [1.0]}}, SimpleNamespace(callbacks=[])
    args = SimpleNamespace(
        **vars(trainer.args), save_total_limit=limit, push_to_hub=True, save_only_model=False,
        load_best_model_at_end=False,
    )  # fmt: skip
    state: Any = SimpleNamespace(global_step=11, best_model_checkpoint=best and str(tmp_path / f"checkpoint-{best}"))
    checkpoints.identity = NOTHING
    for _ in range(2):  # the first call of `train` was interrupted, and did not restore the arguments
        checkpoints.on_train_begin(args, state)  # type: ignore[arg-type]
        assert (args.save_total_limit, args.push_to_hub) == (None, False), "transformers does neither"
    checkpoints.on_save(args, state)  # type: ignore[arg-type]
    assert pushed == [[1, 2, 3, 10, 11]]
    assert steps() == left
    assert checkpoints.last_saved == newest
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((newest / "model.safetensors").stat().st_mode) == 0o666 & ~umask
    checkpoints.on_train_end(args, state)  # type: ignore[arg-type]
    assert (args.save_total_limit, args.push_to_hub) == (limit, True)
    restored = json.loads((newest / LOGGED).read_text())
    assert restored == {
        "losses_since": [0.5], "logged_step": 3, "loss_total": 7.0, "metrics_since": {"reward": [1.0]}
    }  # fmt: skip


def test_the_rates_of_a_resumed_run_count_the_steps_of_this_launch(checkpoints: CompleteCheckpoints) -> None:
    """The 8 steps and 64 samples of the whole run are divided by the 2 s of this launch, which made 3."""
    trainer: Any = checkpoints.trainer
    trainer.state = SimpleNamespace(global_step=8)
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


@pytest.mark.parametrize("reporter", [0, 1])
def test_a_script_resumes_from_a_named_checkpoint_of_another_trainer(
    checkpoints: CompleteCheckpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch, reporter: int,
) -> None:  # fmt: skip
    """Only transformers knows whether it is complete. The first rank says that it is not compared."""
    monkeypatch.setattr(saving, "rank", lambda: reporter)
    theirs = tmp_path / "theirs" / "checkpoint-7"
    theirs.mkdir(parents=True)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.resumption(str(theirs)) == str(theirs)
    said = "data, weights and rewards are not compared, because the checkpoint does not identify them"
    assert [message.endswith(said) for message in caplog.messages] == [True] * (1 - reporter)


class Folder:
    """Stand-in for the folder of a run that this launch holds, until it is lost."""

    def __init__(self) -> None:
        self.is_lost, self.asked = False, 0

    def loss(self) -> str | None:
        self.asked += 1
        return "it was taken over" if self.is_lost else None


def events(due: str) -> Any:
    names = ("should_log", "should_evaluate", "should_save")
    return SimpleNamespace(**{name: name == due for name in names})


@pytest.mark.parametrize(
    ("event", "due"),
    [
        ("on_train_begin", ""),
        *((event, f"should_{due}") for event in ("on_step_end", "on_epoch_end") for due in ("log", "evaluate", "save")),
        ("on_log", "should_save"),
        ("on_evaluate", ""),
        ("on_save", ""),
    ],
)
def test_nothing_is_written_to_a_folder_that_was_lost(
    event: str, due: str, checkpoints: CompleteCheckpoints, tmp_path: Path
) -> None:
    folder: Any = Folder()
    checkpoints.held = folder
    trainer: Any = checkpoints.trainer
    trainer.state = state = SimpleNamespace(global_step=8, best_model_checkpoint=None)
    for hook in ("on_step_end", "on_epoch_end", "on_log"):
        getattr(checkpoints, hook)(trainer.args, state, events(""))
    assert folder.asked == 0, "nothing is to be written"
    folder.is_lost = True
    with pytest.raises(FolderLost, match="it was taken over; this launch stops after step 8"):
        getattr(checkpoints, event)(trainer.args, state, events(due))
    assert not list(tmp_path.iterdir())


def test_older_checkpoints_stay_if_the_folder_is_lost_while_one_is_pushed(
    checkpoints: CompleteCheckpoints, tmp_path: Path
) -> None:
    older, newest = saved(tmp_path, 1), tmp_path / "checkpoint-2"
    newest.mkdir()
    folder: Any = Folder()
    checkpoints.held = folder
    checkpoints.limit, checkpoints.pushes = 1, True
    trainer: Any = checkpoints.trainer
    trainer._push_from_checkpoint = lambda path: setattr(folder, "is_lost", True)
    trainer.args.should_save, trainer.args.save_only_model = True, False
    trainer._tr_loss, trainer._globalstep_last_logged, trainer._total_loss_scalar = torch.tensor(0.5), 1, 1.0
    trainer._metrics = {"train": {}}
    state: Any = SimpleNamespace(global_step=2, best_model_checkpoint=None)
    trainer.state = state
    with pytest.raises(FolderLost, match="checkpoint-2 is its last checkpoint"):
        checkpoints.on_save(trainer.args, state)
    assert older.is_dir()


def test_a_launch_begins_once_all_ranks_have_read_the_folder_that_it_holds(
    checkpoints: CompleteCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[Any] = []
    monkeypatch.setattr(saving, "gather", lambda value: did.append("gathered") or [value])
    monkeypatch.setattr(saving, "begin_launch", lambda folder, source: did.append((folder, source)) or [])
    checkpoints.trainer.args.should_save = True
    (tmp_path / LIVE).write_text("of an earlier launch")
    for _ in range(2):  # the second time, there is no log
        checkpoints.resumption(None)
    assert did == ["gathered", (tmp_path, None)] * 2
    assert not (tmp_path / LIVE).exists()
    (tmp_path / LIVE).write_text("of another launch")
    folder: Any = Folder()
    checkpoints.held = folder
    folder.is_lost = True
    with pytest.raises(FolderLost, match="this launch stops before its first step"):
        checkpoints.resumption(None)
    assert len([one for one in did if one != "gathered"]) == 2
    assert (tmp_path / LIVE).exists()
    checkpoints.held, checkpoints.trainer.args.should_save = None, False
    checkpoints.resumption(None)
    assert (tmp_path / LIVE).exists(), "one rank writes there"


def test_a_launch_says_which_later_checkpoints_it_renames(
    checkpoints: CompleteCheckpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = saved(tmp_path, 1), saved(tmp_path, 2)
    checkpoints.trainer.args.should_save = True
    with caplog.at_level(logging.WARNING):
        assert checkpoints.resumption(str(first)) == str(first)
    assert [message for message in caplog.messages if "is renamed to" in message] == [
        "checkpoint-2 is renamed to checkpoint-2-abandoned, because this launch begins at an earlier step"
    ]
    assert first.is_dir()
    assert not second.is_dir()


def test_a_launch_that_stops_names_the_newest_checkpoint(checkpoints: CompleteCheckpoints, tmp_path: Path) -> None:
    checkpoints.held = SimpleNamespace(loss=lambda: "it was taken over")  # type: ignore[assignment]
    checkpoints.trainer.state = SimpleNamespace(global_step=8)  # type: ignore[assignment]
    for resumed, newest, said in (
        (None, None, "it has no checkpoint"),
        (tmp_path / "checkpoint-3", None, "checkpoint-3 is its last checkpoint"),
        (tmp_path / "checkpoint-3", tmp_path / "checkpoint-6", "checkpoint-6 is its last checkpoint"),
    ):
        checkpoints.resumed_from, checkpoints.last_saved = resumed, newest
        with pytest.raises(FolderLost, match=f"it was taken over; this launch stops after step 8 .*, {said}: wait"):
            checkpoints.check_folder()


def test_a_run_is_evaluated_before_its_first_step_only_once(checkpoints: CompleteCheckpoints, tmp_path: Path) -> None:
    args: Any = SimpleNamespace(
        save_total_limit=None, push_to_hub=False, load_best_model_at_end=False, eval_on_start=True
    )
    checkpoints.trainer.callback_handler = SimpleNamespace(callbacks=[])  # type: ignore[assignment]
    state: Any = SimpleNamespace(global_step=0, best_model_checkpoint=None)
    checkpoints.on_train_begin(args, state)
    assert args.eval_on_start is True
    checkpoints.resumed_from = tmp_path
    checkpoints.on_train_begin(args, state)
    assert args.eval_on_start is False


@pytest.mark.parametrize("kind", ["link", "file", "folder"])
def test_a_checkpoint_is_not_saved_through_a_link_or_over_a_file(
    checkpoints: CompleteCheckpoints, tmp_path: Path, kind: str
) -> None:
    place = tmp_path / "checkpoint-4"
    match kind:
        case "link":
            (tmp_path / "outside").mkdir()
            place.symlink_to(tmp_path / "outside")
        case "file":
            place.touch()
        case "folder":
            place.mkdir()  # a checkpoint of an earlier launch, which is saved again
    state: Any = SimpleNamespace(global_step=4)
    control: Any = SimpleNamespace(should_log=False, should_evaluate=False, should_save=True)
    with nullcontext() if kind == "folder" else pytest.raises(RunFault, match="checkpoint-4: it is a link or a file"):
        checkpoints.on_step_end(checkpoints.trainer.args, state, control)
