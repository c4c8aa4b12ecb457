"""The command lines: help, `grpo-recipes plan`, unknown words, and closed or full outputs."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest

from grpo_recipes import __version__, cli, train
from grpo_recipes.cli import main
from grpo_recipes.recipe.recipe import OUR_KEYS, shipped_files
from grpo_recipes.recipe.trl_keys import DEFAULTS
from grpo_rewards import cli as rewards_cli
from grpo_rewards import terminal
from grpo_rewards.errors import did_you_mean
from tests.grpo_rewards.test_terminal import FullDisk
from tests.support import launching
from tests.support.synthetic import write_run


def test_plan_prints_the_geometry_and_the_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "quickstart", "--dataset.size", "800"]) == 0
    said = capsys.readouterr().out
    assert "8 prompts × 8 completions = 64 completions on 1 process" in said
    assert "800 prompts = 100 generations = 100 optimizer steps" in said


def test_plan_for_another_machine(capsys: pytest.CaptureFixture[str], gsm8k_file) -> None:
    more = ["--accelerate_config", "ddp", "--num_processes", "7", "--dataset.path", str(gsm8k_file)]
    assert main(["plan", "gsm8k-qwen2.5-1.5b-8xa100", *more]) == 0
    said = capsys.readouterr().out
    assert "7 prompts × 12 completions = 84 completions on 7 processes" in said
    assert "whole on each process" in said


def test_plan_without_the_hub_leaves_the_epoch_unknown(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    from grpo_recipes.data import load as data
    from grpo_recipes.data.sources import DatasetUnreachable

    def unreachable(*args: object, **kwargs: object) -> None:
        raise DatasetUnreachable("no network")

    monkeypatch.setattr(data, "load_prompts", unreachable)
    assert main(["plan", "gsm8k-qwen2.5-1.5b-24gb", "--accelerate_config", "single_gpu"]) == 0
    assert "unknown: no network" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "quickstart", "--lerning_rate", "1e-5"], "did you mean `learning_rate`"),
        (["plan", "quickstart", "--dataset.size", "4"], "4 prompts"),
        (["plan", "quickstart", "--num_generations", "7"], "set `per_device_train_batch_size`"),
        (
            ["plan", "quickstart", "--use_cpu", "false", "--bf16", "true", "--accelerate_config", "cpu"],
            "`bf16` needs a GPU",
        ),
        (["plan", "quickstart", "--fp16", "true", "--bf16", "true"], "fp16"),
        (["plan", "no-such-recipe"], "no-such-recipe"),
        (["plan", "quickstart", "--accelerate_config", "no-such-file"], "no-such-file"),
    ],
)
def test_plan_refuses_with_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["evaluate", "m", "--samp", "4"], ["diagnose", "r", "--hel"], ["report", "r", "--out", "x"]]
)
def test_options_are_not_abbreviated(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert f"unknown argument `{arguments[2]}`" in capsys.readouterr().err


def test_an_override_is_never_read_as_the_beginning_of_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "quickstart", "--model", "foo"]) == 2
    assert "--model_config" not in capsys.readouterr().err
    assert main(["plan", "quickstart", "--learning_rate", "1e-5", "--num_generations=4", "--num-processes=1"]) == 0
    assert "completions on 1 process" in capsys.readouterr().out


def test_json_has_a_line_for_each_entry(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["diagnose", str(write_run(tmp_path / "run")), "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (lines[0], lines[-1]) == ("{", "}")
    assert [line[:3] for line in lines if line.startswith('  "')] == ['  "'] * len(json.loads("".join(lines)))


HELP = {"grpo-recipes": main, "grpo-rewards": rewards_cli.main, "train": train.main}


@pytest.mark.parametrize(
    ("program", "arguments", "says"),
    [
        (
            "grpo-recipes",
            ["--help"],
            [
                "usage: grpo-recipes [-h]",
                "GRPO training from a recipe: plan it",
                "95 % intervals",
                "\n  accelerate launch ",
            ],
        ),
        ("grpo-recipes", ["plan", "--help"], ["--gpu_memory SIZE", "override the recipe"]),
        ("grpo-recipes", ["preview", "--help"], ["override the recipe, as in training"]),
        ("grpo-recipes", ["train", "--help"], ["override the recipe; `python -m grpo_recipes.train"]),
        ("grpo-recipes", ["compare", "--help"], ["[--json] A B\n"]),
        ("grpo-recipes", ["evaluate", "--help"], ["--samples N"]),
        ("grpo-recipes", ["diagnose", "--help"], ["output_dir"]),
        ("grpo-recipes", ["chat", "--help"], ["--prompt TEXT", "Ctrl-D"]),
        ("grpo-recipes", ["export", "--help"], ["--to FOLDER"]),
        ("grpo-recipes", ["report", "--help"], ["evaluation.svg", "run [run ...]"]),
        ("grpo-recipes", ["--version"], [f"grpo-recipes {__version__}"]),
        ("grpo-rewards", ["--help"], ["list", "score", "check", "convert-internlm2"]),
        *[("grpo-rewards", [verb, "--help"], ["usage"]) for verb in ("list", "score", "check", "convert-internlm2")],
        ("grpo-rewards", ["--version"], [f"grpo-rewards {version('grpo-rewards')}"]),
        ("train", ["--help"], [*OUR_KEYS, "--rewards.0.weight", "docs/trl/grpo_trainer", "quickstart", *DEFAULTS]),
        ("train", ["--config", "quickstart", "-h"], ["usage"]),
        ("train", ["--version"], [f"grpo-recipes {__version__}"]),
    ],
)
def test_help_opens_and_is_short(
    capsys: pytest.CaptureFixture[str], program: str, arguments: list[str], says: list[str]
) -> None:
    try:
        code = HELP[program](arguments)
    except SystemExit as leaving:  # argparse's way to end
        code = leaving.code
    said = capsys.readouterr()
    assert (code, said.err) == (0, "")
    assert len(said.out.splitlines()) < 60
    assert "<object" not in said.out
    for words in says:
        assert words in said.out


def test_the_lines_of_a_plan_are_wrapped(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # without the quickstart's policy, whose memory is unknown then, in a long sentence
    assert main(["plan", "quickstart"]) == 0
    said = capsys.readouterr().out
    assert "runs/quickstart/policy-seed0: there is no such folder" in " ".join(said.split())
    assert max(len(line) for line in said.splitlines()[1:] if not line.startswith("  | ")) <= 100  # but for the prompt


def test_either_spelling_of_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "quickstart", "--num-processes=1", "--gpu-memory", "24GB"]) == 0
    with pytest.raises(SystemExit):
        main(["evaluate", "m", "--max-new-tokens", "x"])
    assert "--max_new_tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "known", "nearest"),
    [
        ("lora_rank", ["lora_r", "local_rank"], "lora_r"),
        ("local_rnk", ["lora_r", "local_rank"], "local_rank"),
        ("--gpu-memry", ["--gpu_memory", "vllm_gpu_memory_utilization"], "--gpu_memory"),
        ("--model", ["delta", "model_name_or_path"], "model_name_or_path"),
        ("xyz", ["delta", "beta"], None),
        ("x", [], None),
    ],
)
def test_the_nearest_name(word: str, known: list[str], nearest: str | None) -> None:
    expected = f": did you mean `{nearest}`?" if nearest else "otherwise"
    assert did_you_mean(word, known, "otherwise") == expected


def test_a_command_that_resembles_an_option_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "xxjson"]) == 2
    assert "xxjson: there is no such file" in capsys.readouterr().err


# Where the output goes


@pytest.fixture
def closed_pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """Yield standard output as a pipe whose reader has ended, as under `| head`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        yield stream


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("plan quickstart", 0), ("plan quickstart --json", 0), ("plan quickstart --resolved", 0), ("plan", 0),
        ("diagnose {run}", 0), ("report {run}", 0), ("compare {run}/a {run}/b", 2), ("init {rows}", 0),
        ("merge {run} --output {run}/merged", 2), ("evaluate {run}/none", 2), ("train {rows}", 2), ("--help", 0),
        ("train --help", 0),
    ],
)  # fmt: skip
def test_a_reader_that_closes_the_pipe_is_no_error(
    closed_pipe: TextIO, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, code: int
) -> None:
    run, rows = write_run(tmp_path / "run"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    arguments = words.format(run=run, rows=rows).split()
    if arguments[0] == "init":
        arguments += ["--output", str(tmp_path / "mine.yaml")]
    try:
        found = main(arguments)
    except SystemExit as leaving:
        found = leaving.code
    said = capsys.readouterr().err
    assert found == code, said
    assert [line for line in said.splitlines() if not line.startswith("error: ")] == []
    assert said.count("error: ") == (1 if code else 0)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["grpo_recipes.cli", "grpo_recipes.train", "grpo_recipes.quickstart"])
