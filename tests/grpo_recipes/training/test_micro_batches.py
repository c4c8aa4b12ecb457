"""Regrouped micro-batches compared with stock TRL: the gradient of each optimizer step is the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MixtralConfig, PreTrainedModel
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.recipe.losses import LOSS_TYPES
from grpo_recipes.recipe.specs import MicroBatching
from grpo_recipes.training import micro_batches
from grpo_recipes.training.micro_batches import Exactness, asked_layout, exactness, window_size
from grpo_recipes.training.packing import Layout
from grpo_recipes.training.step_plan import EMPTY
from tests.support import device
from tests.support.errors import refused
from tests.support.grids import only
from tests.support.recorded import Recording, compare, gradients, make_trainer, model

LIMIT = 1e-5
UNEVEN = Recording.random(seed=1, zero=(2,))
WINDOWS = {
    "one window": {"gradient_accumulation_steps": 4},
    "two windows in a generation": {"gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "windows across generations": {"gradient_accumulation_steps": 6, "steps_per_generation": 4, "generations": 3},
    "three passes": {"gradient_accumulation_steps": 4, "num_iterations": 3},
    "one micro-batch": {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 16},
    "one row in a micro-batch": {"gradient_accumulation_steps": 16, "per_device_train_batch_size": 1},
}
small = partial(model, num_hidden_layers=1)
SIZES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}


# ---- The same gradient


TRUNCATED = Recording.random(seed=1, zero=(2,))
for group in TRUNCATED.completions:  # no end in it
    group[0][-1] = 7
EQUAL = Recording.random(seed=2)
EQUAL.prompts = [[*prompt, *[9] * 20][:20] for prompt in EQUAL.prompts]
EQUAL.completions = [[[*(c[:-1] + [8] * 12)[:11], 1] for c in group] for group in EQUAL.completions]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
OPTIONS: dict[str, dict[str, Any]] = {
    "entropy bonus": {"entropy_coef": 0.05},
    "entropy quantile": {"top_entropy_quantile": 0.4},
    "off-policy mask": {"off_policy_mask_threshold": 0.05, "num_iterations": 3},
    "truncated": {"mask_truncated_completions": True},
    "rewards by batch": {"scale_rewards": "batch"},
    "rewards as they are": {"scale_rewards": "none"},
    "off": {"micro_batching": "off"},
    "zero advantages kept": {"micro_batching": {"skip_zero_advantage": False}},
}


def cases() -> dict[str, tuple[Recording, Callable[[], PreTrainedModel], dict[str, Any]]]:
    """Return the whole grid: recording, model and settings, by name."""
    found: dict[str, tuple[Recording, Callable[[], PreTrainedModel], dict[str, Any]]] = {}
    three = {"num_iterations": 3, "epsilon_high": 0.28}
    for loss, beta, layout in product(LOSS_TYPES, (0.0, 0.04), ("packed", "trimmed")):
        # VESPO's weights are powers of a whole row's ratio: on some CPUs float32 rounds them by more than the limit.
        config = {"loss_type": loss, "beta": beta, "micro_batching": {"layout": layout}, **three}
        found[f"{loss}, beta {beta}, {layout}"] = UNEVEN, lambda: small().double(), config
    for loss in ("grpo", "luspo", "bnpo", "dapo"):
        options = {"importance_sampling_level": "sequence", "num_iterations": 3, "delta": 1.5}
        found[f"{loss}, sequences"] = UNEVEN, small, {"loss_type": loss, **options}
    for loss in ("grpo", "dapo", "bnpo"):
        for name, options in WINDOWS.items():
            found[f"{loss}, {name}"] = UNEVEN, small, {"loss_type": loss, **options}
        for name, options in OPTIONS.items():
            found[f"{loss}, {name}"] = TRUNCATED, small, {"loss_type": loss, **options}
    options = {**WINDOWS["windows across generations"], **OPTIONS["truncated"]}
    found["bnpo, truncated, across generations"] = TRUNCATED, small, {"loss_type": "bnpo", **options}
    found["router loss"] = UNEVEN, lambda: model(MixtralConfig, sliding_window=None, **EXPERTS), {}
    for layout in ("packed", "trimmed"):
        found[f"equal lengths, {layout}"] = EQUAL, model, {"micro_batching": {"layout": layout}}
    return found


def too_far(names: Sequence[str], folder: Path) -> list[str]:
    """Return the cases whose gradient is not TRL's."""
    grid, failed = cases(), []
    for name in names:
        recording, build, config = grid[name]
        if compare(recording, folder, build, **{**SIZES, **config}) > device.tolerance(LIMIT):
            failed.append(name)
    return failed


