"""`grpo-recipes plan` with each recipe and each layout."""

import json
from pathlib import Path

import pytest

from grpo_recipes.checks.checks import Machine
from grpo_recipes.cli import main
from grpo_recipes.data import hub
from grpo_recipes.recipe.recipe import find_file, parse_recipe
from tests.support import launching, qwen

RECIPES = sorted(path.stem for path in find_file("recipes", "quickstart").parent.glob("*.yaml"))
LAYOUTS = sorted(path.stem for path in find_file("accelerate_configs", "cpu").parent.glob("*.yaml"))


@pytest.fixture(autouse=True)
def nothing_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Disable the hub, and leave the working directory, which may hold a model of the quickstart."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "hub_answers", lambda: False)
    monkeypatch.setattr("grpo_recipes.plan.memory.hub_answers", lambda: False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", RECIPES)
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
        fixes = ("`bf16: false`", "set `per_device_train_batch_size` to", "correct the path")
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


@pytest.mark.parametrize(("recipe", "layout", "processes", "gpu", "size"), WRITTEN_FOR)
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


def test_a_plan_tells_if_no_single_change_makes_it_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config, rows = qwen.write_config(tmp_path, "7B"), launching.write_rows(tmp_path / "rows.jsonl", 640)
    more = ["--gpu_memory", "40GB", "--model_config", str(config), "--dataset.path", str(rows)]
    assert main(["plan", "gsm8k-qwen2.5-7b-full-zero3", "--accelerate_config", "zero2", *more]) == 0
    output = capsys.readouterr().out
    assert "does not fit in" in output
    assert "can't hold its 14.2 GiB of weights" in output
    assert "no single change of the recipe or of the layout is enough" in " ".join(output.split())


def test_a_72b_adapter_cannot_go_to_vllm_on_80_gb(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config, rows = qwen.write_config(tmp_path, "72B"), launching.write_rows(tmp_path / "rows.jsonl", 640)
    more = ["--gpu_memory", "80GB", "--model_config", str(config), "--dataset.path", str(rows)]
    vllm = ["--use_vllm", "true", "--vllm_mode", "server"]
    recipe = "gsm8k-qwen2.5-72b-lora-zero3-2node"
    assert main(["plan", recipe, "--accelerate_config", "zero3_multinode", *more, *vllm]) == 0
    output = capsys.readouterr().out
    assert "does not fit in" in output
    assert "use_vllm: false with ds3_gather_for_generation: false" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu_memory", "large"], "--gpu_memory large: write a size as `80GB`"),
        (["--model_config", "no/config.json"], "--model_config no/config.json: there is no such file"),
    ],
)
def test_invalid_options_are_refused(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["plan", "quickstart", *options]) == 2
    assert message in capsys.readouterr().err
