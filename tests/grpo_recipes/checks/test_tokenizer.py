"""Tokenizer of a recipe, and a chat template that must end each turn where generation stops."""

from __future__ import annotations

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, PretrainedConfig, Qwen2Config

from grpo_recipes.checks.tokenizer import (
    TokenizerUnavailable,
    check_chat_template,
    end_of_turn,
    load_tokenizer,
    read_tokenizer,
    stop_ids,
)
from grpo_recipes.data.rendering import first_prompt, token_lengths
from grpo_recipes.recipe.recipe import Recipe, RecipeError, parse_recipe
from grpo_recipes.recipe.specs import OfflineSpec
from tests.support import tiny
from tests.support.errors import refused

PROMPTS = [[{"role": "user", "content": "What is 1 + 2?"}]] * 4


# Tokenizer of a recipe


def save_model(folder: Path, template: str | None = tiny.CHATML, **changes: Any) -> Path:
    """Save a tokenizer and the configuration of a policy, with changes in the tokenizer_config.json."""
    tiny.chat_tokenizer(template).save_pretrained(folder)
    LlamaConfig(**{**tiny._SIZES, "eos_token_id": 257}).save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **changes}))
    return folder


def recipe_of(model: str | Path, **keys: Any) -> Recipe:
    given = {"model_name_or_path": str(model), "dataset": "arithmetic", "rewards": ["math_correctness"], **keys}
    return parse_recipe(
        [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in given.items()]
    )


ROWS = datasets.Dataset.from_dict({"prompt": PROMPTS})


def test_prompts_are_padded_and_cut_on_the_left_whatever_the_model_says(tmp_path: Path) -> None:
    model = save_model(tmp_path / "m", padding_side="right", truncation_side="right")
    assert AutoTokenizer.from_pretrained(model).padding_side == "right"
    loaded = load_tokenizer(recipe_of(model))
    assert (loaded.padding_side, loaded.truncation_side) == ("left", "left")


def test_the_tokenizer_of_the_named_revision_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def from_pretrained(name: str, **options: Any) -> Any:
        seen.append((name, *(options[key] for key in ("revision", "local_files_only", "trust_remote_code"))))
        return tiny.chat_tokenizer()

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    load_tokenizer(recipe_of("org/model"), local_only=True)
    load_tokenizer(recipe_of("org/model", model_revision="v2", trust_remote_code=True), local_only=False)
    assert seen == [("org/model", "main", True, False), ("org/model", "v2", False, True)]


def test_a_tokenizer_that_can_not_be_loaded_is_named_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("`model_name_or_path`", by=TokenizerUnavailable):
        load_tokenizer(recipe_of("./nowhere"))
    for error, reason in ((ValueError("two\nlines"), "two lines"), (KeyError(), "KeyError")):
        monkeypatch.setattr(AutoTokenizer, "from_pretrained", Mock(side_effect=error))
        with refused("`model_name_or_path`: org/model", f"({reason})", by=TokenizerUnavailable):
            load_tokenizer(recipe_of("org/model"), local_only=True)


@pytest.mark.parametrize("config", [LlamaConfig(**tiny._SIZES), Qwen2Config()], ids=["llama", "qwen2"])
def test_a_model_without_the_files_of_its_tokenizer_is_refused(config: PretrainedConfig, tmp_path: Path) -> None:
    """For Qwen2, transformers makes a tokenizer without a vocabulary."""
    config.save_pretrained(tmp_path)
    with refused(tmp_path):
        read_tokenizer(str(tmp_path))


def test_a_template_that_fails_on_a_prompt_is_a_users_error(tmp_path: Path) -> None:
    """Gemma's template, for one, raises on a system prompt."""
    refusing = "{{ raise_exception('System role not supported') if messages[0].role == 'system' }}" + tiny.CHATML
    tokenizer = load_tokenizer(recipe_of(save_model(tmp_path / "m", refusing)))
    token_lengths(ROWS, tokenizer, {})
    rows = datasets.Dataset.from_dict({"prompt": [[{"role": "system", "content": "Be brief."}, *PROMPTS[0]]]})
    for render in (token_lengths, first_prompt):
        with refused(tokenizer.name_or_path, "System role not supported"):
            render(rows, tokenizer, {})


def test_a_token_for_padding_is_needed(tmp_path: Path) -> None:
    for name in ("pad_token", "eos_token"):
        load_tokenizer(recipe_of(save_model(tmp_path / name, **{name: None})))
    neither = save_model(tmp_path / "m", pad_token=None, eos_token=None)
    with refused("", "`pad_token`", "`eos_token`", by=RecipeError):
        load_tokenizer(recipe_of(neither))


# End of a turn

PLAIN_USERS = "{% for m in messages %}{{ m.content }}{{ END if m.role == 'assistant' else '<|im_start|>' }}{% endfor %}"


@pytest.mark.parametrize(
    ("end", "found"),
    [
        ("'<|im_end|>'", 257),
        ("' <|im_end|>'", 257),
        ("'<|im_end|>x'", 257),
        ("'.'", None),
        ("''", None),
        ("raise_exception('no assistant')", None),
    ],
)
def test_the_end_of_a_turn_is_the_first_token_after_an_answer(end: str, found: int | None) -> None:
    tokenizer = tiny.chat_tokenizer(PLAIN_USERS.replace("END", end))
    assert end_of_turn(tokenizer, {}) == found
    begins = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 256)])
    tokenizer.backend_tokenizer.post_processor = begins
    assert tokenizer("a")["input_ids"][0] == 256
    assert end_of_turn(tokenizer, {}) == found, "a token that begins every text ends no turn"


