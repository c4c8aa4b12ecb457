"""Checks of a recipe as a whole: what a command refuses before a model is loaded, and what must stay allowed."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers.utils
import yaml

from grpo_recipes.checks import checks, packages
from grpo_recipes.checks.checks import Machine
from grpo_recipes.checks.geometry import Geometry
from grpo_recipes.recipe.recipe import Recipe, RecipeError, parse_recipe
from grpo_rewards.errors import UserError
from grpo_rewards.registry import build_rewards

ROOT = Path(__file__).parents[3]
CPU = Machine(1, bf16=False)
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "nowhere/base", "target_modules": ["q_proj"]}
CONFIG = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 64}


@pytest.fixture(autouse=True)
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def recipe(**changes: Any) -> Recipe:
    """Return a recipe on a model that is not on this machine. `...` removes a key."""
    values = {
        "model_name_or_path": "nowhere/model",
        "dataset": {"name": "arithmetic", "size": 16},
        "rewards": ["gsm8k_correctness"],
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "use_cpu": True,
        "bf16": False,
        "output_dir": "run",
        **changes,
    }
    Path("mine.yaml").write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not ...}))
    return parse_recipe(["--config", "mine.yaml"])


def write(path: str, content: Any) -> str:
    """Write JSON, or a text as it is, and return the folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(content if isinstance(content, str) else json.dumps(content))
    return str(Path(path).parent)


def adapter(folder: str = "adapter", **changes: Any) -> str:
    return write(f"{folder}/adapter_config.json", {**ADAPTER, **changes})


# Machines and layouts


def test_a_machine_has_at_least_one_process() -> None:
    with pytest.raises(UserError, match="`num_processes` is 0"):
        Machine(0, bf16=False)
    for number in (0, -1):
        with pytest.raises(UserError, match=f"`num_processes` is {number}"):
            checks.choose_layout(None, number, use_cpu=True)


@pytest.mark.parametrize(("gpu", "xla"), [(False, False), (True, False), (False, True)])
def test_a_gpu_or_an_xla_device_computes_in_bfloat16(gpu: bool, xla: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.utils, "is_torch_bf16_gpu_available", lambda: gpu)
    monkeypatch.setattr(transformers.utils, "is_torch_xla_available", lambda: xla)
    for switch in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"):
        monkeypatch.setenv(switch, "false")
    assert Machine.here() == Machine(1, gpu or xla, "torch")


def test_a_configuration_of_accelerate_needs_a_number_of_processes() -> None:
    write("layout.yaml", "use_cpu: true\n")
    with pytest.raises(RecipeError, match="layout.yaml as an accelerate configuration: .*num_processes"):
        Machine.described(Path("layout.yaml"))
    write("layout.yaml", "num_processes: 0\n")
    with pytest.raises(RecipeError, match="layout.yaml as an accelerate configuration: `num_processes` is 0"):
        Machine.described(Path("layout.yaml"))
    write("layout.yaml", "num_processes: 3\n")
    assert Machine.described(Path("layout.yaml")) == Machine(3, bf16=True)
    with pytest.raises(UserError):
        checks.choose_layout("", None, use_cpu=True)


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


