"""Model card of a run: useful on another machine, without local paths."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from grpo_recipes.reports.model_card import _dataset, _without_paths, write_model_card


def record(**changes: Any) -> dict[str, Any]:
    recipe = {
        "model_name_or_path": "Qwen/Qwen2.5-1.5B-Instruct",
        "dataset": {"name": "gsm8k"},
        "rewards": [{"name": "gsm8k_correctness", "kwargs": {"tags": ["think", "answer"]}}],
        "learning_rate": 1e-5,
        "output_dir": "/home/ann/runs/x",
    }
    return {
        "recipe": {**recipe, **changes.pop("recipe", {})},
        "arguments": ["--config", "gsm8k-qwen2.5-1.5b-lora", "--learning_rate=1e-5"],
        "directory": "/",
        "rewards": [
            {"name": "gsm8k_correctness", "source": "gsm8k_correctness", "weight": 1.0},
            {"name": "tag_presence", "source": "tag_presence", "weight": 0.25},
        ],
        "world_size": 1,
        "train_prompts": 7473,
        "versions": {"grpo-recipes": "0.1.0", "trl": "1.16.0"},
        **changes,
    }


def card(folder: Path, **changes: Any) -> ModelCard:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(record(**changes)))
    write_model_card(folder)
    return ModelCard.load(folder / "README.md")


def recipe_in(text: str) -> dict[str, Any]:
    return yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])


def test_model_and_data_on_the_hub_are_linked(tmp_path: Path) -> None:
    written = card(tmp_path / "my-run")
    assert written.data.base_model == "Qwen/Qwen2.5-1.5B-Instruct"
    assert written.data.datasets == ["openai/gsm8k"]
    text = written.text
    assert text.startswith("\n# my-run\n")
    assert "[Qwen/Qwen2.5-1.5B-Instruct](https://huggingface.co/Qwen/Qwen2.5-1.5B-Instruct), trained with GRPO" in text
    assert "7,473 prompts of [openai/gsm8k](https://huggingface.co/datasets/openai/gsm8k)" in text
    assert "python -m grpo_recipes.train --config gsm8k-qwen2.5-1.5b-lora --learning_rate=1e-5\n" in text
    assert "| `gsm8k_correctness` | 1 |" in text
    assert "| `tag_presence` | 0.25 |" in text
    assert "| trl | 1.16.0 |" in text
    assert "Accuracy" not in text
    recipe = recipe_in(text)
    assert recipe["rewards"][0]["kwargs"] == {"tags": ["think", "answer"]}
    assert "output_dir" not in recipe


def test_local_paths_are_cut_to_their_last_part(tmp_path: Path) -> None:
    for name in ("sft", "judge"):
        (tmp_path / "models" / name).mkdir(parents=True)
    (tmp_path / "rows.jsonl").touch()
    rewards = [{"name": "reward_model", "kwargs": {"model": str(tmp_path / "models" / "judge")}}]
    written = card(
        tmp_path / "run",
        directory=str(tmp_path),
        world_size=2,
        arguments=[
            "--config",
            str(tmp_path / "x.yaml"),
            f"--reference={{adapter: {tmp_path}/models/sft}}",
            "--a=~/b c",
        ],
        recipe={
            "model_name_or_path": str(tmp_path / "models" / "sft"),
            "dataset": {"name": "gsm8k", "path": str(tmp_path / "rows.jsonl")},
            "rewards": rewards,
            "vllm_server_base_url": "http://node7:8000/v1",
            "reference": {"adapter": "/mnt/big/ref"},
        },
    )
    whole = (tmp_path / "run" / "README.md").read_text()
    for gone in ("None", str(tmp_path), "models/", "/mnt", "~", "huggingface.co"):
        assert gone not in whole, gone
    assert (written.data.base_model, written.data.datasets) == (None, None)
    assert "`sft`, trained with GRPO on 7,473 prompts of `rows.jsonl`" in whole
    assert "accelerate launch --num_processes 2 -m grpo_recipes.train --config x.yaml" in whole
    recipe = recipe_in(whole)
    assert recipe["rewards"] == [{"name": "reward_model", "kwargs": {"model": "judge"}}]
    assert recipe["vllm_server_base_url"] == "http://node7:8000/v1"


def test_the_card_of_an_adapter_names_its_base(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen2.5-7B"}))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "adapter_config.json").write_text("{}")
    written = card(tmp_path / "run", recipe={"model_name_or_path": str(tmp_path / "sft")})
    assert (written.data.base_model, written.data.library_name) == ("Qwen/Qwen2.5-7B", "peft")


@pytest.mark.parametrize("made_here", ["arithmetic", "scored"])
def test_generated_data_is_not_linked_to_the_hub(tmp_path: Path, made_here: str) -> None:
    written = card(tmp_path / "run", recipe={"dataset": {"name": made_here}})
    assert written.data.datasets is None
    assert f"prompts of `{made_here}` by" in written.text


def test_measured_accuracy_is_shown_with_its_intervals(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "evaluations" / "after"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "trainer_state.json").write_text('{"global_step": 1, "log_history": []}')
    shares = {
        "strict": {"value": 0.75, "low": 0.705, "high": 0.79},
        "lenient": {"value": 0.8, "low": 0.76, "high": 0.84},
    }
    (folder / "evaluation.json").write_text(json.dumps({"problems": 400, "settings": {"samples": 1}, **shares}))
    text = card(tmp_path / "run").text
    assert "| after | 400 | 0.750 [0.705, 0.790] | 0.800 [0.760, 0.840] |" in text


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        ({"name": "gsm8k"}, "openai/gsm8k"),
        ({"name": "arithmetic"}, "arithmetic"),
        ({"name": "gsm8k", "path": "rows.jsonl"}, "rows.jsonl"),
        ({"path": "rows.jsonl"}, "rows.jsonl"),
        ({"path": [{"path": "a.jsonl"}]}, "a.jsonl"),
        ({"path": [{"path": "a.jsonl"}, {"path": "b.jsonl"}, {"path": "c.jsonl"}]}, "a.jsonl and 2 more"),
    ],
)
def test_the_source_of_the_rows_is_named(spec: dict[str, Any], shown: str) -> None:
    assert _dataset({"recipe": {"dataset": spec}}) == shown


@pytest.mark.parametrize(("processes", "launcher"), [(1, "python"), (2, "accelerate launch --num_processes 2")])
def test_a_card_has_the_command_for_as_many_processes(processes: int, launcher: str, tmp_path: Path) -> None:
    assert f"```bash\n{launcher} -m grpo_recipes.train --config " in card(tmp_path, world_size=processes).text


CARD = """---
base_model: Qwen/Qwen2.5-1.5B-Instruct
datasets:
- openai/gsm8k
library_name: transformers
pipeline_tag: text-generation
tags:
- grpo
- grpo-recipes
- trl
---

