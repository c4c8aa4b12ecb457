"""Parts of the trainer's overrides: its arguments, what it keeps between two calls, and what it logs."""

from __future__ import annotations

import logging
import math
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trl import GRPOConfig

from grpo_recipes import GRPOTrainer
from grpo_recipes.process.faults import RunFault
from grpo_recipes.training.data_order import SetSamplerEpoch
from grpo_recipes.training.packing import Layout
from grpo_recipes.training.passes import Passes
from tests.support import short_runs, tiny
from tests.support.recorded import Recording, make_trainer, model
from tests.support.tool_rollouts import add

SIZES = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
UNEVEN = Recording.random(seed=1, zero=(2,))


def built(folder: Path, **config: Any) -> Any:
    """Return a trainer in training mode, with the first micro-batch of a generation batch ahead."""
    trainer = make_trainer(GRPOTrainer, UNEVEN, model(), folder, **{**SIZES, **config})
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 4
    return trainer


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"micro_batching": "on"}, "`micro_batching`"),
        ({"kl_estimator": "k3"}, "`kl_estimator` can't be `k3`"),
        ({"generation": "fast"}, "`generation` can't be `fast`"),
        ({"advantages": "rloo"}, "`advantages` can't be `rloo`"),
        ({"tool_limits": ""}, "`tool_limits.seconds`"),
        ({"tool_limits": {"second": 3}}, "tool_limits.second"),
        ({"args": {"generation_kwargs": {"stop_strings": 3}}}, "stop_strings"),
        ({"tools": [add, add]}, "two tools are named `add`"),
        ({"args": {"generation_kwargs": {"stop": "END"}}, "tools": [add]}, "`generation_kwargs.stop`"),
        ({"args": {"generation_kwargs": {"stop": "END"}}, "environment_factory": dict}, "`generation_kwargs.stop`"),
        ({"args": {"scale_rewards": "group"}, "advantages": "max_rl"}, "`scale_rewards`"),
    ],
    ids=lambda given: re.sub(" at 0x[0-9a-f]+", "", str(given)),
)
def test_a_mistake_in_an_argument_is_found_before_the_model_is_loaded(
    tmp_path: Path, arguments: dict[str, Any], says: str
) -> None:
    config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **arguments.get("args", {}))
    with pytest.raises(ValueError, match=says):
        GRPOTrainer("no such model", lambda **_: [], **{**arguments, "args": config})


@pytest.mark.parametrize("skips", [True, False])
def test_rows_without_an_advantage_are_skipped_if_that_is_asked_for(tmp_path: Path, skips: bool) -> None:
    trainer = built(tmp_path, micro_batching={"skip_zero_advantage": skips})
    trainer._prepare_inputs(UNEVEN.rows())
    assert trainer._metrics["train"]["efficiency/rows_skipped"] == [4.0 if skips else 0.0]


def test_the_layout_is_checked_on_the_first_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its messages say, and at the size that the training will have."""
    found = []
    for micro_batching in ("off", "auto"):
        trainer = built(tmp_path, micro_batching=micro_batching)
        asked: list[Any] = []

        def layout(model: Any, rows: Any, size: int, asked: list[Any] = asked) -> Layout:
            asked.append((rows.input_ids, size))
            return Layout.PADDED

        monkeypatch.setattr(trainer._log_probs, "layout", layout)
        torch.manual_seed(0)  # the order of the rows is drawn
        inputs = trainer._prepare_inputs(UNEVEN.rows())
        found.append(torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1))
    ((rows, size),) = asked
    assert torch.equal(rows, found[0])
    assert size == 4


def test_nothing_of_a_micro_batch_is_left_for_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation or a script may ask for other log-probabilities next."""
    trainer = built(tmp_path, num_iterations=2)
    ids = torch.tensor([[5, 6, 7, 8, 9, 1]] * 4)
    rows = (trainer.model, ids, torch.ones_like(ids), 3)
    with torch.no_grad():
        expected = trainer._get_per_token_logps_and_entropies(*rows)[0]
    counted: list[Tensor | None] = []
    monkeypatch.setattr(Passes, "add", lambda self, inputs, log_probs: counted.append(log_probs))
    inputs = trainer._prepare_inputs(UNEVEN.rows())
    trainer.compute_loss(trainer.model, inputs)
    with torch.no_grad():
        torch.testing.assert_close(trainer._get_per_token_logps_and_entropies(*rows)[0], expected)
    (log_probs,) = counted
    assert log_probs is not None
    assert not log_probs.requires_grad, "the sums of a pass would keep the graph in memory"
    assert log_probs.shape == inputs["completion_ids"].shape


def test_a_second_training_has_one_callback_for_the_order_of_the_prompts(tmp_path: Path) -> None:
    trainer = built(tmp_path)
    samplers = [trainer._get_train_sampler() for _ in range(2)]
    (found,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, SetSamplerEpoch)]
    assert found.sampler is samplers[1]


def test_an_entry_without_completions_does_not_end_their_log(tmp_path: Path) -> None:
    """A run that is resumed at its end logs once before it has generated anything."""
    trainer = built(tmp_path, log_completions=True)
    trainer.log({"loss": 1.0})
    assert not list((tmp_path / "run" / "completions").iterdir()), "an empty table would replace the last one"
    assert trainer.log_completions
    trainer._prepare_inputs(UNEVEN.rows())
    trainer.log({"loss": 1.0})
    assert [path.name for path in (tmp_path / "run" / "completions").iterdir()] == ["completions_00000.parquet"]
    trainer.log_completions = False
    trainer.state.global_step = 1
    trainer.log({"loss": 1.0})
    assert len(list((tmp_path / "run" / "completions").iterdir())) == 1


