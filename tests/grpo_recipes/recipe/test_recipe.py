"""Recipes: reading them from files and the command line, resolving them, and naming mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from trl import GRPOConfig, ModelConfig

from grpo_recipes import GRPOTrainer
from grpo_recipes.checks.checks import Machine, grpo_config, resume_point
from grpo_recipes.checks.geometry import geometry_of
from grpo_recipes.recipe import specs
from grpo_recipes.recipe.dataset import DatasetSpec
from grpo_recipes.recipe.recipe import (
    Recipe,
    RecipeError,
    find_file,
    model_config,
    parse_recipe,
    resolved,
    shipped,
    shipped_files,
)
from grpo_recipes.recipe.specs import MicroBatching
from grpo_rewards.redaction import HIDDEN
from tests.support.errors import refused
from tests.support.recipes import MINIMAL, read_recipe

CPU = Machine(num_processes=1, bf16=False)


RUNS = {"per_device_train_batch_size": 16, "use_cpu": True, "bf16": False}
TOOLS: dict[str, Any] = {"tools": ["grpo_recipes.tools.examples.calculator"], "max_tool_calling_iterations": 2}
SCORED = {"name": "scored", "path": "rows.jsonl"}

Write = Callable[..., Recipe]


@pytest.fixture
def recipe(tmp_path: Path) -> Write:
    """Return a function that reads a recipe with some keys (`...` removes one), after some arguments."""
    return partial(read_recipe, tmp_path)


# Precedence and words


def test_the_command_line_wins_over_the_file_the_file_over_ours_and_ours_over_trls(recipe: Write) -> None:
    trls = GRPOConfig.__dataclass_fields__
    assert recipe().config.disable_dropout is True
    assert trls["disable_dropout"].default is not True
    assert recipe(disable_dropout=False).config.disable_dropout is False
    assert recipe("--disable_dropout", "true", disable_dropout=False).config.disable_dropout is True
    assert recipe().config.temperature == trls["temperature"].default
    assert recipe(temperature=0.5).config.temperature == 0.5
    assert recipe("--temperature", "0.25", temperature=0.5).config.temperature == 0.25
    assert recipe("--num-generations=4", "--no_gradient_checkpointing").training["gradient_checkpointing"] is False
    own = recipe(temperature=0.5, generation_check=False).as_dict()
    assert resolved(own)["temperature"] == own["temperature"] == 0.5
    assert own["generation_check"] is False, "a value that is false is no default"
    assert resolved(own)["top_p"] == trls["top_p"].default


def test_values_of_yaml_become_the_types_of_their_keys(recipe: Write, tmp_path: Path) -> None:
    recipe()
    file = tmp_path / "mine.yaml"
    more = (
        "learning_rate: 5e-6\nmax_steps: 3.0\nrun_name: 7\neval_strategy: no\nscale_rewards: false\ngeneration: off\n"
    )
    file.write_text(file.read_text() + more)
    made = parse_recipe(["--config", str(file)])
    assert (made.training["learning_rate"], made.training["max_steps"], made.training["run_name"]) == (5e-6, 3, "7")
    assert isinstance(made.training["max_steps"], int)
    assert not made.evaluates
    assert (made.training["scale_rewards"], made.generation, made.as_dict()["generation"]) == ("none", "off", "off")


def test_a_run_has_a_folder_of_its_recipes_name_unless_it_names_one(recipe: Write) -> None:
    assert recipe().output_dir == Path("runs/mine")
    assert recipe(output_dir="there").output_dir == Path("there")
    assert recipe("--output_dir", "here", output_dir="there").output_dir == Path("here")


def test_a_resume_can_be_switched_off_on_the_command_line(recipe: Write) -> None:
    for value, resumes in (("false", False), ("true", True), ("a/checkpoint-3", True)):
        assert recipe("--resume_from_checkpoint", value, resume_from_checkpoint="true").resumes is resumes
    assert not recipe().resumes


def test_nested_keys_of_the_command_line_replace_one_entry(recipe: Write) -> None:
    two = [{"name": "gsm8k_correctness", "weight": 3.0}, "tag_presence"]
    keys: dict[str, Any] = {"rewards": two, "dataset": {"name": "gsm8k", "path": "a", "max_prompt_tokens": 7}}
    changed = recipe(
        "--dataset.max-prompt-tokens", "5", "--rewards.1.weight=2", "--dataset.system_prompt=a=b c", **keys
    )
    assert (changed.dataset.max_prompt_tokens, changed.dataset.path, changed.dataset.name) == (5, "a", "gsm8k")
    assert changed.dataset.system_prompt == "a=b c"
    assert changed.rewards == [two[0], {"name": "tag_presence", "weight": 2}]
    assert recipe("--dataset.size", "9", dataset="arithmetic").dataset == DatasetSpec(name="arithmetic", size=9)
    off = recipe("--micro_batching.skip_zero_advantage", "true", micro_batching="off").micro_batching
    assert off == MicroBatching(), "the key replaces the word, and not one field of what it stands for"
    assert recipe("--micro-batching", "off", micro_batching="auto").micro_batching == MicroBatching("padded")
    assert recipe("--generation=auto", generation="off").generation == "auto"


def test_a_value_of_the_command_line_is_yaml_or_a_text(recipe: Write) -> None:
    for text in ("a: b: c", "[x", "{{ question }}", "- a\n b: c: d"):
        assert recipe("--dataset.prompt_template", text).dataset.prompt_template == text
    assert recipe("--dataset.seed", "-3").dataset.seed == -3
    assert recipe("--dataset.system_prompt=--x-- y").dataset.system_prompt == "--x-- y"
    assert recipe("--rewards.0", "tag_count").rewards == ["tag_count"]


def test_values_of_python_reach_a_recipe_as_they_are(recipe: Write, tmp_path: Path) -> None:
    recipe(sampling="informative")
    loaded = Recipe.load(tmp_path / "mine.yaml", sampling=None, rewards=["tag_presence"], max_steps=3)
    assert (loaded.sampling, loaded.rewards, loaded.config.max_steps) == (None, ["tag_presence"], 3)


def test_one_reward_may_be_written_without_a_list(recipe: Write) -> None:
    alone = {"name": "tag_presence", "weight": 2}
    assert recipe(rewards="tag_presence").rewards == ["tag_presence"]
    assert recipe(rewards=alone).rewards == [alone]
    for weights in ([1.0], []):
        with refused("mine.yaml: `reward_weights`", "`weight`", by=RecipeError):
            recipe(reward_weights=weights)


def test_an_environment_may_be_the_only_source_of_rewards(recipe: Write) -> None:
    keys = {"environment_factory": "tests.support.launching.variety", "max_tool_calling_iterations": 2}
    assert recipe(**keys).rewards == ["gsm8k_correctness"]
    assert recipe(**keys, rewards=None).rewards == []
    with refused("`rewards`", "`--rewards`"):
        recipe(rewards=None)


def test_tools_have_limits_and_limits_have_tools(recipe: Write) -> None:
    assert recipe(**TOOLS).tool_limits == specs.ToolLimits()
    assert recipe(**TOOLS, tool_limits={"seconds": 2}).tool_limits == specs.ToolLimits(seconds=2.0)
    assert recipe().tool_limits is None
    for place, keys in (
        ("`tool_limits.seconds`", {**TOOLS, "tool_limits": ""}),
        ("`tool_limits`", {"tool_limits": {}}),
        ("`max_tool_calling_iterations`", {"max_tool_calling_iterations": 2}),
        ("`max_tool_calling_iterations`", {"tools": TOOLS["tools"]}),
        ("`offline`", {**TOOLS, "offline": "group", "dataset": SCORED}),
    ):
        with refused(place, by=RecipeError):
            recipe(**keys)


def test_a_recipe_knows_if_it_uses_tools_evaluates_or_compares_whole_batches(recipe: Write) -> None:
    game = {"environment_factory": "a.b", "max_tool_calling_iterations": 1}
    for keys, known in (
        ({}, (False, False, False)),
        (TOOLS, (True, False, False)),
        (game, (True, False, False)),
        ({"tools": [], "eval_strategy": "steps"}, (False, True, False)),
        ({"offline": "batch", "dataset": SCORED}, (False, False, True)),
        ({"offline": "group", "dataset": SCORED}, (False, False, False)),
    ):
        made = recipe(**keys)
        assert (made.uses_tools, made.evaluates, made.compares_whole_batch) == known


def test_a_recipe_becomes_trls_configuration(recipe: Write) -> None:
    keys = {"learning_rate": "1e-5", "lora_r": 4, "use_peft": True, "lora_target_modules": "all-linear"}
    made = recipe(**keys, **RUNS, dtype="bfloat16", output_dir="run")
    args, model = grpo_config(made), model_config(made)
    assert isinstance(args, GRPOConfig)
    assert isinstance(model, ModelConfig)
    assert (args.learning_rate, model.lora_r, model.lora_target_modules) == (1e-5, 4, "all-linear")
    assert (args.model_init_kwargs["dtype"], args.output_dir) == ("bfloat16", "run")


def test_a_resolved_recipe_can_be_loaded_again(recipe: Write, tmp_path: Path) -> None:
    first = recipe("--dataset.size", "32", "--loss_type", "grpo", learning_rate="1e-5")
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(first.as_dict()))
    assert parse_recipe(["--config", str(again)]).as_dict() == first.as_dict()


def test_a_recorded_run_is_a_recipe_without_its_resume_and_its_secrets(tmp_path: Path) -> None:
    init = {"token": HIDDEN, "revision": "v2"}
    recorded = {**MINIMAL, "resume_from_checkpoint": "true", "hub_token": HIDDEN, "model_init_kwargs": init}
    launches = [{"recipe": {**MINIMAL, "beta": 0.5}}, {"recipe": recorded}]
    (tmp_path / "run.json").write_text(json.dumps({**launches[-1], "launches": launches}))
    again = parse_recipe(["--config", str(tmp_path / "run.json")])
    assert not again.resumes
    assert again.config.beta != 0.5
    assert again.config.hub_token is None
    assert again.training["model_init_kwargs"] == {"revision": "v2"}


# Files and names


def test_a_name_is_a_file_first_and_a_shipped_recipe_only_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    quickstart = shipped("recipes", "quickstart")
    (tmp_path / "quickstart").mkdir()
    assert find_file("recipes", "quickstart") == find_file("recipes", "quickstart.yaml") == quickstart
    (tmp_path / "quickstart.yaml").write_text("beta: 1")
    assert find_file("recipes", "quickstart.yaml") == Path("quickstart.yaml")
    for name, figure in (
        ("elsewhere/quickstart", f"(relative to {tmp_path})"),
        ("quickstrt.yaml", "`quickstart`"),
        (f"{tmp_path}/x", "recipes/"),
    ):
        with refused(name, figure, by=RecipeError):
            find_file("recipes", name)
    assert shipped("recipes", "no-such") is None
    folders = [file.parent.name for file in shipped_files("recipes").values()]
    assert folders == sorted(folders, key="recipes".__ne__), "those of inner folders come last"
    assert shipped("accelerate_configs", "cpu.yaml") == shipped("accelerate_configs", "cpu") is not None


@pytest.mark.parametrize(
    ("content", "figure"),
    [
        (b"- a\n", "list"),
        (b"", "NoneType"),
        (b"a: 1\na: 2\n", "line 2"),
        (b"a: caf\xe9\n", "UTF-8"),
        (b"a: " + b"[" * 1_000, "YAML"),
        (b"!!python/object:os.system {}", "YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_named(tmp_path: Path, content: bytes, figure: str) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    with refused(f"{tmp_path}/mine.yaml", figure, by=RecipeError) as caught:
        parse_recipe(["--config", str(tmp_path / "mine.yaml")])
    assert "\n" not in str(caught.value)


def test_a_table_is_sent_to_init(tmp_path: Path) -> None:
    for suffix in (".csv", ".jsonl", ".parquet"):
        path = tmp_path / f"rows{suffix}"
        path.write_bytes("question;answer\nWie groß?;6.403,64 €\n".encode("cp1252"))
        with refused(path, f"`grpo-recipes init {path}`", by=RecipeError):
            parse_recipe(["--config", str(path)])


def test_a_chat_template_lies_beside_its_recipe_or_where_the_command_is_given(
    recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    assert recipe(chat_template_path="/own").chat_template_path == "/own"
    assert recipe(chat_template_path="~/own").chat_template_path == str(Path.home() / "own")
    assert recipe("--chat_template_path", "own", chat_template_path="other").chat_template_path == "own"
    assert recipe().chat_template_path is None
    assert recipe(chat_template_path="own").chat_template_path == str(tmp_path / "own")
    monkeypatch.chdir(tmp_path.parent)
    found = parse_recipe(["--config", f"{tmp_path.name}/mine.yaml"])
    assert found.chat_template_path == str(tmp_path / "own")


def test_a_recipe_needs_no_file() -> None:
    given = ["--model_name_or_path", "m", "--dataset=gsm8k", "--rewards", "[tag_count]", "--optim", "adamw_bf16"]
    made = parse_recipe(given)
    assert (made.source, made.output_dir, made.dataset.name) == ("command line", Path("runs/grpo"), "gsm8k")
    assert (made.training["optim"], made.arguments) == ("adamw_bf16", given)
    with refused("command line: `rewards`", "`--rewards`", by=RecipeError):
        parse_recipe(given[:3])
    with refused("command line", "`--config quickstart`", by=RecipeError):
        parse_recipe([])


# Mistakes


@pytest.mark.parametrize(
    ("keys", "key", "figure"),
    [
        ({"micro_batching": "on"}, "micro_batching", "'on'"),
        ({"generation": "atuo"}, "generation", "`auto`"),
        ({"lerning_rate": 1e-5}, "lerning_rate", "`learning_rate`"),
        ({"system_prompt": "x"}, "system_prompt", "`dataset.system_prompt`"),
        ({".beta": 1}, ".beta", "`beta`"),
        ({"reward": ["a"]}, "reward", "`rewards`"),
        ({"learning_rate": "fast"}, "learning_rate", "'fast'"),
        ({"max_steps": 3.5}, "max_steps", 3.5),
        ({"num_generations": True}, "num_generations", True),
        ({"loss_type": "gpro"}, "loss_type", "`grpo`"),
        ({"optim": "adamw_bf61"}, "optim", "`adamw_bf16`"),
        ({"model_name_or_path": ...}, "model_name_or_path", "`--model_name_or_path`"),
        ({"dataset": ...}, "dataset", "`--dataset`"),
        ({"hub_token": HIDDEN}, "hub_token", "`--hub_token`"),
        *(({"kl_estimator": "full", **beta}, "beta", 0.0) for beta in ({}, {"beta": 0})),
    ],
)
def test_a_mistake_in_the_file_gives_one_line(recipe: Write, keys: dict[str, Any], key: str, figure: object) -> None:
    with refused(f"mine.yaml: `{key}`", figure, by=RecipeError) as caught:
        recipe(**keys)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "place", "figure"),
    [
        (["--lerning_rate", "1e-5"], "`--lerning_rate`", "`learning_rate`"),
        (["--learning_rate", "fast"], "", "'fast'"),
        (["--dataset.path"], "`--dataset.path`", ""),
        (["--config"], "`--config`", ""),
        (["--max_steps.x", "1"], "`--max_steps.x`: `max_steps`", "`.x`"),
        (["--dataset.size.x.y", "1"], "`--dataset.size.x.y`: `dataset.size`", 64),
        *(
            ([f"--rewards.{index}.weight", "1"], f"`--rewards.{index}.weight`: `rewards`", 1)
            for index in ("1", "-1", "x")
        ),
        (["--dataset", "{name: gsm8k, name: math}"], "`--dataset`: `name`", ""),
        (["quickstart"], "`quickstart`", "`--config quickstart`"),
        (["--gpu_memry"], "`--gpu_memry`", "`--gpu_memory`"),
        (["--confg=x"], "`--confg=x`", "`--config`"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(
    recipe: Write, arguments: list[str], place: str, figure: object, tmp_path: Path
) -> None:
    recipe(max_steps=3)
    with refused(f"command line{': ' * bool(place)}{place}", figure, by=RecipeError):
        parse_recipe(["--config", str(tmp_path / "mine.yaml"), *arguments], ["--gpu_memory"])


def test_a_number_outside_the_range_of_its_key_is_named(recipe: Write) -> None:
    for key, value in (("temperature", 0), ("dataset.eval_share", 1), ("sampling.floor", 0), ("save_steps", "inf")):
        with refused(f"mine.yaml: `{key}`", value, by=RecipeError):
            recipe(f"--{key}={value}")


def test_errors_of_trl_name_the_file(recipe: Write) -> None:
    with refused("mine.yaml", "fp16", "bf16", by=RecipeError):
        grpo_config(recipe(fp16=True, bf16=True, use_cpu=True))
    with refused("mine.yaml", "8 bit", "4 bit", by=RecipeError):
        model_config(recipe(load_in_8bit=True, load_in_4bit=True))


# Runs


def test_a_run_resumes_from_a_complete_checkpoint_of_its_layout(recipe: Write, tmp_path: Path) -> None:
    """The checkpoints are another trainer's, without manifests. `runs/test_damaged_checkpoints.py` has ours."""
    made = recipe(**RUNS, resume_from_checkpoint=True, output_dir=str(tmp_path / "run"))
    assert resume_point(made, CPU).newest is None  # stopped before the first checkpoint
    checkpoint = tmp_path / "run" / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    point = resume_point(made, CPU)
    assert (point.newest, len(point.rejected)) == (None, 1)  # cut off while the first checkpoint was saved
    for name in ("rng_state_0.pth", "rng_state_1.pth", "optimizer.pt", "scheduler.pt"):
        torch.save({}, checkpoint / name)
    (checkpoint / "trainer_state.json").write_text("{}")
    with refused("mine.yaml: `resume_from_checkpoint`", by=RecipeError):  # no weights
        resume_point(made, Machine(2, bf16=False))
    save_file({"a": torch.zeros(1)}, checkpoint / "model.safetensors")
    assert resume_point(made, Machine(2, bf16=False)).newest == checkpoint
    with refused("mine.yaml: `resume_from_checkpoint`", by=RecipeError):  # other processes than before
        resume_point(made, CPU)
    elsewhere = recipe("--resume_from_checkpoint", "elsewhere", output_dir=str(tmp_path / "run"))
    with refused("`resume_from_checkpoint`", "elsewhere", by=RecipeError):
        resume_point(elsewhere, CPU)