def test_the_interpreter_adds_nothing_to_a_closed_pipe(module: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.returncode == 0
    assert "BrokenPipe" not in done.stderr


@pytest.mark.parametrize("word", ["plan", "diagnose"])
def test_a_command_whose_output_is_lost_has_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, word: str
) -> None:
    monkeypatch.setattr(sys, "stdout", FullDisk())
    assert main([word, "quickstart" if word == "plan" else str(write_run(tmp_path / "run"))]) == 2
    assert "standard output can't be written (No space left on device)" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("both", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_log_on_a_full_disk_does_not_stop_a_training(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, both: bool
) -> None:
    """Without a progress bar, transformers prints each log entry itself."""
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    changes = {"max_steps": 1, "disable_tqdm": True, "report_to": "none"}
    config = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, tmp_path / "run", **changes)
    for name in ("stdout", "stderr") if both else ("stdout",):
        monkeypatch.setattr(sys, name, FullDisk())
    assert train.main(["--config", str(config)]) == 0
    assert (tmp_path / "run" / "model.safetensors").is_file()
    if not both:
        assert capsys.readouterr().err.count("standard output can't be written") == 1


RUN, OTHER = Path("runs/a"), Path("runs/b")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "init t.csv",
            {"path": "t.csv", "model": None, "output": None, "task": None, "question": None, "answer": None}
            | {"choices": None, "decimal": None},
        ),
        (
            "init t.csv --model m --output runs/a --task numbers --question q --answer a --choices c --decimal comma",
            {"path": "t.csv", "model": "m", "output": RUN, "task": "numbers", "question": "q", "answer": "a"}
            | {"choices": "c", "decimal": "comma"},
        ),
        (
            "plan",
            {"recipe": None, "accelerate_config": None, "num_processes": None, "gpu_memory": None}
            | {"model_config": None, "build": False, "json": False, "resolved": False},
        ),
        (
            "plan r --accelerate_config ddp --num_processes 2 --gpu_memory 80GB --model_config c.json --build --json "
            "--resolved",
            {"recipe": "r", "accelerate_config": "ddp", "num_processes": 2, "gpu_memory": "80GB"}
            | {"model_config": "c.json", "build": True, "json": True, "resolved": True},
        ),
        ("preview r", {"recipe": "r", "prompts": 8, "json": False}),
        ("preview r --prompts 3 --json", {"recipe": "r", "prompts": 3, "json": True}),
        ("train r", {"recipe": "r", "accelerate_config": None, "num_processes": None}),
        (
            "train r --accelerate_config ddp --num_processes 2",
            {"recipe": "r", "accelerate_config": "ddp", "num_processes": 2},
        ),
        (
            "evaluate m",
            {"model": "m", "recipe": None, "dataset": None, "path": [], "split": None, "system_prompt": None}
            | {"prompt_format": None, "tags": None, "samples": 1, "temperature": None, "max_new_tokens": None}
            | {"limit": None, "batch_size": 64, "seed": 0, "vllm": False, "vllm_server_base_url": None}
            | {"vllm_tensor_parallel_size": None, "vllm_max_model_length": None, "vllm_gpu_memory_utilization": None}
            | {"output": None, "json": False},
        ),
        (
            "evaluate m --recipe r --dataset d --path p q --split s --system_prompt y --prompt_format text --tags t u "
            "--samples 4 --temperature 0.5 --max_new_tokens 9 --limit 5 --batch_size 6 --seed 7 --vllm "
            "--vllm_server_base_url http://h --vllm_tensor_parallel_size 2 --vllm_max_model_length 99 "
            "--vllm_gpu_memory_utilization 0.8 --output runs/a --json",
            {"model": "m", "recipe": "r", "dataset": "d", "path": ["p", "q"], "split": "s", "system_prompt": "y"}
            | {"prompt_format": "text", "tags": ["t", "u"], "samples": 4, "temperature": 0.5, "max_new_tokens": 9}
            | {"limit": 5, "batch_size": 6, "seed": 7, "vllm": True, "vllm_server_base_url": "http://h"}
            | {"vllm_tensor_parallel_size": 2, "vllm_max_model_length": 99, "vllm_gpu_memory_utilization": 0.8}
            | {"output": RUN, "json": True},
        ),
        ("compare runs/a runs/b", {"first": RUN, "second": OTHER, "json": False}),
        ("compare runs/a runs/b --json", {"first": RUN, "second": OTHER, "json": True}),
        ("diagnose runs/a", {"run": RUN, "json": False}),
        ("diagnose runs/a --json", {"run": RUN, "json": True}),
        ("report runs/a", {"run": RUN, "others": [], "output": None}),
        ("report runs/a runs/b runs/a --output runs/b", {"run": RUN, "others": [OTHER, RUN], "output": OTHER}),
        ("merge runs/a --output runs/b", {"run": RUN, "output": OTHER}),
        (
            "chat m",
            {"model": "m", "recipe": None, "prompt": None, "temperature": None, "max_new_tokens": None, "seed": 0},
        ),
        (
            "chat m --recipe r --prompt p --temperature 0 --max_new_tokens 9 --seed 7",
            {"model": "m", "recipe": "r", "prompt": "p", "temperature": 0.0, "max_new_tokens": 9, "seed": 7},
        ),
        ("export runs/a --to runs/b", {"run": RUN, "to": OTHER}),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else "",
)
def test_each_command_has_these_options_with_these_defaults(arguments: str, expected: dict[str, Any]) -> None:
    parsed = vars(cli.parse(arguments.split()))
    own = ("command", "function", "known", "overrides")
    assert {key: value for key, value in parsed.items() if key not in own} == expected
    assert all(type(parsed[key]) is type(value) for key, value in expected.items() if not isinstance(value, Path))