QUICK = ("grpo, beta 0.04, packed", "bnpo, truncated, across generations", "grpo, entropy bonus")


def test_the_gradient_is_trls(tmp_path: Path) -> None:
    assert too_far(QUICK, tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_gradient_is_trls_in_the_whole_grid(tmp_path: Path) -> None:
    assert too_far([name for name in cases() if name not in QUICK], tmp_path) == []


@pytest.mark.gpu
@device.slow_on_cpu
@pytest.mark.skipif(device.NAME == "cpu", reason="the whole grid has these cases")
def test_the_gradient_of_each_window_on_a_device(tmp_path: Path) -> None:
    assert too_far([f"grpo, {name}" for name in WINDOWS], tmp_path) == []


class FarOldPolicy(GRPOTrainer):
    """A trainer whose zero-advantage rows were sampled by a policy with a log-probability near minus infinity."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        batch["old_per_token_logps"][batch["advantages"] == 0] = -300.0
        return batch


def test_the_ratio_of_a_masked_row_does_not_overflow(tmp_path: Path) -> None:
    """exp(300) is infinite in float32, and infinity times a mask of 0 is NaN, which would be logged as the loss."""
    trainer = make_trainer(FarOldPolicy, UNEVEN, small(), tmp_path, **SIZES, num_iterations=2)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 4
    for _ in range(4):
        loss = trainer.compute_loss(trainer.model, trainer._prepare_inputs(UNEVEN.rows()))
        loss.backward()
        assert loss.isfinite()
        trainer._step += 1
    assert all(parameter.grad.isfinite().all() for parameter in trainer.model.parameters())


@pytest.mark.parametrize("loss_type", only(["grpo"], LOSS_TYPES))
def test_a_batch_of_zero_advantages_still_makes_a_step(loss_type: str, tmp_path: Path) -> None:
    nothing = Recording.random(seed=1, zero=range(4))
    for layout in ("packed", "trimmed"):
        options = {"loss_type": loss_type, "micro_batching": {"layout": layout}}
        trainer = make_trainer(GRPOTrainer, nothing, small(), tmp_path, **SIZES, **options)
        (step,) = gradients(trainer, nothing.rows())
        assert step.keys() == {name for name, _ in trainer.model.named_parameters()}
        assert not any(gradient.any() for gradient in step.values())
        assert "entropy" not in trainer._metrics["train"]


def test_training_ends_at_the_same_parameters(tmp_path: Path) -> None:
    """Optimizer, scheduler, clipping and shuffling run as in TRL's `train()`."""
    ends = []
    for cls in (GRPOTrainer, TRLGRPOTrainer):
        options = {"max_steps": 2, "learning_rate": 0.1, "optim": "sgd"}
        trainer = make_trainer(cls, UNEVEN, small(), tmp_path, **SIZES, **options)
        trainer.train()
        ends.append(trainer.model.state_dict())
        assert "entropy" in trainer.state.log_history[0]
    start = small().state_dict()
    assert any((ends[1][name] - start[name]).abs().max() > 1e-3 for name in start)
    for name, value in ends[1].items():
        torch.testing.assert_close(ends[0][name], value, atol=1e-5, rtol=0)


# ---- The micro-batches


def test_windows_never_cross_an_optimizer_step() -> None:
    """Walk through two epochs of TRL's loop, and check where its optimizer steps end in the buffer."""
    for steps, accumulation, generations in product(range(1, 9), range(1, 9), range(1, 4)):
        window = window_size(steps, accumulation)
        epoch = steps * generations  # an epoch holds complete generation batches, and ends with a step
        for start in (0, epoch):
            ends = {start + n for n in range(1, epoch + 1) if n % accumulation == 0 or n == epoch}
            assert all(end % steps % window == 0 for end in ends)


def buffer_of(sizes: list[tuple[int, int, float]], count: int) -> list[dict[str, Any]]:
    """Return `count` micro-batches of rows (prompt length, completion length, advantage), numbered by tokens."""
    left, right = max(p for p, _, _ in sizes), max(c for _, c, _ in sizes)
    rows = range(len(sizes))
    numbered = {
        "prompt_ids": [[0] * (left - p) + [100 + p] * p for p, _, _ in sizes],
        "prompt_mask": [[0] * (left - p) + [1] * p for p, _, _ in sizes],
        "completion_ids": [[row] * c + [-1] * (right - c) for row, (_, c, _) in zip(rows, sizes, strict=True)],
        "completion_mask": [[1] * c + [0] * (right - c) for _, c, _ in sizes],
        "advantages": [a for _, _, a in sizes],
        "old_per_token_logps": [[-float(row)] * right for row in rows],
        "importance_sampling_ratio": [[float(row)] for row in rows],
    }
    whole: dict[str, Any] = {key: torch.tensor(value) for key, value in numbered.items()}
    size = len(sizes) // count
    parts = [{k: v[i * size : (i + 1) * size] for k, v in whole.items()} for i in range(count)]
    labels = [f"row {row}" for row in rows]
    return [
        {**part, "num_items_in_batch": torch.tensor(7), "extra": labels[i * size : (i + 1) * size]}
        for i, part in enumerate(parts)
    ]


def regroup(buffer: list[dict[str, Any]], window: int, layout: Layout, exact: Exactness) -> list[dict[str, Any]]:
    """Return the regrouped micro-batches without their rows on the host, which hold the same tokens."""
    found = []
    for batch, host in micro_batches.regroup(buffer, window, layout, exact):
        rows = micro_batches.as_rows(batch)
        assert host.ids.tolist() == rows.input_ids.tolist()
        assert host.mask.tolist() == rows.attention_mask.bool().tolist()
        assert host.logits_to_keep == rows.logits_to_keep
        found.append(batch)
    return found


row_sizes = st.tuples(st.integers(1, 4), st.integers(1, 6), st.sampled_from([0.0, 1.0, -2.0]))
shapes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))


