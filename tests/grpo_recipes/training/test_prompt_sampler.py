"""`sampling: informative`: probabilities, draws, the order of rows on each rank, recorded groups, and restarts."""

import random
from collections import defaultdict
from contextlib import nullcontext
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler
from trl import GRPOConfig
from trl.trainer.utils import RepeatSampler

from grpo_recipes import GRPOTrainer
from grpo_recipes.checks.checks import Machine, check
from grpo_recipes.recipe.losses import LOSS_TYPES
from grpo_recipes.recipe.recipe import RecipeError, parse_recipe
from grpo_recipes.recipe.specs import SamplingSpec
from grpo_recipes.runs.checkpoints import read_manifest
from grpo_recipes.runs.files import RunError
from grpo_recipes.training.data_order import EpochSampler
from grpo_recipes.training.prompt_sampler import (
    MEMORY,
    Draw,
    InformativeSampler,
    PromptSampling,
    inclusion,
    quantum_of,
    read_memory,
    systematic,
    varies,
)
from tests.support import launching, short_runs, tiny
from tests.support.errors import refused
from tests.tools import torture

COUNTS = st.lists(st.integers(0, 6), min_size=1, max_size=12).map(np.array)


def spec(**changes: Any) -> SamplingSpec:
    return SamplingSpec.parse({"informative": "biased", **changes})


@settings(deadline=None, max_examples=30)
@given(half=COUNTS, quantum=st.integers(1, 4), exploration=st.floats(0.05, 1), floor=st.floats(0.01, 1))
def test_probabilities_fill_whole_micro_batches(
    half: np.ndarray, quantum: int, exploration: float, floor: float
) -> None:
    unvaried = np.tile(half, quantum)  # a generation holds a multiple of the quantum
    found = inclusion(unvaried, spec(exploration=exploration, floor=floor), quantum)
    wanted = np.array([max(floor, exploration**count) for count in unvaried])
    assert (found >= wanted * (1 - 1e-8)).all(), "no prompt is drawn less often than its probability"
    assert (found <= 1).all()
    size = found.sum()
    assert size == pytest.approx(round(size), abs=1e-9)
    assert round(size) % quantum == 0
    assert size < wanted.sum() + quantum, "no more prompts than fill the quantum"
    assert (found[unvaried == 0] == 1).all()
    order = np.argsort(unvaried)
    assert (np.diff(found[order]) <= 1e-12).all(), "more zero-variance groups, smaller probability"


def test_probabilities_computed_by_hand() -> None:
    assert inclusion(np.array([0, 1, 1, 3]), spec(), 1) == pytest.approx([1, 8 / 9, 8 / 9, 2 / 9])
    assert inclusion(np.array([0, 1, 1, 9]), spec(floor=0.25), 1)[3] == pytest.approx(0.25 * 2 / 1.25)
    assert (inclusion(np.array([0, 0]), spec(), 2) == 1).all()
    for exploration in (0.1, 0.2):  # in float64 the sum is a little more than 2, or 3
        assert inclusion(np.array([0] + [1] * 10), spec(exploration=exploration, floor=0.05), 1)[0] == 1


@settings(deadline=None, max_examples=30)
@given(counts=COUNTS, quantum=st.sampled_from([1, 2]))
def test_each_prompt_is_drawn_with_exactly_its_probability(counts: np.ndarray, quantum: int) -> None:
    """All starts between two neighbouring ends of units give the same draw, so all draws can be listed."""
    probabilities = inclusion(np.tile(counts, quantum), spec(), quantum)
    chances = np.zeros(len(probabilities))
    for drawn, chance in all_draws(probabilities):
        assert drawn.sum() == round(probabilities.sum())
        chances += chance * drawn
    assert chances == pytest.approx(probabilities, abs=1e-12)


def all_draws(probabilities: np.ndarray) -> list[tuple[np.ndarray, float]]:
    """Return every draw of `systematic` with its probability."""
    ends = np.cumsum(probabilities[probabilities < 1])
    cuts = sorted({0.0, 1.0, *(end % 1.0 for end in ends)})
    return [(systematic(probabilities, (low + high) / 2), high - low) for low, high in pairwise(cuts)]


