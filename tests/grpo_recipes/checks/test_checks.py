"""Checks of a recipe as a whole: what a command refuses before a model is loaded, and what must stay allowed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers.utils

from grpo_recipes.checks import checks
from grpo_recipes.checks.checks import Machine
from grpo_recipes.recipe.recipe import Recipe, RecipeError
from grpo_recipes.run.launcher import choose_layout
from tests.support.errors import refused
from tests.support.recipes import read_recipe

ROOT = Path(__file__).parents[3]
CPU = Machine(1, bf16=False)
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "nowhere/base", "target_modules": ["q_proj"]}
CONFIG = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 64}


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def recipe(**changes: Any) -> Recipe:
    """Return a recipe with 16 rows for the CPU. `...` removes a key."""
    values = {"dataset": {"name": "arithmetic", "size": 16}, "use_cpu": True, "bf16": False, "output_dir": "run"}
    return read_recipe(Path(), **{**values, "per_device_train_batch_size": 8, "num_generations": 4, **changes})


def write(path: str, content: Any) -> str:
    """Write JSON, or a text as it is, and return the folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(content if isinstance(content, str) else json.dumps(content))
    return str(Path(path).parent)


def adapter(folder: str = "adapter", **changes: Any) -> str:
    return write(f"{folder}/adapter_config.json", {**ADAPTER, **changes})


# Machines and layouts


