"""Replacements inside TRL on stand-ins: casts, caches, counts of completions, evaluation files, hidden secrets."""

from __future__ import annotations

import pickle
import time
from collections import defaultdict, deque
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig, TrainingArguments
from transformers import trainer as transformers_trainer

from grpo_recipes.generation.sampling_settings import PublishedSettings
from grpo_recipes.training import trl_patches
from grpo_recipes.training.trl_patches import (
    NOT_SENT_BY_TRL,
    _check_server_limit,
    _name_in_model,
    are_truncated,
    continuous_batching,
    correct_counts,
    hide_secrets,
    neutral_engine,
    refuse_cast,
    sampling_by_seed,
    send_policy,
    send_settings,
    separate_eval_completions,
    steady_clock,
    storable_logs,
    take_over_mask,
    without_secrets,
)
from grpo_rewards.errors import UserError

# ---- vLLM


@pytest.mark.parametrize(("rank", "split", "seed"), [(0, 1, 40), (3, 1, 43), (3, 2, 41), (2, 2, 41), (1, 2, 40)])
def test_ranks_that_share_an_engine_draw_alike(
    rank: int, split: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(trl_patches, "set_seed", seeds.append)
    monkeypatch.setattr(trl_patches, "PartialState", lambda: SimpleNamespace(process_index=rank))
    args: Any = SimpleNamespace(use_vllm=True, vllm_mode="colocate", seed=40, vllm_tensor_parallel_size=split)
    with sampling_by_seed(args):
        assert seeds == [], "the engine seeds the process when it is built"
    with sampling_by_seed(None):
        pass
    assert seeds == [seed]


def test_an_engine_is_restored_also_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine(**settings: Any) -> Any:
        return settings

    monkeypatch.setattr(trl_patches.vllm_generation, "LLM", engine, raising=False)
    with suppress(RuntimeError), neutral_engine():
        assert trl_patches.vllm_generation.LLM(model="x") == {"model": "x", "generation_config": "vllm"}
        raise RuntimeError
    assert trl_patches.vllm_generation.LLM is engine
    monkeypatch.delattr(trl_patches.vllm_generation, "LLM")
    with neutral_engine():
        assert not hasattr(trl_patches.vllm_generation, "LLM")


@pytest.mark.parametrize(
    ("published", "changes", "config", "refused"),
    [
        (99, {}, "auto", True),
        (100, {}, "auto", False),
        (None, {}, "auto", False),
        (0, {}, "auto", True),
        (99, {}, "weights", True),  # a folder
        (99, {}, "vllm", False),
        (99, {"vllm_mode": "colocate"}, "auto", False),
        (99, {"is_main_process": False}, "auto", False),
    ],
)
def test_a_server_that_cuts_completions_is_refused(
    published: Any, changes: dict[str, Any], config: str, refused: bool
) -> None:
    client = SimpleNamespace(get_server_info=lambda: {"model_config": {"generation_config": config}})
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(vllm_mode=changes.get("vllm_mode", "server")),
        accelerator=SimpleNamespace(is_main_process=changes.get("is_main_process", True)),
        max_completion_length=100,
        vllm_generation=SimpleNamespace(vllm_client=client),
    )
    if not refused:
        _check_server_limit(trainer, published)
        return
    with pytest.raises(UserError, match=f"completion at {published} tokens.* `max_completion_length` is 100: start"):
        _check_server_limit(trainer, published)