# Generation keys


def test_invalid_stop_strings_are_refused_before_a_model_is_looked_for(recipe: Write, tmp_path: Path) -> None:
    for stop in ([""], "", [3], {"a": 1}):
        config = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, generation_kwargs={"stop": stop})
        with refused("`generation_kwargs.stop`", stop):
            GRPOTrainer("/no/such/model", print, config)
        with refused("mine.yaml: `generation_kwargs.stop`", stop, by=RecipeError):
            recipe(generation_kwargs={"stop": stop})


def test_a_mapping_may_be_written_as_json(recipe: Write) -> None:
    """As `GRPOConfig` reads it."""
    for key in ("chat_template_kwargs", "model_init_kwargs"):
        for words in ([f"--{key}.deep", "true"], [f'--{key}={{"deep": true}}']):
            made = recipe(*words)
            assert made.training[key] == {"deep": True} == made.as_dict()[key]
        assert getattr(recipe(**{key: '{"deep": true}'}).config, key) == {"deep": True}
        for given in ("7", "{deep", "[1]"):
            with refused(f"`{key}`", by=RecipeError):
                recipe(f"--{key}={given}")


# Shipped recipes

# Number of processes of each recipe, as its head states.
LAYOUT = {"gsm8k-qwen2.5-1.5b-8xa100": 7}