def test_a_gpu_or_an_xla_device_computes_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    for switch in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        monkeypatch.setenv(switch, "false")
    for gpu, xla in ((False, False), (True, False), (False, True)):
        monkeypatch.setattr(transformers.utils, "is_torch_bf16_gpu_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr(transformers.utils, "is_torch_xla_available", lambda xla=xla: xla)
        assert Machine.here() == Machine(1, gpu or xla, "torch")


def test_a_layout_has_at_least_one_process() -> None:
    with refused("`num_processes`", "0"):
        Machine(0, bf16=False)
    for number in (0, -1):
        with refused("`num_processes`", number):
            choose_layout(None, number, use_cpu=True)
    for text, figures in (("use_cpu: true\n", []), ("num_processes: 0\n", ["`num_processes`", "0"])):
        write("layout.yaml", text)
        with refused("", "layout.yaml", *figures, by=RecipeError):
            Machine.described(Path("layout.yaml"))
    write("layout.yaml", "num_processes: 3\n")
    assert Machine.described(Path("layout.yaml")) == Machine(3, bf16=True)
    with refused("", by=RecipeError):
        choose_layout("", None, use_cpu=True)


# Every check


def by_environment(completions: list, environments: list, **columns: Any) -> list[float]:
    return [0.0 for _ in environments]


def scored_rows(responses: int = 4) -> dict[str, Any]:
    lines = [{"prompt": f"{n}?", "responses": ["a"] * responses, "rewards": [1.0] * responses} for n in range(8)]
    write("scored.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    return {"dataset": {"name": "scored", "path": "scored.jsonl"}, "offline": {"baseline": "group"}, **RECORDED}


RECORDED = {"rewards": ["grpo_recipes.training.offline.recorded_reward"]}
BATCH = {"offline": {"baseline": "batch"}, "num_generations": ...}


def own_rows(name: str, numbers: range, **columns: Any) -> str:
    write(name, "".join(json.dumps({"question": f"{n} + 1?", "answer": str(n + 1), **columns}) + "\n" for n in numbers))
    return name


def overlap() -> dict[str, Any]:
    paths = {"path": own_rows("a.jsonl", range(16)), "eval_path": own_rows("b.jsonl", range(15, 31))}
    return {"dataset": paths, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}


def column_of_one_side() -> dict[str, Any]:
    changes = overlap()
    paths = {"path": own_rows("a.jsonl", range(16), level=1), "eval_path": own_rows("b.jsonl", range(16, 32))}
    return {**changes, "dataset": paths, "rewards": ["tests.grpo_recipes.checks.test_rewards.by_level"]}


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1}
SPLIT_SAVES = {"per_device_train_batch_size": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 1}
CALCULATOR = {"tools": ["grpo_recipes.tools.examples.calculator"], "max_tool_calling_iterations": 1}
ODD = {"reference": "base", "sync_ref_model": True, "beta": 0.1, "use_peft": True}

# Changes of a recipe, the place of the error, and a figure.
REFUSED: list[tuple[Callable[[], dict[str, Any]], str, object]] = [
    (lambda: {"rewards": [{"name": "tag_count", "weight": 0}]}, "`rewards`", 0),
    (lambda: {"rewards": ["gsm8k_corectness"]}, "reward `gsm8k_corectness`", "`gsm8k_correctness`"),
    (lambda: {"dataset": {"name": "gsm8k", "path": "no/such.jsonl"}}, "`dataset.path`: no/such.jsonl", ""),
    (lambda: {"per_device_train_batch_size": 6}, "`per_device_train_batch_size`", 8),
    (lambda: ODD, "`reference`", "`base`"),
    (lambda: {"model_name_or_path": adapter(), "use_peft": True}, "`use_peft`", "`lora_`"),
    (lambda: {"model_name_or_path": write("m/config.json", "[")}, "`model_name_or_path`: m/config.json", ""),
    (lambda: {"offline": {"baseline": "group"}}, "`dataset.name`", "`scored`"),
    (lambda: {**scored_rows(), "offline": ...}, "`dataset.name`", "`offline: group`"),
    (lambda: {**scored_rows(), "sampling": {}}, "`sampling`", "`offline`"),
    (lambda: {**scored_rows(), "use_vllm": True}, "`use_vllm`", "`offline`"),
    (lambda: {**scored_rows(), **EVALUATED}, "`eval_strategy`", "`grpo-recipes evaluate`"),
    (lambda: {**scored_rows(1), **BATCH, "num_generations": 4}, "`num_generations`", "`offline.baseline: batch`"),
    (lambda: scored_rows(3), "`offline.baseline`", "8 of 8"),
    (lambda: {**scored_rows(1), **BATCH, "rewards": ["group_length"]}, "`rewards`: group_length", "baseline: group`"),
    (lambda: {**scored_rows(), "rewards": ["gsm8k_correctness"]}, "`rewards`: gsm8k_correctness", "`answer`"),
    (lambda: {"early_stopping_patience": 2}, "`early_stopping_patience`", "`eval_strategy`"),
    (lambda: {"early_stopping_patience": 0}, "`early_stopping_patience`", 0),
    (lambda: {"use_cpu": False, "bf16": True}, "`bf16`", "`use_cpu: true`"),
    (lambda: {"dtype": "float16"}, "`dtype`", "`dtype: float32`"),
    (lambda: {"use_vllm": True, "vllm_tensor_parallel_size": 2}, "`vllm_tensor_parallel_size`", 2),
    (lambda: {"dataset": {"name": "arithmetic", "size": 1}}, "`dataset`", "1 prompts"),
    (lambda: {**SPLIT_SAVES, "save_strategy": "steps", "save_steps": 3}, "`save_steps`", 3.0),
    (overlap, "`dataset.eval_path`", "b.jsonl, line 1"),
    (lambda: {"rewards": [f"{__name__}.by_environment"], **CALCULATOR}, "`rewards`: by_environment", "`environments`"),
    (column_of_one_side, "`rewards`: by_level", "`level`"),
]


@pytest.mark.parametrize(("changes", "place", "figure"), REFUSED)
def test_a_recipe_that_can_not_run_is_refused(
    changes: Callable[[], dict[str, Any]], place: str, figure: object
) -> None:
    mine = recipe(**changes())
    with refused(f"mine.yaml: {place}", figure, by=RecipeError):
        checks.check(mine, CPU)


ALLOWED: list[Callable[[], dict[str, Any]]] = [
    lambda: {"reference": {"adapter": "org/adapter"}, "use_peft": True},
    lambda: {"reference": "base"},  # a model on the hub may be an adapter
    lambda: {"model_name_or_path": write("m/config.json", CONFIG)},
    lambda: {"model_name_or_path": adapter(base_model_name_or_path=write("base/config.json", CONFIG))},
    lambda: scored_rows(),
    lambda: {**scored_rows(1), **BATCH},
    lambda: {**overlap(), "dataset": {**overlap()["dataset"], "eval_path": own_rows("b.jsonl", range(16, 32))}},
]


@pytest.mark.parametrize("changes", ALLOWED)
def test_a_recipe_that_can_run_is_allowed(changes: Callable[[], dict[str, Any]]) -> None:
    checks.check(recipe(**changes()), CPU)


def check_or_refuse(check: Callable[[Recipe], None], changes: dict[str, Any], place: str) -> None:
    """Expect an error about `place`, or none if it is empty."""
    if not place:
        check(recipe(**changes))
        return
    with refused(place, by=RecipeError):
        check(recipe(**changes))


def test_a_reference_must_fit_the_policy_as_far_as_its_folder_shows() -> None:
    full, policy, other = write("full/config.json", CONFIG), adapter("policy"), adapter("other")
    base, hub = {"reference": "base"}, {"reference": {"adapter": "org/adapter"}}
    new = {"use_peft": True}
    for changes, place in (
        ({"model_name_or_path": full}, ""),
        ({"model_name_or_path": policy}, ""),
        ({"model_name_or_path": full, **new}, ""),
        ({"model_name_or_path": policy, **new}, "`use_peft`"),
        (base, ""),
        (hub, ""),
        ({"model_name_or_path": full, **base}, "`reference`"),
        ({"model_name_or_path": full, **hub}, "`reference`"),
        ({"model_name_or_path": full, **base, **new}, ""),
        ({"model_name_or_path": policy, **base}, ""),
        ({"model_name_or_path": policy, **hub}, ""),
        ({"model_name_or_path": policy, "reference": {"adapter": other}}, ""),
        ({"reference": {"adapter": "./nowhere"}}, "`reference.adapter`"),
        ({"model_name_or_path": policy, "reference": {"adapter": full}}, "`reference.adapter`"),
    ):
        check_or_refuse(checks.check_reference, changes, place)


def test_the_files_beside_the_weights_of_every_folder_are_read() -> None:
    fine, damaged = write("fine/config.json", CONFIG), write("damaged/tokenizer.json", "[")
    write("kind/config.json", {"model_type": 3})
    odd = {"reference": {"adapter": adapter("odd", peft_type=3)}}
    for changes, place in (
        ({}, ""),
        ({"model_name_or_path": adapter("on-fine", base_model_name_or_path=fine)}, ""),
        ({"model_name_or_path": damaged}, "`model_name_or_path`: damaged/tokenizer.json"),
        ({"model_name_or_path": "kind"}, "`model_name_or_path`: kind/config.json"),
        ({"model_name_or_path": adapter("on-damaged", base_model_name_or_path=damaged)}, "damaged/tokenizer.json"),
        ({"model_name_or_path": fine, **odd}, "`reference.adapter`: odd/adapter_config.json"),
    ):
        check_or_refuse(checks.check_model_folders, changes, place)


def test_a_group_that_is_compared_must_lie_on_one_process() -> None:
    two, split = Machine(2, bf16=False), {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    by_group = {"rewards": ["tag_count", "group_length"]}
    for keys, place in ((by_group, "`rewards`: group_length"), (scored_rows(), "`offline`")):
        checks.check(recipe(**keys, gradient_accumulation_steps=1), two)
        with refused(place, 2, 4, by=RecipeError):
            checks.check(recipe(**keys, **split), two)
    # A reward that scores each completion alone may be paid in any layout.
    assert checks.check(recipe(**split), two).geometry.splits_groups


def test_an_environment_alone_may_score() -> None:
    game = {"environment_factory": "grpo_recipes.tools.examples.GuessNumber", "max_tool_calling_iterations": 2}
    game |= {"dataset": {"name": "secret_number", "size": 8}, "max_completion_length": 900}
    for rewards, names in ((..., ["GuessNumber"]), (["tag_count"], ["tag_count", "GuessNumber"])):
        found = checks.check(recipe(rewards=rewards, **game), CPU)
        assert [reward.name for reward in found.all_rewards] == names
    named = checks.check(recipe(), CPU)
    assert named.all_rewards == named.rewards


def test_held_out_rows_are_kept_apart_from_the_training_rows() -> None:
    changes = overlap()
    changes["dataset"]["eval_path"] = own_rows("b.jsonl", range(16, 24))
    found = checks.check(recipe(**changes), CPU)
    assert found.eval_dataset is not None
    assert (len(found.train_dataset), len(found.eval_dataset)) == (16, 8)
    assert checks.check(recipe(**{**changes, "eval_strategy": "no"}), CPU).eval_dataset is None


# Before a launch


LAUNCHES: list[tuple[Callable[[], dict[str, Any]], str, object]] = [
    (lambda: {"output_dir": write("run/run.json", {})}, "`output_dir`: run", "`resume_from_checkpoint: true`"),
    (lambda: {"model_name_or_path": "./nowhere"}, "`model_name_or_path`: ./nowhere", ""),
    (lambda: {"resume_from_checkpoint": "run/checkpoint-9"}, "`resume_from_checkpoint`", "checkpoint-9"),
    (lambda: {"report_to": "trackio"}, "`report_to: trackio`", "trackio"),
    (lambda: {"load_in_4bit": True, "use_peft": True}, "`load_in_4bit`", "bitsandbytes"),
    (lambda: {**EVALUATED, "load_best_model_at_end": True, "save_strategy": "epoch"}, "mine.yaml", "load_best_model"),
    (lambda: {"rewards": [{"name": "tag_count", "weight": 0}]}, "`rewards`", 0),
]


@pytest.mark.parametrize(("changes", "place", "figure"), LAUNCHES)
def test_a_launch_that_would_fail_is_refused(
    changes: Callable[[], dict[str, Any]], place: str, figure: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("bitsandbytes", "trackio"):
        monkeypatch.setitem(sys.modules, package, None)
    with refused(place, figure, by=RecipeError):
        checks.check_launch(recipe(**changes()), CPU)


def test_a_launch_that_can_run_is_allowed() -> None:
    checks.check_launch(recipe(report_to="none"), CPU)


def test_the_policy_must_be_a_folder_with_a_model_or_on_the_hub() -> None:
    file, weights = write("m/config.json", CONFIG) + "/config.json", write("empty/model.safetensors", "")
    for path in (file, weights, "./nowhere", "m", adapter(), "org/model"):
        is_refused = path in (file, weights, "./nowhere")
        place = f"`model_name_or_path`: {path}" if is_refused else ""
        check_or_refuse(checks.check_model_exists, {"model_name_or_path": path}, place)


def test_the_positions_of_an_adapter_are_those_of_its_base() -> None:
    base = write("base/config.json", CONFIG)
    assert checks.model_positions(recipe(model_name_or_path=base)) == 64
    assert checks.model_positions(recipe(model_name_or_path=adapter(base_model_name_or_path=base))) == 64
    assert checks.model_positions(recipe(model_name_or_path=adapter())) is None


# Output folder


def test_the_folder_of_a_launch_that_failed_at_once_is_free() -> None:
    for name in ("fault-rank0.json", "_run.lock", "evaluations/before/evaluation.json", "completions/fault-rank1.json"):
        write(f"run/{name}", "{}")
    checks.check_output_dir(recipe())
    for name in ("notes/evaluations/x.json", "evaluations.txt", "fault.json"):
        write(f"run/{name}", "{}")
        with refused("`output_dir`: run", by=RecipeError):
            checks.check_output_dir(recipe())
        checks.check_output_dir(recipe(resume_from_checkpoint="true"))
        checks.check_output_dir(recipe(output_dir="other"))
        (Path("run") / name).unlink()


def test_a_folder_that_can_not_be_written_is_noticed_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems notice a full disk only when the test file is written through (docs/scaling.md: its size)."""
    text = " ".join((ROOT / "docs" / "scaling.md").read_text().split())
    assert "1 MiB" in text
    written: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda number: written.append(os.fstat(number).st_size))
    for folder in ("a/b/run", "run"):
        checks.check_output_dir(recipe(output_dir=folder))
    assert written == [2**20] * 2
    assert not Path("a").exists()

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with refused("`output_dir`: run", "No space left on device", by=RecipeError):
        checks.check_output_dir(recipe())
    write("file", "")
    with refused("`output_dir`: file/run", "(file:", by=RecipeError):
        checks.check_output_dir(recipe(output_dir="file/run"))


# TRL's arguments


def test_trl_loads_the_model_with_the_keys_of_the_recipe() -> None:
    keys = {"model_revision": "v2", "attn_implementation": "eager", "dtype": "bfloat16"}
    made = checks.grpo_config(recipe(**keys, resume_from_checkpoint="false"))
    given = {"revision": "v2", "attn_implementation": "eager", "dtype": "bfloat16"}
    assert (made.model_init_kwargs, made.resume_from_checkpoint) == (given, None)
    more = checks.grpo_config(recipe(**keys, model_init_kwargs={"revision": "v3", "x": 1}))
    assert more.model_init_kwargs == {**given, "revision": "v3", "x": 1}
    assert checks.grpo_config(recipe(resume_from_checkpoint="true")).resume_from_checkpoint == "true"


def test_one_response_of_each_prompt_is_compared_with_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = recipe(**{**scored_rows(1), **BATCH}, gradient_accumulation_steps=2)
    made = checks.grpo_config(mine)
    assert made.num_generations == made.generation_batch_size == 16
    assert checks.grpo_config(recipe()).num_generations == 4
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(checks, "GRPOConfig", SimpleNamespace)  # TRL's own would wait for the other process
    assert checks.grpo_config(mine).num_generations == 32


def test_trl_is_asked_about_the_batches_of_all_processes_of_another_machine() -> None:
    halves = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "num_generations": 4}
    held_out = {**halves, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2}
    for changes in (halves, held_out):
        checks.dry_config(recipe(**changes), Machine(2, bf16=True))
        checks.dry_config(recipe(**{**changes, "use_cpu": False, "bf16": True}), Machine(2, bf16=True))
        with refused("", "mine.yaml", by=RecipeError):
            checks.dry_config(recipe(**changes), CPU)
    with refused("", "mine.yaml", by=RecipeError):
        checks.dry_config(recipe(**{**held_out, "per_device_eval_batch_size": 3}), Machine(2, bf16=True))


def test_the_optimizer_of_a_script_may_be_a_member_of_an_enumeration() -> None:
    config = SimpleNamespace(optim=transformers.training_args.OptimizerNames.SGD)
    mine = SimpleNamespace(training={}, model={}, config=config)
    assert checks.optimizer_name(mine, CPU) == "sgd"  # type: ignore[arg-type]
