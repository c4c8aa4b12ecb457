"""Runs through the entry point that users launch, on a tiny policy."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer, data, train
from grpo_recipes.recipe import shipped

SMALL = [
    "--use_cpu",
    "--bf16=false",
    "--dtype=float32",
    "--max_completion_length=8",
    "--logging_steps=1",
    "--save_steps=2",
    "--gradient_checkpointing=false",
]


def arguments(tiny_model: Path, gsm8k_file: Path, output: Path, *more: str) -> list[str]:
    """The 24 GB recipe with only model, data, device and sizes of the run overridden."""
    return [
        "--config",
        "gsm8k-qwen2.5-1.5b-24gb",
        f"--model_name_or_path={tiny_model}",
        f"--dataset.path={gsm8k_file}",
        f"--output_dir={output}",
        *SMALL,
        *more,
    ]


def launch(config: str, args: list[str]) -> subprocess.CompletedProcess[str]:
    command = [
        "accelerate.commands.launch",
        "--config_file",
        str(shipped("accelerate_configs", config)),
        "-m",
        "grpo_recipes.train",
    ]
    return subprocess.run([sys.executable, "-m", *command, *args], capture_output=True, text=True)


def generates(model: torch.nn.Module, folder: Path) -> bool:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("1 + 1 =", return_tensors="pt")
    return model.generate(**prompt, max_new_tokens=3, do_sample=False).shape[1] > prompt["input_ids"].shape[1]


def test_a_run_leaves_everything_that_is_promised(tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys) -> None:
    output = tmp_path / "run"
    assert train.main(arguments(tiny_model, gsm8k_file, output, "--max_steps=3")) == 0

    said = capsys.readouterr().out
    assert "2 prompts × 8 completions = 16 completions on 1 process" in said
    assert "3 optimiser steps" in said
    record = json.loads((output / "run.json").read_text())
    assert record["world_size"] == 1
    assert record["recipe"]["beta"] == 0.04
    assert record["geometry"]["prompts_per_generation"] == 2
    assert record["versions"]["trl"].startswith("1.16")
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    logged = [entry for entry in history if "loss" in entry]
    assert len(logged) == 3
    # With dropout off the first step's policy is the reference.
    assert abs(logged[0]["kl"]) < 1e-6
    completions = pd.read_parquet(sorted((output / "completions").glob("*.parquet"))[0])
    assert len(completions) == 16
    assert {"prompt", "completion", "gsm8k_correctness", "tag_presence", "advantage"} <= set(completions.columns)
    assert (output / "README.md").is_file()
    assert (output / "checkpoint-2").is_dir()
    assert generates(AutoModelForCausalLM.from_pretrained(output), output)


def test_a_lora_run_saves_an_adapter_that_peft_loads(tiny_model: Path, gsm8k_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    lora = ["--use_peft", "--lora_r=4", "--lora_target_modules", "all-linear", "--max_steps=2", "--learning_rate=1e-3"]
    assert train.main(arguments(tiny_model, gsm8k_file, output, *lora)) == 0
    assert (output / "adapter_model.safetensors").is_file()
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    assert abs(history[0]["kl"]) < 1e-6
    assert generates(AutoPeftModelForCausalLM.from_pretrained(output), output)


def test_a_run_resumes_where_it_was_saved(tiny_model: Path, gsm8k_file: Path, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    learning = ["--rewards", "[tests.grpo_recipes.probe_rewards.distinct_characters]", "--learning_rate=1e-3"]
    assert train.main(arguments(tiny_model, gsm8k_file, whole, *learning, "--max_steps=4")) == 0
    first = arguments(tiny_model, gsm8k_file, halves, *learning, "--max_steps=2")
    rest = arguments(tiny_model, gsm8k_file, halves, *learning, "--max_steps=4")
    assert train.main(first) == 0
    assert train.main(rest) == 2  # an earlier run is never overwritten
    assert train.main([*rest, "--resume_from_checkpoint=true"]) == 0
    start, end, resumed = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (tiny_model, whole, halves)
    )
    assert any(not torch.equal(start[name], end[name]) for name in start)
    for name, value in resumed.items():
        assert torch.equal(value, end[name]), name


@pytest.mark.parametrize("length", [["--max_steps=2"], ["--max_steps=-1", "--num_train_epochs=1"]])
def test_resuming_a_run_that_is_over_changes_nothing(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys: Any, length: list[str]
) -> None:
    """As after a kill between the last checkpoint and the final model, within an epoch and at its end."""
    output = tmp_path / "run"
    learning = ["--rewards", "[tests.grpo_recipes.probe_rewards.distinct_characters]", "--learning_rate=1e-3"]
    more = [*learning, *length, "--dataset.split=train[:8]"]
    assert train.main(arguments(tiny_model, gsm8k_file, output, *more)) == 0
    trained = AutoModelForCausalLM.from_pretrained(output).state_dict()
    logged = {path.name: pd.read_parquet(path) for path in (output / "completions").iterdir()}
    state = json.loads((output / "trainer_state.json").read_text())
    (output / "model.safetensors").unlink()
    assert train.main([*arguments(tiny_model, gsm8k_file, output, *more), "--resume_from_checkpoint=true"]) == 0
    assert "nothing is left to train" in capsys.readouterr().out
    for name, value in AutoModelForCausalLM.from_pretrained(output).state_dict().items():
        assert torch.equal(value, trained[name]), name
    assert {path.name for path in (output / "completions").iterdir()} == set(logged)
    for name, table in logged.items():
        pd.testing.assert_frame_equal(pd.read_parquet(output / "completions" / name), table)
    resumed = json.loads((output / "trainer_state.json").read_text())
    assert {key: resumed[key] for key in ("global_step", "max_steps", "epoch")} == {
        key: state[key] for key in ("global_step", "max_steps", "epoch")
    }


def test_a_run_that_failed_before_its_first_save_is_started_again(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys: Any
) -> None:
    given = arguments(tiny_model, gsm8k_file, tmp_path / "run", "--max_steps=1")
    broken = [*given, "--rewards", "[tests.grpo_recipes.probe_rewards.broken]"]
    assert train.main(broken) == 1
    assert "`--resume_from_checkpoint true` starts again" in capsys.readouterr().err.splitlines()[-1]
    assert train.main(given) == 2  # whatever lies there, it is not overwritten unasked
    assert train.main([*given, "--resume_from_checkpoint=true"]) == 0
    assert "no checkpoint to go on from: starting at the beginning" in capsys.readouterr().out
    assert not list((tmp_path / "run").glob("fault-*"))


def test_other_prompts_are_not_resumed(tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys: Any) -> None:
    given = arguments(tiny_model, gsm8k_file, tmp_path / "run", "--max_steps=2")
    assert train.main([*given, "--dataset.split=train[:20]"]) == 0
    assert train.main([*given, "--dataset.split=train[20:]", "--resume_from_checkpoint=true"]) == 2
    assert "train_prompts_sha256 was" in capsys.readouterr().err.splitlines()[-1]


def test_a_refused_recipe_leaves_nothing_and_says_one_sentence(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys
) -> None:
    output = tmp_path / "run"
    assert train.main(arguments(tiny_model, gsm8k_file, output, "--num_generations=7")) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.err.startswith("error: ")
    assert "num_generations" in said.err
    assert not output.exists()


def test_a_run_that_cannot_be_diagnosed_is_finished_all_the_same(
    tiny_model: Path,
    gsm8k_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "run"
    file, summary = output / "completions" / "completions_00001.parquet", train.summary

    def damaging(*given: Any) -> str:
        file.write_bytes(b"")
        return summary(*given)

    monkeypatch.setattr(train, "summary", damaging)
    assert train.main(arguments(tiny_model, gsm8k_file, output, "--max_steps=1", "--save_strategy=no")) == 0
    assert f"diagnosis: left out, {file}: can't be read as parquet" in capsys.readouterr().out


def test_prompts_over_the_limit_are_dropped_with_a_count(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompts = data.load(data.DatasetSpec("gsm8k", path=str(gsm8k_file), prompt_format="text"))["prompt"]
    lengths = [len(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    limit, output = min(lengths), tmp_path / "run"
    kept = lengths.count(limit)
    more = ["--max_steps=1", f"--dataset.max_prompt_tokens={limit}"]
    assert train.main(arguments(tiny_model, gsm8k_file, output, *more)) == 0
    assert f"{40 - kept} of 40 prompts over {limit} tokens were dropped" in capsys.readouterr().out
    assert json.loads((output / "run.json").read_text())["train_prompts"] == kept


def test_a_model_that_is_not_there(gsm8k_file: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train.main(arguments(tmp_path / "no-model", gsm8k_file, tmp_path / "run")) == 2
    assert "`model_name_or_path`" in capsys.readouterr().err


def test_the_trainer_is_a_drop_in(tiny_model: Path, tmp_path: Path) -> None:
    """A TRL script gives the same numbers with our import."""
    from datasets import Dataset

    def short(completions: list[str], **columns: object) -> list[float]:
        return [-float(len(set(completion))) for completion in completions]

    def history(trainer_class: type, **ours: Any) -> list[dict]:
        args = GRPOConfig(
            output_dir=str(tmp_path / trainer_class.__module__),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=4,
            num_generations=4,
            gradient_accumulation_steps=2,
            max_completion_length=6,
            max_steps=3,
            learning_rate=1e-3,
            beta=0.1,
            logging_steps=1,
            report_to="none",
        )
        dataset = Dataset.from_dict({"prompt": ["one", "two plus two", "three", "four", "five and six"]})
        trainer = trainer_class(str(tiny_model), short, args, dataset, **ours)
        trainer.train()
        clocks = ("step_time", "runtime", "per_second", "total_flos")
        return [
            {k: v for k, v in entry.items() if not any(c in k for c in clocks)} for entry in trainer.state.log_history
        ]

    theirs = history(TRLGRPOTrainer)
    assert any(entry["loss"] != 0 for entry in theirs if "loss" in entry)
    assert history(GRPOTrainer, micro_batching="off", generation="off") == theirs
    for mine, other in zip(history(GRPOTrainer), theirs, strict=True):
        kept = {name: value for name, value in mine.items() if not name.startswith(("efficiency/", "sampling/"))}
        assert kept.keys() == other.keys()
        for name, value in other.items():
            # TRL averages these over micro-batches, one mean of tokens each, so they depend on which rows meet.
            loose = name in ("kl", "entropy") or name.startswith("clip_ratio/")
            assert kept[name] == pytest.approx(value, rel=0.1 if loose else 1e-4, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_two_processes(tiny_model: Path, gsm8k_file: Path, tmp_path: Path, lora: bool) -> None:
    output = tmp_path / "run"
    more = ["--use_peft", "--lora_target_modules", "all-linear"] if lora else []
    done = launch("ddp_cpu", arguments(tiny_model, gsm8k_file, output, *more, "--max_steps=2"))
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((output / "run.json").read_text())
    assert record["world_size"] == 2
    assert record["geometry"]["prompts_per_generation"] == 4
    done = launch(
        "ddp_cpu", arguments(tiny_model, gsm8k_file, output, *more, "--max_steps=3", "--resume_from_checkpoint=true")
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == 3
    auto = AutoPeftModelForCausalLM if lora else AutoModelForCausalLM
    assert generates(auto.from_pretrained(output), output)


@pytest.mark.slow
def test_two_processes_say_a_mistake_once(tiny_model: Path, gsm8k_file: Path, tmp_path: Path) -> None:
    done = launch("ddp_cpu", arguments(tiny_model, gsm8k_file, tmp_path / "run", "--lerning_rate=1"))
    assert done.returncode != 0
    assert done.stderr.count("unknown argument `--lerning_rate=1`") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_real_gsm8k_through_the_24gb_recipe(tiny_model: Path, gsm8k_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    done = launch("cpu", arguments(tiny_model, gsm8k_dir / "train.jsonl", output, "--max_steps=2"))
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((output / "run.json").read_text())["train_prompts"] == 7473


@pytest.mark.slow
def test_trls_own_command_takes_our_rewards(tiny_model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "data" / "train.jsonl"
    rows.parent.mkdir()
    rows.write_text("".join(json.dumps({"prompt": f"{n} + 1 = ", "answer": str(n + 1)}) + "\n" for n in range(16)))
    output = tmp_path / "run"
    options = {
        "model_name_or_path": tiny_model,
        "dataset_name": rows.parent,
        "output_dir": output,
        "bf16": "false",
        "max_steps": 1,
        "logging_steps": 1,
        "max_completion_length": 8,
    }
    command = [sys.executable, "-m", "trl.scripts.grpo", "--use_cpu", "--log_completions"]
    command += ["--reward_funcs", "grpo_rewards.gsm8k_correctness", "grpo_rewards.tag_presence"]
    command += [f"--{key}={value}" for key, value in options.items()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    completions = pd.read_parquet(output / "completions" / "completions_00001.parquet")
    assert {"gsm8k_correctness", "tag_presence"} <= set(completions.columns)
