"""Outcomes of `grpo-recipes plan`: each recipe and layout, memory, notes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from grpo_recipes.checks import packages
from grpo_recipes.checks.checks import Machine
from grpo_recipes.checks.geometry import geometry_of
from grpo_recipes.cli import main
from grpo_recipes.plan.memory import keeps_groups_together, longest_prompt
from grpo_recipes.plan.model_shape import load_model
from grpo_recipes.plan.plan import Plan, plan, resolved_yaml
from grpo_recipes.plan.prompts import Lengths, PromptReport
from grpo_recipes.recipe.recipe import find_file, parse_recipe
from grpo_recipes.recipe.trl_keys import ignored_keys
from grpo_recipes.training import activations
from grpo_rewards.errors import UserError
from tests.support import launching, qwen, tiny

RECIPES = sorted(path.stem for path in find_file("recipes", "quickstart").parent.glob("*.yaml"))
LAYOUTS = sorted(path.stem for path in find_file("accelerate_configs", "cpu").parent.glob("*.yaml"))


@pytest.fixture(autouse=True)
def nothing_at_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Leave the working directory, which may hold a model of the quickstart."""
    monkeypatch.chdir(tmp_path)


def check_layout(recipe: str, layout: str, rows: Path) -> None:
    """Check the plan of a recipe on a layout. Without the hub the memory is unknown."""
    is_gsm8k = parse_recipe(["--config", recipe]).dataset.name == "gsm8k"
    more = ["--dataset.path", str(rows), "--dataset.split", "train"] if is_gsm8k else []
    try:
        planned = plan(["--config", recipe, *more], accelerate_config=layout).as_dict()
    except UserError:
        return
    processes = Machine.described(find_file("accelerate_configs", layout)).num_processes
    assert planned["geometry"]["num_processes"] == processes
    epoch = planned["epoch"]
    if epoch is not None:
        assert epoch["completions"] == epoch["generations"] * planned["geometry"]["generation_batch_size"]
    assert planned["memory"] is None
    assert bool(planned["unknown"]) is (recipe != "quickstart"), "the quickstart trains on a CPU"


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [("quickstart", "cpu"), ("gsm8k-qwen2.5-7b-qlora-24gb", "zero3"), ("gsm8k-qwen2.5-1.5b-24gb", "ddp_cpu")],
)
def test_a_recipe_is_planned_or_refused_with_the_fix(recipe: str, layout: str, tmp_path: Path) -> None:
    check_layout(recipe, layout, launching.write_rows(tmp_path / "rows.jsonl", 600))


@pytest.mark.slow
def test_each_recipe_on_each_layout_is_planned_or_refused_with_the_fix(tmp_path: Path) -> None:
    rows, failed = launching.write_rows(tmp_path / "rows.jsonl", 600), []
    for recipe in RECIPES:
        for layout in LAYOUTS:
            try:
                check_layout(recipe, layout, rows)
            except AssertionError as error:
                failed.append(f"{recipe} on {layout}: {error}")
    assert failed == []


# Each recipe with the machine that its head names, on which it fits.
WRITTEN_FOR = [
    ("gsm8k-qwen2.5-1.5b-lora", "single_gpu", None, "24GB", "1.5B"),
    ("gsm8k-qwen2.5-1.5b-24gb", "zero2_offload", None, "24GB", "1.5B"),
    ("gsm8k-qwen2-0.5b-full-kl", "single_gpu", None, "24GB", "0.5B"),
    ("gsm8k-qwen2.5-1.5b-lora-vllm", "single_gpu", None, "24GB", "1.5B"),
    ("gsm8k-qwen2.5-7b-qlora-24gb", "single_gpu", None, "24GB", "7B"),
    ("gsm8k-qwen2.5-1.5b-8xa100", "ddp", 7, "80GB", "1.5B"),
    ("gsm8k-qwen2.5-7b-lora-zero3", "zero3", None, "80GB", "7B"),
    ("gsm8k-qwen2.5-7b-full-zero3", "zero3", None, "80GB", "7B"),
    ("gsm8k-qwen2.5-72b-lora-zero3-2node", "zero3_multinode", None, "80GB", "72B"),
]