def test_every_shipped_recipe_parses_divides_and_builds_its_rewards() -> None:
    quickstart = shipped("recipes", "quickstart")
    assert quickstart is not None
    names = sorted(path.stem for path in quickstart.parent.glob("*.yaml"))
    assert len(names) > 10
    for name in names:
        made = parse_recipe(["--config", name])
        assert not geometry_of(made, LAYOUT.get(name, 1)).splits_groups, name
        assert made.build_rewards(), name
        beside = "/run" if name == "quickstart" else ""  # its folder contains the policy too
        assert made.training["output_dir"] == f"runs/{name}{beside}"


def test_the_24gb_recipe_has_the_settings_of_its_source() -> None:
    made = parse_recipe(["--config", "gsm8k-qwen2.5-1.5b-24gb"])
    layout = geometry_of(made, 1)
    counts = (layout.prompts_per_generation, layout.num_generations, layout.completions_per_optimizer_step)
    assert counts == (2, 8, 16)
    expected = {
        **{"max_completion_length": 256, "max_steps": 500, "beta": 0.04, "epsilon": 0.1, "max_grad_norm": 0.1},
        **{"learning_rate": 5e-6, "lr_scheduler_type": "constant", "weight_decay": 0.01, "loss_type": "grpo"},
        **{"use_bias_correction_kl": False, "num_iterations": 1},
    }
    assert {key: made.training[key] for key in expected} == expected
    assert made.dataset.prompt_format == "text"