@settings(deadline=None, max_examples=20)
@given(st.data(), shapes, st.sampled_from([Layout.TRIMMED, Layout.PACKED]), st.booleans())
def test_rows_stay_whole_and_in_their_window(
    data: st.DataObject, shape: tuple[int, int, int], layout: Layout, skip: bool
) -> None:
    windows, window, rows = shape
    sizes = data.draw(st.lists(row_sizes, min_size=windows * window * rows, max_size=windows * window * rows))
    buffer = buffer_of(sizes, windows * window)
    ours = regroup(buffer, window, layout, Exactness(True, skip))
    assert len(ours) == len(buffer)
    for start in range(0, len(ours), window):
        before = {label for batch in buffer[start : start + window] for label in batch["extra"]}
        after = [label for batch in ours[start : start + window] for label in batch["extra"]]
        assert sorted(after) == sorted(before)
    for batch in ours:
        assert len(batch["extra"]) == rows
        assert batch["num_items_in_batch"] == 7
        assert batch["completion_mask"].any(0).all() or batch["completion_mask"].shape[1] <= 2
        assert batch["prompt_mask"].any(0).all()
        for position, label in enumerate(batch["extra"]):
            number = int(label.removeprefix("row "))
            prompt, completion, advantage = sizes[number]
            assert batch["advantages"][position] == advantage
            assert batch["importance_sampling_ratio"][position] == number
            skipped = skip and advantage == 0
            assert batch["completion_mask"][position].sum() == (0 if skipped else completion)
            if not skipped:
                assert batch["prompt_mask"][position].sum() == prompt
                assert batch["completion_ids"][position, :completion].tolist() == [number] * completion
                assert batch["old_per_token_logps"][position, :completion].tolist() == [-number] * completion
            else:  # a row without a token attends to nothing
                assert batch["prompt_mask"][position].tolist() == [0] * (batch["prompt_mask"].shape[1] - 1) + [1]