REFUSED: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"rewards": [{"name": "tag_count", "weight": 0}]}, "all weights are 0"),
    (lambda: {"reference": "base", "sync_ref_model": True, "beta": 0.1, "use_peft": True}, "`reference: base` is the"),
    (lambda: {"reference": {"adapter": "./nowhere"}, "use_peft": True}, "no such folder with an adapter_config.json"),
    (lambda: {"model_name_or_path": adapter(), "use_peft": True}, "`use_peft` asks for a new adapter, and"),
    (lambda: {"model_name_or_path": write("m/config.json", CONFIG), "reference": "base"}, "needs a policy with an ad"),
    (lambda: {"model_name_or_path": write("m/config.json", "[")}, "`model_name_or_path`: m/config.json"),
    (lambda: {"model_name_or_path": write("m/tokenizer.json", "[")}, "m/tokenizer.json"),
    (lambda: {"model_name_or_path": write("m/config.json", {"model_type": 3})}, "m/config.json.*model_type"),
    (
        lambda: {"reference": {"adapter": adapter(peft_type=3)}, "use_peft": True},
        "`reference.adapter`: adapter/adapter_config.json",
    ),
    (
        lambda: {"model_name_or_path": adapter(base_model_name_or_path=write("base/tokenizer.json", "["))},
        "base/tokenizer.json",
    ),
    (
        lambda: {"model_name_or_path": adapter(base_model_name_or_path=write("base/config.json", "["))},
        "base/config.json",
    ),
    (lambda: {"offline": {"baseline": "group"}}, "set both, or neither"),
    (lambda: {**scored_rows(), "offline": ...}, "set both, or neither"),
    (lambda: {**scored_rows(), "sampling": {}}, "`sampling` generates completions, .*: remove it$"),
    (lambda: {**scored_rows(), "use_vllm": True}, "`use_vllm` generates completions, .*: remove it$"),
    (
        lambda: {**scored_rows(), "eval_strategy": "steps", "eval_steps": 1},
        "`eval_strategy` generates completions, .*: remove it, and run `grpo-recipes evaluate` afterwards",
    ),
    (lambda: {**scored_rows(), **BATCH, "num_generations": 4}, "takes one response a prompt: remove `num_generations`"),
    (lambda: scored_rows(3), "compares 4 responses to one prompt, and 8 of 8 prompts have fewer"),
    (lambda: {**scored_rows(1), **BATCH, "rewards": ["group_length"]}, "group_length compares the completions of a gr"),
    (lambda: {**scored_rows(), "rewards": ["gsm8k_correctness"]}, "needs the column `answer`"),
    (lambda: {"early_stopping_patience": 2}, "`early_stopping_patience` compares evaluations"),
    (lambda: {"early_stopping_patience": 0}, "`early_stopping_patience` is 0"),
    (lambda: {"use_cpu": False, "bf16": True}, "`bf16` needs a GPU"),
    (lambda: {"dtype": "float16"}, "float16 can't be trained"),
    (lambda: {"use_vllm": True, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 2}, "does not divide the 1 proc"),
    (lambda: {"dataset": {"name": "arithmetic", "size": 1}}, "has 1 prompts and one generation needs 2"),
    (
        lambda: {
            "per_device_train_batch_size": 2,
            "steps_per_generation": 4,
            "gradient_accumulation_steps": 1,
            "save_strategy": "steps",
            "save_steps": 3,
        },
        "`save_steps` 3.0 saves inside a generation",
    ),
    (overlap, r"1 of 16 held-out rows are training rows too \(b.jsonl, line 1 is the first\)"),
    (
        lambda: {
            "rewards": ["tests.grpo_recipes.checks.test_checks.by_environment"],
            "tools": ["grpo_recipes.tools.examples.calculator"],
            "max_tool_calling_iterations": 1,
        },
        "by_environment needs the column `environments`",
    ),
    (column_of_one_side, "by_level needs the column `level`"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_a_recipe_that_can_not_run_is_refused(changes: Callable[[], dict[str, Any]], message: str) -> None:
    mine = recipe(**changes())
    with pytest.raises(RecipeError, match=f"^mine.yaml: .*{message}"):
        checks.check(mine, CPU)


ALLOWED: list[Callable[[], dict[str, Any]]] = [
    lambda: {"reference": {"adapter": "org/adapter"}, "use_peft": True},
    lambda: {"reference": {"adapter": adapter("reference")}, "use_peft": True},
    lambda: {"reference": "base"},  # a model on the hub may be an adapter
    lambda: {"reference": "base", "model_name_or_path": adapter()},
    lambda: {"reference": "base", "model_name_or_path": write("m/config.json", CONFIG), "use_peft": True},
    lambda: {"model_name_or_path": write("m/config.json", CONFIG)},
    lambda: {"model_name_or_path": adapter(base_model_name_or_path=write("base/config.json", CONFIG))},
    lambda: scored_rows(),
    lambda: {**scored_rows(1), **BATCH},
    lambda: {**overlap(), "dataset": {**overlap()["dataset"], "eval_path": own_rows("b.jsonl", range(16, 32))}},
]


@pytest.mark.parametrize("changes", ALLOWED)
def test_a_recipe_that_can_run_is_allowed(changes: Callable[[], dict[str, Any]]) -> None:
    checks.check(recipe(**changes()), CPU)


def sentence(check: Callable[..., None], *given: Any) -> str:
    """Return the error of a check, or "" if there is none."""
    try:
        check(*given)
    except UserError as error:
        return str(error)
    return ""


def test_a_reference_must_fit_the_policy_as_far_as_its_folder_shows() -> None:
    full, policy, other = write("full/config.json", CONFIG), adapter("policy"), adapter("other")
    base, hub = {"reference": "base"}, {"reference": {"adapter": "org/adapter"}}
    missing, no_adapter = {"reference": {"adapter": "./nowhere"}}, {"reference": {"adapter": full}}
    new = {"use_peft": True}
    needs = "needs a policy with an adapter"
    for changes, words in (
        ({}, ""),
        ({"model_name_or_path": full}, ""),
        ({"model_name_or_path": policy}, ""),
        ({"model_name_or_path": policy, "use_peft": False}, ""),
        (new, ""),
        ({"model_name_or_path": full, **new}, ""),
        ({"model_name_or_path": policy, **new}, "asks for a new adapter"),
        (base, ""),
        (hub, ""),
        ({"model_name_or_path": full, **base}, needs),
        ({"model_name_or_path": full, **hub}, needs),
        ({"model_name_or_path": full, **base, **new}, ""),
        ({"model_name_or_path": policy, **base}, ""),
        ({"model_name_or_path": policy, **hub}, ""),
        ({"model_name_or_path": policy, "reference": {"adapter": other}}, ""),
        (missing, "no such folder with an adapter_config.json"),
        (no_adapter, "no such folder with an adapter_config.json"),
        ({"model_name_or_path": policy, **no_adapter}, "no such folder with an adapter_config.json"),
    ):
        found = sentence(checks.check_reference, recipe(**changes))
        assert words in found if words else not found, changes


def test_keys_that_generate_do_not_go_with_recorded_responses() -> None:
    recorded, one = scored_rows(), {**scored_rows(1), **BATCH}
    for changes, words in (
        ({}, ""),
        (recorded, ""),
        (one, ""),
        ({**recorded, "offline": ...}, "set both, or neither"),
        ({"offline": {"baseline": "group"}}, "set both, or neither"),
        ({**recorded, "num_generations": 4}, ""),
        ({**one, "num_generations": 4}, "takes one response a prompt: remove `num_generations`"),
        ({**recorded, "sampling": {}}, "`sampling` generates completions"),
        ({**recorded, "use_vllm": True}, "`use_vllm` generates completions"),
        ({**recorded, "eval_strategy": "steps"}, "`eval_strategy` generates completions"),
        ({"sampling": {}, "use_vllm": True, "eval_strategy": "steps", "num_generations": 4}, ""),
    ):
        found = sentence(checks._check_offline, recipe(**changes))
        assert words in found if words else not found, changes


def test_rewards_that_compare_a_group_need_it_whole() -> None:
    plain, comparing, recorded = ["tag_count"], ["tag_count", "group_length"], scored_rows()
    whole, split, single = Geometry(2, 4, 1, 1, 4, 1), Geometry(2, 2, 1, 1, 4, 1), Geometry(1, 4, 1, 1, 1, 1)
    for changes, names, geometry, words in (
        ({}, plain, whole, ""),
        ({}, plain, split, ""),
        ({}, plain, single, ""),
        ({}, comparing, whole, ""),
        ({}, comparing, split, "`rewards`: group_length compares the completions of a group, and this layout splits"),
        ({}, comparing, single, "`rewards`: group_length compares the completions of a group, and `offline.baseline"),
        (recorded, plain, whole, ""),
        (recorded, plain, split, "`offline` compares the completions of a group, and this layout splits groups"),
        (recorded, comparing, split, "`rewards`: group_length compares the completions of a group, and this layout"),
        (recorded, plain, single, ""),
    ):
        rewards = build_rewards(names, num_generations=geometry.num_generations)
        found = sentence(checks._check_groups, recipe(**changes), geometry, rewards)
        assert words in found if words else not found, (changes, names, geometry)


def test_the_files_beside_the_weights_of_every_folder_are_read() -> None:
    fine, damaged = write("fine/config.json", CONFIG), write("damaged/tokenizer.json", "[")
    write("kind/config.json", {"model_type": 3})
    for changes, words in (
        ({}, ""),
        ({"model_name_or_path": fine}, ""),
        ({"model_name_or_path": adapter("on-hub")}, ""),
        ({"model_name_or_path": adapter("on-fine", base_model_name_or_path=fine)}, ""),
        ({"model_name_or_path": damaged}, "`model_name_or_path`: damaged/tokenizer.json"),
        ({"model_name_or_path": "kind"}, "`model_name_or_path`: kind/config.json"),
        ({"model_name_or_path": adapter("on-damaged", base_model_name_or_path=damaged)}, "damaged/tokenizer.json"),
        ({"model_name_or_path": adapter("on-kind", base_model_name_or_path="kind")}, "kind/config.json"),
        ({"reference": {"adapter": adapter("odd", peft_type=3)}}, "`reference.adapter`: odd/adapter_config.json"),
        (
            {"model_name_or_path": fine, "reference": {"adapter": adapter("odd", peft_type=3)}},
            "`reference.adapter`: odd/adapter_config.json",
        ),
    ):
        found = sentence(checks.check_model_folders, recipe(**changes))
        assert words in found if words else not found, changes


def test_offline_responses_of_a_group_must_lie_on_one_process() -> None:
    checks.check(recipe(**scored_rows(), gradient_accumulation_steps=1), Machine(2, bf16=False))
    split = recipe(**scored_rows(), per_device_train_batch_size=2, gradient_accumulation_steps=1)
    with pytest.raises(RecipeError, match="`offline` compares the completions of a group, and this layout splits grou"):
        checks.check(split, Machine(2, bf16=False))


def test_rewards_that_score_each_completion_alone_may_be_paid_in_any_layout() -> None:
    split = recipe(per_device_train_batch_size=2, gradient_accumulation_steps=1)
    assert checks.check(split, Machine(2, bf16=False)).geometry.splits_groups


def test_the_hub_is_not_asked_about_a_model_before_its_tokenizer_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def adapter_config(name: str) -> Any:
        pytest.fail(f"{name} is looked up")

    monkeypatch.setattr(checks, "adapter_config", adapter_config)
    mine = recipe(reference={"adapter": "org/adapter"}, use_peft=True)
    checks.check_model_folders(mine)
    assert checks.model_positions(mine) is None


def test_an_environment_alone_may_score() -> None:
    factory = "grpo_recipes.tools.examples.GuessNumber"
    turns = {"max_tool_calling_iterations": 2, "max_completion_length": 900}
    found = checks.check(
        recipe(rewards=..., dataset={"name": "secret_number", "size": 8}, environment_factory=factory, **turns), CPU
    )
    assert [reward.name for reward in found.all_rewards] == ["GuessNumber"]
    both = recipe(
        rewards=["tag_count"], dataset={"name": "secret_number", "size": 8}, environment_factory=factory, **turns
    )
    assert [reward.name for reward in checks.check(both, CPU).all_rewards] == ["tag_count", "GuessNumber"]
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


LAUNCHES: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"output_dir": write("run/run.json", {})}, "`output_dir` run already holds files"),
    (lambda: {"model_name_or_path": "./nowhere"}, "there is no such folder"),
    (
        lambda: {"output_dir": write("run/run.json", {}), "resume_from_checkpoint": "run/checkpoint-9"},
        "`resume_from_checkpoint`: .*checkpoint-9",
    ),
    (lambda: {"report_to": "trackio"}, "needs the package trackio"),
    (lambda: {"load_in_4bit": True, "use_peft": True}, "`load_in_4bit` needs the package bitsandbytes"),
    (lambda: {"eval_strategy": "steps", "load_best_model_at_end": True, "save_strategy": "epoch"}, "load_best_model"),
    (lambda: {"rewards": [{"name": "tag_count", "weight": 0}]}, "all weights are 0"),
]


