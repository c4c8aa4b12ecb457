"""benchmarks/real_model_tools.py with a tiny model: its demonstrations and its page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pandas
import pytest

from grpo_recipes import Recipe
from grpo_recipes.checks.tokenizer import load_tokenizer
from tests.repo.test_real_model import OneAfterTheOther
from tests.support import tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def real_model_tools(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import real_model_tools

    return real_model_tools


def test_demonstrations_are_right_and_rendered_as_the_policy_must_write_them(
    real_model_tools: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_model_tools, "DEMONSTRATIONS", 20)
    tiny.chat_tokenizer().save_pretrained(tmp_path)
    tiny.policy(vocab_size=258).save_pretrained(tmp_path)
    recipe = Recipe.load(real_model_tools.RECIPE, model_name_or_path=str(tmp_path))
    rows = real_model_tools.demonstrations(recipe)
    assert len(rows) == len({row["messages"][1]["content"] for row in rows}) == 20
    tokenizer = load_tokenizer(recipe)
    for row in rows:
        question = row["messages"][1]["content"]
        a, b = map(int, re.fullmatch(r"What is (\d+) \* (\d+)\?", question).groups())  # type: ignore[union-attr]
        options = {"tools": json.loads(row["tools"]), "return_dict": True, "return_assistant_tokens_mask": True}
        rendered = tokenizer.apply_chat_template(row["messages"], **options)
        learnt = [token for token, mask in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True) if mask]
        call = f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{a}*{b}"}}}}</tool_call>'
        assert tokenizer.decode(learnt) == f"{call}<|im_end|>The result is \\boxed{{{a * b}}}.<|im_end|>"


@pytest.mark.slow
def test_a_warm_start_and_one_seed_of_a_tiny_model(
    real_model_tools: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page has the figures of the files, and nothing runs twice."""
    tiny.policy(vocab_size=258, max_position_embeddings=2048).save_pretrained(tmp_path / "model")
    tiny.chat_tokenizer().save_pretrained(tmp_path / "model")
    recipe = real_model_tools.RECIPE.read_text()
    for before, after in (
        (r"max_steps: \d+", "max_steps: 1"),
        ("max_completion_length: .*", "max_completion_length: 60"),
        (r"chat_template_path: (\S+)", f"chat_template_path: {real_model_tools.RECIPE.parent}/\\1"),
        ("bf16: true", "bf16: false"),
    ):
        recipe, count = re.subn(before, after, recipe)
        assert count == 1, before
    (tmp_path / "recipe.yaml").write_text(recipe)
    small = {"RECIPE": tmp_path / "recipe.yaml", "HELD_OUT": 4, "DEMONSTRATIONS": 8, "WARM_STEPS": 1}
    for name, value in small.items():
        monkeypatch.setattr(real_model_tools, name, value)
    monkeypatch.setattr(real_model_tools, "RESULTS", tmp_path / "page.md")
    # In this process: another one would have the module's own sizes.
    started: list[str] = []

    def start(folder: Path, name: str, script: Path) -> None:
        if not (folder / "runs" / f"{name}.json").is_file():
            started.append(name)
            real_model_tools.run(folder, name)

    monkeypatch.setattr(real_model_tools, "start", start)
    monkeypatch.setattr(real_model_tools, "ThreadPoolExecutor", OneAfterTheOther)
    for seeds in (["--seeds", "0"], ["--seeds", "0"], ["--record"]):
        monkeypatch.setattr("sys.argv", ["real_model_tools.py", "--output", str(tmp_path), *seeds])
        assert real_model_tools.main() == 0
    assert started == ["warm-start", "grpo-0"]
    table = (tmp_path / "page.md").read_text().split("intervals\n\n")[1].split("\n\nStrict accuracy by wording")[0]
    assert capsys.readouterr().out.strip().endswith(table)
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    assert [row[0] for row in rows] == ["base model", "warm start", "GRPO, seed 0"]
    found = {
        name: pandas.read_parquet(tmp_path / "evaluated" / f"tools-{name}" / "completions.parquet")
        for name in ("warm-start", "grpo-0")
    }
    for row, name in zip(rows[1:], found, strict=True):
        assert float(row[1].split()[0]) == pytest.approx(found[name]["strict"].mean(), abs=1e-3)
        assert float(row[2].split()[0]) == pytest.approx((found[name]["calls"] > 0).mean(), abs=1e-3)
    gain = found["grpo-0"]["strict"].mean() - found["warm-start"]["strict"].mean()
    assert float(rows[2][3].split()[0]) == pytest.approx(gain, abs=1e-3)
