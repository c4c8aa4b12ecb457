"""The trainer's arguments and defaults, what it keeps between two calls, what it logs, and code of the user."""

from __future__ import annotations

import inspect
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from trl import GRPOConfig
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.process.faults import RunFault
from grpo_recipes.training.data_order import SetSamplerEpoch
from tests.support import short_runs, tiny, trainers
from tests.support.errors import refused
from tests.support.grids import only
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


# ---- arguments


def test_a_script_that_leaves_an_option_out_gets_the_documented_one() -> None:
    parameters = inspect.signature(GRPOTrainer.__init__).parameters
    defaults = {name: one.default for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}
    assert defaults == {
        "reference": None, "kl_estimator": "sampled", "micro_batching": "auto", "generation": "auto", "sampling": None,
        "advantages": None, "generation_check": True, "tool_limits": None, "optimizer_cls_and_kwargs": None,
    }  # fmt: skip


def test_the_defaults_of_overridden_methods_are_trls() -> None:
    overrides = []
    for name, method in vars(GRPOTrainer).items():
        if inspect.isfunction(method) and hasattr(TRLGRPOTrainer, name) and name != "__init__":
            overrides.append(name)
            ours = inspect.signature(method).parameters
            theirs = inspect.signature(getattr(TRLGRPOTrainer, name)).parameters
            for parameter in ours.keys() & theirs.keys():
                assert ours[parameter].default == theirs[parameter].default, (name, parameter)
    assert {"_get_per_token_logps_and_entropies", "compute_loss", "_generate_single_turn", "evaluate"} <= {*overrides}


def test_a_mistake_in_an_argument_is_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    stop: dict[str, Any] = {"generation_kwargs": {"stop": "END"}}
    table: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"micro_batching": "on"}, {}, "`micro_batching`"),
        ({"kl_estimator": "k3"}, {}, "`kl_estimator`"),
        ({"generation": "fast"}, {}, "`generation`"),
        ({"advantages": "rloo"}, {}, "`advantages`"),
        ({"advantages": "max_rl"}, {"scale_rewards": "group"}, "`scale_rewards`"),
        ({"tool_limits": ""}, {}, "`tool_limits.seconds`"),
        ({"tool_limits": {"second": 3}}, {}, "tool_limits.second"),
        ({"tools": [add, add]}, {}, "`add`"),
        ({}, {"generation_kwargs": {"stop_strings": 3}}, "stop_strings"),
        ({"tools": [add]}, stop, "`generation_kwargs.stop`"),
        ({"environment_factory": dict}, stop, "`generation_kwargs.stop`"),
    ]
    for arguments, config, named in table:
        args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **config)
        with refused("", named):
            GRPOTrainer("no such model", lambda **_: [], args, **arguments)


# ---- between two calls


def test_nothing_of_a_micro_batch_is_left_for_the_next_call(tmp_path: Path) -> None:
    """An evaluation or a script may ask for other log-probabilities next."""
    trainer = built(tmp_path, num_iterations=2)
    ids = torch.tensor([[5, 6, 7, 8, 9, 1]] * 4)
    rows = (trainer.model, ids, torch.ones_like(ids), 3)
    with torch.no_grad():
        expected = trainer._get_per_token_logps_and_entropies(*rows)[0]
    trainer.compute_loss(trainer.model, trainer._prepare_inputs(UNEVEN.rows()))
    with torch.no_grad():
        torch.testing.assert_close(trainer._get_per_token_logps_and_entropies(*rows)[0], expected)


def test_a_second_training_has_one_callback_for_the_order_of_the_prompts(tmp_path: Path) -> None:
    trainer = built(tmp_path)
    samplers = [trainer._get_train_sampler() for _ in range(2)]
    (found,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, SetSamplerEpoch)]
    assert found.sampler is samplers[1]


