"""Runs of a tiny policy through the entry point that users launch."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer
from grpo_recipes.checks.checks import Machine
from grpo_recipes.process.faults import RewardFault
from grpo_recipes.recipe.recipe import Recipe, RecipeError, parse_recipe, shipped_files
from grpo_recipes.reports.run import Run
from grpo_recipes.run import build, train
from grpo_recipes.run.build import bare_trainer, build_trainer, load_policy
from grpo_recipes.run.describe import describe_run, measured_precision, summary
from grpo_recipes.run.endings import end_stopped, known_secrets
from grpo_recipes.run.inputs import build_inputs, check_weights, load_reward_models
from grpo_recipes.run.prepare import Prepared, identity_of, only_run, prepare
from grpo_recipes.training.callbacks import StopOnSignal
from tests.support import launching, recorded
from tests.support.errors import refused
from tests.support.exact_generation import generate_exactly
from tests.support.tiny import save_reward_model

SMALL = [
    *("--use_cpu", "--bf16=false", "--dtype=float32", "--max_completion_length=8", "--logging_steps=1"),
    *("--save_steps=2", "--gradient_checkpointing=false"),
]
LEARNING = ["--rewards", "[tests.support.probe_rewards.distinct_characters]", "--learning_rate=1e-3"]
RESUME = "--resume_from_checkpoint=true"


def arguments(tiny_model: Path, gsm8k_file: Path, output: Path, *more: str) -> list[str]:
    """Return the arguments of the 24 GB recipe with overrides of model, data, device and sizes only."""
    own = [f"--model_name_or_path={tiny_model}", f"--dataset.path={gsm8k_file}", f"--output_dir={output}"]
    return ["--config", "gsm8k-qwen2.5-1.5b-24gb", *own, *SMALL, *more]


def generates(model: torch.nn.Module, folder: Path) -> bool:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("1 + 1 =", return_tensors="pt")
    return model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] > prompt["input_ids"].shape[1]


def record_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "run.json").read_text())


def state_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "trainer_state.json").read_text())


def fault_of(run: Path) -> str:
    return json.loads((run / "fault-rank0.json").read_text())["sentence"]


def same_weights(one: Path, other: Path) -> bool:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def test_a_run_leaves_all_documented_files(tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys) -> None:
    output = tmp_path / "run"
    assert train.main(arguments(tiny_model, gsm8k_file, output, "--max_steps=2", "--save_steps=1")) == 0

    said = capsys.readouterr().out
    for figure in ("2 prompts × 8 completions = 16", "2 optimizer steps", "gsm8k_correctness", "whole on each process"):
        assert figure in said
    record = record_of(output)
    assert (record["world_size"], record["train_prompts"], record["resumed_from"]) == (1, 40, None)
    assert record["recipe"]["beta"] == 0.04
    assert (record["seed"], record["shuffle_dataset"]) == (42, True)
    assert record["geometry"]["prompts_per_generation"] == 2
    assert record["hardware"] == f"CPU ({platform.machine()}, {os.cpu_count()} cores), 1 process"
    assert record["identity"]["rows"] == 40
    assert record["versions"]["trl"].startswith("1.16")
    logged = [entry for entry in state_of(output)["log_history"] if "loss" in entry]
    assert len(logged) == 2
    # With dropout off the first step's policy is the reference.
    assert abs(logged[0]["kl"]) < 1e-6
    assert json.loads((output / "_log.jsonl").read_text().splitlines()[-1]) == {"step": 2, "ended": True}
    completions = pd.concat(map(pd.read_parquet, sorted((output / "completions").glob("*.parquet"))))
    assert completions.groupby("step").size().to_dict() == {1: 16, 2: 16}
    assert {"prompt", "completion", "gsm8k_correctness", "tag_presence", "advantage"} <= set(completions.columns)
    card = (output / "README.md").read_text()
    for figure in (tiny_model.name, "40 prompts", gsm8k_file.name):
        assert figure in card
    assert str(tmp_path.parent) not in card
    assert (output / "checkpoint-2").is_dir()
    modes = {(output / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1, "the weights can be read by all who can read the configuration"
    assert generates(AutoModelForCausalLM.from_pretrained(output), output)


# A short run, and what may resume it


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run of two steps with a checkpoint after each. Returns its folder, beside the files that it read."""
    folder = tmp_path_factory.mktemp("short")
    policy = launching.build_policy(folder / "policy")
    rows = launching.write_rows(folder / "rows.jsonl", 12)
    cheap = {"max_steps": 2, "report_to": "none", "micro_batching": "off", "generation_check": False}
    recipe = launching.write_recipe(folder / "r.yaml", policy, rows, folder / "run", **cheap)
    assert train.main(["--config", str(recipe)]) == 0
    return folder / "run"