@pytest.mark.parametrize(("changes", "message"), LAUNCHES, ids=[message[:40] for _, message in LAUNCHES])
def test_a_launch_that_would_fail_is_refused(
    changes: Callable[[], dict[str, Any]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "find_spec", lambda module: None)
    with pytest.raises(RecipeError, match=message):
        checks.check_launch(recipe(**changes()), CPU)


def test_a_launch_that_can_run_is_allowed() -> None:
    checks.check_launch(recipe(report_to="none"), CPU)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (lambda: write("m/config.json", CONFIG) + "/config.json", r"m/config.json holds no model \(no config.json"),
        (lambda: write("m/model.safetensors", ""), r"m holds no model \(no config.json, no adapter_config.json\)"),
        (lambda: "./nowhere", r"./nowhere: there is no such folder \(relative to .*\): correct the path"),
        (lambda: write("m/config.json", CONFIG), ""),
        (lambda: adapter(), ""),
        (lambda: "org/model", ""),
    ],
)
def test_the_policy_must_be_a_folder_with_a_model_or_on_the_hub(name: Callable[[], str], message: str) -> None:
    mine = recipe(model_name_or_path=name())
    if not message:
        checks.check_model_exists(mine)
        return
    with pytest.raises(RecipeError, match=f"`model_name_or_path` {message}"):
        checks.check_model_exists(mine)


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
        with pytest.raises(RecipeError, match="already holds files"):
            checks.check_output_dir(recipe())
        checks.check_output_dir(recipe(resume_from_checkpoint="true"))
        checks.check_output_dir(recipe(output_dir="other"))
        (Path("run") / name).unlink()