# my-run

[Qwen/Qwen2.5-1.5B-Instruct](https://huggingface.co/Qwen/Qwen2.5-1.5B-Instruct), trained with GRPO on 7,473 prompts of \
[openai/gsm8k](https://huggingface.co/datasets/openai/gsm8k) by grpo-recipes 0.1.0 with \
[TRL](https://github.com/huggingface/trl).

## Rewards

| reward | weight |
|---|---|
| `gsm8k_correctness` | 1 |
| `tag_presence` | 0.25 |

## Recipe

```bash
python -m grpo_recipes.train --config gsm8k-qwen2.5-1.5b-lora --learning_rate=1e-5
```

Resolved from the file and the command line. Every other key has TRL's default:

```yaml
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
dataset:
  name: gsm8k
rewards:
- name: gsm8k_correctness
  kwargs:
    tags:
    - think
    - größer
learning_rate: 1.0e-05
```

## Versions

| | |
|---|---|
| grpo-recipes | 0.1.0 |
| trl | 1.16.0 |
"""


def test_a_card_has_all_its_sections_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = [{"name": "gsm8k_correctness", "kwargs": {"tags": ["think", "größer"]}}]
    card(tmp_path / "my-run", recipe={"rewards": rewards, "resume_from_checkpoint": "last"})
    assert (tmp_path / "my-run" / "README.md").read_text(encoding="utf-8") == CARD
    monkeypatch.chdir(tmp_path / "my-run")
    write_model_card(Path())
    assert Path("README.md").read_text(encoding="utf-8") == CARD, "named by its folder, however that is given"


def test_secrets_are_not_on_a_card(tmp_path: Path) -> None:
    secret = "hf_abcdefghijklmnopqrst"
    text = card(tmp_path, arguments=["--hub_token", secret], recipe={"hub_token": secret}).text
    assert secret not in text
    assert text.count("hub_token") == 2
    assert "python -m grpo_recipes.train \n" in card(tmp_path, arguments=None).text


@pytest.mark.parametrize("name", ["mine/sft", "a b/c", "x/y/z"])
def test_a_name_that_is_not_on_the_hub_is_not_linked(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine" / "sft").mkdir(parents=True)
    recipe = {"model_name_or_path": name, "dataset": {"path": name}}
    written = card(tmp_path / "run", directory=str(tmp_path), recipe=recipe)
    assert (written.data.base_model, written.data.datasets) == (None, None)
    last = name.rpartition("/")[2]
    assert f"`{last}`, trained with GRPO on 7,473 prompts of `{last}` by" in written.text


def test_an_adapter_is_found_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen2.5-7B"}))
    written = card(tmp_path / "run", directory=str(tmp_path), recipe={"model_name_or_path": "sft"})
    assert (written.data.base_model, written.data.library_name) == ("Qwen/Qwen2.5-7B", "transformers")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("data/rows.jsonl", "data/rows.jsonl"),
        ("--config=/data/a=b.yaml", "--config=a=b.yaml"),
        ("a=/home/ann/x.yaml", "a=x.yaml"),
        ("see /home/ann/x.yaml, ~/y", "see x.yaml, y"),
        ("--resume", "--resume"),
        (".", "."),
        ("", ""),
        ("1/2 of </think> at https://a.b/c", "1/2 of </think> at https://a.b/c"),
        ({"path": ["/home/ann/x", 3, None], "rate": 0.5}, {"path": ["x", 3, None], "rate": 0.5}),
        (("/home/ann/x", True), ["x", True]),
    ],
    ids=str,
)
def test_an_absolute_path_is_cut_wherever_it_stands(value: Any, shown: Any) -> None:
    assert _without_paths(value) == shown
