"""Prompts in a plan, and the chat templates that `plan` and training refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig
from trl import GRPOTrainer

from grpo_recipes.checks.tokenizer import load_tokenizer, stop_ids
from grpo_recipes.cli import main
from grpo_recipes.data import tables
from grpo_recipes.data.load import load
from grpo_recipes.data.rendering import token_lengths
from grpo_recipes.plan.prompts import Lengths, prompt_report
from grpo_recipes.recipe.dataset import DatasetSpec
from grpo_recipes.recipe.recipe import parse_recipe
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


def test_without_a_tokenizer_the_messages_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, tmp_path / "elsewhere")
    config = save_model(tmp_path / "model") / "config.json"
    more = ["--model_config", str(config), "--dataset.system_prompt", "Be brief."]
    assert main(["plan", recipe, *more, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["prompts"]
    assert (shown["text"], shown["tokens"], shown["lengths"]) == ("system: Be brief.\nuser: x", None, None)
    assert "`model_name_or_path`" in shown["unknown"]
    assert recipe not in shown["unknown"]


@pytest.mark.parametrize("eos", [[1, 5, 7], None])
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


def test_the_first_prompt_is_counted_if_the_sample_misses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SAMPLE", 5)
    recipe = parse_recipe(["--config", write_recipe(tmp_path, save_model(tmp_path / "model"), rows=9)])
    rows = load(recipe.dataset)
    report = prompt_report(recipe, rows)
    lengths = token_lengths(rows, load_tokenizer(recipe), {})
    assert report.tokens == lengths[0] == lengths.min()
    sampled = lengths[tables.sample_of_rows(9)]
    assert report.lengths == Lengths.of(sampled, 9, 70)
    assert (report.lengths.measured, report.lengths.rows, report.lengths.shortest) == (5, 9, sampled.min())


def double(number: int) -> int:
    """Double a number.

    Args:
        number: Number to double.
    """
    return 2 * number


def test_tools_lengthen_every_prompt(tmp_path: Path, tool_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for tools in ([], [f"{__name__}.double"]):
        changes = {"tools": tools, "max_tool_calling_iterations": 2} if tools else {}
        recipe = write_recipe(tmp_path, tool_model, dataset={"path": str(tmp_path / "rows.jsonl")}, **changes)
        assert main(["plan", recipe, "--json"]) == 0, capsys.readouterr().err
        found.append(json.loads(capsys.readouterr().out)["prompts"])
    plain, with_tools = found
    assert "double" in with_tools["text"]
    more = with_tools["tokens"] - plain["tokens"]
    assert more > 0
    for key in ("shortest", "median", "longest"):
        assert with_tools["lengths"][key] - plain["lengths"][key] == more


def test_the_lengths_of_prompts_are_summed_up() -> None:
    lengths = np.array([9, 70, 71, 90, 30])
    found = Lengths.of(lengths, 5, 70)
    assert (found.shortest, found.median, found.percentile_95, found.longest, found.over_limit) == (9, 70, 90, 90, 2)
    assert (found.longest_kept, found.is_sample) == (70, False)
    assert Lengths.of(lengths, 1_500, None).is_sample
    drop = DatasetSpec.parse({"path": "x", "max_prompt_tokens": 70})
    assert "2 over `max_prompt_tokens` 70" in found.describe(drop)
    cut = DatasetSpec.parse({"path": "x", "max_prompt_tokens": 75, "overlong_prompts": "cut_left"})
    assert Lengths.of(lengths, 5, 75).longest_trained(cut) == 75
    assert Lengths.of(lengths, 5, 75).longest_trained(drop) == 71
