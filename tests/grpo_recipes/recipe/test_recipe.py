"""Recipes: reading and resolving them, and the messages for mistakes."""

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from trl import GRPOConfig, ModelConfig

from grpo_recipes.checks.checks import Machine, check, check_output_dir, grpo_config, resume_point
from grpo_recipes.checks.geometry import geometry_of
from grpo_recipes.recipe.recipe import Recipe, RecipeError, find_file, model_config, parse_recipe, shipped
from grpo_recipes.recipe.specs import DatasetSpec, MicroBatching

CPU = Machine(num_processes=1, bf16=False)

MINIMAL = {
    "model_name_or_path": "nowhere/model",
    "dataset": {"name": "arithmetic", "size": 64},
    "rewards": ["gsm8k_correctness"],
    "per_device_train_batch_size": 16,
    "use_cpu": True,
    "bf16": False,
}


@pytest.fixture
def write(tmp_path: Path):
    def write_recipe(**changes: object) -> str:
        path = tmp_path / "mine.yaml"
        values = {**MINIMAL, "output_dir": str(tmp_path / "run"), **changes}
        path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not ...}))
        return str(path)

    return write_recipe


def parsed(path: str, *arguments: str) -> Recipe:
    return parse_recipe(["--config", path, *arguments])


def test_text_and_floats_become_the_type_of_the_key(write) -> None:
    path = write()
    Path(path).write_text(Path(path).read_text() + "learning_rate: 5e-6\nmax_steps: 3.0\nrun_name: 7\n")
    training = parsed(path).training
    assert (training["learning_rate"], training["max_steps"], training["run_name"]) == (5e-6, 3, "7")
    assert isinstance(training["max_steps"], int)


def test_yaml_false_becomes_the_word_no(write) -> None:
    path = write()
    Path(path).write_text(Path(path).read_text() + "eval_strategy: no\nscale_rewards: false\n")
    recipe = parsed(path)
    assert not recipe.evaluates
    assert grpo_config(recipe).scale_rewards == "none"


def test_the_command_line_overrides_the_file(write) -> None:
    recipe = parsed(
        write(learning_rate=1e-4), "--learning_rate", "1e-5", "--num-generations=4", "--no_gradient_checkpointing"
    )
    assert recipe.training["learning_rate"] == 1e-5
    assert recipe.training["num_generations"] == 4
    assert recipe.training["gradient_checkpointing"] is False


def test_the_command_line_reaches_nested_keys(write) -> None:
    recipe = parsed(
        write(dataset="arithmetic"),
        "--dataset.size",
        "99",
        "--rewards.0",
        "{name: tag_count, weight: 0.5}",
        "--rewards.0.alias=tags",
    )
    assert recipe.dataset == DatasetSpec(name="arithmetic", size=99)
    assert list(recipe.rewards) == [{"name": "tag_count", "weight": 0.5, "alias": "tags"}]


@pytest.mark.parametrize(
    ("written", "arguments", "expected"),
    [
        (..., [], MicroBatching()),
        ("off", [], MicroBatching("padded", False)),
        ({"layout": "trimmed"}, [], MicroBatching("trimmed", True)),
        ("auto", ["--micro_batching.layout=trimmed"], MicroBatching("trimmed")),
        (False, ["--micro_batching.skip_zero_advantage", "false"], MicroBatching(skip_zero_advantage=False)),
        ({"layout": "trimmed"}, ["--micro_batching", "off"], MicroBatching("padded", False)),
    ],
)
def test_micro_batching(write, written: object, arguments: list[str], expected: MicroBatching) -> None:
    assert parse_recipe(["--config", write(micro_batching=written), *arguments]).micro_batching == expected


@pytest.mark.parametrize(
    ("written", "arguments", "expected"),
    [
        (..., [], "auto"),
        ("auto", [], "auto"),
        ("off", [], "off"),
        (False, [], "off"),
        ("auto", ["--generation", "off"], "off"),
        ("off", ["--generation=auto"], "auto"),
    ],
)
def test_generation(write, written: object, arguments: list[str], expected: str) -> None:
    given = ["--config", write(generation=written), *arguments]
    recipe = parse_recipe(given)
    assert recipe.arguments == given
    assert recipe.generation == expected
    assert recipe.as_dict()["generation"] == expected


def test_a_recipe_becomes_trls_configuration(write, tmp_path: Path) -> None:
    recipe = parsed(
        write(learning_rate="1e-5", lora_r=4, use_peft=True, dtype="bfloat16", lora_target_modules="all-linear")
    )
    args, model = grpo_config(recipe), model_config(recipe)
    assert isinstance(args, GRPOConfig)
    assert isinstance(model, ModelConfig)
    assert (args.learning_rate, model.lora_r, model.lora_target_modules) == (1e-5, 4, "all-linear")
    assert args.model_init_kwargs["dtype"] == "bfloat16"
    assert args.output_dir == str(tmp_path / "run")


