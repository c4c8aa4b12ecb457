"""`grpo-recipes preview` as a user types it, on the quickstart's recipe and its untrained policy."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from trl.trainer.utils import RepeatSampler

from grpo_recipes import GRPOTrainer
from grpo_recipes.checks.checks import Machine
from grpo_recipes.cli import main
from grpo_recipes.data.load import load
from grpo_recipes.process.faults import RunFault
from grpo_recipes.recipe.recipe import parse_recipe
from grpo_recipes.recipe.specs import SamplingSpec
from grpo_recipes.run import preview, train
from grpo_recipes.run.inputs import build_inputs
from grpo_rewards import gsm8k_correctness, well_formed
from grpo_rewards.errors import UserError
from tests.support import launching, tiny
from tests.support.errors import refused
from tests.support.tool_rollouts import call

SHORT = ["--max_completion_length", "8", "--dataset.size", "40"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder, which a preview must leave empty."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def previewed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return the preview that `--json` prints, which must be all that it prints to standard output."""
    assert main(["preview", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def groups(found: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the completions of each prompt."""
    rows = found["completions"]
    return [[one for one in rows if one["prompt"] == number] for number in range(len(found["prompts"]))]


def test_prompts_and_scores_are_those_of_the_recipe(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, empty_folder: Path
) -> None:
    found = previewed(capsys, "quickstart", "--model_name_or_path", str(tiny_model), "--prompts", "3", *SHORT)
    spec = parse_recipe(["--config", "quickstart", *SHORT]).dataset
    rows = load(spec)
    order = list(RepeatSampler(rows, mini_repeat_count=8, batch_size=8, shuffle=True, seed=0))[: 3 * 8 : 8]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert len(found["prompts"]) == 3
    for index, shown, group in zip(order, found["prompts"], groups(found), strict=True):
        prompt = rows[index]["prompt"]
        assert shown == tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        assert group[0]["prompt_tokens"] == len(tokenizer(shown)["input_ids"])
        texts = [one["text"] for one in group]
        golds = [rows[index]["answer"]] * len(texts)
        correct = gsm8k_correctness(completions=texts, answer=golds)
        pay = {"gsm8k_correctness": correct, "well_formed": well_formed(completions=texts)}
        assert len(texts) == 8
        for place, one in enumerate(group):
            pays = [one[f"pay/{name}"] for name in pay]
            assert pays == [scores[place] for scores in pay.values()]
            assert one["total"] == sum(pays)
            assert one["said"]["gsm8k_correctness"]["gold"] == golds[0]
            assert 1 <= one["tokens"] <= 8
            assert one["cut"] or one["tokens"] < 8 or one["text"] == ""
    assert list(empty_folder.iterdir()) == []


@pytest.mark.slow
def test_the_completions_are_those_of_the_first_training_step(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    arguments = ["--model_name_or_path", str(tiny_model), *SHORT, "--temperature", "0.7", "--top_k", "9"]
    arguments += ["--per_device_train_batch_size", "16", "--rewards", f"{__name__}.letters"]
    arguments += ["--generation_kwargs.stop", "[a]"]
    found = previewed(capsys, "quickstart", *arguments, "--prompts", "2")
    run = ["--max_steps", "1", "--logging_steps", "1", "--log_completions", "true", "--output_dir", str(tmp_path)]
    assert train.main(["--config", "quickstart", *arguments, *run]) == 0
    trained = launching.completions(tmp_path)
    sampled = found["completions"]
    assert [one["text"] for one in sampled] == [turns[0]["content"] for turns in trained["completion"]]
    assert [one["total"] for one in sampled] == pytest.approx(list(trained["letters"]))
    (logged,) = [entry for entry in launching.log_history(tmp_path) if "frac_reward_zero_std" in entry]
    assert sum(one["cut"] for one in sampled) / 16 == pytest.approx(logged["completions/clipped_ratio"])
    assert sum(one["tokens"] for one in sampled) / 16 == pytest.approx(logged["completions/mean_length"])
    flat = [len({one["total"] for one in group}) == 1 for group in groups(found)]
    assert sum(flat) / 2 == pytest.approx(logged["frac_reward_zero_std"])


def test_preview_and_train_name_prefilled_for_a_chat_template_that_opens_the_thinking(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    with (model / "chat_template.jinja").open("a", encoding="utf-8") as file:
        file.write("{% if add_generation_prompt and enable_thinking is not false %}{{ '<think>\\n' }}{% endif %}")
    arguments = ["quickstart", "--model_name_or_path", str(model), *SHORT]
    inputs = build_inputs(parse_recipe(["--config", *arguments]), Machine.here())
    (note,) = inputs.checked.prompt_notes
    for figure in ("`<think>`", "`prefilled: think`", "gsm8k_correctness", "well_formed"):
        assert figure in note
    assert previewed(capsys, *arguments, "--prompts", "1")["findings"].count(note) == 1
    quiet = parse_recipe(["--config", *arguments, "--chat_template_kwargs.enable_thinking", "false"])
    assert build_inputs(quiet, Machine.here()).checked.prompt_notes == []


@pytest.mark.slow
def test_another_seed_gives_other_prompts_and_a_new_adapter_the_same_completions(
    capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    arguments = ["quickstart", "--model_name_or_path", str(tiny_model), "--prompts", "2", *SHORT]
    sampled, other = (previewed(capsys, *arguments, "--seed", seed) for seed in ("0", "1"))
    assert sampled["completions"] != other["completions"]
    adapted = previewed(capsys, *arguments, "--use_peft", "true", "--lora_target_modules", ".*q_proj", "--beta", "0.1")
    texts = [[one["text"] for one in found["completions"]] for found in (sampled, adapted)]
    assert texts[0] == texts[1]


def test_a_reward_that_raises_ends_in_one_line(capsys: pytest.CaptureFixture[str], tiny_model: Path) -> None:
    arguments = ["--model_name_or_path", str(tiny_model), "--rewards", f"{__name__}.raises", *SHORT]
    assert main(["preview", "quickstart", "--prompts", "1", *arguments]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: reward `raises` raised ZeroDivisionError")


def letters(completions: list[Any], **columns: Any) -> list[float]:
    return [float(len(set(turns[-1]["content"]))) for turns in completions]


def raises(completions: list[Any], **columns: Any) -> list[float]:
    raise ZeroDivisionError("no such luck")


REFUSED = [
    (["quickstart", "--prompts", "0"], "--prompts"),
    (["quickstart"], "runs/quickstart/policy-seed0"),
    (["offline-scored-gpt2"], "`offline`"),
    (["quickstart", "--num_generations", "7"], "`num_generations`"),
]


def test_what_training_refuses_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in REFUSED:
        assert main(["preview", *arguments]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1


def test_ctrl_c_ends_in_one_line(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch, empty_folder: Path
) -> None:
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("grpo_recipes.training.trainer.GRPOTrainer._generate", interrupt)
    assert main(["preview", "quickstart", "--model_name_or_path", str(tiny_model), *SHORT]) == 130
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "stopped by Ctrl-C\n")
    assert list(empty_folder.iterdir()) == []


@pytest.mark.slow
def test_more_prompts_than_a_generation_batch_holds_are_sampled_in_several(
    capsys: pytest.CaptureFixture[str], tiny_model: Path
) -> None:
    """A generation batch has 4 prompts in micro-batches of half a group. The prompts are those of one large batch."""
    model = ["quickstart", "--model_name_or_path", str(tiny_model), *SHORT]
    small = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "8"]
    found = previewed(capsys, *model, *small, "--prompts", "6", "--gradient_checkpointing", "true", "--beta", "0.1")
    at_once = previewed(capsys, *model, "--prompts", "6")
    assert found["prompts"] == at_once["prompts"]
    assert len(found["prompts"]) == 6


def test_a_generation_that_does_not_fit_ends_in_one_line(
    capsys: pytest.CaptureFixture[str], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("grpo_recipes.training.trainer.GRPOTrainer._generate_single_turn", fails)
    assert main(["preview", "quickstart", "--model_name_or_path", str(tiny_model), *SHORT]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert "CUDA out of memory" in last
    assert "`per_device_train_batch_size`" in last


def calls_once(text: str) -> str:
    """Repeat a text.

    Args:
        text: Text.
    """
    return f"{text}\x1b[31m {text}"


def test_a_completion_with_tools_is_shown_as_turns(
    capsys: pytest.CaptureFixture[str], tool_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last message alone would hide calls and results. A result must not steer the terminal."""
    called = call("calls_once", text="so")
    ids = tiny.chat_tokenizer()(f"{called}<|im_end|>")["input_ids"]
    monkeypatch.setattr(
        GRPOTrainer,
        "_generate_single_turn",
        lambda self, prompts, *rest, **more: ([ids if n % 2 else [65, 257] for n in range(len(prompts))], None),
    )
    arguments = ["calculator", "--model_name_or_path", str(tool_model), "--tools", f"[{__name__}.calls_once]"]
    arguments += ["--prompts", "1", "--bf16", "false", "--num_generations", "2", "--max_completion_length", "400"]
    arguments += ["--dataset.size", "40"]
    arguments += ["--max_tool_calling_iterations", "1", "--generation_check", "false"]
    plain, turns = (one["turns"] for one in previewed(capsys, *arguments)["completions"])
    assert plain == []
    assert [turn["kind"] for turn in turns] == ["call", "result", "text"]
    assert main(["preview", *arguments]) == 0
    said = capsys.readouterr().out
    assert said.count("calls_once") >= 2
    assert "\x1b" not in said


def test_the_sampling_recipe_has_one_process_and_the_batches_that_are_needed(tmp_path: Path) -> None:
    recipe = parse_recipe(["--config", "quickstart", "--num_generations", "6", "--per_device_train_batch_size", "8"])
    keys = dict.fromkeys(REMOVED, "given")
    recipe = replace(recipe, training={**recipe.training, **keys, "learning_rate": 0.5}, sampling=SamplingSpec())
    sampling = preview.sampling_recipe(recipe, together=2, batches=3, folder=tmp_path)
    assert sampling.sampling is None, "prompts are drawn in the order of an epoch"
    training = sampling.training
    # 12 rows in micro-batches of at most 8: of 6. Three batches of two micro-batches each.
    assert training["per_device_train_batch_size"] == 6
    assert (training["steps_per_generation"], training["gradient_accumulation_steps"]) == (2, 6)
    assert training["output_dir"] == str(tmp_path)
    assert training["learning_rate"] == 0.5
    assert not set(REMOVED) & set(training)
    assert (training["max_steps"], training["num_iterations"], training["report_to"]) == (1, 1, "none")
    assert (training["eval_strategy"], training["save_strategy"]) == ("no", "no")


REMOVED = ("deepspeed", "fsdp", "fsdp_config", "generation_batch_size", "resume_from_checkpoint", "push_to_hub",
           "log_completions_hub_repo", "load_best_model_at_end", "eval_on_start")  # fmt: skip
"""Keys of several processes, of evaluations, and of what a run writes, which a preview must not do."""


def test_an_error_of_the_sampling_is_one_line_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_API_KEY", "hunter2-and-more")
    recipe = parse_recipe(["--config", "quickstart"])
    with pytest.raises(RunFault, match=r"ValueError: no room for <hidden>"), preview._one_line_errors(recipe):
        raise ValueError("no\nroom for hunter2-and-more")
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert "hunter2" not in printed
    with refused("as it is"), preview._one_line_errors(recipe):
        raise UserError("as it is", "wrong", "mend it")