def test_the_end_of_a_turn_depends_on_the_arguments_of_the_template(tmp_path: Path) -> None:
    end = "('<|im_start|>' if strange else '.' if plain else '<|im_end|>')"
    model = save_model(tmp_path / "m", PLAIN_USERS.replace("END", end))
    strange = {"chat_template_kwargs": {"strange": True}}
    with refused("", "`<|im_start|>`", by=RecipeError):
        check_chat_template(recipe_of(model, **strange), load_tokenizer(recipe_of(model)), PROMPTS[0])
    check_chat_template(recipe_of(model, **strange), load_tokenizer(recipe_of(model)), "text is no conversation")
    # A turn that ends with text has no such token, and stop strings end a turn too.
    for keys in ({}, {"chat_template_kwargs": {"plain": True}}, {**strange, "generation_kwargs": {"stop": ["."]}}):
        mine = recipe_of(model, **keys)
        check_chat_template(mine, load_tokenizer(mine), PROMPTS[0])


class FirstIsSpecial:
    """Tokenizer whose end of a turn is the token 0."""

    chat_template, eos_token_id, all_special_ids = "a template", None, (0,)

    def apply_chat_template(self, turns: list[Any], **options: Any) -> str:
        return "grpo-recipes<end>"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [0]}

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def convert_ids_to_tokens(self, number: int) -> str:
        return f"<{number}>"


@pytest.mark.parametrize(("eos", "stops"), [([5, 7], "`<5>` and `<7>`"), (None, "nothing"), (0, None)])
def test_a_token_0_may_end_a_turn(eos: Any, stops: str | None, tmp_path: Path) -> None:
    GenerationConfig(eos_token_id=eos).save_pretrained(tmp_path)
    tokenizer: Any = FirstIsSpecial()
    mine = recipe_of(tmp_path)
    assert end_of_turn(tokenizer, {}) == 0
    if stops is None:
        check_chat_template(mine, tokenizer, PROMPTS[0])
    else:
        with refused(f"`model_name_or_path`: {tmp_path}", "`<0>`", stops, by=RecipeError):
            check_chat_template(mine, tokenizer, PROMPTS[0])
        check_chat_template(replace(mine, offline=OfflineSpec("group")), tokenizer, PROMPTS[0])
    tokenizer.eos_token_id = 0
    assert (stop_ids(mine, tokenizer) or [])[0] == 0
    check_chat_template(mine, tokenizer, PROMPTS[0])


def test_a_conversation_needs_a_chat_template(tmp_path: Path) -> None:
    recipe = recipe_of(save_model(tmp_path / "m", None))
    tokenizer = load_tokenizer(recipe)
    for template in (None, ""):
        tokenizer.chat_template = template
        check_chat_template(recipe, tokenizer, "a text")
        with refused("`model_name_or_path`: ", "`dataset.prompt_format: text`", by=RecipeError):
            check_chat_template(recipe, tokenizer, PROMPTS[0])
        with refused("`dataset.prompt_format`"):
            token_lengths(ROWS, tokenizer, {})


def test_an_adapter_stops_where_its_base_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    base = tmp_path / "base"
    GenerationConfig(eos_token_id=9).save_pretrained(base)
    read = Mock(side_effect=GenerationConfig.from_pretrained)
    monkeypatch.setattr(GenerationConfig, "from_pretrained", read)
    for revision in ("v3", None):
        content = {"peft_type": "LORA", "base_model_name_or_path": str(base), "revision": revision}
        (tmp_path / "adapter_config.json").write_text(json.dumps(content))
        assert stop_ids(recipe_of(tmp_path, model_revision="v2"), tiny.chat_tokenizer()) == [257, 9]
        assert read.call_args.kwargs["revision"] == (revision or "main")


def test_without_a_generation_configuration_the_stop_ids_are_those_of_the_model(tmp_path: Path) -> None:
    recipe, tokenizer = recipe_of(tmp_path), tiny.chat_tokenizer()
    assert stop_ids(recipe, tokenizer) is None, "there is no configuration at all"
    check_chat_template(recipe, FirstIsSpecial(), PROMPTS[0])  # no file says where generation stops
    LlamaConfig(**{**tiny._SIZES, "eos_token_id": [3, 4]}).save_pretrained(tmp_path)
    assert stop_ids(recipe, tokenizer) == [257, 3, 4]
    (tmp_path / "generation_config.json").write_text("{")
    assert stop_ids(recipe, tokenizer) == [257, 3, 4]


def test_the_hub_is_asked_for_stop_ids_only_if_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(return_value=GenerationConfig(eos_token_id=9))
    monkeypatch.setattr(GenerationConfig, "from_pretrained", read)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no adapter is looked for
    for answer, is_silent in ([BytesIO()], False), (TimeoutError, True):
        monkeypatch.setattr("urllib.request.urlopen", Mock(side_effect=answer))
        assert stop_ids(recipe_of("org/model", model_revision="v2"), tiny.chat_tokenizer()) == [257, 9]
        read.assert_called_with("org/model", revision="v2", local_files_only=is_silent)
