"""Group decoding inside the trainer: the run equals that of transformers' own loop, and faults are noticed."""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from peft import LilyConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.generation import groups, kv_cache
from grpo_recipes.generation.models import unfit
from grpo_recipes.process.faults import NotThePolicy
from grpo_recipes.training.generation import unfit_for_groups
from tests.support import architectures, launching
from tests.support.architectures import PROMPTS, adapter, moved_no_states, tiny
from tests.support.grids import only
from tests.support.trainers import one_batch
from tests.tools.models import build

MEAN, LARGEST = (f"sampling/sampling_logp_difference/{name}" for name in ("mean", "max"))


def trainer(folder: Path, cls: type[TRLGRPOTrainer] = GRPOTrainer, **more: Any) -> Any:
    """Build a trainer of few tokens in TRL's layout, so that no run chooses a layout first."""
    return architectures.trainer(folder, cls, **{"micro_batching": "off", "max_completion_length": 12, **more})


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Any:
    """Return the sentences that generation has logged."""
    caplog.set_level(logging.WARNING)
    name = "grpo_recipes.training.generation"
    return lambda: [record.getMessage() for record in caplog.records if record.name == name]


def history(trained: Any) -> list[tuple[float, ...]]:
    """Return the metrics that depend on the sampled tokens, by step."""
    names = ("reward", "completions/mean_length", "completions/clipped_ratio", "num_tokens")
    return [tuple(entry[name] for name in names) for entry in trained.state.log_history if "reward" in entry]


def assert_same_run(ours: Any, theirs: Any) -> None:
    assert history(ours) == history(theirs)
    assert len(set(history(ours))) > 1
    for (name, mine), other in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, other), name


# ---- the same run

RUNS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"peft_config": adapter(), "beta": 0.04},
    "num_iterations": {"num_iterations": 2, "max_steps": 3},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": PROMPTS.select(range(4))},
    "one token": {"max_completion_length": 1},
    "filters": {"temperature": 0.8, "top_k": 12, "repetition_penalty": 1.2},
}