@pytest.mark.parametrize("training", [True, False])
def test_a_token_is_divided_by_those_of_its_step(
    training: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two ranks, 12 tokens are 6 on each, and 3 in each of the two steps of a training."""
    trainer = built(tmp_path, loss_type="dapo", steps_per_generation=4, gradient_accumulation_steps=2)
    trainer.model.train(training)
    trainer.current_gradient_accumulation_steps = 2
    monkeypatch.setitem(trainer.accelerator.state._shared_state, "num_processes", 2)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    for tokens, each in ((12, 6.0), (1, 0.5), (0, 0.5)):
        found = trainer._token_weights({"num_items_in_batch": torch.tensor(tokens)}, mask)
        torch.testing.assert_close(found, mask / (each / 2 if training else each))


# ---- the log


def test_an_entry_without_completions_does_not_end_their_log(tmp_path: Path) -> None:
    """A run that is resumed at its end logs once before it has generated anything."""
    trainer, folder = built(tmp_path, log_completions=True), tmp_path / "run" / "completions"
    trainer.log({"loss": 1.0})
    assert not list(folder.iterdir()), "an empty table would replace the last one"
    trainer._prepare_inputs(UNEVEN.rows())
    trainer.log({"loss": 1.0})
    assert [path.name for path in folder.iterdir()] == ["completions_00000.parquet"]
    trainer.log_completions, trainer.state.global_step = False, 1
    trainer.log({"loss": 1.0})
    assert len(list(folder.iterdir())) == 1


def test_an_evaluation_between_two_entries_logs_no_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its entry would show tokens of the training, and the next entry of the training none."""
    caplog.set_level(logging.INFO, "grpo_recipes")
    trainer = built(tmp_path)
    trainer._prepare_inputs(UNEVEN.rows())
    shown = []
    for training in (False, True, True):
        trainer.model.train(training)
        trainer.log({"loss" if training else "eval_loss": 1.0})
        shown.append(caplog.text.count("tokens computed"))
    assert shown == [0, 1, 1]


def test_an_adapter_that_is_loaded_from_a_checkpoint_keeps_its_dtype(tmp_path: Path) -> None:
    """TRL casts it to bfloat16 if the model has this attribute, which bitsandbytes sets."""
    policy = tiny.policy().to(torch.bfloat16)
    policy.is_loaded_in_4bit = True
    args = short_runs.arguments(tmp_path, beta=0.0)
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = short_runs.trainer(GRPOTrainer, policy, args, peft_config=config)
    trainer.save_model(str(tmp_path))
    trainer._load_from_checkpoint(str(tmp_path))
    adapter = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in adapter} == {torch.bfloat16}


# ---- code of the user


def exits(*rows: Any, **columns: Any) -> Any:
    sys.exit(0)


async def exits_later(**columns: Any) -> Any:
    sys.exit(0)


PARTS: dict[str, dict[str, Any]] = {
    "reward": {"rewards": exits},
    "async reward": {"rewards": exits_later},
    "rollout": {"rollout_func": exits},
    "transform": {"rows": short_runs.PROMPTS.with_transform(exits)},
}


@pytest.mark.parametrize("part", only(["reward", "async reward"], PARTS))
def test_an_exit_of_the_code_of_a_script_is_an_error(tmp_path: Path, part: str) -> None:
    args = short_runs.arguments(tmp_path)
    trainer = short_runs.trainer(GRPOTrainer, tiny.policy(), args, **PARTS[part])
    with pytest.raises(RunFault, match=r"sys.exit\(0\).*test_trainer.py"):
        trainer.train()


def test_a_reward_can_change_neither_the_log_nor_what_later_rewards_read(tmp_path: Path) -> None:
    def overwrites(prompts: list, completions: list, completion_ids: list, **columns: Any) -> list[float]:
        for place in range(len(completions)):
            completions[place], prompts[place] = "overwritten", "overwritten"
            completion_ids[place].clear()
        return [0.0] * len(completions)

    def reads(completions: list, completion_ids: list, **columns: Any) -> list[float]:
        rows = zip(completions, completion_ids, strict=True)
        return [float("overwritten" in (text, ids) or not ids) for text, ids in rows]

    made = short_runs.trainer(GRPOTrainer, tiny.policy(), short_runs.arguments(tmp_path), rewards=[overwrites, reads])
    trainers.one_batch(made, 1)
    assert made._metrics["train"]["rewards/reads/mean"] == [0.0]
    assert "overwritten" not in (*made._logs["completion"], *made._logs["prompt"])


def test_a_two_dimensional_array_is_named_with_its_reward(tmp_path: Path) -> None:
    def judge(**columns: Any) -> Any:
        return np.ones((4, 1))

    made = short_runs.trainer(GRPOTrainer, tiny.policy(), short_runs.arguments(tmp_path), rewards=judge)
    with pytest.raises(ValueError, match=r"`judge`.*\(4, 1\)"):
        trainers.one_batch(made, 1)
