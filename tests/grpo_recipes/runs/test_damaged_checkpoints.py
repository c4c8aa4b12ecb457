"""Checkpoints with a missing, empty, cut-off or changed file: a resume uses the one before, or is refused."""

import functools
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer, train
from grpo_recipes.checks.checks import Machine, resume_point
from grpo_recipes.recipe.recipe import parse_recipe
from grpo_recipes.runs.checkpoints import MANIFEST, Manifest, read_manifest, write_manifest
from grpo_recipes.runs.files import RunError
from grpo_recipes.runs.resume import Resume, confirmed
from grpo_recipes.training import saving
from tests.support import launching, short_runs
from tests.support.errors import refused

CPU = Machine(1, bf16=False)
ONE_PROCESS = {"per_device_train_batch_size": 8, "max_steps": 3, "logging_steps": 2, "beta": 0.04, "report_to": "none"}
REFRESHED = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}


def _flip(path: Path) -> None:
    """Change one bit in the last quarter of a file, where weights are."""
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one bit": _flip,
}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write recipes of three steps, each in a folder of its own, with the run in `run` beside it."""
    folder = tmp_path_factory.mktemp("runs")
    policy, rows = launching.build_policy(folder / "policy"), launching.write_rows(folder / "rows.jsonl", 8)

    def write(name: str, **changes: Any) -> Path:
        (folder / name).mkdir()
        values = {**ONE_PROCESS, **REFRESHED, **changes}
        return launching.write_recipe(folder / name / "mine.yaml", policy, rows, folder / name / "run", **values)

    return write


@pytest.fixture(scope="module")
def finished(recipes: Callable[..., Path]) -> Path:
    """Return the recipe of a finished run with a checkpoint after each step."""
    recipe = recipes("finished")
    assert train.main(["--config", str(recipe)]) == 0
    return recipe


parsed = functools.cache(parse_recipe)


def resumed(recipe: Path, place: str = "true") -> Resume:
    """Return what a resume decides before a model is loaded."""
    point = resume_point(parsed(("--config", str(recipe), "--resume_from_checkpoint", place)), CPU)
    assert point is not None
    found = confirmed(point, each_node=False)
    if (error := found.obstacle()) is not None:
        raise error
    return found


@pytest.fixture
def restored(finished: Path) -> Iterator[Path]:
    """Yield the run's folder, and restore it afterwards."""
    output = finished.parent / "run"
    shutil.copytree(output, output.with_name("copy"))
    yield output
    shutil.rmtree(output)
    output.with_name("copy").rename(output)


def test_every_damage_to_every_file_is_noticed(finished: Path, restored: Path) -> None:
    last = restored / "checkpoint-3"
    files = sorted(path for path in last.rglob("*") if path.is_file())
    kinds = {path.name for path in files}
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "reference.safetensors"} <= kinds
    assert {MANIFEST, "logged.json", "training_args.bin"} <= kinds
    for file in files:
        whole = file.read_bytes()
        for kind, damage in DAMAGES.items():
            damage(file)
            point = resumed(finished)
            assert point.newest == restored / "checkpoint-2", (file, kind)
            (one,) = point.passed_over
            # Without its manifest a checkpoint counts as one that was never finished.
            assert (one.path, one.cut_off) == (last, (file.name, kind) == (MANIFEST, "missing"))
            assert one.cut_off or one.damage.place == str(file)
            file.write_bytes(whole)
    _flip(last / "optimizer.pt")
    with refused("checkpoint-3"):
        resumed(finished, str(last))