@pytest.fixture
def run(short: Path, tmp_path: Path) -> Path:
    """Copy the short run."""
    return shutil.copytree(short, tmp_path / "run")


def resumed(short: Path, run: Path, *more: str) -> list[str]:
    return ["--config", str(short.parent / "r.yaml"), f"--output_dir={run}", RESUME, *more]


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_leads_to_the_same_model(short: Path, run: Path) -> None:
    (run / "model.safetensors").unlink()
    (run / "fault-rank0.json").write_text('{"sentence": "of an earlier attempt", "time": 1}')
    flip_a_byte(run / "checkpoint-2" / "model.safetensors")
    assert train.main(resumed(short, run)) == 0
    assert record_of(run)["resumed_from"].endswith("checkpoint-1")
    assert len(record_of(run)["launches"]) == 2
    assert (run / "checkpoint-2-damaged").is_dir()
    assert same_weights(run, short)
    assert not list(run.glob("fault-*"))


def test_a_run_without_an_undamaged_checkpoint_is_not_resumed(short: Path, run: Path, capsys: Any) -> None:
    for step in (1, 2):
        flip_a_byte(run / f"checkpoint-{step}" / "model.safetensors")
    before = record_of(run)
    assert train.main(resumed(short, run)) == 2
    assert "`resume_from_checkpoint`" in last_line(capsys)
    assert record_of(run) == before
    assert (run / "checkpoint-2").is_dir()


def test_a_finished_run_is_only_loaded(short: Path, run: Path) -> None:
    """Like after a kill between the last checkpoint and the final model."""
    (run / "model.safetensors").unlink()
    before = {path.name: path.read_bytes() for path in (run / "completions").iterdir()}
    assert train.main(resumed(short, run)) == 0
    assert same_weights(run, short)
    assert {path.name: path.read_bytes() for path in (run / "completions").iterdir()} == before
    for key in ("global_step", "max_steps", "epoch"):
        assert state_of(run)[key] == state_of(short)[key]


def test_a_resume_of_another_run_is_refused_with_what_has_changed(short: Path, run: Path, capsys: Any) -> None:
    record = record_of(run)
    other_rows = run.parent / "rows.jsonl"
    rows = (short.parent / "rows.jsonl").read_text()
    other_rows.write_text(rows.replace("What", "How"))
    other_policy = launching.build_policy(run.parent / "policy", tied=False)
    for more, figures in (
        (["--learning_rate=1e-4", "--beta=0.5"], ("`learning_rate` was 0.001 and is 0.0001", "`beta`")),
        (["--dataset.split=train[:8]"], ("`dataset.split`",)),
        ([f"--dataset.path={other_rows}"], ("`dataset.path`",)),
        ([f"--model_name_or_path={other_policy}"], ("`model_name_or_path`",)),
    ):
        assert train.main(resumed(short, run, *more)) == 2
        said = last_line(capsys)
        assert "`resume_from_checkpoint`" in said
        assert all(figure in said for figure in figures), said
    (short.parent / "rows.jsonl").write_text(other_rows.read_text())
    assert train.main(resumed(short, run)) == 2
    (short.parent / "rows.jsonl").write_text(rows)
    assert "`prompt`" in last_line(capsys)
    (run / "run.json").write_text(json.dumps({**record, "seed": 7, "launches": [{**record["launches"][0], "seed": 7}]}))
    assert train.main(resumed(short, run)) == 2
    assert "7" in last_line(capsys)
    (run / "run.json").write_text("{")
    assert train.main(resumed(short, run)) == 2
    assert "run.json" in last_line(capsys)
    (run / "run.json").write_text(json.dumps(record))
    assert train.main(resumed(short, run)[:-1]) == 2, "an earlier run is never overwritten"
    assert state_of(run) == state_of(short)