def fits(cell: tuple[str, str, int | None, str, str], folder: Path) -> bool:
    recipe, layout, processes, gpu, size = cell
    config, rows = qwen.write_config(folder, size), launching.write_rows(folder / "rows.jsonl", 640)
    arguments = ["--config", recipe, "--dataset.path", str(rows)]
    options = {"num_processes": processes, "gpu_memory": gpu, "model_config_file": str(config)}
    found = plan(arguments, accelerate_config=layout, **options).as_dict()
    return bool(found["memory"]["fits"]) and found["unknown"] == []


@pytest.mark.slow
def test_recipes_fit_on_the_machines_that_they_name(tmp_path: Path) -> None:
    assert [cell for cell in WRITTEN_FOR if not fits(cell, tmp_path)] == []


@pytest.fixture
def planned(tmp_path: Path) -> Any:
    """Return a function that plans full fine-tuning of a small model."""
    rows = launching.write_rows(tmp_path / "rows.jsonl", 200)
    LlamaConfig(**{**tiny._SIZES, "num_hidden_layers": 1}).save_pretrained(tmp_path)
    short = ["--max_completion_length", "64", "--dataset.max_prompt_tokens", "64", "--use_peft", "false"]

    def call(*changes: str) -> Plan:
        arguments = ["--config", "gsm8k-qwen2.5-1.5b-lora", "--dataset.path", str(rows), *short, *changes]
        options = {"accelerate_config": "single_gpu", "gpu_memory": "24GB"}
        return plan(arguments, model_config_file=str(tmp_path / "config.json"), **options)

    return call


def imported_only(**settings: Any) -> Any:
    """Make a reward, as a factory of another package does."""
    raise AssertionError("a plan builds nothing")


