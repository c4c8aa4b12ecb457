"""Sentences, decisions and changes of a plan, each from values written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from grpo_recipes.plan import plan as plans
from grpo_recipes.plan.layout import Records, as_json
from grpo_recipes.plan.memory import load_model
from grpo_recipes.plan.plan import (
    _keeps_groups_together,
    _longest_prompt,
    _model_is_made_elsewhere,
    _position_notes,
    _reward_parameters,
    _unbuilt,
    resolved_yaml,
    shipped_recipes,
)
from grpo_recipes.plan.prompts import Lengths, PromptReport
from grpo_recipes.recipe.recipe import find_file
from grpo_recipes.recipe.specs import DatasetSpec
from grpo_recipes.recipe.trl_keys import ignored_keys
from grpo_recipes.training.packing import Layout
from grpo_rewards.registry import UnbuiltReward, build_rewards
from tests.support import tiny

# ---- Layout, tokens, notes


def test_recorded_layouts_are_written_with_the_most_preferred_first() -> None:
    text = as_json(Records("5.0", {"b": Layout.PACKED, "a": Layout.PACKED, "c": Layout.TRIMMED}))
    assert text.splitlines()[:4] == ["{", '  "transformers": "5.0",', '  "layouts": {', '    "packed": ["a", "b"],']
    content = json.loads(text)
    assert list(content["layouts"]) == [layout.name.lower() for layout in sorted(Layout, reverse=True)]
    assert (content["layouts"]["trimmed"], content["layouts"]["padded"]) == (["c"], [])


def geometry(**changes: Any) -> Any:
    values: dict[str, Any] = {
        **{"num_generations": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 4},
        **{"splits_groups": False, "completions_per_rank": 32},
    }
    return SimpleNamespace(**{**values, **changes})


def recipe(**changes: Any) -> Any:
    values: dict[str, Any] = {
        **{"loss_type": "dapo", "entropy_coef": 0.0, "use_adaptive_entropy": False, "top_entropy_quantile": 1.0},
        **{"steps_per_generation": None},
    }
    return SimpleNamespace(config=SimpleNamespace(**{**values, **changes}))


@pytest.mark.parametrize(
    ("changes", "batch", "together"),
    [
        ({}, {}, True),
        ({"loss_type": "unknown"}, {}, False),
        ({"entropy_coef": 0.01}, {}, False),
        ({"use_adaptive_entropy": True}, {}, False),
        ({"top_entropy_quantile": 0.8}, {}, False),
        ({}, {"splits_groups": True}, False),
        ({}, {"num_generations": 1}, False),
        ({}, {"num_generations": 2}, True),
        ({}, {"gradient_accumulation_steps": 6}, False),  # an optimizer step ends inside a generation batch
        ({}, {"gradient_accumulation_steps": 8}, True),
        ({}, {"gradient_accumulation_steps": 2}, False),
    ],
    ids=str,
)
def test_rows_move_between_micro_batches_where_no_statistic_of_one_needs_them(
    changes: dict[str, Any], batch: dict[str, Any], together: bool
) -> None:
    assert _keeps_groups_together(recipe(**changes), geometry(**batch)) is together


def test_a_note_names_positions_that_the_model_was_not_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_recipes.plan.plan.model_positions", lambda recipe: 2_048)
    run: Any = recipe(max_completion_length=1_024)
    assert _position_notes(run, 1_024) == []
    assert _position_notes(run, 1_025) == [
        "`max_completion_length` 1,024 after a prompt of 1,025 tokens needs 2,049 positions, and the model was made "
        "for 2,048 (`max_position_embeddings`): lower it"
    ]
    monkeypatch.setattr("grpo_recipes.plan.plan.model_positions", lambda recipe: None)
    assert _position_notes(run, 10**6) == []


# ---- Prompts

SPEC = DatasetSpec.parse({"path": "x", "max_prompt_tokens": 70})


def test_the_lengths_of_prompts_are_summed_up() -> None:
    lengths = np.array([9, 70, 71, 90, 30])
    found = Lengths.of(lengths, 5, 70)
    assert (found.shortest, found.median, found.percentile_95, found.longest, found.over_limit) == (9, 70, 90, 90, 2)
    assert "2 over `max_prompt_tokens` 70 are dropped" in found.describe(SPEC)
    cut = DatasetSpec.parse({"path": "x", "max_prompt_tokens": 75, "overlong_prompts": "cut_left"})
    assert Lengths.of(lengths, 5, 75).longest_trained(cut) == 75
    assert "of a random sample of 5 of 1,500" in Lengths.of(lengths, 1_500, None).describe(SPEC)


@pytest.mark.parametrize(
    ("lengths", "rows", "limit", "longest", "note"),
    [
        ([9, 17_721], 2, None, 17_721, ""),
        ([9, 60, 17_721], 3, 70, 60, ""),  # dropped prompts do not count
        ([9, 17_721], 2_000, None, 17_721, "sample"),
        ([9, 60], 2_000, 70, 60, "sample"),
        ([90, 91], 2, 70, 70, ""),
        (None, 2, 70, 70, ""),
        (None, 2, None, 512, "taken to have 512"),
    ],
)
def test_memory_is_that_of_the_longest_measured_prompt(
    lengths: list[int] | None, rows: int, limit: int | None, longest: int, note: str
) -> None:
    spec = DatasetSpec.parse({"path": "x", **({} if limit is None else {"max_prompt_tokens": limit})})
    summary = None if lengths is None else Lengths.of(np.array(lengths), rows, limit)
    given: Any = SimpleNamespace(dataset=spec)
    tokens, notes = _longest_prompt(given, PromptReport("", None, summary, None))
    assert tokens == longest
    assert note in "".join(notes)
    assert len(notes) == bool(note)


def test_a_report_on_prompts() -> None:
    lengths = Lengths.of(np.array([9]), 1, 70)
    report = PromptReport("a\nb", 9, lengths, None)
    head, prompt = report.describe(SPEC)
    assert head == [
        f"  prompt lengths  {lengths.describe(SPEC)}",
        "  first prompt    9 tokens, exactly as the model sees it:",
    ]
    assert prompt == ["  | a", "  | b"]
    unknown = PromptReport("user: a", None, None, "no tokenizer")
    assert unknown.describe(SPEC)[0] == [
        "  prompt lengths  unknown: no tokenizer",
        "  first prompt    its messages, before the chat template:",
    ]
    assert unknown.as_dict() == {"text": "user: a", "tokens": None, "lengths": None, "unknown": "no tokenizer"}


# ---- Recipes and rewards


def test_the_first_sentence_of_a_recipes_head_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "It trains a model " + "on many prompts " * 6
    heads = {
        "first": f"# {long}by Dr. GRPO.\n#  And more. Of it\n#\n# Other.\nkey: 1  #\n",
        "second": "# One\n# line\nkey: 1\n",
    }
    for name, text in heads.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(plans, "shipped_files", lambda kind: {name: tmp_path / name for name in heads})
    first, *lines = shipped_recipes().split("\n")
    assert first == "The shipped recipes; `grpo-recipes plan NAME` describes one of them."
    assert lines[:2] == ["", "  first"]
    wrapped = lines[2:-3]
    assert len(wrapped) == 2
    assert all(line.startswith("    ") and len(line) <= 100 for line in wrapped)
    assert " ".join(line.strip() for line in wrapped) == f"{long}by Dr. GRPO"
    assert lines[-3:] == ["", "  second", "    One line"]


def test_a_resolved_recipe_keeps_its_order_and_its_letters() -> None:
    text = resolved_yaml(["--config", "quickstart", "--output_dir", "läufe", "--loss_type", "grpo"], ["--json"])
    keys = [line.partition(":")[0] for line in text.splitlines() if line[0].isalpha()]
    assert keys != sorted(keys)
    assert "output_dir: läufe\n" in text
    ignored = set(ignored_keys("grpo"))
    assert ignored
    assert not ignored & {*keys}


def test_models_of_rewards_count_where_the_training_gpu_holds_them(tmp_path: Path) -> None:
    tiny.save_reward_model(tmp_path / "a")
    size = load_model(str(tmp_path / "a"))[0].parameters
    model = {"name": "reward_model", "kwargs": {"model": str(tmp_path / "a")}}
    judge = {"name": "judge", "kwargs": {"model": "e/f", "base_url": "http://127.0.0.1:8000/v1"}}
    on_cpu = {"name": "reward_model", "kwargs": {**model["kwargs"], "device": "cpu"}}
    missing = {"name": "reward_model", "kwargs": {"model": "./none"}}
    gate = {"name": "gate", "reward": "math_correctness", "only_if": model, "at_least": 0.5}
    notes: list[str] = []
    for specs, expected in (([judge, on_cpu], 0), ([gate, judge], size), ([missing], 0)):
        assert _reward_parameters(build_rewards(specs), notes) == expected
    assert len(notes) == 1
    assert "./none is not counted" in notes[0]


def test_rewards_that_were_not_built_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "leaves", lambda rewards: rewards)
    rewards: Any = [SimpleNamespace(name=name, unbound=UnbuiltReward(name) if name == "b" else print) for name in "ab"]
    assert "imported and not built: `b`" in _unbuilt(rewards)[0]
    assert _unbuilt(rewards[:1]) == []


@pytest.mark.parametrize(
    ("name", "arguments", "elsewhere"),
    [
        ("quickstart.yaml", ["--config", "quickstart"], True),
        ("quickstart.yaml", ["--config", "quickstart", "--model_name_or_path", "a/b"], False),
        ("quickstart.yaml", ["--config", "quickstart", "--model_name_or_path=a/b"], False),
        ("mine.yaml", ["--config", "mine.yaml"], False),
    ],
)
def test_only_a_shipped_recipe_may_name_a_model_that_is_made_later(
    name: str, arguments: list[str], elsewhere: bool
) -> None:
    source = find_file("recipes", "quickstart").with_name(name)
    given: Any = SimpleNamespace(source=str(source), arguments=arguments)
    assert _model_is_made_elsewhere(given) is elsewhere