def test_rows_of_one_prompt_or_of_similar_length_share_a_micro_batch() -> None:
    # Shuffled groups. A skipped row keeps its place beside its prompt.
    groups = [(prompt, completion, float(completion % 3)) for completion in (1, 5, 3, 6) for prompt in (1, 2, 3, 4)]
    for batch in regroup(buffer_of(groups, 4), 4, Layout.PACKED, Exactness(True, True)):
        assert len({groups[int(label.removeprefix("row "))][0] for label in batch["extra"]}) == 1
    lengths = [(1, completion, 1.0) for completion in (1, 5, 2, 6, 3, 4, 8, 7)]
    trimmed = regroup(buffer_of(lengths, 4), 4, Layout.TRIMMED, Exactness(True, True))
    assert [batch["completion_ids"].shape[1] for batch in trimmed] == [2, 4, 6, 8]


def test_advantages_of_tokens_are_rescaled_as_those_of_rows_are() -> None:
    """Each row is a micro-batch, so that none changes its weight. One without a token has none."""
    by_row = buffer_of([(1, 0, 1.0), (1, 3, -2.0), (1, 2, 4.0)], 3)
    by_token = [{**batch, "advantages": batch["advantages"][:, None].expand(1, 6)} for batch in by_row]
    for buffer, columns in ((by_row, 1), (by_token, 6)):
        ours = regroup(buffer, 3, Layout.TRIMMED, Exactness(True, False, rescale=True))
        found = {batch["extra"][0]: batch["advantages"].flatten().tolist() for batch in ours}
        assert found == {"row 0": [0.0] * columns, "row 1": [-2.0] * columns, "row 2": [4.0] * columns}


def weights(batches: list[dict[str, Any]]) -> dict[str, float]:
    """Return advantage / active tokens, without tool tokens, of each row with an advantage."""
    found = {}
    for batch in batches:
        tokens = int((batch["completion_mask"] * batch["tool_mask"]).sum())
        for label, advantage in zip(batch["extra"], batch["advantages"].tolist(), strict=True):
            if advantage:
                found[label] = advantage / tokens
    return found


@pytest.mark.parametrize("skip", [False, True])
def test_a_row_keeps_its_weight_with_bnpo(skip: bool) -> None:
    sizes = [(1, completion, advantage) for completion, advantage in ((1, 1.0), (5, -2.0), (2, 0.0), (6, 3.0))]
    buffer = buffer_of(sizes, 2)
    for batch in buffer:
        batch["tool_mask"] = batch["completion_mask"].clone()
        batch["tool_mask"][:, 1::2] = 0
    ours = regroup(buffer, 2, Layout.TRIMMED, Exactness(True, skip, rescale=True))
    assert [batch["extra"] for batch in ours] != [batch["extra"] for batch in buffer]
    assert weights(ours) == pytest.approx(weights(buffer))