def settings_sent(config: GenerationConfig, given: dict[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments that vLLM is sent for a model with a configuration, and what is announced."""
    said: list[str] = []
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
    trainer: Any = SimpleNamespace(
        vllm_generation=SimpleNamespace(), model=SimpleNamespace(generation_config=config), max_completion_length=64,
        args=SimpleNamespace(generation_kwargs=given, vllm_mode="colocate"), eos_token_ids=[9, 2],
        accelerator=SimpleNamespace(is_main_process=True), **sampling,
    )  # fmt: skip
    send_settings(trainer, PublishedSettings(said.append))
    return trainer.vllm_generation.generation_kwargs, said


def test_the_settings_that_a_model_is_published_with_are_announced_unless_they_are_the_runs() -> None:
    runs = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
    assert settings_sent(GenerationConfig(do_sample=True, max_new_tokens=64, **runs), None)[1] == []
    for name in runs:
        _, said = settings_sent(GenerationConfig(do_sample=True, max_new_tokens=64, **{**runs, name: 2}), None)
        assert said == [f"the model's generation_config is not applied to completions ({name}: 2)"]
    _, said = settings_sent(GenerationConfig(do_sample=True, max_new_tokens=65, **runs), None)
    assert said == ["the model's generation_config is not applied to completions (max_new_tokens: 65)"]


@pytest.mark.parametrize(
    ("given", "stops"),
    [
        (None, [2, 9]),
        ({"stop_token_ids": [5, 9]}, [2, 5, 9]),
        ({"stop_token_ids": None}, [2, 9]),
        ({"ignore_eos": True}, None),
        ({"ignore_eos": True, "stop_token_ids": [5]}, [5]),
        ({"ignore_eos": False, "min_tokens": 3}, [2, 9]),
    ],
)
def test_completions_end_at_the_runs_own_tokens(given: dict[str, Any] | None, stops: list[int] | None) -> None:
    before = dict(given or {})
    sent, _ = settings_sent(GenerationConfig(), given)
    assert sent.get("stop_token_ids") == stops
    assert {**sent, "stop_token_ids": None} == {**NOT_SENT_BY_TRL, **before, "stop_token_ids": None}
    assert (given or {}) == before


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        ("model.layers.0.weight", "model.layers.0.weight"),
        ("lm_head.modules_to_save.policy.weight", "lm_head.weight"),
        ("lm_head.modules_to_save.other.weight", None),
        ("model.embed_tokens.token_adapter.weight", "model.embed_tokens.weight"),
        ("model.embed_tokens.token_adapter.trainable_tokens_delta.policy", None),
    ],
)
def test_names_that_vllm_gets(sent: str, name: str | None) -> None:
    assert _name_in_model(sent, "policy") == name


def test_a_full_model_is_sent_by_trl() -> None:
    vllm = SimpleNamespace(_iter_named_params=print)
    send_policy(SimpleNamespace(model=nn.Linear(1, 1), vllm_generation=vllm))  # type: ignore[arg-type]
    send_policy(SimpleNamespace(model=nn.Linear(1, 1)))  # type: ignore[arg-type]
    assert vars(vllm) == {"_iter_named_params": print}


# ---- continuous batching


@pytest.mark.parametrize(
    ("changes", "dtype", "refused"),
    [
        ({"bf16": True}, torch.float32, "torch.bfloat16"),
        ({"bf16": True}, torch.bfloat16, None),
        ({"fp16": True}, torch.bfloat16, "torch.float16"),
        ({"fp16": True}, torch.float16, None),
        ({}, torch.float32, None),
        ({"bf16": True, "deepspeed_plugin": "x"}, torch.float32, None),
        ({"bf16": True, "frozen": True}, torch.float32, None),
    ],
    ids=str,
)
def test_a_cast_of_trained_weights_is_refused(changes: dict[str, Any], dtype: torch.dtype, refused: str | None) -> None:
    frozen = changes.pop("frozen", False)
    policy = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).to(dtype)
    policy[1].float().requires_grad_(False)
    policy[0].requires_grad_(not frozen)
    args: Any = SimpleNamespace(**{"bf16": False, "fp16": False, "deepspeed_plugin": None, **changes})
    changes["frozen"] = frozen
    if refused is None:
        refuse_cast(policy, args)
        return
    with pytest.raises(UserError, match=f"casts the trained weights to {refused} in place"):
        refuse_cast(policy, args)


@pytest.mark.parametrize(
    ("device", "given", "inside"),
    [
        # 5 + 10 tokens take 4 blocks of 4, and 2 + 10 take 3.
        ("cpu", (None, None), (7, 512)),
        ("cpu", (9, None), (9, 512)),
        ("cpu", (None, 64), (7, 64)),
        ("cuda", (None, None), (None, None)),
    ],
)
def test_a_cache_on_a_cpu_has_the_size_that_the_prompts_need(device: str, given: Any, inside: Any) -> None:
    config: Any = SimpleNamespace(num_blocks=given[0], max_batch_tokens=given[1], page_size=4)
    policy: Any = SimpleNamespace(device=torch.device(device))
    with suppress(RuntimeError), continuous_batching(config, policy, [[1] * 5, [1] * 2], 10):
        assert (config.num_blocks, config.max_batch_tokens) == inside
        raise RuntimeError
    assert (config.num_blocks, config.max_batch_tokens) == given
    with continuous_batching(config, policy, [[1]] * 600, 10):
        assert config.max_batch_tokens == (600 if (device, given[1]) == ("cpu", None) else given[1])


# ---- completions that end with a stop string


def counted(completions: list[list[int]], mask: Any, *, masks: bool, training: bool = True, ends: Any = None) -> Any:
    """Return the corrected metrics, and the corrected mask."""
    model = nn.Linear(1, 1).train(training)
    names = ("clipped_ratio", "mean_terminated_length", "min_terminated_length", "max_terminated_length")
    logged = {f"completions/{name}": [7.0, 7.0] for name in names}
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather=lambda tensor: tensor)
    trainer: Any = SimpleNamespace(
        accelerator=accelerator, model=model, _metrics={"train" if training else "eval": logged}, eos_token_ids=[2],
        _tokenizer=SimpleNamespace(pad_token_id=0),
    )  # fmt: skip
    stop: Any = SimpleNamespace(end=lambda ids: ids[-1] == (9 if ends is None else ends))
    found = correct_counts(trainer, ([[5]], completions, mask, "more", "else"), stop, masks)
    assert (found[0], found[1], found[3:]) == ([[5]], completions, ("more", "else"))
    assert {values[0] for values in logged.values()} == {7.0}, "earlier entries stay"
    return [values[1] for values in logged.values()], found[2]


def test_completions_that_end_with_a_string_are_not_truncated() -> None:
    completions = [[1, 2], [1, 1, 9], [1, 1, 1, 1], [1, 1, 1, 1, 0]]
    metrics, mask = counted(completions, None, masks=False)
    assert metrics == [0.25, pytest.approx(10 / 3), 2.0, 5.0]
    assert mask is None
    metrics, mask = counted(completions, None, masks=True, training=False)
    assert metrics == [0.25, pytest.approx(10 / 3), 2.0, 5.0]
    assert mask == [[1, 1], [1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1, 1]]
    tools = [[1, 1], [1, 0, 1], [1, 0, 0, 1], [1, 0, 0, 0, 1]]
    metrics, mask = counted(completions, tools, masks=True)
    assert metrics == [0.25, 2.0, 2.0, 2.0], "results of tools are not counted"
    assert mask == [[1, 1], [1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0, 1]]
    metrics, _ = counted([[1, 1]], None, masks=False)
    assert metrics == [1.0, 0.0, 0.0, 0.0]


def test_truncation_without_stop_strings_and_the_mask_of_trl() -> None:
    trainer: Any = SimpleNamespace(
        eos_token_ids=[2], _tokenizer=SimpleNamespace(pad_token_id=0), mask_truncated_completions=True
    )
    assert are_truncated(trainer, [[1, 2], [2, 1], [1, 0]], None) == [False, True, False]
    assert [take_over_mask(trainer), take_over_mask(trainer)] == [True, False]
    assert trainer.mask_truncated_completions is False


# ---- completions of an evaluation


def logging(folder: Path, *, writes: bool = True, step: int = 12) -> Any:
    return SimpleNamespace(
        args=SimpleNamespace(output_dir=str(folder)),
        state=SimpleNamespace(global_step=step),
        _logs={"prompt": deque(["a"], maxlen=4), "rewards": defaultdict(deque, x=deque([1]))},
        accelerator=SimpleNamespace(is_main_process=writes),
        eval_dataset=None,
        log_completions=True,
    )


def test_an_evaluation_has_a_file_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "completions"
    folder.mkdir()
    table = folder / "completions_00012.parquet"
    table.write_text("training")
    trainer = logging(tmp_path)
    logs = trainer._logs
    with suppress(RuntimeError), separate_eval_completions(trainer, None, "eval_a/b c"):
        assert not table.exists()
        assert trainer._logs is not logs
        assert trainer._logs["prompt"].maxlen is None
        assert (len(trainer._logs["prompt"]), dict(trainer._logs["rewards"])) == (0, {})
        trainer._logs["rewards"]["x"].append(3)
        table.write_text("evaluation")
        raise RuntimeError
    assert trainer._logs is logs
    assert {path.name: path.read_text() for path in folder.iterdir()} == {
        "completions_00012.parquet": "training", "eval_a-b-c_completions_00012.parquet": "evaluation",
    }  # fmt: skip
    table.unlink()
    with separate_eval_completions(trainer, ["rows"], "eval"):
        pass
    assert not table.exists()
    assert not (folder / "eval_completions_00012.parquet").exists()
    table.write_text("other rank's")
    other = logging(tmp_path, writes=False)
    with separate_eval_completions(other, None, "eval"):
        assert table.exists()
        assert not other._logs["prompt"]
    assert table.read_text() == "other rank's"


@pytest.mark.parametrize(
    ("own", "given", "separate"), [({}, None, False), ([], {}, False), ({}, [], True), ([], None, True)]
)
def test_each_of_several_datasets_is_separated_by_itself(own: Any, given: Any, separate: bool, tmp_path: Path) -> None:
    trainer = logging(tmp_path)
    trainer.eval_dataset = own
    logs = trainer._logs
    with separate_eval_completions(trainer, given, "eval"):
        assert (trainer._logs is not logs) is separate


@pytest.mark.parametrize(("logs", "writes"), [(True, True), (False, True), (True, False)])
def test_conversations_are_made_storable_only_where_they_are_written(
    logs: bool, writes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl_patches, "storable", lambda column: ["storable", *column])
    trainer = logging(tmp_path, writes=writes)
    trainer.log_completions, trainer._logs["completion"] = logs, ["b"]
    before = trainer._logs
    with suppress(RuntimeError), storable_logs(trainer):
        expected = ["storable", "a"] if logs and writes else deque(["a"])
        assert trainer._logs["prompt"] == expected
        assert (trainer._logs["completion"] == ["storable", "b"]) is (logs and writes)
        assert trainer._logs["rewards"] is before["rewards"]
        raise RuntimeError
    assert trainer._logs is before


# ---- secrets


def test_arguments_hide_their_secrets_where_they_are_read_as_a_whole(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", hub_token="hf_secret")
    args.lr_scheduler_kwargs = {"a": (1, 2)}
    hide_secrets(args)
    kind = type(args)
    hide_secrets(args)
    assert type(args) is kind
    assert (kind.__name__, kind.__module__) == ("TrainingArguments", TrainingArguments.__module__)
    assert args.hub_token == "hf_secret"
    assert "hf_secret" not in str(args.to_dict())
    again = pickle.loads(pickle.dumps(args))
    assert type(again) is TrainingArguments
    assert "hf_secret" not in str(vars(again))
    assert again.lr_scheduler_kwargs == {"a": (1, 2)}
    assert again.output_dir == args.output_dir


def test_types_stay_where_nothing_is_hidden() -> None:
    values = {"betas": (0.9, 0.99), "hub_token": "hf_x", "urls": ("http://u:p@host/",), "steps": 3}
    shown = without_secrets(values)
    assert (shown["betas"], shown["steps"]) == ((0.9, 0.99), 3)
    assert "hf_x" not in str(shown)
    assert "u:p" not in str(shown)
    for kind in (trl_patches.DeepSpeedPlugin, trl_patches.HfDeepSpeedConfig):
        plugin: Any = object.__new__(kind)
        vars(plugin).update(wandb={"api_key": "k3y"}, zero_stage=3)
        copied = without_secrets({"plugin": plugin})["plugin"]
        assert type(copied) is kind
        assert copied.zero_stage == 3
        assert "k3y" not in str(vars(copied))
        assert vars(plugin)["wandb"] == {"api_key": "k3y"}


def test_durations_have_no_jumps_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stock = time.time, transformers_trainer.speed_metrics
    with steady_clock():
        started = time.time()
        monkeypatch.setattr(time, "time", lambda: clock() - 3600)
        found = transformers_trainer.speed_metrics("train", started, num_steps=2)
    assert 0 <= found["train_runtime"] < 60
    assert found["train_steps_per_second"] > 0
    assert transformers_trainer.speed_metrics is stock
