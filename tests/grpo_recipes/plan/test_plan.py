"""`grpo-recipes plan` with each recipe and each layout."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.checks import packages
from grpo_recipes.checks.checks import Machine
from grpo_recipes.checks.geometry import geometry_of
from grpo_recipes.cli import main
from grpo_recipes.data import hub
from grpo_recipes.plan import activations
from grpo_recipes.plan.plan import _keeps_groups_together
from grpo_recipes.recipe.recipe import find_file, parse_recipe
from tests.support import launching, qwen
from tests.support.grids import covering
from tests.tools.models import build

RECIPES = sorted(path.stem for path in find_file("recipes", "quickstart").parent.glob("*.yaml"))
LAYOUTS = sorted(path.stem for path in find_file("accelerate_configs", "cpu").parent.glob("*.yaml"))


@pytest.fixture(autouse=True)
def nothing_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Disable the hub, and leave the working directory, which may hold a model of the quickstart."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "hub_answers", lambda: False)
    monkeypatch.setattr("grpo_recipes.plan.memory.hub_answers", lambda: False)


@pytest.mark.parametrize(("recipe", "layout"), covering(RECIPES, LAYOUTS))
def test_each_recipe_is_planned_or_refused_with_the_fix(
    recipe: str, layout: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Without the hub the memory is unknown. A layout that does not suit a recipe is refused in one line."""
    rows = launching.write_rows(tmp_path / "rows.jsonl", 600)
    is_gsm8k = parse_recipe(["--config", recipe]).dataset.name == "gsm8k"
    more = ["--dataset.path", str(rows), "--dataset.split", "train"] if is_gsm8k else []
    status = main(["plan", recipe, "--accelerate_config", layout, *more, "--json"])
    output = capsys.readouterr()
    if status == 2:
        assert output.err.startswith("error: ")
        assert output.err.count("\n") == 1
        fixes = ("`bf16: false`", "set `per_device_train_batch_size` to", "correct the path", "add prompts or lower")
        assert any(fix in output.err for fix in fixes)
        return
    planned = json.loads(output.out)
    assert status == 0
    assert (
        planned["geometry"]["num_processes"] == Machine.described(find_file("accelerate_configs", layout)).num_processes
    )
    epoch = planned["epoch"]
    if epoch is None:
        assert any("dataset.path" in reason for reason in planned["unknown"])
    else:
        assert epoch["completions"] == epoch["generations"] * planned["geometry"]["generation_batch_size"]
    assert planned["memory"] is None
    if recipe == "quickstart":  # trains on a CPU
        assert planned["unknown"] == []
        return
    known = ("--model_config", "quantised models are estimated only")
    assert any(part in reason for reason in planned["unknown"] for part in known)