def test_only_values_of_the_completions_are_cut_with_them() -> None:
    """A user's script may add tensors of another width, which have nothing to do with the completions."""
    buffer = buffer_of([(2, 6, 1.0), (1, 1, 1.0), (2, 5, 1.0), (1, 2, 1.0), (1, 5, 0.0), (1, 4, 0.0)], 3)
    for number, batch in enumerate(buffer):
        batch["own"] = torch.arange(8).expand(2, 8) + 100 * number
        batch["blocks"] = torch.zeros(2, 6, 3)
    for number, batch in enumerate(regroup(buffer, 3, Layout.TRIMMED, Exactness(False, True))):
        assert set(batch["extra"]) == {f"row {2 * number}", f"row {2 * number + 1}"}, "no row moves to another one"
        width = batch["completion_ids"].shape[1]
        assert batch["own"].shape == (2, 8)
        assert batch["blocks"].shape == (2, width, 3)
        for key in ("completion_mask", "old_per_token_logps"):
            assert batch[key].shape == (2, width)
        assert batch["prompt_ids"].shape == batch["prompt_mask"].shape
    widths = [batch["completion_ids"].shape[1] for batch in regroup(buffer, 1, Layout.TRIMMED, Exactness(False, True))]
    assert widths == [6, 5, 2], "the last one has no token left, and TRL takes one column for a value per sequence"


def test_a_micro_batch_of_one_token_or_none_keeps_finite_weights() -> None:
    ours = regroup(buffer_of([(1, 1, 1.0), (1, 5, -2.0)], 2), 2, Layout.TRIMMED, Exactness(True, True, rescale=True))
    assert [batch["advantages"].tolist() for batch in ours] == [[1.0], [-2.0]], "each row is alone as before"
    buffer = buffer_of([(1, 2, 1.0), (1, 3, 1.0), (1, 4, 1.0), (1, 5, 1.0)], 2)
    for batch, is_the_policys in zip(buffer, (0, 1), strict=True):
        batch["tool_mask"] = batch["completion_mask"] * is_the_policys
    for batch in regroup(buffer, 2, Layout.PACKED, Exactness(True, False, rescale=True)):
        assert batch["advantages"].isfinite().all()


def test_the_ratios_of_skipped_rows_are_one() -> None:
    """TRL's log-probabilities of a masked row are 0, and so are those that they are compared with."""
    buffer = buffer_of([(1, 3, 0.0), (2, 3, 1.0), (1, 3, 0.0), (2, 3, 2.0)], 2)
    for batch in buffer:
        batch["old_per_token_logps"] = torch.full((2, 3), -5.0)
        batch["sampling_per_token_logps"] = torch.full((2, 3), -6.0)
        batch["ref_per_token_logps"] = None
    for batch in regroup(buffer, 2, Layout.TRIMMED, Exactness(True, True)):
        kept = (batch["advantages"] != 0).float()[:, None]
        for name, value in (("old_per_token_logps", -5.0), ("sampling_per_token_logps", -6.0)):
            assert torch.equal(batch[name], value * kept.expand_as(batch[name]))


def test_which_rows_contribute() -> None:
    """A row contributes with a nonzero advantage at any token, and a token of the policy, not of a tool."""
    batch = {
        "completion_ids": torch.ones(3, 2),
        "completion_mask": torch.tensor([[1, 1], [1, 1], [0, 0]]),
        "advantages": torch.tensor([[0.0, 0.0], [0.0, -1.0], [1.0, 1.0]]),
    }
    assert micro_batches.contributes(batch).tolist() == [False, True, False]
    batch |= {"tool_mask": torch.tensor([[1, 0], [0, 1], [1, 1]]), "advantages": torch.ones(3)}
    batch["completion_mask"] = torch.tensor([[1, 1], [1, 0], [0, 0]])
    assert micro_batches.loss_mask(batch).tolist() == [[1, 0], [0, 0], [0, 0]]
    assert micro_batches.contributes(batch).tolist() == [True, False, False]


def test_images_and_the_padded_layout_keep_the_micro_batches_as_they_are() -> None:
    images = {"pixel_values": 1, "num_images": 1, "token_type_ids": 1, "mm_token_type_ids": 1, "image_grid_thw": 9}
    rows = [(1, 2, 0.0), (2, 1, 1.0), (1, 5, 1.0), (2, 3, 0.0)]
    for key, count_of_rows in [*images.items(), ("", 0)]:
        # As wide as prompt and completion, or with more entries than rows.
        more = {key: torch.zeros(2 * count_of_rows, 2 + 5)} if key else {}
        buffer = [{**batch, **more} for batch in buffer_of(rows, 2)]
        layout = Layout.TRIMMED if key else Layout.PADDED
        for mine, trls in zip(regroup(buffer, 2, layout, Exactness(True, True)), buffer, strict=True):
            assert all(mine[name] is value for name, value in trls.items())


