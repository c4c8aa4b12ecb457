"""Runs of a tiny policy through the entry point that users launch."""

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig
from trl import GRPOTrainer as TRLGRPOTrainer

from grpo_recipes import GRPOTrainer, cli, train
from grpo_recipes.data import load as data
from grpo_recipes.recipe.recipe import shipped
from grpo_recipes.recipe.specs import DatasetSpec
from grpo_recipes.reports.run import Run
from grpo_recipes.runs.checkpoints import Manifest, write_manifest
from tests.support import recorded
from tests.support.exact_generation import generate_exactly
from tests.support.launching import launch_module, write_rows

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
    """Return the arguments of the 24 GB recipe with overrides of model, data, device and sizes only."""
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
    """Run `accelerate launch`, with an interpreter per process."""
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


def test_a_run_leaves_all_documented_files(tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys) -> None:
    output = tmp_path / "run"
    assert train.main(arguments(tiny_model, gsm8k_file, output, "--max_steps=3")) == 0

    said = capsys.readouterr().out
    assert "2 prompts × 8 completions = 16 completions on 1 process" in said
    assert "3 optimizer steps" in said
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
    completions = pd.concat(map(pd.read_parquet, sorted((output / "completions").glob("*.parquet"))))
    assert completions.groupby("step").size().to_dict() == {1: 16, 2: 16, 3: 16}
    assert {"prompt", "completion", "gsm8k_correctness", "tag_presence", "advantage"} <= set(completions.columns)
    card = (output / "README.md").read_text()
    assert f"`{tiny_model.name}`, trained with GRPO on 40 prompts of `{gsm8k_file.name}`" in card
    assert str(tmp_path.parent) not in card
    assert (output / "checkpoint-2").is_dir()
    assert generates(AutoModelForCausalLM.from_pretrained(output), output)