def test_memory_is_that_of_the_expected_layout_and_of_reward_models(planned: Any, tmp_path: Path) -> None:
    """The checkpoint is stored in few bits, and a reward of another package is not built."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": {"quant_method": "mxfp4"}}))
    for name in "ab":
        tiny.save_reward_model(tmp_path / name)
    held = {"name": "reward_model", "kwargs": {"model": str(tmp_path / "a")}}
    on_cpu = {"name": "reward_model", "alias": "b", "kwargs": {"model": str(tmp_path / "b"), "device": "cpu"}}
    missing = {"name": "reward_model", "alias": "c", "kwargs": {"model": "a/missing-model"}}
    gate = {"name": "gate", "reward": "gsm8k_correctness", "only_if": held, "at_least": 0.5}
    found = planned("--rewards", json.dumps([gate, on_cpu, missing]))
    shared, padded = found.as_dict(), replace(found.run.memory, keeps_groups=False)
    assert shared["layout"]["name"] == "packed"
    assert shared["tokens"]["micro_batch"] < shared["tokens"]["padded"] == padded.micro_batch().tokens
    model = shared["memory"]["reward_model"]
    assert model in [size * load_model(str(tmp_path / "a"))[0].parameters for size in (2, 4)]
    assert shared["memory"]["activations"] < padded.parts()["activations"]
    assert shared["memory"]["fits"] is True
    noted = "\n".join(shared["notes"])
    assert f"up to {padded.peak() / 2**30:.1f} GiB" in noted, "TRL's rows"
    assert noted.count("a/missing-model") == 1
    assert "mxfp4" in noted
    assert "--build" not in noted


def test_a_model_that_cannot_run_without_data_has_unknown_memory(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations.Activations, "_run", lambda *given: 1 / 0)
    rewards = json.dumps([{"name": f"{__name__}.imported_only", "kwargs": {"a": 1}}])
    found = planned("--rewards", rewards).as_dict()
    assert found["memory"] is None
    assert found["layout"]["name"] == "packed"
    assert any("llama" in reason for reason in found["unknown"])
    assert any("imported_only" in note and "--build" in note for note in found["notes"])
    assert not any("quantiz" in note or "mxfp4" in note for note in found["notes"])


def test_a_micro_batch_holds_whole_groups_only_if_rows_may_move(tmp_path: Path) -> None:
    for changes, expected in (
        ({}, True),
        ({"loss_type": "bnpo"}, False),  # the weight of a row depends on its micro-batch
        ({"loss_type": "dr_grpo"}, True),
        ({"entropy_coef": 0.01}, False),
        ({"top_entropy_quantile": 0.5}, False),
        ({"num_generations": 32}, False),  # groups are split over two processes
        ({"steps_per_generation": 4}, False),  # an optimizer step has half of the generation batch
        ({"steps_per_generation": 1}, True),
        ({"num_generations": 2}, True),
    ):
        own = {"gradient_accumulation_steps": 2, **changes}
        path = launching.write_recipe(tmp_path / "r.yaml", tmp_path, tmp_path / "rows.jsonl", tmp_path / "run", **own)
        recipe = parse_recipe(["--config", str(path)])
        geometry = geometry_of(recipe, 2 if changes.get("num_generations") == 32 else 1)
        assert keeps_groups_together(recipe, geometry) is expected


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


def test_an_optimizer_of_a_missing_package_is_refused_here_and_noted_for_another_machine(
    capsys: pytest.CaptureFixture[str], mine: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda module: None)
    assert main([*mine, "--optim", "adamw_8bit"]) == 2
    said = capsys.readouterr().err
    assert "`optim: adamw_8bit`" in said
    assert "bitsandbytes" in said
    assert "bitsandbytes" in notes(capsys, [*mine, "--optim", "adamw_8bit", "--accelerate_config", "cpu"])


def test_completions_beyond_the_positions_of_the_model_are_noted(capsys: Any, mine: list[str]) -> None:
    assert main([*mine, "--json"]) == 0
    longest = json.loads(capsys.readouterr().out)["prompts"]["lengths"]["longest"]
    assert "`max_position_embeddings`" not in notes(capsys, [*mine, "--max_completion_length", str(256 - longest)])
    said = notes(capsys, [*mine, "--max_completion_length", str(257 - longest)])
    assert [figure for figure in ("`max_position_embeddings`", "257", "256") if figure not in said] == []


def test_memory_is_that_of_the_longest_measured_prompt() -> None:
    for lengths, rows, limit, longest, note in (
        ([9, 17_721], 2, None, 17_721, ""),
        ([9, 60, 17_721], 3, 70, 60, ""),  # a prompt that is dropped does not count
        ([9, 17_721], 2_000, None, 17_721, "17,721"),
        ([9, 70], 2_000, 70, 70, ""),
        (None, 2, 70, 70, ""),
        (None, 2, None, 512, "512"),
    ):
        more = [] if limit is None else [f"--dataset.max_prompt_tokens={limit}"]
        recipe = parse_recipe(["--config", "quickstart", *more])
        summary = None if lengths is None else Lengths.of(np.array(lengths), rows, limit)
        tokens, found = longest_prompt(recipe, PromptReport("", None, summary, None))
        assert tokens == longest
        assert note in "".join(found)
        assert len(found) == bool(note)


def test_a_resolved_recipe_keeps_its_order_and_its_letters() -> None:
    text = resolved_yaml(["--config", "quickstart", "--output_dir", "läufe", "--loss_type", "grpo"], ["--json"])
    keys = [line.partition(":")[0] for line in text.splitlines() if line[0].isalpha()]
    assert keys != sorted(keys)
    assert "output_dir: läufe\n" in text
    ignored = set(ignored_keys("grpo"))
    assert ignored
    assert not ignored & {*keys}