def test_an_evaluation_between_two_entries_logs_no_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its entry would show tokens of the training, and the next entry of the training none."""
    caplog.set_level(logging.INFO, "grpo_recipes")
    trainer = built(tmp_path)
    trainer._prepare_inputs(UNEVEN.rows())
    trainer.model.eval()
    trainer.log({"eval_loss": 1.0})
    assert not [message for message in caplog.messages if "tokens computed" in message]
    trainer.model.train()
    for _ in range(2):
        trainer.log({"loss": 1.0})
    assert len([message for message in caplog.messages if "tokens computed" in message]) == 1


def stand_in(*, training: bool, **changes: Any) -> Any:
    """Return a stand-in for the trainer on one of two ranks, with two of four micro-batches in a step."""
    accelerator = SimpleNamespace(num_processes=2, reduce=lambda sums: 2 * sums)
    values = {
        **{"model": torch.nn.Linear(1, 1).train(training), "accelerator": accelerator, "loss_type": "dapo"},
        **{"args": SimpleNamespace(steps_per_generation=4), "current_gradient_accumulation_steps": 2},
        **{"max_completion_length": 9, "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)}},
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.mark.parametrize(
    ("training", "tokens", "divisor"),
    # 12 tokens are 6 on each rank, and 3 in each step of the training.
    [(True, 12, 3.0), (False, 12, 6.0), (True, 0, 0.25), (False, 0, 0.5), (False, 1, 0.5)],
)
def test_a_token_is_divided_by_those_of_its_step(training: bool, tokens: int, divisor: float) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    inputs = {"num_items_in_batch": torch.tensor(tokens)}
    found = GRPOTrainer._token_weights(stand_in(training=training), inputs, mask)
    torch.testing.assert_close(found, mask / divisor)


@pytest.mark.parametrize("training", [True, False])
def test_the_full_kl_is_a_mean_over_the_tokens_of_all_ranks(training: bool) -> None:
    trainer = stand_in(training=training)
    trainer.accelerator.reduce = lambda sums: sums
    for mask in ([[1, 1, 0], [1, 0, 0]], [[1, 0, 0], [0, 0, 0]], [[0, 0, 0]] * 2):
        counted = torch.tensor(mask)
        GRPOTrainer._log_full_kl(trainer, torch.tensor([[2.0, 4.0, 9.0], [6.0, 9.0, 9.0]]) * counted, counted)
    name, other = ("train", "eval") if training else ("eval", "train")
    assert trainer._metrics[name] == {"kl/full": [4.0, 2.0, 0.0]}
    assert trainer._metrics[other] == {}


def test_the_sampled_kl_is_logged_without_an_effect_on_the_loss() -> None:
    """TRL computes it if `beta` is not 0."""
    trainer: Any = SimpleNamespace(beta=0.04)
    with GRPOTrainer._kl_logged_only(trainer):
        assert trainer.beta != 0.0
        assert (trainer.beta * torch.tensor([1e30, math.pi])).tolist() == [0.0, 0.0]
    assert trainer.beta == 0.04


# ---- code of the user


def exits(**columns: Any) -> Any:
    sys.exit(0)


async def exits_later(**columns: Any) -> Any:
    sys.exit(0)


def leave_rollout(prompts: list, trainer: Any) -> Any:
    sys.exit(0)


@pytest.mark.parametrize(
    "parts",
    [{"rewards": exits}, {"rewards": exits_later}, {"rollout_func": leave_rollout}, {"rows": "a transform"}],
    ids=["reward", "async reward", "rollout", "transform"],
)
def test_an_exit_of_the_code_of_a_script_is_an_error(tmp_path: Path, parts: dict[str, Any]) -> None:
    if "rows" in parts:
        parts = {"rows": short_runs.PROMPTS.with_transform(lambda rows: sys.exit(0))}
    trainer = short_runs.trainer(GRPOTrainer, tiny.policy(), short_runs.arguments(tmp_path, max_steps=1), **parts)
    with pytest.raises(RunFault, match=r"sys.exit\(0\) was called in .*test_trainer_parts.py"):
        trainer.train()


def test_a_reward_can_change_neither_the_log_nor_what_later_rewards_read(tmp_path: Path) -> None:
    def overwrites(prompts: list, completions: list, completion_ids: list, **columns: Any) -> list[float]:
        for place in range(len(completions)):
            completions[place], prompts[place] = "overwritten", "overwritten"
            completion_ids[place].clear()
        return [0.0] * len(completions)

    def reads(completions: list, completion_ids: list, **columns: Any) -> list[float]:
        return [
            float("overwritten" in (text, ids) or not ids)
            for text, ids in zip(completions, completion_ids, strict=True)
        ]

    made = short_runs.trainer(GRPOTrainer, tiny.policy(), short_runs.arguments(tmp_path), rewards=[overwrites, reads])
    made.train()
    assert made.state.log_history[0]["rewards/reads/mean"] == 0.0
    assert "overwritten" not in (*made._logs["completion"], *made._logs["prompt"])


@pytest.mark.parametrize("shape", [(4, 1), (4, 2)])
def test_a_two_dimensional_array_is_named_with_its_reward(tmp_path: Path, shape: tuple[int, int]) -> None:
    def judge(**columns: Any) -> Any:
        return np.ones(shape)

    made = short_runs.trainer(GRPOTrainer, tiny.policy(), short_runs.arguments(tmp_path), rewards=judge)
    with pytest.raises(ValueError, match=r"reward `judge` returned an array of shape \(4, "):
        made.train()