def test_a_preparation_names_the_run_and_ends_generations_as_its_geometry_does(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = ["--max_steps=3", "--steps_per_generation=2", "--gradient_accumulation_steps=1"]
    more += ["--save_steps=2", "--hub_token=hf_own"]
    monkeypatch.setenv("HF_TOKEN", "before")
    made = prepare(parse_recipe([*resumed(short, tmp_path / "new")[:3], *more]), Machine.here())
    assert os.environ["HF_TOKEN"] == "hf_own", "the hub's client reads it there"
    assert made.training_args.hub_token is None
    assert made.training_args.run_name == "new", "trackers show it"
    assert (made.checkpoint, made.steps, made.is_over) == (None, 3, False)
    ends = [made.interruption.ends_generation(step) for step in (1, 2, 3, 4)]
    assert ends == [made.checked.geometry.ends_generation(step, 12) for step in (1, 2, 3, 4)]


def test_a_resumed_trainer_goes_on_with_the_schedule(short: Path, run: Path) -> None:
    recipe = parse_recipe(resumed(short, run, "--disable_tqdm=true", "--max_steps=3"))
    with only_run(prepare(recipe, Machine.here())) as prepared:
        trainer = build_trainer(prepared)
        names = {type(one).__name__ for one in trainer.callback_handler.callbacks}
        assert "ContinueSchedule" in names
        assert "LiveLine" not in names
        assert prepared.steps_before == 2
        assert prepared.held is trainer.checkpoints.held is not None
        assert measured_precision(prepared, trainer)[1] == 1.0


def test_an_update_that_rounding_loses_is_noted(short: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    more = ["--dtype=bfloat16", "--bf16=true", "--learning_rate=1e-7", "--optim=adamw_torch"]
    recipe = parse_recipe(resumed(short, tmp_path / "new", *more))
    prepared = prepare(recipe, Machine(1, bf16=True))
    trainer = build_trainer(prepared)
    precision, surviving = measured_precision(prepared, trainer)
    assert precision.updated == "bfloat16"
    assert surviving is not None
    assert surviving < 0.5
    describe_run(prepared, trainer)
    assert "note" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")  # FSDP may have loaded the weights on the first rank only
    assert measured_precision(prepared, trainer)[1] == 1.0


# Recipes that are refused, before the policy is loaded


def test_a_refused_recipe_leaves_nothing_and_prints_one_line(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shutil.copytree(tiny_model, tmp_path / "words")
    tokenizer = recorded.tokenizer()
    tokenizer.chat_template = "{{ messages[-1].content }}"
    tokenizer.save_pretrained(words)
    monkeypatch.setattr(build, "load_policy", lambda *_: pytest.fail("the model is loaded"))
    output = tmp_path / "run"
    for model, more, figure in (
        (tiny_model, "--num_generations=7", "num_generations"),
        (words, "--generation_kwargs.stop=[b]", "`generation_kwargs.stop`"),
    ):
        assert train.main(arguments(model, gsm8k_file, output, more)) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        assert figure in said
    assert not output.exists()


@pytest.fixture
def recipe(short: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """Return a function that reads the short run's recipe with changes."""

    def read(*more: str) -> Recipe:
        return parse_recipe(["--config", str(short.parent / "r.yaml"), f"--output_dir={tmp_path / 'new'}", *more])

    return read


@pytest.fixture(scope="module")
def adapter(short: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save an adapter on the short run's policy."""
    model = AutoModelForCausalLM.from_pretrained(short.parent / "policy")
    folder = tmp_path_factory.mktemp("adapter")
    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(folder)
    AutoTokenizer.from_pretrained(short.parent / "policy").save_pretrained(folder)
    return folder


def test_missing_or_damaged_weights_are_refused_before_a_model_is_loaded(
    recipe: Callable[..., Recipe], adapter: Path, short: Path, tmp_path: Path
) -> None:
    damaged = shutil.copytree(short.parent / "policy", tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    folders = {name: shutil.copytree(adapter, tmp_path / name) for name in ("on-damaged", "on-nothing", "empty")}
    for name, base in (("on-damaged", damaged), ("on-nothing", tmp_path / "gone")):
        file = folders[name] / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": str(base)}))
    (folders["empty"] / "adapter_model.safetensors").unlink()
    for key, value, place, figure in (
        ("model_name_or_path", damaged, "`model_name_or_path`", "model.safetensors"),
        ("model_name_or_path", folders["on-damaged"], "`base_model_name_or_path`", "model.safetensors"),
        ("model_name_or_path", folders["on-nothing"], "`model_name_or_path`", "gone"),
        ("model_name_or_path", folders["empty"], "`model_name_or_path`", "empty"),
        ("reference.adapter", folders["empty"], "`reference.adapter`", "empty"),
    ):
        with refused(place, figure, by=RecipeError):
            check_weights(recipe(f"--{key}={value}"))
    for name in (short.parent / "policy", adapter, "a/name-of-the-hub"):
        check_weights(recipe(f"--model_name_or_path={name}"))


def test_reward_models_are_loaded_before_the_policy(recipe: Callable[..., Recipe], tmp_path: Path, capsys) -> None:
    save_reward_model(tmp_path / "judge")
    spec = f"[{{name: reward_model, kwargs: {{model: {tmp_path / 'judge'}, device: cpu}}}}]"
    checked = build_inputs(recipe("--rewards", spec), Machine.here()).checked
    load_reward_models(recipe(), checked)
    assert str(tmp_path / "judge") in capsys.readouterr().out
    weights = tmp_path / "judge" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with refused("`rewards`", "model.safetensors", by=RecipeError):
        load_reward_models(recipe(), checked)


def test_an_adapter_is_continued_and_never_stacked(recipe: Callable[..., Recipe], adapter: Path, short: Path) -> None:
    args = GRPOConfig(use_cpu=True, bf16=False, report_to="none")
    policy = short.parent / "policy"
    assert load_policy(recipe(), args) == str(policy)
    loaded = load_policy(recipe(f"--model_name_or_path={adapter}"), args)
    assert isinstance(loaded, PeftModel)
    assert any(parameter.requires_grad for name, parameter in loaded.named_parameters() if "lora_" in name)
    with refused("`use_peft`"):
        load_policy(recipe(f"--model_name_or_path={adapter}", "--use_peft=true"), args)


def test_an_identity_has_every_model_that_is_loaded(recipe: Callable[..., Recipe], adapter: Path, short: Path) -> None:
    own = recipe(f"--model_name_or_path={adapter}", f"--reference.adapter={adapter}")
    checked = build_inputs(own, Machine.here()).checked
    identity = identity_of(own, checked)
    places = {"policy": str(adapter), "base": str(short.parent / "policy"), "reference": str(adapter)}
    assert identity.places == places
    assert identity.content["weights"].keys() == places.keys()
    assert identity_of(recipe(), checked).places == {"policy": places["base"]}


@pytest.mark.parametrize("overlong", ["drop", "cut_left"])
def test_prompts_over_the_limit_are_counted(
    overlong: str, recipe: Callable[..., Recipe], short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(short.parent / "policy")
    whole = recipe("--dataset.eval_share=0.3", "--eval_strategy=steps")
    unlimited = build_inputs(whole, Machine.here()).checked
    lengths = [len(tokenizer(prompt)["input_ids"]) for prompt in unlimited.train_dataset["prompt"]]
    limit = min(lengths)
    more = [f"--dataset.max_prompt_tokens={limit}", f"--dataset.overlong_prompts={overlong}"]
    capsys.readouterr()
    cut = recipe("--dataset.eval_share=0.3", "--eval_strategy=steps", *more)
    checked = build_inputs(cut, Machine.here()).checked
    over = sum(length > limit for length in lengths)
    assert f"{over} of {len(lengths)} prompts over {limit} tokens" in capsys.readouterr().out
    assert len(checked.train_dataset) == len(lengths) - (over if overlong == "drop" else 0)
    assert checked.eval_dataset is not None
    for table in (checked.train_dataset, checked.eval_dataset):
        assert max(len(tokenizer(prompt)["input_ids"]) for prompt in table["prompt"]) <= limit


class RecordingTrainer:
    """Trainer that keeps its arguments, with the reward of an environment behind those of the recipe."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.reward_funcs = [*given["reward_funcs"], lambda **columns: [float("inf")]]
        self.reward_func_names = ["own", "Game"]


def test_a_trainer_is_given_every_key_of_its_recipe(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "GRPOTrainer", RecordingTrainer)
    own = recipe(
        *("--rewards", "[{name: tests.support.launching.variety, weight: 0.5}]", "--optim=adamw_bf16"),
        *("--kl_estimator=full", "--beta=0.1", "--micro_batching=off", "--generation=off", "--generation_check=false"),
        *("--dataset.eval_share=0.3", "--eval_strategy=steps", "--use_peft=true", "--lora_r=3"),
        "--sampling.floor=0.5",
    )
    inputs = build_inputs(own, Machine.here())
    checked = inputs.checked
    args = GRPOConfig(use_cpu=True, bf16=False, report_to="none")
    made: Any = bare_trainer(inputs, args)
    keys = ("tool_limits", "kl_estimator", "micro_batching", "generation", "sampling", "advantages", "reference")
    assert {key: made.given[key] for key in keys} == {key: getattr(own, key) for key in keys}
    assert made.given["generation_check"] is own.generation_check is False
    assert args.reward_weights == [0.5]
    assert made.given["eval_dataset"] is checked.eval_dataset is not None
    assert made.given["train_dataset"] is checked.train_dataset
    assert made.given["processing_class"] is inputs.tokenizer
    assert made.given["peft_config"].r == 3
    assert made.given["optimizer_cls_and_kwargs"] is not None
    unused = ("quantization_config", "tools", "environment_factory", "rollout_func")
    assert [key for key in unused if made.given[key] is not None] == []
    assert made.reward_funcs[1].__name__ == "Game"
    with pytest.raises(RewardFault):  # the rewards of environments are checked too
        made.reward_funcs[1](prompts=["a"], completions=["b"])
    recorded_inputs = replace(inputs, recipe=recipe(), rollout=object())  # type: ignore[arg-type]
    plain = bare_trainer(recorded_inputs, args)
    assert plain.given["optimizer_cls_and_kwargs"] is None  # type: ignore[attr-defined]
    assert plain.given["train_dataset"].column_names == ["prompt"], "recorded responses"  # type: ignore[attr-defined]


# Ends of a run


def secret_in_an_error(completions: list, trainer_state: Any, **columns: object) -> list[float]:
    """Raise in the second step, with a key of the environment."""
    if trainer_state.global_step == 1:
        raise ValueError(f"the judge refused {os.environ['JUDGE_API_KEY']}")
    return launching.variety(completions)


def test_a_failed_run_names_its_reward_and_its_checkpoint_without_secrets(
    short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "hunter2-and-more")
    run = tmp_path / "run"
    before = signal.getsignal(signal.SIGTERM)
    given = [*resumed(short, run)[:3], "--rewards", f"{__name__}.secret_in_an_error"]
    assert train.main(given) == 1
    assert signal.getsignal(signal.SIGTERM) is before, "Ctrl-C works as before"
    printed = capsys.readouterr().err
    last = printed.splitlines()[-1]
    assert last.startswith("error: ")
    for figure in ("`secret_in_an_error`", "ValueError", "--resume_from_checkpoint", "checkpoint-1"):
        assert figure in last
    assert "Traceback" in printed
    assert "hunter2" not in printed + (run / "fault-rank0.json").read_text()
    assert Run.read(run).fault["sentence"] == last.removeprefix("error: ")
    assert not (run / "model.safetensors").exists()


def test_ctrl_c_saves_the_step_and_ends_with_130(short: Path, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    given = [*resumed(short, run)[:3], "--rewards", "[tests.support.probe_rewards.interrupted_once]", "--max_steps=3"]
    before = signal.getsignal(signal.SIGINT)
    assert train.main([*given, "--save_steps=9"]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    last = said.err.splitlines()[-1]
    for figure in ("Ctrl-C", "step 2 of 3", "--resume_from_checkpoint"):
        assert figure in last
        assert figure in fault_of(run)
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-2"]
    assert not (run / "model.safetensors").exists()


def test_ctrl_c_before_training_prints_one_line_and_leaves_no_run(
    short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "load_policy", interrupted)
    assert train.main(resumed(short, tmp_path / "run")[:3]) == 130
    said = capsys.readouterr().err
    assert said.startswith("stopped by Ctrl-C: ")
    assert said.count("\n") == 1
    assert "--resume_from_checkpoint" not in said
    assert not (tmp_path / "run" / "run.json").exists()


def test_a_stop_is_told_by_the_first_rank_with_the_way_to_resume(
    recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, unset = recipe(), dict.fromkeys(Prepared.__dataclass_fields__)
    own.output_dir.mkdir()
    trainer: Any = SimpleNamespace(
        accelerator=SimpleNamespace(wait_for_everyone=lambda: None),
        state=SimpleNamespace(global_step=3, max_steps=9),
        end=lambda: None,
    )
    for number, only_model, rank, code in (
        (signal.SIGTERM, False, "0", 0),
        (signal.SIGINT, False, "0", 130),
        (signal.SIGINT, True, "0", 130),
        (signal.SIGTERM, False, "1", 0),
    ):
        monkeypatch.setenv("RANK", rank)
        args = GRPOConfig(use_cpu=True, bf16=False, report_to="none", save_only_model=only_model)
        interruption = StopOnSignal(lambda step: True)
        interruption.requested = number
        parts = {"recipe": own, "training_args": args, "interruption": interruption}
        assert end_stopped(Prepared(**{**unset, **parts}), trainer) == code
        said = capsys.readouterr().err
        if rank == "1":
            assert said == ""
            continue
        assert "step 3 of 9" in said
        assert interruption.name in said
        assert ("--resume_from_checkpoint" in said) is not only_model
        assert fault_of(own.output_dir) == said.rstrip("\n")


def test_a_failed_start_recommends_no_resume(
    short: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*args: Any) -> None:
        raise ValueError("this combination is not supported")

    monkeypatch.setattr(build, "load_policy", refuses)
    assert train.main(resumed(short, tmp_path / "new")[:3]) == 1
    assert last_line(capsys) == "error: ValueError: this combination is not supported"
    assert train.main(resumed(short, run, "--max_steps=4")) == 1
    last = last_line(capsys)
    assert str(run / "checkpoint-2") in last
    assert "--resume_from_checkpoint" not in last


def test_a_run_without_a_step_has_failed(
    short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GRPOTrainer, "train", lambda self, **given: None)
    assert train.main([*resumed(short, tmp_path / "run")[:3], "--max_steps=4"]) == 1
    assert "of 4" in last_line(capsys)
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_failure_after_the_save_is_a_warning(
    short: Path, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("the hub\ndid not answer hunter2-and-more")

    monkeypatch.setenv("MY_API_KEY", "hunter2-and-more")
    monkeypatch.setattr(build, "write_model_card", fails)
    (run / "trainer_state.json").unlink()
    assert train.main(resumed(short, run)) == 0
    said = capsys.readouterr()
    warnings = [line for line in said.err.splitlines() if line.startswith("warning: ")]
    assert len(set(warnings)) == 1
    assert str(run) in warnings[0]
    assert "(ConnectionError: the hub did not answer <hidden>)" in warnings[0]
    assert same_weights(run, short)
    assert state_of(run)["global_step"] == 2, "what follows is done"
    assert "diagnosis" in said.out


def test_the_summary_of_a_run_has_its_first_and_last_reward() -> None:
    history = [{"loss": 1.0}, *({"reward": reward} for reward in (0.1, None, 0.5, 1.23456))]
    state = SimpleNamespace(log_history=history, global_step=7)
    trainer: Any = SimpleNamespace(state=state, model=SimpleNamespace(), args=SimpleNamespace(output_dir="out"))
    said = summary(trainer, 61.6)
    for figure in ("7 optimizer steps", "62 s", "model", "out", "0.100 -> 1.235"):
        assert figure in said
    trainer.model.peft_config, history[1:] = {}, []
    assert "adapter" in summary(trainer, 0.4)


def test_secrets_of_the_environment_are_known_and_its_folders_are_none(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a shell's folder, `OLDPWD`, looks like that of a password."""
    monkeypatch.setenv("MY_API_KEY", "hunter2-and-more")
    monkeypatch.setenv("OLDPWD", "/a/folder/of/the/user")
    monkeypatch.setenv("PWD", "/another/folder")
    monkeypatch.setenv("DB_PWD", "of-a-database")
    known = known_secrets(recipe("--hub_token=hf_own_token"))
    assert {"hunter2-and-more", "hf_own_token", "of-a-database"} <= known
    assert not {"/a/folder/of/the/user", "/another/folder"} & known


def test_the_trainer_is_a_drop_in(tiny_model: Path, tmp_path: Path) -> None:
    """A TRL script gives the same numbers with our import, if the random numbers are equal."""

    def short(completions: list[str], **columns: object) -> list[float]:
        return [-float(len(set(completion))) for completion in completions]

    def history(trainer_class: type, **ours: Any) -> list[dict]:
        args = GRPOConfig(
            **{"output_dir": str(tmp_path / trainer_class.__module__), "use_cpu": True, "bf16": False},
            **{"per_device_train_batch_size": 4, "num_generations": 4, "gradient_accumulation_steps": 2},
            **{"max_completion_length": 6, "max_steps": 2, "learning_rate": 1e-3, "beta": 0.1, "logging_steps": 1},
            report_to="none",
        )
        dataset = Dataset.from_dict({"prompt": ["one", "two plus two", "three", "four", "five and six"]})
        trainer = trainer_class(str(tiny_model), short, args, dataset, **ours)
        if trainer_class is GRPOTrainer:
            generate_exactly(trainer)
        trainer.train()
        # Clocks, and what only ours samples.
        left_out = ("step_time", "runtime", "per_second", "total_flos", "updates/")
        return [
            {k: v for k, v in entry.items() if not any(c in k for c in left_out)} for entry in trainer.state.log_history
        ]

    theirs = history(TRLGRPOTrainer)
    assert any(entry["loss"] != 0 for entry in theirs if "loss" in entry)
    assert history(GRPOTrainer, micro_batching="off", generation="off", generation_check=False) == theirs
    for mine, other in zip(history(GRPOTrainer), theirs, strict=True):
        kept = {name: value for name, value in mine.items() if not name.startswith(("efficiency/", "sampling/"))}
        assert kept.keys() == other.keys()
        for name, value in other.items():
            # TRL averages these over micro-batches, one mean of tokens each, so they depend on which rows meet.
            loose = name in ("kl", "entropy") or name.startswith("clip_ratio/")
            assert kept[name] == pytest.approx(value, rel=0.1 if loose else 1e-4, abs=1e-6), name


# Whole runs


@pytest.mark.slow
def test_a_run_resumes_where_it_was_saved_and_its_record_runs_it_again(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, halves, again = tmp_path / "whole", tmp_path / "halves", tmp_path / "again"
    assert train.main(arguments(tiny_model, gsm8k_file, whole, *LEARNING, "--max_steps=4")) == 0
    assert train.main(arguments(tiny_model, gsm8k_file, halves, *LEARNING, "--max_steps=2")) == 0
    assert train.main(arguments(tiny_model, gsm8k_file, halves, *LEARNING, "--max_steps=4", RESUME)) == 0
    assert not same_weights(tiny_model, whole)
    assert same_weights(halves, whole)
    config = ["--config", str(halves / "run.json")]
    assert train.main(config) == 2
    assert "--output_dir" in last_line(capsys)
    assert train.main([*config, f"--output_dir={again}"]) == 0
    assert same_weights(again, whole)


class RateOfEachStep(TrainerCallback):
    """Records the learning rate of each optimizer step, read from the optimizer just before the step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])


@pytest.mark.slow
def test_a_lengthened_run_has_the_learning_rates_of_one_planned_for_that_length(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint holds the rate 0, with which the shorter schedule ends."""
    seen: list[RateOfEachStep] = []

    class Watched(GRPOTrainer):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            seen.append(RateOfEachStep())
            self.add_callback(seen[-1])

    monkeypatch.setattr(build, "GRPOTrainer", Watched)
    more = ["--lr_scheduler_type=cosine", "--warmup_steps=1", "--report_to=none"]
    assert train.main([*resumed(short, tmp_path / "planned", *more)[:3], *more, "--max_steps=6"]) == 0
    assert train.main([*resumed(short, tmp_path / "longer")[:3], *more, "--max_steps=4"]) == 0
    assert train.main(resumed(short, tmp_path / "longer", *more, "--max_steps=6")) == 0
    whole, _, rest = (watch.rates for watch in seen)
    assert rest == whole[4:]
    assert rest[0] > rest[1] > 0


@pytest.mark.slow
def test_ctrl_c_saves_and_a_resume_ends_like_an_uninterrupted_run(short: Path, tmp_path: Path) -> None:
    def given(output: Path, reward: str) -> list[str]:
        rewards = ["--rewards", f"[{{name: tests.support.probe_rewards.{reward}, alias: probe}}]"]
        return [*resumed(short, output)[:3], *rewards, "--max_steps=4", "--save_steps=9", "--beta=0"]

    output = tmp_path / "run"
    assert train.main(given(output, "interrupted_once")) == 130
    assert train.main([*given(output, "interrupted_once"), RESUME]) == 0
    assert Run.read(output).fault is None
    assert train.main(given(tmp_path / "alone", "distinct_characters")) == 0
    assert same_weights(output, tmp_path / "alone")


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(short: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = ["--rewards", "[tests.support.probe_rewards.interrupted_twice]", "--max_steps=4"]
    for every, saved in ((1, "checkpoint-1"), (9, "")):
        output = tmp_path / f"every-{every}"
        assert train.main([*resumed(short, output)[:3], *rewards, f"--save_steps={every}"]) == 130
        said = capsys.readouterr().err
        last = said.splitlines()[-1]
        assert last.startswith("stopped by Ctrl-C: ")
        assert saved in last
        assert ("checkpoint-" in last) == bool(saved)
        assert fault_of(output) == last
        assert "Traceback" not in said
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_two_processes(tiny_model: Path, gsm8k_file: Path, tmp_path: Path, lora: bool) -> None:
    output = tmp_path / "run"
    more = ["--use_peft", "--lora_target_modules", "all-linear"] if lora else []
    given = arguments(tiny_model, gsm8k_file, output, *more)
    launching.launch_module("ddp_cpu", "grpo_recipes.train", *given, "--max_steps=2")
    assert record_of(output)["world_size"] == 2
    assert record_of(output)["geometry"]["prompts_per_generation"] == 4
    launching.launch_module("ddp_cpu", "grpo_recipes.train", *given, "--max_steps=3", RESUME)
    assert state_of(output)["global_step"] == 3
    assert abs(state_of(output)["log_history"][0]["kl"]) < 1e-6
    auto = AutoPeftModelForCausalLM if lora else AutoModelForCausalLM
    assert generates(auto.from_pretrained(output), output)


@pytest.mark.slow
def test_two_processes_print_a_mistake_once(tiny_model: Path, gsm8k_file: Path, tmp_path: Path) -> None:
    """With accelerate's own command, in an interpreter per process."""
    config = str(shipped_files("accelerate_configs")["ddp_cpu"])
    command = ["accelerate.commands.launch", "--config_file", config, "-m", "grpo_recipes.train"]
    given = arguments(tiny_model, gsm8k_file, tmp_path / "run", "--lerning_rate=1")
    done = subprocess.run([sys.executable, "-m", *command, *given], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.count("`--lerning_rate=1`") == 1
    printed = done.stderr.partition("torch/distributed/elastic")[0].splitlines()[:-1]  # then the launcher speaks
    assert [line.partition(": ")[0] for line in printed] == ["error"]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_trls_own_command_accepts_our_rewards(tiny_model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "data" / "train.jsonl"
    rows.parent.mkdir()
    rows.write_text("".join(json.dumps({"prompt": f"{n} + 1 = ", "answer": str(n + 1)}) + "\n" for n in range(16)))
    output = tmp_path / "run"
    options = {
        **{"model_name_or_path": tiny_model, "dataset_name": rows.parent, "output_dir": output, "bf16": "false"},
        **{"max_steps": 1, "logging_steps": 1, "max_completion_length": 8},
    }
    command = [sys.executable, "-m", "trl.scripts.grpo", "--use_cpu", "--log_completions"]
    command += ["--reward_funcs", "grpo_rewards.gsm8k_correctness", "grpo_rewards.tag_presence"]
    command += [f"--{key}={value}" for key, value in options.items()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    completions = pd.read_parquet(output / "completions" / "completions_00001.parquet")
    assert {"gsm8k_correctness", "tag_presence"} <= set(completions.columns)
