"""Resolution of a recipe: precedence of values, words that stand for mappings, and numbers that a key may have."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from trl import GRPOConfig

from grpo_recipes.recipe import specs
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
from grpo_recipes.recipe.specs import (
    DatasetSpec,
    MicroBatching,
    PassRateSpec,
    Range,
    ReferenceSpec,
    SamplingSpec,
    typed,
)
from grpo_rewards.errors import UserError
from grpo_rewards.redaction import HIDDEN

MINIMAL: dict[str, Any] = {
    "model_name_or_path": "nowhere/model",
    "dataset": {"name": "arithmetic", "size": 64},
    "rewards": ["gsm8k_correctness"],
}
TOOLS: dict[str, Any] = {
    "tools": ["grpo_recipes.tools.examples.calculator"], "max_tool_calling_iterations": 2,
}  # fmt: skip

Write = Callable[..., Recipe]


@pytest.fixture
def recipe(tmp_path: Path) -> Write:
    """Return a function that reads a recipe with some keys, after some arguments of a command line."""

    def read(*arguments: str, **keys: Any) -> Recipe:
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({**MINIMAL, **keys}))
        return parse_recipe(["--config", str(path), *arguments])

    return read


def test_the_command_line_wins_over_the_file_the_file_over_ours_and_ours_over_trls(recipe: Write) -> None:
    trls = GRPOConfig.__dataclass_fields__
    assert recipe().config.disable_dropout is True
    assert trls["disable_dropout"].default is not True
    assert recipe(disable_dropout=False).config.disable_dropout is False
    assert recipe("--disable_dropout", "true", disable_dropout=False).config.disable_dropout is True
    assert recipe().config.temperature == trls["temperature"].default
    assert recipe(temperature=0.5).config.temperature == 0.5
    assert recipe("--temperature", "0.25", temperature=0.5).config.temperature == 0.25
    own = recipe(temperature=0.5, generation_check=False).as_dict()
    assert resolved(own)["temperature"] == own["temperature"] == 0.5
    assert own["generation_check"] is False, "a value that is false is no default"
    assert resolved(own)["top_p"] == trls["top_p"].default


def test_a_run_has_a_folder_of_its_recipes_name_unless_it_names_one(recipe: Write) -> None:
    assert recipe().output_dir == Path("runs/mine")
    assert recipe(output_dir="there").output_dir == Path("there")
    assert recipe("--output_dir", "here", output_dir="there").output_dir == Path("here")


@pytest.mark.parametrize(("value", "resumes"), [("false", False), ("true", True), ("a/checkpoint-3", True)])
def test_a_resume_can_be_switched_off_on_the_command_line(recipe: Write, value: str, resumes: bool) -> None:
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
    off = recipe("--micro_batching.skip_zero_advantage", "true", micro_batching="off").micro_batching
    assert off == MicroBatching(), "the key replaces the word, and not one field of what it stands for"
    for index in ("2", "-1", "x"):
        with pytest.raises(
            RecipeError, match=rf"`rewards` is a list and has no entry `{index}`: give an index below 2"
        ):
            recipe(f"--rewards.{index}.weight", "1", **keys)
    with pytest.raises(RecipeError, match="`--rewards` needs a value"):
        recipe("--rewards", "--dataset.path", "b")
    with pytest.raises(RecipeError, match=r"`tool_limits.seconds` is -3"):
        recipe("--tool_limits.seconds", "-3", **TOOLS)


def test_values_of_python_reach_a_recipe_as_they_are(recipe: Write, tmp_path: Path) -> None:
    recipe()
    loaded = Recipe.load(tmp_path / "mine.yaml", generation_check=False, rewards=["tag_presence"], max_steps=3)
    assert (loaded.generation_check, loaded.rewards, loaded.config.max_steps) == (False, ["tag_presence"], 3)
    recipe(sampling="informative")
    assert Recipe.load(tmp_path / "mine.yaml", sampling=None).sampling is None


def test_one_reward_may_be_written_without_a_list(recipe: Write) -> None:
    assert recipe(rewards="tag_presence").rewards == ["tag_presence"]
    alone = {"name": "tag_presence", "weight": 2}
    assert recipe(rewards=alone).rewards == [alone]
    for weights in ([1.0], []):
        with pytest.raises(RecipeError, match="`reward_weights` has no effect here"):
            recipe(reward_weights=weights)


def test_an_environment_may_be_the_only_source_of_rewards(recipe: Write) -> None:
    keys = {"environment_factory": "tests.support.launching.variety", "max_tool_calling_iterations": 2}
    assert recipe(**keys).rewards == ["gsm8k_correctness"]
    assert recipe(**keys, rewards=None).rewards == []
    with pytest.raises(RecipeError, match="`rewards` is missing"):
        recipe(rewards=None)


def test_tools_have_limits_and_limits_have_tools(recipe: Write) -> None:
    assert recipe(**TOOLS).tool_limits == specs.ToolLimits()
    assert recipe(**TOOLS, tool_limits={"seconds": 2}).tool_limits == specs.ToolLimits(seconds=2.0)
    assert recipe().tool_limits is None
    with pytest.raises(RecipeError, match="`tool_limits.seconds` must be a number, not ''"):
        recipe(**TOOLS, tool_limits="")
    for key, value in (("tool_limits", {}), ("max_tool_calling_iterations", 2)):
        with pytest.raises(RecipeError, match=f"`{key}` has no effect without `tools`"):
            recipe(**{key: value})
    recorded = {"offline": "group", "dataset": {"name": "scored", "path": "rows.jsonl"}}
    with pytest.raises(RecipeError, match="`offline` trains on recorded responses, in which no tool is called"):
        recipe(**TOOLS, **recorded)


@pytest.mark.parametrize("beta", [None, 0, 0.0])
def test_the_full_kl_needs_a_reference(recipe: Write, beta: float | None) -> None:
    keys = {} if beta is None else {"beta": beta}
    with pytest.raises(RecipeError, match="`kl_estimator: full` needs a reference policy"):
        recipe(kl_estimator="full", **keys)
    assert recipe(kl_estimator="full", beta=0.1).config.beta == 0.1


def test_the_placeholder_of_a_secret_is_no_value(recipe: Write) -> None:
    with pytest.raises(RecipeError, match="`hub_token` is the placeholder of a secret"):
        recipe(hub_token=HIDDEN)


def test_a_recorded_run_is_a_recipe_without_its_resume(tmp_path: Path) -> None:
    recorded = {**MINIMAL, "resume_from_checkpoint": "true"}
    launches = [{"recipe": {**MINIMAL, "beta": 0.5}}, {"recipe": recorded}]
    (tmp_path / "run.json").write_text(json.dumps({**launches[-1], "launches": launches}))
    again = parse_recipe(["--config", str(tmp_path / "run.json")])
    assert not again.resumes
    assert again.config.beta != 0.5


def test_a_name_is_a_file_first_and_a_shipped_recipe_only_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        find_file("recipes", "quickstart")
        == find_file("recipes", "quickstart.yaml")
        == shipped("recipes", "quickstart")
    )
    with pytest.raises(RecipeError, match="there is no such file"):
        find_file("recipes", "elsewhere/quickstart")
    (tmp_path / "quickstart").mkdir()
    assert find_file("recipes", "quickstart") == shipped("recipes", "quickstart")
    (tmp_path / "quickstart.yaml").write_text("beta: 1")
    assert find_file("recipes", "quickstart.yaml") == Path("quickstart.yaml")


def test_a_folder_and_an_unknown_name_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    for name, message in (
        ("own", "own is a folder: name a YAML file, or one that ships in recipes/"),
        (
            "quickstrt.yaml",
            f"quickstrt.yaml: there is no such file (relative to {tmp_path}), and none of that name ships in recipes/: "
            "did you mean `quickstart`?",
        ),
        (f"{tmp_path}/x", f"{tmp_path}/x: there is no such file, and none of that name ships in recipes/"),
    ):
        with pytest.raises(RecipeError) as caught:
            find_file("recipes", name)
        assert str(caught.value) == message
    assert shipped("recipes", "no-such") is None
    folders = [file.parent.name for file in shipped_files("recipes").values()]
    assert folders == sorted(folders, key="recipes".__ne__), "those of inner folders come last"
    assert shipped("accelerate_configs", "cpu.yaml") == shipped("accelerate_configs", "cpu") is not None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n", "a recipe is a YAML mapping of `key: value` lines, not list"),
        (b"", "a recipe is a YAML mapping of `key: value` lines, not NoneType"),
        (b"a: 1\na: 2\n", "`a` is given twice, in line 1 and in line 2: keep one"),
        (b"a: caf\xe9\n", "not YAML: it is not UTF-8"),
        (b"a: [1\n", "not YAML: "),
        (b"a: " + b"[" * 1_000, "not YAML: "),
    ],
)
def test_a_file_that_is_no_mapping_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        parse_recipe(["--config", str(tmp_path / "mine.yaml")])
    assert str(caught.value).startswith(f"{tmp_path}/mine.yaml: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_a_table_is_sent_to_init(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_text("a: 1\n")
    with pytest.raises(RecipeError) as caught:
        parse_recipe(["--config", str(path)])
    message = f"{path} is a table, not a recipe: write one for it with `grpo-recipes init {path}`"
    assert str(caught.value) == message


def test_a_chat_template_lies_beside_its_recipe_or_where_the_command_is_given(
    recipe: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    assert recipe(chat_template_path="own").chat_template_path == str(tmp_path / "own")
    assert recipe(chat_template_path="/own").chat_template_path == "/own"
    assert recipe(chat_template_path="~/own").chat_template_path == str(Path.home() / "own")
    assert recipe("--chat_template_path", "own", chat_template_path="other").chat_template_path == "own"
    assert recipe().chat_template_path is None
    recipe(chat_template_path="own")
    monkeypatch.chdir(tmp_path.parent)
    found = parse_recipe(["--config", f"{tmp_path.name}/mine.yaml"])
    assert found.chat_template_path == str(tmp_path / "own")


def test_a_recipe_needs_no_file() -> None:
    made = parse_recipe(
        ["--model_name_or_path", "m", "--dataset=gsm8k", "--rewards", "[tag_count]", "--optim", "adamw_bf16"]
    )
    assert (made.source, made.output_dir, made.dataset.name) == ("command line", Path("runs/grpo"), "gsm8k")
    assert made.training["optim"] == "adamw_bf16"
    with pytest.raises(RecipeError) as caught:
        parse_recipe(["--model_name_or_path", "m", "--dataset=gsm8k"])
    assert str(caught.value) == "command line: `rewards` is missing: add it to the recipe or pass `--rewards`"
    with pytest.raises(RecipeError) as caught:
        parse_recipe([])
    assert str(caught.value) == (
        "command line: name a recipe: `--config FILE`, or one that ships, as `--config quickstart`"
    )


def test_a_value_of_the_command_line_is_yaml_or_a_text(recipe: Write) -> None:
    for text in ("a: b: c", "[x", "{{ question }}", "- a\n b: c: d"):
        assert recipe("--dataset.prompt_template", text).dataset.prompt_template == text
    assert recipe("--dataset.seed", "-3").dataset.seed == -3
    assert recipe("--dataset.system_prompt=--x-- y").dataset.system_prompt == "--x-- y"
    assert recipe("--rewards.0", "tag_count").rewards == ["tag_count"]
    assert recipe("--micro-batching", "off").micro_batching == MicroBatching("padded")
    with pytest.raises(RecipeError) as caught:
        recipe("--dataset", "{name: gsm8k, name: math}")
    assert str(caught.value).startswith("command line: `--dataset`: `name` is given twice")
    with pytest.raises(RecipeError, match=r"command line: `--dataset\.path` needs a value"):
        recipe("--dataset.path")
    with pytest.raises(RecipeError, match="command line: `--config` needs a value"):
        parse_recipe(["--config"])


def test_a_path_into_a_value_without_keys_is_named(recipe: Write) -> None:
    for arguments, keys, message in (
        (["--max_steps.x", "1"], {"max_steps": 3}, "`max_steps` is 3, which has no keys: leave `.x` out"),
        (["--dataset.size.x.y", "1"], {}, "`dataset.size` is 64, which has no keys: leave `.x` out"),
        (["--dataset.size.x", "1"], {}, "`dataset.size` is 64, which has no keys: leave `.x` out"),
        (["--rewards.2", "x"], {}, "`rewards` is a list and has no entry `2`: give an index below 1"),
    ):
        with pytest.raises(RecipeError) as caught:
            recipe(*arguments, **keys)
        assert str(caught.value) == f"command line: `{arguments[0]}`: {message}"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"trl": {}}, "unknown key `trl`: "),
        ({"system_prompt": "x"}, "unknown key `system_prompt`: did you mean `dataset.system_prompt`?"),
        ({".beta": 1}, "unknown key `.beta`: did you mean `beta`?"),
        ({"xqzt": 1}, "unknown key `xqzt`: remove it"),
        ({"reward": ["a"]}, "unknown key `reward`: did you mean `rewards`?"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(recipe: Write, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe(**keys)
    assert str(caught.value).partition("mine.yaml: ")[2].startswith(message)


def test_what_stands_alone_on_the_command_line_may_be_a_recipe(recipe: Write, tmp_path: Path) -> None:
    recipe()
    for word, hint in (
        ("quickstart", ": did you mean `--config quickstart`?"),
        (f"{tmp_path}/mine.yaml", f": did you mean `--config {tmp_path}/mine.yaml`?"),
        ("--gpu_memry", ": did you mean `--gpu_memory`?"),
        ("--confg=x", ": did you mean `--config`?"),
    ):
        with pytest.raises(RecipeError) as caught:
            parse_recipe(["--config", str(tmp_path / "mine.yaml"), word, "--last_of_all"], ["--gpu_memory"])
        assert str(caught.value) == f"command line: unknown argument `{word}`{hint}"


def test_trls_refusal_of_model_arguments_names_the_file(recipe: Write, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=rf"^{tmp_path}/mine\.yaml: .*8 bit.*4 bit"):
        model_config(recipe(load_in_8bit=True, load_in_4bit=True))


@pytest.mark.parametrize(
    ("keys", "uses", "evaluates", "whole"),
    [
        ({}, False, False, False),
        (TOOLS, True, False, False),
        ({"environment_factory": "a.b", "max_tool_calling_iterations": 1}, True, False, False),
        ({"tools": [], "eval_strategy": "steps"}, False, True, False),
        ({"offline": "batch", "dataset": {"name": "scored", "path": "a.jsonl"}}, False, False, True),
        ({"offline": "group", "dataset": {"name": "scored", "path": "a.jsonl"}}, False, False, False),
    ],
)
def test_a_recipe_knows_if_it_uses_tools_evaluates_or_compares_whole_batches(
    recipe: Write, keys: dict[str, Any], uses: bool, evaluates: bool, whole: bool
) -> None:
    made = recipe(**keys)
    assert (made.uses_tools, made.evaluates, made.compares_whole_batch) == (uses, evaluates, whole)


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("allowed", "inside", "outside"),
    [
        (Range(0), [0, 0.5, 1e30], [-1e-9, -1, INF, -INF, NAN]),
        (Range(0, above=True), [1e-30, 1], [0, -1, INF, NAN]),
        (Range(0, 1, above=True), [1e-9, 1], [0, 1.0001, NAN]),
        (Range(0, 1, below=True), [0, 0.999], [1, -0.1]),
        (Range(0, 1, above=True, below=True), [0.5], [0, 1]),
        (Range(0, or_=-1), [-1, 0, 50], [-2, -0.5]),
        (Range(1, 65535), [1, 65535], [0, 65536]),
        (Range(-2, 0), [-2, 0], [-3, 1]),
        (Range(1, or_=0), [0, 1], [-1, 0.5]),
    ],
    ids=str,
)
def test_a_range_holds_its_ends_unless_its_words_exclude_them(
    allowed: Range, inside: list[float], outside: list[float]
) -> None:
    for value in inside:
        assert value in allowed
        specs.check_number("key", value, allowed)
    for value in outside:
        assert value not in allowed
        with pytest.raises(UserError, match=r"^`key` is .*: set a number "):
            specs.check_number("key", value, allowed)
    specs.check_number("key", None, allowed)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 0), ("top_p", 0.0), ("num_generations", 1), ("learning_rate", float("nan")), ("top_k", -2),
        ("max_steps", 0), ("seed", 2**32), ("adam_beta1", 1.0), ("lora_dropout", 1.1), ("num_train_epochs", 0),
        ("vllm_server_port", 65536), ("save_steps", float("inf")), ("micro_batching.layout", "dense"),
        ("dataset.eval_share", 0), ("dataset.eval_share", 1), ("dataset.max_prompt_tokens", 0), ("dataset.size", 0),
        ("sampling.floor", 0), ("sampling.exploration", 1.1), ("early_stopping_patience", "x"),
    ],
)  # fmt: skip
def test_a_number_outside_the_range_of_its_key_is_named(recipe: Write, key: str, value: Any) -> None:
    with pytest.raises(RecipeError, match=rf"mine.yaml: `{key}` "):
        recipe(f"--{key}={value}")


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (False, Literal["auto", "off"], "off"),
        (False, str, "false"),
        (True, str, "true"),
        (True, str | None, "true"),
        ("5e-6", float, 5e-6),
        (3, float, 3.0),
        (3.0, int, 3),
        ("7", int, 7),
        (7, str, "7"),
        ("False", bool, False),
        ("TRUE", bool, True),
        ("a", list[str], ["a"]),
        (5, list[float], [5.0]),
        (5, list[str], ["5"]),
        ([1, "2"], list[float], [1.0, 2.0]),
        (None, int | None, None),
        ("3", int | str, "3"),  # a type that the value has comes before one that it can become
        (2, float | str, 2.0),
    ],
)
def test_a_value_becomes_the_type_of_its_key_if_it_loses_nothing(value: Any, hint: Any, expected: Any) -> None:
    found = typed("key", value, hint)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint"),
    [(3.5, int), (True, int), (True, float), (False, int | float), ("x", float), ("yes", bool), (1, bool), (None, int),
     ({}, list[str]), ([{}], list[float]), ("c", Literal["a", "b"])],
)  # fmt: skip
def test_a_value_that_would_lose_something_is_refused(value: Any, hint: Any) -> None:
    with pytest.raises(UserError, match="`key` "):
        typed("key", value, hint)


def test_no_is_a_word_of_strategies_only() -> None:
    assert typed("save_strategy", False, str) == "no"
    assert typed("save_strategy", True, str) == "true"
    assert typed("run_name", False, str) == "false"


def dataset(**keys: Any) -> DatasetSpec:
    return DatasetSpec.parse({"path": "rows.jsonl", **keys})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"delimiter": '"'}, "`dataset.delimiter` is"),
        ({"delimiter": "\n"}, "`dataset.delimiter` is"),
        ({"delimiter": ";;"}, "`dataset.delimiter` is"),
        ({"encoding": "utf-9"}, "`dataset.encoding` is 'utf-9'"),
        ({"columns": {"question": ""}}, "`dataset.columns` has ''"),
        ({"columns": {"": "problem"}}, "`dataset.columns` has ''"),
        ({"columns": {"question": 3}}, "`dataset.columns` has 3"),
        ({"name": "classification", "labels": ["a", "a"]}, "`dataset.labels` must name"),
        ({"name": "gsm8k", "size": 3}, "`dataset.size` does not go with the dataset `gsm8k`"),
        ({"labels": ["a", "b"]}, "`dataset.labels` does not go with the dataset `path`"),
        ({"eval_share": 0.1, "eval_path": "other.jsonl"}, "`dataset.eval_path` does not go with `dataset.eval_share`"),
        ({"eval_share": 0.1, "eval_split": "test"}, "`dataset.eval_split` does not go with `dataset.eval_share`"),
        ({"path": [{"path": "a"}, {"path": "b"}, {"path": "c", "fraction": 0.5}]}, "every source a `fraction`"),
        ({"path": [{"path": "a", "fraction": 1}, {"path": "b"}]}, "every source a `fraction`"),
        ({"path": ["a", "b"], "split": "test"}, "`dataset.split` does not go with a list of sources"),
        ({"path": ["a", "b"], "delimiter": ";"}, "`dataset.delimiter` does not go with a list of sources"),
        ({"path": []}, "`dataset.path` is an empty list"),
        ({"name": "scored", "path": "rows"}, "`scored` reads a file"),
        ({"system_prompt": " \n"}, "`dataset.system_prompt` is empty"),
        ({"system_prompt": "reasonin"}, "can't be the one word `reasonin`"),
    ],
)
def test_a_dataset_that_could_not_be_meant_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        dataset(**keys)


def test_keys_of_a_dataset_that_can_be_meant() -> None:
    fractions = [{"path": "a", "fraction": 0.5}, {"path": "b", "fraction": 1}]
    for keys in ({"delimiter": "\t"}, {"path": fractions}, {"eval_path": ["a", "b"], "split": "test[:5%]"}):
        assert isinstance(dataset(**keys), DatasetSpec)
    assert dataset(name="gsm8k").system_prompt == "reasoning"
    assert dataset(name="gsm8k", system_prompt=" Be brief. \n").system_prompt == "Be brief."
    assert dataset(name="gsm8k", system_prompt="boxed").system_prompt == "boxed"
    assert dataset().system_prompt is None
    assert dataset(drop_missing=False).as_dict()["drop_missing"] is False


def test_a_system_prompt_of_a_file_is_its_text(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("\ufeffThink first.\n".encode())
    assert dataset(system_prompt={"file": str(file)}).system_prompt == "Think first."
    file.write_text("reasoning\n")  # the name of a prompt, which a file does not name
    with pytest.raises(UserError, match=r"read from .*prompt.txt\) can't be the one word `reasoning`"):
        dataset(system_prompt={"file": str(file)})


@pytest.mark.parametrize(("keep", "is_allowed"), [([0.1, 0.9], True), ([0.5, 0.5], True), ([0, 1], True),
                                                  ([0.9, 0.1], False), ([-0.1, 1], False), ([0, 1.1], False),
                                                  ([0.5], False)])  # fmt: skip
def test_a_pass_rate_is_an_interval(keep: list[float], is_allowed: bool) -> None:
    if is_allowed:
        assert PassRateSpec.parse({"evaluation": "folder", "keep": keep}).keep == keep
        return
    with pytest.raises(UserError, match="`dataset.pass_rate.keep` is"):
        PassRateSpec.parse({"evaluation": "folder", "keep": keep})


def test_words_stand_for_mappings() -> None:
    assert MicroBatching.parse(False) == MicroBatching.parse("off") == MicroBatching(layout="padded")
    assert MicroBatching.parse("auto") == MicroBatching.parse({}) == MicroBatching("packed", True)
    assert not MicroBatching("padded", True).skip_zero_advantage, "TRL's layout skips no row"
    assert MicroBatching("trimmed", False).as_dict() == {"layout": "trimmed", "skip_zero_advantage": False}
    with pytest.raises(UserError, match="`micro_batching` must be auto, off, or a mapping"):
        MicroBatching.parse("dense")


def test_a_reference_has_one_origin_and_a_refresh_that_mixes(recipe: Write) -> None:
    assert ReferenceSpec.parse({}).name == "initial"
    assert ReferenceSpec.parse({"adapter": "there"}).name is None
    for name in ("initial", "base"):
        with pytest.raises(UserError, match="`reference` has both `name` and `adapter`"):
            ReferenceSpec.parse({"name": name, "adapter": "there"})
    keys = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 4, "ref_model_mixup_alpha": 0.5}
    ReferenceSpec().check_refresh(recipe(**keys).config)
    for changes, message in (
        ({"beta": 0.0}, "`beta` is 0.0, which needs no reference"),
        ({"ref_model_sync_steps": 0}, "`ref_model_sync_steps` is 0"),
        ({"ref_model_mixup_alpha": 1.5}, "`ref_model_mixup_alpha` is 1.5"),
        ({"ref_model_mixup_alpha": 0.0}, "`ref_model_mixup_alpha` is 0.0"),
    ):
        with pytest.raises(UserError, match=message):
            ReferenceSpec().check_refresh(recipe(**{**keys, **changes}).config)
    with pytest.raises(UserError, match="`reference: base` is the model without adapter"):
        ReferenceSpec(name="base").check_refresh(recipe(**keys).config)
    resets = ReferenceSpec(reset_optimizer_on_sync=True)
    with pytest.raises(UserError, match="`sync_ref_model: False` gives .* no effect"):
        resets.check_refresh(recipe().config)


def test_a_router_loss_is_no_sum_of_advantages(recipe: Write) -> None:
    config = recipe(loss_type="grpo").config
    config.router_aux_loss_coef = 0.01
    unbiased = SamplingSpec.parse({"informative": "unbiased"})
    unbiased.check(config)
    with pytest.raises(UserError, match=r"`router_aux_loss_coef: 0.01` does not go with"):
        unbiased.check(config, router_loss=True)
    SamplingSpec.parse("informative").check(config, router_loss=True)