# ---- Settings


def test_the_table_of_losses_holds_every_loss_type_of_trl() -> None:
    source = inspect.getsource(TRLGRPOTrainer._compute_loss)
    for loss_type in LOSS_TYPES:
        assert f'"{loss_type}"' in source, f"TRL no longer has the loss type {loss_type}: adapt recipe/losses.py"
    unknown = exact_changes("another", 0.0)
    assert (unknown.regroup, unknown.skip) == (False, False)


def exact_changes(loss_type: str, beta: float, skip: bool = True, **options: Any) -> Exactness:
    """Return the changes that are exact for a trainer with these settings."""
    settings = {"_entropy_bonus_enabled": False, "top_entropy_quantile": 1.0, "aux_loss_enabled": False, **options}
    trainer: Any = SimpleNamespace(loss_type=loss_type, beta=beta, **settings)
    return exactness(trainer, MicroBatching("packed", skip))


def test_rows_stay_in_their_micro_batch_if_the_loss_has_a_statistic_of_it() -> None:
    assert exact_changes("grpo", 0.0) == Exactness(True, True)
    assert exact_changes("grpo", 0.0, skip=False) == Exactness(True, False)
    assert exact_changes("grpo", 0.1) == Exactness(True, False), "a skipped row still has a KL term"
    assert exact_changes("bnpo", 0.0) == Exactness(True, True, rescale=True)
    assert exact_changes("bnpo", 0.1) == Exactness(False, False)
    options = {"_entropy_bonus_enabled": True, "top_entropy_quantile": 0.5, "aux_loss_enabled": True}
    for name, value in options.items():
        assert exact_changes("grpo", 0.0, **{name: value}) == Exactness(False, False)


def test_the_values_of_micro_batching() -> None:
    for raw in ("auto", {}, {"layout": "packed"}):
        assert MicroBatching.parse(raw) == MicroBatching("packed", True)
    for raw in ("off", False):
        assert asked_layout(MicroBatching.parse(raw)) is Layout.PADDED
    for wrong, place in (
        ("on", "micro_batching"), (3, "micro_batching"), (True, "micro_batching"), ({"layuot": "packed"}, "`layout`"),
        ({"layout": "dense"}, "micro_batching.layout"), ({"skip_zero_advantage": "yes"}, "skip_zero_advantage"),
    ):  # fmt: skip
        with refused("", place):
            MicroBatching.parse(wrong)


def test_contract_with_trl() -> None:
    """TRL 1.16 has the functions and attributes that micro_batches.py and `_prepare_inputs` use."""
    prepare = inspect.getsource(TRLGRPOTrainer._prepare_inputs)
    for line in (
        "generate_every = self.args.steps_per_generation * self.num_iterations",
        "split_tensor_dict(generation_batch, self.args.steps_per_generation)",
        "inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]",
    ):
        assert line in prepare, "TRL changed how it buffers a generation batch: adapt training/trainer.py"
    made = inspect.getsource(TRLGRPOTrainer._generate_and_score_completions)
    for key in (
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "advantages",
        *micro_batches._LOG_PROBS,
    ):
        assert f'"{key}"' in made, f"TRL no longer puts {key} into a micro-batch: adapt training/micro_batches.py"
    init = inspect.getsource(TRLGRPOTrainer.__init__)
    for name in ("_entropy_bonus_enabled", "top_entropy_quantile", "aux_loss_enabled", "loss_type", "beta"):
        assert f"self.{name} =" in init, f"TRL no longer has `{name}`: adapt training/micro_batches.py"
    assert EMPTY not in made