def test_every_start_draws_the_same_number_of_prompts() -> None:
    for size in (3, 30, 10_000):
        probabilities = inclusion(np.arange(size) % 5, spec(), 1)
        for start in (0.0, 1e-17, 0.5, 1 - 2**-53):
            assert systematic(probabilities, start).sum() == round(probabilities.sum())


def test_a_prompt_of_probability_1_is_drawn_despite_rounding() -> None:
    """The start lies just below the end of the preceding unit, where start + 1 and end + 1 round to one number."""
    for share in np.linspace(0.01, 0.99, 99):
        assert systematic(np.array([share, 1.0, 1 - share]), np.nextafter(share, 0))[1]


@settings(deadline=None, max_examples=30)
@given(
    per_device=st.integers(1, 12), steps=st.integers(1, 4), processes=st.integers(1, 4), generations=st.integers(2, 8)
)
def test_the_quantum_fills_equal_micro_batches(per_device: int, steps: int, processes: int, generations: int) -> None:
    rows = per_device * steps * processes
    if rows % generations:
        return
    prompts = rows // generations
    quantum = quantum_of(prompts, generations, steps, processes)
    assert prompts % quantum == 0
    splits = Fraction(per_device * steps, generations).denominator > 1
    fitting = [
        count
        for count in range(1, prompts + 1)
        if count * generations % (steps * processes) == 0 and (splits or count % processes == 0)
    ]
    assert fitting == list(range(quantum, prompts + 1, quantum))


def sampler(prompts: int = 12, processes: int = 1, **changes: Any) -> InformativeSampler:
    given_ = {"mini_repeat_count": 2, "batch_size": 4, "repeat_count": 2, "seed": 7, **changes}
    return InformativeSampler(RepeatSampler(range(prompts), **given_), spec(), processes, processes)


@settings(deadline=None, max_examples=50)
@given(prompts=st.integers(4, 30), epoch=st.integers(0, 4), shuffle=st.booleans(), processes=st.sampled_from([1, 2]))
def test_the_order_is_stock_if_every_prompt_is_drawn(prompts: int, epoch: int, shuffle: bool, processes: int) -> None:
    ours = sampler(prompts, processes, shuffle=shuffle)
    plain = EpochSampler(ours)
    ours.epoch = plain.epoch = epoch
    assert list(ours) == list(plain)
    assert len(ours) == len(plain)


