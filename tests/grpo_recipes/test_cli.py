"""The command lines: options, help, what each command calls, exit codes, unknown words, and closed or full outputs."""

import json
import os
import re
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_recipes import __version__, cli, train
from grpo_recipes.cli import main
from grpo_recipes.data import load as data
from grpo_recipes.data.sources import DatasetUnreachable
from grpo_recipes.recipe.recipe import OUR_KEYS, shipped_files
from grpo_recipes.recipe.trl_keys import DEFAULTS
from grpo_recipes.run import launcher
from grpo_rewards import cli as rewards_cli
from tests.grpo_rewards.test_terminal import FullDisk
from tests.support import bad_input, launching
from tests.support.synthetic import ramp, write_run


def printed(capsys: pytest.CaptureFixture[str], arguments: str, code: int = 0) -> str:
    """Return what a command prints to standard output."""
    assert main(arguments.split()) == code
    return capsys.readouterr().out


# Calls of a command


def test_train_checks_a_recipe_for_its_processes_and_launches_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    recipe = str(launching.write_recipe(tmp_path / "mine.yaml", policy, rows, tmp_path / "run"))
    launched: list[Any] = []
    monkeypatch.setattr(launcher, "launch", lambda *given: launched.append(given) or 7)
    processes = ["--num_processes", "2", "--accelerate_config", "ddp_cpu"]
    assert main(["train", recipe, *processes, "--beta", "0.1"]) == 7
    ((layout, passed_on, resume_hint),) = launched
    assert (layout.num_processes, layout.config.stem) == (2, "ddp_cpu")
    assert passed_on == ["--config", recipe, "--beta", "0.1"]
    said = capsys.readouterr().out
    assert "2 process" in said
    assert str(layout.config) in said
    assert "--resume_from_checkpoint" in resume_hint()
    assert "checkpoint-" not in resume_hint()
    # 8 completions on each of 3 processes are no whole groups of 16.
    assert main(["train", recipe, "--num_processes", "3", "--num_generations", "16"]) == 2
    assert len(launched) == 1


def test_the_hint_after_a_lost_launch_names_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    recipe = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, tmp_path / "run")
    bad_input.lay_a_run(tmp_path / "run", yaml.safe_load(recipe.read_text()))
    hints: list[str] = []
    monkeypatch.setattr(launcher, "launch", lambda *given: hints.append(given[2]()) or 0)
    assert main(["train", str(recipe), "--resume_from_checkpoint", "true", "--accelerate_config", "cpu"]) == 0
    assert "checkpoint-2" in hints[0]


def test_diagnose_fails_for_findings_and_for_a_run_that_no_check_can_read(tmp_path: Path, capsys: Any) -> None:
    healthy = write_run(tmp_path / "healthy")
    assert json.loads(printed(capsys, f"diagnose {healthy} --json"))["findings"] == []
    truncated = write_run(tmp_path / "truncated", {"completions/clipped_ratio": ramp(0.9, 0.9)})
    assert json.loads(printed(capsys, f"diagnose {truncated} --json", 1))["findings"]
    assert printed(capsys, f"diagnose {truncated}", 1)
    empty = write_run(tmp_path / "empty")
    (empty / "trainer_state.json").write_text('{"global_step": 1, "log_history": [{"step": 1, "loss": 0.5}]}')
    shutil.rmtree(empty / "completions")
    assert main(["diagnose", str(empty)]) == 2
    assert str(empty) in capsys.readouterr().err
    assert json.loads(printed(capsys, f"diagnose {empty} --json", 2))["findings"] == []
    assert main(["report", str(healthy), str(empty)]) == 2
    assert str(empty) in capsys.readouterr().err