def test_a_run_resumes_before_a_damaged_checkpoint_and_ends_as_before(
    finished: Path, restored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected, history = launching.parameters(restored), launching.log_history(restored)
    _flip(restored / "checkpoint-3" / "model.safetensors")
    capsys.readouterr()
    assert train.main(["--config", str(finished), "--resume_from_checkpoint", "true"]) == 0
    said = capsys.readouterr().out
    assert f"{restored / 'checkpoint-3' / 'model.safetensors'}: " in said
    assert f"set aside as checkpoint-3-damaged: resuming from {restored / 'checkpoint-2'}" in said
    assert (restored / "checkpoint-3-damaged").is_dir()
    actual = launching.parameters(restored)
    assert all(expected[key].equal(actual[key]) for key in expected)
    assert launching.log_history(restored) == history


def test_several_damaged_checkpoints_are_passed_over_but_not_all(finished: Path, restored: Path) -> None:
    _flip(restored / "checkpoint-3" / "optimizer.pt")
    (restored / "checkpoint-2" / "scheduler.pt").unlink()
    point = resumed(finished)
    assert point.newest == restored / "checkpoint-1"
    assert [one.aside.name for one in point.passed_over] == ["checkpoint-2-damaged", "checkpoint-3-damaged"]
    _flip(restored / "checkpoint-1" / "rng_state.pth")
    with refused("checkpoint-", restored / "checkpoint-1"):
        resumed(finished)
    for step in (1, 2, 3):
        (restored / f"checkpoint-{step}" / MANIFEST).unlink()
    assert resumed(finished).newest is None  # a run that never finished a save starts again


def test_a_checkpoint_with_nan_is_passed_over_with_and_without_a_manifest(finished: Path, restored: Path) -> None:
    for step in (2, 3):
        checkpoint = restored / f"checkpoint-{step}"
        file = next(checkpoint.glob("*model.safetensors"))
        tensors = load_file(file)
        name = sorted(tensors)[1]
        tensors[name].view(-1)[-1] = math.nan
        save_file(tensors, file, {"format": "pt"})
        manifest = read_manifest(checkpoint)
        assert manifest is not None
        write_manifest(checkpoint, manifest, each_node=False, writes=True)
    assert resumed(finished).newest == restored / "checkpoint-1"
    with refused(restored / "checkpoint-3", "model.safetensors", name):
        resumed(finished, str(restored / "checkpoint-3"))
    (checkpoint / MANIFEST).unlink()
    assert not confirmed(Resume(restored, 1, checkpoint, [checkpoint]), each_node=False).checkpoints


def test_a_checkpoint_of_the_model_only_is_not_resumed(
    recipes: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipes("model only", save_only_model=True, max_steps=1)
    assert train.main(["--config", str(recipe)]) == 0
    assert train.main(["--config", str(recipe), "--resume_from_checkpoint", "true"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert all(part in said for part in ("checkpoint-1: ", "`save_only_model`", "`model_name_or_path`"))


def test_the_best_checkpoint_is_kept_and_others_go_after_the_manifest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[list[str]] = []
    pushed: list[tuple[str, bool]] = []
    write = saving.write_manifest

    def watched(checkpoint: Path, *given: Any, **more: Any) -> None:
        kept.append(sorted(path.parent.name for path in tmp_path.glob(f"checkpoint-*/{MANIFEST}")))
        write(checkpoint, *given, **more)

    monkeypatch.setattr(saving, "write_manifest", watched)
    args = short_runs.arguments(tmp_path, max_steps=3, save_strategy="steps", save_steps=1, save_total_limit=1)
    run = short_runs.trainer(GRPOTrainer, launching.build_policy(tmp_path / "policy").as_posix(), args)

    class FirstIsBest(type(run.checkpoints)):  # type: ignore[misc]
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            state.best_model_checkpoint = str(tmp_path / "checkpoint-1")
            super().on_save(args, state, control, **kwargs)

    run.checkpoints.__class__ = FirstIsBest
    run.args.push_to_hub = True
    run._push_from_checkpoint = lambda folder: pushed.append((Path(folder).name, (Path(folder) / MANIFEST).is_file()))
    run.train()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-1", "checkpoint-3"}
    assert kept == [[], ["checkpoint-1"], ["checkpoint-1", "checkpoint-2"]]
    assert pushed == [(f"checkpoint-{step}", True) for step in (1, 2, 3)]
    assert (run.args.save_total_limit, run.args.push_to_hub) == (1, True)


def test_a_damaged_best_checkpoint_is_not_loaded_at_the_end(tmp_path: Path) -> None:
    policy = launching.build_policy(tmp_path / "policy").as_posix()
    changes = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    changes |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    args = short_runs.arguments(tmp_path / "run", **changes)
    run = short_runs.trainer(GRPOTrainer, policy, args, eval_dataset=short_runs.PROMPTS.select(range(4)))
    best = tmp_path / "run" / "checkpoint-1"
    best.mkdir(parents=True)
    (best / "model.safetensors").write_bytes(bytes(99))
    write_manifest(best, Manifest(1, 1, False, {}), each_node=False, writes=True)
    state = SimpleNamespace(best_model_checkpoint=str(best))
    run.checkpoints._check_best(args, state)
    _flip(best / "model.safetensors")
    with refused(best / "model.safetensors", "`load_best_model_at_end", by=RunError):
        run.checkpoints._check_best(args, state)


@pytest.mark.slow
def test_a_checkpoint_of_trl_is_resumed_with_a_line_that_it_is_unchecked(
    recipes: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = recipes("stock", sync_ref_model=None, ref_model_sync_steps=None, ref_model_mixup_alpha=None)
    output = recipe.parent / "run"
    policy = str(recipe.parent.parent / "policy")
    args = short_runs.arguments(output, max_steps=2, save_strategy="steps", save_steps=1, learning_rate=1e-3)
    short_runs.trainer(TRLGRPOTrainer, policy, args).train()
    assert read_manifest(output / "checkpoint-2") is None
    resume = ["--config", str(recipe), "--resume_from_checkpoint", "true"]
    assert train.main([*resume, "--learning_rate", "1e-4", "--lr_scheduler_type", "constant"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert all(part in said for part in ("`learning_rate`", "0.0001", "0.001:"))
    shutil.rmtree(output / "completions")
    (output / "run.json").unlink()
    assert train.main([*resume, "--lr_scheduler_type", "constant"]) == 0
    assert capsys.readouterr().out.count("another trainer") == 1