@pytest.mark.parametrize("processes", [1, 2])
def test_all_ranks_make_the_same_draw_and_get_its_rows_first(processes: int) -> None:
    seen = []
    for rank in range(processes):
        ours = sampler(processes=processes)
        ours.epoch = 2
        ours.unvaried[1:] = 9
        plain = EpochSampler(ours)
        plain.epoch = 2
        batches = list(BatchSamplerShard(BatchSampler(ours, 8 // processes, drop_last=False), processes, rank))
        seen.append((ours.draws, batches))
    order = list(plain)
    for number, draw in enumerate(seen[0][0]):
        for draws, _ in seen:
            assert (draws[number].drawn == draw.drawn).all()
            assert (draws[number].prompts == draw.prompts).all()
        drawn = [row for row in draw.prompts[draw.drawn] for _ in range(2)]
        assert draw.share < 1
        for repeat in range(2):
            parts = [batches[2 * number + repeat] for _, batches in seen]
            size = len(drawn) // processes
            assert [row for part in parts for row in part[:size]] == drawn
            rows = sorted(row for part in parts for row in part)
            assert rows == sorted(order[number * 16 : number * 16 + 8]), "the generation of TRL's order"


def test_every_epoch_generation_and_seed_has_a_draw_of_its_own() -> None:
    """In an order and with probabilities that never change, so that only the start of a draw differs."""
    ours = sampler(3 * 128, batch_size=128, shuffle=False)
    ours.unvaried[:] = np.tile(np.random.default_rng(0).integers(0, 7, 128), 3)
    found = []
    for ours.seed in (5, 6):
        for ours.epoch in range(4):
            list(ours)
            assert len(ours.draws) == 3
            found += [tuple(draw.drawn) for draw in ours.draws]
    # 24 independent starts, in about 100 intervals of one draw each.
    assert len(set(found)) > 16


def trained(folder: Path, **changes: Any) -> Any:
    """Return a stand-in for TRL's trainer whose loss is a sum over prompts."""
    args = GRPOConfig(output_dir=str(folder), loss_type="grpo", report_to="none", use_cpu=True, bf16=False)
    values = {
        "args": args, "aux_loss_enabled": False, "reward_func_names": ["one", "other"], "train_dataset": [],
        "reward_weights": torch.ones(2), "multi_objective_aggregation": "sum_then_normalize",
        "accelerator": SimpleNamespace(process_index=0), "_metrics": {"train": defaultdict(list)},
        "_logs": {"prompt": ["old"], "rewards": {"one": [9.0], "other": [9.0]}}, "add_callback": lambda added: None,
        "checkpoints": SimpleNamespace(resumed_from=None),
    }  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


@pytest.fixture
def sampling(tmp_path: Path) -> PromptSampling:
    """Return the callback of a trainer, with a sampler."""
    made = PromptSampling(trained(tmp_path), spec(informative="unbiased"))
    made.sampler = sampler()
    return made


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_resumed_epoch_continues_with_the_generation_that_follows(
    accumulation: int, sampling: PromptSampling
) -> None:
    """All steps of three epochs are counted, whose last step may be short, with 4 micro-batches per generation."""
    for generations in (2, 3):
        sampling.sampler, step = sampler(4 * generations, repeat_count=4), 0
        args: Any = SimpleNamespace(gradient_accumulation_steps=accumulation)
        for epoch in range(3):
            micro_batches = list(range(4 * generations))
            for first in range(0, len(micro_batches), accumulation):
                if first % 4 == 0:  # a save is allowed only where a generation ends
                    state: Any = SimpleNamespace(global_step=step, epoch=epoch + first / len(micro_batches))
                    sampling.on_epoch_begin(args, state)
                    assert sampling.position == first // 4
                step += 1


def test_a_probability_that_equals_the_floor_is_not_kept_by_it() -> None:
    ours = sampler()
    ours.spec = spec(exploration=0.5, floor=0.25)
    ours.unvaried[:] = np.arange(12) % 4
    list(ours)
    for draw in ours.draws:
        assert (draw.at_floor == (ours.unvaried[draw.prompts] == 3)).all(), "0.125, where 2 groups give 0.25"


def test_groups_with_variance() -> None:
    nan = np.nan
    rows = [[0.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [nan, nan, nan], [nan, 2.0, nan], [nan, 2.0, 3.0]]
    assert varies(np.array(rows)[..., None])[:, 0].tolist() == [True, False, False, False, False, True]
    for size in (1e-9, 1.0, 1e9):  # differences below the rounding of float32 are none
        groups = size * np.array([[1.0, 1.0 + 1e-7], [1.0, 1.0 + 1e-4], [-1.0, -1.0 - 1e-7], [-1.0, 1.0], [0.0, 1.0]])
        assert varies(groups[..., None])[:, 0].tolist() == [False, True, False, True, True]


def test_a_resumed_launch_continues_with_the_memory_of_its_checkpoint(
    sampling: PromptSampling, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    args: Any = SimpleNamespace(output_dir=tmp_path, should_save=False)
    state: Any = SimpleNamespace(global_step=3)
    checkpoint, checkpoints = tmp_path / "checkpoint-3", sampling.trainer.checkpoints
    checkpoint.mkdir()
    sampling.sampler = ours = sampler(6)
    ours.unvaried[:] = [0, 3, 1, 0, 0, 2]
    sampling.on_save(args, state)
    assert not list(checkpoint.iterdir()), "another rank writes it"
    args.should_save = True
    sampling.on_save(args, state)
    for checkpoints.resumed_from, found in ((None, [0] * 6), (checkpoint, [0, 3, 1, 0, 0, 2])):
        ours.unvaried[:] = 0
        sampling.on_train_begin(args, state)
        assert ours.unvaried.tolist() == found
    assert not caplog.messages
    (checkpoint / MEMORY).unlink()  # saved by a run without `sampling`
    sampling.on_train_begin(args, state)
    (said,) = caplog.messages
    assert MEMORY in said
    sampling.sampler = None  # a trainer that only evaluates asks for none
    sampling.on_train_begin(args, state)
    sampling.on_save(args, state)
    assert not list(checkpoint.iterdir())


def test_a_damaged_prompts_file_is_refused_by_name(tmp_path: Path) -> None:
    damages = ["", "[1, 2", "{}", *(f'{{"groups_without_variance": {counts}}}' for counts in ([1], [1, -1], [1, 2, 3]))]
    for damage in damages:
        (tmp_path / MEMORY).write_text(damage)
        with pytest.raises(RunError, match=MEMORY):
            read_memory(tmp_path / MEMORY, 2)


# Values of the recipe key.


def recipe_with(folder: Path, **changes: Any) -> Any:
    rows = launching.write_rows(folder / "rows.jsonl", 8)
    path = launching.write_recipe(folder / "mine.yaml", folder, rows, folder / "run", **changes)
    return parse_recipe(["--config", str(path)])


def test_the_key_takes_a_word_or_a_mapping(tmp_path: Path) -> None:
    assert recipe_with(tmp_path).sampling is None
    assert recipe_with(tmp_path, sampling="informative").sampling == spec()
    unbiased = recipe_with(tmp_path, sampling={"informative": "unbiased"}, loss_type="grpo").sampling
    assert unbiased.is_unbiased
    path = tmp_path / "mine.yaml"
    given_ = parse_recipe(["--config", str(path), "--sampling", "informative", "--sampling.floor", "0.3"])
    assert given_.sampling == spec(floor=0.3)


def test_losses_with_a_divisor_that_depends_on_the_draw_are_refused(tmp_path: Path) -> None:
    needed = {"cispo": {"epsilon_high": 5.0}, "luspo": {"importance_sampling_level": "sequence"}}
    for loss_type in LOSS_TYPES:
        given_ = {"sampling": {"informative": "unbiased"}, "loss_type": loss_type, **needed.get(loss_type, {})}
        fits = loss_type in ("grpo", "dr_grpo", "luspo", "sapo")
        with nullcontext() if fits else refused("mine.yaml", "`loss_type", loss_type, by=RecipeError):
            recipe_with(tmp_path, **given_)
        recipe_with(tmp_path, **{**given_, "sampling": "informative"})


def test_settings_whose_loss_is_no_sum_over_prompts_are_refused(tmp_path: Path) -> None:
    table: list[tuple[dict[str, Any], str, Any]] = [
        ({"beta": 0.04}, "`beta", 0.04),
        ({"scale_rewards": "batch"}, "`scale_rewards", "group"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "`multi_objective_aggregation", "sum_then_normalize"),
        ({"top_entropy_quantile": 0.2}, "`top_entropy_quantile", 0.2),
        ({"entropy_coef": 0.1}, "`entropy_coef", 0.1),
        ({"sampling": {"informative": "unbiased", "floor": 0}}, "`sampling.floor`", 0.0),
        ({"sampling": {"exploration": 1.5}}, "`sampling.exploration`", 1.5),
        ({"sampling": "informativ"}, "`sampling`", "informative"),
    ]
    for changes, key, figure in table:
        with refused("mine.yaml", key, figure, by=RecipeError):
            recipe_with(tmp_path, **{"sampling": {"informative": "unbiased"}, "loss_type": "grpo", **changes})


# Runs.


def test_sampling_is_refused_with_recorded_responses(tmp_path: Path) -> None:
    path = tmp_path / "offline.yaml"
    recipe = parse_recipe(["--config", "offline-scored-gpt2", "--sampling", "informative", "--output_dir", str(path)])
    with refused("", "`sampling`", "`offline`", by=RecipeError):
        check(recipe, Machine(1, bf16=True))


@pytest.mark.slow
def test_a_killed_run_on_two_processes_makes_the_draws_of_an_uninterrupted_run(tmp_path: Path) -> None:
    rows = launching.write_rows(tmp_path / "rows.jsonl", 8)
    changes = {"sampling": "informative", "rewards": ["tests.support.launching.varies_for_odd_numbers"]}
    assert len(torture.torture("ddp_cpu", 1, random.Random(1), rows, tmp_path, **changes)) == 1
    generated = [entry.get("prompts/generated") for entry in launching.log_history(tmp_path / "alone")]
    assert min(share for share in generated if share is not None) == 0.5


def test_a_trainer_draws_prompts_in_a_training_and_not_in_an_evaluation(tmp_path: Path) -> None:
    """Two prompts have one reward each, and are drawn less often from the second epoch on."""

    def constant_for_some(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        texts = zip(prompts, completions, strict=True)
        return [0.0 if prompt[0] in "01" else sum(map(ord, text)) % 97 for prompt, text in texts]

    changes: dict[str, Any] = {"beta": 0.0, "loss_type": "grpo", "max_steps": 2, "per_device_train_batch_size": 16}
    changes |= {"save_strategy": "steps", "save_steps": 2, "log_completions": True}
    args = short_runs.arguments(tmp_path, **changes, eval_strategy="steps", eval_steps=2)
    rows = short_runs.PROMPTS.select(range(4))
    more: dict[str, Any] = {"rewards": constant_for_some, "rows": rows, "eval_dataset": rows}
    made = short_runs.trainer(
        GRPOTrainer, tiny.policy(), args, sampling={"informative": "biased", "exploration": 0.3}, **more
    )
    made.train()
    history = made.state.log_history
    shares = {entry["step"]: entry["prompts/generated"] for entry in history if "prompts/generated" in entry}
    assert [*shares] == [1, 2]
    assert shares[2] < shares[1] == 1.0
    for step, share in shares.items():
        table = pd.read_parquet(tmp_path / "completions" / f"completions_{step:05d}.parquet")
        assert len(table) == 16 * share, "only what was generated is in the table"
    assert len([entry for entry in history if "eval_reward" in entry]) == 1
    assert made._prompts.sampler.unvaried[:2].min() > 0 == made._prompts.sampler.unvaried[2:].max()
    manifest = read_manifest(tmp_path / "checkpoint-2")
    assert manifest is not None
    assert MEMORY in manifest.files


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_generates_its_part_of_the_draw_and_weights_every_token(rank: int, sampling: PromptSampling) -> None:
    """Two rewards sum to 1 in every group but the last, so only the last group has variance."""
    settings_ = {"mini_repeat_count": 2, "batch_size": 8, "repeat_count": 1, "seed": 7}
    ours = InformativeSampler(RepeatSampler(range(8), **settings_), sampling.spec, 2, 2)
    ours.unvaried[4:] = 2
    rows = [{"prompt": row} for row in list(ours)]
    (draw,) = ours.draws
    drawn = np.repeat(draw.prompts[draw.drawn], 2)
    half = len(drawn) // 2
    assert 4 < len(drawn) < 16
    sampling.sampler, sampling.position, ours.draws = ours, 2, [draw] * 3
    trainer = sampling.trainer
    trainer.train_dataset, trainer.accelerator.process_index = [{"prompt": row} for row in range(8)], rank

    def generate(given_: Any) -> dict[str, Any]:
        assert [row["prompt"] for row in given_] == drawn[rank * half : (rank + 1) * half].tolist()
        assert trainer._logs["prompt"] == []
        one = [float(place % 2) for place in range(len(drawn))]
        other = [1.0 - reward for reward in one[:-2]] + [0.0, 0.0]
        trainer._logs["rewards"] = {"one": one, "other": other}
        return {"advantages": torch.full((len(given_), 3), 2.0)}

    size = len(rows) // 2
    advantages = sampling.generate(rows[rank * size : (rank + 1) * size], generate)["advantages"]
    assert sampling.position == 3
    assert trainer._metrics["train"] == {"prompts/generated": [draw.share], "prompts/kept_by_floor": [0.0]}
    weight = {row: draw.share / chance for row, chance in zip(draw.prompts, draw.probabilities, strict=True)}
    expected = [[2.0 * weight[row]] * 3 for row in drawn[rank * half : (rank + 1) * half]]
    assert advantages.numpy() == pytest.approx(np.array(expected), rel=1e-6)
    assert advantages.dtype == torch.float32
    assert [ours.unvaried[row] for row in drawn[::2]] == [1 if row < 4 else 3 for row in drawn[:-2:2]] + [0]


def generated(sampling: PromptSampling, draw: Draw, logged: dict[str, list[float]]) -> list[float]:
    """Generate a draw of the first prompts, two completions each, whose rewards are logged. Return the advantages."""
    trainer, (place, *_) = sampling.trainer, draw.prompts[draw.drawn]
    trainer.train_dataset = [{"prompt": row} for row in range(12)]
    assert sampling.sampler is not None
    sampling.sampler.draws, sampling.position = [draw], 0

    def generate(rows: Any) -> dict[str, Any]:
        trainer._logs["rewards"] = {name: list(rewards) for name, rewards in logged.items()}
        return {"advantages": torch.ones(len(rows))}

    return sampling.generate([{"prompt": place}] * 8, generate)["advantages"].tolist()


def test_the_metrics_and_weights_of_a_draw(sampling: PromptSampling) -> None:
    """Two of four prompts are at the floor, of which one is drawn with two others."""
    drawn, at_floor = np.array([False, True, True, True]), np.array([True, True, False, False])
    draw = Draw(np.arange(4), np.array([0.25, 0.5, 0.8, 1.0]), drawn, at_floor)
    rewards = {"one": [0.0, 1.0] * 3, "other": [0.0] * 6}
    assert generated(sampling, draw, rewards) == pytest.approx([1.5, 1.5, 0.75 / 0.8, 0.75 / 0.8, 0.75, 0.75])
    sampling.spec = spec(informative="biased")
    assert generated(sampling, draw, rewards) == pytest.approx([0.75] * 6)
    assert sampling.trainer._metrics["train"] == {
        "prompts/generated": [0.75] * 2, "prompts/kept_by_floor": [1 / 3] * 2
    }  # fmt: skip


def test_groups_vary_by_the_weighted_sum_of_their_rewards(sampling: PromptSampling) -> None:
    nan = float("nan")
    # In pairs: sums of 4 and 4, then one unscored reward, no score at all, and the same scores.
    one, other = [1.0, 2.0, nan, nan, nan, nan, 3.0, 3.0], [4.0, 0.0, 1.0, 2.0, nan, nan, 1.0, 1.0]
    draw, trainer = Draw(np.arange(4), np.ones(4), np.ones(4, bool), np.zeros(4, bool)), sampling.trainer
    for aggregation, weights, varied in (
        ("sum_then_normalize", [2.0, 0.5], [False, True, False, False]),
        ("normalize_then_sum", [2.0, 0.5], [True, True, False, False]),
        ("normalize_then_sum", [2.0, 0.0], [True, False, False, False]),  # without weight there is no advantage
    ):
        trainer.multi_objective_aggregation, trainer.reward_weights = aggregation, torch.tensor(weights)
        sampling.sampler = ours = sampler()
        generated(sampling, draw, {"one": one, "other": other})
        assert (ours.unvaried[:4] == 0).tolist() == varied


def test_rows_that_were_not_drawn_raise(sampling: PromptSampling) -> None:
    draw = Draw(np.arange(4), np.ones(4), np.ones(4, bool), np.zeros(4, bool))
    assert sampling.sampler is not None
    sampling.sampler.draws = [draw]
    sampling.trainer.train_dataset = [{"prompt": "a"}, {"prompt": "b"}]
    with pytest.raises(RuntimeError, match="`sampling`"):
        sampling.generate([{"prompt": "b"}], lambda rows: {})


def test_a_training_has_a_sampler_of_its_own_geometry(sampling: PromptSampling) -> None:
    sampling.trainer.args = SimpleNamespace(steps_per_generation=2, world_size=2)
    found = sampling.sampler_like(RepeatSampler(range(24), mini_repeat_count=3, batch_size=4, repeat_count=2, seed=7))
    assert sampling.sampler is found
    # The rows of a prompt, 3, fill 4 micro-batches equally if there are 4 prompts.
    assert (found.spec, found.quantum, found.processes) == (sampling.spec, 4, 2)
    assert (found.batch_size, found.mini_repeat_count, found.repeat_count, found.seed) == (4, 3, 2, 7)


def test_trainers_whose_prompts_cannot_be_remembered_are_refused(tmp_path: Path) -> None:
    for changes, key in (
        ({"reward_func_names": ["one", "one"]}, "`sampling`"),
        ({"train_dataset": iter([])}, "`sampling`"),
        ({"aux_loss_enabled": True}, "router_aux_loss_coef"),
    ):
        with refused("", key):
            PromptSampling(trained(tmp_path, **changes), spec(informative="unbiased"))
