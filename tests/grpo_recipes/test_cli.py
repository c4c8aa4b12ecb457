"""`grpo-recipes plan` as typed."""

import pytest

from grpo_recipes.cli import main


def test_plan_prints_the_geometry_and_the_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "quickstart", "--dataset.size", "800"]) == 0
    said = capsys.readouterr().out
    assert "8 prompts × 8 completions = 64 completions on 1 process" in said
    assert "800 prompts = 100 generations = 100 optimiser steps" in said


def test_plan_for_another_machine(capsys: pytest.CaptureFixture[str], gsm8k_file) -> None:
    more = ["--accelerate-config", "ddp", "--num-processes", "7", "--dataset.path", str(gsm8k_file)]
    assert main(["plan", "gsm8k-qwen2.5-1.5b-8xa100", *more]) == 0
    said = capsys.readouterr().out
    assert "7 prompts × 12 completions = 84 completions on 7 processes" in said
    assert "whole on each process" in said


def test_plan_without_the_hub_leaves_the_epoch_unknown(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    from grpo_recipes import data

    def unreachable(*args: object, **kwargs: object) -> None:
        raise data.DatasetUnreachable("no network")

    monkeypatch.setattr(data, "load", unreachable)
    assert main(["plan", "gsm8k-qwen2.5-1.5b-24gb", "--accelerate-config", "single_gpu"]) == 0
    assert "unknown: no network" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["plan", "quickstart", "--lerning_rate", "1e-5"], "did you mean `learning_rate`"),
        (["plan", "quickstart", "--dataset.size", "4"], "4 prompts"),
        (["plan", "quickstart", "--num_generations", "7"], "set `per_device_train_batch_size`"),
        (
            ["plan", "quickstart", "--use_cpu", "false", "--bf16", "true", "--accelerate-config", "cpu"],
            "`bf16` needs a GPU",
        ),
        (["plan", "quickstart", "--fp16", "true", "--bf16", "true"], "fp16"),
        (["plan", "no-such-recipe"], "no-such-recipe"),
        (["plan", "quickstart", "--accelerate-config", "no-such-file"], "no-such-file"),
    ],
)
def test_plan_refuses_with_one_sentence_and_exit_code_2(
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
    assert "--model-config" not in capsys.readouterr().err
    assert main(["plan", "quickstart", "--learning_rate", "1e-5", "--num_generations=4", "--num-processes=1"]) == 0
    assert "completions on 1 process" in capsys.readouterr().out