# Each recipe with the machine that its head names, on which it fits.
WRITTEN_FOR = [
    ("gsm8k-qwen2.5-1.5b-24gb", "zero2_offload", None, "24GB", "1.5B"),
    ("gsm8k-qwen2.5-1.5b-iterative", "zero2_offload", None, "24GB", "1.5B"),
    ("gsm8k-qwen2-0.5b-full-kl", "single_gpu", None, "24GB", "0.5B"),
    ("gsm8k-qwen2.5-1.5b-lora", "single_gpu", None, "24GB", "1.5B"),
    ("gsm8k-qwen2.5-1.5b-lora-vllm", "single_gpu", None, "24GB", "1.5B"),
    ("gsm8k-qwen2.5-7b-qlora-24gb", "single_gpu", None, "24GB", "7B"),
    ("gsm8k-qwen2.5-1.5b-8xa100", "ddp", 7, "80GB", "1.5B"),
    ("gsm8k-qwen2.5-7b-lora-zero3", "zero3", None, "80GB", "7B"),
    ("gsm8k-qwen2.5-7b-full-zero3", "zero3", None, "80GB", "7B"),
    ("gsm8k-qwen2.5-72b-lora-zero3-2node", "zero3_multinode", None, "80GB", "72B"),
]


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize(
    ("recipe", "layout", "processes", "gpu", "size"),
    [pytest.param(*cell, marks=pytest.mark.slow if index % 3 else ()) for index, cell in enumerate(WRITTEN_FOR[:-1])]
    + [pytest.param(*WRITTEN_FOR[-1], marks=pytest.mark.slow)],
)
def test_recipes_fit_on_the_machines_that_they_name(
    recipe: str,
    layout: str,
    processes: int | None,
    gpu: str,
    size: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    config, rows = qwen.write_config(tmp_path, size), launching.write_rows(tmp_path / "rows.jsonl", 640)
    machine = ["--accelerate_config", layout, *(["--num_processes", str(processes)] if processes else [])]
    more = ["--gpu_memory", gpu, "--model_config", str(config), "--dataset.path", str(rows)]
    assert main(["plan", recipe, *machine, *more]) == 0
    output = capsys.readouterr().out
    assert "fits in" in output
    assert "whole on each process" in output


def test_what_does_not_fit_is_named_with_its_largest_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config, rows = qwen.write_config(tmp_path, "7B"), launching.write_rows(tmp_path / "rows.jsonl", 640)
    more = ["--gpu_memory", "40GB", "--model_config", str(config), "--dataset.path", str(rows)]
    assert main(["plan", "gsm8k-qwen2.5-7b-full-zero3", "--accelerate_config", "zero2", *more]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "does not fit in" in output
    assert "can't hold its 14.2 GiB of weights" in output
    assert "largest part parameters, 14.2 GiB: " in output


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Return a function that plans full fine-tuning of a small hybrid model."""
    build("qwen3_5_text").config.save_pretrained(tmp_path / "model")
    rows = launching.write_rows(tmp_path / "rows.jsonl", 200)
    files = ["--model_config", str(tmp_path / "model" / "config.json"), "--dataset.path", str(rows)]
    machine = ["--accelerate_config", "single_gpu", "--gpu_memory", "24GB", "--use_peft", "false"]

    def call(*changes: str) -> dict[str, Any]:
        assert main(["plan", "gsm8k-qwen2.5-1.5b-lora", *machine, *files, "--json", *changes]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return call


def test_memory_is_that_of_the_expected_layout_and_a_note_names_trls(planned: Any) -> None:
    shared, padded = planned(), planned("--micro_batching", "off")
    assert (shared["layout"]["name"], padded["layout"]["name"]) == ("shared", "padded")
    assert shared["tokens"]["micro_batch"] < shared["tokens"]["padded"] == padded["tokens"]["micro_batch"]
    assert shared["memory"]["peak"] < padded["memory"]["peak"]
    assert f"needs up to {padded['memory']['peak'] / 2**30:.1f} GiB" in " ".join(shared["notes"])
    short, limit = planned("--dataset.max_prompt_tokens", "100"), planned("--dataset.max_prompt_tokens", "4000")
    assert short["memory"]["peak"] < shared["memory"]["peak"] < limit["memory"]["peak"]


def test_a_checkpoint_in_fewer_bits_is_named(planned: Any, tmp_path: Path) -> None:
    file = tmp_path / "model" / "config.json"
    assert "stored in" not in " ".join(planned()["notes"])
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "mxfp4"}}))
    assert "stored in mxfp4" in " ".join(planned()["notes"])


def test_a_model_that_cannot_run_without_data_has_unknown_memory(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations.Activations, "_run", lambda *given: 1 / 0)
    found = planned()
    assert found["memory"] is None
    assert found["layout"]["name"] == "shared"
    assert any("qwen3_5_text can't run without data" in reason for reason in found["unknown"])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"loss_type": "bnpo"}, False),  # the weight of a row depends on its micro-batch
        ({"loss_type": "dr_grpo"}, True),
        ({"entropy_coef": 0.01}, False),
        ({"top_entropy_quantile": 0.5}, False),
        ({"num_generations": 32}, False),  # groups are split over two processes
        ({"steps_per_generation": 4}, False),  # an optimizer step has half of the generation batch
        ({"steps_per_generation": 1}, True),
    ],
    ids=str,
)
def test_a_micro_batch_holds_whole_groups_only_if_rows_may_move(
    changes: dict[str, Any], expected: bool, tmp_path: Path
) -> None:
    path = launching.write_recipe(tmp_path / "r.yaml", tmp_path, tmp_path / "rows.jsonl", tmp_path / "run", **changes)
    text = path.read_text()
    path.write_text(text if "gradient_accumulation" in text else f"{text}gradient_accumulation_steps: 2\n")
    recipe = parse_recipe(["--config", str(path)])
    geometry = geometry_of(recipe, 2 if "num_generations" in changes else 1)
    assert _keeps_groups_together(recipe, geometry) is expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu_memory", "large"], "--gpu_memory large: write a size as `80GB`"),
        (["--model_config", "no/config.json"], "--model_config no/config.json: there is no such file (relative to "),
    ],
)
def test_invalid_options_are_refused(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["plan", "quickstart", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def mine(tmp_path: Path, tiny_model: Path) -> list[str]:
    """Return the arguments of a plan of a table with 40 rows, for a model with 256 positions."""
    rows = launching.write_rows(tmp_path / "rows.jsonl", 40)
    changes = {"max_completion_length": 64, "dataset": {"path": str(rows), "system_prompt": "think"}}
    recipe = launching.write_recipe(tmp_path / "mine.yaml", tiny_model, rows, tmp_path / "run", **changes)
    return ["plan", str(recipe)]


def notes(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    assert main([*arguments, "--json"]) == 0
    return "\n".join(json.loads(capsys.readouterr().out)["notes"])


@pytest.mark.parametrize("name", ["./no/such/model", "/no/such/model", "runs/no/model"])
def test_a_model_folder_that_does_not_exist_is_refused_with_the_place_of_a_relative_path(
    capsys: pytest.CaptureFixture[str], mine: list[str], tmp_path: Path, name: str
) -> None:
    assert main([*mine, "--model_name_or_path", name]) == 2
    said = capsys.readouterr().err
    assert f"`model_name_or_path` {name}" in said
    assert "there is no such folder" in said
    assert (f"(relative to {Path.cwd()})" in said) == (not name.startswith("/"))
    assert main(["train", *mine[1:], "--model_name_or_path", name]) == 2
    assert capsys.readouterr().err == said
    assert main(["plan", "quickstart", "--model_name_or_path", name]) == 2


def test_the_model_of_a_shipped_recipe_may_be_made_later(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "quickstart"]) == 0
    assert "there is no such folder" in " ".join(capsys.readouterr().out.split())


def test_an_optimizer_of_a_missing_package_is_refused_here_and_noted_for_another_machine(
    capsys: pytest.CaptureFixture[str], mine: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda module: None)
    assert main([*mine, "--optim", "adamw_8bit"]) == 2
    needs = "`optim: adamw_8bit` needs the package bitsandbytes, which is not installed here"
    assert needs in capsys.readouterr().err
    assert needs in notes(capsys, [*mine, "--optim", "adamw_8bit", "--accelerate_config", "cpu"])


def test_completions_beyond_the_positions_of_the_model_are_noted(
    capsys: pytest.CaptureFixture[str], mine: list[str]
) -> None:
    assert main([*mine, "--json"]) == 0
    longest = json.loads(capsys.readouterr().out)["prompts"]["lengths"]["longest"]
    assert "positions" not in notes(capsys, [*mine, "--max_completion_length", str(256 - longest)])
    said = notes(capsys, [*mine, "--max_completion_length", str(257 - longest)])
    assert "needs 257 positions, and the model was made for 256" in said


def test_a_folder_that_is_no_model_is_refused(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = launching.write_rows(tmp_path / "rows.jsonl", 40)
    whole = shutil.copytree(tiny_model, tmp_path / "whole")
    empty = shutil.copytree(tiny_model, tmp_path / "empty", ignore=shutil.ignore_patterns("config.json"))
    for file in [*whole.glob("*token*"), *whole.glob("chat_template*")]:
        file.unlink()
    for policy, words in (
        (rows, "holds no model (no config.json"),
        (empty, "holds no model (no config.json, no adapter_config.json): name the folder of a model"),
        (whole, "its tokenizer has no vocabulary"),
    ):
        arguments = ["--model_name_or_path", str(policy), "--dataset.prompt_format", "text"]
        assert main(["plan", "quickstart", *arguments]) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]
