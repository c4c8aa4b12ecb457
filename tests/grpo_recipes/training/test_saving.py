"""Checkpoint that the trainer of a script resumes from, and the sums that it restores."""

import json
import logging
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grpo_recipes.runs.checkpoints import Manifest, write_manifest
from grpo_recipes.runs.files import RunError
from grpo_recipes.runs.identity import Identity
from grpo_recipes.runs.resume import Resume
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
    callback.resumed_from = tmp_path
    state = SimpleNamespace(global_step=5, best_model_checkpoint=None)
    callback.on_train_begin(args, state, SimpleNamespace())  # type: ignore[arg-type]
    assert trainer._tr_loss.item() == loss
    assert (trainer._globalstep_last_logged, trainer._total_loss_scalar, trainer._initial_global_step) == (4, 7.5, 0)
    assert trainer._metrics["train"] == {"reward": [0.5, 1.0, 2.0]}
    assert trainer.model.training, "else the next metrics would be logged as an evaluation's"
    assert trainer.callback_handler.callbacks == [callback]
    assert args.save_total_limit is None
    callback.on_train_end(args, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]
    assert args.save_total_limit == 1
