"""Which checkpoint a resume of the trainer goes on from."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_recipes.runs.manifest import CheckpointDamaged, Manifest, write_manifest
from grpo_recipes.runs.saving import CompleteCheckpoints


def saved(folder: Path, step: int, processes: int = 1, *, model_only: bool = False) -> Path:
    """A checkpoint with a manifest, of one file."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    write_manifest(checkpoint, Manifest(step, processes, model_only, {}), each_node=False, writes=True)
    return checkpoint


def damage(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"Weights")


@pytest.fixture
def checkpoints(tmp_path: Path) -> CompleteCheckpoints:
    args = SimpleNamespace(output_dir=str(tmp_path), world_size=1, save_on_each_node=False)
    return CompleteCheckpoints(SimpleNamespace(args=args))  # type: ignore[arg-type]


def test_the_newest_checkpoint_that_holds_is_gone_on_from(
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
    assert said.endswith("no run can go on from it")
    assert checkpoints.resumption(str(first)) == str(first)
    with pytest.raises(CheckpointDamaged, match=r"checkpoint-11.* is damaged.*name another checkpoint"):
        checkpoints.resumption(str(third))
    assert checkpoints.resumed_from is None
    checkpoints.confirmed = third  # read and compared a moment ago: not once more
    assert checkpoints.resumption(str(third)) == str(third)
    (third / "model.safetensors").unlink()
    with pytest.raises(CheckpointDamaged, match=r"checkpoint-11.* is missing: name another checkpoint"):
        checkpoints.resumption(str(third))
    for checkpoint in (first, second):
        damage(checkpoint)
    with pytest.raises(CheckpointDamaged, match=r"is missing: name another checkpoint"):
        checkpoints.resumption(True)


def test_a_checkpoint_of_another_kind_is_refused_or_said(
    checkpoints: CompleteCheckpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers can go on with another number of processes, and not without an optimiser."""
    with pytest.raises(CheckpointDamaged, match=r"checkpoint-1 was saved with `save_only_model`"):
        checkpoints.resumption(str(saved(tmp_path, 1, model_only=True)))
    other = saved(tmp_path, 2, processes=4)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.resumption(True) == str(other)
    assert [message.partition(",")[0] for message in caplog.messages] == [f"{other} is of 4 process(es)"]