STATES = ("qwen3_5_text", "mamba2", "granitemoehybrid", "lfm2")
"""Types of models with recurrent states or caches of convolutions."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*RUNS, *STATES])
def test_the_run_of_transformers_own_loop(kind: str, tmp_path: Path, said: Any) -> None:
    runs = []
    for mode in ("auto", "off"):
        changes = RUNS[kind] if kind in RUNS else {"policy": build(kind)}
        runs.append(trainer(tmp_path / mode, generation=mode, **{"max_steps": 2, **changes}))
        runs[-1].train()
        assert runs[-1]._generation.groups.is_verified is (mode == "auto")
        assert said() == []
    assert_same_run(*runs)


def test_the_completions_of_stock_trl(tmp_path: Path) -> None:
    ours, stock = trainer(tmp_path / "ours"), trainer(tmp_path / "trl", TRLGRPOTrainer)
    for made in (ours, stock):
        torch.manual_seed(0)
        one_batch(made)
    metrics = ours._metrics["train"]
    assert stock._metrics["train"] == {name: metrics[name] for name in stock._metrics["train"]}
    assert list(ours._logs["completion"]) == list(stock._logs["completion"])


def test_a_rank_without_groups_joins_the_check_of_a_rank_with_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(tmp_path, generation_kwargs={"use_cache": False})
    one_batch(run)
    assert not run._generation.groups.is_verified
    gather = run.accelerator.gather

    def of_two_ranks(values: torch.Tensor) -> torch.Tensor:
        is_decision = values.dtype == torch.bool and values.shape == (1, 3)
        return torch.cat([values, torch.tensor([[False, True, False]])]) if is_decision else gather(values)

    monkeypatch.setattr(run.accelerator, "gather", of_two_ranks)
    one_batch(run)
    assert run._generation.groups.is_verified


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    """The random stream is that of users. The check of the first batch after the resume must not disturb it."""
    runs = []
    for folder, resume in (("whole", None), ("resumed", str(tmp_path / "whole" / "checkpoint-2"))):
        run = trainer(tmp_path / folder, max_steps=4, save_strategy="steps", save_steps=2)
        del run._generate_single_turn  # users do not get the exactness mode
        run.train(resume_from_checkpoint=resume)
        runs.append(run)
    whole, resumed = runs
    assert history(resumed)[-2:] == history(whole)[-2:]
    for mine, other in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)


# ---- the check of the first batch


def moved_nothing(self: Any, holes: list[int], movers: list[int], count: int) -> None:
    """Drop the last rows of a cache, whichever have finished."""
    self.buffers = [buffer[:count] for buffer in self.buffers]
    self.show(self.start, self.stop)


def next_prompt(self: Any, layer: Any, rows: torch.Tensor, room: int, take: Any = kv_cache.Buffer.take) -> None:
    """Give rows the keys and values of another prompt."""
    take(self, layer, (rows + 1) % (rows.max() + 1), room)


def cut_one_more(self: Any, columns: int) -> None:
    self.show(self.start + columns + 1, self.stop)


def one_position_late(step: Any) -> Any:
    def run(*args: Any, position_ids: torch.Tensor, **inputs: Any) -> Any:
        late = position_ids + (0 if inputs.get("is_first_iteration") else 3)
        return step(*args, position_ids=late, **inputs)

    return run


FAULTS = {
    "a row takes another's keys": (kv_cache.Buffer, "keep", moved_nothing),
    "a row takes another's states": (kv_cache.StateBuffer, "keep_states", moved_no_states),
    "a row takes another prompt's keys": (kv_cache.Buffer, "take", next_prompt),
    "a token is cut with the padding": (kv_cache.Buffer, "cut", cut_one_more),
    "positions are off": (groups, "decode_step", one_position_late(groups.decode_step)),
}


@pytest.mark.parametrize("fault", only(["a row takes another's keys"], FAULTS))
def test_a_fault_is_noticed_and_the_first_batch_generated_again(
    fault: str, tmp_path: Path, said: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    policy = build("qwen3_5_text") if fault == "a row takes another's states" else None
    # With this seed the rows of the longest prompt leave before others.
    run = trainer(tmp_path, policy=policy, max_completion_length=64, seed=46)
    one_batch(run, 4)
    (sentence,) = said()
    assert "1e-04" in sentence
    assert not run._generation.groups.is_verified
    (logged,) = run._metrics["train"][LARGEST]
    # The scan of the policy and the steps of a recurrent state round differently.
    assert logged < (1e-5 if policy is None else 5e-5)


@pytest.mark.slow
def test_a_later_fault_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Any) -> None:
    run = trainer(tmp_path, max_steps=3)
    original = run._generate_and_score_completions

    def with_a_fault(inputs: Any) -> Any:
        if run.state.global_step == 2:
            monkeypatch.setattr(*FAULTS["positions are off"])
        return original(inputs)

    run._generate_and_score_completions = with_a_fault
    with pytest.raises(NotThePolicy, match="step 2"):
        run.train()
    assert said() == []
    logged = [(entry[MEAN], entry[LARGEST]) for entry in run.state.log_history if MEAN in entry]
    assert len(logged) == 2
    assert all(0 <= mean <= largest < 1e-5 for mean, largest in logged)


# ---- runs left to transformers' own loop


def test_dropout_prevents_group_decoding_and_the_comparison_in_training_only(tmp_path: Path, said: Any) -> None:
    evaluated = PROMPTS.select(range(4))
    run = trainer(tmp_path, peft_config=adapter(lora_dropout=0.5), eval_dataset=evaluated)
    metrics = run.evaluate()
    (entry,) = run.state.log_history
    assert metrics["eval_loss"] == entry["eval_loss"]
    assert 0 < entry[f"eval_{MEAN}"] < entry[f"eval_{LARGEST}"] < 1e-5
    assert said() == []
    one_batch(run)
    (sentence,) = said()
    assert "dropout" in sentence
    assert LARGEST not in run._metrics["train"]


def test_adapters_that_take_more_than_tokens_are_not_decoded_in_groups() -> None:
    prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    assert "virtual tokens" in unfit(get_peft_model(tiny("LlamaConfig"), prompts))
    activated = adapter(task_type="CAUSAL_LM", alora_invocation_tokens=[5])
    assert "aLoRA" in unfit(get_peft_model(tiny("LlamaConfig"), activated))
    mixing = LilyConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    assert "LILY" in unfit(get_peft_model(tiny("LlamaConfig"), mixing))
    assert unfit(get_peft_model(tiny("LlamaConfig"), adapter(task_type="CAUSAL_LM"))) == ""


def test_an_activated_adapter_is_declined_before_the_prefill(tmp_path: Path, said: Any) -> None:
    activated = adapter(task_type="CAUSAL_LM", alora_invocation_tokens=[5])
    run = trainer(tmp_path, peft_config=activated)
    # PEFT switches the adapter off in `generate` where a prompt lacks its token; TRL's forward of the loss has it on.
    with pytest.raises(NotThePolicy, match="adapter"):
        one_batch(run, 4)
    assert "aLoRA" in said()[0]


def test_layouts_that_are_not_decoded_in_groups() -> None:
    for changes, reason in (
        ({}, ""),
        ({"is_fsdp_enabled": True}, "FSDP"),
        ({"is_zero3": True}, ""),
        ({"is_zero3": True, "gathers": False}, "ds3_gather_for_generation"),
        ({"tools": [print], "processes": 2}, ""),
        ({"rollout_func": print}, ""),
        ({"rollout_func": print, "processes": 2}, "rollout_func"),
    ):
        trainer: Any = SimpleNamespace(
            is_fsdp_enabled=changes.get("is_fsdp_enabled", False),
            _dist=SimpleNamespace(is_zero3=changes.get("is_zero3", False)),
            args=SimpleNamespace(ds3_gather_for_generation=changes.get("gathers", True)),
            tools=changes.get("tools", []), rollout_func=changes.get("rollout_func"),
            accelerator=SimpleNamespace(num_processes=changes.get("processes", 1)),
        )  # fmt: skip
        said = unfit_for_groups(trainer)
        assert reason in said
        assert bool(said) == bool(reason)


# ---- several ranks


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("config", "options"), [("ddp_cpu", []), ("ddp_cpu", ["--lora"]), ("zero3_cpu", [])])
def test_ranks_with_completions_of_very_different_lengths(
    config: str, options: list[str], tmp_path: Path, extensions: str
) -> None:
    """Rank 1's completions all end with their first token. The run equals that of transformers' own loop."""
    runs = {}
    for mode in ("auto", "off"):
        module, output = "tests.support.train_uneven", str(tmp_path / mode)
        said = launching.launch_module(config, module, mode, output, *options, TORCH_EXTENSIONS_DIR=extensions)
        assert "own loop" not in said
        runs[mode] = load_file(next((tmp_path / mode).glob("*model.safetensors")))
    assert all(torch.equal(value, runs["off"][name]) for name, value in runs["auto"].items())
    tables = [launching.completions(tmp_path / mode)[["step", "prompt", "completion"]] for mode in ("auto", "off")]
    pd.testing.assert_frame_equal(*tables)
    log = [entry for entry in json.loads((tmp_path / "auto" / "log.json").read_text()) if "loss" in entry]
    assert len(log) == 3
    for entry in log:
        assert entry["completions/min_length"] == 1
        assert entry["completions/max_length"] > 5
    # Small batches are not compared at every step after the first.
    assert LARGEST in log[0]
    assert all(0 < entry[LARGEST] < 1e-4 for entry in log if LARGEST in entry)


# ---- contracts


def test_contract_with_trl() -> None:
    """Seam 5: TRL generates in one method, through `generate` of the unwrapped model, for training and evaluation."""
    turn = inspect.signature(TRLGRPOTrainer._generate_single_turn).parameters
    known = ["self", "prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"]
    assert list(turn) == known
    source = inspect.getsource(TRLGRPOTrainer._generate_single_turn)
    assert "unwrapped_model.generate(\n" in source
    assert "**generate_inputs, generation_config=self.generation_config" in source
    assert "return completion_ids, logprobs" in source
    vllm = inspect.getsource(TRLGRPOTrainer._generate_and_score_completions)
    assert f'"{MEAN}"' in vllm
    assert f'"{LARGEST}"' in vllm


def test_the_check_leaves_the_random_state_and_the_model_alone(tmp_path: Path) -> None:
    run = trainer(tmp_path, peft_config=adapter())
    run.model.train()
    modes = [module.training for module in run.model.modules()]
    before: list[torch.Tensor] = []
    scorer = run._generation_check.scorer
    plain = scorer.trl_log_probs

    def watched(policy: nn.Module, *args: Any) -> Any:
        assert not policy.training
        before.append(torch.get_rng_state())
        return plain(policy, *args)

    scorer.trl_log_probs = watched
    run._generate_single_turn([[5, 6], [7]], None, {}, 1)
    assert torch.equal(before[0], torch.get_rng_state())
    assert [module.training for module in run.model.modules()] == modes
