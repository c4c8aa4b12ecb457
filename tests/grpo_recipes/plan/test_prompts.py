"""Prompts in a plan, and the chat templates that `plan` and training refuse."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig
from trl import GRPOTrainer

from grpo_recipes.checks.rewards import check_golds
from grpo_recipes.checks.tokenizer import (
    TokenizerUnavailable,
    check_chat_template,
    end_of_turn,
    load_tokenizer,
    stop_ids,
)
from grpo_recipes.cli import main
from grpo_recipes.data import prompts
from grpo_recipes.data.load import load
from grpo_recipes.plan import prompts as plan_prompts
from grpo_recipes.plan.prompts import Lengths, PromptReport, prompt_report
from grpo_recipes.recipe.recipe import RecipeError, parse_recipe
from grpo_recipes.recipe.specs import DatasetSpec
from grpo_rewards.registry import build_rewards
from tests.support import short_runs, tiny

THINKING = tiny.CHATML + "{% if not enable_thinking %}<think></think>{% endif %}"


def save_model(
    folder: Path, template: str | None = tiny.CHATML, *, eos: int = 257, tokenizer_eos: str = "<|im_end|>"
) -> Path:
    """Save a policy without weights, whose generation configuration stops at `eos`, and return its folder."""
    LlamaConfig(**{**tiny._SIZES, "eos_token_id": eos}).save_pretrained(folder)
    GenerationConfig(eos_token_id=eos).save_pretrained(folder)
    tokenizer = tiny.chat_tokenizer(template)
    tokenizer.eos_token = tokenizer_eos
    tokenizer.save_pretrained(folder)
    return folder


def write_recipe(folder: Path, model: Path, rows: int = 40, **changes: Any) -> str:
    lines = ({"question": "x" * (n + 1), "answer": str(n)} for n in range(rows))
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {
        "model_name_or_path": str(model),
        "dataset": {"path": str(folder / "rows.jsonl"), "max_prompt_tokens": 70},
        "rewards": ["math_correctness"],
        "use_cpu": True,
        "bf16": False,
        "output_dir": str(folder / "run"),
        **changes,
    }
    (folder / "mine.yaml").write_text(json.dumps(recipe))
    return str(folder / "mine.yaml")


def test_plan_shows_a_prompt_and_the_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(tmp_path / "model", THINKING)
    recipe = write_recipe(tmp_path, model, chat_template_kwargs={"enable_thinking": False})
    assert main(["plan", recipe, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["prompts"]
    # One token per byte: <|im_start|> user newline x <|im_end|> <|im_start|> assistant newline <think></think>
    expected = "<|im_start|>user\nx<|im_end|><|im_start|>assistant\n<think></think>"
    length = 1 + len("user\n") + 1 + 1 + 1 + len("assistant\n") + len("<think></think>")
    assert (shown["text"], shown["tokens"]) == (expected, length)
    lengths = np.arange(length, length + 40)
    assert shown["lengths"] == {
        **{"measured": 40, "rows": 40, "shortest": length, "median": length + 20, "percentile_95": length + 38},
        **{"longest": length + 39, "longest_kept": min(length + 39, 70), "over_limit": int((lengths > 70).sum())},
    }
    assert main(["plan", recipe]) == 0
    output = capsys.readouterr().out
    assert "\n  | <|im_start|>user\n  | x<|im_end|><|im_start|>assistant\n  | <think></think>\n" in output
    assert f"first prompt    {length} tokens, exactly as the model sees it:" in output
    assert " ".join(output.split()).count(f"{(lengths > 70).sum()} over `max_prompt_tokens` 70 are dropped") == 1


def test_the_limit_of_prompt_tokens_counts_the_output_of_template_options(tmp_path: Path) -> None:
    recipe = parse_recipe(["--config", write_recipe(tmp_path, save_model(tmp_path / "model", THINKING))])
    tokenizer, spec = load_tokenizer(recipe), replace(recipe.dataset, max_prompt_tokens=45)
    kept = {
        thinking: len(prompts.limit_prompts(load(recipe.dataset), spec, tokenizer, {"enable_thinking": thinking})[0])
        for thinking in (True, False)
    }
    assert kept[True] - kept[False] == 15


def test_without_a_tokenizer_the_messages_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, tmp_path / "elsewhere")
    config = save_model(tmp_path / "model") / "config.json"
    assert main(["plan", recipe, "--model_config", str(config), "--dataset.system_prompt", "Be brief."]) == 0
    output = capsys.readouterr().out
    assert "prompt lengths  unknown: `model_name_or_path`" in output
    assert "\n  | system: Be brief.\n  | user: x\n" in output


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (tiny.CHATML, "<|im_end|>"),
        ("{% for m in messages %}{{ m.content }} <|im_start|>{% endfor %}", "<|im_start|>"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        ("{{ raise_exception('no assistant') }}", None),
    ],
)
def test_the_token_that_ends_a_turn_is_found(template: str, ends: str | None) -> None:
    tokenizer = tiny.chat_tokenizer(template)
    found = end_of_turn(tokenizer, {})
    assert (None if found is None else tokenizer.convert_ids_to_tokens(found)) == ends


def test_a_template_whose_turns_do_not_end_where_generation_stops_is_refused(tmp_path: Path) -> None:
    """For example a base model, which stops at `<|endoftext|>`, with the template of an instruct model."""
    model = save_model(tmp_path / "model", eos=256, tokenizer_eos="<|im_start|>")
    recipe = parse_recipe(["--config", write_recipe(tmp_path, model)])
    tokenizer = load_tokenizer(recipe)
    message = (
        r"ends a turn with `<\|im_end\|>`, and generation stops only at `<\|im_start\|>`, so that every completion"
    )
    with pytest.raises(RecipeError, match=message):
        check_chat_template(recipe, tokenizer, load(recipe.dataset)[0]["prompt"])
    check_chat_template(recipe, tokenizer, "text is no conversation")
    assert main(["plan", str(tmp_path / "mine.yaml")]) == 2
    # TRL reads both, so either the generation configuration or the tokenizer may be right.
    for eos, token in ((257, "<|im_start|>"), (256, "<|im_end|>")):
        folder = save_model(tmp_path / f"right-{eos}", eos=eos, tokenizer_eos=token)
        right = parse_recipe(["--config", write_recipe(tmp_path, folder)])
        check_chat_template(right, load_tokenizer(right), load(right.dataset)[0]["prompt"])


@pytest.mark.parametrize("eos", [1, [1, 5, 7], None])
def test_the_stop_ids_are_those_of_trl(tmp_path: Path, eos: Any) -> None:
    policy = tiny.policy()
    policy.generation_config.eos_token_id = eos
    policy.save_pretrained(tmp_path / "model")
    tiny.byte_tokenizer().save_pretrained(tmp_path / "model")
    model = short_runs.load(tmp_path / "model")
    args = short_runs.arguments(tmp_path / "out", beta=0.0)
    theirs = short_runs.trainer(GRPOTrainer, model, args).eos_token_ids
    recipe = parse_recipe(["--config", write_recipe(tmp_path, tmp_path / "model")])
    assert stop_ids(recipe, AutoTokenizer.from_pretrained(tmp_path / "model")) == theirs


def test_golds_of_a_large_table_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "SAMPLE", 50)
    lines = ({"question": f"{n}?", "answer": "" if n % 10 == 0 else str(n)} for n in range(500))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = load(DatasetSpec.parse({"path": str(tmp_path / "rows.jsonl")}))
    found = check_golds(build_rewards(["math_correctness"]), table)
    assert found is not None
    sampled = [int(row) for row in prompts.sample_of_rows(500)]
    assert found.total == len(sampled) == 50
    assert [place.number for place in found.places] == [row + 1 for row in sampled if row % 10 == 0]
    assert f"{found.count} of 50 golds (a random sample of 500 rows) can't be scored" in found.describe()
    assert found.as_dict()["dataset_rows"] == 500
    summary = Lengths.of(np.array([3, 5, 9]), 500, 4)
    assert "of a random sample of 3 of 500" in summary.describe(
        DatasetSpec.parse({"path": "x", "max_prompt_tokens": 4})
    )


# ---- The report on prompts, from lengths that are given


def given(**changes: Any) -> Any:
    """Return a recipe with the keys that a report on prompts reads."""
    values: dict[str, Any] = {
        "config": SimpleNamespace(chat_template_kwargs=None, max_tool_calling_iterations=5),
        "model": {"model_name_or_path": "some/model"},
        "dataset": SimpleNamespace(max_prompt_tokens=3),
        "tool_limits": SimpleNamespace(result_tokens=9),
        "naming_this_file": nullcontext,
        "source": "r.yaml",
    }
    return SimpleNamespace(**{**values, **changes})


class Toolset:
    """Tools that lengthen each prompt by 100 tokens, and name the environment of a row in the template's options."""

    def in_prompts(self, chat_template: str) -> Any:
        assert chat_template == "for training"
        return self

    def template_kwargs(self, environment: Any) -> dict[str, Any]:
        return {"tools": environment}