def test_dropout_is_disabled_by_default(write) -> None:
    assert grpo_config(parsed(write())).disable_dropout is True
    assert grpo_config(parsed(write(disable_dropout=False))).disable_dropout is False


def test_a_resolved_recipe_can_be_loaded_again(write, tmp_path: Path) -> None:
    first = parsed(write(learning_rate="1e-5"), "--dataset.size", "32", "--loss_type", "grpo")
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(first.as_dict()))
    assert parsed(str(again)).as_dict() == first.as_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batching": "on"}, r"mine.yaml: `micro_batching` must be auto, off, or a mapping"),
        ({"generation": "atuo"}, r"mine.yaml: `generation` can't be `atuo`: did you mean `auto`\?"),
        ({"lerning_rate": 1e-5}, r"mine.yaml: unknown key `lerning_rate`: did you mean `learning_rate`\?"),
        ({"learning_rate": "fast"}, "mine.yaml: `learning_rate` must be a number, not 'fast'"),
        ({"max_steps": 3.5}, "`max_steps` must be a whole number, not 3.5"),
        ({"num_generations": True}, "`num_generations` must be a whole number, not True"),
        ({"use_peft": "yes please"}, "`use_peft` must be true or false"),
        ({"learning_rate": [1e-5]}, "`learning_rate` must be a number"),
        ({"beta": float("nan")}, "`beta` is nan"),
        ({"loss_type": "gpro"}, r"`loss_type` can't be `gpro`: did you mean `grpo`\?"),
        ({"model_name_or_path": ...}, "`model_name_or_path` is missing"),
        ({"rewards": ...}, "`rewards` is missing"),
        ({"dataset": ...}, "`dataset` is missing"),
        ({"reward_weights": [1.0]}, "`reward_weights` has no effect here: write `weight`"),
        ({"dataset": {"name": "arithmetic", "sise": 3}}, "mine.yaml: .*sise.*size"),
        ({"dataset": "gsm9k"}, "mine.yaml: .*gsm9k.*gsm8k"),
    ],
)
def test_a_mistake_in_the_file_gives_one_line(write, changes: dict, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        parsed(write(**changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lerning_rate", "1e-5"], "command line: unknown argument `--lerning_rate`: did you mean `learning_rate`"),
        (["--learning", "1e-5"], "unknown argument `--learning`"),
        (["--learning_rate", "fast"], "command line: .*invalid float value: 'fast'"),
        (["--dataset.path"], "`--dataset.path` needs a value"),
        (["--loss_type", "gpro"], "did you mean `grpo`"),
    ],
)
def test_a_mistake_on_the_command_line_is_reported(write, arguments: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parsed(write(), *arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": ["gsm8k_corectness"]}, "mine.yaml: .*gsm8k_corectness.*gsm8k_correctness"),
        ({"rewards": [{"name": "tag_count", "kwargs": {"tag": ["a"]}}]}, "mine.yaml: .*`tag_count`.*`tag`"),
        (
            {"rewards": [{"name": "gsm8k_correctness", "kwargs": {"extract": "anser"}}]},
            "mine.yaml: .*gsm8k_correctness",
        ),
        ({"rewards": ["tag_count", "tag_count"]}, "mine.yaml: .*alias"),
        ({"rewards": [{"name": "tag_count", "weight": float("inf")}]}, "mine.yaml: .*weight"),
        ({"dataset": {"name": "gsm8k", "path": "no/such.jsonl"}}, "mine.yaml: .*no/such.jsonl"),
        ({"dataset": {"name": "arithmetic", "size": 1}}, "has 1 prompts and one generation needs 2"),
        ({"per_device_train_batch_size": 12}, "set `per_device_train_batch_size` to 16"),
        (
            {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3},
            "`per_device_eval_batch_size` to 8",
        ),
        ({"use_cpu": False, "bf16": True}, "`bf16` needs a GPU.*`bf16: false`.*`use_cpu: true`"),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_before_a_model_is_loaded(
    write, tmp_path: Path, changes: dict, message: str
) -> None:
    recipe = parsed(write(**changes))
    with pytest.raises(RecipeError, match=message) as error:
        check(recipe, CPU)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_malformed_line_is_reported_with_file_and_number(write, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n{"question": \n')
    with pytest.raises(RecipeError, match=r"mine.yaml: .*rows.jsonl.*2"):
        check(parsed(write(dataset={"name": "gsm8k", "path": str(rows)})), CPU)


def test_an_earlier_run_is_not_overwritten(write, tmp_path: Path) -> None:
    recipe = parsed(write())
    (tmp_path / "run" / "completions").mkdir(parents=True)
    check_output_dir(recipe)
    before = tmp_path / "run" / "evaluations" / "before"
    before.mkdir(parents=True)
    (before / "evaluation.json").write_text("{}")  # an evaluation of the policy before the run
    check_output_dir(recipe)
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(RecipeError, match="already holds files.*resume_from_checkpoint"):
        check_output_dir(recipe)
    check(recipe, CPU)  # `plan` accepts an existing run


def test_a_run_resumes_from_a_complete_checkpoint_of_its_layout(write, tmp_path: Path) -> None:
    """The checkpoints are another trainer's, without manifests. `runs/test_damaged_checkpoints.py` has ours."""
    recipe = parsed(write(resume_from_checkpoint=True))
    assert resume_point(recipe, CPU).newest is None  # stopped before the first checkpoint
    state = {"rng_state_0.pth": True, "rng_state_1.pth": True, "trainer_state.json": False}
    checkpoint = tmp_path / "run" / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    point = resume_point(recipe, CPU)
    assert point.newest is None  # cut off while the first checkpoint was saved
    assert [one.reason for one in point.rejected] == ["checkpoint-2 was cut off while it was being saved"]
    for name, is_tensor in state.items():
        if is_tensor:
            torch.save({}, checkpoint / name)
        else:
            (checkpoint / name).write_text("{}")
    with pytest.raises(RecipeError, match=r"no complete checkpoint of 1 process.*as many processes as before"):
        resume_point(recipe, CPU)
    with pytest.raises(RecipeError, match=r"has no weights.*no other checkpoint is left.*remove the folder"):
        resume_point(recipe, Machine(2, bf16=False))
    save_file({"a": torch.zeros(1)}, checkpoint / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({}, checkpoint / name)
    assert resume_point(recipe, Machine(2, bf16=False)).newest == checkpoint
    recipe = parsed(write(resume_from_checkpoint=str(tmp_path / "elsewhere")))
    with pytest.raises(RecipeError, match="no complete checkpoint of 1 process.*elsewhere"):
        resume_point(recipe, CPU)


def test_a_reward_that_needs_whole_groups_refuses_a_layout_that_splits_them(write) -> None:
    recipe = parsed(write(rewards=["group_length"], per_device_train_batch_size=12, num_generations=8))
    with pytest.raises(RecipeError, match="compares the completions of a group.*a multiple of num_generations"):
        check(recipe, Machine(num_processes=2, bf16=False))


def test_errors_of_trl_name_the_file(write) -> None:
    with pytest.raises(RecipeError, match="mine.yaml: .*fp16 and bf16"):
        grpo_config(parsed(write(fp16=True, bf16=True)))


@pytest.mark.parametrize("name", ["prices.csv", "prices.jsonl"])
def test_a_table_in_place_of_a_recipe_is_sent_to_init(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes("question;answer\nWie groß?;6.403,64 €\n".encode("cp1252"))
    with pytest.raises(RecipeError, match=rf"is a table, not a recipe: .*`grpo-recipes init .*{name}`"):
        parsed(str(path))


def test_a_file_that_is_not_a_recipe_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    for text, message in [("a: [1", "not YAML"), ("- a\n", "mapping"), ("!!python/object:os.system {}", "not YAML")]:
        path.write_text(text)
        with pytest.raises(RecipeError, match=message):
            parsed(str(path))
    with pytest.raises(RecipeError, match="no such file"):
        parsed("no-such-recipe")


def test_a_name_finds_the_shipped_file() -> None:
    assert find_file("recipes", "gsm8k-qwen2.5-1.5b-24gb") == shipped("recipes", "gsm8k-qwen2.5-1.5b-24gb.yaml")
    assert find_file("accelerate_configs", "ddp_cpu").name == "ddp_cpu.yaml"


def shipped_recipes() -> list[str]:
    folder = shipped("recipes", "quickstart")
    assert folder is not None
    return sorted(path.stem for path in folder.parent.glob("*.yaml"))


# Number of processes of each recipe, as its head states.
LAYOUT = {"gsm8k-qwen2.5-1.5b-8xa100": 7}


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_parses_divides_and_builds_its_rewards(name: str) -> None:
    recipe = parse_recipe(["--config", name])
    geometry = geometry_of(recipe, LAYOUT.get(name, 1))
    assert not geometry.splits_groups
    assert recipe.build_rewards()
    beside = "/run" if name == "quickstart" else ""  # its folder contains the policy too
    assert recipe.training["output_dir"] == f"runs/{name}{beside}"


def test_the_24gb_recipe_has_the_settings_of_its_source() -> None:
    recipe = parse_recipe(["--config", "gsm8k-qwen2.5-1.5b-24gb"])
    geometry = geometry_of(recipe, 1)
    assert (geometry.prompts_per_generation, geometry.num_generations, geometry.completions_per_optimizer_step) == (
        2,
        8,
        16,
    )
    expected = {
        "max_completion_length": 256,
        "max_steps": 500,
        "beta": 0.04,
        "epsilon": 0.1,
        "max_grad_norm": 0.1,
        "learning_rate": 5e-6,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.01,
        "loss_type": "grpo",
        "use_bias_correction_kl": False,
        "num_iterations": 1,
    }
    assert {key: recipe.training[key] for key in expected} == expected
    assert recipe.dataset.prompt_format == "text"