def test_report_writes_beside_the_first_run_or_where_it_is_told(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost output is not a failure of a command that writes a file."""
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", FullDisk())
        assert main(["report", str(first), "--output", str(tmp_path / "pages")]) == 0
    assert "No space left on device" in capsys.readouterr().err
    assert (tmp_path / "pages" / "report.html").is_file()
    assert not (first / "report").exists()
    assert str(first / "report") in printed(capsys, f"report {first} {second}")
    page = (first / "report" / "report.html").read_text()
    assert str(first.name) in page
    assert str(second.name) in page
    assert main(["report", str(first), "--output", "/proc/report"]) == 2
    assert "--output" in capsys.readouterr().err


def test_the_working_directory_is_importable_and_the_command_line_is_read_only_if_nothing_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "argv", ["grpo-recipes", "plan"])
    assert set(shipped_files("recipes")) <= set(printed(capsys, "plan").split())
    assert main() == 0
    assert (sys.path[0], sys.path.count("")) == ("", 1)
    with pytest.raises(SystemExit):
        main([])
    assert main(["plan", ""]) == 2, "an empty name is not the list of recipes"


# Plans


def test_plan_for_another_machine(capsys: pytest.CaptureFixture[str], gsm8k_file: Path) -> None:
    more = f"--accelerate_config ddp --num_processes 7 --dataset.path {gsm8k_file}"
    said = printed(capsys, f"plan gsm8k-qwen2.5-1.5b-8xa100 {more}")
    assert "7 prompts × 12 completions = 84 completions on 7 processes" in said


def test_plan_without_the_hub_leaves_the_epoch_unknown(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise DatasetUnreachable("the hub", "no network", "connect")

    monkeypatch.setattr(data, "load_prompts", unreachable)
    found = json.loads(printed(capsys, "plan gsm8k-qwen2.5-1.5b-24gb --accelerate_config single_gpu --json"))
    assert found["epoch"] is None
    assert "no network" in " ".join(found["unknown"])


MISTAKES = [
    ("preview quickstart --prompt 3", "`--prompts`"),
    ("plan quickstart --dataset.size 4", "4 prompts"),
    ("plan quickstart --num_generations 7", "`per_device_train_batch_size`"),
    ("plan quickstart --use_cpu false --bf16 true --accelerate_config cpu", "`bf16`"),
    ("plan quickstart --fp16 true --bf16 true", "fp16"),
]


def test_a_mistake_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, figure in MISTAKES:
        assert main(arguments.split()) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert figure in said
        assert said.count("\n") == 1


# Options


WRONG_OPTIONS = [
    ("evaluate m --samp 4", "`--samp`"), ("diagnose r --hel", "`--hel`"), ("report r --out x", "`--out`"),
    ("evaluate m --max-new-tokens x", "--max_new_tokens"), ("merge runs/a", "--output"), ("export runs/a", "--to"),
    *[(command, "required") for command in ("compare runs/a", "chat", "evaluate", "train", "init")],
]  # fmt: skip


def test_options_are_not_abbreviated_and_required_ones_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, named in WRONG_OPTIONS:
        with pytest.raises(SystemExit) as left:
            main(arguments.split())
        assert left.value.code == 2
        assert named in capsys.readouterr().err


RUN, OTHER = Path("runs/a"), Path("runs/b")
GIVEN = "--samples 4 --temperature 0.5 --max_new_tokens 9 --limit 5 --batch_size 6 --seed 7 --path p q --tags t u"


OPTIONS = [
    ("init t.csv", {"path": "t.csv"}),
    ("init t.csv --model m --decimal comma", {"path": "t.csv", "model": "m", "decimal": "comma"}),
    ("plan", {"build": False, "json": False, "resolved": False}),
    ("preview r", {"recipe": "r", "prompts": 8, "json": False}),
    ("train r --num_processes 2", {"recipe": "r", "num_processes": 2}),
    ("evaluate m", {"model": "m", "path": [], "samples": 1, "batch_size": 64, "seed": 0, "vllm": False, "json": False}),
    (
        f"evaluate m --vllm --json {GIVEN}",
        {"model": "m", "path": ["p", "q"], "tags": ["t", "u"], "samples": 4, "temperature": 0.5, "limit": 5}
        | {"max_new_tokens": 9, "batch_size": 6, "seed": 7, "vllm": True, "json": True},
    ),
    ("compare runs/a runs/b", {"first": RUN, "second": OTHER, "json": False}),
    ("diagnose runs/a", {"run": RUN, "json": False}),
    ("report runs/a", {"run": RUN, "others": []}),
    ("report runs/a runs/b runs/a --output runs/b", {"run": RUN, "others": [OTHER, RUN], "output": OTHER}),
    ("merge runs/a --output runs/b", {"run": RUN, "output": OTHER}),
    ("chat m", {"model": "m", "seed": 0}),
    ("chat m --prompt p --temperature 0", {"model": "m", "prompt": "p", "temperature": 0.0, "seed": 0}),
    ("export runs/a --to runs/b", {"run": RUN, "to": OTHER}),
]


def test_each_command_has_these_options_with_these_defaults() -> None:
    for arguments, expected in OPTIONS:
        own = ("command", "function", "known", "overrides")
        parsed = {key: value for key, value in vars(cli.parse(arguments.split())).items() if key not in own}
        assert {key: value for key, value in parsed.items() if value is not None} == expected, arguments
        assert all(type(parsed[key]) is type(value) for key, value in expected.items())


COMMANDS = ["init", "plan", "preview", "train", "evaluate", "compare", "diagnose", "report", "merge", "chat", "export"]


def test_the_help_of_a_command_explains_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            cli.parse([command, "--help"])
        described = capsys.readouterr().out.partition("\n\n")[2]
        entries = re.findall(r"^  (\S.*\n(?:   .*\n)*)", described, flags=re.MULTILINE)
        assert entries
        for entry in entries:
            name, *explanation = re.split(r"\s{2,}", entry.strip())
            assert len(" ".join(explanation).split()) >= 2, f"{name} has no explanation"


HELP = {"grpo-recipes": main, "grpo-rewards": rewards_cli.main, "train": train.main}


@pytest.mark.parametrize(
    ("program", "arguments", "figures"),
    [
        ("grpo-recipes", "--version", [f"grpo-recipes {__version__}"]),
        ("grpo-rewards", "--help", ["list", "score", "check", "convert-internlm2"]),
        ("grpo-rewards", "--version", [f"grpo-rewards {version('grpo-rewards')}"]),
        ("train", "--help", [*OUR_KEYS, "--rewards.0.weight", "quickstart", *DEFAULTS]),
        ("train", "--version", [f"grpo-recipes {__version__}"]),
    ],
)
def test_help_opens_and_is_short(capsys: Any, program: str, arguments: str, figures: list[str]) -> None:
    try:
        code = HELP[program](arguments.split())
    except SystemExit as leaving:  # argparse's way to end
        code = leaving.code
    said = capsys.readouterr()
    assert (code, said.err) == (0, "")
    assert len(said.out.splitlines()) < 60
    assert "<object" not in said.out
    assert [figure for figure in figures if figure not in said.out] == []


# Where the output goes


@pytest.mark.parametrize(
    ("words", "code"),
    [("diagnose {run}", 0), ("evaluate {run}/none", 2), ("--help", 0)],
)
def test_a_reader_that_closes_the_pipe_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: str, code: int
) -> None:
    """As under `| head`."""
    arguments = words.format(run=write_run(tmp_path / "run")).split()
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        try:
            found = main(arguments)
        except SystemExit as leaving:
            found = leaving.code
    said = capsys.readouterr().err
    assert found == code, said
    assert [line[:7] for line in said.splitlines()] == ["error: "] * bool(code)


def test_a_lost_output_is_a_failure_of_commands_that_write_no_file(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdout", FullDisk())
    assert main(["diagnose", str(write_run(tmp_path / "run"))]) == 2
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.slow
def test_a_log_on_a_full_disk_does_not_stop_a_training(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """Without a progress bar, transformers prints each log entry itself."""
    policy, rows = launching.build_policy(tmp_path / "policy"), launching.write_rows(tmp_path / "rows.jsonl", 8)
    changes = {"max_steps": 1, "disable_tqdm": True, "report_to": "none"}
    for names in (("stdout",), ("stdout", "stderr")):
        run = tmp_path / "-".join(names)
        config = launching.write_recipe(tmp_path / "mine.yaml", policy, rows, run, **changes)
        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(sys, name, FullDisk())
            assert train.main(["--config", str(config)]) == 0
        assert (run / "model.safetensors").is_file()
    assert capsys.readouterr().err.count("No space left on device") == 1
