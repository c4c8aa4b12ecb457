"""Batch geometry compared with TRL's own configuration, sampler and data loader."""

from dataclasses import fields
from itertools import chain
from types import SimpleNamespace

import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler
from transformers.trainer_utils import IntervalStrategy
from trl import GRPOConfig
from trl.trainer.utils import RepeatSampler

from grpo_recipes.checks.geometry import Geometry
from grpo_rewards.errors import UserError
from tests.support.errors import refused

DEFAULTS = {field.name: field.default for field in fields(GRPOConfig)}


def geometry(num_processes: int = 1, **config: object) -> Geometry:
    return Geometry.from_config(SimpleNamespace(**{**DEFAULTS, **config}), num_processes)


def sampled_ranks(geometry: Geometry, num_prompts: int) -> list[list[list[int]]]:
    """Return the prompt indices of each batch per rank, from TRL's sampler and accelerate's shards, as in a run."""

    def batches(rank: int) -> list[list[int]]:
        sampler = RepeatSampler(
            range(num_prompts),
            mini_repeat_count=geometry.num_generations,
            batch_size=geometry.prompts_per_generation,
            repeat_count=geometry.num_iterations * geometry.steps_per_generation,
            seed=0,
        )
        batched = BatchSampler(sampler, batch_size=geometry.completions_per_rank, drop_last=False)
        return list(BatchSamplerShard(batched, geometry.num_processes, rank))

    return [batches(rank) for rank in range(geometry.num_processes)]


layouts = st.builds(
    dict,
    num_processes=st.integers(1, 3),
    per_device_train_batch_size=st.integers(1, 6),
    gradient_accumulation_steps=st.integers(1, 4),
    steps_per_generation=st.none() | st.integers(1, 4),
    num_generations=st.integers(2, 4),
    num_iterations=st.integers(1, 2),
)


@settings(deadline=None, max_examples=80)
@given(layout=layouts, prompts=st.integers(1, 40))
def test_the_geometry_predicts_the_prompts_that_trl_samples(layout: dict, prompts: int) -> None:
    try:
        predicted = geometry(**layout)
        predicted.check_dataset(prompts)
    except UserError:
        return
    ranks = sampled_ranks(predicted, prompts)
    rounds = predicted.num_iterations * predicted.steps_per_generation
    assert {len(rank) for rank in ranks} == {predicted.generations_per_epoch(prompts) * rounds}
    generation = [rank[0] for rank in ranks]
    rows = list(chain.from_iterable(generation))
    assert len(set(rows)) == predicted.prompts_per_generation
    assert len(rows) == predicted.generation_batch_size
    split = any(set(one) & set(other) for one in generation for other in generation if one is not other)
    assert predicted.splits_groups == split


random_layouts = st.fixed_dictionaries(
    {
        "num_processes": st.integers(1, 9),
        "per_device_train_batch_size": st.integers(1, 12),
        "gradient_accumulation_steps": st.integers(1, 5),
        "num_generations": st.integers(2, 9),
        "num_iterations": st.integers(1, 3),
    },
    optional={"steps_per_generation": st.integers(1, 5), "generation_batch_size": st.integers(1, 96)},
)


