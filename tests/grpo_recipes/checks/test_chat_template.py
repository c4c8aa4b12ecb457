"""A recipe's own chat template: `chat_template_path` with a template for tools, on a model whose template has none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from trl.chat_template_utils import parse_response

from grpo_recipes import Recipe, train
from grpo_recipes.checks.tokenizer import ChatTemplate, load_tokenizer
from grpo_recipes.checks.tools import check_template, load_toolset
from grpo_recipes.evaluation import evaluate
from grpo_recipes.recipe.recipe import RecipeError, shipped
from tests.support import tiny
from tests.support.errors import refused
from tests.support.recipes import read_recipe

SHIPPED = "calculator-smollm2"
FOLDER = Path(__file__).parents[3] / "recipes" / "tools" / "smollm2-tools"
CALL = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "2*3"}}}


def recipe_with(folder: Path, model: Path, **keys: Any) -> Recipe:
    """Write a recipe with the calculator into a folder, and read it."""
    folder.mkdir(parents=True, exist_ok=True)
    tools = {"tools": ["grpo_recipes.tools.examples.calculator"], "max_tool_calling_iterations": 1}
    model_keys = {"model_name_or_path": str(model), "max_completion_length": 400, "use_cpu": True}
    return read_recipe(folder, dataset={"name": "products", "size": 16}, **tools, **model_keys, **keys)


def test_a_folder_beside_the_recipe_gives_a_model_its_tools(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bare = recipe_with(tmp_path / "bare", tiny_model)
    toolset = load_toolset(bare)
    assert toolset is not None
    with refused(f"`model_name_or_path`: {tiny_model}", by=RecipeError):
        check_template(bare, toolset, load_tokenizer(bare))
    folder = tmp_path / "recipes" / "mine"
    shutil.copytree(FOLDER, folder)
    recipe = recipe_with(tmp_path / "recipes", tiny_model, chat_template_path="mine")
    tokenizer = load_tokenizer(recipe)
    check_template(recipe, toolset, tokenizer)
    turns = [{"role": "user", "content": "2*3?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    prefix = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(turns, return_dict=False)
    assert parse_response(tokenizer, whole[len(prefix) :], prefix=prefix)["tool_calls"] == [CALL]
    # A path on the command line is relative to the working directory, as every path there.
    other = Recipe.load(tmp_path / "recipes" / "mine.yaml", chat_template_path="recipes/mine")
    assert load_tokenizer(other).chat_template == tokenizer.chat_template
    # A response template that does not fit is named by the key.
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"open": "<tool_call>"', '"open": "<call>"'))
    with refused("`chat_template_path`", "`calculator`", by=RecipeError):
        check_template(recipe, toolset, load_tokenizer(recipe))


def test_the_shipped_template_writes_plain_conversations_as_smollm2_does() -> None:
    """Without tools, the text is that of the model's own template: here, of the ChatML that it was trained on."""
    template = ChatTemplate.read(str(FOLDER))
    assert template is not None
    tokenizer = template.replace_in(tiny.chat_tokenizer())
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    own = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
    default = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert tokenizer.apply_chat_template(turns, tokenize=False) == f"<|im_start|>system\n{default}<|im_end|>\n{own}"
    system = [{"role": "system", "content": "s"}, *turns]
    assert tokenizer.apply_chat_template(system, tokenize=False) == f"<|im_start|>system\ns<|im_end|>\n{own}"


DAMAGED: list[tuple[dict[str, bytes], str, str]] = [
    ({}, "", "chat_template.jinja"),
    ({"chat_template.jinja": b"\xff"}, "chat_template.jinja", "UTF-8"),
    *(
        ({"chat_template.jinja": b"x", "tokenizer_config.json": content}, "tokenizer_config.json", figure)
        for content, figure in (
            (b"{", "JSON"),
            (b'{"response_template": "x"}', "`response_template`"),
            (b'{"response_template": {"fields": {"a": 1}}}', "'a'"),
        )
    ),
]


@pytest.mark.parametrize(("files", "place", "figure"), DAMAGED)
def test_files_that_can_not_be_used_are_named(files: dict[str, bytes], place: str, figure: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with refused(f"`chat_template_path`{f': {tmp_path}/{place}' if place else ''}", tmp_path, figure):
        ChatTemplate.read(str(tmp_path))


def test_a_template_is_recognised_by_its_text_and_by_how_calls_are_read() -> None:
    first = ChatTemplate(Path("a"), "text", {"x": 1, "y": {"u": 2, "v": 3}})
    assert first.digest == ChatTemplate(Path("b"), "text", {"y": {"v": 3, "u": 2}, "x": 1}).digest
    others = [ChatTemplate(Path("a"), "text", None), ChatTemplate(Path("a"), "other", first.response_template)]
    assert len({first.digest, *(other.digest for other in others)}) == 3


def test_a_template_takes_the_place_of_all_that_the_model_says_about_its_own() -> None:
    tokenizer = tiny.chat_tokenizer("its own")
    tokenizer.response_template, tokenizer.response_schema = {"fields": {}}, {"type": "object"}
    replaced = ChatTemplate(Path("a"), "another", None).replace_in(tokenizer)
    assert (replaced.chat_template, replaced.response_template, replaced.response_schema) == ("another", None, None)
    assert ChatTemplate(Path("a"), "x", {"fields": {}}).replace_in(tokenizer).response_template == {"fields": {}}


@pytest.mark.slow
def test_a_run_and_its_base_are_evaluated_with_the_template(tool_model: Path, tmp_path: Path) -> None:
    """The run saves the template, so its evaluation needs no recipe. That of the base takes the recipe's."""
    base, run, recipe = tmp_path / "base", tmp_path / "run", str(shipped("recipes", SHIPPED))
    shutil.copytree(tool_model, base)
    (base / "chat_template.jinja").unlink()
    arguments = ["--config", recipe, f"--model_name_or_path={base}", f"--output_dir={run}", "--dataset.size=16"]
    arguments += ["--bf16=false", "--max_steps=1", "--num_generations=4", "--per_device_train_batch_size=4"]
    arguments += ["--gradient_accumulation_steps=1", "--max_completion_length=400"]
    assert train.main(arguments) == 0
    saved, shipped_template = AutoTokenizer.from_pretrained(run), ChatTemplate.read(str(FOLDER))
    assert shipped_template is not None
    assert (saved.chat_template, saved.response_template) == (shipped_template.text, shipped_template.response_template)
    options: dict[str, Any] = {"limit": 4, "max_new_tokens": 200}
    of_base = evaluate.evaluate_model(base, recipe=recipe, output=tmp_path / "of-base", **options)
    of_run = evaluate.evaluate_model(run, output=tmp_path / "of-run", **options)
    assert of_base["chat_template"] == shipped_template.digest
    assert of_base["problems"] == of_run["problems"] == 4
    assert "tools" in of_run
