"""Data order of a resumed run, where a save may fall, and runs that are resumed after kills and signals."""

import json
import random
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler
from transformers import TrainerControl, TrainerState, get_scheduler
from trl.trainer.utils import RepeatSampler

from grpo_recipes import train
from grpo_recipes.checks.checks import Machine, check
from grpo_recipes.checks.geometry import Geometry, geometry_of
from grpo_recipes.recipe.recipe import RecipeError, parse_recipe
from grpo_recipes.training.data_order import ContinueSchedule, EpochSampler, SetSamplerEpoch, loading_only
from tests.support import launching
from tests.support.errors import refused
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
        resumed = EpochSampler(repeat_sampler(prompts, seed=seed, shuffle=shuffle))
        resumed.epoch = epoch
        assert list(resumed) == expected[epoch]
        assert len(resumed) == len(expected[epoch])


@pytest.mark.parametrize("epoch", [1.25, 1.6])
def test_a_resumed_epoch_on_two_ranks_continues_where_it_stopped(epoch: float) -> None:
    plain = repeat_sampler(12)
    list(plain)
    second_epoch = list(plain)
    sampler = EpochSampler(repeat_sampler(12))
    for now in (None, epoch):
        SetSamplerEpoch(sampler).on_epoch_begin(SimpleNamespace(), TrainerState(epoch=now), TrainerControl())
        assert sampler.epoch == (0 if now is None else 1)
    seen = []
    for rank in range(2):
        shard = BatchSamplerShard(BatchSampler(sampler, 3, drop_last=False), 2, rank)
        seen.append([index for batch in SkipBatchSampler(shard, 2) for index in batch])
    rest = second_epoch[2 * 2 * 3 :]
    assert sorted(seen[0] + seen[1]) == sorted(rest)