TABLE = datasets.Dataset.from_dict({"prompt": ["a", "bb", "ccc", "dddd"], prompts.ENVIRONMENT: ["w", "x", "y", "z"]})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace the tokenizer by one token for each letter, and return the arguments of some calls."""
    found: list[Any] = []

    def token_lengths(table: Any, tokenizer: str, kwargs: Any, tools: Any = None) -> np.ndarray:
        found.append((len(table), kwargs))
        return np.array([len(text) + (100 if tools else 0) for text in table["prompt"]])

    def load_tokenizer(recipe: Any, *, local_only: bool) -> str:
        found.append(local_only)
        return "tokenizer"

    monkeypatch.setattr(plan_prompts, "hub_answers", lambda: False)
    monkeypatch.setattr(plan_prompts, "load_tokenizer", load_tokenizer)
    monkeypatch.setattr(plan_prompts, "check_chat_template", lambda *given: found.append(given[1:]))
    monkeypatch.setattr(plan_prompts, "check_template", lambda *_: "for training")
    monkeypatch.setattr(plan_prompts, "token_lengths", token_lengths)
    monkeypatch.setattr(prompts, "rendered", lambda first, tokenizer, kwargs: f"{first} {tokenizer} {kwargs}")
    return found


def test_a_report_without_tools_has_the_lengths_and_the_first_prompt(calls: list[Any]) -> None:
    report = prompt_report(given(), TABLE)
    assert report == PromptReport("a tokenizer {}", 1, Lengths(4, 4, 1, 3, 4, 4, 3, 1), None)
    assert calls[:3] == [True, ("tokenizer", "a"), (4, {})]
    with_options = given(config=SimpleNamespace(chat_template_kwargs={"thinks": False}, max_tool_calling_iterations=5))
    assert prompt_report(with_options, TABLE).text == "a tokenizer {'thinks': False}"


@pytest.mark.parametrize(
    ("sample", "lengths"), [([1, 3], (2, 4, 2, 4, 4, 4, 2, 1)), ([0, 3], (2, 4, 1, 4, 4, 4, 1, 1))]
)
@pytest.mark.usefixtures("calls")
def test_the_first_prompt_is_counted_if_the_sample_misses_it(
    sample: list[int], lengths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_prompts, "sample_of_rows", lambda count: np.array(sample))
    report = prompt_report(given(), TABLE)
    assert (report.tokens, report.lengths) == (1, Lengths(*lengths))


def test_tools_lengthen_the_first_prompt(calls: list[Any]) -> None:
    tools: Any = Toolset()
    report = prompt_report(given(), TABLE, tools)
    assert (report.text, report.tokens) == ("a tokenizer {'tools': 'w'}", 101)


@pytest.mark.parametrize(("name", "answers", "local_only"), [("some/model", True, False), ("some/model", False, True),
                                                            (".", True, True)])  # fmt: skip
def test_the_hub_is_asked_for_a_tokenizer_if_it_answers(
    name: str, answers: bool, local_only: bool, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_prompts, "hub_answers", lambda: answers)
    prompt_report(given(model={"model_name_or_path": name}), TABLE)
    assert calls[0] == local_only


def test_a_report_without_a_tokenizer_has_the_messages_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TokenizerUnavailable("r.yaml: no tokenizer")

    monkeypatch.setattr(plan_prompts, "hub_answers", lambda: False)
    monkeypatch.setattr(plan_prompts, "load_tokenizer", fail)
    assert prompt_report(given(), TABLE) == PromptReport("a", None, None, "no tokenizer")
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2"}]
    chats = datasets.Dataset.from_dict({"prompt": [turns, turns[1:]]})
    assert prompt_report(given(), chats).text == "system: Be brief.\nuser: 2 + 2"
