"""Model card of a run: useful on another machine, without local paths."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from grpo_recipes.reports.model_card import write_model_card


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
    assert (written.data.library_name, written.data.tags) == ("transformers", ["grpo", "grpo-recipes", "trl"])
    text = written.text
    for shown in (
        "\n# my-run\n",
        "[Qwen/Qwen2.5-1.5B-Instruct](https://huggingface.co/Qwen/Qwen2.5-1.5B-Instruct)",
        "7,473",
        "[openai/gsm8k](https://huggingface.co/datasets/openai/gsm8k)",
        "python -m grpo_recipes.train --config gsm8k-qwen2.5-1.5b-lora --learning_rate=1e-5\n",
        "| `tag_presence` | 0.25 |",
        "| trl | 1.16.0 |",
    ):
        assert shown in text
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
        arguments=["--config", f"{tmp_path}/x.yaml", f"--reference={{adapter: {tmp_path}/models/sft}}", "--a=~/b c"],
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
    assert all(name in whole for name in ("`sft`", "`rows.jsonl`"))
    assert "accelerate launch --num_processes 2 -m grpo_recipes.train --config x.yaml" in whole
    recipe = recipe_in(whole)
    assert recipe["rewards"] == [{"name": "reward_model", "kwargs": {"model": "judge"}}]
    assert recipe["vllm_server_base_url"] == "http://node7:8000/v1"


def test_the_card_of_an_adapter_names_its_base(tmp_path: Path) -> None:
    (tmp_path / "sft").mkdir()
    (tmp_path / "sft" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen2.5-7B"}))
    (tmp_path / "run").mkdir()
    written = card(tmp_path / "run", directory=str(tmp_path), recipe={"model_name_or_path": "sft"})
    assert (written.data.base_model, written.data.library_name) == ("Qwen/Qwen2.5-7B", "transformers")
    (tmp_path / "run" / "adapter_config.json").write_text("{}")
    written = card(tmp_path / "run", recipe={"model_name_or_path": str(tmp_path / "sft")})
    assert (written.data.base_model, written.data.library_name) == ("Qwen/Qwen2.5-7B", "peft")


def test_measured_accuracy_is_shown_with_its_intervals(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "evaluations" / "after"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "trainer_state.json").write_text('{"global_step": 1, "log_history": []}')
    strict, lenient = {"value": 0.75, "low": 0.705, "high": 0.79}, {"value": 0.8, "low": 0.76, "high": 0.84}
    shares = {"strict": strict, "lenient": lenient}
    (folder / "evaluation.json").write_text(json.dumps({"problems": 400, "settings": {"samples": 1}, **shares}))
    text = card(tmp_path / "run").text
    assert "| after | 400 | 0.750 [0.705, 0.790] | 0.800 [0.760, 0.840] |" in text


def test_the_source_of_the_rows_is_named(tmp_path: Path) -> None:
    mixed = {"path": [{"path": "a.jsonl"}, {"path": "b.jsonl"}, {"path": "c.jsonl"}]}
    specs = {"rows.jsonl": {"name": "gsm8k", "path": "rows.jsonl"}, "a.jsonl and 2 more": mixed}
    for shown, spec in {**specs, "b.jsonl": {"path": [{"path": "b.jsonl"}]}}.items():
        assert shown in card(tmp_path, recipe={"dataset": spec}).text
    written = card(tmp_path, recipe={"dataset": {"name": "arithmetic"}})  # made here, and not on the hub
    assert ("`arithmetic`" in written.text, written.data.datasets) == (True, None)


def test_a_model_that_is_not_on_the_hub_is_not_linked(tmp_path: Path) -> None:
    (tmp_path / "mine" / "sft").mkdir(parents=True)
    for name in ("mine/sft", "a b/c", "x/y/z"):
        written = card(tmp_path / "run", directory=str(tmp_path), recipe={"model_name_or_path": name})
        assert written.data.base_model is None
        assert f"`{name.rpartition('/')[2]}`" in written.text


def test_an_absolute_path_is_cut_wherever_it_stands(tmp_path: Path) -> None:
    values = {
        "data/rows.jsonl": "data/rows.jsonl",
        "--config=/data/a=b.yaml": "--config=a=b.yaml",
        "see /home/ann/x.yaml, ~/y": "see x.yaml, y",
        ".": ".",
        "1/2 of </think> at https://a.b/c": "1/2 of </think> at https://a.b/c",
    }
    deep = {"path": ["/home/ann/x", 3, None], "rate": 0.5}
    text = card(tmp_path, recipe={"value": [*values], "deep": deep}, arguments=["--a=/home/ann/x.yaml"]).text
    assert recipe_in(text)["value"] == [*values.values()]
    assert recipe_in(text)["deep"] == {"path": ["x", 3, None], "rate": 0.5}
    assert "--a=x.yaml" in text


def test_a_card_is_named_by_its_folder_and_keeps_every_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = card(tmp_path / "my-run", recipe={"note": "größer", "resume_from_checkpoint": "last"})
    assert recipe_in(written.text)["note"] == "größer"
    assert "note: größer" in written.text
    assert "resume_from_checkpoint" not in written.text
    monkeypatch.chdir(tmp_path / "my-run")
    before = Path("README.md").read_bytes()
    write_model_card(Path())
    assert Path("README.md").read_bytes() == before