def schedule(steps: int, rate: float = 0.5) -> torch.optim.lr_scheduler.LRScheduler:
    """Return a linear schedule of two groups of weights, as one with and one without weight decay."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "weight_decay": decay} for decay in (0.1, 0.0)]
    optimizer = torch.optim.SGD(groups, lr=rate)
    return get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=steps)


def begin(scheduler: Any, rate: float = 0.5) -> None:
    """Begin a training with a schedule that was loaded."""
    args: Any = SimpleNamespace(learning_rate=rate)
    ContinueSchedule().on_train_begin(args, TrainerState(), lr_scheduler=scheduler)


def rates_of(scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[list[float]]:
    """Return the rates of the next steps, as the optimizer uses them and as the log shows them."""
    rates = []
    for _ in range(steps):
        rates.append([group["lr"] for group in scheduler.optimizer.param_groups] + scheduler.get_last_lr())
        scheduler.optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(
    ("before", "now", "done", "is_wrapped"), [(4, 8, 4, False), (8, 8, 3, False), (8, 6, 5, False), (4, 8, 4, True)]
)
def test_a_resumed_schedule_is_that_of_the_whole_run(before: int, now: int, done: int, is_wrapped: bool) -> None:
    expected = rates_of(schedule(now), now)
    stopped, resumed = schedule(before), schedule(now)
    rates_of(stopped, done)
    resumed.load_state_dict(stopped.state_dict())
    resumed.optimizer.load_state_dict(stopped.optimizer.state_dict())
    loaded = SimpleNamespace(scheduler=resumed) if is_wrapped else resumed
    begin(loaded)
    assert rates_of(resumed, now - done) == expected[done:]
    with refused("`learning_rate`", 0.25, 0.5):
        begin(loaded, rate=0.25)


def test_every_group_of_weights_has_its_rate_of_the_schedule() -> None:
    """A checkpoint of a run with three groups leaves three rates."""
    for rates, error in (
        ([0.5, 0.25], refused("`learning_rate`", 0.5)),
        ([0.5] * 3, pytest.raises(ValueError, match="zip")),
    ):
        resumed = schedule(4)
        resumed.base_lrs = rates
        with error:
            begin(resumed)


def test_a_schedule_that_does_not_depend_on_the_length_keeps_its_rate() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    begin(plateau, rate=0.25)
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_finished_run_keeps_its_length_after_it_was_loaded() -> None:
    trainer = SimpleNamespace(args=SimpleNamespace(max_steps=7, num_train_epochs=3.0), state=TrainerState(max_steps=7))

    def interrupted() -> None:
        with loading_only(trainer, 7):  # type: ignore[arg-type]
            assert (trainer.args.max_steps, trainer.args.num_train_epochs) == (-1, 0)
            trainer.state.max_steps = 0  # as transformers computes it
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (trainer.args.max_steps, trainer.args.num_train_epochs, trainer.state.max_steps) == (7, 3.0, 7)


def test_the_best_of_each_epoch_may_be_saved(tmp_path: Path) -> None:
    """`eval_steps` has no effect, and an epoch ends with a generation batch."""
    rows = launching.write_rows(tmp_path / "rows.jsonl", 9)
    changes = {"per_device_train_batch_size": 4, "max_steps": 12, "num_iterations": 3, "save_steps": None}
    changes |= {"save_strategy": "best", "eval_strategy": "epoch", "metric_for_best_model": "eval_reward"}
    changes |= {"dataset": {"name": "gsm8k", "path": str(rows), "prompt_format": "text", "eval_split": "train[:4]"}}
    recipe_file = launching.write_recipe(tmp_path / "mine.yaml", tmp_path, rows, tmp_path / "run", **changes)
    recipe = parse_recipe(["--config", str(recipe_file)])
    geometry_of(recipe, 1).check_saves(recipe.config, 9)  # raises nothing


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({"steps_per_generation": 4, "gradient_accumulation_steps": 2, "save_steps": 5}, 6),
        ({"num_iterations": 2, "save_steps": 3}, 4),
        ({"num_iterations": 3, "save_steps": 0.3}, 6),
        # 3 generations of 3 micro-batches in steps of 2: the epoch's fifth step is a short one.
        (
            {"steps_per_generation": 3, "gradient_accumulation_steps": 2, "save_steps": 3, "num_generations": 4}, 5,
        ),
    ],
)  # fmt: skip
def test_a_save_inside_a_generation_batch_is_refused_with_a_step_that_is_not(
    tmp_path: Path, changes: dict, step: int
) -> None:
    path, rows = tmp_path / "mine.yaml", launching.write_rows(tmp_path / "rows.jsonl", 9)
    values = {"per_device_train_batch_size": 4, "max_steps": 12, **changes}

    def checked(**values: Any) -> None:
        launching.write_recipe(path, tmp_path, rows, tmp_path / "run", **values)
        check(parse_recipe(["--config", str(path)]), Machine(1, bf16=False))

    with refused("mine.yaml", "`save_steps`", step, by=RecipeError):
        checked(**values)
    checked(**{**values, "save_steps": step})


@settings(deadline=None, max_examples=100)
@given(
    accumulation=st.integers(1, 5), steps=st.integers(1, 5), iterations=st.integers(1, 3), generations=st.integers(1, 5)
)
def test_generation_boundaries_by_counting(accumulation: int, steps: int, iterations: int, generations: int) -> None:
    layout = Geometry(1, 4, accumulation, steps, 4, iterations)
    prompts = generations * layout.prompts_per_generation
    trained = 0
    for step in range(1, 3 * layout.optimizer_steps_per_epoch(prompts) + 1):
        in_epoch = trained % (generations * steps * iterations)
        trained += min(accumulation, generations * steps * iterations - in_epoch)
        assert layout.ends_generation(step, prompts) == (trained % (steps * iterations) == 0)


@pytest.mark.parametrize("steps", [[3], pytest.param([1, 2, 4, 5], marks=pytest.mark.slow)])
def test_a_resumed_run_logs_what_an_uninterrupted_run_logs(tmp_path: Path, steps: list[int]) -> None:
    """Resumed between two log entries, at an entry, in another epoch, and at the end. Rates are those of the launch."""
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 6)
    changes = {"per_device_train_batch_size": 8, "max_steps": 5, "logging_steps": 2, "beta": 0.04}
    changes |= {"save_steps": 3 if steps == [3] else 1, "max_completion_length": 4}
    recipe = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, tmp_path / "alone", **changes)
    assert train.main(["--config", str(recipe)]) == 0
    expected = launching.log_history(tmp_path / "alone")
    assert [entry["step"] for entry in expected] == [2, 4, 5]
    for step in steps:
        killed = tmp_path / f"killed-{step}"
        shutil.copytree(tmp_path / "alone", killed)
        for late in range(step + 1, 6):
            shutil.rmtree(killed / f"checkpoint-{late}", ignore_errors=True)
        resume = ["--config", str(recipe), "--output_dir", str(killed), "--resume_from_checkpoint", "true"]
        assert train.main(resume) == 0
        launching.assert_same_run(tmp_path / "alone", killed)
        last = json.loads((killed / "trainer_state.json").read_text())["log_history"][-1]
        taken = last["train_steps_per_second"] * last["train_runtime"]
        assert taken == pytest.approx(5 - step, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kills"), [("cpu", 2), ("ddp_cpu", 1)])
def test_a_killed_run_ends_like_an_uninterrupted_run(tmp_path: Path, layout: str, kills: int) -> None:
    rows = launching.write_rows(tmp_path / "rows.jsonl", 8)
    assert len(torture.torture(layout, kills, random.Random(kills), rows, tmp_path)) == kills


@pytest.mark.slow
def test_a_run_killed_at_files_of_a_save_ends_like_an_uninterrupted_run(tmp_path: Path) -> None:
    """A sample of `make torture`: full fine-tuning and LoRA, the reference refreshed, one checkpoint kept."""
    if reason := boundaries.why_not():
        pytest.skip(reason)
    kills, counts = boundaries.kill_everywhere("cpu", 6, random.Random(3), tmp_path / "torture")
    assert len(kills) == 6
    assert len({kill.boundary.kind for kill in kills}) == 6
    assert min(counts.values()) > 30


@pytest.mark.slow
def test_sigterm_then_resume_ends_like_an_uninterrupted_run(tmp_path: Path) -> None:
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
    assert "`--resume_from_checkpoint true`" in said
    (saved,) = output.glob("checkpoint-*")
    assert int(saved.name.partition("-")[2]) % 2 == 0
    assert "Traceback" not in said.split("stopped by SIGTERM")[0]
    assert not (output / "model.safetensors").exists()
    launching.launch("ddp_cpu", recipe, "--resume_from_checkpoint", "true")
    launching.assert_same_run(tmp_path / "alone", output)