COMMANDS = ["init", "plan", "preview", "train", "evaluate", "compare", "diagnose", "report", "merge", "chat", "export"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_explains_every_argument(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse([command, "--help"])
    described = capsys.readouterr().out.partition("\n\n")[2]
    entries = re.findall(r"^  (\S.*\n(?:   .*\n)*)", described, flags=re.MULTILINE)
    assert entries
    for entry in entries:
        name, *explanation = re.split(r"\s{2,}", entry.strip())
        assert len(" ".join(explanation).split()) >= 2, f"{name} has no explanation"
        option, *values = name.split()
        # A value named after its option, such as `--limit LIMIT`, does not tell a number from a file.
        assert option.strip("-").upper() not in {*values} - {"MODEL", "RECIPE", "SPLIT", "PATH"}, name


def test_the_help_lists_every_command_with_its_purpose(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["--help"])
    listed = capsys.readouterr().out.partition("\ncommands:\n  COMMAND\n")[2].partition("\n\n")[0]
    assert re.findall(r"^    (\w+) +\S+ \S+", listed, flags=re.MULTILINE) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_a_lost_output_is_a_failure_of_commands_that_write_no_file(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "parse", lambda arguments: SimpleNamespace(command=arguments[0]))
    monkeypatch.setattr(cli, "run", lambda options: terminal.say("a result") or 0)
    assert main([command]) == 0
    monkeypatch.setattr(sys, "stdout", FullDisk())
    assert main([command]) == (2 if command in ("plan", "preview", "compare", "diagnose", "chat") else 0)


@pytest.mark.parametrize(
    "missing", ["merge runs/a", "export runs/a", "compare runs/a", "chat", "evaluate", "train", "init"]
)
def test_a_required_argument_is_asked_for(missing: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.parse(missing.split())
    assert left.value.code == 2
    assert "required" in capsys.readouterr().err


def test_the_help_of_training_lists_every_shipped_recipe_indented() -> None:
    listed = train.help_text().partition("ships:\n")[2].partition("\n\n")[0].splitlines()
    assert all(line.startswith("  ") and line[2] != " " and len(line) <= 100 for line in listed)
    assert [name for line in listed for name in line.strip().strip(",").split(", ")] == list(shipped_files("recipes"))