@settings(deadline=None, max_examples=100)
@given(layout=random_layouts)
def test_trl_agrees_on_what_is_refused(layout: dict) -> None:
    """For random settings both refuse or accept, with one size of the generation batch."""
    processes = layout.pop("num_processes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOConfig, "world_size", property(lambda self: processes))
        try:
            args = GRPOConfig(output_dir="unused", use_cpu=True, bf16=False, report_to="none", **layout)
        except ValueError:
            args = None
    try:
        predicted = geometry(processes, **layout)
    except UserError:
        predicted = None
    assert (predicted is None) == (args is None)
    if predicted is None or args is None:
        return
    assert predicted.generation_batch_size == args.generation_batch_size


def test_a_fraction_of_an_epoch_is_rounded_up_to_a_step() -> None:
    """transformers: `math.ceil(args.num_train_epochs * num_update_steps_per_epoch)`."""
    layout = geometry(per_device_train_batch_size=4, gradient_accumulation_steps=1, num_generations=4)
    assert layout.optimizer_steps_per_epoch(3) == 3
    for most, epochs, steps in ((-1, 1, 3), (-1, 0.5, 2), (0, 1.5, 5), (-1, 2, 6), (1, 2, 1), (7, 2, 7)):
        assert layout.optimizer_steps(SimpleNamespace(max_steps=most, num_train_epochs=epochs), 3) == steps


@pytest.mark.parametrize(
    ("config", "key", "fits"),
    [
        ({"per_device_train_batch_size": 12}, "per_device_train_batch_size", 16),
        ({"num_processes": 4, "per_device_train_batch_size": 3}, "per_device_train_batch_size", 4),
        ({"generation_batch_size": 20}, "generation_batch_size", 24),
        ({"generation_batch_size": 16, "steps_per_generation": 2}, "generation_batch_size", ""),
        ({"eval_strategy": "steps", "per_device_eval_batch_size": 5}, "per_device_eval_batch_size", 8),
        ({"per_device_train_batch_size": 6, "num_generations": 6}, "", ""),
        ({"eval_strategy": "steps", "per_device_eval_batch_size": 6, "num_generations_eval": 3}, "", ""),
        ({"eval_strategy": "no", "per_device_eval_batch_size": 5}, "", ""),
        ({"eval_strategy": IntervalStrategy.NO, "per_device_eval_batch_size": 5}, "", ""),
        ({"eval_strategy": "steps", "per_device_eval_batch_size": 4, "num_processes": 2}, "", ""),
    ],
)
def test_an_error_names_a_size_that_divides(config: dict, key: str, fits: object) -> None:
    if not key:
        geometry(**config)
        return
    with refused(f"`{key}`", fits):
        geometry(**config)


def test_a_single_response_has_nothing_to_be_compared_with() -> None:
    def compared(**config: object) -> Geometry:
        values = SimpleNamespace(**{**DEFAULTS, "gradient_accumulation_steps": 1, **config})
        return Geometry.from_config(values, 1, compares_whole_batch=True)

    assert compared(per_device_train_batch_size=2).num_generations == 1
    with refused("", "1"):
        compared(per_device_train_batch_size=1)
    geometry(per_device_train_batch_size=1, num_generations=1, steps_per_generation=1)


@settings(deadline=None, max_examples=60)
@given(layout=layouts, prompts=st.integers(1, 30))
def test_the_steps_that_end_a_generation_are_those_of_a_run_step_by_step(layout: dict, prompts: int) -> None:
    """Three epochs are counted out: each optimizer step takes its micro-batches, and an epoch's last one the rest."""
    try:
        made = geometry(**layout)
        made.check_dataset(prompts)
    except UserError:
        return
    a_generation = made.steps_per_generation * made.num_iterations
    of_epoch = prompts // made.prompts_per_generation * a_generation
    step = 0
    for _ in range(3):
        done = 0
        while done < of_epoch:
            step, done = step + 1, min(done + made.gradient_accumulation_steps, of_epoch)
            assert made.ends_generation(step, prompts) == (done % a_generation == 0 or done == of_epoch)
    assert step == 3 * made.optimizer_steps_per_epoch(prompts)


def test_the_suggested_batch_size_is_accepted() -> None:
    for generations in range(2, 17):
        for batch in range(1, 20):
            for processes in (1, 2, 7, 8):
                try:
                    geometry(num_processes=processes, per_device_train_batch_size=batch, num_generations=generations)
                except UserError as error:
                    fits = int(str(error).rsplit(" ", 1)[1])
                    assert fits >= batch
                    geometry(num_processes=processes, per_device_train_batch_size=fits, num_generations=generations)


def test_the_counts_of_an_epoch_are_those_that_the_ranks_sample() -> None:
    """The last prompt of seven fills no generation batch, and two micro-batches on each of two ranks make a step."""
    layout = geometry(
        2, per_device_train_batch_size=3, num_generations=2, steps_per_generation=1, gradient_accumulation_steps=2
    )
    ranks = sampled_ranks(layout, 7)
    completions = sum(len(batch) for rank in ranks for batch in rank)
    assert layout.completions_per_optimizer_step == sum(len(batch) for rank in ranks for batch in rank[:2])
    assert layout.epoch(7, 100) == {
        "prompts": 7,
        "generations": len(ranks[0]),
        "optimizer_steps": 1,
        "completions": completions,
        "max_tokens": 100 * completions,
    }


HALVES = geometry(
    per_device_train_batch_size=2, gradient_accumulation_steps=1, steps_per_generation=2, num_generations=4
)
"""Layout in which two optimizer steps train on each generation batch, so that eight prompts make sixteen steps."""

SAVES = {
    **{"max_steps": -1, "num_train_epochs": 1, "save_strategy": "steps", "save_only_model": False},
    **{"eval_strategy": "no", "eval_steps": None, "logging_steps": 1},
}


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        ({"save_steps": 1}, True),  # 1 is one step, not the whole run
        ({"save_steps": 2}, False),
        ({"save_steps": 0.5}, False),
        ({"save_steps": 0.05}, True),
        ({"save_steps": 0.07}, False),  # 1.12 steps are rounded up to 2
        ({"save_steps": 1, "eval_strategy": "epoch"}, True),
        ({"save_steps": 100}, False),
        ({"save_strategy": "best", "eval_strategy": "epoch"}, False),  # an epoch ends with a generation batch
        ({"save_steps": 1, "save_only_model": True}, False),  # no run can resume from it
        ({"save_steps": 1, "save_strategy": "epoch"}, False),
        # The best is saved after an evaluation, which follows each log entry unless `eval_steps` says otherwise.
        ({"save_strategy": "best", "eval_strategy": "steps"}, True),
        ({"save_strategy": "best", "eval_strategy": "steps", "logging_steps": 2}, False),
        ({"save_strategy": "best", "eval_strategy": "steps", "logging_steps": 2, "eval_steps": 1}, True),
    ],
)
def test_a_save_inside_a_generation_batch_is_refused_with_an_interval_that_fits(change: dict, is_refused: bool) -> None:
    config = SimpleNamespace(**{**SAVES, **change})
    assert HALVES.optimizer_steps_per_epoch(8) == 16
    if is_refused:
        key = "eval_steps" if config.save_strategy == "best" else "save_steps"
        with refused(f"`{key}`", f"`{key}` to 2"):
            HALVES.check_saves(config, 8)
    else:
        HALVES.check_saves(config, 8)


def test_without_an_interval_that_fits_saves_follow_each_epoch() -> None:
    for prompts, interval in ((1, 1), (2, 3)):
        assert HALVES.optimizer_steps_per_epoch(prompts) == 2 * prompts
        with refused("", "`save_strategy: epoch`"):
            HALVES.check_saves(SimpleNamespace(**SAVES, save_steps=interval), prompts)