@pytest.mark.slow
def test_a_run_that_a_reward_stops_has_a_report_with_the_completion(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--max_steps=3", "--rewards=tests.support.probe_rewards.broken_later")
    assert train.main(arguments(tiny_model, gsm8k_file, tmp_path / "run", *more)) == 1
    says = "`broken_later` raised ValueError: no answer, for row 0 of this rank's generation after step 1 "
    assert re.search(says, capsys.readouterr().err.splitlines()[-1])
    fault = Run.read(tmp_path / "run").fault
    assert (fault["row"]["reward"], fault["row"]["row"], fault["row"]["step"]) == ("broken_later", 0, 1)
    assert cli.main(["report", str(tmp_path / "run")]) in (0, 2)
    page = (tmp_path / "run" / "report" / "report.html").read_text()
    assert "This run was stopped at step 1 of 3." in page
    assert "broken_later could not score it" in page


@pytest.mark.slow
def test_a_lora_run_saves_an_adapter_that_peft_loads(tiny_model: Path, gsm8k_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    lora = ["--use_peft", "--lora_r=4", "--lora_target_modules", "all-linear", "--max_steps=2", "--learning_rate=1e-3"]
    assert train.main(arguments(tiny_model, gsm8k_file, output, *lora)) == 0
    assert (output / "adapter_model.safetensors").is_file()
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    assert abs(history[0]["kl"]) < 1e-6
    assert generates(AutoPeftModelForCausalLM.from_pretrained(output), output)


@pytest.mark.slow
def test_a_run_resumes_where_it_was_saved(tiny_model: Path, gsm8k_file: Path, tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    learning = ["--rewards", "[tests.support.probe_rewards.distinct_characters]", "--learning_rate=1e-3"]
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


@pytest.mark.slow
def test_a_recipe_generates_by_groups_and_ends_with_strings(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = arguments(tiny_model, gsm8k_file, tmp_path / "auto", "--max_steps=1", "--generation=auto")
    assert train.main([*given, "--generation_kwargs.stop=3"]) == 2
    assert "`generation_kwargs.stop` must be a string or a list of strings, not 3" in capsys.readouterr().err
    given = arguments(tiny_model, gsm8k_file, tmp_path / "on", "--max_steps=1", "--generation=auto")
    assert train.main([*given, "--generation_kwargs.stop=[e]"]) == 0
    assert json.loads((tmp_path / "on" / "run.json").read_text())["recipe"]["generation"] == "auto"
    log = json.loads((tmp_path / "on" / "trainer_state.json").read_text())["log_history"]
    assert 0 <= log[0]["sampling/sampling_logp_difference/max"] < 1e-4


def test_a_tokenizer_that_cant_be_searched_for_stop_strings(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "words")
    words = recorded.tokenizer()
    words.chat_template = "{{ messages[-1].content }}"
    words.save_pretrained(folder)
    monkeypatch.setattr(train, "load_policy", lambda *_: pytest.fail("the model is loaded"))
    given = arguments(folder, gsm8k_file, tmp_path / "run", "--max_steps=1", "--generation_kwargs.stop=[b]")
    assert train.main(given) == 2
    assert "`generation_kwargs.stop`: transformers can't read the tokens of" in capsys.readouterr().err


class RateOfEachStep(TrainerCallback):
    """Records the learning rate of each optimizer step, read from the optimizer just before the step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_lengthened_run_has_the_learning_rates_of_one_planned_for_that_length(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """The checkpoint holds the rate 0, with which the shorter schedule ends."""
    seen: list[RateOfEachStep] = []

    class Watched(GRPOTrainer):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            seen.append(RateOfEachStep())
            self.add_callback(seen[-1])

    monkeypatch.setattr(train, "GRPOTrainer", Watched)
    more = [f"--lr_scheduler_type={schedule}", "--learning_rate=1e-3", "--warmup_steps=1"]
    planned, longer = tmp_path / "planned", tmp_path / "longer"
    assert train.main([*arguments(tiny_model, gsm8k_file, planned, *more), "--max_steps=6"]) == 0
    given = arguments(tiny_model, gsm8k_file, longer, *more)
    assert train.main([*given, "--max_steps=4"]) == 0
    assert train.main([*given, "--max_steps=6", "--resume_from_checkpoint=true"]) == 0
    whole, _, rest = (watch.rates for watch in seen)
    assert rest == whole[4:]
    assert rest[0] > rest[1] > 0


@pytest.mark.slow
def test_another_recipe_is_not_resumed_except_for_keys_that_may_change(
    tiny_model: Path,
    gsm8k_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "run"
    given = arguments(tiny_model, gsm8k_file, output, "--max_steps=2", "--learning_rate=1e-5")
    assert train.main(given) == 0
    first = json.loads((output / "run.json").read_text())
    resumed = [*given, "--resume_from_checkpoint=true"]
    assert train.main([*resumed, "--learning_rate=1e-4", "--beta=0.1", "--generation=off"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "`learning_rate` was 1e-05 and is 0.0001" in said
    assert "`beta` was 0.04 and is 0.1" in said
    assert "`generation` was auto and is off" in said
    assert json.loads((output / "run.json").read_text()) == first  # a launch that did not run is not recorded
    monkeypatch.chdir(tiny_model.parent)  # the same model by a relative path, and the same rows elsewhere
    (tmp_path / "rows.jsonl").write_text(gsm8k_file.read_text())
    changes = [f"--model_name_or_path={tiny_model.name}", f"--dataset.path={tmp_path / 'rows.jsonl'}", "--max_steps=4"]
    changes += ["--logging_steps=2", "--micro_batching=off", "--save_steps=1", "--dataloader_num_workers=1"]
    assert train.main([*resumed, *changes]) == 0
    said = capsys.readouterr().out
    assert said.count("changed for the rest of the run: `max_steps` was 2 and is 4, `logging_steps` was 1") == 1
    record = json.loads((output / "run.json").read_text())
    assert record["launches"][0] == first["launches"][0]
    assert record["launches"][0] == {key: value for key, value in first.items() if key != "launches"}
    assert [launch["recipe"]["max_steps"] for launch in record["launches"]] == [2, 4]
    assert record["launches"][1] == {key: value for key, value in record.items() if key != "launches"}
    assert record["resumed_from"].endswith("checkpoint-2")
    assert not list(output.glob("*.part"))


@pytest.mark.slow
def test_a_runs_record_runs_it_again(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    learning = ["--rewards", "[tests.support.probe_rewards.distinct_characters]", "--learning_rate=1e-3"]
    assert train.main(arguments(tiny_model, gsm8k_file, first, *learning, "--max_steps=2")) == 0
    assert (
        train.main(
            [*arguments(tiny_model, gsm8k_file, first, *learning, "--max_steps=2", "--resume_from_checkpoint=true")]
        )
        == 0
    )
    config = ["--config", str(first / "run.json")]
    assert train.main(config) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "already holds files" in said
    assert "--output_dir" in said
    assert train.main([*config, f"--output_dir={again}"]) == 0
    modes = {(again / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1, "the weights can be read by all who can read the configuration"
    one, other = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (first, again))
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


LENGTHS = [["--max_steps=2"], ["--max_steps=-1", "--num_train_epochs=1"]]


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
def test_resuming_a_run_that_is_over_changes_nothing(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys: Any, length: list[str]
) -> None:
    """Like after a kill between the last checkpoint and the final model, within an epoch and at its end."""
    output = tmp_path / "run"
    learning = ["--rewards", "[tests.support.probe_rewards.distinct_characters]", "--learning_rate=1e-3"]
    more = [*learning, *length, "--dataset.split=train[:8]"]
    assert train.main(arguments(tiny_model, gsm8k_file, output, *more)) == 0
    trained = AutoModelForCausalLM.from_pretrained(output).state_dict()
    logged = {path.name: pd.read_parquet(path) for path in (output / "completions").iterdir()}
    state = json.loads((output / "trainer_state.json").read_text())
    (output / "model.safetensors").unlink()
    assert train.main([*arguments(tiny_model, gsm8k_file, output, *more), "--resume_from_checkpoint=true"]) == 0
    assert "already finished: " in capsys.readouterr().out
    for name, value in AutoModelForCausalLM.from_pretrained(output).state_dict().items():
        assert torch.equal(value, trained[name]), name
    assert {path.name for path in (output / "completions").iterdir()} == set(logged)
    for name, table in logged.items():
        pd.testing.assert_frame_equal(pd.read_parquet(output / "completions" / name), table)
    resumed = json.loads((output / "trainer_state.json").read_text())
    assert {key: resumed[key] for key in ("global_step", "max_steps", "epoch")} == {
        key: state[key] for key in ("global_step", "max_steps", "epoch")
    }


@pytest.mark.slow
def test_a_run_that_failed_before_its_first_save_is_started_again(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys: Any
) -> None:
    given = arguments(tiny_model, gsm8k_file, tmp_path / "run", "--max_steps=1")
    broken = [*given, "--rewards", "[tests.support.probe_rewards.broken]"]
    assert train.main(broken) == 1
    assert "`--resume_from_checkpoint true` starts again" in capsys.readouterr().err.splitlines()[-1]
    assert train.main(given) == 2  # whatever lies there, it is not overwritten unasked
    assert train.main([*given, "--resume_from_checkpoint=true"]) == 0
    assert "no checkpoint to resume from: starting at the beginning" in capsys.readouterr().out
    assert not list((tmp_path / "run").glob("fault-*"))


@pytest.mark.slow
def test_other_prompts_are_not_resumed(tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys: Any) -> None:
    """Neither prompts of another slice, nor those of a changed file."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(gsm8k_file.read_text())
    given = arguments(tiny_model, rows, tmp_path / "run", "--max_steps=2")
    assert train.main([*given, "--dataset.split=train[:20]"]) == 0
    assert train.main([*given, "--dataset.split=train[20:]", "--resume_from_checkpoint=true"]) == 2
    assert "`dataset.split` was train[:20] and is train[20:]" in capsys.readouterr().err.splitlines()[-1]
    rows.write_text(rows.read_text().replace("Ann", "Ben"))
    assert train.main([*given, "--dataset.split=train[:20]", "--resume_from_checkpoint=true"]) == 2
    assert "the column `prompt` of the dataset has changed" in capsys.readouterr().err.splitlines()[-1]


def test_a_refused_recipe_leaves_nothing_and_prints_one_line(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys
) -> None:
    output = tmp_path / "run"
    assert train.main(arguments(tiny_model, gsm8k_file, output, "--num_generations=7")) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert said.err.startswith("error: ")
    assert "num_generations" in said.err
    assert not output.exists()


@pytest.mark.slow
def test_a_run_that_can_not_be_diagnosed_is_finished(
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
    assert f"diagnosis: skipped, {file}: can't be read as parquet" in capsys.readouterr().out


ENDINGS = ["write_model_card", "summary", "diagnose", "push_to_hub", "save_state", "end"]


@pytest.mark.slow
@pytest.mark.parametrize("broken", ENDINGS)
def test_failures_after_the_save_are_warnings(
    tiny_model: Path,
    gsm8k_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    broken: str,
) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("the hub\ndid not answer")

    monkeypatch.setattr(train if hasattr(train, broken) else GRPOTrainer, broken, fails)
    finish = train.finish

    def pushing(launch: Any, *given: Any) -> None:
        launch.training_args.push_to_hub = True
        finish(launch, *given)

    if broken == "push_to_hub":
        monkeypatch.setattr(train, "finish", pushing)
    assert train.main(arguments(tiny_model, gsm8k_file, tmp_path / "run", "--max_steps=1", "--save_steps=9")) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(set(warnings)) == 1, "the card is tried again: with the last checkpoint, and at the end"
    assert str(tmp_path / "run") in warnings[0]
    assert "(ConnectionError: the hub did not answer)" in warnings[0]
    assert generates(AutoModelForCausalLM.from_pretrained(tmp_path / "run"), tmp_path / "run")


@pytest.mark.slow
def test_a_run_without_a_terminal_prints_little_and_can_be_read_under_way(
    tiny_model: Path,
    gsm8k_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, save_state, seen = tmp_path / "run", train.save_state, []

    def looked_at(trainer: GRPOTrainer) -> None:
        seen.append(Run.read(folder))
        save_state(trainer)

    monkeypatch.setattr(train, "save_state", looked_at)
    assert train.main(arguments(tiny_model, gsm8k_file, folder, "--max_steps=2", "--save_strategy=no")) == 0
    captured = capsys.readouterr()
    assert "it/s" not in captured.err
    assert "{'" not in captured.out + captured.err, "transformers' dictionaries"
    (running,) = seen
    assert running.is_running
    assert running.log.max_steps == 2
    assert running.record["hardware"].startswith("CPU (")
    finished = Run.read(folder)
    assert not finished.is_running
    assert running.series("reward") == finished.series("reward")
    assert running.series("reward").steps == [1, 2]
    (folder / "trainer_state.json").rename(tmp_path / "trainer_state.json")
    logged = Run.read(folder).log
    (folder / "_log.jsonl").unlink()
    (tmp_path / "trainer_state.json").rename(folder / "trainer_state.json")
    state = Run.read(folder).log
    assert state.metrics == logged.metrics == finished.log.metrics
    assert (state.last_step, state.max_steps) == (logged.last_step, logged.max_steps) == (2, 2)


def test_a_run_without_a_step_has_failed(
    tiny_model: Path,
    gsm8k_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GRPOTrainer, "train", lambda self, **given: None)
    assert train.main(arguments(tiny_model, gsm8k_file, tmp_path / "run", "--max_steps=4")) == 1
    assert "error: no optimizer step was taken, of 4" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.slow
def test_ctrl_c_saves_and_a_resume_ends_like_an_uninterrupted_run(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def given(output: Path, reward: str) -> list[str]:
        rewards = ["--rewards", f"[{{name: tests.support.probe_rewards.{reward}, alias: probe}}]"]
        return arguments(tiny_model, gsm8k_file, output, *rewards, "--max_steps=4", "--save_steps=9", "--beta=0")

    output = tmp_path / "run"
    assert train.main(given(output, "interrupted_once")) == 130
    said = capsys.readouterr()
    assert "stopped by Ctrl-C after step 2 of 4, which is saved: `--resume_from_checkpoint true` goes on" in said.err
    assert "Traceback" not in said.out + said.err
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-2"]
    assert not (output / "model.safetensors").exists()
    assert Run.read(output).fault["sentence"].startswith("stopped by Ctrl-C after step 2 of 4")
    assert train.main([*given(output, "interrupted_once"), "--resume_from_checkpoint=true"]) == 0
    assert Run.read(output).fault is None
    assert train.main(given(tmp_path / "alone", "distinct_characters")) == 0
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("run", "alone"))
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores SIGINT
    rewards = ["--rewards", "[tests.support.probe_rewards.interrupted_twice]", "--max_steps=4"]
    for every, rest in (
        (1, "checkpoint-1 is saved: `--resume_from_checkpoint true` goes on from there"),
        (9, "nothing is saved yet"),
    ):
        output = tmp_path / f"every-{every}"
        assert train.main([*arguments(tiny_model, gsm8k_file, output, *rewards), f"--save_steps={every}"]) == 130
        said = capsys.readouterr().err
        assert said.splitlines()[-1].startswith("stopped by Ctrl-C: ")
        assert rest in said.splitlines()[-1]
        assert rest in json.loads((output / "fault-rank0.json").read_text())["sentence"]
        assert "Traceback" not in said
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("place", ["load_tokenizer", "load_policy"])
def test_ctrl_c_before_training_prints_one_line(
    tiny_model: Path,
    gsm8k_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, place, interrupted)
    assert train.main(arguments(tiny_model, gsm8k_file, tmp_path / "run")) == 130
    said = capsys.readouterr().err
    assert said == "stopped by Ctrl-C: nothing was trained or saved, and the same command starts again\n"


@pytest.mark.slow
def test_ctrl_c_while_libraries_load_prints_one_line() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo_recipes.train", "--config", "quickstart"], stderr=subprocess.PIPE, text=True
    )
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("stopped by Ctrl-C: nothing was trained or saved")
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_resume_is_not_recommended_after_a_failed_set_up(
    tiny_model: Path,
    gsm8k_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuses(*args: Any) -> None:
        raise ValueError("this combination is not supported")

    given = arguments(tiny_model, gsm8k_file, tmp_path / "run", "--max_steps=1")
    with monkeypatch.context() as patch:
        patch.setattr(train, "load_policy", refuses)
        assert train.main(given) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "error: ValueError: this combination is not supported"
    assert train.main(given) == 0  # the folder holds no run


@pytest.mark.slow
def test_a_resume_is_not_recommended_if_the_checkpoint_can_not_be_loaded(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is complete, but not a state of the optimizer."""
    output = tmp_path / "run"
    given = arguments(tiny_model, gsm8k_file, output, "--max_steps=2")
    assert train.main(given) == 0
    torch.save({"no": "optimizer"}, output / "checkpoint-2" / "optimizer.pt")
    write_manifest(output / "checkpoint-2", Manifest(2, 1, False, {}), each_node=False, writes=True)
    capsys.readouterr()
    assert train.main([*given, "--max_steps=4", "--resume_from_checkpoint=true"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert last.endswith(f"; it was to resume from {output / 'checkpoint-2'}: remove it if it is damaged")


@pytest.mark.slow
def test_prompts_over_the_limit_are_dropped_with_a_count(
    tiny_model: Path, gsm8k_file: Path, tmp_path: Path, capsys
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    prompts = data.load(DatasetSpec("gsm8k", path=str(gsm8k_file), prompt_format="text"))["prompt"]
    lengths = [len(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    limit, output = min(lengths), tmp_path / "run"
    kept = lengths.count(limit)
    more = ["--max_steps=1", f"--dataset.max_prompt_tokens={limit}"]
    assert train.main(arguments(tiny_model, gsm8k_file, output, *more)) == 0
    assert f"{40 - kept} of 40 prompts over {limit} tokens were dropped" in capsys.readouterr().out
    assert json.loads((output / "run.json").read_text())["train_prompts"] == kept


def test_a_missing_model_is_refused(gsm8k_file: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train.main(arguments(tmp_path / "no-model", gsm8k_file, tmp_path / "run")) == 2
    assert "`model_name_or_path`" in capsys.readouterr().err


def test_the_trainer_is_a_drop_in(tiny_model: Path, tmp_path: Path) -> None:
    """A TRL script gives the same numbers with our import, if the random numbers are equal."""
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
        if trainer_class is GRPOTrainer:
            generate_exactly(trainer)
        trainer.train()
        left_out = (
            "step_time",
            "runtime",
            "per_second",
            "total_flos",
            "updates/",
        )  # clocks, and what only ours samples
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


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_two_processes(tiny_model: Path, gsm8k_file: Path, tmp_path: Path, lora: bool) -> None:
    output = tmp_path / "run"
    more = ["--use_peft", "--lora_target_modules", "all-linear"] if lora else []
    given = arguments(tiny_model, gsm8k_file, output, *more)
    if lora:
        launch_module("ddp_cpu", "grpo_recipes.train", *given, "--max_steps=2")
    else:
        done = launch("ddp_cpu", [*given, "--max_steps=2"])
        assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((output / "run.json").read_text())
    assert record["world_size"] == 2
    assert record["geometry"]["prompts_per_generation"] == 4
    launch_module("ddp_cpu", "grpo_recipes.train", *given, "--max_steps=3", "--resume_from_checkpoint=true")
    assert json.loads((output / "trainer_state.json").read_text())["global_step"] == 3
    auto = AutoPeftModelForCausalLM if lora else AutoModelForCausalLM
    assert generates(auto.from_pretrained(output), output)


@pytest.mark.slow
def test_two_processes_print_a_mistake_once(tiny_model: Path, gsm8k_file: Path, tmp_path: Path) -> None:
    done = launch("ddp_cpu", arguments(tiny_model, gsm8k_file, tmp_path / "run", "--lerning_rate=1"))
    assert done.returncode != 0
    assert done.stderr.count("unknown argument `--lerning_rate=1`") == 1
    printed = done.stderr.partition("torch/distributed/elastic")[0].splitlines()[:-1]  # then the launcher speaks
    assert [line.partition(": ")[0] for line in printed] == ["error"]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_as_many_rows_as_gsm8k_has_through_the_24gb_recipe(tiny_model: Path, tmp_path: Path) -> None:
    rows, output = write_rows(tmp_path / "train.jsonl", 7473), tmp_path / "run"
    launch_module("cpu", "grpo_recipes.train", *arguments(tiny_model, rows, output, "--max_steps=2"))
    assert json.loads((output / "run.json").read_text())["train_prompts"] == 7473


@pytest.mark.slow
def test_trls_own_command_accepts_our_rewards(tiny_model: Path, tmp_path: Path) -> None:
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


# The last lines of a run


@pytest.fixture
def ended(tmp_path: Path) -> SimpleNamespace:
    """Return what the end of a run reads of its preparation, for a run with a folder."""
    return SimpleNamespace(
        recipe=SimpleNamespace(output_dir=tmp_path),
        training_args=SimpleNamespace(save_only_model=False),
        interruption=SimpleNamespace(requested=signal.SIGTERM, name="SIGTERM"),
        last_checkpoint=lambda: None,
    )


def recorded_stop(folder: Path) -> str | None:
    file = folder / "fault-rank0.json"
    return json.loads(file.read_text())["sentence"] if file.exists() else None


@pytest.mark.parametrize(
    ("requested", "name", "only_model", "code", "rest"),
    [
        (signal.SIGTERM, "SIGTERM", False, 0, "`--resume_from_checkpoint true` goes on from there"),
        (signal.SIGINT, "Ctrl-C", False, 130, "`--resume_from_checkpoint true` goes on from there"),
        (
            signal.SIGINT,
            "Ctrl-C",
            True,
            130,
            "without its optimizer (`save_only_model`), so no run can resume from there",
        ),
    ],
)
def test_a_stopped_run_says_how_it_goes_on(
    ended: SimpleNamespace, requested: int, name: str, only_model: bool, code: int, rest: str,
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    calls: list[str] = []
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(wait_for_everyone=lambda: calls.append("wait")),
        state=SimpleNamespace(global_step=3, max_steps=9),
        end=lambda: calls.append("end"),
    )
    ended.training_args.save_only_model = only_model
    ended.interruption = SimpleNamespace(requested=requested, name=name)
    line = f"stopped by {name} after step 3 of 9, which is saved: {rest}"
    assert train._end_stopped_run(ended, trainer) == code
    assert capsys.readouterr().err == line + "\n"
    assert (recorded_stop(tmp_path), calls) == (line, ["wait", "end"])
    (tmp_path / "fault-rank0.json").unlink()
    monkeypatch.setenv("RANK", "1")
    assert train._end_stopped_run(ended, trainer) == code
    assert (capsys.readouterr().err, recorded_stop(tmp_path)) == ("", None), "the first rank alone prints and writes"


def test_an_interrupted_run_says_what_is_saved(
    ended: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = "stopped by Ctrl-C: nothing was trained or saved, and the same command starts again\n"
    assert train._end_interrupted_run(None) == 130
    assert capsys.readouterr().err == nothing
    ended.recipe.output_dir = tmp_path / "none"
    assert train._end_interrupted_run(ended) == 130
    assert capsys.readouterr().err == nothing
    ended.recipe.output_dir = tmp_path
    for saved, rest in (
        (None, "nothing is saved yet: `--resume_from_checkpoint true` starts again"),
        (
            tmp_path / "checkpoint-3",
            f"{tmp_path}/checkpoint-3 is saved: `--resume_from_checkpoint true` goes on from there",
        ),
    ):
        ended.last_checkpoint = lambda saved=saved: saved
        assert train._end_interrupted_run(ended) == 130
        assert capsys.readouterr().err == f"stopped by Ctrl-C: {rest}\n"
        assert recorded_stop(tmp_path) == f"stopped by Ctrl-C: {rest}"
    monkeypatch.setenv("RANK", "1")
    assert train._end_interrupted_run(ended) == 130
    assert capsys.readouterr().err == ""


def test_a_refusal_is_printed_by_the_first_rank_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(train.time, "sleep", waited.append)
    assert train._print_refusal("no such file") == 2
    assert (capsys.readouterr().err, waited) == ("error: no such file\n", [])
    monkeypatch.setenv("RANK", "1")
    assert train._print_refusal("no such file") == 2
    assert waited == [train.SILENCE_SECONDS]


def test_one_of_several_ranks_leaves_without_a_teardown(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(train.os, "_exit", left.append)
    with pytest.raises(SystemExit) as alone:
        train.leave(3)
    assert (alone.value.code, left) == (3, [])
    monkeypatch.setenv("WORLD_SIZE", "2")
    train.leave(3)
    assert left == [3]


def test_an_error_after_the_training_is_a_warning_without_secrets(
    ended: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(train, "known_secrets", lambda recipe: {"s3cret-key"})

    def fails(text: str) -> None:
        raise OSError(f"no\nroom for {text}")

    train.attempt(ended.recipe, "the card is missing", fails, "s3cret-key")
    assert capsys.readouterr().err == f"warning: {tmp_path}: the card is missing (OSError: no room for <hidden>)\n"
    train.attempt(ended.recipe, "x", print, "called")
    assert capsys.readouterr() == ("called\n", "")


@pytest.mark.parametrize(
    ("rewards", "change"),
    [
        ([], ""),
        ([0.25], ", reward 0.250 -> 0.250"),
        ([0.1, None, 0.5, 1.23456], ", reward 0.100 -> 1.235"),
        ([0.0, 0.5, 0.0], ", reward 0.000 -> 0.000"),
    ],
)
def test_the_summary_of_a_run(rewards: list[float | None], change: str) -> None:
    history = [{"loss": 1.0}, *({"reward": reward} for reward in rewards)]
    trainer = SimpleNamespace(
        state=SimpleNamespace(log_history=history, global_step=7),
        model=SimpleNamespace(),
        args=SimpleNamespace(output_dir="out"),
    )
    assert train.summary(trainer, 61.6) == f"7 optimizer steps in 62 s{change}; the model is in out"
    trainer.model.peft_config = {}
    assert train.summary(trainer, 0.4) == f"7 optimizer steps in 0 s{change}; the adapter is in out"


def test_a_diagnosis_that_takes_too_long_or_fails_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(folder: Path, within: float) -> None:
        assert within == 5
        raise train.OutOfTime

    assert train.diagnosis(tmp_path).startswith("diagnosis: skipped, ")
    monkeypatch.setattr(train.Run, "read", read)
    assert train.diagnosis(tmp_path) == (
        f"diagnosis: skipped after 5 s: `grpo-recipes diagnose {tmp_path}` takes the time it needs"
    )


def test_the_hardware_of_a_launch() -> None:
    cpu = SimpleNamespace(device=torch.device("cpu"), world_size=1)
    cores = f"CPU ({platform.machine()}, {os.cpu_count()} cores)"
    assert train.hardware(cpu) == f"{cores}, 1 process"
    cpu.world_size = 2
    assert train.hardware(cpu) == f"{cores}, 2 processes"
    assert train.hardware(SimpleNamespace(device=torch.device("meta"), world_size=3)) == "3 × meta"


# Arguments and callbacks of a trainer, and the entry of a launch


class RecordingTrainer:
    """Trainer that keeps its arguments, with the reward of an environment behind those of the recipe."""

    def __init__(self, **given: Any) -> None:
        self.given = given
        self.reward_funcs = [*given["reward_funcs"], SimpleNamespace()]
        self.reward_func_names = ["own", "Game"]


def test_a_trainer_is_given_every_key_of_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ("tool_limits", "kl_estimator", "micro_batching", "generation", "sampling", "advantages", "generation_check",
            "reference")  # fmt: skip
    recipe = SimpleNamespace(**{key: f"the recipe's {key}" for key in keys})
    for name, made in {
        "GRPOTrainer": RecordingTrainer,
        "model_config": lambda recipe: "model arguments",
        "load_policy": lambda recipe, args: "policy",
        "get_quantization_config": lambda args: f"quantization of {args}",
        "get_peft_config": lambda args: f"adapter of {args}",
        "adamw_bf16": lambda args: "AdamW",
        "checked_reward": lambda function: ("checked", function),
    }.items():
        monkeypatch.setattr(train, name, made)
    optimizer = ["adamw_torch"]
    monkeypatch.setattr(train.checks, "optimizer_name", lambda recipe, machine: optimizer[0])
    toolset = SimpleNamespace(functions=["tool"], factory="factory")
    checked = SimpleNamespace(
        rewards=[SimpleNamespace(weight=0.5, function="f")], toolset=toolset, eval_dataset="held out",
        train_dataset=SimpleNamespace(select_columns=lambda names: f"rows of {names}"),
    )  # fmt: skip
    args = SimpleNamespace()
    made = train.bare_trainer(recipe, None, args, checked, "tokenizer")
    expected = {
        "model": "policy", "reward_funcs": [("checked", "f")], "args": args, "train_dataset": checked.train_dataset,
        "eval_dataset": "held out", "processing_class": "tokenizer", "peft_config": "adapter of model arguments",
        "quantization_config": "quantization of model arguments", "rollout_func": None, "tools": ["tool"],
        "environment_factory": "factory", "optimizer_cls_and_kwargs": None, **vars(recipe),
    }  # fmt: skip
    assert made.given == expected
    assert args.reward_weights == [0.5]
    kind, reward = made.reward_funcs[1]
    assert (kind, reward.__name__) == ("checked", "Game"), "the rewards of environments are checked too"
    optimizer[0], checked.toolset = "adamw_bf16", None
    given = train.bare_trainer(recipe, None, args, checked, "tokenizer", "rollout").given
    changed = {
        "optimizer_cls_and_kwargs": "AdamW",
        "tools": None,
        "environment_factory": None,
        "rollout_func": "rollout",
    }
    assert given == {**expected, **changed, "train_dataset": "rows of ['prompt']"}


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("quiet", [False, True])
def test_a_run_has_the_callbacks_that_its_recipe_asks_for(
    resumes: bool, quiet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards: list[Any] = []
    monkeypatch.setattr(train, "write_model_card", cards.append)
    monkeypatch.setattr(train, "known_secrets", lambda recipe: set())
    monkeypatch.setattr(train, "resolved", lambda recipe: recipe)
    added, removed = [], []
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(is_main_process=True), add_callback=added.append, remove_callback=removed.append,
        callback_handler=None,
    )  # fmt: skip
    prepared = SimpleNamespace(
        recipe=SimpleNamespace(output_dir=tmp_path, early_stopping_patience=3 if quiet else None, as_dict=dict),
        training_args=SimpleNamespace(disable_tqdm=quiet, report_to=["x"] if quiet else []),
        checkpoint=tmp_path if resumes else None,
        interruption="interruption",
        checked=SimpleNamespace(all_rewards=[]),
    )
    train.add_callbacks(prepared, trainer)
    names = [one if isinstance(one, str) else type(one).__name__ for one in added]
    rest = ["EarlyStoppingCallback", "RecipeInTrackers"] if quiet else ["LiveLine"]
    assert names == ["ContinueSchedule"] * resumes + ["interruption", "LiveLog", *rest]
    assert len(removed) == (not quiet)
    trainer.create_model_card(model_name="x")
    trainer.accelerator.is_main_process = False
    trainer.create_model_card()
    assert cards == [tmp_path], "one rank writes the card"


def test_the_entry_of_a_launch_names_its_checkpoint_and_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "describe_launch", lambda *given, **named: (given, named))
    monkeypatch.setattr(train, "hardware", lambda args: "a CPU")
    geometry = SimpleNamespace(as_dict=lambda: {"ranks": 2})
    config = SimpleNamespace(seed=7, shuffle_dataset=False)
    recipe = SimpleNamespace(as_dict=lambda: {"a": 1}, config=config, arguments=["--a"], source="mine.yaml")
    checked = SimpleNamespace(all_rewards=["r"], golds=None, geometry=geometry, train_dataset=[0] * 5)
    prepared = SimpleNamespace(
        recipe=recipe, checked=checked, training_args=SimpleNamespace(world_size=2), checkpoint=Path("checkpoint-3"),
        identity=SimpleNamespace(content={"rows": "x"}),
    )  # fmt: skip
    given, named = train.launch_entry(prepared)
    assert given == ({"a": 1}, vars(config), ["r"], ["--a"])
    assert named == {
        "source": "mine.yaml", "hardware": "a CPU", "resumed_from": Path("checkpoint-3"), "world_size": 2,
        "geometry": {"ranks": 2}, "train_prompts": 5, "seed": 7, "shuffle_dataset": False, "identity": {"rows": "x"},
    }  # fmt: skip
    checked.golds = SimpleNamespace(as_dict=lambda: {"rows": 1})
    assert train.launch_entry(prepared)[1]["unscorable_golds"] == {"rows": 1}


def test_a_resumption_is_told_with_the_checkpoints_that_it_passes_over(ended: SimpleNamespace) -> None:
    point = SimpleNamespace(passed_over=[], newest=None)
    beginning = f"{ended.recipe.output_dir} has no checkpoint to resume from: starting at the beginning"
    assert train.describe_resumption(ended, point) == beginning
    point.newest = Path("run/checkpoint-3")
    assert train.describe_resumption(ended, point) == "resuming from run/checkpoint-3"
    point.passed_over = [SimpleNamespace(reason="checkpoint-4 is damaged", aside=Path("run/damaged-4"))]
    assert train.describe_resumption(ended, point) == (
        "checkpoint-4 is damaged, and is set aside as damaged-4: resuming from run/checkpoint-3"
    )


@pytest.mark.parametrize(("saves", "is_main", "pushes"), [(True, True, True), (False, False, False)])
def test_what_follows_a_training_is_tried_to_its_end(
    saves: bool, is_main: bool, pushes: bool, ended: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def attempt(recipe: Any, loss: str, function: Any, *args: Any) -> None:
        done.append(loss.partition(" ")[2])

    monkeypatch.setattr(train, "attempt", attempt)
    ended.training_args = SimpleNamespace(should_save=saves, push_to_hub=pushes)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(is_main_process=is_main), create_model_card=lambda: done.append("card"),
        push_to_hub=None, end=None,
    )  # fmt: skip
    train.finish(ended, trainer, 1.0)
    assert done == [
        *["weights may be unreadable for other users"] * saves, "trainer_state.json was not written", "card",
        "summary was not made", *["was not diagnosed"] * is_main, *["was not pushed to the hub"] * pushes,
        "logs may not be complete",
    ]  # fmt: skip


def test_a_token_for_the_hub_is_left_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "before")
    args = SimpleNamespace(hub_token=None)
    assert train.leave_token_to_environment(args) is args
    assert os.environ["HF_TOKEN"] == "before"
    args.hub_token = "hf_own"
    train.leave_token_to_environment(args)
    assert (os.environ["HF_TOKEN"], args.hub_token) == ("hf_own", None)