class Probe:
    """Temporary file that notes what is done with it."""

    def __init__(self, done: list[Any], folder: Path) -> None:
        self.done = [*done, folder]
        self.notes = done

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def write(self, content: bytes) -> None:
        self.notes.append(len(content))

    def flush(self) -> None:
        self.notes.append("flush")

    def fileno(self) -> int:
        return 3


def test_a_file_is_written_through_to_the_nearest_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk may be noticed at the last step only. The documentation gives the size."""
    text = " ".join((ROOT / "docs" / "scaling.md").read_text().split())
    assert "a file of 1 MiB is written into `output_dir` as a test" in text
    notes: list[Any] = []
    monkeypatch.setattr(checks.tempfile, "TemporaryFile", lambda dir: notes.append(dir.resolve()) or Probe(notes, dir))
    monkeypatch.setattr(os, "fsync", lambda number: notes.append(("fsync", number)))
    checks.check_output_dir(recipe(output_dir="a/b/run"))
    assert notes == [Path.cwd(), 2**20, "flush", ("fsync", 3)]
    (Path("a") / "b").mkdir(parents=True)
    checks.check_output_dir(recipe(output_dir="a/b/run"))
    assert notes[4] == Path.cwd() / "a" / "b"

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecipeError, match=r"`output_dir` run can't be written \(\.: No space left on device\): make"):
        checks.check_output_dir(recipe())


@pytest.mark.parametrize(
    ("error", "reason"), [(OSError(30, "Read-only file system"), "Read-only file system"), (OSError("odd"), "odd")]
)
def test_a_folder_that_can_not_be_written_is_refused_with_the_reason(
    error: OSError, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def temporary(dir: Path) -> Any:
        raise error

    monkeypatch.setattr(checks.tempfile, "TemporaryFile", temporary)
    with pytest.raises(RecipeError, match=rf"`output_dir` run can't be written \(\.: {reason}\): make room or"):
        checks.check_output_dir(recipe())
    write("file", "")
    with pytest.raises(RecipeError, match=r"`output_dir` file/run can't be written \(file: it is no folder\): make"):
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
        with pytest.raises(RecipeError, match="mine.yaml"):
            checks.dry_config(recipe(**changes), CPU)
    with pytest.raises(RecipeError, match="mine.yaml"):
        checks.dry_config(recipe(**{**held_out, "per_device_eval_batch_size": 3}), Machine(2, bf16=True))


def test_the_optimizer_of_a_script_may_be_a_member_of_an_enumeration() -> None:
    mine = SimpleNamespace(
        training={}, model={}, config=SimpleNamespace(optim=transformers.training_args.OptimizerNames.SGD)
    )
    assert checks.optimizer_name(mine, CPU) == "sgd"  # type: ignore[arg-type]


def test_what_trl_refuses_names_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (TypeError("two types"), ValueError("a value")):

        def refuses(error: Exception = error, **keys: Any) -> Any:
            raise error

        monkeypatch.setattr(checks, "GRPOConfig", refuses)
        with pytest.raises(RecipeError, match=f"^mine.yaml: {error}$"):
            checks.grpo_config(recipe())


def test_only_warnings_about_trls_own_use_of_transformers_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def grpo_config(recipe: Recipe) -> None:
        warnings.warn("transformers will change", FutureWarning, stacklevel=1)
        warnings.warn(f"a value of {recipe.source}", UserWarning, stacklevel=1)

    monkeypatch.setattr(checks, "grpo_config", grpo_config)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        checks.dry_config(recipe(), CPU)
    assert [str(warning.message) for warning in seen] == ["a value of mine.yaml"]
